"""How much longer rows are in some directions than in others, by the second moment of a few of them."""

from __future__ import annotations

from levattn._kernels.gram.moments import sum_tasks
from levattn._kernels.jit import helper, jit
from levattn._kernels.scratch import empty


@helper
def _unevenness(G, rows, inverse):
    """Return ‖C‖²/d − d/m for the moment C of m `rows` whose columns are scaled to unit norm, and room for d numbers.

    A column of zeros has no weight.
    """
    d = len(inverse)
    for j in range(d):
        inverse[j] = 0.0 if G[j, j] == 0 else 1.0 / G[j, j]
    total = 0.0
    for i in range(d):
        a = b = c = e = 0.0  # sums side by side, as one sum would wait for each term
        for j in range(0, d - 3, 4):
            a += G[i, j] * G[i, j] * inverse[j]
            b += G[i, j + 1] * G[i, j + 1] * inverse[j + 1]
            c += G[i, j + 2] * G[i, j + 2] * inverse[j + 2]
            e += G[i, j + 3] * G[i, j + 3] * inverse[j + 3]
        for j in range(d // 4 * 4, d):
            a += G[i, j] * G[i, j] * inverse[j]
        total += ((a + b) + (c + e)) * inverse[i]
    return total / d - d / rows


@helper
def sample_items(view, X, levels, d, samples, first, last, moments, uneven):
    """Write the unevenness of the rows of each sample (slot, item, from row, to row) of `d` columns, by its number.

    The sums have the precision of X. `moments` is room for them, one for each sample.
    """
    inverse = empty(0.0, (d,))
    for t in range(first, last):
        rows = samples[t, 3] - samples[t, 2]
        sum_tasks(view, X, rows, levels, samples, t, t + 1, moments)
        uneven[t] = _unevenness(moments[t], rows, inverse)


@jit
def unevenness_tasks(moments, rows, first, last, uneven):
    """Write the unevenness of samples of so many `rows`, by their moments (b, d, d) as `sample_items` sums them."""
    inverse = empty(0.0, (moments.shape[1],))
    for t in range(first, last):
        uneven[t] = _unevenness(moments[t], rows, inverse)
