"""Clusters for pruned attention on a CUDA device: one block of threads a matrix chooses their first centers."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._kernels.cuda_source import TYPES, launch, namespace, on_device, shared_limit
from levattn._kernels.pruned import definition
from levattn._kernels.pruned.definition import from_rows, sample_step, weighted_mean

# Constants of far.cu as well
_PICKING, _COMPUTING = 1024, 512  # threads of a block, with a table of distances and without
_EACH, _TILE = 4, 64  # numbers of a thread along a side of a tile of distances, and of a block
_APART = 8  # numbers between rows in shared memory

_STATIC = 1024  # upper bound of the static shared memory of kernels, in bytes
_TABLES = 1 << 31  # bytes of tables of distances at a time


def cluster(X: Any, weight: Any, R: int, iterations: int) -> tuple[Any, Any]:
    """Return the cluster of each row, (b, n), and its squared distance to the center."""
    return from_rows(X, weight, far_rows(X, weight, R), iterations)


def far_rows(X: Any, weight: Any, R: int) -> Any:
    """Return the rows (b, R) int64 that are the first centers of clusters.

    With a table of the distances between candidates, each pick reads one row of it. The size of one matrix determines
    whether there is a table. The matrices whose tables fit side by side take two launches.
    """
    xp, (b, n, d), size = namespace(), X.shape, X.dtype.itemsize
    step = sample_step(n, R)
    count = -(-n // step)
    room = shared_limit() - _STATIC
    if room < d * size:  # a row does not fit
        return definition.far_rows(X, weight, R)
    X, weight, mean = on_device(X), on_device(weight, X.dtype), on_device(weighted_mean(X, weight))
    picks = xp.empty((b, R), np.int64)
    wide = -(-count // _EACH) * _EACH
    each = count * wide * size
    if each <= _TABLES and count * size <= room:
        together = _TABLES // max(each, 1)
        for low in range(0, b, together):
            part = slice(low, low + together)
            _pick_by_table(X[part], weight[part], mean[part], step, count, wide, picks[part])
        return picks
    room -= d * size
    inside = count * size <= room
    room -= inside * count * size
    resident = min(count, room // ((d + _APART) * size))
    outside = None if inside else xp.empty((b, count), X.dtype)
    shared = (d + inside * count + resident * (d + _APART)) * size
    arguments = [X, weight, mean, n, d, step, count, R, resident, inside, outside, picks]
    launch("far", "far_rows", (TYPES[X.dtype.name],), (b,), arguments, threads=_COMPUTING, shared=shared)
    return picks


def _pick_by_table(X: Any, weight: Any, mean: Any, step: int, count: int, wide: int, picks: Any) -> None:
    """Write picks (b, R) by a table (b, count, wide) of the distances between candidates."""
    xp, (b, n, d), types = namespace(), X.shape, (TYPES[X.dtype.name],)
    table, away = xp.empty((b, count, wide), X.dtype), xp.empty((b, count), X.dtype)
    grid = (b * (count // _TILE + 1) ** 2,)
    launch("far", "find_distances", types, grid, [X, mean, n, d, step, count, wide, table, away])
    arguments = [table, away, weight, n, step, count, wide, picks.shape[1], picks]
    shared = count * X.dtype.itemsize
    launch("far", "pick_rows", types, (b,), arguments, threads=_PICKING, shared=shared)
