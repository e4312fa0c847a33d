"""Mergeable states: the same bits for every chunking, and merges that agree with one pass."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import levattn
from levattn.states import Moments, PairwiseSum


def naive_moment(K: np.ndarray) -> np.ndarray:
    wide = K.astype(np.longdouble)
    return np.asarray(sum((np.outer(k, k) for k in wide), np.zeros((K.shape[1],) * 2)), float)


def in_chunks(K: np.ndarray, sizes: list[int]) -> Moments:
    state = Moments(K.shape[-1], K.shape[:-2])
    edges = [min(edge, K.shape[-2]) for edge in itertools.accumulate(sizes, initial=0)]
    for low, high in itertools.pairwise([*edges, K.shape[-2]]):
        state.update(K[..., low:high, :])
    return state


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 2047, 2048, 2049, 9000])
def test_reads_the_second_moment(n: int, dtype: str) -> None:
    K = np.random.default_rng(n).standard_normal((n, 5)).astype(dtype)
    state = Moments(5).update(K)
    np.testing.assert_allclose(state.read(), naive_moment(K), rtol=1e-13, atol=1e-12)
    assert state.count == n


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 3000), max_size=8))
def test_any_chunks_give_the_same_bits(sizes: list[int]) -> None:
    K = np.random.default_rng(0).standard_normal((6500, 3))
    assert np.array_equal(in_chunks(K, sizes).read(), Moments(3).update(K).read())


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_any_number_of_threads_gives_the_same_bits(dtype: str) -> None:
    K = np.random.default_rng(1).standard_normal((200_000, 20)).astype(dtype)
    results = []
    for threads in (1, 2, 3):
        with levattn.thread_limit(threads):
            results.append((Moments(20).update(K).read(), levattn.leverage_scores(K)))
    for moment, scores in results[1:]:
        assert np.array_equal(moment, results[0][0])
        assert np.array_equal(scores, results[0][1])


def test_heads_are_summed_apart() -> None:
    K = np.random.default_rng(2).standard_normal((2, 3, 2500, 4))
    moment = in_chunks(K, [1000, 7, 1100]).read()
    assert moment.shape == (2, 3, 4, 4)
    for i, j in np.ndindex(2, 3):
        assert np.array_equal(moment[i, j], Moments(4).update(K[i, j]).read())


def test_masked_keys_are_left_out() -> None:
    K = np.random.default_rng(3).standard_normal((3000, 4))
    mask = np.random.default_rng(4).random(3000) < 0.5
    garbage = np.where(mask[:, None], K, np.nan)
    state = Moments(4).update(garbage[:1500], mask[:1500]).update(garbage[1500:], mask[1500:])
    np.testing.assert_allclose(state.read(), naive_moment(K[mask]), rtol=1e-13)
    assert state.count == mask.sum()


def test_a_chunk_may_be_overwritten_after_update() -> None:
    K = np.random.default_rng(5).standard_normal((700, 4))
    state, chunk = Moments(4), np.empty((100, 4))
    for low in range(0, 700, 100):
        chunk[:] = K[low : low + 100]
        state.update(chunk)
    assert np.array_equal(state.read(), Moments(4).update(K).read())


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 1500), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_merges_agree_with_one_pass(sizes: list[int], random: object) -> None:
    K = np.random.default_rng(6).standard_normal((sum(sizes), 3))
    edges = list(itertools.accumulate(sizes, initial=0))
    parts = [Moments(3).update(K[low:high]) for low, high in itertools.pairwise(edges)]
    random.shuffle(parts)  # type: ignore[attr-defined]
    total = Moments(3)  # the identity
    for part in parts:
        total.merge(part)
    np.testing.assert_allclose(total.read(), naive_moment(K), rtol=1e-12, atol=1e-12)
    assert total.count == len(K)


def test_a_merged_state_goes_on() -> None:
    K = np.random.default_rng(7).standard_normal((4000, 3))
    other = Moments(3).update(K[2500:3000])
    before = other.read()
    state = Moments(3).update(K[:2500]).merge(other).update(K[3000:])
    np.testing.assert_allclose(state.read(), naive_moment(K), rtol=1e-12)
    assert np.array_equal(other.read(), before)


def test_integer_values_make_every_order_equal() -> None:
    K = np.random.default_rng(8).integers(-9, 10, (5000, 6)).astype(float)
    state = Moments(6).update(K[3000:]).merge(Moments(6).update(K[:3000]))
    assert np.array_equal(state.read(), naive_moment(K))


@pytest.mark.parametrize("shape", [(10, 4), (2, 10, 3)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\bK has batch"):
        Moments(3).update(np.zeros(shape))
    with pytest.raises(ValueError, match=r"\bother has batch"):
        Moments(3).merge(Moments(shape[-1], shape[:-2]))


def test_pairwise_sums_are_one_tree() -> None:
    terms = np.random.default_rng(9).standard_normal(11)
    singly, jointly = PairwiseSum(), PairwiseSum()
    for term in terms:
        singly.add(term)
    jointly.add((terms[0] + terms[1]) + (terms[2] + terms[3]), 2)
    jointly.add((terms[4] + terms[5]) + (terms[6] + terms[7]), 2)
    jointly.add(terms[8] + terms[9], 1)
    jointly.add(terms[10])
    assert singly.total() == jointly.total()
    assert PairwiseSum().total() is None
    with pytest.raises(ValueError, match="cannot begin"):
        jointly.add(terms[0], 1)
