"""Token statistics attention as an operator of torch, with gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from levattn._core.arrays import without_wrappers
from levattn._kernels.dispatch import kernels_for
from levattn._kernels.tensors import (
    AttentionOperator,
    follows_definition,
    has_kernels,
    is_plain,
    laid_out,
    like_of_kernels,
)
from levattn._kernels.tokens import TokenArguments, TokenOperators, TokenSums, definition


def forward(x: TokenArguments, *, state: bool = False) -> tuple[Any, TokenSums | None]:
    """Return the output (b, h, T, d), and if `state` the sums after all tokens as arrays of the kernels."""
    tensors, sums = (x.W, x.temperature, x.offset), None
    if state:
        held = STATISTICS.in_memory(x)
        Y, sums = _table(held).forward(held, state=True)
        if has_kernels(x.W) and is_plain(tensors):
            return laid_out(Y), sums
    if follows_definition(tensors):
        kind = x.temperature.dtype
        # products of gradients of float32 may leave its range; not every other device has float64
        wide = torch.float64 if has_kernels(x.W) else kind
        W, temperature, offset = (part if part is None else part.to(wide) for part in tensors)
        held = replace(STATISTICS.in_tensors(x), W=W, temperature=temperature, offset=offset)
        return definition.forward(held)[0].to(kind), sums
    return STATISTICS.computed(x) if is_plain(tensors) else STATISTICS(x), sums


def memberships(x: TokenArguments) -> Any:
    """Return the memberships (b, h, T), without a gradient."""
    given = (x.W, x.temperature, x.offset, x.mask)
    W, temperature, offset, mask = (x if x is None else without_wrappers(x.detach()) for x in given)
    held = STATISTICS.in_memory(replace(x, W=W, temperature=temperature, offset=offset, mask=mask))
    return laid_out(_table(held).memberships(held))


def _table(x: TokenArguments) -> TokenOperators:
    """Return the kernels that read arguments in memory, by default the definition."""
    return definition if isinstance(x.W, torch.Tensor) else kernels_for("tokens", x.W)


STATISTICS = AttentionOperator(
    "token_statistics_attention",
    "tokens",
    TokenArguments,
    ("W", "temperature", "offset"),
    4,
    lambda x: like_of_kernels(x.W),
)
