"""Factors of small matrices on a CUDA device: by a block of threads each, or if they are wide in blocks of columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from levattn._core.arrays import to_numpy
from levattn._core.types import Float64, Int64
from levattn._kernels.cuda_source import launch, namespace, on_device, shared_limit

__all__ = ["inverse_cholesky"]

_THREADS = 512
_FIGURES = 6  # what is known of a matrix, in the order of dense.cu
_STEPS = 30  # of power iteration, as in norms.py
_STATIC = 8 * _THREADS  # bytes of shared memory that the kernel has besides
_WIDE = 256  # columns from which products of blocks, which cuBLAS computes, are most of the work
_BLOCK = 128  # of these columns


@dataclass(frozen=True, eq=False)
class _Inverses:
    W: Any
    figures: Float64  # (b, _FIGURES)

    @property
    def pivot(self) -> Float64:
        """The smallest pivot."""
        return self.figures[:, 0]

    @property
    def bound(self) -> Float64:
        """Bounds of the squared norms."""
        return self.figures[:, 1]

    def ranks(self) -> Int64:
        """Return the number of columns that are not left out."""
        return self.figures[:, 2].astype(np.int64)

    def extremes(self) -> tuple[Float64, Float64]:
        """Return the least and the largest entry of the diagonals."""
        return self.figures[:, 3], self.figures[:, 4]

    def spreads(self) -> Float64:
        """Return the sum of the squares of W for equilibrated columns."""
        return self.figures[:, 5]


def inverse_cholesky(G: Any, shift: float = 0.0, *, limit: Any = None) -> _Inverses:
    """Return W on the device, and what is known of it in main memory."""
    G = on_device(G)
    limits = np.broadcast_to(np.inf if limit is None else limit, len(G))
    if G.shape[1] < _WIDE:
        W, figures = _whole(G, shift, limits)
        return _Inverses(W, to_numpy(figures))
    W, even, figures = _in_blocks(G, shift)
    known = to_numpy(figures)
    far = np.flatnonzero((known[:, 1] > limits) & (known[:, 1] < np.inf))
    if len(far):
        known[far, 1] = np.minimum(known[far, 1], to_numpy(_squared_norms(even[on_device(far)])))
    return _Inverses(W, known)


def _whole(G: Any, shift: float, limits: Float64) -> tuple[Any, Any]:
    xp = namespace()
    b, d, _ = G.shape
    W, figures = xp.empty((b, d, d)), xp.empty((b, _FIGURES))
    shared = 8 * (d * (d | 1) + 2 * d)
    fits = shared <= shared_limit() - _STATIC
    room = None if fits else xp.empty((b, d, d | 1))
    # one number, as in most calls, is no copy to the device
    each = None if (limits == limits[:1]).all() else on_device(limits)
    limit = limits[0] if b else np.inf
    arguments = [G, d, shift, limit, each, room, W, figures]
    launch("dense", "invert_cholesky", (), (b,), arguments, threads=_THREADS, shared=shared if fits else 16 * d)
    return W, figures


def _squared_norms(A: Any) -> Any:
    """Return the squares of the 2-norms of matrices, by power iteration."""
    xp = namespace()
    x = on_device(np.cos(np.arange(1.0, A.shape[1] + 1) ** 2))[None, :, None]
    for _ in range(_STEPS):
        y = xp.matmul(A.transpose(0, 2, 1), xp.matmul(A, x))
        square = xp.sqrt((y * y).sum(axis=1) / (x * x).sum(axis=1))
        x = y / xp.sqrt((y * y).sum(axis=1))[:, :, None]
    return square[:, 0]


def _in_blocks(G: Any, shift: float) -> tuple[Any, Any, Any]:
    """Factor the upper triangle block by block, and invert the factor in the same way, with products of blocks.

    Return W, the same for equilibrated columns, and the figures of each. The pivot has the sign of the smallest, which
    is all that is asked of it.
    """
    xp = namespace()
    b, d, _ = G.shape
    diagonal = G.diagonal(axis1=1, axis2=2)
    size = xp.sqrt(xp.maximum(diagonal, 0.0))
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
        inner, found = _whole(on_device(A[:, at, at]), 0.0, np.full(b, np.inf))
        pivot = xp.minimum(xp.minimum(pivot, least), found[:, 0])
        W[:, at, at] = inner
        A[:, at, rest] = xp.matmul(inner.transpose(0, 2, 1), A[:, at, rest])  # rows of the factor R
        A[:, rest, rest] -= xp.matmul(A[:, at, rest].transpose(0, 2, 1), A[:, at, rest])
        for above in spans[:k]:  # column block k of the inverse: -W R inner, above the diagonal
            between = slice(above.start, at.start)
            W[:, above, at] = -xp.matmul(xp.matmul(W[:, above, between], A[:, between, at]), inner)
    sizes = xp.abs(W)
    bound = sizes.sum(axis=1).max(axis=1) * sizes.sum(axis=2).max(axis=1)
    bound, spread = xp.where(pivot > 0, bound, np.inf), (W * W).sum(axis=(1, 2))
    known = pivot, bound, live.sum(axis=1), diagonal.min(axis=1), diagonal.max(axis=1), spread
    return W * scale[:, :, None], W, xp.stack([xp.asarray(figure, np.float64) for figure in known], axis=1)
