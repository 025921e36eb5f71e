# mypy: allow-untyped-defs, allow-incomplete-defs
"""The device code of the Triton backend, which `triton_backend` launches.

A block has m images and n texts, with the cosines a_ij = x_i·y_j and the logits z_ij = s·a_ij (+ b). The logits are
never stored: a kernel computes a tile of them ([BM, BN], in registers, from tensor cores), uses it and forgets it. A
program owns BN columns and goes through a *run* of consecutive row tiles, so that the sums of its columns stay in
registers.

Softmax, four products of m·n·D:
1. `positives`: the logits of the pairs, which are the references of their rows and columns. They come from the diagonal
   tiles of a product, m·B·D multiplications for tiles of B rows.
2. `softmax_sums`: the first product. Row sums Σ_j exp(z_ij - reference_x_i), column sums Σ_i exp(z_ij - reference_y_j).
3. `log_odds`: the logarithms of these sums. A sum that has overflowed is computed again, with a running maximum.
4. `softmax_coefficients`: the same product again, since no logit was stored. With the log-sum-exps of the whole batch
   it stores the coefficients C_ij = exp(z_ij - lse_x_i) + exp(z_ij - lse_y_j) in the workspace, in the features' dtype.
5. cuBLAS, two products: grad_x += C·y and grad_y += Cᵀ·x.

Sigmoid, three products of m·n·D:
1. `sigmoid_coefficients`: the terms of the loss and the coefficients C_ij = -t_ij σ(-t_ij z_ij), from one product.
2. cuBLAS: the same two products.

Both coefficient kernels also sum C_ij·a_ij, the derivative by s, from the tile in fp32. The products of cuBLAS could
give this sum as well, but from rounded coefficients: where its terms cancel, their rounding errors do not.

Besides the tensor cores, the arithmetic on single logits and its registers limit the speed. Two launches therefore
share the work of one kernel. The fast launch has the shortest arithmetic and skips the tiles for which that is not
enough; the slow launch does these:
- Masks: tiles that hold a positive or equal ids, or lie at the end of the block, are not fast (`_inside`,
  `_left_over`). Where rows and columns are sorted by their ids, few tiles can hold equal ones (`id_overlaps`).
- Softmax: in the fast launch one exponential serves a row and a column, because exp(z - row) is exp(z - middle) ·
  exp(middle - row). Runs whose references are far apart are not fast (`_span`): one of the factors could underflow
  although the product is large.
- Sigmoid: the fast launch computes exp(z) without a bound on z. Runs in which it overflows are marked and left to the
  slow launch.

fp32 features come as sums of bfloat16 parts (`triton_operands.split`). Each row is then the concatenation of its parts,
in an order by which one product adds up all pairs of parts. The pair of the largest parts is the last one: it takes the
last CAREFUL steps of BK numbers. For features in half precision CAREFUL is 0.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# The largest distance between the references of a fast run. An exponential that underflows for its row, below e^-87, is
# then below e^-43 for its column, and may be lost.
REACH = tl.constexpr(44.0)
LIMIT = tl.constexpr(1e36)  # the reciprocals of smaller products are normal numbers
NOWHERE = tl.constexpr(1 << 30)  # the `diagonal` of a block without positives on a diagonal: far from every tile

# The constant EQUAL of the kernels: what the ids of rows and columns mean.
NO_IDS = tl.constexpr(0)  # there are none
EXCLUDED = tl.constexpr(1)  # cells with equal ids take no part, but for those on the diagonal, which are positives
POSITIVE = tl.constexpr(2)  # cells with equal ids are positives


# ---- Where a program works ----


@triton.jit
def _place(program, tiles, blocks, run, GROUP: tl.constexpr):
    """A program's column block and first row tile: the runs of GROUP column blocks, then those of the next GROUP.

    Programs that are numbered together run together. They share row tiles and column blocks, which the L2 cache holds.
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
    is right for ids in any order, and saves work if rows and columns are sorted by id.
    """
    column = tl.program_id(0) * BN
    of_y = tl.load(ids_y + tl.minimum(column + tl.arange(0, BN), n - 1))
    lowest = tl.min(of_y)
    highest = tl.max(of_y)
    first = tl.zeros((STRIP,), tl.int32) + m
    last = tl.zeros((STRIP,), tl.int32) - 1
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
def _masked(overlaps, block, diagonal, BM: tl.constexpr, BN: tl.constexpr):
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
def _inside(row, column, m, n, masked_start, masked_stop, BM: tl.constexpr, BN: tl.constexpr):
    """Whether a tile lies within the block and is not `_masked`."""
    unmasked = (row < masked_start * BM) | (row >= masked_stop * BM)
    return (row + BM <= m) & (column + BN <= n) & unmasked


@triton.jit
def _left_over(
    first, end, column, m, n, masked_start, masked_stop, tiles, whole, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """The row tiles of a run that are not `_inside`, or all of them if ``whole``: (start, ordinary, count).

    There are ``count`` such tiles. Number i is the row tile start + i for i < ``ordinary``, then the block's last one.
    """
    start = tl.minimum(tl.maximum(masked_start, first), end)
    stop = tl.minimum(tl.maximum(masked_stop, start), end)
    at_end = (end == tiles) & (m % BM != 0) & ((stop < end) | (start == end))
    whole = whole | (column + BN > n)
    start = tl.where(whole, first, start)
    ordinary = tl.where(whole, end, stop) - start
    return start, ordinary, ordinary + tl.where(whole, 0, at_end.to(tl.int32))


@triton.jit
def _negative(rows, columns, m, n, diagonal):
    """[BM, BN] bool: which cells of a tile are in the block and not on the diagonal."""
    return ((rows + diagonal)[:, None] != columns[None, :]) & (rows < m)[:, None] & (columns < n)[None, :]


@triton.jit
def _equal(ids_x, ids_y, in_x, in_y):
    """[BM, BN] bool: whether row and column have equal ids."""
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
def _product(
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
def _halves(tile, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, BN / 2] twice: the left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _joined(left, right, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, BN]: the tile that _halves takes apart."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (BM, BN))


@triton.jit
def _store(
    g, tile, row, column, part_rows, BM: tl.constexpr, BN: tl.constexpr, STRIP: tl.constexpr, PARTS: tl.constexpr
):
    """Stores a tile as the sum of PARTS low-precision matrices, part_rows apart in g, in strips of STRIP columns."""
    if STRIP < BN:
        left, right = _halves(tile, BM, BN)
        _store(g, left, row, column, part_rows, BM, BN // 2, STRIP, PARTS)
        _store(g, right, row, column + BN // 2, part_rows, BM, BN // 2, STRIP, PARTS)
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
def _column_sums(tile, BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr):
    """[WARPS, 8, BN]: sums of columns as far as one thread holds the addends."""
    # [slab (register), warp, 2 (register), 8 (lane), BN]
    return tl.sum(tl.sum(tl.reshape(tile, (BM // (16 * WARPS), WARPS, 2, 8, BN)), 2), 0)


@triton.jit
def _thread_sums(tile, BM: tl.constexpr, BN: tl.constexpr):
    """[BM / 16, 8, 4]: sums of a tile as far as one thread holds the addends (for each slab)."""
    # [slab and warp, 2 (register), 8 (lane), BN / 8 (register), 4 (lane), 2 (register)]
    return tl.sum(tl.sum(tl.sum(tl.reshape(tile, (BM // 16, 2, 8, BN // 8, 4, 2)), 5), 3), 1)


@triton.jit
def _whole_sum(sums):
    """The scalar that the [BM / 16, 8, 4] sums of threads add up to."""
    return tl.sum(tl.sum(tl.sum(sums, 2), 1), 0)


# ---- Softmax ----


@triton.jit
def _exp(acc, scale, reference, CAREFUL: tl.constexpr):
    """exp(scale · acc - reference), the reference a row or a column.

    For fp32 features the logit is rounded before the reference is subtracted, as in plain torch. Otherwise, at a scale
    of 1e4, a row's largest logit would differ from its log-sum-exp where the two should be equal. For half precision
    the exponent is one fused multiply-add.
    """
    exponent = acc * (scale * LOG2E) - reference * LOG2E if CAREFUL == 0 else (acc * scale - reference) * LOG2E
    return tl.exp2(exponent)


@triton.jit
def _finite(references):
    return tl.where(references < float("inf"), references, float("-inf"))


@triton.jit
def _span(of_x, of_y, first, rows, m, SPAN: tl.constexpr):
    """The middle of the references of a program's rows and columns, and whether they lie within REACH.

    of_x points to the references of all rows, of_y [BN] holds those of the columns. SPAN is a power of two, at least
    ``rows``. Rows or columns without a part in the coefficients have infinite references, which do not count. If there
    are such rows and such columns, the answer is no: nothing would bound the logit of one with the other.
    """
    strip = first + tl.arange(0, SPAN)
    all_x = tl.load(of_x + tl.minimum(strip, tl.minimum(first + rows, m) - 1))
    lowest = tl.minimum(tl.min(all_x), tl.min(of_y))
    highest = tl.maximum(tl.max(_finite(all_x)), tl.max(_finite(of_y)))
    bounded = tl.minimum(tl.max(all_x), tl.max(of_y)) < float("inf")
    return (lowest + highest) * 0.5, (highest - lowest <= REACH) & bounded


@triton.jit(do_not_specialize=["m"])
def positives(x, y, scale, out, m, CAREFUL: tl.constexpr, K: tl.constexpr, B: tl.constexpr, BK: tl.constexpr):
    """scale · x_i·y_i from the diagonal of a product, to be rounded as the logits in the other kernels are."""
    row = tl.program_id(0) * B
    acc = _product(x, y, row, row, CAREFUL, K, B, B, BK)
    rows = tl.arange(0, B)
    of_pairs = tl.sum(tl.where(rows[:, None] == rows[None, :], acc, 0.0), 1)  # [B]
    tl.store(out + row + rows, of_pairs * tl.load(scale), mask=row + rows < m)


@triton.jit
def _add_positives(logits, positive, sums, numbers, length, AXIS: tl.constexpr):
    """Adds a tile's positives to rows 1 and 2 of the sums [3, length]: Σ exp(logits) and Σ logits along an axis.

    The logits are relative to the reference of row or column.
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

    If equal ids are POSITIVE, sum_x is [3, m]: row 1 gets the same sum over the positives, and row 2 the sum of their
    z_ij - reference_x_i; likewise sum_y [3, n]. If GATED, two launches share the work, and NEAR is the fast one.
    """
    s = tl.load(scale)
    block, first = _place(tl.program_id(0), tiles, blocks, run, GROUP)
    end = tl.minimum(first + run, tiles)
    column = block * BN
    columns = column + tl.arange(0, BN)
    in_y = tl.minimum(columns, n - 1)  # beyond the end the last column again, which changes no minimum or maximum
    of_y = tl.load(reference_y + in_y)  # [BN]
    masked_start, masked_stop = _masked(overlaps, block, diagonal, BM, BN)
    start, ordinary, count = first, end - first, end - first
    limit = n
    base = of_y  # the reference of the column sums, until they are stored
    if GATED:
        middle, near = _span(reference_x, of_y, first * BM, run * BM, m, SPAN)
        if NEAR:
            near &= column + BN <= n
            count = tl.where(near, count, 0)
            limit = tl.where(near, n, 0)
            base = tl.zeros_like(of_y) + middle
        else:
            start, ordinary, count = _left_over(
                first, end, column, m, n, masked_start, masked_stop, tiles, near == 0, BM, BN
            )
    partials = _column_sums(tl.zeros((BM, BN), tl.float32), BM, BN, WARPS)  # [WARPS, 8, BN]
    for i in tl.range(0, count, flatten=True):
        row = tl.where(i < ordinary, start + i, tiles - 1) * BM
        acc = _product(x, y, row, column, CAREFUL, K, BM, BN, BK)
        rows = row + tl.arange(0, BM)
        in_x = tl.minimum(rows, m - 1)
        of_x = tl.load(reference_x + in_x)[:, None]  # [BM, 1]
        e = _exp(acc, s, of_x, CAREFUL)
        if NEAR:
            if not _inside(row, column, m, n, masked_start, masked_stop, BM, BN):
                e = tl.zeros_like(e)
            row_sums = tl.sum(e, 1)
            e *= tl.exp2((of_x - middle) * LOG2E)
        else:
            negative = _negative(rows, columns, m, n, diagonal)
            if EQUAL != NO_IDS:
                equal = _equal(ids_x, ids_y, in_x, in_y)
                if EQUAL == POSITIVE:  # noqa: SIM102 (decided when the kernel is compiled)
                    if (row >= masked_start * BM) & (row < masked_stop * BM):
                        positive = negative & equal
                        _add_positives(acc * s - of_x, positive, sum_x, rows, m, 1)
                        _add_positives(acc * s - of_y[None, :], positive, sum_y, columns, n, 0)
                negative &= ~equal
            row_sums = tl.sum(tl.where(negative, e, 0.0), 1)
            e = tl.where(negative, _exp(acc, s, of_y[None, :], CAREFUL), 0.0)
        tl.atomic_add(sum_x + rows, row_sums, mask=rows < m, sem="relaxed")
        partials += _column_sums(e, BM, BN, WARPS)
    total = tl.sum(tl.sum(partials, 0), 0) * tl.exp2((base - of_y) * LOG2E)
    tl.atomic_add(sum_y + columns, total, mask=columns < limit, sem="relaxed")


@triton.jit
def _continued(highest, total, logits):
    """The running maximum and sum of exponentials relative to it, [B] both, over the columns of more logits."""
    higher = tl.maximum(highest, tl.max(logits, 1))
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    total *= tl.exp2((highest - anchor) * LOG2E)
    return higher, total + tl.sum(tl.exp2((logits - anchor[:, None]) * LOG2E), 1)


@triton.jit
def _log_odds(
    x, y, sums, reference, out, scale, ids_x, ids_y, row, m, n, diagonal,
    EQUAL: tl.constexpr, CAREFUL: tl.constexpr, K: tl.constexpr, B: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """log(sums) for B rows; see `log_odds`."""
    rows = row + tl.arange(0, B)
    in_x = tl.minimum(rows, m - 1)
    total = tl.load(sums + in_x)
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
            logits = _product(x, y, row, column, CAREFUL, K, B, B, BK) * s - of_x[:, None]
            negative = ((rows + diagonal)[:, None] != columns[None, :]) & (columns < n)[None, :]
            if EQUAL != NO_IDS:
                equal = _equal(ids_x, ids_y, in_x, tl.minimum(columns, n - 1))
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

    A sum is infinite if a logit is 88 above the reference of its row or column. Such rows are computed again, with a
    running maximum and without atomics, by the program that finds them. If equal ids are POSITIVE, out_x is [3, m] and
    out_y [3, n]; row 2 of each is copied without taking a logarithm.
    """
    of_rows = tl.cdiv(m, B)  # programs
    if tl.program_id(0) < of_rows:
        row = tl.program_id(0) * B
        _log_odds(x, y, sum_x, reference_x, out_x, scale, ids_x, ids_y, row, m, n, diagonal, EQUAL, CAREFUL, K, B, BK)
    else:
        row = (tl.program_id(0) - of_rows) * B
        _log_odds(y, x, sum_y, reference_y, out_y, scale, ids_y, ids_x, row, n, m, -diagonal, EQUAL, CAREFUL, K, B, BK)


