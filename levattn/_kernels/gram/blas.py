"""BLAS and LAPACK, on threads of their own: faster than the tiles from some number of columns on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from levattn._core.types import Float64
from levattn._kernels.pairwise import pairwise_sum
from levattn._kernels.rows.contract import BLOCK, Pieces

BLAS_COLUMNS = 2048
LAPACK_COLUMNS = 512


def blas_moments(read: Callable[[int, int, int], Float64], pieces: Pieces, out: Float64) -> None:
    """Write the second moment of each piece's rows; `read` returns some rows of a matrix in float64.

    Blocks are summed in pairs, pairs of pairs, and so on.
    """
    for t, (_, item, start, stop) in enumerate(pieces.tolist()):
        blocks = (read(item, low, min(low + BLOCK, stop)) for low in range(start, stop, BLOCK))
        out[t] = pairwise_sum(X.T @ X for X in blocks)


def lapack_cholesky(G: Float64, shift: float, W: Float64, pivot: Float64, inverse_norm_bound: Float64) -> None:
    """Factor matrices by LAPACK, as `cholesky_tasks` of `factor` does."""
    from scipy.linalg.lapack import dpotrf, dtrtri

    for item, moment in enumerate(G):
        c = np.sqrt(np.diagonal(moment))
        live = np.flatnonzero(c > 0)
        pivot[item], inverse_norm_bound[item] = np.inf, 0.0
        if not len(live):
            continue
        part = np.ix_(live, live) if len(live) < len(c) else (slice(None), slice(None))
        scale = 1 / c[live]
        scaled = moment[part] * scale
        scaled *= scale[:, None]
        np.fill_diagonal(scaled, 1.0 + shift)
        R, failed = dpotrf(scaled.T, overwrite_a=True)  # symmetric, and in the order of LAPACK
        if failed:
            pivot[item], inverse_norm_bound[item] = 0.0, np.inf
            continue
        pivot[item] = float(np.min(np.diagonal(R))) ** 2
        inverse = dtrtri(R, overwrite_c=True)[0]
        sizes = np.abs(inverse)
        inverse_norm_bound[item] = float(sizes.sum(axis=0).max() * sizes.sum(axis=1).max())
        W[item][part] = inverse * scale[:, None]
