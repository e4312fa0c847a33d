"""Attention functions: their values, what is known of their growth, and which functions are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import levattn

FUNCTIONS = [
    *(levattn.Power(p) for p in (0.5, 1, 2, 3, 6)),
    levattn.Huber(2.0),
    levattn.Tukey(3.0),
    levattn.L1L2(),
    levattn.Fair(0.7),
]


@pytest.mark.parametrize("f", FUNCTIONS, ids=repr)
def test_functions_are_even_monotone_and_of_their_growth(f: Any) -> None:
    x = np.geomspace(1e-7, 1e7, 2000)
    values = f(x)
    assert f.monotone
    assert np.all(values > 0)
    np.testing.assert_array_equal(f(-x), values)
    assert np.all(values[1:] >= values[:-1] * (1 - 1e-12))
    for step in (1, 100, 1000):
        ratio = (x[step:] / x[:-step]) ** f.growth
        assert np.all(values[step:] <= values[:-step] * ratio * (1 + 1e-9))


@pytest.mark.parametrize("x", [1e-4, 0.3, 1.0, 2.5, 40.0])
def test_functions_are_their_formulas(x: float) -> None:
    at = np.array([x])
    expected = {
        levattn.Power(1.5): x**1.5,
        levattn.Huber(2.0): x * x / 2 if x <= 2 else 2 * (x - 1),
        levattn.Tukey(3.0): 1.5 * (1 - (1 - min(x / 3, 1) ** 2) ** 3),
        levattn.L1L2(): 2 * (math.sqrt(1 + x * x / 2) - 1),
        levattn.Fair(0.7): 0.49 * (x / 0.7 - math.log1p(x / 0.7)),
        levattn.Softmax(1.0): math.exp(x),
    }
    for f, value in expected.items():
        assert f(at)[0] == pytest.approx(value, rel=1e-7 if x < 1e-3 else 1e-13)


class Given:
    """A function of the user's."""

    def __init__(self, function: Any, growth: Any = 2.0, monotone: bool = True) -> None:
        self.function, self.growth, self.monotone = function, growth, monotone

    def __call__(self, x: Any) -> Any:
        return self.function(x)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (Given(lambda x: x**2, 1.5), "grows faster"),
        (Given(np.exp), "finite"),
        (Given(lambda x: np.exp(-x * x)), "decreases|constantly|larger"),
        (Given(lambda x: 1 / (1 + np.abs(x))), "decreases|larger"),
        (Given(lambda x: x**2, monotone=False), "monotone"),
        (Given(lambda x: x**2, -1), "growth"),
        (Given(lambda x: x * np.nan), "finite"),
        (Given(lambda x: np.where(x > 0, x, 0)), "even"),
        (Given(lambda x: 0 * x), "constantly"),
        (Given(lambda x: x.sum()), "each entry"),
        (Given(lambda x: -(x**2)), "at least 0"),
    ],
)
def test_functions_that_the_theory_does_not_admit(f: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        levattn.sensitivities(np.eye(3), f)


@pytest.mark.parametrize("f", [None, True, np.ones(3), lambda x: x, [2]])
def test_what_is_no_function(f: Any) -> None:
    with pytest.raises(TypeError, match=r"\bf\b"):
        levattn.sensitivities(np.eye(3), f)


WITH_PARAMETERS = (levattn.Power, levattn.Huber, levattn.Tukey, levattn.Fair, levattn.Softmax)


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        *((make, (value,), "expected") for make in WITH_PARAMETERS for value in (0, -1.0, np.nan, "1", True)),
        *((make, (np.inf,), "expected") for make in WITH_PARAMETERS[:-1]),
        (levattn.Softmax, (np.inf, np.eye(2)), "radius is inf"),
        *((make, (1e200,), r"c is 1e\+200, whose square overflows") for make in (levattn.Tukey, levattn.Fair)),
        *(
            (levattn.Softmax, (1.0, matrix), "matrix")
            for matrix in (np.ones((2, 3)), np.array([[1.0, 2], [0, 1]]), -np.eye(2), np.full((2, 2), np.nan))
        ),
    ],
)
def test_parameters_out_of_range(make: Any, values: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make(*values)


def test_softmax_without_a_radius() -> None:
    f = levattn.Softmax()
    assert (f.radius, f == levattn.Softmax(np.inf), f == levattn.Softmax(2.0), f == 2) == (np.inf, True, False, False)
    assert hash(f) == hash(levattn.Softmax())
    assert f.contains(np.array([[1e300, 0.0]])).all()
    shaped = levattn.Softmax(2.0, np.eye(2))
    assert (shaped == levattn.Softmax(2.0, np.eye(2)), shaped == levattn.Softmax(2.0)) == (True, False)
    with pytest.raises(ValueError, match=r"f is Softmax\(\) without a radius"):
        f.root(3)


def test_the_root_of_an_ellipsoid() -> None:
    rng = np.random.default_rng(0)
    A = rng.standard_normal((4, 3))
    L = levattn.Softmax(2.0, A @ A.T).root(4)
    np.testing.assert_allclose(L @ L.T, 4 * A @ A.T, atol=1e-12)
    np.testing.assert_array_equal(levattn.Softmax(2.0).root(3), 2 * np.eye(3))
    with pytest.raises(ValueError, match="matrix of 4 rows"):
        levattn.Softmax(2.0, A @ A.T).root(5)


@pytest.mark.parametrize("scales", [(1e-5, 1.0, 1e5), (1e-140, 1.0, 1e140), (1.0, 0.0, 1e-9)], ids=str)
def test_the_root_of_a_graded_ellipsoid_reaches_all_of_it(scales: tuple[float, ...]) -> None:
    rng = np.random.default_rng(1)
    A, D = rng.standard_normal((3, 3)), np.array(scales)
    f = levattn.Softmax(2.0, D[:, None] * (A @ A.T) * D)
    # Each axis of the root is right relative to its own size, as the exact one is: D (A Aᵀ)^½
    np.testing.assert_allclose(np.linalg.norm(f.root(3), axis=1), 2 * D * np.linalg.norm(A, axis=1), rtol=1e-12)
    u = rng.standard_normal((500, 3))
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    Q = 2 * (u @ A.T) * D
    assert f.contains(Q).all()
    assert not (D.all() and f.contains(Q * (1 + 1e-9)).any())  # on the boundary where no axis is missing
    assert f.contains(np.zeros((1, 3))).all()


def test_queries_of_a_flat_ellipsoid_lie_in_it() -> None:
    v = np.array([1.0, 2.0, -1.0])
    f = levattn.Softmax(1.0, np.outer(v, v))
    np.testing.assert_array_equal(
        f.contains(np.stack([v, -v, 0.5 * v, 1.01 * v, v + np.array([0, 0, 1e-3])])), [1, 1, 1, 0, 0]
    )
    flat = levattn.Softmax(1.0, np.diag([1.0, 0.0]))
    np.testing.assert_array_equal(flat.contains(np.array([[1.0, 0.0], [0.5, 1e-300], [np.inf, 0.0]])), [1, 0, 0])
    with pytest.raises(ValueError, match="matrix of 2 rows"):
        flat.contains(np.zeros((1, 3)))


def test_rounding_relative_to_the_largest_entry_is_no_negative_eigenvalue() -> None:
    noise = np.array([[0.0, 1e-14], [1e-14, -1e-15]])
    f = levattn.Softmax(1.0, np.diag([1.0, 0.0]) + noise)
    assert f.contains(np.array([[1.0, 0.0], [1.0, 1e-14]])).all()
    with pytest.raises(ValueError, match="negative eigenvalue"):
        levattn.Softmax(1.0, np.array([[1.0, 1e-3], [1e-3, 0.0]]))


@pytest.mark.parametrize(
    ("name", "f"),
    [
        ("1.5", levattn.Power(1.5)),
        ("huber", levattn.Huber()),
        ("huber:0.5", levattn.Huber(0.5)),
        ("tukey:2", levattn.Tukey(2)),
        ("fair", levattn.Fair()),
        ("l1l2", levattn.L1L2()),
        ("softmax:4", levattn.Softmax(4)),
    ],
)
def test_a_name_stands_for_a_function(name: str, f: Any) -> None:
    assert levattn.sensitivities(np.eye(3), name).f == f


def test_softmax_by_name_has_no_radius() -> None:
    with pytest.raises(ValueError, match=r"f is Softmax\(\) without a radius"):
        levattn.sensitivities(np.eye(3), "softmax")


@pytest.mark.parametrize(
    ("f", "error", "message"),
    [
        ("hubert", ValueError, r"'hubert': there is no such function\. Expected a number p .*huber\[:delta\]"),
        ("huber:x", ValueError, "'x' is not a number"),
        ("huber:-1", ValueError, "above 0"),
        ("l1l2:3", ValueError, "l1l2 takes no number"),
        (levattn.Huber, TypeError, r"the class Huber; .* such as Huber\(\)"),
    ],
)
def test_what_names_no_function_is_refused(f: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        levattn.universal_set(np.eye(3), 0.5, f=f)
