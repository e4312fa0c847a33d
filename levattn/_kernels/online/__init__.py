"""Kernels of online leverage scores: rows appended to a triangle."""

from __future__ import annotations

from levattn._core.types import Float64
from levattn._kernels.online.compiled import online_tasks
from levattn._kernels.rows import Rows
from levattn._kernels.rows.compiled import view_of
from levattn._kernels.tasks import share


def online_scores(rows: Rows, root: Float64) -> Float64:
    """Return ``kᵀ(diag(root²) + Σ k kᵀ)⁺ k`` of each row, the sum over the rows up to it, (b, n).

    root: (b, d), at least 0.
    """
    b, n, d = rows.shape
    out: Float64 = rows.zeros()
    view = view_of(rows)
    share(lambda first, last: online_tasks(view, n, root, first, last, out), b, 8.0 * b * n * d * d)
    return out
