"""The keys that pruned attention attends exactly, and the clusters of the others. Nothing here has a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from levattn._core.checks import TIE
from levattn._kernels import PRUNING, kernels_for
from levattn._kernels.pruned import JITTER, SAME, SPREAD_ROUNDING, TILT, LabelKernels, Summaries
from levattn._kernels.pruned.definition import rows_of_each as rows_of_each
from levattn.attention.arguments import device_of, namespace_of, without_gradient
from levattn.attention.pruned.selection import Checks, SelectionRule

_NOT_FINITE = "{} hold NaN or infinity, or are too large for their squares; give finite ones"
_NO_NUMBERS = (
    "the scores of keys are NaN: Q, K or your own scores hold NaN, or Q or K holds infinity or is too large; give "
    "finite ones"
)
_TOO_FAR = "queries are too far apart in size for their moments; give ones that are closer"


def _parts(array: Any, count: int) -> list[Any]:
    """Return the equal parts of an array along its first axis."""
    size = array.shape[0] // count
    return [array[i * size : (i + 1) * size, ...] for i in range(count)]


@dataclass(frozen=True, eq=False)
class Sums:
    """First and second moments of rows in float64: total (b, d), second (b, d, d) or None, and their number.

    With an `origin` (b, d), the first row, the total is of rows less the origin. Second moments are then about the
    mean of the rows. So nothing cancels, however far the rows are from zero.
    """

    total: Any
    second: Any
    count: int
    origin: Any = None

    @classmethod
    def of(cls, X: Any, *, second: bool = True, centered: bool = False) -> Sums:
        """Return the sums over the rows of X (b, n, d), with second moments only if `second`."""
        if not centered:
            return cls(*PRUNING.row_moments(X[:, None, :, :], second), X.shape[1])
        xp, count = namespace_of(X), X.shape[1]
        X = xp.astype(X, xp.float64)
        origin = X[:, 0, :] if count else xp.sum(X, axis=1)
        total = xp.sum(X - origin[:, None, :], axis=1)
        rows = X - origin[:, None, :] - total[:, None, :] / max(count, 1)
        _, squares = PRUNING.row_moments(rows[:, None, :, :], True)
        return cls(total, squares, count, origin)

    @classmethod
    def of_chunks(cls, X: Any, chunks: int, *, like: Sums) -> list[Sums]:
        """Return sums like others over the rows of each chunk of X (b, g, n, d), of all g together."""
        xp, (b, g, n, d) = namespace_of(X), X.shape
        if like.origin is None:
            sums = cls(*PRUNING.row_moments(X, like.second is not None, chunks), g * (n // chunks))
        else:
            X = xp.permute_dims(xp.reshape(X, (b, g, chunks, n // chunks, d)), (2, 0, 1, 3, 4))
            sums = cls.of(xp.reshape(X, (chunks * b, g * (n // chunks), d)), centered=True)
        each = (
            [None] * chunks if part is None else _parts(part, chunks)
            for part in (sums.total, sums.second, sums.origin)
        )
        return [cls(total, second, sums.count, origin) for total, second, origin in zip(*each, strict=True)]

    def times(self, factor: float) -> Sums:
        """Return the sums over the rows times a factor."""
        if factor == 1:
            return self
        second, origin = (
            None if array is None else array * number
            for array, number in ((self.second, factor * factor), (self.origin, factor))
        )
        return Sums(self.total * factor, second, self.count, origin)

    def plus(self, other: Sums) -> Sums:
        """Return the sums over the rows of both."""
        count = self.count + other.count
        if self.origin is None:
            second = None if self.second is None else self.second + other.second
            return Sums(self.total + other.total, second, count)
        if not (self.count and other.count):
            return self if self.count else other
        total = other.total + (other.origin - self.origin) * other.count
        apart = total / other.count - self.total / self.count
        # Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983
        between = apart[:, :, None] * apart[:, None, :] * (self.count * other.count / count)
        return Sums(self.total + total, self.second + other.second + between, count, self.origin)

    @property
    def mean(self) -> Any:
        """The mean row, (b, d)."""
        mean = self.total / max(self.count, 1)
        return mean if self.origin is None else self.origin + mean

    def less_mean(self, K: Any) -> Any:
        """Return rows (b, n, d) in float64, less the mean."""
        xp = namespace_of(K)
        rows, mean = xp.astype(K, xp.float64), self.total / max(self.count, 1)
        rows = rows if self.origin is None else rows - self.origin[:, None, :]
        return rows - mean[:, None, :]

    def moment(self, centered: bool) -> Any:
        """Return the mean of x xᵀ, (b, d, d), about the mean or about zero."""
        second = self.second / max(self.count, 1)
        if not centered or self.origin is not None:
            return second
        return second - self.mean[:, :, None] * self.mean[:, None, :]


@dataclass(frozen=True, eq=False)
class Measure:
    """The measure of differences of keys: how much they change the logits of the queries so far.

    `root`: (b, d, d), a factor L of the second moment L Lᵀ of the queries. So ‖x L‖² is the mean square of ⟨q, x⟩.
    The moment is about the mean for a softmax, which no constant changes, and about zero for powers.
    `query`: (b, d), the mean query; zero for powers. `origin`: (b, d), the mean key; zero for powers.
    """

    root: Any
    query: Any
    origin: Any

    def places(self, K: Any) -> tuple[Any, Any]:
        """Return the places of keys (b, n, d), whose distances are the measure, and ⟨mean query, k⟩ (b, n)."""
        return PRUNING.places(K, self.origin, self.root, self.query)

    def places_of(self, held: Summaries) -> tuple[Any, Any]:
        """Return the places of the means of summaries, and the log mass at the mean query for each unit of weight."""
        xp, dtype = namespace_of(held.keys), self.root.dtype
        means, weight = means_of(held)
        X, along = self.places(xp.astype(without_gradient(means), dtype))
        return X, along - xp.astype(held.offset / weight, dtype)


def measured(queries: Sums, keys: Sums, power: float | None, dtype: Any, checks: Checks) -> Measure:
    """Return the measure of some queries and keys, in the given dtype."""
    xp = namespace_of(queries.total)
    if power is None and queries.origin is None and keys.origin is None:
        counts = max(queries.count, 1), max(keys.count, 1)
        kernels = cast(LabelKernels, kernels_for("pruned", queries.total))
        found = kernels.factor_queries(queries.total, queries.second, keys.total, counts, dtype)
        if found is not None:
            root, query, origin, sound = found
            expect_sound(sound, checks)
            return Measure(root, query, origin)
    moment = finite_or_zero(queries.moment(power is None), "queries", checks)
    d = moment.shape[-1]
    eye = xp.eye(d, dtype=xp.float64, device=device_of(moment))
    size, rough = (
        xp.sum(part * eye, axis=(1, 2))[:, None, None] / d * share
        for part, share in ((moment, JITTER), (queries.moment(False), d * SPREAD_ROUNDING))
    )
    least = xp.where(size > rough, size, rough)
    moment = moment + xp.where(least > 0, least, xp.ones_like(least)) * eye
    zero = xp.zeros_like(queries.total)
    return Measure(
        xp.astype(_factor(moment, checks), dtype),
        xp.astype(zero if power is not None else queries.mean, dtype),
        xp.astype(zero if power is not None else keys.mean, dtype),
    )


def expect_sound(sound: Any, checks: Checks) -> None:
    """Expect flags (2, b) of moments of queries that are finite, and have a factor."""
    checks.expect(sound[0, :], _NOT_FINITE.format("queries"))
    checks.expect(sound[1, :], _TOO_FAR)


def expect_finite(finite: Any, dtype: Any, checks: Checks) -> None:
    """Expect flags of finite products of queries and keys."""
    checks.expect(
        finite,
        f"squares of products of queries and K are beyond {dtype}, or one holds NaN or infinity; give finite "
        "arrays with smaller entries, or of float64",
    )


def finite_or_zero(moment: Any, name: str, checks: Checks) -> Any:
    """Return second moments (b, d, d), with zeros for non-finite matrices, which no library decomposes."""
    xp = namespace_of(moment)
    finite = xp.isfinite(moment)
    checks.expect(finite, _NOT_FINITE.format(name))
    return xp.where(xp.all(finite, axis=(1, 2), keepdims=True), moment, xp.zeros_like(moment))


def _factor(moment: Any, checks: Checks) -> Any:
    """Return the Cholesky factor of each matrix (b, d, d)."""
    xp = namespace_of(moment)
    without_wait = getattr(xp.linalg, "cholesky_ex", None)  # torch's, because its `cholesky` waits for the device
    if without_wait is None:
        return xp.linalg.cholesky(moment)
    root, failed = without_wait(moment)
    checks.expect(failed == 0, _TOO_FAR)
    return root


def measures(queries: list[Sums], keys: list[Sums], power: float | None, dtype: Any, checks: Checks) -> list[Measure]:
    """Return the measures of several pairs of queries and keys of one batch, factored at once."""
    xp, b = namespace_of(queries[0].total), queries[0].total.shape[0]
    means, moments, origins = (
        xp.concat(arrays, axis=0)
        for arrays in ([x.mean for x in queries], [x.moment(False) for x in queries], [x.mean for x in keys])
    )
    whole = measured(Sums(means, moments, 1), Sums(origins, None, 1), power, dtype, checks)
    cuts = [slice(i * b, (i + 1) * b) for i in range(len(queries))]
    return [Measure(whole.root[cut, ...], whole.query[cut, ...], whole.origin[cut, ...]) for cut in cuts]


def spectra(keys: list[Sums], centered: bool, checks: Checks) -> list[tuple[Any, Any]]:
    """Return eigenvalues (b, d) and eigenvectors (b, d, d) of the moments of several sums, decomposed at once."""
    xp, b = namespace_of(keys[0].total), keys[0].total.shape[0]
    moments = xp.concat([x.moment(centered) for x in keys], axis=0)
    values, directions = xp.linalg.eigh(finite_or_zero(moments, "keys", checks))
    cuts = [slice(i * b, (i + 1) * b) for i in range(len(keys))]
    return [(values[cut, ...], directions[cut, ...]) for cut in cuts]


def one_sided(K: Any, spectrum: tuple[Any, Any]) -> Any:
    """Return keys (b, n, d) times ±1, which puts them on one side of the origin as far as possible.

    The sign does not change even functions of a product, but it changes means of keys. `spectrum`: of the moment of
    all keys.
    """
    xp = namespace_of(K)
    along = xp.matmul(without_gradient(K), xp.astype(spectrum[1][..., -1:], K.dtype))
    return K * xp.where(along < 0, xp.full_like(along, -1.0), xp.ones_like(along))


def in_range(q: Any, keys: Any, before: Any = None) -> Any:
    """Scale queries (b, g, m, d) so that their products with keys (b, n, d) are in range.

    A factor of a query does not change the weights of a power. With `before`, earlier keys, query i reads these and
    the first i + 1 keys, and its factor depends on these keys alone.
    """
    if not (q.shape[-1] and q.shape[-2] and keys.shape[1]):
        return q
    xp = namespace_of(q)
    tiny = xp.finfo(q.dtype).smallest_normal
    half = -math.log2(tiny) / 2

    def exponents(X: Any) -> Any:
        return xp.log2(xp.maximum(xp.abs(without_gradient(X)), xp.full_like(X, tiny)))

    columns = exponents(keys)
    if before is None:
        columns = xp.max(columns, axis=1, keepdims=True)
    else:
        if before.shape[1]:
            columns = xp.maximum(columns, xp.max(exponents(before), axis=1, keepdims=True))
        step = 1
        while step < columns.shape[1]:  # the maximum of the first i + 1, in doubling steps
            later = xp.maximum(columns[:, step:, :], columns[:, :-step, :])
            columns = xp.concat([columns[:, :step, :], later], axis=1)
            step *= 2
    largest = xp.max(exponents(q) + columns[:, None, :, :], axis=-1, keepdims=True)
    far = (xp.abs(largest) > half) & xp.isfinite(largest)
    steps = xp.clip(xp.where(far, -xp.floor(largest), xp.zeros_like(largest)), -2 * half, 2 * half)
    return q * 2.0**steps


@dataclass(frozen=True, eq=False)
class Contenders:
    """The rows among which a selection chooses, behind the summaries of earlier rows, if there are any.

    `own`, `values`: (b, n, d) and (b, n, D), keys and values as they were given.
    `keys`: (b, n, d), without a gradient, for powers on one side of the origin.
    `measure`: None if neither scores nor new summaries need places.
    `weight`: (b, n), of rows in clusters. `items`: the members of new summaries, `held` ahead of rows; None for none.
    `first`: (b, n), flags of rows that are chosen whatever their scores. `sure`: how many these are, for each item.
    `given`: (b, n), scores, if they were given. `held`: earlier summaries. `there`: (b, n), False for absent rows.
    `roles`: whether the caller asks for roles rather than labels, of rows that no held summary stands for.
    """

    own: Any
    values: Any
    keys: Any
    measure: Measure | None
    weight: Any
    items: Summaries | None
    first: Any
    sure: int
    given: Any = None
    held: Summaries | None = None
    there: Any = None
    roles: bool = False

    def places(self) -> tuple[Any, Any, Any]:
        """Return places, log masses for each unit of weight, and weights in clusters, of summaries and rows."""
        if self.measure is None:
            return None, None, self.weight
        ours = (*self.measure.places(self.keys), self.weight)
        if self.held is None:
            return ours
        xp = namespace_of(self.keys)
        ahead = (*self.measure.places_of(self.held), xp.astype(self.held.count, self.keys.dtype))
        X, along, weight = (xp.concat(pair, axis=1) for pair in zip(ahead, ours, strict=True))
        return X, along, weight


@dataclass(frozen=True, eq=False)
class Selected:
    """The result of a selection.

    `order`, `count`, `flags`: of rows, as `chosen` returns them.
    `labels`, `log_weight`, `summaries`: of the others, as `grouped` returns them; None without new summaries.
    `role`: (b, n), labels, and -2 for chosen rows, where one kernel makes all of these; then there are no labels.
    """

    order: Any
    count: Any
    flags: Any
    labels: Any = None
    log_weight: Any = None
    summaries: Any = None
    role: Any = None


def selected(
    rule: SelectionRule, rows: Contenders, leverage: Callable[[], Any], checks: Checks, rounds: int
) -> Selected:
    """Score the rows, choose some and group the others, as a rule says.

    `leverage`: returns leverage scores (b, n), for a rule that selects by them. `rounds`: of Lloyd's algorithm.
    """
    xp, R, (X, along, weight) = namespace_of(rows.weight), rule.slots.summaries, rows.places()
    ahead = weight.shape[1] - rows.weight.shape[1]
    epsilon, clusters, first, there = rule.epsilon, None, rows.first, rows.there
    if rule.kind == "given":
        scores = without_gradient(rows.given)
    elif rule.function is not None:
        scores = rule.function(without_gradient(rows.own), without_gradient(rows.values))
    elif rule.kind == "leverage":
        scores = leverage()
        if epsilon is not None:  # selects scores that tie with it
            epsilon *= 1 - TIE - 8 * float(xp.finfo(scores.dtype).eps)
    else:
        scores, clusters = scored(rule.kind, X, along, weight, R, rule.power, checks, rounds)
        scores = scores[:, ahead:]
    if there is not None:
        scores, first = xp.where(there, scores, xp.full_like(scores, -math.inf)), there & first
    sure = None if rule.own or there is not None else rows.sure  # a score of a user's own may be −∞
    order, count, flags = chosen(scores, rule.slots.selected, epsilon, first, sure, checks)
    if rows.items is None:
        return Selected(order, count, flags)
    left = xp.where(flags, xp.zeros_like(rows.weight), rows.weight)
    if rows.roles and rule.power is None:
        merged = _merged(X, along, rows.items, left, R, clusters, rounds)
        if merged is not None:
            role, tilts, summaries = merged
            return Selected(order, count, flags, None, tilts, summaries, role)
    if ahead:
        left = xp.concat([weight[:, :ahead], left], axis=1)
    groups = grouped(X, along, rows.items, left, R, rule.power, clusters, rounds)
    return Selected(order, count, flags, *groups)


def _merged(
    X: Any, along: Any, items: Summaries, weight: Any, R: int, labels: Any, rounds: int
) -> tuple[Any, Any, Summaries] | None:
    """Return roles, tilts and summaries of rows by a kernel, or None without one; arguments as for `grouped`."""
    kernels, (K, V) = cast(LabelKernels, kernels_for("pruned", items.keys)), (items.keys, items.values)
    if not (kernels.reads(K) and kernels.reads(V)):
        return None
    if labels is None:
        labels, _ = PRUNING.cluster(X, weight, R, rounds)
    role, tilts, sums = kernels.merge_rows(labels, along, weight, K, V, R)
    mass, offset, count = (sums[..., k] for k in (-3, -2, -1))
    return role, tilts, Summaries(mass, sums[..., : K.shape[2]], sums[..., K.shape[2] : -3], offset, count)


def scored(
    kind: str,
    X: Any,
    along: Any,
    weight: Any,
    R: int,
    power: float | None,
    checks: Checks,
    rounds: int,
) -> tuple[Any, Any]:
    """Return the scores (b, n) of keys, "expected" or "residual", from their places and ⟨mean query, k⟩.

    The second result is the clusters (b, n) of the residuals, or None. `weight`: (b, n), of the rows in the clusters.
    `rounds`: of Lloyd's algorithm.
    """
    xp, kernels, labels, distance = namespace_of(X), cast(LabelKernels, kernels_for("pruned", X)), None, None
    clustered, together = kind == "residual" and R > 0, power is None and kernels.reads(X)
    if not together:
        with np.errstate(over="ignore", invalid="ignore"):
            squares = xp.sum(X * X, axis=-1)
        expect_finite(xp.isfinite(squares), X.dtype, checks)
    if clustered:
        labels, distance = PRUNING.cluster(X, weight, R, rounds)
    if together:
        scores, finite = kernels.score_rows(X, along, distance, kind == "residual")
        expect_finite(finite, X.dtype, checks)
        return scores, labels
    tiny = xp.full((), 1e-30, dtype=X.dtype, device=device_of(X))
    if power is None:
        expected = along + squares / 2
    else:
        expected = (power if kind == "expected" else power - 1) * xp.log(xp.maximum(squares, tiny))
    if kind == "expected":
        return expected, None
    # a distance below this is rounding, and must not decide which keys are chosen
    least = xp.maximum(SAME * squares, tiny)
    return xp.log(xp.maximum(squares if distance is None else distance, least)) + expected, labels


def chosen(
    scores: Any, size: int, epsilon: float | None, first: Any, forced: int | None, checks: Checks
) -> tuple[Any, Any, Any]:
    """Return the places of the chosen rows (b, s), ascending, how many of them count (b,) or None, and flags (b, n).

    Chosen are the rows with the `size` largest scores, on ties the first, or all rows with scores of at least
    `epsilon`. The rows flagged in `first` are chosen as well. Rows of score −inf are absent, and a score of +inf is
    the largest number. `forced`: the number of flags in `first` for each item, if no row is absent. Then, without a
    threshold, no wait for a device is needed.
    """
    xp, kernels = namespace_of(scores), cast(LabelKernels, kernels_for("pruned", scores))
    n = scores.shape[1]
    if epsilon is None and forced is not None and kernels.reads(scores):
        order, flags, sound = kernels.choose_rows(scores, first, min(n, size + forced))
        checks.expect(sound, _NO_NUMBERS)
        return order, None, flags
    scores = xp.where(scores == math.inf, xp.full_like(scores, float(xp.finfo(scores.dtype).max)), scores)
    top = xp.where(first, xp.full_like(scores, math.inf), scores)
    checks.expect(~xp.isnan(top), _NO_NUMBERS)
    place = xp.arange(n, device=device_of(scores))
    if epsilon is not None:
        flags = top >= epsilon
    else:
        order = xp.argsort(-top, axis=1, stable=True)
        if forced is not None:
            order = order[:, : min(n, size + forced)]
            return xp.sort(order, axis=1), None, _up_to(top, order, place)
        rank = xp.argsort(order, axis=1, stable=True)
        forced_here = xp.sum(xp.astype(first, xp.int64), axis=1)[:, None]
        flags = (rank < size + forced_here) & (top > -math.inf)
    counts = xp.sum(xp.astype(flags, xp.int64), axis=1)
    s = int(xp.max(counts)) if scores.shape[0] else 0
    order = xp.argsort(xp.where(flags, place, place + n), axis=1, stable=True)[:, :s]
    return order, None if bool(xp.all(counts == s)) else counts, flags


def _up_to(top: Any, order: Any, place: Any) -> Any:
    """Return flags (b, n) of the rows in an order (b, s): the largest first, on ties the first."""
    xp = namespace_of(top)
    if not order.shape[1]:
        return xp.zeros_like(top, dtype=xp.bool)
    last = order[:, -1:]
    least = rows_at(top, last)
    return (top > least) | ((top == least) & (place <= last))


def grouped(
    X: Any,
    along: Any,
    items: Summaries,
    weight: Any,
    R: int,
    power: float | None,
    labels: Any,
    rounds: int,
) -> tuple[Any, Any, Summaries]:
    """Return the cluster of each item (b, n), -1 where its weight is 0, log weights (b, n), and the R summaries.

    `along`: (b, n), the log mass of an item at the mean query, for each unit of its weight. `labels`: the clusters of
    the residuals, which lose only the items of weight 0; or None to find clusters.
    """
    xp = namespace_of(X)
    if labels is None:
        labels, _ = PRUNING.cluster(X, weight, R, rounds)
    here = weight > 0
    labels = xp.where(here, labels, xp.full_like(labels, -1))
    if power is None:
        level = PRUNING.levels(labels, along, weight, R)
        own = rows_at(level[..., None], xp.where(here, labels, xp.zeros_like(labels)))[..., 0]
        tilt = xp.clip(along - xp.where(here, own, along), -TILT, TILT)
    else:
        tilt = xp.zeros_like(along)
    return labels, tilt, PRUNING.merged(labels, xp.astype(tilt, items.weight.dtype), items, R)


def items_of(ones: Any, keys: Any, values: Any) -> Summaries:
    """Return rows as items for clusters, each of weight and count 1; ones: (b, n)."""
    return Summaries(ones, keys, values, namespace_of(ones).zeros_like(ones), ones)


def balanced(summaries: Summaries) -> Summaries:
    """Scale the weights of summaries to a mean of 1, which does not change the mass they stand for.

    Otherwise repeated merges would over- or underflow: each changes weights by a factor of up to exp(±TILT).
    """
    xp = namespace_of(summaries.weight)
    there = summaries.count > 0
    one = xp.ones_like(summaries.weight)
    factor = xp.where(there, summaries.count, one) / xp.where(there, summaries.weight, one)
    return Summaries(
        weight=factor * summaries.weight,
        keys=factor[..., None] * summaries.keys,
        values=factor[..., None] * summaries.values,
        offset=factor * (summaries.offset + xp.log(factor) * summaries.weight),
        count=summaries.count,
    )


def means_of(summaries: Summaries) -> tuple[Any, Any]:
    """Return the means (b, R, d) of the members of summaries and their weights (b, R); zero and 1 without members."""
    xp = namespace_of(summaries.keys)
    weight = xp.where(summaries.count > 0, summaries.weight, xp.ones_like(summaries.weight))
    return summaries.keys / weight[..., None], weight


def rows_at(A: Any, places: Any) -> Any:
    """Return the rows of A (b, n, ...) at places (b, s): (b, s, ...)."""
    (found,) = rows_of_each((A,), places)
    return found
