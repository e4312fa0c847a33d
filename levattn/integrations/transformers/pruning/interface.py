"""The attention function of pruned layers that transformers calls, and the hooks that bring it the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from levattn.integrations.transformers.calls import cache_among, given_to, layer_of, refuse, seen_by
from levattn.integrations.transformers.changes import PART, Changes
from levattn.integrations.transformers.latents.interface import padding_mask
from levattn.integrations.transformers.pruning.cache import Progress, PrunedLayer, StreamedLayer, pruned_layer_for
from levattn.integrations.transformers.pruning.heads import Arrays, Group, SharedOptions, joined, outputs, weights
from levattn.integrations.transformers.pruning.sample import Tally, sampled

__all__ = [
    "NAME",
    "STREAM",
    "LayerPruning",
    "PrunedCall",
    "PrunedProbe",
    "Pruning",
    "check_reached",
    "hand_on",
    "register",
]

NAME = "levattn"  # no "flash", "sdpa", "flex_attention", "/" or ":", which transformers reads in names
STREAM = "levattn_stream"  # the same with masks of padding alone, which are of one row


@dataclass
class PrunedProbe:
    """What is in the place of a `LayerPruning` while a model is tried out: what a module hands to its attention."""

    reached: list[Any]  # modules, in the order of their calls
    heads: int = 0  # of the keys
    causal: bool = True
    handed: bool = False  # whether keywords of the module come to its attention


@dataclass
class LayerPruning:
    """How an attention module is pruned."""

    number: int  # of the layer
    pruning: int  # which call of `prune` this is of
    groups: tuple[Group, ...]
    rule: SharedOptions
    tally: Tally
    measure: bool = False
    stream: bool = False  # whether caches hold states alone
    look: Callable[[int, Arrays], None] | None = None  # who is shown what the layer attends with


class Pruning(Changes):
    """What pruning, or trying it out, changed in a model."""

    def give_part(self, module: Any, part: LayerPruning | PrunedProbe) -> None:
        """Let a module call our attention, which finds the part at it."""
        self.give_config(module, NAME)
        setattr(module, PART, part)

    def undo(self) -> None:
        """Make the model what it was."""
        super().undo()
        for module in self.modules:
            if hasattr(module, PART):
                delattr(module, PART)


@dataclass
class PrunedCall:
    """One call of an attention module, on its way from the hook in front to the attention function."""

    held: PrunedLayer | None = None
    reached: bool = False


def register() -> None:
    """Tell transformers the attention "levattn" and its masks, which are those of "sdpa".

    `prune` does so itself. It is of use where a model is loaded with ``attn_implementation="levattn"``, to be pruned
    afterwards; a layer with this attention that is not pruned raises when it is called.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from levattn.integrations.transformers import prune, register
    >>> register()
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=50)
    >>> model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, attn_implementation="levattn", **sizes))
    >>> report = prune(model, budget=16)
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    AttentionInterface.register(STREAM, _attention)
    AttentionMaskInterface.register(STREAM, padding_mask)


