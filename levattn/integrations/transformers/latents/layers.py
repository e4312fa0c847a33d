"""Which layers of a model can be extended, and what they hand to their attention."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from levattn.integrations.transformers.calls import layer_of, numbers_among, parameters_of
from levattn.integrations.transformers.changes import PART, check_model
from levattn.integrations.transformers.interface import Probe
from levattn.integrations.transformers.latents.interface import LATENTS

__all__ = ["RECORD", "attention_modules", "check_extendable", "chosen_among", "probed"]

RECORD = "_levattn_macchiato"  # the attribute of an extended model that remembers what it was


def check_extendable(model: Any) -> None:
    """Raise for what is no causal decoder, or is changed already."""
    check_model(model)
    if hasattr(model, RECORD):
        raise ValueError("model is extended already; expected a base model. Call remove(model) first")
    if any(hasattr(module, PART) for module in model.modules()):
        raise ValueError(
            "model is pruned; expected a base model. Leave the with block of prune, or call remove(model)"
        )
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"model is {type(model).__name__}, an encoder-decoder or with cross-attention; expected a causal decoder"
        )


def attention_modules(model: Any) -> dict[int, Any]:
    """Return the attention modules of a decoder by the number of their layer."""
    found: dict[int, Any] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or "Attention" not in type(module).__name__:
            continue
        if index in found:
            raise ValueError(
                f"layer {index} has two attention modules, {type(found[index]).__name__} and {type(module).__name__}; "
                "expected one of each layer"
            )
        found[index] = module
    if not found:
        raise ValueError(
            f"model is {type(model).__name__}, in which no attention module with a layer_idx was found; expected a "
            "causal decoder whose attention goes through the attention interface of transformers"
        )
    return dict(sorted(found.items()))


def chosen_among(candidates: dict[int, Any], layers: Iterable[int] | None) -> list[Any]:
    """Return the attention modules of these layers, or raise if one of them cannot be extended."""
    chosen = [candidates[number] for number in numbers_among("layers", layers, list(candidates))]
    for module in chosen:
        names, others = parameters_of(module)
        if "hidden_states" not in names or not others or not hasattr(module, "config"):
            raise _not_reached(module)
        kind = _kind(module)
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"layer {module.layer_idx} is of type {kind!r}; expected full_attention or sliding_attention. Leave "
                "it out of layers"
            )
    return chosen


def probed(model: Any, modules: list[Any]) -> list[Probe]:
    """Return what each of these modules hands to its attention, from one token."""
    ids = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    trial = LATENTS.tried(model, modules, {"input_ids": ids, "use_cache": False})
    probes = {id(probe.module): probe for probe in trial.reached}
    for module in modules:
        probe = probes.get(id(module))
        if probe is None or probe.call is None:
            raise _not_reached(module)
        if _kind(module) == "sliding_attention" and probe.sliding_window is None:
            raise ValueError(
                f"{layer_of(module)} slides, but does not hand its window to its attention; expected sliding_window. "
                "Leave it out of layers"
            )
    return [probes[id(module)] for module in modules]


def _kind(module: Any) -> str:
    types = getattr(module.config, "layer_types", None)
    return types[module.layer_idx] if types else "full_attention"


def _not_reached(module: Any) -> ValueError:
    return ValueError(
        f"{type(module).__name__} does not go through the attention interface of transformers; expected an attention "
        "module with hidden_states and further keywords, which can be chosen by the config"
    )
