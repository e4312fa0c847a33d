"""What the kernels of pruned attention read: keys that are kept, summaries of the others, keys near a query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Protocol

import array_api_compat

from levattn._core.arrays import array_namespace

__all__ = [
    "JITTER",
    "SAME",
    "SPREAD_ROUNDING",
    "TILT",
    "PrunedArguments",
    "PrunedKernels",
    "RenewalArguments",
    "Summaries",
    "as_one_batch",
    "mapped",
]

TILT = 3.0  # a member's weight is within exp(±this) of its cluster's: what is taken out must not cancel
SAME = 2.0**-16  # of a key's squared length: a squared distance that counts as nothing
JITTER = 1e-6  # of the mean squared length of a direction: queries may not span the space
SPREAD_ROUNDING = 2.0**-40  # of the mean square of queries: what is left of their moment once the mean is taken out


@dataclass(frozen=True, eq=False)
class Summaries:
    """Clusters of keys, each held as sums over its members with positive weights w.

    weight: (b, R), Σ w; 0 for a cluster without members.
    keys, values: (b, R, d) and (b, R, D), Σ w k and Σ w v.
    offset: (b, R), Σ w log w.
    count: (b, R), the number of members.

    For logits l the cluster stands for Σ exp(l) ≥ (Σ w) exp(Σ w (l − log w) / Σ w), by Jensen's inequality, which
    weights of c w do not change.
    """

    weight: Any
    keys: Any
    values: Any
    offset: Any
    count: Any


@dataclass(frozen=True, eq=False)
class PrunedArguments:
    """One normalized mixture for each query over kept keys, keys near it, and summaries of the others.

    q: (b, g, m, d), g queries for each position, already times the scale (for powers any numbers).
    kept_keys, kept_values: (b, s, d) and (b, s, D).
    kept_count: (b,), how many of the s rows are there, or None for all.
    summaries: of all keys that are not kept, or None. In the dtype of q or in float64.
    keys, values: (b, n, d) and (b, n, D), those that may be near.
    first, last: (m,), position i is near the keys first[i] ≤ j < last[i]. Both never fall.
    role: (b, n) int64 or None for -1 throughout. -1: attended where near. -2: never attended, as it is kept or absent.
        c ≥ 0: attended where near, and then taken out of summary c.
    log_weight: (b, n), log w of the members of summaries; or None for 0.
    power: None for a softmax, else p: weights are abs(x)^p.
    narrow: the dtype of 16 bits that queries, keys and values came in, and the scale of the queries, if products may
        be of numbers of this dtype; or None.
    """

    q: Any
    kept_keys: Any
    kept_values: Any
    kept_count: Any
    summaries: Summaries | None
    keys: Any
    values: Any
    first: Any
    last: Any
    role: Any
    log_weight: Any
    power: float | None
    narrow: tuple[Any, float] | None = None


@dataclass(frozen=True, eq=False)
class RenewalArguments:
    """A selection among the keys that were kept and those that leave, for a softmax; the others are summarized.

    kept, kept_values, kept_places: (b, s, d), (b, s, D) and (b, s) int64.
    keys, values: (b, n, d) and (b, n, D), those that leave. oldest: the position of the first of them.
    summaries, radius: those so far, in float64, or None.
    total, second, queries: sums over so many queries, (b, d) and (b, d, d) in float64.
    origin: (b, d) in the dtype of keys, the mean key.
    size, sinks, R: how many keys are kept besides those at the first positions, and how many summaries there will be.
    residual: whether scores are residuals; expected ones, if not.
    bounded: whether radii are asked for.
    """

    kept: Any
    kept_values: Any
    kept_places: Any
    keys: Any
    values: Any
    oldest: int
    summaries: Summaries | None
    radius: Any
    total: Any
    second: Any
    queries: int
    origin: Any
    size: int
    sinks: int
    R: int
    residual: bool
    bounded: bool


def mapped(held: Any, change: Callable[[Any], Any]) -> Any:
    """Return a dataclass with what a function makes of each array in it, at any depth."""
    if is_dataclass(held) and not isinstance(held, type):
        return replace(held, **{name: mapped(part, change) for name, part in vars(held).items()})
    return change(held) if hasattr(held, "shape") else held


def as_one_batch(calls: list[PrunedArguments]) -> PrunedArguments:
    """Return mixtures of as many positions, near as many keys, as one whose batch has the items of all."""
    if len(calls) == 1:
        return calls[0]
    one, xp = calls[0], array_namespace(calls[0].q)
    most = max(x.kept_keys.shape[1] for x in calls)
    counts = None
    if any(x.kept_count is not None or x.kept_keys.shape[1] < most for x in calls):
        counts = xp.concat([_counts(xp, x) for x in calls], axis=0)

    def filled(rows: Any) -> Any:
        """Return kept rows as many as any call has; those beyond its own do not count."""
        missing = most - rows.shape[1]
        if not missing:
            return rows
        shape = (rows.shape[0], missing, rows.shape[2])
        return xp.concat([rows, xp.zeros(shape, dtype=rows.dtype, device=array_api_compat.device(rows))], axis=1)

    summaries = None
    if one.summaries is not None:
        summaries = Summaries(
            *(xp.concat([vars(x.summaries)[name] for x in calls], axis=0) for name in vars(one.summaries))
        )
    return replace(
        one,
        q=xp.concat([x.q for x in calls], axis=0),
        kept_keys=xp.concat([filled(x.kept_keys) for x in calls], axis=0),
        kept_values=xp.concat([filled(x.kept_values) for x in calls], axis=0),
        kept_count=counts,
        summaries=summaries,
        keys=xp.concat([x.keys for x in calls], axis=0),
        values=xp.concat([x.values for x in calls], axis=0),
    )


def _counts(xp: Any, x: PrunedArguments) -> Any:
    """Return how many of the kept rows of each item are there."""
    if x.kept_count is not None:
        return x.kept_count
    b, s = x.kept_keys.shape[:2]
    return xp.full((b,), s, dtype=xp.int64, device=array_api_compat.device(x.kept_keys))


class PrunedKernels(Protocol):
    """Pruned attention. In torch, gradients follow the definitions."""

    def at_once(self, q: Any, power: float | None, /) -> int:
        """Return how many numbers (logits too) the chunks of one call of `mixture` may have; 0 for one chunk."""

    def mixture(self, x: PrunedArguments, room: dict[str, Any] | None = None, into: Any = None, /) -> tuple[Any, Any]:
        """Return the output (b, g, m, D) and the share of each query's weights that summaries have, (b, g, m).

        room: {} before the first of several calls, for memory that they share. into: where the output may be written.
        """

    def cluster(self, X: Any, weight: Any, R: int, iterations: int, /) -> tuple[Any, Any]:
        """Return the cluster of each row, (b, n), and its squared distance to the center."""

    def levels(self, labels: Any, values: Any, weight: Any, R: int, /) -> Any:
        """Return weighted means by label, (b, R)."""

    def merged(self, labels: Any, log_weight: Any, items: Summaries, R: int, /) -> Summaries:
        """Return R summaries of items."""

    def radii(self, labels: Any, items: Summaries, item_radii: Any, summaries: Summaries, /) -> Any:
        """Return how far the members of summaries may be from their means, (b, R)."""

    def row_moments(self, X: Any, squares: bool, /) -> tuple[Any, Any]:
        """Return the sums (b, d) of rows and, if asked for, (b, d, d) of x xᵀ in float64."""

    def places(self, K: Any, origin: Any, root: Any, query: Any, /) -> tuple[Any, Any]:
        """Return keys in another basis, (b, n, d), and their products with a query, (b, n)."""

    def renewed(
        self, x: RenewalArguments, room: dict[str, Any] | None = None, /
    ) -> tuple[Any, Any, Any, Summaries, Any] | None:
        """Return keys, values and places that are kept, summaries, and radii or None; or None, to be done in steps.

        room: as above. With it results are good until the call after the next.
        """
