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
from levattn._kernels.cuda_source import WORDS, launch, namespace, on_device, stored, with_steps

_TILE = 2048  # entries that a block lists
_SPAN = 8192  # entries whose digits a block counts
_DIGITS = 2048
_COPIED = 16  # rows that a block copies
_SEEKERS = 1024  # threads that look at a whole matrix
_LONGEST_WORD = 8  # in bytes; longer numbers are copied as several
_BITS = {"float": (11, 11, 10), "double": (11, 11, 11, 11, 11, 9)}  # of the digits of a score, from the highest on


def held(array: Any) -> Any:
    """Return scores or flags where the selection reads them."""
    return on_device(array)


def threshold(scores: Any, present: Any, low: Any, high: Any) -> tuple[Any, Int64, Any]:
    """Return which scores are at least `high`, and list the scores in doubt."""
    xp, (b, n) = namespace(), scores.shape
    chosen = xp.empty(scores.shape, np.bool_)
    here = isinstance(low, np.ndarray) and isinstance(high, np.ndarray)  # then both are one copy to the device
    bounds = on_device(np.stack([low, high]), np.float64) if here else [on_device(x, np.float64) for x in (low, high)]
    given = on_device(scores), on_device(present, np.bool_), None, bounds[0], bounds[1]
    room = _Lists(b, n, 1)
    room.count(given, 0, chosen)
    starts = to_numpy(room.begins[0])
    return chosen, starts, room.listed(given, 0, int(starts[-1]))


class _Lists:
    """Where lists are made: the counts of each tile, and for each of some lists the places of its tiles and matrices.

    Each call is `given` the scores, flags of keys that take part, flags of keys that are left out, and two bounds.
    """

    def __init__(self, b: int, n: int, lists: int) -> None:
        self.b, self.n, self.tiles = b, n, -(-n // _TILE)
        each, places = b * self.tiles, b * self.tiles + 1
        words = namespace().empty(each + lists * (places + b + 1), np.int64)
        self.counts, self.begins = words[:each], words[each : each + lists * (b + 1)].reshape(lists, b + 1)
        self.offsets = words[each + lists * (b + 1) :].reshape(lists, places)

    def count(self, given: tuple[Any, ...], index: int, chosen: Any) -> None:
        """Find how long the lists of the matrices are, and write the flags of scores above the bounds, if wanted."""
        tail = self.n, self.tiles, chosen, self.counts
        kinds, places = (stored(given[0].dtype),), (self.offsets[index], self.begins[index])
        launch("select", "count_listed", kinds, (self.b * self.tiles,), [*given, *tail])
        launch("select", "find_places", (), (1,), [self.counts, self.b, self.tiles, *places])

    def listed(self, given: tuple[Any, ...], index: int, size: int) -> Any:
        """Return the lists, whose lengths sum to `size`."""
        indices = namespace().empty(size, np.int64)
        grid, tail = (self.b * self.tiles if size else 0,), (self.n, self.tiles, self.offsets[index], indices)
        launch("select", "fill_listed", (stored(given[0].dtype),), grid, [*given, *tail])
        return indices


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


def largest_and_left(scores: Any, present: Any, size: int, margin: Float64) -> tuple[Any, Any, Any]:
    """Return the `size` largest scores, and the list of those too close to call or of the leaders among the others.

    One wait brings the lengths of both lists.
    """
    xp, (b, n) = namespace(), scores.shape
    scores, present, margins = on_device(scores), on_device(present, np.bool_), on_device(margin, np.float64)
    least, low, high = _around(scores, present, size, margin, margins)
    chosen, room = xp.empty(scores.shape, np.bool_), _Lists(b, n, 2)
    close, left = (scores, present, None, low, high), (scores, present, chosen, least, None)
    room.count(close, 0, chosen)
    _bound_left(scores, present, margins, least, chosen, (room.begins[0], low, high))
    room.count(left, 1, None)
    starts, others = to_numpy(room.begins)
    if (starts[1:] - starts[:-1] > 1).any():
        return chosen, (starts, room.listed(close, 0, int(starts[-1]))), None
    return chosen, None, (others, room.listed(left, 1, int(others[-1])))


def leaders(scores: Any, among: Any, margin: Float64) -> tuple[Int64, Any]:
    """List the scores that may be the largest among some keys."""
    scores, among, margins = on_device(scores), on_device(among, np.bool_), on_device(margin, np.float64)
    least, room = namespace().empty(len(scores)), _Lists(len(scores), scores.shape[1], 1)
    _bound_left(scores, among, margins, least, None, (None, None, None))
    given = scores, among, None, least, None
    room.count(given, 0, None)
    starts = to_numpy(room.begins[0])
    return starts, room.listed(given, 0, int(starts[-1]))


def _bound_left(scores: Any, present: Any, margins: Any, least: Any, chosen: Any, close: tuple[Any, ...]) -> None:
    """Write bounds of the leaders among scores that are not chosen; see `bound_left` in select.cu."""
    b, n = scores.shape
    arguments = [scores, present, *close, n, margins, chosen, least]
    launch("select", "bound_left", (stored(scores.dtype),), (b,), arguments, threads=_SEEKERS)


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
    xp, counts = namespace(), starts[1:] - starts[:-1]
    width = int(counts.max(initial=0))
    whole = bool((counts == width).all())
    out = (xp.empty if whole else xp.zeros)((len(counts), width, keys.shape[2]), keys.dtype)
    words = np.dtype(f"u{keys.itemsize}")
    given, item, *within = with_steps(keys.view(words), 3)
    listed = [None if whole and width else on_device(starts, np.int64), len(counts)]
    listed += [on_device(indices, np.int64), len(indices)]
    arguments = [given, item if len(keys) > 1 else 0, *within, *listed, width, keys.shape[2], out.view(words)]
    launch("select", "gather_rows", (WORDS[keys.itemsize],), (-(-len(indices) // _COPIED),), arguments)
    return out, None if whole else xp.arange(width) < on_device(counts)[:, None]


def _around(scores: Any, present: Any, size: int, margin: Float64, margins: Any) -> Any:
    """Return the last of the `size` largest scores and the bounds of those too close to it; see `_bounds_of_rank`."""
    if size:
        return _bounds_of_rank(on_device(scores), present, size, margins)
    least = np.full(len(scores), np.inf)
    return on_device(np.stack([least, least * (1 - margin), np.nextafter(least * (1 + margin), np.inf)]))


def _bounds_of_rank(scores: Any, present: Any, size: int, margins: Any) -> Any:
    """Return the score of rank `size` from the largest of each matrix; −∞ where no more are present.

    It is the first row of an array (3, b). The other rows are bounds around it, by margins (b,) on the device.
    """
    xp, real = namespace(), stored(scores.dtype)
    b, n = scores.shape
    bounds, spans, flags = xp.empty((3, b)), -(-n // _SPAN), on_device(present, np.bool_)
    if spans <= 1:
        launch("select", "find_ranked", (real,), (b,), [scores, flags, n, size, margins, bounds])
        return bounds
    zeros = xp.zeros(b * (2 + _DIGITS), np.uint64)
    prefixes, ranks, counts = zeros[:b], zeros[b : 2 * b], zeros[2 * b :]
    shift = sum(_BITS[real])
    for i, bits in enumerate(_BITS[real]):
        shift -= bits
        arguments = [scores, flags, n, spans, prefixes, shift, bits, counts]
        launch("select", "count_digits", (real,), (b * spans,), arguments)
        tail = [size, bits, i == 0, shift == 0, margins, bounds]
        launch("select", "choose_digit", (real,), (b,), [counts, prefixes, ranks, *tail])
    return bounds
