"""Squared attention of queries: their normalisers, and heavy entries in two passes (count, then write them down).

For queries whose products cancel there are the same products as if in twice the precision.
"""

from __future__ import annotations

from levattn._kernels._cpu_jit import helper, jit
from levattn._kernels._cpu_scratch import empty
from levattn._kernels._cpu_simd import fused_multiply_add

__all__ = ["count_heavy", "fill_heavy", "norm_tasks", "product_tasks", "solve_tasks"]


@helper
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
    z, q = empty(0.0, (columns.shape[1],)), empty(0.0, (Q.shape[1],))
    for i in range(first, last):
        _logits(Q[i], columns, z)
        total = 0.0
        for j in range(len(z)):
            total += z[j] * z[j]
        squares[i] = total
        for c in range(len(q)):
            q[c] = abs(Q[i, c])
        _logits(q, sizes, z)
        total = 0.0
        for j in range(len(z)):
            total += z[j] * z[j]
        bounds[i] = total


@jit
def count_heavy(Q, columns, normalizers, epsilon, first, last, counts, captured):
    """Count the entries ``⟨q, k⟩² ≥ ε D`` of queries ``first:last`` and sum up the mass on all selected keys."""
    u = columns.shape[1]
    z = empty(0.0, (u,))
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
    z = empty(0.0, (u,))
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


@jit
def product_tasks(Q, columns, first, last, Z):
    """Write ⟨q, k⟩ of queries ``first:last`` and every column k, each rounded about once.

    Products are split without error and summed with their rounding errors (Dot2 of Ogita, Rump and Oishi 2005).
    """
    d, u = columns.shape
    low = empty(0.0, (u,))
    for t in range(first, last):
        high = Z[t]
        for j in range(u):
            high[j] = 0
            low[j] = 0
        for i in range(d):
            q = Q[t, i]
            k = columns[i]
            for j in range(u):
                product = q * k[j]
                error = fused_multiply_add(q, k[j], -product)
                total = high[j] + product
                part = total - high[j]
                low[j] += ((high[j] - (total - part)) + (product - part)) + error
                high[j] = total
        for j in range(u):
            high[j] += low[j]


@jit
def solve_tasks(columns, Q, first, last, X):
    """Write the solutions of ``B x = q`` for queries ``first:last``, with ``columns = Bᵀ`` lower triangular.

    Back substitution on pairs of float64 numbers, so that x has its digits up to condition numbers of about 10¹⁵.
    """
    d = columns.shape[0]
    high, low = empty(0.0, (d,)), empty(0.0, (d,))
    for t in range(first, last):
        for i in range(d):
            high[i] = Q[t, i]
            low[i] = 0
        for j in range(d - 1, -1, -1):
            total = high[j] + low[j]
            part = total - high[j]
            tail = (high[j] - (total - part)) + (low[j] - part)
            b = columns[j, j]
            x = total / b
            y = (fused_multiply_add(-x, b, total) + tail) / b
            X[t, j] = x + y
            column = columns[j]
            for i in range(j):
                product = column[i] * x
                error = fused_multiply_add(column[i], x, -product) + column[i] * y
                total = high[i] - product
                part = total - high[i]
                low[i] += ((high[i] - (total - part)) - (product + part)) - error
                high[i] = total
