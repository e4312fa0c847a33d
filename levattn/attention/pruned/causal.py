"""Causal pruned attention, chunk by chunk, from a state of bounded size to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from typing import Any

import numpy as np

from levattn._core.arrays import is_torch
from levattn._core.rooms import lent_room
from levattn._core.types import dtype_name
from levattn._kernels import PRUNING
from levattn._kernels.pruned import PrunedArguments, RenewalArguments, Summaries, as_one_batch, mapped
from levattn.attention.arguments import device_of, empty_output, namespace_of, without_gradient
from levattn.attention.pruned import choice
from levattn.attention.pruned.call import Piece, PrunedCall, by_items
from levattn.attention.pruned.certificate import PrunedCertificate, bounded, longest_of, with_bounds
from levattn.attention.pruned.selection import Checks, SelectionRule
from levattn.attention.pruned.state import (
    PrunedPart,
    PrunedState,
    all_of,
    arrays_of,
    converted,
    empty_part,
    picked,
    some_of,
)

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
    if rule.at_once:
        of_queries = part.queries.total, part.queries.second, (part.queries.count,), part.keys.mean
        found = _renewed_at_once(rule, part, leaving, of_queries, room, bounded, checks)
        if found is not None:
            return found
    xp, slots, held = namespace_of(part.recent), rule.slots, part.summaries
    own, values = (
        xp.concat([kept, recent[:, :leaving, :]], axis=1)
        for kept, recent in ((part.kept, part.recent), (part.kept_values, part.recent_values))
    )
    given = None
    if part.kept_scores is not None:
        given = xp.concat([part.kept_scores, part.recent_scores[:, :leaving]], axis=1)
    places, there = _candidates(part, leaving)
    if known is None:
        (known,) = known_after(rule, [part.queries], [part.keys], own.dtype, checks)
    (measure, spectrum), keys = known, own
    if rule.power is not None:
        keys = choice.one_sided(own, spectrum)
        held = None if held is None else replace(held, keys=choice.one_sided(held.keys, spectrum))
    still, first = without_gradient(keys), places < slots.sinks
    sure = min(slots.sinks, part.positions - part.recent.shape[1] + leaving)
    weight = xp.ones_like(still[..., 0]) if there is None else xp.astype(there, own.dtype)
    items = _members(held, keys, values) if slots.summaries else None
    rows = choice.Contenders(own, values, still, measure, weight, items, first, sure, given, held, there)
    leverage = partial(_prefix_leverage, part.keys, spectrum, still, rule.center, checks)
    chosen = choice.selected(rule, rows, leverage, checks, _ROUNDS)
    kept, kept_values, kept_places = choice.rows_of_each((own, values, places), chosen.order)
    return replace(
        part,
        kept=kept,
        kept_values=kept_values,
        kept_scores=None if given is None else choice.rows_at(given, chosen.order),
        kept_places=kept_places,
        kept_count=chosen.count,
        recent=part.recent[:, leaving:, :],
        recent_values=part.recent_values[:, leaving:, :],
        recent_scores=None if given is None else part.recent_scores[:, leaving:],
        **({} if items is None else _summarized(rule, part, items, chosen, bounded)),
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


def _renewed_at_once(
    rule: SelectionRule,
    part: PrunedPart,
    leaving: int,
    sums: Any,
    room: dict[str, Any],
    bounded: bool,
    checks: Checks,
    in_turn: bool = False,
) -> PrunedPart | None:
    """Return the part after a selection by one kernel; None without one, or for numbers that need an error.

    `sums`: over queries, their numbers, and the mean key; if `in_turn`, of several selections. Then the arrays of
    slots have an item for each sequence before the first selection and after each.
    """
    xp = namespace_of(part.recent)
    total, second, counts, mean = sums
    found = PRUNING.renewed(
        RenewalArguments(
            kept=part.kept,
            kept_values=part.kept_values,
            kept_places=part.kept_places,
            keys=part.recent[:, :leaving, :],
            values=part.recent_values[:, :leaving, :],
            oldest=part.positions - part.recent.shape[1],
            summaries=part.summaries,
            radius=part.radius,
            total=total,
            second=second,
            queries=counts,
            origin=xp.astype(mean, part.recent.dtype),
            size=rule.slots.selected,
            sinks=rule.slots.sinks,
            R=rule.slots.summaries,
            residual=rule.kind == "residual",
            bounded=bounded,
            in_turn=in_turn,
        ),
        room,
    )
    if found is None:
        return None
    kept, values, places, summaries, radius, faults = found
    if faults is not None:
        choice.expect_sound(faults[0], checks)
        choice.expect_finite(faults[1], kept.dtype, checks)
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
    """Return the positions (b, n) of kept keys and of the first recent keys, and flags of those present, or None."""
    xp = namespace_of(part.recent)
    device, b = device_of(part.recent), part.recent.shape[0]
    oldest = part.positions - part.recent.shape[1]
    fresh = xp.broadcast_to(xp.arange(oldest, oldest + leaving, dtype=xp.int64, device=device), (b, leaving))
    places = xp.concat([part.kept_places, fresh], axis=1)
    if part.kept_count is None:
        return places, None
    row = xp.arange(places.shape[1], device=device)
    return places, (row < part.kept_count[:, None]) | (row >= part.kept.shape[1])


def _members(held: Summaries | None, keys: Any, values: Any) -> Summaries:
    """Return the members of new summaries: the old ones, if there are any, and rows; in float64, as summaries are."""
    xp = namespace_of(keys)
    items = choice.items_of(xp.ones(keys.shape[:2], dtype=xp.float64, device=device_of(keys)), keys, values)
    if held is None:
        return mapped(items, lambda array: xp.astype(array, xp.float64, copy=False))  # type: ignore[no-any-return]
    return Summaries(*(xp.concat([vars(held)[name], array], axis=1) for name, array in vars(items).items()))


def _summarized(
    rule: SelectionRule, part: PrunedPart, items: Summaries, found: choice.Selected, bounded: bool
) -> dict[str, Any]:
    """Return the summaries of a selection among `items`, and their radii if `bounded`."""
    # for powers all weights are 1
    summaries = found.summaries if rule.power is not None else choice.balanced(found.summaries)
    if not bounded:
        return {"summaries": summaries, "radius": None}
    xp, held = namespace_of(items.weight), part.summaries
    item_radii = xp.zeros_like(items.weight)
    if held is not None:
        known = xp.full_like(held.weight, math.inf) if part.radius is None else part.radius  # if no call computed it
        item_radii = xp.concat([known, item_radii[:, held.weight.shape[1] :]], axis=1)
    still = mapped(items, without_gradient), item_radii, mapped(summaries, without_gradient)
    return {"summaries": summaries, "radius": PRUNING.radii(found.labels, *still)}


def _prefix_leverage(keys: choice.Sums, spectrum: tuple[Any, Any], K: Any, center: bool, checks: Checks) -> Any:
    """Return the leverage scores (b, n) of rows among all keys so far; rows outside their span count as 1."""
    xp = namespace_of(K)
    values, directions = spectrum
    top = values[:, -1:]
    sound = values > top * values.shape[-1] * 2.0**-50
    rows = keys.less_mean(K) if center else xp.astype(K, xp.float64)
    checks.expect(
        (top[:, :, None] >= _LEAST) | (rows == 0),
        "keys are so small that their squares vanish; expected larger ones, as a factor changes no leverage score",
        ValueError,
    )
    along = xp.matmul(rows, directions) ** 2
    inverse = xp.where(sound, 1 / xp.where(sound, values, xp.ones_like(values)), xp.zeros_like(values))
    scores = xp.sum(along * inverse[:, None, :], axis=-1) / keys.count
    in_null_space = xp.sum(xp.where(sound[:, None, :], xp.zeros_like(along), along), axis=-1)
    beyond = in_null_space > 2.0**-40 * xp.sum(rows * rows, axis=-1)
    return xp.astype(xp.where(beyond, xp.ones_like(scores), xp.clip(scores, 0.0, 1.0)), K.dtype)


@dataclass(frozen=True)
class _Walk:
    """Settings that stay the same for all positions of a call.

    `factor`: of queries. `kind`: the dtype of products, if it is narrow. `certified`: whether to return bounds.
    `goes_on`: whether a later call reads the part again. `silent`: whether nobody reads the outputs.
    """

    rule: SelectionRule
    factor: float
    kind: Any
    certified: bool
    goes_on: bool
    silent: bool

    @property
    def narrow(self) -> Any:
        """The narrow dtype of products and the factor of queries, or None."""
        return None if self.kind is None else (self.kind, self.factor)

    def unscaled(self, q: Any) -> bool:
        """Tell whether the kernel that reads queries is to multiply them by their factor."""
        return isinstance(q, np.ndarray) and self.rule.power is None and not self.certified

    def together(self, part: PrunedPart, q: Any, V: Any, length: int, left: int) -> int:
        """Return how many chunks of `length` positions are attended at once; `left`: positions not read yet.

        More than one only where all chunks are whole, and each begins after a selection.
        """
        rule, slots, (b, g, _, d) = self.rule, self.rule.slots, q.shape
        if length < slots.chunk or part.positions < rule.first or part.recent.shape[1] != slots.window:
            return 1
        if isinstance(q, np.ndarray) and (self.certified or not rule.at_once):
            return 1  # these take steps
        if (part.summaries is None) != (not slots.summaries):
            return 1
        most = slots.total - slots.selected + min(slots.selected, part.positions + left)  # with a threshold any number
        numbers = b * (most * (d + V.shape[2]) + d * d)
        fit: int = PRUNING.at_once(q, rule.power, numbers, b * most * g * length)
        return max(1, min(left // length, fit))

    def in_turn(self, part: PrunedPart, rows: list[Any], length: int) -> bool:
        """Tell whether one kernel makes the selections after several chunks."""
        if not self.rule.at_once or self.certified:
            return False
        keys, values = rows[:2]
        renews: bool = PRUNING.renews(keys, values, (part.kept.shape[1], self.rule.slots.summaries), length)
        return renews


def causal_attention(
    call: PrunedCall,
    rule: SelectionRule,
    factor: float,
    state: PrunedState | None,
    goes_on: bool,
    certified: bool,
    silent: bool = False,
) -> Any:
    """Return the output, continued from a state if there is one, and if wanted the state after it, and bounds.

    If `silent`, return the state alone.
    """
    before = 0 if state is None else state.positions
    drops = rule.epsilon is not None or rule.slots.selected < before + call.K.shape[1]
    if certified and drops and not rule.slots.summaries:
        raise ValueError(
            "return_certificate is True and summaries is 0; expected summaries for causal attention, which bound the "
            "mass of dropped keys"
        )
    pieces: list[Piece] = []
    after: list[PrunedPart] = []
    own = call.with_arrays_of_caller(rule)
    computed = () if state is None else call.parts_of(state)
    for part, rows, places in _parts(call, rule, state, computed):
        q, K, V, scores = call.taken(rows, places, places)
        arrays, part = _spread(own, part, factor, (q, K, V, scores), call.narrow, (certified, goes_on, silent))
        pieces.append((rows, places, arrays))
        after.append(part)
    Y, *bounds = [None] if silent else call.results(pieces)
    answer = [] if silent else [Y]
    if goes_on:
        answer.append(PrunedState(rule.slots, call.given.batch, rule, tuple(after), of_tensors=call.in_memory))
    if certified:
        ends = np.arange(call.q.shape[2]) + 1 + before
        most = ends if rule.epsilon is not None else np.where(ends <= rule.first, ends, rule.slots.total)
        lower, upper, error = bounds
        answer.append(PrunedCertificate(lower, upper, error, None, most))
    return answer[0] if len(answer) == 1 else tuple(answer)


def _parts(
    call: PrunedCall, rule: SelectionRule, state: PrunedState | None, computed: tuple[PrunedPart, ...]
) -> list[tuple[PrunedPart, Any, Any]]:
    """Return the parts of the state, the items of the batch in each, and the places of their positions.

    `computed`: its parts, as the kernels read them.
    """
    b = call.K.shape[0]
    found = []
    if state is None:
        none = np.zeros(0, np.int64)
        for rows, places, _ in call.groups():
            part = empty_part(rule, np.arange(b) if rows is None else rows, *call.taken(rows, none, none)[1:])
            found.append((part, rows, places))
        return found
    if state.batch != call.given.batch:
        raise ValueError(f"state has batch {state.batch}; expected {call.given.batch}, the batch of the keys")
    first, (_, K, V, *_) = state.parts[0], call.given.stacks
    library = "torch" if state.of_tensors else None
    held, came = _kinds(first.recent, first.recent_values, library), _kinds(K, V)
    if held != came:
        raise ValueError(f"state holds {held}, and K and V are {came}; expected the same")
    for rows, places, _ in call.groups():
        for part in computed:
            which = np.arange(len(part.rows)) if rows is None else np.flatnonzero(np.isin(part.rows, rows))
            if len(which) == len(part.rows):
                found.append((part, part.rows if len(part.rows) < b else None, places))
            elif len(which):
                found.append((picked(part, which), part.rows[which], places))
    return found


def _kinds(K: Any, V: Any, library: str | None = None) -> str:
    """Return a description of keys and values, of this library or of their own, for messages."""
    library = library or namespace_of(K).__name__.removeprefix("array_api_compat.")
    return f"{dtype_name(K.dtype)} of {library} with d = {K.shape[-1]} and D = {V.shape[-1]}"


def _spread(
    rule: SelectionRule, part: PrunedPart, factor: float, arrays: Any, narrow: Any, wanted: tuple[bool, bool, bool]
) -> tuple[tuple[Any, ...], PrunedPart]:
    """Return the result of `_stepped`, on several threads if each has items of its own.

    `wanted`: the flags of `_Walk`.
    """
    q, _, V, _ = arrays
    walk, (certified, goes_on, silent) = _Walk(rule, factor, narrow, *wanted), wanted
    (b, _, T, _), numpy = q.shape, isinstance(q, np.ndarray)
    Y = _room_for_outputs(q, V.shape[2]) if numpy and not silent else None

    def attend(items: slice) -> Any:
        own = part if items == slice(0, b) else some_of(part, items)
        q, K, V, scores, into = (array if array is None else array[items, ...] for array in (*arrays, Y))
        with lent_room() as room:
            return _stepped(walk, own, q, K, V, scores, into, room)

    alike = rule.epsilon is None and not rule.own  # items keep as many keys, and run no code of a user
    apart = certified or not rule.at_once  # else kernels take many chunks, on all threads
    found = by_items(attend, q, worth=alike and apart and rule.slots.chunk < T)
    if len(found) == 1:
        return found[0]  # type: ignore[no-any-return]
    bounds = [pieces[1:] for pieces, _ in found]
    part = all_of([part for _, part in found]) if goes_on else part
    if silent:
        return (), part
    return (Y, *(np.concatenate(pieces) for pieces in zip(*bounds, strict=True))), part


def _room_for_outputs(q: Any, D: int) -> Any:
    """Return an array (b, g, T, D), with the heads of a position side by side in memory if queries have them so."""
    b, g, T, _ = q.shape
    if T > 1 and q.strides[2] > max(q.strides[:2]):
        return np.empty((T, b, g, D), q.dtype).transpose(1, 2, 0, 3)
    return np.empty((b, g, T, D), q.dtype)


def _stepped(
    walk: _Walk, part: PrunedPart, q: Any, K: Any, V: Any, scores: Any, into: Any, room: dict[str, Any]
) -> tuple[tuple[Any, ...], PrunedPart]:
    """Return the output (b, g, T, D) for the next T positions, its bounds if certified, and the part after them.

    `q`: (b, g, T, d). `scores`: (b, T), if given. `into`: an array that may take the output. `room`: memory that
    nothing reads after the call.
    """
    xp, T, rule = namespace_of(q), K.shape[1], walk.rule
    read, cut = [K, V, scores], None
    if is_torch(q) and any(array.requires_grad for array in (q, K, V)):
        # the gradient of each slice has the size of the whole array, so slices would take time T²
        cut = _cut(rule, part.positions, (q, K, V))
    elif part.recent.shape[1]:
        held = part.recent, part.recent_values, part.recent_scores
        read = [None if b is None else xp.concat([a, b], axis=1) for a, b in zip(held, read, strict=True)]
    begin = part.positions - part.recent.shape[1]  # the position of the first recent row
    checks, given = Checks(), part
    pieces, low = [], 0
    while low < T:
        length = min(T - low, rule.until_selection(part.positions))
        count = walk.together(part, q, V, length, T - low)
        high = low + count * length
        if cut is None:
            queries = q[:, :, low:high, :]
            recent = slice(part.positions - part.recent.shape[1] - begin, part.positions - begin + high - low)
            rows = [array if array is None else array[:, recent, ...] for array in read]
        else:
            queries, *new = (xp.concat(list(islice(array, count)), axis=-2) for array in cut)
            rows = [xp.concat(pair, axis=1) for pair in zip((part.recent, part.recent_values), new, strict=True)]
            rows.append(None if scores is None else xp.concat([part.recent_scores, scores[:, low:high]], axis=1))
        to = None if into is None else into[:, :, low:high, :]
        last = high == T and not walk.goes_on
        queries = queries if walk.unscaled(q) else queries * walk.factor
        piece, part = _run(walk, part, queries, rows, count, last, checks, room, to)
        pieces.append(piece)
        low = high
    checks.settle()
    if walk.goes_on:
        largest = xp.maximum(part.largest, longest_of(without_gradient(V)))
        own = set(map(id, arrays_of(given))) if given.positions else set()  # arrays of a state are no views
        part = converted(replace(part, largest=largest), lambda array: array if id(array) in own else _alone(array))
    if walk.silent:
        return (), part
    if not pieces:
        return (empty_output(q, K, V), *(without_gradient(q[..., 0]),) * (3 if walk.certified else 0)), part
    if len(pieces) == 1:
        return pieces[0], part
    whole = [
        None if into is not None and not i else list(arrays) for i, arrays in enumerate(zip(*pieces, strict=True))
    ]
    return tuple(into if arrays is None else xp.concat(arrays, axis=2) for arrays in whole), part


def _cut(rule: SelectionRule, begin: int, arrays: tuple[Any, ...]) -> list[Any]:
    """Return the parts of tensors (..., T, d) between selections; their first row is at position `begin`."""
    T, at, sizes = arrays[0].shape[-2], 0, list[int]()
    while at < T:
        sizes.append(min(T - at, rule.until_selection(begin + at)))
        at += sizes[-1]
    return [iter(array.split(sizes, -2)) for array in arrays]


def _alone(array: Any) -> Any:
    """Copy an array, so that it is no view of a larger one."""
    return namespace_of(array).concat([array], axis=0)


def _run(
    walk: _Walk,
    part: PrunedPart,
    q: Any,
    rows: list[Any],
    count: int,
    last: bool,
    checks: Checks,
    room: Any,
    into: Any,
) -> tuple[tuple[Any, ...], PrunedPart]:
    """Return outputs and bounds of `count` chunks of equal length, attended as one batch, and the part after them.

    `rows`: keys, values and scores, from the first recent row on. `last`: whether these are the last positions.
    """
    xp, rule, T = namespace_of(q), walk.rule, q.shape[2]
    length, near = T // count, rows[0].shape[1] - T
    if count > 1 and walk.in_turn(part, rows, length):
        return _run_in_turn(walk, part, q, rows, count, last, checks, room, into)
    queries, keys = [part.queries], [part.keys]
    if count > 1 or not last:
        factor = walk.factor if walk.unscaled(q) else 1.0
        asking, new = _asking(rule, part, without_gradient(q), count), without_gradient(rows[0][:, near:, :])
        queries, keys = _sums_after(part, asking, new, count, factor)
    ends = [part.positions + (i + 1) * length for i in range(count)]
    due = [rule.selects_at(end) and not (last and end == ends[-1]) for end in ends]
    known: list[Known | None] = [None] * count
    followed = sum(due)  # by a selection: all chunks, or all but the last
    if count > 1:
        known[:followed] = known_after(rule, queries[:followed], keys[:followed], q.dtype, checks)
    calls: list[PrunedArguments] = []
    bounds: list[tuple[Any, Any]] = []
    for i in range(count):
        here = slice(i * length, i * length + near + length)
        recent, values, scores = (array if array is None else array[:, here, ...] for array in rows)
        calls.append(_arguments(walk, part, q[:, :, i * length : (i + 1) * length, :], recent, values))
        if walk.certified:
            largest = xp.maximum(part.largest, longest_of(without_gradient(calls[-1].values[:, near:, :])))
            part = replace(part, largest=largest)
            bounds.append((part.radius, largest))
        held = {"recent": recent, "recent_values": values, "recent_scores": scores}
        part = replace(part, **held, keys=keys[i], queries=queries[i], positions=ends[i])
        if due[i]:
            part = selected_anew(rule, part, known[i], room, walk.certified or walk.goes_on, checks)
    if walk.silent:
        return (), part
    x = as_one_batch(calls)
    if rule.power is not None:
        x = replace(x, q=choice.in_range(x.q, x.keys[:, near:, :], _held_keys(x, near)))
    Y, rest = PRUNING.mixture(x, room, into)
    found: tuple[Any, ...] = (Y,)
    if walk.certified:
        radii, most = zip(*bounds, strict=True)
        radius = None if radii[0] is None else xp.concat(radii, axis=0)
        figures = bounded(mapped(x, without_gradient), radius, without_gradient(rest), xp.concat(most, axis=0))
        found = with_bounds(Y, figures)
    return tuple(_side_by_side(array, count) for array in found), part


def _run_in_turn(
    walk: _Walk,
    part: PrunedPart,
    q: Any,
    rows: list[Any],
    count: int,
    last: bool,
    checks: Checks,
    room: Any,
    into: Any,
) -> tuple[tuple[Any, ...], PrunedPart]:
    """Return the result of `_run` by one kernel for all selections and one for all chunks.

    Numbers that need an error go chunk by chunk.
    """
    b, g, T, _ = q.shape
    length, followed, before = T // count, count - last, part
    near = rows[0].shape[1] - T
    asking = _asking(walk.rule, part, without_gradient(q), count)
    total, second = _running(asking, count, part.queries, walk.factor if walk.unscaled(q) else 1.0)
    of_keys, _ = _running(rows[0][:, None, near:, :], count, part.keys)
    queries, keys = (
        [sums.count + (i + 1) * n for i in range(count)]
        for sums, n in ((part.queries, g * asking.shape[2] // count), (part.keys, length))
    )
    of_queries = (
        total[:followed].reshape(-1, *total.shape[2:]),
        second[:followed].reshape(-1, *second.shape[2:]),
        tuple(queries[:followed]),
        (of_keys / _from_to(of_keys, keys[0], length, count)[:, None, None])[:followed].reshape(-1, of_keys.shape[2]),
    )
    part = replace(
        part,
        recent=rows[0],
        recent_values=rows[1],
        keys=choice.Sums(of_keys[-1], None, keys[-1]),
        queries=choice.Sums(total[-1], second[-1], queries[-1]),
        positions=part.positions + T,
    )
    each = _renewed_at_once(walk.rule, part, followed * length, of_queries, room, walk.goes_on, checks, in_turn=True)
    if each is None:
        pieces: list[Any] = []
        for i in range(count):
            here, last_one = slice(i * length, (i + 1) * length), last and i == count - 1
            own = [None if array is None else array[:, here.start : here.stop + near, ...] for array in rows]
            to = None if into is None else into[:, :, here, :]
            piece, before = _run(walk, before, q[:, :, here, :], own, 1, last_one, checks, room, to)
            pieces.extend(piece)
        return (into if into is not None or walk.silent else namespace_of(q).concat(pieces, axis=2),), before
    names = "kept", "kept_values", "kept_places", "summaries", "radius"
    Y = None
    if not walk.silent:
        slots = {name: mapped(vars(each)[name], lambda array: array[: count * b]) for name in names}
        one = rows[0][:, : near + length, :]
        x = _arguments(walk, replace(part, **slots), q[:, :, :length, :], one, rows[1])
        Y, _ = PRUNING.mixture(replace(x, q=q, keys=rows[0], chunks=count), room, into)
    # copies, because the next call in turn writes to this memory, and may then have to begin again
    slots = {name: mapped(vars(each)[name], lambda array: _alone(array[-b:])) for name in names}
    return (Y,), replace(each, **slots)


def _asking(rule: SelectionRule, part: PrunedPart, q: Any, count: int) -> Any:
    """Return the queries (b, g, n, d) in the next `count` chunks that selections go by."""
    (b, g, T, d), which = q.shape, slice(-rule.since_selection(part.positions) % rule.stride, None, rule.stride)
    if count == 1 or T // count % rule.stride == 0:
        return q[:, :, which, :]
    xp = namespace_of(q)
    return xp.reshape(xp.reshape(q, (b, g, count, T // count, d))[:, :, :, which, :], (b, g, -1, d))


def _running(X: Any, count: int, before: choice.Sums, factor: float = 1.0) -> list[Any]:
    """Return the sums (count, b, ...) over rows times a factor after each of `count` chunks of X (b, g, n, d)."""
    found = list(PRUNING.row_moments(X, before.second is not None, count))
    for i, (begin, times) in enumerate(((before.total, factor), (before.second, factor**2))):
        if begin is not None:
            sums = found[i].reshape(count, *begin.shape)
            if factor != 1:
                sums *= times
            found[i] = PRUNING.running(sums, begin)
    return found


def _from_to(like: Any, first: int, step: int, count: int) -> Any:
    """Return first, first + step, ... in float64, on the device of an array."""
    xp = namespace_of(like)
    return xp.arange(first, first + count * step, step, dtype=xp.float64, device=device_of(like))


def _sums_after(
    part: PrunedPart, q: Any, K: Any, count: int, factor: float
) -> tuple[list[choice.Sums], list[choice.Sums]]:
    """Return the sums over all queries times a factor, and over all keys, after each of `count` chunks."""
    of_queries = [sums.times(factor) for sums in choice.Sums.of_chunks(q, count, like=part.queries)]
    of_keys = choice.Sums.of_chunks(K[:, None, :, :], count, like=part.keys)
    queries = accumulate(of_queries, choice.Sums.plus, initial=part.queries)
    keys = accumulate(of_keys, choice.Sums.plus, initial=part.keys)
    return list(queries)[1:], list(keys)[1:]


def _arguments(walk: _Walk, part: PrunedPart, q: Any, keys: Any, values: Any) -> PrunedArguments:
    """Return the mixture of a chunk; keys, values: the recent ones and its own."""
    T = q.shape[2]
    held = keys.shape[1] - T
    return PrunedArguments(
        q=q,
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
        power=walk.rule.power,
        narrow=walk.narrow,
        factor=walk.factor if walk.unscaled(q) else 1.0,
    )


def _held_keys(x: PrunedArguments, near: int) -> Any:
    """Return the keys that all queries of a chunk read, with the means of its summaries."""
    stacks = [x.kept_keys, x.keys[:, :near, :]]
    if x.summaries is not None:
        stacks.append(choice.means_of(x.summaries)[0])
    xp = namespace_of(x.keys)
    return xp.concat([xp.astype(X, x.keys.dtype) for X in stacks], axis=1)


def _side_by_side(array: Any, count: int) -> Any:
    """Lay the results of a batch of chunks (count · b, g, n, ...) out as (b, g, count · n, ...)."""
    if count == 1:
        return array
    xp = namespace_of(array)
    (items, g, n), rest = array.shape[:3], array.shape[3:]
    array = xp.reshape(array, (count, items // count, g, n, *rest))
    array = xp.permute_dims(array, (1, 2, 0, 3, *range(4, array.ndim)))
    return xp.reshape(array, (items // count, g, count * n, *rest))
