# mypy: allow-untyped-defs, allow-incomplete-defs
"""Kernels of `triton_kernels` for Hopper alone, in Gluon: the same results, up to rounding, in less time.

A program has three partitions. One warp copies boxes of features into a ring in shared memory, and two groups of four
warps take turns at the tensor cores: while one multiplies its tile, the other turns its own into coefficients and
stores them. Programs stay: each works through pairs of strips, a strip being what a program of the plain kernels does,
with the same number. Both strips of a pair, one for either group, are of the same column block.

The ring's boxes are used in the order in which they are loaded, the tiles of one group and of the other in turn until
the second strip, which is never the longer one, ends. All three partitions count the tiles, and from the number of a
tile follow the places of its boxes in the ring and the phases of their barriers. The column block's boxes go through
the ring again with every tile: kept in shared memory, they left room for too short a ring.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .triton_kernels import LIMIT, LOG2E, _exp, _log1p

# Their names until Triton 3.6, and since.
_copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

REGISTERS = 240  # per thread of the two groups; 504 less both for the producer
STAGES = 6  # places in the ring, of 32 KiB


def constants(k):
    """Of a launch, for features of this length."""
    return {"STEPS": -(-k // 64), "STAGES": STAGES, "REGISTERS": REGISTERS, "num_warps": 4}


def described(matrix):
    """A host's descriptor for Gluon, which asks for the layout in shared memory."""
    element = gl.bfloat16 if matrix.base.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(matrix.block_shape, element)
    return TensorDescriptor(matrix.base, matrix.shape, matrix.strides, matrix.block_shape, layout)


@gluon.jit
def _pair(unit, tiles, blocks, run, GROUP: gl.constexpr):
    """Of a pair of strips: column block, first row tile, tiles of the first and of the second, and their numbers."""
    runs = gl.cdiv(tiles, run)
    width = GROUP * gl.cdiv(runs, 2)
    group = unit // width
    inside = unit % width
    size = gl.minimum(blocks - group * GROUP, GROUP)
    first = inside // size * 2 * run
    number = group * GROUP * runs + inside // size * 2 * size + inside % size
    left = tiles - first
    return (
        group * GROUP + inside % size,
        first,
        gl.minimum(left, run),
        gl.maximum(gl.minimum(left - run, run), 0),
        number,
        number + size,
    )


@gluon.jit
def _produce(
    x, y, x_ring, y_ring, full, empty, units, tiles, blocks, run,
    STEPS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Fills the ring."""
    BM: gl.constexpr = x.block_type.shape[0]
    BN: gl.constexpr = y.block_type.shape[0]
    BK: gl.constexpr = x.block_type.shape[1]
    step = gl.program_id(0) * 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        block, first, one, two, _, _ = _pair(unit, tiles, blocks, run, GROUP)
        for i in range(one + two):
            tile = gl.where(i < 2 * two, i // 2 + i % 2 * run, i - two)
            for k in range(STEPS):
                place = step % STAGES
                ready = full.index(place)
                mbarrier.wait(empty.index(place), (step // STAGES & 1) ^ 1)
                mbarrier.expect(ready, (BM + BN) * BK * 2)
                _copy_in(y, [block * BN, k * BK], ready, y_ring.index(place))
                _copy_in(x, [(first + tile) * BM, k * BK], ready, x_ring.index(place))
                step += 1


@gluon.jit
def _product(
    x_ring, y_ring, full, empty, turns, t, two, before, mine,
    SECOND: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The product for tile t of a strip, before whose pair the program has had tiles, and this group had its own.

    A group waits for its turn with all that is needed to tell phases apart, which are known by their parity alone: that
    the other has not only been given, but has also received the boxes of all tiles before.
    """
    BM: gl.constexpr = x_ring.shape[1]
    BN: gl.constexpr = y_ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    step = (before + t + gl.minimum(t + SECOND, two)) * STEPS
    acc = gl.zeros((BM, BN), gl.float32, layout)
    mbarrier.wait(turns.index(1 if SECOND else 0), (mine + t + (0 if SECOND else 1)) & 1)
    for k in range(STEPS):
        place = step % STAGES
        mbarrier.wait(full.index(place), step // STAGES & 1)
        of_y = y_ring.index(place).permute((1, 0))
        acc = warpgroup_mma(x_ring.index(place), of_y, acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((step + (STAGES - 1)) % STAGES), count=1, pred=k > 0)
        step += 1
    after = 0
    if not SECOND:
        after = gl.where(t < two, 1, 0)
    mbarrier.arrive(turns.index(after), count=1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + (STAGES - 1)) % STAGES), count=1)
    return acc


