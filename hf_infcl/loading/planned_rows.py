"""The micro-batches of a dataset with a length in a training whose global batch grows."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..data.keyed import rows_of
from ..data.stream_batches import StepSides
from ..data.wrapped import has_epochs, set_epoch
from .batch_plan import BatchPlan, MicroBatchPlace
from .sampling import SizedRow


class PlannedRows(IterableDataset[tuple[Any, dict[str, Any]]]):
    """The micro-batches of one process, up to the end of the plan; see `StreamBatches`, whose methods these are.

    The rows of a pass have the order of `WindowSampler`, whatever the global batches.

    Args:
        dataset: has a length.
        plan: of the training, also where it resumes.
        collate: turns a list of items into a batch.
        shuffle, seed: as for `WindowSampler`.
        rank, world_size, num_workers: as for `StreamBatches`.
    """

    def __init__(
        self,
        dataset: Any,
        plan: BatchPlan,
        collate: Callable[[list[Any]], Any],
        *,
        shuffle: bool,
        seed: int,
        rank: int,
        world_size: int,
        num_workers: int,
    ) -> None:
        self._dataset, self._plan, self._collate = dataset, plan, collate
        self._shuffle, self._seed = shuffle, seed
        self._rank, self._world_size, self._workers = rank, world_size, max(1, num_workers)
        self._consumed = 0  # micro-batches of this training, of all processes
        self._sides: StepSides | None = None
        self._pass: tuple[int, torch.Tensor] = (-1, torch.empty(0))  # the pass whose order was needed last

    def set_sides(self, sides: StepSides | None, step: int) -> None:
        self._sides = sides

    def consume(self, tag: Mapping[str, Any]) -> None:
        self._consumed += self._world_size

    def state(self) -> None:
        """Nothing: the plan knows the position after each step."""

    def counts(self) -> dict[str, int]:
        """Nothing, for the same reason."""
        return {}

    def rows_at(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """The rows of the dataset at (micro-batch, row) of this process after the consumed ones."""
        found = [(self._plan.place(self._consumed + self._rank + i * self._world_size), row) for i, row in places]
        return [self._rows(place)[row] for place, row in found if place is not None]

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        info = get_worker_info()
        # Several workers may read different passes at the same time, and the epoch of a dataset is in shared memory.
        dataset = copy.deepcopy(self._dataset) if info and has_epochs(self._dataset) else self._dataset
        first = self._consumed + (info.id if info else 0) * self._world_size + self._rank
        for number in itertools.count(first, self._workers * self._world_size):
            if (place := self._plan.place(number)) is None:
                return
            began = time.perf_counter()
            rows = self._rows(place)
            if self._sides is not None:
                side = self._sides.smaller_at(place.at.step)
                rows = [SizedRow(row, side) for row in rows]
            set_epoch(dataset, place.at.epoch)
            batch = self._collate(rows_of(dataset, rows))
            yield batch, {"seconds": time.perf_counter() - began, "pairs": len(rows)}

    def _rows(self, place: MicroBatchPlace) -> list[int]:
        length = len(self._dataset)
        if not self._shuffle:
            # A pass begins with the row after the last one of the pass before.
            first = place.at.samples - place.at.rows
            return [(first + row) % length for row in place.rows]
        if self._pass[0] != place.at.epoch:
            generator = torch.Generator().manual_seed(self._seed + place.at.epoch)
            self._pass = place.at.epoch, torch.randperm(length, generator=generator)
        rows: list[int] = self._pass[1][place.rows.start : place.rows.stop].tolist()
        return rows
