"""Errors and budgets of pruned attention with a coverage, by conformal prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from levattn._core.arrays import lengths, to_numpy
from levattn._core.checks import fraction, positive_number
from levattn._core.device import where_arrays_are
from levattn._core.jax import by_numpy
from levattn._core.random import as_seed
from levattn._core.types import Float64, dtype_name
from levattn.attention.arguments import dense_array, device_of, namespace_of, without_gradient
from levattn.attention.latent.window import check_scale
from levattn.attention.pruned.pruned import pruned_attention
from levattn.attention.pruned.selection import Selection, as_selection, exponent_of
from levattn.exceptions import NonFiniteError
from levattn.sets.coverage import conformal_place, split_queries

# of a dtype, the least relative and the least absolute difference
_DIGITS = {
    "float64": (2.0**-52, 2.0**-1074),
    "float32": (2.0**-23, 2.0**-149),
    "bfloat16": (2.0**-7, 2.0**-133),
    "float16": (2.0**-10, 2.0**-24),
}
_BUDGETS = (0.03, 0.06, 0.09, 0.12, 0.18, 0.25, 0.35, 0.5, 0.7)


@dataclass(frozen=True, eq=False)
class PrunedCoverage:
    """The error of pruned attention at a budget, for queries like a given sample.

    Attributes
    ----------
    budget : array of float64, shape (..., G)
        Share of the keys for each head of the keys; 1 is dense.
    error : array of float64, shape (..., G)
        Relative error of the output at this budget that a new query does not exceed, with probability `coverage`. If
        `pruned_coverage` was given an error, that error, or 0 where the budget is dense.
    coverage : float
        The probability.
    count : int
        Number of queries that set the bound.
    queries : array of shape (..., H, s, d)
        The other queries, which select keys: give them to `pruned_attention` as ``queries=``.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import Selection, pruned_attention, pruned_coverage
    >>> Q, K, V = np.random.default_rng(0).standard_normal((3, 400, 16))
    >>> found = pruned_coverage(Q, K, V, 0.5, coverage=0.9)
    >>> found.coverage, found.count, found.queries.shape
    (0.9, 200, (200, 16))
    >>> pruned_attention(Q[:5], K, V, Selection(float(found.budget), window=0), queries=found.queries).shape
    (5, 16)
    """

    budget: Float64
    error: Float64
    coverage: float
    count: int
    queries: Any = field(repr=False)


@where_arrays_are
@by_numpy
def pruned_coverage(
    Q: Any,
    K: Any,
    V: Any,
    /,
    selection: Any = None,
    *,
    coverage: float,
    error: float | None = None,
    f: Any = "softmax",
    scale: float | None = None,
    mask: Any = None,
    rng: int | np.random.Generator | None = None,
) -> PrunedCoverage:
    r"""The error of pruned attention at a budget, or the least budget for an error, with a coverage.

    The error of a query is :math:`\|\hat y - y\| / \|y\|`, where ŷ is its output with pruned and y with dense
    attention. It includes the rounding of both. Of several heads of queries that share keys, the largest error
    counts. A random half of the queries selects and summarizes keys. The other half sets the bound, by conformal
    prediction.

    **Guarantee.** Let a new query be exchangeable with the given queries. Call `pruned_attention` with
    ``Selection(float(found.budget[g]), window=0)``, ``queries=found.queries`` and the same options. On head g of the
    keys its error is then at most ``found.error[g]`` with probability at least `coverage`, for each head by itself.
    The guarantee assumes nothing about the distribution, and holds in the mean over the draw of all queries. It does
    not cover later queries of a text, because these need not be exchangeable with earlier ones.

    Parameters
    ----------
    Q : array of shape (..., H, m, d)
        A sample of the queries, as for `pruned_attention`; m is at least about twice coverage/(1 − coverage).
    K, V : array of shape (..., G, n, d) and (..., G, n, D)
        Keys and values.
    selection : Selection or float, or a sequence of them
        One with a share of the keys as its budget, to find its error. With `error`, several, of which the least budget
        is found; by default several shares from 0.03 to 0.7. Dense is always among them. The window is 0.
    coverage : float in (0, 1)
        The probability.
    error : float, optional
        An error above 0, to find the least budget for it.
    f, scale, mask : optional
        As for `pruned_attention`.
    rng : int or numpy.random.Generator, optional
        Seed of the split of the queries; 0 by default.

    Returns
    -------
    PrunedCoverage
        A budget and an error for each head of the keys.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, a budget is no share, or both `error` and a single selection are given. Also if there
        are too few queries for the coverage; the message names the least number.
    NonFiniteError
        If outputs are NaN or infinite.

    Notes
    -----
    Time and memory: one call of `pruned_attention` with m queries for each budget, and a dense one.

    References
    ----------
    Lei, G'Sell, Rinaldo, Tibshirani, Wasserman, "Distribution-free predictive inference for regression", JASA 113,
    2018, Theorem 2 (split conformal prediction).

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import pruned_coverage
    >>> rng = np.random.default_rng(0)
    >>> Q, K, V = rng.standard_normal((3, 400, 16))
    >>> found = pruned_coverage(Q, K, V, coverage=0.9, error=0.5)
    >>> bool(found.budget < 1), bool(found.error <= 0.5), found.count
    (True, True, 200)
    """
    fraction("coverage", coverage)
    if error is not None:
        positive_number("error", error)
    choices = _choices(selection, error)
    shares = [choice.budget for choice in choices]
    Q, K, V = (dense_array(name, array) for name, array in (("Q", Q), ("K", K), ("V", V)))
    m = Q.shape[-2] if Q.ndim > 1 else 0
    fit, test = split_queries(m, coverage, as_seed(rng), name="Q's queries")
    sample, tests = _rows(Q, fit), _rows(Q, test)
    options = {"f": f, "scale": scale, "mask": mask}
    dense = pruned_attention(tests, K, V, 1.0, queries=sample, **options)
    groups = max(array.shape[-3] if array.ndim > 2 else 1 for array in (K, V))
    rounding = _rounding(tests, K, V, dense, options)
    errors = np.stack(
        [
            _errors(
                pruned_attention(tests, K, V, choice, queries=sample, **options),
                dense,
                groups,
                rounding[choice.budget == 1],
            )
            for choice in choices
        ]
    )
    last = conformal_place(len(test), coverage) - 1
    if error is None:
        place, found = np.zeros(errors.shape[1:-1], np.int64), np.sort(errors[0], axis=-1)[..., last]
    else:
        # The budget from which on each query stays within the error. The errors at the chosen budget are no bound,
        # because chance can make them small there.
        beyond = np.flip(np.logical_or.accumulate(np.flip(errors > error, 0), 0), 0)
        place = np.sort(np.count_nonzero(beyond, axis=0), axis=-1)[..., last]
        found = np.where(place < len(shares) - 1, float(error), 0.0)
    return PrunedCoverage(np.array(shares)[place], found, float(coverage), len(test), sample)


def _choices(selection: Any, error: float | None) -> list[Selection]:
    """Return the selections to try, by their budgets, or raise."""
    several = isinstance(selection, Sequence | np.ndarray)
    if error is not None and not several and selection is not None:
        raise ValueError(
            f"selection is {selection!r} and error is {error!r}; expected one of them, or several selections to "
            "choose from"
        )
    if error is None and (several or selection is None):
        raise ValueError(f"selection is {selection!r} and error is None; expected one selection, or an error")
    named = _BUDGETS if selection is None else selection if several else [selection]
    found = []
    for each in named:
        each = as_selection(each)
        if not isinstance(each.budget, float):
            raise ValueError(f"selection has budget={each.budget!r}; expected a share of the keys in (0, 1]")
        if each.window:
            raise ValueError(f"selection has window={each.window!r}; expected 0, as the queries are at no positions")
        found.append(replace(each, window=0))
    by_budget = {float(each.budget or 0): each for each in found}
    if len(by_budget) < len({*found}):
        raise ValueError(
            f"selection is {selection!r}, with different options at one budget; expected one selection for each budget"
        )
    if error is not None:
        by_budget[1.0] = Selection(1.0, window=0)
    return [by_budget[share] for share in sorted(by_budget)]


def _rows(Q: Any, places: Any) -> Any:
    xp = namespace_of(Q)
    return xp.take(Q, xp.asarray(places, device=device_of(Q)), axis=-2)


def _rounding(Q: Any, K: Any, V: Any, dense: Any, options: dict[str, Any]) -> tuple[Float64, Float64]:
    """Return a bound (..., H, m) of the rounding of outputs, as `bounded` reckons it, and zeros for dense ones.

    Sums are off by some units, and exponentials by as many as their exponents are large. Dense outputs have no
    error, because errors are distances from them.
    """
    with np.errstate(over="ignore"):
        q, *sizes = (lengths(_float64(array)) for array in (Q, K, V))
    if options["mask"] is not None:
        there = to_numpy(dense_array("mask", options["mask"]))
        sizes = [np.where(there, each, 0.0) for each in sizes]
    key, value = (np.max(each, axis=-1, keepdims=True, initial=0.0) for each in sizes)
    if q.ndim > 1:  # a line for each head of the queries
        key, value = (
            np.repeat(each, q.shape[-2] // each.shape[-2], axis=-2) if each.ndim > 1 else each for each in (key, value)
        )
    power = exponent_of(options["f"])
    unit, step = _DIGITS["float64" if dtype_name(dense.dtype) == "float64" else "float32"]
    with np.errstate(over="ignore"):
        exponents = abs(check_scale(options["scale"], Q.shape[-1])) * q * key if power is None else power
        found = np.where(value > 0, unit * (64 + 8 * exponents) * value + step * (V.shape[-2] + 2) * V.shape[-1], 0.0)
    found = np.broadcast_to(found, tuple(dense.shape[:-1]))
    return found, np.zeros_like(found)


def _float64(array: Any) -> Float64:
    return np.asarray(to_numpy(namespace_of(array).astype(without_gradient(array), namespace_of(array).float64)))


def _errors(pruned: Any, dense: Any, groups: int, rounding: Float64) -> Float64:
    """Return the relative error of each query, (..., G, m), the largest of the heads that share keys.

    `rounding`: of outputs (..., H, m). An error counts as if the rounding of both outputs had made it smaller.
    """
    mine, true = map(_float64, (pruned, dense))
    if not (np.isfinite(mine).all() and np.isfinite(true).all()):
        raise NonFiniteError("outputs are NaN or infinite; give finite values V, within the range of their dtype")
    # no difference, norm or rounding overflows
    unit = np.where(np.maximum(np.abs(mine), np.abs(true)).max(axis=-1, initial=0.0) > 1, 2.0**-600, 1.0)
    mine, true = mine * unit[..., None], true * unit[..., None]
    size, apart = lengths(true), lengths(mine - true)
    rounding = rounding * unit
    name = dtype_name(dense.dtype)
    if name not in ("float64", "float32"):
        own, step = _DIGITS[name]
        rounding = np.where(rounding > 0, rounding + own * size + step * unit * true.shape[-1], 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.where(apart + rounding > 0, (apart + 2 * rounding) / np.maximum(size - rounding, 0.0), 0.0)
    if errors.ndim == 1:
        return np.asarray(errors)
    *lead, heads, m = errors.shape
    return np.asarray(errors.reshape(*lead, groups, heads // groups, m).max(axis=-2))
