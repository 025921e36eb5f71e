"""Replay: a share of the pairs of every global batch comes from an old training set, so that it is not forgotten.

New and old pairs are read micro-batch by micro-batch, and collated together. Which pairs a micro-batch gets depends
only on its number in the run, so the global batches are the same on any number of processes and accumulation steps.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from transformers.trainer_utils import has_length

from ..data import ImageTextStream
from ..data.keyed import keyed_rows, rows_of
from ..data.pairs import as_pair_id
from ..data.stream_batches import Share, StepSides
from ..data.wrapped import gives, has_epochs, set_epoch
from ..options.arguments import InfCLTrainingArguments
from .sampling import SizedRow, WindowSampler

DEFAULT_SHARE = 0.5
# Apart from the seeds of the new pairs' epochs, or sets of one length would always meet in pairs; torch uses 32 bits.
_SEED_OF_OLD = 2**31
# What all items of a batch must have if some have it, and what those of a table without it get.
_FILLED: dict[str, Callable[[str], Any]] = {"pair_id": as_pair_id, "skipped": lambda place: 0}

Items = list[Any]
Tag = dict[str, Any]


class Replayed(IterableDataset[Any]):
    """New and old pairs as one training set, with the same number of old pairs in every global batch.

    That number is ``replay_share`` of the global batch, rounded to whole pairs. Epochs count the new pairs. The old
    ones are drawn in passes of their own, each of which shuffles them anew. Of a table, the rows left over at the end
    of a pass or an epoch wait for the next one, so no pair is twice in a global batch.

    Args:
        new, old: an `ImageTextStream`, or any dataset with a length. If only one of them gives ids of its pairs, as a
            stream does, every pair of the other gets an id of its own.
        args: the arguments of the training, which have the share and the batch.

    Attributes:
        datasets: the new pairs and the old ones.

    Raises:
        ValueError: a set has neither a length nor shards; the share gives no old or no new pairs, or more than a set
            has; with ``replay_as="own"``, the processes cannot have equally many old pairs.
    """

    def __init__(self, new: Any, old: Any, args: InfCLTrainingArguments) -> None:
        self.datasets, self._args = [new, old], args
        self.check()

    @property
    def parts(self) -> dict[str, Any]:
        """The new pairs and the old ones by what messages call them."""
        return dict(zip(("training set", "replayed set"), self.datasets, strict=True))

    @property
    def old(self) -> int:
        """The old pairs of a global batch."""
        share = self._args.replay_share
        return round(self._args.global_batch_size * (DEFAULT_SHARE if share is None else share))

    @property
    def share(self) -> float:
        """The old pairs' exact share of a global batch."""
        return self.old / self._args.global_batch_size

    @property
    def samples_per_epoch(self) -> int | None:
        """The new and the old pairs of an epoch, which ends with the new pairs; None if these are without end."""
        batch = self._args.global_batch_size
        return None if self.pairs_of_pass is None else self.pairs_of_pass // batch * batch

    @property
    def pairs_of_pass(self) -> int | None:
        """The same, with those that fill no global batch."""
        new, batch = self.datasets[0], self._args.global_batch_size
        return len(new) * batch // (batch - self.old) if has_length(new) else None

    def __len__(self) -> int:
        if (samples := self.samples_per_epoch) is None:
            raise TypeError("A stream without samples_per_epoch has no length.")
        return samples

    def __bool__(self) -> bool:
        return True  # without a length as well

    def __iter__(self) -> Iterator[Any]:
        """The items of the global batches without end, the new ones of each first."""
        for items, _ in self.batches(self._args.global_batch_size, list):
            yield from items

    def with_datasets(self, datasets: Sequence[Any]) -> Replayed:
        """The same mixture of other datasets, such as cached features of these."""
        new, old = datasets
        return Replayed(new, old, self._args)

    def check(self) -> None:
        """Raises a ValueError for sets and a batch that cannot be mixed; see the class."""
        args, batch = self._args, self._args.global_batch_size
        if not 0 < self.old < batch:
            raise ValueError(
                f"replay_share={args.replay_share} of a global batch of {batch} pairs is {self.old} old pairs after "
                "rounding. A global batch needs old and new ones: choose another share or a larger batch."
            )
        for name, option, dataset, pairs in (
            ("training", "train_dataset", self.datasets[0], batch - self.old),
            ("replay", "replay_dataset", self.datasets[1], self.old),
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
                    f"The {name} set has {len(dataset):,} pairs, fewer than its {pairs:,} of each global batch of "
                    f"{batch:,} pairs, of which {self.share:.3g} are old (replay_share). Lower the batch, or change "
                    "the share."
                )
        if args.replay_as == "own" and self.old % args.world_size:
            raise ValueError(
                f"replay_as='own' needs equally many old pairs on each process, but the {self.old} of a global batch "
                f"are not a multiple of {args.world_size} processes. Choose another replay_share, or 'negatives'."
            )

    def batches(
        self,
        batch_size: int,
        collate: Callable[[Items], Any],
        *,
        world_size: int = 1,
        accumulation_steps: int = 1,
        states: Sequence[Mapping[str, Any]] = (),
        **where: Any,
    ) -> ReplayBatches:
        """The micro-batches of one process; the arguments are those of `StreamBatches`."""
        self.check()
        parts: list[Any] = []
        shuffles = self._args.train_sampling_strategy == "random"
        for number, dataset in enumerate(self.datasets):
            share = Share(batch_size, accumulation_steps * world_size, self.old, is_old=number == 1)
            own = [state["parts"][number] for state in states]
            if isinstance(dataset, ImageTextStream):
                parts.append(
                    dataset.batches(
                        share, world_size=world_size, accumulation_steps=accumulation_steps, states=own, **where
                    )
                )
                continue
            seed = self._args.seed_of_data + number * _SEED_OF_OLD
            sampler = WindowSampler(dataset, share.pairs, shuffle=shuffles or number == 1, seed=seed)
            filled = [key for key in _FILLED if gives(self, key) and not gives(dataset, key)]
            parts.append(
                TableBatches(
                    dataset, share, sampler, filled, world_size=world_size, state=own[0] if own else None, **where
                )
            )
        return ReplayBatches(parts, collate)


