"""Selecting keys by their scores, in main memory, whatever holds the keys.

Some rows of each matrix of a batch are listed as ``(starts, indices)``: ``indices[starts[i]:starts[i + 1]]`` are the
rows of matrix i, ascending.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from levattn._core.arrays import array_namespace, take_rows, to_device, to_numpy
from levattn._core.sparse import Csr
from levattn._core.types import Flags, Float64, Int64


def held(array: Any) -> Any:
    """Return scores or flags where the selection reads them."""
    return to_numpy(array)


def threshold(scores: Any, present: Any, low: Float64, high: Float64) -> tuple[Flags, Int64, Int64]:
    """Return which scores (b, n) of keys that are present are at least `high`, and list the scores in doubt.

    These are neither at least `high` nor below `low` (both (b,)); NaN is in doubt whatever the bounds are. `present`
    is (b, n) or None.
    """
    low, high = _upward(low, scores.dtype), _upward(high, scores.dtype)
    chosen: Flags = scores >= high[:, None]
    doubtful = ~(scores < low[:, None]) & ~chosen
    if present is not None:
        chosen &= present
        doubtful &= present
    return chosen, *_listed(doubtful)


def reaching(scores: Any, present: Any, least: Float64) -> tuple[Int64, Int64]:
    """List the scores (b, n) of present keys that are not below `least` (b,), NaN among them."""
    flags = ~(scores < _upward(least, scores.dtype)[:, None])
    if present is not None:
        flags &= present
    return _listed(flags)


def _listed(flags: Flags) -> tuple[Int64, Int64]:
    b, n = flags.shape
    flat = np.flatnonzero(flags)  # faster than in two axes
    if b == 1:
        return np.array([0, len(flat)]), flat
    starts = np.searchsorted(flat, n * np.arange(b + 1))
    return starts, flat - np.repeat(n * np.arange(b), np.diff(starts))


def gathered(array: Any, starts: Int64, indices: Int64) -> Any:
    """Return the listed rows of an array (b, n, ...), or (1, n, ...) for all matrices, in list order."""
    if len(array) == 1:
        return np.take(array[0], indices, axis=0)
    return array[np.repeat(np.arange(len(array)), np.diff(starts)), indices]


def _upward(bounds: Float64, kind: Any) -> Any:
    """Return the least numbers of a kind that are not below bounds; scores of that kind compare alike with both."""
    if kind == np.float64:
        return bounds
    return _rounded_up(bounds.tobytes(), kind)


@lru_cache(maxsize=16)
def _rounded_up(bounds: bytes, kind: Any) -> Any:
    exact = np.frombuffer(bounds)
    with np.errstate(over="ignore"):
        found = exact.astype(kind)
        return np.where(found < exact, np.nextafter(found, np.inf, dtype=kind), found)


def largest(scores: Any, present: Any, size: int, margin: Float64) -> tuple[Flags, Int64, Int64]:
    """Return which scores are surely among the `size` largest of their matrix, and list the scores too close to call.

    These differ from the last of the `size` largest by no more than `margin` (b,), relatively. Where no more keys are
    present, all are chosen. NaN counts as larger than numbers.
    """
    least: Float64 = np.full(len(scores), -np.inf if size else np.inf)
    for item in range(len(scores)) if size else ():
        values = scores[item] if present is None else scores[item][present[item]]
        if size < len(values):
            least[item] = np.partition(values, len(values) - size)[len(values) - size]
    return threshold(scores, present, least * (1 - margin), np.nextafter(least * (1 + margin), np.inf))


def largest_and_left(scores: Any, present: Any, size: int, margin: Float64) -> tuple[Flags, Any, Any]:
    """Return the `size` largest scores, and the list of those too close to call or of the leaders among the others.

    A score that alone is close to the last of the `size` largest is that one. Where several are, the result is the
    list of all that are close, and no other list.
    """
    chosen, starts, close = largest(scores, present, size, margin)
    if (np.diff(starts) > 1).any():
        return chosen, (starts, close), None
    include(chosen, starts, close, np.ones(len(close), np.bool_))
    return chosen, None, leaders(scores, ~chosen if present is None else present & ~chosen, margin)


def include(chosen: Flags, starts: Int64, indices: Int64, which: Flags) -> None:
    """Set the flags of some of the listed rows."""
    items = np.repeat(np.arange(len(chosen)), np.diff(starts))
    chosen[items[which], indices[which]] = True


def maxima(scores: Any, among: Any) -> Float64:
    """Return the largest score among some keys of each matrix, (b,); 0 where there are none."""
    return np.asarray(np.where(among, scores, 0).max(axis=1, initial=0), np.float64)


def leaders(scores: Any, among: Any, margin: Float64) -> tuple[Int64, Int64]:
    """List the scores that may be the largest among some keys: those less than `margin` (b,) below it, relatively."""
    top = maxima(scores, among) * (1 - margin)
    return threshold(scores, among, top, np.full(len(top), np.inf))[1:]


def stacked(keys: Any, starts: Int64, indices: Int64) -> tuple[Any, Any]:
    """Return the listed rows as a batch (b, w, d), w as long as the longest list, and flags of its filled rows.

    Rows that are not filled may hold anything; if there are none, the flags are None.
    """
    counts = np.diff(starts)
    there = np.arange(counts.max(initial=0)) < counts[:, None]
    rows: Int64 = np.zeros(there.shape, np.int64)
    rows[there] = indices
    flags = None if there.all() else to_device(there, keys)
    if isinstance(keys, Csr):
        return take_rows(keys, rows[0]), flags
    if isinstance(keys, np.ndarray):
        return keys[np.arange(len(keys))[:, None], rows], flags
    parts = [take_rows(keys[item : item + 1, :, :], each) for item, each in enumerate(rows)]
    return array_namespace(keys).concat(parts, axis=0), flags
