"""Change a model to use an attention of levattn, and undo the change."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from levattn._core.checks import check_type
from levattn.integrations.transformers.calls import layer_of

PART = "_levattn_pruned"  # the attribute of an attention module that says how it is pruned
EXTENSION = "macchiato"  # the submodule of an attention module that holds the trained parameters


def check_model(model: Any) -> None:
    """Raise if this is not a transformers model, is already changed, or has an unsupported kind of attention."""
    from transformers import PreTrainedModel  # two seconds, which the caller's imports have already spent

    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        raise TypeError(
            f"model is of type {type(model).__name__}, a wrapper; expected the transformers.PreTrainedModel in "
            "it, with its adapters. Give model.get_base_model()"
        )
    check_type("model", model, PreTrainedModel, "a transformers.PreTrainedModel")
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        raise ValueError(f"model is {name}, whose attention has ALiBi biases; expected rotary or absolute positions")
    if getattr(config, "num_kv_shared_layers", None):
        raise ValueError(f"model is {name}, whose layers share keys and values; expected keys of each layer's own")
    if getattr(config, "attention_chunk_size", None):
        raise ValueError(f"model is {name}, whose attention is cut into chunks; expected full or sliding attention")
    for module in model.modules():
        change = "pruned" if hasattr(module, PART) else "extended by macchiato_from"
        if hasattr(module, PART) or hasattr(module, EXTENSION):
            raise ValueError(
                f"model is {name}, and its {layer_of(module)} is {change} already; expected an unchanged model. "
                "Leave the with block of prune, or call remove on the model, first"
            )


@dataclass
class Changes:
    """A record of the changes in a model."""

    part: str  # the attribute that its modules were given
    modules: list[Any] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)  # of these modules, before the change
    implementations: list[tuple[Any, str]] = field(default_factory=list)  # of configs changed in place
    hooks: list[Any] = field(default_factory=list)
    frozen: list[Any] = field(default_factory=list)  # parameters that required gradients

    def give_part(self, module: Any, implementation: str, part: Any) -> None:
        """Let a module call this attention, which reads the part from the module.

        The module gets a copy of its config; modules with the same config share the copy.
        """
        pairs = zip(self.modules, self.configs, strict=True)
        config = next((mine.config for mine, before in pairs if before is module.config), None)
        if config is None:
            config = copy.deepcopy(module.config)
            config._attn_implementation = implementation
        self.modules.append(module)
        self.configs.append(module.config)
        module.config = config
        setattr(module, self.part, part)

    def give_masks(self, implementation: str) -> None:
        """Let the model make masks of this attention for these modules."""
        for config in {id(config): config for config in self.configs}.values():
            self.implementations.append((config, config._attn_implementation))
            config._attn_implementation = implementation

    def undo(self) -> None:
        """Restore the model."""
        for hook in self.hooks:
            hook.remove()
        for module, config in zip(self.modules, self.configs, strict=True):
            module.config = config
            delattr(module, self.part)
        for config, implementation in self.implementations:
            config._attn_implementation = implementation
        for parameter in self.frozen:
            parameter.requires_grad_(True)
