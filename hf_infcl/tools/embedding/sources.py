"""The images and captions to embed, in parts that are read and written one at a time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, get_worker_info

from ...data import ContrastiveCollator, ImageTextDataset, ImageTextStream, load_pairs
from ...data.columns import find_caption_column, find_image_column
from ...data.images import BadSampleError, ImageDataset, find_error, with_errors
from ...data.pairs import usable_captions
from ...loading.stored_embeddings import described_shards, described_table
from ...loading.stored_teachers import describe_views
from ...shards.names import IMAGE_EXTENSIONS
from ...shards.opening import find_shards
from ...shards.readers import ParquetReader, reader_of

if TYPE_CHECKING:
    import datasets

# Its row, its key, its place, perhaps its images by their places and its captions; or its row and what makes it bad.
Item = dict[str, Any]
Batch = tuple[list[Item], list[str], dict[str, Tensor] | None, dict[str, Tensor] | None]  # see `collated`
MakeLoader = Callable[..., Iterable[Batch]]  # a DataLoader of a dataset and its options
ROWS_OF_PART = 8192  # of a table


class ItemSource(Protocol):
    """What is embedded."""

    kinds: tuple[str, ...]  # which of "images" and "texts" it has
    parts: int  # their number

    def read(self, parts: Sequence[int], batch_size: int, load: MakeLoader) -> Iterator[Iterator[Batch]]:
        """Yields the batches of each part; see `collated`, with which ``load`` makes a DataLoader."""

    def image_fingerprint(self) -> str:
        """A fingerprint of everything that is embedded."""

    def described(self) -> dict[str, Any]:
        """By what a training recognises the data."""


def found_columns(
    features: datasets.Features, image_column: str, caption_column: str, named: Sequence[str]
) -> tuple[str | None, str | None]:
    """The columns of images and captions: the wanted ones, or else the usual ones, or None; see `table_source`."""
    for option, column in (("image_column", image_column), ("caption_column", caption_column)):
        if option in named:
            _check_column(option, column, [*features])
    images, captions = find_image_column(features, image_column), find_caption_column(features, caption_column)
    if images not in features and captions not in features:
        raise ValueError(
            f"The data has neither images nor captions that could be found: its columns are {[*features]}. Name them "
            "with --image_column and --caption_column."
        )
    return images if images in features else None, captions if captions in features else None


def _check_column(option: str, column: str, names: Sequence[str]) -> None:
    if column not in names:
        raise ValueError(f"The data has no column {column!r}, which --{option} names. Its columns are {names}.")


def shard_columns(
    shards: Sequence[str], image_column: str, caption_column: str, named: Sequence[str]
) -> tuple[str | None, str | None]:
    """The columns of images and captions in shards, by the names that `ImageTextStream` takes; see `found_columns`."""
    reader = reader_of(shards)
    features = reader.features(shards, image_column)
    if reader is ParquetReader:
        return found_columns(features, image_column, caption_column, named)
    several = "image" not in features and sum(name in IMAGE_EXTENSIONS for name in features) > 1
    if "image" in (image_column, *features) or several:  # several are told by the reader, to which "image" is any
        named = [option for option in named if option != "image_column"]
    if caption_column == "caption" and caption_column not in features and "txt" in features:
        features = {**features, "caption": features["txt"]}
    images, captions = found_columns(features, image_column, caption_column, named)
    return image_column if images or several else None, captions


def make_source(
    data: str,
    image_column: str,
    caption_column: str,
    key_column: str | None,
    named: Sequence[str],
    *,
    split: str,
    name: str | None,
    streaming: bool,
    on_bad_sample: str,
) -> ItemSource:
    """The images and captions of a collection: a folder, a Hub id or, ``streaming``, shards; see `table_source`."""
    if not streaming:
        table, skips = load_pairs(data, split=split, name=name, image_column=image_column), on_bad_sample == "skip"
        return table_source(table, image_column, caption_column, key_column, data, skips=skips, named=named)
    if key_column:
        raise ValueError("--key_column is for tables: the keys of a stream are the names of its samples. Omit it.")
    images, captions = shard_columns(find_shards(data, split=split), image_column, caption_column, named)
    options: dict[str, Any] = {"image_column": images, "caption_column": captions, "on_bad_sample": on_bad_sample}
    return ShardSource(ImageTextStream(data, split=split, **options))


def make_sources(
    new: ImageTextDataset | ImageTextStream,
    old: ImageTextDataset | ImageTextStream | ConcatDataset[Item] | None,
    views: int | None,
) -> dict[str, ItemSource]:
    """The sets of a training, by the names of their folders: the new pairs and, if there are any, the old ones.

    ``views`` is as for `ShardSource`.
    """
    sets = [new, *([] if old is None else getattr(old, "datasets", [old]))]
    names = ["dataset", *(f"replay_dataset_{number}" for number in range(1, len(sets)))]
    return {name: source_of_training(one, views) for name, one in zip(names, sets, strict=True)}


def source_of_training(data: ImageTextDataset | ImageTextStream, views: int | None = None) -> ItemSource:
    """The images and captions of a training set; ``views`` is as for `ShardSource`."""
    if isinstance(data, ImageTextStream):
        return ShardSource(data, views)
    skips = data.options["on_bad_sample"] == "skip"
    return TableSource(data.table, data, data.caption_column, skips=skips, views=views)


def table_source(
    table: datasets.Dataset,
    image_column: str,
    caption_column: str,
    key_column: str | None,
    folder: str,
    *,
    skips: bool = False,
    named: Sequence[str] = (),
) -> TableSource:
    """A table with the wanted columns, or else those of `find_image_column` and `find_caption_column`, if it has any.

    ``named`` are the options of columns that must exist, because the user has set them.
    """
    if len(table) == 0:
        raise ValueError("The data has no rows.")
    if key_column is not None and "key_column" in named:
        _check_column("key_column", key_column, table.column_names)
    images, captions = found_columns(table.features, image_column, caption_column, named)
    columns = {"caption_column": captions, "key_column": key_column}
    dataset = ImageDataset(table, images, columns) if images else None
    return TableSource(table, dataset, captions, key_column, folder=folder, skips=skips)


class TableSource(Dataset[Item]):
    """A table: images, captions or both.

    Args:
        images: their images, if they have any.
        caption_column: None if there are no captions.
        key_column: names the rows; by default the paths of the images do, or else the numbers of the rows.
        folder: the folder of the table, to which paths of images become relative if they are keys.
        skips: whether a bad row is left out.
        views: the number of epochs whose augmented images are embedded; None for the images as they are.
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
        views: int | None = None,
    ) -> None:
        self._images, self._views = images, views
        columns = dict.fromkeys(column for column in (caption_column, key_column) if column)
        self._texts = table.with_format(None).select_columns(with_errors(table, columns))
        self._caption_column, self._key_column = caption_column, key_column
        self._folder, self._skips = os.path.abspath(folder), skips
        self.kinds = (*(["images"] if images else []), *(["texts"] if caption_column else []))
        self.parts = -(-len(table) // ROWS_OF_PART)

    def read(self, parts: Sequence[int], batch_size: int, load: MakeLoader) -> Iterator[Iterator[Batch]]:
        ends = [(part * ROWS_OF_PART, min(len(self), (part + 1) * ROWS_OF_PART)) for part in parts]
        cuts = [
            [list(range(i, min(i + batch_size, end))) for i in range(begin, end, batch_size)] for begin, end in ends
        ]
        # One loader for all parts, whose workers prepare the next part while one is written.
        batches = iter(load(self, batch_sampler=[*itertools.chain(*cuts)]))
        for part in cuts:
            yield itertools.islice(batches, len(part))

    def __len__(self) -> int:
        return len(self._images or self._texts)

    def image_fingerprint(self) -> str:
        if self._images is None:
            return self._texts._fingerprint
        return f"{self._images.image_fingerprint()}{_of_views(self._images, self._views) or ''}"

    def described(self) -> dict[str, Any]:
        captions = self._captions if self._caption_column else None
        return described_table(len(self), self._images, captions) | _of_views(self._images, self._views)

    def _captions(self, row: int) -> list[str]:
        return usable_captions(self._texts[row][self._caption_column])

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
            what = f"Row {row} of the data is bad: {error}. Repair or drop it, or pass --on_bad_sample skip."
            raise BadSampleError(what, error)
        key = str(value[self._key_column]) if self._key_column else str(row)
        item: Item = {"row": row, "key": key, "place": str(row)}
        if self._caption_column:
            item["caption"] = usable_captions(value[self._caption_column])
        if self._images is None:
            return item
        image, path = self._images.image_and_path(row)
        item["images"] = {item["place"]: {"image": image}}
        if self._views is not None:
            assert isinstance(self._images, ImageTextDataset)
            item["images"] = self._images.views(image, row, self._views)
        if path is not None and self._key_column is None:
            inside = os.path.isabs(path) and os.path.commonpath([path, self._folder]) == self._folder
            item["key"] = os.path.relpath(path, self._folder) if inside else path
        return item


class ShardSource:
    """Image-text pairs in tar or parquet shards, each of which is a part.

    Args:
        stream: names the shards and their columns. All captions of an image are embedded, and it may have none.
        views: the number of passes whose augmented images are embedded; None for the images as they are.
    """

    def __init__(self, stream: ImageTextStream, views: int | None = None) -> None:
        self._stream, self._views = stream, views
        columns = {"images": stream.image_column, "texts": stream.caption_column}
        self.kinds = tuple(kind for kind, column in columns.items() if column is not None)
        self.parts = len(stream.shards)

    def read(self, parts: Sequence[int], batch_size: int, load: MakeLoader) -> Iterator[Iterator[Batch]]:
        for part in parts:
            yield iter(load(_Samples(self._stream, part, self._views), batch_size=batch_size))

    def image_fingerprint(self) -> str:
        of_views = _of_views(self._stream, self._views) or ""
        return f"{self._stream.content_fingerprint()} {self._stream.options}{of_views}"

    def described(self) -> dict[str, Any]:
        return described_shards(self._stream) | _of_views(self._stream, self._views)


def _of_views(data: Any, count: int | None) -> dict[str, Any]:
    """What the description of the data says of augmented images, if these are embedded."""
    return {} if count is None else {"views": describe_views(data, count)}


class _Samples(IterableDataset[Item]):
    """The samples of a shard. Each of the workers reads the shard and decodes its share."""

    def __init__(self, stream: ImageTextStream, number: int, views: int | None) -> None:
        self._stream, self._number, self._views = stream, number, views

    def __iter__(self) -> Iterator[Item]:
        info, shard = get_worker_info(), self._stream.shards[self._number]
        first, step = (info.id, info.num_workers) if info else (0, 1)
        samples = enumerate(shard.samples())
        for row, (_, key, sample) in itertools.islice(samples, first, None, step):
            try:
                image, captions = self._stream.image_and_captions(self._number, key, sample)
            except BadSampleError as error:
                if self._stream.on_bad_sample == "raise":
                    raise
                yield {"row": row, "bad": str(error)}
                continue
            place = self._stream.place(self._number, key)
            item: Item = {"row": row, "key": place, "place": place}
            if image is not None:
                item["images"] = {place: {"image": image}}
                if self._views is not None:
                    item["images"] = self._stream.views(image, f"{shard.name} {key}", self._views)
            if self._stream.caption_column is not None:
                item["caption"] = captions
            yield item


def collated(collator: ContrastiveCollator, items: Sequence[Item]) -> Batch:
    """A batch of items, whose images and captions the collator prepares for the model.

    A batch is a tuple: the good items, of whose images only the places are left, what makes the bad ones bad, and the
    model's inputs for the images and for the texts, each None if there are none.
    """
    bad = [item["bad"] for item in items if "bad" in item]
    good = [item for item in items if "bad" not in item]
    images = [image for item in good for image in item.get("images", {}).values()]
    texts = [caption for item in good for caption in item.get("caption", ())]
    kept = [{**item, "images": list(item.get("images", ()))} for item in good]
    return kept, bad, collator(images) if images else None, collator.tokenize(texts) if texts else None
