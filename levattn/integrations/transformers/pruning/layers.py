"""Which layers and heads of a model are pruned, and with what budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch

from levattn.integrations.transformers.calls import layer_of, numbers_among, parameters_of, takes_cache
from levattn.integrations.transformers.changes import PART, check_model
from levattn.integrations.transformers.latents.interface import LATENTS
from levattn.integrations.transformers.pruning.heads import Group
from levattn.integrations.transformers.pruning.interface import PRUNED

__all__ = [
    "ModelLayer",
    "budgets_of",
    "check_layer",
    "check_prunable",
    "discovered",
    "groups_of",
    "needs_masks",
    "shared_configs",
]

_CROSS = ("encoder_hidden_states", "key_value_states", "cross_attention_states")  # keys of another sequence
_READABLE = ("eager", "sdpa", PRUNED.name)  # implementations whose masks tell which keys a query sees
_POSITIONS = 3  # of what a model is tried with


@dataclass(frozen=True)
class ModelLayer:
    """An attention module that goes through the attention interface."""

    number: int
    name: str
    module: Any
    heads: int  # of the keys
    causal: bool
    handed: bool  # whether its keywords reach its attention


def check_prunable(model: Any) -> None:
    """Raise for what is no model, or is changed already."""
    check_model(model)
    name = type(model).__name__
    for module in model.modules():
        if hasattr(module, PART):
            raise ValueError(
                f"model is {name}, and {layer_of(module)} of it is pruned already; expected a model without pruning. "
                "Leave the with block, or call remove on it, first"
            )
        if getattr(getattr(module, "config", None), "_attn_implementation", None) == LATENTS.name:
            raise ValueError(
                f"model is {name}, and was extended by macchiato_from; expected one that was not. Call remove(model)"
            )


def discovered(model: Any, example: Mapping[str, Any] | None, layers: Any) -> dict[int, ModelLayer]:
    """Return the layers of a model by their numbers, from a call on a few tokens; the model stays as it is.

    Those that go past the attention interface raise, unless `layers` leaves them out.
    """
    names = {id(module): name for name, module in model.named_modules()}
    trial = PRUNED.tried(model, _attending(model), _inputs(model) if example is None else dict(example))
    probes = list({id(probe.module): probe for probe in trial.reached}.values())
    crossed = {id(module) for module, given in trial.entered if any(given.get(name) is not None for name in _CROSS)}
    reached = {id(probe.module) for probe in probes}
    past = [module for module, _ in trial.entered if id(module) not in reached and not _holds_another(module)]
    if not probes:
        kind = type(past[0] if past else model).__name__
        raise ValueError(
            f"{type(model).__name__}: no attention function was reached ({kind} does not go through the attention "
            "interface of transformers); expected a model whose attention can be chosen by its config. Take a newer "
            "version of transformers, in which this model does, or another model"
        )
    numbers: list[Any] = [getattr(probe.module, "layer_idx", None) for probe in probes]
    if all(number is None for number in numbers):
        numbers = list(range(len(probes)))
    if None in numbers or len(set(numbers)) < len(numbers):
        kinds = sorted({type(probe.module).__name__ for probe in probes})
        cross = "cross-attention among them, " if crossed else ""
        raise ValueError(
            f"{type(model).__name__} has several stacks of layers ({cross}{', '.join(kinds)}), so that a number does "
            "not tell a layer; expected one stack. Prune a part of the model, e.g. prune(model.get_encoder(), ...)"
        )
    wanted = None if layers is None else set(layers)
    for module in past:
        if wanted is None or getattr(module, "layer_idx", None) in wanted:
            raise ValueError(
                f"{names[id(module)]} ({layer_of(module)}) does not go through the attention interface of "
                "transformers; expected layers that do. Name those in layers"
            )
    found: dict[int, ModelLayer] = {}
    for number, probe in sorted(zip(numbers, probes, strict=True), key=lambda pair: int(pair[0])):
        module = probe.module
        if id(module) in crossed and (wanted is None or number in wanted):
            raise ValueError(
                f"{names[id(module)]} ({layer_of(module)}) attends from one sequence to another; expected "
                "self-attention. Prune the encoder alone, e.g. prune(model.get_encoder(), ...)"
            )
        handed = probe.call is not None
        found[number] = ModelLayer(number, names[id(module)], module, probe.key.shape[1], probe.causal, handed)
    return found


def _attending(model: Any) -> list[Any]:
    """Return the attention modules of a model, by the names of their types; torch's own are not transformers'."""
    from transformers import PreTrainedModel

    return [
        module
        for module in model.modules()
        if "Attention" in type(module).__name__
        and not isinstance(module, PreTrainedModel)
        and not type(module).__module__.startswith("torch.")
    ]


def _holds_another(module: Any) -> bool:
    """Tell whether an attention module holds another, which attends for it."""
    return any("Attention" in type(inner).__name__ for inner in list(module.modules())[1:])


def _inputs(model: Any) -> dict[str, Any]:
    """Return a few tokens, or a small image, as a model takes them."""
    name, names = model.main_input_name, parameters_of(model)[0]
    if name == "input_ids":
        inputs = {name: torch.zeros((1, _POSITIONS), dtype=torch.int64, device=model.device)}
        if "attention_mask" in names:
            inputs["attention_mask"] = torch.ones_like(inputs[name])
    elif name == "pixel_values" and isinstance(getattr(model.config, "image_size", None), int):
        size, channels = model.config.image_size, getattr(model.config, "num_channels", 3)
        inputs = {name: torch.zeros((1, channels, size, size), dtype=model.dtype, device=model.device)}
    else:
        raise ValueError(
            f"{type(model).__name__} is called with {name}, which is not made up here; expected a model of tokens or "
            f"images. Give a small example of its inputs, e.g. example={{{name!r}: ...}}"
        )
    return {**inputs, "use_cache": False} if "use_cache" in names else inputs


def budgets_of(budget: Any, layers: dict[int, ModelLayer], chosen: Any, heads: Any) -> dict[int, dict[int, Any]]:
    """Return the budget of each head that is pruned, by the number of its layer: None where there is none."""
    if isinstance(budget, Mapping):
        if chosen is not None or heads is not None:
            raise ValueError(
                "budget names layers, and layers or heads were given; expected one of the two. Leave them out"
            )
        return _named(budget, layers)
    numbers = numbers_among("layers", chosen, list(layers))
    found: dict[int, dict[int, Any]] = {}
    for number in numbers:
        which = numbers_among("heads", heads, list(range(layers[number].heads)))
        found[number] = dict.fromkeys(which, _plain(budget))
    return found


def _named(budget: Mapping[Any, Any], layers: dict[int, ModelLayer]) -> dict[int, dict[int, Any]]:
    """Return the budgets of a mapping from layers, or from pairs of a layer and a head."""
    found: dict[int, dict[int, Any]] = {}
    for key, value in budget.items():
        pair = tuple(key) if isinstance(key, tuple | list) else (key,)
        if len(pair) > 2 or any(isinstance(x, bool) or not isinstance(x, Integral) for x in pair):
            raise TypeError(f"budget has the key {key!r}; expected the number of a layer, or (layer, head)")
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"budget[{key!r}] is {value!r}; expected a number of slots, or a share in (0, 1]")
        (number,) = numbers_among("layers", pair[:1], list(layers))
        heads = list(range(layers[number].heads))
        which = heads if len(pair) == 1 else numbers_among("heads", pair[1:], heads)
        mine = found.setdefault(number, {})
        for head in which:
            if head in mine:
                raise ValueError(f"budget names head {head} of layer {number} twice; expected it once")
            mine[head] = _plain(value)
    if not found:
        raise ValueError("budget is empty; expected at least one layer")
    return found


def _plain(budget: Any) -> Any:
    """Return a number as one of Python's; a share is then a float, and nothing else is."""
    if isinstance(budget, bool) or not isinstance(budget, Real):
        return budget
    return int(budget) if isinstance(budget, Integral) else float(budget)


