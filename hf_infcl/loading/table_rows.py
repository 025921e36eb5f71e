"""The micro-batches of a dataset with a length: alone, or as the new or the old pairs of a replay."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import get_worker_info

from ..data.collator import DataCollator
from ..data.keyed import SizedDataset, keyed_rows, read_rows
from ..data.stream_batches import MicroBatches, ReadItems, Share
from .wrapped import has_epochs, set_epoch


class TableRows(MicroBatches):
    """The micro-batches of a dataset with a length for one process.

    The rows of a global batch depend only on the seed and on its number, not on how it is split over processes and
    accumulation steps. A pass ends where the next global batch does not fit in. The rows left over differ from pass to
    pass. Where rows are skipped, the others come again instead, in the same order, so that no global batch has one
    twice: as many stay as a global batch has.

    Args:
        shuffle: whether each pass is shuffled anew; otherwise the rows keep the dataset's order, and a pass begins with
            the row after the last one of the pass before.
        filled: makes values of keys that the items lack, from words for the place of a row.
        position: the global batches before the first one that is read.
        **where: as for `MicroBatches`; a key is the number of a row.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        share: Share,
        collate: DataCollator,
        *,
        shuffle: bool,
        seed: int,
        filled: Mapping[str, Callable[[str], object]] | None = None,
        position: int = 0,
        **where: Any,
    ) -> None:
        super().__init__(share, collate, **where)
        self._dataset, self._consumed = dataset, position * share.micro_batches
        self._shuffle, self._seed, self._filled = shuffle, seed, filled or {}
        self._pass, self._skipped_rows = (-1, torch.empty(0)), torch.empty(0)  # the first is the order needed last

    # ---- What was consumed ----

    def begin_at(self, position: int) -> bool:
        before, self._consumed = self._consumed, position * self._share.micro_batches
        return self._consumed != before

    def skip_rows(self, rows: Callable[[], torch.Tensor]) -> bool:
        before, self._pass = self._skipped_rows, (-1, torch.empty(0))
        self._skipped_rows = rows() if self._shuffle else before
        return not torch.equal(self._skipped_rows, before)

    def counts(self) -> dict[str, int]:
        """``samples``: on rank 0 what all processes consumed since the run began, on other ranks 0."""
        return {"samples": self.position * self._share.of_batch if self._rank == 0 else 0}

    # ---- Reading ----

    def rows_at(self, places: Sequence[tuple[int, int]]) -> list[int]:
        return [self._rows(self._consumed + self._rank + i * self._world_size)[row] for i, row in places]

    def reader(self) -> ReadItems:
        # Several workers may read different passes at the same time, and the epoch of a dataset is in shared memory.
        dataset = copy.deepcopy(self._dataset) if get_worker_info() and has_epochs(self._dataset) else self._dataset
        return lambda number: (self._items(dataset, number), {})

    def _items(self, dataset: SizedDataset, number: int) -> list[Any]:
        rows, (epoch, _) = self._rows(number), self._place(number)
        set_epoch(dataset, epoch)
        items = read_rows(dataset, rows)
        for key, make in self._filled.items():
            places = (f"row {row} of {'old' if self._share.is_old else 'new'} pairs" for row in rows)
            items = [{**item, key: make(place)} for item, place in zip(items, places, strict=True)]
        return keyed_rows(items, rows) if self._keyed else items

    def _place(self, number: int) -> tuple[int, int]:
        """The pass of a micro-batch, and the global batches of the pass before its own."""
        return divmod(number // self._share.micro_batches, len(self._dataset) // self._share.of_batch)

    def _rows(self, number: int) -> list[int]:
        pairs, length, of_batch = self._share.pairs(number), len(self._dataset), self._share.of_batch
        if not self._shuffle:
            first = number // self._share.micro_batches * of_batch
            return [(first + pair) % length for pair in pairs]
        epoch, window = self._place(number)
        if self._pass[0] != epoch:
            order = torch.randperm(length, generator=torch.Generator().manual_seed(self._seed + epoch))
            if len(self._skipped_rows):
                out = self._skipped_rows[order]
                out &= out.cumsum(0) > of_batch - (~out).sum()
                order = order[~out][torch.arange(length) % (~out).sum()]
            self._pass = epoch, order
        rows: list[int] = self._pass[1][window * of_batch :][pairs.start : pairs.stop].tolist()
        return rows
