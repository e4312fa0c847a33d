"""Vector code of token statistics attention: some tokens of one head, whose running sums are in registers meanwhile.

Addresses and steps are in bytes; `tokens` is that of the numbers (int64) of the n tokens, whose rows in an array are
so many steps from its address. Rows of d channels are cut into stretches of whole vectors, of half ones, and so on.
``like`` is any array of the dtype to compute in.

Running sums are kept in float64, at `sums`, of d numbers. The sum at a token is the one that was there, rounded, plus
the gain of the tokens since in the dtype; the gain is added in float64 behind the last token. At `powers` are the
powers (1, 2, ...) of what is left of a sum at the next token, `rate` the first and `kept` the last of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from levattn._kernels._cpu_latent_simd import _across, _constant, _exp
from levattn._kernels._cpu_simd import _I64, _fma, _int, _literals, _load, _pointer, _splat, _store, _vector_type

__all__ = [
    "back_block",
    "blend_block",
    "dot_block",
    "gather_block",
    "mend_block",
    "past_block",
    "read_block",
    "rest_block",
    "score_block",
    "share_block",
    "spread_block",
]

Builder = Any
Value = Any

_WIDE = 4  # vectors of the longest stretch
_DOUBLE = ir.DoubleType()


class _Stretch:
    """Some channels, as one vector: their numbers at a row's address, and how to compute with them."""

    def __init__(self, b: Builder, like: Any, lanes: int, at: Value) -> None:
        self.b, self.at = b, at
        self.size, self.scalar, vector = _vector_type(like)
        self.lanes = vector.count
        self.vector, self.doubles = ir.VectorType(self.scalar, lanes), ir.VectorType(_DOUBLE, lanes)

    def _place(self, address: Value, size: int, kind: Value) -> Value:
        return _pointer(self.b, self.b.add(address, self.b.mul(self.at, _int(size))), kind)

    def load(self, address: Value) -> Value:
        return _load(self.b, self._place(address, self.size, self.scalar), self.vector, self.size)

    def store(self, value: Value, address: Value) -> None:
        _store(self.b, value, self._place(address, self.size, self.scalar), self.size)

    def sums(self, address: Value) -> tuple[Value, Value]:
        """Return sums, and what they are rounded to."""
        held = _load(self.b, self._place(address, 8, _DOUBLE), self.doubles, 8)
        return held, held if self.size == 8 else self.b.fptrunc(held, self.vector)

    def fold(self, held: Value, kept: Value, gain: Value, address: Value) -> None:
        """Store ``kept · held + gain``."""
        wide = gain if self.size == 8 else self.b.fpext(gain, self.doubles)
        total = _fma(self.b, held, _splat(self.b, kept, self.vector.count), wide)
        _store(self.b, total, self._place(address, 8, _DOUBLE), 8)

    def all(self, number: Value) -> Value:
        return _splat(self.b, number, self.vector.count)

    def one_of(self, address: Value, t: Value) -> Value:
        """Return the number of a token, in all lanes."""
        return self.all(_load(self.b, self._number(address, t), self.scalar, self.size))

    def _number(self, address: Value, t: Value) -> Value:
        return _pointer(self.b, self.b.add(address, self.b.mul(t, _int(self.size))), self.scalar)

    def add_across(self, value: Value, address: Value, t: Value) -> None:
        """Add the sum of the lanes to the number of a token."""
        place = self._number(address, t)
        total = self.b.fadd(_load(self.b, place, self.scalar, self.size), _across(self.b, value, "sum"))
        _store(self.b, total, place, self.size)

    def row(self, tokens: Value, t: Value, address: Value, step: Value) -> Value:
        """Return the address of a token's row."""
        b = self.b
        number = _load(b, _pointer(b, b.add(tokens, b.mul(t, _int(8))), _I64), _I64, 8)
        return b.add(address, b.mul(number, step))


