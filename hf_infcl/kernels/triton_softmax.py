# mypy: allow-untyped-defs, allow-incomplete-defs
"""The kernels of the softmax loss (InfoNCE). `triton_tiles` explains tiles, bands and the two launches of a kernel.

There are six steps, with four products of m·n·D multiplications: one in step 2, one in step 5 and two in step 6.
1. `positives`: the logits of the pairs, the *pivots* (``reference_x`` and ``reference_y``) of their rows and columns.
   Only the diagonal tiles are computed, which takes m·B·D multiplications for tiles of B rows.
2. `softmax_sums`: the first product. Row sums Σ_j exp(z_ij - reference_x_i), column sums Σ_i exp(z_ij - reference_y_j).
3. `log_odds`: the logarithms of these sums. A sum that has overflowed is recomputed with a running maximum.
4. `softmax_losses`: cross entropies and log-sum-exps, once the log-odds of the whole batch are known.
5. `softmax_coefficients`: the same product again, since no logit was stored. With the log-sum-exps of the whole batch
   it stores the coefficients C_ij = exp(z_ij - lse_x_i) + exp(z_ij - lse_y_j) in the workspace.
6. cuBLAS: two products for the gradients, C·y for grad_x and Cᵀ·x for grad_y.

In the fast launch of steps 2 and 5 a single exponential of each logit serves both its row and its column. With r the
pivot of the row (or of the column) and M the middle of all pivots of a band, exp(z - r) is
exp(z - M) · exp(M - r). Bands whose pivots are far apart belong to the slow launch (`_span`), because one of these
factors could underflow although their product is large.
"""

import triton
import triton.language as tl

