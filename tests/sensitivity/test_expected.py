"""Expected scores against known answers, adaptive quadrature, draws of queries and loops over queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy

import levattn
import naive
import strategies
from adversary import oracle
from levattn.exceptions import NonFiniteError
from levattn.states import Moments
from libraries import over_storages, stored
from strategies import STORAGE, as_float64, stores

SOFTMAX = levattn.Softmax()
CHANCE = 1e-9  # of a test of draws to fail where nothing is wrong, for each seed that it could have


def rng_of(*seed: int) -> np.random.Generator:
    return np.random.default_rng([2510, *seed])


def whitened(K: naive.Float) -> tuple[naive.Float, naive.Float]:
    """Queries whose second moment is the inverse of that of the keys."""
    return np.zeros(K.shape[1]), np.linalg.pinv(K.T @ K)


def draws_differ(expected: naive.Float, mean: naive.Float, count: int) -> naive.Float:
    """By how much the mean of `count` draws is farther off than Bernstein allows for numbers in [0, 1]."""
    surprise = math.log(2 * expected.size / CHANCE)
    return np.abs(mean - expected) - np.sqrt(2 * expected * surprise / count) - surprise / (3 * count)


# -- known answers -----------------------------------------------------------------------


def answers() -> dict[str, tuple[Any, Any, Any]]:
    """Keys, queries and the scores of x² that are known for them."""
    rng = rng_of(1)
    x = rng.standard_normal((30, 1))
    tall, orthonormal = rng.standard_normal((40, 5)), np.linalg.qr(rng.standard_normal((6, 6)))[0]
    deficient = rng.integers(-2, 3, (25, 3)) @ rng.integers(-2, 3, (3, 7)) * 1.0
    copied = np.repeat(rng.standard_normal((9, 3)), [1, 5, 2, 1, 1, 7, 1, 1, 3], axis=0)
    q = rng.standard_normal((1, 5))
    holes = np.where(np.arange(40)[:, None] % 3 == 0, 0.0, tall)
    return {
        "one-column": (x, rng.standard_normal((7, 1)), x[:, 0] ** 2 / np.sum(x**2)),
        "orthonormal": (orthonormal, (np.zeros(6), 4 * np.eye(6)), np.full(6, 1 / 6)),
        "blocks": (strategies.identity_blocks(4, 3), (np.zeros(4), np.eye(4)), np.full(12, 1 / 12)),
        "whitened": (tall, whitened(tall), naive.leverage_exact(tall) / 5),
        "whitened-deficient": (deficient, whitened(deficient), naive.leverage_exact(deficient) / 3),
        "whitened-copies": (copied, whitened(copied), naive.leverage_exact(copied) / 3),
        "whitened-zeros": (holes, whitened(holes), naive.leverage_exact(holes) / 5),
        "one-query": (tall, q, naive.attention(q, tall)[0]),
        "one-direction": (tall, q * np.array([[1.0], [-3.0], [0.1]]), naive.attention(q, tall)[0]),
        "one-wide-key": (rng.standard_normal((1, 8)), rng.standard_normal((9, 8)), np.ones(1)),
        "wide": (np.eye(8)[:3], (np.ones(8), np.eye(8) - np.ones((8, 8)) / 9), None),
        "orthogonal": (np.eye(6)[:4], np.eye(6)[4:], np.zeros(4)),
        "no-queries-but-zero": (tall, np.zeros((3, 5)), np.zeros(40)),
        "no-keys-but-zero": (np.zeros((4, 5)), rng.standard_normal((3, 5)), np.zeros(4)),
        "no-keys": (np.zeros((0, 5)), rng.standard_normal((3, 5)), np.zeros(0)),
        "subspace": (tall, np.array([[1.0, 2, 0, 0, 0], [0, 1, 0, 0, 0], [3, 1, 0, 0, 0]]), None),
        "deficient": (deficient, rng.standard_normal((50, 7)), None),
        "n<d": (rng.standard_normal((4, 9)), rng.standard_normal((50, 9)), None),
        "graded": (strategies.case("graded-1e-4"), rng.standard_normal((50, 8)), None),
        "copies": (copied, rng.standard_normal((20, 3)), None),
        "coherent": (strategies.case("coherent"), rng.standard_normal((50, 8)) * np.arange(1, 9), None),
    }


def second_of(queries: Any) -> naive.Float:
    if isinstance(queries, tuple):
        return np.asarray(queries[1] + np.outer(queries[0], queries[0]))
    return np.asarray(queries.T @ queries / len(queries))


@pytest.mark.parametrize("name", answers())
def test_scores_of_squares_are_the_known_ones(name: str) -> None:
    K, queries, known = answers()[name]
    scores = levattn.expected_scores(K, queries)
    expected = naive.expected_squares(second_of(queries), K) if known is None else known
    np.testing.assert_allclose(scores, expected, rtol=1e-9, atol=1e-14)
    assert scores.sum() == pytest.approx(float(np.any(expected > 0)), abs=1e-9)
    order = rng_of(2).permutation(len(K))
    np.testing.assert_allclose(levattn.expected_scores(K[order], queries), scores[order], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", strategies.CASES)
def test_named_keys_have_scores_that_sum_to_one(name: str) -> None:
    """For queries without direction, and for some that mostly see what the keys have little of."""
    K = strategies.case(name)
    scale = np.abs(K).max(initial=0.0) or 1.0
    for C in (np.eye(K.shape[1]), np.diag(np.geomspace(1e-6, 1, K.shape[1]))):
        scores = levattn.expected_scores(K, (np.zeros(K.shape[1]), C))
        assert np.all((scores >= 0) & (scores <= 1))
        assert scores.sum() == pytest.approx(float(np.any(K)), abs=1e-9)
        np.testing.assert_allclose(scores, naive.expected_squares(C, K / scale), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kappa", [1e2, 1e5, 1e8])
def test_a_sample_loses_no_more_than_its_condition_number(kappa: float) -> None:
    """Whitened queries, with a singular value for each of the keys; covariances of them lose the square of it."""
    rng = rng_of(30)
    K = strategies.conditioned(rng, 200, 16, kappa)
    _, s, Vt = np.linalg.svd(K, full_matrices=False)
    Q = np.linalg.qr(rng.standard_normal((40, 16)))[0] @ (Vt / s[:, None])
    expected = naive.leverage_exact(K) / 16
    np.testing.assert_allclose(levattn.expected_scores(K, Q), expected, rtol=2e-15 * kappa)
    if kappa < 1e7:
        C = Q.T @ Q
        scores = levattn.expected_scores(K, (np.zeros(16), C / 2 + C.T / 2))
        np.testing.assert_allclose(scores, expected, rtol=1e-16 * kappa**2 + 1e-12)


def drawn_mean(K: naive.Float, mean: Any, L: naive.Float, f: Any, count: int) -> naive.Float:
    total, step = np.zeros(len(K)), 50_000
    for block in range(count // step):
        Z = (mean + rng_of(4, block).standard_normal((step, L.shape[1])) @ L.T) @ K.T
        F = np.exp(Z - Z.max(axis=1, keepdims=True)) if f is None else f(Z)
        total += (F / F.sum(axis=1, keepdims=True)).sum(axis=0)
    return total / count


@pytest.mark.parametrize("count", [200_000, pytest.param(10_000_000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", ["isotropic", "graded", "low-rank"])
@pytest.mark.crossed
def test_scores_of_squares_are_means_over_normal_queries(kind: str, count: int) -> None:
    rng = rng_of(5)
    K = rng.standard_normal((12, 3)) * np.array([3.0, 1, 0.2])
    L = {"isotropic": np.eye(3), "graded": np.diag([0.01, 1, 5]) @ rng.standard_normal((3, 3)), "low-rank": K[:2].T}
    scores = levattn.expected_scores(K, (np.zeros(3), L[kind] @ L[kind].T))
    assert np.all(draws_differ(scores, drawn_mean(K, 0.0, L[kind], np.square, count), count) <= 0)


@pytest.mark.parametrize(
    "exponents", [(0, 0), (7, -3), (150, -150), (-150, 150), (150, 150), (-150, -150), (290, 160)]
)
@pytest.mark.parametrize("method", ["normal", "mean"])
@pytest.mark.parametrize("shape", [(40, 5), (3, 5)])
@pytest.mark.crossed
def test_scale_changes_nothing(exponents: tuple[int, int], method: Any, shape: tuple[int, int]) -> None:
    K, Q = rng_of(6).standard_normal(shape), rng_of(7).standard_normal((30, shape[1]))
    keys, queries = K * 10.0 ** exponents[0], Q * 10.0 ** exponents[1]
    expected = levattn.expected_scores(K, Q, method=method)
    np.testing.assert_allclose(levattn.expected_scores(keys, queries, method=method), expected, rtol=1e-11)
    cubes = levattn.expected_scores(K, Q, f=3, method=method)
    np.testing.assert_allclose(levattn.expected_scores(keys, queries, f=3, method=method), cubes, rtol=1e-11)
    assert expected.sum() == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("method", ["normal", "mean"])
def test_columns_and_rows_of_any_size(method: Any) -> None:
    K, Q = rng_of(8).standard_normal((40, 5)), rng_of(9).standard_normal((30, 5))
    columns = 2.0 ** np.array([-490, 490, 0, 100, -3])
    expected = levattn.expected_scores(K, Q, method=method)
    np.testing.assert_allclose(levattn.expected_scores(K * columns, Q / columns, method=method), expected, rtol=1e-10)
    K[:3] *= 1e-150
    K[3] = 0
    scores = levattn.expected_scores(K, Q, method=method)
    np.testing.assert_allclose(scores[4:], levattn.expected_scores(K[4:], Q, method=method), rtol=1e-10)
    assert np.all(scores[:3] < 1e-290)
    assert scores[3] == 0


# -- plain means and draws -----------------------------------------------------------------

FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "x²": (2, np.square),
    "|x|³": (3, lambda x: np.abs(x) ** 3),
    "|x|^½": (0.5, lambda x: np.abs(x) ** 0.5),
    "huber": (levattn.Huber(0.5), lambda x: np.where(np.abs(x) <= 0.5, x * x / 2, 0.5 * np.abs(x) - 0.125)),
    "cauchy": (strategies.Cauchy(), lambda x: np.log1p(x * x)),
    "softmax": (SOFTMAX, None),
    "softmax-radius": (levattn.Softmax(1.0), None),  # which says nothing of the queries given
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("case", ["plain", "masked", "rotary", "wide", "zeros"])
@pytest.mark.crossed
def test_plain_means_are_those_of_loops(name: str, case: str) -> None:
    f, own = FUNCTIONS[name]
    d = 9 if case == "wide" else 4
    K, Q = rng_of(10).standard_normal((7, d)), 3 * rng_of(11).standard_normal((11, d))
    mask = np.arange(7) % 3 != 1 if case == "masked" else None
    rotary, turned = None, [Q]
    if case == "zeros":
        K[2], Q[3] = 0, 0
    if case == "masked":
        K[1], K[4] = np.nan, np.inf
    if case == "rotary":
        angles = rng_of(12).uniform(0, 7, (5, 1))
        rotary = tuple(np.repeat(np.cos(angles), 2, axis=1)), tuple(np.repeat(np.sin(angles), 2, axis=1))
        turned = [np.array([naive.turned(q, c, s) for q in Q]) for c, s in zip(*rotary, strict=True)]
    expected = np.mean([naive.shares(part, K, own, mask) for part in turned], axis=(0, 1))
    scores = levattn.expected_scores(K, Q, f=f, method="mean", mask=mask, rotary=rotary)
    np.testing.assert_allclose(scores, expected, rtol=1e-12, atol=1e-15)
    if f != 2:
        assert np.array_equal(scores, levattn.expected_scores(K, Q, f=f, mask=mask, rotary=rotary))


# by a parameter, for functions that have one
OF_SIZE: dict[str, Callable[[float], tuple[Any, oracle.Function]]] = {
    "huber": lambda c: (levattn.Huber(c), oracle.huber(c)),
    "tukey": lambda c: (levattn.Tukey(c), oracle.tukey(c)),
    "fair": lambda c: (levattn.Fair(c), oracle.fair(c)),
    "l1l2": lambda _: (levattn.L1L2(), oracle.l1l2),
}


@pytest.mark.parametrize("parameter", [1e-290, 1e-170, 1e-60, 0.7, 1e60, 1e149])
@pytest.mark.parametrize("name", OF_SIZE)
def test_plain_means_and_needs_survive_values_of_f_beyond_the_range(name: str, parameter: float) -> None:
    rng = rng_of(16)
    K = rng.integers(-9, 10, (9, 3)) * np.array([1.0, 1.0, 2.0**-20])
    f, own = OF_SIZE[name](parameter)
    for size in (1e-310, 1e-290, 1e-170, 1e-162, 1e-60, 1e-20, 1.0, 1e20):
        Q = rng.integers(-9, 10, (14, 3)) * size
        Q[3] = 0
        Q[4] *= [1, 1, 0]
        Q[::2] *= 2.0 ** rng.integers(-9, 10, (7, 1))
        Q[5] = [1, -1, 0]  # some products cancel, down to a tiny one
        Q[5, 2] = size
        K[2:, 1] = K[2:, 0]
        A = np.array([[float(a / (total or 1)) for a in each] for each, total in oracle.Truth(K, Q).shares(own)])
        scores = levattn.expected_scores(K, Q, f=f, method="mean")
        np.testing.assert_allclose(scores, A.mean(axis=0), atol=1e-9, err_msg=str(size))
        order = rng.random(9)
        for wish in ({"epsilon": 0.2}, {"mass": 0.7}):
            found = levattn.covering_set(K, Q, coverage=0.7, f=f, scores=order, **wish)
            ranked = np.argsort(-order, kind="stable")
            needs = np.array([naive.prefix_needed(row, ranked.tolist(), **wish) for row in A])
            most = needs.copy()
            most[5] = len(K)  # products that cancel may be on either side of a tiny parameter
            np.testing.assert_array_less(np.sort(needs) - 0.5, found.needs, err_msg=f"{size} {wish}")
            np.testing.assert_array_less(found.needs, np.sort(most) + 0.5, err_msg=f"{size} {wish}")


def test_a_parameter_that_no_factor_brings_into_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"f is Tukey\(c=1e-300\), whose parameter is too small for these products"):
        levattn.expected_scores(np.array([[1.0], [2.0]]), np.array([[1e300], [1.0]]), f=levattn.Tukey(1e-300))


def test_draws_come_near_the_expectation() -> None:
    """Of two keys k and 0 the first has E[1/(1 + e^−z)], z normal."""
    from scipy.integrate import quad

    mean, deviation = 0.7, 1.8
    expected = quad(
        lambda x: math.exp(-x * x / 2) / math.sqrt(2 * math.pi) / (1 + math.exp(-mean - deviation * x)),
        -40,
        40,
        limit=500,
    )[0]
    K = np.array([[2.0, 0.0], [0.0, 0.0]])
    queries = (np.array([mean / 2, 5.0]), np.diag([(deviation / 2) ** 2, 3.0]))
    for samples in (100, 1024, 100_000):
        errors = [
            levattn.expected_scores(K, queries, f=SOFTMAX, samples=samples, rng=seed)[0] - expected
            for seed in range(20)
        ]
        error = 0.5 / math.sqrt(samples)  # the standard error that is stated, at most
        assert np.sqrt(np.mean(np.square(errors))) < error
        assert np.max(np.abs(errors)) < math.sqrt(2 * math.log(40 / CHANCE)) * error  # Hoeffding
    default = levattn.expected_scores(K, queries, f=SOFTMAX)
    assert np.array_equal(default, levattn.expected_scores(K, queries, f=SOFTMAX, samples=1024, rng=0))
    assert not np.array_equal(default, levattn.expected_scores(K, queries, f=SOFTMAX, rng=1))


def test_draws_keep_a_covariance_far_from_zero() -> None:
    """Along keys whose products with the mean are all the same the mean does nothing, however large."""
    K = np.array([[1.0, 1.0], [1.0, -1.0], [1.0, 0.0]])
    near, far = (
        levattn.expected_scores(K, (np.array([size, 0.0]), np.diag([0.0, 1.0])), f=SOFTMAX) for size in (0.0, 2.0**28)
    )
    np.testing.assert_allclose(far, near, atol=1e-6)  # products of 2^28 are right to 2^-24


def test_markov_bounds_how_many_keys_and_how_often() -> None:
    K, Q = strategies.case("coherent"), rng_of(16).standard_normal((500, 8))
    for f in (2, 1, levattn.Softmax()):
        A = naive.shares(Q, K, None if f == levattn.Softmax() else (lambda x, p=f: np.abs(x) ** p))
        scores = levattn.expected_scores(K, Q, f=f, method="mean")
        for delta, epsilon in ((0.1, 0.1), (0.02, 0.3), (0.5, 0.01)):
            chosen = scores >= delta * epsilon
            assert chosen.sum() <= 1 / (delta * epsilon)
            assert np.all(np.mean(A[:, ~chosen] >= epsilon, axis=0) <= delta)


# -- what queries are given by ---------------------------------------------------------------


def sample() -> tuple[naive.Float, naive.Float]:
    rng = rng_of(17)
    return rng.standard_normal((60, 6)), rng.standard_normal((300, 6)) @ rng.standard_normal((6, 6)) + 1.0


def descriptions(Q: naive.Float) -> dict[str, Any]:
    m, ones = len(Q), np.ones((len(Q), 1))
    chunked, merged = Moments(Q.shape[1]), Moments(Q.shape[1])
    for part in np.array_split(Q, 7):
        chunked.update(part)
    merged.update(Q[: m // 3]).merge(Moments(Q.shape[1]).update(Q[m // 3 :]))
    mean = Q.mean(axis=0)
    covariance = Q.T @ Q / m - np.outer(mean, mean)
    return {
        "chunks": chunked,
        "merged": merged,
        "weighted": Moments(Q.shape[1]).update(Q, weights=np.full(m, 0.3)),
        "ones": Moments(Q.shape[1] + 1).update(np.hstack([Q, ones])),
        "normal": (mean, covariance),
        "lists": (mean.tolist(), covariance.tolist()),
    }


def test_moments_normals_and_samples_of_the_same_moments_agree() -> None:
    K, Q = sample()
    given = descriptions(Q)
    expected = levattn.expected_scores(K, Q)
    for name, queries in given.items():
        np.testing.assert_allclose(levattn.expected_scores(K, queries), expected, rtol=1e-10, err_msg=name)
    f = SOFTMAX
    drawn = levattn.expected_scores(K, Q, f=f, method="normal", samples=200, rng=3)
    for name in ("ones", "normal", "lists"):
        # a root of the covariance is taken of eigenvectors, which rounding turns a little
        np.testing.assert_allclose(
            levattn.expected_scores(K, given[name], f=f, samples=200, rng=3), drawn, rtol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("kind", ["x²", "softmax", "draws"])
def test_batches_are_single_matrices(kind: str) -> None:
    K, Q = rng_of(18).standard_normal((2, 3, 20, 4)), rng_of(19).standard_normal((2, 6, 15, 4))
    mask = rng_of(20).random((2, 3, 20)) < 0.7
    options: dict[str, Any] = {"x²": {}, "softmax": {"f": levattn.Softmax()}}.get(
        kind, {"f": levattn.Softmax(), "method": "normal", "samples": 50, "rng": 5}
    )
    shared = levattn.expected_scores(K, Q[0, 0], mask=mask, **options)
    each = levattn.expected_scores(K, Q[:, :3], mask=mask, **options)
    grouped = levattn.expected_scores(K, Q, mask=mask, **options)
    for i, j in np.ndindex(2, 3):
        here = dict(options, mask=mask[i, j])
        assert np.array_equal(shared[i, j], levattn.expected_scores(K[i, j], Q[0, 0], **here))
        assert np.array_equal(each[i, j], levattn.expected_scores(K[i, j], Q[i, j], **here))
        together = np.concatenate([Q[i, 2 * j], Q[i, 2 * j + 1]])  # two heads of queries for each of keys
        assert np.array_equal(grouped[i, j], levattn.expected_scores(K[i, j], together, **here))
    assert np.all(shared[~mask] == 0)
    for queries in (Q[:0, 0], Q[:0], Q[0, 0]):
        keys = K[:0, 0] if queries.ndim == 3 else K[:0]
        assert levattn.expected_scores(keys, queries, **options).shape == keys.shape[:-1]
    if kind == "x²":
        moments = Moments(4, (2, 3)).update(Q[:, :3])
        np.testing.assert_allclose(levattn.expected_scores(K, moments, mask=mask), each, rtol=1e-10)
        C = np.eye(4) + np.zeros((2, 3, 4, 4))
        np.testing.assert_allclose(
            levattn.expected_scores(K, (np.zeros(4), C), mask=mask),
            levattn.expected_scores(K, (np.zeros(4), np.eye(4)), mask=mask),
            rtol=1e-12,
        )


@pytest.mark.parametrize("method", ["normal", "mean"])
@pytest.mark.parametrize("kind", ["coherent", "deficient-exact", "wide", "zero-rows"])
def test_a_mask_removes_keys(method: Any, kind: str) -> None:
    K = np.array(strategies.case(kind))
    Q, mask = rng_of(21).standard_normal((20, K.shape[1])), np.arange(len(K)) % 3 != 0
    K[~mask] = np.nan
    for f in (2, levattn.Softmax()):
        scores = levattn.expected_scores(K, Q, f=f, method=method, mask=mask)
        alone = levattn.expected_scores(K[mask], Q, f=f, method=method)
        np.testing.assert_allclose(scores[mask], alone, rtol=1e-10, atol=1e-15)
        assert np.all(scores[~mask] == 0)
    nobody = levattn.expected_scores(K, Q, method=method, mask=np.zeros(len(K), bool))
    assert np.array_equal(nobody, np.zeros(len(K)))


@pytest.mark.parametrize("f", [2, levattn.Softmax()], ids=["x²", "softmax"])
@stores()
def test_storages_have_the_scores_of_their_values(storage: str, f: Any) -> None:
    K, Q = (STORAGE[storage](x) for x in (rng_of(22).standard_normal((70, 5)), rng_of(23).standard_normal((40, 5))))
    scores = levattn.expected_scores(K, Q, f=f)
    expected = levattn.expected_scores(as_float64(K), as_float64(Q), f=f)
    double = storage.endswith("float64")
    assert type(scores) is type(K) if not storage.startswith("bfloat16") else isinstance(scores, np.ndarray)
    assert str(scores.dtype).endswith("float64" if double else "float32")
    np.testing.assert_allclose(as_float64(scores), expected, rtol=1e-12 if double else 2e-6)


def test_files_are_loaded(tmp_path: Path) -> None:
    K, Q = rng_of(40).standard_normal((30, 4)), rng_of(41).standard_normal((9, 4))
    np.save(tmp_path / "keys.npy", K)
    found = levattn.expected_scores(levattn.open_keys(tmp_path / "keys.npy"), Q)
    np.testing.assert_array_equal(found, levattn.expected_scores(K, Q))


@over_storages
def test_other_arguments_may_be_of_any_library(storage: str) -> None:
    K, Q = sample()
    mask, (mean, C) = np.arange(60) % 4 > 0, descriptions(Q)["normal"]
    angles = np.arange(3.0)[:, None] * np.ones(4)
    rotary = np.cos(angles), np.sin(angles)
    expected = levattn.expected_scores(K, (mean, C), mask=mask, rotary=rotary)
    keys, flags, center, covariance, cosine, sine = (stored(x, storage) for x in (K, mask, mean, C, *rotary))
    scores = levattn.expected_scores(keys, (center, covariance), mask=flags, rotary=(cosine, sine))
    np.testing.assert_allclose(as_float64(scores), expected, rtol=1e-10)


def test_sparse_keys_have_the_scores_of_dense_ones() -> None:
    K = strategies.case("zero-rows") * (rng_of(24).random((90, 8)) < 0.4)
    Q = rng_of(25).standard_normal((20, 8))
    np.testing.assert_allclose(
        levattn.expected_scores(strategies.csr(K), Q), levattn.expected_scores(K, Q), rtol=1e-10
    )


@pytest.mark.parametrize("r", [2, 4, 6])
def test_rotary_takes_the_second_moment_at_every_position(r: int) -> None:
    K, Q = sample()
    angles = np.outer(np.arange(9) + 3, rng_of(26).uniform(0.1, 2, r // 2))
    cosine, sine = (np.concatenate([x, x], axis=1) for x in (np.cos(angles), np.sin(angles)))
    turned = np.array([naive.turned(q, c, s) for q in Q for c, s in zip(cosine, sine, strict=True)])
    expected = levattn.expected_scores(K, turned)
    for queries in (Q, Moments(6).update(Q), descriptions(Q)["normal"]):
        np.testing.assert_allclose(levattn.expected_scores(K, queries, rotary=(cosine, sine)), expected, rtol=1e-10)
    f = SOFTMAX
    for rotary in ((cosine, sine), (cosine[None], sine[None])):
        scores = levattn.expected_scores(K, Q, f=f, rotary=rotary)
        np.testing.assert_allclose(scores, naive.shares(turned, K, None).mean(axis=0), rtol=1e-10)
    far = levattn.expected_scores(K, Q, f=f, rotary=(cosine, sine), method="normal", rng=4, samples=20_000)
    L = np.linalg.cholesky(np.cov(Q.T, bias=True))
    draws = Q.mean(axis=0) + rng_of(27).standard_normal((2000, 6)) @ L.T
    turned_draws = np.array([naive.turned(q, cosine[i % 9], sine[i % 9]) for i, q in enumerate(draws)])
    own = naive.shares(turned_draws, K, None).mean(axis=0)
    assert np.max(np.abs(far - own)) < math.sqrt(2 * math.log(240 / CHANCE)) * 0.5 * (2000**-0.5 + 20_000**-0.5)


# -- bad input -----------------------------------------------------------------------------

KEYS, QUERIES = rng_of(28).standard_normal((12, 4)), rng_of(29).standard_normal((9, 4))
UNIT, FLAT = (np.zeros(4), np.eye(4)), (np.ones((2, 4)), np.zeros((2, 4)))
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "other-d": ({"queries": QUERIES[:, :3]}, ValueError, r"queries have 3 columns and K has 4; expected the same"),
    "none": ({"queries": QUERIES[:0]}, ValueError, r"queries have shape \(0, 4\); expected at least one"),
    "vector": ({"queries": QUERIES[0]}, ValueError, r"queries has shape \(4,\); expected"),
    "heads": (
        {"queries": QUERIES[None, None]},
        ValueError,
        r"queries have leading axes \(1, 1\) and K has \(\); expected",
    ),
    "nan": ({"queries": np.where(QUERIES > 1, np.nan, QUERIES)}, NonFiniteError, "queries hold NaN or infinity"),
    "inf": ({"queries": np.where(QUERIES > 1, np.inf, QUERIES)}, NonFiniteError, "queries hold NaN or infinity"),
    "nan-key": ({"K": KEYS * np.nan}, NonFiniteError, "K holds NaN or infinity"),
    "nan-key-mean": ({"K": KEYS * np.nan, "f": 1}, NonFiniteError, "K holds NaN or infinity"),
    "overflow": ({"K": KEYS * 1e300, "queries": QUERIES * 1e300, "f": SOFTMAX}, ValueError, "leave the range"),
    "nan-mean": ({"queries": (np.full(4, np.nan), np.eye(4))}, NonFiniteError, "queries' mean holds NaN"),
    "inf-covariance": (
        {"queries": (np.zeros(4), np.full((4, 4), np.inf))},
        NonFiniteError,
        "queries' covariance holds",
    ),
    "large-mean": ({"queries": (np.full(4, 1e200), np.eye(4))}, ValueError, "mean or covariance has squares beyond"),
    "no-heads": (
        {"K": KEYS[None][:0], "queries": QUERIES[None]},
        ValueError,
        r"axes \(1,\) and K has \(0,\); expected",
    ),
    "mean-shape": ({"queries": (np.zeros(3), np.eye(4))}, ValueError, r"mean has shape \(3,\); expected \(..., d\)"),
    "covariance-shape": ({"queries": (np.zeros(4), np.eye(3))}, ValueError, r"covariance has shape \(3, 3\)"),
    "complex": ({"queries": (np.zeros(4), np.eye(4) * 1j)}, TypeError, "covariance has dtype complex128"),
    "batch": ({"queries": (np.zeros(4), np.eye(4)[None])}, ValueError, r"leading axes \(1,\) and K has \(\)"),
    "asymmetric": ({"queries": (np.zeros(4), np.triu(np.ones((4, 4))))}, ValueError, "not symmetric and positive"),
    "indefinite": ({"queries": (np.zeros(4), np.diag([1.0, 1, 1, -1e-3]))}, ValueError, "not symmetric and positive"),
    "diagonal": (
        {"queries": lambda: Moments(4, diagonal=True).update(QUERIES)},
        TypeError,
        "diagonal=True; expected all",
    ),
    "no-moments": ({"queries": Moments(4)}, ValueError, "Moments of no queries"),
    "moments-d": ({"queries": Moments(6)}, ValueError, "Moments of d = 6 and K has d = 4; expected"),
    "no-ones": (
        {"queries": lambda: Moments(5).update(np.ones((3, 5)) * 2)},
        ValueError,
        "expected the last column to be of ones",
    ),
    "no-mean": (
        {"queries": lambda: Moments(4).update(QUERIES), "f": SOFTMAX},
        ValueError,
        "without a mean.*column of ones",
    ),
    "no-sample": ({"queries": UNIT, "method": "mean"}, ValueError, "queries are moments; expected a sample"),
    "method": ({"method": "gram"}, ValueError, "method is 'gram'; expected 'auto', 'normal' or 'mean'"),
    "samples": ({"samples": 5}, ValueError, "samples or rng is given, but no queries are drawn"),
    "rng": ({"rng": 5, "f": 1}, ValueError, "samples or rng is given, but no queries are drawn"),
    "no-samples": ({"queries": UNIT, "f": 1, "samples": 0}, ValueError, "samples is 0; expected at least 1"),
    "half-samples": ({"queries": UNIT, "f": 1, "samples": 2.5}, TypeError, "samples is 2.5; expected a whole"),
    "seed": ({"queries": UNIT, "f": 1, "rng": -1}, ValueError, "rng is -1; expected a seed"),
    "mask": ({"mask": np.ones(3, bool)}, ValueError, "mask has shape"),
    "rotary-type": ({"rotary": 3}, TypeError, "rotary is of type int; expected a pair"),
    "rotary-odd": (
        {"rotary": (np.ones((2, 3)), np.zeros((2, 3)))},
        ValueError,
        "rotary has arrays of shapes.*expected",
    ),
    "rotary-wide": (
        {"rotary": (np.ones((2, 6)), np.zeros((2, 6)))},
        ValueError,
        "rotary has arrays of shapes.*d is 4",
    ),
    "rotary-unlike": ({"rotary": (FLAT[0], FLAT[1][:1])}, ValueError, r"shapes \(2, 4\) and \(1, 4\)"),
    "rotary-none": ({"rotary": (FLAT[0][:0], FLAT[1][:0])}, ValueError, r"shapes \(0, 4\) and \(0, 4\)"),
    "rotary-angles": (
        {"rotary": (FLAT[0], FLAT[0] * np.arange(4))},
        ValueError,
        "no cosines and sines times one number",
    ),
    "rotary-nan": ({"rotary": (FLAT[0] * np.nan, FLAT[0])}, ValueError, "no cosines and sines times one number"),
    "rotary-complex": ({"rotary": (FLAT[0] * 1j, FLAT[0])}, TypeError, "rotary has dtype complex128"),
    "sparse": ({"K": strategies.csr(KEYS), "f": SOFTMAX}, TypeError, "K is a scipy sparse matrix; expected"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    changed, error, message = BAD[name]
    arguments: dict[str, Any] = {"K": KEYS, "queries": QUERIES} | changed
    if callable(arguments["queries"]):  # moments that no import is to compile kernels for
        arguments["queries"] = arguments["queries"]()
    with pytest.raises(error, match=message):
        levattn.expected_scores(arguments.pop("K"), arguments.pop("queries"), **arguments)


def test_a_singular_covariance_is_none_of_it() -> None:
    C = np.outer(KEYS[0], KEYS[0])
    np.testing.assert_allclose(
        levattn.expected_scores(KEYS, (np.zeros(4), C)), naive.attention(KEYS[:1], KEYS)[0], rtol=1e-9
    )
    assert np.array_equal(levattn.expected_scores(KEYS, (np.zeros(4), np.zeros((4, 4)))), np.zeros(12))


@pytest.mark.parametrize("call", [levattn.sensitivities, levattn.exact_sensitivities])
def test_softmax_without_a_radius_has_no_bounds(call: Any) -> None:
    with pytest.raises(ValueError, match=r"Softmax\(\) without a radius.*Give a radius.*queries="):
        call(KEYS[:, :1], levattn.Softmax())
    assert levattn.Softmax() == levattn.Softmax(math.inf) != levattn.Softmax(3.0)
    assert hash(levattn.Softmax(2.0, np.eye(2))) == hash(levattn.Softmax(2.0, np.eye(2)))
    with pytest.raises(ValueError, match="radius is inf"):
        levattn.Softmax(matrix=np.eye(2))


@pytest.mark.parametrize("kappa", [1, 10, 100])
@pytest.mark.parametrize("d", [8, 64])
def test_float32_keys_err_by_less_than_a_millionth_of_the_largest_score(d: int, kappa: float) -> None:
    """Also where all queries lie in the direction in which the keys have least, and products cancel."""
    rng = np.random.default_rng(d)
    V = np.linalg.qr(rng.standard_normal((d, d)))[0]
    K = ((rng.standard_normal((4096, d)) * np.geomspace(1, 1 / kappa, d)) @ V.T).astype("f4")
    for Q in (rng.standard_normal((200, 1)) * V[:, -1], rng.standard_normal((200, d))):
        scores, exact = levattn.expected_scores(K, Q), levattn.expected_scores(K.astype(float), Q)
        assert np.abs(scores - exact).max() <= 1e-6 * exact.max()


@pytest.mark.parametrize("storage", ["float64", "float32"])
@pytest.mark.parametrize("masked", [False, True])
def test_normal_scores_of_products_that_cancel_are_those_of_the_exact_products(storage: str, masked: bool) -> None:
    rng = np.random.default_rng(8)
    bits = 2**28 if storage == "float64" else 2**22
    c, x = rng.integers(bits, 2 * bits, 12), rng.integers(bits, 2 * bits, 40)
    K = np.stack([c, c, rng.integers(-3, 4, 12)], axis=1).astype(storage)
    Q = np.stack([x, -x, rng.integers(1, 4, 40)], axis=1).astype(np.float64)
    mask = rng.random(12) < 0.7 if masked else None
    # what is normal in the space of the queries is so in the space of their products, of which all are exact
    exact = [[sum(int(a) * int(b) for a, b in zip(k, q, strict=True)) for q in Q.tolist()] for k in K.tolist()]
    expected = levattn.expected_scores(np.array(exact, np.float64), np.eye(40), mask=mask)
    found = levattn.expected_scores(K, Q, mask=mask)
    np.testing.assert_allclose(found, expected, rtol=1e-6 if storage == "float32" else 1e-9, atol=1e-12)
    assert found.sum() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("kind", ["sample", "covariance", "rotary", "sparse"])
def test_scores_of_keys_of_very_different_lengths_sum_to_one(kind: str) -> None:
    """Their least directions are below the numerical rank, so a normalizer may err by 1e-7."""
    for seed in (3, 22, 53):
        rng = np.random.default_rng(seed)
        K = rng.standard_normal((4, 3)) * [[2.0**-17], [2.0**40], [2.0**-14], [2.0**8]]
        Q = rng.standard_normal((5, 3)) * [1.0, 0.1, 50.0]
        queries = (np.zeros(3), Q.T @ Q / 5) if kind == "covariance" else Q
        rotary = (np.ones((1, 2)), np.zeros((1, 2))) if kind == "rotary" else None
        found = levattn.expected_scores(scipy.sparse.csr_array(K) if kind == "sparse" else K, queries, rotary=rotary)
        assert found.sum() == pytest.approx(1, abs=1e-9)


def test_decaying_moments_of_equal_queries_and_of_constant_columns_are_taken() -> None:
    ones = np.ones((1, 1))
    for rows in (np.array([[1e9, 2.0]]), np.array([[5.0, 1.0], [5.0, -2.0], [5.0, 3.0]])):
        moments = Moments(3, decay=0.9).update(np.hstack([rows, np.tile(ones, (len(rows), 1))]))
        scores = levattn.expected_scores(np.eye(2), moments, f=levattn.Huber())
        assert scores.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("p", [0.001, 0.01, 0.03, 0.5])
def test_products_of_zero_count_as_zero_whatever_the_power(p: float) -> None:
    K = np.array([[1e155, 1e-155], [1.0, -1.0]])
    np.testing.assert_array_equal(levattn.expected_scores(K, np.array([[1.0, 1.0]]), f=p, method="mean"), [1, 0])
    K, Q = np.array([[1.0, 0.0], [0.0, 1e-200]]), np.array([[1.0, 1e-105]])
    share = 1 / (1 + 10.0 ** (305 * p))
    np.testing.assert_allclose(levattn.expected_scores(K, Q, f=p, method="mean"), [1 - share, share], atol=1e-9)


@pytest.mark.parametrize(
    ("c", "size", "q"), [(1e-30, 1e140, 1e140), (1e-39, 1e135, 1e135), (2.9e-98, 3.5e119, -9.5e90)]
)
def test_fair_is_linear_far_beyond_its_parameter(c: float, size: float, q: float) -> None:
    K, Q, f = np.array([[size], [2 * size]]), np.array([[q]]), levattn.Fair(c)
    np.testing.assert_allclose(levattn.expected_scores(K, Q, f=f), [1 / 3, 2 / 3], rtol=1e-9)
    np.testing.assert_allclose(levattn.heavy_attention(Q, K, 0.3, f=f).captured_mass, [1], rtol=1e-9)


def test_the_variance_of_each_column_of_decaying_moments_is_known_or_refused() -> None:
    noise = np.random.default_rng(0).standard_normal((4000, 3))
    Q = np.column_stack([1e7 + 1e-2 * noise[:, :2], 1e4 * noise[:, 2], np.ones(4000)])
    K = np.array([[0.0, 0, 0], [50, -50, 0], [-50, 50, 0]])
    with pytest.raises(ValueError, match="too far from zero for their variance"):
        levattn.expected_scores(K, Moments(4, decay=1 - 1e-9).update(Q), f="softmax", method="normal")
