"""Compressed contexts in files, and the model that read a context, known by a hash of all its weights."""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from levattn._core.checks import needing, whole_number
from levattn._core.files import checked_path, replace_file
from levattn.integrations.transformers.calls import inputs_device
from levattn.integrations.transformers.compression.coding import BITS, Coded
from levattn.integrations.transformers.compression.layer import CompressedLayer, Renewal
from levattn.integrations.transformers.compression.slots import HeadSlots

_FORMAT, _VERSION = "levattn context", 6
_SLOTS = ("log_weight", "places", "residuals")  # beside keys and values
_DTYPES = torch.float64, torch.float32, torch.float16, torch.bfloat16
_CODES = ("codes", "lows", "steps", "sizes", "means")
_MANY = 1 << 20  # more heads than any layer has
_SAMPLES = 64  # entries of each weight that tell whether a model is still the same
_FIGURES = {  # of modules: of attention, of norms, and of the adapters of PEFT
    *("scaling", "sliding_window", "attn_logit_softcapping", "variance_epsilon", "eps"),
    *("_active_adapter", "_disable_adapters", "merged_adapters"),
}
_HARMLESS = {  # entries of configs that no key depends on: names, ways to compute, outputs, tokens, tasks and training
    *("_commit_hash", "_name_or_path", "architectures", "name_or_path", "transformers_version"),
    *("_attn_implementation", "attn_implementation", "chunk_size_feed_forward", "dtype", "torch_dtype", "torchscript"),
    *("cache_implementation", "output_attentions", "output_hidden_states", "return_dict", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"),
    *("id2label", "initializer_range", "label2id", "problem_type"),
}


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
        own = {f"{i}.{name}": array for i, group in enumerate(groups) for name, array in _arrays_of(group)}
        kept.append({"heads": [group.heads for group in groups], "length": getattr(layer, "length", positions)})
        rows = groups[0].keys, groups[0].values
        kept[-1] |= {"bits": [group.bits for group in groups], "dtype": str(rows[0].dtype).partition(".")[2]}
        kept[-1]["widths"] = [int(array.shape[-1]) for array in rows]
        if layer.is_sliding:
            kept[-1]["window"] = layer.sliding_window
        else:
            own["present"] = layer.present
        if not layer.is_sliding and layer.tail.length:
            own["tail.keys"], own["tail.values"] = layer.tail.arrays
        if getattr(layer, "renewal", None) is not None:
            kept[-1]["renewal"], more = layer.renewal.to_arrays(layer.tail.length)
            own |= {f"renewal.{name}": array for name, array in more.items()}
        arrays |= {f"{number}.{name}": array for name, array in own.items() if array is not None}
    whole = {"copy": True, "memory_format": torch.contiguous_format}  # because safetensors takes no shared memory
    there = {name: array.detach().to("cpu", **whole) for name, array in arrays.items()}
    head = {"format": _FORMAT, "version": _VERSION, "fingerprint": cache.origin.fingerprint(), "layers": kept}
    head |= {"context": cache.context_length, "positions": cache.get_seq_length()}
    content = save(there, {"levattn": json.dumps({**head, "digest": _digest(head, there)})})
    with replace_file(path) as stream:
        stream.write(content)


def _arrays_of(group: HeadSlots) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of slots by their names."""
    for name in ("keys", "values"):
        rows = getattr(group, name)
        if isinstance(rows, Coded):
            yield from ((f"{name}.{part}", getattr(rows, part)) for part in _CODES)
        else:
            yield name, rows
    yield from ((name, getattr(group, name)) for name in _SLOTS)


def read_context(path: str | os.PathLike[str], model: Any) -> tuple[list[Any], Any, Any, int, Origin]:
    """Return the layers, the tokens, their padding mask, the length of the context and its model, or raise."""
    with needing("contexts are files of safetensors", "transformers"):
        from safetensors import SafetensorError, safe_open
    file_name = os.fspath(checked_path(path))
    try:
        with safe_open(file_name, framework="pt") as file:
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
        tokens, present, context = arrays["tokens"], arrays["present"], whole_number("context", head["context"])
        _need(tokens.ndim == 2 and tokens.dtype in (torch.int64, torch.int32), "its tokens are no whole numbers")
        _need((present.dtype, present.shape) == (torch.bool, tokens.shape), "its mask is not of its tokens")
        _need(0 < context <= tokens.shape[1], f"its context has {context} positions")
        _need(bool(present[:, :context].any(1).all()), "a sequence has no positions")
        config = model.config.get_text_config(decoder=True)
        heads, queries = (getattr(config, f"num_{kind}_heads", None) for kind in ("key_value", "attention"))
        windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=model.config).layers]
        _need(
            [told.get("window") for told in head["layers"]] == windows, f"its windows are not the model's, {windows}"
        )
        layers, devices, device = [], _devices(model), inputs_device(model)
        for number, told in enumerate(head["layers"]):
            found = sorted(head for some in told["heads"] for head in some)
            count = heads if isinstance(heads, int) else len(found)
            whole = bool(found) and {*map(type, found)} == {int}
            _need(whole and found == list(range(count)), f"layer {number} has the heads {found}")
            own = {name.partition(".")[2]: arrays[name] for name in arrays if name.startswith(f"{number}.")}
            _check(number, told, own, present[:, :context], head["positions"])
            asked = own.get("renewal.asked")
            fits = asked is None or not isinstance(queries, int) or asked.shape[1] == queries
            _need(fits, f"layer {number} has queries of other heads")
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
    (B, n), length, window = present.shape, whole_number("length", told["length"], 0), told.get("window")
    lengths = range(n, positions + 1) if "renewal" in told else [n if window is None else positions]
    _need(n <= positions and length in lengths, f"layer {number} has slots of {length} of {positions} positions")
    kind, bits = _dtype(told), told["bits"]
    _need(len(bits) == len(told["heads"]) and set(bits) <= set(BITS), f"layer {number} has codes of {bits} bits")
    d, D = (whole_number("widths", width) for width in told["widths"])
    _need(max(d, D) <= _MANY, f"layer {number} has rows of {d} and {D} entries")
    wanted: dict[str, tuple[Any, tuple[int, ...]]] = {}
    for i, heads in enumerate(told["heads"]):
        slots = (B, len(heads), arrays[f"{i}.places"].shape[2] if window is None else min(positions, window - 1))
        wanted |= _rows_wanted(f"{i}.keys", kind, (*slots, d), bits[i], columns=True)
        wanted |= _rows_wanted(f"{i}.values", kind, (*slots, D), bits[i], columns=False)
        wanted[f"{i}.places"] = torch.int32, slots
        if f"{i}.log_weight" in arrays:
            wanted[f"{i}.log_weight"] = torch.float32, slots
        if f"{i}.residuals" in arrays:
            wanted[f"{i}.residuals"] = torch.float32, slots[:2]
    G, tail = sum(map(len, told["heads"])), positions - length
    if window is None:
        wanted["present"] = torch.bool, (B, length)
    if tail:
        wanted |= {"tail.keys": (kind, (B, G, tail, d)), "tail.values": (kind, (B, G, tail, D))}
    if "renewal" in told:
        wide, moments = torch.float64, (B, G, d)
        wanted |= {"renewal.queries": (wide, moments), "renewal.squares": (wide, (*moments, d))}
        wanted |= {"renewal.keys": (wide, moments), "renewal.present": (torch.bool, (B, tail))}
        wanted["renewal.slots"] = torch.int64, (len(told["heads"]), B)
        asked = arrays.get("renewal.asked")
        if asked is not None:
            wanted["renewal.asked"] = asked.dtype, (B, asked.shape[1] // G * G, tail, d)
    for name in sorted(wanted.keys() | arrays.keys()):
        array = arrays[name]
        shown = array.dtype, tuple(array.shape)
        _need(shown == wanted.get(name), f"{number}.{name} is {shown}; expected {wanted.get(name)}")
        finite = array < torch.inf if name.endswith("log_weight") else array.isfinite()
        finite |= array.isnan() & name.endswith("residuals")  # not measured
        _need(bool(finite.all()), f"{number}.{name} has numbers that are not finite")
    known = arrays.get("present", present)
    _need(torch.equal(known[:, :n], present), f"layer {number} has another context")
    if "renewal" in told:
        fits = bool((arrays["renewal.slots"] > 0).all()) and set(told["renewal"]["whole"]) <= set(range(G))
        counts = told["renewal"]["seen"]  # of queries, of which some are left out, and of keys
        fits = fits and [count for _, count in counts] == known.sum(1).tolist()
        fits = fits and len(told["renewal"]["splits"]) == len(told["heads"])
        fits = fits and all(asked <= _MANY * length for asked, _ in counts)
        _need(fits, f"layer {number} counts other heads, slots or keys than it has")
    for i, heads in enumerate(told["heads"]):
        places, weight = arrays[f"{i}.places"], arrays.get(f"{i}.log_weight")
        there = torch.ones(places.shape) if weight is None else weight > -torch.inf
        _need(window is not None or bool(there.any(2).all()), f"the heads {heads} of layer {number} have no slots")
        held = (places >= -1) & (places < known.sum(1)[:, None, None])
        _need(bool(held.all()), f"layer {number} has slots at positions that the context does not have")


def _dtype(told: dict[str, Any]) -> Any:
    """Return the dtype of keys that a file tells, or raise."""
    kind = getattr(torch, str(told["dtype"]), None)
    _need(kind in _DTYPES, f"its keys are in {told['dtype']!r}")
    return kind


def _rows_wanted(
    name: str, kind: Any, shape: tuple[int, ...], bits: int, *, columns: bool
) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return the dtypes and shapes of the arrays of keys or values."""
    if bits == 16:
        return {name: (kind, shape)}
    found = Coded.of(torch.zeros((1, shape[-1]), dtype=kind), bits, columns=columns)
    wanted = {}
    for part in _CODES[: None if columns else -2]:
        array, rows = getattr(found, part), 1 if part in _CODES[-2:] else shape[-2]
        wanted[f"{name}.{part}"] = array.dtype, (*shape[:-2], rows, array.shape[-1])
    return wanted


def _layer(number: int, told: dict[str, Any], arrays: dict[str, Any], positions: int) -> Any:
    """Return a layer of a cache with these arrays."""
    kind = _dtype(told)

    def rows(name: str, width: int, bits: int) -> Any:
        if bits == 16:
            return arrays[name]
        codes = {part: arrays.get(f"{name}.{part}") for part in _CODES}
        return Coded(**codes, width=width, dtype=kind, bits=bits)

    groups = tuple(
        HeadSlots(
            tuple(heads),
            *(rows(f"{i}.{name}", told["widths"][j], told["bits"][i]) for j, name in enumerate(("keys", "values"))),
            *(arrays.get(f"{i}.{name}") for name in _SLOTS),
        )
        for i, heads in enumerate(told["heads"])
    )
    if "window" in told:
        window = DynamicSlidingWindowLayer(told["window"])
        window.update(groups[0].keys, groups[0].values)
        window.cumulative_length = positions
        return window
    layer = CompressedLayer(number, groups, arrays["present"])
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


# -- the model -------------------------------------------------------------------------------------------------------


class Origin:
    """A weak reference to the model that read a context, and its fingerprint.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model, or the one that loads a file.
    known : str, optional
        The fingerprint, if a file gave it.
    """

    def __init__(self, model: Any, known: str | None = None) -> None:
        self._model: Any = weakref.ref(base_of(model))
        self._state, self._marks = _state(model), _marks(model)
        self._glimpse = _hashed(model, _SAMPLES) if known is None else ""
        self._known = known

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None}

    def check(self, model: Any) -> None:
        """Raise unless a model is the one that read the context, or a copy of it."""
        own, base = None if self._model is None else self._model(), base_of(model)
        marks = _marks(model)
        same = own is base and _state(model) == self._state
        if own is not base or (same and marks != self._marks):
            same = _fingerprint(model) == self._known if self._known else _hashed(model, _SAMPLES) == self._glimpse
        if not same:
            raise ValueError(
                f"the cache was made with another model than this {type(model).__name__}, or with other weights or "
                "adapters, another dtype or config; expected that model. Compress the context with this one"
            )
        self._model, self._marks = weakref.ref(base), marks

    def check_attention(self) -> None:
        """Raise if the model has an attention that cannot read slots."""
        model = None if self._model is None else self._model()
        config = None if model is None else model.config.get_text_config(decoder=True)
        kind = str(getattr(config, "_attn_implementation", None))
        if "flex" in kind or "flash" in kind:
            raise ValueError(
                f"the {type(model).__name__} has the attention {kind!r}; expected 'sdpa' or 'eager', which read "
                "compressed contexts. Call model.set_attn_implementation('sdpa')"
            )

    def check_file(self, path: Any) -> None:
        """Raise unless the model has the fingerprint of a file."""
        model, known = self._model(), str(self._known)
        found, name = _fingerprint(model), type(model).__name__
        kind, kind_there = (text.partition(":")[2] for text in (found, known))
        if kind != kind_there:
            raise ValueError(
                f"{path} was made with a model in {kind_there or 'another dtype'}, and this {name} is in {kind}; "
                "expected the same dtype. Load the model in that dtype, or compress the context again"
            )
        if found != known:
            raise ValueError(
                f"{path} was made with another model, or another revision, config or adapter, than this {name}; "
                "expected the same. Load that model, or compress the context with this one"
            )

    def fingerprint(self) -> str:
        """Return the fingerprint of the model, or raise if it is gone or changed since it read the context."""
        if self._known is None:
            model = None if self._model is None else self._model()
            if model is None:
                raise ValueError(
                    "the model that made the cache is gone; expected it in memory, because a file identifies it by "
                    "its weights. Save before the model is deleted"
                )
            if _hashed(model, _SAMPLES) != self._glimpse:
                raise ValueError(
                    f"the weights of the {type(model).__name__} changed after it read the context; expected the "
                    "weights that made the cache. Compress the context again"
                )
            self._known = _fingerprint(model)
        return self._known


