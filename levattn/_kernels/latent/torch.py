"""Latent attention on tensors of torch: kernels on their memory, with gradients, and opaque to torch's compiler.

Calls that need no operator, for a gradient or for the compiler, call the kernel directly.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from levattn._kernels.dispatch import kernels_for
from levattn._kernels.latent import LatentArguments, LatentSteps, State, definition
from levattn._kernels.tensors import (
    AttentionOperator,
    follows_definition,
    has_tangent,
    is_plain,
    is_within_func,
    make_operator,
    memory_of,
    tensor_of,
)


def forward(x: LatentArguments) -> Any:
    """Return the output (b, T, D) of latent attention; see `LatentArguments`.

    offsets: a numpy array, or a tensor while torch compiles; None for one sequence. state: arrays that numpy or CuPy
    hold, or tensors.
    """
    tensors = (x.Q, x.K, x.V, x.gate, x.gate_value)
    if follows_definition(tensors):
        return definition.forward(ATTENTION.in_tensors(x))
    return ATTENTION.computed(x) if is_plain(tensors) else ATTENTION(x)


def step(Q: Any, K: Any, V: Any, mask: Any, state: State | None) -> tuple[Any, State] | None:
    """Return the output of causal rows on a device, and the state after them as arrays of the kernels, or None."""
    tensors = (Q, K, V)
    if follows_definition(tensors) or not Q.is_cuda or not is_plain(tensors):
        return None
    q, k, v, present = map(memory_of, (*tensors, mask))
    held = None if state is None else (memory_of(state[0]), memory_of(state[1]), memory_of(state[2]))
    found = cast(LatentSteps, kernels_for("latent", q)).step(q, k, v, present, held)
    return None if found is None else (tensor_of(found[0]), found[1])


def step_as_given(Q: Any, K: Any, V: Any, state: State | None) -> tuple[Any, State] | None:
    """Return the output and the state after it as `step` does, for tensors that `are_as_kernels_read`."""
    from levattn._kernels.latent.cuda import step_at_once  # here, because it needs a device

    return step_at_once(Q, K, V, None, state)


def summary(K: Any, V: Any, mask: Any, offsets: Any) -> State:
    """Return the state of all positions of each sequence in float64, without gradients, as arrays of the kernels."""
    K, V, mask = map(memory_of, (K, V, mask))
    kernels = definition if isinstance(K, torch.Tensor) else kernels_for("latent", K)
    return kernels.summary(K, V, mask, offsets)


def decayed_scan(a: Any, x: Any, first: Any = None, *, reverse: bool = False) -> Any:
    """Return ``h_t = a_t h_{t−1} + x_t`` for (b, T, C), from `first` (b, C) or 0; see `definition` for `reverse`."""
    tensors = (a, x, first)
    if follows_definition(tensors):
        return definition.decayed_scan(*tensors, reverse=reverse)
    return (_scan if is_plain(tensors) else SCAN)(*tensors, reverse)


ATTENTION = AttentionOperator(
    "latent_attention",
    "latent",
    LatentArguments,
    ("Q", "K", "V", "gate", "gate_value"),
    3,
    lambda x: x.V.new_empty(x.Q.shape[0], x.Q.shape[1], x.V.shape[2]),
    widens=True,
)


def _scan(a: Any, x: Any, first: Any, reverse: bool) -> Any:
    if not a.numel():
        return torch.empty_like(x)
    a, x, first = map(memory_of, (a, x, first))
    return tensor_of(kernels_for("latent", a).decayed_scan(a, x, first, reverse=reverse))


def _like_scan(_a: Any, x: Any, *_others: Any) -> Any:
    return x.new_empty(x.shape)


def _keep_scan(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, _, first, ctx.reverse = inputs
    ctx.save_for_backward(a, first, output)


def _scan_gradients(ctx: Any, dh: Any) -> Any:
    """Return the gradients of a scan; the gradient of x is the scan of `dh` the other way.

    A caller that begins a sequence with a = 0 must keep it constant: its gradient reads the row before, maybe NaN.
    """
    a, first, h = ctx.saved_tensors
    r = SCAN(a, dh, None, not ctx.reverse)
    nothing = torch.zeros_like(a[:, :1, :])
    if ctx.reverse:
        return torch.cat([nothing, r[:, :-1, :]], 1) * h, r, None, None
    before = torch.cat([nothing if first is None else first[:, None, :], h[:, :-1, :]], 1)
    return r * before, r, None if first is None else (a * r)[:, 0, :], None


SCAN = make_operator(
    "decayed_scan",
    "(Tensor a, Tensor x, Tensor? first, bool reverse) -> Tensor",
    _scan,
    _like_scan,
    _keep_scan,
    _scan_gradients,
)


class _Root(torch.autograd.Function):  # type: ignore[misc]
    """The square root with a slope of at most `steepest`, in few operations."""

    @staticmethod
    def forward(ctx: Any, x: Any, steepest: float) -> Any:
        root = x.sqrt()
        ctx.steepest = steepest
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # of the saved root, so that it can be differentiated again
        (root,) = ctx.saved_tensors
        return gradient / (2 * root).clamp_min(1 / ctx.steepest), None


def held_root(x: Any, steepest: float) -> Any:
    """Return the square root with a slope of at most `steepest`, because the slope at 0 is infinite."""
    if not torch.compiler.is_compiling() and not is_within_func() and not has_tangent([x]):
        return _Root.apply(x, steepest)
    steep, held = x < (0.5 / steepest) ** 2, x.detach()
    return held.sqrt().add(x - held, alpha=steepest).where(steep, x.masked_fill(steep, 1.0).sqrt())
