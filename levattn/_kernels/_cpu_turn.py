"""The same figures of keys in another basis: moments of K B, and norms of K B C, for upper-triangular B and C."""

from __future__ import annotations

import numpy as np

from levattn._kernels._cpu_jit import SCORE_ROWS, SCORE_VECTORS, VECTOR_BYTES, jit
from levattn._kernels._cpu_moments import add_rows, carry, counter, fold, moment_panels
from levattn._kernels._cpu_product import SCRATCH_ROWS, SLAB, pack_panels, row_squares
from levattn._kernels._cpu_rows import load_rows
from levattn._kernels._cpu_simd import fused_multiply_add, lane_sum, product_tile

__all__ = ["turned_moment_tasks", "turned_sqnorm_tasks"]


@jit
def _turn_rows(rows, n, panels, turned):
    """Write the first `n` rows (rounded up to whole groups) times the panels to `turned`."""
    size = rows.itemsize
    lanes = VECTOR_BYTES // size
    count, d, width = panels.shape
    groups = (n + SCORE_ROWS - 1) // SCORE_ROWS * SCORE_ROWS
    for t in range(count):
        w = panels[t].ctypes.data
        whole = t * width + lanes
        rest = min(lanes, d - whole)
        for r in range(0, groups, SCORE_ROWS):
            at = rows.ctypes.data + r * d * size
            to = turned.ctypes.data + (r * turned.shape[1] + t * width) * size
            product_tile(rows, SCORE_ROWS, SCORE_VECTORS, at, d, w, width, whole, rest, to, turned.shape[1], 0, at, 0)


@jit
def _turn_compensated(rows, n, basis, low, turned):
    """Write the first `n` rows times the upper triangle of `basis` to `turned`, each entry rounded about once.

    Products are split without error and summed with their rounding errors (Dot2 of Ogita, Rump and Oishi 2005), so
    that cancellation between large terms costs nothing.
    """
    d = basis.shape[0]
    for r in range(n):
        high = turned[r]
        for j in range(d):
            high[j] = 0
            low[j] = 0
        for i in range(d):
            x = rows[r, i]
            w = basis[i]
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
def turned_moment_tasks(view, like, brain, mask, shift, scale, basis, exact, X, block, tasks, first, last, out):
    """Do what `moment_tasks` does, each row multiplied by its slot's basis first (compensated if `exact`)."""
    d = X.shape[1]
    width = SCORE_VECTORS * (VECTOR_BYTES // X.itemsize)
    rows = np.zeros((SCRATCH_ROWS, d), X.dtype)
    turned = np.zeros((SCRATCH_ROWS, (d + width - 1) // width * width), X.dtype)
    low = np.zeros(d)
    panels = np.zeros((1, 1, 1), X.dtype)
    packed = moment_panels(X)
    partial = np.empty((d, d), X.dtype)
    stack = counter(tasks, first, last, block, d)
    for t in range(first, last):
        slot, item, start, stop = tasks[t, 0], tasks[t, 1], tasks[t, 2], tasks[t, 3]
        if not exact:
            panels = pack_panels(basis[slot], X)
        count = 0
        for at in range(start, stop, block):
            partial[:] = 0
            for r in range(at, min(at + block, stop), SLAB):
                n = min(SLAB, min(at + block, stop) - r)
                load_rows(view, like, brain, item, r, r + n, mask, shift, scale, rows)
                if exact:
                    _turn_compensated(rows, n, basis[slot], low, turned)
                else:
                    _turn_rows(rows, n, panels, turned)
                x = turned.ctypes.data
                add_rows(X, x, turned.shape[1], n, packed, partial, x, x)
            carry(stack, count, partial)
            count += 1
        fold(stack, count, out[t])


@jit
def turned_sqnorm_tasks(view, like, brain, mask, shift, scale, basis, W, X, tasks, first, last, ceiling, out):
    """Do what `sqnorm_tasks` does, each row multiplied by its slot's basis first in compensated arithmetic."""
    lanes = VECTOR_BYTES // X.itemsize
    d = X.shape[1]
    rows = np.zeros((SCRATCH_ROWS, d), X.dtype)
    turned = np.zeros((SCRATCH_ROWS, d), X.dtype)
    squares = np.empty((SCRATCH_ROWS, lanes), X.dtype)
    low = np.zeros(d)
    for t in range(first, last):
        slot, item, start, stop = tasks[t, 0], tasks[t, 1], tasks[t, 2], tasks[t, 3]
        panels = pack_panels(W[slot], X)
        for r in range(start, stop, SLAB):
            n = min(SLAB, stop - r)
            load_rows(view, like, brain, item, r, r + n, mask, shift, scale, rows)
            _turn_compensated(rows, n, basis[slot], low, turned)
            x = turned.ctypes.data
            row_squares(X, x, d, SCRATCH_ROWS, panels, squares, x, x)
            for i in range(n):
                square = lane_sum(X, squares.ctypes.data + i * VECTOR_BYTES)
                out[item, r + i] = ceiling if square > ceiling else square
