"""Inverse Cholesky factors of small matrices on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from levattn._core.types import Float64, Int64
from levattn._kernels.factor.cholesky import cholesky_tasks
from levattn._kernels.factor.norms import extremes_of, sharpened
from levattn._kernels.gram.blas import LAPACK_COLUMNS, lapack_cholesky
from levattn._kernels.tasks import share

__all__ = ["inverse_cholesky"]


@dataclass(frozen=True, eq=False)
class _Inverses:
    G: Float64
    W: Float64
    pivot: Float64
    bound: Float64

    def ranks(self) -> Int64:
        """Return the number of columns that are not left out."""
        return np.asarray((self.W.diagonal(axis1=1, axis2=2) != 0).sum(axis=1))

    def extremes(self) -> tuple[Float64, Float64]:
        """Return the least and the largest entry of the diagonals."""
        return extremes_of(self.G.diagonal(axis1=1, axis2=2))

    def spreads(self) -> Float64:
        """Return the sum of the squares of W for equilibrated columns."""
        return np.asarray(((self.W * self.W).sum(axis=2) * self.G.diagonal(axis1=1, axis2=2)).sum(axis=1))


def inverse_cholesky(G: Float64, shift: float = 0.0, *, limit: Float64 | float | None = None) -> _Inverses:
    """Factor small matrices; see `FactorKernels`."""
    G = np.ascontiguousarray(G)
    W = np.zeros_like(G)
    pivot, bound = np.empty(len(G)), np.empty(len(G))
    if G.shape[1] >= LAPACK_COLUMNS:
        lapack_cholesky(G, shift, W, pivot, bound)
    else:
        share(
            lambda first, last: cholesky_tasks(G, shift, first, last, W, pivot, bound),
            len(G),
            float(len(G)) * G.shape[1] ** 3,
        )
    return _Inverses(G, W, pivot, bound if limit is None else sharpened(bound, W, G, limit))
