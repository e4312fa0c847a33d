"""What is changed in a model for an attention of ours, and how it becomes what it was."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["PART", "Changes", "check_pretrained", "tried"]

PART = "_levattn_pruned"  # the attribute of an attention module that says how it is pruned


def check_pretrained(model: Any) -> None:
    """Raise for what is no model of transformers."""
    from transformers import PreTrainedModel  # two seconds of imports, which who has a model has paid

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is of type {type(model).__name__}; expected a transformers.PreTrainedModel")


@dataclass
class Changes:
    """What was changed in a model."""

    modules: list[Any] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)  # of these modules, before
    implementations: list[tuple[Any, str]] = field(default_factory=list)  # of configs that were changed themselves
    hooks: list[Any] = field(default_factory=list)

    def give_config(self, module: Any, implementation: str) -> None:
        """Give a module a config of its own, with this attention; modules of one config share its copy."""
        pairs = zip(self.modules, self.configs, strict=True)
        config = next((mine.config for mine, before in pairs if before is module.config), None)
        if config is None:
            config = copy.deepcopy(module.config)
            config._attn_implementation = implementation
        self.modules.append(module)
        self.configs.append(module.config)
        module.config = config

    def give_masks(self, implementation: str) -> None:
        """Let the model make the masks of this attention for these modules."""
        for config in {id(config): config for config in self.configs}.values():
            self.implementations.append((config, config._attn_implementation))
            config._attn_implementation = implementation

    def undo(self) -> None:
        """Make the model what it was."""
        for hook in self.hooks:
            hook.remove()
        for module, config in zip(self.modules, self.configs, strict=True):
            module.config = config
        for config, implementation in self.implementations:
            config._attn_implementation = implementation


def tried(model: Any, inputs: dict[str, Any]) -> None:
    """Let a model compute these inputs as it would after training; its modules keep their modes."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad():
            model(**inputs)
    finally:
        for module in training:
            module.training = True