from .triton_tiles import (
    EXCLUDED,
    LOG2E,
    NO_IDS,
    POSITIVE,
    column_sums,
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

# The largest distance between the pivots of a fast band. An exponential that underflows relative to its row, below
# e^-87, is then below e^-43 relative to its column, where it can be neglected.
REACH = tl.constexpr(44.0)


@triton.jit
def exp(acc, scale, reference, CAREFUL: tl.constexpr):
    """exp(scale · acc - reference), [BM, BN], with the pivots of rows [BM, 1] or of columns [1, BN], or one for all.

    For fp32 features the logit is rounded before the pivot is subtracted, as in plain torch. Without this rounding,
    at a scale of 1e4, the largest logit of a row would differ from its log-sum-exp where the two should be equal. For
    half precision the exponent is a single fused multiply-add.
    """
    exponent = acc * (scale * LOG2E) - reference * LOG2E if CAREFUL == 0 else (acc * scale - reference) * LOG2E
    return tl.exp2(exponent)


@triton.jit
def finite(references):
    """The pivots with -inf in place of +inf."""
    return tl.where(references < float("inf"), references, float("-inf"))


@triton.jit
def _span(of_x, of_y, first, rows, m, SPAN: tl.constexpr):
    """The middle of the pivots of a program's rows and columns, and whether all of these lie within REACH.

    of_x points to the pivots of all rows, of_y [BN] holds those of the program's columns. SPAN is a power of two
    and at least ``rows``. Rows and columns that have no part in the coefficients have infinite pivots, which are
    ignored. If there are both such rows and such columns, the answer is no, because nothing bounds their common logits.
    """
    strip = first + tl.arange(0, SPAN)
    all_x = tl.load(of_x + tl.minimum(strip, tl.minimum(first + rows, m) - 1))
    lowest = tl.minimum(tl.min(all_x), tl.min(of_y))
    highest = tl.maximum(tl.max(finite(all_x)), tl.max(finite(of_y)))
    bounded = tl.minimum(tl.max(all_x), tl.max(of_y)) < float("inf")
    return (lowest + highest) * 0.5, (highest - lowest <= REACH) & bounded


# ---- Statistics ----


@triton.jit(do_not_specialize=["m"])
def positives(x, y, scale, out, m, CAREFUL: tl.constexpr, K: tl.constexpr, B: tl.constexpr, BK: tl.constexpr):
    """scale · x_i·y_i, from the diagonals of tile products, so that it is rounded like the logits of other kernels."""
    row = tl.program_id(0) * B
    acc = tile_product(x, y, row, row, CAREFUL, K, B, B, BK)
    rows = tl.arange(0, B)
    of_pairs = tl.sum(tl.where(rows[:, None] == rows[None, :], acc, 0.0), 1)  # [B]
    tl.store(out + row + rows, of_pairs * tl.load(scale), mask=row + rows < m)


@triton.jit
def _negative(rows, columns, m, n, diagonal):
    """[BM, BN] bool: the cells of a tile that are in the block and not on the diagonal."""
    return ((rows + diagonal)[:, None] != columns[None, :]) & (rows < m)[:, None] & (columns < n)[None, :]


@triton.jit
def _add_positives(logits, positive, sums, numbers, length, AXIS: tl.constexpr):
    """Adds Σ exp(logits) and Σ logits along AXIS, over a tile's positives, to rows 1 and 2 of ``sums`` [3, length].

    The logits [BM, BN] are relative to the pivots of their rows (AXIS 1) or columns (AXIS 0). ``numbers`` are the
    indices of these rows [BM] or columns [BN] in the block.
    """
    e = tl.sum(tl.where(positive, tl.exp2(logits * LOG2E), 0.0), AXIS)
    tl.atomic_add(sums + length + numbers, e, mask=numbers < length, sem="relaxed")
    away = tl.sum(tl.where(positive, logits, 0.0), AXIS)
    tl.atomic_add(sums + 2 * length + numbers, away, mask=numbers < length, sem="relaxed")


@triton.jit(do_not_specialize=["m", "n", "diagonal", "tiles", "blocks", "run"])
def softmax_sums(
    x, y, sum_x, sum_y, reference_x, reference_y, scale, ids_x, ids_y, overlaps, m, n, diagonal, tiles, blocks, run,
    NEAR: tl.constexpr, GATED: tl.constexpr, SPAN: tl.constexpr, EQUAL: tl.constexpr, CAREFUL: tl.constexpr,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """sum_x_i += Σ_j exp(z_ij - reference_x_i), sum_y_j += Σ_i exp(z_ij - reference_y_j) over the negatives.

    If equal ids are POSITIVE, sum_x is [3, m]: row 1 receives the same sum over the positives, and row 2 the sum of
    their z_ij - reference_x_i; likewise for sum_y [3, n]. If GATED, the work is shared by two launches, of which NEAR
    is the fast one.
    """
    s = tl.load(scale)
    block, first = place(tl.program_id(0), tiles, blocks, run, GROUP)
    end = tl.minimum(first + run, tiles)
    column = block * BN
    columns = column + tl.arange(0, BN)
    in_y = tl.minimum(columns, n - 1)  # columns beyond the end repeat the last one, which changes no minimum or maximum
    of_y = tl.load(reference_y + in_y)  # [BN]
    masked_start, masked_stop = masked_tiles(overlaps, block, diagonal, BM, BN)
    start, ordinary, count = first, end - first, end - first
    limit = n
    base = of_y  # the pivot of the column sums until they are stored
    if GATED:
        middle, near = _span(reference_x, of_y, first * BM, run * BM, m, SPAN)
        if NEAR:
            near &= column + BN <= n
            count = tl.where(near, count, 0)
            limit = tl.where(near, n, 0)
            base = tl.zeros_like(of_y) + middle
        else:
            start, ordinary, count = left_over(
                first, end, column, m, n, masked_start, masked_stop, tiles, near == 0, BM, BN
            )
    partials = column_sums(tl.zeros((BM, BN), tl.float32), BM, BN, WARPS)  # [WARPS, 8, BN]
    for i in tl.range(0, count, flatten=True):
        row = tl.where(i < ordinary, start + i, tiles - 1) * BM
        acc = tile_product(x, y, row, column, CAREFUL, K, BM, BN, BK)
        rows = row + tl.arange(0, BM)
        in_x = tl.minimum(rows, m - 1)
        of_x = tl.load(reference_x + in_x)[:, None]  # [BM, 1]
        e = exp(acc, s, of_x, CAREFUL)  # [BM, BN]
        if NEAR:
            if not is_inside(row, column, m, n, masked_start, masked_stop, BM, BN):
                e = tl.zeros_like(e)
            row_sums = tl.sum(e, 1)  # [BM]
            e *= tl.exp2((of_x - middle) * LOG2E)  # now relative to the middle, for the column sums
        else:
            negative = _negative(rows, columns, m, n, diagonal)
            if EQUAL != NO_IDS:
                equal = equal_ids(ids_x, ids_y, in_x, in_y)
                if EQUAL == POSITIVE:  # noqa: SIM102 (decided when the kernel is compiled)
                    if (row >= masked_start * BM) & (row < masked_stop * BM):
                        positive = negative & equal
                        _add_positives(acc * s - of_x, positive, sum_x, rows, m, 1)
                        _add_positives(acc * s - of_y[None, :], positive, sum_y, columns, n, 0)
                negative &= ~equal
            row_sums = tl.sum(tl.where(negative, e, 0.0), 1)
            e = tl.where(negative, exp(acc, s, of_y[None, :], CAREFUL), 0.0)
        tl.atomic_add(sum_x + rows, row_sums, mask=rows < m, sem="relaxed")
        partials += column_sums(e, BM, BN, WARPS)
    total = tl.sum(tl.sum(partials, 0), 0) * tl.exp2((base - of_y) * LOG2E)  # [BN]
    tl.atomic_add(sum_y + columns, total, mask=columns < limit, sem="relaxed")


@triton.jit
def _continued(highest, total, logits):
    """Continues a running maximum [B], and the sum of exponentials relative to it [B], over more logits [B, B]."""
    higher = tl.maximum(highest, tl.max(logits, 1))
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    total *= tl.exp2((highest - anchor) * LOG2E)
    return higher, total + tl.sum(tl.exp2((logits - anchor[:, None]) * LOG2E), 1)


@triton.jit
def _log_odds(
    x, y, sums, reference, out, scale, ids_x, ids_y, row, m, n, diagonal,
    EQUAL: tl.constexpr, CAREFUL: tl.constexpr, K: tl.constexpr, B: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Stores log(sums) of B rows from ``row`` on; see `log_odds`. For columns, x and y are exchanged."""
    rows = row + tl.arange(0, B)
    in_x = tl.minimum(rows, m - 1)
    total = tl.load(sums + in_x)  # [B]
    odds = tl.log2(total) / LOG2E
    overflowed = total == float("inf")
    if EQUAL == POSITIVE:
        of_positives = tl.load(sums + m + in_x)
        odds_of_positives = tl.log2(of_positives) / LOG2E
        away = tl.load(sums + 2 * m + in_x)
        overflowed |= of_positives == float("inf")
    if tl.max(overflowed.to(tl.int32)) == 1:
        s = tl.load(scale)
        of_x = tl.load(reference + in_x)
        highest = tl.full((B,), float("-inf"), tl.float32)
        total = tl.zeros((B,), tl.float32)
        if EQUAL == POSITIVE:
            highest_positive = tl.full((B,), float("-inf"), tl.float32)
            of_positives = tl.zeros((B,), tl.float32)
            away = tl.zeros((B,), tl.float32)
        for column in range(0, n, B):
            columns = column + tl.arange(0, B)
            logits = tile_product(x, y, row, column, CAREFUL, K, B, B, BK) * s - of_x[:, None]  # [B, B]
            negative = ((rows + diagonal)[:, None] != columns[None, :]) & (columns < n)[None, :]
            if EQUAL != NO_IDS:
                equal = equal_ids(ids_x, ids_y, in_x, tl.minimum(columns, n - 1))
                if EQUAL == POSITIVE:
                    positive = negative & equal
                    away += tl.sum(tl.where(positive, logits, 0.0), 1)
                    of_positive = tl.where(positive, logits, float("-inf"))
                    highest_positive, of_positives = _continued(highest_positive, of_positives, of_positive)
                negative &= ~equal
            highest, total = _continued(highest, total, tl.where(negative, logits, float("-inf")))
        odds = highest + tl.log2(total) / LOG2E
        if EQUAL == POSITIVE:
            odds_of_positives = highest_positive + tl.log2(of_positives) / LOG2E
    tl.store(out + rows, odds, mask=rows < m)
    if EQUAL == POSITIVE:
        tl.store(out + m + rows, odds_of_positives, mask=rows < m)
        tl.store(out + 2 * m + rows, away, mask=rows < m)


@triton.jit(do_not_specialize=["m", "n", "diagonal"])
def log_odds(
    x, y, sum_x, sum_y, reference_x, reference_y, out_x, out_y, scale, ids_x, ids_y, m, n, diagonal,
    EQUAL: tl.constexpr, CAREFUL: tl.constexpr, K: tl.constexpr, B: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The logarithms of the results of `softmax_sums`. The first programs take B rows each, the others B columns each.

    A sum is infinite if a logit is more than 88 above the pivot of its row or column. A program that finds one
    recomputes its rows or columns with a running maximum and without atomics. If equal ids are POSITIVE, out_x is
    [3, m] and out_y [3, n], and row 2 of each is copied without taking the logarithm.
    """
    of_rows = tl.cdiv(m, B)  # programs
    if tl.program_id(0) < of_rows:
        row = tl.program_id(0) * B
        _log_odds(x, y, sum_x, reference_x, out_x, scale, ids_x, ids_y, row, m, n, diagonal, EQUAL, CAREFUL, K, B, BK)
    else:
        row = (tl.program_id(0) - of_rows) * B
        _log_odds(y, x, sum_y, reference_y, out_y, scale, ids_y, ids_x, row, n, m, -diagonal, EQUAL, CAREFUL, K, B, BK)


# ---- Losses ----


@triton.jit
def _softplus(odds):
    """log(1 + e^odds), with full relative precision however small it is, and the sigmoid of the odds."""
    u = tl.exp(-tl.abs(odds))
    v = 1.0 + u
    # log(v) is the logarithm of the rounded v. The second term corrects for the rounding.
    return tl.maximum(odds, 0.0) + tl.log(v) + (u - (v - 1.0)) / v, tl.where(odds > 0, 1.0, u) / v


@triton.jit(do_not_specialize=["m", "n"])
def softmax_losses(
    positive, odds_x, odds_y, positive_of_columns, odds_of_columns, loss, lse_x, lse_y, coefficient, m, n,
    B: tl.constexpr,
):  # fmt: skip
    """The cross entropies (softplus of the log-odds), and the inputs of `softmax_coefficients`; see `hf_infcl.kernels`.

    A single program computes everything, B elements at a time, so that the order of the sum is fixed. For batches for
    which this takes long, the other kernels take thousands of times as long.
    """
    total = tl.zeros((B,), tl.float32)
    for start in range(0, m, B):
        rows = start + tl.arange(0, B)
        inside = rows < m
        of_x, sigmoid_x = _softplus(tl.load(odds_x + rows, inside, float("-inf")))
        of_y, sigmoid_y = _softplus(tl.load(odds_y + rows, inside, float("-inf")))
        total += of_x + of_y
        tl.store(lse_x + rows, tl.load(positive + rows, inside) + of_x, inside)
        tl.store(coefficient + rows, -(sigmoid_x + sigmoid_y), inside)
    for start in range(0, n, B):
        columns = start + tl.arange(0, B)
        inside = columns < n
        of_columns, _ = _softplus(tl.load(odds_of_columns + columns, inside, float("-inf")))
        tl.store(lse_y + columns, tl.load(positive_of_columns + columns, inside) + of_columns, inside)
    tl.store(loss, tl.sum(total))


# ---- Coefficients ----


@triton.jit
def _term(acc, scale, lse, relative, places, CAREFUL: tl.constexpr):
    """The row or column term of a negative, exp(z - lse - relative). ``relative`` points to [m] or [n]."""
    if relative is None:
        term = exp(acc, scale, lse, CAREFUL)
    else:
        term = tl.exp2((acc * scale - lse - tl.load(relative + places)) * LOG2E)
    return term


@triton.jit
def _positive_term(term, share):
    """The row or column term of a positive, if equal ids are POSITIVE. `softmax_coefficients` explains the share."""
    return tl.where(share < 0, share, term - share)


@triton.jit
def _softmax_cells(
    acc, s, middle, of_x, lse_y, relative_x, relative_y, share_x, share_y, ids_x, ids_y, row, column, m, n, diagonal,
    FAST: tl.constexpr, GAIN: tl.constexpr, EQUAL: tl.constexpr, CAREFUL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The coefficients [BM, BN] of a part of a tile, and the `thread_sums` of coefficients times cosines.

    of_x [BM] is 2^GAIN · exp(middle - lse_x), the factors of the rows, if FAST, and otherwise lse_x - GAIN · log(2).
    """
    rows = row + tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    in_x = tl.minimum(rows, m - 1)
    in_y = tl.minimum(columns, n - 1)
    of_y = tl.load(lse_y + in_y)
    if FAST:
        c = exp(acc, s, middle, CAREFUL) * (of_x[:, None] + tl.exp2((middle - of_y) * LOG2E + GAIN)[None, :])
    else:
        term_x = _term(acc, s, of_x[:, None], relative_x, in_x[:, None], CAREFUL)
        term_y = _term(acc, s, of_y[None, :] - GAIN / LOG2E, relative_y, in_y[None, :], CAREFUL)
        c = term_x + term_y
        of_positives = tl.load(share_x + in_x)[:, None] * 2.0**GAIN
        if EQUAL == EXCLUDED:
            c = tl.where(equal_ids(ids_x, ids_y, in_x, in_y), 0.0, c)
        if EQUAL == POSITIVE:
            terms = _positive_term(term_x, of_positives)
            terms += _positive_term(term_y, tl.load(share_y + in_y)[None, :] * 2.0**GAIN)
            c = tl.where(equal_ids(ids_x, ids_y, in_x, in_y), terms, c)
        c = tl.where((rows < m)[:, None] & (columns < n)[None, :], c, 0.0)  # c may be infinite outside of the block
        if EQUAL != POSITIVE:
            c = tl.where((rows + diagonal)[:, None] == columns[None, :], of_positives, c)
    return c, thread_sums(c * acc, BM, BN)


@triton.jit
def _softmax_tile(
    acc, g, s, middle, of_x, lse_y, relative_x, relative_y, share_x, share_y, ids_x, ids_y,
    row, column, m, n, diagonal, part_rows,
    FAST: tl.constexpr, PARTS: tl.constexpr, GAIN: tl.constexpr, EQUAL: tl.constexpr, CAREFUL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Stores a tile's coefficients and returns the `thread_sums` of coefficients times cosines.

    To save registers, it processes one strip of STRIP columns at a time, and each strip in two halves.
    """
    left, right = halves(acc, BM, BN)
    if STRIP < BN:
        sums = _softmax_tile(
            left, g, s, middle, of_x, lse_y, relative_x, relative_y, share_x, share_y, ids_x, ids_y,
            row, column, m, n, diagonal, part_rows, FAST, PARTS, GAIN, EQUAL, CAREFUL, BM, BN // 2, STRIP,
        )  # fmt: skip
        more_sums = _softmax_tile(
            right, g, s, middle, of_x, lse_y, relative_x, relative_y, share_x, share_y, ids_x, ids_y,
            row, column + BN // 2, m, n, diagonal, part_rows, FAST, PARTS, GAIN, EQUAL, CAREFUL, BM, BN // 2, STRIP,
        )  # fmt: skip
    else:
        c, sums = _softmax_cells(
            left, s, middle, of_x, lse_y, relative_x, relative_y, share_x, share_y, ids_x, ids_y,
            row, column, m, n, diagonal, FAST, GAIN, EQUAL, CAREFUL, BM, BN // 2,
        )  # fmt: skip
        more_c, more_sums = _softmax_cells(
            right, s, middle, of_x, lse_y, relative_x, relative_y, share_x, share_y, ids_x, ids_y,
            row, column + BN // 2, m, n, diagonal, FAST, GAIN, EQUAL, CAREFUL, BM, BN // 2,
        )  # fmt: skip
        store_tile(g, joined(c, more_c, BM, BN), row, column, part_rows, BM, BN, STRIP, PARTS)
    return sums + more_sums


@triton.jit(do_not_specialize=["m", "n", "diagonal", "tiles", "blocks", "run", "part_rows"])
def softmax_coefficients(
    x, y, g, scale_sums, lse_x, lse_y, relative_x, relative_y, share_x, share_y, scale, ids_x, ids_y, overlaps,
    m, n, diagonal, tiles, blocks, run, part_rows,
    FAST: tl.constexpr, GATED: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr, GAIN: tl.constexpr,
    EQUAL: tl.constexpr, CAREFUL: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STRIP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Stores g_ij = 2^GAIN · C_ij; adds Σ C_ij x_i·y_j to the program's element of scale_sums.

    C_ij is the sum of a row term, exp(z_ij - lse_x_i - relative_x_i), and a column term, exp(z_ij - lse_y_j -
    relative_y_j). relative_x and relative_y are both given, or both None, which means 0. Excluded cells have C_ij = 0,
    and cells on the diagonal C_ij = share_x_i. If equal ids are POSITIVE, the row term of a cell with equal ids is
    share_x_i where that is negative, and is reduced by share_x_i otherwise; likewise the column term with share_y_j. If
    GATED, the work is shared by two launches, of which FAST is the fast one.
    """
    s = tl.load(scale)
    program = tl.program_id(0)
    block, first = place(program, tiles, blocks, run, GROUP)
    column = block * BN
    end = tl.minimum(first + run, tiles)
    masked_start, masked_stop = masked_tiles(overlaps, block, diagonal, BM, BN)
    middle = 0.0
    start, ordinary, count = first, end - first, end - first
    if GATED:
        of_y = tl.load(lse_y + tl.minimum(column + tl.arange(0, BN), n - 1))
        middle, near = _span(lse_x, of_y, first * BM, run * BM, m, SPAN)
        if FAST:
            count = tl.where(near & (column + BN <= n), count, 0)
        else:
            start, ordinary, count = left_over(
                first, end, column, m, n, masked_start, masked_stop, tiles, near == 0, BM, BN
            )
    sums = tl.zeros((BM // 16, 8, 4), tl.float32)
    for i in tl.range(0, count, flatten=True):
        row = tl.where(i < ordinary, start + i, tiles - 1) * BM
        of_x = tl.load(lse_x + tl.minimum(row + tl.arange(0, BM), m - 1))  # [BM]
        acc = tile_product(x, y, row, column, CAREFUL, K, BM, BN, BK)
        more = tl.zeros((BM // 16, 8, 4), tl.float32)
        if not FAST or is_inside(row, column, m, n, masked_start, masked_stop, BM, BN):
            of_rows = tl.exp2((middle - of_x) * LOG2E + GAIN) if FAST else of_x - GAIN / LOG2E
            more = _softmax_tile(
                acc, g, s, middle, of_rows, lse_y, relative_x, relative_y, share_x, share_y, ids_x, ids_y,
                row, column, m, n, diagonal, part_rows, FAST, PARTS, GAIN, EQUAL, CAREFUL, BM, BN, STRIP,
            )  # fmt: skip
        sums += more
    tl.store(scale_sums + program, tl.load(scale_sums + program) + whole_sum(sums) * 2.0**-GAIN)
