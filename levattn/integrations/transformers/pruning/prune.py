"""Prune the attention of a transformers model, until the end of a block or until you remove the pruning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from numbers import Integral
from typing import Any

import numpy as np

from levattn.exceptions import RecallWarning
from levattn.integrations.transformers.calibration import Calibration
from levattn.integrations.transformers.calls import numbers_among, whole_numbers
from levattn.integrations.transformers.changes import PART, Changes, check_model
from levattn.integrations.transformers.compression.profile import HeadProfile
from levattn.integrations.transformers.discovery import ModelLayer, discovered
from levattn.integrations.transformers.pruning.heads import Arrays, SharedOptions
from levattn.integrations.transformers.pruning.interface import PRUNED, LayerPruning, register
from levattn.integrations.transformers.pruning.layers import (
    budgets_of,
    check_layer,
    groups_of,
    needs_masks,
)
from levattn.integrations.transformers.pruning.report import PruneReport
from levattn.integrations.transformers.pruning.sample import Tally
from levattn.nn.levattention import check_selection

_ALIKE = (
    "all heads of a decoder are pruned alike: the decoder loses recall, while the loss of plain text hardly "
    "changes. Give heads=head_profile(model, tokenizer), or name the layers to prune"
)
_prunings = count()  # each state in a cache belongs to a pruning


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
    budget, heads = _split(budget, heads, layers)
    options: dict[str, Any] = {
        "size": size,
        "epsilon": epsilon,
        "summaries": summaries,
        "window": window,
        "sinks": sinks,
        "scores": scores,
        "center": center,
        "chunk": chunk,
    }
    if isinstance(budget, Calibration):
        options = _calibrated(budget, options)
    rule = SharedOptions(**options)
    layers, heads = whole_numbers("layers", layers), whole_numbers("heads", heads)
    named = _named_layers(budget) if isinstance(budget, Mapping) else layers
    if named is layers:  # before the trial call, which takes seconds
        _check_option(rule, budget, causal=chunk is not None)
    register()
    there = discovered(PRUNED, model, named, example)
    budgets = budgets_of(budget, there, layers, heads)
    chosen = {number: groups_of(there[number], mine) for number, mine in budgets.items()}
    chosen = {number: groups for number, groups in sorted(chosen.items()) if not all(g.dense for g in groups)}
    _check_options(rule, budgets, there)
    if alike and budget != 1 and any(there[number].probe.causal for number in chosen):
        warnings.warn(_ALIKE, RecallWarning, stacklevel=2)
    given = {"budget": budget, "layers": layers, "heads": heads, **options}
    report = PruneReport(type(model).__name__, {name: _shown(value) for name, value in given.items()})
    pruning, parts = next(_prunings), []
    for number, groups in chosen.items():
        tally = Tally(there[number].heads)
        parts.append(LayerPruning(number, pruning, groups, rule, tally, measure))
        report._watch(number, tally, sorted(head for group in groups if not group.dense for head in group.heads))
    report._take(model, _changed(model, there, parts))
    return report


def _split(budget: Any, heads: Any, layers: Any) -> tuple[Any, Any]:
    """Return budget and heads, or raise; a head profile splits the budget over all heads."""
    if isinstance(budget, HeadProfile):
        raise TypeError(
            "budget is a HeadProfile; expected a share of the keys, and the profile as heads: prune(model, 0.25, "
            "heads=profile)"
        )
    if not isinstance(heads, HeadProfile):
        return budget, heads
    if layers is not None or not isinstance(budget, float | int):
        raise ValueError(
            f"heads is a HeadProfile, budget is {budget!r} and layers is {layers!r}; expected a share of the keys as "
            "budget, and no layers"
        )
    return heads.shares(budget), None


def _calibrated(calibration: Calibration, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a calibration was made with, or raise if others were given."""
    defaults = vars(SharedOptions())
    given = [name for name, value in options.items() if value != defaults[name]]
    if given:
        raise ValueError(
            f"budget is a Calibration, and {', '.join(given)} were given; expected none of them, as the calibration "
            "has its own options"
        )
    unknown = sorted(set(calibration.options) - set(options))
    if unknown:
        raise ValueError(
            f"budget is a Calibration with the options {', '.join(unknown)}; expected options of prune alone"
        )
    return {**options, **calibration.options}


@contextmanager
def observed(model: Any, look: Callable[[int, Arrays], None], layers: Any = None) -> Iterator[None]:
    """Call `look` with the number and the `Arrays` of each layer, at each call, while layers stay dense."""
    check_model(model)
    register()
    numbers = whole_numbers("layers", layers)
    there = discovered(PRUNED, model, numbers)
    pruning, parts = next(_prunings), []
    for number in numbers_among("layers", numbers, list(there)):
        groups = groups_of(there[number], {})
        parts.append(LayerPruning(number, pruning, groups, SharedOptions(), Tally(there[number].heads), look=look))
    changes = _changed(model, there, parts)
    try:
        yield
    finally:
        changes.undo()


def _changed(model: Any, layers: dict[int, ModelLayer], parts: list[LayerPruning]) -> Changes:
    """Give layers of a model their parts, and return the changes, to undo them; a refused model stays unchanged."""
    chosen = [layers[part.number] for part in parts]
    modules = [layer.module for layer in chosen]
    masks = PRUNED.name if needs_masks(model, modules) else None
    for layer in chosen:
        check_layer(layer)
    changes = Changes(PART)
    for layer, part in zip(chosen, parts, strict=True):
        changes.give_part(layer.module, PRUNED.name, part)
        if layer.handed:
            changes.hooks += PRUNED.hook(layer.module)
    if masks is not None:
        changes.give_masks(masks)
    return changes


def _check_options(rule: SharedOptions, budgets: dict[int, dict[int, Any]], there: dict[int, ModelLayer]) -> None:
    """Raise for options that a call would refuse."""
    used = {(value, there[number].probe.causal) for number, mine in budgets.items() for value in mine.values()}
    for budget, causal in used:
        _check_option(rule, budget, causal=causal)


def _check_option(rule: SharedOptions, budget: Any, *, causal: bool) -> None:
    check_selection(rule.options(rule.slots(budget, 1 << 20, causal=causal)), causal=causal)
    if isinstance(budget, Integral) and budget == 1:
        raise ValueError(f"budget is {budget!r}, one slot a query; expected at least 2 slots, or the share 1.0")


def _named_layers(budget: Mapping[Any, Any]) -> list[Any]:
    return [key[0] if isinstance(key, tuple | list) and key else key for key in budget]


def _shown(value: Any) -> Any:
    """Return an option as numbers, strings and lists, and a mapping as a list of [layer, (head,) budget]."""
    if isinstance(value, Mapping):
        return [
            [*_shown(list(key) if isinstance(key, tuple | list) else [key]), _shown(of)] for key, of in value.items()
        ]
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value
