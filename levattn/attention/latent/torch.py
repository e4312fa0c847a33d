"""The kernels as operators of torch: on the memory of its tensors, with gradients, and opaque to its compiler.

Where neither a gradient nor the compiler asks for the operator, the kernel is called directly.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
import torch
from torch.autograd.forward_ad import unpack_dual

from levattn._core.arrays import as_cupy, as_tensor
from levattn._kernels import LatentArguments, kernels_for
from levattn._kernels.latent.contract import LatentGradients, State
from levattn.attention.common.packed import check_offsets

__all__ = [
    "bounds_of",
    "decayed_scan",
    "has_kernels",
    "has_tangent",
    "held_root",
    "in_memory",
    "is_plain",
    "is_transformed",
    "latent_attention",
    "make_operator",
    "memory_of",
    "tensor_of",
]

_HAS_CUPY = find_spec("cupy") is not None
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def latent_attention(
    Q: Any,
    K: Any,
    V: Any,
    gate: Any,
    beside: Any,
    mask: Any,
    offsets: Any,
    causal: bool,
    ahead: int,
    state: State | None,
) -> Any:
    """Return the output (b, T, D) of latent attention on stacks of tensors; see `LatentArguments`.

    offsets: None for one sequence, a numpy array, or a tensor while torch compiles. state: arrays that numpy or CuPy
    hold, or tensors.
    """
    tensors = (Q, K, V, gate, beside)
    if not has_kernels(Q) or any(map(is_transformed, tensors)):
        x = LatentArguments(Q, K, V, bounds_of(offsets, Q), causal, ahead, gate, beside, mask, _state_of(state, Q))
        return kernels_for("latent", Q).forward(x)
    if is_plain(tensors):
        held = state if Q.device.type == "cpu" else _state_of(state, Q)
        return _forward(*tensors, mask, offsets, causal, ahead, *(held or (None,) * 3))
    parts = _state_of(state, Q) or (None,) * 3
    if isinstance(offsets, np.ndarray):
        offsets = torch.from_numpy(offsets)
    return _ATTENTION(*tensors, mask, offsets, causal, ahead, *parts)


def decayed_scan(a: Any, x: Any, first: Any = None) -> Any:
    """Return ``h_t = a_t h_{t−1} + x_t`` for stacks (b, T, C) of tensors, from ``first`` (b, C) or 0."""
    if not has_kernels(a) or any(map(is_transformed, (a, x, first))):
        return kernels_for("latent", a).decayed_scan(a, x, first)
    return _scan(a, x, first, False) if is_plain((a, x, first)) else _SCAN(a, x, first, False)


def memory_of(tensor: Any) -> Any:
    """Return what the kernels read of a tensor: its memory as an array of numpy or CuPy, without its gradient.

    It is copied only where neighbors along the last axis are apart. Tensors of other devices stay tensors, and
    what is no tensor as it is.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if is_transformed(tensor):
        raise NotImplementedError(
            "a state was asked for within torch.func (vmap, grad or another), which has no numbers to keep yet; "
            "leave out return_state there, or call without torch.func"
        )
    tensor = tensor.detach().resolve_neg()
    if tensor.ndim and tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    if tensor.device.type == "cpu":
        return tensor.numpy()
    shared = as_cupy(tensor, "an argument")
    return tensor if shared is None else shared


def _called(function: Any, *arguments: Any) -> Any:
    """Return ``function(*arguments)``, which torch's compiler leaves to Python: states are no tensors."""
    return function(*arguments)


def __getattr__(name: str) -> Any:
    """Make `untraced` when it is first asked for: it imports torch's compiler, which takes a second."""
    if name == "untraced":
        globals()[name] = torch.compiler.disable(_called)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def has_kernels(tensor: Any) -> bool:
    """Tell whether kernels read the tensor: else the definitions run on it, and gradients follow them."""
    return tensor.device.type in ("cpu", "meta") or (tensor.device.type == "cuda" and _HAS_CUPY)


