"""Pruned attention on the CPU: passes addresses of arrays to kernels, and spreads blocks of rows over threads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from levattn._core.rooms import lent_room
from levattn._core.threads import num_threads
from levattn._kernels.jit import SCORE_VECTORS, VECTOR_BYTES
from levattn._kernels.pruned import PrunedArguments, RenewalArguments, Summaries, clusters, definition
from levattn._kernels.pruned.backward import mixture_back_tasks
from levattn._kernels.pruned.definition import running as running
from levattn._kernels.pruned.definition import sample_step
from levattn._kernels.pruned.mixture import mixture_tasks, pack_near, pack_slots, whole_vectors
from levattn._kernels.pruned.panels import TILE_ROWS
from levattn._kernels.pruned.renewal import renewal_tasks
from levattn._kernels.tasks import share

_FEW = 64  # rows whose moments need no kernel
_AT_ONCE = 1 << 21  # numbers, for each thread, of chunks that are attended at once: more leave the cache
_MOVED = 16.0  # multiply-adds in the time that a number takes to be moved to a panel
_STRETCHES = 8  # blocks of TILE_ROWS positions that are worth sums of gradients of their own
_MOST_PARTS = 8  # of an item, with such sums


def at_once(_: Any, power: float | None, numbers: int, logits: int) -> int:
    """Return how many chunks one call of `mixture` takes, few enough that their numbers stay in the cache."""
    return _AT_ONCE * max(2, num_threads()) // max(1, numbers + logits) if power is None else 0


def mixture(x: PrunedArguments, room: dict[str, Any] | None = None, into: Any = None) -> tuple[Any, Any]:
    """Return the output (b, g, m, D) and the share of the summaries in each query's weights, (b, g, m)."""
    if room is None:
        with lent_room() as room:
            return mixture(x, room, into)
    b, g, m, _ = x.q.shape
    D, kind = x.values.shape[2], x.q.dtype
    Y, rest = np.empty((b, g, m, D), kind) if into is None else into, np.empty((b * x.chunks, g, m // x.chunks), kind)
    if not Y.size:
        return Y, rest
    call = _Call.of(x)
    key_panels, value_panels, bias = call.slot_panels(room)
    views = _views(*call.read, Y, length=m // x.chunks)
    near, near_values = call.near_panels(room, views)
    arguments = (
        call.like,
        views,
        (x.kept_keys.shape[1], call.tall, call.many, call.widest),
        kind.type(x.factor),
        0.0 if x.power is None else float(x.power),
        key_panels,
        value_panels,
        bias,
        near,
        near_values,
        *call.figures,
        D,
        rest,
    )
    stretches, groups = -(-rest.shape[2] // call.tall), -(-g // call.many)
    share(partial(mixture_tasks, *arguments), len(rest) * stretches * groups, call.work(bias))
    return Y, rest


def mixture_gradients(x: PrunedArguments, dY: Any) -> tuple[Any, ...]:
    """Return the gradients of queries, kept keys and values, summaries' keys and values, keys and values.

    The mixture is by softmax, and its outputs have the gradient `dY` (b, g, m, D).
    """
    b, g, m, d = x.q.shape
    (n, D), s, kind = x.values.shape[1:], x.kept_keys.shape[1], x.q.dtype
    call, dq = _Call.of(x), np.zeros_like(x.q, order="C")
    R, size = call.held.weight.shape[1], kind.itemsize
    keys, values = np.zeros((b, n, d), kind), np.zeros((b, n, D), kind)
    stretches = -(-m // call.tall)
    parts = max(1, min(-(-m // TILE_ROWS) // _STRETCHES, _MOST_PARTS))
    cuts = [min(m, call.tall * (stretches * i // parts)) for i in range(parts + 1)]
    width, edges = _width(size), call.figures[1]
    begins = edges[0, cuts[:-1]] // width * width if x.q.size else np.zeros(parts, np.int64)
    rows = np.zeros(parts + 1, np.int64)
    if x.q.size and call.widest:
        ends = np.maximum(begins, edges[1, np.array(cuts[1:]) - 1])
        rows[1:] = np.cumsum(ends - begins + width + TILE_ROWS)
    dY, room, other = _readable(dY), dict[str, Any](), dict[str, Any]()
    key_panels, _, bias = call.slot_panels(room)
    value_panels, key_rows, _ = call.slot_panels(other, turned=True)
    near_keys, _ = call.near_panels(room, _views(*call.read))
    near_values, near_rows = call.near_panels(other, _views(*(call.read[i] for i in (0, 2, 1))), turned=True)
    deep, high = (width * _panels(columns, size) for columns in (d, D))
    slots = bias.shape[1] + TILE_ROWS
    found = tuple(np.zeros((b, parts, slots, columns), kind) for columns in (deep, high))
    found += tuple(np.zeros((b, int(rows[-1]), columns), kind) for columns in (deep, high))
    arguments = (
        call.like,
        _views(call.read[0], dY, dq),
        (s, call.tall, call.many, call.widest, g, m, parts),
        (key_panels, key_rows, value_panels),
        (near_keys, near_rows, near_values),
        bias,
        *call.figures,
        np.stack([begins, rows[:-1]]),
        found,
    )
    if x.q.size:
        share(partial(mixture_back_tasks, *arguments), b * parts, 2.5 * call.work(bias))
    first = whole_vectors(x.q, s)
    there = call.held.count > 0.5
    inverse = np.where(there, 1 / np.where(there, call.held.weight, 1), 0)[..., None]
    of_slots = [array.sum(1)[..., :columns] for array, columns in zip(found[:2], (d, D), strict=True)]
    for total, side in zip((keys, values), found[2:], strict=True):
        for i in range(parts):
            low, count = begins[i], rows[i + 1] - rows[i]
            here = min(count, n - low)
            total[:, low : low + here] += side[:, rows[i] : rows[i] + here, : total.shape[2]]
    return (
        dq,
        *(array[:, :s] for array in of_slots),
        *((array[:, first : first + R] * inverse).astype(call.held.keys.dtype) for array in of_slots),
        keys,
        values,
    )


@dataclass(frozen=True, eq=False)
class _Call:
    """A mixture as its kernels read it.

    `read`: queries, keys and values. `tall`, `many`: positions and heads of a block. `widest`: the most near keys of a
    block. `figures`: of summaries, edges of near keys, roles and log-weights.
    """

    x: PrunedArguments
    like: Any
    held: Summaries
    read: tuple[Any, ...]
    tall: int
    many: int
    widest: int
    figures: tuple[Any, ...]

    @classmethod
    def of(cls, x: PrunedArguments) -> _Call:
        """Return the call with these arguments."""
        (_, g, m, d), kind = x.q.shape, x.q.dtype
        b, D, m = len(x.kept_keys), x.values.shape[2], m // x.chunks
        # in float64 as in streams, so that a stream without summaries needs no other compiled kernel
        held = x.summaries or Summaries(*(np.zeros((b, 0, *rows)) for rows in ((), (d,), (D,), (), ())))
        held = Summaries(*map(np.ascontiguousarray, vars(held).values()))
        edges = np.array([x.first, x.last], np.int64)
        many = max(1, min(g, TILE_ROWS))
        tall = max(1, min(TILE_ROWS // many, m))
        begins = np.arange(0, m, tall)
        spans = edges[1, np.minimum(begins + tall, m) - 1] - edges[0, begins]
        figures = (
            np.stack([held.weight, held.offset, held.count], axis=1).astype(np.float64),
            edges,
            np.empty((0, 0), np.int64) if x.role is None else np.ascontiguousarray(x.role, np.int64),
            np.empty((0, 0), kind) if x.log_weight is None else np.ascontiguousarray(x.log_weight, kind),
        )
        read, widest = tuple(map(_readable, (x.q, x.keys, x.values))), max(0, int(spans.max(initial=0)))
        return cls(x, np.empty(1, kind), held, read, tall, many, widest, figures)

    def slot_panels(self, room: dict[str, Any], *, turned: bool = False) -> tuple[Any, Any, Any]:
        """Return kept keys and means of summaries as columns, their values as rows, and what to add to the logits.

        If `turned`, values are columns, and keys are rows.
        """
        x, kind, held = self.x, self.like.dtype, self.held
        (b, s), size = x.kept_keys.shape[:2], kind.itemsize
        pairs = [(x.kept_keys, x.kept_values), (held.keys, held.values)]
        (columns, rows), means = [pair[::-1] if turned else pair for pair in pairs]
        taken, d, D = partial(_taken, room), columns.shape[2], rows.shape[2]
        panels = taken("keys", (b, _panels(whole_vectors(x.q, s) + means[0].shape[1], size), d, _width(size)), kind)
        slots = panels.shape[1] * panels.shape[3]
        row_panels = taken("values", (b, _panels(D, size), slots, panels.shape[3]), kind)
        bias = np.empty((b, slots), kind)
        count = np.full(b, s) if x.kept_count is None else np.asarray(x.kept_count, np.int64)
        kept = map(np.ascontiguousarray, (columns, rows))
        sums = held.weight, *means, held.offset, held.count
        packed = partial(pack_slots, *kept, count, *sums, x.power is not None, panels, row_panels, bias)
        share(packed, b, _MOVED * b * slots * (d + D))
        return panels, row_panels, bias

    def near_panels(self, room: dict[str, Any], views: Any, *, turned: bool = False) -> tuple[Any, Any]:
        """Return keys that may be near as columns, and their values as rows; the other way round if `turned`.

        `views`: of queries, keys and values; of queries, values and keys if `turned`.
        """
        kind, size, m = self.like.dtype, self.like.itemsize, self.x.q.shape[2]
        columns, rows = self.read[2:0:-1] if turned else self.read[1:]
        b, d, D = len(self.x.kept_keys), columns.shape[2], rows.shape[2]
        n = columns.shape[1] - (m - m // self.x.chunks) if self.widest else 0
        panels = _taken(room, "near", (b, _panels(n, size), d, _width(size)), kind)
        row_panels = _taken(
            room, "near values", (b, _panels(D, size), panels.shape[1] * _width(size), _width(size)), kind
        )
        packed = partial(pack_near, self.like, views, (n, D), self.figures[2], panels, row_panels)
        share(packed, b * panels.shape[1], _MOVED * b * n * (d + D))
        return panels, row_panels

    def work(self, bias: Any) -> float:
        """Return the multiply-adds of the outputs."""
        numbers: int = bias.shape[1] + self.widest
        return float(math.prod(self.x.q.shape[:3]) * numbers * (self.x.q.shape[3] + self.x.values.shape[2]))


def cluster(X: Any, weight: Any, R: int, iterations: int) -> tuple[Any, Any]:
    """Return which of R clusters each row of X is in, (b, n) int64, and its squared distance to the center, (b, n)."""
    (b, n, d), kind = X.shape, X.dtype
    X, weight = np.ascontiguousarray(X), np.ascontiguousarray(weight, kind)
    labels, distances, ones = np.zeros((b, n), np.int64), np.zeros((b, n), kind), np.ones((b, n), kind)
    centers = np.empty((b, R, d), kind)
    if not labels.size:
        return labels, distances
    size, step = kind.itemsize, sample_step(n, R)
    panels = np.empty((b, _panels(R, size), d, _width(size)), kind)
    norms = np.empty((b, panels.shape[1] * panels.shape[3]), kind)

    assign = partial(clusters.assign_tasks, X, panels, norms, labels, distances)
    found = partial(clusters.far_tasks, X, weight, step, centers, labels, distances)
    share(found, b, float(b) * (n // step) * R * d)
    for i in range(0 if step > 1 else 1, iterations + 1):
        if i:
            sums, mass = _row_sums(X, labels, weight, R), _level_sums(labels, weight, ones, R)[0]
            there = mass > 0
            centers[there] = sums[there] / mass[there][:, None]
        share(partial(clusters.pack_centers, centers, panels, norms), b, float(centers.size))
        share(assign, b * -(-n // TILE_ROWS), float(b) * n * R * d)
    return labels, distances


def levels(labels: Any, values: Any, weight: Any, R: int) -> Any:
    """Return the weighted mean (b, R) of values (b, n) over the rows with each label; 0 for a label without rows."""
    total, mass = _level_sums(labels, values, weight, R)
    return (total / np.where(mass > 0, mass, 1.0)).astype(values.dtype)


def radii(labels: Any, items: Summaries, item_radii: Any, summaries: Summaries) -> Any:
    """Return bounds (b, R) of distances of members from the means of summaries, in float64, rounded up."""
    found = np.zeros(summaries.weight.shape)
    arrays = labels, items.keys, items.weight, item_radii, summaries.keys, summaries.weight
    clusters.radius_tasks(*map(np.ascontiguousarray, arrays), found, 0, len(labels))
    return found


def merged(labels: Any, log_weight: Any, items: Summaries, R: int) -> Summaries:
    """Return R summaries, each of the items (b, n) with its label and weights times exp(log_weight)."""
    kind, factor = items.keys.dtype, np.exp(log_weight)
    weight, offset = _level_sums(labels, items.weight, factor, R)[0], items.offset + log_weight * items.weight
    with np.errstate(over="ignore"):  # outputs show it
        return Summaries(
            weight=weight.astype(kind),
            keys=_row_sums(items.keys, labels, factor, R).astype(kind),
            values=_row_sums(items.values, labels, factor, R).astype(kind),
            offset=_level_sums(labels, offset, factor, R)[0].astype(kind),
            count=_level_sums(labels, items.count, np.ones_like(factor), R)[0].astype(kind),
        )


def renews(_: Any, __: Any, ___: tuple[int, int], ____: int, /) -> bool:
    """Return True: one kernel renews any slots."""
    return True


def renewed(
    x: RenewalArguments, room: dict[str, Any] | None = None
) -> tuple[Any, Any, Any, Summaries | None, Any, None] | None:
    """Return kept keys and summaries after a selection, or None for non-finite numbers, which the caller reports."""
    room = {} if room is None else room
    b, n, s = x.keys.shape[0], x.keys.shape[1] // len(x.queries), x.kept.shape[1]
    size = min(s + n, x.size + min(x.sinks, x.oldest + n))
    given = _held_before(x)
    if not x.in_turn:
        side = room.setdefault("side", np.zeros(1, np.int64))  # alternates, so that the previous results stay valid
        side ^= 1
        arrays = _room_for_renewal(x, size, b, partial(_taken, room), int(side[0]))
        return _as_renewed(x, arrays) if _renewal(x, given, arrays, n, 0) else None
    arrays = _room_for_renewal(x, size, b * (len(x.queries) + 1), partial(_taken, room), "in turn")
    for chain, first in zip(arrays, given, strict=True):
        chain[:b] = first
    return _as_renewed(x, arrays) if _renewal(x, arrays, arrays, n, b) else None


def _held_before(x: RenewalArguments) -> list[Any]:
    """Return kept keys, values and places, sums of summaries over keys and values, scalars and radii."""
    b, d, D = len(x.kept), x.kept.shape[2], x.kept_values.shape[2]
    # a stream without summaries needs no other compiled kernel
    held = x.summaries or Summaries(*(np.zeros((b, 0, *rows)) for rows in ((), (d,), (D,), (), ())))
    scalars = np.stack([held.weight, held.offset, held.count], axis=2)
    radius = np.zeros((b, 0))
    if x.bounded:
        radius = np.full(held.weight.shape, np.inf) if x.radius is None else x.radius
    given = x.kept, x.kept_values, x.kept_places, held.keys, held.values, scalars, radius
    return list(map(np.ascontiguousarray, given))


def _room_for_renewal(x: RenewalArguments, size: int, items: int, taken: Any, side: Any) -> list[Any]:
    """Return arrays for the results of renewals, in the order of `_held_before`."""
    d, D, kind, double = x.keys.shape[2], x.values.shape[2], x.keys.dtype, np.float64
    new = ((size, d), kind), ((size, D), kind), ((size,), np.int64)
    sums = [(shape, double) for shape in ((x.R, d), (x.R, D), (x.R, 3), (x.R if x.bounded else 0,))]
    return [taken(f"renewed {i} {side}", (items, *shape), kind) for i, (shape, kind) in enumerate((*new, *sums))]


def _renewal(x: RenewalArguments, given: list[Any], new: list[Any], n: int, ahead: int) -> bool:
    """Write renewals of n leaving rows each to `new`, and tell whether all numbers were finite."""
    b, s = x.keys.shape[0], given[0].shape[1]
    read = [_readable(array) for array in (x.keys, x.values)]
    sound = np.empty(len(x.queries) * b, np.bool_)
    body = partial(
        renewal_tasks,
        np.empty(1, x.keys.dtype),
        _views(*read, length=n),
        (n, x.oldest, x.sinks, x.residual, ahead),
        np.array(x.queries, np.float64),
        *given,
        *map(np.ascontiguousarray, (x.total, x.second, x.origin)),
        *new,
        sound,
    )
    share(body, b, float(len(sound)) * (given[3].shape[1] + s + n) * (x.R + x.keys.shape[2]) * x.keys.shape[2])
    return bool(sound.all())


def _as_renewed(x: RenewalArguments, arrays: list[Any]) -> tuple[Any, Any, Any, Summaries | None, Any, None]:
    kept, values, places, keys, means, scalars, radius = arrays
    summaries = Summaries(scalars[..., 0], keys, means, scalars[..., 1], scalars[..., 2]) if x.R else None
    return kept, values, places, summaries, radius if x.bounded and x.R else None, None


def _taken(room: dict[str, Any], name: str, shape: tuple[int, ...], kind: Any) -> Any:
    """Return an array in memory of an earlier call if it is large enough, because new memory is slow at first."""
    held, size = room.get(name), math.prod(shape)
    if held is None or held.size < size or held.dtype != kind:
        held = room[name] = np.empty(size, kind)
    return held[:size].reshape(shape)


def row_moments(X: Any, squares: bool, chunks: int = 1) -> tuple[Any, Any]:
    """Return the sums (b, d) of rows x and, if `squares`, the sums (b, d, d) of x xᵀ, in float64.

    `X`: (b, g, n, d). `chunks`: into how many chunks the n rows are cut. There are sums for each, items within chunks.
    """
    (b, g, n, d), X = X.shape, _readable(X)
    n, items = n // chunks, chunks * b
    if g * n < _FEW:
        return definition.row_moments(X, squares, chunks)
    total, second = np.empty((items, d)), np.empty((items, d, d) if squares else (0, 0, 0))
    view, work = _views(X, length=n)[0], float(X.size) * (d if squares else 1)
    share(partial(clusters.moments_of_rows, np.empty(1, X.dtype), view, (g, n), total, second), items, work)
    return total, second if squares else None


def places(K: Any, origin: Any, root: Any, query: Any) -> tuple[Any, Any]:
    """Return ``(k − origin) root`` (b, n, d) and ``⟨query, k − origin⟩`` (b, n)."""
    b, n, d = K.shape
    X, along = np.empty((b, n, d), K.dtype), np.empty((b, n), K.dtype)
    size = K.dtype.itemsize
    width = _width(size)
    panels = np.zeros((b, d, _panels(d + 1, size) * width), K.dtype)
    panels[:, :, :d], panels[:, :, d] = root, query
    panels = np.ascontiguousarray(panels.reshape(b, d, panels.shape[2] // width, width).transpose(0, 2, 1, 3))
    K = _readable(K)
    arguments = np.empty(1, K.dtype), _views(K)[0], np.ascontiguousarray(origin), panels, X, along
    share(partial(clusters.place_tasks, *arguments), b * -(-n // TILE_ROWS), float(K.size) * (d + 1))
    return X, along


def _width(size: int) -> int:
    """Return how many numbers of `size` bytes lie side by side in a panel."""
    return SCORE_VECTORS * (VECTOR_BYTES // size)


def _panels(columns: int, size: int) -> int:
    return -(-columns // _width(size))


def _readable(array: Any) -> Any:
    """Return an array (b, ..., rows, columns) with adjacent neighbors along the last axis."""
    return array if array.strides[-1] == array.itemsize else np.ascontiguousarray(array)


def _views(*arrays: Any, length: int = 0) -> Any:
    """Return the addresses and steps of `_readable` arrays, which the caller must hold while kernels read them.

    `length`: rows from one chunk to the next, where there are several.
    """
    rows = []
    for array in arrays:
        item, *heads, row = array.strides[:-1]
        address = array.__array_interface__["data"][0]
        rows.append((address, item, heads[0] if heads else 0, row, length * row, max(1, len(array))))
    return np.array(rows, np.int64)


def _row_sums(X: Any, labels: Any, factor: Any, R: int) -> Any:
    """Return ``Σ f x`` (b, R, d) in float64 over the rows x of X (b, n, d) with each label."""
    b, width = len(X), X.shape[2]
    X, total = _readable(X), np.zeros((b, R, width))
    arguments = np.empty(1, X.dtype), _views(X)[0], width, np.ascontiguousarray(labels)
    share(partial(clusters.add_tasks, *arguments, np.ascontiguousarray(factor, X.dtype), total), b, float(X.size))
    return total


def _level_sums(labels: Any, values: Any, weight: Any, R: int) -> tuple[Any, Any]:
    """Return ``Σ w x`` and ``Σ w`` (b, R) in float64 of numbers x (b, n) with each label."""
    b = len(labels)
    total, mass = np.zeros((b, R)), np.zeros((b, R))
    arguments = np.ascontiguousarray(labels), *(np.ascontiguousarray(x, values.dtype) for x in (values, weight))

    share(partial(clusters.level_tasks, *arguments, total, mass), b, float(labels.size))
    return total, mass
