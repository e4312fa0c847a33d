"""Layers of a transformers cache that hold states: of pruned attention, or of latents beside a window."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from levattn._core.arrays import array_namespace, take_entries
from levattn.attention import MacchiatoState, PrunedState, Selection
from levattn.attention.pruned.state import picked
from levattn.integrations.transformers.calls import layer_of
from levattn.states import SoftmaxState


class StateLayer:
    """A layer that holds states, which cannot forget their last positions.

    A mixin before `DynamicLayer`, so that masks keep the sizes of the replaced layer. A kind of these layers says how
    many `sequences` it has, and how to `take` some of them.
    """

    is_croppable = False
    expected = False  # whether a changed layer is about to update
    positions = 0  # that the states have seen

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Raise where there are states."""
        if self.positions:
            raise ValueError(
                "crop was called on a cache that prune or macchiato_from filled, whose states cannot forget "
                "positions. Copy the cache before the positions that you may drop, or decode without drafts "
                "(assisted generation)"
            )
        if self.get_seq_length():  # type: ignore[attr-defined]
            super().crop(*args, **kwargs)  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take the sequences with these numbers, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self.batch_select_indices(torch.arange(self.sequences).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Any) -> None:
        """Take the sequences with these numbers, which may count from the end, or with these flags."""
        if self.sequences:
            self.take(torch.arange(self.sequences)[torch.as_tensor(indices).cpu()])

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        raise NotImplementedError

    def take(self, rows: Any) -> None:
        """Take the sequences with these numbers, (b,) int64 on the CPU, where there are some."""
        raise NotImplementedError


def state_layer(cache: Any, module: Any, kinds: tuple[type[Any], type[Any]], attention: str) -> Any:
    """Return the layer of a cache that holds a module's states, before it is updated; it replaces an empty layer.

    kinds: of layers that attend to all positions, and of layers that slide. attention: its name in messages.
    """
    offloading = getattr(cache, "offloading", False)
    if not isinstance(cache, DynamicCache) or offloading:
        raise TypeError(
            f"the cache is of type {type(cache).__name__}{', offloaded' if offloading else ''}; expected a "
            "DynamicCache on the device, whose layers can be replaced. Give DynamicCache(config=model.config), or "
            "nothing, or use_cache=False if the model has an encoder"
        )
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise ValueError(
            f"{layer_of(module)} does not know which layer of the cache is its own; expected a module with a "
            "layer_idx. Set use_cache=False, or leave the layer out of layers"
        )
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if not isinstance(layer, kinds):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise TypeError(
                f"layer {index} of the cache is of type {type(layer).__name__}; expected DynamicLayer or "
                "DynamicSlidingWindowLayer. Give DynamicCache(config=model.config), or nothing. If the model's own "
                "cache has such layers, set use_cache=False, or leave them out of layers"
            )
        if layer.get_seq_length():
            raise ValueError(
                f"layer {index} of the cache holds {layer.get_seq_length()} positions of the base model without the "
                f"states of {attention}; expected an empty cache. Compute the positions again with the changed model"
            )
        full, sliding = kinds
        layer = cache.layers[index] = full() if type(layer) is DynamicLayer else sliding(layer.sliding_window)
    layer.expected = True
    return layer


# States of pruned attention, beside all keys and values


