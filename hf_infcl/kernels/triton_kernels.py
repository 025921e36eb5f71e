# mypy: allow-untyped-defs, allow-incomplete-defs
"""The device code of the Triton backend; `triton` launches it.

All kernels walk [BM, BN] tiles of the logits: a program owns a block of BN columns and streams row tiles past it, so
that what belongs to the columns stays in registers.

What limits them after the tensor cores is arithmetic on single logits, exponentials first. In the softmax's forward one
exponential serves both directions where the references of a program's rows and columns lie NEAR each other: exp(z -
column) is exp(z - row) · exp(row - column). Where they do not, an underflow of the first could swallow what the second
holds, and both are computed. With GATED, two launches share the work: each program is of one of them, and leaves the
other at once.

With EXACT, for fp32 features, logits are rounded before anything is subtracted, as plain torch does it, and not fused
into one multiply-add: at a scale of 1e4 only then are a row's largest logit and its log-sum-exp equal to the last bit.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
REACH = tl.constexpr(44.0)  # between references: e^-87, the least exponential of a row, is then e^-43 in its column
LIMIT = tl.constexpr(1e36)  # of products whose reciprocals are normal numbers
NOWHERE = tl.constexpr(1 << 30)  # the `diagonal` of a block without positives: far from every tile


@triton.jit
def _place(program, tiles, blocks, run, GROUP: tl.constexpr):
    """A program's column block and first row tile. GROUP column blocks share row tiles in the L2 cache."""
    width = GROUP * tl.cdiv(tiles, run)
    first = program // width * GROUP
    size = tl.minimum(blocks - first, GROUP)
    inside = program % width
    return first + inside % size, inside // size * run


