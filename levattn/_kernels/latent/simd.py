"""Vector code of latent attention: a tile of running sums that is read as it grows, and exponentials of a row.

Addresses and steps are in bytes, steps may be negative. ``like`` is any array of the dtype to compute in.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from levattn._kernels.llvm import _I64, _fma, _int, _literals, _load, _pointer, _splat, _store, _vector_type, primitive

__all__ = [
    "copy_vectors",
    "differs",
    "dot_vectors",
    "exceeds",
    "exp_row",
    "fold_vectors",
    "key_row",
    "query_row",
    "state_tile",
    "weigh_row",
]

Builder = Any
Value = Any


@primitive
def state_tile(
    typing, like, rows, vectors, adds, reads, add, add_step, x, x_step, read, read_step, y, y_step, n, to, to_step
):
    """Add ``add[t, i] * x[t]`` to state[i] for n steps t, and after each ``Σ_i read[t, i] * state[i]`` to y[t].

    The state, at `to`, has so many `rows` of so many `vectors`, in registers meanwhile. Without `adds` or `reads` that
    half is left out.
    """
    signature = types.void(like, rows, vectors, adds, reads, *([types.int64] * 11))
    tall, wide, with_adds, with_reads = _literals(rows, vectors, adds, reads)
    size, scalar, vector = _vector_type(like)
    count = vector.count
    cells = [(i, j) for i in range(tall) for j in range(wide)]

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        add, add_step, x, x_step, read, read_step, y, y_step, n, to, to_step = arguments[5:]
        targets = [
            _pointer(b, b.add(to, b.add(b.mul(to_step, _int(i)), _int(size * count * j))), scalar) for i, j in cells
        ]
        first = [_load(b, place, vector, size) for place in targets]
        before = b.block
        loop, after = b.append_basic_block("steps"), b.append_basic_block("store")
        b.cbranch(b.icmp_signed(">", n, _int(0)), loop, after)
        b.position_at_end(loop)
        left, *cursors = (b.phi(_I64) for _ in range(5))
        held = [b.phi(vector) for _ in cells] if with_adds else first
        at_add, at_x, at_read, at_y = cursors
        state = held
        if with_adds:
            row = _pointer(b, at_x, scalar)
            values = [_load(b, b.gep(row, [_int(count * j)]), vector, size) for j in range(wide)]
            factors = _factors(b, at_add, tall, scalar, size, count)
            state = [_fma(b, factors[i], values[j], held[cell]) for cell, (i, j) in enumerate(cells)]
        if with_reads:
            row = _pointer(b, at_y, scalar)
            factors = _factors(b, at_read, tall, scalar, size, count)
            for j in range(wide):
                place = b.gep(row, [_int(count * j)])
                total = _load(b, place, vector, size)
                for i in range(tall):
                    total = _fma(b, factors[i], state[i * wide + j], total)
                _store(b, total, place, size)
        following = [b.sub(left, _int(1))]
        following += [b.add(at, step) for at, step in zip(cursors, (add_step, x_step, read_step, y_step), strict=True)]
        for phi, start, moved in zip((left, *cursors), (n, add, x, read, y), following, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(moved, loop)
        if with_adds:
            for phi, start, moved in zip(held, first, state, strict=True):
                phi.add_incoming(start, before)
                phi.add_incoming(moved, loop)
        b.cbranch(b.icmp_signed(">", following[0], _int(0)), loop, after)
        b.position_at_end(after)
        if with_adds:
            results = [b.phi(vector) for _ in cells]
            for result, start, moved in zip(results, first, state, strict=True):
                result.add_incoming(start, before)
                result.add_incoming(moved, loop)
            for place, result in zip(targets, results, strict=True):
                _store(b, result, place, size)
        return context.get_dummy_value()

    return signature, codegen


def _factors(b: Builder, address: Value, tall: int, scalar: Value, size: int, count: int) -> list[Value]:
    """Return `tall` numbers that lie side by side, each in all lanes of a vector."""
    head = _pointer(b, address, scalar)
    return [_splat(b, _load(b, b.gep(head, [_int(i)]), scalar, size), count) for i in range(tall)]


def _constant(vector: Value, value: float) -> Value:
    return ir.Constant(vector, [value] * vector.count)


def _exp(b: Builder, x: Value) -> Value:
    """Return e^x of every lane, to about one unit in the last place, for x below the range's end; 0 for tiny results.

    x = n log 2 + r with |r| at most half of log 2, and the series of e^r; n goes into the exponent by way of the last
    bits of a large number. NaN stays NaN.
    """
    vector = x.type
    single = isinstance(vector.element, ir.FloatType)
    bits, bias, terms, least = (23, 127, 7, -87.0) if single else (52, 1023, 13, -708.0)
    # log 2 in two parts, of which the first has few bits: so n times it is exact
    high, low = (0.693359375, -2.121944400546905828e-4) if single else (0.6931471803691238, 1.908214929270587816e-10)
    magic = 1.5 * 2.0**bits
    shifted = _fma(b, x, _constant(vector, 1 / math.log(2)), _constant(vector, magic + bias))
    n = b.fsub(shifted, _constant(vector, magic + bias))
    r = _fma(b, n, _constant(vector, -low), _fma(b, n, _constant(vector, -high), x))
    series = _constant(vector, 1 / math.factorial(terms))
    for k in range(terms - 1, -1, -1):
        series = _fma(b, series, r, _constant(vector, 1 / math.factorial(k)))
    whole = ir.VectorType(ir.IntType(32 if single else 64), vector.count)
    power = b.shl(b.bitcast(shifted, whole), ir.Constant(whole, [bits] * vector.count))
    value = b.fmul(series, b.bitcast(power, vector))
    return b.select(b.fcmp_ordered("<", x, _constant(vector, least)), _constant(vector, 0.0), value)


def _each(b: Builder, vectors: Value, size: int, vector: Value) -> Any:
    """Return a loop over the vectors of a row; its index is the offset in bytes."""
    return cgutils.for_range_slice(b, _int(0), b.mul(vectors, _int(size * vector.count)), _int(size * vector.count))


@primitive
def copy_vectors(typing, like, source, target, vectors):
    """Copy whole vectors."""
    size, scalar, vector = _vector_type(like)
    signature = types.void(like, *([types.int64] * 3))

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        source, target, vectors = arguments[1:]
        with _each(b, vectors, size, vector) as (at, _):
            value = _load(b, _pointer(b, b.add(source, at), scalar), vector, size)
            _store(b, value, _pointer(b, b.add(target, at), scalar), size)
        return context.get_dummy_value()

    return signature, codegen


def _any(b: Builder, vectors: Value, size: int, vector: Value, test: Any) -> Value:
    """Tell whether the test, given the offset of a vector, is true for any lane."""
    flags = ir.VectorType(ir.IntType(1), vector.count)
    found = cgutils.alloca_once_value(b, ir.Constant(flags, [0] * vector.count))
    with _each(b, vectors, size, vector) as (at, _):
        b.store(b.or_(b.load(found), test(at)), found)
    word = b.bitcast(b.load(found), ir.IntType(vector.count))
    return b.icmp_unsigned("!=", word, ir.Constant(word.type, 0))


@primitive
def exceeds(typing, like, x, limit, vectors):
    """Tell whether any number of a row is larger than that of the limits."""
    size, scalar, vector = _vector_type(like)
    signature = types.boolean(like, *([types.int64] * 3))

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        def test(at: Value) -> Value:
            left, right = (_load(b, _pointer(b, b.add(base, at), scalar), vector, size) for base in arguments[1:3])
            return b.fcmp_ordered(">", left, right)

        return _any(b, arguments[3], size, vector, test)

    return signature, codegen


@primitive
def differs(typing, like, x, value, vectors):
    """Tell whether any number of a padded row is another than the value; NaN is."""
    size, scalar, vector = _vector_type(like)
    signature = types.boolean(like, types.int64, like.dtype, types.int64)

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        expected = _splat(b, arguments[2], vector.count)

        def test(at: Value) -> Value:
            found = _load(b, _pointer(b, b.add(arguments[1], at), scalar), vector, size)
            return b.fcmp_unordered("!=", found, expected)

        return _any(b, arguments[3], size, vector, test)

    return signature, codegen


@primitive
def exp_row(typing, like, x, base, total, vectors):
    """Replace the numbers x of a row by ``e^{x − base}`` and add these to `total`."""
    size, scalar, vector = _vector_type(like)
    signature = types.void(like, *([types.int64] * 4))

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        x, base, total, vectors = arguments[1:]
        with _each(b, vectors, size, vector) as (at, _):
            place, less, sums = (_pointer(b, b.add(start, at), scalar) for start in (x, base, total))
            value = _exp(b, b.fsub(_load(b, place, vector, size), _load(b, less, vector, size)))
            _store(b, value, place, size)
            _store(b, b.fadd(_load(b, sums, vector, size), value), sums, size)
        return context.get_dummy_value()

    return signature, codegen


def _across(b: Builder, value: Value, name: str) -> Value:
    """Return the maximum or the sum of the lanes, halved again and again."""
    half = value.type.count
    while half > 1:
        half //= 2
        undefined = ir.Constant(value.type, ir.Undefined)
        kind = ir.VectorType(ir.IntType(32), half)
        low, high = (
            b.shuffle_vector(value, undefined, ir.Constant(kind, list(range(start, start + half))))
            for start in (0, half)
        )
        value = b.fadd(low, high) if name == "sum" else b.select(b.fcmp_ordered(">", low, high), low, high)
    return b.extract_element(value, ir.Constant(ir.IntType(32), 0))


@primitive
def weigh_row(typing, like, keeps, q, sums, gate, vectors, weights, inverses):
    """Replace the logits q of a row by p/s, where p is their softmax, and return the weight of one more logit, `gate`.

    Only where the sums s are positive a logit takes part. If `keeps`, p and 1/s go to `weights` and `inverses`.
    """
    size, scalar, vector = _vector_type(like)
    signature = like.dtype(like, keeps, types.int64, types.int64, like.dtype, *([types.int64] * 3))
    (keep,) = _literals(keeps)

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        q, sums, gate, vectors, weights, inverses = arguments[2:]
        zero, one, least = (_constant(vector, value) for value in (0.0, 1.0, -math.inf))

        def taking_part(at: Value) -> tuple[Value, Value, Value]:
            place = _pointer(b, b.add(q, at), scalar)
            s = _load(b, _pointer(b, b.add(sums, at), scalar), vector, size)
            live = b.fcmp_unordered("!=", s, zero)
            return place, s, b.select(live, _load(b, place, vector, size), least)

        top = cgutils.alloca_once_value(b, _splat(b, gate, vector.count))
        with _each(b, vectors, size, vector) as (at, _):
            logits, held = taking_part(at)[2], b.load(top)
            b.store(b.select(b.fcmp_ordered(">", logits, held), logits, held), top)
        largest = _across(b, b.load(top), "maximum")
        lowest = ir.Constant(scalar, -math.inf)
        largest = b.select(b.fcmp_ordered("==", largest, lowest), ir.Constant(scalar, 0.0), largest)
        largest = _splat(b, largest, vector.count)
        total = cgutils.alloca_once_value(b, zero)
        with _each(b, vectors, size, vector) as (at, _):
            place, _, logits = taking_part(at)
            value = _exp(b, b.fsub(logits, largest))
            _store(b, value, place, size)
            b.store(b.fadd(b.load(total), value), total)
        beside = b.extract_element(
            _exp(b, b.fsub(_splat(b, gate, vector.count), largest)), ir.Constant(ir.IntType(32), 0)
        )
        whole = b.fadd(_across(b, b.load(total), "sum"), beside)
        nothing = b.fcmp_ordered("==", whole, ir.Constant(scalar, 0.0))
        factor = b.select(nothing, ir.Constant(scalar, 0.0), b.fdiv(ir.Constant(scalar, 1.0), whole))
        factors = _splat(b, factor, vector.count)
        with _each(b, vectors, size, vector) as (at, _):
            place, s, _ = taking_part(at)
            inverse = b.fdiv(one, b.select(b.fcmp_ordered("==", s, zero), one, s))
            p = b.fmul(_load(b, place, vector, size), factors)
            _store(b, b.fmul(p, inverse), place, size)
            if keep:
                _store(b, p, _pointer(b, b.add(weights, at), scalar), size)
                _store(b, inverse, _pointer(b, b.add(inverses, at), scalar), size)
        return b.fmul(beside, factor)

    return signature, codegen


@primitive
def dot_vectors(typing, like, x, y, vectors):
    """Return the inner product of two padded rows."""
    size, scalar, vector = _vector_type(like)
    signature = like.dtype(like, *([types.int64] * 3))

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        x, y, vectors = arguments[1:]
        total = cgutils.alloca_once_value(b, _constant(vector, 0.0))
        with _each(b, vectors, size, vector) as (at, _):
            left, right = (_load(b, _pointer(b, b.add(base, at), scalar), vector, size) for base in (x, y))
            b.store(_fma(b, left, right, b.load(total)), total)
        return _across(b, b.load(total), "sum")

    return signature, codegen


@primitive
def fold_vectors(typing, like, gains, sums, state, vectors):
    """Add gains to sums in float64, write these to the state, rounded, and make the gains zero."""
    size, scalar, vector = _vector_type(like)
    signature = types.void(like, *([types.int64] * 4))
    double = ir.DoubleType()
    doubles = ir.VectorType(double, vector.count)
    converts = size == 4

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        gains, sums, state, vectors = arguments[1:]
        with _each(b, vectors, size, vector) as (at, _):
            gain_at, state_at = (_pointer(b, b.add(base, at), scalar) for base in (gains, state))
            sum_at = _pointer(b, b.add(sums, b.mul(at, _int(8 // size))), double)
            gain = _load(b, gain_at, vector, size)
            total = b.fadd(_load(b, sum_at, doubles, 8), b.fpext(gain, doubles) if converts else gain)
            _store(b, total, sum_at, 8)
            _store(b, b.fptrunc(total, vector) if converts else total, state_at, size)
            _store(b, _constant(vector, 0.0), gain_at, size)
        return context.get_dummy_value()

    return signature, codegen


@primitive
def query_row(typing, like, c, g, p, inverse, mean, vectors):
    """Replace p by the gradient ``c g − p mean`` of the logits of a row, and g by ``c g / s``, given 1/s."""
    size, scalar, vector = _vector_type(like)
    signature = types.void(like, *([types.int64] * 4), like.dtype, types.int64)

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        *rows, mean, vectors = arguments[1:]
        less = _splat(b, b.fneg(mean), vector.count)
        with _each(b, vectors, size, vector) as (at, _):
            places = [_pointer(b, b.add(row, at), scalar) for row in rows]
            c, g, p, inverse = (_load(b, place, vector, size) for place in places)
            product = b.fmul(c, g)
            _store(b, _fma(b, p, less, product), places[2], size)
            _store(b, b.fmul(product, inverse), places[1], size)
        return context.get_dummy_value()

    return signature, codegen


@primitive
def key_row(typing, like, e, products, rho, added, vectors):
    """Add a row to rho, and replace the products of a position by the gradient ``e (product − rho)`` of its logits."""
    size, scalar, vector = _vector_type(like)
    signature = types.void(like, *([types.int64] * 5))

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        *rows, vectors = arguments[1:]
        with _each(b, vectors, size, vector) as (at, _):
            places = [_pointer(b, b.add(row, at), scalar) for row in rows]
            e, product, rho, more = (_load(b, place, vector, size) for place in places)
            rho = b.fadd(rho, more)
            _store(b, rho, places[2], size)
            _store(b, b.fmul(e, b.fsub(product, rho)), places[1], size)
        return context.get_dummy_value()

    return signature, codegen
