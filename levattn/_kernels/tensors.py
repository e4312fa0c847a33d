"""Torch tensors as kernels read them, and kernels as torch operators: with gradients, opaque to torch's compiler."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields, replace
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

from levattn._core.arrays import as_cupy, as_tensor, memory_of_tensor, refuse_capture, without_wrappers
from levattn._core.checks import check_offsets
from levattn._core.device import place_of_torch, where_arrays_are
from levattn._kernels import repeats
from levattn._kernels.dispatch import kernels_for

_HAS_CUPY = find_spec("cupy") is not None
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OWN_MEMORY = _PLAIN  # types of tensors that lie where they say; others wrap some, as those of torch.distributed do
_SHARED = (torch.float32, torch.float64)
_READ = (*_SHARED, torch.float16, torch.bfloat16)
_EXPORTS = getattr(torch.compiler, "is_exporting", None)  # from torch 2.7 on
_SCHEMA = {"bool": "bool", "int": "SymInt", "float": "float"}  # types of numbers in torch's schema language
_MOST_NUMBERS = 1024  # of an array in main memory by which a call is recognized
_REASON = "levattn reads numbers of tensors or keeps a state here; compile without fullgraph=True"


def has_kernels(tensor: Any) -> bool:
    """Tell whether kernels read the tensor; if not, the definitions run on it, and torch differentiates them."""
    return tensor.device.type in ("cpu", "meta") or (tensor.device.type == "cuda" and _HAS_CUPY)


def has_own_memory(tensor: Any) -> bool:
    """Tell whether numbers of a tensor lie where it says, as they may not in a class of another library."""
    return type(tensor) in _OWN_MEMORY


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
    found = list(tensors)
    # reverse mode within forward mode hides a tangent below its wrappers
    return any(map(is_wrapped, found)) or any(forward_ad.unpack_dual(x).tangent is not None for x in found)


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


def is_on_device(tensor: Any) -> bool:
    """Tell whether a tensor is dense real floats on a CUDA device, and no wrapper."""
    if type(tensor) not in _PLAIN or not tensor.is_cuda or tensor.dtype not in _READ:
        return False
    return tensor.layout is torch.strided and not tensor.is_nested and not is_wrapped(tensor)


def lies_there(X: Any) -> bool:
    """Tell whether kernels of a device read a tensor."""
    if X.device.type != "cuda" or not has_own_memory(X) or not has_kernels(X):
        return False
    return not is_transformed(X) and not torch.compiler.is_compiling()


def is_read_there(tensors: list[Any]) -> bool:
    """Tell whether kernels of a device read tensors, of which there is no gradient and no tangent."""
    if not all(map(lies_there, tensors)) or has_tangent(tensors):
        return False
    return not (torch.is_grad_enabled() and any(X.requires_grad for X in tensors))


def are_plain_on_device(tensors: Iterable[Any]) -> bool:
    """Tell whether tensors are plain numbers on a CUDA device without a gradient, of any format and layout.

    It decides a call of few launches, whose checks would take longer one by one.
    """
    if not _HAS_CUPY or torch.compiler.is_compiling() or torch.jit.is_tracing() or forward_ad._current_level >= 0:
        return False
    if is_within_func():  # which wraps views and new tensors, also those of plain ones
        return False
    followed = torch.is_grad_enabled()
    for tensor in tensors:
        if not is_on_device(tensor) or tensor.is_neg() or is_legacy_batched(tensor):
            return False
        if followed and tensor.requires_grad:
            return False
    return True


def are_as_kernels_read(tensors: tuple[Any, ...]) -> bool:
    """Tell whether kernels of a device read tensors as they are: contiguous, of one format, without a gradient."""
    if not are_plain_on_device(tensors):
        return False
    kind = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype != kind or not tensor.is_contiguous():
            return False
    refuse_capture()
    return True


def repeated_on_device(name: str, tensors: tuple[Any, ...], numbers: Hashable, call: Callable[[], Any]) -> Any:
    """Return the tensor that `call` returns for plain tensors on a device; None if they are others.

    `numbers`: all other arguments of the call.
    """
    if not are_plain_on_device(tensors):
        return None
    place = place_of_torch()
    return None if place is None else repeats.by_launches(name, tensors, (place, numbers), lambda: (call(),))[0]


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


def laid_out(array: Any) -> Any:
    """Return an array of a kernel as a tensor with the same layout."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else tensor_of(array)


