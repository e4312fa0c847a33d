"""Pruned attention in the array-API standard: the definitions, which tests compare with the compiled kernels.

In torch, autograd differentiates these definitions, so there is no backward here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import array_api_compat

from levattn._core.arrays import array_namespace, is_away, is_torch, lengths
from levattn._kernels.dispatch import kernels_for
from levattn._kernels.pruned import LabelKernels, PrunedArguments, RenewalArguments, Summaries, mapped

_ENTRIES = 1 << 22  # logits, and weights of clusters, held at a time
_ON_DEVICE = 1 << 26  # weights of clusters there, where each launch costs time
_LEAST = 64  # positions of a block
_SAMPLE, _EACH = 1024, 4  # rows among which centers begin: at least, and for each center


def at_once(_: Any, __: float | None, numbers: int, logits: int, /) -> int:
    """Return how many chunks one call of `mixture` takes, of so many numbers and logits each; 0 for one."""
    return _ENTRIES // max(1, numbers + logits)


def sample_step(n: int, R: int) -> int:
    """Return s for centers that begin among every s-th row: 1 unless there are many rows for each center."""
    return max(1, n // max(_SAMPLE, _EACH * R))


def row_moments(X: Any, squares: bool, chunks: int = 1) -> tuple[Any, Any]:
    """Return the sums (b, d) of rows x and, if `squares`, the sums (b, d, d) of x xᵀ, in float64.

    `X`: (b, g, n, d). `chunks`: into how many chunks the n rows are cut. There are sums for each, items within chunks.
    """
    xp, (b, g, n, d) = array_namespace(X), X.shape
    X = xp.permute_dims(xp.reshape(X, (b, g, chunks, n // chunks, d)), (2, 0, 1, 3, 4))
    X = xp.reshape(X, (chunks * b, g * (n // chunks), d))
    total = xp.sum(X, axis=1, dtype=xp.float64)
    if not squares:
        return total, None
    X = xp.astype(X, xp.float64)
    return total, xp.matmul(xp.matrix_transpose(X), X)


def factor_queries(_: Any, __: Any, ___: Any, ____: tuple[int, int], _____: Any, /) -> None:
    """Return None: the caller takes steps."""


def places(K: Any, origin: Any, root: Any, query: Any) -> tuple[Any, Any]:
    """Return ``(k − origin) root`` (b, n, d) and ``⟨query, k − origin⟩`` (b, n).

    `K`: (b, n, d). `origin`, `query`: (b, d). `root`: (b, d, d).
    """
    xp = array_namespace(K)
    centered = K - origin[:, None, :]
    return xp.matmul(centered, root), xp.matmul(centered, query[:, :, None])[..., 0]


def cluster(X: Any, weight: Any, R: int, iterations: int) -> tuple[Any, Any]:
    """Return which of R clusters each row of X is in, (b, n) int64, and its squared distance to the center, (b, n).

    Centers begin as rows far from one another: the farthest from the weighted mean, then always the farthest from all
    chosen so far (Gonzalez, 1985). With many rows, the choice is among every s-th row (`sample_step`). The centers
    become the weighted means of their clusters, `iterations` times (Lloyd, 1982).
    Ties go to the lower index; an empty cluster keeps its center. Rows of weight 0 begin no cluster and count in no
    mean, but are assigned as well.

    `X`: (b, n, d). `weight`: (b, n), at least 0.
    """
    return from_rows(X, weight, far_rows(X, weight, R), iterations)


def far_rows(X: Any, weight: Any, R: int) -> Any:
    """Return the rows (b, R) int64 that are the first centers of clusters, see `cluster`."""
    xp = array_namespace(X)
    (b, n, d), device = X.shape, array_api_compat.device(X)
    step = sample_step(n, R)
    some, here = X[:, ::step, :], weight[:, ::step] > 0
    items = xp.arange(b, device=device) * some.shape[1]
    flat = xp.reshape(some, (b * some.shape[1], d))
    none = xp.full((), -1.0, dtype=X.dtype, device=device)
    away = xp.where(here, xp.sum((some - weighted_mean(X, weight)[:, None, :]) ** 2, axis=-1), none)
    nearest = xp.full_like(away, math.inf)
    chosen = []
    for _ in range(R):
        chosen.append(xp.argmax(away, axis=1))
        pick = xp.take(flat, chosen[-1] + items, axis=0)[:, None, :]
        nearest = xp.minimum(nearest, xp.sum((some - pick) ** 2, axis=-1))
        away = xp.where(here, nearest, none)
    return xp.stack(chosen, axis=1) * step


def weighted_mean(X: Any, weight: Any) -> Any:
    """Return the mean row (b, d); zeros if all weights are zero."""
    xp = array_namespace(X)
    total = xp.sum(weight, axis=1)[:, None]
    return xp.sum(weight[..., None] * X, axis=1) / xp.where(total > 0, total, xp.ones_like(total))


def from_rows(X: Any, weight: Any, rows: Any, iterations: int) -> tuple[Any, Any]:
    """Return the clusters whose first centers are given rows (b, R), see `cluster`."""
    xp, R = array_namespace(X), rows.shape[1]
    squares = xp.sum(X * X, axis=-1)
    (centers,) = rows_of_each((X,), rows)
    labels, distance = _by_label(X).assigned(X, squares, centers)
    for _ in range(iterations):
        sums, weights = _by_label(X).label_sums(labels, weight, X, R)
        divisor = xp.where(weights > 0, weights, xp.ones_like(weights))[..., None]
        centers = xp.where((weights > 0)[..., None], sums / divisor, centers)
        labels, distance = _by_label(X).assigned(X, squares, centers)
    return labels, distance


def assigned(X: Any, squares: Any, centers: Any) -> tuple[Any, Any]:
    """Return the nearest center of each row, (b, n) int64, on ties the first, and its squared distance, (b, n).

    `squares`: (b, n), the squared lengths of the rows.
    """
    xp = array_namespace(X)
    n = X.shape[1]
    step = _step(X, X.shape[0] * centers.shape[1])
    norms = xp.sum(centers * centers, axis=-1)[:, None, :]
    columns = xp.matrix_transpose(centers)
    labels, least = [], []
    for low in range(0, max(n, 1), step):
        relative = norms - 2 * xp.matmul(X[:, low : min(n, low + step), :], columns)
        labels.append(xp.argmin(relative, axis=-1))
        least.append(xp.min(relative, axis=-1))
    distance = xp.concat(least, axis=1) + squares
    return xp.concat(labels, axis=1), xp.where(distance > 0, distance, xp.zeros_like(distance))


def label_sums(labels: Any, weight: Any, X: Any, R: int) -> tuple[Any, Any]:
    """Return ``Σ w x`` (b, R, d) and ``Σ w`` (b, R) over the rows with each label; -1 is no label.

    Products with indicators have a fixed order of summation, unlike scattered additions on a device.
    """
    xp = array_namespace(X)
    names = xp.arange(R, device=array_api_compat.device(X))
    n = X.shape[1]
    step = _step(X, X.shape[0] * R)
    total = weights = None
    for low in range(0, max(n, 1), step):
        part = slice(low, min(n, low + step))
        inside = xp.astype(labels[:, part, None] == names, X.dtype) * weight[:, part, None]
        more, heavier = xp.matmul(xp.matrix_transpose(inside), X[:, part, :]), xp.sum(inside, axis=1)
        total, weights = (more, heavier) if total is None else (total + more, weights + heavier)
    return total, weights


def _by_label(array: Any) -> LabelKernels:
    return cast(LabelKernels, kernels_for("pruned", array))


def _step(like: Any, width: int) -> int:
    """Return how many rows of `width` numbers to hold at a time, on the device of an array."""
    return max(1, (_ON_DEVICE if is_away(like) else _ENTRIES) // max(width, 1))


def levels(labels: Any, values: Any, weight: Any, R: int) -> Any:
    """Return the weighted mean (b, R) of values (b, n) over the rows with each label; 0 for a label without rows."""
    xp = array_namespace(values)
    sums, weights = _by_label(values).label_sums(labels, weight, values[..., None], R)
    return sums[..., 0] / xp.where(weights > 0, weights, xp.ones_like(weights))


def radii(labels: Any, items: Summaries, item_radii: Any, summaries: Summaries) -> Any:
    """Return bounds (b, R) of distances of members from the means of summaries, in float64, rounded up.

    Members of an item are within its radius (b, n) of its mean. They are in the summary of its label (b, n), or in no
    summary if the label is -1. The bound is 0 for a summary without members.
    """
    xp = array_namespace(item_radii)
    means, centers = (xp.astype(x.keys, xp.float64) / _positive(xp, x.weight)[..., None] for x in (items, summaries))
    (b, R, d), n, device = centers.shape, means.shape[1], array_api_compat.device(centers)
    if not R or not n:
        return xp.zeros((b, R), dtype=xp.float64, device=device)
    own = xp.where(labels >= 0, labels, xp.zeros_like(labels)) + xp.arange(b, device=device)[:, None] * R
    own_centers = xp.take(xp.reshape(centers, (b * R, d)), xp.reshape(own, (-1,)), axis=0)
    far = (1 + (d + 8) * 2.0**-52) * (item_radii + lengths(means - xp.reshape(own_centers, (b, n, d))))
    names, step, found = xp.arange(R, device=device), _step(item_radii, b * R), None
    for low in range(0, n, step):
        part = slice(low, min(n, low + step))
        inside = labels[:, part, None] == names
        most = xp.max(xp.where(inside, far[:, part, None], xp.zeros_like(far[:, part, None])), axis=1)
        found = most if found is None else xp.maximum(found, most)
    return found


def _positive(xp: Any, weight: Any) -> Any:
    return xp.astype(xp.where(weight > 0, weight, xp.ones_like(weight)), xp.float64)


def merged(labels: Any, log_weight: Any, items: Summaries, R: int) -> Summaries:
    """Return R summaries, each of the items (b, n) with its label and weights times exp(log_weight).

    A key is an item of weight and count 1 and offset 0. Items with the label -1 are in no summary.
    """
    xp = array_namespace(items.keys)
    factor, ones = xp.exp(log_weight), xp.ones_like(log_weight)
    # w' = a w gives Σ w' log w' = a (Σ w log w + log a Σ w)
    offset = items.offset + log_weight * items.weight
    scalars = xp.stack([factor * items.weight, factor * offset, items.count], axis=-1)
    kernels, width = _by_label(items.keys), items.keys.shape[-1]
    sums, _ = kernels.label_sums(labels, factor, xp.concat([items.keys, items.values], axis=-1), R)
    scalars, _ = kernels.label_sums(labels, ones, scalars, R)
    return Summaries(
        weight=scalars[..., 0],
        keys=sums[..., :width],
        values=sums[..., width:],
        offset=scalars[..., 1],
        count=scalars[..., 2],
    )


def reads(_: Any, /) -> bool:
    """Return False: the caller scores and chooses in steps."""
    return False


def score_rows(_: Any, __: Any, ___: Any, ____: bool, /) -> tuple[Any, Any]:
    """Raise, because `reads` says that this kernel is not here."""
    raise NotImplementedError("the caller scores in steps")


def choose_rows(_: Any, __: Any, ___: int, /) -> tuple[Any, Any, Any]:
    """Raise, because `reads` says that this kernel is not here."""
    raise NotImplementedError("the caller chooses in steps")


def merge_rows(_: Any, __: Any, ___: Any, ____: Any, _____: Any, ______: int, /) -> tuple[Any, Any, Any]:
    """Raise, because `reads` says that this kernel is not here."""
    raise NotImplementedError("the caller merges in steps")


def rows_of_each(arrays: tuple[Any, ...], places: Any) -> tuple[Any, ...]:
    """Return the rows of each of several arrays (b, n, ...) at places (b, s): (b, s, ...)."""
    if is_torch(places) and places.device.type != "cpu":  # one launch each
        return tuple(_gathered(A, places) for A in arrays)
    xp, (b, n) = array_namespace(arrays[0]), arrays[0].shape[:2]
    flat = xp.reshape(places + xp.arange(b, device=array_api_compat.device(places))[:, None] * n, (-1,))
    return tuple(
        xp.reshape(xp.take(xp.reshape(A, (b * n, *A.shape[2:])), flat, axis=0), (*places.shape, *A.shape[2:]))
        for A in arrays
    )


def _gathered(A: Any, places: Any) -> Any:
    """Return the rows of a tensor (b, n, ...) at places (b, s), on a device."""
    rest = A.shape[2:]
    return A.gather(1, places.reshape(*places.shape, *(1,) * len(rest)).expand(*places.shape, *rest))


def renews(_: Any, __: Any, ___: tuple[int, int], ____: int, /) -> bool:
    """Return False: the caller renews in steps."""
    return False


def renewed(_: RenewalArguments, __: dict[str, Any] | None = None) -> None:
    """Return None, so that the caller renews in steps."""


def running(sums: Any, before: Any) -> Any:
    """Return sums (chunks, ...) up to and with each chunk, after others (...), in place."""
    sums[0] += before
    for one, after in pairwise(sums):  # `np.add.accumulate` is slow along this axis
        after += one
    return sums


def scaled(x: PrunedArguments) -> PrunedArguments:
    """Return arguments with queries times their factor."""
    return x if x.factor == 1 else replace(x, q=x.q * x.factor, factor=1.0)


def mixture(x: PrunedArguments, _: dict[str, Any] | None = None, __: Any = None) -> tuple[Any, Any]:
    """Return the output (b, g, m, D), and the share of the summaries in each query's weights, (b, g, m)."""
    x, xp = scaled(x), array_namespace(x.q)
    b, g, m = x.q.shape[:3]
    first, last = ([int(i) for i in bound] for bound in (x.first, x.last))
    slots = x.kept_keys.shape[1] + (0 if x.summaries is None else x.summaries.weight.shape[1])
    near = max((high - low for low, high in zip(first, last, strict=True)), default=0)
    if not b * m * (slots + near):  # no queries, or no keys
        like = {"dtype": x.q.dtype, "device": array_api_compat.device(x.q)}
        Y = xp.matmul(x.q[..., :0], xp.zeros((b, g, 0, x.values.shape[-1]), **like))
        return Y, xp.zeros((b, g, m), **like)
    step = max(_LEAST, near, int(math.sqrt(_ENTRIES / (b * g))) - slots - near)
    parts = []
    for low in range(0, m, step):
        high = min(m, low + step)
        parts.append(_block(xp, x, low, high, first[low], max(first[low], last[high - 1])))
    Y, rest = (xp.concat(part, axis=2) for part in zip(*parts, strict=True))
    return Y, rest


