"""Computes blocks with Triton kernels, on NVIDIA GPUs of compute capability 8.0 or higher and on ROCm.

The device code in `triton_tiles`, `triton_softmax` and `triton_sigmoid` explains the algorithm. On Hopper, with the
releases of Triton that are known to compile them, `hopper_kernels` compute large blocks of bf16 or fp16 features.

Beyond inputs, outputs and vectors of size O(m + n), at most `WORKSPACE_BYTES` of memory is used, plus copies of
features whose rows are not 16-byte aligned, and of fp32 features, which are split as follows.

Results for fp32 features, gradients included, are as precise as torch's own. Each fp32 element becomes the sum of three
bfloat16 numbers (all 24 bits), or of two if `torch.set_float32_matmul_precision` or Trainer's ``tf32`` option allows
TF32. Tensor cores multiply these parts pair by pair; the pairs with the smallest products are dropped. That takes 6 or
3 times the work of bf16 features, and copies of the features that are as many times their size.

If `torch.are_deterministic_algorithms_enabled()`, no sum depends on the order of programs. The statistics of the
softmax loss then take two products instead of one, and the loss as a whole a third more time.
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

from . import triton_sigmoid, triton_softmax, triton_tiles
from .torch_backend import Block, BlockGradients
from .triton_tiles import INTERPRETED, PAIRS, Operands, boxes, cdiv

WORKSPACE_BYTES = 256 << 20  # for coefficients; twice as much would be 0 to 5% faster on an H200
# This workspace holds chunks of 8,192 × 16,384 coefficients in half precision. The products of each chunk read and
# write the gradients of its rows and columns, which is the least traffic if chunks are nearly square.
CHUNK_COLUMNS = 16384
LOSSES_AT_A_TIME = 2048  # images or texts whose cross entropies are in registers at a time
EXACT_SUM = 2048  # addends of one product for fp32, because the error of sums on tensor cores grows with their length
NEAR_PAYS = 1 << 25  # the number of logits from which the saved exponentials are worth a second launch
HOPPER_PAYS = 1 << 27  # the number of logits from which `hopper_kernels` are faster
HOPPER_SUMS_PAY = 512  # the dimension from which their sums are faster; at 256 they take a quarter longer
GLUON = ("3.6.", "3.7.", "3.8.", "3.9.")  # releases of Triton that compile `hopper_kernels`; Gluon is experimental

# The maximum number of row tiles of a program. The statistics keep column sums for the whole band, so longer bands need
# fewer atomics. The coefficients keep no column sums, and shorter bands fill the last wave better.
LONGEST_OF_STATISTICS, LONGEST_OF_COEFFICIENTS = 64, 16
# The number of column blocks that share row tiles in the L2 cache. A Hopper GPU runs 264 programs at a time: 8 bands of
# each of 33 blocks. It is smaller for the coefficients, because their output takes up a part of the cache.
GROUP_OF_STATISTICS, GROUP_OF_COEFFICIENTS = 33, 16


# ---- The operators ----


def positive_logits(block: Block) -> Tensor:
    with _on_device(block.x):
        m, operands = len(block.x), Operands.of(block)
        tile = operands.tiling.tile
        out = torch.empty(m, dtype=torch.float32, device=block.x.device)
        triton_softmax.positives[(cdiv(m, tile),)](
            *operands.features(), block.scale, out, m, B=tile, **operands.constants()
        )
        return out


def softmax_statistics(block: Block, positive_x: Tensor, positive_y: Tensor) -> tuple[Tensor, Tensor]:
    with _on_device(block.x):
        return _softmax_statistics(Operands.of(block), block.scale, (positive_x, positive_y))


def softmax_losses(
    positive: Tensor, odds_x: Tensor, odds_y: Tensor, positive_of_columns: Tensor, odds_of_columns: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with _on_device(positive):
        given = [t.contiguous() for t in (positive, odds_x, odds_y, positive_of_columns, odds_of_columns)]
        loss, lse_x, coefficient = positive.new_empty(()), torch.empty_like(given[0]), torch.empty_like(given[0])
        lse_y = torch.empty_like(given[3])
        outputs, lengths = (loss, lse_x, lse_y, coefficient), (len(positive), len(positive_of_columns))
        triton_softmax.softmax_losses[(1,)](*given, *outputs, *lengths, B=LOSSES_AT_A_TIME, num_warps=8)
        return outputs


def softmax_gradients(
    block: Block, lse_x: Tensor, lse_y: Tensor, positive_coefficient: Tensor | None, gradients: BlockGradients
) -> Tensor:
    with _on_device(block.x):
        positives = lse_x if positive_coefficient is None else positive_coefficient  # never read without a diagonal
        vectors = (lse_x, lse_y), (None, None), (positives, None)
        return _softmax_gradients(Operands.of(block), block.scale, *vectors, gradients)


def sigmoid_block(block: Block, bias: Tensor, gradients: BlockGradients) -> tuple[Tensor, Tensor, Tensor]:
    with _on_device(block.x):
        sums: Tensor | None = None
        for chunk in _chunks(Operands.of(block), gradients):
            if sums is None:  # no later chunk has more programs
                # Kernels are compiled for rows of a multiple of 16 bytes.
                sums = torch.zeros(4, cdiv(chunk.programs, 4) * 4, dtype=torch.float32, device=block.x.device)
            vectors = (*sums, block.scale, bias)
            if chunk.hopper is not None:
                chunk.launch_on_hopper(chunk.hopper.sigmoid_coefficients, vectors, {})
            else:
                chunk.launch(triton_sigmoid.sigmoid_coefficients, vectors, {"FAST": True})
            chunk.launch(triton_sigmoid.sigmoid_coefficients, vectors, {"FAST": False})
            chunk.multiply()
        assert sums is not None
        loss, of_bias, of_scale = sums[:3].sum(1).unbind()
        return loss, of_bias.clone(), of_scale.clone()  # outputs of an operator do not share memory


def multi_positive_statistics(
    block: Block, pivot_x: Tensor, pivot_y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    with _on_device(block.x):
        operands = Operands.of(block._replace(equal_are_positive=True))
        of_x, of_y = _softmax_statistics(operands, block.scale, (pivot_x, pivot_y))
        # Outputs of an operator do not share memory.
        negatives_x, positives_x, distance_x = (t.clone() for t in of_x.view(3, -1))
        negatives_y, positives_y, distance_y = (t.clone() for t in of_y.view(3, -1))
        return negatives_x, positives_x, distance_x, negatives_y, positives_y, distance_y


def multi_positive_gradients(
    block: Block,
    pivot_x: Tensor,
    pivot_y: Tensor,
    relative_x: Tensor,
    relative_y: Tensor,
    share_x: Tensor,
    share_y: Tensor,
    gradients: BlockGradients,
) -> Tensor:
    with _on_device(block.x):
        operands = Operands.of(block._replace(equal_are_positive=True))
        lse: tuple[Tensor, Tensor] = (pivot_x, pivot_y)
        relative: tuple[Tensor | None, Tensor | None] = (relative_x, relative_y)
        if operands.parts == 1:  # the rounding of the sum is negligible beside that of coefficients in half precision
            lse, relative = (pivot_x + relative_x, pivot_y + relative_y), (None, None)
        return _softmax_gradients(operands, block.scale, lse, relative, (share_x, share_y), gradients)


# ---- Launches of the softmax loss, for pairs and for several positives ----


def _softmax_statistics(block: Operands, scale: Tensor, pivots: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The results of `triton_softmax.log_odds`: [m] and [n], or [3·m] and [3·n] with several positives."""
    m, n, tile = len(block.x), len(block.y), block.tiling.tile
    lengths = (3 * m, 3 * n) if block.equal == triton_tiles.POSITIVE.value else (m, n)
    features, constants = block.features(), {"EQUAL": block.equal, **block.constants()}
    pivots = pivots[0].contiguous(), pivots[1].contiguous()
    new: dict[str, Any] = {"dtype": torch.float32, "device": block.x.device}
    if torch.are_deterministic_algorithms_enabled():
        # Infinite sums count as overflowed, so `log_odds` recomputes all of them, in a fixed order.
        sums = torch.full((sum(lengths),), torch.inf, **new).split(lengths)
    else:
        sums = torch.zeros(sum(lengths), **new).split(lengths)
        _add_softmax_sums(block, features, sums, pivots, scale, constants)
    odds = torch.empty(lengths[0], **new), torch.empty(lengths[1], **new)
    programs = cdiv(m, tile) + cdiv(n, tile)
    arguments = (*features, *sums, *pivots, *odds, scale, block.ids_x, block.ids_y, m, n, block.diagonal)
    triton_softmax.log_odds[(programs,)](*arguments, B=tile, **constants)
    return odds


