"""The namespace of an array, determined in a way that torch can trace."""

from __future__ import annotations

import math
import sys
from typing import Any, TypeVar

import array_api_compat
import numpy as np

from levattn._core.arrays import array_namespace, is_torch

_Record = TypeVar("_Record")


def namespace_of(array: Any) -> Any:
    """Return the functions of an array's library, by the names of the array-API standard."""
    if not isinstance(array, np.ndarray) and is_torch(array):
        from array_api_compat import torch as functions

        return functions
    return array_namespace(array)


def plain_arrays(*arrays: Any) -> tuple[tuple[Any, ...], bool]:
    """Return plain torch tensors in main memory as numpy arrays, and whether they were tensors.

    The operators' calls to torch would take longer than a short call of the kernels.
    """
    if is_torch(arrays[0]):
        from levattn._kernels import tensors

        found = tensors.memories_of(arrays)
        if found is not None:
            return found, True
    return arrays, False


def as_given(array: Any, were_tensors: bool) -> Any:
    """Return a result for arrays from `plain_arrays` in the type of the input."""
    return sys.modules["torch"].from_numpy(array) if were_tensors else array


def changed(record: _Record, **fields: Any) -> _Record:
    """Return a frozen dataclass with changed fields, in a tenth of the time of `replace`."""
    other = object.__new__(type(record))
    vars(other).update(vars(record))
    vars(other).update(fields)
    return other


def device_of(array: Any) -> Any:
    """Return the device of an array."""
    return array.device if is_torch(array) else array_api_compat.device(array)


def without_gradient(array: Any) -> Any:
    """Return an array detached from gradients of torch."""
    return array.detach() if is_torch(array) else array


def followable(array: Any) -> Any:
    """Copy a tensor that torch made in inference mode, because outside it torch cannot save it for a gradient."""
    if is_torch(array):
        torch = sys.modules["torch"]
        if not torch.compiler.is_compiling() and array.is_inference() and not torch.is_inference_mode_enabled():
            return array.clone()
    return array


def empty_output(q: Any, K: Any, V: Any) -> Any:
    """Return the output (b, g, T, D) of attention without rows.

    q: (b, g, T, d). K, V: (b, n, d) and (b, n, D). The output is a product of all three, so gradients of torch, all
    zero, have a way to them.
    """
    xp = namespace_of(q)
    Y = xp.matmul(xp.matmul(q, xp.matrix_transpose(K)[:, None, :, :]), V[:, None, :, :])
    return xp.astype(Y, V.dtype, copy=False)  # autocast makes products of half precision


def rows_of_items(X: Any, which: Any) -> Any:
    """Return some rows of each item of an array (b, ..., n, C), by their numbers (b, m): (b, ..., m, C)."""
    xp = namespace_of(X)
    *batch, n, C = X.shape
    b, m = which.shape
    each = math.prod(batch) // b if b else 1
    first = n * xp.arange(b * each, device=device_of(X))
    flat = xp.reshape(first, (b, each, 1)) + which[:, None, :]
    found = xp.take(xp.reshape(X, (b * each * n, C)), xp.reshape(flat, (-1,)), axis=0)
    return xp.reshape(found, (*batch, m, C))


def masked_first(mask: Any, offsets: Any = None) -> Any:
    """Return the order (b, n) of positions in which masked positions are the first of their sequence.

    So the positions that take part are adjacent. `offsets`: as `cumulative` returns it.
    """
    xp = namespace_of(mask)
    rank = xp.astype(mask, xp.int64)
    if offsets is not None:
        device = device_of(mask)
        ends, rows = xp.asarray(offsets, device=device), xp.arange(mask.shape[1], device=device)
        rank = rank + 2 * xp.searchsorted(ends[1:], rows, side="right")
    return xp.argsort(rank, axis=1, stable=True)


def running_counts(flags: Any) -> Any:
    """Return the number of flags (b, n, ...) set before each place along the second axis, (b, n + 1, ...)."""
    if is_torch(flags):  # torch's compiler warns about the array-API namespace here
        return sys.modules["torch"].cat([flags.new_zeros(flags[:, :1].shape), flags], 1).cumsum(1)
    xp = array_namespace(flags)
    return xp.cumulative_sum(xp.astype(flags, xp.int64), axis=1, include_initial=True)
