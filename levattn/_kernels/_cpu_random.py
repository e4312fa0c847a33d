"""The words of `levattn._random` in compiled code, for rows one after the other."""

from __future__ import annotations

import numpy as np

from levattn._kernels._cpu_jit import jit
from levattn._random import INCREMENTS, MULTIPLIERS, ROUNDS

__all__ = ["GROUP", "fill_words"]

GROUP = 4  # rows that share a counter

_M0, _M1 = (np.uint64(m) for m in MULTIPLIERS)
_I0, _I1 = (np.uint32(i) for i in INCREMENTS)
_HALF = np.uint64(32)


@jit
def fill_words(key0, key1, stream, column, first, out):
    """Write the words of one column for the rows from ``4 * first`` on; `out` has a multiple of four of them."""
    n = out.size // GROUP
    for i in range(n):
        group = np.uint64(first + i)
        a, b, c, d = np.uint32(group), np.uint32(group >> _HALF), np.uint32(column), np.uint32(stream)
        x, y = key0, key1
        for _ in range(ROUNDS):
            p, q = np.uint64(a) * _M0, np.uint64(c) * _M1
            a, c = np.uint32(q >> _HALF) ^ b ^ x, np.uint32(p >> _HALF) ^ d ^ y
            b, d = np.uint32(q), np.uint32(p)
            x, y = np.uint32(x + _I0), np.uint32(y + _I1)
        out[GROUP * i] = a
        out[GROUP * i + 1] = b
        out[GROUP * i + 2] = c
        out[GROUP * i + 3] = d
