# mypy: allow-untyped-defs, allow-incomplete-defs
"""The kernel of the sigmoid loss (SigLIP). `triton_tiles` explains tiles, bands and the two launches of a kernel.

There are two steps, with three products of m·n·D multiplications: one in step 1 and two in step 2.
1. `sigmoid_coefficients`: the terms of the loss, -log σ(t_ij z_ij), and the coefficients C_ij = -t_ij σ(-t_ij z_ij),
   both from one product.
2. cuBLAS: two products for the gradients, C·y for grad_x and Cᵀ·x for grad_y.

The fast launch computes exp(z) although z has no upper bound. Bands in which it overflows are marked and left to the
slow launch.
"""

import triton
import triton.language as tl

from .triton_tiles import (
    EXCLUDED,
    LOG2E,
    NO_IDS,
    equal_ids,
    halves,
    is_inside,
    joined,
    left_over,
    masked_tiles,
    place,
    store_tile,
    thread_sums,
    tile_product,
    whole_sum,
)

LIMIT = tl.constexpr(1e36)  # the reciprocals of smaller products are normal numbers


@triton.jit
def product_less_one(u, BM: tl.constexpr, BN: tl.constexpr):
    """[BM / 16, 8, 4]: Π (1 + u) - 1, each over the elements in one thread.

    A single logarithm then serves many elements. (1 + a)(1 + b) - 1 = ab + a + b has no cancellation, so small elements
    keep their precision. With u <= 1, the 32 factors of 64 columns do not overflow.
    """
    if BN > 4:
        if BN > 8:
            a, b = halves(u, BM, BN)
        else:
            a, b = tl.split(tl.reshape(u, (BM, 4, 2)))  # [rows, 4 (lane), 2 (register)]
        result = product_less_one(tl.fma(a, b, a + b), BM, BN // 2)
    else:
        # [slab and warp, 2 (register), 8 (lane), 4 (lane)]
        a, b = tl.split(tl.permute(tl.reshape(u, (BM // 16, 2, 8, 4)), (0, 2, 3, 1)))
        result = tl.fma(a, b, a + b)
    return result


@triton.jit
def _quotients(tile, u, BM: tl.constexpr, BN: tl.constexpr, GAIN: tl.constexpr):
    """2^GAIN · tile / (1 + u) [BM, BN], with one reciprocal for four elements; and the `product_less_one` of u."""
    a, b = halves(u, BM, BN)
    tile_a, tile_b = halves(tile, BM, BN)
    tile_a, tile_b = tl.fma(tile_a, b, tile_a), tl.fma(tile_b, a, tile_b)  # common denominator: (1 + a)(1 + b)
    two = a + tl.fma(b, a, b)  # the denominator less 1, [BM, BN / 2]
    left, right = halves(two, BM, BN // 2)
    whole_left, whole_right = halves(1.0 + two, BM, BN // 2)
    four = tl.fma(left, whole_right, right)  # the same for four elements, [BM, BN / 4]
    root = tl.rsqrt(1.0 + four)  # one instruction; a division takes six
    inverse = root * root * 2.0**GAIN
    inverse = joined(inverse * whole_right, inverse * whole_left, BM, BN // 2)
    return joined(tile_a * inverse, tile_b * inverse, BM, BN), product_less_one(four, BM, BN // 4)


@triton.jit
def log1p(p):
    """log(1 + p), from its series where 1 + p would lose digits of p."""
    series = p * (1 - p * (1 / 2 - p * (1 / 3 - p * (1 / 4 - p * (1 / 5)))))
    return tl.where(p < 0.03, series, tl.log2(1 + p) / LOG2E)


@triton.jit
def _sigmoid_cells(
    acc, s, b, ids_x, ids_y, row, column, m, n, diagonal,
    FAST: tl.constexpr, GAIN: tl.constexpr, EQUAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The coefficients [BM, BN] of a part of a tile, and four results [BM / 16, 8, 4] for the cells of each thread.

    The first two, p and r, are such that the losses of the cells add up to log(1 + p) + r. The third is the sum of
    their coefficients, and the fourth is the sum of their coefficients times their cosines.
    """
    z = acc * s + b
    rows = row + tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    if FAST:
        u = tl.exp2(z)
        c, product = _quotients(u, u, BM, BN, GAIN)
        linear = tl.zeros_like(product)
    else:
        positive = (rows + diagonal)[:, None] == columns[None, :]
        if EQUAL != NO_IDS:
            equal = equal_ids(ids_x, ids_y, tl.minimum(rows, m - 1), tl.minimum(columns, n - 1))
            if EQUAL == EXCLUDED:
                z = tl.where(equal, float("-inf"), z)
            else:
                positive = equal
        z = tl.where(positive, -(acc * s + b), z)
        z = tl.where((rows < m)[:, None] & (columns < n)[None, :], z, float("-inf"))
        u = tl.exp2(tl.abs(z) * -1.0)  # -x would be compiled to 0 - x, one more instruction
        c, product = _quotients(tl.where(z > 0, 1.0, u), u, BM, BN, GAIN)
        c = tl.where(positive, -c, c)
        linear = thread_sums(tl.maximum(z, 0.0), BM, BN) / LOG2E
    return c, product, linear, thread_sums(c, BM, BN), thread_sums(c * acc, BM, BN)


@triton.jit
def _sigmoid_tile(
    acc, g, s, b, ids_x, ids_y, row, column, m, n, diagonal, part_rows,
    FAST: tl.constexpr, PARTS: tl.constexpr, GAIN: tl.constexpr, EQUAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Stores a tile's coefficients g, and returns three sums [BM / 16, 8, 4]: of losses, of g, and of g times cosines.

    To save registers, it processes one strip of STRIP columns at a time, and each strip in two halves. s and b, and
    with them z, are multiplied by log2(e). FAST is for tiles that `is_inside` accepts and whose products of 1 + 2^z
    stay below LIMIT. If a product reaches LIMIT, the returned loss is infinite.
    """
    left, right = halves(acc, BM, BN)
    if STRIP < BN:
        loss, of_bias, of_scale = _sigmoid_tile(
            left, g, s, b, ids_x, ids_y, row, column, m, n, diagonal, part_rows,
            FAST, PARTS, GAIN, EQUAL, BM, BN // 2, STRIP,
        )  # fmt: skip
        more_loss, more_of_bias, more_of_scale = _sigmoid_tile(
            right, g, s, b, ids_x, ids_y, row, column + BN // 2, m, n, diagonal, part_rows,
            FAST, PARTS, GAIN, EQUAL, BM, BN // 2, STRIP,
        )  # fmt: skip
        loss += more_loss
    else:
        c, product, loss, of_bias, of_scale = _sigmoid_cells(
            left, s, b, ids_x, ids_y, row, column, m, n, diagonal, FAST, GAIN, EQUAL, BM, BN // 2
        )
        more_c, more_product, more_loss, more_of_bias, more_of_scale = _sigmoid_cells(
            right, s, b, ids_x, ids_y, row, column + BN // 2, m, n, diagonal, FAST, GAIN, EQUAL, BM, BN // 2
        )
        store_tile(g, joined(c, more_c, BM, BN), row, column, part_rows, BM, BN, STRIP, PARTS)
        product = tl.fma(product, more_product, product + more_product)
        loss += more_loss + log1p(product)
        if FAST:
            loss = tl.where(product < LIMIT, loss, float("inf"))
    return loss, of_bias + more_of_bias, of_scale + more_of_scale


@triton.jit(do_not_specialize=["m", "n", "diagonal", "tiles", "blocks", "run", "part_rows"])
def sigmoid_coefficients(
    x, y, g, loss_sums, bias_sums, scale_sums, overflowed, scale, bias, ids_x, ids_y, overlaps,
    m, n, diagonal, tiles, blocks, run, part_rows,
    FAST: tl.constexpr, PARTS: tl.constexpr, GAIN: tl.constexpr, EQUAL: tl.constexpr, CAREFUL: tl.constexpr,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STRIP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Stores g_ij = 2^GAIN · C_ij; adds Σ softplus(-t·z), Σ C_ij and Σ C_ij x_i·y_j to the program's sums.

    The work is shared by two launches. In the FAST launch, a program whose logits are too large marks itself as
    overflowed and adds nothing. The other launch then computes all tiles of that program, and the fast launches of
    later chunks skip it. No two programs share a sum, so the result does not depend on their order.
    """
    s = tl.load(scale) * LOG2E
    b = tl.load(bias) * LOG2E
    program = tl.program_id(0)
    block, first = place(program, tiles, blocks, run, GROUP)
    column = block * BN
    end = tl.minimum(first + run, tiles)
    masked_start, masked_stop = masked_tiles(overlaps, block, diagonal, BM, BN)
    fitting = tl.load(overflowed + program) == 0
    start, ordinary, count = first, end - first, tl.where(fitting & (column + BN <= n), end - first, 0)
    if not FAST:
        start, ordinary, count = left_over(
            first, end, column, m, n, masked_start, masked_stop, tiles, fitting == 0, BM, BN
        )
    nothing = tl.zeros((BM // 16, 8, 4), tl.float32)
    loss, of_bias, of_scale = nothing, nothing, nothing
    for i in tl.range(0, count, flatten=True):
        row = tl.where(i < ordinary, start + i, tiles - 1) * BM
        acc = tile_product(x, y, row, column, CAREFUL, K, BM, BN, BK)
        more_loss, more_of_bias, more_of_scale = nothing, nothing, nothing
        if not FAST or is_inside(row, column, m, n, masked_start, masked_stop, BM, BN):
            more_loss, more_of_bias, more_of_scale = _sigmoid_tile(
                acc, g, s, b, ids_x, ids_y, row, column, m, n, diagonal, part_rows,
                FAST, PARTS, GAIN, EQUAL, BM, BN, STRIP,
            )  # fmt: skip
        loss += more_loss
        of_bias += more_of_bias
        of_scale += more_of_scale
    whole_loss = whole_sum(loss)
    if FAST & ~(whole_loss < float("inf")):  # or NaN
        tl.store(overflowed + program, 1.0)
    else:
        tl.store(loss_sums + program, tl.load(loss_sums + program) + whole_loss)
        tl.store(bias_sums + program, tl.load(bias_sums + program) + whole_sum(of_bias) * 2.0**-GAIN)
        tl.store(scale_sums + program, tl.load(scale_sums + program) + whole_sum(of_scale) * 2.0**-GAIN)
