"""Sets with coverage, at once and adaptive, against loops over sorted queries and the law of conformal prediction."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import levattn
import naive
import strategies
from levattn.datasets import minilm
from levattn.exceptions import NonFiniteError
from levattn.states import Moments
from libraries import over_storages, stored
from strategies import as_bool, as_float64

SOFTMAX = levattn.Softmax()
FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "x²": (2, np.square),
    "|x|": (1, np.abs),
    "huber": (levattn.Huber(0.5), lambda x: np.where(np.abs(x) <= 0.5, x * x / 2, 0.5 * np.abs(x) - 0.125)),
    "softmax": (SOFTMAX, None),
}
WISHES: dict[str, dict[str, Any]] = {"epsilon": {"epsilon": 0.08}, "mass": {"mass": 0.6}, "size": {"size": 6}}
PARTS = [(f, wish) for f in FUNCTIONS for wish in WISHES]


def rng_of(*seed: int) -> np.random.Generator:
    return np.random.default_rng([2100, *seed])


def keys_of(seed: int, n: int) -> naive.Float:
    """Keys of several lengths, so that queries differ in how many they need."""
    rng = rng_of(seed)
    return np.asarray(rng.standard_normal((n, 4)) * np.exp(0.6 * rng.standard_normal((n, 1))))


def covering(K: Any, Q: Any, *, epsilon: float | None = None, coverage: float = 0.8, **options: Any) -> Any:
    return levattn.covering_set(K, Q, epsilon, coverage=coverage, **options)


def order_of(scores: Any, mask: Any = None) -> list[int]:
    """Keys by falling score, of equal ones the lower index first; the masked ones left out."""
    return sorted((j for j in range(len(scores)) if mask is None or mask[j]), key=lambda j: (-float(scores[j]), j))


def needs_of(A: naive.Float, order: list[int], wish: dict[str, Any]) -> list[float]:
    if "size" in wish:
        return [max((row[j] for j in order[wish["size"] :]), default=0.0) for row in A]
    return [naive.prefix_needed(row, order, **wish) for row in A]


# -- conformal prediction by itself ----------------------------------------------------------


# -- the set ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "wish"), PARTS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.crossed
def test_the_set_is_the_smallest_prefix_of_scores_of_ones_own(name: str, wish: str, masked: bool) -> None:
    f, own = FUNCTIONS[name]
    K, Q = keys_of(3, 30), rng_of(4).standard_normal((41, 4))
    scores = rng_of(5).integers(0, 9, 30) / 4  # with ties
    mask = rng_of(6).random(30) < 0.7 if masked else None
    keys = K if mask is None else np.where(mask[:, None], K, np.nan)
    order, A = order_of(scores, mask), naive.shares(Q, K, own, mask)
    needs = sorted(needs_of(A, order, WISHES[wish]))
    limit = naive.conformal(needs, Fraction(4, 5))
    found = covering(keys, Q, f=f, scores=scores, mask=mask, **WISHES[wish])
    np.testing.assert_allclose(found.needs, needs, rtol=1e-12)
    assert found.indices.tolist() == sorted(order[: int(limit) if wish != "size" else 6])
    assert found.guarantee == "coverage"
    assert found.certificate == ("conformal",)
    assert found.by_size == (wish == "size")
    assert (found.coverage, found.mass) == (0.8, WISHES[wish].get("mass"))
    expected = {"epsilon": 0.08, "size": limit}.get(wish)
    assert found.epsilon == (None if expected is None else pytest.approx(expected, rel=1e-12))
    assert np.array_equal(found.scores, scores if mask is None else np.where(mask, scores, 0))
    if mask is not None:
        assert not found.mask[~mask].any()


@pytest.mark.parametrize(("name", "wish"), PARTS, ids=str)
def test_the_set_by_a_split_is_a_prefix_for_some_of_the_queries(name: str, wish: str) -> None:
    f, own = FUNCTIONS[name]
    K, Q = keys_of(7, 30), rng_of(8).standard_normal((41, 4))
    found = covering(K, Q, f=f, **WISHES[wish])
    order = order_of(found.scores)
    needs = [round(need, 9) for need in needs_of(naive.shares(Q, K, own), order, WISHES[wish])]
    assert Counter(found.needs.round(9).tolist()) <= Counter(needs)
    assert len(found.needs) == 21
    assert np.array_equal(found.needs, np.sort(found.needs))
    limit = naive.conformal(found.needs, Fraction(4, 5))
    assert found.indices.tolist() == sorted(order[: int(limit) if wish != "size" else 6])
    again, other = covering(K, Q, f=f, **WISHES[wish]), covering(K, Q[::-1], f=f, **WISHES[wish])
    assert np.array_equal(found.scores, again.scores)
    assert np.array_equal(found.needs, again.needs)
    assert not np.array_equal(found.needs, other.needs)
    assert len(set(found.needs.tolist())) > 3
    if wish != "epsilon":  # scores are mean attention
        assert found.scores.sum() == pytest.approx(1, abs=1e-9)


# -- the coverage that is reached ----------------------------------------------------------------


def queries_of(kind: str, count: int, d: int) -> naive.Float:
    rng = rng_of(11)
    Q = rng.standard_normal((count, d))
    if kind == "heavy-tailed":
        return np.asarray(Q * np.clip(np.abs(rng.standard_cauchy((count, 1))), 0.1, 30))
    if kind == "clustered":
        return np.asarray(4 * rng.standard_normal((3, d))[rng.integers(0, 3, count)] + 0.3 * Q)
    return np.asarray(Q + np.linspace(-4, 4, count)[:, None])  # in their order no sample: exchangeable by the split


def spread(m: int, place: int, tests: int, trials: int) -> float:
    """The standard deviation of the share covered by the `place`-th of m values, beta-binomial, without ties."""
    a, b = place, m + 1 - place
    variance = a * b / ((a + b) ** 2 * (a + b + 1)) + a * b / ((a + b) * (a + b + 1)) / tests
    return math.sqrt(variance / trials)


@pytest.mark.parametrize("kind", ["heavy-tailed", "clustered", "shifted"])
@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize(("name", "whole"), [("x²", False), ("|x|", True), ("softmax", False), ("softmax", True)])
def test_new_queries_are_covered_as_often_as_promised(kind: str, wish: str, name: str, whole: bool) -> None:
    """Of an exchangeable pool the ranks of new queries are uniform, so what is covered has a known law.

    Six standard deviations are exceeded with a chance of 1e-9. Ties (needs are whole numbers but for a size) can only
    add to what is covered: with ties broken at random the law holds.
    """
    f, own = FUNCTIONS[name]
    K, pool, trials, coverage = keys_of(12, 24), queries_of(kind, 500, 4), 200, 0.85
    A, options = naive.shares(pool, K, own), {"scores": rng_of(13).random(24)} if whole else {}
    m = 31 if whole else 61
    covered = np.zeros(trials)
    for trial in range(trials):
        order = rng_of(14, trial).permutation(500)
        found = covering(K, pool[order[:m]], f=f, coverage=coverage, **WISHES[wish], **options)
        new = A[order[m:]]
        if wish == "mass":
            held = new[:, found.mask].sum(axis=1)
            covered[trial] = np.mean((held >= 0.6 * (1 - 1e-9)) | ~new.any(axis=1))
        else:
            most = new[:, ~found.mask].max(axis=1, initial=0)
            covered[trial] = np.mean(most < 0.08 if wish == "epsilon" else most <= found.epsilon)
    place = math.ceil(32 * coverage)
    noise = 6 * spread(31, place, 500 - m, trials)
    assert covered.mean() >= place / 32 - noise >= coverage - noise
    if wish == "size":
        assert covered.mean() <= place / 32 + noise <= coverage + 1 / 32 + noise


@pytest.mark.parametrize(("layer", "head"), [(0, 3), (3, 7), (5, 11)])
@pytest.mark.parametrize("wish", ["epsilon", "size"])
def test_packaged_heads_are_covered(layer: int, head: int, wish: str) -> None:
    heads, trials, m = minilm(), 30, 201
    K, Q = heads.keys[layer, head], heads.queries[layer, head].astype(np.float64) * heads.scale
    Z = Q @ K.astype(np.float64).T
    A = np.exp(Z - Z.max(axis=1, keepdims=True))
    A /= A.sum(axis=1, keepdims=True)
    asked: dict[str, Any] = {"epsilon": 0.05} if wish == "epsilon" else {"size": 64}
    covered = np.zeros(trials)
    for trial in range(trials):
        order = rng_of(15, trial).permutation(512)
        found = covering(K, Q[order[:m]], f=SOFTMAX, coverage=0.9, **asked)
        most = A[order[m:]][:, ~found.mask].max(axis=1, initial=0)
        covered[trial] = np.mean(most < 0.05 if wish == "epsilon" else most <= found.epsilon * (1 + 1e-12))
    place = math.ceil(102 * 0.9)
    noise = 6 * spread(101, place, 512 - m, trials)
    assert covered.mean() >= place / 102 - noise
    if wish == "size":
        assert covered.mean() <= place / 102 + noise


# -- the result ------------------------------------------------------------------------------------


def test_a_result_tells_what_it_is() -> None:
    K, Q = rng_of(16).standard_normal((20, 3)), rng_of(17).standard_normal((30, 3))
    by_epsilon, by_mass, by_size = (covering(K, Q, **wish) for wish in WISHES.values())
    for found, figure in (
        (by_epsilon, "epsilon=0.08"),
        (by_mass, "mass=0.6"),
        (by_size, f"epsilon={by_size.epsilon:.6g}"),
    ):
        assert repr(found) == (
            f"UniversalSet({len(found)} of 20 keys, guarantee='coverage', {figure}, coverage=0.8, 15 queries)"
        )
        assert (found.size_bound, found.is_vacuous, found.total_bound, found.f, found.rank) == (
            math.inf,
            False,
            math.inf,
            2,
            3,
        )
        assert found.sizes == len(found) == found.mask.sum()
        assert found.hidden_groups.shape == (0,)
    assert covering(K, Q, size=0).epsilon > 0
    everything = covering(K, Q, size=20)
    assert (len(everything), everything.epsilon) == (20, 0)
    assert covering(np.zeros((0, 20, 3)), Q, mass=0.6).needs.shape[0] == 0
    nobody = covering(K, Q, epsilon=0.1, mask=np.zeros(20, bool))
    assert len(nobody) == len(covering(K[:0], Q, mass=0.5, f=SOFTMAX)) == 0
    assert len(covering(K, np.zeros((30, 3)), mass=0.5)) == 0  # such queries attend to nothing
    assert len(covering(K, np.zeros((30, 3)), mass=0.52, f=SOFTMAX)) == 11


@pytest.mark.parametrize("near", [0.1, 1.0, 10.0])
def test_a_position_is_covered_if_all_its_heads_are(near: float) -> None:
    """Heads of a position are alike, so that heads that count as queries of their own would cover too little."""
    rng, runs, coverage, reached = rng_of(40), 400, 0.8, 0
    K = rng.standard_normal((30, 4))
    for _ in range(runs):
        Q = 2 * rng.standard_normal((20, 4)) + near * rng.standard_normal((3, 20, 4))  # the last position is new
        found = levattn.covering_set(K, Q[:, :-1], 0.08, f=SOFTMAX, coverage=coverage)
        A = naive.shares(Q[:, -1], K, SOFTMAX)
        reached += not (A[:, ~found.mask] >= 0.08).any()
        assert len(found.needs) == 10
    # below the binomial law by less than one in a million
    assert reached >= coverage * runs - 4.9 * np.sqrt(runs * coverage * (1 - coverage))


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("name", ["x²", "softmax"])
def test_batches_are_single_sets(name: str, wish: str) -> None:
    f, _ = FUNCTIONS[name]
    K, Q = rng_of(18).standard_normal((2, 3, 20, 4)), 2 * rng_of(19).standard_normal((2, 6, 17, 4))
    mask, scores = rng_of(20).random((2, 3, 20)) < 0.8, rng_of(21).random((2, 3, 20))
    for queries, options in ((Q[0, 0], {}), (Q[:, :3], {}), (Q, {"scores": scores})):
        found = covering(K, queries, f=f, mask=mask, **WISHES[wish], **options)
        assert " of 20 keys in each of (2, 3), guarantee='coverage', " in repr(found)
        assert repr(found).endswith(f"coverage=0.8, {found.needs.shape[-1]} queries)")
        assert np.all(np.isinf(found.size_bound))
        assert not np.any(found.is_vacuous)
        for i, j in np.ndindex(2, 3):
            own = Q[0, 0] if queries.ndim == 2 else Q[i, j] if not options else Q[i, 2 * j : 2 * j + 2]
            one = {"scores": scores[i, j]} if options else {}
            alone = covering(K[i, j], own, f=f, mask=mask[i, j], **WISHES[wish], **one)
            for figure in ("mask", "scores", "needs"):
                assert np.array_equal(getattr(found, figure)[i, j], getattr(alone, figure)), figure
            assert found.sizes[i, j] == len(alone)
            if wish == "size":
                assert found.epsilon[i, j] == alone.epsilon


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@over_storages
def test_sets_of_other_libraries_are_those_of_numpy(storage: str, dtype: str) -> None:
    K, Q = (x.astype(dtype) for x in (keys_of(22, 30), rng_of(23).standard_normal((41, 4))))
    scores = rng_of(24).random(30)
    for options in ({}, {"scores": scores}):
        expected = covering(K, Q, epsilon=0.1, f=SOFTMAX, **options)
        own = {name: stored(value, storage) for name, value in options.items()}
        found = covering(stored(K, storage), stored(Q, storage), epsilon=0.1, f=SOFTMAX, **own)
        assert type(found.mask) is type(found.scores) is type(stored(K, storage))
        assert str(found.scores.dtype).endswith(dtype)
        assert np.array_equal(as_bool(found.mask), expected.mask)
        np.testing.assert_allclose(as_float64(found.scores), expected.scores, rtol=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("wish", ["epsilon", "size"])
def test_heavy_attention_takes_the_set(name: str, wish: str) -> None:
    f, own = FUNCTIONS[name]
    K, Q = keys_of(25, 30), rng_of(26).standard_normal((60, 4))
    found = covering(K, Q, f=f, **WISHES[wish])
    epsilon = found.epsilon * (1 + 1e-6)
    new = np.vstack([rng_of(27).standard_normal((40, 4)), naive.adversarial_queries(K), 9 * K / np.abs(K).max()])
    A = naive.shares(new, K, own)
    heavy = levattn.heavy_attention(new, K, epsilon, f=f, universal=found)
    np.testing.assert_allclose(heavy.entries.toarray(), np.where(found.mask & (epsilon <= A), A, 0), rtol=1e-9)
    assert np.any((epsilon <= A) & ~found.mask)  # queries of other kinds do miss keys
    V = rng_of(28).standard_normal((30, 5))
    for compensate in (None, "mean"):
        output, bound = heavy.apply(V, compensate=compensate)
        assert np.all(np.linalg.norm(A @ V - output, axis=1) <= bound * (1 + 1e-9) + 1e-12)
    by_mass = covering(K, Q, f=f, mass=0.5)
    with pytest.raises(ValueError, match=r"made for a mass of 0.5 and knows no epsilon; expected"):
        levattn.heavy_attention(new, K, epsilon, f=f, universal=by_mass)


# -- bad input ---------------------------------------------------------------------------------------

KEYS, QUERIES = rng_of(29).standard_normal((12, 4)), rng_of(30).standard_normal((30, 4))
WITH = {"queries": QUERIES, "coverage": 0.8}
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "both": (
        {**WITH, "mass": 0.5},
        ValueError,
        "epsilon and mass are given; expected exactly one of epsilon, size and mass",
    ),
    "three": ({**WITH, "mass": 0.5, "size": 3}, ValueError, "epsilon and size and mass are given"),
    "neither": ({**WITH, "epsilon": None}, ValueError, "epsilon, size and mass are None; expected exactly one"),
    "few": ({**WITH, "coverage": 0.99}, ValueError, r"queries are 30 .*at least 99 .*, 197, for coverage 0\.99"),
    "moments": ({**WITH, "queries": Moments(4).update(QUERIES)}, ValueError, "queries are moments; expected a sample"),
    "normal": ({**WITH, "queries": (np.zeros(4), np.eye(4))}, ValueError, "queries are moments; expected a sample"),
    "other-d": ({**WITH, "queries": QUERIES[:, :2]}, ValueError, "queries have 2 columns and K has 4"),
    "nan": ({**WITH, "queries": QUERIES * np.nan}, NonFiniteError, "queries hold NaN"),
    "nan-key": ({**WITH, "K": KEYS * np.nan}, NonFiniteError, "K holds NaN"),
    "epsilon": ({**WITH, "epsilon": 1.5}, ValueError, "epsilon is 1.5; expected"),
    "mass": ({**WITH, "epsilon": None, "mass": 1.0}, ValueError, "mass is 1.0; expected a number above 0 and below 1"),
    "size": ({**WITH, "epsilon": None, "size": 13}, ValueError, "size is 13; expected 0 <= size <= 12"),
    "scores-shape": (
        {**WITH, "scores": np.ones(3)},
        ValueError,
        r"scores have shape \(3,\).*expected finite numbers \(12,\)",
    ),
    "scores-nan": ({**WITH, "scores": np.full(12, np.nan)}, ValueError, "expected finite numbers"),
    "scores-large": (
        {**WITH, "K": KEYS.astype(np.float32), "scores": np.full(12, 1e39)},
        ValueError,
        r"at most 3\.4e\+38",
    ),
    "scores-ragged": ({**WITH, "scores": [[1], [1, 2]]}, ValueError, "scores is a list that makes no array"),
    "sparse": ({**WITH, "K": strategies.csr(KEYS)}, TypeError, "K is a scipy sparse matrix; expected a dense"),
    "chunks": (
        {**WITH, "K": lambda: iter([KEYS])},
        ValueError,
        "K gives chunks; expected",
    ),
    **{
        f"coverage={value}": ({**WITH, "coverage": value}, error, f"coverage is {value!r}; expected a")
        for value, error in (
            (0, ValueError),
            (1.0, ValueError),
            (math.nan, ValueError),
            ("0.9", TypeError),
            (True, TypeError),
        )
    },
}


def test_queries_in_a_file_are_to_be_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "queries.npy", QUERIES)
    with pytest.raises(TypeError, match=r"queries is of type KeySource; expected .*Load them: queries\.load\(\)$"):
        levattn.covering_set(KEYS, levattn.open_keys(tmp_path / "queries.npy"), 0.1, coverage=0.8)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    changed, error, message = BAD[name]
    arguments: dict[str, Any] = {"K": KEYS, "epsilon": 0.1} | changed
    placed = [arguments.pop(name) for name in ("K", "queries", "epsilon")]
    with pytest.raises(error, match=message):
        levattn.covering_set(*placed, **arguments)


# -- products that cancel, and powers beyond the range of float64 ----------------------------


def cancelling(seed: int) -> tuple[naive.Float, naive.Float]:
    """Whole numbers: only what is left of products near 2^61 decides, and key 7 gets the most."""
    rng = rng_of(9, seed)
    c, x = rng.integers(2**29, 2**30, 12), rng.integers(2**29, 2**30, 60)
    small = rng.integers(-3, 4, 12)
    small[7] = 12
    K, Q = np.stack([c, c, small], axis=1), np.stack([x, -x, rng.integers(1, 4, 60)], axis=1)
    return K.astype(np.float64), Q.astype(np.float64)


def exactly(K: naive.Float, Q: naive.Float, f: Any) -> naive.Float:
    """The attention of queries with whole keys, or with keys whose products are whole, from exact products."""
    rows = []
    for q in Q:
        z = [abs(sum(Fraction(a) * Fraction(b) for a, b in zip(q, k, strict=True))) for k in K]
        top = max(z)
        if not top:
            rows.append([0.0] * len(z))
        elif isinstance(f, levattn.Softmax):
            signed = [sum(Fraction(a) * Fraction(b) for a, b in zip(q, k, strict=True)) for k in K]
            rows.append([math.exp(max(float(s - max(signed)), -700.0)) for s in signed])
        elif isinstance(f, float | int):
            rows.append([float(s / top) ** f for s in z])
        else:
            rows.append(f(np.array([float(s) for s in z])).tolist())
    A = np.array(rows)
    return np.asarray(A / np.where(A.sum(axis=1) > 0, A.sum(axis=1), 1.0)[:, None])


@pytest.mark.parametrize("wish", [{"epsilon": 0.3}, {"mass": 0.6}, {"size": 1}], ids=str)
@pytest.mark.parametrize("f", [1, 2, 4, 100, 0.5, levattn.Huber(), levattn.Fair(), SOFTMAX], ids=str)
def test_sets_hold_the_keys_of_queries_whose_products_cancel(f: Any, wish: dict[str, Any]) -> None:
    for seed in range(2):
        K, Q = cancelling(seed)
        A = exactly(K, Q, f)
        found = covering(K, Q, f=f, **wish)
        assert found.mask[7] or A[:, 7].mean() < wish.get("epsilon", 0.0)
        place = least_place(30, 0.8)
        left = np.sort(A[:, ~as_bool(found.mask)].max(axis=1, initial=0.0))[::-1]
        if "epsilon" in wish:
            assert (left >= 0.3).sum() <= len(Q) - place
        elif "size" in wish:
            assert (left > found.epsilon * (1 + 1e-9)).sum() <= len(Q) - place
        if "size" not in wish:
            following = levattn.AdaptiveCoverage(K, found)
            held = A[0, following.indices]
            enough = held.sum() >= 0.6 if "mass" in wish else (A[0] >= 0.3).sum() == (held >= 0.3).sum()
            assert following.update(Q[:1]).tolist() == [enough]
        np.testing.assert_allclose(levattn.expected_scores(K, Q, f=f, method="mean"), A.mean(axis=0), atol=1e-8)


def least_place(m: int, coverage: float) -> int:
    return math.ceil((m + 1) * coverage)


def test_needs_are_those_of_exact_products() -> None:
    for f, (wish, count) in zip((2, 4, 100, 0.5, SOFTMAX), [*WISHES.items(), *WISHES.items()][:5], strict=True):
        K, Q = cancelling(3)
        scores = rng_of(10).standard_normal(12)
        order, A = order_of(scores), exactly(K, Q, f)
        exact = np.sort(needs_of(A, order, count))
        found = covering(K, Q, f=f, scores=scores, **count)
        assert (found.needs >= exact * (1 - 1e-9)).all()
        np.testing.assert_allclose(found.needs, exact, rtol=1e-6, atol=1e-9, err_msg=wish)


@pytest.mark.parametrize(("p", "key"), [(1, [0.1, -0.1 * (1 - 2.0**-36)]), (20, [1.5e-16, 0.0])])
def test_the_epsilon_of_a_size_bounds_the_tiniest_scores(p: int, key: list[float]) -> None:
    """A product that nearly cancels has few digits, and so has a power near the end of the range."""
    K, Q = np.array([[1.0, 0.0], key]), np.repeat(rng_of(14).standard_normal((9, 1)), 2, axis=1)
    odds = [abs(sum(Fraction(a) * Fraction(b) for a, b in zip(q, key, strict=True)) / Fraction(q[0])) ** p for q in Q]
    exact = sorted(x / (1 + x) for x in odds)
    needs = covering(K, Q, f=p, size=1, scores=np.array([2.0, 1.0])).needs
    assert all(Fraction(x) >= y * (1 - Fraction(1, 10**9)) for x, y in zip(needs, exact, strict=True))
    np.testing.assert_allclose(needs, [float(y) for y in exact], rtol=1e-5, atol=1e-300)


@pytest.mark.parametrize("p", [0.5, 1, 2, 7.5, 100, 1000])
@pytest.mark.parametrize("scale", [2.0**-1040, 2.0**-600, 1.0, 2.0**900])
def test_no_scale_and_no_power_changes_a_need(p: float, scale: float) -> None:
    rng = rng_of(11)
    K, Q = rng.integers(-9, 10, (20, 4)) * 1.0, rng.integers(-9, 10, (40, 4)) * 1.0
    K[:, 3] *= 2.0**20  # a column of another size
    Q[:, 3] *= 2.0**-20
    scores = rng_of(12).standard_normal(20)
    order, A = order_of(scores), exactly(K, Q, p)
    for name, wish in WISHES.items():
        found = covering(K * scale, Q, f=p, scores=scores, **wish)
        np.testing.assert_allclose(found.needs, np.sort(needs_of(A, order, wish)), rtol=1e-9, err_msg=name)
    found = levattn.expected_scores(K * scale, Q, f=p, method="mean")
    np.testing.assert_allclose(found, A.mean(axis=0), rtol=1e-9, atol=1e-14)


def test_a_query_whose_products_no_arithmetic_decides_needs_all_keys() -> None:
    """Beyond twice the precision nothing is known: 2^160 cancels, and what is left is 1 or 2."""
    K = np.array([[2.0**80, 2.0**80, 1.0], [2.0**80, 2.0**80, 2.0], [1.0, 0.0, 0.0]])
    Q = np.tile([2.0**80, -(2.0**80), 1.0], (9, 1))
    for wish in ({"epsilon": 0.3}, {"mass": 0.6}):
        found = covering(K, Q, scores=np.array([3.0, 2.0, 1.0]), **wish)
        assert found.mask.tolist() == [True, True, True]
