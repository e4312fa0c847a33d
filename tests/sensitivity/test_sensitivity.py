"""Certified bounds against brute force over queries, closed forms and theorems; sets and entries of every function."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import levattn
import naive
import strategies
from adversary import oracle, promises
from adversary.families import case
from adversary.oracle import Truth
from levattn.functions import Power, Softmax
from strategies import STORAGE, as_bool, as_float64

POWERS = (0.5, 1, 1.5, 2, 3, 4, 6)
OTHERS = (levattn.Huber(1.0), levattn.Tukey(2.0), levattn.L1L2(), levattn.Fair(0.5))
FUNCTIONS: tuple[Any, ...] = (*POWERS, *OTHERS, levattn.Softmax(3.0))
METHODS = [
    *((p, method) for p in POWERS if p != 2 for method in ("leverage", "lewis", "block")),
    (4, "lift"),
    (6, "lift"),
    (2, "leverage"),
    *((f, "block") for f in OTHERS),
    *((levattn.Softmax(3.0), method) for method in ("jensen", "ball")),
]


def function_of(f: Any) -> Any:
    """A number p stands for x^p."""
    return Power(f) if isinstance(f, int | float) else f


def attention(f: Any, Q: naive.Float, K: naive.Float) -> naive.Float:
    """The scores by their definition."""
    function = function_of(f)
    Z = Q @ K.T
    if isinstance(function, Softmax):
        Z = Z - Z.max(axis=1, keepdims=True)
    F = function(Z)
    total = F.sum(axis=1, keepdims=True)
    return np.asarray(np.divide(F, total, out=np.zeros_like(F), where=total > 0))


def queries(f: Any, K: naive.Float, seed: int, count: int = 2000) -> naive.Float:
    """Queries of all sizes, worst ones of x² and, for softmax, within the radius."""
    rng = np.random.default_rng(seed)
    d = K.shape[1]
    size = np.exp(rng.uniform(-5, 5, (count, 1)))
    worst = naive.adversarial_queries(K)
    Q = np.vstack([rng.standard_normal((count, d)) * size, worst, 100 * worst, 0.01 * worst])
    function = function_of(f)
    if isinstance(function, Softmax):
        Q = Q * np.minimum(1, function.radius / np.maximum(np.linalg.norm(Q, axis=1, keepdims=True), 1e-300))
    return np.asarray(Q)


@pytest.mark.parametrize(("f", "method"), METHODS, ids=str)
@strategies.examples(12)
@given(
    K=strategies.spoilt(40, 4),
    seed=st.integers(0, 99),
    iterations=st.integers(0, 6),
    epsilon=st.sampled_from([0.02, 0.1, 0.5, 1.0]),
)
def test_no_query_exceeds_a_bound(
    f: Any, method: Any, K: naive.Float, seed: int, iterations: int, epsilon: float
) -> None:
    found = levattn.sensitivities(K, f, method=method, iterations=iterations, epsilon=epsilon, rng=seed)
    reached = attention(f, queries(f, K, seed, 400), K).max(axis=0)
    assert np.all(reached <= found.upper * (1 + 1e-9))
    assert found.certificate == (method,)
    assert np.all(found.upper <= 1)
    if not isinstance(f, Softmax):
        assert np.all(found.upper[~K.any(axis=1)] == 0)


@pytest.mark.parametrize("f", OTHERS, ids=repr)
@pytest.mark.parametrize("epsilon", [0.05, 0.4])
def test_no_query_that_a_search_finds_exceeds_a_bound(f: Any, epsilon: float) -> None:
    """These functions have no exact sensitivities to compare with."""
    for seed in range(strategies.trials(24)):
        rng = np.random.default_rng([seed, 11])
        n, d = int(rng.integers(4, 20)), int(rng.integers(1, 4))
        K = rng.standard_normal((n, d)) * np.clip(np.abs(rng.standard_cauchy((n, 1))), 1e-2, 1e2)
        K = K[rng.integers(0, n, n)] if seed % 3 == 1 else K * np.geomspace(1, 10.0 ** (-seed % 5), d)
        reached = naive.largest_scores(K, f, seed=seed)
        assert np.all(reached <= levattn.sensitivities(K, f, epsilon=epsilon).upper * (1 + 1e-9)), seed
        assert not np.any((reached >= epsilon) & ~levattn.universal_set(K, epsilon, f=f).mask), seed


@pytest.mark.parametrize("f", FUNCTIONS, ids=str)
def test_auto_is_the_least_of_the_others(f: Any) -> None:
    K = strategies.case("coherent")[:, :6]
    auto = levattn.sensitivities(K, f)
    each = [levattn.sensitivities(K, f, method=name).upper for name in auto.certificate]
    np.testing.assert_allclose(auto.upper, np.min(each, axis=0), rtol=1e-12)
    assert auto.total == pytest.approx(auto.upper.sum())


@pytest.mark.parametrize("p", [1.0, 3.0])
def test_keys_of_zeros_change_no_bound_by_leverage(p: float) -> None:
    K = np.random.default_rng(2).standard_normal((30, 3))
    mask = np.arange(33) != 31
    more = levattn.sensitivities(np.concatenate([K, np.zeros((3, 3))]), p, method="leverage", mask=mask).upper
    np.testing.assert_allclose(more[:30], levattn.sensitivities(K, p, method="leverage").upper, rtol=1e-12)
    assert not more[30:].any()


@pytest.mark.parametrize("p", [0.5, 1.0, 1.5, 3.0, 4.0, 6.0])
def test_converged_lewis_weights_sum_to_the_rank(p: float) -> None:
    K = np.random.default_rng(0).standard_normal((300, 5)) * np.clip(
        np.random.default_rng(1).standard_cauchy((300, 1)), -50, 50
    )
    np.testing.assert_allclose(levattn.lewis_weights(K, 2), naive.leverage_exact(K), rtol=1e-9)
    w = levattn.lewis_weights(K, p, iterations=60)
    assert w.sum() == pytest.approx(5, rel=1e-6)
    M = K.T @ (w[:, None] ** (1 - 2 / p) * K)
    np.testing.assert_allclose(np.einsum("ij,jk,ik->i", K, np.linalg.inv(M), K) ** (p / 2), w, rtol=1e-5)
    turned = K @ np.random.default_rng(2).standard_normal((5, 5))
    np.testing.assert_allclose(levattn.lewis_weights(turned, p, iterations=60), w, rtol=1e-5)
    total = levattn.sensitivities(K, p, method="lewis", iterations=60).total
    assert total <= 5 ** max(1, p / 2) * (1 + 1e-6)


@pytest.mark.parametrize("largest", [1.0, 1e20, 1e200])
@pytest.mark.parametrize("p", [0.5, 1, 1.9])
def test_lewis_weights_of_one_column_are_shares_of_powers(p: float, largest: float) -> None:
    K = np.array([[1.0], [-3.0], [largest], [0.0]])
    shares = np.exp(p * (np.log(np.abs(K[:3, 0])) - np.log(np.abs(K).max())))
    w = levattn.lewis_weights(K, p, iterations=60)
    np.testing.assert_allclose(w[:3], shares / shares.sum(), rtol=1e-6, atol=1e-80)
    assert w[3] == 0


def test_lewis_weights_of_a_small_power_whose_scale_exceeds_all_numbers() -> None:
    w = levattn.lewis_weights(np.ones((400, 1)), 0.002, iterations=300)
    np.testing.assert_allclose(w, 400.0 ** (0.999**301 - 1), rtol=1e-9)  # scores after them are a step more


@pytest.mark.parametrize("p", [2, 2.5, 4, 6, 30, 1000, 1e308])
def test_lewis_weights_are_shares_of_the_rank_after_any_iteration(p: float) -> None:
    K = np.random.default_rng(0).standard_cauchy((300, 5))
    before = -np.inf
    for iterations in (0, 1, 2, 5, 20):
        w = levattn.lewis_weights(K, p, iterations=iterations)
        assert w.min() >= 0
        assert w.max() <= 1 + 1e-9
        assert w.sum() == pytest.approx(5, rel=1e-9)
        if p > 2:  # no step lessens what the weights maximize
            _, log_det = np.linalg.slogdet(K.T @ (w[:, None] ** (1 - 2 / p) * K))
            now = log_det / (1 - 2 / p) - w.sum()
            assert now >= before - 1e-9
            before = now


@pytest.mark.parametrize("p", [4, 6])
def test_the_lift_is_leverage_of_powers_of_the_kernel(p: int) -> None:
    K = np.random.default_rng(0).standard_normal((40, 3))
    expected = np.diag((K @ K.T) ** (p // 2) @ np.linalg.pinv((K @ K.T) ** (p // 2), rcond=1e-12))
    found = levattn.sensitivities(K, p, method="lift")
    np.testing.assert_allclose(found.upper, expected, rtol=1e-6)
    assert found.total == pytest.approx(math.comb(3 + p // 2 - 1, p // 2), rel=1e-6)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("m", [1, 2, 5, 40])
def test_bounds_are_tight_on_equal_blocks(p: float, m: int) -> None:
    K = strategies.identity_blocks(3, m)
    found = levattn.sensitivities(K, p)
    if p <= 2:
        np.testing.assert_allclose(found.upper, 1 / m, rtol=1e-5)
    assert np.all(found.upper >= 1 / m)


def test_block_sets_are_small_where_keys_are_many() -> None:
    K = np.random.default_rng(0).standard_normal((20_000, 4))
    for f in OTHERS:
        assert len(levattn.universal_set(K, 0.1, f=f)) == 0
    K[:7] *= 1e4
    found = levattn.universal_set(K, 0.1, f=levattn.Huber(1.0))
    assert len(found) <= 8 * 4 / 0.1
    assert np.all(found.mask[:7])


@pytest.mark.parametrize("epsilon", [1e-9, 5e-324])
@pytest.mark.parametrize("f", FUNCTIONS, ids=str)
def test_a_tiny_epsilon_costs_no_more_than_the_keys(f: Any, epsilon: float) -> None:
    """2/ε blocks would be 2·10⁹, or not even a number: at n each key is a block of its own."""
    K = np.random.default_rng(0).standard_normal((40, 3))
    K[7], K[20:30] = 0.0, K[20]
    present = np.arange(40) != 3
    found = levattn.universal_set(K, epsilon, f=f, mask=present)
    expected = present if isinstance(f, levattn.Softmax) else present & (np.arange(40) != 7)
    assert np.all(found.mask[expected])
    assert not found.mask[3]
    assert found.size_bound > 1e9
    bounds = levattn.sensitivities(K, f, epsilon=epsilon, mask=present).upper
    scores = attention(f, queries(f, K[present], 0, 500), K[present])
    assert np.all(scores.max(axis=0) <= bounds[present] * (1 + 1e-9))
    by_size = levattn.universal_set(K, size=5, f=f, mask=present)
    assert len(by_size) == 5
    empty = levattn.universal_set(K[:0], epsilon, f=f)
    assert len(empty) == 0


@pytest.mark.parametrize("f", FUNCTIONS, ids=str)
@pytest.mark.parametrize("storage", ["float64", "float32", "bfloat16", "torch-float32", "strict-float64"])
def test_sets_and_entries_miss_nothing(f: Any, storage: str) -> None:
    if f == 2:
        pytest.skip("tests/sets/test_misses.py")
    K = STORAGE[storage](strategies.coherent(np.random.default_rng(3), 300, 4) / 4)
    exact = as_float64(K)
    Q = queries(f, exact, 5, 100)
    A = attention(f, Q, exact)
    V = np.random.default_rng(6).standard_normal((300, 3))
    for epsilon in (0.3, 0.05):
        found = levattn.universal_set(K, epsilon, f=f)
        assert found.guarantee == "superset"
        assert not np.any((epsilon <= A)[:, ~as_bool(found.mask)])
        heavy = levattn.heavy_attention(Q, K, epsilon, f=f)
        entries = heavy.entries.toarray()
        np.testing.assert_allclose(entries[epsilon <= A], A[epsilon <= A], rtol=1e-8)
        assert np.all(A[entries > 0] >= epsilon * (1 - 1e-8))
        for compensate in (None, "mean"):
            output, bound = heavy.apply(V, compensate=compensate)
            assert np.all(np.linalg.norm(output - A @ V, axis=1) <= bound)


@pytest.mark.parametrize("f", [1, 4, levattn.Fair(), levattn.Softmax(2.0)], ids=str)
def test_sets_by_size_and_of_batches(f: Any) -> None:
    K = np.random.default_rng(0).standard_normal((2, 3, 200, 4)) * np.exp(
        np.random.default_rng(1).standard_normal((200, 1))
    )
    found = levattn.universal_set(K, size=20, f=f)
    assert found.batch == (2, 3)
    assert np.all(found.sizes == 20)
    assert np.all(np.where(found.mask, 0, found.scores).max(axis=-1) == found.epsilon)
    for index in np.ndindex(2, 3):
        np.testing.assert_array_equal(levattn.universal_set(K[index], size=20, f=f).mask, found.mask[index])


@pytest.mark.parametrize("f", FUNCTIONS, ids=str)
def test_masked_keys_take_no_part(f: Any) -> None:
    rng = np.random.default_rng(0)
    K = rng.standard_normal((200, 3)) * np.exp(rng.standard_normal((200, 1)))
    mask = rng.random(200) < 0.6
    upper = levattn.sensitivities(np.where(mask[:, None], K, np.nan), f, mask=mask, rng=1).upper
    assert np.all(upper[~mask] == 0)
    assert np.all(attention(f, queries(f, K[mask], 0, 300), K[mask]).max(axis=0) <= upper[mask] * (1 + 1e-9))
    if f in POWERS:
        np.testing.assert_allclose(upper[mask], levattn.sensitivities(K[mask], f).upper, rtol=1e-9)


@pytest.mark.parametrize("scale", [1e-100, 1e100])
@pytest.mark.parametrize("p", POWERS)
def test_the_scale_of_keys_changes_no_power(p: float, scale: float) -> None:
    K = strategies.case("coherent")[:, :5]
    plain = levattn.sensitivities(K, p)
    np.testing.assert_allclose(levattn.sensitivities(K * scale, p).upper, plain.upper, rtol=1e-9, atol=1e-12)
    Q = queries(p, K, 0, 50)
    entries = levattn.heavy_attention(Q, K, 0.1, f=p).entries
    scaled = levattn.heavy_attention(Q / scale, K * scale, 0.1, f=p).entries
    np.testing.assert_allclose(scaled.toarray(), entries.toarray(), rtol=1e-9)


@pytest.mark.parametrize("p", [1e-3, 30, 300, 1000])
def test_extreme_exponents(p: float) -> None:
    K = np.random.default_rng(0).standard_normal((200, 3))
    found = levattn.sensitivities(K, p)
    assert np.all((found.upper >= 0) & (found.upper <= 1))
    assert found.upper.max() > 1 / 200
    reached = attention(p, naive.adversarial_queries(K), K) if p < 100 else np.zeros((1, 200))
    assert np.all(reached.max(axis=0) <= found.upper * (1 + 1e-9))


@pytest.mark.parametrize("p", [4, 6])
def test_the_lift_of_ill_conditioned_keys(p: int) -> None:
    """The lift has a power of their condition number; rounding it must not lower a bound."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        n = int(rng.integers(4, 20))
        K = rng.standard_normal((n, 2)) * np.clip(np.abs(rng.standard_cauchy((n, 1))), 1e-2, 1e2)
        K = K * np.array([1, 1e-4]) @ np.linalg.qr(rng.standard_normal((2, 2)))[0]
        exact = levattn.exact_sensitivities(K, p).lower
        assert np.all(levattn.sensitivities(K, p, method="lift").upper >= exact * (1 - 1e-9))


