"""Factors and scores of many matrices on the CPU, each by one thread that reads its keys from memory once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from levattn._core.types import Flags, Float64
from levattn._kernels.factor import beside
from levattn._kernels.factor.cpu import CpuInverses
from levattn._kernels.gram.cpu import LAPACK_COLUMNS, levels_of, unit_of
from levattn._kernels.gram.squares import scores_at
from levattn._kernels.rows import Arithmetic, Rows
from levattn._kernels.rows.compiled import view_of
from levattn._kernels.rows.cpu import scratch_like
from levattn._kernels.tasks import share_one_by_one, threads_for

_CACHED = 1 << 21  # bytes of a matrix whose keys may still be in some cache when they are scored
_EACH = 4  # matrices for each thread from which no thread waits long for the last one


@dataclass(frozen=True)
class ScoreLimits:
    """Limits that each factor must meet for scores to follow at once; other factors are for the caller to judge.

    uneven: of a sample of the rows, up to which sums are in float32 (see `unevenness`).

    range: the least and the largest entry of the diagonal of the moments.

    resolved: a number whose product with the bound must be below 1.

    accepted, quick: the largest bound, for sums in float64 and in float32.

    single, spread: the largest bound and spread for scores by products in float32; for other keys they do not count.
    """

    uneven: float
    range: tuple[float, float]
    resolved: float
    accepted: float
    quick: float
    single: float
    spread: float


@dataclass(frozen=True, eq=False)
class FactoredHeads:
    """Moments, factors and scores of a batch; `quick` tells the moments that are sums in float32.

    Scores, in one arithmetic, are there for matrices that have the flag `scored`.
    """

    moments: Float64
    quick: Flags
    inverses: CpuInverses
    scores: Float64
    scored: Flags
    arithmetic: Arithmetic


def factored_heads(
    rows: Rows, sample: tuple[int, int], limits: ScoreLimits, arithmetic: Arithmetic
) -> FactoredHeads | None:
    """Return moments, factors and scores, up to 1, of matrices, or None where threads had better share each matrix.

    `sample` are the rows of the sample, from and to; none where all sums shall be in float64. Scores have the
    `arithmetic`, single or double.
    """
    b, n, d = rows.shape
    work = float(b) * n * d * d
    X, Y = scratch_like(d, "double"), scratch_like(d, arithmetic)
    whole = X.shape[1] == Y.shape[1] == d and d < LAPACK_COLUMNS and rows.digest is None
    if not whole or b < _EACH * threads_for(2 * work) or n * d * rows.keys.itemsize > _CACHED:
        return None
    tasks, samples = np.zeros((b, 4), np.int64), np.zeros((b if sample[1] else 0, 4), np.int64)
    tasks[:, 1], tasks[:, 3] = np.arange(b), n
    samples[:, 1], samples[:, 2:] = np.arange(len(samples)), sample
    unit = unit_of(d)
    sizes = np.array([unit, levels_of(tasks[:1], unit)], np.int64)
    given = limits.uneven, *limits.range, limits.resolved, limits.accepted, limits.quick, limits.single, limits.spread
    views = np.stack([view_of(rows, X.dtype), view_of(rows, Y.dtype)])
    moments, W, figures = np.empty((b, d, d)), np.zeros((b, d, d)), np.empty((3, b))
    uneven, bounds = np.full(b, np.inf), np.empty(b)
    scores, scored = rows.zeros(), np.zeros(b, np.bool_)
    read = views, X, Y, sizes, np.array(given), samples, tasks
    written = (moments, W, figures), uneven, bounds, 1.0, scores_at(scores), scored
    share_one_by_one(lambda *run: beside.head_tasks(*read, *run, *written), b, 2 * work)
    quick = uneven <= limits.uneven
    return FactoredHeads(moments, quick, CpuInverses(moments, 0.0, bounds, (W, figures)), scores, scored, arithmetic)
