"""The texts of a window, dealt out to its micro-batches anew: by length, and several micro-batches' texts at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..encoders.dual_encoder import NO_TEXTS, TEXT_INPUTS

MULTIPLE = 8  # of tokens to which micro-batches are padded: few shapes, which suit the matrix units


def deal_texts(
    batches: list[dict[str, Any]], padding: Mapping[str, int] | None, at_once: int = 1, *, last_has_texts: bool = True
) -> Tensor | None:
    """Gives the texts of each ``at_once`` micro-batches of a window to one of them, the longest to its first one.

    The padding beyond the longest text of a micro-batch is dropped. The gradient of the window stays the same, since
    its loss is one over all texts (see `Window.in_order`), unless the text tower draws random numbers.

    Args:
        batches: of one process, with tensors of texts [n, L]. They get new tensors; one without texts keeps a single
            text as a placeholder, and has ``no_texts``.
        padding: for each of these tensors, among them ``attention_mask``, the value that it is padded with at its end.
            With None texts are not sorted by length.
        last_has_texts: whether the last micro-batch keeps texts of its own.

    Returns:
        For each text of the window in its old order, its place in the new one, [texts] int64; None if nothing was
        moved, because the window is a single micro-batch, or its texts cannot be sorted and none are put together.

    Raises:
        ValueError: texts without a known padding are to be put together, but have several lengths.
    """
    names = [name for name in TEXT_INPUTS if batches and name in batches[0]]
    sorts = padding is not None and "attention_mask" in names and padding.keys() >= set(names)
    if len(batches) < 2 or not (sorts or at_once > 1):
        return None
    sizes = [len(batch["input_ids"]) for batch in batches]
    widths = {batch["input_ids"].shape[1] for batch in batches}
    widest = max(widths)
    if sorts:
        lengths = torch.cat([batch["attention_mask"].sum(1) for batch in batches]).cpu()
    elif len(widths) > 1:
        raise ValueError(
            f"texts_at_once={at_once} needs texts of one length, or a data collator with text_padding, as "
            f"ContrastiveCollator has; got micro-batches of {' and '.join(map(str, sorted(widths)))} tokens. Pad all "
            "texts to one length, or omit texts_at_once."
        )
    else:
        lengths = torch.full((sum(sizes),), widest)
    order = lengths.argsort(descending=True, stable=True)
    new_sizes = _put_together(sizes, at_once, last_has_texts=last_has_texts)
    parts = order.split(new_sizes)
    shortest = MULTIPLE if sorts else widest  # a tower of unknown padding may take texts of only one length
    longest = [int(lengths[part[0]]) if len(part) else shortest for part in parts]
    if "start_texts" in batches[0]:  # their embeddings at the start go with them
        starts = torch.cat([batch["start_texts"] for batch in batches])
        for batch, part in zip(batches, starts[order.to(starts.device)].split(new_sizes), strict=True):
            batch["start_texts"] = part
    for name in names:
        rows = torch.cat([widened(batch[name], widest, (padding or {}).get(name, 0)) for batch in batches])
        for batch, part, length in zip(batches, parts, longest, strict=True):
            chosen = part if len(part) else order[-1:]
            width = min(-(-length // MULTIPLE) * MULTIPLE, widest)
            batch[name] = rows[chosen.to(rows.device), :width]
    for batch, size in zip(batches, new_sizes, strict=True):
        if size == 0:
            batch[NO_TEXTS] = True
    return order.argsort()


def _put_together(sizes: Sequence[int], at_once: int, *, last_has_texts: bool) -> list[int]:
    """The texts of each micro-batch: the first ones have those of all, but for the last one where it keeps its own."""
    head = sizes[:-1] if last_has_texts and at_once > 1 else sizes
    groups = [sum(head[first : first + at_once]) for first in range(0, len(head), at_once)]
    return [*groups, *[0] * (len(head) - len(groups)), *sizes[len(head) :]]


def widened(tokens: Tensor, length: int, value: int) -> Tensor:
    """Tokens [n, L] padded with a value at their end, [n, length]."""
    return torch.nn.functional.pad(tokens, (0, length - tokens.shape[1]), value=value)
