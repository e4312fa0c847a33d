"""Steps of decoding with Latte: the output of one row and the state after it, made at once."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from levattn._kernels import kernels_for
from levattn._kernels.latent.contract import LatentSteps
from levattn.states import SoftmaxState
from levattn.states.softmax import with_sums

__all__ = ["one_step", "plain_step"]

_KINDS = np.dtype(np.float32), np.dtype(np.float64)


def plain_step(Q: Any, K: Any, V: Any, state: Any) -> tuple[Any, SoftmaxState] | None:
    """Return the output of a row and the state after it, or None unless arguments are as the kernels read them.

    A few comparisons tell that. What does not pass takes the way that broadcasts, converts, and says what is wrong.
    """
    if not (type(Q) is type(K) is type(V) is np.ndarray and isinstance(state, SoftmaxState)):
        return None
    batch, kind = state.batch, V.dtype
    if kind not in _KINDS or Q.dtype != kind or K.dtype != kind:
        return None
    if Q.shape != (*batch, 1, state.latents) or K.shape != Q.shape or V.shape != (*batch, 1, state.d):
        return None
    return one_step(Q, K, V, None, state)


def one_step(Q: Any, K: Any, V: Any, mask: Any, state: SoftmaxState) -> tuple[Any, SoftmaxState] | None:
    """Return the output of a row, as V, and the state after it, or None where there is no such way.

    Arrays and a mask, or None, have the leading axes of the state, or one of their product.
    """
    sums = state.m, state.s, state.S
    if Q.shape[-2] != 1 or not all(isinstance(array, np.ndarray) for array in (Q, *sums)):
        return None
    found = cast(LatentSteps, kernels_for("latent", Q)).step(Q, K, V, mask, sums)
    return None if found is None else (found[0], with_sums(state, found[1]))
