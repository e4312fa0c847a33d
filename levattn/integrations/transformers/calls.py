"""The arguments of models and attention modules of transformers: inputs, keywords, names of caches, and masks."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from numbers import Integral
from time import perf_counter
from typing import Any

import torch

# Names of the cache argument: since transformers 5.24, and before
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
# Inputs of models that a tokenizer gives, as lists if it is not told otherwise
_OF_TOKENIZERS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_AS_TENSORS = "tokenizer(text, return_tensors='pt')"
# Options of `generate` that change or forbid tokens, or have a cache of their own
_PROCESSORS = (
    *("bad_words_ids", "begin_suppress_tokens", "suppress_tokens", "sequence_bias", "forced_bos_token_id"),
    *("forced_eos_token_id", "exponential_decay_length_penalty", "min_new_tokens", "cache_implementation"),
    *("no_repeat_ngram_size", "min_length", "encoder_repetition_penalty", "guidance_scale"),
)
# An attribute of modules that read pictures: how far positions after the last call are from a count of its tokens
_SHIFT = "rope_deltas"
_HIDDEN = -1e4  # a mask adds at most this to a masked logit
_GIVE_PADDING = "Give the model an attention_mask of shape (batch, positions), 0 for padding"
_PADDING_ALONE = (
    "with padding; expected one sequence in each row, and no packed ones (position_ids that start again), overlays or "
    f"other windows. {_GIVE_PADDING}"
)


def model_inputs(name: str, value: Any) -> dict[str, Any]:
    """Return the inputs of a model as a dictionary, or raise if they are no mapping, or are lists of tokens."""
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name} is of type {type(value).__name__}; expected the output of a tokenizer, e.g. {_AS_TENSORS}"
        )
    for entry in _OF_TOKENIZERS:
        given = value.get(entry)
        if given is not None and not isinstance(given, torch.Tensor | Mapping):
            kind = type(given).__name__
            raise TypeError(f"{name}[{entry!r}] is of type {kind}; expected a tensor of torch, e.g. by {_AS_TENSORS}")
    return dict(value)


def refuse_wrapper(model: Any) -> None:
    """Raise for a transformers model in a wrapper, with the way to the model."""
    from transformers import PreTrainedModel

    way, inner = "model", model
    while isinstance(inner, torch.nn.Module) and not isinstance(inner, PreTrainedModel):
        # of torch.compile, which has the attributes of its model too, and of parallel data
        name = next((name for name in ("_orig_mod", "module") if name in inner._modules), None)
        if name is not None:
            way, inner = f"{way}.{name}", inner._modules[name]
        elif hasattr(inner, "get_base_model"):  # of peft
            way, inner = f"{way}.get_base_model()", inner.get_base_model()
        else:
            return
    if inner is not model and isinstance(inner, PreTrainedModel):
        raise TypeError(
            f"model is of type {type(model).__name__}, a wrapper; expected the transformers.PreTrainedModel in it, "
            f"with its adapters. Give {way}, and call the wrapper after that if you like, as it shares the changes"
        )


def check_generates(model: Any) -> None:
    """Raise for a model that cannot generate, as it has no logits of the next token."""
    if not hasattr(model, "generate"):
        raise TypeError(
            f"model is of type {type(model).__name__}; expected a model that generates, e.g. of "
            "transformers.AutoModelForCausalLM"
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Raise for an object that is no tokenizer of transformers."""
    if not callable(tokenizer) or not hasattr(tokenizer, "decode"):
        raise TypeError(
            f"tokenizer is of type {type(tokenizer).__name__}; expected a tokenizer of transformers, e.g. by "
            "AutoTokenizer.from_pretrained"
        )


def inputs_device(model: Any) -> Any:
    """Return the device of a model's inputs: the CPU where accelerate brings weights that are elsewhere."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


def time_on(device: Any) -> float:
    """Return the time after a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def tokens_of(name: str, value: Any, mask: Any = None) -> tuple[Any, Any]:
    """Return tokens (B, n) and their mask, or raise; the value may be the output of a tokenizer."""
    if isinstance(value, Mapping):
        parts = model_inputs(name, value)
        if "input_ids" not in parts or set(parts) - {"input_ids", "attention_mask", "token_type_ids"}:
            raise ValueError(f"{name} has {sorted(parts)}; expected input_ids and perhaps attention_mask")
        kinds = parts.get("token_type_ids")
        if kinds is not None and bool(torch.as_tensor(kinds).any()):
            raise ValueError(f"{name} has token_type_ids that are not zero, which are not read; expected one kind")
        if mask is not None and parts.get("attention_mask") is not None:
            raise ValueError(f"attention_mask was given, and the {name} has one; expected one of the two")
        value, mask = parts["input_ids"], parts.get("attention_mask", mask)
    if isinstance(value, torch.Tensor) and value.ndim == 2 and not value.numel():
        raise ValueError(f"{name} has no tokens; expected at least one in each row")  # of any type, for tokenizers
    if not isinstance(value, torch.Tensor) or value.ndim != 2 or value.dtype not in (torch.int64, torch.int32):
        shown = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value)
        raise TypeError(
            f"{name} is {shown}; expected whole numbers of shape (sequences, positions), of torch, e.g. {_AS_TENSORS}"
        )
    if mask is None:
        return value, torch.ones_like(value)
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"attention_mask is of type {type(mask).__name__}; expected a tensor of torch")
    if mask.shape != value.shape:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; expected {tuple(value.shape)}")
    return value, mask


