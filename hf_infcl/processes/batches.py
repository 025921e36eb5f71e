"""Batches that several processes read in step, and the rows that each of them has found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from .collectives import Processes, failures_announced


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
        self._begun: Iterator[Any] | None = None

    def begin(self) -> None:
        """Reads the first batch, with which the next iteration begins; workers go on with those that follow."""
        with failures_announced():
            batches = iter(self._dataloader)
            first = next(batches, None)
        self._begun = batches if first is None else chain([first], batches)

    def __iter__(self) -> Iterator[Any]:
        with failures_announced():
            batches = iter(self._dataloader) if self._begun is None else self._begun
        self._begun = None
        while True:
            with failures_announced():
                batch = next(batches, None)
            if batch is None:
                return
            yield self._each(batch)

    def __len__(self) -> int:
        return len(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataloader, name)
