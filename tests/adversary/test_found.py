"""What the adversary has broken since, each as the smallest case that it shrank to."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import levattn


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1.0, 1e10, 1e18, 1e30])
@pytest.mark.parametrize("storage", ["f4", "f8"])
def test_softmax_bounds_at_any_scale(size: float, storage: str) -> None:
    """Two keys, 0 and −size: the query 4/size gives the first 1/(1 + e⁻⁴)."""
    K = np.array([[0.0], [-size]], storage)
    assert levattn.sensitivities(K, levattn.Softmax(4 / size)).upper[0] >= 1 / (1 + math.exp(-4)) * (1 - 1e-6)
    assert 0 in levattn.universal_set(K, 0.9, f=levattn.Softmax(4 / size)).indices


@pytest.mark.parametrize("K", [[[1e-300], [1e300]], [[1e-323], [2e307]], [[0.0, 1e-300], [1, 0], [0, 1e300]]])
def test_online_scores_do_not_see_the_future(K: Any) -> None:
    scores = levattn.online_leverage_scores(np.array(K))
    for n in range(1, len(K) + 1):
        np.testing.assert_array_equal(scores[:n], levattn.online_leverage_scores(np.array(K)[:n]))
    assert scores[0] == 1


@pytest.mark.parametrize("large", [1e100, 4e179, 1e300])
def test_a_query_with_a_large_entry_where_no_key_has_one(large: float) -> None:
    q = np.array([[large, 1.0]])
    for n in (1, 100):  # recent keys, and factored ones
        K = np.tile([[0.0, 1.0]], (n, 1))
        found = levattn.CausalUniversalSet(0.01).update(K).heavy(q)
        np.testing.assert_allclose(found.normalizers, [float(n)], rtol=1e-12)
        assert found.indices.tolist() == list(range(n))
        heavy = levattn.heavy_attention(q, K, 0.01)
        np.testing.assert_allclose(heavy.normalizers, [float(n)], rtol=1e-12)
        assert heavy.entries.nnz == n


@pytest.mark.parametrize("f", [4, 6])
def test_the_smallest_number_is_not_called_infinite(f: int) -> None:
    assert levattn.universal_set(np.array([[5e-324]]), 0.5, f=f).indices.tolist() == [0]


def test_tables_of_a_sketch_are_no_larger_than_the_keys_ask_for() -> None:
    found = levattn.heavy_attention(np.ones((1, 1)), np.ones((2, 1)), 1e-9, method="countsketch")
    np.testing.assert_allclose(found.entries.toarray(), [[0.5, 0.5]])


@pytest.mark.parametrize("f", [levattn.Huber(), levattn.Tukey(), levattn.L1L2(), levattn.Fair(), 1.0, 3.0], ids=str)
def test_products_beyond_the_range_make_no_noise(f: Any) -> None:
    """A query and a key whose product overflows: the right entry or a typed refusal, not a warning of numpy."""
    with contextlib.suppress(ValueError):
        found = levattn.heavy_attention(np.array([[1e300]]), np.array([[1e301]]), 0.5, f=f).entries.toarray()
        np.testing.assert_array_equal(found, [[1.0]])


@pytest.mark.parametrize("method", ["auto", "gram", "qr", "svd"])
def test_keys_next_to_overflow_whose_directions_are_found_anew(method: str) -> None:
    K = np.array([[0.0, 2e307, -(2.0**1021)], [0, 0, -1e151], [1, 2.0**1021 * (1 + 2.0**-7), -(2.0**1021)]])
    assert levattn.universal_set(K, 0.5, method=method).indices.tolist() == [0, 1, 2]


@pytest.mark.parametrize("method", ["auto", "gram", "qr", "svd"])
def test_a_set_of_a_size_certifies_no_less_than_what_it_leaves_out(method: str) -> None:
    """Scores 1, 1/11, 9/11 and 1/11, which the factor of graded float16 keys has to 1e-7."""
    K = np.array([[-64992.0, 1.0, -64992.0], [3.0, 0.0, 3.0], [-9.0, 0.0, -9.0], [3.0, 0.0, 3.0]], "float16")
    found = levattn.universal_set(K, size=2, method=method)
    assert found.indices.tolist() == [0, 2]
    assert 1 / 11 * (1 - 1e-9) <= found.epsilon <= 1 / 11 * (1 + 1e-5)
    chunks = levattn.universal_set(lambda: iter([K[:2], K[2:]]), size=2)
    assert 1 / 11 * (1 - 1e-9) <= chunks.epsilon <= 1 / 11 * (1 + 1e-5)


@pytest.mark.parametrize("storage", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("method", ["countsketch", "osnap", "srht"])
def test_float32_products_of_a_sketch_lose_no_key(method: Any, storage: str) -> None:
    """Independent keys, each of score 1; the condition number of their sketch is some 200."""
    K = np.array([[-0.671875, -1.2421875, -2.0], [0.0791015625, -0.125, 0.6640625], [0.8515625, 2.0, 2.0]])
    K = K.astype(ml_dtypes.bfloat16 if storage == "bfloat16" else storage)
    for seed in range(20):
        assert levattn.universal_set(K, 1.0, method=method, rng=seed).indices.tolist() == [0, 1, 2]
