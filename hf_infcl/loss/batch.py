"""One process's share of the global batch and of the loss, its blocks, and the sorting of rows by their ids."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from .strategies import Rows, Statistics


class RowCounts(NamedTuple):
    """The number of images, texts and negative texts on each process, in the order of the ranks."""

    images: tuple[int, ...]
    texts: tuple[int, ...]
    negative_texts: tuple[int, ...]


class Wanted(NamedTuple):
    """Whether the gradient of each input is wanted."""

    x: bool
    y: bool
    negatives: bool
    scale: bool
    bias: bool


@dataclass(frozen=True)
class Batch:
    """This process's share of the global batch, and the parameters of the logits z_ij = scale · x_i·y_j + bias."""

    x: Tensor  # [n, D] images
    y: Tensor  # [m, D] texts; in a batch of pairs text i belongs to image i
    negatives: Tensor | None  # [h, D] texts that belong to no image
    scale: Tensor  # scalar, on the features' device
    bias: Tensor  # scalar
    ids_x: Tensor | None  # [n] int64; in a batch of pairs those with equal ids are not each other's negatives
    ids_y: Tensor | None  # [m] int64, equal to the ids of the images that a text belongs to; None in a batch of pairs
    counts: RowCounts
    wanted: Wanted
    one_way: bool  # only images have a cross entropy, of finding their texts


@dataclass(frozen=True)
class Blocks:
    """Computes blocks for a `Strategy`: its methods are the functions that `Strategy.statistics` and `gradients` take.

    Rows and columns have vectors in the order of the parameters of the operators in `hf_infcl.kernels`, and ids last.
    """

    scale: Tensor
    bias: Tensor
    backend: str
    paired: bool = False  # whether the positives are on the diagonal
    equal_are_positive: bool = False

    def softmax_statistics(self, x: Rows, y: Rows, diagonal: int | None) -> tuple[Statistics, Statistics]:
        (images, pivot_x, ids_x), (texts, pivot_y, ids_y) = x, y
        of_images, of_texts = kernels.softmax_statistics(
            *(images, texts, self.scale, pivot_x, pivot_y, ids_x, ids_y, diagonal if self.paired else None),
            *(self.equal_are_positive, self.backend),
        )
        return of_images.unbind(), of_texts.unbind()

    def softmax_gradients(self, x: Rows, y: Rows, diagonal: int | None, *gradients: Any) -> tuple[Tensor, ...]:
        (images, pivot_x, relative_x, share_x, ids_x), (texts, pivot_y, relative_y, share_y, ids_y) = x, y
        of_scale = kernels.softmax_gradients(
            *(images, texts, self.scale, pivot_x, pivot_y, relative_x, relative_y, share_x, share_y, ids_x, ids_y),
            *(diagonal if self.paired else None, self.equal_are_positive, *gradients, self.backend),
        )
        return (of_scale,)

    def sigmoid(self, x: Rows, y: Rows, diagonal: int | None, *gradients: Any) -> tuple[Tensor, ...]:
        (images, ids_x), (texts, ids_y) = x, y
        return kernels.sigmoid_block(
            *(images, texts, self.scale, self.bias, ids_x, ids_y, diagonal if self.paired else None),
            *(self.equal_are_positive, *gradients, self.backend),
        )


class Terms(NamedTuple):
    """The terms of the loss that this process computes, and the gradients that belong to its rows, in fp32 or fp64.

    The loss is the sum of the terms of all processes divided by the divisor. The coefficient C_ij is the derivative of
    the sum of all terms by the logit z_ij. Over all processes, the parts of a scalar's gradient add up to the
    derivative of that sum.
    """

    loss: Tensor  # scalar, the sum of this process's terms
    divisor: Tensor | float  # equal on all processes
    grad_scale: Tensor | None = None  # scalar, this process's part of Σ C_ij x_i·y_j; None if not wanted
    grad_bias: Tensor | None = None  # scalar, this process's part of Σ C_ij; None if that is 0, or not wanted
    grad_x: Tensor | None = None  # [n, D], C·Y for this process's images; None if not wanted
    grad_y: Tensor | None = None  # [m, D], Cᵀ·X for this process's texts
    grad_negatives: Tensor | None = None  # [h, D]


def number_ids(ids: Tensor, ids_of_batch: Tensor) -> Tensor:
    """[b] int32 numbers that are equal where the int64 ids are: the positions among the sorted ids of the global batch.

    Kernels that compare 64-bit ids run out of registers.
    """
    return torch.searchsorted(ids_of_batch, ids, out_int32=True)


class IdOrder:
    """Sorts rows by their ids, so that equal ids meet in few tiles. Its own ``ids`` [b] are sorted."""

    def __init__(self, ids: Tensor) -> None:
        self.ids, self._order = ids.sort(stable=True)
        places = torch.arange(len(ids), device=ids.device)
        self._inverse = torch.empty_like(places).scatter_(0, self._order, places)

    def sort(self, rows: Tensor) -> Tensor:
        return rows[self._order]

    def restore(self, rows: Tensor | None) -> Tensor | None:
        """The rows in the order before `sort`."""
        return None if rows is None else rows[self._inverse]
