"""The choice of keys by scores, of which some are too close to call for their precision."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices, to_numpy
from levattn._core.checks import TIE
from levattn._core.types import Float64
from levattn._kernels import Rows
from levattn._kernels.select import SelectKernels
from levattn.exceptions import AxesWarning, RankWarning
from levattn.linalg.factor import Factor
from levattn.sets.result import flag_counts

_Rescore = Callable[[npt.NDArray[np.int64], Any], Float64]  # float64 scores of the listed rows, one after the other
_SMALL_SCORE = 2.0**-100  # smaller float32 scores may have underflowed


def at_least(
    select: SelectKernels, factor: Factor, scores: Any, present: Any, epsilon: float, rescore: _Rescore
) -> tuple[Any, bool]:
    """Tell which scores are at least ε, and whether a doubtful score counted as such.

    Scores too close to ε for their precision are computed again in float64.
    """
    margin = _margin(factor)
    least = epsilon * (1 - margin) if epsilon > _SMALL_SCORE else np.zeros(len(margin))
    chosen, starts, near = select.threshold(scores, present, least, epsilon * (1 + margin))
    doubt = False
    if len(near):
        slack, again = np.repeat(np.maximum(TIE, 4 * factor.error), np.diff(starts)), rescore(starts, near)
        taken = ~(again < epsilon * (1 - slack))
        select.include(chosen, starts, near, taken)
        doubt = bool((taken & (slack > 2 * TIE) & ~(again >= epsilon * (1 + slack))).any())
    return chosen, doubt


def largest_scores(
    select: SelectKernels, factor: Factor, scores: Any, present: Any, size: int, rescore: _Rescore
) -> tuple[Any, Float64, bool]:
    """Choose by score descending, then index ascending; return the largest score of each matrix left out, too.

    Scores too close to call are computed again in float64. An error that is not small raises the largest score left
    out, and the last result tells whether chosen scores may then lie below it.
    """
    margin = _margin(factor)
    chosen, starts, close = select.largest(scores, present, size, margin)
    if len(close):
        again, taken = rescore(starts, close), np.zeros(len(close), np.bool_)
        missing = np.maximum(size - flag_counts(chosen), 0)
        for item, start in enumerate(starts[:-1].tolist()):
            order = np.argsort(-again[start : starts[item + 1]], kind="stable")
            taken[start + order[: missing[item]]] = True
        select.include(chosen, starts, close, taken)
    among = ~chosen if present is None else present & ~chosen
    top = select.maxima(scores, among) * (1 - margin)
    _, starts, rows = select.threshold(scores, among, top, np.full(len(top), np.inf))
    left, some = np.zeros(len(top)), np.flatnonzero(np.diff(starts))
    if len(some):
        left[some] = np.maximum.reduceat(rescore(starts, rows), starts[some])
    slack = 4 * factor.error
    raised = (slack > TIE) & (left > 0)
    left[raised] = np.minimum(left[raised] * (1 + slack[raised]), 1.0)
    unsure = raised & (slack > 2 * TIE)
    if not unsure.any():
        return chosen, left, False
    with np.errstate(divide="ignore", over="ignore"):
        reciprocal = select.maxima(1 / scores, chosen)  # of the smallest chosen score
    return chosen, left, bool((unsure & (reciprocal * left * (1 + margin) > 1)).any())


def rescored_all(
    select: SelectKernels, factor: Factor, matrices: Matrices, starts: npt.NDArray[np.int64], rows: Any
) -> Float64:
    """Return the scores of the listed keys of every matrix, computed in float64, one after the other."""
    keys, there = select.stacked(matrices.data, starts, rows)
    found, _ = factor.exactly().on(Rows(keys, matrices.format, there)).scores(as_float64=True)
    scores = to_numpy(found)
    return np.asarray(scores[np.arange(scores.shape[1]) < np.diff(starts)[:, None]])


def _margin(factor: Factor) -> Float64:
    """Return the relative difference below which scores of each matrix are too close to call."""
    return np.maximum(4 * factor.score_error, TIE)


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
