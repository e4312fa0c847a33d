"""Kernels of pruned attention: mixtures, clusters, sums of items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import array_api_compat

from levattn._core.arrays import array_namespace

TILT = 3.0  # a member's weight is within exp(±this) of its cluster's, so that taking it out does not cancel
SAME = 2.0**-16  # of a key's squared length: smaller squared distances count as zero
JITTER = 1e-6  # of the mean squared length of a direction: queries may not span the space
SPREAD_ROUNDING = 2.0**-40  # of the mean square of queries: rounding of their moment about the mean


@dataclass(frozen=True, eq=False)
class Summaries:
    """Clusters of keys, each held as sums over its members with positive weights w.

    `weight`: (b, R), Σ w; 0 for a cluster without members.
    `keys`, `values`: (b, R, d) and (b, R, D), Σ w k and Σ w v.
    `offset`: (b, R), Σ w log w.
    `count`: (b, R), the number of members.

    For logits l, Σ exp(l) ≥ (Σ w) exp(Σ w (l − log w) / Σ w) by Jensen's inequality. The cluster counts as the right
    side, which weights of c w do not change.
    """

    weight: Any
    keys: Any
    values: Any
    offset: Any
    count: Any


@dataclass(frozen=True, eq=False)
class PrunedArguments:
    """One normalized mixture for each query over kept keys, keys near it, and summaries of the others.

    `q`: (b, g, m, d), g queries for each position, which `factor` is yet to multiply (for powers any numbers).
    `kept_keys`, `kept_values`: (b, s, d) and (b, s, D).
    `kept_count`: (b,), how many of the s rows are there, or None for all.
    `summaries`: of all keys that are not kept, or None. In float32 at least, and in the dtype of q or in float64 where
    q is not of 16 bits. Only kernels of a device get q, keys and values of 16 bits.
    `keys`, `values`: (b, n, d) and (b, n, D), the keys that may be near queries.
    `first`, `last`: (m,), position i is near the keys first[i] ≤ j < last[i]. Both never fall.
    `role`: (b, n) int64, or None if all are -1. A key with -1 is attended where near. A key with -2 is kept or absent,
    and never attended here. A key with c ≥ 0 is attended where near, and then taken out of summary c.
    `log_weight`: (b, n), log w of the members of summaries; or None for 0.
    `power`: None for a softmax, else p: weights are abs(x)^p.
    `narrow`: the dtype of 16 bits of the given arrays, and the scale of the queries, if products of this dtype are
    precise enough; or None.
    `factor`: the scale of the queries, or 1 if they were multiplied.
    `chunks`: how many chunks of as many positions q has, one after the other; n is then the number of rows of all.
    `first` and `last` are the same for each chunk, and count from its first near key. Arrays of slots have an item for
    each chunk of each sequence, sequences within chunks. More than one only if `renewed` takes renewals in turn.
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
    chunks: int = 1
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class RenewalArguments:
    """A selection among kept keys and leaving keys (no longer recent), for a softmax; the others are summarized.

    `kept`, `kept_values`, `kept_places`: (b, s, d), (b, s, D) and (b, s) int64.
    `keys`, `values`: (b, n, d) and (b, n, D), the leaving keys. `oldest`: the position of the first.
    `summaries`, `radius`: the old summaries and their radii, in float64, or None.
    `total`, `second`, `queries`: sums over the queries (b, d) and (b, d, d) in float64, and the numbers of queries.
    `origin`: (b, d) in the dtype of keys, the mean key.
    `size`, `sinks`, `R`: numbers of keys to select, of first positions to keep as well, and of new summaries.
    `residual`: whether scores are "residual", else "expected". `bounded`: whether to compute radii.
    `in_turn`: whether renewals follow one another, one for each number in `queries`. Then all leave as many keys, and
    `total`, `second` and `origin` have an item for each renewal of each sequence, sequences within renewals.
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
    queries: tuple[int, ...]
    origin: Any
    size: int
    sinks: int
    R: int
    residual: bool
    bounded: bool
    in_turn: bool = False


def mapped(held: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to each array in a dataclass, at any depth."""
    if not hasattr(type(held), "__dataclass_fields__"):
        return change(held) if hasattr(held, "shape") else held
    found = object.__new__(type(held))  # as `dataclasses.replace`, in a third of its time
    vars(found).update((name, mapped(getattr(held, name), change)) for name in type(held).__dataclass_fields__)
    return found


def as_one_batch(calls: list[PrunedArguments]) -> PrunedArguments:
    """Join the batches of mixtures with equal numbers of positions and of near keys."""
    if len(calls) == 1:
        return calls[0]
    one, xp = calls[0], array_namespace(calls[0].q)
    most = max(x.kept_keys.shape[1] for x in calls)
    counts = None
    if any(x.kept_count is not None or x.kept_keys.shape[1] < most for x in calls):
        counts = xp.concat([_counts(xp, x) for x in calls], axis=0)

    def filled(rows: Any) -> Any:
        """Pad kept rows to the largest number of any call; the padding does not count."""
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
    """Return the number of kept rows of each item."""
    if x.kept_count is not None:
        return x.kept_count
    b, s = x.kept_keys.shape[:2]
    return xp.full((b,), s, dtype=xp.int64, device=array_api_compat.device(x.kept_keys))


class ClusterKernels(Protocol):
    """Clusters of keys."""

    def cluster(self, X: Any, weight: Any, R: int, iterations: int, /) -> tuple[Any, Any]:
        """Return the cluster of each row, (b, n), and its squared distance to the center."""


