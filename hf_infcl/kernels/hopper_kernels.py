# mypy: allow-untyped-defs, allow-incomplete-defs
"""The fast launches on Hopper, in Gluon: the results of Triton's kernels up to rounding, in less time.

`triton_tiles`, `triton_softmax` and `triton_sigmoid` explain the algorithm and its formulas; this text explains how
they are scheduled on Hopper.

In CUTLASS's words the kernels are persistent, warp-specialised and ping-pong: one producer warp loads boxes of
features by TMA into slots of shared memory, and two consumer warpgroups multiply in turn. While one has the tensor
cores, the other makes sums or coefficients of its product.

Work: a *run* is the work of one program of the plain kernels, ``run`` row tiles of one column block. A program here
takes pairs of runs of the same column block, one for each warpgroup; the second run is never longer than the first, and
may be empty. The tiles alternate between the runs until the second one ends, and then the rest of the first follows.
The product of a tile has STEPS steps, each of a box of x and a box of y.

Slots: where the tensor cores are at work all the time, a step takes 512 cycles. On an H100 the L2 cache sends fewer
than 40 bytes per cycle to each multiprocessor, but two boxes in a step are 64. All tiles of a pair have the same boxes
of y. KEPT of these (`kept`: all, some or none of them) stay in slots of their own for the whole pair; they are those of
steps spread evenly over a tile, so that the loads are spread as well. The other slots are two rings. Each step takes
the next stage, which is a slot for its box of x and two barriers. A box of y that passes takes the next slot of the
other ring. All three partitions count the tiles of all the program's pairs: step k of tile i has the number
step = i · STEPS + k, its stage is step % STAGES, and it is the (step // STAGES)-th to have this stage.

Barriers; a phase of each ends with one arrival:

- full[stage]: the boxes that were loaded for the step have arrived. The arrival is the producer's expect; this phase
  also waits for the bytes.
- empty[stage]: the product of the step has ended. The arrival comes from the warpgroup whose tile it was.
- turns[0] and turns[1]: the first or the second warpgroup may issue its products. One arrival for each of its tiles,
  from the other warpgroup or, in the rest of a first run, from the first itself.

Phases are known by their parity alone, so no partition may be two phases behind. A turn is therefore passed only after
all boxes of the tile have been waited for: the warpgroup that gets it knows that every earlier use of each stage has
been full, and that the boxes that stay have arrived.

Boxes of y need no barriers of their own. The producer takes the stages in order: where it has waited for the stage of a
step, the products of all steps up to STAGES before this one have ended.

- A box that passes lies where one has lain that is RING boxes of this kind older. Of STAGES consecutive steps no more
  than RING have a box that passes (`_stages`), so the product with the older one has ended.
- A box that stays lies where the box of the same step of the last pair has lain. The last product with that one was
  STEPS steps earlier, and where boxes stay there are no more stages than steps.

A run has the number of its program in the plain kernels. Their slow launch does the tiles that are skipped here, adds
to the same sums, and finds by this number the runs of the sigmoid that have overflowed.
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

from .triton_sigmoid import LIMIT, log1p
from .triton_softmax import REACH, exp, finite
from .triton_tiles import LOG2E, column_sums, is_inside, masked_tiles, place, thread_sums, whole_sum

# The first names are those of newer releases of Triton.
_copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# Slots of 16 KiB, which fill shared memory. Coefficients need two more for outgoing tiles.
SLOTS_OF_SUMS, SLOTS_OF_COEFFICIENTS = gl.constexpr(14), gl.constexpr(12)
# An L2 cache of so many bytes is taken to send enough for two boxes in a step: it consists of slices that send side by
# side. An H100 has 50 MiB, an H200 60.
ENOUGH_L2 = 56 << 20
AHEAD = 4  # stages that are enough
# A multiprocessor has 168 registers for each thread of three warpgroups. The producer's one warp counts as a warpgroup.
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(3 * 168 - 2 * 240)


@functools.lru_cache
def _shared_layout(dtype, rows, columns):
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


def described(matrix, rows, columns):
    """A descriptor of boxes [rows, columns] of a matrix. Gluon's also tells the layout of a box in shared memory."""
    layout = _shared_layout(matrix.dtype, rows, columns)
    return TensorDescriptor(matrix, matrix.shape, matrix.stride(), [rows, columns], layout)


