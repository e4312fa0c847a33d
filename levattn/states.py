"""Mergeable statistics of the keys: an identity, ``update``, ``merge``, and a read-out.

Whatever runs on a state runs at once, in chunks and across machines without mathematics of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from levattn._array import as_mask, as_matrices, to_float64, to_numpy
from levattn._kernels import BLOCK, Arithmetic, Float64, PairwiseSum, Pieces, Rows, kernels_for
from levattn._threads import num_threads
from levattn.exceptions import NonFiniteError

__all__ = ["Moments", "PairwiseSum", "second_moments"]


def _pieces(n: int, count: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Split `n` rows into runs of whole powers of two of blocks, enough to keep `count` threads busy.

    Returned are the runs (first row, row after the last) and their levels; the last, if its block is
    incomplete, has level −1.
    """
    blocks = -(-n // BLOCK)
    whole = n // BLOCK
    few, many = (max(0, (blocks // (share * count)).bit_length() - 1) for share in (4, 8))
    largest = min(few, max(many, 4)) if count > 1 else 63  # four runs a thread, or eight where runs are long
    runs, levels, at = [], [], 0
    while at < whole:
        level = min(largest, (whole - at).bit_length() - 1, (at & -at).bit_length() - 1 if at else 63)
        runs.append((at * BLOCK, (at + (1 << level)) * BLOCK))
        levels.append(level)
        at += 1 << level
    if n % BLOCK:
        runs.append((whole * BLOCK, n))
        levels.append(-1)
    return runs, levels


def second_moments(
    rows: Rows, items: Sequence[int], *, basis: Float64 | None = None, arithmetic: Arithmetic = "double"
) -> Float64:
    """Return ``Σ xᵀx`` over the rows x of each matrix of `items`, (s, d, d), in the one order of design rule 8.

    With `basis` (s, d, d), upper triangular, each row is multiplied by it first.
    """
    _, n, d = rows.shape
    runs, levels = _pieces(n, 1 if len(items) >= 4 * num_threads() else num_threads())
    pieces: Pieces = np.empty((len(items), len(runs), 4), np.int64)
    pieces[:, :, 0] = np.arange(len(items))[:, None]
    pieces[:, :, 1] = np.asarray(items, np.int64)[:, None]
    pieces[:, :, 2:] = np.asarray(runs, np.int64).reshape(-1, 2)
    parts = kernels_for(rows).moments(rows, pieces.reshape(-1, 4), basis=basis, arithmetic=arithmetic)
    parts = parts.reshape(len(items), len(runs), d, d)
    whole = PairwiseSum()
    tail = None
    for index, level in enumerate(levels):
        if level < 0:
            tail = parts[:, index]
        else:
            whole.add(parts[:, index], level)
    total = whole.total(tail)
    return np.zeros((len(items), d, d)) if total is None else total


def _copied(rows: Rows, start: int, stop: int) -> Float64:
    """Return some of the rows in float64, zero where masked."""
    part = rows.between(start, stop)
    keys = to_float64(part.keys, part.format)
    return keys if part.mask is None else np.where(to_numpy(part.mask)[:, :, None], keys, 0.0)


def _joint_moment(parts: list[Float64]) -> Float64:
    """Return the second moment of the rows of several arrays, of one block at most."""
    keys = np.concatenate(parts, axis=1)
    return second_moments(Rows(keys, "float64"), range(keys.shape[0]))


class Moments:
    """The second moment ``G = Σ k kᵀ`` of keys that come in chunks, in float64.

    The rows are numbered as they come and summed in fixed blocks, so that the result has the same bits whatever
    the sizes of the chunks and the number of threads. Merging two states agrees with one state to rounding.

    The sum of the squares of all keys must stay within float64, so that keys may be as large as about 1e150 in
    magnitude. A chunk that would lead beyond, or that holds NaN or infinity, is refused and changes nothing.

    Parameters
    ----------
    d : int
        Number of columns of the keys.
    batch : tuple of int
        Leading axes (batch, heads) of the keys.

    Notes
    -----
    Time O(n d²); memory O(d² log n) for the sums and at most 2048 rows that wait for their block to fill.

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
        self._blocks = PairwiseSum()
        self._merged: Float64 | None = None
        self._waiting: list[Float64] = []
        # Σ ‖k‖² of each matrix: while it is finite, so is every sum of products of any of the keys
        self._size: Float64 = np.zeros(math.prod(self.batch))

    def update(self, K: Any, mask: Any = None) -> Moments:
        """Add a chunk of keys.

        Parameters
        ----------
        K : array of shape (..., m, d)
            Keys, m ≥ 0 of them for each matrix of the batch.
        mask : array of bool, shape (..., m), optional
            True for a key that takes part.

        Returns
        -------
        Moments
            The state itself.

        Raises
        ------
        ValueError
            If the batch or the number of columns differs from the state's, or if the keys are so large that the
            sum of their squares overflows.
        NonFiniteError
            If the keys hold NaN or infinity outside the mask. The first such rows are named by their number in the
            stream, counted from the first row that this state was given.
        """
        matrices = as_matrices(K, "K")
        if matrices.d != self.d or matrices.batch != self.batch:
            raise ValueError(
                f"K has batch {matrices.batch} and d = {matrices.d}; this state was made for batch {self.batch} "
                f"and d = {self.d}"
            )
        present = as_mask(mask, matrices)
        rows = Rows(matrices.data, matrices.format, present)
        counted = matrices.n if present is None else to_numpy(present).sum(axis=1).reshape(self.batch)
        with np.errstate(over="ignore", invalid="ignore"):
            terms, waiting, size = self._terms(rows)
            size = self._size + size
        if not np.isfinite(size).all():
            self._refuse(rows, size)
        for term, level in terms:
            self._blocks.add(term, level)
        self._waiting, self._size, self.count = waiting, size, self.count + counted
        return self

    def _terms(self, rows: Rows) -> tuple[list[tuple[Float64, int]], list[Float64], Float64]:
        """Return what `rows` add: sums of whole blocks with their levels, the rows that wait then, and ``Σ ‖k‖²``."""
        b, n, _ = rows.shape
        terms: list[tuple[Float64, int]] = []
        waiting, size = list(self._waiting), np.zeros(b)
        first, at = self._blocks.count, 0
        if waiting and n:
            at = min(BLOCK - self._held, n)
            waiting.append(_copied(rows, 0, at))
            size += np.sum(waiting[-1] ** 2, axis=(1, 2))
            if self._held + at < BLOCK:
                return terms, waiting, size
            terms.append((_joint_moment(waiting), 0))
            waiting, first = [], first + 1
        stop = n - (n - at) % BLOCK
        while at < stop:
            left = (stop - at) // BLOCK
            level = min(left.bit_length() - 1, (first & -first).bit_length() - 1 if first else 63)
            term = second_moments(rows.between(at, at + (BLOCK << level)), range(b))
            terms.append((term, level))
            size += np.trace(term, axis1=1, axis2=2)
            first, at = first + (1 << level), at + (BLOCK << level)
        if stop < n:
            waiting.append(_copied(rows, stop, n))
            size += np.sum(waiting[-1] ** 2, axis=(1, 2))
        return terms, waiting, size

    @property
    def _held(self) -> int:
        """Number of rows that wait."""
        return sum(part.shape[1] for part in self._waiting)

    def _refuse(self, rows: Rows, size: Float64) -> NoReturn:
        """Raise the error for a chunk with which the sums of squares `size` are not finite."""
        kernels = kernels_for(rows)
        before = self._blocks.count * BLOCK + self._held
        for item in np.flatnonzero(~np.isfinite(size)).tolist():
            found = [before + row for row in kernels.nonfinite_rows(rows, item, 5)]
            if found:
                where = f" of matrix {item} (leading axes flattened)" if len(size) > 1 else ""
                more = "first such rows" if len(found) > 1 else "row"
                raise NonFiniteError(
                    f"K holds NaN or infinity: {more} {', '.join(map(str, found))}{where}, counted from the first row "
                    "that this state was given; expected finite numbers. Remove them, or leave padded rows out with "
                    "mask=. The state is as it was"
                )
        largest = float(kernels.column_maxima(rows).max())
        raise ValueError(
            f"K has entries of magnitude {largest:.3g}, with which the sum of squares overflows float64; expected at "
            "most about 1e150. Scale all keys down by a power of two. The state is as it was"
        )

    def read(self) -> Float64:
        """Return the second moment of all rows so far.

        Returns
        -------
        array of float64, shape (..., d, d)
            Symmetric, zero where there was no key.
        """
        total = self._blocks.total(_joint_moment(self._waiting) if self._waiting else None)
        if self._merged is not None:
            total = self._merged if total is None else total + self._merged
        shape = (*self.batch, self.d, self.d)
        return np.zeros(shape) if total is None else np.array(total).reshape(shape)

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
            If the states were made for different shapes, or if the sum of the squares of their keys overflows.
        """
        if other.d != self.d or other.batch != self.batch:
            raise ValueError(
                f"other has batch {other.batch} and d = {other.d}; expected {self.batch} and d = {self.d}"
            )
        with np.errstate(over="ignore"):
            size = self._size + other._size
        if not np.isfinite(size).all():
            raise ValueError(
                "other has keys so large that the sum of squares of both states overflows float64; expected keys of "
                "at most about 1e150 in magnitude. Scale all keys down by a power of two. The state is as it was"
            )
        seen = other.read().reshape(-1, self.d, self.d)
        self._merged = seen if self._merged is None else self._merged + seen
        self._size, self.count = size, self.count + other.count
        return self
