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

import functools
import importlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from . import triton_sigmoid, triton_softmax
from .torch_backend import Block, BlockGradients, CoefficientVectors
from .triton_tiles import INTERPRETED, PAIRS, Bands, Operands, boxes, cdiv

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


def positive_logits(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    operands = Operands.of(Block(x, y, scale))
    m, tile = len(x), operands.tiling.tile
    out = torch.empty(m, dtype=torch.float32, device=x.device)
    triton_softmax.positives[(cdiv(m, tile),)](*operands.features, scale, out, m, B=tile, **operands.constants)
    return out


def softmax_statistics(block: Block, pivot_x: Tensor, pivot_y: Tensor) -> tuple[Tensor, Tensor]:
    operands = Operands.of(block)
    m, n, tile = len(block.x), len(block.y), operands.tiling.tile
    count = 3 if block.equal_are_positive else 1
    pivots = pivot_x.contiguous(), pivot_y.contiguous()
    new: dict[str, Any] = {"dtype": torch.float32, "device": block.x.device}
    # Infinite sums count as overflowed: `log_odds` recomputes all of them, in a fixed order.
    deterministic = torch.are_deterministic_algorithms_enabled()
    start = torch.inf if deterministic else 0.0
    sums = torch.full((count * (m + n),), start, **new).split((count * m, count * n))
    if not deterministic:
        _add_softmax_sums(operands, (*sums, *pivots, block.scale))
    odds = torch.empty(count, m, **new), torch.empty(count, n, **new)
    triton_softmax.log_odds[(cdiv(m, tile) + cdiv(n, tile),)](
        *(*operands.features, *sums, *pivots, *odds, block.scale, operands.ids_x, operands.ids_y),
        *(m, n, operands.diagonal),
        **{"EQUAL": operands.equal, "B": tile, **operands.constants},
    )
    return odds


def softmax_losses(
    positive: Tensor, odds_x: Tensor, odds_y: Tensor, positive_of_columns: Tensor, odds_of_columns: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = [t.contiguous() for t in (positive, odds_x, odds_y, positive_of_columns, odds_of_columns)]
    loss, lse_x, coefficient = positive.new_empty(()), torch.empty_like(given[0]), torch.empty_like(given[0])
    lse_y = torch.empty_like(given[3])
    outputs, lengths = (loss, lse_x, lse_y, coefficient), (len(positive), len(positive_of_columns))
    triton_softmax.softmax_losses[(1,)](*given, *outputs, *lengths, B=LOSSES_AT_A_TIME, num_warps=8)
    return outputs


def softmax_gradients(block: Block, vectors: CoefficientVectors, gradients: BlockGradients) -> Tensor:
    pivot_x, pivot_y, relative_x, relative_y, share_x, share_y = vectors
    operands = Operands.of(block)
    if operands.parts == 1 and relative_x is not None and relative_y is not None:
        # The rounding of the sum is negligible beside that of coefficients in half precision.
        pivot_x, pivot_y, relative_x, relative_y = pivot_x + relative_x, pivot_y + relative_y, None, None
    share_x = pivot_x if share_x is None else share_x  # never read then, but the kernel takes a pointer
    chunks = _chunks(operands, gradients)
    sums = torch.zeros(chunks[0].bands.number, dtype=torch.float32, device=block.x.device)
    gated = operands.parts == 1 and len(block.x) * len(block.y) >= NEAR_PAYS
    for chunk in chunks:
        span = operands.tiling.span(chunk.bands)
        lse_x, lse_y, *others = chunk.part_of(pivot_x, pivot_y, relative_x, relative_y, share_x, share_y)
        arguments = (sums, lse_x, lse_y, *others, block.scale)
        if gated and chunk.hopper is not None:
            kernel = chunk.hopper.softmax_coefficients
            chunk.launch_on_hopper(kernel, (sums, lse_x, lse_y, block.scale), SPAN=span)
        elif gated:
            chunk.launch(triton_softmax.softmax_coefficients, arguments, FAST=True, GATED=True, SPAN=span)
        chunk.launch(triton_softmax.softmax_coefficients, arguments, FAST=False, GATED=gated, SPAN=span)
        chunk.multiply()
    return sums.sum()


def sigmoid_block(block: Block, bias: Tensor, gradients: BlockGradients) -> tuple[Tensor, Tensor, Tensor]:
    chunks = _chunks(Operands.of(block), gradients)
    # Kernels are compiled for rows of a multiple of 16 bytes.
    sums = torch.zeros(4, cdiv(chunks[0].bands.number, 4) * 4, dtype=torch.float32, device=block.x.device)
    vectors = (*sums, block.scale, bias)
    for chunk in chunks:
        if chunk.hopper is not None:
            chunk.launch_on_hopper(chunk.hopper.sigmoid_coefficients, vectors)
        else:
            chunk.launch(triton_sigmoid.sigmoid_coefficients, vectors, FAST=True)
        chunk.launch(triton_sigmoid.sigmoid_coefficients, vectors, FAST=False)
        chunk.multiply()
    loss, of_bias, of_scale = sums[:3].sum(1).unbind()
    return loss, of_bias.clone(), of_scale.clone()  # outputs of an operator do not share memory


# ---- Launches ----


def _add_softmax_sums(block: Operands, vectors: Sequence[Tensor]) -> None:
    """Adds to the sums of `triton_softmax.softmax_sums`. ``vectors`` are its arguments from these to the scale."""
    m, n, tiling = len(block.x), len(block.y), block.tiling
    hopper = _hopper_kernels_for(block) if block.x.shape[1] >= HOPPER_SUMS_PAY else None
    bands = tiling.bands(m, n, LONGEST_OF_STATISTICS, 1 if hopper is None else 2)
    constants = {"SPAN": tiling.span(bands), "GROUP": GROUP_OF_STATISTICS}
    plain = functools.partial(
        block.launch, triton_softmax.softmax_sums, bands, vectors, WARPS=tiling.warps, **constants
    )
    if block.parts > 1 or m * n < NEAR_PAYS:
        plain(NEAR=False, GATED=False)
        return
    # The first launch computes the programs whose pivots lie near each other, the second one all the rest.
    if hopper is None:
        plain(NEAR=True, GATED=True)
    else:
        _launch_on_hopper(hopper, hopper.softmax_sums, hopper.SLOTS_OF_SUMS, block, bands, vectors, **constants)
    plain(NEAR=False, GATED=True)


def _launch_on_hopper(
    hopper: ModuleType, kernel: Any, slots: Any, block: Operands, bands: Bands, vectors: Sequence[Any], **constants: Any
) -> None:
    """Launches a persistent kernel of `hopper_kernels`, one program per multiprocessor.

    ``vectors`` are its arguments between the features and the place of the block.
    """
    tiling = block.tiling
    features = (hopper.described(t, tiling.tile, tiling.step) for t in (block.x, block.y))
    pairs = cdiv(bands.tiles, 2 * bands.band) * bands.blocks
    steps = cdiv(block.x.shape[1], tiling.step)
    kernel[(min(pairs, tiling.slots // 2),)](
        *(*features, *vectors, *block.place, pairs, *bands),
        **{"KEPT": hopper.kept(slots.value, steps, block.x.device), "STEPS": steps, **constants},
        **{"num_warps": tiling.warps, "enable_fp_fusion": True},
    )


# ---- Chunks: parts of a block whose coefficients fit into the workspace ----


@dataclass(frozen=True)
class _Chunk:
    block: Operands  # of this part of the block
    rows: slice
    columns: slice
    workspace: Tensor  # [parts, rows or more, columns or more]
    gradients: BlockGradients  # of the whole block
    hopper: ModuleType | None  # `hopper_kernels`, if they are to be used
    bands: Bands  # of the plain kernels, whose programs have sums of their own

    def part_of(self, *vectors: Tensor | None) -> list[Tensor | None]:
        """This chunk's part of vectors that belong to the rows and to the columns in turn."""
        parts = itertools.cycle((self.rows, self.columns))
        return [None if t is None else t[part].contiguous() for t, part in zip(vectors, parts, strict=False)]

    @property
    def gain(self) -> float:
        """A coefficient c is stored as c · 2^gain, because the smallest that matter are below the range of fp16."""
        return 14.0 if self.workspace.dtype == torch.float16 else 0.0  # the largest are 2, and fp16 reaches 2^16

    def launch(self, kernel: Any, vectors: Sequence[Tensor | None], **constants: Any) -> None:
        """Computes the coefficients with a plain kernel."""
        tile = self.block.tiling.tile
        _, rows, columns = self.workspace.shape
        strip = max(tile // 2, 32)  # for tiles of 128: rows of 128 bytes, the widest swizzle that TMA supports
        stored = boxes(self.workspace.view(-1, columns), tile, strip)
        constants |= {"PARTS": self.block.parts, "GAIN": self.gain, "STRIP": strip, "GROUP": GROUP_OF_COEFFICIENTS}
        self.block.launch(kernel, self.bands, (stored, *vectors), rows, **constants)

    def launch_on_hopper(self, kernel: Any, vectors: Sequence[Tensor | None], **constants: Any) -> None:
        """Computes the coefficients with a kernel of `hopper_kernels`."""
        assert self.hopper is not None
        tile, slots = self.block.tiling.tile, self.hopper.SLOTS_OF_COEFFICIENTS
        vectors = (self.hopper.described(self.workspace[0], tile, tile // 2), *vectors)
        constants |= {"GAIN": self.gain, "GROUP": GROUP_OF_COEFFICIENTS}
        _launch_on_hopper(self.hopper, kernel, slots, self.block, self.bands, vectors, **constants)

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
        """[m, D]: a part of the features of images (side 0) or texts (1), as laid out by `triton_tiles.in_parts`."""
        pairs = PAIRS[self.block.parts]
        place = [pair[side] for pair in pairs].index(part)
        return features[:, features.shape[1] // len(pairs) * place :][:, : self.block.dimension]


def _chunks(block: Operands, gradients: BlockGradients) -> list[_Chunk]:
    """The chunks of a block, which use the same workspace one after another. No later one has more bands."""
    m, n, tile = len(block.x), len(block.y), block.tiling.tile
    columns = _even(n, CHUNK_COLUMNS, tile)
    most = WORKSPACE_BYTES // (columns * block.parts * block.x.element_size())
    rows = _even(m, max(tile, most // tile * tile), tile)
    workspace = torch.empty(block.parts, rows, columns, dtype=block.x.dtype, device=block.x.device)
    hopper = _hopper_kernels_for(block)
    chunks = []
    for row in range(0, m, rows):
        for column in range(0, n, columns):
            r, s = slice(row, min(row + rows, m)), slice(column, min(column + columns, n))
            size = r.stop - r.start, s.stop - s.start
            # On Hopper a program computes two bands of a column block. Both kinds of kernels number the bands alike, so
            # that the slow launch of the sigmoid loss finds the bands that the fast launch has left.
            bands = block.tiling.bands(*size, LONGEST_OF_COEFFICIENTS, 1 if hopper is None else 2)
            chunks.append(_Chunk(block.part(r, s), r, s, workspace, gradients, hopper, bands))
    return chunks


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