def test_steps_bring_softmax_near_its_exact_sensitivity() -> None:
    rng = np.random.default_rng(0)
    K = rng.standard_normal((150, 4))
    A = rng.standard_normal((4, 4))
    for f in (levattn.Softmax(4.0), levattn.Softmax(2.0, A @ A.T)):
        exact = levattn.exact_sensitivities(K, f)
        jensen = levattn.sensitivities(K, f, method="jensen").upper
        found = levattn.sensitivities(K, f, method="ball", epsilon=0.1).upper
        assert np.all(found >= exact.lower * (1 - 1e-9))
        assert np.all(found <= jensen)
        assert np.count_nonzero(found >= 0.1) <= 1.1 * np.count_nonzero(exact.upper >= 0.1)
        assert np.count_nonzero(jensen >= 0.1) > 1.3 * np.count_nonzero(exact.upper >= 0.1)


def test_softmax_fails_without_a_radius() -> None:
    """Random signs: softmax is the identity, every key is heavy for its own query, and leverage sees none of it."""
    K = np.random.default_rng(0).choice([-1.0, 1.0], (512, 49))
    A = attention(levattn.Softmax(100.0), K, K)
    assert np.diag(A).min() > 0.99
    assert levattn.leverage_scores(K).max() < 0.2
    assert len(levattn.universal_set(K, 0.5)) == 0
    assert len(levattn.universal_set(K, 0.5, f=levattn.Softmax(49**0.5))) == 512


