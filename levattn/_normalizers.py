"""Normalisers of queries from the factor of the keys, where rounding of the factor lets them be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from levattn._kernels import Float64, precise_solutions, query_norms
from levattn.leverage import TIE
from levattn.linalg import UNIT, Factor

__all__ = ["NORMALIZER_ERROR", "PRODUCT_ERROR", "even_queries", "normalizers_by"]

NORMALIZER_ERROR = TIE / 2  # estimated relative error beyond which a normaliser is computed more precisely
PRODUCT_ERROR = TIE / 8  # the same for a product of a query and a key that makes a heavy entry
_TAME = 200  # powers of two of queries and keys whose products and squares are in range as they are


def even_queries(Q: Float64, exponents: npt.NDArray[np.int32]) -> tuple[Float64, npt.NDArray[np.int32]]:
    """Multiply queries by powers of two of the columns, and divide each by one (returned) that keeps it in range."""
    if np.max(np.abs(exponents), initial=0) < _TAME:
        size = np.max(np.abs(Q), axis=1, initial=0.0)
        if np.all((size == 0) | ((size > 2.0**-_TAME) & (size < 2.0**_TAME))):
            return Q * np.ldexp(1.0, exponents), np.zeros(len(Q), np.int32)
    fraction, exponent = np.frexp(Q)
    exponent = exponent + exponents
    powers = np.max(np.where(fraction != 0, exponent, np.iinfo(np.int32).min // 4), axis=1, initial=-(2**20))
    return np.ldexp(fraction, exponent - powers[:, None]), powers


def normalizers_by(
    factor: Factor, Q: Float64, N: Float64, exponents: npt.NDArray[np.int32]
) -> tuple[Float64, Float64]:
    """Return ``Σ ⟨q, k⟩²`` for each query, and its estimated relative error, for a batch of one.

    N and `exponents` are those of `Factor.even_normalizer`, and the queries are multiplied by these powers of two. The
    error is large only where queries are all but orthogonal to rank-deficient keys, or the factor is as bad.
    """
    d = Q.shape[1]
    D, size = query_norms(Q, N)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = 2 * UNIT * np.sqrt(d * size / D) + float(factor.error[0])
    doubtful = np.flatnonzero(~(error <= NORMALIZER_ERROR))
    parts = factor.even_basis(0, exponents) if len(doubtful) else None
    if parts is not None and factor.error[0] <= NORMALIZER_ERROR:
        B, C = parts
        D[doubtful] = query_norms(precise_solutions(B, Q[doubtful]), np.asarray(np.linalg.inv(C)))[0]
        error[doubtful] = float(factor.error[0]) + 8 * d * UNIT
    return D, error
