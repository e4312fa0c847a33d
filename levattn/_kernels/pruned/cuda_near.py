"""Keys near rows on a CUDA device, slots with log-weights as columns, and how both join."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._core.types import Int64
from levattn._kernels.cuda_source import launch, namespace, on_device, stored, with_rows, with_steps

# As in near.cu
_WARPS, _LANES = 8, 32  # of a block, and of a warp
_NEAR_ROWS = 4  # of a warp
NEAR_COLUMNS = (2, 4, 8)  # of a lane
MOST_NEAR, MOST_COLUMNS = 32, 32 * NEAR_COLUMNS[-1]  # keys near the rows of a warp, and columns of keys and values

_SLOT_THREADS = 128  # of a block of slots.cu


def has_few_near(first: Int64, last: Int64) -> bool:
    """Tell whether the rows of a warp together have at most MOST_NEAR keys near them."""
    ends = last[np.minimum(np.arange(len(last))[::_NEAR_ROWS] + _NEAR_ROWS - 1, len(last) - 1)]
    return bool(np.max(ends - first[::_NEAR_ROWS], initial=0) <= MOST_NEAR)


def attend_near(
    q: Any, rows: tuple[Any, Any], edges: tuple[Any, Any], members: tuple[Any, Any], held: Any, sums: Any, scale: float
) -> tuple[Any, Any, Any]:
    """Return log A (b, g, m), C / A or None, and (A a - C c) / A with its share of summaries, (b, g, m, D + 1).

    As `_with_near` in pruned/fused.py has them. `rows`: keys and values (b, n, ·). `edges`: first and last (m,) of
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
    columns = next(each for each in NEAR_COLUMNS if 32 * each >= max(d, D))
    arguments = [*with_steps(with_rows(q), 3), *with_steps(K, 2), *with_steps(V, 2), first, last, role, logs]
    arguments += [on_device(sums), *slots, scale, b, g, m, n, d, D, s, R, masses, gone, changes]
    types = stored(q.dtype), stored(K.dtype), str(columns)
    grid = (-(-b * g * -(-m // _NEAR_ROWS) // _WARPS),)
    launch("near", "attend_near", types, grid, arguments, threads=32 * _WARPS)
    return masses, gone, changes


def write_slots(
    kept: tuple[Any, Any, Any], sums: Any, scale: float, widths: tuple[int, int], kind: Any
) -> tuple[Any, Any, Any]:
    """Return keys and values (b, s + R + 1, ·) of slots with log-weights as columns, and log-weights (b, s + R).

    As `attended_slots` in pruned/fused.py has them, of the format `kind`. `kept`: keys and values (b, s, ·), and how
    many there are, or None. `sums`: (b, R, d + D + 3), of summaries in float32, or None. A last slot has the weight 1.
    `widths`: of the keys and of the values; columns beyond are left out.
    """
    xp, K, V = namespace(), on_device(kept[0]), on_device(kept[1])
    (b, s, d), D, R = K.shape, V.shape[2], 0 if sums is None else sums.shape[1]
    keys, values, logs = (
        xp.empty((b, s + R + 1, widths[0]), kind),
        xp.empty((b, s + R + 1, widths[1]), kind),
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
        *widths,
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
