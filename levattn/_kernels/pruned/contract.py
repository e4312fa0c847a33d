"""What the kernels of pruned attention read: keys that are kept, summaries of the others, keys near a query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Protocol

__all__ = ["PrunedArguments", "PrunedKernels", "Summaries", "mapped"]


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


def mapped(held: Any, change: Callable[[Any], Any]) -> Any:
    """Return a dataclass with what a function makes of each array in it, at any depth."""
    if is_dataclass(held) and not isinstance(held, type):
        return replace(held, **{name: mapped(part, change) for name, part in vars(held).items()})
    return change(held) if hasattr(held, "shape") else held


class PrunedKernels(Protocol):
    """Pruned attention. In torch, gradients follow the definitions."""

    def mixture(self, x: PrunedArguments, /) -> tuple[Any, Any]:
        """Return the output (b, g, m, D) and the share of each query's weights that summaries have, (b, g, m)."""

    def cluster(self, X: Any, weight: Any, R: int, iterations: int, /) -> tuple[Any, Any]:
        """Return the cluster of each row, (b, n), and its squared distance to the center."""

    def levels(self, labels: Any, values: Any, weight: Any, R: int, /) -> Any:
        """Return weighted means by label, (b, R)."""

    def merged(self, labels: Any, log_weight: Any, items: Summaries, R: int, /) -> Summaries:
        """Return R summaries of items."""

    def radii(self, labels: Any, items: Summaries, item_radii: Any, summaries: Summaries, /) -> Any:
        """Return how far the members of summaries may be from their means, (b, R)."""

    def row_moments(self, X: Any, /) -> tuple[Any, Any]:
        """Return the sums (b, d) of rows and (b, d, d) of x xᵀ in float64."""

    def places(self, K: Any, origin: Any, root: Any, query: Any, /) -> tuple[Any, Any]:
        """Return keys in another basis, (b, n, d), and their products with a query, (b, n)."""
