"""The factor as an object: scores of other rows, normalizers and witness queries for any keys.

Inside: routes are taken that a call would not choose for the keys, and errors they claim are judged.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from itertools import product
from operator import mul
from typing import Any

import numpy as np
import pytest

import levattn
import naive
import strategies
from levattn._kernels import Rows
from levattn.linalg import Factor
from levattn.linalg import sums as moment_sums
from levattn.linalg.accumulator import PLAIN_ERROR
from levattn.linalg.centered import centered
from levattn.linalg.routes import factor_moments, factor_qr, rank_tolerance

ROUTES = {
    "moments": lambda rows: factor_moments(rows, single="no"),
    "qr": lambda rows: factor_qr(rows, method="qr"),
    "svd": lambda rows: factor_qr(rows, method="svd"),
}
KEYS = ["gaussian", "coherent", "deficient-exact", "duplicated", "conditioned-1e4"]


@pytest.fixture(params=product(ROUTES, KEYS), ids="-".join)
def factored(request: pytest.FixtureRequest) -> tuple[strategies.Float, Factor]:
    """Give named keys and their factor by one of the routes."""
    route, name = request.param
    K = strategies.case(name)
    return K, ROUTES[route](Rows(K[None], "float64"))


def test_normalizer_is_the_sum_of_squares(factored: Any) -> None:
    K, factor = factored
    Q = np.vstack([np.random.default_rng(0).standard_normal((50, K.shape[1])), K[:20]])
    found = ((Q @ factor.normalizer[0].T) ** 2).sum(axis=1)
    np.testing.assert_allclose(found, naive.normalizers(Q, K), rtol=1e-11)


def test_witness_query_attains_the_score(factored: Any) -> None:
    K, factor = factored
    scores = factor.scores()[0][0]
    attained = np.diag(naive.attention(factor.witness(K), K))
    heavy = scores > 1e-3
    np.testing.assert_allclose(attained[heavy], scores[heavy], rtol=1e-8)


def test_condition_is_that_of_the_row_space(factored: Any) -> None:
    K, factor = factored
    s = np.linalg.svd(K, compute_uv=False)
    rank = int(factor.rank[0])
    assert rank == np.linalg.matrix_rank(K)
    assert factor.condition[0] == pytest.approx(s[0] / s[rank - 1], rel=1e-6)


def test_the_estimated_error_holds() -> None:
    for condition in 10.0 ** np.arange(0, 13, 2):
        K = strategies.conditioned(np.random.default_rng(0), 400, 12, condition)
        factor = factor_moments(Rows(K[None], "float64"), single="no")
        exact = naive.leverage_exact(K)
        worst = np.max(np.abs(factor.scores()[0][0] / exact - 1))
        assert worst <= 8 * factor.score_error[0]


def test_the_rank_tolerance_does_not_grow_with_n() -> None:
    """A key of ordinary size with a tiny direction of its own stays in, however many the others are."""
    n, d = 200_000, 8
    rng = np.random.default_rng(0)
    K = rng.standard_normal((n, d))
    K[:, -1] = 0
    K[17, -1] = 1e-9
    turn = np.linalg.qr(rng.standard_normal((d, d)))[0]
    assert 1e-9 / np.sqrt(n) < n * 2.0**-52  # n·u would cut it off
    assert rank_tolerance(d) < 1e-9 / np.sqrt(n)
    for keys in (K, K @ turn):
        found = levattn.universal_set(keys, 0.5)
        assert found.indices.tolist() == [17]
        assert found.rank == d


@pytest.mark.parametrize("method", ["auto", "gram", "qr", "svd"])
def test_the_rounding_of_many_equal_keys_opens_no_direction(method: str) -> None:
    """Equal keys are rounded alike: QR of seeds 14 and 32 has a fourth singular value above the tolerance."""
    for seed in (0, 14, 32):
        K = np.outer(np.random.default_rng(seed).choice([-18, -12, -6, 6, 12, 18, 24], 5000), [2.0, -1, 2, 0])
        K[-3:] = [[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 1, 1]]
        found = levattn.universal_set(K, 0.5, method=method)
        assert (found.rank, found.guarantee) == (naive.rank_exact(K), "exact")
        assert levattn.leverage_scores(K, method=method).sum() == pytest.approx(3, rel=1e-9)


@pytest.mark.parametrize("kind", ["gaussian", "coherent", "graded", "ill-conditioned", "deficient"])
def test_wide_matrices_take_blas(kind: str) -> None:
    """From 512 columns on moments and Cholesky factors are those of BLAS and LAPACK."""
    rng = np.random.default_rng(0)
    K = rng.standard_normal((2100, 520))  # a block of rows and a part of one
    if kind == "coherent":
        K[:600] *= np.exp(rng.uniform(0, 6, (600, 1)))
    if kind == "graded":
        K *= np.geomspace(1e-90, 1e90, 520)
        K[:, 7] = 0
    if kind == "ill-conditioned":
        K = K * np.geomspace(1, 1e-7, 520) @ np.linalg.qr(rng.standard_normal((520, 520)))[0]
    if kind == "deficient":
        K[:, 500:] = K[:, :20]
    scaled = K / np.maximum(np.abs(K).max(axis=0), 1e-300)
    U, s, _ = np.linalg.svd(scaled, full_matrices=False)
    exact = np.sum(U[:, s > 1e-12 * s[0]] ** 2, axis=1)
    found = levattn.leverage_scores(K)
    np.testing.assert_allclose(found, exact, rtol=1e-6 if kind == "ill-conditioned" else 1e-9)
    assert levattn.universal_set(K, 0.5).rank == np.count_nonzero(s > 1e-12 * s[0])
    with levattn.thread_limit(1):
        np.testing.assert_array_equal(levattn.leverage_scores(K), found)


def test_many_columns_in_float32_have_the_scores_of_the_definition() -> None:
    """All threads read one packed factor; 520 columns fill no whole panel of it."""
    K = np.random.default_rng(0).standard_normal((9000, 520)).astype(np.float32)
    found = levattn.leverage_scores(K)
    assert factor_moments(Rows(K[None], "float32")).arithmetic == ("single",)
    np.testing.assert_allclose(found, naive.leverage_svd(K), rtol=1e-5)
    with levattn.thread_limit(1):
        np.testing.assert_array_equal(levattn.leverage_scores(K), found)


@pytest.mark.parametrize("condition", 10.0 ** np.arange(0, 15, 2))
def test_normalizers_are_as_exact_as_they_claim(condition: float) -> None:
    """Against exact rationals, for queries of all kinds, those nearly orthogonal to the keys among them."""
    rng = np.random.default_rng(int(np.log10(condition)))
    for K in (strategies.conditioned(rng, 60, 6, condition), rng.standard_normal((60, 6))):
        K[:, 1] = K[:, 0] + K[:, 1] / condition
        V = np.linalg.svd(K)[2]
        Q = np.vstack([np.eye(6), rng.standard_normal((4, 6)), V, V[-1] + 1e-9 * V[0]])
        exact = [sum(sum(map(mul, map(Fraction, q), map(Fraction, k))) ** 2 for k in K.tolist()) for q in Q.tolist()]
        heavy = levattn.heavy_attention(Q, K, 0.01)
        states = levattn.CausalUniversalSet(0.01).update(K[:50]).update(K[50:]).heavy(Q)
        for found, error in ((heavy.normalizers, heavy.error), (states.normalizers, states.error)):
            off = [abs(float(Fraction(float(x)) / y - 1)) for x, y in zip(found, exact, strict=True)]
            assert np.all(off <= np.maximum(1e-12, 4 * error))


def copied(seed: int, kind: str) -> tuple[strategies.Float, list[int], strategies.Float]:
    """A few keys, how many copies there are of each, and all of them in some order."""
    rng = np.random.default_rng(seed)
    d = int(rng.integers(2, 6))
    if kind == "one line":
        X = rng.random((1, d))
    elif kind == "dependent":
        X = rng.integers(-4, 5, (d, d - 1)) @ (rng.integers(1, 2**20, (d - 1, d)) * 2.0**-20)
    else:  # next to one line
        X = rng.random(d) + 10.0 ** -rng.uniform(0, 4) * rng.standard_normal((d, d))
    counts = rng.integers(300, 4097, len(X)).tolist()
    K = np.repeat(X, counts, axis=0)
    return X, counts, K[rng.permutation(len(K))] if seed % 2 else K


def exact_normalizer(q: strategies.Float, X: strategies.Float, counts: list[int]) -> Fraction:
    products = [sum(map(mul, map(Fraction, q.tolist()), map(Fraction, x))) for x in X.tolist()]
    return sum((n * z * z for n, z in zip(counts, products, strict=True)), Fraction(0))


def in_memory(K: strategies.Float, Q: strategies.Float, method: str = "auto") -> tuple[Any, Any]:
    found = levattn.heavy_attention(Q, K, 0.001, universal=levattn.universal_set(K, 0.001, method=method))
    return found.normalizers, found.error


def in_chunks(K: strategies.Float, Q: strategies.Float) -> tuple[Any, Any]:
    universal = levattn.universal_set(lambda: iter([K[:700], K[700:]]), 0.001)
    found = levattn.heavy_attention(Q, K, 0.001, universal=universal)
    return found.normalizers, found.error


def while_decoding(K: strategies.Float, Q: strategies.Float) -> tuple[Any, Any]:
    found = levattn.CausalUniversalSet(0.3).update(K).heavy(Q)
    return found.normalizers, found.error


OF_QUERIES = {
    "auto": in_memory,
    "qr": partial(in_memory, method="qr"),
    "svd": partial(in_memory, method="svd"),
    "chunks": in_chunks,
    "decoding": while_decoding,
}


@pytest.mark.parametrize("kind", ["one line", "dependent", "next to one line"])
@pytest.mark.parametrize("route", OF_QUERIES)
def test_normalizers_of_copied_keys(route: str, kind: str) -> None:
    """Copies are rounded alike, so that errors of sums add up; and sums of them may be the rounding of nothing."""
    for seed in range(strategies.trials(100)):
        X, counts, K = copied(seed, kind)
        d = X.shape[1]
        orthogonal = np.zeros(d)
        orthogonal[:2] = X[0, 1], -X[0, 0]
        Q = np.vstack([np.eye(d), np.random.default_rng(seed).standard_normal((3, d)), orthogonal, orthogonal + 0.1])
        found, error = OF_QUERIES[route](K, Q)
        for q, x, e in zip(Q, found, error, strict=True):
            exact = exact_normalizer(q, X, counts)
            assert np.isinf(e) or abs(Fraction(x) - exact) <= max(1e-12, 4 * e) * max(Fraction(x), exact), (seed, q)


@pytest.mark.parametrize("n", [300, 2048, 4096])
def test_a_key_beside_copies_of_another_is_found_while_decoding(n: int) -> None:
    """It is the only one that the query meets."""
    for seed in range(20):
        r = np.random.default_rng(seed).random(2)
        state = levattn.CausalUniversalSet(0.3).update(np.tile(r, (n, 1))).update(np.array([[1.0, 0]]))
        found = state.heavy(np.array([[r[1], -r[0]]]))
        assert found.indices.tolist() == [n], seed
        assert found.scores[0] == pytest.approx(1, abs=max(1e-9, 4 * found.error[0]))


@pytest.mark.parametrize("storage", ["float64", "float32"])
@pytest.mark.parametrize("method", ["auto", "gram", "qr", "svd"])
def test_ties_of_copied_keys_are_in(method: str, storage: str) -> None:
    """Independent keys score one over the number of their copies; estimated errors hold."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        a, b = rng.random(2) + 0.5
        X = np.array([[a, b], [a, b * (1 - 10.0 ** -rng.uniform(0, 5.5))]], storage)
        K = np.repeat(X, [5000, 500], axis=0)[rng.permutation(5500)]
        first = np.all(X[0] == K, axis=1)
        exact = np.where(first, 1 / 5000, 1 / 500)
        for epsilon in (1 / 5000, 1 / 500):
            found = levattn.universal_set(K, epsilon, method=method)
            assert np.all(found.mask | (exact < epsilon)), (seed, epsilon)
            assert found.guarantee == "superset" or np.array_equal(found.mask, exact >= epsilon)
        factor = found.factor.exactly()
        scores = np.asarray(factor.on(Rows(K[None], storage)).scores(as_float64=True)[0][0])
        assert np.max(np.abs(scores / exact - 1)) <= 4 * factor.error[0] + 1e-15, seed


