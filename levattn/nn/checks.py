"""Checks of arguments that layers share, and their projections."""

from __future__ import annotations

from typing import Any

import torch

from levattn._core.checks import check_type, whole_number


def split_in_heads(dim: Any, heads: Any, kv_heads: Any = None) -> tuple[int, int, int]:
    """Return the numbers of channels, heads, and heads of keys and values (None: as many as heads), or raise."""
    channels, count = whole_number("dim", dim), whole_number("heads", heads)
    if channels % count:
        raise ValueError(f"dim is {dim} and heads is {heads}; expected a multiple of heads")
    groups = count if kv_heads is None else whole_number("kv_heads", kv_heads)
    if count % groups:
        raise ValueError(f"heads is {heads} and kv_heads is {kv_heads}; expected a multiple of kv_heads")
    return channels, count, groups


def refuse_bidirectional(causal: bool) -> None:
    """Raise unless a layer is causal and can decode."""
    if not causal:
        raise ValueError("the layer has causal=False, so it cannot decode position by position; make it causal=True")


def refuse_repeated() -> None:
    """Raise for a call with a cache within a backward pass, in which torch's checkpoints repeat calls."""
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise ValueError(
            "cache was given within a backward pass, where torch.utils.checkpoint repeats the call and advances the "
            "cache again; expected no cache in a checkpoint. Call the layer with its cache outside the checkpoint"
        )


def projection(dim: int, width: int, *, bias: bool = False, std: float | None = None, **factory: Any) -> Any:
    """Return a linear map with normal initial weights (of deviation 1/√dim if `std` is None) and zero biases."""
    linear = torch.nn.Linear(dim, width, bias=bool(bias), **factory)
    torch.nn.init.normal_(linear.weight, std=dim**-0.5 if std is None else std)
    if bias:
        torch.nn.init.zeros_(linear.bias)
    return linear


def check_sequence(dim: int, x: Any) -> None:
    """Raise unless the input of a layer is a batch of sequences."""
    check_type("x", x, torch.Tensor, "a tensor of torch")
    if x.ndim != 3 or x.shape[2] != dim:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected (B, T, {dim})")


def check_input(dim: int, x: Any, mask: Any, offsets: Any, cache: Any, kind: type) -> None:
    """Raise unless the arguments of a call match the layer and each other; `kind` is the class of its caches."""
    check_type("cache", cache, kind | None, f"a {kind.__name__}, as new_cache of the layer returns")
    check_sequence(dim, x)
    check_type("mask", mask, torch.Tensor | None, "a tensor of torch")
    if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != tuple(x.shape[:2])):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; expected {tuple(x.shape[:2])} and "
            "torch.bool, True for a position that takes part"
        )
    if cache is not None and offsets is not None:
        raise ValueError("cache and offsets were both given; expected one of them: a cache is for unpacked sequences")


def check_positions(x: Any, positions: Any, *, read: bool) -> None:
    """Raise unless positions match the input; `read`: whether the layer reads them."""
    if positions is None:
        return
    if not read:
        raise ValueError(
            "positions was given and no part of the layer reads positions; leave it out, or make the layer with "
            "vapor, rope or position biases"
        )
    check_type("positions", positions, torch.Tensor, "a tensor of torch")
    if tuple(positions.shape) not in (tuple(x.shape[1:2]), tuple(x.shape[:2])):
        raise ValueError(
            f"positions has shape {tuple(positions.shape)}; expected {tuple(x.shape[1:2])} or {tuple(x.shape[:2])}"
        )
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(f"positions has dtype {positions.dtype}; expected whole numbers")
