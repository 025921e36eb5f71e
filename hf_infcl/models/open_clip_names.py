"""What OpenCLIP and transformers call the sizes and the tensors of a model: tables that are read in both directions."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from ..files.text import listed
from .open_clip_inputs import cleaning, is_of_clip, preprocess_config, refuse
from .pretrained import check_length

# ---- Sizes of towers ----

# By OpenCLIP's names, those of transformers and OpenCLIP's defaults.
_TEXT: dict[str, tuple[str, int]] = {
    "width": ("hidden_size", 512),
    "layers": ("num_hidden_layers", 12),
    "heads": ("num_attention_heads", 8),
    "vocab_size": ("vocab_size", 49408),
    "context_length": ("max_position_embeddings", 77),
}
_IMAGE: dict[str, tuple[str, int]] = {
    "width": ("hidden_size", 768),
    "layers": ("num_hidden_layers", 12),
    "image_size": ("image_size", 224),
    "patch_size": ("patch_size", 16),
}
_TANH = "gelu_pytorch_tanh"
# Further names of transformers for activations, and their meaning.
_ACTIVATIONS = {"gelu_python": "gelu", "gelu_new": _TANH, "gelu_fast": _TANH}
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
    of_name = {"patch_size": patch, "image_size": image, "hidden_act": _TANH if _TIMM_TANH.fullmatch(name) else "gelu"}
    return dict(zip(_TIMM_SIZES, sizes, strict=True)) | of_name | {"layer_norm_eps": 1e-6, "vision_use_head": True}


TIMM_TOWERS = {
    name: timm_tower(name, sizes, patch, image)
    for size, (sizes, patches) in _TIMM.items()
    for patch, images in patches.items()
    for image in images
    for name in [f"vit_{size}_patch{patch}_siglip_{image}"]
}

# ---- Configs ----

# The values of other fields that transformers' towers have, None if the config need not state it. The first one is
# written. Of fields with none, all values are taken: they are read elsewhere, or have no effect outside of OpenCLIP's
# training.
Values = dict[str, tuple[Any, ...]]
_READ = """
    mlp_ratio head_width pool_type act_kwargs norm_kwargs eos_id hf_tokenizer_name tokenizer_mode tokenizer_kwargs
    patch_dropout timm_model_name timm_pool timm_model_pretrained timm_proj timm_proj_bias timm_drop timm_drop_path
    attn_pooler_queries attn_pooler_heads hf_model_name hf_model_pretrained hf_proj_type hf_pooler_type pad_id
"""
_OFF = """
    ls_init_value attentional_pool no_ln_pre final_ln_after_pool qk_norm scaled_cosine_attn scale_heads scale_attn_inner
    scale_attn scale_fc embed_cls output_tokens no_causal_mask proj_bias
