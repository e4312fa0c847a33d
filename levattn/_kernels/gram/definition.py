"""The kernels as definitions in the array-API standard: any namespace and device, and the Numba code's oracle.

Arrays of the size of the keys stay on their device; matrices of d by d come back as numpy arrays.
"""

from __future__ import annotations

import math
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._core.arrays import array_namespace, to_numpy
from levattn._core.random import below, signs, words
from levattn._kernels.rows.contract import BLOCK, Arithmetic, Float64, Pieces, Rows

__all__ = [
    "add_products",
    "column_maxima",
    "column_sums",
    "longest_run",
    "moments",
    "nonfinite_rows",
    "projected_sqnorms",
    "scatter",
    "sketch_zeros",
    "sqnorms",
    "where",
    "wide_zeros",
    "zeros",
]

_SKETCHED = 256  # rows for which a dense piece of a sparse sketch is formed


def _load(rows: Rows, item: int, start: int, stop: int) -> Any:
    """Return rows ``start:stop`` of one matrix in float64, transformed, 0 where masked."""
    xp = array_namespace(rows.keys)
    x = xp.astype(rows.keys[item, start:stop, :], xp.float64)
    for vector, operation in ((rows.shift, xp.subtract), (rows.scale, xp.multiply)):
        if vector is not None:
            x = operation(x, _send(vector[item], rows)[None, :])
    if rows.weights is not None:
        x = x * _send(rows.weights[item, start:stop], rows)[:, None]
    if rows.mask is not None:
        x = xp.where(rows.mask[item, start:stop][:, None], x, xp.zeros_like(x))
    return x


def _send(matrix: Float64, rows: Rows) -> Any:
    xp = array_namespace(rows.keys)
    return xp.asarray(matrix, dtype=xp.float64, device=array_api_compat.device(rows.keys))


def _split(x: Any) -> tuple[Any, Any]:
    """Split float64 numbers into halves whose products are exact (Veltkamp)."""
    c = x * 134217729.0  # 2**27 + 1
    high = c - (c - x)
    return high, x - high


def _compensated(x: Any, W: Any) -> Any:
    """Return x W, each entry rounded about once: error-free products, summed with their errors."""
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
        total = new
    return total + low


def _turned(x: Any, basis: Any, arithmetic: Arithmetic) -> Any:
    return _compensated(x, basis) if arithmetic == "compensated" else x @ basis


def zeros(rows: Rows) -> Any:
    """Return an array for one score a key, (b, n)."""
    xp = array_namespace(rows.keys)
    kind = xp.float64 if rows.format == "float64" else xp.float32
    return xp.zeros(rows.shape[:2], dtype=kind, device=array_api_compat.device(rows.keys))


def wide_zeros(rows: Rows) -> Any:
    """Return an array for one float64 figure a key, (b, n)."""
    xp = array_namespace(rows.keys)
    return xp.zeros(rows.shape[:2], dtype=xp.float64, device=array_api_compat.device(rows.keys))


def where(condition: Any, value: float, otherwise: Any) -> Any:
    """Return `value` where the condition holds, else `otherwise`."""
    xp = array_namespace(otherwise)
    return xp.where(condition, xp.full_like(otherwise, value), otherwise)


def longest_run(_rows: Rows, _items: int) -> int:
    """Return the level of the longest run of blocks; the contract of `_cpu.longest_run`."""
    return 63


def moments(rows: Rows, pieces: Pieces, *, basis: Float64 | None = None, arithmetic: Arithmetic = "double") -> Float64:
    """Return the second moment of each piece's rows; the contract of `_cpu.moments`."""
    out = np.zeros((len(pieces), rows.shape[2], rows.shape[2]))
    turn = None if basis is None else _send(basis, rows)
    for t, (slot, item, start, stop) in enumerate(pieces.tolist()):
        sums: list[Float64] = []
        for low in range(start, stop, BLOCK):
            x = _load(rows, item, low, min(low + BLOCK, stop))
            if turn is not None:
                x = _turned(x, turn[slot, :, :], arithmetic)
            sums.append(to_numpy(x.T @ x))
        out[t] = _pairwise(sums)
    return out


