"""OpenCLIP's tokenizers as transformers' tokenizers."""

from __future__ import annotations

import html
import string
from typing import Any

import transformers
from tokenizers import Regex, normalizers
from transformers import PreTrainedTokenizerBase

from ..hub import asks_hub_once
from .explaining import explained

OPENAI = "openai/clip-vit-base-patch32"
# The tokenizer of OpenAI's CLIP maps this text to these ids.
PROBE, PROBE_IDS = "A photo of a cat", [49406, 320, 1125, 539, 320, 2368, 49407]
UNREPAIRED = (
    "Captions are read as they are, while OpenCLIP first repairs broken encodings and unescapes HTML: "
    "hf_infcl.conversion.repaired does the same."
)
SPARE = 128  # tables of tokens are padded to multiples of up to this


def is_of_clip(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it is the tokenizer of OpenAI's CLIP, which OpenCLIP has built in."""
    return tokenizer(PROBE)["input_ids"] == PROBE_IDS


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
        return transformers.AutoTokenizer.from_pretrained(OPENAI)
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
    if {key for key, value in options.items() if value} or text.get("tokenizer_mode"):
        raise ValueError(
            f"OpenCLIP changes the output of its tokenizer (tokenizer_mode={text.get('tokenizer_mode')!r}, "
            f"tokenizer_kwargs={options}), which no tokenizer of transformers does. Use the model with OpenCLIP itself."
        )
    if not named and not is_of_clip(tokenizer):
        raise ValueError(
            f"The tokenizer beside the weights is not the one of OpenAI's CLIP, which the config asks for by naming no "
            f"other: {PROBE!r} has the ids {tokenizer(PROBE)['input_ids']} instead of {PROBE_IDS}. Remove its files, "
            "or name it as hf_tokenizer_name in text_cfg if the model was trained with it."
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
    if length > rows or (exact and length + SPARE <= rows):
        raise ValueError(
            f"The tokenizer has {length:,} tokens and the text tower {rows:,} token embeddings, so they do not belong "
            "together. Take the tokenizer with which the model was trained."
        )


def _cleaning_first(tokenizer: PreTrainedTokenizerBase, clean: str) -> Any:
    """A tokenizer that cleans texts as OpenCLIP does before it, except for ftfy and HTML entities."""
    punctuation = "".join(f"\\{character}" for character in string.punctuation)
    steps: dict[str, list[Any]] = {
        "whitespace": [],
        "lower": [normalizers.Lowercase()],
        "canonicalize": [
            normalizers.Replace("_", " "),
            normalizers.Replace(Regex(f"[{punctuation}]"), ""),
            normalizers.Lowercase(),
        ],
    }
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
