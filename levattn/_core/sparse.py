"""Sparse keys: rows of (column, value), checked so that kernels may follow them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.types import format_of

_CHUNK = 1 << 20  # entries whose order is checked together


@dataclass(frozen=True, eq=False)
class Csr:
    """One sparse matrix in the form that the kernels read: rows of (column, value), columns ascending, none twice.

    It replaces a (1, n, d) array, and is sliced like one.

    indptr: (n + 1,) int64, ascending. Row r has the entries ``indptr[r]:indptr[r + 1]``. It need not begin at 0.

    indices: int32 or int64 columns, checked to be in ``range(d)``.

    values: float32 or float64, of native byte order.

    d: number of columns.
    """

    indptr: npt.NDArray[np.int64]
    indices: npt.NDArray[Any]
    values: npt.NDArray[Any]
    d: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(1, n, d)."""
        return 1, len(self.indptr) - 1, self.d

    def __getitem__(self, key: tuple[slice, slice, slice]) -> Csr:
        """Return some consecutive rows of the one matrix; the entries are not copied."""
        start, stop, step = key[1].indices(len(self.indptr) - 1)
        if key[0].indices(1) != (0, 1, 1) or step != 1 or key[2] != slice(None):
            raise IndexError(f"[{key}] of sparse keys; expected consecutive rows of matrix 0")
        return Csr(self.indptr[start : max(start, stop) + 1], self.indices, self.values, self.d)

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """(n,) number of entries of each row."""
        return np.diff(self.indptr)

    def entries(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return columns and values of all entries of these rows, without a copy."""
        held = slice(int(self.indptr[0]), int(self.indptr[-1]))
        return self.indices[held], self.values[held]

    def take(self, rows: npt.NDArray[np.int64]) -> Csr:
        """Return some rows."""
        counts = self.counts[rows]
        indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        places = np.arange(indptr[-1]) + np.repeat(self.indptr[rows] - indptr[:-1], counts)
        return Csr(indptr, self.indices[places], self.values[places], self.d)

    def nonzero_rows(self) -> npt.NDArray[np.bool_]:
        """Tell which rows have an entry that is not zero, (n,)."""
        out = np.zeros(len(self.counts), np.bool_)
        out[np.repeat(np.arange(len(out)), self.counts)[self.entries()[1] != 0]] = True
        return out

    def transposed(self) -> Csr:
        """Return the columns as rows, without entries that are zero."""
        columns, values = self.entries()
        rows, held = np.repeat(np.arange(len(self.counts)), self.counts), np.flatnonzero(values)
        order = held[np.argsort(columns[held], kind="stable")]
        indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(columns[held], minlength=self.d))])
        return Csr(indptr, rows[order], values[order], len(self.counts))

    def columns(self, places: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return some columns, in ascending order, as a dense array (1, n, k); a negative one, at the end, is zero."""
        out = np.zeros((1, len(self.counts), len(places)), self.values.dtype)
        columns, values = self.entries()
        rows, known = np.repeat(np.arange(len(self.counts)), self.counts), places[places >= 0]
        at = np.searchsorted(known, columns)
        held = np.flatnonzero(at < len(known))
        held = held[known[at[held]] == columns[held]]
        out[0, rows[held], at[held]] = values[held]
        return out

    def without_zero_columns(
        self, mask: npt.NDArray[np.bool_] | None, least: int
    ) -> tuple[Csr, npt.NDArray[np.int64]]:
        """Return the keys without columns that are zero in the rows of a mask (1, n), and the places of the others.

        At least so many columns stay.
        """
        columns, values = self.entries()
        counts = values != 0 if mask is None else (values != 0) & np.repeat(mask[0], self.counts)
        used = np.zeros(self.d, np.bool_)
        used[columns[counts]] = True
        used[np.flatnonzero(~used)[: max(0, least - int(np.count_nonzero(used)))]] = True
        number, held = np.cumsum(used) - 1, used[columns]
        indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(held)])[self.indptr - self.indptr[0]]
        places = np.flatnonzero(used)
        return Csr(indptr, number[columns[held]], values[held], len(places)), places

    def to_dense(self) -> npt.NDArray[Any]:
        """Return a dense (1, n, d) array, for a block of rows."""
        columns, values = self.entries()
        out = np.zeros(self.shape, self.values.dtype)
        out[0, np.repeat(np.arange(len(self.indptr) - 1), self.counts), columns] = values
        return out


