"""Bounds of the error of pruned attention, query by query."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from levattn._core.arrays import lengths
from levattn._kernels import PRUNING
from levattn._kernels.pruned import TILT, PrunedArguments, Summaries
from levattn.attention.arguments import device_of, namespace_of
from levattn.attention.pruned.choice import means_of


@dataclass(frozen=True, eq=False)
class PrunedCertificate:
    """Bounds of the error of `pruned_attention`, from the keys and summaries that it read.

    Attributes
    ----------
    captured_lower, captured_upper : array of shape (..., H, m)
        Bounds of the sum of the weights that dense attention gives to the keys that a query attended exactly. The
        upper bound is their sum in the mixture itself, because a summary never counts for more than its members do
        (Jensen's inequality). The lower bound puts each member toward the query, as far from the mean of its cluster
        as the farthest member. It says little for large queries.
    error_bound : array of shape (..., H, m)
        Bound of the Euclidean distance to the output of dense attention, to rounding. It is the diameter of the values
        times the weight of the keys that were not attended exactly. Infinite where logits, values or outputs overflow.
    kept : array of bool, shape (..., G, n), or None
        The selected keys and the first keys. None for causal attention, where the set depends on the position.
    slots : array of int64, shape (m,)
        Upper bound of the number of slots that each query read. Causal: before the first selection the number of keys
        so far, up to twice the slots or `Selection.start`.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import Selection, pruned_attention
    >>> Q, K, V = np.random.default_rng(0).standard_normal((3, 100, 8))
    >>> Y, certificate = pruned_attention(Q / 10, K, V, Selection(size=20, summaries=10), return_certificate=True)
    >>> int(certificate.kept.sum()), bool(np.all(certificate.captured_lower <= certificate.captured_upper))
    (20, True)
    >>> E = np.exp(Q @ K.T / 10 / np.sqrt(8))
    >>> off = np.linalg.norm(Y - E @ V / E.sum(axis=1, keepdims=True), axis=1)
    >>> bool(np.all(off <= certificate.error_bound))
    True
    """

    captured_lower: Any
    captured_upper: Any
    error_bound: Any
    kept: Any
    slots: Any


def bounded(x: PrunedArguments, radius: Any, rest: Any, value_radius: Any) -> tuple[Any, Any, Any]:
    """Return lower and upper bounds of the captured mass and a bound of the error of outputs, each (b, g, m).

    `radius`: (b, R), distances of members from the means of the summaries of x, at most. `rest`: the share of the
    summaries in the mixture. `value_radius`: (b,), the radius of a ball that holds the values, and zero where an
    output may read no key.
    """
    xp = namespace_of(x.q)
    if x.summaries is None:
        one = xp.ones_like(rest)
        return one, one, xp.zeros_like(rest)
    # One more column, of norms for queries and of radii for means, gives logits ⟨q, mean⟩ + ‖q‖ radius.
    held = x.summaries
    means, _ = means_of(held)
    norms, radius = lengths(x.q)[..., None], xp.astype(radius, means.dtype, copy=False)

    def widened(array: Any, column: Any) -> Any:
        return xp.concat([array, column], axis=-1)

    def largest(sign: float) -> Summaries:
        top = widened(means, sign * radius[..., None]) * held.count[..., None]
        return Summaries(held.count, top, held.values, xp.zeros_like(held.offset), held.count)

    most = largest(1.0)
    if x.power is not None:  # |x| may be largest at either end
        other = largest(-1.0)
        most = Summaries(*(xp.concat([array, vars(other)[name]], axis=1) for name, array in vars(most).items()))
    role = x.role
    if role is not None:  # members near a query count twice: that errs upward
        role = xp.where(role >= 0, xp.full_like(role, -1), role)
    upper = replace(
        x,
        q=widened(x.q, norms),
        kept_keys=widened(x.kept_keys, xp.zeros_like(x.kept_keys[..., :1])),
        keys=widened(x.keys, xp.zeros_like(x.keys[..., :1])),
        summaries=most,
        role=role,
    )
    _, most_rest = PRUNING.mixture(upper)
    # The relative error of sums is a few units, and of exponentials as many units as their logits are large. Where
    # members are taken out, heavy members may leave light ones.
    farthest = xp.astype(longest_of(means) + xp.max(radius, axis=1), x.q.dtype)
    longest = xp.maximum(longest_of(x.kept_keys, x.keys), farthest)
    logits = norms[..., 0] * longest[:, None, None]
    slack = (64 + 8 * logits) * xp.finfo(x.q.dtype).eps
    most_rest, least_rest = most_rest * (1 + slack) + slack, rest * (1 - math.exp(2 * TILT) * slack) - slack
    known = xp.isfinite(most_rest) & xp.isfinite(least_rest)  # not where logits overflow
    most_rest = xp.clip(xp.where(known, most_rest, xp.ones_like(rest)), 0.0, 1.0)
    least_rest = xp.clip(xp.where(known, least_rest, xp.zeros_like(rest)), 0.0, 1.0)
    # The keys that are left out have a share ρ and a mean value r, and their summaries ρ' ≤ ρ and r'. So outputs
    # differ by (ρ − ρ')(e − r) + ρ'(r − r'), where e is the mean of the other keys: by at most ρ diameters.
    with np.errstate(over="ignore"):
        error = most_rest * 2 * value_radius[:, None, None]
    least = xp.full((), xp.finfo(error.dtype).smallest_normal, dtype=error.dtype, device=device_of(error))
    error = xp.where((value_radius > 0)[:, None, None], xp.maximum(error, least), error)  # the product may underflow
    return 1 - most_rest, 1 - least_rest, xp.where(known & ~xp.isnan(error), error, xp.full_like(error, math.inf))


def longest_of(*stacks: Any) -> Any:
    """Return the largest norm of the rows of stacks (b, n, d) of each item, (b,); 0 without rows."""
    xp = namespace_of(stacks[0])
    X = xp.concat(stacks, axis=1)
    if not (X.shape[1] and X.shape[2]):
        return xp.sum(X, axis=(1, 2))
    if isinstance(X, np.ndarray):
        X = _longest_rows(X)
    top = xp.max(xp.abs(X), axis=(1, 2))
    scaled = X / xp.where(top > 0, top, xp.ones_like(top))[:, None, None]  # keeps the largest squares in range
    with np.errstate(over="ignore"):
        return top * xp.sqrt(xp.max(xp.sum(scaled * scaled, axis=-1), axis=1))


def _longest_rows(X: Any) -> Any:
    """Return some rows (b, k, d), among which each item has its longest one; numbers of any size cost more a row."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("bnd,bnd->bn", X, X)  # each is right to d roundings
        most = squares.max(1)
    if ((most > 1e-24) & (most < 1e24)).all():  # else squares may have left the range
        X = X[:, (squares >= most[:, None] * (1 - 4 * X.shape[2] * np.finfo(X.dtype).eps)).any(0)]
    return np.ascontiguousarray(X)  # whose sums have one order for every layout


def with_bounds(Y: Any, figures: tuple[Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Return outputs (b, g, m, D) with the results of `bounded`; an output that left the range has no finite bound."""
    xp = namespace_of(Y)
    lower, upper, error = figures
    return Y, lower, upper, xp.where(xp.all(xp.isfinite(Y), axis=-1), error, xp.full_like(error, math.inf))
