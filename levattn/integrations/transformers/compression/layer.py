"""A layer of a cache that holds the slots of a context, and all positions after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicLayer

from levattn.integrations.transformers.calls import padding_and_kind
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
from levattn.integrations.transformers.compression.stand_in import Asked, handed_over

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
        return sum(room.numel() * room.element_size() for room in self._room)

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


@dataclass(frozen=True, eq=False)
class _Reading:
    """A call of a layer that reads slots and later positions, or a chunk of the context that `look` keeps."""

    number: int
    rows: int
    groups: tuple[HeadSlots, ...]
    tail: tuple[Any, Any]
    length: int  # positions of the slots
    look: Look | None = None
    renewal: Renewal | None = None

    @property
    def real(self) -> tuple[Any, Any] | None:
        """The keys and values, if there are no slots before them."""
        return None if self.groups else self.tail

    def answered(self, asked: Asked) -> Any:
        """Return the output (B, H, T, D), or None if the model's own attention computes it."""
        q, layer = asked.q, f"layer {self.number}"
        if self.look is not None:
            self.look(self.number, q, *self.tail, asked.scale)
        if not self.groups:
            return None
        keys = self.length + self.tail[0].shape[2]
        present, causal = padding_and_kind(layer, asked.mask, self.rows, keys, True)
        if not causal:
            raise ValueError(f"{layer} was given a mask that is not causal; expected causal attention")
        after = None if present is None or present[:, self.length :].all() else present[:, self.length :]
        if self.renewal is not None:
            self.renewal.take(q * asked.scale, self.tail[0], after)
        kind = self.tail[0].dtype
        return attended(q.to(kind), self.groups, self.tail, after, asked.scale, asked.softcap)


