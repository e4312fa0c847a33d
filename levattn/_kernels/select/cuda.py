"""Selecting keys by their scores on a CUDA device.

The `starts` of a list are in main memory, because a call waits for their copy. The indices stay on the device.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import to_numpy
from levattn._core.types import Float64, Int64
from levattn._kernels.cuda_source import TYPES, WORDS, launch, namespace, on_device, with_steps

_TILE = 2048  # entries that a block lists
_SPAN = 8192  # entries whose digits a block counts
_DIGITS = 2048
_COPIED = 16  # rows that a block copies
_LONGEST_WORD = 8  # in bytes; longer numbers are copied as several
_BITS = {"float": (11, 11, 10), "double": (11, 11, 11, 11, 11, 9)}  # of the digits of a score, from the highest on


def held(array: Any) -> Any:
    """Return scores or flags where the selection reads them."""
    return on_device(array)


def threshold(scores: Any, present: Any, low: Any, high: Any) -> tuple[Any, Int64, Any]:
    """Return which scores are at least `high`, and list the scores in doubt."""
    xp, (b, n), real = namespace(), scores.shape, TYPES[scores.dtype.name]
    chosen, tiles = xp.empty(scores.shape, np.bool_), -(-n // _TILE)
    here = isinstance(low, np.ndarray) and isinstance(high, np.ndarray)  # then both are one copy to the device
    bounds = on_device(np.stack([low, high]), np.float64) if here else [on_device(x, np.float64) for x in (low, high)]
    arguments = [on_device(scores), on_device(present, np.bool_), bounds[0], bounds[1], n, tiles]
    counts, offsets, begins = (xp.empty(size, np.int64) for size in (b * tiles, b * tiles + 1, b + 1))
    launch("select", "count_listed", (real,), (b * tiles,), [*arguments, chosen, counts])
    launch("select", "find_places", (), (1,), [counts, b, tiles, offsets, begins])
    starts = to_numpy(begins)
    indices = xp.empty(int(starts[-1]), np.int64)
    grid = (b * tiles if len(indices) else 0,)
    launch("select", "fill_listed", (real,), grid, [*arguments, offsets, indices])
    return chosen, starts, indices


def reaching(scores: Any, present: Any, least: Float64) -> tuple[Int64, Any]:
    """List the scores that are not below `least` (b,), NaN among them."""
    return threshold(scores, present, least, np.full(len(least), np.nan))[1:]


def gathered(array: Any, starts: Int64, indices: Any) -> Any:
    """Return the listed rows of an array (b, n, ...), or (1, n, ...) for all matrices, in list order."""
    xp = namespace()
    array = on_device(array) if isinstance(array, np.ndarray) else array
    out = xp.empty((len(indices), *array.shape[2:]), array.dtype)
    columns = math.prod(array.shape[2:])
    rows, target = array.reshape(*array.shape[:2], columns), out.reshape(len(indices), columns)
    if array.itemsize > _LONGEST_WORD:
        rows = xp.ascontiguousarray(rows)
    words = np.dtype(f"u{min(array.itemsize, _LONGEST_WORD)}")
    rows, target = rows.view(words), target.view(words)
    keys, item, *within = with_steps(rows, 3)
    arguments = [keys, item if len(array) > 1 else 0, *within, on_device(starts, np.int64), len(starts) - 1]
    arguments += [on_device(indices, np.int64), len(indices), 0, target.shape[1], target]
    launch("select", "gather_rows", (WORDS[words.itemsize],), (-(-len(indices) // _COPIED),), arguments)
    return out


def largest(scores: Any, present: Any, size: int, margin: Float64) -> tuple[Any, Int64, Any]:
    """Return the `size` largest scores, and list the scores too close to call."""
    xp = namespace()
    least = _of_rank(on_device(scores), present, size) if size else xp.full(len(scores), np.inf)
    low, high = least * on_device(np.stack([1 - margin, 1 + margin]))
    return threshold(scores, present, low, xp.nextafter(high, np.inf))


def leaders(scores: Any, among: Any, margin: Float64) -> tuple[Int64, Any]:
    """List the scores that may be the largest among some keys."""
    xp = namespace()
    factor, above = on_device(np.stack([1 - margin, np.full(len(margin), np.inf)]))
    top = xp.where(on_device(among), scores, scores.dtype.type(0)).max(axis=1) if scores.shape[1] else 0.0
    return threshold(scores, among, top * factor, above)[1:]


def include(chosen: Any, starts: Int64, indices: Any, which: npt.NDArray[np.bool_]) -> None:
    """Set the flags of some of the listed rows."""
    items = np.repeat(np.arange(len(chosen)), np.diff(starts))
    if not which.all():
        items, indices = items[which], indices[on_device(np.flatnonzero(which))]
    chosen.reshape(-1)[on_device(items * chosen.shape[1]) + indices] = True


def maxima(scores: Any, among: Any) -> Float64:
    """Return the largest score among some keys of each matrix, (b,); 0 where there are none."""
    if not scores.shape[1]:
        return np.zeros(len(scores))
    chosen = namespace().where(on_device(among), scores, scores.dtype.type(0))
    return np.asarray(np.maximum(to_numpy(chosen.max(axis=1)), 0), np.float64)


def stacked(keys: Any, starts: Int64, indices: Any) -> tuple[Any, Any]:
    """Return the listed rows as a batch, and flags of its filled rows."""
    xp, counts = namespace(), np.diff(starts)
    width = int(counts.max(initial=0))
    whole = bool((counts == width).all())
    out = (xp.empty if whole else xp.zeros)((len(counts), width, keys.shape[2]), keys.dtype)
    words = np.dtype(f"u{keys.itemsize}")
    given, item, *within = with_steps(keys.view(words), 3)
    listed = [on_device(starts, np.int64), len(counts), on_device(indices, np.int64), len(indices)]
    arguments = [given, item if len(keys) > 1 else 0, *within, *listed, width, keys.shape[2], out.view(words)]
    launch("select", "gather_rows", (WORDS[keys.itemsize],), (-(-len(indices) // _COPIED),), arguments)
    return out, None if whole else xp.arange(width) < on_device(counts)[:, None]


def _of_rank(scores: Any, present: Any, size: int) -> Any:
    """Return the score of rank `size` from the largest of each matrix, (b,); −∞ where no more are present."""
    xp, real = namespace(), TYPES[scores.dtype.name]
    b, n = scores.shape
    spans = -(-n // _SPAN)
    zeros, ranks, least = xp.zeros(b * (1 + _DIGITS), np.uint64), xp.full(b, size, np.int64), xp.empty(b)
    prefixes, counts = zeros[:b], zeros[b:]
    flags = on_device(present, np.bool_)
    shift = sum(_BITS[real])
    for i, bits in enumerate(_BITS[real]):
        shift -= bits
        arguments = [scores, flags, n, spans, prefixes, shift, bits, counts]
        launch("select", "count_digits", (real,), (b * spans,), arguments)
        launch("select", "choose_digit", (real,), (b,), [counts, prefixes, ranks, bits, i == 0, shift == 0, least])
    return least
