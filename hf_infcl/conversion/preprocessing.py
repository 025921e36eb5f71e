"""OpenCLIP's preprocessing of images for evaluation, and transformers' image processors."""

from __future__ import annotations

from typing import Any

import transformers
from PIL import Image
from transformers import ProcessorMixin

from .towers import refusal

# What OpenCLIP takes where a config says nothing.
OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)


def image_processor(preprocess: dict[str, object], size: int) -> Any:
    """transformers' processor with the resizing, crop, mean and standard deviation of OpenCLIP's evaluation.

    Args:
        preprocess: `preprocess_cfg` of an OpenCLIP config. Its size has no effect, as in OpenCLIP.
        size: the edge of the model's images in pixels.

    Raises:
        ValueError: images are padded, or resized in a way that transformers does not have.
    """
    mode = preprocess.get("resize_mode") or "shortest"
    if mode not in ("shortest", "squash"):
        raise refusal(f"it pads images to a square (resize_mode={mode!r}), as no image processor of CLIP can")
    interpolation = preprocess.get("interpolation") or "bicubic"
    if interpolation not in ("bicubic", "bilinear", "random"):
        raise refusal(f"it resizes images by interpolation={interpolation!r}")
    options: dict[str, Any] = {
        "resample": Image.Resampling.BILINEAR if interpolation == "bilinear" else Image.Resampling.BICUBIC,
        "image_mean": _of_channels(preprocess.get("mean", OPENAI_MEAN)),
        "image_std": _of_channels(preprocess.get("std", OPENAI_STD)),
    }
    square = {"height": size, "width": size}
    if mode == "squash":
        return transformers.SiglipImageProcessorPil(size=square, do_convert_rgb=True, **options)
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=square, **options)


def _of_channels(values: Any) -> list[float]:
    return list(values) if isinstance(values, (list, tuple)) else [values] * 3


def preprocess_config(processor: ProcessorMixin, size: int) -> dict[str, Any]:
    """`preprocess_cfg` of an OpenCLIP config, from an image processor of transformers.

    Args:
        size: the edge of the model's images in pixels, which OpenCLIP takes in any case.

    Raises:
        ValueError: OpenCLIP cannot prepare images like this processor.
    """
    fields = processor.to_dict()
    resample = int(fields["resample"])
    names = {int(Image.Resampling.BILINEAR): "bilinear", int(Image.Resampling.BICUBIC): "bicubic"}
    if resample not in names:
        raise refusal(f"its image processor has resample={resample}, and OpenCLIP resizes bicubically or bilinearly")
    rescaled = abs((fields.get("rescale_factor") or 1 / 255) - 1 / 255) < 1e-9
    if not (rescaled and all(fields.get(key, True) for key in ("do_resize", "do_rescale", "do_normalize"))):
        raise refusal("its image processor does not resize, divide by 255 and normalise, as OpenCLIP always does")
    edges, crops = dict(fields["size"]), bool(fields.get("do_center_crop"))
    squash = "height" in edges
    made = set(dict(fields["crop_size"]).values()) if crops else set()
    if squash == crops or {edges.get("shortest_edge", size), *made, *edges.values()} != {size}:
        raise refusal(
            f"its image processor has size={edges}{' and a crop of ' + str(sorted(made)) if crops else ''}; OpenCLIP "
            f"resizes the shortest edge to {size}, the size of the model, and crops, or resizes both edges to it"
        )
    return {
        "mean": list(fields["image_mean"]),
        "std": list(fields["image_std"]),
        "interpolation": names[resample],
        "resize_mode": "squash" if squash else "shortest",
    }
