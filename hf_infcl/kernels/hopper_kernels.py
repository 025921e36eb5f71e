# mypy: allow-untyped-defs, allow-incomplete-defs
"""The fast launches on Hopper, in Gluon: the same results as the plain Triton kernels up to rounding, in less time.

`triton_tiles`, `triton_softmax` and `triton_sigmoid` explain the algorithm and its formulas. This text explains how the
work is scheduled on Hopper.

The kernels are what CUTLASS calls persistent, warp-specialised and ping-pong. One program runs on each multiprocessor.
Its producer warp loads boxes of features by TMA into a multistage pipeline in shared memory. Its two consumer
warpgroups take turns on the tensor cores: while one multiplies, the other turns its product into sums or coefficients.

Work
    A *band* is the work of one program of the plain kernels: ``run`` row tiles of one column block. A *pair* is two
    consecutive bands of one column block, one for each warpgroup; each program loops over several pairs. The second
    band is never longer than the first and may be empty. Tiles alternate between the two bands until the second one
    ends; the rest of the first band follows. The product of a tile has STEPS steps along D. Each step multiplies a box
    of x [BM, BK] by a box of y [BN, BK].

    The producer and both consumers number the steps in the same way, across all tiles of all pairs of the program: step
    k of tile i is step number s = i · STEPS + k.

Slots
    Shared memory is divided into SLOTS slots of one box each. While the tensor cores are busy, a step takes 512 cycles.
    Two boxes per step would be 64 bytes per cycle, but the L2 cache of an H100 delivers only about 40 bytes per cycle
    to each multiprocessor. All tiles of a pair need the same boxes of y, so KEPT of these (all, some or none: `kept`)
    are loaded with the first tile and kept for the rest of the pair. The other boxes of y are *streamed*: they are
    loaded again for every tile. The slots are used as follows:

    - STAGES slots are the stages of the pipeline, for boxes of x. Step s uses stage s % STAGES. The lowest bit of
      s // STAGES, the number of earlier steps in that stage, is the parity of its phases.
    - KEPT slots hold the kept boxes of y. These belong to steps that are spread evenly over a tile, so that the loads
      of the streamed boxes are spread evenly as well.
    - RING slots, the remaining ones, are a ring buffer for the streamed boxes of y.

Barriers
    These are mbarriers with an arrival count of one.

    - full[stage]: all boxes loaded for the step have arrived. The producer arrives, with the number of bytes that the
      phase also waits for.
    - empty[stage]: the product of the step is complete. The warpgroup that computed it arrives. The producer waits for
      it before it loads the next step of the stage; the first step of a stage does not wait.
    - turns[0], turns[1]: the first or the second warpgroup may issue the products of its next tile. The other warpgroup
      arrives when it has issued the last product of a tile. Once the second band has ended, the first warpgroup arrives
      for itself. The first tile of the program does not wait.

Phase parity
    A wait on a barrier sees only the parity of its phase, so neither the producer nor a consumer may fall two phases
    behind. A warpgroup therefore passes the turn only after it has waited for all full barriers of its tile. The
    warpgroup that receives the turn then knows that every earlier phase of every full barrier is complete. It also
    knows that the kept boxes have arrived, which full barriers cover only in the first tile of a pair.

Boxes of y have no barriers of their own
    Before the producer loads step s, it has waited for the empty barriers of this step and of all earlier steps, so the
    products of all steps up to s - STAGES are complete. That is enough to overwrite a box of y:

    - A streamed box overwrites the one that was streamed RING boxes earlier. Any STAGES consecutive steps stream at
      most RING boxes (`_stages`), so the older box belongs to step s - STAGES or to an earlier one.
    - A kept box overwrites that of the previous pair, which was last used STEPS steps earlier. If boxes are kept,
      STAGES is at most STEPS.

Plain kernels
    Each band is identified by the number of the plain kernels' program that has the same band (`_number`). The slow
    launch of the plain kernels computes the tiles that are skipped here, adds to the same sums, and finds by this
    number the bands of the sigmoid loss that have overflowed.
"""

