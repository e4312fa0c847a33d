"""Cholesky factors of small matrices without BLAS, whose threads would go on spinning beside the next kernel."""

from __future__ import annotations

import numpy as np

from levattn._kernels.jit import VECTOR_BYTES, helper, jit
from levattn._kernels.llvm import address, as_pointer, combine, larger, smaller, subtract_rows
from levattn._kernels.scratch import clear, empty, zeros

STEP = 8  # inner loops begin and end at multiples of this, so that they run over whole vectors
_LANES = VECTOR_BYTES // 8
POWER_STEPS = 30  # of power iteration, as in `norms`


@helper
def factor_upper(at, d, width, c, factor, least):
    """Replace the upper triangle of R (d, width) by its Cholesky factor and return the smallest pivot.

    `at` is the address of R, and `factor` room for one number. Columns with a `c` that is not positive are left out.
    The lower triangle then holds meaningless finite numbers. A pivot that is not positive ends the work. If `least` is
    positive, a pivot that is not above it sets `c` of its column to 0 instead, which leaves the column out.
    """
    R = as_pointer(at, 0.0)
    smallest = np.inf
    for block in range(0, d, 4):  # four rows at a time, so that the long inner loops load and store less
        end = smaller(block + 4, d)
        for k in range(block, end):
            top = k * width
            if not c[k] > 0:
                R[top + k] = 1.0
                continue
            pivot = R[top + k]
            if least > 0 and not pivot > least:
                c[k] = 0.0
                for j in range(k, width):
                    R[top + j] = 0.0
                R[top + k] = 1.0
                continue
            smallest = smaller(smallest, pivot)
            if not pivot > 0:
                return smallest
            factor[0] = 1.0 / np.sqrt(pivot)
            _scale(at, top, k, width, factor)
            for i in range(k + 1, end):
                factor[0] = R[top + i]
                _subtract_one(at, top, i, width, factor, i * width)
        top = block * width
        for i in range(end, d):  # unless these four are the last
            f = top + i
            _subtract_four(at, top, i, width, R[f], R[f + width], R[f + 2 * width], R[f + 3 * width], i * width)
    return smallest


@helper
def _scale(at, row, first, width, factor):
    """Multiply a row by `factor` from column `first` on; `at` is the matrix address, `row` the index of its start."""
    left = first // STEP * STEP
    place = at + 8 * (row + left)
    combine(factor, place, address(factor), width - left, place, 2)


@helper
def _subtract_one(source, row, first, width, factor, into):
    """Subtract a row times a factor, from column `first` on, from the row `into` of the same matrix."""
    left = first // STEP * STEP
    combine(factor, source + 8 * (row + left), address(factor), width - left, source + 8 * (into + left), 3)


@helper
def _subtract_four(source, row, first, width, a, b, c, e, into):
    """Subtract four rows times a, b, c and e, from column `first` on, from the row `into`."""
    left = first // STEP * STEP
    vectors = (width - left) // _LANES
    subtract_rows(source + 8 * (into + left), source + 8 * (row + left), width, a, b, c, e, vectors)


@helper
def _invert(at, d, width, c, to, sums, factor):
    """Write the inverse of the triangle R at `at` to zeros at `to`.

    Return the product of its 1- and ∞-norms, and the sum of its squares.
    """
    R, inverse = as_pointer(at, 0.0), as_pointer(to, 0.0)
    tallest, squares = 0.0, 0.0
    for i in range(d - 1, -1, -1):
        if not c[i] > 0:
            continue
        row = i * width
        k = i + 1
        while k + 4 <= d:
            f = row + k
            _subtract_four(to, k * width, k, width, R[f], R[f + 1], R[f + 2], R[f + 3], row)
            k += 4
        while k < d:
            factor[0] = R[row + k]
            _subtract_one(to, k * width, k, width, factor, row)
            k += 1
        inverse[row + i] = 1.0
        factor[0] = 1.0 / R[row + i]
        _scale(to, row, i, width, factor)
        total = 0.0
        for j in range(i, d):
            size = abs(inverse[row + j])
            total += size
            squares += size * size
            sums[j] += size
        tallest = larger(tallest, total)
    widest = 0.0
    for j in range(d):
        widest = larger(widest, sums[j])
    return tallest * widest, squares


