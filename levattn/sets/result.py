"""Sets of keys as results: their scores and guarantee, how they are shown and saved, and whose keys they are."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import (
    Matrices,
    array_namespace,
    as_matrices,
    take_entries,
    take_rows,
    to_float64,
    to_numpy,
)
from levattn._core.checks import TIE, check_type, needing
from levattn._core.device import where_arrays_are
from levattn._core.files import checked_path, replace_file
from levattn._core.jax import is_jax
from levattn._core.types import Float64
from levattn._kernels import KEYS, Rows
from levattn.exceptions import NonFiniteError
from levattn.functions import as_function, is_square
from levattn.io.source import whole_keys
from levattn.linalg.factor import Factor
from levattn.linalg.reading import require_finite
from levattn.linalg.routes import factor_moments
from levattn.sensitivity.approximate import SCORE_SKETCHES
from levattn.sensitivity.groups import as_labels, group_scores
from levattn.sensitivity.leverage import rows_of
from levattn.sensitivity.shown import span

if TYPE_CHECKING:
    from levattn.plots import LeverageSpectrumDisplay


_MOST_KEYS = 2**63  # of a matrix, whose indices are int64
_SAMPLE = 64  # keys outside a set whose scores are compared with the scores of K

Guarantee = Literal["exact", "superset", "coverage", "none"]


class ListedKeys:
    """The keys in the set of one matrix, as Python lists them, and the line and the table that show a set."""

    @where_arrays_are
    def __len__(self: Any) -> int:
        """Return the number of keys in the set of one matrix."""
        refuse_batch(self.batch, "len() is")
        return len(self.indices)

    @where_arrays_are
    def __contains__(self: Any, key: object) -> bool:
        """Tell whether the key of an index is in the set of one matrix."""
        refuse_batch(self.batch, "`in` tells keys")
        whole = isinstance(key, float | np.floating) and key.is_integer()  # which is equal to an index
        if whole or isinstance(key, int | np.integer | np.bool_):
            index = int(key)  # type: ignore[call-overload]
            return 0 <= index < _MOST_KEYS and bool(self._holds(index))
        return key in self.indices.tolist()

    def __iter__(self: Any) -> Iterator[int]:
        """Yield the indices of the keys in the set of one matrix."""
        refuse_batch(self.batch, "iteration is over the keys")
        return iter(self.indices.tolist())

    @where_arrays_are
    def __repr__(self: Any) -> str:
        """Return the figures on one line; for a batch their least and largest values."""
        return line_of(self)

    @where_arrays_are
    def _repr_html_(self: Any) -> str:
        return html_of(self)


@dataclass(frozen=True, repr=False, eq=False)
class UniversalSet(ListedKeys):
    """Keys that hold every large attention score, with the scores of all keys and the guarantee.

    The result of `universal_set`, for one matrix (n, d) or for a batch (..., n, d) of them.

    Attributes
    ----------
    mask : array of bool, shape (..., n)
        True for the keys of the set.
    scores : array of shape (..., n)
        For f(x) = x² the leverage scores of all keys, else certified upper bounds of their sensitivities. (Scores of
        keys with directions below the numerical rank are upper bounds, raised by up to 3 % or 1.) For a set with
        coverage, the scores that order the keys.
    epsilon : float or array of shape (...,), or None
        The given ε. For a set of a given size, the largest score left out: no attention score of a key outside exceeds
        it. (With coverage, a new query exceeds it with a probability of at most 1 − coverage.) None for a set by
        `mass`.
    guarantee : {"exact", "superset", "coverage", "none"}
        "exact": the smallest set that holds every score of at least ε. (For a set of a given size: every score above
        it, and ties are cut.) "superset": it holds them all, but perhaps other keys as well. The other keys may have
        scores that float64 cannot tell apart from ε, a direction below the numerical rank, or a loose certified bound.
        "coverage": with probability at least `coverage`, all scores of at least ε of a query (or `mass` of its
        attention) lie in the set. The query must be exchangeable with the given ones. For a set of a given size it has
        no score above `epsilon` outside. "none": there is no guarantee for attention over K.
    f : float, AttentionFunction or Softmax
        The attention function; a number is the exponent p of abs(x)^p.
    rank : int or array of int64, shape (...,)
        Numerical rank of the keys; for f(x) = x² the sum of their scores, except for rows that count as 1 in a
        superset.
    factor : levattn.linalg.Factor
        The factor of the keys' second moment: normalizers and witness queries. It holds keys only where n < d.
    by_size : bool
        Whether a size was given instead of ε.
    certificate : tuple of str
        The certificates of `sensitivities` whose minimum `scores` is; "leverage", which is exact, for f(x) = x². With
        coverage "conformal".
    total_bound : float or array of shape (...,)
        The theoretical bound of the sum of the sensitivities; see `sensitivities`. For f(x) = x² the rank. If rows of
        a rank-deficient matrix count as 1, or at its exact rank, it is the sum of these scores. It is infinite for a
        set with coverage.
    exact_factor : bool
        Whether `factor` is the factor of the keys, and not of a sketch, which `heavy_attention` refuses; see
        `rechecked`.
    groups : array of int64, shape (..., n), or None
        The groups of `with_groups`, -1 for a key in none.
    group_scores : array of float64, shape (..., g), or None
        The largest attention that a query can give to each group as a whole; see `group_leverage`.
    coverage : float or None
        The probability with which the guarantee of a set with coverage holds.
    mass : float or None
        The share of a query's attention in this guarantee, if `mass` was given.
    needs : array of float64, shape (..., m), or None
        The number of keys that each query of the threshold needs, ascending; for a given size its largest score left
        out.

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
    _leverage: Any = field(repr=False)  # of all keys, to identify the keys that come with the set
    _present: Any = field(repr=False)  # the given mask, in the kind of `mask`, or None
    groups: Any = field(default=None, repr=False)
    group_scores: Any = field(default=None, repr=False)
    coverage: float | None = None
    mass: float | None = None
    needs: Float64 | None = field(default=None, repr=False)
    _lift: Factor | None = field(default=None, repr=False)  # of the lifted keys, if there are any

    @property
    def _held_array(self) -> Any:
        return self.mask, self.factor

    @property
    def batch(self) -> tuple[int, ...]:
        """Leading axes of the keys; () for one matrix."""
        return tuple(int(size) for size in self.mask.shape[:-1])

    @property
    @where_arrays_are
    def present(self) -> npt.NDArray[np.bool_]:
        """The keys that took part, bool (..., n): the given mask."""
        return np.full(tuple(self.mask.shape), True) if self._present is None else to_numpy(self._present)

    @property
    @where_arrays_are
    def indices(self) -> npt.NDArray[np.int64]:
        """Ascending indices of the keys of the set, int64 (size,), for one matrix.

        Raises
        ------
        ValueError
            If there is a batch of matrices.
        """
        refuse_batch(self.batch, "indices are")
        mask = _read(self.mask)
        return to_numpy(array_namespace(mask).nonzero(mask)[0]).astype(np.int64, copy=False)

    @where_arrays_are
    def scores_of(self, X: Any, /) -> Any:
        """Return the leverage scores of any rows against the keys, ``kᵀ G⁺ k``, as `levattn.linalg.Factor.scores_of`.

        Parameters
        ----------
        X : array of shape (..., m, d)
            Rows, for each matrix of the batch.

        Returns
        -------
        array of float64, shape (..., m)
            Scores, infinite for rows outside the row space.

        Raises
        ------
        TypeError
            If X is no array of real floating dtype, or lies elsewhere than the factor.
        ValueError
            If the factor of the set is of a sketch, or X has other columns or another batch.
        """
        if not self.exact_factor:
            raise ValueError(
                "the set holds the factor of a sketch; expected the factor of its keys. Use set.rechecked(K)"
            )
        return self.factor.scores_of(X)

    @property
    @where_arrays_are
    def member_scores(self) -> Any:
        """The `scores` of the keys of the set, (size,) in the order of `indices`, for one matrix.

        Raises
        ------
        ValueError
            If there is a batch of matrices.
        """
        refuse_batch(self.batch, "member_scores are")
        return take_entries(self.scores, self.indices)

    def _holds(self, index: int) -> bool:
        return index < self.mask.shape[0] and bool(self.mask[index])

    @property
    @where_arrays_are
    def sizes(self) -> npt.NDArray[np.int64]:
        """Number of keys in the set of each matrix, int64 (...,)."""
        return flag_counts(self.mask)

    @property
    @where_arrays_are
    def hidden_groups(self) -> npt.NDArray[np.bool_]:
        """Flags of groups, bool (..., g), that can receive at least ε as a whole, though none of their keys can."""
        if self.groups is None:
            return np.zeros((*self.batch, 0), np.bool_)
        scores = to_numpy(self.group_scores)
        largest, leverage = np.zeros(scores.shape), to_numpy(self._leverage)
        for item in np.ndindex(self.batch):
            labels = to_numpy(self.groups)[item]
            np.maximum.at(largest[item], labels[labels >= 0], leverage[item][labels >= 0])
        return reaches(scores, self.epsilon) & ~reaches(largest, self.epsilon)

    @property
    def size_bound(self) -> Any:
        """The theorem's bound on the size: `total_bound`/ε (rank/ε for f(x) = x²), infinite for ε = 0.

        For other functions it bounds the smallest such set. Up to quadratic growth it also bounds the expected size of
        a set made by "block"; a set from other certified bounds may be larger. A set with coverage has no such bound.
        A float, or an array (...,).
        """
        if self.coverage is not None:
            return np.full(self.batch, np.inf) if self.batch else math.inf
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            bound = np.where(np.asarray(self.rank) == 0, 0.0, np.asarray(self.total_bound, float) / self.epsilon)
        return bound if self.batch else float(bound)

    @property
    @where_arrays_are
    def is_vacuous(self) -> Any:
        """Whether the bound is vacuous, that is, not below the number of keys: a bool, or bools (...,).

        False for a set with coverage, which has another guarantee.
        """
        if self.coverage is not None:
            return np.zeros(self.batch, np.bool_) if self.batch else False
        n = self.mask.shape[-1] if self._present is None else flag_counts(self._present)
        vacuous = np.asarray(self.size_bound) >= n
        return vacuous if self.batch else bool(vacuous)

    @property
    def _left(self) -> Any:
        """The keys that took part and are not in the set, in the kind of the mask, or numpy's for JAX's."""
        mask, present = _read(self.mask), _read(self._present)
        xp = array_namespace(mask)
        left = xp.logical_not(mask)
        return left if present is None else xp.logical_and(left, present)

    @property
    def _largest_left(self) -> float:
        """The most attention that a key of `_left` can get, for one matrix; 1 where scores bound nothing."""
        left, scores = self._left, _read(self.scores)
        xp = array_namespace(left)
        if self.coverage is not None:
            return float(xp.any(left))
        scores = xp.where(left, scores, xp.zeros_like(scores))
        return float(xp.max(scores)) if scores.shape[0] else 0.0

    @property
    @where_arrays_are
    def condition(self) -> Any:
        """The condition number of the keys in the 2-norm, on their row space: a float, or an array (...,)."""
        condition = self.factor.condition.reshape(self.batch)
        return condition if self.batch else float(condition)

    def __getitem__(self, index: int | tuple[int, ...]) -> UniversalSet:
        """Return the set of one matrix of a batch, as ``universal[layer, head]``."""
        return item_of(self, number_of(index, self.batch))

    @where_arrays_are
    def with_groups(self, K: Any, labels: Any) -> UniversalSet:
        """Return the set with every group of keys that some query can give at least ε as a whole.

        More than 1/ε copies of a key hide from a set of single keys, however much they receive together.

        Parameters
        ----------
        K : array of shape (..., n, d), or files
            The keys of this set; files opened with `open_keys` are loaded.
        labels : array of int, shape (..., n)
            Labels of groups of keys, such as `near_duplicates` returns, -1 for a key in none.

        Returns
        -------
        UniversalSet
            This set with `groups`, `group_scores`, and at most rank/ε groups more. A set with more keys is no longer
            the smallest: its guarantee is "superset" in the place of "exact".

        Raises
        ------
        TypeError, ValueError
            If the set is not one for x² by ε and an exact method, or has groups. If K are other keys, or the labels
            do not fit K.
        NonFiniteError
            If the keys hold NaN or infinity outside the mask.

        See Also
        --------
        near_duplicates : Groups of keys that queries hardly tell apart.
        group_leverage : The scores of groups alone.

        Notes
        -----
        A group of s keys takes time O(s² d + s³), or O(s d² + d³) if s is above the rank.

        Examples
        --------
        >>> import numpy as np, levattn
        >>> K = np.random.default_rng(0).standard_normal((1000, 8))
        >>> K[:40] = 5 * np.eye(8)[0] + 0.01 * K[:40]
        >>> plain = levattn.universal_set(K, 0.1)
        >>> len(plain), len(plain.with_groups(K, levattn.near_duplicates(K)))
        (0, 40)
        """
        square = is_square(as_function(self.f))
        if not square or self.certificate != ("leverage",) or self.by_size:
            kind = f"by {'size' if self.by_size else self.certificate[0]}" if square else f"of f = {self.f!r}"
            raise ValueError(
                f"the set is {kind}; expected a set for f = 2 by an exact method and epsilon, so that groups have "
                "scores"
            )
        if self.groups is not None:
            raise ValueError("the set has groups already; give all groups at once to the set that has none")
        with whole_keys(K) as keys:
            matrices, rows = _read_again(keys, self)
            given = as_labels(labels, matrices)
            scores = group_scores(self.factor.on(rows), given)
        mask, own = (to_numpy(array).reshape(given.shape) for array in (self.mask, self.scores))
        more: Any = np.zeros(given.shape, np.bool_)
        if scores.size:
            heavy = np.take_along_axis(reaches(scores, self.epsilon), np.maximum(given, 0), axis=1)
            more = heavy & (given >= 0) & ~mask & (True if rows.mask is None else to_numpy(rows.mask))
        guarantee: Guarantee = "superset" if self.guarantee == "exact" and more.any() else self.guarantee
        wrap = matrices.wrap
        made: dict[str, Any] = {"groups": wrap(given), "group_scores": wrap(scores), "guarantee": guarantee}
        return replace(self, mask=wrap(mask | more), scores=wrap(own), _present=_wrapped(rows.mask, matrices), **made)

    @where_arrays_are
    def rechecked(self, K: Any) -> UniversalSet:
        """Return the exact set, by exact scores of the keys of this set, which a sketch made.

        Parameters
        ----------
        K : array of shape (..., n, d), or files
            The keys of this set; files opened with `open_keys` are loaded.

        Returns
        -------
        UniversalSet
            The keys whose exact score is at least ε. `scores` are exact for the keys of this set, and bounds for the
            others. The guarantee is as by an exact method, except with a probability of 1e-6.

        Raises
        ------
        TypeError, ValueError
            If the set is not by an approximate method and ε, or if K are other keys.
        NonFiniteError
            If the keys hold NaN or infinity outside the mask.

        Notes
        -----
        Time O(m d²) for a set of m keys. Without an exact factor (`exact_factor`) also O(n d²) for the second moment.

        Examples
        --------
        >>> import numpy as np, levattn
        >>> K = np.random.default_rng(0).standard_normal((1000, 8))
        >>> K[7] *= 40
        >>> found = levattn.universal_set(K, 0.2, method="osnap")
        >>> found.guarantee, found.rechecked(K)
        ('superset', UniversalSet(1 of 1000 keys, epsilon=0.2, guarantee='exact', rank=8, bound=40))
        """
        if self.certificate[0] not in SCORE_SKETCHES or self.by_size:
            raise ValueError(
                f"the set is by {'size' if self.by_size else self.certificate[0]}; expected a set by an approximate "
                "method and epsilon, whose scores are bounds"
            )
        with whole_keys(K) as keys:
            (matrices, read), factor = _read_again(keys, self), self.factor
            if not self.exact_factor:
                factor = factor_moments(rows_of(matrices, self.guarantee == "none"), single="scores")
            shape = matrices.data.shape[:2]
            chosen, upper, leverage = (
                np.array(to_numpy(array)).reshape(shape) for array in (self.mask, self.scores, self._leverage)
            )
            counted = False
            for item in range(len(chosen)):
                rows = np.flatnonzero(chosen[item])
                upper[item, rows], one = rescored(factor, item, keys_at(matrices, item, rows))
                counted |= one
            chosen &= reaches(upper, self.epsilon)
            rescore_known(matrices, factor, chosen, read.mask, leverage)
        leverage = leverage.reshape(*self.batch, matrices.n)
        guarantee: Guarantee = "none" if self.guarantee == "none" else "superset" if counted else "exact"
        rank = factor.rank.reshape(self.batch) if self.batch else int(factor.rank[0])
        made: dict[str, Any] = {"mask": matrices.wrap(chosen), "scores": matrices.wrap(upper), "_leverage": leverage}
        made |= {"factor": factor.forget_keys(), "exact_factor": True, "rank": rank, "total_bound": 1.0 * rank}
        return replace(self, **made, guarantee=guarantee, _present=_wrapped(read.mask, matrices))

    def to_frame(self) -> Any:
        """Return the keys of the set as a pandas table.

        Returns
        -------
        pandas.DataFrame
            A row for each key of the set: the place of its matrix in the batch (``axis_0``, ...), ``key`` and
            ``score``.

        Raises
        ------
        ImportError
            If pandas is not installed (the extra ``frame``).

        Examples
        --------
        >>> import numpy as np, levattn
        >>> table = levattn.universal_set(np.eye(2), 0.5).to_frame()  # doctest: +SKIP
        """
        places = np.nonzero(to_numpy(self.mask))
        return frame_of(places, to_numpy(self.scores)[places])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the set and the scores of all keys to an ``.npz`` file, completely or not at all.

        Parameters
        ----------
        path : path-like
            The file, whose name ends in ``.npz``.

        Raises
        ------
        TypeError
            If `path` is no path.
        ValueError
            If the name is empty, or ends differently.
        OSError
            If the file cannot be written.

        Notes
        -----
        The arrays are mask, scores, sizes, epsilon, guarantee, rank, size_bound, is_vacuous, condition and f. For one
        matrix there are also indices, and for groups and coverage their arrays. ``numpy.load(path)`` reads them
        without pickle. The factor is not in the file: make the set again from the keys for `heavy_attention`.

        Examples
        --------
        >>> import pathlib, tempfile, numpy as np, levattn
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "set.npz")
        ...     levattn.universal_set(np.eye(2), 0.5).save(path)
        ...     with np.load(path) as saved:
        ...         saved["indices"]
        array([0, 1])
        """
        save_arrays(path, saved_arrays(self))

    def plot(self, ax: Any = None) -> LeverageSpectrumDisplay:
        """Draw the scores of all keys in descending order, with ε and the bound on the size.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default on a new figure.

        Returns
        -------
        levattn.plots.LeverageSpectrumDisplay
            The display, drawn.

        Raises
        ------
        ImportError
            If matplotlib is not installed (the extra ``plot``).

        Examples
        --------
        >>> import numpy as np, levattn
        >>> display = levattn.universal_set(np.eye(3), 0.5).plot()
        >>> display.size_bound
        6.0
        """
        from levattn.plots import LeverageSpectrumDisplay

        return LeverageSpectrumDisplay.from_set(self, ax=ax)


def result_of(
    matrices: Matrices,
    chosen: Any,
    scores: Any,
    factor: Factor,
    leverage: Any,
    *,
    epsilon: float | None,
    left: npt.NDArray[np.float64] | None,
    guarantee: Guarantee,
    present: Any = None,
    f: Any = 2,
    certificate: tuple[str, ...] = ("leverage",),
    total_bound: npt.NDArray[np.float64] | None = None,
    exact_factor: bool = True,
    coverage: float | None = None,
    mass: float | None = None,
    needs: Float64 | None = None,
    lift: Factor | None = None,
) -> UniversalSet:
    """Return the set of the `chosen` keys, flags (b, n), in the caller's kind.

    The `scores` (b, n) chose the keys, and `leverage` (b, n) identifies them later. `left` (b,) is the largest score
    left out of a set of a given size, which has no `epsilon`.
    """

    def figures(values: npt.NDArray[Any]) -> Any:
        return values.reshape(matrices.batch) if matrices.batch else values[0].item()

    rank = figures(factor.rank)
    return UniversalSet(
        mask=matrices.wrap(chosen),
        scores=matrices.wrap(scores),
        epsilon=epsilon if left is None else figures(left),
        guarantee=guarantee,
        f=f,
        rank=rank,
        factor=factor.forget_keys(),
        by_size=left is not None,
        certificate=certificate,
        total_bound=rank if total_bound is None else figures(total_bound),
        exact_factor=exact_factor,
        _leverage=leverage.reshape((*matrices.batch, leverage.shape[1])),
        _present=_wrapped(present, matrices),
        coverage=coverage,
        mass=mass,
        needs=None if needs is None else needs.reshape(*matrices.batch, needs.shape[1]),
        _lift=lift,
    )


def _wrapped(array: Any, matrices: Matrices) -> Any:
    """Return an array (b, n) in the caller's kind, or None for None."""
    return None if array is None else matrices.wrap(array)


