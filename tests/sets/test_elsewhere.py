"""What queries give to keys elsewhere: sets with coverage are those of shares over all keys, by definition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import levattn
from libraries import over_storages, stored

SOFTMAX = levattn.Softmax()
N, OTHERS, M = 30, 20, 40  # keys of the set, keys elsewhere, queries


def drawn(seed: int, *batch: int) -> tuple[Any, Any, Any]:
    """Give queries, keys, and the logarithm of the sum over keys elsewhere, which some queries hardly see."""
    rng = np.random.default_rng([77, seed])
    Q, K, far = (rng.standard_normal((*batch, rows, 5)) for rows in (M, N, OTHERS))
    Z = 1.5 * Q @ far.swapaxes(-1, -2) - np.where(np.arange(M) % 4, 0, 30)[:, None]
    return 1.5 * Q, K, np.log(np.exp(Z).sum(axis=-1))


def shares(Q: Any, K: Any, rest: Any) -> Any:
    """The attention to K of softmax over these keys and those elsewhere."""
    E = np.exp(Q @ K.T)
    return E / (E.sum(axis=1) + np.exp(rest))[:, None]


def without(wish: dict[str, Any]) -> dict[str, Any]:
    """The wish without ε, which has no keyword."""
    return {name: value for name, value in wish.items() if name != "epsilon"}


def needs(A: Any, order: Any, wish: dict[str, Any]) -> list[float]:
    """What each query needs: how many keys of the order, or for a size the largest share outside."""
    found = []
    for row in A[:, order]:
        if "size" in wish:
            found.append(max(row[wish["size"] :]))
        elif "mass" in wish:  # of what these keys get
            found.append(next(k for k in range(N + 1) if sum(row[:k]) >= wish["mass"] * sum(row)))
        else:
            found.append(max((k + 1 for k in range(N) if row[k] >= wish["epsilon"]), default=0))
    return sorted(found)


@over_storages
@pytest.mark.parametrize("wish", [{"epsilon": 0.05}, {"mass": 0.7}, {"size": 8}], ids=str)
def test_sets_are_those_of_shares_over_all_keys(wish: dict[str, Any], storage: str) -> None:
    Q, K, rest = drawn(0)
    scores = np.random.default_rng(1).random(N)
    order, coverage = np.argsort(-scores), 0.8
    found = levattn.covering_set(
        stored(K, storage),
        stored(Q, storage),
        wish.get("epsilon"),
        f=SOFTMAX,
        elsewhere=stored(rest, storage),
        coverage=coverage,
        scores=stored(scores, storage),
        **without(wish),
    )
    expected = needs(shares(Q, K, rest), order, wish)
    np.testing.assert_allclose(found.needs, expected, rtol=1e-12)
    alone = needs(shares(Q, K, np.full(M, -np.inf)), order, wish)
    assert (alone == expected) == ("mass" in wish)
    limit = expected[math.ceil((M + 1) * coverage) - 1]
    if "size" in wish:
        np.testing.assert_allclose(found.epsilon, limit, rtol=1e-12)
    else:
        assert {*np.flatnonzero(np.asarray(found.mask))} == {*order[: int(limit)]}


@pytest.mark.parametrize("wish", [{"epsilon": 0.05}, {"mass": 0.7}, {"size": 8}], ids=str)
def test_nothing_elsewhere_is_as_if_it_were_not_given(wish: dict[str, Any]) -> None:
    Q, K, rest = drawn(2)
    options, epsilon = {"f": SOFTMAX, "coverage": 0.8, **without(wish)}, wish.get("epsilon")
    plain = levattn.covering_set(K, Q, epsilon, **options)
    none = levattn.covering_set(K, Q, epsilon, elsewhere=np.full(M, -np.inf), **options)
    np.testing.assert_array_equal(none.mask, plain.mask)
    np.testing.assert_allclose(none.scores, plain.scores, rtol=1e-12)
    np.testing.assert_allclose(none.needs, plain.needs, rtol=1e-12)
    if epsilon:  # all attention is elsewhere
        assert len(levattn.covering_set(K, Q, epsilon, elsewhere=rest + 700, **options)) == 0


def test_heads_have_their_own() -> None:
    Q, K, rest = drawn(3, 4)
    K, scores = K[:2], np.random.default_rng(4).random((2, N))
    options = {"f": SOFTMAX, "coverage": 0.8}
    found = levattn.covering_set(K, Q, 0.05, elsewhere=rest, scores=scores, **options)
    for i in range(2):
        mine = {"scores": scores[i], "elsewhere": rest[2 * i : 2 * i + 2]}
        alone = levattn.covering_set(K[i], Q[2 * i : 2 * i + 2], 0.05, **mine, **options)
        np.testing.assert_array_equal(found.mask[i], alone.mask)
        np.testing.assert_array_equal(found.needs[i], alone.needs)


@over_storages
def test_what_follows_is_judged_by_shares_over_all_keys(storage: str) -> None:
    Q, K, rest = drawn(5)
    found = levattn.covering_set(K, Q, 0.05, f=SOFTMAX, elsewhere=rest, coverage=0.8)
    Q, _, rest = drawn(6)
    A = shares(Q, K, rest)
    one_by_one = levattn.AdaptiveCoverage(K, found, rate=0.2)
    expected = []
    for q, other, row in zip(Q, rest, A, strict=True):
        expected.append({*np.flatnonzero(row >= 0.05)} <= {*one_by_one.indices})
        assert one_by_one.update(stored(q[None], storage), stored(other[None], storage)).tolist() == expected[-1:]
    assert 0 < sum(expected) < M
    following, plain, none = (levattn.AdaptiveCoverage(K, found, rate=0.2) for _ in range(3))
    assert following.update(Q, rest).tolist() == expected
    assert following.size == one_by_one.size
    assert plain.update(Q).tolist() == none.update(Q, np.full(M, -np.inf)).tolist() != expected


NONE = np.zeros(M)
BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "power": (NONE, {"f": 2}, "elsewhere is given and f is Power.*; expected it for Softmax only"),
    "shorter": (NONE[1:], {}, rf"elsewhere has shape \({M - 1},\); expected \({M},\)"),
    "turned": (NONE[:, None], {}, rf"elsewhere has shape \({M}, 1\)"),
    "nan": (np.where(np.arange(M) == 3, np.nan, 0), {}, "expected .* not NaN"),
    "inf": (np.where(np.arange(M) == 3, np.inf, 0), {}, r"not NaN or \+∞"),
    "kind": (NONE > 0, {}, "dtype bool"),
    "complex": (NONE * 1j, {}, "dtype complex128"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_a_logarithm_for_each_query_is_refused(name: str) -> None:
    elsewhere, options, message = BAD[name]
    Q, K, _ = drawn(7)
    options = {"f": SOFTMAX, "coverage": 0.8} | options
    error = TypeError if "dtype" in message else ValueError
    with pytest.raises(error, match=message):
        levattn.covering_set(K, Q, 0.05, elsewhere=elsewhere, **options)
    found = levattn.covering_set(K, Q, 0.05, **options)
    with pytest.raises(error, match=message.replace("Power.*", ".*")):
        levattn.AdaptiveCoverage(K, found).update(Q, elsewhere)


def test_logarithms_of_several_heads_come_as_their_queries_do() -> None:
    Q, K, rest = drawn(8, 2)
    with pytest.raises(ValueError, match=rf"elsewhere has shape \({M}, 2\)"):
        levattn.covering_set(K, Q, 0.05, f=SOFTMAX, coverage=0.8, elsewhere=rest.T)
