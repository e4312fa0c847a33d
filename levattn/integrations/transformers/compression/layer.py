"""A layer of a cache that holds the slots of a context, and all positions after it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from levattn.integrations.transformers.compression.slots import HeadSlots

__all__ = ["CompressedLayer", "Tail"]


class Tail:
    """Keys and values (B, G, t, ·) of the positions after the context, in arrays with room for more."""

    def __init__(self) -> None:
        self._room: list[Any] = []
        self.length = 0

    def append(self, keys: Any, values: Any) -> None:
        """Append the keys and values of further positions."""
        more = self.length + keys.shape[2]
        if not self._room or more > self._room[0].shape[2]:
            grown = [like.new_zeros((*like.shape[:2], 2 * more, like.shape[3])) for like in (keys, values)]
            for new, old in zip(grown, self._room, strict=False):
                new[:, :, : self.length] = old[:, :, : self.length]
            self._room = grown
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
            tail.append(*self.arrays)
        return tail

    def change(self, length: int, rows: Any) -> None:
        """Keep the first positions, of the sequences with these numbers (None for all)."""
        self.length = min(self.length, length)
        if self._room and rows is not None:
            self._room = [room[rows.to(room.device)] for room in self._room]


class CompressedLayer(DynamicLayer):  # type: ignore[misc]
    """The slots of a context in a layer, and the keys and values of the positions after it."""

    def __init__(self, groups: tuple[HeadSlots, ...] = (), length: int = 0) -> None:
        super().__init__()
        self.groups = groups
        self.length = length  # positions of the context
        self.tail = Tail()
        self.waiting: tuple[HeadSlots, ...] = ()  # the slots of the context once its next chunk is read
        self.expected = False  # whether a prepared attention module is about to call `update`
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Append new keys and values, and return all keys and values after the context."""
        if not self.expected:
            raise ValueError(
                "the cache is a CompressedCache, which this model is not prepared to read; expected the model that "
                "made the cache. Call compress or CompressedCache.load with this model"
            )
        self.expected = False
        self.tail.append(key_states, value_states)
        return self.tail.arrays

    def extend(self, length: int) -> None:
        """Replace the context so far and the positions after it by the waiting slots."""
        self.groups, self.length, self.tail, self.waiting = self.waiting, length, Tail(), ()

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate nothing: arrays grow as positions come."""

    def get_seq_length(self, *args: Any) -> int:  # noqa: ARG002 (the interface of some versions)
        """Return the number of positions so far, the context included."""
        return self.length + self.tail.length

    @property
    def nbytes(self) -> int:
        """Bytes of the slots and of the positions after the context."""
        return sum(group.nbytes for group in self.groups) + self.tail.nbytes

    def copy(self) -> CompressedLayer:
        """Return a layer that shares the slots and has its own further positions."""
        layer = CompressedLayer(self.groups, self.length)
        layer.tail = self.tail.copy()
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
        self.groups = tuple(group.of_sequences(rows) for group in self.groups)
        self.tail.change(self.tail.length, rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self.batch_select_indices(torch.arange(self.groups[0].keys.shape[0]).repeat_interleave(repeats))
