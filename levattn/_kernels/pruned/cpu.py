"""Pruned attention on the CPU: passes addresses of arrays to kernels, and spreads blocks of rows over threads."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from levattn._kernels.jit import SCORE_VECTORS, VECTOR_BYTES
from levattn._kernels.pruned import clusters, definition
from levattn._kernels.pruned.contract import PrunedArguments, RenewalArguments, Summaries
from levattn._kernels.pruned.definition import sample_step
from levattn._kernels.pruned.mixture import mixture_tasks, pack_near, pack_slots, whole_vectors
from levattn._kernels.pruned.panels import TILE_ROWS
from levattn._kernels.pruned.renewal import renewal_tasks
from levattn._kernels.tasks import share

__all__ = ["at_once", "cluster", "levels", "merged", "mixture", "places", "radii", "renewed", "row_moments"]

_FEW = 64  # rows whose moments need no kernel


def at_once(_: Any, __: float | None) -> int:
    """Return 0: chunks come one by one, and reuse memory."""
    return 0


def mixture(x: PrunedArguments, room: dict[str, Any] | None = None, into: Any = None) -> tuple[Any, Any]:
    """Return the output (b, g, m, D) and the share of the summaries in each query's weights, (b, g, m)."""
    taken = partial(_taken, {} if room is None else room)
    b, g, m, d = x.q.shape
    D, kind, s = x.values.shape[2], x.q.dtype, x.kept_keys.shape[1]
    Y, rest = np.empty((b, g, m, D), kind) if into is None else into, np.empty((b, g, m), kind)
    if not Y.size:
        return Y, rest
    size = kind.itemsize
    # in float64 as in streams, so that a stream without summaries needs no other compiled kernel
    held = x.summaries or Summaries(*(np.zeros((b, 0, *rows)) for rows in ((), (d,), (D,), (), ())))
    R = held.weight.shape[1]
    key_panels = taken("keys", (b, _panels(whole_vectors(x.q, s) + R, size), d, _width(size)), kind)
    slots = key_panels.shape[1] * key_panels.shape[3]
    value_panels = taken("values", (b, _panels(D, size), slots, key_panels.shape[3]), kind)
    bias = np.empty((b, slots), kind)
    count = np.full(b, s) if x.kept_count is None else np.asarray(x.kept_count, np.int64)
    kept = (np.ascontiguousarray(array) for array in (x.kept_keys, x.kept_values))
    weight, means, values, offset, members = (np.ascontiguousarray(array) for array in vars(held).values())
    sums = weight, means, values, offset, members
    packed = partial(pack_slots, *kept, count, *sums, x.power is not None, key_panels, value_panels, bias)
    share(packed, b, float(b) * slots * (d + D))
    edges = np.array([x.first, x.last], np.int64)
    tall = min(TILE_ROWS, m)
    many = max(1, min(g, TILE_ROWS // tall))
    begins = np.arange(0, m, tall)
    spans = edges[1, np.minimum(begins + tall, m) - 1] - edges[0, begins]
    widest = max(0, int(spans.max()))
    read = [_readable(array) for array in (x.q, x.keys, x.values)]
    read.append(Y)
    views, like = np.stack([_view(array) for array in read]), np.empty(1, kind)
    role = np.empty((0, 0), np.int64) if x.role is None else np.ascontiguousarray(x.role, np.int64)
    n = x.keys.shape[1] if widest else 0
    near = taken("near", (b, _panels(n, size), d, _width(size)), kind)
    near_values = taken("near values", (b, value_panels.shape[1], near.shape[1] * near.shape[3], near.shape[3]), kind)
    share(partial(pack_near, like, views, (n, D), role, near, near_values), b * near.shape[1], float(b) * n * (d + D))
    arguments = (
        like,
        views,
        (s, tall, many, widest),
        0.0 if x.power is None else float(x.power),
        key_panels,
        value_panels,
        bias,
        near,
        near_values,
        np.stack([weight, offset, members], axis=1).astype(np.float64),
        edges,
        role,
        np.empty((0, 0), kind) if x.log_weight is None else np.ascontiguousarray(x.log_weight, kind),
        D,
        rest,
    )
    work = float(b) * g * m * (slots + widest) * (d + D)
    share(partial(mixture_tasks, *arguments), b * len(begins) * -(-g // many), work)
    return Y, rest


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


def renewed(x: RenewalArguments, room: dict[str, Any] | None = None) -> tuple[Any, Any, Any, Summaries, Any] | None:
    """Return kept keys and summaries after a selection, or None for non-finite numbers, which the caller reports."""
    room = {} if room is None else room
    room["side"] = not room.get("side")  # alternates, so that the previous results stay valid
    taken = partial(_taken, room)
    (b, n, d), D, s, kind = x.keys.shape, x.values.shape[2], x.kept.shape[1], x.keys.dtype
    forced = min(x.sinks, x.oldest + n)
    size = min(s + n, x.size + forced)
    # a stream without summaries needs no other compiled kernel
    held = x.summaries or Summaries(*(np.zeros((b, 0, *rows)) for rows in ((), (d,), (D,), (), ())))
    scalars = np.stack([held.weight, held.offset, held.count], axis=2)
    radius = np.zeros((b, 0)) if x.radius is None else x.radius
    read = [_readable(array) for array in (x.keys, x.values)]
    new = ((size, d), kind), ((size, D), kind), ((size,), np.int64)
    sums = [(shape, np.float64) for shape in ((x.R, d), (x.R, D), (x.R, 3), (x.R if x.bounded else 0,))]
    arrays = [taken(f"renewed {i} {room['side']}", (b, *shape), kind) for i, (shape, kind) in enumerate((*new, *sums))]
    sound = np.empty(b, np.bool_)
    given = x.kept, x.kept_values, x.kept_places, held.keys, held.values, scalars, radius, x.total, x.second, x.origin
    body = partial(
        renewal_tasks,
        np.empty(1, kind),
        np.stack([_view(array) for array in read]),
        (n, x.oldest, x.sinks, x.residual),
        float(x.queries),
        *map(np.ascontiguousarray, given),
        *arrays,
        sound,
    )
    share(body, b, float(b) * (held.weight.shape[1] + s + n) * x.R * d)
    if not sound.all():
        return None
    kept, values, places, keys, means, scalars, radius = arrays
    summaries = Summaries(scalars[..., 0], keys, means, scalars[..., 1], scalars[..., 2])
    return kept, values, places, summaries, radius if x.bounded else None


def _taken(room: dict[str, Any], name: str, shape: tuple[int, ...], kind: Any) -> Any:
    """Return an array in memory of an earlier call if it is large enough, because new memory is slow at first."""
    held, size = room.get(name), math.prod(shape)
    if held is None or held.size < size or held.dtype != kind:
        held = room[name] = np.empty(size, kind)
    return held[:size].reshape(shape)


def row_moments(X: Any, squares: bool) -> tuple[Any, Any]:
    """Return the sum (b, d) of the rows x of X and, if `squares`, the sum (b, d, d) of x xᵀ, in float64."""
    b, n, d = X.shape
    if n < _FEW:
        return definition.row_moments(X, squares)
    X, total, second = _readable(X), np.empty((b, d)), np.empty((b, d, d) if squares else (0, 0, 0))
    work = float(X.size) * (d if squares else 1)
    share(partial(clusters.moments_of_rows, np.empty(1, X.dtype), _view(X), n, total, second), b, work)
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
    arguments = np.empty(1, K.dtype), _view(K), np.ascontiguousarray(origin), panels, X, along
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


def _view(array: Any) -> Any:
    """Return the address and steps of a `_readable` array, which the caller must hold while kernels read it."""
    item, *heads, row = array.strides[:-1]
    return np.array([array.__array_interface__["data"][0], item, heads[0] if heads else 0, row], np.int64)


def _row_sums(X: Any, labels: Any, factor: Any, R: int) -> Any:
    """Return ``Σ f x`` (b, R, d) in float64 over the rows x of X (b, n, d) with each label."""
    b, width = len(X), X.shape[2]
    X, total = _readable(X), np.zeros((b, R, width))
    arguments = np.empty(1, X.dtype), _view(X), width, np.ascontiguousarray(labels)
    share(partial(clusters.add_tasks, *arguments, np.ascontiguousarray(factor, X.dtype), total), b, float(X.size))
    return total


def _level_sums(labels: Any, values: Any, weight: Any, R: int) -> tuple[Any, Any]:
    """Return ``Σ w x`` and ``Σ w`` (b, R) in float64 of numbers x (b, n) with each label."""
    b = len(labels)
    total, mass = np.zeros((b, R)), np.zeros((b, R))
    arguments = np.ascontiguousarray(labels), *(np.ascontiguousarray(x, values.dtype) for x in (values, weight))

    share(partial(clusters.level_tasks, *arguments, total, mass), b, float(labels.size))
    return total, mass
