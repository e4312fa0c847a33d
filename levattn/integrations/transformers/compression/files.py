"""Compressed contexts in files: safetensors, with the fingerprint of the model that read them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from levattn._core.checks import needing
from levattn.integrations.transformers.compression.layer import CompressedLayer
from levattn.integrations.transformers.compression.slots import HeadSlots
from levattn.io import replace_file

__all__ = ["read_context", "write_context"]

_FORMAT, _VERSION = "levattn context", 1
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
    head = {"format": _FORMAT, "version": _VERSION, "fingerprint": fingerprint, "layers": kept}
    content = save({name: array.contiguous().cpu() for name, array in arrays.items()}, {"levattn": json.dumps(head)})
    with replace_file(path) as stream:
        stream.write(content)


def read_context(path: str | os.PathLike[str], device: Any) -> tuple[list[Any], Any, Any, str]:
    """Return the layers, the tokens, their padding mask and the fingerprint, or raise."""
    with needing("contexts are files of safetensors", "transformers"):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(os.fspath(path), framework="pt", device=str(device)) as file:
            head = json.loads((file.metadata() or {}).get("levattn", "null"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no compressed context, or is damaged: {error}") from error
    if not isinstance(head, dict) or head.get("format") != _FORMAT:
        raise ValueError(f"{path} is no compressed context; expected a file of CompressedCache.save")
    if head.get("version") != _VERSION:
        raise ValueError(f"{path} is of version {head.get('version')!r}, and this release reads {_VERSION}")
    try:
        tokens, present, fingerprint = arrays["tokens"], arrays["present"], str(head["fingerprint"])
        if tokens.ndim != 2 or present.shape != tokens.shape or present.dtype != torch.bool or not head["layers"]:
            raise ValueError("its tokens and their mask do not fit together")
        layers = [_layer(number, kept, arrays, tokens.shape) for number, kept in enumerate(head["layers"])]
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is a damaged compressed context: {error}") from error
    return layers, tokens, present, fingerprint


def _layer(number: int, kept: dict[str, Any], arrays: dict[str, Any], shape: tuple[int, int]) -> Any:
    """Return a layer of a cache, or raise if its arrays do not fit together or the shape of the context."""
    if "window" in kept:
        keys, values, window = arrays[f"{number}.keys"], arrays[f"{number}.values"], kept["window"]
        held = (shape[0], keys.shape[1], min(shape[1], window - 1))
        if any(array.shape[:3] != held or array.ndim != 4 for array in (keys, values)):
            raise ValueError(f"layer {number} slides over {window} positions, and its arrays do not fit this window")
        layer = DynamicSlidingWindowLayer(window)
        layer.update(keys, values)
        layer.cumulative_length = shape[1]
        return layer
    groups = tuple(
        HeadSlots(tuple(heads), *(arrays.get(f"{number}.{i}.{name}") for name in _ARRAYS))
        for i, heads in enumerate(kept["heads"])
    )
    _check(groups, shape[0])
    return CompressedLayer(groups, shape[1])


def _check(groups: tuple[HeadSlots, ...], sequences: int) -> None:
    """Raise unless the kinds and shapes of the arrays of a layer fit together."""
    heads = sorted(head for group in groups for head in group.heads)
    if not heads or heads != list(range(len(heads))):
        raise ValueError(f"a layer has the heads {heads}")
    for group in groups:
        shape = (sequences, len(group.heads), group.keys.shape[2])
        arrays = [group.keys[..., 0], group.values[..., 0], group.places]
        arrays += [] if group.log_weight is None else [group.log_weight]
        if any(array.shape != shape for array in arrays) or not torch.is_floating_point(group.keys):
            raise ValueError(f"an array of the heads {group.heads} has a shape other than {shape}")
