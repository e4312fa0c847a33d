"""Universal sets: the few keys that can ever receive a large attention score."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import (
    Matrices,
    array_namespace,
    as_mask,
    as_matrices,
    take_entries,
    take_rows,
    to_device,
    to_float64,
    to_numpy,
)
from levattn._core.checks import whole_number
from levattn._core.random import as_seed
from levattn._kernels import Float64, Rows, kernels_for
from levattn._kernels.select.contract import SelectKernels
from levattn.exceptions import NonFiniteError
from levattn.functions import AttentionFunction, Power, Softmax, as_function, is_square
from levattn.io import KeySource
from levattn.linalg.factor import Factor
from levattn.sensitivity.approximate import check_sketch_size, screen
from levattn.sensitivity.certified import Bounds, certify
from levattn.sensitivity.groups import as_labels, group_scores
from levattn.sensitivity.leverage import TIE, check_epsilon, check_method, factorize, refuse_randomness, rows_of
from levattn.sets.two_pass import Checkpoint, Source, as_source, two_passes

__all__ = ["UniversalSet", "flag_counts", "require_set_of", "universal_set"]

_BLOCK_EPSILON = 0.05  # for which bounds are made where a size is asked for
_SAMPLE = 64  # keys outside a set whose scores are compared with those of K
_SMALL_SCORE = 2.0**-100  # scores of float32 below this may have vanished

Guarantee = Literal["exact", "superset", "none"]
_Rescore = Callable[[npt.NDArray[np.int64], Any], Float64]  # scores of the rows listed in float64, one after the other


@dataclass(frozen=True, repr=False, eq=False)
class UniversalSet:
    """Keys that hold every large attention score, and what is known of them.

    The result of `universal_set`, for one matrix (n, d) or for a batch (..., n, d) of them.

    Attributes
    ----------
    mask : array of bool, shape (..., n)
        True for the keys of the set.
    scores : array of shape (..., n)
        The leverage scores of all keys for f(x) = x², else certified upper bounds of their sensitivities. Of keys
        with directions below the numerical rank the scores are upper bounds as well: raised by up to 3 %, or 1.
    epsilon : float or array of shape (...,)
        The ε that was asked for; for a set of a given size the largest score left out: no attention score of a key
        outside exceeds it.
    guarantee : {"exact", "superset", "none"}
        "exact": the smallest set that holds every score of at least ε (for a set of a given size: every score above
        it, and ties are cut). "superset": it holds them all, but perhaps other keys as well: those whose scores
        float64 does not tell apart from ε, keys with a direction below the numerical rank, or whatever a certified
        bound does not tell apart. "none": nothing is promised for attention over K.
    f : float, AttentionFunction or Softmax
        The attention function; a number is the exponent p of abs(x)^p.
    rank : int or array of int64, shape (...,)
        Numerical rank of the keys; for f(x) = x² the sum of their scores, but for rows counted as 1 in a superset.
    factor : levattn.linalg.Factor
        The factor of the keys' second moment: normalizers and witness queries. It does not hold the keys, but for
        those with n < d, of which it has a copy.
    by_size : bool
        Whether a size was asked for instead of ε.
    certificate : tuple of str
        What the guarantee rests on: the certificates of `sensitivities` whose minimum `scores` is. For f(x) = x² it is
        "leverage", which is exact.
    total_bound : float or array of shape (...,)
        What theory bounds the sum of the sensitivities by; see `sensitivities`. The rank for f(x) = x².
    exact_factor : bool
        Whether `factor` is that of the keys; False where it is that of a sketch, whose normalizers are approximate:
        `heavy_attention` does not take such a set.
    groups : array of int64, shape (..., n), or None
        The groups of keys that were given, -1 for a key in none.
    group_scores : array of float64, shape (..., g), or None
        The largest attention that a query can give to each group as a whole; see `group_leverage`.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> levattn.universal_set(np.eye(3), 0.5)
    UniversalSet(3 of 3 keys, epsilon=0.5, guarantee='exact', rank=3, bound=6, vacuous)
    """

    mask: Any
    scores: Any
    epsilon: Any
    guarantee: Guarantee
    f: Any
    rank: Any
    factor: Factor = field(repr=False)
    by_size: bool
    certificate: tuple[str, ...]
    total_bound: Any
    exact_factor: bool
    _leverage: Any = field(repr=False)  # of all keys, to be compared with those of keys that come with the set
    _present: Any = field(repr=False)  # the mask that was given, in the kind of `mask`, or None
    groups: Any = field(default=None, repr=False)
    group_scores: Any = field(default=None, repr=False)
    _lift: Factor | None = field(default=None, repr=False)  # of the lifted keys, where it was made

    @property
    def batch(self) -> tuple[int, ...]:
        """Leading axes of the keys; () for one matrix."""
        return tuple(int(size) for size in self.mask.shape[:-1])

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """The keys that took part: the mask that was given.

        Returns
        -------
        array of bool, shape (..., n)
        """
        return np.full(tuple(self.mask.shape), True) if self._present is None else to_numpy(self._present)

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """Ascending indices of the keys of the set, for one matrix.

        Returns
        -------
        array of int64, shape (size,)

        Raises
        ------
        ValueError
            If there is a batch of matrices.
        """
        if self.batch:
            raise ValueError(
                f"indices are of one matrix, but this set has batch {self.batch}; use mask and sizes, "
                "or call universal_set on each matrix"
            )
        return to_numpy(array_namespace(self.mask).nonzero(self.mask)[0])

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Number of keys in the set of each matrix.

        Returns
        -------
        array of int64, shape (...,)
        """
        return flag_counts(self.mask)

    @property
    def hidden_groups(self) -> npt.NDArray[np.bool_]:
        """Which groups can receive at least ε as a whole, though none of their keys can by itself.

        Returns
        -------
        array of bool, shape (..., g)
            With no groups where none were given.
        """
        if self.groups is None:
            return np.zeros((*self.batch, 0), np.bool_)
        scores = to_numpy(self.group_scores)
        largest, leverage = np.zeros(scores.shape), to_numpy(self._leverage)
        for item in np.ndindex(self.batch):
            labels = to_numpy(self.groups)[item]
            np.maximum.at(largest[item], labels[labels >= 0], leverage[item][labels >= 0])
        return _reach(scores, self.epsilon) & ~_reach(largest, self.epsilon)

    @property
    def size_bound(self) -> Any:
        """The theorem's bound on the size: `total_bound`/ε (rank/ε for f(x) = x²), infinite for ε = 0.

        For other functions it bounds the smallest such set, and up to quadratic growth the expected size of one made
        of blocks; a set made of other certified bounds may be larger.

        Returns
        -------
        float or array of shape (...,)
        """
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            bound = np.where(np.asarray(self.rank) == 0, 0.0, np.asarray(self.total_bound, float) / self.epsilon)
        return bound if self.batch else float(bound)

    @property
    def is_vacuous(self) -> Any:
        """Whether the bound promises nothing, since it is not below the number of keys.

        Returns
        -------
        bool or array of bool, shape (...,)
        """
        n = self.mask.shape[-1] if self._present is None else flag_counts(self._present)
        vacuous = np.asarray(self.size_bound) >= n
        return vacuous if self.batch else bool(vacuous)

    @property
    def _left(self) -> Any:
        """The keys that took part and are not in the set, in the kind of the mask."""
        xp = array_namespace(self.mask)
        left = xp.logical_not(self.mask)
        return left if self._present is None else xp.logical_and(left, self._present)

    @property
    def _largest_left(self) -> float:
        """The largest score of one of them, for one matrix; 0 where there are none."""
        xp = array_namespace(self.mask)
        scores = xp.where(self._left, self.scores, xp.zeros_like(self.scores))
        return float(xp.max(scores)) if scores.shape[0] else 0.0

    @property
    def condition(self) -> Any:
        """The condition number of the keys in the 2-norm, on their row space.

        Returns
        -------
        float or array of shape (...,)
        """
        condition = self.factor.condition.reshape(self.batch)
        return condition if self.batch else float(condition)

    def __len__(self) -> int:
        """Return the number of keys in the set of one matrix."""
        return len(self.indices)

    def __repr__(self) -> str:
        """Return the figures on one line."""
        n = self.mask.shape[-1]
        if self.batch:
            sizes = self.sizes
            span = f"{sizes.min()} to {sizes.max()}" if sizes.size else "0"
            return f"UniversalSet({span} of {n} keys in each of {self.batch}, guarantee={self.guarantee!r})"
        vacuous = ", vacuous" if self.is_vacuous else ""
        hidden = f", {self.hidden_groups.sum()} hidden groups" if self.groups is not None else ""
        return (
            f"UniversalSet({len(self)} of {n} keys, epsilon={self.epsilon:.6g}, guarantee={self.guarantee!r}, "
            f"rank={self.rank}, bound={self.size_bound:.6g}{vacuous}{hidden})"
        )


