"""Vector code of token statistics attention: a run of tokens of one head, whose sums are in registers meanwhile.

Addresses and steps are in bytes; `tokens` is that of the numbers (int64) of the n tokens, whose rows in an array are
so many steps from its address. Rows of d channels are cut into stretches of whole vectors, of half ones, and so on.
``like`` is anything with the dtype to compute in.

Running sums are in float64, d numbers at `sums`. The sum at a token is the one before its block of BLOCK tokens,
rounded, plus the gain in the dtype since then; behind the block this is added in float64. Where sums decay, `powers`
has what is left of a sum 1, 2, ... tokens later, in the dtype, and `kept` that of 0, 1, ... later in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from levattn._kernels.latent.simd import _across, _constant, _exp
from levattn._kernels.llvm import (
    _I64,
    _fma,
    _int,
    _literals,
    _load,
    _pointer,
    _prefetch,
    _splat,
    _store,
    _vector_type,
    primitive,
)

__all__ = [
    "BLOCK",
    "back_run",
    "blend_run",
    "dot_run",
    "gather_run",
    "mend_run",
    "past_run",
    "read_run",
    "rest_run",
    "score_run",
    "share_run",
    "spread_run",
]

Builder = Any
Value = Any

BLOCK = 16  # tokens whose gain is summed apart

_AHEAD = 16  # tokens until a row is read that is asked for
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

    def all(self, number: Value) -> Value:
        return _splat(self.b, number, self.vector.count)

    def constant(self, number: float) -> Value:
        return _constant(self.vector, number)

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
        """Return the address of a token's row; that of a later one is asked for."""
        b = self.b
        number = _load(b, _pointer(b, b.add(tokens, b.mul(t, _int(8))), _I64), _I64, 8)
        place = b.add(address, b.mul(number, step))
        later = self._place(b.add(place, b.mul(step, _int(_AHEAD))), self.size, self.scalar)
        for line in range(0, self.vector.count * self.size, 64):
            _prefetch(b, b.add(b.ptrtoint(later, _I64), _int(line)))
        return place

    def each(self, n: Value, step: Callable[[Value], None]) -> None:
        """Emit a loop over tokens."""
        with cgutils.for_range(self.b, n) as loop:
            step(loop.index)

    def summing(
        self,
        n: Value,
        sums: Value,
        powers: Value,
        kept: Value,
        step: Callable[[Value, Callable[[Value], Value]], None],
        back: bool = False,
    ) -> None:
        """Emit a loop over tokens, from the last one if `back`; a step, given a function that adds to the sums."""
        b = self.b
        rates = self.all(_load(b, _pointer(b, powers, self.scalar), self.scalar, self.size))
        gain = cgutils.alloca_once(b, self.vector)
        last = b.sub(n, _int(1))
        with cgutils.for_range_slice(b, _int(0), n, _int(BLOCK)) as (begin, _):
            held = _load(b, self._place(sums, 8, _DOUBLE), self.doubles, 8)
            base = held if self.size == 8 else b.fptrunc(held, self.vector)
            left = b.sub(n, begin)
            count = b.select(b.icmp_signed("<", left, _int(BLOCK)), left, _int(BLOCK))
            b.store(self.constant(0.0), gain)
            with cgutils.for_range(b, count) as loop:
                t = b.add(begin, loop.index)

                def add(term: Value) -> Value:
                    """Add a term to the sum, and return it."""
                    new = _fma(b, b.load(gain), rates, term)
                    b.store(new, gain)
                    return _fma(b, base, self.one_of(powers, loop.index), new)

                step(b.sub(last, t) if back else t, add)
            wide = b.load(gain) if self.size == 8 else b.fpext(b.load(gain), self.doubles)
            factor = _load(b, _pointer(b, b.add(kept, b.mul(count, _int(8))), _DOUBLE), _DOUBLE, 8)
            total = _fma(b, held, _splat(b, factor, self.vector.count), wide)
            _store(b, total, self._place(sums, 8, _DOUBLE), 8)


