"""Tensors of torch as numbers in memory; torch itself is not imported."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.checks import refuse_masked_tensor


class _Memory(ctypes.c_char * 2**62):  # type: ignore[misc]  # larger than any array: the sizes of an array bound what is read
    """Memory that an array reads; it keeps the tensor alive."""

    __slots__ = ("tensor",)


class _Kinds(dict[Any, np.dtype[Any]]):
    """The dtype of numpy for each dtype of torch, by its name."""

    def __missing__(self, dtype: Any) -> np.dtype[Any]:
        self[dtype] = found = np.dtype(str(dtype).rpartition(".")[2])
        return found


_KINDS = _Kinds()


@cache
def _with_memory() -> tuple[type, ...]:
    """Return the types of tensors that may have memory of their own."""
    torch = sys.modules["torch"]
    return torch.Tensor, torch.nn.Parameter


def memory_of_tensor(tensor: Any) -> npt.NDArray[Any]:
    """Return a dense tensor in main memory as a numpy array on the same memory, without its gradient.

    ``tensor.numpy()`` would do the same, but it forbids for good to resize the memory, as FSDP does with parameters.
    """
    if type(tensor) not in _with_memory() or tensor._is_zerotensor():
        return np.asarray(tensor.detach().numpy())  # refuses tensors that have no memory of their own
    kind = _KINDS[tensor.dtype]
    memory = _Memory.from_address(tensor.data_ptr())
    memory.tensor = tensor
    strides = None if tensor.is_contiguous() else [step * kind.itemsize for step in tensor.stride()]
    return np.ndarray(tensor.shape, kind, memory, 0, strides)


def plain_tensor(tensor: Any, name: str) -> Any:
    """Return a torch tensor as dense numbers without a gradient; raise if it has no such numbers."""
    refuse_masked_tensor(tensor, name)
    if tensor.is_nested:
        raise TypeError(
            f"{name} is a nested torch tensor; expected a dense one. Convert it first, e.g. "
            f"torch.nested.to_padded_tensor({name}, 0.0), and leave the padding out by mask="
        )
    layout = str(tensor.layout)
    if layout != "torch.strided":
        raise TypeError(
            f"{name} is a torch tensor of layout {layout}; expected a dense one (torch.strided). "
            f"Convert it first: {name}.to_dense()"
        )
    if tensor.is_meta:
        raise TypeError(
            f"{name} is a torch tensor on the device meta, which has a shape but no numbers; expected a tensor that "
            "holds data. Compute it on a real device first, such as device='cpu'"
        )
    tensor = without_wrappers(tensor.detach().resolve_neg())
    if sys.modules["torch"]._C._functorch.is_batchedtensor(tensor) or type(tensor).__name__ in (
        "FakeTensor",
        "FunctionalTensor",
    ):
        raise TypeError(
            f"{name} is a torch tensor within torch.func.vmap, torch.export or FakeTensorMode, which hold its numbers "
            f"back; expected a tensor that holds data. Call without them: leading axes of {name} are a batch"
        )
    return tensor


def without_wrappers(tensor: Any) -> Any:
    """Return the numbers that torch.func.grad or jvp follow, which a call reads without a gradient."""
    wrappers = sys.modules["torch"]._C._functorch
    while wrappers.is_gradtrackingtensor(tensor):
        tensor = wrappers.get_unwrapped(tensor)
    return tensor


def seen(tensor: Any) -> Any:
    """Return a tensor without a gradient, such as a mask, without the wrappers of torch.func.grad and jvp."""
    return tensor if tensor.requires_grad else without_wrappers(tensor)
