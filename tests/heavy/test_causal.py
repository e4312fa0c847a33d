"""Causal heavy attention against exact arithmetic: prefixes of every kind, and the worst query of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import levattn
import naive
from adversary.families import Case, Float, rounded, stored
from adversary.oracle import Truth
from adversary.promises import entries_hold
from adversary.routes import judge_heavy
from levattn.exceptions import NonFiniteError
from strategies import STORAGE, as_float64
from streams import named_rng, prefixes

N, D = 600, 5  # two chunks of rows, and a part of one


KINDS = prefixes(N, D, late=400)
LET_GO_LATER = ("conditioned-1e6", "deficient", "rank-grows")  # a chunk of rows later
SOME = ("gaussian", "heavy-tailed", "growing", "copies", *LET_GO_LATER)


def queries(rng: np.random.Generator, K: Float) -> Float:
    """Random queries, and for every other row the worst one of a key of its prefix."""
    Q = rng.standard_normal(K.shape)
    for t in range(1, len(K), 2):
        U, s, Vt = np.linalg.svd(K[: t + 1], full_matrices=False)
        live = s > 1e-13 * s[0] if s[0] else np.zeros(len(s), bool)
        Q[t] = (U[rng.integers(0, t + 1), live] / s[live]) @ Vt[live]
    return np.asarray(Q)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("storage", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("kind", SOME)
def test_promises_hold(kind: str, storage: str, masked: bool) -> None:
    """Masked keys and values are not looked at; with the mean of what is left out outputs are nearer."""
    rng = named_rng(kind)
    K = rounded(KINDS[kind](rng), storage)
    mask = rng.random(N) < 0.8 if masked else np.ones(N, bool)
    V = (rng.standard_normal((N, 2)) + 5) * 1e200
    case = Case(kind, 0, K, queries(rng, np.where(mask[:, None], K, 0)), V, 0.05, mask, storage)
    K, V = stored(np.where(mask[:, None], K, np.nan), storage, "C"), np.where(mask[:, None], V, np.nan)
    truth = Truth(case.present, case.queries)
    for epsilon in (0.3, 0.05):
        found = levattn.causal_heavy_attention(case.queries, K, epsilon, mask=mask if masked else None)
        outputs = found.apply(V), found.apply(V, compensate="mean")
        assert list(judge_heavy(replace(case, epsilon=epsilon), truth, (found, *outputs), causal=True)) == []
        assert found.error.max() <= 2.5e-9
        assert found.universal is None
        np.testing.assert_allclose(found.captured_mass + found.residual_mass, found.normalizers > 0, rtol=1e-12)
        assert kind in LET_GO_LATER or found.alive.max() <= D / epsilon
    if kind == "heavy-tailed" and not masked:
        A = naive.attention(case.queries, case.present)
        A = np.tril(A) / np.tril(A).sum(axis=1, keepdims=True)
        plain, compensated = (np.linalg.norm(Y / 1e200 - A @ case.values / 1e200, axis=1) for Y, _ in outputs)
        assert np.median(compensated) <= np.median(plain) / 3


@pytest.mark.parametrize("storage", ["torch-bfloat16", "strict-float32"])
def test_arrays_of_other_libraries(storage: str) -> None:
    Q, K = np.random.default_rng(0).standard_normal((2, N, D))
    keys = STORAGE[storage](K)
    found, expected = (levattn.causal_heavy_attention(Q, given, 0.05) for given in (keys, as_float64(keys)))
    np.testing.assert_allclose(found.entries.toarray(), expected.entries.toarray(), rtol=1e-9)


def test_the_scale_of_queries_and_keys_changes_nothing() -> None:
    Q, K = np.random.default_rng(0).standard_normal((2, N, D))
    found, scaled = (
        levattn.causal_heavy_attention(Q * of_queries, K * of_keys, 0.1)
        for of_queries, of_keys in ((1, 1), (1e150, 1e-140))
    )
    np.testing.assert_allclose(scaled.entries.toarray(), found.entries.toarray(), rtol=1e-9)


@pytest.mark.parametrize("n", [0, 1, 2, 255, 256, 257])
def test_few_rows(n: int) -> None:
    Q, K = np.random.default_rng(n).standard_normal((2, n, 3))
    found = levattn.causal_heavy_attention(Q, K, 0.2)
    assert found.entries.shape == (n, n)
    assert list(entries_hold(Truth(K, Q), found.entries.toarray(), 0.2, 0.0, causal=True)) == []


def test_wrong_arguments() -> None:
    K: Any = np.random.default_rng(0).standard_normal((20, 3))
    with pytest.raises(ValueError, match="Q has 5 rows and K has 20; expected as many queries as keys"):
        levattn.causal_heavy_attention(K[:5], K, 0.1)
    with pytest.raises(ValueError, match="the same number d"):
        levattn.causal_heavy_attention(K[:, :2], K, 0.1)
    with pytest.raises(ValueError, match="0 < epsilon <= 1"):
        levattn.causal_heavy_attention(K, K, 0.0)
    bad = K.copy()
    bad[7, 1] = np.inf
    with pytest.raises(NonFiniteError, match=r"K holds.*7"):
        levattn.causal_heavy_attention(K, bad, 0.1)
    with pytest.raises(NonFiniteError, match=r"Q holds.*7"):
        levattn.causal_heavy_attention(bad, K, 0.1)
