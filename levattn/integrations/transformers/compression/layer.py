"""A layer of a cache that holds the slots of a context, and all positions after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from levattn.integrations.transformers.compression.attended import attended
from levattn.integrations.transformers.compression.slots import (
    HeadSlots,
    Seen,
    SlotArrays,
    Split,
    both_slots,
    padded_together,
    slots_of,
)
from levattn.integrations.transformers.compression.stand_in import Reading, handed_over
from levattn.integrations.transformers.masks import padding_and_kind

Look = Callable[[int, Any, Any, Any, float], None]  # takes a layer's number, queries, keys, values and scale


class Tail:
    """Keys and values (B, G, t, ·) of the positions after the context, in arrays with room for more."""

    def __init__(self) -> None:
        self._room: list[Any] = []
        self._own = False  # whether nobody else reads the arrays, not even a backward pass
        self.length = 0

    def append(self, keys: Any, values: Any) -> None:
        """Append the keys and values of further positions."""
        more = self.length + keys.shape[2]
        if torch.is_grad_enabled() or (
            self._room and self._room[0].is_inference() != torch.is_inference_mode_enabled()
        ):
            # what a backward pass has saved, or another mode has made, must not change
            pairs = zip(self.arrays, (keys, values), strict=True) if self._room else ()
            self._room = [torch.cat(pair, 2) for pair in pairs] or [keys, values]
            self._own, self.length = False, more
            return
        if not self._own or more > self._room[0].shape[2]:
            grown = [like.new_zeros((*like.shape[:2], 2 * more, like.shape[3])) for like in (keys, values)]
            for new, old in zip(grown, self._room, strict=False):
                new[:, :, : self.length] = old[:, :, : self.length]
            self._room, self._own = grown, True
        for room, new in zip(self._room, (keys, values), strict=True):
            room[:, :, self.length : more] = new
        self.length = more

    @property
    def arrays(self) -> tuple[Any, Any]:
        """Keys and values of the positions so far."""
        keys, values = (room[:, :, : self.length] for room in self._room)
        return keys, values

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, with their room for more positions."""
        return sum(room.nbytes for room in self._room)

    def copy(self) -> Tail:
        """Return a copy with arrays of its own."""
        tail = Tail()
        if self.length:
            tail._room, tail.length = [array.clone() for array in self.arrays], self.length
        return tail

    def change(self, length: int, rows: Any) -> None:
        """Keep the first positions, of the sequences with these numbers (None for all)."""
        self.length = min(self.length, length)
        if self._room and rows is not None:
            self._room = [room[rows.to(room.device)] for room in self._room]


