"""Digests of rows as they lie in memory: the same for all chunks in which the rows come.

A kernel that reads rows anyway digests them meanwhile, when they are in its cache. Each task asks where to `begin`,
goes `on` as far as it is about to read, and is `done`. `digest_tasks` does nothing else. One vector of integers, of
which the view of the rows holds the address, says what to digest.
"""

from __future__ import annotations

import numpy as np

from levattn._kernels.jit import VECTOR_BYTES, helper, jit
from levattn._kernels.llvm import added_at, address, as_pointer, larger, smaller
from levattn._kernels.rows.compiled import ADDRESS, DIGEST, ROW_STEP, TOGETHER, entry_address, products_together
from levattn._kernels.scratch import zeros

# The places in the vector: the bytes of a row, the logarithm of the rows in a line, the number of the first row in the
# whole, the number of rows, the logarithm of the rows in a cell, and the number of cells. Then follow the addresses of
# the keys of a line, of the sums of lines that the rows before left open and that these leave open, one for each
# matrix, and of the cells of each matrix.
SIZE, LINE, NUMBER, COUNT, CELL, CELLS, KEYS, BEGUN, LEFT, OUT = range(10)
_FAR = 1 << 62  # the next row where nothing is to be digested

_ZERO, _HALF, _LOW = np.uint64(0), np.uint64(32), np.uint64(0xFFFFFFFF)
_GOLDEN, _FIRST, _SECOND = (
    np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # of SplitMix64
_WORDS = VECTOR_BYTES // 8  # in a vector


@helper
def _products(at, count, keys):
    """Return the sum of products of the halves of `count` words at an address, each half plus its key."""
    words, key, total = as_pointer(at, _ZERO), as_pointer(keys, _ZERO), _ZERO
    for j in range(count):
        total += ((words[j] + key[j]) & _LOW) * (((words[j] >> _HALF) + (key[j] >> _HALF)) & _LOW)
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


@helper
def tally():
    """Return the scratch of a run of tasks: the digest of the present cell, the cell, and sums of lines."""
    return zeros(_ZERO, (2 + TOGETHER,))


@helper
def begin(view, start):
    """Return the first row that the task of the rows from `start` on digests; it is beyond all rows if none does."""
    if not view[DIGEST]:
        return _FAR
    what = as_pointer(view[DIGEST], np.int64(0))
    behind = (what[NUMBER] + start) & ((1 << what[LINE]) - 1)
    return start + (1 << what[LINE]) - behind if start and behind else start


@helper
def on(view, item, row, upto, stop, held):
    """Digest the lines of one matrix from a row on that end before the row `upto`, and return the next line's row.

    Lines wait until several go together. A task ends where `upto` is `stop`. It has all lines that begin before, so
    the last one may end in rows of the next task.
    """
    what = as_pointer(view[DIGEST], np.int64(0))
    several = TOGETHER << what[LINE]
    if row + several > upto and upto < stop:
        return row
    size, power, count, step = what[SIZE], what[LINE], what[COUNT], view[ROW_STEP]
    lines, words, rest = 1 << power, size // 8, size % 8
    while row < upto and (row + several <= upto or upto == stop):
        number, place = what[NUMBER] + row, entry_address(view, ADDRESS, item, row)
        cell, inside = (number >> what[CELL]) - (what[NUMBER] >> what[CELL]), number & (lines - 1)
        if np.uint64(cell) != held[1]:
            done(view, item, held)
            held[1] = np.uint64(cell)
        if rest == 0 and step == size and number & (several - 1) == 0 and row + several <= upto:
            some, every = lines * words // _WORDS * _WORDS, lines * words
            products_together(place, lines * size, what[KEYS], some // _WORDS, address(held) + 16)
            for i in range(TOGETHER):
                total = held[2 + i]
                if some < every:
                    rest_at = place + i * lines * size + 8 * some
                    total += _products(rest_at, every - some, what[KEYS] + 8 * some)
                held[0] += _mixed(total, (number >> power) + i, item)
            row += several
            continue
        rows = smaller(lines - inside, count - row)
        total = _ZERO if row else as_pointer(what[BEGUN], _ZERO)[item]
        if rest == 0 and step == size:
            total += _products(place, rows * words, what[KEYS] + 8 * inside * words)
        else:
            for r in range(rows):
                keys = what[KEYS] + 8 * (inside + r) * words
                total += _products(place + r * step, words, keys)
                if rest:  # then lines are of one row
                    word, key = _last_word(place + r * step + 8 * words, rest), as_pointer(keys, _ZERO)[words]
                    total += ((word + key) & _LOW) * (((word >> _HALF) + (key >> _HALF)) & _LOW)
        if inside + rows == lines:
            held[0] += _mixed(total, number >> power, item)
        else:
            as_pointer(what[LEFT], _ZERO)[item] = total
        row += rows
    return row


@helper
def done(view, item, held):
    """Add the digest of the present cell to the digests of other tasks of it."""
    if held[0]:
        what = as_pointer(view[DIGEST], np.int64(0))
        added_at(what[OUT] + 8 * (item * what[CELLS] + np.int64(held[1])), np.int64(held[0]))
        held[0] = _ZERO


@jit
def digest_tasks(view, first, last):
    """Digest the rows of the tasks ``first:last``, of which there is one for each matrix and each cell of rows."""
    held, what = tally(), as_pointer(view[DIGEST], np.int64(0))
    cells, number, power = what[CELLS], what[NUMBER], what[CELL]
    for task in range(first, last):
        item, cell = task // cells, (number >> power) + task % cells
        start = larger(0, (cell << power) - number)
        stop = smaller(what[COUNT], ((cell + 1) << power) - number)
        on(view, item, begin(view, start), stop, stop, held)
        done(view, item, held)
