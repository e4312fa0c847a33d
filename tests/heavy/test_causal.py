"""Causal heavy attention against its definition: prefixes of every kind, the worst query of each, and error bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import levattn
import naive
from levattn.exceptions import NonFiniteError
from strategies import STORAGE, as_float64

N, D = 1100, 5


def dense(Q: naive.Float, K: naive.Float) -> naive.Float:
    """The definition, in long double."""
    Z = np.tril(Q.astype(np.longdouble) @ K.T.astype(np.longdouble)) ** 2
    total = Z.sum(axis=1, keepdims=True)
    return np.asarray(np.divide(Z, total, out=np.zeros_like(Z), where=total > 0), np.float64)


def heavy_tailed(rng: np.random.Generator) -> naive.Float:
    return np.asarray(rng.standard_normal((N, D)) * np.clip(np.abs(rng.standard_cauchy((N, 1))), 0.01, 100))


KINDS = {
    "gaussian": lambda rng: rng.standard_normal((N, D)),
    "heavy-tailed": heavy_tailed,
    "growing": lambda rng: rng.standard_normal((N, D)) * np.exp(np.arange(N) / 60)[:, None],
    "ill-conditioned": lambda rng: (
        heavy_tailed(rng) * np.geomspace(1, 1e-6, D) @ np.linalg.qr(rng.standard_normal((D, D)))[0]
    ),
    "deficient": lambda rng: rng.integers(-2, 3, (N, 2)) @ rng.integers(-2, 3, (2, D)) * 1.0,
    "late": lambda rng: (
        np.where(np.arange(N)[:, None] < 700, [1.0, 1, 0, 0, 0], [1.0, 1, 1, 1, 1]) * heavy_tailed(rng)
    ),
    "repeated": lambda rng: heavy_tailed(rng)[rng.integers(0, 40, N)],
}


def queries(rng: np.random.Generator, K: naive.Float) -> naive.Float:
    """Random queries, and for every other row the worst one of a key of its prefix."""
    Q = rng.standard_normal((N, D))
    for t in range(1, N, 2):
        prefix = K[: t + 1]
        U, s, Vt = np.linalg.svd(prefix, full_matrices=False)
        live = s > 1e-13 * s[0] if s[0] else np.zeros(len(s), bool)
        Q[t] = (U[rng.integers(0, t + 1), live] / s[live]) @ Vt[live]
    return np.asarray(Q)


@pytest.mark.parametrize("storage", ["float64", "float32", "torch-bfloat16", "strict-float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_entry_is_missed(kind: str, storage: str) -> None:
    rng = np.random.default_rng(sum(map(ord, kind)))
    stored = STORAGE[storage](KINDS[kind](rng) if kind != "growing" or "64" in storage else KINDS[kind](rng) * 1e-6)
    K = as_float64(stored)
    Q = queries(rng, K)
    A = dense(Q, K)
    for epsilon in (0.3, 0.05):
        found = levattn.heavy_attention(Q, stored, epsilon, causal=True)
        entries = found.entries.toarray()
        large = epsilon <= A
        np.testing.assert_allclose(entries[large], A[large], rtol=1e-8)
        assert np.all(A[entries > 0] >= epsilon * (1 - 1e-8))
        assert np.all(np.triu(entries, 1) == 0)
        if kind not in ("ill-conditioned", "deficient", "late"):  # there they are let go a chunk of rows later
            assert found.alive.max() <= D / epsilon


def test_figures_and_output() -> None:
    rng = np.random.default_rng(0)
    K = heavy_tailed(rng)
    Q = queries(rng, K)
    found = levattn.heavy_attention(Q, K, 0.1, causal=True)
    np.testing.assert_allclose(found.normalizers, np.tril((Q @ K.T) ** 2).sum(axis=1), rtol=1e-6)
    np.testing.assert_allclose(found.captured_mass + found.residual_mass, 1, rtol=1e-12)
    assert found.universal is None
    scaled = levattn.heavy_attention(Q * 1e150, K * 1e-140, 0.1, causal=True)
    np.testing.assert_allclose(scaled.entries.toarray(), found.entries.toarray(), rtol=1e-9)


@pytest.mark.parametrize("compensate", [None, "mean"])
@pytest.mark.parametrize("shift", [0.0, 5.0])
def test_output_within_its_bound(compensate: Any, shift: float) -> None:
    rng = np.random.default_rng(3)
    K = heavy_tailed(rng)
    K[N // 2 :] = rng.standard_normal((N - N // 2, D))
    Q = queries(rng, K)
    V = (rng.standard_normal((N, 3)) + shift) * 1e200
    mask = rng.random(N) < 0.8
    V[~mask] = np.nan
    A = dense(Q, np.where(mask[:, None], K, 0))
    found = levattn.heavy_attention(Q, K, 0.1, causal=True, mask=mask)
    output, bound = found.apply(V, compensate=compensate)
    error = np.linalg.norm((output - A[:, mask] @ V[mask]) / 1e200, axis=1)
    assert np.all(error <= bound / 1e200)
    if compensate and shift:
        plain = np.linalg.norm((found.apply(V)[0] - A[:, mask] @ V[mask]) / 1e200, axis=1)
        assert np.median(error) <= np.median(plain) / 3


def test_masked_keys_take_no_part() -> None:
    rng = np.random.default_rng(1)
    K, Q = heavy_tailed(rng), rng.standard_normal((N, D))
    mask = rng.random(N) < 0.5
    A = dense(Q, np.where(mask[:, None], K, 0))
    K[~mask] = np.nan
    entries = levattn.heavy_attention(Q, K, 0.05, causal=True, mask=mask).entries.toarray()
    np.testing.assert_allclose(entries[A >= 0.05], A[A >= 0.05], rtol=1e-9)
    assert not entries[:, ~mask].any()


@pytest.mark.parametrize("n", [0, 1, 2, 255, 256, 257])
def test_few_rows(n: int) -> None:
    rng = np.random.default_rng(n)
    K, Q = rng.standard_normal((2, n, 3))
    found = levattn.heavy_attention(Q, K, 0.2, causal=True)
    A = dense(Q, K)
    np.testing.assert_allclose(found.entries.toarray(), np.where(A >= 0.2, A, 0), rtol=1e-9)


def test_wrong_arguments() -> None:
    K: Any = np.random.default_rng(0).standard_normal((20, 3))
    with pytest.raises(ValueError, match="causal=True"):
        levattn.heavy_attention(K[:5], K, 0.1, causal=True)
    with pytest.raises(ValueError, match="expected 2"):
        levattn.heavy_attention(K, K, 0.1, f=1, causal=True)
    with pytest.raises(ValueError, match="both given"):
        levattn.heavy_attention(K, K, 0.1, causal=True, universal=levattn.universal_set(K, 0.1))
    with pytest.raises(TypeError, match="causal"):
        levattn.heavy_attention(K, K, 0.1, causal="yes")  # type: ignore[arg-type]
    bad = K.copy()
    bad[7, 1] = np.inf
    with pytest.raises(NonFiniteError, match=r"K holds.*7"):
        levattn.heavy_attention(K, bad, 0.1, causal=True)
    with pytest.raises(NonFiniteError, match=r"Q holds.*7"):
        levattn.heavy_attention(bad, K, 0.1, causal=True)
