"""The rows of each global batch, and the epoch of the dataset that they come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from ..data.keyed import rows_of
from ..data.stream_batches import StepSides
from ..data.wrapped import set_epoch


class SizedRow(int):
    """The number of a row whose image becomes a square of a ``side``, if a dataset and its collator know it."""

    side: int | None

    def __new__(cls, row: int, side: int | None = None) -> SizedRow:
        sized = super().__new__(cls, row)
        sized.side = side
        return sized


def windows_lacking(trained: int, batch: int, pairs: int) -> int:
    """The global batches of a whole pass over ``pairs`` that no longer fit into it after so many trained pairs."""
    return pairs // batch - max(0, pairs - trained) // batch


class WindowSampler(Sampler[int]):
    """The rows of an epoch in the order of its global batches, full batches only, reshuffled each epoch.

    The rows of a global batch depend only on the seed, the epoch and the size of the batch, not on how the batch is
    split over processes and accumulation steps. The rows left over differ from epoch to epoch.

    Args:
        dataset: a dataset with a length.
        global_batch_size: the number of rows of one optimizer step over all processes.
        shuffle: whether to shuffle; otherwise the rows keep the dataset's order, and an epoch begins with the row after
            the last one of the epoch before.
        seed: the seed of the shuffling.

    Raises:
        ValueError: the dataset has fewer rows than one global batch.
    """

    def __init__(self, dataset: Any, global_batch_size: int, *, shuffle: bool, seed: int) -> None:
        if len(dataset) < global_batch_size:
            raise ValueError(
                f"The training set has {len(dataset):,} pairs, fewer than one global batch of {global_batch_size:,} "
                "(per_device_train_batch_size × gradient_accumulation_steps × processes). Lower one of the three."
            )
        self._rows, self._shuffle, self._seed, self._epoch = len(dataset), shuffle, seed, 0
        self._length = self._rows // global_batch_size * global_batch_size
        self._batch, self._first_step = global_batch_size, 0
        self._begin, self._shift, self._earlier = 0, 0, 0
        self._sides: StepSides | None = None

    def __len__(self) -> int:
        return self._length

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def begin_at(self, epoch: int, rows: int, samples: int) -> int:
        """Lets a training go on that may have trained rows in global batches of other sizes.

        Args:
            epoch: the passes that were completed.
            rows: the rows of the next one that were trained.
            samples: all rows that were trained.

        Returns:
            The global batches that this pass lacks. The next one, as if they had been trained, begins after ``rows``.
        """
        lacking = windows_lacking(rows, self._batch, self._rows)
        self._begin, self._shift, self._earlier = epoch, rows - lacking * self._batch, samples - rows
        return lacking

    def set_sides(self, sides: StepSides | None, first_step: int) -> None:
        """Lets the rows of the next epochs be `SizedRow` with these sides; the epoch begins with this step."""
        self._sides, self._first_step = sides, first_step

    def __iter__(self) -> Iterator[int]:
        sides = self._sides
        if sides is None:
            return iter(self._order())
        steps = enumerate(self._order(), self._first_step * self._batch)
        return (SizedRow(row, sides.smaller_at(place // self._batch)) for place, row in steps)

    def _order(self) -> Iterable[int]:
        passes = self._epoch - self._begin
        if not self._shuffle:
            first = self._earlier + self._shift + passes * self._length
            return (row % self._rows for row in range(first, first + self._length))
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order = torch.randperm(self._rows, generator=generator)
        rows: list[int] = order.roll(0 if passes else -self._shift)[: self._length].tolist()
        return rows


class RowsOfEpoch(Dataset[Any]):
    """A dataset with a length whose epoch `begin_epoch` alone sets, in all workers of a loader.

    Workers that outlive an epoch (persistent_workers) hold a copy of the dataset, whose own ``set_epoch`` would not be
    called again. On the other hand, loaders of accelerate set the epoch of their dataset whenever they are iterated, so
    a look into one would change the epoch of a training. They find no method ``set_epoch`` here.

    Args:
        dataset: the dataset, of which this one has the rows.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._epoch = torch.full((), -1).share_memory_()  # -1 leaves the dataset's epoch as it is
        self._begun = -1

    def begin_epoch(self, epoch: int) -> None:
        """Sets the epoch of the dataset and of all that it wraps: here at once, in workers with the next row."""
        self._epoch.fill_(epoch)
        self._begun = epoch
        set_epoch(self.dataset, epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        self._follow()
        return self.dataset[row]

    def __getitems__(self, rows: list[int]) -> Any:
        self._follow()
        return rows_of(self.dataset, rows)

    def _follow(self) -> None:
        if (epoch := int(self._epoch)) != self._begun:
            self._begun = epoch
            set_epoch(self.dataset, epoch)
