"""Rows times an upper-triangular matrix: stored, squared and summed, or in twice the precision."""

from __future__ import annotations

import numpy as np

from levattn._kernels._cpu_jit import SCORE_ROWS, SCORE_VECTORS, VECTOR_BYTES, jit
from levattn._kernels._cpu_rows import ROW_STEP, is_direct, load_rows, row_address
from levattn._kernels._cpu_simd import (
    ACCUMULATE,
    OVERWRITE,
    STORE,
    fused_multiply_add,
    lane_sum,
    product_tile,
)

__all__ = ["SCRATCH_ROWS", "SLAB", "compensated_rows", "pack_panels", "product_rows", "sqnorm_tasks"]

SLAB = 128  # rows that stay in the nearest caches while every tile passes over them
SCRATCH_ROWS = (SLAB + SCORE_ROWS - 1) // SCORE_ROWS * SCORE_ROWS  # a slab in whole groups of rows
SCORE_SLAB = SLAB // SCORE_ROWS * SCORE_ROWS


@jit
def pack_panels(W, X):
    """Return the columns of W (padded with zeros) as panels of a tile's width, in the precision of X."""
    width = SCORE_VECTORS * (VECTOR_BYTES // X.itemsize)
    d, columns = W.shape[0], X.shape[1]
    panels = np.zeros(((columns + width - 1) // width, columns, width), X.dtype)
    for i in range(d):
        for j in range(i, d):
            panels[j // width, i, j % width] = W[i, j]
    return panels


@jit
def product_rows(X, x, stride, n, panels, out, store, ahead, last):
    """Multiply `n` rows at `x` (whole groups of SCORE_ROWS) by the panels' triangle.

    The products are stored in `out`, or their squares are summed into one vector a row. Meanwhile the tiles
    fetch the lines from `ahead` up to `last`.
    """
    size = X.itemsize
    lanes = VECTOR_BYTES // size
    count, d, width = panels.shape
    row_bytes = out.shape[1] * size
    for t in range(count):
        start = t * width
        w = panels[t].ctypes.data
        narrow = d - start == lanes
        depth = min(start + width, d)
        for r in range(0, n, SCORE_ROWS):
            at = x + r * stride * size
            to = out.ctypes.data + r * row_bytes
            if store:
                to += start * size
                if narrow:
                    product_tile(X, SCORE_ROWS, 1, at, stride, w, width, start, to, out.shape[1], STORE, ahead, 64)
                else:
                    product_tile(X, SCORE_ROWS, 2, at, stride, w, width, start, to, out.shape[1], STORE, ahead, 64)
            elif t == 0:
                if narrow:
                    product_tile(X, SCORE_ROWS, 1, at, stride, w, width, start, to, lanes, OVERWRITE, ahead, 64)
                else:
                    product_tile(X, SCORE_ROWS, 2, at, stride, w, width, start, to, lanes, OVERWRITE, ahead, 64)
            elif narrow:
                product_tile(X, SCORE_ROWS, 1, at, stride, w, width, start, to, lanes, ACCUMULATE, ahead, 64)
            else:
                product_tile(X, SCORE_ROWS, 2, at, stride, w, width, start, to, lanes, ACCUMULATE, ahead, 64)
            ahead = min(ahead + 64 * depth, last)


@jit
def compensated_rows(X, n, W, Y):
    """Write the first `n` rows of X times the upper triangle of W to Y, each entry rounded about once.

    Products are split without error and summed with their rounding errors (Dot2 of Ogita, Rump and Oishi
    2005), so that cancellation between large terms costs nothing.
    """
    d = W.shape[0]
    low = np.empty(d)
    for r in range(n):
        high = Y[r]
        high[:] = 0
        low[:] = 0
        for i in range(d):
            x = X[r, i]
            w = W[i]
            for j in range(i, d):
                product = x * w[j]
                error = fused_multiply_add(x, w[j], -product)
                total = high[j] + product
                part = total - high[j]
                low[j] += ((high[j] - (total - part)) + (product - part)) + error
                high[j] = total
        for j in range(d):
            high[j] += low[j]


@jit
def sqnorm_tasks(view, like, brain, mask, shift, scale, basis, W, X, tasks, first, last, out):
    """Write ``‖k basis W‖²`` of the keys that ``tasks[first:last]`` name (slot, item, from row, to row).

    `basis` is empty, or applied in compensated arithmetic. X gives the precision and the padded width.
    """
    size = X.itemsize
    lanes = VECTOR_BYTES // size
    rows = np.zeros((SCRATCH_ROWS, X.shape[1]), X.dtype)
    turned = np.zeros((SCRATCH_ROWS if basis.size else 1, X.shape[1]), X.dtype)
    squares = np.zeros((SCRATCH_ROWS, lanes), X.dtype)
    direct = basis.size == 0 and is_direct(view, like, mask, shift, scale, X, lanes)
    slot = -1
    panels = np.zeros((1, 1, 1), X.dtype)
    for t in range(first, last):
        if tasks[t, 0] != slot:
            slot = tasks[t, 0]
            panels = pack_panels(W[slot], X)
        item = tasks[t, 1]
        r = tasks[t, 2]
        stop = tasks[t, 3]
        step = view[ROW_STEP]
        end = row_address(view, item, stop) - 64
        while r < stop:
            n = min(SCORE_SLAB, stop - r)
            if direct and n >= SCORE_ROWS:
                n = n // SCORE_ROWS * SCORE_ROWS
                x = row_address(view, item, r)
                ahead = max(x, min(x + SCORE_SLAB * step, end))
                product_rows(X, x, step // size, n, panels, squares, False, ahead, end)
            else:
                load_rows(view, like, brain, item, r, r + n, mask, shift, scale, rows)
                source = rows
                if basis.size:
                    compensated_rows(rows, n, basis[slot], turned)
                    source = turned
                x = source.ctypes.data
                groups = (n + SCORE_ROWS - 1) // SCORE_ROWS * SCORE_ROWS
                product_rows(X, x, X.shape[1], groups, panels, squares, False, x, x)
            for i in range(n):
                out[item, r + i] = lane_sum(X, squares.ctypes.data + i * VECTOR_BYTES)
            r += n
