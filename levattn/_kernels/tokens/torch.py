"""Token statistics attention on tensors of torch; see `latent.torch`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from levattn._core.arrays import on_cuda, to_numpy, without_wrappers
from levattn._kernels.dispatch import kernels_for
from levattn._kernels.tensors import (
    bounds_of,
    follows_definition,
    has_kernels,
    is_plain,
    make_attention,
    memory_of,
    tensor_of,
)
from levattn._kernels.tokens import LOGITS, TokenArguments, TokenGradients, TokenKernels, TokenSums, definition


def forward(x: TokenArguments, *, state: bool = False) -> tuple[Any, TokenSums | None]:
    """Return the output (b, h, T, d), and if `state` the sums after all tokens as arrays of the kernels."""
    tensors, sums = (x.W, x.temperature, x.offset), None
    if state:
        held = _in_memory(x)
        Y, sums = _table(held).forward(held, state=True)
        if has_kernels(x.W) and is_plain(tensors):
            return _laid_out(Y), sums
    if follows_definition(tensors):
        kind = x.temperature.dtype
        # products of gradients of float32 may leave its range; not every other device has float64
        wide = torch.float64 if has_kernels(x.W) else kind
        W, temperature, offset = (part if part is None else part.to(wide) for part in tensors)
        held = replace(x, W=W, temperature=temperature, offset=offset, offsets=_bounds(x), state=_state_on(W, x.state))
        return definition.forward(held)[0].to(kind), sums
    if is_plain(tensors):
        held = _in_memory(x)
        return _laid_out(_table(held).forward(held)[0]), sums
    return STATISTICS(*_arguments(x)), sums


def memberships(x: TokenArguments) -> Any:
    """Return the memberships (b, h, T), without a gradient."""
    given = (x.W, x.temperature, x.offset, x.mask)
    W, temperature, offset, mask = (x if x is None else without_wrappers(x.detach()) for x in given)
    held = _in_memory(replace(x, W=W, temperature=temperature, offset=offset, mask=mask))
    return _laid_out(_table(held).memberships(held))


def _table(x: TokenArguments) -> TokenKernels:
    """Return the kernels that read arguments in memory, by default the definition."""
    return definition if isinstance(x.W, torch.Tensor) else kernels_for("tokens", x.W)


def _laid_out(array: Any) -> Any:
    """Convert an array of a kernel to a tensor with the same layout."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else tensor_of(array)


def _in_memory(x: TokenArguments) -> TokenArguments:
    """Move the arguments to the memory that the kernels read."""
    W, temperature, offset, mask = map(memory_of, (x.W, x.temperature, x.offset, x.mask))
    state = x.state if isinstance(W, np.ndarray) else _state_on(W, x.state)
    return replace(x, W=W, temperature=temperature, offset=offset, mask=mask, offsets=_bounds(x), state=state)


def _bounds(x: TokenArguments) -> Any:
    return bounds_of(x.offsets, x.W.shape[2])


def _state_on(array: Any, state: TokenSums | None) -> TokenSums | None:
    """Move sums of numpy to the device of an array of CuPy or a tensor; leave others as they are."""
    if state is None:
        return None
    if isinstance(array, torch.Tensor):
        found = [torch.from_numpy(to_numpy(part)).to(array.device) for part in state]
    else:
        found = [part if _is_beside(part, array) else _sent(part, array) for part in state]
    return found[0], found[1], found[2], found[3]


def _is_beside(part: Any, array: Any) -> bool:
    return on_cuda(part) and part.device == array.device


def _sent(part: Any, array: Any) -> Any:
    return memory_of(tensor_of(part).to(tensor_of(array[:0]).device))


def _followed(part: Any) -> Any:
    """Convert a sum to a tensor; it stays on its device, because reading it would wait."""
    return tensor_of(part) if on_cuda(part) else torch.from_numpy(np.array(to_numpy(part)))


def _arguments(x: TokenArguments) -> tuple[Any, ...]:
    """Return the arguments of the operator."""
    offsets = torch.from_numpy(x.offsets) if isinstance(x.offsets, np.ndarray) else x.offsets
    decay = None if x.decay is None else torch.from_numpy(x.decay)
    state = (None,) * 4 if x.state is None else tuple(map(_followed, x.state))
    numbers = (x.causal, LOGITS.index(x.logits), x.mean, x.least, x.ridge, x.c, x.gain)
    return (x.W, x.temperature, x.offset, x.mask, offsets, decay, *state, *numbers)


def _read(W: Any, temperature: Any, offset: Any, mask: Any, offsets: Any, decay: Any, *others: Any) -> TokenArguments:
    """Return the arguments of the operator as the kernels read them."""
    *state, causal, kind, mean, least, ridge, c, gain = others
    rates = None if decay is None else decay.numpy()
    A, n, M, N = map(memory_of, state)
    sums = None if A is None else (A, n, M, N)
    logits = LOGITS[kind]
    return _in_memory(
        TokenArguments(W, temperature, offset, offsets, causal, logits, mean, least, ridge, c, gain, rates, mask, sums)
    )


def _forward(W: Any, *others: Any) -> Any:
    if not W.numel():
        return torch.empty_like(W)
    x = _read(W, *others)
    return _laid_out(kernels_for("tokens", x.W).forward(x)[0])


def _like_output(W: Any, *_others: Any) -> Any:
    """Return a tensor with the layout of the kernels: the heads of a token side by side if W has them so.

    If neighbors along the last axis are not adjacent, `memory_of` makes a copy, head by head.
    """
    b, h, T, d = W.shape
    if W.stride(3) == 1 and W.stride(1) < W.stride(2):
        return W.new_empty(b, T, h, d).transpose(1, 2)
    return W.new_empty(b, h, T, d)


def _backward(dY: Any, W: Any, *others: Any) -> Any:
    if not W.numel():
        return tuple(gradient.zero_() for gradient in _like_gradients(dY, W, *others))
    x = _read(W, *others)
    gradients = cast(TokenGradients, kernels_for("tokens", x.W)).backward(x, memory_of(dY))
    dW, *rest = (W.new_empty(0) if gradient is None else _laid_out(gradient) for gradient in gradients)
    return dW.to(W.dtype), *rest


def _like_gradients(_dY: Any, W: Any, temperature: Any, offset: Any, *_others: Any) -> Any:
    shape = (0,) if offset is None else offset.shape
    return _like_output(W), temperature.new_empty(temperature.shape), W.new_empty(shape)


STATISTICS, STATISTICS_BACKWARD = make_attention(
    "token_statistics_attention",
    "Tensor W, Tensor temperature, Tensor? offset, Tensor? mask, Tensor? offsets, Tensor? decay, Tensor? A, "
    "Tensor? n, Tensor? M, Tensor? N, bool causal, int logits, bool mean, float least, float ridge, float c, "
    "float gain",
    3,
    (_forward, _like_output),
    (_backward, _like_gradients),
)
