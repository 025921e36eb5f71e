"""Reads the samples of tar and parquet shards, starting at any position.

A position is a byte offset in a tar file and a row number in a parquet file. Reading can start at every position that a
reader has returned, without reading the preceding bytes or rows.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .names import IMAGE_EXTENSIONS, apart, dots_in, few, sample_key, shown
from .opening import open_shard
from .tar_layout import BLOCK, DamagedShardError, split_name, tar_members, tar_samples, truncated
from .tar_tables import tar_table
from .values import counted, json_object

if TYPE_CHECKING:
    import datasets
    from pyarrow import DataType
    from pyarrow.parquet import ParquetFile

# Number of samples that are inspected to find out where images and captions are.
_PROBED = 100
_PARQUET_BUFFER = 2**16


class Columns(NamedTuple):
    """The names of the parts of a sample; None for a part that is not needed.

    In tar files ``image`` is "image", for the file with an extension of an image, or the extension to take; the others
    are fields of the ``.json`` or extensions of text files, and the caption "caption" falls back to ``.txt``. In
    parquet files they are columns: of structs of ``bytes`` or ``path``, as `datasets` writes images, of encoded images
    or of paths relative to the file; of strings or lists of strings for captions; of strings or integers for pair ids.
    """

    image: str | None
    caption: str | None
    pair_id: str | None = None
    negative_caption: str | None = None


# ---- Tar ----


class TarReader:
    """Samples of webdataset tar files: successive files whose names are equal up to the first dot of the last part.

    Args:
        urls: the shards; their first samples show which images and captions exist. At least one of these samples must
            have a negative caption.

    Raises:
        ValueError: the first samples have no such image, caption or pair id; the message names their files and fields.
    """

    def __init__(self, columns: Columns, urls: Sequence[str]) -> None:
        self.has_lists = False  # whether the captions are lists of strings
        self._extensions: frozenset[str] | None = None  # all are read, until it is known which are needed
        problem = f"The shard {urls[0]!r} holds no samples."
        for url, key, sample in itertools.islice(_first_samples(self, urls), _PROBED):
            if isinstance(sample, DamagedShardError):
                problem = str(sample)
                continue
            try:
                fields = _json_fields(sample)
            except ValueError as error:
                problem = f"Sample {shown(key)} of the shard {url!r} has a .json that cannot be read: {error}."
                continue
            if not (missing := self._find(columns, sample, fields)):
                return
            there = f"Sample {shown(key)} of the shard {url!r} has the files {_dotted(sample)}"
            there += f" and the JSON fields {few(map(repr, sorted(fields)))}." if "json" in sample else "."
            problem = f"{missing} {there}{dots_in(key, sample)}"
            if columns.image == "image" and len(_images(sample)) > 1:  # the user has to name one
                break
        with suppress(DamagedShardError):  # the keys are looked at up to where the shard is damaged
            problem += apart(self.names(urls[0]))
        raise ValueError(problem)

    def _find(self, columns: Columns, sample: dict[str, bytes], fields: Mapping[str, object]) -> str:
        """Finds the files and JSON fields of a sample that hold the columns.

        Returns:
            A sentence about the first column that was not found; empty if all were.
        """
        images = _images(sample)
        if columns.image == "image" and len(images) > 1:
            return f"There are several images: name one of {_dotted(images)} with image_column."
        places: dict[str, tuple[bool, str]] = {}
        if columns.image is not None:
            image = columns.image
            if image not in sample:
                if image != "image" or not images:
                    return f"No image was found for image_column {image!r}."
                image = images[0]
            places[columns.image] = False, image
        for what, option, column in (
            ("caption", "caption_column", columns.caption),
            ("pair id", "pair_id_column", None if columns.pair_id == columns.caption else columns.pair_id),
            ("caption", "negative_caption_column", columns.negative_caption),
        ):
            if not column:
                continue
            # Whether it is a field of the JSON, and the field or extension.
            place = (True, column) if column in fields else (False, column) if column in sample else None
            if place is None and column == columns.caption == "caption" and "txt" in sample:
                place = False, "txt"
            if place is None:
                return f"No {what} was found for {option} {column!r}."
            places[column] = place
        if columns.caption:
            self.has_lists = places[columns.caption][0] and isinstance(fields[columns.caption], list)
        self._columns, self._image_column = places, columns.image
        self._any_image = columns.image is not None and columns.image not in sample
        extensions = frozenset("json" if in_json else extension for in_json, extension in places.values())
        self._extensions = extensions | IMAGE_EXTENSIONS if self._any_image else extensions
        return ""

    def samples(
        self, url: str, position: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, str, dict[str, bytes] | DamagedShardError]]:
        """(position after it, key, contents by extension) of each sample that begins from position to before stop.

        An error takes the place of the contents if it is not certain what belongs to the sample.
        """
        wanted = self._extensions

        def contents(file: io.BufferedReader, extension: str, size: int) -> bytes | None:
            if wanted is not None and extension not in wanted:
                return None
            data = file.read(size)
            if len(data) < size:
                raise truncated(url, file.tell())
            return data

        with open_shard(url, position) as file:
            yield from tar_samples(file, url, contents, position, stop)

    def row(self, sample: dict[str, bytes]) -> dict[str, Any]:
        """The values of the columns; None for a column that the sample does not have."""
        fields = None
        row: dict[str, Any] = {}
        for column, (in_json, extension) in self._columns.items():
            if column == self._image_column:
                chosen = next((e for e in sample if e in IMAGE_EXTENSIONS), "") if self._any_image else extension
                row[column] = sample.get(chosen)
            elif in_json:
                fields = _json_fields(sample) if fields is None else fields
                row[column] = fields.get(extension)
            else:
                text = sample.get(extension)
                row[column] = None if text is None else text.decode("utf-8").strip()
        return row

    def names(self, url: str) -> Iterator[str]:
        """The key of each sample, after one pass over the headers."""
        yield from (key for _, key in _beginnings(url))

    def pieces(self, url: str, parts: int) -> list[tuple[int, int | None]]:
        """(position, stop) of ``parts`` pieces with equally many samples, after one pass over the headers."""
        return _pieces(url, [start for start, _ in _beginnings(url)], parts)


def _json_fields(sample: dict[str, bytes]) -> dict[str, Any]:
    """The fields of a sample's JSON; raises a ValueError for anything but a JSON object."""
    return json_object(sample["json"]) if "json" in sample else {}


