#!/usr/bin/env python3
"""Draws one picture as augmented by each preset in six epochs, for the guide in hf_infcl/data.

python scripts/augmentation_picture.py --output hf_infcl/data/augmentation.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from transformers import CLIPImageProcessorPil

from hf_infcl.data.augmentation import PRESETS, augment
from hf_infcl.data.transforms import ImageTransform

TILE, GAP, LABEL, EPOCHS = 112, 6, 84, 6


def scene() -> Image.Image:
    """A picture of 500 × 375 pixels that makes crops and reflections visible: a grid, a sun on the left, a word."""
    picture = Image.new("RGB", (500, 375), "#bfe0f2")
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 250, 500, 375), fill="#7fb069")
    draw.ellipse((40, 30, 130, 120), fill="#f6c945")
    draw.polygon([(250, 130), (170, 200), (330, 200)], fill="#a23b3b")
    draw.rectangle((185, 200, 315, 300), fill="#e8d8b9")
    for step in range(0, 500, 25):
        draw.line((step, 0, step, 375), fill="#00000022" if step % 100 else "#444444")
    for step in range(0, 375, 25):
        draw.line((0, step, 500, step), fill="#00000022" if step % 100 else "#444444")
    draw.text((250, 335), "LEFT TO RIGHT", fill="black", font=ImageFont.load_default(40), anchor="mm")
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    crop = {"height": TILE, "width": TILE}
    transform = ImageTransform.of(CLIPImageProcessorPil(size={"shortest_edge": TILE}, crop_size=crop))
    assert transform is not None
    sheet = Image.new("RGB", (LABEL + EPOCHS * (TILE + GAP), 24 + len(PRESETS) * (TILE + GAP)), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(14)
    for row, preset in enumerate(PRESETS):
        top = 24 + row * (TILE + GAP)
        draw.text((4, top + TILE / 2), preset, fill="black", font=font, anchor="lm")
        for epoch in range(EPOCHS):
            item = augment(np.asarray(scene()), preset, f"0 {epoch} 0 augmentation")
            pixels: torch.Tensor = transform(item["image"], cropped=item.get("cropped", False))
            left = LABEL + epoch * (TILE + GAP)
            sheet.paste(Image.fromarray(pixels.permute(1, 2, 0).numpy()), (left, top))
            draw.text((left + TILE / 2, 12), f"epoch {epoch}", fill="black", font=font, anchor="mm")
    sheet.quantize(128).save(output, optimize=True)


if __name__ == "__main__":
    main()
