"""Scores with a ridge, λ itself or relative to the keys, and their sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import levattn
import naive
import strategies
from strategies import Float

METHODS = ("auto", "gram", "qr", "svd")
TALL = np.random.default_rng(0).standard_normal((60, 5)) * [1, 3, 1e-3, 1e3, 1]
WIDE = np.where(np.random.default_rng(1).random((6, 40)) < 0.2, 2.0, 0.0)
KEYS = {
    "tall": TALL,
    "deficient": np.hstack([TALL, TALL[:, :2]]),
    "a column of zeros": np.hstack([TALL, np.zeros((60, 1))]),
    "wide": WIDE,
    "zeros": np.zeros((4, 3)),
    "dummies": np.eye(7)[np.arange(50) % 4] + np.eye(7)[4 + np.arange(50) // 3 % 3],
}  # fmt: skip


@pytest.mark.parametrize("stored", [np.asarray, strategies.csr])
@pytest.mark.parametrize("ridge", [1e-6, 1.0, 3, 1e7])
@pytest.mark.parametrize("kind", KEYS)
def test_ridge_is_the_number_that_is_added_to_the_gram_matrix(kind: str, ridge: float, stored: Any) -> None:
    K = KEYS[kind]
    expected = naive.leverage_exact(K, ridge=ridge)
    for method in METHODS if stored is np.asarray else METHODS[:3]:
        scores = levattn.leverage_scores(stored(K), method=method, ridge=ridge)
        np.testing.assert_allclose(scores, expected, rtol=1e-9, atol=1e-15)
    singular = np.linalg.svd(K, compute_uv=False) ** 2
    found = levattn.effective_dimension(stored(K), ridge=ridge)
    assert isinstance(found, float)
    np.testing.assert_allclose(found, np.sum(singular / (singular + ridge)), rtol=1e-9, atol=1e-15)


@strategies.examples(30)
@given(strategies.spoilt(30, 6), st.sampled_from([1e-3, 1.0, 50.0]), st.booleans())
def test_hostile_keys(K: Float, ridge: float, center: bool) -> None:
    expected = naive.leverage_exact(K, ridge=ridge, center=center)
    np.testing.assert_allclose(levattn.leverage_scores(K, ridge=ridge, center=center), expected, rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("stored", [np.asarray, strategies.csr])
def test_a_ridge_that_leaves_the_range_of_the_squares(stored: Any) -> None:
    """The squares of the keys, or of λ beside them, are no float64 numbers."""
    far = stored(np.array([[1e200, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1e-200]]))
    np.testing.assert_allclose(levattn.leverage_scores(far, ridge=1.0), [1, 0.5, 0], rtol=1e-12, atol=1e-200)
    wide = stored(np.array([[1e200, 0.0, 0.0], [0.0, 1.0, 0.0]]))
    np.testing.assert_allclose(levattn.leverage_scores(wide, ridge=1.0), [1, 0.5], rtol=1e-12)
    tiny = stored(np.array([[1e-170, 0.0], [0.0, 1e-160]]))
    np.testing.assert_allclose(levattn.leverage_scores(tiny, ridge=1e-320), [0.0, 0.5], rtol=1e-3, atol=1e-15)


def test_a_ridge_in_the_units_of_the_keys_is_not_the_relative_one() -> None:
    scaled = levattn.leverage_scores(10 * TALL, ridge=100 * 3.0)
    np.testing.assert_allclose(scaled, levattn.leverage_scores(TALL, ridge=3.0), rtol=1e-9)
    relative = levattn.leverage_scores(10 * TALL, relative_ridge=3.0)
    np.testing.assert_allclose(relative, levattn.leverage_scores(TALL, relative_ridge=3.0), rtol=1e-9)
    size = np.sum(TALL**2) / 5
    np.testing.assert_allclose(relative, levattn.leverage_scores(TALL, ridge=3.0 * size), rtol=1e-9)


def test_effective_dimensions_of_batches() -> None:
    K = np.random.default_rng(5).standard_normal((2, 3, 40, 6)).astype(np.float32)
    mask = np.arange(40)[None, None] < 30
    for options in ({"ridge": 2.0}, {"relative_ridge": 0.3}, {"ridge": 2.0, "center": True, "mask": mask}):
        found = levattn.effective_dimension(K, **options)
        scores = levattn.leverage_scores(K.astype(np.float64), **options)
        assert (found.shape, found.dtype) == ((2, 3), np.dtype(np.float64))
        np.testing.assert_allclose(found, scores.sum(axis=-1), rtol=1e-9)
    assert levattn.effective_dimension(K).tolist() == np.full((2, 3), 6.0).tolist()
    assert levattn.effective_dimension(K[0, 0, :4], center=True) == 3
    falling = [levattn.effective_dimension(K[0, 0], ridge=ridge) for ridge in (0.0, 1e-3, 1.0, 1e3, 1e6)]
    assert falling == sorted(falling, reverse=True)
    assert levattn.effective_dimension(np.zeros((0, 3)), ridge=1.0) == 0
