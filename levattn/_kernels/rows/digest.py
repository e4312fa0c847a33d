"""Digests of rows as they lie in memory: the same for all chunks in which the rows come."""

from __future__ import annotations

import numpy as np

from levattn._kernels.jit import helper, jit
from levattn._kernels.llvm import address, as_pointer, larger, smaller

__all__ = ["digest_tasks"]

_ZERO, _HALF, _LOW = np.uint64(0), np.uint64(32), np.uint64(0xFFFFFFFF)
_GOLDEN, _FIRST, _SECOND = (
    np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # of SplitMix64


@helper
def _products(at, count, low, high, place):
    """Return the sum of products of the halves of `count` words at an address, each half plus its key."""
    words, total = as_pointer(at, _ZERO), _ZERO
    below, above = as_pointer(address(low) + 8 * place, _ZERO), as_pointer(address(high) + 8 * place, _ZERO)
    for j in range(count):
        total += ((words[j] + below[j]) & _LOW) * (((words[j] >> _HALF) + above[j]) & _LOW)
    return total


@helper
def _last_word(at, size):
    """Return `size` bytes, an even number below eight, as a word."""
    parts, word = as_pointer(at, np.uint16(0)), _ZERO
    for j in range(size // 2):
        word |= np.uint64(parts[j]) << np.uint64(16 * j)
    return word


@helper
def _mixed(total, line, item):
    """Return the digest of a line, which depends on its place."""
    word = total + np.uint64(line) * _GOLDEN + np.uint64(item) * _SECOND
    word = (word ^ (word >> _HALF)) * _FIRST
    word = (word ^ (word >> np.uint64(29))) * _SECOND
    return word ^ (word >> _HALF)


@jit
def digest_tasks(start, steps, size, block, at, n, lines, low, high, begun, first, last, out, left):
    """Write the digests of the tasks ``first:last``, of which there is one for each item and each cell of rows.

    start, steps: the address of the first row, and the bytes from item to item and from row to row.

    size, block, lines: the bytes of a row, without gaps, and the number of rows in a cell and in a line.

    at, n: the number of the first row in the whole, and the number of rows.

    low, high: the keys of a line, 32 bits in each.

    begun, left: (b,) the sums of a line that the rows before left open, and of a line that these leave open.
    """
    cells, words, rest = out.shape[1], size // 8, size % 8
    for task in range(first, last):
        item, cell = task // cells, task % cells
        row = larger(at, (at // block + cell) * block)
        stop = smaller(at + n, (at // block + cell + 1) * block)
        total, digest = begun[item] if row == at else _ZERO, _ZERO
        while row < stop:
            inside = row % lines
            count = smaller(lines - inside, stop - row)
            place = start + item * steps[0] + (row - at) * steps[1]
            if rest == 0 and steps[1] == size:
                total += _products(place, count * words, low, high, inside * words)
            else:
                for r in range(count):
                    total += _products(place + r * steps[1], words, low, high, (inside + r) * words)
                    if rest:  # then lines are of one row
                        word = _last_word(place + r * steps[1] + 8 * words, rest)
                        total += ((word + low[words]) & _LOW) * (((word >> _HALF) + high[words]) & _LOW)
            row += count
            if inside + count == lines:
                digest += _mixed(total, row // lines, item)
                total = _ZERO
        out[item, cell] = digest
        if stop == at + n:
            left[item] = total
