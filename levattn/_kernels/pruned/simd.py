"""Vector code of pruned attention: a tile of products, and operations on a row of logits or distances.

Steps are in bytes; `vectors` is the length of rows.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba.core import cgutils

from levattn._kernels.jit import VECTOR_BYTES
from levattn._kernels.llvm import (
    I64,
    Value,
    across,
    exponential,
    fma,
    integer,
    load,
    pointer,
    repeated,
    rolled,
    splat,
    store,
    vector_code,
)


@vector_code(literals="rows vectors adds")
def matrix_tile(v, like, rows, vectors, adds, x, x_step, panel, n, to, to_step):
    """Write ``Σ_k x[i, k] * panel[k]`` to ``to[i]`` for `rows` rows, or add it if `adds`.

    The n rows of a panel are `vectors` long and lie one behind the other.
    """
    b = v.b
    targets = [place for i in range(rows) for place in v.row(b.add(to, b.mul(to_step, integer(i))), vectors)]
    first = [load(b, place, v.kind, v.size) if adds else v.constant(0.0) for place in targets]
    # row addresses are base + {0, 1, 2, 3} * step: address modes need no register for each
    offsets = [None, x_step, b.mul(x_step, integer(2)), b.mul(x_step, integer(3))]
    x_step4 = b.mul(x_step, integer(4))

    def add(x: Value, panel: Value, *held: Value) -> list[Value]:
        values, sums, base = v.loaded(panel, vectors), [], x
        for i in range(rows):
            if i and i % 4 == 0:
                base = b.add(base, x_step4)
            offset = offsets[i % 4]
            factor = v.number(base if offset is None else b.add(base, offset))
            sums += [fma(b, factor, values[j], held[i * vectors + j]) for j in range(vectors)]
        return [b.add(x, integer(v.size)), b.add(panel, integer(v.size * v.count * vectors)), *sums]

    _, _, *results = repeated(b, n, (x, panel, *first), add)
    for place, result in zip(targets, results, strict=True):
        store(b, result, place, v.size)


@vector_code(literals="rows vectors")
def square_tile(v, like, rows, vectors, x, other, step, n, to, to_step):
    """Add ``Σ_k x[k, i] * other[k]`` to ``to[i]`` for `rows` columns i of x; `other` is `vectors` long.

    The n rows k lie `step` bytes apart.
    """
    b = v.b
    targets = [place for i in range(rows) for place in v.row(b.add(to, b.mul(to_step, integer(i))), vectors)]

    def add(x: Value, other: Value, *held: Value) -> list[Value]:
        values, sums = v.loaded(other, vectors), []
        for i in range(rows):
            factor = v.number(x, i)
            sums += [fma(b, factor, values[j], held[i * vectors + j]) for j in range(vectors)]
        return [b.add(x, step), b.add(other, step), *sums]

    _, _, *results = repeated(b, n, (x, other, *(load(b, place, v.kind, v.size) for place in targets)), add)
    for place, result in zip(targets, results, strict=True):
        store(b, result, place, v.size)


@vector_code(literals="rows keys")
def key_tile(v, like, rows, keys, q_at, q_step, x_at, x_step, vectors, to_at, to_step):
    """Write the products of `rows` rows with 1 or 4 keys, whole vectors, side by side."""
    b, step = v.b, integer(v.size * v.count)

    def add(at: Value, *held: Value) -> list[Value]:
        x = [v.load(b.add(x_at, b.mul(x_step, integer(j))), at) for j in range(keys)]
        sums = []
        for i in range(rows):
            q = v.load(b.add(q_at, b.mul(q_step, integer(i))), at)
            sums += [fma(b, q, x[j], held[i * keys + j]) for j in range(keys)]
        return [b.add(at, step), *sums]

    _, *sums = repeated(b, vectors, (integer(0), *[v.constant(0.0)] * (rows * keys)), add)
    for i in range(rows):
        total = _sum_lanes(b, sums[i * keys : (i + 1) * keys])
        store(b, total, v.pointer(b.add(to_at, b.mul(to_step, integer(i)))), v.size)


def _sum_lanes(b: Value, vectors: list[Value]) -> Value:
    """Return a vector with the sum of the lanes of each of some vectors, a power of two of them."""
    count, parts = len(vectors), 1

    def halved(pair: list[Value]) -> Value:
        lanes, half = pair[0].type.count, pair[0].type.count // parts // 2
        sides = []
        for side in range(2):
            each = [
                i * lanes + part * 2 * half + side * half + k
                for i in range(len(pair))
                for part in range(parts)
                for k in range(half)
            ]
            kind = ir.VectorType(ir.IntType(32), len(each))
            sides.append(b.shuffle_vector(pair[0], pair[-1], ir.Constant(kind, each)))
        return b.fadd(*sides)

    while len(vectors) > 1:
        vectors = [halved(vectors[i : i + 2]) for i in range(0, len(vectors), 2)]
        parts *= 2
    (found,) = vectors
    while found.type.count > count:
        found = halved([found])
    return found


@vector_code(literals="rows vectors")
def value_tile(v, like, rows, vectors, p_at, p_step, x_at, x_step, n, to_at, to_step):
    """Add ``Σ_k p[i, k] x[k]`` to ``to[i]`` for `rows` rows i and n rows x, of which so many vectors are read."""
    b = v.b
    targets = [place for i in range(rows) for place in v.row(b.add(to_at, b.mul(to_step, integer(i))), vectors)]

    def add(p: Value, x: Value, *held: Value) -> list[Value]:
        values, sums = v.loaded(x, vectors), []
        for i in range(rows):
            factor = v.number(b.add(p, b.mul(p_step, integer(i))))
            sums += [fma(b, factor, values[j], held[i * vectors + j]) for j in range(vectors)]
        return [b.add(p, integer(v.size)), b.add(x, x_step), *sums]

    begin = [v.load(b.ptrtoint(place, I64)) for place in targets]
    _, _, *results = repeated(b, n, (p_at, x_at, *begin), add)
    for place, result in zip(targets, results, strict=True):
        store(b, result, place, v.size)


@vector_code(numbers="bound")
def bounded_logits(v, like, x, bound, vectors):
    """Replace the numbers x of a row by ``c tanh(x / c)``, where c is the bound."""
    b, c = v.b, v.splat(bound)
    with v.each(vectors) as at:
        y = b.fdiv(v.load(x, at), c)
        for most, order in ((20.0, ">"), (-20.0, "<")):  # where tanh is 1, and NaN stays
            y = b.select(b.fcmp_ordered(order, y, v.constant(most)), v.constant(most), y)
        power = exponential(b, b.fadd(y, y))
        large = b.fsub(v.constant(1.0), b.fdiv(v.constant(2.0), b.fadd(power, v.constant(1.0))))
        square, small = b.fmul(y, y), v.constant(62 / 2835)
        for term in (-17 / 315, 2 / 15, -1 / 3, 1.0):  # a series, where the difference would lose digits
            small = fma(b, small, square, v.constant(term))
        near = b.fcmp_ordered("<", square, v.constant(0.0625))
        tanh = b.select(near, b.fmul(y, small), large)
        v.store(b.fmul(c, tanh), x, at)


@vector_code()
def add_columns(v, like, x, step, n, vectors, to):
    """Add the sum of n rows x, `step` bytes apart, to the numbers `to`."""
    b = v.b
    with v.each(vectors) as at:

        def add(x: Value, total: Value) -> list[Value]:
            return [b.add(x, step), b.fadd(total, v.load(x))]

        _, total = repeated(b, n, (b.add(x, at), v.load(to, at)), add)
        v.store(total, to, at)


@vector_code()
def widen(v, like, source, n, target):
    """Write `n` numbers at `source` to `target` as float64."""
    b, double = v.b, ir.DoubleType()
    from_, to = v.pointer(source), pointer(b, target, double)
    wide = ir.VectorType(double, VECTOR_BYTES // 8).count
    whole = b.and_(n, integer(-wide))
    for lanes, first, last in ((wide, integer(0), whole), (1, whole, n)):
        kind, float64 = (ir.VectorType(x, lanes) if lanes > 1 else x for x in (v.scalar, double))
        with rolled(b, first, last, lanes) as i:
            value = load(b, b.gep(from_, [i]), kind, v.size)
            store(b, value if kind == float64 else b.fpext(value, float64), b.gep(to, [i]), 8)


@vector_code()
def accumulate(v, like, source, factor, n, target):
    """Add `n` numbers at `source`, times the float64 number at `factor`, to float64 numbers at `target`."""
    b, double = v.b, ir.DoubleType()
    from_, to, times = v.pointer(source), pointer(b, target, double), load(b, pointer(b, factor, double), double, 8)
    wide = ir.VectorType(double, VECTOR_BYTES // 8).count
    whole = b.and_(n, integer(-wide))
    for lanes, first, last in ((wide, integer(0), whole), (1, whole, n)):
        kind, float64 = (ir.VectorType(x, lanes) if lanes > 1 else x for x in (v.scalar, double))
        weight = splat(b, times, lanes) if lanes > 1 else times
        with rolled(b, first, last, lanes) as i:
            value, place = load(b, b.gep(from_, [i]), kind, v.size), b.gep(to, [i])
            value = value if kind == float64 else b.fpext(value, float64)
            store(b, fma(b, weight, value, load(b, place, float64, 8)), place, 8)


@vector_code()
def turned_tile(v, like, source, step, target, target_step):
    """Write the transpose of a square of whole vectors; `step` and `target_step` are in bytes."""
    b, n = v.b, v.count
    rows = [v.load(b.add(source, b.mul(step, integer(i)))) for i in range(n)]
    half = 1
    while half < n:  # blocks beside the diagonal change places
        for i in range(n):
            if not i & half:
                one, other = rows[i], rows[i + half]
                for place, start in ((i, 0), (i + half, half)):
                    lanes = [(lane & ~half) + start + (n if lane & half else 0) for lane in range(n)]
                    kind = ir.VectorType(ir.IntType(32), n)
                    rows[place] = b.shuffle_vector(one, other, ir.Constant(kind, lanes))
        half *= 2
    for i, row in enumerate(rows):
        v.store(row, b.add(target, b.mul(target_step, integer(i))))


@vector_code(returns="number")
def raised(v, like, x, bias, vectors):
    """Add the row `bias` to the row x, and return the largest sum."""
    b, top = v.b, cgutils.alloca_once_value(v.b, v.constant(-math.inf))
    with v.each(vectors) as at:
        value, held = b.fadd(v.load(x, at), v.load(bias, at)), b.load(top)
        v.store(value, x, at)
        b.store(b.select(b.fcmp_unordered(">", value, held), value, held), top)
    return across(b, b.load(top), "maximum")


@vector_code(returns="number", numbers="top")
def exponentials(v, like, x, top, vectors):
    """Replace the numbers x of a row by ``e^{x − top}`` and return their sum."""
    b, total = v.b, cgutils.alloca_once_value(v.b, v.constant(0.0))
    less = v.splat(top)
    with v.each(vectors) as at:
        value = exponential(b, b.fsub(v.load(x, at), less))
        v.store(value, x, at)
        b.store(b.fadd(b.load(total), value), total)
    return across(b, b.load(total), "sum")


@vector_code(returns="number", numbers="factor")
def mean_of(v, like, weights, values, factor, vectors):
    """Multiply a row of weights by a factor, and return the sum of their products with values."""
    b, total = v.b, cgutils.alloca_once_value(v.b, v.constant(0.0))
    times = v.splat(factor)
    with v.each(vectors) as at:
        weight = b.fmul(v.load(weights, at), times)
        v.store(weight, weights, at)
        b.store(fma(b, weight, v.load(values, at), b.load(total)), total)
    return across(b, b.load(total), "sum")


@vector_code(numbers="center")
def logit_gradients(v, like, weights, products, center, vectors):
    """Replace products x of a row by ``weight (x − center)``."""
    b, less = v.b, v.splat(center)
    with v.each(vectors) as at:
        v.store(b.fmul(v.load(weights, at), b.fsub(v.load(products, at), less)), products, at)


@vector_code(returns="integer")
def nearest(v, like, x, bias, vectors, least):
    """Return the place of the smallest number of ``x + bias``, on ties the first, and write the number."""
    b, index = v.b, ir.IntType(8 * v.size)
    indices = ir.VectorType(index, v.count)
    first = ir.Constant(indices, list(range(v.count)))
    low = cgutils.alloca_once_value(b, v.constant(math.inf))
    where, here = cgutils.alloca_once_value(b, first), cgutils.alloca_once_value(b, first)
    with v.each(vectors) as at:
        value, held, places = b.fadd(v.load(x, at), v.load(bias, at)), b.load(low), b.load(here)
        less = b.fcmp_ordered("<", value, held)
        b.store(b.select(less, value, held), low)
        b.store(b.select(less, places, b.load(where)), where)
        b.store(b.add(places, ir.Constant(indices, [v.count] * v.count)), here)
    best, place = _place_of_first(v, b.load(low), b.load(where), "<")
    store(b, best, v.pointer(least), v.size)
    return place


@vector_code(returns="integer", numbers="square center")
def approach(v, like, products, square, squares, center, least, labels, shut, vectors, farthest):
    """Assign the rows nearest to a new center to it; return the row farthest from all centers, on ties the first.

    Write to `farthest` the distance of the farthest row of each lane, then the places of these rows.

    `products`: of the rows with the center, whose squared length is `square`. `squares`: of the rows. `least`,
    `labels`: squared distances and numbers of nearest centers, which change. `shut`: 0, or −inf for rows that must not
    be returned.
    """
    b, index = v.b, ir.IntType(8 * v.size)
    indices = ir.VectorType(index, v.count)
    first = ir.Constant(indices, list(range(v.count)))
    far = cgutils.alloca_once_value(b, v.constant(-math.inf))
    where, here = cgutils.alloca_once_value(b, first), cgutils.alloca_once_value(b, first)
    own, name = v.splat(square), v.splat(center)
    with v.each(vectors) as at:
        both = b.fadd(v.load(squares, at), own)
        distance = fma(b, v.load(products, at), v.constant(-2.0), both)
        distance = b.select(b.fcmp_ordered(">", distance, v.constant(0.0)), distance, v.constant(0.0))
        held = v.load(least, at)
        nearer = b.fcmp_ordered("<", distance, held)
        held = b.select(nearer, distance, held)
        v.store(held, least, at)
        v.store(b.select(nearer, name, v.load(labels, at)), labels, at)
        value, best, places = b.fadd(held, v.load(shut, at)), b.load(far), b.load(here)
        more = b.fcmp_ordered(">", value, best)
        b.store(b.select(more, value, best), far)
        b.store(b.select(more, places, b.load(where)), where)
        b.store(b.add(places, ir.Constant(indices, [v.count] * v.count)), here)
    v.store(b.load(far), farthest)
    v.store(b.sitofp(b.load(where), v.kind), farthest, integer(v.size * v.count))
    return _place_of_first(v, b.load(far), b.load(where), ">")[1]


def _place_of_first(v, values, places, order):
    """Return the extreme of the lanes, and its place; on ties the first."""
    b = v.b
    lanes = [ir.Constant(ir.IntType(32), lane) for lane in range(v.count)]
    best, place = b.extract_element(values, lanes[0]), b.extract_element(places, lanes[0])
    for lane in lanes[1:]:
        value, other = b.extract_element(values, lane), b.extract_element(places, lane)
        tie = b.and_(b.fcmp_ordered("==", value, best), b.icmp_signed("<", other, place))
        better = b.or_(b.fcmp_ordered(order, value, best), tie)
        best, place = b.select(better, value, best), b.select(better, other, place)
    return best, place if v.size == 8 else b.sext(place, I64)


@vector_code()
def squared(v, like, panel, vectors, n, to):
    """Write the squared lengths of the columns of a panel of n rows, each a sum from the first row on."""
    b, step = v.b, v.b.mul(vectors, integer(v.size * v.count))
    with v.each(vectors) as at:

        def add(x: Value, total: Value) -> list[Value]:
            value = v.load(x)
            return [b.add(x, step), fma(b, value, value, total)]

        _, total = repeated(b, n, (b.add(panel, at), v.constant(0.0)), add)
        v.store(total, to, at)


@vector_code(returns="number")
def length_squared(v, like, x, vectors):
    """Return the sum of squares of a row."""
    b, total = v.b, cgutils.alloca_once_value(v.b, v.constant(0.0))
    with v.each(vectors) as at:
        value = v.load(x, at)
        b.store(fma(b, value, value, b.load(total)), total)
    return across(b, b.load(total), "sum")


@vector_code(numbers="low step", literals="half scaled")
def open_span(v, like, half, scaled, source, n, low, step, divisors, means, to):
    """Write ``m + b (low + step z)`` for n codes z, or ``low + step z`` if not `scaled`.

    A code is a byte, or its lower (1) or its upper `half` (2).
    """
    b, whole = v.b, v.b.and_(n, integer(-v.count))
    codes = pointer(b, source, ir.IntType(8))
    for lanes, first, last in ((v.count, integer(0), whole), (1, whole, n)):

        def alike(kind, lanes=lanes):
            return ir.VectorType(kind, lanes) if lanes > 1 else kind

        def constant(value, lanes=lanes):
            kind = ir.IntType(8)
            return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes) if lanes > 1 else ir.Constant(kind, value)

        with rolled(b, first, last, lanes) as i:

            def read(base, i=i, alike=alike):
                return load(b, b.gep(v.pointer(base), [i]), alike(v.scalar), v.size)

            code = load(b, b.gep(codes, [i]), alike(ir.IntType(8)), 1)
            if half == 1:
                code = b.and_(code, constant(15))
            elif half == 2:
                code = b.lshr(code, constant(4))
            z = b.sitofp(b.zext(code, alike(ir.IntType(32))), alike(v.scalar))
            at, each = (splat(b, x, lanes) if lanes > 1 else x for x in (low, step))
            value = fma(b, each, z, at)
            if scaled:
                value = fma(b, read(divisors), value, read(means))
            store(b, value, b.gep(v.pointer(to), [i]), v.size)


@vector_code(returns="number")
def bfloat16_at(v, like, at):
    """Return the bfloat16 number at an address."""
    b = v.b
    word = b.zext(load(b, pointer(b, at, ir.IntType(16)), ir.IntType(16), 2), ir.IntType(32))
    return b.bitcast(b.shl(word, ir.Constant(ir.IntType(32), 16)), ir.FloatType())
