"""Replace layers of a transformers cache by layers that hold states."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


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
