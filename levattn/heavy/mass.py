"""How much of a softmax falls on a universal set, certified for each query without the logits of the other keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices, as_matrices, take, to_device, to_float64, to_numpy
from levattn._kernels import BLOCK, Float64, Rows, kernels_for
from levattn.exceptions import NonFiniteError
from levattn.heavy.attention import BLOCK_ENTRIES
from levattn.heavy.normalizers import even_queries
from levattn.linalg.factor import UNIT
from levattn.sets.universal import UniversalSet, require_set_of

__all__ = ["SoftmaxMass", "softmax_mass"]

_SLACK = 128  # times d · UNIT · Σ|q_i|‖K_i‖: products, and directions below the numerical rank
_VANISHED = 2.0**-100  # stored scores below this may have underflowed
_LEAST = 2.0**-1022  # a mass below this may be computed as 0


@dataclass(frozen=True, eq=False)
class SoftmaxMass:
    """Bounds of the softmax mass on a universal set; the result of `softmax_mass`.

    Attributes
    ----------
    lower, upper : array of float64, shape (m,)
        The mass of each query's softmax on the keys of the set is at least `lower` and at most `upper`.
    logits_bound : array of float64, shape (m,)
        No key left out has a logit above this. Logits are those of the keys less the mean, ``scale ⟨k − mean, q⟩``,
        where the set was made with ``center=True``; -inf where no key is left out.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> K = np.eye(4)
    >>> mass = levattn.softmax_mass(np.zeros((1, 4)), K, levattn.universal_set(K, size=3))
    >>> mass.lower.round(9), mass.upper.round(9)  # all keys alike
    (array([0.75]), array([0.75]))
    """

    lower: Float64
    upper: Float64
    logits_bound: Float64


def softmax_mass(Q: Any, K: Any, universal: UniversalSet, /, *, scale: float | None = None) -> SoftmaxMass:
    r"""Bound the share of each query's softmax that falls on the keys of a universal set.

    With logits :math:`z_l = \mathrm{scale} \cdot \langle k_l, q\rangle` the captured mass of a query q is

    .. math:: \frac{Z_U}{Z_U + Z_L}, \qquad Z_U = \sum_{l \in U} e^{z_l}, \quad Z_L = \sum_{l \notin U} e^{z_l} .

    :math:`Z_U` is computed. :math:`Z_L` is not, but mean, variance and range of the n' logits left out are known
    from the sum of these keys, from the factor N of the second moment and from the largest leverage score left out,
    τ: :math:`|z_l| \le b = \mathrm{scale} \sqrt\tau \|N q\|`. The bounds are the extremes over all distributions with
    these three, and so cannot be improved from them but for n' being finite.

    They hold for *every* query, whatever its size: `lower` errs downwards and `upper` upwards, rounding included.
    How far apart they are is another matter: a query with a large :math:`\|N q\|` can have all of its logits left
    out well below b, and then `lower` says little (see Notes).

    Parameters
    ----------
    Q : array of shape (m, d)
        Queries.
    K : array of shape (n, d)
        Keys; kinds and dtypes as in `leverage_scores`. Keys outside the mask of `universal` are not in the softmax.
    universal : UniversalSet
        The universal set of these keys for f(x) = x², by ε or by size. ``center=True`` is the better choice, as
        softmax does not see the mean, which makes b larger.
    scale : float, optional
        Factor of the logits; :math:`1/\sqrt d` if not given.

    Returns
    -------
    SoftmaxMass
        Lower and upper bounds, one of each a query.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, no key takes part, or `universal` is of another function or of other keys (shape,
        dtype and scores are compared, those of keys outside the set by a sample).
    NonFiniteError
        If queries or keys hold NaN or infinity.

    See Also
    --------
    universal_set : The set, by threshold or by size.
    sensitivities : Bounds of single softmax scores for all queries of bounded size.

    Notes
    -----
    One pass over the keys for the sum of those left out, O(n d), then O(d² + \|U\| d) a query. Memory O(n + \|U\| d)
    and blocks of at most 32 MB of logits.

    *Proof.* Let the n' logits left out have mean μ and variance v, so that y = z − μ has mean 0, and let y ≤ g (with
    g = b − μ). The quadratic p that meets exp at g and touches it at y₀ = −v/g leaves exp(y) − p(y) =
    (y − g)(y − y₀)² e^ξ/6 ≤ 0 for every y ≤ g, and its leading coefficient is a divided difference of exp, so
    positive. Hence the mean of exp(y) is at most that of p, which depends on v alone and grows with it: the value for
    the two points g, with probability v/(v + g²), and y₀. So it is safe to enlarge v and g. From below, with y ≥ −h
    (h = b + μ), the quadratic that meets exp at −h and touches it at v/h lies below exp for every y ≥ −h; the mean of
    exp(y) is at least the value for −h, with probability v/(v + h²), and v/h. That grows with v and falls with h: it
    is safe to lower v and enlarge h. At v = 0 (or g = 0 or h = 0, which make all y = 0) both are 1. The n' numbers
    have y² ≤ (n' − 1) v (Samuelson's inequality), which also bounds g and h, and v ≤ g h (the mean of (g − y)(y + h)
    is not negative), which bounds v. With n' = 0 the mass is 1, with an empty set 0.

    *Rounding.* Σ z² over the keys left out is the difference of ‖N q‖² and a sum over U, the variance a difference
    again: where U holds nearly everything both cancel. Each is therefore taken as an interval. Logits, ‖N q‖ and the
    root of the sum over U are widened by (128 d + r) 2⁻⁵³ Σ_i \|q_i\| ‖K_i‖, with the columns K_i of the keys:
    products of d terms err by less than d + 3 units of it, the directions below the numerical rank by at most 32 d
    units, and ‖N q‖ by r (`Factor.rounding`), as N is solved for in twice the precision. The factor adds the relative
    error that it estimates, scores theirs, the sum of n' keys 2048 units over √n'. Where logits leave the range of
    float64 the bounds are 0 and 1.

    *Use.* Each key left out may have the largest logit that its leverage score allows, and b is the one of the worst
    of them: about √(n τ) standard deviations of the logits. Where that is a few units the bracket is narrow, where
    it is ten `lower` is next to nothing. On the heads of `levattn.datasets.minilm` a set of 128 of the 512 keys holds
    a median mass of 0.33, between bounds of 0.002 and 0.65.

    References
    ----------
    Krein, Nudelman, The Markov Moment Problem and Extremal Problems, 1977 (two-point extremals); Bennett, Probability
    inequalities for the sum of independent random variables, 1962; Samuelson, How deviant can you be?, 1968.

    Examples
    --------
    A thousand keys, of which five stand out:

    >>> import numpy as np, levattn
    >>> rng = np.random.default_rng(0)
    >>> K = rng.standard_normal((1000, 8))
    >>> K[:5] *= 10
    >>> universal = levattn.universal_set(K, 0.1, center=True)
    >>> mass = levattn.softmax_mass(K[:3] / 3, K, universal)
    >>> bool(mass.lower.min() > 0.99)
    True
    """
    queries, keys = as_matrices(Q, "Q"), as_matrices(K, "K")
    for name, matrices in (("Q", queries), ("K", keys)):
        if matrices.batch:
            shape = (*matrices.batch, matrices.n, matrices.d)
            raise ValueError(f"{name} has shape {shape}; expected one matrix. Call softmax_mass for each head")
    if queries.d != keys.d:
        raise ValueError(f"Q has {queries.d} columns and K has {keys.d}; expected the same number d")
    factor_of_logits = _check_scale(scale, keys.d)
    if isinstance(universal, UniversalSet) and universal.f != 2:
        raise ValueError(
            f"universal is of f = {universal.f!r}; expected the set for f = 2, as leverage scores bound the logits. "
            "Make it by universal_set(K, epsilon, center=True)"
        )
    require_set_of(keys, universal)
    if not universal.present.any():
        raise ValueError("K has no key that takes part; expected at least one, as softmax over no key is not defined")
    known = _Known.of(keys, universal)
    m = queries.n
    lower, upper, largest = np.empty(m), np.empty(m), np.empty(m)
    step = max(16, BLOCK_ENTRIES // max(len(known.selected), keys.d))
    for start in range(0, m, step):
        part = slice(start, min(start + step, m))
        block = to_float64(queries.data[:, part, :], queries.format)[0]
        bad = np.flatnonzero(~np.isfinite(block).all(axis=1))[:5] + start
        if len(bad):
            raise NonFiniteError(f"Q holds NaN or infinity, first in rows {bad.tolist()}; expected finite queries")
        with np.errstate(over="ignore", invalid="ignore"):  # what is not a number becomes a bound that says nothing
            lower[part], upper[part], largest[part] = known.bounds(block, factor_of_logits)
    return SoftmaxMass(lower, upper, largest)


def _check_scale(scale: Any, d: int) -> float:
    if scale is None:
        return 1 / float(np.sqrt(d))
    if isinstance(scale, bool) or not isinstance(scale, int | float | np.integer | np.floating):
        raise TypeError(f"scale is {scale!r}; expected a number, the factor of the logits")
    if not np.isfinite(scale):
        raise ValueError(f"scale is {scale!r}; expected a finite number, the factor of the logits")
    return float(scale)


@dataclass(frozen=True)
class _Known:
    """What is known of the keys before a query comes; keys have the shift taken off and are divided by 2^exponents.

    selected: the keys of the set.
    count, total: how many keys are left out, and their sum.
    score: no leverage score left out is larger.
    N, error: the normaliser and the relative error of ‖N q‖ that the factor brings in.
    slack: what rounding adds, in units of 2⁻⁵³ Σ|q_i|.
    """

    selected: Float64
    count: int
    total: Float64
    score: float
    N: Float64
    error: float
    slack: float
    exponents: npt.NDArray[np.int32]

    @classmethod
    def of(cls, keys: Matrices, universal: UniversalSet) -> _Known:
        factor = universal.factor
        N, exponents = factor.even_normalizer(0)
        shift = factor.shift
        outside = universal.present & ~to_numpy(universal.mask)
        tame = np.clip(-exponents, -1020, 1020)
        rows = Rows(
            keys.data, keys.format, to_device(outside[None], keys.data), shift, np.ldexp(np.ones((1, keys.d)), tame)
        )
        total = np.ldexp(rows.column_sums()[0], -exponents - tame)
        if not np.isfinite(total).all():
            bad = rows.nonfinite_rows(0, 5)
            raise NonFiniteError(
                f"K holds NaN or infinity, first in rows {bad}; expected finite keys, the very ones that universal "
                "was made of"
            )
        selected = to_float64(take(keys.data, universal.indices), keys.format)[0]
        if shift is not None:
            selected = selected - shift[0]
        scores = to_numpy(universal.scores)[outside].astype(np.float64)
        score = float(scores.max(initial=0.0)) * (1 + 4 * float(factor.score_error[0])) + _VANISHED
        return cls(
            selected=np.ldexp(selected, -exponents),
            count=int(outside.sum()),
            total=total,
            score=min(score, 1.0),
            N=N,
            error=float(factor.normalizer_error[0]) + 8 * UNIT,
            slack=_SLACK * keys.d + factor.rounding(0),
            exponents=exponents,
        )

    def bounds(self, Q: Float64, scale: float) -> tuple[Float64, Float64, Float64]:
        """Return the bounds of the mass and the largest logit left out, for some queries."""
        m = len(Q)
        if not self.count:
            return np.ones(m), np.ones(m), np.full(m, -np.inf)
        # lengths are in units of 2^powers, in which no square leaves the range
        even, powers = even_queries(np.where(np.any(self.N != 0, axis=0), Q, 0.0), self.exponents)
        fraction, power = np.frexp(scale)
        even, powers = even * fraction, powers + int(power)
        Z = even @ self.selected.T
        slack = self.slack * UNIT * np.abs(even).sum(axis=1)  # columns of N, and so of the keys, have norms below 1

        mean = even @ self.total / self.count
        off = (BLOCK + self.slack) * UNIT * np.abs(even).sum(axis=1) / np.sqrt(self.count)
        low, high = mean - off, mean + off
        near, far = np.maximum(np.abs(mean) - off, 0.0), np.abs(mean) + off  # of the mean from 0
        whole = np.sqrt(
            kernels_for("heavy", even).query_norms(even, self.N)[0]
        )  # roots of sums of squares: of all logits, and of those in U
        inside, counting = np.sqrt(np.einsum("ij,ij->i", Z, Z)), (len(self.selected) + 8) * UNIT
        most, least = whole * (1 + self.error) + slack, np.maximum(whole * (1 - self.error) - slack, 0.0)
        squares = _difference(most, np.maximum(inside * (1 - counting) - slack, 0.0)) * (1 + 16 * UNIT)
        fewest = _difference(least, inside * (1 + counting) + slack) * (1 - 16 * UNIT)
        variance = np.maximum(squares / self.count - near * near * (1 - 16 * UNIT), 0.0)
        sure = np.maximum(fewest / self.count - far * far * (1 + 16 * UNIT), 0.0)

        bound = np.sqrt(self.score) * most * (1 + 8 * UNIT) + slack
        samuelson = np.sqrt((self.count - 1) * variance) * (1 + 8 * UNIT)
        above = np.minimum(np.maximum(bound - low, 0.0), samuelson)
        below = np.minimum(np.maximum(bound + high, 0.0), samuelson)
        spread = above * below * (1 + 16 * UNIT)
        deviation, certain = np.sqrt(np.minimum(variance, spread)), np.sqrt(np.minimum(sure, spread))

        top = np.ldexp(np.minimum(bound, high + samuelson), powers)
        logits, slack = np.ldexp(Z, powers[:, None]), np.ldexp(slack, powers)
        rounding = slack + 16 * UNIT * (len(self.selected) + 64)
        heaviest = np.ldexp(high, powers) + _log_most(np.ldexp(deviation, powers), np.ldexp(above, powers))
        lightest = np.ldexp(low, powers) + _log_least(np.ldexp(certain, powers), np.ldexp(below, powers))
        ratio = np.log(self.count) - _log_sum(logits)
        lower = (1 - 8 * UNIT) / (1 + np.exp(ratio + heaviest + rounding))
        upper = (1 + 8 * UNIT) / (1 + np.exp(ratio + lightest - rounding)) + (_LEAST if len(self.selected) else 0)
        lower = np.where(np.isnan(lower), 0.0, lower)  # logits beyond the range of float64
        upper = np.where(np.isnan(upper), 1.0, np.minimum(upper, 1.0))
        return lower, upper, np.where(np.isnan(top), np.inf, top)


def _difference(a: Float64, b: Float64) -> Float64:
    """Return a² − b², or 0 where that is negative."""
    return np.asarray(np.maximum(a - b, 0.0) * (a + b))


def _log_sum(Z: Float64) -> Float64:
    """Return the logarithm of Σ exp(z) for each row."""
    if not Z.shape[1]:
        return np.full(len(Z), -np.inf)
    largest = Z.max(axis=1)
    return np.asarray(largest + np.log(np.exp(Z - largest[:, None]).sum(axis=1)))


def _log_most(deviation: Float64, above: Float64) -> Float64:
    """Return the logarithm of the largest mean of exp(y) for y of mean 0 and at most this deviation, y ≤ above."""
    live = (deviation > 0) & (above > 0)
    s, g = np.where(live, deviation, 1.0), np.where(live, above, 1.0)
    # g has probability 1/(1 + (g/s)²), the other atom is −s²/g
    return np.where(live, np.logaddexp(g - _log1p_square(g / s), -s * (s / g) - _log1p_square(s / g)), 0.0)


def _log_least(deviation: Float64, below: Float64) -> Float64:
    """Return the logarithm of the least mean of exp(y) for y of mean 0 and at least this deviation, y ≥ −below."""
    live = (deviation > 0) & (below > 0)
    s, h = np.where(live, deviation, 1.0), np.where(live, below, 1.0)
    return np.where(live, np.logaddexp(-h - _log1p_square(h / s), s * (s / h) - _log1p_square(s / h)), 0.0)


def _log1p_square(x: Float64) -> Float64:
    """Return log(1 + x²)."""
    return np.where(x < 1, np.log1p(np.minimum(x, 1.0) ** 2), 2 * np.log(np.hypot(1, x)))