def _read(array: Any) -> Any:
    """Return an array of JAX as one of numpy, and others as they are: JAX compiles each operation for each shape."""
    return np.asarray(array) if is_jax(array) else array


def flag_counts(flags: Any) -> npt.NDArray[np.int64]:
    """Return the number of set flags along the last axis, for any namespace."""
    flags = _read(flags)  # JAX may have no int64
    xp = array_namespace(flags)
    return np.asarray(to_numpy(xp.sum(xp.astype(flags, xp.uint8), axis=-1, dtype=xp.int64)))


def reaches(scores: Any, epsilon: Any) -> npt.NDArray[np.bool_]:
    """Tell which scores count as at least ε."""
    return np.asarray(scores >= epsilon * (1 - TIE))


def keys_at(matrices: Matrices, item: int, indices: npt.NDArray[np.int64]) -> Rows:
    """Return some keys of one matrix, (1, k, d)."""
    return Rows(take_rows(matrices.data[item : item + 1, :, :], indices), matrices.format)


def rescored(factor: Factor, item: int, keys: Rows) -> tuple[Float64, bool]:
    """Return the scores of keys (1, k, d) of one matrix, computed in float64, and whether one counts as 1."""
    scores, counted = factor.item(item).exactly().on(keys).scores(as_float64=True)
    return to_numpy(scores)[0], bool(counted.any())


