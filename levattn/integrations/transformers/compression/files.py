"""Compressed contexts in files: safetensors, with the fingerprint of the model that read them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch

from levattn._core.checks import needing
from levattn.integrations.transformers.compression.slots import HeadSlots
from levattn.io import replace_file

__all__ = ["read_context", "write_context"]

_FORMAT, _VERSION = "levattn context", 1
_ARRAYS = ("keys", "values", "log_weight", "places")


def write_context(
    path: str | os.PathLike[str],
    groups: Sequence[tuple[HeadSlots, ...]],
    tokens: Any,
    present: Any,
    fingerprint: str,
) -> None:
    """Write what each layer keeps of a context, in one step."""
    with needing("contexts are files of safetensors", "transformers"):
        from safetensors.torch import save
    arrays = {"tokens": tokens, "present": present}
    for layer, mine in enumerate(groups):
        for i, group in enumerate(mine):
            found = {name: getattr(group, name) for name in _ARRAYS}
            arrays |= {f"{layer}.{i}.{name}": array for name, array in found.items() if array is not None}
    heads = [[list(group.heads) for group in mine] for mine in groups]
    head = {"format": _FORMAT, "version": _VERSION, "fingerprint": fingerprint, "heads": heads}
    content = save({name: array.contiguous().cpu() for name, array in arrays.items()}, {"levattn": json.dumps(head)})
    with replace_file(path) as stream:
        stream.write(content)


def read_context(path: str | os.PathLike[str], device: Any) -> tuple[list[tuple[HeadSlots, ...]], Any, Any, str]:
    """Return what each layer keeps, the tokens and which are no padding, and the fingerprint, or raise."""
    with needing("contexts are files of safetensors", "transformers"):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(os.fspath(path), framework="pt", device=str(device)) as file:
            head = json.loads((file.metadata() or {}).get("levattn", "null"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no compressed context, or is damaged: {error}") from error
    if not isinstance(head, dict) or head.get("format") != _FORMAT:
        raise ValueError(f"{path} is no compressed context; expected a file of CompressedCache.save")
    if head.get("version") != _VERSION:
        raise ValueError(f"{path} is of version {head.get('version')!r}, and this release reads {_VERSION}")
    try:
        groups = [
            tuple(
                HeadSlots(tuple(heads), *(arrays.get(f"{layer}.{i}.{name}") for name in _ARRAYS))
                for i, heads in enumerate(mine)
            )
            for layer, mine in enumerate(head["heads"])
        ]
        tokens, present, fingerprint = arrays["tokens"], arrays["present"], str(head["fingerprint"])
        _check(groups, tokens, present)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is a damaged compressed context: {error}") from error
    return groups, tokens, present, fingerprint


def _check(groups: list[tuple[HeadSlots, ...]], tokens: Any, present: Any) -> None:
    """Raise unless arrays that were read have the kinds and shapes that go together."""
    if tokens.ndim != 2 or present.shape != tokens.shape or present.dtype != torch.bool or not groups:
        raise ValueError("its tokens and their mask do not go together")
    for mine in groups:
        heads = sorted(head for group in mine for head in group.heads)
        if not heads or heads != list(range(len(heads))):
            raise ValueError(f"a layer has the heads {heads}")
        for group in mine:
            shape = (tokens.shape[0], len(group.heads), group.keys.shape[2])
            arrays = [group.keys[..., 0], group.values[..., 0], group.places]
            arrays += [] if group.log_weight is None else [group.log_weight]
            if any(array.shape != shape for array in arrays) or not torch.is_floating_point(group.keys):
                raise ValueError(f"an array of the heads {group.heads} has a shape other than {shape}")
