"""Batches that several processes read in step, and the rows that each of them has found."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from .collectives import Processes, failures_announced

_PINNED = 2  # batches that lie ready in pinned memory


def gather_rows(tensors: Any) -> Any:
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
        dataloader: the loader.
        each: is given each batch when it is asked for, and returns what takes its place.
    """

    def __init__(self, dataloader: Any, each: Callable[[Any], Any]) -> None:
        self._dataloader, self._each = dataloader, each
        self._torch_loader: Any = getattr(dataloader, "base_dataloader", dataloader)  # accelerate's has one within
        self._begun: Any = None  # its iterator

    def begin(self) -> None:
        """Starts the workers of the next iteration, and does not wait for a batch of theirs."""
        with failures_announced():
            self._begun = iter(self._torch_loader)
        # Otherwise torch's thread would pin all batches that the workers have loaded ahead, and allocate memory for
        # each, of up to twice its size, because the sizes of pinned blocks are powers of two.
        if isinstance(ready := getattr(self._begun, "_data_queue", None), queue.Queue):
            ready.maxsize = _PINNED

    def __iter__(self) -> Iterator[Any]:
        if self._begun is None:
            self.begin()
        batches, self._begun = self._begun, None
        with failures_announced():
            if self._torch_loader is not self._dataloader:
                batches = self._moved(batches)
            batch = next(batches, None)
        while batch is not None:
            yield self._each(batch)
            with failures_announced():
                batch = next(batches, None)

    def _moved(self, begun: Iterator[Any]) -> Iterator[Any]:
        """The batches of accelerate's loader, which moves those of torch's iterator to the device."""
        # It would start other workers, by calling this method, when it is asked for its first batch.
        self._torch_loader.__iter__ = lambda: begun
        try:
            batches = iter(self._dataloader)
            first = next(batches, None)
        finally:
            del self._torch_loader.__iter__
        return iter(()) if first is None else chain([first], batches)

    def __len__(self) -> int:
        return len(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataloader, name)
