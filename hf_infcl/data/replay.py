"""The micro-batches of a table, alone or with replay: a share of every global batch comes from an old training set.

New and old pairs are read micro-batch by micro-batch, and collated together. Which pairs a micro-batch gets depends
only on its number in the run, so the global batches are the same on any number of processes and accumulation steps.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info
from transformers.trainer_utils import has_length

from ..files.text import counted
from ..options.arguments import InfCLTrainingArguments
from . import ImageTextStream
from .collator import DataCollator
from .pairs import as_pair_id
from .store import SizedDataset, gives, has_epochs, keyed_rows, set_epoch
from .streams import MicroBatches, ReadItems, Share


class Epochs(NamedTuple):
    """Which windows of a training belong to which of its epochs, the passes over its (new) pairs.

    Windows go on from one pass into the next. The window that two passes share belongs to the first of them.
    """

    rows: int
    of_window: int  # the (new) pairs of a window

    def begin(self, epoch: int) -> int:
        """The first window of an epoch."""
        return -(-epoch * self.rows // self.of_window)

    def of(self, window: int) -> int:
        """The epoch of a window."""
        return window * self.of_window // self.rows

    def windows(self, epoch: int = 0) -> int:
        """The number of its windows; the first epoch has the most."""
        return self.begin(epoch + 1) - self.begin(epoch)

    def steps(self, epochs: float) -> int:
        """The windows that train all pairs of so many epochs."""
        return math.ceil(epochs * self.rows / self.of_window)


class TableRows(MicroBatches):
    """The micro-batches of a dataset with a length for one process.

    The rows of a global batch depend only on the seed and on its number, not on how it is split over processes and
    accumulation steps. Each pass has each row once. A global batch that the end of a pass does not fill goes on with
    the next pass, of which the rows that it already has come later. Where rows are skipped, each epoch (see
    `Epochs`) begins its pass anew, and the others come again instead, in the same order, so that no global batch has
    one twice: as many stay as a global batch has.

    Args:
        shuffle: whether each pass is shuffled anew; otherwise the rows keep the dataset's order.
        filled: the keys that the items lack, "pair_id" or "skipped", which then get values of their own.
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
        filled: Collection[str] = (),
        **where: Any,
    ) -> None:
        super().__init__(share, collate, **where)
        self._dataset, self._epochs = dataset, Epochs(len(dataset), share.of_batch)
        self._shuffle, self._seed, self._filled = shuffle, seed, filled
        self._pass, self._skipped_rows = (-1, torch.empty(0)), torch.empty(0)  # the first is the order needed last

    # ---- What was consumed ----

    def begin_at(self, position: int, skipped: Callable[[], torch.Tensor]) -> bool:
        consumed, rows = self._consumed, self._skipped_rows
        self._consumed, self._pass = position * self._share.micro_batches, (-1, torch.empty(0))
        if self._shuffle:
            self._skipped_rows = skipped()
        return self._consumed != consumed or not torch.equal(self._skipped_rows, rows)

    # ---- Reading ----

    def rows_at(self, places: Sequence[tuple[int, int]]) -> list[int]:
        numbers = {i: self._consumed + self._rank + i * self._world_size for i, _ in places}
        rows = {i: [row for _, part in self._rows(number) for row in part] for i, number in numbers.items()}
        return [rows[i][row] for i, row in places]

    def reader(self) -> ReadItems:
        # Several workers may read different passes at the same time, and the epoch of a dataset is in shared memory.
        dataset = copy.deepcopy(self._dataset) if get_worker_info() and has_epochs(self._dataset) else self._dataset
        return lambda number: (self._items(dataset, number), {})

    def _items(self, dataset: SizedDataset, number: int) -> list[Any]:
        items: list[Any] = []
        for epoch, rows in self._rows(number):
            set_epoch(dataset, epoch)
            several = getattr(dataset, "__getitems__", None)
            read = several(rows) if callable(several) else [dataset[row] for row in rows]
            if self._filled:
                pairs = "old pairs" if self._share.is_old else "new pairs"
                values = ({"pair_id": as_pair_id(f"row {row} of {pairs}"), "skipped": 0} for row in rows)
                read = [{**item, **{k: of[k] for k in self._filled}} for item, of in zip(read, values, strict=True)]
            items += keyed_rows(read, rows) if self._keyed else read
        return items

    def _rows(self, number: int) -> list[tuple[int, list[int]]]:
        """The rows of a micro-batch, in parts of one pass each, with the number of the pass."""
        window, pairs, (length, of_batch) = number // self._share.micro_batches, self._share.pairs(number), self._epochs
        if len(self._skipped_rows):
            epoch = self._epochs.of(window)
            order, first = self._order(epoch), (window - self._epochs.begin(epoch)) * of_batch
            return [(epoch, order[torch.arange(first + pairs.start, first + pairs.stop) % len(order)].tolist())]
        first, end = window * of_batch + pairs.start, window * of_batch + pairs.stop
        passes = range(first // length, -(-end // length))
        return [(one, self._order(one)[max(0, first - one * length) : end - one * length].tolist()) for one in passes]

    def _order(self, number: int) -> torch.Tensor:
        """The order of the rows of a pass, without those that are skipped."""
        length, of_batch = self._epochs
        known, order = self._pass
        if known == number:
            return order
        if len(self._skipped_rows):
            order = self._shuffled(number)
            out = self._skipped_rows[order]
            out &= out.cumsum(0) > of_batch - (~out).sum()
            order = order[~out]
        else:
            # Only the first rows of a pass have their places changed, so that those of the last ones of a long pass,
            # which the next one asks for, do not depend on earlier passes.
            first = 0 if length < 2 * of_batch else max(0, number - 1)
            if not first <= known < number:
                known, order = first, self._shuffled(first)
            for one in range(known + 1, number + 1):
                before, order = order, self._shuffled(one)
                if shared := one * length % of_batch:  # the rows of the pass before in the window of both
                    has = torch.isin(order[:of_batch], before[length - shared :])
                    order[:of_batch] = order[:of_batch][has.to(torch.uint8).argsort(stable=True)]
        self._pass = number, order
        return order

    def _shuffled(self, number: int) -> torch.Tensor:
        length = self._epochs.rows
        if not self._shuffle:
            return torch.arange(length)
        return torch.randperm(length, generator=torch.Generator().manual_seed(self._seed + number))


Source = SizedDataset | ImageTextStream  # of pairs, new or old
# Apart from the seeds of the new pairs' epochs, or sets of one length would always meet in pairs; torch uses 32 bits.
_SEED_OF_OLD = 2**31


class Replayed(IterableDataset[Any]):
    """New and old pairs as one training set, with the same number of old pairs in every global batch.

    That number is ``replay_share`` of the global batch, rounded to whole pairs. Epochs count the new pairs. The old
    ones are drawn in passes of their own, each of which shuffles them anew. No pair of a table is twice in a global
    batch; see `TableRows`.

    Args:
        new, old: an `ImageTextStream`, or any dataset with a length. If only one of them gives ids of its pairs, as a
            stream does, every pair of the other gets a unique id.
        args: the arguments of the training, which have the share and the batch.

    Raises:
        ValueError: a set has neither a length nor shards; the share gives no old or no new pairs, or more than a set
            has.
    """

    def __init__(self, new: Source, old: Source, args: InfCLTrainingArguments) -> None:
        self.datasets: list[Any] = [new, old]
        self._args = args
        self.check()

    @property
    def old(self) -> int:
        """The old pairs of a global batch."""
        share = self._args.replay_share
        return round(self._args.global_batch_size * (0.5 if share is None else share))

    def __len__(self) -> int:
        """The new and the old pairs of an epoch, which ends with the new pairs."""
        new, batch = self.datasets[0], self._args.global_batch_size
        return len(new) * batch // (batch - self.old)

    def __bool__(self) -> bool:
        return True  # without a length as well

    def __iter__(self) -> Iterator[Any]:
        """The items of the global batches without end, the new ones of each first."""
        for items, _ in self.batches(Share(self._args.global_batch_size, 1), list):
            yield from items

    def check(self) -> None:
        """Raises a ValueError for sets and a batch that cannot be mixed; see the class."""
        args, batch, old = self._args, self._args.global_batch_size, self.old
        if not 0 < old < batch:
            raise ValueError(
                f"replay_share={args.replay_share} of a global batch of {batch} pairs is {old} old pairs after "
                "rounding. A global batch needs old and new ones: choose another share or a larger batch."
            )
        for option, dataset in zip(("train_dataset", "replay_dataset"), self.datasets, strict=True):
            has_rows = has_length(dataset) and not isinstance(dataset, IterableDataset)
            if not has_rows and not isinstance(dataset, ImageTextStream):
                needed = f"With replay, {option} must be a dataset with a length or an ImageTextStream"
                raise ValueError(f"{needed}, got a {type(dataset).__name__}.")
        epochs_of(self, args)
        if not isinstance(self.datasets[1], ImageTextStream):
            _check_fills("replay", len(self.datasets[1]), old, batch)

    def batches(
        self, share: Share, collate: DataCollator, *, states: Sequence[Mapping[str, Any]] = (), **where: Any
    ) -> "MixedRows":
        """The micro-batches of one process; see `make_micro_batches` for the arguments."""
        self.check()
        parts: list[MicroBatches] = []
        for number, dataset in enumerate(self.datasets):
            of_part = Share(share.batch_size, share.micro_batches, self.old, is_old=number == 1)
            part_states = [state["parts"][number] for state in states]
            # Of these keys all items of a batch must have one or none.
            filled = [key for key in ("pair_id", "skipped") if gives(self, key) and not gives(dataset, key)]
            parts.append(make_micro_batches(dataset, of_part, list, self._args, filled, states=part_states, **where))
        return MixedRows(parts, share, collate, **where)


def is_own(dataset: object) -> bool:
    """Whether a training reads a dataset in micro-batches of this package, from any position, or with Trainer's loader.

    That is a dataset with a length, an `ImageTextStream` or a `Replayed`.
    """
    return isinstance(dataset, (ImageTextStream, Replayed)) or not isinstance(dataset, IterableDataset)


def epochs_of(dataset: Any, args: InfCLTrainingArguments) -> Epochs | None:
    """The epochs of a training; None if the first one has no end."""
    new, old = (dataset.datasets[0], dataset.old) if isinstance(dataset, Replayed) else (dataset, 0)
    if not has_length(new):
        return None
    size, rows = args.global_batch_size, len(new)
    _check_fills("training", rows, size - old, size)
    return Epochs(rows, size - old)


def _check_fills(name: str, rows: int, of_batch: int, batch: int) -> None:
    """Raises a ValueError if a pass over a set has fewer rows than a global batch takes from it."""
    if rows < of_batch:
        fits = 1 << max(0, (rows // 4).bit_length() - 1)  # with four steps in a pass, or more
        share, more = ("one", "") if of_batch == batch else (f"its {of_batch:,} of each", ", or change replay_share")
        raise ValueError(
            f"The {name} set has {counted(rows, 'pair')}, fewer than {share} global batch of {batch:,} pairs "
            "(global_batch_size, or per_device_train_batch_size × gradient_accumulation_steps × processes). Lower it, "
            f"such as to {fits}, or raise a stream's samples_per_epoch{more}."
        )


def make_micro_batches(
    dataset: Source | Replayed,
    share: Share,
    collate: DataCollator,
    args: InfCLTrainingArguments,
    filled: Collection[str] = (),
    *,
    states: Sequence[Mapping[str, Any]] = (),
    **where: Any,
) -> MicroBatches:
    """The micro-batches of one process.

    Args:
        filled: as for `TableRows`.
        states: the `state` of every process of the checkpoint to resume from, which streams need.
        **where: as for `MicroBatches`.
    """
    if isinstance(dataset, (ImageTextStream, Replayed)):
        return dataset.batches(share, collate, states=states, **where)
    shuffle = share.is_old or args.train_sampling_strategy == "random"
    seed = args.seed_of_data + share.is_old * _SEED_OF_OLD
    return TableRows(dataset, share, collate, shuffle=shuffle, seed=seed, filled=filled, **where)


class MixedRows(MicroBatches):
    """The micro-batches of new and old pairs for one process, the new ones first.

    A batch also gets ``new_images``, the number of new ones.

    Args:
        parts: the micro-batches of the new pairs and of the old pairs.
        share: the pairs of both.
        **where: as for `MicroBatches`.
    """

    def __init__(self, parts: Sequence[MicroBatches], share: Share, collate: DataCollator, **where: Any) -> None:
        super().__init__(share, collate, **where)
        self._parts = parts

    def reader(self) -> ReadItems:
        readers = [part.reader() for part in self._parts]

        def read(number: int) -> tuple[list[Any], dict[str, Any]]:
            (new, tag), (old, tag_of_old) = (read_part(number) for read_part in readers)
            return [*new, *old], {"parts": [tag, tag_of_old], "new_images": len(new)}

        return read

    def consume(self, tag: Mapping[str, Any]) -> None:
        super().consume(tag)
        for part, tag_of_part in zip(self._parts, tag["parts"], strict=True):
            part.consume(tag_of_part)

    def state(self) -> dict[str, Any]:
        return {"parts": [part.state() for part in self._parts]}

    def counts(self) -> dict[str, int]:
        """As `StreamBatches.counts`, with ``skipped`` and ``shards`` of streams only; and ``replayed`` samples."""
        new, old = (part.counts() for part in self._parts)
        both = {name: new.get(name, 0) + old.get(name, 0) for name in {**new, **old}}
        return {**both, "replayed": old["samples"]}
