"""Small dense algebra beside the kernels: BLAS would leave threads spinning where a kernel runs next."""

from __future__ import annotations

import numpy as np

from levattn._kernels._cpu_jit import VECTOR_BYTES, helper, jit
from levattn._kernels._cpu_scratch import empty, zeros
from levattn._kernels._cpu_simd import address, subtract_rows

__all__ = ["cholesky_tasks"]

_STEP = 8  # inner loops begin and end at multiples of this, so that they are whole vectors
_LANES = VECTOR_BYTES // 8


@helper
def _factor(R, c):
    """Replace the upper triangle of R (d, padded) by its Cholesky factor and return the smallest pivot.

    Columns whose `c` is not positive are left out. The lower triangle holds finite numbers of no meaning.
    """
    d, width = R.shape
    smallest = np.inf
    for block in range(0, d, 4):  # four rows at a time, so that the long inner loops load and store less
        end = min(block + 4, d)
        for k in range(block, end):
            top = R[k]
            if not c[k] > 0:
                top[k] = 1.0
                continue
            smallest = min(smallest, top[k])
            if not top[k] > 0:
                return smallest
            scale = 1.0 / np.sqrt(top[k])
            for j in range(k // _STEP * _STEP, width):
                top[j] *= scale
            for i in range(k + 1, end):
                f = top[i]
                row = R[i]
                for j in range(i // _STEP * _STEP, width):
                    row[j] -= f * top[j]
        if end == d:
            break
        t, u, v, w = R[block], R[block + 1], R[block + 2], R[block + 3]
        for i in range(end, d):
            left = i // _STEP * _STEP
            to = address(R) + (i * width + left) * 8
            rows = address(R) + (block * width + left) * 8
            subtract_rows(R, to, rows, width, t[i], u[i], v[i], w[i], (width - left) // _LANES)
    return smallest


@helper
def _invert(R, c, inverse, sums):
    """Write the inverse of the upper triangle of R to `inverse` and return the product of its 1- and ∞-norms."""
    d, width = R.shape
    for i in range(d):
        for j in range(width):
            inverse[i, j] = 0.0
        sums[i] = 0.0
    tallest = 0.0
    for i in range(d - 1, -1, -1):
        if not c[i] > 0:
            continue
        row = inverse[i]
        k = i + 1
        while k + 4 <= d:
            left = k // _STEP * _STEP
            to = address(inverse) + (i * width + left) * 8
            rows = address(inverse) + (k * width + left) * 8
            vectors = (width - left) // _LANES
            subtract_rows(R, to, rows, width, R[i, k], R[i, k + 1], R[i, k + 2], R[i, k + 3], vectors)
            k += 4
        while k < d:
            f = R[i, k]
            other = inverse[k]
            for j in range(k // _STEP * _STEP, width):
                row[j] -= f * other[j]
            k += 1
        row[i] = 1.0
        scale = 1.0 / R[i, i]
        total = 0.0
        for j in range(i // _STEP * _STEP, width):
            row[j] *= scale
        for j in range(i, d):
            size = abs(row[j])
            total += size
            sums[j] += size
        tallest = max(tallest, total)
    widest = 0.0
    for j in range(d):
        widest = max(widest, sums[j])
    return tallest * widest


@jit
def cholesky_tasks(G, shift, first, last, W, pivot, reach):
    """Factor ``G[first:last]`` (float64, symmetric) after scaling each diagonal to one.

    W becomes the inverse of the upper-triangular factor R of ``D⁻¹GD⁻¹ + shift I = RᵀR``, times D⁻¹ from the
    left, so that ``Wᵀ(G + shift D²)W = I``. `pivot` is the smallest pivot met (not positive: the item failed and
    its W is void); `reach` is the product of the 1- and ∞-norms of R⁻¹, a bound on its squared spectral norm, which
    carries the relative error of G to that of a score. Columns of zeros are left out: their row and column of W
    are zero.
    """
    d = G.shape[1]
    width = (d + _STEP - 1) // _STEP * _STEP
    R = zeros(0.0, (d, width))
    inverse = empty(0.0, (d, width))
    c, scale, sums = empty(0.0, (d,)), empty(0.0, (d,)), empty(0.0, (d,))
    for s in range(first, last):
        for i in range(d):
            c[i] = np.sqrt(G[s, i, i])
            scale[i] = 1.0 / c[i] if c[i] > 0 else 0.0
        for i in range(d):
            for j in range(d):
                R[i, j] = G[s, i, j] * scale[i] * scale[j]
            R[i, i] = 1.0 + shift  # the square of a rounded root may miss it
        pivot[s] = _factor(R, c)
        reach[s] = np.inf
        if pivot[s] > 0:
            reach[s] = _invert(R, c, inverse, sums)
            for i in range(d):
                for j in range(d):
                    W[s, i, j] = inverse[i, j] * scale[i]