import functools

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

from .triton_sigmoid import LIMIT, log1p, product_less_one
from .triton_softmax import REACH, exp, finite
from .triton_tiles import LOG2E, column_sums, is_inside, masked_tiles, place, thread_sums, whole_sum

# The first name is that of newer releases of Triton.
_copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# The number of slots, 16 KiB each, that fills shared memory. The kernels of coefficients need the space of two more
# slots to stage their output.
SLOTS_OF_SUMS, SLOTS_OF_COEFFICIENTS = gl.constexpr(14), gl.constexpr(12)
# An L2 cache of at least this size, in bytes, is assumed to deliver two boxes per step, because it consists of slices
# that deliver in parallel. An H100 has 50 MiB, an H200 60 MiB.
ENOUGH_L2 = 56 << 20
AHEAD = 4  # a pipeline with this many stages is deep enough
# Registers per thread. A multiprocessor has enough for 168 in each thread of three warpgroups; the producer's single
# warp counts as a warpgroup.
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(3 * 168 - 2 * 240)


@functools.lru_cache
def _shared_layout(dtype, rows, columns):
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


def described(matrix, rows, columns):
    """A TMA descriptor for boxes [rows, columns] of a matrix, with the layout of a box in shared memory."""
    layout = _shared_layout(matrix.dtype, rows, columns)
    return TensorDescriptor(matrix, matrix.shape, matrix.stride(), [rows, columns], layout)


