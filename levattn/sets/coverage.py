"""Sets with coverage: the keys that new queries need, with a probability that conformal prediction controls."""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass
from typing import Any

import numpy as np

from levattn._core.arrays import Matrices, as_matrices, as_numbers, to_device, to_float64, to_numpy
from levattn._core.checks import TIE, check_epsilon, check_type, fraction, real_number, whole_number
from levattn._core.device import where_arrays_are
from levattn._core.serialize import SharedState, lock_of, locked, twin
from levattn._core.types import Flags, Float64, Int64
from levattn.exceptions import NonFiniteError
from levattn.functions import AttentionFunction, Power, Softmax, as_function
from levattn.io import KeySource
from levattn.io.source import whole_keys
from levattn.sensitivity.expected import as_queries, mean_shares, of_sample
from levattn.sensitivity.leverage import factorize
from levattn.sensitivity.shares import share_blocks
from levattn.sensitivity.two_pass import as_source
from levattn.sets.result import UniversalSet, keys_at, known_by, require_set_of, rescored, result_of

_DRAWS = 1024  # normal queries beside the given ones
_SMALL = 2.0**-16  # the scores left out of a set of a given size are as certain as one of this


@dataclass(frozen=True)
class Covered:
    """The requirement that new queries meet with probability at least `coverage`; exactly one other field is given."""

    coverage: float
    epsilon: float | None = None  # all keys that get ε are in the set
    mass: float | None = None  # the keys of the set get this share together
    size: int | None = None  # of the set, for which the least ε is sought

    def __post_init__(self) -> None:
        """Check the numbers."""
        fraction("coverage", self.coverage)
        if self.mass is not None:
            fraction("mass", self.mass)

    def order(self, Q: Float64, keys: Matrices, present: Flags, f: Any, elsewhere: Float64 | None) -> Float64:
        """Return the scores (n,) that order the keys: from the given queries and from normal queries like them."""
        drawn = of_sample(Q[None]).normal_draws(0, _DRAWS, 0)
        again = None if elsewhere is None else np.resize(elsewhere, _DRAWS)
        given = mean_shares(Q, keys, present, f, self.epsilon, elsewhere)
        return (given + mean_shares(drawn, keys, present, f, self.epsilon, again)) / 2

    def needs(
        self,
        Q: Float64,
        keys: Matrices,
        present: Flags,
        f: Any,
        order: Int64,
        elsewhere: Float64 | None = None,
    ) -> Float64:
        """Return for each query the number of keys that it needs in this order, or for a size the largest score left.

        By mass a query needs that share of its attention to these keys, without its attention elsewhere.
        """
        found, doubt = np.zeros(len(Q)), np.zeros(len(Q))  # what rounding leaves uncertain counts as a need
        if self.size is not None:
            for part, _, A, error in share_blocks(
                Q, keys, present, f, order[self.size :], elsewhere, level=_SMALL, together=False, safe=True
            ):
                found[part], doubt[part] = np.maximum(found[part], A.max(axis=1, initial=0.0)), 2 * error
            return np.where(doubt < 1, np.minimum(found + doubt * np.maximum(found, _SMALL), 1.0), 1.0)
        rank = np.empty(len(present), np.int32 if len(present) < 2**31 else np.int64)
        rank[order] = np.arange(1, len(order) + 1, dtype=rank.dtype)
        if self.epsilon is not None:
            level = self.epsilon
            for part, places, A, error in share_blocks(
                Q, keys, present, f, elsewhere=elsewhere, level=level, together=False
            ):
                least = level * (1 - np.maximum(TIE, 2 * error))
                heavy = np.where(least[:, None] <= A, rank[places], 0)
                found[part] = np.maximum(found[part], heavy.max(axis=1, initial=0))
            return found
        held, mass = np.zeros(len(Q)), self.mass or 0.0
        for part, _, A, error in share_blocks(Q, keys, present, f, order, level=mass):
            so_far = held[part][:, None] + np.cumsum(A, axis=1)
            least = mass * (1 - TIE) * (1 + 2 * error)
            found[part] += np.count_nonzero(so_far < least[:, None], axis=1)
            held[part], doubt[part] = so_far[:, -1], error
        # a query that attends to no key needs none
        return np.where((held > 0) | (doubt > 0), np.minimum(found + 1, len(order)), 0.0)


def least_queries(coverage: float) -> int:
    """Return the least number m of queries with ``⌈(m + 1) coverage⌉ ≤ m``."""
    return max(1, math.ceil(coverage / (1 - coverage) * (1 - TIE)))


