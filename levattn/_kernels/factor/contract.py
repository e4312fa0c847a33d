"""What the kernels of small matrices return."""

from __future__ import annotations

from typing import Any, Protocol

from levattn._core.types import Float64

__all__ = ["FactorKernels"]


class FactorKernels(Protocol):
    """Inverse Cholesky factors, on the device of the matrices."""

    def inverse_cholesky(self, G: Any, shift: float = 0.0, /) -> tuple[Any, Float64, Float64]:
        """Return W with ``Wᵀ(G + shift diag(G))W = I``, its smallest pivot, and a bound of its norm.

        W is upper triangular; a pivot that is not positive says that the item failed and its W is void. The bound is
        of the squared spectral norm of the inverse factor of G scaled to unit diagonal, which carries the relative
        error of G to that of a score. Columns of zeros are left out (their row and column of W are zero).
        """
