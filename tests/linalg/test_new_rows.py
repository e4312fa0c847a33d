"""Scores and cross-leverage of rows that need not be among the keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import levattn
import naive
import strategies
from levattn.sketch import CountSketch
from levattn.states import Moments
from strategies import Float

RNG = np.random.default_rng(0)
TALL = RNG.standard_normal((200, 5)) * [1, 3, 1e-2, 1e2, 1]
NEW = RNG.standard_normal((9, 5))
DUMMIES = np.eye(9)[RNG.integers(0, 5, 300)] + np.eye(9)[RNG.integers(5, 9, 300)]


def beside(K: Float, row: Float) -> float:
    """The score τ of a row among the keys as τ/(1 − τ)."""
    tau = naive.leverage_exact(np.vstack([K, row]))[-1]
    return float(np.inf if tau == 1 else tau / (1 - tau))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_scores_of_new_rows(dtype: Any) -> None:
    K, new = TALL.astype(dtype), NEW.astype(dtype)
    found = levattn.universal_set(K, 0.1)
    expected = [beside(K, row) for row in new]
    for scores in (found.scores_of(new), found.factor.scores_of(new), Moments(5).update(K).factor().scores_of(new)):
        assert scores.dtype == np.float64
        np.testing.assert_allclose(scores, expected, rtol=1e-9)
    np.testing.assert_allclose(found.scores_of(K), naive.leverage_exact(K), rtol=1e-9)
    np.testing.assert_allclose(found.factor.forget_keys().scores_of(new), expected, rtol=1e-9)
    doubled = found.scores_of(2 * K[:3])
    np.testing.assert_allclose(doubled, 4 * naive.leverage_exact(K)[:3], rtol=1e-9)


@pytest.mark.parametrize("stored", [np.asarray, strategies.csr])
def test_rows_outside_the_row_space(stored: Any) -> None:
    """Of dependent columns, with a column of zeros: only rows that keep the relations are inside."""
    K = np.hstack([DUMMIES, np.zeros((300, 1)), DUMMIES[:, :1] * 3])
    found = levattn.universal_set(stored(K), 0.5)
    one, level = np.eye(11)[0] + 3 * np.eye(11)[10], np.eye(11)[1]
    inside = np.stack([K[7], K[7] - K[3], one + np.eye(11)[6], level + np.eye(11)[6]])
    np.testing.assert_allclose(found.scores_of(inside), [beside(K, row) for row in inside], rtol=1e-9)
    outside = np.stack([one, level, K[7] + np.eye(11)[9], K[7] + 1e-6 * level, K[7] + 1e-6 * np.eye(11)[10]])
    assert found.scores_of(outside).tolist() == [np.inf] * 5
    if stored is strategies.csr:
        np.testing.assert_allclose(found.scores_of(strategies.csr(inside)), found.scores_of(inside), rtol=1e-12)


def test_keys_with_fewer_rows_than_columns() -> None:
    K = RNG.integers(-3, 4, (4, 9)).astype(float)
    K[3] = K[0] + K[1]
    rows = np.vstack([K, 2 * K[0] - K[2], K[0] + np.eye(9)[0], np.eye(9)])
    for keys in (K, np.stack([K, 2 * K])):
        found = levattn.universal_set(keys, 0.5).factor.scores_of(np.broadcast_to(rows, (*keys.shape[:-2], 15, 9)))
        expected = [beside(K, row) for row in rows]
        np.testing.assert_allclose(found if keys.ndim == 2 else found[0], expected, rtol=1e-9)
    np.testing.assert_allclose(found[1], np.array(expected) / 4, rtol=1e-9)
    with pytest.raises(ValueError, match="sparse, with fewer rows"):
        levattn.universal_set(strategies.csr(K), 0.5).scores_of(rows)


@pytest.mark.parametrize("keys", [np.zeros((0, 2)), np.zeros((3, 2))], ids=["none", "zeros"])
def test_cross_leverage_of_rows_outside_a_space_of_nothing(keys: Any) -> None:
    """There is no whitened column that could hold NaN."""
    found = levattn.universal_set(keys, 0.1).factor.cross_leverage(np.array([[1.0, 0], [0, 0]]))
    np.testing.assert_array_equal(found, [[np.nan, np.nan], [np.nan, 0]])


@pytest.mark.parametrize("dtype", ["f8", "f4"])
@pytest.mark.parametrize("n", [1, 3])
def test_fewer_weighted_keys_than_columns_lie_in_their_row_space(n: int, dtype: str) -> None:
    """Products with roots of weights are rounded, and would span another space."""
    K = np.random.default_rng(0).standard_normal((n, 4)).astype(dtype)
    weights = np.arange(3.0, 3 + n)
    factor = levattn.universal_set(K, 0.1, weights=weights).factor
    np.testing.assert_allclose(factor.scores_of(K), 1 / weights, rtol=1e-6)
    assert np.isinf(factor.scores_of(np.eye(4, dtype=dtype))).all()


@pytest.mark.parametrize("center", [False, True])
def test_cross_leverage_is_the_hat_matrix(center: bool) -> None:
    for K in (TALL, DUMMIES, RNG.standard_normal((4, 9))):
        factor = levattn.universal_set(K, 0.1, center=center).factor
        X = K - K.mean(axis=0) if center else K
        U, s, _ = np.linalg.svd(X / np.linalg.norm(X, axis=0), full_matrices=False)
        U = U[:, s > 1e-12 * s[0]]
        hat = U @ U.T
        np.testing.assert_allclose(factor.cross_leverage(K), hat, atol=1e-12)
        np.testing.assert_allclose(factor.cross_leverage(K[:3], K[2:]), hat[:3, 2:], atol=1e-12)
        np.testing.assert_allclose(np.diag(factor.cross_leverage(K)), factor.scores_of(K), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("lengths", [(1e-200, 1e200), (1e-5, 1e150), (1e-300, 1e160)])
def test_scores_beyond_the_range_are_infinite(lengths: tuple[float, float]) -> None:
    """Their squares are, and so may be products that cancel; a row that is not finite has no score."""
    K, new = TALL * lengths[0], NEW * lengths[1]
    unknown = np.array([[np.nan, 0, 0, 0, 0]])
    for factor in (levattn.universal_set(K, 0.1).factor, Moments(5).update(K).factor()):
        with np.errstate(all="ignore"):
            scores = factor.scores_of(np.vstack([new, K[:2], unknown]))
        assert scores[:9].tolist() == [np.inf] * 9
        np.testing.assert_allclose(scores[9:11], naive.leverage_exact(TALL)[:2], rtol=1e-9)
        assert np.isnan(scores[11])
    batch = levattn.universal_set(np.stack([TALL, K]), 0.1).factor.scores_of(np.stack([NEW, new]))
    np.testing.assert_allclose(batch, [[beside(TALL, row) for row in NEW], [np.inf] * 9], rtol=1e-9)


def test_batches_and_rows_outside() -> None:
    K = RNG.standard_normal((2, 3, 40, 4))
    K[..., 3] = K[..., 0]
    factor = levattn.universal_set(K, 0.5).factor
    rows = K[:, :, :5].copy()
    rows[1, 2, 4, 3] += 1
    scores, cross = factor.scores_of(rows), factor.cross_leverage(rows)
    assert (scores.shape, cross.shape) == ((2, 3, 5), (2, 3, 5, 5))
    assert np.argwhere(np.isinf(scores)).tolist() == [[1, 2, 4]]
    outside = np.isnan(cross)
    assert outside[1, 2, 4].all()
    assert outside[1, 2, :, 4].all()
    assert outside.sum() == 9
    expected = levattn.leverage_scores(K)[:, :, :5]
    np.testing.assert_allclose(scores[0], expected[0], rtol=1e-9)


def test_refusals() -> None:
    found = levattn.universal_set(TALL, 0.1)
    for rows, words in ((NEW[:, :4], "4 columns; expected 1 of 5"), (np.stack([NEW, NEW]), "2 matrices")):
        with pytest.raises(ValueError, match=words):
            found.scores_of(rows)
        with pytest.raises(ValueError, match=words):
            found.factor.cross_leverage(NEW, rows)
    with pytest.raises(TypeError, match="X"):
        found.scores_of("rows")
    wide = RNG.standard_normal((3000, 400))
    sketched = levattn.universal_set(wide, 0.9, method=CountSketch(2000))
    with pytest.raises(ValueError, match="rechecked"):
        sketched.scores_of(wide[:3])


def test_torch_rows() -> None:
    torch = pytest.importorskip("torch")
    found = levattn.universal_set(torch.tensor(TALL), 0.1)
    scores = found.scores_of(torch.tensor(NEW))
    assert isinstance(scores, torch.Tensor)
    np.testing.assert_allclose(scores.numpy(), levattn.universal_set(TALL, 0.1).scores_of(NEW), rtol=1e-12)
