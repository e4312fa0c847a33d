"""Data that the package carries, worst-case queries and planted models, against float64 SVDs.

Inside: the parts of planted keys have no public name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import naive
from levattn.datasets import Variant, adversarial_queries, minilm, planted, resampled

DATA = files("levattn") / "data"


def own_share(queries: npt.ArrayLike, K: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Score that query j gives to key j."""
    return np.diag(naive.attention(queries, K))


def normal(seed: int, *shape: int) -> npt.NDArray[np.float64]:
    return np.random.default_rng(seed).standard_normal(shape)


def dependent_keys() -> npt.NDArray[np.float64]:
    """Keys of rank 4 in 7 columns, with a zero and a copy."""
    K = normal(2, 60, 4) @ normal(6, 4, 7)
    K[10] = 0
    K[20] = K[21]
    return K


class TestMinilm:
    def test_arrays_and_tokens(self) -> None:
        heads = minilm()
        assert minilm() is heads
        assert repr(heads) == "AttentionHeads(layers=6, heads=12, n=512, d=32)"
        for array in (heads.queries, heads.keys, heads.values):
            assert (array.shape, array.dtype) == ((6, 12, 512, 32), np.float16)
            assert np.isfinite(array).all()
            assert not array.flags.writeable
        assert heads.scale == pytest.approx(32**-0.5)
        with pytest.raises(dataclasses.FrozenInstanceError):
            heads.scale = 1.0  # type: ignore[misc]
        assert {type(token) for token in heads.tokens} == {str}
        assert (len(heads.tokens), heads.tokens[:4], heads.tokens[-1]) == (
            512,
            ("[CLS]", "four", "score", "and"),
            "[SEP]",
        )

    def test_heads_are_real(self) -> None:
        heads = minilm()
        flat = heads.keys.reshape(72, -1).astype(np.float64)
        assert len(np.unique(flat, axis=0)) == 72
        queries, keys = heads.queries.astype(np.float64), heads.keys.astype(np.float64)
        logits = heads.scale * queries @ keys.swapaxes(-1, -2)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        largest = weights.max(axis=-1) / weights.sum(axis=-1)
        # Trained attention is far from uniform, 1/512, which is what unrelated numbers would give.
        assert largest.mean() > 20 / 512

    def test_file_is_the_one_noted(self) -> None:
        content = (DATA / "minilm_l6_v2.npz").read_bytes()
        notice = (DATA / "NOTICE.md").read_text(encoding="utf-8")
        match = re.search(r"^sha256: `([0-9a-f]{64})`$", notice, flags=re.MULTILINE)
        assert match is not None
        assert hashlib.sha256(content).hexdigest() == match[1]
        assert len(content) <= 8_000_000
        assert "Apache License, Version 2.0" in notice
        assert "public domain" in notice


