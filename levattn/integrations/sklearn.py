"""Leverage scores as a scikit-learn estimator. Needs the extra ``sklearn``."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.cached import cached_property
from levattn._core.checks import check_type, needing
from levattn.linalg.factor import Factor, float64_rows
from levattn.sets.streaming import StreamedSet, StreamingUniversalSet
from levattn.states.blocks import in_main_memory

with needing("LeverageScorer needs scikit-learn", "sklearn"):
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils.validation import check_is_fitted, validate_data

__all__ = ["LeverageScorer"]

_DTYPES = (np.float64, np.float32)
_ROWS = 8192  # rows whitened at a time, so that little memory is needed besides the result


class _Seen:
    """The stream of the rows so far, and its result, computed at the first access."""

    def __init__(self, stream: StreamingUniversalSet, dtype: np.dtype[Any]) -> None:
        self.stream = stream
        self.dtype = dtype

    @cached_property
    def result(self) -> StreamedSet:
        return self.stream.result()

    def __getstate__(self) -> tuple[bytes, str]:
        return self.stream.to_bytes(), self.dtype.name

    def __setstate__(self, state: tuple[bytes, str]) -> None:
        self.stream, self.dtype = StreamingUniversalSet.from_bytes(state[0]), np.dtype(state[1])


class LeverageScorer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    r"""Leverage scores, universal set and whitening of rows that come at once or in chunks.

    The leverage of a row x against the fitted rows X is

    .. math:: \tau(x) = x^T (X^T X)^+ x = \max_q \langle q, x\rangle^2 / \sum_l \langle q, x_l\rangle^2.

    The leverage of a row of X is its leverage score, in [0, 1]; these scores sum to the rank of X. The estimator does
    not center the rows: for least squares with an intercept, center them first or add a column of ones.

    `universal_set` gives the same set, and `leverage_scores` the same scores up to rounding. All results have the
    same bits for the same rows in any chunks.

    Parameters
    ----------
    epsilon : float in (0, 1], default 0.05
        Smallest leverage score of the rows in the universal set.

    Attributes
    ----------
    universal_set_ : array of int64, shape (size,)
        Ascending numbers, from 0, of the rows with leverage scores of at least `epsilon`. There are at most rank/ε.
    result_ : levattn.StreamedSet
        The universal set with its rows, their scores, and the guarantee.
    rank_ : int
        Numerical rank of the rows, the number of columns that `transform` returns.
    factor_ : levattn.linalg.Factor
        The factor of the second moment of the rows. Its `error` estimates the relative error of a score.
    n_samples_seen_ : int
        Number of rows so far.
    n_features_in_ : int
        Number of columns.
    feature_names_in_ : array of str, shape (d,)
        Names of the columns, if the fitted rows had names.

    See Also
    --------
    levattn.leverage_scores, levattn.universal_set : Functions for batches, and for more dtypes and array types.
    levattn.StreamingUniversalSet : The stream behind this estimator.

    Notes
    -----
    Time O(n d²), and memory O(d²/ε) whatever the number of rows; see `StreamingUniversalSet`. The estimator computes
    an attribute when you first read it, so chunks may be small.

    The rank is decided in float64 whatever the dtype. Sparse rows and sample weights are not supported. To give a row
    the weight w, multiply it by √w.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462), Theorem 1 and the streaming
    algorithm.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.integrations.sklearn import LeverageScorer
    >>> X = np.random.default_rng(0).standard_normal((5000, 4))
    >>> X[[10, 4000], 3] = 300, -400
    >>> scorer = LeverageScorer(epsilon=0.2)
    >>> for chunk in np.array_split(X, 7):
    ...     scorer = scorer.partial_fit(chunk)
    >>> scorer.universal_set_
    array([  10, 4000])
    >>> scorer.score_samples(X[[10, 4000]]).round(2)
    array([0.35, 0.63])
    >>> float((scorer.transform(X[[10]]) ** 2).sum().round(2))
    0.35
    """

    n_features_in_: int
    _seen: _Seen

    def __init__(self, epsilon: float = 0.05) -> None:
        self.epsilon = epsilon

    def fit(self, X: Any, y: Any = None) -> LeverageScorer:  # noqa: ARG002
        """Fit to these rows, and forget earlier ones.

        Parameters
        ----------
        X : array of shape (n, d)
            Rows, n ≥ 1, in float64 or float32. Other dtypes are converted to float64.
        y : ignored
            Present for pipelines.

        Returns
        -------
        LeverageScorer
            The estimator itself.

        Raises
        ------
        TypeError, ValueError
            If `epsilon` is not a number in (0, 1], or X is not a dense array of finite numbers. The estimator stays as
            it was.
        """
        return self._take(X, StreamingUniversalSet(self.epsilon), least=1, reset=True)

    def partial_fit(self, X: Any, y: Any = None) -> LeverageScorer:  # noqa: ARG002
        """Add a chunk of rows.

        Parameters
        ----------
        X : array of shape (m, d)
            Rows, m ≥ 0 of them, in a dtype that the dtype of the first chunk holds exactly.
        y : ignored
            Present for pipelines.

        Returns
        -------
        LeverageScorer
            The estimator itself.

        Raises
        ------
        TypeError, ValueError
            As for `fit`, or if X or `epsilon` does not fit the earlier chunks. The estimator stays unchanged.
        """
        if not self.__sklearn_is_fitted__():
            return self._take(X, StreamingUniversalSet(self.epsilon), least=0, reset=True)
        stream = self._seen.stream
        if self.epsilon != stream.epsilon:
            raise ValueError(
                f"epsilon is {self.epsilon!r}; expected {stream.epsilon!r} as for the earlier chunks. Set it back, or "
                "start again with fit"
            )
        return self._take(X, stream, least=0, reset=False)

    def _take(self, X: Any, stream: StreamingUniversalSet, *, least: int, reset: bool) -> LeverageScorer:
        """Add at least `least` rows to a stream, a new one if `reset`; an error leaves the estimator as it was."""
        before = vars(self).copy()
        try:
            given = getattr(X, "dtype", None)
            exact = not reset and isinstance(given, np.dtype) and np.can_cast(given, self._seen.dtype)
            dtypes = self._seen.dtype if exact else _DTYPES  # scikit-learn makes float64 of float16
            X = validate_data(self, X, reset=reset, dtype=dtypes, ensure_min_samples=least)
            dtype = X.dtype if reset else self._seen.dtype
            if not np.can_cast(X.dtype, dtype):
                raise TypeError(
                    f"X has dtype {given or X.dtype}; expected {dtype} as in the earlier chunks. Convert this chunk, "
                    "or start with a chunk of float64"
                )
            self._seen = _Seen(stream.update(X.astype(dtype, copy=False)), dtype)
        except BaseException:  # scikit-learn notes names and numbers of columns before it looks at the rows
            self.__dict__ = before
            raise
        return self

    def merge(self, other: LeverageScorer) -> LeverageScorer:
        """Add the rows of another estimator, as if they came after the rows of this one.

        Parameters
        ----------
        other : LeverageScorer
            An estimator of the same `epsilon`, number of columns and dtype. It is not changed. An unfitted estimator
            has no rows.

        Returns
        -------
        LeverageScorer
            This estimator, fitted to the rows of both: up to rounding, as if it had seen all the rows itself.

        Raises
        ------
        TypeError, ValueError
            If the estimators do not match. This one then stays unchanged.

        Notes
        -----
        Time O(d³ + d³/ε), whatever the number of rows.
        """
        check_type("other", other, LeverageScorer, "LeverageScorer")
        if not other.__sklearn_is_fitted__():
            return self
        fitted = self.__sklearn_is_fitted__()
        mine, theirs = (getattr(each, "feature_names_in_", None) for each in (self, other))
        if fitted and mine is not None and theirs is not None and not np.array_equal(mine, theirs):
            raise ValueError(f"other has the columns {list(theirs)}; expected {list(mine)} in this order")
        stream = self._seen.stream if fitted else StreamingUniversalSet(self.epsilon)
        self._seen = _Seen(stream.merge(other._seen.stream), other._seen.dtype)
        if not fitted:
            self.n_features_in_ = other.n_features_in_
            if theirs is not None:
                self.feature_names_in_ = theirs
        return self

    def score_samples(self, X: Any) -> npt.NDArray[Any]:
        """Return the leverage of rows against the fitted rows.

        The leverage of a fitted row is its leverage score. Another row may have a leverage above 1. It is infinite if
        the row lies outside the row space of the fit by more than rounding. It is also infinite beyond the range of
        the dtype. A fitted row on the edge of the numerical rank also gets infinity, where `leverage_scores` gives 1.
        A score may err upward there, never downward.

        Large scores mark unusual rows, while scikit-learn's outlier detectors give unusual rows small scores. Negate
        the scores where a larger score must mean a more usual row.

        Parameters
        ----------
        X : array of shape (m, d)
            Rows.

        Returns
        -------
        array of shape (m,)
            At least 0; float32 for float32 rows, else float64.

        Raises
        ------
        sklearn.exceptions.NotFittedError
            If the estimator is not fitted.
        TypeError, ValueError
            If X is not a dense array of finite numbers with the columns of the fit.
        """
        scores, _ = self._factor_on(X).scores(member=False, numerical=True)
        return np.asarray(scores[0])

    def transform(self, X: Any) -> npt.NDArray[Any]:
        """Return whitened rows, in the basis in which the columns of the fitted rows are orthonormal.

        The squared norm of a whitened row is the leverage of its projection onto the row space of the fit. The
        part of the row outside that space is dropped.

        Parameters
        ----------
        X : array of shape (m, d)
            Rows.

        Returns
        -------
        array of shape (m, rank)
            X W for a matrix W, upper triangular if the rank is d; float32 for float32 rows, else float64.

        Raises
        ------
        sklearn.exceptions.NotFittedError
            If the estimator is not fitted.
        TypeError, ValueError
            If X is not a dense array of finite numbers with the columns of the fit. If a whitened row is beyond the
            range of the dtype.
        """
        factor = self._factor_on(X)
        m = factor.rows.shape[1]
        out = np.empty((m, int(factor.rank[0])), factor.rows.format)
        for start in range(0, m, _ROWS):
            part = slice(start, start + _ROWS)
            with np.errstate(over="ignore", invalid="ignore"):
                out[part] = factor.whitened(float64_rows(factor.rows, part.start, part.stop))
            far = np.flatnonzero(~np.isfinite(out[part]).all(axis=1))
            if len(far):
                raise ValueError(
                    f"X has row {start + far[0]}, which whitened is beyond the range of {out.dtype}; expected rows "
                    "closer in size to the fitted ones. Scale them down"
                )
        return out

    def _factor_on(self, X: Any) -> Factor:
        """Return the factor of the fitted rows, for the rows of X."""
        factor = self.factor_.exactly()
        _, rows = in_main_memory(validate_data(self, X, reset=False, dtype=_DTYPES))
        return factor.on(rows)

    @property
    def result_(self) -> StreamedSet:
        """The universal set of the rows so far, with its rows, their scores and the guarantee."""
        return self._fitted.result

    @property
    def universal_set_(self) -> npt.NDArray[np.int64]:
        """Ascending numbers of the rows with leverage scores of at least ε."""
        return self.result_.indices

    @property
    def rank_(self) -> int:
        """Numerical rank of the rows so far."""
        return int(self.result_.rank)

    @property
    def factor_(self) -> Factor:
        """The factor of the second moment of the rows so far."""
        return self.result_.factor

    @property
    def n_samples_seen_(self) -> int:
        """Number of rows so far."""
        return self._fitted.stream.n

    @property
    def _fitted(self) -> _Seen:
        check_is_fitted(self)
        return self._seen

    @property
    def _n_features_out(self) -> int:
        return self.rank_

    def __copy__(self) -> LeverageScorer:
        """Return a copy with a stream of its own."""
        other = type(self).__new__(type(self))
        other.__dict__ = vars(self).copy()
        if self.__sklearn_is_fitted__():
            other._seen = deepcopy(self._seen)
        return other

    def __sklearn_is_fitted__(self) -> bool:
        """Tell whether the estimator has seen rows."""
        return hasattr(self, "_seen")

    def __sklearn_tags__(self) -> Any:
        """Return the estimator's tags for scikit-learn."""
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