def kept(slots, steps, device):
    """KEPT for so many slots and steps of a tile.

    All boxes of y stay where AHEAD stages are left. Otherwise as many stay as leave AHEAD stages, or none if the L2
    cache sends enough for two boxes in a step.
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
    """STAGES. What is left of the slots is the ring of the boxes of y that pass, RING slots.

    Boxes pass in STEPS - KEPT of STEPS steps, spread evenly: s consecutive steps have s · (STEPS - KEPT) / STEPS of
    them, rounded up at most. The slots that do not keep boxes suffice for s stages and so many boxes.
    """
    stages = (SLOTS - KEPT) * STEPS // (2 * STEPS - KEPT)
    return min(stages, STEPS) if KEPT > 0 else stages


@gluon.constexpr_function
def _layout(columns):
    """The layout of a product with so many columns in the registers of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _pair(pair, tiles, blocks, run, GROUP: gl.constexpr):
    """A pair's column block, its first row tile, and the number of row tiles of its first and of its second run."""
    block, first = place(pair, tiles, blocks, 2 * run, GROUP)
    left = tiles - first
    return block, first, gl.minimum(left, run), gl.maximum(gl.minimum(left - run, run), 0)


@gluon.jit
def _own_run(pair, tiles, blocks, run, SECOND: gl.constexpr, GROUP: gl.constexpr):
    """A pair's column block and, of the run that one consumer takes, the first row tile and the number of row tiles.

    The last two numbers are the row tiles of the second run and of both runs.
    """
    block, first, length, second_length = _pair(pair, tiles, blocks, run, GROUP)
    together = length + second_length
    if SECOND:
        first += run
        length = second_length
    return block, first, length, second_length, together


@gluon.jit
def _number(block, first, tiles, blocks, run, GROUP: gl.constexpr):
    """The number of the plain program to which `place` gives this column block and first row tile."""
    group = block // GROUP * GROUP
    return group * gl.cdiv(tiles, run) + first // run * gl.minimum(blocks - group, GROUP) + block - group


@gluon.jit
def _start(tile, SLOTS: gl.constexpr, KEPT: gl.constexpr, STEPS: gl.constexpr):
    """For the first step of a tile: the stage, the parity of its phase, and the place in the ring of boxes of y."""
    STAGES: gl.constexpr = _stages(SLOTS, KEPT, STEPS)
    RING: gl.constexpr = SLOTS - KEPT - STAGES
    step = tile * STEPS
    return step % STAGES, step // STAGES & 1, tile * (STEPS - KEPT) % max(RING, 1)


@gluon.jit
def _next(place, COUNT: gl.constexpr):
    """The next place in a ring of so many."""
    return gl.where(place == COUNT - 1, 0, place + 1)


