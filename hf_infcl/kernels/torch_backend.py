"""Computes blocks in plain torch, tile by tile, on CPU, MPS and GPUs without Triton; see the package for the terms.

A tile has at most `TILE_ELEMENTS` logits (`TILE_ELEMENTS_GPU` on devices other than CPUs). The memory beyond inputs and
outputs is therefore constant, about six such tiles in fp32, regardless of the size of the block. Logits, statistics and
sums are fp32, or fp64 for fp64 inputs. Products in half precision accumulate in fp32.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
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


class CoefficientVectors(NamedTuple):
    """The vectors that the coefficients of the softmax loss depend on; `hf_infcl.kernels.softmax_gradients` says how.

    The relative vectors are not added to the pivots, because the sums are large and would lose digits in rounding. A
    row or column without a loss of its own has an infinite pivot or relative.
    """

    pivot_x: Tensor  # [m], the log-sum-exp of each image's logits over the whole batch or the pivot of its statistics
    pivot_y: Tensor  # [n]
    # With the pivots of the statistics [m]: those log-sum-exps minus the pivot and minus the logarithm of the weight of
    # the image's loss. None, for both, means 0.
    relative_x: Tensor | None
    relative_y: Tensor | None  # [n]
    share_x: Tensor | None  # [m], used if positives are on a diagonal or have equal ids
    share_y: Tensor | None  # [n], used if they have equal ids


class BlockGradients(NamedTuple):
    """Where the products of the coefficients go, or are added if they accumulate."""

    grad_x: Tensor | None = None  # [m, D]; None if it is not needed
    grad_y: Tensor | None = None  # [n, D]
    accumulate: bool = False


TILE_ELEMENTS = 1 << 20  # 4 MiB of fp32 logits, about a CPU core's cache; several tiles are alive at once
TILE_ELEMENTS_GPU = 1 << 24  # it takes larger products to keep a GPU busy
TILE_ROWS = 1024


def tile_shape(m: int, n: int, device_type: str = "cpu") -> tuple[int, int]:
    """Rows and columns of the tiles of an m × n block: nearly square, and wider if the block has few rows."""
    elements = TILE_ELEMENTS if device_type == "cpu" else TILE_ELEMENTS_GPU
    side = TILE_ROWS if device_type == "cpu" else 4 * TILE_ROWS
    rows = max(1, min(m, side))
    columns = max(1, min(n, elements // rows))
    return max(1, min(m, elements // columns)), columns


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """The dtype of logits and sums for features like ``x``."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def positive_logits(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    out = torch.empty(len(x), dtype=accumulate_dtype(x), device=x.device)
    for r in _chunks(len(out), 128):
        out[r] = _product(x[r], y[r].t()).diagonal()
    return out * scale


def softmax_statistics(block: Block, pivot_x: Tensor, pivot_y: Tensor) -> tuple[Tensor, Tensor]:
    several = block.equal_are_positive
    stats_x, stats_y = (pivot.new_full((3 if several else 1, len(pivot)), -torch.inf) for pivot in (pivot_x, pivot_y))
    stats_x[2:], stats_y[2:] = 0, 0
    for r, c, cosines in _tiles(block):
        logits = cosines.mul_(block.scale)
        equal = _equal(block, r, c)
        if equal is not None and not several:
            logits.masked_fill_(equal, -torch.inf)
        _positives(logits, r, c, block.diagonal)[0].fill_(-torch.inf)
        for stats, pivot, dim in ((stats_x[:, r], pivot_x[r, None], 1), (stats_y[:, c], pivot_y[None, c], 0)):
            relative = logits - pivot if dim == 1 else logits.sub_(pivot)
            if equal is not None and several:
                positives = torch.logsumexp(relative.masked_fill(~equal, -torch.inf), dim)
                stats[1] = torch.logaddexp(stats[1], positives)
                stats[2] += relative.masked_fill(~equal, 0).sum(dim)
                relative.masked_fill_(equal, -torch.inf)
            stats[0] = torch.logaddexp(stats[0], torch.logsumexp(relative, dim))
    return stats_x, stats_y


