"""Decode steps of latent attention on a CUDA device: one launch of latent_step.cu, without a copy or a wait.

A block of threads takes 32 columns of a head. It reads and writes the state once, 16 L D bytes for each head. This
bounds the time, because all other arrays are 2 L + 2 D numbers for each row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._kernels.cuda_source import launch, namespace, on_device, shared_limit, stored, with_rows, with_steps
from levattn._kernels.latent.contract import State

# As in latent_step.cu
_ROWS = 8
_COLUMNS = 32
_STATIC = 8 * _ROWS * _ROWS * _COLUMNS + 64  # bytes of shared memory in its source


def step_at_once(Q: Any, K: Any, V: Any, mask: Any, state: State | None) -> tuple[Any, State] | None:
    """Return the output (b, T, D) of up to 8 causal rows, and the state after them; see `LatentSteps`.

    None for more rows, or more latents than fit into shared memory.
    """
    xp, (b, T, L), D = namespace(), Q.shape, V.shape[2]
    shared = 3 * 8 * T * L
    if not 0 < T <= _ROWS or shared + _STATIC > shared_limit():
        return None
    before = [None if state is None else on_device(part, np.float64) for part in state or (None,) * 3]
    after = xp.empty((b, L)), xp.empty((b, L)), xp.empty((b, L, D))
    Y = xp.empty((b, T, D), V.dtype)
    arguments = [step for array in (Q, K, V) for step in with_steps(with_rows(array), 2)]
    arguments += [*with_steps(mask, 2), T, L, D, *before, Y, *after]
    grid = (b, -(-D // _COLUMNS))
    launch("latent_step", "step_rows", (stored(V.dtype),), grid, arguments, threads=32 * _ROWS, shared=shared)
    return Y, after