def seen_by_layer(q: Any, K: Any, present: Any, most: int) -> Seen:
    """Return the moments of queries (B, H, T, d), times their scale, and keys (B, G, T, d), of each sequence and head.

    `most`: of the queries of a head that are read, about. `present`: (B, T) bool, or None.
    """
    step = max(1, q.shape[1] // K.shape[1] * q.shape[2] // most)
    q = q.unflatten(1, (K.shape[1], -1))[:, :, :, ::step]
    if present is not None:  # as if padding asked for nothing
        q, K = q * present[:, None, None, ::step, None], K * present[:, None, :, None]
    return Seen.of(q.flatten(2, 3).flatten(0, 1), K.flatten(0, 1))


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

    seen: moments for each sequence and head.

    counts: (B,) positions of each sequence in its slots, without padding.

    slots: (groups, B) how many slots a head has in each sequence.

    present: (B, t) bool, of the positions after them, or None for all.

    paused: whether it waits, because no mask tells yet which positions are padding.
    """

    every: int
    split: Split
    whole: frozenset[int]
    seen: Seen
    counts: Any
    slots: Any
    present: Any = None
    paused: bool = False

    def take(self, q: Any, K: Any, present: Any) -> None:
        """Learn from the queries (B, H, T, d) of a call, times their scale; K: of all positions after the slots."""
        T = q.shape[2]
        here = None if present is None else present[:, -T:]
        with torch.no_grad():
            self.seen = self.seen.plus(seen_by_layer(q, K[:, :, -T:], here, T * q.shape[1]))
        self.present = present

    def renewed(self, groups: tuple[HeadSlots, ...], tail: tuple[Any, Any]) -> tuple[HeadSlots, ...]:
        """Return the slots of all positions so far, as many as before in each head that is cut."""
        B, G, t, _ = tail[0].shape
        present = torch.ones(B, t, dtype=torch.bool) if self.present is None else self.present[:, :t]
        counts = self.counts.tolist()

        def of_sequence(i: int, b: int) -> SlotArrays:
            group = groups[i]
            heads, here = list(group.heads), present[b].to(tail[0].device)
            K, V = (array[b, heads][:, here] for array in tail)
            if self.whole.issuperset(heads):
                places = torch.arange(counts[b], counts[b] + K.shape[1], dtype=torch.int32, device=K.device)
                return both_slots(group.of_sequence(b), (K, V, None, places.expand(K.shape[:2])))
            if not K.shape[1]:
                return group.of_sequence(b)
            seen = self.seen.of_items(b * G + np.array(heads))
            return slots_of(seen, K, V, int(self.slots[i, b]), self.split, counts[b], group.of_sequence(b))

        parts = [[of_sequence(i, b) for b in range(B)] for i in range(len(groups))]
        found = [padded_together(group.heads, part) for group, part in zip(groups, parts, strict=True)]
        self.counts, self.present = self.counts + present.sum(1).cpu(), None
        return tuple(found)

    def of_sequences(self, rows: Any, heads: int) -> Renewal:
        """Return the same for the sequences with these numbers."""
        items = (rows.cpu()[:, None] * heads + torch.arange(heads)).reshape(-1).numpy()
        present = None if self.present is None else self.present[rows.to(self.present.device)]
        rows = rows.cpu()
        moved = {"counts": self.counts[rows], "slots": self.slots[:, rows], "present": present}
        return replace(self, seen=self.seen.of_items(items), **moved)


class CompressedLayer(DynamicLayer):  # type: ignore[misc]
    """The slots of a context in a layer, and the keys and values of the positions after it."""

    def __init__(self, number: int, groups: tuple[HeadSlots, ...] = (), length: int = 0) -> None:
        super().__init__()
        self.number = number
        self.groups = groups
        self.length = length  # positions of the context
        self.tail = Tail()
        self.look: Look | None = None  # what keeps the slots of the context while it is read
        self.fresh = 0  # positions of the chunk that is being read
        self.renewal: Renewal | None = None
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Append new keys and values, and return stand-ins for all of them."""
        rows = key_states.shape[2]
        if self.look is None:
            self._check(key_states, value_states)
            self.renew()
            self.tail.append(key_states, value_states)
            tail = self.tail.arrays
        else:
            tail, self.fresh = (key_states, value_states), rows
        reading = _Reading(self.number, rows, self.groups, tail, self.length, self.look, self.renewal)
        return handed_over(reading, key_states.shape[1], self.length + tail[0].shape[2], tail)

    def _check(self, keys: Any, values: Any) -> None:
        """Raise for keys of another model."""
        held = self.groups[0]
        heads = sum(len(group.heads) for group in self.groups)
        for name, new, old in (("keys", keys, held.keys), ("values", values, held.values)):
            if (new.shape[1], new.shape[3], new.dtype) != (heads, old.shape[3], old.dtype):
                raise ValueError(
                    f"layer {self.number} has {name} of {new.shape[1]} heads, width {new.shape[3]} and {new.dtype}, "
                    f"and the cache {heads}, {old.shape[3]} and {old.dtype}; expected the cache's model and dtype. "
                    "Compress the context with this model"
                )

    def renew(self) -> None:
        """Compress the positions after the slots, if there are enough of them."""
        renewal = self.renewal
        if renewal is None or renewal.paused or self.tail.length < renewal.every:
            return
        if any(array.requires_grad for array in self.tail.arrays):
            return
        with torch.no_grad():
            self.groups = renewal.renewed(self.groups, self.tail.arrays)
        self.length, self.tail = self.length + self.tail.length, Tail()

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return int(self.groups[0].keys.shape[0])

    def keep(self, groups: tuple[HeadSlots, ...]) -> None:
        """Add the positions of the chunk that was read to the context, which has these slots from now on."""
        self.groups, self.length, self.fresh = groups, self.length + self.fresh, 0

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate nothing: arrays grow as positions come."""

    def get_seq_length(self, *args: Any) -> int:  # noqa: ARG002 (the interface of some versions)
        """Return the number of positions so far, the context included."""
        return self.length + self.tail.length + self.fresh

    @property
    def nbytes(self) -> int:
        """Bytes of the slots and of the positions after the context."""
        return sum(group.nbytes for group in self.groups) + self.tail.nbytes

    def copy(self) -> CompressedLayer:
        """Return a layer that shares the slots and has its own further positions."""
        layer = CompressedLayer(self.number, self.groups, self.length)
        layer.tail = self.tail.copy()
        layer.renewal = None if self.renewal is None else replace(self.renewal)
        return layer

    __copy__ = copy

    def reset(self) -> None:
        """Forget the positions after the context."""
        self.tail = Tail()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last positions; a negative number gives how many."""
        self.tail.change(self.tail.length + tokens_to_remove, None)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take the sequences with these numbers, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Any) -> None:
        """Take the sequences with these numbers."""
        rows = torch.as_tensor(indices)
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        if self.renewal is not None:
            self.renewal = self.renewal.of_sequences(rows, sum(len(group.heads) for group in self.groups))
        self.groups = tuple(group.of_sequences(rows) for group in self.groups)
        self.tail.change(self.tail.length, rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self.batch_select_indices(torch.arange(self.sequences).repeat_interleave(repeats))
