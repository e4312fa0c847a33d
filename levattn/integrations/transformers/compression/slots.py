"""Compressed heads: selected keys and weighted means of clusters (slots), and attention to them and later tokens.

Slots are chosen keys of a context, and summaries of the others with their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from levattn._core.checks import check_type
from levattn._core.device import where_arrays_are
from levattn._kernels.pruned import Summaries, mapped
from levattn._kernels.pruned.fused import SCALES, attended_slots
from levattn._kernels.pruned.torch import DECODED, attended_token, held_slots
from levattn._kernels.tensors import memory_of, tensor_of
from levattn.attention.arguments import device_of, namespace_of
from levattn.attention.pruned import choice
from levattn.attention.pruned.baselines import asks_queries, baseline_of
from levattn.attention.pruned.call import own_scores
from levattn.attention.pruned.selection import (
    LAST,
    MOST_SUMMARIES,
    SINKS,
    Checks,
    Selection,
    SelectionRule,
    Slots,
    share_of,
    with_usual,
)
from levattn.integrations.transformers.compression.coding import Coded, opened, wide
from levattn.sensitivity.leverage import leverage_scores

SlotArrays = tuple[Any, Any, Any, Any]  # keys (G, s, d), values, log-weights or None, and places

_SHARE_OF_SUMMARIES = 0.5  # of a budget
_ROUNDS = 2  # of Lloyd's algorithm; more rounds change little
_LOGITS = 1 << 24  # largest number of entries of a mask, and of logits where no kernel is fused, over all heads
_ALIGNED = 16  # the distance between rows of a mask is a multiple of this, or torch copies the mask


@dataclass(frozen=True)
class Split:
    """The kinds of slots of a head that is cut: counts, or shares of the slots, with at most 256 summaries.

    `sinks`: first positions, a share of all slots. `window`: last positions, and `summaries`: shares of the others.
    `scores` select keys for the rest.
    """

    sinks: float
    window: float
    summaries: float
    scores: Any
    center: bool

    @classmethod
    def of(cls, selection: Selection) -> Split:
        """Return the split of a selection, or raise."""
        asked, selection = selection, with_usual(selection)
        usual = (0, 0, 0) if selection.budget is None else (SINKS, LAST, _SHARE_OF_SUMMARIES)
        given = selection.sinks, selection.window, selection.summaries
        parts = [own if part is None else part for own, part in zip(usual, given, strict=True)]
        if asked.window is None and all(isinstance(part, float) for part in parts[1:]):
            parts[1] = min(parts[1], 1.0 - parts[2])  # what is open, or what a rule brings, gives way
        shares = [part for part in parts[1:] if isinstance(part, float)]
        if sum(shares) > 1:
            raise ValueError(
                f"window={parts[1]} and summaries={parts[2]} are more than 1 together; expected at most 1"
            )
        scores = selection.scores if callable(selection.scores) else selection.kind
        return cls(parts[0], parts[1], parts[2], scores, selection.center is not False)

    @classmethod
    def from_figures(cls, figures: dict[str, Any]) -> Split:
        """Return the split with the attributes of a file, or raise."""
        check_type("scores", figures["scores"], str, "a name of scores")  # no file holds an array or a function
        if asks_queries(figures["scores"]):
            raise ValueError(f"scores {figures['scores']!r} need queries of a context, which are gone")
        center = figures["center"] if figures["scores"] == "leverage" else None
        return cls.of(Selection(0.5, **{**figures, "center": center}))

    def rule(self, slots: int) -> SelectionRule:
        """Return the rule that fills this many slots; its `window` counts last positions."""
        sinks = min(_part(self.sinks, slots), slots)
        left = slots - sinks
        window = min(_part(self.window, left), left)
        if baseline_of(self.scores) is not None:  # whose usual window gives way to summaries
            window = min(window, max(0, left - min(_part(self.summaries, left), MOST_SUMMARIES)))
        summaries = min(_part(self.summaries, left), left - window, MOST_SUMMARIES)
        counts = Slots(left - window - summaries, summaries, window, sinks)
        if callable(self.scores) or baseline_of(self.scores) is not None:
            return SelectionRule(counts, "function", None, False, None, self._own_scores)
        kind = "expected" if self.scores == "residual" and not summaries else self.scores
        return SelectionRule(counts, kind, None, self.center, None)

    def _own_scores(self, K: Any, V: Any) -> Any:
        rule = baseline_of(self.scores)
        function: Any = self.scores if rule is None else rule.function
        return memory_of(own_scores(function, tensor_of(K), tensor_of(V)))

    def of_chunk(self, chunk: range, of: int) -> Split:
        """Return the split of a chunk of a context of `of` keys: its part of each count, and the first sinks."""
        window, summaries = (
            part if isinstance(part, float) else _in_chunk(part, chunk, of) for part in (self.window, self.summaries)
        )
        return replace(self, sinks=0 if chunk.start else self.sinks, window=window, summaries=summaries)

    def slots(self, selection: Selection, chunk: range, of: int, factor: float) -> int:
        """Return how many keys of a chunk a head keeps; `of_chunk` made this. `factor`: bytes of a key to a slot."""
        n, budget = len(chunk), selection.budget
        if budget is not None:
            share = isinstance(budget, float)
            return min(n, max(1, int(budget * n * factor + 1e-9) if share else _in_chunk(int(budget), chunk, of)))
        others = int(self.sinks) + int(self.window) + min(int(self.summaries), MOST_SUMMARIES)
        size = selection.size
        selected = share_of(size, n) if isinstance(size, float) else _in_chunk(int(size or 0), chunk, of)
        return min(n, max(1, selected + others))


def _in_chunk(count: int, chunk: range, of: int) -> int:
    """Return the part of a count in a chunk; all parts add up to the count."""
    return count * chunk.stop // of - count * chunk.start // of


def _part(part: float, of: int) -> int:
    return int(part * of) if isinstance(part, float) else part


@dataclass(frozen=True, eq=False)
class HeadSlots:
    """The slots of some heads of a layer, for the contexts of some sequences.

    `heads`: their numbers, ascending.
    `keys`, `values`: (B, G, s, d) and (B, G, s, D), or their codes.
    `log_weight`: (B, G, s) float32, added to the logits; -inf where a sequence has fewer slots. None for zeros.
    `places`: (B, G, s) int32, the position of a slot in its sequence, -1 for a summary.
    `residuals`: (B, G) float32, errors of outputs on queries that were left out of a fit, NaN without any; or None.
    """

    heads: tuple[int, ...]
    keys: Any
    values: Any
    log_weight: Any
    places: Any
    residuals: Any = None

    @property
    def arrays(self) -> SlotArrays:
        """Keys, values, log-weights and places."""
        return self.keys, self.values, self.log_weight, self.places

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and weights."""
        return sum(array.nbytes for array in self.arrays[:3] if array is not None)

    @property
    def bits(self) -> int:
        """Bits of a code; 16 stands for no code."""
        return self.keys.bits if isinstance(self.keys, Coded) else 16

    def coded(self, bits: int, like: HeadSlots | None = None) -> HeadSlots:
        """Return the slots with codes of so many bits for keys and values; 16 stands for no code.

        `like`: slots whose columns of keys are taken, so that keys which are coded again do not drift.
        """
        if bits == 16:
            return self
        keys = Coded.of(self.keys, bits, columns=True, like=None if like is None else like.keys)
        return replace(self, keys=keys, values=Coded.of(self.values, bits, columns=False))

    def opened(self, dtype: Any = None) -> HeadSlots:
        """Return the slots with keys and values as numbers, of their dtype or another one."""
        return replace(self, keys=opened(self.keys, dtype), values=opened(self.values, dtype))

    def of_heads(self, heads: tuple[int, ...]) -> HeadSlots:
        """Return the slots of some of the heads."""
        index = [self.heads.index(head) for head in heads]
        found: HeadSlots = mapped(self, lambda array: array[:, index])
        return replace(found, heads=heads)

    def of_sequences(self, rows: Any) -> HeadSlots:
        """Return the slots of the sequences with these numbers, or of one of them without its axis."""
        found: HeadSlots = mapped(self, lambda array: array[rows.to(array.device)])
        return found


