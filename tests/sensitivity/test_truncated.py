"""Scores of the best approximation of some rank, and the coherence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import levattn
import naive
import strategies
from strategies import Float

RNG = np.random.default_rng(0)
TALL = RNG.standard_normal((60, 6)) * [1, 2, 3, 1e-5, 5, 1e3]
KEYS = {
    "tall": TALL,
    "wide": np.where(RNG.random((8, 30)) < 0.3, RNG.standard_normal((8, 30)), 0.0),
    "deficient": np.hstack([TALL, 2 * TALL[:, :3], np.zeros((60, 1))]),
    "ill-conditioned": TALL @ np.vander(np.linspace(0, 1, 6)) * np.geomspace(1, 1e-7, 6),
}


def by_svd(K: Float, k: int) -> Float:
    """Squared row norms of the first k left singular vectors."""
    return np.asarray(np.sum(np.linalg.svd(K, full_matrices=False)[0][:, :k] ** 2, axis=1))


@pytest.mark.parametrize("stored", [np.asarray, strategies.csr])
@pytest.mark.parametrize("kind", KEYS)
def test_scores_of_a_rank(kind: str, stored: Any) -> None:
    K = KEYS[kind]
    whole = naive.rank_exact(K)
    s = np.linalg.svd(K, compute_uv=False)
    for k in range(1, whole + 2):
        scores = levattn.leverage_scores(stored(K), rank=k)
        if k >= whole:
            np.testing.assert_allclose(scores, naive.leverage_exact(K), rtol=1e-6)
            continue
        error = 2.0**-53 * 10 * K.shape[1] * s[0] ** 2 / (s[k - 1] * (s[k - 1] - s[k]))
        np.testing.assert_allclose(scores, by_svd(K, k), atol=error)
        np.testing.assert_allclose(scores.sum(), k, rtol=1e-6)


def test_options() -> None:
    w, mask = RNG.random(60), np.arange(60) % 4 > 0
    found = levattn.leverage_scores(TALL, rank=2, weights=w, mask=mask)
    np.testing.assert_allclose(found[mask], by_svd(np.sqrt(w)[mask, None] * TALL[mask], 2), atol=1e-12)
    assert not found[~mask].any()
    centered = levattn.leverage_scores(TALL + 100, rank=3, center=True)
    np.testing.assert_allclose(centered, by_svd(TALL - TALL.mean(axis=0), 3), atol=1e-9)
    single = levattn.leverage_scores(np.stack([TALL, 3 * TALL]).astype(np.float32), rank=1)
    assert (single.shape, single.dtype) == ((2, 60), np.dtype(np.float32))
    np.testing.assert_allclose(single, np.stack([by_svd(TALL, 1)] * 2), atol=1e-6)
    for power in (-900, 900):
        far = levattn.leverage_scores(np.ldexp(TALL, power), rank=4)
        np.testing.assert_allclose(far, by_svd(TALL, 4), atol=1e-9)
    assert levattn.leverage_scores(np.zeros((4, 2)), rank=1).tolist() == [0.0] * 4


def test_refusals() -> None:
    for K in (np.eye(4), np.eye(3, 5)):
        with pytest.raises(ValueError, match="rank is 2, and singular values 2 and 3 of K are equal"):
            levattn.leverage_scores(K, rank=2)
    for options in ({"ridge": 1.0}, {"relative_ridge": 1.0}, {"rtol": 0.1}):
        with pytest.raises(ValueError, match="rank is given with"):
            levattn.leverage_scores(TALL, rank=2, **options)
    with pytest.raises(ValueError, match="rank is 2; expected None"):
        levattn.leverage_scores(TALL, rank=2, method="osnap")
    with pytest.raises(ValueError, match="rank is 0"):
        levattn.leverage_scores(TALL, rank=0)
    with pytest.raises(ValueError, match="NaN"):
        levattn.leverage_scores(np.full((2, 3), np.nan), rank=1)


@pytest.mark.parametrize("stored", [np.asarray, strategies.csr])
@pytest.mark.parametrize("kind", KEYS)
def test_coherence_is_the_largest_score(kind: str, stored: Any) -> None:
    K = KEYS[kind]
    found = levattn.coherence(stored(K))
    assert isinstance(found, float)
    np.testing.assert_allclose(found, naive.leverage_exact(K).max(), rtol=1e-6)


def test_coherence_of_batches() -> None:
    K = RNG.standard_normal((2, 3, 30, 4)).astype(np.float32)
    found = levattn.coherence(K, center=True)
    np.testing.assert_allclose(found, levattn.leverage_scores(K.astype(float), center=True).max(axis=-1), rtol=1e-9)
    assert levattn.coherence(np.zeros((0, 3))) == 0
    weighted = levattn.coherence(TALL, weights=np.arange(60))
    np.testing.assert_allclose(weighted, levattn.leverage_scores(TALL, weights=np.arange(60)).max(), rtol=1e-9)
