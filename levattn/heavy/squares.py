"""Heavy attention for f(x) = x²: normalizers from the factor of the keys, and entries, which a sketch may find."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices, array_namespace, take_entries, to_device, to_float64, to_numpy
from levattn._core.checks import TIE
from levattn._core.random import below, signs, words
from levattn._core.types import Float64
from levattn._kernels import HEAVY, SKETCH, Rows
from levattn.functions import Power
from levattn.heavy.entries import csr_of, heavy_places
from levattn.heavy.normalizers import (
    PRODUCT_ERROR,
    SUM_ERROR,
    EvenRows,
    PreciseSums,
    even_queries,
    even_rows,
    flushed,
    normalizers_by,
    precise_error,
    relative,
)
from levattn.heavy.result import Figures, HeavyAttention, PreciseQueries, Products
from levattn.linalg.accumulator import UNIT
from levattn.sensitivity.approximate import FAILURE, projection_spread
from levattn.sensitivity.shares import BLOCK_ENTRIES
from levattn.sets.result import UniversalSet
from levattn.sketch import OSNAP, CountSketch, GaussianJL, jl_size

if TYPE_CHECKING:
    from scipy.sparse import csr_array


_PLACES = 102  # random stream
_ENTRIES = 1 << 22  # estimates in memory at a time

Recovered = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Float64]


def recovery_size(m: int, epsilon: float, n: int) -> tuple[int, int]:
    """Return buckets and repetitions that miss any of at most m/ε heavy entries with probability at most `FAILURE`.

    In one repetition the estimate of ⟨q, k⟩ has a variance of at most D/buckets. So its error exceeds √(εD)/2 with a
    probability of at most 4/(buckets ε) = 1/8. The probability that this happens in more than half of the repetitions
    is at most (4 · 1/8 · 7/8)^(repetitions/2). Otherwise the median of a heavy entry is at least √(εD)/2. If n keys
    are in 8 n buckets, a key shares its bucket with a probability of at most 1/8, and else its estimate is exact.
    """
    buckets = math.ceil(min(32 / epsilon, 8 * max(n, 1)))
    repetitions = 2 * (math.log(FAILURE / max(m, 1)) + math.log(epsilon)) / math.log(4 * (1 / 8) * (7 / 8))
    return buckets, math.ceil(repetitions) | 1


def recovered_entries(Q: Float64, keys: Float64, D: Float64, epsilon: float, sketch: CountSketch | OSNAP) -> Recovered:
    """Return rows, columns and scores of the entries of at least ε that a CountSketch of the keys finds.

    The keys are sketched, not the queries: est = sign · ⟨q, bucket of the key⟩, and the median of the repetitions.
    Entries whose estimates could be heavy are computed. Rows with D = 0 have no entries.
    """
    n, d = keys.shape
    seed, repetitions = sketch.seed, sketch.nonzeros if isinstance(sketch, OSNAP) else 1
    buckets = sketch.size // repetitions
    drawn = words(seed, _PLACES, 0, n, repetitions)
    buckets_of = below(drawn, buckets) + buckets * np.arange(repetitions)
    sign = signs(drawn).astype(np.float64)
    sketched = np.zeros((1, buckets * repetitions, d))
    rows = Rows(keys[None], "float64")
    SKETCH.scatter(rows, seed, _PLACES, 0, repetitions, buckets, sketched)
    found: list[Recovered] = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
    step = max(1, _ENTRIES // max(n * repetitions, buckets * repetitions, 1))
    for start in range(0, len(Q), step):
        part = slice(start, start + step)
        P = Q[part] @ sketched[0].T
        estimates = np.median(P[:, buckets_of] * sign, axis=2)
        live = D[part] > 0
        i, j = np.nonzero((estimates**2 >= 0.25 * epsilon * D[part, None]) & live[:, None])
        products = np.einsum("ij,ij->i", Q[part][i], keys[j])
        scores = products**2 / D[part][i]
        large = scores >= epsilon
        found.append((i[large] + start, j[large], scores[large]))
    i, j, scores = (np.concatenate(each) for each in zip(*found, strict=True))
    return i, j, scores


HeavyMethod = Literal["auto", "countsketch", "jl"] | CountSketch | OSNAP | GaussianJL
HEAVY_NAMES, HEAVY_SKETCHES = ("auto", "countsketch", "jl"), (CountSketch, OSNAP, GaussianJL)


def of_squares(
    Q: Any,
    selected: Any,
    keys: Matrices,
    universal: UniversalSet,
    epsilon: float,
    method: HeavyMethod,
) -> HeavyAttention:
    """Return the result of `heavy_attention` for f(x) = x², queries Q and the keys of the set in float64."""
    xp = array_namespace(Q)
    N, exponents = universal.factor.even_normalizer(0)
    reached = np.any(N != 0, axis=0)
    if not reached.all():  # no key has other columns
        Q = xp.where(to_device(reached, Q), Q, 0.0)
    even, powers = even_queries(Q, exponents)
    distortion, shift = 0.0, xp.zeros(len(even), dtype=xp.int32)
    if method == "jl" or isinstance(method, GaussianJL):
        D, error, distortion, epsilon = _estimated(even, N, epsilon, method)
    else:
        D, error, shift = _normalizers(even, N, exponents, universal, keys)
    products = _prepared(universal, even, selected, exponents, D, error, shift, flushed(Q, even), epsilon)
    found: Any
    others = None
    if method == "countsketch":
        buckets, repetitions = recovery_size(len(Q), epsilon, len(selected))
        method = OSNAP(buckets * repetitions, repetitions)
    if isinstance(method, CountSketch | OSNAP):
        found, captured = _recovered(products, universal.indices, keys.n, epsilon, method)
    else:
        found, others, captured = _entries(products, universal.indices, keys.n, epsilon)
    with np.errstate(over="ignore"):
        normalizers = xp.ldexp(D, 2 * (powers + shift))
    residual = xp.where(D > 0, 1 - captured, 0.0)
    return HeavyAttention(
        universal=universal,
        _products=products,
        _figures=Figures(keys.n, normalizers, captured, residual, products.error, found, others),
        distortion=distortion,
    )


def _estimated(
    Q: Float64, N: Float64, epsilon: float, method: Literal["jl"] | GaussianJL
) -> tuple[Float64, Float64, float, float]:
    """Return normalizers ``‖ΠNq‖²`` from a projection Π, their errors, the largest, and the ε that allows for it."""
    default = jl_size(max(len(Q), 1), 0.5, FAILURE)
    family = GaussianJL(default) if method == "jl" else method
    Y = Q @ (family.columns(family.seed, 0, len(N)) * family.scale @ N).T
    D, (short, more) = np.einsum("ij,ij->i", Y, Y), projection_spread(family.size, len(Q))
    distortion = max(short, more)
    if distortion >= 1:
        raise ValueError(
            f"method is {family!r}, which leaves normalizers of {len(Q)} queries without a bound; expected more "
            f"columns, such as {default}"
        )
    return D, np.full(len(D), distortion / (1 - distortion)), distortion, epsilon / (1 + more)


def _prepared(
    universal: UniversalSet,
    Q: Any,
    selected: Any,
    exponents: npt.NDArray[np.int32],
    D: Any,
    error: Any,
    shift: Any,
    lost: Any,
    epsilon: float,
) -> Products:
    """Decide which queries need more than float64 for the products that make an entry of at least ε.

    The keys of the set are in units of powers of two of their columns, and D in units of 4^shift. Queries in `lost`
    have entries out of range, so their products are unknown.
    """
    xp, d = array_namespace(Q), Q.shape[1]
    keys = xp.ldexp(selected, to_device(-exponents, selected))
    largest = xp.max(xp.abs(keys), axis=0) if len(keys) else xp.zeros(d)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        product = d * UNIT * xp.where(D > 0, xp.einsum("ij,j->i", xp.abs(Q), largest) / xp.sqrt(epsilon * D), 0.0)
    precise = (product > PRODUCT_ERROR) | (error > TIE / 8) | (shift != 0) | lost
    places = to_numpy(xp.nonzero(precise)[0])
    if not len(places):
        error = xp.where(D > 0, error + 2 * product, 0.0)
        return Products(universal, Power(2.0), Q, keys, D, precise, error, epsilon, few=None)
    # these few queries continue in main memory
    few, its_D, its_shift = (to_numpy(take_entries(array, places)) for array in (Q, D, shift))
    K, units, unknown = even_rows(to_numpy(selected), -exponents)
    for part in np.array_split(np.arange(len(few)), max(1, len(few) * len(K) // BLOCK_ENTRIES)):
        sums = PreciseSums(few[part])
        sums.add(K, units, unknown)
        total, _, root = sums.result(len(K))
        size = np.ldexp(total, 2 * np.where(total > 0, sums.shift - its_shift[part], 0))
        product[to_device(places[part], D)] = to_device(precise_error(root, size, epsilon * its_D[part]), D)
    error = xp.where(D > 0, error + 2 * product, 0.0)
    error = xp.where(lost, xp.full_like(error, float("inf")), error)

    multiply = partial(_in_units, few, (K, units, unknown), its_shift)
    rest = PreciseQueries(places, its_D, to_numpy(take_entries(error, places)), multiply)
    return Products(universal, Power(2.0), Q, keys, D, precise, error, epsilon, rest)


def _in_units(Q: Float64, keys: EvenRows, shift: npt.NDArray[np.int32], part: slice) -> Float64:
    """Return the products of a part of the queries with the keys, over 2^shift."""
    Z = PreciseSums(Q[part]).add(*keys)
    with np.errstate(over="ignore"):  # of queries whose normalizer is 0
        return np.asarray(np.ldexp(Z, keys[1] - shift[part, None]))


def _entries(
    products: Products, indices: npt.NDArray[np.int64], n: int, epsilon: float
) -> tuple[tuple[Any, Any, Any], csr_array | None, Any]:
    """Return the scores of at least ε, separately for precise queries, and the mass on the keys of the set."""
    xp = array_namespace(products.queries)
    D = xp.where(products.precise, 0.0, products.normalizers)
    starts, columns, values, captured = HEAVY.heavy_entries(
        products.queries, products.keys, indices, D, epsilon * (1 - TIE)
    )
    others = []
    for rows, scores, error in products.precise_scores():
        captured[to_device(rows, captured)] = to_device(scores.sum(axis=1), captured)
        i, j, heavy = heavy_places(scores, epsilon, error)
        others.append((rows[i], indices[j], heavy))
    return (starts, columns, values), csr_of(others, (len(D), n)) if others else None, xp.clip(captured, 0.0, 1.0)


def _normalizers(
    Q: Any, N: Float64, exponents: npt.NDArray[np.int32], universal: UniversalSet, keys: Matrices
) -> tuple[Any, Any, Any]:
    """Return ``Σ ⟨q, k⟩²`` for each query, over 4 to a power that is returned, and its estimated relative error."""
    D, loss = normalizers_by(universal.factor, Q, N, exponents)
    xp = array_namespace(D)
    error = relative(loss, D) + float(universal.factor.normalizer_error[0])
    shift = xp.zeros(len(D), dtype=xp.int32)
    doubtful = xp.nonzero(~(error <= SUM_ERROR))[0]
    if len(doubtful):
        sums, present = PreciseSums(to_numpy(Q[doubtful])), universal.present
        step = max(16, BLOCK_ENTRIES // max(len(doubtful), keys.d))
        for start in range(0, keys.n, step):
            part = slice(start, min(start + step, keys.n))
            rows = to_float64(keys.data[:, part, :], keys.format)[0][present[part]]
            sums.add(*even_rows(rows, -exponents))
        total, rounding, _ = sums.result(keys.n)
        D[doubtful], error[doubtful] = to_device(total, D), to_device(rounding, D)
        shift[doubtful] = to_device(np.where(total > 0, sums.shift, 0).astype(np.int32), D)
    return D, error, shift


def _recovered(
    products: Products, indices: npt.NDArray[np.int64], n: int, epsilon: float, sketch: CountSketch | OSNAP
) -> tuple[csr_array, Float64]:
    """Return the heavy entries that a CountSketch finds, and the mass on the keys of the set by their moments."""
    threshold = epsilon * (1 - TIE)
    Q, keys, D = products.queries, products.keys, products.normalizers
    plain = np.where(products.precise, 0.0, D)
    i, j, scores = recovered_entries(Q, keys, plain, threshold, sketch)
    found = [(i, indices[j], scores)]
    inside = np.einsum("ij,ij->i", Q @ (keys.T @ keys), Q)
    captured = np.divide(inside, D, out=np.zeros(len(D)), where=D > 0)
    for rows, scores, error in products.precise_scores():
        captured[rows] = scores.sum(axis=1)
        i, j, heavy = heavy_places(scores, epsilon, error)
        found.append((rows[i], indices[j], heavy))
    return csr_of(found, (len(D), n)), np.clip(captured, 0.0, 1.0)
