"""Find the layers of a model that `macchiato_from` can extend."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from levattn.integrations.transformers.calls import layer_of, numbers_among, whole_numbers
from levattn.integrations.transformers.changes import check_model
from levattn.integrations.transformers.discovery import ModelLayer, discovered
from levattn.integrations.transformers.latents.interface import LATENTS


def extendable(model: Any, layers: Iterable[int] | None) -> list[ModelLayer]:
    """Return the layers of a causal decoder with these numbers (None for all), or raise if one cannot be extended."""
    check_model(model)
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"model is {type(model).__name__}, an encoder-decoder or with cross-attention; expected a causal decoder"
        )
    wanted = whole_numbers("layers", layers)
    there = discovered(LATENTS, model, wanted)
    chosen = [there[number] for number in numbers_among("layers", wanted, list(there))]
    for layer in chosen:
        types = getattr(layer.module.config, "layer_types", None)
        kind = types[layer.number] if types else "full_attention"
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"layer {layer.number} is of type {kind!r}; expected full_attention or sliding_attention. Leave "
                "it out of layers"
            )
        if not layer.handed or layer.probe.call.hidden is None:
            raise ValueError(
                f"{layer.name} ({layer_of(layer.module)}) takes no hidden_states, or does not pass its keywords on to "
                "its attention; expected a module that does both. Leave it out of layers"
            )
        if kind == "sliding_attention" and layer.probe.sliding_window is None:
            raise ValueError(
                f"{layer_of(layer.module)} slides, but does not pass its window to its attention; expected "
                "sliding_window. Leave it out of layers"
            )
    return chosen
