"""Second moments of keys and tokens."""

from __future__ import annotations

import math
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices, named_numpy, to_numpy, with_shape
from levattn._core.checks import batch_of, check_bool, check_chunk, check_type, whole_number
from levattn._core.device import where_arrays_are
from levattn._core.serialize import MOST_ROWS, StoredState, counts, lock_of, locked, locked_with, shaped, twin, whole
from levattn._core.types import Float64
from levattn._kernels import Rows
from levattn.linalg.factor import Factor
from levattn.linalg.weighted import checked_weights
from levattn.states.blocks import BlockSums, RunningSums, held_as, present_rows, readable, same_decay


class Moments(StoredState, name="Moments", version=2):
    """The second moment ``G = Σ w k kᵀ`` of keys that come in chunks, or its diagonal, and the factor of it.

    The state numbers the rows as they come and sums them in fixed blocks. If it keeps only the diagonal or sums decay,
    it sums one row after the other. So the result has the same bits whatever the sizes of the chunks and the number of
    threads. On a CUDA device, sums row after row agree to rounding only. Merging two states agrees with one state to
    rounding.

    Sums are in float64 while its precision suffices for the scores of the keys. Otherwise they take two or three
    float64 a number, of 94 or 144 bits, block by block. So keys may be ill-conditioned, of any size, or of lower
    rank. The diagonal, and sums that decay, are always in float64, so squares of keys must be within its range.

    Parameters
    ----------
    d : int
        Number of columns of the keys.
    batch : tuple of int
        Leading axes (batch, heads) of the keys.
    diagonal : bool
        True to keep the diagonal only, Σ w k², d numbers instead of d².
    decay : float or array of float, broadcast to the batch
        Weight of a row after the next has come, above 0 and at most 1; after n further rows, its n-th power.

    Attributes
    ----------
    count : array of int64, shape (...,)
        Number of keys so far, masked ones not among them.
    weight : array of float64, shape (...,)
        The sum of the weights, which decay as the moment does.

    Raises
    ------
    TypeError, ValueError
        If a size is not a whole number or is below 1, or `decay` is outside (0, 1] or has another shape.

    Notes
    -----
    Time O(n d²), about ten times as long for ill-conditioned keys as for well-conditioned ones. Memory O(d² log n) for
    the sums and the rows that wait until a read: fewer than 2048, or up to 9 MiB of small chunks. `diagonal` takes
    time O(n d) and memory O(d), and `decay` with the full moment O(n d²) and O(d²). Outside main memory, both
    also take a chunk in float64.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.states import Moments
    >>> K = np.arange(12.0).reshape(6, 2)
    >>> G = Moments(2).update(K[:5]).update(K[5:]).result()
    >>> np.array_equal(G, K.T @ K)
    True
    >>> w = np.linspace(0, 1, 6)
    >>> state = Moments(2, diagonal=True).update(K, weights=w)
    >>> np.allclose(state.result(), w @ K**2), float(state.weight)
    (True, 3.0)
    """

    def __init__(self, d: int, batch: tuple[int, ...] = (), *, diagonal: bool = False, decay: Any = 1.0) -> None:
        self.d = whole_number("d", d, 1)
        self.batch = batch_of(batch)
        check_bool(diagonal=diagonal)
        self.diagonal = bool(diagonal)
        self.decay = _rates(decay, self.batch)
        self.count: npt.NDArray[np.int64] = np.zeros(self.batch, np.int64)
        b = math.prod(self.batch)
        rates = None if self.decay is None else np.broadcast_to(self.decay, self.batch).reshape(-1)
        self._sums: BlockSums | RunningSums
        if self.diagonal or rates is not None:
            self._sums = RunningSums(b, self.d, not self.diagonal, rates)
        else:
            self._sums = BlockSums(b, self.d)

    def __repr__(self) -> str:
        """Return the shape and the number of rows."""
        form = "diagonal, " if self.diagonal else ""
        counts = self.count.ravel().tolist() or [0]
        rows = " to ".join(map(str, sorted({min(counts), max(counts)})))
        return f"<{type(self).__name__} of {rows} rows, {form}d = {self.d}, batch {self.batch}>"

    @property
    def _held_array(self) -> Any:
        return self._sums

    @property
    @where_arrays_are
    def weight(self) -> Any:
        """The sum of the weights."""
        return self._shaped(self._sums.weight())

    @where_arrays_are
    def sums(self) -> tuple[Any, Any]:
        """Return a diagonal moment and the sum of the weights as they are held; do not write to them.

        Returns
        -------
        diagonal : array of float64, shape (..., d)
            The moment's diagonal.
        weight : array of float64, shape (...,)
            The sum of the weights.

        Raises
        ------
        TypeError
            If the moment is not diagonal and does not decay.
        """
        total, weight = flat_sums(self)
        return self._shaped(total), self._shaped(weight)

    def _shaped(self, array: Any) -> Any:
        """Return (b, ...) as (..., ...)."""
        return with_shape(array, (*self.batch, *array.shape[1:]))

    @classmethod
    def from_arrays(cls, diagonal: Any, weight: Any, count: npt.NDArray[np.int64], *, decay: Any = 1.0) -> Moments:
        """Return the diagonal state that holds these arrays, without a copy; torch's in main memory become numpy's.

        Parameters
        ----------
        diagonal : array of float64, shape (..., d)
            The moment's diagonal.
        weight : array of float64, shape (...,)
            The sum of the weights.
        count : array of int64, shape (...,)
            A numpy array.
        decay : float or array of float, broadcast to the batch
            As in the constructor.

        Returns
        -------
        Moments
            With the batch (...).

        Raises
        ------
        TypeError, ValueError
            If an argument is of another kind, or shapes do not go together.
        """
        total, mass = held_as("diagonal", diagonal), held_as("weight", weight)
        if not total.ndim or tuple(total.shape[:-1]) != tuple(mass.shape) or np.shape(count) != tuple(mass.shape):
            raise ValueError(
                f"diagonal, weight and count have shapes {tuple(total.shape)}, {tuple(mass.shape)} and "
                f"{np.shape(count)}; expected (..., d), (...,) and (...,)"
            )
        *batch, d = map(int, total.shape)
        self = cls(d, tuple(batch), diagonal=True, decay=decay)
        figures = np.asarray(count)
        most = int(figures.max(initial=0)) if figures.dtype.kind in "iu" else -1
        if not 0 <= most <= MOST_ROWS or figures.min(initial=0) < 0:
            raise ValueError(f"count is {count!r}; expected whole numbers of at least 0, and at most {MOST_ROWS}")
        self.count = np.array(count, np.int64)
        b = math.prod(batch)
        if isinstance(self._sums, RunningSums):
            self._sums.held = with_shape(total, (b, d)), with_shape(mass, (b,))
            self._sums.rows = most
        return self

    @where_arrays_are
    def update(self, K: Any, mask: Any = None, weights: Any = None) -> Moments:
        """Add a chunk of keys.

        Parameters
        ----------
        K : array of shape (..., m, d)
            Keys, m ≥ 0 of them for each matrix of the batch, of the same dtype in all chunks. With weights, keys
            are kept as float64.
        mask : array of bool, shape (..., m), optional
            True for a key that takes part.
        weights : array of float, broadcast to (..., m), optional
            The weight w of each key, finite and of at least 0; None for 1. Weights of masked keys are not used.

        Returns
        -------
        Moments
            The state itself.

        Raises
        ------
        TypeError
            If the dtype differs from the chunks before (the diagonal and sums that decay take any).
        ValueError
            If the batch or the number of columns differs from the state's, or a weight is negative or not finite.
        NonFiniteError
            If the keys hold NaN or infinity outside the mask. The message names the first such rows by their
            number in the stream, counted from the first row that this state was given. The state is as it was.
        """
        matrices, rows = readable(K, mask)
        self.add(matrices, rows, None if weights is None else checked_weights(weights, matrices, rows))
        return self

    def add(self, matrices: Matrices, rows: Rows, weights: Any = None, *, rounded: bool = False) -> None:
        """Add a chunk that is checked and where compiled code can read it; see `update`.

        Parameters
        ----------
        matrices : levattn._core.arrays.Matrices
            The chunk as it was given.
        rows : levattn._kernels.Rows
            The chunk as compiled code reads it.
        weights : array of float64, shape (b, m), optional
            The weight of each key.
        rounded : bool, default False
            Whether the chunk was rounded when it was made, so that its last digits tell nothing.

        Raises
        ------
        TypeError, ValueError
            If the dtype, the batch or the number of columns differs from the state's.
        NonFiniteError
            If the keys hold NaN or infinity outside the mask.
        """
        check_chunk(matrices, self)
        present = present_rows(rows)
        with lock_of(self):
            count = self.count + present.reshape(self.batch)
            self._sums.add(rows, weights, present, rounded)
            self.count = count  # at once: neither an interrupt nor a fork comes between a change and a store

    @where_arrays_are
    def result(self) -> Any:
        """Return the second moment of all rows so far.

        Returns
        -------
        array of float64, shape (..., d, d), or (..., d) if `diagonal`
            Symmetric, zero where there was no key. Infinite where the square of a column's norm is beyond float64.
        """
        return self._shaped(self._settled().result())

    @where_arrays_are
    def factor(self) -> Factor:
        """Return the factor of the second moment: scores of rows, exact normalizers, and witness queries.

        A diagonal moment stands for the diagonal matrix: scores are ``Σ k²/g`` over the columns.

        Returns
        -------
        levattn.linalg.Factor
            For all matrices of the batch, in order.
        """
        return self._settled().factor()

    def _settled(self) -> BlockSums | RunningSums:
        """Return the sums so far, which stay as they are."""
        if isinstance(self._sums, RunningSums):
            return self._sums  # of which a read takes one part, which is replaced at once
        with lock_of(self):
            self._sums.settle()
            return twin(self._sums)

    def _snapshot(self) -> Moments:
        with lock_of(self):
            other = twin(self)
            other._sums = twin(self._sums)
        return other

    @locked_with
    def merge(self, other: Moments) -> Moments:
        """Add the rows of another state; where sums decay, after the rows of this one.

        Parameters
        ----------
        other : Moments
            A state of the same form, batch and number of columns. It is not changed.

        Returns
        -------
        Moments
            This state, which now stands for the rows of both.

        Raises
        ------
        TypeError, ValueError
            If the states were made for different shapes or forms, or saw keys of different dtypes.
        """
        self.check(other)
        count = self.count + other.count
        self._sums.merge(other._sums, other.count.reshape(-1))  # type: ignore[arg-type]
        self.count = count
        return self

    def check(self, other: Any) -> None:
        """Raise, as `merge` does, if another state cannot be merged.

        Parameters
        ----------
        other : Moments
            The other state.

        Raises
        ------
        TypeError, ValueError
            If the states were made for different shapes or forms, or saw keys of different dtypes.
        """
        check_type("other", other, Moments, "Moments")
        check_chunk(other, self, "other")
        if other.diagonal != self.diagonal or not same_decay(self.decay, other.decay, self.batch):
            raise ValueError(
                f"other has diagonal={other.diagonal} and decay={other.decay}; expected {self.diagonal} and "
                f"{self.decay}, as here"
            )
        self._sums.check(other._sums)

    @locked
    @where_arrays_are
    def parts(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return the sums and the numbers of keys; see `StoredState`."""
        fields, arrays = self._sums.parts()
        arrays |= {"count": self.count}
        if self.decay is not None:
            arrays |= {"decay": self.decay}
        return fields | {"d": self.d, "batch": list(self.batch), "diagonal": self.diagonal}, arrays

    @classmethod
    def from_parts(cls, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> Moments:
        """Return the state of the same sums; see `StoredState`."""
        d, batch = whole(fields["d"], 1), tuple(whole(size) for size in fields["batch"])
        b = math.prod(batch)
        count = counts(arrays["count"], batch)  # before the claims of the fields take memory
        if not isinstance(fields["diagonal"], bool):
            raise ValueError(f"diagonal is {fields['diagonal']!r}")
        decay = arrays.get("decay", np.ones(()))
        if "decay" in arrays and (decay == 1).all():
            raise ValueError("nothing decays, and decays are stored")
        if fields["diagonal"] or "decay" in arrays:
            held = shaped(arrays["total"], np.float64, (b, d) if fields["diagonal"] else (b, d, d), finite=False)
            self = cls(d, batch, diagonal=fields["diagonal"], decay=shaped(decay, np.float64, decay.shape))
            self._sums.restore(whole(fields["rows"], most=MOST_ROWS), held, arrays)  # type: ignore[union-attr]
        else:
            sums = BlockSums.from_parts(fields, arrays, b, d)
            self = cls(d, batch)
            self._sums = sums
        self.count = count
        return self


def flat_sums(moments: Moments) -> tuple[Any, Any]:
    """Return the arrays of `Moments.sums`, with one axis in place of the batch."""
    if not isinstance(moments._sums, RunningSums):
        raise TypeError("the state holds no running sums; expected one with diagonal=True")
    total, weight = moments._sums.sums()
    return total, weight


def apart_from_last(moments: Moments) -> Float64:
    """Return the second moment (b, d − 1, d − 1) of all columns but the last, less their projections to it."""
    sums = moments._settled()
    if isinstance(sums, BlockSums):
        return sums.apart_from_last()
    G = to_numpy(moments.result()).reshape(-1, moments.d, moments.d)
    return np.asarray(G[:, :-1, :-1] - G[:, :-1, -1:] * (G[:, -1:, :-1] / G[:, -1:, -1:]))


def followed(moments: Moments, diagonal: Any, weight: Any, count: int | npt.NDArray[np.int64]) -> Moments:
    """Return the state of diagonal sums that continue the sums of another, without a copy or a check.

    diagonal, weight: as in `Moments.from_arrays`, after `count` further keys, with any axes in place of the batch.
    """
    known = moments._sums
    if not isinstance(known, RunningSums):
        raise AssertionError("expected running sums, got sums in blocks")
    other, sums = twin(moments), twin(known)
    other._sums, other.count = sums, moments.count + count
    sums.rows = known.rows + count if isinstance(count, int) else int(other.count.max(initial=0))
    sums.held = with_shape(diagonal, (-1, moments.d)), with_shape(weight, (-1,))
    return other


def _rates(decay: Any, batch: tuple[int, ...]) -> npt.NDArray[np.float64] | None:
    """Return decays as an array of float64 that broadcasts to the batch, or None where nothing decays."""
    if isinstance(decay, int | float) and decay == 1:
        return None
    problem = f"decay is {decay!r}; expected numbers in (0, 1] that broadcast to {batch}"
    try:
        # a copy, because a caller may refill an array, or that of a state, which calls of one shape share
        rates = np.array(
            named_numpy("decay", decay) if array_api_compat.is_array_api_obj(decay) else decay, np.float64
        )
        fits = np.broadcast_shapes(rates.shape, batch) == batch
    except (TypeError, ValueError):
        raise TypeError(problem) from None
    if not fits or not ((rates > 0) & (rates <= 1)).all():
        raise ValueError(problem)
    return None if (rates == 1).all() else rates
