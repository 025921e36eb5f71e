"""What OpenCLIP and transformers call the tensors, sizes and preparation of a model: tables read in both ways."""

from __future__ import annotations

import html
import math
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Regex, normalizers
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..files.hub import asks_hub_once
from ..files.text import listed
from .pretrained import explained

# What OpenCLIP takes where a config says nothing.
OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
_RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
_OPENAI = "openai/clip-vit-base-patch32"
# The tokenizer of OpenAI's CLIP maps this text to these ids.
_PROBE, _PROBE_IDS = "A photo of a cat", [49406, 320, 1125, 539, 320, 2368, 49407]
UNREPAIRED = (
    "Captions are read as they are, while OpenCLIP first repairs broken encodings and unescapes HTML: "
    "hf_infcl.models.open_clip.repaired does the same."
)
_SPARE = 128  # tables of tokens are padded to multiples of up to this


def refuse(*rows: tuple[object, str]) -> None:
    """Raises the ValueError that says why a model has no counterpart, if a row's condition is met, and what to do."""
    for wrong, what in rows:
        if wrong:
            raise ValueError(
                f"The model cannot be converted: {what}. Use it with OpenCLIP itself, or start from a model whose "
                "towers transformers has: a ViT of CLIP, MetaCLIP, SigLIP or SigLIP 2."
            )


# ---- Images ----


def image_processor(preprocess: dict[str, object], size: int) -> Any:
    """transformers' processor with the resizing, crop, mean and standard deviation of OpenCLIP's evaluation.

    Args:
        preprocess: `preprocess_cfg` of an OpenCLIP config. Its size has no effect, as in OpenCLIP.
        size: the edge of the model's images in pixels.

    Raises:
        ValueError: images are padded, or resized in a way that transformers does not have.
    """
    mode, how = preprocess.get("resize_mode") or "shortest", preprocess.get("interpolation") or "bicubic"
    how = "bicubic" if how == "random" else how
    padded = f"it pads images to a square (resize_mode={mode!r}), as no image processor of CLIP can"
    refuse(
        (mode not in ("shortest", "squash"), padded),
        (how not in _RESAMPLING, f"it resizes images by interpolation={how!r}"),
    )
    options: dict[str, Any] = {"resample": _RESAMPLING[str(how)]}
    for name, values in (("mean", OPENAI_MEAN), ("std", OPENAI_STD)):
        stated: Any = preprocess.get(name, values)
        options[f"image_{name}"] = list(stated) if isinstance(stated, (list, tuple)) else [stated] * 3
    square = {"height": size, "width": size}
    if mode == "squash":
        return transformers.SiglipImageProcessorPil(size=square, do_convert_rgb=True, **options)
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=square, **options)


def preprocess_config(processor: Any, size: int) -> dict[str, Any]:
    """`preprocess_cfg` of an OpenCLIP config, from an image processor of transformers.

    Args:
        size: the edge of the model's images in pixels, which OpenCLIP takes in any case.

    Raises:
        ValueError: OpenCLIP cannot prepare images like this processor.
    """
    fields = processor.to_dict()
    resample, scale = int(fields["resample"]), fields.get("rescale_factor") or 1 / 255
    how = next((name for name, number in _RESAMPLING.items() if number == resample), None)
    usual = abs(scale - 1 / 255) < 1e-9 and all(fields.get(f"do_{x}", True) for x in ("resize", "rescale", "normalize"))
    edges, crops = dict(fields["size"]), bool(fields.get("do_center_crop"))
    squash, made = "height" in edges, set(dict(fields["crop_size"]).values()) if crops else set()
    unlike = squash == crops or {edges.get("shortest_edge", size), *made, *edges.values()} != {size}
    refuse(
        (how is None, f"its image processor has resample={resample}, and OpenCLIP resizes bicubically or bilinearly"),
        (not usual, "its image processor does not resize, divide by 255 and normalise, as OpenCLIP always does"),
        (
            unlike,
            f"its image processor has size={edges}{' and a crop of ' + str(sorted(made)) if crops else ''}; OpenCLIP "
            f"resizes the shortest edge to {size}, the size of the model, and crops, or resizes both edges to it",
        ),
    )
    stated = {name: list(fields[f"image_{name}"]) for name in ("mean", "std")}
    return stated | {"interpolation": how, "resize_mode": "squash" if squash else "shortest"}


# ---- Texts ----


def is_of_clip(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it is the tokenizer of OpenAI's CLIP, which OpenCLIP has built in."""
    return tokenizer(_PROBE)["input_ids"] == _PROBE_IDS


@asks_hub_once
def named_tokenizer(name: str) -> Any:
    """The tokenizer in a folder, or of a Hub id; a ValueError says why it cannot be loaded."""
    with explained(name, kind="tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(name)


def clip_tokenizer() -> Any:
    """The tokenizer of OpenAI's CLIP, from the vocabulary of OpenCLIP if that is installed, otherwise from the Hub."""
    try:
        from open_clip.tokenizer import SimpleTokenizer
    except ModuleNotFoundError:
        return named_tokenizer(_OPENAI)
    tokenizer = SimpleTokenizer()
    special = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocabulary = {special.get(token, token): index for token, index in tokenizer.encoder.items()}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=list(tokenizer.bpe_ranks))


def repaired(caption: str, *, lower: bool = True) -> str:
    """A caption as OpenCLIP changes it before its tokenizer: repaired by ftfy, and unescaped from HTML.

    A training and an evaluation in this package read captions as they are. Captions that contain curly quotes, HTML
    entities, broken encodings or a Greek final sigma get OpenCLIP's tokens if this function has been applied to them.

    Args:
        lower: whether to write it in lower case, as CLIP's tokenizer does. False for tokenizers that keep capitals.

    Raises:
        ModuleNotFoundError: ftfy is not installed.
    """
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(caption))).strip()
    return text.lower() if lower else text