def _pairwise(terms: list[Float64]) -> Float64 | float:
    if len(terms) < 2:
        return terms[0] if terms else 0.0
    half = 1 << (len(terms) - 1).bit_length() - 1
    return _pairwise(terms[:half]) + _pairwise(terms[half:])


def projected_sqnorms(rows: Rows, items: Pieces, P: Float64, out: Any, arithmetic: Arithmetic, ceiling: float) -> None:
    """Write ``‖k P‖²`` of every key; the contract of `_cpu.projected_sqnorms`."""
    xp = array_namespace(rows.keys)
    kind = xp.float32 if arithmetic == "single" else xp.float64
    for slot, item in enumerate(items.tolist()):
        right = xp.astype(_send(P[slot], rows), kind)
        for start in range(0, rows.shape[1], BLOCK):
            stop = min(start + BLOCK, rows.shape[1])
            y = xp.astype(_load(rows, item, start, stop), kind) @ right
            squares = xp.clip(xp.sum(y * y, axis=1), max=ceiling)
            out[item, start:stop] = xp.astype(squares, out.dtype)


def sketch_zeros(rows: Rows, size: int, dtype: npt.DTypeLike) -> Any:
    """Return an array for a sketch of each matrix, (b, size, d), which is numpy's."""
    return np.zeros((rows.shape[0], size, rows.shape[2]), dtype)


def scatter(rows: Rows, seed: int, stream: int, offset: int, blocks: int, size: int, out: Any) -> None:
    """Add sparse sketches of the matrices to `out`; the contract of `_cpu.scatter`."""
    for low in range(0, rows.shape[1], _SKETCHED):
        part = rows.between(low, min(low + _SKETCHED, rows.shape[1]))
        drawn = words(seed, stream, offset + low, part.shape[1], blocks)
        columns = np.zeros((blocks * size, part.shape[1]))
        columns[below(drawn, size) + size * np.arange(blocks), np.arange(part.shape[1])[:, None]] = signs(drawn)
        add_products(part, columns, out)


def add_products(rows: Rows, S: Float64, out: Any) -> None:
    """Add S times the rows of each matrix to `out`, (b, size, d); the contract of `_cpu.add_products`."""
    S_here = _send(S, rows)
    for item in range(rows.shape[0]):
        out[item] += to_numpy(S_here @ _load(rows, item, 0, rows.shape[1]))


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
    """Write ``‖k W‖²`` of every key of the matrices `items`; the contract of `_cpu.sqnorms`."""
    xp = array_namespace(rows.keys)
    n = rows.shape[1]
    for slot, item in enumerate(np.asarray(items).tolist()):
        whitening = _send(W[slot], rows)
        turn = None if basis is None else _send(basis[slot], rows)
        for start in range(0, n, BLOCK):
            stop = min(start + BLOCK, n)
            x = _load(rows, item, start, stop)
            if turn is not None:
                x = _turned(x, turn, arithmetic)
            y = x @ whitening
            out[item, start:stop] = xp.astype(xp.clip(xp.sum(y * y, axis=1), max=ceiling), out.dtype)


def column_sums(rows: Rows) -> Float64:
    """Return the sums of the columns, (b, d)."""
    return _columns(rows, "sum")


def column_maxima(rows: Rows) -> Float64:
    """Return the largest magnitude in each column, (b, d)."""
    return _columns(rows, "max")


def _columns(rows: Rows, what: str) -> Float64:
    xp = array_namespace(rows.keys)
    b, n, d = rows.shape
    out = np.zeros((b, d))
    for item in range(b):
        blocks = [_load(rows, item, low, min(low + BLOCK, n)) for low in range(0, n, BLOCK)]
        if what == "max":
            out[item] = np.max([to_numpy(xp.max(xp.abs(x), axis=0)) for x in blocks], axis=0, initial=0.0)
        else:
            out[item] = _pairwise([to_numpy(xp.sum(x, axis=0)) for x in blocks])
    return out


def nonfinite_rows(rows: Rows, item: int, limit: int) -> list[int]:
    """Return the first rows of one matrix (at most `limit`) that hold NaN or infinity and are not masked."""
    xp = array_namespace(rows.keys)
    finite = xp.all(xp.isfinite(_load(rows, item, 0, rows.shape[1])), axis=1)
    return [int(r) for r in np.flatnonzero(~to_numpy(finite))[:limit]]