@gluon.jit
def _halves(tile):
    """The left and the right half of a tile's columns, each in the layout of a product of its shape."""
    BM: gl.constexpr = tile.shape[0]
    BN: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN // 2, 16])
    left, right = gl.split(gl.permute(gl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))
    return (
        gl.convert_layout(left, layout, assert_trivial=True),
        gl.convert_layout(right, layout, assert_trivial=True),
    )


@gluon.jit
def _joined(left, right):
    """The tile that _halves takes apart."""
    BM: gl.constexpr = left.shape[0]
    BN: gl.constexpr = 2 * left.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    tile = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), (BM, BN))
    return gl.convert_layout(tile, layout, assert_trivial=True)


@gluon.jit
def _thread_sums(tile):
    """As in `triton_kernels`."""
    BM: gl.constexpr = tile.shape[0]
    BN: gl.constexpr = tile.shape[1]
    return gl.sum(gl.sum(gl.sum(gl.reshape(tile, (BM // 16, 2, 8, BN // 8, 4, 2)), 5), 3), 1)


@gluon.jit
def _product_less_one(u):
    """As in `triton_kernels`."""
    BM: gl.constexpr = u.shape[0]
    BN: gl.constexpr = u.shape[1]
    if BN > 4:
        if BN > 8:
            a, b = _halves(u)
        else:
            a, b = gl.split(gl.reshape(u, (BM, 4, 2)))
        result = _product_less_one(gl.fma(a, b, a + b))
    else:
        a, b = gl.split(gl.permute(gl.reshape(u, (BM // 16, 2, 8, 4)), (0, 2, 3, 1)))
        result = gl.fma(a, b, a + b)
    return result


@gluon.jit
def _quotients(tile, u, GAIN: gl.constexpr):
    """As in `triton_kernels`."""
    a, b = _halves(u)
    of_a, of_b = _halves(tile)
    of_a, of_b = gl.fma(of_a, b, of_a), gl.fma(of_b, a, of_b)
    two = a + gl.fma(b, a, b)
    left, right = _halves(two)
    whole_left, whole_right = _halves(1.0 + two)
    four = gl.fma(left, whole_right, right)
    root = gl.rsqrt(1.0 + four)
    inverse = root * root * 2.0**GAIN
    inverse = _joined(inverse * whole_right, inverse * whole_left)
    return _joined(of_a * inverse, of_b * inverse), _product_less_one(four)


@gluon.jit
def _store(g, tile, staging, row, column):
    """Stores a tile by way of shared memory, from where it may still be read at the end."""
    tma.store_wait(0)
    staging.store(tile.to(g.dtype))
    fence_async_shared()
    _copy_out(g, [row, column], staging)


@gluon.jit
def _sigmoid_strip(
    acc, g, staging, s, b, row, column, m, n, diagonal, BOLD: gl.constexpr, GAIN: gl.constexpr,
):  # fmt: skip
    """`triton_kernels._store_sigmoid` of so few columns that registers suffice."""
    BM: gl.constexpr = acc.shape[0]
    BN: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    z = acc * s + b
    if BOLD:
        u = gl.exp2(z)
        c, product = _quotients(u, u, GAIN)
        loss = gl.where(product < LIMIT, _log1p(product), float("inf"))
    else:
        rows = row + gl.arange(0, BM, gl.SliceLayout(1, layout))
        columns = column + gl.arange(0, BN, gl.SliceLayout(0, layout))
        positive = (rows + diagonal)[:, None] == columns[None, :]
        z = gl.where(positive, -z, z)
        z = gl.where((rows < m)[:, None] & (columns < n)[None, :], z, float("-inf"))
        u = gl.exp2(gl.abs(z) * -1.0)
        c, product = _quotients(gl.where(z > 0, 1.0, u), u, GAIN)
        c = gl.where(positive, -c, c)
        sums = _thread_sums(gl.maximum(z, 0.0)) / LOG2E
        loss = gl.convert_layout(_log1p(product), sums.type.layout, assert_trivial=True) + sums
    _store(g, c, staging, row, column)
    total = _thread_sums(c)
    return gl.convert_layout(loss, total.type.layout, assert_trivial=True), total


@gluon.jit
def _sigmoid_tile(acc, g, staging, s, b, row, column, m, n, diagonal, BOLD: gl.constexpr, GAIN: gl.constexpr):
    BN: gl.constexpr = acc.shape[1]
    left, right = _halves(acc)
    loss, total = _sigmoid_strip(left, g, staging, s, b, row, column, m, n, diagonal, BOLD, GAIN)
    column += BN // 2
    more_loss, more_total = _sigmoid_strip(right, g, staging, s, b, row, column, m, n, diagonal, BOLD, GAIN)
    return loss + more_loss, total + more_total


@gluon.jit
def _inside(row, column, m, n, diagonal, BM: gl.constexpr, BN: gl.constexpr):
    distance = row + diagonal - column
    return (row + BM <= m) & (column + BN <= n) & ((distance >= BN) | (distance <= -BM))


@gluon.jit
def _sigmoid(
    g, x_ring, y_ring, staging, full, empty, turns, losses, totals, cautions, scale, bias,
    m, n, diagonal, units, tiles, blocks, run, SECOND: gl.constexpr, GAIN: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    BM: gl.constexpr = x_ring.shape[1]
    BN: gl.constexpr = y_ring.shape[1]
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN // 2, 16])
    s = gl.load(scale) * LOG2E
    b = gl.load(bias) * LOG2E
    before = gl.program_id(0) * 0
    mine = before
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        block, first, one, two, at, other = _pair(unit, tiles, blocks, run, GROUP)
        length = one
        if SECOND:
            first += run
            length = two
            at = other
        column = block * BN
        bold = gl.load(cautions + at, mask=length > 0, other=1.0) == 0
        zeros = _thread_sums(gl.zeros((BM, BN // 2), gl.float32, narrow))
        loss = zeros
        total = zeros
        for t in range(length):
            row = (first + t) * BM
            acc = _product(x_ring, y_ring, full, empty, turns, t, two, before, mine, SECOND, STEPS, STAGES)
            if bold:
                if _inside(row, column, m, n, diagonal, BM, BN):
                    more_loss, more_total = _sigmoid_tile(
                        acc, g, staging, s, b, row, column, m, n, diagonal, True, GAIN
                    )
                else:
                    more_loss, more_total = _sigmoid_tile(
                        acc, g, staging, s, b, row, column, m, n, diagonal, False, GAIN
                    )
                loss += more_loss
                total += more_total
        before += one + two
        mine += length
        sum_loss = gl.sum(gl.sum(gl.sum(loss, 2), 1), 0)
        sum_total = gl.sum(gl.sum(gl.sum(total, 2), 1), 0) * 2.0**-GAIN
        if bold:
            if sum_loss < float("inf"):  # and not NaN
                gl.store(losses + at, gl.load(losses + at) + sum_loss)
                gl.store(totals + at, gl.load(totals + at) + sum_total)
            else:
                gl.store(cautions + at, 1.0)
    tma.store_wait(0)


@gluon.jit
def _softmax_strip(
    acc, g, staging, s, of_x, of_y, own, row, column, m, diagonal, inside, GAIN: gl.constexpr,
):  # fmt: skip
    """Stores the coefficients of so few columns that registers suffice."""
    BM: gl.constexpr = acc.shape[0]
    BN: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    c = _exp(acc, s, of_x[:, None], False) + _exp(acc, s, of_y[None, :], False)
    if not inside:
        rows = row + gl.arange(0, BM, gl.SliceLayout(1, layout))
        columns = column + gl.arange(0, BN, gl.SliceLayout(0, layout))
        of_positives = gl.load(own + gl.minimum(rows, m - 1)) * 2.0**GAIN
        c = gl.where((rows + diagonal)[:, None] == columns[None, :], of_positives[:, None], c)
    _store(g, c, staging, row, column)


@gluon.jit
def _softmax(
    g, x_ring, y_ring, staging, full, empty, turns, lse_x, lse_y, own, scale,
    m, n, diagonal, units, tiles, blocks, run, SECOND: gl.constexpr, GAIN: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    BM: gl.constexpr = x_ring.shape[1]
    BN: gl.constexpr = y_ring.shape[1]
    HALF: gl.constexpr = BN // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    s = gl.load(scale)
    before = gl.program_id(0) * 0
    mine = before
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        block, first, one, two, _, _ = _pair(unit, tiles, blocks, run, GROUP)
        length = one
        if SECOND:
            first += run
            length = two
        column = block * BN
        columns = column + gl.arange(0, HALF, gl.SliceLayout(0, layout))
        of_left = gl.load(lse_y + gl.minimum(columns, n - 1)) - GAIN / LOG2E
        of_right = gl.load(lse_y + gl.minimum(columns + HALF, n - 1)) - GAIN / LOG2E
        for t in range(length):
            row = (first + t) * BM
            rows = row + gl.arange(0, BM, gl.SliceLayout(1, layout))
            of_x = gl.load(lse_x + gl.minimum(rows, m - 1)) - GAIN / LOG2E
            acc = _product(x_ring, y_ring, full, empty, turns, t, two, before, mine, SECOND, STEPS, STAGES)
            left, right = _halves(acc)
            inside = _inside(row, column, m, n, diagonal, BM, BN)
            _softmax_strip(left, g, staging, s, of_x, of_left, own, row, column, m, diagonal, inside, GAIN)
            _softmax_strip(right, g, staging, s, of_x, of_right, own, row, column + HALF, m, diagonal, inside, GAIN)
        before += one + two
        mine += length
    tma.store_wait(0)


@gluon.jit
def _rings(x, y, g, STAGES: gl.constexpr):
    """Shared memory: features, places for tiles on their way out, and barriers."""
    BM: gl.constexpr = x.block_type.shape[0]
    BN: gl.constexpr = y.block_type.shape[0]
    BK: gl.constexpr = x.block_type.shape[1]
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    y_ring = gl.allocate_shared_memory(y.dtype, [STAGES, BN, BK], y.layout)
    staging = gl.allocate_shared_memory(g.dtype, [2, BM, g.block_type.shape[1]], g.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    return x_ring, y_ring, staging, full, empty, turns


@gluon.jit(do_not_specialize=["m", "n", "diagonal", "units", "tiles", "blocks", "run"])
def sigmoid_coefficients(
    x, y, g, losses, totals, cautions, scale, bias, m, n, diagonal, units, tiles, blocks, run,
    GAIN: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """The BOLD launch of `triton_kernels.sigmoid_coefficients`."""
    x_ring, y_ring, staging, full, empty, turns = _rings(x, y, g, STAGES)
    gl.warp_specialize(
        [
            (_sigmoid, (
                g, x_ring, y_ring, staging.index(0), full, empty, turns, losses, totals, cautions, scale, bias,
                m, n, diagonal, units, tiles, blocks, run, False, GAIN, STEPS, STAGES, GROUP,
            )),
            (_sigmoid, (
                g, x_ring, y_ring, staging.index(1), full, empty, turns, losses, totals, cautions, scale, bias,
                m, n, diagonal, units, tiles, blocks, run, True, GAIN, STEPS, STAGES, GROUP,
            )),
            (_produce, (
                x, y, x_ring, y_ring, full, empty, units, tiles, blocks, run, STEPS, STAGES, GROUP,
            )),
        ],
        [4, 1], [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["m", "n", "diagonal", "units", "tiles", "blocks", "run"])
def softmax_coefficients(
    x, y, g, lse_x, lse_y, own, scale, m, n, diagonal, units, tiles, blocks, run,
    GAIN: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `triton_kernels.softmax_coefficients`."""
    x_ring, y_ring, staging, full, empty, turns = _rings(x, y, g, STAGES)
    gl.warp_specialize(
        [
            (_softmax, (
                g, x_ring, y_ring, staging.index(0), full, empty, turns, lse_x, lse_y, own, scale,
                m, n, diagonal, units, tiles, blocks, run, False, GAIN, STEPS, STAGES, GROUP,
            )),
            (_softmax, (
                g, x_ring, y_ring, staging.index(1), full, empty, turns, lse_x, lse_y, own, scale,
                m, n, diagonal, units, tiles, blocks, run, True, GAIN, STEPS, STAGES, GROUP,
            )),
            (_produce, (
                x, y, x_ring, y_ring, full, empty, units, tiles, blocks, run, STEPS, STAGES, GROUP,
            )),
        ],
        [4, 1], [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip
