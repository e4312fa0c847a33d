"""Causal heavy attention for f(x) = x²: row t attends to the keys up to t, and is normalized over these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import to_numpy
from levattn._kernels import Float64, Rows, kernels_for
from levattn.heavy.normalizers import (
    PRODUCT_ERROR,
    Exponents,
    PreciseSums,
    even_rows,
    flushed,
)
from levattn.linalg.factor import UNIT, float64_rows
from levattn.linalg.routes import factor_moments
from levattn.sensitivity.leverage import TIE

__all__ = ["CHUNK", "CausalChunk", "causal_chunks"]

CHUNK = 256  # rows that are worked on at a time
_SCORE_ERROR = 1e-3  # estimated relative error of a score up to which keys are let go by it
_SUM_ERROR = TIE / 2  # of a normalizer, beyond which it is summed over the keys
_NOTHING = 2.0**-1022  # a score of which nothing is known
_LEAST = 2.0**-900  # normalizers below may have lost squares
_TAME = 100  # powers of two of queries and units that need no scaling
_FAR = 250  # powers of two by which an entry may be larger than the unit of its column


@dataclass(frozen=True)
class CausalChunk:
    """The scores of some rows on the keys that could be heavy for them.

    rows: the first row and the one after the last.
    keys: ascending indices of the keys: those kept from before, and the chunk's own.
    scores: (rows, keys and more), zero for keys after the row, and in the columns after those of the keys: of one
        shape, products with values are summed in one order.
    normalizers: of the rows; infinite or 0 where they leave the range.
    live: whether they are not zero.
    captured: the scores of each row, summed up.
    error: estimated relative error of a score of each row.
    alive: number of keys kept after the chunk.
    """

    rows: tuple[int, int]
    keys: npt.NDArray[np.int64]
    scores: Float64
    normalizers: Float64
    live: npt.NDArray[np.bool_]
    captured: Float64
    error: Float64
    alive: int


class _Units:
    """Powers of two that keep entries in range, one a column, known from the keys so far."""

    def __init__(self, d: int) -> None:
        self.exponents: Exponents = np.zeros(d, np.int32)
        self.seen = np.zeros(d, np.bool_)

    def take(self, K: Float64) -> tuple[int, Any]:
        """Fix the units for some of the keys that come next; return how many, and the columns that each row has seen.

        The unit of a column is that of its first entry. A key that is much larger begins a chunk, and new units.
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
    """Return queries times the units of the columns, and what untame ones are divided by."""
    with np.errstate(over="ignore"):  # of rows that are not tame
        out, powers = Q * np.ldexp(1.0, np.clip(exponents, -_TAME, _TAME)), np.zeros(len(Q), np.int32)
    size = np.max(np.abs(Q), axis=1, initial=0.0)
    odd = np.flatnonzero(((size < 2.0**-_TAME) | (size > 2.0**_TAME)) & (size > 0))
    if np.abs(exponents).max(initial=0) > _TAME:
        odd = np.arange(len(Q))
    if len(odd):
        out[odd], powers[odd], _ = even_rows(Q[odd], exponents)
    return out, powers


def _padded(A: Float64) -> Float64:
    """Return the rows of a chunk with rows of zeros after them: of one shape BLAS sums all chunks in one order."""
    return A if len(A) == CHUNK else np.concatenate([A, np.zeros((CHUNK - len(A), A.shape[1]))])


