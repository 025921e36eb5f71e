"""Rows with images: reading them undecoded, decoding them one by one, and saying which row is bad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    import datasets
    from PIL import Image


class BadSampleError(ValueError):
    pass


class ImageDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of a `datasets.Dataset` whose images are decoded one by one, so that a bad file harms no other row."""

    def __init__(self, dataset: datasets.Dataset, image_column: str, columns: Sequence[str]) -> None:
        import datasets

        if isinstance(dataset, datasets.DatasetDict):
            raise ValueError(f"dataset is a DatasetDict; pass one of its splits: {list(dataset)}")
        if not isinstance(dataset, datasets.Dataset):
            raise ValueError(f"dataset must be a datasets.Dataset, got {type(dataset).__name__}")
        columns = list(dict.fromkeys([image_column, *columns]))
        if missing := [column for column in columns if column not in dataset.column_names]:
            raise ValueError(f"no column {missing} in the dataset; its columns are {dataset.column_names}")
        if len(dataset) == 0:
            raise ValueError("the dataset has no rows")
        if dataset.format["type"] == "custom":
            raise ValueError(
                "the dataset has a transform, which would see undecoded images: call reset_format() and transform the "
                "items in a dataset around this one"
            )
        feature = dataset.features[image_column]
        if not (isinstance(feature, datasets.Image) or is_value(feature, "string", "large_string", "binary")):
            raise ValueError(f"image_column {image_column!r} must hold images, paths or encoded images, not {feature}")
        rows = dataset.with_format(None).select_columns(columns)
        self._rows = rows.cast_column(image_column, datasets.Image(decode=False))
        self._columns = dataset.column_names
        self._image_column = image_column

    def __len__(self) -> int:
        return len(self._rows)

    def _image(self, row: int, value: dict[str, Any] | None) -> Image.Image:
        try:
            return decode_rgb(value)
        except Exception as error:  # whatever a decoder raises: OSError, SyntaxError, struct.error, ...
            raise self._bad_sample(row, f"column {self._image_column!r}: {type(error).__name__}: {error}") from error

    def _bad_sample(self, row: int, cause: str) -> BadSampleError:
        return BadSampleError(
            f"row {row} of the dataset with columns {self._columns} is bad: {cause}. "
            'Mend or drop it; in training, on_bad_sample="skip" puts another row in its place'
        )


def decode_rgb(value: dict[str, Any] | None) -> Image.Image:
    """The image of an undecoded `datasets.Image` value, upright and in RGB with 8 bits."""
    import datasets
    from PIL import Image

    if value is None:
        raise ValueError("no image")
    image = datasets.Image().decode_example(value)
    if image.mode.startswith("I"):  # 16-bit grey, which PIL clips to 255; take the high byte, as it does for colour
        image = Image.fromarray((np.asarray(image).clip(0, 2**16 - 1) >> 8).astype(np.uint8))
    elif "transparency" in image.info:  # a palette: PIL warns unless it goes by way of RGBA
        image = image.convert("RGBA")
    return image.convert("RGB")


def is_value(feature: Any, *dtypes: str) -> bool:
    import datasets

    return isinstance(feature, datasets.Value) and feature.dtype in dtypes


def is_string(feature: Any) -> bool:
    return is_value(feature, "string", "large_string")


def is_integer(feature: Any) -> bool:
    """Including ClassLabel."""
    return getattr(feature, "dtype", "").startswith(("int", "uint"))
