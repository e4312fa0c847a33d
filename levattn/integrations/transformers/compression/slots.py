"""The slots of a compressed head: chosen keys of a context, and summaries of the others with their weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from levattn._core.device import where_arrays_are
from levattn._kernels.pruned import Summaries, mapped
from levattn._kernels.tensors import memory_of, tensor_of
from levattn.attention.arguments import device_of, namespace_of
from levattn.attention.pruned import choice
from levattn.attention.pruned.slots import Checks

SlotArrays = tuple[Any, Any, Any, Any]  # keys (G, s, d), values, log-weights or None, and places

_SUMMARIES = 256  # of a head at most: more cost time without gain on SmolLM2


@dataclass(frozen=True)
class Split:
    """The kinds of slots of a light head.

    `sinks`: number of first positions that are kept. `window`, `summaries`: shares of the other slots, with at most
    256 summaries. Scores select keys for the rest.
    """

    sinks: int
    window: float
    summaries: float

    def counts(self, slots: int) -> tuple[int, int, int, int]:
        """Return the numbers of sinks, selected positions, last positions and summaries."""
        sinks = min(self.sinks, slots)
        window, summaries = (int(share * (slots - sinks)) for share in (self.window, self.summaries))
        summaries = min(summaries, _SUMMARIES)
        return sinks, slots - sinks - window - summaries, window, summaries


@dataclass(frozen=True, eq=False)
class HeadSlots:
    """The slots of some heads of a layer, for the contexts of some sequences.

    `heads`: their numbers, ascending.
    `keys`, `values`: (B, G, s, d) and (B, G, s, D).
    `log_weight`: (B, G, s) float32, added to the logits; -inf where a sequence has fewer slots. None for zeros.
    `places`: (B, G, s) int32, the position of a slot in its sequence, -1 for a summary.
    """

    heads: tuple[int, ...]
    keys: Any
    values: Any
    log_weight: Any
    places: Any

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and weights."""
        arrays = (self.keys, self.values, self.log_weight)
        return sum(array.numel() * array.element_size() for array in arrays if array is not None)

    def of_heads(self, heads: tuple[int, ...]) -> HeadSlots:
        """Return the slots of some of the heads."""
        index = torch.tensor([self.heads.index(head) for head in heads], device=self.keys.device)
        found: HeadSlots = mapped(self, lambda array: array.index_select(1, index))
        return replace(found, heads=heads)

    def of_sequence(self, b: int) -> SlotArrays:
        """Return the slots of a sequence, as `slots_of` returns them."""
        weight = None if self.log_weight is None else self.log_weight[b]
        return self.keys[b], self.values[b], weight, self.places[b]

    def of_sequences(self, rows: Any) -> HeadSlots:
        """Return the slots of the sequences with these numbers."""
        found: HeadSlots = mapped(self, lambda array: array[rows.to(array.device)])
        return found


@dataclass(frozen=True, eq=False)
class Seen:
    """Moments of the queries of some heads, and the sum and number of their keys so far."""

    queries: choice.Sums
    keys: choice.Sums

    @classmethod
    def of(cls, Q: Any, K: Any) -> Seen:
        """Return the moments of queries (G, m, d), times their scale, and of keys (G, n, d)."""
        return cls(*(choice.Sums.of(_read(array), second=array is Q) for array in (Q, K)))

    def plus(self, other: Seen) -> Seen:
        """Return the moments of the queries and keys of both."""
        return Seen(self.queries.plus(other.queries), self.keys.plus(other.keys))

    def of_items(self, items: Any) -> Seen:
        """Return the moments of the heads with these numbers, a numpy array."""
        return Seen(*(_some(sums, items) for sums in (self.queries, self.keys)))


def _some(sums: choice.Sums, items: Any) -> choice.Sums:
    second = None if sums.second is None else sums.second[items]
    return replace(sums, total=sums.total[items], second=second)


def _read(array: Any) -> Any:
    return memory_of(array.to(torch.promote_types(array.dtype, torch.float32)))