def test_a_line_of_keys_met_in_one_example() -> None:
    """As it was found: the moments of copies, turned, were zero but for rounding below it."""
    r = np.random.default_rng(1).random(2)
    K = np.tile(r, (2048, 1))
    factor = levattn.universal_set(lambda: iter([K]), 0.0004).factor
    N = factor.normalizer[0]
    assert np.linalg.norm(N @ [r[1], -r[0]]) <= 1e-12
    assert np.sum((N @ r) ** 2) == pytest.approx(2048 * (r @ r) ** 2, rel=1e-12)


def test_scores_in_float32_of_copied_keys_err_by_what_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in float32 of equal rows drift by up to 25 units; here all are so summed, whatever some rows say."""
    monkeypatch.setattr(moment_sums, "_isotropic", lambda rows: np.ones(rows.shape[0], np.bool_))
    sums = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        X = (rng.random(2) + np.eye(2) * rng.choice([0.5, 1, 2])).astype("f4")
        counts = rng.integers(4500, 9000, 2)
        factor = factor_moments(Rows(np.repeat(X, counts, axis=0)[None], "float32"))
        scores = np.asarray(factor.scores(as_float64=True)[0][0])[[0, -1]]
        assert np.max(np.abs(scores * counts - 1)) <= 4 * factor.score_error[0], seed
        sums.append(bool(factor.error[0] >= 24 * 2.0**-24))
    assert sum(sums) >= 5  # of keys that were summed in float32


def _anisotropic(seed: int) -> Any:
    """Return float32 keys of condition up to 1000: spread, with a mean, of a faint direction, copies, with tails."""
    rng = np.random.default_rng(seed)
    d, kappa = int(rng.choice([2, 3, 16, 33, 64])), 10 ** rng.uniform(0, 3)
    n = 2048 + int(rng.integers(0, 3000))
    X, V = rng.standard_normal((n, d)), np.linalg.qr(rng.standard_normal((d, d)))[0]
    spread = np.geomspace(1, 1 / kappa, d)
    faint = np.where(np.arange(d) == d - 1, 1 / kappa, 1.0)
    if seed % 5 == 0:
        X = (X * spread) @ V.T
    elif seed % 5 == 1:
        X = X + kappa * rng.standard_normal(d)
    elif seed % 5 == 2:
        X = (X * faint) @ V.T
    elif seed % 5 == 3:
        X = ((rng.standard_normal((d, d)) * spread) @ V.T)[rng.integers(0, d, n)]
    else:
        X = (X / np.abs(rng.standard_normal((n, 1))) * spread) @ V.T
    return X.astype("f4")


def test_float32_products_err_by_no_more_than_is_claimed() -> None:
    """Against float64, whose error is smaller by 2⁻²⁰: below 1e-5, and below four times the estimate."""
    single = 0
    for seed in range(60):
        keys = _anisotropic(seed)
        factor = factor_moments(Rows(keys[None], "float32"), single="scores")
        if factor.arithmetic != ("single",):
            assert factor.product_error[0] == 0
            continue
        single += 1
        exact = naive.leverage_svd(keys.astype(np.float64))
        error = np.max(np.abs(np.asarray(factor.scores(as_float64=True)[0][0]) / exact - 1))
        assert error <= 4 * factor.score_error[0], seed
        assert error <= 1e-5, seed
    assert single >= 30


def test_heads_of_a_real_model_are_scored_in_float32() -> None:
    """All of the packaged heads, alone and two side by side, as many times as float32 products need rows."""
    heads = levattn.datasets.minilm().keys.reshape(72, 512, 32)
    pairs = np.concatenate([heads[::2], heads[1::2]], axis=2)
    for keys in (heads, pairs):
        many = np.concatenate([keys] * 4, axis=1).astype("f4")
        factor = factor_moments(Rows(many, "float32"))
        assert set(factor.arithmetic) == {"single"}
        scores = factor.scores()[0]
        for item in range(0, len(many), 7):
            exact = naive.leverage_svd(keys[item].astype(np.float64)) / 4
            np.testing.assert_allclose(scores[item, :512], exact, rtol=1e-5)


LONG = 4 * 2048  # rows from which a block in the middle gives the first basis here


def _long_keys(kind: str) -> Any:
    """Return ill-conditioned keys of which the block in the middle is like the others, or is not."""
    rng = np.random.default_rng(3)
    d = 6
    keys = strategies.conditioned(rng, LONG, d, 1e6)
    middle = slice(LONG // 2, LONG // 2 + 2048)
    if kind == "another condition":
        keys[middle] = strategies.conditioned(rng, 2048, d, 1e9)
    elif kind == "a block without a direction":
        keys[middle] = keys[middle, :5] @ rng.standard_normal((5, d))
    elif kind == "a column that the block lacks":
        keys[middle, 2] = 0.0
    elif kind == "columns that the block lacks":
        keys[middle, 2:4] = 0.0
    elif kind == "the block alone has a direction":
        rest = np.r_[0 : middle.start, middle.stop : LONG]
        keys[rest] = keys[rest, :5] @ rng.standard_normal((5, d))
    elif kind == "a row that outweighs all":
        keys[7] *= 1e6
    elif kind == "a deficient matrix":
        keys[:, 5] = keys[:, 0]
    elif kind == "sizes far apart":
        keys *= np.ldexp(1.0, np.array([0, 200, -200, 3, 0, 40]))
    return keys


@pytest.mark.parametrize("power", [-44, -40, -38, -36, -34, 48])
def test_a_first_basis_and_a_scale_do_not_meet(power: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns whose squares hardly have the range of float32 are scaled, and then all is found under that scale."""
    monkeypatch.setattr(moment_sums, "LONG", LONG)
    keys = (_long_keys("all alike") * 2.0**power).astype("f4")
    exact = naive.leverage_exact(keys.astype(float))
    for single in ("scores", "yes"):
        scores = np.asarray(factor_moments(Rows(keys[None], "float32"), single=single).scores(numerical=True)[0][0])
        np.testing.assert_allclose(scores, exact, rtol=1e-6)


