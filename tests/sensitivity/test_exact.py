"""Sensitivities of few keys: against closed forms, other solvers, and queries drawn at random."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import scipy
from scipy.special import logsumexp

from levattn import ExactSensitivities, NonFiniteError, exact_sensitivities, heavy_attention
from levattn.functions import L1L2, Fair, Huber, Power, Softmax, Tukey
from strategies import Cauchy, more

POWERS = (0.5, 1, 1.2, 1.5, 2, 2.5, 3, 4, 6)
CLOSED = 1e-10  # the width at which the solvers stop is 1e-11


def gauss(n: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, d))


def spiky(n: int, d: int, seed: int = 0) -> np.ndarray:
    return gauss(n, d, seed) * np.random.default_rng(seed + 1).standard_cauchy((n, 1))


def drawn(K: np.ndarray, f: Any, count: int = 20_000) -> np.ndarray:
    """Best ratios that random queries at many scales reach."""
    rng = np.random.default_rng(7)
    y = np.concatenate([rng.standard_normal((count, K.shape[1])), K]) * 10 ** rng.uniform(-2, 2, (count + len(K), 1))
    values = f(y @ K.T)
    return (values / values.sum(axis=1, keepdims=True)).max(axis=0)


def assert_bracket(found: ExactSensitivities, width: float = CLOSED) -> None:
    assert found.lower.dtype == found.upper.dtype == np.float64
    assert np.all(found.lower <= found.upper)
    assert np.all((found.lower >= 0) & (found.upper <= 1))
    # the lower end of a sensitivity below the range of float64 is 0, and its upper end the least number
    assert np.all(found.upper - found.lower <= np.maximum(width * found.upper, 2.0**-1074))


# -- closed forms ----------------------------------------------------------------------


CLOSED_FORMS: dict[str, tuple[np.ndarray, Any]] = {
    **{f"{m} of each": (np.kron(np.eye(3), np.ones((m, 1))), lambda _, m=m: 1 / m) for m in (1, 2, 5)},
    "two parallel": (np.array([[1.0], [-0.5]]), lambda p: [1 / (1 + 0.5**p), 1 / (1 + 2**p)]),
    "independent": (gauss(3, 5), lambda _: 1.0),
}


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_forms(name: str, p: float) -> None:
    K, expected = CLOSED_FORMS[name]
    found = exact_sensitivities(K, p)
    if name != "independent":
        assert_bracket(found)
    np.testing.assert_allclose(found.lower, expected(p), rtol=1e-9 if name == "independent" else 1e-12)
    np.testing.assert_allclose(found.upper, expected(p), rtol=CLOSED)


@pytest.mark.parametrize("f", [*POWERS, Softmax(3.0)])
def test_one_key_has_all_attention(f: Any) -> None:
    found = exact_sensitivities(np.array([[3.0, -4.0]]), f)
    np.testing.assert_allclose(found.lower, 1, rtol=1e-12)
    np.testing.assert_array_equal(found.upper, 1)


@pytest.mark.parametrize("p", POWERS)
def test_copies_share(p: float) -> None:
    """m copies of a key whose ratio alone is s/(1 + s) have s/(1 + m s) each."""
    K = gauss(8, 3)
    alone = exact_sensitivities(K, p).lower[0]
    found = exact_sensitivities(np.concatenate([K, -K[:1], K[:1]]), p)
    assert_bracket(found)
    odds = alone / (1 - alone)
    np.testing.assert_allclose(found.lower[[0, 8, 9]], odds / (1 + 3 * odds), rtol=CLOSED)


@pytest.mark.parametrize("p", [300, 700, 1000, 5000, 1e5])
def test_large_powers(p: float) -> None:
    """Norms to such powers leave the range of float64, but no bound does."""
    K = gauss(8, 2)
    found = exact_sensitivities(K, p)
    assert np.isfinite([found.lower, found.upper]).all()
    assert_bracket(found)
    sizes = np.abs(np.random.default_rng(0).standard_normal((1000, 2)) @ K.T)
    reached = (sizes / sizes.max(axis=1, keepdims=True)) ** p
    reached /= reached.sum(axis=1, keepdims=True)
    assert (reached.max(axis=0) <= found.upper * (1 + 1e-9)).all()


def test_sensitivities_below_the_range_have_an_upper_end_above_0() -> None:
    """The second key has the score 1e-480 for every query, and the third 0."""
    found = exact_sensitivities(np.array([[1.0], [1e-120], [0.0]]), 4)
    np.testing.assert_array_equal(found.lower, [1, 0, 0])
    np.testing.assert_array_equal(found.upper, [1, 2.0**-1074, 0])


def test_softmax_of_two_keys() -> None:
    """The best query is radius times the direction of the difference."""
    found = exact_sensitivities(np.array([[1.0, 2.0], [1.0, 0.0]]), Softmax(0.7))
    assert_bracket(found)
    np.testing.assert_allclose(found.lower, 1 / (1 + np.exp(-1.4)), rtol=CLOSED)


# -- other solvers ---------------------------------------------------------------------


@pytest.mark.parametrize("p", [1.5, 3, 4])
def test_convex_program_equals_a_general_solver(p: float) -> None:
    K = gauss(14, 3)
    found = exact_sensitivities(K, p)
    for j in range(3):
        free = np.linalg.svd(K[j : j + 1])[2][1:].T
        origin = K[j] / (K[j] @ K[j])
        result = scipy.optimize.minimize(
            lambda z: (np.abs(K @ (origin + free @ z)) ** p).sum(),  # noqa: B023
            np.zeros(2),
            tol=1e-12,
        )
        assert 1 / result.fun <= found.upper[j] * (1 + 1e-12)
        assert 1 / result.fun >= found.lower[j] * (1 - 1e-6)  # the precision of differences for gradients


@pytest.mark.parametrize("radius", [0.5, 4.0, 30.0])
def test_softmax_equals_a_general_solver(radius: float) -> None:
    K = gauss(14, 3)
    found = exact_sensitivities(K, Softmax(radius))
    assert_bracket(found)
    for j in range(4):
        result = scipy.optimize.minimize(
            lambda y: logsumexp(K @ y) - K[j] @ y,  # noqa: B023
            np.zeros(3),
            jac=lambda y: K.T @ np.exp(K @ y - logsumexp(K @ y)) - K[j],  # noqa: B023
            method="SLSQP",
            constraints={"type": "ineq", "fun": lambda y: radius**2 - y @ y, "jac": lambda y: -2 * y},
            options={"maxiter": 500, "ftol": 1e-14},
        )
        assert abs(np.exp(-result.fun) / found.lower[j] - 1) < 1e-6  # the constraint holds to no more


# -- queries at random -----------------------------------------------------------------


@pytest.mark.parametrize("make", [gauss, spiky])
@pytest.mark.parametrize("p", POWERS)
def test_no_query_beats_a_power(make: Any, p: float) -> None:
    K = make(14, 3)
    found = exact_sensitivities(K, p)
    assert_bracket(found)
    reached = drawn(K, Power(p))
    assert np.all(reached <= found.upper * (1 + 1e-12))
    assert np.all(reached >= 0.5 * found.lower)


@pytest.mark.parametrize("shape", ["ball", "ellipsoid", "flat"])
def test_no_query_beats_softmax(shape: str) -> None:
    K, rng = gauss(14, 3), np.random.default_rng(2)
    matrix = {"ball": None, "ellipsoid": np.diag([4.0, 1.0, 0.1]), "flat": np.diag([1.0, 1.0, 0.0])}[shape]
    f = Softmax(2.0, matrix)
    found = exact_sensitivities(K, f)
    assert_bracket(found)
    u = rng.standard_normal((20_000, 3))
    u *= np.minimum(rng.uniform(0, 3, (20_000, 1)), 1) / np.linalg.norm(u, axis=1, keepdims=True)  # some inside
    logits = u @ f.root(3).T @ K.T
    reached = np.exp(logits - logsumexp(logits, axis=1, keepdims=True)).max(axis=0)
    assert np.all(reached <= found.upper * (1 + 1e-12))
    assert np.all(reached >= 0.99 * found.lower)


# -- queries that reach the lower ends -------------------------------------------------

REACHED = {
    "gauss": gauss(8, 3),
    "spiky": spiky(8, 3),
    "one key": gauss(1, 3),
    "one column": gauss(8, 1),
    "independent": gauss(3, 5),
    "rank-deficient": gauss(8, 3) @ gauss(3, 5, 6),
    "copies and zeros": np.concatenate([gauss(5, 3), -gauss(5, 3)[:3], gauss(5, 3)[2:5], np.zeros((3, 3))]),
    "orthogonal": np.kron(np.eye(3), [[1.0], [-3.0]]),
    "tiny row": np.concatenate([1e-30 * gauss(1, 3), gauss(7, 3, 1)]),
    "fainter row": np.concatenate([1e-200 * gauss(1, 3), gauss(7, 3, 1)]),
    "huge row": np.concatenate([1e6 * gauss(1, 3), gauss(7, 3, 1)]),
    "graded columns": gauss(8, 3) * [1e30, 1.0, 1e-30],
    "turned": gauss(8, 3) * [1.0, 1e-3, 1e-6] @ np.linalg.qr(gauss(3, 3, 5))[0],
    "outside": np.array([[1.0, 1.0], [2.0, 2.0], [1e-30, -1e-30]]),
    "zeros": np.zeros((4, 2)),
}


def at_their_queries(K: np.ndarray, f: Any, queries: np.ndarray) -> np.ndarray:
    """The score of each key at its query, by the definition."""
    Z = queries @ K.T
    if isinstance(f, Softmax):
        Z = Z - Z.max(axis=1, keepdims=True)
    values = f(Z)
    total = values.sum(axis=1)
    return np.asarray(np.divide(np.diagonal(values), total, out=np.zeros(len(K)), where=total > 0))


def rounding(K: np.ndarray) -> float:
    """Rounding of a score ⟨q, k⟩ relative to the largest: q is as large as the inverse of the scaled columns."""
    s = np.linalg.svd(K / np.maximum(np.abs(K).max(axis=0), 1e-300), compute_uv=False)
    return float(8 * K.shape[1] * np.finfo(float).eps * s[0] / s[s > 1e-13 * s[0]].min(initial=s[0])) if s[0] else 0.0


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("name", REACHED)
def test_queries_reach_the_lower_ends(name: str, p: float) -> None:
    K = REACHED[name]
    found = exact_sensitivities(K, p)
    assert found.queries.shape == K.shape
    assert found.queries.dtype == np.float64
    reached = at_their_queries(K, Power(p), found.queries)
    rtol = max(p, 1) * (1e-14 + rounding(K))
    if p < 1:  # the keys that should score 0 score |rounding|^p
        rtol = K.shape[1] * rtol**p
    np.testing.assert_allclose(reached, found.lower, rtol=rtol, atol=1e-250)
    live = K.any(axis=1)
    assert not found.queries[~live].any()
    assert np.all(np.abs(found.queries @ K.T)[:, live] < 1e100)  # far from the end of the range


@pytest.mark.parametrize("p", POWERS)
def test_queries_of_keys_at_the_ends_of_the_range(p: float) -> None:
    scaled = [K for s in (1e250, 1e-250) for K in (s * gauss(6, 3), gauss(6, 3) * [s, 1.0, 1 / s])]
    denormal = [gauss(10, 3) * [1e-318, 1.0, 1e-312]] if p in (1, 2, 4) else []
    for K in scaled + denormal:
        found = exact_sensitivities(K, p)
        reached = at_their_queries(K, Power(p), found.queries)
        np.testing.assert_allclose(reached, found.lower, rtol=1e-7 if p == 0.5 else 1e-12 if len(K) == 10 else 1e-13)


@pytest.mark.parametrize("name", [name for name in REACHED if name != "graded columns"])
@pytest.mark.parametrize("matrix", ["ball", "ellipsoid", "flat"])
def test_queries_of_softmax_reach_the_lower_ends_and_are_admitted(name: str, matrix: str) -> None:
    K = REACHED[name]
    shape = {"ball": 1.0, "ellipsoid": 0.1 ** np.arange(K.shape[1]), "flat": np.arange(K.shape[1]) < 1}[matrix]
    axes = shape * np.ones(K.shape[1])
    f = Softmax(3.0, None if matrix == "ball" else np.diag(axes))
    found = exact_sensitivities(K, f)
    largest = np.abs(K).max() * 3.0 * np.sqrt(K.shape[1])
    rtol = 1e-12 + 1e-14 * K.shape[1] * (K.shape[1] + 4) * largest
    np.testing.assert_allclose(at_their_queries(K, f, found.queries), found.lower, rtol=rtol)
    assert not found.queries[:, axes == 0].any()
    sizes = (found.queries[:, axes > 0] ** 2 / axes[axes > 0]).sum(axis=1)
    assert np.all(sizes <= 9 * (1 + 1e-14))


@pytest.mark.parametrize("b", [(1.0, 2.0), (1.0, 10.0), (3.0, 1e-3), (1.0, -1.0)])
def test_rounding_admits_no_query_outside_of_a_singular_ellipsoid(b: tuple[float, float]) -> None:
    K, f, along = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), Softmax(1.0, np.outer(b, b)), np.array(b)
    found = exact_sensitivities(K, f)
    assert f.contains(found.queries).all()
    assert heavy_attention(found.queries, K, 0.2, f=f).entries.nnz
    logits = np.linspace(-1, 1, 1_000_001)[:, None] * (K @ along)  # of all queries
    best = np.exp(logits - logsumexp(logits, axis=1, keepdims=True)).max(axis=0)
    assert np.all(found.lower <= best * (1 + 1e-9))  # between two points of the line
    assert np.all(best <= found.upper * (1 + 1e-14))
    assert np.all(found.upper - found.lower < 1e-6)


def test_lower_ends_allow_for_products_that_cancel() -> None:
    """Long keys lie along the short axis of the ellipsoid; their products with queries are exact here."""
    rng, along = np.random.default_rng(0), np.array([-3.0, 1.0, 1.0])
    K = rng.integers(-4, 5, (7, 3)) + np.round(1e6 * rng.standard_normal((7, 1)) * np.linalg.svd(along[None])[2][-1])
    found = exact_sensitivities(K, Softmax(1.0, np.outer(along, along) + 2.0**-50 * np.eye(3)))
    for j, query in enumerate(found.queries):
        exact = [sum(Fraction(a) * Fraction(b) for a, b in zip(key, query, strict=True)) for key in K]
        logits = np.array([float(logit - exact[j]) for logit in exact])
        assert found.lower[j] <= np.exp(-logsumexp(logits)) * (1 + 1e-15)


def test_an_ellipsoid_of_one_point_admits_it() -> None:
    K, f = gauss(5, 2), Softmax(2.0, np.zeros((2, 2)))
    found = exact_sensitivities(K, f)
    np.testing.assert_allclose([found.lower, found.upper], 1 / 5, rtol=1e-14)
    assert f.contains(found.queries).all()
    assert not f.contains(np.array([[1e-300, 0.0], [np.inf, 0.0]])).any()
    assert heavy_attention(found.queries, K, 0.1, f=f).entries.nnz == 25


# -- invariance ------------------------------------------------------------------------


def same(f: Any, one: np.ndarray, other: np.ndarray) -> None:
    first, second = exact_sensitivities(one, f), exact_sensitivities(other, f)
    np.testing.assert_allclose(first.lower, second.lower, rtol=CLOSED)
    np.testing.assert_allclose(first.upper, second.upper, rtol=CLOSED)


CHANGES: dict[str, Any] = {
    "basis": lambda K: K @ gauss(3, 3, 5),
    "more columns": lambda K: K @ gauss(3, 5, 6),  # d = 5, r = 3
    **{f"scale {s:g}": (lambda K, s=s: s * K) for s in (1e100, 1e-100, 1e300, 1e-300)},
    **{f"column {s:g}": (lambda K, s=s: K * np.array([s, 1.0, 1.0])) for s in (1e100, 1e-100, 1e300, 1e-300)},
}


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("name", CHANGES)
def test_basis_and_scale_do_not_matter(name: str, p: float) -> None:
    K = gauss(10, 3)
    same(p, K, CHANGES[name](K))


@pytest.mark.parametrize("p", POWERS)
def test_order_and_zero_rows_do_not_matter(p: float) -> None:
    K = gauss(10, 3)
    found = exact_sensitivities(np.concatenate([K[::-1], np.zeros((2, 3))]), p)
    np.testing.assert_allclose(found.lower[:10][::-1], exact_sensitivities(K, p).lower, rtol=CLOSED)
    assert not found.lower[10:].any()
    assert not found.upper[10:].any()


def test_small_keys_are_known_to_relative_precision() -> None:
    K = gauss(10, 3)
    K[0] *= 1e-30
    rest = exact_sensitivities(np.concatenate([K[:1] * 1e15, K[1:]]), 1).lower[0]
    np.testing.assert_allclose(exact_sensitivities(K, 1).lower[0], 1e-15 * rest, rtol=1e-9)


def test_softmax_does_not_see_a_shift() -> None:
    K = gauss(12, 3)
    same(Softmax(3.0), K, K + np.array([5.0, -1.0, 2.0]))
    same(Softmax(3.0), K, K / 2 @ np.linalg.qr(gauss(3, 3, 9))[0] * 2)
    same(Softmax(3.0), np.concatenate([K, K]), np.concatenate([K, K])[::-1][np.arange(24)[::-1]])


# -- edges -----------------------------------------------------------------------------


def test_no_keys_and_keys_of_zeros() -> None:
    for f in (0.5, 1, 2, 3, Softmax(1.0)):
        found = exact_sensitivities(np.zeros((0, 3)), f)
        assert found.lower.shape == found.upper.shape == (0,)
        assert found.queries.shape == (0, 3)
    np.testing.assert_allclose(exact_sensitivities(np.zeros((4, 2)), Softmax(1.0)).lower, 0.25, rtol=1e-12)


@pytest.mark.parametrize("size", [1e3, 1e90, *more([1e6, 1e12])])
def test_softmax_of_large_logits_is_still_bracketed(size: float) -> None:
    K = size * spiky(10, 3)
    found = exact_sensitivities(K, Softmax(5.0))
    assert np.all((found.lower >= 0) & (found.lower <= found.upper) & (found.upper <= 1))
    corner = K[:, 0].argmax()  # alone at the end of an axis
    assert found.upper[corner] == 1
    assert np.all(found.upper >= 0.1 * (1 - 1e-12))  # the query 0
    if size == 1e3:
        assert found.lower[corner] > 0.999


def test_keys_outside_the_numerical_row_space_have_no_bound() -> None:
    found = exact_sensitivities(np.array([[1.0, 1.0], [2.0, 2.0], [1e-30, -1e-30]]), 3)
    assert found.upper[2] == 1
    assert found.upper[0] < 1
    found = exact_sensitivities(np.array([[1e300, 1e300], [1e-300, -1e-300]]), 2)  # the second alone can have all
    assert found.upper[1] == 1


# A power of each method
@pytest.mark.parametrize("p", [0.5, 1, 1.5, 2, 4, *more([1.2, 2.5, 3, 6])])
def test_keys_too_small_to_be_seen(p: float) -> None:
    """Their products with queries underflow when they are squared: no warning, and no claim that they score 0."""
    K = gauss(6, 3)
    K[0] *= 1e-200
    found = exact_sensitivities(K, p)
    assert (found.lower[0], found.upper[0]) == (0, 1)
    np.testing.assert_allclose(found.lower[1:], exact_sensitivities(K[1:], p).lower, rtol=1e-9)


def test_vertices_where_most_keys_lie_in_a_plane() -> None:
    """Subsets are taken in chunks, and all subsets of a chunk can be dependent."""
    K = np.zeros((100, 4))
    K[:10] = gauss(10, 4)
    K[:10, 0] = -np.abs(K[:10, 0]) - 5  # the first in order
    K[10:, :2] = gauss(90, 2, 1)
    K[10:, 0] = np.abs(K[10:, 0])
    found = exact_sensitivities(K, 0.5)
    assert np.all((found.lower > 0) & (found.lower <= found.upper))


def test_methods() -> None:
    K = gauss(5, 2)
    names = [exact_sensitivities(K, p).method for p in (0.5, 1, 1.5, 2)]
    assert names == ["vertices", "linear program", "convex program", "svd"]
    assert exact_sensitivities(K, Softmax(1.0)).method == "concave program"
    assert exact_sensitivities(K.astype(np.float32)).method == "svd"


@pytest.mark.parametrize("f", [Huber(1.0), L1L2(), Fair(1.4), Tukey(2.0), Cauchy()], ids=lambda f: type(f).__name__)
def test_functions_without_an_exact_method_are_refused(f: Any) -> None:
    words = rf"f is {re.escape(repr(f))}; expected an exponent, Power or Softmax.* Use sensitivities.* upper bounds"
    for K in (gauss(5, 2), gauss(0, 2)):
        with pytest.raises(ValueError, match=words):
            exact_sensitivities(K, f)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"K has shape \(2, 3, 4\); expected one matrix \(n, d\)"):
        exact_sensitivities(np.ones((2, 3, 4)))
    with pytest.raises(ValueError, match=r"K has shape \(3,\)"):
        exact_sensitivities(np.ones(3))
    with pytest.raises(ValueError, match="K has n = 2001 keys; expected at most 2000"):
        exact_sensitivities(np.ones((2001, 2)))
    with pytest.raises(ValueError, match=r"200 distinct keys of rank 5, so that f = Power\(0.5\) has 64684950 vert"):
        exact_sensitivities(gauss(200, 5), 0.5)
    with pytest.raises(TypeError, match="expected a real floating dtype"):
        exact_sensitivities(np.ones((3, 2), int))
    with pytest.raises(ValueError, match=r"logits of 1e\+200; expected less than 1e\+100"):
        exact_sensitivities(np.array([[1e200], [-1e200]]), Softmax(1.0))
    K = gauss(9, 2)
    K[[4, 6]] = np.nan, np.inf
    for f in (2, Softmax(1.0)):
        with pytest.raises(NonFiniteError, match=r"K holds NaN or infinity, first in rows \[4, 6\]"):
            exact_sensitivities(K, f)
