"""Models of OpenCLIP as models of transformers."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from .names import clip_rows, siglip_rows, to_transformers
from .towers import TIMM_TOWERS, activation, norm_eps, refusal, refuse_unknown_fields, square

# What is no weight: buffers, and sizes that OpenAI's own files hold.
NO_WEIGHTS = {"input_resolution", "context_length", "vocab_size", "attn_mask", "text.attn_mask"}
LARGEST_SCALE = 1000.0
_CLASSES = {
    "clip": transformers.CLIPModel,
    "metaclip_2": transformers.MetaClip2Model,
    "siglip": transformers.SiglipModel,
}


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
    fields = config.get("model_cfg", config)
    model_config = transformers_config(config)
    weights = clean(tensors)
    layers = model_config.text_config.num_hidden_layers, model_config.vision_config.num_hidden_layers
    notes: list[str] = []
    if model_config.model_type == "siglip":
        if "logit_bias" not in weights:
            raise refusal("it has towers of SigLIP without a logit_bias, which transformers' SiglipModel always has")
        notes += _complete_projection(fields, weights)
        rows = siglip_rows(*layers)
    else:
        if "logit_bias" in weights:
            raise refusal("it has towers of CLIP with a logit_bias, which transformers' CLIPModel does not have")
        rows = clip_rows("text." if "text.positional_embedding" in weights else "", *layers)  # with custom_text
    if dropped := fields["vision_cfg"].get("patch_dropout"):
        notes.append(f"patch_dropout={dropped} is not kept: give the training its own (--patch_dropout).")
    return _filled(_CLASSES[model_config.model_type], model_config, to_transformers(rows, weights)), notes


def transformers_config(config: dict[str, Any]) -> Any:
    """The config of the model that `from_open_clip` returns; raises ValueError if transformers has no such model."""
    fields = config.get("model_cfg", config)
    _refuse_others(fields)
    image, text = fields["vision_cfg"], fields["text_cfg"]
    return (_siglip_config if image.get("timm_model_name") else _clip_config)(fields, image, text)


def clean(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The weights under the names that OpenCLIP's model has, without what DDP and torch.compile add to them."""
    tensors = tensors.get("state_dict", tensors)
    for prefix in ("module.", "_orig_mod."):
        if tensors and all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    weights = {name: value for name, value in tensors.items() if name not in NO_WEIGHTS}
    no_tensors = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if no_tensors or not weights:
        raise ValueError(
            "The file holds no state dict of a model"
            + (f", but values such as {no_tensors[0]!r}." if no_tensors else ".")
            + " OpenCLIP's training saves one as state_dict."
        )
    _check_scale(weights.get("logit_scale"))
    return weights


def _check_scale(scale: Tensor | None) -> None:
    if scale is None:
        raise ValueError(
            "The checkpoint has no logit_scale, without which it is no dual encoder. Take the file that OpenCLIP's "
            "training or its Hub repository holds, not one tower of it."
        )
    value = scale.float().reshape(-1)
    if len(value) != 1 or not 0 < value.exp().item() < LARGEST_SCALE:
        raise ValueError(
            f"logit_scale is {value.tolist()}, and the logarithm of the scale was expected, such as "
            f"{math.log(100):.4f} for a scale of 100. If it was stored without the logarithm, store its logarithm."
        )


def _refuse_others(fields: dict[str, Any]) -> None:
    missing = [key for key in ("embed_dim", "vision_cfg", "text_cfg") if key not in fields]
    if missing:
        raise ValueError(f"The config has no {' and no '.join(missing)}, so it is no model_cfg of OpenCLIP.")
    image, text = fields["vision_cfg"], fields["text_cfg"]
    if "multimodal_cfg" in fields:
        raise refusal("it is a CoCa, whose captioning decoder transformers does not have")
    if text.get("hf_model_name"):
        raise refusal(
            f"its text tower is {text['hf_model_name']} of transformers under OpenCLIP's own pooling and projection"
        )
    if isinstance(image.get("layers"), (list, tuple)):
        raise refusal("its image tower is CLIP's modified ResNet, which transformers does not have")
    name = image.get("timm_model_name")
    if name and name not in TIMM_TOWERS:
        kinds = {"eva": "an EVA", "convnext": "a ConvNeXt"}
        kind = next((f" ({words})" for start, words in kinds.items() if name.startswith(start)), "")
        raise refusal(f"its image tower is timm's {name}{kind}, and of timm's towers transformers has those of SigLIP")
    refuse_unknown_fields("image tower", image)
    refuse_unknown_fields("text tower", text)


