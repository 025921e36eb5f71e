"""Checks that several packages share: no second derivative is asked for, and texts are tokens of the model."""

from typing import Any

import torch
from torch import Tensor

_LEAST_WORDS = 2  # some tokenizers have one of their own, a space
_LEAST_SHARE = 0.1  # of the token embeddings


def refuse_second_derivative(what: str) -> None:
    """Raises a RuntimeError if the backward that calls this runs with ``create_graph=True``.

    Autograd then makes a graph of the backward, in which gradients that were saved would be constants.

    Args:
        what: the beginning of the message: which gradient cannot be differentiated again, and what to do.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(what)


def check_vocabulary(tokenizer: Any, config: Any) -> None:
    """Raises a ValueError if a tokenizer has no words, or far fewer than the model of this config has embeddings.

    Of a folder without the files of its vocabulary, transformers makes a tokenizer of the special tokens alone.
    """
    if not callable(vocabulary := getattr(tokenizer, "get_vocab", None)):
        return
    words = vocabulary().keys() - set(tokenizer.all_special_tokens)
    rows = getattr(getattr(config, "text_config", config), "vocab_size", None) or 0
    if len(words) < max(_LEAST_WORDS, rows * _LEAST_SHARE):
        raise ValueError(
            f"The tokenizer, a {type(tokenizer).__name__}, has {len(words):,} words beside its special tokens"
            f"{f', and the model {rows:,} token embeddings' if rows else ''}, so it is not the tokenizer of this "
            f"model. Copy the files of its vocabulary (tokenizer.json, or vocab.json and merges.txt) to the model"
            f"{f' in {tokenizer.name_or_path}' if tokenizer.name_or_path else ''}."
        )


def check_tokens(input_ids: Tensor, vocabulary: int | None, source: str = "The tokenizer returns") -> None:
    """Raises a ValueError if a token has no embedding. On a GPU the model would fail without naming it.

    Args:
        input_ids: tokens of any shape. Those on a GPU are waited for, once.
        vocabulary: the number of token embeddings; with None nothing is checked.
        source: what has the tokens, for the message.
    """
    if vocabulary is None or input_ids.numel() == 0:
        return
    least, largest = torch.stack(input_ids.aminmax()).tolist()
    if least < 0 or largest >= vocabulary:
        raise ValueError(
            f"{source} the token {least if least < 0 else largest}, but the model has {vocabulary} token embeddings, "
            f"from 0 to {vocabulary - 1}. Load processor and model from one checkpoint. If tokens were added to the "
            "tokenizer, add embeddings to the model before its training: "
            "model.text_model.resize_token_embeddings(len(processor.tokenizer))."
        )
