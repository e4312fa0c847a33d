"""Kernels beyond float64: products in 100 bits or more, and exact row spaces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from levattn._core.types import Float64

_Field = npt.NDArray[np.uint64]


class PreciseKernels(Protocol):
    """Products as if in twice the precision, and row spaces modulo the prime of a field."""

    def precise_products(self, Q: Float64, keys: Float64, /) -> Float64:
        """Return ``⟨q, k⟩`` of all rows q and k, each as if computed in twice the precision and rounded once."""

    def precise_solutions(self, B: Float64, Q: Float64, /) -> Float64:
        """Return ``B⁻¹ q`` for every row q, for an upper-triangular B, as if in twice the precision."""

    def mean_parts(self, origin: Float64, sums: tuple[Float64, Float64], counts: Float64, /) -> tuple[Float64, bool]:
        """Return the shift (b, 3, d) of `Rows`: an origin (b, d), plus twofold sums divided by the counts (b,).

        Also tell whether the numbers are in a range in which this is exact to about 2⁻¹⁰⁵ of the quotient.
        """

    def expanded_product(
        self, pairs: Iterable[tuple[Float64, Float64]], d: int, /, *, symmetric: bool, folds: int = 2
    ) -> Float64:
        """Return ``Σ AᵀX`` over pairs of (n, d) matrices as the sum of 2 or 3 (`folds`) matrices, (folds, d, d).

        Each is the rounding error of those before. Two hold the sum to 2⁻⁹⁴ of ``Σ |A|ᵀ|X|``, and three to 2⁻¹⁴⁴.
        `symmetric` says that the sum is symmetric, which halves the work.
        """

    def field(self) -> _Field:
        """Return the field of this process."""

    def insert_rows(
        self, field: _Field, rows: Float64, basis: Any, pivots: Any, rank: int, units: Any, chosen: Any, /
    ) -> int:
        """Extend a basis of residues (reduced row echelon, with room for more rows), and return its rank.

        The indices of the new rows go to `chosen`.
        """

    def insert_entries(
        self,
        field: _Field,
        indptr: Any,
        indices: Any,
        values: Any,
        mask: Any,
        basis: Any,
        pivots: Any,
        rank: int,
        units: Any,
        chosen: Any,
        /,
    ) -> int:
        """Do `insert_rows` for sparse rows; a mask of size 0 masks nothing."""

    def orthogonal_vector(self, field: _Field, basis: Any, pivots: Any, rank: int, units: Any, out: _Field, /) -> None:
        """Write residues of a random vector that is orthogonal to the basis and the unit vectors to `out`."""

    def relation_vector(self, field: _Field, top: Float64, bottom: Float64, unit: Float64, out: _Field, /) -> None:
        """Write residues of a random combination of the columns of ``top / (bottom unit)``, (d, k), to `out`."""

    def mark_products(self, field: _Field, rows: Float64, v: _Field, out: Any, /) -> None:
        """Set `out` for the rows that are not orthogonal to v."""

    def mark_entry_products(
        self, field: _Field, indptr: Any, indices: Any, values: Any, mask: Any, v: _Field, out: Any, /
    ) -> None:
        """Do `mark_products` for sparse rows; a masked row is not marked."""

    def mark_zeros(self, field: _Field, Q: Float64, K: Float64, rows: Any, columns: Any, out: Any, /) -> None:
        """Set `out` at pairs of orthogonal rows."""
