"""Which layers of a model can be extended, what they hand to attention, and how they become what they were."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from transformers import PreTrainedModel

from levattn.integrations.transformers._interface import (
    EXTENSION,
    NAME,
    Probe,
    check_reached,
    parameters_of,
)

__all__ = ["RECORD", "Record", "attention_modules", "check_model", "chosen_among", "probed"]

RECORD = "_levattn_macchiato"  # the attribute of an extended model that remembers what it was


@dataclass
class Record:
    """What an extension changed in a model."""

    modules: list[Any] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)  # of these modules, before
    implementations: list[tuple[Any, str]] = field(default_factory=list)  # of configs that were changed themselves
    hooks: list[Any] = field(default_factory=list)
    trained: list[Any] = field(default_factory=list)  # parameters of the base that were to be trained

    def undo(self) -> None:
        for hook in self.hooks:
            hook.remove()
        for module, config in zip(self.modules, self.configs, strict=True):
            module.config = config
            if hasattr(module, EXTENSION):
                delattr(module, EXTENSION)
        for config, implementation in self.implementations:
            config._attn_implementation = implementation
        for parameter in self.trained:
            parameter.requires_grad_(True)


def check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is of type {type(model).__name__}; expected a transformers.PreTrainedModel")
    if hasattr(model, RECORD):
        raise ValueError("model is extended already; expected a base model. Call remove(model) first")
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if model.config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ValueError(f"model is {name}, an encoder-decoder or with cross-attention; expected a causal decoder")
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        raise ValueError(f"model is {name}, whose attention has ALiBi biases; expected rotary or absolute positions")
    if getattr(config, "num_kv_shared_layers", None):
        raise ValueError(f"model is {name}, whose layers share keys and values; expected keys of each layer's own")
    if getattr(config, "attention_chunk_size", None):
        raise ValueError(f"model is {name}, whose attention is cut into chunks; expected full or sliding attention")


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
    if layers is not None and not isinstance(layers, Iterable):
        raise TypeError(f"layers is {layers!r}; expected numbers of layers, e.g. [{layers!r}], or None for all")
    numbers = list(candidates) if layers is None else list(layers)
    if any(isinstance(number, bool) or not isinstance(number, Integral) for number in numbers):
        raise TypeError(f"layers is {numbers}; expected whole numbers among {list(candidates)}")
    unknown = [number for number in numbers if number not in candidates]
    if not numbers or unknown or len(set(numbers)) < len(numbers):
        raise ValueError(f"layers is {numbers}; expected different numbers among {list(candidates)}, at least one")
    chosen = [candidates[number] for number in sorted(numbers)]
    for module in chosen:
        names, others = parameters_of(module)
        if "hidden_states" not in names or not others or not hasattr(module, "config"):
            raise ValueError(
                f"{type(module).__name__} does not go through the attention interface of transformers; expected an "
                "attention module with hidden_states and further keywords"
            )
        types = getattr(module.config, "layer_types", None)
        if types and types[module.layer_idx] not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"layer {module.layer_idx} is of type {types[module.layer_idx]!r}; expected full_attention or "
                "sliding_attention. Leave it out of layers"
            )
    return chosen


def probed(model: Any, modules: list[Any], record: Record) -> list[Probe]:
    """Give modules a config of their own with our attention, and return what each hands to it, from one token."""
    probes = {id(module): Probe(None, None) for module in modules}

    def probe(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = probes[id(module)]
        found.hidden = {**dict(zip(parameters_of(module)[0], args, strict=False)), **kwargs}["hidden_states"]
        return args, {**kwargs, NAME: found}

    copies: dict[int, Any] = {}
    hooks = []
    training = [module for module in model.modules() if module.training]
    try:
        for module in modules:
            if id(module.config) not in copies:
                copies[id(module.config)] = copy.deepcopy(module.config)
                copies[id(module.config)]._attn_implementation = NAME
            record.modules.append(module)
            record.configs.append(module.config)
            module.config = copies[id(module.config)]
            hooks.append(module.register_forward_pre_hook(probe, with_kwargs=True))
            hooks.append(module.register_forward_hook(check_reached, with_kwargs=True))
        model.eval()
        with torch.no_grad():
            model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    for module in modules:
        found, types = probes[id(module)], getattr(module.config, "layer_types", None)
        if types and types[module.layer_idx] == "sliding_attention" and found.sliding_window is None:
            raise ValueError(
                f"{type(module).__name__} {module.layer_idx} slides, but does not hand its window to its attention; "
                "expected sliding_window. Leave it out of layers"
            )
    return list(probes.values())
