"""The attention function of pruned layers that transformers calls, and the hooks that bring it the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from levattn.integrations.transformers.calls import layer_of
from levattn.integrations.transformers.changes import PART
from levattn.integrations.transformers.interface import Interface, Probe
from levattn.integrations.transformers.masks import padding_and_kind
from levattn.integrations.transformers.pruning.cache import Progress, pruned_layer_for
from levattn.integrations.transformers.pruning.heads import (
    Arrays,
    Group,
    SharedOptions,
    concatenated,
    outputs,
    weights,
)
from levattn.integrations.transformers.pruning.sample import Tally, sampled


@dataclass
class LayerPruning:
    """The pruning of an attention module."""

    number: int  # of the layer
    pruning: int  # the number of the call of `prune`
    groups: tuple[Group, ...]
    rule: SharedOptions
    tally: Tally
    measure: bool | None = False  # None: calls of more than one token
    look: Callable[[int, Arrays], None] | None = None  # a callback for the arrays of each call

    def measures(self, rows: int) -> bool:
        """Tell whether a call of so many queries is measured."""
        return rows > 1 if self.measure is None else self.measure


def _held_in(cache: Any, module: Any) -> Any:
    return pruned_layer_for(cache, module.layer_idx)


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
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    PRUNED.register(_attention, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


PRUNED = Interface(
    name="levattn",
    part=PART,
    held_in=_held_in,  # functions of the module, so that models can be pickled
    install=register,
    maker="prune",
    attention="pruned attention",
    remedy="leave this layer out of layers",
)


def _attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Return the output of a pruned layer, (B, T, heads, D), and its weights if `output_attentions`."""
    part, call = PRUNED.begin(module, dropout, kwargs)
    layer, rows = layer_of(module), query.shape[2]
    by_layer = getattr(module, "scale_attn_by_inverse_layer_idx", False)
    if scaling is None and (by_layer or not getattr(module, "scale_attn_weights", True)):
        raise ValueError(
            f"{layer} scales its logits by its number, or not at all, and passes no scale to its attention; expected "
            "a scale. Use a newer version of transformers, which passes it"
        )
    held = None if call is None else call.held
    progress = None if held is None else held.begin(part.pruning)
    seen = (0 if progress is None else progress.positions) + rows
    _check_lengths(layer, rows, key.shape[2], seen, sliding_window)
    declared = getattr(module, "is_causal", True) if is_causal is None or attention_mask is not None else is_causal
    present, causal = padding_and_kind(
        layer, attention_mask, rows, seen, declared or progress is not None, whole=False
    )
    total = None if present is None else present.sum(1)
    if progress is not None:
        progress.check(layer, present)
        if not causal:
            raise ValueError(f"{layer} has a cache and is not causal; expected causal attention. Set use_cache=False")
    if isinstance(part, Probe):
        return part.take(call, query, key, value, causal=causal)
    arrays = Arrays(query, key, value, present, causal, query.shape[-1] ** -0.5 if scaling is None else scaling)
    if part.look is not None:
        part.look(part.number, arrays)
    if output_attentions and causal and seen > rows:
        raise ValueError(
            f"output_attentions is True and {layer} continues from a cache; expected all positions in one call, as "
            "a state cannot split a summary's weight over keys. Call the model without a cache"
        )
    found = [
        _group(module, attention_mask, is_causal, part, number, arrays.of_heads(group), progress, output_attentions)
        for number, group in enumerate(part.groups)
    ]
    if progress is not None:
        progress.states = [held for _, _, states in found for held in states]
        progress.positions, progress.present = seen, total
    part.tally.calls += 1
    part.tally.measured += part.measures(rows)
    places = [group.of_queries(query.shape[1] // key.shape[1]) for group in part.groups]
    Y = concatenated([Y for Y, _, _ in found], places, 1)
    shares = concatenated([share for _, share, _ in found], places, 1) if output_attentions else None
    return Y.transpose(1, 2).contiguous(), shares


def _check_lengths(layer: str, rows: int, keys: int, seen: int, sliding_window: int | None) -> None:
    """Raise unless the number of keys equals the positions seen, and fits the window."""
    if sliding_window is not None and seen > sliding_window:
        raise ValueError(
            f"{layer} slides over {sliding_window} positions, and there are {seen}; expected at most that many. "
            "Leave the layer out of layers"
        )
    if keys != seen:
        raise ValueError(
            f"{layer} has {rows} queries and {keys} keys; expected {seen} keys: at the positions of the queries, and "
            "in a DynamicCache that this model has filled. Leave layers with cross-attention, or with a cache of "
            "another type, out of layers"
        )


def _group(
    module: Any,
    mask: Any,
    is_causal: bool | None,
    part: LayerPruning,
    number: int,
    arrays: Arrays,
    progress: Progress | None,
    asked: bool | None,
) -> tuple[Any, Any, Any]:
    """Return the output (B, H, m, D) of a group of heads, its weights if `asked`, and the states to keep."""
    group = part.groups[number]
    if group.dense:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        Y, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, arrays.q, arrays.k, arrays.v, mask, dropout=0.0, scaling=arrays.scale, is_causal=is_causal
        )
        return (
            Y.transpose(1, 2),
            arrays.dense_weights(range(arrays.q.shape[2])).to(arrays.v.dtype) if asked else None,
            (),
        )
    before = None if progress is None else [held for held in progress.states if held.group == number]
    measured = part.measures(arrays.q.shape[2])
    start = _now(arrays.q) if measured else 0.0
    Y, after = outputs(arrays, number, group.budget, part.rule, before)
    if measured:
        seconds = _now(arrays.q) - start
        with torch.no_grad():
            part.tally.add(group.heads, seconds, sampled(arrays, group.budget, part.rule, before, Y))
    return Y, weights(arrays, group.budget, part.rule) if asked else None, after


def _now(like: Any) -> float:
    """Return the time after the device has finished its work."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return perf_counter()
