"""Compiled sketches S K: sparse (CountSketch, OSNAP), subsampled Hadamard (SRHT), and dense matrices."""

from __future__ import annotations

import numpy as np

from levattn._kernels.gram.simd import moment_tiles
from levattn._kernels.jit import FULL_ROWS, PANEL, VECTOR_BYTES, helper, jit
from levattn._kernels.llvm import address, larger, smaller
from levattn._kernels.rows.compiled import (
    ADDRESS,
    COLUMN_STEP,
    COLUMNS,
    IN_PLACE,
    ROW_STEP,
    SCALE,
    SHIFT,
    entry_address,
    load_rows,
)
from levattn._kernels.scratch import empty, zeros
from levattn._kernels.sketch.random import GROUP, fill_group, fill_normals, fill_signs, fill_words
from levattn._kernels.sketch.simd import add_signed, hadamard_tile

_SLAB = 512  # rows whose places are drawn at a time, a multiple of GROUP
_LOADED = 32  # rows that are widened at a time
_AHEAD = 8  # rows by which a place of the sketch is fetched before its turn
_FETCHED = 8192  # bytes by which keys are fetched before their turn

FIRST_ROWS = 16 if VECTOR_BYTES == 64 else 8  # that registers hold in the first step of a Hadamard transform

SLAB = 64  # rows for which a dense sketch is drawn at a time, a multiple of GROUP
DRAWN = 480  # columns that are drawn at a time: a multiple of 32 (signs) and of the rows of a tile, 6 or 4


_tile = moment_tiles(lambda _lanes: [(FULL_ROWS, vectors) for vectors in range(1, PANEL + 1)])


@helper
def number_below(word, size):
    """Return a number below `size`, drawn from the upper 31 bits of a word."""
    return np.int64(np.uint64(word >> np.uint32(1)) * np.uint64(size) >> np.uint64(31))


