"""The scikit-learn estimator: scikit-learn's own checks, and the figures of the library for any chunks."""

from __future__ import annotations

import copy
import importlib
import itertools
import pickle
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import levattn
from levattn.integrations.sklearn import LeverageScorer
from naive import leverage_svd


def with_outliers(n: int, d: int = 4, seed: int = 0) -> np.ndarray:
    X = np.random.default_rng(seed).standard_normal((n, d))
    X[:: max(1, n // 5), -1] += 300
    return X


def in_chunks(X: np.ndarray, sizes: list[int], epsilon: float = 0.05) -> LeverageScorer:
    scorer = LeverageScorer(epsilon)
    edges = [min(edge, len(X)) for edge in itertools.accumulate(sizes, initial=0)]
    for low, high in itertools.pairwise([*edges, len(X)]):
        scorer.partial_fit(X[low:high])
    return scorer


def assert_same(one: LeverageScorer, other: LeverageScorer, X: np.ndarray) -> None:
    assert one.n_samples_seen_ == other.n_samples_seen_
    assert one.rank_ == other.rank_
    np.testing.assert_array_equal(one.universal_set_, other.universal_set_)
    np.testing.assert_array_equal(one.score_samples(X), other.score_samples(X))
    np.testing.assert_array_equal(one.transform(X), other.transform(X))


def test_keeps_the_contract_of_scikit_learn() -> None:
    from sklearn.utils.estimator_checks import check_estimator  # which imports the half of scikit-learn

    checks = check_estimator(LeverageScorer(), on_skip=None)
    assert sum(check["status"] == "passed" for check in checks) > 40


# What it computes


@pytest.mark.parametrize("n", [1, 3, 300, 5000])
def test_fit_gives_the_figures_of_the_library(n: int) -> None:
    X = with_outliers(n)
    scorer = LeverageScorer(0.1).fit(X)
    expected = levattn.universal_set(X, 0.1)
    np.testing.assert_allclose(scorer.score_samples(X), levattn.leverage_scores(X), rtol=1e-9)
    np.testing.assert_array_equal(scorer.universal_set_, expected.indices)
    assert (scorer.rank_, scorer.n_samples_seen_, scorer.n_features_in_) == (expected.rank, n, 4)
    np.testing.assert_array_equal(scorer.result_.keys, X[expected.indices])
    assert scorer.factor_ is scorer.result_.factor


@settings(max_examples=25)
@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 3000)), max_size=8))
def test_any_chunks_give_the_same_bits(sizes: list[int]) -> None:
    X = with_outliers(5000)
    assert_same(in_chunks(X, sizes), LeverageScorer().fit(X), X)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 4000), min_size=1, max_size=4))
def test_merged_estimators_are_one(sizes: list[int]) -> None:
    X = with_outliers(sum(sizes))
    parts = [LeverageScorer().fit(part) for part in np.split(X, np.cumsum(sizes)[:-1])]
    whole, merged = LeverageScorer().fit(X), LeverageScorer()
    for part in parts:
        before = part.n_samples_seen_
        assert merged.merge(part) is merged
        assert part.n_samples_seen_ == before
    np.testing.assert_array_equal(merged.universal_set_, whole.universal_set_)
    np.testing.assert_allclose(merged.score_samples(X), whole.score_samples(X), rtol=1e-9)
    assert (merged.n_samples_seen_, merged.n_features_in_) == (len(X), 4)
    assert_same(merged.merge(LeverageScorer()), merged, X)


def test_whitened_columns_are_orthonormal_and_their_rows_have_the_scores_as_norms() -> None:
    X = with_outliers(3000)
    scorer = LeverageScorer()
    Z = scorer.fit_transform(X)
    np.testing.assert_allclose(Z.T @ Z, np.eye(4), atol=1e-12)
    np.testing.assert_allclose(np.sum(Z**2, axis=1), leverage_svd(X), rtol=1e-9)
    new = with_outliers(50, seed=1)
    np.testing.assert_allclose(np.sum(scorer.transform(new) ** 2, axis=1), scorer.score_samples(new), rtol=1e-12)


