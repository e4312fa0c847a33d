"""Certificates of softmax for queries in a ball or an ellipsoid: Jensen's bound, and steps toward the exact value."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from levattn._core.arrays import to_float64, to_numpy
from levattn._core.blas import side_by_side
from levattn._core.types import Float64
from levattn._kernels import BLOCK, GRAM, KEYS, Rows
from levattn.functions import INSIDE, AttentionFunction, Softmax
from levattn.linalg.accumulator import UNIT
from levattn.linalg.centered import means
from levattn.linalg.reading import as_read
from levattn.sensitivity.certificates import Certificate, Problem

_NUMBERS = 1 << 18  # logits in a block
_UNGROUPED = 4096  # most keys for which no groups are made
_LINE_STEPS = 6
_GROUPS = 128
_ALONE = 128  # keys that are in no group
_PAIRS = 3 * 10**8  # most pairs of an undecided key and a key for which a pass without groups follows
_STEPS = 20  # toward the exact softmax sensitivity of each undecided key
_BALL_KEYS = 50_000  # most keys for which "auto" takes these steps


def _root(problem: Problem) -> Float64 | float:
    """Return the factor of the keys for queries in the unit ball: a matrix, or a number for few wide keys."""
    f = problem.f
    if not isinstance(f, Softmax):
        raise TypeError(f"f is {f!r}; expected Softmax")
    root = f.radius if f.matrix is None and problem.factor.wide is not None else f.root(problem.rows.shape[2])
    return (1 + 2 * INSIDE) * root


def _jensen(problem: Problem) -> Float64:
    """Bound softmax: log Σ exp⟨y, k_l⟩ is at least log n + ⟨y, mean⟩, and ⟨y, k_j − mean⟩ at most ‖Lᵀ(k_j − mean)‖.

    L is a matrix (d, d), or for few keys of many columns a number that multiplies the identity.
    """
    rows, root, counts = problem.rows, _root(problem), problem.counts
    b, n, d = rows.shape
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow bounds nothing
        parts, _ = means(rows)
        apart = replace(rows, shift=parts)
        steps = BLOCK + 64 + 8 * d
        if isinstance(root, np.ndarray):
            R = np.asarray(np.linalg.qr(root.T, mode="r")).T  # lower triangular with R Rᵀ = L Lᵀ
            flipped = np.ascontiguousarray(R[::-1, ::-1])
            shift = np.ascontiguousarray(parts[:, :, ::-1])
            reversed_rows = Rows(rows.keys[:, :, ::-1], rows.format, rows.mask, shift=shift)
            squares = rows.zeros(as_float64=True)
            GRAM.sqnorms(reversed_rows, np.arange(b), np.broadcast_to(flipped, (b, d, d)), squares)
            norms = np.sqrt(to_numpy(squares))
        else:
            norms = np.array([root * np.linalg.norm(as_read(apart.item(i)), axis=1) for i in range(b)]).reshape(b, n)
        # any center gives a bound if its distance from the mean is added: rounding of sums, differences and products
        if isinstance(root, np.ndarray) and np.any(root - np.diag(np.diag(root))):
            sizes, steps = (
                KEYS.column_figures(apart, largest=True) * np.linalg.norm(R, axis=1),
                int((steps + d * d) * d**0.5) + 1,
            )
            largest = np.linalg.norm(sizes, axis=1, keepdims=True)
        else:  # no entry exceeds the largest norm
            largest = d**0.5 * np.max(norms, axis=1, keepdims=True, initial=0.0)
        norms = norms * (1 + 16 * d * UNIT) + 3 * steps * UNIT * largest
        bound = np.exp(norms * (1 + 4 * UNIT)) / np.maximum(counts, 1)[:, None] * (1 + 8 * UNIT)
        return np.asarray(np.fmin(bound, 1.0))


def _ball(problem: Problem) -> Float64:
    """Lower Jensen's bounds of at least ε by steps of Frank and Wolfe, until they fall below.

    log σ_j is the maximum over ‖u‖ ≤ 1 of the concave g(u) = ⟨k_j, u⟩ − log Σ exp⟨k_l, u⟩, with keys multiplied by
    Lᵀ. So the tangent plane at any u bounds it: log σ_j ≤ g + ‖∇g‖ − ⟨∇g, u⟩, and so does the least of several. For
    many keys, groups first bound the sum from below: m keys of mean c add at least m exp⟨c, u⟩ (Jensen).
    """
    rows, root, epsilon, out = problem.rows, _root(problem), problem.epsilon, _jensen(problem)
    for item in range(len(out)):
        one = rows.item(item)
        present = np.arange(rows.shape[1]) if one.mask is None else np.flatnonzero(to_numpy(one.mask)[0])
        keys = to_float64(one.keys, one.format)[0][present]
        least = out[item, present]
        with np.errstate(over="ignore", invalid="ignore"):
            keys = keys - keys.mean(axis=0, keepdims=True) if len(keys) else keys
            if isinstance(root, np.ndarray):
                sizes, keys = np.abs(keys) @ np.linalg.norm(root, axis=1), keys @ root
            else:
                sizes, keys = np.abs(keys).sum(axis=1) * root, keys * root
            moved = (keys.shape[1] + 4) * UNIT * np.max(sizes, initial=0.0)
            size = float(np.sqrt(np.max(np.einsum("ij,ij->i", keys, keys), initial=0.0)))
        if np.isfinite(size):  # else products may overflow
            if len(keys) > _UNGROUPED:
                _lower(least, keys, _groups(keys, size, float(moved)), epsilon)
            if np.count_nonzero(least >= epsilon) * len(keys) <= _PAIRS:  # else the bounds from groups stay
                _lower(least, keys, _Terms(keys, np.zeros(len(keys)), size, float(moved)), epsilon)
        out[item, present] = least
    return out


@dataclass(frozen=True)
class _Terms:
    """Terms exp(⟨mean, u⟩ + log) of a sum; the largest norm of a key, and the rounding of a mean or a key."""

    means: Float64
    logs: Float64
    size: float
    error: float


def _lower(bounds: Float64, keys: Float64, terms: _Terms, epsilon: float) -> None:
    """Lower the bounds that are at least ε, on all threads."""
    open_ = np.flatnonzero(bounds >= epsilon)
    step = max(1, _NUMBERS // max(len(terms.means), 1))

    def body(i: int) -> None:
        part = open_[i * step : (i + 1) * step]
        bounds[part] = np.minimum(bounds[part], _climb(terms, keys[part], epsilon))

    side_by_side(body, -(-len(open_) // step))


def _groups(keys: Float64, size: float, moved: float) -> _Terms:
    """Partition keys; return the means of the groups and the logarithms of their sizes.

    Every partition gives valid bounds. The keys farthest out, which dominate the sum for some queries, stay alone;
    k-means groups the others.
    """
    from scipy.cluster.vq import kmeans, vq

    rng = np.random.default_rng(0)
    order = np.argsort(-np.einsum("ij,ij->i", keys, keys), kind="stable")
    alone, rest = keys[order[:_ALONE]], keys[order[_ALONE:]]
    sample = rest[rng.choice(len(rest), min(len(rest), 8 * _GROUPS), replace=False)]
    first = np.unique(sample, axis=0)
    first = first[rng.choice(len(first), min(_GROUPS, len(first)), replace=False)]
    spread = float(np.sqrt(np.mean(np.sum(sample**2, axis=1))))
    centers = kmeans(sample, first, thresh=1e-3 * spread)[0] if spread > 0 else first
    labels = vq(rest, centers)[0]
    sizes = np.bincount(labels, minlength=len(centers))
    sums = np.stack([np.bincount(labels, column, len(centers)) for column in rest.T], axis=1)
    live = sizes > 0
    error = UNIT * int(sizes.max()) * float(np.abs(rest).max()) * keys.shape[1] ** 0.5
    means = np.vstack([alone, sums[live] / sizes[live, None]])
    return _Terms(means, np.log(np.concatenate([np.ones(len(alone)), sizes[live]])), size, moved + error)


def _climb(terms: _Terms, own: Float64, epsilon: float) -> Float64:
    """Return upper bounds of exp⟨k, u⟩ divided by the sum of the terms, over the unit ball, for some keys k."""
    u = np.zeros_like(own)
    Z = np.tile(terms.logs, (len(own), 1))
    best = np.full(len(own), np.inf)
    live = np.arange(len(own))
    count = _STEPS * (own.shape[1] + 4) + min(len(terms.means), BLOCK) + len(terms.means) // BLOCK + 64
    slack = 4 * count * UNIT * (1 + terms.size) + 4 * terms.error  # steps, sums and products add up
    for _ in range(_STEPS):
        top = Z.max(axis=1, keepdims=True)
        P = np.exp(Z - top)
        total = P.sum(axis=1, keepdims=True)
        P /= total
        g = np.einsum("ij,ij->i", own[live], u) - (top + np.log(total))[:, 0]
        gradient = own[live] - _averages(P, terms.means)
        size = np.linalg.norm(gradient, axis=1)
        rounding = slack + 64 * UNIT * (1 + np.abs(Z).max(axis=1, initial=0.0))
        best[live] = np.fmin(best[live], g + size - np.einsum("ij,ij->i", gradient, u) + rounding)
        # a key is settled where its bound is below ε, or where a query already gives it ε
        still = (best[live] >= np.log(epsilon)) & (g < np.log(epsilon))
        live, u, Z, gradient, size = live[still], u[still], Z[still], gradient[still], size[still]
        if not len(live):
            break
        corner = gradient / np.where(size > 0, size, 1.0)[:, None]
        direction = corner - u
        change = direction @ terms.means.T
        slope = np.einsum("ij,ij->i", own[live], direction)
        gamma = _best_step(Z, change, slope)
        u = u + gamma[:, None] * direction
        Z = Z + gamma[:, None] * change
    with np.errstate(over="ignore"):
        return np.asarray(np.minimum(np.exp(best), 1.0))


def _averages(P: Float64, means: Float64) -> Float64:
    """Return P times the means, summed in blocks, so that rounding grows little with their number."""
    parts = (P[:, start : start + BLOCK] @ means[start : start + BLOCK] for start in range(0, len(means), BLOCK))
    return np.asarray(sum(parts, start=np.zeros((len(P), means.shape[1]))))


def _best_step(Z: Float64, change: Float64, slope: Float64) -> Float64:
    """Return the γ in [0, 1] with the largest γ slope − log Σ exp(Z + γ change): Newton's method, or bisection."""
    low, high, gamma = np.zeros(len(Z)), np.ones(len(Z)), np.zeros(len(Z))
    for _ in range(_LINE_STEPS):
        W = Z + gamma[:, None] * change
        W = np.exp(W - W.max(axis=1, keepdims=True))
        W /= W.sum(axis=1, keepdims=True)
        mean = np.einsum("ij,ij->i", W, change)
        variance = np.einsum("ij,ij,ij->i", W, change, change) - mean**2
        rising = slope > mean
        low, high = np.where(rising, gamma, low), np.where(rising, high, gamma)
        gamma = np.minimum(gamma + (slope - mean) / np.maximum(variance, 1e-300), 1.0)
        gamma = np.where((gamma >= low) & (gamma <= high), gamma, (low + high) / 2)
    return gamma


def _is_softmax(f: AttentionFunction | Softmax) -> bool:
    return isinstance(f, Softmax)


JENSEN_BOUND = Certificate("jensen", _is_softmax, lambda problem: (_jensen(problem), None))
BALL_BOUND = Certificate(
    "ball",
    _is_softmax,
    lambda problem: (_ball(problem), None),
    lambda problem: problem.rows.shape[0] * problem.rows.shape[1] <= _BALL_KEYS,
)
