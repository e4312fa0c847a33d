"""Causal heavy attention while keys are appended: keys that can still be heavy, and the heavy keys of a query."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import to_float64
from levattn._core.checks import TIE, check_epsilon
from levattn._core.device import where_arrays_are
from levattn._core.serialize import SharedState, lock_of, locked, twin
from levattn._core.types import Float64
from levattn._kernels import BLOCK, KEYS, Rows
from levattn.heavy.entries import heavy_places
from levattn.heavy.normalizers import (
    LEAST,
    LOWEST,
    PRODUCT_ERROR,
    EvenRows,
    PreciseSums,
    even_queries,
    even_rows,
    flushed,
    normalizers_by,
    precise_error,
    require_finite_queries,
)
from levattn.linalg.accumulator import UNIT, GramAccumulator
from levattn.linalg.factor import Factor
from levattn.linalg.reading import check_finite, refuse_nonfinite
from levattn.sensitivity.shown import span
from levattn.sets.candidates import Candidates, ChunkForm
from levattn.sets.result import rescored
from levattn.states import factor_of_sum
from levattn.states.blocks import in_main_memory, payload_of

_RECENT = 64  # recent keys, at least, before they are factored with the others


@dataclass(frozen=True, repr=False, eq=False)
class HeavyKeys:
    """The heavy entries of some queries over the keys so far; the result of `CausalUniversalSet.heavy`.

    Attributes
    ----------
    starts : array of int64, shape (g + 1,)
        Query i has the entries ``starts[i]:starts[i + 1]``.
    indices : array of int64, shape (k,)
        Row numbers of the keys, ascending for each query.
    scores : array of float64, shape (k,)
        Their attention scores, at least ε. A score within 1e-9 of ε (relative), or within four times `error` where
        that is more, counts as at least ε.
    payload : array of shape (k, ...) or None
        The payload of these keys.
    normalizers : array of float64, shape (g,)
        ``Σ ⟨q, k⟩²`` over all keys so far, dropped keys as well.
    captured_mass : array of float64, shape (g,)
        The sum of the scores of all keys that are held.
    error : array of float64, shape (g,)
        Estimated relative error of the scores of a query. It is large only for queries nearly orthogonal to the keys,
        and for keys of a condition number above 10¹¹. It is infinite where a normalizer is unknown.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> heavy = levattn.CausalUniversalSet(0.5).update(np.eye(3)).heavy(np.array([[0, 0, 2.0], [1, 1, 1]]))
    >>> heavy
    HeavyKeys(1 entries of 2 queries, captured_mass 1)
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

    def __repr__(self) -> str:
        """Return the figures on one line."""
        return (
            f"HeavyKeys({len(self.indices)} entries of {len(self.normalizers)} queries, "
            f"captured_mass {span(self.captured_mass)})"
        )


