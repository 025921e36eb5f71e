"""Streams of image-text pairs from shards, whose items do not depend on the process or worker that reads them.

The number L of lanes (`hf_infcl.shards.lanes`) is a multiple of processes × workers and is fixed for the run.
Micro-batch n of the run comes from lane n mod L and is created by worker (n div R) mod W of process n mod R. The
sequence of micro-batches therefore does not depend on the number of processes R and of workers W, as long as R·W
divides L. Each micro-batch carries the cursor of its lane, so a checkpoint stores the positions of the consumed
micro-batches, not of those that workers have read ahead.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import logging
import math
import posixpath
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from ..files.text import Url, counted, describe_cause, shortened, was_and_is
from ..shards.lanes import LaneSource, Piece, SampleOrder, Shard
from ..shards.layout import DamagedShardError, sample_key
from ..shards.opening import ReadError, content_tag, digest, find_shards, open_shard, shard_names
from ..shards.readers import Columns, Sample, reader_of
from .collator import DataCollator
from .images import BadSampleError, decode_rgb
from .pairs import MAX_BAD, Augmentation, PairSource, augment, usable_captions
from .store import KeyedItem

logger = logging.getLogger(__name__)

_CURE = 'Repair or drop it, or leave such samples out with on_bad_sample="skip".'
_SAMPLED, _SAMPLED_SHARDS = 256, 8  # of `sample_captions`
VERSION = 1  # version of the order of samples and of the state in checkpoints
_DRAWS = 1024  # number of choices between the sources of a mixture that are drawn at a time

# Reads the items of a micro-batch, of ascending numbers, and what `consume` has to know of it.
ReadItems = Callable[[int], tuple[list[Any], dict[str, Any]]]


class ImageTextStream(PairSource, IterableDataset[dict[str, Any]]):
    """Image-caption pairs from tar or parquet shards, without end: pass after pass, each in another order.

    It yields the same items as `ImageTextDataset`, always with a pair id: dicts of
        image, cropped: as in `ImageTextDataset`.
        caption: list of one str, or of up to `captions_per_image`, drawn anew in each pass.
        negative_captions: as in `ImageTextDataset`; only with a `negative_caption_column`.
        pair_id: int64, determined by `pair_id_column`, or else by image and captions: equal for items of the same
            sample, and different from the ids of all others, also of other streams (see `content_pair_id`).
        skipped: int, the number of bad samples left out before this item; only with `on_bad_sample="skip"`.

    A sample is bad if its image is missing or cannot be decoded, if it has no visible caption or no pair id, or if its
    name points outside its folder. The rest of a damaged shard counts as one bad sample. A failed read is not a bad
    sample: it is repeated from the byte that it had reached and, if it keeps failing, raised.

    `InfCLTrainer` accepts a stream as its training set. In your own training loop, use the micro-batches of `batches`.

    Args:
        sources: names of shards, in any form that `hf_infcl.shards.opening.find_shards` accepts: files, globs, ranges
            such as ``shards/{00000..00127}.tar``, folders, Hub ids.
        weights: one per source. Samples are drawn from the sources in this proportion, and an exhausted source starts
            its next pass. Without weights, the shards of all sources form one set, and each pass contains every sample
            once.
        split: the split of sources that are folders or Hub ids.
        name: the configuration of sources that are folders or Hub ids.
        image_column: in tar files, an extension; "image" means the file with the extension of an image. None reads no
            images, and a ``caption_column`` of None no captions, as `infcl embed` does; training needs both.
        caption_column: in tar files a field of the ``.json`` or an extension; "caption" also finds ``.txt``.
        captions_per_image: the maximum number of different captions to draw from a list.
        negative_caption_column: as in `ImageTextDataset`; in tar files a field of the ``.json`` or an extension,
            which at least one of the first samples must have.
        pair_id_column: samples with equal values are never each other's negatives; see `ImageTextDataset`.
        seed: determines the order, the mixture, the drawn captions and the augmentation.
        on_bad_sample: "raise" a ValueError that names the sample, or "skip" the sample and count it.
        shuffle_buffer: the number of encoded samples that a lane holds and permutes.
        open_shards: the number of shards that a lane reads in turn.
        lanes: a multiple of every value of processes × workers that the run may ever have; by default, that value at
            the start of the run. More lanes hold more buffers.
        samples_per_epoch: the number of samples that `InfCLTrainer` counts as an epoch, because the length of a pass is
            unknown. Without it, training needs ``max_steps``.
        augmentation, min_side: as in `ImageTextDataset`.

    Raises:
        ValueError: there are no such shards, columns or captions, or an option is invalid.
    """

    def __init__(
        self,
        sources: str | Sequence[str],
        *,
        weights: Sequence[float] | None = None,
        split: str = "train",
        name: str | None = None,
        image_column: str | None = "image",
        caption_column: str | None = "caption",
        captions_per_image: int = 1,
        negative_caption_column: str | None = None,
        pair_id_column: str | None = None,
        seed: int = 0,
        on_bad_sample: Literal["raise", "skip"] = "raise",
        shuffle_buffer: int = 2048,
        open_shards: int = 4,
        lanes: int | None = None,
        samples_per_epoch: int | None = None,
        augmentation: Augmentation = "none",
        min_side: int | None = None,
    ) -> None:
        columns = Columns(image_column, caption_column, negative_caption_column, pair_id_column)
        self._keep(columns, captions_per_image, seed, on_bad_sample, augmentation, min_side)
        self.shuffle_buffer, self.open_shards, self.lanes = shuffle_buffer, open_shards, lanes
        self.samples_per_epoch = samples_per_epoch
        for option in ("shuffle_buffer", "open_shards", "lanes", "samples_per_epoch"):
            if (value := getattr(self, option)) is not None and value < 1:
                raise ValueError(f"{option} must be at least 1, got {value}.")
        sources = [Url(source) for source in ([sources] if isinstance(sources, str) else sources)]
        if not sources:
            raise ValueError("A stream needs at least one source, got none.")
        if weights is not None and len(weights) != len(sources):
            raise ValueError(f"There are {len(weights)} weights for {len(sources)} sources: {weights}, {sources}.")
        if wrong := [weight for weight in weights or () if not 0 < weight < math.inf]:
            raise ValueError(f"A weight must be a positive number, got {wrong[0]}. Leave out sources without one.")
        self.name = " ".join(sources)
        self.weights = [1.0] if weights is None else [float(weight) for weight in weights]
        self._processes = 1  # when the stream was pickled
        self.left_out = ""  # says which samples are

        self.shards: list[Shard] = []
        groups: list[range] = []
        for number, source in enumerate(sources):
            urls = find_shards(source, split=split, name=name)
            reader = reader_of(urls)(columns, urls)
            if not reader.has_lists and caption_column:
                self._check_single()
            groups.append(range(len(self.shards), len(self.shards) + len(urls)))
            names = zip(urls, shard_names(urls), strict=True)
            self.shards += [Shard(url, f"{number}/{short}", reader) for url, short in names]
        self.groups = groups if weights is not None else [range(len(self.shards))]

    @property
    def optional_keys(self) -> set[str]:
        return super().optional_keys | {"pair_id"}

    def content_fingerprint(self) -> str:
        """The number of shards, and a fingerprint of the sizes of local ones and the revisions of those on the Hub."""
        return f"{self._content}{self.left_out}"

    key_fingerprint = content_fingerprint

    @functools.cached_property
    def _content(self) -> str:
        return f"{len(self.shards)} shards {digest([content_tag(shard.url) for shard in self.shards])}"

    @functools.cached_property
    def places(self) -> list[str]:
        """For each shard, the beginning of its samples' places: its file's name, or its path if files share that name.

        The paths are relative to the folder that holds all shards, so it may move.
        """
        names = [posixpath.splitext(posixpath.basename(shard.url))[0] for shard in self.shards]
        counts, paths = Counter(names), shard_names([shard.url for shard in self.shards])
        return [name if counts[name] == 1 else path for name, path in zip(names, paths, strict=True)]

    def place(self, shard: int, key: str) -> str:
        """The name of a sample of shard number ``shard``, after that of the shard."""
        return f"{self.places[shard]}/{key}"

    def __len__(self) -> int:
        """`samples_per_epoch`, without which Trainer refuses to count epochs. Iteration does not end there."""
        if self.samples_per_epoch is None:
            raise TypeError("A stream without samples_per_epoch has no length.")
        return self.samples_per_epoch

    def __bool__(self) -> bool:
        return True  # without a length as well

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The items one by one, under a DataLoader shared by its workers. To resume, use `batches`.

        Raises:
            ValueError: there are several processes, which would all get the same items.
        """
        if (processes := max(self._processes, _world_size())) > 1:
            raise ValueError(
                f"Each of the {processes} processes would iterate over the same items of the stream. Give each its "
                "share with stream.batches(batch_size, rank=..., world_size=...)."
            )
        info = get_worker_info()
        for (item,), _ in self.batches(1, num_workers=info.num_workers if info else 0):
            yield item

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_processes": _world_size()}  # a worker that is not forked belongs to no group

    def without(self, keys: np.ndarray) -> ImageTextStream:
        """The stream without the samples of some keys, [n] int64 in ascending order; see `sample_key`."""
        changed = copy.copy(self)
        left_out = [keys if shard.without is None else np.union1d(shard.without, keys) for shard in self.shards]
        changed.shards = [shard._replace(without=out) for shard, out in zip(self.shards, left_out, strict=True)]
        changed.left_out = f"{self.left_out} without {len(keys)} samples {hashlib.sha256(keys.data).hexdigest()[:16]}"
        return changed

    def sample_captions(self, count: int) -> list[list[str]]:
        """The captions of up to 256 samples at the beginnings of eight shards, or fewer; bad samples are left out."""
        found: list[list[str]] = []
        shards = range(0, len(self.shards), math.ceil(len(self.shards) / _SAMPLED_SHARDS))
        of_each = math.ceil(min(count, _SAMPLED) / len(shards))
        for shard in shards:
            with suppress(DamagedShardError, ReadError):  # which the training names
                for _, key, sample in itertools.islice(self.shards[shard].samples(), of_each):
                    with suppress(BadSampleError), self._row(shard, key, sample) as row:
                        found.append(usable_captions(row[self.caption_column]))
        return [captions for captions in found if captions]

    def batches(self, batch_size: int | Share, collate: DataCollator = list, **where: Any) -> StreamBatches:
        """The micro-batches of one process; see `StreamBatches` for the options."""
        return StreamBatches(self, batch_size, collate, **where)

    def item(self, passes: int, shard: int, key: str, sample: Sample) -> dict[str, Any]:
        """The item of a raw sample, after this many passes.

        Raises:
            BadSampleError: the sample cannot be used, with the names of shard and sample.
        """
        name = f"{self.shards[shard].name} {key}"
        with self._row(shard, key, sample) as row:
            if self.image_column is None or self.caption_column is None:
                raise ValueError("it is read without its image or its captions")
            encoded = self._encoded(shard, row)
            item = self._all_but_image(row, name, passes, self.place(shard, key), encoded)
            image = decode_rgb(encoded, self.min_side)
            return augment(image, self.augmentation, self._seed_for(name, "augmentation", passes)) | item

    def image_and_captions(self, shard: int, key: str, sample: Sample) -> dict[str, Any]:
        """The ``image`` of a raw sample and all of its ``caption``s, if these are read; it need not have any caption.

        A BadSampleError is raised as by `item`.
        """
        with self._row(shard, key, sample) as row:
            captions = {} if self.caption_column is None else {"caption": usable_captions(row[self.caption_column])}
            if self.image_column is None:
                return captions
            return {**captions, "image": decode_rgb(self._encoded(shard, row), self.min_side)}

    @contextmanager
    def _row(self, shard: int, key: str, sample: Sample) -> Iterator[dict[str, Any]]:
        """The values of a sample; what fails with them is a BadSampleError with the names of shard and sample."""
        if isinstance(sample, DamagedShardError):
            raise BadSampleError(f"{sample} {_CURE}", str(sample)) from sample
        try:
            if _leaves_folder(key):
                raise ValueError("its name points outside its folder")
            yield self.shards[shard].reader.row(sample)
        except ReadError:
            raise
        except Exception as error:  # decoders raise exceptions of any class
            name, cause = f"Sample {shortened(key)} of the shard {self.shards[shard].url!r}", describe_cause(error)
            raise BadSampleError(f"{name} is bad: {cause}. {_CURE}", cause) from error

    def _encoded(self, shard: int, row: dict[str, Any]) -> bytes:
        image: bytes | str | None = row[self.image_column or ""]
        if image is None:
            raise ValueError(f"it has no image in column {self.image_column!r}")
        if not isinstance(image, str):
            return image
        if _leaves_folder(image):
            raise ValueError(f"the path of its image, {image!r}, points outside the shard's folder")
        with open_shard(posixpath.join(posixpath.dirname(self.shards[shard].url), image)) as file:
            return file.read()


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _leaves_folder(name: str) -> bool:
    return name.startswith("/") or ".." in name.split("/") or "://" in name


