"""Tar shards as a table of the contents of files and JSON fields, with the places of images in the shards."""

import io
import itertools
import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import datasets
import numpy as np
import pyarrow

from ..files.text import ERRORS, describe_cause, is_unicode, shortened, written_otherwise
from .layout import IMAGE_EXTENSIONS, DamagedShardError, json_object, member_url, tar_samples
from .opening import content_tag, digest, open_shard

KEY, SHARD = "__key__", "__url__"  # as `datasets` calls the columns
_FIRST = "\0image"  # the first image of each sample, until it is known whether there is one
_LARGEST_TEXT = 2**16
_TEXTS = ("txt", "text", "caption")  # extensions whose files have to be texts
# Reading in small pieces passes over the images, which are most of a shard.
_BUFFER = 2**12
_CHUNK = 2**20  # paths of an array, which holds at most 2 GiB of text
_MIXED = (pyarrow.ArrowException, ValueError, TypeError, OverflowError)  # raised for values of several types


def tar_table(
    shards: Sequence[tuple[str, str]], image_column: str, split: str, most: int = sys.maxsize
) -> datasets.Dataset:
    """The samples of tar shards as rows, as `ImageTextStream` reads them; the images stay in the shards.

    Its columns are the extensions of files that hold images, texts, integers (such as .cls) or arrays of integers
    (.npy), and the fields of the ``.json``; a field that is called like an extension is "json." and its name. If the
    samples have one image each, of several extensions, it is in the column "image". The column `ERRORS`
    says what is wrong with samples, if there are such; the rest of a damaged shard is one.

    Args:
        shards: the path or URL to read, and the one to name, of each shard.
        image_column: the extension of images, if they have not one of `IMAGE_EXTENSIONS`.
        most: the number of samples to read; all by default.

    Raises:
        ValueError: no sample can be used.
    """
    samples = _Samples(image_column)
    for path, name in shards:
        if len(samples.errors) < most:
            samples.read(path, name, most - len(samples.errors))
    errors = samples.errors
    if all(None in of_sample for of_sample in errors):
        raise ValueError(errors[0][None] if errors else f"The shard {shards[0][1]!r} holds no samples.")
    table, features = {}, {}
    for name, source in samples.image_columns().items():
        features[name], paths = datasets.Image(), samples.column(source)
        parts = ([path and {"path": path} for path in paths[i : i + _CHUNK]] for i in range(0, len(paths), _CHUNK))
        table[name] = pyarrow.chunked_array([pyarrow.array(part, features[name].pa_type) for part in parts])
    apart = {*samples.images, _FIRST, KEY, SHARD}
    for name in (*(name for name in samples.values if name not in apart), KEY, SHARD):
        column, wrong = _of_one_type(name, samples.column(name))
        if column.null_count == len(errors) and name not in (*samples.fields, *_TEXTS):
            continue  # files of another kind, such as sounds
        for row, error in wrong.items():
            errors[row].setdefault(name, error)
        table[name] = column.cast(pyarrow.string()) if name in _TEXTS and column.type == pyarrow.null() else column
    if not samples.fields and table.keys() <= {*features, KEY, SHARD} and all("json" in one for one in errors):
        raise ValueError(f"No .json of {shards[0][1]!r} can be read. The first: {errors[0]['json']}.")
    told: list[Any] = []
    for of_sample in errors:
        if "json" in of_sample:  # an unreadable ``.json`` is one of each field
            of_sample = {**dict.fromkeys(sorted(samples.fields), of_sample["json"]), **of_sample}
        of_columns = [(column, error) for column, error in of_sample.items() if column is None or column in table]
        told.append([{"column": column, "error": error} for column, error in of_columns] or None)
    if any(told):
        kind = pyarrow.list_(pyarrow.struct({"column": pyarrow.string(), "error": pyarrow.string()}))
        table[ERRORS] = pyarrow.array(told, kind)
    changed = ["" if "://" in path else str(os.stat(path).st_mtime_ns) for path, _ in shards]
    versions = [f"{shard} {content_tag(shard[0])} {time}" for shard, time in zip(shards, changed, strict=True)]
    rows = pyarrow.table(table)
    features = datasets.Features({**datasets.Features.from_arrow_schema(rows.schema), **features})
    return datasets.Dataset(
        datasets.table.InMemoryTable(rows),
        info=datasets.DatasetInfo(features=features),
        split=datasets.NamedSplit(split),
        fingerprint=digest([*versions, image_column, split, str(most)]),
    )


