"""The certified bracket of softmax mass against the mass itself, summed over all keys from exact logits."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import levattn
import naive
import strategies
from levattn.heavy import mass
from levattn.heavy.mass import SoftmaxMass, softmax_mass
from strategies import STORAGE, as_bool, as_float64, examples, stores

ROUNDING = 2e-15  # of the truth: one rounding a logit, one of each exponential, and the quotient


def logits(q: naive.Float, K: naive.Float, scale: float) -> list[Fraction]:
    """The logits of stored numbers, exactly."""
    query = [Fraction(float(x)) * Fraction(scale) for x in q]
    return [sum((Fraction(float(x)) * y for x, y in zip(k, query, strict=True)), Fraction(0)) for k in K]


def weights(Q: naive.Float, K: naive.Float, scale: float) -> list[list[float]]:
    """For each query exp of all logits, less the largest."""
    out = []
    for q in Q:
        z = logits(q, K, scale)
        largest = max(z)
        out.append([math.exp(float(max(x - largest, Fraction(-800)))) for x in z])
    return out


def mass_on(selected: Any, of_queries: list[list[float]]) -> naive.Float:
    """The share of the weights that falls on the selected keys."""
    return np.array([math.fsum(np.array(w)[np.asarray(selected)]) / math.fsum(w) for w in of_queries])


def captured(Q: naive.Float, K: naive.Float, selected: Any, scale: float) -> naive.Float:
    """The softmax mass on the selected keys."""
    return mass_on(selected, weights(Q, K, scale))


def check(found: SoftmaxMass, truth: naive.Float) -> None:
    assert found.lower.dtype == found.upper.dtype == found.logits_bound.dtype == np.float64
    assert np.all((found.lower >= 0) & (found.upper <= 1))
    assert np.all(found.lower <= truth * (1 + ROUNDING))
    assert np.all(truth * (1 - ROUNDING) <= found.upper)


def default_scale(d: int) -> float:
    return 1 / math.sqrt(d)


@st.composite
def keys(draw: st.DrawFn) -> naive.Float:
    """Heavy-tailed, graded, duplicated, rank-deficient, shifted keys, with zero, huge and tiny rows; n below d too."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    n, d = draw(st.integers(1, 30)), draw(st.integers(1, 4))
    K = rng.standard_normal((n, d)) * np.clip(np.abs(rng.standard_cauchy((n, 1))), 1e-3, 1e3)
    if draw(st.booleans()):
        K = K * np.geomspace(1, draw(st.sampled_from([1e-3, 1e-9])), d) @ np.linalg.qr(rng.standard_normal((d, d)))[0]
    if draw(st.booleans()):
        K = K[rng.integers(0, max(1, n // 3), n)]
    if draw(st.booleans()):
        K[:, -1] = K[:, 0]
    if draw(st.booleans()):
        K[rng.integers(0, n)] *= draw(st.sampled_from([0.0, 1e6, 1e-9]))
    if draw(st.booleans()):
        K = K + draw(st.sampled_from([1.0, 1e3])) * rng.standard_normal(d)
    return np.asarray(K * draw(st.sampled_from([1.0, 1.0, 1e-150, 1e150])))


def queries(K: naive.Float, rng: np.random.Generator, largest: float) -> naive.Float:
    """Random queries, those that favour single keys, and those almost orthogonal to all; logits up to `largest`."""
    size = max(float(np.abs(K).max(initial=0.0)), 1e-300)
    middle = K / size - (K / size).mean(axis=0)
    last = np.linalg.svd(middle)[2][-1:]
    few = rng.integers(0, len(K), 3)
    Q = np.vstack([rng.standard_normal((3, K.shape[1])), naive.adversarial_queries(middle)[few], last, 0 * last])
    Q = np.vstack([Q, -Q])
    reach = np.abs(Q @ middle.T).max(axis=1, keepdims=True)
    return np.asarray(Q * (largest / np.where(reach > 1e-12, reach, 1.0)) / size)


@examples(150)
@given(
    K=keys(),
    seed=strategies.seeds(),
    center=st.booleans(),
    masked=st.booleans(),
    budget=st.one_of(st.sampled_from([1.0, 0.5, 0.1, 0.02]), st.integers(0, 30)),
    largest=st.sampled_from([1e-6, 0.3, 3.0, 30.0, 700.0]),
    scale=st.sampled_from([None, 1.0, -0.25, 3]),
)
def test_the_bracket_holds_the_truth(
    K: naive.Float, seed: int, center: bool, masked: bool, budget: float, largest: float, scale: float | None
) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random(len(K)) < 0.7 if masked else np.ones(len(K), bool)
    mask[rng.integers(0, len(K))] = True
    given_ = K.copy()
    given_[~mask] = np.nan
    if isinstance(budget, int):
        found = levattn.universal_set(given_, size=min(budget, len(K)), center=center, mask=mask)
    else:
        found = levattn.universal_set(given_, budget, center=center, mask=mask)
    Q = queries(K[mask], rng, largest)
    factor = default_scale(K.shape[1]) if scale is None else scale
    result = softmax_mass(Q, given_, found, scale=scale)
    check(result, captured(Q, K[mask], found.mask[mask], factor))

    outside = mask & ~found.mask
    shift = [Fraction(0)] * K.shape[1]
    if found.factor.shift is not None:
        shift = [Fraction(float(x)) for x in found.factor.shift[0]]
    for q, bound in zip(Q, result.logits_bound, strict=True):
        offset = sum((Fraction(factor) * Fraction(float(a)) * b for a, b in zip(q, shift, strict=True)), Fraction(0))
        if outside.any():
            assert max(logits(q, K[outside], factor)) - offset <= Fraction(bound)
        else:
            assert bound == -np.inf


@stores()
@pytest.mark.parametrize("center", [False, True])
def test_every_storage(storage: str, center: bool) -> None:
    rng = np.random.default_rng(1)
    K = STORAGE[storage](strategies.coherent(rng, 60, 4) / 4 + 0.5)
    Q = STORAGE[storage](rng.standard_normal((5, 4)) * 3)
    found = levattn.universal_set(K, 0.1, center=center)
    result = softmax_mass(Q, K, found)
    check(result, captured(as_float64(Q), as_float64(K), as_bool(found.mask), default_scale(4)))
    assert type(result.lower) is np.ndarray


@pytest.mark.parametrize("name", [name for name in strategies.CASES if len(strategies.case(name))])
@pytest.mark.parametrize("center", [False, True])
def test_every_named_case(name: str, center: bool) -> None:
    K = strategies.case(name)[:80]
    Q = queries(K, np.random.default_rng(2), 20.0)[:4]
    truth = weights(Q, K, default_scale(K.shape[1]))
    for size in {0, 1, len(K) // 2, len(K) - 1, len(K)}:
        found = levattn.universal_set(K, size=size, center=center)
        check(softmax_mass(Q, K, found), mass_on(found.mask, truth))


def test_no_key_and_every_key_in_the_set() -> None:
    K = np.random.default_rng(0).standard_normal((20, 3))
    Q = np.vstack([np.zeros((1, 3)), 100 * K])
    nothing = softmax_mass(Q, K, levattn.universal_set(K, size=0))
    assert np.all(nothing.lower == 0)
    assert np.all(nothing.upper == 0)
    everything = softmax_mass(Q, K, levattn.universal_set(K, size=20, center=True))
    assert np.all(everything.lower == 1)
    assert np.all(everything.upper == 1)
    assert np.all(everything.logits_bound == -np.inf)


@pytest.mark.parametrize("center", [False, True])
def test_a_zero_query_and_equal_keys_are_uniform(center: bool) -> None:
    K = np.random.default_rng(0).standard_normal((37, 3))
    found = levattn.universal_set(K, size=11, center=center)
    zero = softmax_mass(np.zeros((1, 3)), K, found)
    check(zero, np.array([11 / 37]))
    np.testing.assert_allclose([zero.lower, zero.upper], 11 / 37, rtol=1e-12)
    assert zero.logits_bound[0] == 0
    equal = np.tile([[1.0, -2.0, 3.0]], (9, 1))
    found = levattn.universal_set(equal, size=4, center=center)
    same = softmax_mass(np.array([[50.0, 20.0, 30.0]]), equal, found)
    check(same, np.array([4 / 9]))
    np.testing.assert_allclose([same.lower, same.upper], 4 / 9, rtol=1e-4 if not center else 1e-9)


def test_both_bounds_are_attained() -> None:
    # on a line the leverage score gives the very size of the largest key left out
    K = np.array([[9.0], [-8.0]] + 3 * [[2.0]] + 5 * [[-0.75]])
    found = levattn.universal_set(K, size=2)
    np.testing.assert_array_equal(found.indices, [0, 1])
    Q = np.array([[0.2], [1.0], [2.5], [-0.2], [-1.0], [-2.5]])
    truth = captured(Q, K, found.mask, 1.0)
    result = softmax_mass(Q, K, found, scale=1.0)
    check(result, truth)
    # the atom at b is the largest sum for q > 0, the one at −b the least for q < 0
    np.testing.assert_allclose(result.lower[:3], truth[:3], rtol=1e-10)
    np.testing.assert_allclose(result.upper[3:], truth[3:], rtol=1e-10)
    np.testing.assert_allclose(result.logits_bound[:3], 2 * Q[:3, 0], rtol=1e-10)
    assert np.all(result.upper[:3] > truth[:3])
    assert np.all(result.lower[3:] < truth[3:])


def test_two_values_at_both_ends_close_the_bracket() -> None:
    K = np.array([[9.0], [-8.0]] + 3 * [[2.0]] + 5 * [[-2.0]])
    Q = np.array([[1.0], [-3.0]])
    found = levattn.universal_set(K, size=2)
    truth = captured(Q, K, found.mask, 1.0)
    result = softmax_mass(Q, K, found, scale=1.0)
    np.testing.assert_allclose([result.lower, result.upper], [truth, truth], rtol=1e-9)


def test_the_bound_for_a_finite_number_is_attained() -> None:
    # a key left out of large leverage score, but not for this query: b is loose, Samuelson's inequality is not
    rest = np.array([[4.0, 0.0], [-1.0, 5.0], [-1.0, -5.0], [-1.0, 0.0], [-1.0, 0.0]])
    K = np.vstack([[[40.0, 20.0], [-30.0, 20.0]], rest])
    found = levattn.universal_set(K, size=2)
    np.testing.assert_array_equal(found.indices, [0, 1])
    Q = np.array([[0.5, 0.0]])
    truth = captured(Q, K, found.mask, 1.0)
    result = softmax_mass(Q, K, found, scale=1.0)
    b = 0.5 * math.sqrt(float(found.scores[2:].max())) * float(np.linalg.norm(K[:, 0]))
    assert b > 2.1
    np.testing.assert_allclose(result.logits_bound, 2.0, rtol=1e-10)
    np.testing.assert_allclose(result.lower, truth, rtol=1e-10)


@pytest.mark.parametrize("center", [False, True])
def test_the_bracket_is_narrow_where_logits_left_out_are_small(center: bool) -> None:
    rng = np.random.default_rng(0)
    K = rng.standard_normal((400, 4))
    K[:6] *= 30
    found = levattn.universal_set(K, 0.05, center=center)
    assert 0 < len(found) < 50
    Q = rng.standard_normal((6, 4)) * 0.2
    truth = captured(Q, K, found.mask, default_scale(4))
    result = softmax_mass(Q, K, found)
    check(result, truth)
    assert np.all(result.upper - result.lower < 0.1 * truth)


def test_the_mean_of_the_keys_does_not_matter_to_a_centred_set() -> None:
    rng = np.random.default_rng(0)
    K = np.round(rng.standard_normal((200, 4)) * 2**10) / 2**10
    Q = rng.standard_normal((5, 4))
    plain = softmax_mass(Q, K, levattn.universal_set(K, size=50, center=True))
    moved = softmax_mass(Q, K + 64.0, levattn.universal_set(K + 64.0, size=50, center=True))
    raw = softmax_mass(Q, K + 64.0, levattn.universal_set(K + 64.0, size=50))
    np.testing.assert_allclose(moved.lower, plain.lower, rtol=1e-9)
    np.testing.assert_allclose(moved.upper, plain.upper, rtol=1e-9)
    np.testing.assert_allclose(moved.logits_bound, plain.logits_bound, rtol=1e-9)
    assert np.all(raw.lower < moved.lower)  # the mean of the keys is in the bound of their logits


def test_cancellation_of_what_is_left_out() -> None:
    # the keys left out are smaller than the rounding of the second moment
    rng = np.random.default_rng(0)
    K = rng.standard_normal((60, 3)) * 1e9
    K[40:] /= 1e9
    K[40:] += 1.0
    found = levattn.universal_set(K, size=40)
    assert np.all(found.mask[:40])
    Q = rng.standard_normal((20, 3)) * 1e-9
    Q = np.vstack([Q, 1e2 * Q, np.linalg.svd(K[:40])[2] * 1e-8])
    truth = captured(Q, K, found.mask, 1.0)
    result = softmax_mass(Q, K, found, scale=1.0)
    check(result, truth)
    assert np.all(result.upper - result.lower < 1e-5)


def test_a_variance_lost_to_cancellation_is_bounded_by_the_range() -> None:
    first, second = np.eye(2)
    K = np.vstack([np.tile(-first, (40, 1)), second, np.outer(1e-8 * np.repeat([1, -1], 10), first)])
    found = levattn.universal_set(K, size=41)
    assert np.all(found.mask[:41])
    Q = np.array([[1e8, 0.0]])
    truth = captured(Q, K, found.mask, 1.0)
    result = softmax_mass(Q, K, found, scale=1.0)
    check(result, truth)
    np.testing.assert_allclose(result.lower, truth, rtol=1e-3)


@pytest.mark.parametrize("size", [1e3, 1e150, 1e200, 1e300])
def test_logits_beyond_any_range(size: float) -> None:
    rng = np.random.default_rng(0)
    K, Q = rng.standard_normal((30, 3)) * size, rng.standard_normal((8, 3)) * size
    found = levattn.universal_set(K, size=10)
    result = softmax_mass(Q, K, found)
    check(result, captured(Q, K, found.mask, default_scale(3)))
    tiny = softmax_mass(Q / size / size, K, found)
    check(tiny, captured(Q / size / size, K, found.mask, default_scale(3)))
    assert np.all(tiny.lower > 0.05)


def test_a_mass_that_is_next_to_nothing() -> None:
    K = np.array([[10.0], [0.1], [-0.1], [0.05]])
    found = levattn.universal_set(K, size=1)
    Q = np.array([[-60.0], [-70.0], [-71.0], [-74.0], [-80.0]])
    result = softmax_mass(Q, K, found)
    check(result, captured(Q, K, found.mask, 1.0))
    assert np.all(result.lower[:2] > 0)
    assert np.all((result.upper > 0) & (result.upper < 1e-250))


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    K, Q = rng.standard_normal((50, 3)), rng.standard_normal((83, 3))
    found = levattn.universal_set(K, size=7)
    whole = softmax_mass(Q, K, found)
    monkeypatch.setattr(mass, "BLOCK_ENTRIES", 1)
    parts = softmax_mass(Q, K, found)
    for name in ("lower", "upper", "logits_bound"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-13)
    Q[[40, 70]] = np.nan
    with pytest.raises(levattn.NonFiniteError, match=r"Q holds NaN or infinity, first in rows \[40\]"):
        softmax_mass(Q, K, found)
    assert softmax_mass(Q[:0], K, found).lower.shape == (0,)


def test_scale_is_a_factor_of_the_queries() -> None:
    rng = np.random.default_rng(0)
    K, Q = rng.standard_normal((50, 4)), rng.standard_normal((9, 4))
    found = levattn.universal_set(K, size=7)
    usual, doubled = softmax_mass(Q, K, found), softmax_mass(Q, K, found, scale=1.0)
    np.testing.assert_allclose(softmax_mass(2 * Q, K, found).lower, doubled.lower, rtol=1e-12)
    np.testing.assert_allclose(softmax_mass(Q, K, found, scale=np.float32(0.5)).lower, usual.lower, rtol=1e-12)
    np.testing.assert_allclose(doubled.logits_bound, 2 * usual.logits_bound, rtol=1e-12)


def test_wrong_arguments() -> None:
    rng = np.random.default_rng(0)
    K, Q = rng.standard_normal((1000, 3)), rng.standard_normal((5, 3))
    found = levattn.universal_set(K, 0.1)
    for bad, message in (
        ((Q[None], K, found), "Q has shape .*; expected one matrix. Call softmax_mass for each head"),
        ((Q, K[None], found), "K has shape .*; expected one matrix"),
        ((Q[:, :2], K, found), "Q has 2 columns and K has 3"),
        ((Q, K[:-1], found), "expected the set of K's 999 keys"),
        ((Q, K + 1, found), "universal is of other keys than K"),
        ((Q, K.astype(np.float32), found), "universal is of float64 keys and K is float32"),
        ((Q, K, levattn.universal_set(K, 0.1, f=4)), r"universal is of f = .*; expected the set for f = 2"),
        ((Q, K, levattn.universal_set(np.stack([K, K]), 0.1)), "universal is of keys of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            softmax_mass(*bad)
    with pytest.raises(TypeError, match="universal is of type ndarray; expected the result of universal_set"):
        softmax_mass(Q, K, found.mask)  # type: ignore[arg-type]
    for scale in (True, "1", 1j):
        with pytest.raises(TypeError, match=r"scale is .*; expected a number"):
            softmax_mass(Q, K, found, scale=scale)  # type: ignore[arg-type]
    for scale in (np.nan, np.inf):
        with pytest.raises(ValueError, match=r"scale is .*; expected a finite number"):
            softmax_mass(Q, K, found, scale=scale)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite(value: float) -> None:
    rng = np.random.default_rng(0)
    K, Q = rng.standard_normal((1000, 3)), rng.standard_normal((5, 3))
    found = levattn.universal_set(K, size=10)
    row = int(np.flatnonzero(~found.mask)[777])
    for place, message in ((row, str(row)), (int(found.indices[3]), str(found.indices[3]))):
        spoilt = K.copy()
        spoilt[place, 1] = value
        with pytest.raises(levattn.NonFiniteError, match=rf"K holds NaN or infinity, first in rows \[{message}\]"):
            softmax_mass(Q, spoilt, found)
    Q[[1, 4], 2] = value
    with pytest.raises(levattn.NonFiniteError, match=r"Q holds NaN or infinity, first in rows \[1, 4\]"):
        softmax_mass(Q, K, found)


def test_softmax_over_no_key() -> None:
    K = np.ones((4, 2))
    for empty in (
        levattn.universal_set(K, 0.5, mask=np.zeros(4, bool)),
        levattn.universal_set(K[:0], 0.5),
    ):
        with pytest.raises(ValueError, match="K has no key that takes part; expected at least one"):
            softmax_mass(np.ones((1, 2)), K[: len(empty.mask)], empty)
