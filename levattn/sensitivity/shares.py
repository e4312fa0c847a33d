"""The attention of sample queries, in blocks: never a matrix of all queries and keys."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from levattn._core.arrays import Matrices, take_rows, to_float64
from levattn._core.types import Flags, Float64, Int64
from levattn.functions import AttentionFunction, Softmax
from levattn.sensitivity.sums import BLOCK_ENTRIES, sums

__all__ = ["share_blocks"]

_QUERIES = 256  # of a block


def share_blocks(
    Q: Float64, keys: Matrices, present: Flags, f: AttentionFunction | Softmax, order: Int64 | None = None
) -> Iterator[tuple[slice, Int64, Float64]]:
    """Give blocks of the attention of queries (m, d): which queries, which keys, and their scores.

    The keys are one matrix, (1, n, d), and come in the given order, or ascending; those that are not present have no
    scores. A query that gives f = 0 to all keys attends to none.
    """
    all_keys = np.flatnonzero(present)
    order = all_keys if order is None else order[present[order]]
    step = min(_QUERIES, max(16, BLOCK_ENTRIES // max(len(all_keys), 1)))
    width = max(1, BLOCK_ENTRIES // step)
    for first in range(0, len(Q), step):
        part = slice(first, min(first + step, len(Q)))
        D = None if len(order) == len(all_keys) <= width else sums(Q[part], keys, present, f)[0][:, None]
        for start in range(0, len(order), width):
            places = order[start : start + width]
            rows = to_float64(take_rows(keys.data, places), keys.format)[0]
            with np.errstate(over="ignore", invalid="ignore"):
                Z = Q[part] @ rows.T
            if not np.isfinite(Z).all():
                sums(Q[part], keys, present, f)  # which tells what is wrong
            yield part, places, _shares(Z, D, f)


def _shares(Z: Float64, D: Float64 | None, f: AttentionFunction | Softmax) -> Float64:
    """Return scores from products and sums D (m, 1), for softmax their logarithms, or sums of these products."""
    if isinstance(f, Softmax):
        if D is not None:
            return np.exp(Z - D)
        A = np.exp(Z - Z.max(axis=1, keepdims=True))
        return np.asarray(A / A.sum(axis=1, keepdims=True))
    A = f(Z)
    D = A.sum(axis=1, keepdims=True) if D is None else D
    return np.where(D > 0, A / np.where(D > 0, D, 1.0), 0.0)
