"""Torch tensors as kernels read them, and kernels as torch operators: with gradients, opaque to torch's compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch._C._functorch import get_unwrapped
from torch._C._functorch import is_batchedtensor as is_batched
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch._C._functorch import is_legacy_batchedtensor as is_legacy_batched
from torch.autograd import forward_ad

from levattn._core.arrays import as_cupy, as_tensor, memory_of_tensor, without_wrappers
from levattn._core.checks import check_offsets
from levattn._core.device import where_arrays_are

_HAS_CUPY = find_spec("cupy") is not None
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SHARED = (torch.float32, torch.float64)
_EXPORTS = getattr(torch.compiler, "is_exporting", None)  # from torch 2.7 on
_REASON = "levattn reads numbers of tensors or keeps a state here; compile without fullgraph=True"


def has_kernels(tensor: Any) -> bool:
    """Tell whether kernels read the tensor; if not, the definitions run on it, and torch differentiates them."""
    return tensor.device.type in ("cpu", "meta") or (tensor.device.type == "cuda" and _HAS_CUPY)


def is_transformed(tensor: Any) -> bool:
    """Tell whether a tensor is a wrapper of torch.func, whose transformations need the definitions."""
    if tensor is None or torch.compiler.is_compiling():
        return False
    return bool(is_wrapped(tensor))


def is_within_func() -> bool:
    """Tell whether the call is within torch.func, which takes no functions of torch.autograd with a context."""
    return bool(torch._C._are_functorch_transforms_active())


def follows_definition(tensors: tuple[Any, ...]) -> bool:
    """Tell whether the definition runs on the tensors of a call, so that torch differentiates it."""
    return not has_kernels(tensors[0]) or any(map(is_transformed, tensors))


def has_tangent(tensors: Iterable[Any]) -> bool:
    """Tell whether any tensor carries a tangent of forward-mode differentiation."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def hidden_by(tensors: Iterable[Any]) -> str | None:
    """Return the transformation or device that hides the numbers of tensors from a call that reads them, or None."""
    if _EXPORTS is not None and _EXPORTS():
        return "torch.export"
    if torch.jit.is_tracing():  # it would record what was read as constants
        return "torch.jit.trace"
    for tensor in tensors:
        while is_wrapped(tensor):
            if is_batched(tensor):
                return "torch.func.vmap"
            tensor = get_unwrapped(tensor)
        if tensor.is_meta:
            return "the device meta"
        if type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
            return "FakeTensorMode"
    return None


def is_plain(tensors: tuple[Any, ...]) -> bool:
    """Tell whether tensors are plain numbers in memory, for which the operator would add nothing."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    if has_tangent(given):
        raise NotImplementedError(
            "a tensor carries a tangent of forward-mode differentiation, which this operator does not support; use "
            "reverse mode (backward, torch.autograd.grad)"
        )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return False
    return all(type(tensor) in _PLAIN and not tensor.is_meta for tensor in given)


def in_memory(tensors: tuple[Any, ...]) -> bool:
    """Tell whether tensors are plain numbers in main memory that torch does not track, so kernels may read them."""
    given = tuple(tensor for tensor in tensors if tensor is not None)
    if torch.compiler.is_compiling() or any(map(is_transformed, given)) or has_tangent(given):
        return False
    return is_plain(given) and all(tensor.device.type == "cpu" for tensor in given)


def in_plain_memory(tensors: tuple[Any, ...]) -> bool:
    """Tell whether tensors are plain numbers in main memory, followed by a gradient or not."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    plain = all(type(x) in _PLAIN and x.is_cpu and x.layout is torch.strided and not x.is_nested for x in given)
    plain = plain and not is_within_func()
    # batches of gradients, as is_grads_batched makes them, are no wrappers
    return plain and not any(is_wrapped(x) or is_legacy_batched(x) for x in given) and not has_tangent(given)


