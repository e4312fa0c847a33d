"""Small dense algebra beside the kernels: BLAS would leave threads spinning where a kernel runs next."""

from __future__ import annotations

import numpy as np

from levattn._kernels._cpu_jit import jit

__all__ = ["cholesky_tasks"]


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
    R = np.empty((d, d))
    c = np.empty(d)
    sums = np.empty(d)
    for s in range(first, last):
        for i in range(d):
            c[i] = np.sqrt(G[s, i, i])
        for i in range(d):
            for j in range(i, d):
                R[i, j] = G[s, i, j] / c[i] / c[j] if c[i] > 0 and c[j] > 0 else 0.0
            R[i, i] += shift
        smallest = np.inf
        for k in range(d):
            if not c[k] > 0:
                R[k, k] = 1.0
                continue
            p = R[k, k]
            smallest = min(smallest, p)
            if not p > 0:
                break
            root = np.sqrt(p)
            R[k, k] = root
            for j in range(k + 1, d):
                R[k, j] /= root
            for i in range(k + 1, d):
                f = R[k, i]
                for j in range(i, d):
                    R[i, j] -= f * R[k, j]
        pivot[s] = smallest
        if not smallest > 0:
            reach[s] = np.inf
            continue
        inverse = W[s]
        inverse[:] = 0
        tallest = 0.0
        sums[:] = 0
        for i in range(d - 1, -1, -1):
            if not c[i] > 0:
                continue
            row = inverse[i]
            for k in range(i + 1, d):
                f = R[i, k]
                other = inverse[k]
                for j in range(k, d):
                    row[j] -= f * other[j]
            row[i] = 1.0
            total = 0.0
            for j in range(i, d):
                row[j] /= R[i, i]
                total += abs(row[j])
                sums[j] += abs(row[j])
            tallest = max(tallest, total)
        for i in range(d):
            if c[i] > 0:
                for j in range(i, d):
                    inverse[i, j] /= c[i]
        widest = 0.0
        for j in range(d):
            widest = max(widest, sums[j])
        reach[s] = tallest * widest
