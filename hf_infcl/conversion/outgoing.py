"""Models of transformers as models of OpenCLIP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, ProcessorMixin

from .names import clip_rows, siglip_rows
from .names import to_open_clip as renamed
from .preprocessing import preprocess_config
from .tokenizing import check_length, cleaning, is_of_clip
from .towers import TIMM_TOWERS, mlp_ratio, refusal, square


def to_open_clip(
    model: Any,
    processor: ProcessorMixin | None,
    *,
    repository: str = ".",
    state_dict: Mapping[str, Tensor] | None = None,
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
    layers = model.config.text_config.num_hidden_layers, model.config.vision_config.num_hidden_layers
    rows = siglip_rows(*layers) if model.config.model_type == "siglip" else clip_rows("", *layers)
    tensors = model.state_dict() if state_dict is None else state_dict
    weights = {name: tensor.detach().cpu() for name, tensor in tensors.items() if not name.endswith("position_ids")}
    positions = "text_model.embeddings.position_embedding.weight"
    weights[positions] = weights[positions][: config["model_cfg"]["text_cfg"]["context_length"]].contiguous()
    return renamed(rows, weights), config


def open_clip_config(config: Any, processor: Any, *, repository: str = ".") -> dict[str, Any]:
    """The OpenCLIP config of a model of transformers, from its config and its processor; see `to_open_clip`."""
    kind = config.model_type
    if kind not in ("clip", "metaclip_2", "siglip"):
        raise refusal(f"it is of the type {kind}, of which OpenCLIP has no counterpart")
    fields = _siglip(config) if kind == "siglip" else _clip(config)
    check_length(processor.tokenizer, config.text_config.vocab_size, exact=False)
    # OpenCLIP cuts texts at this length.
    length = min(config.text_config.max_position_embeddings, processor.tokenizer.model_max_length)
    fields["text_cfg"]["context_length"] = length
    if kind != "clip" or not is_of_clip(processor.tokenizer):
        clean = cleaning(processor.tokenizer) or "whitespace"
        fields["text_cfg"] |= {"hf_tokenizer_name": repository, "tokenizer_kwargs": {"clean": clean}}
    preprocess = preprocess_config(processor.image_processor, square(config.vision_config.image_size, "image"))
    return {"model_cfg": fields, "preprocess_cfg": preprocess}


def _tower(config: PretrainedConfig) -> dict[str, Any]:
    """The fields that OpenCLIP's image towers and text towers have in common."""
    fields = {"width": config.hidden_size, "layers": config.num_hidden_layers}
    if config.intermediate_size != 4 * config.hidden_size:
        fields["mlp_ratio"] = mlp_ratio(config.intermediate_size, config.hidden_size)
    if config.layer_norm_eps != 1e-5:
        fields["norm_kwargs"] = {"eps": config.layer_norm_eps}
    if config.hidden_act in ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"):
        fields["act_kwargs"] = {"approximate": "tanh"}
    elif config.hidden_act not in ("gelu", "gelu_python", "quick_gelu"):
        raise refusal(f"its activation is {config.hidden_act}, which OpenCLIP's towers do not have")
    return fields


def _text(config: PretrainedConfig) -> dict[str, Any]:
    return _tower(config) | {"vocab_size": config.vocab_size, "heads": config.num_attention_heads}


def _clip(config: PretrainedConfig) -> dict[str, Any]:
    text, image = config.text_config, config.vision_config
    if (text.hidden_act == "quick_gelu") != (image.hidden_act == "quick_gelu"):
        raise refusal(
            f"its towers have {text.hidden_act} and {image.hidden_act}, and OpenCLIP has QuickGELU in both or in none"
        )
    fields = _text(text)
    # transformers takes the first eos_token_id, which for the last id is the largest one; so is 2 in CLIPModel.
    if config.model_type == "metaclip_2" or text.eos_token_id not in (2, text.vocab_size - 1):
        fields |= {"pool_type": "eos", "eos_id": text.eos_token_id}
    return {
        "embed_dim": config.projection_dim,
        "quick_gelu": text.hidden_act == "quick_gelu",
        "vision_cfg": {
            **_tower(image),
            "image_size": square(image.image_size, "image"),
            "patch_size": square(image.patch_size, "patch"),
            "head_width": image.hidden_size // image.num_attention_heads,
        },
        "text_cfg": fields,
    }


def _siglip(config: PretrainedConfig) -> dict[str, Any]:
    text, image = config.text_config, config.vision_config
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size", "image_size")
    sizes = {name: getattr(image, name) for name in names}
    acts = {name: tower["hidden_act"] for name, tower in TIMM_TOWERS.items() if sizes.items() <= tower.items()}
    if not acts or image.layer_norm_eps != 1e-6 or not getattr(image, "vision_use_head", True):
        sizes_by_name = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise refusal(f"OpenCLIP takes SigLIP's image towers from timm, which has none of {sizes_by_name}")
    if image.hidden_act not in acts.values():
        name, act = next(iter(acts.items()))
        raise refusal(
            f"its image tower has {image.hidden_act}, and timm's {name} {act}, so the embeddings would differ slightly "
            "(by 2e-8 of cosine with random weights). If you accept that, set "
            f"vision_config.hidden_act to {act!r} in config.json, which changes the model accordingly"
        )
    if text.hidden_act == "quick_gelu":
        raise refusal("its text tower has QuickGELU, which OpenCLIP would not apply to this image tower")
    return {
        "embed_dim": text.projection_size,
        "init_logit_bias": -10,  # creates the parameter
        "custom_text": True,
        "vision_cfg": {
            "image_size": image.image_size,
            "timm_model_name": next(name for name, act in acts.items() if act == image.hidden_act),
            "timm_model_pretrained": False,
            "timm_pool": "map",
            "timm_proj": "none",
        },
        "text_cfg": {**_text(text), "no_causal_mask": True, "proj_bias": True, "pool_type": "last"},
    }
