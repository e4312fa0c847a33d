"""Norms and products of small matrices in main memory."""

from __future__ import annotations

import math

import numpy as np

from levattn._core.types import Float64

_STEPS, _FEW_STEPS = 30, 10  # of power iteration; few from _WIDE columns on, where a step is slow
_SMALL = 128  # columns up to which products do not use BLAS
_WIDE, _SHORT = 512, 1.5  # after few steps, _SHORT multiplies the squared norm


def extremes_of(diagonals: Float64) -> tuple[Float64, Float64]:
    """Return the least and the largest entry of each diagonal (b, d)."""
    return diagonals.min(axis=1, initial=np.inf), diagonals.max(axis=1, initial=-np.inf)


def spectral_norm(A: Float64, steps: int = _STEPS) -> float:
    """Return the 2-norm of A, by power iteration: 30 steps give it to a few per cent."""
    x = np.cos(np.arange(1.0, len(A) + 1) ** 2)
    size = 0.0
    for _ in range(steps):
        # for wide A, BLAS would leave threads spinning beside LAPACK and the next pass, for a tenth of a second
        y = A.T @ (A @ x) if len(A) < _WIDE else np.einsum("ij,i->j", A, np.einsum("ij,j->i", A, x))
        size = math.sqrt(float(y @ y))
        if size == 0:
            return 0.0
        x, size = y / size, math.sqrt(size / math.sqrt(float(x @ x)))
    return size


def sharpened(bound: Float64, W: Float64, G: Float64, limits: Float64 | float) -> Float64:
    """Return bounds (b,) of the squared norm of each W for equilibrated columns, sharpened where above a limit.

    bound: as `inverse_cholesky` computes it; infinite where there is no W.

    G: the moments, (b, d, d).
    """
    far = (bound > limits) & (bound < math.inf)
    if not far.any():
        return bound
    bound, wide = bound.copy(), W.shape[2] >= _WIDE
    for item in np.flatnonzero(far).tolist():
        even = np.sqrt(G[item].diagonal())[:, None] * W[item]
        norm = spectral_norm(even, _FEW_STEPS if wide else _STEPS)
        bound[item] = min(bound[item], norm**2 * (_SHORT if wide else 1.0))
    return bound


def multiply(A: Float64, B: Float64) -> Float64:
    """Return A B; without BLAS where it is small, as the threads of BLAS would go on spinning beside a kernel."""
    return np.asarray(np.einsum("ij,jk->ik", A, B) if len(A) <= _SMALL else A @ B)
