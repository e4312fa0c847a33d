"""Linear recurrences on the CPU: the arguments of the compiled code, shared out over threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._kernels.latent.decay_compiled import decay_tasks
from levattn._kernels.tasks import share

_BYTES = 512  # of a row in one task: whole cache lines, and enough tasks for the threads


def decayed_scan(a: Any, x: Any, first: Any = None, *, reverse: bool = False) -> Any:
    """Return ``h_t = a_t h_{t−1} + x_t`` for (b, T, C), from ``h_{−1} = first`` (b, C) or 0.

    If `reverse`, return ``r_t = x_t + a_{t+1} r_{t+1}`` instead, from 0, which gives the gradient of x. Where a is 0 a
    sequence begins: earlier rows are not read, not even NaN.
    """
    kind = np.result_type(a, x)
    a, x = (np.ascontiguousarray(np.broadcast_to(part, x.shape), kind) for part in (a, x))
    b, _, channels = x.shape
    start = np.zeros((b, channels), kind)
    if first is not None and not reverse:
        start[:] = first
    out = np.empty_like(x)
    width = max(1, _BYTES // kind.itemsize)
    tasks = b * -(-channels // width)
    share(lambda low, high: decay_tasks(a, x, start, width, reverse, low, high, out), tasks, x.size)
    return out
