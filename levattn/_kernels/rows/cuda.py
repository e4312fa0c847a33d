"""Keys on a CUDA device: arguments of kernels, in the order of `KEY_PARAMETERS` in keys.cuh; sums of columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._core.arrays import to_numpy
from levattn._core.types import Float64
from levattn._kernels.cuda_source import THREADS, TYPES, launch, namespace, on_device, with_steps
from levattn._kernels.rows import BLOCK, Rows
from levattn._kernels.rows.definition import summed_in_pairs

MOST_SLABS = 65535  # blocks of threads along the second and the third axis of a grid


def key_type(rows: Rows) -> str:
    """Return the C++ type of the stored numbers."""
    return TYPES[rows.format]


def key_arguments(rows: Rows) -> list[Any]:
    """Return the keys, and the changes on reading them, as arguments of a kernel."""
    shift, scale, weights = (on_device(array, np.float64) for array in (rows.shift, rows.scale, rows.weights))
    mask = with_steps(on_device(rows.mask, np.bool_), 1)
    keys, item, *within = with_steps(rows.keys, 3)
    # torch gives a batch of one any step, and kernels would then take aligned rows for unaligned ones
    keys = [keys, item if rows.shape[0] > 1 else 0, *within]
    return [*keys, *mask, shift, scale, *with_steps(weights, 1), rows.shape[2]]


def sum_in_pairs(terms: Any) -> Any:
    """Return the sum over axis 1 in pairs, pairs of pairs, and so on; the last term may be without a partner."""
    while terms.shape[1] > 1:
        whole = terms.shape[1] // 2 * 2
        terms = namespace().concatenate([terms[:, 0:whole:2] + terms[:, 1:whole:2], terms[:, whole:]], axis=1)
    return terms.sum(axis=1)


def column_figures(rows: Rows, *, largest: bool) -> Float64:
    """Return the sums or largest magnitudes of the columns; see `RowKernels`."""
    xp = namespace()
    b, n, d = rows.shape
    blocks = -(-n // BLOCK)
    partial = xp.zeros((b, blocks, d))
    types, arguments = (key_type(rows), "true" if largest else "false"), key_arguments(rows)
    together = min(THREADS, max(32, 1 << (d - 1).bit_length()))  # columns of a block of threads
    for before in range(0, b, MOST_SLABS):
        grid = (blocks, -(-d // together), min(MOST_SLABS, b - before))
        launch("scan", "scan_columns", types, grid, [*arguments, n, before, BLOCK, together, partial])
    if largest and blocks:
        return to_numpy(partial.max(axis=1))
    return to_numpy(sum_in_pairs(partial))


def sums_apart(rows: Rows, origin: Float64) -> tuple[Float64, Float64]:
    """Return twofold sums of the columns less an origin; see `RowKernels`."""
    b, n, d = rows.shape
    high, low = namespace().zeros((2, b, max(1, -(-n // BLOCK)), d))
    arguments, apart = key_arguments(rows), on_device(origin, np.float64)
    together = min(THREADS, max(32, 1 << (d - 1).bit_length()))  # columns of a block of threads
    for before in range(0, b, MOST_SLABS):
        grid = (high.shape[1], -(-d // together), min(MOST_SLABS, b - before))
        tail = [n, before, BLOCK, together, apart, high, low]
        launch("scan", "sum_apart", (key_type(rows),), grid, [*arguments, *tail])
    high, low = summed_in_pairs(high.transpose(1, 0, 2), low.transpose(1, 0, 2))
    return to_numpy(high), to_numpy(low)


def nonfinite_rows(rows: Rows, item: int, limit: int) -> list[int]:
    """Return the first rows of one matrix (at most `limit`) that hold NaN or infinity and are not masked."""
    xp, n = namespace(), rows.shape[1]
    flags = xp.zeros(n, np.bool_)
    grid = (-(-n // (THREADS // 32)),)
    launch("scan", "find_nonfinite", (key_type(rows),), grid, [*key_arguments(rows), n, item, flags])
    return [int(row) for row in to_numpy(xp.flatnonzero(flags)[:limit])]
