"""Inverse Cholesky factors of small matrices on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from levattn._core.cached import cached_property
from levattn._core.types import Flags, Float64, Int64
from levattn._kernels.factor.cholesky import cholesky_tasks
from levattn._kernels.factor.norms import extremes_of, multiply, sharpened, spectral_norm
from levattn._kernels.gram.cpu import LAPACK_COLUMNS, lapack_cholesky
from levattn._kernels.tasks import share


@dataclass(frozen=True, eq=False)
class CpuInverses:
    """See the protocol `Inverses`; `begun` are factors and figures that other kernels have made already."""

    G: Float64
    shift: float
    limit: Float64 | float | None
    begun: tuple[Float64, Float64] | None = None

    @property
    def W(self) -> Float64:  # noqa: N802
        """The inverse factors."""
        return self._made[0]

    @property
    def pivot(self) -> Float64:
        """The smallest pivot."""
        return np.asarray(self._made[1][0])

    @property
    def bound(self) -> Float64:
        """Bounds of the squared norms."""
        return np.asarray(self._made[1][1])

    @cached_property
    def _made(self) -> tuple[Float64, Float64]:
        """The factors, and their figures: pivots, bounds and spreads; computed on first use."""
        if self.begun is not None:
            return self.begun
        G, shift = self.G, self.shift
        W, figures = np.zeros_like(G), np.empty((3, len(G)))
        limits = np.full(len(G), np.inf if self.limit is None else self.limit)
        if G.shape[1] >= LAPACK_COLUMNS:
            lapack_cholesky(G, shift, W, figures[0], figures[1])
            figures[1] = sharpened(figures[1], W, G, limits)
            figures[2] = ((W * W).sum(axis=2) * G.diagonal(axis1=1, axis2=2)).sum(axis=1)
        else:
            share(
                lambda first, last: cholesky_tasks(G, shift, limits, first, last, W, figures),
                len(G),
                float(len(G)) * G.shape[1] ** 3,
            )
        return W, figures

    def ranks(self) -> Int64:
        """Return the number of columns that are not left out."""
        return np.asarray((self.W.diagonal(axis1=1, axis2=2) != 0).sum(axis=1))

    def extremes(self) -> tuple[Float64, Float64]:
        """Return the least and the largest entry of the diagonals."""
        return extremes_of(self.G.diagonal(axis1=1, axis2=2))

    def spreads(self) -> Float64:
        """Return the sum of the squares of W for equilibrated columns."""
        return np.asarray(self._made[1][2])


@dataclass(frozen=True, eq=False)
class _Rebased:
    H: Float64
    sizes: Float64
    C: Float64
    W: Float64
    bound: Float64
    good: Flags

    def whole(self) -> Flags:
        """Return where no column is left out."""
        return np.asarray((self.C.diagonal(axis1=1, axis2=2) != 0).all(axis=1))

    def frobenius(self) -> Float64:
        """Return the root of the sum of squares of W for keys of unit columns."""
        with np.errstate(over="ignore"):
            return np.array([np.sqrt(np.sum(even * even)) for even in self._even()])

    def spectral(self) -> Float64:
        """Return the 2-norm of W for keys of unit columns."""
        return np.array([spectral_norm(even) for even in self._even()])

    def of_moments(self) -> Float64:
        """Return the 2-norm of the moments of keys of unit columns."""
        pairs = zip(self.H, self.sizes, strict=True)
        return np.array([spectral_norm(H / c[:, None] / c) for H, c in pairs])

    def _even(self) -> list[Float64]:
        return [c[:, None] * W for W, c in zip(self.W, self.sizes, strict=True)]


def inverse_cholesky(G: Float64, shift: float = 0.0, *, limit: Float64 | float | None = None) -> CpuInverses:
    """Factor small matrices, on first use of the result."""
    return CpuInverses(np.ascontiguousarray(G), shift, limit)


def rebased(H: Float64, sizes: Float64, bases: Float64 | None, shift: float, accepted: float) -> _Rebased:
    """Factor moments, each in its own basis, with a shift where needed."""
    made = inverse_cholesky(H)
    C, good = made.W, (made.pivot > 0) & (made.bound <= accepted)
    for item in np.flatnonzero(~good).tolist():
        tried = shift
        while not (again := inverse_cholesky(H[item : item + 1], tried)).pivot[0] > 0:
            tried *= 100
        C[item] = again.W[0]
    W = C if bases is None else np.stack([multiply(B, one) for B, one in zip(bases, C, strict=True)])
    return _Rebased(H, sizes, C, W, made.bound, good)
