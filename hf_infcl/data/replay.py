"""The micro-batches of a dataset with a length: alone, or as the new or the old pairs of a replay.

Replay: a share of the pairs of every global batch comes from an old training set, so that it is not forgotten.

New and old pairs are read micro-batch by micro-batch, and collated together. Which pairs a micro-batch gets depends
only on its number in the run, so the global batches are the same on any number of processes and accumulation steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from transformers.trainer_utils import has_length

from ..files.text import counted
from ..options.arguments import InfCLTrainingArguments
from . import ImageTextStream
from .collator import DataCollator
from .pairs import as_pair_id
from .store import SizedDataset, gives, has_epochs, keyed_rows, set_epoch
from .stream_batches import MicroBatches, ReadItems, Share


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
        several = getattr(dataset, "__getitems__", None)
        items = several(rows) if callable(several) else [dataset[row] for row in rows]
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


Source = SizedDataset | ImageTextStream  # of pairs, new or old
# Apart from the seeds of the new pairs' epochs, or sets of one length would always meet in pairs; torch uses 32 bits.
_SEED_OF_OLD = 2**31


def _none_skipped(place: str) -> int:
    return 0


# Keys that all items of a batch must have or none, and the values that a table without them gets. Workers that are not
# forked get these functions by their names.
_FILLED: dict[str, Callable[[str], object]] = {"pair_id": as_pair_id, "skipped": _none_skipped}


class Replayed(IterableDataset[Any]):
    """New and old pairs as one training set, with the same number of old pairs in every global batch.

    That number is ``replay_share`` of the global batch, rounded to whole pairs. Epochs count the new pairs. The old
    ones are drawn in passes of their own, each of which shuffles them anew. Of a table, the rows left over at the end
    of a pass or an epoch wait for the next one, so no pair is twice in a global batch.

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
    def parts(self) -> dict[str, Any]:
        """The new pairs and the old ones by what messages call them."""
        return dict(zip(("training set", "replayed set"), self.datasets, strict=True))

    @property
    def old(self) -> int:
        """The old pairs of a global batch."""
        share = self._args.replay_share
        return round(self._args.global_batch_size * (0.5 if share is None else share))

    def __len__(self) -> int:
        """The new and the old pairs of an epoch, which ends with the new pairs."""
        new, batch = self.datasets[0], self._args.global_batch_size
        return len(new) // (batch - self.old) * batch

    def __bool__(self) -> bool:
        return True  # without a length as well

    def __iter__(self) -> Iterator[Any]:
        """The items of the global batches without end, the new ones of each first."""
        for items, _ in self.batches(self._args.global_batch_size, 1, list):
            yield from items

    def check(self) -> None:
        """Raises a ValueError for sets and a batch that cannot be mixed; see the class."""
        args, batch, old = self._args, self._args.global_batch_size, self.old
        if not 0 < old < batch:
            raise ValueError(
                f"replay_share={args.replay_share} of a global batch of {batch} pairs is {old} old pairs after "
                "rounding. A global batch needs old and new ones: choose another share or a larger batch."
            )
        for name, option, dataset, pairs in (
            ("training", "train_dataset", self.datasets[0], batch - old),
            ("replay", "replay_dataset", self.datasets[1], old),
        ):
            is_stream = isinstance(dataset, ImageTextStream)
            if is_stream and (name == "replay" or not has_length(dataset)):
                continue
            if not is_stream and (isinstance(dataset, IterableDataset) or not has_length(dataset)):
                raise ValueError(
                    f"With replay, {option} must be a dataset with a length or an ImageTextStream, got a "
                    f"{type(dataset).__name__}."
                )
            if len(dataset) < pairs:
                raise ValueError(
                    f"The {name} set has {counted(len(dataset), 'pair')}, fewer than its {pairs:,} of each global "
                    f"batch of {batch:,} pairs, of which {old / batch:.3g} are old (replay_share). Lower the batch, or "
                    "change the share."
                )

    def batches(
        self,
        batch_size: int,
        micro_batches: int,
        collate: DataCollator,
        *,
        position: int = 0,
        states: Sequence[Mapping[str, Any]] = (),
        **where: Any,
    ) -> MixedRows:
        """The micro-batches of one process; see `Share` and `make_micro_batches` for the arguments."""
        self.check()
        parts: list[MicroBatches] = []
        for number, dataset in enumerate(self.datasets):
            share = Share(batch_size, micro_batches, self.old, is_old=number == 1)
            part_states = [state["parts"][number] for state in states]
            filled = {key: make for key, make in _FILLED.items() if gives(self, key) and not gives(dataset, key)}
            parts.append(
                make_micro_batches(
                    dataset, share, list, self._args, filled, position=position, states=part_states, **where
                )
            )
        return MixedRows(parts, Share(batch_size, micro_batches), collate, position=position, **where)


def is_own(dataset: object) -> bool:
    """Whether a training reads a dataset in micro-batches of this package, from any position, or with Trainer's loader.

    That is a dataset with a length, an `ImageTextStream` or a `Replayed`.
    """
    return isinstance(dataset, (ImageTextStream, Replayed)) or not isinstance(dataset, IterableDataset)


def windows_of_epoch(dataset: Any, args: InfCLTrainingArguments) -> int | None:
    """The global batches of an epoch; None if it has no end."""
    new, old = (dataset.datasets[0], dataset.old) if isinstance(dataset, Replayed) else (dataset, 0)
    if not has_length(new):
        return None
    size, rows = args.global_batch_size, len(new)
    if size - old > rows:
        fits = 1 << max(0, (rows // 4).bit_length() - 1)  # with four steps in a pass, or more
        raise ValueError(
            f"A pass over the training set has {counted(rows, 'pair')}, fewer than one global batch of {size:,}"
            f"{f', of which {size - old:,} are new' if old else ''} (global_batch_size, or per_device_train_batch_size "
            f"× gradient_accumulation_steps × processes). Lower it, for example to {fits}, use more data, or raise "
            "samples_per_epoch of a stream."
        )
    return rows // (size - old)


def make_micro_batches(
    dataset: Source,
    share: Share,
    collate: DataCollator,
    args: InfCLTrainingArguments,
    filled: Mapping[str, Callable[[str], object]] | None = None,
    *,
    position: int = 0,
    states: Sequence[Mapping[str, Any]] = (),
    **where: Any,
) -> MicroBatches:
    """The micro-batches of one process from a table or an `ImageTextStream`.

    Args:
        filled: as for `TableRows`.
        position: the global batches before the first one that is read, which a table needs.
        states: the `state` of every process of the checkpoint to resume from, which a stream needs.
        **where: ``rank``, ``world_size``, ``num_workers`` and ``keyed``.
    """
    if isinstance(dataset, ImageTextStream):
        return dataset.batches(share, collate, states=states, **where)
    return TableRows(
        dataset,
        share,
        collate,
        shuffle=share.is_old or args.train_sampling_strategy == "random",
        seed=args.seed_of_data + share.is_old * _SEED_OF_OLD,
        filled=filled,
        position=position,
        **where,
    )


class MixedRows(MicroBatches):
    """The micro-batches of new and old pairs for one process, the new ones first.

    A batch also gets ``new_images``, the number of new ones.

    Args:
        parts: the micro-batches of the new pairs and of the old pairs.
        share: the pairs of both.
        position, **where: as for `make_micro_batches`.
    """

    def __init__(
        self, parts: Sequence[MicroBatches], share: Share, collate: DataCollator, *, position: int = 0, **where: Any
    ) -> None:
        super().__init__(share, collate, **where)
        self._parts, self._consumed = parts, position * share.micro_batches

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
