"""The attention of pruned layers: groups of heads by their budgets, each over the keys that are not padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from levattn._kernels.tensors import hidden_by
from levattn.attention import Selection, causal_pruned_attention, pruned_attention
from levattn.attention.arguments import untraced
from levattn.attention.pruned.pruned import state_alone
from levattn.attention.pruned.selection import rule_of, slots_for
from levattn.integrations.transformers.calls import layer_of, padding_and_kind, time_on
from levattn.integrations.transformers.discovery import ModelLayer
from levattn.integrations.transformers.interface import PART, Interface
from levattn.integrations.transformers.states import FullPrunedLayer, Held, SlidingPrunedLayer, States

# Where a selection does not say, a decoder reads these positions densely, as pruning does not pay there
START = 1536  # the first ones
FEW = 256  # those of a call after others: questions, answers
REST = 1024  # those after the first ones, where no more have come: the first selection costs what they save


@dataclass(frozen=True)
class Group:
    """Key heads that share a selection, or are dense.

    heads: their numbers, ascending. selection: None if they are dense.
    """

    heads: tuple[int, ...]
    selection: Selection | None

    @property
    def dense(self) -> bool:
        """Whether the heads attend to all keys."""
        return self.selection is None

    def of_queries(self, each: int) -> Any:
        """Return the numbers of the query heads that read these key heads, `each` for a key head."""
        return (np.asarray(self.heads)[:, None] * each + np.arange(each)).reshape(-1)


def selection_of_call(selection: Selection, n: int, *, causal: bool) -> Selection:
    """Return a selection in counts for a call with n keys; if causal, for any number of keys, and shares are of n."""
    slots = slots_for(selection, n, causal=causal, endless=causal)
    return replace(
        selection,
        budget=None,
        size=None if selection.epsilon is not None else slots.selected,
        summaries=slots.summaries,
        window=slots.window,
        sinks=slots.sinks,
        renew_every=slots.chunk or None,
        start=START if causal and selection.start is None else selection.start,
    )


@dataclass(frozen=True)
class Arrays:
    """Queries, keys and values of some heads of some sequences.

    q: (B, H, m, d). k, v: (B, G, n, ·); the last m belong to the positions of q. present: (B, n) bool, or None.
    """

    q: Any
    k: Any
    v: Any
    present: Any
    causal: bool
    scale: float

    def of_heads(self, group: Group) -> Arrays:
        """Return the arrays of a group of heads."""
        if len(group.heads) == self.k.shape[1]:
            return self
        q = _taken(self.q, group.of_queries(self.q.shape[1] // self.k.shape[1]), 1)
        k, v = (_taken(array, np.asarray(group.heads), 1) for array in (self.k, self.v))
        return replace(self, q=q, k=k, v=v)

    def of_sequences(self, rows: Any) -> Arrays:
        """Return the arrays of some sequences; None stands for all."""
        if rows is None:
            return self
        q, k, v, present = (_taken(array, rows, 0) for array in (self.q, self.k, self.v, self.present))
        return replace(self, q=q, k=k, v=v, present=present)

    def visible(self, places: Any) -> Any:
        """Return which keys the queries at these places may see, (B or 1, s, n) bool."""
        key = torch.arange(self.k.shape[2], device=self.k.device)
        row = torch.as_tensor(places, device=self.k.device) + self.k.shape[2] - self.q.shape[2]
        seen = key <= row[:, None] if self.causal else (key >= 0).expand(len(row), -1)
        return seen[None] if self.present is None else seen & self.present[:, None]

    def dense_weights(self, places: Any) -> Any:
        """Return the weights of dense attention for some queries, (B, H, s, n), in float32 at least."""
        q, k = (array.to(torch.promote_types(array.dtype, torch.float32)) for array in (self.q, self.k))
        q = _taken(q, places, 2).unflatten(1, (k.shape[1], -1))
        logits = (q @ k[:, :, None].transpose(-1, -2)).flatten(1, 2) * self.scale
        weights = torch.softmax(logits.masked_fill_(~self.visible(places)[:, None], -torch.inf), -1)
        return weights if self.present is None else weights.nan_to_num()  # of rows that see nothing

    def attended(self, selection: Any, first: int, last: int, **more: Any) -> Any:
        """Return the pruned attention of the queries first to last, with the keys that are new to the state.

        If not causal, these are all queries and keys.
        """
        q, k, v, there = self._between(first, last)
        if self.causal:
            return causal_pruned_attention(q, k, v, selection, mask=there, scale=self.scale, **more)
        return pruned_attention(q, k, v, selection, mask=there, query_mask=there, scale=self.scale, **more)

    def state(self, selection: Any, first: int, last: int) -> Any:
        """Return the state after the queries first to last, without their outputs."""
        q, k, v, there = self._between(first, last)
        return state_alone(q, k, v, selection, mask=there, scale=self.scale)

    def _between(self, first: int, last: int) -> tuple[Any, Any, Any, Any]:
        """Return the queries first to last, with the keys that are new to their state, the values and their flags."""
        before = self.k.shape[2] - self.q.shape[2]
        new = slice(before + first, before + last)
        there = None if self.present is None else self.present[:, None, new]
        return self.q[:, :, first:last], self.k[:, :, new], self.v[:, :, new], there


def plans(arrays: Arrays, selection: Selection) -> list[Held]:
    """Return groups of sequences with the selections of their calls, before their first one.

    They depend on a sequence's number of keys without padding: a share is of these keys, and a number of slots may
    cover them.
    """
    lengths, every = [arrays.k.shape[2]], np.zeros(len(arrays.k), np.int64)
    shares = isinstance(selection.budget, float) or isinstance(selection.size, float)
    if arrays.present is not None and (shares or not arrays.causal):
        every = arrays.present.sum(1).cpu().numpy()
        lengths = np.unique(every).tolist()
    found = []
    for length in lengths:
        rows = None if len(lengths) == 1 else np.flatnonzero(every == length)
        own = selection_of_call(selection, length, causal=arrays.causal)
        rule = rule_of(own, 1, power=None, causal=True, aligned=True, endless=True) if arrays.causal else None
        few, rest = (0, 0) if selection.start is not None or rule is None else (FEW, REST)
        found.append(Held(rows, own, rule, few, rest if rule is None else rule.first + rest))
    return found


def _reads_all(arrays: Arrays, plan: Sequence[Held]) -> bool:
    """Tell whether a call has few positions after others, or ends before its first selection pays.

    The model's own attention then gives its output.
    """
    m, n = arrays.q.shape[2], arrays.k.shape[2]
    if not arrays.causal:
        return False
    if m < n and all(m <= held.few for held in plan):
        return True
    return all(n <= held.whole for held in plan)


def _with_queries(arrays: Arrays, group: Group, held: Held) -> Held:
    """Return the held sequences of a group after a call that reads all keys; its queries wait until they are many."""
    m, n = arrays.q.shape[2], arrays.k.shape[2]
    places = held.rule.asking(n - m, m) if arrays.present is None else np.arange(n - m, n)
    if len(places):
        q, groups = arrays.q if len(places) == m else _taken(arrays.q, places - (n - m), 2), arrays.k.shape[1]
        if len(group.heads) < groups:
            q = _taken(q, group.of_queries(q.shape[1] // groups), 1)
        held = held.with_queries(places, q if held.rows is None else _taken(q, held.rows, 0))
    most = max(2 * START, held.whole) if arrays.present is None else REST  # where all queries wait
    return _advanced(arrays.of_heads(group), held, n) if n - held.seen > most else held


def _advanced(arrays: Arrays, held: Held, end: int) -> Held:
    """Return held sequences with the state after `end` positions, of which there are only queries so far."""
    if held.seen == end:
        return held
    part = arrays.of_sequences(held.rows)
    q = part.q.new_zeros((*part.q.shape[:2], end - held.seen, part.q.shape[3]))  # no selection goes by other queries
    for places, asked in held.asked:
        q[:, :, torch.as_tensor(places - held.seen, device=q.device)] = asked
    early = replace(part, q=q, k=part.k[:, :, :end], v=part.v[:, :, :end])
    return replace(held, state=early.state(held.state or held.selection, 0, end - held.seen), seen=end, asked=())


def outputs(arrays: Arrays, plan: Sequence[Held], *, keep: bool) -> tuple[Any, tuple[Held, ...]]:
    """Return the output (B, H, m, D) of a group of heads, and if `keep` the plan with the new states."""
    pieces, after = [], []
    for held in plan:
        part = arrays.of_sequences(held.rows)
        Y = part.attended(
            held.state or held.selection, 0, arrays.q.shape[2], **({"return_state": True} if keep else {})
        )
        if keep:
            Y, state = Y
            after.append(replace(held, state=state, seen=arrays.k.shape[2]))
        pieces.append(Y)
    return _placed(pieces, [held.rows for held in plan], 0), tuple(after)


def _placed(pieces: Sequence[Any], places: Sequence[Any], axis: int) -> Any:
    """Join outputs (B, H, m, D) of sequences (axis 0) or heads (axis 1) at their places, in memory as (B, m, H, D)."""
    if len(pieces) == 1:
        return pieces[0]
    shape = list(pieces[0].shape)
    shape[axis] = sum(map(len, places))
    B, H, m, D = shape
    whole = pieces[0].new_empty((B, m, H, D)).transpose(1, 2)
    for piece, of in zip(pieces, places, strict=True):
        whole.index_copy_(axis, torch.as_tensor(of, device=whole.device), piece)
    return whole


def _taken(array: Any, places: Any, axis: int) -> Any:
    """Return an array at some places of an axis: a view, where these ascend by one step."""
    if array is None:
        return None
    places = np.asarray(places)
    steps = np.diff(places)
    step = int(steps[0]) if len(steps) else 1
    if len(places) and places[0] >= 0 and step > 0 and (steps == step).all():
        return array[(slice(None),) * axis + (slice(int(places[0]), int(places[-1]) + 1, step),)]
    return array.index_select(axis, torch.as_tensor(places, device=array.device))


@dataclass
class LayerPruning:
    """The pruning of an attention module.

    splits: groups of its key heads, each with the least length of a text, ascending, that has it. The first call of a
    text tells its length; in a batch the longest one counts.

    tally: of `levattn.integrations.transformers.measuring`, or None.

    seen: a list that takes the arrays of each call, or None.

    causal: whether attention is causal where there is neither a mask nor an attribute of the module that tells.

    pruning: a name that no other has, also in other processes; each state in a cache belongs to a pruning.
    """

    splits: tuple[tuple[int, tuple[Group, ...]], ...]
    tally: Any = None
    seen: list[Arrays] | None = None
    causal: bool = True
    pruning: str = field(default_factory=lambda: uuid4().hex)

    def groups_of(self, length: int) -> tuple[Group, ...]:
        """Return the groups of a text."""
        return next(groups for least, groups in reversed(self.splits) if length >= least)

    def pruned(self) -> list[int]:
        """Return the key heads that have a selection in some text."""
        groups = [group for _, split in self.splits for group in split if not group.dense]
        return sorted({head for group in groups for head in group.heads})


def _attention(*args: Any, **options: Any) -> tuple[Any, Any]:
    """Return the output of a pruned layer, as `_attended` does, which torch's compiler leaves to Python.

    Selections, states and statistics are numpy's and Python's. The compiler would trace some of these arrays as
    tensors, with other strides.
    """
    return untraced(_read, *args, **options)  # type: ignore[no-any-return]


def _read(module: Any, query: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
    """Return the output of a pruned layer, as `_attended` does, or raise if its numbers are hidden."""
    if (what := hidden_by((query,))) is not None:
        raise NotImplementedError(
            f"{layer_of(module)} was called under {what}, which hides the numbers that pruned attention reads; "
            "expected a call without it. Leave the with block of prune, or call remove on the model, first"
        )
    return _attended(module, query, *args, **options)


def _attended(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Return the output of a pruned layer, (B, T, heads, D), and its weights if `output_attentions`."""
    part, call = PRUNED.begin(module, dropout, kwargs)
    layer, rows = layer_of(module), query.shape[2]
    by_layer = getattr(module, "scale_attn_by_inverse_layer_idx", False)
    if scaling is None and (by_layer or not getattr(module, "scale_attn_weights", True)):
        raise ValueError(
            f"{layer} scales its logits by its number, or not at all, and passes no scale to its attention; expected "
            "a scale. Use a newer version of transformers, which passes it"
        )
    held = None if call is None else call.held
    seen = rows if held is None else held.begin(part.pruning) + rows
    _check_lengths(layer, rows, key.shape[2], seen, None if isinstance(part, ModelLayer) else sliding_window)
    declared = _is_causal(module, part, held, is_causal, attention_mask, rows)
    present, causal = padding_and_kind(layer, attention_mask, rows, seen, declared)
    if isinstance(part, ModelLayer):
        return part.take(call, query, key, value, causal=causal, sliding_window=sliding_window)
    if held is not None:
        held.check(layer, present)
        if not causal:
            raise ValueError(f"{layer} has a cache and is not causal; expected causal attention. Set use_cache=False")
    arrays = Arrays(query, key, value, present, causal, query.shape[-1] ** -0.5 if scaling is None else scaling)
    if part.seen is not None:
        part.seen.append(arrays)
    if output_attentions and causal and seen > rows:
        raise ValueError(
            f"output_attentions is True and {layer} continues from a cache; expected all positions in one call, as "
            "a state cannot split a summary's weight over keys. Call the model without a cache"
        )
    measurement = None if part.tally is None else part.tally.begin(len(query), rows, seen)
    dense = partial(_dense, module, attention_mask, causal if attention_mask is None and rows > 1 else None)
    before = () if held is None else held.states
    first = 0 if held is None else held.first
    if not first:
        first = rows if present is None or len(part.splits) == 1 else max(1, int(present.sum(1).max()))
    groups = part.groups_of(first)
    Y, states, whole = _of_groups(groups, arrays, before, dense, keep=held is not None, measurement=measurement)
    shares = None
    if output_attentions:  # the weight of a summary is spread over its members
        each = torch.eye(seen, dtype=value.dtype, device=value.device).expand(*value.shape[:2], seen, seen)
        shares, _, _ = _of_groups(groups, replace(arrays, v=each), (), dense, keep=False)
        shares = shares.masked_fill(~arrays.visible(range(rows))[:, None], 0)
    if held is not None:
        held.states, held.positions, held.first = states, seen, first
        held.counts = None if present is None else present.sum(1)
    if part.tally is not None:
        part.tally.end(len(query), measurement, whole=whole)
    return Y.transpose(1, 2).contiguous(), shares


