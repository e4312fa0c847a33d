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
from levattn._kernels.pruned import JITTER, SAME, SPREAD_ROUNDING, TILT, RenewalArguments, definition
from levattn._kernels.pruned.definition import from_rows, sample_step, weighted_mean
from levattn._kernels.rows import BLOCK, Rows

# Constants of pairs.cuh, far.cu and labels.cu as well
_TILE = 512  # bytes of as many numbers as a tile of pairs of rows has rows
_PICKING, _COMPUTING = 1024, 512  # threads of a block that picks, with a table of distances and without
_EACH = 4  # rows of a table begin at multiples of so many numbers
_APART = 8  # numbers between rows in shared memory
_LANES, _MOST = 32, 8  # threads that share a row, and the most columns of each
_MERGED = 4  # the same where summaries are made

# As in near.cu
_WARPS = 8  # of a block
_NEAR_ROWS = 4  # of a warp
_NEAR_COLUMNS = (2, 4, 8)  # of a lane
MOST_NEAR, MOST_COLUMNS = 32, 32 * _NEAR_COLUMNS[-1]  # keys near the rows of a warp, and columns of keys and values

_SUMMED = 4096  # rows of a block that adds them
_SCORED = 64  # rows of a block of choose.cu
_SLOT_THREADS = 128  # of a block of slots.cu

# As in renew.cu
_PLACED, _PACK = 8, 4  # rows that a warp places at a time, and numbers that a thread reads at once
_RENEWED = 1 << 26  # numbers that one block reads for a renewal, by arithmetic in some two milliseconds
_COMPARED = 6  # numbers that it reads for each pair of items

_STATIC = 1024  # upper bound of the static shared memory of kernels, in bytes
_RENEWING = 16 * 32 * 8 + 1024  # the same of renew.cu
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