@where_arrays_are
def slots_of(
    seen: Seen, K: Any, V: Any, count: int, split: Split, first: int = 0, held: SlotArrays | None = None
) -> SlotArrays:
    """Return the slots of light heads, at most `count` for each.

    `K`, `V`: (G, n, ·) of the positions from `first` on. `held`: the slots of the positions before. Slots and new keys
    together are more than `count`.
    """
    dtype, device = K.dtype, K.device
    K, V = _read(K), _read(V)
    xp, end = namespace_of(K), first + K.shape[1]
    place = xp.broadcast_to(xp.arange(first, end, device=device_of(K)), K.shape[:2])
    mass = xp.ones(place.shape, dtype=K.dtype, device=device_of(K))
    if held is not None:
        keys, values, places = _read(held[0]), _read(held[1]), memory_of(held[3])
        weight = None if held[2] is None else _read(held[2])
        old = xp.ones_like(keys[..., 0]) if weight is None else xp.exp(xp.astype(weight, K.dtype))
        pairs = (keys, K), (values, V), (old, mass), (xp.astype(places, place.dtype), place)
        K, V, mass, place = (xp.concat(pair, axis=1) for pair in pairs)  # a summary is a key with a mass
    sinks, size, window, R = split.counts(count)
    checks = Checks()
    X, along = choice.measured(seen.queries, seen.keys, None, K.dtype, checks).places(K)
    scores, clusters = choice.scored("residual" if R else "expected", X, along, mass, R, None, checks)
    scores = xp.where(place >= 0, scores, xp.full_like(scores, -xp.inf))
    forced = (place >= 0) & ((place < sinks) | (place >= end - window))
    sure = sinks + window if held is None else None
    order, counts, flags = choice.chosen(scores, size, None, forced, sure, checks)
    checks.settle()
    kept, values, places = (choice.rows_at(array, order) for array in (K, V, place))
    weight, logs = None, xp.zeros_like(scores[:, : order.shape[1]])
    if counts is not None:  # of a head with fewer keys, the other rows are none
        there = xp.arange(order.shape[1], device=device_of(K)) < counts[:, None]
        weight = logs = xp.where(there, logs, xp.full_like(logs, -xp.inf))
        places = xp.where(there, places, xp.full_like(places, -1))
    if R:
        left = xp.where(flags, xp.zeros_like(mass), mass)
        items = Summaries(mass, mass[..., None] * K, mass[..., None] * V, xp.zeros_like(mass), xp.ones_like(mass))
        _, _, sums = choice.grouped(X, along, items, left, R, None, clusters)
        means, total = choice.means_of(sums)
        heavy = xp.where(sums.count > 0, xp.log(total) - sums.offset / total, xp.full_like(total, -xp.inf))
        kept = xp.concat([kept, means], axis=1)
        values = xp.concat([values, sums.values / total[..., None]], axis=1)
        weight = xp.concat([logs, heavy], axis=1)
        places = xp.concat([places, xp.full_like(sums.count, -1, dtype=places.dtype)], axis=1)
    kept, values, places = map(tensor_of, (kept, values, places))
    weights = None if weight is None else tensor_of(weight).to(device, torch.float32)
    return kept.to(device, dtype), values.to(device, dtype), weights, places.to(device, torch.int32)


def together(parts: list[SlotArrays]) -> SlotArrays:
    """Join the slots of several heads with equal numbers of slots."""
    keys, values, weight, places = (None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True))
    return keys, values, weight, places


def both_slots(first: SlotArrays, second: SlotArrays) -> SlotArrays:
    """Join the slots of the same heads from two parts of a context."""
    weights = None
    if first[2] is not None or second[2] is not None:
        weights = torch.cat([_or_zeros(weight, keys) for keys, _, weight, _ in (first, second)], 1)
    keys, values, places = (torch.cat([first[i], second[i]], 1) for i in (0, 1, 3))
    return keys, values, weights, places


def _or_zeros(weight: Any, keys: Any) -> Any:
    """Return log-weights; None stands for zeros."""
    return torch.zeros(keys.shape[:-1], device=keys.device) if weight is None else weight


def padded_together(heads: tuple[int, ...], parts: list[SlotArrays]) -> HeadSlots:
    """Join the slots of several sequences, padding shorter ones with slots without weight."""
    most = max(keys.shape[1] for keys, *_ in parts)
    plain = all(weight is None and keys.shape[1] == most for keys, _, weight, _ in parts)

    def filled(array: Any, value: float) -> Any:
        missing = most - array.shape[1]
        if not missing:
            return array
        return torch.cat([array, array.new_full((array.shape[0], missing, *array.shape[2:]), value)], 1)

    keys, values = (torch.stack([filled(part[i], 0) for part in parts]) for i in (0, 1))
    weights = None
    if not plain:
        weights = torch.stack([filled(_or_zeros(part[2], part[0]), -torch.inf) for part in parts])
    return HeadSlots(heads, keys, values, weights, torch.stack([filled(part[3], -1) for part in parts]))


def appended(first: HeadSlots, second: HeadSlots) -> HeadSlots:
    """Join the slots of the same heads from two parts of a context."""
    weights = None
    if first.log_weight is not None or second.log_weight is not None:
        weights = torch.cat([_or_zeros(part.log_weight, part.keys) for part in (first, second)], 2)
    pairs = ((first.keys, second.keys), (first.values, second.values), (first.places, second.places))
    keys, values, places = (torch.cat(pair, 2) for pair in pairs)
    return HeadSlots(first.heads, keys, values, weights, places)
