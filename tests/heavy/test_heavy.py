"""Heavy attention against exact arithmetic: ill-conditioned keys, any scale, sets that do not fit, error bounds.

Inside: one test watches that no sum over all keys is taken.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import levattn
import naive
import strategies
from adversary.families import Case
from adversary.oracle import Truth
from adversary.routes import ROUTES, heavy, judge_heavy
from levattn.exceptions import NonFiniteError


def _ill_conditioned(condition: float, n: int = 40, d: int = 5, seed: int = 0) -> naive.Float:
    rng = np.random.default_rng(seed)
    U = np.linalg.qr(rng.standard_normal((n, d)))[0]
    return np.asarray(U * np.geomspace(1, 1 / condition, d) @ np.linalg.qr(rng.standard_normal((d, d)))[0])


@pytest.mark.parametrize("storage", ["float64", "float32"])
@pytest.mark.parametrize("condition", [1.0, 1e4, 3e5, 1e6, 1e8, 1e10, 1e12])
def test_the_worst_queries_of_ill_conditioned_keys(condition: float, storage: str) -> None:
    if storage == "float32" and condition > 1e7:
        pytest.skip("float32 keys have no such condition")
    K = _ill_conditioned(condition).astype(storage)
    universal = levattn.universal_set(K, 1e-9)  # of all keys
    Q = np.stack([universal.factor.witness(k) for k in K.astype(np.float64)])
    V = np.random.default_rng(1).standard_normal((len(K), 3))
    case, truth = Case("found", 0, K.astype(np.float64), Q, V, 1e-3), Truth(K.astype(np.float64), Q)
    found, *outputs = heavy(Q, K, V, 1e-3, None, universal)
    assert list(judge_heavy(case, truth, (found, *outputs))) == []
    assert found.error.max() <= 2.5e-10
    assert all(np.all(bound <= 1e-6) for _, bound in outputs)
    A = naive.attention_exact(Q, K)
    for i in range(0, len(K), 5):  # asked for exactly what the largest entry is
        epsilon = float(A[i].max())
        alone = levattn.heavy_attention(Q[i : i + 1], K, epsilon)
        assert alone.entries.toarray()[0, int(A[i].argmax())] == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize(
    ("of_queries", "of_keys"),
    [(1e80, 1), (1e-90, 1), (1e150, 1e150), (1e-150, 1e-150), (1e160, 1), (1e-170, 1), (1, 1e-170), (1e-250, 1e200)],
)
def test_the_scale_of_queries_and_keys_changes_nothing(of_queries: float, of_keys: float) -> None:
    K = strategies.case("coherent")
    Q = np.vstack([K[:20], naive.adversarial_queries(K)[:50]])
    plain = levattn.heavy_attention(Q, K, 0.1)
    scaled = levattn.heavy_attention(Q * of_queries, K * of_keys, 0.1)
    assert plain.entries.nnz > 10
    np.testing.assert_array_equal(scaled.entries.indices, plain.entries.indices)
    np.testing.assert_allclose(scaled.entries.data, plain.entries.data, rtol=1e-9)
    np.testing.assert_allclose(scaled.captured_mass, plain.captured_mass, rtol=1e-9)


@pytest.mark.parametrize("p", [1, 4, 30, 100])
@pytest.mark.parametrize("scale", [2.0**-1066, 2.0**-1030, 2.0**-600, 2.0**900])
def test_the_scale_of_keys_changes_no_entry_of_other_powers(p: float, scale: float) -> None:
    rng = np.random.default_rng(5)
    K, Q = rng.integers(-9, 10, (40, 4)) * 1.0, rng.integers(-9, 10, (30, 4)) * 1.0
    K[7] *= 16
    plain, found = (levattn.heavy_attention(Q, keys, 0.2, f=p) for keys in (K, K * scale))
    np.testing.assert_allclose(found.entries.toarray(), plain.entries.toarray(), rtol=1e-9)
    np.testing.assert_allclose(found.captured_mass, plain.captured_mass, rtol=1e-9)
    assert (found.error < 1e-9).all()


def test_a_set_by_size_does_not_hold_the_ties_at_its_epsilon() -> None:
    K = np.eye(3)
    universal = levattn.universal_set(K, size=1)
    with pytest.raises(ValueError, match="more than 1"):
        levattn.heavy_attention(K, K, 1.0, universal=universal)
    K = strategies.case("coherent")
    universal = levattn.universal_set(K, size=30)
    with pytest.raises(ValueError, match="more than"):
        levattn.heavy_attention(K, K, universal.epsilon, universal=universal)
    more = universal.epsilon * (1 + 1e-6)
    Q = naive.adversarial_queries(K)
    found = levattn.heavy_attention(Q, K, more, universal=universal).entries.toarray()
    assert np.all(found[naive.attention(Q, K) >= more] > 0)


def test_near_ties_by_size_are_decided_in_float64() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        K = (rng.choice([-1.0, 1.0], (64, 4)) * (1 + 1e-6 * rng.standard_normal((64, 4)))).astype(np.float32)
        exact = naive.leverage_exact(K.astype(np.float64))
        chosen = levattn.universal_set(K, size=20).mask
        assert exact[chosen].min() >= exact[~chosen].max() * (1 - 1e-12)


def test_a_set_of_other_keys_is_refused() -> None:
    rng = np.random.default_rng(0)
    K = rng.standard_normal((300, 5))
    universal = levattn.universal_set(K, 0.05)
    for other in (rng.standard_normal((300, 5)), K[::-1], K * np.array([1, 1, 1, 1, 2])[rng.permutation(5)] + 1):
        with pytest.raises(ValueError, match="other keys"):
            levattn.heavy_attention(K, other, 0.1, universal=universal)
    with pytest.raises(ValueError, match="float32"):
        levattn.heavy_attention(K, K.astype(np.float32), 0.1, universal=universal)
    huber = levattn.universal_set(K, 0.05, f=levattn.Huber(1.0))
    with pytest.raises(ValueError, match="other keys"):
        levattn.heavy_attention(K, K[::-1], 0.1, f=levattn.Huber(1.0), universal=huber)
    streamed = levattn.StreamingUniversalSet(0.1).update(K)
    with pytest.raises(TypeError, match=r"type StreamedSet, .*Give universal_set\(K, epsilon\), or leave it out"):
        levattn.heavy_attention(K, K, 0.1, universal=streamed.result())  # type: ignore[arg-type]
    for wrong in (streamed, streamed.result()):
        with pytest.raises(TypeError, match=r"is no array: give the rows themselves as K"):
            levattn.heavy_attention(K, wrong, 0.1)
    K[universal.indices[0]] = np.nan
    with pytest.raises(NonFiniteError, match=str(universal.indices[0])):
        levattn.heavy_attention(np.ones((1, 5)), K, 0.1, universal=universal)


def test_the_bound_covers_large_values_of_keys_without_attention() -> None:
    rng = np.random.default_rng(2)
    K = np.vstack([1e3 * np.eye(3), 1e-6 * rng.standard_normal((100, 3))])
    V = rng.standard_normal((103, 4))
    V[3:] *= 1e12
    assert ROUTES["heavy"].breaches(Case("found", 0, K, rng.standard_normal((10, 3)), V, 0.5)) == []


@pytest.mark.parametrize("compensate", [None, "mean"])
@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e154, 1e160, 1e300])
def test_values_of_any_scale(scale: float, compensate: str | None) -> None:
    rng = np.random.default_rng(3)
    K, V, Q = rng.standard_normal((100, 3)), rng.standard_normal((100, 4)), rng.standard_normal((10, 3))
    found = levattn.heavy_attention(Q, K, 0.05)
    output, bound = found.apply(V * scale, compensate=compensate)
    plain, plain_bound = found.apply(V, compensate=compensate)
    np.testing.assert_allclose(output / scale, plain, rtol=1e-12)
    np.testing.assert_allclose(bound / scale, plain_bound, rtol=1e-9)


def test_queries_orthogonal_to_most_keys_of_a_deficient_matrix() -> None:
    """Normalizers that neither the factor nor a basis holds are summed over the keys."""
    K = np.random.default_rng(4).standard_normal((3000, 6))
    K[:, 5] = K[:, 0]
    K[:, 4] = 0
    K[[7, 9], 0] = 1
    K[[7, 9], 5] = 1 + 1e-9, 1 + 2e-9
    q = np.array([[1.0, 0, 0, 0, 0, -1], [0, 0, 0, 0, 1, 0]])
    found = levattn.heavy_attention(q, K, 0.01)
    A = naive.attention_exact(q, K)
    np.testing.assert_allclose(found.entries.toarray(), np.where(A >= 0.01, A, 0), rtol=1e-9)
    assert found.entries.nnz == 2
    assert found.normalizers[1] == 0


@pytest.mark.parametrize("p", [4, 6])
@pytest.mark.parametrize("kind", ["coherent", "turned", "ill-conditioned", "deficient"])
def test_normalizers_of_even_powers_from_lifted_moments(kind: str, p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    K = rng.standard_normal((1500, 4)) * np.clip(np.abs(rng.standard_cauchy((1500, 1))), 0.1, 300)
    if kind == "turned":
        K = K @ rng.standard_normal((4, 4)) * np.geomspace(1e-40, 1e40, 4)
    if kind == "ill-conditioned":
        K = K * np.geomspace(1, 1e-7, 4) @ np.linalg.qr(rng.standard_normal((4, 4)))[0]
    if kind == "deficient":
        K[:, 3] = K[:, 0]
    universal = levattn.universal_set(K, 0.02, f=p)
    if kind in ("coherent", "turned"):  # nothing of size n is summed

        def refuse(*_: object) -> None:
            raise AssertionError

        monkeypatch.setattr("levattn.heavy.entries.sums", refuse)
    assert universal.certificate == ("leverage", "lewis", "lift")
    Q = np.vstack([universal.factor.witness(K[:200]), K[:5] / np.max(K**2, axis=0)])
    found = levattn.heavy_attention(Q, K, 0.02, f=p, universal=universal)
    A = (Q.astype(np.longdouble) @ K.T.astype(np.longdouble)) ** p
    total = A.sum(axis=1, keepdims=True)
    A = np.asarray(A / total, np.float64)
    assert (A >= 0.02).sum() > 100
    np.testing.assert_allclose(found.entries.toarray()[A >= 0.02], A[A >= 0.02], rtol=1e-8)
    np.testing.assert_allclose(found.normalizers, np.asarray(total[:, 0], np.float64), rtol=1e-8)


@pytest.mark.parametrize("f", [2, 0.5, levattn.Huber(1.0), levattn.Softmax(100.0)], ids=repr)
def test_results_can_be_pickled_whatever_precision_queries_need(f: Any) -> None:
    K = _ill_conditioned(1e10)
    Q = levattn.universal_set(K, 0.1).factor.witness(K[:4]) if f == 2 else np.vstack([K[:4], K[0] - K[0]])
    Q = Q if isinstance(f, levattn.Softmax) else np.vstack([Q, np.linalg.svd(K)[2][-1:]])  # which cancels
    found = levattn.heavy_attention(Q, K, 0.1, f=f)
    again = pickle.loads(pickle.dumps(found))
    for compensate in (None, "mean"):
        for one, other in zip(found.apply(K, compensate), again.apply(K, compensate), strict=True):
            np.testing.assert_array_equal(one, other)