def changing_positions(model: Any) -> str | None:
    """Return the kind of a model's rotary positions if they change with the length of an input, or None."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [part for part in (rope, *rope.values()) if isinstance(part, Mapping)]  # one for each type of layer
    found = [part.get("rope_type", part.get("type")) for part in kinds]
    return next((str(kind) for kind in found if kind in ("dynamic", "longrope")), None)


def base_of(model: Any) -> Any:
    """Return the part of a model that makes keys: a head above it makes none."""
    return getattr(model, "base_model", model)


def _fingerprint(model: Any) -> str:
    """Return a hash of all that keys depend on: weights, config and active adapters; and the dtypes after a colon."""
    kinds = sorted({str(array.dtype).partition(".")[2] for array in model.parameters()})
    return f"{_hashed(model, None)}:{' and '.join(kinds)}"


def _hashed(model: Any, samples: int | None) -> str:
    """Return a hash of all entries, or of about `samples` entries of each array."""
    model = base_of(model)
    found = hashlib.sha256(type(model).__name__.encode())
    found.update(_entries(model.config.to_dict()).encode())
    found.update(_state(model).encode())
    changing = changing_positions(model) is not None
    for name, module in sorted(model.named_modules(), key=lambda pair: pair[0]):
        with weights_there(module):
            arrays = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for own, array in sorted(arrays, key=lambda pair: pair[0]):
                if changing and own in module._non_persistent_buffers_set:
                    continue  # in no file of the model, and dependent on earlier inputs
                flat = array.detach().reshape(-1)
                if samples is not None:
                    flat = flat[:: max(1, len(flat) // samples)]
                found.update(f"{name}.{own} {tuple(array.shape)} {array.dtype}".encode())
                found.update(flat.contiguous().cpu().view(torch.uint8).numpy())
    return found.hexdigest()


def _marks(model: Any) -> Any:
    """Return marks of the weights and the config of a model: any change is seen, but for one through ``.data``."""
    weights = list(model.parameters())
    versions = [0 if array.is_inference() else array._version for array in weights]
    return [array.data_ptr() for array in weights], versions, _entries(model.config.to_dict())


def _state(model: Any) -> str:
    """Return the figures of all modules of a model as text, and so which adapters are active."""
    found = []
    for name, module in base_of(model).named_modules():
        own = vars(module)
        for figure in own.keys() & _FIGURES:
            value = own[figure]
            value = [value] if isinstance(value, str) else value  # one adapter may be a name or a list
            if value and isinstance(value, bool | int | float | list | dict):
                found.append(f"{name} {figure} {value}")
    return "\n".join(sorted(found))


def weights_there(module: Any) -> AbstractContextManager[Any]:
    """Bring the weights of a module from where accelerate keeps them."""
    if not any(array.is_meta for array in module.parameters(recurse=False)):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)  # type: ignore[no-any-return]


def _entries(config: Any) -> str:
    """Return the entries of a config that may change keys, as text."""
    if isinstance(config, dict):
        if config.get("quant_method") == "gguf":  # only names a file, whose weights are hashed
            return ""
        kept = sorted((str(name), value) for name, value in config.items() if str(name) not in _HARMLESS)
        kept = [(name, value) for name, value in kept if value is not None and _entries(value)]
        return "{" + ", ".join(f"{name}: {_entries(value)}" for name, value in kept) + "}"
    return repr(config)
