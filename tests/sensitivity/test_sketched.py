"""Approximate scores with bounds: exact scores lie between them, and the distortion is that of the sketch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import levattn
import naive
import strategies
from levattn.sketch import OSNAP, SRHT, CountSketch, GaussianJL
from strategies import Float

RNG = np.random.default_rng(0)
TALL = RNG.standard_normal((600, 6)) * [1, 2, 3, 1e-3, 5, 1e3]
KEYS = {
    "tall": TALL,
    "deficient": np.hstack([TALL, 2 * TALL[:, :3]]),
    "a key alone": np.vstack([np.pad(TALL, ((0, 0), (0, 1))), np.eye(1, 7, 6)]),
    "heavy tails": RNG.standard_normal((600, 4)) * np.abs(RNG.standard_cauchy((600, 1))),
}
METHODS = [CountSketch(80, seed=1), OSNAP(60, seed=2), SRHT(64, seed=3), GaussianJL(8, seed=4)]


@pytest.mark.parametrize("method", [*METHODS, (OSNAP(60), GaussianJL(8)), "osnap", "jl"], ids=str)
@pytest.mark.parametrize("kind", KEYS)
def test_exact_scores_lie_between_the_bounds(kind: str, method: Any) -> None:
    K = KEYS[kind]
    exact = naive.leverage_exact(K)
    for stored in (np.asarray, strategies.csr):
        found = levattn.sketched_scores(stored(K), method)
        assert (found.lower <= exact * (1 + 1e-9)).all()
        assert (exact <= found.upper * (1 + 1e-9)).all()
        assert found.failure == 1e-6
        np.testing.assert_allclose(found.scores, levattn.leverage_scores(stored(K), method=method), rtol=1e-6)
        if isinstance(method, GaussianJL):
            assert found.distortion < 1e-9


def distortion_of(sketch: Any, K: Float) -> float:
    """The largest relative change of squared norms in the column space, from the sketch of its orthonormal basis."""
    U = np.linalg.svd(K / np.linalg.norm(K, axis=0), full_matrices=False)[0]
    s = np.linalg.svd(levattn.sketch.Sketch(sketch).apply(U), compute_uv=False) ** 2
    return float(max(s[0] - 1, 1 - s[-1]))


@pytest.mark.parametrize("method", METHODS[:3], ids=str)
def test_the_distortion_is_that_of_the_sketch(method: Any) -> None:
    found = levattn.sketched_scores(TALL, method)
    np.testing.assert_allclose(found.distortion, distortion_of(method, TALL), rtol=1e-6)
    ratio = found.scores / levattn.leverage_scores(TALL)
    eta = found.distortion
    assert ratio.max() <= 1 / (1 - eta) * (1 + 1e-9) if eta < 1 else True
    assert ratio.min() >= 1 / (1 + eta) * (1 - 1e-9)


def test_more_columns_than_are_factored() -> None:
    K = RNG.standard_normal((3000, 330))
    found, exact = levattn.sketched_scores(K, OSNAP(1200)), levattn.leverage_scores(K)
    assert ((found.lower <= exact) & (exact <= found.upper)).all()
    assert distortion_of(OSNAP(1200), K) <= found.distortion < 20


@pytest.mark.parametrize("method", ["srht", "osnap", "countsketch", "jl"])
@pytest.mark.parametrize("power", [-135, 0, 122])
def test_scores_are_those_of_multiples(method: str, power: int) -> None:
    K = np.random.default_rng(0).integers(-16, 17, (300, 4)).astype(np.float32)
    mask = np.arange(300) > 50
    found = levattn.sketched_scores(np.ldexp(K, power), method, mask=mask)
    expected = levattn.sketched_scores(K.astype(float), method, mask=mask)
    for name in ("scores", "lower", "upper"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-4)
    scores = levattn.leverage_scores(np.ldexp(K, power), method=method, mask=mask)
    np.testing.assert_allclose(scores, expected.scores, rtol=1e-4)


@pytest.mark.parametrize("method", ["osnap", "jl"])
def test_scores_below_the_range_of_their_products_have_bounds(method: str) -> None:
    K = np.array([[1.0, 0.0], [1e-28, 1e-28], [0.0, 0.0], [0.0, 1.0]], np.float32)
    found = levattn.sketched_scores(K, method)
    assert 1e-56 < found.upper[1] < 1e-30
    assert found.lower[1] == found.upper[2] == 0


def test_a_sketch_that_cancels_keys_bounds_all_but_zero_and_masked_ones_by_1() -> None:
    K = np.array([[3.0], [-3.0], [0.0], [5.0]])
    method = next(
        m for m in (CountSketch(1, seed=seed) for seed in range(9)) if not levattn.sketch.Sketch(m).apply(K[:2])
    )
    found = levattn.sketched_scores(K, method, mask=np.arange(4) < 3)
    np.testing.assert_array_equal(found.scores, [1, 1, 0, 0])
    np.testing.assert_array_equal(found.upper, [1, 1, 0, 0])
    np.testing.assert_array_equal(levattn.leverage_scores(K, method=method, mask=np.arange(4) < 3), found.scores)


def test_masked_keys_have_no_bound_above_0_where_no_number_bounds_scores() -> None:
    K, mask = np.random.default_rng(0).standard_normal((9, 6)) * 1e-310, np.arange(9) % 2 == 0
    found = levattn.sketched_scores(K, "srht", mask=mask)
    np.testing.assert_array_equal(found.upper, mask)


def test_batches_masks_weights_and_lost_directions() -> None:
    K = np.stack([TALL, TALL[::-1]]).astype(np.float32)
    mask, w = np.arange(600)[None] % 3 > 0, RNG.random(600)
    found = levattn.sketched_scores(K, OSNAP(60), mask=mask, weights=w)
    exact = levattn.leverage_scores(K.astype(float), mask=mask, weights=w)
    assert (found.scores.shape, found.distortion.shape) == ((2, 600), (2,))
    assert ((found.lower <= exact * (1 + 1e-6)) & (exact <= found.upper * (1 + 1e-6))).all()
    centered = levattn.sketched_scores(TALL, OSNAP(60), center=True)
    exact = levattn.leverage_scores(TALL, center=True)
    assert ((centered.lower <= exact) & (exact <= centered.upper)).all()
    lost = np.zeros((100, 2))
    lost[:98, 0], lost[98:, 1] = 1, [1, -1]
    seeds = [levattn.sketched_scores(lost, CountSketch(2, seed=seed)) for seed in range(20)]
    for found in seeds:
        exact = levattn.leverage_scores(lost)
        assert ((found.lower <= exact * (1 + 1e-9)) & (exact <= found.upper * (1 + 1e-9))).all()
    assert any(np.isinf(found.distortion) for found in seeds)


DEPENDENT = {
    "three distinct keys": (np.repeat(RNG.standard_normal((3, 6)), 50, axis=0), {}),
    "a sum of columns": (RNG.integers(-3, 4, (500, 3)) @ np.array([[1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 0]]), {}),
    "two keys less their mean": (RNG.standard_normal((2, 3)), {"center": True}),
    "four keys less their mean, copied": (np.tile(RNG.standard_normal((4, 6)), (30, 1)), {"center": True}),
    "weights": (np.tile(RNG.standard_normal((4, 8)), (5, 1)), {"weights": np.tile(RNG.random(4), 5)}),
}


@pytest.mark.parametrize("method", METHODS[:3], ids=str)
@pytest.mark.parametrize("storage", ["float64", "float32", "float16"])
@pytest.mark.parametrize("kind", DEPENDENT)
def test_dependent_columns(kind: str, storage: str, method: Any) -> None:
    given, options = DEPENDENT[kind]
    K = given.astype(storage)
    exact = levattn.leverage_scores(K.astype(float), **options)
    for stored in (np.asarray, strategies.csr) if storage != "float16" else (np.asarray,):
        found = levattn.sketched_scores(stored(K), method, **options)
        assert (found.lower <= exact * (1 + 1e-9)).all()
        assert (exact <= found.upper * (1 + 1e-9)).all()
        # sums rounded to float32 would have more directions than the keys: each key would count as 1
        assert np.isfinite(found.distortion)
        assert found.scores.sum() < 2 * exact.sum() + 1e-6


def test_refusals() -> None:
    with pytest.raises(ValueError, match="method is 'qr', which is exact"):
        levattn.sketched_scores(TALL, "qr")
    with pytest.raises(ValueError, match="method is 'sketch'"):
        levattn.sketched_scores(TALL, "sketch")
    with pytest.raises(ValueError, match="at least d = 6 rows"):
        levattn.sketched_scores(TALL, OSNAP(4))


def test_bounds_of_keys_that_depend_on_each_other_but_for_the_last_digits() -> None:
    K = np.outer([0.0, 3, 2, 0, 2, -4, -3, -1], [2.0, 2, 1, 1])
    K[5, 0] += 281475 * 2.0**-48  # a direction of its own, of which the normalizer has few digits
    exact = naive.leverage_exact(K)
    for seed in (*range(20), 900222):
        found = levattn.sketched_scores(K, SRHT(32, seed=seed))
        assert np.all(found.lower <= exact + 1e-9)
        assert np.all(found.upper >= exact - 1e-9)


def test_scores_that_are_raised_bound_from_one_side() -> None:
    K = np.array([[1.0, 1.0], [1e38, 1e38], [0.0, 1.0]])  # the first score is 5e-77
    found = levattn.sketched_scores(K, GaussianJL(8))
    assert found.lower[0] <= naive.leverage_exact(K)[0] <= found.upper[0]
