"""Mergeable statistics of the keys: an identity, ``update``, ``merge``, and a read-out.

Whatever runs on a state runs at once, in chunks and across machines without mathematics of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._array import as_mask, as_matrices, to_float64, to_numpy
from levattn._kernels import BLOCK, Arithmetic, Float64, Pieces, Rows, kernels_for
from levattn._threads import num_threads

__all__ = ["Moments", "PairwiseSum", "second_moments"]


class PairwiseSum:
    """A sum whose terms are combined like the bits of a binary counter, always in the same order.

    Terms are numbered; 2^level of them that begin at a multiple of 2^level may come as one. The result does not
    depend on how they came, its rounding error grows with the logarithm of their number, and at most one partial
    sum is held for each level.
    """

    def __init__(self) -> None:
        self.count = 0
        self._levels: dict[int, Float64] = {}

    def add(self, term: Float64, level: int = 0) -> None:
        """Add the sum of the next ``2**level`` terms; the array is the sum's from now on."""
        if self.count % (1 << level):
            raise ValueError(f"a sum of 2**{level} terms cannot begin at term {self.count}")
        self.count += 1 << level
        while level in self._levels:
            earlier = self._levels.pop(level)
            earlier += term
            term = earlier
            level += 1
        self._levels[level] = term

    def total(self, tail: Float64 | None = None) -> Float64 | None:
        """Return the sum with `tail` (a last, incomplete term) added, or None where there was no term."""
        for level in sorted(self._levels):
            tail = self._levels[level] if tail is None else tail + self._levels[level]
        return tail


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


class Moments:
    """The second moment ``G = Σ k kᵀ`` of keys that come in chunks, in float64.

    The rows are numbered as they come and summed in fixed blocks, so that the result has the same bits whatever
    the sizes of the chunks and the number of threads. Merging two states agrees with one state to rounding.

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
            If the batch or the number of columns differs from the state's.
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
        self.count = self.count + counted
        self._take(rows)
        return self

    def _take(self, rows: Rows) -> None:
        n = rows.shape[1]
        waiting = sum(part.shape[1] for part in self._waiting)
        start = 0
        if waiting:
            start = min(BLOCK - waiting, n)
            self._wait(rows, 0, start)
            if waiting + start < BLOCK:
                return
            self._blocks.add(self._tail())
            self._waiting = []
        whole = (n - start) // BLOCK
        stop = start + whole * BLOCK
        at = start
        while at < stop:
            first, left = self._blocks.count, (stop - at) // BLOCK
            level = min(left.bit_length() - 1, (first & -first).bit_length() - 1 if first else 63)
            run = rows.between(at, at + (BLOCK << level))
            self._blocks.add(second_moments(run, range(rows.shape[0])), level)
            at += BLOCK << level
        if stop < n:
            self._wait(rows, stop, n)

    def _wait(self, rows: Rows, start: int, stop: int) -> None:
        """Keep a copy of rows that do not fill a block yet, zero where masked."""
        part = rows.between(start, stop)
        keys = to_float64(part.keys, part.format)
        if part.mask is not None:
            keys = np.where(to_numpy(part.mask)[:, :, None], keys, 0.0)
        self._waiting.append(keys)

    def _tail(self) -> Float64:
        """Return the second moment of the rows that wait."""
        keys = np.concatenate(self._waiting, axis=1)
        return second_moments(Rows(keys, "float64"), range(keys.shape[0]))

    def read(self) -> Float64:
        """Return the second moment of all rows so far.

        Returns
        -------
        array of float64, shape (..., d, d)
            Symmetric, zero where there was no key.
        """
        total = self._blocks.total(self._tail() if self._waiting else None)
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
            If the states were made for different shapes.
        """
        if other.d != self.d or other.batch != self.batch:
            raise ValueError(
                f"other has batch {other.batch} and d = {other.d}; expected {self.batch} and d = {self.d}"
            )
        seen = other.read().reshape(-1, self.d, self.d)
        self._merged = seen if self._merged is None else self._merged + seen
        self.count = self.count + other.count
        return self
