"""Causal pruned attention, chunk by chunk, from a state of bounded size to the next."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from levattn._core.checks import TIE
from levattn._kernels import kernels_for
from levattn._kernels.pruned.contract import PrunedArguments, RenewalArguments, Summaries, mapped
from levattn.attention.common.space import device_of, namespace_of, without_gradient
from levattn.attention.pruned import choice
from levattn.attention.pruned.call import Piece, PrunedCall, by_items
from levattn.attention.pruned.certificate import PrunedCertificate, bounded, longest_of
from levattn.attention.pruned.rule import SelectionRule
from levattn.attention.pruned.state import PrunedPart, PrunedState, all_of, converted, empty_part, picked, some_of

__all__ = ["causal_attention"]

_ROUNDS = 0  # of Lloyd's algorithm: centers stay keys, which no selection empties


def causal_attention(
    call: PrunedCall,
    rule: SelectionRule,
    factor: float,
    state: PrunedState | None,
    return_state: bool,
    certified: bool,
) -> Any:
    """Return the result of a call, which goes on from a state if there is one."""
    before = 0 if state is None else state.positions
    drops = rule.epsilon is not None or rule.slots.selected < before + call.K.shape[1]
    if certified and drops and not rule.slots.summaries:
        raise ValueError(
            "return_certificate is True and summaries is 0; expected summaries for causal attention, as nothing is "
            "known of keys that were dropped"
        )
    pieces: list[Piece] = []
    after = []
    for part, rows, places in _parts(call, rule, state):
        q, K, V, scores = call.taken(rows, places, places)
        arrays, part = _spread(rule, part, factor, (q, K, V, scores), certified, return_state, call.narrow)
        pieces.append((rows, places, arrays))
        after.append(converted(part, call.as_given) if return_state else part)
    Y, *bounds = call.results(pieces)
    answer = [Y]
    if return_state:
        answer.append(PrunedState(rule.slots, call.given.batch, rule, tuple(after)))
    if certified:
        ends = np.arange(call.q.shape[2]) + 1 + before
        most = ends if rule.epsilon is not None else np.minimum(ends, rule.slots.total)
        lower, upper, error = bounds
        answer.append(PrunedCertificate(lower, upper, error, None, most))
    return answer[0] if len(answer) == 1 else tuple(answer)


def _parts(call: PrunedCall, rule: SelectionRule, state: PrunedState | None) -> list[tuple[PrunedPart, Any, Any]]:
    """Return what is held of items of the batch, which items they are, and the places of their positions."""
    b = call.K.shape[0]
    found = []
    if state is None:
        none = np.zeros(0, np.int64)
        for rows, places, _ in call.groups():
            part = empty_part(rule, np.arange(b) if rows is None else rows, *call.taken(rows, none, none)[1:])
            found.append((part, rows, places))
        return found
    if state.batch != call.given.batch:
        raise ValueError(f"state has batch {state.batch}; expected {call.given.batch}, as the keys have")
    first, (_, K, V, *_) = state.parts[0], call.given.stacks
    held, came = _kinds(first.recent, first.recent_values), _kinds(K, V)
    if held != came:
        raise ValueError(f"state holds {held}, and K and V are {came}; expected the same")
    for rows, places, _ in call.groups():
        for part in map(call.as_computed, state.parts):
            which = np.flatnonzero(np.isin(part.rows, np.arange(b) if rows is None else rows))
            if len(which) == len(part.rows):
                found.append((part, part.rows if len(part.rows) < b else None, places))
            elif len(which):
                found.append((picked(part, which), part.rows[which], places))
    return found


def _kinds(K: Any, V: Any) -> str:
    """Return what keys and values are, to be compared and shown."""
    library = namespace_of(K).__name__.removeprefix("array_api_compat.")
    dtype = str(K.dtype).rpartition(".")[2]
    return f"{dtype} of {library} with d = {K.shape[-1]} and D = {V.shape[-1]}"


def _spread(
    rule: SelectionRule, part: PrunedPart, factor: float, arrays: Any, certified: bool, goes_on: bool, narrow: Any
) -> tuple[tuple[Any, ...], PrunedPart]:
    """Return what `_stepped` does, on several threads if each has items of its own."""
    q, _, V, _ = arrays
    (b, g, T, _), numpy = q.shape, isinstance(q, np.ndarray)
    Y = np.empty((b, g, T, V.shape[2]), q.dtype) if numpy else None

    def attend(items: slice) -> Any:
        own = part if items == slice(0, b) else some_of(part, items)
        q, K, V, scores, into = (array if array is None else array[items, ...] for array in (*arrays, Y))
        return _stepped(rule, own, (factor, narrow), q, K, V, scores, certified, goes_on, into)

    alike = rule.epsilon is None and rule.kind != "given"  # all items keep as many keys
    found = by_items(attend, q, worth=alike and rule.slots.chunk < T)
    if len(found) == 1:
        return found[0]  # type: ignore[no-any-return]
    bounds = [pieces[1:] for pieces, _ in found]
    part = all_of([part for _, part in found]) if goes_on else part
    return (Y, *(np.concatenate(pieces) for pieces in zip(*bounds, strict=True))), part


def _stepped(
    rule: SelectionRule,
    part: PrunedPart,
    scale: tuple[float, Any],
    q: Any,
    K: Any,
    V: Any,
    scores: Any,
    certified: bool,
    goes_on: bool,
    into: Any,
) -> tuple[tuple[Any, ...], PrunedPart]:
    """Return the output (b, g, T, D) for the next T positions, with its bounds if `certified`, and the part after.

    scale: of queries, and the dtype of products if it is narrow. q: (b, g, T, d). scores: (b, T), where they are
    given. goes_on: whether the part is read again. into: where the output may be written.
    """
    xp, T, (factor, kind) = namespace_of(q), K.shape[1], scale
    narrow = None if kind is None else (kind, factor)
    read = [K, V, scores]
    if part.recent.shape[1]:
        held = part.recent, part.recent_values, part.recent_scores
        read = [None if b is None else xp.concat([a, b], axis=1) for a, b in zip(held, read, strict=True)]
    begin = part.positions - part.recent.shape[1]  # the position of the first row of these
    room: dict[str, Any] = {}
    pieces, low = [], 0
    while low < T:
        high = min(T, low + rule.until_selection(part.positions))
        recent = slice(part.positions - part.recent.shape[1] - begin, part.positions - begin + high - low)
        keys, values, more = (array if array is None else array[:, recent, ...] for array in read)
        to = None if into is None else into[:, :, low:high, :]
        piece, part = _between(
            rule, part, q[:, :, low:high, :] * factor, keys, values, more, certified, narrow, room, to
        )
        pieces.append(piece)
        low = high
        if part.positions >= rule.first and not rule.since_selection(part.positions) and (goes_on or low < T):
            part = _renewed(rule, part, room, certified or goes_on)
    if goes_on:
        largest = xp.maximum(part.largest, longest_of(without_gradient(V)))
        part = converted(replace(part, largest=largest), _alone)
    if not pieces:
        Y = xp.zeros((*q.shape[:3], V.shape[-1]), dtype=q.dtype, device=device_of(q))
        return (Y, *(without_gradient(q[..., 0]),) * (3 if certified else 0)), part
    if len(pieces) == 1:
        return pieces[0], part
    whole = [
        None if into is not None and not i else list(arrays) for i, arrays in enumerate(zip(*pieces, strict=True))
    ]
    return tuple(into if arrays is None else xp.concat(arrays, axis=2) for arrays in whole), part


def _alone(array: Any) -> Any:
    """Return an array that is not a part of another."""
    return namespace_of(array).concat([array], axis=0)


def _between(
    rule: SelectionRule,
    part: PrunedPart,
    q: Any,
    keys: Any,
    values: Any,
    scores: Any,
    certified: bool,
    narrow: Any,
    room: Any,
    into: Any,
) -> tuple[tuple[Any, ...], PrunedPart]:
    """Return the same for positions between two selections; keys, values, scores: the recent ones and theirs."""
    xp = namespace_of(q)
    b, g, T, d = q.shape
    held = keys.shape[1] - T
    K = keys[:, held:, :]
    x = PrunedArguments(
        q=q if rule.power is None else choice.in_range(q, K, _held_keys(part)),
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
        narrow=narrow,
    )
    Y, rest = kernels_for("pruned", q).mixture(x, room, into)
    bounds: tuple[Any, ...] = ()
    if certified:
        largest = xp.maximum(part.largest, longest_of(without_gradient(values[:, held:, :])))
        part = replace(part, largest=largest)
        bounds = bounded(mapped(x, without_gradient), part.radius, without_gradient(rest), largest)
    part = replace(
        part,
        recent=keys,
        recent_values=values,
        recent_scores=scores,
        keys=part.keys.plus(choice.Sums.of(without_gradient(K), second=part.keys.second is not None)),
        queries=part.queries.plus(choice.Sums.of(xp.reshape(without_gradient(q), (b, g * T, d)))),
        positions=part.positions + T,
    )
    return (Y, *bounds), part


def _held_keys(part: PrunedPart) -> Any:
    """Return the keys of a part, those of its summaries as means."""
    stacks = [part.kept, part.recent]
    if part.summaries is not None:
        stacks.append(choice.means_of(part.summaries)[0])
    xp = namespace_of(part.recent)
    return xp.concat([xp.astype(X, part.recent.dtype) for X in stacks], axis=1)


def _renewed(rule: SelectionRule, part: PrunedPart, room: dict[str, Any], bounded: bool) -> PrunedPart:
    """Return the part after a selection among the keys that were kept and those that are no longer recent."""
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
    given, held = None, part.summaries
    if part.kept_scores is not None:
        given = xp.concat([part.kept_scores, part.recent_scores[:, :leaving]], axis=1)
    if rule.power is not None:
        keys = choice.one_sided(keys, part.keys.second)
        held = None if held is None else replace(held, keys=choice.one_sided(held.keys, part.keys.second))

    measure = choice.measured(part.queries, part.keys, rule.power, keys.dtype)
    X, along = measure.places(without_gradient(keys))
    weight = xp.astype(there, keys.dtype)
    if held is not None:
        X_held, along_held = measure.places_of(held)
        X, along = xp.concat([X_held, X], axis=1), xp.concat([along_held, along], axis=1)
        weight = xp.concat([xp.astype(held.count, keys.dtype), weight], axis=1)
    scores, epsilon, clusters = given, rule.epsilon, None
    if rule.kind == "leverage":
        scores = _prefix_leverage(part.keys, without_gradient(keys), rule.center)
        if epsilon is not None:  # scores that tie with it are in
            epsilon *= 1 - TIE - 8 * float(xp.finfo(scores.dtype).eps)
    elif given is None:
        scores, clusters = choice.scored(rule.kind, X, along, weight, rule.slots.summaries, rule.power, _ROUNDS)
        scores = scores[:, X.shape[1] - keys.shape[1] :]
    scores = xp.where(there, scores, xp.full_like(scores, -math.inf))
    order, count, flags = choice.chosen(scores, rule.slots.selected, epsilon, there & (places < rule.slots.sinks))
    if rule.slots.summaries:
        rows = choice.items_of(xp.ones(scores.shape, dtype=xp.float64, device=device_of(scores)), keys, values)
        left = xp.astype(there & ~flags, keys.dtype)
        part = _summarized(rule, replace(part, summaries=held), X, along, rows, left, weight, clusters)
    return replace(
        part,
        kept=choice.rows_at(keys, order),
        kept_values=choice.rows_at(values, order),
        kept_scores=None if given is None else choice.rows_at(given, order),
        kept_places=choice.rows_at(places, order),
        kept_count=count,
        recent=part.recent[:, leaving:, :],
        recent_values=part.recent_values[:, leaving:, :],
        recent_scores=None if given is None else part.recent_scores[:, leaving:],
    )


def _renewed_at_once(
    rule: SelectionRule, part: PrunedPart, leaving: int, room: dict[str, Any], bounded: bool
) -> PrunedPart | None:
    """Return the same by one kernel, or None where there is none, or where what is not finite is to be named."""
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
    """Return the positions (b, n) of kept keys and of the first recent ones, and which of them are there."""
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
    rule: SelectionRule, part: PrunedPart, X: Any, along: Any, items: Summaries, left: Any, weight: Any, clusters: Any
) -> PrunedPart:
    """Return the part with summaries of those that it holds and of the rows that are left.

    X, along, weight: of the summaries held, if there are any, and of the rows behind them.
    """
    xp, held, radius = namespace_of(X), part.summaries, part.radius
    item_radii = xp.zeros_like(items.weight)
    if held is None:
        items = mapped(items, lambda array: xp.astype(array, xp.float64, copy=False))
    else:  # which are in float64
        radius = xp.full_like(held.weight, math.inf) if radius is None else radius  # where no kernel was asked for it
        items = Summaries(*(xp.concat([vars(held)[name], array], axis=1) for name, array in vars(items).items()))
        left = xp.concat([weight[:, : held.weight.shape[1]], left], axis=1)
        item_radii = xp.concat([radius, item_radii], axis=1)
    labels, _, summaries = choice.grouped(X, along, items, left, rule.slots.summaries, rule.power, clusters, _ROUNDS)
    if rule.power is None:  # of powers all weights are 1
        summaries = choice.balanced(summaries)
    still = mapped(items, without_gradient), item_radii, mapped(summaries, without_gradient)
    return replace(part, summaries=summaries, radius=kernels_for("pruned", item_radii).radii(labels, *still))


def _prefix_leverage(keys: choice.Sums, K: Any, center: bool) -> Any:
    """Return the leverage scores (b, n) of rows among all keys so far; rows outside their span count as 1."""
    xp = namespace_of(K)
    moment = keys.moment(center)
    values, directions = xp.linalg.eigh(moment)
    top = values[:, -1:]
    sound = values > top * moment.shape[-1] * 2.0**-50
    rows = xp.astype(K, xp.float64)
    rows = rows - keys.mean[:, None, :] if center else rows
    along = xp.matmul(rows, directions) ** 2
    inverse = xp.where(sound, 1 / xp.where(sound, values, xp.ones_like(values)), xp.zeros_like(values))
    scores = xp.sum(along * inverse[:, None, :], axis=-1) / keys.count
    in_null_space = xp.sum(xp.where(sound[:, None, :], xp.zeros_like(along), along), axis=-1)
    beyond = in_null_space > 2.0**-40 * xp.sum(rows * rows, axis=-1)
    return xp.astype(xp.where(beyond, xp.ones_like(scores), xp.clip(scores, 0.0, 1.0)), K.dtype)
