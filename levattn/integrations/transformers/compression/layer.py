"""A layer of a cache that holds the slots of a context, and all positions after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from levattn._core.checks import whole_number
from levattn._kernels.pruned.torch import attended_token
from levattn._kernels.tensors import memory_of, tensor_of
from levattn.attention.arguments import untraced
from levattn.attention.pruned import choice
from levattn.integrations.transformers.calls import once_a_step, padding_and_kind
from levattn.integrations.transformers.compression.slots import (
    HeadSlots,
    Seen,
    SlotArrays,
    Split,
    attended,
    both_slots,
    held_by_kernels,
    padded_together,
    slots_of,
)
from levattn.integrations.transformers.compression.stand_in import handed_over

Groups = tuple[HeadSlots, ...]  # of heads with one share each
# takes a layer's number, queries, keys, values, the scale of logits and their bound or None
Look = Callable[[int, Any, Any, Any, float, float | None], None]


@dataclass
class Tail:
    """Arrays (B, G, t, ·) of the positions after the context, such as keys and values, with room for more."""

    _room: list[Any] = field(default_factory=list)
    length: int = 0
    _own: bool = False  # whether nobody else reads the arrays, not even a backward pass

    def append(self, *new: Any) -> None:
        """Append the arrays of further positions."""
        more = self.length + new[0].shape[2]
        # what a backward pass has saved, or another mode has made, must not change
        other = bool(self._room) and self._room[0].is_inference() != torch.is_inference_mode_enabled()
        fixed = torch.is_grad_enabled() or other
        if not fixed and self._own and more <= self._room[0].shape[2]:
            for room, array in zip(self._room, new, strict=True):
                room[:, :, self.length : more] = array
        else:
            pairs = zip(self.arrays, new, strict=False)
            kind = new[0].device.type
            with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):  # it refuses other halves
                self._room = [torch.cat(pair, 2) for pair in pairs] or [*new]
            if not fixed:
                self._room = [pad(room, (0, 0, 0, more)) for room in self._room]
            self._own = not fixed
        self.length = more

    @property
    def arrays(self) -> list[Any]:
        """The arrays of the positions so far, if there are any."""
        return [room[:, :, : self.length] for room in self._room]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, with their room for more positions."""
        return sum(room.nbytes for room in self._room)

    def copy(self) -> Tail:
        """Return a copy with arrays of its own."""
        return Tail([array.clone() for array in self.arrays], self.length)

    def change(self, length: int, rows: Any) -> None:
        """Keep the first positions, of the sequences with these numbers (None for all)."""
        self.length = min(self.length, length)
        if rows is not None:
            self._room = [room[rows.to(room.device)] for room in self._room]