"""
_ANY: Values = {
    **dict.fromkeys((*_READ.split(), *_TEXT, *_IMAGE), ()),
    **dict.fromkeys(_OFF.split(), (None, False)),
    "pos_embed_type": (None, "learnable"),
    "block_type": (None, "default"),
    "proj_type": (None, "linear"),
}
_OF_CLIP: dict[str, Values] = {
    "vision_cfg": {"pool_type": (None, "tok")},
    "text_cfg": {"pool_type": (None, "argmax", "eos")},
}
_OF_SIGLIP: dict[str, Values] = {
    "vision_cfg": {"timm_model_pretrained": (False, True, None), "timm_pool": ("map",), "timm_proj": ("none",)},
    "text_cfg": {
        "no_causal_mask": (True,),
        "pool_type": ("last",),
        "proj_bias": (True, False, None),
        "proj_type": (None, "linear", "none"),
    },
}


def transformers_config(config: dict[str, Any]) -> Any:
    """The config of transformers for an OpenCLIP config; raises ValueError if transformers has no such model."""
    fields = config.get("model_cfg", config)
    if missing := [key for key in ("embed_dim", "vision_cfg", "text_cfg") if key not in fields]:
        raise ValueError(f"The config has no {' and no '.join(missing)}, so it is no model_cfg of OpenCLIP.")
    image, text, width = fields["vision_cfg"], fields["text_cfg"], fields["embed_dim"]
    timm, of_hf, quick = image.get("timm_model_name"), text.get("hf_model_name"), bool(fields.get("quick_gelu"))
    resnet, kind = image.get("layers"), {"eva": " (an EVA)", "con": " (a ConvNeXt)"}.get((timm or "")[:3], "")
    refuse("multimodal_cfg" in fields, "it is a CoCa, whose captioning decoder transformers does not have")
    refuse(of_hf, f"its text tower is {of_hf} of transformers under OpenCLIP's own pooling and projection")
    has_not, timm_has = "which transformers does not have", "and of timm's towers transformers has those of SigLIP"
    refuse(isinstance(resnet, (list, tuple)), f"its image tower is CLIP's modified ResNet, {has_not}")
    refuse(timm and timm not in TIMM_TOWERS, f"its image tower is timm's {timm}{kind}, {timm_has}")
    for tower, values in (_OF_SIGLIP if timm else _OF_CLIP).items():
        known, stated = _ANY | values, fields[tower]
        for key in {**values, **stated}:
            has, allowed = f"its {tower} has {key}={stated.get(key)!r}", known.get(key)
            only = " or ".join(map(repr, allowed or ()))
            refuse(allowed is None, f"{has}, which is not known")
            refuse(allowed and stated.get(key) not in allowed, f"{has}, and transformers' towers have only {only}")
    text_config = _tower_config(text, _TEXT, quick)
    if timm:
        side, of_timm = _edge(image.get("image_size")), TIMM_TOWERS[timm]["image_size"]
        refuse(side not in (None, of_timm), f"its config has image_size={side}, and timm's {timm} {of_timm}")
        text_config |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1, "projection_size": width}
        return transformers.SiglipConfig(text_config=text_config, vision_config=dict(TIMM_TOWERS[timm]))
    # The ids with which transformers' text tower takes the token that OpenCLIP's takes: of XLM-V; of CLIP, whose end is
    # the largest id; or 2, by which CLIPModel means the largest id, and MetaClip2Model, with equal names, means 2.
    ends, end, of_clip = text.get("pool_type") == "eos", text.get("eos_id", 2), text_config["vocab_size"] == 49408
    ids = (0, 1, end) if ends else (49406, 49407, 49407) if of_clip else (0, 0, 2)
    text_config |= dict(zip(("bos_token_id", "pad_token_id", "eos_token_id"), ids, strict=True))
    vision_config = _tower_config(image, _IMAGE, quick)
    config_class: Any = transformers.MetaClip2Config if ends and end == 2 else transformers.CLIPConfig
    size = {"projection_dim": width}
    return config_class(text_config=text_config | size, vision_config=vision_config | size, **size)


def _tower_config(fields: dict[str, Any], sizes: Mapping[str, tuple[str, int]], quick_gelu: bool) -> dict[str, Any]:
    """The config of a tower that is not timm's."""
    act, norm = fields.get("act_kwargs") or {}, {"eps": 1e-5, **(fields.get("norm_kwargs") or {})}
    name = {"none": "gelu", "tanh": _TANH}.get(act.get("approximate", "none"))
    refuse(quick_gelu and act, "it has quick_gelu and act_kwargs, with which OpenCLIP does not load it either")
    refuse(name is None or act.keys() - {"approximate"}, f"its activation has act_kwargs={act}")
    refuse(norm.keys() != {"eps"}, f"its layer norms have norm_kwargs={norm}, of which transformers has eps only")
    config = {ours: _edge(fields.get(theirs, default)) for theirs, (ours, default) in sizes.items()}
    width = config["hidden_size"]
    if sizes is _IMAGE:
        config["num_attention_heads"] = width // fields.get("head_width", 64)
    config["intermediate_size"] = int(width * fields.get("mlp_ratio", 4.0))
    return config | {"layer_norm_eps": norm["eps"], "hidden_act": "quick_gelu" if quick_gelu else name}


def _edge(size: Any) -> Any:
    """A size of a tower; of images and patches, for which a config may state height and width, their edge."""
    edges = tuple(size) if isinstance(size, (list, tuple)) else (size,)
    refuse(len(set(edges)) > 1, f"a size of {edges} pixels is not square")
    return edges[0]


