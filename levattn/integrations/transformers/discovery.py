"""Find the layers of a model that use the attention interface of transformers, and the arguments they pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from levattn.integrations.transformers.calls import inputs_device, layer_of, model_inputs, parameters_of
from levattn.integrations.transformers.interface import Interface, Probe

_CROSS = ("encoder_hidden_states", "key_value_states", "cross_attention_states")  # keys of another sequence
_POSITIONS = 3  # of the trial input


@dataclass(frozen=True)
class ModelLayer:
    """An attention module that uses the attention interface."""

    number: int
    name: str
    probe: Probe

    @property
    def module(self) -> Any:
        """The attention module."""
        return self.probe.module

    @property
    def heads(self) -> int:
        """Number of key heads."""
        return int(self.probe.key.shape[1])

    @property
    def handed(self) -> bool:
        """Whether the module passes its keywords on to its attention."""
        return self.probe.call is not None


def discovered(
    interface: Interface, model: Any, layers: Any, example: Mapping[str, Any] | None = None
) -> dict[int, ModelLayer]:
    """Return the layers of a model by their numbers, from a call on a few tokens; the model stays unchanged.

    Raises for a layer that does not use the attention interface, unless `layers` leaves it out.
    """
    inputs = _inputs(model) if example is None else model_inputs("example", example)
    names = {id(module): name for name, module in model.named_modules()}
    trial = interface.tried(model, attention_modules(model), inputs)
    probes = list({id(probe.module): probe for probe in trial.reached}.values())
    crossed = {id(module) for module, given in trial.entered if any(given.get(name) is not None for name in _CROSS)}
    reached = {id(probe.module) for probe in probes}
    past = [module for module, _ in trial.entered if id(module) not in reached and not _holds_another(module)]
    if not probes:
        kind = type(past[0] if past else model).__name__
        raise ValueError(
            f"{type(model).__name__}: no attention function was reached ({kind} does not use the attention interface "
            "of transformers); expected a model whose config chooses its attention. Use another model, or a newer "
            "transformers in which this model uses the interface"
        )
    numbers: list[Any] = [getattr(probe.module, "layer_idx", None) for probe in probes]
    if all(number is None for number in numbers):
        numbers = list(range(len(probes)))
    if None in numbers or len(set(numbers)) < len(numbers):
        kinds = sorted({type(probe.module).__name__ for probe in probes})
        cross = "cross-attention among them, " if crossed else ""
        raise ValueError(
            f"{type(model).__name__} has several stacks of layers ({cross}{', '.join(kinds)}), so a number does not "
            "identify a layer; expected one stack. Use a part of the model, e.g. prune(model.get_encoder(), ...)"
        )
    wanted = None if layers is None else set(layers)
    for module in past:
        if wanted is None or getattr(module, "layer_idx", None) in wanted:
            raise ValueError(
                f"{names[id(module)]} ({layer_of(module)}) does not use the attention interface of transformers; "
                "expected layers that use it. Leave this one out of layers"
            )
    found: dict[int, ModelLayer] = {}
    for number, probe in sorted(zip(numbers, probes, strict=True), key=lambda pair: int(pair[0])):
        module = probe.module
        if id(module) in crossed and (wanted is None or number in wanted):
            raise ValueError(
                f"{names[id(module)]} ({layer_of(module)}) attends from one sequence to another; expected "
                "self-attention. Use the encoder alone, e.g. prune(model.get_encoder(), ...)"
            )
        found[number] = ModelLayer(number, names[id(module)], probe)
    return found


def shared_configs(model: Any, modules: list[Any], some: list[Any] | None = None) -> bool:
    """Tell whether other attention modules of a model read the configs of these modules, or of `some` of them."""
    configs = {id(module.config) for module in (modules if some is None else some)}
    mine = {id(module) for module in modules}
    others = (module for module in attention_modules(model) if id(module) not in mine and not _holds_another(module))
    return any(id(getattr(module, "config", None)) in configs for module in others)


def attention_modules(model: Any) -> list[Any]:
    """Return the attention modules of a model, by the names of their types, without torch's own modules."""
    from transformers import PreTrainedModel

    return [
        module
        for module in model.modules()
        if "Attention" in type(module).__name__
        and not isinstance(module, PreTrainedModel)
        and not type(module).__module__.startswith("torch.")
    ]


def _holds_another(module: Any) -> bool:
    """Tell whether an attention module contains another, which computes the attention."""
    return any("Attention" in type(inner).__name__ for inner in list(module.modules())[1:])


def _inputs(model: Any) -> dict[str, Any]:
    """Return a few tokens or a small image, as the model expects."""
    name, names = model.main_input_name, parameters_of(model)[0]
    device = inputs_device(model)
    if name == "input_ids":
        inputs = {name: torch.zeros((1, _POSITIONS), dtype=torch.int64, device=device)}
        if "attention_mask" in names:
            inputs["attention_mask"] = torch.ones_like(inputs[name])
    elif name == "pixel_values" and isinstance(getattr(model.config, "image_size", None), int):
        size, channels = model.config.image_size, getattr(model.config, "num_channels", 3)
        inputs = {name: torch.zeros((1, channels, size, size), dtype=model.dtype, device=device)}
    else:
        raise ValueError(
            f"{type(model).__name__} is called with {name}, which has no default example; expected a model of tokens "
            f"or images. Give a small example of its inputs, e.g. example={{{name!r}: ...}}"
        )
    return {**inputs, "use_cache": False} if "use_cache" in names else inputs
