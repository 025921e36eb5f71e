"""What OpenCLIP and transformers call the sizes and functions of a model: tables that are read in both directions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import transformers

from .inputs import check_length, cleaning, is_of_clip, preprocess_config, refuse

# Fields of a tower in OpenCLIP: transformers' name and OpenCLIP's default.
Sizes = dict[str, tuple[str, Any]]
_TEXT: Sizes = {
    "width": ("hidden_size", 512),
    "layers": ("num_hidden_layers", 12),
    "mlp_ratio": ("intermediate_size", 4.0),  # of the width
    "heads": ("num_attention_heads", 8),
    "vocab_size": ("vocab_size", 49408),
    "context_length": ("max_position_embeddings", 77),
}
_IMAGE: Sizes = {
    "width": ("hidden_size", 768),
    "layers": ("num_hidden_layers", 12),
    "mlp_ratio": ("intermediate_size", 4.0),
    "head_width": ("num_attention_heads", 64),  # the width is the product of the two
    "image_size": ("image_size", 224),
    "patch_size": ("patch_size", 16),
}
_TANH = {"approximate": "tanh"}
_ACTIVATIONS = {  # transformers' names: OpenCLIP's act_kwargs
    **dict.fromkeys(("gelu", "gelu_python", "quick_gelu")),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), _TANH),
}
# Fields that change what a tower computes, all of which are off in transformers' towers.
_OFF = set(
    """
    ls_init_value attentional_pool no_ln_pre final_ln_after_pool qk_norm scaled_cosine_attn scale_heads scale_attn_inner
    scale_attn scale_fc embed_cls output_tokens
    """.split()
)
_ONLY = {"pos_embed_type": "learnable", "block_type": "default"}
# Others that are read, or that do not change what a tower computes outside of OpenCLIP's training.
_READ = {*_OFF, *_ONLY, *_TEXT, *_IMAGE} | set(
    """
    pool_type act_kwargs norm_kwargs no_causal_mask proj_bias proj_type eos_id hf_tokenizer_name tokenizer_mode
    tokenizer_kwargs patch_dropout timm_model_name timm_pool timm_model_pretrained timm_proj timm_proj_bias timm_drop
    timm_drop_path attn_pooler_queries attn_pooler_heads hf_model_name hf_model_pretrained hf_proj_type hf_pooler_type
    pad_id
    """.split()
)
# Of SigLIP's image towers in timm: width, layers, heads and width of the hidden layer, and the sizes of images by those
# of patches.
_TIMM: dict[str, tuple[tuple[int, ...], dict[int, tuple[int, ...]]]] = {
    "base": ((768, 12, 12, 3072), {16: (224, 256, 384, 512), 32: (256,)}),
    "large": ((1024, 24, 16, 4096), {16: (256, 384, 512)}),
    "so400m": ((1152, 27, 16, 4304), {14: (224, 378, 384), 16: (256, 384, 512)}),
    "giantopt": ((1536, 40, 16, 6144), {16: (256, 384)}),
}
_TIMM_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# Those with the tanh approximation of GELU; the rest have the exact GELU.
_TIMM_TANH = re.compile("vit_(giantopt_.*|so400m_patch16_.*|base_patch32_siglip_256|large_patch16_siglip_512)")


def timm_tower(name: str, sizes: Sequence[int], patch: int, image: int) -> dict[str, Any]:
    """The vision config of an image tower in timm (1.0.31), where the name decides about the activation as well."""
    act = "gelu_pytorch_tanh" if _TIMM_TANH.fullmatch(name) else "gelu"
    of_name = {"patch_size": patch, "image_size": image, "hidden_act": act, "layer_norm_eps": 1e-6}
    return dict(zip(_TIMM_SIZES, sizes, strict=True)) | of_name


TIMM_TOWERS = {
    name: timm_tower(name, sizes, patch, image)
    for size, (sizes, patches) in _TIMM.items()
    for patch, images in patches.items()
    for image in images
    for name in [f"vit_{size}_patch{patch}_siglip_{image}"]
}


def mlp_ratio(hidden: int, width: int) -> float:
    """A ratio for which int(width · ratio) is the width of the hidden layer, as OpenCLIP and timm compute it."""
    ratio = hidden / width
    while int(width * ratio) < hidden:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def _with_squares(sizes: dict[str, Any]) -> dict[str, Any]:
    """The sizes of a tower, with one number for the edges of images and patches, if there are any."""
    for what in ("image", "patch"):
        edges = sizes.get(f"{what}_size")
        if isinstance(edges, (list, tuple)):
            refuse((len(set(edges)) > 1, f"its {what} of {tuple(edges)} pixels is not square"))
            sizes[f"{what}_size"] = int(edges[0])
    return sizes


# ---- From OpenCLIP ----


def transformers_config(config: dict[str, Any]) -> Any:
    """The config of transformers for an OpenCLIP config; raises ValueError if transformers has no such model."""
    fields = config.get("model_cfg", config)
    if missing := [key for key in ("embed_dim", "vision_cfg", "text_cfg") if key not in fields]:
        raise ValueError(f"The config has no {' and no '.join(missing)}, so it is no model_cfg of OpenCLIP.")
    image, text = fields["vision_cfg"], fields["text_cfg"]
    timm, of_hf, resnet = image.get("timm_model_name"), text.get("hf_model_name"), image.get("layers")
    kind = {"eva": " (an EVA)", "con": " (a ConvNeXt)"}.get((timm or "")[:3], "")
    has_not, timm_has = "which transformers does not have", "and of timm's towers transformers has those of SigLIP"
    refuse(
        ("multimodal_cfg" in fields, "it is a CoCa, whose captioning decoder transformers does not have"),
        (of_hf, f"its text tower is {of_hf} of transformers under OpenCLIP's own pooling and projection"),
        (isinstance(resnet, (list, tuple)), f"its image tower is CLIP's modified ResNet, {has_not}"),
        (timm and timm not in TIMM_TOWERS, f"its image tower is timm's {timm}{kind}, {timm_has}"),
    )
    for tower, given in (("image tower", image), ("text tower", text)):
        for key, value in given.items():
            other = (key in _OFF and value) or (key in _ONLY and value not in (None, _ONLY[key]))
            has = f"its {tower} has {key}={value!r}"
            refuse(
                (other, f"{has}, which transformers' towers do not have"),
                (key not in _READ, f"{has}, which is not known"),
            )
    return (_siglip_config if timm else _clip_config)(fields, image, text)


def _tower_config(fields: dict[str, Any], table: Sizes, quick_gelu: bool) -> dict[str, Any]:
    """The config of a tower that is not timm's."""
    sizes = _with_squares({ours: fields.get(theirs, default) for theirs, (ours, default) in table.items()})
    sizes["intermediate_size"] = int(sizes["hidden_size"] * sizes["intermediate_size"])
    if table is _IMAGE:
        sizes["num_attention_heads"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    act, norm = fields.get("act_kwargs") or {}, {"eps": 1e-5, **(fields.get("norm_kwargs") or {})}
    refuse(
        (quick_gelu and act, "it has quick_gelu and act_kwargs, with which OpenCLIP does not load it either"),
        (act not in ({}, {"approximate": "none"}, _TANH), f"its activation has act_kwargs={act}"),
        (norm.keys() != {"eps"}, f"its layer norms have norm_kwargs={norm}, of which transformers has eps only"),
    )
    name = "quick_gelu" if quick_gelu else "gelu_pytorch_tanh" if act == _TANH else "gelu"
    return sizes | {"layer_norm_eps": norm["eps"], "hidden_act": name}


def _clip_config(fields: dict[str, Any], image: dict[str, Any], text: dict[str, Any]) -> Any:
    of_image, pool, end = image.get("pool_type", "tok"), text.get("pool_type", "argmax"), text.get("eos_id", 2)
    unlike = text.get("no_causal_mask") or pool not in ("argmax", "eos")
    matrix = not text.get("proj_bias") and text.get("proj_type", "linear") == "linear"
    refuse(
        (of_image != "tok", f"its image tower pools by {of_image!r}, not by the class token"),
        (unlike, f"its text tower is not causal or pools by {pool!r}, not at the end of the text"),
        (not matrix, "its text projection is not one matrix without a bias"),
    )
    # The ids with which transformers' text tower takes the token that OpenCLIP's takes: of XLM-V; of CLIP, whose end is
    # the largest id; or 2, by which CLIPModel means the largest id, and MetaClip2Model, with equal names, means 2.
    of_clip = text.get("vocab_size", 49408) == 49408
    bos, pad, eos = (0, 1, end) if pool == "eos" else (49406, 49407, 49407) if of_clip else (0, 0, 2)
    quick, size = bool(fields.get("quick_gelu")), {"projection_dim": fields["embed_dim"]}
    ids = {"bos_token_id": bos, "pad_token_id": pad, "eos_token_id": eos}
    config_class: Any = transformers.MetaClip2Config if pool == "eos" and end == 2 else transformers.CLIPConfig
    text_config, vision_config = _tower_config(text, _TEXT, quick), _tower_config(image, _IMAGE, quick)
    return config_class(text_config=text_config | ids | size, vision_config=vision_config | size, **size)


def _siglip_config(fields: dict[str, Any], image: dict[str, Any], text: dict[str, Any]) -> Any:
    name = image["timm_model_name"]
    tower, side = TIMM_TOWERS[name], _with_squares(dict(image)).get("image_size")
    unlike, last = not text.get("no_causal_mask"), text.get("pool_type") == "last"
    ends = image.get("timm_pool") == "map" and image.get("timm_proj") == "none"
    of_timm = tower["image_size"]
    refuse(
        (not ends, f"its image tower {name} does not end in SigLIP's attention pooling alone"),
        (unlike or not last, "its text tower is causal, or does not take the last position, as SigLIP's does"),
        (side not in (None, of_timm), f"its config has image_size={side}, and timm's {name} is of {of_timm} pixels"),
    )
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1}
    text_config = _tower_config(text, _TEXT, bool(fields.get("quick_gelu"))) | ids
    config_class: Any = transformers.SiglipConfig
    text_config["projection_size"] = fields["embed_dim"]
    return config_class(text_config=text_config, vision_config=dict(tower))


