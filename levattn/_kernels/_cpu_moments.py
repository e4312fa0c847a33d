"""Second moments of tall matrices, summed over fixed blocks of rows that are combined pairwise."""

from __future__ import annotations

from levattn._kernels._cpu_jit import FULL_ROWS, LONE_ROWS, PANEL, TILE_ROWS, VECTOR_BYTES, helper, jit
from levattn._kernels._cpu_product import SLAB
from levattn._kernels._cpu_rows import ROW_STEP, is_direct, load_rows, row_address
from levattn._kernels._cpu_scratch import empty, zeros
from levattn._kernels._cpu_simd import address, as_pointer, moment_tile, widen

__all__ = ["add_rows", "carry", "counter", "fold", "moment_panels", "moment_tasks"]

_NEAR = 512  # bytes between rows up to which the nearest cache holds a slab as it lies

ROWS1, ROWS2, ROWS3, ROWS4 = TILE_ROWS


@helper
def _pack_slab(X, x, stride, n, packed):
    """Copy `n` rows at `x` into panels of PANEL vectors, whose rows then lie side by side in the cache."""
    panels, _, width = packed.shape
    d = X.shape[1]
    for p in range(panels):
        count = min(width, d - p * width)
        for r in range(n):
            source = as_pointer(x + (r * stride + p * width) * X.itemsize, X)
            target = packed[p, r]
            for c in range(count):
                target[c] = source[c]


@helper
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
        panel = x + left // width * panel_step
        i = 0
        while i < left and right - left == width:  # whole tiles above the diagonal's panel
            a = x + i // width * panel_step + i % width * size
            to = address(out) + (i * d + left) * size
            remaining = width - i % width
            if remaining >= FULL_ROWS and remaining != FULL_ROWS + 2:  # what is left must be made up of ROWS4
                moment_tile(X, FULL_ROWS, PANEL, a, stride, panel, stride, n, to, d, ahead, 64)
                i += FULL_ROWS
            else:
                moment_tile(X, ROWS4, PANEL, a, stride, panel, stride, n, to, d, ahead, 64)
                i += ROWS4
            ahead = min(ahead + 64 * n, last)
        for j in range(left, right, lanes):
            wide = (right - j) // lanes
            at = panel + (j - left) * size
            i = i if j == left else j
            while i < j + lanes:
                a = x + i // width * panel_step + i % width * size
                to = address(out) + (i * d + j) * size
                if wide == 4:
                    moment_tile(X, ROWS4, 4, a, stride, at, stride, n, to, d, ahead, 64)
                    i += ROWS4
                elif wide == 3:
                    moment_tile(X, ROWS3, 3, a, stride, at, stride, n, to, d, ahead, 64)
                    i += ROWS3
                elif wide == 2:
                    moment_tile(X, ROWS2, 2, a, stride, at, stride, n, to, d, ahead, 64)
                    i += ROWS2
                elif lanes >= LONE_ROWS:  # one vector alone needs more rows to hide the latency of its sums
                    moment_tile(X, LONE_ROWS, 1, a, stride, at, stride, n, to, d, ahead, 64)
                    i += LONE_ROWS
                else:
                    moment_tile(X, ROWS1, 1, a, stride, at, stride, n, to, d, ahead, 64)
                    i += ROWS1
                ahead = min(ahead + 64 * n, last)


@helper
def moment_panels(X):
    """Return the scratch into which `add_rows` packs a slab."""
    width = PANEL * (VECTOR_BYTES // X.itemsize)
    return empty(X, ((X.shape[1] + width - 1) // width, SLAB, width))


@helper
def add_rows(X, x, stride, n, packed, out, ahead, last):
    """Add the second moment of `n` rows at `x` to `out`, by way of `packed` where they lie far apart."""
    panel = packed.shape[2]
    if stride * X.itemsize > _NEAR:
        _pack_slab(X, x, stride, n, packed)
        _add_slab(X, address(packed), panel, packed.shape[1] * panel * X.itemsize, n, out, ahead, last)
    else:
        _add_slab(X, x, stride, panel * X.itemsize, n, out, ahead, last)


@helper
def counter(tasks, first, last, block, d):
    """Return room for one partial sum at each level of the largest task."""
    levels = 2
    for t in range(first, last):
        while block << levels - 2 < tasks[t, 3] - tasks[t, 2]:
            levels += 1
    return zeros(0.0, (levels, d, d))


@helper
def _put(total, term, added):
    """Write the upper triangle of `term` to that of `total` in whole vectors, or add it if `added`."""
    d = term.shape[0]
    size = term.itemsize
    lanes = VECTOR_BYTES // size
    for i in range(d):
        left = i // lanes * lanes
        at = i * d + left
        source, target, vectors = address(term) + at * size, address(total) + at * 8, (d - left) // lanes
        if added:
            widen(term, source, target, vectors, 1)
        else:
            widen(term, source, target, vectors, 0)


@helper
def carry(stack, count, term):
    """Put the sum of block number `count` on the stack, as adding one to a binary counter carries bits."""
    level = 0
    while count >> level & 1:
        level += 1
    _put(stack[level], term, False)
    for below in range(level):
        _put(stack[level], stack[below], True)


@helper
def fold(stack, count, total):
    """Write the sum of the `count` blocks on the stack to `total`, its lower triangle copied from the upper."""
    total[:] = 0
    for level in range(stack.shape[0]):
        if count >> level & 1:
            _put(total, stack[level], True)
    for i in range(total.shape[0]):
        for j in range(i):
            total[i, j] = total[j, i]


@jit
def moment_tasks(view, like, brain, mask, shift, scale, weights, X, block, tasks, first, last, out):
    """Write the second moments of the keys that ``tasks[first:last]`` name (slot, item, from row, to row).

    A task's rows start at a multiple of `block`. The sum of each block is formed in the precision of X, slab by
    slab; blocks are combined in float64 like the bits of a binary counter.
    """
    size, d = X.itemsize, X.shape[1]
    rows = zeros(X, (SLAB, d))
    direct = is_direct(view, like, mask, shift, scale, weights, X, VECTOR_BYTES // size)
    step = view[ROW_STEP]
    packed = moment_panels(X)
    partial = empty(X, (d, d))
    stack = counter(tasks, first, last, block, d)
    for t in range(first, last):
        item, start, stop = tasks[t, 1], tasks[t, 2], tasks[t, 3]
        end = row_address(view, item, stop) - 64
        count = 0
        for low in range(start, stop, block):
            partial[:] = 0
            for r in range(low, min(low + block, stop), SLAB):
                n = min(SLAB, min(low + block, stop) - r)
                x = row_address(view, item, r)
                stride = step // size
                ahead = max(x, min(x + SLAB * step, end))
                if not direct:
                    load_rows(view, like, brain, item, r, r + n, mask, shift, scale, weights, rows)
                    x, stride = address(rows), d
                last_line = max(ahead, min(ahead + SLAB * step, end) - 64 * n)
                add_rows(X, x, stride, n, packed, partial, ahead, last_line)
            carry(stack, count, partial)
            count += 1
        fold(stack, count, out[t])
