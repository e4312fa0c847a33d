"""Approximate leverage scores against exact ones, and the supersets made of them against every key that is heavy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import levattn
import naive
import strategies
from levattn.sketch import OSNAP, SRHT, CountSketch, GaussianJL, SignJL, Sketch, gaussian_size
from strategies import STORAGE, as_bool, as_float64

# name of the method, and the sketch for d columns and a seed
METHODS: dict[str, Any] = {
    "countsketch": lambda d, seed: CountSketch(4 * d * d + 8, seed=seed),
    "osnap": lambda d, seed: OSNAP(16 * d, seed=seed),
    "srht": lambda d, seed: SRHT(16 * d, seed=seed),
    "jl": lambda _, seed: GaussianJL(64, seed=seed),
    "osnap, jl": lambda d, seed: (OSNAP(16 * d, seed=seed), GaussianJL(64, seed=seed)),
    "srht, jl": lambda d, seed: (SRHT(16 * d, seed=seed), GaussianJL(64, seed=seed)),
}
EVERY = pytest.mark.parametrize("method", METHODS)


def options(method: str, d: int, seed: int = 0) -> dict[str, Any]:
    return {"method": METHODS[method](d, seed)}


@st.composite
def keys(draw: st.DrawFn) -> naive.Float:
    """Keys of every kind: coherent, heavy-tailed, ill-conditioned, duplicated, rank-deficient, zero; n < d as well."""
    K = draw(strategies.spoilt(60, 5))
    if draw(st.booleans()):
        K *= 10.0 ** draw(st.integers(-140, 140))
    return np.asarray(K)


@EVERY
@settings(max_examples=60, deadline=None)
@given(
    K=keys(),
    seed=st.integers(0, 2**64 - 1),
    epsilon=st.sampled_from([0.02, 0.1, 0.5, 1.0]),
    share=st.floats(0, 1),
    recheck=st.booleans(),
)
def test_sets_miss_nothing(
    method: str, K: naive.Float, seed: int, epsilon: float, share: float, recheck: bool
) -> None:
    found = levattn.universal_set(K, epsilon, **options(method, K.shape[1], seed))
    found = found.rechecked(K) if recheck else found
    exact = levattn.universal_set(K, epsilon)
    assert not np.any(exact.mask & ~found.mask)
    assert np.all(found.scores >= levattn.leverage_scores(K) * (1 - 1e-9))
    assert found.certificate == (method.split(",")[0],)
    assert found.guarantee == (exact.guarantee if recheck else "superset")
    if recheck:
        np.testing.assert_array_equal(found.mask, exact.mask)
    size = round(share * len(K))
    by_size = levattn.universal_set(K, size=size, **options(method, K.shape[1], seed))
    assert len(by_size) == size
    assert levattn.leverage_scores(K)[~by_size.mask].max(initial=0.0) <= by_size.epsilon * (1 + 1e-9)


@EVERY
@pytest.mark.parametrize("storage", STORAGE)
def test_every_storage_gives_the_scores_of_its_kind(method: str, storage: str) -> None:
    K = STORAGE[storage](strategies.case("coherent").copy())
    scores = levattn.leverage_scores(K, **options(method, K.shape[1]))
    exact = levattn.leverage_scores(K)
    assert type(scores) is type(exact)
    assert scores.dtype == exact.dtype
    ratio = as_float64(scores)[as_float64(exact) > 0] / as_float64(exact)[as_float64(exact) > 0]
    assert 0.3 < np.median(ratio) < 2
    assert np.all(as_float64(scores) <= 1)
    again = levattn.leverage_scores(K, **options(method, K.shape[1]))
    np.testing.assert_array_equal(as_float64(again), as_float64(scores))
    found = levattn.universal_set(K, 0.1, **options(method, K.shape[1]))
    assert not np.any(as_bool(levattn.universal_set(K, 0.1).mask) & ~as_bool(found.mask))


@EVERY
def test_a_batch_is_its_matrices(method: str) -> None:
    K = np.random.default_rng(0).standard_normal((2, 3, 300, 4))
    scores = levattn.leverage_scores(K, **options(method, 4, 5))
    assert scores.shape == (2, 3, 300)
    for item in np.ndindex(2, 3):
        np.testing.assert_allclose(scores[item], levattn.leverage_scores(K[item], **options(method, 4, 5)), rtol=1e-9)
    found = levattn.universal_set(K, 0.1, **options(method, 4))
    assert not np.any(levattn.universal_set(K, 0.1).mask & ~found.mask)


@EVERY
def test_masked_and_centered_keys(method: str) -> None:
    rng = np.random.default_rng(1)
    K = rng.standard_normal((500, 4)) + 5
    mask = rng.random(500) < 0.6
    K[~mask] = np.nan
    centered = levattn.leverage_scores(K, mask=mask, center=True, **options(method, 4))
    exact = levattn.leverage_scores(K, mask=mask, center=True)
    assert np.all(centered[~mask] == 0)
    assert 0.4 < np.median(centered[mask] / exact[mask]) < 2
    found = levattn.universal_set(K, 0.02, mask=mask, center=True, **options(method, 4))
    assert found.guarantee == "none"
    assert not np.any((exact >= 0.02) & ~found.mask)


@pytest.mark.parametrize(("method", "share"), [("countsketch", 0.99), ("osnap", 0.9), ("srht", 0.9)])
def test_measured_distortion_keeps_few_keys(method: str, share: float) -> None:
    rng = np.random.default_rng(2)
    K = rng.standard_normal((20_000, 8)) * np.clip(np.abs(rng.standard_cauchy((20_000, 1))), 0.1, 100)
    exact = levattn.universal_set(K, 0.02)
    found = levattn.universal_set(K, 0.02, **options(method, 8))
    assert len(exact) <= len(found) <= len(exact) / share * 2


def test_steps_of_lanczos_bound_the_distortion_of_many_columns() -> None:
    """d is large enough for the distortion to be estimated: chance comes in, at one in a million."""
    rng = np.random.default_rng(3)
    K = rng.standard_normal((4000, 330)) * np.clip(np.abs(rng.standard_cauchy((4000, 1))), 0.1, 100)
    exact = levattn.leverage_scores(K)
    for family in (OSNAP, SRHT):
        found = levattn.universal_set(K, 0.9, method=family(330 * 12))
        assert np.all(found.scores >= exact * (1 - 1e-9))
        assert len(found) < 0.5 * len(K)
        assert not found.exact_factor
        with pytest.raises(ValueError, match=r"universal\.rechecked\(K\)"):
            levattn.heavy_attention(K[:2], K, 0.95, universal=found)
    again = found.rechecked(K)
    assert again.exact_factor
    assert again.guarantee == "exact"
    np.testing.assert_array_equal(again.mask, levattn.universal_set(K, 0.9).mask)
    assert levattn.heavy_attention(K[:2], K, 0.95, universal=again).universal is again


def test_projections_are_unbiased_and_spread_as_they_should() -> None:
    K = np.random.default_rng(4).standard_normal((3000, 6))
    exact = levattn.leverage_scores(K)
    ratios = np.stack([levattn.leverage_scores(K, method=GaussianJL(50, seed=seed)) / exact for seed in range(40)])
    # means of 40 · 6 independent directions of χ²₅₀/50, whose standard deviation is √(2/50)
    assert abs(ratios.mean() - 1) < 5 * np.sqrt(2 / 50 / 240)
    assert ratios.std() == pytest.approx(np.sqrt(2 / 50), rel=0.1)


FAR = np.zeros((1000, 3))
FAR[:, 0], FAR[5, 2] = 1, 1e-9
# keys, ε, which of them are in the set, and seeds
HIDDEN: dict[str, tuple[Any, float, list[int], list[int]]] = {
    "outside the sketch": (FAR, 0.9, [5], [0]),
    # two independent keys score 1, though one is told from the other by the smallest number alone
    "rounded to nothing": (np.array([[-7e306, 0.0], [3e307, 5e-324]]), 0.9, [0, 1], [1]),
    # two opposite keys share all the attention, and a sketch may hold next to nothing but the third
    **{
        f"that cancel beside {small}": (np.array([[0.0, -3.0], [0.0, small], [0.0, 3.0]]), 0.5, [0, 2], [*range(20)])
        for small in (1e-323, 1e-154, 1e-20)
    },
}


@pytest.mark.crossed
@pytest.mark.parametrize("name", HIDDEN)
@EVERY
def test_keys_that_a_sketch_hides_are_in_the_set(method: str, name: str) -> None:
    K, epsilon, wanted, several = HIDDEN[name]
    for seed, recheck in itertools.product(several, (False, True)):
        found = levattn.universal_set(K, epsilon, **options(method, K.shape[1], seed))
        found = found.rechecked(K) if recheck else found
        assert found.mask[wanted].all(), (seed, recheck)
    if K is FAR:
        assert levattn.leverage_scores(K, **options(method, 3))[5] > 0.4


def test_default_sizes_are_those_of_the_docstring() -> None:
    K = np.random.default_rng(6).standard_normal((4000, 4))
    names: dict[Any, Any] = {
        "osnap": OSNAP(32),
        "srht": SRHT(32),
        "countsketch": CountSketch(64),
        "jl": GaussianJL(72),
    }
    for name, sketch in names.items():
        np.testing.assert_array_equal(
            levattn.leverage_scores(K, method=name), levattn.leverage_scores(K, method=sketch)
        )
    assert gaussian_size(4, 0.5) > 32  # the defaults are far below what is proven


NO_METHODS: list[Any] = [
    SignJL(32),
    (OSNAP(32), GaussianJL(8), GaussianJL(8)),
    (GaussianJL(32), GaussianJL(8)),
    (OSNAP(32), OSNAP(8)),
    (None, GaussianJL(8)),
    (32, 8),
    (),
]
NO_NAMES: list[Any] = [[OSNAP(32)], np.array(["osnap", "jl"])]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"method": OSNAP(3, 1)}, r"method is OSNAP\(size=3.* at least d = 4"),
        *(({"method": given}, "expected a CountSketch, OSNAP, SRHT or GaussianJL. A pair is") for given in NO_METHODS),
        *(({"method": given}, "method is .*expected one of 'auto'") for given in NO_NAMES),
        ({"method": "osnap", "ridge": 0.1}, "ridge"),
        ({"method": GaussianJL(8), "rtol": 1e-3}, "rtol"),
        ({"method": "sketch"}, r"expected one of 'auto', .*, or a sketch such as OSNAP\(4096, seed=0\)"),
        ({"method": Sketch(OSNAP(8), 1)}, "expected one of"),
    ],
)
def test_wrong_options(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        levattn.leverage_scores(np.random.default_rng(0).standard_normal((50, 4)), **wrong)


def test_wrong_options_of_sets() -> None:
    K = np.random.default_rng(0).standard_normal((50, 4))
    for wrong in (OSNAP(3, 1), *NO_METHODS, *NO_NAMES):
        with pytest.raises(ValueError, match="method is "):
            levattn.universal_set(K, 0.1, method=wrong)
        with pytest.raises(ValueError, match="method is "):
            levattn.universal_set(K, 0.1, f=1, method=wrong)
    exact: list[dict[str, Any]] = [{"epsilon": 0.1}, {"epsilon": 0.1, "f": 1}, {"size": 3, "method": "osnap"}]
    for each in exact:
        with pytest.raises(ValueError, match=r"the set is by .* approximate"):
            levattn.universal_set(K, **each).rechecked(K)
    found = levattn.universal_set(K, 0.1, method="osnap")
    for other in (K[::-1] * 2, K[:20], K[:, :3], K[None]):
        with pytest.raises(ValueError, match="this set is of"):
            found.rechecked(other)
    bad = K.copy()
    bad[7] = np.nan
    for method in METHODS:
        with pytest.raises(levattn.NonFiniteError, match="7"):
            levattn.leverage_scores(bad, **options(method, 4))
