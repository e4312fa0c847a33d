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
    """Return the slots of a layer; a layer that slides has its window."""
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
        groups, positions = held_by(layer), cache.get_seq_length()
        own = {f"{i}.{name}": getattr(group, name) for i, group in enumerate(groups) for name in _SLOTS}
        kept.append({"heads": [group.heads for group in groups], "length": getattr(layer, "length", positions)})
        if layer.is_sliding:
            kept[-1]["window"] = layer.sliding_window
        elif layer.tail.length:
            own["tail.keys"], own["tail.values"] = layer.tail.arrays
        if getattr(layer, "renewal", None) is not None:
            kept[-1]["renewal"], more = layer.renewal.to_arrays(layer.tail.length)
            own |= {f"renewal.{name}": array for name, array in more.items()}
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
        _need(tokens.ndim == 2 and tokens.dtype in (torch.int64, torch.int32), "its tokens are no whole numbers")
        _need((present.dtype, present.shape) == (torch.bool, tokens.shape), "its mask is not of its tokens")
        _need(0 < context <= tokens.shape[1], f"its context has {context} positions")
        _need(bool(present[:, :context].any(1).all()), "a sequence has no positions")
        heads = getattr(model.config.get_text_config(decoder=True), "num_key_value_heads", None)
        windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=model.config).layers]
        _need(
            [told.get("window") for told in head["layers"]] == windows, f"its windows are not the model's, {windows}"
        )
        layers, devices, device = [], _devices(model), inputs_device(model)
        for number, told in enumerate(head["layers"]):
            found = sorted(head for some in told["heads"] for head in some)
            count = heads if isinstance(heads, int) else len(found)
            _need(bool(found) and found == list(range(count)), f"layer {number} has the heads {found}")
            own = {name.partition(".")[2]: arrays[name] for name in arrays if name.startswith(f"{number}.")}
            _check(number, told, own, present[:, :context], head["positions"])
            own = {name: array.to(devices.get(number, device)) for name, array in own.items()}
            layers.append(_layer(number, told, own, head["positions"]))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is a damaged compressed context: {error}") from error
    return layers, tokens.to(device), present.to(device), context, origin


def _digest(head: dict[str, Any], arrays: Mapping[str, Any]) -> str:
    """Return a hash of all that a file holds."""
    found = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
        found.update(array.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _need(fits: bool, otherwise: str) -> None:
    if not fits:
        raise ValueError(otherwise)


def _check(number: int, told: dict[str, Any], arrays: dict[str, Any], present: Any, positions: int) -> None:
    """Raise unless the arrays of a layer fit together, and the context (B, n) and the positions read so far."""
    (B, n), length, window = present.shape, told["length"], told.get("window")
    lengths = range(n, positions + 1) if "renewal" in told else [n if window is None else positions]
    _need(n <= positions and length in lengths, f"layer {number} has slots of {length} of {positions} positions")
    kind, d, D = arrays["0.keys"].dtype, arrays["0.keys"].shape[3], arrays["0.values"].shape[3]
    wanted: dict[str, tuple[Any, tuple[int, ...]]] = {}
    for i, heads in enumerate(told["heads"]):
        slots = (B, len(heads), arrays[f"{i}.keys"].shape[2] if window is None else min(positions, window - 1))
        wanted |= {f"{i}.keys": (kind, (*slots, d)), f"{i}.values": (kind, (*slots, D))}
        wanted |= {f"{i}.places": (torch.int32, slots)}
        if f"{i}.log_weight" in arrays:
            wanted[f"{i}.log_weight"] = torch.float32, slots
    G, tail = sum(map(len, told["heads"])), positions - length
    if tail:
        wanted |= {"tail.keys": (kind, (B, G, tail, d)), "tail.values": (kind, (B, G, tail, D))}
    if "renewal" in told:
        wanted |= {"renewal.queries": (torch.float64, (B * G, d)), "renewal.squares": (torch.float64, (B * G, d, d))}
        wanted |= {"renewal.keys": (torch.float64, (B * G, d)), "renewal.present": (torch.bool, (B, tail))}
        wanted |= {"renewal.counts": (torch.int64, (B,)), "renewal.slots": (torch.int64, (len(told["heads"]), B))}
    for name in sorted(wanted.keys() | arrays.keys()):
        array = arrays[name]
        shown = array.dtype, tuple(array.shape)
        _need(shown == wanted.get(name), f"{number}.{name} is {shown}; expected {wanted.get(name)}")
        finite = array < torch.inf if name.endswith("log_weight") else array.isfinite()
        _need(bool(finite.all()), f"{number}.{name} has numbers that are not finite")
    _need(kind.is_floating_point, f"layer {number} has keys in {kind}")
    counts = present.sum(1)
    if "renewal" in told:
        before, counts, held = counts, arrays["renewal.counts"], arrays["renewal.slots"]
        fits = bool(((before <= counts) & (counts <= length)).all() & (held > 0).all())
        fits = fits and set(told["renewal"]["whole"]) <= set(range(G))
        _need(fits, f"layer {number} counts other heads, slots or positions than it has")
    for i, heads in enumerate(told["heads"]):
        places, weight = arrays[f"{i}.places"], arrays.get(f"{i}.log_weight")
        there = torch.ones(places.shape) if weight is None else weight > -torch.inf
        _need(window is not None or bool(there.any(2).all()), f"the heads {heads} of layer {number} have no slots")
        known = (places >= -1) & (places < counts[:, None, None])
        _need(bool(known.all()), f"layer {number} has slots at positions that the context does not have")


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
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    found: dict[int, Any] = {}
    for module in (decoder or model).modules():
        number, weight = getattr(module, "layer_idx", None), next(module.parameters(), None)
        if isinstance(number, int) and weight is not None:
            hooks = [getattr(getattr(part, "_hf_hook", None), "execution_device", None) for part in module.modules()]
            brought = next((device for device in hooks if device is not None), inputs_device(model))
            found.setdefault(number, brought if weight.is_meta else weight.device)  # accelerate brings weights
    return found
