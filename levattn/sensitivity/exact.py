"""Sensitivities of few keys to nearly full precision, the reference for certificates and approximations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import as_matrices, to_float64
from levattn._core.blas import lapack
from levattn._core.device import where_arrays_are
from levattn._core.types import Flags, Float64
from levattn.exceptions import NonFiniteError
from levattn.functions import Power, Softmax, as_function
from levattn.linalg.routes import rank_tolerance
from levattn.sensitivity.shown import keys_of, span

_EPS = float(np.finfo(np.float64).eps)
_MOST_KEYS = 2000
_MOST_VERTICES = 20_000_000  # subsets times keys
_MOST_POWER = 1000  # largest power of two in a query: products with keys of reciprocal size have a finite sum
_MOST_LOGIT = 1e100  # its square is still finite
_FAINT = 1e-150  # relative to the largest key: squares of smaller keys leave the range of float64
_LEAST = 2.0**-1074  # a bound of sensitivities below the range of float64
_CLOSED = 1e-11  # relative width at which a bracket is final
_STEPS = 300
_ENTRIES = 4_000_000  # of the largest temporary array


@dataclass(frozen=True, repr=False, eq=False)
class ExactSensitivities:
    """Brackets of the sensitivities of keys, and the queries that reach the lower ends.

    The result of `exact_sensitivities`.

    Attributes
    ----------
    lower : array of shape (n,), float64
        A ratio that some query reaches: never above the sensitivity, up to rounding.
    upper : array of shape (n,), float64
        Proven by duality or enumeration: never below the sensitivity, up to rounding. 1 where nothing is proven.
    queries : array of shape (n, d), float64
        Row j is a query that gives key j the score ``lower[j]``, for `Softmax` an admitted query; zeros for a key of
        sensitivity 0. The score computed in float64 agrees with `lower` to about :math:`10^{-15}` times the condition
        number of the keys with scaled columns. (For p < 1, take this product to the power p.) For `Softmax` the factor
        is the largest logit instead.
    method : str
        "svd", "linear program", "convex program", "vertices" or "concave program".

    Examples
    --------
    >>> import numpy as np, levattn
    >>> K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> found = levattn.exact_sensitivities(K, 4)
    >>> found
    ExactSensitivities(3 keys, total=2.66667, method='convex program')
    >>> scores = (found.queries @ K.T) ** 4
    >>> np.diag(scores / scores.sum(axis=1, keepdims=True)).round(6)
    array([0.888889, 0.888889, 0.888889])
    """

    lower: Float64
    upper: Float64
    queries: Float64
    method: str

    def __repr__(self) -> str:
        """Return the figures on one line."""
        total = span([self.lower.sum(), self.upper.sum()])
        return f"ExactSensitivities({keys_of(self.upper)}, total={total}, method={self.method!r})"


@where_arrays_are
def exact_sensitivities(K: Any, /, f: Any = 2) -> ExactSensitivities:
    r"""Sensitivities of a few keys, to nearly full precision.

    The sensitivity of key :math:`k_j` is the largest attention that any query can give it,

    .. math:: \sigma_j = \sup_y f(\langle k_j, y\rangle) / \sum_l f(\langle k_l, y\rangle),

    over the y with a positive sum; for `Softmax`, over the queries that it admits. The result brackets each
    sensitivity, ``lower <= σ <= upper``. `lower` is the ratio at a query that the method found. `upper` proves that no
    query is better, by a feasible point of the dual program (`Power`, p ≥ 1), all candidates (p < 1) or a tangent
    plane (`Softmax`). The relative width is about 1e-11. Brackets are wider for exponents near 1, for logits
    in the millions and for keys of very different sizes. For a singular Σ they are wider by some 1e-7 of the logits.
    For p < 1 they are wider by about :math:`10^{-15p}` where r keys or more are orthogonal to one query, with r the
    rank.

    All brackets hold up to the rounding of float64. This is about :math:`10^{-14}` times the condition number of the
    keys with scaled columns, for p < 1 to the power p. Keys that lie in the numerical row space up to rounding count
    as if they lay in it. `upper` is 1 for a key that reaches outside by more. So it is for a key that is smaller than
    the others by a factor of :math:`10^{150}`.

    Parameters
    ----------
    K : array of shape (n, d)
        Keys, one per row, with n up to 2000; array types and dtypes as in `leverage_scores`.
    f : float, str, Power or Softmax, default 2
        An exponent p > 0, a `Power` or a `Softmax`; no exact method is known for other functions.

    Returns
    -------
    ExactSensitivities
        The brackets, and the queries that reach the lower ends.

    Raises
    ------
    TypeError
        If K is not an array of real floating dtype, or f is no attention function.
    ValueError
        If K is not a matrix or too large for the method, or f is neither a power nor `Softmax`.
    NonFiniteError
        If the keys hold NaN or infinity; the first such rows are named.

    See Also
    --------
    sensitivities : Certified upper bounds of the sensitivities for any f and any number of keys.
    levattn.definitions.sensitivities : The definition, in NumPy.

    Notes
    -----
    Let r be the rank. p = 2 costs O(n d²). p = 1 costs, for each key, a linear program of r rows and n columns. Other
    p > 1 and `Softmax` take, for each key, some ten to some hundred steps of O(n r² + r³). For p < 1 each of the
    C(n, r − 1) subsets of keys costs O(n r + r³), and at most 2·10⁷ subsets times keys are allowed. Equal keys count
    once.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462), section 3. Padmanabhan,
    Woodruff, Zhang, "Computing Approximate ℓp Sensitivities", NeurIPS 2023 (arXiv:2311.04158), for many keys.

    Examples
    --------
    A query along the first axis attends to two keys, and so does the query (1, −1):

    >>> import numpy as np
    >>> from levattn import exact_sensitivities
    >>> K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> for p in (0.5, 1, 2, 4):
    ...     print(p, exact_sensitivities(K, p).lower.round(4))
    0.5 [0.5 0.5 0.5]
    1 [0.5 0.5 0.5]
    2 [0.6667 0.6667 0.6667]
    4 [0.8889 0.8889 0.8889]
    """
    f = as_function(f)
    if not isinstance(f, Power | Softmax):
        raise ValueError(
            f"f is {f!r}; expected an exponent, Power or Softmax, for which there is an exact method. "
            "Use sensitivities, which gives certified upper bounds for every attention function"
        )
    keys = _keys(K)
    return _of_softmax(keys, f) if isinstance(f, Softmax) else _of_power(keys, f)


def _keys(K: Any) -> Float64:
    matrices = as_matrices(K, "K")
    if matrices.batch:
        raise ValueError(
            f"K has shape {(*matrices.batch, matrices.n, matrices.d)}; expected one matrix (n, d). "
            "Call exact_sensitivities for each matrix of a batch"
        )
    if matrices.n > _MOST_KEYS:
        raise ValueError(
            f"K has n = {matrices.n} keys; expected at most {_MOST_KEYS}, because each is a program of its own. "
            "Use a certificate, such as leverage_scores, or fewer keys"
        )
    keys: Float64 = to_float64(matrices.data, matrices.format)[0]
    bad = np.flatnonzero(~np.isfinite(keys).all(axis=1))
    if bad.size:
        raise NonFiniteError(f"K holds NaN or infinity, first in rows {bad[:5].tolist()}; expected finite keys")
    return keys


def _of_power(keys: Float64, f: Power) -> ExactSensitivities:
    live = keys.any(axis=1)
    lower, upper, queries = np.zeros(len(keys)), np.zeros(len(keys)), np.zeros(keys.shape)
    method, bracket = _method(f.p)
    if not live.any():
        return ExactSensitivities(lower, upper, queries, method)
    # Keys may be so much larger than the key in question that f overflows; that result is not used.
    with np.errstate(over="ignore"):
        rows, inverse, counts = _distinct(_signed(keys[live]))
        basis, unreduced, missed = _reduce(rows, counts)
        seen = np.abs(basis).max(axis=1, initial=0.0) > _FAINT
        low, high, y = np.zeros(len(rows)), np.ones(len(rows)), np.zeros(basis.shape)
        low[seen], high[seen], y[seen] = bracket(basis[seen], counts[seen])
        q = unreduced(_unit(y))  # the size does not matter, and the powers of numbers up to 1 do not overflow
        # For a row that B misses, products with B may be noise.
        low[missed] = np.diagonal(_scores(f, q[missed] @ rows.T, counts)[:, missed])
        high = np.where(missed, 1.0, np.maximum(high, np.maximum(low, _LEAST)))
    lower[live], upper[live] = np.minimum(low, 1.0)[inverse], np.minimum(high, 1.0)[inverse]
    queries[live] = q[inverse]
    return ExactSensitivities(lower, upper, queries, method)


# Takes B and counts; returns lower and upper bounds of each sensitivity, and a query that reaches the lower bound.
_Bracket = Callable[[Float64, Float64], tuple[Float64, Float64, Float64]]


def _method(p: float) -> tuple[str, _Bracket]:
    if p == 2:
        return "svd", lambda B, _: (_by_leverage(B), _by_leverage(B), B)
    if p == 1:
        return "linear program", _by_program
    if p > 1:
        return "convex program", lambda B, counts: _by_parts(partial(_least_powers, B, counts, p), B)
    return "vertices", lambda B, counts: _by_vertices(B, counts, p)


def _scores(f: Power, x: Float64, counts: Float64) -> Float64:
    """Return f(x) divided by its sum over the last axis, where an entry counts for several keys."""
    values = f(x)
    totals = (values @ counts)[:, None]
    return np.asarray(np.divide(values, totals, out=np.zeros_like(values), where=totals > 0))


def _improve(best: Float64, queries: Float64, keys: npt.NDArray[np.intp], values: Float64, y: Float64) -> None:
    """Write the values of distinct keys, and the queries that reach them, where the values are better."""
    better = values > best[keys]
    best[keys[better]], queries[keys[better]] = values[better], y[better]


def _unit(y: Float64) -> Float64:
    """Return the rows scaled to length 1; zero rows stay zero."""
    y = y / np.maximum(np.abs(y).max(axis=1, keepdims=True, initial=0.0), 1e-300)  # so that squares are in range
    return np.asarray(y / np.maximum(np.linalg.norm(y, axis=1, keepdims=True), 0.5))


# -- rows ------------------------------------------------------------------------------


def _signed(rows: Float64) -> Float64:
    """Return the rows with the sign that makes the first nonzero entry positive."""
    first = np.take_along_axis(rows, (rows != 0).argmax(axis=1)[:, None], axis=1)
    return np.where(first < 0, -rows, rows) + 0.0  # and no negative zeros, which differ from zeros in bytes


def _distinct(rows: Float64) -> tuple[Float64, npt.NDArray[np.intp], Float64]:
    """Return the distinct rows, the index of each row among them, and how often each occurs."""
    distinct, inverse, counts = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
    return distinct, inverse.reshape(-1), counts.astype(np.float64)


def _reduce(rows: Float64, counts: Float64) -> tuple[Float64, Callable[[Float64], Float64], Flags]:
    """Return B (n, r) with the column space of the rows and ``Bᵀ diag(counts) B = I``.

    Queries can give B the same scores as the rows, so B can replace the rows. Also return a function that turns
    queries of B into queries of the rows, and flags of the rows that B misses.
    """
    _, exponents = np.frexp(np.abs(rows).max(axis=0))
    scaled = np.ldexp(rows, -exponents)  # powers of two: exact, and nothing overflows from here on
    root = np.sqrt(counts)[:, None]
    _, s, Vt = lapack(np.linalg.svd, root * scaled, full_matrices=False)
    rank = int(np.count_nonzero(s > rank_tolerance(max(rows.shape)) * s[0]))
    V = Vt[:rank].T
    left = np.linalg.norm(scaled - (scaled @ V) @ V.T, axis=1)
    # Both norms may underflow; then the row counts as missed.
    missed = left >= 64 * rows.shape[1] * _EPS * np.linalg.norm(scaled, axis=1)
    # From the rows, because the left singular vectors give a small row with absolute precision only.
    whitening = V / s[:rank]
    basis = scaled @ whitening
    _, R = lapack(np.linalg.qr, root * basis)

    def unreduced(y: Float64) -> Float64:
        queries, powers = np.frexp(np.linalg.solve(R, y.T).T @ whitening.T)
        powers = np.where(queries == 0, 0, powers - exponents)
        excess = powers.max(axis=1, keepdims=True, initial=_MOST_POWER) - _MOST_POWER
        return np.asarray(np.ldexp(queries, powers - excess))

    return np.linalg.solve(R.T, basis.T).T, unreduced, missed


def _chunks(total: int, entries: int) -> list[slice]:
    """Cut range(total) into slices that need a bounded array, of `entries` numbers for each item."""
    size = max(1, _ENTRIES // max(entries, 1))
    return [slice(start, start + size) for start in range(0, total, size)]


def _by_parts(
    bracket: Callable[[npt.NDArray[np.intp]], tuple[Float64, Float64, Float64]], B: Float64
) -> tuple[Float64, Float64, Float64]:
    """Bracket the sensitivities of all rows of B, block by block."""
    lower, upper, queries = np.zeros(len(B)), np.ones(len(B)), np.zeros(B.shape)
    for part in _chunks(len(B), max(len(B), B.shape[1] ** 2)):
        lower[part], upper[part], queries[part] = bracket(np.arange(len(B))[part])
    return lower, upper, queries


# -- powers ----------------------------------------------------------------------------


def _by_leverage(B: Float64) -> Float64:
    return np.asarray(np.einsum("la,la->l", B, B))


def _feasible(z: Float64, B: Float64, counts: Float64, target: Float64) -> Float64:
    """Return, for each row, the z with ``Bᵀz = target`` nearest to the given z."""
    for _ in range(2):  # the second round removes the rounding of the first
        z = z + ((target - z @ B) @ B.T) * counts
    return z


def _by_program(B: Float64, counts: Float64) -> tuple[Float64, Float64, Float64]:
    """Bracket the sensitivities for p = 1; the queries give their keys the score 1.

    1/σ = min Σ c_l |⟨b_l, y⟩| over ⟨b_j, y⟩ = 1 is the largest s with Bᵀz = s b_j and |z_l| ≤ c_l. This dual is
    the smaller program; its multipliers are y.
    """
    from scipy.optimize import linprog

    n, r = B.shape
    lower, upper, queries = np.zeros(n), np.ones(n), B / _by_leverage(B)[:, None]
    cost = np.append(np.zeros(n), -1.0)
    bounds = [*((-c, c) for c in counts), (0, None)]
    for j, target in enumerate(B):
        size = np.abs(target).max()  # the solver's tolerances are absolute
        found = linprog(
            cost,
            A_eq=np.column_stack([B.T, -target / size]),
            b_eq=np.zeros(r),
            bounds=bounds,
            method="highs-ds",
        )
        candidates = [queries[j]]
        if found.x is not None and found.x[-1] > 0:
            candidates.append(np.asarray(found.eqlin.marginals))
            z = _feasible(found.x[:n] * (size / found.x[-1]), B, counts, target)
            upper[j] = np.max(np.abs(z) / counts)
        for y in candidates:
            x = np.abs(B @ y)
            if x[j] / (counts @ x) > lower[j]:
                lower[j], queries[j] = x[j] / (counts @ x), y / (target @ y)
    return lower, upper, queries


def _least_powers(
    B: Float64, counts: Float64, p: float, keys: npt.NDArray[np.intp]
) -> tuple[Float64, Float64, Float64]:
    """Minimize Σ c_l |⟨b_l, y⟩|^p over ⟨b_j, y⟩ = 1 for each of the keys j.

    Iteratively reweighted least squares gives the direction, which for a power is also Newton's direction. The step is
    the best along it. The weighted residual w x of the least squares satisfies Bᵀ(w x) = b_j up to a factor. So each
    step proves an upper bound by Hölder's inequality: 1 = ⟨b_j, y⟩ = ⟨z, By⟩ ≤ ‖z‖_q ‖By‖_p.
    """
    n, r = B.shape
    lower, upper, queries = np.zeros(len(keys)), np.ones(len(keys)), B[keys]
    outer = np.einsum("la,lb->lab", B, B).reshape(n, r * r)
    q = p / (p - 1)
    at = np.arange(len(keys))
    y = B[keys]
    for _ in range(_STEPS):
        target = B[keys[at]]
        y = y / np.einsum("ja,ja->j", target, y)[:, None]
        x = y @ B.T
        size = np.abs(x)
        largest = size.max(axis=1, keepdims=True)
        share = size / largest
        _improve(lower, queries, at, (1 / largest[:, 0]) ** p / (share**p @ counts), y)
        # Floors keep the system solvable. They cost nothing but speed: z is feasible for any weights.
        weights = counts * np.maximum(np.maximum(share, 1e-12) ** (p - 2), 1e-13)
        newest = _solve((weights @ outer).reshape(-1, r, r), target)
        z = _feasible(weights * (newest @ B.T), B, counts, target)
        each = np.abs(z) / counts
        top = each.max(axis=1)
        norm = top * ((each / top[:, None]) ** q @ counts) ** (1 / q)
        upper[at] = np.minimum(upper[at], norm**p)
        open_ = upper[at] - lower[at] > _CLOSED * upper[at]
        if not open_.any():
            break
        at, y, x, target, newest = at[open_], y[open_], x[open_], target[open_], newest[open_]
        direction = newest / np.einsum("ja,ja->j", target, newest)[:, None] - y
        y = y + _best_step(x, direction @ B.T, counts, p)[:, None] * direction
    return lower, upper, queries


def _solve(matrices: Float64, sides: Float64) -> Float64:
    """Solve positive semi-definite systems, with the ridge that rounding requires."""
    r = matrices.shape[-1]
    trace = np.trace(matrices, axis1=-2, axis2=-1)[:, None, None]
    return np.asarray(np.linalg.solve(matrices + 1e-15 * trace * np.eye(r), sides[:, :, None])[:, :, 0])


def _best_step(x: Float64, dx: Float64, counts: Float64, p: float) -> Float64:
    """Return the step, at most twice Newton's step, at which Σ c_l |x_l + step dx_l|^p is least."""

    def slope(x: Float64) -> Float64:
        return np.asarray(counts * np.sign(x) * (np.abs(x) / np.abs(x).max(axis=1, keepdims=True)) ** (p - 1))

    low, high = np.zeros(len(x)), np.full(len(x), 2 * max(1.0, 1 / (p - 1)))
    for _ in range(32):
        middle = (low + high) / 2
        rising = np.einsum("jl,jl->j", slope(x + middle[:, None] * dx), dx) > 0
        low, high = np.where(rising, low, middle), np.where(rising, middle, high)
    return low


