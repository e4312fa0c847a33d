"""Factors of small matrices on a CUDA device: one block of threads each, or for wide ones, blocks of columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from levattn._core.arrays import to_numpy
from levattn._core.types import Flags, Float64, Int64
from levattn._kernels.cuda_source import launch, namespace, on_device, shared_limit

_THREADS = 512
_FIGURES, _NORMS = 6, 3  # figures of a matrix, and of its whitening matrix, in the order of dense.cu
_STEPS = 30  # of power iteration, as in norms.py
_STATIC = 8 * _THREADS  # bytes of shared memory that the kernel declares statically
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


@dataclass(frozen=True, eq=False)
class _Rebased:
    C: Any
    W: Any
    figures: Float64  # (b, _FIGURES), with the bounds of unshifted moments
    norms: Float64  # (b, _NORMS)
    good: Flags

    @property
    def bound(self) -> Float64:
        """Bounds of the squared norms, without a shift."""
        return self.figures[:, 1]

    def whole(self) -> Flags:
        """Return where no column is left out."""
        return np.asarray(self.figures[:, 2] == self.C.shape[1])

    def frobenius(self) -> Float64:
        """Return the root of the sum of squares of W for keys of unit columns."""
        return self.norms[:, 0]

    def spectral(self) -> Float64:
        """Return the 2-norm of W for keys of unit columns."""
        return self.norms[:, 1]

    def of_moments(self) -> Float64:
        """Return the 2-norm of the moments of keys of unit columns."""
        return self.norms[:, 2]


def inverse_cholesky(G: Any, shift: float = 0.0, *, limit: Any = None) -> _Inverses:
    """Return W on the device, and its figures in main memory."""
    G = on_device(G)
    limits = limit if isinstance(limit, np.ndarray) else np.full(len(G), np.inf if limit is None else limit)
    if G.shape[1] < _WIDE:
        W, figures = _whole(G, shift, limits)
        return _Inverses(W, to_numpy(figures))
    W, even, figures = _in_blocks(G, shift)
    known = to_numpy(figures)
    far = np.flatnonzero((known[:, 1] > limits) & (known[:, 1] < np.inf))
    if len(far):
        known[far, 1] = np.minimum(known[far, 1], to_numpy(_squared_norms(even[on_device(far)])))
    return _Inverses(W, known)


def rebased(H: Any, sizes: Any, bases: Any, shift: float, accepted: float) -> _Rebased:
    """Return a round of shifted Cholesky QR, whose figures come to main memory in one copy."""
    H = on_device(H)  # kernels read matrices one after the other
    if H.shape[1] >= _WIDE:
        return _rebased_in_blocks(H, sizes, bases, shift, accepted)
    xp = namespace()
    b, d, _ = H.shape
    room = xp.empty((_FIGURES + _NORMS) * b)
    C, _ = _whole(H, 0.0, np.full(b, np.inf), accepted, shift, room[: _FIGURES * b])
    W, norms = C if bases is None else xp.empty((b, d, d)), room[_FIGURES * b :]
    scratch, shared = _scratch(b, d)
    arguments = [bases, C, H, sizes, d, scratch, W, norms]
    launch("dense", "multiply_bases", (), (b,), arguments, threads=_THREADS, shared=shared)
    known = to_numpy(room)
    figures = known[: _FIGURES * b].reshape(b, _FIGURES)
    return _Rebased(C, W, figures, known[_FIGURES * b :].reshape(b, _NORMS), _good(figures, accepted))


def _good(figures: Float64, accepted: float) -> Flags:
    return np.asarray((figures[:, 1] <= accepted) & (figures[:, 1] < np.inf))


def _scratch(b: int, d: int) -> tuple[Any, int]:
    """Return room for matrices too large for shared memory, or None, and the bytes of shared memory."""
    shared = 8 * (d * (d | 1) + 2 * d)
    if shared <= shared_limit() - _STATIC:
        return None, shared
    return namespace().empty((b, d, d | 1)), 16 * d


def _whole(
    G: Any,
    shift: float,
    limits: Float64,
    accepted: float = np.inf,
    next_shift: float = 0.0,
    figures: Any | None = None,
) -> tuple[Any, Any]:
    """Return W and the figures, written to `figures` if given; other arguments are as in dense.cu."""
    xp = namespace()
    b, d, _ = G.shape
    W, figures = xp.empty((b, d, d)), xp.empty((b, _FIGURES)) if figures is None else figures
    room, shared = _scratch(b, d)
    # one number, as in most calls, needs no copy to the device
    each = None if (limits == limits[:1]).all() else on_device(limits)
    limit = limits[0] if b else np.inf
    arguments = [G, d, shift, limit, each, accepted, next_shift, room, W, figures]
    launch("dense", "invert_cholesky", (), (b,), arguments, threads=_THREADS, shared=shared)
    return W, figures


def _rebased_in_blocks(H: Any, sizes: Any, bases: Any, shift: float, accepted: float) -> _Rebased:
    xp = namespace()
    C, _, there = _in_blocks(H, 0.0)
    figures = to_numpy(there)
    good = _good(figures, accepted)
    left, tried = np.flatnonzero(~good), shift
    while len(left):
        again, _, there = _in_blocks(H[on_device(left)], tried)
        made = to_numpy(there)[:, 0] > 0
        C[on_device(left[made])] = again[on_device(np.flatnonzero(made))]
        left, tried = left[~made], 100 * tried
    W = C if bases is None else _products(bases, C)
    even = sizes[:, :, None] * W
    squares = [(even * even).sum(axis=(1, 2)), _squared_norms(even)]
    if bases is None:
        squares.append(_squared_norms(H / sizes[:, :, None] / sizes[:, None, :]))
    return _Rebased(C, W, figures, np.sqrt(to_numpy(xp.stack(squares, axis=1))), good)


def _squared_norms(A: Any) -> Any:
    """Return the squares of the 2-norms of matrices, by power iteration."""
    xp = namespace()
    x = on_device(np.cos(np.arange(1.0, A.shape[1] + 1) ** 2))[None]
    for _ in range(_STEPS):
        y = (A * (A * x[:, None]).sum(axis=2)[:, :, None]).sum(axis=1)
        square = xp.sqrt((y * y).sum(axis=1) / (x * x).sum(axis=1))
        x = y / xp.sqrt((y * y).sum(axis=1))[:, None]
    return square


def _products(A: Any, B: Any) -> Any:
    """Return the products of matrices, one matrix at a time.

    cuBLAS chooses an algorithm by the number of matrices, and perhaps by strides and addresses. So each product is a
    call of its own, of arrays of their own: it has the same bits in any batch.
    """
    xp = namespace()
    out = xp.zeros((len(A), A.shape[1], B.shape[2]))
    if out.size:
        for i in range(len(A)):
            out[i] = xp.matmul(A[i].copy(), B[i].copy())
    return out


def _in_blocks(G: Any, shift: float) -> tuple[Any, Any, Any]:
    """Factor the upper triangle block by block, and invert the factor in the same way, with products of blocks.

    Return W, W for equilibrated columns, and the figures of each. Only the sign of the smallest pivot is right, which
    is all that callers need.
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
        left = A[:, at, at].diagonal(axis1=1, axis2=2)  # finds pivots that have become zero or negative
        least = xp.where(live[:, at], left, np.inf).min(axis=1)
        inner, found = _whole(on_device(A[:, at, at]), 0.0, np.full(b, np.inf))
        pivot = xp.minimum(xp.minimum(pivot, least), found[:, 0])
        W[:, at, at] = inner
        A[:, at, rest] = _products(inner.transpose(0, 2, 1), A[:, at, rest])  # rows of the factor R
        A[:, rest, rest] -= _products(A[:, at, rest].transpose(0, 2, 1), A[:, at, rest])
        for above in spans[:k]:  # column block k of the inverse: -W R inner, above the diagonal
            between = slice(above.start, at.start)
            W[:, above, at] = -_products(_products(W[:, above, between], A[:, between, at]), inner)
    sizes = xp.abs(W)
    bound = sizes.sum(axis=1).max(axis=1) * sizes.sum(axis=2).max(axis=1)
    bound, spread = xp.where(pivot > 0, bound, np.inf), (W * W).sum(axis=(1, 2))
    known = pivot, bound, live.sum(axis=1), diagonal.min(axis=1), diagonal.max(axis=1), spread
    return W * scale[:, :, None], W, xp.stack([xp.asarray(figure, np.float64) for figure in known], axis=1)
