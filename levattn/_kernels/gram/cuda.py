"""The kernels on a CUDA device: cuts work into launches of compiled code.

The names and contracts are those of `_cpu`. Keys are CuPy arrays in which a 16-bit float is a uint16 word; matrices
of d by d are made on the device and stay there, and are sent there where they come from numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from levattn._core.arrays import to_numpy
from levattn._kernels.cuda_source import launch, namespace
from levattn._kernels.factor.cuda import inverse_cholesky
from levattn._kernels.gram.cuda_blas import WIDE, partial_moments, square_rows
from levattn._kernels.gram.cuda_tensor import has_tensor_products, tensor_moments, tensor_squares
from levattn._kernels.rows.contract import BLOCK, Arithmetic, Float64, Pieces, Rows
from levattn._kernels.rows.cuda import key_arguments, key_type, on_device, sum_in_pairs
from levattn._kernels.sketch.cuda import add_products, dense_sketch, scatter, sketch_zeros, subsampled_hadamard

__all__ = [
    "add_products",
    "column_maxima",
    "column_sums",
    "dense_sketch",
    "inverse_cholesky",
    "longest_run",
    "moments",
    "nonfinite_rows",
    "projected_sqnorms",
    "scatter",
    "sketch_zeros",
    "sqnorms",
    "subsampled_hadamard",
    "where",
    "wide_zeros",
    "zeros",
]

_TILE = 64  # rows, and columns, of a tile in moments.cu and products.cu
_THREADS = 256
_REALS = {"float": np.float32, "double": np.float64}
_ROOM = 1 << 28  # bytes that are taken at a time beside the keys
_MOST = 65535  # blocks of threads along the second and the third axis of a grid


def longest_run(rows: Rows, _items: int) -> int:
    """Return the level of the longest run of blocks whose moments are summed in one piece."""
    return max(0, (_ROOM // (8 * rows.shape[2] ** 2)).bit_length() - 1)


def zeros(rows: Rows) -> Any:
    """Return an array for one score a key, (b, n)."""
    return namespace().zeros(rows.shape[:2], np.float64 if rows.format == "float64" else np.float32)


def wide_zeros(rows: Rows) -> Any:
    """Return an array for one float64 figure a key, (b, n)."""
    return namespace().zeros(rows.shape[:2])


def where(condition: Any, value: float, otherwise: Any) -> Any:
    """Return `value` where the condition holds, else `otherwise`."""
    return namespace().where(condition, otherwise.dtype.type(value), otherwise)


def moments(rows: Rows, pieces: Pieces, *, basis: Float64 | None = None, arithmetic: Arithmetic = "double") -> Any:
    """Return the second moment of each piece's rows, (t, d, d); the contract of `_cpu.moments`."""
    xp, d = namespace(), rows.shape[2]
    out = xp.zeros((len(pieces), d, d))
    if basis is not None:
        for t, (slot, item, start, stop) in enumerate(pieces.tolist()):
            out[t] = _turned_moments(rows, item, start, stop, basis[slot], arithmetic)
        return out
    real = "float" if arithmetic == "single" else "double"
    blocks = -(-(pieces[:, 3] - pieces[:, 2]) // BLOCK)
    firsts = np.concatenate([[0], np.cumsum(blocks)])
    fit = max(1, _ROOM // (8 * d * d))
    arguments = key_arguments(rows)
    at = 0
    while at < len(pieces):
        stop = max(at + 1, int(np.searchsorted(firsts, firsts[at] + fit, "right")) - 1)
        count = int(firsts[stop] - firsts[at])
        chosen, places = on_device(pieces[at:stop], np.int64), on_device(firsts[at : stop + 1] - firsts[at])
        partial = xp.empty((count, d, d))
        tail = [chosen, places, np.int32(stop - at), np.int32(BLOCK), partial]
        if arithmetic == "single" and has_tensor_products(rows):
            tensor_moments(rows, [*arguments, *tail], count)
        elif arithmetic == "double" and d >= WIDE:
            partial_moments(rows, pieces[at:stop], partial)
        else:
            tiles = -(-d // _TILE)
            shape = (count, tiles * (tiles + 1) // 2)
            launch("moments", "moment_blocks", (key_type(rows), real), shape, _THREADS, [*arguments, *tail])
        sums = out[at:stop]
        grid = (-(-(stop - at) * d * d // _THREADS),)
        launch("moments", "add_blocks", (), grid, _THREADS, [partial, places, np.int64(stop - at), np.int32(d), sums])
        at = stop
    return out


def _turned_moments(rows: Rows, item: int, start: int, stop: int, basis: Any, arithmetic: Arithmetic) -> Any:
    """Return the moment of some rows of one matrix in a basis, formed run by run of rows in that basis."""
    total = namespace().zeros((rows.shape[2],) * 2)
    for _, turned in _turned(rows, item, start, stop, basis, arithmetic):
        total += moments(turned, np.array([[0, 0, 0, turned.shape[1]]]))[0]
    return total


def _turned(
    rows: Rows, item: int, start: int, stop: int, basis: Any, arithmetic: Arithmetic
) -> Iterator[tuple[int, Rows]]:
    """Give runs of rows of one matrix times a basis, as (first row, rows)."""
    xp, d = namespace(), rows.shape[2]
    arguments, matrix = key_arguments(rows), on_device(basis, np.float64)
    step = max(BLOCK, _ROOM // (8 * d) // BLOCK * BLOCK)
    exact = "true" if arithmetic == "compensated" else "false"
    for low in range(start, stop, step):
        n = min(step, stop - low)
        X = xp.empty((1, n, d))
        numbers = [np.int64(n), np.int64(item), np.int64(low)]
        grid = (-(-n * d // _THREADS),)
        launch("products", "turn_rows", (key_type(rows), exact), grid, _THREADS, [*arguments, *numbers, matrix, X])
        yield low, Rows(X, "float64")


def sqnorms(
    rows: Rows,
    items: Pieces,
    W: Any,
    out: Any,
    *,
    basis: Any | None = None,
    arithmetic: Arithmetic = "double",
    ceiling: float = math.inf,
) -> None:
    """Write ``‖k W‖²`` of every key of the matrices `items`; the contract of `_cpu.sqnorms`."""
    if basis is None:
        _square_rows(rows, items, W, out, "float" if arithmetic == "single" else "double", ceiling, triangular=True)
        return
    for slot, item in enumerate(np.asarray(items).tolist()):
        for low, turned in _turned(rows, item, 0, rows.shape[1], basis[slot], arithmetic):
            part = out[item : item + 1, low : low + turned.shape[1]]
            _square_rows(turned, np.zeros(1, np.int64), W[slot : slot + 1], part, "double", ceiling, triangular=True)


def projected_sqnorms(rows: Rows, items: Pieces, P: Any, out: Any, arithmetic: Arithmetic, ceiling: float) -> None:
    """Write ``‖k P‖²`` of every key of the matrices `items`; the contract of `_cpu.projected_sqnorms`."""
    _square_rows(rows, items, P, out, "float" if arithmetic == "single" else "double", ceiling, triangular=False)


def _square_rows(rows: Rows, items: Pieces, W: Any, out: Any, real: str, ceiling: float, *, triangular: bool) -> None:
    if real == "float" and has_tensor_products(rows, W.shape[2]):
        tensor_squares(rows, items, W, out, ceiling, triangular=triangular)
        return
    if max(W.shape[1:]) >= WIDE:
        square_rows(rows, items, W, out, np.dtype(_REALS[real]), ceiling, triangular=triangular)
        return
    n = rows.shape[1]
    matrices, listed = on_device(W, np.float64), on_device(np.asarray(items, np.int64))
    types = key_type(rows), real, "double" if out.dtype == np.float64 else "float"
    arguments = key_arguments(rows)
    for before in range(0, len(items), _MOST):
        tail = [np.int64(n), listed, np.int64(before), matrices, np.int32(W.shape[2]), np.bool_(triangular)]
        tail += [np.float64(ceiling), out, np.int64(out.strides[0] // out.itemsize)]
        grid = (-(-n // _TILE), min(_MOST, len(items) - before))
        launch("products", "square_rows", types, grid, _THREADS, [*arguments, *tail])


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
