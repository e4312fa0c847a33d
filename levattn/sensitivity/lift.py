"""The lift: products of m coordinates, in which ``⟨k, q⟩^(2m)`` is a square and so has leverage scores and moments."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import to_numpy
from levattn._core.threads import parallel_for
from levattn._core.types import Float64
from levattn._kernels import Rows, kernels_for
from levattn.functions import Power
from levattn.linalg.factor import UNIT, Factor, even_whitening, float64_rows
from levattn.linalg.routes import factor_moments
from levattn.sensitivity.contract import Certificate, Problem, in_row_space, raised_scores

_MILD_CONDITION = 100.0  # largest condition number at which products with a whitening matrix keep their digits
_ROWS = 512  # in a block that is lifted
_ENTRIES = 1 << 22  # numbers in a block of lifted queries
_LIFT_COLUMNS = 1024  # most columns of a lift for "auto"
_FELT = 1e-10  # relative rise of a bound from which coordinates are computed in twice the precision
_LIFT_NUMBERS = 1 << 27  # most numbers of a lift for "auto"


def lift_columns(d: int, m: int) -> int:
    """Return the number of products of m coordinates out of d."""
    return math.comb(d + m - 1, m)


def norm_bound(A: Float64) -> float:
    """Return an upper bound of the 2-norm of A, too large by at most a factor of the root of its size."""
    size = np.abs(A)
    sums = (float(size.sum(axis=axis).max(initial=0.0)) for axis in (0, 1))
    return min(math.sqrt(math.prod(sums)), float(np.linalg.norm(A)))


def root_error(factor: Factor, relative: Float64 | float, sizes: Float64 | None = None) -> Float64:
    """Return the factor by which the root of a score may exceed the computed root, (b,).

    The entries of the rows, factored and scored alike, have a `relative` error. Let e be √d times this error over the
    least singular value of the keys with columns of norm 1. For all y, ``‖Ky‖`` then moves by at most e, relative, and
    a product ``⟨k, y⟩`` by e times the root of its score. The factor is infinite where rounding decides the rank.
    `sizes` (b, d) are the norms of the columns, if they are known.
    """
    out = np.full(len(factor.rank), np.inf)
    errors = np.broadcast_to(relative, out.shape)
    for item, rank in enumerate(factor.rank.tolist()):
        W = factor.whitening[item]
        if rank < np.count_nonzero(np.any(W != 0, axis=1)) or not np.isfinite(factor.score_error[item]):
            continue
        if sizes is None:
            N, exponents = factor.even_normalizer(item)
            W = even_whitening(factor, item, exponents)
            sizes_of = np.linalg.norm(N, axis=0)
        else:
            sizes_of = sizes[item]
        moved = 2 * errors[item] * math.sqrt(len(W)) * norm_bound(sizes_of[:, None] * W)
        if moved < 0.5:
            out[item] = (1 + moved) / (1 - moved)
    return out


def lifted_keys(factor: Factor, m: int, *, precise: bool = False) -> tuple[Rows, Float64, Float64]:
    """Return products of m coordinates of the whitened keys, weighted so that ``⟨φ(k), φ(q)⟩ = ⟨k, q⟩^m``.

    The scores of a lift do not depend on the basis of the keys, but its condition number is the m-th power of theirs.
    Also return two errors of a lifted key, (b,). The first is relative to each of its entries, the second to the norm
    of the whitened key to the power m. The second comes from sums that cancel. It is tiny if the sums are `precise`,
    as they always are for ill-conditioned keys.
    """
    rows = factor.rows
    b, n, _ = rows.shape
    keys: Float64 = np.zeros((b, n, max(int(factor.rank.max(initial=1)), 1)))
    relative, absolute = np.zeros(b), np.zeros(b)
    for item in range(b):
        live = np.any(factor.whitening[item] != 0, axis=0)
        N, exponents = factor.even_normalizer(item)
        W = even_whitening(factor, item, exponents)[:, live]
        K = np.ldexp(float64_rows(replace(rows.item(item), scale=None), 0, n), -exponents)
        s = np.linalg.svd(N, compute_uv=False)
        mild = not precise and live.any() and s[0] <= _MILD_CONDITION * s[int(live.sum()) - 1]
        multiply = kernels_for("precise", K).precise_products
        keys[item, :, : W.shape[1]] = K @ W if mild else multiply(K, np.ascontiguousarray(W.T))
        relative[item] = (m + 4) * UNIT if mild else (3 * m + 4) * UNIT
        absolute[item] = m * _coordinate_error(N, W, precise=not mild)
    lifted: Float64 = np.empty((b, n, lift_columns(keys.shape[2], m)))
    for item in range(b):
        _lift(keys[item], m, lifted[item])
    return Rows(lifted, "float64", None if rows.mask is None else to_numpy(rows.mask)), relative, absolute


def _coordinate_error(N: Float64, W: Float64, *, precise: bool = False) -> float:
    """Bound the rounding of whitened keys by their norms; if `precise`, only its part not relative to entries."""
    terms, condition = (len(W) + 2) * UNIT, float(np.linalg.norm(N) * np.linalg.norm(W))
    return (2 * terms) ** 2 * condition if precise else terms * condition


def lifted_rows(rows: Rows, m: int) -> Rows:
    """Return products of m coordinates of the rows, without weights, which would not change leverage scores."""
    b, n, d = rows.shape
    lifted: Float64 = np.empty((b, n, lift_columns(d, m)))
    for item in range(b):
        _lift(float64_rows(rows.item(item), 0, n), m, lifted[item], weighted=False)
    return Rows(lifted, "float64")


def lifted_sums(Q: Float64, factor: Factor, lift: Factor, m: int) -> tuple[Float64, Float64]:
    """Return ``Σ ⟨k, q⟩^(2m)`` over the keys for every query, and its estimated relative error.

    `factor` is the factor of the keys, one matrix of full rank, and `lift` the factor of `lifted_keys`. For each query
    ``Σ ⟨k, q⟩²`` is about 1, or 0.
    """
    N, exponents = factor.even_normalizer(0)
    M, lifted_exponents = lift.even_normalizer(0)
    W, d = even_whitening(factor, 0, exponents), Q.shape[1]
    own = _inverse_error(N, W) + math.sqrt(d) * (_coordinate_error(N, W) + UNIT)
    D, error = np.zeros(len(Q)), np.zeros(len(Q))
    step = max(16, _ENTRIES // len(M))
    for start in range(0, len(Q), step):
        part = slice(start, start + step)
        q = np.ldexp(Q[part], exponents)
        in_basis = q @ N.T  # ⟨k, q⟩ = ⟨kW, Nq⟩
        lifted = np.empty((len(q), lift_columns(d, m)))
        _lift(in_basis, m, lifted)
        D[part], size = kernels_for("heavy", lifted).query_norms(np.ldexp(lifted, lifted_exponents), M)
        # Errors move Nq by `moved`, and the p-norm of its products with orthonormal columns by no more.
        moved = d * UNIT * np.linalg.norm(np.abs(q) @ np.abs(N).T, axis=1) + own * np.linalg.norm(in_basis, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            error[part] = 2 * m * moved / D[part] ** (0.5 / m) + 2 * (len(M) + m + 4) * UNIT * np.sqrt(size / D[part])
    inverse = 2 * _inverse_error(M, even_whitening(lift, 0, lifted_exponents))
    return D, error + float(lift.error[0]) + inverse + 4 * m * UNIT


def _inverse_error(N: Float64, W: Float64) -> float:
    """Bound ``‖I − N W‖``, and so the relative distance of N from the inverse of W."""
    rounding = (len(W) + 2) * UNIT * float(np.linalg.norm(np.abs(N) @ np.abs(W)))
    return float(np.linalg.norm(np.eye(len(W)) - N @ W)) + rounding


def _lift(X: Float64, m: int, out: Float64, *, weighted: bool = True) -> None:
    """Write the products of m coordinates of each row of X; if `weighted`, with the weights for a power of ⟨k, q⟩."""
    indices = np.array(list(combinations_with_replacement(range(X.shape[1]), m)))
    orders = [math.prod(math.factorial(int(np.count_nonzero(index == i))) for i in set(index)) for index in indices]
    factors = np.sqrt(math.factorial(m) / np.array(orders, np.float64))
    columns: list[npt.NDArray[np.int64]] = list(indices.T)

    def body(part: slice) -> None:
        products = X[part][:, columns[0]]
        if weighted:
            products *= factors
        for column in columns[1:]:
            products *= X[part][:, column]
        out[part] = products

    parallel_for(lambda i: body(slice(_ROWS * i, _ROWS * (i + 1))), -(-len(X) // _ROWS))


def _is_small(problem: Problem) -> bool:
    """Tell whether the lifted keys are small enough for "auto"."""
    b, n, d = problem.rows.shape
    columns = lift_columns(d, math.ceil(problem.growth / 2))
    return columns <= _LIFT_COLUMNS and b * n * columns <= _LIFT_NUMBERS


def _scored(factor: Factor, tau: Float64, m: int, *, precise: bool = False) -> tuple[Float64, Factor | None]:
    """Bound by the leverage scores of the lift, and return its factor.

    The coordinates are rounded, so the errors of lifted keys raise their scores: see docs/design.md. Where the
    products lack directions, rounding may hide a key in the directions left out, and the bound is trivial.
    """
    keys, relative, absolute = lifted_keys(factor, m, precise=precise)
    lift = factor_moments(keys, single="no")
    upper, felt = np.sqrt(raised_scores(lift, tau > 0)), 0.0
    resolved = lift.rank == [lift_columns(int(rank), m) for rank in factor.rank]
    resolved &= [in_row_space(factor, item) for item in range(len(tau))]
    raised = root_error(lift, relative)
    for item in np.flatnonzero(resolved).tolist():
        W = lift.whitening[item] if lift.rows.scale is None else lift.whitening[item] * lift.rows.scale[item][:, None]
        powers = tau[item] ** (m / 2)
        moved = absolute[item] * norm_bound(W)
        kept = 1 - moved * math.sqrt(float(np.sum(powers**2)))
        felt = max(felt, float(np.max(moved * powers / upper[item], initial=1 - kept, where=tau[item] > 0)))
        upper[item] = (upper[item] * raised[item] + moved * powers) / kept if kept > 0 else 1.0
    if felt > _FELT and not precise:
        return _scored(factor, tau, m, precise=True)
    upper = np.where(resolved[:, None], np.fmin(upper, 1.0) ** 2, 1.0)
    return upper, lift.forget_keys() if resolved.all() else None


# Bounds from the leverage scores of the lifted keys
LIFT_BOUND = Certificate(
    "lift",
    lambda f: isinstance(f, Power) and f.p > 2 and f.p % 2 == 0,
    lambda problem: _scored(replace(problem.factor, wide=None), problem.tau, round(problem.growth / 2)),
    _is_small,
)
