"""Inverse Cholesky factors of small matrices on the CPU."""

from __future__ import annotations

import numpy as np

from levattn._core.types import Float64
from levattn._kernels.factor.cholesky import cholesky_tasks
from levattn._kernels.gram.blas import LAPACK_COLUMNS, lapack_cholesky
from levattn._kernels.tasks import share

__all__ = ["inverse_cholesky"]


def inverse_cholesky(G: Float64, shift: float = 0.0) -> tuple[Float64, Float64, Float64]:
    """Factor small matrices."""
    G = np.ascontiguousarray(G)
    W = np.zeros_like(G)
    pivot, inverse_norm_bound = np.empty(len(G)), np.empty(len(G))
    if G.shape[1] >= LAPACK_COLUMNS:
        lapack_cholesky(G, shift, W, pivot, inverse_norm_bound)
        return W, pivot, inverse_norm_bound
    share(
        lambda first, last: cholesky_tasks(G, shift, first, last, W, pivot, inverse_norm_bound),
        len(G),
        float(len(G)) * G.shape[1] ** 3,
    )
    return W, pivot, inverse_norm_bound