def _images(sample: dict[str, bytes]) -> list[str]:
    """The extensions of the images in a sample."""
    return [extension for extension in sample if extension in IMAGE_EXTENSIONS]


def _dotted(extensions: Iterable[str]) -> str:
    return few(f".{extension}" for extension in extensions)


def _beginnings(url: str) -> Iterator[tuple[int, str]]:
    """(position, key) of each sample of a tar file, in one pass over the headers."""
    key = ""
    with open_shard(url, buffer=BLOCK) as file:
        for start, name, _, _ in tar_members(file, url, 0):
            stem = split_name(name)[0]
            if stem and stem != key:
                key = stem
                yield start, key


# ---- Parquet ----


class ParquetReader:
    """Rows of parquet files; only the needed columns are read, and only the row groups from the position on.

    Args:
        urls: the shards; the first one determines the columns.

    Raises:
        ValueError: the first file lacks a column, or has one of another type.
    """

    def __init__(self, columns: Columns, urls: Sequence[str]) -> None:
        import pyarrow.types as types

        image_column, caption_column, pair_id_column, negative_column = columns
        self._image_column = image_column
        self._columns = list(dict.fromkeys(column for column in columns if column))
        with open_shard(urls[0], buffer=_PARQUET_BUFFER) as file:
            schema = _parquet_file(file, urls[0]).schema_arrow
        options = ("image_column", "caption_column", "pair_id_column", "negative_caption_column")
        for option, column in zip(options, columns, strict=True):
            if column and column not in schema.names:
                raise ValueError(
                    f"The shard {urls[0]!r} has no column {column!r}. Its columns are {schema.names}. Name the right "
                    f"one with {option} (--{option} on the command line)."
                )
        wrong = None
        if image_column and not _are_images(image := schema.field(image_column).type):
            wrong = f"image_column {image_column!r} must hold encoded images, or structs with their bytes, not {image}"
        for option, column in (("caption_column", caption_column), ("negative_caption_column", negative_column)):
            captions = schema.field(column).type if column else None
            if column and not _are_texts(captions):
                wrong = wrong or f"{option} {column!r} must hold strings or lists of strings, not {captions}"
        if not wrong and pair_id_column and pair_id_column != caption_column:
            ids = schema.field(pair_id_column).type
            if not (types.is_integer(ids) or _is_text(ids)):
                wrong = f"pair_id_column {pair_id_column!r} must hold integers or strings, not {ids}"
        if wrong:
            raise ValueError(f"The shard {urls[0]!r} does not fit: {wrong}.")
        self.has_lists = bool(caption_column) and _are_lists(schema.field(caption_column).type)

    def samples(
        self, url: str, position: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """(row number after it, row number as text, values by column) of each row from position to before stop."""
        with open_shard(url, buffer=_PARQUET_BUFFER) as raw:
            file = _parquet_file(raw, url)
            stop = file.metadata.num_rows if stop is None else stop
            begin = 0
            for group in range(file.num_row_groups):
                end = begin + file.metadata.row_group(group).num_rows
                if end > position and begin < stop:
                    for row, values in enumerate(_rows(file, url, group, self._columns), begin):
                        if position <= row < stop:
                            yield row + 1, str(row), values
                begin = end

    def row(self, sample: dict[str, Any]) -> dict[str, Any]:
        """The values of the columns; an image is the contents of its file, or the path of a file beside the shard."""
        if self._image_column is None:
            return sample
        image = sample[self._image_column]
        if isinstance(image, dict):
            image = image.get("path") if image.get("bytes") is None else image["bytes"]
        return {**sample, self._image_column: image}

    def names(self, url: str) -> Iterator[str]:
        """The number of each row as text, by the number of rows alone."""
        with open_shard(url, buffer=_PARQUET_BUFFER) as file:
            yield from map(str, range(_parquet_file(file, url).metadata.num_rows))

    def pieces(self, url: str, parts: int) -> list[tuple[int, int | None]]:
        """(row, stop) of ``parts`` pieces with equally many rows. Both sides read a row group on their border."""
        with open_shard(url, buffer=_PARQUET_BUFFER) as file:
            return _pieces(url, range(_parquet_file(file, url).metadata.num_rows), parts)


def _parquet_file(file: io.BufferedReader, url: str) -> ParquetFile:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowException as error:
        raise DamagedShardError(f"The shard {url!r} is truncated or no parquet file: {error}") from error


def _rows(file: ParquetFile, url: str, group: int, columns: list[str]) -> Iterator[dict[str, Any]]:
    import pyarrow

    try:
        for batch in file.iter_batches(batch_size=64, row_groups=[group], columns=columns):
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DamagedShardError(f"Row group {group} of the shard {url!r} is damaged: {error}") from error


def _are_images(kind: DataType) -> bool:
    import pyarrow.types as types

    is_struct = types.is_struct(kind) and any(kind.get_field_index(name) >= 0 for name in ("bytes", "path"))
    return is_struct or _is_text(kind) or types.is_binary(kind) or types.is_large_binary(kind)


def _are_lists(kind: DataType) -> bool:
    import pyarrow.types as types

    return types.is_list(kind) or types.is_large_list(kind)


def _are_texts(kind: DataType) -> bool:
    return _is_text(kind.value_type if _are_lists(kind) else kind)


def _is_text(kind: DataType) -> bool:
    import pyarrow.types as types

    return types.is_string(kind) or types.is_large_string(kind)


# ---- Both ----


class KeptSamples:
    """A reader of one shard that leaves out the samples with some keys.

    Args:
        reader: reads all samples, or itself leaves some out.
        shard: the name of the shard.
        without: [n] int64 in ascending order, the keys.
    """

    def __init__(self, reader: Reader, shard: str, without: np.ndarray) -> None:
        self.has_lists: bool = reader.has_lists
        self.row: Callable[[dict[str, Any]], dict[str, Any]] = reader.row
        self.names: Callable[[str], Iterator[str]] = reader.names
        self.pieces: Callable[[str, int], list[tuple[int, int | None]]] = reader.pieces
        self._reader, self._shard, self._without = reader, shard, without

    def samples(self, url: str, position: int = 0, stop: int | None = None) -> Iterator[tuple[int, str, Sample]]:
        """The samples of the reader, without those of these keys."""
        for after, name, sample in self._reader.samples(url, position, stop):
            key = sample_key(self._shard, name)
            at = int(np.searchsorted(self._without, key))
            if at == len(self._without) or self._without[at] != key:
                yield after, name, sample


Reader = TarReader | ParquetReader | KeptSamples
Sample = dict[str, Any] | DamagedShardError  # as a reader yields it, for its `row`


def make_reader(urls: Sequence[str], columns: Columns) -> Reader:
    """The reader of shards that are all tar files, or all parquet files."""
    parquet = [url.endswith(".parquet") for url in urls]
    if any(parquet) and not all(parquet):
        raise ValueError(
            f"{urls[0]!r} and {urls[parquet.index(not parquet[0])]!r} have different formats. Name tar and parquet "
            "files as two sources."
        )
    kind = ParquetReader if parquet[0] else TarReader
    return kind(columns, urls)


def read_features(urls: Sequence[str], image_column: str) -> datasets.Features:
    """The columns that shards have as a table, as their first samples or their schema show them.

    Raises:
        ValueError: no sample of tar files, or not the first parquet file, can be read.
    """
    import datasets

    if not urls[0].endswith(".parquet"):
        return tar_table([(url, url) for url in urls], image_column, "train", _PROBED).features
    with open_shard(urls[0], buffer=_PARQUET_BUFFER) as file:
        return datasets.Features.from_arrow_schema(_parquet_file(file, urls[0]).schema_arrow)


def _first_samples(
    reader: TarReader, urls: Sequence[str]
) -> Iterator[tuple[str, str, dict[str, bytes] | DamagedShardError]]:
    for url in urls:
        try:
            for _, key, sample in reader.samples(url):
                yield url, key, sample
        except DamagedShardError as error:  # noqa: PERF203
            yield url, "", error


def _pieces(url: str, starts: Sequence[int], parts: int) -> list[tuple[int, int | None]]:
    """Divides the samples that begin at ``starts`` into ``parts`` pieces whose sizes differ by at most one."""
    if len(starts) < parts:
        raise ValueError(
            f"The shard {url!r} has {counted(len(starts), 'sample')} and cannot be shared among {parts} readers. Use "
            "fewer DataLoader workers or processes, or more shards."
        )
    firsts = [starts[len(starts) * part // parts] for part in range(parts)]
    return list(zip(firsts, [*firsts[1:], None], strict=True))
