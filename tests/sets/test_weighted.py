"""Universal sets of keys with weights: the sets of the keys times the roots of their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import levattn
import naive
import strategies
from strategies import Float

RNG = np.random.default_rng(0)
TALL = RNG.standard_normal((500, 5)) * np.abs(RNG.standard_cauchy((500, 1)))
DUMMIES = np.eye(9)[RNG.integers(0, 5, 300)] + np.eye(9)[RNG.integers(5, 9, 300)]
WIDE = RNG.integers(-2, 3, (6, 30)).astype(float)
KEYS = {
    "tall": TALL,
    "dummies": DUMMIES,
    "deficient": np.hstack([TALL, TALL[:, :2] * 2, np.zeros((500, 1))]),
    "wide": WIDE,
    "wide copies": np.vstack([WIDE, WIDE[:2]]),
}


def weights_of(K: Float, scale: float = 1.0) -> Float:
    """Powers of four, whose roots are exact, over some decades, and some zeros."""
    rng = np.random.default_rng(1)
    return np.where(rng.random(len(K)) < 0.2, 0.0, 4.0 ** rng.integers(-5, 6, len(K))) * scale


@pytest.mark.parametrize("stored", [np.asarray, strategies.csr])
@pytest.mark.parametrize("scale", [1.0, 4.0**40, 4.0**-40])
@pytest.mark.parametrize("kind", KEYS)
def test_sets_are_those_of_the_weighted_keys(kind: str, scale: float, stored: Any) -> None:
    K = KEYS[kind]
    w = weights_of(K, scale)
    X = np.sqrt(w)[:, None] * K
    exact = naive.leverage_exact(X)
    for options in ({"epsilon": 0.03}, {"size": 4}):
        found, other = (
            levattn.universal_set(stored(K), weights=w, **options),
            levattn.universal_set(stored(X), **options),
        )
        np.testing.assert_allclose(found.scores, exact, rtol=1e-9)
        assert found.indices.tolist() == other.indices.tolist()
        assert (found.rank, found.guarantee, found.epsilon) == (
            other.rank,
            other.guarantee,
            pytest.approx(other.epsilon),
        )
        N = found.factor.normalizer[0]
        np.testing.assert_allclose(N.T @ N, X.T @ X, rtol=1e-9, atol=1e-9 * np.abs(X.T @ X).max())
        if stored is np.asarray:
            np.testing.assert_allclose(found.scores_of(X), exact, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("longer", [1e17, 1e22])
@pytest.mark.parametrize("weight", [4.0**-20, 1.0, 4.0**9])
def test_weights_change_no_score_beside_far_longer_keys(weight: float, longer: float) -> None:
    K = np.hstack([TALL, np.zeros((500, 1))]) @ np.linalg.qr(RNG.standard_normal((6, 6)))[0]
    K[5], K[3] = 1e-3, longer * K[3]
    exact = naive.leverage_exact(K)
    found = levattn.universal_set(K, 0.5, weights=np.full(500, weight))
    assert found.mask[[3, 5]].all()  # of which key 5 alone has its direction
    for scores in (found.scores, levattn.leverage_scores(K, weights=np.full(500, weight))):
        np.testing.assert_allclose(scores, exact, rtol=1e-7, atol=1e-12)  # raised by four times their error


def exact_with(K: Float, w: Float) -> Float:
    """Scores with weights, in fractions: of K with each key as often as its weight says."""
    times = w.astype(np.int64)
    return naive.leverage_exact(np.repeat(K, times, axis=0))[np.cumsum(times) - times] * times


@pytest.mark.parametrize("method", ["auto", "qr", "svd"])
@pytest.mark.parametrize("kind", ["rank 2 by the rounding of x / 3", "a far longer key"])
def test_rounded_products_with_roots_of_weights_lose_no_key(kind: str, method: str) -> None:
    x, w = np.array([1.0, 2, 5, 7, 11, 13, 17, 19]), np.array([1.0, 2, 3, 1, 2, 3, 1, 2])
    K = np.stack([x, np.sqrt(x) if kind == "a far longer key" else x / 3], axis=1)
    K[0] *= 1e25 if kind == "a far longer key" else 1
    exact = exact_with(K, w)
    for factor in (1.0, 2.0**-31, 5.0):
        found = levattn.universal_set(K, 0.3, weights=w * factor, method=method)
        assert found.mask[exact >= 0.3].all()
        assert (found.scores >= exact * (1 - 1e-9)).all()
        some = levattn.universal_set(K, size=3, weights=w * factor, method=method)
        assert exact[~some.mask].max() <= some.epsilon * (1 + 1e-9)


@pytest.mark.parametrize("n", [40, 2100])
@pytest.mark.filterwarnings("ignore:K is rank-deficient:levattn.RankWarning")
def test_rounded_products_hide_no_key_of_chunks_and_streams(n: int) -> None:
    rng = np.random.default_rng(n)
    x, few, w = rng.integers(1, 2**40, n) * 2.0**-40, np.arange(4) * (n // 5), rng.integers(1, 4, n).astype(float)
    x[few] = 2.0**-20
    K = np.stack([x, 3 * x], axis=1)
    K[few, 1] += 2.0**-56  # rounding moves products of other keys as far from the line
    exact = exact_with(K, w)
    epsilon = exact[few].min()
    state, later = levattn.StreamingUniversalSet(epsilon).update(K[:9], weights=w[:9]), levattn.StreamingRowSample(9)
    mixed = levattn.StreamingUniversalSet(epsilon).update(K[:9], weights=w[:9])
    mixed.merge(levattn.StreamingUniversalSet(epsilon).update(K[9:], weights=w[9:]))
    state.update(K[9:], weights=w[9:])
    for found in (state.result(), mixed.result()):
        assert np.isin(few, found.indices).all()
        assert (found.member_scores >= exact[found.indices] * (1 - 1e-9)).all()
    for keys in (K, in_chunks(K)):
        found = levattn.universal_set(keys, epsilon, weights=w)
        assert found.mask[few].all()
        assert (found.scores >= exact * (1 - 1e-9)).all()
        assert (levattn.leverage_scores(keys, weights=w)[few] >= exact[few]).all()
    moments = levattn.states.Moments(2).update(K, weights=w).factor()
    assert np.isinf(moments.scores_of(K[few])).all()
    assert np.isin(few, later.update(K, weights=w).result().indices).all()  # with a probability of 1
    times = np.where(np.arange(n) % 2, 4.0, 1.0)  # products with these are exact, so that directions are resolved
    twice = levattn.StreamingUniversalSet(epsilon).update(K, weights=times).result()
    assert len(twice) <= 2 / epsilon


@pytest.mark.parametrize("condition", [1e7, 1e9, 1e11])
def test_no_key_is_missed_by_the_rounding_of_its_product(condition: float) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(60), rng.integers(1, 4, 60).astype(float)
    K = np.stack([x, x + rng.standard_normal(60) / condition], axis=1)
    exact = exact_with(K, w)
    for key in np.argsort(-exact)[:6]:
        epsilon = exact[key] * (1 - 1e-13)
        for found in (
            levattn.universal_set(K, epsilon, weights=w),
            levattn.universal_set(in_chunks(K), epsilon, weights=w),
            levattn.StreamingUniversalSet(epsilon).update(K, weights=w).result(),
        ):
            assert key in found.indices


@pytest.mark.filterwarnings("ignore:K is rank-deficient:levattn.RankWarning")
def test_a_key_whose_product_lies_among_the_others_is_in() -> None:
    """Two entries may differ and have the same product with a root: then products lack a direction of the keys."""
    x = np.random.default_rng(0).standard_normal(3 * 2048)
    K = np.stack([x, x], axis=1)
    K[[7, -9]] = [1.9, np.nextafter(1.9, 2)]
    same = [w for w in range(2, 200) if len(set((K[7] * np.sqrt(w)).tolist())) == 1]
    assert len(same) > 20
    for n in (50, len(K)):
        w = np.full(n, 3.0)
        w[[7, -9]] = same[n % 20]
        state = levattn.StreamingUniversalSet(0.4)
        for part in (slice(0, n // 3), slice(n // 3, n)):
            state.update(K[:n][part], weights=w[part])
        lone = np.flatnonzero(K[:n, 0] != K[:n, 1])
        assert np.isin(lone, state.result().indices).all()
        assert levattn.universal_set(in_chunks(K[:n]), 0.4, weights=w).mask[lone].all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("weight", [1e-200, 1e-90, 1e84, 1e100])
def test_large_and_small_weights_of_short_types(weight: float, dtype: Any) -> None:
    K = RNG.standard_normal((100, 3)).astype(dtype)
    for stored in (K, strategies.csr(K.astype(np.float32))):
        found = levattn.universal_set(stored, 0.05, weights=np.full(100, weight))
        np.testing.assert_allclose(found.scores, naive.leverage_exact(K.astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize("method", ["auto", "qr"])
@pytest.mark.parametrize(
    ("K", "weights"),
    [
        ([[1e-300, 0], [0, 1]], [1e-60, 1]),
        ([[1e-310, 0], [0, 1]], [1e-10, 1]),
        ([[5e-324]], [1.0]),
        ([[7e307]], [9.0]),
    ],
)
def test_products_with_roots_of_weights_leave_the_range_and_lose_no_key(K: Any, weights: Any, method: str) -> None:
    found = levattn.universal_set(np.array(K), 0.5, weights=weights, method=method)
    assert found.indices.tolist() == list(range(len(K)))
    np.testing.assert_allclose(levattn.leverage_scores(np.array(K), weights=weights, method=method), 1, rtol=1e-9)
    assert found.condition >= 1
    assert levattn.effective_dimension(np.array(K), weights=weights) == len(K)


@pytest.mark.parametrize("kind", KEYS)
def test_heavy_attention_over_the_weighted_keys(kind: str) -> None:
    K = KEYS[kind]
    w = weights_of(K)
    X = np.sqrt(w)[:, None] * K
    found = levattn.universal_set(K, 0.1, weights=w)
    Q = np.vstack([RNG.standard_normal((5, K.shape[1])), found.factor.witness(X[found.indices[:3]])])
    heavy = levattn.heavy_attention(Q, X, 0.1, universal=found)
    A = naive.attention_exact(Q, X)
    np.testing.assert_allclose(heavy.entries.toarray(), np.where(A >= 0.1, A, 0), atol=1e-6)
    np.testing.assert_allclose(heavy.normalizers, naive.normalizers(Q, X), rtol=1e-9)
    with pytest.raises(ValueError, match="other keys"):
        levattn.heavy_attention(Q, K, 0.1, universal=found)


def test_any_weights_other_dtypes_and_batches() -> None:
    w = RNG.random((2, 1, 500)) + 1e-3
    K = np.stack([TALL, 2 * TALL[::-1], TALL**2]).astype(np.float32)[None].repeat(2, axis=0)
    found = levattn.universal_set(K, 0.02, weights=w)
    X = np.sqrt(w)[..., None] * K.astype(np.float64)
    other = levattn.universal_set(X, 0.02)
    assert (found.mask == other.mask).all()
    np.testing.assert_allclose(found.scores, other.scores, rtol=1e-5)
    torch = pytest.importorskip("torch")
    held = levattn.universal_set(torch.tensor(K), 0.02, weights=torch.tensor(w))
    assert (held.mask.numpy() == other.mask).all()


def test_ill_conditioned_keys_tell_the_error_of_the_products() -> None:
    K = TALL * np.geomspace(1, 1e-3, 5) @ np.vander(np.linspace(0.9, 1, 5))
    w = RNG.random(500) + 0.1
    found, plain = levattn.universal_set(K, 0.05, weights=w), levattn.universal_set(K, 0.05)
    assert found.factor.error[0] >= 2.0**-52 * found.condition
    exact = naive.leverage_exact(np.sqrt(w)[:, None] * K)
    assert np.max(np.abs(found.scores / exact - 1)) <= 4 * found.factor.error[0] + 1e-9
    assert plain.factor.error[0] < found.factor.error[0]


@pytest.mark.parametrize(
    "options",
    [{"center": True}, {"method": "osnap"}, {"f": 1}, {"f": levattn.Softmax()}],
    ids=str,
)
def test_refusals(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="weights are given; expected f = 2"):
        levattn.universal_set(TALL, 0.1, weights=np.ones(500), **options)


# -- chunks, files and streams ---------------------------------------------------------------------------------------


def in_chunks(K: Float, rows: int = 70) -> Any:
    """A function that returns the chunks of keys."""
    return lambda: (K[..., start : start + rows, :] for start in range(0, max(K.shape[-2], 1), rows))


@pytest.mark.parametrize("kind", KEYS)
def test_chunks_and_streams_have_the_sets_of_the_weighted_keys(kind: str) -> None:
    K = KEYS[kind]
    w = weights_of(K)
    dirty = np.where(w[:, None] > 0, K, np.nan)  # rows of weight 0 are not read
    for options in ({"epsilon": 0.03}, {"size": 4}, {"size": len(K)}):
        held = levattn.universal_set(K, weights=w, **options)
        found = levattn.universal_set(in_chunks(dirty), weights=w, **options)
        assert len(found) == len(held)
        if kind != "wide" or "epsilon" in options:  # independent rows of wide keys have equal scores, up to rounding
            assert found.indices.tolist() == held.indices.tolist()
        chosen, left = found.scores[found.mask], found.scores[~found.mask & (w > 0)]
        assert chosen.min(initial=1) >= left.max(initial=0) * (1 - 1e-12)
        np.testing.assert_allclose(found.scores, held.scores, rtol=1e-9, atol=1e-15)
        assert (found.rank, found.epsilon) == (held.rank, pytest.approx(held.epsilon))
    scores = levattn.leverage_scores(in_chunks(dirty), weights=w)
    np.testing.assert_allclose(scores, levattn.leverage_scores(K, weights=w), rtol=1e-9, atol=1e-15)
    parts = [levattn.StreamingUniversalSet(0.03, row_start=start) for start in (0, 90)]
    parts[1].update(dirty[90:], weights=w[90:])
    for start in range(0, 90, 40):
        stop = min(start + 40, 90)
        parts[0].update(dirty[start:stop], weights=w[start:stop])
    streamed = parts[0].merge(parts[1]).result()
    expected = levattn.universal_set(np.sqrt(w)[:, None] * K, 0.03)
    assert streamed.indices.tolist() == expected.indices.tolist()
    np.testing.assert_array_equal(streamed.keys, (np.sqrt(w)[:, None] * K)[streamed.indices])


def test_keys_of_weight_0_do_not_count() -> None:
    w = np.where(np.arange(60) < 10, 1.0, 0.0)
    K = RNG.standard_normal((60, 3))
    found = levattn.StreamingUniversalSet(0.1).update(K, weights=w).result()
    other = levattn.StreamingUniversalSet(0.1).update(K, mask=w > 0).result()
    assert (found.present, found.is_vacuous, found.n) == (other.present, other.is_vacuous, other.n) == (10, True, 60)


def test_a_tiny_entry_beside_others_does_no_harm() -> None:
    K = np.ones((4, 2))
    K[0], K[1, 0] = (2, 5), 1e-310
    w = np.full(4, 0.7)
    np.testing.assert_allclose(
        levattn.leverage_scores(in_chunks(K), weights=w), levattn.leverage_scores(K, weights=w), rtol=1e-10
    )
    assert len(levattn.StreamingUniversalSet(0.1).update(K, weights=w).result()) == 4


def test_weighted_files_resume(tmp_path: Path) -> None:
    K, w = RNG.standard_normal((3000, 6)).astype(np.float32), RNG.random(3000) + 0.1
    w[::7] = 0
    np.save(tmp_path / "keys.npy", K)
    source = levattn.open_keys(tmp_path / "keys.npy", chunk_rows=500)
    held = levattn.universal_set(K, 0.01, weights=w)
    found = levattn.universal_set(source, 0.01, weights=w)
    assert found.indices.tolist() == held.indices.tolist()
    np.testing.assert_allclose(found.scores, held.scores, rtol=2e-6)
    assert found.scores.dtype == np.float64
    np.testing.assert_array_equal(
        levattn.leverage_scores(source, weights=w, ridge=2.0), levattn.leverage_scores(K, weights=w, ridge=2.0)
    )
    checkpoint = tmp_path / "point"
    again = {"checkpoint": checkpoint, "checkpoint_rows": 500}

    def stop(done: int, total: int | None) -> None:
        if done > 4000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        levattn.scan_set(source, 0.01, weights=w, progress=stop, **again)
    with pytest.raises(ValueError, match="another run"):
        levattn.scan_set(source, 0.01, weights=2 * w, **again)
    with pytest.raises(ValueError, match="another run"):
        levattn.scan_set(source, 0.01, **again)
    resumed = levattn.scan_set(source, 0.01, weights=w, **again)
    np.testing.assert_array_equal(resumed.scores, found.scores)
    assert not checkpoint.exists()


def test_batches_of_chunks_and_one_weight_for_all() -> None:
    K, w = RNG.standard_normal((2, 200, 4)), RNG.random((2, 200))
    for weights in (w, w[0], 3.0, w[:, :1], [0.5]):
        found = levattn.leverage_scores(in_chunks(K), weights=weights)
        np.testing.assert_allclose(found, levattn.leverage_scores(K, weights=weights), rtol=1e-10)
    torch = pytest.importorskip("torch")
    found = levattn.leverage_scores(in_chunks(K), weights=torch.tensor(w).bfloat16())
    np.testing.assert_allclose(found, levattn.leverage_scores(K, weights=w), rtol=1e-2)


@pytest.mark.parametrize(
    ("weights", "error", "words"),
    [
        (np.ones(499), ValueError, r"\(499,\), and K gives at least 500 rows"),
        (np.ones(501), ValueError, r"\(501,\), and K gives 500 rows"),
        (np.ones((3, 500)), ValueError, r"expected one that broadcasts to"),
        (-np.ones(500), ValueError, r"weights\[0\] is -1"),
        (np.r_[np.ones(499), np.nan], ValueError, r"weights\[499\] is nan"),
        (np.ones(500, bool), TypeError, "bool"),
        (np.full(500, 1e300), ValueError, "range of float64"),
        (np.full(500, 1e-300), ValueError, "range of float64"),
    ],
)
def test_refused_weights_of_chunks(weights: Any, error: type[Exception], words: str) -> None:
    K = TALL * (1e160 if weights.max() > 2 else 1e-160)
    for function in (levattn.leverage_scores, lambda K, weights: levattn.universal_set(K, 0.1, weights=weights)):
        with pytest.raises(error, match=words):
            function(in_chunks(K), weights=weights)
    if weights.shape == (500,):
        state = levattn.StreamingUniversalSet(0.1)
        with pytest.raises(error, match=words):
            state.update(K, weights=weights)
        assert state.n == 0


def test_more_refusals() -> None:
    with pytest.raises(ValueError, match=r"weights\[0\] is -1"):
        levattn.universal_set(TALL, 0.1, weights=-np.ones(500))
    with pytest.raises(ValueError, match="weights leave the range"):
        levattn.universal_set(np.ldexp(TALL, -900), 0.1, weights=np.full(500, 2.0**-1000))