def _by_vertices(B: Float64, counts: Float64, p: float) -> tuple[Float64, Float64, Float64]:
    """Bracket the sensitivities for p ≤ 1: Σ c_l |x_l|^p is concave where no x_l changes its sign.

    So the sum is least at a vertex of the cells, where r − 1 independent keys score 0. Each such subset of keys gives
    one query, the same for every j.
    """
    n, r = B.shape
    subsets = math.comb(n, r - 1)
    if subsets * n > _MOST_VERTICES:
        raise ValueError(
            f"K has {n} distinct keys of rank {r}, so that f = Power({p:g}) has {subsets} vertices; expected at most "
            f"{_MOST_VERTICES // n} with so many keys. Give fewer keys or columns, or an exponent of at least 1"
        )
    lower, upper, queries = np.zeros(n), np.zeros(n), np.zeros(B.shape)
    norms = np.linalg.norm(B, axis=1)
    unit = B / norms[:, None]
    several = itertools.combinations(range(n), r - 1)
    for part in _chunks(subsets, max(n, r * r)):
        size = len(range(subsets)[part])
        index = np.array(list(itertools.islice(several, size)), dtype=np.intp).reshape(size, r - 1)
        _, s, Vt = lapack(np.linalg.svd, unit[index], full_matrices=True)
        least = s[:, -1] if r > 1 else np.ones(size)
        kept = least > 64 * r * _EPS  # a dependent subset shares its vertex with an independent one
        if not kept.any():
            continue
        y = Vt[kept, -1]
        x = np.abs(y @ B.T)
        doubt = (8 * r * _EPS / least[kept])[:, None] * norms
        for array in (x, doubt):
            np.put_along_axis(array, index[kept], 0.0, axis=1)
        small, large = np.maximum(x - doubt, 0.0) ** p, (x + doubt) ** p
        sums = [np.maximum(terms @ counts, 1e-300)[:, None] for terms in (large, small)]
        # The key's own term is the same number in numerator and denominator.
        below, above = (
            own / np.maximum(total - counts * (other - own), own * counts + 1e-300)
            for own, other, total in ((small, large, sums[0]), (large, small, sums[1]))
        )
        _improve(lower, queries, np.arange(n), below.max(axis=0), y[below.argmax(axis=0)])
        upper = np.maximum(upper, above.max(axis=0))
    return lower, upper, queries


