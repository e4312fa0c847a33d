"""Second moments of tall matrices, summed over fixed blocks of rows that are combined pairwise."""

from __future__ import annotations

from levattn._kernels.gram.simd import add_upper, moment_tiles
from levattn._kernels.gram.squares import SLAB
from levattn._kernels.jit import FULL_ROWS, LONE_ROWS, PANEL, TILE_ROWS, VECTOR_BYTES, helper, jit
from levattn._kernels.llvm import address, as_pointer, larger, smaller
from levattn._kernels.rows.compiled import ADDRESS, IN_PLACE, ROW_STEP, entry_address, load_rows
from levattn._kernels.rows.digest import begin, done, on, tally
from levattn._kernels.scratch import clear, empty, zeros

_NEAR = 512  # bytes between rows, up to which the nearest cache holds a slab without packing


def _shapes(lanes: int) -> list[tuple[int, int]]:
    """Return the shape of a tile above the diagonal's panel, and the shapes beside the diagonal by number of vectors.

    One vector alone needs more rows to hide the latency of its sums.
    """
    lone = LONE_ROWS if lanes >= LONE_ROWS else TILE_ROWS[0]
    return [(FULL_ROWS, PANEL), (lone, 1), *((TILE_ROWS[vectors - 1], vectors) for vectors in range(2, PANEL + 1))]


_tile = moment_tiles(_shapes)


@helper
def _pack_slab(X, x, stride, n, packed):
    """Copy `n` rows at `x` into panels of PANEL vectors, whose rows are then contiguous in the cache."""
    panels, _, width = packed.shape
    size, d = X.itemsize, X.shape[1]
    for p in range(panels):
        count = smaller(width, d - p * width)
        for r in range(n):
            source = as_pointer(x + (r * stride + p * width) * size, X)
            target = as_pointer(address(packed) + (p * packed.shape[1] + r) * width * size, X)
            for c in range(count):
                target[c] = source[c]


@helper
def _add_slab(X, x, stride, panel_step, n, out, ahead, last):
    """Add the second moment of `n` rows at `x` to `out`, tiles of the upper triangle only.

    Rows are `stride` elements apart and panels of columns `panel_step` bytes. Meanwhile the tiles prefetch the
    cache lines from `ahead` up to `last`. X gives the precision and the padded width.
    """
    size, d = X.itemsize, X.shape[1]
    lanes = VECTOR_BYTES // size
    width = PANEL * lanes
    for left in range(0, d, width):
        right = smaller(left + width, d)
        panel = x + left // width * panel_step
        for j in range(left, right, lanes):
            vectors = (right - j) // lanes
            i = 0 if j == left else j
            while i < j + lanes:
                shape = vectors
                if i < left and vectors == PANEL:  # whole tiles above the diagonal's panel
                    remaining = width - i % width
                    if remaining >= FULL_ROWS and remaining != FULL_ROWS + 2:  # the rest must split into fours
                        shape = 0
                a, at = x + i // width * panel_step + i % width * size, panel + (j - left) * size
                i += _tile(X, shape, a, stride, at, stride, n, address(out) + (i * d + j) * size, d, ahead, 64)
                ahead = smaller(ahead + 64 * n, last)


@helper
def moment_panels(X):
    """Return the scratch into which `add_rows` packs a slab."""
    width = PANEL * (VECTOR_BYTES // X.itemsize)
    return empty(X, ((X.shape[1] + width - 1) // width, SLAB, width))


@helper
def add_rows(X, x, stride, n, packed, out, ahead, last):
    """Add the second moment of `n` rows at `x` to `out`; rows that are far apart are packed first."""
    panel = packed.shape[2]
    if stride * X.itemsize > _NEAR:
        _pack_slab(X, x, stride, n, packed)
        _add_slab(X, address(packed), panel, packed.shape[1] * panel * X.itemsize, n, out, ahead, last)
    else:
        _add_slab(X, x, stride, panel * X.itemsize, n, out, ahead, last)


@helper
def carry(stack, count, term):
    """Put the sum of block number `count` on the stack, and carry sums as a binary counter carries bits."""
    d, step = stack.shape[1], stack.strides[0]
    level = 0
    while count >> level & 1:
        level += 1
    clear(stack, level * d * d, d * d)
    total = address(stack) + level * step
    add_upper(term, d, address(term), total)
    for below in range(level):
        add_upper(stack, d, address(stack) + below * step, total)


@helper
def fold(stack, count, out, t):
    """Write the sum of the `count` blocks on the stack to matrix `t` of `out`, both triangles."""
    d = stack.shape[1]
    clear(out, t * d * d, d * d)
    for level in range(stack.shape[0]):
        if count >> level & 1:
            add_upper(stack, d, address(stack) + level * stack.strides[0], address(out) + t * out.strides[0])
    for i in range(d):
        for j in range(i):
            out[t, i, j] = out[t, j, i]


@helper
def sum_tasks(view, X, block, levels, tasks, first, last, out):
    """Write the second moments of the keys that ``tasks[first:last]`` name (slot, item, from row, to row).

    A task's rows start at a multiple of `block`. The sum of each block is formed in the precision of X, slab by
    slab. Blocks are combined in float64 like the bits of a binary counter that has `levels` bits.
    """
    size, d = X.itemsize, X.shape[1]
    rows = zeros(X, (SLAB, d))
    direct = view[IN_PLACE]
    step = view[ROW_STEP]
    packed = moment_panels(X)
    partial = empty(X, (d, d))
    stack = empty(0.0, (levels, d, d))
    held = tally()
    for t in range(first, last):
        item, start, stop = tasks[t, 1], tasks[t, 2], tasks[t, 3]
        end = entry_address(view, ADDRESS, item, stop) - 64
        count, unseen = 0, begin(view, start)
        for low in range(start, stop, block):
            clear(partial, 0, d * d)
            high = smaller(low + block, stop)
            for r in range(low, high, SLAB):
                n = smaller(SLAB, high - r)
                x = entry_address(view, ADDRESS, item, r)
                stride = step // size
                ahead = larger(x, smaller(x + SLAB * step, end))
                if unseen < r + n:
                    unseen = on(view, item, unseen, r + n, stop, held)
                if not direct:
                    load_rows(view, item, r, r + n, rows)
                    x, stride = address(rows), d
                last_line = larger(ahead, smaller(ahead + SLAB * step, end) - 64 * n)
                add_rows(X, x, stride, n, packed, partial, ahead, last_line)
            carry(stack, count, partial)
            count += 1
        fold(stack, count, out, t)
        done(view, item, held)


@jit
def moment_tasks(view, X, block, levels, tasks, first, last, out):
    """See `sum_tasks`."""
    sum_tasks(view, X, block, levels, tasks, first, last, out)
