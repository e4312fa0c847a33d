"""Prune the attention of a transformers model, until the end of a block or until you remove the pruning."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

import torch

from levattn._core.checks import check_type
from levattn.attention import Selection
from levattn.attention.pruned.selection import as_selection, selection_for_models
from levattn.exceptions import RecallWarning
from levattn.integrations.transformers.calibration import Calibration, with_budgets
from levattn.integrations.transformers.calls import cache_keyword, numbers_among, whole_numbers
from levattn.integrations.transformers.compression.profile import READING, HeadProfile, profile_for, splits_by_length
from levattn.integrations.transformers.discovery import (
    ModelLayer,
    discovered,
    example_for,
    shared_configs,
    whole_layers,
)
from levattn.integrations.transformers.interface import Changes, check_model
from levattn.integrations.transformers.measuring import Sampler, Tally
from levattn.integrations.transformers.pruned import PRUNED, Arrays, Group, LayerPruning
from levattn.integrations.transformers.report import PruneReport
from levattn.nn.levattention import checked_selection

_ALIKE = (
    "all heads of a decoder are pruned alike, in answers too, as the selection has a start: the decoder loses recall, "
    'while the loss of plain text hardly changes. Give heads="auto" if the model has a profile, or '
    "heads=head_profile(model, tokenizer), or name the layers to prune, or let short calls read all keys (start=None)"
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
    >>> report = prune(model, 16, layers=[0, 1])
    """
    PRUNED.register()