@gluon.jit
def _slot(k, stage, ring, SLOTS: gl.constexpr, KEPT: gl.constexpr, STEPS: gl.constexpr):
    """The slot of step k's box of y, whether the box stays, and the place in the ring for the next one that passes."""
    STAGES: gl.constexpr = _stages(SLOTS, KEPT, STEPS)
    RING: gl.constexpr = SLOTS - KEPT - STAGES
    if KEPT == 0:
        result = STAGES + stage, False, 0
    elif KEPT == STEPS:
        result = STAGES + k, True, 0
    else:
        stays = k * KEPT % STEPS < KEPT
        slot = gl.where(stays, STAGES + k * KEPT // STEPS, STAGES + KEPT + ring)
        result = slot, stays, gl.where(stays, ring, _next(ring, RING))
    return result


@gluon.jit
def _produce(
    x, y, boxes, full, empty, pairs, tiles, blocks, run,
    KEPT: gl.constexpr, STEPS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The producer: fills the slots."""
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
                slot, stays, ring = _slot(k, stage, ring, SLOTS, KEPT, STEPS)
                ready = full.index(stage)
                mbarrier.wait(empty.index(stage), parity ^ 1)
                if (i > 0) & stays:
                    mbarrier.expect(ready, BM * BK * 2)
                else:
                    mbarrier.expect(ready, (BM + BN) * BK * 2)
                    _copy_in(y, [block * BN, k * BK], ready, boxes.index(slot))
                _copy_in(x, [(first + tile) * BM, k * BK], ready, boxes.index(stage))
                stage = _next(stage, STAGES)
                parity ^= gl.where(stage == 0, 1, 0)


@gluon.jit
def _multiply(boxes, full, acc, k, stage, parity, ring, KEPT: gl.constexpr, STEPS: gl.constexpr):
    """Adds the product of step k of a tile, and returns when all products but this one have ended.

    Takes and returns the place of the step and of the one after it, as `_start` does.
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
    """[BM, BN] fp32: the product for tile t of this warpgroup's run.

    tiles_before and own_tiles_before count the tiles of earlier pairs: all of them, and this warpgroup's.
    """
    SLOTS: gl.constexpr = boxes.shape[0]
    BM: gl.constexpr = boxes.shape[1]
    BN: gl.constexpr = boxes.shape[1]
    tile = tiles_before + t + gl.minimum(t + SECOND, second_length)
    stage, parity, ring = _start(tile, SLOTS, KEPT, STEPS)
    acc = gl.zeros((BM, BN), gl.float32, _layout(BN))  # not read: the first product overwrites it
    mbarrier.wait(turns.index(1 if SECOND else 0), (own_tiles_before + t + (0 if SECOND else 1)) & 1)
    # The first step stands before the loop, so that `before` and `stage` enter the loop with different values. Triton
    # 3.6 takes a name for unchanged by a loop if it enters with the value that it is given there: here that of `stage`.
    before = stage
    acc, stage, parity, ring = _multiply(boxes, full, acc, 0, stage, parity, ring, KEPT, STEPS)
    for k in range(1, STEPS):
        this = stage
        acc, stage, parity, ring = _multiply(boxes, full, acc, k, stage, parity, ring, KEPT, STEPS)
        mbarrier.arrive(empty.index(before), count=1)
        before = this
    # Pass the turn while the last product still runs, so that the tensor cores do not wait for the other warpgroup.
    following = 0
    if not SECOND:
        following = gl.where(t < second_length, 1, 0)
    mbarrier.arrive(turns.index(following), count=1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(before), count=1)
    return acc


@gluon.jit
def _halves(tile):
    """The left and the right half of a tile's columns, each in the layout of a product of its shape."""
    BM: gl.constexpr = tile.shape[0]
    BN: gl.constexpr = tile.shape[1]
    left, right = gl.split(gl.permute(gl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))
    return (
        gl.convert_layout(left, _layout(BN // 2), assert_trivial=True),
        gl.convert_layout(right, _layout(BN // 2), assert_trivial=True),
    )


@gluon.jit
def _joined(left, right):
    """The tile that _halves takes apart."""
    BM: gl.constexpr = left.shape[0]
    BN: gl.constexpr = 2 * left.shape[1]
    tile = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), (BM, BN))
    return gl.convert_layout(tile, _layout(BN), assert_trivial=True)


@gluon.jit
def _product_less_one(u):
    """As in `triton_sigmoid`."""
    BM: gl.constexpr = u.shape[0]
    BN: gl.constexpr = u.shape[1]
    if BN > 4:
        if BN > 8:
            a, b = _halves(u)
        else:
            a, b = gl.split(gl.reshape(u, (BM, 4, 2)))  # [rows, 4 (lane), 2 (register)]
        result = _product_less_one(gl.fma(a, b, a + b))
    else:
        # [slab and warp, 2 (register), 8 (lane), 4 (lane)]
        a, b = gl.split(gl.permute(gl.reshape(u, (BM // 16, 2, 8, 4)), (0, 2, 3, 1)))
        result = gl.fma(a, b, a + b)
    return result


@gluon.jit
def _quotients(tile, u, GAIN: gl.constexpr):
    """As in `triton_sigmoid`."""
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
    """Stores a tile by way of shared memory. The copy out goes on after the return; the next store waits for it."""
    tma.store_wait(0)
    staging.store(tile.to(g.dtype))
    fence_async_shared()
    _copy_out(g, [row, column], staging)


@gluon.jit
def _no_sums(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Zeros in the layout of the `thread_sums` of a product of this shape."""
    return thread_sums(gl.zeros((ROWS, COLUMNS), gl.float32, _layout(COLUMNS)), ROWS, COLUMNS)


@gluon.jit
def _sigmoid_cells(acc, s, b, GAIN: gl.constexpr):
    """`triton_sigmoid._sigmoid_cells`, if FAST."""
    BM: gl.constexpr = acc.shape[0]
    BN: gl.constexpr = acc.shape[1]
    u = gl.exp2(acc * s + b)
    c, product = _quotients(u, u, GAIN)
    return c, product, thread_sums(c, BM, BN), thread_sums(c * acc, BM, BN)


@gluon.jit
def _sigmoid_half(acc, g, staging, s, b, row, column, GAIN: gl.constexpr):
    """`triton_sigmoid._sigmoid_tile` of half a tile, which has the width of a stored box."""
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
    """A consumer of `sigmoid_coefficients`, which takes the first or the SECOND run of each pair."""
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
            # The boxes of the other tiles pass through the slots as well, so they are multiplied and dropped.
            if fitting & is_inside(row, column, m, n, masked_start, masked_stop, BM, BN):
                left, right = _halves(acc)
                more_loss, more_of_bias, more_of_scale = _sigmoid_half(left, g, staging, s, b, row, column, GAIN)
                loss += more_loss
                of_bias += more_of_bias
                of_scale += more_of_scale
                more_loss, more_of_bias, more_of_scale = _sigmoid_half(
                    right, g, staging, s, b, row, column + BN // 2, GAIN
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
    """As in `triton_softmax`."""
    strip = first + gl.arange(0, SPAN, gl.BlockedLayout([1], [32], [4], [0]))
    of_x = gl.load(lse_x + gl.minimum(strip, gl.minimum(first + rows, m) - 1))
    lowest = gl.minimum(gl.min(of_x, 0), gl.min(of_y, 0))
    highest = gl.maximum(gl.max(finite(of_x), 0), gl.max(finite(of_y), 0))
    bounded = gl.minimum(gl.max(of_x, 0), gl.max(of_y, 0)) < float("inf")
    # All threads have the same result, but the compiler does not see it. What lies behind a branch on it would lose the
    # units that compute once for a warp: a step of `_product` would take twice as many instructions. Of a value that
    # comes from one lane the compiler knows it.
    near = gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [((highest - lowest <= REACH) & bounded).to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return (lowest + highest) * 0.5, near != 0


@gluon.jit
def _softmax_cells(acc, s, middle, of_x, lse_y, column, GAIN: gl.constexpr):
    """`triton_softmax._softmax_cells`, if FAST."""
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
    """`triton_softmax._softmax_tile` of half a tile, which has the width of a stored box."""
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
    """A consumer of `softmax_coefficients`, which takes the first or the SECOND run of each pair."""
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
            # The boxes of the other tiles pass through the slots as well, so they are multiplied and dropped.
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
    """A consumer of `softmax_sums`, which takes the first or the SECOND run of each pair."""
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
            # The boxes of the other tiles pass through the slots as well, so they are multiplied and dropped.
            if near & is_inside(row, column, m, n, masked_start, masked_stop, BM, BN):
                e = exp(acc, s, of_x[:, None], 0)
                gl.atomic_add(sum_x + rows, gl.sum(e, 1), sem="relaxed")
                e *= gl.exp2((of_x - middle) * LOG2E)[:, None]
                partials += column_sums(e, BM, BN, 4)
        tiles_before += together
        own_tiles_before += length
        # The sums of the warps are added in memory: to add them up here would take the shared memory of a slot.
        of_warps = gl.reshape(gl.sum(partials, 1), (4 * BN,))
        columns = column + gl.arange(0, 4 * BN, of_warps.type.layout) % BN
        factors = gl.exp2((middle - gl.load(reference_y + gl.minimum(columns, n - 1))) * LOG2E)
        gl.atomic_add(sum_y + columns, of_warps * factors, mask=(columns < n) & near & (length > 0), sem="relaxed")


@gluon.jit
def _shared(x, SLOTS: gl.constexpr, KEPT: gl.constexpr, STEPS: gl.constexpr):
    """Shared memory: the slots and the barriers. Tiles are square, so that boxes of x and of y have the same shape."""
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