def test_keys_that_a_few_rows_call_isotropic_have_the_same_bits_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the first of 2048 rows in the middle say so, and the others are ill-conditioned."""
    monkeypatch.setattr(moment_sums, "LONG", LONG)
    keys, rng = _long_keys("all alike").astype("f4"), np.random.default_rng(0)
    keys[LONG // 2 : LONG // 2 + moment_sums._SAMPLE] = (
        rng.standard_normal((moment_sums._SAMPLE, keys.shape[1])) * 1e-7
    )
    others = _long_keys("another condition").astype("f4")
    alone = factor_moments(Rows(keys[None], "float32"))
    beside = factor_moments(Rows(np.stack([keys, others]), "float32"))
    assert np.array_equal(alone.W[0], beside.W[0])


@pytest.mark.parametrize(
    "kind",
    [
        "all alike",
        "another condition",
        "a block without a direction",
        "a column that the block lacks",
        "columns that the block lacks",
        "the block alone has a direction",
        "a row that outweighs all",
        "a deficient matrix",
        "sizes far apart",
    ],
)
def test_a_first_basis_from_one_block_changes_no_score(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is like the other rows or not; beside a neighbor that needs none, and on the way without it."""
    monkeypatch.setattr(moment_sums, "LONG", LONG)
    keys = _long_keys(kind)
    neighbor = np.random.default_rng(4).standard_normal(keys.shape)
    both = Rows(np.stack([keys, neighbor]), "float64")
    scores = np.asarray(factor_moments(both, single="no").scores(numerical=True)[0])
    assert np.array_equal(scores[0], factor_moments(both.item(0), single="no").scores(numerical=True)[0][0])
    np.testing.assert_allclose(scores[0], naive.leverage_exact(keys), rtol=1e-10, atol=1e-20)
    np.testing.assert_allclose(scores[1], naive.leverage_svd(neighbor), rtol=1e-12)
    monkeypatch.setattr(moment_sums, "LONG", LONG + 1)
    before = np.asarray(factor_moments(both, single="no").scores(numerical=True)[0])
    np.testing.assert_allclose(scores, before, rtol=1e-10)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("kind", ["all alike", "a block without a direction", "columns that the block lacks"])