def _stretches(b: Builder, like: Any, d: Value, emit: Callable[[_Stretch], None]) -> None:
    """Emit code for the stretches that d channels are cut into."""
    lanes = _WIDE * _vector_type(like)[2].count
    with cgutils.for_range_slice(b, _int(0), b.and_(d, _int(-lanes)), _int(lanes)) as (at, _):
        emit(_Stretch(b, like, lanes, at))
    while lanes > 1:
        with b.if_then(b.icmp_unsigned("!=", b.and_(d, _int(lanes // 2)), _int(0))):
            emit(_Stretch(b, like, lanes // 2, b.and_(d, _int(-lanes))))
        lanes //= 2


def _each_token(
    b: Builder, n: Value, carried: list[Value], step: Callable[[Value, list[Value]], list[Value]], back: bool = False
) -> list[Value]:
    """Emit a loop over tokens, from the last if `back`, and return what `step` makes of the carried values."""
    first = b.sub(n, _int(1)) if back else _int(0)
    before = b.block
    loop, after = b.append_basic_block("tokens"), b.append_basic_block("after")
    b.cbranch(b.icmp_signed(">", n, _int(0)), loop, after)
    b.position_at_end(loop)
    t, *held = (b.phi(kind) for kind in (_I64, *(value.type for value in carried)))
    new = step(t, held)
    following = b.add(t, _int(-1 if back else 1))
    more = b.icmp_signed(">=", following, _int(0)) if back else b.icmp_signed("<", following, n)
    for phi, start, moved in zip((t, *held), (first, *carried), (following, *new), strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(moved, b.block)
    end = b.block
    b.cbranch(more, loop, after)
    b.position_at_end(after)
    results = [b.phi(value.type) for value in carried]
    for result, start, moved in zip(results, carried, new, strict=True):
        result.add_incoming(start, before)
        result.add_incoming(moved, end)
    return results


def _reciprocal(b: Builder, x: Value, lanes: int) -> Value:
    """Return 1/x for x of at least the smallest normal number or NaN, to about one unit in the last place.

    Division of vectors takes many times as long as a multiplication. So in float32, where all is below 2¹²⁵, 1/x is
    guessed to 5 % by a difference of bit patterns, of which a step of third order makes 1e-4, and one of Newton's 1e-8.
    """
    one = _constant(x.type, 1.0)
    if isinstance(x.type.element, ir.DoubleType):
        return b.fdiv(one, x)
    whole = ir.VectorType(ir.IntType(32), x.type.count)
    bits = b.bitcast(x, whole)
    largest = bits
    while largest.type.count > lanes:  # NaN is above all
        low, high = _halves(b, largest)
        largest = b.select(b.icmp_signed(">", low, high), low, high)
    beyond = b.icmp_signed(">", largest, ir.Constant(largest.type, [_bits(2.0**125)] * largest.type.count))
    flags = ir.IntType(largest.type.count)
    with b.if_else(b.icmp_unsigned("!=", b.bitcast(beyond, flags), ir.Constant(flags, 0)), likely=False) as (far, near):
        with far:
            exact, far_end = b.fdiv(one, x), b.block
        with near:
            y = b.bitcast(b.sub(ir.Constant(whole, [0x7EF311C3] * whole.count), bits), x.type)
            less = b.fneg(x)
            e = _fma(b, less, y, one)
            y = _fma(b, y, _fma(b, e, e, e), y)
            guess, near_end = _fma(b, y, _fma(b, less, y, one), y), b.block
    result = b.phi(x.type)
    result.add_incoming(exact, far_end)
    result.add_incoming(guess, near_end)
    return result


def _halves(b: Builder, value: Value) -> tuple[Value, Value]:
    half = value.type.count // 2
    undefined = ir.Constant(value.type, ir.Undefined)
    kind = ir.VectorType(ir.IntType(32), half)
    low, high = (ir.Constant(kind, list(range(start, start + half))) for start in (0, half))
    return b.shuffle_vector(value, undefined, low), b.shuffle_vector(value, undefined, high)


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


@intrinsic(prefer_literal=True)
def score_block(
    typing, like, back, d, tokens, n, w, w_step, sums, rate, kept, powers, least, scores, inverses, row_step
):
    """Add ``Σ x / max(A, least)`` of each token to its score, where x = w² goes into the sums A before.

    If `back`, the sums stay as they are, and ``1 / max(A, least)`` goes to rows at `inverses`, negative where it is
    that of `least`.
    """
    signature = types.void(
        *(like, back, *([types.int64] * 6), like.dtype, types.float64, types.int64, like.dtype, *([types.int64] * 3))
    )
    (goes_back,) = _literals(back)

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        d, tokens, n, w, w_step, sums, rate, kept, powers, least, scores, inverses, row_step = arguments[2:]

        def emit(at: _Stretch) -> None:
            held, base = at.sums(sums)
            rates, lowest = at.all(rate), at.all(least)

            def step(t: Value, carried: list[Value]) -> list[Value]:
                w_t = at.load(at.row(tokens, t, w, w_step))
                x = b.fmul(w_t, w_t)
                gain = _fma(b, carried[0], rates, x)
                A = _fma(b, base, at.one_of(powers, t), gain)
                below = b.fcmp_ordered(">", lowest, A)
                A = b.select(below, lowest, A)
                inverse = _reciprocal(b, A, at.lanes)
                at.add_across(b.fmul(x, inverse), scores, t)
                if goes_back:
                    at.store(b.select(below, b.fneg(inverse), inverse), b.add(inverses, b.mul(t, row_step)))
                return [gain]

            (gain,) = _each_token(b, n, [_constant(at.vector, 0.0)], step)
            if not goes_back:
                at.fold(held, kept, gain, sums)

        _stretches(b, like, d, emit)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def read_block(typing, like, d, tokens, n, w, w_step, y, y_step, sums, rate, kept, powers, weights, slopes, factors):
    """Write ``factor · w / (1 + slope · M)`` of each token, where ``weight · x`` goes into the sums M before."""
    signature = types.void(like, *([types.int64] * 8), like.dtype, types.float64, *([types.int64] * 4))

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        d, tokens, n, w, w_step, y, y_step, sums, rate, kept, powers, weights, slopes, factors = arguments[1:]

        def emit(at: _Stretch) -> None:
            held, base = at.sums(sums)
            rates, one = at.all(rate), _constant(at.vector, 1.0)

            def step(t: Value, carried: list[Value]) -> list[Value]:
                w_t = at.load(at.row(tokens, t, w, w_step))
                gain = _fma(b, b.fmul(w_t, w_t), at.one_of(weights, t), b.fmul(carried[0], rates))
                M = _fma(b, base, at.one_of(powers, t), gain)
                divisor = _fma(b, at.one_of(slopes, t), M, one)
                value = b.fmul(b.fmul(at.one_of(factors, t), w_t), _reciprocal(b, divisor, at.lanes))
                at.store(value, at.row(tokens, t, y, y_step))
                return [gain]

            (gain,) = _each_token(b, n, [_constant(at.vector, 0.0)], step)
            at.fold(held, kept, gain, sums)

        _stretches(b, like, d, emit)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def gather_block(typing, like, d, tokens, n, x, x_step, z, z_step, sums, rate, kept, weights):
    """Add ``weight · x z`` of the tokens to the sums, channel by channel."""
    signature = types.void(like, *([types.int64] * 8), like.dtype, types.float64, types.int64)

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        d, tokens, n, x, x_step, z, z_step, sums, rate, kept, weights = arguments[1:]

        def emit(at: _Stretch) -> None:
            held, _ = at.sums(sums)
            rates = at.all(rate)

            def step(t: Value, carried: list[Value]) -> list[Value]:
                product = b.fmul(at.load(at.row(tokens, t, x, x_step)), at.load(at.row(tokens, t, z, z_step)))
                return [_fma(b, product, at.one_of(weights, t), b.fmul(carried[0], rates))]

            (gain,) = _each_token(b, n, [_constant(at.vector, 0.0)], step)
            at.fold(held, kept, gain, sums)

        _stretches(b, like, d, emit)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def dot_block(typing, like, d, tokens, n, x, x_step, z, z_step, row, scores):
    """Add ``Σ x z · row`` over the channels of each token to its score."""
    signature = types.void(like, *([types.int64] * 9))

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        d, tokens, n, x, x_step, z, z_step, row, scores = arguments[1:]

        def emit(at: _Stretch) -> None:
            held = at.load(row)

            def step(t: Value, _: list[Value]) -> list[Value]:
                product = b.fmul(at.load(at.row(tokens, t, x, x_step)), at.load(at.row(tokens, t, z, z_step)))
                at.add_across(b.fmul(product, held), scores, t)
                return []

            _each_token(b, n, [], step)

        _stretches(b, like, d, emit)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def spread_block(typing, like, d, tokens, n, w, w_step, y, y_step, row, factors):
    """Write ``factor · w · row`` of each token."""
    signature = types.void(like, *([types.int64] * 9))

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        d, tokens, n, w, w_step, y, y_step, row, factors = arguments[1:]

        def emit(at: _Stretch) -> None:
            held = at.load(row)

            def step(t: Value, _: list[Value]) -> list[Value]:
                value = b.fmul(at.one_of(factors, t), at.load(at.row(tokens, t, w, w_step)))
                at.store(b.fmul(value, held), at.row(tokens, t, y, y_step))
                return []

            _each_token(b, n, [], step)

        _stretches(b, like, d, emit)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def blend_block(typing, like, d, tokens, n, w, w_step, dy, dy_step, out, out_step, row, factors, other, weights):
    """Write ``factor · dY · row + 2 weight · w · other``."""
    signature = types.void(like, *([types.int64] * 13))

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        d, tokens, n, w, w_step, dy, dy_step, out, out_step, row, factors, other, weights = arguments[1:]

        def emit(at: _Stretch) -> None:
            r, p = at.load(row), at.load(other)
            p = b.fadd(p, p)

            def step(t: Value, _: list[Value]) -> list[Value]:
                own = b.fmul(b.fmul(at.one_of(factors, t), at.load(at.row(tokens, t, dy, dy_step))), r)
                w_t = b.fmul(at.one_of(weights, t), at.load(at.row(tokens, t, w, w_step)))
                at.store(_fma(b, w_t, p, own), at.row(tokens, t, out, out_step))
                return []

            _each_token(b, n, [], step)

        _stretches(b, like, d, emit)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def mend_block(typing, like, d, tokens, n, w, w_step, out, out_step, row, slopes, less):
    """Add ``2 w · (slope · row − less)`` to `out`."""
    signature = types.void(like, *([types.int64] * 10))

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        d, tokens, n, w, w_step, out, out_step, row, slopes, less = arguments[1:]

        def emit(at: _Stretch) -> None:
            held, q = at.load(row), b.fneg(at.load(less))

            def step(t: Value, _: list[Value]) -> list[Value]:
                w_t, place = at.load(at.row(tokens, t, w, w_step)), at.row(tokens, t, out, out_step)
                dx = _fma(b, at.one_of(slopes, t), held, q)
                at.store(_fma(b, b.fadd(w_t, w_t), dx, at.load(place)), place)
                return []

            _each_token(b, n, [], step)

        _stretches(b, like, d, emit)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def back_block(
    typing, like, d, tokens, n, w, w_step, dy, dy_step, out, out_step, sums, rate, powers,
    weights, slopes, factors, steps, gammas, row_step, dots, means,
):  # fmt: skip
    """Read the sums M of tokens once more, which stay as they are, for the gradients in what they are made of.

    With ``r = 1 / (1 + slope · M)`` and ``u = w r dY`` write ``factor · r · dY`` to `out`, and ``Γ = step · u r`` to
    rows at `gammas`. Add Σ u to the token's number at `dots`, and ``Σ u (1 − r)`` to that at `means`.
    """
    signature = types.void(like, *([types.int64] * 10), like.dtype, *([types.int64] * 9))

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        d, tokens, n, w, w_step, dy, dy_step, out, out_step, sums, rate, powers = arguments[1:13]
        weights, slopes, factors, steps, gammas, row_step, dots, means = arguments[13:]

        def emit(at: _Stretch) -> None:
            base, rates, one = at.sums(sums)[1], at.all(rate), _constant(at.vector, 1.0)

            def step(t: Value, carried: list[Value]) -> list[Value]:
                w_t = at.load(at.row(tokens, t, w, w_step))
                gain = _fma(b, b.fmul(w_t, w_t), at.one_of(weights, t), b.fmul(carried[0], rates))
                moment = b.fmul(at.one_of(slopes, t), _fma(b, base, at.one_of(powers, t), gain))
                r = _reciprocal(b, b.fadd(one, moment), at.lanes)
                part = b.fmul(r, at.load(at.row(tokens, t, dy, dy_step)))
                at.store(b.fmul(at.one_of(factors, t), part), at.row(tokens, t, out, out_step))
                u = b.fmul(w_t, part)
                ur = b.fmul(u, r)
                at.store(b.fmul(at.one_of(steps, t), ur), b.add(gammas, b.mul(t, row_step)))
                at.add_across(u, dots, t)
                at.add_across(b.fmul(ur, moment), means, t)
                return [gain]

            _each_token(b, n, [_constant(at.vector, 0.0)], step)

        _stretches(b, like, d, emit)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def past_block(
    typing, like, d, tokens, n, w, w_step, out, out_step, gammas, row_step, sums, rate, kept, powers, weights, dots
):
    """From the last token to the first, add Γ to the sums P, ``2 weight · P · w`` to `out`, and ``Σ P x`` to dots."""
    signature = types.void(like, *([types.int64] * 10), like.dtype, types.float64, *([types.int64] * 3))

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        d, tokens, n, w, w_step, out, out_step, gammas, row_step = arguments[1:10]
        sums, rate, kept, powers, weights, dots = arguments[10:]

        def emit(at: _Stretch) -> None:
            held, base = at.sums(sums)
            rates = at.all(rate)

            def step(t: Value, carried: list[Value]) -> list[Value]:
                w_t, place = at.load(at.row(tokens, t, w, w_step)), at.row(tokens, t, out, out_step)
                gain = _fma(b, carried[0], rates, at.load(b.add(gammas, b.mul(t, row_step))))
                P = _fma(b, base, at.one_of(powers, b.sub(b.sub(n, _int(1)), t)), gain)
                Pw = b.fmul(P, w_t)
                weight = at.one_of(weights, t)
                at.store(_fma(b, b.fadd(weight, weight), Pw, at.load(place)), place)
                at.add_across(b.fmul(Pw, w_t), dots, t)
                return [gain]

            (gain,) = _each_token(b, n, [_constant(at.vector, 0.0)], step, back=True)
            at.fold(held, kept, gain, sums)

        _stretches(b, like, d, emit)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def rest_block(
    typing, like, d, tokens, n, w, w_step, out, out_step, inverses, row_step, sums, rate, kept, powers, slopes
):
    """From the last token to the first, add ``2 w · (slope / A − Q)`` to `out`.

    ``slope · x / A²`` goes into the sums Q before, but for what is at `least`; 1/A is at `inverses`.
    """
    signature = types.void(like, *([types.int64] * 10), like.dtype, types.float64, *([types.int64] * 2))

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        d, tokens, n, w, w_step, out, out_step, inverses, row_step = arguments[1:10]
        sums, rate, kept, powers, slopes = arguments[10:]

        def emit(at: _Stretch) -> None:
            held, base = at.sums(sums)
            rates, zero = at.all(rate), _constant(at.vector, 0.0)

            def step(t: Value, carried: list[Value]) -> list[Value]:
                w_t, place = at.load(at.row(tokens, t, w, w_step)), at.row(tokens, t, out, out_step)
                inverse = at.load(b.add(inverses, b.mul(t, row_step)))
                below = b.fcmp_ordered("<", inverse, zero)
                dx = b.fmul(at.one_of(slopes, t), b.select(below, b.fneg(inverse), inverse))
                own = b.fmul(dx, b.fmul(b.fmul(w_t, w_t), inverse))
                gain = _fma(b, carried[0], rates, b.select(below, zero, own))
                dx = b.fsub(dx, _fma(b, base, at.one_of(powers, b.sub(b.sub(n, _int(1)), t)), gain))
                at.store(_fma(b, b.fadd(w_t, w_t), dx, at.load(place)), place)
                return [gain]

            (gain,) = _each_token(b, n, [zero], step, back=True)
            at.fold(held, kept, gain, sums)

        _stretches(b, like, d, emit)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def share_block(typing, like, tokens, heads, logits):
    """Replace rows of so many logits, one for each head, by their softmax over the heads."""
    signature = types.void(like, tokens, types.int64, types.int64)
    (width,) = _literals(tokens)
    size, scalar, vector = _vector_type(like)

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        heads, logits = arguments[2:]
        stop, skip = b.mul(heads, _int(width * size)), _int(width * size)

        def each_head(at: Value, start: Value, step: Callable[[Value, Value], Value]) -> Value:
            """Return what `step` makes of a vector, given the place of each row's part in turn."""
            held = cgutils.alloca_once_value(b, start)
            with cgutils.for_range_slice(b, at, b.add(at, stop), skip) as (place, _):
                b.store(step(_pointer(b, place, scalar), b.load(held)), held)
            return b.load(held)

        for column in range(0, width, vector.count):
            at = b.add(logits, _int(column * size))

            def larger(place: Value, top: Value) -> Value:
                value = _load(b, place, vector, size)
                return b.select(b.fcmp_ordered(">", value, top), value, top)

            top = each_head(at, _load(b, _pointer(b, at, scalar), vector, size), larger)

            def add(place: Value, total: Value, top: Value = top) -> Value:
                value = _exp(b, b.fsub(_load(b, place, vector, size), top))
                _store(b, value, place, size)
                return b.fadd(total, value)

            total = each_head(at, _constant(vector, 0.0), add)
            factor = b.fdiv(_constant(vector, 1.0), total)

            def scale(place: Value, factor: Value) -> Value:
                _store(b, b.fmul(_load(b, place, vector, size), factor), place, size)
                return factor

            each_head(at, factor, scale)
        return context.get_dummy_value()

    return signature, codegen
