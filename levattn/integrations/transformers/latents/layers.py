"""Which layers of a model can be extended, what they hand to attention, and how they become what they were."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from levattn.integrations.transformers.calls import given_to, numbers_among, parameters_of
from levattn.integrations.transformers.changes import PART, Changes, check_pretrained, tried
from levattn.integrations.transformers.latents.interface import EXTENSION, NAME, LatentProbe, check_reached

__all__ = ["RECORD", "Record", "attention_modules", "check_model", "chosen_among", "probed"]

RECORD = "_levattn_macchiato"  # the attribute of an extended model that remembers what it was


@dataclass
class Record(Changes):
    """What an extension changed in a model."""

    trained: list[Any] = field(default_factory=list)  # parameters of the base that were to be trained

    def undo(self) -> None:
        """Make the model what it was."""
        super().undo()
        for module in self.modules:
            if hasattr(module, EXTENSION):
                delattr(module, EXTENSION)
        for parameter in self.trained:
            parameter.requires_grad_(True)


def check_model(model: Any) -> None:
    """Raise for what is no model, or is changed already."""
    check_pretrained(model)
    if hasattr(model, RECORD):
        raise ValueError("model is extended already; expected a base model. Call remove(model) first")
    if any(hasattr(module, PART) for module in model.modules()):
        raise ValueError(
            "model is pruned; expected a base model. Leave the with block of prune, or call remove(model)"
        )
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
    """Return the attention modules of these layers, or raise if one of them cannot be extended."""
    chosen = [candidates[number] for number in numbers_among("layers", layers, list(candidates))]
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


def probed(model: Any, modules: list[Any], record: Record) -> list[LatentProbe]:
    """Give modules a config of their own with our attention, and return what each hands to it, from one token."""
    probes = {id(module): LatentProbe(None, None) for module in modules}

    def probe(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = probes[id(module)]
        found.hidden = given_to(parameters_of(module)[0], args, kwargs)["hidden_states"]
        return args, {**kwargs, NAME: found}

    hooks = []
    try:
        for module in modules:
            record.give_config(module, NAME)
            hooks.append(module.register_forward_pre_hook(probe, with_kwargs=True))
            hooks.append(module.register_forward_hook(check_reached, with_kwargs=True))
        ids = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
        tried(model, {"input_ids": ids, "use_cache": False})
    finally:
        for hook in hooks:
            hook.remove()
    for module in modules:
        found, types = probes[id(module)], getattr(module.config, "layer_types", None)
        if types and types[module.layer_idx] == "sliding_attention" and found.sliding_window is None:
            raise ValueError(
                f"{type(module).__name__} {module.layer_idx} slides, but does not hand its window to its attention; "
                "expected sliding_window. Leave it out of layers"
            )
    return list(probes.values())