@pytest.mark.parametrize("condition", [1e6, 1e9])
@pytest.mark.parametrize("n", [20, 9000])
def test_ill_conditioned_rows_keep_their_digits(n: int, condition: float) -> None:
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.standard_normal((8, 8)))[0]
    X = rng.standard_normal((n, 8)) * np.geomspace(1, 1 / condition, 8) @ rotation
    scorer = LeverageScorer().fit(X)
    expected = levattn.leverage_scores(X, method="svd")
    np.testing.assert_allclose(scorer.score_samples(X), expected, rtol=1e-9)
    np.testing.assert_allclose(np.sum(scorer.transform(X) ** 2, axis=1), expected, rtol=1e-9)


def test_sizes_beyond_the_range_of_squares() -> None:
    X = with_outliers(3000)
    far = X * [1e200, 1e-200, 1, 1e-300]
    scorer, plain = LeverageScorer().fit(far), LeverageScorer().fit(X)
    np.testing.assert_allclose(scorer.score_samples(far), plain.score_samples(X), rtol=1e-9)
    np.testing.assert_allclose(np.abs(scorer.transform(far)), np.abs(plain.transform(X)), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("fitted", "new", "dtype"), [(1e-200, 1e200, "f8"), (1.0, 1e308, "f8"), (1e-30, 1e30, "f4")])
def test_rows_that_whitened_leave_the_range_are_named(fitted: float, new: float, dtype: str) -> None:
    X = (fitted * with_outliers(10)).astype(dtype)
    scorer = LeverageScorer().fit(X)
    far = np.zeros((3, 4), dtype)
    far[2, :2] = new, -new
    assert np.isposinf(scorer.score_samples(far)[2])
    if new / fitted > float(np.finfo(dtype).max):
        with pytest.raises(ValueError, match="row 2, which whitened is beyond the range of float"):
            scorer.transform(far)
    else:
        assert np.isfinite(scorer.transform(far)).all()
    if dtype == "f8":  # of which products are
        assert np.array_equal(np.isnan(scorer.factor_.cross_leverage(far, X)).all(axis=1), [False, False, True])


# Rank


@pytest.mark.filterwarnings("ignore::levattn.RankWarning")
def test_rank_deficient_rows_have_as_many_whitened_columns_as_their_rank() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((4000, 3)) @ rng.standard_normal((3, 6))
    scorer = LeverageScorer().fit(X)
    Z = scorer.transform(X)
    assert Z.shape == (4000, scorer.rank_) == (4000, 3)
    np.testing.assert_allclose(Z.T @ Z, np.eye(3), atol=1e-10)
    np.testing.assert_allclose(scorer.score_samples(X), leverage_svd(X), rtol=1e-9)
    # Sums of moments cannot tell what rounding left of further directions, so no row is let go.
    assert np.all(np.isin(levattn.universal_set(X, 0.05).indices, scorer.universal_set_))
    assert list(scorer.get_feature_names_out()) == ["leveragescorer0", "leveragescorer1", "leveragescorer2"]


def test_new_rows_may_exceed_1_and_have_infinity_outside_the_row_space() -> None:
    X = [[1, 0, 0], [0, 2, 0], [0, 2, 0]]  # whole numbers, which are taken as float64
    scorer = LeverageScorer().fit(X)
    new = np.array([[3.0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]])
    np.testing.assert_allclose(scorer.score_samples(new), [9, 0.125, np.inf, 0])
    np.testing.assert_allclose(np.sum(scorer.transform(new) ** 2, axis=1), [9, 0.125, 0, 0])


def test_a_row_on_the_edge_of_the_rank_is_of_the_set_and_errs_upwards() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((300, 3)) @ rng.standard_normal((3, 6))
    X[5, 0] += 1e-13
    scorer = LeverageScorer().fit(X)
    assert scorer.rank_ == 3
    assert levattn.leverage_scores(X)[5] == 1
    assert scorer.score_samples(X)[5] == np.inf
    assert 5 in scorer.universal_set_
    assert scorer.result_.guarantee == "superset"