class Share:
    """The pairs of each micro-batch that come from one source: all of them, or with replay the new or the old ones.

    Micro-batches are counted from the first one of the run, on all processes. Every global batch has the same number of
    old pairs, and each of its micro-batches equally many but for one. Which ones have one more is drawn for each global
    batch, so that all lanes of a stream are read at the same pace; the processes differ by at most one pair. Nothing
    depends on the number of processes.

    Args:
        batch_size: the pairs of a micro-batch, of all sources.
        micro_batches: those of a global batch, on all processes.
        old: the old pairs of a global batch; None without replay.
        is_old: whether the source has the old pairs.

    Attributes:
        of_batch: the pairs of a global batch that come from the source.
        identity: what the order of a stream depends on, for a checkpoint.
    """

    def __init__(self, batch_size: int, micro_batches: int, old: int | None = None, *, is_old: bool = False) -> None:
        self.micro_batches, self.is_old = micro_batches, is_old
        self.batch_size, self._old = batch_size, old or 0
        self.of_batch = self._old if is_old else batch_size * micro_batches - self._old
        self.identity: dict[str, Any] = {"batch_size": batch_size}
        if old is not None:
            self.identity |= {"micro_batches": micro_batches, "old": old, "is_old": is_old}

    def pairs(self, number: int) -> range:
        """The pairs of a micro-batch among those of the source in its global batch."""
        step, place = divmod(number, self.micro_batches)
        each, left = divmod(self._old, self.micro_batches)
        # `left` micro-batches from `start` on have one more; beyond the last one they go on with the first ones.
        start = random.Random(step).randrange(self.micro_batches) if left else 0

        def before(place: int) -> int:
            """The pairs of the source in the first so many micro-batches of the global batch."""
            old = each * place + sum((one - start) % self.micro_batches < left for one in range(place))
            return old if self.is_old else self.batch_size * place - old

        return range(before(place), before(place + 1))


