"""Causal selections on a CUDA device, in turn: sums over queries, their factor, and the slots after each."""

from __future__ import annotations

from typing import Any

import numpy as np

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
from levattn._kernels.pruned import JITTER, SAME, SPREAD_ROUNDING, TILT, RenewalArguments
from levattn._kernels.pruned.cuda_near import MOST_COLUMNS, NEAR_COLUMNS

# As in measure.cu
_LANES = 32  # columns of a block that adds rows
_SUMMED = 4096  # rows of such a block
_FACTORING = 8 * 512 + 1024  # upper bound of its static shared memory, in bytes

# As in renew.cu
_PLACED, _PACK = 8, 4  # rows that a warp places at a time, and numbers that a thread reads at once
_APART = 8  # numbers between rows in shared memory
_RENEWING = 16 * 32 * 8 + 1024  # upper bound of its static shared memory, in bytes
_RENEWED = 1 << 26  # numbers that one block reads for a renewal, by arithmetic in some two milliseconds
_COMPARED = 6  # numbers that it reads for each pair of items


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
    columns = next(each for each in NEAR_COLUMNS if 32 * each >= max(d, D))
    shared = _renewal_bytes(n, R, d, resident)
    given = [*arguments, *new, size, R, finite]
    threads = 256 if columns > NEAR_COLUMNS[-2] else 512
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
