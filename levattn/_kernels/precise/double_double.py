"""Products and solutions in numbers that are sums of two floats, or of three, each the error of the one before.

Two keep 94 bits. Three keep 144: in these second moments hold directions that rounding to float64 added to keys.
"""

from __future__ import annotations

from levattn._kernels.gram.simd import expansion_tile
from levattn._kernels.jit import VECTOR_BYTES, helper, jit
from levattn._kernels.llvm import address, fused_multiply_add, smaller
from levattn._kernels.scratch import empty

TALL = 2  # rows of a tile
_VECTORS = 2  # vectors of a tile
_ROWS = 32  # after so many rows the sum takes up its errors, because the errors of copied rows all have one sign
WIDTH = _VECTORS * (VECTOR_BYTES // 8)


@jit
def product_rows(A, X, first, last, upper, parts):
    """Add the rows ``first:last`` of ``AᵀX`` to the sum of two or three matrices, from the diagonal on if `upper`.

    All are C arrays of float64; A and X have at least one row. The number of rows to add is a multiple of TALL, and
    the number of columns a multiple of WIDTH.
    """
    n, d = X.shape
    three, half = parts.shape[0] == 3, WIDTH // _VECTORS
    for i in range(first, last, TALL):
        for j in range(i // WIDTH * WIDTH if upper else 0, d, WIDTH):
            at = (i * d + j) * 8
            for r in range(0, n, _ROWS):
                a, x = address(A) + (r * d + i) * 8, address(X) + (r * d + j) * 8
                rows, out = smaller(_ROWS, n - r), address(parts) + at
                if three:  # whose sums take half as many vectors, for which there are registers
                    for v in range(_VECTORS):
                        skip = v * half * 8
                        expansion_tile(X, 3, TALL, 1, a, x + skip, d, rows, out + skip, d, d * d)
                else:
                    expansion_tile(X, 2, TALL, _VECTORS, a, x, d, rows, out, d, d * d)


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


@helper
def _exact_sum(a, b):
    """Return the sum of two numbers, and its rounding error."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


@jit
def split_means(origin, high, low, counts, least, most, parts):
    """Write three parts (b, 3, d) of means: an origin (b, d), and twofold sums divided by counts (b,).

    Tell whether all nonzero origins and sums have magnitudes from `least` to `most`.
    """
    in_range = True
    for item in range(origin.shape[0]):
        n = counts[item]
        for c in range(origin.shape[1]):
            quotient = high[item, c] / n
            rest = (fused_multiply_add(-quotient, n, high[item, c]) + low[item, c]) / n
            mean, second = _exact_sum(origin[item, c], quotient)
            second, third = _exact_sum(second, rest)
            mean, second = _exact_sum(mean, second)
            parts[item, 0, c] = mean
            parts[item, 1, c], parts[item, 2, c] = _exact_sum(second, third)
            for size in (abs(origin[item, c]), abs(high[item, c])):
                in_range = in_range and (size == 0 or least <= size <= most)
    return in_range


@jit
def solve_tasks(columns, Q, first, last, X):
    """Write the solutions of ``B x = q`` for queries ``first:last``, with ``columns = Bᵀ`` lower triangular.

    Back substitution on pairs of float64 numbers keeps the digits of x up to condition numbers of about 10¹⁵.
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
