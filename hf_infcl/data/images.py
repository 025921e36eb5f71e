"""Reads rows with undecoded images, decodes the images one by one, and reports which row is bad.

It also finds the columns of images, captions and classes by their usual names or types."""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import torch
from PIL import ExifTags, Image

from ..files.text import ERRORS, Url, without_secrets, written_otherwise
from ..files.whole import LFS_POINTER
from ..shards.layout import is_member, member_file, member_size, read_member
from ..shards.readers import check_column, holds_captions, holds_images

if TYPE_CHECKING:
    import datasets

try:
    import simplejpeg  # the extra `fast`
except ImportError:
    simplejpeg = None

# How to turn an image upright, by the orientation in its EXIF data, from 2 on; 1 is upright.
_TURNS = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
_UPRIGHT = {orientation: Image.Transpose[turn] for orientation, turn in enumerate(_TURNS, 2)}

# What may precede the pixels of a JPEG that PIL need not look at: JFIF, comments and tables, but no EXIF, XMP or Adobe.
_PLAIN = (0xE0, 0xFE, 0xDB, 0xC4, 0xDD)
_SIZE = (0xC0, 0xC1, 0xC2)  # the size in a baseline, extended or progressive JPEG
_PIXELS = 0xDA
_PNG = b"\x89PNG\r\n\x1a\n"


class BadSampleError(ValueError):
    """A row whose image, caption or pair id cannot be used.

    Attributes:
        cause: why, without the name of the row.
    """

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


class ImageDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of a `datasets.Dataset` whose images are decoded one by one, so that a bad file harms no other row.

    ``columns`` are by the options that name them, such as "image_column"; one that is not needed is None.
    """

    _or_skip = ""  # how to do without a bad row
    min_side: int | None = None  # of decoded images
    numbers: np.ndarray | None = None  # [n] int64, of the rows in the table from which they were selected, if they were

    def __init__(self, dataset: datasets.Dataset, columns: Mapping[str, str | None]) -> None:
        import datasets

        if isinstance(dataset, datasets.DatasetDict):
            raise ValueError(f"The dataset is a DatasetDict. Pass one of its splits: {list(dataset)}.")
        if not isinstance(dataset, datasets.Dataset):
            kind = type(dataset).__name__
            raise ValueError(f"It must be a datasets.Dataset, got {kind}. Pass a dataset of your own to InfCLTrainer.")
        if len(dataset) == 0:
            raise ValueError("The dataset has no rows.")  # before its columns, which have no types then
        self.columns: dict[str, Any] = {option: column for option, column in columns.items() if column}
        self.image_column: Any = columns["image_column"]
        for option, column in self.columns.items():
            if not isinstance(column, str):
                joined = "rows.map(lambda row: {'captions': [row['a'], row['b']]})"
                more = f" Join several into one of lists: {joined}." if option == "caption_column" else ""
                raise ValueError(f"The {option} must be the name of one column, got {column!r}.{more}")
            hint = ""
            if option == "caption_column" and {*dataset.column_names} <= {"image", "label"}:
                hint = (
                    " The captions of a folder of images belong in its metadata.jsonl or metadata.csv, beside the "
                    f"file names (file_name).{_metadata_above(dataset)} Folders of classes get them by "
                    "--caption_templates (captions_of_classes in Python); --zero_shot_dataset evaluates classes."
                )
            if option != "pair_id_column" or column not in (self.image_column, columns["caption_column"]):
                check_column("The dataset", option, column, dataset.features, hint)
        if dataset.format["type"] == "custom":
            raise ValueError(
                "The dataset has a transform, which would see undecoded images. Call reset_format() and transform the "
                "items in a dataset around this one."
            )
        rows = dataset.with_format(None).select_columns(with_errors(dataset, dict.fromkeys(self.columns.values())))
        # The rows with undecoded images, and only the columns that the options name.
        self.table = rows.cast_column(self.image_column, datasets.Image(decode=False))
        self.split = None if dataset.split is None else str(dataset.split)
        self.name = f"the dataset with columns {dataset.column_names}"  # in messages about a bad row
        self.source = ""  # what a `SetSpec` opened it from
        self.benchmark: Any = None  # the files of a named benchmark (`hf_infcl.cli.benchmarks`)

    def __len__(self) -> int:
        return len(self.table)

    def image_and_path(self, row: int) -> tuple[np.ndarray, str | None]:
        """The image of a row, decoded, and the path of its file if the dataset does not hold the file itself."""
        value, encoded = self._read(row)
        image = value[self.image_column]
        is_in_table = image["bytes"] is not None or is_member(image["path"])
        return self._decoded(row, encoded), None if is_in_table else image["path"]

    def encoded(self, row: int) -> bytes:
        """The contents of the image file of a row. A BadSampleError says that it has none, or cannot be read."""
        return self._read(row)[1]

    def file_sizes(self, step: int = 1) -> Iterator[tuple[int, int]]:
        """(row, bytes of its image file) of every ``step``-th row, if the file is local; none is read."""
        sizes, paths = self.computed("bytes", pc.binary_length), self.computed("path")
        for row in range(0, len(self), step):
            size, path = sizes[row].as_py(), paths[row].as_py()
            if size is None and path is not None and is_member(path):
                size = member_size(path)
            elif size is None and path is not None and os.path.isfile(path):
                size = os.path.getsize(path)
            if size is not None:
                yield row, size

    def computed(self, name: str, compute: Callable[[Any], Any] = lambda values: values) -> Any:
        """The result of ``compute`` for the ``"bytes"`` or the ``"path"`` of all images, [rows]; copies no image."""
        values = compute(pc.struct_field(self.table.data.column(self.image_column), name))
        selected = self.table._indices  # of the results, since to take these from the images would copy them
        return values if selected is None else values.take(selected.column(0))

    def image_fingerprint(self) -> str:
        """A fingerprint of the rows, their order and the images, by path, size and modification time of image files.

        A missing file has neither; an error names it when its row is read.
        """
        digest = hashlib.sha256(f"{self.table._fingerprint} {self.image_column} {self.min_side}".encode())
        paths = self.computed("path").filter(self.computed("bytes", pc.is_null)).drop_null()
        for path in (value.as_py() for value in paths):
            if "://" not in path:
                found = Path(path).stat() if os.path.exists(path) else None
                size_and_time = f"{found.st_size} {found.st_mtime_ns}" if found else "missing"
                digest.update(f"{path} {size_and_time}\n".encode())
        return digest.hexdigest()

    def _check_errors(self, row: int, value: Mapping[str, object]) -> None:
        """Raises a BadSampleError if the table says that a value of the row is wrong."""
        if error := find_error(value):
            raise self._bad_sample(row, error)

    def _read(self, row: int) -> tuple[dict[str, Any], bytes]:
        """The values of a row, and the contents of its image file."""
        value = self.table[row]
        self._check_errors(row, value)
        if (image := value[self.image_column]) is None:
            raise self._bad_sample(row, f"it has no image in column {self.image_column!r}")
        with self._image_named(row):
            return value, read_encoded(image)

    def _decoded(self, row: int, encoded: bytes) -> np.ndarray:
        with self._image_named(row):
            return decode_rgb(encoded, self.min_side)

    @contextmanager
    def _image_named(self, row: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            path = (self.table[row][self.image_column] or {}).get("path") or ""
            reason = isinstance(error, OSError) and error.strerror  # without the path, which stands before it
            cause = f"{type(error).__name__}: {reason or without_secrets(str(error))}"
            if isinstance(error, FileNotFoundError):
                cause += written_otherwise(path, os.path.exists)
                if not os.path.isabs(path) and "://" not in path:
                    cause += (
                        f" in the working folder {os.getcwd()}. For paths that are relative to the folder of their "
                        f"table, call load_pairs with image_column={self.image_column!r}"
                    )
            of_file = f"{Url(member_file(path)[:400])!r}: " if path else ""
            raise self._bad_sample(row, f"column {self.image_column!r}: {of_file}{cause}") from error

    def number(self, row: int) -> int:
        """The number of a row, which is that in the whole table if the rows were selected from one."""
        return row if self.numbers is None else int(self.numbers[row])

    def _bad_sample(self, row: int, cause: str) -> BadSampleError:
        what = f"Row {self.number(row)} of {self.name} is bad: {cause.rstrip('.')}. Repair or drop it{self._or_skip}."
        return BadSampleError(f"{what} `infcl check` lists all such rows.", cause)


def _metadata_above(dataset: datasets.Dataset) -> str:
    """A sentence if captions lie above the folder of a split, such as ``train``, where they are not read."""
    import datasets

    if "image" not in dataset.column_names:
        return ""
    image = dataset.with_format(None).select_columns("image").cast_column("image", datasets.Image(decode=False))[0]
    path = Path((image["image"] or {}).get("path") or "")
    for split, folder in zip(path.parents, list(path.parents)[1:3], strict=False):
        for name in ("metadata.jsonl", "metadata.csv", "metadata.parquet"):
            if (file := folder / name).is_file():
                return f" {file} lies above: move its lines into {split / name}, with file names relative to it."
    return ""


def decode_rgb(encoded: bytes, min_side: int | None = None) -> np.ndarray:
    """The pixels of an image file as uint8 [H, W, 3]: RGB, turned upright by the orientation in its EXIF data.

    Transparency is treated as by `to_rgb`; 16-bit grey keeps its high byte. With the extra `fast` simplejpeg decodes
    most JPEGs, to the same pixels as PIL. ``min_side`` is as in `ImageTextDataset`.

    Raises:
        Exception: the file is broken. Decoders raise OSError, SyntaxError, struct.error and more.
    """
    try:
        return _decoded(encoded, min_side)
    except Exception:
        pixels = _only_pixels(encoded)  # PIL refuses a large colour profile or text, and faults in them
        if len(pixels) < len(encoded):
            with suppress(Exception):
                return _decoded(pixels, min_side)
        raise


def to_rgb(image: Image.Image) -> np.ndarray:
    """RGB as uint8 [H, W, 3], as the image processors of the installed transformers make it of a PIL image.

    Releases differ in transparency, see `transparency`.
    """
    if image.mode == "RGB" and image.info.get("transparency") is None:
        return np.array(image)
    from transformers.image_transforms import convert_to_rgb  # fails with a torchvision of another torch

    if "return_numpy" in inspect.signature(convert_to_rgb).parameters:
        return np.array(convert_to_rgb(image, return_numpy=True))
    return np.array(convert_to_rgb(image))


@cache
def transparency() -> str:
    """What becomes of transparent pixels with the installed release of transformers, for records and cards."""
    colour = 0, 64, 128
    made = tuple(to_rgb(Image.new("RGBA", (1, 1), (*colour, 0)))[0, 0].tolist())
    white = "laid on white, as by transformers from 5.23 on; earlier releases and OpenCLIP drop it"
    dropped = "dropped, as by OpenCLIP; transformers from 5.23 on lays it on white"
    return {(255, 255, 255): white, colour: dropped}.get(made, f"laid on {made}")


def _decoded(encoded: bytes, min_side: int | None) -> np.ndarray:
    is_plain = simplejpeg is not None and min_side is None and _is_plain_jpeg(encoded)
    if is_plain and (pixels := _decode_jpeg(encoded)) is not None:
        return pixels
    try:
        image: Image.Image = Image.open(io.BytesIO(encoded))
    except Image.UnidentifiedImageError:  # its message names an address in memory
        if encoded.startswith(LFS_POINTER):
            raise ValueError("it is a pointer of Git LFS in place of the image: run `git lfs pull`") from None
        raise Image.UnidentifiedImageError(f"its {len(encoded):,} bytes are not an image of a known format") from None
    if min_side is not None:
        image.draft(None, (min_side, min_side))  # only affects JPEG
    is_jpeg = simplejpeg is not None and image.format == "JPEG" and image.mode in ("RGB", "L")
    is_upright = is_jpeg and _orientation(image) not in _UPRIGHT
    if is_upright and (pixels := _decode_jpeg(encoded, *image.size)) is not None:
        return pixels
    # Grey of 16 bits in a PNG or PPM may be opened as integers of 32.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        kind = "floating point numbers" if image.mode == "F" else "32-bit integers"
        raise ValueError(f"its pixels are {kind}, whose range is not known")
    image.load()  # which turns a TIFF already
    if (turn := _UPRIGHT.get(_orientation(image))) is not None:
        image = image.transpose(turn)  # ImageOps.exif_transpose also writes the EXIF data, which may be odd
    if image.mode.startswith("I"):  # 16-bit grey, which PIL clips to 255; take the high byte, as it does for colour
        grey, clear = np.asarray(image), image.info.get("transparency")
        image = Image.fromarray((grey.clip(0, 2**16 - 1) >> 8).astype(np.uint8))
        if isinstance(clear, int):
            image.putalpha(Image.fromarray((grey != clear).astype(np.uint8) * 255))
    elif image.info.get("transparency") is not None:  # a palette: PIL warns unless it goes by way of RGBA
        image = image.convert("RGBA")
    return to_rgb(image)


def _only_pixels(encoded: bytes) -> bytes:
    """A PNG without what decides neither about its pixels nor about its orientation; other files as they are."""
    if not encoded.startswith(_PNG):
        return encoded
    parts, at = [_PNG], len(_PNG)
    while at + 8 <= len(encoded):
        end, name = at + 12 + int.from_bytes(encoded[at : at + 4], "big"), encoded[at + 4 : at + 8]
        if name[:1].isupper() or name in (b"tRNS", b"eXIf"):
            parts.append(encoded[at:end])
        at = end
    return b"".join(parts)


def _is_plain_jpeg(encoded: bytes) -> bool:
    """Whether PIL would open this file as an upright JPEG in RGB or grey. To ask PIL takes a tenth of decoding it."""
    at, has_size = 2 if encoded[:2] == b"\xff\xd8" else len(encoded), False
    while at + 10 <= len(encoded):
        start, marker, length = struct.unpack_from(">BBH", encoded, at)
        if start == 0xFF and marker in _SIZE:
            bits, height, width, channels = struct.unpack_from(">BHHB", encoded, at + 4)
            most = Image.MAX_IMAGE_PIXELS  # of more, PIL warns
            has_size = bits == 8 and channels in (1, 3) and 0 < height * width <= (most or 2**32)
        elif start != 0xFF or marker not in _PLAIN:
            return has_size and (start, marker) == (0xFF, _PIXELS)
        at += 2 + length
    return False


def _decode_jpeg(encoded: bytes, width: int = 0, height: int = 0) -> np.ndarray | None:
    """The pixels of an upright JPEG, of the smallest size that has this width and height; None if PIL has to do it."""
    with suppress(ValueError):  # PIL overlooks some faults, and says more about the others
        return simplejpeg.decode_jpeg(encoded, "RGB", min_height=height, min_width=width)
    return None


def _orientation(image: Image.Image) -> int:
    """The orientation in the EXIF data, or 1 (upright) if that data is broken, which does not affect the pixels."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # PIL raises SyntaxError, struct.error and more
        return 1