def groups_of(layer: ModelLayer, budgets: dict[int, Any]) -> tuple[Group, ...]:
    """Return the heads of a layer by their budgets; those without, or with all keys as theirs, are dense."""
    of: dict[Any, list[int]] = {}
    for head, budget in sorted(budgets.items()):
        if not (isinstance(budget, float) and budget == 1.0):
            of.setdefault((type(budget), budget), []).append(head)
    pruned = [Group(tuple(heads), budget) for (_, budget), heads in of.items()]
    among = {head for group in pruned for head in group.heads}
    dense = tuple(head for head in range(layer.heads) if head not in among)
    return (*pruned, Group(dense, None, dense=True)) if dense else tuple(pruned)


def check_layer(layer: ModelLayer) -> None:
    """Raise if a layer has a cache that could not be followed."""
    if takes_cache(parameters_of(layer.module)[0]) and not layer.handed:
        raise ValueError(
            f"{layer.name} ({layer_of(layer.module)}) keeps a cache and hands none of its further keywords to its "
            "attention; expected a module that does. Leave the layer out of layers"
        )


def needs_masks(model: Any, modules: list[Any]) -> bool:
    """Tell whether a model has to make other masks than it does, for these modules to read them.

    Raises where it has to, and other modules read them too.
    """
    unread = [module for module in modules if module.config._attn_implementation not in (*_READABLE, None)]
    if not unread:
        return False
    if shared_configs(model, modules, unread):
        raise ValueError(
            f"the attention implementation of the model is {unread[0].config._attn_implementation!r}, whose masks do "
            'not tell which keys a query sees; expected "sdpa" or "eager" where some layers are not pruned. Load '
            'the model with attn_implementation="sdpa", or prune all layers'
        )
    return True


def shared_configs(model: Any, modules: list[Any], some: list[Any] | None = None) -> bool:
    """Tell whether other attention modules of a model read the configs of these, or of some of them."""
    configs = {id(module.config) for module in (modules if some is None else some)}
    mine = {id(module) for module in modules}
    others = (module for module in model.modules() if "Attention" in type(module).__name__ and id(module) not in mine)
    return any(id(getattr(module, "config", None)) in configs for module in others)
