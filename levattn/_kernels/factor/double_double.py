"""Products of matrices in twofold arithmetic: each number is the sum of two floats, the second the error of the first.

That keeps about 96 bits: second moments of keys of any condition number up to the rank tolerance lose nothing.
"""

from __future__ import annotations

from levattn._kernels.jit import VECTOR_BYTES, jit
from levattn._kernels.llvm import address, smaller, twofold_tile

__all__ = ["TALL", "WIDTH", "product_rows"]

TALL = 2  # rows of a tile
_WIDE = 2  # its vectors
_ROWS = 32  # after which the sum takes up its errors: those of copied rows all have one sign
WIDTH = _WIDE * (VECTOR_BYTES // 8)


@jit
def product_rows(A, X, first, last, upper, high, low):
    """Add the rows ``first:last`` of ``AᵀX`` to the twofold matrix ``high + low``, from the diagonal on if `upper`.

    All are C arrays of float64; A and X have at least one row. The number of rows to add is a multiple of TALL, and
    the number of columns one of WIDTH.
    """
    n, d = X.shape
    for i in range(first, last, TALL):
        for j in range(i // WIDTH * WIDTH if upper else 0, d, WIDTH):
            at = (i * d + j) * 8
            for r in range(0, n, _ROWS):
                a, x = address(A) + (r * d + i) * 8, address(X) + (r * d + j) * 8
                rows = smaller(_ROWS, n - r)
                twofold_tile(X, TALL, _WIDE, a, x, d, rows, address(high) + at, address(low) + at, d)
