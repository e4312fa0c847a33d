"""Least squares within bounds, by Gram matrices: many problems at once, each solved to its exact conditions."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._core.arrays import to_numpy
from levattn.attention.arguments import device_of, namespace_of

_HALVINGS = 20
_BOLD = 20  # steps in which variables may leave their bounds before the others have reached their minimum
_NEAR = 2.0**-34  # of the width of the box


def least_in_box(H: Any, g: Any, x: Any, low: float, high: float) -> Any:
    """Return the minimizers (b, s) of ½ xᵀ H x − gᵀ x over low ≤ x ≤ high, by descent from points x within the bounds.

    H: (b, s, s) float64, positive definite. A step is Newton's for the free variables, along a path bent at the bounds
    (Bertsekas, "Projected Newton methods", SIAM J. Control 20, 1982); none goes up. A variable near a bound goes
    onto it if the gradient leads beyond, and is not free. Else the path would bend before it leads down.

    Why it ends: after `_BOLD` steps, variables leave their bounds only at the minimum of a face. Until then each step
    puts another variable on its bound. Freeing variables with wrong multipliers leads down, so no face comes twice.
    A step that does not lead down by more than rounding is at the minimum. The limit of steps is for rounding alone.
    """
    xp, (b, s) = namespace_of(H), g.shape
    if not b * s:
        return x
    parts, left, reach = [], np.arange(b), _NEAR * (high - low)
    settled, failed = (xp.zeros((b,), dtype=xp.bool, device=device_of(H)) for _ in range(2))  # settled: on its face
    for step in range(100 + 10 * s):
        r = _product(H, x) - g
        noise = 8 * xp.finfo(H.dtype).eps * (_product(xp.abs(H), xp.abs(x)) + xp.abs(g))
        bound = (x <= low) | (x >= high)
        wrong = bound & (xp.where(x <= low, -r, r) > noise)
        ended = to_numpy(failed | (settled & ~xp.any(wrong, axis=1)))
        if ended.any():
            parts.append((left[ended], _rows(x, ended)))
            left, on = left[~ended], ~ended
            if not left.size:
                order = np.argsort(np.concatenate([rows for rows, _ in parts]))
                return _rows(xp.concat([part for _, part in parts], axis=0), order)
            H, g, x, r, noise, bound, wrong, settled = (
                _rows(each, on) for each in (H, g, x, r, noise, bound, wrong, settled)
            )
        freed = wrong if step < _BOLD else wrong & settled[:, None]
        beyond = ((x <= low + reach) & (r > noise)) | ((x >= high - reach) & (r < -noise))
        found, down, whole = _step(H, r, noise, x, (~bound | freed) & ~beyond, low, high)
        x, none = xp.where(down[:, None], found, x), ~xp.any(freed, axis=1)
        settled, failed = xp.where(down, whole, settled | none), ~(down | none)
    raise FloatingPointError(
        f"least squares of {s} unknowns within bounds did not end in {100 + 10 * s} steps, because of rounding; give "
        "fewer slots, or other queries"
    )


def _step(H: Any, r: Any, noise: Any, x: Any, free: Any, low: float, high: float) -> tuple[Any, Any, Any]:
    """Return the best points of the paths, whether these lead down, and whether they are minima of their faces.

    r: (b, s), the gradient at x, to `noise`. free: (b, s), the variables that may move; others go to their bounds.
    """
    xp, s = namespace_of(H), x.shape[1]
    F, eye = xp.astype(free, H.dtype), xp.eye(s, dtype=H.dtype, device=device_of(H))
    ours = H * F[:, :, None] * F[:, None, :] + eye * (1 - F)[:, None, :]
    d = F * xp.linalg.solve(ours, -(r * F)[:, :, None])[:, :, 0]
    ends = xp.where(xp.where(free, d, 2 * x - low - high) > 0, xp.full_like(x, high), xp.full_like(x, low))
    ratio = xp.where(d != 0, (ends - x) / xp.where(d != 0, d, xp.ones_like(d)), xp.full_like(d, xp.inf))
    halves = xp.asarray(0.5 ** np.arange(_HALVINGS), dtype=H.dtype, device=device_of(H))
    first = xp.min(xp.where(ratio > 0, xp.clip(ratio, 0.0, 1.0), xp.ones_like(ratio)), axis=1, keepdims=True)
    t = xp.concat([xp.broadcast_to(halves, (x.shape[0], _HALVINGS)), first], axis=1)[:, :, None]
    bent = (ratio[:, None, :] <= t) | ~free[:, None, :]
    points = xp.where(bent, ends[:, None, :], x[:, None, :] + t * d[:, None, :])
    e = points - x[:, None, :]
    change = xp.sum(e * (xp.matmul(e, H) / 2 + r[:, None, :]), axis=2)
    picked = xp.argmin(change, axis=1)[:, None] == xp.arange(_HALVINGS + 1, device=device_of(H))
    found = xp.sum(xp.where(picked[:, :, None], points, xp.zeros_like(points)), axis=1)
    down = xp.min(change, axis=1) < -xp.sum(xp.abs(found - x) * noise, axis=1)
    return found, down, xp.all(found == x + d, axis=1)


def _product(A: Any, x: Any) -> Any:
    return namespace_of(A).matmul(A, x[:, :, None])[:, :, 0]


def _rows(array: Any, which: Any) -> Any:
    """Return some items of a batch, by flags or numbers of numpy."""
    xp = namespace_of(array)
    places = np.flatnonzero(which) if which.dtype == np.bool_ else which
    return xp.take(array, xp.asarray(places, device=device_of(array)), axis=0)
