"""Mixtures of pruned attention at random, of numpy and of torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from levattn._kernels.pruned import PrunedArguments, Summaries, mapped


def summaries(rng: Any, b: int, R: int, d: int, D: int, dtype: str, *, plain: bool = False) -> Summaries:
    """Summaries of some keys each, the last without any."""
    count = rng.integers(1, 9, (b, R)).astype(dtype)
    weight = count if plain else count * rng.uniform(0.5, 2.0, (b, R))
    keys, values = (rng.standard_normal((b, R, n)) * weight[..., None] for n in (d, D))
    offset = np.zeros((b, R)) if plain else weight * rng.standard_normal((b, R)) / 4
    parts = [part.astype(dtype) for part in (weight, keys, values, offset, count)]
    if R:
        for part in parts:
            part[:, -1] = 0
    return Summaries(*parts)


def mixture(
    dtype: str = "float64",
    *,
    b: int = 2,
    g: int = 1,
    m: int = 61,
    n: int = 61,
    d: int = 7,
    D: int = 5,
    s: int = 11,
    R: int = 6,
    window: int = 4,
    counted: bool = False,
    labeled: bool = True,
    power: float | None = None,
    seed: int = 0,
) -> PrunedArguments:
    rng = np.random.default_rng(seed)
    q, keys, values, kept, kept_values = (
        rng.standard_normal(shape).astype(dtype)
        for shape in ((b, g, m, d), (b, n, d), (b, n, D), (b, s, d), (b, s, D))
    )
    held, role, log_weight = None, None, None
    if R:
        held = summaries(rng, b, R, d, D, dtype, plain=power is not None)
    if labeled:
        role = rng.integers(-2, R, (b, n))
    if R and labeled:
        # a summary must have the members that are near: all of them, and others
        assert held is not None
        assert role is not None
        log_weight = (np.zeros((b, n)) if power is not None else rng.uniform(-1, 1, (b, n))).astype(dtype)
        w, inside = np.exp(log_weight), role[..., None] == np.arange(R)
        for c in range(R):
            share = w * inside[..., c]
            held.weight[:, c] += share.sum(1)
            held.keys[:, c] += (share[..., None] * keys).sum(1)
            held.values[:, c] += (share[..., None] * values).sum(1)
            held.offset[:, c] += (share * log_weight).sum(1)
            held.count[:, c] += inside[..., c].sum(1)
    at = np.arange(m)
    first, last = (np.maximum(at - window, 0), np.minimum(at + window + 1, n)) if window else (0 * at, 0 * at)
    count = rng.integers(0, s + 1, b) if counted else None
    return PrunedArguments(
        q, kept, kept_values, count, held, keys, values, first.tolist(), last.tolist(), role, log_weight, power
    )


def of_torch(x: PrunedArguments, dtype: str = "float64") -> PrunedArguments:
    """The same of tensors, of numbers that a dtype has, which products of 16 bits are asked for if it has so many."""
    import torch

    kind = getattr(torch, dtype)
    wide = torch.promote_types(kind, torch.float32)

    def tensor(array: Any) -> Any:
        found = torch.from_numpy(np.ascontiguousarray(array))
        return found.to(kind).to(wide) if found.is_floating_point() else found

    x = (
        mapped(replace(x, summaries=None), tensor)
        if x.summaries is None
        else replace(
            mapped(replace(x, summaries=None), tensor),
            summaries=mapped(x.summaries, lambda array: torch.from_numpy(array).to(wide)),
        )
    )
    return x if kind == wide else replace(x, q=x.q / 2, narrow=(kind, 0.5))


def as_wide(x: PrunedArguments) -> PrunedArguments:
    return replace(mapped(x, lambda array: array.double() if array.is_floating_point() else array), narrow=None)
