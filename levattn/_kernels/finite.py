"""Whether products must exclude NaN and infinity."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from levattn._core.arrays import array_namespace
from levattn._core.memory import memory_of_tensor


def surely_finite(*arrays: Any) -> bool:
    """Tell whether all numbers of some arrays of one library are known to be finite.

    The answer is also False where torch traces or transforms the call, so that no numbers can be read, and where their
    sum overflows. The test is one pass over each array, without temporary arrays.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(arrays[0], torch.Tensor):
        if not all(_can_be_read(torch, array) for array in arrays):
            return False
        if arrays[0].device.type != "cpu":  # wait for the device once
            return bool(torch.isfinite(sum(array.detach().sum() for array in arrays)))
        arrays = tuple(memory_of_tensor(array.detach().resolve_neg()) for array in arrays)
    with np.errstate(over="ignore", invalid="ignore"):
        if isinstance(arrays[0], np.ndarray):  # a sum of squares: BLAS is faster than np.sum
            return all(math.isfinite(np.vdot(array, array)) for array in arrays)
        xp = array_namespace(*arrays)
        return all(bool(xp.isfinite(xp.sum(array))) for array in arrays)


def _can_be_read(torch: Any, tensor: Any) -> bool:
    """Tell whether a tensor holds numbers in memory, and the call may wait for them."""
    if torch.compiler.is_compiling() or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
