"""Transforms of images: random crops and flips, and the work of transformers' image processors.

The latter has two steps: uint8 in a worker, floating point on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

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


# By PIL's number of the filter. F.interpolate has no other filter for uint8 with antialiasing.
_MODES = {2: "bilinear", 3: "bicubic"}

# The most that a long side is, in short sides, before the middle is cropped: a strip would be resized to gigabytes.
_LONGEST = 64

# The module of transformers whose classes resize, crop and normalise, and from which image processors inherit.
_BACKENDS = "transformers.image_processing_backends"


@dataclass(frozen=True, eq=False)
class ImageTransform:
    """Resizes and crops uint8 images and normalises them later, like most image processors of transformers.

    The result is bit-identical to that of transformers' torchvision backend, but does not need torchvision. The PIL
    backend of transformers rounds differently when it resizes: photographs differ by about one grey level.
    """

    size: int | tuple[int, int]  # height and width after resizing; or the shorter side, which keeps the aspect ratio
    crop: tuple[int, int] | None  # height and width of the center crop that follows; None if there is none
    mode: str  # "bilinear" or "bicubic"; both are antialiased
    mean: Tensor  # fp32 [3, 1, 1], in grey levels from 0 to 255
    std: Tensor  # fp32 [3, 1, 1], in grey levels

    @classmethod
    def of(cls, processor: Any) -> ImageTransform | None:
        """The transform that equals an image processor of transformers, or None if the processor does something else.

        The result is None for classes that override methods of transformers' backends (SigLIP 2's patches, ALIGN's
        second normalisation), and for options that ask for padding, another filter or outputs of different sizes.
        """

        def option(name: str) -> Any:
            return getattr(processor, name, None)

        if not _inherits_its_methods(type(processor)) or option("do_pad"):
            return None
        if not (option("do_resize") and option("do_rescale") and option("do_normalize")):
            return None
        mode = _MODES.get(2 if option("resample") is None else option("resample"))
        size = _sides(option("size"))
        crop = _sides(option("crop_size")) if option("do_center_crop") else None
        if mode is None or size is None or isinstance(crop, int):
            return None
        if crop is None and (option("do_center_crop") or isinstance(size, int)):
            return None
        if crop is not None and max(crop) > (size if isinstance(size, int) else min(size)):
            return None  # it might have to be padded
        # The order of operations is that of the torchvision backend, for the same rounding.
        mean, std = (
            (torch.tensor(values) * (1.0 / processor.rescale_factor)).expand(3)[:, None, None]
            for values in (processor.image_mean, processor.image_std)
        )
        return cls(size, crop, mode, mean, std)

    def __call__(self, image: np.ndarray, cropped: bool = False) -> Tensor:
        """Resize and crop uint8 [H, W, 3] to uint8 [3, height, width].

        ``cropped``: the image is already a crop. All of it is resized to the size that is wanted in the end.
        """
        crop = None if cropped else self.crop
        if crop is not None:
            image = _without_far_ends(image)
        height, width = image.shape[:2]
        size = self.crop if cropped and self.crop is not None else self.size
        if isinstance(size, int):  # of the shorter side
            short = min(height, width)
            size = int(size * height / short), int(size * width / short)
        # torch accepts neither read-only arrays, which PIL returns, nor negative strides, which a flip creates.
        batch = torch.from_numpy(np.require(image, requirements=["C", "W"]))[None].permute(0, 3, 1, 2)
        if size != (height, width):
            # With 3 channels, torch has a fast path for this layout (channels last in memory). It looks at the stride
            # of the batch as well: after permute(...)[None], it would bring the result into another layout.
            batch = F.interpolate(batch, size, mode=self.mode, antialias=True)
        pixels = batch[0]
        if crop is None:
            return pixels
        top, left = (size[0] - crop[0]) // 2, (size[1] - crop[1]) // 2
        return pixels[:, top : top + crop[0], left : left + crop[1]]

    def normalise(self, pixels: Tensor) -> Tensor:
        """Rescale and normalise uint8 [b, 3, H, W], on any device, to fp32 of the same shape: (x - mean) / std."""
        mean, std = (values.to(pixels.device, non_blocking=True) for values in (self.mean, self.std))
        return pixels.float().sub_(mean).div_(std)


def set_image_size(processor: Any, side: int) -> None:
    """Makes an image processor of transformers return squares of this side. It crops away the same share as before.

    Raises:
        ValueError: its images have no fixed size.
    """
    size = _sides(getattr(processor, "size", None))
    crop = _sides(getattr(processor, "crop_size", None)) if getattr(processor, "do_center_crop", None) else None
    if size is None or (crop is None and isinstance(size, int)):
        raise ValueError(
            f"image_size={side} cannot be set for a {type(processor).__name__}, whose images have no fixed size: its "
            f"size is {getattr(processor, 'size', None)}. Set its size yourself, and leave image_size out."
        )
    short: Any = size if isinstance(size, int) else min(size)
    share = 1.0 if crop is None else short / min(crop)  # type: ignore
    processor.size = type(processor.size)(**dict.fromkeys(dict(processor.size), round(share * side)))
    if crop is not None:
        processor.crop_size = type(processor.crop_size)(**dict.fromkeys(dict(processor.crop_size), side))


def _without_far_ends(image: np.ndarray) -> np.ndarray:
    """The middle of an image [H, W, 3] whose long side exceeds `_LONGEST` times the short one; others unchanged.

    The center crop that follows takes at most a square, so it is not affected.
    """
    longest = _LONGEST * min(image.shape[:2])
    top, left = (max(0, (side - longest) // 2) for side in image.shape[:2])
    return image[top : top + longest, left : left + longest]


def _inherits_its_methods(kind: type) -> bool:
    """Whether an image processor's class takes all methods but the constructor from one of transformers' backends."""
    backend = next((parent for parent in kind.__mro__ if parent.__module__ == _BACKENDS), None)
    if backend is None:
        return False
    between = kind.__mro__[: kind.__mro__.index(backend)]
    changed = {name for parent in between for name, value in vars(parent).items() if callable(value)}
    return not any(hasattr(backend, name) for name in changed - {"__init__"})


def _sides(size: Mapping[str, int] | None) -> tuple[int, int] | int | None:
    """Height and width, or the length of the shorter side alone; None for any other kind of size in transformers."""
    sides = dict(size or {})
    if sides.keys() == {"height", "width"}:
        return sides["height"], sides["width"]
    return sides["shortest_edge"] if sides.keys() == {"shortest_edge"} else None
