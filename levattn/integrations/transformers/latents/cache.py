"""Layers of a transformers cache that hold the state of the latents and a ring of positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from levattn._core.arrays import array_namespace, take_entries
from levattn.attention import MacchiatoState
from levattn.integrations.transformers.cache import StateLayer, replaced
from levattn.states import SoftmaxState

__all__ = ["LatentState", "latent_layer_for"]


class LatentState(StateLayer):
    """The state of one extended layer."""

    owner, change = "a model extended by macchiato_from", "the extension"
    state: MacchiatoState | None = None
    feature: Any = None  # the state of the feature before the latents, (sequences, ...)
    positions = 0

    @property
    def sequences(self) -> int:  # type: ignore[override]
        """Number of sequences in the state."""
        return 0 if self.state is None else self.state.batch[0]

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
    """Return the layer of a cache that holds a state; it replaces an empty layer."""
    return replaced(cache, index, _FullLatentLayer, _SlidingLatentLayer, "the latents")  # type: ignore[no-any-return]


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