@dataclass(frozen=True)
class Held:
    """Some sequences of a group of heads, the selection of their first call, and their state.

    rows: (b,) numbers of the sequences, a numpy array, or None for all.

    rule: of the selection if attention is causal, else None.

    few: calls of at most so many positions after others attend to all keys.

    whole: so do calls that end after at most so many positions.

    state: after the first `seen` positions; None for none.

    asked: of later positions, the queries that selections go by, tensors (b, heads, ·, d), each with the numbers of
    their positions, int64 of numpy. Keys and values are in the layer.
    """

    rows: Any
    selection: Selection
    rule: Any
    few: int
    whole: int
    state: PrunedState | None = None
    seen: int = 0
    asked: tuple[tuple[Any, Any], ...] = ()

    def with_queries(self, places: Any, q: Any) -> Held:
        """Return these after further queries; each tensor has more of them than the next one."""
        q = q.detach()
        asked = [*self.asked, (places, q if q.untyped_storage().nbytes() < 2 * q.nbytes else q.clone())]
        while len(asked) > 1 and len(asked[-2][0]) <= len(asked[-1][0]):
            (before, earlier), (after, later) = asked[-2:]
            asked[-2:] = [(np.concatenate([before, after]), torch.cat([earlier, later], 2))]
        return replace(self, asked=tuple(asked))

    def of_sequences(self, chosen: Any) -> Held:
        """Return the part of the chosen sequences, a numpy array, that is among these, under their new numbers."""
        rows, places = None, chosen
        if self.rows is not None:
            rows = np.flatnonzero(np.isin(chosen, self.rows))
            places = np.searchsorted(self.rows, chosen[rows])
        asked = tuple((at, q[torch.as_tensor(places, device=q.device)]) for at, q in self.asked)
        return replace(
            self, rows=rows, state=None if self.state is None else _pruned_state(self.state, places), asked=asked
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the state and of the queries after it."""
        return sum(int(at.nbytes + q.nbytes) for at, q in self.asked) + (
            0 if self.state is None else self.state.nbytes
        )


States = tuple[tuple[Held, ...], ...]  # of each group of heads


class PrunedLayer(StateLayer):
    """A layer that holds states beside all keys and values, from which a model without pruning can continue."""

    keys: Any
    values: Any
    pruning: str | None = None  # the name of the pruning that computed the states
    first: int = 0  # number of positions of the longest sequence in the first call
    states: States = ()
    counts: Any = None  # (B,), the number of present positions of each sequence, or None for all

    def begin(self, pruning: str) -> int:
        """Return the number of positions that a pruning has seen, or raise if the states belong to another."""
        if self.pruning not in (None, pruning):
            raise ValueError(
                "the cache holds the states of another call of prune; expected an empty cache, or one that this "
                "pruned model has filled. Give an empty DynamicCache"
            )
        self.pruning = pruning
        return self.positions

    def check(self, layer: str, present: Any) -> None:
        """Raise if the number of present positions so far has changed; present: (B, positions) or None."""
        if present is None and self.counts is None:
            return
        now = torch.tensor(self.positions) if present is None else present[:, : self.positions].sum(1)
        before = self.positions if self.counts is None else self.counts
        if (now.to(torch.int64) != before).any():
            raise ValueError(
                f"{layer} was given an attention mask that leaves out other positions than before; expected the same "
                "positions, as the states depend on them. Begin with an empty cache"
            )

    def reset(self) -> None:
        """Forget all positions."""
        super().reset()  # type: ignore[misc]
        self.keys = self.values = None  # some versions keep them, as zeros
        self.is_initialized, self.positions, self.first = False, 0, 0
        self.pruning, self.states, self.counts = None, (), None

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return 0 if self.keys is None else int(self.keys.shape[0])

    def take(self, rows: Any) -> None:
        """Take the sequences with these numbers, (b,) int64 on the CPU."""
        self.keys, self.values = (array[rows.to(array.device)] for array in (self.keys, self.values))
        moved = ([held.of_sequences(rows.numpy()) for held in group] for group in self.states)
        self.states = tuple(tuple(held for held in group if held.rows is None or len(held.rows)) for group in moved)
        if self.counts is not None:
            self.counts = self.counts[rows.to(self.counts.device)]


class FullPrunedLayer(PrunedLayer, DynamicLayer):  # type: ignore[misc]
    """A replacement for a layer that attends to all positions."""


class SlidingPrunedLayer(PrunedLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A replacement for a sliding layer, for sequences no longer than its window."""


def _pruned_state(state: PrunedState, chosen: Any) -> PrunedState:
    """Return the state of the chosen sequences, a numpy array, out of the batch (sequences, heads)."""
    sequences, heads = state.batch
    items = (chosen[:, None] * heads + np.arange(heads)).reshape(-1)
    parts = []
    for part in state.parts:
        place = np.full(sequences * heads, -1)
        place[part.rows] = np.arange(len(part.rows))
        rows = np.flatnonzero(place[items] >= 0)
        if len(rows):
            parts.append(replace(picked(part, place[items[rows]]), rows=rows))
    return replace(state, batch=(len(chosen), heads), parts=tuple(parts))


# States of latents, in place of keys and values


class LatentStateLayer(StateLayer):
    """A layer that holds the state of latents and a ring of positions: it does not grow with their number.

    `update` passes on the new keys and values; the attention function adds them to the state and stores it.
    """

    state: MacchiatoState | None = None
    feature: Any = None  # the state of the feature before the latents, (sequences, ...)

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Return the new keys and values, without earlier ones."""
        if not self.expected:
            raise ValueError(
                "the cache is of a model extended by macchiato_from, and came to another model, or the extension "
                "was removed; expected a cache of this model. Give an empty DynamicCache"
            )
        self.expected = False
        self.is_initialized = True
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:  # noqa: ARG002 (the interface of some versions)
        """Return the number of positions so far."""
        return self.positions

    def advance(self, state: MacchiatoState | None, feature: Any, positions: int) -> None:
        """Store the states after a number of positions."""
        self.state = state
        self.feature = None if feature is None else feature.detach()
        self.positions = self.cumulative_length = positions  # from which a sliding layer computes sizes of masks

    def nbytes(self) -> int:
        """Return how many bytes the arrays of the states take."""
        if self.state is None:
            return 0
        held, latents = self.state, self.state.latents
        arrays = (latents.m, latents.s, latents.S, held.k, held.V, held.logits, held.mask, self.feature)
        return sum(int(array.nbytes) for array in arrays if array is not None)

    def reset(self) -> None:
        """Forget all positions."""
        self.advance(None, None, 0)

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return 0 if self.state is None else int(self.state.batch[0])

    def take(self, rows: Any) -> None:
        """Take the sequences with these numbers, (b,) int64 on the CPU."""
        if self.state is not None:
            self.state = _latent_state(self.state, rows.numpy())
        if self.feature is not None:
            self.feature = self.feature[rows.to(self.feature.device)]


class FullLatentLayer(LatentStateLayer, DynamicLayer):  # type: ignore[misc]
    """A replacement for a layer that attends to all positions."""


class SlidingLatentLayer(LatentStateLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A replacement for a layer that slides in the base model too."""


def _latent_state(state: MacchiatoState, chosen: Any) -> MacchiatoState:
    """Return the state of the chosen sequences, a numpy array, out of the batch (sequences, heads)."""
    sequences, heads = state.batch

    def of(array: Any) -> Any:
        """Select sequences in an array (sequences, ...) or (sequences · heads, ...), or None."""
        if array is None:
            return None
        xp = array_namespace(array)
        apart = xp.reshape(array, (sequences, -1, *array.shape[1:]))
        return xp.reshape(take_entries(apart, chosen), (-1, *array.shape[1:]))

    latents = SoftmaxState.from_arrays(*(of(array) for array in (state.latents.m, state.latents.s, state.latents.S)))
    parts = {name: of(getattr(state, name)) for name in ("k", "V", "logits", "mask")}
    return replace(state, latents=latents, batch=(len(chosen), heads), **parts)
