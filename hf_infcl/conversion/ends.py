"""Whether a model reads the texts of its tokenizer to their end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # special tokens that captions do not contain
_SAME = 1e-6  # the largest difference of two embeddings that are equal but for rounding, relative to their entries


@torch.no_grad()
def check_ends(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises a ValueError if two different words have one embedding, alone or behind a token that was added.

    A causal tower takes the embedding at a token that its config names. If that is not the one that ends texts, what
    follows it is not read: an id that no text has stands for the first token, and in old configs 2 for the largest.
    """
    for first, second in _texts(tokenizer):
        ids = [tokenizer(text, return_tensors="pt", truncation=True)["input_ids"] for text in (first, second)]
        if ids[0].shape != ids[1].shape or torch.equal(*ids):
            continue
        one, other = (_features(model.get_text_features(input_ids=tokens)) for tokens in ids)
        if (one - other).abs().max() <= _SAME * one.abs().max():
            stated, end = getattr(model.config.text_config, "eos_token_id", None), ids[0][0, -1].item()
            raise ValueError(
                f"The texts {first!r} and {second!r} have one embedding, because the model takes it before their end. "
                f"The eos_token_id of its text_config is {stated} (2 stands for the largest token of a text in the "
                f"configs of old CLIPs), but the tokenizer ends texts with {end}. Set eos_token_id to {end} in the "
                "text_config of config.json, or take the tokenizer with which the model was trained."
            )


def _texts(tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Two words, and the same behind the last token that was added to the tokenizer."""
    special = set(tokenizer.all_special_ids)
    words = (tokenizer.decode([token]).strip() for token in range(len(tokenizer)) if token not in special)
    distinct = list(itertools.islice(dict.fromkeys(word for word in itertools.islice(words, 100) if word), 2))
    if len(distinct) < 2:
        return
    first, second = distinct
    yield first, second
    named = {getattr(tokenizer, f"{name}_token") for name in _NAMED}
    added = {token: index for token, index in tokenizer.get_added_vocab().items() if token not in named}
    if added:
        last = max(added, key=lambda token: added[token])
        yield f"{last} {first}", f"{last} {second}"


def _features(output: Any) -> Tensor:
    features: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return features.float()