def _stretches(b: Builder, like: Any, d: Value, emit: Callable[[_Stretch], None]) -> None:
    """Emit code for the stretches that d channels are cut into."""
    lanes = _WIDE * _vector_type(like)[2].count
    with cgutils.for_range_slice(b, _int(0), b.and_(d, _int(-lanes)), _int(lanes)) as (at, _):
        emit(_Stretch(b, like, lanes, at))
    while lanes > 1:
        with b.if_then(b.icmp_unsigned("!=", b.and_(d, _int(lanes // 2)), _int(0))):
            emit(_Stretch(b, like, lanes // 2, b.and_(d, _int(-lanes))))
        lanes //= 2


def _code(like: Any, emit: Callable[..., None]) -> Any:
    """Return the code of an intrinsic (like, d, ...), given what emits it for a stretch and the further arguments."""

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        _stretches(b, like, arguments[1], lambda at: emit(at, *arguments[2:]))
        return context.get_dummy_value()

    return codegen


def _reciprocal(at: _Stretch, x: Value) -> Value:
    """Return 1/x for x of at least the smallest normal number, or NaN, to about one unit in the last place.

    Vectors are divided much slower than multiplied. So in float32, where all is below 2¹²⁵, 1/x is guessed to 5 % by a
    difference of bit patterns, of which a step of third order makes 1e-4, and one of Newton's 1e-8.
    """
    b, one = at.b, at.constant(1.0)
    if at.size == 8:
        return b.fdiv(one, x)
    whole = ir.VectorType(ir.IntType(32), x.type.count)
    bits = b.bitcast(x, whole)
    largest = bits
    while largest.type.count > at.lanes:  # NaN is above all
        low, high = _halves(b, largest)
        largest = b.select(b.icmp_signed(">", low, high), low, high)
    limit = int(np.float32(2.0**125).view(np.int32))
    beyond = b.icmp_signed(">", largest, ir.Constant(largest.type, [limit] * largest.type.count))
    flags = ir.IntType(largest.type.count)
    result = cgutils.alloca_once(b, x.type)
    with b.if_else(b.icmp_unsigned("!=", b.bitcast(beyond, flags), ir.Constant(flags, 0)), likely=False) as (
        far,
        near,
    ):
        with far:
            b.store(b.fdiv(one, x), result)
        with near:
            y = b.bitcast(b.sub(ir.Constant(whole, [0x7EF311C3] * whole.count), bits), x.type)
            less = b.fneg(x)
            e = _fma(b, less, y, one)
            y = _fma(b, y, _fma(b, e, e, e), y)
            b.store(_fma(b, y, _fma(b, less, y, one), y), result)
    return b.load(result)


def _halves(b: Builder, value: Value) -> tuple[Value, Value]:
    half = value.type.count // 2
    undefined = ir.Constant(value.type, ir.Undefined)
    kind = ir.VectorType(ir.IntType(32), half)
    low, high = (ir.Constant(kind, list(range(start, start + half))) for start in (0, half))
    return b.shuffle_vector(value, undefined, low), b.shuffle_vector(value, undefined, high)


@primitive
def score_run(typing, like, back, d, tokens, n, w, w_step, sums, powers, kept, least, scores, inverses, row_step):
    """Add ``Σ x / max(A, least)`` of each token to its score, where x = w² goes into the sums A before.

    If `back`, ``1 / max(A, least)`` goes to rows at `inverses`, negative where it is that of `least`.
    """
    (goes_back,) = _literals(back)

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        d, tokens, n, w, w_step, sums, powers, kept, least, scores, inverses, row_step = arguments[2:]

        def emit(at: _Stretch) -> None:
            lowest = at.all(least)

            def step(t: Value, add: Callable[[Value], Value]) -> None:
                w_t = at.load(at.row(tokens, t, w, w_step))
                x = b.fmul(w_t, w_t)
                A = add(x)
                below = b.fcmp_ordered(">", lowest, A)
                inverse = _reciprocal(at, b.select(below, lowest, A))
                at.add_across(b.fmul(x, inverse), scores, t)
                if goes_back:
                    at.store(b.select(below, b.fneg(inverse), inverse), b.add(inverses, b.mul(t, row_step)))

            at.summing(n, sums, powers, kept, step)

        _stretches(b, like, d, emit)
        return context.get_dummy_value()

    return types.void(like, back, *([types.int64] * 8), like.dtype, *([types.int64] * 3)), codegen


@primitive
def read_run(typing, like, d, tokens, n, w, w_step, y, y_step, sums, powers, kept, weights, slopes, factors):
    """Write ``factor · w / (1 + slope · M)`` of each token, where ``weight · x`` goes into the sums M before."""

    def emit(at: _Stretch, *arguments: Value) -> None:
        b = at.b
        tokens, n, w, w_step, y, y_step, sums, powers, kept, weights, slopes, factors = arguments

        def step(t: Value, add: Callable[[Value], Value]) -> None:
            w_t = at.load(at.row(tokens, t, w, w_step))
            M = add(b.fmul(b.fmul(w_t, w_t), at.one_of(weights, t)))
            r = _reciprocal(at, _fma(b, at.one_of(slopes, t), M, at.constant(1.0)))
            at.store(b.fmul(b.fmul(at.one_of(factors, t), w_t), r), at.row(tokens, t, y, y_step))

        at.summing(n, sums, powers, kept, step)

    return types.void(like, *([types.int64] * 13)), _code(like, emit)


@primitive
def gather_run(typing, like, d, tokens, n, x, x_step, z, z_step, sums, powers, kept, weights):
    """Add ``weight · x z`` of the tokens to the sums, channel by channel."""

    def emit(at: _Stretch, *arguments: Value) -> None:
        b = at.b
        tokens, n, x, x_step, z, z_step, sums, powers, kept, weights = arguments

        def step(t: Value, add: Callable[[Value], Value]) -> None:
            product = b.fmul(at.load(at.row(tokens, t, x, x_step)), at.load(at.row(tokens, t, z, z_step)))
            add(b.fmul(product, at.one_of(weights, t)))

        at.summing(n, sums, powers, kept, step)

    return types.void(like, *([types.int64] * 11)), _code(like, emit)


@primitive
def dot_run(typing, like, d, tokens, n, x, x_step, z, z_step, row, scores):
    """Add ``Σ x z · row`` over the channels of each token to its score."""

    def emit(at: _Stretch, *arguments: Value) -> None:
        b = at.b
        tokens, n, x, x_step, z, z_step, row, scores = arguments
        held = at.load(row)

        def step(t: Value) -> None:
            product = b.fmul(at.load(at.row(tokens, t, x, x_step)), at.load(at.row(tokens, t, z, z_step)))
            at.add_across(b.fmul(product, held), scores, t)

        at.each(n, step)

    return types.void(like, *([types.int64] * 9)), _code(like, emit)


@primitive
def spread_run(typing, like, d, tokens, n, w, w_step, y, y_step, row, factors):
    """Write ``factor · w · row`` of each token."""

    def emit(at: _Stretch, *arguments: Value) -> None:
        b = at.b
        tokens, n, w, w_step, y, y_step, row, factors = arguments
        held = at.load(row)

        def step(t: Value) -> None:
            value = b.fmul(at.one_of(factors, t), at.load(at.row(tokens, t, w, w_step)))
            at.store(b.fmul(value, held), at.row(tokens, t, y, y_step))

        at.each(n, step)

    return types.void(like, *([types.int64] * 9)), _code(like, emit)


@primitive
def blend_run(typing, like, d, tokens, n, w, w_step, dy, dy_step, out, out_step, row, factors, other, weights):
    """Write ``factor · dY · row + 2 weight · w · other``."""

    def emit(at: _Stretch, *arguments: Value) -> None:
        b = at.b
        tokens, n, w, w_step, dy, dy_step, out, out_step, row, factors, other, weights = arguments
        r, p = at.load(row), at.load(other)
        p = b.fadd(p, p)

        def step(t: Value) -> None:
            own = b.fmul(b.fmul(at.one_of(factors, t), at.load(at.row(tokens, t, dy, dy_step))), r)
            w_t = b.fmul(at.one_of(weights, t), at.load(at.row(tokens, t, w, w_step)))
            at.store(_fma(b, w_t, p, own), at.row(tokens, t, out, out_step))

        at.each(n, step)

    return types.void(like, *([types.int64] * 13)), _code(like, emit)


@primitive
def mend_run(typing, like, d, tokens, n, w, w_step, out, out_step, row, slopes, less):
    """Add ``2 w · (slope · row − less)`` to `out`."""

    def emit(at: _Stretch, *arguments: Value) -> None:
        b = at.b
        tokens, n, w, w_step, out, out_step, row, slopes, less = arguments
        held, q = at.load(row), b.fneg(at.load(less))

        def step(t: Value) -> None:
            w_t, place = at.load(at.row(tokens, t, w, w_step)), at.row(tokens, t, out, out_step)
            dx = _fma(b, at.one_of(slopes, t), held, q)
            at.store(_fma(b, b.fadd(w_t, w_t), dx, at.load(place)), place)

        at.each(n, step)

    return types.void(like, *([types.int64] * 10)), _code(like, emit)


@primitive
def back_run(
    typing, like, d, tokens, n, w, w_step, dy, dy_step, out, out_step, sums, powers, kept,
    weights, slopes, factors, steps, gammas, row_step, dots, means,
):  # fmt: skip
    """Read the sums M of tokens once more, for the gradients in what these are made of.

    With ``r = 1 / (1 + slope · M)`` and ``u = w r dY`` write ``factor · r · dY`` to `out`, and ``Γ = step · u r`` to
    rows at `gammas`. Add Σ u to the token's number at `dots`, and ``Σ u (1 − r)`` to that at `means`.
    """

    def emit(at: _Stretch, *arguments: Value) -> None:
        b = at.b
        tokens, n, w, w_step, dy, dy_step, out, out_step, sums, powers, kept = arguments[:11]
        weights, slopes, factors, steps, gammas, row_step, dots, means = arguments[11:]

        def step(t: Value, add: Callable[[Value], Value]) -> None:
            w_t = at.load(at.row(tokens, t, w, w_step))
            moment = b.fmul(at.one_of(slopes, t), add(b.fmul(b.fmul(w_t, w_t), at.one_of(weights, t))))
            r = _reciprocal(at, b.fadd(at.constant(1.0), moment))
            part = b.fmul(r, at.load(at.row(tokens, t, dy, dy_step)))
            at.store(b.fmul(at.one_of(factors, t), part), at.row(tokens, t, out, out_step))
            u = b.fmul(w_t, part)
            ur = b.fmul(u, r)
            at.store(b.fmul(at.one_of(steps, t), ur), b.add(gammas, b.mul(t, row_step)))
            at.add_across(u, dots, t)
            at.add_across(b.fmul(ur, moment), means, t)

        at.summing(n, sums, powers, kept, step)

    return types.void(like, *([types.int64] * 20)), _code(like, emit)


@primitive
def past_run(
    typing, like, d, tokens, n, w, w_step, out, out_step, gammas, row_step, sums, powers, kept, weights, dots
):
    """From the last token to the first, add Γ to the sums P, ``2 weight · P · w`` to `out`, and ``Σ P x`` to dots."""

    def emit(at: _Stretch, *arguments: Value) -> None:
        b = at.b
        tokens, n, w, w_step, out, out_step, gammas, row_step, sums, powers, kept, weights, dots = arguments

        def step(t: Value, add: Callable[[Value], Value]) -> None:
            w_t, place = at.load(at.row(tokens, t, w, w_step)), at.row(tokens, t, out, out_step)
            Pw = b.fmul(add(at.load(b.add(gammas, b.mul(t, row_step)))), w_t)
            weight = at.one_of(weights, t)
            at.store(_fma(b, b.fadd(weight, weight), Pw, at.load(place)), place)
            at.add_across(b.fmul(Pw, w_t), dots, t)

        at.summing(n, sums, powers, kept, step, back=True)

    return types.void(like, *([types.int64] * 14)), _code(like, emit)


@primitive
def rest_run(typing, like, d, tokens, n, w, w_step, out, out_step, inverses, row_step, sums, powers, kept, slopes):
    """From the last token to the first, add ``2 w · (slope / A − Q)`` to `out`.

    ``slope · x / A²`` goes into the sums Q before, but for what is at `least`; 1/A is at `inverses`.
    """

    def emit(at: _Stretch, *arguments: Value) -> None:
        b = at.b
        tokens, n, w, w_step, out, out_step, inverses, row_step, sums, powers, kept, slopes = arguments

        def step(t: Value, add: Callable[[Value], Value]) -> None:
            w_t, place = at.load(at.row(tokens, t, w, w_step)), at.row(tokens, t, out, out_step)
            inverse = at.load(b.add(inverses, b.mul(t, row_step)))
            below = b.fcmp_ordered("<", inverse, at.constant(0.0))
            dx = b.fmul(at.one_of(slopes, t), b.select(below, b.fneg(inverse), inverse))
            own = b.fmul(dx, b.fmul(b.fmul(w_t, w_t), inverse))
            dx = b.fsub(dx, add(b.select(below, at.constant(0.0), own)))
            at.store(_fma(b, b.fadd(w_t, w_t), dx, at.load(place)), place)

        at.summing(n, sums, powers, kept, step, back=True)

    return types.void(like, *([types.int64] * 13)), _code(like, emit)


@primitive
def share_run(typing, like, heads, n, logits, row_step):
    """Replace rows of so many logits, one for each head, by their softmax over the heads."""
    size, scalar, vector = _vector_type(like)

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        heads, n, logits, row_step = arguments[1:]
        stop = b.mul(heads, row_step)

        def each_head(at: Value, start: Value, step: Callable[[Value, Value], Value]) -> Value:
            """Return what `step` makes of a vector, given the place of each row's part in turn."""
            held = cgutils.alloca_once_value(b, start)
            with cgutils.for_range_slice(b, at, b.add(at, stop), row_step) as (place, _):
                b.store(step(_pointer(b, place, scalar), b.load(held)), held)
            return b.load(held)

        with cgutils.for_range_slice(b, _int(0), b.mul(n, _int(size)), _int(size * vector.count)) as (column, _):
            at = b.add(logits, column)

            def larger(place: Value, top: Value) -> Value:
                value = _load(b, place, vector, size)
                return b.select(b.fcmp_ordered(">", value, top), value, top)

            def add(place: Value, total: Value) -> Value:
                value = _exp(b, b.fsub(_load(b, place, vector, size), top))
                _store(b, value, place, size)
                return b.fadd(total, value)

            def scale(place: Value, factor: Value) -> Value:
                _store(b, b.fmul(_load(b, place, vector, size), factor), place, size)
                return factor

            top = each_head(at, _load(b, _pointer(b, at, scalar), vector, size), larger)
            total = each_head(at, _constant(vector, 0.0), add)
            each_head(at, b.fdiv(_constant(vector, 1.0), total), scale)
        return context.get_dummy_value()

    return types.void(like, *([types.int64] * 4)), codegen
