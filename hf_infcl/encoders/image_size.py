"""Images of another size than those that the image tower was trained on: its position embeddings are interpolated."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from .dual_encoder import DualEncoder
from .model_types import IMAGE_TOWERS, TOWERS


def config_for_images(config: PretrainedConfig, size: int | None) -> Any:
    """The config of a dual encoder for images of another size; the same one with None, or if it has this size.

    Raises:
        ValueError: the size is no multiple of the patches.
    """
    vision = getattr(config, "vision_config", None)
    if size is None or getattr(vision, "image_size", size) == size:
        return config
    _check_multiple(vision, size)
    config = copy.deepcopy(config)
    config.vision_config.image_size = size
    return config


def resize_images(encoder: DualEncoder, size: int) -> None:
    """Gives the image tower position embeddings for images of another size in pixels, and its config that size.

    They are interpolated as transformers does it with ``interpolate_pos_encoding``: bicubic, for TIPSv2 bilinear with
    antialiasing. What is saved then loads with ``from_pretrained``. A tower without positions, such as a ConvNet, takes
    the size as it is.

    Raises:
        ValueError: the size is no multiple of the patches; the positions of the tower cannot be interpolated; the model
            has adapters around it, in whose file they would be missing.
    """
    tower: Any = getattr(encoder.model, TOWERS["image"][0], None)
    config: Any = getattr(tower, "config", None)
    if getattr(config, "image_size", None) == size:
        return
    kind = getattr(config, "model_type", None)
    if kind not in IMAGE_TOWERS:
        _check_has_no_positions(encoder, tower, kind)
    else:
        _check_multiple(config, size)
        if encoder.base is not encoder.model:
            raise ValueError(
                f"image_size={size} changes the position embeddings of the model, which is of {config.image_size} "
                "pixels, and the adapter's file would not have them. Add adapters to a model of this size, or merge "
                "them at the end (--lora_merge)."
            )
        with torch.no_grad():
            _resize_positions(tower.embeddings, config, size)
    whole: Any = getattr(encoder.base, "config", None)
    configs: list[Any] = [config, getattr(whole, "vision_config", None)]
    for of_tower in configs:
        if hasattr(of_tower, "image_size"):
            of_tower.image_size = size


def _check_multiple(config: Any, size: int) -> None:
    patch = getattr(config, "patch_size", 1)
    if size % patch:
        near = max(1, round(size / patch)) * patch
        raise ValueError(
            f"image_size={size} is no multiple of the patches of the image tower, which are of {patch} × {patch} "
            f"pixels. Choose {near}."
        )


def _check_has_no_positions(encoder: DualEncoder, tower: nn.Module, kind: str | None) -> None:
    """Raises a ValueError unless a tower that is not known takes images of any size."""
    if kind is not None and not any("position" in name for name, _ in tower.named_parameters()):
        return
    name = f"The image tower of {type(encoder.base).__name__} (type {kind!r})"
    if kind == "siglip2_vision_model":
        raise ValueError(
            f"{name} takes images of any size, cut into at most max_num_patches patches. Leave image_size out, and set "
            "processor.image_processor.max_num_patches."
        )
    raise ValueError(
        f"{name} has position embeddings that cannot be interpolated to another image_size. Leave image_size out, or "
        f"train a tower of the types {', '.join(IMAGE_TOWERS)}, or one without positions."
    )


def _resize_positions(embeddings: Any, config: PretrainedConfig, size: int) -> None:
    old, new = ((side // config.patch_size) ** 2 for side in (config.image_size, size))
    name = "position_embeddings" if hasattr(embeddings, "position_embeddings") else "position_embedding"
    module = getattr(embeddings, name, None)  # AIMv2's native models compute theirs
    if module is not None:
        weight = module.weight[None] if isinstance(module, nn.Embedding) else module
        prefix = weight.shape[1] - old  # of the class token
        positions = _interpolated(embeddings, weight, prefix, size, config.patch_size)
        if isinstance(module, nn.Embedding):
            module.weight = nn.Parameter(positions[0], module.weight.requires_grad)
            module.num_embeddings = prefix + new
        else:
            setattr(embeddings, name, nn.Parameter(positions, module.requires_grad))
        new_positions = prefix + new
    else:
        new_positions = new
    if hasattr(embeddings, "position_ids"):
        embeddings.position_ids = torch.arange(new_positions, device=embeddings.position_ids.device)[None]
    # What the modules noted of the size at their construction.
    for noted in (embeddings, getattr(embeddings, "patch_embeddings", None)):
        for attribute, value in (("num_patches", new), ("num_positions", new_positions), ("image_size", size)):
            if hasattr(noted, attribute):
                is_pair = isinstance(getattr(noted, attribute), (tuple, list))
                setattr(noted, attribute, (value, value) if is_pair else value)


def _interpolated(embeddings: Any, weight: Tensor, prefix: int, size: int, patch: int) -> Tensor:
    """Positions [1, prefix + patches, width] for images of the size."""
    grid = size // patch
    if hasattr(embeddings, "interpolate_pos_encoding"):
        tokens = weight.new_empty(1, prefix + grid**2, weight.shape[2])  # only the shape counts
        return embeddings.interpolate_pos_encoding(tokens, size, size).clone()
    side = int((weight.shape[1] - prefix) ** 0.5)
    patches = weight[:, prefix:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, (grid, grid), mode="bicubic", align_corners=False)
    return torch.cat([weight[:, :prefix], patches.flatten(2).transpose(1, 2)], dim=1)
