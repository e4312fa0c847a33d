"""Certificates of softmax for queries in a ball or an ellipsoid: Jensen's bound, and steps towards the exact value."""

from __future__ import annotations

import numpy as np

from levattn._array import to_float64, to_numpy
from levattn._kernels import Float64, Rows, kernels_for
from levattn.linalg import UNIT

__all__ = ["ball", "jensen"]

_NUMBERS = 1 << 21  # logits in a block


def jensen(rows: Rows, root: Float64) -> Float64:
    """Bound softmax: log Σ exp⟨y, k_l⟩ is at least log n + ⟨y, mean⟩, and ⟨y, k_j − mean⟩ at most ‖Lᵀ(k_j − mean)‖."""
    b, n, d = rows.shape
    kernels = kernels_for(rows)
    counts = np.full(b, n) if rows.mask is None else to_numpy(rows.mask).sum(axis=1)
    mean = kernels.column_sums(rows) / np.maximum(counts, 1)[:, None]
    R = np.asarray(np.linalg.qr(root.T, mode="r")).T  # lower triangular with R Rᵀ = L Lᵀ
    flipped = np.ascontiguousarray(R[::-1, ::-1])
    turned = Rows(rows.keys[:, :, ::-1], rows.format, rows.mask, shift=np.ascontiguousarray(mean[:, ::-1]))
    squares = kernels.wide_zeros(rows)
    kernels.sqnorms(turned, np.arange(b), np.broadcast_to(flipped, (b, d, d)), squares)
    # rounding of k − mean, relative to the largest key
    norms = np.sqrt(to_numpy(squares)) * (1 + 16 * d * UNIT) + 16 * d * UNIT * np.abs(mean).max(
        initial=0.0
    ) * np.linalg.norm(R)
    with np.errstate(over="ignore"):
        return np.asarray(np.minimum(np.exp(norms) / np.maximum(counts, 1)[:, None], 1.0))


def ball(rows: Rows, root: Float64, bounds: Float64, epsilon: float, steps: int) -> Float64:
    """Lower the bounds of a batch that are at least ε by steps of Frank and Wolfe; what falls below is left alone.

    log σ_j is the maximum over ‖u‖ ≤ 1 of the concave g(u) = ⟨k_j, u⟩ − log Σ exp⟨k_l, u⟩, with keys multiplied by
    Lᵀ. So the tangent plane at any u bounds it: log σ_j ≤ g + ‖∇g‖ − ⟨∇g, u⟩, and so does the least of several.
    """
    out = bounds.copy()
    for item in range(len(bounds)):
        one = rows.item(item)
        present = np.arange(rows.shape[1]) if one.mask is None else np.flatnonzero(to_numpy(one.mask)[0])
        keys = to_float64(one.keys, one.format)[0][present]
        keys = (keys - keys.mean(axis=0, keepdims=True) if len(keys) else keys) @ root
        open_ = np.flatnonzero(bounds[item, present] >= epsilon)
        step = max(1, _NUMBERS // max(len(keys), 1))
        for low in range(0, len(open_), step):
            chosen = open_[low : low + step]
            out[item, present[chosen]] = np.minimum(
                bounds[item, present[chosen]], _climb(keys, keys[chosen], epsilon, steps)
            )
    return out


def _climb(keys: Float64, own: Float64, epsilon: float, steps: int) -> Float64:
    """Return upper bounds of the sensitivities of some of the keys, for queries in the unit ball."""
    u = np.zeros_like(own)
    Z = np.zeros((len(own), len(keys)))
    best = np.full(len(own), np.inf)
    live = np.arange(len(own))
    for _ in range(steps):
        top = Z.max(axis=1, keepdims=True)
        P = np.exp(Z - top)
        total = P.sum(axis=1, keepdims=True)
        P /= total
        g = np.einsum("ij,ij->i", own[live], u) - (top + np.log(total))[:, 0]
        gradient = own[live] - P @ keys
        size = np.linalg.norm(gradient, axis=1)
        slack = 64 * UNIT * (1 + np.abs(Z).max(axis=1, initial=0.0)) * len(keys) ** 0.5
        best[live] = np.minimum(best[live], g + size - np.einsum("ij,ij->i", gradient, u) + slack)
        # a key is settled where its bound is below ε, or where a query already gives it ε
        still = (best[live] >= np.log(epsilon)) & (g < np.log(epsilon))
        live, u, Z, gradient, size = live[still], u[still], Z[still], gradient[still], size[still]
        if not len(live):
            break
        corner = gradient / np.where(size > 0, size, 1.0)[:, None]
        direction = corner - u
        change = direction @ keys.T
        slope = np.einsum("ij,ij->i", own[live], direction)
        gamma = np.zeros(len(live))
        for _ in range(4):  # Newton's method for the best point between u and the corner
            W = Z + gamma[:, None] * change
            W = np.exp(W - W.max(axis=1, keepdims=True))
            W /= W.sum(axis=1, keepdims=True)
            mean = np.einsum("ij,ij->i", W, change)
            variance = np.einsum("ij,ij,ij->i", W, change, change) - mean**2
            gamma = np.clip(gamma + (slope - mean) / np.maximum(variance, 1e-300), 0.0, 1.0)
        u = u + gamma[:, None] * direction
        Z = Z + gamma[:, None] * change
    with np.errstate(over="ignore"):
        return np.asarray(np.minimum(np.exp(best), 1.0))
