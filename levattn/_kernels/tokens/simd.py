"""Vector code of token statistics attention: a run of tokens of one head, whose sums are in registers meanwhile.

A run is (d, address of the int64 numbers of its tokens, their count). The rows of an array are (address, step): the
row of a token is as many steps from the address as the token's number. Steps are in bytes. Rows of d channels are cut
into stretches of whole vectors, of half vectors, and so on. ``like`` is anything with the dtype to compute in.

Running sums are (address of d float64 numbers, powers, kept). The sum at a token is the rounded sum before its block
of GAIN_BLOCK tokens, plus the gain since then in the dtype. After the block, the gain is added in float64. Where sums
decay, `powers` holds the shares of a sum that are left 1, 2, ... tokens later, in the dtype. `kept` holds the shares
0, 1, ... tokens later, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from levattn._kernels.llvm import (
    I64,
    Builder,
    Value,
    Vectors,
    across,
    exponential,
    fma,
    halves,
    integer,
    load,
    pointer,
    prefetch,
    splat,
    store,
    vector_code,
    vector_type,
)

GAIN_BLOCK = 16  # tokens whose gain is summed apart

_AHEAD = 16  # tokens by which rows are prefetched
_MOST = 4  # vectors of the longest stretch
_DOUBLE = ir.DoubleType()


class _Stretch(Vectors):
    """Some channels of a run, as one vector: from the channel `first` on."""

    def __init__(self, b: Builder, like: Any, count: int, first: Value, tokens: Value, n: Value) -> None:
        super().__init__(b, like, count)
        self.whole = vector_type(like)[2].count
        self._first, self._tokens, self._n = first, tokens, n
        self._offset = b.mul(first, integer(self.size))

    def read(self, address: Value) -> Value:
        """Return the channels of a row."""
        return self.load(address, self._offset)

    def write(self, value: Value, address: Value) -> None:
        """Write the channels of a row."""
        self.store(value, address, self._offset)

    def place(self, rows: tuple[Value, Value], t: Value) -> Value:
        """Return the address of a token's row, and prefetch the row of a later token."""
        b, (address, step) = self.b, rows
        number = load(b, pointer(b, b.add(self._tokens, b.mul(t, integer(8))), I64), I64, 8)
        place = b.add(address, b.mul(number, step))
        later = b.add(b.add(place, b.mul(step, integer(_AHEAD))), self._offset)
        for line in range(0, self.count * self.size, 64):
            prefetch(b, b.add(later, integer(line)))
        return place

    def row(self, rows: tuple[Value, Value], t: Value) -> Value:
        """Return the channels of a token's row."""
        return self.read(self.place(rows, t))

    def _number(self, address: Value, t: Value) -> Value:
        return self.pointer(address, self.b.mul(t, integer(self.size)))

    def one_of(self, address: Value, t: Value) -> Value:
        """Return the number of a token, in all lanes."""
        return self.splat(load(self.b, self._number(address, t), self.scalar, self.size))

    def add_across(self, value: Value, address: Value, t: Value) -> None:
        """Add the sum of the lanes to the number of a token."""
        place = self._number(address, t)
        total = self.b.fadd(load(self.b, place, self.scalar, self.size), across(self.b, value, "sum"))
        store(self.b, total, place, self.size)

    @contextmanager
    def each_token(self) -> Iterator[Value]:
        """Go through the tokens."""
        with cgutils.for_range(self.b, self._n) as loop:
            yield loop.index

    @contextmanager
    def summing(
        self, sums: tuple[Value, Value, Value], *, back: bool = False
    ) -> Iterator[tuple[Value, Callable[[Value], Value]]]:
        """Go through the tokens, from the last one if `back`; yield each with a function that adds to its sums."""
        b, n, doubles = self.b, self._n, ir.VectorType(_DOUBLE, self.count)
        at, powers, kept = sums
        sums_at = pointer(b, b.add(at, b.mul(self._first, integer(8))), _DOUBLE)
        rates = self.number(powers)
        gain = cgutils.alloca_once(b, self.kind)
        last = b.sub(n, integer(1))
        with cgutils.for_range_slice(b, integer(0), n, integer(GAIN_BLOCK)) as (begin, _):
            held = load(b, sums_at, doubles, 8)
            base = held if self.size == 8 else b.fptrunc(held, self.kind)
            left = b.sub(n, begin)
            count = b.select(b.icmp_signed("<", left, integer(GAIN_BLOCK)), left, integer(GAIN_BLOCK))
            b.store(self.constant(0.0), gain)
            with cgutils.for_range(b, count) as loop:
                t = b.add(begin, loop.index)

                def add(term: Value, *, apart: bool = False) -> Value:
                    """Return the sum with the term, or the sum without it if `apart`."""
                    held = b.fmul(b.load(gain), rates) if apart else None
                    new = fma(b, b.load(gain), rates, term)
                    b.store(new, gain)
                    return fma(b, base, self.one_of(powers, loop.index), held if apart else new)

                yield (b.sub(last, t) if back else t), add
            gained = b.load(gain) if self.size == 8 else b.fpext(b.load(gain), doubles)
            factor = load(b, pointer(b, b.add(kept, b.mul(count, integer(8))), _DOUBLE), _DOUBLE, 8)
            store(b, fma(b, held, splat(b, factor, self.count), gained), sums_at, 8)


