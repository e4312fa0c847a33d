"""Scores of keys with weights: those of the keys times the roots of their weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import levattn
import naive
import strategies
from levattn.sketch import OSNAP, SRHT, CountSketch, GaussianJL
from levattn.states import Moments
from strategies import Float

RNG = np.random.default_rng(0)
TALL = RNG.standard_normal((60, 5)) * [1, 3, 1e-2, 1e2, 1]
DUMMIES = np.eye(9)[RNG.integers(0, 5, 300)] + np.eye(9)[RNG.integers(5, 9, 300)]
KEYS = {
    "tall": TALL,
    "deficient": np.hstack([TALL, TALL[:, :2] * 2]),
    "dummies": DUMMIES,
    "dummies in odd units": DUMMIES * np.geomspace(0.1, 300, 9),
    "wide": np.where(RNG.random((6, 40)) < 0.2, 2.0, 0.0),
    "wide copies": np.repeat(RNG.integers(-1, 2, (4, 30)), 2, axis=0).astype(float),
}


def weights_of(K: Float, seed: int = 1) -> Float:
    """Positive weights over six decades, and some zeros."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(len(K)) < 0.2, 0.0, 10 ** rng.uniform(-3, 3, len(K)))


def times(w: Float, K: Float) -> Float:
    return np.asarray(np.sqrt(w)[..., None] * K)


@pytest.mark.parametrize("stored", [np.asarray, strategies.csr])
@pytest.mark.parametrize("options", [{}, {"ridge": 2.0}, {"relative_ridge": 0.3}], ids=str)
@pytest.mark.parametrize("kind", KEYS)
def test_scores_are_those_of_the_weighted_keys(kind: str, options: dict[str, Any], stored: Any) -> None:
    K = KEYS[kind]
    w = weights_of(K)
    if options:
        expected = naive.leverage_exact(times(w, K), **options)
    else:  # powers of four have exact roots, so that dependent columns stay so
        w = 4.0 ** np.round(np.log2(np.where(w > 0, w, 1)) / 2) * (w > 0)
        expected = naive.leverage_exact(times(w, K))
    for method in ("auto", "gram", "qr") if stored is strategies.csr else ("auto", "gram", "qr", "svd"):
        scores = levattn.leverage_scores(stored(K), weights=w, method=method, **options)
        np.testing.assert_allclose(scores, expected, rtol=1e-9, atol=1e-15)
    assert not scores[w == 0].any()
    found = levattn.effective_dimension(stored(K), weights=w, **options)
    np.testing.assert_allclose(found, expected.sum(), rtol=1e-9)


@strategies.examples(30)
@given(strategies.spoilt(30, 6), st.integers(0, 2**32 - 1))
def test_hostile_keys(K: Float, seed: int) -> None:
    w = 4.0 ** np.random.default_rng(seed).integers(-3, 4, len(K)) * (np.random.default_rng(seed).random(len(K)) < 0.8)
    expected = naive.leverage_exact(times(w, K))
    np.testing.assert_allclose(levattn.leverage_scores(K, weights=w), expected, rtol=1e-6, atol=1e-14)


@pytest.mark.parametrize("method", [CountSketch(40), OSNAP(40), SRHT(64), GaussianJL(9), (OSNAP(40), GaussianJL(9))])
def test_sketches_of_weighted_keys(method: Any) -> None:
    w = weights_of(TALL)
    np.testing.assert_allclose(
        levattn.leverage_scores(TALL, weights=w, method=method),
        levattn.leverage_scores(times(w, TALL), method=method),
        rtol=1e-10,
    )


def test_weights_of_whole_numbers_count_copies() -> None:
    counts = np.arange(60) % 4
    repeated = levattn.leverage_scores(np.repeat(TALL, counts, axis=0))
    sums = np.zeros(60)
    np.add.at(sums, np.repeat(np.arange(60), counts), repeated)
    np.testing.assert_allclose(levattn.leverage_scores(TALL, weights=counts), sums, rtol=1e-10)


def test_batches_masks_and_other_dtypes() -> None:
    K = RNG.standard_normal((2, 3, 50, 4)).astype(np.float32)
    w = RNG.random((3, 50)) + 0.1
    expected = levattn.leverage_scores(times(w, K.astype(np.float64)))
    found = levattn.leverage_scores(K, weights=w)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    mask = np.arange(50)[None, None] % 5 > 0
    dirty = np.where(mask[..., None] & (np.arange(50) > 3)[:, None], K, np.nan)  # rows of weight 0 are not read
    w[:, :4] = 0
    dirty_weights = np.where(mask[0], w, -1.0)  # nor weights of masked rows
    kept = np.flatnonzero(mask[0, 0] & (np.arange(50) > 3))
    found = levattn.leverage_scores(dirty, weights=dirty_weights, mask=mask)
    np.testing.assert_allclose(found[..., kept], levattn.leverage_scores(times(w, K)[:, :, kept]), rtol=1e-5)
    assert np.count_nonzero(found) == 6 * len(kept)
    assert not levattn.leverage_scores(K, weights=0).any()
    np.testing.assert_array_equal(levattn.leverage_scores(K, weights=3), levattn.leverage_scores(K, weights=0.75))


