"""Sparse keys: second moments, row by row or band by band, and squared norms of rows times a triangle.

Three arrays hold the rows, as in `Csr`: row r has the entries ``indptr[r]:indptr[r + 1]`` of `indices`, which
ascend, and of `values`. A mask of size 0 masks nothing.
"""

from __future__ import annotations

import numpy as np

from levattn._kernels.gram.moments import carry, fold
from levattn._kernels.gram.simd import entry_tile, lane_sum
from levattn._kernels.jit import VECTOR_BYTES, helper, jit
from levattn._kernels.llvm import address, larger, smaller
from levattn._kernels.scratch import empty, zeros
from levattn._kernels.sketch.compiled import number_below
from levattn._kernels.sketch.random import GROUP, fill_words

PANEL_VECTORS = 8  # vectors of whitened columns that are summed in registers, enough to hide the latency of the sums
_RUN = 256  # entries for each column of a band that are summed before sums are combined pairwise
TILE = 64  # side of the squares in which a triangle is copied
_SLAB_ROWS = 4096
_DRAWN = 512  # rows whose places in a sketch are drawn at a time, a multiple of GROUP
_SLAB_COLUMNS = 16  # entries of a slab for each column, so that rows of a panel are used often while they are near


@jit
def row_moment_tasks(indptr, indices, values, mask, block, levels, tasks, first, last, out):
    """Write the second moments of the rows that ``tasks[first:last]`` name (-, -, from row, to row).

    The products of the entries of each row are added up in the order of rows, in blocks that are combined in pairs.
    """
    d = out.shape[1]
    partial = empty(0.0, (d, d))
    stack = empty(0.0, (levels, d, d))
    for t in range(first, last):
        start, stop = tasks[t, 2], tasks[t, 3]
        count = 0
        for low in range(start, stop, block):
            partial[:] = 0
            for r in range(low, smaller(low + block, stop)):
                if mask.size and not mask[r]:
                    continue
                end = indptr[r + 1]
                for p in range(indptr[r], end):
                    row = partial[np.uintp(indices[p])]
                    v = np.float64(values[p])
                    for q in range(p, end):
                        row[np.uintp(indices[q])] += v * np.float64(values[q])
            carry(stack, count, partial)
            count += 1
        fold(stack, count, out, t)