def _block(xp: Any, x: PrunedArguments, low: int, high: int, begin: int, end: int) -> tuple[Any, Any]:
    """Return outputs and rest masses of the positions low to high, whose near keys lie between begin and end."""
    b, g, _, d = x.q.shape
    device = array_api_compat.device(x.q)
    q = xp.reshape(x.q[:, :, low:high, :], (b, g * (high - low), d))
    exact, values, flags = [], [], []
    if x.kept_keys.shape[1]:
        exact.append(xp.matmul(q, xp.matrix_transpose(x.kept_keys)))
        values.append(x.kept_values)
        there = xp.ones_like(exact[0], dtype=xp.bool)
        if x.kept_count is not None:
            there = there & (xp.arange(x.kept_keys.shape[1], device=device) < x.kept_count[:, None])[:, None, :]
        flags.append(there)
    place = xp.arange(begin, end, device=device)
    edges = (xp.asarray(bound, device=device)[low:high, None] for bound in (x.first, x.last))
    within = _for_all(xp, (next(edges) <= place) & (place < next(edges)), g)[None, :, :]
    keys, near_values = x.keys[:, begin:end, :], x.values[:, begin:end, :]
    near = xp.matmul(q, xp.matrix_transpose(keys))
    role = xp.full(near.shape[::2], -1, device=device) if x.role is None else x.role[:, begin:end]
    exact.append(near)
    values.append(near_values)
    flags.append(within & (role > -2)[:, None, :])
    if x.summaries is None:
        weights = _weights(xp, xp.concat(exact, axis=-1), xp.concat(flags, axis=-1), None, x.power)
        Y, rest = xp.matmul(weights, xp.concat(values, axis=1)), xp.zeros_like(q[..., 0])
    else:
        held = mapped(x.summaries, lambda array: xp.astype(array, q.dtype, copy=False))
        log_w = xp.zeros_like(near[:, 0, :]) if x.log_weight is None else x.log_weight[:, begin:end]
        Y, rest = _with_summaries(held, q, exact, values, flags, within, role, log_w, x.power)
    return xp.reshape(Y, (b, g, high - low, Y.shape[-1])), xp.reshape(rest, (b, g, high - low))