def prune(
    model: Any,
    selection: Any,
    *,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | HeadProfile | str | None = None,
    measure: bool | None = None,
    example: Mapping[str, Any] | None = None,
) -> PruneReport:
    """Let layers of a pretrained model attend to a few keys, and to summaries of all the others.

    Each chosen head computes `levattn.attention.pruned_attention` with its own queries, keys (after rotary embedding)
    and values, in place of dense attention. Pruning needs no training. It lasts until ``report.remove()``, or to the
    end of a block: ``with prune(model, 0.25) as report: ...``.

    A decoder reads some positions densely, because pruning pays there neither in time nor in recall. These are the
    first 1536, or twice as many as there are slots, and all of a text that ends within 1024 positions after them. They
    are also calls of at most 256 positions after others: questions, and steps of an answer. A selection with a
    `Selection.start`, also 0, prunes all calls after its first selection. What is read densely takes the model's own
    attention.

    **Guarantee.** Layers and heads that are not named stay dense. Heads whose slots cover all keys, or half of the
    keys of a causal sequence, are dense up to rounding. A sequence has the same output in a padded batch as alone.
    Without a `start`, the longest sequence of a batch decides two things. It tells up to where all keys are read, and
    which heads of a profile stay whole.
    With a `Selection.start`, decoding with a cache gives the same output as one call over the same positions, for
    budgets in numbers of slots. (A share refers to the positions of the first call.) The pruning honors each argument
    that a layer passes to its attention, or refuses it by name.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        An encoder or a decoder that uses the attention interface. It is changed in place.
    selection : Selection, number, mapping or Calibration
        The keys that a query reads, of its sequence. A number is a budget, and 1.0 is dense. A mapping from layers, or
        from pairs (layer, head), to selections or numbers names the heads to prune; the others stay dense. A
        `Calibration` is such a mapping. Scores of your own are a function here, and ``renew_every`` is for decoders.
    layers : iterable of int, optional
        Numbers of the layers to prune, from 0. If None, all layers that the model runs and that do not slide. A layer
        slides if it attends to a window of fewer positions than the model takes. It stays dense, as in `compress`.
    heads : iterable of int, HeadProfile or str, optional
        Numbers of the key heads to prune in each of these layers, together with their query heads; all if None. A
        `HeadProfile` splits the budget, a share, over all heads by their costs. "auto" is the one of this model, as
        in `compress`, and another text the name of one. Some heads stay whole, unless the first call is short (see
        `HeadProfile.shares`) and the selection has no `start`.
    measure : bool, optional
        Whether the report compares a sample of calls with dense attention (None), all calls (True) or none (False).
        In the sample, each layer is measured in one of 64 calls in a row, and some layer in the first. This costs
        about 2 % of the time. The sample leaves out calls of one token, and of fewer tokens than a 64th of the
        positions so far. True costs one or two times as much as the call, or O(n) for a decoding step. A measured
        layer is compared at 64 positions in up to 8 sequences, with all its pruned heads, and is timed.
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
        ignore (biases of positions, bounded logits, sinks). Also if all layers slide, and `layers` names none. The
        model then stays unchanged. An `example` must be a mapping of tensors. Calls raise for packed sequences, more
        positions than the window of a named layer that slides, and dropout of weights. They also raise for a cache
        that is not a `DynamicCache`, or is one of attention that is not causal. Nor may a mask be other than full or
        causal with padding.
    NotImplementedError
        In a call under torch.export, torch.jit.trace or torch.func.vmap, which hide numbers.

    Warns
    -----
    RecallWarning
        If all heads of a decoder get the same budget with a `Selection.start`. Answers are then pruned too, and lose
        recall.
    ProfileWarning
        If `heads` is a profile of other weights.

    Notes
    -----
    A call takes the time of `pruned_attention` for each group of heads with the same selection, instead of O(n²). For
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
    >>> from levattn.attention import Selection
    >>> from levattn.integrations.transformers import prune
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=50, eos_token_id=None)
    >>> model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()
    >>> prompt = torch.arange(40)[None]
    >>> with prune(model, Selection(24, start=0), layers=[1]):
    ...     found = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    >>> found.shape
    torch.Size([1, 45])
    >>> report = prune(model, {(0, 1): 12, (1, 0): 0.5})
    >>> report.remove()
    """
    check_model(model)
    if measure is not None:
        check_type("measure", measure, bool, "True, False or None")
    if isinstance(selection, HeadProfile):
        raise TypeError(
            "selection is a HeadProfile; expected a share, and the profile as heads: prune(model, 0.25, heads=profile)"
        )
    alike, splits = layers is None and heads is None and not isinstance(selection, Mapping), None
    origin = "selection is a calibration that" if isinstance(selection, Calibration) else "selection"
    if isinstance(heads, HeadProfile | str):
        origin = "heads is a profile that"
        profile, heads = profile_for(model, heads, selection, READING), None
        if profile is not None:
            splits = _split_by(profile, selection, layers)
            selection = splits[-1][1]
    layers, heads = whole_numbers("layers", layers), whole_numbers("heads", heads)
    named: Any = layers
    if isinstance(selection, Mapping):
        selection = selection.selections() if isinstance(selection, Calibration) else selection
        named = [key[0] if isinstance(key, tuple | list) and key else key for key in selection]
    else:  # before the trial call, which takes seconds
        selection = _possible(selection)
    register()
    there = discovered(PRUNED, model, named, example)
    chosen = whole_layers(model, there) if named is None else layers
    of_heads = _selections_of(selection, there, chosen, heads, origin)
    for number, head in of_heads:
        checked_selection(of_heads[number, head], causal=there[number].causal)
    parts = _parts_of(there, splits or [(0, of_heads)], measure)
    if alike and any(there[number].causal for number in parts) and selection.start is not None:
        warnings.warn(_ALIKE, RecallWarning, stacklevel=2)
    given = {"selection": _shown(selection), "layers": layers, "heads": heads, "measure": measure}
    report = PruneReport(type(model).__name__, given)
    report._sliding = sorted(set(there).difference(chosen or there)) if named is None else []
    report._tallies.update({n: part.tally for n, part in parts.items()})
    report._changes = _changed(model, there, parts)
    return report


def _possible(selection: Any) -> Selection:
    """Return a selection, or raise if neither causal nor other attention takes it: a trial call tells which it is."""
    found = selection_for_models(selection, "selection")
    try:
        return checked_selection(found, causal=bool(found.renew_every or found.start))
    except ValueError as error:
        try:
            return checked_selection(found, causal=True)
        except ValueError as other:
            if str(other) == str(error):
                raise
            raise ValueError(f"{other} for causal attention, as in decoders. For other models, {error}") from None


def _parts_of(
    there: dict[int, ModelLayer], splits: list[tuple[int, dict[tuple[int, int], Selection]]], measure: bool | None
) -> dict[int, LayerPruning]:
    """Return the pruning of each layer that has heads to prune, by its number.

    splits: selections of heads, each with the least length of a text that has it.
    """
    found = {}
    for number in sorted({number for number, _ in splits[0][1]}):
        groups = tuple((length, _groups_of(number, there[number], of_heads)) for length, of_heads in splits)
        part = LayerPruning(groups, causal=there[number].causal)
        if part.pruned():
            found[number] = part
    sampler = Sampler(found, measure)
    for number, part in found.items():
        part.tally = Tally(number, part.pruned(), sampler)
    return found


