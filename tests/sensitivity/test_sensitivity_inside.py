"""Scores and sensitivities, their parts.

Inside: sizes of blocks are made small, and steps of a search and the random numbers of a sample are judged that a
result does not show.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_exact import assert_bracket, gauss, spiky
from test_expected import FUNCTIONS, rng_of
from test_groups import pairs_at
from test_sensitivity import attention

import levattn
import naive
from levattn import definitions, group_leverage, near_duplicates
from levattn._core.arrays import as_matrices
from levattn._core.random import uniforms
from levattn.sensitivity import certificates, groups, shares
from levattn.sensitivity.exact import _by_vertices, _distinct, _least_powers, _reduce, exact_sensitivities
from levattn.sensitivity.expected import as_queries, quadratic_weights
from levattn.states import Moments
from strategies import STORAGE, as_float64
from streams import named_rng, prefixes

SPECTRA: dict[str, Callable[[int], naive.Float]] = {
    "random": lambda d: rng_of(3, d).exponential(size=d),
    "geometric": lambda d: np.geomspace(1, 1e-20, d),
    "equal": np.ones,
    "spike": lambda d: np.r_[1.0, np.full(d - 1, 1e-12)],
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("d", [1, 2, 3, 16, 128, 512])
@pytest.mark.crossed
def test_weights_are_those_of_adaptive_quadrature(name: str, d: int) -> None:
    eigenvalues = SPECTRA[name](d)
    eigenvalues /= eigenvalues.sum()
    w = quadratic_weights(eigenvalues)
    for i in sorted({0, 1 % d, d // 2, d - 1}):
        assert w[i] == pytest.approx(naive.weight_by_quadrature(eigenvalues, i), rel=1e-10)
    assert math.fsum(w * eigenvalues) == pytest.approx(1, rel=1e-13)


@pytest.mark.parametrize("name", ["|x|³", "huber", "softmax"])
@pytest.mark.parametrize(("entries", "queries"), [(1, 1), (7, 3), (64, 256), (200, 16)])
def test_plain_means_do_not_depend_on_blocks(
    name: str, entries: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    K, Q = rng_of(13).standard_normal((53, 4)), rng_of(14).standard_normal((37, 4))
    mask = rng_of(15).random(53) < 0.8
    expected = naive.shares(Q, K, FUNCTIONS[name][1], mask).mean(axis=0)
    monkeypatch.setattr(shares, "BLOCK_ENTRIES", entries)
    monkeypatch.setattr(shares, "_QUERIES", queries)
    scores = levattn.expected_scores(K, Q, f=FUNCTIONS[name][0], mask=mask)
    np.testing.assert_allclose(scores, expected, rtol=1e-12, atol=1e-16)


def test_moments_far_from_zero_keep_the_covariance() -> None:
    """The moment of queries and ones has the covariance of the queries, however far their mean is from zero."""
    rng = np.random.default_rng(5)
    Q = np.rint(8 * rng.standard_normal((400, 3)) @ rng.standard_normal((3, 3)))
    exact = np.cov(Q.T, bias=True)
    K = as_matrices(rng.standard_normal((5, 3)), "K")
    for offset in (0.0, 1e4, 1e8, 1e13):
        ones = np.hstack([Q + offset, np.ones((400, 1))])
        found = as_queries(Moments(4).update(ones[:100]).update(ones[100:]), K)
        np.testing.assert_allclose(found.covariance[0], exact, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(found.mean[0], Q.mean(axis=0) + offset, rtol=1e-12)


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6, 1e7, 1e9])
def test_decaying_moments_have_the_covariance_or_are_refused(offset: float) -> None:
    rng = np.random.default_rng(6)
    X = rng.integers(-9, 10, (400, 3)).astype(np.float64)
    weights = 0.99 ** np.arange(399, -1, -1.0)
    weights /= weights.sum()
    apart = X - weights @ X
    K = as_matrices(rng.standard_normal((5, 3)), "K")
    moments = Moments(4, decay=0.99).update(np.hstack([X + offset, np.ones((400, 1))]))
    if offset > 3e6:
        with pytest.raises(ValueError, match=r"queries are Moments that decay.*expected Moments without decay"):
            as_queries(moments, K)
        return
    exact = (apart * weights[:, None]).T @ apart
    found = as_queries(moments, K).covariance
    assert found is not None
    np.testing.assert_allclose(found[0], exact, atol=1e-3 * np.trace(exact))


@pytest.mark.parametrize("make", [gauss, spiky])
@pytest.mark.parametrize(("n", "d"), [(14, 3), (12, 4), (9, 1), (11, 2), (30, 5)])
def test_two_methods_agree_where_both_apply(make: Any, n: int, d: int) -> None:
    K = make(n, d)
    rows, inverse, counts = _distinct(K)
    B = _reduce(rows, counts)[0]
    pairs = [(2, _least_powers(B, counts, 2.0, np.arange(len(B))), 1e-12)]
    pairs += [(1, _by_vertices(B, counts, 1.0), 1e-11)] if d < 5 else []
    for p, (low, high, _), rtol in pairs:
        found = exact_sensitivities(K, p)
        assert_bracket(found)
        np.testing.assert_allclose(found.lower, low[inverse], rtol=rtol)
        np.testing.assert_allclose(found.upper, high[inverse], rtol=rtol)
    U = np.linalg.svd(K, full_matrices=False)[0]
    scores = exact_sensitivities(K, 2)
    np.testing.assert_allclose(scores.lower, (U**2).sum(axis=1), rtol=1e-11)
    np.testing.assert_array_equal(scores.lower, scores.upper)


@pytest.mark.parametrize("storage", ["float64", "float32"])
@pytest.mark.parametrize("chunk", [5, 1 << 11])
@pytest.mark.parametrize("size", [2, 15, 16, 17, 2500])
def test_scores_of_many_and_of_large_groups(size: int, chunk: int, storage: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(groups, "_CHUNK", chunk)
    K = STORAGE[storage](np.random.default_rng(size).standard_normal((5000, 16)))
    labels = np.random.default_rng(0).permutation(5000) // size
    U = naive.whitened(as_float64(K))
    expected = [np.linalg.norm(U[labels == label], 2) ** 2 for label in range(labels.max() + 1)]
    np.testing.assert_allclose(group_leverage(K, labels), expected, rtol=1e-10)


@pytest.mark.parametrize(("angle", "miss"), [(0.1, 0.5), (0.1, 0.1), (0.3, 0.2), (0.6, 0.05)])
def test_pairs_at_half_the_angle_are_missed_as_often_as_stated(angle: float, miss: float, monkeypatch: Any) -> None:
    """With the probability of a miss set high enough to be seen; the rounds bring it to at most that."""
    monkeypatch.setattr(groups, "_MISS", miss)
    monkeypatch.setattr(groups, "_signature_plan", unfloored(groups._signature_plan))
    count, d = 4000, 32
    bits, rounds = groups._signature_plan(2 * count + d, angle)
    stated = (1 - (1 - angle / (2 * math.pi)) ** bits) ** rounds
    assert stated <= miss < stated ** ((rounds - 1) / rounds)
    missed = 0
    for seed in range(3):
        K = pairs_at(angle / 2, count, d, seed)
        X = naive.whitened(K)[: 2 * count].reshape(count, 2, d)
        cosines = np.sum(X[:, 0] * X[:, 1], axis=1) / np.prod(np.linalg.norm(X, axis=2), axis=1)
        np.testing.assert_allclose(np.arccos(cosines), angle / 2, rtol=1e-6)
        found = near_duplicates(K, angle=angle, rng=seed)[: 2 * count].reshape(count, 2)
        missed += np.count_nonzero((found[:, 0] < 0) | (found[:, 0] != found[:, 1]))
    spread = math.sqrt(3 * count * stated * (1 - stated))
    # signatures that agree because all sides differ, and shared planes, are within the spread; four sigma
    assert abs(missed - 3 * count * stated) <= 4 * spread + 0.02 * 3 * count * stated


def unfloored(plan: Any) -> Any:
    """The plan without its least number of rounds, which would hide the probability that is asked for."""

    def replaced(n: int, angle: float) -> tuple[int, int]:
        bits, _ = plan(n, angle)
        missed = 1 - (1 - angle / (2 * math.pi)) ** bits
        return bits, math.ceil(math.log(groups._MISS) / math.log(missed))

    return replaced


@pytest.mark.parametrize("angle", [1e-3, 0.1, 0.5])
@pytest.mark.parametrize("n", [2, 100, 10**5, 10**9])
def test_the_plan_keeps_what_is_stated(n: int, angle: float) -> None:
    bits, rounds = groups._signature_plan(n, angle)
    assert (1 - (1 - angle / (2 * math.pi)) ** bits) ** rounds <= 1e-4
    assert min(32, math.log2(n) + 4) <= bits <= 32
    assert bits + n.bit_length() <= 64


def test_unrelated_keys_before_a_pair_do_not_hide_it() -> None:
    """With one signature for all, four keys far from each other come before it, or five."""
    K = np.vstack([np.eye(8)[:3], np.zeros((1, 8)), np.eye(8)[[7, 7]], np.eye(8)[3:7]])
    directions = groups._directions(factor_of(K))
    codes = np.zeros(len(directions.rows), np.uint32)
    alone = np.arange(len(codes))
    a, b = groups._links(directions, codes, alone, 0.1)
    assert {*a.tolist(), *b.tolist()} == {3, 4}
    late = groups._directions(factor_of(np.vstack([np.eye(8)[:4], np.eye(8)[[7, 7]], np.eye(8)[4:7]])))
    a, b = groups._links(late, np.zeros(9, np.uint32), np.arange(9), 0.1)
    assert len(a) == 0
    twins = groups._directions(factor_of(np.repeat(np.eye(8)[[0, 1, 2, 7]], 2, axis=0)))
    a, b = groups._links(twins, np.zeros(8, np.uint32), np.arange(8), 0.1)
    assert sorted(zip(a.tolist(), b.tolist(), strict=True)) == [(1, 0), (3, 2), (5, 4), (7, 6)]


def factor_of(K: Any) -> Any:
    from levattn._core.arrays import as_matrices
    from levattn.sensitivity.leverage import factorize

    return factorize(as_matrices(K, "K"), method="auto", single="no").item(0)


def test_blocks_are_few_where_none_decides() -> None:
    """For ε ≤ 1/n no bound made of blocks falls below ε, so that more of them would say nothing."""
    assert certificates._block_count(100_000, 1e-9) == 256
    assert certificates._block_count(100, 1e-9) == 100
    assert certificates._block_count(100, 5e-324) == 100
    assert certificates._block_count(100, 0.015) == 100
    assert certificates._block_count(100_000, 0.1) == 20
    assert certificates._block_count(3, 0.1) == 3
    assert certificates._block_count(0, 0.1) == 1


@pytest.mark.parametrize("radius", [1.5, 4.0])
def test_groups_of_many_keys_give_bounds_between_the_exact_ones_and_those_of_one_group(
    radius: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    K = rng.standard_normal((6000, 2)) * np.where(rng.random((6000, 1)) < 0.01, 3, 1)
    K[3000:4000] = K[0]
    f, epsilon = levattn.Softmax(radius), 0.002
    exactly = levattn.sensitivities(K, f, method="ball", epsilon=epsilon).upper
    monkeypatch.setattr("levattn.sensitivity.softmax._PAIRS", 0)
    grouped = levattn.sensitivities(K, f, method="ball", epsilon=epsilon).upper
    jensen = levattn.sensitivities(K, f, method="jensen").upper
    angles = np.linspace(0, 2 * np.pi, 500)
    sphere = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    reached = np.max([attention(f, r * sphere, K).max(axis=0) for r in np.linspace(0, radius, 12)], axis=0)
    counts = [int((bound >= epsilon).sum()) for bound in (reached, exactly, grouped, jensen)]
    assert np.all(reached <= grouped * (1 + 1e-9))
    assert np.all(reached <= exactly * (1 + 1e-9))
    assert np.all(exactly <= grouped)
    assert counts[2] < 1.1 * counts[0]
    assert counts[3] > 5 * counts[2]


SAMPLED = prefixes(5000, 5, 2300)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sample_in_one_pass_is_the_one_defined(name: str) -> None:
    K, u = SAMPLED[name](named_rng(name)), uniforms(5, 103, 70, 5000)
    rank = round(levattn.universal_set(K, 0.5).factor.rank[0])
    exponent = 1.5 * math.log(1.5) - 0.5
    promise = math.log(200 * max(rank, 1)) / exponent
    for options, c in (({"size": 60}, 60 / max(rank, 1)), ({"distortion": 0.5}, promise)):
        sample = levattn.StreamingRowSample(**options, rng=5, row_start=70).update(K[:2500]).update(K[2500:]).result()
        rows, weights = definitions.poisson_sample(levattn.leverage_scores(K), c, u)
        assert (sample.indices - 70).tolist() == rows.tolist()
        np.testing.assert_allclose(sample.weights, weights, rtol=1e-6)
    scores = levattn.leverage_scores(K, ridge=2.0)
    damped = levattn.StreamingRowSample(30, ridge=2.0, rng=5, row_start=70).update(K).result()
    rows, weights = definitions.poisson_sample(scores, 30 / max(scores.sum(), 1e-12), u)
    assert (damped.indices - 70).tolist() == rows.tolist()
    np.testing.assert_allclose(damped.weights, weights, rtol=1e-6)