# -- where float64 and float32 are at their edges ---------------------------------------


class Bounded:
    """A function of the user's that is constant from 1 on."""

    growth, monotone = 2.0, True

    def __call__(self, x: Any) -> Any:
        return np.minimum(np.abs(x), 1.0)

    def __repr__(self) -> str:
        return "Bounded()"


@pytest.mark.parametrize("f", [levattn.Tukey(), levattn.Huber(), Bounded(), 0.01, 0.001], ids=repr)
@pytest.mark.parametrize(
    ("small", "dtype"), [(1e-30, "f4"), (1e-45, "f4"), (1e-170, "f8"), (5e-324, "f8"), (6e-8, "f2")]
)
def test_keys_whose_scores_vanish_are_no_keys_of_zeros(f: Any, small: float, dtype: str) -> None:
    K = np.array([[1.0], [small], [0.0]], dtype)
    ratio = float(K[1, 0])
    # bounded functions: a large query makes both products large; powers see the ratio alone
    sigma = ratio**f / (1 + ratio**f) if isinstance(f, float) else 0.5 if f != levattn.Huber() else 0.0
    found = levattn.sensitivities(K, f).upper
    assert sigma * (1 - 1e-9) <= found[1] <= 1
    assert found[2] == 0
    if sigma > 0.4:
        assert 1 in levattn.universal_set(K, 0.4, f=f).indices
        assert 1 in levattn.universal_set(np.stack([K, K]), 0.4, f=f).mask[1].nonzero()[0]
    if isinstance(f, levattn.Tukey):
        assert 1 in levattn.StreamingUniversalSet(0.4, f=f).update(K).result().indices


