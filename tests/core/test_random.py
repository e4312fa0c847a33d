"""Counter-based randomness: known answers, pure functions of seed and row, and the distributions that come of it.

Inside: random words have a published definition, and a sketch does not show which words it took.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import naive
from levattn._core.random import as_seed, below, normals, philox, signs, uniforms, words
from levattn._kernels.jit import jit
from levattn._kernels.sketch import random as sketch_random
from strategies import examples, trials

fill_group, fill_normals, fill_signs, fill_words, cos_sin, minus_log = map(
    jit,
    (
        sketch_random.fill_group,
        sketch_random.fill_normals,
        sketch_random.fill_signs,
        sketch_random.fill_words,
        sketch_random._cos_sin,
        sketch_random._minus_log,
    ),
)

SEEDS = (0, 1, 2**32 - 1, 2**32, 0x9E3779B97F4A7C15, 2**63, 2**64 - 1)
# Rows whose group of four has a number of one word, of two, and the last that are in use
STARTS = (0, 1, 2, 3, 4, 1021, 2**34 - 5, 2**34 - 1, 2**34, 2**40 + 3, 2**62 - 700)

DRAWS = trials(10**7)
# The tests of distributions look at about 70 two-sided p-values. Seeds are fixed, so that each passes or fails for
# good; a sound generator had a chance of 0.7 % that one of them fell below the level.
LEVEL = 1e-4


def keys(seed: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)


# -- the generator ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers_of_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    found = philox(counter, key[1] << 32 | key[0])
    assert tuple(int(word) for word in found) == expected
    assert naive.philox(counter, key) == expected


@examples(40)
@given(
    seed=st.sampled_from(SEEDS) | st.integers(0, 2**64 - 1),
    stream=st.integers(0, 2**32 - 1),
    start=st.sampled_from(STARTS) | st.integers(0, 2**62 - 100),
    count=st.integers(0, 9),
    columns=st.integers(0, 5),
)
def test_words_are_the_definition(seed: int, stream: int, start: int, count: int, columns: int) -> None:
    found = words(seed, stream, start, count, columns)
    expected = [[naive.random_word(seed, stream, start + r, c) for c in range(columns)] for r in range(count)]
    assert found.shape == (count, columns)
    assert found.dtype == np.uint32
    assert found.tolist() == expected


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("start", STARTS)
def test_compiled_words_are_the_definition(seed: int, start: int) -> None:
    group = start // 4
    expected = words(seed, 7, 4 * group, 12, 40)
    for column in (0, 1, 39):
        out = np.empty(12, np.uint32)
        fill_words(*keys(seed), 7, column, group, out)
        assert np.array_equal(out, expected[:, column])
    for first in (0, 3):
        rows = np.empty((4, 40 - first), np.uint32)
        fill_group(*keys(seed), 7, group + 1, first, 40 - first, rows)
        assert np.array_equal(rows, expected[4:8, first:])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", [0, 32, 480])
def test_compiled_signs_are_the_bits_of_the_words(seed: int, first: int) -> None:
    for kind in (np.float64, np.float32):
        out = np.empty((4, 96), kind)
        fill_signs(*keys(seed), 3, 2**33, first, 96, np.empty((4, 3), np.uint32), out)
        drawn = words(seed, 3, 2**35, 4, first // 32 + 3)[:, first // 32 :]
        bits = drawn[:, :, None] >> np.arange(32, dtype=np.uint32) & 1
        assert np.array_equal(out, 1 - 2.0 * bits.reshape(4, 96))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", [0, 2, 480])
def test_compiled_normals_are_the_definition(seed: int, first: int) -> None:
    out = np.empty((4, 512))
    fill_normals(*keys(seed), 3, 2**33, first, 512, np.empty((4, 512), np.uint32), out)
    expected = normals(seed, 3, 2**35, 4, first + 512)[:, first:]
    # a few roundings of a number of at most 6.8; the angle of the definition is rounded at up to 2π
    np.testing.assert_allclose(out, expected, rtol=0, atol=6.8 * 4 * 2.0**-52)


def test_compiled_normals_of_extreme_words() -> None:
    eighths = [i * 2**29 + shift for i in range(8) for shift in (0, 1, 2**29 - 1)]
    for word in (*eighths, 5, 2**32 - 2, 3037000499, 3037000500):  # the last two are at √½
        logarithm = minus_log(np.uint32(word))
        cosine, sine = cos_sin(np.uint32(word))
        u = (word + 0.5) / 2**32
        assert logarithm == pytest.approx(-np.log(u), rel=4e-16)
        assert cosine == pytest.approx(np.cos(2 * np.pi * u), abs=1e-15)
        assert sine == pytest.approx(np.sin(2 * np.pi * u), abs=1e-15)


@examples(20)
@given(
    seed=st.integers(0, 2**64 - 1),
    start=st.sampled_from(STARTS),
    shape=st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_normals_are_the_definition(seed: int, start: int, shape: tuple[int, int]) -> None:
    count, columns = shape
    found = normals(seed, 2, start, count, columns)
    assert found.shape == (count, columns)
    for r, c in np.ndindex(count, columns):
        assert found[r, c] == pytest.approx(naive.random_normal(seed, 2, start + r, c), rel=1e-14, abs=1e-14)


# -- pure functions of seed, stream, row and column ------------------------------------------


@examples(40)
@given(
    seed=st.sampled_from(SEEDS),
    start=st.sampled_from(STARTS),
    edges=st.lists(st.integers(0, 500), max_size=6),
    columns=st.integers(1, 6),
)
def test_any_chunks_have_the_same_words_and_normals(seed: int, start: int, edges: list[int], columns: int) -> None:
    for draw in (words, normals):
        whole = draw(seed, 5, start, 500, columns + 1)
        cuts = [0, *sorted(edges), 500]
        parts = [draw(seed, 5, start + low, high - low, columns) for low, high in itertools.pairwise(cuts)]
        assert np.array_equal(np.concatenate(parts), whole[:, :columns])


def test_seeds_streams_and_columns_differ() -> None:
    # of 3 · 10⁶ pairs of words none is expected to agree by chance more than 0.001 times
    seen = [words(seed, stream, 0, 1000, 2) for seed in (0, 1, 2**32, 2**63) for stream in (1, 2, 3)]
    columns = np.concatenate(seen, axis=1).T
    for i, one in enumerate(columns):
        assert len(np.unique(one)) == len(one)
        for other in columns[:i]:
            assert not np.any(one == other)


def test_a_sign_and_a_bucket_come_of_different_bits() -> None:
    drawn = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    assert np.array_equal(below(drawn, 1000), below(drawn | np.uint32(1), 1000))
    assert np.array_equal(signs(drawn), np.ones(2**16))
    assert np.array_equal(signs(drawn | np.uint32(1)), -np.ones(2**16))


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 2**20 - 1, 2**31 - 1])
def test_buckets_are_in_range_and_even(size: int) -> None:
    words_of_ends = np.array([0, 1, 2, 2**32 - 2, 2**32 - 1], np.uint32)
    assert below(words_of_ends, size)[[0, 1, 3, 4]].tolist() == [0, 0, size - 1, size - 1]
    # The words of a bucket are neighbors: it has floor or ceiling of 2³¹/size of them, by where it begins.
    begins = -(-np.arange(min(size, 1000) + 1, dtype=object) * 2**31 // size)
    counts = np.diff(begins)
    assert max(counts) - min(counts) <= 1
    first = (np.minimum(begins[:-1], 2**31 - 1) * 2).astype(np.uint32)
    assert np.array_equal(below(first, size), np.arange(len(first)))


# -- distributions -----------------------------------------------------------------------


@lru_cache(2)  # 40 MB each
def column(seed: int, stream: int = 1, number: int = 0, start: int = 0) -> NDArray[np.uint32]:
    out = np.empty(DRAWS, np.uint32)
    fill_words(*keys(seed), stream, number, start // 4, out)
    out.flags.writeable = False
    return out


def chi_square(counts: NDArray[np.int64]) -> float:
    """The p-value of equal probabilities, made two-sided: too even is as bad as too uneven."""
    p = float(scipy.stats.chisquare(counts).pvalue)
    return 2 * min(p, 1 - p)


@pytest.mark.parametrize("size", [2, 3, 7, 64, 100, 1000, 4096, 10007, 65536])
@pytest.mark.parametrize("seed", [0, 2**40 + 1])
def test_buckets_are_uniform(size: int, seed: int) -> None:
    assert chi_square(np.bincount(below(column(seed), size), minlength=size)) > LEVEL


def independent(one: NDArray[np.uint32], other: NDArray[np.uint32]) -> None:
    """Neither signs nor buckets of two columns of words, nor one with the other, are related."""
    for a, b in ((64, 64), (2, 1000), (1000, 2)):
        first, second = (below(x, s) if s > 2 else (x & np.uint32(1)) for x, s in ((one, a), (other, b)))
        pairs = first.astype(np.int64) * b + second
        assert chi_square(np.bincount(pairs, minlength=a * b)) > LEVEL


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 5])
def test_neighboring_rows_are_independent(distance: int) -> None:
    drawn = column(3)
    usable = drawn[: DRAWS // (2 * distance) * 2 * distance].reshape(-1, 2, distance)
    independent(usable[:, 0].reshape(-1), usable[:, 1].reshape(-1))


@pytest.mark.parametrize(
    "other",
    [
        {"number": 1},
        {"number": 2},
        {"stream": 2},
        {"seed": 4},
        {"seed": 3 + 2**32},
        {"seed": 3 + 2**63},
        {"start": 2**34},
    ],
    ids=str,
)
def test_columns_streams_and_seeds_are_independent(other: dict[str, int]) -> None:
    independent(column(3), column(**{"seed": 3, **other}))


@lru_cache(1)
def many_normals() -> NDArray[np.float64]:
    columns, groups = 500, DRAWS // 2000
    out, drawn = np.empty((4 * groups, columns)), np.empty((4, columns), np.uint32)
    for group in range(groups):
        fill_normals(*keys(11), 2, group, 0, columns, drawn, out[4 * group : 4 * group + 4])
    return out


def test_normals_are_normal() -> None:
    ordered = np.sort(many_normals(), axis=None)
    cdf = scipy.special.ndtr(ordered)
    steps = np.arange(DRAWS + 1) / DRAWS
    distance = max(float(np.max(steps[1:] - cdf)), float(np.max(cdf - steps[:-1])))
    assert scipy.special.kolmogorov(np.sqrt(DRAWS) * distance) > LEVEL
    for moment, (mean, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}.items():
        z = float(np.mean(ordered**moment) - mean) / np.sqrt(variance / DRAWS)
        assert 2 * scipy.stats.norm.sf(abs(z)) > LEVEL
    far = scipy.stats.norm.isf(3 / DRAWS)  # three are expected beyond
    assert far < ordered[-1] < 6.8
    assert -6.8 < ordered[0] < -far


@pytest.mark.parametrize("shift", [(0, 1), (0, 2), (1, 0), (2, 0), (4, 0), (1, 1), (1, 499)], ids=str)
def test_neighboring_normals_are_uncorrelated(shift: tuple[int, int]) -> None:
    X = many_normals()
    x, y = X[: len(X) - shift[0], : 500 - shift[1]], X[shift[0] :, shift[1] :]
    for power, (mean, variance) in {1: (0, 1), 2: (1, 2)}.items():  # squares show what shares a radius or an angle
        z = float(np.mean((x**power - mean) * (y**power - mean))) / variance * np.sqrt(x.size)
        assert 2 * scipy.stats.norm.sf(abs(z)) > LEVEL


# -- seeds -----------------------------------------------------------------------------------


def test_seeds_that_are_taken() -> None:
    assert as_seed(None) == 0
    assert as_seed(np.uint64(2**64 - 1)) == 2**64 - 1
    assert type(as_seed(np.int32(5))) is int
    first, second = np.random.default_rng(1), np.random.default_rng(1)
    assert as_seed(first) == as_seed(second) != as_seed(first)
    assert 0 <= as_seed(first) < 2**64


@pytest.mark.parametrize("rng", [True, np.True_, 1.0, "1", np.random.RandomState(0), [1], np.array([1])], ids=str)
def test_seeds_of_other_types_are_refused(rng: object) -> None:
    with pytest.raises(TypeError, match=r"^rng is .*; expected a seed, a numpy.random.Generator, or None"):
        as_seed(rng)


@pytest.mark.parametrize("rng", [-1, 2**64, np.int64(-5)])
def test_seeds_out_of_range_are_refused(rng: int) -> None:
    with pytest.raises(ValueError, match=r"^seed is -?\d+; expected a seed of at least 0 and below 2\*\*64"):
        as_seed(rng, "seed")


def test_uniform_numbers_are_words_and_uniform() -> None:
    for start in STARTS:
        found = uniforms(9, 5, start, 700)
        drawn = words(9, 5, start, 700, 2).tolist()
        expected = [(high * 2**21 + low // 2**11) / 2**53 for high, low in drawn]  # exact in float64
        assert found.tolist() == expected
        assert found[3:].tolist() == uniforms(9, 5, start + 3, 697).tolist()
    assert uniforms(9, 5, 0, 0).shape == (0,)
    many = uniforms(9, 5, 3, 200_000)  # drawn in parts
    assert many[65_000:66_000].tolist() == uniforms(9, 5, 65_003, 1000).tolist()
    assert scipy.stats.kstest(uniforms(9, 5, 0, 10**5), "uniform").pvalue > LEVEL
