"""What all layers ask of their arguments."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["check_input", "whole_number"]


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Return an argument that is a whole number, or raise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; expected a whole number")
    if value < least:
        raise ValueError(f"{name} is {value}; expected at least {least}")
    return value


def check_input(dim: int, x: Any, mask: Any, offsets: Any, cache: Any) -> None:
    """Raise unless the arguments of a call go with a layer and with one another."""
    if x.ndim != 3 or x.shape[2] != dim:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected (B, T, {dim})")
    if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != tuple(x.shape[:2])):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; expected {tuple(x.shape[:2])} and "
            "torch.bool, True for a position that takes part"
        )
    if cache is not None and offsets is not None:
        raise ValueError("cache and offsets were both given; expected one of them: a cache is of unpacked sequences")
