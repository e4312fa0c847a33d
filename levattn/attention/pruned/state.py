"""Causal pruned attention, chunk by chunk, in a state of bounded size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from levattn._kernels import kernels_for
from levattn._kernels.pruned.contract import PrunedArguments, Summaries
from levattn.attention.common.space import device_of, namespace_of, without_gradient
from levattn.attention.pruned.certificate import longest_of
from levattn.attention.pruned.choice import (
    Measure,
    Sums,
    balanced,
    chosen,
    flips,
    grouped,
    means_of,
    measured,
    rows_at,
    scored,
)
from levattn.attention.pruned.slots import Slots
from levattn.sensitivity.leverage import TIE

__all__ = [
    "PrunedPart",
    "PrunedState",
    "SelectionRule",
    "arrays_of",
    "converted",
    "empty_part",
    "in_range",
    "picked",
    "stepped",
]


@dataclass(frozen=True)
class SelectionRule:
    """How keys are chosen: what does not change while a sequence is read."""

    slots: Slots
    kind: str  # "residual", "expected", "leverage" or "given"
    epsilon: float | None
    center: bool
    power: float | None


@dataclass(frozen=True, eq=False)
class PrunedPart:
    """What is held of sequences that have had the same number of positions.

    rows: (b,) int64 of numpy, which items of the batch these are.
    kept, kept_values, kept_scores, kept_places: (b, s, d), (b, s, D), (b, s), (b, s): chosen keys, the scores that
        came with them, and their positions.
    kept_count: (b,) or None.
    summaries: of all other keys but the recent ones, or None; in float64, as errors of merging again and again add up.
    radius: (b, R) in float64, no member is farther from its mean.
    recent, recent_values, recent_scores: the last keys, (b, r, ...).
    keys, queries: sums over all positions.
    largest: (b,), no value has a larger norm.
    positions: how many there have been.
    """

    rows: Any
    kept: Any
    kept_values: Any
    kept_scores: Any
    kept_places: Any
    kept_count: Any
    summaries: Summaries | None
    radius: Any
    recent: Any
    recent_values: Any
    recent_scores: Any
    keys: Sums
    queries: Sums
    largest: Any
    positions: int


@dataclass(frozen=True, eq=False)
class PrunedState:
    """What causal `pruned_attention` holds of the positions so far: its size does not grow with their number.

    A state is not changed by its use: a call returns a new one.

    Attributes
    ----------
    slots : Slots
        What each query reads.
    batch : tuple of int
        The leading axes of the keys, heads among them.
    rule, parts
        The options of selection and the arrays held, which calls read.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import pruned_attention
    >>> Q, K, V = np.random.default_rng(0).standard_normal((3, 1000, 16))
    >>> Y, state = pruned_attention(Q, K, V, budget=100, causal=True, return_state=True)
    >>> int(state.positions), state.slots.total, state.nbytes < 30_000
    (1000, 100, True)
    """

    slots: Slots
    batch: tuple[int, ...]
    rule: SelectionRule
    parts: tuple[PrunedPart, ...]

    @property
    def positions(self) -> int:
        """The number of positions that the longest sequence has had."""
        return max((part.positions for part in self.parts), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held."""
        return sum(_size(value) for part in self.parts for value in vars(part).values())