def _tower_config(fields: dict[str, Any], width: int, heads: int, quick_gelu: bool) -> dict[str, Any]:
    """The fields that the configs of both towers have, but for those of timm."""
    return {
        "hidden_size": width,
        "intermediate_size": int(width * fields.get("mlp_ratio", 4.0)),
        "num_hidden_layers": fields.get("layers", 12),
        "num_attention_heads": heads,
        "hidden_act": activation(quick_gelu, fields),
        "layer_norm_eps": norm_eps(fields),
    }


def _text_config(fields: dict[str, Any], quick_gelu: bool) -> dict[str, Any]:
    return _tower_config(fields, fields.get("width", 512), fields.get("heads", 8), quick_gelu) | {
        "vocab_size": fields.get("vocab_size", 49408),
        "max_position_embeddings": fields.get("context_length", 77),
    }


def _image_config(fields: dict[str, Any], quick_gelu: bool) -> dict[str, Any]:
    width = fields.get("width", 768)
    return _tower_config(fields, width, width // fields.get("head_width", 64), quick_gelu) | {
        "image_size": square(fields.get("image_size", 224), "image"),
        "patch_size": square(fields.get("patch_size", 16), "patch"),
    }


def _special_ids(pool: str, text: dict[str, Any]) -> dict[str, int]:
    """The ids with which transformers' text tower takes the token that OpenCLIP's takes."""
    if pool == "eos":
        return {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": text.get("eos_id", 2)}  # of XLM-V
    if text.get("vocab_size", 49408) == 49408:
        return {"bos_token_id": 49406, "pad_token_id": 49407, "eos_token_id": 49407}  # the largest id
    return {"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}  # by which CLIPModel means the largest id


def _clip_config(fields: dict[str, object], image: dict[str, object], text: dict[str, object]) -> Any:
    pool = text.get("pool_type", "argmax")
    if image.get("pool_type", "tok") != "tok":
        raise refusal(f"its image tower pools by {image['pool_type']!r}, not by the class token")
    if text.get("no_causal_mask") or pool not in ("argmax", "eos"):
        raise refusal(f"its text tower is not causal or pools by {pool!r}, not at the end of the text")
    if text.get("proj_bias") or text.get("proj_type", "linear") != "linear":
        raise refusal("its text projection is not one matrix without a bias")
    quick = bool(fields.get("quick_gelu"))
    # CLIPModel takes eos_token_id 2 for the largest id. MetaClip2Model does not, and has tensors of the same names.
    config_class: Any = transformers.CLIPConfig
    if pool == "eos" and text.get("eos_id", 2) == 2:
        config_class = transformers.MetaClip2Config
    size = {"projection_dim": fields["embed_dim"]}
    return config_class(
        text_config=_text_config(text, quick) | _special_ids(pool, text) | size,
        vision_config=_image_config(image, quick) | size,
        **size,
    )


def _siglip_config(fields: dict[str, Any], image: dict[str, Any], text: dict[str, Any]) -> Any:
    name = image["timm_model_name"]
    tower = TIMM_TOWERS[name]
    if image.get("timm_pool") != "map" or image.get("timm_proj") != "none":
        raise refusal(f"its image tower {name} does not end in SigLIP's attention pooling alone")
    if not text.get("no_causal_mask") or text.get("pool_type") != "last":
        raise refusal("its text tower is causal, or does not take the last position, as SigLIP's does")
    side = tower["image_size"]
    if square(image.get("image_size", side), "image") != side:
        raise refusal(f"its config has image_size={image['image_size']}, and timm's {name} is of {side} pixels")
    config_class: Any = transformers.SiglipConfig
    return config_class(
        text_config={
            **_text_config(text, bool(fields.get("quick_gelu"))),
            "projection_size": fields["embed_dim"],
            **{"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1},
        },
        vision_config=dict(tower),
    )


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


def _filled(model_class: Any, config: PretrainedConfig, tensors: dict[str, Tensor]) -> Any:
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