def universal_set(
    K: Any,
    epsilon: float | None = None,
    /,
    *,
    size: int | None = None,
    f: Any = 2,
    method: str = "auto",
    center: bool = False,
    groups: Any = None,
    sketch_size: int | tuple[int, int] | None = None,
    recheck: bool = False,
    mask: Any = None,
    rng: int | np.random.Generator | None = None,
    progress: bool | Callable[[int, int | None], Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_rows: int | None = None,
) -> UniversalSet:
    r"""Find the keys that can receive an attention score of at least ε from some query.

    For f(x) = x² and :math:`A_{ij} = \langle q_i, k_j\rangle^2 / \sum_l \langle q_i, k_l\rangle^2` the set is

    .. math:: U_\varepsilon = \{j : \tau_j \ge \varepsilon\}, \qquad |U_\varepsilon| \le \mathrm{rank}(K)/\varepsilon

    with the leverage scores τ. For *every* query, whichever it is, each key with :math:`A_{ij} \ge \varepsilon` lies
    in the set; and each key in it has a query that gives it at least ε, so no smaller set would do. It depends on
    neither the queries nor, in size, on n. Where the bound is not below n the theorem says nothing (`is_vacuous`).
    For other functions f the set is that of the keys whose sensitivity is certified to be below ε left out.

    Parameters
    ----------
    K : array of shape (..., n, d), or chunks of one
        Keys as in `leverage_scores` (sparse ones for x² only). Or chunks (..., m, d) of them, in order: files opened
        with `open_keys`, any other object that can be iterated again and again (but a list, which is an array), or a
        function that returns an iterator. These are read twice for x², by the exact methods "auto" and "gram",
        and never held together. For all else files are loaded, and other chunks refused. Use the keys that enter the
        attention: after rotary embedding, one set for each head of keys.
    epsilon : float in (0, 1]
        Smallest attention score that counts as large. A score within 1e-9 (relative) of ε, or within four times
        its estimated error where that is more (condition numbers above about 10⁶), counts as at least ε.
    size : int in [0, n]
        Instead of `epsilon`: take the `size` keys of the largest scores, of equal ones those of lower index. The
        set then tells the ε that it certifies.
    f : float, AttentionFunction or Softmax, default 2
        Attention function; a number p is abs(x)^p. For all but x² the set consists of the keys whose certified bound
        (`sensitivities`) is at least ε: a superset. For `Softmax` it holds for queries within its radius.
    method : str, default "auto"
        For x² "gram", "qr" or "svd", see `leverage_scores`; else a certificate of `sensitivities`. The approximate
        methods of `leverage_scores` make a superset: their scores are raised by the distortion that they have,
        which is measured, and so bound the true ones from above, but for a probability of 1e-6.
    center : bool, default False
        Subtract the mean of the keys, which softmax does not see. The set is then exact for x² attention over the
        centered keys and promises nothing over K itself: ``guarantee`` is "none".
    groups : array of int, shape (..., n), optional
        Labels of groups of keys, such as `near_duplicates` returns, -1 for a key in none. The set then also holds
        every group that some query can give at least ε as a whole: more than 1/ε copies of a key hide from a set of
        single keys, whatever attention they receive together. At most rank/ε groups are added. For x² and by
        `epsilon`.
    sketch_size : int or (int, int), optional
        For the approximate methods, see `leverage_scores`.
    recheck : bool, default False
        For the approximate methods by `epsilon`: compute the exact second moment, and the exact scores of the keys
        that are left, so that the set is exact again (but for the probability above).
    mask : array of bool, shape (..., n), optional
        True for a key that takes part; the others are removed and never in the set.
    rng : int or numpy.random.Generator, optional
        Seed of the approximate methods, 0 if left out. A ValueError with the exact methods.
    progress : bool or function, optional
        For chunks: True for a bar (of rich), or a function of the rows done and their total (None where it is not
        known), both passes together.
    checkpoint : path-like, optional
        For chunks: a file in which to write down, now and then, how far the passes came. If it is there already, they
        go on from it, to the same result, and refuse it if it is of another run or other keys. It is removed
        in the end.
    checkpoint_rows : int, optional
        Rows from one checkpoint to the next, about; 2²² if left out. The second pass writes down the scores so far.

    Returns
    -------
    UniversalSet
        The keys of the set, the scores of all keys, and what is guaranteed.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; both or neither of `epsilon` and `size` among them.
    NonFiniteError
        If the keys hold NaN or infinity outside the mask.
    ImportError
        If `progress` is True and rich is not installed.

    See Also
    --------
    heavy_attention : The large attention scores themselves.
    near_duplicates : Groups of keys in which attention may hide.

    Notes
    -----
    Time O(n d²) and memory O(n + d² log n) beyond K, or beyond a chunk of it; with n < d and an exact method O(n² d)
    and O(n d). Scores are computed in float32 for keys of at most that precision; those near ε are computed again in
    float64, so that the set is exact.

    For the approximate methods the scores are divided by the least factor by which they can fall short. It is measured
    on the second moment: exactly up to d = 320 and with `recheck`, by Lanczos' method beyond.

    A generator gives its chunks once, and is refused: `StreamingUniversalSet` takes them.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462), Theorem 1 (existence and
    size of the universal set).

    Examples
    --------
    A thousand keys, three of them in a direction of their own:

    >>> import numpy as np, levattn
    >>> K = np.random.default_rng(0).standard_normal((1000, 8))
    >>> K[:, 5:] = 0
    >>> K[[10, 20, 30]] = 3 * np.eye(8)[5:]
    >>> levattn.universal_set(K, 0.1).indices
    array([10, 20, 30])
    """
    function = as_function(f)
    square = is_square(function)
    approximate = square and check_method(method)
    if not approximate:
        refuse_randomness(method, sketch_size, rng)
    if recheck and (not approximate or epsilon is None):
        raise ValueError(f"recheck is {recheck!r}; expected False but for approximate methods with epsilon")
    if center and not square:
        raise ValueError(
            "center is True; expected False for all functions but x² (the bound of softmax centers by itself)"
        )
    if (epsilon is None) == (size is None):
        given = "neither" if epsilon is None else "both"
        raise ValueError(f"epsilon and size: {given} given; expected exactly one, a threshold or a budget")
    source = as_source(K)
    extras = any(option is not None and option is not False for option in (progress, checkpoint, checkpoint_rows))
    if source is None and extras:
        raise ValueError("progress or checkpoint is given for keys in an array; expected them for chunks of keys only")
    if source is not None:
        if square and method in ("auto", "gram") and not center and groups is None and mask is None:
            return _of_chunks(source, epsilon, size, method, progress, checkpoint, checkpoint_rows)
        if extras or not isinstance(K, KeySource):
            raise ValueError(
                "K gives chunks, of which two passes make sets for f = 2, method 'auto' or 'gram', without center, "
                "groups or mask; expected these options, or keys in an array or a file, and no progress or checkpoint"
            )
        K = K.load()
    matrices = as_matrices(K, "K", sparse=square)
    n = matrices.n
    labels = None if groups is None else as_labels(groups, matrices)
    if labels is not None and (not square or approximate or epsilon is None):
        raise ValueError("groups are given; expected f = 2, an exact method and epsilon, so that groups have scores")
    if epsilon is not None:
        epsilon = check_epsilon(epsilon)
    _check_size(size, n)

    if not square:
        bounded = _BLOCK_EPSILON if epsilon is None else epsilon
        bounds = certify(matrices, function, method=method, mask=mask, epsilon=bounded)
        return _certified(matrices, function, epsilon, size, mask, bounds, "superset")
    if approximate:
        return _from_sketch(matrices, epsilon, size, method, center, mask, sketch_size, rng, recheck)
    factor = factorize(matrices, method=method, center=center, mask=mask, single="scores")
    found, counted = factor.scores()
    select = kernels_for("select", matrices.data)
    scores, present = select.held(found), as_mask(mask, matrices)
    present = None if present is None else select.held(present)
    rescore = partial(_rescored_all, select, factor, matrices)
    certified: Any
    doubt = False
    if epsilon is not None:
        chosen, doubt = _at_least(select, factor, scores, present, epsilon, rescore)
        certified = epsilon
    else:
        chosen, left, doubt = _largest(select, factor, scores, present, int(size or 0), rescore)
        certified = left.reshape(matrices.batch) if matrices.batch else float(left[0])
    together = None if labels is None else group_scores(factor, labels)
    hidden = False
    if labels is not None and together is not None and together.size:
        heavy = np.take_along_axis(_reach(together, epsilon), np.maximum(labels, 0), axis=1)
        more = heavy & (labels >= 0) & ~to_numpy(chosen)
        more &= True if present is None else to_numpy(present)
        hidden = bool(more.any())
        chosen |= to_device(more, chosen)
    guarantee: Guarantee = "none" if center else "superset" if counted.any() or hidden or doubt else "exact"
    rank = factor.rank.reshape(matrices.batch) if matrices.batch else int(factor.rank[0])
    return UniversalSet(
        mask=matrices.wrap(chosen),
        scores=matrices.wrap(found),
        epsilon=certified,
        guarantee=guarantee,
        f=2,
        rank=rank,
        factor=factor.forget_keys(),
        by_size=size is not None,
        certificate=("leverage",),
        total_bound=rank,
        exact_factor=True,
        _leverage=scores.reshape((*matrices.batch, n)),
        _present=None if present is None else matrices.wrap(present),
        groups=None if labels is None else matrices.wrap(to_device(labels, matrices.data)),
        group_scores=None if together is None else matrices.wrap(to_device(together, matrices.data)),
    )


def _of_chunks(
    source: Source, epsilon: Any, size: Any, method: str, progress: Any, path: Any, every: Any
) -> UniversalSet:
    """Return the set of keys that are read in chunks, in two passes (for a size with ties a few rows once more)."""
    if epsilon is not None:
        epsilon = check_epsilon(epsilon)
    _check_size(size, source.n)
    job = {"epsilon": epsilon, "size": None if size is None else int(size), "method": method}
    checkpoint = Checkpoint.checked(path, every, job)

    def choose(factor: Factor, matrices: Matrices, scores: npt.NDArray[Any]) -> tuple[npt.NDArray[np.bool_], bool]:
        if epsilon is None:
            return np.zeros(scores.shape, np.bool_), False
        select = kernels_for("select", matrices.data)
        rescore = partial(_rescored_all, select, factor, matrices)
        chosen, doubt = _at_least(select, factor, select.held(scores), None, epsilon, rescore)
        return to_numpy(chosen), doubt

    found = two_passes(source, choose, progress, checkpoint, single=method == "auto")
    factor, scores, chosen, batch = found.factor, found.scores, found.chosen, found.example.batch
    n, certified, doubt = scores.shape[1], epsilon, False
    if size is not None:
        _check_size(size, n)

        def rescore(starts: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> Float64:
            again = np.zeros(len(rows))
            for item in np.flatnonzero(np.diff(starts)).tolist():
                part = slice(starts[item], starts[item + 1])
                keys = source.rows(item, rows[part], found.example)
                again[part] = to_numpy(factor.item(item).exactly().on(keys).scores(wide=True)[0])[0]
            return again

        chosen, left, doubt = _largest(kernels_for("select", scores), factor, scores, None, int(size), rescore)
        certified = left.reshape(batch) if batch else float(left[0])
    checkpoint.remove()
    rank = factor.rank.reshape(batch) if batch else int(factor.rank[0])
    return UniversalSet(
        mask=found.example.wrap(chosen),
        scores=found.example.wrap(scores),
        epsilon=certified,
        guarantee="superset" if found.counted.any() or doubt else "exact",
        f=2,
        rank=rank,
        factor=factor,
        by_size=size is not None,
        certificate=("leverage",),
        total_bound=rank,
        exact_factor=True,
        _leverage=scores.reshape((*batch, n)),
        _present=None,
    )


def flag_counts(flags: Any) -> npt.NDArray[np.int64]:
    """Return how many flags are set along the last axis, of any namespace."""
    xp = array_namespace(flags)
    return np.asarray(to_numpy(xp.sum(xp.astype(flags, xp.uint8), axis=-1, dtype=xp.int64)))


def _check_size(size: Any, n: int | None) -> None:
    """Raise if a size is no number of keys, of which there are n if that is known."""
    if size is not None:
        whole_number("size", size, 0, n, what="a whole number of keys")


def _from_sketch(
    matrices: Matrices,
    epsilon: float | None,
    size: int | None,
    method: str,
    center: bool,
    mask: Any,
    sketch_size: Any,
    rng: Any,
    recheck: bool,
) -> UniversalSet:
    """Return the set of the keys with the largest bounds from a sketch."""
    left, right = check_sketch_size(method, sketch_size, matrices.n, matrices.d)
    screened = screen(rows_of(matrices, center, mask), method, left, right, as_seed(rng), recheck)
    ranks = screened.factor.rank.astype(np.float64)
    bounds = Bounds(screened.upper, (method,), ranks, screened.factor, screened.upper.copy(), None)
    guarantee: Guarantee = "superset"
    if recheck and epsilon is not None and not _recheck(bounds, matrices, epsilon):
        guarantee = "exact"
    guarantee = "none" if center else guarantee
    return _certified(matrices, Power(2.0), epsilon, size, mask, bounds, guarantee, exact_factor=screened.exact)


def _recheck(bounds: Bounds, matrices: Matrices, epsilon: float) -> bool:
    """Replace the bounds of at least ε by the scores themselves; return whether one of the keys counts as 1."""
    counted = False
    for item in range(len(bounds.upper)):
        rows = np.flatnonzero(bounds.upper[item] >= epsilon * (1 - TIE))
        keys = Rows(take_rows(matrices.data[item : item + 1, :, :], rows), matrices.format)
        scores, outside = bounds.factor.item(item).exactly().on(keys).scores(wide=True)
        bounds.upper[item, rows] = to_numpy(scores)[0]
        counted |= bool(outside.any())
    return counted


def _certified(
    matrices: Matrices,
    f: AttentionFunction | Softmax,
    epsilon: float | None,
    size: int | None,
    mask: Any,
    bounds: Bounds,
    guarantee: Guarantee,
    exact_factor: bool = True,
) -> UniversalSet:
    """Return the set of the keys with the largest certified bounds."""
    b, n = bounds.upper.shape
    given = as_mask(mask, matrices)
    present = np.ones((b, n), np.bool_) if given is None else to_numpy(given)
    certified: Any = epsilon
    if epsilon is not None:
        chosen = (bounds.upper >= epsilon * (1 - TIE)) & present
    else:
        chosen = np.zeros((b, n), np.bool_)
        for item in range(b):
            order = np.argsort(-np.where(present[item], bounds.upper[item], -1.0), kind="stable")[: int(size or 0)]
            chosen[item, order] = present[item, order]
        left = np.max(np.where(present & ~chosen, bounds.upper, 0.0), axis=1, initial=0.0)
        certified = left.reshape(matrices.batch) if matrices.batch else float(left[0])
    batch = matrices.batch
    for item in range(b):  # to tell these keys from others later
        sample = _sample(np.flatnonzero(chosen[item]), present[item], n)
        bounds.leverage[item, sample] = rescored(bounds.factor, matrices, item, sample)
    rank = bounds.factor.rank.reshape(batch) if batch else int(bounds.factor.rank[0])
    return UniversalSet(
        mask=matrices.wrap(to_device(chosen, matrices.data)),
        scores=matrices.wrap(to_device(bounds.upper, matrices.data)),
        epsilon=certified,
        guarantee=guarantee,
        f=f.p if isinstance(f, Power) else f,
        rank=rank,
        factor=bounds.factor.forget_keys(),
        by_size=size is not None,
        certificate=bounds.names,
        total_bound=bounds.total_bound.reshape(batch) if batch else float(bounds.total_bound[0]),
        exact_factor=exact_factor,
        _leverage=bounds.leverage.reshape((*batch, n)),
        _present=None if given is None else matrices.wrap(given),
        _lift=bounds.lift,
    )


def _reach(scores: Any, epsilon: Any) -> npt.NDArray[np.bool_]:
    return np.asarray(scores >= epsilon * (1 - TIE))


def _at_least(
    select: SelectKernels, factor: Factor, scores: Any, present: Any, epsilon: float, rescore: _Rescore
) -> tuple[Any, bool]:
    """Tell which scores are at least ε, and whether doubt counted as that.

    Those too close to ε for their precision are computed again in float64.
    """
    margin = _margin(factor)
    least = epsilon * (1 - margin) if epsilon > _SMALL_SCORE else np.zeros(len(margin))
    chosen, starts, near = select.threshold(scores, present, least, epsilon * (1 + margin))
    doubt = False
    if len(near):
        slack, again = np.repeat(np.maximum(TIE, 4 * factor.error), np.diff(starts)), rescore(starts, near)
        taken = ~(again < epsilon * (1 - slack))
        select.include(chosen, starts, near, taken)
        doubt = bool((taken & (slack > 2 * TIE) & ~(again >= epsilon * (1 + slack))).any())
    return chosen, doubt


def rescored(factor: Factor, matrices: Matrices, item: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the scores of some keys of one matrix, computed in float64."""
    keys = take_rows(matrices.data[item : item + 1, :, :], rows)
    scores, _ = factor.item(item).exactly().on(Rows(keys, matrices.format)).scores(wide=True)
    found: npt.NDArray[np.float64] = to_numpy(scores)[0]
    return found


def _rescored_all(
    select: SelectKernels, factor: Factor, matrices: Matrices, starts: npt.NDArray[np.int64], rows: Any
) -> Float64:
    """Return the scores of the keys listed of every matrix, computed in float64, one after the other."""
    keys, there = select.stacked(matrices.data, starts, rows)
    found, _ = factor.exactly().on(Rows(keys, matrices.format, there)).scores(wide=True)
    scores = to_numpy(found)
    return np.asarray(scores[np.arange(scores.shape[1]) < np.diff(starts)[:, None]])


def _sample(chosen: npt.NDArray[np.int64], present: Any, n: int) -> npt.NDArray[np.int64]:
    """Return the keys of the set and some of the others, by whose scores the keys of a set are known again."""
    others = np.arange(n)
    if present is not None:
        others = array_namespace(present).nonzero(present)[0]
    step = max(1, others.shape[0] // _SAMPLE)
    return np.union1d(chosen, to_numpy(others[::step]))


def require_set_of(keys: Matrices, universal: Any) -> None:
    """Raise if `universal` is not the set of these keys, as far as shape, storage and a sample of scores tell."""
    if not isinstance(universal, UniversalSet):
        raise TypeError(f"universal is of type {type(universal).__name__}; expected the result of universal_set")
    shape = tuple(universal.mask.shape)
    if shape != (keys.n,):
        raise ValueError(f"universal is of keys of shape {shape}; expected the set of K's {keys.n} keys")
    if universal.factor.columns != keys.d:
        raise ValueError(f"universal is of keys with d = {universal.factor.columns}; K has d = {keys.d}")
    if not universal.exact_factor:
        raise ValueError(
            f"universal was made by method {universal.certificate[0]!r} and knows no exact normalizers; expected a "
            "set of an exact method, or one made with recheck=True"
        )
    if universal.factor.rows.format != keys.format:
        raise ValueError(
            f"universal is of {universal.factor.rows.format} keys and K is {keys.format}, which is rounded otherwise; "
            "expected the set of these very keys"
        )
    margin = max(TIE, 4 * float(universal.factor.score_error[0]))
    sample = _sample(universal.indices, universal._present, keys.n)
    scores = to_numpy(take_entries(universal._leverage, sample)).astype(np.float64)
    rows = to_float64(take_rows(keys.data, sample), keys.format)[0]
    bad = sample[~np.isfinite(rows).all(axis=1)]
    if len(bad):
        raise NonFiniteError(f"K holds NaN or infinity, first in rows {bad[:5].tolist()}; expected finite keys")
    wide = universal.factor.wide
    if wide is None:
        again = rescored(universal.factor, keys, 0, sample)
        counted = scores == 1  # rows that reach outside the numerical row space among them
        same = counted | (np.abs(again - scores) <= 8 * margin * scores + 1e-30)
    else:  # their scores are those of some columns, but the keys themselves are known
        same = rows == to_float64(take_rows(wide.rows.keys, sample), keys.format)[0]
    if not same.all():
        raise ValueError("universal is of other keys than K: their scores differ; expected the set of these very keys")


def _margin(factor: Factor) -> Float64:
    """Return the relative difference below which scores of each matrix are too close to call."""
    return np.maximum(4 * factor.score_error, TIE)


def _largest(
    select: SelectKernels, factor: Factor, scores: Any, present: Any, size: int, rescore: _Rescore
) -> tuple[Any, Float64, bool]:
    """Choose by score descending, then index ascending; return the largest score of each matrix left out, too.

    Scores too close to call are computed again in float64. The largest score is raised by an error that is not small,
    and the last result tells whether others may then lie below it.
    """
    margin = _margin(factor)
    chosen, starts, close = select.largest(scores, present, size, margin)
    if len(close):
        again, taken = rescore(starts, close), np.zeros(len(close), np.bool_)
        missing = np.maximum(size - flag_counts(chosen), 0)
        for item, start in enumerate(starts[:-1].tolist()):
            order = np.argsort(-again[start : starts[item + 1]], kind="stable")
            taken[start + order[: missing[item]]] = True
        select.include(chosen, starts, close, taken)
    among = ~chosen if present is None else present & ~chosen
    top = select.maxima(scores, among) * (1 - margin)
    _, starts, rows = select.threshold(scores, among, top, np.full(len(top), np.inf))
    left, some = np.zeros(len(top)), np.flatnonzero(np.diff(starts))
    if len(some):
        left[some] = np.maximum.reduceat(rescore(starts, rows), starts[some])
    slack = 4 * factor.error
    raised = (slack > TIE) & (left > 0)
    left[raised] = np.minimum(left[raised] * (1 + slack[raised]), 1.0)
    unsure = raised & (slack > 2 * TIE)
    if not unsure.any():
        return chosen, left, False
    with np.errstate(divide="ignore", over="ignore"):
        reciprocal = select.maxima(1 / scores, chosen)  # of the smallest score that was chosen
    return chosen, left, bool((unsure & (reciprocal * left * (1 + margin) > 1)).any())