def test_weights_far_apart_stay_in_range() -> None:
    K = np.array([[-1.6e-6], [1.8e-30], [-3.3], [1.2e-24]], "f4")
    size = np.abs(K[:, 0].astype(np.float64))
    for p in (0.1, 0.3, 0.5, 1):
        for iterations in (1, 5, 12):
            found = levattn.sensitivities(K, p, method="lewis", iterations=iterations).upper
            assert np.all(found >= size**p / (size**p).sum() * (1 - 1e-9))


@pytest.mark.parametrize("p", [0.5, 1, 3, 4])
def test_dependent_columns_change_no_bound(p: float) -> None:
    K = np.random.default_rng(0).integers(-9, 10, (300, 3)) * 1.0
    wide = np.stack([K[:, 0], K[:, 1] + K[:, 0], 0 * K[:, 0], K[:, 2], K[:, 0], 2 * K[:, 2] - K[:, 1]], axis=1)
    np.testing.assert_allclose(
        levattn.sensitivities(wide, p).upper, levattn.sensitivities(K, p).upper, rtol=1e-9 if p != 3 else 1e-6
    )


def scaled_columns(size: float, dtype: str) -> tuple[Any, Any, Any]:
    """Columns far from 1 are scaled for their factor; the mean of the scaled ones says nothing of the keys."""
    K = np.full((100, 2), size, dtype)
    K[3] = 0
    return K, levattn.Softmax(3 / size), np.array([[-3.0, 0], [3, 0], [-2.1, -2.1], [2.1, 2.1]]) / size


