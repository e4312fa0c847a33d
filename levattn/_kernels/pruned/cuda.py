"""Pruned attention on a CUDA device: clusters, whose first centers a block of threads chooses, and keys near rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._core.types import Int64
from levattn._kernels.cuda_source import (
    TYPES,
    launch,
    namespace,
    on_device,
    shared_limit,
    stored,
    with_rows,
    with_steps,
)
from levattn._kernels.gram.cuda import longest_run, moments
from levattn._kernels.pruned import JITTER, SPREAD_ROUNDING, definition
from levattn._kernels.pruned.definition import from_rows, sample_step, weighted_mean
from levattn._kernels.rows import BLOCK, Rows

# Constants of pairs.cuh, far.cu and labels.cu as well
_TILE = 512  # bytes of as many numbers as a tile of pairs of rows has rows
_PICKING, _COMPUTING = 1024, 512  # threads of a block that picks, with a table of distances and without
_EACH = 4  # rows of a table begin at multiples of so many numbers
_APART = 8  # numbers between rows in shared memory
_LANES, _MOST = 32, 8  # threads that share a row, and the most columns of each

# As in near.cu
_WARPS = 8  # of a block
_NEAR_ROWS = 4  # of a warp
_NEAR_COLUMNS = (2, 4, 8)  # of a lane
MOST_NEAR, MOST_COLUMNS = 32, 32 * _NEAR_COLUMNS[-1]  # keys near the rows of a warp, and columns of keys and values

_STATIC = 1024  # upper bound of the static shared memory of kernels, in bytes
_FACTORING = 8 * 512 + 1024  # the same of measure.cu
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


def factor_queries(total: Any, second: Any, key_total: Any, counts: tuple[int, int], dtype: Any) -> Any:
    """Return a factor (b, d, d) of moments of queries, both means (b, d), and flags of faults; see `LabelKernels`."""
    xp, (b, d), real = namespace(), total.shape, np.dtype(np.float32 if stored(dtype) == "float" else np.float64)
    shared = 8 * (d * (d | 1) + d)
    if not b or shared > shared_limit() - _FACTORING:
        return None
    given = [on_device(array, np.float64) for array in (total, second, key_total)]
    root, means, wrong = xp.empty((b, d, d), real), xp.empty((2, b, d), real), xp.empty((b, 2), np.bool_)
    arguments = [*given[:2], float(counts[0]), given[2], float(counts[1]), d, JITTER, SPREAD_ROUNDING]
    arguments += [root, means[0], means[1], wrong]
    launch("measure", "factor_queries", (TYPES[real.name],), (b,), arguments, threads=512, shared=shared)
    return root, means[0], means[1], wrong


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


def has_few_near(first: Int64, last: Int64) -> bool:
    """Tell whether the rows of a warp together have at most MOST_NEAR keys near them."""
    ends = last[np.minimum(np.arange(len(last))[::_NEAR_ROWS] + _NEAR_ROWS - 1, len(last) - 1)]
    return bool(np.max(ends - first[::_NEAR_ROWS], initial=0) <= MOST_NEAR)


def attend_near(
    q: Any, rows: tuple[Any, Any], edges: tuple[Any, Any], members: tuple[Any, Any], held: Any, sums: Any, scale: float
) -> tuple[Any, Any, Any]:
    """Return log A (b, g, m), C / A or None, and (A a - C c) / A with its share of summaries, (b, g, m, D + 1).

    As `_with_near` in pruned/torch.py has them. `rows`: keys and values (b, n, ·). `edges`: first and last (m,) of
    the keys near each row; see `has_few_near`. `members`: roles (b, n) and log-weights, or None. `held`: keys, values
    and log-weights of slots. `sums`: (b, R, d + D + 3), of summaries in float32. Both are None without summaries.
    """
    xp, (b, g, m, d), (K, V) = namespace(), q.shape, map(with_rows, rows)
    (n, D), role, logs = V.shape[1:], on_device(members[0], np.int64), on_device(members[1], np.float32)
    masses, gone, changes = xp.empty((b, g, m), np.float32), None, xp.empty((b, g, m, D + 1), np.float32)
    slots, R = (None, None, 0, None), 0
    if sums is not None:
        keys, values, weights = held
        slots = on_device(keys), on_device(values), values.shape[2], on_device(weights, np.float32)
        R, gone = sums.shape[1], xp.empty((b, g, m), np.float32)
    first, last = on_device(np.array(edges, np.int32))
    s = 0 if sums is None else held[0].shape[1] - R
    columns = next(each for each in _NEAR_COLUMNS if 32 * each >= max(d, D))
    arguments = [*with_steps(with_rows(q), 3), *with_steps(K, 2), *with_steps(V, 2), first, last, role, logs]
    arguments += [on_device(sums), *slots, scale, b, g, m, n, d, D, s, R, masses, gone, changes]
    types = stored(q.dtype), stored(K.dtype), str(columns)
    grid = (-(-b * g * -(-m // _NEAR_ROWS) // _WARPS),)
    launch("near", "attend_near", types, grid, arguments, threads=32 * _WARPS)
    return masses, gone, changes


def join_near(found: Any, sums: Any, near: tuple[Any, Any, Any]) -> tuple[Any, Any]:
    """Return outputs (rows, D), and the shares of summaries (rows,), of attention to slots and to near keys.

    `found`: (rows, at least D + 2), of slots, or with the logarithms `sums` (rows,) of their masses (rows, D), see
    near.cu. `near`: from `attend_near`.
    """
    xp, rows, (masses, gone, changes) = namespace(), found.shape[0], near
    D = changes.shape[-1] - 1
    Y, rests = xp.empty((rows, D), found.dtype), xp.empty((rows,), np.float32)
    sums = on_device(sums, np.float32)
    arguments = [*with_steps(with_rows(found), 1), sums, masses, changes, gone, rows, D, Y, rests]
    types = (stored(found.dtype),)
    launch("near", "join_near", types, (-(-rows // _WARPS),), arguments, threads=32 * _WARPS)
    return Y, rests
