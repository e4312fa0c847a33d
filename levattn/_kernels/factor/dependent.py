"""Columns that represent all columns of keys, and triangles whose columns are moved into a row space."""

from __future__ import annotations

import math

import numpy as np

from levattn._kernels.factor.cholesky import STEP, factor_upper
from levattn._kernels.jit import helper, jit
from levattn._kernels.llvm import address
from levattn._kernels.scratch import empty, filled, zeros


@jit
def mark_independent(H, least, out):
    """Set `out` for the columns of a symmetric H with a unit diagonal that are independent of those before.

    The pivots of its Cholesky factorization decide, those above `least`.
    """
    d = len(H)
    width = (d + STEP - 1) // STEP * STEP
    R, c = zeros(0.0, (d, width)), filled(0.0, d, 1.0)
    for i in range(d):
        for j in range(i, d):
            R[i, j] = H[i, j]
    factor_upper(address(R), d, width, c, empty(0.0, (1,)), least)
    for i in range(d):
        out[i] = c[i] > 0


@helper
def _rotate(a, b, x, y, stop):
    """Rotate two columns up to a row so that (x, y) becomes (0, their norm)."""
    size = np.sqrt(x * x + y * y)
    if size > 0:
        sine, cosine = x / size, y / size
        for i in range(stop):
            left, right = a[i], b[i]
            a[i] = cosine * left - sine * right
            b[i] = sine * left + cosine * right


@jit
def project_triangle(columns, Q):
    """Subtract from a triangle its part in orthonormal directions Q (d, k); rotations make a triangle of the rest.

    ``columns[j]`` is column j of an upper-triangular (d, r) matrix T whose last column ends at the last row. Then T Tᵀ
    becomes ``P T Tᵀ P``, with P the projection.
    """
    r, d = columns.shape
    y = empty(0.0, (r,))
    for t in range(Q.shape[1]):
        for j in range(r):
            y[j] = 0.0
            for i in range(d - r + j + 1):
                y[j] += columns[j, i] * Q[i, t]
        for j in range(r - 1):  # all of the part moves into the last column
            _rotate(columns[j], columns[j + 1], y[j], y[j + 1], d - r + j + 2)
            y[j + 1] = math.hypot(y[j], y[j + 1])
        for i in range(d):
            columns[r - 1, i] -= Q[i, t] * y[r - 1]
        for j in range(r - 1, 0, -1):
            row = d - r + j
            _rotate(columns[j - 1], columns[j], columns[j - 1, row], columns[j, row], row + 1)
            columns[j - 1, row] = 0.0
