"""Vector code of latent attention: tiles of running sums, which rows read as they grow, and work on padded rows.

Steps are in bytes, and may be negative; `vectors` is the number of vectors of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils

from levattn._kernels.llvm import (
    Value,
    Vectors,
    across,
    exponential,
    fma,
    integer,
    load,
    pointer,
    repeated,
    splat,
    store,
    vector_code,
)

PLAIN_LOGIT = 32.0  # sums of e^x over thousands of such logits stay within the square root of the range


@vector_code(literals="rows vectors adds reads")
def state_tile(v, like, rows, vectors, adds, reads, add, x, read, y, n, to, to_step):
    """Add ``add[t, i] * x[t]`` to state[i] for n steps t, and after each ``Σ_i read[t, i] * state[i]`` to y[t].

    The state, at `to`, has `rows` rows of `vectors` vectors, which stay in registers meanwhile. `adds` and `reads`
    select the two halves. If `adds` is 2, sums begin at zero, and are finally added to a state in float64. Each of
    add, x, read and y is an address and a step.
    """
    b, cursors, steps = v.b, *zip(add, x, read, y, strict=True)
    starts = [b.add(to, b.mul(to_step, integer(i))) for i in range(rows)]
    if adds == 2:
        targets = [_double(b, start, v.count * j) for start in starts for j in range(vectors)]
        first = [v.constant(0.0)] * (rows * vectors)
    else:
        targets = [place for start in starts for place in v.row(start, vectors)]
        first = [load(b, place, v.kind, v.size) for place in targets]

    def step(add: Value, x: Value, read: Value, y: Value, *held: Value) -> list[Value]:
        state = list(held) or first
        if adds:
            values, factors = v.loaded(x, vectors), [v.number(add, i) for i in range(rows)]
            state = [fma(b, factors[k // vectors], values[k % vectors], cell) for k, cell in enumerate(state)]
        if reads:
            factors = [v.number(read, i) for i in range(rows)]
            for j, place in enumerate(v.row(y, vectors)):
                total = load(b, place, v.kind, v.size)
                for factor, cell in zip(factors, state[j::vectors], strict=True):
                    total = fma(b, factor, cell, total)
                store(b, total, place, v.size)
        moved = [b.add(at, by) for at, by in zip((add, x, read, y), steps, strict=True)]
        return [*moved, *state] if adds else moved

    _, _, _, _, *results = repeated(b, n, (*cursors, *(first if adds else ())), step)
    for place, result in zip(targets if adds else (), results, strict=True):
        if adds == 2:
            _add_to_doubles(v, result, place)
        else:
            store(b, result, place, v.size)


@vector_code(literals="rows vectors")
def row_tile(v, like, rows, vectors, c, state, y, n):
    """Add ``Σ_i c[t, i] * state[i]`` to y[t] for `rows` rows t of `vectors` vectors, with the sums in registers.

    The state has n rows. Each of c, state and y is an address and a step.
    """
    b, (c, c_step), (state, state_step), (y, y_step) = v.b, c, state, y
    places = [place for t in range(rows) for place in v.row(b.add(y, b.mul(y_step, integer(t))), vectors)]
    apart = [b.mul(c_step, integer(t)) for t in range(rows)]

    def step(c: Value, state: Value, *held: Value) -> list[Value]:
        values, factors = v.loaded(state, vectors), [v.number(b.add(c, row)) for row in apart]
        totals = [fma(b, factors[k // vectors], values[k % vectors], total) for k, total in enumerate(held)]
        return [b.add(c, integer(v.size)), b.add(state, state_step), *totals]

    _, _, *totals = repeated(b, n, (c, state, *(load(b, place, v.kind, v.size) for place in places)), step)
    for place, total in zip(places, totals, strict=True):
        store(b, total, place, v.size)


def _double(b: Value, at: Value, place: int) -> Value:
    """Return a pointer to the float64 number at a place after an address."""
    return b.gep(pointer(b, at, ir.DoubleType()), [integer(place)])


def _add_to_doubles(v: Vectors, vector: Value, place: Value) -> Value:
    """Add a vector to numbers of float64 and return the sums."""
    b, doubles = v.b, ir.VectorType(ir.DoubleType(), v.count)
    total = b.fadd(load(b, place, doubles, 8), b.fpext(vector, doubles) if v.size == 4 else vector)
    store(b, total, place, 8)
    return total


@vector_code(literals="lanes vectors")
def step_tile(v, like, lanes, vectors, places, factors, x, y):
    """Add a position x to the rows of a float64 state S; write the new rows, and the output, the product of c, to y.

    The new rows are ``old S + gained x``, with factors in float64. For the output, c multiplies rounded rows of S,
    scaled by `scales`, plus ``e x``. The tile has `vectors` vectors of `lanes` lanes (0 for whole vectors).

    places: addresses of S and of the new rows, the bytes from row to row, and the number of rows.

    factors: addresses of e, c, scales, old and gained.
    """
    S, new, row, n = places
    e, c, scales, old, gained = factors
    b, part = v.b, Vectors(v.b, like, lanes or None)
    lanes, doubles = part.count, ir.VectorType(ir.DoubleType(), part.count)
    values = part.loaded(x, vectors)
    wide = [b.fpext(value, doubles) if v.size == 4 else value for value in values]

    def factor(at: Value) -> Value:
        return splat(b, load(b, pointer(b, at, ir.DoubleType()), ir.DoubleType(), 8), lanes)

    def step(S: Value, new: Value, like_at: Value, double_at: Value, *read: Value) -> list[Value]:
        scale, weight, reads = (part.number(b.add(at, like_at)) for at in (scales, e, c))
        kept, added = (factor(b.add(at, double_at)) for at in (old, gained))
        totals = []
        for j, total in enumerate(read):
            held = load(b, _double(b, S, lanes * j), doubles, 8)
            state = b.fptrunc(held, part.kind) if v.size == 4 else held
            state = fma(b, weight, values[j], b.fmul(state, scale))
            totals.append(fma(b, reads, state, total))
            store(b, fma(b, added, wide[j], b.fmul(held, kept)), _double(b, new, lanes * j), 8)
        moved = [b.add(S, row), b.add(new, row), b.add(like_at, integer(v.size)), b.add(double_at, integer(8))]
        return [*moved, *totals]

    zero = integer(0)
    _, _, _, _, *totals = repeated(b, n, (S, new, zero, zero, *[part.constant(0.0)] * vectors), step)
    for place, total in zip(part.row(y, vectors), totals, strict=True):
        store(b, total, place, v.size)


@vector_code()
def top_rows(v, like, source, source_step, target, target_step, n, top, least, vectors):
    """Copy n rows; raise `top` to the largest number of each column, and lower `least` to the smallest."""
    b = v.b
    with v.each(vectors) as at:

        def step(source: Value, target: Value, high: Value, low: Value) -> list[Value]:
            x = v.load(source)
            v.store(x, target)
            high = b.select(b.fcmp_ordered(">", x, high), x, high)
            low = b.select(b.fcmp_ordered("<", x, low), x, low)
            return [b.add(source, source_step), b.add(target, target_step), high, low]

        begin = (b.add(source, at), b.add(target, at), v.load(top, at), v.load(least, at))
        _, _, high, low = repeated(b, n, begin, step)
        v.store(high, top, at)
        v.store(low, least, at)


@vector_code()
def copy_vectors(v, like, source, target, vectors):
    """Copy whole vectors."""
    with v.each(vectors) as at:
        v.store(v.load(source, at), target, at)


def _any(v: Vectors, vectors: Value, test: Callable[[Value], Value]) -> Value:
    """Tell whether the test, given the offset of a vector, is true for any lane."""
    b, flags = v.b, ir.VectorType(ir.IntType(1), v.count)
    found = cgutils.alloca_once_value(b, ir.Constant(flags, [0] * v.count))
    with v.each(vectors) as at:
        b.store(b.or_(b.load(found), test(at)), found)
    word = b.bitcast(b.load(found), ir.IntType(v.count))
    return b.icmp_unsigned("!=", word, ir.Constant(word.type, 0))


@vector_code(returns="flag")
def exceeds(v, like, x, limit, vectors):
    """Tell whether any number of a row is larger than its limit."""
    return _any(v, vectors, lambda at: v.b.fcmp_ordered(">", v.load(x, at), v.load(limit, at)))


@vector_code(returns="flag", numbers="value")
def differs(v, like, x, value, vectors):
    """Tell whether any number of a padded row differs from the value; NaN does."""
    expected = v.splat(value)
    return _any(v, vectors, lambda at: v.b.fcmp_unordered("!=", v.load(x, at), expected))


@vector_code()
def exp_row(v, like, x, base, total, vectors):
    """Replace the numbers x of a row by ``e^{x − base}``, and add the results to `total`."""
    b = v.b
    with v.each(vectors) as at:
        value = exponential(b, b.fsub(v.load(x, at), v.load(base, at)))
        v.store(value, x, at)
        v.store(b.fadd(v.load(total, at), value), total, at)


@vector_code(returns="number", numbers="gate", literals="how")
def weigh_row(v, like, how, q, c, sums, gate, vectors, weights, inverses):
    """Write c = p/s, where p is the softmax of the logits q of a row, and return the weight of one more logit, `gate`.

    A logit takes part only where its sum s is positive. `how`: 2 if the `inverses` 1/s are given; otherwise they are
    computed, and p and 1/s are kept (1) or not (0).
    """
    b = v.b
    zero, one, least = (v.constant(value) for value in (0.0, 1.0, -math.inf))
    nothing, lowest = ir.Constant(v.scalar, 0.0), ir.Constant(v.scalar, -math.inf)

    def logits_at(at: Value) -> Value:
        live = b.fcmp_unordered("!=", v.load(sums, at), zero)
        return b.select(live, v.load(q, at), least)

    top = cgutils.alloca_once_value(b, v.splat(gate))
    with v.each(vectors) as at:
        logits, held = logits_at(at), b.load(top)
        b.store(b.select(b.fcmp_ordered(">", logits, held), logits, held), top)
    largest = across(b, b.load(top), "maximum")
    largest = v.splat(b.select(b.fcmp_ordered("==", largest, lowest), nothing, largest))
    total = cgutils.alloca_once_value(b, zero)
    with v.each(vectors) as at:
        value = exponential(b, b.fsub(logits_at(at), largest))
        v.store(value, c, at)
        b.store(b.fadd(b.load(total), value), total)
    gated = exponential(b, b.fsub(v.splat(gate), largest))
    gated = b.extract_element(gated, ir.Constant(ir.IntType(32), 0))
    whole = b.fadd(across(b, b.load(total), "sum"), gated)
    inverse = b.fdiv(ir.Constant(v.scalar, 1.0), whole)
    factor = b.select(b.fcmp_ordered("==", whole, nothing), nothing, inverse)
    factors = v.splat(factor)
    with v.each(vectors) as at:
        if how == 2:
            inverse = v.load(inverses, at)
        else:
            s = v.load(sums, at)
            inverse = b.fdiv(one, b.select(b.fcmp_ordered("==", s, zero), one, s))
        p = b.fmul(v.load(c, at), factors)
        v.store(b.fmul(p, inverse), c, at)
        if how == 1:
            v.store(p, weights, at)
            v.store(inverse, inverses, at)
    return b.fmul(gated, factor)


@vector_code(returns="flag")
def weigh_plain_row(v, like, q, c, inverses, vectors):
    """Write c = p/s of a row, given 1/s, if all logits are between ±PLAIN_LOGIT, and tell whether they are.

    Then the largest logit need not be subtracted, and the lanes are combined only once, in the sum.
    """
    b = v.b
    high, low = v.constant(PLAIN_LOGIT), v.constant(-PLAIN_LOGIT)

    def beyond(at: Value) -> Value:
        logits = v.load(q, at)
        return b.or_(b.fcmp_unordered(">", logits, high), b.fcmp_unordered("<", logits, low))

    plain = b.not_(_any(v, vectors, beyond))
    with b.if_then(plain, likely=True):
        total = cgutils.alloca_once_value(b, v.constant(0.0))
        with v.each(vectors) as at:
            value = exponential(b, v.load(q, at))
            v.store(value, c, at)
            b.store(b.fadd(b.load(total), value), total)
        factors = v.splat(b.fdiv(ir.Constant(v.scalar, 1.0), across(b, b.load(total), "sum")))
        with v.each(vectors) as at:
            v.store(b.fmul(b.fmul(v.load(c, at), factors), v.load(inverses, at)), c, at)
    return plain


@vector_code(returns="number")
def dot_vectors(v, like, x, y, vectors):
    """Return the inner product of two padded rows."""
    b, total = v.b, cgutils.alloca_once_value(v.b, v.constant(0.0))
    with v.each(vectors) as at:
        b.store(fma(b, v.load(x, at), v.load(y, at), b.load(total)), total)
    return across(b, b.load(total), "sum")


@vector_code()
def fold_vectors(v, like, gains, sums, state, vectors):
    """Add gains to sums in float64, write the rounded sums to the state, and set the gains to zero."""
    b = v.b
    with v.each(vectors) as at:
        total = _add_to_doubles(v, v.load(gains, at), _double(b, b.add(sums, b.mul(at, integer(8 // v.size))), 0))
        v.store(b.fptrunc(total, v.kind) if v.size == 4 else total, state, at)
        v.store(v.constant(0.0), gains, at)


@vector_code(numbers="mean")
def query_row(v, like, c, g, p, inverse, mean, vectors):
    """Replace p by the gradient ``c g − p mean`` of the logits of a row, and g by ``c g / s``, given 1/s."""
    b, less = v.b, v.splat(v.b.fneg(mean))
    with v.each(vectors) as at:
        product, weights = b.fmul(v.load(c, at), v.load(g, at)), v.load(p, at)
        scaled = b.fmul(product, v.load(inverse, at))
        v.store(fma(b, weights, less, product), p, at)
        v.store(scaled, g, at)


@vector_code()
def key_row(v, like, e, products, rho, added, vectors):
    """Add a row to rho, and replace the products of a position by the gradient ``e (product − rho)`` of its logits."""
    b = v.b
    with v.each(vectors) as at:
        total = b.fadd(v.load(rho, at), v.load(added, at))
        gradient = b.fmul(v.load(e, at), b.fsub(v.load(products, at), total))
        v.store(total, rho, at)
        v.store(gradient, products, at)
