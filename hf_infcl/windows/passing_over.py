"""Rows of a table that an epoch does without."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PassedOver = Callable[[int], Tensor | None]  # of an epoch: [rows] bool, or None for no row


def no_rows(epoch: int) -> None:
    """A `PassedOver` of epochs that have all rows."""


def without_rows(order: Tensor, passed_over: Tensor | None, largest: int) -> Tensor:
    """The order of the rows of a pass, [rows] int64, in which the rows that stay come again instead of the others.

    They come again in the same order, so no global batch has a row twice: at least as many stay as one has.

    Args:
        order: all rows.
        passed_over: [rows] bool, by row; None for no row.
        largest: the rows of the largest global batch.
    """
    if passed_over is None:
        return order
    out = passed_over[order]
    out &= out.cumsum(0) > largest - (~out).sum()
    stay = order[~out]
    return stay[torch.arange(len(order)) % len(stay)]
