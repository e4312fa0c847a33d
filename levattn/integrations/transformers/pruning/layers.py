"""The layers and heads to prune, their budgets, and checks that a layer can be pruned."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from levattn.integrations.transformers.calls import layer_of, numbers_among, parameters_of, takes_cache
from levattn.integrations.transformers.discovery import ModelLayer, shared_configs
from levattn.integrations.transformers.pruning.heads import Group
from levattn.integrations.transformers.pruning.interface import PRUNED

_READABLE = ("eager", "sdpa", PRUNED.name)  # implementations whose masks tell which keys a query sees


def budgets_of(budget: Any, layers: dict[int, ModelLayer], chosen: Any, heads: Any) -> dict[int, dict[int, Any]]:
    """Return the budget of each pruned head, by the number of its layer; None if there is no budget."""
    if isinstance(budget, Mapping):
        if chosen is not None or heads is not None:
            raise ValueError(
                "budget names layers, and layers or heads were given; expected only one of them. Leave layers and "
                "heads out"
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
        if not 1 <= len(pair) <= 2 or any(isinstance(x, bool) or not isinstance(x, Integral) for x in pair):
            raise TypeError(f"budget has the key {key!r}; expected the number of a layer, or (layer, head)")
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"budget[{key!r}] is {value!r}; expected a number of slots, or a share in (0, 1]")
        (number,) = numbers_among("layers", [int(pair[0])], list(layers))
        heads = list(range(layers[number].heads))
        which = heads if len(pair) == 1 else numbers_among("heads", [int(pair[1])], heads)
        mine = found.setdefault(number, {})
        for head in which:
            if head in mine:
                raise ValueError(f"budget names head {head} of layer {number} twice; expected it once")
            mine[head] = _plain(value)
    if not found:
        raise ValueError("budget is empty; expected at least one layer")
    return found


def _plain(budget: Any) -> Any:
    """Return a number as an int or float of Python; only a share is then a float."""
    if isinstance(budget, bool) or not isinstance(budget, Real):
        return budget
    return int(budget) if isinstance(budget, Integral) else float(budget)


def groups_of(layer: ModelLayer, budgets: dict[int, Any]) -> tuple[Group, ...]:
    """Return the heads of a layer by their budgets; heads without a budget, or with all keys, are dense."""
    of: dict[Any, list[int]] = {}
    for head, budget in sorted(budgets.items()):
        if not (isinstance(budget, float) and budget == 1.0):
            of.setdefault((type(budget), budget), []).append(head)
    pruned = [Group(tuple(heads), budget) for (_, budget), heads in of.items()]
    among = {head for group in pruned for head in group.heads}
    dense = tuple(head for head in range(layer.heads) if head not in among)
    return (*pruned, Group(dense, None, dense=True)) if dense else tuple(pruned)


def check_layer(layer: ModelLayer) -> None:
    """Raise if a layer has a cache but does not pass its keywords on."""
    if takes_cache(parameters_of(layer.module)[0]) and not layer.handed:
        raise ValueError(
            f"{layer.name} ({layer_of(layer.module)}) keeps a cache and does not pass its keywords on to its "
            "attention; expected a module that does. Leave the layer out of layers"
        )


def needs_masks(model: Any, modules: list[Any]) -> bool:
    """Tell whether a model must make other masks, which these modules can read.

    Raises if it must, but other modules read the masks too.
    """
    unread = [module for module in modules if module.config._attn_implementation not in (*_READABLE, None)]
    if not unread:
        return False
    if shared_configs(model, modules, unread):
        raise ValueError(
            f"the attention implementation of the model is {unread[0].config._attn_implementation!r}, whose masks do "
            'not tell which keys a query sees; expected "sdpa" or "eager" for unpruned layers. Load the model with '
            'attn_implementation="sdpa", or prune all layers'
        )
    return True