def conformal_quantile(values: Float64, coverage: float) -> float:
    """Return the ⌈(m + 1) coverage⌉-th smallest of m ascending values.

    A further value that is exchangeable with them is not larger with probability at least `coverage`, and at most
    ``coverage + 1/(m + 1)`` if no two are equal.
    """
    return float(values[conformal_place(len(values), coverage) - 1])


def conformal_place(m: int, coverage: float) -> int:
    """Return ``⌈(m + 1) coverage⌉``, where rounding does not raise a whole number to the next."""
    return math.ceil((m + 1) * coverage * (1 - TIE))


@where_arrays_are
def covering_set(
    K: Any,
    queries: Any,
    /,
    epsilon: float | None = None,
    *,
    coverage: float,
    size: int | None = None,
    mass: float | None = None,
    f: Any = 2,
    scores: Any = None,
    elsewhere: Any = None,
    mask: Any = None,
) -> UniversalSet:
    r"""Find the keys that hold the large attention scores of queries like the given ones.

    Such a set is often far smaller than the universal set, which serves every query. Half of the queries order the
    keys; the others set the threshold by conformal prediction. Let a new query be *exchangeable* with them. Then all
    keys with :math:`A_j = f(\langle q, k_j\rangle) / \sum_l f(\langle q, k_l\rangle) \ge \varepsilon` lie in
    the set with probability at least `coverage`, whatever f, n and distribution. The probability is over the draw of
    all these queries, the given ones included.

    Parameters
    ----------
    K : array of shape (..., n, d)
        Keys as in `leverage_scores`, dense, or files opened with `open_keys`, which are loaded.
    queries : array of shape (..., m, d)
        A sample of the queries that enter the attention: after rotary embedding, for softmax times the scale of the
        logits (q/√d in most models). Leave out padding. Leading axes are the axes of K, none, or a multiple of
        the last: heads that share keys. A query is then a position, and all its heads find all their keys. m is at
        least about twice coverage/(1 − coverage).
    epsilon : float in (0, 1], optional
        Smallest attention score that counts as large. Give one of `epsilon`, `size` and `mass`.
    coverage : float in (0, 1)
        The probability with which a new query finds all its keys in the set.
    size : int in [0, n], optional
        The number of keys to take. A new query then gives each key outside at most the set's `epsilon`, with
        probability at least `coverage`.
    mass : float in (0, 1), optional
        The guarantee is then that the keys of the set get at least this share of the new query's attention.
    f : float, str, AttentionFunction or Softmax, default 2
        Attention function; a number p is abs(x)^p. `Softmax` needs no radius here.
    scores : array of shape (..., n), optional
        Your own scores for the order of the keys, made without these queries; all queries then set the threshold. If
        left out, scores measure how often and how nearly a key gets ε; for `mass` and `size` they are the mean
        attention.
    elsewhere : array of shape (..., m), optional
        With `Softmax`: for each query the logarithm of Σ exp⟨q, k⟩ over keys outside K, such as later keys of a
        decoder. No set is made for these keys. Scores are then shares of all attention; `mass` is a share of the
        attention to K.
    mask : array of bool, shape (..., n), optional
        True for a key that takes part; the others are removed and never in the set.

    Returns
    -------
    UniversalSet
        The keys of the set, the scores of all keys that order them, and the guarantee "coverage".

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, or not exactly one of `epsilon`, `size` and `mass` is given. Also if there are too few
        queries for the coverage; the message names the least number.
    NonFiniteError
        If keys or queries hold NaN or infinity outside the mask.

    See Also
    --------
    universal_set : The keys for every query.
    AdaptiveCoverage : For queries that are not exchangeable, such as successive ones.
    levattn.definitions.covering_set : The definition, in NumPy.

    Notes
    -----
    Time O(n d² + m n d), memory O(n + m d) and 32 MiB. The queries are split at random, always in the same way.

    The guarantee holds in the mean over the draw of the queries and of the new one. The share that a single set
    reaches scatters about it by √(c(1 − c)/m') for m' queries that set the threshold. The mean would be at most
    c + 1/(m' + 1) if no two queries needed equally many keys. Equal needs, as of queries that need none, raise it.
    Queries are exchangeable if no order of them and the new one is likelier than another. This holds for queries at
    random places of one text, or for texts drawn alike. Successive queries of a text need not be exchangeable.

    References
    ----------
    Vovk, Gammerman, Shafer, Algorithmic Learning in a Random World, 2005, and Lei, G'Sell, Rinaldo, Tibshirani,
    Wasserman, "Distribution-free predictive inference for regression", JASA 113, 2018, Theorem 2 (split conformal
    prediction, both bounds of the coverage).

    Examples
    --------
    Softmax, for queries like 200 given ones: at least 19 in 20 find in the set every key that they give a tenth:

    >>> import numpy as np, levattn
    >>> K = np.random.default_rng(0).standard_normal((1000, 8))
    >>> K[:, 5:] = 0
    >>> K[[10, 20, 30]] = 3 * np.eye(8)[5:]
    >>> Q = 0.3 * np.random.default_rng(1).standard_normal((200, 8)) + 2 * np.eye(8)[5]
    >>> levattn.covering_set(K, Q, 0.1, f=levattn.Softmax(), coverage=0.95).indices
    array([10])
    """
    function = as_function(f)
    asked = [name for name, value in (("epsilon", epsilon), ("size", size), ("mass", mass)) if value is not None]
    if len(asked) != 1:
        given = " and ".join(asked) + " are given" if asked else "epsilon, size and mass are None"
        raise ValueError(f"{given}; expected exactly one of epsilon, size and mass")
    wish = Covered(coverage, None if epsilon is None else check_epsilon(epsilon), mass, size)
    if not isinstance(K, KeySource) and as_source(K) is not None:
        raise ValueError("K gives chunks; expected keys in one dense array or in files")
    with whole_keys(K) as keys:
        matrices = as_matrices(keys, "K").masked(mask)
        return _covering_set(matrices, function, wish, queries, elsewhere=elsewhere, scores=scores)