def with_errors(dataset: datasets.Dataset, columns: Iterable[str]) -> list[str]:
    """The columns, and the one that holds errors if the dataset has it."""
    return [*columns, *([ERRORS] if ERRORS in dataset.column_names else [])]


def find_error(value: Mapping[str, Any]) -> str | None:
    """What is wrong with the values of a row, if its table says that."""
    errors = value.get(ERRORS) or ()
    return next((error["error"] for error in errors if error["column"] is None or error["column"] in value), None)


def read_encoded(value: Mapping[str, Any]) -> bytes:
    """The contents of the file of an undecoded value of `datasets.Image`, which has its ``bytes`` or its ``path``."""
    if (contents := value["bytes"]) is not None:
        return contents
    if (path := value["path"]) is None:
        raise ValueError("it has neither contents nor a path")
    if is_member(path):
        return read_member(path)
    if "://" in path:
        from datasets.utils.file_utils import xopen

        with xopen(path, "rb") as file:
            return file.read()
    # Reading a named pipe could block, and a device may have no end. Windows lacks O_NONBLOCK.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{value['path']} is not a regular file")
        return file.read()


IMAGES = ("image", "img", "filepath", "file_path", "image_path", "path", "jpg", "jpeg", "png", "webp")
CAPTIONS = ("caption", "captions", "text", "txt", "title", "sentence", "sentences")


def find_column(kind: str, features: datasets.Features, wanted: str = "") -> str:
    """``wanted`` if the table has this column, else its only one of the kind's type, else the only one of a usual name.

    Args:
        kind: "image", whose type is Image, "caption", which has none, or "label", whose type is ClassLabel.
        wanted: the preferred name, by default that of the kind. It is also the result if no column or several ones
            come into question.
    """
    import datasets

    wanted = wanted or kind
    type_of_kind, usual, fits = {
        "image": (datasets.Image, IMAGES, holds_images),
        "caption": ((), CAPTIONS, holds_captions),
        "label": (datasets.ClassLabel, ("cls",), lambda feature: True),  # as tar shards name it
    }[kind]
    found = [name for name, feature in features.items() if isinstance(feature, type_of_kind)]
    found = found or [name for name in usual if name in features and fits(features[name])]
    return found[0] if wanted not in features and len(found) == 1 else wanted


def usual_column(kind: str, column: str, dataset: object) -> str:
    """``column``, unless it is the default, which is called as its ``kind``: then the one of `find_column`."""
    features: Any = getattr(dataset, "features", None) or {}  # what is no table is refused elsewhere
    return find_column(kind, features) if column == kind else column