def hand_on(
    names: tuple[str, ...], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the layer of the cache to a call of an attention module: a forward pre-hook."""
    past = cache_among(given_to(names, args, kwargs))
    part = getattr(module, PART)
    stream = isinstance(part, LayerPruning) and part.stream
    held = None if past is None else pruned_layer_for(past, module.layer_idx, stream)
    if isinstance(held, StreamedLayer):
        held.expected = True
    return args, {**kwargs, NAME: PrunedCall(held)}


def check_reached(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG001
    """Raise if an attention module did not call the attention function: a forward hook."""
    if not kwargs[NAME].reached:
        raise RuntimeError(
            f"{layer_of(module)} did not call the attention of prune; expected the attention implementation {NAME!r} "
            f"in its config, found {module.config._attn_implementation!r}. Leave it as it is, or take the pruning off "
            "first"
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
    """Return the output of a pruned layer, (B, T, heads, D), and its weights where they are asked for."""
    part = getattr(module, PART, None)
    call = kwargs.pop(NAME, None)
    if part is None:
        raise ValueError(
            f"the attention implementation {NAME!r} was chosen by hand for {layer_of(module)}; expected a layer that "
            "is pruned. Call prune on the model, or choose another one"
        )
    layer = layer_of(module)
    refuse(layer, dropout, kwargs, attention="pruned attention", remedy="leave this layer out of layers")
    by_layer = getattr(module, "scale_attn_by_inverse_layer_idx", False)
    if scaling is None and (by_layer or not getattr(module, "scale_attn_weights", True)):
        raise ValueError(
            f"{layer} scales its logits by its number, or not at all, and does not tell its attention; expected a "
            "scale. Take a newer version of transformers, which tells it"
        )
    rows, keys = query.shape[2], key.shape[2]
    progress = (
        None if isinstance(part, PrunedProbe) or call is None or call.held is None else call.held.begin(part.pruning)
    )
    seen = (0 if progress is None else progress.positions) + rows
    if sliding_window is not None and seen > sliding_window:
        raise ValueError(
            f"{layer} slides over {sliding_window} positions, and there are {seen}; expected no more of them. Leave "
            "the layer out of layers"
        )
    streamed = progress is not None and part.stream
    if keys != (rows if streamed else seen):
        raise ValueError(
            f"{layer} has {rows} queries and {keys} keys, where {seen} were expected: keys of the same positions as "
            "the queries, and those in a DynamicCache that this model has filled. Leave layers with cross-attention, "
            "or with a cache of another kind, out of layers"
        )
    declared = getattr(module, "is_causal", True) if is_causal is None or attention_mask is not None else is_causal
    present, causal = _pattern(layer, attention_mask, rows, seen, declared or progress is not None, whole=streamed)
    if progress is not None:
        progress.check(layer, present)
        total = None if present is None else present.sum(1)
    if streamed and present is not None:
        present = present[:, -rows:]
    if progress is not None and not causal:
        raise ValueError(f"{layer} has a cache and is not causal; expected causal attention. Set use_cache=False")
    if call is not None:
        call.reached = True
    if isinstance(part, PrunedProbe):
        part.reached.append(module)
        part.heads, part.causal, part.handed = key.shape[1], causal, call is not None
        return torch.zeros_like(query[..., :1]).expand(*query.shape[:3], value.shape[-1]).transpose(1, 2), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    arrays = Arrays(query, key, value, present, causal, scale)
    if part.look is not None:
        part.look(part.number, arrays)
    if output_attentions and causal and seen > rows:
        raise ValueError(
            f"output_attentions is True and {layer} goes on from a cache; expected all positions in one call, as "
            "weights on summaries of those before cannot be told apart. Call the model without past_key_values"
        )
    found = [
        _group(module, attention_mask, is_causal, part, number, arrays.of_heads(group), progress, output_attentions)
        for number, group in enumerate(part.groups)
    ]
    if progress is not None:
        progress.states = [held for _, _, states in found for held in states]
        progress.positions, progress.present = seen, total
    part.tally.calls += 1
    places = [group.of_queries(query.shape[1] // key.shape[1]) for group in part.groups]
    Y = joined([Y for Y, _, _ in found], places, 1)
    shares = joined([share for _, share, _ in found], places, 1) if output_attentions else None
    return Y.transpose(1, 2).contiguous(), shares


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
    """Return the output (B, H, m, D) of one group of heads, its weights if they are asked for, and states to keep."""
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
    start = _now(arrays.q) if part.measure else 0.0
    Y, after = outputs(arrays, number, group.budget, part.rule, before)
    if part.measure:
        seconds = _now(arrays.q) - start
        with torch.no_grad():
            part.tally.add(group.heads, seconds, sampled(arrays, group.budget, part.rule, before, Y))
    return Y, weights(arrays, group.budget, part.rule) if asked else None, after


def _now(like: Any) -> float:
    """Return the time, after what was asked of the device is done."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return perf_counter()


def _pattern(layer: str, mask: Any, rows: int, keys: int, causal: bool, *, whole: bool) -> tuple[Any, bool]:
    """Return which keys are there, (B, keys) bool or None for all, and whether attention is causal.

    causal: what it is if the mask does not tell. whole: whether no mask says that all keys are there, and rows last.
    """
    if mask is None:
        if causal and 1 < rows < keys and not whole:
            raise ValueError(
                f"{layer} was given no attention mask for {rows} queries and {keys} keys; expected one, as it is not "
                "said which of them come first. Give the model an attention_mask of shape (batch, positions)"
            )
        return None, causal
    seen = seen_by(mask, keys)
    if seen.shape[-1] != keys:
        raise ValueError(
            f"{layer} was given the attention mask {tuple(mask.shape)} for {keys} keys; expected one with as many "
            "columns. Give a DynamicCache, or none"
        )
    present = seen if seen.ndim == 2 else seen[:, -1]
    if seen.ndim == 3 and seen.shape[1] == 1 < rows:
        causal = False
    elif seen.ndim == 3 and rows > 1:
        place = torch.arange(keys, device=seen.device)
        both = {True: present[:, None] & (place <= place[keys - rows :, None]), False: present[:, None]}
        way = next((way for way in (causal, not causal) if _same(seen, both[way])), None)
        if way is None:
            raise ValueError(
                f"{layer} was given an attention mask of shape {tuple(mask.shape)} that is neither full nor causal "
                "with padding; expected one sequence in each row, and no packed ones (position_ids that start again), "
                "windows or overlays. Give the model an attention_mask of shape (batch, positions), 0 for padding"
            )
        causal = way
    return (None if present.all() else present), causal


def _same(seen: Any, expected: Any) -> bool:
    """Tell whether a mask is as expected; some versions let rows that see nothing see everything."""
    nothing = ~expected.any(-1, keepdim=True) & seen.all(-1, keepdim=True)
    return bool(((seen == expected) | nothing).all())
