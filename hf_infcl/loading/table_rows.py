"""The micro-batches of a dataset with a length: alone, or as the new or the old pairs of a replay."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import get_worker_info

from ..data.collator import DataCollator
from ..data.keyed import SizedDataset, keyed_rows, read_rows
from ..data.stream_batches import MicroBatches
from .batch_plan import MicroBatchPlace, Position
from .shares import SourceShare
from .wrapped import has_epochs, set_epoch


class TableRows(MicroBatches):
    """The micro-batches of a dataset with a length for one process.

    The rows of a global batch depend only on the seed, the pass and the rows of the pass before it, not on how it is
    split over processes and accumulation steps. A pass ends where the next global batch does not fit in. The rows left
    over differ from pass to pass. Where rows are passed over, the others come again instead, in the same order, so that
    no global batch has one twice: as many stay as the largest batch has.

    Args:
        shuffle: whether each pass is shuffled anew; otherwise the rows keep the dataset's order, and a pass begins with
            the row after the last one of the pass before.
        rank, world_size, num_workers, keyed: as for `StreamBatches`.
        filled: makes values of keys that the items lack, from words for the place of a row.
        state: in a replay, the `state` in the checkpoint to resume from, as any process wrote it.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        share: SourceShare,
        collate: DataCollator,
        *,
        shuffle: bool,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        keyed: bool = False,
        filled: Mapping[str, Callable[[str], object]] | None = None,
        state: Mapping[str, int] | None = None,
    ) -> None:
        self._shares: SourceShare = share
        self._dataset, self._collate, self._keyed = dataset, collate, keyed
        self._shuffle, self._seed, self._filled = shuffle, seed, filled or {}
        self._rank, self._world_size, self._workers = rank, world_size, max(1, num_workers)
        self._pass, self._passed_over = (-1, torch.empty(0)), torch.empty(0)  # the first is the order needed last
        self._begins: dict[int, Position] = {}  # of the sections of the plan, by their first micro-batches
        at = share.plan.begin
        if state is not None:
            at = Position(samples=state["samples"], epoch=state["pass"], rows=state["rows"])
        for section in share.plan.sections:
            self._begins[section.first] = at
            at = self._after(at, share.of_batch(section.size), section.steps)
        self._end = at

    def _after(self, at: Position, size: int, steps: int) -> Position:
        """The passes, rows and samples of this table after steps with ``size`` rows each, where one more step fits."""
        length, samples = len(self._dataset), at.samples + steps * size
        if steps < (fit := (length - at.rows) // size):
            return Position(samples=samples, epoch=at.epoch, rows=at.rows + steps * size)
        passes, left = divmod(steps - fit, length // size)
        return Position(samples=samples, epoch=at.epoch + 1 + passes, rows=left * size)

    def _at(self, place: MicroBatchPlace) -> Position:
        """The passes, rows and samples of this table before the step of a micro-batch."""
        section = place.section
        steps = place.at.step - section.begin.step
        return self._after(self._begins[section.first], self._shares.of_batch(section.size), steps)

    # ---- What was consumed ----

    def begin_at(self, epoch: int, windows: int) -> bool:
        """Goes to a global batch of a pass, unless the batch grows or this is a part of a replay."""
        plan = self._shares.plan
        if plan.grows or not self._shares.is_alone:
            return False
        first, before = plan.first(), self._consumed
        ahead = (epoch - first.epoch) * plan.windows(first.epoch) + windows - first.windows
        self._consumed = ahead * self._shares.micro_batches
        return self._consumed != before

    def pass_over(self, rows: Callable[[], torch.Tensor]) -> bool:
        before, self._pass = self._passed_over, (-1, torch.empty(0))
        self._passed_over = rows() if self._shuffle and self._shares.is_alone else before
        return not torch.equal(self._passed_over, before)

    def consume(self, tag: Mapping[str, object]) -> None:
        self._consumed += self._world_size

    def state(self) -> dict[str, int] | None:
        """In a replay, the position between two global batches, equal on all processes; else the plan knows it."""
        if self._shares.is_alone:
            return None
        plan = self._shares.plan
        place = plan.place(self._consumed)
        at = self._end if place is None else self._at(place)
        step = plan.begin.step + plan.steps_after(self._consumed)
        return {"samples": at.samples, "windows": step, "pass": at.epoch, "rows": at.rows}

    def counts(self) -> dict[str, int]:
        """In a replay, ``samples``: on rank 0 what all processes consumed since the run began, on other ranks 0."""
        state = self.state()
        return {} if state is None else {"samples": state["samples"] if self._rank == 0 else 0}

    # ---- Reading ----

    def rows_at(self, places: Sequence[tuple[int, int]]) -> list[int]:
        if not self._shares.is_alone:
            return []
        rows = [(self._shares.plan.place(self._consumed + self._rank + i * self._world_size), row) for i, row in places]
        return [self._rows(place)[row] for place, row in rows if place is not None]

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        info = get_worker_info()
        # Several workers may read different passes at the same time, and the epoch of a dataset is in shared memory.
        dataset = copy.deepcopy(self._dataset) if info and has_epochs(self._dataset) else self._dataset
        first = self._consumed + (info.id if info else 0) * self._world_size + self._rank
        for number in itertools.count(first, self._workers * self._world_size):
            if (place := self._shares.plan.place(number)) is None:
                return
            began = time.perf_counter()
            batch = self._collate(self._items(dataset, place))
            yield batch, {"seconds": time.perf_counter() - began, "pairs": place.section.micro_batch}

    def _items(self, dataset: SizedDataset, place: MicroBatchPlace) -> list[Any]:
        rows = self._rows(place)
        set_epoch(dataset, self._at(place).epoch)
        items = read_rows(dataset, rows)
        for key, make in self._filled.items():
            places = (f"row {row} of {self._shares.kind} pairs" for row in rows)
            items = [{**item, key: make(place)} for item, place in zip(items, places, strict=True)]
        return keyed_rows(items, rows) if self._keyed else items

    def _rows(self, place: MicroBatchPlace) -> list[int]:
        at, pairs, length = self._at(place), self._shares.pairs(place), len(self._dataset)
        if not self._shuffle:
            return [(at.samples + pair) % length for pair in pairs]
        if self._pass[0] != at.epoch:
            order = torch.randperm(length, generator=torch.Generator().manual_seed(self._seed + at.epoch))
            if len(self._passed_over):
                out = self._passed_over[order]
                out &= out.cumsum(0) > self._shares.plan.largest - (~out).sum()
                order = order[~out][torch.arange(length) % (~out).sum()]
            self._pass = at.epoch, order
        rows: list[int] = self._pass[1][at.rows + pairs.start : at.rows + pairs.stop].tolist()
        return rows
