"""Layers of a transformers cache that hold a latent state and a ring of positions instead of all keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from levattn._core.arrays import array_namespace, take_entries
from levattn.attention import MacchiatoState
from levattn.states import SoftmaxState

__all__ = ["StateLayer", "layer_for", "replaced"]


class StateLayer:
    """The state of one extended layer, in the place of its `DynamicLayer`.

    A mixin, so that sizes of masks stay those of the layer it takes the place of. `update` hands the new keys and
    values on, and the attention function, which takes them in, stores the state and counts them.
    """

    is_croppable = False
    state: MacchiatoState | None = None
    feature: Any = None  # the state of the feature before the latents, (sequences, ...)
    positions = 0
    expected = False  # whether an extended layer is about to update

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Return the new keys and values, without those before."""
        if not self.expected:
            raise ValueError(
                "past_key_values holds the state of a model extended by macchiato_from, and came to another model, or "
                "the extension was removed; expected a cache of this model. Give an empty DynamicCache"
            )
        self.expected = False
        self.is_initialized = True
        return key_states, value_states

    def advance(self, state: MacchiatoState, feature: Any, count: int) -> None:
        """Hold states that have so many positions more."""
        self.state = state
        self.feature = None if feature is None else feature.detach()
        self.positions += count
        self.cumulative_length = self.positions  # what a sliding layer computes the sizes of masks from

    def get_seq_length(self) -> int:
        """Return the number of positions so far."""
        return self.positions

    def nbytes(self) -> int:
        """Return how many bytes the arrays of the states take."""
        if self.state is None:
            return 0
        held, latents = self.state, self.state.latents
        arrays = (latents.m, latents.s, latents.S, held.k, held.V, held.logits, held.mask, self.feature)
        return sum(int(array.nbytes) for array in arrays if array is not None)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate nothing: the state has the size that it needs."""

    def reset(self) -> None:
        """Forget all positions."""
        self.state = self.feature = None
        self.positions = self.cumulative_length = 0

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take the sequences with these numbers, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Any) -> None:
        """Take the sequences with these numbers."""
        if self.state is not None:
            self.state = _of_sequences(self.state, indices)
        if self.feature is not None:
            self.feature = self.feature[indices.to(self.feature.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self.state is not None:
            self.batch_select_indices(torch.arange(self.state.batch[0]).repeat_interleave(repeats))

    def crop(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Raise: a latent state cannot forget its last positions."""
        raise ValueError(
            "crop was called on the cache of a model extended by macchiato_from; its latents cannot forget positions. "
            "Copy the cache before the positions to be forgotten, or decode without drafts (assisted generation)"
        )


class _FullStateLayer(StateLayer, DynamicLayer):  # type: ignore[misc]
    """In the place of a layer that attends to all positions."""


class _SlidingStateLayer(StateLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """In the place of a layer that slides in the base model too."""


def layer_for(cache: Any, index: int) -> StateLayer:
    """Return the layer of a cache that holds a state, putting one there in the place of an empty one."""
    return replaced(cache, index, _FullStateLayer, _SlidingStateLayer, "the latents")  # type: ignore[no-any-return]


def replaced(cache: Any, index: int, full: type[Any], sliding: type[Any], keeper: str) -> Any:
    """Return a layer of a cache as one of two types of ours, putting it there in the place of an empty one."""
    offloading = getattr(cache, "offloading", False)
    if not isinstance(cache, DynamicCache) or offloading:
        raise TypeError(
            f"past_key_values is of type {type(cache).__name__}{', offloaded' if offloading else ''}; expected a "
            "DynamicCache on the device, whose layers are replaced by others. Give DynamicCache(config=model.config), "
            "or nothing"
        )
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, full | sliding):
        return layer
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise TypeError(
            f"layer {index} of past_key_values is of type {type(layer).__name__}; expected DynamicLayer or "
            "DynamicSlidingWindowLayer. Give DynamicCache(config=model.config), or nothing"
        )
    if layer.get_seq_length():
        raise ValueError(
            f"layer {index} of past_key_values holds {layer.get_seq_length()} positions of the base model, without "
            f"what {keeper} keep of them; expected an empty cache. Compute them anew with the model as it is now"
        )
    held = full() if type(layer) is DynamicLayer else sliding(layer.sliding_window)
    cache.layers[index] = held
    return held


def _of_sequences(state: MacchiatoState, indices: Any) -> MacchiatoState:
    """Return the state of these sequences of the batch (sequences, heads)."""
    chosen = torch.as_tensor(indices).cpu().numpy()
    sequences, heads = state.batch

    def of(array: Any) -> Any:
        """Take them from an array (sequences, ...) or (sequences · heads, ...)."""
        xp = array_namespace(array)
        apart = xp.reshape(array, (sequences, -1, *array.shape[1:]))
        return xp.reshape(take_entries(apart, chosen), (-1, *array.shape[1:]))

    latents = state.latents
    return replace(
        state,
        latents=SoftmaxState.from_arrays(of(latents.m), of(latents.s), of(latents.S)),
        k=of(state.k),
        V=of(state.V),
        logits=None if state.logits is None else of(state.logits),
        mask=None if state.mask is None else of(state.mask),
        batch=(len(chosen), heads),
    )