def prepared(tokenizer: PreTrainedTokenizerBase, text: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Changes a tokenizer of transformers to the length and the cleaning of texts that a `text_cfg` of OpenCLIP says.

    Raises:
        ValueError: it is not the tokenizer of this model, or OpenCLIP changes its output.
    """
    options = dict(text.get("tokenizer_kwargs") or {})
    named = bool(text.get("hf_tokenizer_name"))
    clean = options.pop("clean", "whitespace" if named else "lower")
    if any(options.values()) or text.get("tokenizer_mode"):
        raise ValueError(
            f"OpenCLIP changes the output of its tokenizer (tokenizer_mode={text.get('tokenizer_mode')!r}, "
            f"tokenizer_kwargs={options}), which no tokenizer of transformers does. Use the model with OpenCLIP itself."
        )
    if not named and not is_of_clip(tokenizer):
        raise ValueError(
            f"The tokenizer beside the weights is not the one of OpenAI's CLIP, which the config asks for by naming no "
            f"other: {_PROBE!r} has the ids {tokenizer(_PROBE)['input_ids']} instead of {_PROBE_IDS}. Remove its "
            "files, or name it as hf_tokenizer_name in text_cfg if the model was trained with it."
        )
    check_length(tokenizer, text.get("vocab_size", 49408), exact=True)
    if named and cleaning(tokenizer) != clean:
        tokenizer = _cleaning_first(tokenizer, clean)
    tokenizer.model_max_length = text.get("context_length", 77)
    if text.get("no_causal_mask"):  # SigLIP's text tower sees the padding, so it must not get a mask
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = ["input_ids"]  # the second is saved
    return tokenizer


def check_length(tokenizer: PreTrainedTokenizerBase, rows: int, *, exact: bool) -> None:
    """Raises ValueError if the tokenizer has more tokens than the model, or with `exact` many fewer."""
    extra = set(tokenizer.added_tokens_encoder) - {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
    length = 1 + max(index for token, index in tokenizer.get_vocab().items() if token not in extra)
    if length > rows or (exact and length + _SPARE <= rows):
        raise ValueError(
            f"The tokenizer has {length:,} tokens and the text tower {rows:,} token embeddings, so they do not belong "
            "together. Take the tokenizer with which the model was trained."
        )


def _cleaning_first(tokenizer: PreTrainedTokenizerBase, clean: str) -> Any:
    """A tokenizer that cleans texts as OpenCLIP does before it, except for ftfy and HTML entities."""
    lower, letters = [normalizers.Lowercase()], "".join(f"\\{character}" for character in string.punctuation)
    plain = [normalizers.Replace("_", " "), normalizers.Replace(Regex(f"[{letters}]"), ""), *lower]
    steps: dict[str, list[Any]] = {"whitespace": [], "lower": lower, "canonicalize": plain}
    if clean not in steps:
        raise ValueError(f"tokenizer_kwargs of the config has clean={clean!r}; known are {', '.join(steps)}.")
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is a tokenizer in Python, to which OpenCLIP's cleaning of texts cannot be "
            "added. Save it as tokenizer.json first."
        )
    backend = tokenizer.backend_tokenizer
    before = [*steps[clean], normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    backend.normalizer = normalizers.Sequence([*before, *([backend.normalizer] if backend.normalizer else [])])
    # The classes of single models, such as CLIPTokenizer, would put back their normalizer when they are loaded.
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **tokenizer.special_tokens_map)


def cleaning(tokenizer: PreTrainedTokenizerBase) -> str:
    """OpenCLIP's name of the cleaning that a tokenizer of transformers does itself; "" for none."""
    if not tokenizer.is_fast:
        return "canonicalize" if type(tokenizer).__name__ == "SiglipTokenizer" else ""
    normalizer = tokenizer.backend_tokenizer.normalizer
    words = normalizer.normalize_str("One,  TWO ").replace("▁", " ").strip() if normalizer else ""
    return {"one two": "canonicalize", "one, two": "lower", "One, TWO": "whitespace"}.get(words, "")


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


_TEXT_OF_NAMES = {
    "logit_scale": "logit_scale",
    "$token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "$positional_embedding": "text_model.embeddings.position_embedding.weight",
    "$ln_final.*": "text_model.final_layer_norm.*",
    **_of("$transformer.resblocks.#.", "text_model.encoder.layers.#.", _BLOCK),
}
_CLIP = _TEXT_OF_NAMES | {
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
_SIGLIP = _TEXT_OF_NAMES | {  # whose image tower in OpenCLIP is one of timm
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
    positions = _TEXT_OF_NAMES["$positional_embedding"]
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
