# mypy: allow-untyped-defs, allow-incomplete-defs
"""Tiles of logits: the device code that the kernels of both losses share.

A block has m images and n texts, with the cosines a_ij = x_i·y_j and the logits z_ij = s·a_ij (+ b). The logits are
never stored: a kernel computes a tile of them ([BM, BN], in registers, from tensor cores), uses it and forgets it. A
program owns BN columns and goes through a *run* of consecutive row tiles, so that the sums of its columns stay in
registers.

The gradients come in two steps. A kernel of `triton_softmax` or `triton_sigmoid` stores the coefficients C_ij, which
are the derivatives of the loss by z_ij up to a constant factor, in a workspace and in the features' dtype. Two products
of cuBLAS then add C·y to grad_x and Cᵀ·x to grad_y.

The kernels also sum C_ij·a_ij, the derivative by s, from the tile in fp32. The products of cuBLAS could give this sum
as well, but from rounded coefficients: where its terms cancel, their rounding errors do not.

Besides the tensor cores, the arithmetic on single logits and its registers limit the speed. Two launches therefore
share the work of one kernel. The fast launch has the shortest arithmetic and skips the tiles for which that is not
enough; the slow launch does these. Tiles that need masks are never fast: they hold a positive or equal ids, or lie at
the end of the block (`is_inside`, `left_over`). Where rows and columns are sorted by their ids, few tiles can hold
equal ones (`id_overlaps`). Each loss has one more reason for the slow launch, which its file explains.

fp32 features come as sums of bfloat16 parts (`triton_operands.split`). Each row is then the concatenation of its parts,
in an order by which one product adds up all pairs of parts. The pair of the largest parts is the last one: it takes the
last CAREFUL steps of BK numbers. For features in half precision CAREFUL is 0.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NOWHERE = tl.constexpr(1 << 30)  # the `diagonal` of a block without positives on a diagonal: far from every tile

# The constant EQUAL of the kernels: what the ids of rows and columns mean.
NO_IDS = tl.constexpr(0)  # there are none
EXCLUDED = tl.constexpr(1)  # cells with equal ids take no part, but for those on the diagonal, which are positives
POSITIVE = tl.constexpr(2)  # cells with equal ids are positives


# ---- Where a program works ----


@triton.jit
def place(program, tiles, blocks, run, GROUP: tl.constexpr):
    """A program's column block and its first row tile.

    The first programs take all runs of the first GROUP column blocks, the next ones those of the next GROUP. Within a
    group the column block changes first. Programs that run at the same time have numbers near each other, so that they
    read the same row tiles and column blocks from the L2 cache.
    """
    width = GROUP * tl.cdiv(tiles, run)  # programs of a whole group
    first = program // width * GROUP
    size = tl.minimum(blocks - first, GROUP)  # column blocks of this group: the last one is smaller
    inside = program % width
    return first + inside % size, inside // size * run


@triton.jit(do_not_specialize=["m", "n", "diagonal"])
def id_overlaps(ids_x, ids_y, out, m, n, diagonal, BM: tl.constexpr, BN: tl.constexpr, STRIP: tl.constexpr):
    """out [blocks, 2]: for each column block the first row tile that may hold equal ids or positives, and the last + 1.

    Between them lie all rows whose id is within the range of the column block's ids, and the rows of its diagonal. That
    is right for ids in any order, and saves work if rows and columns are sorted by id. A program does one column block.
    """
    column = tl.program_id(0) * BN
    of_y = tl.load(ids_y + tl.minimum(column + tl.arange(0, BN), n - 1))  # [BN]
    lowest = tl.min(of_y)
    highest = tl.max(of_y)
    first = tl.zeros((STRIP,), tl.int32) + m  # the least of the rows i, i + STRIP, ... that overlap
    last = tl.zeros((STRIP,), tl.int32) - 1  # the largest of them
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
        beyond = block * BN - diagonal  # the diagonal's rows in this column block: from here to BN further on
        start = tl.maximum(beyond, 0) // BM
        stop = tl.cdiv(tl.maximum(beyond + BN, 0), BM)
    else:
        start = tl.load(overlaps + 2 * block)
        stop = tl.load(overlaps + 2 * block + 1)
    return start, stop


@triton.jit
def is_inside(row, column, m, n, masked_start, masked_stop, BM: tl.constexpr, BN: tl.constexpr):
    """Whether a tile lies within the block and is not `masked_tiles`."""
    unmasked = (row < masked_start * BM) | (row >= masked_stop * BM)
    return (row + BM <= m) & (column + BN <= n) & unmasked


@triton.jit
def left_over(
    first, end, column, m, n, masked_start, masked_stop, tiles, whole, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """The row tiles of a run that are not `is_inside`, or all of them if ``whole``: (start, ordinary, count).

    There are ``count`` such tiles: ``ordinary`` consecutive ones from the row tile ``start`` on and, if ``count`` is
    larger by one, the last row tile of the block.
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
    """[BM, BN] bool: whether rows in_x [BM] and columns in_y [BN] of the block have equal ids."""
    return tl.load(ids_x + in_x)[:, None] == tl.load(ids_y + in_y)[None, :]


