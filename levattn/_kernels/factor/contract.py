"""What the kernels of small matrices return."""

from __future__ import annotations

from typing import Any, Protocol

from levattn._core.types import Float64, Int64

__all__ = ["FactorKernels", "Inverses"]


class Inverses(Protocol):
    """Inverse Cholesky factors W of a batch of moments G, (b, d, d), and figures of each in main memory.

    On a device all figures come at once, as each copy is waited for; in main memory they are found when asked for.
    """

    @property
    def W(self) -> Any:  # noqa: N802
        """Upper triangular, beside the moments; void where the pivot is not positive."""

    @property
    def pivot(self) -> Float64:
        """The smallest pivot, (b,)."""

    @property
    def bound(self) -> Float64:
        """Bounds (b,) of the squared spectral norm of the inverse factor of G scaled to unit diagonal.

        They carry the relative error of G to that of a score, and are infinite where there is no W.
        """

    def ranks(self) -> Int64:
        """Return the number of columns that are not left out, (b,)."""

    def extremes(self) -> tuple[Float64, Float64]:
        """Return the least and the largest entry of the diagonals of G, (b,); where one is NaN no bound holds them."""

    def spreads(self) -> Float64:
        """Return ``Σ G_ii W_ij²``, the sum of the squares of W for equilibrated columns, (b,); G is not shifted."""


class FactorKernels(Protocol):
    """Inverse Cholesky factors, on the device of the matrices."""

    def inverse_cholesky(self, G: Any, shift: float = 0.0, /, *, limit: Any = None) -> Inverses:
        """Return W with ``Wᵀ(G + shift diag(G))W = I``, upper triangular, and what is known of it.

        Columns of zeros are left out (their row and column of W are zero). Bounds above `limit`, a number for all or
        one for each (b,), give way to the norm itself, to a few per cent, where that is less.
        """