# -- softmax ---------------------------------------------------------------------------


def _of_softmax(keys: Float64, f: Softmax) -> ExactSensitivities:
    method = "concave program"
    root = f.root(keys.shape[1])
    if len(keys) == 0:
        return ExactSensitivities(np.zeros(0), np.zeros(0), np.zeros(keys.shape), method)
    rows, inverse, counts = _distinct(keys + 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        logits = (rows - rows.mean(axis=0)) @ root  # a common shift does not change softmax
        largest = np.abs(logits).max()
    if not largest < _MOST_LOGIT:
        raise ValueError(f"K and f make logits of {largest:.2g}; expected less than {_MOST_LOGIT:.0e}. Scale K down")
    V = lapack(np.linalg.svd, logits, full_matrices=False)[2].T  # rotates the ball and drops unused axes
    A = logits @ V
    lower, upper, u = _by_parts(partial(_most_logits, A, np.log(counts)), A)
    if f.matrix is not None:  # an upper end allows for the rounding of Σ, and a lower end must not use it
        root = f.root(keys.shape[1], within=True)
        lower = _reached(rows, np.log(counts), u @ (root @ V).T)
    slack = 8 * _EPS * (A.shape[1] + 4) * float(np.linalg.norm(A, axis=1).max())
    lower, upper = np.exp(lower - slack), np.minimum(np.exp(np.minimum(upper + slack, 0.0)), 1.0)
    queries = u @ (root @ V).T
    return ExactSensitivities(lower[inverse], np.maximum(lower, upper)[inverse], queries[inverse], method)


def _reached(rows: Float64, log_counts: Float64, queries: Float64) -> Float64:
    """Return the logarithm of the weight that each row has at the query of its number, less its rounding."""
    rows, found = rows - rows.mean(axis=0), np.empty(len(rows))
    sizes = np.abs(rows)
    for part in _chunks(len(rows), len(rows)):
        logits = queries[part] @ rows.T + log_counts
        shift = logits.max(axis=1, keepdims=True)
        own = np.einsum("ja,ja->j", queries[part], rows[part])
        largest = (np.abs(queries[part]) @ sizes.T).max(axis=1)  # of products before they cancel
        doubt = 2 * _EPS * (rows.shape[1] + 4) * largest
        found[part] = own - shift[:, 0] - np.log(np.exp(logits - shift).sum(axis=1)) - doubt
    return found


def _most_logits(A: Float64, log_counts: Float64, keys: npt.NDArray[np.intp]) -> tuple[Float64, Float64, Float64]:
    """Bracket the largest ⟨a_j, u⟩ − log Σ c_l exp⟨a_l, u⟩ over ‖u‖ ≤ 1 for each of the keys j.

    Each step maximizes the quadratic model in the ball, then searches the line to that maximum. The function is
    concave, so the largest value of its tangent plane in the ball is an upper bound.
    """
    n, r = A.shape
    lower, upper, queries = np.full(len(keys), -np.inf), np.zeros(len(keys)), np.zeros((len(keys), r))
    outer = np.einsum("la,lb->lab", A, A).reshape(n, r * r)
    at, u = np.arange(len(keys)), np.zeros((len(keys), r))

    def weights(logits: Float64) -> tuple[Float64, Float64]:
        shift = logits.max(axis=1, keepdims=True)
        terms = np.exp(logits - shift)
        total = terms.sum(axis=1, keepdims=True)
        return terms / total, (shift + np.log(total))[:, 0]

    for _ in range(_STEPS):
        own, x = A[keys[at]], u @ A.T
        parts, sums = weights(x + log_counts)
        value = np.einsum("ja,ja->j", own, u) - sums
        mean = parts @ A
        gradient = own - mean
        steep = np.linalg.norm(gradient, axis=1)
        unit = gradient / np.maximum(steep, 1e-300)[:, None]
        # ‖∇‖ − ⟨∇, u⟩ without its cancellation
        inside = np.maximum(1 - np.einsum("ja,ja->j", u, u), 0.0)
        gap = steep * (((unit - u) ** 2).sum(axis=1) + inside) / 2
        _improve(lower, queries, at, value, u)
        upper[at] = np.minimum(upper[at], value + gap)
        open_ = upper[at] - lower[at] > _CLOSED
        if not open_.any():
            break
        at, u, own, x, parts, gradient, mean = (v[open_] for v in (at, u, own, x, parts, gradient, mean))
        spread = (parts @ outer).reshape(-1, r, r) - mean[:, :, None] * mean[:, None, :]
        move = _ball_step(spread, gradient + np.einsum("jab,jb->ja", spread, u)) - u
        dx, gain = move @ A.T, np.einsum("ja,ja->j", own, move)
        low, high = np.zeros(len(at)), np.ones(len(at))
        full = gain - np.einsum("jl,jl->j", weights(x + dx + log_counts)[0], dx) >= 0
        for _ in range(40):
            middle = (low + high) / 2
            slope = gain - np.einsum("jl,jl->j", weights(x + middle[:, None] * dx + log_counts)[0], dx)
            low, high = np.where(slope > 0, middle, low), np.where(slope > 0, high, middle)
        u = u + np.where(full, 1.0, low)[:, None] * move
        u = u / np.maximum(np.linalg.norm(u, axis=1), 1.0)[:, None]
    return lower, upper, queries


def _ball_step(matrices: Float64, sides: Float64) -> Float64:
    """Minimize vᵀNv/2 − ⟨c, v⟩ over ‖v‖ ≤ 1, for positive semi-definite N."""
    values, vectors = lapack(np.linalg.eigh, matrices)
    values = np.maximum(values, 1e-15 * values[:, -1:])
    c = np.einsum("jab,ja->jb", vectors, sides)
    length = np.linalg.norm(c, axis=1)
    # ‖v‖ = ‖(N + μ)⁻¹ c‖ falls with μ, and is at most 1 at μ = ‖c‖
    low, high = np.zeros(len(c)), length.copy()
    floor = np.maximum(1e-100 * length, 1e-300)[:, None]  # the square of a longer v would overflow

    def at(mu: Float64) -> Float64:
        return np.asarray(c / np.maximum(values + mu[:, None], floor))

    inside = np.linalg.norm(at(low), axis=1) <= 1
    for _ in range(100):
        middle = (low + high) / 2
        outside = np.linalg.norm(at(middle), axis=1) > 1
        low, high = np.where(outside, middle, low), np.where(outside, high, middle)
    v = at(np.where(inside, 0.0, high))
    return np.asarray(np.einsum("jab,jb->ja", vectors, v))
