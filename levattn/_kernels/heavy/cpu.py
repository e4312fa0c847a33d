"""Squared attention of queries on the CPU: normalizers, and heavy entries in two passes."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._core.types import Float64
from levattn._kernels.heavy.compiled import heavy_tasks, norm_tasks
from levattn._kernels.tasks import share


def query_norms(Q: Float64, N: Float64) -> tuple[Float64, Float64]:
    """Return the normalizers of queries."""
    Q, columns = np.ascontiguousarray(Q), np.ascontiguousarray(N.T)
    squares, bounds = np.empty(len(Q)), np.empty(len(Q))
    for A, B, out in ((Q, columns, squares), (np.abs(Q), np.abs(columns), bounds)):

        def body(first: int, last: int, A: Float64 = A, B: Float64 = B, out: Float64 = out) -> None:
            norm_tasks(A, B, first, last, out)

        share(body, len(Q), float(len(Q)) * N.size)
    return squares, bounds


def heavy_entries(
    Q: Float64, keys: Float64, indices: Any, normalizers: Float64, epsilon: float
) -> tuple[Any, Any, Float64, Float64]:
    """Extract heavy entries."""
    m = len(Q)
    Q, columns = np.ascontiguousarray(Q), np.ascontiguousarray(keys.T)
    work = float(m) * keys.size
    starts, captured = np.zeros(m + 1, np.int64), np.empty(m)
    found, values = np.empty(0, np.int64), np.empty(0)

    def body(first: int, last: int) -> None:
        heavy_tasks(Q, columns, indices, normalizers, epsilon, first, last, starts, captured, found, values)

    share(body, m, work)
    np.cumsum(starts, out=starts)
    if starts[-1]:
        found, values = np.empty(starts[-1], np.int64), np.empty(starts[-1])
        share(body, m, work)
    return starts, found, values, captured
