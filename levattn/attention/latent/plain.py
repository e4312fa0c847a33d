"""A short path for decode steps and for calls of Latte whose arrays the kernels read without conversion.

A few comparisons find these calls. All others take the path that broadcasts, converts and reports errors, and gives
the same bits.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np

from levattn._core.arrays import is_torch, on_cuda
from levattn._kernels import kernels_for
from levattn._kernels.latent.contract import LatentSteps
from levattn.attention.common.arguments import latent_attention, reshaped
from levattn.states import SoftmaxState
from levattn.states.softmax import held_sums, with_sums

_KINDS = np.dtype(np.float32), np.dtype(np.float64)


def plain_call(Q: Any, K: Any, V: Any, causal: bool) -> Any:
    """Return the output of a call without further arguments, or None unless its arrays are plain."""
    if not _are_plain(Q, K, V) or min(Q.ndim, V.ndim) < 2:
        return None
    *batch, T, L = Q.shape
    U, D = V.shape[-2:]
    if K.shape != (*batch, U, L) or V.shape != (*batch, U, D) or not L or not D or (causal and T != U):
        return None
    if not all(array.flags.aligned and array.strides[-1] == array.itemsize for array in (Q, K, V)):
        return None
    b = math.prod(batch)
    Y = latent_attention(Q.reshape(b, T, L), K.reshape(b, U, L), V.reshape(b, U, D), causal=causal)
    return Y.reshape(*batch, T, D)


def plain_step(Q: Any, K: Any, V: Any, state: Any) -> tuple[Any, SoftmaxState] | None:
    """Return the output of a row and the state after it, or None unless arrays are plain and match the state."""
    if not _are_plain(Q, K, V) or not isinstance(state, SoftmaxState):
        return None
    if Q.shape != (*state.batch, 1, state.latents) or K.shape != Q.shape or V.shape != (*state.batch, 1, state.d):
        return None
    return one_step(Q, K, V, None, state, state.batch)


def _are_plain(Q: Any, K: Any, V: Any) -> bool:
    """Tell whether all arrays are numpy's, in the same dtype, float32 or float64."""
    return type(Q) is type(K) is type(V) is np.ndarray and Q.dtype == K.dtype == V.dtype and V.dtype in _KINDS


def are_read_as_stored(*arrays: Any) -> bool:
    """Tell whether kernels of a device read these arrays without conversion: all in the same 16-bit format."""
    first = arrays[0]
    if not is_torch(first):  # torch's compiler must not trace beyond this line
        return on_cuda(first) and all(array.dtype == first.dtype and first.dtype.itemsize == 2 for array in arrays)
    if not first.is_cuda or first.dtype.itemsize != 2 or any(array.dtype != first.dtype for array in arrays):
        return False
    from levattn._kernels.tensors import follows_definition

    return not follows_definition(arrays)


def one_step(Q: Any, K: Any, V: Any, mask: Any, state: Any, batch: tuple[int, ...]) -> tuple[Any, SoftmaxState] | None:
    """Return the output of causal rows, shaped as V, and the state after them, or None if no kernel does the step.

    Leading axes are `batch`, for arrays of numpy only, or one axis of the product of `batch`.
    """
    sizes = batch, Q.shape[-1], V.shape[-1]
    fits = isinstance(state, SoftmaxState) and (state.batch, state.latents, state.d) == sizes
    if state is not None and not fits:
        return None
    in_main_memory, sums = isinstance(Q, np.ndarray), None if state is None else held_sums(state)
    if in_main_memory:
        if state is None or Q.shape[-2] != 1:
            return None
        m, s, S = sums = state.m, state.s, state.S
        if not (isinstance(m, np.ndarray) and isinstance(s, np.ndarray) and isinstance(S, np.ndarray)):
            return None
    elif not (is_torch(Q) or on_cuda(Q)):
        return None
    found = cast(LatentSteps, kernels_for("latent", Q)).step(Q, K, V, mask, sums)
    if found is None:
        return None
    Y, (m, s, S) = found
    if not in_main_memory:
        m, s, S = (reshaped(part, (*batch, *part.shape[1:])) for part in (m, s, S))
    return Y, with_sums(SoftmaxState(sizes[1], sizes[2], batch) if state is None else state, (m, s, S))