def is_transformed(tensor: Any) -> bool:
    """Tell whether a tensor stands for others within torch.func, whose transformations follow the definitions."""
    if tensor is None or torch.compiler.is_compiling():
        return False
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def has_tangent(tensors: Iterable[Any]) -> bool:
    """Tell whether one of some tensors carries a tangent of forward-mode differentiation."""
    return not torch.compiler.is_compiling() and any(unpack_dual(x).tangent is not None for x in tensors)


def is_plain(tensors: tuple[Any, ...]) -> bool:
    """Tell whether tensors are numbers in memory and nothing else, so that the operator would add nothing."""
    if torch.compiler.is_compiling():
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    if has_tangent(given):
        raise NotImplementedError(
            "a tensor carries a tangent of forward-mode differentiation, which this operator does not have; use "
            "reverse mode (backward, torch.autograd.grad)"
        )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return False
    return all(type(tensor) in _PLAIN and not tensor.is_meta for tensor in given)


def in_memory(tensors: tuple[Any, ...]) -> bool:
    """Tell whether tensors are numbers in main memory that nothing follows, so that kernels may read them there."""
    given = [tensor for tensor in tensors if tensor is not None]
    if torch.compiler.is_compiling() or any(map(is_transformed, given)):
        return False
    if has_tangent(given):
        return False
    return is_plain(tuple(given)) and all(tensor.device.type == "cpu" for tensor in given)


def without_autocast(like: Any) -> Any:
    """Return a block in which products have the precision of their factors."""
    return torch.autocast(like.device.type, enabled=False)


def bounds_of(offsets: Any, Q: Any) -> Any:
    """Return offsets as a numpy array that the kernels may follow."""
    T = Q.shape[1]
    if offsets is None:
        return np.array([0, T], np.int64)
    return check_offsets(offsets.cpu().numpy() if isinstance(offsets, torch.Tensor) else offsets, T)


def _state_of(state: State | None, like: Any) -> State | None:
    """Return the arrays of a state as tensors on the device of one, on the same memory where that is possible."""
    if state is None:
        return None
    found = []
    for part in state:
        if isinstance(part, np.ndarray):
            part = torch.from_numpy(np.require(part, requirements=["C", "W"]))
        elif not isinstance(part, torch.Tensor):
            part = as_tensor(part)
        found.append(part.to(like.device))
    return found[0], found[1], found[2]


def tensor_of(array: Any) -> Any:
    """Return what a kernel made as a tensor."""
    return torch.from_numpy(np.ascontiguousarray(array)) if isinstance(array, np.ndarray) else as_tensor(array)


def _mixture(
    Q: Any,
    K: Any,
    V: Any,
    gate: Any,
    beside: Any,
    mask: Any,
    offsets: Any,
    causal: bool,
    ahead: int,
    m: Any,
    s: Any,
    S: Any,
) -> LatentArguments:
    bounds = bounds_of(offsets, Q)
    Q, K, V, gate, beside, mask, m, s, S = map(memory_of, (Q, K, V, gate, beside, mask, m, s, S))
    return LatentArguments(Q, K, V, bounds, causal, ahead, gate, beside, mask, None if m is None else (m, s, S))


def _forward(Q: Any, K: Any, V: Any, *others: Any) -> Any:
    if not Q.shape[0] * Q.shape[1]:
        return _like_output(Q, K, V)
    x = _mixture(Q, K, V, *others)
    return tensor_of(kernels_for("latent", x.Q).forward(x))


def _like_output(Q: Any, _K: Any, V: Any, *_others: Any) -> Any:
    return V.new_empty(Q.shape[0], Q.shape[1], V.shape[2])