def like_of_kernels(tensor: Any) -> Any:
    """Return an empty tensor as kernels lay it out: the heads of a token side by side if the given tensor has them so.

    If neighbors along the last axis are not adjacent, `memory_of` makes a copy, head by head.
    """
    if tensor.ndim == 4 and tensor.stride(3) == 1 and tensor.stride(1) < tensor.stride(2):
        b, h, T, d = tensor.shape
        return tensor.new_empty(b, T, h, d).transpose(1, 2)
    return tensor.new_empty(tensor.shape)


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


class AttentionOperator:
    """The kernels of an attention as torch operators, forward and backward, by the dataclass of their arguments.

    The operators take tensors before numbers: first the `learned` ones, which have gradients, last the `parts` of the
    state. There are no second derivatives.

    output: a function of the dataclass that returns an empty tensor for the output.

    widens: whether gradients of tensors of 16 bits are computed in float32.
    """

    def __init__(
        self,
        name: str,
        task: Any,
        contract: Any,
        learned: tuple[str, ...],
        parts: int,
        output: Callable[[Any], Any],
        *,
        widens: bool = False,
    ) -> None:
        kinds = {one.name: str(one.type) for one in fields(contract) if one.name != "state"}
        arrays = [name for name, kind in kinds.items() if "Any" in kind or "NDArray" in kind]
        self._name, self._contract, self._learned, self._parts = name, contract, len(learned), parts
        self._tensors = (*learned, *(name for name in arrays if name not in learned))
        self._numbers = tuple(name for name in kinds if name not in arrays)
        self._read = tuple(name for name in arrays if "NDArray" in kinds[name])  # by the host, before it launches
        self._task, self._output, self._widens = task, output, widens
        tensors = [f"Tensor? {name}" for name in (*self._tensors, *(f"state_{i}" for i in range(parts)))]
        arguments = ", ".join([*tensors, *(f"{_SCHEMA.get(kinds[name], 'str')} {name}" for name in self._numbers)])
        results = ", ".join(["Tensor"] * len(learned))
        self.backward = make_operator(
            f"{name}_backward",
            f"(Tensor dY, {arguments}) -> ({results})",
            self._run_back,
            self._like_back,
            None,
            self._refuse,
        )
        self.forward = make_operator(
            name, f"({arguments}) -> Tensor", self._run, self._like, self._keep, self._followed
        )

    def __call__(self, x: Any) -> Any:
        """Return the output as a tensor with a gradient."""
        return self.forward(*self.arguments(x))

    def arguments(self, x: Any) -> tuple[Any, ...]:
        """Return the arguments of the operators."""
        arrays = [getattr(x, name) for name in self._tensors]
        tensors = [torch.from_numpy(array) if isinstance(array, np.ndarray) else array for array in arrays]
        numbers = [getattr(x, name) for name in self._numbers]
        return (*tensors, *(self._state_of(x) or (None,) * self._parts), *numbers)

    def computed(self, x: Any) -> Any:
        """Return the output for plain tensors, without a gradient."""
        first = getattr(x, self._tensors[0])
        if not first.numel():
            empty = self._output(x)
            if not empty.numel():
                return empty
        known = self._known(x) if first.is_cuda else None
        if known is None:
            return self._launched(x)
        return repeats.by_launches(self._name, *known, lambda: (self._launched(x),))[0]

    def _launched(self, x: Any) -> Any:
        held = self.in_memory(x)
        found = self._kernels(held).forward(held)
        return laid_out(found[0] if isinstance(found, tuple) else found)

    def _known(self, x: Any) -> tuple[list[Any], Hashable] | None:
        """Return the tensors of a call, and all else on which its launches depend; None if that is not known.

        Within torch.func new tensors are wrappers, which have no address.
        """
        place = place_of_torch()
        if place is None or x.state is not None or is_within_func():
            return None
        tensors: list[Any] = []
        others: list[Hashable] = [place]
        for name in self._tensors:
            value = getattr(x, name)
            if name in self._read and isinstance(value, torch.Tensor):
                if value.device.type != "cpu":
                    return None
                value = memory_of(value)
            if isinstance(value, torch.Tensor):
                if not lies_there(value) or value.is_neg():
                    return None
                tensors.append(value)
                others.append(name)
            elif value is not None:
                if not isinstance(value, np.ndarray) or value.size > _MOST_NUMBERS:
                    return None
                others.append((name, value.dtype.str, value.shape, value.tobytes()))
        return tensors, (*others, *(getattr(x, name) for name in self._numbers))

    def in_tensors(self, x: Any) -> Any:
        """Return the arguments as the definition reads them: the bounds in main memory, a state beside the tensors."""
        first = getattr(x, self._tensors[0])
        return replace(x, offsets=bounds_of(x.offsets, first.shape[-2]), state=self._state_of(x))

    def in_memory(self, x: Any) -> Any:
        """Return the arguments in the memory that kernels read."""
        first = getattr(x, self._tensors[0])
        found = {name: memory_of(getattr(x, name)) for name in self._tensors if name != "offsets"}
        # kernels copy arrays of numpy to the device themselves, and the definition takes tensors
        state = self._state_of(x) if isinstance(found[self._tensors[0]], torch.Tensor) else x.state
        state = None if state is None else tuple(map(memory_of, state))
        found |= {"offsets": bounds_of(x.offsets, first.shape[-2]), "state": state}
        return self._contract(**{**vars(x), **found})  # `replace` takes three times as long

    def _kernels(self, x: Any) -> Any:
        return kernels_for(self._task, getattr(x, self._tensors[0]))

    def _state_of(self, x: Any) -> tuple[Any, ...] | None:
        """Return the parts of a state as tensors on the device of the call; copies of arrays of numpy.

        A backward pass may read them after the caller has refilled the arrays that the state holds.
        """
        if x.state is None:
            return None
        device = getattr(x, self._tensors[0]).device
        parts = [part.copy() if isinstance(part, np.ndarray) else part for part in x.state]
        return tuple([(part if isinstance(part, torch.Tensor) else tensor_of(part)).to(device) for part in parts])

    def _held(self, arguments: tuple[Any, ...]) -> Any:
        """Return the arguments of an operator as the dataclass."""
        n = len(self._tensors)
        state = arguments[n : n + self._parts]
        named = zip(self._tensors + self._numbers, arguments[:n] + arguments[n + self._parts :], strict=True)
        return self._contract(**dict(named), state=None if state[0] is None else state)

    def _run(self, *arguments: Any) -> Any:
        return self.computed(self._held(arguments))

    def _like(self, *arguments: Any) -> Any:
        return self._output(self._held(arguments))

    def _run_back(self, dY: Any, *arguments: Any) -> Any:
        given = arguments[: self._learned]
        if not dY.numel() and not given[0].numel():
            return tuple(gradient.zero_() for gradient in self._like_back(dY, *arguments))
        if self._widens and given[0].element_size() == 2:  # only here, so that a forward pass keeps 16 bits
            dY = dY.float()
            arguments = (*(part if part is None else part.float() for part in given), *arguments[self._learned :])
        if dY.stride(-1) != 1:
            dY = dY.contiguous()
        x = self._held(arguments)

        def launched() -> tuple[Any, ...]:
            held = self.in_memory(x)
            found = self._kernels(held).backward(held, memory_of(dY))
            return tuple([part if part is None else laid_out(part) for part in found])

        known = self._known(x) if given[0].is_cuda and lies_there(dY) and not dY.is_neg() else None
        if known is None:
            found = launched()
        else:
            found = repeats.by_launches(self._name + ", gradients", [dY, *known[0]], known[1], launched)
        pairs = zip(found, given, strict=True)
        return tuple([given[0].new_empty(0) if part is None else part.to(x.dtype) for part, x in pairs])

    def _like_back(self, _dY: Any, *arguments: Any) -> Any:
        given = arguments[: self._learned]
        return tuple(given[0].new_empty(0) if part is None else like_of_kernels(part) for part in given)

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002 (torch names it)
        n = len(self._tensors) + self._parts
        ctx.save_for_backward(*inputs[:n])
        ctx.numbers = inputs[n:]

    def _followed(self, ctx: Any, dY: Any) -> Any:
        found = self.backward(dY, *ctx.saved_tensors, *ctx.numbers)
        wanted = zip(found, ctx.needs_input_grad, strict=False)
        others = len(self._tensors) - self._learned + self._parts + len(self._numbers)
        return *(gradient if needed else None for gradient, needed in wanted), *(None,) * others

    def _refuse(self, _ctx: Any, *_gradients: Any) -> Any:
        raise RuntimeError(
            f"a gradient of {self._name.replace('_', ' ')} was differentiated again; it has first derivatives only. "
            "Leave out create_graph=True, or detach the first gradient"
        )
