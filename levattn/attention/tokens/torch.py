"""Leverage scores of torch tensors with gradients, for the membership "leverage" of token statistics attention."""

from __future__ import annotations

from typing import Any

import torch

from levattn._kernels.tensors import has_tangent, hidden_by
from levattn.sensitivity.leverage import leverage_scores


def leverage(W: Any, mask: Any) -> Any:
    """Return the leverage scores (b, h, T) of the tokens (b, h, T, d) that `mask` (b, 1, T) flags."""
    what = hidden_by([W] if mask is None else [W, mask])
    if what is None and has_tangent([W]):
        what = "forward-mode differentiation"
    if what is not None:
        raise NotImplementedError(
            f"membership is 'leverage' under {what}, where these scores cannot be computed; expected another "
            "membership, or your own scores as membership"
        )
    there = None if mask is None else mask.expand(W.shape[:3])
    return _Leverage.apply(W, there) if torch.is_grad_enabled() and W.requires_grad else _scores(W, there)


def _scores(W: Any, mask: Any) -> Any:
    return leverage_scores(W.detach(), mask=mask)


class _Leverage(torch.autograd.Function):  # type: ignore[misc]
    """Leverage scores, with the gradient ``2 (I − P) diag(e) W⁺ᵀ``, where P projects to the columns of W."""

    @staticmethod
    def forward(W: Any, mask: Any) -> Any:
        return _scores(W, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, Any], output: Any) -> None:  # noqa: ARG004 (torch names it)
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, e: Any) -> tuple[Any, None]:
        W, mask = ctx.saved_tensors
        if not W.numel():
            return torch.zeros_like(W), None
        X = W.double()
        if mask is not None:
            X, e = X.where(mask[..., None], X.new_zeros(())), e.where(mask, e.new_zeros(()))
        sizes = torch.linalg.vector_norm(X, dim=-2, keepdim=True)
        sizes = sizes.where(sizes > 0, sizes.new_ones(()))
        Q, R = torch.linalg.qr(X / sizes)
        left, s, right = torch.linalg.svd(R, full_matrices=False)
        kept = s > 32 * X.shape[-1] * torch.finfo(X.dtype).eps * s.amax(-1, keepdim=True)
        basis = Q @ (left * kept[..., None, :])
        inverse = torch.where(kept, 1 / s, torch.zeros_like(s))
        flow = e.double()[..., None] * ((basis * inverse[..., None, :]) @ right / sizes)
        found = 2 * (flow - basis @ (basis.mT @ flow))
        if mask is not None:  # rotations leave rounding errors in place of zeros
            found = found.where(mask[..., None], found.new_zeros(()))
        return found.to(W.dtype), None