def memories_of(tensors: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return tensors as numpy arrays on the same memory, if all are float32 or float64 and `in_memory` holds.

    Return None otherwise. A None in place of a tensor stays None.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    followed = torch.is_grad_enabled()
    found: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            found.append(None)
            continue
        if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.dtype not in _SHARED or tensor.is_nested:
            return None
        if tensor.layout is not torch.strided or tensor.is_neg() or is_wrapped(tensor):
            return None
        if followed and tensor.requires_grad:
            return None
        found.append(memory_of_tensor(tensor))
    if forward_ad._current_level >= 0 and has_tangent(tensor for tensor in tensors if tensor is not None):
        return None
    return tuple(found)


def memory_of(tensor: Any) -> Any:
    """Return the memory of a tensor as an array of numpy or CuPy, without its gradient, for the kernels.

    It is copied only where the last axis is not contiguous. Tensors on other devices, and objects that are not
    tensors, are returned unchanged.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if is_transformed(tensor):
        raise NotImplementedError(
            "return_state was given within torch.func (vmap, grad or another), where tensors hold no numbers yet; "
            "leave it out there, or call without torch.func"
        )
    tensor = tensor.detach().resolve_neg()
    if tensor.ndim and tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    tensor = without_wrappers(tensor)  # within torch.func results are wrapped, also those of plain tensors
    if tensor.device.type == "cpu":
        return memory_of_tensor(tensor)
    shared = as_cupy(tensor)
    return tensor if shared is None else shared


def tensor_of(array: Any) -> Any:
    """Return an array of a kernel as a tensor; words on a device are bfloat16."""
    if isinstance(array, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(array))
    return as_tensor(array.view(np.int16)).view(torch.bfloat16) if array.dtype == np.uint16 else as_tensor(array)


def bounds_of(offsets: Any, T: int) -> Any:
    """Return offsets in main memory; for None, the offsets of one sequence.

    Offsets given as a tensor are checked here, because torch traced the call before.
    """
    if offsets is None:
        return np.array([0, T], np.int64)
    return check_offsets(memory_of(offsets.cpu()), T) if isinstance(offsets, torch.Tensor) else offsets


def without_autocast(like: Any) -> Any:
    """Return a context in which products have the precision of their factors."""
    return torch.autocast(like.device.type, enabled=False)


@where_arrays_are
def _called(function: Any, *arguments: Any, **options: Any) -> Any:
    """Return the result of a call that torch's compiler leaves to Python."""
    return function(*arguments, **options)


def __getattr__(name: str) -> Any:
    """Make `untraced` on first use, because importing torch's compiler takes a second."""
    if name == "untraced":
        reason = {"reason": _REASON} if "reason" in signature(torch.compiler.disable).parameters else {}
        globals()[name] = torch.compiler.disable(_called, **reason)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def make_operator(name: str, schema: str, run: Any, shape: Any, setup_context: Any, backward: Any) -> Any:
    """Return a kernel as a torch operator, with the shapes of its results and its gradient.

    It reads small tables from main memory, which a CUDA graph would not read again.
    """
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)  # from torch 2.9 on
    options = {} if unsafe is None else {"tags": (unsafe,)}
    run = where_arrays_are(run)
    operator = torch.library.custom_op(f"levattn::{name}", run, mutates_args=(), schema=schema, **options)
    operator.register_fake(shape)
    operator.register_autograd(backward, setup_context=setup_context)
    return operator


def make_attention(
    name: str,
    arguments: str,
    learned: int,
    forward: tuple[Callable[..., Any], Callable[..., Any]],
    backward: tuple[Callable[..., Any], Callable[..., Any]],
) -> tuple[Any, Any]:
    """Return the kernels of an attention, forward and backward, as torch operators, without second derivatives.

    arguments: in torch's schema language, tensors before numbers; the first `learned` of them have gradients.

    forward, backward: a kernel, and a function with its arguments that returns empty tensors of the same shapes.
    """
    tensors, count = arguments.count("Tensor"), arguments.count(",") + 1

    def refuse(_ctx: Any, *_gradients: Any) -> Any:
        raise RuntimeError(
            f"a gradient of {name.replace('_', ' ')} was differentiated again; it has first derivatives only. Leave "
            "out create_graph=True, or detach the first gradient"
        )

    results = ", ".join(["Tensor"] * learned)
    back = make_operator(f"{name}_backward", f"(Tensor dY, {arguments}) -> ({results})", *backward, None, refuse)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 (torch names it)
        ctx.save_for_backward(*inputs[:tensors])
        ctx.numbers = inputs[tensors:]

    def gradients(ctx: Any, dY: Any) -> Any:
        found = back(dY, *ctx.saved_tensors, *ctx.numbers)
        wanted = zip(found, ctx.needs_input_grad, strict=False)
        return *(gradient if needed else None for gradient, needed in wanted), *(None,) * (count - learned)

    return make_operator(name, f"({arguments}) -> Tensor", *forward, keep, gradients), back