def _add_softmax_sums(
    block: Operands,
    features: tuple[Any, Any],
    sums: tuple[Tensor, ...],
    pivots: tuple[Tensor, Tensor],
    scale: Tensor,
    constants: dict[str, Any],
) -> None:
    m, n, tiling = len(block.x), len(block.y), block.tiling
    hopper = _hopper_kernels_for(block) if block.x.shape[1] >= HOPPER_SUMS_PAY else None
    tiles, blocks, band = tiling.launches(m, n, LONGEST_OF_STATISTICS, 1 if hopper is None else 2)
    span = {"SPAN": tiling.span(band), "GROUP": GROUP_OF_STATISTICS}
    place = block.overlaps, m, n, block.diagonal

    def launch_plain(near: bool, gated: bool) -> None:
        arguments = (*features, *sums, *pivots, scale, block.ids_x, block.ids_y, *place, tiles, blocks, band)
        form = {"NEAR": near, "GATED": gated, "BM": tiling.tile, "BN": tiling.tile, "WARPS": tiling.warps}
        triton_softmax.softmax_sums[(cdiv(tiles, band) * blocks,)](*arguments, **form, **span, **constants)

    if block.parts > 1 or m * n < NEAR_PAYS:
        launch_plain(near=False, gated=False)
        return
    # The first launch computes the programs whose pivots lie near each other, the second one all the rest.
    if hopper is None:
        launch_plain(near=True, gated=True)
    else:
        pairs = cdiv(tiles, 2 * band) * blocks
        described = (hopper.described(t, tiling.tile, tiling.step) for t in (block.x, block.y))
        arguments = (*described, *sums, *pivots, scale, *place, pairs, tiles, blocks, band)
        steps = cdiv(block.x.shape[1], tiling.step)
        kept = hopper.kept(hopper.SLOTS_OF_SUMS.value, steps, block.x.device)
        options = {"KEPT": kept, "STEPS": steps, "num_warps": tiling.warps, "enable_fp_fusion": True}
        hopper.softmax_sums[(min(pairs, tiling.slots // 2),)](*arguments, **span, **options)
    launch_plain(near=False, gated=True)


def _softmax_gradients(
    block: Operands,
    scale: Tensor,
    lse: tuple[Tensor, Tensor],
    relative: tuple[Tensor | None, Tensor | None],
    share: tuple[Tensor | None, Tensor | None],
    gradients: BlockGradients,
) -> Tensor:
    """Computes the gradients, with the C of `triton_softmax.softmax_coefficients`, and returns Σ C_ij x_i·y_j.

    lse, relative and share are pairs, with one tensor for the rows and one for the columns.
    """
    m, n = len(block.x), len(block.y)
    sums: Tensor | None = None
    for chunk in _chunks(block, gradients):
        if sums is None:  # no later chunk has more programs
            sums = torch.zeros(chunk.programs, dtype=torch.float32, device=block.x.device)
        lse_of_chunk = chunk.both(lse)
        vectors = (sums, *lse_of_chunk, *chunk.both(relative), *chunk.both(share), scale)
        span = {"SPAN": block.tiling.span(chunk.band)}
        gated = block.parts == 1 and m * n >= NEAR_PAYS
        if gated and chunk.hopper is not None:
            chunk.launch_on_hopper(chunk.hopper.softmax_coefficients, (sums, *lse_of_chunk, scale), span)
        elif gated:
            chunk.launch(triton_softmax.softmax_coefficients, vectors, {"FAST": True, "GATED": True, **span})
        chunk.launch(triton_softmax.softmax_coefficients, vectors, {"FAST": False, "GATED": gated, **span})
        chunk.multiply()
    assert sums is not None
    return sums.sum()


# ---- Chunks: parts of a block whose coefficients fit into the workspace ----


@dataclass(frozen=True)
class _Chunk:
    block: Operands  # of this part of the block
    rows: slice
    columns: slice
    workspace: Tensor  # [parts, rows or more, columns or more]
    gradients: BlockGradients  # of the whole block
    hopper: ModuleType | None  # `hopper_kernels`, if they are to be used
    tiles: int
    blocks: int
    band: int

    @property
    def programs(self) -> int:
        """The programs of the plain kernels, each with its own sums."""
        return cdiv(self.tiles, self.band) * self.blocks

    def both(self, vectors: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
        """This chunk's part of a vector of the rows and of a vector of the columns."""
        of_x, of_y = vectors
        return (
            None if of_x is None else of_x[self.rows].contiguous(),
            None if of_y is None else of_y[self.columns].contiguous(),
        )

    @property
    def gain(self) -> float:
        """A coefficient c is stored as c · 2^gain, because the smallest that matter are below the range of fp16."""
        return 14.0 if self.workspace.dtype == torch.float16 else 0.0  # the largest are 2, and fp16 reaches 2^16

    def launch(self, kernel: Any, vectors: tuple[Tensor | None, ...], constants: dict[str, Any]) -> None:
        """Computes the coefficients with a plain kernel."""
        block, tile = self.block, self.block.tiling.tile
        _, rows, columns = self.workspace.shape
        strip = max(tile // 2, 32)  # for tiles of 128: rows of 128 bytes, the widest swizzle that TMA supports
        arguments = (
            *(*block.features(), boxes(self.workspace.view(-1, columns), tile, strip), *vectors),
            *(block.ids_x, block.ids_y, block.overlaps, len(block.x), len(block.y), block.diagonal),
            *(self.tiles, self.blocks, self.band, rows),
        )
        constants = {
            **constants,
            **block.constants(),
            **{"PARTS": block.parts, "GAIN": self.gain, "EQUAL": block.equal},
            **{"BM": tile, "BN": tile, "STRIP": strip, "GROUP": GROUP_OF_COEFFICIENTS},
        }
        kernel[(self.programs,)](*arguments, **constants)

    def launch_on_hopper(self, kernel: Any, vectors: tuple[Tensor | None, ...], constants: dict[str, Any]) -> None:
        """Computes the coefficients with a persistent kernel of `hopper_kernels`, one program per multiprocessor."""
        assert self.hopper is not None
        block, tiling = self.block, self.block.tiling
        pairs = cdiv(self.tiles, 2 * self.band) * self.blocks
        arguments = (
            self.hopper.described(block.x, tiling.tile, tiling.step),
            self.hopper.described(block.y, tiling.tile, tiling.step),
            self.hopper.described(self.workspace[0], tiling.tile, tiling.tile // 2),
            *(*vectors, block.overlaps, len(block.x), len(block.y), block.diagonal),
            *(pairs, self.tiles, self.blocks, self.band),
        )
        steps = cdiv(block.x.shape[1], tiling.step)
        kept = self.hopper.kept(self.hopper.SLOTS_OF_COEFFICIENTS.value, steps, block.x.device)
        constants = {
            **constants,
            **{"GAIN": self.gain, "KEPT": kept, "STEPS": steps, "GROUP": GROUP_OF_COEFFICIENTS},
            **{"num_warps": tiling.warps, "enable_fp_fusion": True},
        }
        kernel[(min(pairs, tiling.slots // 2),)](*arguments, **constants)

    def multiply(self) -> None:
        """Computes this chunk's part of the gradients from its coefficients."""
        block, parts, (grad_x, grad_y, accumulate) = self.block, self.block.parts, self.gradients
        coefficients = self.workspace[:, : len(block.x), : len(block.y)]
        for i, (a, b) in enumerate(PAIRS[parts]):
            c = coefficients[a]
            # The other products are small beside that of the largest parts, and so are their errors.
            longest = EXACT_SUM if parts > 1 and a == b == 0 else 1 << 30
            if grad_x is not None:
                of_y, add = self._part(block.y, b, 1), accumulate or self.columns.start > 0 or i > 0
                _put_product(grad_x[self.rows], c, of_y, 2.0**-self.gain, longest, add)
            if grad_y is not None:
                of_x, add = self._part(block.x, b, 0), accumulate or self.rows.start > 0 or i > 0
                _put_product(grad_y[self.columns], c.t(), of_x, 2.0**-self.gain, longest, add)

    def _part(self, features: Tensor, part: int, side: int) -> Tensor:
        """[m, D]: a part of the features of images (side 0) or texts (1), as laid out by `triton_operands.in_parts`."""
        pairs = PAIRS[self.block.parts]
        place = [pair[side] for pair in pairs].index(part)
        return features[:, features.shape[1] // len(pairs) * place :][:, : self.block.dimension]


def _chunks(block: Operands, gradients: BlockGradients) -> Iterator[_Chunk]:
    """The chunks of a block, one after another in the same workspace."""
    m, n, tile = len(block.x), len(block.y), block.tiling.tile
    columns = _even(n, CHUNK_COLUMNS, tile)
    most = WORKSPACE_BYTES // (columns * block.parts * block.x.element_size())
    rows = _even(m, max(tile, most // tile * tile), tile)
    workspace = torch.empty(block.parts, rows, columns, dtype=block.x.dtype, device=block.x.device)
    hopper = _hopper_kernels_for(block)
    for row in range(0, m, rows):
        for column in range(0, n, columns):
            r, s = slice(row, min(row + rows, m)), slice(column, min(column + columns, n))
            size = r.stop - r.start, s.stop - s.start
            # On Hopper a program computes two bands of a column block. Both kinds of kernels number the bands alike, so
            # that the slow launch of the sigmoid loss finds the bands that the fast launch has left.
            tiles, blocks, band = block.tiling.launches(*size, LONGEST_OF_COEFFICIENTS, 1 if hopper is None else 2)
            yield _Chunk(block.part(r, s), r, s, workspace, gradients, hopper, tiles, blocks, band)


def _put_product(out: Tensor, a: Tensor, b: Tensor, alpha: float, longest: int, add: bool) -> None:
    """out = alpha · a·b in fp32, on tensor cores; out += alpha · a·b if ``add``.

    Sums of more than ``longest`` addends are split into several products.
    """
    for start in range(0, len(b), longest):
        left, right = a[:, start : start + longest], b[start : start + longest]
        beta = int(add or start > 0)  # if 0, out is not read
        if out.is_cuda:
            torch.ops.aten.addmm.dtype_out(out, left, right, torch.float32, beta=beta, alpha=alpha, out=out)
        else:
            out.addmm_(left.float(), right.float(), beta=beta, alpha=alpha)


def _even(length: int, most: int, unit: int) -> int:
    """The size of chunks that are all about equal: at most ``most``, and a multiple of ``unit``."""
    count = cdiv(length, most)
    return cdiv(cdiv(length, count), unit) * unit


def _on_device(t: Tensor) -> Any:
    """Makes the tensor's device the current one, on which Triton launches kernels; does nothing on a CPU."""
    return torch.cuda.device_of(t)


def _hopper_kernels_for(block: Operands) -> ModuleType | None:
    """The module `hopper_kernels`, if it supports this block and is faster at its size."""
    if block.parts > 1 or len(block.x) * len(block.y) < HOPPER_PAYS:
        return None
    return hopper_kernels(block.x.device)


@functools.lru_cache
def hopper_kernels(device: torch.device) -> ModuleType | None:
    """The module `hopper_kernels`, if its kernels run on this device."""
    if INTERPRETED or torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    return importlib.import_module(".hopper_kernels", __package__) if triton.__version__.startswith(GLUON) else None
