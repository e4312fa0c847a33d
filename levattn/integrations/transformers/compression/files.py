"""Compressed contexts in files: safetensors, with the fingerprint of the model that read them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from levattn._core.checks import needing
from levattn.integrations.transformers.calls import inputs_device
from levattn.integrations.transformers.compression.layer import CompressedLayer, Renewal
from levattn.integrations.transformers.compression.origin import Origin
from levattn.integrations.transformers.compression.slots import HeadSlots
from levattn.io import replace_file

_FORMAT, _VERSION = "levattn context", 3
_SLOTS = ("keys", "values", "log_weight", "places")


def held_by(layer: Any) -> tuple[HeadSlots, ...]:
    """Return the slots of a layer; those of a layer that slides are its window."""
    if isinstance(layer, CompressedLayer):
        return layer.groups
    first = max(0, layer.keys.shape[2] - layer.sliding_window + 1)
    keys, values = layer.keys[:, :, first:], layer.values[:, :, first:]
    places = keys.new_zeros(keys.shape[:3], dtype=torch.int32)
    return (HeadSlots(tuple(range(keys.shape[1])), keys, values, None, places),)


def write_context(path: str | os.PathLike[str], cache: Any) -> None:
    """Write a `CompressedCache` to a file, which appears whole or not at all."""
    with needing("contexts are files of safetensors", "transformers"):
        from safetensors.torch import save
    arrays = {"tokens": cache.tokens, "present": cache.present}
    kept: list[dict[str, Any]] = []
    for number, layer in enumerate(cache.layers):
        groups = held_by(layer)
        own = {f"{i}.{name}": getattr(group, name) for i, group in enumerate(groups) for name in _SLOTS}
        told: dict[str, Any] = {"heads": [list(group.heads) for group in groups]}
        if layer.is_sliding:
            told["window"] = layer.sliding_window
        else:
            told["length"] = layer.length
            if layer.tail.length:
                own["tail.keys"], own["tail.values"] = layer.tail.arrays
            if layer.renewal is not None:
                told["renewal"], more = layer.renewal.to_arrays(layer.tail.length)
                own |= {f"renewal.{name}": array for name, array in more.items()}
        kept.append(told)
        arrays |= {f"{number}.{name}": array for name, array in own.items() if array is not None}
    there = {name: array.detach().contiguous().cpu() for name, array in arrays.items()}
    head = {"format": _FORMAT, "version": _VERSION, "fingerprint": cache.origin.fingerprint(), "layers": kept}
    head |= {"context": cache.context_length, "positions": cache.get_seq_length()}
    content = save(there, {"levattn": json.dumps({**head, "digest": _digest(head, there)})})
    with replace_file(path) as stream:
        stream.write(content)


def read_context(path: str | os.PathLike[str], model: Any) -> tuple[list[Any], Any, Any, int, Origin]:
    """Return the layers, the tokens, their padding mask, the length of the context and its model, or raise."""
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
        raise ValueError(f"{path} is a context of version {head.get('version')!r}, and this release reads {_VERSION}")
    if head.pop("digest", None) != _digest(head, arrays):
        raise ValueError(f"{path} is a damaged compressed context: it does not have its digest")
    origin = Origin(model, str(head.get("fingerprint")))
    origin.check_file(path)
    try:
        tokens, present, context = arrays["tokens"], arrays["present"], head["context"]
        kinds = tokens.dtype in (torch.int64, torch.int32) and present.dtype == torch.bool
        if not kinds or tokens.ndim != 2 or present.shape != tokens.shape or not 0 < context <= tokens.shape[1]:
            raise ValueError("its tokens and their mask do not fit together")
        if not bool(present[:, :context].any(1).all()):
            raise ValueError("a sequence has no positions")
        _check_layers(head["layers"], arrays, model)
        layers, devices = [], _devices(model)
        for number, told in enumerate(head["layers"]):
            own = {name[len(f"{number}.") :]: arrays[name] for name in arrays if name.startswith(f"{number}.")}
            _check(number, told, own, present[:, :context], head["positions"])
            own = {name: array.to(devices.get(number, inputs_device(model))) for name, array in own.items()}
            layers.append(_layer(number, told, own, head["positions"]))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is a damaged compressed context: {error}") from error
    return layers, *(part.to(inputs_device(model)) for part in (tokens, present)), context, origin


def _digest(head: dict[str, Any], arrays: Mapping[str, Any]) -> str:
    """Return a hash of all that a file holds."""
    found = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
        found.update(array.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _check_layers(kept: list[dict[str, Any]], arrays: Mapping[str, Any], model: Any) -> None:
    """Raise unless a model has these layers in its config, and all numbers are finite."""
    heads = getattr(model.config.get_text_config(decoder=True), "num_key_value_heads", None)
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=model.config).layers]
    if [told.get("window") for told in kept] != windows:
        raise ValueError(f"it has {len(kept)} layers; expected layers with the windows {windows} of the model")
    for number, told in enumerate(kept):
        found = sorted(head for some in told["heads"] for head in some)
        if not found or found != list(range(heads if isinstance(heads, int) else len(found))):
            raise ValueError(f"layer {number} has the heads {found}; expected those of the model")
    for name, array in arrays.items():
        least = -torch.inf if name.endswith("log_weight") else torch.finfo(torch.float64).min
        if torch.is_floating_point(array) and not bool(((array >= least) & (array < torch.inf)).all()):
            raise ValueError(f"{name} has numbers that are not finite")


def _check(number: int, told: dict[str, Any], arrays: dict[str, Any], present: Any, positions: int) -> None:
    """Raise unless the arrays of a layer fit together, and the context (B, n) and the positions read so far."""
    counts, length = present.sum(1), told.get("length", present.shape[1])
    most = length if "renewal" in told else present.shape[1]
    if not present.shape[1] <= length <= min(most, positions):
        raise ValueError(f"layer {number} has slots of {length} of {positions} positions")
    wanted = _wanted(told, arrays, len(present), positions)
    found = {name: (array.dtype, tuple(array.shape)) for name, array in arrays.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if found.get(name) != wanted.get(name):
            raise ValueError(f"{number}.{name} is {found.get(name)}; expected {wanted.get(name)}")
    if "renewal" in told:
        before, counts = counts, arrays["renewal.counts"]
        fits = bool(((before <= counts) & (counts <= length)).all() & (arrays["renewal.slots"] > 0).all())
        if not fits or not {head for some in told["heads"] for head in some}.issuperset(told["renewal"]["whole"]):
            raise ValueError(f"layer {number} counts other heads, slots or positions than it has")
    for i, heads in enumerate(told["heads"]):
        places, weight = arrays[f"{i}.places"], arrays.get(f"{i}.log_weight")
        there = torch.ones(places.shape) if weight is None else weight > -torch.inf
        if not bool(there.any(2).all()) and "window" not in told:
            raise ValueError(f"the heads {heads} of layer {number} have no slots")
        if bool(((places < -1) | (places >= counts[:, None, None])).any()):
            raise ValueError(f"layer {number} has slots at positions that the context does not have")


def _wanted(told: dict[str, Any], arrays: dict[str, Any], B: int, positions: int) -> dict[str, tuple[Any, Any]]:
    """Return the dtype and the shape that each array of a layer must have."""
    kind, d, D = arrays["0.keys"].dtype, arrays["0.keys"].shape[3], arrays["0.values"].shape[3]
    if not kind.is_floating_point:
        raise ValueError(f"its keys are {kind}")
    found: dict[str, tuple[Any, Any]] = {}
    for i, heads in enumerate(told["heads"]):
        window = told.get("window")
        slots = arrays[f"{i}.keys"].shape[2] if window is None else min(positions, window - 1)
        shape = (B, len(heads), slots)
        found |= {f"{i}.keys": (kind, (*shape, d)), f"{i}.values": (kind, (*shape, D))}
        found |= {f"{i}.places": (torch.int32, shape), f"{i}.log_weight": (torch.float32, shape)}
    G, tail = sum(map(len, told["heads"])), positions - told.get("length", positions)
    if tail:
        found |= {"tail.keys": (kind, (B, G, tail, d)), "tail.values": (kind, (B, G, tail, D))}
    if "renewal" in told:
        wide, whole = torch.float64, torch.int64
        found |= {"renewal.queries": (wide, (B * G, d)), "renewal.squares": (wide, (B * G, d, d))}
        found |= {"renewal.keys": (wide, (B * G, d)), "renewal.present": (torch.bool, (B, tail))}
        found |= {"renewal.counts": (whole, (B,)), "renewal.slots": (whole, (len(told["heads"]), B))}
    optional = {name for name in found if name.endswith(("log_weight", "present"))}
    return {name: found[name] for name in found if name in arrays or name not in optional}


def _layer(number: int, told: dict[str, Any], arrays: dict[str, Any], positions: int) -> Any:
    """Return a layer of a cache with these arrays."""
    groups = tuple(
        HeadSlots(tuple(heads), *(arrays.get(f"{i}.{name}") for name in _SLOTS))
        for i, heads in enumerate(told["heads"])
    )
    if "window" in told:
        window = DynamicSlidingWindowLayer(told["window"])
        window.update(groups[0].keys, groups[0].values)
        window.cumulative_length = positions
        return window
    layer = CompressedLayer(number, groups, told["length"])
    if "tail.keys" in arrays:
        layer.tail.append(arrays["tail.keys"], arrays["tail.values"])
    if "renewal" in told:
        more = {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith("renewal.")}
        layer.renewal = Renewal.from_arrays(told["renewal"], more)
    return layer


def _devices(model: Any) -> dict[int, Any]:
    """Return the devices on which the layers of a model compute, by their numbers."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    found: dict[int, Any] = {}
    for module in (decoder or model).modules():
        weight = next(module.parameters(), None)
        if weight is None or not isinstance(getattr(module, "layer_idx", None), int):
            continue
        device = weight.device
        if weight.is_meta:  # accelerate brings the weights
            hooks = [getattr(getattr(part, "_hf_hook", None), "execution_device", None) for part in module.modules()]
            device = next((hook for hook in hooks if hook is not None), inputs_device(model))
        found.setdefault(module.layer_idx, device)
    return found
