"""The output of a pruned layer: groups of heads by their budgets, each over the present keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from levattn.attention import PrunedState, Slots, pruned_attention
from levattn.attention.pruned.slots import slots_for
from levattn.integrations.transformers.pruning.cache import Held

_ENDLESS = 1 << 40  # more keys than any sequence has: a number of slots does not depend on the current length


@dataclass(frozen=True)
class Group:
    """Key heads that share a budget, or are dense.

    heads: their numbers, ascending. budget: slots, or a share of the keys; None if `size` or `epsilon` is given.
    """

    heads: tuple[int, ...]
    budget: float | None
    dense: bool = False

    def of_queries(self, each: int) -> Any:
        """Return the numbers of the query heads that read these key heads, `each` for a key head."""
        return (np.asarray(self.heads)[:, None] * each + np.arange(each)).reshape(-1)


@dataclass(frozen=True)
class SharedOptions:
    """The options of `pruned_attention` that a whole model shares."""

    size: int | None = None
    epsilon: float | None = None
    summaries: int | None = None
    window: int | None = None
    sinks: int | None = None
    scores: str = "residual"
    center: bool | None = None
    chunk: int | None = None

    def slots(self, budget: float | None, n: int, *, causal: bool) -> Slots:
        """Return the slots of a query for n keys; if causal, for any number of keys, with a share taken of n."""
        if causal:
            if isinstance(budget, float):
                Slots.of(budget, n)  # raises out of range
                budget = max(1, int(budget * n + 1e-9))
            n = _ENDLESS
        return slots_for(
            n,
            causal=causal,
            aligned=True,
            budget=budget,
            size=self.size,
            by_threshold=self.epsilon is not None,
            summaries=self.summaries,
            window=self.window,
            sinks=self.sinks,
            chunk=self.chunk,
        )

    def options(self, slots: Slots) -> dict[str, Any]:
        """Return the options of a call with these slots."""
        return {
            "size": slots.selected if self.epsilon is None else None,
            "epsilon": self.epsilon,
            "summaries": slots.summaries,
            "window": slots.window,
            "sinks": slots.sinks,
            "chunk": slots.chunk or None,
            "scores": self.scores,
            "center": self.center,
        }


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

    def lengths(self) -> Any:
        """Return the number of keys of each sequence, (B,)."""
        if self.present is None:
            return np.full(self.k.shape[0], self.k.shape[2])
        return self.present.sum(1).cpu().numpy()

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
        logits = logits.masked_fill(~self.visible(places)[:, None], -torch.inf)
        return torch.softmax(logits, -1).nan_to_num()  # of rows that see nothing

    def attended(self, options: dict[str, Any], first: int, last: int, state: PrunedState | None, **more: Any) -> Any:
        """Return `pruned_attention` of the queries first to last, with the keys that are new to the state.

        If not causal, these are all queries and keys.
        """
        before = self.k.shape[2] - self.q.shape[2]
        new = slice(before + first, before + last)
        there = None if self.present is None else self.present[:, None, new]
        return pruned_attention(
            self.q[:, :, first:last],
            self.k[:, :, new],
            self.v[:, :, new],
            **({"scores": options["scores"]} if state is not None else options),
            causal=self.causal,
            state=state,
            scale=self.scale,
            mask=there,
            query_mask=None if self.causal else there,
            **more,
        )


def outputs(arrays: Arrays, group: int, budget: float | None, rule: SharedOptions, states: list[Held] | None) -> Any:
    """Return the output (B, H, m, D) of a group of heads, and the new states.

    states: the states before, an empty list at the start, or None to keep no states.
    """
    found: list[tuple[Any, Any, PrunedState | None]] = [(held.rows, None, held.state) for held in states or ()]
    if not found:
        found = [(rows, options, None) for rows, options in plans(arrays, budget, rule)]
    pieces, after = [], []
    for rows, options, state in found:
        options = {"scores": rule.scores} if options is None else options
        Y = arrays.of_sequences(rows).attended(options, 0, arrays.q.shape[2], state, return_state=states is not None)
        if states is not None:
            Y, state = Y
            after.append(Held(rows, group, state))
        pieces.append(Y)
    return concatenated(pieces, [rows for rows, _, _ in found], 0), after


def plans(arrays: Arrays, budget: float | None, rule: SharedOptions) -> list[tuple[Any, dict[str, Any]]]:
    """Return groups of sequences, and the options of their calls.

    Options depend on a sequence's number of keys without padding, as a share is of these keys, and a number of slots
    may cover them.
    """
    by_length = isinstance(budget, float) or not arrays.causal
    lengths = arrays.lengths() if by_length else np.full(1, arrays.k.shape[2])
    found = []
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        slots = rule.slots(budget, int(length), causal=arrays.causal)
        found.append((None if len(rows) == len(lengths) else rows, rule.options(slots)))
    return found


def weights(arrays: Arrays, budget: float | None, rule: SharedOptions) -> Any:
    """Return the weight of each key for each query, (B, H, m, n); a summary spreads its weight over its members."""
    n = arrays.k.shape[2]
    each = torch.eye(n, dtype=arrays.v.dtype, device=arrays.v.device).expand(*arrays.v.shape[:2], n, n)
    return outputs(replace(arrays, v=each), 0, budget, rule, None)[0]


def concatenated(pieces: Sequence[Any], places: Sequence[Any], axis: int) -> Any:
    """Join parts of an array, given the places of each along an axis; None stands for all places."""
    if len(pieces) == 1:
        return pieces[0]
    order = np.argsort(np.concatenate([np.asarray(place) for place in places]), kind="stable")
    return _taken(torch.cat(list(pieces), axis), order, axis)


def _taken(array: Any, places: Any, axis: int) -> Any:
    if array is None:
        return None
    return array.index_select(axis, torch.as_tensor(places, device=array.device))
