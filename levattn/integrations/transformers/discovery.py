"""Find the layers of a model that use the attention interface of transformers, by a trial call on a few tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

import torch

from levattn.integrations.transformers.calls import (
    cache_keyword,
    inputs_device,
    layer_of,
    model_inputs,
    parameters_of,
)
from levattn.integrations.transformers.interface import Changes, Interface

_CROSS = ("encoder_hidden_states", "key_value_states", "cross_attention_states")  # keys of another sequence
_POSITIONS = 3  # of the trial input
_ENCODERS_FROM = 5  # the version of transformers from which on its encoders use the interface


@dataclass(eq=False)
class ModelLayer:
    """An attention module, and the arguments of its attention in a trial call, during which this is its part.

    causal: before the trial call, whether attention without a mask can be causal. "eager" hides keys by masks alone.
    """

    module: Any
    name: str
    reached: list[ModelLayer]  # the layers whose attention was called, in this order
    query: Any = None
    heads: int = 0  # of keys
    causal: bool = True
    sliding_window: int | None = None
    call: Any = None
    times: int = 0  # that the attention was called
    handed: bool = False  # whether the module passes its keywords on to its attention

    @property
    def slides(self) -> bool:
        """Whether its window has fewer positions than the model takes."""
        most = getattr(self.module.config, "max_position_embeddings", None)
        return self.sliding_window is not None and (most is None or self.sliding_window < most)

    def take(self, call: Any, query: Any, key: Any, value: Any, **found: Any) -> tuple[Any, None]:
        """Record the arguments of the attention, and return zeros as its output."""
        self.reached.append(self)
        vars(self).update(call=call, handed=call is not None, query=query, heads=int(key.shape[1]), **found)
        self.times += 1
        B, H, T = query.shape[:3]
        return query.new_zeros((B, T, H, value.shape[-1])), None


def discovered(
    interface: Interface, model: Any, layers: Any, example: Mapping[str, Any] | None = None
) -> dict[int, ModelLayer]:
    """Return the layers of a model by their numbers, from a call on a few tokens; the model stays unchanged.

    Raises for a layer that does not use the attention interface, unless `layers` leaves it out.
    """
    names = {id(module): f"{name} ({layer_of(module)})" for name, module in model.named_modules()}
    inputs = _inputs(model) if example is None else model_inputs("example", example)
    found, entered = _tried(interface, model, names, inputs, given=example is not None)
    reached = {id(layer.module) for layer in found}
    past = [module for module, _ in entered if id(module) not in reached and not _holds_another(module)]
    if not found:
        raise _unreached(model, past[0] if past else model, "no")
    crossed = {id(module) for module, given in entered if any(given.get(name) is not None for name in _CROSS)}
    numbers: list[Any] = [getattr(layer.module, "layer_idx", None) for layer in found]
    if all(number is None for number in numbers):
        numbers = list(range(len(found)))
    if None in numbers or len(set(numbers)) < len(numbers):
        kinds = sorted({type(layer.module).__name__ for layer in found})
        cross = "cross-attention among them, " if crossed else ""
        raise ValueError(
            f"{type(model).__name__} has several stacks of layers ({cross}{', '.join(kinds)}), so a number does not "
            "identify a layer; expected one stack. Use a part of the model, e.g. prune(model.get_encoder(), ...)"
        )
    for module in past:
        if layers is None or getattr(module, "layer_idx", None) in layers:
            raise ValueError(
                f"{names[id(module)]} does not use the attention interface of transformers; expected layers that use "
                "it. Leave this one out of layers"
            )
    there = dict(sorted(zip(numbers, found, strict=True), key=lambda pair: int(pair[0])))
    for number, layer in there.items():
        if id(layer.module) in crossed and (layers is None or number in layers):
            raise ValueError(
                f"{layer.name} attends from one sequence to another; expected self-attention. Use the encoder alone, "
                "e.g. prune(model.get_encoder(), ...)"
            )
        shared = layer.times > 1 and cache_keyword(layer.module) is not None  # one cache layer of a module has states
        if shared and (layers is None or number in layers):
            raise ValueError(
                f"{layer.name} calls its attention {layer.times} times for each token, as layers share it or it takes "
                "differences; expected one call. Leave it out of layers, or take another model"
            )
    return there


def whole_layers(model: Any, there: Mapping[int, ModelLayer]) -> list[int]:
    """Return the numbers of the layers that do not slide, or raise if all do."""
    found = [number for number, layer in there.items() if not layer.slides]
    if not found:
        window, numbers = min(layer.sliding_window or 0 for layer in there.values()), list(there)
        named = f"range({len(numbers)})" if numbers == list(range(len(numbers))) else numbers
        raise ValueError(
            f"all layers of {type(model).__name__} slide, over {window} positions, and would stay dense; expected a "
            f"layer that attends to all positions. For texts of at most {window} positions name the layers: "
            f"layers={named}"
        )
    return found


def _tried(
    interface: Interface, model: Any, names: dict[int, str], inputs: dict[str, Any], *, given: bool
) -> tuple[list[ModelLayer], list[tuple[Any, dict[str, Any]]]]:
    """Call a model on inputs in evaluation mode; return layers that use the interface, and all calls of attention.

    The calls are pairs of a module and its arguments by their names. The model stays unchanged. Raises where a model
    looks its attention up elsewhere, and so fails with the name of this one, or where it takes no default inputs.

    given: whether a user gave these inputs as an example.
    """
    from transformers import PretrainedConfig

    changes, modules = Changes(), attention_modules(model)
    reached: list[ModelLayer] = []
    entered: list[tuple[Any, dict[str, Any]]] = []
    layers = [
        ModelLayer(module, names[id(module)], reached, causal=module.config._attn_implementation != "eager")
        for module in modules
        if isinstance(getattr(module, "config", None), PretrainedConfig)
    ]
    try:
        for module in modules:
            interface.hook(module, changes.hooks, entered)
        interface.give_parts(changes, layers, layers)
        _call(model, inputs, changes)
    except Exception as error:
        changes.undo()
        known = {id(layer.module) for layer in reached}
        if _is_own(error):
            raise
        if not _runs(model, inputs):
            if given:  # the model's own error about its inputs
                raise
            raise _without_example(model, inputs, error) from error
        if entered and id(entered[-1][0]) in known:
            raise
        raise _unreached(model, entered[-1][0] if entered else model, "not every" if reached else "no") from error
    finally:
        changes.undo()
    return list({id(layer): layer for layer in reached}.values()), entered


def _is_own(error: Exception) -> bool:
    """Tell whether an error is a refusal by the library."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return isinstance(error, ValueError | NotImplementedError) and frames[-1].f_globals["__name__"].startswith(
        f"{__package__}."
    )