def canceling_mean(radius: float) -> tuple[Any, Any, Any]:
    K = np.concatenate([np.full((3000, 1), 1e9), np.full((3000, 1), -1e9), [[0.1], [-0.1]]]) + 1 / 3
    return K, levattn.Softmax(radius * 1e-9), np.linspace(-radius, radius, 41)[:, None] * 1e-9


def graded_ellipsoid(seed: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    D, A = np.array([1e-5, 1.0, 1e5]), rng.standard_normal((3, 3))
    f = levattn.Softmax(4.0, D[:, None] * (A @ A.T) * D)
    K = rng.standard_normal((30, 3)) / D
    u = rng.standard_normal((4000, 3))
    return K, f, 4 * (u / np.linalg.norm(u, axis=1, keepdims=True) @ A.T) * D


@pytest.mark.parametrize(
    ("K", "f", "Q"),
    [
        *(scaled_columns(*x) for x in ((1e20, "f4"), (1e-20, "f4"), (1e20, "f8"), (1e-20, "f8"), (1e150, "f8"))),
        *(canceling_mean(radius) for radius in (1.0, 30.0)),
        *(graded_ellipsoid(seed) for seed in range(3)),
    ],
)
def test_softmax_of_keys_at_the_edges_of_precision(K: Any, f: Any, Q: Any) -> None:
    A = attention(f, Q, K.astype(np.float64))
    for method in ("jensen", "ball"):
        assert np.all(A.max(axis=0) <= levattn.sensitivities(K, f, method=method).upper * (1 + 1e-9))
    assert np.all(levattn.heavy_attention(Q, K.astype(np.float64), 0.3, f=f).entries.toarray()[A >= 0.3] > 0)


def test_queries_beyond_the_ellipsoid_are_refused() -> None:
    K = np.eye(2)
    f = levattn.Softmax(1.0, np.diag([1e-10, 1e10]))
    levattn.heavy_attention(np.array([[1e-5, 0.0], [0.0, 1e5]]), K, 0.5, f=f)
    with pytest.raises(ValueError, match="radius"):
        levattn.heavy_attention(np.array([[2e-5, 0.0]]), K, 0.5, f=f)


HOSTILE = (
    *("zero_columns", "late_columns", "graded_rows", "graded_columns", "dependent_integers", "duplicated"),
    *("nearly_dependent", "few_rows", "extreme", "mixed"),
)
FORMULAS: list[tuple[Any, Any]] = [
    *((p, oracle.power(p)) for p in (0.3, 0.5, 1, 3, 4, 6)),
    (levattn.Tukey(), oracle.tukey(4.685)),
    (levattn.Huber(), oracle.huber(1.0)),
    (Bounded(), Bounded()),
]


@pytest.mark.parametrize(("f", "formula"), FORMULAS, ids=[repr(f) for f, _ in FORMULAS])
def test_hostile_keys_have_no_score_above_their_bound(f: Any, formula: Any) -> None:
    """Queries that are exactly orthogonal to some keys are the witnesses; the adversary has those of sets."""
    for family, seed in itertools.product(HOSTILE, range(strategies.trials(16))):
        found = case(family, seed)
        truth = Truth(found.present, found.queries)
        sigma = promises.witnessed(truth, formula, truth.values(), seed)
        bounds = levattn.sensitivities(found.K, f, mask=found.mask, epsilon=0.3)
        for method in (*bounds.certificate, "block") if isinstance(f, int | float) else bounds.certificate:
            upper = levattn.sensitivities(found.K, f, mask=found.mask, method=method, epsilon=0.3).upper
            assert np.all(sigma <= upper * (1 + 1e-9)), (family, seed, method)
            assert np.all(upper <= 1)
        kept = levattn.universal_set(found.K, 0.3, f=f, mask=found.mask).mask
        assert not np.any((sigma >= 0.3) & ~kept), (family, seed)
        if isinstance(f, Bounded):
            held = levattn.StreamingUniversalSet(0.3, f=f).update(found.K, mask=found.mask).result()
            assert not set(np.flatnonzero(sigma >= 0.3)).difference(held.indices.tolist()), (family, seed)


def test_even_powers_of_dependent_products_hold_all_keys() -> None:
    """Products of coordinates of signs are dependent: exact ones tell them apart, rounded ones hold all keys."""
    rng = np.random.default_rng(0)
    K = rng.choice([-1.0, 1.0], (3000, 3)) * 0.1
    K[2500] *= [1, 1, 1 + 2.0**-20]
    for dtype in (np.float32, np.float64):
        found = levattn.StreamingUniversalSet(0.5, f=4).update(K.astype(dtype)).result()
        assert 2500 in found.indices
        assert found.guarantee == "superset"
    with pytest.raises(ValueError, match="underflow"):
        levattn.StreamingUniversalSet(0.5, f=4).update(np.array([[1.0, 1], [1e-170, 0]]))


K0 = np.random.default_rng(0).standard_normal((30, 3))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: levattn.sensitivities(K0, 1, method="lift"), ValueError, "'leverage', 'lewis'"),
        (lambda: levattn.sensitivities(K0, 1, iterations=-1), ValueError, "iterations"),
        (lambda: levattn.lewis_weights(K0, 1, iterations=1.5), TypeError, "iterations"),  # type: ignore[arg-type]
        (lambda: levattn.sensitivities(K0, levattn.Huber(), epsilon=0), ValueError, "epsilon"),
        (lambda: levattn.lewis_weights(K0, levattn.Huber()), TypeError, r"\bp\b"),  # type: ignore[arg-type]
        (lambda: levattn.universal_set(K0, 0.1, f=1, center=True), ValueError, "center"),
        (lambda: levattn.heavy_attention(100 * K0, K0, 0.1, f=levattn.Softmax(1.0)), ValueError, "radius"),
        (
            lambda: levattn.heavy_attention(K0, K0, 0.1, f=1, universal=levattn.universal_set(K0, 0.1, f=3)),
            ValueError,
            "same function",
        ),
    ],
)
def test_wrong_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("f", [4, levattn.Huber(1.0)], ids=repr)
@pytest.mark.parametrize("rng", [True, -1, 0.5, "0", [1], 2**64], ids=repr)
def test_seeds_are_checked_whether_or_not_they_count(f: Any, rng: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"rng is .*; expected a seed"):
        levattn.sensitivities(np.eye(3), f, rng=rng)


