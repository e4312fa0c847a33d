"""Heavy entries and normalizers of functions other than x², in main memory, and the entries of any function."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices, to_float64
from levattn._core.checks import TIE
from levattn._core.types import Float64
from levattn._kernels import HEAVY
from levattn.functions import AttentionFunction, Power, Softmax
from levattn.heavy.normalizers import LEAST, LOWEST, PRODUCT_ERROR, SUM_ERROR, even_queries, flushed
from levattn.heavy.result import Figures, HeavyAttention, PreciseQueries, Products
from levattn.sensitivity.certificates import lifted_sums
from levattn.sensitivity.shares import (
    LEAST_POSITIVE,
    certain_products,
    entry_change,
    evaluation_error,
    mild_changes,
    mild_entry_change,
    product_noise,
    sums,
    uncertain_sums,
)
from levattn.sets.result import UniversalSet

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_LARGEST_POWER = 1000  # of two in a query
_LARGEST_SHARE = 500  # of two in a term of a sum
_UNKNOWN = 0.1  # relative error of scores above which a query counts as unknown
_FEW_QUERIES = 1024  # in a block whose sums are computed again


def of_other_function(
    Q: Float64,
    selected: Float64,
    keys: Matrices,
    universal: UniversalSet,
    epsilon: float,
    f: AttentionFunction | Softmax,
) -> HeavyAttention:
    """Return the result of `heavy_attention` for a function whose normalizer is a sum over all keys."""
    if isinstance(f, Softmax):
        _check_radius(Q, f)
    powers, lost = np.zeros(len(Q), np.int32), np.zeros(len(Q), np.bool_)
    if isinstance(f, Power):  # homogeneous: taking out the scale of a query keeps powers in range
        N, exponents = universal.factor.even_normalizer(0)
        Q = np.where(np.any(N != 0, axis=0), Q, 0.0)  # no key has other columns
        even, taken = even_queries(Q, exponents)
        powers = np.frexp(np.sqrt(HEAVY.query_norms(even, N)[0]))[1].astype(np.int32)
        largest = np.max(np.abs(even), axis=1, initial=0.0)
        powers = np.where(largest > 0, powers, 0) + taken
        fraction, exponent = np.frexp(Q)
        top, tiny = np.max(exponent, axis=1, initial=0), np.where(exponents < -_LARGEST_SHARE, exponents, 0)
        if tiny.any() and (powers < top - _LARGEST_POWER).any():
            # no query is large enough for such keys: they grow, without rounding, and the queries shrink
            with np.errstate(over="ignore"):  # of keys that take no part
                keys = replace(keys, data=np.ldexp(to_float64(keys.data, keys.format), -tiny), format="float64")
            selected, exponent = np.ldexp(selected, -tiny), exponent + tiny
            top = np.max(np.where(fraction != 0, exponent, LOWEST), axis=1, initial=LOWEST)
            universal = replace(universal, _lift=None)  # which is of the keys as they were
        least = np.min(np.where(fraction != 0, exponent, 1 << 20), axis=1, initial=1 << 20)
        powers = np.clip(least + 1021, powers - int(_LARGEST_SHARE / max(f.p, 1)), powers)  # no entry loses digits
        powers = np.maximum(powers, top - _LARGEST_POWER)
        given, Q = Q, np.ldexp(fraction, exponent - powers[:, None])
        lost = flushed(given, Q)
    D, error, precise = _other_sums(Q, selected, keys, universal, epsilon, f)
    error, precise = np.where(lost, np.inf, error), precise | lost
    places = np.flatnonzero(precise)
    multiply = partial(_certain, Q[places], selected, not isinstance(f, Softmax))
    rest = PreciseQueries(places, D[places], error[places], multiply)
    products = Products(universal, f, Q, selected, D, precise, error, epsilon, rest)
    captured = np.zeros(len(Q))
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
    for part, scores in products.scores():
        captured[part] = scores.sum(axis=1)
        i, j, heavy = heavy_places(scores, epsilon, error[part])
        found.append((part[i], universal.indices[j], heavy))
    captured = np.clip(captured, 0.0, 1.0)
    with np.errstate(over="ignore"):
        normalizers = np.exp(D) if isinstance(f, Softmax) else D
        if isinstance(f, Power):
            normalizers = _powered(D, f.p * powers)
    residual = np.where(products.live, 1 - captured, 0.0)
    return HeavyAttention(
        universal=universal,
        _products=products,
        _figures=Figures(keys.n, normalizers, captured, residual, error, csr_of(found, (len(Q), keys.n))),
    )


def _certain(Q: Float64, keys: Float64, zeros: bool, part: slice) -> Float64:
    """Return the products of a part of the queries with the keys, as in twice the precision."""
    return certain_products(Q[part], keys, zeros=zeros)[0]


def _powered(D: Float64, powers: npt.NDArray[Any]) -> Float64:
    """Return D times 2 to these powers, which need not be whole; infinite or 0 where that leaves the range."""
    whole = np.floor(powers)
    return np.asarray(np.ldexp(D * 2.0 ** (powers - whole), np.clip(whole, -(2**20), 2**20).astype(np.int32)))


def heavy_places(
    scores: Float64, epsilon: float, error: Float64
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Float64]:
    """Return the rows, columns and values of scores (m, k) that may be at least ε, for relative errors (m,)."""
    least = np.maximum(epsilon * (1 - np.maximum(TIE, 4 * error)), LEAST_POSITIVE)
    places = np.flatnonzero(scores >= least[:, None])  # faster than to look for rows and columns at once
    i, j = np.divmod(places, max(scores.shape[1], 1))
    return i, j, scores.ravel()[places]


def csr_of(
    found: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Float64]], shape: tuple[int, int]
) -> csr_array:
    """Return the matrix of entries found in parts: rows, columns and values."""
    from scipy.sparse import csr_array

    rows, columns, values = (np.concatenate(each) for each in zip(*found, strict=True))
    return csr_array((values, (rows, columns)), shape=shape)


def _check_radius(Q: Float64, f: Softmax) -> None:
    """Raise if a query lies outside the ball or ellipsoid for which softmax is certified."""
    bad = np.flatnonzero(~f.contains(Q))
    if len(bad):
        raise ValueError(
            f"Q has {len(bad)} queries outside the set of f = {f!r}, first in rows {bad[:5].tolist()}; "
            "expected queries within the radius. Give a larger radius (with the scale of the logits multiplied in)"
        )


def _other_sums(
    Q: Float64,
    selected: Float64,
    keys: Matrices,
    universal: UniversalSet,
    epsilon: float,
    f: AttentionFunction | Softmax,
) -> tuple[Float64, Float64, npt.NDArray[np.bool_]]:
    """Return Σ f(⟨q, k⟩) for each query, the error of its scores of ε, and flags of queries with precise products.

    The sums are of products in float64, or come from lifted moments where these are known and cost less. The sums
    alone may not show that rounding is harmless; then the error of every product is bounded. If that is not enough,
    the products are computed as in twice the precision.
    """
    D, error = _mild_sums(Q, selected, keys, universal, epsilon, f)
    doubtful = np.zeros(len(Q), np.bool_)
    for precise in (False, True):
        doubtful = ~(error <= PRODUCT_ERROR)
        for part in np.array_split(np.flatnonzero(doubtful), -(-int(doubtful.sum()) // _FEW_QUERIES) or 1):
            if not len(part):
                continue
            D[part], change, adding = uncertain_sums(Q[part], keys, universal.present, f, precise=precise)
            entry = entry_change(Q[part], selected, f, D[part], epsilon, precise=precise)
            error[part] = change + entry + np.where(D[part] == 0, 0.0, adding + evaluation_error(f, D[part], epsilon))
            if precise:
                error[part] = np.where(error[part] <= _UNKNOWN, error[part], np.inf)
                if not isinstance(f, Softmax):
                    D[part] = np.where((D[part] == 0) & (error[part] > 0), LEAST, D[part])
    return D, error, doubtful


def _mild_sums(
    Q: Float64,
    selected: Float64,
    keys: Matrices,
    universal: UniversalSet,
    epsilon: float,
    f: AttentionFunction | Softmax,
) -> tuple[Float64, Float64]:
    """Return the sums in float64, and the error of the sums and of scores of ε, as far as the sums bound it."""
    lift, d = universal._lift, Q.shape[1]
    D, error, others = np.zeros(len(Q)), np.zeros(len(Q)), np.full(len(Q), True)
    with np.errstate(over="ignore"):
        if lift is not None and universal.rank == d and lift.rows.shape[2] ** 2 <= keys.n * d and isinstance(f, Power):
            D, error = lifted_sums(Q, universal.factor, lift, round(f.p / 2))
            others = ~(error <= SUM_ERROR)
        if others.any() or not len(Q):
            D[others], largest, error[others] = sums(Q[others], keys, universal.present, f)
            count = keys.n
        else:
            largest, count = np.max(np.abs(selected), axis=0, initial=0.0), len(selected)
        noise = product_noise(np.abs(Q) @ largest, d)
        change = mild_changes(f, D, count, noise) + mild_entry_change(f, D, epsilon, noise)
        nothing = (D == 0) & ~np.any(Q, axis=1) & (not isinstance(f, Softmax))  # queries of zeros
        return D, np.where(nothing, 0.0, error + change + evaluation_error(f, D, epsilon))
