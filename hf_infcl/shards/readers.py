"""Reads the samples of tar and parquet shards, starting at any position.

A position is a byte offset in a tar file and a row number in a parquet file. Reading can start at every position that a
reader has returned, without reading the preceding bytes or rows.
"""

import io
import itertools
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from ..files.text import lacks_column, listed, shortened
from .layout import IMAGE_EXTENSIONS, DamagedShardError, apart, dots_in, json_object, tar_samples
from .opening import open_shard

# Number of samples that are inspected to find out where images and captions are.
_PROBED = 100
_PARQUET_BUFFER = 2**16
_TAR_BUFFER = 512  # a header: what lies between headers is not read
Sample = dict[str, Any] | DamagedShardError  # as a reader yields it, for its `row`


class Columns(NamedTuple):
    """The names of the parts of a sample; None for a part that is not needed.

    In tar files ``image`` is "image", for the file with an extension of an image, or the extension to take; the others
    are fields of the ``.json`` or extensions of text files, and the caption "caption" falls back to ``.txt``. In
    parquet files they are columns: of structs of ``bytes`` or ``path``, as `datasets` writes images, of encoded images
    or of paths relative to the file; of strings or lists of strings for captions; of strings or integers for pair ids.
    """

    image: str | None
    caption: str | None
    negative_caption: str | None = None
    pair_id: str | None = None

    def texts(self) -> Iterator[tuple[str, str, str]]:
        """The options that name columns which hold texts or ids alone, what each holds, and the column."""
        for option, what, column in (
            ("caption_column", "caption", self.caption),
            ("pair_id_column", "pair id", None if self.pair_id in (self.image, self.caption) else self.pair_id),
            ("negative_caption_column", "caption", self.negative_caption),
        ):
            if column:
                yield option, what, column


def is_value(feature: object, *dtypes: str) -> bool:
    """Whether a feature of `datasets` has one of the dtypes, as a plain value or an Image has."""
    return getattr(feature, "dtype", None) in dtypes


def holds_images(feature: object) -> bool:
    """Whether a column of this feature can hold images: as such, as paths, encoded, or as ``bytes`` or ``path``."""
    if isinstance(feature, dict):
        kinds = {"bytes": ("binary", "large_binary", "null"), "path": ("string", "large_string", "null")}
        fields = [name for name in kinds if name in feature]
        return bool(fields) and all(is_value(feature[name], *kinds[name]) for name in fields)
    # The first dtype is that of the feature Image.
    return is_value(feature, "PIL.Image.Image", "string", "large_string", "binary", "large_binary")


def is_string(feature: object) -> bool:
    return is_value(feature, "string", "large_string")


def holds_captions(feature: object) -> bool:
    """Whether a column of this feature can hold captions: strings, or lists of them."""
    return is_string(feature) or is_string(getattr(feature, "feature", None))


def is_integer(feature: object) -> bool:
    """Whether a feature holds integers, as a ClassLabel also does."""
    return getattr(feature, "dtype", "").startswith(("int", "uint"))


# By the option that names a column: whether it can have a feature of `datasets`, and what it must hold.
_FITS: dict[str, tuple[Callable[[object], bool], str]] = {
    "image_column": (holds_images, "images, encoded images, their paths, or structs of both"),
    **dict.fromkeys(("caption_column", "negative_caption_column"), (holds_captions, "strings or lists of strings")),
    "pair_id_column": (lambda feature: is_integer(feature) or is_string(feature), "integers or strings"),
    "label_column": (lambda feature: is_integer(getattr(feature, "feature", feature)), "integers or strings"),
}


def check_column(place: str, option: str, column: str, features: Mapping[str, object], hint: str = "") -> None:
    """Raises a ValueError if a table or a shard lacks the column that an option names, or it holds something else.

    A message calls it ``place``, and ends with the ``hint`` if the column is missing.
    """
    if column not in features:
        lacks = lacks_column(column, [*features])
        raise ValueError(f"{place} {lacks} Name the right one with {option} (--{option}).{hint}")
    feature = features[column]
    fits, kinds = _FITS.get(option, (lambda _: True, ""))
    if not fits(feature):
        is_list_of_ids = option == "pair_id_column" and hasattr(feature, "feature")
        held = "lists, since a pair has one id" if is_list_of_ids else feature
        mixed = " If some rows have a list, write a list in every row." if "Json" in str(feature) else ""
        raise ValueError(f"{place}: its {option} {column!r} must hold {kinds}, not {held}.{mixed}")


# ---- Tar ----


class TarReader:
    """Samples of webdataset tar files: successive files whose names are equal up to the first dot of the last part.

    Contents are by extension. An error takes their place if it is not certain what belongs to the sample. At least one
    of the first samples must have a negative caption, if there is a column of these.

    Args:
        urls: the shards; the first ones show whether there are such columns.

    Raises:
        ValueError: there are none; the message names those that there are.

    Attributes:
        has_lists: whether the captions are lists of strings.
    """

    def __init__(self, columns: Columns, urls: Sequence[str]) -> None:
        self._extensions: frozenset[str] | None = None  # all are read, until it is known which are needed
        problem = f"The shard {urls[0]!r} holds no samples."
        for url, key, sample in itertools.islice(self._first_samples(urls), _PROBED):
            if isinstance(sample, DamagedShardError):
                problem = str(sample)
                continue
            try:
                fields = _json_fields(sample)
            except ValueError as error:
                problem = f"Sample {shortened(key)} of the shard {url!r} has a .json that cannot be read: {error}."
                continue
            if not (missing := self._find(columns, sample, fields)):
                return
            there = f"Sample {shortened(key)} of the shard {url!r} has the files {_dotted(sample)}"
            there += f" and the JSON fields {listed([*map(shortened, sorted(fields))])}." if "json" in sample else "."
            problem = f"{missing} {there}{dots_in(key, sample)}"
            if columns.image == "image" and len(_images(sample)) > 1:  # the user has to name one
                break
        with suppress(DamagedShardError):  # the keys are looked at up to where the shard is damaged
            problem += apart(key for _, key in self.ends(urls[0]))
        raise ValueError(problem)

    def _first_samples(self, urls: Sequence[str]) -> Iterator[tuple[str, str, Sample]]:
        for url in urls:
            try:
                yield from ((url, key, sample) for _, key, sample in self.samples(url))
            except DamagedShardError as error:  # noqa: PERF203
                yield url, "", error

    def _find(self, columns: Columns, sample: dict[str, bytes], fields: Mapping[str, object]) -> str:
        """Finds the files and JSON fields of a sample that hold the columns.

        Returns:
            A sentence about the first column that was not found; empty if all were.
        """
        image, several = columns.image, _images(sample)
        if image == "image" and len(several) > 1:
            return f"There are several images: name one of {_dotted(several)} with image_column."
        images = IMAGE_EXTENSIONS if image == "image" and image not in sample else frozenset([image] if image else ())
        if image is not None and not images & sample.keys():
            return f"No image was found for image_column {image!r}."
        texts: dict[str, tuple[bool, str]] = {}  # whether it is a field of the JSON, and the field or extension
        for option, what, column in columns.texts():
            if column in fields or column in sample:
                texts[column] = column in fields, column
            elif column == columns.caption == "caption" and "txt" in sample:
                texts[column] = False, "txt"
            else:
                return f"No {what} was found for {option} {column!r}."
        self.has_lists = columns.caption is not None and isinstance(fields.get(columns.caption), list)
        self._image, self._images, self._texts = image, images, texts
        self._extensions = images | {"json" if in_json else extension for in_json, extension in texts.values()}
        return ""

    @staticmethod
    def features(urls: Sequence[str], image_column: str) -> Mapping[str, object]:
        """The columns that the shards have as a table, as their first samples show them; a ValueError without any."""
        from .tar_tables import tar_table  # it needs `datasets`, without which this file can be imported

        return tar_table([(url, url) for url in urls], image_column, "train", _PROBED).features

    def samples(self, url: str, position: int = 0, stop: int | None = None) -> Iterator[tuple[int, str, Sample]]:
        """(position after it, key, contents) of each sample that begins from position to before stop."""
        wanted = self._extensions

        def contents(file: io.BufferedReader, extension: str, size: int) -> bytes | None:
            return file.read(size) if wanted is None or extension in wanted else None

        with open_shard(url, position) as file:
            yield from tar_samples(file, url, contents, stop)

    def row(self, sample: dict[str, Any]) -> dict[str, Any]:
        """The values of the columns; None for one that the sample does not have.

        An image is the contents of its file, or the path of a file beside the shard.
        """
        fields = _json_fields(sample) if any(in_json for in_json, _ in self._texts.values()) else {}
        row: dict[str, Any] = {}
        if self._image is not None:
            row[self._image] = next((sample[extension] for extension in sample if extension in self._images), None)
        for column, (in_json, name) in self._texts.items():
            text = fields.get(name) if in_json else sample.get(name)
            row[column] = text.decode("utf-8").strip() if isinstance(text, bytes) else text
        return row

    def ends(self, url: str) -> Iterator[tuple[int, str]]:
        """(position after it, key) of each sample, without its contents."""
        with open_shard(url, buffer=_TAR_BUFFER) as file:
            yield from ((end, key) for end, key, _ in tar_samples(file, url, lambda *_: None))