def known_by(chosen: npt.NDArray[np.int64], present: Any, n: int) -> npt.NDArray[np.int64]:
    """Return the keys of the set and some others, whose scores identify the keys of a set later."""
    others = np.arange(n)
    if present is not None:
        others = array_namespace(present).nonzero(present)[0]
    step = max(1, others.shape[0] // _SAMPLE)
    return np.union1d(chosen, to_numpy(others[::step]))


def rescore_known(matrices: Matrices, factor: Factor, chosen: Any, present: Any, leverage: Any) -> None:
    """Write the scores that identify the keys of the sets `chosen` (b, n) later into `leverage`."""
    flags = None if present is None else to_numpy(present)
    for item in range(len(chosen)):
        sample = known_by(np.flatnonzero(chosen[item]), None if flags is None else flags[item], matrices.n)
        leverage[item, sample] = rescored(factor, item, keys_at(matrices, item, sample))[0]


def _read_again(K: Any, universal: UniversalSet) -> tuple[Matrices, Rows]:
    """Return the keys of a set, and which of them take part; raise for other keys, and for NaN or infinity."""
    matrices = as_matrices(K, "K", sparse=True).masked(universal._present)
    require_set_of(matrices, universal, "this set")
    rows = Rows.of(matrices)
    require_finite(rows, KEYS.column_figures(rows, largest=True))  # also of keys that are not compared
    return matrices, rows


def check_universal(universal: Any, name: str = "universal") -> None:
    """Raise unless an argument is the result of `universal_set`."""
    if isinstance(universal, ListedKeys) and not isinstance(universal, UniversalSet):
        raise TypeError(
            f"{name} is of type {type(universal).__name__}, which has no scores of keys outside the set; expected the "
            "result of universal_set. Give universal_set(K, epsilon), or leave it out"
        )
    check_type(name, universal, UniversalSet, "the result of universal_set")


def require_set_of(keys: Matrices, universal: Any, name: str = "universal") -> None:
    """Raise if `universal` is not the set of these keys, as far as shape, storage and a sample of scores tell."""
    check_universal(universal, name)
    shape = tuple(universal.mask.shape)
    if shape != (*keys.batch, keys.n):
        raise ValueError(f"{name} is of keys of shape {shape}; expected the set of K, {(*keys.batch, keys.n)}")
    for number in range(keys.data.shape[0]):
        _require_item_of(keys.item(number), item_of(universal, number), name)


def _require_item_of(keys: Matrices, universal: UniversalSet, name: str) -> None:
    if universal.factor.columns != keys.d:
        raise ValueError(f"{name} is of keys with d = {universal.factor.columns}; K has d = {keys.d}")
    if universal.factor.rows.format != keys.format:
        raise ValueError(
            f"{name} is of {universal.factor.rows.format} keys and K is {keys.format}, which rounds differently; "
            "expected the set of the same keys"
        )
    margin = max(TIE, 4 * float(universal.factor.score_error[0]))
    sample = known_by(universal.indices, universal._present, keys.n)
    scores = to_numpy(take_entries(_read(universal._leverage), sample)).astype(np.float64)
    rows = to_float64(take_rows(keys.data, sample), keys.format)[0]
    bad = sample[~np.isfinite(rows).all(axis=1)]
    if len(bad):
        raise NonFiniteError(f"K holds NaN or infinity, first in rows {bad[:5].tolist()}; expected finite keys")
    wide = universal.factor.wide
    if wide is None:
        again, _ = rescored(universal.factor, 0, keys_at(keys, 0, sample))
        counted = scores == 1  # among them rows outside the numerical row space
        same = counted | (np.abs(again - scores) <= 8 * margin * scores + 1e-30)
    else:  # the scores are of some columns, but the keys themselves are there
        held = to_float64(take_rows(wide.rows.keys, sample), keys.format)[0]
        same = rows == (held if wide.rows.weights is None else held * wide.rows.weights[0, sample, None])
    if not same.all():
        raise ValueError(f"{name} is of other keys than K: their scores differ; expected the set of the same keys")


_KEYS_SHOWN = 10  # in a notebook


def _size(found: Any) -> str:
    batch = f" in each of {found.batch}" if found.batch else ""
    return f"{span(found.sizes)} of {_rows(found)} keys{batch}"


def _rows(found: Any) -> int:
    return found.n if hasattr(found, "n") else int(found.mask.shape[-1])


def _figures(found: Any) -> list[tuple[str, str]]:
    """Return the properties of a set, as names and figures; a name alone is a flag."""
    if getattr(found, "coverage", None) is not None:
        return _of_coverage(found)
    figures = [("epsilon", span(found.epsilon)), ("guarantee", repr(found.guarantee))]
    figures += [("rank", span(found.rank)), ("bound", span(found.size_bound))]
    vacuous = int(np.sum(found.is_vacuous))
    if vacuous:
        figures.append(("vacuous" if vacuous == np.size(found.is_vacuous) else f"{vacuous} vacuous", ""))
    if getattr(found, "groups", None) is not None:
        figures.append((f"{found.hidden_groups.sum()} hidden groups", ""))
    return figures


def _of_coverage(universal: UniversalSet) -> list[tuple[str, str]]:
    wish = "mass" if universal.mass is not None else "epsilon"
    queries = 0 if universal.needs is None else universal.needs.shape[-1]
    asked = span(universal.mass if wish == "mass" else universal.epsilon)
    given = [("guarantee", "'coverage'"), (wish, asked), ("coverage", f"{universal.coverage:.6g}")]
    return [*given, (f"{queries} queries", "")]


def line_of(found: Any) -> str:
    """Return the figures of a set on one line."""
    figures = (f"{name}={figure}" if figure else name for name, figure in _figures(found))
    return f"{type(found).__name__}({', '.join((_size(found), *figures))})"


def html_of(found: Any) -> str:
    """Return the figures of a set as a table, with its first keys if it is of one matrix."""
    rows = [("keys", _size(found)), *((name, figure or "yes") for name, figure in _figures(found))]
    if not found.batch:
        indices, scores = found.indices, to_numpy(found.member_scores)
        shown = ", ".join(f"{i} ({x:.3g})" for i, x in zip(indices[:_KEYS_SHOWN].tolist(), scores, strict=False))
        more = f", and {len(indices) - _KEYS_SHOWN} more" if len(indices) > _KEYS_SHOWN else ""
        rows.append(("indices (scores)", (shown or "none") + more))
    return html_table(found, rows)


def html_table(found: Any, rows: list[tuple[str, str]]) -> str:
    """Return names and figures of a result as a table of HTML, under the name of its class."""
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(figure)}</td></tr>" for name, figure in rows)
    return f"<table><caption>{type(found).__name__}</caption><tbody>{''.join(cells)}</tbody></table>"