def causal_chunks(queries: Callable[[int, int], Float64], rows: Rows, epsilon: float) -> Iterator[CausalChunk]:
    """Give the chunks of causal attention over a batch of one; `queries` returns some rows of queries in float64.

    A key is kept while its leverage score among the keys so far is at least ε. It never rises again, so no row after
    can give a key that was let go a score of ε. At most rank/ε keys are kept after a chunk, where the moments resolve
    their scores; where they do not, keys are let go only after a stable factorization of all keys so far, which is
    made when there are too many.

    What a row gets does not depend on later rows, to the last bit: units, error estimates and decisions are of the
    rows up to its own, and what comes after in its chunk is multiplied by zero.
    """
    n, d = rows.shape[1:]
    units, G = _Units(d), np.zeros((d, d))
    kept, kept_keys = np.zeros(0, np.int64), np.zeros((0, d))
    held = kept_keys  # in their units
    largest = np.zeros(d)  # in the columns of the keys so far
    limit = 2 * d / epsilon
    below = np.tri(CHUNK)
    start = chunks = 0
    while start < n:
        stored = float64_rows(rows, start, min(start + CHUNK, n))
        before_units = units.exponents
        count, seen = units.take(stored)
        stop, stored, exponents = start + count, stored[:count], units.exponents
        change = before_units - exponents
        if change.any():
            G, largest = np.ldexp(G, change[:, None] + change), np.ldexp(largest, change)
            held = np.ldexp(kept_keys, -exponents)
        K, stored_queries = np.ldexp(stored, -exponents), queries(start, stop)
        if not seen.all():  # other entries meet no key
            stored_queries = np.where(seen, stored_queries, 0.0)
        Q, powers = _even(stored_queries, exponents)
        q, own = _padded(Q), _padded(K)
        squares = np.hstack([q @ held.T, q @ own.T])
        squares *= squares
        squares[:, len(kept) :] *= below
        before, sizes = np.einsum("ij,ij->i", q @ G, q)[:count], np.abs(q)
        size = np.einsum("ij,ij->i", sizes @ np.abs(G), sizes)[:count]
        D = before + squares[:count, len(kept) :].sum(axis=1)
        here, seen_so_far = np.abs(K), np.tile(largest, (count, 1))
        risen = np.flatnonzero(np.max(here, axis=0) > largest)
        if len(risen):
            so_far = np.maximum.accumulate(here[:, risen], axis=0)
            seen_so_far[:, risen] = np.maximum(so_far, largest[risen])
        reach = np.sum(sizes[:count] * seen_so_far, axis=1)
        scores = squares[:count]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            error = (32 + chunks) * UNIT * (1 + size / D)
            product = d * UNIT * reach / np.sqrt(epsilon * D)
            scores /= D[:, None]
        live = D > 0
        exact = np.flatnonzero(~(error <= _SUM_ERROR) | ~(product <= PRODUCT_ERROR) | ~(D >= _LEAST))
        if len(exact):
            sums = PreciseSums(Q[exact])
            near = even_rows(np.concatenate([kept_keys, _padded(stored)]), -exponents)
            mine = np.hstack([np.zeros((len(exact), len(kept))), below[exact]])
            sums.add(*near, mine)
            for low in range(0, start, 16 * CHUNK):
                sums.add(*even_rows(float64_rows(rows, low, min(low + 16 * CHUNK, start)), -exponents))
            total, error[exact], root = sums.result(start + 1 + exact)
            mine[:, : len(kept)] = 1.0
            some = sums.squares(PreciseSums(Q[exact]).add(*near, mine), near[1])
            some /= np.where(total > 0, total, 1.0)[:, None]
            scores[exact] = some / np.maximum(some.sum(axis=1, keepdims=True), 1.0)
            live[exact], D[exact], product[exact] = total > 0, total, UNIT + root / np.sqrt(epsilon)
            powers[exact] += np.where(total > 0, sums.shift, 0)
        G += own.T @ own
        largest = np.maximum(largest, np.max(here, axis=0, initial=0.0))
        kept_now, keys_now = np.concatenate([kept, np.arange(start, stop)]), np.vstack([kept_keys, stored])
        held = np.vstack([held, K])
        still = _still(G, held, chunks, epsilon)
        if still is None and len(kept_now) > limit:
            still = _still_by_factor(rows, stop, kept_now, epsilon)
            limit = max(2 * d / epsilon, 2 * int(still.sum()) + CHUNK)
        elif still is None:
            still = np.any(keys_now != 0, axis=1)
        kept, kept_keys, held = kept_now[still], keys_now[still], held[still]
        scores[~live] = 0.0
        unknown = flushed(stored_queries, Q)
        unknown[exact] |= np.isinf(product[exact])
        lost = np.flatnonzero(unknown)
        for row in lost.tolist():  # nothing is known of its products with the keys up to it
            visible = slice(0, len(kept_now) - count + row + 1)
            scores[row, visible] = np.maximum(scores[row, visible], _NOTHING)
        with np.errstate(over="ignore"):
            normalizers = np.ldexp(D, 2 * powers)
        captured, error = scores.sum(axis=1), np.where(live, error + 2 * product, 0.0)
        error[lost], live[lost] = np.inf, True
        yield CausalChunk((start, stop), kept_now, scores, normalizers, live, captured, error, len(kept))
        start, chunks = stop, chunks + 1


def _still(G: Float64, keys: Float64, chunks: int, epsilon: float) -> npt.NDArray[np.bool_] | None:
    """Tell which keys may have a score of at least ε, or None where the moments are not good enough to tell."""
    W, pivot, reach = kernels_for("factor", G).inverse_cholesky(G[None])
    error = (32 + chunks) * UNIT * float(reach[0])
    if not (pivot[0] > 0 and error <= _SCORE_ERROR):
        return None
    turned = keys @ W[0]
    scores = np.einsum("ij,ij->i", turned, turned)
    return np.asarray(scores * (1 + 4 * error) >= epsilon * (1 - TIE))


def _still_by_factor(rows: Rows, stop: int, indices: npt.NDArray[np.int64], epsilon: float) -> npt.NDArray[np.bool_]:
    """Tell the same by a stable factorization of all keys so far."""
    factor = factor_moments(rows.between(0, stop), single="no")
    scores = to_numpy(factor.scores(as_float64=True)[0])[0][indices]
    return np.asarray(scores * (1 + 4 * float(factor.score_error[0])) >= epsilon * (1 - TIE))
