"""Read a layer that the public code of token statistics transformers has stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from levattn._core.checks import check_type

# Names of this library, and the corresponding names in the public image and language models
_IMAGES = {
    "project.weight": "qkv.weight",
    "project.bias": "qkv.bias",
    "temperature": "temp",
    "out.weight": "to_out.0.weight",
    "out.bias": "to_out.0.bias",
}
_LANGUAGE = {
    "project.weight": "c_attn.weight",
    "project.bias": "c_attn.bias",
    "temperature": "temp",
    "position_bias": "denom_bias",
    "out.weight": "c_proj.weight",
    "out.bias": "c_proj.bias",
}


def read_released(state_dict: Any, prefix: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options and the state dict of the layer whose stored names start with a prefix, or raise."""
    check_type("state_dict", state_dict, Mapping, "a dict of tensors")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix is {prefix!r}; expected a string, e.g. 'blocks.3.attn.'")
    found = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
    layouts = [names for names in (_IMAGES, _LANGUAGE) if names["project.weight"] in found]
    if len(layouts) != 1:
        raise ValueError(
            f"state_dict has {'both' if layouts else 'neither'} of {prefix}qkv.weight and {prefix}c_attn.weight; "
            "expected one of them, for an image or a language model. End a prefix with its dot: "
            "'blocks.3.attn.', 'transformer.h.0.attn.'"
        )
    names = {mine: prefix + theirs for mine, theirs in layouts[0].items()}
    _refuse_unknown(found, layouts[0], prefix)
    needed = [theirs for mine, theirs in names.items() if not mine.endswith(".bias")]
    if missing := [name for name in needed if name not in state_dict]:
        raise ValueError(f"state_dict has no {', '.join(missing)}; expected all weights of a layer")
    tensors = {mine: state_dict[theirs] for mine, theirs in names.items() if theirs in state_dict}
    for mine, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{names[mine]} is no tensor of floats; expected weights that the released code stored")
    _refuse_misshapen(tensors, names)
    # The released temperatures and position biases have a last axis, which broadcasts along channels
    tensors = {mine: t[..., 0] if mine in ("temperature", "position_bias") else t for mine, t in tensors.items()}
    places = tensors.get("position_bias")
    options = {
        "dim": int(tensors["project.weight"].shape[1]),
        "heads": len(tensors["temperature"]),
        "causal": layouts[0] is _LANGUAGE,
        "positions": None if places is None else int(places.shape[1]),
        "bias": "project.bias" in tensors,
        "out_bias": "out.bias" in tensors,
    }
    return options, tensors


def _refuse_unknown(found: dict[str, Any], layout: dict[str, str], prefix: str) -> None:
    if unknown := sorted(set(found) - set(layout.values())):
        shown = ", ".join(prefix + name for name in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        raise ValueError(
            f"state_dict has {shown}, which is not of a layer of token statistics; expected, after the prefix, "
            f"{', '.join(layout.values())} alone"
        )


def _refuse_misshapen(tensors: dict[str, Any], names: dict[str, str]) -> None:
    dim = tensors["project.weight"].shape[-1] if tensors["project.weight"].ndim else 0
    temperature = tensors["temperature"]
    heads = len(temperature) if temperature.ndim else 0
    places = tensors.get("position_bias")
    expected = {
        "project.weight": (dim, dim),
        "project.bias": (dim,),
        "temperature": (heads, 1),
        "position_bias": (heads, places.shape[1] if places is not None and places.ndim > 1 else 0, 1),
        "out.weight": (dim, dim),
        "out.bias": (dim,),
    }
    for mine, tensor in tensors.items():
        if tuple(tensor.shape) != expected[mine] or not tensor.numel():
            raise ValueError(
                f"{names[mine]} has shape {tuple(tensor.shape)}; expected {expected[mine]}, with dim = {dim} as "
                f"{names['project.weight']} and {heads} heads as {names['temperature']} have"
            )