def test_rows_of_zeros_and_no_rows() -> None:
    for scorer in (LeverageScorer().fit(np.zeros((5, 3))), LeverageScorer().partial_fit(np.zeros((0, 3)))):
        assert (scorer.rank_, len(scorer.universal_set_)) == (0, 0)
        assert scorer.transform(np.ones((2, 3))).shape == (2, 0)
        np.testing.assert_array_equal(scorer.score_samples([[0.0, 0, 0], [0, 0, 1]]), [0, np.inf])


# Dtypes


def test_float32_stays_float32() -> None:
    X = with_outliers(5000).astype(np.float32)
    scorer = LeverageScorer().fit(X)
    assert scorer.score_samples(X).dtype == scorer.transform(X).dtype == scorer.result_.keys.dtype == np.float32
    np.testing.assert_allclose(scorer.score_samples(X), leverage_svd(X), rtol=1e-6)
    exact = scorer.score_samples(X.astype(np.float64))
    assert exact.dtype == scorer.transform(X.astype(np.float64)).dtype == np.float64
    np.testing.assert_allclose(exact, leverage_svd(X), rtol=1e-9)


def test_chunks_are_widened_but_never_narrowed() -> None:
    X = with_outliers(100).astype(np.float32)
    double = LeverageScorer().fit(X[:50].astype(np.float64)).partial_fit(X[50:])
    assert_same(double, LeverageScorer().fit(X.astype(np.float64)), X)
    single = LeverageScorer().fit(X[:50])
    for dtype in ("float64", "int32"):
        with pytest.raises(TypeError, match=f"X has dtype {dtype}; expected float32"):
            single.partial_fit(X[50:].astype(dtype))
    assert single.n_samples_seen_ == 50
    half = X[50:].astype(np.float16)
    assert_same(single.partial_fit(half), LeverageScorer().fit(np.concatenate([X[:50], half.astype(np.float32)])), X)


# As an estimator


def test_a_pickled_estimator_goes_on_with_the_same_bits() -> None:
    X = with_outliers(5000)
    scorer = in_chunks(X[:3000], [7, 2100])
    copy = pickle.loads(pickle.dumps(scorer))
    assert_same(copy, scorer, X)
    assert_same(copy.partial_fit(X[3000:]), LeverageScorer().fit(X), X)
    assert scorer.n_samples_seen_ == 3000


def test_works_in_a_pipeline() -> None:
    X = with_outliers(500)
    pipeline = make_pipeline(StandardScaler(), LeverageScorer(0.2)).fit(X)
    centered = StandardScaler().fit_transform(X)
    np.testing.assert_allclose(pipeline.score_samples(X), levattn.leverage_scores(centered), rtol=1e-9)
    assert pipeline.transform(X).shape == (500, 4)
    assert list(pipeline.get_feature_names_out()) == [f"leveragescorer{i}" for i in range(4)]
    assert type(pipeline.set_output(transform="default").transform(X)) is np.ndarray


def test_a_clone_is_not_fitted_and_says_so() -> None:
    scorer = clone(LeverageScorer(0.3).fit(with_outliers(10)))
    assert scorer.get_params() == {"epsilon": 0.3}
    for name in ("universal_set_", "rank_", "factor_", "result_", "n_samples_seen_"):
        assert not hasattr(scorer, name)
    for method in (scorer.transform, scorer.score_samples):
        with pytest.raises(NotFittedError, match="LeverageScorer instance is not fitted yet"):
            method(with_outliers(10))


# What it refuses


@pytest.mark.parametrize(
    ("epsilon", "error", "message"),
    [
        (0, ValueError, "epsilon is 0; expected 0 < epsilon"),
        ("a", TypeError, "epsilon is 'a'; expected a real number"),
    ],
)
def test_refuses_an_epsilon_out_of_range(epsilon: Any, error: type[Exception], message: str) -> None:
    scorer = LeverageScorer(epsilon)
    for fit in (scorer.fit, scorer.partial_fit):
        with pytest.raises(error, match=message):
            fit(with_outliers(10))


def test_refuses_another_epsilon_between_chunks() -> None:
    X = with_outliers(10)
    scorer = LeverageScorer().fit(X).set_params(epsilon=0.5)
    with pytest.raises(ValueError, match=r"epsilon is 0\.5; expected 0\.05"):
        scorer.partial_fit(X)
    assert scorer.fit(X).result_.epsilon == 0.5


