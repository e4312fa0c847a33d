"""The attention of sample queries, in blocks: never a matrix of all queries and keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from levattn._core.arrays import Matrices, take_rows, to_float64
from levattn._core.checks import TIE
from levattn._core.types import Flags, Float64, Int64
from levattn.functions import L1L2, AttentionFunction, Fair, Huber, Power, Softmax, Tukey, scale_of
from levattn.linalg.factor import UNIT
from levattn.sensitivity.sums import (
    BLOCK_ENTRIES,
    certain_products,
    evaluation_error,
    is_bounded_by_sums,
    key_blocks,
    mild_changes,
    mild_entry_change,
    product_noise,
    small_changes,
    sums,
    uncertain_sums,
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
    remain uncertain: then it bounds their relative error, and is infinite if nothing is known. If `safe`, shares of
    powers below 1 whose products may vanish are bounds.
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
            if faint.any():
                A = _above_zero(A, faint[part], asked[part], _read(given, places), f)
            yield part, places, A, error
    for again in later:
        g = _of_tiny_products(f, Q[again], largest)
        for part, places, A, error in share_blocks(Q[again], keys, present, g, order, level=level, together=together):
            yield again[part], places, A, error


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
    meets[faint] = ((Q[faint] != 0).astype(np.float32) @ (rows != 0).astype(np.float32).T) > 0
    return np.where(meets & (bound > A), bound, A)


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
    room = min(0, int(1000 / p) - int(np.ceil(np.log2(max(Q.shape[1], 1)))))  # else the sum of powers may overflow
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
        return np.flatnonzero(np.any((Q != 0) & (self.largest > 0), axis=1) & few)

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
