# mypy: allow-untyped-defs, allow-incomplete-defs
"""Tiles of logits: how a device divides blocks into them, their operands, and the device code of both losses.

Nothing is tuned at run time: the tiling depends on the architecture alone. On Hopper it was chosen by measurement. On
other architectures tiles are as large as fits; the tests compile them for Ampere and AMD's CDNA 3 but never run them.

A block has m images and n texts, with the cosines a_ij = x_i·y_j and the logits z_ij = s·a_ij (+ b). The logits are
never stored: a kernel computes a tile of them ([BM, BN], on tensor cores, in registers), uses it and discards it. A
program has BN columns and loops over a *band* of ``run`` consecutive row tiles, so that the sums of its columns stay
in registers.

The gradients take two steps. A kernel of `triton_softmax` or `triton_sigmoid` stores the coefficients C_ij, the
derivatives of the loss by z_ij up to a constant factor, in a workspace, in the dtype of the features. Two cuBLAS
products then add C·y to grad_x and Cᵀ·x to grad_y.

The kernels also compute Σ C_ij·a_ij, the derivative by s, from the fp32 tile. The cuBLAS products could provide this
sum as well, but from rounded coefficients: where its terms cancel, their rounding errors do not.

Speed is limited not only by the tensor cores, but also by the arithmetic on each logit and the registers it needs. Two
launches therefore share the work of a kernel. The fast launch does the least arithmetic and skips the tiles for which
that is not enough; the slow launch computes these. Tiles that need a mask always belong to the slow launch: those that
contain positives or equal ids, and those that extend beyond the block (`is_inside`, `left_over`). If rows and columns
are sorted by id, few tiles can contain equal ids (`id_overlaps`). Each loss has one further reason for the slow launch,
explained in its file. For small blocks and for fp32 features, the softmax loss has only the slow launch.

fp32 features are given as sums of bfloat16 parts (`in_parts`). The parts of a row are concatenated in such an order
that a single product along the row adds up the products of all pairs of parts. The pair of the largest parts comes
last, in the last CAREFUL steps of BK elements. CAREFUL is 0 for features in half precision.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .torch_backend import Block

INTERPRETED = triton.knobs.runtime.interpret


class Bands(NamedTuple):
    """The bands of row tiles into which a block is divided; each is the work of one program of a plain kernel."""

    tiles: int  # row tiles of the block
    blocks: int  # its column blocks
    band: int  # the row tiles of a band

    @property
    def number(self) -> int:
        return cdiv(self.tiles, self.band) * self.blocks


@dataclass(frozen=True)
class Tiling:
    """The shape of tiles, and how many programs a device runs at a time."""

    tile: int  # rows and columns of a tile
    step: int  # elements of each row of features that are multiplied at a time
    warps: int
    stages: int  # depth of the software pipeline: the number of steps whose features are in shared memory at a time
    slots: int  # programs that run at the same time

    @functools.lru_cache  # noqa: B019 (tilings live as long as the module)
    def bands(self, m: int, n: int, longest: int, together: int = 1) -> Bands:
        """The bands with the shortest estimated time; a last wave that is nearly empty counts against it.

        Args:
            longest: the largest number of row tiles of a band.
            together: the number of bands of one column block that each launched program computes.
        """
        tiles, blocks = cdiv(m, self.tile), cdiv(n, self.tile)

        def time(band: int) -> int:  # in units of one tile; starting a program takes as long as one tile
            return cdiv(blocks * cdiv(tiles, band * together), self.slots // together) * (band * together + 1)

        return Bands(tiles, blocks, min(range(1, min(longest, cdiv(tiles, together)) + 1), key=time))

    def span(self, bands: Bands) -> int:
        """The rows of a band, rounded up to a power of two of tiles."""
        return self.tile << (bands.band - 1).bit_length()


@functools.lru_cache
def tiling_for(device: torch.device, parts: int) -> Tiling:
    """The tiling of a device for features that are split into this many parts (`in_parts`)."""
    if INTERPRETED:
        return Tiling(tile=32, step=32, warps=1, stages=1, slots=4)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if torch.version.hip is not None:
        return Tiling(tile=64, step=64, warps=4, stages=2, slots=4 * processors)
    if torch.cuda.get_device_capability(device)[0] < 9:
        return Tiling(tile=128, step=32, warps=8, stages=4, slots=processors)
    # Hopper and newer: with 3 stages of 32 KiB, the shared memory of a multiprocessor has room for two programs.
    if parts == 1:
        return Tiling(tile=128, step=64, warps=4, stages=3, slots=2 * processors)
    # The sums of fp32 features take twice the registers (`tile_product`), so programs have twice the threads.
    return Tiling(tile=128, step=64, warps=8, stages=3, slots=processors)


def boxes(matrix: Tensor, rows: int, columns: int) -> Any:
    """A matrix in the form in which kernels read or write boxes [rows, columns]: with a TMA descriptor from Hopper on.

    On other devices it is the matrix, its numbers of rows and columns, and the stride of its rows.
    """
    if has_descriptors(matrix.device):
        return TensorDescriptor(matrix, matrix.shape, matrix.stride(), [rows, columns])
    # Triton emulates descriptors here, but loads single elements because it does not know their alignment.
    return matrix, len(matrix), matrix.shape[1], matrix.stride(0)


@functools.lru_cache
def has_descriptors(device: torch.device) -> bool:
    return INTERPRETED or (torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)  # triton.cdiv takes microseconds on the host, and a block needs it a dozen times


LOG2E = tl.constexpr(1.4426950408889634)
NOWHERE = tl.constexpr(1 << 30)  # the `diagonal` of a block without positives on a diagonal: far from every tile

# Values of the kernels' constant EQUAL, the meaning of equal ids of a row and a column.
NO_IDS = tl.constexpr(0)  # no ids are given
EXCLUDED = tl.constexpr(1)  # cells with equal ids are ignored, except for the positives on the diagonal
POSITIVE = tl.constexpr(2)  # cells with equal ids are positives


# ---- Where a program works ----


@triton.jit
def place(program, tiles, blocks, run, GROUP: tl.constexpr):
    """The column block of a program, and its first row tile.

    The first programs take all bands of the first GROUP column blocks, the following programs those of the next GROUP.
    Within a group, consecutive programs have different column blocks and the same row tiles. Programs that run at the
    same time have similar numbers, so they read the same row tiles and column blocks from the L2 cache.
    """
    width = GROUP * tl.cdiv(tiles, run)  # programs of a whole group
    first = program // width * GROUP
    size = tl.minimum(blocks - first, GROUP)  # column blocks of this group: the last one is smaller
    inside = program % width
    return first + inside % size, inside // size * run


@triton.jit(do_not_specialize=["m", "n", "diagonal"])
def id_overlaps(ids_x, ids_y, out, m, n, diagonal, BM: tl.constexpr, BN: tl.constexpr, STRIP: tl.constexpr):
    """out [blocks, 2]: for each column block the first row tile that may hold equal ids or positives, and the last + 1.

    This range covers all rows whose ids lie between the smallest and the largest id of the column block, and the rows
    of its diagonal. It is correct for ids in any order, and narrow if rows and columns are sorted by id. Each program
    computes one column block.
    """
    column = tl.program_id(0) * BN
    of_y = tl.load(ids_y + tl.minimum(column + tl.arange(0, BN), n - 1))  # [BN]
    lowest = tl.min(of_y)
    highest = tl.max(of_y)
    first = tl.zeros((STRIP,), tl.int32) + m  # element i: the first overlapping row among i, i + STRIP, ...
    last = tl.zeros((STRIP,), tl.int32) - 1  # the last one among them
    for row in range(0, m, STRIP):
        rows = row + tl.arange(0, STRIP)
        of_x = tl.load(ids_x + tl.minimum(rows, m - 1))
        distance = rows + diagonal - column
        overlap = ((of_x >= lowest) & (of_x <= highest)) | ((distance >= 0) & (distance < BN))
        overlap &= rows < m
        first = tl.minimum(first, tl.where(overlap, rows, m))
        last = tl.maximum(last, tl.where(overlap, rows, -1))
    tl.store(out + 2 * tl.program_id(0), tl.min(first) // BM)
    tl.store(out + 2 * tl.program_id(0) + 1, (tl.max(last) + BM) // BM)


@triton.jit
def masked_tiles(overlaps, block, diagonal, BM: tl.constexpr, BN: tl.constexpr):
    """The first row tile of a column block that may hold positives or equal ids, and the last + 1."""
    if overlaps is None:
        beyond = block * BN - diagonal  # the diagonal crosses this column block in rows beyond to beyond + BN - 1
        start = tl.maximum(beyond, 0) // BM
        stop = tl.cdiv(tl.maximum(beyond + BN, 0), BM)
    else:
        start = tl.load(overlaps + 2 * block)
        stop = tl.load(overlaps + 2 * block + 1)
    return start, stop


@triton.jit
def is_inside(row, column, m, n, masked_start, masked_stop, BM: tl.constexpr, BN: tl.constexpr):
    """Whether a tile lies entirely within the block and needs no mask (see `masked_tiles`)."""
    unmasked = (row < masked_start * BM) | (row >= masked_stop * BM)
    return (row + BM <= m) & (column + BN <= n) & unmasked


@triton.jit
def left_over(
    first, end, column, m, n, masked_start, masked_stop, tiles, whole, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """The row tiles of a band that the slow launch computes: all if ``whole``, otherwise those not `is_inside`.

    Returns (start, ordinary, count). There are ``count`` such row tiles: ``ordinary`` consecutive ones from ``start``
    on and, if ``count`` is ``ordinary`` + 1, the last row tile of the block.
    """
    start = tl.minimum(tl.maximum(masked_start, first), end)
    stop = tl.minimum(tl.maximum(masked_stop, start), end)
    at_end = (end == tiles) & (m % BM != 0) & ((stop < end) | (start == end))
    whole = whole | (column + BN > n)
    start = tl.where(whole, first, start)
    ordinary = tl.where(whole, end, stop) - start
    return start, ordinary, ordinary + tl.where(whole, 0, at_end.to(tl.int32))


@triton.jit
def equal_ids(ids_x, ids_y, in_x, in_y):
    """[BM, BN] bool: where rows in_x [BM] and columns in_y [BN] of the block have equal ids."""
    return tl.load(ids_x + in_x)[:, None] == tl.load(ids_y + in_y)[None, :]


# ---- Reading and multiplying features, storing coefficients ----


@triton.jit
def _cells(matrix, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] twice: pointers to a box of a matrix without a descriptor, and which are inside the matrix."""
    base, m, n, stride = matrix
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    return base + rows.to(tl.int64)[:, None] * stride + columns[None, :], (rows < m)[:, None] & (columns < n)[None, :]


