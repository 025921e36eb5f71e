"""Compares converted models with OpenCLIP's, on the same inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .incoming import clean

ENOUGH = 0.9999
ROWS = 4


def fixed_inputs(config: Any, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Pixels [4, 3, S, S] and token ids [4, L] that are the same at every call, for a model's config.

    L is the length, by default that of the model's positions. Captions of CLIP end at different positions; those of
    SigLIP fill their length.
    """
    text, image = config.text_config, config.vision_config
    drawn = torch.Generator().manual_seed(0)
    pixels = torch.randn(ROWS, 3, image.image_size, image.image_size, generator=drawn)
    length = length or text.max_position_embeddings
    ids = torch.randint(3, text.vocab_size - 1, (ROWS, length), generator=drawn)
    if config.model_type != "siglip":
        # For CLIPModel, eos_token_id 2 means the largest id.
        largest = config.model_type == "clip" and text.eos_token_id == 2
        end = text.vocab_size - 1 if largest else text.eos_token_id
        ids[ids == end] = end - 1
        for row in range(ROWS):
            ids[row, length - 1 - row :] = 0
            ids[row, length - 1 - row] = end
    return pixels, ids


class Differences(NamedTuple):
    """How much embeddings of length 1 differ: the least cosine, and the largest difference of an entry."""

    cosine: float
    largest: float


@torch.no_grad()
def differences(model: Any, tensors: dict[str, Any], config: dict[str, Any]) -> Differences:
    """Compares the embeddings of a model of transformers with those of OpenCLIP's, in fp32 on fixed inputs.

    OpenCLIP's model is that of the state dict ``tensors`` and the OpenCLIP config.

    Raises:
        ModuleNotFoundError: OpenCLIP is not installed.
    """
    theirs = own_model({name: tensor.float() for name, tensor in clean(tensors).items()}, config)
    pixels, ids = fixed_inputs(model.config, config["model_cfg"]["text_cfg"].get("context_length"))
    dtype = model.dtype
    ours = model.float()(pixel_values=pixels, input_ids=ids)
    model.to(dtype)
    pairs = (
        (ours.image_embeds, theirs.encode_image(pixels, normalize=True)),
        (ours.text_embeds, theirs.encode_text(ids, normalize=True)),
    )
    return Differences(
        min((ours * theirs).sum(-1).min().item() for ours, theirs in pairs),
        max((ours - theirs).abs().max().item() for ours, theirs in pairs),
    )


def own_model(weights: dict[str, Tensor], config: dict[str, Any]) -> Any:
    """The model that OpenCLIP builds from the config, in evaluation mode."""
    import open_clip

    fields = {key: value for key, value in config["model_cfg"].items() if key != "custom_text"}
    fields["vision_cfg"] = fields["vision_cfg"] | (
        {"timm_model_pretrained": False} if fields["vision_cfg"].get("timm_model_name") else {}
    )
    custom = any(name.startswith("text.") for name in weights)
    model = (open_clip.CustomTextCLIP if custom else open_clip.CLIP)(**fields).eval()
    model.load_state_dict(weights)
    return model