class LabelKernels(Protocol):
    """Parts of the definitions, which a device has kernels for."""

    def assigned(self, X: Any, squares: Any, centers: Any, /) -> tuple[Any, Any]:
        """Return the nearest center of each row, (b, n) int64, on ties the first, and its squared distance, (b, n)."""

    def label_sums(self, labels: Any, weight: Any, X: Any, R: int, /) -> tuple[Any, Any]:
        """Return ``Σ w x`` (b, R, d) and ``Σ w`` (b, R) over the rows x of X with each label; -1 is no label."""

    def factor_queries(
        self, total: Any, second: Any, key_total: Any, counts: tuple[int, int], dtype: Any, /
    ) -> tuple[Any, Any, Any, Any] | None:
        """Return a lower factor (b, d, d) of moments of queries, the means (b, d) of queries and keys, and flags.

        The moments are about the mean, with a share on their diagonals; see `measured` in choice.py. `total`,
        `second`, `key_total`: sums over `counts` queries and keys, in float64. Flags (2, b): whether moments are
        finite, and whether they have a factor. None if the caller must take steps.
        """

    def reads(self, X: Any, /) -> bool:
        """Tell whether there are the three kernels that follow."""

    def score_rows(self, X: Any, along: Any, distance: Any, residual: bool, /) -> tuple[Any, Any]:
        """Return scores (b, n) of rows for a softmax as `scored` in choice.py has them, and flags of finite squares.

        `X`, `along`: places (b, n, d) and log masses (b, n). `distance`: (b, n) squared, or None for squared lengths.
        """

    def choose_rows(self, scores: Any, first: Any, count: int, /) -> tuple[Any, Any, Any]:
        """Return the rows (b, count) with the largest scores, ascending, flags (b, n) of these, and of numbers (b,).

        On ties the first rows are chosen; rows with flags in `first` (b, n) come before all others. A score of
        infinity counts as the largest number.
        """

    def merge_rows(self, labels: Any, along: Any, weight: Any, K: Any, V: Any, R: int, /) -> tuple[Any, Any, Any]:
        """Return roles (b, n) of rows, tilts (b, n), and the sums (b, R, d + D + 3) of R summaries.

        As `grouped` in choice.py makes them for rows that no summary stands for. A row of weight 0 has the role -2,
        others their labels. The sums of keys and values come first, then weights, offsets and counts.
        """


class PrunedOperators(ClusterKernels, Protocol):
    """Pruned attention, which tensors have as well."""

    def at_once(self, q: Any, power: float | None, numbers: int, logits: int, /) -> int:
        """Return how many chunks one call of `mixture` takes, of so many numbers and logits each; 0 for one."""

    def mixture(self, x: PrunedArguments, room: dict[str, Any] | None = None, into: Any = None, /) -> tuple[Any, Any]:
        """Return the output (b, g, m, D) and the share of the summaries in each query's weights, (b, g, m).

        `room`: {} before the first of several calls, for memory that they share. `into`: an array that may take the
        output.
        """

    def levels(self, labels: Any, values: Any, weight: Any, R: int, /) -> Any:
        """Return weighted means by label, (b, R)."""

    def merged(self, labels: Any, log_weight: Any, items: Summaries, R: int, /) -> Summaries:
        """Return R summaries of items."""

    def radii(self, labels: Any, items: Summaries, item_radii: Any, summaries: Summaries, /) -> Any:
        """Return bounds (b, R) of the distances of members of summaries from their means."""

    def row_moments(self, X: Any, squares: bool, chunks: int = 1, /) -> tuple[Any, Any]:
        """Return the sums (b, d) of rows and, if `squares`, the sums (b, d, d) of x xᵀ in float64, for each chunk."""

    def places(self, K: Any, origin: Any, root: Any, query: Any, /) -> tuple[Any, Any]:
        """Return keys in another basis, (b, n, d), and their products with a query, (b, n)."""


class PrunedKernels(PrunedOperators, Protocol):
    """All kernels of pruned attention. In torch, gradients follow the definitions."""

    def renews(self, keys: Any, values: Any, slots: tuple[int, int], leaving: int, /) -> bool:
        """Tell whether one kernel renews slots with `leaving` keys each time, also in turn.

        `slots`: kept keys and summaries. Then `renewed` returns None for numbers that need an error alone.
        """

    def running(self, sums: Any, before: Any, /) -> Any:
        """Return sums (chunks, ...) up to and with each chunk, after others (...), in place."""

    def renewed(
        self, x: RenewalArguments, room: dict[str, Any] | None = None, /
    ) -> tuple[Any, Any, Any, Summaries | None, Any, tuple[Any, Any] | None] | None:
        """Return kept keys, values and places, summaries, radii or None, and faults; None: the caller must take steps.

        Kernels of a device wait for nothing, so faults are flags there, else None. There are two arrays of flags:
        (2, items) as `factor_queries` has them, and (items,), whether products with keys are finite.

        If in turn, the results have an item for each sequence before the first renewal and after each, sequences
        within renewals. `room`: arrays that calls reuse. With it results are valid until the call after the next, or
        in turn until the next call in turn.
        """


class PrunedGradients(Protocol):
    """The gradients of a mixture by softmax, where kernels compute them."""

    def mixture_gradients(self, x: PrunedArguments, dY: Any, /) -> tuple[Any, ...]:
        """Return the gradients of the arrays of `differentiable`, for outputs with the gradient dY."""


def differentiable(x: PrunedArguments) -> tuple[Any, ...]:
    """Return the arrays that may have gradients: queries, keys and values: kept, in summaries and all."""
    sums = (None, None) if x.summaries is None else (x.summaries.keys, x.summaries.values)
    return (x.q, x.kept_keys, x.kept_values, *sums, x.keys, x.values)
