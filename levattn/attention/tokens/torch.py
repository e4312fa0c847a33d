"""Token statistics attention as operators of torch; see `attention.latent.torch`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast, get_args

import numpy as np
import torch

from levattn._core.arrays import to_numpy
from levattn._kernels import TokenArguments, TokenSums, kernels_for
from levattn._kernels.tokens.contract import Logits, TokenGradients
from levattn.attention.latent.torch import (
    bounds_of,
    has_kernels,
    is_plain,
    is_transformed,
    make_operator,
    memory_of,
    tensor_of,
)
from levattn.sensitivity.leverage import leverage_scores

__all__ = ["leverage", "token_memberships", "token_statistics", "token_statistics_and_sums"]

_LOGITS = get_args(Logits)


def token_statistics(x: TokenArguments) -> Any:
    """Return the output (b, h, T, d) of token statistics attention on tensors."""
    tensors = (x.W, x.temperature, x.offset)
    if not has_kernels(x.W) or any(map(is_transformed, tensors)):
        return kernels_for("tokens", x.W).forward(_on_tensors(x))[0]
    if is_plain(tensors):
        return _laid_out(kernels_for("tokens", memory_of(x.W)).forward(_in_memory(x))[0])
    return _STATISTICS(*_arguments(x))


def token_statistics_and_sums(x: TokenArguments) -> tuple[Any, TokenSums | None]:
    """Return the output, and the sums after all tokens as arrays of numpy or CuPy, or as tensors elsewhere."""
    held = _in_memory(x)
    if is_plain((x.W, x.temperature, x.offset)) or not has_kernels(x.W):
        Y, sums = kernels_for("tokens", held.W).forward(held, state=True)
        return (_laid_out(Y) if has_kernels(x.W) else token_statistics(x)), sums
    return token_statistics(x), kernels_for("tokens", held.W).forward(held, state=True)[1]


def token_memberships(x: TokenArguments) -> Any:
    """Return the memberships (b, h, T), without a gradient."""
    held = _in_memory(x)
    found = kernels_for("tokens", held.W).memberships(held)
    return _laid_out(found)


def leverage(W: Any, mask: Any) -> Any:
    """Return the leverage scores (b, h, T) of tokens (b, h, T, d), of which `mask` (b, 1, T) takes part."""
    if is_transformed(W):
        raise NotImplementedError(
            "membership is 'leverage' within torch.func (vmap, grad or another), which these scores do not follow; "
            "call without torch.func, or give scores of your own as membership"
        )
    there = None if mask is None else mask.expand(W.shape[:3])
    return _Leverage.apply(W, there) if torch.is_grad_enabled() and W.requires_grad else _scores(W, there)


def _scores(W: Any, mask: Any) -> Any:
    return leverage_scores(W.detach(), mask=mask)


class _Leverage(torch.autograd.Function):  # type: ignore[misc]
    """Leverage scores, with the gradient ``2 (I − P) diag(e) W⁺ᵀ``, where P projects to the columns of W."""

    @staticmethod
    def forward(ctx: Any, W: Any, mask: Any) -> Any:
        ctx.save_for_backward(W, mask)
        return _scores(W, mask)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, e: Any) -> tuple[Any, None]:
        W, mask = ctx.saved_tensors
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
        if mask is not None:  # rotations leave rounding where there are zeros
            found = found.where(mask[..., None], found.new_zeros(()))
        return found.to(W.dtype), None


def _laid_out(array: Any) -> Any:
    """Return what a kernel made as a tensor, laid out as it is."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else tensor_of(array)


def _in_memory(x: TokenArguments) -> TokenArguments:
    """Return the arguments where the kernels read them."""
    W, temperature, offset, mask = map(memory_of, (x.W, x.temperature, x.offset, x.mask))
    state = x.state
    if not isinstance(W, np.ndarray) and state is not None:
        state = _state_on(W, state)
    return replace(x, W=W, temperature=temperature, offset=offset, mask=mask, offsets=_ends(x), state=state)


def _ends(x: TokenArguments) -> Any:
    return bounds_of(x.offsets, x.W[:, 0, :, :])


def _state_on(array: Any, state: TokenSums) -> TokenSums:
    """Return sums of numpy where an array of CuPy or a tensor is; others as they are."""
    if isinstance(array, torch.Tensor):
        found = [torch.from_numpy(to_numpy(part)).to(array.device) for part in state]
    else:
        found = [memory_of(tensor_of(part).to(tensor_of(array[:0]).device)) for part in state]
    return found[0], found[1], found[2], found[3]


