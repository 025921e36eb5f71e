"""How pictures are prepared for a converted model, compared with OpenCLIP's own evaluation transform, pixel by pixel.

`python tests/open_clip_pixels.py` writes results/open_clip_pixels.csv again. The pictures are cuts of a photograph and
a drawing that matplotlib brings along.
"""

import csv
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from helpers import open_clip_package
from helpers.open_clip_models import DIFFERENCES
from matplotlib import get_data_path
from PIL import Image

from hf_infcl.data.images import decode_rgb
from hf_infcl.data.transforms import ImageTransform
from hf_infcl.models.open_clip_inputs import image_processor

PIXELS = DIFFERENCES.with_name("open_clip_pixels.csv")
SIZE, PICTURES = 64, 20
MODES = ("shortest", "squash")
ALIKE = ("other sizes", "sizes of 3 mod 4", "grey")  # if they are not cropped
KINDS = (*ALIKE, "transparent", "palette")


def pictures(kind: str, number: int) -> Iterator[Image.Image]:
    """Pictures whose longer edge, with the shorter one resized to `SIZE`, is even, or exceeds it by 3 mod 4."""
    random = np.random.default_rng(0)
    photograph, drawing = (
        Image.open(f"{get_data_path()}/sample_data/{name}")
        for name in ("grace_hopper.jpg", "Minduka_Present_Blue_Pack.png")
    )
    for row in range(number):
        more = 4 * int(random.integers(0, 8)) + (3 if kind == "sizes of 3 mod 4" else 2)
        size = (2 * SIZE, 2 * (SIZE + more)) if row % 2 else (2 * (SIZE + more), 2 * SIZE)
        if kind in ("transparent", "palette"):
            cut = drawing.resize(size)
            yield cut if kind == "transparent" else cut.convert("RGB").quantize(64)
            continue
        left, top = (
            int(random.integers(0, whole - part + 1)) for whole, part in zip(photograph.size, size, strict=True)
        )
        cut = photograph.crop((left, top, left + size[0], top + size[1]))
        yield cut.convert("L") if kind == "grey" else cut


def rows(open_clip: Any, number: int = PICTURES) -> list[dict[str, Any]]:
    """Of each way to resize, kind of pictures and preparation: how many of the pictures have OpenCLIP's pixels.

    A row says how many are equal, equal within 1 of 255 levels, and so after a shift by one pixel; and the largest
    difference of a pixel in levels.
    """
    found = []
    for mode in MODES:
        processor = image_processor({"resize_mode": mode}, SIZE)
        theirs = open_clip.transform.image_transform(SIZE, is_train=False, resize_mode=mode)
        std = torch.tensor(processor.image_std)[:, None, None] * 255
        transform = ImageTransform.of(processor)
        for kind in KINDS:
            differences: dict[str, list[tuple[int, int]]] = {}
            for picture in pictures(kind, number):
                expected = theirs(picture)
                file = io.BytesIO()
                picture.save(file, "PNG")
                prepared = {
                    "the processor of transformers": processor(picture, return_tensors="pt")["pixel_values"][0],
                    "training and evaluation": transform.normalise(transform(decode_rgb(file.getvalue()))),
                }
                along = 1 if picture.width < picture.height else 2  # the axis of the longer edge, which is cropped
                for name, pixels in prepared.items():
                    ours, right = (pixels * std).transpose(1, along), (expected * std).transpose(1, along)
                    levels = [(ours - right).abs().max(), (ours[:, 1:] - right[:, :-1]).abs().max()]
                    differences.setdefault(name, []).append(tuple(int(level.round()) for level in levels))
            for name, levels in differences.items():
                row = {"resize_mode": mode, "pictures": kind, "preparation": name, "number": number}
                row |= {"equal": sum(here == 0 for here, _ in levels), "within_1": sum(here <= 1 for here, _ in levels)}
                row |= {"shifted": sum(shifted <= 1 for _, shifted in levels), "largest": max(levels)[0]}
                found.append(row)
    return found


def main() -> None:
    with PIXELS.open("w", encoding="utf-8", newline="") as file:
        found = rows(open_clip_package.imported())
        writer = csv.DictWriter(file, found[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


if __name__ == "__main__":
    main()
