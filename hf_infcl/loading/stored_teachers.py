"""Teachers whose embeddings were stored: which of these belong to which part of a training set, and pairs without."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import ImageTextDataset, ImageTextStream
from ..data.pairs import usable_captions
from ..options.arguments import InfCLTrainingArguments
from ..passes.grad_cache import Features
from ..shards.values import counted
from ..windows.teachers import teacher_prefix, teacher_words
from .stored_embeddings import (
    StoredEmbeddings,
    described_shards,
    described_table,
    differences,
    embedding_folders,
    of_caption,
)
from .wrapped import all_parts

logger = logging.getLogger(__name__)

KINDS = {"image": "images", "text": "texts"}


def stored_teachers(
    folders: Sequence[str], data: Iterable[object], args: InfCLTrainingArguments
) -> tuple[list[StoredTeacher], bool]:
    """The teachers whose embeddings were stored, and whether one of them may lack pairs; names the places of items.

    Args:
        data: the training sets.

    Raises:
        ValueError: the embeddings are of other data, or pairs have none.
    """
    if not folders:
        return [], False
    sides = args.taught_sides
    opened = [StoredEmbeddings(one) for folder in folders for one in embedding_folders(folder)]
    leaves = [part for one in data for part in _leaves(one)]
    sets = [_DataSet(part, number, sides, opened) for number, part in enumerate(leaves)]
    for stored in opened:
        if lacking := [KINDS[side] for side in sides if KINDS[side] not in stored.kinds]:
            raise ValueError(
                f"{stored.folder} has no embeddings of {' and '.join(lacking)}. Embed data that has them, or choose "
                f"another teacher_side than {args.teacher_side!r}."
            )
        if all(one.lacking(stored) is None for one in sets):
            raise ValueError(
                f"The embeddings in {stored.folder} are of other data than the training set: "
                f"{'; '.join(one.difference(stored) for one in sets)}. Embed the training set itself, with the same "
                "columns if it has any: `infcl embed` takes the whole command of a training."
            )
    without = [told for one in sets if (told := one.describe_missing(opened))]
    leaves_out = args.teacher_missing == "contrastive"
    if without and not leaves_out:
        raise ValueError(
            f"Pairs have no stored embedding of a teacher: {', and '.join(without)}. Embed them, or leave them to the "
            "contrastive loss with teacher_missing='contrastive'."
        )
    if without and args.process_index == 0:
        logger.warning(f"The contrastive loss alone trains pairs without a stored embedding: {', and '.join(without)}.")
    lacks = [one.lacking(stored) for one in sets for stored in opened]
    partial = leaves_out or any(lack is None or lack for lack in lacks)
    for one in sets:
        own_views = [stored.views for stored in opened if one.lacking(stored) is not None]
        one.name_places(own_views if "image" in sides else [])
    teachers = []
    for number, stored in enumerate(opened):
        changed = {one.number: one.changed(stored) for one in sets if one.lacking(stored) is not None}
        teachers.append(StoredTeacher(stored, changed, sides, partial=partial, number=number))
    return teachers, partial


def _leaves(data: object) -> Iterator[ImageTextDataset | ImageTextStream]:
    """The tables and streams of a training set.

    Raises:
        ValueError: it has other parts.
    """
    for part in all_parts(data):
        if isinstance(part, (ImageTextDataset, ImageTextStream)):
            yield part
        elif not any(getattr(part, name, None) is not None for name in ("dataset", "datasets")):
            raise ValueError(
                "teacher_embeddings are found by the rows of an ImageTextDataset or the samples of an ImageTextStream, "
                f"but the training set has a {type(part).__name__}. Use one of these, or a teacher that is a model."
            )


def describe_views(part: ImageTextDataset | ImageTextStream, count: int | None) -> dict[str, Any] | None:
    """Text that determines the first ``count`` views of each image of a set; None for unchanged images."""
    if count is None:
        return None
    return {"count": count, "seed": part.seed, **{name: part.options[name] for name in ("augmentation", "min_side")}}


class _DataSet:
    """A table or a stream of the training set, by its number there, which is compared with what was embedded.

    If pairs were excluded from a table, the embeddings may be those of the pairs that remain or of the whole table.

    Raises:
        ValueError: its captions have no stored embeddings.
    """

    def __init__(
        self,
        part: ImageTextDataset | ImageTextStream,
        number: int,
        sides: Sequence[str],
        opened: Sequence[StoredEmbeddings],
    ) -> None:
        self.part, self.number, self._kinds = part, number, [KINDS[side] for side in sides]
        if "text" in sides and part.negative_caption_column:
            raise ValueError(
                "teacher_embeddings have the captions of the pairs as they are, but negative captions have none. Leave "
                "one of both out, or choose teacher_side='image'."
            )
        self._lacking: dict[str, int] = {}  # rows, by the folders that have been compared
        if isinstance(part, ImageTextDataset):
            self._described = described_table(len(part), part, part.captions)
            part.places_of_whole = False
            if part.whole is not None and all(map(self.difference, opened)):
                whole = described_table(len(part.whole), part.whole, part.whole.captions)
                if not all(differences(stored.record["data"], whole, self._kinds) for stored in opened):
                    self._described, part.places_of_whole = whole, True
        else:
            self._described = described_shards(part)

    def name_places(self, views: Sequence[Mapping[str, Any] | None]) -> None:
        """Makes the items name their places, and repeats their augmentations if the teachers have stored views."""
        count = next((one["count"] for one in views if one is not None), None)
        expected = describe_views(self.part, count)
        for stored in views:
            if stored == expected:
                continue
            # Of two teachers, one may have views and the other none.
            here = expected or {}
            differing = [f"{n} {v!r}, here {here[n]!r}" for n, v in (stored or {}).items() if v != here[n]]
            told = " and ".join(differing) or "the images as they are"
            raise ValueError(
                "The views of images that a teacher has stored must be those of the training, and the same for all "
                f"teachers of a set, but one has {told}. Embed with the options of the training."
            )
        self.part.name_places(self.number, count)

    def lacking(self, stored: StoredEmbeddings) -> frozenset[str] | int | None:
        """The shards, or the number of rows, that a folder of this set lacks; None if it is of other data."""
        recorded, part = stored.record["data"], self.part
        if isinstance(part, ImageTextDataset):
            if self.difference(stored):
                return None
            if (folder := str(stored.folder)) not in self._lacking:
                without = _rows_without_captions(part, stored) if KINDS["text"] in self._kinds else 0
                self._lacking[folder] = max(without, recorded["rows"] - stored.rows)
            return self._lacking[folder]
        shards = self._described["shards"]
        embedded = {name for name, tag in recorded.get("shards", {}).items() if shards.get(name) == tag}
        return frozenset(shards) - embedded if embedded else None

    def changed(self, stored: StoredEmbeddings) -> tuple[str, ...]:
        """The beginnings of the places of samples whose shards have changed since they were embedded."""
        recorded, shards = stored.record["data"].get("shards", {}), self._described.get("shards", {})
        return tuple(f"{name}/" for name, tag in recorded.items() if shards.get(name, tag) != tag)

    def difference(self, stored: StoredEmbeddings) -> str:
        """How this set differs from the one that was embedded; empty if it does not."""
        recorded = stored.record["data"]
        if isinstance(self.part, ImageTextDataset):
            return differences(recorded, self._described, self._kinds)
        shards = counted(len(self._described["shards"]), "shard")
        return f"of its {shards}, none is one of the {len(recorded.get('shards', {}))}"

    def describe_missing(self, opened: Sequence[StoredEmbeddings]) -> str:
        """How many rows or shards no folder has, in words; empty if there are none."""
        lacks = [self.lacking(stored) for stored in opened]
        if isinstance(self.part, ImageTextDataset):
            missing = min((rows for rows in lacks if isinstance(rows, int)), default=len(self.part))
            every = counted(len(self.part), "row")
        else:
            shards = frozenset(self._described["shards"])
            missing = len(shards.intersection(*[some for some in lacks if isinstance(some, frozenset)]))
            every = counted(len(shards), "shard")
        return f"{missing:,} of the {every} of {self.part.name}" if missing else ""


def _rows_without_captions(part: ImageTextDataset, stored: StoredEmbeddings) -> int:
    """The number of rows of a table that have a caption without an embedding. A million captions take six seconds."""
    table, first, lacking = part.table.select_columns([part.caption_column]).with_format(None), 0, 0
    numbers = part.numbers if part.places_of_whole and part.numbers is not None else np.arange(len(part))
    for batch in table.iter(10_000):
        captions = [usable_captions(value) for value in batch[part.caption_column]]
        keys = [of_caption(str(numbers[first + n]), c) for n, several in enumerate(captions) for c in several]
        row_of_each = np.repeat(np.arange(len(captions)), list(map(len, captions)))
        lacking += len(np.unique(row_of_each[~stored.has(KINDS["text"], keys)]))
        first += len(captions)
    return lacking


class StoredTeacher:
    """A `Teacher` whose embeddings were stored: looked up by the place of each item in its data set.

    Args:
        sets: by the number of each data set that was embedded, the beginnings of places whose samples have changed.
        partial: whether items without an embedding are left out, and all batches say which.
    """

    def __init__(
        self,
        embeddings: StoredEmbeddings,
        sets: Mapping[int, tuple[str, ...]],
        sides: Sequence[str],
        *,
        partial: bool,
        number: int,
    ) -> None:
        self._embeddings, self._sets, self._sides = embeddings, sets, sides
        self._partial, self._prefix = partial, teacher_prefix(number)
        record, self.width = embeddings.record, embeddings.width
        self.options: Mapping[str, Any] = {name: record[name] for name in ("fingerprint", "weights")}
        self.words = f"{teacher_words(record['model'], record.get('licence'))}, whose embeddings were stored"

    def embed(self, inputs: Mapping[str, Tensor], frozen_outputs: Mapping[str, object]) -> Features:
        return tuple(F.normalize(inputs[f"{self._prefix}{side}s"].float(), dim=-1) for side in self._sides)

    def known(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return inputs[f"{self._prefix}known_images"], inputs[f"{self._prefix}known_texts"]

    def inputs(self, items: Sequence[Any], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        places = [item["place"][:2] for item in items]
        has_set = np.array([number in self._sets and not key.startswith(self._sets[number]) for number, key in places])
        keys = [key for _, key in places]
        counts = np.array([len(item["caption"]) for item in items])
        known, arrays = has_set.copy(), {}
        if "image" in self._sides:
            of_views = [item["place"][2] for item in items]
            arrays["images"], of_images = self._embeddings.find("images", of_views if self._embeddings.views else keys)
            known &= of_images
        if "text" in self._sides:
            captions = [of_caption(key, c) for key, item in zip(keys, items, strict=True) for c in item["caption"]]
            arrays["texts"], of_texts = self._embeddings.find("texts", captions)
            known &= np.logical_and.reduceat(of_texts, np.cumsum(counts) - counts)
        if not self._partial and not known.all():
            raise ValueError(
                f"{self._embeddings.folder} has no embedding of {keys[int((~known).argmax())]} or of its caption, "
                "although it was made from this training set. Was it changed since? Embed it again, or pass "
                "teacher_missing='contrastive'."
            )
        added = {name: torch.from_numpy(values) for name, values in arrays.items()}
        if self._partial:
            texts = np.repeat(known, counts)
            negatives = len(batch["input_ids"]) - len(texts)
            added["known_images"] = torch.from_numpy(known)
            added["known_texts"] = torch.from_numpy(np.concatenate([texts, np.zeros(negatives, bool)]))
        return {f"{self._prefix}{name}": value for name, value in added.items()}
