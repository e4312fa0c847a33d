"""Exact row spaces, and what is decided by them: directions that float64 does not see.

Inside: exact row spaces are judged alone; in a result only their rank shows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import levattn
import naive
import strategies
from levattn._kernels import Rows
from levattn._kernels.precise import span as precise_span
from levattn.linalg.span import Span
from levattn.states import Moments
from strategies import STORAGE, Float, as_float64, stores

pytestmark = pytest.mark.filterwarnings("ignore::levattn.RankWarning")  # some keys here have such ranks


def rows_of(K: Float, mask: Any = None) -> Rows:
    return Rows(K[None], "float64", None if mask is None else mask[None])


@st.composite
def dependent_keys(draw: st.DrawFn) -> Float:
    """Integers, of which columns and rows depend on others, times powers of two over the whole range."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, d = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    K = rng.integers(-3, 4, (n, d)).astype(np.float64)
    K[:, draw(st.integers(0, d - 1))] = 3 * K[:, 0]
    K[draw(st.integers(0, n - 1))] *= draw(st.sampled_from([0.0, 1.0, 2.0**-52, 1 + 2.0**-52]))
    spread = draw(st.sampled_from([0, 30, 400]))
    return np.ldexp(K, rng.integers(-spread, spread + 1, (n, 1)) + rng.integers(-spread, spread + 1, (1, d)))


@given(dependent_keys(), st.data())
def test_rank_and_membership_are_those_of_exact_arithmetic(K: Float, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(K)))
    whole, some = Span.of(rows_of(K)), Span.of(rows_of(K[:cut]))
    assert whole.rank == naive.rank_exact(K)
    outside = [naive.rank_exact(np.vstack([K[:cut], k])) > naive.rank_exact(K[:cut]) for k in K]
    assert some.outside(rows_of(K)).tolist() == outside


@given(dependent_keys(), st.randoms(use_true_random=False))
def test_a_space_does_not_depend_on_how_its_rows_came(K: Float, random: Any) -> None:
    ends = sorted([0, *random.choices(range(len(K) + 1), k=3), len(K)])
    parts = [Span.of(rows_of(K[a:b])) for a, b in pairwise(ends)]
    random.shuffle(parts)
    merged = parts[0]
    for part in parts[1:]:
        merged = merged + part
    whole = Span.of(rows_of(np.ldexp(K[::-1], 3)))
    assert np.array_equal(merged.basis, whole.basis)
    assert np.array_equal(Span.checked(whole.units, whole.rows).basis, whole.basis)


def test_a_masked_row_opens_nothing() -> None:
    K = np.eye(3)
    mask = np.array([True, False, True])
    assert Span.of(rows_of(K, mask)).rank == 2
    assert Span.of(rows_of(K, mask)).outside(rows_of(K, mask)).tolist() == [False, False, False]


def test_rows_that_are_no_basis_are_refused() -> None:
    K = np.array([[1.0, 0, 2], [0, 1, 3], [2.0, 1, 7]])
    units = np.zeros(3, np.bool_)
    assert np.array_equal(Span.checked(units, K[:2]).rows, K[:2])
    for broken, known in ((K, units), (K[[0, 0]], units), (K[:2], np.array([True, False, True]))):
        with pytest.raises(ValueError, match="linearly dependent"):
            Span.checked(known, broken)


# -- residues --------------------------------------------------------------------------------------


def test_no_two_powers_of_two_are_alike() -> None:
    """Their ratio is one of a power of two below 2^2100, of which none is 1 modulo the prime."""
    for _ in range(20):
        p, power = int(precise_span.draw_field()[0]), 1
        for _ in range(2100):
            power = 2 * power % p
            assert power != 1


def test_fields_are_drawn_anew_and_their_primes_are_primes() -> None:
    """By Fermat's theorem to other bases than those of the test of Miller and Rabin."""
    primes = {int(precise_span.draw_field()[0]) for _ in range(20)}
    assert len(primes) == 20
    assert all(2**61 < p < 2**62 and pow(base, p - 1, p) == 1 for p in primes for base in (41, 43, 47, 1001))
    assert [p for p in range(3, 2000, 2) if precise_span._is_prime(p)] == [
        p for p in range(3, 2000, 2) if all(p % k for k in range(2, p))
    ]


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_powers_of_two_a_multiple_of_61_apart(steps: int) -> None:
    """The residues of 1 and 2^61 are one modulo the Mersenne prime 2^61 − 1, which an earlier version took."""
    last = np.array([[2.0**-200, 2.0 ** (61 * steps - 200)]])
    K = np.vstack([np.ones((3, 2)), last])
    for f in (2, levattn.Huber(), 1.5):
        assert 3 in levattn.universal_set(K, 0.9, f=f).indices
        assert 3 in levattn.StreamingUniversalSet(0.9, f=f).update(K).result().indices
    for method in ("gram", "qr", "svd"):
        assert 3 in levattn.universal_set(K, 0.9, method=method).indices
    assert levattn.group_leverage(K, np.array([0, 0, 0, 1]))[1] == 1
    wide = np.array([[1.0, 1, 0, 0], [1, 1, last[0, 0], last[0, 1]], [0, 0, 1, 1]])
    assert levattn.universal_set(wide, 0.9).indices.tolist() == [0, 1, 2]