def seen_by_layer(q: Any, K: Any, present: Any, most: int, before: list[Seen] | None = None) -> list[Seen]:
    """Return the moments of queries (B, H, T, d), times their scale, and keys (B, G, T, d), of each sequence.

    `most`: of the queries of a head that are read, about. `present`: (B, T) bool, or None. `before`: earlier moments.
    """
    found = []
    for b in range(len(K)):
        here = slice(None) if present is None else present[b].to(K.device)
        Q = q[b][:, here].unflatten(0, (K.shape[1], -1))
        step = max(1, Q.shape[1] * Q.shape[2] // most)
        seen = Seen.of(Q[:, :, ::step].flatten(1, 2), K[b][:, here])
        found.append(seen if before is None else before[b].plus(seen))
    return found


@dataclass
class Renewal:
    """When and how a layer compresses the positions after the context.

    every: positions that the layer holds in full.

    splits: of each group of heads.

    whole: heads that keep everything.

    seen: moments of the queries and keys in the slots, for each sequence.

    slots: (groups, B) how many slots a head has in each sequence.

    asked: queries (B, H, t, d) of the positions after them, times their scale.

    present: (B, t) bool, of these positions, or None for all.

    paused: whether it waits, because no mask tells yet which positions are padding.
    """

    every: int
    splits: tuple[Split, ...]
    whole: frozenset[int]
    seen: list[Seen]
    slots: Any
    asked: Tail = field(default_factory=Tail)
    present: Any = None
    paused: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of moments and queries."""
        return sum(seen.nbytes for seen in self.seen) + self.asked.nbytes

    def take(self, q: Any, present: Any, length: int) -> None:
        """Note the queries (B, H, T, d) of a call, times their scale; `length`: of all positions after the slots."""
        before = length - q.shape[2]
        self.asked.change(before, None)
        if self.asked.length < before:  # a call failed before it asked
            self.asked.append(q.new_zeros((*q.shape[:2], before - self.asked.length, q.shape[3])))
        self.asked.append(q.detach())
        self.present = present

    def change(self, length: int, rows: Any) -> None:
        """Keep the first positions after the slots, of the sequences with these numbers (None for all)."""
        self.asked.change(length, rows)
        self.present = None if self.present is None else self.present[:, :length]
        if rows is not None:
            self.seen, self.slots = [self.seen[row] for row in rows.tolist()], self.slots[:, rows.cpu()]
            self.present = None if self.present is None else self.present[rows.to(self.present.device)]

    def renewed(self, groups: Groups, tail: Sequence[Any], before: Any) -> tuple[Groups, Any]:
        """Return the slots of all positions so far, as many as before in each head that is cut, and their padding.

        `before`: (B, n) bool, which positions of the slots are no padding.
        """
        B, _, t, _ = tail[0].shape
        present = before.new_ones((B, t)) if self.present is None else self.present.to(before.device)
        q = self.asked.arrays[0][:, :, :t]  # without those of a question that was undone
        seen = seen_by_layer(q, tail[0], present, q.shape[1] * t, self.seen)
        counts, whole = before.sum(1).tolist(), [group.opened() for group in groups]

        def of_sequence(i: int, b: int) -> SlotArrays:
            held, heads = whole[i].of_sequences(torch.tensor(b)).arrays, list(groups[i].heads)
            K, V = (array[b, heads][:, present[b].to(array.device)] for array in tail)
            if self.whole.issuperset(heads):
                places = torch.arange(counts[b], counts[b] + K.shape[1], dtype=torch.int32, device=K.device)
                return both_slots(held, (K, V, None, places.expand(K.shape[:2])))
            if not K.shape[1]:
                return held
            return slots_of(seen[b].of_heads(heads), K, V, int(self.slots[i, b]), self.splits[i], counts[b], held)

        parts = [[of_sequence(i, b) for b in range(B)] for i in range(len(groups))]
        pairs = zip(groups, parts, strict=True)
        found = [padded_together(group.heads, part).coded(group.bits, group) for group, part in pairs]
        self.seen, self.asked, self.present = seen, Tail(), None
        return tuple(found), torch.cat([before, present], 1)

    def to_arrays(self, t: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return figures and arrays that `from_arrays` reads, with t positions after the slots."""
        if any(callable(split.scores) for split in self.splits):
            raise ValueError(
                "the cache renews its slots by a function of scores, which no file holds; expected a name of scores"
            )
        figures = {"every": self.every, "splits": [vars(split) for split in self.splits], "whole": sorted(self.whole)}
        counts = [[seen.queries.count, seen.keys.count] for seen in self.seen]
        moments = zip(*((seen.queries.total, seen.queries.second, seen.keys.total) for seen in self.seen), strict=True)
        pairs = zip(("queries", "squares", "keys"), moments, strict=True)
        arrays = {name: torch.stack([tensor_of(array) for array in parts]) for name, parts in pairs}
        present = torch.ones((len(self.seen), 0), dtype=torch.bool) if self.present is None else self.present[:, :t]
        arrays |= {"slots": self.slots, "present": pad(present, (0, t - present.shape[1]), value=True)}
        if 0 < t <= self.asked.length:  # else a call failed before it asked, or told its padding
            arrays["asked"] = self.asked.arrays[0][:, :, :t]
        return {**figures, "seen": counts}, arrays

    @classmethod
    def from_arrays(cls, figures: dict[str, Any], arrays: dict[str, Any]) -> Renewal:
        """Return the renewal that `to_arrays` told of, or raise."""
        every = whole_number("renew_every", figures["every"])
        splits = tuple(Split.from_figures(told) for told in figures["splits"])
        moments = (memory_of(arrays[name]) for name in ("queries", "squares", "keys"))
        seen = []
        for counts, queries, squares, keys in zip(figures["seen"], *moments, strict=True):
            asked, numbers = (whole_number("seen", count, 0) for count in counts)
            seen.append(Seen(choice.Sums(queries, squares, asked), choice.Sums(keys, None, numbers)))
        renewal = cls(
            every, splits, frozenset(figures["whole"]), seen, arrays["slots"].cpu(), present=arrays["present"]
        )
        if "asked" in arrays:
            renewal.asked.append(arrays["asked"])
        return renewal


class CompressedLayer(DynamicLayer):  # type: ignore[misc]
    """The slots of a context in a layer, and the keys and values of the positions after it."""

    def __init__(self, number: int, groups: Groups = (), present: Any = None) -> None:
        super().__init__()
        self.number = number
        self.groups = groups
        self.present = present  # (B, n) bool, which positions of the slots are no padding
        self.tail = Tail()
        self.look: Look | None = None  # what keeps the slots of the context while it is read
        self.fresh = 0  # positions of the chunk that is being read
        self.renewal: Renewal | None = None
        self.is_initialized = True
        self._held: Any = None  # groups, a dtype, and these slots as kernels read them

    @property
    def length(self) -> int:
        """Positions of the slots, padding included."""
        return 0 if self.present is None else int(self.present.shape[1])

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Append new keys and values, and return stand-ins for all of them."""
        if torch.compiler.is_compiling():
            return untraced(self.update, key_states, value_states)  # type: ignore[no-any-return]
        rows, tail = key_states.shape[2], [key_states, value_states]
        if self.look is None:
            tail = self._append(key_states, value_states)
        else:
            self.fresh = rows
        length = self.length + tail[0].shape[2] if self.groups else None
        keys, values = handed_over(self.number, rows, partial(self._answered, tail), tail, length)
        return keys, values

    def _append(self, keys: Any, values: Any) -> list[Any]:
        """Append keys and values, and return all after the slots; raise for keys of another model."""
        held = self.groups[0]
        if torch.is_autocast_enabled(keys.device.type):
            keys, values = keys.to(held.keys.dtype), values.to(held.values.dtype)
        heads = sum(len(group.heads) for group in self.groups)
        for name, new, old in (("keys", keys, held.keys), ("values", values, held.values)):
            if (new.shape[1], new.shape[3], new.dtype) != (heads, old.shape[3], old.dtype):
                raise ValueError(
                    f"layer {self.number} has {name} of {new.shape[1]} heads, width {new.shape[3]} and {new.dtype}, "
                    f"and the cache {heads}, {old.shape[3]} and {old.dtype}; expected the cache's model and dtype. "
                    "Compress the context with this model, within autocast if it is asked so and not otherwise"
                )
        self.renew()
        self.tail.append(keys, values)
        return self.tail.arrays

    def _answered(self, tail: Sequence[Any], q: Any, mask: Any, scale: float, softcap: float | None) -> Any:
        """Return the output (B, H, T, D), or None if the model's own attention computes it."""
        layer = f"layer {self.number}"
        if self.look is not None:
            with torch.autocast(q.device.type, enabled=False):
                self.look(self.number, q, tail[0], tail[1], scale, softcap)
        if not self.groups:
            return None
        rows, length = q.shape[2], tail[0].shape[2]
        here = self.present  # of all layers, until they renew their slots
        known = here.data_ptr(), tuple(here.shape), here.stride(), self.length, length
        after, _ = once_a_step(mask, rows, known, lambda: (self._padding_after(layer, mask, rows, length), here))
        if self.renewal is not None:
            self.renewal.take(q * scale, after, length)
        kind = tail[0].dtype
        if torch.is_autocast_enabled(q.device.type) and kind != torch.float64:
            kind = torch.get_autocast_dtype(q.device.type)
            tail = [array.to(kind) for array in tail]
        q = q.to(kind)
        held = self._held_by_kernels(kind) if rows == 1 else None
        Y = None if held is None else attended_token(q, held, (tail[0], tail[1], after), scale, softcap)
        if Y is not None:
            return Y
        return attended(q, tuple(group.opened(kind) for group in self.groups), tail, after, scale, softcap)

    def _held_by_kernels(self, dtype: Any) -> Any:
        """Return the slots as kernels read them for each token, or None if they do not now."""
        if self._held is None or self._held[0] is not self.groups or self._held[1] != dtype:
            found = held_by_kernels(self.groups, dtype)
            self._held = None if found is None else (self.groups, dtype, found)
        return None if self._held is None else self._held[2]

    def _padding_after(self, layer: str, mask: Any, rows: int, length: int) -> Any:
        """Return which of the positions after the slots are no padding, (B, length) bool, or None for all."""
        present, causal = padding_and_kind(layer, mask, rows, self.length + length, True)
        if not causal:
            raise ValueError(f"{layer} was given a mask that is not causal; expected causal attention")
        if present is None:
            return None
        before, after = present[:, : self.length], present[:, self.length :]
        hidden = (self.present.to(before.device) & ~before).any()
        hides, whole = torch.stack([hidden, after.all()]).cpu().tolist()  # at once, as this waits for a device
        if hides:
            raise ValueError(
                f"{layer} was given an attention mask that hides positions of the context other than its padding; "
                "expected 1 for them, as a slot may stand for several. Give a mask of all positions so far and of "
                "the new ones, cache.so_far()[1] and ones, or compress the context with this mask"
            )
        return None if whole else after

    def renew(self) -> None:
        """Compress the positions after the slots, if there are enough of them."""
        renewal = self.renewal
        if renewal is None or renewal.paused or self.tail.length < renewal.every:
            return
        tail = self.tail.arrays
        if renewal.asked.length < self.tail.length or any(array.requires_grad for array in tail):
            return  # a call failed before it asked, or a backward pass will read the tail
        with torch.inference_mode(mode=False), torch.no_grad(), torch.autocast(tail[0].device.type, enabled=False):
            self.groups, self.present = renewal.renewed(self.groups, tail, self.present)
            self._held = None
        self.tail = Tail()

    def keep(self, groups: tuple[HeadSlots, ...], present: Any) -> None:
        """Add the chunk that was read to the context, which has these slots from now on; present: of all of it."""
        self.groups, self.present, self.fresh, self._held = groups, present, 0, None

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate nothing: arrays grow as positions come."""

    def get_seq_length(self, *args: Any) -> int:  # noqa: ARG002 (the interface of some versions)
        """Return the number of positions so far, the context included."""
        return self.length + self.tail.length + self.fresh

    @property
    def nbytes(self) -> int:
        """Bytes of the slots, of the positions after the context, and of the moments and queries for renewal."""
        renewal = 0 if self.renewal is None else self.renewal.nbytes
        return sum(group.nbytes for group in self.groups) + self.tail.nbytes + renewal

    def copy(self) -> CompressedLayer:
        """Return a layer that shares the slots and has its own further positions."""
        layer = CompressedLayer(self.number, self.groups, self.present)
        layer.tail = self.tail.copy()
        layer.renewal = None if self.renewal is None else replace(self.renewal, asked=self.renewal.asked.copy())
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

    def batch_select_indices(self, indices: Any) -> None:
        """Take the sequences with these numbers."""
        rows = torch.as_tensor(indices)
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        self.groups, self._held = tuple(group.of_sequences(rows) for group in self.groups), None
        self.present = self.present[rows.to(self.present.device)]
        self._change(self.tail.length, rows)

    reorder_cache = batch_select_indices  # for beam search

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self.batch_select_indices(torch.arange(len(self.present)).repeat_interleave(repeats))