def test_refuses_sparse_rows_and_weights() -> None:
    X = with_outliers(10)
    with pytest.raises(TypeError, match="dense data is required"):
        LeverageScorer().fit(sparse.csr_array(X))
    with pytest.raises(TypeError, match="sample_weight"):
        LeverageScorer().fit(X, sample_weight=np.ones(10))


def test_an_error_leaves_the_estimator_as_it_was() -> None:
    X = with_outliers(10)
    scorer = LeverageScorer().fit(X)
    for bad in (X[:, :2], np.full((1, 4), np.nan)):
        with pytest.raises(ValueError, match=r"2 features|NaN"):
            scorer.partial_fit(bad)
    assert_same(scorer, LeverageScorer().fit(X), X)


@pytest.mark.parametrize("fitted", [True, False])
@pytest.mark.parametrize("method", ["fit", "partial_fit"])
@pytest.mark.parametrize("bad", ["nan", "names", "empty", "object", "epsilon"])
@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
def test_a_failed_fit_leaves_all_attributes(bad: str, method: str, fitted: bool) -> None:
    pandas = pytest.importorskip("pandas")
    X = pandas.DataFrame(with_outliers(10), columns=list("abcd"))
    scorer = LeverageScorer().fit(X) if fitted else LeverageScorer()
    given: dict[str, Any] = {
        "nan": np.full((3, 5), np.nan),
        "names": X.rename(columns={"a": 7}),
        "empty": np.zeros((0, 0)),
        "object": np.array([["a"] * 3], object),
        "epsilon": X,
    }
    if bad == "epsilon":
        scorer.epsilon = 2.0
    before = vars(scorer).copy()
    with pytest.raises((ValueError, TypeError)):
        getattr(scorer, method)(given[bad])
    assert vars(scorer).keys() == before.keys()
    assert all(vars(scorer)[name] is before[name] for name in before)
    scorer.epsilon = 0.05
    assert_same(scorer.fit(X), LeverageScorer().fit(X), X)


def test_a_copy_has_a_stream_of_its_own() -> None:
    X = with_outliers(40)
    scorer = LeverageScorer().partial_fit(X[:20])
    branch, unfitted = copy.copy(scorer), copy.copy(LeverageScorer(0.3))
    assert (unfitted.epsilon, hasattr(unfitted, "n_features_in_")) == (0.3, False)
    assert_same(branch, scorer, X)
    scorer.partial_fit(X[20:])
    assert branch.n_samples_seen_ == 20
    assert_same(branch, LeverageScorer().fit(X[:20]), X)
    branch.partial_fit(X[30:])
    assert_same(scorer, LeverageScorer().fit(X), X)


def named(scorer: LeverageScorer, names: str) -> LeverageScorer:
    scorer.feature_names_in_ = np.array(list(names), dtype=object)
    return scorer


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        ("text", TypeError, "other is of type str; expected LeverageScorer"),
        (LeverageScorer(0.5).fit(with_outliers(10)), ValueError, "epsilon = 0.5"),
        (LeverageScorer().fit(with_outliers(10, d=3)), ValueError, "d = 3; expected"),
        (LeverageScorer().fit(with_outliers(10).astype(np.float32)), TypeError, "other has dtype float32"),
        (named(LeverageScorer().fit(with_outliers(10)), "abdc"), ValueError, "other has the columns"),
    ],
)
def test_refuses_to_merge_what_does_not_go_together(other: Any, error: type[Exception], message: str) -> None:
    scorer = named(LeverageScorer().fit(with_outliers(10)), "abcd")
    with pytest.raises(error, match=message):
        scorer.merge(other)
    assert scorer.n_samples_seen_ == 10


def test_names_of_columns_are_merged_into_an_estimator_without_rows() -> None:
    merged = LeverageScorer().merge(named(LeverageScorer().fit(with_outliers(10)), "abcd"))
    assert list(merged.feature_names_in_) == list("abcd")


def test_says_how_to_install_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "levattn.integrations.sklearn")
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(ImportError, match=r'needs scikit-learn: pip install "levattn\[sklearn\]"'):
        importlib.import_module("levattn.integrations.sklearn")
