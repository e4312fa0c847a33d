"""No entry is ever missed: every A_ij ≥ ε has j in the universal set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import levattn
import naive
import strategies
from strategies import STORAGE, Float, as_bool, as_float64, stores
from streams import named_rng

EPSILONS = (0.5, 0.1, 0.02)
METHODS = ("auto", "gram", "qr", "svd")


def queries(rng: np.random.Generator, K: Float, count: int) -> Float:
    """Random, typical and adversarial queries for these keys."""
    n, d = K.shape
    chosen = rng.choice(n, min(n, count), replace=False)
    return np.vstack(
        [
            rng.standard_normal((count, d)),
            np.eye(d),
            K[chosen] + 0.1 * rng.standard_normal((chosen.size, d)) * np.abs(K).mean(),
            naive.adversarial_queries(K)[chosen],
        ]
    )


def missed(A: Any, selected: NDArray[np.bool_], epsilon: float) -> list[tuple[int, int]]:
    """Entries (query, key) of at least ε whose key is not selected."""
    return [(int(i), int(j)) for i, j in zip(*np.nonzero((epsilon <= A) & ~selected), strict=True)]


KINDS: dict[str, Callable[[np.random.Generator], Float]] = {
    "gaussian": lambda rng: rng.standard_normal((400, 16)),
    "coherent": lambda rng: strategies.coherent(rng, 400, 16),
    "planted": lambda rng: strategies.planted(rng, 400, 16),
    "deficient": lambda rng: strategies.integer_deficient(rng, 400, 16, 9),
    "graded": lambda rng: strategies.graded(rng, 400, 16, 1e-4) * np.clip(rng.standard_cauchy((400, 1)), -30, 30),
    "conditioned": lambda rng: strategies.conditioned(rng, 400, 16, 1e5) * 50,
    "duplicated": lambda rng: np.repeat(rng.standard_normal((80, 16)), 5, axis=0),
}


def make(kind: str) -> Float:
    return KINDS[kind](named_rng(kind))


@stores()
@pytest.mark.parametrize("kind", KINDS)
def test_random_and_adversarial_queries(kind: str, storage: str) -> None:
    keys = STORAGE[storage](make(kind))
    K = as_float64(keys)
    raw = queries(named_rng(f"{kind} queries"), K, 150)
    stored = STORAGE[storage](raw / np.max(np.abs(raw), axis=1, keepdims=True))
    A = naive.attention(as_float64(stored), K, dtype=np.longdouble)
    exact = naive.leverage_exact(K)
    for epsilon in EPSILONS:
        for method in METHODS if storage in ("float64", "float32", "strict-float32") else ("auto",):
            found = levattn.universal_set(keys, epsilon, method=method)
            selected = as_bool(found.mask)
            assert found.guarantee == "exact"
            assert missed(A, selected, epsilon) == []
            assert np.all(selected[exact >= epsilon])
            assert np.all(exact[selected] >= epsilon * (1 - 1e-6))  # nothing but ties beyond the definition
        heavy = levattn.heavy_attention(stored, keys, epsilon)
        entries = heavy.entries.toarray()
        assert np.all(entries[epsilon <= A] > 0)
        assert np.all(A[entries > 0] >= epsilon * (1 - 1e-8))
        assert heavy.entries.nnz <= len(A) / epsilon * (1 + 1e-8)
    for size in (0, 1, 7, 60, 399, 400):
        found = levattn.universal_set(keys, size=size)
        selected = as_bool(found.mask)
        assert np.count_nonzero(selected) == size == len(found)
        certified = float(np.asarray(found.epsilon))
        largest = np.max(exact, where=~selected, initial=0.0)
        assert certified == pytest.approx(largest, rel=1e-5, abs=1e-300)
        # Every entry above the certified ε lies in the set.
        assert missed(A, selected, np.nextafter(certified, 2) * (1 + 1e-9)) == []


# -- directions that carry one key ----------------------------------------------------------


@pytest.mark.parametrize("size", [2.0**-30, 2.0**-33, 2.0**-36, 2.0**-40, 2.0**-43])
@pytest.mark.parametrize("n", [100, 20_000])
def test_a_key_alone_in_a_tiny_direction(n: int, size: float) -> None:
    # The other keys do not meet the direction at all: the exact score is one.
    K = strategies.tiny_direction(named_rng("tiny"), n, 8, size)
    for method in METHODS:
        for stored in (K,) if method == "svd" else (K, strategies.csr(K)):
            found = levattn.universal_set(stored, 0.9, method=method)
            assert found.mask[n // 3]
            assert found.guarantee == "exact"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-9, 1e-11, 1e-13])
def test_a_key_in_a_turned_tiny_direction(size: float, method: str) -> None:
    # After a rotation rounding lends every key a little of the direction: judge by exact scores.
    rng = named_rng("turned")
    K = rng.standard_normal((3000, 8))
    K[:, -1] = 0
    K[1234] = 0
    K[1234, -1] = size * np.sqrt(3000)
    K = K @ np.linalg.qr(rng.standard_normal((8, 8)))[0]
    exact = naive.leverage_exact(K)
    found = levattn.universal_set(K, 0.05, method=method)
    assert np.all(found.mask[exact >= 0.05])
    query = np.linalg.svd(K, full_matrices=False)[2][-1:]
    A = naive.attention(query, K, dtype=np.longdouble)
    assert missed(A, found.mask, 0.05) == []


@pytest.mark.crossed
@stores("float32", "float16", "bfloat16", "torch-bfloat16", "strict-float32")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("exponent", [0, -6, -10])
def test_tiny_directions_in_short_types(storage: str, method: str, exponent: int) -> None:
    rng = named_rng("short")
    K = np.rint(rng.standard_normal((5000, 8)) * 16)
    K[:, -1] = 0
    K[17] = 0
    K[17, -1] = 2.0**exponent
    K[:, -1] += K[:, 0]
    keys = STORAGE[storage](K)
    exact = naive.leverage_exact(as_float64(keys))
    assert exact[17] == 1
    assert as_bool(levattn.universal_set(keys, 1.0, method=method).mask)[17]


def test_a_cut_at_the_precision_of_the_input_would_miss() -> None:
    # 20 000 float32 keys of condition 10³: max(n, d)·u(float32) cuts true directions.
    rng = named_rng("cut")
    K = strategies.conditioned(rng, 20_000, 12, 1e3)
    K[rng.choice(20_000, 40, replace=False)] *= 30
    keys = K.astype(np.float32)
    exact = naive.leverage_svd(keys.astype(np.float64))
    found = levattn.universal_set(keys, 0.05)
    assert found.rank == 12
    assert np.count_nonzero(exact >= 0.05) > 5
    assert np.all(found.mask[exact >= 0.05])


# -- ties -----------------------------------------------------------------------------------


def test_heavy_attention_keeps_ties() -> None:
    K = strategies.identity_blocks(4, 10)
    heavy = levattn.heavy_attention(np.eye(4), K, 0.1)
    assert heavy.entries.nnz == 40
    np.testing.assert_allclose(heavy.entries.data, 0.1, rtol=1e-15)


# -- masks ----------------------------------------------------------------------------------


@stores(*(name for name in strategies.ALL_STORAGE if not name.startswith("strict")))
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e4])
def test_masked_rows_of_garbage_take_no_attention(garbage: float, storage: str) -> None:
    rng = named_rng("masked")
    K = np.rint(strategies.coherent(rng, 300, 8) * 4).clip(-200, 200)
    mask = rng.random(300) < 0.7
    K[~mask] = garbage
    keys = STORAGE[storage](K)
    Q = rng.integers(-4, 5, (80, 8)).astype(np.float64)
    A = naive.attention(Q, as_float64(keys), mask=mask)
    for epsilon in EPSILONS:
        heavy = levattn.heavy_attention(STORAGE[storage](Q), keys, epsilon, mask=mask)
        selected = as_bool(heavy.universal.mask)
        assert not np.any(selected[~mask])
        assert missed(A, selected, epsilon) == []
        assert np.all(heavy.entries.toarray()[epsilon <= A] > 0)
        assert not np.any(heavy.entries.toarray()[:, ~mask])
        np.testing.assert_allclose(as_float64(heavy.captured_mass), A[:, selected].sum(axis=1), rtol=1e-10)


def test_a_set_for_a_larger_epsilon_is_not_used_silently() -> None:
    K = make("coherent")
    Q = naive.adversarial_queries(K)
    universal = levattn.universal_set(K, 0.5)
    with pytest.raises(ValueError, match=r"scores of at least 0\.5, but epsilon is 0\.02"):
        levattn.heavy_attention(Q, K, 0.02, universal=universal)


def test_masked_keys_are_never_taken_by_size() -> None:
    K = make("gaussian")
    mask = np.arange(400) % 2 == 0
    for size in (0, 10, 200):
        found = levattn.universal_set(K, size=size, mask=mask)
        assert np.array_equal(found.mask, naive.universal_set(K, size=size, mask=mask))
