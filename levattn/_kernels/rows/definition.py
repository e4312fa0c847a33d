"""Definitions in the array-API standard, in any namespace: rows as kernels read them, and figures of columns."""

from __future__ import annotations

from typing import Any

import array_api_compat
import numpy as np

from levattn._core.arrays import array_namespace, to_numpy
from levattn._core.types import Float64
from levattn._kernels.pairwise import pairwise_sum
from levattn._kernels.rows.contract import BLOCK, Rows

__all__ = ["column_figures", "nonfinite_rows", "send", "transformed_rows"]


def transformed_rows(rows: Rows, item: int, start: int, stop: int) -> Any:
    """Return rows ``start:stop`` of one matrix in float64, transformed, 0 where masked."""
    xp = array_namespace(rows.keys)
    x = xp.astype(rows.keys[item, start:stop, :], xp.float64)
    for vector, operation in ((rows.shift, xp.subtract), (rows.scale, xp.multiply)):
        if vector is not None:
            x = operation(x, send(vector[item], rows)[None, :])
    if rows.weights is not None:
        x = x * send(rows.weights[item, start:stop], rows)[:, None]
    if rows.mask is not None:
        x = xp.where(rows.mask[item, start:stop][:, None], x, xp.zeros_like(x))
    return x


def send(matrix: Float64, rows: Rows) -> Any:
    """Return a float64 matrix on the keys' device."""
    xp = array_namespace(rows.keys)
    return xp.asarray(matrix, dtype=xp.float64, device=array_api_compat.device(rows.keys))


def column_figures(rows: Rows, *, largest: bool) -> Float64:
    """Return the sums or largest magnitudes of the columns; see `RowKernels`."""
    xp = array_namespace(rows.keys)
    b, n, d = rows.shape
    out = np.zeros((b, d))
    for item in range(b):
        blocks = [transformed_rows(rows, item, low, min(low + BLOCK, n)) for low in range(0, n, BLOCK)]
        if largest:
            out[item] = np.max([to_numpy(xp.max(xp.abs(x), axis=0)) for x in blocks], axis=0, initial=0.0)
        else:
            out[item] = pairwise_sum(to_numpy(xp.sum(x, axis=0)) for x in blocks)
    return out


def nonfinite_rows(rows: Rows, item: int, limit: int) -> list[int]:
    """Return the first rows of one matrix (at most `limit`) that hold NaN or infinity and are not masked."""
    xp = array_namespace(rows.keys)
    finite = xp.all(xp.isfinite(transformed_rows(rows, item, 0, rows.shape[1])), axis=1)
    return [int(r) for r in np.flatnonzero(~to_numpy(finite))[:limit]]