@triton.jit
def _load(matrix, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS]: the box of a matrix that begins at (row, column), with zeros outside of the matrix."""
    if isinstance(matrix, tl.core.tensor_descriptor_base):
        box = matrix.load([row, column])
    else:
        cells, inside = _cells(matrix, row, column, ROWS, COLUMNS)
        box = tl.load(cells, inside, 0.0)
    return box


@triton.jit
def tile_product(
    x, y, row, column, CAREFUL: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """[BM, BN] fp32: x[row:][:BM] · y[column:][:BN]ᵀ, over the K elements of a row.

    Tensor cores round every addition towards zero, with an error in proportion to the sum so far. For fp32 features,
    they therefore add up the products of the largest parts over a single step only; ordinary additions, which round to
    nearest, add up the steps. The products of the smaller parts come first and are too small for this to matter.
    """
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, tl.cdiv(K, BK) - CAREFUL):
        acc = tl.dot(_load(x, row, k * BK, BM, BK), _load(y, column, k * BK, BN, BK).T, acc)
    for k in range(tl.cdiv(K, BK) - CAREFUL, tl.cdiv(K, BK)):
        # With max_num_imprecise_acc, an option meant for fp8, Triton adds to acc outside of the tensor cores.
        acc += tl.dot(_load(x, row, k * BK, BM, BK), _load(y, column, k * BK, BN, BK).T, max_num_imprecise_acc=BK)
    return acc


@triton.jit
def halves(tile, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, BN / 2] twice: the left and right halves of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def joined(left, right, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, BN]: the inverse of `halves`."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (BM, BN))


@triton.jit
def store_tile(
    g, tile, row, column, part_rows, BM: tl.constexpr, BN: tl.constexpr, STRIP: tl.constexpr, PARTS: tl.constexpr
):
    """Stores a tile [BM, BN] in g [PARTS · part_rows, columns], each element as a sum of PARTS numbers of g's dtype.

    g holds the first part of all rows, followed by the second part of all rows, and so on. Boxes of STRIP columns are
    stored one at a time.
    """
    if STRIP < BN:
        left, right = halves(tile, BM, BN)
        store_tile(g, left, row, column, part_rows, BM, BN // 2, STRIP, PARTS)
        store_tile(g, right, row, column + BN // 2, part_rows, BM, BN // 2, STRIP, PARTS)
    else:
        for part in tl.static_range(PARTS):
            if isinstance(g, tl.core.tensor_descriptor_base):
                rounded = tile.to(g.dtype)
                g.store([part * part_rows + row, column], rounded)
            else:
                rounded = tile.to(g[0].dtype.element_ty)
                cells, inside = _cells(g, part * part_rows + row, column, BM, BN)
                tl.store(cells, rounded, inside)
            tile -= rounded.to(tl.float32)


# ---- Sums within a thread ----
#
# Hopper's tensor cores leave a product in registers as follows. Warp w of W holds rows 16w to 16w + 15 of each slab of
# 16·W rows. Of these, lane l holds rows l // 4 and l // 4 + 8 and, of every 8 columns, the two from 2·(l % 4) on. The
# comments on the reshapes below name the axes accordingly; a sum over axes marked "register" moves no data between
# threads. For any other layout the result is the same but the sum is slower.


@triton.jit
def column_sums(tile, BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr):
    """[WARPS, 8, BN]: sums of columns, each over the elements in one thread."""
    # [slab (register), warp, 2 (register), 8 (lane), BN]
    return tl.sum(tl.sum(tl.reshape(tile, (BM // (16 * WARPS), WARPS, 2, 8, BN)), 2), 0)


@triton.jit
def thread_sums(tile, BM: tl.constexpr, BN: tl.constexpr):
    """[BM / 16, 8, 4]: sums of a tile, each over the elements of a slab in one thread."""
    # [slab and warp, 2 (register), 8 (lane), BN / 8 (register), 4 (lane), 2 (register)]
    return tl.sum(tl.sum(tl.sum(tl.reshape(tile, (BM // 16, 2, 8, BN // 8, 4, 2)), 5), 3), 1)


@triton.jit
def whole_sum(sums):
    """The total of the `thread_sums` [BM / 16, 8, 4], a scalar."""
    return tl.sum(tl.sum(tl.sum(sums, 2), 1), 0)


# The pairs of parts (of x, of y) that are multiplied. The largest product comes last, because the rounding error of
# each addition on tensor cores is proportional to the sum so far.
PAIRS = {1: ((0, 0),), 2: ((1, 0), (0, 1), (0, 0)), 3: ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))}


@dataclass(frozen=True)
class Operands:
    """The operands of all kernels for a block of m images and n texts."""

    x: Tensor  # [m, pairs · D'], rows contiguous and a multiple of 16 bytes long
    y: Tensor  # [n, pairs · D']
    dimension: int  # D
    parts: int  # the number of parts that add up to an element; more than 1 for fp32 features
    ids_x: Tensor | None  # [m] int32
    ids_y: Tensor | None  # [n] int32
    equal: int  # the meaning of equal ids: one of the three constants above
    overlaps: Tensor | None  # [column blocks, 2] int32: where equal ids may be (`id_overlaps`)
    diagonal: int
    tiling: Tiling

    @classmethod
    def of(cls, block: Block) -> Operands:
        x, y, parts = _features(block.x, block.y)
        tiling, dimension = tiling_for(x.device, parts), block.x.shape[1]
        place = NOWHERE.value if block.diagonal is None else block.diagonal
        if block.ids_x is None or block.ids_y is None:
            return cls(x, y, dimension, parts, None, None, NO_IDS.value, None, place, tiling)
        ids_x, ids_y = block.ids_x.contiguous(), block.ids_y.contiguous()
        blocks = cdiv(len(y), tiling.tile)
        overlaps = torch.empty(blocks, 2, dtype=torch.int32, device=x.device)
        id_overlaps[(blocks,)](
            *(ids_x, ids_y, overlaps, len(x), len(y), place), BM=tiling.tile, BN=tiling.tile, STRIP=1024
        )
        equal = POSITIVE if block.equal_are_positive else EXCLUDED
        return cls(x, y, dimension, parts, ids_x, ids_y, equal.value, overlaps, place, tiling)

    def part(self, rows: slice, columns: slice) -> Operands:
        """The operands of a part of the block. The part begins at the first row and column of a tile."""
        tile = self.tiling.tile
        return dataclasses.replace(
            self,
            x=self.x[rows],
            y=self.y[columns],
            ids_x=None if self.ids_x is None else self.ids_x[rows],
            ids_y=None if self.ids_y is None else self.ids_y[columns],
            overlaps=None if self.overlaps is None else self.overlaps[columns.start // tile :] - rows.start // tile,
            diagonal=self.diagonal + rows.start - columns.start,
        )

    @functools.cached_property
    def features(self) -> tuple[Any, Any]:
        """x and y in the form in which kernels read boxes."""
        tile, step = self.tiling.tile, self.tiling.step
        return boxes(self.x, tile, step), boxes(self.y, tile, step)

    @property
    def place(self) -> tuple[Tensor | None, int, int, int]:
        """The arguments that say where the block ends and which tiles need a mask."""
        return self.overlaps, len(self.x), len(self.y), self.diagonal

    @functools.cached_property
    def constants(self) -> dict[str, Any]:
        """The compile-time constants of all kernels, and Triton's options."""
        # Triton 3.6 cannot pipeline a loop with a single step, so no loop of `tile_product` has only one. For short
        # features the second step reads zeros, which follow the end of each row.
        length, step = self.x.shape[1], self.tiling.step
        steps = max(2, cdiv(length, step))
        careful = 0  # the number of last steps that contain all elements of the last pair of parts
        if self.parts > 1:
            careful = max(2, steps - (length - length // len(PAIRS[self.parts])) // step)
            careful += steps - careful == 1
        return {
            "CAREFUL": careful,
            "K": steps * step,
            "BK": step,
            "num_warps": self.tiling.warps,
            "num_stages": self.tiling.stages,
            "enable_fp_fusion": self.parts == 1,  # see triton_softmax.exp
        }

    def launch(self, kernel: Any, bands: Bands, vectors: Sequence[Any], *more: int, **constants: Any) -> None:
        """Launches a plain kernel of bands.

        ``vectors`` are its arguments between the features and the ids, ``more`` those after the bands.
        """
        kernel[(bands.number,)](
            *(*self.features, *vectors, self.ids_x, self.ids_y, *self.place, *bands, *more),
            **{"BM": self.tiling.tile, "BN": self.tiling.tile, "EQUAL": self.equal},
            **constants,
            **self.constants,
        )


def _features(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, int]:
    """Features in the form that tensor cores and descriptors need, and the number of parts of each element.

    If there are several parts, they are concatenated along D such that a single product of x and y is the sum of the
    products of all pairs of parts.
    """
    if x.dtype != torch.float32:
        return _aligned(x), _aligned(y), 1
    # torch.get_float32_matmul_precision() raises an error if the precision was set through this newer attribute.
    parts = 2 if torch.backends.cuda.matmul.fp32_precision == "tf32" else 3
    order_x, order_y = zip(*PAIRS[parts], strict=True)
    return in_parts(x, parts, order_x), in_parts(y, parts, order_y), parts


def in_parts(t: Tensor, parts: int, order: tuple[int, ...]) -> Tensor:
    """[m, D] fp32 to [m, len(order) · D'] bfloat16, where D' is D rounded up to a multiple of 8.

    Each element of t is rounded to a sum of ``parts`` bfloat16 numbers, from part 0, the largest, to the smallest.
    ``order`` lists the parts to concatenate.
    """
    m, dimension = t.shape
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    out = torch.zeros(m, len(order), cdiv(dimension, 8) * 8, dtype=dtype, device=t.device)
    for part in range(parts):
        rounded = t.to(torch.bfloat16)
        for i, wanted in enumerate(order):
            if wanted == part:
                out[:, i, :dimension] = rounded
        t = t - rounded
    return out.view(m, -1)


def _aligned(t: Tensor) -> Tensor:
    """``t`` itself if its rows are aligned to 16 bytes, as descriptors require; otherwise a copy padded with zeros."""
    if INTERPRETED and t.dtype == torch.bfloat16:
        t = t.float()  # the interpreter cannot multiply bfloat16
    m, dimension = t.shape
    unit = 16 // t.element_size()
    if t.stride(1) == 1 and t.stride(0) >= dimension and t.stride(0) % unit == 0 and t.data_ptr() % 16 == 0:
        return t
    out = t.new_zeros(m, cdiv(dimension, unit) * unit)
    out[:, :dimension] = t
    return out
