"""Running second moments of tokens, or their diagonals, compiled: added row by row, whatever the chunks."""

from __future__ import annotations

from levattn._kernels.jit import jit
from levattn._kernels.llvm import smaller
from levattn._kernels.scratch import empty

BAND = 16  # rows of a second moment


@jit
def square_rows(X, mask, weights, rates, total, mass, full, bands, first, last):
    """Add ``w x²`` of rows x to `total`, or if `full` ``w x xᵀ``, row after row, and w to `mass`.

    A task is a matrix of rows, or if `full` a band of BAND rows of its moment.
    """
    d = X.shape[2]
    float64 = empty(0.0, (d,))
    for task in range(first, last):
        i, low = task // bands, task % bands * BAND
        high = smaller(low + BAND, d) if full else 1
        rate = rates[i] if len(rates) else 1.0
        for t in range(X.shape[1]):
            if len(mask) and not mask[i, t]:
                continue
            w = weights[i, t] if len(weights) else 1.0
            if low == 0:
                mass[i] = rate * mass[i] + w
            for j in range(d):
                float64[j] = X[i, t, j]
            for k in range(low, high):
                row, left = total[i, k], float64[k]
                for j in range(d):
                    row[j] = rate * row[j] + w * ((left if full else float64[j]) * float64[j])