@dataclass(frozen=True, eq=False)
class Seen:
    """Moments of the queries of some heads, and the sum and number of their keys so far."""

    queries: choice.Sums
    keys: choice.Sums

    @classmethod
    @where_arrays_are
    def of(cls, Q: Any, K: Any) -> Seen:
        """Return the moments of queries (G, m, d), times their scale, and of keys (G, n, d)."""
        return cls(*(choice.Sums.of(_read(array), second=array is Q) for array in (Q, K)))

    @property
    def _held_array(self) -> Any:
        return self.queries.total

    @where_arrays_are
    def plus(self, other: Seen) -> Seen:
        """Return the moments of the queries and keys of both."""
        return Seen(self.queries.plus(other.queries), self.keys.plus(other.keys))

    @where_arrays_are
    def of_heads(self, heads: list[int]) -> Seen:
        """Return the moments of some of the heads."""
        found: Seen = mapped(self, lambda array: array[heads])
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the moments."""
        return int(self.queries.total.nbytes + self.queries.second.nbytes + self.keys.total.nbytes)


def _read(array: Any) -> Any:
    return memory_of(wide(array))


@where_arrays_are
def slots_of(
    seen: Seen,
    K: Any,
    V: Any,
    count: int,
    split: Split,
    first: int = 0,
    held: SlotArrays | None = None,
    given: Any = None,
) -> SlotArrays:
    """Return the slots of light heads, at most `count` for each.

    `K`, `V`: (G, n, ·) of the positions from `first` on. `held`: the slots of the positions before. Slots and new keys
    together are more than `count`. `given`: scores (G, n), where no slots are held, or None.
    """
    (dtype, of_values), device = (K.dtype, V.dtype), K.device
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
    rule, checks = split.rule(count), Checks()
    if given is not None:
        rule, given = replace(rule, kind="given", function=None), memory_of(given)
    sinks, window = rule.slots.sinks, rule.slots.window
    measure = choice.measured(seen.queries, seen.keys, None, K.dtype, checks)
    first, there = (place < sinks) | (place >= end - window), None if held is None else place >= 0
    items = _members(K, V, mass) if rule.slots.summaries else None
    rows = choice.Contenders(K, V, K, measure, mass, items, first, sinks + window, given=given, there=there)
    found = choice.selected(rule, rows, partial(_leverage, K, mass, rule.center), checks, _ROUNDS)
    checks.settle()
    kept, values, places = choice.rows_of_each((K, V, place), found.order)
    weight, logs = None, xp.zeros_like(mass[:, : kept.shape[1]])
    if found.count is not None:  # of a head with fewer keys, the other rows are none
        there = xp.arange(kept.shape[1], device=device_of(K)) < found.count[:, None]
        weight = logs = xp.where(there, logs, xp.full_like(logs, -xp.inf))
        places = xp.where(there, places, xp.full_like(places, -1))
    if (sums := found.summaries) is not None:
        means, total = choice.means_of(sums)
        heavy = xp.where(sums.count > 0, xp.log(total) - sums.offset / total, xp.full_like(total, -xp.inf))
        kept = xp.concat([kept, means], axis=1)
        values = xp.concat([values, sums.values / total[..., None]], axis=1)
        weight = xp.concat([logs, heavy], axis=1)
        places = xp.concat([places, xp.full_like(sums.count, -1, dtype=places.dtype)], axis=1)
    kept, values, places = map(tensor_of, (kept, values, places))
    weights = None if weight is None else tensor_of(weight).to(device, torch.float32)
    return kept.to(device, dtype), values.to(device, of_values), weights, places.to(device, torch.int32)


def _members(K: Any, V: Any, mass: Any) -> Summaries:
    """Return keys of some masses as members of summaries."""
    zeros, ones = (namespace_of(mass).full_like(mass, value) for value in (0.0, 1.0))
    return Summaries(mass, mass[..., None] * K, mass[..., None] * V, zeros, ones)


def _leverage(K: Any, mass: Any, center: bool) -> Any:
    """Return the leverage scores of keys of some masses."""
    xp = namespace_of(K)
    rows = K - xp.sum(mass[..., None] * K, axis=1, keepdims=True) / xp.sum(mass, axis=1)[:, None, None]
    return leverage_scores(xp.sqrt(mass)[..., None] * (rows if center else K))


def slot_counts(group: HeadSlots) -> Any:
    """Return the number of slots of each sequence, (B,), the most of its heads."""
    return (_weighted(group.arrays)[2] > -torch.inf).sum(2).amax(1).cpu()


def without_weight(slots: SlotArrays) -> list[int]:
    """Return the heads that have no slot with a weight."""
    none = ~(_weighted(slots)[2] > -torch.inf).any(1)
    return [head for head, flag in enumerate(none.tolist()) if flag]


def of_head(slots: SlotArrays, j: int) -> SlotArrays:
    """Return the slots of one of several heads."""
    keys, values, weight, places = (None if array is None else array[j : j + 1] for array in slots)
    return keys, values, weight, places


def together(parts: list[SlotArrays]) -> SlotArrays:
    """Join the slots of several heads; heads with fewer slots get some without weight."""
    arrays = zip(*_alike(parts), strict=True)
    keys, values, weight, places = (None if same[0] is None else torch.cat(same) for same in arrays)
    return keys, values, weight, places


def _alike(parts: list[SlotArrays]) -> list[SlotArrays]:
    """Return parts with equal numbers of slots, all with log-weights or none: missing slots have no weight."""
    most = max(keys.shape[1] for keys, *_ in parts)
    if all(weight is None and keys.shape[1] == most for keys, _, weight, _ in parts):
        return parts
    found = []
    for keys, values, weight, places in map(_weighted, parts):
        more = most - keys.shape[1]
        filled = [pad(array, (0, 0, 0, more)) for array in (keys, values)]
        found.append((*filled, pad(weight, (0, more), value=-torch.inf), pad(places, (0, more), value=-1)))
    return found


def both_slots(first: SlotArrays, second: SlotArrays) -> SlotArrays:
    """Join the arrays of slots of two parts of a context."""
    if first[2] is not None or second[2] is not None:
        first, second = _weighted(first), _weighted(second)
    pairs, axis = zip(first, second, strict=True), first[0].ndim - 2
    keys, values, weight, places = (None if pair[0] is None else torch.cat(pair, axis) for pair in pairs)
    return keys, values, weight, places


def appended(first: HeadSlots, second: HeadSlots) -> HeadSlots:
    """Return the slots of some heads from two consecutive parts of a context."""
    residuals = None if first.residuals is None else torch.fmax(first.residuals, second.residuals)
    return HeadSlots(first.heads, *both_slots(first.arrays, second.arrays), residuals)


def _weighted(slots: SlotArrays) -> SlotArrays:
    """Return slots with log-weights; None stands for zeros."""
    keys, values, weight, places = slots
    return (
        keys,
        values,
        torch.zeros(keys.shape[:-1], dtype=torch.float32, device=keys.device) if weight is None else weight,
        places,
    )


def padded_together(heads: tuple[int, ...], parts: list[SlotArrays]) -> HeadSlots:
    """Join the slots of several sequences, padding shorter ones with slots without weight."""
    arrays = zip(*_alike(parts), strict=True)
    return HeadSlots(heads, *(None if same[0] is None else torch.stack(same) for same in arrays))


# -- attention to slots and later tokens, by a kernel of a device, or the fused attention of torch where possible -----


def attended(
    q: Any, groups: tuple[HeadSlots, ...], tail: Sequence[Any], present: Any, scale: float, softcap: float | None
) -> Any:
    """Return the output (B, H, T, D) of queries that read the slots of a context and the tokens after it.

    `q`: (B, H, T, d). `tail`: keys and values (B, G, t, ·) of the later tokens. The last T have the positions of q,
    and attention to them is causal. `present`: (B, t) bool, False for padding; None if there is no padding. Padding
    reads the context and itself.
    """
    (B, H, T), (G, t) = q.shape[:3], tail[0].shape[1:3]
    held = held_by_kernels(groups, q.dtype) if T == 1 else None
    Y = None if held is None else attended_token(q, held, (tail[0], tail[1], present), scale, softcap)
    if Y is not None:
        return Y
    by_columns = _by_columns(q, present, scale, softcap)
    heads = H // G if by_columns else B * H  # that have their own rows in a mask, if there is one
    step = max(1, _LOGITS // (heads * (t + max(group.keys.shape[2] for group in groups))))
    order = [head for group in groups for head in group.heads]
    parts = []
    for first in range(0, T, step):
        rows = q[:, :, first : first + step].unflatten(1, (G, -1))
        count = rows.shape[3]
        end = t - T + first + count  # none of the rows sees later tokens
        seen = None
        if not by_columns and (T > 1 or present is not None):  # one copy for each query head that shares keys
            seen = _seen(count, end, present, q.device).repeat(1, 1, H // G, 1)
        found = []
        for group in groups:
            own, *near = (_of_heads(array, group.heads) for array in (rows, tail[0][:, :, :end], tail[1][:, :, :end]))
            if by_columns:
                found.append(_causal(own.flatten(1, 2), group, near, scale).unflatten(1, (-1, H // G)))
            else:
                mixture = _mixture(own.flatten(2, 3), group, near, seen, scale, softcap)
                found.append(mixture.unflatten(2, (H // G, count)))
        Y = found[0] if len(found) == 1 else torch.cat(found, 1)
        if order != sorted(order):
            Y = Y.index_select(1, torch.as_tensor(order, device=q.device).argsort())
        parts.append(Y.flatten(1, 2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def held_by_kernels(groups: tuple[HeadSlots, ...], dtype: Any) -> Any:
    """Return slots as the kernels for a token of this dtype read them, or None if they do not."""
    if dtype not in DECODED:
        return None
    there = _on_device(groups[0].keys)
    parts = [(*(_as_stored(rows, dtype, there) for rows in (group.keys, group.values)), group) for group in groups]
    if any(part is None for keys, values, _ in parts for part in (keys, values)):
        return None
    return held_slots([(keys, values, group.log_weight, group.heads) for keys, values, group in parts], dtype)


def _as_stored(rows: Any, dtype: Any, there: bool) -> Any:
    """Return numbers as they are and codes as kernels take them, or None for rows of another dtype."""
    if rows.dtype != dtype:
        return None
    if not isinstance(rows, Coded):
        return rows
    return rows.stored if there else rows.scaled


def _on_device(q: Any) -> bool:
    return bool(q.device.type != "cpu")


def _by_columns(q: Any, present: Any, scale: float, softcap: float | None) -> bool:
    """Tell whether log-weights become columns of keys: on a device, for several rows without padding.

    A single row reads all keys, so its mask has one number for each key, and columns would be more.
    """
    many = q.shape[2] > 1 and present is None and softcap is None
    return many and _on_device(q) and SCALES[0] < scale < SCALES[1]


def _seen(count: int, t: int, present: Any, device: Any) -> Any:
    """Return which tokens after the context the last `count` positions see, (B or 1, 1, count, t) bool."""
    place = torch.arange(t, device=device)
    own = place[t - count :, None]
    seen = (place <= own)[None]
    if present is not None:
        seen = seen & (present[:, None, :t] | (place == own))
    return seen[:, None]


def _causal(q: Any, group: HeadSlots, near: Sequence[Any], scale: float) -> Any:
    """Fused attention to slots and later tokens at once, with log-weights as products; `near` ends where q does."""
    keys, values = (torch.cat(pair, 2) for pair in zip((group.keys, group.values), near, strict=True))
    weight = group.log_weight
    if weight is not None:
        weight = pad(weight.to(torch.promote_types(q.dtype, torch.float32)), (0, near[0].shape[2]))
    return attended_slots(q, keys, values, weight, scale, causal=True)


def _of_heads(array: Any, heads: tuple[int, ...]) -> Any:
    """Return the part (B, len(heads), ...) of an array (B, G, ...), a view where the heads follow each other."""
    if heads[-1] - heads[0] + 1 == len(heads):
        return array[:, heads[0] : heads[-1] + 1]
    return array.index_select(1, torch.as_tensor(heads, device=array.device))


def _mixture(q: Any, group: HeadSlots, near: Sequence[Any], seen: Any, scale: float, softcap: float | None) -> Any:
    """Return the softmax mixture (B, G, L, D) of rows (B, G, L, d) over slots and the tokens after them.

    `seen`: (B or 1, 1, L, t) bool, or None if all rows see all of these tokens.
    """
    asked = (q, *near, group.keys, group.values)
    graded = torch.is_grad_enabled() and any(array.requires_grad for array in asked)
    alike = group.keys.shape[-1] == group.values.shape[-1]
    if softcap is not None or not alike or (graded and not _on_device(q)):
        return _by_products(q, group, near, seen, scale, softcap)
    if _on_device(q):
        return _by_one_call(q, group, near, seen, scale)
    return _by_parts(q, group, near, seen, scale)


def _by_parts(q: Any, group: HeadSlots, near: Sequence[Any], seen: Any, scale: float) -> Any:
    """Fused attention to slots and to later tokens, joined by the logarithms of their sums, without a copy."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    kind = torch.promote_types(q.dtype, torch.float32)  # torch would misread a mask of another width
    weight = None
    if group.log_weight is not None:
        weight = group.log_weight.to(kind)[:, :, None].expand(*q.shape[:3], -1)
    far, far_sum = fused(q, group.keys, group.values, 0.0, False, attn_mask=weight, scale=scale)
    mask = None
    if seen is not None:
        mask = torch.zeros(1, dtype=kind).masked_fill(~seen, -torch.inf).expand(*q.shape[:3], -1)
    after, after_sum = fused(q, *near, 0.0, False, attn_mask=mask, scale=scale)
    share = torch.sigmoid(far_sum - after_sum)[..., None]
    return torch.lerp(after.to(share.dtype), far.to(share.dtype), share).to(q.dtype)