class TestResampled:
    given = np.hstack([minilm().keys[2, 4], minilm().keys[2, 5]]).astype(np.float64)

    def test_mean_covariance_and_tails_are_those_of_the_given_keys(self) -> None:
        n, d = 200_000, 64
        K = resampled(self.given, n, rng=0).astype(np.float64)
        mean, C = self.given.mean(axis=0), np.cov(self.given.T, bias=True)
        # five standard deviations of what n draws leave, for each of d numbers
        assert np.all(np.abs(K.mean(axis=0) - mean) <= 5 * np.sqrt(np.diag(C) / n))
        L = np.linalg.cholesky(C)
        whitened = np.linalg.solve(L, (K - mean).T)
        # eigenvalues of a sample covariance of d columns lie within (1 ± √(d/n))² but for what tails add
        assert np.abs(np.linalg.eigvalsh(whitened @ whitened.T / n) - 1).max() <= 5 * np.sqrt(d / n)
        fourth = (np.linalg.solve(L, (self.given - mean).T) ** 4).mean() - 3
        assert (whitened**4).mean() - 3 == pytest.approx(0.75**2 * fourth, rel=0.1)

    def test_smoothing_goes_from_copies_to_gaussian_keys(self) -> None:
        copies = resampled(self.given, 500, smoothing=0, dtype=np.float64, rng=1)
        distances = np.abs(copies[:, None] - self.given).max(axis=2).min(axis=1)
        assert distances.max() <= 1e-12 * np.abs(self.given).max()
        gaussian = resampled(self.given, 100_000, smoothing=1, rng=1).astype(np.float64)
        kurtosis = (((gaussian - gaussian.mean(axis=0)) / gaussian.std(axis=0)) ** 4).mean()
        assert kurtosis == pytest.approx(3, abs=5 * np.sqrt(24 / 100_000))

    def test_the_seed_alone_decides(self) -> None:
        assert np.array_equal(resampled(self.given, 40_000, rng=3), resampled(self.given, 40_000, rng=3))
        assert resampled(self.given, 0).shape == (0, 64)
        one = resampled(self.given[:1], 3, rng=0, dtype=np.float64)
        np.testing.assert_allclose(one, np.repeat(self.given[:1], 3, axis=0), rtol=1e-15)

    @pytest.mark.parametrize(
        ("arguments", "options", "error", "message"),
        [
            (([[1.0, np.nan]], 3), {}, ValueError, "K must be finite"),
            ((np.zeros((0, 2)), 3), {}, ValueError, r"K has shape \(0, 2\)"),
            ((np.zeros(4), 3), {}, ValueError, r"K has shape \(4,\)"),
            ((np.zeros((2, 2), complex), 3), {}, TypeError, "real numbers"),
            ((np.eye(2), -1), {}, ValueError, "n is -1|n must"),
            ((np.eye(2), 3), {"smoothing": 1.5}, ValueError, "smoothing is 1.5"),
            ((np.eye(2), 3), {"dtype": int}, TypeError, "dtype is int64"),
        ],
    )
    def test_errors_name_what_came(self, arguments: Any, options: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            resampled(*arguments, **options)


class TestAdversarialQueries:
    @pytest.mark.parametrize(
        "K",
        [
            *(minilm().keys[place] for place in ((0, 0), (2, 7), (5, 11))),
            normal(1, 40, 6),
            *(scale * dependent_keys() for scale in (1e-150, 1.0, 1e150)),
            np.zeros((5, 4)),
            np.array([[1, 2, 3]]),
        ],
    )
    def test_attain_the_scores(self, K: npt.NDArray[Any]) -> None:
        queries = adversarial_queries(K)
        assert queries.dtype == np.float64
        np.testing.assert_allclose(own_share(queries, K), naive.leverage_svd(K), rtol=1e-9, atol=1e-15)
        assert not queries[~K.any(axis=1)].any()

    def test_attain_the_scores_with_graded_columns(self) -> None:
        K = normal(3, 80, 5)
        graded = K * 10.0 ** np.array([0, -20, 20, -5, 9])
        np.testing.assert_allclose(own_share(adversarial_queries(graded), graded), naive.leverage_svd(K), rtol=1e-10)

    def test_equal_the_definition(self) -> None:
        K = normal(1, 40, 6)
        np.testing.assert_allclose(adversarial_queries(K), K @ np.linalg.inv(K.T @ K), rtol=1e-9)

    def test_no_other_query_does_better(self) -> None:
        rng = np.random.default_rng(4)
        K = rng.standard_normal((30, 3)) * rng.standard_cauchy((30, 1))
        weights = np.square(rng.standard_normal((20_000, 3)) @ K.T)
        best = (weights / weights.sum(axis=1, keepdims=True)).max(axis=0)
        assert (best <= own_share(adversarial_queries(K), K) + 1e-12).all()

    def test_batches_are_read_only_and_may_be_empty(self) -> None:
        K = normal(5, 2, 3, 9, 4)
        K.setflags(write=False)
        batch = adversarial_queries(K)
        assert batch.shape == K.shape
        np.testing.assert_allclose(batch[1, 2], adversarial_queries(K[1, 2]), rtol=1e-10)
        assert adversarial_queries(np.zeros((0, 4))).shape == (0, 4)

    @pytest.mark.parametrize(
        ("K", "error", "text"),
        [
            (np.ones(3), ValueError, r"K must have shape"),
            (np.array([[1.0, np.nan]]), ValueError, r"K must be finite"),
            (np.array([[1j, 2]]), TypeError, r"complex128"),
            (np.array([["a", "b"]]), TypeError, r"K must hold real numbers"),
        ],
    )
    def test_bad_keys(self, K: npt.ArrayLike, error: type[Exception], text: str) -> None:
        with pytest.raises(error, match=text):
            adversarial_queries(K)


class TestPlanted:
    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("variant", ["isotropic", "anisotropic"])
    @pytest.mark.parametrize(("n", "d"), [(4096, 32), (2000, 64)])
    def test_truth(self, n: int, d: int, variant: Variant, seed: int) -> None:
        model = planted(n, d, variant=variant, rng=seed)
        scores = naive.leverage_svd(model.keys)
        assert model.keys.shape == (n, d)
        assert len(model.indices) == d // 4
        epsilon = np.sqrt(model.planted_score * model.background_score)
        np.testing.assert_array_equal(np.flatnonzero(scores >= epsilon), model.indices)
        np.testing.assert_allclose(scores[model.indices], model.planted_score, rtol=0.1)
        assert np.delete(scores, model.indices).max() < 1.2 * model.background_score
        norms = np.linalg.norm(model.keys, axis=1)
        by_norm = np.intersect1d(np.argsort(norms)[-len(model.indices) :], model.indices)
        assert len(by_norm) == (len(model.indices) if variant == "isotropic" else 0)

    def test_queries_find_their_key(self) -> None:
        model = planted(4096, 32, strength=6.0, n_queries=20, rng=0)
        weights = np.square(model.queries @ model.keys.T)
        found = weights.argmax(axis=1)
        where = np.searchsorted(model.indices, found)
        np.testing.assert_array_equal(model.indices[where], found)
        np.testing.assert_array_equal(model.groups[where], model.targets)

    @pytest.mark.parametrize("seed", range(5))
    def test_duplicates_are_heavy_only_together(self, seed: int) -> None:
        model = planted(4096, 32, variant="duplicated", n_planted=4, rng=seed)
        copies = 4096 // 32
        assert len(model.indices) == 4 * copies
        np.testing.assert_array_equal(np.bincount(model.groups), [copies] * 4)
        scores = naive.leverage_svd(model.keys)
        np.testing.assert_allclose(scores[model.indices].mean(), model.planted_score, rtol=0.05)
        assert scores[model.indices].max() < 1.2 * model.background_score
        norms = np.linalg.norm(model.keys, axis=1)
        assert norms[model.indices].max() < np.sort(norms)[-4]
        inverse = np.linalg.inv(model.keys.T @ model.keys)
        for group in range(4):
            members = model.keys[model.indices[model.groups == group]]
            assert np.linalg.eigvalsh(members @ inverse @ members.T)[-1] > 0.9

    def test_seed_decides(self) -> None:
        first, again, other = (planted(100, 8, rng=seed) for seed in (7, np.random.default_rng(7), 8))
        np.testing.assert_array_equal(first.keys, again.keys)
        np.testing.assert_array_equal(first.queries, again.queries)
        np.testing.assert_array_equal(first.indices, again.indices)
        assert not np.array_equal(first.keys, other.keys)

    def test_smallest(self) -> None:
        model = planted(1, 1, variant="isotropic", rng=0)
        np.testing.assert_array_equal(model.indices, [0])
        assert planted(50, 8, n_queries=0, rng=0).queries.shape == (0, 8)
        assert "n=1, d=1, planted=1" in repr(model)
        assert len(planted(100, 16, variant="duplicated", n_planted=15, rng=0).indices) == 15 * (100 // 15)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"n_planted": 2.5}, r"n_planted is 2\.5; expected a whole number"),
            ({"n": 0}, "n is 0; expected at least 1"),
            ({"d": 0}, "d is 0; expected at least 1"),
            ({"variant": "other"}, "variant must be one of"),
            ({"n_planted": 17}, "n_planted is 17; expected 1 <= n_planted <= 16"),
            ({"n_planted": 16}, "n_planted must be below d for variant"),
            ({"strength": 0.0}, r"strength is 0\.0; expected a finite number above 0"),
            ({"strength": float("nan")}, "strength is nan; expected a finite number above 0"),
            ({"noise": -1.0}, r"noise is -1\.0; expected a finite number above 0"),
            ({"n_queries": -1}, "n_queries is -1; expected at least 0"),
            ({"background_rank": 13}, "background_rank is 13; expected 1 <= background_rank <= 12"),
            ({"background_rank": 3, "variant": "isotropic"}, "background_rank is not for variant"),
            ({"copies": 3}, "copies is not for variant"),
            ({"copies": 1, "variant": "duplicated"}, "copies is 1; expected 2 <= copies <= 25"),
            ({"copies": 26, "variant": "duplicated"}, "copies is 26; expected 2 <= copies <= 25"),
        ],
    )
    def test_bad_values(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(TypeError if "whole number" in text else ValueError, match=text):
            planted(**({"n": 100, "d": 16} | options))
