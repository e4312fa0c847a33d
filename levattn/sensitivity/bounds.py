"""Certified upper bounds of f-sensitivities: the least of the certificates that apply, and Lewis weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from levattn._core.arrays import Matrices, as_matrices, to_device, to_numpy
from levattn._core.checks import check_epsilon, whole_number
from levattn._core.device import where_arrays_are
from levattn._core.random import as_seed
from levattn._core.types import Float64
from levattn._kernels import Rows
from levattn.functions import AttentionFunction, Power, Softmax, as_function, is_square
from levattn.io import KeySource
from levattn.io.source import whole_keys
from levattn.linalg.factor import Factor
from levattn.sensitivity.certificates import (
    BLOCK_BOUND,
    DIRECT_BOUND,
    LEWIS_BOUND,
    LIFT_BOUND,
    Problem,
    iterated,
    raised_scores,
)
from levattn.sensitivity.leverage import factorize
from levattn.sensitivity.shown import keys_of
from levattn.sensitivity.softmax import BALL_BOUND, JENSEN_BOUND

CertificateMethod = Literal["auto", "leverage", "lewis", "lift", "block", "jensen", "ball"]

# The smallest bound among the certificates that apply to f counts
CERTIFICATES = (DIRECT_BOUND, LEWIS_BOUND, LIFT_BOUND, BLOCK_BOUND, JENSEN_BOUND, BALL_BOUND)

_ITERATIONS = 5  # of Lewis weights; each halves the distance for p = 1, and any weights certify


@dataclass(frozen=True, repr=False, eq=False)
class Sensitivities:
    """Certified upper bounds of sensitivities; the result of `sensitivities`.

    Attributes
    ----------
    upper : array of shape (..., n)
        For each key, a number that its attention score never exceeds, whatever the query.
    certificate : tuple of str
        The certificates whose element-wise minimum `upper` is.
    total : float or array of shape (...,)
        The sum of `upper`.
    total_bound : float or array of shape (...,)
        The theoretical bound of the sum of the sensitivities: ``rank^max(1, p/2)`` for abs(x)^p, infinite for
        softmax. For other functions of growth p it is ``8 rank^max(1, p/2)``. Divided by ε, this bounds the number of
        keys that some such function can give a score of ε.
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
        figures = f", total={self.total:.6g}, total_bound={self.total_bound:.6g}" if self.upper.ndim == 1 else ""
        return f"Sensitivities({keys_of(self.upper)}{figures}, f={self.f!r}, certificate={self.certificate!r})"


@dataclass(frozen=True)
class Bounds:
    """Certified bounds before they go back to the caller."""

    upper: Float64  # (b, n)
    names: tuple[str, ...]  # of the certificates
    total_bound: Float64  # (b,) theoretical bounds of the sums of the sensitivities
    factor: Factor  # of the keys
    leverage: Float64  # (b, n) leverage scores of the keys, raised by their error
    lift: Factor | None  # of the lifted keys, if it exists and has all their directions


@where_arrays_are
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
        Number of iterations, at least 0. For p < 2 each brings the fixed point nearer by the factor 1 − p/2. For p > 2
        the factor is 1 − 2/p in the end. Smaller weights take longer, as they come from leverage scores of unweighted
        keys.
    mask : array of bool, shape (..., n), optional
        True for a key that takes part; the others have weight 0.

    Returns
    -------
    array of float64, shape (..., n)
        Weights, 0 for zero keys. They are approximate; `sensitivities` turns any weights into bounds. For p ≥ 2 each
        lies in [0, 1], and they sum to the rank, up to rounding upward.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.
    NonFiniteError
        If the keys hold NaN or infinity outside the mask.

    See Also
    --------
    levattn.definitions.lewis_weights : The definition, in NumPy.

    Notes
    -----
    Time O(iterations · n d²), memory O(n) beyond K.

    References
    ----------
    Cohen and Peng, ℓp row sampling by Lewis weights, STOC 2015 (arXiv:1412.0588): the fixed point for p < 2. Cohen,
    Cousins, Lee and Yang, A near-optimal algorithm for approximating the John ellipsoid, COLT 2019 (arXiv:1905.11580):
    the iteration for p > 2, there for p = ∞. That each step increases a concave function is shown in docs/design.md.

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
    matrices = as_matrices(K, "K").masked(mask)
    factor = factorize(matrices, method="auto")
    rows, exponent, tau = replace(factor.rows, scale=None), function.p, raised_scores(factor)
    count = whole_number("iterations", iterations, 0)
    if exponent != 2:
        v, tau, _, scale = iterated(rows, tau, factor.rank, exponent, count)
        tau = tau if exponent > 2 else (tau / v**2) ** (exponent / 2) * np.exp(-exponent * scale)
    return matrices.wrap(to_device(np.asarray(tau), matrices.data))