def kept(slots, steps, device):
    """KEPT, the number of boxes of y that are kept, given the number of slots and the number of steps per tile.

    All boxes are kept if that leaves AHEAD stages. Otherwise none are kept if the L2 cache can deliver two boxes per
    step, and if it cannot, as many as leave AHEAD stages. Tiles of fewer than AHEAD steps keep none, because kept boxes
    limit the stages to the steps of a tile (`_stages`).
    """
    if steps < AHEAD:
        return 0
    if steps <= slots - AHEAD:
        return steps
    if torch.cuda.get_device_properties(device).L2_cache_size >= ENOUGH_L2:
        return 0
    return max(count for count in range(slots) if (slots - count) * steps // (2 * steps - count) >= AHEAD)


@gluon.constexpr_function
def _stages(SLOTS, KEPT, STEPS):
    """STAGES; the SLOTS - KEPT - STAGES other slots are the ring of streamed boxes of y.

    A tile streams STEPS - KEPT boxes of y in steps that are spread evenly, so s consecutive steps stream at most
    s · (STEPS - KEPT) / STEPS boxes, rounded up. STAGES is the largest s for which the SLOTS - KEPT slots have room for
    s boxes of x and this many boxes of y. Where boxes are kept it is at most STEPS (see the top of this file).
    """
    stages = (SLOTS - KEPT) * STEPS // (2 * STEPS - KEPT)
    return min(stages, STEPS) if KEPT > 0 else stages


@gluon.constexpr_function
def _layout(columns):
    """The layout of a product with this many columns in the registers of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _pair(pair, tiles, blocks, run, GROUP: gl.constexpr):
    """The column block of a pair, its first row tile, and the numbers of row tiles in its first and second band."""
    block, first = place(pair, tiles, blocks, 2 * run, GROUP)
    left = tiles - first
    return block, first, gl.minimum(left, run), gl.maximum(gl.minimum(left - run, run), 0)


@gluon.jit
def _own_run(pair, tiles, blocks, run, SECOND: gl.constexpr, GROUP: gl.constexpr):
    """The column block of a pair, and the first row tile and the number of row tiles of this consumer's band.

    These are followed by the number of row tiles in the second band, and the number in both bands together.
    """
    block, first, length, second_length = _pair(pair, tiles, blocks, run, GROUP)
    together = length + second_length
    if SECOND:
        first += run
        length = second_length
    return block, first, length, second_length, together


@gluon.jit
def _number(block, first, tiles, blocks, run, GROUP: gl.constexpr):
    """The number of the plain kernels' program to which `place` gives this column block and first row tile."""
    group = block // GROUP * GROUP
    return group * gl.cdiv(tiles, run) + first // run * gl.minimum(blocks - group, GROUP) + block - group


@gluon.jit
def _start(tile, SLOTS: gl.constexpr, KEPT: gl.constexpr, STEPS: gl.constexpr):
    """For the first step of a tile: its stage, the parity of the stage's phase, and the ring index of the next box."""
    STAGES: gl.constexpr = _stages(SLOTS, KEPT, STEPS)
    RING: gl.constexpr = SLOTS - KEPT - STAGES
    step = tile * STEPS
    return step % STAGES, step // STAGES & 1, tile * (STEPS - KEPT) % max(RING, 1)


@gluon.jit
def _next(index, COUNT: gl.constexpr):
    """The index that follows ``index`` in a ring of COUNT slots."""
    return gl.where(index == COUNT - 1, 0, index + 1)


@gluon.jit
def _slot(k, stage, ring, SLOTS: gl.constexpr, KEPT: gl.constexpr, STEPS: gl.constexpr):
    """The slot of step k's box of y, whether that box is kept, and the ring index of the next streamed box."""
    STAGES: gl.constexpr = _stages(SLOTS, KEPT, STEPS)
    RING: gl.constexpr = SLOTS - KEPT - STAGES
    if KEPT == 0:
        result = STAGES + stage, False, 0
    elif KEPT == STEPS:
        result = STAGES + k, True, 0
    else:
        is_kept = k * KEPT % STEPS < KEPT
        slot = gl.where(is_kept, STAGES + k * KEPT // STEPS, STAGES + KEPT + ring)
        result = slot, is_kept, gl.where(is_kept, ring, _next(ring, RING))
    return result


@gluon.jit
def _produce(
    x, y, boxes, full, empty, pairs, tiles, blocks, run,
    KEPT: gl.constexpr, STEPS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The producer, which loads all boxes."""
    SLOTS: gl.constexpr = boxes.shape[0]
    STAGES: gl.constexpr = _stages(SLOTS, KEPT, STEPS)
    BM: gl.constexpr = x.block_type.shape[0]
    BN: gl.constexpr = y.block_type.shape[0]
    BK: gl.constexpr = x.block_type.shape[1]
    stage, parity, ring = _start(0, SLOTS, KEPT, STEPS)
    for pair in range(gl.program_id(0), pairs, gl.num_programs(0)):
        block, first, first_length, second_length = _pair(pair, tiles, blocks, run, GROUP)
        for i in range(first_length + second_length):
            tile = gl.where(i < 2 * second_length, i // 2 + i % 2 * run, i - second_length)
            for k in range(STEPS):
                slot, is_kept, ring = _slot(k, stage, ring, SLOTS, KEPT, STEPS)
                ready = full.index(stage)
                mbarrier.wait(empty.index(stage), parity ^ 1)
                if (i > 0) & is_kept:
                    mbarrier.expect(ready, BM * BK * 2)
                else:
                    mbarrier.expect(ready, (BM + BN) * BK * 2)
                    _copy_in(y, [block * BN, k * BK], ready, boxes.index(slot))
                _copy_in(x, [(first + tile) * BM, k * BK], ready, boxes.index(stage))
                stage = _next(stage, STAGES)
                parity ^= gl.where(stage == 0, 1, 0)


@gluon.jit
def _multiply(boxes, full, acc, k, stage, parity, ring, KEPT: gl.constexpr, STEPS: gl.constexpr):
    """Issues the product of step k of a tile, and waits until all earlier products are complete.

    Takes the stage, parity and ring index of this step (see `_start`), and returns those of the next step.
    """
    SLOTS: gl.constexpr = boxes.shape[0]
    STAGES: gl.constexpr = _stages(SLOTS, KEPT, STEPS)
    slot, _, ring = _slot(k, stage, ring, SLOTS, KEPT, STEPS)
    mbarrier.wait(full.index(stage), parity)
    of_y = boxes.index(slot).permute((1, 0))
    acc = warpgroup_mma(boxes.index(stage), of_y, acc, use_acc=k > 0, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    stage = _next(stage, STAGES)
    return acc, stage, parity ^ gl.where(stage == 0, 1, 0), ring


@gluon.jit
def _product(
    boxes, full, empty, turns, t, second_length, tiles_before, own_tiles_before,
    SECOND: gl.constexpr, KEPT: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """[BM, BN] fp32: the product for tile t of this warpgroup's band.

    tiles_before is the number of tiles in the program's earlier pairs, own_tiles_before this warpgroup's share of them.
    """
    SLOTS: gl.constexpr = boxes.shape[0]
    BM: gl.constexpr = boxes.shape[1]
    BN: gl.constexpr = boxes.shape[1]
    tile = tiles_before + t + gl.minimum(t + SECOND, second_length)
    stage, parity, ring = _start(tile, SLOTS, KEPT, STEPS)
    acc = gl.zeros((BM, BN), gl.float32, _layout(BN))  # not read: the first product overwrites it
    mbarrier.wait(turns.index(1 if SECOND else 0), (own_tiles_before + t + (0 if SECOND else 1)) & 1)
    # Step 0 is peeled off the loop so that `before` differs from `stage` when the loop begins. Triton 3.6 considers a
    # variable loop-invariant if the loop assigns to it the value that it had on entry. Without the peeling that would
    # happen to `before`, to which the loop assigns `stage`.
    before = stage
    acc, stage, parity, ring = _multiply(boxes, full, acc, 0, stage, parity, ring, KEPT, STEPS)
    for k in range(1, STEPS):
        this = stage
        acc, stage, parity, ring = _multiply(boxes, full, acc, k, stage, parity, ring, KEPT, STEPS)
        mbarrier.arrive(empty.index(before), count=1)
        before = this
    # The turn is passed while the last product is still running, so that the tensor cores do not become idle.
    following = 0
    if not SECOND:
        following = gl.where(t < second_length, 1, 0)
    mbarrier.arrive(turns.index(following), count=1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(before), count=1)
    return acc


@gluon.jit
def _halves(tile):
    """The left and right halves of a tile's columns, each in the layout of a product of that shape."""
    BM: gl.constexpr = tile.shape[0]
    BN: gl.constexpr = tile.shape[1]
    left, right = gl.split(gl.permute(gl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))
    return (
        gl.convert_layout(left, _layout(BN // 2), assert_trivial=True),
        gl.convert_layout(right, _layout(BN // 2), assert_trivial=True),
    )


@gluon.jit
def _joined(left, right):
    """The inverse of `_halves`."""
    BM: gl.constexpr = left.shape[0]
    BN: gl.constexpr = 2 * left.shape[1]
    tile = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), (BM, BN))
    return gl.convert_layout(tile, _layout(BN), assert_trivial=True)


@gluon.jit
def _quotients(tile, u, GAIN: gl.constexpr):
    """The same as `triton_sigmoid._quotients`."""
    BM: gl.constexpr = u.shape[0]
    BN: gl.constexpr = u.shape[1]
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
    return _joined(of_a * inverse, of_b * inverse), product_less_one(four, BM, BN // 4)


@gluon.jit
def _store(g, tile, staging, row, column):
    """Stores a tile through shared memory. The copy is still in flight on return; the next store waits for it."""
    tma.store_wait(0)
    staging.store(tile.to(g.dtype))
    fence_async_shared()
    _copy_out(g, [row, column], staging)


@gluon.jit
def _no_sums(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Zeros, in the layout of the `thread_sums` of a product of this shape."""
    return thread_sums(gl.zeros((ROWS, COLUMNS), gl.float32, _layout(COLUMNS)), ROWS, COLUMNS)


@gluon.jit
def _sigmoid_cells(acc, s, b, GAIN: gl.constexpr):
    """The FAST case of `triton_sigmoid._sigmoid_cells`."""
    BM: gl.constexpr = acc.shape[0]
    BN: gl.constexpr = acc.shape[1]
    u = gl.exp2(acc * s + b)
    c, product = _quotients(u, u, GAIN)
    return c, product, thread_sums(c, BM, BN), thread_sums(c * acc, BM, BN)


@gluon.jit
def _sigmoid_half(acc, g, staging, s, b, row, column, GAIN: gl.constexpr):
    """The FAST case of `triton_sigmoid._sigmoid_tile`, for half a tile, which is as wide as a stored box."""
    left, right = _halves(acc)
    c, product, of_bias, of_scale = _sigmoid_cells(left, s, b, GAIN)
    more_c, more_product, more_of_bias, more_of_scale = _sigmoid_cells(right, s, b, GAIN)
    _store(g, _joined(c, more_c), staging, row, column)
    product = gl.fma(product, more_product, product + more_product)
    loss = gl.where(product < LIMIT, log1p(product), float("inf"))
    of_bias += more_of_bias
    return gl.convert_layout(loss, of_bias.type.layout, assert_trivial=True), of_bias, of_scale + more_of_scale


@gluon.jit
def _sigmoid(
    g, boxes, staging, full, empty, turns, loss_sums, bias_sums, scale_sums, overflowed, scale, bias,
    overlaps, m, n, diagonal, pairs, tiles, blocks, run,
    SECOND: gl.constexpr, GAIN: gl.constexpr, KEPT: gl.constexpr, STEPS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A consumer of `sigmoid_coefficients`: it computes the first band of each pair, or the second one if SECOND."""
    BM: gl.constexpr = boxes.shape[1]
    BN: gl.constexpr = boxes.shape[1]
    s = gl.load(scale) * LOG2E
    b = gl.load(bias) * LOG2E
    tiles_before = 0
    own_tiles_before = 0
    for pair in range(gl.program_id(0), pairs, gl.num_programs(0)):
        block, first, length, second_length, together = _own_run(pair, tiles, blocks, run, SECOND, GROUP)
        column = block * BN
        masked_start, masked_stop = masked_tiles(overlaps, block, diagonal, BM, BN)
        number = _number(block, first, tiles, blocks, run, GROUP)
        fitting = gl.load(overflowed + number, mask=length > 0, other=1.0) == 0
        loss = _no_sums(BM, BN // 4)
        of_bias = loss
        of_scale = loss
        for t in range(length):
            row = (first + t) * BM
            acc = _product(
                boxes, full, empty, turns, t, second_length, tiles_before, own_tiles_before, SECOND, KEPT, STEPS
            )
            # The boxes of the other tiles pass through the pipeline as well; their products are not used.
            if fitting & is_inside(row, column, m, n, masked_start, masked_stop, BM, BN):
                halves = _halves(acc)
                for i in gl.static_range(2):
                    more_loss, more_of_bias, more_of_scale = _sigmoid_half(
                        halves[i], g, staging, s, b, row, column + i * (BN // 2), GAIN
                    )
                    loss += more_loss
                    of_bias += more_of_bias
                    of_scale += more_of_scale
        tiles_before += together
        own_tiles_before += length
        whole_loss = whole_sum(loss)
        whole_of_bias = whole_sum(of_bias) * 2.0**-GAIN
        whole_of_scale = whole_sum(of_scale) * 2.0**-GAIN
        if fitting:
            if whole_loss < float("inf"):  # and not NaN
                gl.store(loss_sums + number, gl.load(loss_sums + number) + whole_loss)
                gl.store(bias_sums + number, gl.load(bias_sums + number) + whole_of_bias)
                gl.store(scale_sums + number, gl.load(scale_sums + number) + whole_of_scale)
            else:
                gl.store(overflowed + number, 1.0)
    tma.store_wait(0)


@gluon.jit
def _span(lse_x, of_y, first, rows, m, SPAN: gl.constexpr):
    """The same as `triton_softmax._span`."""
    strip = first + gl.arange(0, SPAN, gl.BlockedLayout([1], [32], [4], [0]))
    of_x = gl.load(lse_x + gl.minimum(strip, gl.minimum(first + rows, m) - 1))
    lowest = gl.minimum(gl.min(of_x, 0), gl.min(of_y, 0))
    highest = gl.maximum(gl.max(finite(of_x), 0), gl.max(finite(of_y), 0))
    bounded = gl.minimum(gl.max(of_x, 0), gl.max(of_y, 0)) < float("inf")
    # The result is the same in all threads, but the compiler cannot infer that. Code after a branch on it could not use
    # the uniform datapath, which computes once per warp, and a step of `_product` would take twice as many
    # instructions. A shuffle from a fixed lane tells the compiler that the value is uniform.
    near = gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [((highest - lowest <= REACH) & bounded).to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return (lowest + highest) * 0.5, near != 0


@gluon.jit
def _softmax_cells(acc, s, middle, of_x, lse_y, column, GAIN: gl.constexpr):
    """The FAST case of `triton_softmax._softmax_cells`."""
    BM: gl.constexpr = acc.shape[0]
    BN: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    of_y = gl.load(lse_y + column + gl.arange(0, BN, gl.SliceLayout(0, layout)))
    of_y = gl.exp2((middle - of_y) * LOG2E + GAIN)
    of_x = gl.convert_layout(of_x, gl.SliceLayout(1, layout), assert_trivial=True)
    c = exp(acc, s, middle, 0) * (of_x[:, None] + of_y[None, :])
    return c, thread_sums(c * acc, BM, BN)


@gluon.jit
def _softmax_half(acc, g, staging, s, middle, of_x, lse_y, row, column, GAIN: gl.constexpr):
    """The FAST case of `triton_softmax._softmax_tile`, for half a tile, which is as wide as a stored box."""
    left, right = _halves(acc)
    c, sums = _softmax_cells(left, s, middle, of_x, lse_y, column, GAIN)
    more_c, more_sums = _softmax_cells(right, s, middle, of_x, lse_y, column + left.shape[1], GAIN)
    _store(g, _joined(c, more_c), staging, row, column)
    return sums + more_sums


@gluon.jit
def _softmax(
    g, boxes, staging, full, empty, turns, scale_sums, lse_x, lse_y, scale,
    overlaps, m, n, diagonal, pairs, tiles, blocks, run,
    SECOND: gl.constexpr, SPAN: gl.constexpr, GAIN: gl.constexpr,
    KEPT: gl.constexpr, STEPS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A consumer of `softmax_coefficients`: it computes the first band of each pair, or the second one if SECOND."""
    BM: gl.constexpr = boxes.shape[1]
    BN: gl.constexpr = boxes.shape[1]
    s = gl.load(scale)
    tiles_before = 0
    own_tiles_before = 0
    for pair in range(gl.program_id(0), pairs, gl.num_programs(0)):
        block, first, length, second_length, together = _own_run(pair, tiles, blocks, run, SECOND, GROUP)
        column = block * BN
        masked_start, masked_stop = masked_tiles(overlaps, block, diagonal, BM, BN)
        columns = column + gl.arange(0, BN, gl.SliceLayout(0, _layout(BN)))
        middle, near = _span(lse_x, gl.load(lse_y + gl.minimum(columns, n - 1)), first * BM, run * BM, m, SPAN)
        sums = _no_sums(BM, BN // 4)
        for t in range(length):
            row = (first + t) * BM
            rows = row + gl.arange(0, BM, gl.SliceLayout(1, _layout(BN)))
            of_x = gl.load(lse_x + gl.minimum(rows, m - 1))
            acc = _product(
                boxes, full, empty, turns, t, second_length, tiles_before, own_tiles_before, SECOND, KEPT, STEPS
            )
            # The boxes of the other tiles pass through the pipeline as well; their products are not used.
            if near & is_inside(row, column, m, n, masked_start, masked_stop, BM, BN):
                of_x = gl.exp2((middle - of_x) * LOG2E + GAIN)
                left, right = _halves(acc)
                sums += _softmax_half(left, g, staging, s, middle, of_x, lse_y, row, column, GAIN)
                sums += _softmax_half(right, g, staging, s, middle, of_x, lse_y, row, column + BN // 2, GAIN)
        tiles_before += together
        own_tiles_before += length
        whole = whole_sum(sums) * 2.0**-GAIN
        number = _number(block, first, tiles, blocks, run, GROUP)
        if length > 0:
            gl.store(scale_sums + number, gl.load(scale_sums + number) + whole)
    tma.store_wait(0)


@gluon.jit
def _sums(
    boxes, full, empty, turns, sum_x, sum_y, reference_x, reference_y, scale,
    overlaps, m, n, diagonal, pairs, tiles, blocks, run,
    SECOND: gl.constexpr, SPAN: gl.constexpr, KEPT: gl.constexpr, STEPS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A consumer of `softmax_sums`: it computes the first band of each pair, or the second one if SECOND."""
    BM: gl.constexpr = boxes.shape[1]
    BN: gl.constexpr = boxes.shape[1]
    s = gl.load(scale)
    tiles_before = 0
    own_tiles_before = 0
    for pair in range(gl.program_id(0), pairs, gl.num_programs(0)):
        block, first, length, second_length, together = _own_run(pair, tiles, blocks, run, SECOND, GROUP)
        column = block * BN
        masked_start, masked_stop = masked_tiles(overlaps, block, diagonal, BM, BN)
        columns = column + gl.arange(0, BN, gl.SliceLayout(0, _layout(BN)))
        in_y = gl.minimum(columns, n - 1)
        middle, near = _span(reference_x, gl.load(reference_y + in_y), first * BM, run * BM, m, SPAN)
        partials = column_sums(gl.zeros((BM, BN), gl.float32, _layout(BN)), BM, BN, 4)
        for t in range(length):
            row = (first + t) * BM
            rows = row + gl.arange(0, BM, gl.SliceLayout(1, _layout(BN)))
            of_x = gl.load(reference_x + gl.minimum(rows, m - 1))
            acc = _product(
                boxes, full, empty, turns, t, second_length, tiles_before, own_tiles_before, SECOND, KEPT, STEPS
            )
            # The boxes of the other tiles pass through the pipeline as well; their products are not used.
            if near & is_inside(row, column, m, n, masked_start, masked_stop, BM, BN):
                e = exp(acc, s, of_x[:, None], 0)
                gl.atomic_add(sum_x + rows, gl.sum(e, 1), sem="relaxed")
                e *= gl.exp2((of_x - middle) * LOG2E)[:, None]
                partials += column_sums(e, BM, BN, 4)
        tiles_before += together
        own_tiles_before += length
        # Atomics add up the sums of the warps in global memory. A reduction here would take the shared memory of a
        # slot.
        of_warps = gl.reshape(gl.sum(partials, 1), (4 * BN,))
        columns = column + gl.arange(0, 4 * BN, of_warps.type.layout) % BN
        factors = gl.exp2((middle - gl.load(reference_y + gl.minimum(columns, n - 1))) * LOG2E)
        gl.atomic_add(sum_y + columns, of_warps * factors, mask=(columns < n) & near & (length > 0), sem="relaxed")


@gluon.jit
def _shared(x, SLOTS: gl.constexpr, KEPT: gl.constexpr, STEPS: gl.constexpr):
    """Allocates the slots and the barriers. Tiles are square, so boxes of x and of y have the same shape."""
    STAGES: gl.constexpr = _stages(SLOTS, KEPT, STEPS)
    boxes = gl.allocate_shared_memory(x.dtype, [SLOTS, x.block_type.shape[0], x.block_type.shape[1]], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    return boxes, full, empty, turns


@gluon.jit(do_not_specialize=["m", "n", "diagonal", "pairs", "tiles", "blocks", "run"])
def softmax_sums(
    x, y, sum_x, sum_y, reference_x, reference_y, scale, overlaps, m, n, diagonal, pairs, tiles, blocks, run,
    SPAN: gl.constexpr, KEPT: gl.constexpr, STEPS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The NEAR launch of `triton_softmax.softmax_sums`."""
    boxes, full, empty, turns = _shared(x, SLOTS_OF_SUMS, KEPT, STEPS)
    gl.warp_specialize(
        [
            (_sums, (
                boxes, full, empty, turns, sum_x, sum_y, reference_x, reference_y, scale,
                overlaps, m, n, diagonal, pairs, tiles, blocks, run, False, SPAN, KEPT, STEPS, GROUP,
            )),
            (_sums, (
                boxes, full, empty, turns, sum_x, sum_y, reference_x, reference_y, scale,
                overlaps, m, n, diagonal, pairs, tiles, blocks, run, True, SPAN, KEPT, STEPS, GROUP,
            )),
            (_produce, (x, y, boxes, full, empty, pairs, tiles, blocks, run, KEPT, STEPS, GROUP)),
        ],
        [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["m", "n", "diagonal", "pairs", "tiles", "blocks", "run"])
def sigmoid_coefficients(
    x, y, g, loss_sums, bias_sums, scale_sums, overflowed, scale, bias,
    overlaps, m, n, diagonal, pairs, tiles, blocks, run,
    GAIN: gl.constexpr, KEPT: gl.constexpr, STEPS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The FAST launch of `triton_sigmoid.sigmoid_coefficients`."""
    boxes, full, empty, turns = _shared(x, SLOTS_OF_COEFFICIENTS, KEPT, STEPS)
    staging = gl.allocate_shared_memory(g.dtype, [2, g.block_type.shape[0], g.block_type.shape[1]], g.layout)
    gl.warp_specialize(
        [
            (_sigmoid, (
                g, boxes, staging.index(0), full, empty, turns,
                loss_sums, bias_sums, scale_sums, overflowed, scale, bias,
                overlaps, m, n, diagonal, pairs, tiles, blocks, run, False, GAIN, KEPT, STEPS, GROUP,
            )),
            (_sigmoid, (
                g, boxes, staging.index(1), full, empty, turns,
                loss_sums, bias_sums, scale_sums, overflowed, scale, bias,
                overlaps, m, n, diagonal, pairs, tiles, blocks, run, True, GAIN, KEPT, STEPS, GROUP,
            )),
            (_produce, (x, y, boxes, full, empty, pairs, tiles, blocks, run, KEPT, STEPS, GROUP)),
        ],
        [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["m", "n", "diagonal", "pairs", "tiles", "blocks", "run"])
def softmax_coefficients(
    x, y, g, scale_sums, lse_x, lse_y, scale, overlaps, m, n, diagonal, pairs, tiles, blocks, run,
    SPAN: gl.constexpr, GAIN: gl.constexpr, KEPT: gl.constexpr, STEPS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The FAST launch of `triton_softmax.softmax_coefficients`."""
    boxes, full, empty, turns = _shared(x, SLOTS_OF_COEFFICIENTS, KEPT, STEPS)
    staging = gl.allocate_shared_memory(g.dtype, [2, g.block_type.shape[0], g.block_type.shape[1]], g.layout)
    gl.warp_specialize(
        [
            (_softmax, (
                g, boxes, staging.index(0), full, empty, turns,
                scale_sums, lse_x, lse_y, scale,
                overlaps, m, n, diagonal, pairs, tiles, blocks, run, False, SPAN, GAIN, KEPT, STEPS, GROUP,
            )),
            (_softmax, (
                g, boxes, staging.index(1), full, empty, turns,
                scale_sums, lse_x, lse_y, scale,
                overlaps, m, n, diagonal, pairs, tiles, blocks, run, True, SPAN, GAIN, KEPT, STEPS, GROUP,
            )),
            (_produce, (x, y, boxes, full, empty, pairs, tiles, blocks, run, KEPT, STEPS, GROUP)),
        ],
        [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