# ---- Reading ----


class _Samples:
    """The samples of shards, by column, and what is wrong with each of them."""

    def __init__(self, image_column: str) -> None:
        self._image_column = image_column
        self.values: dict[str, list[Any]] = {}  # by column; shorter where the last samples have none
        self.errors: list[dict[str | None, str]] = []  # of each sample by column; None stands for the whole sample
        self._not_ascii: dict[Any, tuple[int, str, set[str]]] = {}  # place, name and columns, by what a name looks like
        self.fields: set[str] = set()  # the columns that are JSON fields
        self.images: dict[str, None] = {}  # the columns of images, in their order

    def column(self, name: str) -> list[Any]:
        """The value of each sample."""
        values = self.values.get(name, [])
        return values + [None] * (len(self.errors) - len(values))

    def image_columns(self) -> dict[str, str]:
        """The names of the columns of images: in the table, and in ``values``."""
        plain = [name for name in self.images if name in IMAGE_EXTENSIONS]
        if len(plain) > 1 and not {"image", self._image_column} & {*self.images}:
            row = next(row for row, image in enumerate(self.values[_FIRST]) if image is not None)
            if sum(self.column(name)[row] is not None for name in plain) == 1:  # else the user has to name one
                return {"image": _FIRST} | {name: name for name in self.images if name not in plain}
        return {name: name for name in self.images}

    def read(self, path: str, name: str, most: int) -> None:
        """Adds the samples of a shard, or some of them."""
        with open_shard(path, buffer=_BUFFER) as file:
            try:
                for _, key, sample in itertools.islice(tar_samples(file, name, self._contents), most):
                    self._add(path, {KEY: key, SHARD: name}, sample)
            except DamagedShardError as error:
                self._add(path, {SHARD: name}, error)

    def _add(self, path: str, row: dict[str, Any], sample: Mapping[str, Any] | DamagedShardError) -> None:
        self.errors.append({})
        if isinstance(sample, DamagedShardError):
            self.errors[-1][None] = str(sample)
        else:
            self._fill(row, path, sample)
            if not row[KEY].isascii():
                looks = row[SHARD], unicodedata.normalize("NFC", row[KEY])
                place, key, columns = self._not_ascii.setdefault(looks, (len(self.errors) - 1, row[KEY], set(row)))
                if key != row[KEY] and columns & set(row) == {KEY, SHARD}:
                    alike = written_otherwise(row[KEY], {key}.__contains__)
                    told = f"its files must have one name. One is {row[KEY]!r}{alike}"
                    self.errors[place][None] = self.errors[-1][None] = told
        for column, value in row.items():
            values = self.values.setdefault(column, [])
            values += [*[None] * (len(self.errors) - 1 - len(values)), value]

    def _contents(self, file: io.BufferedReader, extension: str, size: int) -> bytes | tuple[int, int]:
        """The contents of a file, or the position and size of one that is no part of a table."""
        small = size <= _LARGEST_TEXT or extension == "json"
        return file.read(size) if small and not self._holds_image(extension) else (file.tell(), size)

    def _holds_image(self, extension: str) -> bool:
        return extension in ("image", self._image_column) or extension.rpartition(".")[2] in IMAGE_EXTENSIONS

    def _fill(self, row: dict[str, Any], path: str, sample: Mapping[str, bytes | tuple[int, int]]) -> None:
        """Adds the values of the last sample to its row."""
        errors = self.errors[-1]
        for extension, content in sample.items():
            parse = _READ.get(extension.rpartition(".")[2], _text)
            try:
                if isinstance(content, tuple) and self._holds_image(extension):
                    self.images[extension] = None
                    row[extension] = member_url(path, *content, f"{row[KEY].rpartition('/')[2]}.{extension}")
                    if extension in IMAGE_EXTENSIONS:
                        row.setdefault(_FIRST, row[extension])
                elif isinstance(content, tuple):
                    row[extension], errors[extension] = None, f"its {content[1]:,} bytes are no caption"
                elif extension == "json":
                    for field, value in _flat(json_object(content), errors):
                        column = f"json.{field}" if field in sample or self._holds_image(field) else field
                        self.fields.add(column)
                        row[column] = value
                elif extension:
                    row[extension] = None
                    row[extension] = parse(content)
            except Exception as error:  # parsers raise exceptions of many classes
                errors[extension] = describe_cause(error)


