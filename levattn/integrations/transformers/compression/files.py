"""Compressed contexts in files: safetensors, with the fingerprint of the model that read them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from levattn._core.checks import needing
from levattn.integrations.transformers.compression.layer import CompressedLayer
from levattn.integrations.transformers.compression.slots import HeadSlots
from levattn.io import replace_file

_FORMAT, _VERSION = "levattn context", 2
_ARRAYS = ("keys", "values", "log_weight", "places")


def write_context(
    path: str | os.PathLike[str],
    layers: Sequence[Any],
    tokens: Any,
    present: Any,
    fingerprint: str,
) -> None:
    """Write the layers of a compressed context to a file, which appears whole or not at all."""
    with needing("contexts are files of safetensors", "transformers"):
        from safetensors.torch import save
    arrays = {"tokens": tokens, "present": present}
    kept: list[dict[str, Any]] = []
    for number, layer in enumerate(layers):
        if isinstance(layer, CompressedLayer):
            kept.append({"heads": [list(group.heads) for group in layer.groups]})
            for i, group in enumerate(layer.groups):
                found = {name: getattr(group, name) for name in _ARRAYS}
                arrays |= {f"{number}.{i}.{name}": array for name, array in found.items() if array is not None}
        else:
            kept.append({"window": layer.sliding_window})
            arrays |= {f"{number}.keys": layer.keys, f"{number}.values": layer.values}
    there = {name: array.contiguous().cpu() for name, array in arrays.items()}
    head = {"format": _FORMAT, "version": _VERSION, "fingerprint": fingerprint, "layers": kept}
    content = save(there, {"levattn": json.dumps({**head, "digest": _digest(head, there)})})
    with replace_file(path) as stream:
        stream.write(content)


def read_context(path: str | os.PathLike[str], device: Any) -> tuple[list[Any], Any, Any, str]:
    """Return the layers, the tokens, their padding mask and the fingerprint, or raise."""
    with needing("contexts are files of safetensors", "transformers"):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            head = json.loads((file.metadata() or {}).get("levattn", "null"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no compressed context, or is damaged: {error}") from error
    if not isinstance(head, dict) or head.get("format") != _FORMAT:
        raise ValueError(f"{path} is no compressed context; expected a file of CompressedCache.save")
    if head.get("version") != _VERSION:
        raise ValueError(f"{path} is of version {head.get('version')!r}, and this release reads {_VERSION}")
    if head.pop("digest", None) != _digest(head, arrays):
        raise ValueError(f"{path} is a damaged compressed context: it does not have its digest")
    arrays = {name: array.to(device) for name, array in arrays.items()}
    try:
        tokens, present, fingerprint = arrays["tokens"], arrays["present"], str(head["fingerprint"])
        kinds = tokens.dtype in (torch.int64, torch.int32) and present.dtype == torch.bool
        if not kinds or tokens.ndim != 2 or present.shape != tokens.shape or not head["layers"]:
            raise ValueError("its tokens and their mask do not fit together")
        if not tokens.numel() or not bool(present.any(1).all()):
            raise ValueError("a sequence has no positions")
        layers = [_layer(number, kept, arrays, present) for number, kept in enumerate(head["layers"])]
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is a damaged compressed context: {error}") from error
    return layers, tokens, present, fingerprint


def _digest(head: dict[str, Any], arrays: Mapping[str, Any]) -> str:
    """Return a hash of all that a file holds."""
    found = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
        found.update(array.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _layer(number: int, kept: dict[str, Any], arrays: dict[str, Any], present: Any) -> Any:
    """Return a layer of a cache, or raise if its arrays do not fit together or the shape of the context."""
    shape = present.shape
    if "window" in kept:
        keys, values, window = arrays[f"{number}.keys"], arrays[f"{number}.values"], kept["window"]
        held = (shape[0], keys.shape[1], min(shape[1], window - 1))
        if any(array.shape[:3] != held or array.ndim != 4 for array in (keys, values)):
            raise ValueError(f"layer {number} slides over {window} positions, and its arrays do not fit this window")
        _check_numbers(number, keys, values)
        layer = DynamicSlidingWindowLayer(window)
        layer.update(keys, values)
        layer.cumulative_length = shape[1]
        return layer
    groups = tuple(
        HeadSlots(tuple(heads), *(arrays.get(f"{number}.{i}.{name}") for name in _ARRAYS))
        for i, heads in enumerate(kept["heads"])
    )
    _check(number, groups, present)
    return CompressedLayer(number, groups, present)


def _check_numbers(number: int, keys: Any, values: Any) -> None:
    for array in (keys, values):
        if not torch.is_floating_point(array) or not bool(array.isfinite().all()):
            raise ValueError(f"layer {number} has keys or values that are not finite numbers")
    if keys.dtype != values.dtype:
        raise ValueError(f"layer {number} has keys in {keys.dtype} and values in {values.dtype}")


def _check(number: int, groups: tuple[HeadSlots, ...], present: Any) -> None:
    """Raise unless the kinds, shapes and numbers of the arrays of a layer fit together and the context."""
    heads = sorted(head for group in groups for head in group.heads)
    if not heads or heads != list(range(len(heads))):
        raise ValueError(f"layer {number} has the heads {heads}")
    first, lengths = groups[0], present.sum(1)[:, None, None]
    for group in groups:
        shape = (len(present), len(group.heads), group.keys.shape[2])
        arrays = [group.keys[..., 0], group.values[..., 0], group.places]
        arrays += [] if group.log_weight is None else [group.log_weight]
        alike = group.keys.shape[3] == first.keys.shape[3] and group.values.shape[3] == first.values.shape[3]
        if any(array.shape != shape for array in arrays) or not alike or not shape[2]:
            raise ValueError(f"an array of the heads {group.heads} of layer {number} has a shape other than {shape}")
        _check_numbers(number, group.keys, group.values)
        weight = torch.zeros(shape) if group.log_weight is None else group.log_weight
        if bool((weight.isnan() | (weight == torch.inf)).any()) or not bool((weight > -torch.inf).any(2).all()):
            raise ValueError(f"layer {number} has weights that are not numbers, or a head without slots")
        places = group.places
        if torch.is_floating_point(places) or bool(((places < -1) | (places >= lengths)).any()):
            raise ValueError(f"layer {number} has slots at positions that the context does not have")


def check_layers(path: Any, layers: Sequence[Any], model: Any) -> None:
    """Raise unless a model has these layers, with these heads and widths, in its config."""
    config = model.config.get_text_config(decoder=True)
    wanted = DynamicCache(config=model.config).layers
    kinds = [getattr(layer, "sliding_window", None) for layer in wanted]
    found = [getattr(layer, "sliding_window", None) for layer in layers]
    heads = getattr(config, "num_key_value_heads", None)
    for layer in layers:
        held = layer.keys.shape[1] if layer.is_sliding else sum(len(group.heads) for group in layer.groups)
        if kinds != found or (isinstance(heads, int) and held != heads):
            raise ValueError(
                f"{path} has {len(layers)} layers, one with {held} heads; expected the {len(wanted)} layers of this "
                f"{type(model).__name__}, with {heads} heads. Compress the context with this model"
            )
