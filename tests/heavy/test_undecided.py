"""Queries of which float64, or twice its precision, knows next to nothing: entries are returned with their error.

Inside: bounds of rounding are judged that results only add up.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest

import levattn
from adversary import routes
from adversary.oracle import DIGITS, Function, Truth
from adversary.routes import function
from levattn.functions import as_function
from levattn.sensitivity.shares import mild_changes, mild_entry_change
from strategies import Cauchy, Float


@pytest.mark.parametrize("p", [0.5, 1, 3, 6])
@pytest.mark.parametrize("power", [-1074, -900, 0, 700])
def test_powers_lose_no_small_entries_of_queries(p: float, power: int) -> None:
    """Query and keys meet in one product of 2¹⁰ and one of 2⁰, however far their entries are apart."""
    K = np.array([[0.0, 2.0**-200], [2.0 ** min(-power, 1000), 0.0]])
    Q = np.array([[2.0 ** max(power, -1000), 2.0**210]])
    found = levattn.heavy_attention(Q, K, 1e-3, f=p)
    share = 2.0 ** (10 * p)
    expected = np.array([share, 1]) / (share + 1)
    assert found.entries.toarray()[0] == pytest.approx(np.where(expected < 1e-3, 0, expected), rel=1e-9)
    assert found.error[0] < 1e-12


# -- functions other than x²: products are exact integers, functions of them have 60 digits ---------------------------


def softmax(z: Any) -> Any:
    return np.array([DIGITS.exp(max(x - max(z), Decimal(-(10**6)))) for x in z])


def cauchy(x: Any) -> Any:
    return np.array([(1 + z * z).ln() if abs(z) > Decimal("1e-20") else z * z - z**4 / 2 for z in x])


FUNCTIONS = {name: (function(name), exact) for name, exact in routes.FUNCTIONS.items()}
FUNCTIONS["Cauchy"] = Cauchy(), cauchy


def _holds(found: Any, Q: Float, K: Float, f: Function, epsilon: float, V: Float) -> None:
    """No entry misses, all are right within what is claimed, and so are normalizers, masses and outputs."""
    entries, (output, bound) = found.entries.toarray(), found.apply(V[:, None])
    assert not np.isnan(np.array([found.error, bound, found.captured_mass, found.residual_mass])).any()
    with localcontext(DIGITS):
        for i, (terms, total) in enumerate(Truth(K.astype(np.float64), Q.astype(np.float64)).shares(f)):
            slack = max(1e-9, 4 * float(found.error[i]))
            if not total:
                assert slack >= 1 or not entries[i].any()
                continue
            true = terms / total
            shares = true.astype(float)
            if np.isinf(slack):
                assert np.all(entries[i, found.universal.indices] > 0)
            else:
                assert np.all(entries[i][shares >= epsilon * (1 + 1e-15)] > 0)
                there = entries[i] > 0
                wrong = np.abs(entries[i] - shares) > slack * np.maximum(entries[i], shares)
                assert not (there & wrong).any(), (entries[i][wrong & there], shares[wrong & there], found.error[i])
                assert np.all(shares[there] >= epsilon * (1 - 2 * slack))
                if f is not softmax and Decimal("1e-290") < total < Decimal("1e300"):
                    assert abs(float(Decimal(float(found.normalizers[i])) / total) - 1) <= slack
                captured = shares[found.universal.indices].sum()
                assert abs(found.captured_mass[i] - captured) <= slack
                assert abs(found.residual_mass[i] - (1 - captured)) <= slack
            wanted = true @ [Decimal(v) for v in V.tolist()]
            assert abs(Decimal(float(output[i, 0])) - wanted) <= Decimal(float(bound[i])) * (1 + Decimal("1e-12"))


def _orthogonal_copies(seed: int, *, large: float, small: float, storage: str, copies: int = 20) -> tuple[Any, Any]:
    """Queries all but orthogonal to copies of a key, and one or two small keys besides that they do meet."""
    rng = np.random.default_rng(seed)
    a, b = rng.random(2)
    if storage == "float32":
        a, b = float(np.float32(a)), float(np.float32(b))
    keys = [[large * b, -large * a]] * copies + [[small, 0.0]] + [[0.0, 0.7 * small]] * (seed % 2)
    K = np.array(keys).astype(storage)
    Q = np.array([[a, b], [a, b * (1 + 2.0**-52)], [1.0, 1.0], [b, -a]])
    return Q.astype(storage), K


SIZES = [
    (1.0, 1e-17),
    (1e16, 1e-3),
    (1e6, 1.0),
    (1.0, 1.0),
    (1e-150, 1e-160),
    (1e-300, 1e-303),
    (1e200, 1e190),
    (1e300, 1.0),
]


@pytest.mark.parametrize("storage", ["float64", "float32"])
@pytest.mark.parametrize(("large", "small"), SIZES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_rounding_of_keys_orthogonal_to_a_query_takes_no_attention(
    name: str, large: float, small: float, storage: str
) -> None:
    if storage == "float32" and not 1e-30 < small <= large < 1e30:
        pytest.skip("float32 has no such numbers")
    if name == "Cauchy" and large > 1e150:
        pytest.skip("its squares leave the range")
    f, exact = FUNCTIONS[name]
    for seed in range(3):
        Q, K = _orthogonal_copies(seed, large=large, small=small, storage=storage)
        V = np.where(np.arange(len(K)) < 20, 0.0, 7.0)
        for epsilon in (0.5, 0.01):
            _holds(levattn.heavy_attention(Q, K, epsilon, f=f), Q, K, exact, epsilon, V)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_of_a_given_set(name: str) -> None:
    f, exact = FUNCTIONS[name]
    K = np.array([[0.3, -0.1]] * 20 + [[1e-17, 0]])
    Q, V = np.array([[0.1, 0.3]]), np.array([0.0] * 20 + [7.0])
    found = levattn.heavy_attention(Q, K, 0.5, f=f, universal=levattn.universal_set(K, 0.1, f=f))
    _holds(found, Q, K, exact, 0.5, V)
    assert found.entries.toarray()[0, -1] == pytest.approx(1, rel=1e-12)
    assert found.error[0] < 1e-11
    mask = np.arange(21) != 4
    _holds(levattn.heavy_attention(Q, K, 0.5, f=f, mask=mask), Q, K * mask[:, None], exact, 0.5, V)


@pytest.mark.crossed
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_products_that_cancel_among_ordinary_keys(name: str, seed: int) -> None:
    """Queries that differ from the orthogonal complement of all keys but a few by rounding."""
    f, exact = FUNCTIONS[name]
    rng = np.random.default_rng(seed)
    K = np.vstack(
        [rng.standard_normal((40, 3)) @ rng.standard_normal((3, 4)), 10.0 ** -rng.integers(3, 15) * np.eye(4)]
    )
    Q = np.vstack([np.linalg.svd(K[:40])[2][3], rng.standard_normal((2, 4)), np.zeros((1, 4))])
    V = rng.standard_normal(len(K))
    for epsilon in (0.3, 0.01):
        found = levattn.heavy_attention(Q, K, epsilon, f=f)
        _holds(found, Q, K, exact, epsilon, V)
        assert np.all(found.error[1:3] < 1e-9)
        assert found.error[3] == 0
        assert found.normalizers[3] == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_rounding_may_change_of_a_sum(name: str) -> None:
    """Bounds from the sum alone, and those from each product, are not below what errors of that size do."""
    f = as_function(FUNCTIONS[name][0])
    rng = np.random.default_rng(0)
    for power in (-30, -5, 0, 3, 8):
        apart = rng.integers(0, 12, (50, 200)) * rng.integers(0, 2, (50, 1))
        z = rng.standard_normal((50, 200)) * 10.0 ** (power - apart)
        noise = 10.0 ** rng.uniform(power - 16, power - 3, 50)
        moved = z + noise[:, None] * rng.choice([-1.0, 0.0, 1.0], z.shape)
        changes, total = np.abs(f(moved) - f(z)), f(z).sum(axis=1)
        known = mild_changes(f, total, 200, noise)
        if not isinstance(f, Cauchy) and name != "Power(0.5)":
            assert np.all(changes.sum(axis=1) <= known * total * (1 + 1e-9) + 1e-15 * total)
            if power < 3:  # beyond, Tukey's function is constant
                assert np.median(known * total / changes.sum(axis=1)) < 1e3
        for epsilon in (1e-3, 0.1):
            of_entries = mild_entry_change(f, total, epsilon, noise)
            heavy = np.maximum(f(moved), f(z)) >= 0.995 * epsilon * total[:, None]
            relative = np.where(heavy, changes / np.maximum(f(moved), f(z)), 0.0).max(axis=1)
            assert np.all(relative <= of_entries + 1e-15)


class Scaled:
    """A function of the user's that divides by a number, and says so."""

    growth, monotone = 2.0, True

    def __init__(self, c: float) -> None:
        self.scale = c

    def __call__(self, x: Any) -> Any:
        return self.scale**2 * np.log1p((x / self.scale) ** 2)