def test_statistics_means_the_same() -> None:
    """Weights, λ and degrees of freedom are those of least squares in statsmodels and scikit-learn."""
    models = pytest.importorskip("statsmodels.api")
    linear = pytest.importorskip("sklearn.linear_model")
    y, w = RNG.standard_normal(60), RNG.random(60) + 0.1
    hat = models.GLM(y, TALL, var_weights=w).fit().get_hat_matrix_diag()
    fitted = models.WLS(y, TALL, weights=w).fit()
    np.testing.assert_allclose(levattn.leverage_scores(TALL, weights=w), hat, rtol=1e-8)
    assert levattn.effective_dimension(TALL, weights=w) == pytest.approx(fitted.df_model + fitted.k_constant)
    for ridge in (1e-2, 3.0, 1e3):
        model = linear.Ridge(alpha=ridge, fit_intercept=False, solver="cholesky")
        predictions = model.fit(TALL, np.eye(60), sample_weight=w).predict(TALL)
        np.testing.assert_allclose(
            levattn.leverage_scores(TALL, weights=w, ridge=ridge), np.diag(predictions), rtol=1e-6, atol=1e-12
        )
        trace = np.trace(predictions)
        assert levattn.effective_dimension(TALL, weights=w, ridge=ridge) == pytest.approx(trace, rel=1e-6)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    w = weights_of(TALL)
    found = levattn.leverage_scores(torch.tensor(TALL), weights=torch.tensor(w))
    assert isinstance(found, torch.Tensor)
    np.testing.assert_allclose(found.numpy(), levattn.leverage_scores(TALL, weights=w), rtol=1e-12)


def test_weights_far_from_one() -> None:
    w = weights_of(TALL)
    expected = levattn.leverage_scores(TALL, weights=w)
    for power in (-600, 600):
        np.testing.assert_array_equal(levattn.leverage_scores(TALL, weights=np.ldexp(w, power)), expected)
        far = levattn.leverage_scores(TALL, weights=np.ldexp(w, power), ridge=2.0**power)
        np.testing.assert_allclose(far, levattn.leverage_scores(TALL, weights=w, ridge=1.0), rtol=1e-12)
    spread = np.where(np.arange(60) == 7, 1e-170, 1.0)
    alone = np.where((np.arange(60) == 7)[:, None], np.eye(1, 6, 5), np.pad(TALL, ((0, 0), (0, 1))))
    assert levattn.leverage_scores(alone, weights=spread)[7] == 1  # alone in its direction, whatever its weight


def test_the_sum_of_chunks_has_the_same_scores() -> None:
    w = weights_of(TALL)
    state = Moments(5).update(TALL[:20], weights=w[:20]).update(TALL[20:], weights=w[20:])
    np.testing.assert_allclose(state.result(), TALL.T @ (w[:, None] * TALL), rtol=1e-12)
    found = [np.sum(w[j] * TALL[j] @ np.linalg.inv(state.result()) * TALL[j]) for j in range(60)]
    np.testing.assert_allclose(levattn.leverage_scores(TALL, weights=w), found, rtol=1e-6)


@pytest.mark.parametrize(
    ("weights", "error", "words"),
    [
        (-np.ones(60), ValueError, r"weights\[0\] is -1; expected finite numbers of at least 0"),
        (np.r_[np.ones(59), np.nan], ValueError, r"weights\[59\] is nan"),
        (np.full(60, np.inf), ValueError, r"weights\[0\] is inf"),
        (np.ones(59), ValueError, r"shape \(59,\); expected one that broadcasts to \(60,\)"),
        (np.ones(60, bool), TypeError, "bool"),
        (["a"] * 60, TypeError, "dtype"),
        (np.geomspace(1e-250, 1, 60), ValueError, r"at most 2\^600"),
    ],
)
def test_refusals(weights: Any, error: type[Exception], words: str) -> None:
    for function in (levattn.leverage_scores, levattn.effective_dimension):
        with pytest.raises(error, match=words):
            function(TALL, weights=weights)


def test_weights_and_center_do_not_go_together() -> None:
    w = weights_of(TALL)
    with pytest.raises(ValueError, match="append a column of ones"):
        levattn.leverage_scores(TALL, weights=w, center=True)
    mean = w @ TALL / w.sum()
    expected = naive.leverage_svd(times(w, TALL - mean))
    found = levattn.leverage_scores(np.hstack([TALL, np.ones((60, 1))]), weights=w) - w / w.sum()
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