@triton.jit
def _term(acc, scale, lse, relative, places, CAREFUL: tl.constexpr):
    """A negative's term from its row or its column, exp(z - lse - relative); ``relative`` points to [m] or [n]."""
    if relative is None:
        term = _exp(acc, scale, lse, CAREFUL)
    else:
        term = tl.exp2((acc * scale - lse - tl.load(relative + places)) * LOG2E)
    return term


@triton.jit
def _positive_term(term, share):
    return tl.where(share < 0, share, term - share)


@triton.jit
def _softmax_cells(
    acc, s, middle, of_x, lse_y, relative_x, relative_y, share_x, share_y, ids_x, ids_y, row, column, m, n, diagonal,
    FAST: tl.constexpr, GAIN: tl.constexpr, EQUAL: tl.constexpr, CAREFUL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The coefficients [BM, BN] of a part of a tile, and the _thread_sums of coefficients times cosines.

    of_x [BM] are the rows' factors exp(middle - lse_x) if FAST, and otherwise their log-sum-exps.
    """
    rows = row + tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    in_x = tl.minimum(rows, m - 1)
    in_y = tl.minimum(columns, n - 1)
    of_y = tl.load(lse_y + in_y)
    if FAST:
        c = _exp(acc, s, middle, CAREFUL) * (of_x[:, None] + tl.exp2((middle - of_y) * LOG2E + GAIN)[None, :])
    else:
        term_x = _term(acc, s, of_x[:, None], relative_x, in_x[:, None], CAREFUL)
        term_y = _term(acc, s, of_y[None, :] - GAIN / LOG2E, relative_y, in_y[None, :], CAREFUL)
        c = term_x + term_y
        of_positives = tl.load(share_x + in_x)[:, None] * 2.0**GAIN
        if EQUAL == EXCLUDED:
            c = tl.where(_equal(ids_x, ids_y, in_x, in_y), 0.0, c)
        if EQUAL == POSITIVE:
            terms = _positive_term(term_x, of_positives)
            terms += _positive_term(term_y, tl.load(share_y + in_y)[None, :] * 2.0**GAIN)
            c = tl.where(_equal(ids_x, ids_y, in_x, in_y), terms, c)
        c = tl.where((rows < m)[:, None] & (columns < n)[None, :], c, 0.0)  # beyond the block it may be infinite
        if EQUAL != POSITIVE:
            c = tl.where((rows + diagonal)[:, None] == columns[None, :], of_positives, c)
    return c, _thread_sums(c * acc, BM, BN)


@triton.jit
def _softmax_tile(
    acc, g, s, middle, of_x, lse_y, relative_x, relative_y, share_x, share_y, ids_x, ids_y,
    row, column, m, n, diagonal, part_rows,
    FAST: tl.constexpr, PARTS: tl.constexpr, GAIN: tl.constexpr, EQUAL: tl.constexpr, CAREFUL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Stores a tile's coefficients and returns the `_thread_sums` of coefficients times cosines.

    To spare registers, it takes one strip of STRIP columns after the other, and each in two halves.
    """
    left, right = _halves(acc, BM, BN)
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
        _store(g, _joined(c, more_c, BM, BN), row, column, part_rows, BM, BN, STRIP, PARTS)
    return sums + more_sums


@triton.jit(do_not_specialize=["m", "n", "diagonal", "tiles", "blocks", "run", "part_rows"])
def softmax_coefficients(
    x, y, g, scale_sums, lse_x, lse_y, relative_x, relative_y, share_x, share_y, scale, ids_x, ids_y, overlaps,
    m, n, diagonal, tiles, blocks, run, part_rows,
    FAST: tl.constexpr, GATED: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr, GAIN: tl.constexpr,
    EQUAL: tl.constexpr, CAREFUL: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STRIP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """g_ij = 2^GAIN · C_ij; adds Σ C_ij x_i·y_j to the program's scale_sums.

    C_ij is the sum of a term of the row, exp(z_ij - lse_x_i - relative_x_i), and one of the column. relative_x and
    relative_y are both given, or both None, which counts as 0. Excluded cells are 0, and those on the diagonal
    share_x_i. If equal ids are POSITIVE, the row's term of such a cell is share_x_i where that is negative, and is
    reduced by share_x_i elsewhere; likewise the column's term with share_y_j. If GATED, two launches share the work,
    and FAST says which.
    """
    s = tl.load(scale)
    program = tl.program_id(0)
    block, first = _place(program, tiles, blocks, run, GROUP)
    column = block * BN
    end = tl.minimum(first + run, tiles)
    masked_start, masked_stop = _masked(overlaps, block, diagonal, BM, BN)
    middle = 0.0
    start, ordinary, count = first, end - first, end - first
    if GATED:
        of_y = tl.load(lse_y + tl.minimum(column + tl.arange(0, BN), n - 1))
        middle, near = _span(lse_x, of_y, first * BM, run * BM, m, SPAN)
        if FAST:
            count = tl.where(near & (column + BN <= n), count, 0)
        else:
            start, ordinary, count = _left_over(
                first, end, column, m, n, masked_start, masked_stop, tiles, near == 0, BM, BN
            )
    sums = tl.zeros((BM // 16, 8, 4), tl.float32)
    for i in tl.range(0, count, flatten=True):
        row = tl.where(i < ordinary, start + i, tiles - 1) * BM
        of_x = tl.load(lse_x + tl.minimum(row + tl.arange(0, BM), m - 1))  # [BM]
        acc = _product(x, y, row, column, CAREFUL, K, BM, BN, BK)
        if FAST:
            more = tl.zeros((BM // 16, 8, 4), tl.float32)
            if _inside(row, column, m, n, masked_start, masked_stop, BM, BN):
                more = _softmax_tile(
                    acc, g, s, middle, tl.exp2((middle - of_x) * LOG2E + GAIN), lse_y, relative_x, relative_y,
                    share_x, share_y, ids_x, ids_y, row, column, m, n, diagonal, part_rows,
                    True, PARTS, GAIN, EQUAL, CAREFUL, BM, BN, STRIP,
                )  # fmt: skip
        else:
            more = _softmax_tile(
                acc, g, s, middle, of_x - GAIN / LOG2E, lse_y, relative_x, relative_y,
                share_x, share_y, ids_x, ids_y, row, column, m, n, diagonal, part_rows,
                False, PARTS, GAIN, EQUAL, CAREFUL, BM, BN, STRIP,
            )  # fmt: skip
        sums += more
    tl.store(scale_sums + program, tl.load(scale_sums + program) + _whole_sum(sums) * 2.0**-GAIN)


# ---- Sigmoid ----


@triton.jit
def _product_less_one(u, BM: tl.constexpr, BN: tl.constexpr):
    """[BM / 16, 8, 4]: the products of 1 + u over the elements that one thread holds, less 1.

    One logarithm then serves many elements. (1 + a)(1 + b) - 1 = ab + a + b has no cancellation, so that small elements
    keep their digits. 32 factors with u <= 1, those of 64 columns, do not overflow.
    """
    if BN > 4:
        if BN > 8:
            a, b = _halves(u, BM, BN)
        else:
            a, b = tl.split(tl.reshape(u, (BM, 4, 2)))  # [rows, 4 (lane), 2 (register)]
        result = _product_less_one(tl.fma(a, b, a + b), BM, BN // 2)
    else:
        # [slab and warp, 2 (register), 8 (lane), 4 (lane)]
        a, b = tl.split(tl.permute(tl.reshape(u, (BM // 16, 2, 8, 4)), (0, 2, 3, 1)))
        result = tl.fma(a, b, a + b)
    return result


@triton.jit
def _quotients(tile, u, BM: tl.constexpr, BN: tl.constexpr, GAIN: tl.constexpr):
    """[BM, BN]: 2^GAIN · tile / (1 + u), by one reciprocal for four elements; and `_product_less_one` of u."""
    a, b = _halves(u, BM, BN)
    tile_a, tile_b = _halves(tile, BM, BN)
    tile_a, tile_b = tl.fma(tile_a, b, tile_a), tl.fma(tile_b, a, tile_b)  # over one denominator, (1 + a)(1 + b)
    two = a + tl.fma(b, a, b)  # the denominator less 1, [BM, BN / 2]
    left, right = _halves(two, BM, BN // 2)
    whole_left, whole_right = _halves(1.0 + two, BM, BN // 2)
    four = tl.fma(left, whole_right, right)  # likewise of four elements, [BM, BN / 4]
    root = tl.rsqrt(1.0 + four)  # one instruction, where a division takes six
    inverse = root * root * 2.0**GAIN
    inverse = _joined(inverse * whole_right, inverse * whole_left, BM, BN // 2)
    return _joined(tile_a * inverse, tile_b * inverse, BM, BN), _product_less_one(four, BM, BN // 4)


@triton.jit
def _log1p(p):
    series = p * (1 - p * (1 / 2 - p * (1 / 3 - p * (1 / 4 - p * (1 / 5)))))
    return tl.where(p < 0.03, series, tl.log2(1 + p) / LOG2E)


@triton.jit
def _sigmoid_cells(
    acc, s, b, ids_x, ids_y, row, column, m, n, diagonal,
    FAST: tl.constexpr, GAIN: tl.constexpr, EQUAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The coefficients [BM, BN] of a part of a tile, and four [BM / 16, 8, 4] results of the cells of each thread.

    These are p and r, for which the sum of their losses is log(1 + p) + r, the sum of their coefficients, and the sum
    of their coefficients times cosines.
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
            equal = _equal(ids_x, ids_y, tl.minimum(rows, m - 1), tl.minimum(columns, n - 1))
            if EQUAL == EXCLUDED:
                z = tl.where(equal, float("-inf"), z)
            else:
                positive = equal
        z = tl.where(positive, -(acc * s + b), z)
        z = tl.where((rows < m)[:, None] & (columns < n)[None, :], z, float("-inf"))
        u = tl.exp2(tl.abs(z) * -1.0)  # 0 - x, which Triton makes of -x, would take an instruction
        c, product = _quotients(tl.where(z > 0, 1.0, u), u, BM, BN, GAIN)
        c = tl.where(positive, -c, c)
        linear = _thread_sums(tl.maximum(z, 0.0), BM, BN) / LOG2E
    return c, product, linear, _thread_sums(c, BM, BN), _thread_sums(c * acc, BM, BN)


@triton.jit
def _sigmoid_tile(
    acc, g, s, b, ids_x, ids_y, row, column, m, n, diagonal, part_rows,
    FAST: tl.constexpr, PARTS: tl.constexpr, GAIN: tl.constexpr, EQUAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Stores a tile's coefficients; three [BM / 16, 8, 4] sums: of losses, of g, and of g times cosines.

    It takes strips and halves as `_softmax_tile`. s and b are multiplied by log2(e), and so is z. FAST is for tiles
    `_inside` the block whose products of 1 + 2^z stay below LIMIT. If one does not, the loss is infinite.
    """
    left, right = _halves(acc, BM, BN)
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
        _store(g, _joined(c, more_c, BM, BN), row, column, part_rows, BM, BN, STRIP, PARTS)
        product = tl.fma(product, more_product, product + more_product)
        loss += more_loss + _log1p(product)
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
    """g_ij = 2^GAIN · C_ij; adds Σ softplus(-t·z), Σ C_ij and Σ C_ij x_i·y_j to the program's sums.

    Two launches share the work. In the FAST one, a program whose logits are too large marks itself as overflowed and
    adds nothing. The other launch does all the work of the overflowed programs, which the fast launches of later chunks
    skip. No two programs share a sum, so the result does not depend on their order.
    """
    s = tl.load(scale) * LOG2E
    b = tl.load(bias) * LOG2E
    program = tl.program_id(0)
    block, first = _place(program, tiles, blocks, run, GROUP)
    column = block * BN
    end = tl.minimum(first + run, tiles)
    masked_start, masked_stop = _masked(overlaps, block, diagonal, BM, BN)
    fitting = tl.load(overflowed + program) == 0
    start, ordinary, count = first, end - first, tl.where(fitting & (column + BN <= n), end - first, 0)
    if not FAST:
        start, ordinary, count = _left_over(
            first, end, column, m, n, masked_start, masked_stop, tiles, fitting == 0, BM, BN
        )
    loss = tl.zeros((BM // 16, 8, 4), tl.float32)
    of_bias = tl.zeros((BM // 16, 8, 4), tl.float32)
    of_scale = tl.zeros((BM // 16, 8, 4), tl.float32)
    for i in tl.range(0, count, flatten=True):
        row = tl.where(i < ordinary, start + i, tiles - 1) * BM
        acc = _product(x, y, row, column, CAREFUL, K, BM, BN, BK)
        more_loss = tl.zeros((BM // 16, 8, 4), tl.float32)
        more_of_bias = tl.zeros((BM // 16, 8, 4), tl.float32)
        more_of_scale = tl.zeros((BM // 16, 8, 4), tl.float32)
        if not FAST or _inside(row, column, m, n, masked_start, masked_stop, BM, BN):
            more_loss, more_of_bias, more_of_scale = _sigmoid_tile(
                acc, g, s, b, ids_x, ids_y, row, column, m, n, diagonal, part_rows,
                FAST, PARTS, GAIN, EQUAL, BM, BN, STRIP,
            )  # fmt: skip
        loss += more_loss
        of_bias += more_of_bias
        of_scale += more_of_scale
    whole_loss = _whole_sum(loss)
    if FAST & ~(whole_loss < float("inf")):  # or NaN
        tl.store(overflowed + program, 1.0)
    else:
        tl.store(loss_sums + program, tl.load(loss_sums + program) + whole_loss)
        tl.store(bias_sums + program, tl.load(bias_sums + program) + _whole_sum(of_bias) * 2.0**-GAIN)
        tl.store(scale_sums + program, tl.load(scale_sums + program) + _whole_sum(of_scale) * 2.0**-GAIN)
