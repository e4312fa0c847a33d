"""Errors of pruned attention with a coverage: the rule by loops, and the law over many draws."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import naive_attention
from levattn.attention import PrunedCoverage, Selection, pruned_coverage
from levattn.exceptions import NonFiniteError
from libraries import HAS_TORCH, needs_torch, over_storages, stored
from pruned_calls import attend, selected

if HAS_TORCH:
    import torch

RISK = 1e-6  # that a test of a law fails by chance, at another seed
GRID = (0.2, 0.35, 0.5, 0.7)
NAMES = {"summaries": "R", "scores": "kind", "f": "power"}


def heads(seed: int, m: int = 41, n: int = 20) -> tuple[Any, Any, Any]:
    """Four heads of queries and two of keys and values, which differ in how well they can be pruned."""
    rng = np.random.default_rng([91, seed])
    Q, K, V = (rng.standard_normal(shape) for shape in ((4, m, 5), (2, n, 5), (2, n, 3)))
    return Q * np.array([1.5, 0.3, 3.0, 1.0])[:, None, None], K, V


def covered(*arrays: Any, budgets: Any = None, **options: Any) -> PrunedCoverage:
    """Return the coverage of the selection of these options, of several with several budgets, or of the default."""
    selection, others = selected(options)
    named = selection if budgets is None else [replace(selection, budget=budget) for budget in budgets]
    return pruned_coverage(*arrays, None if named is selection and "budget" not in options else named, **others)


def naive_errors(Q: Any, found: PrunedCoverage, K: Any, V: Any, budget: float, options: dict[str, Any]) -> Any:
    """The errors (G, m') of the queries that set the bound, the largest of the heads that share keys."""
    sample = np.asarray(found.queries)
    used = {row.tobytes() for row in sample[0]}
    Q = Q[:, [i for i, row in enumerate(Q[0]) if row.tobytes() not in used]]
    assert Q.shape[1] == found.count
    f, scale = options.get("f", "softmax"), options.get("scale")
    power = None if f == "softmax" else f
    n, rows = K.shape[1], []
    total = max(1, math.floor(budget * n + 1e-9))
    R = min(options.get("summaries", (total - near(total)) * 4 // 5), n) if total < n else 0
    for j in range(2):
        heads_of = slice(2 * j, 2 * j + 2)
        asked, kind = sample[heads_of].reshape(-1, 5), options.get("scores", "residual")
        oracle = {"size": total - R, "R": R, "kind": kind, "power": power, "scale": scale, "center": not power}
        Y, *_ = naive_attention.pruned(Q[heads_of], K[j], V[j], queries=asked, **oracle)
        dense, _ = naive_attention.dense(Q[heads_of], K[j : j + 1], V[j : j + 1], power, False, scale)
        each = [
            [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(*pair, strict=True)]
            for pair in zip(Y, dense, strict=True)
        ]
        rows.append([max(errors) for errors in zip(*each, strict=True)])
    return np.array(rows)


def near(total: int) -> int:
    """How many slots a budget leaves to the keys near a query, which the summaries are reckoned without."""
    window = max(0, min(8, (total * 2 // 5 - 1) // 2))
    return 2 * window + 1 if window else 0


def least(values: Any, coverage: Fraction) -> float:
    """The ⌈(m + 1) coverage⌉-th smallest."""
    return sorted(values)[math.ceil((len(values) + 1) * coverage) - 1]


FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "dropped": {"summaries": 0, "scores": "leverage"},
    "squares": {"f": 2, "scores": "expected"},
    "scaled": {"scale": 1.0, "summaries": 2},
}


@pytest.mark.parametrize("form", FORMS)
def test_errors_are_those_of_dense_attention_and_the_rule_is_that_of_conformal_prediction(form: str) -> None:
    (Q, K, V), options, coverage = heads(0), FORMS[form], Fraction(4, 5)
    table = []
    for budget in GRID:
        found = covered(Q, K, V, coverage=0.8, budget=budget, **options)
        errors = naive_errors(Q, found, K, V, budget, options)
        assert (found.coverage, found.count, found.queries.shape) == (0.8, 21, (4, 20, 5))
        np.testing.assert_array_equal(found.budget, [budget] * 2)
        np.testing.assert_allclose(found.error, [least(row, coverage) for row in errors], rtol=1e-9)
        table.append(errors)
    bounds = np.array([[least(row, coverage) for row in errors] for errors in table])
    budgets = set()
    for error in (0.01, *bounds.mean(axis=1), 2 * bounds.max()):
        found = covered(Q, K, V, coverage=0.8, error=error, budgets=GRID, **options)
        for g in range(2):
            allowed = [1.0]  # where enough queries stay within the error at this budget and at all larger ones
            for i in range(len(GRID)):
                good = sum(all(errors[g, q] <= error for errors in table[i:]) for q in range(21))
                allowed += [GRID[i]] * (good >= math.ceil(22 * coverage))
            assert found.budget[g] == min(allowed)
            assert found.error[g] == (error if found.budget[g] < 1 else 0)
            budgets.add(float(found.budget[g]))
    assert {GRID[0], 1.0} < budgets


def test_a_budget_of_all_keys_is_dense() -> None:
    arrays = heads(1)
    found = pruned_coverage(*arrays, Selection(1.0, summaries=3), coverage=0.9)
    assert found.error.tolist() == [0, 0]
    assert found.budget.tolist() == [1, 1]
    for budgets in ((), (0.2,), (1.0, 0.2, 0.2)):
        found = pruned_coverage(*arrays, budgets, coverage=0.9, error=1e-9)
        assert (found.budget.tolist(), found.error.tolist()) == ([1, 1], [0, 0])
    nothing = pruned_coverage(*arrays, 0.2, coverage=0.9, mask=np.zeros(20, bool))
    assert nothing.error.tolist() == [0, 0]  # both give zeros


@over_storages
def test_arrays_of_other_libraries_and_leading_axes(storage: str) -> None:
    first, second = heads(2), heads(3)
    mask = np.arange(20) < np.array([20, 14])[:, None, None]
    both = [stored(np.stack(pair), storage) for pair in zip(first, second, strict=True)]
    for wish in ({"budget": 0.3}, {"error": 0.5}):
        found = covered(*both, coverage=0.8, mask=stored(mask, storage), rng=4, **wish)
        assert type(found.queries) is type(both[0])
        assert found.error.shape == found.budget.shape == (2, 2)
        for i, arrays in enumerate((first, second)):
            alone = covered(*arrays, coverage=0.8, mask=mask[i], rng=4, **wish)
            np.testing.assert_allclose(found.error[i], alone.error, rtol=1e-9)
            np.testing.assert_array_equal(found.budget[i], alone.budget)
            np.testing.assert_array_equal(np.asarray(found.queries)[i], alone.queries)
    Q, K, V = first
    one, of_heads = (pruned_coverage(*x, 0.3, coverage=0.8) for x in ((Q[0], K[0], V[0]), (Q[:1], K[:1], V[:1])))
    assert (float(one.error), one.queries.shape) == (of_heads.error[0], (20, 5))
    apart = pruned_coverage(Q[:2], K[0], V, 0.3, coverage=0.8)  # values of two heads
    assert apart.error.shape == (2,)


@needs_torch
@pytest.mark.parametrize(
    ("queries", "keys", "mask", "errors"),
    [
        ((60, 4), (1, 50, 4), None, (1,)),
        ((2, 60, 4), (3, 2, 50, 4), None, (3, 2)),
        ((1, 2, 60, 4), (3, 1, 50, 4), None, (3, 1)),
        ((2, 60, 4), (2, 50, 4), (3, 1, 50), (3, 2)),
    ],
)
def test_keys_and_masks_may_have_leading_axes_that_queries_lack(
    queries: Any, keys: Any, mask: Any, errors: Any
) -> None:
    rng = np.random.default_rng(0)
    Q, K, V = (rng.standard_normal(shape) for shape in (queries, keys, (*keys[:-1], 3)))
    options = {} if mask is None else {"mask": rng.random(mask) < 0.9}
    found = pruned_coverage(Q, K, V, 0.3, coverage=0.8, rng=0, **options)
    assert np.shape(found.error) == errors


def test_tensors_with_gradients_and_of_narrow_numbers() -> None:
    arrays = heads(4)
    expected = pruned_coverage(*arrays, 0.3, coverage=0.8)
    leaves = [torch.from_numpy(x).requires_grad_() for x in arrays]
    np.testing.assert_allclose(pruned_coverage(*leaves, 0.3, coverage=0.8).error, expected.error, rtol=1e-9)
    for dtype in (torch.float16, torch.bfloat16):
        found = pruned_coverage(*(x.to(dtype) for x in leaves), 0.3, coverage=0.8)
        np.testing.assert_allclose(found.error, expected.error, rtol=0.1)
        assert found.error.dtype == np.float64


# -- the law ------------------------------------------------------------------------------------------------


def queries(kind: str, B: int, m: int, rng: np.random.Generator) -> Any:
    """B draws of m queries each."""
    if kind == "heavy tails":
        return rng.standard_t(2, (B, 1, m, 3))
    if kind == "clusters":
        return 2 * np.eye(3)[rng.integers(3, size=(B, 1, m))] + 0.3 * rng.standard_normal((B, 1, m, 3))
    constant = np.ones((B, 1, m, 1))
    return np.concatenate([rng.standard_normal((B, 1, m, 2)), constant], axis=-1)


def reached(found: PrunedCoverage, Q: Any, K: Any, V: Any, **options: Any) -> Any:
    """For each draw the share of its new queries whose error is within the bound."""
    dense = attend(Q, K, V, budget=1.0, **options)
    inside = np.zeros((len(Q), Q.shape[-2]), bool)
    for budget in np.unique(found.budget):
        Y = attend(Q, K, V, budget=float(budget), queries=found.queries, window=0, **options)
        error = np.linalg.norm(Y - dense, axis=-1) / np.linalg.norm(dense, axis=-1)
        inside |= (error <= found.error[..., None])[:, 0] & (found.budget == budget)
    return inside.mean(axis=1)


def noise(B: int, m: int, new: int) -> float:
    """How far the mean share may be from its law: of a Beta variable and of a binomial, which are sub-Gaussian."""
    return math.sqrt(2 * math.log(2 / RISK) * (1 / (m + 2) + 1 / new) / (4 * B))


@pytest.mark.parametrize("kind", ["heavy tails", "clusters", "normal"])
def test_the_coverage_is_reached_and_not_more_than_needed(kind: str) -> None:
    rng = np.random.default_rng([92, len(kind)])
    B, m, new, target = 3000, 59, 40, 0.9
    K, V = rng.standard_normal((2, 1, 12, 3))
    Q, fresh = (queries(kind, B, count, rng) for count in (m, new))
    K, V = (np.broadcast_to(x, (B, *x.shape)) for x in (K, V))
    room = noise(B, 30, new)
    assert room < 0.013
    for wish in ({"budget": 0.34}, {"budget": 0.67, "summaries": 0}, {"error": 0.4, "budgets": (0.25, 0.5, 0.75)}):
        found = covered(Q, K, V, coverage=target, **wish)
        share = float(reached(found, fresh, K, V, **{"summaries": 0} if "summaries" in wish else {}).mean())
        assert share >= target - room
        if "budget" in wish:  # errors are continuous, and budgets are not
            assert share <= target + 1 / (found.count + 1) + room


def test_a_budget_that_is_found_keeps_the_coverage_of_its_error() -> None:
    """Of two budgets the smaller is taken where the errors of its queries happen to be small, which is no bound."""
    rng = np.random.default_rng(93)
    B, m, new = 4000, 18, 20
    K = np.broadcast_to(np.array([[1.0, 0, 0], [-1, 0, 0], [0, 1, -6]]), (B, 1, 3, 3))
    V = np.broadcast_to(np.eye(3), (B, 1, 3, 3))
    options: dict[str, Any] = {"scores": np.array([3.0, 2, 1]), "summaries": 0, "scale": 1.0}
    found = covered(queries("normal", B, m, rng), K, V, coverage=0.9, error=1.4, budgets=(0.34, 0.67), **options)
    assert {*found.budget.ravel()} == {0.34, 0.67}
    share = float(reached(found, queries("normal", B, new, rng), K, V, **options).mean())
    assert share >= 0.9 - noise(B, 9, new)


# -- what is refused ------------------------------------------------------------------------------------------


BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "both": (0.3, {"error": 0.1}, ValueError, "selection is 0.3 and error is 0.1; expected one of them, or several"),
    "neither": (None, {}, ValueError, "selection is None and error is None; expected one selection, or an error"),
    "several": ((0.2, 0.3), {}, ValueError, r"selection is \(0.2, 0.3\) and error is None; expected one selection"),
    "few": (0.3, {"coverage": 0.96}, ValueError, "Q's queries are 41 for each head; .* 47, for"),
    "window": (Selection(0.3, window=2), {}, ValueError, "selection has window=2; expected 0, as the queries are"),
    "renewals": (Selection(0.3, renew_every=5), {}, ValueError, "renew_every is 5, and the attention is not causal"),
    "coverage": (0.3, {"coverage": 1.0}, ValueError, "coverage is 1.0; expected a number above 0"),
    "coverage-kind": (0.3, {"coverage": "0.9"}, TypeError, "coverage is '0.9'"),
    "error": (None, {"error": 0.0}, ValueError, "error is 0.0"),
    "error-nan": (None, {"error": math.nan}, ValueError, "error is nan"),
    "budget": (0.0, {}, ValueError, r"budget is 0.0; expected a count, or a share in \(0, 1\]"),
    "budget-slots": (8, {}, ValueError, r"selection has budget=8; expected a share of the keys in \(0, 1\]"),
    "budget-one": (1, {}, ValueError, "budget is 1; expected at least 2 slots, or a share of the keys"),
    "size": (Selection(size=3), {}, ValueError, "selection has budget=None; expected a share"),
    "budgets": ((0.2, 1.5), {"error": 0.3}, ValueError, "budget is 1.5; expected a count, or a share"),
    "budgets-slots": ((0.2, 8), {"error": 0.3}, ValueError, "selection has budget=8; expected a share"),
    "budgets-kind": ((0.2, "1"), {"error": 0.3}, TypeError, "selection is of type str; expected a Selection, or"),
    "rng": (0.3, {"rng": "0"}, TypeError, "rng is '0'"),
    "summaries": (Selection(0.1, summaries=9), {}, ValueError, "budget=0.1 is 2 slots, and summaries=9"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_named(name: str) -> None:
    selection, options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        pruned_coverage(*heads(5), selection, **{"coverage": 0.8} | options)


def test_bad_arrays_are_named() -> None:
    Q, K, V = heads(6)
    assert pruned_coverage(Q[:, :17], K, V, 0.5, coverage=0.9).count == 9
    far = np.where(V[0, 0, 0] == V, 1e300, V)
    with np.errstate(all="ignore"):
        for arrays, error, message in (
            ((Q[:, :16], K, V), ValueError, "Q's queries are 16 for each head; .* 17, for coverage 0.9"),
            ((Q[0, 0], K, V), ValueError, "Q's queries are 0 for each head"),
            ((Q, K[..., :4], V), ValueError, r"K has shape \(2, 20, 4\); expected d = 5"),
            ((np.where(Q[0, 0, 0] == Q, np.nan, Q), K, V), NonFiniteError, "NaN"),
            ((Q, K, np.where(V[0, 0, 0] == V, np.nan, V)), NonFiniteError, "outputs are NaN or infinite"),
            ((Q, K, far.astype(np.float32)), NonFiniteError, "outputs are NaN or infinite"),
            ((None, K, V), TypeError, "Q is of type NoneType"),
        ):
            with pytest.raises(error, match=message):
                pruned_coverage(*arrays, 0.5, coverage=0.9)