def test_a_function_of_ones_own_that_says_its_scale_loses_no_key() -> None:
    """(x/c)² of three keys vanishes, each of which has an eighth of all attention."""
    K = 2.0**-47 * np.array([[2.4**0.5], [0.7], [0.7], [0.7]])
    found = levattn.heavy_attention(np.ones((1, 1)), K, 0.1, f=Scaled(2.0**490))
    assert found.entries.nnz == 4
    assert found.error[0] > 0.25
    with pytest.raises(ValueError, match=r"f\.scale is 1e\+200, whose square overflows"):
        levattn.heavy_attention(np.ones((1, 1)), K, 0.1, f=Scaled(1e200))


@pytest.mark.parametrize("size", [1e-200, 1e-100, 1e-5, 1e5, 1e100])
@pytest.mark.parametrize("function", [levattn.Huber, levattn.Tukey, levattn.Fair, Scaled])
def test_parameters_of_any_size(function: Any, size: float) -> None:
    """Scores do not depend on the unit, and where squares of it leave the range nothing is claimed."""
    if function is Scaled and size < 1e-150:
        pytest.skip("a function that is constantly 0 is refused")
    Q, K, V = np.random.default_rng(0).standard_normal((3, 30, 3))
    usual = levattn.heavy_attention(Q, K, 0.05, f=function(1.0))
    found = levattn.heavy_attention(Q * size, K, 0.05, f=function(size))
    output, bound = found.apply(V)
    expected, its = usual.apply(V)
    assert np.all(np.linalg.norm(output - expected, axis=1) <= bound + its)
    if 1e-150 < size < 1e150:
        np.testing.assert_allclose(found.entries.toarray(), usual.entries.toarray(), rtol=1e-9)
        assert found.error.max() < 1e-9
    else:
        assert np.all(found.entries.toarray()[usual.entries.toarray() > 0] > 0)


