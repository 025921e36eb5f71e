"""Tar shards as a table: what the files and JSON fields of each sample hold, and where its images lie in the shards."""

from __future__ import annotations

import io
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .members import member_url, register
from .names import IMAGE_EXTENSIONS
from .opening import content_tag, digest, open_shard
from .tar_layout import DamagedShardError, tar_samples
from .values import ERRORS, describe_cause, is_unicode, json_object, shortened

if TYPE_CHECKING:
    import datasets
    import pyarrow

KEY, SHARD = "__key__", "__url__"  # as `datasets` calls the columns
_FIRST = "\0image"  # the first image of each sample, until it is known whether there is one
_LARGEST_TEXT = 2**16
# Reading in small pieces passes over the images, which are most of a shard.
_BUFFER = 2**12


class _Unread(NamedTuple):
    """Contents that are no part of a table."""

    position: int
    size: int


class _Indexed(NamedTuple):
    """The columns of a shard, and each sample's errors by column; None stands for the whole sample."""

    columns: dict[str, Any]  # arrow arrays, or lists of values of several types
    errors: list[dict[str | None, str]]
    fields: set[str]  # the columns that are JSON fields
    images: set[str]  # the columns of images


def tar_table(
    shards: Sequence[tuple[str, str]], image_column: str, split: str, most: int | None = None
) -> datasets.Dataset:
    """The samples of tar shards as rows, as `ImageTextStream` reads them; the images stay in the shards.

    Its columns are the extensions of files that hold images, texts, integers (such as .cls) or arrays of integers
    (.npy), and the fields of the ``.json``; a field that is called like an extension is "json." and its name. If the
    samples have one image each, of several extensions, it is in the column "image". What is wrong with a sample is in
    the column `ERRORS`, if there is any such sample; the rest of a damaged shard is one.

    Args:
        shards: the path or URL to read, and the one to name, of each shard.
        image_column: the extension of images, if they have not one of `IMAGE_EXTENSIONS`.
        most: the number of samples to read; all by default.

    Raises:
        ValueError: no sample can be used.
    """
    import datasets
    import pyarrow

    register()
    parts: list[_Indexed] = []
    for path, name in shards:
        left = None if most is None else most - sum(len(part.errors) for part in parts)
        if left != 0:
            parts.append(_read_shard(path, name, image_column, left))
    errors = list(itertools.chain.from_iterable(part.errors for part in parts))
    if all(None in of_sample for of_sample in errors):
        raise ValueError(errors[0][None] if errors else f"The shard {shards[0][1]!r} holds no samples.")
    columns = dict.fromkeys(name for part in parts for name in part.columns if name not in (_FIRST, KEY, SHARD))
    fields, of_images = (set.union(*sets) for sets in zip(*((part.fields, part.images) for part in parts), strict=True))
    images = _image_columns(parts, [name for name in columns if name in of_images], image_column)
    value_columns = [*(name for name in columns if name not in of_images), KEY, SHARD]
    names: dict[str, str | None] = {**images, **dict.fromkeys(value_columns)}
    table, features = {}, {}
    for name, source in names.items():
        chunks = [part.columns.get(source or name, pyarrow.nulls(len(part.errors))) for part in parts]
        if source:
            table[name], features[name] = _images(chunks), datasets.Image()
            continue
        column, wrong = _of_one_type(name, chunks)
        if column.null_count == len(errors) and name not in fields:
            continue  # files of another kind, such as sounds
        for row, error in wrong.items():
            errors[row].setdefault(name, error)
        table[name] = column
    if any(told := [_told(of_sample, [*table], fields) for of_sample in errors]):
        kind = pyarrow.list_(pyarrow.struct({"column": pyarrow.string(), "error": pyarrow.string()}))
        table[ERRORS] = pyarrow.chunked_array([pyarrow.array(told, kind)])
    rows = pyarrow.table(table)
    return datasets.Dataset(
        datasets.table.InMemoryTable(rows),
        info=datasets.DatasetInfo(
            features=datasets.Features({**datasets.Features.from_arrow_schema(rows.schema), **features})
        ),
        split=datasets.NamedSplit(split),
        fingerprint=digest([*map(_version, shards), image_column, split, str(most)]),
    )


def _version(shard: tuple[str, str]) -> str:
    if "://" in shard[0]:
        return f"{shard} {content_tag(shard[0])}"
    status = os.stat(shard[0])
    return f"{shard} {status.st_size} {status.st_mtime_ns}"


def _told(
    errors: dict[str | None, str], columns: Sequence[str], fields: set[str]
) -> list[dict[str, str | None]] | None:
    """The errors of a sample for its row; an unreadable ``.json`` is one of each field."""
    if "json" in errors:
        errors = {**dict.fromkeys(sorted(fields), errors["json"]), **errors}
    return [
        {"column": column, "error": error} for column, error in errors.items() if column in (None, *columns)
    ] or None


# ---- Reading ----


