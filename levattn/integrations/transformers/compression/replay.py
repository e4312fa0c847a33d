"""Passes of a decoder that begin at a layer: the layers before it repeat their recorded outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from levattn.integrations.transformers.discovery import attention_modules


class Replay:
    """The recorded outputs of a decoder's layers for some tokens; a changed layer costs only the layers from it on.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder.
    """

    def __init__(self, model: Any) -> None:
        self._layers = _layers(model)
        self._outputs: dict[int, Any] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the outputs of the layers in the pass made meanwhile."""

        def note(number: int) -> Any:
            return lambda _module, _args, output: self._outputs.__setitem__(number, output)

        hooks = [layer.register_forward_hook(note(number)) for number, layer in self._layers.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def begun_at(self, first: int) -> Iterator[None]:
        """Let the layers before the given one return their recorded outputs instead of computing."""
        early = {number: layer for number, layer in self._layers.items() if number < first}
        own = {number: vars(layer).get("forward") for number, layer in early.items()}  # accelerate sets one
        for number, layer in early.items():
            layer.forward = lambda *_, output=self._outputs[number], **__: output
        try:
            yield
        finally:
            for number, layer in early.items():
                del layer.forward
                if own[number] is not None:
                    layer.forward = own[number]


def _layers(model: Any) -> dict[int, Any]:
    """Return the layers of a decoder by number: items of a ``ModuleList`` that hold an attention."""
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for attention in attention_modules(model):
        number, name = getattr(attention, "layer_idx", None), names[id(attention)]
        if number is None:
            continue
        while name:
            above, _, _ = name.rpartition(".")
            if isinstance(model.get_submodule(above), nn.ModuleList):
                found[number] = model.get_submodule(name)
                break
            name = above
    return found
