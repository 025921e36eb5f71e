"""Prepares images and texts in transformers as OpenCLIP does, and says in OpenCLIP's config how a processor does."""

import string
from collections.abc import Mapping
from typing import Any

import transformers
from PIL import Image
from tokenizers import Regex, normalizers
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from .pretrained import check_length, named_tokenizer

_BICUBIC, _BILINEAR = Image.Resampling.BICUBIC, Image.Resampling.BILINEAR
_RESAMPLING = {"bicubic": _BICUBIC, "bilinear": _BILINEAR, "random": _BICUBIC}  # random is of its training
# The tokenizer of OpenAI's CLIP maps this text to these ids.
_PROBE, _PROBE_IDS = "A photo of a cat", [49406, 320, 1125, 539, 320, 2368, 49407]


def refuse(wrong: object, what: str) -> None:
    """If something is wrong, raises the ValueError that says why a model has no counterpart, and what to do."""
    if wrong:
        raise ValueError(
            f"The model cannot be converted: {what}. Use it with OpenCLIP itself, or start from a model whose towers "
            "transformers has: a ViT of CLIP, MetaCLIP, SigLIP or SigLIP 2."
        )


# ---- Images ----


def image_processor(preprocess: Mapping[str, object], size: int) -> Any:
    """transformers' processor with the resizing, crop, mean and standard deviation of OpenCLIP's evaluation.

    Args:
        preprocess: `preprocess_cfg` of an OpenCLIP config. Its size has no effect, as in OpenCLIP.
        size: the edge of the model's images in pixels.

    Raises:
        ValueError: images are padded, or resized in a way that transformers does not have.
    """
    mode, how = preprocess.get("resize_mode") or "shortest", preprocess.get("interpolation") or "bicubic"
    padded = f"it pads images to a square (resize_mode={mode!r}), as no image processor of CLIP can"
    refuse(mode not in ("shortest", "squash"), padded)
    refuse(how not in _RESAMPLING, f"it resizes images by interpolation={how!r}")
    options: dict[str, Any] = {"resample": _RESAMPLING[str(how)]}
    for name, values in (("mean", OPENAI_CLIP_MEAN), ("std", OPENAI_CLIP_STD)):  # where a config says nothing
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
    has = _preparation(processor)
    how = next((name for name, number in _RESAMPLING.items() if number == has["resample"]), "bicubic")
    stated: dict[str, Any] = {name: list(getattr(processor, f"image_{name}")) for name in ("mean", "std")}
    stated |= {"interpolation": how, "resize_mode": "squash" if "height" in has["size"] else "shortest"}
    would_have = _preparation(image_processor(stated, size))
    for name, value in has.items():
        unlike = f"its image processor has {name}={value}, and OpenCLIP would prepare images with {would_have[name]}"
        refuse(value != would_have[name], unlike)
    return stated


def _preparation(processor: Any) -> dict[str, Any]:
    """The settings that decide the pixels of an image processor, except the mean and the standard deviation."""
    fields = processor.to_dict()
    return {
        **{f"do_{step}": bool(fields.get(f"do_{step}", True)) for step in ("resize", "rescale", "normalize")},
        "resample": int(fields["resample"]),
        "rescale_factor": round(fields.get("rescale_factor") or 1 / 255, 8),
        "size": dict(fields["size"]),
        "crop_size": dict(fields["crop_size"]) if fields.get("do_center_crop") else None,
    }


# ---- Texts ----


def is_of_clip(tokenizer: transformers.PreTrainedTokenizerBase) -> bool:
    """Whether it is the tokenizer of OpenAI's CLIP, which OpenCLIP has built in."""
    return tokenizer(_PROBE)["input_ids"] == _PROBE_IDS


def clip_tokenizer() -> Any:
    """The tokenizer of OpenAI's CLIP, from the vocabulary of OpenCLIP if that is installed, otherwise from the Hub."""
    try:
        from open_clip.tokenizer import SimpleTokenizer
    except ModuleNotFoundError:
        return named_tokenizer("openai/clip-vit-base-patch32")
    tokenizer = SimpleTokenizer()
    special = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocabulary = {special.get(token, token): index for token, index in tokenizer.encoder.items()}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=list(tokenizer.bpe_ranks))


def prepared(tokenizer: transformers.PreTrainedTokenizerBase, text: dict[str, Any]) -> Any:
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


def _cleaning_first(tokenizer: transformers.PreTrainedTokenizerBase, clean: str) -> Any:
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


def cleaning(tokenizer: transformers.PreTrainedTokenizerBase) -> str:
    """OpenCLIP's name of the cleaning that a tokenizer of transformers does itself; "" for none."""
    if not tokenizer.is_fast:
        return "canonicalize" if type(tokenizer).__name__ == "SiglipTokenizer" else ""
    normalizer = tokenizer.backend_tokenizer.normalizer
    words = normalizer.normalize_str("One,  TWO ").replace("▁", " ").strip() if normalizer else ""
    return {"one two": "canonicalize", "one, two": "lower", "One, TWO": "whitespace"}.get(words, "")
