"""Pruned attention on a CUDA device: clusters, whose first centers a block of threads chooses, scores and summaries.

Keys near rows are in `cuda_near`, selections in turn in `cuda_renewal`, and tokens that read a cache in `cuda_decode`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._kernels.cuda_source import (
    TYPES,
    launch,
    namespace,
    on_device,
    shared_limit,
    with_rows,
    with_steps,
)
from levattn._kernels.gram.cuda import longest_run, moments
from levattn._kernels.pruned import SAME, TILT, definition
from levattn._kernels.pruned.cuda_renewal import factor_queries as factor_queries
from levattn._kernels.pruned.definition import from_rows, sample_step, weighted_mean
from levattn._kernels.rows import BLOCK, Rows

# Constants of pairs.cuh, far.cu and labels.cu as well
_TILE = 512  # bytes of as many numbers as a tile of pairs of rows has rows
_PICKING, _COMPUTING = 1024, 512  # threads of a block that picks, with a table of distances and without
_EACH = 4  # rows of a table begin at multiples of so many numbers
_APART = 8  # numbers between rows in shared memory
_LANES, _MOST = 32, 8  # threads that share a row, and the most columns of each
_MERGED = 4  # the same where summaries are made

_SCORED = 64  # rows of a block of choose.cu

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
    each = count * _wide(count) * size
    if each <= _TABLES and count * size <= room:
        together = _TABLES // max(each, 1)
        for low in range(0, b, together):
            part = slice(low, low + together)
            _pick_by_table(X[part], weight[part], mean[part], step, picks[part])
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


def _pick_by_table(X: Any, weight: Any, mean: Any, step: int, picks: Any) -> None:
    """Write picks (b, R) by a table (b, count, wide) of the distances between candidates."""
    xp, types = namespace(), (TYPES[X.dtype.name],)
    some = on_device(X[:, ::step, :])
    b, count, d = some.shape
    wide = _wide(count)
    away = on_device(xp.sum((some - mean[:, None, :]) ** 2, axis=-1))
    table = xp.empty((b, count, wide), X.dtype)
    grid = (b * (-(-count // (_TILE // X.dtype.itemsize))) ** 2,)
    launch("far", "find_distances", types, grid, [some, count, d, wide, table])
    arguments = [table, away, weight, X.shape[1], step, count, wide, picks.shape[1], picks]
    shared = count * X.dtype.itemsize
    launch("far", "pick_rows", types, (b,), arguments, threads=_PICKING, shared=shared)


def _wide(count: int) -> int:
    """Return the numbers of a row of a table with so many columns."""
    return -(-count // _EACH) * _EACH


def summed_squares(X: Any, kind: Any) -> Any:
    """Return the sums (b, d, d) of x xᵀ over rows x of X (b, n, d) in float64; None for too many rows."""
    rows, (b, n, _) = Rows(with_rows(X), kind), X.shape
    if not b or not 0 < n <= BLOCK << longest_run(rows, b):
        return None
    return moments(rows, np.array([(item, item, 0, n) for item in range(b)], np.int64).reshape(-1, 4))


def reads(_: Any) -> bool:
    """Return True: `score_rows` and `choose_rows` read any arrays of CuPy."""
    return True


def score_rows(X: Any, along: Any, distance: Any, residual: bool) -> tuple[Any, Any]:
    """Return scores (b, n) of rows with places X (b, n, d), and flags of finite squares; see `LabelKernels`."""
    xp, (b, n, d), X = namespace(), X.shape, on_device(X)
    scores, finite = xp.empty((b, n), X.dtype), xp.empty((-(-b * n // _SCORED),), np.bool_)
    arguments = [X, on_device(along), on_device(distance), b * n, d, residual, SAME, scores, finite]
    launch("choose", "score_rows", (TYPES[X.dtype.name],), finite.shape, arguments)
    return scores, finite


def choose_rows(scores: Any, first: Any, count: int) -> tuple[Any, Any, Any]:
    """Return rows (b, count) with the largest scores, flags (b, n) of these, and of numbers; see `LabelKernels`."""
    xp, (b, n), scores = namespace(), scores.shape, on_device(scores)
    order, flags, sound = xp.empty((b, count), np.int64), xp.empty((b, n), np.bool_), xp.empty((b,), np.bool_)
    arguments = [scores, *with_steps(with_rows(first), 1), n, count, order, flags, sound]
    launch("choose", "choose_rows", (TYPES[scores.dtype.name],), (b,), arguments, threads=1024)
    return order, flags, sound


def assigned(X: Any, squares: Any, centers: Any) -> tuple[Any, Any]:
    """Return the nearest center of each row, (b, n) int64, on ties the first, and its squared distance, (b, n)."""
    xp, (b, n, d), R = namespace(), X.shape, centers.shape[1]
    X, squares, centers = map(on_device, (X, squares, centers))
    labels, distances = xp.empty((b, n), np.int64), xp.empty((b, n), X.dtype)
    grid = (b * -(-n // (_TILE // X.dtype.itemsize)),)
    arguments = [X, squares, centers, xp.sum(centers * centers, axis=-1), n, d, R, labels, distances]
    launch("labels", "find_nearest", (TYPES[X.dtype.name],), grid, arguments)
    return labels, distances


def label_sums(labels: Any, weight: Any, X: Any, R: int) -> tuple[Any, Any]:
    """Return ``Σ w x`` (b, R, d) and ``Σ w`` (b, R) over the rows with each label; -1 is no label."""
    xp, X, (b, n, d) = namespace(), with_rows(X), X.shape
    sums, mass = xp.empty((b, R, d), X.dtype), xp.empty((b, R), X.dtype)
    given = [*with_steps(X, 2), on_device(weight, X.dtype), on_device(labels, np.int32)]
    columns = 1 if d <= _LANES else _MOST
    grid = b * R, max(1, -(-d // (_LANES * columns)))
    launch("labels", "sum_members", (TYPES[X.dtype.name], str(columns)), grid, [*given, n, d, R, sums, mass])
    return sums, mass


def merge_rows(labels: Any, along: Any, weight: Any, K: Any, V: Any, R: int) -> tuple[Any, Any, Any]:
    """Return roles and tilts (b, n) of rows, and the sums (b, R, d + D + 3) of summaries; see `LabelKernels`."""
    xp, K, V, (b, n, d), D = namespace(), with_rows(K), with_rows(V), K.shape, V.shape[2]
    weight, along, labels = on_device(weight, K.dtype), on_device(along, K.dtype), on_device(labels, np.int32)
    levels, sums = xp.empty((b, R), K.dtype), xp.empty((b, R, d + D + 3), K.dtype)
    role, tilts, real = xp.empty((b, n), np.int64), xp.empty((b, n), K.dtype), TYPES[K.dtype.name]
    launch("labels", "level_members", (real,), (b * R,), [along, weight, labels, n, R, levels])
    arguments = [
        *with_steps(K, 2),
        *with_steps(V, 2),
        weight,
        labels,
        along,
        levels,
        TILT,
        n,
        d,
        D,
        R,
        sums,
        role,
        tilts,
    ]
    tiles = sum(-(-width // (_LANES * _MERGED)) for width in (d, D))
    launch("labels", "merge_members", (real, str(_MERGED)), (b * R, max(1, tiles)), arguments)
    return role, tilts, sums
