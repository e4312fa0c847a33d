"""Second moments and squared norms as definitions in the array-API standard: any namespace and device.

Arrays of the size of the keys stay on their device; matrices of d by d come back as numpy arrays.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from levattn._core.arrays import array_namespace, to_numpy
from levattn._core.types import Float64
from levattn._kernels.pairwise import pairwise_sum
from levattn._kernels.rows import BLOCK, Arithmetic, Pieces, Rows
from levattn._kernels.rows.definition import lost_rests, send, transformed_rows

SINGLE_UNIT = 2.0**-24  # float32, in which entries are multiplied


def _split(x: Any) -> tuple[Any, Any]:
    """Split float64 numbers into halves whose products are exact (Veltkamp)."""
    c = x * 134217729.0  # 2**27 + 1
    high = c - (c - x)
    return high, x - high


def _compensated(x: Any, rests: Any | None, W: Any) -> Any:
    """Return x W, each entry rounded about once: error-free products, summed with their errors.

    `rests`, small numbers, are added to x.
    """
    xp = array_namespace(x)
    total = xp.zeros_like(x)
    low = xp.zeros_like(x)
    x_high, x_low = _split(x)
    w_high, w_low = _split(W)
    for i in range(W.shape[0]):
        a, b = x[:, i, None], W[i, None, :]
        product = a * b
        ah, al, bh, bl = x_high[:, i, None], x_low[:, i, None], w_high[i, None, :], w_low[i, None, :]
        error = al * bl - (((product - ah * bh) - al * bh) - ah * bl)
        new = total + product
        part = new - total
        low = low + ((total - (new - part)) + (product - part)) + error
        if rests is not None:
            low = low + rests[:, i, None] * b
        total = new
    return total + low


def _in_basis(rows: Rows, item: int, start: int, stop: int, basis: Any | None, arithmetic: Arithmetic) -> Any:
    """Return some rows of one matrix, times a basis if there is one."""
    x = transformed_rows(rows, item, start, stop)
    if basis is None:
        return x
    return _compensated(x, lost_rests(rows, item, start, stop), basis) if arithmetic == "compensated" else x @ basis


def longest_run(_rows: Rows, _items: int) -> int:
    """Return the level of the longest run of blocks."""
    return 63


def moments(rows: Rows, pieces: Pieces, *, basis: Float64 | None = None, arithmetic: Arithmetic = "double") -> Float64:
    """Return the second moment of each piece's rows."""
    out = np.zeros((len(pieces), rows.shape[2], rows.shape[2]))
    bases = None if basis is None else send(basis, rows)
    for t, (slot, item, start, stop) in enumerate(pieces.tolist()):
        sums: list[Float64] = []
        for low in range(start, stop, BLOCK):
            B = None if bases is None else bases[slot, :, :]
            x = _in_basis(rows, item, low, min(low + BLOCK, stop), B, arithmetic)
            sums.append(to_numpy(x.T @ x))
        out[t] = pairwise_sum(sums)
    return out


def projected_sqnorms(rows: Rows, items: Pieces, P: Float64, out: Any, arithmetic: Arithmetic, ceiling: float) -> None:
    """Write ``‖k P‖²`` of every key."""
    xp = array_namespace(rows.keys)
    kind = xp.float32 if arithmetic == "single" else xp.float64
    for slot, item in enumerate(items.tolist()):
        right = xp.astype(send(P[slot], rows), kind)
        for start in range(0, rows.shape[1], BLOCK):
            stop = min(start + BLOCK, rows.shape[1])
            y = xp.astype(transformed_rows(rows, item, start, stop), kind) @ right
            squares = xp.clip(xp.sum(y * y, axis=1), max=ceiling)
            out[item, start:stop] = xp.astype(squares, out.dtype)


def sqnorms(
    rows: Rows,
    items: Any,
    W: Float64,
    out: Any,
    *,
    basis: Float64 | None = None,
    arithmetic: Arithmetic = "double",
    ceiling: float = math.inf,
) -> None:
    """Write ``‖k W‖²`` of every key of the matrices `items`."""
    xp = array_namespace(rows.keys)
    n = rows.shape[1]
    for slot, item in enumerate(np.asarray(items).tolist()):
        whitening = send(W[slot], rows)
        B = None if basis is None else send(basis[slot], rows)
        for start in range(0, n, BLOCK):
            stop = min(start + BLOCK, n)
            y = _in_basis(rows, item, start, stop, B, arithmetic) @ whitening
            out[item, start:stop] = xp.astype(xp.clip(xp.sum(y * y, axis=1), max=ceiling), out.dtype)