def softmax_losses(
    positive: Tensor, odds_x: Tensor, odds_y: Tensor, positive_of_columns: Tensor, odds_of_columns: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    odds = torch.stack((odds_x, odds_y))
    cross_entropies = _softplus(odds)
    lse_x, lse_y = positive + cross_entropies[0], positive_of_columns + _softplus(odds_of_columns)
    return cross_entropies.sum(), lse_x, lse_y, -torch.sigmoid(odds).sum(0)


def softmax_gradients(block: Block, vectors: CoefficientVectors, gradients: BlockGradients) -> Tensor:
    pivot_x, pivot_y, relative_x, relative_y, share_x, share_y = vectors
    scale_sums = _sums(block, gradients)
    for r, c, cosines in _tiles(block):
        logits = cosines * block.scale
        term_x, term_y = logits - pivot_x[r, None], logits.sub_(pivot_y[None, c])
        if relative_x is not None and relative_y is not None:
            term_x -= relative_x[r, None]
            term_y -= relative_y[None, c]
        term_x, term_y = term_x.exp_(), term_y.exp_()
        equal = _equal(block, r, c)
        if block.equal_are_positive and equal is not None and share_x is not None and share_y is not None:
            term_x, term_y = (
                torch.where(equal, torch.where(share < 0, share, term - share), term)
                for term, share in ((term_x, share_x[r, None]), (term_y, share_y[None, c]))
            )
        coefficients = term_x.add_(term_y)
        if equal is not None and not block.equal_are_positive:
            coefficients.masked_fill_(equal, 0)
        if share_x is not None:
            positives, rows = _positives(coefficients, r, c, block.diagonal)
            positives.copy_(share_x[rows])
        scale_sums.append(cosines.mul_(coefficients).sum())
        _accumulate(coefficients, block, r, c, gradients)
    return _sum(scale_sums)


def sigmoid_block(block: Block, bias: Tensor, gradients: BlockGradients) -> tuple[Tensor, Tensor, Tensor]:
    scale_sums = _sums(block, gradients)
    loss_sums, bias_sums = [*scale_sums], [*scale_sums]
    for r, c, cosines in _tiles(block):
        logits = cosines * block.scale + bias
        equal = _equal(block, r, c)
        positives, _ = _positives(logits, r, c, block.diagonal)
        negated = -positives  # -t·z of the positives; that of the negatives is z
        if equal is not None:
            several = block.equal_are_positive
            logits = torch.where(equal, -logits, logits) if several else logits.masked_fill_(equal, -torch.inf)
        positives.copy_(negated)
        loss_sums.append(_softplus(logits).sum())
        coefficients = logits.sigmoid_()
        positives.neg_()
        if equal is not None and block.equal_are_positive:
            coefficients = torch.where(equal, -coefficients, coefficients)
        bias_sums.append(coefficients.sum())
        scale_sums.append(cosines.mul_(coefficients).sum())
        _accumulate(coefficients, block, r, c, gradients)
    return _sum(loss_sums), _sum(bias_sums), _sum(scale_sums)


def _softplus(t: Tensor) -> Tensor:
    """log(1 + exp(t)), with full relative precision however small it is."""
    # Above its threshold F.softplus returns its input. With the default of 20, fp64 would lose six digits.
    return F.softplus(t, threshold=40)


def _sums(block: Block, gradients: BlockGradients) -> list[Tensor]:
    """Where the sums of the tiles are collected, beginning with zero; clears the gradients unless they accumulate."""
    for gradient in gradients[:2]:
        if gradient is not None and not gradients.accumulate:
            gradient.zero_()
    return [torch.zeros((), dtype=accumulate_dtype(block.x), device=block.x.device)]


def _sum(sums_of_tiles: list[Tensor]) -> Tensor:
    """The sum of the tiles' sums. Added up one after another, 4,096 equal sums would have an error of 2e-5 in fp32."""
    return torch.stack(sums_of_tiles).sum()


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _tiles(block: Block) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yields row slice, column slice and products x_i·y_j of each tile. The caller may overwrite the products."""
    x, y = block.x, block.y
    rows, columns = tile_shape(len(x), len(y), x.device.type)
    for r in _chunks(len(x), rows):
        for c in _chunks(len(y), columns):
            yield r, c, _product(x[r], y[c].t())


def _equal(block: Block, r: slice, c: slice) -> Tensor | None:
    """Which cells of a tile have equal ids, bool; None without ids."""
    return None if block.ids_x is None or block.ids_y is None else block.ids_x[r, None] == block.ids_y[None, c]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the precision of its accumulator."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)  # tensor cores: bf16 or fp16 in, fp32 out
    return a.float() @ b.float()


def _accumulate(coefficients: Tensor, block: Block, r: slice, c: slice, gradients: BlockGradients) -> None:
    x, y, (grad_x, grad_y, _) = block.x[r], block.y[c], gradients
    if x.is_cuda:  # for tensor cores
        coefficients = coefficients.to(x.dtype)
    if grad_x is not None:
        grad_x[r] += _product(coefficients, y if x.is_cuda else y.to(coefficients.dtype))
    if grad_y is not None:
        grad_y[c] += _product(coefficients.t(), x if x.is_cuda else x.to(coefficients.dtype))


def _positives(tile: Tensor, r: slice, c: slice, diagonal: int | None) -> tuple[Tensor, slice]:
    """A view of the tile's positives, and the rows of the block that contain them; both empty if there are none."""
    if diagonal is None:
        return tile[:0, 0], slice(0, 0)
    offset = r.start + diagonal - c.start
    if not -len(tile) < offset < tile.shape[1]:
        return tile[:0, 0], slice(0, 0)
    positives = tile.diagonal(offset)
    start = r.start + max(0, -offset)
    return positives, slice(start, start + len(positives))
