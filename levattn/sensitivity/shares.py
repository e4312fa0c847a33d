"""The attention of sample queries, in blocks: never a matrix of all queries and keys."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from levattn._core.arrays import Matrices, take_rows, to_float64
from levattn._core.types import Flags, Float64, Int64
from levattn.functions import AttentionFunction, Power, Softmax
from levattn.sensitivity.sums import BLOCK_ENTRIES, sums

__all__ = ["share_blocks"]

_QUERIES, _FEW = 256, 16  # queries of a block, and the fewest of a block with all keys


def share_blocks(
    Q: Float64,
    keys: Matrices,
    present: Flags,
    f: AttentionFunction | Softmax,
    order: Int64 | None = None,
    elsewhere: Float64 | None = None,
) -> Iterator[tuple[slice, Int64, Float64]]:
    """Yield blocks of the attention of queries (m, d): the queries, the keys, and their scores.

    The keys are one matrix, (1, n, d), and come in the given order, or ascending; absent keys have no scores. A query
    that gives f = 0 to all keys attends to none. For powers the products are scaled to at most 1. For softmax,
    `elsewhere` (m,) holds the logarithms of the sums of each query over other keys.
    """
    all_keys = np.flatnonzero(present)
    order = all_keys if order is None else order[present[order]]
    step, width = min(_QUERIES, BLOCK_ENTRIES // max(len(all_keys), 1)), max(len(all_keys), 1)
    whole = step >= _FEW  # few keys: one read, and no separate pass for the sum
    if not whole:
        step, width = _QUERIES, max(1, BLOCK_ENTRIES // max(_QUERIES, Q.shape[1]))
    rows = to_float64(take_rows(keys.data, order), keys.format)[0] if whole else None
    if isinstance(f, Power):
        Q = _tamed(Q, keys, all_keys, width)
    for first in range(0, len(Q), step):
        part = slice(first, min(first + step, len(Q)))
        alone = whole and elsewhere is None and len(order) == len(all_keys)
        D = None if alone else sums(Q[part], keys, present, f)[0][:, None]
        if D is not None and elsewhere is not None:
            D = np.logaddexp(D, elsewhere[part, None])
        for start in range(0, len(order), width):
            places = order[start : start + width]
            read = to_float64(take_rows(keys.data, places), keys.format)[0] if rows is None else rows
            with np.errstate(over="ignore", invalid="ignore"):
                Z = Q[part] @ read.T
                finite = np.isfinite(Z).all()
                A = _shares(Z, D, f)
            if not (finite and np.isfinite(A).all()):
                sums(Q[part], keys, present, f)  # raises with the cause
            yield part, places, A


def _tamed(Q: Float64, keys: Matrices, places: Int64, width: int) -> Float64:
    """Return each query times a power of two, which brings the bound of its products to about 1."""
    largest = np.zeros(Q.shape[1])
    for start in range(0, len(places), width):
        rows = to_float64(take_rows(keys.data, places[start : start + width]), keys.format)[0]
        largest = np.maximum(largest, np.abs(rows).max(axis=0))
    queries, own = np.frexp(np.where(largest > 0, Q, 0.0))
    powers = np.where(queries != 0, own + np.maximum(np.frexp(largest)[1], -1000), -(2**20))
    return np.asarray(np.ldexp(queries, own - powers.max(axis=1, keepdims=True, initial=-(2**20))))


def _shares(Z: Float64, D: Float64 | None, f: AttentionFunction | Softmax) -> Float64:
    """Return scores from products and sums D (m, 1), for softmax their logarithms; without D, from sums of these.

    The products may be overwritten.
    """
    if isinstance(f, Softmax):
        Z -= Z.max(axis=1, keepdims=True) if D is None else D
        A = np.exp(Z, out=Z)
        if D is None:
            A /= A.sum(axis=1, keepdims=True)
        return A
    A = f(Z)
    D = A.sum(axis=1, keepdims=True) if D is None else D
    D = np.where(np.isfinite(D), D, np.nan)  # no share is known where the sum overflowed
    A = np.divide(A, np.where(D == 0, 1.0, D), out=Z)
    A[D[:, 0] == 0] = 0.0
    return A
