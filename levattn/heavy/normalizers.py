"""Normalizers of queries from the factor of the keys, where rounding of the factor is harmless."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import array_namespace, take_entries, to_device, to_numpy
from levattn._core.checks import TIE
from levattn._core.types import Float64
from levattn._kernels import HEAVY, PRECISE
from levattn.exceptions import NonFiniteError
from levattn.linalg.accumulator import UNIT, Exponents
from levattn.linalg.factor import Factor, even_basis, normalizer_rounding
from levattn.linalg.span import zero_products

EvenRows = tuple[Float64, Exponents, npt.NDArray[np.bool_]]  # as returned by `even_rows`

NORMALIZER_ERROR = 1e-12  # estimated relative rounding above which a normalizer is computed more precisely
PRODUCT_ERROR = TIE / 16  # largest error of a product of a query and a key that makes a heavy entry
SUM_ERROR = TIE / 2  # the same above which a normalizer is summed over the keys
LEAST = 2.0**-1022  # stands for an unknown score
LOWEST = -(1 << 20)  # an exponent below all
_UNKNOWN = 0.1  # relative error of a root above which a sum counts as unknown
_NOTHING = 2.0**-104  # relative rounding of twice the precision
_TAME = 200  # powers of two of queries and keys whose products and squares are in range without scaling


def require_finite_queries(finite: npt.NDArray[np.bool_], before: int = 0) -> None:
    """Raise where a query, numbered from `before` on, is not finite."""
    bad = np.flatnonzero(~finite)[:5] + before
    if len(bad):
        raise NonFiniteError(f"Q holds NaN or infinity, first in rows {bad.tolist()}; expected finite queries")


def even_queries(Q: Any, exponents: npt.NDArray[np.int32]) -> tuple[Any, Any]:
    """Multiply queries by powers of two of the columns, and divide each by a power (returned) to keep it in range."""
    xp = array_namespace(Q)
    if np.max(np.abs(exponents), initial=0) < _TAME:
        size = xp.max(xp.abs(Q), axis=1)
        if xp.all((size == 0) | ((size > 2.0**-_TAME) & (size < 2.0**_TAME))):
            return Q * to_device(np.ldexp(1.0, exponents), Q), xp.zeros(len(Q), dtype=xp.int32)
    fraction, exponent = xp.frexp(Q)
    exponent = xp.where(fraction != 0, exponent + to_device(exponents, Q), xp.full_like(exponent, LOWEST))
    powers = xp.max(exponent, axis=1)
    return xp.ldexp(fraction, exponent - powers[:, None]), powers


def normalizers_by(factor: Factor, Q: Any, N: Float64, exponents: Exponents) -> tuple[Any, Any]:
    """Return ``D = Σ ⟨q, k⟩²`` for each query, and the largest rounding error of √D, for a batch of one.

    N and `exponents` come from `Factor.even_normalizer`, and the queries include these powers of two. The relative
    error of the factor comes on top. Rounding is large beside √D only where queries are nearly orthogonal to the keys.
    """
    xp = array_namespace(Q)
    D, size = HEAVY.query_norms(Q, N)
    unit = UNIT * normalizer_rounding(factor, 0)
    loss = unit * xp.sqrt(size)
    doubtful = to_numpy(xp.nonzero(~(2 * loss <= NORMALIZER_ERROR * xp.sqrt(D)))[0])
    parts = even_basis(factor, 0, exponents) if len(doubtful) else None
    if parts is not None:
        places, C = to_device(doubtful, D), parts[1]
        inverse = np.ascontiguousarray(PRECISE.precise_solutions(C, np.eye(len(C))).T)
        Y = PRECISE.precise_solutions(parts[0], to_numpy(take_entries(Q, doubtful)))
        precise, few = HEAVY.query_norms(Y, inverse)
        D[places], loss[places] = to_device(precise, D), to_device(unit * np.sqrt(few), D)
    return D, loss


def relative(loss: Any, D: Any) -> Any:
    """Return the relative error of D where √D is known up to `loss`; infinite for D = 0."""
    xp = array_namespace(D)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        part = loss / xp.sqrt(D)
        return xp.where(D > 0, part * (2 + part), xp.full_like(D, float("inf")))


class PreciseSums:
    """Sums of squared products of some queries and all keys, in twice the precision.

    Their units keep them in range, and a product that may be zero is decided exactly. The keys come in parts, as from
    `even_rows`.
    """

    def __init__(self, Q: Float64) -> None:
        self.Q = Q
        self.shift: Exponents = np.full(len(Q), LOWEST, np.int32)  # sums are of products divided by 2^shift
        self._total, self._noise, self._unknown = np.zeros(len(Q)), np.zeros(len(Q)), np.zeros(len(Q), np.bool_)
        self._sizes = np.sqrt(np.sum(Q * Q, axis=1))

    def add(self, K: Float64, powers: Exponents, lost: npt.NDArray[np.bool_], among: Any = 1.0) -> Float64:
        """Add the keys 2^powers K, for each query only the keys `among` these; return the products with K.

        No product with a key in `lost` can be decided exactly: where that is needed, the error is infinite.
        """
        Z, sizes = PRECISE.precise_products(self.Q, K), np.sqrt(np.sum(K * K, axis=1))
        noise = _NOTHING * K.shape[1] ** 2 * self._sizes[:, None] * sizes
        nothing = noise == 0
        doubtful = np.nonzero((np.abs(Z) <= noise) & ~nothing)
        if len(doubtful[0]):
            nothing |= zero_products(self.Q, K, doubtful)
            known = ~lost | (noise == 0)
            self._unknown |= np.any(nothing & ~known & (among > 0), axis=1)
            nothing &= known
            # a nonzero product may be computed as zero
            Z = np.where(nothing, 0.0, np.where(Z == 0, noise, Z))
        Z *= among
        live = Z != 0
        top = np.max(np.where(live, np.frexp(Z)[1] + powers, LOWEST), axis=1, initial=LOWEST)
        shift = np.maximum(self.shift, top).astype(np.int32)
        change, unit = 2 * (self.shift - shift), powers - shift[:, None]
        with np.errstate(over="ignore"):
            self._total = np.ldexp(self._total, change) + np.sum(np.ldexp(Z, unit) ** 2, axis=1)
            self._noise = np.ldexp(self._noise, change) + np.sum(
                np.ldexp(np.where(live, noise, 0.0), unit) ** 2, axis=1
            )
        self.shift = shift
        return Z

    def squares(self, Z: Float64, powers: Exponents) -> Float64:
        """Return squares of products that `add` returned, in the units of the sums."""
        return np.asarray(np.ldexp(Z, powers - self.shift[:, None]) ** 2)

    def result(self, count: Any) -> tuple[Float64, Float64, Float64]:
        """Return the sums, over `count` keys, their relative error, and the error of the root from the products.

        Both errors are infinite where a sum is unknown.
        """
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            root = np.where(self._total > 0, np.sqrt(self._noise / self._total), 0.0)
            root[self._unknown | (root > _UNKNOWN)] = np.inf
            error = np.where(self._total > 0, (np.sqrt(count) + 12) * UNIT + root * (2 + root), 0.0)
        return self._total, error, root


def precise_error(root: Float64, size: Float64, least: Float64) -> Float64:
    """Return the error of products in twice the precision that make a term of at least `least`.

    `size` is the sum of squares over the keys, and `root` the relative error of its root, infinite where unknown.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        error = root * np.sqrt(size / least)
    return np.asarray(UNIT + np.where(np.isinf(root), np.inf, np.where(np.isnan(error), 0.0, error)))


def flushed(X: Any, even: Any) -> Any:
    """Tell which rows lost digits of an entry when they were scaled to about 1, so that their products are unknown."""
    xp = array_namespace(X)
    small = xp.abs(even) < 2.0**-1022
    return xp.any((X != 0) & small, axis=1) if xp.any(small) else small[:, 0]


def even_rows(X: Float64, exponents: Exponents) -> EvenRows:
    """Multiply rows by powers of two of the columns, and divide each by a power (returned) to bring it to about 1.

    Also return flags of the rows that lost digits.
    """
    fraction, exponent = np.frexp(X)
    exponent = np.where(fraction != 0, exponent + exponents, LOWEST)
    powers = np.max(exponent, axis=1, initial=LOWEST)
    even = np.ldexp(fraction, exponent - powers[:, None])
    return even, np.where(powers > LOWEST, powers, 0).astype(np.int32), flushed(X, even)