# -- keys with a direction below the numerical rank --------------------------------------------


def hidden(rng: np.random.Generator, n: int, size: float) -> Float:
    """Integers of rank 3 in four columns, turned; two keys leave their space by so little."""
    K = rng.integers(-4, 5, (n, 3)).astype(np.float64) @ rng.integers(-3, 4, (3, 4))
    K[5, 3] += size
    K[n // 2, 3] -= size
    return K


@pytest.mark.parametrize("method", ["auto", "gram", "qr", "svd"])
@pytest.mark.parametrize("size", [2.0**-30, 2.0**-38, 2.0**-45])
@pytest.mark.parametrize("n", [7, 300, 5000])
def test_hidden_keys_are_kept(n: int, size: float, method: str) -> None:
    K = hidden(np.random.default_rng(n), n, size)
    exact = naive.leverage_exact(K)
    assert exact[5] >= 0.4
    assert exact[n // 2] >= 0.4
    found = levattn.universal_set(K, 0.4, method=method)
    assert np.all(found.mask[exact >= 0.4])
    assert np.all(found.scores >= exact * (1 - 1e-6))
    assert found.guarantee == "superset" or found.rank == 4
    stream = levattn.StreamingUniversalSet(0.4).update(K[: n // 3]).update(K[n // 3 :]).result()
    assert np.all(np.isin(np.flatnonzero(exact >= 0.4), stream.indices))
    assert stream.guarantee == "superset" or stream.rank == 4
    chunks = levattn.universal_set(lambda: iter((K[: n // 2], K[n // 2 :])), 0.4)
    assert np.all(chunks.mask[exact >= 0.4])


@stores("float64", "torch-float64", "strict-float64", "cupy-float64")
def test_small_hidden_scores_are_told_apart(storage: str) -> None:
    """Products of float64 matrices: rounding lends every key a little of a direction, which none has for itself."""
    rng = np.random.default_rng(0)
    keys = STORAGE[storage](rng.standard_normal((3000, 3)) @ rng.standard_normal((3, 4)))
    exact = naive.leverage_exact(as_float64(keys))
    found = levattn.universal_set(keys, 0.01)
    assert (found.guarantee, found.rank) == ("superset", 3)
    selected = strategies.as_bool(found.mask)
    assert np.all(selected[exact >= 0.01])
    assert np.all(exact[selected] >= 0.01 * (1 - 1e-3))
    np.testing.assert_allclose(as_float64(found.scores), exact, rtol=1e-3)


@pytest.mark.parametrize("f", [levattn.Huber(), levattn.Tukey(), 1.5, 1])
def test_hidden_keys_are_kept_for_other_functions(f: Any) -> None:
    K = hidden(np.random.default_rng(0), 600, 2.0**-36)
    found = levattn.universal_set(K, 0.45, f=f)  # a query orthogonal to all but these two gives each of them one half
    assert found.mask[5]
    assert found.mask[300]


def test_a_zero_column_beside_dependent_ones() -> None:
    x = np.random.default_rng(2).integers(-4, 5, 6144) * 1.0
    K = np.stack([0 * x, 3 * x, x], 1)
    K[5000, 0] = 1
    exact = naive.leverage_exact(K)
    assert exact[5000] == 1
    for f in (2, levattn.Huber(), levattn.Fair()):
        assert 5000 in levattn.StreamingUniversalSet(0.5, f=f).update(K).result().indices
        assert 5000 in levattn.universal_set(K, 0.5, f=f).indices
    assert levattn.StreamingUniversalSet(0.5).update(K).result().guarantee == "exact"


def test_sums_carry_the_space_of_their_rows() -> None:
    K = hidden(np.random.default_rng(1), 5000, 2.0**-45)
    parts = [Moments(4).update(part) for part in (K[:700], K[700:4100], K[4100:])]
    merged = Moments(4)
    for part in parts:
        merged.merge(Moments.from_bytes(part.to_bytes()))
    for state in (merged, Moments(4).update(K), Moments.from_bytes(Moments(4).update(K).to_bytes())):
        factor = state.factor()
        assert factor.rank.tolist() == [3]
        assert factor.spans[0].rank == 4
        assert 0 in factor.hidden


def test_independent_columns_take_no_residues() -> None:
    state = Moments(6).update(np.random.default_rng(0).standard_normal((5000, 6)))
    (span,) = state._sums.settle()[0].spans  # type: ignore[union-attr]
    assert span.units.all()
    assert len(span.basis) == 0
