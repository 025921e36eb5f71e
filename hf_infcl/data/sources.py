"""The images and captions of data sets, in parts that are read one at a time, and by what such data are recognised."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ..files.text import counted
from ..shards.opening import content_tag
from . import ContrastiveCollator, ImageTextDataset, ImageTextStream
from .images import BadSampleError, ImageDataset, find_error, with_errors
from .pairs import usable_captions

if TYPE_CHECKING:
    import datasets

ROWS_OF_PART = 8192  # of a table
SAMPLED = 32  # rows by which a table is recognised
ORDER = "image sizes", "image names"  # what tells the order of all rows; tables of both kinds have one of these

# Its row, by what a store finds it, how people know it, perhaps its image and captions; or its row and what makes it
# bad.
Item = dict[str, Any]
Batch = tuple[list[Item], list[str], dict[str, Tensor] | None, dict[str, Tensor] | None]  # see `collated`
MakeLoader = Callable[..., Iterable[Batch]]  # a DataLoader of a dataset and its options


class TableSource(Dataset[Item]):
    """A table: images, captions or both.

    Args:
        images: their images, if they have any.
        caption_column: None if there are no captions.
        key_column: names the rows; by default the paths of the images do, or else the numbers of the rows.
        folder: the folder of the table, to which paths of images become relative if they are names.
        skips: whether a bad row is left out.

    Attributes:
        kinds: which of "images" and "texts" it has.
        parts: their number.
    """

    def __init__(
        self,
        table: datasets.Dataset,
        images: ImageDataset | None,
        caption_column: str | None,
        key_column: str | None = None,
        *,
        folder: str = "",
        skips: bool = False,
    ) -> None:
        self._images, self._caption_column, self._key_column = images, caption_column, key_column
        columns = dict.fromkeys(column for column in (caption_column, key_column) if column)
        self._texts = table.with_format(None).select_columns(with_errors(table, columns))
        self._folder, self._skips = os.path.abspath(folder), skips
        self.kinds = (*(["images"] if images else []), *(["texts"] if caption_column else []))
        self.parts = -(-len(table) // ROWS_OF_PART)

    def read(self, parts: Sequence[int], batch_size: int, load: MakeLoader) -> Iterator[Iterator[Batch]]:
        """Yields the batches of each part; see `collated`, with which ``load`` makes a DataLoader."""
        rows = [range(len(self))[part * ROWS_OF_PART : (part + 1) * ROWS_OF_PART] for part in parts]
        cuts = [[part[first : first + batch_size] for first in range(0, len(part), batch_size)] for part in rows]
        # One loader for all parts, whose workers prepare the next part while one is written.
        batches = iter(load(self, batch_sampler=[*itertools.chain(*cuts)]))
        for part in cuts:
            yield itertools.islice(batches, len(part))

    def __len__(self) -> int:
        return len(self._images or self._texts)

    def fingerprint(self) -> str:
        """A fingerprint of everything that is read."""
        of_images = "" if self._images is None else self._images.image_fingerprint()
        return f"{of_images} {self._texts._fingerprint} {self._caption_column}"

    def described(self) -> dict[str, Any]:
        """By what a training recognises the data, also on another machine.

        These are its length, and hashes of a few images and of the captions of a few rows. A hash of the sizes of all
        images, or of the names of their files if the table does not hold these, tells whether the rows were put into
        another order. Neither is read: of 10 million rows that takes less than a second, or four. Images of one size
        without names may change places unnoticed if none of them is among the few: to read a part of each would take
        minutes.
        """
        sampled = range(0, len(self), -(-len(self) // SAMPLED))
        description: dict[str, Any] = {"rows": len(self)}
        if self._images is not None:
            description["images"] = _digest(_read(self._images.encoded, row) for row in sampled)
            description |= _order(self._images)
        if column := self._caption_column:
            description["texts"] = _digest(repr(usable_captions(self._texts[row][column])).encode() for row in sampled)
        return description

    def __getitem__(self, row: int) -> Item:
        try:
            return self._item(row)
        except BadSampleError as error:
            if not self._skips:
                raise
            return {"row": row, "bad": str(error)}

    def _item(self, row: int) -> Item:
        value = self._texts[row] if self._texts.column_names else {}
        if error := find_error(value):
            cause = error.rstrip(".")
            what = f"Row {row} of the data is bad: {cause}. Repair or drop it, or pass --on_bad_sample skip."
            raise BadSampleError(what, error)
        key = str(row if self._images is None else self._images.number(row))
        item: Item = {"row": row, "key": key, "name": key}
        if self._key_column:
            item["name"] = str(value[self._key_column])
        if self._caption_column:
            item["caption"] = usable_captions(value[self._caption_column])
        if self._images is None:
            return item
        item["image"], path = self._images.image_and_path(row)
        if path is not None and self._key_column is None:
            inside = os.path.isabs(path) and os.path.commonpath([path, self._folder]) == self._folder
            item["name"] = os.path.relpath(path, self._folder) if inside else path
        return item


class ShardSource:
    """Image-text pairs in tar or parquet shards, each of which is a part.

    Args:
        stream: names the shards and their columns. All captions of an image are read, and it may have none.

    The rest is as for `TableSource`.
    """

    def __init__(self, stream: ImageTextStream) -> None:
        self._stream = stream
        columns = {"images": stream.image_column, "texts": stream.caption_column}
        self.kinds = tuple(kind for kind, column in columns.items() if column is not None)
        self.parts = len(stream.shards)

    def read(self, parts: Sequence[int], batch_size: int, load: MakeLoader) -> Iterator[Iterator[Batch]]:
        for part in parts:
            yield iter(load(_ShardSamples(self._stream, part), batch_size=batch_size))

    def fingerprint(self) -> str:
        deciding = "image_column", "caption_column", "on_bad_sample", "min_side"
        options = {name: self._stream.options[name] for name in deciding}
        return f"{self._stream.content_fingerprint()} {options}"

    def described(self) -> dict[str, Any]:
        """By what a training recognises the shards: the name of each, and its size or its revision on the Hub."""
        tags = [content_tag(shard.url) for shard in self._stream.shards]
        return {"shards": dict(zip(self._stream.places, tags, strict=True))}


class _ShardSamples(IterableDataset[Item]):
    """The samples of a shard. Each of the workers reads the shard and decodes its share."""

    def __init__(self, stream: ImageTextStream, number: int) -> None:
        self._stream, self._number = stream, number

    def __iter__(self) -> Iterator[Item]:
        info, shard = get_worker_info(), self._stream.shards[self._number]
        first, step = (info.id, info.num_workers) if info else (0, 1)
        samples = enumerate(shard.reader.samples(shard.url))
        for row, (_, key, sample) in itertools.islice(samples, first, None, step):
            try:
                parts = self._stream.image_and_captions(self._number, key, sample)
            except BadSampleError as error:
                if self._stream.on_bad_sample == "raise":
                    raise
                yield {"row": row, "bad": str(error)}
                continue
            place = self._stream.place(self._number, key)
            yield {"row": row, "key": place, "name": place, **parts}


def collated(collator: ContrastiveCollator, items: Sequence[Item]) -> Batch:
    """A batch of items, whose images and captions the collator prepares for the model.

    A batch is a tuple: the good items without their images, what makes the bad ones bad, and the model's inputs for
    the images and for the texts, each None if there are none.
    """
    bad = [item["bad"] for item in items if "bad" in item]
    good = [item for item in items if "bad" not in item]
    images = [{"image": item.pop("image")} for item in good if "image" in item]
    texts = [caption for item in good for caption in item.get("caption", ())]
    return good, bad, collator(images) if images else None, collator.tokenize(texts) if texts else None


ItemSource = TableSource | ShardSource  # what a model is computed on


def source_of_training(data: ImageTextDataset | ImageTextStream) -> ItemSource:
    """The images and captions of a training set, as they are."""
    if isinstance(data, ImageTextStream):
        return ShardSource(data)
    return TableSource(data.table, data, data.caption_column, skips=data.on_bad_sample == "skip")


# ---- By what data are recognised ----


def differences(recorded: Mapping[str, Any], described: Mapping[str, Any], kinds: Iterable[str]) -> str:
    """How a set differs from the one that was recorded, by `described` of both; empty if it does not.

    Shards do not differ if any of them was recorded.
    """
    if shards := described.get("shards"):
        embedded = recorded.get("shards", {})
        are_other = f"of its {counted(len(shards), 'shard')}, none is one of the {len(embedded)}"
        return "" if shards.items() & embedded.items() else are_other
    # With other rows, images and texts differ as well.
    names = ["rows"] if recorded.get("rows") != described.get("rows") else [*kinds]
    if "images" in names:
        names += [name for name in ORDER if name in recorded and name in described]
    return ", ".join(
        f"{name} {'were' if name != 'rows' else 'of the set were'} {recorded.get(name)} and are {described.get(name)}"
        for name in names
        if recorded.get(name) != described.get(name)
    )


def _order(images: ImageDataset) -> dict[str, str]:
    """The hash of the sizes or the names of all images; see `TableSource.described`."""
    sizes = images.computed("bytes", pc.binary_length)
    if sizes.null_count < len(sizes):
        return {ORDER[0]: _digest([sizes.fill_null(-1).to_numpy().astype(np.int64).tobytes()])}
    names = images.computed("path", lambda paths: pc.replace_substring_regex(paths, r"^.*[/\\]", ""))
    return {ORDER[1]: _digest(["\0".join(names.fill_null("").to_pylist()).encode()])}


def _read(encoded: Callable[[int], bytes], row: int) -> bytes:
    try:
        return encoded(row)
    except BadSampleError:
        return b"bad"


def _digest(values: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(hashlib.blake2b(value).digest())
    return digest.hexdigest()[:16]
