"""Mergeable states: the same bits for every chunking, and merges that agree with one pass."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import levattn
from levattn import leverage_scores
from levattn._kernels import PairwiseSum, Rows
from levattn.exceptions import NonFiniteError
from levattn.states import Moments
from naive import leverage_exact, leverage_svd


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


def fingerprint(state: Moments) -> tuple[object, ...]:
    return state.count.tolist(), state.read().tobytes()


@pytest.mark.parametrize("before", [0, 5, 2048, 5000])
@pytest.mark.parametrize("m", [3, 2048, 6000])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_chunks_that_are_not_finite_are_refused(before: int, m: int, value: float) -> None:
    K = np.random.default_rng(before).standard_normal((before + m, 3))
    state = Moments(3).update(K[:before])
    seen = fingerprint(state)
    for bad in ([0], [m - 1], [1, m - 1]):
        chunk = K[before:].copy()
        chunk[bad, 1] = value
        with pytest.raises(NonFiniteError, match=r"\bK\b") as caught:
            state.update(chunk)
        rows = ", ".join(str(before + row) for row in bad)
        assert f"row{'s' if len(bad) > 1 else ''} {rows}, counted from" in str(caught.value)
        assert "mask=" in str(caught.value)
        assert fingerprint(state) == seen
    state.update(K[before:])
    assert np.array_equal(state.read(), Moments(3).update(K).read())


def test_rows_of_a_head_that_are_not_finite_are_named() -> None:
    K = np.ones((2, 3, 10, 4))
    state = Moments(4, (2, 3)).update(K)
    K[1, 1, 7, 2] = np.nan
    with pytest.raises(NonFiniteError, match="row 17 of matrix 4 "):
        state.update(K)
    mask = np.ones((2, 3, 10), bool)
    mask[..., 7] = False
    assert np.all(np.isfinite(state.update(K, mask).read()))


@pytest.mark.parametrize("m", [10, 100, 2048, 5000])
@pytest.mark.parametrize("sizes", [(1e200, 1e-200), (1e-300, 1.0), (1e-170, 1e160)])
def test_keys_whose_squares_leave_the_range_have_scores(m: int, sizes: tuple[float, float]) -> None:
    K = np.random.default_rng(m).standard_normal((7 + m, 3))
    K[:, 1] *= sizes[0]
    K[7:] *= sizes[1] if sizes[0] * sizes[1] < 1e300 else 1.0
    state = Moments(3).update(K[:7]).update(K[7:])
    rows = Rows(K[None], "float64")
    scores = state.factor().on(rows).scores()[0][0]
    np.testing.assert_allclose(scores, leverage_svd(K / np.abs(K).max(axis=0)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("prefix", ["zeros", "one column", "well-conditioned", "small"])
@pytest.mark.parametrize("condition", [1e5, 1e9])
def test_keys_that_turn_ill_conditioned_have_scores(prefix: str, condition: float) -> None:
    rng = np.random.default_rng(11)
    K = rng.standard_normal((9000, 5)) @ np.linalg.qr(rng.standard_normal((5, 5)))[0]
    late = (K[4096:] * np.geomspace(1, 1 / condition, 5)) @ np.linalg.qr(rng.standard_normal((5, 5)))[0]
    if prefix == "zeros":
        K[:4096] = 0
    elif prefix == "one column":
        K[:4096, 1:] = 0
    elif prefix == "small":
        K[:4096] *= 1e-12
    K[4096:] = late
    if prefix == "well-conditioned":
        K[4096:] *= 1e6
    scores = Moments(5).update(K).factor().on(Rows(K[None], "float64")).scores()[0][0]
    np.testing.assert_allclose(scores, leverage_scores(K, method="svd"), rtol=1e-7)
    exact = leverage_exact(K[:: len(K) // 40])
    few = Moments(5).update(np.repeat(K[:: len(K) // 40], 60, axis=0)).factor()
    shares = few.on(Rows(K[None, :: len(K) // 40], "float64")).scores()[0][0]
    np.testing.assert_allclose(60 * shares, exact, rtol=1e-6)


def test_keys_of_the_documented_range() -> None:
    K = np.random.default_rng(10).uniform(-1e150, 1e150, (9000, 3))
    state = in_chunks(K, [5, 3000, 1])
    np.testing.assert_allclose(state.read() / 1e300, naive_moment(K / 1e150), rtol=1e-12)


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