def _covering_set(
    matrices: Matrices,
    f: AttentionFunction | Softmax,
    wish: Covered,
    queries: Any,
    *,
    elsewhere: Any,
    scores: Any,
) -> UniversalSet:
    """Return the set of keys for queries like the given ones; see `covering_set`."""
    if wish.size is not None:
        whole_number("size", wish.size, 0, matrices.n, what="a whole number of keys")
    known = as_queries(queries, matrices)
    if known.sample is None:
        raise ValueError("queries are moments; expected a sample, (..., m, d), of which some set the threshold")
    present = matrices.present
    b, n = present.shape
    ordered_by = None if scores is None else _scores(scores, matrices)
    g, m = known.group, known.sample.shape[1] // known.group
    rest = None
    if elsewhere is not None:
        rest = logarithms(elsewhere, f, known.sample.shape[:2], np.shape(queries)[:-1], (*matrices.batch, m))
    parts = split_queries(m, wish.coverage, 0, whole=scores is not None)
    fit, test = (np.arange(g)[:, None] * m + part for part in parts)  # of all heads
    factor = factorize(matrices, method="auto")
    kind = np.float64 if matrices.format == "float64" else np.float32
    found, chosen, leverage = np.zeros((b, n), kind), np.zeros((b, n), np.bool_), np.zeros((b, n))
    needs: list[Float64] = []
    for item in range(b):
        keys, here, Q = matrices.item(item), present[item], known.sample[item]
        others = [None if rest is None else rest[item, part.ravel()] for part in (fit, test)]
        by = wish.order(Q[fit.ravel()], keys, here, f, others[0]) if ordered_by is None else ordered_by[item]
        found[item] = np.where(here, by, 0.0)
        del by
        order = np.argsort(np.where(here, -found[item], np.inf), kind="stable")[: np.count_nonzero(here)]
        each_need = wish.needs(Q[test.ravel()], keys, here, f, order, others[1])
        needs.append(np.sort(each_need.reshape(test.shape).max(axis=0)))  # a position needs the keys of all its heads
        limit = conformal_quantile(needs[item], wish.coverage)
        chosen[item, order[: int(limit) if wish.size is None else wish.size]] = True
        rows = known_by(np.flatnonzero(chosen[item]), here, n)
        leverage[item, rows] = rescored(factor, item, keys_at(matrices, item, rows))[0]
    return result_of(
        matrices,
        to_device(chosen, matrices.data),
        to_device(found, matrices.data),
        factor,
        leverage,
        epsilon=wish.epsilon,
        left=None if wish.size is None else np.array([conformal_quantile(of, wish.coverage) for of in needs]),
        guarantee="coverage",
        present=matrices.mask,
        f=f.p if isinstance(f, Power) else f,
        certificate=("conformal",),
        total_bound=np.full(b, np.inf),
        coverage=wish.coverage,
        mass=wish.mass,
        needs=np.array(needs) if b else np.zeros((0, 0)),
    )


