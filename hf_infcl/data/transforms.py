"""The work of transformers' image processors in two steps: uint8 in a worker, floating point on the device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# By PIL's number of the filter. F.interpolate has no other filter for uint8 with antialiasing.
_MODES = {2: "bilinear", 3: "bicubic"}

# The most that a long side is, in short sides, before the middle is cropped.
_LONGEST = 64

Sides = int | tuple[int, int]  # of the shorter side, which keeps the aspect ratio; or height and width


@dataclass(frozen=True, eq=False)
class ImageTransform:
    """Resizes and crops uint8 images and normalises them later, like most image processors of transformers.

    The result is bit-identical to that of transformers' torchvision backend, but does not need torchvision. The PIL
    backend of transformers rounds differently when it resizes: photographs differ by about one grey level.
    """

    size: Sides  # after resizing
    crop: tuple[int, int] | None  # height and width of the center crop that follows; None if there is none
    mode: str  # "bilinear" or "bicubic"; both are antialiased
    mean: Tensor  # fp32 [3, 1, 1], in grey levels from 0 to 255
    std: Tensor  # fp32 [3, 1, 1], in grey levels

    @classmethod
    def of(cls, processor: Any) -> "ImageTransform | None":
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
        size, crop = _size_and_crop(processor)
        has_fixed_size = crop is not None if option("do_center_crop") else isinstance(size, tuple)
        if mode is None or size is None or isinstance(crop, int) or not has_fixed_size:
            return None
        if crop is not None and max(crop) > _shorter(size):
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
        if crop is not None:  # a strip would be resized to gigabytes, and the crop takes at most a square
            longest = _LONGEST * min(image.shape[:2])
            top, left = (max(0, (side - longest) // 2) for side in image.shape[:2])
            image = image[top : top + longest, left : left + longest]
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
    size, crop = _size_and_crop(processor)
    if size is None or (crop is None and isinstance(size, int)):
        raise ValueError(
            f"image_size={side} cannot be set for a {type(processor).__name__}, whose images have no fixed size: its "
            f"size is {getattr(processor, 'size', None)}. Set its size yourself, and leave image_size out."
        )
    share = 1.0 if crop is None else _shorter(size) / _shorter(crop)
    processor.size = type(processor.size)(**dict.fromkeys(dict(processor.size), round(share * side)))
    if crop is not None:
        processor.crop_size = type(processor.crop_size)(**dict.fromkeys(dict(processor.crop_size), side))


def _inherits_its_methods(kind: type) -> bool:
    """Whether an image processor's class takes all methods but the constructor from one of transformers' backends."""
    of_backends = "transformers.image_processing_backends"  # of classes that resize, crop and normalise
    backend = next((parent for parent in kind.__mro__ if parent.__module__ == of_backends), None)
    if backend is None:
        return False
    between = kind.__mro__[: kind.__mro__.index(backend)]
    changed = {name for parent in between for name, value in vars(parent).items() if callable(value)}
    return not any(hasattr(backend, name) for name in changed - {"__init__"})


def _size_and_crop(processor: Any) -> tuple[Sides | None, Sides | None]:
    """The sides to which an image processor resizes, and those to which it crops then, if it does."""
    crops = getattr(processor, "do_center_crop", None)
    return _sides(getattr(processor, "size", None)), _sides(getattr(processor, "crop_size", None)) if crops else None


def _shorter(sides: Sides) -> int:
    return sides if isinstance(sides, int) else min(sides)


def _sides(size: Mapping[str, int] | None) -> Sides | None:
    """Height and width, or the shorter side; None for any other kind of size in transformers."""
    sides = dict(size or {})
    if sides.keys() == {"height", "width"}:
        return sides["height"], sides["width"]
    return sides["shortest_edge"] if sides.keys() == {"shortest_edge"} else None
