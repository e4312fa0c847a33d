"""Layers of a transformers cache that hold the state of the latents and a ring of positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from levattn._core.arrays import array_namespace, take_entries
from levattn.attention import MacchiatoState
from levattn.integrations.transformers.cache import refuse_crop, replaced
from levattn.states import SoftmaxState

_OWNER = "a model extended by macchiato_from"


class LatentState:
    """The state of one extended layer, which does not grow with the number of positions.

    A mixin before `DynamicLayer`, so that masks keep the sizes of the replaced layer. `update` passes on the new keys
    and values; the attention function adds them to the state and stores it.
    """

    is_croppable = False
    expected = False  # whether an extended layer is about to update
    state: MacchiatoState | None = None
    feature: Any = None  # the state of the feature before the latents, (sequences, ...)
    positions = 0

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Return the new keys and values, without earlier ones."""
        if not self.expected:
            raise ValueError(
                f"the cache holds the states of {_OWNER}, and came to another model, or the extension was removed; "
                "expected a cache of this model. Give an empty DynamicCache"
            )
        self.expected = False
        self.is_initialized = True
        return key_states, value_states

    @property
    def cumulative_length(self) -> int:
        """The number of positions, from which a sliding layer computes sizes of masks."""
        return self.positions

    @cumulative_length.setter
    def cumulative_length(self, value: int) -> None:
        """Do nothing: the states count."""

    def get_seq_length(self, *args: Any) -> int:  # noqa: ARG002 (the interface of some versions)
        """Return the number of positions so far."""
        return self.positions

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the states need no allocation here."""

    def advance(self, state: MacchiatoState, feature: Any, count: int) -> None:
        """Store the new states, which include `count` more positions."""
        self.state = state
        self.feature = None if feature is None else feature.detach()
        self.positions += count

    def nbytes(self) -> int:
        """Return how many bytes the arrays of the states take."""
        if self.state is None:
            return 0
        held, latents = self.state, self.state.latents
        arrays = (latents.m, latents.s, latents.S, held.k, held.V, held.logits, held.mask, self.feature)
        return sum(int(array.nbytes) for array in arrays if array is not None)

    def reset(self) -> None:
        """Forget all positions."""
        self.state = self.feature = None
        self.positions = 0

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take the sequences with these numbers, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self.state is not None:
            self.batch_select_indices(torch.arange(self.state.batch[0]).repeat_interleave(repeats))

    def crop(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Raise: states cannot forget their last positions."""
        refuse_crop(_OWNER)

    def batch_select_indices(self, indices: Any) -> None:
        """Take the sequences with these numbers."""
        if self.state is not None:
            self.state = _of_sequences(self.state, indices)
        if self.feature is not None:
            self.feature = self.feature[indices.to(self.feature.device)]


class _FullLatentLayer(LatentState, DynamicLayer):  # type: ignore[misc]
    """A replacement for a layer that attends to all positions."""


class _SlidingLatentLayer(LatentState, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A replacement for a layer that slides in the base model too."""


def latent_layer_for(cache: Any, index: int) -> LatentState:
    """Return the layer of a cache that holds a state, before it is updated; it replaces an empty layer."""
    layer: LatentState = replaced(cache, index, _FullLatentLayer, _SlidingLatentLayer, "the latents")
    layer.expected = True
    return layer


def _of_sequences(state: MacchiatoState, indices: Any) -> MacchiatoState:
    """Return the state of these sequences of the batch (sequences, heads)."""
    chosen = torch.as_tensor(indices).cpu().numpy()
    sequences, heads = state.batch

    def of(array: Any) -> Any:
        """Select sequences in an array (sequences, ...) or (sequences · heads, ...), or None."""
        if array is None:
            return None
        xp = array_namespace(array)
        apart = xp.reshape(array, (sequences, -1, *array.shape[1:]))
        return xp.reshape(take_entries(apart, chosen), (-1, *array.shape[1:]))

    latents = state.latents
    return replace(
        state,
        latents=SoftmaxState.from_arrays(of(latents.m), of(latents.s), of(latents.S)),
        k=of(state.k),
        V=of(state.V),
        logits=of(state.logits),
        mask=of(state.mask),
        batch=(len(chosen), heads),
    )