def _with_summaries(
    held: Summaries, q: Any, exact: Any, values: Any, flags: Any, within: Any, role: Any, log_w: Any, power: Any
) -> tuple[Any, Any]:
    """Return outputs and the share of the summaries, without the keys near a query in them."""
    xp, near, dtype = array_namespace(q), exact[-1], q.dtype
    weight, offset = held.weight[:, None, :], held.offset[:, None, :]
    inner = xp.matmul(q, xp.matrix_transpose(held.keys))
    names = xp.arange(held.weight.shape[1], device=array_api_compat.device(q))
    member = xp.astype(role[..., None] == names, dtype)
    out = xp.astype(within, dtype) * xp.exp(log_w)[:, None, :]  # the weight that each row takes out, if it has a label
    weight = weight - xp.matmul(out, member)
    inner = inner - offset - xp.matmul(out * (near - log_w[:, None, :]), member)
    left = held.count[:, None, :] - xp.matmul(xp.astype(within, dtype), member) > 0.5
    left = left & (weight > 0)  # if only light members are left, rounding may exceed them
    divisor = xp.where(left, weight, xp.ones_like(weight))
    mean = inner / divisor
    here = xp.concat([*flags, left & xp.ones_like(mean, dtype=xp.bool)], axis=-1)
    copies = None
    if power is None:
        mean = mean + xp.log(divisor)
    else:
        copies = xp.concat([*(xp.ones_like(part) for part in exact), divisor + xp.zeros_like(mean)], axis=-1)
    weights = _weights(xp, xp.concat([*exact, mean], axis=-1), here, copies, power)
    split = weights.shape[-1] - mean.shape[-1]
    share = weights[..., split:]
    coefficient = share / divisor
    back = xp.matmul(coefficient, xp.matrix_transpose(member)) * out
    direct = xp.concat(
        [weights[..., : split - near.shape[-1]], weights[..., split - near.shape[-1] : split] - back], axis=-1
    )
    Y = xp.matmul(direct, xp.concat(values, axis=1)) + xp.matmul(coefficient, held.values)
    return Y, xp.sum(share, axis=-1)


def _weights(xp: Any, x: Any, here: Any, copies: Any, power: float | None) -> Any:
    """Return weights that sum to 1 along the last axis over the entries flagged in `here`, or to 0 without any."""
    size = x if power is None else xp.abs(x)
    top = xp.max(xp.where(here, size, xp.full_like(size, -math.inf)), axis=-1, keepdims=True)
    zeros = xp.zeros_like(x)
    if is_torch(top):
        top = top.detach()  # weights do not depend on it
    top = xp.where(top == -math.inf, xp.zeros_like(top), top)
    if power is None:
        E = xp.where(here, xp.exp(xp.where(here, x - top, zeros)), zeros)
    else:
        E = xp.where(here, size / xp.where(top > 0, top, xp.ones_like(top)), zeros) ** power
        E = E if copies is None else E * copies
    total = xp.sum(E, axis=-1, keepdims=True)
    return E / xp.where(total > 0, total, xp.ones_like(total))


def _for_all(xp: Any, flags: Any, g: int) -> Any:
    """Repeat flags (positions, keys) for g queries a position, (g · positions, keys)."""
    return flags if g == 1 else xp.concat([flags] * g, axis=0)
