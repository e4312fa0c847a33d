"""What the kernels of small matrices return."""

from __future__ import annotations

from typing import Any, Protocol

from levattn._core.types import Flags, Float64, Int64

__all__ = ["FactorKernels", "Inverses", "Rebased"]


class Inverses(Protocol):
    """Inverse Cholesky factors W of a batch of moments G, (b, d, d), and figures of each in main memory.

    On a device all figures come at once, as each copy is waited for. In main memory they are found when asked for, and
    so is W: the extremes of moments are looked at before anything is made of those that left the range.
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


class Rebased(Protocol):
    """What whitens the keys of some moments H, (b, d, d), about, and figures of it in main memory, as of `Inverses`.

    With D the diagonal of the norms of the keys' columns.
    """

    @property
    def C(self) -> Any:  # noqa: N802
        """The inverse factor of H, shifted where it is not `good`, beside the moments; upper triangular."""

    @property
    def W(self) -> Any:  # noqa: N802
        """The basis times C; C where there is none."""

    @property
    def bound(self) -> Float64:
        """Bounds (b,) as of `Inverses`, without a shift."""

    @property
    def good(self) -> Flags:
        """Where there is a factor without a shift, and its bound is accepted, (b,)."""

    def whole(self) -> Flags:
        """Return where C has no column of zeros, (b,)."""

    def frobenius(self) -> Float64:
        """Return the root of the sum of the squares of D W, (b,)."""

    def spectral(self) -> Float64:
        """Return the 2-norms of D W, to a few per cent, (b,)."""

    def of_moments(self) -> Float64:
        """Return the 2-norms of ``D⁻¹ H D⁻¹``, to a few per cent, (b,), where there is no basis."""


class FactorKernels(Protocol):
    """Inverse Cholesky factors, on the device of the matrices."""

    def inverse_cholesky(self, G: Any, shift: float = 0.0, /, *, limit: Any = None) -> Inverses:
        """Return W with ``Wᵀ(G + shift diag(G))W = I``, upper triangular, and what is known of it.

        Columns of zeros are left out (their row and column of W are zero). Bounds above `limit`, a number for all or
        one for each (b,), give way to the norm itself, to a few per cent, where that is less.
        """

    def rebased(self, H: Any, sizes: Any, bases: Any, shift: float, accepted: float, /) -> Rebased:
        """Return a round of shifted Cholesky QR: what whitens keys whose moments in `bases` (b, d, d) are H.

        Where H has no factor, or a bound above `accepted`, it is factored with the shift, and with a hundred times as
        much until there is one. `sizes` (b, d) are the norms of the columns of the keys, of which on a device none is
        zero. Bases are upper triangular; without them H is of the keys themselves.
        """
