"""Second moments of tall matrices, summed over fixed blocks of rows that are combined pairwise."""

from __future__ import annotations

import numpy as np
from numba import carray

from levattn._kernels._cpu_jit import PANEL, SCORE_ROWS, TILE_ROWS, VECTOR_BYTES, jit
from levattn._kernels._cpu_product import SCRATCH_ROWS, SLAB, compensated_rows, pack_panels, product_rows
from levattn._kernels._cpu_rows import ROW_STEP, is_direct, load_rows, row_address
from levattn._kernels._cpu_simd import as_pointer, moment_tile

__all__ = ["moment_tasks"]

ROWS1, ROWS2, ROWS3, ROWS4 = TILE_ROWS


@jit
def _pack_slab(X, x, stride, n, packed):
    """Copy `n` rows at `x` into panels of PANEL vectors, whose rows then lie side by side in the cache."""
    panels, _, width = packed.shape
    d = X.shape[1]
    for p in range(panels):
        count = min(width, d - p * width)
        for r in range(n):
            source = carray(as_pointer(x + (r * stride + p * width) * X.itemsize, X), (count,))
            target = packed[p, r]
            for c in range(count):
                target[c] = source[c]


@jit
def _add_slab(X, x, stride, panel_step, n, out, ahead, last):
    """Add the second moment of `n` rows at `x` to `out`, tiles of the upper triangle only.

    Rows are `stride` elements apart and panels of columns `panel_step` bytes. Meanwhile the tiles fetch the cache
    lines from `ahead` up to `last`. X gives the precision and the padded width.
    """
    size, d = X.itemsize, X.shape[1]
    lanes = VECTOR_BYTES // size
    width = PANEL * lanes
    for left in range(0, d, width):
        right = min(left + width, d)
        for j in range(left, right, lanes):
            wide = (right - j) // lanes
            at = x + left // width * panel_step + (j - left) * size
            i = 0 if j == left else j
            while i < j + lanes:
                a = x + i // width * panel_step + i % width * size
                to = out.ctypes.data + (i * d + j) * 8
                if wide == 4:
                    moment_tile(X, ROWS4, 4, a, stride, at, stride, n, to, d, ahead, 64)
                    i += ROWS4
                elif wide == 3:
                    moment_tile(X, ROWS3, 3, a, stride, at, stride, n, to, d, ahead, 64)
                    i += ROWS3
                elif wide == 2:
                    moment_tile(X, ROWS2, 2, a, stride, at, stride, n, to, d, ahead, 64)
                    i += ROWS2
                else:
                    moment_tile(X, ROWS1, 1, a, stride, at, stride, n, to, d, ahead, 64)
                    i += ROWS1
                ahead = min(ahead + 64 * n, last)


@jit
def _add_rows(X, x, stride, n, packed, out, ahead):
    """Add the second moment of `n` rows at `x` to `out`, by way of `packed` where it takes several panels."""
    last = ahead + n * stride * X.itemsize - 64 * n
    if packed.shape[0] > 1:
        _pack_slab(X, x, stride, n, packed)
        step = packed.shape[1] * packed.shape[2] * X.itemsize
        _add_slab(X, packed.ctypes.data, packed.shape[2], step, n, out, ahead, last)
    else:
        _add_slab(X, x, stride, 0, n, out, ahead, last)


@jit
def moment_tasks(view, like, brain, mask, shift, scale, basis, exact, X, block, tasks, first, last, out):
    """Write the second moments of the keys that ``tasks[first:last]`` name (slot, item, from row, to row).

    A task's rows start at a multiple of `block`. The sum of each block is formed in the precision of X slab by
    slab and added up in float64; blocks are combined like the bits of a binary counter. `basis` is empty or the
    upper-triangular matrix that each row is multiplied by first (in compensated arithmetic if `exact`).
    """
    size, d = X.itemsize, X.shape[1]
    lanes = VECTOR_BYTES // size
    rows = np.zeros((SCRATCH_ROWS, d), X.dtype)
    turned = np.zeros((SCRATCH_ROWS if basis.size else 1, d), X.dtype)
    direct = basis.size == 0 and is_direct(view, like, mask, shift, scale, X, lanes)
    panels = np.zeros((1, 1, 1), X.dtype)
    packed = np.empty(((d + PANEL * lanes - 1) // (PANEL * lanes), SLAB, PANEL * lanes), X.dtype)
    slot = -1
    levels = 1
    for t in range(first, last):
        while block << levels < tasks[t, 3] - tasks[t, 2]:
            levels += 1
    stack = np.zeros((levels + 1, d, d))
    for t in range(first, last):
        if tasks[t, 0] != slot and basis.size and not exact:
            panels = pack_panels(basis[tasks[t, 0]], X)
        slot = tasks[t, 0]
        item, start, stop = tasks[t, 1], tasks[t, 2], tasks[t, 3]
        step = view[ROW_STEP]
        end = row_address(view, item, stop)
        total = out[t]
        count = 0
        for low in range(start, stop, block):
            total[:] = 0
            for r in range(low, min(low + block, stop), SLAB):
                n = min(SLAB, min(low + block, stop) - r)
                if direct:
                    x = row_address(view, item, r)
                    ahead = max(x, min(x + n * step, end - n * step))
                    _add_rows(X, x, step // size, n, packed, total, ahead)
                    continue
                load_rows(view, like, brain, item, r, r + n, mask, shift, scale, rows)
                source = rows
                if basis.size:
                    source = turned
                    if exact:
                        compensated_rows(rows, n, basis[slot], turned)
                    else:
                        x = rows.ctypes.data
                        groups = (n + SCORE_ROWS - 1) // SCORE_ROWS * SCORE_ROWS
                        product_rows(X, x, d, groups, panels, turned, True, x, x)
                x = source.ctypes.data
                _add_rows(X, x, d, n, packed, total, x)
            level = 0
            while count >> level & 1:
                total += stack[level]
                level += 1
            stack[level] = total
            count += 1
        total[:] = 0
        for level in range(levels + 1):
            if count >> level & 1:
                total += stack[level]
