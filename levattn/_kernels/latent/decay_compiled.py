"""Linear recurrences, one for every channel of every sequence."""

from __future__ import annotations

from levattn._kernels.jit import jit
from levattn._kernels.llvm import smaller


@jit
def decay_tasks(a, x, start, width, reverse, first, last, out):
    """Write the recurrences of the tasks ``first:last`` to `out`; each is one item and `width` of its channels.

    Forward, ``out_t = a_t out_{t−1} + x_t`` from ``out_{−1} = start``; in reverse ``out_t = a_{t+1} out_{t+1} + x_t``
    from 0. Where a is 0 the other row is not read. The inner loop runs over channels, so that the compiler can
    vectorize it.
    """
    T, channels = x.shape[1], x.shape[2]
    groups = -(-channels // width)
    for task in range(first, last):
        item = task // groups
        low = (task - item * groups) * width
        high = smaller(low + width, channels)
        A, X, H = a[item], x[item], out[item]
        if T == 0:
            continue
        if reverse:
            for c in range(low, high):
                H[T - 1, c] = X[T - 1, c]
            for t in range(T - 2, -1, -1):
                for c in range(low, high):
                    H[t, c] = (A[t + 1, c] * H[t + 1, c] if A[t + 1, c] != 0 else 0) + X[t, c]
        else:
            for c in range(low, high):
                H[0, c] = (A[0, c] * start[item, c] if A[0, c] != 0 else 0) + X[0, c]
            for t in range(1, T):
                for c in range(low, high):
                    H[t, c] = (A[t, c] * H[t - 1, c] if A[t, c] != 0 else 0) + X[t, c]
