"""The slots of a compressed head: chosen keys of a context, and summaries of the others with their weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from levattn._core.device import where_arrays_are
from levattn._kernels.pruned.contract import mapped
from levattn._kernels.tensors import memory_of, tensor_of
from levattn.attention.common.space import device_of, namespace_of
from levattn.attention.pruned import choice
from levattn.attention.pruned.checks import Checks

__all__ = ["HeadSlots", "Split", "appended", "padded_together", "slots_of", "together"]

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

    def of_sequences(self, rows: Any) -> HeadSlots:
        """Return the slots of the sequences with these numbers."""
        found: HeadSlots = mapped(self, lambda array: array[rows.to(array.device)])
        return found


@where_arrays_are
def slots_of(Q: Any, K: Any, V: Any, count: int, split: Split) -> tuple[Any, Any, Any, Any]:
    """Return keys (G, s, d), values, log-weights and places of a context's light heads, s at most `count`.

    `Q`: (G, m, d), queries times their scale, whose moments score keys. `K`, `V`: (G, n, ·), with n above `count`.
    """
    dtype, device = K.dtype, K.device
    kind = torch.promote_types(dtype, torch.float32)
    Q, K, V = (memory_of(array.to(kind)) for array in (Q, K, V))
    xp = namespace_of(K)
    G, n = K.shape[:2]
    sinks, size, window, R = split.counts(count)
    checks = Checks()
    X, along = choice.measured(choice.Sums.of(Q), choice.Sums.of(K, second=False), None, K.dtype, checks).places(K)
    ones = xp.ones((G, n), dtype=K.dtype, device=device_of(K))
    place = xp.arange(n, device=device_of(K))
    forced = (place < sinks) | (place >= n - window)
    scores, clusters = choice.scored("residual" if R else "expected", X, along, ones, R, None, checks)
    first = xp.broadcast_to(forced, (G, n))
    order, _, flags = choice.chosen(scores, size, None, first, sinks + window, checks)
    checks.settle()
    kept, values = choice.rows_at(K, order), choice.rows_at(V, order)
    weight = None
    if R:
        left = xp.astype(~flags, K.dtype)
        _, _, held = choice.grouped(X, along, choice.items_of(ones, K, V), left, R, None, clusters)
        means, total = choice.means_of(held)
        logs = xp.where(held.count > 0, xp.log(total) - held.offset / total, xp.full_like(total, -xp.inf))
        kept = xp.concat([kept, means], axis=1)
        values = xp.concat([values, held.values / total[..., None]], axis=1)
        weight = xp.concat([xp.zeros_like(scores[:, : order.shape[1]]), logs], axis=1)
        order = xp.concat([order, xp.full_like(held.count, -1, dtype=order.dtype)], axis=1)
    kept, values, places = map(tensor_of, (kept, values, order))
    weights = None if weight is None else tensor_of(weight).to(device, torch.float32)
    return kept.to(device, dtype), values.to(device, dtype), weights, places.to(device, torch.int32)


def together(parts: list[tuple[Any, Any, Any, Any]]) -> tuple[Any, Any, Any, Any]:
    """Join the slots of several heads with equal numbers of slots."""
    keys, values, weight, places = (None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True))
    return keys, values, weight, places


def padded_together(heads: tuple[int, ...], parts: list[tuple[Any, Any, Any, Any]]) -> HeadSlots:
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
        zeros = (torch.zeros(part[0].shape[:2], device=keys.device) if part[2] is None else part[2] for part in parts)
        weights = torch.stack([filled(part, -torch.inf) for part in zeros])
    return HeadSlots(heads, keys, values, weights, torch.stack([filled(part[3], -1) for part in parts]))


def appended(first: HeadSlots, second: HeadSlots) -> HeadSlots:
    """Join the slots of the same heads from two parts of a context."""
    weights = None
    if first.log_weight is not None or second.log_weight is not None:
        weights = torch.cat([_weights(first), _weights(second)], 2)
    pairs = ((first.keys, second.keys), (first.values, second.values), (first.places, second.places))
    keys, values, places = (torch.cat(pair, 2) for pair in pairs)
    return HeadSlots(first.heads, keys, values, weights, places)


def _weights(slots: HeadSlots) -> Any:
    if slots.log_weight is not None:
        return slots.log_weight
    return torch.zeros(slots.keys.shape[:3], device=slots.keys.device)
