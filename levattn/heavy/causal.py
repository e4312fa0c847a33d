"""Causal heavy attention for f(x) = x²: row t attends to the keys up to t, and is normalized over these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import to_float64
from levattn._core.checks import TIE
from levattn._core.types import Float64
from levattn._kernels import FACTOR, Rows
from levattn.heavy.normalizers import (
    LEAST,
    PRODUCT_ERROR,
    SUM_ERROR,
    PreciseSums,
    even_rows,
    flushed,
    require_finite_queries,
)
from levattn.linalg.accumulator import UNIT, Exponents
from levattn.linalg.factor import float64_rows
from levattn.linalg.routes import factor_moments

CHUNK = 256  # rows
_SCORE_ERROR = 1e-3  # largest estimated relative error of scores from moments that drop keys
_LEAST_SUM = 2.0**-900  # smaller normalizers may have lost squares to underflow
_TAME = 100  # powers of two of queries and units that need no scaling
_FAR = 250  # powers of two by which an entry may exceed the unit of its column
_BELOW = np.tri(CHUNK)  # 1 for keys up to a row


@dataclass(frozen=True)
class CausalChunk:
    """The scores of some rows on the keys that could be heavy for them.

    `scores` (rows, keys and padding) are zero for keys after the row, and in the padding. All chunks have one shape,
    so that products with values are summed in one order.
    """

    rows: tuple[int, int]  # the first row and the one after the last
    keys: npt.NDArray[np.int64]  # ascending indices of the keys kept from earlier chunks, and of the chunk's own keys
    scores: Float64
    normalizers: Float64  # of the rows; infinite or 0 where they leave the range
    live: npt.NDArray[np.bool_]  # whether normalizers are not zero
    captured: Float64  # the sum of the scores of each row
    error: Float64  # estimated relative error of a score of each row
    alive: int  # number of keys kept after the chunk


class _Units:
    """Powers of two that keep entries in range, one per column, from the keys so far."""

    def __init__(self, d: int) -> None:
        self.exponents: Exponents = np.zeros(d, np.int32)
        self.seen = np.zeros(d, np.bool_)

    def take(self, K: Float64) -> tuple[int, Any]:
        """Fix the units for some of the next keys; return their number, and the columns that each row has seen.

        The first entry of a column sets its unit. A key that is much larger begins a chunk, and new units.
        """
        if self.seen.all() and np.all(np.frexp(np.max(np.abs(K), axis=0))[1] <= self.exponents + _FAR):
            return len(K), np.True_
        found = np.frexp(K)[1]
        there = K != 0
        first = found[np.argmax(there, axis=0), np.arange(K.shape[1])]
        units = np.where(self.seen, self.exponents, np.where(there.any(axis=0), first, 0))
        far = there & (found > units + _FAR)
        if len(K) and far[0].any():
            units = np.where(far[0], found[0], units)
            far = there & (found > units + _FAR)
        count = int(np.argmax(far.any(axis=1))) if far.any() else len(K)
        seen = np.logical_or.accumulate(np.vstack([self.seen, there[:count]]), axis=0)[1:]
        self.seen = seen[-1] if count else self.seen
        self.exponents = np.where(self.seen, units, 0).astype(np.int32)
        return count, seen


def _even(Q: Float64, exponents: Exponents) -> tuple[Float64, Exponents]:
    """Return queries times the units of the columns, and powers of two that divide queries out of range."""
    with np.errstate(over="ignore"):  # of rows out of range
        out, powers = Q * np.ldexp(1.0, np.clip(exponents, -_TAME, _TAME)), np.zeros(len(Q), np.int32)
    size = np.max(np.abs(Q), axis=1, initial=0.0)
    odd = np.flatnonzero(((size < 2.0**-_TAME) | (size > 2.0**_TAME)) & (size > 0))
    if np.abs(exponents).max(initial=0) > _TAME:
        odd = np.arange(len(Q))
    if len(odd):
        out[odd], powers[odd], _ = even_rows(Q[odd], exponents)
    return out, powers


def _padded(A: Float64) -> Float64:
    """Return the rows of a chunk and zero rows after them: with one shape, BLAS sums all chunks in one order."""
    return A if len(A) == CHUNK else np.concatenate([A, np.zeros((CHUNK - len(A), A.shape[1]))])


@dataclass(frozen=True)
class Causal:
    """Queries and keys of causal attention, one matrix each in main memory; each reading computes the chunks again."""

    queries: Rows
    rows: Rows
    epsilon: float

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """The keys that take part."""
        return np.full(self.rows.shape[1], True) if self.rows.mask is None else self.rows.mask[0]

    def chunks(self) -> Iterator[CausalChunk]:
        """Yield the chunks one after the other.

        The results of a row do not depend on later rows, to the last bit. Units, error estimates and decisions come
        from the rows up to its own, and later keys of its chunk are multiplied with zero.
        """
        n, prefix = self.rows.shape[1], _Prefix(self.rows, self.epsilon)
        while prefix.stop < n:
            start = prefix.stop
            seen = prefix.read(min(start + CHUNK, n))
            Q = to_float64(self.queries.keys[:, start : prefix.stop, :], self.queries.format)[0]
            require_finite_queries(np.isfinite(Q).all(axis=1), start)
            yield prefix.chunk(start, Q if seen.all() else np.where(seen, Q, 0.0))  # no key has other columns


class _Prefix:
    """The keys of the chunks so far: their moments, and the keys that may still be heavy for a later row.

    A key is kept while its leverage score among the keys so far is at least ε. The score never rises again, so no
    later row can give a dropped key a score of ε. Where the moments resolve the scores, at most rank/ε keys are kept
    after a chunk. Where they do not, only a stable factorization of all keys so far drops keys; it is made when there
    are too many.
    """

    def __init__(self, rows: Rows, epsilon: float) -> None:
        d = rows.shape[2]
        self._all, self._epsilon = rows, epsilon
        self._units, self._G = _Units(d), np.zeros((d, d))
        self._kept, self._kept_keys = np.zeros(0, np.int64), np.zeros((0, d))
        self._held = self._kept_keys  # in their units
        self._largest = np.zeros(d)  # in the columns of the keys so far
        self._limit = 2 * d / epsilon
        self._chunks = self.stop = 0

    def read(self, stop: int) -> Any:
        """Read the keys of a chunk, up to `stop` or fewer; return the columns that each row has seen."""
        start, before = self.stop, self._units.exponents
        stored = float64_rows(self._all, start, stop)
        count, seen = self._units.take(stored)
        self.stop, self._stored, exponents = start + count, stored[:count], self._units.exponents
        change = before - exponents
        if change.any():
            self._G = np.ldexp(self._G, change[:, None] + change)
            self._largest = np.ldexp(self._largest, change)
            self._held = np.ldexp(self._kept_keys, -exponents)
        self._keys = np.ldexp(self._stored, -exponents)
        return seen

    def chunk(self, start: int, given: Float64) -> CausalChunk:
        """Return the scores of the queries of the chunk just read, and go on to the next chunk."""
        count, before, chunks = len(given), len(self._kept), self._chunks
        Q, powers = _even(given, self._units.exponents)
        q, own = _padded(Q), _padded(self._keys)
        squares = np.hstack([q @ self._held.T, q @ own.T])
        squares *= squares
        squares[:, before:] *= _BELOW
        sums, sizes = np.einsum("ij,ij->i", q @ self._G, q)[:count], np.abs(q)
        size = np.einsum("ij,ij->i", sizes @ np.abs(self._G), sizes)[:count]
        D = sums + squares[:count, before:].sum(axis=1)
        largest_product = np.sum(sizes[:count] * self._largest_so_far(), axis=1)
        scores = squares[:count]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            error = (32 + chunks) * UNIT * (1 + size / D)
            product = Q.shape[1] * UNIT * largest_product / np.sqrt(self._epsilon * D)
            scores /= D[:, None]
        live = D > 0
        exact = np.flatnonzero(~(error <= SUM_ERROR) | ~(product <= PRODUCT_ERROR) | ~(D >= _LEAST_SUM))
        if len(exact):
            scores[exact], D[exact], error[exact], root, shift = self._precise(start, Q[exact], exact)
            live[exact], product[exact] = D[exact] > 0, UNIT + root / np.sqrt(self._epsilon)
            powers[exact] += shift
        self._G += own.T @ own
        seen = self._let_go(start)
        scores[~live] = 0.0
        unknown = flushed(given, Q)
        unknown[exact] |= np.isinf(product[exact])
        lost = np.flatnonzero(unknown)
        for row in lost.tolist():  # its products with the keys up to it are unknown
            visible = slice(0, before + row + 1)
            scores[row, visible] = np.maximum(scores[row, visible], LEAST)
        with np.errstate(over="ignore"):
            normalizers = np.ldexp(D, 2 * powers)
        captured, error = scores.sum(axis=1), np.where(live, error + 2 * product, 0.0)
        error[lost], live[lost] = np.inf, True
        self._chunks += 1
        return CausalChunk((start, self.stop), seen, scores, normalizers, live, captured, error, len(self._kept))

    def _largest_so_far(self) -> Float64:
        """Return the largest entries of the columns up to each row of the chunk."""
        here = np.abs(self._keys)
        out = np.tile(self._largest, (len(here), 1))
        risen = np.flatnonzero(np.max(here, axis=0) > self._largest)
        if len(risen):
            out[:, risen] = np.maximum(np.maximum.accumulate(here[:, risen], axis=0), self._largest[risen])
        return out

    def _precise(
        self, start: int, Q: Float64, places: npt.NDArray[np.int64]
    ) -> tuple[Float64, Float64, Float64, Float64, Exponents]:
        """Return scores of some rows from products in twice the precision, and their sums divided by 4^shift.

        Also return the relative errors of the sums and of their roots, and the shift.
        """
        sums, exponents = PreciseSums(Q), self._units.exponents
        near = even_rows(np.concatenate([self._kept_keys, _padded(self._stored)]), -exponents)
        mine = np.hstack([np.zeros((len(Q), len(self._kept))), _BELOW[places]])
        sums.add(*near, mine)
        for low in range(0, start, 16 * CHUNK):
            sums.add(*even_rows(float64_rows(self._all, low, min(low + 16 * CHUNK, start)), -exponents))
        total, error, root = sums.result(start + 1 + places)
        mine[:, : len(self._kept)] = 1.0
        some = sums.squares(PreciseSums(Q).add(*near, mine), near[1])
        some /= np.where(total > 0, total, 1.0)[:, None]
        scores = some / np.maximum(some.sum(axis=1, keepdims=True), 1.0)
        return scores, total, error, root, np.where(total > 0, sums.shift, 0)

    def _let_go(self, start: int) -> npt.NDArray[np.int64]:
        """Keep the keys so far that can be heavy later; return the examined keys."""
        self._largest = np.maximum(self._largest, np.max(np.abs(self._keys), axis=0, initial=0.0))
        kept, keys = (
            np.concatenate([self._kept, np.arange(start, self.stop)]),
            np.vstack([self._kept_keys, self._stored]),
        )
        held = np.vstack([self._held, self._keys])
        still = self._still(held)
        if still is None and len(kept) > self._limit:
            still = self._still_by_factor(kept)
            self._limit = max(2 * keys.shape[1] / self._epsilon, 2 * int(still.sum()) + CHUNK)
        elif still is None:
            still = np.any(keys != 0, axis=1)
        self._kept, self._kept_keys, self._held = kept[still], keys[still], held[still]
        return kept

    def _still(self, keys: Float64) -> npt.NDArray[np.bool_] | None:
        """Tell which keys may have a score of at least ε; return None where the moments are not accurate enough."""
        found = FACTOR.inverse_cholesky(self._G[None])
        error = (32 + self._chunks) * UNIT * float(found.bound[0])
        if not (found.pivot[0] > 0 and error <= _SCORE_ERROR):
            return None
        in_basis = keys @ found.W[0]
        return self._may_be_heavy(np.einsum("ij,ij->i", in_basis, in_basis), error)

    def _still_by_factor(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Tell which of some keys may be heavy, by a stable factorization of all keys so far."""
        factor = factor_moments(self._all.between(0, self.stop), single="no")
        scores: Float64 = factor.scores(as_float64=True)[0][0][indices]
        return self._may_be_heavy(scores, float(factor.score_error[0]))

    def _may_be_heavy(self, scores: Float64, error: float) -> npt.NDArray[np.bool_]:
        return np.asarray(scores * (1 + 4 * error) >= self._epsilon * (1 - TIE))
