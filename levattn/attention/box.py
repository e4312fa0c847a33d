"""Least squares within bounds, by Gram matrices: many problems at once, each solved to its exact conditions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from levattn._core.arrays import to_numpy
from levattn._core.blas import lapack
from levattn.attention.arguments import device_of, namespace_of

_HALVINGS = 20
_BOLD = 20  # steps in which variables may leave their bounds before the others have reached their minimum
_NEAR = 2.0**-34  # of the width of the box


@dataclass(frozen=True, eq=False)
class Quadratic:
    """Positive definite matrices: H (b, s, s), or RᵀR + ρ I of rows R (b, r, s) that are at least 0, and ρ (b, 1, 1).

    With rows, products cost O(r s) and systems O(r² s), by the identity of Woodbury. They are for r below s, and for
    ridges that are not small beside R: digits are lost by their ratio.
    """

    H: Any
    rows: Any = None
    ridge: Any = None

    def times(self, x: Any) -> Any:
        """Return the products (b, k, s) of the matrices and vectors (b, k, s)."""
        xp = namespace_of(x)
        if self.rows is None:
            return xp.matmul(x, self.H)
        return xp.matmul(xp.matmul(x, xp.matrix_transpose(self.rows)), self.rows) + self.ridge * x

    def of_sizes(self, x: Any) -> Any:
        """Return the products (b, s) of the absolute values of matrices and of vectors (b, s)."""
        x = namespace_of(x).abs(x)[:, None, :]
        return (self if self.rows is not None else Quadratic(namespace_of(x).abs(self.H))).times(x)[:, 0, :]

    def solved(self, F: Any, y: Any) -> Any:
        """Return the solutions x (b, s) of H x = y in the variables with flags F (b, s) of 1, and 0 in the others."""
        xp, y = namespace_of(y), (y * F)[:, :, None]
        if self.rows is None:
            eye = xp.eye(y.shape[1], dtype=y.dtype, device=device_of(y))
            ours = self.H * F[:, :, None] * F[:, None, :] + eye * (1 - F)[:, None, :]
            return F * definite_solutions(ours, y)[:, :, 0]
        return ridge_solutions(self.rows, F / self.ridge[:, :, 0], y)[:, :, 0]

    def taken(self, which: Any) -> Quadratic:
        """Return the matrices of some items of the batch."""
        return Quadratic(*(None if part is None else _rows(part, which) for part in (self.H, self.rows, self.ridge)))


def definite_solutions(A: Any, y: Any) -> Any:
    """Return A⁻¹ y for positive definite matrices A (b, s, s), and y (b, s, k); with torch nothing waits."""
    xp = namespace_of(A)
    factor = getattr(xp.linalg, "cholesky_ex", None)  # torch's
    if factor is not None:
        return xp.cholesky_solve(y, factor(A)[0])
    if not isinstance(A, np.ndarray) or not y.size:
        return xp.linalg.solve(A, y)
    from scipy.linalg.lapack import dposv

    x = np.empty_like(y)
    for item in range(len(A)):
        _, x[item], failed = lapack(dposv, A[item].T, y[item])  # symmetric, and in the order of LAPACK
        if failed:  # semidefinite, up to rounding
            x[item] = np.linalg.solve(A[item], y[item])
    return x


def ridge_solutions(X: Any, inverse: Any, y: Any) -> Any:
    """Return (XᵀX + diag(1 / inverse))⁻¹ y for X (b, r, s), inverse (b, s) and y (b, s, k), by r × r systems.

    Where `inverse` is 0, so is the solution.
    """
    xp, root = namespace_of(X), namespace_of(X).sqrt(inverse)
    rows, y = X * root[:, None, :], root[:, :, None] * y
    turned = xp.matrix_transpose(rows)
    inner = xp.matmul(rows, turned) + xp.eye(X.shape[1], dtype=X.dtype, device=device_of(X))
    return root[:, :, None] * (y - xp.matmul(turned, definite_solutions(inner, xp.matmul(rows, y))))


def least_in_box(H: Quadratic, g: Any, x: Any, low: float, high: float) -> Any:
    """Return the minimizers (b, s) of ½ xᵀ H x − gᵀ x over low ≤ x ≤ high, by descent from points x within the bounds.

    A step is Newton's for the free variables, along a path bent at the bounds (Bertsekas, "Projected Newton methods",
    SIAM J. Control 20, 1982); none goes up. A variable near a bound goes onto it if the gradient leads beyond, and is
    not free. Else the path would bend before it leads down.

    Why it ends: after `_BOLD` steps, variables leave their bounds only at the minimum of a face. Until then each step
    puts another variable on its bound. Freeing variables with wrong multipliers leads down, so no face comes twice.
    A step that does not lead down by more than rounding is at the minimum. The limit of steps is for rounding alone.
    """
    xp, (b, s) = namespace_of(g), g.shape
    if not b * s:
        return x
    parts, left, reach, box = [], np.arange(b), _NEAR * (high - low), _Box.of(low, high, x)
    least = 8 * xp.finfo(g.dtype).eps  # of rounding, relative to the sizes of terms
    settled, failed = (xp.zeros((b,), dtype=xp.bool, device=device_of(g)) for _ in range(2))  # settled: on its face
    for step in range(100 + 10 * s):
        product = H.times(x[:, None, :])[:, 0, :]
        sizes = product if H.rows is not None and low >= 0 else H.of_sizes(x)
        r, noise = product - g, least * (sizes + xp.abs(g))
        rises, falls, at_low, at_high = r > noise, r < -noise, x <= low, x >= high
        bound, wrong = at_low | at_high, (at_low & falls) | (at_high & rises)
        ended = to_numpy(failed | (settled & ~xp.any(wrong, axis=1)))
        if ended.any():
            parts.append((left[ended], _rows(x, ended)))
            left, on = left[~ended], ~ended
            if not left.size:
                order = np.argsort(np.concatenate([rows for rows, _ in parts]))
                return _rows(xp.concat([part for _, part in parts], axis=0), order)
            H = H.taken(on)
            g, x, r, noise, rises, falls, bound, wrong, settled = (
                _rows(each, on) for each in (g, x, r, noise, rises, falls, bound, wrong, settled)
            )
        freed = wrong if step < _BOLD else wrong & settled[:, None]
        beyond = ((x <= low + reach) & rises) | ((x >= high - reach) & falls)
        with np.errstate(divide="ignore", invalid="ignore"):
            found, down, whole = _step(H, r, noise, x, (~bound | freed) & ~beyond, box)
        x, none = xp.where(down[:, None], found, x), ~xp.any(freed, axis=1)
        settled, failed = xp.where(down, whole, settled | none), ~(down | none)
    raise FloatingPointError(
        f"least squares of {s} unknowns within bounds did not end in {100 + 10 * s} steps, because of rounding; give "
        "fewer slots, or other queries"
    )


@dataclass(frozen=True, eq=False)
class _Box:
    """The ends of a box, their sum, and the parts of a step that are tried, as arrays where the numbers are."""

    low: Any
    high: Any
    both: Any
    halves: Any
    tried: Any

    @classmethod
    def of(cls, low: float, high: float, like: Any) -> _Box:
        """Return the box for numbers like these; copied once, because each copy to a device takes long."""
        xp = namespace_of(like)
        given = np.concatenate([[low, high, low + high], 0.5 ** np.arange(_HALVINGS)])
        numbers = xp.asarray(given, dtype=like.dtype, device=device_of(like))
        places = xp.arange(_HALVINGS + 1, device=device_of(like))
        return cls(numbers[0], numbers[1], numbers[2], numbers[None, 3:], places)


def _step(H: Quadratic, r: Any, noise: Any, x: Any, free: Any, box: _Box) -> tuple[Any, Any, Any]:
    """Return the best points of the paths, whether these lead down, and whether they are minima of their faces.

    r: (b, s), the gradient at x, to `noise`. free: (b, s), the variables that may move; others go to their bounds.
    """
    xp = namespace_of(x)
    d = H.solved(xp.astype(free, x.dtype), -r)
    ends = xp.where(xp.where(free, d, 2 * x - box.both) > 0, box.high, box.low)
    ratio = xp.abs(ends - x) / xp.abs(d)  # infinite or no number where d is 0, which no part of the step bends
    most = box.halves[:, :1]
    first = xp.min(xp.where(ratio > 0, xp.minimum(ratio, most), most), axis=1, keepdims=True)
    t = xp.concat([xp.broadcast_to(box.halves, (x.shape[0], _HALVINGS)), first], axis=1)[:, :, None]
    bent = (ratio[:, None, :] <= t) | ~free[:, None, :]
    points = xp.where(bent, ends[:, None, :], x[:, None, :] + t * d[:, None, :])
    e = points - x[:, None, :]
    change = xp.sum(e * (H.times(e) / 2 + r[:, None, :]), axis=2)
    picked = xp.argmin(change, axis=1)[:, None] == box.tried
    found = xp.sum(xp.where(picked[:, :, None], points, 0 * most), axis=1)
    down = xp.min(change, axis=1) < -xp.sum(xp.abs(found - x) * noise, axis=1)
    return found, down, xp.all(found == x + d, axis=1)


def _rows(array: Any, which: Any) -> Any:
    """Return some items of a batch, by flags or numbers of numpy."""
    xp = namespace_of(array)
    places = np.flatnonzero(which) if which.dtype == np.bool_ else which
    return xp.take(array, xp.asarray(places, device=device_of(array)), axis=0)
