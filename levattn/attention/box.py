"""Least squares within bounds, by Gram matrices: many problems at once, each solved to its exact conditions."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._core.arrays import to_numpy
from levattn.attention.arguments import device_of, namespace_of

_HALVINGS = 12
_BOLD = 20  # steps in which variables may leave their bounds before the others have reached their minimum


def least_in_box(H: Any, g: Any, x: Any, low: float, high: float) -> Any:
    """Return the minimizers (b, s) of ½ xᵀ H x − gᵀ x over low ≤ x ≤ high, by descent from points x within the bounds.

    H: (b, s, s) float64, positive definite. A step is Newton's for the free variables, along a path bent at the bounds
    (Bertsekas, "Projected Newton methods", SIAM J. Control 20, 1982); none goes up.

    Why it ends: after `_BOLD` steps, variables leave their bounds only at the minimum of a face. Until then each step
    puts another variable on its bound. Freeing the variable with the worst multiplier leads down, so no face comes
    twice. The limit of steps is for rounding alone.
    """
    xp, (b, s) = namespace_of(H), g.shape
    if not b * s:
        return x
    parts, left = [], np.arange(b)
    settled = xp.zeros((b,), dtype=xp.bool, device=device_of(H))  # at the minimum of a face
    failed = xp.zeros((b,), dtype=xp.int64, device=device_of(H))  # 1: free no more than one; 2: that led nowhere too
    for step in range(100 + 10 * s):
        r = _product(H, x) - g
        noise = 8 * xp.finfo(H.dtype).eps * (_product(xp.abs(H), xp.abs(x)) + xp.abs(g))
        bound = (x <= low) | (x >= high)
        wrong = xp.where(bound, xp.where(x <= low, -r, r) - noise, xp.zeros_like(r))
        ended = to_numpy((failed == 2) | (settled & xp.all(wrong <= 0, axis=1)))
        if ended.any():
            parts.append((left[ended], _rows(x, ended)))
            left, on = left[~ended], ~ended
            if not left.size:
                order = np.argsort(np.concatenate([rows for rows, _ in parts]))
                return _rows(xp.concat([part for _, part in parts], axis=0), order)
            H, g, x, r, bound, wrong, settled, failed = (
                _rows(each, on) for each in (H, g, x, r, bound, wrong, settled, failed)
            )
        alone = (failed == 1)[:, None]
        worst = wrong == xp.max(wrong, axis=1, keepdims=True)
        may = ~alone | (settled[:, None] & worst) if step < _BOLD else settled[:, None] & (~alone | worst)
        freed = (wrong > 0) & may
        found, down, whole = _step(H, r, x, ~bound | freed, low, high)
        x, none = xp.where(down[:, None], found, x), ~xp.any(freed, axis=1)
        settled = xp.where(down, whole, settled | none)
        failed = xp.where(down, xp.zeros_like(failed), xp.where(none, failed, failed + 1))
    raise FloatingPointError(f"least squares within bounds did not end in {100 + 10 * s} steps")


def _step(H: Any, r: Any, x: Any, free: Any, low: float, high: float) -> tuple[Any, Any, Any]:
    """Return the best points of the paths, whether these lead down, and whether they are minima of their faces.

    r: (b, s), the gradient at x. free: (b, s), the variables that may move.
    """
    xp, s = namespace_of(H), x.shape[1]
    F, eye = xp.astype(free, H.dtype), xp.eye(s, dtype=H.dtype, device=device_of(H))
    ours = H * F[:, :, None] * F[:, None, :] + eye * (1 - F)[:, None, :]
    d = F * xp.linalg.solve(ours, -(r * F)[:, :, None])[:, :, 0]
    ends = xp.where(d > 0, xp.full_like(x, high), xp.full_like(x, low))
    ratio = xp.where(d != 0, (ends - x) / xp.where(d != 0, d, xp.ones_like(d)), xp.full_like(d, xp.inf))
    halves = xp.asarray(0.5 ** np.arange(_HALVINGS), dtype=H.dtype, device=device_of(H))
    first = xp.min(xp.clip(ratio, 0.0, 1.0), axis=1, keepdims=True)  # to the first bound
    t = xp.concat([xp.broadcast_to(halves[None, :], (x.shape[0], _HALVINGS)), first], axis=1)[:, :, None]
    points = xp.where(ratio[:, None, :] <= t, ends[:, None, :], x[:, None, :] + t * d[:, None, :])
    e = points - x[:, None, :]
    change = xp.sum(e * (xp.matmul(e, H) / 2 + r[:, None, :]), axis=2)
    best = xp.argmin(change, axis=1)
    picked = best[:, None, None] == xp.arange(t.shape[1], device=device_of(H))[None, :, None]
    found = xp.sum(xp.where(picked, points, xp.zeros_like(points)), axis=1)
    whole = xp.any(picked & (t == 1), axis=(1, 2)) & xp.all(ratio > 1, axis=1)
    return found, xp.min(change, axis=1) < 0, whole


def _product(A: Any, x: Any) -> Any:
    return namespace_of(A).matmul(A, x[:, :, None])[:, :, 0]


def _rows(array: Any, which: Any) -> Any:
    """Return some items of a batch, by flags or numbers of numpy."""
    xp = namespace_of(array)
    places = np.flatnonzero(which) if which.dtype == np.bool_ else which
    return xp.take(array, xp.asarray(places, device=device_of(array)), axis=0)
