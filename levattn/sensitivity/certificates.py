"""Certificates of sensitivities, by leverage scores, Lewis weights, blocks of keys or lifted rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import array_namespace, take_rows, to_device, to_float64, to_numpy
from levattn._core.blas import lapack
from levattn._core.threads import parallel_for
from levattn._core.types import Flags, Float64
from levattn._kernels import HEAVY, PRECISE, Rows
from levattn.functions import AttentionFunction, Power, Softmax, is_square
from levattn.linalg.accumulator import UNIT
from levattn.linalg.factor import Factor, even_whitening, float64_rows
from levattn.linalg.routes import factor_moments

LOG_ERROR = 1e-12  # of a logarithm; raises the bounds
_CHUNK = 1 << 15  # keys in a slice


@dataclass(frozen=True)
class Problem:
    """The keys and options of a request for bounds. A masked key has the bound 0."""

    f: AttentionFunction | Softmax
    factor: Factor  # of the keys
    rows: Rows  # for softmax the caller's keys, else the factor's rows, with exactly the same column space
    tau: Float64  # (b, n) leverage scores, raised by their error; 0 for zero keys only
    epsilon: float  # keys with a smaller bound are of no interest
    iterations: int  # of Lewis weights
    seed: int  # of the partition into blocks

    @property
    def growth(self) -> float:
        """The exponent p of f(x) ≤ |x/y|^p f(y); 0 for softmax."""
        return 0.0 if isinstance(self.f, Softmax) else float(self.f.growth)

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Number of keys of each matrix that take part, (b,)."""
        mask = self.rows.mask
        return np.full(self.tau.shape[0], self.tau.shape[1]) if mask is None else to_numpy(mask).sum(axis=1)


@dataclass(frozen=True)
class Certificate:
    """A proof that no query gives a key more attention than a bound."""

    name: str  # as in `method` and `Sensitivities.certificate`
    applies: Callable[[AttentionFunction | Softmax], bool]
    bound: Callable[[Problem], tuple[Float64, Factor | None]]  # (b, n), and the factor of lifted keys as in `Bounds`
    is_cheap: Callable[[Problem], bool] = lambda _: True  # whether "auto" uses it


def raised_scores(factor: Factor, live: npt.NDArray[np.bool_] | None = None) -> Float64:
    """Return leverage scores in float64, raised by their estimated error, at most 1; 0 for zero rows only.

    `live` flags the nonzero rows. If it is left out their entries decide, because a score may underflow.
    """
    given, _ = factor.scores()
    least = 4 * factor.rows.shape[2] * (2.0**-126 if "32" in str(given.dtype) else 2.0**-1022)
    scores = to_numpy(given).astype(np.float64)
    with np.errstate(invalid="ignore"):
        scores *= 1 + 4 * factor.score_error[:, None]
    low = ~(scores >= least)  # smaller squares may have underflowed; NaN where the error is infinite
    if low.any():
        there = _not_zero(factor.rows, low) if live is None else live & low
        scores[low] = np.where(there[low], np.where(np.isnan(scores[low]), 1.0, least), 0.0)
    return np.minimum(scores, 1.0, out=scores)