def open_clip_config(config: Any, processor: Any, *, repository: str = ".") -> dict[str, Any]:
    """The OpenCLIP config of a model of transformers, from its config and its processor; see `to_open_clip`."""
    kind = config.model_type
    refuse(kind not in ("clip", "metaclip_2", "siglip"), f"it is of the type {kind}, of which OpenCLIP has none")
    text, image, tokenizer = config.text_config, config.vision_config, processor.tokenizer
    siglip, acts = kind == "siglip", (text.hidden_act, image.hidden_act)
    quick = "quick_gelu" in acts
    unlike = quick and set(acts) != {"quick_gelu"}
    refuse(siglip and acts[0] == "quick_gelu", "its text tower has QuickGELU, which OpenCLIP would not apply to it")
    refuse(unlike, f"its towers have {acts[0]} and {acts[1]}, and OpenCLIP has QuickGELU in both or in none")
    check_length(tokenizer, text.vocab_size, exact=False)
    fields: dict[str, Any] = {
        tower: {key: allowed[0] for key, allowed in values.items() if allowed[0] is not None}
        for tower, values in (_OF_SIGLIP if siglip else _OF_CLIP).items()
    }
    if siglip:  # the bias creates the parameter
        fields |= {"embed_dim": text.projection_size, "init_logit_bias": -10, "custom_text": True}
        fields["vision_cfg"] |= _timm_fields(image)
    else:
        fields |= {"embed_dim": config.projection_dim, "quick_gelu": quick}
        fields["vision_cfg"] |= _tower_fields(image, _IMAGE)
    fields["text_cfg"] |= _tower_fields(text, _TEXT)
    # transformers takes the first eos_token_id, which for the last id is the largest one; so is 2 in CLIPModel.
    if kind == "metaclip_2" or (kind == "clip" and text.eos_token_id not in (2, text.vocab_size - 1)):
        fields["text_cfg"] |= {"pool_type": "eos", "eos_id": text.eos_token_id}
    # OpenCLIP cuts texts at this length.
    fields["text_cfg"]["context_length"] = min(text.max_position_embeddings, tokenizer.model_max_length)
    if kind != "clip" or not is_of_clip(tokenizer):
        clean = cleaning(tokenizer) or "whitespace"
        fields["text_cfg"] |= {"hf_tokenizer_name": repository, "tokenizer_kwargs": {"clean": clean}}
    preprocess = preprocess_config(processor.image_processor, _edge(image.image_size))
    return {"model_cfg": fields, "preprocess_cfg": preprocess}