def layer_of(module: Any) -> str:
    """Return the name of an attention module for messages."""
    number = getattr(module, "layer_idx", None)
    return type(module).__name__ if number is None else f"{type(module).__name__} {number}"


def parameters_of(module: Any, method: str = "forward") -> tuple[tuple[str, ...], bool]:
    """Return the parameter names of a module's forward, or of another method, and whether it takes other keywords."""
    parameters = list(inspect.signature(getattr(type(module), method)).parameters.values())[1:]
    return tuple(p.name for p in parameters), any(p.kind is p.VAR_KEYWORD for p in parameters)


def cache_among(given: dict[str, Any]) -> Any:
    """Return the cache that a module was called with, or None."""
    return next((given[name] for name in _CACHES if given.get(name) is not None), None)


def cache_keyword(module: Any) -> str | None:
    """Return the name under which a module takes a cache, or None."""
    names = parameters_of(module)[0]
    return next((name for name in _CACHES if name in names), None)


def as_cache_of(module: Any, cache: Any) -> dict[str, Any]:
    """Return a cache under the keyword that a module uses for it."""
    keyword = cache_keyword(module)
    if keyword is None:
        refuse_wrapper(module)
        raise ValueError(f"{type(module).__name__} takes no cache; expected a decoder that does, e.g. Llama or Qwen")
    return {keyword: cache}


@contextmanager
def counting_from(model: Any, shifts: Mapping[str, Any]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Let a model that reads pictures count positions with the shifts of a call, none for text; its own come back.

    Such a model keeps the shift of its last call, of whatever text, and goes on from it where a cache holds positions.
    The block gets a function that returns the shifts, by the names of modules. Of such models only one thread is in a
    block, because the model has its shift for all threads.
    """
    modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    parts = {name: part for name, part in modules if hasattr(part, _SHIFT)}
    with _counting[0] if parts else nullcontext():
        before = {name: getattr(part, _SHIFT) for name, part in parts.items()}
        try:
            for name, part in parts.items():
                setattr(part, _SHIFT, shifts.get(name))
            yield lambda: {name: x for name, part in parts.items() if (x := getattr(part, _SHIFT)) is not None}
        finally:
            for name, part in parts.items():
                setattr(part, _SHIFT, before[name])


_counting = [threading.RLock()]


def _count_anew() -> None:
    """Make a lock for a forked process, in which the thread that may hold the other one is not there."""
    _counting[0] = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_anew)


def greedy(model: Any, count: int) -> dict[str, Any]:
    """Return options of ``model.generate`` for the likeliest token each time, whatever the model's own options are."""
    own = model.generation_config
    one = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}
    none = dict.fromkeys(_PROCESSORS)
    padding = own.pad_token_id if own.pad_token_id is not None else 0
    return {**one, **none, "use_cache": True, "max_new_tokens": count, "pad_token_id": padding}