def _by_one_call(q: Any, group: HeadSlots, near: Sequence[Any], seen: Any, scale: float) -> Any:
    """Fused attention to slots and later tokens at once, with log-weights and the mask added to the logits."""
    slots, count = group.keys.shape[2], group.keys.shape[2] + near[0].shape[2]
    rows = 1 if seen is None else q.shape[2]
    bias = q.new_zeros((*q.shape[:2], rows, -(-count // _ALIGNED) * _ALIGNED))[..., :count]
    if group.log_weight is not None:
        bias[..., :slots] = group.log_weight[:, :, None]
    if seen is not None:
        bias[..., slots:].masked_fill_(~seen, -torch.inf)
    keys, values = (torch.cat(pair, 2) for pair in zip((group.keys, group.values), near, strict=True))
    return scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=scale)


def _by_products(q: Any, group: HeadSlots, near: Sequence[Any], seen: Any, scale: float, softcap: float | None) -> Any:
    """Two products and one softmax: for bounded logits, and for gradients on the CPU."""
    rows, s = q * scale, group.keys.shape[2]

    def logits(K: Any) -> Any:
        found = (rows @ K.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
        return found if softcap is None else torch.tanh(found / softcap) * softcap

    far, after = logits(group.keys), logits(near[0])
    if group.log_weight is not None:
        far = far + group.log_weight[:, :, None]
    if seen is not None:
        after = after.masked_fill(~seen, -torch.inf)
    P = torch.softmax(torch.cat([far, after], -1), -1).to(group.values.dtype)
    return P[..., :s] @ group.values + P[..., s:] @ near[1]
