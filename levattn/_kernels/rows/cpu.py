"""Keys on the CPU: rows as kernels read them, and sums and maxima of columns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from levattn._core.types import Float64, Int64
from levattn._kernels.jit import VECTOR_BYTES
from levattn._kernels.records import address_of
from levattn._kernels.rows import BLOCK, Arithmetic, Rows
from levattn._kernels.rows.compiled import DIGEST, view_of
from levattn._kernels.rows.definition import summed_in_pairs
from levattn._kernels.rows.scan import APART_WIDTH, apart_tasks, column_tasks, copy_items, nonfinite_scan, read_rows
from levattn._kernels.tasks import share

_LIKE = {np.dtype(kind): np.zeros(1, kind) for kind in (np.float32, np.float64)}


@lru_cache(maxsize=64)
def scratch_like(d: int, arithmetic: Arithmetic) -> Any:
    """Return an array that tells the compiled code the precision and the padded width."""
    kind = np.dtype(np.float32 if arithmetic == "single" else np.float64)
    lanes = VECTOR_BYTES // kind.itemsize
    return np.empty((1, -(-d // lanes) * lanes), kind)


def stored_rows(rows: Rows, item: int, start: int, stop: int, kind: Any) -> Any:
    """Return some rows of one matrix as kernels read them, as a C array; without a copy if they are stored so."""
    stored = rows.keys[item, start:stop]
    plain = all(x is None for x in (rows.mask, rows.shift, rows.scale, rows.weights))
    if plain and stored.dtype == kind and stored.flags.c_contiguous:  # in another layout BLAS sums in another order
        return stored
    X = np.zeros((stop - start, rows.shape[2]), kind)
    read_rows(view_of(rows.between(start, stop)), item, stop - start, X)
    return X


@contextmanager
def digested(rows: Rows, view: Any, whole: bool) -> Iterator[None]:
    """Let the kernel that is called inside digest the rows of a view, if they wait for it and it reads the `whole`."""
    part = rows.digest.part(rows) if whole and rows.digest is not None else None
    if part is None:
        yield
        return
    view[DIGEST] = part.address
    yield
    part.add()


def column_figures(rows: Rows, *, largest: bool) -> Float64:
    """Return the sums or largest magnitudes of the columns; see `RowKernels`."""
    b, n, d = rows.shape
    out = np.zeros((b, d))
    view = view_of(rows)

    def body(first: int, last: int) -> None:
        column_tasks(view, n, BLOCK, largest, first, last, out)

    share(body, b, float(b) * n * d * 8)
    return out


def sums_apart(rows: Rows, origin: Float64) -> tuple[Float64, Float64]:
    """Return twofold sums of the columns less an origin; see `RowKernels`."""
    b, n, d = rows.shape
    blocks, width = max(1, -(-n // BLOCK)), -(-d // APART_WIDTH) * APART_WIDTH
    high, low = np.zeros((2, b, blocks, width))
    view, apart = view_of(rows), np.zeros((b, width))
    apart[:, :d] = origin

    def body(first: int, last: int) -> None:
        apart_tasks(view, apart, n, BLOCK, first, last, high, low)

    share(body, b * blocks, float(b) * n * d * 8)
    high, low = summed_in_pairs(high.transpose(1, 0, 2), low.transpose(1, 0, 2))
    return high[:, :d], low[:, :d]


def nonfinite_rows(rows: Rows, item: int, limit: int) -> list[int]:
    """Return the first rows of one matrix (at most `limit`) that hold NaN or infinity and are not masked."""
    found = np.empty(limit, np.int64)
    count = nonfinite_scan(view_of(rows), rows.shape[1], item, found)
    return [int(r) for r in found[:count]]


def copied_finite(source: Any, target: Any, numbers: Int64, first: int) -> bool:
    """Copy rows (b, m, d), of the same float32 or float64 and without gaps in a matrix, and number them from `first`.

    Return True if all numbers are finite; after False some may be, or nothing was copied.
    """
    like = _LIKE.get(target.dtype)
    (step, row, column), (target_step, target_row, target_column) = source.strides, target.strides
    b, m, d = target.shape
    size = target.itemsize
    if like is None or source.dtype != target.dtype or not source.flags.aligned:
        return False
    if not (row == target_row == d * size and column == target_column == size):
        return False
    return bool(copy_items(like, address_of(source), step, address_of(target), target_step, b, m * d, numbers, first))
