"""Sparse keys on the CPU: CSR arrays for compiled code, dense blocks of rows, sums and maxima of columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from levattn._core.sparse import Csr
from levattn._core.types import Float64
from levattn._kernels.pairwise import pairwise_sum
from levattn._kernels.rows import BLOCK, Rows, cpu
from levattn._kernels.rows.definition import summed_in_pairs


def entries_of(rows: Rows) -> tuple[Any, ...]:
    """Return the arrays that compiled code reads: row bounds, columns, scaled and weighted values, mask."""
    keys: Csr = rows.keys
    mask = np.zeros(0, np.bool_) if rows.mask is None else np.require(rows.mask[0], np.bool_, ["C", "W"])
    if rows.scale is None and rows.weights is None:
        return keys.indptr, keys.indices, keys.values, mask
    columns, values = keys.entries()
    values = values.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # a masked entry may be anything
        if rows.scale is not None:
            values *= rows.scale[0][columns]
        if rows.weights is not None:
            values *= np.repeat(rows.weights[0], keys.counts)
    return keys.indptr - keys.indptr[0], np.ascontiguousarray(columns), values, mask


def written_out(rows: Rows, start: int, stop: int) -> Rows:
    """Return some rows as a dense array."""
    part = rows.between(start, stop)
    return Rows(part.keys.to_dense(), part.format, part.mask, part.shift, part.scale, part.weights)


def blocks_of(rows: Rows, size: int = BLOCK) -> Iterator[tuple[int, Rows]]:
    """Yield blocks of dense rows, each with the number of its first row."""
    n = rows.shape[1]
    for low in range(0, n, size):
        yield low, written_out(rows, low, min(low + size, n))


def column_figures(rows: Rows, *, largest: bool) -> Float64:
    """Return the sums or largest magnitudes of the columns; see `RowKernels`."""
    out = np.zeros((1, rows.shape[2]))
    if not largest or rows.shift is not None:
        found = (cpu.column_figures(dense, largest=largest) for _, dense in blocks_of(rows))
        return np.max([out, *found], axis=0) if largest else np.asarray(pairwise_sum(found, out))
    indptr, indices, values, mask = entries_of(rows)
    held = slice(int(indptr[0]), int(indptr[-1]))
    sizes = np.abs(values[held])
    if mask.size:
        sizes = np.where(np.repeat(mask, np.diff(indptr)), sizes, 0)
    with np.errstate(invalid="ignore"):  # NaN stays
        np.maximum.at(out[0], indices[held], sizes)
    return out


def sums_apart(rows: Rows, origin: Float64) -> tuple[Float64, Float64]:
    """Return twofold sums of the columns less an origin; see `RowKernels`."""
    blocks = [cpu.sums_apart(dense, origin) for _, dense in blocks_of(rows)]
    if not blocks:
        return np.zeros((1, rows.shape[2])), np.zeros((1, rows.shape[2]))
    high, low = (np.stack(part) for part in zip(*blocks, strict=True))
    return summed_in_pairs(high, low)


def nonfinite_rows(rows: Rows, item: int, limit: int) -> list[int]:
    """Return the first rows of one matrix (at most `limit`) that hold NaN or infinity and are not masked."""
    keys: Csr = rows.keys
    bad = np.flatnonzero(~np.isfinite(keys.entries()[1])) + keys.indptr[0]
    found = np.unique(np.searchsorted(keys.indptr, bad, side="right") - 1)
    if rows.mask is not None:
        found = found[rows.mask[item][found]]
    return [int(r) for r in found[:limit]]
