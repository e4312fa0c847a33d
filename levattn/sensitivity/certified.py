"""Certified upper bounds of f-sensitivities: Lewis weights, direct leverage bounds, lifts, blocks, and Jensen's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import (
    Matrices,
    array_namespace,
    as_mask,
    as_matrices,
    take_rows,
    to_device,
    to_float64,
    to_numpy,
)
from levattn._core.checks import whole_number
from levattn._core.threads import parallel_for
from levattn._kernels import Float64, Rows
from levattn.functions import INSIDE, AttentionFunction, Power, Softmax, as_function
from levattn.linalg.factor import UNIT, Factor, factor_moments
from levattn.sensitivity.leverage import check_epsilon, factorize
from levattn.sensitivity.lift import lift_columns, lifted_keys, root_error, spread
from levattn.sensitivity.softmax import ball, jensen

__all__ = ["Sensitivities", "certify", "lewis_weights", "sensitivities"]

Certificate = Literal["auto", "leverage", "lewis", "lift", "block", "jensen", "ball"]

_ITERATIONS = 5  # of Lewis weights; each halves the distance for p = 1, and any weights certify
_BLOCK_ITERATIONS = 3  # of the Lewis weights of a block
_LIFT_COLUMNS = 1024  # columns of a lift up to which "auto" takes it
_FELT = 1e-10  # relative rise of a bound from which coordinates are computed in twice the precision
_LIFT_NUMBERS = 1 << 27  # numbers in a lift up to which "auto" takes it
_LEAST_WEIGHT = 1e-20  # of a row, relative to the largest, so that weighted keys stay tame
_STEPS = 20  # toward the exact softmax sensitivity of each key that is undecided
_BALL_KEYS = 50_000  # up to which "auto" takes these steps
_MOST_IN_VAIN = 256  # blocks, where no bound that they give reaches ε
_LOG_ERROR = 1e-12  # of a logarithm, by which bounds are raised
_CHUNK = 1 << 15  # keys whose figures are worked on at a time


@dataclass(frozen=True, repr=False, eq=False)
class Sensitivities:
    """Certified upper bounds of sensitivities; the result of `sensitivities`.

    Attributes
    ----------
    upper : array of shape (..., n)
        For each key a number that no attention score of it exceeds, whatever the query.
    certificate : tuple of str
        The certificates whose element-wise minimum `upper` is.
    total : float or array of shape (...,)
        The sum of `upper`.
    total_bound : float or array of shape (...,)
        What theory bounds the sum of the sensitivities by: ``rank^max(1, p/2)`` for abs(x)^p; infinite for softmax.
        For other functions of growth p it is ``8 rank^max(1, p/2)``: divided by ε, a bound of the number of keys
        that some such function can give a score of ε.
    f : AttentionFunction or Softmax
        The attention function.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> levattn.sensitivities(np.eye(3), 1)
    Sensitivities(3 keys, total=3, total_bound=3, f=Power(p=1.0), certificate=('leverage', 'lewis'))
    """

    upper: Any
    certificate: tuple[str, ...]
    total: Any
    total_bound: Any
    f: AttentionFunction | Softmax

    def __repr__(self) -> str:
        """Return the figures on one line."""
        shape = tuple(self.upper.shape)
        keys = f"{shape[-1]} keys" + (f" in each of {shape[:-1]}" if len(shape) > 1 else "")
        figures = "" if len(shape) > 1 else f", total={self.total:.6g}, total_bound={self.total_bound:.6g}"
        return f"Sensitivities({keys}{figures}, f={self.f!r}, certificate={self.certificate!r})"


@dataclass(frozen=True)
class Bounds:
    """Certified bounds before they go back to the caller.

    upper: (b, n).
    names: of the certificates.
    total_bound: (b,) what theory bounds the sums of the sensitivities by.
    factor: of the keys.
    leverage: (b, n) leverage scores of the keys, raised by their error.
    lift: the factor of the lifted keys, where it was made and holds all their directions.
    """

    upper: Float64
    names: tuple[str, ...]
    total_bound: Float64
    factor: Factor
    leverage: Float64
    lift: Factor | None


def lewis_weights(K: Any, p: float, /, *, iterations: int = _ITERATIONS, mask: Any = None) -> Any:
    r"""Approximate ℓp Lewis weights: leverage scores of the keys reweighted by themselves.

    The Lewis weights are the fixed point :math:`w_j = (k_j^T (K^T W^{1-2/p} K)^+ k_j)^{p/2}`; they sum to the rank.
    For p = 2 they are the leverage scores.

    Parameters
    ----------
    K : array of shape (..., n, d)
        Keys, as in `leverage_scores`.
    p : float
        The exponent, above 0.
    iterations : int, default 5
        Number of iterations, at least 0: of the fixed point for p < 4, which draws nearer by the factor abs(p/2 −
        1) each time, and of the running mean of leverage scores for p ≥ 4, which converges slowly.
    mask : array of bool, shape (..., n), optional
        True for a key that takes part; the others have weight 0.

    Returns
    -------
    array of float64, shape (..., n)
        Weights, 0 for keys of zeros. They are approximate; `sensitivities` makes a bound of any weights.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.
    NonFiniteError
        If the keys hold NaN or infinity outside the mask.

    Notes
    -----
    Time O(iterations · n d²), memory O(n) beyond K.

    References
    ----------
    Cohen and Peng, ℓp row sampling by Lewis weights, STOC 2015 (arXiv:1412.0588): the fixed point for p < 4. Lee, PhD
    thesis, MIT 2016: the running mean.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> K = np.random.default_rng(0).standard_normal((500, 4))
    >>> float(levattn.lewis_weights(K, 1, iterations=20).sum().round(3))
    4.0
    """
    function = as_function(p)
    if not isinstance(function, Power):
        raise TypeError(f"p is {p!r}; expected a number, the exponent")
    matrices = as_matrices(K, "K")
    factor = factorize(matrices, method="auto", mask=mask)
    rows, exponent, tau = replace(factor.rows, scale=None), function.p, _scores(factor)
    v = np.ones(tau.shape)
    if exponent != 2:
        v, tau, _, scale = _iterated(rows, tau, factor.rank, exponent, whole_number("iterations", iterations, 0))
        v = v * scale
    weights = (tau / v**2) ** (exponent / 2)
    return matrices.wrap(to_device(np.asarray(weights), matrices.data))


def sensitivities(
    K: Any,
    f: Any = 2,
    /,
    *,
    method: Certificate = "auto",
    mask: Any = None,
    epsilon: float = 0.05,
    iterations: int = _ITERATIONS,
    rng: int | np.random.Generator | None = None,
) -> Sensitivities:
    r"""Bound the largest attention score that any query can give each key.

    The sensitivity of key j is :math:`\sigma_j = \sup_q f(\langle q, k_j\rangle) / \sum_l f(\langle q,
    k_l\rangle)`. The result never lies below it (up to 1e-9, relative), so keys whose bound is below ε have no
    score of ε or more.

    Parameters
    ----------
    K : array of shape (..., n, d)
        Keys, as in `leverage_scores`.
    f : float, AttentionFunction or Softmax, default 2
        The attention function; a number p is abs(x)^p.
    method : {"auto", "leverage", "lewis", "lift", "block", "jensen", "ball"}
        "leverage": for abs(x)^p from the leverage scores τ alone, :math:`\tau_{\max}^{1-p/2} \tau_j^{p/2}` for p ≤
        2 and :math:`n^{p/2-1} \tau_j^{p/2}` for p ≥ 2; exact for p = 2. "lewis": for abs(x)^p from Lewis weights,
        converged or not. "lift": for even p the leverage scores of all products of p/2 coordinates. "block": for
        every function of the protocol, from the leverage scores against the blocks of a random partition; of growth
        above 2 from Lewis weights of the blocks. "jensen": for `Softmax` from the distances of the keys to their
        mean. "ball": the same, and steps of a concave program for the keys whose bound is still at least ε.
        "auto": the element-wise minimum of those that apply and are not too large.
    mask : array of bool, shape (..., n), optional
        True for a key that takes part; the others have bound 0.
    epsilon : float in (0, 1], default 0.05
        For "block" and "ball": the threshold for which the bounds are made, with ⌈2/ε⌉ blocks, at most n. Bounds below
        it are not made smaller, and blocks are at most 256 for ε ≤ 1/n, which none of their bounds can reach.
    iterations : int, default 5
        For "lewis": see `lewis_weights`. Any number gives valid bounds.
    rng : int or numpy.random.Generator, optional
        For "block": the seed of the partition, 0 if left out. Every partition gives valid bounds.

    Returns
    -------
    Sensitivities
        The bounds, and what their sum is bounded by.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, or the method does not apply to f.
    NonFiniteError
        If the keys hold NaN or infinity outside the mask.

    See Also
    --------
    universal_set : The keys whose bound is at least ε.
    exact_sensitivities : The sensitivities themselves, for few keys.

    Notes
    -----
    Time O(n d²) for "leverage", "lewis" (times the iterations) and "jensen"; O(n D²) and memory O(n D) for "lift"
    with D = C(d + p/2 − 1, p/2); O(n d²/ε) for "block", which leaves keys aside as soon as their bound is below ε;
    O(n (n' + 256) d) for "ball", where n' keys are undecided after a pass in which most keys are taken together in
    128 groups (n' is taken as 0 if n n' is above 3·10⁸); "auto" takes it up to 50 000 keys. The bounds are raised by
    the estimated rounding error.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462): sensitivities and universal
    sets (Theorem 1). Cohen and Peng, STOC 2015: Lewis weights bound sensitivities. That any weights do, and the
    block bound, are shown in docs/design.md.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> K = np.random.default_rng(0).standard_normal((1000, 4))
    >>> K[0] *= 100
    >>> found = levattn.sensitivities(K, levattn.Huber(1.0), epsilon=0.1)
    >>> int(found.upper.argmax()), bool(found.upper[1:].max() < 0.1)
    (0, True)
    """
    function = as_function(f)
    matrices = as_matrices(K, "K")
    bounds = certify(matrices, function, method=method, mask=mask, epsilon=epsilon, iterations=iterations, rng=rng)
    batch = matrices.batch
    total, total_bound = (
        x.reshape(batch) if batch else float(x[0]) for x in (bounds.upper.sum(axis=1), bounds.total_bound)
    )
    upper = matrices.wrap(to_device(bounds.upper, matrices.data))
    return Sensitivities(upper, bounds.names, total, total_bound, function)


def certify(
    matrices: Matrices,
    f: AttentionFunction | Softmax,
    *,
    method: str = "auto",
    mask: Any = None,
    epsilon: float = 0.05,
    iterations: int = _ITERATIONS,
    rng: int | np.random.Generator | None = None,
) -> Bounds:
    """Return the bounds that apply to f, and the factor of the keys."""
    applying = _applying(f)
    if method != "auto" and method not in applying:
        raise ValueError(
            f"method is {method!r}; expected 'auto' or, for f = {f!r}, one of {', '.join(map(repr, applying))}"
        )
    epsilon = check_epsilon(epsilon)
    iterations = whole_number("iterations", iterations, 0)
    exact = isinstance(f, Power) and f.p == 2
    factor = factorize(matrices, method="gram" if exact else "auto", mask=mask)
    # bounds depend on the column space of the keys alone, but for softmax, which sees their lengths
    rows = factor.rows if not isinstance(f, Softmax) else Rows(matrices.data, matrices.format, as_mask(mask, matrices))
    rows = replace(rows, scale=None)  # which is this factor's; blocks and weighted rows find their own
    alone = np.zeros(rows.shape[0], np.bool_)  # matrices of which a query picks any key by itself
    if factor.wide is not None and not isinstance(f, Softmax):
        alone = factor.wide.independent
    tau = _scores(factor)  # 0 for keys of zeros, and for no others
    rank = factor.rank.astype(np.float64)
    growth = 0.0 if isinstance(f, Softmax) else f.growth
    if method == "auto":
        names = [name for name in applying if name != "lift" or _lift_is_small(rows, growth)]
        if "ball" in names and rows.shape[0] * rows.shape[1] > _BALL_KEYS:
            names.remove("ball")
        if isinstance(f, Power) and "block" in names:
            names.remove("block")  # it takes as long as all the others together
    else:
        names = [method]
    upper = np.ones(tau.shape)
    lift: Factor | None = None
    with np.errstate(over="ignore", invalid="ignore"):  # a bound beyond the range of float64 is no bound
        for name in names if not alone.all() else ():
            if name == "leverage":
                bound = _direct(tau, growth, rows)
            elif name == "lewis":
                bound = _lewis_of_each(replace(factor, wide=None), tau, growth, iterations)
            elif name == "lift":
                bound, lift = _lift(replace(factor, wide=None), tau, round(growth / 2))
            elif name == "block":
                bound = np.stack([_block(rows.item(i), max(2.0, growth), epsilon, rng) for i in range(len(tau))])
            elif isinstance(f, Softmax):
                root = f.radius if f.matrix is None and factor.wide is not None else f.root(matrices.d)
                root = (1 + 2 * INSIDE) * root
                bound = jensen(rows, root)
                if name == "ball":
                    bound = ball(rows, root, bound, epsilon, _STEPS)
            upper = np.where(alone[:, None], 1.0, np.fmin(upper, bound))  # no number where it is infinity times zero
    if not isinstance(f, Softmax):  # where f(0) > 0 a key of zeros has 1/n, from the query of zeros
        count = np.full(len(tau), tau.shape[1]) if rows.mask is None else to_numpy(rows.mask).sum(axis=1)
        at_zero = 1 / np.maximum(count, 1) if float(f(np.zeros(1))[0]) > 0 else np.zeros(len(tau))
        upper = np.where(tau > 0, upper, at_zero[:, None])
    if rows.mask is not None:
        upper = np.where(to_numpy(rows.mask), upper, 0.0)
    if isinstance(f, Softmax):
        total = np.full(len(rank), np.inf)
    elif isinstance(f, Power):
        with np.errstate(over="ignore"):
            total = rank ** max(1.0, growth / 2)
    else:
        with np.errstate(over="ignore"):
            total = 8 * rank ** max(1.0, growth / 2)
    return Bounds(upper, tuple(names), np.asarray(total, np.float64), factor, tau, lift)


def _applying(f: AttentionFunction | Softmax) -> tuple[str, ...]:
    """Return the names of the certificates that hold for f."""
    if isinstance(f, Softmax):
        return ("jensen", "ball")
    if not isinstance(f, Power):
        return ("block",)
    if f.p == 2:
        return ("leverage",)
    even = f.p > 2 and f.p % 2 == 0
    return ("leverage", "lewis", *(("lift",) if even else ()), "block")


def _scores(factor: Factor, live: npt.NDArray[np.bool_] | None = None) -> Float64:
    """Return leverage scores in float64, raised by their estimated error, at most 1; 0 for rows of zeros alone.

    Which rows are not zero (`live`) is told by their entries where it is not known: a score may vanish.
    """
    given, _ = factor.scores()
    least = 4 * factor.rows.shape[2] * (2.0**-126 if "32" in str(given.dtype) else 2.0**-1022)
    scores = to_numpy(given).astype(np.float64)
    with np.errstate(invalid="ignore"):
        scores *= 1 + 4 * factor.score_error[:, None]
    low = ~(scores >= least)  # squares below this may have vanished; not a number where the error is infinite
    if low.any():
        there = _not_zero(factor.rows, low) if live is None else live & low
        scores[low] = np.where(there[low], np.where(np.isnan(scores[low]), 1.0, least), 0.0)
    return np.minimum(scores, 1.0, out=scores)


def _not_zero(rows: Rows, among: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Tell which of some rows take part and have an entry that is not zero, (b, n)."""
    found = np.zeros(among.shape, np.bool_)
    if rows.mask is not None:
        among = among & to_numpy(rows.mask)
    for item in np.flatnonzero(among.any(axis=1)).tolist():
        which = np.flatnonzero(among[item])
        found[item, which] = to_float64(take_rows(rows.item(item).keys, which), rows.format)[0].any(axis=1)
    return found


def _by_chunks(body: Callable[[slice], None], n: int) -> None:
    """Call `body` on slices of n keys that stay in the cache, on all threads."""
    parallel_for(lambda i: body(slice(i * _CHUNK, min((i + 1) * _CHUNK, n))), -(-n // _CHUNK))


def _direct(tau: Float64, p: float, rows: Rows) -> Float64:
    """Bound by comparing ‖Ky‖₂ with ‖Ky‖_p; in logarithms, as large powers of small numbers leave the range."""
    with np.errstate(divide="ignore"):
        logs = np.log(tau)
    if p <= 2:
        constant = np.max(logs, axis=1, keepdims=True, initial=-np.inf)
        constant = np.where(np.isfinite(constant), constant, 0.0) * (1 - p / 2)
    else:
        n = np.full((len(tau), 1), tau.shape[1]) if rows.mask is None else to_numpy(rows.mask).sum(axis=1)[:, None]
        constant = (p / 2 - 1) * np.log(np.maximum(n, 1))
    return np.asarray(np.exp(np.minimum(constant + p / 2 * logs + _LOG_ERROR * (1 + p), 0.0)))


def _iterated(
    rows: Rows, tau: Float64, rank: npt.NDArray[np.int64], p: float, iterations: int
) -> tuple[Float64, Float64, Float64, Float64]:
    """Iterate toward Lewis weights w from equal ones, whose leverage scores are `tau` and whose ranks `rank`.

    Returned are the row weights v, at most 1, the leverage scores of the rows weighted by them, the factor (b,) by
    which the rounding of weighted rows may raise the root of a score, and the scale (b, 1) for which v times that is
    w^{1/2 − 1/p}. Where weights would push directions beyond the rank tolerance, those before stay.
    """
    live = tau > 0
    v: Float64 = np.ones(tau.shape)
    mean: Float64 = np.zeros(tau.shape)
    going, moved, scale = np.ones(len(tau), np.bool_), np.ones(len(tau)), np.ones((len(tau), 1))
    last: Factor | None = None
    for step in range(iterations):
        new: Float64 = np.empty(tau.shape)

        def body(part: slice, v: Float64 = v, tau: Float64 = tau, new: Float64 = new, step: int = step) -> None:
            t = tau[:, part]
            if p < 4:  # w = (τ/v²)^{p/2}
                new[:, part] = (t / v[:, part] ** 2) ** (p / 4 - 0.5)
            else:
                mean[:, part] += (t - mean[:, part]) / (step + 1)
                new[:, part] = mean[:, part] ** (0.5 - 1 / p)

        with np.errstate(divide="ignore", over="ignore"):
            _by_chunks(body, v.shape[1])
        largest = np.max(new, axis=1, keepdims=True, initial=0.0, where=live & np.isfinite(new))
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
        last, scores = factor, _scores(factor, live)
        scale = np.where(going[:, None], largest * (scale ** (1 - p / 2) if p < 4 else 1.0), scale)
        if going.all():
            v, tau = new, scores
        else:
            v, tau = (np.where(going[:, None], x, y) for x, y in ((new, v), (scores, tau)))
    if last is not None and going.any():
        moved[going] = root_error(last, UNIT)[going]
    return v, tau, moved, scale


def _in_row_space(factor: Factor, item: int) -> bool:
    """Tell whether all keys lie exactly in the row space that was kept."""
    return item not in factor.outside or (item in factor.spans and item not in factor.hidden)


def _lewis_of_each(factor: Factor, tau: Float64, p: float, iterations: int) -> Float64:
    """Bound by Lewis weights; keys that lack directions are replaced by as many independent columns of theirs.

    These have the same column space, so the same sensitivities. The rounding of weighted rows is then one of
    columns that are independent by far more.
    """
    rows, upper = replace(factor.rows, scale=None), np.ones(tau.shape)
    lacking = factor.rank < np.count_nonzero(np.any(factor.whitening != 0, axis=2), axis=1)
    if not lacking.any():
        return _lewis(rows, tau, factor.rank, p, iterations)
    for item in range(len(tau)):
        one, its_tau = rows.item(item), tau[item : item + 1]
        if lacking[item]:
            if not _in_row_space(factor, item):
                continue
            within = factor_moments(_independent(one, factor.even_normalizer(item)[0], int(factor.rank[item])))
            if within.rank[0] < factor.rank[item]:
                continue
            one, its_tau = replace(within.rows, scale=None), _scores(within)
        upper[item] = _lewis(one, its_tau, factor.rank[item : item + 1], p, iterations)[0]
    return upper


def _independent(rows: Rows, N: Float64, rank: int) -> Rows:
    """Return as many columns of one matrix as it has rank; they span the column space. N has its row space."""
    from scipy.linalg import qr

    columns = np.asarray(qr(N, mode="r", pivoting=True)[1][:rank], np.int64)
    keys = array_namespace(rows.keys).take(rows.keys, to_device(columns, rows.keys), axis=2)
    return Rows(keys, rows.format, rows.mask)


def _lewis(rows: Rows, tau: Float64, rank: npt.NDArray[np.int64], p: float, iterations: int) -> Float64:
    r"""Bound by weights, whichever they are.

    With v = w^{1/2−1/p}, M = Σ v² k kᵀ, h = (kᵀM⁺k)^{p/2} and z = Ky: \|z_j\|^p ≤ h_j (yᵀMy)^{p/2}, and
    (yᵀMy)^{p/2} is at most (Σw)^{p/2−1} ‖z‖_p^p for p ≥ 2 (Hölder), and at most c^{2/p−1} ‖z‖_p^p with c = max h/w
    for p ≤ 2.
    """
    v, tau, moved, _ = _iterated(rows, tau, rank, p, iterations)
    log_h, log_w, raised = np.empty(v.shape), np.empty(v.shape), p * np.log(moved)[:, None]

    def body(part: slice) -> None:
        with np.errstate(divide="ignore"):
            logs = np.log(v[:, part])
            log_h[:, part] = p / 2 * (np.log(tau[:, part]) - 2 * logs) + raised
        log_w[:, part] = 2 * p / (p - 2) * logs

    _by_chunks(body, v.shape[1])
    live = tau > 0
    if p >= 2:
        top = np.max(log_w, axis=1, keepdims=True, initial=-np.inf, where=live)
        top = np.where(np.isfinite(top), top, 0.0)
        total = np.sum(np.exp(log_w - top, where=live, out=np.zeros(live.shape)), axis=1, keepdims=True)
        constant = (p / 2 - 1) * (top + np.log(np.maximum(total, 1.0)))
    else:
        ratio = np.max(log_h - log_w, axis=1, keepdims=True, initial=-np.inf, where=live)
        constant = (2 / p - 1) * np.where(np.isfinite(ratio), ratio, 0.0)
    return np.asarray(np.exp(np.minimum(constant + log_h + _LOG_ERROR * (1 + p + 1 / p + p / abs(p - 2)), 0.0)))


def _lift_is_small(rows: Rows, p: float) -> bool:
    b, n, d = rows.shape
    columns = lift_columns(d, math.ceil(p / 2))
    return columns <= _LIFT_COLUMNS and b * n * columns <= _LIFT_NUMBERS


def _lift(factor: Factor, tau: Float64, m: int, *, precise: bool = False) -> tuple[Float64, Factor | None]:
    """Bound by the leverage scores of the lift, whose factor is returned too.

    Coordinates are computed, and errors of lifted keys raise their scores: see docs/design.md. Where the products lack
    directions, rounding may hide a key in what is left out, and nothing is bounded.
    """
    keys, relative, absolute = lifted_keys(factor, m, precise=precise)
    lift = factor_moments(keys, single="no")
    upper, felt = np.sqrt(_scores(lift, tau > 0)), 0.0
    resolved = lift.rank == [lift_columns(int(rank), m) for rank in factor.rank]
    resolved &= [_in_row_space(factor, item) for item in range(len(tau))]
    raised = root_error(lift, relative)
    for item in np.flatnonzero(resolved).tolist():
        W = lift.whitening[item] if lift.rows.scale is None else lift.whitening[item] * lift.rows.scale[item][:, None]
        powers = tau[item] ** (m / 2)
        moved = absolute[item] * spread(W)
        kept = 1 - moved * math.sqrt(float(np.sum(powers**2)))
        felt = max(felt, float(np.max(moved * powers / upper[item], initial=1 - kept, where=tau[item] > 0)))
        upper[item] = (upper[item] * raised[item] + moved * powers) / kept if kept > 0 else 1.0
    if felt > _FELT and not precise:
        return _lift(factor, tau, m, precise=True)
    upper = np.where(resolved[:, None], np.fmin(upper, 1.0) ** 2, 1.0)
    return upper, lift.forget_keys() if resolved.all() else None


def _block(rows: Rows, p: float, epsilon: float, rng: int | np.random.Generator | None) -> Float64:
    """Bound the sensitivity of all even monotone functions of growth p ≥ 2, for a batch of one.

    Where ⟨k_j, y⟩ = 1, a block b of rows adds at least min(1, 1/t) to Σ min(1, |⟨k_l, y⟩|^p) with 1/t the least
    ‖K_b y‖_p^p: one of its entries is at least 1, or the sum of powers is at least 1/t. In its own block j adds 1
    itself, and the others at least min(1, 1/t − 1).
    """
    n = rows.shape[1]
    present = np.arange(n) if rows.mask is None else np.flatnonzero(to_numpy(rows.mask)[0])
    generator = rng if isinstance(rng, np.random.Generator) else np.random.default_rng(0 if rng is None else rng)
    order = generator.permutation(present)
    sums = np.zeros(n)
    undecided = np.sort(present)
    left = _taken(rows, undecided)
    for members in np.array_split(order, _block_count(len(order), epsilon)):
        if not len(undecided):
            break
        factor, constant = _of_block(_taken(rows, np.sort(members)), p)
        t = to_numpy(factor.on(left).scores(member=False)[0])[0]
        own = np.zeros(n, np.float32)
        own[members] = 1.0
        shrink = (1 + 4 * float(factor.score_error[0])) ** (-p / 2) / constant  # 0 where the error is infinite

        def body(part: slice, t: Any = t, own: Any = own, shrink: float = shrink, at: Any = undecided) -> None:
            mine = own[at[part]]
            with np.errstate(divide="ignore", over="ignore"):
                each = shrink / (t[part] if p == 2 else t[part].astype(np.float64) ** (p / 2))
            sums[at[part]] += np.clip(each, mine, 1 + mine) if shrink else mine

        _by_chunks(body, len(undecided))
        still = np.flatnonzero(sums[undecided] * epsilon <= 1 + 1e-6)
        if len(still) < 0.8 * len(undecided):  # a copy of the rest costs less than to go on with all
            undecided = undecided[still]
            left = _taken(rows, undecided)
    with np.errstate(divide="ignore"):
        return np.asarray(np.minimum((1 + 1e-6) / sums, 1.0))


def _block_count(n: int, epsilon: float) -> int:
    """Return into how many blocks n keys go: none is empty, and there are few where no number of them decides a key.

    Blocks of one key each add up to at most n, and others to less: for ε ≤ 1/n no bound falls below ε.
    """
    most = n if n * epsilon > 1 else min(n, _MOST_IN_VAIN)
    return max(1, math.ceil(min(2 / epsilon, most)))


def _of_block(members: Rows, p: float) -> tuple[Factor, float]:
    """Return a factor and a constant for which t ≤ constant (kᵀM⁺k)^{p/2}: see `_lewis`.

    M is of equal weights where others, rounded, would not leave the row space as it is.
    """
    factor = factor_moments(members, single="yes")
    if p == 2:
        return factor, 1.0
    tau = _scores(factor)
    v, _, moved, _ = _iterated(members, tau, factor.rank, p, _BLOCK_ITERATIONS)
    raised = float(moved[0])
    if math.isfinite(raised):
        factor = factor_moments(replace(members, weights=v), single="yes")
    else:
        v, raised = np.ones(v.shape), 1.0
    total = float(np.sum(v ** (2 * p / (p - 2)), where=tau > 0))
    return factor, max(total, 1.0) ** (p / 2 - 1) * raised**p * (1 + 1e-9)


def _taken(rows: Rows, indices: npt.NDArray[np.int64]) -> Rows:
    """Return some rows of a batch of one, none of them masked; all of them without a copy."""
    keys = rows.keys if len(indices) == rows.shape[1] else take_rows(rows.keys, indices)
    return replace(rows, keys=keys, mask=None)