class ReplayBatches(IterableDataset[tuple[Any, Tag]]):
    """The micro-batches of new and old pairs for one process; see `StreamBatches`, whose methods these are.

    Args:
        parts: those of the new pairs and of the old ones, not collated.
        collate: turns the items of both, the new ones first, into a batch. The batch also gets ``new_images``, the
            number of new ones.
    """

    def __init__(self, parts: Sequence[Any], collate: Callable[[Items], Any]) -> None:
        self._parts, self._collate = parts, collate

    def __iter__(self) -> Iterator[tuple[Any, Tag]]:
        for (new, tag), (old, tag_of_old) in zip(*self._parts, strict=True):
            began = time.perf_counter()
            batch = self._collate([*new, *old])
            if isinstance(batch, Mapping):
                batch = {**batch, "new_images": len(new)}
            seconds = time.perf_counter() - began + tag["seconds"] + tag_of_old["seconds"]
            yield batch, {"parts": [tag, tag_of_old], "seconds": seconds}

    def set_sides(self, sides: StepSides | None, step: int) -> None:
        for part in self._parts:
            part.set_sides(sides, step)

    def consume(self, tag: Tag) -> None:
        for part, tag_of_part in zip(self._parts, tag["parts"], strict=True):
            part.consume(tag_of_part)

    def state(self) -> dict[str, Any]:
        return {"parts": [part.state() for part in self._parts]}

    def counts(self) -> dict[str, int]:
        """As those of `StreamBatches`, with ``skipped`` and ``shards`` of streams only; and ``replayed`` samples."""
        new, old = (part.counts() for part in self._parts)
        both = {name: new.get(name, 0) + old.get(name, 0) for name in {**new, **old}}
        return {**both, "replayed": old["samples"]}