@pytest.mark.parametrize(
    "f",
    [levattn.Huber(), 0.5, 3, levattn.Softmax(10.0), Cauchy()],
    ids=["Huber", "0.5", "3", "Softmax", "Cauchy"],
)
def test_no_keys_and_no_queries(f: Any) -> None:
    for Q, K, mask in ((np.ones((2, 3)), np.eye(3), [False] * 3), (np.ones((0, 3)), np.eye(3), [True] * 3)):
        found = levattn.heavy_attention(Q, K, 0.1, f=f, mask=np.array(mask))
        assert found.entries.nnz == 0
        assert not np.isnan(found.error).any()
        assert found.apply(np.ones((3, 1)))[0].shape == (len(Q), 1)


def test_functions_that_underflow_leave_nothing_known() -> None:
    """Squares of 1e-170 are 0 in float64, yet they are all that there is."""
    found = levattn.heavy_attention(np.ones((1, 2)), np.eye(2) * 1e-170, 0.4, f=levattn.Huber())
    assert np.isinf(found.error[0])
    assert found.entries.nnz == 2
    output, bound = found.apply(np.array([[1.0], [3.0]]))
    assert abs(output[0, 0] - 2) <= bound[0]


PAIRS = [
    (0.32973171649909216, 0.7887284034284043),
    (0.1, 0.3),
    *(0.7 * np.random.default_rng(0).random((3, 2))).tolist(),
]


@pytest.mark.parametrize("size", [1.0, 1e5, 1e9, 1e14, 1e17])
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_logits_that_cancel(a: float, b: float, size: float) -> None:
    length = 1000
    K = np.array([[size * b, -size * a]] * length + [[3.0, 3.0], [0.0, 0.0], [0, 1]])
    Q = np.array([[a, b], [b, -a], [-a / 2, -b / 2], [a, b * (1 + 2.0**-52)]])
    V = np.where(np.arange(len(K)) < length, 0.0, 7.0)
    f = levattn.Softmax(1.0)
    universal = levattn.universal_set(K, 1e-4, f=f)
    for epsilon in (1e-2, 5e-4, 2e-3):
        _holds(levattn.heavy_attention(Q, K, epsilon, f=f, universal=universal), Q, K, softmax, epsilon, V)
    for j in (0, length, length + 1):  # asked for exactly what an entry is, and a little more and less
        with localcontext(DIGITS):
            terms, total = next(Truth(K, Q).shares(softmax))
            share = float(terms[j] / total)
        for epsilon in (share * (1 - 1e-12), share * (1 - 1e-9), share * (1 + 1e-9)):
            if 1e-4 <= epsilon <= 1:
                found = levattn.heavy_attention(Q, K, epsilon, f=f, universal=universal)
                _holds(found, Q, K, softmax, epsilon, V)


def test_logits_so_large_that_their_rounding_is_told() -> None:
    rng = np.random.default_rng(1)
    K = np.vstack([1e10 + rng.standard_normal((50, 3)), rng.standard_normal((5, 3))])
    q = np.array([[0.1, 0.2, 0.3], [0.0, 0.0, 0.0], [-0.1, 0.3, -0.2]])
    f = levattn.Softmax(1.0)
    found = levattn.heavy_attention(q, K, 1e-3, f=f)
    _holds(found, q, K, softmax, 1e-3, rng.standard_normal(len(K)))
    assert found.error[0] > 1e-8 > 1e-12 > found.error[1]
