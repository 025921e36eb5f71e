"""Tar and parquet shards of small pairs. Every sample contains its own number."""

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import Image

from hf_infcl import ImageTextDataset

from .pictures import file_of


def png(number: int, size: int = 4) -> bytes:
    """A PNG file whose first pixel encodes the number."""
    pixels = np.zeros((size, size, 3), np.uint8)
    pixels[0, 0] = number >> 16, number >> 8 & 255, number & 255
    return file_of(Image.fromarray(pixels), compress_level=0)


def numbered(numbers: Sequence[int], captions: Sequence[Any] | None = None, **options: Any) -> ImageTextDataset:
    """Pairs whose images hold these numbers, by default with the captions "caption 0" and so on."""
    images = [{"bytes": png(number), "path": None} for number in numbers]
    texts = [f"caption {number}" for number in numbers] if captions is None else captions
    table = datasets.Dataset.from_dict({"image": images, "caption": texts})
    return ImageTextDataset(table.cast_column("image", datasets.Image()), **options)


def number_of(item: Mapping[str, Any]) -> int:
    """The number that `png` wrote into the image of an item."""
    high, middle, low = map(int, item["image"][0, 0])
    return high << 16 | middle << 8 | low


def write_tar(path: Path, members: Sequence[tuple[str, bytes]], form: int = tarfile.GNU_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def pair(number: int, **fields: Any) -> list[tuple[str, bytes]]:
    """The files of one sample of a webdataset."""
    text = [(f"{number:06d}.txt", f"caption {number}".encode())]
    return [
        (f"{number:06d}.png", png(number)),
        *([(f"{number:06d}.json", json.dumps(fields).encode())] if fields else text),
    ]


def write_tars(folder: Path, sizes: Sequence[int], first: int = 0) -> list[int]:
    """Writes 00000.tar, ... with the given numbers of samples, numbered from ``first`` on; returns the numbers."""
    numbers = list(range(first, first + sum(sizes)))
    rest = iter(numbers)
    for shard, size in enumerate(sizes):
        write_tar(folder / f"{shard:05d}.tar", [member for _ in range(size) for member in pair(next(rest))])
    return numbers


def write_parquet(path: Path, numbers: Sequence[int], row_group: int = 10, **columns: Sequence[Any]) -> Path:
    """Writes a parquet file with images as `datasets` stores them, and captions unless columns are given."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    columns.setdefault("image", [{"bytes": png(number), "path": f"{number}.png"} for number in numbers])
    columns.setdefault("caption", [f"caption {number}" for number in numbers])
    pyarrow.parquet.write_table(pyarrow.table(dict(columns)), path, row_group_size=row_group)
    return path
