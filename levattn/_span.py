"""The exact row space of keys, which decides whether a direction that float64 cannot see is there at all.

Ranks and memberships are those modulo the prime 2^61 − 1, and a row is tested against one vector that is orthogonal to
the space. A row outside is taken for one inside, or a rank for a smaller one, only where this prime divides a minor of
the keys that is not zero: a chance of about 2^-61 for keys that were not made for it. The other way there is no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from levattn._array import to_float64, to_numpy
from levattn._kernels import Float64, Rows, span_kernels

__all__ = ["Span", "nonzero_rows"]

_NUMBERS = 1 << 18  # that are widened to float64 at a time
_PRIME = 2**61 - 1

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Span:
    """A row space: some unit vectors, and the rest as a basis in reduced row echelon form modulo the prime.

    units: (d,) the columns whose unit vectors lie in it.
    basis: (k, d) uint64, zero in these columns; k is the rank less the units.
    """

    units: Flags
    basis: npt.NDArray[np.uint64]

    @classmethod
    def nothing(cls, d: int) -> Span:
        """Return the space of the zero row alone."""
        return cls(np.zeros(d, np.bool_), np.zeros((0, d), np.uint64))

    @classmethod
    def checked(cls, units: Flags, basis: npt.NDArray[np.uint64]) -> Span:
        """Return the space, or raise ValueError for what is no basis in reduced row echelon form."""
        leading = np.argmax(basis != 0, axis=1) if basis.size else np.zeros(0, np.int64)
        ones = np.array_equal(basis[:, leading], np.eye(len(basis))) and (np.diff(leading) > 0).all()
        if not ones or (basis >= _PRIME).any() or basis[:, units].any():
            raise ValueError("a row space has no basis in reduced row echelon form")
        return cls(units, basis)

    @classmethod
    def of(cls, rows: Rows) -> Span:
        """Return the row space of one matrix."""
        return cls.nothing(rows.shape[2]).extended(rows)

    @property
    def rank(self) -> int:
        """Its dimension."""
        return len(self.basis) + int(np.count_nonzero(self.units))

    @cached_property
    def whole(self) -> bool:
        """Whether it holds every row."""
        return self.rank == len(self.units)

    def outside(self, rows: Rows) -> Flags:
        """Tell which rows of a batch of one do not lie in it, (n,); a masked row does."""
        out = np.zeros(rows.shape[1], np.bool_)
        if not self.whole:
            basis, pivots, rank = self._room(0)
            for part, X in _stored(rows):
                span_kernels().mark_outside(X, basis, pivots, rank, self.units, out[part])
        return out

    def extended(self, rows: Rows) -> Span:
        """Return the space that holds the rows of a batch of one as well."""
        basis, pivots, rank = self._room(rows.shape[1])
        for _, X in _stored(rows):
            if rank == len(basis):
                break
            rank = int(span_kernels().insert_rows(X, basis, pivots, rank, self.units))
        return Span(self.units, basis[:rank].copy())

    def __add__(self, other: Span) -> Span:
        """Return the sum of two spaces."""
        basis, pivots, rank = Span(self.units | other.units, self.basis[:0])._room(len(self.basis) + len(other.basis))
        for part in (self, other):
            rank = int(span_kernels().insert_residues(part.basis, basis, pivots, rank, self.units | other.units))
        return Span(self.units | other.units, basis[:rank].copy())

    def _room(self, more: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], int]:
        """Return the basis with room for so many more rows, the columns of their leading ones, and their number."""
        d, rank = len(self.units), len(self.basis)
        basis = np.zeros((min(d - int(np.count_nonzero(self.units)), rank + more), d), np.uint64)
        pivots = np.zeros(len(basis), np.int64)
        basis[:rank], pivots[:rank] = self.basis, np.argmax(self.basis != 0, axis=1)
        return basis, pivots, rank


def nonzero_rows(rows: Rows) -> Flags:
    """Tell which rows of a batch of one have an entry that is not zero, (n,); a masked row has none."""
    out = np.zeros(rows.shape[1], np.bool_)
    for part, X in _stored(rows):
        out[part] = np.any(X != 0, axis=1)
    return out


def _stored(rows: Rows) -> Iterator[tuple[slice, Float64]]:
    """Give the rows of a batch of one as they are stored, zero where masked, in parts."""
    n, d = rows.shape[1:]
    step = max(1, _NUMBERS // d)
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        some = rows.between(part.start, part.stop)
        X = to_float64(some.keys, rows.format)[0]
        keep = np.ones(len(X), np.bool_) if some.mask is None else to_numpy(some.mask)[0]
        if some.weights is not None:
            keep = keep & (some.weights[0] != 0)
        yield part, np.ascontiguousarray(np.where(keep[:, None], X, 0.0))
