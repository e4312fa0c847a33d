"""Keys on a CUDA device: as arguments of kernels, in the order of `KEY_PARAMETERS` in keys.cuh, and their columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._core.arrays import to_numpy
from levattn._kernels.cuda_source import NOTHING, TYPES, launch, namespace
from levattn._kernels.rows.contract import BLOCK, Float64, Rows

__all__ = [
    "column_maxima",
    "column_sums",
    "key_arguments",
    "key_type",
    "nonfinite_rows",
    "on_device",
    "sum_in_pairs",
]

_THREADS = 256
_MOST = 65535  # blocks of threads along the third axis of a grid


def key_type(rows: Rows) -> str:
    """Return the C++ type of the stored numbers."""
    return TYPES[rows.format]


def on_device(array: Any, dtype: Any = None) -> Any:
    """Return an array of the device, copied there if it is numpy's, with rows next to each other."""
    return namespace().asarray(array, dtype, order="C")


def key_arguments(rows: Rows) -> list[Any]:
    """Return the keys and what is done to them as arguments of a kernel."""
    steps = [np.int64(step // rows.keys.itemsize) for step in rows.keys.strides]
    mask, mask_step = _beside(rows.mask, np.bool_)
    weights, weight_step = _beside(rows.weights, np.float64)
    shift, scale = (
        NOTHING if columns is None else on_device(columns, np.float64) for columns in (rows.shift, rows.scale)
    )
    return [rows.keys, *steps, mask, mask_step, shift, scale, weights, weight_step, np.int32(rows.shape[2])]


def sum_in_pairs(terms: Any) -> Any:
    """Return the sum over axis 1 in pairs, pairs of pairs, and so on, of which the last may be a single one."""
    while terms.shape[1] > 1:
        whole = terms.shape[1] // 2 * 2
        terms = namespace().concatenate([terms[:, 0:whole:2] + terms[:, 1:whole:2], terms[:, whole:]], axis=1)
    return terms.sum(axis=1)


def _beside(array: Any, dtype: Any) -> tuple[Any, np.int64]:
    """Return what is beside the rows (b, n), or nothing, and how far its matrices are apart."""
    if array is None:
        return NOTHING, np.int64(0)
    array = on_device(array, dtype)
    return array, np.int64(array.shape[1])


def column_sums(rows: Rows) -> Float64:
    """Return the sums of the columns, (b, d)."""
    return _columns(rows, largest=False)


def column_maxima(rows: Rows) -> Float64:
    """Return the largest magnitude in each column, (b, d)."""
    return _columns(rows, largest=True)


def _columns(rows: Rows, *, largest: bool) -> Float64:
    xp = namespace()
    b, n, d = rows.shape
    blocks = -(-n // BLOCK)
    partial = xp.zeros((b, blocks, d))
    types, arguments = (key_type(rows), "true" if largest else "false"), key_arguments(rows)
    for before in range(0, b, _MOST):
        grid = (blocks, -(-d // _THREADS), min(_MOST, b - before))
        tail = [np.int64(n), np.int64(before), np.int32(BLOCK), partial]
        launch("scan", "scan_columns", types, grid, _THREADS, [*arguments, *tail])
    if largest and blocks:
        return to_numpy(partial.max(axis=1))
    return to_numpy(sum_in_pairs(partial))


def nonfinite_rows(rows: Rows, item: int, limit: int) -> list[int]:
    """Return the first rows of one matrix (at most `limit`) that hold NaN or infinity and are not masked."""
    xp, n = namespace(), rows.shape[1]
    flags = xp.zeros(n, np.bool_)
    tail = [np.int64(n), np.int64(item), flags]
    grid = (-(-n // (_THREADS // 32)),)
    launch("scan", "find_nonfinite", (key_type(rows),), grid, _THREADS, [*key_arguments(rows), *tail])
    return [int(row) for row in to_numpy(xp.flatnonzero(flags)[:limit])]
