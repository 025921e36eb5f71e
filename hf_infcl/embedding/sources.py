"""The images and captions to embed, in parts that are read and written one at a time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ..data import ContrastiveCollator, ImageTextStream
from ..data.columns import find_caption_column, find_image_column
from ..data.images import BadSampleError, ImageDataset
from ..data.pairs import usable_captions
from ..data.streams import place_of
from ..loading.stored_embeddings import described_shards, described_table

if TYPE_CHECKING:
    import datasets

Item = dict[str, Any]  # its row, its key, perhaps its image and its captions; or its row and what makes it bad
ROWS_OF_PART = 8192  # of a table


class ItemSource(Protocol):
    """What is embedded.

    Attributes:
        kinds: which of "images" and "texts" it has.
        parts: the number of its parts.
    """

    kinds: tuple[str, ...]
    parts: int

    def read(self, parts: Sequence[int], batch_size: int, **loading: Any) -> Iterator[Iterator[Any]]:
        """For each of the parts, its batches; see `Collator`. `loading` are options of the DataLoader."""
        ...

    def image_fingerprint(self) -> str:
        """A fingerprint of everything that is embedded."""
        ...

    def described(self) -> dict[str, Any]:
        """What tells the data from others, by which a training recognises it."""
        ...


class TableSource:
    """A table: images, captions or both.

    Args:
        table: the rows.
        image_column, caption_column: the wanted columns, or else those of `find_image_column` and
            `find_caption_column`, if there are any.
        key_column: see `EmbedOptions`.
        folder: the folder of the table, to which paths of images become relative if they are keys.
        skips: whether a bad row is left out.
        named: the options of columns that must exist, because the user has given them.

    Raises:
        ValueError: the table lacks a column that was named, or has neither images nor captions.
    """

    def __init__(
        self,
        table: datasets.Dataset,
        image_column: str,
        caption_column: str,
        key_column: str | None,
        folder: str,
        *,
        skips: bool = False,
        named: Sequence[str] = (),
    ) -> None:
        if len(table) == 0:
            raise ValueError("The data has no rows.")
        features, names = table.features, table.column_names
        wanted = {"image_column": image_column, "caption_column": caption_column, "key_column": key_column}
        for option, column in wanted.items():
            if column is not None and column not in names and option in named:
                raise ValueError(f"The data has no column {column!r}, which --{option} names. Its columns are {names}.")
        usual = find_image_column(features, image_column), find_caption_column(features, caption_column)
        found = {
            "image_column": usual[0] if usual[0] in names else None,
            "caption_column": usual[1] if usual[1] in names else None,
            "key_column": key_column,
        }
        if found["image_column"] is None and found["caption_column"] is None:
            raise ValueError(
                f"The data has neither images nor captions that could be found: its columns are {names}. Name them "
                "with --image_column and --caption_column."
            )
        self._rows = _TableRows(table, **found, folder=folder, skips=skips)
        self.kinds = tuple(
            kind for kind, option in (("images", "image_column"), ("texts", "caption_column")) if found[option]
        )
        self.parts = -(-len(table) // ROWS_OF_PART)

    def read(self, parts: Sequence[int], batch_size: int, **loading: Any) -> Iterator[Iterator[Any]]:
        ends = [(part * ROWS_OF_PART, min(len(self._rows), (part + 1) * ROWS_OF_PART)) for part in parts]
        cuts = [
            [list(range(i, min(i + batch_size, end))) for i in range(begin, end, batch_size)] for begin, end in ends
        ]
        # One loader for all parts, whose workers prepare the next part while one is written.
        batches = iter(DataLoader(self._rows, batch_sampler=[*itertools.chain(*cuts)], **loading))
        for part in cuts:
            yield itertools.islice(batches, len(part))

    def image_fingerprint(self) -> str:
        return self._rows.image_fingerprint()

    def described(self) -> dict[str, Any]:
        return self._rows.described()


class _TableRows(Dataset[Item]):
    def __init__(
        self,
        table: datasets.Dataset,
        image_column: str | None,
        caption_column: str | None,
        key_column: str | None,
        *,
        folder: str,
        skips: bool,
    ) -> None:
        others = {"caption_column": caption_column, "key_column": key_column}
        self._images = ImageDataset(table, image_column, others) if image_column else None
        columns = dict.fromkeys(column for column in others.values() if column)
        self._texts = table.with_format(None).select_columns(list(columns))
        self._caption_column, self._key_column = caption_column, key_column
        self._folder, self._skips = os.path.abspath(folder), skips

    def __len__(self) -> int:
        return len(self._images or self._texts)

    def image_fingerprint(self) -> str:
        return self._texts._fingerprint if self._images is None else self._images.image_fingerprint()

    def described(self) -> dict[str, Any]:
        captions = self._captions if self._caption_column else None
        return described_table(len(self), None if self._images is None else self._images.encoded, captions)

    def _captions(self, row: int) -> list[str]:
        return usable_captions(self._texts[row][self._caption_column])

    def __getitem__(self, row: int) -> Item:
        value = self._texts[row] if self._texts.column_names else {}
        key = str(value[self._key_column]) if self._key_column else str(row)
        item: Item = {"row": row, "key": key, "place": str(row)}
        if self._caption_column:
            item["caption"] = usable_captions(value[self._caption_column])
        if self._images is None:
            return item
        try:
            item["image"], path = self._images.image_and_path(row)
        except BadSampleError as error:
            if not self._skips:
                raise
            return {"row": row, "bad": str(error)}
        if path is not None and self._key_column is None:
            inside = os.path.isabs(path) and os.path.commonpath([path, self._folder]) == self._folder
            item["key"] = os.path.relpath(path, self._folder) if inside else path
        return item


class ShardSource:
    """Image-text pairs in tar or parquet shards, each of which is a part.

    Args:
        stream: names the shards and their columns. All captions of an image are embedded.
    """

    kinds: tuple[str, ...] = ("images", "texts")

    def __init__(self, stream: ImageTextStream) -> None:
        self._stream = stream
        self.parts = len(stream.shards)

    def read(self, parts: Sequence[int], batch_size: int, **loading: Any) -> Iterator[Iterator[Any]]:
        for part in parts:
            yield iter(DataLoader(_Samples(self._stream, part), batch_size=batch_size, **loading))

    def image_fingerprint(self) -> str:
        return f"{self._stream.content_fingerprint()} {self._stream.options}"

    def described(self) -> dict[str, Any]:
        return described_shards(shard.url for shard in self._stream.shards)


class _Samples(IterableDataset[Item]):
    """The samples of a shard. Each of the workers reads the shard and decodes its share."""

    def __init__(self, stream: ImageTextStream, number: int) -> None:
        self._stream, self._number = stream, number

    def __iter__(self) -> Iterator[Item]:
        info, shard = get_worker_info(), self._stream.shards[self._number]
        first, step = (info.id, info.num_workers) if info else (0, 1)
        samples = enumerate(shard.reader.samples(shard.url))
        for row, (_, key, sample) in itertools.islice(samples, first, None, step):
            try:
                item = self._stream.item(0, self._number, key, sample)
            except BadSampleError as error:
                if self._stream.on_bad_sample == "raise":
                    raise
                yield {"row": row, "bad": str(error)}
                continue
            every: Any = shard.reader.row(sample)  # type: ignore[arg-type]  # an error has been raised above
            captions = usable_captions(every[self._stream.caption_column])
            place = place_of(shard.url, key)
            yield {"row": row, "key": place, "place": place, "image": item["image"], "caption": captions}


class Collator:
    """Turns items into batches.

    A batch is a tuple: the good items without their images, what makes the bad ones bad, and the model's inputs for the
    images and for the texts, each None if there are none.

    Args:
        collator: prepares images and captions for the model.
    """

    def __init__(self, collator: ContrastiveCollator) -> None:
        self._collator = collator

    def __call__(self, items: Sequence[Item]) -> tuple[list[Item], list[str], Any, Any]:
        bad = [item["bad"] for item in items if "bad" in item]
        good = [item for item in items if "bad" not in item]
        images = [{"image": item["image"]} for item in good if "image" in item]
        texts = [caption for item in good for caption in item.get("caption", ())]
        kept = [{name: value for name, value in item.items() if name != "image"} for item in good]
        return (
            kept,
            bad,
            self._collator(images) if images else None,
            self._collator.tokenize(texts) if texts else None,
        )
