"""Mergeable statistics of the keys: an identity, ``update``, ``merge``, and a read-out.

Whatever runs on a state runs at once, in chunks and across machines without mathematics of its own.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._array import Matrices
from levattn._bytes import as_damage, pack, shaped, unpack, whole
from levattn._kernels import BLOCK, Float64, Rows
from levattn._moments import Exponents, MomentSum, Twofold, refuse_nonfinite
from levattn._tail import Tail, present_rows, readable
from levattn.linalg import Factor, factor_moments, factor_sum

__all__ = ["Moments", "factor_of", "factor_of_sum"]

_VERSION = 1


def factor_of(sums: MomentSum, tail: Rows, total: tuple[Twofold, Exponents] | None = None) -> Factor:
    """Return the factor of the keys of a sum and of the rows that wait, and forget these; `total` if it is known."""
    if sums.merged is None and not sums.blocks.count:
        return factor_moments(tail, single="scores").forget_keys()
    b, _, d = tail.shape
    return factor_of_sum(*(total or sums.total(tail)), Rows(np.empty((b, 0, d), tail.keys.dtype), tail.format))


def factor_of_sum(moments: Twofold, exponents: Exponents, like: Rows) -> Factor:
    """Return the factor of moments whose columns were divided by powers of two, for keys as `like` has none of."""
    scale = np.ldexp(1.0, -exponents) if exponents.any() else None
    return factor_sum(moments, replace(like, mask=None, scale=scale))


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
        matrices, rows = readable(K, mask)
        self.add(matrices, rows)
        return self

    def add(self, matrices: Matrices, rows: Rows) -> None:
        """Add a chunk that is checked and where compiled code can read it; see `update`."""
        if matrices.d != self.d or matrices.batch != self.batch:
            raise ValueError(
                f"K has batch {matrices.batch} and d = {matrices.d}; this state was made for batch {self.batch} "
                f"and d = {self.d}"
            )
        tail = self._tail.copy() if self._tail is not None else Tail(rows.shape[0], self.d, matrices.format)
        sums, before = self._sum.copy(), self._sum.blocks.count * BLOCK + tail.count
        try:
            tail.push(rows, sums.add)
        except FloatingPointError:
            refuse_nonfinite(rows, before)
        self._tail, self._sum = tail, sums
        self.count = self.count + present_rows(rows).reshape(self.batch)

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
        TypeError, ValueError
            If the states were made for different shapes, or saw keys of different dtypes.
        """
        if not isinstance(other, Moments):
            raise TypeError(f"other is of type {type(other).__name__}; expected Moments")
        if other.d != self.d or other.batch != self.batch:
            raise ValueError(
                f"other has batch {other.batch} and d = {other.d}; expected {self.batch} and d = {self.d}"
            )
        if other._tail is not None:
            format = other._tail.rows.format
            if self._tail is None:
                self._tail = Tail(math.prod(self.batch), self.d, format)
            elif self._tail.rows.format != format:
                raise TypeError(f"other has keys of dtype {format}; expected {self._tail.rows.format}, as here")
        self._sum.merge(*other._total())
        self.count = self.count + other.count
        return self

    def __copy__(self) -> Moments:
        """Return a state of its own."""
        return copy.deepcopy(self)

    def parts(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return the fields and arrays from which `from_parts` makes the state again."""
        fields, arrays = self._sum.parts()
        arrays |= {"count": self.count}
        if self._tail is not None:
            arrays |= {"tail": self._tail.rows.keys}
        format = None if self._tail is None else self._tail.rows.format
        return fields | {"d": self.d, "batch": list(self.batch), "format": format}, arrays

    @classmethod
    def from_parts(cls, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> Moments:
        """Return the state that `parts` took apart, or raise ValueError, TypeError or LookupError."""
        d, batch = whole(fields["d"], 1), tuple(whole(size) for size in fields["batch"])
        b = math.prod(batch)
        shaped(arrays["exponents"], np.int32, (b, d))  # before room is made for what the fields claim
        self = cls(d, batch)
        self._sum = MomentSum.from_parts(fields, arrays, b, self.d)
        self.count = shaped(arrays["count"], np.int64, self.batch)
        if fields["format"] not in (None, "float64", "float32", "float16", "bfloat16"):
            raise ValueError(f"keys are of format {fields['format']!r}")
        if fields["format"] is not None:
            self._tail = Tail(b, self.d, fields["format"])
            self._tail.hold(arrays["tail"])
        return self

    def to_bytes(self) -> bytes:
        """Return the state as bytes, from which `from_bytes` makes it again, on any machine.

        Returns
        -------
        bytes
            A header in JSON, the sums, the rows that wait, and a checksum.
        """
        return pack("Moments", _VERSION, *self.parts())

    @classmethod
    def from_bytes(cls, data: bytes) -> Moments:
        """Return the state that `to_bytes` made bytes of.

        Parameters
        ----------
        data : bytes
            What `to_bytes` returned.

        Returns
        -------
        Moments
            It goes on exactly as the other would have.

        Raises
        ------
        TypeError
            If the data are no bytes.
        ValueError
            If they are damaged, of another kind, or of a version that is not known.
        """
        fields, arrays = unpack(data, "Moments", _VERSION)
        with as_damage():
            return cls.from_parts(fields, arrays)