class MicroBatches(IterableDataset[tuple[Any, dict[str, Any]]]):
    """Reads the micro-batches of one process from a stream, a table or a mixture, and records which were consumed.

    The elements are pairs (batch, tag), for ``DataLoader(batches, batch_size=None, num_workers=...)``. Call `consume`
    with each tag, in order, once its batch has been trained on; `state` is then this process's part of a checkpoint.
    Iteration begins after the consumed batches. ``tag["pairs"]`` were prepared in ``tag["seconds"]``.

    Args:
        share: the pairs of this source.
        collate: turns a list of items into a batch.
        num_workers: those of the DataLoader.
        keyed: whether the items are `KeyedItem`.
        position: the global batches before the first one that is read; the `state` of a stream says it as well.
    """

    def __init__(
        self,
        share: Share,
        collate: DataCollator,
        *,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        keyed: bool = False,
        position: int = 0,
    ) -> None:
        self._share, self._collate, self._keyed = share, collate, keyed
        self._rank, self._world_size, self._workers = rank, world_size, max(1, num_workers)
        self._consumed = position * share.micro_batches  # of all processes since the run began

    @property
    def position(self) -> int:
        """The global batches before the one to be read next, since the run began."""
        return self._consumed // self._share.micro_batches

    def begin_at(self, position: int, skipped: Callable[[], Tensor]) -> bool:
        """Goes to a global batch; a shuffled table leaves out rows from then on, ``skipped()`` [rows] bool or [0].

        Returns whether other batches follow than before. Only a table, which has its rows at hand, goes elsewhere.
        """
        return False

    def consume(self, tag: Mapping[str, object]) -> None:
        """Records that the batch with this tag was consumed."""
        self._consumed += self._world_size

    def state(self) -> dict[str, Any] | None:
        """The state that this process adds to a checkpoint, to be written as JSON; None if the position says it all."""
        return None

    def counts(self) -> dict[str, int]:
        """Counts since the run began, to be summed over the processes; rank 0 counts the ``samples`` of all of them."""
        return {"samples": self.position * self._share.of_batch if self._rank == 0 else 0}

    def rows_at(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """The rows of a table at (micro-batch, row) of this process after the consumed ones; for other data none."""
        return []

    def reader(self) -> ReadItems:
        """A new reader, which begins with the batches that follow the consumed ones."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        if workers != self._workers:
            has = counted(workers, "worker")
            raise ValueError(f"The DataLoader has {has}, but the batches were made for {self._workers}.")
        read = self.reader()
        first = self._consumed + worker * self._world_size + self._rank
        for number in itertools.count(first, self._workers * self._world_size):
            began = time.perf_counter()
            items, tag = read(number)
            batch = self._collate(items)
            if "new_images" in tag and isinstance(batch, Mapping):
                batch = {**batch, "new_images": tag["new_images"]}
            yield batch, {**tag, "seconds": time.perf_counter() - began, "pairs": len(items)}


class StreamBatches(MicroBatches):
    """The micro-batches of an `ImageTextStream` for one process.

    Args:
        stream: an `ImageTextStream`.
        batch_size: the number of pairs of a micro-batch; or the `Share` of this stream.
        accumulation_steps: the number of micro-batches that each process contributes to a global batch, if
            ``batch_size`` is a number.
        states: the `state` of every process of a checkpoint, for any number of processes and workers.
        **where: as for `MicroBatches`; a key is the `sample_key`.

    Raises:
        ValueError: processes and workers cannot share the lanes; a source has too few samples for them; the states
            belong to another order. While iterating: a bad sample; too few samples for one global batch.
        ReadError: a shard could not be read.
    """

    def __init__(
        self,
        stream: ImageTextStream,
        batch_size: int | Share,
        collate: DataCollator = list,
        *,
        accumulation_steps: int = 1,
        states: Sequence[Mapping[str, Any]] = (),
        **where: Any,
    ) -> None:
        world_size = where.get("world_size", 1)
        share = Share(batch_size, accumulation_steps * world_size) if isinstance(batch_size, int) else batch_size
        super().__init__(share, collate, **where)
        self._stream = stream
        before: Mapping[str, Any] = states[0] if states else {"identity": {}, "pieces": None}
        lanes = stream.lanes or before["identity"].get("lanes", world_size * self._workers)
        self._order = SampleOrder(stream.seed, lanes, stream.shuffle_buffer, stream.open_shards)
        self._order.check_shares(world_size, self._workers)
        self._identity = {"version": VERSION, **self._share.identity, **self._order._asdict()}
        self._identity["sources"] = [
            [weight, len(group), digest([stream.shards[number].name for number in group]) + stream.left_out]
            for weight, group in zip(stream.weights, stream.groups, strict=True)
        ]
        self._cursors: dict[int, dict[str, Any]] = {}  # by lane, of those that this process reads
        if states:
            self._resume(states)
        # A checkpoint has the pieces of split shards, which take long to find. Whole shards are dealt anew.
        if before["pieces"] is None:
            self._pieces = [self._dealt(group) for group in stream.groups]
        else:
            self._pieces = [[Piece(*piece) for piece in group] for group in before["pieces"]]

    # ---- What was consumed ----

    def consume(self, tag: Mapping[str, Any]) -> None:
        expected = self._consumed + self._rank
        if tag["number"] != expected:
            raise ValueError(
                f"Micro-batch {expected} of the stream must be consumed next, got {tag['number']}. The DataLoader "
                "must keep the order of its workers (in_order=True), and no batch may be left out."
            )
        self._cursors[tag["lane"]] = tag["cursor"]
        super().consume(tag)

    def state(self) -> dict[str, Any]:
        is_split = any(piece[1:] != (0, None) for group in self._pieces for piece in group)
        return {
            "identity": self._identity,
            "pieces": self._pieces if is_split else None,
            "rank": self._rank,
            "world_size": self._world_size,
            "consumed": self._consumed,
            "lanes": {str(lane): cursor for lane, cursor in self._cursors.items()},
        }

    def counts(self) -> dict[str, int]:
        """Also counts the samples ``skipped`` and the ``shards`` opened by this process."""
        cursors = self._cursors.values()
        return {
            **super().counts(),
            "skipped": sum(cursor["skipped"] for cursor in cursors),
            "shards": sum(at["opened"] for cursor in cursors for at in cursor["sources"] if at),
        }

    def _resume(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Goes on after the states of all processes of a checkpoint."""
        consumed = states[0]["consumed"]
        seen = sorted((state["rank"], state["world_size"], state["consumed"]) for state in states)
        if seen != [(rank, len(states), consumed) for rank in range(len(states))]:
            raise ValueError(
                "The states of the stream are not those of all processes of one checkpoint: their (rank, processes, "
                f"micro-batches) are {seen}."
            )
        if changed := was_and_is(dict.fromkeys(self._identity) | states[0]["identity"], self._identity):
            raise ValueError(
                f"The stream cannot continue where the checkpoint ended, because its order has changed: {changed}. "
                "Use the shards and options of the checkpoint, or start a new run from its model."
            )
        if consumed % self._world_size:
            raise ValueError(
                f"{consumed} micro-batches were consumed at the checkpoint, which {self._world_size} processes cannot "
                "have shared evenly. Use a number of processes that divides it."
            )
        self._consumed = consumed
        cursors = {int(lane): cursor for state in states for lane, cursor in state["lanes"].items()}
        self._cursors = {lane: at for lane, at in cursors.items() if lane % self._world_size == self._rank}

    # ---- Reading ----

    def _dealt(self, group: Sequence[int]) -> list[Piece]:
        """The whole shards or, if there are fewer shards than lanes, equal parts of each shard."""
        lanes = self._order.lanes
        if len(group) >= lanes:
            return [Piece(number) for number in group]
        began, parts = time.perf_counter(), lanes // math.gcd(len(group), lanes)
        shards = self._stream.shards
        pieces = [Piece(number, *borders) for number in group for borders in shards[number].borders(parts)]
        if self._rank == 0:
            logger.warning(
                f"{len(group)} shards are fewer than the {lanes} lanes (processes × DataLoader workers). Each was "
                f"split into {parts} parts, which took {time.perf_counter() - began:.1f} s to find at this start; from "
                "now on several workers read from each shard."
            )
        return pieces

    def reader(self) -> ReadItems:
        lanes: dict[int, Iterator[tuple[Any, int, dict[str, Any]]]] = {}
        cursors = dict(self._cursors)  # batches may be consumed while this reader goes on

        def read(number: int) -> tuple[list[Any], dict[str, Any]]:
            lane, items = number % self._order.lanes, []
            if lane not in lanes:
                cursors.setdefault(lane, {"drawn": 0, "skipped": 0, "sources": [None] * len(self._pieces)})
                lanes[lane] = self._items(lane, cursors[lane])
            for item, passes, cursor in itertools.islice(lanes[lane], len(self._share.pairs(number))):
                items.append(item)
                cursors[lane] = cursor
                if passes and number < self._share.micro_batches and len(self._pieces) == 1:
                    raise ValueError(
                        f"The stream is shorter than one global batch, which takes {self._share.of_batch} pairs of it: "
                        f"lane {lane} of {self._order.lanes}, each of which a worker reads, has read its share of the "
                        f"{len(self._stream.shards)} shards such as {self._stream.shards[0].url!r} before one was "
                        "full. Lower the batch, or use fewer workers."
                    )
            return items, {"number": number, "lane": lane, "cursor": cursors[lane]}

        return read

    def _items(self, lane: int, cursor: dict[str, Any]) -> Iterator[tuple[Any, int, dict[str, Any]]]:
        """(item, number of passes before it, cursor after it) of a lane, from a cursor on."""
        stream, skipped, at = self._stream, cursor["skipped"], list(cursor["sources"])
        sources = [
            LaneSource(stream.shards, pieces, self._order, lane, number).samples(at[number])
            for number, pieces in enumerate(self._pieces)
        ]
        draws: list[int] = []
        bad = 0  # samples in succession
        for drawn in itertools.count(cursor["drawn"]):
            if not draws or drawn % _DRAWS == 0:  # each block by its number, so that a cursor needs no more
                rng = self._order.random("mixture", lane, drawn // _DRAWS)
                draws = rng.choices(range(len(sources)), stream.weights, k=_DRAWS)
            source = draws[drawn % _DRAWS]
            passes, shard, key, sample, at[source] = next(sources[source])
            try:
                item = stream.item(passes, shard, key, sample)
            except BadSampleError as error:
                if stream.on_bad_sample == "raise":
                    raise
                if isinstance(sample, DamagedShardError):  # more than one sample is lost
                    logger.warning("%s", sample)
                bad += 1
                if bad == MAX_BAD:
                    raise ValueError(f"{MAX_BAD} samples in succession were bad. The last: {error}") from error
                continue
            if stream.on_bad_sample == "skip":
                item["skipped"] = bad
            skipped, bad, name = skipped + bad, 0, stream.shards[shard].name
            keyed = KeyedItem(item, sample_key(name, key), f"{name} {key}", passes) if self._keyed else item
            yield keyed, passes, {"drawn": drawn + 1, "skipped": skipped, "sources": [*at]}