def _split_by(profile: Any, selection: Any, layers: Any) -> list[tuple[int, dict[tuple[int, int], Selection]]]:
    """Return the selection of each head, its share of the budget by a profile, with the least length of a text."""
    found = None if isinstance(selection, Mapping) else as_selection(selection)
    if layers is not None or found is None or not isinstance(found.budget, float):
        raise ValueError(
            f"heads is a HeadProfile, selection is {selection!r} and layers is {layers!r}; expected a share of the "
            "keys as budget, and no layers"
        )
    splits = [(length, with_budgets(found, shares)) for length, shares in splits_by_length(profile, found.budget)]
    # with a start, answers are pruned too, and whole heads recall
    return splits if found.start is None else [(0, splits[-1][1])]


def observed(model: Any, inputs: Mapping[str, Any], layers: Any = None) -> dict[int, list[Arrays]]:
    """Return the `Arrays` of each call of layers, by their numbers, in a call of the model, which stays dense.

    layers: if None, all whose window holds the inputs.
    """
    check_model(model)
    register()
    numbers = whole_numbers("layers", layers)
    there = discovered(PRUNED, model, numbers, example_for(model, dict(inputs)))
    if numbers is None:
        tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
        length = 0 if tokens is None else tokens.shape[1]
        numbers = [n for n, layer in there.items() if layer.sliding_window is None or length <= layer.sliding_window]
    parts = {
        n: LayerPruning(((0, _groups_of(n, there[n], {})),), seen=[], causal=there[n].causal)
        for n in numbers_among("layers", numbers or None, list(there))
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


def _selections_of(
    selection: Any, there: dict[int, ModelLayer], layers: Any, heads: Any, origin: str
) -> dict[tuple[int, int], Selection]:
    """Return the selection of each head that is named, by layer and head; origin: of a mapping, for messages."""
    if not isinstance(selection, Mapping):
        return {
            (number, head): selection
            for number in numbers_among("layers", layers, list(there))
            for head in numbers_among("heads", heads, list(range(there[number].heads)))
        }
    if layers is not None or heads is not None:
        raise ValueError("selection names layers, and layers or heads were given; expected one of them")
    if not selection:
        raise ValueError("selection is empty; expected at least one layer")
    found: dict[tuple[int, int], Selection] = {}
    for key, value in selection.items():
        pair = tuple(key) if isinstance(key, tuple | list) else (key,)
        if not 1 <= len(pair) <= 2 or any(isinstance(x, bool) or not isinstance(x, Integral) for x in pair):
            raise TypeError(f"selection has the key {key!r}; expected the number of a layer, or (layer, head)")
        own = as_selection(value, f"selection[{key!r}]")
        number, *which = map(int, pair)
        count = there[number].heads if number in there else 0
        if number not in there or (which and not 0 <= which[0] < count):
            named = f"head {which[0]} of layer {number}" if which else f"layer {number}"
            has = f"{count} heads in this layer" if number in there else f"the layers {list(there)}"
            raise ValueError(f"{origin} names {named}, and the model has {has}; expected heads of this model")
        for head in which or range(count):
            if (number, head) in found:
                raise ValueError(f"selection names head {head} of layer {number} twice; expected it once")
            found[number, head] = own
    return found


def _groups_of(number: int, layer: ModelLayer, of_heads: dict[tuple[int, int], Selection]) -> tuple[Group, ...]:
    """Return the heads of a layer by their selections; those without one, or with all keys, are dense and last."""
    of: dict[Selection, list[int]] = {}
    dense = []
    for head in range(layer.heads):
        own = of_heads.get((number, head))
        if own is None or (isinstance(own.budget, float) and own.budget == 1):
            dense.append(head)
        else:
            of.setdefault(own, []).append(head)
    groups = [Group(tuple(heads), own) for own, heads in of.items()]
    return (*groups, Group(tuple(dense), None)) if dense else tuple(groups)


def _shown(selection: Any) -> Any:
    """Return a selection as numbers and text by name, and a mapping as a list of [layer, (head,) selection]."""
    if isinstance(selection, Mapping):
        pairs = ((key if isinstance(key, tuple | list) else (key,), of) for key, of in selection.items())
        return [[*map(int, key), _shown(of)] for key, of in pairs]
    options = vars(as_selection(selection))
    scores = options["scores"]
    return {**options, "scores": getattr(scores, "__name__", None if scores is None else str(scores))}
