"""Certified bounds against brute force over queries, closed forms and theorems; sets and entries of every function."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import levattn
import naive
import strategies
from levattn.functions import Softmax, as_function
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


def attention(f: Any, Q: naive.Float, K: naive.Float) -> naive.Float:
    """The scores by their definition."""
    function = as_function(f)
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
    function = as_function(f)
    if isinstance(function, Softmax):
        Q = Q * np.minimum(1, function.radius / np.maximum(np.linalg.norm(Q, axis=1, keepdims=True), 1e-300))
    return np.asarray(Q)


@st.composite
def keys(draw: st.DrawFn) -> naive.Float:
    """Small keys: heavy-tailed, graded, duplicated, rank-deficient, with zero rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    n, d = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    K = rng.standard_normal((n, d)) * np.clip(np.abs(rng.standard_cauchy((n, 1))), 1e-3, 1e3)
    if draw(st.booleans()):
        K = K * np.geomspace(1, 1e-5, d) @ np.linalg.qr(rng.standard_normal((d, d)))[0]
    if draw(st.booleans()):
        K = K[rng.integers(0, max(1, n // 3), n)]
    if draw(st.booleans()):
        K[:, -1] = K[:, 0]
    if draw(st.booleans()):
        K[rng.integers(0, n)] = 0
    return np.asarray(K)


@pytest.mark.parametrize(("f", "method"), METHODS, ids=str)
@settings(max_examples=30, deadline=None)
@given(K=keys(), seed=st.integers(0, 99), iterations=st.integers(0, 6), epsilon=st.sampled_from([0.02, 0.1, 0.5, 1.0]))
def test_no_query_exceeds_a_bound(
    f: Any, method: Any, K: naive.Float, seed: int, iterations: int, epsilon: float
) -> None:
    found = levattn.sensitivities(K, f, method=method, iterations=iterations, epsilon=epsilon, rng=seed)
    reached = attention(f, queries(f, K, seed, 400), K).max(axis=0)
    assert np.all(reached <= found.upper * (1 + 1e-9))
    assert found.certificate == (method,)
    assert np.all(found.upper <= 1)
    if not isinstance(as_function(f), Softmax):
        assert np.all(found.upper[~K.any(axis=1)] == 0)


@pytest.mark.parametrize("f", FUNCTIONS, ids=str)
def test_auto_is_the_least_of_the_others(f: Any) -> None:
    K = strategies.case("coherent")[:, :6]
    auto = levattn.sensitivities(K, f)
    each = [levattn.sensitivities(K, f, method=name).upper for name in auto.certificate]
    np.testing.assert_allclose(auto.upper, np.min(each, axis=0), rtol=1e-12)
    assert auto.total == pytest.approx(auto.upper.sum())


@pytest.mark.parametrize("p", [0.5, 1.0, 1.5, 3.0])
def test_converged_lewis_weights_sum_to_the_rank(p: float) -> None:
    K = np.random.default_rng(0).standard_normal((300, 5)) * np.clip(
        np.random.default_rng(1).standard_cauchy((300, 1)), -50, 50
    )
    w = levattn.lewis_weights(K, p, iterations=60)
    assert w.sum() == pytest.approx(5, rel=1e-6)
    M = K.T @ (w[:, None] ** (1 - 2 / p) * K)
    np.testing.assert_allclose(np.einsum("ij,jk,ik->i", K, np.linalg.inv(M), K) ** (p / 2), w, rtol=1e-5)
    turned = K @ np.random.default_rng(2).standard_normal((5, 5))
    np.testing.assert_allclose(levattn.lewis_weights(turned, p, iterations=60), w, rtol=1e-5)
    total = levattn.sensitivities(K, p, method="lewis", iterations=60).total
    assert total <= 5 ** max(1, p / 2) * (1 + 1e-6)


def test_lewis_weights_of_two_are_leverage_scores() -> None:
    K = strategies.case("gaussian")
    np.testing.assert_allclose(levattn.lewis_weights(K, 2), naive.leverage_exact(K), rtol=1e-9)


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


@pytest.mark.parametrize("f", FUNCTIONS, ids=str)
@pytest.mark.parametrize("storage", ["float64", "float32", "bfloat16", "torch-float32", "strict-float64"])
def test_sets_and_entries_miss_nothing(f: Any, storage: str) -> None:
    if f == 2:
        pytest.skip("tests/test_misses.py")
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
    garbage = K.copy()
    garbage[~mask] = np.nan
    if f not in POWERS:
        with_mask = levattn.sensitivities(garbage, f, mask=mask, rng=1).upper
        assert np.all(with_mask[~mask] == 0)
        assert np.all(attention(f, queries(f, K[mask], 0, 300), K[mask]).max(axis=0) <= with_mask[mask] * (1 + 1e-9))
        return
    found = levattn.sensitivities(garbage, f, mask=mask).upper
    assert np.all(found[~mask] == 0)
    np.testing.assert_allclose(found[mask], levattn.sensitivities(K[mask], f).upper, rtol=1e-9)


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


@pytest.mark.parametrize("radius", [1.5, 4.0])
def test_groups_of_many_keys_give_bounds_between_the_exact_ones_and_those_of_one_group(
    radius: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    K = rng.standard_normal((6000, 2)) * np.where(rng.random((6000, 1)) < 0.01, 3, 1)
    K[3000:4000] = K[0]
    f, epsilon = levattn.Softmax(radius), 0.002
    exactly = levattn.sensitivities(K, f, method="ball", epsilon=epsilon).upper
    monkeypatch.setattr("levattn._softmax._PAIRS", 0)
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


def test_softmax_fails_without_a_radius() -> None:
    """Random signs: softmax is the identity, every key is heavy for its own query, and leverage sees none of it."""
    K = np.random.default_rng(0).choice([-1.0, 1.0], (512, 49))
    A = attention(levattn.Softmax(100.0), K, K)
    assert np.diag(A).min() > 0.99
    assert levattn.leverage_scores(K).max() < 0.2
    assert len(levattn.universal_set(K, 0.5)) == 0
    assert len(levattn.universal_set(K, 0.5, f=levattn.Softmax(49**0.5))) == 512


def test_wrong_arguments() -> None:
    K = np.random.default_rng(0).standard_normal((30, 3))
    with pytest.raises(ValueError, match="'leverage', 'lewis'"):
        levattn.sensitivities(K, 1, method="lift")
    with pytest.raises(ValueError, match="iterations"):
        levattn.sensitivities(K, 1, iterations=-1)
    with pytest.raises(TypeError, match="iterations"):
        levattn.lewis_weights(K, 1, iterations=1.5)
    with pytest.raises(ValueError, match="epsilon"):
        levattn.sensitivities(K, levattn.Huber(), epsilon=0)
    with pytest.raises(TypeError, match=r"\bp\b"):
        levattn.lewis_weights(K, levattn.Huber())
    with pytest.raises(ValueError, match="center"):
        levattn.universal_set(K, 0.1, f=1, center=True)
    with pytest.raises(ValueError, match="radius"):
        levattn.heavy_attention(100 * K, K, 0.1, f=levattn.Softmax(1.0))
    with pytest.raises(ValueError, match="same function"):
        levattn.heavy_attention(K, K, 0.1, f=1, universal=levattn.universal_set(K, 0.1, f=3))
