"""Blocks as Triton kernels: for NVIDIA GPUs from compute capability 8.0 and for ROCm. Device code: `triton_kernels`.

Memory beyond inputs, outputs and O(m + n) vectors is `WORKSPACE_BYTES` at most, apart from what tensor cores need: rows
that are not 16-byte aligned are copied, and fp32 features split (below).

fp32 features, and with them the gradients' products, are as precise as torch's own: each number is the sum of three
bfloat16 numbers (all 24 bits), or of two where `torch.set_float32_matmul_precision` or Trainer's ``tf32`` option allow
TF32, multiplied on tensor cores pair by pair, the least products dropped. That is 6 or 3 times the work of bf16
features, and as many times their size in copies of the features.

Under `torch.are_deterministic_algorithms_enabled()` no sum depends on the order of programs; the softmax's statistics
then take two products instead of one, a third of the time more in all.

Nothing is tuned at run time: tiles are a function of the architecture. They were measured on Hopper; on others they are
what fits, compiled in the tests for Ampere and for AMD's CDNA 3, but never run. On Hopper, with releases of Triton that
are known to compile them, `hopper_kernels` make the coefficients of large blocks of bf16 or fp16 features without ids.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import triton_kernels

WORKSPACE_BYTES = 256 << 20  # for coefficients; twice as much is 0 to 5% faster on an H200
CHUNK_COLUMNS = 16384
EXACT_SUM = 2048  # addends in one product for fp32: the error of tensor cores' sums grows with their length
NEAR_PAYS = 1 << 25  # logits from which on saved exponentials are worth a second launch
HOPPER_PAYS = 1 << 27  # logits from which on `hopper_kernels` are faster
GLUON = ("3.6.", "3.7.", "3.8.", "3.9.")  # releases of Triton in which they compile: Gluon is experimental

INTERPRETED = triton.knobs.runtime.interpret
# Pairs of parts (of x, of y), largest product last: tensor cores round each addition down, by what the sum then is.
_PAIRS = {1: ((0, 0),), 2: ((1, 0), (0, 1), (0, 0)), 3: ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))}


def positive_logits(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    with _on_device(x):
        x, y, parts = _operands(x, y)
        c = _configuration(x)
        out = torch.empty(len(x), dtype=torch.float32, device=x.device)
        triton_kernels.positives[(_cdiv(len(x), c.tile),)](
            _boxes(x, c.tile, c.step), _boxes(y, c.tile, c.step), scale, out, len(x),
            K=c.k, B=c.tile, BK=c.step, num_warps=c.warps, num_stages=c.stages, enable_fp_fusion=parts == 1,
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
        m, n = len(x), len(y)
        ids = _classes(ids_x, ids_y)
        positive_x, positive_y = positive_x.contiguous(), positive_y.contiguous()
        diagonal = triton_kernels.NOWHERE.value if diagonal is None else diagonal
        c, fused = _configuration(x), parts == 1
        if torch.are_deterministic_algorithms_enabled():
            # As if every sum had overflowed: all of them are then taken in a fixed order.
            sum_x, sum_y = torch.full((m + n,), torch.inf, dtype=torch.float32, device=x.device).split((m, n))
        else:
            sum_x, sum_y = torch.zeros(m + n, dtype=torch.float32, device=x.device).split((m, n))
            tiles, blocks, run = c.split(m, n, longest=64)
            # One launch for programs whose references lie near each other, one for the rest; or one for all.
            forms = ((True, True), (False, True)) if fused and m * n >= NEAR_PAYS else ((False, False),)
            for near, gated in forms:
                triton_kernels.softmax_sums[(_cdiv(tiles, run) * blocks,)](
                    _boxes(x, c.tile, c.step), _boxes(y, c.tile, c.step), sum_x, sum_y, positive_x, positive_y, scale,
                    *ids, m, n, diagonal, tiles, blocks, run,
                    NEAR=near, GATED=gated, SPAN=(1 << (run - 1).bit_length()) * c.tile, EXACT=not fused,
                    IDS=ids_x is not None, K=c.k, BM=c.tile, BN=c.tile, BK=c.step, GROUP=33, WARPS=c.warps,
                    num_warps=c.warps, num_stages=c.stages, enable_fp_fusion=fused,
                )  # fmt: skip
        odds_x, odds_y = torch.empty_like(positive_x), torch.empty_like(positive_y)
        triton_kernels.log_odds[(_cdiv(m, c.tile) + _cdiv(n, c.tile),)](
            _boxes(x, c.tile, c.step), _boxes(y, c.tile, c.step), sum_x, sum_y, positive_x, positive_y, odds_x, odds_y,
            scale, *ids, m, n, diagonal,
            IDS=ids_x is not None, K=c.k, B=c.tile, BK=c.step,
            num_warps=c.warps, num_stages=c.stages, enable_fp_fusion=fused,
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
        own_coefficient = lse_x if own_coefficient is None else own_coefficient  # never read
        lse_x, lse_y, own_coefficient = (t.contiguous() for t in (lse_x, lse_y, own_coefficient))
        for chunk in _chunks(x, y, ids_x, ids_y, diagonal):
            vectors = lse_x[chunk.rows], lse_y[chunk.columns], own_coefficient[chunk.rows], scale
            if chunk.on_hopper is not None:
                chunk.on_hopper("softmax_coefficients", *vectors)
            else:
                chunk.plain("softmax_coefficients", *vectors, EXACT=len(chunk.x) > 1)
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
            if sums is None:  # no later chunk is larger; rows of one alignment, for which kernels are compiled
                sums = torch.zeros(3, _cdiv(chunk.tiles, 4) * 4, dtype=torch.float32, device=x.device)
            if chunk.on_hopper is not None:
                chunk.on_hopper("sigmoid_coefficients", *sums, scale, bias)
            else:
                chunk.plain("sigmoid_coefficients", *sums, scale, bias, BOLD=True)
            chunk.plain("sigmoid_coefficients", *sums, scale, bias, BOLD=False)
            chunk.accumulate(grad_x, grad_y)
        assert sums is not None
        loss, total = sums[:2].sum(1).unbind()
        return loss, total.clone()  # outputs of an operator do not share memory


@dataclass(frozen=True)
class _Launch:
    """A launch of one module's kernels: what all of them take for a chunk."""

    kernels: ModuleType
    grid: tuple[int]
    matrices: tuple[Any, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def __call__(self, kernel: str, *vectors: Tensor, **constants: Any) -> None:
        launch = getattr(self.kernels, kernel)[self.grid]
        launch(*self.matrices, *vectors, *self.arguments, **constants, **self.constants)


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
    plain: _Launch
    on_hopper: _Launch | None

    def accumulate(self, grad_x: Tensor | None, grad_y: Tensor | None) -> None:
        """The products of the coefficients, onto the gradients."""
        parts = len(self.coefficients)
        for a, b in _PAIRS[parts]:
            c = self.coefficients[a]
            # Beside the product of the largest parts the others, and their errors, are small.
            longest = EXACT_SUM if parts > 1 and a == b == 0 else 1 << 30
            if grad_x is not None:
                _add_product(grad_x[self.rows], c, self.y[b], 1 / self.unit, longest)
            if grad_y is not None:
                _add_product(grad_y[self.columns], c.t(), self.x[b], 1 / self.unit, longest)


def _chunks(x: Tensor, y: Tensor, ids_x: Tensor | None, ids_y: Tensor | None, diagonal: int | None) -> Iterator[_Chunk]:
    dimension = x.shape[1]
    x, y, parts = _operands(x, y)
    ids_x, ids_y = _classes(ids_x, ids_y)
    m, n = len(x), len(y)
    c = _configuration(x)
    columns = _even(n, CHUNK_COLUMNS, c.tile)
    most = WORKSPACE_BYTES // (columns * parts * x.element_size())
    rows = _even(m, max(c.tile, most // c.tile * c.tile), c.tile)
    workspace = torch.empty(parts, rows, columns, dtype=x.dtype, device=x.device)
    # The smallest coefficients that count lie below the range of float16, whose largest number is 65504.
    gain = 14.0 if x.dtype == torch.float16 else 0.0
    constants = {
        "PARTS": parts, "GAIN": gain, "IDS": ids_x is not None,
        "K": c.k, "BM": c.tile, "BN": c.tile, "BK": c.step, "STRIP": c.tile // 2, "GROUP": 16,
        "num_warps": c.warps, "num_stages": c.stages, "enable_fp_fusion": parts == 1,
    }  # fmt: skip
    hopper = _hopper_kernels(x.device) if parts == 1 and ids_x is None and m * n >= HOPPER_PAYS else None
    width = x.shape[1] // len(_PAIRS[parts])
    x_at, y_at = ([pair[side] for pair in _PAIRS[parts]] for side in (0, 1))
    for row in range(0, m, rows):
        for column in range(0, n, columns):
            r, s = slice(row, min(row + rows, m)), slice(column, min(column + columns, n))
            of_x, of_y = x[r], y[s]
            height, length = len(of_x), len(of_y)
            tiles, blocks, run = c.split(height, length, longest=16, together=1 if hopper is None else 2)
            ids = (None, None) if ids_x is None or ids_y is None else (ids_x[r], ids_y[s])
            offset = triton_kernels.NOWHERE.value if diagonal is None else diagonal + row - column
            matrices = (
                _boxes(of_x, c.tile, c.step),
                _boxes(of_y, c.tile, c.step),
                _boxes(workspace.view(parts * rows, columns), c.tile, c.tile // 2),
            )
            # Both number their programs' work alike: sigmoid's second launch reads what the first has left.
            plain = _Launch(
                kernels=triton_kernels,
                grid=(_cdiv(tiles, run) * blocks,),
                matrices=matrices,
                arguments=(*ids, height, length, offset, tiles, blocks, run, rows),
                constants=constants,
            )
            on_hopper = None
            if hopper is not None:
                pairs = _cdiv(tiles, 2 * run) * blocks
                on_hopper = _Launch(
                    kernels=hopper,
                    grid=(min(pairs, c.slots // 2),),  # one program for each processor, where two of the plain ones run
                    matrices=tuple(map(hopper.described, matrices)),
                    arguments=(height, length, offset, pairs, tiles, blocks, run),
                    constants={
                        "GAIN": gain, "STEPS": _cdiv(x.shape[1], c.step), "GROUP": constants["GROUP"],
                        "num_warps": c.warps, "enable_fp_fusion": True,
                    },
                )  # fmt: skip
            yield _Chunk(
                rows=r,
                columns=s,
                x=[of_x[:, width * i :][:, :dimension] for i in map(x_at.index, range(parts))],
                y=[of_y[:, width * i :][:, :dimension] for i in map(y_at.index, range(parts))],
                coefficients=workspace[:, :height, :length],
                unit=2.0**gain,
                tiles=tiles * blocks,
                plain=plain,
                on_hopper=on_hopper,
            )


def _add_product(out: Tensor, a: Tensor, b: Tensor, alpha: float, longest: int) -> None:
    """out += alpha · a·b in fp32, from tensor cores. Sums of more than ``longest`` addends are broken up."""
    for start in range(0, len(b), longest):
        left, right = a[:, start : start + longest], b[start : start + longest]
        if out.is_cuda:
            torch.ops.aten.addmm.dtype_out(out, left, right, torch.float32, beta=1, alpha=alpha, out=out)
        else:
            out.addmm_(left.float(), right.float(), alpha=alpha)


def _operands(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, int]:
    """Features as tensor cores and descriptors take them, and of how many parts each number is the sum.

    With several parts, one product of the concatenations along D is the sum of the products of all pairs of parts.
    """
    if x.dtype != torch.float32:
        return _aligned(x), _aligned(y), 1
    # Not get_float32_matmul_precision(), which raises where this has been set by its present name.
    parts = 2 if torch.backends.cuda.matmul.fp32_precision == "tf32" else 3
    of_x, of_y = zip(*_PAIRS[parts], strict=True)
    return _split(x, parts, of_x), _split(y, parts, of_y), parts


def _split(t: Tensor, parts: int, order: tuple[int, ...]) -> Tensor:
    """[m, D] fp32 to [m, len(order)·D'] bfloat16 with D' a multiple of 8: parts of t, the largest first, by order."""
    m, dimension = t.shape
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    out = torch.zeros(m, len(order), _cdiv(dimension, 8) * 8, dtype=dtype, device=t.device)
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
    out = t.new_zeros(m, _cdiv(dimension, unit) * unit)
    out[:, :dimension] = t
    return out


def _classes(ids_x: Tensor | None, ids_y: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """int32 numbers, equal where the int64 ids are: kernels that compare 64 bits run out of registers."""
    if ids_x is None or ids_y is None:
        return None, None
    ids, order = torch.cat((ids_x, ids_y)).sort()
    ranks = torch.zeros_like(ids, dtype=torch.int32)
    ranks[1:] = (ids[1:] != ids[:-1]).cumsum(0)
    ids_x, ids_y = torch.empty_like(ranks).scatter_(0, order, ranks).split((len(ids_x), len(ids_y)))
    return ids_x, ids_y


def _boxes(t: Tensor, rows: int, columns: int) -> Any:
    """A matrix to be read or written in boxes: from Hopper on by the tensor memory accelerator."""
    if _has_descriptors(t.device):
        return TensorDescriptor.from_tensor(t, [rows, columns])
    # Triton emulates descriptors elsewhere, but knows nothing of their alignment: it would load single elements.
    return t, len(t), t.shape[1], t.stride(0)


@functools.lru_cache
def _has_descriptors(device: torch.device) -> bool:
    return INTERPRETED or (torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)  # Triton's own takes microseconds of the host, a dozen times a block


def _even(length: int, most: int, unit: int) -> int:
    """The size of chunks: at most ``most``, a multiple of ``unit``, all about equal."""
    count = _cdiv(length, most)
    return _cdiv(_cdiv(length, count), unit) * unit


def _on_device(t: Tensor) -> Any:
    return torch.cuda.device_of(t)  # Triton launches on the current device; of a CPU tensor: nothing


@dataclass(frozen=True)
class _Configuration:
    tile: int  # rows and columns
    step: int  # along D
    warps: int
    stages: int
    slots: int  # programs that run at the same time
    k: int  # the length of products: D, or more

    @functools.lru_cache  # noqa: B019 (configurations live as long as the module)
    def split(self, m: int, n: int, longest: int, together: int = 1) -> tuple[int, int, int]:
        """Row tiles, column blocks, and row tiles per program: so that the last wave of programs is full.

        ``together``: how many programs' work, of one column block, starts and ends as one.
        """
        tiles, blocks = _cdiv(m, self.tile), _cdiv(n, self.tile)

        def time(run: int) -> int:  # a program costs a tile to start
            return _cdiv(blocks * _cdiv(tiles, run * together), self.slots // together) * (run * together + 1)

        return tiles, blocks, min(range(1, min(longest, _cdiv(tiles, together)) + 1), key=time)


@functools.lru_cache
def _hopper_kernels(device: torch.device) -> ModuleType | None:
    """`hopper_kernels`, if they run on this device."""
    if INTERPRETED or torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    return importlib.import_module(".hopper_kernels", __package__) if triton.__version__.startswith(GLUON) else None


def _configuration(x: Tensor) -> _Configuration:
    return _configurations(x.device, x.shape[1])


@functools.lru_cache
def _configurations(device: torch.device, k: int) -> _Configuration:
    if INTERPRETED:
        return _Configuration(tile=32, step=32, warps=1, stages=1, slots=4, k=k)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if torch.version.hip is not None:
        return _Configuration(tile=64, step=64, warps=4, stages=2, slots=4 * processors, k=max(k, 65))
    if torch.cuda.get_device_capability(device)[0] < 9:
        return _Configuration(tile=128, step=32, warps=8, stages=4, slots=processors, k=max(k, 33))
    # From Hopper on. Triton 3.6 cannot pipeline loops of one step: short features are read into the zeros beyond.
    return _Configuration(tile=128, step=64, warps=4, stages=3, slots=2 * processors, k=max(k, 65))
