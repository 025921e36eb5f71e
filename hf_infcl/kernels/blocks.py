"""The arguments that the operators of the package have in common; it explains their terms."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Block(NamedTuple):
    """A block of m images and n texts."""

    x: Tensor  # [m, D]
    y: Tensor  # [n, D]
    scale: Tensor  # a scalar
    ids_x: Tensor | None = None  # [m] int32
    ids_y: Tensor | None = None  # [n] int32
    diagonal: int | None = None
    equal_are_positive: bool = False


class BlockGradients(NamedTuple):
    """Where the products of the coefficients go, or are added if they accumulate."""

    grad_x: Tensor | None  # [m, D]; None if it is not needed
    grad_y: Tensor | None  # [n, D]
    accumulate: bool