# ---- Reading and multiplying features, storing coefficients ----


@triton.jit
def _cells(matrix, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to a box of a matrix that has no descriptor, and whether they are inside the matrix: [ROWS, COLUMNS]."""
    base, m, n, stride = matrix
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    return base + rows.to(tl.int64)[:, None] * stride + columns[None, :], (rows < m)[:, None] & (columns < n)[None, :]


@triton.jit
def _load(matrix, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS]: the box of a matrix that begins at (row, column); zeros beyond the matrix's end."""
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
    """[BM, BN] fp32: x[row:][:BM] · y[column:][:BN]ᵀ, over the K numbers of a row.

    Tensor cores round every addition towards zero, by the size of the sum so far. The products of the largest parts of
    fp32 features are therefore summed for one step at a time and added up by ordinary additions, which round to
    nearest. Those of the smaller parts come before and are too small to matter.
    """
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, tl.cdiv(K, BK) - CAREFUL):
        acc = tl.dot(_load(x, row, k * BK, BM, BK), _load(y, column, k * BK, BN, BK).T, acc)
    for k in range(tl.cdiv(K, BK) - CAREFUL, tl.cdiv(K, BK)):
        # The option is meant for fp8. With it Triton adds to acc outside of the tensor cores.
        acc += tl.dot(_load(x, row, k * BK, BM, BK), _load(y, column, k * BK, BN, BK).T, max_num_imprecise_acc=BK)
    return acc


@triton.jit
def halves(tile, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, BN / 2] twice: the left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def joined(left, right, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, BN]: the tile that halves takes apart."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (BM, BN))


@triton.jit
def store_tile(
    g, tile, row, column, part_rows, BM: tl.constexpr, BN: tl.constexpr, STRIP: tl.constexpr, PARTS: tl.constexpr
):
    """Stores a tile [BM, BN] in g [PARTS · part_rows, columns] as the sum of PARTS numbers in low precision each.

    The first part of all rows comes first in g, then the next part. Boxes of STRIP columns are stored one by one.
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
# Hopper's products leave a tile in registers so: warp w of W holds rows 16w to 16w + 15 of each slab of 16·W rows. In
# these, lane l holds the rows l // 4 and l // 4 + 8 and, in every 8 columns, the two from 2·(l % 4) on. The reshapes
# below name the axes accordingly; a sum over the axes marked "register" moves nothing between threads. With another
# layout the result is the same, and the sum slower.


@triton.jit
def column_sums(tile, BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr):
    """[WARPS, 8, BN]: sums of columns as far as one thread holds the addends."""
    # [slab (register), warp, 2 (register), 8 (lane), BN]
    return tl.sum(tl.sum(tl.reshape(tile, (BM // (16 * WARPS), WARPS, 2, 8, BN)), 2), 0)


@triton.jit
def thread_sums(tile, BM: tl.constexpr, BN: tl.constexpr):
    """[BM / 16, 8, 4]: sums of a tile as far as one thread holds the addends (for each slab)."""
    # [slab and warp, 2 (register), 8 (lane), BN / 8 (register), 4 (lane), 2 (register)]
    return tl.sum(tl.sum(tl.sum(tl.reshape(tile, (BM // 16, 2, 8, BN // 8, 4, 2)), 5), 3), 1)


@triton.jit
def whole_sum(sums):
    """The scalar that the [BM / 16, 8, 4] sums of threads add up to."""
    return tl.sum(tl.sum(tl.sum(sums, 2), 1), 0)
