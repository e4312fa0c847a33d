"""Sparse keys of which some columns depend on others: designs with full sets of dummies, and their neighbors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

import levattn
import naive
import strategies
from strategies import Float

pytestmark = pytest.mark.filterwarnings("ignore::levattn.RankWarning")

N = 900


def dummies(sizes: tuple[int, ...], n: int = N, seed: int = 0, rare: int = 0) -> Any:
    """Full sets of dummies, one entry of each set in a row; the first `rare` rows alone have the last levels."""
    rng = np.random.default_rng(seed)
    columns = np.stack([rng.integers(0, size - bool(rare), n) for size in sizes], axis=1)
    columns[:rare] = np.array(sizes) - 1
    columns += np.cumsum((0, *sizes[:-1]))
    entries = np.ones(columns.size), columns.ravel(), np.arange(0, columns.size + 1, len(sizes))
    return scipy.sparse.csr_array(entries, shape=(n, sum(sizes)))


def times(K: Any, factors: Float) -> Any:
    return scipy.sparse.csr_array(K.multiply(factors))


def beside(*parts: Any) -> Any:
    return scipy.sparse.csr_array(scipy.sparse.hstack(parts))


TWO, THREE, SMALL = dummies((40, 30)), dummies((40, 30, 8)), dummies((8, 6))
NUMBERS = np.random.default_rng(1).standard_normal(N)
ONES = np.ones((N, 1))

# keys and their rank
DESIGNS: dict[str, tuple[Any, int]] = {
    "two sets": (TWO, 69),
    "three sets": (THREE, 76),
    "with a constant": (beside(ONES, THREE), 76),
    "rare levels": (dummies((40, 30), rare=2), 68),
    "a set within another": (beside(TWO, TWO[:, 40:55].sum(axis=1)[:, None], TWO[:, 55:].sum(axis=1)[:, None]), 69),
    "with empty columns": (beside(scipy.sparse.csr_array((N, 4)), THREE, scipy.sparse.csr_array((N, 3))), 76),
    "with copies": (beside(THREE, THREE[:, ::3]), 76),
    "every column twice": (beside(TWO, TWO), 69),
    "with multiples": (beside(THREE, THREE[:, ::5] * 0.3, THREE[:, ::7] * -3), 76),
    "standardized": (times(THREE, 1 / np.sqrt(THREE.sum(axis=0))[None]), 76),
    "graded": (times(THREE, np.geomspace(1e-8, 1e8, 78)[None]), 76),
    "far out of range": (times(THREE, np.geomspace(1e-250, 1e250, 78)[None]), 76),
    "a covariate for each level": (beside(TWO, times(TWO[:, :40], NUMBERS[:, None]), NUMBERS[:, None]), 109),
    "halves": (beside(TWO, times(TWO[:, :40], 0.5 + (NUMBERS > 0)[:, None]), 1.5 + 2 * (NUMBERS > 0)[:, None]), 109),
    "odd multiples": (beside(TWO, (TWO[:, :3] @ np.array([1.0, 19.0, 23 / 64]))[:, None]), 69),
    "products of sets": (beside(SMALL, *(times(SMALL[:, :8], SMALL[:, [j]]) for j in range(8, 14))), 48),
    "more columns than LAPACK's": (dummies((350, 200), n=1400), 539),
}  # fmt: skip


def svd_oracle(K: Any) -> Float:
    """Leverage scores by the SVD of columns of unit norm, and the rank."""
    A = np.ldexp(K.toarray(), -np.frexp(abs(K).max(axis=0).toarray().ravel())[1])
    return naive.leverage_svd(A / np.maximum(np.linalg.norm(A, axis=0), 1e-300))


@pytest.mark.parametrize("kind", DESIGNS)
def test_scores_sets_and_ranks_are_exact(kind: str) -> None:
    K, rank = DESIGNS[kind]
    expected = svd_oracle(K)
    np.testing.assert_allclose(levattn.leverage_scores(K), expected, rtol=1e-9)
    found = levattn.universal_set(K, 0.03)
    assert (found.rank, found.guarantee) == (rank, "exact")
    np.testing.assert_allclose(found.scores, expected, rtol=1e-9)
    assert found.indices.tolist() == np.flatnonzero(expected >= 0.03).tolist()


@pytest.mark.parametrize("kind", ["two sets", "with multiples", "a covariate for each level", "rare levels"])
def test_float32_and_masks(kind: str) -> None:
    K, _ = DESIGNS[kind]
    single = levattn.leverage_scores(K.astype("float32"))
    assert single.dtype == np.float32
    if kind != "a covariate for each level":  # where rounding of the covariate makes other keys
        np.testing.assert_allclose(single, svd_oracle(K), rtol=1e-5)
    np.testing.assert_allclose(single, svd_oracle(K.astype("float32").astype(float)), rtol=1e-5)
    mask = np.arange(N) % 3 > 0
    dirty = K.copy()
    dirty.data[np.repeat(~mask, np.diff(K.indptr))] = np.nan  # masked rows are not read
    scores = levattn.leverage_scores(dirty, mask=mask)
    np.testing.assert_allclose(scores[mask], svd_oracle(K[np.flatnonzero(mask)]), rtol=1e-9)
    assert not scores[~mask].any()


@pytest.mark.parametrize("kind", ["three sets", "with empty columns", "graded", "every column twice"])
def test_queries_have_exact_normalizers_and_witnesses(kind: str) -> None:
    K, _ = DESIGNS[kind]
    found, dense = levattn.universal_set(K, 0.02), K.toarray()
    N = found.factor.forget_keys().normalizer[0]
    sizes = np.maximum(np.linalg.norm(dense, axis=0), 1e-300)
    np.testing.assert_allclose(N.T @ N / sizes[:, None] / sizes, dense.T @ dense / sizes[:, None] / sizes, atol=1e-12)
    queries = found.factor.witness(dense[::100])
    attention = naive.attention_exact(queries, dense)[:, ::100]
    np.testing.assert_allclose(np.diag(attention), levattn.leverage_scores(K)[::100], rtol=1e-6)


def test_columns_that_depend_up_to_rounding_keep_their_directions() -> None:
    """A sum that was rounded is no relation: the exact rank is full, and no score may be too small."""
    K = times(TWO, np.random.default_rng(3).standard_normal(N)[:, None])
    sums = K[:, :7] @ np.random.default_rng(4).standard_normal(7)
    held = beside(K, sums[:, None])
    found, dense = levattn.universal_set(held, 0.05), levattn.universal_set(held.toarray(), 0.05)
    assert (found.rank, found.guarantee) == (dense.rank, dense.guarantee)
    assert found.guarantee == "superset"
    np.testing.assert_allclose(found.scores, dense.scores, rtol=1e-6)


@strategies.examples(40)
@given(strategies.sparse_keys(columns=(3, 8, 20), max_rows=60), st.integers(0, 2**32 - 1))
def test_small_integers_with_columns_that_depend_on_others(K: Float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    mixed = np.hstack([K, K @ rng.integers(-2, 3, (K.shape[1], 2)), K[:, :1] * 3])
    exact = naive.leverage_exact(mixed)
    found = levattn.universal_set(strategies.csr(mixed), 0.3)
    assert (found.rank, found.guarantee) == (naive.rank_exact(mixed), "exact")
    np.testing.assert_allclose(found.scores, exact, rtol=1e-9, atol=1e-25)