class TableBatches(IterableDataset[tuple[Items, Tag]]):
    """The endless micro-batches of a dataset with a length for one process; see `StreamBatches`.

    Args:
        dataset: the table.
        share: the part of each micro-batch.
        sampler: the rows of each pass, for full global batches.
        filled: keys of `_FILLED` that the items lack.
        rank, world_size, num_workers, keyed: as for `StreamBatches`.
        state: of the checkpoint to resume from, which any process wrote.
    """

    def __init__(
        self,
        dataset: Any,
        share: Share,
        sampler: WindowSampler,
        filled: Sequence[str],
        *,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        keyed: bool = False,
        state: Mapping[str, int] | None = None,
    ) -> None:
        self._dataset, self._share, self._sampler, self._filled = dataset, share, sampler, filled
        self._keyed = keyed
        self._rank, self._world_size, self._workers = rank, world_size, max(1, num_workers)
        at = state or {"samples": 0, "windows": 0, "pass": 0, "rows": 0}
        self._first_window, self._first_pass, self._earlier = at["windows"], at["pass"], at["samples"]
        # Before, windows may have had other sizes.
        self._windows_before = sampler.begin_at(at["pass"], at["rows"], at["samples"])
        self._shift = at["rows"] - self._windows_before * share.pairs  # of the rows of the first pass
        self._consumed = at["windows"] * share.micro_batches  # of the whole run, of all processes
        self._sides: tuple[StepSides | None, int] = None, 0  # and the step of micro-batch 0
        self._pass: tuple[int, list[int]] = (-1, [])  # the pass whose order was needed last

    def set_sides(self, sides: StepSides | None, step: int) -> None:
        self._sides = sides, step - self._consumed // self._share.micro_batches

    def consume(self, tag: Tag) -> None:
        self._consumed += self._world_size

    def state(self) -> dict[str, int]:
        """The position between two global batches, equal on all processes."""
        window = self._consumed // self._share.micro_batches
        number, first = self._place(window)
        samples = self._earlier + (window - self._first_window) * self._share.pairs
        rows = first + (self._shift if number == self._first_pass else 0)
        return {"samples": samples, "windows": window, "pass": number, "rows": rows}

    def counts(self) -> dict[str, int]:
        """``samples``: those consumed by all processes since the run began, on rank 0, and none on the others."""
        return {"samples": self.state()["samples"] if self._rank == 0 else 0}

    def __iter__(self) -> Iterator[tuple[Items, Tag]]:
        info = get_worker_info()
        # Several workers may read different passes at the same time, and the epoch of a dataset is in shared memory.
        dataset = copy.deepcopy(self._dataset) if info and has_epochs(self._dataset) else self._dataset
        first = self._consumed + (info.id if info else 0) * self._world_size + self._rank
        for number in itertools.count(first, self._workers * self._world_size):
            began = time.perf_counter()
            items = self._items(dataset, number)
            yield items, {"seconds": time.perf_counter() - began}

    def _items(self, dataset: Any, number: int) -> Items:
        passes, first = self._place(number // self._share.micro_batches)
        before, size = self._share.before(number), self._share.of(number)
        rows = self._order(passes)[first + before : first + before + size]
        sides, first_step = self._sides
        if sides is not None:
            side = sides.smaller_at(first_step + number // self._share.micro_batches)
            rows = [SizedRow(row, side) for row in rows]
        set_epoch(dataset, passes)
        items = [self._complete(item, row) for item, row in zip(rows_of(dataset, rows), rows, strict=True)]
        return keyed_rows(items, rows) if self._keyed else items

    def _complete(self, item: Any, row: int) -> Any:
        place = f"row {row} of {'old' if self._share.is_old else 'new'} pairs"
        return {**item, **{key: _FILLED[key](place) for key in self._filled}} if self._filled else item

    def _order(self, number: int) -> list[int]:
        """The rows of a pass."""
        if self._pass[0] != number:
            self._sampler.set_epoch(number)
            self._pass = number, list(self._sampler)
        return self._pass[1]

    def _place(self, window: int) -> tuple[int, int]:
        """The pass that a global batch of the run belongs to, and its first place in the order of that pass."""
        windows = len(self._sampler) // self._share.pairs
        passes, number = divmod(window - self._first_window + self._windows_before, windows)
        return self._first_pass + passes, number * self._share.pairs
