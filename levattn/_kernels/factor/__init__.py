"""Kernels of inverse Cholesky factors of small matrices."""

from __future__ import annotations

from typing import Any, Protocol

from levattn._core.types import Flags, Float64, Int64


class Inverses(Protocol):
    """Inverse Cholesky factors W of a batch of moments G, (b, d, d), and figures of each in main memory.

    A device computes all figures at once, because the caller waits for each copy. The CPU computes W and the figures
    on first use, because callers first check the extremes of G for overflow.
    """

    @property
    def W(self) -> Any:  # noqa: N802
        """The upper-triangular factors, on the device of the moments; meaningless where the pivot is not positive."""

    @property
    def pivot(self) -> Float64:
        """The smallest pivot, (b,)."""

    @property
    def bound(self) -> Float64:
        """Bounds (b,) of the squared spectral norm of the inverse factor of G scaled to unit diagonal.

        The relative error of a score is at most the bound times the relative error of G. Without W it is infinite.
        """

    def ranks(self) -> Int64:
        """Return the number of columns that are not left out, (b,)."""

    def extremes(self) -> tuple[Float64, Float64]:
        """Return the least and the largest entry of the diagonals of G, (b,); NaN entries fail any comparison."""

    def spreads(self) -> Float64:
        """Return ``Σ G_ii W_ij²``, the sum of the squares of W for equilibrated columns, (b,); G is not shifted."""


class Rebased(Protocol):
    """Approximate whitening matrices for keys with moments H, (b, d, d), and their figures, as for `Inverses`.

    D is the diagonal matrix of the norms of the keys' columns.
    """

    @property
    def C(self) -> Any:  # noqa: N802
        """The upper-triangular inverse factor of H, with a shift where it is not `good`; on the device of H."""

    @property
    def W(self) -> Any:  # noqa: N802
        """The basis times C, or C without a basis."""

    @property
    def bound(self) -> Float64:
        """Bounds (b,), as for `Inverses`, without a shift."""

    @property
    def good(self) -> Flags:
        """True where H has a factor without a shift, and its bound is accepted, (b,)."""

    def whole(self) -> Flags:
        """Return where C has no column of zeros, (b,)."""

    def frobenius(self) -> Float64:
        """Return the root of the sum of the squares of D W, (b,)."""

    def spectral(self) -> Float64:
        """Return the 2-norms of D W, to a few per cent, (b,)."""

    def of_moments(self) -> Float64:
        """Return the 2-norms of ``D⁻¹ H D⁻¹``, to a few per cent, (b,); only without a basis."""


class FactorKernels(Protocol):
    """Inverse Cholesky factors, on the device of the matrices."""

    def inverse_cholesky(self, G: Any, shift: float = 0.0, /, *, limit: Any = None) -> Inverses:
        """Return upper-triangular W with ``Wᵀ(G + shift diag(G))W = I``, and its figures.

        Columns of zeros are left out (their row and column of W are zero). `limit` is a number for all matrices or one
        for each, (b,). The norm itself, to a few per cent, replaces a bound above the limit, where it is less.
        """

    def rebased(self, H: Any, sizes: Any, bases: Any, shift: float, accepted: float, /) -> Rebased:
        """Return a round of shifted Cholesky QR: whitening matrices of keys whose moments in `bases` (b, d, d) are H.

        Where H has no factor, or a bound above `accepted`, it is factored with the shift. The shift grows a
        hundredfold until H has a factor. `sizes` (b, d) are the norms of the columns of the keys; on a device none may
        be zero. Bases are upper triangular; without them H holds the moments of the keys themselves.
        """
