"""Pruned attention of all queries at once to keys in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from levattn._core.arrays import as_matrices
from levattn._core.types import Int64
from levattn._kernels import PRUNING
from levattn._kernels.pruned import PrunedArguments, mapped
from levattn._kernels.pruned.definition import scaled
from levattn.attention.arguments import device_of, namespace_of, reshaped, without_gradient
from levattn.attention.pruned import choice
from levattn.attention.pruned.call import Piece, PrunedCall, at_places, by_items
from levattn.attention.pruned.certificate import PrunedCertificate, bounded, longest_of, with_bounds
from levattn.attention.pruned.selection import Checks, SelectionRule
from levattn.functions import Power
from levattn.sensitivity.leverage import leverage_scores
from levattn.sets.universal import set_of

_ROUNDS = 1  # of Lloyd's algorithm
_MANY = 256  # queries of an item that are worth a thread


def whole_attention(call: PrunedCall, rule_for: Callable[[int], SelectionRule], factor: float, certified: bool) -> Any:
    """Return the result of a call; `rule_for` takes the number of keys that are there."""
    pieces: list[Piece] = []
    kept: list[Piece] = []
    most = 0
    for rows, keys, queries in call.groups():
        q, K, V, scores = call.taken(rows, keys, queries)
        sample = without_gradient(call.sampled(rows, q))
        rule = call.with_arrays_of_caller(rule_for(K.shape[1]))
        most = max(most, min(rule.slots.total, K.shape[1]))
        near = _near(rule.slots.window, q.shape[2], K.shape[1], keys, queries)
        arrays, flags = _spread(rule, factor, (q, K, V, scores, sample), near, certified, call.narrow)
        if certified:
            xp = namespace_of(flags)
            kept.append((rows, None, (at_places(xp.astype(flags, xp.int64)[:, None, :], keys, call.K.shape[1]),)))
        pieces.append((rows, queries, arrays))
    Y, *figures = call.results(pieces)
    if not certified:
        return Y
    lower, upper, error = figures
    (flags,) = call.combined(kept)
    flags = call.as_given(reshaped(flags[:, 0, :] > 0, (*call.given.batch, flags.shape[2])))
    return Y, PrunedCertificate(lower, upper, error, flags, np.full(call.q.shape[2], most, np.int64))


def _spread(
    rule: SelectionRule, factor: float, arrays: Any, near: tuple[Int64, Int64], certified: bool, narrow: Any
) -> tuple[tuple[Any, ...], Any]:
    """Return outputs, bounds if `certified`, and flags of kept keys (b, n): on several threads if it is worth it.

    arrays: queries before they are scaled, keys, values, scores or None, and the queries that select keys.
    """
    q, _, V, *_ = arrays
    numpy, all_items = isinstance(q, np.ndarray), slice(0, q.shape[0])
    Y = np.empty((*q.shape[:3], V.shape[2]), q.dtype) if numpy else None

    def attend(items: slice) -> Any:
        q, K, V, scores, sample = arrays
        if items != all_items:
            q, K, V, sample = (array[items, ...] for array in (q, K, V, sample))
            scores = scores if scores is None else scores[items, ...]
        x, flags = _planned(rule, q, K, V, scores, sample, near, factor)
        x = x if narrow is None else replace(x, narrow=(narrow, factor))
        x = scaled(x) if certified else x
        y, rest = PRUNING.mixture(x, None, Y if Y is None else Y[items])
        if not certified:
            return (y,), flags
        still = mapped(x, without_gradient)
        return with_bounds(y, _bounds(still, without_gradient(rest), _value_radius(rule, still.values))), flags

    found = by_items(attend, q, worth=q.shape[2] >= _MANY and rule.function is None)
    if len(found) == 1:
        return found[0]  # type: ignore[no-any-return]
    bounds = [np.concatenate(figures) for figures in zip(*(figures[1:] for figures, _ in found), strict=True)]
    return (Y, *bounds), np.concatenate([flags for _, flags in found])


def _near(window: int, m: int, n: int, keys: Any, queries: Any) -> tuple[Int64, Int64]:
    """Return where the keys near each query begin and end among the n keys that are there.

    keys, queries: their n and m places, or None for all places.
    """
    at = np.arange(m) if queries is None else queries
    if not window:
        return np.zeros(m, np.int64), np.zeros(m, np.int64)
    low, high = (at, at + 1) if keys is None else (np.searchsorted(keys, at, side) for side in ("left", "right"))
    return np.maximum(low - window, 0), np.minimum(high + window, n)


def _planned(
    rule: SelectionRule,
    q: Any,
    K: Any,
    V: Any,
    scores: Any,
    sample: Any,
    near: tuple[Int64, Int64],
    factor: float,
) -> tuple[PrunedArguments, Any]:
    """Return the mixture of some items, selected for the queries of the sample, and flags of kept keys (b, n).

    `factor`: by which q and the sample are yet to be multiplied.
    """
    xp, (b, n, d), device = namespace_of(q), K.shape, device_of(q)
    read, checks = (K, V), Checks()
    if xp.finfo(K.dtype).bits == 16:  # kernels of a device read what stays narrow
        K, V = xp.astype(K, xp.float32), xp.astype(V, xp.float32) if rule.slots.summaries else V
    own = without_gradient(K)
    if rule.power is not None:
        K = choice.one_sided(K, *choice.spectra([choice.Sums.of(own)], False, checks))
        read = K, V
    still, place = without_gradient(K), xp.arange(n, device=device)
    if rule.slots.selected >= n and rule.epsilon is None:
        checks.settle()
        all_there = xp.broadcast_to(place, (b, n))
        found = choice.Selected(all_there, None, all_there >= 0)
    else:
        rule = replace(rule, slots=replace(rule.slots, summaries=min(rule.slots.summaries, n)))
        R, ones = rule.slots.summaries, xp.ones((b, n), dtype=K.dtype, device=device)
        sinks, measure = rule.slots.sinks, None
        if R or rule.kind in ("expected", "residual"):
            # squares of float64 may leave its range before the factor
            asked, times = (sample * factor, 1.0) if K.dtype == xp.float64 else (sample, factor)
            queries = choice.Sums.of(xp.reshape(asked, (b, asked.shape[1] * asked.shape[2], d))).times(times)
            measure = choice.measured(queries, choice.Sums.of(still, second=False), rule.power, K.dtype, checks)
        items, first = choice.items_of(ones, K, V) if R else None, xp.broadcast_to(place < sinks, (b, n))
        rows = choice.Contenders(own, V, still, measure, ones, items, first, min(sinks, n), given=scores, roles=True)
        found = choice.selected(rule, rows, partial(_leverage, rule, still, ones), checks, _ROUNDS)
        checks.settle()
    role = found.role
    if role is None:
        role = xp.where(found.flags, xp.full_like(place, -2), xp.full_like(place, -1))
        role = role if found.labels is None else xp.where(found.flags, role, found.labels)
    x = PrunedArguments(
        q=q if rule.power is None else choice.in_range(q * factor, K),
        kept_keys=choice.rows_at(read[0], found.order),
        kept_values=choice.rows_at(read[1], found.order),
        kept_count=found.count,
        summaries=found.summaries,
        keys=read[0],
        values=read[1],
        first=near[0],
        last=near[1],
        role=role,
        log_weight=found.log_weight,
        power=rule.power,
        factor=factor if rule.power is None else 1.0,
    )
    return x, found.flags


def _leverage(rule: SelectionRule, K: Any, ones: Any) -> Any:
    """Return the leverage scores of keys; for a threshold, epsilon in the universal set and zero outside it."""
    if rule.epsilon is None:
        return leverage_scores(K, center=rule.center)
    xp = namespace_of(K)
    # with its margin for rounding
    inside = set_of(as_matrices(K, "K"), Power(2), rule.epsilon, center=rule.center).mask
    return xp.where(inside, xp.full_like(ones, rule.epsilon), xp.zeros_like(ones))


def _bounds(x: PrunedArguments, rest: Any, value_radius: Any) -> tuple[Any, Any, Any]:
    """Return the bounds of `bounded` for keys in memory; dropped keys are summarized to bound their mass."""
    xp = namespace_of(x.q)
    labels, ones = x.role, xp.ones_like(x.keys[..., 0])
    items, summaries = choice.items_of(ones, x.keys, x.values), x.summaries
    if summaries is None:
        labels = xp.where(labels == -1, xp.zeros_like(labels), xp.full_like(labels, -1))
        if not bool(xp.any(labels == 0)):
            return bounded(x, None, rest, value_radius)
        summaries = PRUNING.merged(labels, xp.zeros_like(ones), items, 1)
        x = replace(x, summaries=summaries, role=xp.where(labels == 0, labels, x.role))
        _, rest = PRUNING.mixture(x)
    labels, none = xp.where(labels >= 0, labels, xp.full_like(labels, -1)), xp.zeros_like(ones, dtype=xp.float64)
    return bounded(x, PRUNING.radii(labels, items, none, summaries), rest, value_radius)


def _value_radius(rule: SelectionRule, V: Any) -> Any:
    """Return the radius (b,) of a ball that holds the values, and zero where an output may read no key."""
    slots = rule.slots
    reads = slots.summaries or slots.window or slots.sinks or (slots.selected and rule.epsilon is None)
    if rule.power is None and reads and V.shape[1]:
        xp = namespace_of(V)
        V = V - (xp.min(V, axis=1, keepdims=True) / 2 + xp.max(V, axis=1, keepdims=True) / 2)  # any point will do
    return longest_of(V)
