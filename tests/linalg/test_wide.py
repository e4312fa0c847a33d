"""Keys with fewer rows than columns: exact scores at the cost of the rows, and nothing of the size of d × d."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import levattn
import naive
import strategies
from levattn import exact_sensitivities
from levattn.functions import L1L2, Huber, Softmax, Tukey

# a score of float64 keys has this relative error at any condition number, as `leverage_scores` says
DOUBLE = 1e-9
METHODS = ("auto", "gram", "qr", "svd")


def gauss(n: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, d))


def integers() -> np.ndarray:
    """Small integers of rank 7 in 12 rows: a copy, sums and a multiple of others, and a row of zeros."""
    K = np.random.default_rng(1).integers(-3, 4, (12, 30)) * 1.0
    K[4], K[6], K[7], K[9], K[11] = K[1], K[2] + K[3], K[0] - K[5] + K[2], 0, -3 * K[8]
    return K


def copies() -> np.ndarray:
    return np.repeat(gauss(5, 24), [1, 2, 1, 5, 3], axis=0)


def graded(rows: float, columns: float, K: np.ndarray) -> np.ndarray:
    """Multiply rows and columns by powers of two, which are exact, from 10^-x to 10^x."""
    for axis, span in enumerate((rows, columns)):
        e = np.round(np.linspace(-span, span, K.shape[axis]) * np.log2(10)).astype(int)
        K = np.ldexp(K, np.random.default_rng(2 + axis).permutation(e).reshape((-1, 1) if axis == 0 else (1, -1)))
    return K


def nearly(distance: float) -> np.ndarray:
    """Two keys that are the same but for one entry, and others."""
    K = gauss(6, 20)
    K[3] = K[1]
    K[3, 7] *= 1 + distance
    return K


CASES = {
    "gaussian": gauss(8, 20),
    "one row": gauss(1, 9),
    "one entry": np.eye(1, 5, 2),
    "one less": gauss(9, 10),
    "zeros": np.zeros((3, 7)),
    "integers": integers(),
    "copies": copies(),
    "graded columns": graded(0, 200, gauss(7, 18)),
    "graded rows": graded(200, 0, gauss(7, 18)),
    "graded copies": graded(0, 200, copies()),
    "graded both": graded(100, 100, gauss(7, 18)),
    "large": np.ldexp(integers(), 1000),
    "tiny": np.ldexp(integers(), -1060),
    "few columns": np.where(np.arange(40) % 5 == 0, np.repeat(gauss(10, 40), 2, axis=0)[:15], 0.0),
    "an ulp apart": nearly(2.0**-52),
    "near": nearly(1e-9),
    "zero columns first": np.hstack([np.zeros((6, 10)), np.repeat(gauss(3, 6), 2, axis=0)]),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_scores_are_exact(name: str, method: Any) -> None:
    K = CASES[name]
    expected = naive.leverage_exact(K)
    found = levattn.universal_set(K, 0.5, method=method)
    np.testing.assert_allclose(found.scores, expected, rtol=DOUBLE)
    if name != "an ulp apart":  # below the numerical rank
        np.testing.assert_allclose(levattn.leverage_scores(K, method=method), expected, rtol=DOUBLE)
    assert found.rank == naive.rank_exact(K)
    assert found.guarantee == "exact"
    if name in ("gaussian", "graded rows", "graded both", "an ulp apart", "one less"):  # of independent rows
        assert (found.scores == 1).all()
    for epsilon in (0.05, 0.34, 0.5, 1.0):
        mask = levattn.universal_set(K, epsilon, method=method).mask
        assert np.array_equal(mask, expected >= epsilon * (1 - DOUBLE))


@pytest.mark.filterwarnings("ignore::levattn.RankWarning")
def test_dependent_rows_graded_beyond_the_precision_are_kept() -> None:
    K = copies()
    K[0] *= 1e-30
    K[5:8] *= 1e-25
    exact = naive.leverage_exact(K)
    found = levattn.universal_set(K, 0.4)
    assert not (exact[~found.mask] >= 0.4).any()
    assert (np.asarray(found.scores) >= exact * (1 - DOUBLE)).all()


@strategies.stores()
def test_storages(storage: str) -> None:
    held = strategies.STORAGE[storage](integers())
    scores = levattn.leverage_scores(held)
    assert type(scores) is type(held)
    assert str(scores.dtype).endswith("float64" if storage.endswith("float64") else "float32")
    # integers up to 21 are held exactly by all; float32 scores are rounded to 2^-24, and their error is below 1e-6
    rtol = DOUBLE if storage.endswith("float64") else 1e-6
    expected = naive.leverage_exact(integers())
    np.testing.assert_allclose(strategies.as_float64(scores), expected, rtol=rtol)
    found = levattn.universal_set(held, 0.5)
    assert np.array_equal(strategies.as_bool(found.mask), expected >= 0.5 * (1 - DOUBLE))
    assert found.factor.columns == 30
    entries = levattn.heavy_attention(held, held, 0.2).entries.toarray()
    exact = naive.attention_exact(integers(), integers())
    np.testing.assert_allclose(entries, np.where(exact >= 0.2, exact, 0.0), rtol=DOUBLE)


def test_batches_of_every_kind_have_the_bits_of_each() -> None:
    stack = [
        gauss(12, 30),
        integers(),
        np.repeat(gauss(4, 30), 3, axis=0),
        np.zeros((12, 30)),
        graded(0, 99, integers()),
    ]
    mask = np.random.default_rng(3).random((5, 12)) < 0.8
    for given in (None, mask):
        scores = levattn.leverage_scores(np.stack(stack), mask=given)
        found = levattn.universal_set(np.stack(stack), 0.3, mask=given)
        for i, K in enumerate(stack):
            one = None if given is None else given[i]
            assert np.array_equal(scores[i], levattn.leverage_scores(K, mask=one))
            assert np.array_equal(found.mask[i], levattn.universal_set(K, 0.3, mask=one).mask)
            np.testing.assert_allclose(scores[i], naive.leverage_exact(K, mask=one), rtol=DOUBLE)


def test_masked_rows_are_not_read() -> None:
    K = integers()
    mask = np.ones(12, bool)
    mask[[1, 10]] = False
    K[1], K[10] = np.nan, np.inf
    np.testing.assert_allclose(levattn.leverage_scores(K, mask=mask), naive.leverage_exact(K, mask=mask), rtol=DOUBLE)
    K[2, 29] = np.nan
    with pytest.raises(levattn.NonFiniteError, match="row 2"):
        levattn.leverage_scores(K, mask=mask)


@pytest.mark.parametrize("name", ["gaussian", "integers", "copies", "graded columns"])
def test_the_mean_is_subtracted(name: str) -> None:
    K = CASES[name]
    centered = K - K.mean(axis=0)
    # the mean is rounded, which moves scores by some units of 2^-52 times a condition number below 100
    np.testing.assert_allclose(
        levattn.leverage_scores(K, center=True),
        naive.leverage_svd(centered / np.abs(centered).max(axis=0)),
        atol=1e-12,
    )
    assert levattn.universal_set(K, 0.5, center=True).guarantee == "none"


@pytest.mark.parametrize("name", ["gaussian", "integers", "copies", "large"])
def test_sets_by_size_are_those_of_the_keys_and_rows_of_zeros(name: str) -> None:
    K = CASES[name]
    padded = np.vstack([K, np.zeros((K.shape[1] + 3 - len(K), K.shape[1]))])
    for size in (0, 3, len(K)):
        wide, tall = (levattn.universal_set(keys, size=size) for keys in (K, padded))
        assert wide.epsilon == pytest.approx(tall.epsilon, rel=DOUBLE)
        assert len(wide) == len(tall)


def test_a_ridge_and_a_tolerance_see_more_than_the_column_space() -> None:
    K = gauss(6, 15)
    G = K @ K.T
    expected = np.diag(G @ np.linalg.inv(G + 0.1 * np.trace(G) / 15 * np.eye(6)))
    np.testing.assert_allclose(levattn.leverage_scores(K, relative_ridge=0.1), expected, rtol=DOUBLE)
    K[0] *= 1e-6
    assert levattn.leverage_scores(K, rtol=1e-3)[0] < 0.01


# -- sparse keys -------------------------------------------------------------------------


def scattered(n: int, d: int, each: int, seed: int = 0) -> np.ndarray:
    """A few entries at random places of each row."""
    rng = np.random.default_rng(seed)
    K = np.zeros((n, d))
    for row in K:
        row[rng.choice(d, each, replace=False)] = rng.integers(1, 9, each) * rng.choice([-1.0, 1.0], each)
    return K


def chained(n: int) -> np.ndarray:
    """Each row shares a column with the next one, and the last has one of its own: a triangle of n steps."""
    return np.hstack([np.eye(n) * 3 + np.eye(n, k=1), np.zeros((n, n))])


def among_zeros(K: np.ndarray, d: int, seed: int = 0) -> np.ndarray:
    """The keys with columns of zeros among theirs."""
    wide = np.zeros((len(K), d))
    wide[:, np.sort(np.random.default_rng(seed).choice(d, K.shape[1], replace=False))] = K
    return wide


SPARSE = CASES | {
    "few entries": scattered(12, 200, 3),
    "one entry each": scattered(9, 30, 1),
    "entries of some rows alone": np.vstack([scattered(6, 40, 2), np.repeat(scattered(2, 40, 3, 1), 3, axis=0)]),
    "rows that are twice there": np.repeat(scattered(6, 60, 4), 2, axis=0),
    "columns that are twice there": np.repeat(scattered(8, 9, 3), 4, axis=1),
    "a chain": chained(10),
    "a broken chain": np.vstack([chained(6), chained(6)[:3] + chained(6)[2:5]]),
    "a dense row": np.vstack([np.ones((1, 50)), scattered(7, 50, 2)]),
    "small pivots": np.vstack([np.full((1, 20), 1e12), np.eye(6, 20), np.eye(6, 20) * 2]),
    "graded entries": graded(60, 60, scattered(10, 50, 3)),
    "more rows than columns with entries": among_zeros(integers()[:, :5], 40),
    "as many": among_zeros(scattered(8, 8, 3), 40),
    "two blocks of columns": np.hstack([np.repeat(scattered(4, 200, 100), 2, axis=0), scattered(8, 30, 4)]),
    "no row": np.zeros((0, 40)),
    "subnormal": np.array([[-0.0, 5e-324, 0.0], [0.0, 1.0, 1.0]]),
    "one more row than columns": among_zeros(scattered(41, 12, 3), 40),
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS[:3])
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_keys_have_the_exact_scores(kind: str, method: Any) -> None:
    K = SPARSE[kind]
    held, expected = strategies.csr(K), naive.leverage_exact(K)
    if kind != "an ulp apart":
        np.testing.assert_allclose(levattn.leverage_scores(held, method=method), expected, rtol=DOUBLE)
    found = levattn.universal_set(held, 0.5, method=method)
    np.testing.assert_allclose(found.scores, expected, rtol=DOUBLE)
    assert (found.rank, found.factor.columns) == (naive.rank_exact(K), K.shape[1])
    assert found.guarantee == "exact"
    mask = np.random.default_rng(4).random(len(K)) < 0.7
    dirty = strategies.csr(np.where(mask[:, None], K, np.where(K, np.nan, 0.0)))  # masked rows are not read
    np.testing.assert_allclose(
        levattn.universal_set(dirty, 0.5, method=method, mask=mask).scores,
        naive.leverage_exact(K, mask=mask),
        rtol=DOUBLE,
    )


@pytest.mark.parametrize("kind", ["integers", "few entries", "a chain", "more rows than columns with entries"])
def test_sparse_keys_are_float32_and_have_witnesses(kind: str) -> None:
    K = SPARSE[kind]
    scores = naive.leverage_exact(K)
    single = levattn.leverage_scores(strategies.csr(K, "float32"))
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, scores, rtol=1e-6)
    factor = levattn.universal_set(strategies.csr(K), 0.2).factor.forget_keys()
    Q = factor.witness(K)
    live = np.any(K != 0, axis=1)
    np.testing.assert_allclose(np.diag(naive.attention_exact(Q, K))[live], scores[live], rtol=1e-6)
    np.testing.assert_allclose(factor.normalizer[0].T @ factor.normalizer[0], K.T @ K, atol=1e-9)


@pytest.mark.parametrize("kind", ["gaussian", "integers", "few entries", "a chain", "columns that are twice there"])
def test_sparse_keys_are_centered(kind: str) -> None:
    K = SPARSE[kind]
    centered = K - K.mean(axis=0)
    found = levattn.leverage_scores(strategies.csr(K), center=True)
    np.testing.assert_allclose(found, levattn.leverage_scores(K, center=True), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        found, naive.leverage_svd(centered / np.abs(centered).max(axis=0).clip(1e-300)), atol=1e-10
    )


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("method", METHODS[:3])
@pytest.mark.parametrize(
    "kind",
    ["gaussian", "integers", "zeros", "few entries", "a dense row", "more rows than columns with entries", "large"],
)
def test_sparse_keys_have_a_ridge(kind: str, method: Any, dtype: str) -> None:
    K, mask = SPARSE[kind], np.random.default_rng(4).random(len(SPARSE[kind])) < 0.7
    if kind == "large" and dtype == "float32":
        pytest.skip("beyond float32")
    there = np.where(mask[:, None], np.ldexp(K, -np.frexp(np.abs(K).max(initial=0.0))[1]), 0.0)
    G = there @ there.T
    size = 1e-3 * np.trace(G) / K.shape[1]
    expected = np.diag(G @ np.linalg.inv(G + (size or 1.0) * np.eye(len(K))))
    found = levattn.leverage_scores(strategies.csr(K, dtype), relative_ridge=1e-3, method=method, mask=mask)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, expected, rtol=1e-9 if dtype == "float64" else 1e-6, atol=1e-14)


def test_stored_zeros_of_sparse_keys_are_no_entries() -> None:
    found = scipy.sparse.csr_array(
        (np.array([-1.0, 0, 1, 1, -1, -1]), np.array([2, 3, 0, 3, 0, 3]), np.array([0, 2, 4, 6])), shape=(3, 4)
    )
    np.testing.assert_allclose(levattn.leverage_scores(found), [1, 0.5, 0.5], rtol=DOUBLE)
    rng = np.random.default_rng(0)
    for _ in range(50):
        n, d = rng.integers(1, 6), rng.integers(6, 12)
        K = scipy.sparse.csr_array(rng.integers(-1, 2, (n, d)) * np.float64(1))
        K.data[rng.random(len(K.data)) < 0.4] = 0.0
        np.testing.assert_allclose(levattn.leverage_scores(K), naive.leverage_exact(K.toarray()), atol=1e-12)


@pytest.mark.parametrize("stored", [np.asarray, strategies.csr])
def test_a_ridge_is_of_columns_as_they_are_whatever_their_sizes(stored: Any) -> None:
    K = np.random.default_rng(0).standard_normal((3, 6)) * [1e-290, 1e5, 1, 1, 1, 1]
    X = K - K.mean(axis=0)
    size = 0.1 * np.sum(X**2) / 6
    expected = np.diag(X @ np.linalg.inv(X.T @ X + size * np.eye(6)) @ X.T)
    found = levattn.leverage_scores(stored(K), relative_ridge=0.1, center=True)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    one = stored(np.array([[-2.78e-215, -1.44e116]]))
    np.testing.assert_allclose(levattn.leverage_scores(one, relative_ridge=0.1), 1 / (1 + 0.1 / 2), rtol=1e-12)
    far = stored(np.array([[1e-300, 0, 0], [0, 1e300, 0]]))
    found = levattn.leverage_scores(far, relative_ridge=1.0, mask=np.array([True, False]))
    np.testing.assert_allclose(found, [0.75, 0], rtol=1e-12)


@pytest.mark.parametrize("method", METHODS[:3])
def test_a_ridge_of_tiny_keys_counts_beside_a_column_of_zeros(method: Any) -> None:
    found = levattn.leverage_scores(np.array([[0.0, 1e-305]]), relative_ridge=100.0, method=method)
    np.testing.assert_allclose(found, 1 / 51, rtol=1e-9)


def test_sparse_keys_that_are_not_finite_are_refused() -> None:
    for options in ({}, {"relative_ridge": 0.1}, {"center": True}):
        K = scattered(9, 300, 3)
        K[4, np.flatnonzero(K[4])[0]] = np.inf
        with pytest.raises(levattn.NonFiniteError, match="row 4"):
            levattn.leverage_scores(strategies.csr(K), **options)


# -- queries -----------------------------------------------------------------------------


def of_many_kinds(K: np.ndarray) -> np.ndarray:
    """Queries along the keys, to single keys, at random, and with a part a hundred times as large that no key sees."""
    null = np.linalg.svd(K / np.abs(K).max(axis=0).clip(1e-300))[2][-3:]
    random = gauss(9, K.shape[1], 5)
    return np.vstack([K, naive.adversarial_queries(K), random, random[:3] + 100 * np.abs(K).max() * null])


def sums_of_squares(Q: np.ndarray, K: np.ndarray) -> np.ndarray:
    """Return Σ ⟨q, k⟩² for each query, in rational arithmetic."""
    keys = [[Fraction(x) for x in k] for k in K.tolist()]
    queries = [[Fraction(x) for x in q] for q in Q.tolist()]
    sums = [sum(sum(a * b for a, b in zip(q, k, strict=True)) ** 2 for k in keys) for q in queries]
    return np.array([float(x) for x in sums])


@pytest.mark.parametrize("name", ["gaussian", "integers", "copies", "near"])
def test_heavy_attention_is_that_of_the_definition(name: str) -> None:
    K = CASES[name]
    Q = of_many_kinds(K)
    exact = naive.attention_exact(Q, K)
    for universal in (None, levattn.universal_set(K, 0.05, method="qr")):
        found = levattn.heavy_attention(Q, K, 0.05, universal=universal)
        entries = found.entries.toarray()
        assert (entries[exact >= 0.05 * (1 + DOUBLE)] > 0).all()
        np.testing.assert_allclose(entries[entries > 0], exact[entries > 0], rtol=DOUBLE)
        np.testing.assert_allclose(found.normalizers, sums_of_squares(Q, K), rtol=DOUBLE)
        V = gauss(len(K), 3, 6)
        output, bound = found.apply(V)
        assert (np.linalg.norm(output - exact @ V, axis=1) <= bound).all()


@pytest.mark.parametrize("size", [1e6, 1e12, 1e18])
def test_queries_nearly_orthogonal_to_all_keys(size: float) -> None:
    K = integers()
    q = np.round(size * np.linalg.svd(K)[2][-1])  # products with it cancel
    Q = np.stack([q, q + np.arange(30)])
    found = levattn.heavy_attention(Q, K, 0.1)
    np.testing.assert_allclose(found.normalizers, sums_of_squares(Q, K), rtol=DOUBLE)
    exact = naive.attention_exact(Q, K)
    heavy = exact >= 0.1 * (1 + DOUBLE)
    np.testing.assert_allclose(found.entries.toarray()[heavy], exact[heavy], rtol=DOUBLE)


@pytest.mark.parametrize("name", ["gaussian", "integers", "graded rows", "graded columns"])
def test_every_key_has_a_witness(name: str) -> None:
    K = CASES[name]
    found = levattn.universal_set(K, 0.2)
    scores, Q = naive.leverage_exact(K), found.factor.witness(K)
    assert Q.shape == K.shape
    live = np.any(K != 0, axis=1)
    attained = np.diag(naive.attention_exact(Q, K))
    if name != "graded rows":  # where a query of float64 does not isolate a key that is 10^-400 of others
        np.testing.assert_allclose(attained[live], scores[live], rtol=1e-6)
    assert found.indices.tolist() == np.flatnonzero(scores >= 0.2 * (1 - DOUBLE)).tolist()


@pytest.mark.parametrize("name", ["gaussian", "integers"])
def test_the_factor_is_that_of_all_columns(name: str) -> None:
    K = CASES[name]
    d = K.shape[1]
    factor = levattn.universal_set(np.stack([K, 2 * K]), 0.5).factor
    assert factor.columns == d
    for item, keys in enumerate((K, 2 * K)):
        N = factor.item(item).normalizer[0]
        assert N.shape == (d, d)
        assert np.array_equal(N, np.triu(N))
        np.testing.assert_allclose(N.T @ N, keys.T @ keys, atol=1e-12 * np.abs(keys.T @ keys).max())
    s = np.linalg.svd(K, compute_uv=False)
    np.testing.assert_allclose(factor.condition, s[0] / s[naive.rank_exact(K) - 1], rtol=1e-10)


def test_the_set_does_not_change_with_the_keys() -> None:
    K = integers()
    found = levattn.universal_set(K, 0.3)
    N = found.factor.even_normalizer(0)[0].copy()
    K[0] += 1
    assert np.array_equal(found.factor.even_normalizer(0)[0], N)


def test_other_keys_are_refused() -> None:
    for K in (gauss(4, 9), copies()):
        found = levattn.universal_set(K, 0.1)
        for column in range(K.shape[1]):  # those that were factored, and the others
            other = K.copy()
            other[0, column] += 1
            with pytest.raises(ValueError, match="other keys"):
                levattn.heavy_attention(K, other, 0.1, universal=found)
        with pytest.raises(ValueError, match="d = 8"):
            levattn.heavy_attention(K[:, :8], K[:, :8], 0.1, universal=found)
        other[0, 0] = np.nan
        with pytest.raises(levattn.NonFiniteError):
            levattn.heavy_attention(K, other, 0.1, universal=found)


def test_projected_normalizers_and_recovered_entries() -> None:
    K = np.vstack([10 * gauss(2, 40), copies()[:, :20] @ gauss(20, 40, 9)])
    exact = levattn.heavy_attention(K, K, 0.3)
    recovered = levattn.heavy_attention(K, K, 0.3, method="countsketch")
    np.testing.assert_allclose(recovered.entries.toarray(), exact.entries.toarray(), rtol=DOUBLE)
    projected = levattn.heavy_attention(K, K, 0.3, method="jl")
    assert (np.abs(projected.normalizers / exact.normalizers - 1) <= projected.distortion).all()


# -- other functions, groups -------------------------------------------------------------


@pytest.mark.parametrize("f", [1, 0.5, 3, 4, Huber(1.0), Tukey(1.0), L1L2()], ids=repr)
def test_bounds_of_other_functions(f: Any) -> None:
    for K in (copies(), integers()):
        upper = levattn.sensitivities(K, f).upper
        reached = naive.largest_scores(K, f) if callable(f) else exact_sensitivities(K, f).lower
        assert (upper >= reached * (1 - DOUBLE)).all()
        assert (upper[~np.any(K, axis=1)] == 0).all()
        found = levattn.universal_set(K, 0.3, f=f)
        assert not (reached[~found.mask] >= 0.3).any()
        Q = of_many_kinds(K)
        Q = Q[np.any(Q, axis=1)]
        entries = levattn.heavy_attention(Q, K, 0.3, f=f).entries.toarray()
        values = found.f(Q @ K.T) if callable(found.f) else np.abs(Q @ K.T) ** f
        A = values / values.sum(axis=1, keepdims=True)
        # products with queries that are a hundred times as long as what keys see of them lose two digits
        np.testing.assert_allclose(entries[A >= 0.31], A[A >= 0.31], rtol=1e-7)
    assert (levattn.sensitivities(graded(150, 150, gauss(5, 12)), f).upper == 1).all()


def test_lewis_weights_of_a_basis_of_rows_are_one() -> None:
    np.testing.assert_allclose(levattn.lewis_weights(gauss(6, 30), 1), 1.0, rtol=DOUBLE)
    K = copies()
    expected = levattn.lewis_weights(np.vstack([K, np.zeros((20, 24))]), 1)[: len(K)]
    np.testing.assert_allclose(levattn.lewis_weights(K, 1), expected, rtol=DOUBLE)


@pytest.mark.parametrize("method", ["jensen", "ball"])
def test_softmax(method: Any) -> None:
    K = 3 * np.vstack([copies(), integers()[:, :24]])
    wide, tall = levattn.sensitivities(K, Softmax(0.5), method=method), Softmax(0.5, matrix=np.eye(24))
    # both are bounds, by other roundings: 16 d units of the norms, and steps that stop a little apart
    np.testing.assert_allclose(wide.upper, levattn.sensitivities(K, tall, method=method).upper, rtol=1e-6)
    Q = gauss(50, 24)
    Q *= 0.5 / np.linalg.norm(Q, axis=1, keepdims=True)
    A = np.stack([naive.softmax(K @ q) for q in Q])
    assert (wide.upper >= A.max(axis=0) * (1 - DOUBLE)).all()
    found = levattn.heavy_attention(Q, K, 0.1, f=Softmax(0.5)).entries.toarray()
    np.testing.assert_allclose(found[A >= 0.1001], A[A >= 0.1001], rtol=DOUBLE)
    with pytest.raises(ValueError, match="outside the set"):
        levattn.heavy_attention(2 * Q, K, 0.1, f=Softmax(0.5))


def test_groups() -> None:
    labels = np.random.default_rng(8).integers(-1, 3, 12)
    for K in (integers(), copies(), gauss(12, 40)):
        expected = naive.group_leverage(K, labels)
        np.testing.assert_allclose(levattn.group_leverage(K, labels), expected, rtol=DOUBLE)
        found = levattn.universal_set(K, 0.6).with_groups(K, labels)
        np.testing.assert_allclose(found.group_scores, expected, rtol=DOUBLE)
    assert levattn.near_duplicates(copies()).tolist() == [-1, 0, 0, -1, 1, 1, 1, 1, 1, 2, 2, 2]
    assert (levattn.near_duplicates(gauss(12, 40)) == -1).all()


# -- memory ------------------------------------------------------------------------------


def peak(call: Any) -> int:
    call()  # so that nothing is compiled any more
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("repeated", [1, 2])
def test_memory_is_that_of_a_few_copies_of_the_keys(repeated: int) -> None:
    K = np.repeat(gauss(16 // repeated, 4000), repeated, axis=0)
    universal = levattn.universal_set(K, 0.1)
    calls = {
        "scores": lambda: levattn.leverage_scores(K),
        "centered": lambda: levattn.leverage_scores(K, center=True),
        "set": lambda: levattn.universal_set(K, 0.1),
        "heavy": lambda: levattn.heavy_attention(K, K, 0.1, universal=universal).apply(K[:, :8]),
        "huber": lambda: levattn.universal_set(K, 0.1, f=Huber(1.0)),
        "softmax": lambda: levattn.universal_set(K, 0.1, f=Softmax(1.0)),
        "groups": lambda: levattn.group_leverage(K, np.arange(16) // 4),
    }
    # a d × d array would be 250 copies
    copies = {name: peak(call) / K.nbytes for name, call in calls.items()}
    assert {name: many for name, many in copies.items() if many > 16} == {}


@pytest.mark.parametrize("repeated", [1, 2])
def test_memory_of_sparse_keys_is_that_of_the_rows(repeated: int) -> None:
    n, d = 100, 10**6
    rng = np.random.default_rng(0)
    rows, columns = np.repeat(np.arange(n // repeated), 20), rng.integers(0, d, 20 * n // repeated)
    some = scipy.sparse.csr_array((rng.standard_normal(len(rows)), (rows, columns)), shape=(n // repeated, d))
    K = scipy.sparse.vstack([some] * repeated, format="csr")
    calls = {
        "scores": lambda: levattn.leverage_scores(K),
        "qr": lambda: levattn.leverage_scores(K, method="qr"),
        "ridge": lambda: levattn.leverage_scores(K, relative_ridge=0.1),
        "centered": lambda: levattn.leverage_scores(K, center=True),
        "set": lambda: levattn.universal_set(K, 0.1),
    }
    # a row of 10⁶ numbers has 8 MB, the keys written out have 800 MB
    megabytes = {name: peak(call) / 1e6 for name, call in calls.items()}
    assert {name: many for name, many in megabytes.items() if many > 24} == {}
    np.testing.assert_allclose(levattn.leverage_scores(K), 1 / repeated, rtol=DOUBLE)
