"""Squared attention of queries: their normalisers, and heavy entries in two passes (count, then write them down)."""

from __future__ import annotations

import numpy as np

from levattn._kernels._cpu_jit import jit

__all__ = ["count_heavy", "fill_heavy", "norm_tasks"]


@jit
def _logits(q, columns, z):
    """Write ⟨q, k⟩ of every selected key; `columns` (d, u) holds one key a column."""
    d, u = columns.shape
    z[:] = 0
    whole = d // 4 * 4
    for i in range(0, whole, 4):
        a, b, c, e = q[i], q[i + 1], q[i + 2], q[i + 3]
        w, x, y, v = columns[i], columns[i + 1], columns[i + 2], columns[i + 3]
        for j in range(u):
            z[j] += (a * w[j] + b * x[j]) + (c * y[j] + e * v[j])
    for i in range(whole, d):
        a, w = q[i], columns[i]
        for j in range(u):
            z[j] += a * w[j]


@jit
def norm_tasks(Q, columns, sizes, first, last, squares, bounds):
    """Write ``‖N q‖²`` of queries ``first:last``, with ``columns = Nᵀ``, and ``‖|N| |q|‖²`` with ``sizes = |Nᵀ|``."""
    z = np.empty(columns.shape[1])
    for i in range(first, last):
        _logits(Q[i], columns, z)
        total = 0.0
        for j in range(len(z)):
            total += z[j] * z[j]
        squares[i] = total
        _logits(np.abs(Q[i]), sizes, z)
        total = 0.0
        for j in range(len(z)):
            total += z[j] * z[j]
        bounds[i] = total


@jit
def count_heavy(Q, columns, normalizers, epsilon, first, last, counts, captured):
    """Count the entries ``⟨q, k⟩² ≥ ε D`` of queries ``first:last`` and sum up the mass on all selected keys."""
    u = columns.shape[1]
    z = np.empty(u)
    for i in range(first, last):
        D = normalizers[i]
        count, mass = 0, 0.0
        if D > 0:
            _logits(Q[i], columns, z)
            for j in range(u):
                score = z[j] * z[j] / D
                mass += score
                count += score >= epsilon
        counts[i], captured[i] = count, mass


@jit
def fill_heavy(Q, columns, indices, normalizers, epsilon, first, last, starts, keys, values):
    """Write the entries that `count_heavy` counted to the places that begin at ``starts[i]``."""
    u = columns.shape[1]
    z = np.empty(u)
    for i in range(first, last):
        at = starts[i]
        if at == starts[i + 1]:
            continue
        _logits(Q[i], columns, z)
        for j in range(u):
            score = z[j] * z[j] / normalizers[i]
            if score >= epsilon:
                keys[at], values[at] = indices[j], score
                at += 1
