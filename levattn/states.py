"""Mergeable statistics of the keys: an identity, ``update``, ``merge``, and a read-out.

Whatever runs on a state runs at once, in chunks and across machines without mathematics of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._array import Matrices, as_mask, as_matrices, to_numpy
from levattn._kernels import BLOCK, Float64, Rows, kernels_for
from levattn._moments import Exponents, MomentSum, Twofold, check_finite, refuse_nonfinite
from levattn.linalg import Factor, factor_moments, factor_sum

__all__ = ["Moments", "Tail", "factor_of", "in_main_memory", "present_rows"]


def in_main_memory(K: Any, mask: Any = None) -> tuple[Matrices, Rows]:
    """Return a chunk of keys of any kind where compiled code can read it."""
    matrices = as_matrices(K, "K")
    present = as_mask(mask, matrices)
    if not isinstance(matrices.data, np.ndarray):
        batch, data = matrices.batch, matrices.data
        matrices = as_matrices(array_api_compat.to_device(data, "cpu"), "K")
        if not isinstance(matrices.data, np.ndarray):
            matrices = as_matrices(to_numpy(data), "K")
        matrices = replace(matrices, batch=batch)
    if present is not None:
        present = to_numpy(present)
    return matrices, Rows(matrices.data, matrices.format, present)


class Tail:
    """Rows that wait for their block of 2048 to fill; masked ones are held as zeros."""

    def __init__(self, b: int, d: int, format: Any) -> None:
        self.count = 0
        dtype = {"float64": np.float64, "float32": np.float32}.get(format, np.uint16)
        self._held = Rows(np.zeros((b, 0, d), dtype), format)

    @property
    def rows(self) -> Rows:
        """The rows that wait; they change with the next that come."""
        return self._held.between(0, self.count)

    def push(self, rows: Rows, take: Callable[[Rows], None]) -> None:
        """Give all blocks that are whole with these rows to `take`, and keep the others.

        Nothing is kept if the rows are not finite or `take` raises.
        """
        if rows.format != self._held.format:
            raise TypeError(
                f"K has dtype {rows.format}; the chunks before had {self._held.format}. Expected one dtype in all "
                "chunks: convert them alike"
            )
        before = self.count
        try:
            at = self._fill(rows) if self.count else 0
            if self.count == BLOCK:
                take(self.rows)
                self.count = 0
            whole = (rows.shape[1] - at) // BLOCK * BLOCK
            if whole:
                take(rows.between(at, at + whole))
            rest = rows.between(at + whole, rows.shape[1])
            waiting = rest if rest.shape[1] else rows.between(0, at)
            with np.errstate(over="ignore", invalid="ignore"):
                check_finite(waiting, kernels_for(waiting).column_sums(waiting))
        except BaseException:
            self.count = before
            raise
        self._fill(rest)

    def _fill(self, rows: Rows) -> int:
        """Take rows up to the end of the block and return their number; what was held before is not touched."""
        taken = min(BLOCK - self.count, rows.shape[1])
        stop = self.count + taken
        if stop > self._held.shape[1]:
            b, size, d = self._held.shape
            keys = np.zeros((b, min(max(stop, 2 * size, 64), BLOCK), d), self._held.keys.dtype)
            keys[:, : self.count] = self.rows.keys
            self._held = replace(self._held, keys=keys)
        part = rows.between(0, taken)
        place = self._held.keys[:, self.count : stop]
        place[...] = part.keys
        if part.mask is not None:
            place[~part.mask] = 0
        self.count = stop
        return taken


def present_rows(rows: Rows) -> npt.NDArray[np.int64]:
    """Return how many rows of each matrix take part."""
    if rows.mask is None:
        return np.full(rows.shape[0], rows.shape[1], np.int64)
    return np.asarray(rows.mask.sum(axis=1, dtype=np.int64))


def factor_of(sums: MomentSum, tail: Rows) -> Factor:
    """Return the factor of the keys of a sum and of the rows that wait, and forget these."""
    if sums.merged is None and not sums.blocks.count:
        return factor_moments(tail, single="scores").forget_keys()
    moments, exponents = sums.total(tail)
    b, _, d = tail.shape
    scale = np.ldexp(1.0, -exponents) if exponents.any() else None
    return factor_sum(moments, Rows(np.empty((b, 0, d), tail.keys.dtype), tail.format, scale=scale))


class Moments:
    """The second moment ``G = Σ k kᵀ`` of keys that come in chunks, and the factor that leverage scores come from.

    The rows are numbered as they come and summed in fixed blocks, so that the result has the same bits whatever
    the sizes of the chunks and the number of threads. Merging two states agrees with one state to rounding.

    Sums are in float64 while that holds what the scores of the keys need, and else as pairs of float64, of about 100
    bits; this is decided block by block. So keys may be ill-conditioned, of any size, or rank-deficient.

    Parameters
    ----------
    d : int
        Number of columns of the keys.
    batch : tuple of int
        Leading axes (batch, heads) of the keys.

    Attributes
    ----------
    count : array of int64, shape (...,)
        Number of keys so far, masked ones not among them.

    Notes
    -----
    Time O(n d²), for ill-conditioned keys about ten times that of well-conditioned ones; memory O(d² log n) for the
    sums and at most 2048 rows that wait for their block to fill.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.states import Moments
    >>> K = np.arange(12.0).reshape(6, 2)
    >>> G = Moments(2).update(K[:5]).update(K[5:]).read()
    >>> np.array_equal(G, K.T @ K)
    True
    """

    def __init__(self, d: int, batch: tuple[int, ...] = ()) -> None:
        self.d = d
        self.batch = tuple(batch)
        self.count: npt.NDArray[np.int64] = np.zeros(self.batch, np.int64)
        self._sum = MomentSum(math.prod(self.batch), d)
        self._tail: Tail | None = None

    def update(self, K: Any, mask: Any = None) -> Moments:
        """Add a chunk of keys.

        Parameters
        ----------
        K : array of shape (..., m, d)
            Keys, m ≥ 0 of them for each matrix of the batch, of the same dtype in all chunks.
        mask : array of bool, shape (..., m), optional
            True for a key that takes part.

        Returns
        -------
        Moments
            The state itself.

        Raises
        ------
        TypeError
            If the dtype is another than that of the chunks before.
        ValueError
            If the batch or the number of columns differs from the state's.
        NonFiniteError
            If the keys hold NaN or infinity outside the mask. The first such rows are named by their number in the
            stream, counted from the first row that this state was given. The state is as it was.
        """
        matrices, rows = in_main_memory(K, mask)
        if matrices.d != self.d or matrices.batch != self.batch:
            raise ValueError(
                f"K has batch {matrices.batch} and d = {matrices.d}; this state was made for batch {self.batch} "
                f"and d = {self.d}"
            )
        tail = self._tail or Tail(rows.shape[0], self.d, matrices.format)
        before = self._sum.copy()
        try:
            tail.push(rows, self._sum.add)
        except FloatingPointError:
            self._sum = before
            refuse_nonfinite(rows, before.blocks.count * BLOCK + tail.count)
        except BaseException:
            self._sum = before
            raise
        self._tail = tail
        self.count = self.count + present_rows(rows).reshape(self.batch)
        return self

    def _total(self) -> tuple[Twofold, Exponents]:
        tail = self._tail or Tail(math.prod(self.batch), self.d, "float64")
        return self._sum.total(tail.rows)

    def read(self) -> Float64:
        """Return the second moment of all rows so far.

        Returns
        -------
        array of float64, shape (..., d, d)
            Symmetric, zero where there was no key. Infinite where the square of a column's norm is beyond float64.
        """
        moments, exponents = self._total()
        with np.errstate(over="ignore"):
            return moments.scaled(-exponents).high.reshape(*self.batch, self.d, self.d)

    def factor(self) -> Factor:
        """Return the factor of the second moment: scores of rows, exact normalisers, and witness queries.

        Returns
        -------
        levattn.linalg.Factor
            For all matrices of the batch, in order.
        """
        tail = self._tail or Tail(math.prod(self.batch), self.d, "float64")
        return factor_of(self._sum, tail.rows)

    def merge(self, other: Moments) -> Moments:
        """Add what another state has seen.

        Parameters
        ----------
        other : Moments
            A state of the same batch and number of columns. It is not changed.

        Returns
        -------
        Moments
            This state, which now stands for the rows of both.

        Raises
        ------
        ValueError
            If the states were made for different shapes.
        """
        if other.d != self.d or other.batch != self.batch:
            raise ValueError(
                f"other has batch {other.batch} and d = {other.d}; expected {self.batch} and d = {self.d}"
            )
        self._sum.merge(*other._total())
        self.count = self.count + other.count
        return self