def _stretches(b: Builder, like: Any, d: Value, tokens: Value, n: Value) -> Iterator[_Stretch]:
    """Go through the stretches of d channels."""
    lanes = _MOST * vector_type(like)[2].count
    with cgutils.for_range_slice(b, integer(0), b.and_(d, integer(-lanes)), integer(lanes)) as (first, _):
        yield _Stretch(b, like, lanes, first, tokens, n)
    while lanes > 1:
        with b.if_then(b.icmp_unsigned("!=", b.and_(d, integer(lanes // 2)), integer(0))):
            yield _Stretch(b, like, lanes // 2, b.and_(d, integer(-lanes)), tokens, n)
        lanes //= 2


def _run_code(emit: Callable[..., None]) -> Callable[..., Any]:
    """Make an intrinsic ``(like, run, ...)`` of a function that writes its code for a stretch of channels."""

    @wraps(emit)
    def every(v: Vectors, like: Any, run: tuple[Value, Value, Value], *given: Value) -> None:
        for at in _stretches(v.b, like, *run):
            emit(at, like, run, *given)

    made: Callable[..., Any] = vector_code(numbers="least", literals="back")(every)
    return made


def _reciprocal(at: _Stretch, x: Value) -> Value:
    """Return 1/x for x of at least the smallest normal number, or NaN, to about one unit in the last place.

    Vectors are divided much slower than multiplied. So in float32, where all is below 2¹²⁵, a difference of bit
    patterns gives 1/x to 5 %. A step of third order improves this to 1e-4, and a Newton step to 1e-8.
    """
    b, one = at.b, at.constant(1.0)
    if at.size == 8:
        return b.fdiv(one, x)
    whole = ir.VectorType(ir.IntType(32), x.type.count)
    bits = b.bitcast(x, whole)
    largest = bits
    while largest.type.count > at.whole:  # NaN is above all
        low, high = halves(b, largest)
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
            e = fma(b, less, y, one)
            y = fma(b, y, fma(b, e, e, e), y)
            b.store(fma(b, y, fma(b, less, y, one), y), result)
    return b.load(result)


@_run_code
def score_run(at, like, run, back, w, sums, least, scores, inverses):
    """Add ``Σ x / max(A, least)`` of each token to its score, where x = w² goes into the sums A before.

    If `back`, ``1 / max(A, least)`` goes to the rows `inverses`, two for each token of the run. It is negative where
    `least` takes the place of A. The second row has ``1 − x / A``, or 1 there: the part of A that came before.
    """
    b, lowest, (address, step) = at.b, at.splat(least), inverses
    with at.summing(sums) as (t, add):
        w_t = at.row(w, t)
        x = b.fmul(w_t, w_t)
        before = add(x, apart=True) if back else None
        A = b.fadd(before, x) if back else add(x)
        below = b.fcmp_ordered(">", lowest, A)
        inverse = _reciprocal(at, b.select(below, lowest, A))
        at.add_across(b.fmul(x, inverse), scores, t)
        if back:
            place = b.add(address, b.mul(t, step))
            at.write(b.select(below, b.fneg(inverse), inverse), place)
            earlier = b.select(below, at.constant(1.0), b.fmul(before, inverse))
            at.write(earlier, b.add(place, b.sdiv(step, integer(2))))


@_run_code
def read_run(at, like, run, w, y, sums, weights, slopes, factors):
    """Write ``factor · w / (1 + slope · M)`` of each token, where ``weight · x`` goes into the sums M before."""
    b = at.b
    with at.summing(sums) as (t, add):
        w_t = at.row(w, t)
        M = add(b.fmul(b.fmul(w_t, w_t), at.one_of(weights, t)))
        r = _reciprocal(at, fma(b, at.one_of(slopes, t), M, at.constant(1.0)))
        at.write(b.fmul(b.fmul(at.one_of(factors, t), w_t), r), at.place(y, t))


@_run_code
def gather_run(at, like, run, x, z, sums, weights):
    """Add ``weight · x z`` of the tokens to the sums, channel by channel."""
    b = at.b
    with at.summing(sums) as (t, add):
        add(b.fmul(b.fmul(at.row(x, t), at.row(z, t)), at.one_of(weights, t)))


@_run_code
def dot_run(at, like, run, x, z, row, scores):
    """Add ``Σ x z · row`` over the channels of each token to its score."""
    b, held = at.b, at.read(row)
    with at.each_token() as t:
        at.add_across(b.fmul(b.fmul(at.row(x, t), at.row(z, t)), held), scores, t)


@_run_code
def spread_run(at, like, run, w, y, row, factors):
    """Write ``factor · w · row`` of each token."""
    b, held = at.b, at.read(row)
    with at.each_token() as t:
        at.write(b.fmul(b.fmul(at.one_of(factors, t), at.row(w, t)), held), at.place(y, t))


@_run_code
def output_gradients(at, like, run, w, dy, out, row, factors, other, weights):
    """Write ``factor · dY · row + 2 weight · w · other``."""
    b, r, p = at.b, at.read(row), at.read(other)
    p = b.fadd(p, p)
    with at.each_token() as t:
        own = b.fmul(b.fmul(at.one_of(factors, t), at.row(dy, t)), r)
        w_t = b.fmul(at.one_of(weights, t), at.row(w, t))
        at.write(fma(b, w_t, p, own), at.place(out, t))


@_run_code
def score_gradients(at, like, run, w, out, row, slopes, less):
    """Add ``2 w · (slope · row − less)`` to `out`."""
    b, held, q = at.b, at.read(row), at.b.fneg(at.read(less))
    with at.each_token() as t:
        w_t, place = at.row(w, t), at.place(out, t)
        half = fma(b, at.one_of(slopes, t), b.fmul(w_t, held), b.fmul(w_t, q))
        at.write(fma(b, at.constant(2.0), half, at.read(place)), place)


@_run_code
def causal_output_gradients(at, like, run, w, dy, out, sums, weights, slopes, factors, steps, gammas, dots, means):
    """Read the sums M of tokens once more, for the gradients in their terms.

    With ``r = 1 / (1 + slope · M)`` and ``u = w r dY``, write ``factor · r · dY`` to `out`, and ``Γ = step · u r`` to
    the rows `gammas`, one for each token of the run. Add Σ u to the token's number at `dots`, and ``Σ u (1 − r)`` to
    its number at `means`.
    """
    b, (address, row_step) = at.b, gammas
    with at.summing(sums) as (t, add):
        w_t = at.row(w, t)
        moment = b.fmul(at.one_of(slopes, t), add(b.fmul(b.fmul(w_t, w_t), at.one_of(weights, t))))
        r = _reciprocal(at, b.fadd(at.constant(1.0), moment))
        part = b.fmul(r, at.row(dy, t))
        at.write(b.fmul(at.one_of(factors, t), part), at.place(out, t))
        u = b.fmul(w_t, part)
        ur = b.fmul(u, r)
        at.write(b.fmul(at.one_of(steps, t), ur), b.add(address, b.mul(t, row_step)))
        at.add_across(u, dots, t)
        at.add_across(b.fmul(ur, moment), means, t)


@_run_code
def sum_gradients(at, like, run, w, out, gammas, sums, weights, dots):
    """From the last token to the first, add Γ to the sums P, ``2 weight · P · w`` to `out`, and ``Σ P x`` to dots."""
    b, (address, row_step) = at.b, gammas
    with at.summing(sums, back=True) as (t, add):
        w_t, place = at.row(w, t), at.place(out, t)
        Pw = b.fmul(add(at.read(b.add(address, b.mul(t, row_step)))), w_t)
        weight = at.one_of(weights, t)
        at.write(fma(b, b.fadd(weight, weight), Pw, at.read(place)), place)
        at.add_across(b.fmul(Pw, w_t), dots, t)


@_run_code
def causal_score_gradients(at, like, run, w, out, inverses, sums, slopes):
    """From the last token to the first, add ``2 w · (slope / A · (1 − x / A) − Q)`` to `out`.

    Q sums ``slope · x / A²`` of the later tokens, except where `least` replaces A. 1/A and 1 − x/A are in the rows
    `inverses`. Where a token is most of A, a difference formed here would have few digits.
    """
    b, (address, row_step) = at.b, inverses
    with at.summing(sums, back=True) as (t, add):
        w_t, place, row = at.row(w, t), at.place(out, t), b.add(address, b.mul(t, row_step))
        inverse, earlier = at.read(row), at.read(b.add(row, b.sdiv(row_step, integer(2))))
        below = b.fcmp_ordered("<", inverse, at.constant(0.0))
        part = b.fmul(w_t, b.select(below, b.fneg(inverse), inverse))  # 0 for w = 0, also beside the largest 1/A
        dx = b.fmul(at.one_of(slopes, t), part)
        later = add(b.select(below, at.constant(0.0), b.fmul(dx, part)), apart=True)
        half = fma(b, b.fneg(w_t), later, b.fmul(dx, earlier))
        at.write(fma(b, at.constant(2.0), half, at.read(place)), place)


@vector_code()
def share_run(v, like, heads, n, logits, row_step):
    """Replace rows of so many logits, one for each head, by their softmax over the heads."""
    b, stop = v.b, v.b.mul(heads, row_step)
    with cgutils.for_range_slice(b, integer(0), b.mul(n, integer(v.size)), integer(v.size * v.count)) as (column, _):
        first = b.add(logits, column)

        def each_head(start: Value, step: Callable[[Value, Value], Value], first: Value = first) -> Value:
            """Return the vector after `step` for each head, which gets the address of the head's part of its row."""
            held = cgutils.alloca_once_value(b, start)
            with cgutils.for_range_slice(b, first, b.add(first, stop), row_step) as (place, _):
                b.store(step(place, b.load(held)), held)
            return b.load(held)

        def larger(place: Value, top: Value) -> Value:
            value = v.load(place)
            return b.select(b.fcmp_ordered(">", value, top), value, top)

        def add(place: Value, total: Value) -> Value:
            value = exponential(b, b.fsub(v.load(place), top))
            v.store(value, place)
            return b.fadd(total, value)

        def scale(place: Value, factor: Value) -> Value:
            v.store(b.fmul(v.load(place), factor), place)
            return factor

        top = each_head(v.load(first), larger)
        total = each_head(v.constant(0.0), add)
        each_head(b.fdiv(v.constant(1.0), total), scale)
