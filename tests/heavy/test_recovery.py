"""Heavy attention by CountSketch and with projected normalizers, against the exact route.

Inside: the size that a method takes by itself is given to it with a seed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import levattn
import naive
from levattn.heavy.squares import recovery_size
from levattn.sketch import OSNAP, SRHT, CountSketch, GaussianJL, jl_size


def _keys(seed: int, n: int = 4000, d: int = 8) -> tuple[naive.Float, naive.Float]:
    rng = np.random.default_rng(seed)
    K = rng.standard_normal((n, d)) * np.clip(np.abs(rng.standard_cauchy((n, 1))), 0.1, 100)
    large = K[np.argsort(-np.linalg.norm(K, axis=1))[:40]]
    Q = np.vstack([rng.standard_normal((60, d)), large @ np.linalg.pinv(K.T @ K), np.zeros((1, d))])
    return Q, K


def countsketch(Q: naive.Float, universal: levattn.UniversalSet, epsilon: float, seed: int) -> OSNAP:
    """The sketch that the method "countsketch" takes, with a seed."""
    buckets, repetitions = recovery_size(len(Q), epsilon, len(universal))
    return OSNAP(buckets * repetitions, repetitions, seed=seed)


@pytest.mark.parametrize("epsilon", [0.02, 0.05])
@pytest.mark.parametrize("seed", range(4))
def test_recovered_entries_are_those_of_the_exact_route(seed: int, epsilon: float) -> None:
    Q, K = _keys(seed)
    universal = levattn.universal_set(K, epsilon)
    exact = levattn.heavy_attention(Q, K, epsilon, universal=universal)
    found = levattn.heavy_attention(
        Q, K, epsilon, universal=universal, method=countsketch(Q, universal, epsilon, seed)
    )
    assert exact.entries.nnz > 10
    np.testing.assert_array_equal(found.entries.indices, exact.entries.indices)
    np.testing.assert_allclose(found.entries.data, exact.entries.data, rtol=1e-12)
    np.testing.assert_allclose(found.captured_mass, exact.captured_mass, atol=1e-12)
    np.testing.assert_array_equal(found.normalizers, exact.normalizers)
    assert found.distortion == 0
    if seed == 0:
        by_name = levattn.heavy_attention(Q, K, epsilon, universal=universal, method="countsketch")
        np.testing.assert_array_equal(by_name.entries.toarray(), found.entries.toarray())


def test_fewer_buckets_may_miss_but_never_invent() -> None:
    Q, K = _keys(7)
    exact = levattn.heavy_attention(Q, K, 0.05).entries.toarray()
    found = levattn.heavy_attention(Q, K, 0.05, method=CountSketch(4)).entries.toarray()
    assert np.count_nonzero(found) < np.count_nonzero(exact)
    np.testing.assert_allclose(found[found > 0], exact[found > 0], rtol=1e-12)


def test_ill_conditioned_queries_take_the_precise_route() -> None:
    rng = np.random.default_rng(1)
    U = np.linalg.qr(rng.standard_normal((40, 5)))[0]
    K = U * np.geomspace(1, 1e-9, 5) @ np.linalg.qr(rng.standard_normal((5, 5)))[0]
    universal = levattn.universal_set(K, 1e-3)
    Q = universal.factor.witness(K)
    exact = levattn.heavy_attention(Q, K, 1e-3, universal=universal)
    found = levattn.heavy_attention(Q, K, 1e-3, universal=universal, method="countsketch")
    np.testing.assert_allclose(found.entries.toarray(), exact.entries.toarray(), rtol=1e-9, atol=0)


def test_thirty_one_repetitions_miss_nothing_in_two_hundred_trials() -> None:
    buckets, repetitions = recovery_size(100, 0.1, 10**6)
    assert (buckets, repetitions % 2) == (320, 1)
    rng = np.random.default_rng(2)
    K = rng.standard_normal((200, 3))
    K[:4] *= 20
    exact = levattn.heavy_attention(K[:10], K, 0.1)
    assert exact.entries.nnz > 10
    universal = levattn.universal_set(K, 0.001)
    for seed in range(200):
        found = levattn.heavy_attention(K[:10], K, 0.1, universal=universal, method=OSNAP(31 * buckets, 31, seed=seed))
        assert found.entries.nnz == exact.entries.nnz


@pytest.mark.parametrize("columns", [None, 150, 2000])
def test_projected_normalizers_are_within_their_distortion(columns: int | None) -> None:
    Q, K = _keys(3)
    exact = levattn.heavy_attention(Q, K, 0.05)
    V = np.random.default_rng(0).standard_normal((len(K), 2))
    dense = naive.attention(Q, K) @ V
    for seed in range(20):
        size = jl_size(len(Q), 0.5, 1e-6) if columns is None else columns
        found = levattn.heavy_attention(Q, K, 0.05, method=GaussianJL(size, seed=seed))
        if columns is None and seed == 0:
            by_name = levattn.heavy_attention(Q, K, 0.05, method="jl")
            np.testing.assert_array_equal(found.entries.toarray(), by_name.entries.toarray())
        live = exact.normalizers > 0
        ratio = found.normalizers[live] / exact.normalizers[live]
        assert np.all(np.abs(ratio - 1) <= found.distortion)
        missed = (exact.entries.toarray() > 0) & (found.entries.toarray() == 0)
        assert not missed.any()
        both = exact.entries.toarray() > 0
        change = found.entries.toarray()[both] / exact.entries.toarray()[both]
        assert np.all(change <= 1 / (1 - found.distortion))
        assert np.all(change >= 1 / (1 + found.distortion))
        output, bound = found.apply(V)
        assert np.all(np.linalg.norm(output - dense, axis=1) <= bound)
    assert found.distortion < (0.5 if columns is None else 0.9)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"method": "fft"}, "expected 'auto'"),
        ({"method": GaussianJL(5)}, "method is GaussianJL.* without a bound"),
        ({"method": (CountSketch(5), GaussianJL(5))}, r"expected 'auto'.* OSNAP\(buckets"),
        ({"method": SRHT(5)}, "expected 'auto'"),
        ({"method": np.array(["auto", "jl"])}, "method is .*expected 'auto'"),
        ({"method": OSNAP(8), "f": 4}, "other than"),
        ({"method": "jl", "f": 4}, "other than"),
    ],
)
def test_wrong_options(wrong: dict[str, Any], reason: str) -> None:
    K = np.random.default_rng(0).standard_normal((50, 4))
    with pytest.raises(ValueError, match=reason):
        levattn.heavy_attention(K, K, 0.1, **wrong)


def test_sizes_are_numbers_for_any_epsilon() -> None:
    assert recovery_size(40, 5e-324, 40)[0] == 320
    assert recovery_size(40, 5e-324, 40)[1] > recovery_size(40, 1e-9, 40)[1]