# ---- To OpenCLIP ----


def open_clip_config(config: Any, processor: Any, *, repository: str = ".") -> dict[str, Any]:
    """The OpenCLIP config of a model of transformers, from its config and its processor; see `to_open_clip`."""
    kind = config.model_type
    known = {"clip": _clip, "metaclip_2": _clip, "siglip": _siglip}
    refuse((kind not in known, f"it is of the type {kind}, of which OpenCLIP has no counterpart"))
    fields, tokenizer, text = known[kind](config), processor.tokenizer, config.text_config
    check_length(tokenizer, text.vocab_size, exact=False)
    # OpenCLIP cuts texts at this length.
    fields["text_cfg"]["context_length"] = min(text.max_position_embeddings, tokenizer.model_max_length)
    if kind != "clip" or not is_of_clip(tokenizer):
        clean = cleaning(tokenizer) or "whitespace"
        fields["text_cfg"] |= {"hf_tokenizer_name": repository, "tokenizer_kwargs": {"clean": clean}}
    size = fields["vision_cfg"]["image_size"]
    return {"model_cfg": fields, "preprocess_cfg": preprocess_config(processor.image_processor, size)}


def _tower(config: Any, table: Sizes) -> dict[str, Any]:
    """The fields of a tower in OpenCLIP that is not timm's."""
    act, eps = config.hidden_act, config.layer_norm_eps
    refuse((act not in _ACTIVATIONS, f"its activation is {act}, which OpenCLIP's towers do not have"))
    fields = _with_squares({theirs: getattr(config, ours) for theirs, (ours, _) in table.items()})
    fields["mlp_ratio"] = mlp_ratio(config.intermediate_size, config.hidden_size)
    if table is _IMAGE:
        fields["head_width"] = config.hidden_size // config.num_attention_heads
    if act := _ACTIVATIONS[act]:
        fields["act_kwargs"] = act
    return fields | ({"norm_kwargs": {"eps": eps}} if eps != 1e-5 else {})


