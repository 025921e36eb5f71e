"""Models of OpenCLIP as models of transformers and back, by a table of the names of their tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from ..shards.values import listed
from .inputs import refuse
from .towers import open_clip_config, transformers_config

# OpenCLIP's names and transformers'. "$" is the prefix of the text tower, which is "text." for SigLIP and custom_text;
# "#" is the number of a layer, and "*" weight and bias. Several names are tensors that the other library has joined.
_QKV = "self_attn.q_proj.* self_attn.k_proj.* self_attn.v_proj.*"
_BLOCK = {
    "ln_1.*": "layer_norm1.*",
    "attn.in_proj_*": _QKV,
    "attn.out_proj.*": "self_attn.out_proj.*",
    "ln_2.*": "layer_norm2.*",
    "mlp.c_fc.*": "mlp.fc1.*",
    "mlp.c_proj.*": "mlp.fc2.*",
}
_TIMM_BLOCK = {
    "norm1.*": "layer_norm1.*",
    "attn.qkv.*": _QKV,
    "attn.proj.*": "self_attn.out_proj.*",
    "norm2.*": "layer_norm2.*",
    "mlp.fc1.*": "mlp.fc1.*",
    "mlp.fc2.*": "mlp.fc2.*",
}


def _of(theirs: str, ours: str, names: Mapping[str, str]) -> dict[str, str]:
    """The names in a part of a model."""
    return {
        " ".join(theirs + name for name in one.split()): " ".join(ours + name for name in other.split())
        for one, other in names.items()
    }


_TEXT = {
    "logit_scale": "logit_scale",
    "$token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "$positional_embedding": "text_model.embeddings.position_embedding.weight",
    "$ln_final.*": "text_model.final_layer_norm.*",
    **_of("$transformer.resblocks.#.", "text_model.encoder.layers.#.", _BLOCK),
}
_CLIP = _TEXT | {
    "$text_projection": "text_projection.weight",
    "visual.proj": "visual_projection.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.*": "vision_model.pre_layrnorm.*",  # transformers' spelling
    "visual.ln_post.*": "vision_model.post_layernorm.*",
    **_of("visual.transformer.resblocks.#.", "vision_model.encoder.layers.#.", _BLOCK),
}
_POOL = {
    "q.* kv.*": "attention.in_proj_*",
    "proj.*": "attention.out_proj.*",
    "latent": "probe",
    "norm.*": "layernorm.*",
    "mlp.fc1.*": "mlp.fc1.*",
    "mlp.fc2.*": "mlp.fc2.*",
}
_SIGLIP = _TEXT | {  # whose image tower in OpenCLIP is one of timm
    "logit_bias": "logit_bias",
    "$text_projection.*": "text_model.head.*",
    "visual.trunk.patch_embed.proj.*": "vision_model.embeddings.patch_embedding.*",
    "visual.trunk.pos_embed": "vision_model.embeddings.position_embedding.weight",
    "visual.trunk.norm.*": "vision_model.post_layernorm.*",
    **_of("visual.trunk.blocks.#.", "vision_model.encoder.layers.#.", _TIMM_BLOCK),
    **_of("visual.trunk.attn_pool.", "vision_model.head.", _POOL),
}
Change = Callable[[Tensor], Tensor]
# By OpenCLIP's name, what makes of its tensor that of transformers, and of that its own again.
_CHANGES: dict[str, tuple[Change, Change]] = {
    "visual.proj": (torch.t, torch.t),
    "$text_projection": (torch.t, torch.t),
    "visual.trunk.pos_embed": (lambda tensor: tensor.squeeze(0), lambda tensor: tensor.unsqueeze(0)),
}
# What is no weight: buffers, and sizes that OpenAI's own files hold.
_NO_WEIGHTS = {"input_resolution", "context_length", "vocab_size", "attn_mask", "text.attn_mask"}
_LARGEST_SCALE = 1000.0


def from_open_clip(tensors: dict[str, Any], config: dict[str, Any]) -> tuple[Any, list[str]]:
    """A model of OpenCLIP as a model of transformers with equal embeddings, scale and bias.

    Args:
        tensors: the state dict of the model, or a checkpoint of OpenCLIP's training script that holds one.
        config: an OpenCLIP config, {"model_cfg": ..., "preprocess_cfg": ...}, or its `model_cfg` alone.

    Returns:
        A CLIPModel, MetaClip2Model or SiglipModel in the dtype of the weights, and sentences about what differs in a
        training.

    Raises:
        ValueError: transformers has no such model, or the tensors are not those of the config.
    """
    fields, ours, weights = config.get("model_cfg", config), transformers_config(config), clean(tensors)
    siglip, biased = ours.model_type == "siglip", "logit_bias" in weights
    refuse(
        (siglip and not biased, "it is a SigLIP without a logit_bias, which transformers' SiglipModel always has"),
        (biased and not siglip, "it is a CLIP with a logit_bias, which transformers' CLIPModel does not have"),
    )
    notes = _complete_projection(fields, weights) if siglip else []
    if dropped := fields["vision_cfg"].get("patch_dropout"):
        notes.append(f"patch_dropout={dropped} is not kept: give the training its own (--patch_dropout).")
    prefix = "text." if "text.positional_embedding" in weights else ""
    model_class = getattr(transformers, type(ours).__name__.replace("Config", "Model"))
    return _filled(model_class, ours, _renamed(_rows(ours, prefix), weights)), notes


def to_open_clip(
    model: Any, processor: Any, *, repository: str = ".", state_dict: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A model of transformers as a model of OpenCLIP with equal embeddings, scale and bias.

    Texts are cut at the ``model_max_length`` of the tokenizer, as they are here: positions behind it are left out.

    Args:
        model: a CLIPModel, MetaClip2Model or SiglipModel (which is also the class of SigLIP 2 at a fixed resolution).
        processor: its processor.
        repository: the Hub repository in which OpenCLIP is to find the tokenizer, unless that is OpenAI's, which
            OpenCLIP has built in. OpenCLIP reads local folders without it.
        state_dict: the weights; by default those of the model.

    Returns:
        The state dict and the OpenCLIP config, {"model_cfg": ..., "preprocess_cfg": ...}.

    Raises:
        ValueError: OpenCLIP has no such model, or would prepare its inputs otherwise.
    """
    config = open_clip_config(model.config, processor, repository=repository)
    tensors = model.state_dict() if state_dict is None else state_dict
    weights = {name: tensor.detach().cpu() for name, tensor in tensors.items() if not name.endswith("position_ids")}
    positions = _TEXT["$positional_embedding"]
    weights[positions] = weights[positions][: config["model_cfg"]["text_cfg"]["context_length"]].contiguous()
    prefix = "text." if model.config.model_type == "siglip" else ""
    return _renamed(((ours, theirs, back) for theirs, ours, _, back in _rows(model.config, prefix)), weights), config