def _size(value: Any) -> int:
    if isinstance(value, Summaries | Sums):
        return sum(_size(part) for part in vars(value).values())
    if not hasattr(value, "shape"):
        return 0
    xp = namespace_of(value)
    info = xp.finfo if xp.isdtype(value.dtype, "real floating") else xp.iinfo
    return int(math.prod(value.shape) * info(value.dtype).bits // 8)


def empty_part(rows: Any, K: Any, V: Any, scores: Any) -> PrunedPart:
    """Return the part that has seen nothing, for keys and values like those of stacks."""
    xp = namespace_of(K)
    none, no_values = K[:, :0, :], V[:, :0, :]
    no_scores = None if scores is None else scores[:, :0]
    places = xp.zeros((K.shape[0], 0), dtype=xp.int64, device=device_of(K))
    sums = Sums.of(none)
    zeros = xp.zeros((K.shape[0],), dtype=V.dtype, device=device_of(V))
    return PrunedPart(
        rows, none, no_values, no_scores, places, None, None, None, none, no_values, no_scores, sums, sums, zeros, 0
    )


def picked(part: PrunedPart, which: Any) -> PrunedPart:
    """Return a part of some of its items, by their places in it, an array of numpy."""
    xp = namespace_of(part.recent)
    places = xp.asarray(which, device=device_of(part.recent))
    return replace(converted(part, lambda array: xp.take(array, places, axis=0)), rows=part.rows[which])


def converted(part: PrunedPart, convert: Callable[[Any], Any]) -> PrunedPart:
    """Return a part whose arrays, but for `rows`, are what a function makes of them."""

    def found(value: Any) -> Any:
        if value is None or isinstance(value, int):
            return value
        if isinstance(value, Sums | Summaries):
            return replace(value, **{name: found(array) for name, array in vars(value).items()})
        return convert(value)

    return replace(part, **{name: found(value) for name, value in vars(part).items() if name != "rows"})


def arrays_of(part: PrunedPart) -> list[Any]:
    """Return the arrays of a part, but for `rows`."""
    found: list[Any] = []
    converted(part, found.append)
    return found


def stepped(
    rule: SelectionRule, part: PrunedPart, q: Any, K: Any, V: Any, scores: Any, watch: Any = None
) -> tuple[Any, PrunedPart]:
    """Return the output (b, g, T, D) for the next T positions, and the part after them.

    q: (b, g, T, d), times the scale. scores: (b, T), where they are given. watch: called with each mixture and part.
    """
    xp = namespace_of(q)
    T, C = K.shape[1], rule.slots.chunk
    outputs, low = [], 0
    while low < T:
        high = min(T, low + C - part.positions % C)
        cut = slice(low, high)
        Y, part = _within_chunk(
            xp,
            rule,
            part,
            q[:, :, cut, :],
            K[:, cut, :],
            V[:, cut, :],
            None if scores is None else scores[:, cut],
            watch,
        )
        outputs.append(Y)
        low = high
    if not outputs:
        return xp.zeros((*q.shape[:3], V.shape[-1]), dtype=q.dtype, device=device_of(q)), part
    return (outputs[0] if len(outputs) == 1 else xp.concat(outputs, axis=2)), part


def in_range(q: Any, keys: Any, before: Any = None) -> Any:
    """Return queries (b, g, m, d) with the same weights of a power, whose products with keys (b, n, d) are in range.

    These stay as they are if a query is multiplied by a number. With `before`, earlier keys, query i
    reads these and the first i + 1 keys, and nothing else changes what it is multiplied by.
    """
    if not (q.shape[-1] and q.shape[-2] and keys.shape[1]):
        return q
    xp = namespace_of(q)
    tiny = xp.finfo(q.dtype).smallest_normal
    half = -math.log2(tiny) / 2

    def exponents(X: Any) -> Any:
        return xp.log2(xp.maximum(xp.abs(without_gradient(X)), xp.full_like(X, tiny)))

    columns = exponents(keys)
    if before is None:
        columns = xp.max(columns, axis=1, keepdims=True)
    else:
        if before.shape[1]:
            columns = xp.maximum(columns, xp.max(exponents(before), axis=1, keepdims=True))
        step = 1
        while step < columns.shape[1]:  # the largest of the first i + 1, in doubling steps
            later = xp.maximum(columns[:, step:, :], columns[:, :-step, :])
            columns = xp.concat([columns[:, :step, :], later], axis=1)
            step *= 2
    largest = xp.max(exponents(q) + columns[:, None, :, :], axis=-1, keepdims=True)
    far = (xp.abs(largest) > half) & xp.isfinite(largest)
    steps = xp.clip(xp.where(far, -xp.floor(largest), xp.zeros_like(largest)), -2 * half, 2 * half)
    return q * 2.0**steps


def _held(part: PrunedPart) -> Any:
    """Return the keys of a part, those of its summaries as means."""
    stacks = [part.kept, part.recent]
    if part.summaries is not None:
        stacks.append(means_of(part.summaries)[0])
    xp = namespace_of(part.recent)
    return xp.concat([xp.astype(X, part.recent.dtype) for X in stacks], axis=1)


def _within_chunk(
    xp: Any, rule: SelectionRule, part: PrunedPart, q: Any, K: Any, V: Any, scores: Any, watch: Any
) -> tuple[Any, PrunedPart]:
    """Return the output for positions of one chunk, and the part after them."""
    b, g, T, d = q.shape
    held = part.recent.shape[1]
    keys, values = xp.concat([part.recent, K], axis=1), xp.concat([part.recent_values, V], axis=1)
    x = PrunedArguments(
        q=q if rule.power is None else in_range(q, K, _held(part)),
        kept_keys=part.kept,
        kept_values=part.kept_values,
        kept_count=part.kept_count,
        summaries=part.summaries,
        keys=keys,
        values=values,
        first=[0] * T,
        last=[held + i + 1 for i in range(T)],
        role=None,
        log_weight=None,
        power=rule.power,
    )
    Y, rest = kernels_for("pruned", q).mixture(x)
    largest = xp.maximum(part.largest, longest_of(without_gradient(V)))
    if watch is not None:
        watch(x, replace(part, largest=largest), rest)
    queries = xp.reshape(without_gradient(q), (b, g * T, d))
    part = replace(
        part,
        recent=keys,
        recent_values=values,
        recent_scores=None if scores is None else xp.concat([part.recent_scores, scores], axis=1),
        keys=part.keys.plus(Sums.of(without_gradient(K))),
        queries=part.queries.plus(Sums.of(queries)),
        largest=largest,
        positions=part.positions + T,
    )
    return Y, (part if part.positions % rule.slots.chunk else _renewed(xp, rule, part))


def _renewed(xp: Any, rule: SelectionRule, part: PrunedPart) -> PrunedPart:
    """Return the part after a selection among the keys that were kept and those that are no longer recent."""
    leaving = part.recent.shape[1] - rule.slots.window
    if leaving <= 0:
        return part
    device, b = device_of(part.recent), part.recent.shape[0]
    keys = xp.concat([part.kept, part.recent[:, :leaving, :]], axis=1)
    values = xp.concat([part.kept_values, part.recent_values[:, :leaving, :]], axis=1)
    oldest = part.positions - part.recent.shape[1]
    fresh = xp.broadcast_to(xp.arange(oldest, oldest + leaving, dtype=xp.int64, device=device), (b, leaving))
    places = xp.concat([part.kept_places, fresh], axis=1)
    there = xp.ones(places.shape, dtype=xp.bool, device=device)
    if part.kept_count is not None:
        row = xp.arange(places.shape[1], device=device)
        there = (row < part.kept_count[:, None]) | (row >= part.kept.shape[1])
    given = None
    if part.kept_scores is not None:
        given = xp.concat([part.kept_scores, part.recent_scores[:, :leaving]], axis=1)

    if rule.power is not None:
        keys = keys * flips(without_gradient(keys), part.keys.second)
    measure = measured(part.queries, part.keys, rule.power, keys.dtype)
    X, along = measure.places(without_gradient(keys))
    weight = xp.astype(there, keys.dtype)
    held = part.summaries
    if held is not None:
        if rule.power is not None:
            held = replace(held, keys=held.keys * flips(without_gradient(held.keys), part.keys.second))
        X_held, along_held = _places_of(measure, held)
        X, along = xp.concat([X_held, X], axis=1), xp.concat([along_held, along], axis=1)
        weight = xp.concat([xp.astype(held.count, keys.dtype), weight], axis=1)
    R, n, clusters = rule.slots.summaries, keys.shape[1], None
    if given is not None:
        scores = given
    elif rule.kind == "leverage":
        scores = _prefix_leverage(xp, part.keys, without_gradient(keys), rule.center)
    else:
        scores, clusters = scored(rule.kind, X, along, weight, R, rule.power)
        scores = scores[:, X.shape[1] - n :]
    scores = xp.where(there, scores, xp.full_like(scores, -math.inf))
    epsilon = rule.epsilon
    if epsilon is not None and rule.kind == "leverage":  # scores that tie with it are in
        epsilon *= 1 - TIE - 8 * float(xp.finfo(scores.dtype).eps)
    order, count, flags = chosen(scores, rule.slots.selected, epsilon, there & (places < rule.slots.sinks))

    summaries, radius = held, part.radius
    if R:
        ones = xp.ones(scores.shape, dtype=xp.float64, device=device)
        items = Summaries(ones, keys, values, xp.zeros_like(ones), ones)
        reach = xp.zeros_like(ones)
        left = xp.astype(there & ~flags, keys.dtype)
        if held is None:
            items = Summaries(*(xp.astype(array, xp.float64, copy=False) for array in vars(items).values()))
        else:  # which are in float64
            items = Summaries(*(xp.concat([vars(held)[name], array], axis=1) for name, array in vars(items).items()))
            reach = xp.concat([part.radius, reach], axis=1)
            left = xp.concat([weight[:, : reach.shape[1] - n], left], axis=1)
        labels, _, summaries = grouped(X, along, items, left, R, rule.power, clusters)
        summaries = summaries if rule.power is not None else balanced(summaries)  # of powers all weights are 1
        radius = kernels_for("pruned", reach).radii(labels, _still(items), reach, _still(summaries))
    return replace(
        part,
        kept=rows_at(keys, order),
        kept_values=rows_at(values, order),
        kept_scores=None if given is None else rows_at(given, order),
        kept_places=rows_at(places, order),
        kept_count=count,
        summaries=summaries,
        radius=radius,
        recent=part.recent[:, leaving:, :],
        recent_values=part.recent_values[:, leaving:, :],
        recent_scores=None if given is None else part.recent_scores[:, leaving:],
    )


def _still(held: Summaries) -> Summaries:
    """Return summaries whose means have no gradients."""
    return replace(held, keys=without_gradient(held.keys), weight=without_gradient(held.weight))


def _places_of(measure: Measure, held: Summaries) -> tuple[Any, Any]:
    """Return the same for summaries: where their means are, and what each unit of their weight stands for."""
    xp, dtype = namespace_of(held.keys), measure.root.dtype
    means, weight = means_of(held)
    X, along = measure.places(xp.astype(without_gradient(means), dtype))
    return X, along - xp.astype(held.offset / weight, dtype)


def _prefix_leverage(xp: Any, keys: Sums, K: Any, center: bool) -> Any:
    """Return the leverage scores (b, n) of rows among all keys so far; rows outside their span count as 1."""
    moment = keys.moment(center)
    values, directions = xp.linalg.eigh(moment)
    top = values[:, -1:]
    sound = values > top * moment.shape[-1] * 2.0**-50
    wide = xp.astype(K, xp.float64)
    centered = wide - keys.mean[:, None, :] if center else wide
    along = xp.matmul(centered, directions) ** 2
    inverse = xp.where(sound, 1 / xp.where(sound, values, xp.ones_like(values)), xp.zeros_like(values))
    scores = xp.sum(along * inverse[:, None, :], axis=-1) / keys.count
    outside = xp.sum(xp.where(sound[:, None, :], xp.zeros_like(along), along), axis=-1)
    beyond = outside > 2.0**-40 * xp.sum(centered * centered, axis=-1)
    return xp.astype(xp.where(beyond, xp.ones_like(scores), xp.clip(scores, 0.0, 1.0)), K.dtype)
