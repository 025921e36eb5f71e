"""Reads the pairs of a data set on several workers: all of them, or a sample."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers.utils.logging import tqdm

from ...data import ImageTextStream, ZeroShotDataset
from ...data.images import ImageDataset
from ...shards.opening import open_shard
from ...shards.readers import Sample
from ...shards.tar_layout import DamagedShardError
from .looking import Look, Looker

ROWS = 32  # of a table, or samples of a shard, that a worker gives back at once
Unit = TypeVar("Unit")  # what one worker reads at a time
_OF_SHARD = 256  # samples of each shard that is read for a sample, or more if there are few shards


class Part(NamedTuple):
    """Successive pairs of a set."""

    looks: list[Look]
    shard: int = 0  # the number of their shard; 0 for a table
    nbytes: int | None = None  # the size of the shard, in its last part; None elsewhere, and where it is not known
    is_cut: bool = False  # whether the shard has more samples than were to be read, in its last part


def read(
    data: ImageDataset | ImageTextStream, looker: Looker, samples: int | None, *, workers: int = 0, progress: str = ""
) -> Iterator[Part]:
    """Looks at a data set.

    Args:
        data: pairs or labelled images that raise an error for a bad row, without augmentation.
        looker: looks at each pair.
        samples: the number of pairs: rows of a table drawn at random, but always the same ones; of a stream the first
            samples of shards that are evenly spread. None for all.
        workers: processes that read; with 0, this one.
        progress: the title of a progress bar; empty for none.
    """
    parts: _Parts[Any] = (
        _ShardParts(data, looker, samples) if isinstance(data, ImageTextStream) else _RowParts(data, looker, samples)
    )
    # Without a generator of its own, the loader would draw from torch's random state, and change a training.
    loader: DataLoader[Part] = DataLoader(
        parts,
        batch_size=None,
        num_workers=min(workers, len(parts.units)),
        collate_fn=_as_it_is,
        generator=torch.Generator(),
    )
    with tqdm(total=parts.pairs, desc=progress, unit=" pairs", disable=not progress) as bar:
        for part in loader:
            bar.update(len(part.looks))
            yield part


def _as_it_is(part: object) -> object:
    return part


class _Parts(IterableDataset[Part], Generic[Unit]):
    """The parts of a set; each worker reads every n-th unit."""

    units: Sequence[Unit]
    pairs: int | None  # their number, if it is known

    def __iter__(self) -> Iterator[Part]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for unit in self.units[first::step]:
            yield from self.parts(unit)

    def parts(self, unit: Unit) -> Iterator[Part]:
        raise NotImplementedError


class _RowParts(_Parts[Sequence[int]]):
    def __init__(self, data: ImageDataset, looker: Looker, samples: int | None) -> None:
        self._data, self._looker = data, looker
        rows: Sequence[int] = range(len(data))
        if samples is not None and samples < len(data):
            rows = sorted(random.Random(0).sample(rows, samples))
        self.units = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
        self.pairs = len(rows)

    def parts(self, unit: Sequence[int]) -> Iterator[Part]:
        yield Part([self._look(row) for row in unit])

    def _look(self, row: int) -> Look:
        columns, values = self._data.columns, self._data.table[row]
        image = values[columns["image_column"]]
        known = {"image": image, "file": image and image["path"]}
        if isinstance(self._data, ZeroShotDataset):
            known["label"] = self._data.class_names[values[columns["label_column"]]]
        else:
            known["caption"] = values[columns["caption_column"]]
        return self._looker.look(str(self._data.number(row)), known, lambda: self._data[row])


class _ShardParts(_Parts[int]):
    def __init__(self, stream: ImageTextStream, looker: Looker, samples: int | None) -> None:
        self._stream, self._looker = stream, looker
        shards = range(len(stream.shards))
        self.units = shards if samples is None else shards[:: -(-len(shards) // max(8, samples // _OF_SHARD))]
        self._each = None if samples is None else -(-samples // len(self.units))
        self.pairs = samples

    def parts(self, unit: int) -> Iterator[Part]:
        shard = self._stream.shards[unit]
        looks: list[Look] = []
        is_cut = False
        try:
            samples = shard.samples()
            for _, key, sample in itertools.islice(samples, self._each):
                looks.append(self._look(unit, key, sample))
                if len(looks) == ROWS:
                    yield Part(looks, unit)
                    looks = []
            is_cut = next(samples, None) is not None
        except DamagedShardError as error:
            looks.append(Look(f"the rest of {shard.name}", str(error)))
        with open_shard(shard.url) as file:
            nbytes = None
            with suppress(OSError, ValueError):  # not every server tells
                nbytes = file.seek(0, 2)
        yield Part(looks, unit, nbytes, is_cut)

    def _look(self, unit: int, key: str, sample: Sample) -> Look:
        columns, shard = self._stream.options, self._stream.shards[unit]
        values: dict[str, Any] = {"image": None}
        with suppress(ValueError):  # of a broken sample, which the item tells
            if not isinstance(sample, DamagedShardError):
                row: dict[str, Any] = shard.reader.row(sample)
                values = {"image": row[columns["image_column"]], "file": key, "caption": row[columns["caption_column"]]}
        return self._looker.look(f"{shard.name} {key}", values, lambda: self._stream.item(0, unit, key, sample))
