"""Moments and squared norms of wide keys on a CUDA device: blocks of rows are written out, and cuBLAS multiplies them.

Products always have the same shape, a short block being filled up with zeros, so that cuBLAS has no reason to sum in
another order for other numbers of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from levattn._kernels.cuda_source import THREADS, TYPES, launch, namespace, on_device
from levattn._kernels.rows.contract import BLOCK, Pieces, Rows
from levattn._kernels.rows.cuda import key_arguments, key_type

__all__ = ["WIDE", "partial_moments", "write_squares"]

WIDE = 256  # columns from which a product by cuBLAS is worth writing out what it reads


def _blocks(rows: Rows, item: int, start: int, stop: int, dtype: Any) -> Iterator[tuple[int, int, Any]]:
    """Give blocks of rows of one matrix as they are read: (first row, number of rows, all of BLOCK rows)."""
    d = rows.shape[2]
    types = key_type(rows), TYPES[np.dtype(dtype).name]
    arguments = key_arguments(rows)
    for low in range(start, stop, BLOCK):
        n = min(BLOCK, stop - low)
        X = namespace().zeros((BLOCK, d), dtype)
        launch("scan", "read_rows", types, (-(-n * d // THREADS),), [*arguments, n, item, low, X])
        yield low, n, X


def partial_moments(rows: Rows, pieces: Pieces, partial: Any) -> None:
    """Write the second moments of the blocks of the pieces to `partial` (blocks, d, d), in float64."""
    at = 0
    for _, item, start, stop in pieces.tolist():
        for _, _, X in _blocks(rows, item, start, stop, np.float64):
            partial[at] = namespace().matmul(X.T, X)
            at += 1


def write_squares(
    rows: Rows, items: Pieces, W: Any, out: Any, dtype: Any, ceiling: float, *, triangular: bool
) -> None:
    """Write ``‖k W‖²`` of every key of the matrices `items` to ``out[item]``, from products of the given dtype."""
    xp = namespace()
    for slot, item in enumerate(np.asarray(items).tolist()):
        matrix = xp.triu(on_device(W[slot], dtype)) if triangular else on_device(W[slot], dtype)
        for low, n, X in _blocks(rows, item, 0, rows.shape[1], dtype):
            squares = xp.square(xp.matmul(X, matrix)).sum(axis=1)
            out[item, low : low + n] = xp.minimum(squares[:n], ceiling)
