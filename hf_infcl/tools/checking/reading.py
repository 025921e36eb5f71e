"""Reads the pairs of a data set on several workers: all of them, or a sample."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers.utils.logging import tqdm

from ...data import ImageTextStream, ZeroShotDataset
from ...data.images import ImageDataset
from ...shards.tar_layout import DamagedShardError
from .looking import Inspected, Inspector

ROWS = 32  # of a table that a worker reads at once
Part = tuple[list[Inspected], bool]  # see `read`
_OF_SHARD = 256  # samples of each shard that is read for a sample, or more if there are few shards


def read(
    data: Any, inspector: Inspector, samples: int | None, *, workers: int = 0, progress: str = ""
) -> Iterator[Part]:
    """Looks at a data set, and yields successive pairs, and whether there are more that were not to be read.

    Args:
        data: pairs or labelled images that raise an error for a bad row, without augmentation.
        inspector: looks at each pair.
        samples: the number of pairs: rows of a table drawn at random, but always the same ones; of a stream the first
            samples of shards that are evenly spread. None for all.
        workers: processes that read; with 0, this one.
        progress: the title of a progress bar; empty for none.
    """
    units: Any
    if isinstance(data, ImageTextStream):
        total, units = samples, range(len(data.shards))
        units = units if samples is None else units[:: -(-len(units) // max(8, samples // _OF_SHARD))]
        each = None if samples is None else -(-samples // len(units))
        read_unit: Any = partial(_read_shard, data, inspector, each, len(units) < len(data.shards))
    else:
        rows: Sequence[int] = range(len(data))
        if is_cut := samples is not None and samples < len(rows):
            rows = sorted(random.Random(0).sample(rows, samples))
        total, units = len(rows), [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
        read_unit = partial(_read_rows, data, inspector, is_cut)
    # Without a generator of its own, the loader would draw from torch's random state, and change a training.
    how: dict[str, Any] = {"num_workers": min(workers, len(units)), "generator": torch.Generator()}
    loader: DataLoader[Any] = DataLoader(units, batch_size=None, collate_fn=read_unit, **how)
    with tqdm(total=total, desc=progress, unit=" pairs", disable=not progress) as bar:
        for pairs, is_cut in loader:
            bar.update(len(pairs))
            yield pairs, is_cut


def _read_rows(data: ImageDataset, inspector: Inspector, is_cut: bool, rows: Sequence[int]) -> Part:
    pairs = []
    for row in rows:
        values, image = data.table[row], data.columns["image_column"]
        known = {"file": values[image] and values[image]["path"]}
        if not isinstance(data, ZeroShotDataset):
            known["caption"] = values[data.columns["caption_column"]]
        pairs.append(inspector.inspect(str(data.number(row)), known, partial(data.__getitem__, row)))
    return pairs, is_cut


def _read_shard(stream: ImageTextStream, inspector: Inspector, most: int | None, is_cut: bool, number: int) -> Part:
    """At most so many pairs of a shard; ``is_cut`` if other shards are left out."""
    shard, pairs = stream.shards[number], []
    try:
        samples = shard.samples()
        for _, key, sample in itertools.islice(samples, most):
            known: dict[str, Any] = {}
            with suppress(ValueError):  # of a broken sample, which the item tells
                if not isinstance(sample, DamagedShardError):
                    known = {"file": key, "caption": shard.reader.row(sample)[stream.options["caption_column"]]}
            pairs.append(inspector.inspect(f"{shard.name} {key}", known, partial(stream.item, 0, number, key, sample)))
        is_cut |= next(samples, None) is not None
    except DamagedShardError as error:
        pairs.append(Inspected(f"the rest of {shard.name}", {"broken": str(error)}))
    return pairs, is_cut