def _clip(config: Any) -> dict[str, Any]:
    text, image = config.text_config, config.vision_config
    quick = {tower.hidden_act == "quick_gelu" for tower in (text, image)}
    acts = f"{text.hidden_act} and {image.hidden_act}"
    refuse((len(quick) > 1, f"its towers have {acts}, and OpenCLIP has QuickGELU in both or in none"))
    fields = _tower(text, _TEXT)
    # transformers takes the first eos_token_id, which for the last id is the largest one; so is 2 in CLIPModel.
    if config.model_type == "metaclip_2" or text.eos_token_id not in (2, text.vocab_size - 1):
        fields |= {"pool_type": "eos", "eos_id": text.eos_token_id}
    towers = {"vision_cfg": _tower(image, _IMAGE), "text_cfg": fields}
    return {"embed_dim": config.projection_dim, "quick_gelu": quick == {True}, **towers}


def _siglip(config: Any) -> dict[str, Any]:
    text, image = config.text_config, config.vision_config
    sizes = {name: getattr(image, name) for name in (*_TIMM_SIZES, "patch_size", "image_size")}
    name = next((name for name, tower in TIMM_TOWERS.items() if sizes.items() <= tower.items()), None)
    unlike = name is None or image.layer_norm_eps != 1e-6 or not getattr(image, "vision_use_head", True)
    none_of = ", ".join(f"{name} {size}" for name, size in sizes.items())
    refuse((unlike, f"OpenCLIP takes SigLIP's image towers from timm, which has none of {none_of}"))
    act = TIMM_TOWERS[str(name)]["hidden_act"]
    refuse(
        (
            image.hidden_act != act,
            f"its image tower has {image.hidden_act}, and timm's {name} {act}, so the embeddings would differ slightly "
            "(by 2e-8 of cosine with random weights). If you accept that, set "
            f"vision_config.hidden_act to {act!r} in config.json, which changes the model accordingly",
        ),
        (text.hidden_act == "quick_gelu", "its text tower has QuickGELU, which OpenCLIP would not apply to it"),
    )
    tower = {"image_size": image.image_size, "timm_model_name": name, "timm_model_pretrained": False}
    return {
        "embed_dim": text.projection_size,
        "init_logit_bias": -10,  # creates the parameter
        "custom_text": True,
        "vision_cfg": {**tower, "timm_pool": "map", "timm_proj": "none"},
        "text_cfg": {**_tower(text, _TEXT), "no_causal_mask": True, "proj_bias": True, "pool_type": "last"},
    }