def _rows(config: Any, prefix: str) -> Iterator[tuple[list[str], list[str], Change, Change]]:
    """OpenCLIP's names of tensors, transformers' names of the same, and the change to each of them."""
    siglip = config.model_type == "siglip"
    layers = {"t": config.text_config.num_hidden_layers, "v": config.vision_config.num_hidden_layers}
    scalars: tuple[Change, Change] = (lambda one: one.reshape((1,) if siglip else ()), lambda one: one.reshape(()))
    for pair in (_SIGLIP if siglip else _CLIP).items():
        changes = scalars if pair[0].startswith("logit") else _CHANGES.get(pair[0], (_same, _same))
        for layer in map(str, range(layers[pair[1][0]] if "#" in pair[0] else 1)):
            for kind in ("weight", "bias") if "*" in pair[0] else ("",):
                names = [one.replace("$", prefix).replace("#", layer).replace("*", kind).split() for one in pair]
                yield names[0], names[1], *changes


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _renamed(rows: Iterable[Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the second names of the rows; raises ValueError if one is missing, or one is left over."""
    renamed: dict[str, Tensor] = {}
    rows = list(rows)
    known = {name for row in rows for name in row[0]}
    for what, wrong in (
        ("lacks tensors that its config implies", known - tensors.keys()),
        ("has tensors that its config does not imply", tensors.keys() - known),
    ):
        if wrong:
            raise ValueError(
                f"The checkpoint {what}: {listed(sorted(wrong), 5)}. The config is of another architecture, or the "
                "weights are incomplete; take both from one place."
            )
    for sources, targets, change, *_ in rows:
        whole = change(torch.cat([tensors[name] for name in sources]) if sources[1:] else tensors[sources[0]])
        # Queries, keys and values are a third of it each, and the last of two parts holds keys and values.
        parts = whole.tensor_split([len(whole) // 3 * n for n in range(1, len(targets))]) if targets[1:] else [whole]
        # Copies, because files of safetensors must not hold two views of one storage.
        renamed |= zip(targets, [part.clone(memory_format=torch.contiguous_format) for part in parts], strict=True)
    return renamed


def clean(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The weights under the names that OpenCLIP's model has, without what DDP and torch.compile add to them."""
    tensors = tensors.get("state_dict", tensors)
    for prefix in ("module.", "_orig_mod."):
        if tensors and all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    weights = {name: value for name, value in tensors.items() if name not in _NO_WEIGHTS}
    no_tensors = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if no_tensors or not weights:
        but = f", but values such as {no_tensors[0]!r}" if no_tensors else ""
        raise ValueError(f"The file holds no state dict of a model{but}. OpenCLIP's training saves one as state_dict.")
    if "logit_scale" not in weights:
        raise ValueError(
            "The checkpoint has no logit_scale, without which it is no dual encoder. Take the file that OpenCLIP's "
            "training or its Hub repository holds, not one tower of it."
        )
    scale = weights["logit_scale"].float().reshape(-1)
    if len(scale) != 1 or not 0 < scale.exp().item() < _LARGEST_SCALE:
        raise ValueError(
            f"logit_scale is {scale.tolist()}, and the logarithm of the scale was expected, such as "
            f"{math.log(100):.4f} for a scale of 100. If it was stored without the logarithm, store its logarithm."
        )
    return weights


def _complete_projection(fields: dict[str, Any], weights: dict[str, Tensor]) -> list[str]:
    """Adds what transformers' text projection has and the checkpoint's has not, without an effect on embeddings."""
    name, text = "text.text_projection", fields["text_cfg"]
    if text.get("proj_type", "linear") == "none":
        weights[f"{name}.weight"] = torch.eye(fields["embed_dim"]).to(weights["logit_scale"])
        what = "The text tower has no projection, and gets one that is the identity"
    elif not text.get("proj_bias") and name in weights:
        weights[f"{name}.weight"] = weights.pop(name).T
        what = "The text projection has no bias, and gets one of zeros"
    else:
        return []
    weights[f"{name}.bias"] = torch.zeros(fields["embed_dim"]).to(weights["logit_scale"])
    return [f"{what}, which a training will change."]


def _filled(model_class: Any, config: Any, tensors: dict[str, Tensor]) -> Any:
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in model_class(config).state_dict().items()}
    wrong = [
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if wrong:
        raise ValueError(
            f"The weights have other shapes than the config implies: {'; '.join(wrong[:3])}. OpenCLIP resizes position "
            "embeddings when it loads; save the model with it again, or correct the config."
        )
    dtypes = {tensor.dtype for tensor in tensors.values()}
    model = model_class(config).to(dtypes.pop() if len(dtypes) == 1 else torch.float32)
    model.load_state_dict(tensors)
    return model.eval()
