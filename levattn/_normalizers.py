"""Normalisers of queries from the factor of the keys, where rounding of the factor lets them be."""

from __future__ import annotations

from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._array import pick, to_device, to_numpy
from levattn._kernels import Float64, precise_solutions, query_norms
from levattn.leverage import TIE
from levattn.linalg import UNIT, Factor

__all__ = ["NORMALIZER_ERROR", "PRODUCT_ERROR", "even_queries", "normalizers_by"]

NORMALIZER_ERROR = TIE / 2  # estimated relative error beyond which a normaliser is computed more precisely
PRODUCT_ERROR = TIE / 8  # the same for a product of a query and a key that makes a heavy entry
_TAME = 200  # powers of two of queries and keys whose products and squares are in range as they are


def even_queries(Q: Any, exponents: npt.NDArray[np.int32]) -> tuple[Any, Any]:
    """Multiply queries by powers of two of the columns, and divide each by one (returned) that keeps it in range."""
    xp = array_api_compat.array_namespace(Q)
    if np.max(np.abs(exponents), initial=0) < _TAME:
        size = xp.max(xp.abs(Q), axis=1)
        if xp.all((size == 0) | ((size > 2.0**-_TAME) & (size < 2.0**_TAME))):
            return Q * to_device(np.ldexp(1.0, exponents), Q), xp.zeros(len(Q), dtype=xp.int32)
    fraction, exponent = xp.frexp(Q)
    exponent = xp.where(fraction != 0, exponent + to_device(exponents, Q), xp.full_like(exponent, -(2**20)))
    powers = xp.max(exponent, axis=1)
    return xp.ldexp(fraction, exponent - powers[:, None]), powers


def normalizers_by(factor: Factor, Q: Any, N: Float64, exponents: npt.NDArray[np.int32]) -> tuple[Any, Any]:
    """Return ``Σ ⟨q, k⟩²`` for each query, and its estimated relative error, for a batch of one.

    N and `exponents` are those of `Factor.even_normalizer`, and the queries are multiplied by these powers of two. The
    error is large only where queries are all but orthogonal to rank-deficient keys, or the factor is as bad.
    """
    xp, d = array_api_compat.array_namespace(Q), Q.shape[1]
    D, size = query_norms(Q, N)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = 2 * UNIT * xp.sqrt(d * size / D) + float(factor.error[0])
    doubtful = to_numpy(xp.nonzero(~(error <= NORMALIZER_ERROR))[0])
    parts = factor.even_basis(0, exponents) if len(doubtful) else None
    if parts is not None and factor.error[0] <= NORMALIZER_ERROR:
        B, C = parts
        places = to_device(doubtful, D)
        solved = precise_solutions(B, to_numpy(pick(Q, doubtful)))
        D[places] = to_device(query_norms(solved, np.asarray(np.linalg.inv(C)))[0], D)
        error[places] = float(factor.error[0]) + 8 * d * UNIT
    return D, error
