"""What an adversary once broke, as it was reported: each example gives the right answer, or says that it cannot."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import levattn
from levattn.attention import pruned_attention

from . import promises
from .families import Case
from .oracle import Truth
from .routes import ROUTES


def _stands(K: Any, Q: Any, V: Any, epsilon: float, *names: str, storage: str = "float64") -> None:
    """These routes break no promise for this case."""
    keys, queries, values = (np.asarray(x, np.float64) for x in (K, Q, V))
    case = Case("reviewed", 1, keys, queries, values, epsilon, storage=storage)
    truth = Truth(keys, queries)
    for name in names:
        assert ROUTES[name].breaches(case, truth) == [], name


def _zero_column() -> Any:
    x = np.random.default_rng(2).integers(-4, 5, 6144) * 1.0
    K = np.stack([0 * x, 3 * x, x], 1)
    K[5000, 0] = 1
    return K


@pytest.mark.parametrize("f", [2.0, levattn.Huber(), levattn.Tukey(), levattn.Fair(), levattn.L1L2(), 1.5], ids=str)
def test_1_a_key_alone_in_a_column_beside_rank_deficiency(f: Any) -> None:
    assert 5000 in levattn.universal_set(_zero_column(), 0.5, f=f).indices
    if f != 1.5:
        assert 5000 in levattn.StreamingUniversalSet(0.5, f=f).update(_zero_column()).result().indices


@pytest.mark.parametrize("method", ["blocks", "lewis"])
def test_1_by_each_certificate(method: str) -> None:
    names = {"blocks": "block", "lewis": "lewis"}
    f = 1.5 if method == "lewis" else levattn.Huber()
    assert 5000 in levattn.universal_set(_zero_column(), 0.5, f=f, method=names[method]).indices


@pytest.mark.parametrize("method", ["countsketch", "osnap", "srht", "jl"])
def test_1_by_sketches(method: str) -> None:
    assert 5000 in levattn.universal_set(_zero_column(), 0.5, method=method).indices


def test_1_a_query_that_sees_the_column() -> None:
    K = _zero_column()
    q = np.array([[1.0, 0, 0], [1, 1, -3], [0, 0, 1]])
    _stands(K, q, np.ones((len(K), 2)), 0.5, "heavy", "heavy of a set", "decoding")


@pytest.mark.parametrize("gap", [1e-10, 1e-7, 1e-12])
def test_2_normalizers_of_nearly_equal_columns(gap: float) -> None:
    K = np.random.default_rng(0).standard_normal((2000, 8))
    K[:, 1] = K[:, 0] + gap * K[:, 1]
    Q = np.eye(8)[2:]
    true = np.array([math.fsum(x * x for x in (K @ q).tolist()) for q in Q])
    found = levattn.heavy_attention(Q, K, 0.01)
    claimed = getattr(found, "error", 0.0)
    # 2000 squares of one entry each, summed without rounding: the products of unit vectors are exact
    assert np.all(np.abs(found.normalizers / true - 1) <= np.maximum(promises.SURE, 4 * claimed))
    decoded = levattn.CausalUniversalSet(0.01).update(K).heavy(Q)
    assert np.all(np.abs(decoded.normalizers / true - 1) <= np.maximum(promises.SURE, 4 * decoded.error))


def test_2_float32_columns_one_unit_apart() -> None:
    K = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
    K[:, 1] = np.nextafter(K[:, 0], np.float32(9))
    Q = np.eye(4, dtype=np.float32)
    true = np.array([math.fsum(float(x) ** 2 for x in K[:, c]) for c in range(4)])
    found = levattn.heavy_attention(Q, K, 0.01)
    assert np.all(np.abs(found.normalizers / true - 1) <= np.maximum(promises.SURE, 4 * getattr(found, "error", 0.0)))


def test_2_the_entry_above_epsilon() -> None:
    rng = np.random.default_rng(0)
    K = rng.standard_normal((30, 4))
    K[:, 1] = K[:, 0] + 1e-10 * K[:, 1]
    Q = np.eye(4)[2:]
    A = np.square(Q @ K.T) / np.array([[math.fsum(x * x for x in row)] for row in (Q @ K.T).tolist()])
    epsilon = float(A.max() * (1 - 1e-7))
    V = rng.standard_normal((30, 2))
    _stands(K, Q, V, epsilon, "heavy", "heavy of a set", "decoding")


def test_3_causal_entries_before_a_key_that_is_much_larger() -> None:
    K = np.array([[0, 1.0], [1e16, 0]])
    found = levattn.heavy_attention(np.ones((2, 2)), K, 0.5, causal=True)
    np.testing.assert_array_equal(found.entries.toarray(), [[1, 0], [0, 1]])
    _stands(K, np.ones((2, 2)), [[7.0, 7], [7, 7]], 0.5, "heavy causal", "future")


def test_3_wide_keys_and_a_later_column() -> None:
    rng = np.random.default_rng(0)
    K = rng.integers(-3, 4, (40, 128)) * 1.0
    K[:, 127] = 0
    K[39, 127] = 1e12
    Q = rng.integers(-3, 4, (40, 128)) * 1.0
    _stands(K, Q, rng.integers(-9, 9, (40, 2)), 0.25, "heavy causal")


def test_4_rows_graded_beyond_the_precision() -> None:
    """Five generic rows in five dimensions have the score 1 each, whatever their sizes."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        K = rng.standard_normal((5, 5)) * 10.0 ** rng.choice([0, -14, -20, -7], 5)[:, None]
        _stands(K, np.eye(5), np.ones((5, 1)), 0.5, "set auto", "set qr", "stream", "size auto", "two passes")