def _is_causal(module: Any, part: Any, held: Any, given: bool | None, mask: Any, rows: int) -> bool:
    """Tell whether a module's attention is causal, where its mask does not tell or is missing.

    given: the argument of this name that the module passes on, or None.
    """
    if held is not None and (mask is not None or rows == 1):  # one query of a cache sees all keys either way
        return True
    if mask is None and given is not None:
        return bool(given)
    return bool(getattr(module, "is_causal", True) and (part.causal or mask is not None))


def _check_lengths(layer: str, rows: int, keys: int, seen: int, sliding_window: int | None) -> None:
    """Raise unless the number of keys equals the positions seen, and fits the window."""
    if sliding_window is not None and seen > sliding_window:
        raise ValueError(
            f"{layer} slides over {sliding_window} positions, and there are {seen}; expected at most that many. "
            "Leave the layer out of layers"
        )
    if keys != seen:
        raise ValueError(
            f"{layer} has {rows} queries and {keys} keys; expected {seen} keys: at the positions of the queries, and "
            "in a DynamicCache that this model has filled. Leave layers with cross-attention, or with a cache of "
            "another type, out of layers. Begin with an empty cache if an earlier call failed between two layers"
        )


def _dense(module: Any, mask: Any, is_causal: bool | None, arrays: Arrays) -> Any:
    """Return the output (B, H, m, D) of dense attention."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    options = {"dropout": 0.0, "scaling": arrays.scale, "is_causal": is_causal}
    Y, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, arrays.q, arrays.k, arrays.v, mask, **options)
    return Y.transpose(1, 2)


def _of_groups(
    groups: Sequence[Group],
    arrays: Arrays,
    before: States,
    dense: Callable[[Arrays], Any],
    *,
    keep: bool,
    measurement: Any = None,
) -> tuple[Any, States, bool]:
    """Return the output (B, H, m, D) of all groups of heads, and the states of each group if `keep`.

    And whether a group that has a selection read all keys.

    measurement: compares each group with dense attention, unless it is None.
    """
    plan_of: list[Sequence[Held]] = [
        before[number] if before else () if group.selection is None else plans(arrays, group.selection)
        for number, group in enumerate(groups)
    ]
    whole = [bool(plan) and _reads_all(arrays, plan) for plan in plan_of]
    together = measurement is None and all(all_keys or not plan for all_keys, plan in zip(whole, plan_of, strict=True))
    pieces, states = [dense(arrays)] if together else [], []
    for group, plan, all_keys in zip(groups, plan_of, whole, strict=True):
        after: tuple[Held, ...] = ()
        if not together:
            mine = arrays.of_heads(group)
            start = time_on(mine.q.device) if measurement else 0.0
            if all_keys or not plan:
                Y = dense(mine)
            else:
                plan = [_advanced(mine, held, mine.k.shape[2] - mine.q.shape[2]) for held in plan]
                Y, after = outputs(mine, plan, keep=keep)
            if plan and measurement:
                measurement.add(group, time_on(mine.q.device) - start, mine, None if all_keys else plan, Y)
            pieces.append(Y)
        if all_keys and keep:
            after = tuple(_with_queries(arrays, group, held) for held in plan)
        states.append(after)
    if len(pieces) == 1:
        return pieces[0], tuple(states), any(whole)
    each = arrays.q.shape[1] // arrays.k.shape[1]
    return _placed(pieces, [group.of_queries(each) for group in groups], 1), tuple(states), any(whole)


def _masks(*args: Any, **kwargs: Any) -> Any:
    """Return the masks of "sdpa", which tell which keys a query sees: a mask function for transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)


PRUNED = Interface(
    name="levattn",
    part=PART,
    function=_attention,
    masks=_masks,
    cache_layers=(FullPrunedLayer, SlidingPrunedLayer),
    maker="prune",
    attention="pruned attention",
    remedy="leave this layer out of layers",
)
