"""Prune the attention of a transformers model, until the end of a block or until you remove the pruning."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from levattn.exceptions import RecallWarning
from levattn.integrations.transformers.calibration import Calibration
from levattn.integrations.transformers.calls import cache_keyword, numbers_among, whole_numbers
from levattn.integrations.transformers.compression.profile import HeadProfile
from levattn.integrations.transformers.discovery import ModelLayer, discovered, shared_configs
from levattn.integrations.transformers.interface import Changes, check_model
from levattn.integrations.transformers.pruned import PRUNED, Arrays, Group, LayerPruning, SharedOptions
from levattn.integrations.transformers.report import PruneReport, Tally
from levattn.nn.levattention import check_selection

_ALIKE = (
    "all heads of a decoder are pruned alike: the decoder loses recall, while the loss of plain text hardly "
    "changes. Give heads=head_profile(model, tokenizer), or name the layers to prune"
)
_READABLE = ("eager", "sdpa", PRUNED.name, None)  # implementations whose masks tell which keys a query sees


def register() -> None:
    """Register the attention "levattn" with transformers, with the masks of "sdpa".

    `prune` calls this function itself. Call it before you load a model with ``attn_implementation="levattn"``, to
    prune it later. An unpruned layer with this attention raises in a call.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from levattn.integrations.transformers import prune, register
    >>> register()
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=50)
    >>> model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, attn_implementation="levattn", **sizes))
    >>> report = prune(model, budget=16, layers=[0, 1])
    """
    PRUNED.register()


def prune(
    model: Any,
    budget: float | Mapping[Any, float] | None = None,
    *,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | HeadProfile | None = None,
    size: int | None = None,
    epsilon: float | None = None,
    summaries: int | None = None,
    window: int | None = None,
    sinks: int | None = None,
    scores: str = "residual",
    center: bool | None = None,
    chunk: int | None = None,
    measure: bool | None = None,
    example: Mapping[str, Any] | None = None,
) -> PruneReport:
    """Let layers of a pretrained model attend to a few keys, and to summaries of all the others.

    Each chosen head computes `levattn.attention.pruned_attention` with its own queries, keys (after rotary embedding)
    and values, in place of dense attention. Pruning needs no training. It lasts until ``report.remove()``, or to the
    end of a block: ``with prune(model, budget=0.25) as report: ...``.

    **Guarantee.** Layers and heads that are not named stay dense. Heads whose slots cover all keys are dense up to
    rounding. A sequence has the same output in a padded batch as alone. Decoding with a cache gives the same output as
    one call over the same positions, for budgets in numbers of slots. (A share refers to the positions of the first
    call.) The pruning honors each argument that a layer passes to its attention, or refuses it by name.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        An encoder or a decoder that uses the attention interface. It is changed in place.
    budget : int, float in (0, 1], mapping or Calibration, optional
        Slots of each query: their number, at least 2, or a share of the keys of its sequence, as for
        `pruned_attention`; 1.0 is dense. A mapping from layers, or from pairs (layer, head), to budgets names the
        heads to prune; the others stay dense. A `Calibration` is such a mapping, and brings its own options, so leave
        them out. Give exactly one argument of budget, size and epsilon.
    layers : iterable of int, optional
        Numbers of the layers to prune, from 0; all layers that the model runs if None.
    heads : iterable of int or HeadProfile, optional
        Numbers of the key heads to prune in each of these layers, together with their query heads; all if None. A
        `HeadProfile` splits `budget`, a share, over all heads by their costs.
    size, epsilon, summaries, window, sinks, scores, center, chunk : optional
        As for `pruned_attention`, except that `scores` is a name here, and `chunk` is for decoders alone.
    measure : bool, optional
        Whether the report compares some queries of each call (at most 64) with dense attention, and measures the time.
        This costs about as much again as the call, or O(n) for a decoding step. None measures calls of more than one
        token, and so no decoding steps. With False, the report only counts calls.
    example : mapping of str to array, optional
        Inputs for a trial call of the model; by default three tokens, or an image of zeros.

    Returns
    -------
    PruneReport
        The measurements, and the way to remove the pruning.

    Raises
    ------
    TypeError, ValueError
        If an option is out of range, the model is already pruned or extended, or a chosen layer cannot be pruned. It
        cannot if it does not use the attention interface, has cross-attention, or passes arguments that pruning would
        ignore (biases of positions, bounded logits, sinks). The model then stays unchanged. An `example` must be
        a mapping of tensors. Calls raise for packed sequences, more positions than a sliding window, and dropout of
        weights. They also raise for a cache that is not a `DynamicCache`, or a mask that is neither full nor causal
        with padding.

    Warns
    -----
    RecallWarning
        If all heads of a decoder get the same budget, because the decoder then loses recall.

    Notes
    -----
    A call takes the time of `pruned_attention` for each group of heads with the same budget, instead of O(n²). For
    shares, each length of sequences makes its own group. A cache keeps all keys and values, which dense heads and the
    model without pruning read, and also the bounded states of pruned heads. `compress` with `renew_every` takes less
    memory. States cannot
    forget positions, so assisted generation is refused. Weights (``output_attentions=True``) are the weights of the
    mixture, where each summary spreads its weight over its members; they take O(n²) time and memory. Gradients flow as
    through `pruned_attention`.

    A copy of a pruned model is pruned too, and `remove` restores it. Saved weights are the model's own.

    References
    ----------
    Kannan, Bhattacharyya, Kacham and Woodruff, "LevAttention", arXiv:2410.05462, for selecting keys by leverage.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from levattn.integrations.transformers import prune
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=50, eos_token_id=None)
    >>> model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()
    >>> prompt = torch.arange(40)[None]
    >>> with prune(model, budget=24, layers=[1]):
    ...     found = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    >>> found.shape
    torch.Size([1, 45])
    >>> report = prune(model, {(0, 1): 12, (1, 0): 0.5})
    >>> report.remove()
    """
    check_model(model)
    alike = layers is None and heads is None and not isinstance(budget, Mapping)
    rule = SharedOptions(size, epsilon, summaries, window, sinks, scores, center, chunk)
    budget, heads, rule = _chosen(budget, heads, layers, rule)
    layers, heads = whole_numbers("layers", layers), whole_numbers("heads", heads)
    named: Any = layers
    if isinstance(budget, Mapping):
        named = [key[0] if isinstance(key, tuple | list) and key else key for key in budget]
    else:  # before the trial call, which takes seconds
        _check_option(rule, budget, causal=chunk is not None)
    register()
    there = discovered(PRUNED, model, named, example)
    budgets = _budgets_of(budget, there, layers, heads)
    for value, causal in {(value, there[number].causal) for (number, _), value in budgets.items()}:
        _check_option(rule, value, causal=causal)
    chosen = {number: _groups_of(number, there[number], budgets) for number in sorted({n for n, _ in budgets})}
    chosen = {number: groups for number, groups in chosen.items() if not groups[0].dense}
    if alike and budget != 1 and any(there[number].causal for number in chosen):
        warnings.warn(_ALIKE, RecallWarning, stacklevel=2)
    given = {"budget": budget, "layers": layers, "heads": heads, **vars(rule)}
    report = PruneReport(type(model).__name__, {name: _shown(value) for name, value in given.items()})
    parts = {n: LayerPruning(groups, rule, Tally(there[n].heads), measure) for n, groups in chosen.items()}
    for number, part in parts.items():
        pruned = sorted(head for group in part.groups if not group.dense for head in group.heads)
        report._tallies[number] = part.tally, pruned
    report._changes = _changed(model, there, parts)
    return report


def _chosen(budget: Any, heads: Any, layers: Any, rule: SharedOptions) -> tuple[Any, Any, SharedOptions]:
    """Return budget, heads and options, or raise; a profile splits the budget, a calibration has its own options."""
    if isinstance(budget, HeadProfile):
        raise TypeError(
            "budget is a HeadProfile; expected a share, and the profile as heads: prune(model, 0.25, heads=profile)"
        )
    if isinstance(heads, HeadProfile):
        if layers is not None or not isinstance(budget, float | int):
            raise ValueError(
                f"heads is a HeadProfile, budget is {budget!r} and layers is {layers!r}; expected a share of the keys "
                "as budget, and no layers"
            )
        budget, heads = heads.shares(budget), None
    if isinstance(budget, Calibration):
        given = [name for name, value in vars(rule).items() if value != getattr(SharedOptions, name)]
        if given:
            raise ValueError(
                f"budget is a Calibration, and {', '.join(given)} were given; expected none, as it has its own options"
            )
        unknown = sorted(set(budget.options) - set(vars(rule)))
        if unknown:
            raise ValueError(
                f"budget is a Calibration with the options {', '.join(unknown)}; expected options of prune"
            )
        rule = replace(rule, **budget.options)
    return budget, heads, rule


def observed(model: Any, inputs: Mapping[str, Any], layers: Any = None) -> dict[int, list[Arrays]]:
    """Return the `Arrays` of each call of layers, by their numbers, in a call of the model, which stays dense."""
    check_model(model)
    register()
    numbers = whole_numbers("layers", layers)
    there = discovered(PRUNED, model, numbers)
    parts = {
        n: LayerPruning(_groups_of(n, there[n], {}), SharedOptions(), Tally(there[n].heads), seen=[])
        for n in numbers_among("layers", numbers, list(there))
    }
    changes = _changed(model, there, parts)
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        changes.undo()
    return {number: part.seen or [] for number, part in parts.items()}


def _changed(model: Any, there: dict[int, ModelLayer], parts: dict[int, LayerPruning]) -> Changes:
    """Give layers of a model their parts, and return the changes, to undo them; a refused model stays unchanged."""
    layers = [there[number] for number in parts]
    implementations = {layer.module.config._attn_implementation for layer in layers}
    unread = sorted(implementations.difference(_READABLE))  # then the model must make other masks
    if unread and shared_configs(model, layers):
        raise ValueError(
            f"the attention implementation of the model is {unread[0]!r}, whose masks do not tell which keys a query "
            'sees; expected "sdpa" or "eager" for unpruned layers. Load the model with attn_implementation="sdpa", or '
            "prune all layers"
        )
    for layer in layers:
        if cache_keyword(layer.module) is not None and not layer.handed:
            raise ValueError(
                f"{layer.name} keeps a cache and does not pass its keywords on to its attention; expected a module "
                "that does. Leave the layer out of layers"
            )
    return PRUNED.change(model, layers, parts.values(), masks=bool(unread))


def _budgets_of(budget: Any, there: dict[int, ModelLayer], layers: Any, heads: Any) -> dict[tuple[int, int], Any]:
    """Return the budget of each head that is named, by layer and head; None if there is no budget."""
    if not isinstance(budget, Mapping):
        return {
            (number, head): _plain(budget)
            for number in numbers_among("layers", layers, list(there))
            for head in numbers_among("heads", heads, list(range(there[number].heads)))
        }
    if layers is not None or heads is not None:
        raise ValueError("budget names layers, and layers or heads were given; expected one of them")
    if not budget:
        raise ValueError("budget is empty; expected at least one layer")
    found: dict[tuple[int, int], Any] = {}
    for key, value in budget.items():
        pair = tuple(key) if isinstance(key, tuple | list) else (key,)
        if not 1 <= len(pair) <= 2 or any(isinstance(x, bool) or not isinstance(x, Integral) for x in pair):
            raise TypeError(f"budget has the key {key!r}; expected the number of a layer, or (layer, head)")
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"budget[{key!r}] is {value!r}; expected a number of slots, or a share in (0, 1]")
        (number,) = numbers_among("layers", [int(pair[0])], list(there))
        which = None if len(pair) == 1 else [int(pair[1])]
        for head in numbers_among("heads", which, list(range(there[number].heads))):
            if (number, head) in found:
                raise ValueError(f"budget names head {head} of layer {number} twice; expected it once")
            found[number, head] = _plain(value)
    return found


def _plain(budget: Any) -> Any:
    """Return a number as an int or float of Python; only a share is then a float."""
    if isinstance(budget, bool) or not isinstance(budget, Real):
        return budget
    return int(budget) if isinstance(budget, Integral) else float(budget)


def _groups_of(number: int, layer: ModelLayer, budgets: dict[tuple[int, int], Any]) -> tuple[Group, ...]:
    """Return the heads of a layer by their budgets; those without a budget, or with all keys, are dense and last."""
    of: dict[Any, list[int]] = {}
    dense = []
    for head in range(layer.heads):
        budget = budgets.get((number, head), 1.0)
        if isinstance(budget, float) and budget == 1.0:
            dense.append(head)
        else:
            of.setdefault((type(budget), budget), []).append(head)
    groups = [Group(tuple(heads), budget) for (_, budget), heads in of.items()]
    return (*groups, Group(tuple(dense), None, dense=True)) if dense else tuple(groups)


def _check_option(rule: SharedOptions, budget: Any, *, causal: bool) -> None:
    check_selection(rule.of_call(budget, 1 << 20, causal=causal), causal=causal)
    if isinstance(budget, Integral) and budget == 1:
        raise ValueError(f"budget is {budget!r}, one slot a query; expected at least 2 slots, or the share 1.0")


def _shown(value: Any) -> Any:
    """Return an option as numbers, strings and lists, and a mapping as a list of [layer, (head,) budget]."""
    if isinstance(value, Mapping):
        return [_shown([*(key if isinstance(key, tuple | list) else (key,)), of]) for key, of in value.items()]
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value
