"""How many tokens of a text a text tower takes."""

from __future__ import annotations

from typing import Any

# Text towers that count positions as RoBERTa does: they begin behind the index of the padding.
_LIKE_ROBERTA = {
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "altclip_text_model"),
    *("data2vec-text", "esm", "ibert", "longformer", "mpnet", "xmod"),
}


def text_positions(config: Any) -> int | None:
    """The largest number of tokens of a text, special ones included; None if the config states none.

    Args:
        config: of the model, with a ``text_config``.
    """
    text: Any = getattr(config, "text_config", None)
    rows: int | None = getattr(text, "max_position_embeddings", None)
    if rows is None or getattr(text, "model_type", None) not in _LIKE_ROBERTA:
        return rows
    return rows - 1 - (text.pad_token_id or 0)
