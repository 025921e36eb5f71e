"""Random crops and flips of images, drawn from a random generator of each sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from PIL import Image

# The name of a preset, or a function that takes an RGB image and the sample's generator and returns an image.
Augmentation = str | Callable[[Image.Image, Random], Image.Image]

PRESETS = ("none", "crop", "flip_crop")

# The share of the image's area and the aspect ratio of a crop, as in OpenCLIP's training from scratch.
_AREA = 0.9, 1.0
_RATIO = 3 / 4, 4 / 3


def augment(image: np.ndarray, augmentation: Augmentation, seed: str) -> dict[str, Any]:
    """Augment one image, uint8 [H, W, 3].

    ``"none"`` leaves the image unchanged. ``"crop"`` takes a random crop of 0.9 to 1 of the area with an aspect ratio
    of 3/4 to 4/3, which the collator resizes to the model's input. ``"flip_crop"`` also flips half of the images left
    to right. A function receives a `PIL.Image.Image` and a generator created from the seed, and returns an image.

    Args:
        seed: the seed of this sample in this epoch. The augmentation depends only on the seed and the image's size.

    Returns:
        The entries of an item: ``image`` and, if a preset cropped it, ``cropped``, which is True.
    """
    if augmentation == "none":
        return {"image": image}
    random = Random(seed)  # seeded with the SHA-512 of the text
    if callable(augmentation):
        return {"image": augmentation(Image.fromarray(image), random)}
    top, left, height, width = _random_box(image.shape[0], image.shape[1], random)
    image = image[top : top + height, left : left + width]
    if augmentation == "flip_crop" and random.random() < 0.5:
        image = image[:, ::-1]
    return {"image": np.ascontiguousarray(image), "cropped": True}


def _random_box(height: int, width: int, random: Random) -> tuple[int, int, int, int]:
    """Top, left, height and width of a crop that fits into the image."""
    for _ in range(10):
        area = height * width * random.uniform(*_AREA)
        ratio = math.exp(random.uniform(math.log(_RATIO[0]), math.log(_RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    # The image is much wider or higher than the ratios allow: take the largest box in its center within the ratios.
    w, h = min(width, round(height * _RATIO[1])), min(height, round(width / _RATIO[0]))
    return (height - h) // 2, (width - w) // 2, h, w
