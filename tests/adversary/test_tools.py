"""The adversary's own tools: its oracle against another one, its cases, its shrinker on a fault that was planted."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import levattn
import naive
from levattn.attention import PrunedCertificate

from .families import FAMILIES, LARGE, LAYOUTS, STORAGES, case, rounded, stored
from .oracle import DIGITS, Centered, Truth, integers, orthogonal, power, product, queries_for, shares
from .promises import (
    Breach,
    certificate_holds,
    entries_hold,
    groups_hold,
    left_out,
    membership,
    normalizers_hold,
    output_holds,
)
from .routes import FUNCTIONS, ROUTES, Route, function, judge_set
from .search import main
from .shrink import script, shrunk


@pytest.mark.parametrize("family", ["many", *(name for name in FAMILIES if name not in LARGE)])
def test_scores_are_those_of_another_oracle(family: str) -> None:
    for seed in range(1 if family in LARGE else 5):
        found = case(family, seed)
        truth = Truth(found.present, found.queries)
        np.testing.assert_array_equal(truth.scores, naive.leverage_exact(found.present))
        assert truth.rank == naive.rank_exact(found.present)
        exact = [Fraction(x, y) for x, y in zip(*truth._scores, strict=True)]
        for slack in (0.0, 1e-9):
            least = Fraction(found.epsilon) * (1 - Fraction(slack))
            assert truth.at_least(found.epsilon, slack).tolist() == [x >= least for x in exact]


class Eliminated(Centered):
    """The keys less their mean, eliminated anew."""

    _residual = ((), Fraction(0))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in LARGE])
def test_centered_scores_are_those_of_centered_rows(family: str) -> None:
    for seed in range(4):
        found = case(family, seed)
        mask = np.ones(len(found.keys), bool) if found.mask is None else found.mask
        quick, slow = (kind(found.present, found.queries, mask) for kind in (Centered, Eliminated))
        np.testing.assert_array_equal(quick.scores, slow.scores)
        assert quick.rank == slow.rank
        np.testing.assert_allclose(quick.condition, slow.condition)
        for score in quick.scores[quick.scores > 0][:3]:
            assert quick.at_least(score).tolist() == slow.at_least(score).tolist()


@pytest.mark.parametrize("family", ["plain", "graded_rows", "zero_columns", "extreme"])
def test_entries_and_outputs_are_those_of_the_definition(family: str) -> None:
    for seed in range(5):
        found = replace(case(family, seed), mask=None)
        truth = Truth(found.keys, found.queries)
        over, under = truth.attention()
        causal, sums = truth.attention(causal=True)
        outputs, _, exponent = truth.output(found.values)
        for i, q in enumerate(found.queries):
            z = [sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(q, k, strict=True)) for k in found.keys]
            total, before = sum(x * x for x in z), sum(x * x for x in z[: i + 1])
            unit = Fraction(2) ** int(truth.normalizers()[1][i])
            assert under[i] * unit == total
            assert sums[i] * unit == before
            assert [x * unit for x in over[i]] == [x * x for x in z]
            assert [x * unit for x in causal[i]] == [x * x * (j <= i) for j, x in enumerate(z)]
            dense = sum(x * x * Fraction(float(v)) for x, v in zip(z, found.values[:, 0], strict=True))
            assert outputs[i, 0] * unit * Fraction(2) ** exponent == dense


def test_witnesses_give_a_key_its_score() -> None:
    found = case("dependent_integers", 4)
    truth = Truth(found.present, found.queries)
    for j in range(len(found.keys)):
        for z in queries_for(truth, j, np.random.default_rng(j)):
            assert z[j] == 1
            assert shares(power(2), z)[j] <= truth.scores[j] * (1 + 1e-14)
        if truth.scores[j]:
            assert shares(power(2), truth.witnessed(j))[j] == pytest.approx(truth.scores[j], rel=1e-14)


def test_integers_hold_what_floats_do() -> None:
    values = np.array([[5e-324, 1.7e308, -3.0], [0.0, 2.0**-1074 * 3, 0.1]])
    for axis in (None, 0):
        whole, exponent = integers(values, axis)
        exponents = np.broadcast_to(exponent, values.shape)
        for x, m, e in zip(values.reshape(-1), whole.reshape(-1), exponents.reshape(-1), strict=True):
            assert Fraction(float(x)) == m * Fraction(2) ** int(e)


def test_orthogonal_vectors_are_exact() -> None:
    M = np.array([[1, 2, 3, 0], [2, 4, 1, 0], [1, 2, 5, 0]], object)
    y = orthogonal(M[:2])
    assert y is None or not product(M[:2], y[:, None]).any()
    assert orthogonal(M[[0, 0, 1]]) is None


@pytest.mark.parametrize("f", FUNCTIONS)
def test_functions_are_those_of_the_library_in_both_kinds_of_numbers(f: str) -> None:
    x = np.array([0.0, 1e-9, 3e-6, 0.01, -0.7, 1.0, 1.4, 3.0, 4.685, 1e6])
    with localcontext(DIGITS):
        precise = FUNCTIONS[f](np.array([Decimal(value) for value in x]))
    np.testing.assert_allclose(FUNCTIONS[f](x), precise.astype(float), rtol=1e-13)
    np.testing.assert_allclose(FUNCTIONS[f](x), function(f)(x), rtol=1e-13)


def test_precise_values_are_those_of_each_query_and_key() -> None:
    found = replace(case("duplicated", 2), mask=None)
    truth = Truth(found.keys, found.queries)
    for q, (values, total) in zip(found.queries, truth.shares(FUNCTIONS["Huber(1.0)"]), strict=True):
        with localcontext(DIGITS):
            z = [sum(Decimal(float(a)) * Decimal(float(b)) for a, b in zip(q, k, strict=True)) for k in found.keys]
            by_hand = FUNCTIONS["Huber(1.0)"](np.array(z))
            assert total == pytest.approx(sum(by_hand), rel=Decimal("1e-40"))
            assert all(abs(x - y) <= Decimal("1e-40") * total for x, y in zip(values, by_hand, strict=True))


def test_queries_in_turn_are_those_of_the_rows() -> None:
    truth = Truth(np.array([[1.0, 1], [2, 0], [1, 1], [0, 3], [1, 1]]), np.array([[1.0, -1], [1, 2]]))
    by_row = truth.by_row()
    assert by_row.Q.tolist() == [[1, -1], [1, 2], [1, -1], [1, 2], [1, -1]]
    np.testing.assert_array_equal(by_row.values(), by_row.Q @ truth.K.T)
    assert by_row.by_row() is by_row


def test_resonances_differ_and_are_equal_modulo_the_prime() -> None:
    prime, met = 2**61 - 1, 0
    for seed in range(40):
        found = case("resonances", seed)
        Z, _ = Truth(found.keys, found.queries).products
        met += any(z and z % prime == 0 for z in Z.reshape(-1))
    assert met >= 4


@pytest.mark.parametrize("seed", range(6))
def test_copies_are_many_and_some_query_is_orthogonal_to_them(seed: int) -> None:
    found = case("copies", seed)
    rows, counts = np.unique(found.keys, axis=0, return_counts=True)
    assert len(rows) <= 6
    Z, _ = Truth(rows, found.queries).products
    assert not Z[0, counts > 100].all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_case_is_that_of_its_seed_and_fits_its_storage(family: str) -> None:
    for seed in range(3):
        one, other = case(family, seed), case(family, seed)
        for name in ("keys", "queries", "values"):
            values = getattr(one, name)
            assert np.isfinite(values).all()
            np.testing.assert_array_equal(values, getattr(other, name))
            np.testing.assert_array_equal(values, stored(values, one.storage, one.layout).astype(np.float64))
        assert (one.epsilon, one.storage, one.layout) == (other.epsilon, other.storage, other.layout)
        assert 0 < one.epsilon <= 1
    assert {case(family, seed).storage for seed in range(40)} <= set(STORAGES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_same_numbers(layout: str) -> None:
    values = rounded(np.random.default_rng(0).standard_normal((5, 3)), "bfloat16")
    for storage in STORAGES:
        array = stored(values, storage, layout)
        np.testing.assert_array_equal(array.astype(np.float64), rounded(values, storage))
        assert array.flags.c_contiguous == (layout == "C")


# -- the shrinker ----------------------------------------------------------------------------------------------------


def loses_a_key(K: Any, epsilon: float, mask: Any) -> Any:
    """A route with a fault: a key with an entry of exactly 3 in its first column is lost."""
    found = levattn.universal_set(K, epsilon, mask=mask)
    return replace(found, mask=found.mask & (np.asarray(K, np.float64)[:, 0] != 3))


FAULTY = Route("faulty", loses_a_key, judge_set)


def _planted() -> Any:
    for seed in range(100):
        found = case("dependent_integers", seed)
        if any(breach.kind == "missing key" for breach in FAULTY.breaches(found)):
            return found
    raise AssertionError("no case has the planted fault")


def test_a_planted_fault_is_found_and_shrunk_to_one_number() -> None:
    found = _planted()
    assert len(found.keys) > 3
    smallest, breach = shrunk(FAULTY, found, "missing key")
    np.testing.assert_array_equal(smallest.keys, [[3.0]])
    assert (smallest.storage, smallest.layout, smallest.mask) == ("float64", "C", None)
    assert breach.kind == "missing key"
    text = script(FAULTY, smallest, breach)
    assert "K = np.array([[3.0]])" in text
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(
            compile(
                text.replace("replace(", "__import__('dataclasses').replace(").replace("Any", "object"), "", "exec"
            ),
            {},
        )
    assert out.getvalue().startswith("UniversalSet(0 of 1 keys")


def test_a_case_that_breaks_nothing_is_not_shrunk() -> None:
    with pytest.raises(ValueError, match="no breach of kind"):
        shrunk(FAULTY, replace(case("plain", 0), keys=np.eye(2), mask=None), "missing key")


def test_numbers_without_a_short_form_are_printed_exactly() -> None:
    found = replace(case("plain", 0), keys=np.array([[0.1 + 0.2, 5.0]]), storage="float32", mask=None)
    text = script(FAULTY, found, next(membership(Truth(np.eye(1), np.eye(1)), np.array([False]), 1.0, "exact")))
    assert "stored([[float.fromhex('0x1.3333333333334p-2'), 5.0]], 'float32'" in text
    assert "def stored" in text


def test_a_script_has_all_that_its_route_calls() -> None:
    found = replace(case("plain", 0), keys=np.eye(2), queries=np.eye(2), mask=None, storage="float64", layout="C")
    text = script(ROUTES["decoding"], found, Breach("kind", "this", "that"))
    assert text.count("def ") == 3
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(text, "", "exec"), {})
    assert "HeavyKeys" in out.getvalue()


def test_promises_see_what_does_not_hold() -> None:
    truth = Truth(np.array([[1.0], [1.0], [0.0]]), np.ones((1, 1)))
    sure = np.array([True, True, False])
    assert list(membership(truth, sure, 0.5, "exact")) == []
    assert [b.kind for b in membership(truth, ~sure, 0.5, "exact")] == ["missing key", "not exact"]
    assert [b.kind for b in membership(truth, sure | True, 0.5, "superset")] == []
    assert list(left_out(truth, ~sure, 0.5)) == []
    assert [b.kind for b in left_out(truth, ~sure, 0.49)] == ["certified epsilon"]
    V = np.array([[1.0], [3.0], [9.0]])
    assert list(output_holds(truth, V, [[2.0]], [0.0])) == []
    assert [b.kind for b in output_holds(truth, V, [[2.5]], [0.4])] == ["output beyond its bound"]


def test_groups_are_judged_by_what_queries_give_them() -> None:
    truth = Truth(np.array([[1.0, 0], [1, 0], [2, 1], [0, 3]]), np.ones((1, 2)))
    labels = np.array([0, 0, 1, -1])
    X = np.linalg.solve(np.linalg.cholesky(truth.K.T @ truth.K), truth.K.T).T
    scores = np.array([np.linalg.eigvalsh(X[labels == group].T @ X[labels == group])[-1] for group in (0, 1)])
    assert list(groups_hold(truth, labels, scores)) == []
    assert [b.kind for b in groups_hold(truth, labels, scores * (1 - 1e-5))] == ["group score too low"]
    assert [b.kind for b in groups_hold(truth, labels, scores * (1 + 1e-5))] == ["group score too high"]
    assert [b.kind for b in groups_hold(truth, labels, scores * 9)] == ["group score"]


def test_certificates_are_judged_by_dense_attention() -> None:
    weights, V = np.array([[0.5, 0.25, 0.25]]), np.array([[4.0], [0.0], [8.0]])
    kept, noise = np.array([True, False, False]), np.array([1e-12])

    def kinds(output: float, lower: float, upper: float, bound: float) -> list[str]:
        said = PrunedCertificate(np.array([lower]), np.array([upper]), np.array([bound]), kept, np.array([2]))
        return [b.kind for b in certificate_holds(weights, V, noise, np.array([[output]]), said)]

    assert kinds(3.0, 0.4, 0.6, 1.0) == []
    assert kinds(3.0, 0.51, 0.6, 1.0) == ["captured mass"]
    assert kinds(3.0, 0.4, 0.49, 1.0) == ["captured mass"]
    assert kinds(2.9, 0.4, 0.6, 1.0) == ["output beyond its bound"]


def test_the_program_says_what_it_tried(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--seconds", "60", "--matrices", "25", "--processes", "1", "--families", "plain", "--routes"]
    assert main([*options, "set gram"]) == 0
    printed = capsys.readouterr().out
    assert "25 matrices, 25 results of 1 routes" in printed
    assert "no promise was broken" in printed


def test_what_is_claimed_to_be_wrong_may_be() -> None:
    truth = Truth(np.array([[1.0, 1.0], [2.0, 2.0]]), np.array([[1.0, -1.0], [1.0, 0.0]]))
    found = np.array([[0.0, 0.5], [0.2, 0.8]])
    assert [b.kind for b in entries_hold(truth, found, 0.1, 0.0)] == ["entry of an orthogonal query"]
    assert list(entries_hold(truth, found, 0.1, np.array([np.inf, 0.0]))) == []
    assert [b.kind for b in normalizers_hold(truth, [1e-30, 5.0], 0.0)] == ["normalizer"]
    assert list(normalizers_hold(truth, [1e-30, 5.0], np.array([1.0, 0.0]))) == []
    assert [b.kind for b in normalizers_hold(truth, [0.0, 5.0 + 1e-10], 0.0)] == ["normalizer"]
    assert [b.kind for b in entries_hold(truth, np.array([[0, 0], [0, 0.8]]), 0.1, np.inf)] == ["missing entry"]
