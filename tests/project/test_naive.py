"""The oracles agree with one another before they judge anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import naive
import strategies


@pytest.mark.parametrize("name", list(strategies.CASES))
def test_exact_scores_add_up_to_the_exact_rank(name: str) -> None:
    K = strategies.case(name)
    scores = naive.leverage_exact(K)
    assert np.all(scores >= 0)
    assert np.all(scores <= 1)
    assert np.sum(scores) == pytest.approx(naive.rank_exact(K), rel=1e-13, abs=0)


def test_exact_resolves_what_float64_cannot() -> None:
    K = strategies.tiny_direction(np.random.default_rng(0), 40, 4, 2.0**-60)
    lone = 40 // 3
    assert naive.leverage_exact(K)[lone] == 1.0
    assert naive.rank_exact(K) == 4


@pytest.mark.parametrize("name", ["gaussian", "coherent", "deficient-exact", "wide", "planted"])
def test_adversarial_queries_attain_the_scores(name: str) -> None:
    K = strategies.case(name)
    A = naive.attention(naive.adversarial_queries(K), K)
    np.testing.assert_allclose(np.diag(A), naive.leverage_exact(K), rtol=1e-9, atol=1e-12)


def test_mass_and_universal_set() -> None:
    rng = np.random.default_rng(3)
    K = strategies.case("coherent")
    Q = np.vstack([rng.standard_normal((50, K.shape[1])), naive.adversarial_queries(K)])
    selected = naive.universal_set(K, 0.05)
    A = naive.attention(Q, K)
    assert (A >= 0.05).any()
    assert not (A >= 0.05)[:, ~selected].any()
    np.testing.assert_allclose(naive.captured_mass(Q, K, selected), A[:, selected].sum(1))
    assert np.count_nonzero(selected) <= naive.rank_exact(K) / 0.05


def test_universal_set_by_size_breaks_ties_by_index() -> None:
    K = strategies.identity_blocks(3, 4)
    assert np.flatnonzero(naive.universal_set(K, size=5)).tolist() == [0, 1, 2, 3, 4]
    mask = np.ones(12, bool)
    mask[[0, 3]] = False
    assert np.flatnonzero(naive.universal_set(K, size=3, mask=mask)).tolist() == [1, 2, 4]


@pytest.mark.parametrize("compensate", [None, "mean"])
def test_output_error_bounds_hold(compensate: Any) -> None:
    rng = np.random.default_rng(4)
    K = strategies.case("coherent")
    V = rng.standard_normal((K.shape[0], 5)) + 1
    scores = naive.leverage_exact(K)
    A = naive.attention(np.vstack([rng.standard_normal((60, 8)), naive.adversarial_queries(K)]), K)
    for epsilon in (0.3, 0.05, 1e-9):
        selected = scores >= epsilon
        left_out = np.max(scores, where=~selected, initial=0.0)
        bound = naive.output_error_bound(A, V, selected, left_out, compensate)
        error = np.linalg.norm(A @ V - naive.output(A, V, selected, compensate), axis=1)
        assert np.all(error <= bound * (1 + 1e-9) + 1e-13)


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_largest_scores_are_reached_and_nearly_the_largest(columns: int) -> None:
    rng = np.random.default_rng(columns)
    K = rng.standard_normal((12, 3))[:, :columns] * np.clip(np.abs(rng.standard_cauchy((12, 1))), 0.1, 10)
    K[3], K[5] = K[4], 0
    exact = naive.leverage_exact(K)
    found = naive.largest_scores(K, np.square)
    assert np.all(found <= exact * (1 + 1e-12))
    assert np.all(found >= exact * 0.999)


def test_largest_scores_of_functions_with_a_limit() -> None:
    """A huge query gives all keys the same, and one that is orthogonal to all but a few gives it to these."""
    K = np.vstack([np.eye(3), np.eye(3)[:1] / 8])
    np.testing.assert_allclose(naive.largest_scores(K, lambda x: np.minimum(np.abs(x), 1)), [8 / 9, 1, 1, 1 / 2])
