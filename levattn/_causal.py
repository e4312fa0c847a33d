"""Causal heavy attention for f(x) = x²: row t attends to the keys up to t, and is normalised over these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from levattn._array import to_numpy
from levattn._kernels import Float64, Rows, inverse_cholesky, precise_products
from levattn._normalizers import NORMALIZER_ERROR, PRODUCT_ERROR
from levattn.leverage import TIE
from levattn.linalg import UNIT, dense, factor_moments

__all__ = ["CausalChunk", "causal_chunks"]

_CHUNK = 256  # rows that are worked on at a time
_SCORE_ERROR = 1e-3  # estimated relative error of a score up to which keys are let go by it


@dataclass(frozen=True)
class CausalChunk:
    """The scores of some rows on the keys that could be heavy for them.

    rows: the first row and the one after the last.
    keys: ascending indices of the keys: those kept from before, and the chunk's own.
    scores: (rows, keys), zero for keys after the row.
    normalizers: of the rows, in the units of the queries as they were read.
    error: estimated relative error of a score of each row.
    alive: number of keys kept after the chunk.
    """

    rows: tuple[int, int]
    keys: npt.NDArray[np.int64]
    scores: Float64
    normalizers: Float64
    error: Float64
    alive: int


def causal_chunks(
    queries: Callable[[int, int], Float64], rows: Rows, exponents: npt.NDArray[np.int32], epsilon: float
) -> Iterator[CausalChunk]:
    """Give the chunks of causal attention over a batch of one, whose columns are divided by powers of two.

    `queries` returns some rows of queries in float64, multiplied by these powers.

    A key is kept while its leverage score among the keys so far is at least ε. It never rises again, so no row after
    can give a key that was let go a score of ε. At most rank/ε keys are kept after a chunk, where the moments resolve
    their scores; where they do not, keys are let go only after a stable factorisation of all keys so far, which is
    made when there are too many.
    """
    n, d = rows.shape[1:]
    G = np.zeros((d, d))
    kept, kept_keys = np.zeros(0, np.int64), np.zeros((0, d))
    limit = 2 * d / epsilon
    below = np.tri(_CHUNK)
    for start in range(0, n, _CHUNK):
        stop = min(start + _CHUNK, n)
        K = _read(rows, start, stop, exponents)
        q = queries(start, stop)
        count = stop - start
        Z = np.hstack([q @ kept_keys.T, q @ K.T])
        squares = Z * Z
        squares[:, len(kept) :] *= below[:count, :count]
        before = np.einsum("ij,ij->i", q @ G, q)
        size = np.einsum("ij,ij->i", np.abs(q) @ np.abs(G), np.abs(q))
        D = before + squares[:, len(kept) :].sum(axis=1)
        largest = np.max(np.abs(K), axis=0, initial=0.0)
        if len(kept):
            largest = np.maximum(largest, np.abs(kept_keys).max(axis=0))
        with np.errstate(divide="ignore", invalid="ignore"):
            error = (8 + start / _CHUNK) * UNIT * size / D
            product = d * UNIT * (np.abs(q) @ largest) / np.sqrt(epsilon * D)
        exact = np.flatnonzero(~(error <= NORMALIZER_ERROR) | ~(product <= PRODUCT_ERROR))
        if len(exact):
            Z = precise_products(q[exact], np.vstack([kept_keys, K])) ** 2
            Z[:, len(kept) :] *= below[exact, :count]
            squares[exact] = Z
            total = Z[:, len(kept) :].sum(axis=1)
            for low in range(0, start, 16 * _CHUNK):
                part = _read(rows, low, min(low + 16 * _CHUNK, start), exponents)
                total += (precise_products(q[exact], part) ** 2).sum(axis=1)
            seen = np.max(np.diag(G), initial=0.0) + np.maximum.accumulate(np.max(K * K, axis=1))[exact]
            floor = (d * UNIT) ** 2 * d * np.einsum("ij,ij->i", q[exact], q[exact]) * seen
            D[exact] = np.where(total > floor, total, 0.0)
            error[exact], product[exact] = 8 * d * UNIT, UNIT
        scores = squares
        with np.errstate(divide="ignore", invalid="ignore"):
            scores /= D[:, None]
        scores[~(D > 0)] = 0.0
        G += K.T @ K
        kept_now = np.concatenate([kept, np.arange(start, stop)])
        keys_now = np.vstack([kept_keys, K])
        still, sure = _still(G, keys_now, start // _CHUNK, epsilon)
        if not sure and len(kept_now) > limit:
            still = _still_by_factor(rows, stop, kept_now, epsilon)
            limit = max(2 * d / epsilon, 2 * int(still.sum()) + _CHUNK)
        kept, kept_keys = kept_now[still], keys_now[still]
        yield CausalChunk((start, stop), kept_now, scores, D, error + 2 * product, len(kept))


def _read(rows: Rows, start: int, stop: int, exponents: npt.NDArray[np.int32]) -> Float64:
    """Return some keys in float64, divided by powers of two, zero where masked."""
    return np.ldexp(dense(rows, start, stop), -exponents)


def _still(G: Float64, keys: Float64, chunks: int, epsilon: float) -> tuple[npt.NDArray[np.bool_], bool]:
    """Tell which keys may have a score of at least ε, and whether the moments were good enough to tell."""
    W, pivot, reach = inverse_cholesky(G[None])
    error = (8 + chunks) * UNIT * float(reach[0])
    if not (pivot[0] > 0 and error <= _SCORE_ERROR):
        return np.any(keys != 0, axis=1), False
    turned = keys @ W[0]
    scores = np.einsum("ij,ij->i", turned, turned)
    return scores * (1 + 4 * error) >= epsilon * (1 - TIE), True


def _still_by_factor(rows: Rows, stop: int, indices: npt.NDArray[np.int64], epsilon: float) -> npt.NDArray[np.bool_]:
    """Tell the same by a stable factorisation of all keys so far."""
    factor = factor_moments(rows.between(0, stop), single="no")
    scores = to_numpy(factor.scores(wide=True)[0])[0][indices]
    return np.asarray(scores * (1 + 4 * float(factor.score_error[0])) >= epsilon * (1 - TIE))
