"""Checks that several packages share: no second derivative is asked for, and every token has an embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def refuse_second_derivative(what: str) -> None:
    """Raises a RuntimeError if the backward that calls this runs with ``create_graph=True``.

    Autograd then makes a graph of the backward, in which gradients that were saved would be constants.

    Args:
        what: the beginning of the message: which gradient cannot be differentiated again, and what to do.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(what)


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
