"""Batches that several processes read in step, and the rows that each of them has found."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from .collectives import Processes, failures_announced

_PINNED = 2  # batches that lie ready in pinned memory


def gather_rows(tensors: object) -> Any:
    """Gathers the rows of all processes, in the order of the ranks, for one tensor or a tuple of tensors.

    Args:
        tensors: [n, ...] each; n may differ between the processes and may be 0.

    Raises:
        OtherRankFailedError: on every process, if one of them announced a failure instead.
    """
    processes = Processes()
    if processes.world_size == 1:
        return tensors
    several = tensors if isinstance(tensors, tuple) else (tensors,)
    numbers = processes.agree([len(tensor) for tensor in several])  # [world_size][tensors]
    gathered = []
    for index, tensor in enumerate(several):
        rows = [int(lengths[index]) for lengths in numbers]
        padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        blocks = processes.gather(padded)
        gathered.append(torch.cat([block[:n] for block, n in zip(blocks, rows, strict=True)]))
    return tuple(gathered) if isinstance(tensors, tuple) else gathered[0]


class AnnouncingDataLoader:
    """A data loader that announces its errors to all processes; each process calls `Processes.agree` once per batch.

    Args:
        dataloader: torch's or accelerate's loader.
        each: is given each batch when it is asked for, and returns what takes its place.
    """

    def __init__(self, dataloader: Any, each: Callable[[Any], Any]) -> None:
        self._dataloader, self._each = dataloader, each
        self._is_of_accelerate = hasattr(dataloader, "base_dataloader")  # it has torch's within
        self._workers = _EarlyLoader(dataloader.base_dataloader if self._is_of_accelerate else dataloader)

    def begin(self) -> None:
        """Starts the workers of the next iteration, and does not wait for a batch of theirs.

        Workers that need random numbers in common start when the first batch is asked for.
        """
        with failures_announced():
            if self._is_of_accelerate:
                if self._dataloader.rng_types:  # accelerate first makes all processes shuffle alike
                    return
                self._dataloader.set_epoch(self._dataloader.iteration)  # as accelerate does for the first batch
            self._workers.begin()

    def __iter__(self) -> Iterator[Any]:
        batches = self._on_device() if self._is_of_accelerate else iter(self._workers)
        while True:
            with failures_announced():
                batch = next(batches, None)
            if batch is None:
                return
            yield self._each(batch)

    def _on_device(self) -> Iterator[Any]:
        """The batches of accelerate's loader, which moves those of the workers to the device."""
        torch_loader, self._dataloader.base_dataloader = self._dataloader.base_dataloader, self._workers
        try:
            yield from self._dataloader
        finally:
            self._dataloader.base_dataloader = torch_loader

    def __len__(self) -> int:
        return len(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataloader, name)


class _EarlyLoader:
    """A loader of torch whose workers can be started before it is iterated over."""

    def __init__(self, loader: DataLoader[object]) -> None:
        self._loader = loader
        self._begun: Iterator[Any] | None = None

    def begin(self) -> None:
        self._begun = iter(self._loader)
        # Otherwise torch's thread would pin all batches that the workers have loaded ahead, and allocate memory for
        # each, of up to twice its size, because the sizes of pinned blocks are powers of two. There is no option for
        # this, so the queue into which it puts them is bounded.
        if isinstance(ready := getattr(self._begun, "_data_queue", None), queue.Queue):
            ready.maxsize = _PINNED

    def __iter__(self) -> Iterator[Any]:
        if self._begun is None:
            self.begin()
        begun, self._begun = self._begun, None
        assert begun is not None
        return begun

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