@where_arrays_are
def sensitivities(
    K: Any,
    /,
    f: Any = 2,
    *,
    method: CertificateMethod = "auto",
    mask: Any = None,
    epsilon: float = 0.05,
    iterations: int = _ITERATIONS,
    rng: int | np.random.Generator | None = None,
) -> Sensitivities:
    r"""Bound the largest attention score that any query can give each key.

    The sensitivity of key j is :math:`\sigma_j = \sup_q f(\langle q, k_j\rangle) / \sum_l f(\langle q,
    k_l\rangle)`. The bound is never below it (up to 1e-9, relative), so a key whose bound is below ε never scores ε
    or more.

    Parameters
    ----------
    K : array of shape (..., n, d)
        Keys, as in `leverage_scores`, dense, or files opened with `open_keys`, which are loaded.
    f : float, str, AttentionFunction or Softmax, default 2
        The attention function; a number p is abs(x)^p.
    method : {"auto", "leverage", "lewis", "lift", "block", "jensen", "ball"}
        "leverage": for abs(x)^p from the leverage scores τ alone, :math:`\tau_{\max}^{1-p/2} \tau_j^{p/2}` for p ≤
        2 and :math:`n^{p/2-1} \tau_j^{p/2}` for p ≥ 2; exact for p = 2. Here n counts the keys that are not zero.
        "lewis": for abs(x)^p from Lewis weights, converged or not. "lift": for even p the leverage scores of all
        products of p/2 coordinates. "block": for every function of the protocol, from leverage scores with respect to
        the blocks of a random partition. For growth above 2 it uses Lewis weights of the blocks. "jensen": for
        `Softmax` from the distances of the keys to their mean. "ball": the bound of "jensen", improved by a concave
        program for keys whose bound is at least ε. "auto": the element-wise minimum of the methods that apply and are
        not too expensive.
    mask : array of bool, shape (..., n), optional
        True for a key that takes part; the others have bound 0.
    epsilon : float in (0, 1], default 0.05
        For "block" and "ball": the threshold that the bounds are made for. Bounds below it are not made smaller.
        "block" takes ⌈2/ε⌉ blocks, at most n, and at most 256 for ε ≤ 1/n, which none of its bounds can reach.
    iterations : int, default 5
        For "lewis": see `lewis_weights`. Any number gives valid bounds.
    rng : int or numpy.random.Generator, optional
        For "block": the seed of the partition, 0 if left out. All matrices of a batch share it. Every partition gives
        valid bounds.

    Returns
    -------
    Sensitivities
        The bounds, their sum, and a theoretical bound of the sum of the sensitivities.

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
    levattn.definitions.sensitivities : The definition, in NumPy.

    Notes
    -----
    Time O(n d²) for "leverage", "lewis" (times the iterations) and "jensen"; O(n d²/ε) for "block". "lift" takes time
    O(n D²) and memory O(n D) with D = C(d + p/2 − 1, p/2); fewer than D keys have the bound 1. "ball" takes time
    O(n (n' + 256) d), where n' keys are undecided after a pass over groups of keys (0 if n n' is above 3·10⁸). "auto"
    uses it up to 50 000 keys. The bounds include the estimated rounding error.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462): sensitivities and universal
    sets (Theorem 1). Cohen and Peng, STOC 2015: Lewis weights bound sensitivities. docs/design.md proves the
    bounds from any weights and from blocks.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> K = np.random.default_rng(0).standard_normal((1000, 4))
    >>> K[0] *= 100
    >>> found = levattn.sensitivities(K, levattn.Huber(1.0), epsilon=0.1)
    >>> int(found.upper.argmax()), bool(found.upper[1:].max() < 0.1)
    (0, True)
    """
    if isinstance(K, KeySource):
        with whole_keys(K) as keys:
            return sensitivities(keys, f, method=method, mask=mask, epsilon=epsilon, iterations=iterations, rng=rng)
    function = as_function(f)
    matrices = as_matrices(K, "K").masked(mask)
    bounds = certify(matrices, function, method=method, epsilon=epsilon, iterations=iterations, rng=rng)
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
    epsilon: float = 0.05,
    iterations: int = _ITERATIONS,
    rng: int | np.random.Generator | None = None,
) -> Bounds:
    """Return the bounds that apply to f, and the factor of the keys."""
    if isinstance(f, Softmax):
        f.require_radius()
    applying = {each.name: each for each in CERTIFICATES if each.applies(f)}
    if not isinstance(method, str) or (method != "auto" and method not in applying):
        raise ValueError(
            f"method is {method!r}; expected 'auto' or, for f = {f!r}, one of {', '.join(map(repr, applying))}"
        )
    epsilon = check_epsilon(epsilon)
    iterations, seed = whole_number("iterations", iterations, 0), as_seed(rng)
    factor = factorize(matrices, method="gram" if is_square(f) else "auto")
    # bounds depend only on the column space of the keys, except for softmax, which depends on their norms
    rows = factor.rows if not isinstance(f, Softmax) else Rows.of(matrices)
    rows = replace(rows, scale=None)  # the scale fits this factor only; blocks and weighted rows find their own
    alone = np.zeros(rows.shape[0], np.bool_)  # matrices of independent keys: some query attends to one key alone
    if factor.wide is not None and not isinstance(f, Softmax):
        alone = factor.wide.independent
    tau = raised_scores(factor)
    problem = Problem(f, factor, rows, tau, epsilon, iterations, seed)
    chosen = [
        each for each in applying.values() if (each.is_cheap(problem) if method == "auto" else each.name == method)
    ]
    upper: Float64 | None = None
    lift: Factor | None = None
    with np.errstate(over="ignore", invalid="ignore"):  # a bound that overflows is ignored
        for certificate in reversed(chosen) if not alone.all() else ():  # the largest in memory first
            bound, lifted = certificate.bound(problem)
            lift = lifted or lift
            # fmin, because infinity times zero is NaN
            upper = np.fmin(1.0 if upper is None else upper, bound, out=bound)
            del bound
    upper = np.ones(tau.shape) if upper is None else upper
    upper[alone] = 1.0
    if not isinstance(f, Softmax):  # where f(0) > 0, the zero query gives a zero key 1/n
        at_zero = 1 / np.maximum(problem.counts, 1) if float(f(np.zeros(1))[0]) > 0 else np.zeros(len(tau))
        for item, value in enumerate(at_zero):
            upper[item, ~(tau[item] > 0)] = value
    upper[(tau > 0) & (upper == 0)] = np.nextafter(0.0, 1.0)  # where the sensitivity is below the range of float64
    if rows.mask is not None:
        upper[~to_numpy(rows.mask)] = 0.0
    names = tuple(each.name for each in chosen)
    return Bounds(upper, names, _total_bound(f, factor.rank.astype(np.float64)), factor, tau, lift)


def _total_bound(f: AttentionFunction | Softmax, rank: Float64) -> Float64:
    """Return the theoretical bounds of the sums of the sensitivities, (b,)."""
    if isinstance(f, Softmax):
        return np.full(len(rank), np.inf)
    with np.errstate(over="ignore"):
        powers = rank ** max(1.0, f.growth / 2)
        return np.asarray(powers if isinstance(f, Power) else 8 * powers, np.float64)
