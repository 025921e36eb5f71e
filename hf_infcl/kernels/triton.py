"""Blocks as Triton kernels: for NVIDIA GPUs from compute capability 8.0 and for ROCm. Device code: `triton_kernels`.

Memory beyond inputs, outputs and O(m + n) vectors is `WORKSPACE_BYTES` at most, apart from what tensor cores need: rows
that are not 16-byte aligned are copied, and fp32 features split (below).

Precision of fp32 features follows `torch.get_float32_matmul_precision()` by its documented meaning, and with it so do
the gradients' products: each number is the sum of three (``"highest"``, all 24 bits), two (``"high"``) or one
(``"medium"``) bfloat16 numbers, multiplied on tensor cores pair by pair, the least products dropped. That is 6, 3 or 1
times the work of bf16 features, and as many times their size in copies of the features.

Under `torch.are_deterministic_algorithms_enabled()` no sum depends on the order of programs; the softmax's statistics
then take two products instead of one.

Nothing is tuned at run time: tile shapes are functions of the architecture and of D.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import triton_kernels

WORKSPACE_BYTES = 256 << 20  # for coefficients; twice as much is 0 to 5% faster on an H200
CHUNK_COLUMNS = 16384

INTERPRETED = triton.knobs.runtime.interpret
# Pairs of parts (of x, of y), largest product first.
_PAIRS = {1: ((0, 0),), 2: ((0, 0), (0, 1), (1, 0)), 3: ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))}
_PARTS = {"highest": 3, "high": 2, "medium": 1}


def positive_logits(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    with _on_device(x):
        x, y = _operands(x, y)[:2]
        c = _configuration(x)
        out = torch.empty(len(x), dtype=torch.float32, device=x.device)
        triton_kernels.positives[(triton.cdiv(len(x), c.square),)](
            _tiles(x, c.square, c.bk), _tiles(y, c.square, c.bk), scale, out, len(x),
            K=x.shape[1], B=c.square, BK=c.bk, num_warps=c.square_warps, num_stages=c.stages,
        )  # fmt: skip
        return out


def softmax_statistics(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    positive_x: Tensor,
    positive_y: Tensor,
    ids_x: Tensor | None = None,
    ids_y: Tensor | None = None,
    diagonal: int | None = None,
) -> tuple[Tensor, Tensor]:
    with _on_device(x):
        x, y, parts = _operands(x, y)
        m, n, k = len(x), len(y), x.shape[1]
        ids = _vectors(ids_x, ids_y)
        positive_x, positive_y = _vectors(positive_x, positive_y)
        diagonal = triton_kernels.NOWHERE.value if diagonal is None else diagonal
        c = _configuration(x)
        if torch.are_deterministic_algorithms_enabled():
            # As if every sum had overflowed: all of them are then taken in a fixed order.
            sum_x, sum_y = torch.full((m + n,), torch.inf, device=x.device).split((m, n))
        else:
            sum_x, sum_y = torch.zeros(m + n, device=x.device).split((m, n))
            tiles, blocks = triton.cdiv(m, c.bm), triton.cdiv(n, c.bn)
            run = _run(tiles, blocks, c.resident * _processors(x.device))
            triton_kernels.softmax_sums[(triton.cdiv(tiles, run) * blocks,)](
                _tiles(x, c.bm, c.bk), _tiles(y, c.bn, c.bk), sum_x, sum_y, positive_x, positive_y, scale, *ids,
                m, n, diagonal, tiles, blocks, run,
                EXACT=parts > 1, IDS=ids_x is not None, K=k, BM=c.bm, BN=c.bn, BK=c.bk, GROUP=c.group, WARPS=c.warps,
                num_warps=c.warps, num_stages=c.stages, enable_fp_fusion=parts == 1,
            )  # fmt: skip
        odds_x, odds_y = torch.empty(m + n, device=x.device).split((m, n))
        b = c.square
        triton_kernels.log_odds[(triton.cdiv(m, b) + triton.cdiv(n, b),)](
            _tiles(x, b, c.bk), _tiles(y, b, c.bk), sum_x, sum_y, positive_x, positive_y, odds_x, odds_y, scale, *ids,
            m, n, diagonal,
            IDS=ids_x is not None, K=k, B=b, BK=c.bk,
            num_warps=c.square_warps, num_stages=c.stages, enable_fp_fusion=parts == 1,
        )  # fmt: skip
        return odds_x, odds_y


def softmax_gradients(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    lse_x: Tensor,
    lse_y: Tensor,
    own_coefficient: Tensor | None,
    ids_x: Tensor | None = None,
    ids_y: Tensor | None = None,
    diagonal: int | None = None,
    grad_x: Tensor | None = None,
    grad_y: Tensor | None = None,
) -> None:
    with _on_device(x):
        own_coefficient = lse_x if own_coefficient is None else own_coefficient
        lse_x, lse_y, own_coefficient = _vectors(lse_x, lse_y, own_coefficient)
        for chunk in _chunks(x, y, ids_x, ids_y, diagonal):
            rows, columns = chunk.rows, chunk.columns
            triton_kernels.softmax_coefficients[chunk.grid](
                *chunk.matrices, lse_x[rows], lse_y[columns], own_coefficient[rows], scale, *chunk.arguments,
                **chunk.constants,
            )  # fmt: skip
            chunk.accumulate(grad_x, grad_y)


def sigmoid_block(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    ids_x: Tensor | None = None,
    ids_y: Tensor | None = None,
    diagonal: int | None = None,
    grad_x: Tensor | None = None,
    grad_y: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    with _on_device(x):
        sums: Tensor | None = None
        for chunk in _chunks(x, y, ids_x, ids_y, diagonal):
            if sums is None:  # no later chunk is larger
                sums = torch.zeros(2, chunk.tiles, device=x.device)
            triton_kernels.sigmoid_coefficients[chunk.grid](
                *chunk.matrices, sums[0], sums[1], scale, bias, *chunk.arguments, **chunk.constants
            )
            chunk.accumulate(grad_x, grad_y)
        assert sums is not None
        loss, total = sums.sum(1).unbind()
        return loss, total.clone()  # outputs of an operator do not share memory


@dataclass(frozen=True)
class _Chunk:
    """A part of the block whose coefficients fit the workspace."""

    rows: slice
    columns: slice
    x: list[Tensor]  # parts of the rows' features, [m, D]
    y: list[Tensor]  # [n, D]
    coefficients: Tensor  # [parts, m, n]
    unit: float  # what a coefficient of 1 is stored as
    tiles: int
    # of the kernel
    grid: tuple[int]
    matrices: tuple[TensorDescriptor, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def accumulate(self, grad_x: Tensor | None, grad_y: Tensor | None) -> None:
        """The products of the coefficients, onto the gradients."""
        for a, b in _PAIRS[len(self.coefficients)]:
            c = self.coefficients[a]
            if grad_x is not None:
                _add_product(grad_x[self.rows], c, self.y[b], 1 / self.unit)
            if grad_y is not None:
                _add_product(grad_y[self.columns], c.t(), self.x[b], 1 / self.unit)


def _chunks(x: Tensor, y: Tensor, ids_x: Tensor | None, ids_y: Tensor | None, diagonal: int | None) -> Iterator[_Chunk]:
    dimension = x.shape[1]
    x, y, parts = _operands(x, y)
    ids_x, ids_y = _vectors(ids_x, ids_y)
    m, n, k = len(x), len(y), x.shape[1]
    c = _configuration(x)
    b = c.square
    columns = _even(n, CHUNK_COLUMNS, b)
    most = WORKSPACE_BYTES // (columns * parts * x.element_size())
    rows = _even(m, max(b, most // b * b), b)
    workspace = torch.empty(parts, rows, columns, dtype=x.dtype, device=x.device)
    # The smallest coefficients that count lie below the range of float16, whose largest number is 65504.
    gain = 14.0 if x.dtype == torch.float16 else 0.0
    constants = {
        "EXACT": parts > 1, "PARTS": parts, "GAIN": gain, "IDS": ids_x is not None,
        "K": k, "BM": b, "BN": b, "BK": c.bk, "GROUP": c.square_group,
        "num_warps": c.square_warps, "num_stages": c.stages, "enable_fp_fusion": parts == 1,
    }  # fmt: skip
    width = k // len(_PAIRS[parts])
    x_at, y_at = ([pair[side] for pair in _PAIRS[parts]] for side in (0, 1))
    for row in range(0, m, rows):
        for column in range(0, n, columns):
            r, s = slice(row, min(row + rows, m)), slice(column, min(column + columns, n))
            of_x, of_y = x[r], y[s]
            height, length = len(of_x), len(of_y)
            tiles, blocks = triton.cdiv(height, b), triton.cdiv(length, b)
            run = _run(tiles, blocks, c.square_resident * _processors(x.device))
            ids = None if ids_x is None else ids_x[r], None if ids_y is None else ids_y[s]
            offset = triton_kernels.NOWHERE.value if diagonal is None else diagonal + row - column
            yield _Chunk(
                rows=r,
                columns=s,
                x=[of_x[:, width * i :][:, :dimension] for i in map(x_at.index, range(parts))],
                y=[of_y[:, width * i :][:, :dimension] for i in map(y_at.index, range(parts))],
                coefficients=workspace[:, :height, :length],
                unit=2.0**gain,
                tiles=tiles * blocks,
                grid=(triton.cdiv(tiles, run) * blocks,),
                matrices=(
                    _tiles(of_x, b, c.bk),
                    _tiles(of_y, b, c.bk),
                    _tiles(workspace.view(parts * rows, columns), b, b // 2),
                ),
                arguments=(*ids, height, length, offset, tiles, blocks, run, rows),
                constants=constants,
            )


def _add_product(out: Tensor, a: Tensor, b: Tensor, alpha: float) -> None:
    """out += alpha · a·b in fp32, from tensor cores."""
    if out.is_cuda:
        torch.ops.aten.addmm.dtype_out(out, a, b, torch.float32, beta=1, alpha=alpha, out=out)
    else:
        out.addmm_(a.float(), b.float(), alpha=alpha)


def _operands(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, int]:
    """Features as tensor cores and descriptors take them, and of how many parts each number is the sum.

    With several parts, one product of the concatenations along D is the sum of the products of all pairs of parts.
    """
    if x.dtype != torch.float32:
        return _aligned(x), _aligned(y), 1
    parts = _PARTS[torch.get_float32_matmul_precision()]
    of_x, of_y = zip(*_PAIRS[parts], strict=True)
    return _split(x, parts, of_x), _split(y, parts, of_y), parts


def _split(t: Tensor, parts: int, order: tuple[int, ...]) -> Tensor:
    """[m, D] fp32 to [m, len(order)·D'] bfloat16 with D' a multiple of 8: parts of t, the largest first, by order."""
    m, dimension = t.shape
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    out = torch.zeros(m, len(order), triton.cdiv(dimension, 8) * 8, dtype=dtype, device=t.device)
    for part in range(parts):
        rounded = t.to(torch.bfloat16)
        for i, wanted in enumerate(order):
            if wanted == part:
                out[:, i, :dimension] = rounded
        t = t - rounded
    return out.view(m, -1)


def _aligned(t: Tensor) -> Tensor:
    """``t`` itself if its rows lie as descriptors need them (16-byte aligned), or else a copy padded with zeros."""
    if INTERPRETED and t.dtype == torch.bfloat16:
        t = t.float()  # which the interpreter cannot multiply
    m, dimension = t.shape
    unit = 16 // t.element_size()
    if t.stride(1) == 1 and t.stride(0) >= dimension and t.stride(0) % unit == 0 and t.data_ptr() % 16 == 0:
        return t
    out = t.new_zeros(m, triton.cdiv(dimension, unit) * unit)
    out[:, :dimension] = t
    return out


def _vectors(*tensors: Tensor | None) -> Any:
    return [None if t is None else t.contiguous() for t in tensors]


def _tiles(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(t, [rows, columns])


def _even(length: int, most: int, unit: int) -> int:
    """The size of chunks: at most ``most``, a multiple of ``unit``, all about equal."""
    count = triton.cdiv(length, most)
    return triton.cdiv(triton.cdiv(length, count), unit) * unit


@functools.lru_cache
def _run(tiles: int, blocks: int, slots: int) -> int:
    """Row tiles per program, at most 64: so that the last wave of programs is full. A program costs a tile to start."""
    return min(range(1, min(64, tiles) + 1), key=lambda run: -(-blocks * -(-tiles // run) // slots) * (run + 1))


@functools.lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _on_device(t: Tensor) -> Any:
    return torch.cuda.device_of(t)  # Triton launches on the current device; of a CPU tensor: nothing


@dataclass(frozen=True)
class _Configuration:
    # softmax_sums
    bm: int
    bn: int
    warps: int
    resident: int  # programs per multiprocessor
    group: int
    # the other kernels: square tiles
    square: int
    square_warps: int
    square_resident: int
    square_group: int
    # all
    bk: int
    stages: int


def _configuration(x: Tensor) -> _Configuration:
    return _configurations(x.device, x.shape[1])


@functools.lru_cache
def _configurations(device: torch.device, k: int) -> _Configuration:
    if INTERPRETED:
        return _Configuration(
            32, 32, 1, 1, 2, square=32, square_warps=1, square_resident=1, square_group=2, bk=32, stages=1
        )
    square = {"square": 128, "square_warps": 4, "square_resident": 2, "square_group": 12}
    if torch.version.hip is not None:
        return _Configuration(128, 128, 8, 2, 33, **square | {"square_warps": 8}, bk=64, stages=2)
    if torch.cuda.get_device_capability(device)[0] < 9:
        return _Configuration(128, 128, 8, 1, 33, **square | {"square_warps": 8}, bk=32, stages=4)
    if k <= 640:
        return _Configuration(128, 128, 4, 2, 33, **square, bk=64, stages=3)
    return _Configuration(256, 128, 8, 1, 33, **square, bk=64, stages=3)
