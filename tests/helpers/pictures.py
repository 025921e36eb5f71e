"""Small pictures, and tables and folders of them with captions."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import Image

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def picture(row: int, size: tuple[int, int] = (8, 8)) -> Image.Image:
    """Noise, so that half of the PNG file cannot be decoded. The first pixel encodes the row."""
    pixels = np.random.default_rng(row).integers(0, 256, (*size, 3), dtype=np.uint8)
    pixels[0, 0] = row
    return Image.fromarray(pixels)


def file_of(image: Image.Image, kind: str = "png", **options: Any) -> bytes:
    """The bytes of an image file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def captioned(captions: Sequence[Any], size: tuple[int, int] = (8, 8), **columns: Sequence[Any]) -> datasets.Dataset:
    images = [picture(row, size) for row in range(len(captions))]
    return datasets.Dataset.from_dict({"image": images, "caption": captions, **columns})


def lettered(count: int = 24, first: int = 0) -> datasets.Dataset:
    """Pictures of 20 × 24 pixels with two captions of letters each, and their numbers as ids."""
    numbers = range(first, first + count)
    captions = [[LETTERS[n % 26] + " " + LETTERS[n // 2 % 26], LETTERS[n % 7] + " b"] for n in numbers]
    images = [picture(n, (20, 24)) for n in numbers]
    return datasets.Dataset.from_dict({"image": images, "caption": captions, "id": [*numbers]})


def write_folder(
    folder: Path, captions: Sequence[Any], size: tuple[int, int] = (8, 8), column: str = "caption"
) -> Path:
    """An image folder whose files are 0.png, 1.png and so on."""
    folder.mkdir(parents=True)
    lines = []
    for row, caption in enumerate(captions):
        picture(row, size).save(folder / f"{row}.png")
        lines.append(json.dumps({"file_name": f"{row}.png", column: caption}))
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder
