"""Warnings about keys of which no small set can be found: exchanged axes, and a rank that rounding hides."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices
from levattn.exceptions import AxesWarning, RankWarning

__all__ = ["warn_of_axes", "warn_of_rank"]

_MANY = 32  # matrices along an axis, from which it may be the axis of the keys


def warn_of_axes(matrices: Matrices, *, many: int = _MANY, stacklevel: int = 4) -> None:
    """Warn where the axis before the keys looks like the one that counts them."""
    if matrices.batch and 0 < matrices.n <= matrices.d < matrices.batch[-1] and matrices.batch[-1] >= many:
        warnings.warn(
            f"K has shape {(*matrices.batch, matrices.n, matrices.d)}: {matrices.n} keys of {matrices.d} columns in "
            f"each of {math.prod(matrices.batch)} matrices, so that each set may hold all its keys. Where the axes "
            "are (..., keys, heads, columns), give K.swapaxes(-3, -2)",
            AxesWarning,
            stacklevel=stacklevel,
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