@jit
def count_bands(indptr, indices, mask, width, start, stop, counts):
    """Count the entries of the rows ``start:stop`` in each band of `width` columns."""
    counts[:] = 0
    for r in range(start, stop):
        if mask.size and not mask[r]:
            continue
        for p in range(indptr[r], indptr[r + 1]):
            counts[np.uintp(indices[p]) // np.uintp(width)] += 1


@jit
def list_bands(indptr, indices, mask, width, start, stop, at, places, ends):
    """List the entries of the rows ``start:stop`` by band, from `at` on: each entry's place, and its row's end."""
    for r in range(start, stop):
        if mask.size and not mask[r]:
            continue
        end = indptr[r + 1]
        for p in range(indptr[r], end):
            band = np.uintp(indices[p]) // np.uintp(width)
            places[at[band]] = p
            ends[at[band]] = end
            at[band] += 1


@helper
def _add_upper(source, left, target):
    """Add the upper triangle of `source`, whose diagonal begins at column `left`, to the rows of `target`."""
    for i in range(len(source)):
        for c in range(left + i, source.shape[1]):
            target[i, c] += source[i, c]


@jit
def band_moment_tasks(indices, values, width, starts, places, ends, first, last, out):
    """Write the upper triangle of a second moment, a band of rows for each task, for entries listed by band.

    The products of the entries of a band are added up in the order of rows, in runs of entries combined in pairs.
    """
    d = len(out)
    levels = 1
    for t in range(first, last):
        while width * _RUN << levels - 1 < starts[t + 1] - starts[t]:
            levels += 1
    stack = zeros(0.0, (levels + 1, width, d))
    for t in range(first, last):
        left = t * width
        rows = smaller(width, d - left)
        count = 0
        for low in range(starts[t], starts[t + 1], width * _RUN):
            level = 0
            while count >> level & 1:
                level += 1
            part = stack[level, :rows]  # no sum is held at this level now
            part[:, left:] = 0
            for e in range(low, smaller(low + width * _RUN, starts[t + 1])):
                p = np.int64(places[e])
                row = part[np.uintp(indices[p]) - np.uintp(left)]
                v = np.float64(values[p])
                for q in range(p, np.int64(ends[e])):
                    row[np.uintp(indices[q])] += v * np.float64(values[q])
            for below in range(level):
                _add_upper(stack[below, :rows], left, part)
            count += 1
        total = out[left : left + rows]
        total[:] = 0
        for level in range(len(stack)):
            if count >> level & 1:
                _add_upper(stack[level, :rows], left, total)


@jit
def mirror_tasks(out, first, last):
    """Copy the upper triangle to the lower one, for the groups ``first:last`` of TILE rows."""
    d = len(out)
    for t in range(first, last):
        low, high = t * TILE, smaller((t + 1) * TILE, d)
        for left in range(0, high, TILE):
            for i in range(low, high):
                for j in range(left, smaller(left + TILE, i)):
                    out[i, j] = out[j, i]


@jit
def panels_of(W, X, vectors):
    """Return the columns of W (upper triangular) as panels of so many vectors, in the precision of X."""
    width = vectors * (VECTOR_BYTES // X.itemsize)
    d = len(W)
    panels = zeros(X, ((d + width - 1) // width, d, width))
    for p in range(len(panels)):
        low = p * width
        for i in range(smaller(low + width, d)):
            source, target = W[i], panels[p, i]
            for j in range(larger(low, i), smaller(low + width, d)):
                target[j - low] = source[j]
    return panels


@jit
def row_sqnorms(indptr, indices, values, mask, panels, start, stop, ceiling, out):
    """Write ``‖k W‖²`` of the rows ``start:stop``, at most `ceiling`, to `out`; `panels` hold W."""
    count, d, width = panels.shape
    size = panels.itemsize
    lanes = VECTOR_BYTES // size
    vectors = width // lanes
    room = _SLAB_COLUMNS * d
    held = empty(panels, (room,))
    offsets = empty(0, (room,))
    begins = empty(0, (_SLAB_ROWS,))
    cuts, ends = empty(begins, begins.shape), empty(begins, begins.shape)
    squares = empty(panels, (_SLAB_ROWS, lanes))
    low = start
    while low < stop:
        rows, used = 0, 0
        while low + rows < stop and rows < _SLAB_ROWS:
            r = low + rows
            p, end = indptr[r], indptr[r + 1]
            if mask.size and not mask[r]:
                end = p
            if used + end - p > room:
                break
            begins[rows] = cuts[rows] = used
            for q in range(p, end):
                held[used] = values[q]
                offsets[used] = np.int64(indices[q]) * width
                used += 1
            ends[rows] = used
            rows += 1
        squares[:rows] = 0
        for t in range(count):
            panel = address(panels[t])
            beyond = smaller((t + 1) * width, d) * width  # the rows of W below have zeros in this panel
            for r in range(rows):
                cut, end = cuts[r], ends[r]
                while cut < end and offsets[cut] < beyond:
                    cut += 1
                cuts[r] = cut
                a = address(held) + begins[r] * size
                o = address(offsets) + begins[r] * 8
                to = address(squares) + r * VECTOR_BYTES
                n = cut - begins[r]
                if vectors == 8:
                    entry_tile(panels, 8, a, o, n, panel, to)
                elif vectors == 4:
                    entry_tile(panels, 4, a, o, n, panel, to)
                elif vectors == 2:
                    entry_tile(panels, 2, a, o, n, panel, to)
                else:
                    entry_tile(panels, 1, a, o, n, panel, to)
        for r in range(rows):
            square = lane_sum(panels, address(squares) + r * VECTOR_BYTES)
            out[low + r] = ceiling if square > ceiling else square
        low += rows


@jit
def scatter_entries(indptr, indices, values, mask, begin, end, key0, key1, stream, offset, blocks, size, out):
    """Add the rows ``begin:end`` to the sketch `out`; the first row of all has the number `offset`.

    As in `scatter_rows` of `sketch`, each row goes, with a sign, to one place in each block of `size` rows.
    """
    drawn = empty(np.uint32(0), (blocks, _DRAWN))
    start = begin
    while start < end:
        skipped = (offset + start) % GROUP
        count = smaller(_DRAWN - skipped, end - start)
        groups = (skipped + count + GROUP - 1) // GROUP
        for b in range(blocks):
            fill_words(key0, key1, stream, b, (offset + start) // GROUP, drawn[b, : groups * GROUP])
        for r in range(start, start + count):
            if mask.size and not mask[r]:
                continue
            for b in range(blocks):
                word = drawn[b, skipped + r - start]
                to = out[b * size + number_below(word, size)]
                sign = out.dtype.type(1 - 2 * np.int32(word & np.uint32(1)))
                for p in range(indptr[r], indptr[r + 1]):
                    to[np.uintp(indices[p])] += sign * out.dtype.type(values[p])
        start += count


@jit
def projected_rows(indptr, indices, values, mask, P, first, last, ceiling, out):
    """Write ``‖k P‖²`` of the rows ``first:last`` to `out`, in the precision of P."""
    k = P.shape[1]
    y = empty(P, (k,))
    for r in range(first, last):
        y[:] = 0
        if not mask.size or mask[r]:
            for p in range(indptr[r], indptr[r + 1]):
                row = P[np.uintp(indices[p])]
                v = P.dtype.type(values[p])
                for j in range(k):
                    y[j] += v * row[j]
        total = 0.0
        for j in range(k):
            total += np.float64(y[j]) * np.float64(y[j])
        out[r] = smaller(total, ceiling)
