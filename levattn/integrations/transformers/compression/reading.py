"""Make a model read compressed caches: hooks of its attention, and a `generate` that takes questions."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import torch

from levattn.integrations.transformers.calls import as_cache_of, cache_among, given_to, layer_of, parameters_of, refuse
from levattn.integrations.transformers.changes import check_model
from levattn.integrations.transformers.compression.attended import attended
from levattn.integrations.transformers.compression.layer import CompressedLayer
from levattn.integrations.transformers.masks import padding_and_kind

__all__ = ["Observer", "attending", "observed_by", "prepared"]

_NAME = "levattn_compressed"  # the name of this attention in transformers
_PART = "_levattn_reader"  # the attribute of an attention module that holds its `_Reader`
_BOUNDARY = 4  # last tokens of a context that may change if a question is written after it
_FEWEST = 16  # tokens of a context that no question repeats by chance

Observer = Callable[[int, Any, Any, Any, float], None]  # of a layer's number, queries, keys, values and scale


@dataclass
class _Reader:
    """How an attention module reads compressed caches."""

    number: int
    own: Any  # its config, outside such calls
    config: Any  # a copy that selects this attention
    held: CompressedLayer | None = None  # during a call
    observer: Observer | None = None  # gets the arrays that the module's own attention reads
    reached: bool = False


def prepared(model: Any) -> None:
    """Let a model read compressed caches; without such a cache it computes the same as before."""
    check_model(model)  # also if it is prepared: it may be pruned since
    if getattr(model, _PART, False):
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    for number, module in attending(model).items():
        config = copy.deepcopy(module.config)
        config._attn_implementation = _NAME
        setattr(module, _PART, _Reader(number, module.config, config))
        module.register_forward_pre_hook(partial(_enter, parameters_of(module)[0]), with_kwargs=True)
        module.register_forward_hook(_leave, always_call=True)
    setattr(model, _PART, True)
    model.register_forward_pre_hook(partial(_look_at_question, parameters_of(model)[0]), with_kwargs=True)
    if hasattr(model, "generate"):
        model.generate = update_wrapper(partial(_generate, model), type(model).generate)


def attending(model: Any) -> dict[int, Any]:
    """Return the attention modules of a model by the numbers of their layers."""
    causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    if getattr(model.config, "is_encoder_decoder", False) or not all(causal):
        raise ValueError(f"{type(model).__name__} is no decoder; expected one that keeps a cache, e.g. Llama or Qwen")
    found = {}
    for name, module in model.named_modules():
        number = getattr(module, "layer_idx", None)
        if number is None or not type(module).__name__.endswith("Attention"):
            continue
        if number in found or getattr(module, "is_cross_attention", False) or not hasattr(module, "config"):
            raise ValueError(
                f"{type(model).__name__} is no decoder: {name} is not the only attention of its layer, or of another "
                "sequence; expected a decoder without cross-attention, e.g. Llama or Qwen"
            )
        found[int(number)] = module
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention with the number of its layer; expected a decoder "
            "of transformers that keeps a cache"
        )
    return found


def _look_at_question(names: tuple[str, ...], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = given_to(names, args, kwargs)
    _check_question(given.get("input_ids"), cache_among(given))


def _check_question(ids: Any, cache: Any) -> None:
    """Raise if the tokens after a compressed context begin with this context again."""
    length = getattr(cache, "context_length", 0)
    n = length - _BOUNDARY
    if length < _FEWEST or getattr(ids, "ndim", 0) != 2 or ids.shape[1] < n or len(ids) != len(cache.tokens):
        return
    if torch.equal(ids[:, :n], cache.tokens[:, :n].to(ids)):
        raise ValueError(
            f"input_ids has {ids.shape[1]} tokens that begin with the {length} of the context, which the cache holds; "
            "expected the question alone, which follows the context"
        )


def _enter(names: tuple[str, ...], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    reader = getattr(module, _PART)
    cache = cache_among(given_to(names, args, kwargs))
    layers = getattr(cache, "layers", ())
    layer = layers[reader.number] if reader.number < len(layers) else None
    reader.held = layer if isinstance(layer, CompressedLayer) else None
    if reader.held is not None:
        reader.held.expected = True
    if reader.held is not None or reader.observer is not None:
        if module.config is not reader.config:
            reader.own = module.config  # another one while the model is pruned
        reader.reached, module.config = False, reader.config


def _leave(module: Any, args: Any, output: Any) -> None:  # noqa: ARG001 (the interface is torch's)
    reader = getattr(module, _PART)
    if module.config is not reader.config:
        return
    module.config, reader.held = reader.own, None
    if output is not None and not reader.reached:
        raise ValueError(
            f"{layer_of(module)} bypasses the attention interface of transformers; expected a layer that uses "
            "it. Take a newer version of transformers, in which it does, or another model"
        )


@contextmanager
def observed_by(model: Any, observer: Observer) -> Iterator[None]:
    """Pass the queries, keys and values of each layer of a prepared model to an observer."""
    readers = [getattr(module, _PART) for module in attending(model).values()]
    for reader in readers:
        reader.observer = observer
    try:
        yield
    finally:
        for reader in readers:
            reader.observer = None


def _attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Return the output (B, T, heads, D) of a layer that reads a compressed cache or has an observer."""
    reader = getattr(module, _PART)
    reader.reached = True
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    held = reader.held
    if held is None:
        reader.observer(reader.number, query, key, value, scale)
        if softcap is not None:
            kwargs["softcap"] = softcap
        Y, weights = _own(module, reader)(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return Y, weights
    others = {name: kwargs[name] for name in kwargs if name not in ("is_causal", "sliding_window")}
    refuse(
        layer_of(module), dropout, others, attention="attention to a compressed context", remedy="use a dense cache"
    )
    present, causal = padding_and_kind(
        layer_of(module), attention_mask, query.shape[2], held.get_seq_length(), True, whole=True
    )
    if not causal:
        raise ValueError(f"{layer_of(module)} was given a mask that is not causal; expected causal attention")
    if reader.observer is not None:
        reader.observer(reader.number, query, key, value, scale)
    after = None if present is None or present[:, held.length :].all() else present[:, held.length :]
    Y = attended(query, held.groups, (key, value), after, scale, softcap)
    return Y.transpose(1, 2).contiguous(), None


def _own(module: Any, reader: _Reader) -> Any:
    """Return the attention function of a module before it was prepared."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = reader.own._attn_implementation
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def _generate(model: Any, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Call `generate`; with a compressed cache the inputs may be a question alone, which follows the cache."""
    cache = cache_among(kwargs)
    generate = partial(type(model).generate, model)
    if not hasattr(cache, "context_length"):
        return generate(inputs, *args, **kwargs)
    ids = kwargs.pop("input_ids", None) if inputs is None else inputs
    if ids is None:
        raise ValueError(
            "the cache is a CompressedCache, and no input_ids are given; expected the tokens of a question"
        )
    if ids.shape[0] != cache.tokens.shape[0]:
        raise ValueError(
            f"the question has {ids.shape[0]} rows and the cache {cache.tokens.shape[0]}; expected as many. Call "
            "batch_repeat_interleave on a copy of the cache"
        )
    mask = kwargs.pop("attention_mask", None)
    before, present = (part.to(ids) for part in cache.so_far())
    length, known = before.shape[1], cache.tokens.shape[1]
    if ids.shape[1] > length and torch.equal(ids[:, :known], before[:, :known]):
        length = 0  # all positions were given, as transformers expects with other caches
        mask = torch.cat([present, torch.ones_like(ids[:, before.shape[1] :])], 1) if mask is None else mask
    else:
        _check_question(ids, cache)
        mask = torch.cat([present, torch.ones_like(ids) if mask is None else mask.to(ids)], 1)
        ids = torch.cat([before, ids], 1)
    others = {name: value for name, value in kwargs.items() if value is not cache} | as_cache_of(model, cache)
    found = generate(ids, *args, attention_mask=mask, **others)
    sequences = found if isinstance(found, torch.Tensor) else found.sequences
    cache.remember(sequences, mask)
    if isinstance(found, torch.Tensor):
        return found[:, length:]
    found.sequences = sequences[:, length:]
    return found