@jit
def scatter_rows(view, item, begin, end, key0, key1, stream, offset, blocks, size, X, out):
    """Add the rows ``begin:end`` of one matrix, whose first row has the number `offset`, to the sketch `out`.

    Each row goes, with a sign, to one place in each of `blocks` blocks of `size` rows of the sketch. X gives the
    precision in which keys are read, and the padded width, which `out` has too.
    """
    lanes = VECTOR_BYTES // X.itemsize
    width = X.shape[1]
    drawn = empty(np.uint32(0), (_SLAB,))
    places = empty(0, (_SLAB + _AHEAD, blocks))
    direct = view[IN_PLACE]
    fetched = _FETCHED if direct else 0
    rows = zeros(X, (_LOADED, width))
    base, row_bytes = address(out), out.strides[0]
    start = begin
    while start < end:
        skipped = (offset + start) % GROUP
        count = smaller(_SLAB - skipped, end - start)
        groups = (skipped + count + GROUP - 1) // GROUP
        for b in range(blocks):
            fill_words(key0, key1, stream, b, (offset + start) // GROUP, drawn[: groups * GROUP])
            for r in range(count):
                word = drawn[skipped + r]
                places[r, b] = (b * size + number_below(word, size)) * 2 + np.int64(word & np.uint32(1))
        for r in range(count, count + _AHEAD):  # repeated: there are no further places to fetch
            for b in range(blocks):
                places[r, b] = places[count - 1, b]
        for r in range(count):
            x = entry_address(view, ADDRESS, item, start + r)
            if not direct:
                if r % _LOADED == 0:
                    stop = smaller(start + r + _LOADED, start + count)
                    load_rows(view, item, start + r, stop, rows)
                x = address(rows[r % _LOADED])
            for b in range(blocks):
                to = base + (places[r, b] >> 1) * row_bytes
                ahead = base + (places[r + _AHEAD, b] >> 1) * row_bytes
                sign = out.dtype.type(1 - 2 * (places[r, b] & 1))
                add_signed(X, out, x, to, sign, width // lanes, fetched, ahead)
        start += count


@helper
def _combine_groups(X, group, vectors):
    """Finish the Hadamard transform of the rows of X; each `group` of neighbors is transformed already."""
    row_bytes = X.strides[0]
    half = group
    while half < X.shape[0]:
        rows = smaller(8, X.shape[0] // half)
        for low in range(0, X.shape[0], half * rows):
            for r in range(low, low + half):
                x = address(X) + r * row_bytes
                step = half * row_bytes
                if rows == 8:
                    hadamard_tile(X, X, 8, 0, x, step, 0, x, step, vectors)
                elif rows == 4:
                    hadamard_tile(X, X, 4, 0, x, step, 0, x, step, vectors)
                else:
                    hadamard_tile(X, X, 2, 0, x, step, 0, x, step, vectors)
        half *= rows


@jit
def hadamard_blocks(view, item, n, begin, end, key0, key1, streams, offset, chosen, rows, X, out):
    """Add the terms of the blocks ``begin:end`` of rows of one matrix to a subsampled Hadamard transform.

    Row numbers, of which the first is `offset`, determine the blocks. X has as many rows as a block, and some whole
    vectors of columns. Rows get random signs and are transformed; then the rows `chosen` of the result are added to
    `out` with random signs. `streams` holds the streams of both signs. `rows` has FIRST_ROWS rows in the precision in
    which keys are read, and the width of X; `out` has the padded width.
    """
    size, width = X.shape
    lanes = VECTOR_BYTES // X.itemsize
    d = view[COLUMNS]
    group = smaller(FIRST_ROWS, size)
    if group < FIRST_ROWS:
        group = 4
    direct = view[IN_PLACE]
    drawn = empty(np.uint32(0), (size,))
    signs = empty(X, (size,))
    flips = empty(np.uint32(0), (GROUP, chosen.size))
    part = view.copy()
    loaded = address(rows)
    for block in range(begin, end):
        first = block * size - offset  # the row of this matrix that begins the block, if there is one
        low, high = larger(first, 0), smaller(first + size, n)
        fill_words(key0, key1, streams[0], 0, block * size // GROUP, drawn)
        for r in range(size):
            signs[r] = 1 - 2 * np.int32(drawn[r] & np.uint32(1))
        if block == begin or block % GROUP == 0:
            fill_group(key0, key1, streams[1], block // GROUP, 0, chosen.size, flips)
        flip = flips[block % GROUP]
        for left in range(0, out.shape[1], width):
            vectors = smaller(width, out.shape[1] - left) // lanes
            right = smaller(left + width, d)
            part[ADDRESS], part[COLUMNS] = view[ADDRESS] + left * view[COLUMN_STEP], right - left
            for each in (SHIFT, SCALE):  # float64, one number a column
                part[each] = view[each] + left * 8 if view[each] else 0
            if not direct:
                rows[:] = 0
            for g in range(0, size, group):
                r = first + g
                to, at_sign = address(X[g]), address(signs) + g * signs.itemsize
                x, step = loaded, rows.strides[0]
                if direct and r >= low and r + group <= high:
                    x, step = entry_address(part, ADDRESS, item, r), view[ROW_STEP]
                else:
                    start, stop = smaller(larger(r, low), high), larger(smaller(r + group, high), low)
                    if stop - start < group:
                        rows[:] = 0
                    if stop > start:
                        load_rows(part, item, start, stop, rows[start - r :])
                if group == FIRST_ROWS:
                    hadamard_tile(rows, X, FIRST_ROWS, 1, x, step, at_sign, to, X.strides[0], vectors)
                else:
                    hadamard_tile(rows, X, 4, 1, x, step, at_sign, to, X.strides[0], vectors)
            _combine_groups(X, group, vectors)
            for h in range(chosen.size):
                x, to = address(X[chosen[h]]), address(out[h]) + left * out.itemsize
                sign = X.dtype.type(1 - 2 * np.int32(flip[h] & np.uint32(1)))
                add_signed(X, out, x, to, sign, vectors, 0, to)


@jit
def dense_rows(view, begin, end, key0, key1, stream, offset, normal, X, part, out):
    """Add random combinations of the rows ``begin:end`` of all matrices to ``out[:, part]``.

    Row 0 has the number `offset`. Coefficients are normals, or else signs, and drawn once for all matrices. X gives
    the precision and the padded width, which `out` has too. The rows of `out` are padded to a multiple of FULL_ROWS.
    """
    lanes = VECTOR_BYTES // X.itemsize
    items, _, size, width = out.shape
    direct = view[IN_PLACE]
    rows = zeros(X, (SLAB, width))
    drawn = empty(np.uint32(0), (GROUP, DRAWN))
    S = empty(X, (SLAB, DRAWN + 64 // X.itemsize))  # rows an odd number of cache lines apart
    s_stride = S.shape[1]
    start = begin
    while start < end:
        skipped = (offset + start) % GROUP
        count = smaller(SLAB - skipped, end - start)
        for first in range(0, size, DRAWN):
            columns = smaller(DRAWN, size - first)
            for k in range(0, skipped + count, GROUP):
                group = (offset + start + k) // GROUP
                if normal:
                    fill_normals(key0, key1, stream, group, first, columns, drawn, S[k : k + GROUP])
                else:
                    fill_signs(key0, key1, stream, group, first, (columns + 31) // 32 * 32, drawn, S[k : k + GROUP])
            s = address(S[skipped])
            for item in range(items):
                x, x_stride = entry_address(view, ADDRESS, item, start), view[ROW_STEP] // X.itemsize
                if not direct:
                    load_rows(view, item, start, start + count, rows)
                    x, x_stride = address(rows), width
                for left in range(0, width, PANEL * lanes):
                    vectors = smaller(PANEL, (width - left) // lanes)
                    at = x + left * X.itemsize
                    for i in range(0, columns, FULL_ROWS):
                        a, to = s + i * X.itemsize, address(out[item, part, first + i]) + left * out.itemsize
                        _tile(X, vectors - 1, a, s_stride, at, x_stride, count, to, width, s, 0)
        start += count