def _backward(dY: Any, Q: Any, K: Any, V: Any, gate: Any, beside: Any, *others: Any) -> Any:
    if not Q.shape[0] * Q.shape[1]:
        return tuple(gradient.zero_() for gradient in _like_gradients(dY, Q, K, V, gate, beside))
    x = _mixture(Q, K, V, gate, beside, *others)
    kernels = cast(LatentGradients, kernels_for("latent", x.Q))
    gradients = kernels.backward(x, memory_of(dY))
    return tuple(Q.new_empty(0) if gradient is None else tensor_of(gradient) for gradient in gradients)


def _like_gradients(_dY: Any, Q: Any, K: Any, V: Any, gate: Any, beside: Any, *_others: Any) -> Any:
    return tuple(Q.new_empty(() if array is None else array.shape) for array in (Q, K, V, gate, beside))


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 (torch names it)
    *tensors, causal, ahead, m, s, S = inputs
    ctx.save_for_backward(*tensors, m, s, S)
    ctx.causal, ctx.ahead = causal, ahead


def _gradients(ctx: Any, dY: Any) -> Any:
    *tensors, m, s, S = ctx.saved_tensors
    found = _ATTENTION_BACKWARD(dY, *tensors, ctx.causal, ctx.ahead, m, s, S)
    wanted = zip(found, ctx.needs_input_grad, strict=False)
    return *(gradient if needed else None for gradient, needed in wanted), *(None,) * 7


def _refuse_again(_ctx: Any, *_gradients: Any) -> Any:
    raise RuntimeError(
        "a gradient of latent attention was differentiated again; it has first derivatives only. Leave out "
        "create_graph=True, or detach the first gradient"
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
    """Return the gradients of a scan: of x it is the scan of `dh` the other way.

    A caller who begins a sequence by a = 0 holds a there: its gradient reads the row before, which may be NaN.
    """
    a, first, h = ctx.saved_tensors
    r = _SCAN(a, dh, None, not ctx.reverse)
    nothing = torch.zeros_like(a[:, :1, :])
    if ctx.reverse:
        return torch.cat([nothing, r[:, :-1, :]], 1) * h, r, None, None
    before = torch.cat([nothing if first is None else first[:, None, :], h[:, :-1, :]], 1)
    return r * before, r, None if first is None else (a * r)[:, 0, :], None


class _Root(torch.autograd.Function):  # type: ignore[misc]
    """The square root with a slope of at most `steepest`, in few steps."""

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
    """Return the square root, whose slope is held at `steepest` near 0, where it has none."""
    if not torch.compiler.is_compiling() and not is_transformed(x) and not has_tangent([x]):
        return _Root.apply(x, steepest)
    steep, held = x < (0.5 / steepest) ** 2, x.detach()
    return held.sqrt().add(x - held, alpha=steepest).where(steep, x.masked_fill(steep, 1.0).sqrt())


_ARGUMENTS = (
    "Tensor Q, Tensor K, Tensor V, Tensor? gate, Tensor? beside, Tensor? mask, Tensor? offsets, bool causal, "
    "SymInt ahead, Tensor? m, Tensor? s, Tensor? S"
)


def make_operator(name: str, schema: str, run: Any, shape: Any, setup_context: Any, backward: Any) -> Any:
    """Return a kernel as an operator of torch, with the shapes of its results and its gradient."""
    operator = torch.library.custom_op(f"levattn::{name}", run, mutates_args=(), schema=schema)
    operator.register_fake(shape)
    operator.register_autograd(backward, setup_context=setup_context)
    return operator


_ATTENTION = make_operator(
    "latent_attention", f"({_ARGUMENTS}) -> Tensor", _forward, _like_output, _keep_arguments, _gradients
)
_ATTENTION_BACKWARD = make_operator(
    "latent_attention_backward",
    f"(Tensor dY, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _like_gradients,
    None,
    _refuse_again,
)
_SCAN = make_operator(
    "decayed_scan",
    "(Tensor a, Tensor x, Tensor? first, bool reverse) -> Tensor",
    _scan,
    _like_scan,
    _keep_scan,
    _scan_gradients,
)
