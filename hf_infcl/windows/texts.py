"""The texts of a window, dealt out to its micro-batches by length, so that little is computed for padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..encoders.dual_encoder import TEXT_INPUTS

MULTIPLE = 8  # of tokens to which micro-batches are padded: few shapes, which suit the matrix units


def sort_texts(batches: list[dict[str, Any]], padding: Mapping[str, int]) -> Tensor | None:
    """Gives the longest texts of a window to its first micro-batch and so on, and drops the padding beyond them.

    The batches get new tensors; each keeps its number of texts. The gradient of the window stays the same, since its
    loss is one over all texts (see `Window.in_order`), unless the text tower draws random numbers.

    Args:
        batches: of one process, with ``attention_mask`` [n, L] and other tensors of texts, padded at their ends.
        padding: for each of these tensors, the value that it is padded with.

    Returns:
        For each text of the window in its old order, its place in the new one, [texts] int64; None if nothing was
        moved, because the window is a single micro-batch, or its texts have no mask or other tensors.
    """
    names = [name for name in TEXT_INPUTS if batches and name in batches[0]]
    if len(batches) < 2 or "attention_mask" not in names or not padding.keys() >= set(names):
        return None
    sizes = [len(batch["attention_mask"]) for batch in batches]
    widest = max(batch["attention_mask"].shape[1] for batch in batches)
    lengths = torch.cat([batch["attention_mask"].sum(1) for batch in batches]).cpu()
    order = lengths.argsort(descending=True, stable=True)
    longest = [int(part[0]) for part in lengths[order].split(sizes)]
    if "start_texts" in batches[0]:  # their embeddings at the start go with them
        starts = torch.cat([batch["start_texts"] for batch in batches])
        for batch, part in zip(batches, starts[order.to(starts.device)].split(sizes), strict=True):
            batch["start_texts"] = part
    for name in names:
        padded = [_widened(batch[name], widest, padding[name]) for batch in batches]
        device = padded[0].device
        rows = torch.cat(padded)[order.to(device)]
        for batch, part, length in zip(batches, rows.split(sizes), longest, strict=True):
            batch[name] = part[:, : min(-(-length // MULTIPLE) * MULTIPLE, widest)].contiguous()
    return order.argsort()


def _widened(tokens: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, length - tokens.shape[1]), value=value)
