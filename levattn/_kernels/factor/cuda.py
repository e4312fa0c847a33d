"""Factors of small matrices on a CUDA device: by a block of threads each, or if they are wide in blocks of columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._core.arrays import to_numpy
from levattn._core.types import Float64
from levattn._kernels.cuda_source import launch, namespace, on_device, shared_limit

__all__ = ["inverse_cholesky"]

_THREADS = 512
_STATIC = 8 * _THREADS  # bytes of shared memory that the kernel has besides
_WIDE = 256  # columns from which products of blocks, which cuBLAS computes, are most of the work
_BLOCK = 128  # of these columns


def inverse_cholesky(G: Any, shift: float = 0.0) -> tuple[Any, Float64, Float64]:
    """Return W on the device, and pivots and bounds of the norms of the inverses."""
    xp = namespace()
    W, pivot, inverse_norm_bound = (_whole if G.shape[1] < _WIDE else _in_blocks)(on_device(G), shift)
    figures = to_numpy(xp.concatenate([pivot[None], inverse_norm_bound[None]]))
    return W, figures[0], figures[1]


def _whole(G: Any, shift: float) -> tuple[Any, Any, Any]:
    xp = namespace()
    b, d, _ = G.shape
    W, pivot, inverse_norm_bound = xp.zeros((b, d, d)), xp.empty(b), xp.empty(b)
    shared = 8 * (d * (d | 1) + 2 * d)
    fits = shared <= shared_limit() - _STATIC
    room = None if fits else xp.empty((b, d, d | 1))
    arguments = [G, d, shift, room, W, pivot, inverse_norm_bound]
    launch("dense", "invert_cholesky", (), (b,), arguments, threads=_THREADS, shared=shared if fits else 16 * d)
    return W, pivot, inverse_norm_bound


def _in_blocks(G: Any, shift: float) -> tuple[Any, Any, Any]:
    """Factor the upper triangle block by block, and invert the factor in the same way, with products of blocks.

    The pivot returned has the sign of the smallest, which is all that is asked of it.
    """
    xp = namespace()
    b, d, _ = G.shape
    size = xp.sqrt(xp.maximum(G.diagonal(axis1=1, axis2=2), 0.0))
    live = size > 0
    scale = xp.where(live, 1 / xp.where(live, size, 1.0), 0.0)
    A = G * scale[:, :, None] * scale[:, None, :]
    A.reshape(b, d * d)[:, :: d + 1] = xp.where(live, 1.0 + shift, 0.0)
    W = xp.zeros((b, d, d))
    pivot = xp.full(b, np.inf)
    spans = [slice(low, min(low + _BLOCK, d)) for low in range(0, d, _BLOCK)]
    for k, at in enumerate(spans):
        rest = slice(at.stop, d)
        left = A[:, at, at].diagonal(axis1=1, axis2=2)  # what was not above zero before, or is not any more
        least = xp.where(live[:, at], left, np.inf).min(axis=1)
        inner, found, _ = _whole(on_device(A[:, at, at]), 0.0)
        pivot = xp.minimum(xp.minimum(pivot, least), found)
        W[:, at, at] = inner
        A[:, at, rest] = xp.matmul(inner.transpose(0, 2, 1), A[:, at, rest])  # rows of the factor R
        A[:, rest, rest] -= xp.matmul(A[:, at, rest].transpose(0, 2, 1), A[:, at, rest])
        for above in spans[:k]:  # column block k of the inverse: -W R inner, above the diagonal
            between = slice(above.start, at.start)
            W[:, above, at] = -xp.matmul(xp.matmul(W[:, above, between], A[:, between, at]), inner)
    sizes = xp.abs(W)
    bound = sizes.sum(axis=1).max(axis=1) * sizes.sum(axis=2).max(axis=1)
    return W * scale[:, :, None], pivot, xp.where(pivot > 0, bound, np.inf)
