"""Many heads, each of which one thread sums, factors and scores at once: they have the scores of each alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import levattn
import naive

KINDS = (
    "alike",
    "a mean",
    "ill-conditioned",
    "dependent",
    "a column of zeros",
    "tiny",
    "huge",
    "copies",
    "misleading",
)


def _head(kind: str, n: int, d: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, d))
    if kind == "a mean":
        X += 3 * rng.standard_normal(d)
    elif kind == "ill-conditioned":
        X *= np.geomspace(1, 1e-6, d)
        X = X @ np.linalg.qr(rng.standard_normal((d, d)))[0]
    elif kind == "dependent":
        X[:, 1] = X[:, 0]
    elif kind == "a column of zeros":
        X[:, 1] = 0
    elif kind in ("tiny", "huge"):
        X *= 2.0 ** (-70 if kind == "tiny" else 60)
    elif kind == "copies":
        X = X[rng.integers(0, d + 5, n)]
    elif kind == "misleading":  # but for the middle
        start = n // 2 // 2048 * 2048
        rest = np.r_[:start, start + 256 : n]
        X[rest, 1] = X[rest, 0] + 1e-3 * X[rest, 1]
    return X


def _heads(n: int, d: int, dtype: str) -> Any:
    return np.stack([_head(kind, n, d, i) for i, kind in enumerate(KINDS)]).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("n", "d"), [(48, 32), (700, 16), (2100, 32), (8200, 16), (3000, 24)])
def test_a_head_has_the_same_bits_beside_others(n: int, d: int, dtype: str) -> None:
    K = _heads(n, d, dtype)
    alone = np.stack([levattn.leverage_scores(X) for X in K])
    for threads in (1, 2):
        with levattn.thread_limit(threads):
            assert np.array_equal(levattn.leverage_scores(K), alone)
            assert np.array_equal(levattn.leverage_scores(K[::-1, ::-1, ::-1])[::-1], alone_reversed(K))


def alone_reversed(K: Any) -> Any:
    """Return the scores of each head alone, with rows and columns in reverse."""
    return np.stack([levattn.leverage_scores(np.ascontiguousarray(X[::-1, ::-1])) for X in K])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("how", ["plain", "mask", "center", "weights", "gram", "half"])
def test_scores_of_heads_are_right(how: str, dtype: str) -> None:
    """Against the definition in float64; float32 keys count as exact."""
    rng, (n, d) = np.random.default_rng(0), (2500, 16)
    K = _heads(n, d, dtype)[[0, 1, 0, 1, 7, 0, 1, 0]]
    K[:, :, 3] *= 1 + np.arange(8)[:, None]
    if how == "half":
        K = K.astype("float16")
    options: dict[str, Any] = {}
    X = K.astype("float64")
    if how == "mask":
        options["mask"] = rng.random((8, n)) < 0.7
        X = X * options["mask"][..., None]
    elif how == "center":
        options["center"] = True
        X = X - X.mean(axis=1, keepdims=True)
    elif how == "weights":
        options["weights"] = rng.random((8, n)) + 0.1
        X = X * np.sqrt(options["weights"])[..., None]
    elif how == "gram":
        options["method"] = "gram"
    exact = np.stack([naive.leverage_svd(one) for one in X])
    tolerance = 1e-10 if K.dtype == "float64" else 1e-6 if how == "gram" else 1e-5
    np.testing.assert_allclose(levattn.leverage_scores(K, **options), exact, rtol=tolerance, atol=1e-25)


def test_a_head_that_is_not_finite_is_named() -> None:
    K = _heads(600, 16, "float32")
    K[4, 17, 2] = np.nan
    K[6, 3, 2] = np.inf
    with pytest.raises(levattn.NonFiniteError, match="row 17 of matrix 4"):
        levattn.leverage_scores(K)
