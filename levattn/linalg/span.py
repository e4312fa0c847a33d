"""The exact row space of keys, which decides whether a direction that float64 cannot see exists.

Ranks and memberships are computed modulo a prime that each process draws from 2^55 primes. A test of a row multiplies
it by one random vector that is orthogonal to the space. A row outside counts as inside, or a rank as smaller, only if
the prime divides a certain nonzero minor of the keys. A minor of order k, with powers of two taken out, is an integer
below 2^(2100 k), and has fewer than 35 k such prime divisors. So the chance is below 2^-50 k a row, whatever the keys
are. The opposite errors cannot happen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import to_float64, to_numpy
from levattn._core.types import Flags, Float64
from levattn._kernels import PRECISE, Rows
from levattn.linalg.reading import as_read

_NUMBERS = 1 << 18  # numbers widened to float64 at a time


@dataclass(frozen=True, eq=False)
class Span:
    """A row space: some unit vectors, and keys that are independent of them and of one another.

    Rows less their mean have the differences of rows in their space. So their space stands for the space of the rows
    with one more column, of ones, whose dimension is larger by one.

    units: (d,) the columns whose unit vectors lie in it.

    rows: (k, d) keys as they are stored; the rank is k plus the number of units, less one if they are `centered`.

    basis: (k, d) residues in reduced row echelon form that span the space without the units, valid in this process
    only.
    """

    units: Flags
    rows: Float64
    basis: npt.NDArray[np.uint64]
    centered: bool = False

    @classmethod
    def nothing(cls, d: int) -> Span:
        """Return the space that holds only the zero row."""
        return cls(np.zeros(d, np.bool_), np.zeros((0, d)), np.zeros((0, d), np.uint64))

    @classmethod
    def checked(cls, units: Flags, rows: Float64) -> Span:
        """Return the space, or raise ValueError if the rows and the units are linearly dependent."""
        span = replace(cls.nothing(len(units)), units=units)._with(rows)
        if len(span.rows) != len(rows):
            raise ValueError("the rows that represent a row space are linearly dependent")
        return span

    @classmethod
    def of(cls, rows: Rows) -> Span:
        """Return the row space of one matrix."""
        centered = rows.shift is not None
        return replace(cls.nothing(rows.shape[2] + centered), centered=centered).extended(rows)

    @property
    def rank(self) -> int:
        """Its dimension."""
        found = len(self.basis) + int(np.count_nonzero(self.units))
        return max(found - 1, 0) if self.centered else found

    @cached_property
    def whole(self) -> bool:
        """Whether it holds every row."""
        return self.rank == len(self.units) - self.centered

    def outside(self, rows: Rows) -> Flags:
        """Tell which rows of a batch of one lie outside the space, (n,); a masked row does not."""
        out = np.zeros(rows.shape[1], np.bool_)
        if not self.whole:
            basis, pivots, rank = self._room(0)
            for part, X in _stored(rows):
                PRECISE.mark_outside(PRECISE.field(), X, basis, pivots, rank, self.units, out[part])
        return out

    def extended(self, rows: Rows) -> Span:
        """Return the sum of the space and the row space of a batch of one."""
        span = self
        for _, X in _stored(rows):
            if span.whole:
                break
            span = span._with(X)
        return span

    def __add__(self, other: Span) -> Span:
        """Return the sum of two spaces."""
        units = self.units | other.units
        mine = self
        if np.any(units != self.units):
            mine = replace(Span.nothing(len(units)), units=units)._with(self.rows)
        return mine._with(other.rows)

    def _with(self, X: Float64) -> Span:
        """Return the sum of the space and the span of the rows X."""
        basis, pivots, rank = self._room(len(X))
        chosen = np.zeros(len(basis), np.int64)
        found = int(PRECISE.insert_rows(PRECISE.field(), X, basis, pivots, rank, self.units, chosen))
        if found == rank:
            return self
        return replace(self, rows=np.concatenate([self.rows, X[chosen[rank:found]]]), basis=basis[:found].copy())

    def _room(self, more: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], int]:
        """Return the basis with room for `more` rows, its pivot columns, and its number of rows."""
        d, rank = len(self.units), len(self.basis)
        basis = np.zeros((min(d - int(np.count_nonzero(self.units)), rank + more), d), np.uint64)
        pivots = np.zeros(len(basis), np.int64)
        basis[:rank], pivots[:rank] = self.basis, np.argmax(self.basis != 0, axis=1)
        return basis, pivots, rank


def zero_products(Q: Float64, K: Float64, doubtful: tuple[npt.NDArray[np.intp], ...]) -> Flags:
    """Tell which doubtful products, given by indices of queries and of keys, are exactly zero, (m, n)."""
    nothing, (rows, columns) = np.zeros((len(Q), len(K)), np.bool_), doubtful
    PRECISE.mark_zeros(PRECISE.field(), np.ascontiguousarray(Q), np.ascontiguousarray(K), rows, columns, nothing)
    return nothing


def nonzero_rows(rows: Rows) -> Flags:
    """Tell which rows of a batch of one have an entry that is not zero, (n,); a masked row has none.

    Rows less their mean may read as zero because a scale lets their entries vanish, so all that take part count then.
    """
    out = np.zeros(rows.shape[1], np.bool_)
    for part, X in _stored(rows):
        if rows.shift is not None and rows.scale is None:
            X = as_read(rows.between(part.start, part.stop))
        out[part] = np.any(X != 0, axis=1)  # of scaled rows less their mean the column of ones
    return out


def _stored(rows: Rows) -> Iterator[tuple[slice, Float64]]:
    """Yield the stored rows of a batch of one in parts, with zeros for masked rows; with ones if they are centered."""
    n, d = rows.shape[1:]
    step = max(1, _NUMBERS // d)
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        some = rows.between(part.start, part.stop)
        X = to_float64(some.keys, rows.format)[0]
        if rows.shift is not None:
            X = np.hstack([X, np.ones((len(X), 1))])
        keep = np.ones(len(X), np.bool_) if some.mask is None else to_numpy(some.mask)[0]
        if some.weights is not None:
            keep = keep & (some.weights[0] != 0)
        yield part, np.ascontiguousarray(np.where(keep[:, None], X, 0.0))
