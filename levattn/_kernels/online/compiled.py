"""Online leverage scores: Givens rotations update the triangular factor R, with four rows of keys at a time.

The rotations, with cosines c and sines s, also give the score of the row, ``1 − Π c²``. It is summed up as
``Σ_j (s_j Π_{i<j} c_i)²``, in which nothing cancels. Each row rounds R once more, so that many copies of a row would
turn R by more than the rounding of a row. So R is held with its rounding errors.

R has a row for each direction so far. The remainder of a row that opens a direction becomes the new row of R. Its
pivot is the column with the largest remainder relative to the column's norm so far; columns are exchanged, so that R
stays a triangle. In a fixed order, a column that nearly depends on the columns before it would make the rounding of
others large.
"""

from __future__ import annotations

import numpy as np

from levattn._kernels.jit import helper, jit
from levattn._kernels.llvm import fused_multiply_add, larger, smaller
from levattn._kernels.rows.compiled import copy_numbers, load_rows
from levattn._kernels.scratch import empty, zeros

_ROWS = 4
_NOISE = 64 * 2.0**-53  # the remainder of a row in the span of earlier ones, relative to what cancels, times √d
_SMALL, _LARGE = 2.0**-460, 2.0**500  # between these, squares are in range
_STEP = 2.0**600


@helper
def _length(a, b):
    """Return √(a² + b²), even if the squares are out of range."""
    a, b = abs(a), abs(b)
    size = larger(a, b)
    if _SMALL < size < _LARGE or size == 0:
        return np.sqrt(a * a + b * b)
    step = _STEP if size < 1 else 1 / _STEP  # a power of two, so that nothing is rounded
    a, b = a * step, b * step
    return np.sqrt(a * a + b * b) / step


@helper
def _rotated(r, e, x, c, s):
    """Return ``c r + s x`` as a number and its error, where r has the error e, and ``c x − s r``."""
    p, q = c * r, s * x
    total = p + q
    part = total - p
    lost = fused_multiply_add(c, r, -p) + fused_multiply_add(s, x, -q)
    return total, c * e + (((p - (total - part)) + (q - part)) + lost), c * x - s * (r + e)


@helper
def _turn(r, e, x, score, left):
    """Return the cosine and sine that rotate x into the pivot r with error e, and the new r, e, score and Π c."""
    if x == 0:
        return 1.0, 0.0, r, e, score, left
    size = larger(abs(r + e), abs(x))
    step = 1.0 if _SMALL < size < _LARGE else _STEP if size < 1 else 1 / _STEP
    a, b = (r + e) * step, x * step
    hypotenuse = np.sqrt(a * a + b * b)
    c, s = a / hypotenuse, b / hypotenuse
    r, e, x = _rotated(r, e, x, c, s)
    return c, s, r, e, score + (s * left) ** 2, left * c


@helper
def _rotate(R, E, w, x, y, z, c, s):
    """Rotate a row of the triangle, which has the errors E, with four rows, one after the other."""
    for i in range(len(R)):
        r, e, w[i] = _rotated(R[i], E[i], w[i], c[0], s[0])
        r, e, x[i] = _rotated(r, e, x[i], c[1], s[1])
        r, e, y[i] = _rotated(r, e, y[i], c[2], s[2])
        R[i], E[i], z[i] = _rotated(r, e, z[i], c[3], s[3])


@helper
def _sweep(R, E, rank, rows, score, left):
    """Rotate four rows into the directions so far."""
    c, s = empty(0.0, (_ROWS,)), empty(0.0, (_ROWS,))
    for j in range(rank):
        r, e, after = R[j, j], E[j, j], j + 1
        for k in range(_ROWS):
            c[k], s[k], r, e, score[k], left[k] = _turn(r, e, rows[k, j], score[k], left[k])
        R[j, j], E[j, j] = r, e
        w, x, y, z = rows[0, after:], rows[1, after:], rows[2, after:], rows[3, after:]
        _rotate(R[j, after:], E[j, after:], w, x, y, z, c, s)


@helper
def _pivot(x, entries, norms, rank, score, left):
    """Return the column with the largest remainder relative to its norm, or −1 if only rounding remains.

    The row's own entry brings rounding. So does R, in proportion to the column's norm so far times the share of the
    row that lies in the directions so far.
    """
    d = len(x)
    found, largest = -1, -1.0
    for i in range(rank, d):
        size = abs(x[i])
        if size > _NOISE * np.sqrt(d) * _length(left * entries[i], np.sqrt(d * score) * norms[i]):
            share = size / _length(entries[i], norms[i])
            if share > largest:
                found, largest = i, share
    return found


@helper
def _exchange(A, i, j):
    """Exchange two columns."""
    for k in range(len(A)):
        A[k, i], A[k, j] = A[k, j], A[k, i]


@jit
def online_tasks(view, n, root, first, last, out):
    """Write the scores of the matrices ``first:last`` to `out`; each triangle begins as the diagonal `root`.

    Where `root` is 0 the triangle begins without rows, and a row that opens a direction scores 1.
    """
    d = root.shape[1]
    R, E = empty(0.0, (d, d)), empty(0.0, (d, d))
    stored, rows, entries = zeros(0.0, (_ROWS, d)), zeros(0.0, (_ROWS, d)), zeros(0.0, (_ROWS, d))
    norms, order = empty(0.0, (1, d)), empty(0, (d,))
    score, left = empty(0.0, (_ROWS,)), empty(0.0, (_ROWS,))  # Σ (s Π c)² and Π c of each row
    for item in range(first, last):
        R[:], E[:], norms[:] = 0, 0, 0
        for j in range(d):
            R[j, j] = root[item, j]
            order[j] = j
        rank = d if root[item, 0] > 0 else 0
        for low in range(0, n, _ROWS):
            count = smaller(_ROWS, n - low)
            stored[count:] = 0
            load_rows(view, item, low, low + count, stored)
            for k in range(_ROWS):
                for j in range(d):
                    rows[k, j] = stored[k, order[j]]
            copy_numbers(rows, entries)
            score[:], left[:] = 0, 1
            known = rank
            _sweep(R, E, known, rows, score, left)
            for k in range(count):
                if known == d:
                    break
                x = rows[k]
                for j in range(known, rank):  # directions that other rows of these four opened
                    c, s, R[j, j], E[j, j], score[k], left[k] = _turn(R[j, j], E[j, j], x[j], score[k], left[k])
                    for i in range(j + 1, d):
                        R[j, i], E[j, i], x[i] = _rotated(R[j, i], E[j, i], x[i], c, s)
                pivot = _pivot(x, entries[k], norms[0], rank, score[k], left[k])
                for j in range(d):
                    norms[0, j] = _length(norms[0, j], entries[k, j])
                if pivot >= 0:
                    for A in (R, E, rows, entries, norms):
                        _exchange(A, rank, pivot)
                    order[rank], order[pivot] = order[pivot], order[rank]
                    for j in range(rank, d):
                        R[rank, j] = x[j]
                    score[k] = 1
                    rank += 1
            for k in range(count):
                out[item, low + k] = smaller(score[k], 1.0)  # rounding may lift it above
