"""Squared norms of rows times an upper-triangular matrix, without writing the products."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._kernels.gram.simd import lane_sum, product_tile
from levattn._kernels.jit import SCORE_ROWS, SCORE_VECTORS, VECTOR_BYTES, helper, jit
from levattn._kernels.llvm import address, as_pointer, larger, smaller
from levattn._kernels.records import address_of
from levattn._kernels.rows.compiled import ADDRESS, IN_PLACE, ROW_STEP, entry_address, load_rows
from levattn._kernels.rows.digest import begin, done, on, tally
from levattn._kernels.scratch import clear, empty, zeros

SLAB = 64  # rows that stay in the nearest cache while every tile passes over them
SCRATCH_ROWS = (SLAB + SCORE_ROWS - 1) // SCORE_ROWS * SCORE_ROWS  # a slab in whole groups of rows
SCORE_SLAB = SLAB // SCORE_ROWS * SCORE_ROWS


@helper
def panels_of(X):
    """Return zeros for the panels of one matrix (1, count, columns, width), in the precision of X."""
    width = SCORE_VECTORS * (VECTOR_BYTES // X.itemsize)
    columns = X.shape[1]
    return zeros(X, (1, (columns + width - 1) // width, columns, width))


@helper
def write_panels(W, panels):
    """Write the columns of W (padded with zeros) to panels (count, columns, width)."""
    width, d = panels.shape[2], W.shape[0]
    for p in range(panels.shape[0]):
        low = p * width
        high = smaller(low + width, d)
        for i in range(high):
            for j in range(larger(low, i), high):
                panels[p, i, j - low] = W[i, j]


@helper
def pack_panels(W, X):
    """Return the columns of W (padded with zeros) as panels of a tile's width, in the precision of X."""
    panels = panels_of(X)[0]
    write_panels(W, panels)
    return panels


@helper
def row_squares(X, x, stride, n, panels, squares, ahead, last):
    """Sum the squares of `n` rows at `x` (whole groups of SCORE_ROWS) times the panels into one vector a row.

    Meanwhile the tiles prefetch the cache lines from `ahead` up to `last`. The d columns of x are padded to vectors.
    If the last panel is half empty, only its first phase has rows of W.
    """
    size = X.itemsize
    lanes = VECTOR_BYTES // size
    count, d, width = panels.shape
    clear(squares, 0, n * lanes)
    for t in range(count):
        w = address(panels) + t * d * width * size
        whole = t * width + lanes
        rest = smaller(lanes, d - whole)
        for r in range(0, n, SCORE_ROWS):
            at = x + r * stride * size
            to = address(squares) + r * VECTOR_BYTES
            product_tile(X, SCORE_ROWS, SCORE_VECTORS, at, stride, w, width, whole, rest, to, lanes, 1, ahead, 64)
            ahead = smaller(ahead + 64 * (whole + rest), last)


@helper
def write_sums(X, squares, n, ceiling, out, item, r):
    """Write the sums of `n` vectors, at most `ceiling`, to `out` (of `scores_at`), from row `r` of one matrix on."""
    for i in range(n):
        square = smaller(lane_sum(X, address(squares) + i * VECTOR_BYTES), ceiling)
        at = entry_address(out, 0, item, r + i)
        if out[3] == 8:
            as_pointer(at, 0.0)[0] = square
        else:
            as_pointer(at, np.float32(0))[0] = square


def scores_at(out: Any) -> Any:
    """Return the vector that tells compiled code where to write to an array (b, n) of either precision."""
    return np.array([address_of(out), *out.strides, out.itemsize], np.int64)


@helper
def score_tasks(view, panels, X, tasks, first, last, ceiling, out):
    """Write ``‖k W‖²`` of the keys that ``tasks[first:last]`` name (slot, item, from row, to row).

    `panels` holds the W of each slot, as `pack_panels` makes them. X gives the precision and the padded width. Norms
    above `ceiling` become `ceiling`. `out` is of `scores_at`.
    """
    size = X.itemsize
    lanes = VECTOR_BYTES // size
    rows = zeros(X, (SCRATCH_ROWS, X.shape[1]))
    squares = empty(X, (SCRATCH_ROWS, lanes))
    held = tally()
    direct = view[IN_PLACE]
    step = view[ROW_STEP]
    for t in range(first, last):
        whitening, item, r, stop = panels[tasks[t, 0]], tasks[t, 1], tasks[t, 2], tasks[t, 3]
        end = entry_address(view, ADDRESS, item, stop) - 64
        unseen = begin(view, r)
        while r < stop:
            n = smaller(SCORE_SLAB, stop - r)
            x = entry_address(view, ADDRESS, item, r)
            stride = step // size
            if unseen < r + n:
                unseen = on(view, item, unseen, r + n, stop, held)
            if direct and n >= SCORE_ROWS:
                n = n // SCORE_ROWS * SCORE_ROWS
                ahead = larger(x, smaller(x + SCORE_SLAB * step, end))
            else:
                load_rows(view, item, r, r + n, rows)
                x, stride, ahead = address(rows), X.shape[1], end
            groups = (n + SCORE_ROWS - 1) // SCORE_ROWS * SCORE_ROWS
            row_squares(X, x, stride, groups, whitening, squares, ahead, larger(ahead, end))
            write_sums(X, squares, n, ceiling, out, item, r)
            r += n
        done(view, item, held)


@jit
def sqnorm_tasks(view, panels, X, tasks, first, last, ceiling, out):
    """See `score_tasks`."""
    score_tasks(view, panels, X, tasks, first, last, ceiling, out)