def _flat(fields: Mapping[str, object], errors: dict[str | None, str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of an object; the fields of an object within it are called ``outer.inner``.

    It is an error of the field ``outer``, if this is a column because other samples have another value there.
    """
    for name, value in fields.items():
        if isinstance(value, dict):
            errors[prefix + name] = f"the {prefix}{name} {shortened(value)} is {_IS_NOT['text']}"
            yield from _flat(value, errors, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _text(content: bytes) -> str:
    return content.decode("utf-8").strip()


def _integers(content: bytes) -> list[int] | None:
    values = np.load(io.BytesIO(content), allow_pickle=False)
    return values.tolist() if values.ndim == 1 and values.dtype.kind in "iub" else None


# How files are read whose extensions say that they hold integers.
_READ: dict[str, Callable[[bytes], Any]] = dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int)
_READ["npy"] = _integers


# ---- Columns ----


def _of_one_type(name: str, values: Sequence[Any]) -> tuple[pyarrow.Array | pyarrow.ChunkedArray, dict[int, str]]:
    """The values of a column that are of its most frequent kind, and by row what is wrong with other values."""
    with suppress(*_MIXED):
        return pyarrow.array(values, from_pandas=True), {}  # which takes NaN for a missing value
    kinds = Counter(kind for kind in map(_kind, values) if kind)
    kinds["text"] *= _TEXTS_COUNT
    most = max(kinds, key=kinds.__getitem__)
    has_lists = any(isinstance(value, list) and _kind(value) == "text" for value in values)
    fits: list[Any] = []
    errors: dict[int, str] = {}
    for row, value in enumerate(values):
        fit = value if _kind(value) == most else None
        if fit is not None and most == "text":
            # JSON can contain halves of surrogate pairs, which Arrow does not take.
            texts = [text for text in (fit if isinstance(fit, list) else [fit]) if text is None or is_unicode(text)]
            fit = texts if has_lists else next(iter(texts), None)
        if fit is None and _kind(value):
            errors[row] = f"the {name} {shortened(value)} is {_IS_NOT[most]}"
        fits.append(fit)
    try:
        return pyarrow.array(fits, from_pandas=True), errors
    except _MIXED:
        errors = {row: f"the {name} {shortened(value)} is {_IS_NOT['other']}" for row, value in enumerate(values)}
        return pyarrow.nulls(len(fits)), errors


# Numbers among captions are the mistakes, but so are a few words among numbers.
_TEXTS_COUNT = 10
_IS_NOT = {
    "text": "neither a string nor a list of strings",
    "number": "not a number of 64 bits",
    "truth": "neither true nor false",
    "other": "of another type than those of other samples",
}


def _kind(value: object) -> str | None:
    """The kind of a value; None for a missing one, which pandas writes as NaN."""
    if value is None or value != value:
        return None
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return "number"
    texts = value if isinstance(value, list) else [value]
    return "text" if all(text is None or isinstance(text, str) for text in texts) else "other"