def _read_shard(path: str, name: str, image_column: str, most: int | None) -> _Indexed:
    rows: list[dict[str, Any]] = []
    errors: list[dict[str | None, str]] = []
    indexed = _Indexed({}, errors, set(), set())

    def contents(file: io.BufferedReader, extension: str, size: int) -> bytes | _Unread:
        small = size <= _LARGEST_TEXT or extension == "json"
        if small and not _holds_image(extension, image_column):
            return file.read(size)
        return _Unread(file.tell(), size)

    with open_shard(path, buffer=_BUFFER) as file:
        samples: Iterator[Any] = itertools.islice(tar_samples(file, name, contents), most)
        try:
            for _, key, sample in samples:
                row: dict[str, Any] = {KEY: key, SHARD: name}
                wrong: dict[str | None, str] = {}
                if isinstance(sample, DamagedShardError):
                    wrong[None] = str(sample)
                else:
                    _fill(row, wrong, indexed, path, sample, image_column)
                rows.append(row)
                errors.append(wrong)
        except DamagedShardError as error:
            rows.append({SHARD: name})
            errors.append({None: str(error)})
    columns = dict.fromkeys(column for row in rows for column in row)
    indexed.columns.update((column, _array([row.get(column) for row in rows])) for column in columns)
    return indexed


def _fill(
    row: dict[str, Any],
    errors: dict[str | None, str],
    indexed: _Indexed,
    path: str,
    sample: dict[str, bytes | _Unread],
    image_column: str,
) -> None:
    """Adds the values of a sample to its row, what is wrong to the errors, and the kinds of columns to ``indexed``."""
    for extension, content in sample.items():
        kind = extension.rpartition(".")[2]
        try:
            if _holds_image(extension, image_column) and isinstance(content, _Unread):
                indexed.images.add(extension)
                row[extension] = member_url(path, *content, f"{row[KEY].rpartition('/')[2]}.{extension}")
                if extension in IMAGE_EXTENSIONS:
                    row.setdefault(_FIRST, row[extension])
            elif isinstance(content, _Unread):
                row[extension], errors[extension] = None, f"its {content.size:,} bytes are no caption"
            elif extension == "json":
                for field, value in _flat(json_object(content), errors):
                    column = f"json.{field}" if field in sample or _holds_image(field, image_column) else field
                    indexed.fields.add(column)
                    row[column] = value
            elif extension:
                row[extension] = None
                row[extension] = _READ.get(kind, _text)(content)
        except Exception as error:  # parsers raise exceptions of many classes
            errors[extension] = describe_cause(error)


def _holds_image(extension: str, image_column: str) -> bool:
    return extension in ("image", image_column) or extension.rpartition(".")[2] in IMAGE_EXTENSIONS


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
_READ: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    "npy": _integers,
}


# ---- Columns ----


def _image_columns(parts: Sequence[_Indexed], names: Sequence[str], image_column: str) -> dict[str, str]:
    """The columns of images, and what they are called in the parts."""
    plain = [name for name in names if name in IMAGE_EXTENSIONS]
    if len(plain) > 1 and not {"image", image_column} & {*names}:
        first = next(part for part in parts if _FIRST in part.columns).columns
        row = next(row for row, image in enumerate(first[_FIRST]) if image.is_valid)
        if sum(name in first and first[name][row].is_valid for name in plain) == 1:  # else the user has to name one
            return {"image": _FIRST} | {name: name for name in names if name not in plain}
    return {name: name for name in names}


def _images(chunks: Sequence[pyarrow.Array]) -> pyarrow.ChunkedArray:
    """Paths as `datasets` stores images."""
    import pyarrow

    structs = []
    for chunk in chunks:
        paths = chunk.cast(pyarrow.string())
        missing = pyarrow.nulls(len(paths), pyarrow.binary())
        structs.append(pyarrow.StructArray.from_arrays([missing, paths], ["bytes", "path"], mask=paths.is_null()))
    return pyarrow.chunked_array(structs)


def _array(values: list[object]) -> pyarrow.Array | list[object]:
    """The values as an array, or unchanged if they are not of one type."""
    import pyarrow

    try:
        return pyarrow.array(values, from_pandas=True)  # which takes NaN for a missing value
    except (pyarrow.ArrowException, ValueError, TypeError, OverflowError):
        return values


def _of_one_type(name: str, chunks: Sequence[Any]) -> tuple[pyarrow.ChunkedArray, dict[int, str]]:
    """The values of a column that are of its most frequent kind, and by row what is wrong with other values."""
    import pyarrow

    if not any(isinstance(chunk, list) for chunk in chunks):
        with suppress(pyarrow.ArrowException):
            schemas = [pyarrow.schema({name: chunk.type}) for chunk in chunks]
            kind = pyarrow.unify_schemas(schemas, promote_options="permissive").field(0).type
            return pyarrow.chunked_array([chunk.cast(kind) for chunk in chunks], kind), {}
    values = [value for chunk in chunks for value in (chunk if isinstance(chunk, list) else chunk.to_pylist())]
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
    column = _array(fits)
    if isinstance(column, list):
        column = pyarrow.nulls(len(fits))
        errors = {row: f"the {name} {shortened(value)} is {_IS_NOT['other']}" for row, value in enumerate(values)}
    return pyarrow.chunked_array([column] if isinstance(column, pyarrow.Array) else column.chunks), errors


# Numbers among captions are the mistakes, but so are a few words among numbers.
_TEXTS_COUNT = 10
_IS_NOT = {
    "text": "neither a string nor a list of strings",
    "number": "not a number of 64 bits",
    "truth": "neither true nor false",
    "other": "of another type than those of other samples",
}


def _kind(value: object) -> str | None:
    """What a value is; None for one that is missing, which pandas writes as NaN."""
    if value is None or value != value:
        return None
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return "number"
    texts = value if isinstance(value, list) else [value]
    return "text" if all(text is None or isinstance(text, str) for text in texts) else "other"