def _tower_fields(config: Any, sizes: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    """The fields of a tower in OpenCLIP that is not timm's."""
    act, eps, width = _ACTIVATIONS.get(config.hidden_act, config.hidden_act), config.layer_norm_eps, config.hidden_size
    refuse(act not in ("gelu", _TANH, "quick_gelu"), f"its activation is {act}, which OpenCLIP's towers do not have")
    fields = {theirs: _edge(getattr(config, ours)) for theirs, (ours, _) in sizes.items()}
    if sizes is _IMAGE:
        fields["head_width"] = width // config.num_attention_heads
    fields["mlp_ratio"] = mlp_ratio(config.intermediate_size, width)
    fields |= {"act_kwargs": {"approximate": "tanh"}} if act == _TANH else {}
    return fields | ({"norm_kwargs": {"eps": eps}} if eps != 1e-5 else {})


def mlp_ratio(hidden: int, width: int) -> float:
    """A ratio for which int(width · ratio) is the width of the hidden layer, as OpenCLIP and timm compute it."""
    ratio = hidden / width  # whose product with the width may be less than hidden by a rounding error
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def _timm_fields(config: Any) -> dict[str, Any]:
    """The fields of SigLIP's image tower in OpenCLIP, which is timm's."""
    act = config.hidden_act
    names = ("patch_size", "image_size", "layer_norm_eps", "vision_use_head", *_TIMM_SIZES)
    stated = {name: getattr(config, name, True) for name in names}
    name = next((name for name, tower in TIMM_TOWERS.items() if stated.items() <= tower.items()), "")
    none_of = ", ".join(f"{name} {value}" for name, value in stated.items())
    refuse(not name, f"OpenCLIP takes SigLIP's image towers from timm, which has none of {none_of}")
    of_timm = TIMM_TOWERS[name]["hidden_act"]
    refuse(
        act != of_timm,
        f"its image tower has {act}, and timm's {name} {of_timm}, so the embeddings would differ slightly (by 2e-8 of "
        f"cosine with random weights). If you accept that, set vision_config.hidden_act to {of_timm!r} in config.json, "
        "which changes the model accordingly",
    )
    return {"image_size": config.image_size, "timm_model_name": name}


# ---- Tensors ----

# Parts of transformers' names, as patterns, and OpenCLIP's in their place; "$" is "text." for SigLIP and custom_text.
# They apply one after the other.
_NAMES = (
    ("text_model.head", "$text_projection"),
    ("text_model.", "$"),
    ("vision_model.", "visual."),
    ("embeddings.", ""),
    ("position_embedding.weight", "positional_embedding"),
    ("patch_embedding", "conv1"),
    ("encoder.layers", "transformer.resblocks"),
    (r"layer_norm(\d)", r"ln_\1"),
    ("self_attn.q_proj.", "attn.in_proj_"),
    ("self_attn", "attn"),
    ("mlp.fc1", "mlp.c_fc"),
    ("mlp.fc2", "mlp.c_proj"),
    ("pre_layrnorm", "ln_pre"),  # transformers' spelling
    ("post_layernorm", "ln_post"),
    ("final_layer_norm", "ln_final"),
    ("visual_projection.weight", "visual.proj"),
    ("^text_projection.weight", "$text_projection"),
)
_TIMM_NAMES = (  # of SigLIP's image tower
    ("vision_model.head.attention.in_proj_(.*)", r"vision_model.head.q.\1 vision_model.head.kv.\1"),
    ("head.attention.out_proj", "head.proj"),
    ("head.layernorm", "head.norm"),
    ("head.probe", "head.latent"),
    ("head", "attn_pool"),
    ("embeddings.patch_embedding", "patch_embed.proj"),
    ("embeddings.position_embedding.weight", "pos_embed"),
    ("encoder.layers", "blocks"),
    (r"layer_norm(\d)", r"norm\1"),
    ("self_attn.q_proj", "attn.qkv"),
    ("self_attn.out_proj", "attn.proj"),
    ("post_layernorm", "norm"),
    ("vision_model", "visual.trunk"),
)
Change = Callable[[Tensor], Tensor]
# By OpenCLIP's name, what makes of its tensor that of transformers, and of that its own again.
_CHANGES: dict[str, tuple[Change, Change]] = {
    "visual.proj": (torch.t, torch.t),
    "text_projection": (torch.t, torch.t),
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
    refuse(siglip and not biased, "it is a SigLIP without a logit_bias, which transformers' SiglipModel always has")
    refuse(biased and not siglip, "it is a CLIP with a logit_bias, which transformers' CLIPModel does not have")
    notes = _complete_projection(fields, weights) if siglip else []
    if dropped := fields["vision_cfg"].get("patch_dropout"):
        notes.append(f"patch_dropout={dropped} is not kept: give the training its own (--patch_dropout).")
    prefix = "text." if "text.positional_embedding" in weights else ""
    renamed = _renamed([(theirs, names, read) for theirs, names, read, _ in _rows(ours, prefix)], weights)
    dtypes = {tensor.dtype for tensor in renamed.values()}
    model = transformers.AutoModel.from_config(ours).to(dtypes.pop() if len(dtypes) == 1 else torch.float32)
    try:
        model.load_state_dict(renamed)
    except RuntimeError as error:
        raise ValueError(
            "The weights have other shapes than the config implies. OpenCLIP resizes position embeddings when it "
            f"loads; save the model with it again, or correct the config. {error}"
        ) from error
    return model.eval(), notes


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
    positions = "text_model.embeddings.position_embedding.weight"
    weights[positions] = weights[positions][: config["model_cfg"]["text_cfg"]["context_length"]].contiguous()
    prefix = "text." if model.config.model_type == "siglip" else ""
    rows = [(ours, names, write) for names, ours, _, write in _rows(model.config, prefix)]
    return _renamed(rows, weights), config


def _rows(config: Any, prefix: str) -> Iterator[tuple[list[str], list[str], Change, Change]]:
    """OpenCLIP's names of tensors, transformers' names of the same, and the change to each of them."""
    siglip = config.model_type == "siglip"
    as_it_is = (Tensor.contiguous, Tensor.contiguous)
    scalars: tuple[Change, Change] = (lambda one: one.reshape((1,) if siglip else ()), lambda one: one.reshape(()))
    with torch.device("meta"):
        names = transformers.AutoModel.from_config(config).state_dict().keys()
    for ours in names:
        if ".k_proj." in ours or ".v_proj." in ours:  # which OpenCLIP has in one tensor with q_proj
            continue
        theirs = ours
        for pattern, in_its_place in _TIMM_NAMES if siglip and ours.startswith("vision_model") else _NAMES:
            theirs = re.sub(pattern, in_its_place, theirs)
        change = scalars if ours.startswith("logit") else _CHANGES.get(theirs.removeprefix("$"), as_it_is)
        joined = [ours.replace(".q_proj.", f".{one}_proj.") for one in ("qkv" if ".q_proj." in ours else "q")]
        yield theirs.replace("$", prefix).split(), joined, *change


def _renamed(rows: Sequence[tuple[list[str], list[str], Change]], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the second names of the rows; raises ValueError if one is missing, or one is left over."""
    renamed: dict[str, Tensor] = {}
    known = {name for names, *_ in rows for name in names}
    for what, wrong in (
        ("lacks tensors that its config implies", known - tensors.keys()),
        ("has tensors that its config does not imply", tensors.keys() - known),
    ):
        if wrong:
            raise ValueError(
                f"The checkpoint {what}: {listed(sorted(wrong), 5)}. The config is of another architecture, or the "
                "weights are incomplete; take both from one place."
            )
    for sources, targets, change in rows:
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
