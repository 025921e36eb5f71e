"""Small pictures."""

import numpy as np
from PIL import Image


def picture(row: int, size: tuple[int, int] = (8, 8)) -> Image.Image:
    """Noise, so that half of the PNG file cannot be decoded. The first pixel encodes the row."""
    pixels = np.random.default_rng(row).integers(0, 256, (*size, 3), dtype=np.uint8)
    pixels[0, 0] = row
    return Image.fromarray(pixels)