def row_sums(X: Any, chunks: int) -> Any:
    """Return the sums (chunks · b, d) in float64 over the rows of X (b, g, n, d) in each chunk of n."""
    (b, g, n, d), X = X.shape, with_rows(X)
    parts = max(1, -(-g * (n // chunks) // _SUMMED))  # by the rows alone, so that a sum has the same bits in any batch
    sums = namespace().empty((parts, chunks * b, d))
    arguments = [*with_steps(X, 3), b, g, n // chunks, d, _SUMMED, sums]
    grid = chunks * b, -(-d // _LANES), parts
    launch("measure", "sum_rows", (stored(X.dtype),), grid, arguments)
    return sums[0] if parts == 1 else running(sums, None)[-1]


def running(sums: Any, before: Any) -> Any:
    """Return sums (chunks, ...) up to and with each chunk, after others (...) or zeros, in place."""
    size = int(sums.size) // max(1, len(sums))
    launch("measure", "add_chunks", (), (-(-size // 256),), [sums, on_device(before), len(sums), size])
    return sums


def factor_queries(total: Any, second: Any, key_total: Any, counts: tuple[int, int], dtype: Any) -> Any:
    """Return a factor (b, d, d) of moments of queries, both means (b, d), and flags; see `LabelKernels`."""
    xp, (b, d), real = namespace(), total.shape, np.dtype(np.float32 if stored(dtype) == "float" else np.float64)
    if not b or _factor_bytes(d) > shared_limit() - _FACTORING:
        return None
    means = xp.empty((2, b, d), real)
    root, sound = _factored(total, second, (counts[0], 0, b), (key_total, counts[1]), means)
    return root, means[0], means[1], sound


def _factored(total: Any, second: Any, counts: tuple[int, int, int], of_keys: tuple[Any, int], means: Any) -> Any:
    """Return a factor (b, d, d) of moments of queries and flags (2, b), and write means (1 or 2, b, d).

    `counts`: of queries, how many more each group of matrices has than the one before, and its size. `of_keys`: the
    sums over keys and their number, where there are two means.
    """
    xp, (b, d), real = namespace(), total.shape, means.dtype
    root, sound, (key_total, keys) = xp.empty((b, d, d), real), xp.empty((2, b), np.bool_), of_keys
    given = [on_device(array, np.float64) for array in (total, second, key_total)]
    arguments = [*given[:2], float(counts[0]), float(counts[1]), counts[2], given[2], float(keys), d, JITTER]
    arguments += [SPREAD_ROUNDING, root, means[0], None if key_total is None else means[1], sound]
    shared = _factor_bytes(d)
    launch("measure", "factor_queries", (TYPES[real.name],), (b,), arguments, threads=512, shared=shared)
    return root, sound


def _factor_bytes(d: int) -> int:
    """Return the bytes of shared memory that a factor of d columns takes."""
    return 8 * (d * (d | 1) + d)


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


def has_few_near(first: Int64, last: Int64) -> bool:
    """Tell whether the rows of a warp together have at most MOST_NEAR keys near them."""
    ends = last[np.minimum(np.arange(len(last))[::_NEAR_ROWS] + _NEAR_ROWS - 1, len(last) - 1)]
    return bool(np.max(ends - first[::_NEAR_ROWS], initial=0) <= MOST_NEAR)


def attend_near(
    q: Any, rows: tuple[Any, Any], edges: tuple[Any, Any], members: tuple[Any, Any], held: Any, sums: Any, scale: float
) -> tuple[Any, Any, Any]:
    """Return log A (b, g, m), C / A or None, and (A a - C c) / A with its share of summaries, (b, g, m, D + 1).

    As `_with_near` in pruned/torch.py has them. `rows`: keys and values (b, n, ·). `edges`: first and last (m,) of
    the keys near each row; see `has_few_near`. `members`: roles (b, n) and log-weights, or None. `held`: keys and
    values (b, at least s + R, ·) and log-weights (b, s + R) of slots. `sums`: (b, R, d + D + 3), of summaries in
    float32. Both are None without summaries.
    """
    xp, (b, g, m, d), (K, V) = namespace(), q.shape, map(with_rows, rows)
    (n, D), role, logs = V.shape[1:], on_device(members[0], np.int64), on_device(members[1], np.float32)
    masses, gone, changes = xp.empty((b, g, m), np.float32), None, xp.empty((b, g, m, D + 1), np.float32)
    slots, R, s = (None, 0, None, 0, 0, None), 0, 0
    if sums is not None:
        keys, values, weights = held
        slots = on_device(keys), keys.shape[2], on_device(values), *values.shape[:0:-1], on_device(weights, np.float32)
        R, gone = sums.shape[1], xp.empty((b, g, m), np.float32)
        s = weights.shape[1] - R
    first, last = on_device(np.array(edges, np.int32))
    columns = next(each for each in _NEAR_COLUMNS if 32 * each >= max(d, D))
    arguments = [*with_steps(with_rows(q), 3), *with_steps(K, 2), *with_steps(V, 2), first, last, role, logs]
    arguments += [on_device(sums), *slots, scale, b, g, m, n, d, D, s, R, masses, gone, changes]
    types = stored(q.dtype), stored(K.dtype), str(columns)
    grid = (-(-b * g * -(-m // _NEAR_ROWS) // _WARPS),)
    launch("near", "attend_near", types, grid, arguments, threads=32 * _WARPS)
    return masses, gone, changes


def write_slots(kept: tuple[Any, Any, Any], sums: Any, scale: float, width: int, kind: Any) -> tuple[Any, Any, Any]:
    """Return keys and values (b, s + R + 1, width) of slots with log-weights as columns, and log-weights (b, s + R).

    As `attended_slots` in pruned/torch.py has them, of the format `kind`. `kept`: keys and values (b, s, ·), and how
    many there are, or None. `sums`: (b, R, d + D + 3), of summaries in float32, or None. A last slot has the weight 1.
    """
    xp, K, V = namespace(), on_device(kept[0]), on_device(kept[1])
    (b, s, d), D, R = K.shape, V.shape[2], 0 if sums is None else sums.shape[1]
    keys, values, logs = (
        xp.empty((b, s + R + 1, width), kind),
        xp.empty((b, s + R + 1, width), kind),
        xp.empty((b, s + R), np.float32),
    )
    arguments = [
        K,
        V,
        on_device(kept[2], np.int64),
        on_device(sums),
        scale,
        s,
        R,
        d,
        D,
        width,
        width,
        keys,
        values,
        logs,
    ]
    types = stored(keys.dtype), stored(K.dtype)
    launch("slots", "write_slots", types, (b * (s + R + 1),), arguments, threads=_SLOT_THREADS)
    return keys, values, logs


def widen_queries(q: Any, masses: Any, scale: float, width: int) -> Any:
    """Return rows (b, g, m, width) of queries for `write_slots`, with logits (b, g, m) of the last slot."""
    (b, g, m, d), q = q.shape, with_rows(q)
    rows = namespace().empty((b, g, m, width), q.dtype)
    arguments = [*with_steps(q, 3), masses, scale, b, g, m, d, width, rows]
    grid = (-(-b * g * m // (_SLOT_THREADS // _LANES)),)
    launch("slots", "widen_queries", (stored(q.dtype),), grid, arguments, threads=_SLOT_THREADS)
    return rows


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


def can_renew(d: int, D: int, slots: tuple[int, int], leaving: int) -> bool:
    """Tell whether one launch renews slots, of keys with d columns and values with D, and whether that is quick.

    `slots`: kept keys and summaries after a renewal.
    """
    n = sum(slots) + leaving
    read = n * (d * (slots[1] + 1) + _COMPARED * n)
    if not n or not 0 < d <= MOST_COLUMNS or D > MOST_COLUMNS or read > _RENEWED:
        return False
    return max(_factor_bytes(d) + _FACTORING, _renewal_bytes(n, slots[1], d, 0) + _RENEWING) <= shared_limit()


def _renewal_bytes(n: int, R: int, d: int, resident: int) -> int:
    """Return the bytes of shared memory of a renewal of n items, some of them resident."""
    return 4 * (7 * _whole(n) + resident * (_deep(d) + _APART) + _deep(d) + R + 1)


def _deep(d: int) -> int:
    """Return the numbers of a row of d columns in packs."""
    return -(-d // _PACK) * _PACK


def _whole(n: int) -> int:
    """Return a multiple of the rows that a warp of renew.cu places at a time."""
    return -(-n // _PLACED) * _PLACED


def renew_slots(x: RenewalArguments) -> tuple[list[Any], Any, Any]:
    """Return the arrays of `Slots` of renew.cu after renewals, flags of sound moments, and of finite numbers.

    Keys are of float32, and numbers of queries rise in equal steps. See `can_renew`.
    """
    xp, turns, (b, rows, d), D = namespace(), len(x.queries), x.keys.shape, x.values.shape[2]
    K, V, leaving, R, single = with_rows(x.keys), with_rows(x.values), rows // turns, x.R, np.float32
    s, before = x.kept.shape[1], 0 if x.summaries is None else x.summaries.weight.shape[1]
    n, size = before + s + leaving, min(s + leaving, x.size + min(x.sinks, x.oldest + leaving))
    query = xp.empty((1, turns * b, d), single)
    step = x.queries[1] - x.queries[0] if turns > 1 else 0
    root, sound = _factored(x.total, x.second, (x.queries[0], step, b), (None, 0), query)
    items = b * (turns + x.in_turn)
    new = [xp.empty((items, size, *wide), kind) for wide, kind in (((d,), single), ((D,), single), ((), np.int64))]
    sums = [(d,), (D,), (), (), ()] + [()] * x.bounded
    new += [xp.empty((items, R, *wide)) if R else None for wide in sums] + [None] * (6 - len(sums))
    room = shared_limit() - _RENEWING - _renewal_bytes(n, R, d, 0)
    resident = min(_whole(n), room // (4 * (_deep(d) + _APART)) // _PLACED * _PLACED)
    outside = xp.empty((b, _whole(n) - resident, _deep(d)), single) if resident < n else None
    finite = xp.empty((turns * b,), np.bool_)
    arguments = [
        *with_steps(K, 2),
        *with_steps(V, 2),
        root,
        query,
        on_device(x.origin, single),
        b,
        turns,
        leaving,
        d,
        D,
    ]
    arguments += [x.oldest, x.sinks, x.residual, x.in_turn, SAME, TILT, resident, outside, *_held(x), s, before]
    columns = next(each for each in _NEAR_COLUMNS if 32 * each >= max(d, D))
    shared = _renewal_bytes(n, R, d, resident)
    given = [*arguments, *new, size, R, finite]
    threads = 256 if columns > _NEAR_COLUMNS[-2] else 512
    launch("renew", "renew_slots", (str(columns),), (b,), given, threads=threads, shared=shared)
    return new, sound, finite


def _held(x: RenewalArguments) -> list[Any]:
    """Return the arrays of `Slots` of renew.cu before renewals."""
    held = x.summaries
    kept = [on_device(x.kept, np.float32), on_device(x.kept_values, np.float32), on_device(x.kept_places, np.int64)]
    if held is None:
        return [*kept, *(None,) * 6]
    radius = x.radius
    if x.bounded and radius is None:
        radius = namespace().full(held.weight.shape, np.inf)
    return [*kept, *map(on_device, (held.keys, held.values, held.weight, held.offset, held.count, radius))]