def _not_zero(rows: Rows, among: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Tell which rows `among` these take part and have a nonzero entry, (b, n)."""
    found = np.zeros(among.shape, np.bool_)
    if rows.mask is not None:
        among = among & to_numpy(rows.mask)
    for item in np.flatnonzero(among.any(axis=1)).tolist():
        which = np.flatnonzero(among[item])
        found[item, which] = to_float64(take_rows(rows.item(item).keys, which), rows.format)[0].any(axis=1)
    return found


def by_chunks(body: Callable[[slice], None], n: int, size: int = _CHUNK) -> None:
    """Call `body` on slices of n keys that stay in the cache, on all threads."""
    parallel_for(lambda i: body(slice(i * size, min((i + 1) * size, n))), -(-n // size))


def in_row_space(factor: Factor, item: int) -> bool:
    """Tell whether all keys lie exactly in the row space of the factor."""
    return item not in factor.null_directions or (item in factor.spans and item not in factor.hidden)


_BLOCK_ITERATIONS = 3  # of the Lewis weights of a block
_TOGETHER, _ROWS = 16, 1 << 14  # blocks whose factors are in memory together, and keys that they score together
_MOST_IN_VAIN = 256  # blocks, where none of their bounds falls below ε


def _of_each(problem: Problem) -> tuple[Float64, None]:
    rows, growth = problem.rows, max(2.0, problem.growth)
    each = [_block(rows.item(i), growth, problem.epsilon, problem.seed) for i in range(len(problem.tau))]
    return np.stack(each), None


def _block(rows: Rows, p: float, epsilon: float, seed: int) -> Float64:
    """Bound the sensitivity of all even monotone functions of growth p ≥ 2, for a batch of one.

    Let ⟨k_j, y⟩ = 1, and let 1/t be the least ‖K_b y‖_p^p of a block b of rows. It adds at least min(1, 1/t) to
    Σ min(1, |⟨k_l, y⟩|^p): an entry is at least 1, or the powers sum to at least 1/t. In the block of key j, the key
    itself adds 1, and the other keys add at least min(1, 1/t − 1).
    """
    n = rows.shape[1]
    present = np.arange(n) if rows.mask is None else np.flatnonzero(to_numpy(rows.mask)[0])
    present = present.astype(np.int32 if n < 2**31 else np.int64)
    order = np.random.default_rng(seed).permutation(present)
    blocks = np.array_split(order, _block_count(len(present), epsilon))
    block_of = np.empty(n, np.int32)
    for number, members in enumerate(blocks):
        block_of[members] = number
    sums = np.zeros(n)
    for first in range(0, len(blocks), _TOGETHER):
        numbers = range(first, min(first + _TOGETHER, len(blocks)))
        made = {i: _of_block(_taken(rows, np.sort(blocks[i])), p) for i in numbers}  # without their keys

        def body(part: slice, made: Any = made) -> None:
            _add_blocks(rows, present[part], made, block_of, sums, p, epsilon)

        by_chunks(body, len(present), _ROWS)
        if not _undecided(sums[present], epsilon).any():
            break
    with np.errstate(divide="ignore"):
        return np.asarray(np.minimum((1 + 1e-6) / sums, 1.0))


def _add_blocks(
    rows: Rows,
    some: npt.NDArray[Any],
    made: dict[int, tuple[Factor, float]],
    block_of: npt.NDArray[np.int32],
    sums: Float64,
    p: float,
    epsilon: float,
) -> None:
    """Add the terms of some blocks to the sums of some keys, until the keys are decided."""
    undecided = some[_undecided(sums[some], epsilon)]
    left = _taken(rows, undecided)
    for number, (factor, constant) in made.items():
        if not len(undecided):
            break
        t = to_numpy(factor.on(left).scores(member=False)[0])[0]
        mine = (block_of[undecided] == number).astype(np.float32)
        shrink = (1 + 4 * float(factor.score_error[0])) ** (-p / 2) / constant  # 0 where the error is infinite
        each: Float64 = mine
        if shrink:
            with np.errstate(divide="ignore", over="ignore"):
                each = np.clip(shrink / (t if p == 2 else t.astype(np.float64) ** (p / 2)), mine, 1 + mine)
        sums[undecided] += each
        still = np.flatnonzero(_undecided(sums[undecided], epsilon))
        if len(still) < 0.8 * len(undecided):  # copying the rest costs less than continuing with all keys
            undecided = undecided[still]
            left = _taken(rows, undecided)


def _undecided(sums: Float64, epsilon: float) -> npt.NDArray[np.bool_]:
    return np.asarray(sums * epsilon <= 1 + 1e-6)


def _block_count(n: int, epsilon: float) -> int:
    """Return the number of blocks for n keys: none is empty, and they are few where no number decides a key.

    The terms of blocks of one key sum to at most n, and the terms of larger blocks to less. So for ε ≤ 1/n no bound
    falls below ε.
    """
    most = n if n * epsilon > 1 else min(n, _MOST_IN_VAIN)
    return max(1, math.ceil(min(2 / epsilon, most)))


def _of_block(members: Rows, p: float) -> tuple[Factor, float]:
    """Return a factor and a constant for which t ≤ constant (kᵀM⁺k)^{p/2}, by Lewis weights.

    M has equal weights where rounded Lewis weights would change the row space.
    """
    factor = factor_moments(members, single="yes")
    if p == 2:
        return factor.forget_keys(), 1.0
    tau = raised_scores(factor)
    v, _, moved, _ = iterated(members, tau, factor.rank, p, _BLOCK_ITERATIONS)
    raised = float(moved[0])
    if math.isfinite(raised):
        factor = factor_moments(replace(members, weights=v), single="yes")
    else:
        v, raised = np.ones(v.shape), 1.0
    total = float(np.sum(v ** (2 * p / (p - 2)), where=tau > 0))
    return factor.forget_keys(), max(total, 1.0) ** (p / 2 - 1) * raised**p * (1 + 1e-9)


def _taken(rows: Rows, indices: npt.NDArray[Any]) -> Rows:
    """Return some rows of a batch of one, ascending and not masked; consecutive rows without a copy."""
    m = len(indices)
    if m and int(indices[-1]) - int(indices[0]) + 1 == m:
        return replace(rows, mask=None).between(int(indices[0]), int(indices[0]) + m)
    return replace(rows, keys=take_rows(rows.keys, indices), mask=None)


# Bounds from the sum over every block of keys while one key has attention: the only bounds for general functions. For
# powers they take as long as all other bounds together.
BLOCK_BOUND = Certificate(
    "block",
    lambda f: not isinstance(f, Softmax) and not is_square(f),
    _of_each,
    lambda problem: not isinstance(problem.f, Power),
)


_LEAST_WEIGHT = 1e-20  # of a row, relative to the largest, so that weighted keys stay well scaled


def _direct(problem: Problem) -> tuple[Float64, None]:
    """Bound by comparing ‖Ky‖₂ with ‖Ky‖_p; in logarithms, because large powers of small numbers underflow."""
    tau, p = problem.tau, problem.growth
    with np.errstate(divide="ignore"):
        logs = np.log(tau)
    if p <= 2:
        constant = np.max(logs, axis=1, keepdims=True, initial=-np.inf)
        constant = np.where(np.isfinite(constant), constant, 0.0) * (1 - p / 2)
    else:
        some = np.count_nonzero(tau, axis=1)[:, None]  # keys of zeros add nothing to either norm
        constant = (p / 2 - 1) * np.log(np.maximum(some, 1))
    return np.asarray(np.exp(np.minimum(constant + p / 2 * logs + LOG_ERROR * (1 + p), 0.0))), None


def iterated(
    rows: Rows, tau: Float64, rank: npt.NDArray[np.int64], p: float, iterations: int
) -> tuple[Float64, Float64, Float64, Float64]:
    """Iterate toward Lewis weights w from equal weights, with leverage scores `tau` and ranks `rank`.

    Let τ be the leverage scores of the rows times w^{1/2 − 1/p}, which are w at the fixed point. New weights are τ for
    p > 2. Each step then increases a concave function, and the distance from its maximum falls by the factor 1 − 2/p
    in the end. For p < 2 they are τ^{p/2} w^{1 − p/2}, a contraction by the factor 1 − p/2.

    Return the row weights v, at most 1 (read-only where they are equal), and the leverage scores of the weighted rows.
    Also return the factor (b,) by which the rounding of weighted rows may raise the root of a score. The last result
    is the logarithm of a scale (b, 1), which may itself exceed all numbers: v times the scale is w^{1/2 − 1/p}. Where
    new weights would push directions beyond the rank tolerance, the weights before them stay.
    """
    live = tau > 0
    v: Float64 = np.broadcast_to(np.ones(1), tau.shape)
    going, moved, scale = np.ones(len(tau), np.bool_), np.ones(len(tau)), np.zeros((len(tau), 1))
    last: Factor | None = None
    for _ in range(iterations):
        new: Float64 = np.empty(tau.shape)

        def body(part: slice, v: Float64 = v, tau: Float64 = tau, new: Float64 = new) -> None:
            t = tau[:, part]
            new[:, part] = t ** (0.5 - 1 / p) if p > 2 else (t / v[:, part] ** 2) ** (p / 4 - 0.5)

        with np.errstate(divide="ignore", over="ignore"):
            by_chunks(body, v.shape[1])
        there = live & np.isfinite(new)
        largest = np.max(new, axis=1, keepdims=True, initial=0.0, where=there)
        if p < 2:  # rows of the largest numbers have the least weights, so these numbers are cut
            least = np.min(new, axis=1, keepdims=True, initial=np.inf, where=there)
            largest = np.minimum(largest, least / _LEAST_WEIGHT)
        largest[largest == 0] = 1.0
        new /= largest
        np.clip(new, _LEAST_WEIGHT, 1.0, out=new)
        new[~live] = 1.0
        new[~going] = v[~going]
        factor = factor_moments(replace(rows, weights=new))
        sound = (factor.rank == rank) & np.isfinite(factor.score_error)
        lost = going & ~sound
        if last is not None and lost.any():
            moved[lost] = root_error(last, UNIT)[lost]
        going &= sound
        if not going.any():
            break
        last = factor
        scale = np.where(going[:, None], np.log(largest) + (0.0 if p > 2 else (1 - p / 2) * scale), scale)
        if going.all():
            v, tau = new, np.zeros(0)  # frees memory for the scores
            tau = raised_scores(factor, live)
        else:
            scores = raised_scores(factor, live)
            v, tau = (np.where(going[:, None], x, y) for x, y in ((new, v), (scores, tau)))
    if last is not None and going.any():
        moved[going] = root_error(last, UNIT)[going]
    return v, tau, moved, scale


def _by_lewis(problem: Problem) -> tuple[Float64, None]:
    """Bound by Lewis weights; for keys that lack directions, of as many independent columns as their rank.

    These columns have the same column space, and so the same sensitivities. They are independent by far more than the
    rounding of weighted rows.
    """
    factor, tau, p, iterations = replace(problem.factor, wide=None), problem.tau, problem.growth, problem.iterations
    rows = replace(factor.rows, scale=None)
    lacking = factor.rank < np.count_nonzero(np.any(factor.whitening != 0, axis=2), axis=1)
    if not lacking.any():
        return _lewis(rows, tau, factor.rank, p, iterations), None
    upper = np.ones(tau.shape)
    for item in range(len(tau)):
        one, its_tau = rows.item(item), tau[item : item + 1]
        if lacking[item]:
            if not in_row_space(factor, item):
                continue
            within = factor_moments(_independent(one, factor.even_normalizer(item)[0], int(factor.rank[item])))
            if within.rank[0] < factor.rank[item]:
                continue
            one, its_tau = replace(within.rows, scale=None), raised_scores(within)
        upper[item] = _lewis(one, its_tau, factor.rank[item : item + 1], p, iterations)[0]
    return upper, None


def _independent(rows: Rows, N: Float64, rank: int) -> Rows:
    """Return as many columns of one matrix as it has rank; they span the column space. N has the same row space."""
    from scipy.linalg import qr

    columns = np.asarray(lapack(qr, N, mode="r", pivoting=True)[1][:rank], np.int64)
    keys = array_namespace(rows.keys).take(rows.keys, to_device(columns, rows.keys), axis=2)
    return Rows(keys, rows.format, rows.mask)


def _lewis(rows: Rows, tau: Float64, rank: npt.NDArray[np.int64], p: float, iterations: int) -> Float64:
    r"""Bound by any weights.

    Let v = w^{1/2−1/p}, M = Σ v² k kᵀ, h = (kᵀM⁺k)^{p/2} and z = Ky. Then \|z_j\|^p ≤ h_j (yᵀMy)^{p/2}. Here
    (yᵀMy)^{p/2} is at most (Σw)^{p/2−1} ‖z‖_p^p for p ≥ 2 (Hölder). For p ≤ 2 it is at most c^{2/p−1} ‖z‖_p^p with
    c = max h/w. No number holds 1/p of the least powers, which have no bound.
    """
    if not 2 / p < math.inf:
        return np.ones(tau.shape)
    v, weighted, moved, _ = iterated(rows, tau, rank, p, iterations)
    live = weighted > 0
    # in place, to save memory
    log_w = v if v.flags.writeable else v.copy()
    log_h = weighted.copy() if weighted is tau else weighted
    raised = p * np.log(moved)[:, None]

    def body(part: slice) -> None:
        with np.errstate(divide="ignore"):
            logs = np.log(log_w[:, part])
            log_h[:, part] = p / 2 * (np.log(log_h[:, part]) - 2 * logs) + raised
        log_w[:, part] = 2 * p / (p - 2) * logs

    by_chunks(body, log_w.shape[1])
    if p >= 2:
        top = np.max(log_w, axis=1, keepdims=True, initial=-np.inf, where=live)
        top = np.where(np.isfinite(top), top, 0.0)
        log_w -= top
        weights = np.exp(log_w, out=log_w)
        weights[~live] = 0.0
        total = np.sum(weights, axis=1, keepdims=True)
        constant = (p / 2 - 1) * (top + np.log(np.maximum(total, 1.0)))
    else:
        ratios = np.subtract(log_h, log_w, out=log_w)
        ratio = np.max(ratios, axis=1, keepdims=True, initial=-np.inf, where=live)
        constant = (2 / p - 1) * np.where(np.isfinite(ratio), ratio, 0.0)
    log_h += constant
    log_h += LOG_ERROR * (1 + p + 1 / p + p / abs(p - 2))
    return np.asarray(np.exp(np.minimum(log_h, 0.0, out=log_h), out=log_h))


DIRECT_BOUND = Certificate("leverage", lambda f: isinstance(f, Power), _direct)
LEWIS_BOUND = Certificate("lewis", lambda f: isinstance(f, Power) and not is_square(f), _by_lewis)


_MILD_CONDITION = 100.0  # largest condition number at which products with a whitening matrix keep their digits
_LIFTED_ROWS = 512  # in a block that is lifted
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


def lifted_keys(factor: Factor, m: int, precise: Flags) -> tuple[Rows, Float64, Float64]:
    """Return products of m coordinates of the whitened keys, weighted so that ``⟨φ(k), φ(q)⟩ = ⟨k, q⟩^m``.

    The scores of a lift do not depend on the basis of the keys, but its condition number is the m-th power of theirs.
    Also return two errors of a lifted key, (b,). The first is relative to each of its entries, the second to the norm
    of the whitened key to the power m. The second comes from sums that cancel. It is tiny where the sums are
    `precise` (b,), as they always are for ill-conditioned keys.
    """
    rows = factor.rows
    b, n, _ = rows.shape
    lifted: Float64 = np.zeros((b, n, lift_columns(max(int(factor.rank.max(initial=1)), 1), m)))
    relative, absolute = np.zeros(b), np.zeros(b)
    for item in range(b):
        live = np.any(factor.whitening[item] != 0, axis=0)
        N, exponents = factor.even_normalizer(item)
        W = even_whitening(factor, item, exponents)[:, live]
        K = np.ldexp(float64_rows(replace(rows.item(item), scale=None), 0, n), -exponents)
        s = lapack(np.linalg.svd, N, compute_uv=False)
        mild = not precise[item] and live.any() and s[0] <= _MILD_CONDITION * s[int(live.sum()) - 1]
        keys = K @ W if mild else PRECISE.precise_products(K, np.ascontiguousarray(W.T))
        if live.any():
            _lift(keys, m, lifted[item])
        relative[item] = (m + 4) * UNIT if mild else (3 * m + 4) * UNIT
        absolute[item] = m * _coordinate_error(N, W, precise=not mild)
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
    return Rows(lifted, "float64", rows.mask)


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
        D[part], size = HEAVY.query_norms(np.ldexp(lifted, lifted_exponents), M)
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

    parallel_for(lambda i: body(slice(_LIFTED_ROWS * i, _LIFTED_ROWS * (i + 1))), -(-len(X) // _LIFTED_ROWS))


def _is_small(problem: Problem) -> bool:
    """Tell whether the lifted keys are small enough for "auto"."""
    b, n, d = problem.rows.shape
    columns = lift_columns(d, math.ceil(problem.growth / 2))
    return columns <= _LIFT_COLUMNS and b * n * columns <= _LIFT_NUMBERS


def _scored(factor: Factor, tau: Float64, m: int, precise: Flags | None = None) -> tuple[Float64, Factor | None]:
    """Bound by the leverage scores of the lift, and return its factor.

    The coordinates are rounded, so the errors of lifted keys raise their scores: see docs/design.md. Where the
    products lack directions, rounding may hide a key in the directions left out, and the bound is trivial.
    """
    if len(set(factor.rank.tolist())) > 1:  # alone, as the rank of others would change last bits
        each = [_scored(factor.item(i), tau[i : i + 1], m)[0] for i in range(len(tau))]
        return np.concatenate(each), None
    columns = [lift_columns(int(rank), m) for rank in factor.rank]
    if all(count > tau.shape[1] for count in columns):  # more than there are keys: nothing of that size is made
        return np.ones(tau.shape), None
    precise = np.zeros(len(tau), np.bool_) if precise is None else precise
    keys, relative, absolute = lifted_keys(factor, m, precise)
    lift = factor_moments(keys, single="no")
    upper, felt = np.sqrt(raised_scores(lift, tau > 0)), np.zeros(len(tau))
    resolved = lift.rank == columns
    resolved &= [in_row_space(factor, item) for item in range(len(tau))]
    raised = root_error(lift, relative)
    for item in np.flatnonzero(resolved).tolist():
        W = lift.whitening[item] if lift.rows.scale is None else lift.whitening[item] * lift.rows.scale[item][:, None]
        powers = tau[item] ** (m / 2)
        moved = absolute[item] * norm_bound(W)
        kept = 1 - moved * math.sqrt(float(np.sum(powers**2)))
        felt[item] = np.max(moved * powers / upper[item], initial=1 - kept, where=tau[item] > 0)
        upper[item] = (upper[item] * raised[item] + moved * powers) / kept if kept > 0 else 1.0
    doubtful = (felt > _FELT) & ~precise
    if doubtful.any():
        return _scored(factor, tau, m, precise | doubtful)
    upper = np.where(resolved[:, None], np.fmin(upper, 1.0) ** 2, 1.0)
    return upper, lift.forget_keys() if resolved.all() else None


# Bounds from the leverage scores of the lifted keys
LIFT_BOUND = Certificate(
    "lift",
    lambda f: isinstance(f, Power) and f.p > 2 and f.p % 2 == 0,
    lambda problem: _scored(replace(problem.factor, wide=None), problem.tau, round(problem.growth / 2)),
    _is_small,
)