def _call(model: Any, inputs: dict[str, Any], changes: Changes) -> None:
    """Call a model in evaluation mode, which is one of the changes."""
    for module in model.modules():
        if module.training:
            changes.give(module, "training", False)
    with torch.no_grad():
        model(**inputs)


def _runs(model: Any, inputs: dict[str, Any]) -> bool:
    """Tell whether a model takes inputs with its own attention."""
    changes = Changes()
    try:
        _call(model, inputs, changes)
    except Exception:
        return False
    finally:
        changes.undo()
    return True


def example_for(model: Any, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """Return inputs as the example of trial calls if a model does not take its default one, else None."""
    try:
        default = _inputs(model)
    except ValueError:
        return inputs
    return None if _runs(model, default) else inputs


def _without_example(model: Any, inputs: dict[str, Any], error: Exception) -> ValueError:
    """Return the refusal of a model that fails by itself with the default inputs of the trial call."""
    name = type(model).__name__
    return ValueError(
        f"{name} fails with the default example, {', '.join(inputs)} ({type(error).__name__}: {error}); expected a "
        "model that takes tokens or an image alone. Give a small example of its inputs, e.g. "
        f"example={{{model.main_input_name!r}: ...}}"
    )


def _unreached(model: Any, module: Any, how_many: str) -> ValueError:
    """Return the refusal of a model with this attention module, which does not use the interface."""
    from transformers import __version__ as version

    older = int(version.partition(".")[0]) < _ENCODERS_FROM
    return ValueError(
        f"{type(model).__name__}: {how_many} attention function was reached ({type(module).__name__} does not use "
        f"the attention interface of transformers {version}); expected a model that uses it. Take another model, or a "
        "newer transformers" + (f": BERT, RoBERTa and DistilBERT use it from {_ENCODERS_FROM}.0 on" if older else "")
    )


def shared_configs(model: Any, layers: list[ModelLayer]) -> bool:
    """Tell whether other attention modules of a model read the configs of these layers."""
    configs = {id(layer.module.config) for layer in layers}
    mine = {id(layer.module) for layer in layers}
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
