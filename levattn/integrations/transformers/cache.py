"""Layers of a transformers cache that hold a state in place of all keys and values."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

__all__ = ["StateLayer", "refuse_crop", "replaced"]


class StateLayer:
    """A layer that holds only states, so its size does not grow with the number of positions.

    A mixin before `DynamicLayer`, so that masks keep the sizes of the replaced layer. `update` passes on the new keys
    and values; the attention function adds them to the states and stores these. Subclasses define `positions` and
    `sequences` (their numbers in the states), `nbytes`, `reset` and `batch_select_indices`.
    """

    is_croppable = False
    owner = ""  # the name, in messages, of the models with such states
    change = ""  # and of the change to these models
    expected = False  # whether a layer of such a model is about to update
    positions: int
    sequences: int

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Return the new keys and values, without earlier ones."""
        if not self.expected:
            raise ValueError(
                f"the cache holds the states of {self.owner}, and came to another model, or {self.change} was "
                "removed; expected a cache of this model. Give an empty DynamicCache"
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

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take the sequences with these numbers, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Any) -> None:
        """Take the sequences with these numbers."""
        raise NotImplementedError

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self.positions:
            self.batch_select_indices(torch.arange(self.sequences).repeat_interleave(repeats))

    def crop(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Raise: states cannot forget their last positions."""
        refuse_crop(self.owner)


def refuse_crop(owner: str) -> None:
    """Raise, because states cannot forget positions."""
    raise ValueError(
        f"crop was called on the cache of {owner}; its states cannot forget positions. Copy the cache before the "
        "positions that you may drop, or decode without drafts (assisted generation)"
    )


def replaced(cache: Any, index: int, full: type[Any], sliding: type[Any], keeper: str) -> Any:
    """Return a layer of a cache as an instance of `full` or `sliding`, which replaces an empty layer."""
    offloading = getattr(cache, "offloading", False)
    if not isinstance(cache, DynamicCache) or offloading:
        raise TypeError(
            f"the cache is of type {type(cache).__name__}{', offloaded' if offloading else ''}; expected a "
            "DynamicCache on the device, whose layers can be replaced. Give DynamicCache(config=model.config), or "
            "nothing"
        )
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, full | sliding):
        return layer
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise TypeError(
            f"layer {index} of the cache is of type {type(layer).__name__}; expected DynamicLayer or "
            "DynamicSlidingWindowLayer. Give DynamicCache(config=model.config), or nothing"
        )
    if layer.get_seq_length():
        raise ValueError(
            f"layer {index} of the cache holds {layer.get_seq_length()} positions of the base model without {keeper}; "
            "expected an empty cache. Compute the positions again with the changed model"
        )
    held = full() if type(layer) is DynamicLayer else sliding(layer.sliding_window)
    cache.layers[index] = held
    return held
