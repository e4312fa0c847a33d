"""Warnings about keys of which no small set can be found: exchanged axes, and a rank that rounding hides."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices
from levattn.exceptions import AxesWarning, RankWarning

_MANY = 32  # matrices along an axis, from which it may be the axis of the keys
_MANY_OF_CHUNK = 256  # the same for a chunk, which may have few rows of many heads
_WIDTHS = 16  # divides the usual widths of heads, which are at most
_WIDEST = 256


def warn_of_axes(matrices: Matrices, *, chunk: bool = False) -> None:
    """Warn where the axes of keys look exchanged; a first `chunk` of keys may be short."""
    n, d, batch = matrices.n, matrices.d, matrices.batch
    if not batch or not n:
        return
    remedy = None
    if n <= d < batch[-1] and batch[-1] >= (_MANY_OF_CHUNK if chunk else _MANY) and not (chunk and n == 1):
        remedy = "(..., keys, heads, columns), give K.swapaxes(-3, -2)"
    elif not chunk and n % _WIDTHS == 0 and d > _WIDEST and 4 * n <= d:
        remedy = "(..., heads, columns, keys), give K.swapaxes(-2, -1)"
    if remedy is not None:
        warnings.warn(
            f"K has shape {(*batch, n, d)}: {n} keys of {d} columns in each of {math.prod(batch)} matrices, so that "
            f"each set may hold all its keys. Where the axes are {remedy}",
            AxesWarning,
            stacklevel=4,
        )


def warn_of_rank(
    ones: npt.NDArray[np.int64], rank: Any, columns: int, epsilon: float, *, chunks: bool, stacklevel: int = 4
) -> None:
    """Warn where more keys of a set count as 1 than rank/ε allows: `ones` (...,) of them, from a superset for x².

    `chunks` tells whether the keys came in chunks, so that keys in memory may have a smaller set.
    """
    ranks = np.broadcast_to(np.asarray(rank), ones.shape)
    large = (ones > ranks / epsilon) & (ranks < columns)
    if not large.any():
        return
    place = tuple(int(i) for i in np.argwhere(large)[0])
    further = int(large.sum()) - 1
    of = f" at {place} of the batch" + (f" (and in {further} more matrices)" if further else "") if ones.ndim else ""
    remedy = "give the keys in memory to universal_set, or " if chunks else ""
    warnings.warn(
        f"K{of} is rank-deficient up to rounding (numerical rank {ranks[place]} of {columns} columns), so that "
        f"{ones[place]} keys count as 1, more than rank/epsilon = {ranks[place] / epsilon:.6g}. For a smaller set "
        f"{remedy}drop the columns that depend on others, or multiply K by an orthonormal basis of its row space",
        RankWarning,
        stacklevel=stacklevel,
    )