def frame_of(places: tuple[npt.NDArray[np.int64], ...], scores: npt.NDArray[Any]) -> Any:
    """Return the keys of a set as a pandas table, a row for each; `places` are axes of the batch and indices."""
    with needing("a table needs pandas", "frame"):
        import pandas as pd
    *batch, key = places
    names = [f"axis_{i}" for i in range(len(batch))]
    return pd.DataFrame(dict(zip(names, batch, strict=True)) | {"key": key, "score": scores})


def save_arrays(path: str | os.PathLike[str], arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Write the arrays of a set to an ``.npz`` file, completely or not at all."""
    if Path(checked_path(path)).suffix != ".npz":
        raise ValueError(f"path is {os.fspath(path)!r}; expected a name that ends in .npz")
    with replace_file(path) as stream:
        np.savez(stream, allow_pickle=False, **arrays)


def saved_arrays(universal: UniversalSet) -> dict[str, npt.NDArray[Any]]:
    """Return the properties of a set as arrays, none of which needs pickling."""
    names = ["mask", "scores", "sizes", "epsilon", "guarantee", "rank", "size_bound", "is_vacuous", "condition"]
    if universal.coverage is not None:
        names += ["coverage", "mass", "needs", "threshold_queries"]
    if universal.groups is not None:
        names += ["groups", "group_scores"]
    if not universal.batch:
        names.append("indices")
    needs = universal.needs
    counted = {"threshold_queries": None if needs is None else needs.shape[-1]}
    return storable_arrays(
        {name: counted[name] if name in counted else getattr(universal, name) for name in (*names, "f")}
    )


def storable_arrays(values: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Return values as arrays that need no pickling; missing ones are left out, and a function f is its text."""
    f = values["f"]
    values = values | {"f": f if isinstance(f, int | float) else repr(f)}
    pairs = values.items()
    arrays = {name: to_numpy(value) if hasattr(value, "shape") else np.asarray(value) for name, value in pairs}
    return {name: array for name, array in arrays.items() if array.dtype != object}


def refuse_batch(batch: tuple[int, ...], use: str) -> None:
    """Raise if a set is of a batch; `use` says which use is of one matrix."""
    if batch:
        place = ", ".join({1: ["head"], 2: ["layer", "head"]}.get(len(batch), ["0"] * len(batch)))
        raise ValueError(
            f"{use} of one matrix, but this set has batch {batch}; take one by universal[{place}]. sizes has the "
            "numbers of keys of all"
        )


def number_of(index: Any, batch: tuple[int, ...]) -> int:
    """Return the number of one matrix of a batch, leading axes flattened, or raise."""
    if not batch:
        raise TypeError(
            "the set is of one matrix, which has no axes to choose from; use `in`, or K[universal.indices] for keys"
        )
    place = index if isinstance(index, tuple) else (index,)
    numbers: list[int] = []
    with suppress(TypeError):  # also a number of another library
        numbers = [operator.index(i) for i in place if not (isinstance(i, bool) or _is_flag_or_list(i))]
    if not len(numbers) == len(place) == len(batch) or any(
        not -n <= i < n for i, n in zip(numbers, batch, strict=True)
    ):
        raise IndexError(
            f"the index is {index!r}; expected {len(batch)} whole numbers, one for each axis of the batch {batch}"
        )
    number = 0
    for i, n in zip(numbers, batch, strict=True):
        number = number * n + i % n
    return number


def _is_flag_or_list(index: Any) -> bool:
    """Tell whether an array is a flag, or has axes. Python takes tensors of torch with one entry as numbers."""
    return bool(getattr(index, "ndim", 0)) or str(getattr(index, "dtype", "")).endswith("bool")


def item_of(universal: UniversalSet, number: int) -> UniversalSet:
    """Return the set of one matrix by its number, leading axes flattened."""
    if not universal.batch:
        return universal
    place = tuple(int(i) for i in np.unravel_index(number, universal.batch))

    def figure(values: Any) -> Any:
        return values[place].item() if np.ndim(values) else values

    lift = universal._lift
    rows: dict[str, Any] = {}
    for name in ("mask", "scores", "_leverage", "_present", "groups", "group_scores", "needs"):
        array = getattr(universal, name)
        rows[name] = None if array is None else array[(*place, ...)]
    return replace(
        universal,
        **rows,
        epsilon=figure(universal.epsilon),
        rank=figure(universal.rank),
        total_bound=figure(universal.total_bound),
        factor=universal.factor.item(number),
        _lift=None if lift is None else lift.item(number),
    )