def test_a_generator_gives_all_matrices_of_a_batch_one_partition() -> None:
    K = np.random.default_rng(0).standard_normal((60, 4))
    whole = levattn.sensitivities(np.stack([K, K]), levattn.Huber(1.0), epsilon=0.5, rng=np.random.default_rng(5))
    alone = levattn.sensitivities(K, levattn.Huber(1.0), epsilon=0.5, rng=np.random.default_rng(5))
    for upper in whole.upper:
        np.testing.assert_array_equal(upper, alone.upper)


@pytest.mark.parametrize("f", [1, 3, 4, 6, levattn.Huber(1.0)], ids=repr)
def test_bounds_of_a_batch_are_those_of_its_matrices_to_the_last_bit(f: Any) -> None:
    rng = np.random.default_rng(3)
    K = rng.standard_normal((4, 40, 3)) * np.exp(4 * rng.standard_normal((4, 40, 1)))
    K[1, :, 2] = K[1, :, 0]  # of lower rank
    K[2] = K[2] * [1, 1, 1e-9] @ rng.standard_normal((3, 3))  # its lift takes precise products
    K[3] = 0
    upper = levattn.sensitivities(K, f).upper
    for one, mine in zip(K, upper, strict=True):
        np.testing.assert_array_equal(mine, levattn.sensitivities(one, f).upper)


@pytest.mark.parametrize("p", [1e-300, 1e-308, 5e-324, 1e4, 1e308])
def test_powers_at_the_ends_of_the_range(p: float) -> None:
    """|x|^p is 1 where x is not 0, or it is 0 beside the largest x."""
    K = np.random.default_rng(0).standard_normal((12, 2)) * np.where(np.arange(12) < 3, 10.0, 1.0)[:, None]
    sizes = np.abs(K @ np.random.default_rng(1).standard_normal((2, 50)))
    scores = (sizes / sizes.max(axis=0)) ** p
    reached = (scores / scores.sum(axis=0)).max(axis=1)
    for method in ("auto", "leverage", "lewis", "block"):
        assert np.all(reached <= levattn.sensitivities(K, p, method=method).upper * (1 + 1e-9))