def split_queries(
    m: int, coverage: float, seed: int, *, whole: bool = False, name: str = "queries"
) -> tuple[Int64, Int64]:
    """Return the queries that order keys and the queries that set the threshold: random halves, or none and all."""
    least = least_queries(coverage)
    for_scores = 0 if whole else max(1, m // 2)
    if m - for_scores < least:
        more = "" if whole else f" and as many to order the keys, {max(2, 2 * least - 1)}"
        raise ValueError(
            f"{name} are {m} for each head; expected at least {least} to set the threshold{more}, for coverage "
            f"{coverage:g}"
        )
    order = np.random.default_rng(seed).permutation(m)
    return order[:for_scores], order[for_scores:]


def logarithms(elsewhere: Any, f: AttentionFunction | Softmax, shape: tuple[int, ...], *others: Any) -> Float64:
    """Return the logarithms of the sums of queries over other keys, in the shape of the queries, or raise.

    `others` are further shapes that they may have.
    """
    if not isinstance(f, Softmax):
        raise ValueError(f"elsewhere is given and f is {f!r}; expected it for Softmax only")
    array = as_numbers("elsewhere", elsewhere)
    fits = array.size == math.prod(shape) and array.shape in (shape, *others)
    if not fits or not (array < np.inf).all():
        raise ValueError(
            f"elsewhere has shape {array.shape}; expected {others[0] if others else shape}, a number for each query: "
            "the logarithm of its sum over other keys (−∞ for nothing, not NaN or +∞)"
        )
    return array.reshape(shape)


def _scores(scores: Any, matrices: Matrices) -> Float64:
    """Return the scores that order the keys, (b, n), or raise."""
    array = as_numbers("scores", scores)
    shape = (*matrices.batch, matrices.n)
    limit = np.finfo(np.float64 if matrices.format == "float64" else np.float32).max
    if array.shape != shape or not (np.abs(array) <= limit).all():
        raise ValueError(
            f"scores have shape {array.shape}; expected finite numbers {shape}, one a key, of at most {limit:.2g}"
        )
    return array.reshape(-1, matrices.n)


class AdaptiveCoverage(SharedState):
    r"""The keys that the next query needs, adjusted after each query to reach the coverage in the long run.

    A set with coverage promises nothing for queries that are not exchangeable with the given ones, such as the later
    queries of a text. This class looks at every query after it has been served: if it missed a key, the set grows,
    else it shrinks a little.

    **Guarantee.** Let T queries come, whatever they are, and let γ be the rate. The share of queries that found all
    their keys is less than the coverage c by at most :math:`(1 - c + \gamma) / (\gamma T)`. It is more than c by at
    most :math:`(c + \gamma) / (\gamma T)`, plus the contribution of queries that need no key, which any set covers.
    It is a statement about the mean over queries, not about any single one.

    Parameters
    ----------
    K : array of shape (n, d)
        Keys, one matrix.
    universal : UniversalSet
        Their set with coverage, by `epsilon` or by `mass`, from `covering_set`. Its scores order the keys.
    rate : float in (0, 1), default 0.02
        The γ above: with a larger γ sets follow changes faster, and vary more.

    Attributes
    ----------
    seen, missed : int
        Number of queries so far, and number of queries that lacked a key.

    Raises
    ------
    TypeError, ValueError
        If the set has no coverage, was made for a size, or belongs to other keys.

    Notes
    -----
    A query costs time O(n d + n), and the memory of its need. The object holds the keys.

    References
    ----------
    Gibbs and Candès, "Adaptive conformal inference under distribution shift", NeurIPS 2021 (arXiv:2106.00170),
    Proposition 4.1.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> rng = np.random.default_rng(0)
    >>> K, Q = rng.standard_normal((200, 8)), rng.standard_normal((100, 8))
    >>> found = levattn.covering_set(K, Q, 0.05, f=levattn.Softmax(), coverage=0.9)
    >>> following = levattn.AdaptiveCoverage(K, found)
    >>> covered = following.update(rng.standard_normal((2000, 8)) + 1)  # other queries than those given
    >>> following.seen, bool(abs(covered.mean() - 0.9) < 0.03)
    (2000, True)
    >>> following
    AdaptiveCoverage(105 of 200 keys, coverage=0.9, seen=2000, missed=198)
    """

    @where_arrays_are
    def __init__(self, K: Any, universal: UniversalSet, /, *, rate: float = 0.02) -> None:
        check_type("universal", universal, UniversalSet, "the result of covering_set")
        if universal.coverage is None or universal.needs is None or universal.by_size or universal.batch:
            raise ValueError(
                f"universal is {universal!r}; expected the set with coverage of one matrix, by epsilon or by mass"
            )
        if not 0 < real_number("rate", rate) < 1:
            raise ValueError(f"rate is {rate!r}; expected a number above 0 and below 1, e.g. 0.02")
        self._keys = as_matrices(K, "K")
        if self._keys.batch:
            raise ValueError(f"K has leading axes {self._keys.batch}; expected one matrix, the keys of universal")
        require_set_of(self._keys, universal)
        self._present, self._f, self._rate = universal.present, as_function(universal.f), float(rate)
        self._wish = Covered(universal.coverage, universal.epsilon if universal.mass is None else None, universal.mass)
        scores = np.where(self._present, to_numpy(universal.scores).astype(np.float64), -np.inf)
        self._order: Int64 = np.argsort(-scores, kind="stable")[: np.count_nonzero(self._present)]
        self._needs = universal.needs.tolist()
        self._level = universal.coverage
        self.seen = self.missed = 0

    @property
    def _held_array(self) -> Any:
        return self._keys.data

    def _snapshot(self) -> AdaptiveCoverage:
        """Return a branch of its own, which shares the keys."""
        with lock_of(self):
            other = twin(self)
            other._needs = self._needs.copy()  # `update` inserts into the list
        return other

    __copy__ = _snapshot

    @locked
    def __repr__(self) -> str:
        """Return the figures on one line."""
        wish = f"coverage={self._wish.coverage:.6g}, seen={self.seen}, missed={self.missed}"
        return f"AdaptiveCoverage({self.size} of {len(self._order)} keys, {wish})"

    @property
    @locked
    def size(self) -> int:
        """The number of keys that the next query gets."""
        if self._level >= 1:
            return len(self._order)
        place = conformal_place(len(self._needs), self._level) - 1
        return 0 if place < 0 else len(self._order) if place >= len(self._needs) else int(self._needs[place])

    @property
    @locked
    def indices(self) -> Int64:
        """Ascending indices of these keys, int64 (size,)."""
        return np.sort(self._order[: self.size])

    @locked
    @where_arrays_are
    def update(self, Q: Any, elsewhere: Any = None) -> Flags:
        """Adjust the set after queries that have been served, one after the other.

        Parameters
        ----------
        Q : array of shape (m, d), or (H, m, d)
            Queries in their order, as for `covering_set`. If H heads share the keys, all must find their keys.
        elsewhere : array of shape (m,), or (H, m), optional
            The logarithms for keys outside K, as in `covering_set`.

        Returns
        -------
        array of bool, shape (m,)
            Whether each query found all its keys in its set.

        Raises
        ------
        TypeError, ValueError
            If `Q` does not fit the keys.
        NonFiniteError
            If `Q` holds NaN or infinity.
        """
        given = as_matrices(Q, "Q")
        if len(given.batch) > 1 or given.d != self._keys.d:
            raise ValueError(
                f"Q has shape {(*given.batch, given.n, given.d)}; expected (m, {self._keys.d}), or (H, m, "
                f"{self._keys.d}) of H heads"
            )
        heads = to_float64(given.data, given.format)
        rows = heads.reshape(-1, given.d)
        if not np.isfinite(rows).all():
            bad = np.flatnonzero(~np.isfinite(heads).all(axis=(0, 2)))[:5]
            raise NonFiniteError(f"Q holds NaN or infinity, first in rows {bad.tolist()}; expected finite queries")
        covered = np.zeros(given.n, np.bool_)
        own = (*given.batch, given.n)
        rest = None if elsewhere is None else logarithms(elsewhere, self._f, (len(rows),), own)
        needs = self._wish.needs(rows, self._keys, self._present, self._f, self._order, rest)
        for i, need in enumerate(needs.reshape(len(heads), given.n).max(axis=0, initial=0).tolist()):
            covered[i] = need <= self.size
            level = self._level + self._rate * (self._wish.coverage - covered[i])
            seen, missed = self.seen + 1, self.missed + (not covered[i])
            # the least value, because queries that need no key would lower the level without end
            level = max(level, -self._rate)
            # no interrupt and no fork comes between these lines, which run no code of Python's
            self._level, self.seen, self.missed = level, seen, missed
            insort(self._needs, need)
        return covered
