"""The attention of sample queries, in blocks: never a matrix of all queries and keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices, take_rows, to_float64
from levattn._core.checks import TIE
from levattn._core.types import Flags, Float64, Int64
from levattn._kernels import PRECISE
from levattn.exceptions import NonFiniteError
from levattn.functions import L1L2, AttentionFunction, Fair, Huber, Power, Softmax, Tukey, scale_of
from levattn.linalg.accumulator import UNIT
from levattn.linalg.span import zero_products

BLOCK_ENTRIES = 1 << 19  # numbers in a block of products of queries and keys, or of keys
_NOTHING = 2.0**-104  # relative rounding of twice the precision
LEAST_POSITIVE = 2.0**-1074  # of float64
_COARSE = np.ldexp(1.0, np.arange(4, 60, 4))  # ratios of a product to its error
_FINE = 2.0 ** np.arange(0, 4, 0.5)
_SHARE = 1e-12  # relative change of a sum from all products that are far larger than their error
# For each function its largest slope T, in units of its parameter, and a bound of T/√f(T)
_SLOPES = {Huber: (1.0, 1.4143), Tukey: (0.2863, 1.4743), Fair: (1.0, 1.8054), L1L2: (1.4143, 1.5539)}


def product_noise(size: Any, d: int) -> Any:
    """Return the largest error of float64 products of d terms, for ``size = Σ |q_i||k_i|``."""
    return (d + 2) * UNIT * size + 2 * d * LEAST_POSITIVE


def certain_products(Q: Float64, K: Float64, *, zeros: bool = True) -> tuple[Float64, Float64]:
    """Return ⟨q, k⟩ as in twice the precision, and the largest error of each; with `zeros` a 0 is exact."""
    d = Q.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):
        Z, size = PRECISE.precise_products(Q, K), np.abs(Q) @ np.abs(K).T
        noise = _NOTHING * d**2 * size + 4 * d * LEAST_POSITIVE
        if zeros:
            doubtful = np.nonzero(np.abs(Z) <= noise)
            if len(doubtful[0]):
                nothing = zero_products(Q, K, doubtful)
                Z, noise = np.where(nothing, 0.0, Z), np.where(nothing, 0.0, noise)
        noise += 2 * UNIT * np.abs(Z)
    return Z, noise


def evaluation_error(f: AttentionFunction | Softmax, D: Float64, epsilon: float) -> Any:
    """Return the relative error that evaluating f adds to shares of at least ε, and to the sum.

    A function of the user is assumed to be right to a few units of rounding times its growth. For softmax D holds
    logarithms, which have an error of their own.
    """
    if isinstance(f, Softmax):
        return UNIT * (3 * np.abs(np.where(np.isneginf(D), 0.0, D)) - math.log(epsilon) + 16)
    if isinstance(f, Fair):  # u − log(1 + u) loses digits down to u = 1e-3, where the series begins
        return 8192 * UNIT
    return 8 * UNIT * (f.growth + 1)


def _floor(f: AttentionFunction | Softmax) -> float:
    """Return the largest part of a value of f that may be lost to underflow."""
    if isinstance(f, Softmax):
        return 0.0
    return 32 * LEAST_POSITIVE * max(1.0, scale_of(f) ** 2, float(f(np.ones(1))[0]))


def is_bounded_by_sums(f: AttentionFunction | Softmax) -> bool:
    """Tell whether `mild_changes` bounds the change of a sum from the rounding of the products."""
    return isinstance(f, Softmax) or type(f) in _SLOPES or (isinstance(f, Power) and f.p >= 1)


def mild_changes(f: AttentionFunction | Softmax, D: Float64, count: float, noise: Float64) -> Float64:
    """Bound ``Σ |f(z') − f(z)| / Σ f(z)`` over `count` products where ``|z' − z| ≤ noise``, from the sums D alone.

    For functions of which too little is known, it bounds only the part that `sums` leaves out. For powers p of at
    least 1 it follows from the inequalities of Minkowski and Hölder. The slopes of the other functions are at most
    min(x, T) for a T. Its square is at most f(x) T²/f(T), because f(x)/x² does not grow.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if isinstance(f, Softmax):
            return np.asarray(np.expm1(noise))
        if isinstance(f, Power) and f.p >= 1:
            root = noise * (count / D) ** (1 / f.p)
            change = f.p * root * (1 + root) ** (f.p - 1)
        elif type(f) in _SLOPES:
            slope, ratio = _SLOPES[type(f)]
            T = slope * float(getattr(f, "delta", getattr(f, "c", 1.0)))
            curved = noise * (noise / D) * count + ratio * noise * np.sqrt(count / D)
            change = np.minimum(noise * (T / D) * count, curved)
        else:
            change = np.zeros(len(D))
        change = change + count * (_floor(f) / D)
        return np.where(change >= 0, change, np.inf)


def mild_entry_change(f: AttentionFunction | Softmax, D: Float64, epsilon: float, noise: Float64) -> Float64:
    """Bound the relative change of every f(z) of at least 0.995 εD, where the error of z is at most `noise`.

    Such a z is larger than any t with f(t) below that. So the growth p of f bounds the change by 1 − (1 − noise/t)^p.
    The search for the largest t tries multiples of the noise, with some twenty values of f for each query.
    """
    if isinstance(f, Softmax):
        return np.asarray(np.expm1(noise))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        least = 0.99 * epsilon * D[:, None]
        known = _last(np.asarray(f(noise[:, None] * _COARSE)) < least, _COARSE)
        ladder = known[:, None] * _FINE
        times = known * _last(np.asarray(f(noise[:, None] * ladder)) < least, _FINE)
        return np.where(known > 0, -np.expm1(f.growth * np.log1p(-1.1 / np.maximum(times, 2.0))), np.inf)


def _last(below: npt.NDArray[np.bool_], steps: Float64) -> Float64:
    """Return for each row the last step up to which all are below, or 0."""
    count = np.count_nonzero(np.logical_and.accumulate(below, axis=1), axis=1)
    return np.where(count > 0, steps[np.maximum(count - 1, 0)], 0.0)


def entry_change(
    Q: Float64, selected: Float64, f: AttentionFunction | Softmax, D: Float64, epsilon: float, *, precise: bool
) -> Float64:
    """Return the largest relative change of any f(z) of at least about εD among these keys, by the error of each z."""
    out = np.zeros(len(Q))
    step = _step(Q)
    for start in range(0, len(selected), step):
        rows = selected[start : start + step]
        Z, noise = _products(Q, rows, f, precise=precise)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            if isinstance(f, Softmax):
                heavy, change = Z + noise - D[:, None] >= math.log(epsilon / 2), np.expm1(noise)
            else:
                high, low = _high_and_low(f, Z, noise)
                heavy = (high >= 0.5 * epsilon * D[:, None]) & (high > 0)
                change = np.where(heavy, (high - low) / high, 0.0)
            change = np.where(heavy, np.where(change >= 0, change, np.inf), 0.0)
        out = np.fmax(out, np.max(change, axis=1, initial=0.0))
    return out


def _products(Q: Float64, rows: Float64, f: AttentionFunction | Softmax, *, precise: bool) -> tuple[Float64, Float64]:
    """Return ⟨q, k⟩, in float64 or as in twice the precision, and the error of each."""
    if precise:
        return certain_products(Q, rows, zeros=not isinstance(f, Softmax))
    with np.errstate(over="ignore", invalid="ignore"):
        return Q @ rows.T, product_noise(np.abs(Q) @ np.abs(rows).T, Q.shape[1])


def _high_and_low(f: AttentionFunction, Z: Float64, noise: Float64) -> tuple[Float64, Float64]:
    size = np.abs(Z)
    return f(size + noise), f(np.maximum(size - noise, 0.0))


def sums(
    Q: Float64, keys: Matrices, present: npt.NDArray[np.bool_], f: AttentionFunction | Softmax
) -> tuple[Float64, Float64, Float64 | float]:
    """Return Σ f(⟨q, k⟩) over all keys for each query, or its logarithm for softmax, from products in float64.

    Also return the largest entries of the keys, (d,), and a relative error. It covers the addition and, for functions
    that `mild_changes` does not bound, the products. Few products are so small that their terms are examined one by
    one.
    """
    total, top, change = np.zeros(len(Q)), np.full(len(Q), -np.inf), np.zeros(len(Q))
    largest, parts, known = np.zeros(keys.d), 0, is_bounded_by_sums(f)
    for rows in key_blocks(keys, present, Q):
        with np.errstate(over="ignore", invalid="ignore"):
            Z = Q @ rows.T
        if not np.isfinite(Z).all():
            _refuse_overflow(rows, f)
        here = np.max(np.abs(rows), axis=0)
        largest, parts = np.maximum(largest, here), parts + 1
        with np.errstate(over="ignore", invalid="ignore"):
            if isinstance(f, Softmax):
                before, top = top, np.maximum(Z.max(axis=1), top)
                total = total * np.exp(before - top) + np.exp(Z - top[:, None]).sum(axis=1)
                continue
            total += f(Z).sum(axis=1)
            if not known:
                change += small_changes(f, np.abs(Z), product_noise(np.abs(Q) @ here, keys.d))
    error = np.zeros(len(Q))
    if not known:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            error = change / total + _SHARE
    return _result(total, top, Q, f), largest, np.where(error >= 0, error, np.inf) + (parts + 32) * UNIT


def small_changes(f: AttentionFunction, size: Float64, noise: Float64, share: float = _SHARE) -> Float64:
    """Bound how much errors of `noise`, (m,), in z change ``Σ f(|z|)``, up to a `share` of the sum."""
    few = np.flatnonzero(size < (noise * max(16.0, 1.2 * f.growth / share))[:, None])
    at = few // size.shape[1]
    high, low = _high_and_low(f, size.ravel()[few], noise[at])
    return np.asarray(np.bincount(at, high - low, len(size)), np.float64)


def uncertain_sums(
    Q: Float64, keys: Matrices, present: npt.NDArray[np.bool_], f: AttentionFunction | Softmax, *, precise: bool
) -> tuple[Float64, Float64, float]:
    """Return the sums of `sums`, and a bound of ``Σ |f(z') − f(z)|`` in units of them; z' are the true products.

    The bound takes f at both ends of the interval in which each product lies. Products are in float64 or, if
    `precise`, as in twice the precision, with exact zeros.
    """
    total, top, change = np.zeros(len(Q)), np.full(len(Q), -np.inf), np.zeros(len(Q))
    parts = 0
    for rows in key_blocks(keys, present, Q):
        Z, noise = _products(Q, rows, f, precise=precise)
        if not np.isfinite(Z).all():
            _refuse_overflow(rows, f)
        parts += 1
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if isinstance(f, Softmax):
                before, top = top, np.maximum(Z.max(axis=1), top)
                apart = Z - top[:, None]
                total = total * np.exp(before - top) + np.exp(apart).sum(axis=1)
                # e^z (e^δ − 1), without the cancellation where δ is tiny, nor 0 times infinity where it is large
                grown = np.where(noise < 1, np.exp(apart) * np.expm1(np.minimum(noise, 1.0)), np.exp(apart + noise))
                change = change * np.exp(before - top) + grown.sum(axis=1)
            else:
                high, low = _high_and_low(f, Z, noise)
                total += f(Z).sum(axis=1)
                possible = np.count_nonzero(np.abs(Z) + noise, axis=1)
                change += (high - low).sum(axis=1) + _floor(f) * possible
    D = _result(total, top, Q, f)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        share = np.where(change == 0, 0.0, change / total)
    return D, np.where(share >= 0, share, np.inf), (parts + 32) * UNIT


def _step(Q: Float64) -> int:
    """Return the number of keys in a block for these queries."""
    return int(max(16, BLOCK_ENTRIES // max(Q.shape)))


def key_blocks(keys: Matrices, present: npt.NDArray[np.bool_], Q: Float64) -> Iterator[Float64]:
    """Yield the keys in float64, in blocks for these queries."""
    step = _step(Q)
    for start in range(0, keys.n, step):
        part = slice(start, min(start + step, keys.n))
        rows = to_float64(keys.data[:, part, :], keys.format)[0][present[part]]
        if len(rows):
            yield rows


def _result(total: Float64, top: Float64, Q: Float64, f: AttentionFunction | Softmax) -> Float64:
    if isinstance(f, Softmax):
        with np.errstate(divide="ignore"):
            return np.asarray(top + np.log(total))
    if np.isinf(total).any():
        _refuse_overflow(Q, f)
    return total


def _refuse_overflow(rows: Float64, f: AttentionFunction | Softmax) -> NoReturn:
    """Raise for keys that are not finite, or products that are not."""
    if not np.isfinite(rows).all():
        raise NonFiniteError("K holds NaN or infinity; expected finite keys, the same as in the set")
    raise ValueError(
        f"Q and K have products that leave the range of float64 for f = {f!r}; expected smaller ones. Scale Q down"
    )


_NEAR_SQUARES = (Huber, Tukey, L1L2, Fair)  # x²/2 near 0; a common factor of x and the parameter changes no share
_QUERIES, _FEW = 256, 16  # queries of a block, and the fewest of a block with all keys
_SURE = TIE / 2  # relative error of shares that changes no answer
_TAME = 500  # largest power of two in the columns of keys that meet queries as they are
_LEAST_SUM = 2.0**-900  # of powers: terms of a smaller sum may have vanished
_LEAST_PARAMETER = 2.0**-300  # of a function near x²/2: if a sum of it is below `_LEAST_SUM`, so are its arguments
_FAINT = 2.0**-1020  # of the largest product of a query: smaller ones may have vanished
_STEEP = 900  # power from which on no power of two brings a sum into range


def share_blocks(
    Q: Float64,
    keys: Matrices,
    present: Flags,
    f: AttentionFunction | Softmax,
    order: Int64 | None = None,
    elsewhere: Float64 | None = None,
    *,
    level: float = 1.0,
    together: bool = True,
    safe: bool = False,
) -> Iterator[tuple[slice | Int64, Int64, Float64, Float64]]:
    """Yield blocks of the attention of queries (m, d): the queries, the keys, their scores, and errors of the queries.

    The keys are one matrix, (1, n, d), and come in the given order, or ascending; absent keys have no scores. A query
    that gives f = 0 to all keys attends to none. For powers the products are scaled to at most 1. Where values of
    functions near x²/2 vanish, x² counts in their place. For softmax, `elsewhere` (m,) holds the logarithms of the
    sums of each query over other keys.

    Products are in float64. Their rounding may change a score of at least `level`, or scores that reach it `together`,
    by more than `_SURE`, relative. Then they are computed as in twice the precision. The error is 0 unless such scores
    remain uncertain: then it bounds their relative error, and is infinite if nothing is known. If `safe`, there are
    bounds in place of shares below the rounding, and of powers below 1 whose products may vanish.
    """
    all_keys = np.flatnonzero(present)
    order = all_keys if order is None else order[present[order]]
    step, width = min(_QUERIES, BLOCK_ENTRIES // max(len(all_keys), 1)), max(len(all_keys), 1)
    whole = step >= _FEW  # few keys: one read, and no separate pass for the sum
    if not whole:
        step, width = _QUERIES, max(1, BLOCK_ENTRIES // max(_QUERIES, Q.shape[1]))
    rows, complete = _read(keys, order) if whole else None, len(order) == len(all_keys)
    given, asked, lost = keys, Q, np.zeros(len(Q), np.bool_)
    largest, faint = _sizes(Q, keys, all_keys, width, rows if complete else None, f if safe else None)
    if isinstance(f, Power):
        Q, keys, largest, lost = _tamed(Q, keys, present, largest, f.p)
        rows = rows if rows is None or keys is given else _read(keys, order)
    Q, f = _of_larger_parameter(Q, f, largest)
    alone, later = rows if elsewhere is None and complete else None, list[Int64]()
    attention = _Attention(keys, present, f, largest, level, together)
    for first in range(0, len(Q), step):
        part: slice | Int64 = slice(first, min(first + step, len(Q)))
        mine, noise, rest = Q[part], attention.noise(Q[part]), None if elsewhere is None else elsewhere[part]
        D, A, error = attention.in_float64(mine, noise, alone, rest)
        vanished = attention.vanished(mine, D)
        if len(vanished) and not isinstance(f, Power):
            later.append(first + vanished)
            left = np.delete(np.arange(len(mine)), vanished)
            part, (mine, noise, D, error) = first + left, (x[left] for x in (mine, noise, D, error))
            A = A if A is None else A[left]
        elif len(vanished):
            mine, noise = attention.raised(mine, vanished)
            D, A, error = attention.in_float64(mine, noise, alone, rest)
        doubtful = np.flatnonzero(~(error <= _SURE))
        error = np.zeros(len(mine))
        if len(doubtful):
            D[doubtful], few = attention.precisely(mine[doubtful], None if rest is None else rest[doubtful])
            error[doubtful] = np.where(few <= _SURE, 0.0, np.where(lost[part][doubtful], np.inf, few))
        error[lost[part] & (D == 0)] = np.inf  # products that vanished may be all that there are
        for start in range(0, len(order), width):
            places = order[start : start + width]
            read = _read(keys, places) if rows is None else rows
            if A is None or start:
                A = attention.shares(mine, noise, read, D)[0]
            if len(doubtful):
                A[doubtful] = _shares(attention.precise_products(mine[doubtful], read), D[doubtful], f)[0]
            if safe and not isinstance(f, Softmax) and not attention.steep:
                A = attention.above_rounding(A, mine, noise, read, D)
            if faint.any():
                A = _above_zero(A, faint[part], asked[part], _read(given, places), f)
            yield part, places, A, error
    for again in later:
        yield from _of_tiny_sums(Q, again, keys, present, f, order, largest, level=level, together=together, safe=safe)


def _of_tiny_sums(
    Q: Float64, some: Int64, keys: Matrices, present: Flags, f: Any, order: Int64, largest: Float64, **options: Any
) -> Iterator[tuple[slice | Int64, Int64, Float64, Float64]]:
    """Yield the blocks of queries whose values of f vanish."""
    g = _of_tiny_products(f, Q[some], largest)
    for part, places, A, error in share_blocks(Q[some], keys, present, g, order, **options):
        yield some[part], places, A, error


def _sizes(
    Q: Float64, keys: Matrices, places: Int64, width: int, read: Float64 | None, f: Any
) -> tuple[Float64, Flags]:
    """Return the largest size of the entries of each column, and which queries have products that may vanish.

    These are looked for only if f is a power below 1. `read`: the keys, if they are at hand.
    """
    largest, least, below = np.zeros(keys.d), np.full(keys.d, np.inf), isinstance(f, Power) and f.p < 1
    for start in range(0, len(places), width):
        some = np.abs(_read(keys, places[start : start + width]) if read is None else read)
        largest = np.maximum(largest, some.max(axis=0))
        if below:
            least = np.minimum(least, np.min(some, axis=0, initial=np.inf, where=some > 0))
    return largest, _faint(Q, largest, least) if below else np.zeros(len(Q), np.bool_)


def _faint(Q: Float64, largest: Float64, least: Float64) -> Flags:
    """Tell which queries have products that may vanish beside their largest; least: entries, or inf."""
    exponents = [np.frexp(np.where((x > 0) & np.isfinite(x), x, 1.0))[1] for x in (np.abs(Q), largest, least)]
    there = (Q != 0) & (largest > 0)
    high = np.where(there, exponents[0] + exponents[1], -(2**20)).max(axis=1, initial=-(2**20))
    low = np.where(there, exponents[0] + exponents[2], 2**20).min(axis=1, initial=2**20)
    return np.asarray(low - high < np.log2(_FAINT))


def _above_zero(A: Float64, faint: Flags, Q: Float64, rows: Float64, f: Any) -> Float64:
    """Return shares of a power below 1, with a bound in place of shares that may have vanished."""
    bound = _FAINT**f.p  # of products that are subnormal beside a largest of about 1, or 0
    meets = np.zeros(A.shape, np.bool_)
    meets[faint] = _meet(Q[faint], rows)
    return np.where(meets & (bound > A), bound, A)


def _meet(Q: Float64, rows: Float64) -> Flags:
    """Tell which queries and keys have a column in which neither is 0: all other products are exactly 0."""
    return np.asarray((Q != 0).astype(np.float32) @ (rows != 0).astype(np.float32).T > 0)


def _parameter(f: Any) -> float:
    """Return the number by which a function near x²/2 divides its argument."""
    return float(getattr(f, "delta", getattr(f, "c", 1.0)))


def _of_tiny_products(f: Any, Q: Float64, largest: Float64) -> Any:
    """Return the function of products whose values under f vanish: x², or f if its parameter is to be larger first."""
    if _parameter(f) >= _LEAST_PARAMETER:
        return Power(2)
    if np.max(np.abs(Q) @ largest) > 2.0**800:  # no factor brings both into range
        raise ValueError(f"f is {f!r}, whose parameter is too small for these products; expected a larger one")
    return f


def _of_larger_parameter(Q: Float64, f: Any, largest: Float64) -> tuple[Float64, Any]:
    """Return queries and a function with the same shares, whose parameter is not tiny if products allow it."""
    parameter = _parameter(f)
    if not isinstance(f, (Huber, Tukey, Fair)) or parameter >= _LEAST_PARAMETER:
        return Q, f
    with np.errstate(over="ignore"):
        bound = float(np.max(np.abs(Q) @ largest, initial=0.0))
    power = min(-math.frexp(parameter)[1], 900 - math.frexp(bound)[1])
    if not (power > 0 and math.isfinite(bound)):
        return Q, f
    return np.ldexp(Q, power), type(f)(math.ldexp(parameter, power))


def _read(keys: Matrices, places: Int64) -> Float64:
    return np.asarray(to_float64(take_rows(keys.data, places), keys.format)[0])


def _tamed(
    Q: Float64, keys: Matrices, present: Flags, largest: Float64, p: float
) -> tuple[Float64, Matrices, Float64, Flags]:
    """Return each query times a power of two, which brings the bound of its products to about 1, or less for large p.

    Columns of very large or very small keys are scaled as well. Also return the largest entries of the columns, and
    flags of the queries that lost digits.
    """
    there = largest > 0
    exponents = np.where(there, np.frexp(largest)[1], 0)
    fraction, own = np.frexp(np.where(there, Q, 0.0))
    powers = np.where(fraction != 0, own + exponents, -(2**20))
    lost_key = False
    if np.abs(exponents).max(initial=0) > _TAME:
        values = np.where(present[:, None], to_float64(keys.data, keys.format), 0.0)
        even = np.ldexp(values, -exponents)
        lost_key = bool(((values != 0) & (np.abs(even) < 2.0**-1022)).any())
        keys, largest, own = replace(keys, data=even, format="float64"), np.ldexp(largest, -exponents), powers
    most = int(min(1000 / p, 1000))  # else the sum of powers may overflow
    room = min(0, most - int(np.ceil(np.log2(max(Q.shape[1], 1)))))
    Q = np.ldexp(fraction, own - powers.max(axis=1, keepdims=True, initial=-(2**20)) + room)
    return Q, keys, largest, ((fraction != 0) & (np.abs(Q) < 2.0**-1022)).any(axis=1) | lost_key


@dataclass(frozen=True)
class _Attention:
    """The scores of queries among the keys: sums, shares and errors of a few queries at a time."""

    keys: Matrices
    present: Flags
    f: AttentionFunction | Softmax
    largest: Float64  # entries of the columns, (d,)
    level: float
    together: bool

    @property
    def steep(self) -> bool:
        """Whether f is a power that brings no sum into range unless its queries are rounded."""
        return isinstance(self.f, Power) and self.f.p > _STEEP

    def noise(self, Q: Float64) -> Float64:
        """Return the largest error of a product in float64, for each query; finite only if all products are."""
        with np.errstate(over="ignore"):
            return np.asarray(product_noise(np.abs(Q) @ self.largest, Q.shape[1]))

    def in_float64(
        self, Q: Float64, noise: Float64, alone: Float64 | None, elsewhere: Float64 | None
    ) -> tuple[Float64, Float64 | None, Float64]:
        """Return the sums of queries, for softmax their logarithms, and errors; with all keys `alone` also shares."""
        A, n = None, self.keys.n
        if alone is None:
            D, _, change = sums(Q, self.keys, self.present, self.f)
            D = D if elsewhere is None else np.logaddexp(D, elsewhere)
        else:
            A, D, change = self.shares(Q, noise, alone, None)
        # the bounds depend on the number of terms over their sum: of all keys, and of scores that reach the level
        with np.errstate(over="ignore"):
            error = 2 * mild_changes(self.f, D, max(n, (n if self.together else 1) / self.level), noise)
            if not is_bounded_by_sums(self.f):
                entries = change / self.level if self.together else mild_entry_change(self.f, D, self.level, noise)
                error = error + change + entries
        return D, A, error

    def shares(
        self, Q: Float64, noise: Float64, rows: Float64, D: Float64 | None
    ) -> tuple[Float64, Float64, Float64 | float]:
        """Return scores, sums, and the relative error of sums found here, as far as these do not show it."""
        f, change = self.f, None
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            Z = Q @ rows.T
            finite = bool(np.isfinite(noise).all() or np.isfinite(Z).all())
            if D is None and finite and not is_bounded_by_sums(f):
                change = small_changes(cast(AttentionFunction, f), np.abs(Z, out=Z), noise, _SURE / 8)
            A, D = _shares(Z, D, f)
            if not (finite and (np.isfinite(D) | isinstance(f, Softmax)).all()):
                sums(Q, self.keys, self.present, f)  # raises with the cause
            return A, D, 0.0 if change is None else change / D + _SURE / 8

    def vanished(self, Q: Float64, D: Float64) -> Int64:
        """Return the queries whose values of f are so small that some may be lost, if they are known otherwise."""
        if not isinstance(self.f, (Power, *_NEAR_SQUARES)):
            return np.zeros(0, np.int64)
        least = _LEAST_SUM * max(1.0, scale_of(self.f) ** 2)
        few = ~(least <= D) if isinstance(self.f, Power) else least > D
        if not few.any():
            return np.zeros(0, np.int64)
        few &= np.any((Q != 0) & (self.largest > 0), axis=1)
        if not isinstance(self.f, Power):  # a sum is also small where large products cancelled
            with np.errstate(over="ignore", invalid="ignore"):  # the noise may be infinite
                hidden = np.flatnonzero(few & ~(self.keys.n * self.f(self.noise(Q)) < least))
            if len(hidden):
                few[hidden] = least > uncertain_sums(Q[hidden], self.keys, self.present, self.f, precise=True)[0]
        return np.flatnonzero(few)

    def above_rounding(self, A: Float64, Q: Float64, noise: Float64, rows: Float64, D: Float64) -> Float64:
        """Return shares, with bounds for the queries whose largest share here may err by `_SURE` or underflow.

        An exact product of 0 has the share 0. All others have at least the least positive number.
        """
        f, lost = cast(AttentionFunction, self.f), _floor(self.f)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            felt = f(noise * max(f.growth, 1.0) / _SURE) + lost / _SURE
            hides = ~(A.max(axis=1, initial=0.0) > felt / D + LEAST_POSITIVE / _SURE)
            hidden = np.flatnonzero(hides & (D > 0))
            hidden = hidden[_meet(Q[hidden], rows).any(axis=1)]  # the others have exact zeros alone
            if len(hidden):
                Z, error = certain_products(Q[hidden], rows)
                size = np.abs(Z) + error
                bound = np.minimum((f(size) + lost) / D[hidden, None] + LEAST_POSITIVE, 1.0)
                A[hidden] = np.fmax(A[hidden], np.where(size > 0, bound, 0.0))
        return A

    def raised(self, Q: Float64, which: Int64) -> tuple[Float64, Float64]:
        """Return queries of which some are scaled to a largest product of about 1, and their noise."""
        some, out = Q[which], Q.copy()
        top = np.zeros(len(some))
        for rows in key_blocks(self.keys, self.present, some):
            top = np.maximum(top, np.abs(certain_products(some, rows)[0]).max(axis=1))
        if self.steep:
            out[which] = some / np.where(top > 0, top, 1.0)[:, None]
        else:
            out[which] = np.ldexp(some, np.minimum(np.where(top > 0, -np.frexp(top)[1], 0), _TAME)[:, None])
        return out, self.noise(out)

    def precisely(self, Q: Float64, elsewhere: Float64 | None) -> tuple[Float64, Float64]:
        """Return the sums of queries, from products in twice the precision, and the errors of their shares."""
        if self.steep:  # such queries were rounded
            D, _, error = self.in_float64(Q, self.noise(Q), None, None)
            return D, error
        D, change, adding = uncertain_sums(Q, self.keys, self.present, self.f, precise=True)
        error = change + adding + evaluation_error(self.f, D, self.level)
        if isinstance(self.f, Softmax):  # of each term
            error = 2 * error + 2 * UNIT * np.abs(np.where(np.isneginf(D), 0.0, D))
        else:
            error = np.where((D == 0) & (change == 0), 0.0, error + change / self.level)
        return D if elsewhere is None else np.logaddexp(D, elsewhere), error

    def precise_products(self, Q: Float64, rows: Float64) -> Float64:
        """Return products in twice the precision; with powers too steep for it, in float64."""
        if self.steep:
            return np.asarray(Q @ rows.T)
        return certain_products(Q, rows, zeros=not isinstance(self.f, Softmax))[0]


def _shares(Z: Float64, D: Float64 | None, f: AttentionFunction | Softmax) -> tuple[Float64, Float64]:
    """Return scores from products and sums D (m,), for softmax their logarithms; without D, from sums of these.

    Also return the sums. The products may be overwritten.
    """
    if isinstance(f, Softmax):
        top = Z.max(axis=1, initial=-np.inf) if D is None else D
        Z -= top[:, None]
        A = np.exp(Z, out=Z)
        if D is None:
            total = A.sum(axis=1)
            A /= total[:, None]
            top = top + np.log(total)
        return A, top
    A = f(Z)
    D = A.sum(axis=1) if D is None else D
    divisor = np.where(np.isfinite(D), D, np.nan)[:, None]  # no share is known where the sum overflowed
    A = np.divide(A, np.where(divisor == 0, 1.0, divisor), out=Z)
    A[D == 0] = 0.0
    return A, D
