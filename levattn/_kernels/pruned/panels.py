"""Products of pruned attention: tiles of rows by panels, compiled into its kernels.

A panel has SCORE_VECTORS vectors of each of n rows, one row behind the other. A view is (address, steps in bytes
between sequences, heads, rows and chunks, and the number b of sequences). Item i is chunk i // b of sequence i % b.
Names that end in _at are addresses.
"""

from __future__ import annotations

from levattn._kernels.jit import SCORE_ROWS, SCORE_VECTORS, VECTOR_BYTES, helper
from levattn._kernels.llvm import address, as_pointer, larger, smaller
from levattn._kernels.pruned.simd import matrix_tile, turned_tile

TILE_ROWS = 48  # of a block: whole tiles on all machines, and few enough that their logits stay in the second cache


@helper
def row_at_view(view, item, head, row):
    return view[0] + item % view[5] * view[1] + head * view[2] + row * view[3] + item // view[5] * view[4]


@helper
def row_pointer(X, row):
    """Return a pointer to a row of a C array, by its number in the whole array."""
    return as_pointer(address(X) + row * X.shape[X.ndim - 1] * X.itemsize, X)


@helper
def pack_columns(like, at, step, n, d, panel_at):
    """Write n rows, `step` bytes apart, as the columns of a panel, and zeros behind them."""
    size = like.itemsize
    lanes, width = VECTOR_BYTES // size, SCORE_VECTORS * (VECTOR_BYTES // size)
    for low in range(0, width, lanes):
        for first in range(0, d, lanes):
            if low + lanes <= n and first + lanes <= d:
                to = panel_at + (first * width + low) * size
                turned_tile(like, at + low * step + first * size, step, to, width * size)
                continue
            for k in range(first, smaller(first + lanes, d)):
                target = as_pointer(panel_at + k * width * size, like)
                for j in range(low, low + lanes):
                    target[j] = as_pointer(at + smaller(j, n - 1) * step, like)[k] if j < n else 0


@helper
def pack_row(source, factor, n, panels, row):
    """Write n numbers times a factor as a row of panels, and zeros behind them."""
    width = panels.shape[2]
    for p in range(len(panels)):
        target, low = panels[p, row], p * width
        here = smaller(width, n - low)
        for j in range(here):
            target[j] = source[low + j] * factor
        for j in range(larger(here, 0), width):
            target[j] = 0


@helper
def multiply_panels(like, adds, x_at, x_step, rows, panels_at, count, step, n, to_at, to_step):
    """Write the products of rows (whole tiles of them) with panels of n rows, or add them if `adds`."""
    for p in range(count):
        panel, to = panels_at + p * step, to_at + p * SCORE_VECTORS * VECTOR_BYTES
        for r in range(0, rows, SCORE_ROWS):
            x, out = x_at + r * x_step, to + r * to_step
            if adds:
                matrix_tile(like, SCORE_ROWS, SCORE_VECTORS, 1, x, x_step, panel, n, out, to_step)
            else:
                matrix_tile(like, SCORE_ROWS, SCORE_VECTORS, 0, x, x_step, panel, n, out, to_step)


@helper
def whole_tiles(rows):
    return (rows + SCORE_ROWS - 1) // SCORE_ROWS * SCORE_ROWS


@helper
def multiply_rows(adds, rows, count, panels, n, out):
    """Multiply the first `rows` rows of an array by all panels, into the rows of another array, or add to them."""
    size = rows.itemsize
    step = panels.shape[1] * panels.shape[2] * size
    multiply_panels(
        rows,
        adds,
        address(rows),
        rows.shape[1] * size,
        whole_tiles(count),
        address(panels),
        panels.shape[0],
        step,
        n,
        address(out),
        out.shape[1] * size,
    )
