"""Adaptive coverage against a replay query by query, and its bound for sequences that are made to break it."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import levattn
import naive
from levattn.exceptions import NonFiniteError

SOFTMAX = levattn.Softmax()
N = 20


def rng_of(*seed: int) -> np.random.Generator:
    return np.random.default_rng([2106, *seed])


def one_key_each(places: Any) -> naive.Float:
    """Queries that give all attention to one key of the identity, or to none in particular for a place below 0."""
    Q = np.zeros((len(places), N))
    for row, place in zip(Q, places, strict=True):
        if place >= 0:
            row[place] = 50.0
    return Q


def start(coverage: float, **wish: Any) -> Any:
    """The set of keys 0, 1, 2, … in this order."""
    places = rng_of(1).geometric(0.2, 99) % N
    epsilon = wish.pop("epsilon", None)
    return levattn.covering_set(
        np.eye(N), one_key_each(places), epsilon, f=SOFTMAX, coverage=coverage, scores=-np.arange(N), **wish
    )


SEQUENCES: dict[str, list[int]] = {
    "hard": [N - 1] * 600,
    "easy": [0] * 600,
    "alternating": [0, N - 1] * 300,
    "runs": ([0] * 100 + [N - 1] * 100) * 3,
    "drifting": [min(N - 1, i // 30) for i in range(600)],
    "random": rng_of(2).integers(0, N, 600).tolist(),
    "empty-then-hard": [-1] * 400 + [N - 1] * 200,
    "empty": [-1] * 600,
}


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("coverage", [0.5, 0.9, 0.55])
@pytest.mark.parametrize("rate", [0.02, 0.3])
@pytest.mark.crossed
def test_the_share_covered_stays_within_its_bound(name: str, coverage: float, rate: float) -> None:
    found = start(coverage, epsilon=0.5)
    following = levattn.AdaptiveCoverage(np.eye(N), found, rate=rate)
    assert following.indices.tolist() == found.indices.tolist()
    covered = following.update(one_key_each(SEQUENCES[name]))
    T = np.arange(1, len(covered) + 1)
    share = np.cumsum(covered) / T
    assert np.all(coverage - share <= (1 - coverage + rate) / (rate * T) + 1e-12)
    if "empty" not in name:
        assert np.all(share - coverage <= (coverage + rate) / (rate * T) + 1e-12)
    assert (following.seen, following.missed) == (600, np.count_nonzero(~covered))


def replay(needs: list[int], known: list[int], coverage: Fraction, rate: Fraction) -> tuple[list[int], list[bool]]:
    """The sizes of the sets and what they covered, by the definition."""
    level, sizes, covered = coverage, [], []
    for need in needs:
        place = math.ceil((len(known) + 1) * level)
        sizes.append(0 if place < 1 else N if level >= 1 or place > len(known) else sorted(known)[place - 1])
        covered.append(need <= sizes[-1])
        level = max(level + rate * (coverage - covered[-1]), -rate)
        known = [*known, need]
    return sizes, covered


@pytest.mark.parametrize("wish", [{"epsilon": 0.5}, {"mass": 0.9}], ids=str)
@pytest.mark.parametrize("name", ["alternating", "runs", "random", "empty-then-hard"])
def test_each_set_is_that_of_a_replay(name: str, wish: dict[str, float]) -> None:
    found, rate = start(0.75, **wish), Fraction(1, 8)
    places = SEQUENCES[name][150:] if name.startswith("empty") else SEQUENCES[name][:300]
    empty = 0 if "epsilon" in wish else 18  # of keys that all have a twentieth
    needs = [place + 1 if place >= 0 else empty for place in places]
    sizes, covered = replay(needs, [int(need) for need in found.needs], Fraction(3, 4), rate)
    following, Q = levattn.AdaptiveCoverage(np.eye(N), found, rate=float(rate)), one_key_each(places)
    at_once = levattn.AdaptiveCoverage(np.eye(N), found, rate=float(rate))
    for i, query in enumerate(Q):
        assert following.size == sizes[i], i
        assert following.indices.tolist() == list(range(sizes[i]))
        assert following.update(query[None]).tolist() == [covered[i]], i
    assert at_once.update(Q[:0]).shape == (0,)
    pieces = [at_once.update(part) for part in np.array_split(Q, [1, 2, 50, 51, 290])]
    assert np.concatenate(pieces).tolist() == covered
    for figure in ("size", "seen", "missed"):
        assert getattr(at_once, figure) == getattr(following, figure)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("f", [2, SOFTMAX], ids=["x²", "softmax"])
def test_what_is_covered_is_what_the_sets_hold(f: Any, dtype: str) -> None:
    rng = rng_of(3)
    K, Q = (rng.standard_normal(shape).astype(dtype) for shape in ((40, 5), (80, 5)))
    mask = np.arange(40) % 5 > 0
    found = levattn.covering_set(K, Q, 0.1, f=f, coverage=0.9, mask=mask)
    following, new = levattn.AdaptiveCoverage(K, found), 1.5 * rng.standard_normal((200, 5)) + 0.5
    A = naive.shares(new, K, np.square if f == 2 else None, mask)
    assert following.indices.tolist() == found.indices.tolist()
    for row, query in zip(A, new, strict=True):
        held = following.indices
        assert mask[held].all()
        assert following.update(query[None])[0] == (np.delete(row, held).max() < 0.1)
    assert following.missed > 0


KEYS, QUERIES = rng_of(4).standard_normal((12, 4)), rng_of(5).standard_normal((30, 4))


def fitting(**changed: Any) -> Any:
    options = {"coverage": 0.8, "epsilon": 0.2, **changed}
    return levattn.covering_set(options.pop("K", KEYS), QUERIES, options.pop("epsilon"), **options)


@pytest.mark.parametrize(
    ("K", "universal", "options", "error", "message"),
    [
        (KEYS, lambda: 3, {}, TypeError, "universal is of type int; expected the result of covering_set"),
        (
            KEYS,
            lambda: levattn.universal_set(KEYS, 0.2),
            {},
            ValueError,
            "guarantee='exact'.*expected the set with coverage",
        ),
        (KEYS, lambda: fitting(epsilon=None, size=3), {}, ValueError, "expected the set with coverage of one matrix"),
        (KEYS, lambda: fitting(K=KEYS[None]), {}, ValueError, "expected the set with coverage of one matrix"),
        (KEYS[None], fitting, {}, ValueError, r"K has leading axes \(1,\); expected one matrix"),
        (KEYS[:, :3], fitting, {}, ValueError, "d = 4; K has d = 3"),
        (KEYS[:5], fitting, {}, ValueError, r"keys of shape \(12,\); expected the set of K, \(5,\)"),
        (KEYS[::-1], fitting, {}, ValueError, "of other keys than K"),
        (KEYS * np.nan, fitting, {}, NonFiniteError, "K holds NaN"),
        (KEYS, fitting, {"rate": 0}, ValueError, "rate is 0; expected a number above 0 and below 1"),
        (KEYS, fitting, {"rate": 1.0}, ValueError, "rate is 1.0; expected"),
        (KEYS, fitting, {"rate": "1"}, TypeError, "rate is '1'; expected"),
    ],
)
def test_bad_input_is_refused(
    K: Any, universal: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    found = universal()  # here, because every process imports this file, and would compile kernels to make it
    with pytest.raises(error, match=message):
        levattn.AdaptiveCoverage(K, found, **options)


def test_bad_queries_are_refused_and_change_nothing() -> None:
    following = levattn.AdaptiveCoverage(KEYS, fitting())
    for Q, error, message in (
        (QUERIES[:, :3], ValueError, r"Q has shape \(30, 3\); expected \(m, 4\)"),
        (QUERIES[None, None], ValueError, r"Q has shape \(1, 1, 30, 4\); expected \(m, 4\), or \(H, m, 4\)"),
        (QUERIES[0], ValueError, r"Q has shape \(4,\); expected"),
        (np.where(QUERIES > 1, np.nan, QUERIES), NonFiniteError, "Q holds NaN or infinity, first in rows"),
    ):
        with pytest.raises(error, match=message):
            following.update(Q)
    assert (following.seen, following.missed) == (0, 0)