def test_4_by_powers_below_two() -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        M = rng.integers(-2, 3, (8, 3)).astype(np.float32)
        M[0] = M[1] = [0, 0, 2.0**-20]
        M[2:, 2] = 0
        # a query that sees only keys 0 and 1 gives each of them half of its attention
        assert {0, 1} <= set(levattn.universal_set(M, 1 / 3, f=0.5).indices.tolist())


def _pruned(K: Any, V: Any) -> Any:
    return pruned_attention(K, K, V, size=1, summaries=1, chunk=1, causal=True)


def test_5_pruned_attention_of_drifting_keys() -> None:
    K, ones = -np.arange(200, dtype=np.float32)[:, None], np.ones((200, 1), np.float32)
    found = pruned_attention(ones, K, ones, size=1, summaries=1, chunk=1, causal=True)
    np.testing.assert_allclose(found, 1, rtol=1e-5)


def test_5_pruned_attention_of_large_keys() -> None:
    K = 30 * np.random.default_rng(0).standard_normal((300, 4)).astype(np.float32)
    assert np.isfinite(_pruned(K, K)).all()
    drift = np.arange(400.0)[:, None] * np.ones(4)
    assert np.isfinite(_pruned(-drift, drift)).all()


@pytest.mark.parametrize(("small", "storage"), [(1e-30, "f4"), (1e-170, "f8")])
@pytest.mark.parametrize("f", [levattn.Tukey(), 0.001], ids=str)
def test_6_scores_that_underflow(small: float, storage: str, f: Any) -> None:
    """Far out both keys count alike, or all but: the small one has 0.40 to 0.5 of the attention."""
    chosen = levattn.universal_set(np.array([[1.0], [small]], storage), 0.4, f=f).indices
    assert 1 in chosen


def test_7_a_query_nearly_orthogonal_to_the_keys() -> None:
    K = np.full((1000, 2), 1e3)
    K[3] = 0, 1e-12
    q = np.array([[1.0, -1]])
    _stands(K, q, np.full((1000, 1), 7.0), 0.5, "heavy", "heavy of a set", "decoding")


def test_8_softmax_with_a_graded_matrix() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        scales = rng.permutation(np.geomspace(1e-5, 1e5, 3))
        U = np.linalg.qr(rng.standard_normal((3, 3)))[0]
        even = (U * [1, 0.3, 0.1]) @ U.T
        S = even * np.outer(scales, scales)
        Y = rng.standard_normal((40, 3))
        Y[0] = 4 * np.eye(3)[scales.argmin()]
        Z = Y @ np.linalg.cholesky((even + even.T) / 2)  # K L: queries are L u with u of norm at most 2
        apart = Z - Z.mean(axis=0)
        z = 2 * Z @ (apart / np.linalg.norm(apart, axis=1, keepdims=True)).T
        weights = np.exp(z - z.max(axis=0))
        bound = levattn.sensitivities(Y / scales, levattn.Softmax(2.0, (S + S.T) / 2)).upper
        assert np.all(bound >= np.diagonal(weights / weights.sum(axis=0)) * (1 - 1e-9))


@pytest.mark.parametrize(("scale", "storage"), [(1e-30, "f4"), (1e-170, "f8")])
def test_9_bounds_of_tiny_values(scale: float, storage: str) -> None:
    rng = np.random.default_rng(0)
    Q, K = rng.standard_normal((2, 60, 4)).astype(storage)
    V = (rng.standard_normal((60, 2)) * scale).astype(storage)
    output, certificate = pruned_attention(Q, K, V, size=8, summaries=4, return_certificate=True)
    A = np.exp(np.float64(Q) @ np.float64(K).T / 2)
    dense = (A / A.sum(axis=1, keepdims=True)) @ (np.float64(V) / scale)
    error = np.linalg.norm(np.float64(output) / scale - dense, axis=1)
    assert error.max() > 1e-3
    assert np.all(error <= np.float64(certificate.error_bound) / scale * (1 + 1e-4))


@pytest.mark.parametrize("method", ["auto", "gram", "qr", "svd"])
@pytest.mark.parametrize("name", ["overflow", "span", "denormal"])
def test_9_columns_at_the_ends_of_the_range(method: str, name: str) -> None:
    K = {
        "overflow": np.array([[1e308, 1], [1e308, -1], [1e308, 2], [-1e308, 0]]),
        "span": np.array([[1.5e308, 1], [0, 1], [0, 1], [5e-324, 0]]),
        "denormal": np.array([[5e-324, 0], [0, 1e-323], [1.0, 1], [2, 2], [3, 3]]),
    }[name]
    _stands(K, np.eye(2), np.ones((len(K), 1)), 0.5, f"set {method}", f"size {method}", f"scores {method}")


def test_9_layouts_of_few_rows() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        n, d = int(rng.integers(1, 11)), 5
        K = rng.standard_normal((n, d)) * 10.0 ** rng.integers(-8, 9, (n, 1))
        _stands(K, np.eye(d), np.ones((n, 1)), 0.5, "layout auto", "layout qr")
