"""Normalisers of queries from the factor of the keys, where rounding of the factor lets them be."""

from __future__ import annotations

from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._array import pick, to_device, to_numpy
from levattn._kernels import Float64, precise_products, precise_solutions, query_norms, span_kernels
from levattn.leverage import TIE
from levattn.linalg import UNIT, Factor

__all__ = [
    "LOWEST",
    "NORMALIZER_ERROR",
    "PRODUCT_ERROR",
    "add_squares",
    "even_queries",
    "nearly_exact_products",
    "normalizers_by",
    "precise_sum_error",
    "relative",
]

Exponents = npt.NDArray[np.int32]

NORMALIZER_ERROR = 1e-12  # estimated rounding, relative, from which on a normalizer is computed more precisely
PRODUCT_ERROR = TIE / 8  # the same for a product of a query and a key that makes a heavy entry
LOWEST = -(1 << 20)  # an exponent below all
_NOTHING = 2.0**-104  # what twice the precision does not see
_TAME = 200  # powers of two of queries and keys whose products and squares are in range as they are


def even_queries(Q: Any, exponents: npt.NDArray[np.int32]) -> tuple[Any, Any]:
    """Multiply queries by powers of two of the columns, and divide each by one (returned) that keeps it in range."""
    xp = array_api_compat.array_namespace(Q)
    if np.max(np.abs(exponents), initial=0) < _TAME:
        size = xp.max(xp.abs(Q), axis=1)
        if xp.all((size == 0) | ((size > 2.0**-_TAME) & (size < 2.0**_TAME))):
            return Q * to_device(np.ldexp(1.0, exponents), Q), xp.zeros(len(Q), dtype=xp.int32)
    fraction, exponent = xp.frexp(Q)
    exponent = xp.where(fraction != 0, exponent + to_device(exponents, Q), xp.full_like(exponent, LOWEST))
    powers = xp.max(exponent, axis=1)
    return xp.ldexp(fraction, exponent - powers[:, None]), powers


def normalizers_by(factor: Factor, Q: Any, N: Float64, exponents: Exponents) -> tuple[Any, Any]:
    """Return ``D = Σ ⟨q, k⟩²`` for each query, and by how much rounding may move √D, for a batch of one.

    N and `exponents` are those of `Factor.even_normalizer`, and the queries are multiplied by these powers of two. The
    relative error of the factor comes on top. Rounding is large beside √D only where queries are all but orthogonal to
    the keys.
    """
    xp = array_api_compat.array_namespace(Q)
    D, size = query_norms(Q, N)
    unit = UNIT * factor.rounding(0)
    loss = unit * xp.sqrt(size)
    doubtful = to_numpy(xp.nonzero(~(2 * loss <= NORMALIZER_ERROR * xp.sqrt(D)))[0])
    parts = factor.even_basis(0, exponents) if len(doubtful) else None
    if parts is not None:
        places, C = to_device(doubtful, D), parts[1]
        inverse = np.ascontiguousarray(precise_solutions(C, np.eye(len(C))).T)
        precise, few = query_norms(precise_solutions(parts[0], to_numpy(pick(Q, doubtful))), inverse)
        D[places], loss[places] = to_device(precise, D), to_device(unit * np.sqrt(few), D)
    return D, loss


def relative(loss: Any, D: Any) -> Any:
    """Return the relative error of D where √D is known up to `loss`; infinite for D = 0."""
    xp = array_api_compat.array_namespace(D)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        part = loss / xp.sqrt(D)
        return xp.where(D > 0, part * (2 + part), xp.full_like(D, float("inf")))


def nearly_exact_products(Q: Float64, K: Float64) -> Float64:
    """Return the products of all rows of Q and K in twice the precision, and exactly 0 where they are 0."""
    Z = precise_products(Q, K)
    sizes = np.abs(Q) @ np.max(np.abs(K), axis=0, initial=0.0)
    doubtful = np.nonzero((Z != 0) & (np.abs(Z) <= _NOTHING * Q.shape[1] ** 2 * sizes[:, None]))
    if len(doubtful[0]):
        span_kernels().mark_zeros(Q, K, *doubtful, Z)
    return Z


def add_squares(total: Float64, shift: Exponents, Z: Float64) -> tuple[Float64, Exponents]:
    """Add the squares of the rows of Z to sums of squares of numbers divided by 2^shift, which may be raised."""
    largest = np.max(np.abs(Z), axis=1, initial=0.0)
    power = np.maximum(shift, np.where(largest > 0, np.frexp(largest)[1], LOWEST)).astype(np.int32)
    squares = np.ldexp(Z, -power[:, None]) ** 2
    return np.ldexp(total, 2 * (shift - power)) + squares.sum(axis=1), power


def precise_sum_error(total: Float64, shift: Exponents, sizes: Float64, d: int, n: Any) -> Float64:
    """Return the relative error of sums of n squares of products in twice the precision.

    The queries have absolute sums `sizes`, the keys entries of at most 1. A product is rounded once, and errs by
    2^-104 d² of these sizes besides.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        loss = np.ldexp(_NOTHING * d * d * sizes, -shift) * np.sqrt(n / total)
        return np.where(total > 0, 4 * UNIT + (n**0.5 + 8) * UNIT + 2 * loss + loss**2, 0.0)


def _inverse(C: Float64) -> Float64:
    return precise_solutions(C, np.eye(len(C))).T.copy()