def whole_numbers(name: str, value: Any) -> list[int] | None:
    """Return whole numbers as a list, or raise; None, for all, stays None."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is {value!r}; expected numbers of {name}, e.g. [{value!r}], or None for all")
    numbers = list(value)
    if any(isinstance(number, bool) or not isinstance(number, Integral) for number in numbers):
        raise TypeError(f"{name} is {numbers}; expected whole numbers")
    return [int(number) for number in numbers]


def numbers_among(name: str, numbers: list[int] | None, among: list[int]) -> list[int]:
    """Return distinct numbers out of `among`, ascending, or raise; None stands for all."""
    if numbers is None:
        return sorted(among)
    if not numbers or len(set(numbers)) < len(numbers) or not set(numbers) <= set(among):
        raise ValueError(f"{name} is {numbers}; expected different numbers among {among}, at least one")
    return sorted(numbers)


def seen_by(mask: Any, keys: int) -> Any:
    """Return which keys each row may see, (B, T or 1, U) bool, or (B, U) for a padding mask.

    The masks of transformers are bool, or added to the logits. U is at least the number of `keys`.
    """
    if not isinstance(mask, torch.Tensor):
        raise ValueError(
            f"a layer was given an attention mask of type {type(mask).__name__}, which is of another attention, such "
            "as flex_attention; expected a tensor. Call model.set_attn_implementation('sdpa') first"
        )
    shown = tuple(mask.shape)
    if mask.ndim not in (2, 4) or mask.shape[-1] < keys:
        raise ValueError(
            f"a layer was given the attention mask {shown}; expected (B, U) or (B, 1, T, U). {_GIVE_PADDING}"
        )
    if mask.ndim == 2:
        return mask.bool()
    if mask.shape[1] != 1:
        raise ValueError(
            f"a layer was given the attention mask {shown}, one for each head; expected (B, 1, T, U). {_GIVE_PADDING}"
        )
    mask = mask[:, 0]
    if mask.dtype == torch.bool:
        return mask
    if ((mask != 0) & (mask > _HIDDEN)).any():
        raise ValueError(
            "the attention mask adds numbers to logits, as biases of positions do; expected a padding mask, which "
            "adds 0 or masks a position. Leave the biases out, or use the base model"
        )
    return mask == 0


class _LastMask(threading.local):
    """The mask of the last step that a thread read, which memory it had then, and answers of `once_a_step`."""

    mask: Any = None  # held, so that no other mask takes its memory
    place: Any = None
    found: dict[Any, Any] | None = None


_LAST = _LastMask()


def once_a_step(mask: Any, rows: int, key: Any, find: Callable[[], Any]) -> Any:
    """Return the result of `find`, which is called once for all layers of a model that are given the mask of a step.

    To look at a mask waits for a device. A step has one row. Layers may be given views of one mask, as in some
    releases of transformers. `key`: all other things on which the result depends.
    """
    if rows != 1 or not isinstance(mask, torch.Tensor) or mask.is_inference():  # which has no version
        return find()
    place = mask.data_ptr(), tuple(mask.shape), mask.stride(), mask.dtype, mask.device, mask._version
    if _LAST.found is None or place != _LAST.place:
        _LAST.mask, _LAST.place, _LAST.found = mask, place, {}
    found = _LAST.found
    if key not in found:
        found[key] = find()
    return found[key]


def padding_mask(*args: Any, **kwargs: Any) -> Any:
    """Return which positions are not padding, (B, U), or None for all: a mask function for transformers.

    The masks that transformers makes for kernels that unpad contain padding alone. Where the model may need more, such
    as packed sequences or overlays, this function makes the whole mask and checks it.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if kwargs.get("allow_is_causal_skip") is True:
        return ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"](*args, **kwargs)
    whole = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **whole)
    return causal_padding(mask, mask.shape[-2], kwargs.get("local_size"))


def causal_padding(mask: Any, T: int, sliding_window: int | None) -> Any:
    """Return which of the last T positions are not padding, (B, T), or None for all; raise if a mask is not causal.

    sliding_window: the number of positions that a row may see, including itself, or None for all.
    """
    if mask is None:
        return None
    allowed = seen_by(mask, T)[..., -T:]  # made for the attention of other layers, where they keep it
    if mask.ndim == 2:
        return allowed
    present = allowed.diagonal(dim1=-2, dim2=-1)
    if not _lets_through(allowed, present, causal=True, window=sliding_window):
        raise ValueError(f"the attention mask of shape {tuple(mask.shape)} is not causal {_PADDING_ALONE}")
    return None if present.all() else present


def padding_and_kind(layer: str, mask: Any, rows: int, keys: int, causal: bool) -> tuple[Any, bool]:
    """Return which keys are not padding, (B, keys) bool or None for all, and whether attention is causal.

    causal: the default if the mask does not tell.
    """
    if mask is None:
        if causal and 1 < rows < keys:
            raise ValueError(
                f"{layer} was given no attention mask for {rows} queries and {keys} keys; expected one, as their "
                f"order is unknown without it. {_GIVE_PADDING}"
            )
        return None, causal
    seen = seen_by(mask, keys)
    if seen.shape[-1] != keys:
        raise ValueError(
            f"{layer} was given the attention mask {tuple(mask.shape)} for {keys} keys; expected one with as many "
            "columns. Give a DynamicCache, or none; an empty one if an earlier call failed between two layers"
        )
    present = seen if seen.ndim == 2 else seen[:, -1]
    if seen.ndim == 3 and seen.shape[1] == 1 < rows:
        causal = False
    elif seen.ndim == 3 and rows > 1 and not _lets_through(seen, present, causal=causal):
        causal = not causal
        if not _lets_through(seen, present, causal=causal):
            shown = tuple(mask.shape)
            raise ValueError(f"{layer} was given a mask of shape {shown}, neither full nor causal {_PADDING_ALONE}")
    return (None if present.all() else present), causal


def _lets_through(seen: Any, present: Any, *, causal: bool, window: int | None = None) -> bool:
    """Tell whether a mask lets each row see all present keys, or if causal those up to its own, in a window.

    In some versions, rows that should see nothing see everything.
    """
    expected = present[:, None]
    if causal:
        place = torch.arange(seen.shape[2], device=seen.device)
        behind = place[seen.shape[2] - seen.shape[1] :, None] - place
        expected = expected & (behind >= 0) & (behind < (len(place) if window is None else window))
    same = seen == expected
    if same.all():
        return True
    nothing = ~expected.any(-1, keepdim=True) & seen.all(-1, keepdim=True)
    return bool((same | nothing).all())
