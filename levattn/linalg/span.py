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
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import to_float64, to_numpy
from levattn._core.cached import cached_property
from levattn._core.sparse import Csr
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
    def of_columns(cls, some: Flags) -> Span:
        """Return the space of all rows that are zero but for some columns."""
        return replace(cls.nothing(len(some)), units=some)

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
        if self.whole:
            return np.zeros(rows.shape[1], np.bool_)
        basis, pivots, rank = self._room(0)
        v = np.zeros(len(self.units), np.uint64)
        PRECISE.orthogonal_vector(PRECISE.field(), basis, pivots, rank, self.units, v)
        return _with_products(rows, v)

    def extended(self, rows: Rows) -> Span:
        """Return the sum of the space and the row space of a batch of one."""
        if isinstance(rows.keys, Csr) and rows.shift is None:
            basis, pivots, rank = self._room(rows.shape[1])
            chosen = np.zeros(len(basis), np.int64)
            entries = _stored_entries(rows)
            found = int(PRECISE.insert_entries(PRECISE.field(), *entries, basis, pivots, rank, self.units, chosen))
            return self._found(basis, rank, found, rows.keys.take(chosen[rank:found]).to_dense()[0])
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
        return self._found(basis, rank, found, X[chosen[rank:found]])

    def _found(self, basis: npt.NDArray[np.uint64], rank: int, found: int, rows: Float64) -> Span:
        """Return the space with these rows too, of which `basis` has a part in its first `found` rows."""
        if found == rank:
            return self
        return replace(self, rows=np.concatenate([self.rows, rows]), basis=basis[:found].copy())

    def _room(self, more: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], int]:
        """Return the basis with room for `more` rows, its pivot columns, and its number of rows."""
        d, rank = len(self.units), len(self.basis)
        basis = np.zeros((min(d - int(np.count_nonzero(self.units)), rank + more), d), np.uint64)
        pivots = np.zeros(len(basis), np.int64)
        basis[:rank], pivots[:rank] = self.basis, np.argmax(self.basis != 0, axis=1)
        return basis, pivots, rank


@dataclass(frozen=True, eq=False)
class Relations:
    """A row space by linear relations of the columns, ``K z = 0``, which take far less work than a basis.

    top, bottom, unit: (d, k) the entries of each z as stored keys have them, ``top / (bottom unit)``; all are exact.
    """

    top: Float64
    bottom: Float64
    unit: Float64

    @property
    def rank(self) -> int:
        """Its dimension, as relations are independent."""
        return len(self.top) - int(self.top.shape[1])

    def outside(self, rows: Rows) -> Flags:
        """Tell which rows of a batch of one lie outside the space, (n,); a masked row does not."""
        v = np.zeros(len(self.top), np.uint64)
        PRECISE.relation_vector(PRECISE.field(), self.top, self.bottom, self.unit, v)
        return _with_products(rows, v)


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


def _with_products(rows: Rows, v: npt.NDArray[np.uint64]) -> Flags:
    """Tell which rows of a batch of one have a product with v that is not zero, (n,); a masked row has none."""
    out = np.zeros(rows.shape[1], np.bool_)
    if isinstance(rows.keys, Csr) and rows.shift is None:
        PRECISE.mark_entry_products(PRECISE.field(), *_stored_entries(rows), v, out)
        return out
    for part, X in _stored(rows):
        PRECISE.mark_products(PRECISE.field(), X, v, out[part])
    return out


def _stored_entries(rows: Rows) -> tuple[Any, Any, Any, Flags]:
    """Return sparse rows as they are stored: bounds, columns, values, and the mask, of size 0 if none is left out."""
    keep = np.zeros(0, np.bool_) if rows.mask is None else np.require(rows.mask[0], np.bool_, ["C", "W"])
    if rows.weights is not None:
        keep = (rows.weights[0] != 0) & (keep if keep.size else True)
    return rows.keys.indptr, rows.keys.indices, rows.keys.values, keep


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
