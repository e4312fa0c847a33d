"""Sketches of tall matrices: rows added with signs to a few places, and Hadamard transforms of blocks of rows."""

from __future__ import annotations

import numpy as np

from levattn._kernels._cpu_jit import VECTOR_BYTES, jit
from levattn._kernels._cpu_random import GROUP, fill_words
from levattn._kernels._cpu_rows import is_direct, load_rows, row_address
from levattn._kernels._cpu_simd import add_signed

__all__ = ["hadamard_blocks", "scatter_rows"]

_SLAB = 512  # rows whose places are drawn at a time, a multiple of GROUP
_LOADED = 32  # rows that are widened at a time
_AHEAD = 8  # rows by which a place of the sketch is fetched before its turn
_FETCHED = 8192  # bytes by which keys are fetched before their turn


@jit
def place_of(word, size):
    """Return a number below `size`, by the upper 31 bits of a word."""
    return np.int64(np.uint64(word >> np.uint32(1)) * np.uint64(size) >> np.uint64(31))


@jit
def scatter_rows(
    view, like, brain, mask, shift, scale, weights, item, begin, end, key0, key1, stream, offset, blocks, size, X, out
):
    """Add the rows ``begin:end`` of one matrix, whose first row has the number `offset`, to the sketch `out`.

    Each row goes, with a sign, to one place in each of `blocks` blocks of `size` rows of the sketch. X gives the
    precision in which keys are read and the padded width, which is that of `out`.
    """
    lanes = VECTOR_BYTES // X.itemsize
    width = X.shape[1]
    drawn = np.empty(_SLAB, np.uint32)
    places = np.empty((_SLAB + _AHEAD, blocks), np.int64)
    direct = is_direct(view, like, mask, shift, scale, weights, X, lanes)
    fetched = _FETCHED if direct else 0
    rows = np.zeros((_LOADED, width), X.dtype)
    base, row_bytes = out.ctypes.data, out.strides[0]
    start = begin
    while start < end:
        skipped = (offset + start) % GROUP
        count = min(_SLAB - skipped, end - start)
        groups = (skipped + count + GROUP - 1) // GROUP
        for b in range(blocks):
            fill_words(key0, key1, stream, b, (offset + start) // GROUP, drawn[: groups * GROUP])
            for r in range(count):
                word = drawn[skipped + r]
                places[r, b] = (b * size + place_of(word, size)) * 2 + np.int64(word & np.uint32(1))
        places[count:] = places[count - 1]
        for r in range(count):
            x = row_address(view, item, start + r)
            if not direct:
                if r % _LOADED == 0:
                    stop = min(start + r + _LOADED, start + count)
                    load_rows(view, like, brain, item, start + r, stop, mask, shift, scale, weights, rows)
                x = rows[r % _LOADED].ctypes.data
            for b in range(blocks):
                to = base + (places[r, b] >> 1) * row_bytes
                ahead = base + (places[r + _AHEAD, b] >> 1) * row_bytes
                sign = out.dtype.type(1 - 2 * (places[r, b] & 1))
                add_signed(X, out, x, to, sign, width // lanes, fetched, ahead)
        start += count


@jit
def hadamard_blocks(
    view,
    like,
    brain,
    mask,
    shift,
    scale,
    weights,
    item,
    n,
    begin,
    end,
    key0,
    key1,
    stream,
    offset,
    chosen,
    flips,
    X,
    out,
):
    """Add what the blocks ``begin:end`` of the rows of one matrix give to a subsampled Hadamard transform.

    Blocks are numbered from the row numbers, of which the first row has `offset`, and X has as many rows as a block,
    and a few columns. Rows get random signs, are transformed, and the rows `chosen` of the result are added to `out`
    with the signs ``flips[block - begin]``.
    """
    size, width = X.shape
    d = out.shape[1]
    drawn = np.empty(size, np.uint32)
    row = np.zeros((1, view[4]), X.dtype)
    for block in range(begin, end):
        low = max(block * size - offset, 0)
        high = min((block + 1) * size - offset, n)
        first = low + offset - block * size
        fill_words(key0, key1, stream, 0, block * size // GROUP, drawn)
        for left in range(0, d, width):
            right = min(left + width, d)
            X[:] = 0
            for r in range(low, high):
                load_rows(view, like, brain, item, r, r + 1, mask, shift, scale, weights, row)
                to = X[first + r - low]
                sign = X.dtype.type(1 - 2 * np.int32(drawn[first + r - low] & np.uint32(1)))
                for c in range(right - left):
                    to[c] = sign * row[0, left + c]
            half = 1
            while half < size:
                for at in range(0, size, 2 * half):
                    for r in range(at, at + half):
                        a, b = X[r], X[r + half]
                        for c in range(width):
                            u, v = a[c], b[c]
                            a[c] = u + v
                            b[c] = u - v
                half *= 2
            for h in range(chosen.size):
                source, target, flip = X[chosen[h]], out[h], flips[block - begin, h]
                for c in range(right - left):
                    target[left + c] += flip * source[c]