class CausalUniversalSet(SharedState):
    r"""The keys of a growing prefix that can still receive an attention score of at least ε, for f(x) = x².

    Append keys one at a time or in chunks. At any time, ask for the heavy entries of a query over all keys so far.
    They are exact: no score of at least ε is missed, and normalizers count every key so far. A key is dropped when its
    leverage score among the keys so far is below ε, because the score never rises again.

    Parameters
    ----------
    epsilon : float in (0, 1]
        Smallest attention score that counts as heavy.

    Raises
    ------
    TypeError, ValueError
        If epsilon is not a number in this range.

    See Also
    --------
    causal_heavy_attention : The same for all queries at once.
    StreamingUniversalSet : A set of all keys, faster and with merges.

    Notes
    -----
    For each matrix of a batch the state holds at most rank/ε keys, max(64, d) recent keys, and d² numbers for the
    moments. Appending costs O(d²) per key (max(64, d) keys share a new factor), a query O(d² + d²/ε). Moments are
    summed in 94 or 144 bits where the keys are ill-conditioned. So their rank may also be deficient up to rounding.
    Only beside keys that are 10¹⁹ times as long, all others may be held.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462): universal sets (Theorem 1).
    docs/design.md proves that scores among a prefix only fall, so dropping keys loses no heavy entry.

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
        self._form: ChunkForm | None = None  # of the keys
        self._dtype: np.dtype[Any] | None = None  # of the keys, for dtypes of numpy
        self._sums = GramAccumulator(0, 1)
        self._factor: Factor | None = None
        self._judged: list[Candidates] = []  # keys of each matrix that are factored and may still be heavy
        self._first = 0  # number of the first row that is not factored
        self._recent = 0  # number of these rows; their arrays have room for more:
        self._keys: npt.NDArray[Any] = np.zeros((0, 0, 1))
        self._beside: tuple[npt.NDArray[Any], ...] = ()

    def __repr__(self) -> str:
        """Return the figures on one line."""
        state = self._snapshot()
        form = state._form
        shape = "no key yet" if form is None else f"n={state.n}, held={state.held}, batch={form.batch}, d={form.d}"
        return f"CausalUniversalSet(epsilon={self.epsilon:.6g}, {shape})"

    @property
    @locked
    def n(self) -> int:
        """Number of rows so far, including masked rows."""
        return self._first + self._recent

    @property
    def _format(self) -> Any:
        return None if self._form is None else self._form.format

    @property
    @locked
    def held(self) -> int:
        """Number of keys that are held now, of all matrices."""
        return sum(map(len, self._judged)) + self._recent * len(self._judged)

    @where_arrays_are
    def update(self, K: Any, *, mask: Any = None, payload: Any = None) -> CausalUniversalSet:
        """Append keys.

        Parameters
        ----------
        K : array of shape (..., m, d)
            Keys; array types and dtypes as in `leverage_scores`, the same in all calls.
        mask : array of bool, shape (..., m), optional
            True for a key that takes part. The others count as rows.
        payload : array of shape (..., m, ...), optional
            Arrays to hold with the keys, such as their values: in all calls or in none.

        Returns
        -------
        CausalUniversalSet
            The state itself.

        Raises
        ------
        TypeError, ValueError
            If the chunk does not match the chunks before.
        NonFiniteError
            If the keys hold NaN or infinity outside the mask. After any error the state is as before.
        """
        with lock_of(self):
            if mask is None and self._put_few(K, payload):
                return self
            new = twin(self)
            new._append(K, mask, payload)
            vars(self).update(vars(new))  # all at once
        return self

    def _put_few(self, K: Any, payload: Any) -> bool:
        """Append a few keys of numpy; return False if they may differ in kind from earlier keys.

        Most calls during decoding take this path.
        """
        form = self._form
        if form is None or type(K) is not np.ndarray or K.dtype is not self._dtype or K.ndim < 2:
            return False
        batch, m = K.shape[:-2], K.shape[-2]
        stop = self._recent + m
        if K.shape[-1] != form.d or batch != form.batch or stop >= self._keys.shape[1]:
            return False
        place = self._keys[:, self._recent : stop]
        place[...] = K.reshape(place.shape)
        if not math.isfinite(np.einsum("bij->", place)):  # NaN, infinite, or too large for a sum
            return False
        if payload is not None or self._beside:
            if type(payload) is not np.ndarray or len(self._beside) != 1 or payload.dtype is not self._beside[0].dtype:
                return False
            beside = self._beside[0][:, self._recent : stop]
            if payload.shape != (*batch, m, *beside.shape[2:]):
                return False
            beside[...] = payload.reshape(beside.shape)
        self._recent = stop
        return True

    def _append(self, K: Any, mask: Any, payload: Any) -> None:
        """Append keys; if it raises, the state is void, but not a twin of before."""
        matrices, rows = in_main_memory(K, mask)
        b, m, d = rows.shape
        payloads = () if payload is None else (payload_of(payload, matrices.batch, m),)
        form = ChunkForm.of(matrices, payloads)
        if self._form is not None:
            self._form.require(form, "K")
        with np.errstate(over="ignore", invalid="ignore"):
            try:
                check_finite(rows, KEYS.column_figures(rows, largest=False))
            except FloatingPointError:
                refuse_nonfinite(rows, self.n)
        if self._form is None:
            self._form, self._sums = form, GramAccumulator(b, d)
            self._dtype = rows.keys.dtype if form.format in ("float64", "float32") else None
            self._judged = [Candidates.empty(d, form.format, [array[item] for array in payloads]) for item in range(b)]
            room = max(_RECENT, d)
            self._keys = np.empty((b, room, d), rows.keys.dtype)
            self._beside = tuple(np.empty((b, room, *array.shape[2:]), array.dtype) for array in payloads)
        for start in range(0, m, BLOCK):
            part = slice(start, min(start + BLOCK, m))
            keys = rows.keys[:, part]
            if rows.mask is not None:
                keys = np.where(rows.mask[:, part, None], keys, keys.dtype.type(0))
            self._put(keys, [array[:, part] for array in payloads])

    def _put(self, keys: npt.NDArray[Any], beside: list[npt.NDArray[Any]]) -> None:
        """Append keys with their payloads (b, m, ...)."""
        first, stop = self._recent, self._recent + keys.shape[1]
        if stop < self._keys.shape[1]:
            for room, new in zip((self._keys, *self._beside), (keys, *beside), strict=True):
                room[:, first:stop] = new
            self._recent = stop
            return
        keys, *beside = (
            np.concatenate([room[:, :first], new], axis=1)
            for room, new in zip((self._keys, *self._beside), (keys, *beside), strict=True)
        )
        # the old arrays belong to twins of this state
        self._keys, self._beside = np.empty_like(self._keys), tuple(map(np.empty_like, self._beside))
        self._fold(keys, beside)

    def _fold(self, recent: npt.NDArray[Any], beside: list[npt.NDArray[Any]]) -> None:
        """Add the recent keys to the moments, and drop the keys that cannot be heavy any more."""
        nothing = Rows(recent[:, :0], self._format)
        self._sums = self._sums.copy()
        self._sums.merge_rows(Rows(recent, self._format))
        self._factor = factor_of_sum(*self._sums.total(nothing), nothing)
        index = np.arange(self._first, self._first + recent.shape[1], dtype=np.int64)
        held = [
            old + Candidates(index, recent[item], tuple(array[item] for array in beside))
            for item, old in enumerate(self._judged)
        ]
        self._judged = [one.take(self._alive(item, one)) for item, one in enumerate(held)]
        self._first, self._recent = self._first + recent.shape[1], 0

    def _alive(self, item: int, held: Candidates) -> npt.NDArray[np.bool_]:
        """Tell which keys, all of them factored, have a score of at least ε."""
        if self._factor is None:
            raise AssertionError("nothing was factored yet")
        scores, _ = rescored(self._factor, item, Rows(held.keys[None], self._format))
        slack = max(TIE, 4 * float(self._factor.error[item]))
        return np.asarray(~(scores < self.epsilon * (1 - slack)) & ~(scores <= 0))

    @where_arrays_are
    def heavy(self, Q: Any) -> Any:
        """Find the heavy entries of queries over all keys so far.

        Parameters
        ----------
        Q : array of shape (..., g, d)
            Queries, g of them for each matrix of the batch (such as the query heads that share its keys).

        Returns
        -------
        HeavyKeys, or tuple of HeavyKeys
            For one matrix its entries, else the entries of each matrix of the batch, leading axes flattened.

        Raises
        ------
        TypeError, ValueError
            If the queries do not match the keys, or there were no keys yet.
        NonFiniteError
            If the queries hold NaN or infinity.
        """
        state = self._snapshot()
        form = state._form
        if form is None:
            raise ValueError("there were no keys yet; expected at least one update, if only with 0 rows")
        queries, rows = in_main_memory(Q, name="Q")
        if (queries.batch, queries.d) != (form.batch, form.d):
            raise ValueError(
                f"Q has batch {queries.batch} and d = {queries.d}; the keys have {form.batch} and d = {form.d}. Give "
                "g queries for each matrix of keys, (..., g, d)"
            )
        Q64 = to_float64(rows.keys, rows.format)
        require_finite_queries(np.asarray(np.isfinite(Q64).all(axis=(0, 2))))
        found = tuple(state._heavy(item, Q64[item]) for item in range(len(Q64)))
        return found if form.batch else found[0]

    def _units(self, item: int, recent: Float64) -> tuple[Float64 | None, npt.NDArray[np.int32], Any]:
        """Return the normalizer of the factored keys, its powers of two by column, and flags of nonzero columns.

        Recent keys may be much larger than the factored keys, or in columns where these have no entries.
        """
        new = np.any(recent != 0, axis=0)
        exponents = np.frexp(np.max(np.abs(recent), axis=0, initial=0.0))[1].astype(np.int32)
        if self._factor is None:
            return None, exponents, new
        N, factored = self._factor.even_normalizer(item)
        alive = np.any(N != 0, axis=0)
        exponents = np.where(new & ((exponents > factored) | ~alive), exponents, factored)
        return np.ldexp(N, factored - exponents), exponents, alive | new

    def _heavy(self, item: int, Q: Float64) -> HeavyKeys:
        index = np.arange(self._first, self.n, dtype=np.int64)
        waiting = tuple(array[item, : self._recent] for array in self._beside)
        held, d = self._judged[item] + Candidates(index, self._keys[item, : self._recent], waiting), Q.shape[1]
        stored = to_float64(held.keys, self._format)
        recent = slice(len(stored) - self._recent, len(stored))
        N, exponents, met = self._units(item, stored[recent])
        Q = np.where(met, Q, 0.0)  # no key has other columns
        even, powers = even_queries(Q, exponents)
        D, loss, known = np.zeros(len(Q)), np.zeros(len(Q)), 0.0
        if self._factor is not None and N is not None:
            D, loss = normalizers_by(self._factor.item(item), even, N, exponents)
            known = float(self._factor.error[item])
        keys = np.ldexp(stored, -exponents)
        Z = even @ keys.T
        size = np.abs(even) @ np.max(np.abs(keys), axis=0, initial=0.0)
        total = D + np.sum(Z[:, recent] ** 2, axis=1)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            product = np.where(total > 0, d * UNIT * size / np.sqrt(self.epsilon * total), np.inf)
        precise = np.flatnonzero(~(product <= PRODUCT_ERROR) | ~(loss <= TIE / 8 * np.sqrt(total)))
        if len(precise):
            few = _Precise(even[precise], even_rows(stored, -exponents), D[precise], loss[precise])
            Z[precise], D[precise], loss[precise] = few.products, few.D, few.loss
            powers[precise] += few.shift
            total[precise] = few.D + np.sum(few.products[:, recent] ** 2, axis=1)
            product[precise] = few.error(total[precise], self.epsilon)
        squares = Z * Z
        root, inside = np.sqrt(D), squares.sum(axis=1)
        total = np.maximum(total, inside)  # if it is nearly unknown, the held keys bound it from below
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            error = np.where(total > 0, loss * (2 * root + loss) / total + known + 2 * product, 0.0)
            error[(total == 0) & (loss > 0)] = np.inf
            scores = np.where(total[:, None] > 0, squares / total[:, None], 0.0)
        lost = flushed(Q, even)  # their products are unknown
        lost[precise] |= np.isinf(product[precise])
        error[lost], scores[lost] = np.inf, np.maximum(scores[lost], LEAST)
        i, j, heavy = heavy_places(scores, self.epsilon, error)
        with np.errstate(over="ignore"):
            normalizers = np.ldexp(total, 2 * powers)
        return HeavyKeys(
            starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(i, minlength=len(Q)))]),
            indices=held.indices[j],
            scores=heavy,
            payload=held.payload[0][j] if held.payload else None,
            normalizers=normalizers,
            captured_mass=np.clip(scores.sum(axis=1), 0.0, 1.0),
            error=error,
        )


class _Precise:
    """Products of some queries with the held keys, in units in which squares neither vanish nor overflow.

    The unit of `products` and `loss` is 2^shift; the unit of D is its square.
    """

    def __init__(self, Q: Float64, rows: EvenRows, D: Float64, loss: Float64) -> None:
        (K, units, unknown), sums = rows, PreciseSums(Q)
        found = sums.add(K, units, unknown)
        inside, _, self._root = sums.result(len(K))
        shift = np.maximum(sums.shift, np.where(D > 0, np.frexp(np.sqrt(D))[1], LOWEST))
        self.shift = np.where(shift > LOWEST, shift, 0).astype(np.int32)
        self.products = np.ldexp(found, units - self.shift[:, None])
        with np.errstate(over="ignore"):
            self.D, self.loss = np.ldexp(D, -2 * self.shift), np.ldexp(loss, -self.shift)
        self._inside = np.ldexp(inside, 2 * (np.where(inside > 0, sums.shift, 0) - self.shift))

    def error(self, total: Float64, epsilon: float) -> Float64:
        """Return the error of the products that make a score of ε, for normalizers of all keys."""
        return precise_error(self._root, self._inside, epsilon * np.maximum(total, self._inside))