@triton.jit
def _cells(matrix, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to the box of a matrix without a descriptor, and which of them are inside."""
    base, m, n, stride = matrix
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    return base + rows.to(tl.int64)[:, None] * stride + columns[None, :], (rows < m)[:, None] & (columns < n)[None, :]


@triton.jit
def _load(matrix, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The box of a matrix that begins at (row, column); zeros beyond the matrix's end."""
    if isinstance(matrix, tl.core.tensor_descriptor_base):
        box = matrix.load([row, column])
    else:
        cells, inside = _cells(matrix, row, column, ROWS, COLUMNS)
        box = tl.load(cells, inside, 0.0)
    return box


@triton.jit
def _product(x, y, row, column, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """x[row:][:BM] · y[column:][:BN]ᵀ in fp32."""
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        acc = tl.dot(_load(x, row, k * BK, BM, BK), _load(y, column, k * BK, BN, BK).T, acc)
    return acc


@triton.jit
def _column_sums(tile, BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr):
    """Sums of columns as far as one thread holds the addends, in the layout of Hopper's products."""
    return tl.sum(tl.sum(tl.reshape(tile, (BM // (16 * WARPS), WARPS, 2, 8, BN)), 2), 0)


@triton.jit
def _exp(acc, scale, reference, EXACT: tl.constexpr):
    """exp(scale · acc - reference), the reference a row or a column."""
    # The second form is one fused multiply-add.
    exponent = (acc * scale - reference) * LOG2E if EXACT else acc * (scale * LOG2E) - reference * LOG2E
    return tl.exp2(exponent)


@triton.jit
def _inside(row, column, m, n, diagonal, BM: tl.constexpr, BN: tl.constexpr):
    """Whether a tile lies within the block and off its diagonal, so that nothing has to be masked."""
    distance = row + diagonal - column
    return (row + BM <= m) & (column + BN <= n) & ((distance >= BN) | (distance <= -BM))


@triton.jit
def _exclude(tile, ids_x, ids_y, in_x, in_y, value):
    """The tile with ``value`` where ids are equal."""
    return tl.where(tl.load(ids_x + in_x)[:, None] == tl.load(ids_y + in_y)[None, :], value, tile)


@triton.jit
def _negative(rows, columns, m, n, diagonal):
    """Which cells of a tile are in the block and no positives."""
    return ((rows + diagonal)[:, None] != columns[None, :]) & (rows < m)[:, None] & (columns < n)[None, :]


@triton.jit
def _span(of_x, of_y, first, rows, m, SPAN: tl.constexpr):
    """The middle of the references of a program's rows and columns, and whether they lie within REACH."""
    strip = first + tl.arange(0, SPAN)
    all_x = tl.load(of_x + tl.minimum(strip, tl.minimum(first + rows, m) - 1))
    lowest = tl.minimum(tl.min(all_x), tl.min(of_y))
    highest = tl.maximum(tl.max(all_x), tl.max(of_y))
    return (lowest + highest) * 0.5, highest - lowest <= REACH


@triton.jit
def _halves(tile, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _joined(left, right, BM: tl.constexpr, BN: tl.constexpr):
    """The tile that _halves takes apart."""
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


@triton.jit(do_not_specialize=["m"])
def positives(x, y, scale, out, m, K: tl.constexpr, B: tl.constexpr, BK: tl.constexpr):
    """scale · x_i·y_i from the diagonal of a product, to be rounded as the logits in the other kernels are."""
    row = tl.program_id(0) * B
    acc = _product(x, y, row, row, K, B, B, BK)
    rows = tl.arange(0, B)
    own = tl.sum(tl.where(rows[:, None] == rows[None, :], acc, 0.0), 1)
    tl.store(out + row + rows, own * tl.load(scale), mask=row + rows < m)


@triton.jit(do_not_specialize=["m", "n", "diagonal", "tiles", "blocks", "run"])
def softmax_sums(
    x, y, sum_x, sum_y, positive_x, positive_y, scale, ids_x, ids_y, m, n, diagonal, tiles, blocks, run,
    NEAR: tl.constexpr, GATED: tl.constexpr, SPAN: tl.constexpr, EXACT: tl.constexpr, IDS: tl.constexpr,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """sum_x_i += Σ_j exp(z_ij - positive_x_i), sum_y_j += Σ_i exp(z_ij - positive_y_j) over the negatives."""
    s = tl.load(scale)
    block, first = _place(tl.program_id(0), tiles, blocks, run, GROUP)
    end = tl.minimum(first + run, tiles)
    column = block * BN
    columns = column + tl.arange(0, BN)
    in_y = tl.minimum(columns, n - 1)  # beyond the end the last one again: in bounds, and never an extreme
    own_y = tl.load(positive_y + in_y)
    limit = n
    if GATED:
        middle, near = _span(positive_x, own_y, first * BM, run * BM, m, SPAN)
        end = tl.where(near == NEAR, end, first)
        limit = tl.where(near == NEAR, n, 0)
    base = own_y  # what the column sums refer to until the end
    if NEAR:
        base = tl.zeros_like(own_y) + middle
    partials = _column_sums(tl.zeros((BM, BN), tl.float32), BM, BN, WARPS)
    for t in tl.range(first, end, flatten=True):
        row = t * BM
        acc = _product(x, y, row, column, K, BM, BN, BK)
        rows = row + tl.arange(0, BM)
        in_x = tl.minimum(rows, m - 1)
        own_x = tl.load(positive_x + in_x)[:, None]
        e = _exp(acc, s, own_x, EXACT)
        if IDS:
            e = _exclude(e, ids_x, ids_y, in_x, in_y, 0.0)
        if NEAR:
            if not _inside(row, column, m, n, diagonal, BM, BN):
                e = tl.where(_negative(rows, columns, m, n, diagonal), e, 0.0)
            row_sums = tl.sum(e, 1)
            e *= tl.exp2((own_x - middle) * LOG2E)
        else:
            negative = _negative(rows, columns, m, n, diagonal)
            row_sums = tl.sum(tl.where(negative, e, 0.0), 1)
            e = _exp(acc, s, own_y[None, :], EXACT)
            if IDS:
                e = _exclude(e, ids_x, ids_y, in_x, in_y, 0.0)
            e = tl.where(negative, e, 0.0)
        tl.atomic_add(sum_x + rows, row_sums, mask=rows < m, sem="relaxed")
        partials += _column_sums(e, BM, BN, WARPS)
    total = tl.sum(tl.sum(partials, 0), 0) * tl.exp2((base - own_y) * LOG2E)
    tl.atomic_add(sum_y + columns, total, mask=columns < limit, sem="relaxed")


@triton.jit
def _log_odds(
    x, y, sums, positive, out, scale, ids_x, ids_y, row, m, n, diagonal,
    IDS: tl.constexpr, K: tl.constexpr, B: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = row + tl.arange(0, B)
    in_x = tl.minimum(rows, m - 1)
    sums_x = tl.load(sums + in_x)
    log_odds = tl.log2(sums_x) / LOG2E
    if tl.max((sums_x == float("inf")).to(tl.int32)) == 1:
        s = tl.load(scale)
        own = tl.load(positive + in_x)
        highest = tl.full((B,), float("-inf"), tl.float32)
        total = tl.zeros((B,), tl.float32)
        for column in range(0, n, B):
            columns = column + tl.arange(0, B)
            logits = _product(x, y, row, column, K, B, B, BK) * s - own[:, None]
            negative = ((rows + diagonal)[:, None] != columns[None, :]) & (columns < n)[None, :]
            logits = tl.where(negative, logits, float("-inf"))
            if IDS:
                logits = _exclude(logits, ids_x, ids_y, in_x, tl.minimum(columns, n - 1), float("-inf"))
            higher = tl.maximum(highest, tl.max(logits, 1))
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            total *= tl.exp2((highest - anchor) * LOG2E)
            total += tl.sum(tl.exp2((logits - anchor[:, None]) * LOG2E), 1)
            highest = higher
        log_odds = highest + tl.log2(total) / LOG2E
    tl.store(out + rows, log_odds, mask=rows < m)


@triton.jit(do_not_specialize=["m", "n", "diagonal"])
def log_odds(
    x, y, sum_x, sum_y, positive_x, positive_y, out_x, out_y, scale, ids_x, ids_y, m, n, diagonal,
    IDS: tl.constexpr, K: tl.constexpr, B: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The logarithms of softmax_sums' results. Programs first of B rows, then of B columns.

    An infinite sum means a logit 88 above its own positive. Such rows are computed again, from a running maximum and
    without atomics, by the program that finds them.
    """
    of_x = tl.cdiv(m, B)
    if tl.program_id(0) < of_x:
        row = tl.program_id(0) * B
        _log_odds(x, y, sum_x, positive_x, out_x, scale, ids_x, ids_y, row, m, n, diagonal, IDS, K, B, BK)
    else:
        row = (tl.program_id(0) - of_x) * B
        _log_odds(y, x, sum_y, positive_y, out_y, scale, ids_y, ids_x, row, n, m, -diagonal, IDS, K, B, BK)


@triton.jit(do_not_specialize=["m", "n", "diagonal", "tiles", "blocks", "run", "part_rows"])
def softmax_coefficients(
    x, y, g, lse_x, lse_y, own, scale, ids_x, ids_y, m, n, diagonal, tiles, blocks, run, part_rows,
    EXACT: tl.constexpr, PARTS: tl.constexpr, GAIN: tl.constexpr, IDS: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STRIP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """g_ij = 2^GAIN · (exp(z_ij - lse_x_i) + exp(z_ij - lse_y_j)); own_i for positives and 0 for excluded cells."""
    s = tl.load(scale)
    block, first = _place(tl.program_id(0), tiles, blocks, run, GROUP)
    column = block * BN
    columns = column + tl.arange(0, BN)
    in_y = tl.minimum(columns, n - 1)
    of_y = tl.load(lse_y + in_y) - GAIN / LOG2E
    for t in tl.range(first, tl.minimum(first + run, tiles), flatten=True):
        row = t * BM
        rows = row + tl.arange(0, BM)
        in_x = tl.minimum(rows, m - 1)
        of_x = tl.load(lse_x + in_x) - GAIN / LOG2E  # before the product, which takes longer than the load
        acc = _product(x, y, row, column, K, BM, BN, BK)
        c = _exp(acc, s, of_x[:, None], EXACT) + _exp(acc, s, of_y[None, :], EXACT)
        if IDS:
            c = _exclude(c, ids_x, ids_y, in_x, in_y, 0.0)
        if not _inside(row, column, m, n, diagonal, BM, BN):
            positive = (rows + diagonal)[:, None] == columns[None, :]
            c = tl.where(positive, tl.load(own + in_x)[:, None] * 2.0**GAIN, c)
        _store(g, c, row, column, part_rows, BM, BN, STRIP, PARTS)


@triton.jit
def _thread_sums(tile, BM: tl.constexpr, BN: tl.constexpr):
    """[BM // 16, 8, 4] sums as far as one thread holds the addends on Hopper; elsewhere only slower."""
    return tl.sum(tl.sum(tl.sum(tl.reshape(tile, (BM // 16, 2, 8, BN // 8, 4, 2)), 5), 3), 1)


@triton.jit
def _product_less_one(u, BM: tl.constexpr, BN: tl.constexpr):
    """[BM // 16, 8, 4] products of 1 + u, less 1, as far as one thread holds the factors.

    (1 + a)(1 + b) - 1 = ab + a + b has no cancellation, so that one logarithm serves many elements and small ones keep
    their digits. u <= 1 and 32 factors, of 64 columns, do not overflow.
    """
    if BN > 4:
        if BN > 8:
            a, b = _halves(u, BM, BN)
        else:
            a, b = tl.split(tl.reshape(u, (BM, 4, 2)))
        result = _product_less_one(tl.fma(a, b, a + b), BM, BN // 2)
    else:
        a, b = tl.split(tl.permute(tl.reshape(u, (BM // 16, 2, 8, 4)), (0, 2, 3, 1)))
        result = tl.fma(a, b, a + b)
    return result


@triton.jit
def _quotients(tile, u, BM: tl.constexpr, BN: tl.constexpr, GAIN: tl.constexpr):
    """2^GAIN · tile / (1 + u), one reciprocal for four elements, and _product_less_one of u."""
    a, b = _halves(u, BM, BN)
    of_a, of_b = _halves(tile, BM, BN)
    of_a, of_b = tl.fma(of_a, b, of_a), tl.fma(of_b, a, of_b)  # over the same denominator (1 + a)(1 + b)
    two = a + tl.fma(b, a, b)
    left, right = _halves(two, BM, BN // 2)
    whole_left, whole_right = _halves(1.0 + two, BM, BN // 2)
    four = tl.fma(left, whole_right, right)
    root = tl.rsqrt(1.0 + four)  # one instruction, where a division takes six
    inverse = root * root * 2.0**GAIN
    inverse = _joined(inverse * whole_right, inverse * whole_left, BM, BN // 2)
    return _joined(of_a * inverse, of_b * inverse, BM, BN), _product_less_one(four, BM, BN // 4)


@triton.jit
def _log1p(p):
    series = p * (1 - p * (1 / 2 - p * (1 / 3 - p * (1 / 4 - p * (1 / 5)))))
    return tl.where(p < 0.03, series, tl.log2(1 + p) / LOG2E)


@triton.jit
def _store_sigmoid(
    acc, g, s, b, ids_x, ids_y, row, column, m, n, diagonal, part_rows,
    BOLD: tl.constexpr, PARTS: tl.constexpr, GAIN: tl.constexpr, IDS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Stores a tile's coefficients, in strips to spare registers. Returns _thread_sums of losses and coefficients.

    s and b are multiplied by log2(e), and so is z. BOLD is for tiles _inside the block, and as long as their logits
    are not too large: products of 1 + 2^z must not reach LIMIT. Otherwise the loss is infinite.
    """
    if STRIP < BN:
        left, right = _halves(acc, BM, BN)
        loss, total = _store_sigmoid(
            left, g, s, b, ids_x, ids_y, row, column, m, n, diagonal, part_rows,
            BOLD, PARTS, GAIN, IDS, BM, BN // 2, STRIP,
        )  # fmt: skip
        more_loss, more_total = _store_sigmoid(
            right, g, s, b, ids_x, ids_y, row, column + BN // 2, m, n, diagonal, part_rows,
            BOLD, PARTS, GAIN, IDS, BM, BN // 2, STRIP,
        )  # fmt: skip
        loss += more_loss
        total += more_total
    else:
        rows = row + tl.arange(0, BM)
        columns = column + tl.arange(0, BN)
        z = acc * s + b
        if IDS:
            z = _exclude(z, ids_x, ids_y, tl.minimum(rows, m - 1), tl.minimum(columns, n - 1), float("-inf"))
        if BOLD:
            u = tl.exp2(z)
            c, product = _quotients(u, u, BM, BN, GAIN)
            loss = tl.where(product < LIMIT, _log1p(product), float("inf"))
        else:
            positive = (rows + diagonal)[:, None] == columns[None, :]
            z = tl.where(positive, -(acc * s + b), z)
            z = tl.where((rows < m)[:, None] & (columns < n)[None, :], z, float("-inf"))
            u = tl.exp2(tl.abs(z) * -1.0)  # 0 - x, which Triton makes of -x, would take an instruction
            c, product = _quotients(tl.where(z > 0, 1.0, u), u, BM, BN, GAIN)
            c = tl.where(positive, -c, c)
            loss = _thread_sums(tl.maximum(z, 0.0), BM, BN) / LOG2E + _log1p(product)
        _store(g, c, row, column, part_rows, BM, BN, STRIP, PARTS)
        total = _thread_sums(c, BM, BN)
    return loss, total


@triton.jit(do_not_specialize=["m", "n", "diagonal", "tiles", "blocks", "run", "part_rows"])
def sigmoid_coefficients(
    x, y, g, losses, totals, cautions, scale, bias, ids_x, ids_y, m, n, diagonal, tiles, blocks, run, part_rows,
    BOLD: tl.constexpr, PARTS: tl.constexpr, GAIN: tl.constexpr, IDS: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STRIP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """With l = -t·z: g = -t·σ(l)·2^GAIN, and the program's Σ softplus(l) and Σ -t·σ(l) onto its losses and totals.

    Two launches share the work. In the BOLD one, a program whose logits are too large leaves a caution instead of sums;
    the other is of the programs with cautions, which are not bold again in later chunks. No two programs share a sum,
    so the result does not depend on their order.
    """
    s = tl.load(scale) * LOG2E
    b = tl.load(bias) * LOG2E
    at = tl.program_id(0)
    block, first = _place(tl.program_id(0), tiles, blocks, run, GROUP)
    column = block * BN
    end = tl.where((tl.load(cautions + at) == 0) == BOLD, tl.minimum(first + run, tiles), first)
    loss = tl.zeros((BM // 16, 8, 4), tl.float32)
    total = tl.zeros((BM // 16, 8, 4), tl.float32)
    for t in tl.range(first, end, flatten=True):
        row = t * BM
        acc = _product(x, y, row, column, K, BM, BN, BK)
        bold = _inside(row, column, m, n, diagonal, BM, BN) if BOLD else False
        if bold:
            more_loss, more_total = _store_sigmoid(
                acc, g, s, b, ids_x, ids_y, row, column, m, n, diagonal, part_rows,
                True, PARTS, GAIN, IDS, BM, BN, STRIP,
            )  # fmt: skip
        else:
            more_loss, more_total = _store_sigmoid(
                acc, g, s, b, ids_x, ids_y, row, column, m, n, diagonal, part_rows,
                False, PARTS, GAIN, IDS, BM, BN, STRIP,
            )  # fmt: skip
        loss += more_loss
        total += more_total
    sum_loss = tl.sum(tl.sum(tl.sum(loss, 2), 1), 0)
    sum_total = tl.sum(tl.sum(tl.sum(total, 2), 1), 0) * 2.0**-GAIN
    if BOLD & ~(sum_loss < float("inf")):  # or NaN
        tl.store(cautions + at, 1.0)
    else:
        tl.store(losses + at, tl.load(losses + at) + sum_loss)
        tl.store(totals + at, tl.load(totals + at) + sum_total)
