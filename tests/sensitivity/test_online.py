"""Online leverage scores: against exact scores of every prefix, their sums, the rank, storage, bits and errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import levattn
import naive
from levattn import online_leverage_scores
from strategies import STORAGE, Float, as_float64, real_keys, sparse_keys, stores

UNIT = 2.0**-53


def exact(K: Any, mask: Any = None) -> Float:
    """The exact score of each row among the rows up to it, from exact arithmetic on every prefix."""
    keep = np.ones(len(K), bool) if mask is None else mask
    return np.array([naive.leverage_exact(K[: t + 1][keep[: t + 1]])[-1] if keep[t] else 0.0 for t in range(len(K))])


def ridge_scores(K: Float, ridge: float) -> Float:
    """The same with a ridge, by a solve for each prefix."""
    G = ridge * np.eye(K.shape[1])
    scores = []
    for k in K:
        G = G + np.outer(k, k)
        scores.append(k @ np.linalg.solve(G, k))
    return np.array(scores)


def equilibrated_condition(K: Float) -> float:
    """The largest condition number of a prefix of normal keys, columns scaled to norm 1."""
    worst = 1.0
    for t in range(1, len(K) + 1):
        s = np.linalg.svd(K[:t] / np.linalg.norm(K[:t], axis=0), compute_uv=False)
        worst = max(worst, s[0] / s[min(K[:t].shape) - 1])
    return float(worst)


@settings(max_examples=30)
@given(real_keys(max_rows=16))
def test_scores_are_those_of_every_prefix(K: Float) -> None:
    scores = online_leverage_scores(K)
    tolerance = 1e-12 + 200 * UNIT * K.shape[1] * equilibrated_condition(K)
    assume(tolerance < 1e-2)
    np.testing.assert_allclose(scores, exact(K), rtol=tolerance, atol=1e-300)


@settings(max_examples=60)
@given(sparse_keys(columns=(1, 3, 8), max_rows=30))
def test_small_integers_of_any_rank_have_exact_scores_and_new_directions_score_one(K: Float) -> None:
    scores = online_leverage_scores(K)
    np.testing.assert_allclose(scores, exact(K), rtol=1e-11, atol=1e-14)
    ranks = [0, *(naive.rank_exact(K[: t + 1]) for t in range(len(K)))]
    assert ((scores == 1) == (np.diff(ranks) == 1)).all()


@pytest.mark.parametrize("ridge", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("d", [1, 2, 3, 5, 8, 17])
def test_a_ridge_is_added_to_every_prefix(d: int, ridge: float) -> None:
    K = np.random.default_rng(d).standard_normal((23, d))
    np.testing.assert_allclose(online_leverage_scores(K, ridge=ridge), ridge_scores(K, ridge), rtol=1e-10)


@pytest.mark.parametrize("ridge", [1e-6, 0.1, 1.0, 30.0])
def test_logarithms_telescope_to_the_determinant(ridge: float) -> None:
    """And so scores sum to at most d log(1 + ‖K‖²/(d λ))."""
    rng = np.random.default_rng(1)
    K = rng.standard_normal((5, 400, 12)) * rng.uniform(0.1, 3, (5, 400, 1))
    scores = online_leverage_scores(K, ridge=ridge)
    for item in range(5):
        expected = np.log1p(np.linalg.eigvalsh(K[item].T @ K[item]) / ridge).sum()
        assert -np.log1p(-scores[item]).sum() == pytest.approx(expected, rel=1e-12 if ridge > 1e-3 else 1e-9)
        assert scores[item].sum() <= 12 * math.log1p((K[item] ** 2).sum() / (12 * ridge))


@settings(max_examples=40)
@given(sparse_keys(columns=(3, 8), max_rows=40))
def test_scores_without_a_ridge_sum_to_the_rank_and_at_most_a_logarithm(K: Float) -> None:
    scores = online_leverage_scores(K)
    before, distances = np.zeros((0, K.shape[1])), []
    for k in K[scores == 1]:
        rest = k - before.T @ (before @ k)
        rest -= before.T @ (before @ rest)
        distances.append(np.linalg.norm(rest))
        before = np.vstack([before, rest / distances[-1]])
    sigma = np.linalg.svd(K, compute_uv=False)[: len(distances)]
    rest = scores[scores < 1]
    expected = 2 * np.log(sigma).sum() - 2 * np.log(distances).sum()
    assert -np.log1p(-rest).sum() == pytest.approx(expected, abs=1e-9)
    assert rest.sum() <= expected + 1e-9


@pytest.mark.parametrize(
    ("d", "rank", "n"), [(2, 1, 300_000), (8, 3, 100_000), (16, 8, 50_000), (32, 8, 20_000), (70, 1, 5000)]
)
@pytest.mark.parametrize("kind", ["random", "copies", "ill-conditioned", "growing"])
def test_rounding_opens_no_direction_however_many_keys_come(d: int, rank: int, n: int, kind: str) -> None:
    rng = np.random.default_rng(d)
    basis = rng.integers(-9, 10, (rank, d))
    left = rng.integers(-9, 10, (n, rank)).astype(float)
    if kind == "copies":
        left = np.tile(left[: 2 * rank], (n, 1))[:n]
    elif kind == "ill-conditioned":
        left *= 2.0 ** -rng.integers(0, 20, rank)
    elif kind == "growing":
        left *= 2.0 ** (np.arange(n) * 20 // n)[:, None]
    K = left @ basis  # exact: products of small integers
    scores = online_leverage_scores(K)
    assert (scores == 1).sum() == naive.rank_exact(K[: 50 * rank])


def test_a_small_new_direction_scores_one() -> None:
    rng = np.random.default_rng(3)
    K = rng.standard_normal((20_000, 4)) @ rng.standard_normal((4, 8))
    K[15_000] += 1e-9 * rng.standard_normal(8)
    scores = online_leverage_scores(K)
    assert scores[15_000] == 1
    assert (np.flatnonzero(scores == 1) == [0, 1, 2, 3, 15_000]).all()


@pytest.mark.parametrize("small", [1e-3, 1e-6, 9e-10, 1e-12, 1e-15, 1e-150])
def test_a_small_entry_is_no_pivot_for_what_comes_after(small: float) -> None:
    """Columns that nearly depend on one another in two keys: copies of the second open no direction."""
    K = np.array([[-small, 0, 1], [9, -3, 0], [9, -3, 0], [9, -3, 0]])
    assert levattn.online_leverage_scores(K) == pytest.approx([1, 1, 1 / 2, 1 / 3], rel=1e-9)


@pytest.mark.parametrize("power", [-1060, -600, 400, 1000])
def test_scores_do_not_depend_on_the_size_of_columns(power: int) -> None:
    K = np.round(np.random.default_rng(4).standard_normal((40, 5)), 2)
    scaled = K.copy()
    scaled[:, 1:4] = np.ldexp(np.round(K[:, 1:4] * 64), power)  # bits are kept in the smallest numbers as well
    K[:, 1:4] = np.round(K[:, 1:4] * 64)
    assert (online_leverage_scores(scaled) == online_leverage_scores(K)).all()
    if abs(power) < 500:
        whole = online_leverage_scores(np.ldexp(K, power), ridge=math.ldexp(0.5, 2 * power))
        assert (whole == online_leverage_scores(K, ridge=0.5)).all()


def test_keys_that_grow_over_the_whole_range_and_a_ridge_out_of_reach() -> None:
    rng = np.random.default_rng(5)
    K = np.round(rng.standard_normal((30, 3)) * 64) * 10.0 ** np.linspace(-290, 290, 30)[:, None]
    np.testing.assert_allclose(online_leverage_scores(K), 1, atol=1e-3)
    assert (online_leverage_scores(K * 1e-10, ridge=1e300)[:-15] == 0).all()
    assert (online_leverage_scores(np.full((4, 2), 1e-300), ridge=5e-324) < 1e-200).all()
    np.testing.assert_allclose(online_leverage_scores(np.full((4, 2), 1e300), ridge=1e-300), [1, 1 / 2, 1 / 3, 1 / 4])


@stores()
def test_results_are_of_the_kind_and_library_of_the_keys(storage: str) -> None:
    K = np.round(np.random.default_rng(6).standard_normal((2, 3, 20, 5)), 1)
    keys = STORAGE[storage](K)
    stored = as_float64(keys)
    found = online_leverage_scores(keys)
    assert type(found).__module__.partition(".")[0] == type(keys).__module__.partition(".")[0]
    assert str(found.dtype).rpartition(".")[2] == ("float64" if storage.endswith("float64") else "float32")
    assert tuple(found.shape) == (2, 3, 20)
    expected = online_leverage_scores(stored)
    np.testing.assert_allclose(as_float64(found), expected, rtol=0 if storage.endswith("float64") else 1e-7)


def test_masked_keys_are_as_if_they_were_not_there() -> None:
    rng = np.random.default_rng(7)
    K = rng.standard_normal((2, 40, 4))
    mask = rng.random((2, 40)) < 0.6
    K[~mask] = np.nan
    scores = online_leverage_scores(K, mask=mask)
    for item in range(2):
        assert (scores[item, mask[item]] == online_leverage_scores(K[item, mask[item]])).all()
    assert (scores[~mask] == 0).all()
    one = online_leverage_scores(np.nan_to_num(K), mask=mask[:1])
    assert (one[0] == scores[0]).all()
    assert (online_leverage_scores(K, mask=np.zeros((2, 40), bool)) == 0).all()


@pytest.mark.parametrize("ridge", [0.0, 0.7])
@pytest.mark.parametrize("d", [1, 4, 33])
def test_bits_do_not_depend_on_later_keys_threads_batch_or_layout(d: int, ridge: float) -> None:
    rng = np.random.default_rng(8)
    K = rng.standard_normal((6, 90, d)) * np.exp(rng.standard_normal((6, 90, 1)))
    with levattn.thread_limit(1):
        scores = online_leverage_scores(K, ridge=ridge)
    with levattn.thread_limit(3):
        assert (online_leverage_scores(np.concatenate([K] * 9), ridge=ridge)[:6] == scores).all()
    for t in (0, 1, 2, 3, 57):
        assert (online_leverage_scores(K[:, :t], ridge=ridge) == scores[:, :t]).all()
    assert (online_leverage_scores(np.asfortranarray(K[2]), ridge=ridge) == scores[2]).all()
    assert (online_leverage_scores(K[:, ::-1][:, ::-1], ridge=ridge) == scores).all()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), (0, 4, 3), (1, 1)])
def test_few_keys_or_none(shape: tuple[int, ...]) -> None:
    scores = online_leverage_scores(np.ones(shape))
    assert scores.shape == shape[:-1]
    assert (scores == 1).all()


@settings(max_examples=20)
@given(st.integers(0, 9), st.integers(0, 2), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_keys_that_are_not_finite_are_named(row: int, column: int, value: float) -> None:
    K = np.ones((10, 3))
    K[row, column] = value
    with pytest.raises(levattn.NonFiniteError, match=f"row {row}"):
        online_leverage_scores(K)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "part"),
    [
        ((np.ones((3, 2)),), {"ridge": -1}, ValueError, "ridge is -1"),
        ((np.ones((3, 2)),), {"ridge": math.inf}, ValueError, "ridge is inf"),
        ((np.ones((3, 2)),), {"ridge": math.nan}, ValueError, "ridge is nan"),
        ((np.ones((3, 2)),), {"ridge": "1"}, TypeError, "ridge is '1'"),
        ((np.ones((3, 2)),), {"ridge": True}, TypeError, "ridge is True"),
        ((np.ones(3),), {}, ValueError, "K has shape"),
        ((np.ones((3, 2), int),), {}, TypeError, "K has dtype int64"),
        ((np.ones((3, 2)),), {"mask": np.ones(2, bool)}, ValueError, "mask has shape"),
        ((np.ones((3, 2)),), {"mask": np.ones(3)}, TypeError, "mask has dtype"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, options: Any, error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part):
        online_leverage_scores(*arguments, **options)
