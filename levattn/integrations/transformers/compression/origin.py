"""The model that read a context, known by a hash of all its weights once a file needs it."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_SAMPLES = 64  # entries of each weight that tell whether a model is still the same
_FIGURES = {  # of modules: of attention, of norms, and of the adapters of PEFT
    "scaling",
    "sliding_window",
    "attn_logit_softcapping",
    "variance_epsilon",
    "eps",
    "_active_adapter",
    "_disable_adapters",
    "merged_adapters",
}
_HARMLESS = {  # entries of configs that no key depends on
    "_attn_implementation",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "tie_word_embeddings",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "use_cache",
}


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
        self._model: Any = weakref.ref(_base(model))
        self._state = _state(model)
        self._glimpse = _hashed(model, _SAMPLES) if known is None else ""
        self._known = known

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None}

    def check(self, model: Any) -> None:
        """Raise unless a model is the one that read the context, or a copy of it."""
        own, base = None if self._model is None else self._model(), _base(model)
        if own is base:
            same = _state(model) == self._state
        else:
            same = fingerprint(model) == self._known if self._known else _hashed(model, _SAMPLES) == self._glimpse
        if not same:
            raise ValueError(
                f"the cache was made with another model than this {type(model).__name__}, or with other weights or "
                "adapters; expected that model. Compress the context with this one"
            )
        if own is not base:
            self._model = weakref.ref(base)

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
        found = fingerprint(model)
        if found == known:
            return
        kinds, kinds_there = (text.partition(":")[2] for text in (found, known))
        if kinds != kinds_there:
            raise ValueError(
                f"{path} was made with a model in {kinds_there or 'another dtype'}, and this {type(model).__name__} "
                f"is in {kinds}; expected the same dtype. Load the model in that dtype, or compress the context again"
            )
        raise ValueError(
            f"{path} was made with another model, or another revision, config or adapter, than this "
            f"{type(model).__name__}; expected the same. Load that model, or compress the context with this one"
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
            self._known = fingerprint(model)
        return self._known


def fingerprint(model: Any) -> str:
    """Return a hash of all that keys depend on: weights, config and active adapters; and the dtypes after a colon."""
    kinds = sorted({str(array.dtype).partition(".")[2] for array in model.parameters()})
    return f"{_hashed(model, None)}:{' and '.join(kinds)}"


def _base(model: Any) -> Any:
    """Return the part of a model that makes keys: a head above it makes none."""
    return getattr(model, "base_model", model)


def _hashed(model: Any, samples: int | None) -> str:
    """Return a hash of all entries, or of about `samples` entries of each array."""
    model = _base(model)
    found = hashlib.sha256(type(model).__name__.encode())
    found.update(_figures(model.config.to_dict()).encode())
    found.update(_state(model).encode())
    changing = changing_positions(model) is not None
    for name, module in sorted(model.named_modules(), key=lambda pair: pair[0]):
        with _there(module):
            for own, array in sorted(_arrays(module, changing)):
                flat = array.detach().reshape(-1)
                if samples is not None:
                    flat = flat[:: max(1, len(flat) // samples)]
                found.update(f"{name}.{own} {tuple(array.shape)} {array.dtype}".encode())
                found.update(flat.contiguous().cpu().view(torch.uint8).numpy())
    return found.hexdigest()


def _state(model: Any) -> str:
    """Return the figures of all modules of a model as text, and so which adapters are active."""
    found = []
    for name, module in _base(model).named_modules():
        own = vars(module)
        for figure in own.keys() & _FIGURES:
            value = own[figure]
            value = [value] if isinstance(value, str) else value  # one adapter may be a name or a list
            if value and isinstance(value, bool | int | float | list | dict):
                found.append(f"{name} {figure} {value}")
    return "\n".join(sorted(found))


def _there(module: Any) -> AbstractContextManager[Any]:
    """Bring the weights of a module from where accelerate keeps them."""
    if not any(array.is_meta for array in module.parameters(recurse=False)):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)  # type: ignore[no-any-return]


def _arrays(module: Any, changing: bool) -> Iterator[tuple[str, Any]]:
    """Yield the name and the array of each weight and buffer of a module.

    changing: whether buffers that are in no file of the model depend on earlier inputs.
    """
    yield from module.named_parameters(recurse=False)
    for name, array in module.named_buffers(recurse=False):
        if not (changing and name in module._non_persistent_buffers_set):
            yield name, array


def changing_positions(model: Any) -> str | None:
    """Return the kind of a model's rotary positions if they change with the length of an input, or None."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [part for part in (rope, *rope.values()) if isinstance(part, Mapping)]  # one for each type of layer
    found = [part.get("rope_type", part.get("type")) for part in kinds]
    return next((str(kind) for kind in found if kind in ("dynamic", "longrope")), None)


def _figures(config: Any) -> str:
    """Return the entries of a config that may change keys, as text."""
    if isinstance(config, dict):
        kept = sorted((str(name), value) for name, value in config.items() if str(name) not in _HARMLESS)
        return "{" + ", ".join(f"{name}: {_figures(value)}" for name, value in kept if value is not None) + "}"
    return repr(config)