def test_a_block_that_lacks_a_direction_gives_no_basis(kind: str, center: bool) -> None:
    """Where the mean is taken off, columns of zeros are alike but for rounding; and one direction is the mean's."""
    rows = Rows(_long_keys(kind)[None], "float64")
    rows = centered(rows) if center else rows
    begun = moment_sums._begun(rows, PLAIN_ERROR, np.array([False]))
    assert bool(begun) == (kind == "all alike" or (kind == "a block without a direction" and center))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_named_behind_a_first_basis(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moment_sums, "LONG", LONG)
    keys = _long_keys("all alike")
    keys[11, 3] = bad
    with pytest.raises(levattn.NonFiniteError, match="11"):
        levattn.leverage_scores(keys)


@pytest.mark.parametrize("size", [1e160, 1e200])
def test_many_columns_whose_squares_overflow_are_scaled_without_a_warning(size: float) -> None:
    K = np.random.default_rng(0).standard_normal((600, 512))
    assert np.array_equal(levattn.leverage_scores(K * size) > 0.8, levattn.leverage_scores(K) > 0.8)
    K[3, 5] = np.inf
    with pytest.raises(levattn.NonFiniteError, match="row"):
        levattn.leverage_scores(K)


def test_few_keys_whose_squares_overflow_are_scaled_without_a_warning() -> None:
    K = np.array([[0.0, -4e-7, 6e-7], [0.0, 0.0, 0.0], [7e192, 0.0, 0.0]])
    assert levattn.leverage_scores(K).tolist() == [1, 0, 1]


def test_factors_are_equal_to_themselves_alone() -> None:
    """As other results are; a comparison of arrays has no single answer."""
    factor, other = (levattn.universal_set(np.eye(3), 0.5).factor for _ in range(2))
    assert factor == factor
    assert factor != other
    assert len({factor, other}) == 2
