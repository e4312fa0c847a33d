"""Formulas for any array library: scaled, shifted and masked rows of K, and sums and maxima of their columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import array_api_compat
import numpy as np

from levattn._core.arrays import array_namespace, to_numpy
from levattn._core.types import Float64
from levattn._kernels.pairwise import pairwise_sum
from levattn._kernels.rows import BLOCK, Rows


def transformed_rows(rows: Rows, item: int, start: int, stop: int) -> Any:
    """Return rows ``start:stop`` of one matrix in float64, transformed, 0 where masked."""
    xp = array_namespace(rows.keys)
    x = xp.astype(rows.keys[item, start:stop, :], xp.float64)
    if rows.scale is not None:
        if rows.mask is not None:  # the scale is for the other rows, and would take these out of range
            x = xp.where(rows.mask[item, start:stop][:, None], x, xp.zeros_like(x))
        x = x * send(rows.scale[item], rows)[None, :]
    if rows.shift is not None:
        first, second, _ = (send(part, rows)[None, :] for part in rows.shift[item])
        x = x - first - second
    if rows.weights is not None:
        x = x * send(rows.weights[item, start:stop], rows)[:, None]
    if rows.mask is not None:
        x = xp.where(rows.mask[item, start:stop][:, None], x, xp.zeros_like(x))
    return x


def lost_rests(rows: Rows, item: int, start: int, stop: int) -> Any:
    """Return the rounding errors of the shift of `transformed_rows`, or None without a shift."""
    if rows.shift is None:
        return None
    xp = array_namespace(rows.keys)
    x = transformed_rows(replace(rows, shift=None, weights=None), item, start, stop)
    first, second, third = (send(part, rows)[None, :] for part in rows.shift[item])
    high, low = exact_sum(x, -first)
    _, lost = exact_sum(high, -second)
    x = lost + low - third
    if rows.weights is not None:
        x = x * send(rows.weights[item, start:stop], rows)[:, None]
    return x if rows.mask is None else xp.where(rows.mask[item, start:stop][:, None], x, xp.zeros_like(x))


def exact_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """Return the sum of two arrays, and its rounding error."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def summed_in_pairs(high: Any, low: Any) -> tuple[Any, Any]:
    """Return the sum over the first axis (of at least one entry) of pairs of numbers, as one pair."""
    xp = array_namespace(high)
    while (n := high.shape[0]) > 1:
        half, whole = n // 2, n // 2 * 2
        total, lost = exact_sum(high[:half, ...], high[half:whole, ...])
        lost = lost + low[:half, ...] + low[half:whole, ...]
        high, low = (xp.concat([x, rest[whole:, ...]]) for x, rest in ((total, high), (lost, low)))
    return high[0, ...], low[0, ...]


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


def sums_apart(rows: Rows, origin: Float64) -> tuple[Float64, Float64]:
    """Return twofold sums of the columns less an origin; see `RowKernels`."""
    xp = array_namespace(rows.keys)
    b, n, d = rows.shape
    out = np.zeros((2, b, d))
    for item in range(b):
        apart = replace(rows.item(item), mask=None)
        blocks = []
        for low in range(0, n, BLOCK):
            stop = min(low + BLOCK, n)
            pair = exact_sum(transformed_rows(apart, 0, low, stop), -send(origin[item], rows)[None, :])
            if rows.mask is not None:
                keep = rows.mask[item, low:stop][:, None]
                pair = tuple(xp.where(keep, x, xp.zeros_like(x)) for x in pair)
            blocks.append([to_numpy(x) for x in summed_in_pairs(*pair)])
        if blocks:
            out[:, item] = summed_in_pairs(*(np.stack(part) for part in zip(*blocks, strict=True)))
    return out[0], out[1]


def nonfinite_rows(rows: Rows, item: int, limit: int) -> list[int]:
    """Return the first rows of one matrix (at most `limit`) that hold NaN or infinity and are not masked."""
    xp = array_namespace(rows.keys)
    finite = xp.all(xp.isfinite(transformed_rows(rows, item, 0, rows.shape[1])), axis=1)
    return [int(r) for r in np.flatnonzero(~to_numpy(finite))[:limit]]
