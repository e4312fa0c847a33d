"""Renewal of the selection of causal pruned attention: the keys that are kept, and summaries of the others."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from levattn._core.checks import TIE
from levattn._kernels import kernels_for
from levattn._kernels.pruned import RenewalArguments, Summaries, mapped
from levattn.attention.arguments import device_of, namespace_of, without_gradient
from levattn.attention.pruned import choice
from levattn.attention.pruned.slots import Checks, SelectionRule
from levattn.attention.pruned.state import PrunedPart

# The measure of the queries and keys so far, and the spectrum of the keys if it is needed
Known = tuple[choice.Measure, Any]

_LEAST = 2.0**-900  # mean square of keys, below which squares of some are lost
_ROUNDS = 0  # of Lloyd's algorithm: centers stay keys, so no selection empties a cluster


def selected_anew(
    rule: SelectionRule, part: PrunedPart, known: Known | None, room: dict[str, Any], bounded: bool, checks: Checks
) -> PrunedPart:
    """Return the part after a selection among the keys that were kept and the keys that are no longer recent.

    `known`: a result of `known_after`, or None to compute it. `bounded`: whether to compute radii.
    """
    leaving = part.recent.shape[1] - rule.slots.window
    if leaving <= 0:
        return part
    if rule.power is None and rule.epsilon is None and rule.slots.summaries and rule.kind in ("residual", "expected"):
        found = _renewed_at_once(rule, part, leaving, room, bounded)
        if found is not None:
            return found
    xp = namespace_of(part.recent)
    keys = xp.concat([part.kept, part.recent[:, :leaving, :]], axis=1)
    values = xp.concat([part.kept_values, part.recent_values[:, :leaving, :]], axis=1)
    places, there = _candidates(part, leaving)
    given: Any = None
    held = part.summaries
    if part.kept_scores is not None:
        given = xp.concat([part.kept_scores, part.recent_scores[:, :leaving]], axis=1)
    if known is None:
        (known,) = known_after(rule, [part.queries], [part.keys], keys.dtype, checks)
    measure, spectrum = known
    if rule.power is not None:
        keys = choice.one_sided(keys, spectrum)
        held = None if held is None else replace(held, keys=choice.one_sided(held.keys, spectrum))
    X, along, weight = _placed(measure, held, without_gradient(keys), there)
    scores, epsilon, clusters = given, rule.epsilon, None
    if rule.kind == "leverage":
        scores = _prefix_leverage(part.keys, spectrum, without_gradient(keys), rule.center, checks)
        if epsilon is not None:  # selects scores that tie with it
            epsilon *= 1 - TIE - 8 * float(xp.finfo(scores.dtype).eps)
    elif given is None:
        R = rule.slots.summaries
        scores, clusters = choice.scored(rule.kind, X, along, weight, R, rule.power, checks, _ROUNDS)
        scores = scores[:, X.shape[1] - keys.shape[1] :]
    forced = None
    if part.kept_count is None and given is None:
        forced = min(rule.slots.sinks, part.positions - part.recent.shape[1] + leaving)
    else:
        scores = xp.where(there, scores, xp.full_like(scores, -math.inf))
    first = there & (places < rule.slots.sinks)
    order, count, flags = choice.chosen(scores, rule.slots.selected, epsilon, first, forced, checks)
    if rule.slots.summaries:
        rows = choice.items_of(xp.ones(scores.shape, dtype=xp.float64, device=device_of(scores)), keys, values)
        left = xp.astype(there & ~flags, keys.dtype)
        part = _summarized(rule, replace(part, summaries=held), X, along, rows, left, weight, clusters, bounded)
    kept, kept_values, kept_places = choice.rows_of_each((keys, values, places), order)
    return replace(
        part,
        kept=kept,
        kept_values=kept_values,
        kept_scores=None if given is None else choice.rows_at(given, order),
        kept_places=kept_places,
        kept_count=count,
        recent=part.recent[:, leaving:, :],
        recent_values=part.recent_values[:, leaving:, :],
        recent_scores=None if given is None else part.recent_scores[:, leaving:],
    )


def known_after(
    rule: SelectionRule, queries: list[choice.Sums], keys: list[choice.Sums], dtype: Any, checks: Checks
) -> list[Known]:
    """Return the measures and spectra that selections need, for sums at several positions, all at once."""
    measures = choice.measures(queries, keys, rule.power, dtype, checks)
    if rule.kind != "leverage" and rule.power is None:
        return [(measure, None) for measure in measures]
    spectra = choice.spectra(keys, rule.kind == "leverage" and rule.center, checks)
    return list(zip(measures, spectra, strict=True))


def _placed(measure: choice.Measure, held: Any, keys: Any, there: Any) -> tuple[Any, Any, Any]:
    """Return places, log masses and counts of the summaries, if there are any, and of the keys behind them."""
    xp = namespace_of(keys)
    X, along = measure.places(keys)
    weight = xp.astype(there, keys.dtype)
    if held is None:
        return X, along, weight
    X_held, along_held = measure.places_of(held)
    counts = xp.astype(held.count, keys.dtype)
    both = ((X_held, X), (along_held, along), (counts, weight))
    X, along, weight = (xp.concat(pair, axis=1) for pair in both)
    return X, along, weight


def _renewed_at_once(
    rule: SelectionRule, part: PrunedPart, leaving: int, room: dict[str, Any], bounded: bool
) -> PrunedPart | None:
    """Return the same part from one kernel; None if there is no kernel, or for numbers that need an error message."""
    xp = namespace_of(part.recent)
    found = kernels_for("pruned", part.recent).renewed(
        RenewalArguments(
            kept=part.kept,
            kept_values=part.kept_values,
            kept_places=part.kept_places,
            keys=part.recent[:, :leaving, :],
            values=part.recent_values[:, :leaving, :],
            oldest=part.positions - part.recent.shape[1],
            summaries=part.summaries,
            radius=part.radius,
            total=part.queries.total,
            second=part.queries.second,
            queries=part.queries.count,
            origin=xp.astype(part.keys.mean, part.recent.dtype),
            size=rule.slots.selected,
            sinks=rule.slots.sinks,
            R=rule.slots.summaries,
            residual=rule.kind == "residual",
            bounded=bounded,
        ),
        room,
    )
    if found is None:
        return None
    kept, values, places, summaries, radius = found
    return replace(
        part,
        kept=kept,
        kept_values=values,
        kept_places=places,
        summaries=summaries,
        radius=radius,
        recent=part.recent[:, leaving:, :],
        recent_values=part.recent_values[:, leaving:, :],
    )


def _candidates(part: PrunedPart, leaving: int) -> tuple[Any, Any]:
    """Return the positions (b, n) of kept keys and of the first recent keys, and flags of those present."""
    xp = namespace_of(part.recent)
    device, b = device_of(part.recent), part.recent.shape[0]
    oldest = part.positions - part.recent.shape[1]
    fresh = xp.broadcast_to(xp.arange(oldest, oldest + leaving, dtype=xp.int64, device=device), (b, leaving))
    places = xp.concat([part.kept_places, fresh], axis=1)
    there = xp.ones(places.shape, dtype=xp.bool, device=device)
    if part.kept_count is not None:
        row = xp.arange(places.shape[1], device=device)
        there = (row < part.kept_count[:, None]) | (row >= part.kept.shape[1])
    return places, there


def _summarized(
    rule: SelectionRule,
    part: PrunedPart,
    X: Any,
    along: Any,
    items: Summaries,
    left: Any,
    weight: Any,
    clusters: Any,
    bounded: bool,
) -> PrunedPart:
    """Return the part with new summaries of its old ones and of the rows that are left.

    `X`, `along`, `weight`: of the old summaries, if there are any, and of the rows behind them.
    """
    xp, held, new = namespace_of(X), part.summaries, items
    if held is None:
        items = mapped(items, lambda array: xp.astype(array, xp.float64, copy=False))
    else:  # summaries are in float64
        items = Summaries(*(xp.concat([vars(held)[name], array], axis=1) for name, array in vars(items).items()))
        left = xp.concat([weight[:, : held.weight.shape[1]], left], axis=1)
    labels, _, summaries = choice.grouped(X, along, items, left, rule.slots.summaries, rule.power, clusters, _ROUNDS)
    if rule.power is None:  # for powers all weights are 1
        summaries = choice.balanced(summaries)
    part = replace(part, summaries=summaries, radius=part.radius if bounded else None)
    if not bounded:
        return part
    item_radii = xp.zeros_like(new.weight)
    if held is not None:
        known = xp.full_like(held.weight, math.inf) if part.radius is None else part.radius  # if no call computed it
        item_radii = xp.concat([known, item_radii], axis=1)
    still = mapped(items, without_gradient), item_radii, mapped(summaries, without_gradient)
    return replace(part, radius=kernels_for("pruned", item_radii).radii(labels, *still))


def _prefix_leverage(keys: choice.Sums, spectrum: tuple[Any, Any], K: Any, center: bool, checks: Checks) -> Any:
    """Return the leverage scores (b, n) of rows among all keys so far; rows outside their span count as 1."""
    xp = namespace_of(K)
    values, directions = spectrum
    top = values[:, -1:]
    sound = values > top * values.shape[-1] * 2.0**-50
    rows = keys.less_mean(K) if center else xp.astype(K, xp.float64)
    checks.expect(
        xp.all((top[:, :, None] >= _LEAST) | (rows == 0)),
        "keys are so small that their squares vanish; expected larger ones, as a factor changes no leverage score",
        ValueError,
    )
    along = xp.matmul(rows, directions) ** 2
    inverse = xp.where(sound, 1 / xp.where(sound, values, xp.ones_like(values)), xp.zeros_like(values))
    scores = xp.sum(along * inverse[:, None, :], axis=-1) / keys.count
    in_null_space = xp.sum(xp.where(sound[:, None, :], xp.zeros_like(along), along), axis=-1)
    beyond = in_null_space > 2.0**-40 * xp.sum(rows * rows, axis=-1)
    return xp.astype(xp.where(beyond, xp.ones_like(scores), xp.clip(scores, 0.0, 1.0)), K.dtype)
