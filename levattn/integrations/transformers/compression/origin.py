"""The model that read a context, known by a hash of all its weights once a file needs it."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Origin", "fingerprint"]

_SAMPLES = 64  # entries of each weight that tell whether a model is still the same


class Origin:
    """A weak reference to the model that read a context, and its fingerprint.

    Parameters
    ----------
    model : transformers.PreTrainedModel or None
        The model.
    known : str, optional
        Its fingerprint, if a file gave it.
    """

    def __init__(self, model: Any = None, known: str | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._glimpse = "" if model is None else _hashed(model, _SAMPLES)
        self._known = known

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
    """Return a hash of a model's type, of all its weights and of the frequencies of its positions."""
    return _hashed(model, None)


def _hashed(model: Any, samples: int | None) -> str:
    """Return a hash of all entries, or of about `samples` entries of each array."""
    found = hashlib.sha256(type(model).__name__.encode())
    for name, array in sorted(_arrays(model)):
        flat = array.detach().reshape(-1)
        if samples is not None:
            flat = flat[:: max(1, len(flat) // samples)]
        found.update(f"{name} {tuple(array.shape)} {array.dtype}".encode())
        found.update(flat.contiguous().cpu().view(torch.uint8).numpy())
    for name, module in model.named_modules():
        for figure in ("scaling", "sliding_window", "attn_logit_softcapping"):
            found.update(f"{name} {figure} {getattr(module, figure, None)}".encode())
    return found.hexdigest()


def _arrays(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the array of each weight and buffer, including buffers that no file of the model holds."""
    yield from model.named_parameters()
    yield from model.named_buffers()
