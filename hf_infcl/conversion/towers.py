"""What the two libraries call the sizes and functions of a tower, and what only one of them has."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

INSTEAD = (
    "Use it with OpenCLIP itself, or start from a model whose towers transformers has: a ViT of CLIP, MetaCLIP, SigLIP "
    "or SigLIP 2."
)


def refusal(what: str) -> ValueError:
    """The error that says why a model has no counterpart, and what can be done."""
    return ValueError(f"The model cannot be converted: {what}. {INSTEAD}")


# Fields of a tower in OpenCLIP that change what it computes, all of which are off in transformers' towers.
OFF = set(
    """
    ls_init_value attentional_pool no_ln_pre final_ln_after_pool qk_norm scaled_cosine_attn scale_heads scale_attn_inner
    scale_attn scale_fc embed_cls output_tokens
    """.split()
)
# Fields that are read, or that do not change what a tower computes outside of OpenCLIP's training.
READ = set(
    """
    layers width head_width heads mlp_ratio patch_size image_size context_length vocab_size pool_type act_kwargs
    norm_kwargs no_causal_mask proj_bias proj_type eos_id hf_tokenizer_name tokenizer_mode tokenizer_kwargs
    patch_dropout timm_model_name timm_pool timm_model_pretrained timm_proj timm_proj_bias timm_drop timm_drop_path
    attn_pooler_queries attn_pooler_heads hf_model_name hf_model_pretrained hf_proj_type hf_pooler_type pad_id
    pos_embed_type block_type
    """.split()
)


def refuse_unknown_fields(tower: str, fields: dict[str, object]) -> None:
    """Raises ValueError for a field of a tower that transformers' towers do not have."""
    for key, value in fields.items():
        other = {"pos_embed_type": "learnable", "block_type": "default"}.get(key)
        if (key in OFF and value) or (other and value not in (None, other)):
            raise refusal(f"its {tower} has {key}={value!r}, which transformers' towers do not have")
        if key not in OFF | READ:
            raise refusal(f"its {tower} has the field {key}={value!r}, which is not known")


def activation(quick_gelu: bool, fields: dict[str, object]) -> str:
    """The activation of a tower that is not timm's, by transformers' name."""
    options = fields.get("act_kwargs") or {}
    if quick_gelu and options:
        raise refusal("it has quick_gelu and act_kwargs, with which OpenCLIP does not load it either")
    if options in ({}, {"approximate": "none"}):
        return "quick_gelu" if quick_gelu else "gelu"
    if options != {"approximate": "tanh"}:
        raise refusal(f"its activation has act_kwargs={options}")
    return "gelu_pytorch_tanh"


def norm_eps(fields: dict[str, Any]) -> float:
    """The epsilon of the layer norms of a tower that is not timm's."""
    options = dict(fields.get("norm_kwargs") or {})
    eps = options.pop("eps", 1e-5)
    if options:
        raise refusal(f"its layer norms have norm_kwargs={fields['norm_kwargs']}, of which transformers has eps only")
    return eps


def mlp_ratio(hidden: int, width: int) -> float:
    """A ratio for which int(width · ratio) is the width of the hidden layer, as OpenCLIP and timm compute it."""
    ratio = hidden / width
    while int(width * ratio) < hidden:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def square(size: Any, what: str) -> int:
    """The edge of a square image or patch."""
    if isinstance(size, (list, tuple)):
        if len(set(size)) > 1:
            raise refusal(f"its {what} of {tuple(size)} pixels is not square")
        return int(size[0])
    return int(size)


_SIZES = {  # width, layers, heads and width of the hidden layer
    "base": (768, 12, 12, 3072),
    "large": (1024, 24, 16, 4096),
    "so400m": (1152, 27, 16, 4304),
    "giantopt": (1536, 40, 16, 6144),
}
_IMAGES = {
    ("base", 16): (224, 256, 384, 512),
    ("base", 32): (256,),
    ("large", 16): (256, 384, 512),
    ("so400m", 14): (224, 378, 384),
    ("so400m", 16): (256, 384, 512),
    ("giantopt", 16): (256, 384),
}
# Towers with the tanh approximation of GELU; the rest have the exact GELU.
_TANH = re.compile("vit_(giantopt_.*|so400m_patch16_.*|base_patch32_siglip_256|large_patch16_siglip_512)")


def timm_tower(name: str, sizes: Sequence[int], patch: int, image: int) -> dict[str, Any]:
    """The vision config of an image tower in timm (1.0.31), where the name decides about the activation as well."""
    width, layers, heads, hidden = sizes
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": hidden,
        "patch_size": patch,
        "image_size": image,
        "hidden_act": "gelu_pytorch_tanh" if _TANH.fullmatch(name) else "gelu",
        "layer_norm_eps": 1e-6,
    }


TIMM_TOWERS = {
    name: timm_tower(name, _SIZES[size], patch, image)
    for (size, patch), images in _IMAGES.items()
    for image in images
    for name in [f"vit_{size}_patch{patch}_siglip_{image}"]
}
