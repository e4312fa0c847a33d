"""Slots fitted to queries, for a stack of heads: their choice, log-weights, values, and residuals on other queries.

Logits are in the precision of the call. What is fitted, m × s numbers, is in float64. Values are less the middle of
their ranges, in units of their own size, so that an offset costs no digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from levattn._core.arrays import is_away
from levattn.attention.arguments import device_of, namespace_of, without_gradient
from levattn.attention.box import Quadratic, definite_solutions, least_in_box, ridge_solutions
from levattn.attention.pruned import choice
from levattn.attention.pruned.selection import BY_ATTENTION, Checks, SelectionRule
from levattn.sensitivity.leverage import leverage_scores

Rounding = Callable[[Any], Any]

LARGEST = 3.0  # log-weights are at most this, and at least minus this
_LOGITS, _ON_DEVICE = 1 << 22, 1 << 26  # at a time
_MASS_RIDGE, _VALUE_RIDGE = 1e-2, 3e-3  # shares of the mean diagonals
_RAISES, _RAISE = 4, 10.0
_IN_BALL = 1 + 2.0**-39  # squared radii: the values of keys are in their ball whatever their rounding
_TIES = 2.0**-16  # of squared weights: rounding of float32, which must not choose between equal keys
_FAR = 600.0  # a logarithm of weights beyond any bound


@dataclass(frozen=True, eq=False)
class Weighted:
    """Queries as rows of least squares: q (b, r, d), times their scale, and weights (b, r) in float64, at most 1."""

    q: Any
    weights: Any

    @property
    def empty(self) -> bool:
        """Whether there are none."""
        return not self.q.shape[1]

    def of(self, items: slice) -> Weighted:
        """Return the rows of some items of the batch."""
        return Weighted(self.q[items, ...], self.weights[items, ...])


@dataclass(frozen=True, eq=False)
class HeadFit:
    """The slots of some heads.

    places: (b, s), of their keys.

    there: (b, s), False behind the last slot, or None if each head has s slots.

    keys, values, log_weights: (b, s, d), (b, s, D), (b, s).

    mass, output: (b,), residuals.

    bounded, clipped: (b,), numbers of slots.
    """

    places: Any
    there: Any
    keys: Any
    values: Any
    log_weights: Any
    mass: Any
    output: Any
    bounded: Any
    clipped: Any


def heads_at_once(rows: int, n: int, s: int, like: Any) -> int:
    """Return how many heads to fit at a time."""
    return max(1, _limit(like) // max(1, rows * n, s * s))


def fitted_heads(
    rule: SelectionRule,
    fit: Weighted,
    unseen: Weighted,
    arrays: tuple[Any, Any, Any],
    largest: float,
    rounded: tuple[Rounding, Rounding] | None,
    checks: Checks,
) -> HeadFit:
    """Return the slots of heads with keys K (b, n, d) and values V (b, n, D), as `levattn.attention.fit_slots` does.

    arrays: K, V, and given scores (b, n) or None; n is at least 1.

    largest: the largest number that a value can be.

    rounded: functions that return keys, and values, as they will be held; or None.
    """
    K, V, scores = arrays
    xp, n, slots = namespace_of(K), K.shape[1], rule.slots
    middle, unit, v = _centered(V)
    everything = slots.selected >= n
    sums = outputs = columns = None
    if not everything:
        sums, outputs, columns = _attended(fit, K, v, checks, columns=rule.kind == BY_ATTENTION)
    order, there = _chosen(rule, fit.q, K, V, scores, columns, checks)
    checks.settle()
    c, own = choice.rows_of_each((K, v), order)
    if there is not None:
        c, own = (xp.where(there[:, :, None], X, xp.zeros_like(X)) for X in (c, own))
    old = C = xp.astype(own, xp.float64)
    values, held = choice.rows_at(V, order), c if rounded is None else rounded[0](c)
    log_weights, none = xp.zeros_like(old[:, :, 0]), xp.zeros_like(order[:, 0])
    bounded = clipped = none
    if not (everything or fit.empty):
        log_weights, bounded = _log_weights(fit, sums, held, there)
        log_weights = xp.astype(xp.astype(log_weights, V.dtype), xp.float64)  # as they are given back
        C, clipped = _values(fit, outputs, held, old, log_weights, there, _radius(v))
        weighty = xp.any(fit.weights > 0, axis=1)[:, None, None]
        inside = xp.clip(C * unit + middle, -largest, largest)  # nearer to the middle in each column
        values = xp.where(weighty, xp.astype(inside, V.dtype), values)
    if there is not None:
        values = xp.where(there[:, :, None], values, xp.zeros_like(values))
        log_weights = xp.where(there, log_weights, xp.full_like(log_weights, -math.inf))
    if rounded is not None:
        C = (xp.astype(rounded[1](values), xp.float64) - middle) / unit
    mass, output = _residuals(unseen, K, v, held, log_weights, C, middle / unit, checks)
    checks.settle()
    return HeadFit(order, there, c, values, xp.astype(log_weights, V.dtype), mass, output, bounded, clipped)


def _limit(like: Any) -> int:
    return _ON_DEVICE if is_away(like) else _LOGITS


def _centered(V: Any) -> tuple[Any, Any, Any]:
    """Return the middle of values (b, 1, D) and their unit (b, 1, 1) in float64, and values in the unit about it."""
    xp = namespace_of(V)
    middle = xp.min(V, axis=1, keepdims=True) / 2 + xp.max(V, axis=1, keepdims=True) / 2
    v = V - middle
    size = xp.astype(xp.max(xp.abs(v), axis=(1, 2), keepdims=True), xp.float64)
    power = xp.floor(xp.log2(xp.where(size > 0, size, xp.ones_like(size))))
    unit = 2.0 ** xp.clip(power, -1022.0, 1022.0)
    return xp.astype(middle, xp.float64), unit, v / xp.astype(unit, V.dtype)


def _radius(v: Any) -> Any:
    """Return the squared radius (b,) of the ball about zero that holds the values."""
    xp = namespace_of(v)
    wide = xp.astype(v, xp.float64)
    return xp.max(xp.sum(wide * wide, axis=2), axis=1)


def _attended(rows: Weighted, K: Any, v: Any, checks: Checks, *, columns: bool = False) -> tuple[Any, Any, Any]:
    """Return dense attention: logarithms of sums (b, r), outputs (b, r, D), and max w P² (b, n) if `columns`."""
    xp, (b, n, _), r = namespace_of(K), K.shape, rows.q.shape[1]
    step, keys = max(1, _limit(K) // n), xp.matrix_transpose(K)
    raised = 2.0 ** (int(math.log2(xp.finfo(K.dtype).max)) // 2 - 13)  # so that squares of small shares are numbers
    found, total = [], xp.zeros((b, n), dtype=xp.float64, device=device_of(K)) if columns else None
    for first in range(0, max(r, 1), step):
        part = slice(first, min(first + step, r))
        z = xp.matmul(rows.q[:, part, :], keys)
        top, least = xp.max(z, axis=2, keepdims=True), xp.min(z, axis=2)
        z -= top
        E = xp.exp(z)
        size = xp.sum(E, axis=2, keepdims=True)
        found.append(((top + xp.log(size))[:, :, 0], xp.matmul(E, v) / size))
        checks.expect(
            xp.all(xp.isfinite(found[-1][0]) & xp.isfinite(least)),
            f"products of queries and K are beyond {K.dtype}; give queries and keys of smaller entries, or of float64",
        )
        if columns and r:
            E *= xp.astype(xp.sqrt(rows.weights[:, part]), K.dtype)[:, :, None] * (raised / size)
            E *= E
            total = xp.maximum(total, xp.astype(xp.max(E, axis=1), xp.float64))
    sums, outputs = found[0] if len(found) == 1 else (xp.concat(each, axis=1) for each in zip(*found, strict=True))
    return sums, outputs, total


def _chosen(rule: SelectionRule, q: Any, K: Any, V: Any, scores: Any, columns: Any, checks: Checks) -> tuple[Any, Any]:
    """Return the places of the slots (b, s), ascending, and flags of the present ones, or None if all are."""
    xp, (b, n, _), slots = namespace_of(K), K.shape, rule.slots
    place = xp.arange(n, device=device_of(K))
    if slots.selected >= n:
        return xp.broadcast_to(place, (b, n)), None
    first = xp.broadcast_to((place < slots.sinks) | (place >= n - slots.window), (b, n))
    sure = slots.sinks + slots.window
    if rule.kind == BY_ATTENTION:
        top = xp.where(first, xp.full_like(columns, math.inf), columns)
        last = xp.sort(top, axis=1)[:, n - sure - slots.selected][:, None]
        ties = xp.abs(columns - last) < _TIES * last  # none if `last` is of a key that is sure
        order, count, _ = choice.chosen(xp.where(ties, last, columns), slots.selected, None, first, sure, checks)
    else:
        measure = None
        if rule.kind in ("expected", "residual"):
            measure = choice.measured(choice.Sums.of(q), choice.Sums.of(K, second=False), None, K.dtype, checks)
        ones = xp.ones((b, n), dtype=K.dtype, device=device_of(K))
        rows = choice.Contenders(K, V, K, measure, ones, None, first, sure, given=scores)
        found = choice.selected(rule, rows, lambda: leverage_scores(K, center=rule.center), checks, 0)
        order, count = found.order, found.count
        if not order.shape[1]:  # scores of a user's own are all −∞
            order, count = xp.zeros((b, 1), dtype=xp.int64, device=device_of(K)), xp.sum(order, axis=1)
    if count is None:
        return order, None
    return order, xp.arange(order.shape[1], device=device_of(K)) < count[:, None]


def _slot_logits(q: Any, c: Any, there: Any) -> Iterator[tuple[slice, Any]]:
    """Yield blocks of rows, and their logits (b, ·, s) at the slots in float64."""
    xp, r, step = namespace_of(c), q.shape[1], max(1, _limit(c) // max(1, c.shape[1]))
    for first in range(0, r, step):
        part = slice(first, min(first + step, r))
        z = xp.astype(xp.matmul(q[:, part, :], xp.matrix_transpose(c)), xp.float64)
        yield part, z if there is None else xp.where(there[:, None, :], z, xp.full_like(z, -math.inf))


def _log_shares(z: Any, sums: Any) -> Any:
    """Return log F (b, r, s) of logits, at most 0 whatever the rounding; sums: (b, r), logarithms."""
    xp = namespace_of(z)
    F = z - xp.astype(sums, xp.float64)[:, :, None]
    return xp.minimum(F, xp.zeros_like(F))


def _with_gram(G: Any, X: Any, found: list[Any], few: bool) -> Any:
    """Add the Gram matrix of further rows X (b, ·, s) to G, or only note the rows if they are `few`."""
    xp = namespace_of(X)
    if few:
        found.append(X)
        return None
    more = xp.matmul(xp.matrix_transpose(X), X)
    return more if G is None else G + more


def _mean_diagonal(A: Any, there: Any) -> Any:
    """Return the mean (b, 1, 1) of the diagonal of matrices (b, s, s) over present slots, and 1 in place of 0."""
    xp, s = namespace_of(A), A.shape[1]
    eye = xp.eye(s, dtype=A.dtype, device=device_of(A))
    return _mean_over(xp.sum(A * eye, axis=(1, 2), keepdims=True), s, there)


def _mean_square(X: Any, there: Any) -> Any:
    """Return the same of XᵀX for rows X (b, r, s)."""
    return _mean_over(namespace_of(X).sum(X * X, axis=(1, 2), keepdims=True), X.shape[2], there)


def _mean_over(total: Any, s: int, there: Any) -> Any:
    xp = namespace_of(total)
    mean = total / (s if there is None else xp.sum(xp.astype(there, total.dtype), axis=1)[:, None, None])
    return xp.where(mean > 0, mean, xp.ones_like(mean))


def _log_weights(rows: Weighted, sums: Any, c: Any, there: Any) -> tuple[Any, Any]:
    """Return the log-weights (b, s) of slots c, and how many of each head are at a bound."""
    xp, (b, s, _) = namespace_of(c), c.shape
    half = xp.log(rows.weights) / 2
    peak = xp.full((b, 1), -math.inf, dtype=xp.float64, device=device_of(c))
    for part, z in _slot_logits(rows.q, c, there):
        F = _log_shares(z, sums[:, part])
        peak = xp.maximum(peak, xp.max(xp.max(F, axis=2) + half[:, part], axis=1, keepdims=True))
    peak = xp.where(peak > -math.inf, peak, xp.zeros_like(peak))
    # √w F in units of its largest entry, so that no head underflows; the target 1 is in the same unit
    target, few = xp.exp(xp.clip(-peak, -_FAR, _FAR)), rows.q.shape[1] < s
    g, G = xp.zeros((b, s), dtype=xp.float64, device=device_of(c)), None
    found: list[Any] = []
    for part, z in _slot_logits(rows.q, c, there):
        z = _log_shares(z, sums[:, part])
        z += (half[:, part] - peak)[:, :, None]
        F = xp.exp(z)
        del z  # as large as F
        g = g + xp.sum(F * xp.sqrt(rows.weights[:, part])[:, :, None], axis=1) * target
        G = _with_gram(G, F, found, few)
    F = xp.concat(found, axis=1) if few else None
    ridge = _MASS_RIDGE * (_mean_square(F, there) if few else _mean_diagonal(G, there))
    eye = xp.eye(0 if few else s, dtype=xp.float64, device=device_of(c))
    H = Quadratic(None, F, ridge) if few else Quadratic(G + ridge * eye)
    low, high = math.exp(-LARGEST), math.exp(LARGEST)
    B = least_in_box(H, g + ridge[:, :, 0], xp.ones_like(g), low, high)
    bounded = xp.sum(xp.astype((low >= B) | (high <= B), xp.int64), axis=1)
    return xp.clip(xp.log(B), -LARGEST, LARGEST), bounded


def slot_weights(z: Any) -> Any:
    """Return softmax weights of logits (..., s), zero where all are −∞."""
    xp = namespace_of(z)
    top = xp.max(without_gradient(z), axis=-1, keepdims=True)
    E = z - xp.where(top > -math.inf, top, xp.zeros_like(top))
    E = xp.exp(E)
    size = xp.sum(E, axis=-1, keepdims=True)
    return E / xp.where(size > 0, size, xp.ones_like(size))


def _values(rows: Weighted, y: Any, c: Any, old: Any, log_weights: Any, there: Any, radius: Any) -> tuple[Any, Any]:
    """Return values (b, s, D) of slots fitted to outputs y, and how many of each head had to go back to the ball.

    old: (b, s, D), the values of the slots' keys, toward which the ridge draws. radius: (b,), squared.
    """
    xp, s = namespace_of(old), old.shape[1]
    A, few, right = None, rows.q.shape[1] < s, xp.zeros_like(old)
    found: list[Any] = []
    for part, z in _slot_logits(rows.q, c, there):
        root = xp.sqrt(rows.weights[:, part])[:, :, None]
        z += log_weights[:, None, :]
        X = slot_weights(z)
        del z
        X *= root
        apart = xp.astype(y[:, part, :], xp.float64) * root - xp.matmul(X, old)
        right = right + xp.matmul(xp.matrix_transpose(X), apart)
        A = _with_gram(A, X, found, few)
    X = xp.concat(found, axis=1) if few else None
    mean = _mean_square(X, there) if few else _mean_diagonal(A, there)
    eye = xp.eye(0 if few else s, dtype=xp.float64, device=device_of(old))
    ridge = xp.broadcast_to(_VALUE_RIDGE * mean[:, :, 0], old.shape[:2])
    for raises in range(_RAISES + 1):
        if few:
            C = old + ridge_solutions(X, 1 / ridge, right)
        else:
            C = old + definite_solutions(A + ridge[:, :, None] * eye, right)
        square = xp.sum(C * C, axis=2)
        far = square > _IN_BALL * radius[:, None]
        if raises == _RAISES or not bool(xp.any(far)):
            break
        ridge = xp.where(far, _RAISE * ridge, ridge)
    back = xp.sqrt(radius[:, None] / xp.where(far, square, xp.ones_like(square)))
    C = xp.where(far[:, :, None], C * back[:, :, None], C)
    return C, xp.sum(xp.astype(far, xp.int64), axis=1)


def _residuals(
    rows: Weighted, K: Any, v: Any, c: Any, log_weights: Any, C: Any, middle: Any, checks: Checks
) -> tuple[Any, Any]:
    """Return the residuals (b,) of masses and of outputs on some queries, NaN without any weight.

    middle: (b, 1, D), about which values are, in their unit.
    """
    xp = namespace_of(C)
    zero = xp.zeros_like(C[:, 0, 0])
    if rows.empty:
        return zero + math.nan, zero + math.nan
    sums, outputs, _ = _attended(rows, K, v, checks)
    nothing = xp.where((xp.max(log_weights, axis=1) > -math.inf)[:, None, None], xp.zeros_like(middle), middle)
    large = xp.maximum(xp.max(xp.abs(middle), axis=(1, 2)), xp.ones_like(zero))
    mass = error = size = zero
    for part, z in _slot_logits(rows.q, c, None):
        F = _log_shares(z, sums[:, part])
        w, z = rows.weights[:, part], z + log_weights[:, None, :]
        y = xp.astype(outputs[:, part, :], xp.float64)
        off = xp.sum(xp.exp(F + log_weights[:, None, :]), axis=2) - 1
        apart = (xp.matmul(slot_weights(z), C) - y - nothing) / large[:, None, None]
        y = (y + middle) / large[:, None, None]
        mass = mass + xp.sum(w * off * off, axis=1)
        error = error + xp.sum(w * xp.sum(apart * apart, axis=2), axis=1)
        size = size + xp.sum(w * xp.sum(y * y, axis=2), axis=1)
    weight = xp.sum(rows.weights, axis=1)
    relative = xp.where(error > 0, xp.sqrt(error / size), error)
    return xp.sqrt(mass / weight), xp.where(weight > 0, relative, zero + math.nan)