def _on_tensors(x: TokenArguments) -> TokenArguments:
    state = None if x.state is None else _state_on(x.W, x.state)
    return replace(x, offsets=_ends(x), state=state)


def _arguments(x: TokenArguments) -> tuple[Any, ...]:
    offsets = torch.from_numpy(x.offsets) if isinstance(x.offsets, np.ndarray) else x.offsets
    decay = None if x.decay is None else torch.from_numpy(x.decay)
    state = (None,) * 4 if x.state is None else tuple(torch.from_numpy(np.array(to_numpy(part))) for part in x.state)
    kind = _LOGITS.index(x.logits)
    numbers = (x.causal, kind, x.mean, x.least, x.ridge, x.c, x.gain)
    return (x.W, x.temperature, x.offset, x.mask, offsets, decay, *state, *numbers)


def _statistics(
    W: Any, temperature: Any, offset: Any, mask: Any, offsets: Any, decay: Any, *others: Any
) -> TokenArguments:
    """Return the arguments of the operator as the kernels read them."""
    A, n, M, N, causal, kind, mean, least, ridge, c, gain = others
    x = TokenArguments(
        W,
        temperature,
        offset,
        offsets,
        causal,
        _LOGITS[kind],
        mean,
        least,
        ridge,
        c,
        gain,
        None if decay is None else decay.numpy(),
        mask,
        None if A is None else (A.numpy(), n.numpy(), M.numpy(), N.numpy()),
    )
    return _in_memory(x)


def _forward(W: Any, *others: Any) -> Any:
    if not W.numel():
        return torch.empty_like(W)
    x = _statistics(W, *others)
    return _laid_out(kernels_for("tokens", x.W).forward(x)[0])


def _like_output(W: Any, *_others: Any) -> Any:
    """Return a tensor laid out as the kernels do: tokens with their heads side by side where those of W are.

    Where neighbors along the last axis are apart, `memory_of` makes a copy, head by head.
    """
    b, h, T, d = W.shape
    if W.stride(3) == 1 and W.stride(1) < W.stride(2):
        return W.new_empty(b, T, h, d).transpose(1, 2)
    return W.new_empty(b, h, T, d)


def _backward(dY: Any, W: Any, temperature: Any, offset: Any, *others: Any) -> Any:
    if not W.numel():
        return tuple(gradient.zero_() for gradient in _like_gradients(dY, W, temperature, offset))
    x = _statistics(W, temperature, offset, *others)
    kernels = cast(TokenGradients, kernels_for("tokens", x.W))
    gradients = kernels.backward(x, memory_of(dY))
    return tuple(W.new_empty(0) if gradient is None else _laid_out(gradient) for gradient in gradients)


def _like_gradients(_dY: Any, W: Any, temperature: Any, offset: Any, *_others: Any) -> Any:
    shape = (0,) if offset is None else offset.shape
    return _like_output(W), temperature.new_empty(temperature.shape), W.new_empty(shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 (torch names it)
    ctx.save_for_backward(*inputs[:10])
    ctx.numbers = inputs[10:]


def _gradients(ctx: Any, dY: Any) -> Any:
    found = _STATISTICS_BACKWARD(dY, *ctx.saved_tensors, *ctx.numbers)
    wanted = zip(found, ctx.needs_input_grad, strict=False)
    return *(gradient if needed else None for gradient, needed in wanted), *(None,) * 14


def _refuse_again(_ctx: Any, *_gradients: Any) -> Any:
    raise RuntimeError(
        "a gradient of token statistics attention was differentiated again; it has first derivatives only. Leave out "
        "create_graph=True, or detach the first gradient"
    )


_SCHEMA = (
    "Tensor W, Tensor temperature, Tensor? offset, Tensor? mask, Tensor offsets, Tensor? decay, Tensor? A, Tensor? n, "
    "Tensor? M, Tensor? N, bool causal, int logits, bool mean, float least, float ridge, float c, float gain"
)

_STATISTICS = make_operator("token_statistics", f"({_SCHEMA}) -> Tensor", _forward, _like_output, _keep, _gradients)
_STATISTICS_BACKWARD = make_operator(
    "token_statistics_backward",
    f"(Tensor dY, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _like_gradients,
    None,
    _refuse_again,
)