def is_scipy_sparse(array: Any) -> bool:
    sparse = sys.modules.get("scipy.sparse")  # a sparse matrix can only come from a module that is loaded
    return sparse is not None and bool(sparse.issparse(array))


def from_csr(K: Any, name: str) -> Csr:
    """Return a scipy CSR matrix or array as `Csr`, or raise; sorted entries are not copied."""
    if K.format != "csr":
        raise TypeError(
            f"{name} is a scipy sparse matrix in {K.format} format; expected csr, which is read row by row. "
            f"Convert it first: {name}.tocsr()"
        )
    if K.ndim != 2:
        raise ValueError(
            f"{name} is a sparse array of shape {tuple(K.shape)}; expected one matrix (n, d). "
            f"Give one row as {name}.reshape(1, -1).tocsr()"
        )
    kind = format_of(np.dtype(K.dtype), name, f"{name}.astype('float64')")
    if kind not in ("float64", "float32"):
        raise TypeError(
            f"{name} is a sparse matrix of dtype {K.dtype}; expected float64 or float32 for sparse keys. Convert it "
            f"first: {name}.astype('float32')"
        )
    n, d = (int(size) for size in K.shape)
    if d == 0:
        raise ValueError(f"{name} has shape {(n, d)}; expected at least one column (d >= 1)")
    indptr, indices, values = (np.asarray(part) for part in (K.indptr, K.indices, K.data))
    problem = _csr_problem(indptr, indices, values, n, d)
    if problem:
        raise ValueError(
            f"{name} is a corrupted sparse matrix: {problem}. Build it anew, e.g. from (data, (row, column)) "
            f"with scipy.sparse.coo_array, and see {name}.check_format()"
        )
    indptr = indptr.astype(np.int64)
    indices, values = indices[: indptr[-1]], values[: indptr[-1]]  # the arrays may be longer
    if not _in_order(indptr, indices):
        again = type(K)((values.astype(kind), indices.copy(), indptr.copy()), shape=(n, d))
        again.has_sorted_indices = again.has_canonical_format = False  # check anew, do not trust the flags
        again.sum_duplicates()
        indptr, indices, values = again.indptr.astype(np.int64), again.indices, again.data
    if indices.dtype != np.int32:
        indices = indices.astype(np.int64, copy=False)
    values = np.ascontiguousarray(values, kind)
    return Csr(indptr, np.require(indices, requirements=["C", "A"]), np.require(values, requirements=["C", "A"]), d)


def _csr_problem(
    indptr: npt.NDArray[Any], indices: npt.NDArray[Any], values: npt.NDArray[Any], n: int, d: int
) -> str | None:
    """Return the fault of the arrays of a CSR matrix by which kernels would read and write out of bounds, or None."""
    for label, array in (("indptr", indptr), ("indices", indices), ("data", values)):
        if array.ndim != 1 or (label != "data" and array.dtype.kind not in "iu"):
            return f"{label} is an array of {array.dtype} of shape {array.shape}"
    if len(indptr) != n + 1:
        return f"indptr has {len(indptr)} entries, which should be {n + 1}"
    if indptr[0] != 0 or (indptr[1:] < indptr[:-1]).any():
        return "indptr does not ascend from 0"
    if indptr[-1] > min(len(indices), len(values)):
        return f"indptr ends at {indptr[-1]}, with {len(indices)} indices and {len(values)} data"
    used = indices[: indptr[-1]]
    if len(used) and not (used.min() >= 0 and used.max() < d):
        return f"indices run from {used.min()} to {used.max()}, which should be in [0, {d})"
    return None


def _in_order(indptr: npt.NDArray[np.int64], indices: npt.NDArray[Any]) -> bool:
    """Tell whether the columns of each row ascend, none of them twice."""
    begins = np.zeros(len(indices) + 1, np.bool_)
    begins[indptr] = True
    before, after, begins = indices[:-1], indices[1:], begins[1:-1]
    parts = (slice(low, low + _CHUNK) for low in range(0, len(after), _CHUNK))
    return all(bool(np.all((after[part] > before[part]) | begins[part])) for part in parts)
