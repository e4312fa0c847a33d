"""Causal heavy attention while keys are appended: the keys that can still matter, and the heavy ones of a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices, to_float64, to_numpy
from levattn._kernels import BLOCK, Float64, Rows
from levattn.exceptions import NonFiniteError
from levattn.heavy.normalizers import (
    LOWEST,
    PRODUCT_ERROR,
    PreciseSums,
    even_queries,
    even_rows,
    flushed,
    normalizers_by,
)
from levattn.linalg.factor import UNIT, Factor
from levattn.linalg.gram import GramAccumulator
from levattn.linalg.reading import check_finite, refuse_nonfinite
from levattn.sensitivity.leverage import TIE, check_epsilon
from levattn.sets.candidates import Candidates
from levattn.states import factor_of_sum
from levattn.states.block_buffer import in_main_memory, payload_of

__all__ = ["CausalUniversalSet", "HeavyKeys"]

_RECENT = 64  # keys that are at least waited for before they are factored with the others


@dataclass(frozen=True, eq=False)
class HeavyKeys:
    """The heavy entries of some queries over the keys so far; the result of `CausalUniversalSet.heavy`.

    Attributes
    ----------
    starts : array of int64, shape (g + 1,)
        Query i has the entries ``starts[i]:starts[i + 1]``.
    indices : array of int64, shape (k,)
        Row numbers of the keys, ascending for each query.
    scores : array of float64, shape (k,)
        Their attention scores, at least ε; within 1e-9 of it (relative), or four times `error` where that is more,
        doubt counts as that.
    payload : array of shape (k, ...) or None
        What came beside these keys.
    normalizers : array of float64, shape (g,)
        ``Σ ⟨q, k⟩²`` over all keys so far, those that were let go as well.
    captured_mass : array of float64, shape (g,)
        The scores of all keys that are held, summed up.
    error : array of float64, shape (g,)
        Estimated relative error of the scores of a query. It is large only for queries all but orthogonal to the keys,
        and for keys of a condition number above 10¹¹; infinite where nothing is known of a normalizer.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> heavy = levattn.CausalUniversalSet(0.5).update(np.eye(3)).heavy(np.array([[0, 0, 2.0], [1, 1, 1]]))
    >>> heavy.starts, heavy.indices, heavy.scores
    (array([0, 1, 1]), array([2]), array([1.]))
    """

    starts: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    scores: Float64
    payload: npt.NDArray[Any] | None
    normalizers: Float64
    captured_mass: Float64
    error: Float64


class CausalUniversalSet:
    r"""The keys of a growing prefix that can still receive an attention score of at least ε, for f(x) = x².

    Append keys one at a time or in chunks, and ask at any time for the heavy entries of a query over all keys so far.
    They are exact: no score of at least ε is missed, and normalizers count every key that ever came. A key is let go
    when its leverage score among the keys so far is below ε: it never rises again.

    Parameters
    ----------
    epsilon : float in (0, 1]
        Smallest attention score that counts as heavy.

    Raises
    ------
    TypeError, ValueError
        If epsilon is no such number.

    See Also
    --------
    heavy_attention : With ``causal=True`` the same for all queries at once.
    StreamingUniversalSet : A set of all keys, at more speed and with merges.

    Notes
    -----
    For each matrix of a batch at most rank/ε keys are held, and max(64, d) recent ones; d² numbers for the moments.
    Appending costs O(d²) a key (its factor is made anew once for max(64, d) keys), a query O(d² + d²/ε). Moments are
    summed in about 100 bits where the keys are ill-conditioned. Keys that are rank-deficient to float64 but not
    exactly are all held.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462): universal sets (Theorem 1).
    That scores among a prefix only fall, and so that this is exact, is shown in docs/design.md.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> rng = np.random.default_rng(0)
    >>> state = levattn.CausalUniversalSet(0.2)
    >>> for step in range(200):
    ...     key = rng.standard_normal((1, 4)) + (50.0 * (step == 120))
    ...     state = state.update(key)
    >>> state.heavy(np.ones((1, 4))).indices, state.held < 100
    (array([120]), True)
    """

    def __init__(self, epsilon: float) -> None:
        self.epsilon = check_epsilon(epsilon)
        self.n = 0
        self._batch: tuple[int, ...] = ()
        self._format: Any = None
        self._sums = GramAccumulator(0, 1)
        self._factor: Factor | None = None
        self._even: list[tuple[Float64, npt.NDArray[np.int32]]] = []  # its normalizers
        self._held: list[Candidates] = []  # of each matrix: those that were judged, and the recent ones after them
        self._recent = 0

    @property
    def held(self) -> int:
        """Number of keys that are held now, of all matrices.

        Returns
        -------
        int
        """
        return sum(map(len, self._held))

    def update(self, K: Any, *, mask: Any = None, payload: Any = None) -> CausalUniversalSet:
        """Append keys.

        Parameters
        ----------
        K : array of shape (..., m, d)
            Keys; kinds and dtypes as in `leverage_scores`, in all calls alike.
        mask : array of bool, shape (..., m), optional
            True for a key that takes part. The others count as rows.
        payload : array of shape (..., m, ...), optional
            What is to be held with the keys, such as their values: in all calls or in none.

        Returns
        -------
        CausalUniversalSet
            The state itself.

        Raises
        ------
        TypeError, ValueError
            If the chunk does not go with those before.
        NonFiniteError
            If the keys hold NaN or infinity outside the mask. The state is as it was.
        """
        saved = dict(self.__dict__, _sums=self._sums.copy())
        try:
            self._append(K, mask, payload)
        except BaseException:
            self.__dict__.update(saved)
            raise
        return self

    def _append(self, K: Any, mask: Any, payload: Any) -> None:
        """Append keys; if it raises, the state is void."""
        matrices, rows = in_main_memory(K, mask)
        b, m, d = rows.shape
        beside = () if payload is None else (payload_of(payload, matrices.batch, m),)
        held = self._held
        if self._format is None:
            held = [Candidates.empty(d, matrices.format, [array[item] for array in beside]) for item in range(b)]
        else:
            self._require(matrices, beside)
        with np.errstate(over="ignore", invalid="ignore"):
            try:
                check_finite(rows, rows.column_sums())
            except FloatingPointError:
                refuse_nonfinite(rows, self.n)
        if self._format is None:
            self._batch, self._format, self._sums = matrices.batch, matrices.format, GramAccumulator(b, d)
        index = np.arange(self.n, self.n + m, dtype=np.int64)
        for start in range(0, m, BLOCK):
            part = slice(start, min(start + BLOCK, m))
            keys = rows.keys[:, part].copy()
            if rows.mask is not None:
                keys[~rows.mask[:, part]] = 0
            news = (Candidates(index[part], keys[item], tuple(a[item, part] for a in beside)) for item in range(b))
            held = [old + new for old, new in zip(held, news, strict=True)]
            self._held, self._recent = held, self._recent + part.stop - start
            if self._recent >= max(_RECENT, d):
                held = self._fold()
        self._held, self.n = held, self.n + m

    def _require(self, matrices: Matrices, beside: Sequence[npt.NDArray[Any]]) -> None:
        """Raise if a chunk of this shape cannot be appended."""
        d = self._sums.exponents.shape[1]
        if (matrices.batch, matrices.d) != (self._batch, d):
            raise ValueError(
                f"K has batch {matrices.batch} and d = {matrices.d}; expected {self._batch} and d = {d} as before"
            )
        if matrices.format != self._format:
            raise TypeError(f"K has dtype {matrices.format}; expected {self._format} as before: convert chunks alike")
        for held in self._held[:1]:
            mine, its = (
                [(a.shape[skip:], a.dtype) for a in arrays] for skip, arrays in ((1, held.beside), (2, beside))
            )
            if mine != its:
                raise ValueError(f"payload has entries of {its or 'nothing'}; expected {mine or 'nothing'} as before")

    def _fold(self) -> list[Candidates]:
        """Count the recent keys in, and let go those that cannot be heavy any more."""
        b, d = self._sums.exponents.shape
        recent = np.stack([held.keys[len(held) - self._recent :] for held in self._held]) if b else np.zeros((0, 0, d))
        self._sums.merge(*GramAccumulator(b, d).total(Rows(recent, self._format)))
        nothing = Rows(recent[:, :0], self._format)
        self._factor = factor_of_sum(*self._sums.total(nothing), nothing)
        self._recent = 0
        self._even = [self._factor.even_normalizer(item) for item in range(b)]
        self._held = [held.take(self._alive(item, held)) for item, held in enumerate(self._held)]
        return self._held

    def _alive(self, item: int, held: Candidates) -> npt.NDArray[np.bool_]:
        """Tell which keys, all of them factored, have a score of at least ε."""
        if self._factor is None:
            raise AssertionError("nothing was factored yet")
        one = self._factor.item(item).exactly()
        scores = to_numpy(one.on(Rows(held.keys[None], self._format)).scores(as_float64=True)[0])[0]
        return np.asarray(~(scores < self.epsilon * (1 - max(TIE, 4 * float(one.error[0])))) & ~(scores <= 0))

    def heavy(self, Q: Any) -> Any:
        """Find the heavy entries of queries over all keys so far.

        Parameters
        ----------
        Q : array of shape (..., g, d)
            Queries, g of them for each matrix of the batch (such as the query heads that share its keys).

        Returns
        -------
        HeavyKeys, or tuple of HeavyKeys
            For one matrix its entries, else those of each matrix of the batch, leading axes flattened.

        Raises
        ------
        TypeError, ValueError
            If the queries do not go with the keys, or there were no keys yet.
        NonFiniteError
            If the queries hold NaN or infinity.
        """
        if self._format is None:
            raise ValueError("there were no keys yet; expected at least one update, if only with 0 rows")
        queries, rows = in_main_memory(Q, name="Q")
        d = self._sums.exponents.shape[1]
        if (queries.batch, queries.d) != (self._batch, d):
            raise ValueError(
                f"Q has batch {queries.batch} and d = {queries.d}; the keys have {self._batch} and d = {d}. Give g "
                "queries for each matrix of keys, (..., g, d)"
            )
        Q64 = to_float64(rows.keys, rows.format)
        if not np.isfinite(Q64).all():
            bad = np.flatnonzero(~np.isfinite(Q64).all(axis=(0, 2)))[:5]
            raise NonFiniteError(f"Q holds NaN or infinity, first in rows {bad.tolist()}; expected finite queries")
        found = tuple(self._heavy(item, Q64[item]) for item in range(len(Q64)))
        return found if self._batch else found[0]

    def _heavy(self, item: int, Q: Float64) -> HeavyKeys:
        held, d = self._held[item], Q.shape[1]
        keys = to_float64(held.keys, self._format)
        recent = keys[len(keys) - self._recent :]
        there = np.frexp(np.max(np.abs(recent), axis=0, initial=0.0))[1].astype(np.int32)
        if self._factor is None:
            met = np.any(recent != 0, axis=0)
            even, powers = even_queries(np.where(met, Q, 0.0), there)
            exponents, D, loss, known = there, np.zeros(len(Q)), np.zeros(len(Q)), 0.0
        else:
            N, exponents = self._even[item]
            alive, new = np.any(N != 0, axis=0), np.any(recent != 0, axis=0)
            # recent keys may be much larger than those that were factored, or in columns that had none
            both = np.where(new & ((there > exponents) | ~alive), there, exponents)
            N, exponents = np.ldexp(N, exponents - both), both
            met = alive | new  # other entries of a query meet no key
            even, powers = even_queries(np.where(met, Q, 0.0), exponents)
            D, loss = normalizers_by(self._factor.item(item), even, N, exponents)
            known = float(self._factor.error[item])
        stored, keys = keys, np.ldexp(keys, -exponents)
        Z, some = even @ keys.T, slice(len(keys) - self._recent, len(keys))
        size = np.abs(even) @ np.max(np.abs(keys), axis=0, initial=0.0)
        total = D + np.sum(Z[:, some] ** 2, axis=1)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            product = np.where(total > 0, d * UNIT * size / np.sqrt(self.epsilon * total), np.inf)
        precise = np.flatnonzero(~(product <= PRODUCT_ERROR) | ~(loss <= TIE / 8 * np.sqrt(total)))
        if len(precise):  # in units in which squares neither vanish nor overflow
            sums, (K, units, unknown) = PreciseSums(even[precise]), even_rows(stored, -exponents)
            found = sums.add(K, units, unknown)
            inside, _, root = sums.result(len(K))
            ends = np.where(D[precise] > 0, np.frexp(np.sqrt(D[precise]))[1], LOWEST)
            shift = np.maximum(sums.shift, ends)
            shift = np.where(shift > LOWEST, shift, 0).astype(np.int32)
            Z[precise] = np.ldexp(found, units - shift[:, None])
            with np.errstate(over="ignore"):
                D[precise], loss[precise] = np.ldexp(D[precise], -2 * shift), np.ldexp(loss[precise], -shift)
            powers[precise] += shift
            total[precise] = D[precise] + np.sum(Z[precise, some] ** 2, axis=1)
            inside = np.ldexp(inside, 2 * (np.where(inside > 0, sums.shift, 0) - shift))
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                lost = root * np.sqrt(inside / (self.epsilon * np.maximum(total[precise], inside)))
            product[precise] = UNIT + np.where(np.isinf(root), np.inf, np.where(np.isnan(lost), 0.0, lost))
        squares = Z * Z
        root, inside = np.sqrt(D), squares.sum(axis=1)
        total = np.maximum(total, inside)  # where it is next to unknown: the keys that are held are among all
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            error = np.where(total > 0, loss * (2 * root + loss) / total + known + 2 * product, 0.0)
            error[(total == 0) & (loss > 0)] = np.inf
            scores = np.where(total[:, None] > 0, squares / total[:, None], 0.0)
        lost = flushed(np.where(met, Q, 0.0), even)  # of their products nothing is known
        lost[precise] |= np.isinf(product[precise])
        error[lost], scores[lost] = np.inf, np.maximum(scores[lost], 2.0**-1022)
        least = self.epsilon * (1 - np.maximum(TIE, 4 * error))  # doubt counts as heavy
        i, j = np.nonzero((scores >= least[:, None]) & (scores > 0))
        with np.errstate(over="ignore"):
            normalizers = np.ldexp(total, 2 * powers)
        return HeavyKeys(
            starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(i, minlength=len(Q)))]),
            indices=held.indices[j],
            scores=scores[i, j],
            payload=held.beside[0][j] if held.beside else None,
            normalizers=normalizers,
            captured_mass=np.clip(scores.sum(axis=1), 0.0, 1.0),
            error=error,
        )