def seen_by_layer(q: Any, K: Any, present: Any, most: int, before: list[Seen] | None = None) -> list[Seen]:
    """Return the moments of queries (B, H, T, d), times their scale, and keys (B, G, T, d), of each sequence.

    `most`: of the queries of a head that are read, about. `present`: (B, T) bool, or None. `before`: earlier moments.
    """
    found = []
    for b in range(len(K)):
        here = slice(None) if present is None else present[b].to(K.device)
        Q = q[b, :, here].unflatten(0, (K.shape[1], -1))
        step = max(1, Q.shape[1] * Q.shape[2] // most)
        seen = Seen.of(Q[:, :, ::step].flatten(1, 2), K[b, :, here])
        found.append(seen if before is None else before[b].plus(seen))
    return found


def slot_counts(group: HeadSlots) -> Any:
    """Return the number of slots of each sequence, (B,), the most of its heads."""
    if group.log_weight is None:
        return torch.full((len(group.keys),), group.keys.shape[2])
    return (group.log_weight > -torch.inf).sum(2).amax(1).cpu()


@dataclass
class Renewal:
    """When and how a layer compresses the positions after the context.

    every: positions that the layer holds in full.

    whole: heads that keep everything.

    seen: moments of the queries and keys in the slots, for each sequence.

    slots: (groups, B) how many slots a head has in each sequence.

    asked: queries (B, H, ·, d) of the positions after them, times their scale, one call after another.

    present: (B, t) bool, of these positions, or None for all.

    paused: whether it waits, because no mask tells yet which positions are padding.
    """

    every: int
    split: Split
    whole: frozenset[int]
    seen: list[Seen]
    slots: Any
    asked: tuple[Any, ...] = ()
    present: Any = None
    paused: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of moments and queries."""
        return sum(seen.nbytes for seen in self.seen) + sum(q.nbytes for q in self.asked)

    def take(self, q: Any, present: Any, length: int) -> None:
        """Note the queries (B, H, T, d) of a call, times their scale; `length`: of all positions after the slots."""
        missing = length - sum(part.shape[2] for part in (*self.asked, q))  # if a call failed before it asked
        if missing:
            q = torch.cat([q.new_zeros((*q.shape[:2], missing, q.shape[3])), q], 2)
        self.asked, self.present = (*self.asked, q.detach()), present

    def change(self, length: int, rows: Any) -> None:
        """Keep the first positions after the slots, of the sequences with these numbers (None for all)."""
        kept = torch.cat(self.asked, 2)[:, :, :length] if length and self.asked else None
        if rows is not None:
            self.seen, self.slots = [self.seen[row] for row in rows.tolist()], self.slots[:, rows.cpu()]
            kept = None if kept is None else kept[rows.to(kept.device)]
            self.present = None if self.present is None else self.present[rows.to(self.present.device)]
        self.asked = () if kept is None else (kept,)
        self.present = None if self.present is None else self.present[:, :length]

    def renewed(
        self, groups: tuple[HeadSlots, ...], tail: tuple[Any, Any], before: Any
    ) -> tuple[tuple[HeadSlots, ...], Any]:
        """Return the slots of all positions so far, as many as before in each head that is cut, and their padding.

        `before`: (B, n) bool, which positions of the slots are no padding.
        """
        B, _, t, _ = tail[0].shape
        present = before.new_ones((B, t)) if self.present is None else self.present.to(before.device)
        q = torch.cat(self.asked, 2)
        self.seen = seen_by_layer(q, tail[0], present, q.shape[1] * t, self.seen)
        counts = before.sum(1).tolist()

        def of_sequence(i: int, b: int) -> SlotArrays:
            group = groups[i]
            heads, here = list(group.heads), present[b].to(tail[0].device)
            K, V = (array[b, heads][:, here] for array in tail)
            if self.whole.issuperset(heads):
                places = torch.arange(counts[b], counts[b] + K.shape[1], dtype=torch.int32, device=K.device)
                return both_slots(group.of_sequence(b), (K, V, None, places.expand(K.shape[:2])))
            if not K.shape[1]:
                return group.of_sequence(b)
            seen = self.seen[b].of_items(heads)
            return slots_of(seen, K, V, int(self.slots[i, b]), self.split, counts[b], group.of_sequence(b))

        parts = [[of_sequence(i, b) for b in range(B)] for i in range(len(groups))]
        found = [padded_together(group.heads, part) for group, part in zip(groups, parts, strict=True)]
        self.asked, self.present = (), None
        return tuple(found), torch.cat([before, present], 1)


class CompressedLayer(DynamicLayer):  # type: ignore[misc]
    """The slots of a context in a layer, and the keys and values of the positions after it."""

    def __init__(self, number: int, groups: tuple[HeadSlots, ...] = (), present: Any = None) -> None:
        super().__init__()
        self.number = number
        self.groups = groups
        self.present = present  # (B, n) bool, which positions of the slots are no padding
        self.tail = Tail()
        self.look: Look | None = None  # what keeps the slots of the context while it is read
        self.fresh = 0  # positions of the chunk that is being read
        self.renewal: Renewal | None = None
        self.is_initialized = True

    @property
    def length(self) -> int:
        """Positions of the slots, padding included."""
        return 0 if self.present is None else int(self.present.shape[1])

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Append new keys and values, and return stand-ins for all of them."""
        rows, tail = key_states.shape[2], (key_states, value_states)
        if self.look is None:
            self._append(key_states, value_states)
            tail = self.tail.arrays
        else:
            self.fresh = rows
        reading = Reading(self.number, rows, not self.groups, partial(self._answered, tail))
        return handed_over(reading, tail, self.length + tail[0].shape[2])

    def _append(self, keys: Any, values: Any) -> None:
        """Append keys and values, or raise for those of another model."""
        held = self.groups[0]
        if torch.is_autocast_enabled(keys.device.type):
            keys, values = keys.to(held.keys.dtype), values.to(held.values.dtype)
        heads = sum(len(group.heads) for group in self.groups)
        for name, new, old in (("keys", keys, held.keys), ("values", values, held.values)):
            if (new.shape[1], new.shape[3], new.dtype) != (heads, old.shape[3], old.dtype):
                raise ValueError(
                    f"layer {self.number} has {name} of {new.shape[1]} heads, width {new.shape[3]} and {new.dtype}, "
                    f"and the cache {heads}, {old.shape[3]} and {old.dtype}; expected the cache's model and dtype. "
                    "Compress the context with this model"
                )
        self.renew()
        self.tail.append(keys, values)

    def _answered(self, tail: tuple[Any, Any], q: Any, mask: Any, scale: float, softcap: float | None) -> Any:
        """Return the output (B, H, T, D), or None if the model's own attention computes it."""
        layer = f"layer {self.number}"
        if self.look is not None:
            with torch.autocast(q.device.type, enabled=False):
                self.look(self.number, q, *tail, scale)
        if not self.groups:
            return None
        rows, length = q.shape[2], tail[0].shape[2]
        present, causal = padding_and_kind(layer, mask, rows, self.length + length, True, whole=False)
        if not causal:
            raise ValueError(f"{layer} was given a mask that is not causal; expected causal attention")
        after = None
        if present is not None:
            before, after = present[:, : self.length], present[:, self.length :]
            if bool((self.present.to(before.device) & ~before).any()):
                raise ValueError(
                    f"{layer} was given an attention mask that hides positions of the context other than its padding; "
                    "expected 1 for them, as their slots hold what several of them were. Compress the context with "
                    "this attention_mask"
                )
            after = None if bool(after.all()) else after
        if self.renewal is not None:
            self.renewal.take(q * scale, after, length)
        groups, kind = self.groups, tail[0].dtype
        if torch.is_autocast_enabled(q.device.type) and kind != torch.float64:
            kind = torch.get_autocast_dtype(q.device.type)
            groups = tuple(group.to(kind) for group in groups)
            tail = tail[0].to(kind), tail[1].to(kind)
        return attended(q.to(kind), groups, tail, after, scale, softcap)

    def renew(self) -> None:
        """Compress the positions after the slots, if there are enough of them."""
        renewal = self.renewal
        if renewal is None or renewal.paused or self.tail.length < renewal.every:
            return
        tail = self.tail.arrays
        if any(array.requires_grad for array in tail):
            return
        with torch.no_grad(), torch.autocast(tail[0].device.type, enabled=False):
            self.groups, self.present = renewal.renewed(self.groups, tail, self.present)
        self.tail = Tail()

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return int(self.groups[0].keys.shape[0])

    def keep(self, groups: tuple[HeadSlots, ...], present: Any) -> None:
        """Add the chunk that was read to the context, which has these slots from now on; present: of all of it."""
        self.groups, self.present, self.fresh = groups, present, 0

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate nothing: arrays grow as positions come."""

    def get_seq_length(self, *args: Any) -> int:  # noqa: ARG002 (the interface of some versions)
        """Return the number of positions so far, the context included."""
        return self.length + self.tail.length + self.fresh

    @property
    def nbytes(self) -> int:
        """Bytes of the slots, of the positions after the context, and of what renewal knows."""
        renewal = 0 if self.renewal is None else self.renewal.nbytes
        return sum(group.nbytes for group in self.groups) + self.tail.nbytes + renewal

    def copy(self) -> CompressedLayer:
        """Return a layer that shares the slots and has its own further positions."""
        layer = CompressedLayer(self.number, self.groups, self.present)
        layer.tail = self.tail.copy()
        layer.renewal = None if self.renewal is None else replace(self.renewal)
        return layer

    __copy__ = copy

    def reset(self) -> None:
        """Forget the positions after the context."""
        self.crop(-self.tail.length)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last positions; a negative number gives how many."""
        self._change(self.tail.length + tokens_to_remove, None)

    def _change(self, length: int, rows: Any) -> None:
        self.tail.change(length, rows)
        if self.renewal is not None:
            self.renewal.change(length, rows)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take the sequences with these numbers, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Any) -> None:
        """Take the sequences with these numbers."""
        rows = torch.as_tensor(indices)
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        self.groups = tuple(group.of_sequences(rows) for group in self.groups)
        self.present = self.present[rows.to(self.present.device)]
        self._change(self.tail.length, rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self.batch_select_indices(torch.arange(self.sequences).repeat_interleave(repeats))