@helper
def _squared_norm(at, d, width, x, y, factor):
    """Return the squared 2-norm of the upper triangle at `at`, to a few per cent, by power iteration.

    The lower triangle holds zeros. x and y are room for `width` numbers, and `factor` for one.
    """
    A = as_pointer(at, 0.0)
    size = 0.0
    for j in range(width):
        x[j] = np.cos((j + 1.0) ** 2) if j < d else 0.0
    for _ in range(POWER_STEPS):
        clear(y, 0, width)  # becomes −AᵀAx
        for i in range(d):
            row, left = i * width, i // STEP * STEP
            a = b = c = e = 0.0  # sums side by side, as one sum would wait for each term
            for j in range(left, width, 4):
                a += A[row + j] * x[j]
                b += A[row + j + 1] * x[j + 1]
                c += A[row + j + 2] * x[j + 2]
                e += A[row + j + 3] * x[j + 3]
            factor[0] = (a + b) + (c + e)
            combine(factor, at + 8 * (row + left), address(factor), width - left, address(y) + 8 * left, 3)
        before = after = 0.0
        for j in range(d):
            before += x[j] * x[j]
            after += y[j] * y[j]
        if after == 0:
            return 0.0
        size = np.sqrt(after / before)
        for j in range(d):
            x[j] = y[j] / np.sqrt(after)
    return size


@helper
def factor_items(G, shift, limits, first, last, W, figures):
    """See `cholesky_tasks`."""
    d = G.shape[1]
    width = (d + STEP - 1) // STEP * STEP
    R, inverse = zeros(0.0, (d, width)), empty(0.0, (d, width))
    x, y = empty(0.0, (width,)), empty(0.0, (width,))
    c, scale, sums, factor = empty(0.0, (d,)), empty(0.0, (d,)), empty(0.0, (d,)), empty(0.0, (1,))
    for s in range(first, last):
        for i in range(d):
            c[i] = np.sqrt(G[s, i, i])
            scale[i] = 1.0 / c[i] if c[i] > 0 else 0.0
        at, step = address(R), 8 * width
        source = address(G) + s * G.strides[0]
        for i in range(d):
            combine(R, source + i * 8 * d, address(scale) + i * 8, d, at + i * step, 2)
            combine(R, at + i * step, address(scale), d, at + i * step, 1)
            R[i, i] = 1.0 + shift  # the square of a rounded root may differ from it
        figures[0, s] = factor_upper(at, d, width, c, factor, 0.0)
        figures[1, s], figures[2, s] = np.inf, 0.0
        if figures[0, s] > 0:
            clear(inverse, 0, d * width)
            clear(sums, 0, d)
            to = address(inverse)
            bound, figures[2, s] = _invert(at, d, width, c, to, sums, factor)
            if limits[s] < bound < np.inf:
                bound = smaller(bound, _squared_norm(to, d, width, x, y, factor))
            figures[1, s] = bound
            target = address(W) + s * W.strides[0]
            for i in range(d):
                combine(R, to + i * step, address(scale) + i * 8, d, target + i * 8 * d, 2)


@jit
def cholesky_tasks(G, shift, limits, first, last, W, figures):
    """Factor ``G[first:last]`` (float64, symmetric) after scaling each diagonal to one.

    W becomes D⁻¹ times the inverse of the upper-triangular factor R of ``D⁻¹GD⁻¹ + shift I = RᵀR``. The `figures`
    (3, b) become the smallest pivot, the product of the 1- and ∞-norms of R⁻¹, and the sum of the squares of R⁻¹.
    Where the second is above its limit, the squared norm of R⁻¹ replaces it, if that is less. See `FactorKernels`.
    """
    factor_items(G, shift, limits, first, last, W, figures)
