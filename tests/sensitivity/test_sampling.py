"""Rows drawn by their scores: probabilities, weights, the promise of the theorem, and the measured distortion."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import levattn
import strategies
from levattn import definitions
from libraries import stored
from strategies import Float

RNG = np.random.default_rng(0)
TALL = RNG.standard_normal((400, 5)) * np.abs(RNG.standard_cauchy((400, 1))) * [1, 3, 1e-2, 1e2, 1]
DUMMIES = np.eye(9)[RNG.integers(0, 5, 300)] + np.eye(9)[RNG.integers(5, 9, 300)]
KEYS = {
    "tall": TALL,
    "deficient": np.hstack([TALL, TALL[:, :2] * 2]),
    "dummies": DUMMIES,
    "ill-conditioned": TALL @ np.vander(np.linspace(0, 1, 5)) * np.geomspace(1, 1e-9, 5),
    "wide": np.repeat(RNG.integers(-1, 2, (6, 30)), 3, axis=0).astype(float),
}


def ratios(K: Float, indices: Any, weights: Float, ridge: float = 0.0) -> tuple[float, float]:
    """The extremes of ``Σ w ⟨k, y⟩² + λ‖y‖²`` over ``‖K y‖² + λ‖y‖²``, by singular vectors of all rows."""
    rows = np.vstack([K, math.sqrt(ridge) * np.eye(K.shape[1])]) if ridge else K
    sizes = np.maximum(np.linalg.norm(rows, axis=0), 1e-300)
    U, s, _ = np.linalg.svd(rows / sizes, full_matrices=False)
    U = U[:, s > 1e-13 * s[0]]
    G = U[indices].T @ (weights[:, None] * U[indices]) + U[len(K) :].T @ U[len(K) :]
    found = np.linalg.eigvalsh(G)
    return float(found[0]), float(found[-1])


@pytest.mark.parametrize("stored", [np.asarray, strategies.csr])
@pytest.mark.parametrize("kind", KEYS)
def test_eigenvalues_are_those_of_the_sample_in_the_whitened_space(kind: str, stored: Any) -> None:
    K = KEYS[kind]
    for options in ({}, {"ridge": 2.0}, {"uniform": 0.5}, {"scores": np.sum(K**2, axis=1)}):
        sample = levattn.sample_rows(stored(K), 250, rng=3, **options)
        expected = ratios(K, sample.indices, sample.weights, options.get("ridge", 0.0))
        np.testing.assert_allclose(sample.eigenvalues, expected, rtol=1e-5, atol=1e-6)
        assert sample.distortion == max(1 - sample.eigenvalues[0], sample.eigenvalues[1] - 1)
        assert (sample.counts.sum(), len(sample)) == (250, len(np.unique(sample.indices)))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_masks_and_other_dtypes(dtype: Any) -> None:
    K = RNG.standard_normal((300, 4)).astype(dtype)
    w, mask = np.where(RNG.random(300) < 0.2, 0.0, RNG.random(300) + 0.1), np.arange(300) % 3 > 0
    sample = levattn.sample_rows(K, 100, weights=w, mask=mask, rng=1)
    assert (w[sample.indices] > 0).all()
    assert mask[sample.indices].all()
    whole = np.sqrt(np.where(mask, w, 0.0))[:, None] * K.astype(np.float64)
    np.testing.assert_allclose(
        sample.eigenvalues, ratios(whole, sample.indices, sample.weights / w[sample.indices]), rtol=1e-6
    )
    p = levattn.leverage_scores(whole)[sample.indices] / 4
    np.testing.assert_allclose(sample.probabilities, p, rtol=1e-6)
    np.testing.assert_allclose(sample.weights, w[sample.indices] * sample.counts / (100 * p), rtol=1e-6)


def test_draws_are_those_of_the_definition() -> None:
    scores = levattn.leverage_scores(TALL)
    sample = levattn.sample_rows(TALL, 200, rng=7)
    rows, weights = definitions.sample_rows(TALL, scores, 200, 7)
    assert np.repeat(sample.indices, sample.counts).tolist() == sorted(rows.tolist())
    sums = np.zeros(len(TALL))
    np.add.at(sums, rows, weights)
    np.testing.assert_allclose(sample.weights, sums[sample.indices], rtol=1e-9)
    given = levattn.sample_rows(TALL, 200, scores=scores * 1e300, rng=np.random.default_rng(7))
    again = levattn.sample_rows(TALL, 200, scores=scores, rng=np.random.default_rng(7))
    assert given.indices.tolist() == again.indices.tolist()


def test_sums_over_the_sample_are_unbiased() -> None:
    """The mean over many samples is the sum over all rows, within five standard errors."""
    K, y = RNG.standard_normal((60, 3)), np.array([1.0, -2.0, 0.5])
    for p, scores in ((2, None), (1, levattn.lewis_weights(K, 1))):
        sums = [
            np.sum(np.abs(levattn.sample_rows(K, 30, scores=scores, rng=i).rows(K, p) @ y) ** p) for i in range(400)
        ]
        error = np.std(sums) / math.sqrt(len(sums))
        assert abs(np.mean(sums) - np.sum(np.abs(K @ y) ** p)) < 5 * error


@pytest.mark.parametrize("kind", ["tall", "deficient", "dummies"])
def test_promised_distortions_hold(kind: str) -> None:
    """At most a share δ of samples may fail; 60 of 60 hold with probability (1 − δ)^60 or more, and δ is 10⁻³."""
    K = np.repeat(KEYS[kind], 10, axis=0)
    for options in ({}, {"uniform": 0.3}, {"ridge": 5.0}, {"scores": np.sum(K**2, axis=1) + 1e-3 * np.sum(K**2)}):
        for seed in range(15):
            sample = levattn.sample_rows(K, distortion=0.7, failure=1e-3, rng=seed, **options)
            assert sample.distortion <= 0.7
            assert sample.promised <= 0.7
            assert sample.failure == 1e-3
            if sample.promised:  # one draw less promises less
                assert levattn.sample_rows(K, sample.size - 1, failure=1e-3, **options).promised > 0.7


def test_size_of_the_theorem() -> None:
    for rank, eta, delta in ((1, 0.5, 0.1), (10, 0.1, 1e-3), (300, 0.9, 0.5)):
        m = levattn.sample_size(rank, eta, delta)
        exponent = (1 + eta) * math.log(1 + eta) - eta
        assert 2 * rank * math.exp(-m * exponent / rank) <= delta < 2 * rank * math.exp(-(m - 1) * exponent / rank)
        below = (1 - eta) * math.log(1 - eta) + eta  # the other tail is lighter
        assert below >= exponent
    assert levattn.sample_rows(np.repeat(TALL, 10, axis=0), distortion=0.5).size == levattn.sample_size(5, 0.5)


@pytest.mark.parametrize("eta", [1e-320, 1e-12, 9.9e-4, 1.01e-3])
@pytest.mark.parametrize("delta", [5e-324, 1e-250, 0.01])
def test_sizes_at_the_ends_of_the_range(eta: float, delta: float) -> None:
    assert levattn.sample_rows(TALL, distortion=eta, failure=delta).size == 400
    state = levattn.StreamingRowSample(distortion=eta, failure=delta)
    assert state.update(TALL).result().distortion < max(eta, 1e-12)  # rounding
    if eta == 1e-320:
        with pytest.raises(ValueError, match="more rows than float64 counts; expected a larger distortion"):
            levattn.sample_size(5, eta, delta)
        return
    m = levattn.sample_size(5, eta, delta)
    exact = Fraction(eta) ** 2 / 2 - Fraction(eta) ** 3 / 6 + Fraction(eta) ** 4 / 12 - Fraction(eta) ** 5 / 20
    logarithm = math.log(10) - math.log(delta)
    assert abs(m * float(exact) / (5 * logarithm) - 1) < 1e-9


@pytest.mark.parametrize("options", [{"size": 5000}, {"distortion": 0.5}, {"size": 9, "ridge": 1.0}], ids=repr)
def test_strict_arrays_are_sampled_as_others(options: dict[str, Any]) -> None:
    K = np.random.default_rng(0).standard_normal((9001, 5))
    found, wanted = (levattn.sample_rows(keys, **options) for keys in (stored(K, "strict"), K))
    np.testing.assert_array_equal(found.indices, wanted.indices)
    np.testing.assert_allclose(found.eigenvalues, wanted.eigenvalues, rtol=1e-12)


@pytest.mark.parametrize("eta", [1e-320, 1e-160, 1e-155, 1e-150])  # the second and the third ask for infinitely many
def test_the_least_distortions_take_all_rows_but_zero_ones(eta: float) -> None:
    K = np.vstack([TALL[:9], np.zeros((2, TALL.shape[1]))])
    for found in (
        levattn.StreamingRowSample(distortion=eta).update(K).result(),
        levattn.sample_rows(K, distortion=eta),
    ):
        np.testing.assert_array_equal(found.indices, range(9))
        np.testing.assert_array_equal(found.weights, 1.0)


def test_sizes_beyond_all_rows() -> None:
    for make in (lambda m: levattn.sample_rows(TALL, m), lambda m: levattn.StreamingRowSample(m)):
        for size in (10**18, 10**30, 10**400):
            with pytest.raises(ValueError, match=r"size is 10+; expected 1 <= size <= 9007199254740992"):
                make(size)


def test_least_squares_on_a_sample() -> None:
    """A deterministic consequence of the measured distortion: residuals by (1 + η)/(1 − η) at most."""
    K = RNG.standard_normal((2000, 4))
    y = K @ [1.0, 2.0, 3.0, 4.0] + RNG.standard_cauchy(2000)
    least = np.sum((K @ np.linalg.lstsq(K, y, rcond=None)[0] - y) ** 2)
    for seed in range(5):
        sample = levattn.sample_rows(np.column_stack([K, y]), 300, rng=seed)
        x = np.linalg.lstsq(sample.rows(K), sample.rows(y), rcond=None)[0]
        eta = sample.distortion
        assert least <= np.sum((K @ x - y) ** 2) <= (1 + eta) / (1 - eta) * least


def test_a_ridge_takes_fewer_rows_than_the_rank() -> None:
    K = RNG.standard_normal((3000, 60)) * np.geomspace(1, 1e-4, 60)
    sample = levattn.sample_rows(K, distortion=0.8, ridge=10.0, rng=0)
    assert sample.size < levattn.sample_rows(K, distortion=0.8, rng=0).size / 2
    assert sample.distortion <= 0.8


def test_a_share_of_uniform_draws_bounds_the_weights() -> None:
    K = np.vstack([TALL, 1e-6 * TALL])
    assert levattn.sample_rows(K, 100, uniform=0.5, rng=2).weights.max() <= 800 / (0.5 * 100) * 100
    plain, mixed = (levattn.sample_rows(K, 500, uniform=share, rng=2) for share in (0.0, 0.5))
    np.testing.assert_array_less(mixed.weights / mixed.counts, 800 / (0.5 * 500) * (1 + 1e-9))
    assert plain.indices.max() < 400 < mixed.indices.max()  # tiny rows have tiny scores
    even = levattn.sample_rows(K, 500, uniform=1, rng=2)
    np.testing.assert_allclose(even.probabilities, 1 / 800)


def test_every_row_is_taken_where_the_promise_needs_as_many() -> None:
    sample = levattn.sample_rows(TALL, distortion=0.01)
    assert sample.indices.tolist() == list(range(400))
    assert (sample.distortion, sample.promised, sample.size) == (0.0, 0.0, 400)
    np.testing.assert_array_equal(sample.rows(TALL), TALL)
    mask = np.arange(400) % 2 == 0
    assert levattn.sample_rows(TALL, distortion=0.01, mask=mask).indices.tolist() == np.flatnonzero(mask).tolist()


def test_nothing_to_draw() -> None:
    for K in (np.zeros((5, 3)), np.zeros((0, 3))):
        for options in ({"size": 10}, {"distortion": 0.5}, {"size": 3, "ridge": 1.0}):
            sample = levattn.sample_rows(K, **options)
            assert (len(sample), sample.distortion) == (0, 0.0)
    alone = levattn.sample_rows(np.array([[0.0, 0], [3, 0], [0, 0]]), 4)
    assert (alone.indices.tolist(), alone.weights.tolist(), alone.counts.tolist()) == ([1], [1.0], [4])
    missing = levattn.sample_rows(np.eye(3), 1)
    assert (missing.eigenvalues[0], missing.promised) == (pytest.approx(0, abs=1e-12), np.inf)


def test_rows_of_other_libraries() -> None:
    sample = levattn.sample_rows(TALL, 50, rng=1)
    expected = np.sqrt(sample.weights)[:, None] * TALL[sample.indices]
    np.testing.assert_allclose(sample.rows(TALL), expected)
    sparse = sample.rows(strategies.csr(TALL))
    assert sparse.format == "csr"
    np.testing.assert_allclose(sparse.toarray(), expected)
    np.testing.assert_allclose(sample.rows(TALL.tolist()), expected)
    assert sample.rows(TALL.astype(np.float32)).dtype == np.float32
    torch = pytest.importorskip("torch")
    tensor = sample.rows(torch.tensor(TALL))
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_allclose(tensor.numpy(), expected)
    held = levattn.sample_rows(torch.tensor(TALL), 50, scores=torch.tensor(levattn.leverage_scores(TALL)), rng=1)
    assert held.indices.tolist() == sample.indices.tolist()


@pytest.mark.parametrize("library", ["numpy", "sparse", "torch"])
def test_rows_times_weights_stay_finite(library: str) -> None:
    K = 1e308 * np.eye(3).repeat(4, axis=0)
    sample = levattn.sample_rows(K, 3, rng=0)
    made = strategies.csr(K) if library == "sparse" else stored(K, library)
    with pytest.raises(ValueError, match="K times the roots of weights leaves the range"):
        sample.rows(made)
    assert math.isfinite(sample.rows(made / 100).sum())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ValueError, "size and distortion: neither"),
        ({"size": 3, "distortion": 0.5}, ValueError, "both"),
        ({"size": 0}, ValueError, "size is 0"),
        ({"size": 2.5}, TypeError, "size is 2.5"),
        ({"distortion": 1.0}, ValueError, "distortion is 1.0"),
        ({"size": 3, "failure": 0}, ValueError, "failure is 0"),
        ({"size": 3, "uniform": 1.5}, ValueError, "uniform is 1.5"),
        ({"size": 3, "ridge": -1}, ValueError, "ridge is -1"),
        ({"size": 3, "rng": "a"}, TypeError, "rng is 'a'"),
        ({"size": 3, "scores": np.ones(3)}, ValueError, r"scores has shape \(3,\); expected \(400,\)"),
        ({"size": 3, "scores": -np.ones(400)}, ValueError, r"scores\[0\] is -1"),
        ({"size": 3, "scores": np.ones(400, bool)}, TypeError, "bool"),
        ({"distortion": 0.5, "scores": np.arange(400)}, ValueError, "scores are 0 for a row that has leverage"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        levattn.sample_rows(TALL, **options)


def test_more_refusals() -> None:
    with pytest.raises(ValueError, match="one matrix"):
        levattn.sample_rows(TALL.reshape(2, 200, 5), 3)
    sample = levattn.sample_rows(TALL, 3)
    with pytest.raises(ValueError, match="K has 399 rows; expected 400"):
        sample.rows(TALL[1:])
    with pytest.raises(ValueError, match="p is 0"):
        sample.rows(TALL, 0)
    for labels in (np.arange(400), np.arange(400) > 9, strategies.csr(TALL).astype(np.int64)):
        with pytest.raises(TypeError, match=r"K has dtype \w+; expected a real floating dtype .*astype\('float64'\)"):
            sample.rows(labels)  # roots of weights are no whole numbers
    with pytest.raises(TypeError, match="K is of type MaskedArray; expected a dense array"):
        sample.rows(np.ma.masked_array(TALL))
    for rank in (0, -1, math.inf):
        with pytest.raises(ValueError, match="rank is"):
            levattn.sample_size(rank, 0.5)