def _json_fields(sample: dict[str, bytes]) -> dict[str, Any]:
    """The fields of a sample's JSON; raises a ValueError for anything but a JSON object."""
    return json_object(sample["json"]) if "json" in sample else {}


def _images(sample: dict[str, bytes]) -> list[str]:
    """The extensions of the images in a sample."""
    return [extension for extension in sample if extension in IMAGE_EXTENSIONS]


def _dotted(extensions: Iterable[str]) -> str:
    return listed([f".{extension}"[:80] for extension in extensions])


# ---- Parquet ----


class ParquetReader:
    """Rows of parquet files, by their numbers; only the needed columns and row groups are read. As `TarReader`."""

    def __init__(self, columns: Columns, urls: Sequence[str]) -> None:
        self._image_column = columns.image
        self._columns = list(dict.fromkeys(column for column in columns if column))
        features = self.features(urls, "")
        named = [("image_column", "", columns.image)] if columns.image else []
        for option, _, column in (*named, *columns.texts()):
            check_column(f"The shard {urls[0]!r}", option, column, features)
        self.has_lists = columns.caption is not None and not is_string(features[columns.caption])

    @staticmethod
    def features(urls: Sequence[str], image_column: str) -> Mapping[str, object]:
        import datasets

        with _parquet_file(urls[0]) as file:
            schema = file.schema_arrow
        features: dict[str, Any] = dict(zip(schema.names, schema.types, strict=True))
        # `datasets` knows neither maps nor all that the metadata of its later versions name, and no column needs them.
        for field, metadata in itertools.product(schema, (None, schema.metadata)):
            with suppress(Exception):  # metadata may hold anything
                features |= datasets.Features.from_arrow_schema(pyarrow.schema([field], metadata))
        return features

    def samples(self, url: str, position: int = 0, stop: int | None = None) -> Iterator[tuple[int, str, Sample]]:
        with _parquet_file(url) as file:
            stop, begin = file.metadata.num_rows if stop is None else stop, 0
            for group in range(file.num_row_groups):
                end = begin + file.metadata.row_group(group).num_rows
                if end > position and begin < stop:
                    for row, values in enumerate(_rows(file, url, group, self._columns), begin):
                        if position <= row < stop:
                            yield row + 1, str(row), values
                begin = end

    def row(self, sample: dict[str, Any]) -> dict[str, Any]:
        if self._image_column is None:
            return sample
        image = sample[self._image_column]
        if isinstance(image, dict):
            image = image.get("path") if image.get("bytes") is None else image["bytes"]
        return {**sample, self._image_column: image}

    def ends(self, url: str) -> Iterator[tuple[int, str]]:
        with _parquet_file(url) as file:
            yield from ((row + 1, str(row)) for row in range(file.metadata.num_rows))


@contextmanager
def _parquet_file(url: str) -> Iterator[pyarrow.parquet.ParquetFile]:
    with open_shard(url, buffer=_PARQUET_BUFFER) as raw:
        try:
            file = pyarrow.parquet.ParquetFile(raw)
        except pyarrow.ArrowException as error:
            raise DamagedShardError(f"The shard {url!r} is truncated or no parquet file: {error}") from error
        yield file


def _rows(file: pyarrow.parquet.ParquetFile, url: str, group: int, columns: list[str]) -> Iterator[dict[str, Any]]:
    try:
        for batch in file.iter_batches(batch_size=64, row_groups=[group], columns=columns):
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DamagedShardError(f"Row group {group} of the shard {url!r} is damaged: {error}") from error


# ---- Formats ----

Reader = TarReader | ParquetReader
READERS: dict[str, type[Reader]] = {".tar": TarReader, ".parquet": ParquetReader}


def reader_of(urls: Sequence[str]) -> type[Reader]:
    """The reader of shards, which are all of one format."""
    formats = {posixpath.splitext(url)[1]: url for url in urls}
    if len(formats) > 1:
        one, other, *_ = formats.values()
        raise ValueError(f"{one!r} and {other!r} have different formats. Name tar and parquet files as two sources.")
    return READERS[next(iter(formats))]
