"""Rows of a table that an epoch does without."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PassedOver = Callable[[int], Tensor]  # the rows that an epoch does without: [rows] bool, or `NO_ROWS`
NO_ROWS = torch.empty(0, dtype=torch.bool)


def without_rows(order: Tensor, passed_over: Tensor, largest: int) -> Tensor:
    """The order of the rows of a pass, [rows] int64, in which the rows that stay come again instead of the others.

    They come again in the same order, so no global batch has a row twice: at least as many stay as one has.

    Args:
        order: all rows.
        passed_over: [rows] bool, by row, or `NO_ROWS`.
        largest: the rows of the largest global batch.
    """
    if not len(passed_over):
        return order
    out = passed_over[order]
    out &= out.cumsum(0) > largest - (~out).sum()
    stay = order[~out]
    return stay[torch.arange(len(order)) % len(stay)]
