"""Make transformers call an attention of levattn by its name, with arguments that hooks take from module calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from levattn.integrations.transformers.calls import cache_among, given_to, layer_of, parameters_of, refuse
from levattn.integrations.transformers.changes import Changes


@dataclass
class Call:
    """One call of an attention module, on its way from the hook in front to the attention function."""

    held: Any = None  # the layer of the cache
    hidden: Any = None  # the hidden states, input of the module
    passed: frozenset[str] = frozenset()  # names of the keywords of the module's call
    reached: bool = False


@dataclass
class Trial:
    """The record of a trial call of a model."""

    entered: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)  # modules and their arguments
    reached: list[Probe] = field(default_factory=list)  # in the order of their calls


@dataclass
class Probe:
    """A record of a module's call of its attention, in place of a part during a trial call."""

    module: Any
    trial: Trial
    query: Any = None
    key: Any = None
    causal: bool = True
    sliding_window: int | None = None
    call: Any = None  # None if the module does not pass its keywords to its attention

    def take(self, call: Any, query: Any, key: Any, value: Any, **found: Any) -> tuple[Any, None]:
        """Record the arguments of the attention, and return zeros as its output."""
        self.trial.reached.append(self)
        self.call, self.query, self.key = call, query, key
        for name, what in found.items():
            setattr(self, name, what)
        B, H, T = query.shape[:3]
        return query.new_zeros((B, T, H, value.shape[-1])), None


@dataclass(frozen=True)
class Interface:
    """An attention of levattn, under the name by which transformers calls it."""

    name: str  # without "flash", "sdpa", "flex_attention", "/" and ":", which have a meaning to transformers
    part: str  # the attribute of an attention module that describes its attention
    held_in: Callable[[Any, Any], Any]  # the layer of a cache for a module
    install: Callable[[], None]  # registers it with transformers
    maker: str  # the function that gives models this attention
    attention: str  # its name in messages
    remedy: str  # the advice in messages about arguments that it would ignore

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the attention in the process that loads a pickled model, whose hooks have this object."""
        vars(self).update(state)
        self.install()

    def register(self, attention: Callable[..., Any], masks: Callable[..., Any], name: str | None = None) -> None:
        """Register the attention function and its masks with transformers, by name."""
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(name or self.name, attention)
        AttentionMaskInterface.register(name or self.name, masks)

    def hook(self, module: Any) -> list[Any]:
        """Hook a module, to pass each `Call` to its attention and check that it reaches the attention."""
        before = partial(self._hand_on, parameters_of(module)[0])
        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(self._check_reached, with_kwargs=True),
        ]

    def _hand_on(
        self, names: tuple[str, ...], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = given_to(names, args, kwargs)
        past = cache_among(given)
        held = None if past is None else self.held_in(past, module)
        return args, {**kwargs, self.name: Call(held, given.get("hidden_states"), frozenset(kwargs))}

    def _check_reached(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG002
        if not kwargs[self.name].reached:
            raise RuntimeError(
                f"{layer_of(module)} did not call the attention of {self.maker}; expected the attention "
                f"implementation {self.name!r} in its config, found {module.config._attn_implementation!r}. Do not "
                "change it, or call remove(model)"
            )

    def begin(self, module: Any, dropout: float, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the part of a module, and its `Call` or None; raise for keywords that the attention ignores."""
        part, call, layer = getattr(module, self.part, None), kwargs.pop(self.name, None), layer_of(module)
        if part is None:
            raise ValueError(
                f"the attention implementation {self.name!r} was chosen by hand for {layer}; expected a layer that "
                f"{self.maker} changed. Call {self.maker} on the model, or choose another implementation"
            )
        passed = () if call is None else call.passed
        refuse(layer, dropout, kwargs, passed, attention=self.attention, remedy=self.remedy)
        if call is not None:
            call.reached = True
        return part, call

    def tried(self, model: Any, modules: Iterable[Any], inputs: dict[str, Any]) -> Trial:
        """Call a model on inputs in evaluation mode, and return the record of these modules.

        The model stays unchanged.
        """
        from transformers import PretrainedConfig

        trial, changes = Trial(), Changes(self.part)
        training = [module for module in model.modules() if module.training]
        try:
            for module in modules:
                enter = partial(self._enter, trial)
                changes.hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                if isinstance(getattr(module, "config", None), PretrainedConfig):
                    changes.give_part(module, self.name, Probe(module, trial))
            model.eval()
            with torch.no_grad():
                model(**inputs)
        finally:
            for module in training:
                module.training = True
            changes.undo()
        return trial

    def _enter(self, trial: Trial, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names, others = parameters_of(module)
        given = given_to(names, args, kwargs)
        trial.entered.append((module, given))
        if others and hasattr(module, self.part):
            return args, {**kwargs, self.name: Call(hidden=given.get("hidden_states"), passed=frozenset(kwargs))}
        return args, kwargs
