"""The softmax state: means of values under softmax, whatever the parts that the positions come in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from levattn.states import SoftmaxState
from strategies import STORAGE, as_float64

SCALES = (1.0, 30.0, 300.0)


def chunk(seed: int, n: int = 200, scale: float = 30.0, dtype: str = "float64", latents: int = 5, d: int = 3) -> Any:
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal((n, latents))).astype(dtype), rng.standard_normal((n, d)).astype(dtype)


def means(logits: np.ndarray, V: np.ndarray) -> np.ndarray:
    """The definition, one latent after the other, with sums of full precision."""
    found = np.zeros((logits.shape[1], V.shape[1]))
    for latent, column in enumerate(logits.T.astype(np.float64)):
        seen = column > -np.inf
        if seen.any():
            E = np.exp(column[seen] - column[seen].max())
            for j, values in enumerate(V[seen].T.astype(np.float64)):
                found[latent, j] = math.fsum(E * values) / math.fsum(E)
    return found


def of(logits: np.ndarray, V: np.ndarray, mask: Any = None) -> SoftmaxState:
    return SoftmaxState(logits.shape[-1], V.shape[-1], logits.shape[:-2]).update(logits, V, mask)


def assert_same(one: SoftmaxState, other: SoftmaxState, tolerance: float = 1e-13) -> None:
    np.testing.assert_allclose(one.result(), other.result(), rtol=tolerance, atol=tolerance)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(one.m + np.log(one.s), other.m + np.log(other.s), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-14), ("float32", 2e-6)])
def test_reads_the_means_under_softmax(scale: float, dtype: str, tolerance: float) -> None:
    logits, V = chunk(0, scale=scale, dtype=dtype)
    np.testing.assert_allclose(of(logits, V).result(), means(logits, V), rtol=0, atol=tolerance * 10)


@pytest.mark.parametrize("scale", SCALES)
@given(cuts=st.lists(st.integers(0, 200), max_size=6), seed=st.integers(0, 99))
def test_any_split_gives_the_same_state(scale: float, cuts: list[int], seed: int) -> None:
    logits, V = chunk(seed, scale=scale)
    edges = [0, *sorted(cuts), 200]
    parts = [of(logits[low:high], V[low:high]) for low, high in pairwise(edges)]
    order = np.random.default_rng(seed).permutation(len(parts))
    merged = SoftmaxState(5, 3)
    for i in order:
        merged.merge(parts[i])
    grown = SoftmaxState(5, 3)
    for low, high in pairwise(edges):
        grown.update(logits[low:high], V[low:high])
    assert_same(merged, of(logits, V))
    assert_same(grown, of(logits, V))


def test_the_empty_state_is_the_identity() -> None:
    state, empty = of(*chunk(0)), SoftmaxState(5, 3)
    before = state.to_bytes()
    assert state.copy().merge(empty).to_bytes() == before
    assert empty.copy().merge(state).to_bytes() == before
    assert state.copy().update(np.empty((0, 5)), np.empty((0, 3))).to_bytes() == before
    assert not empty.result().any()
    assert (empty.m == -np.inf).all()


def test_masked_positions_and_those_of_no_weight_are_not_there() -> None:
    logits, V = chunk(3)
    mask = np.random.default_rng(0).random(200) < 0.5
    hidden = np.where(mask[:, None], logits, -np.inf)
    V[~mask] = np.nan
    for state in (of(logits, V, mask), of(hidden, V)):
        assert_same(state, of(logits[mask], V[mask]))
    logits[:, 2] = -np.inf
    state = of(logits[mask], V[mask])
    assert not state.result()[2].any()
    assert state.s[2] == 0
    np.testing.assert_allclose(state.result(), means(logits[mask], V[mask]), atol=1e-13)


def test_serves_attention_over_parts_of_the_keys() -> None:
    """A latent for each query: the split softmax over selected keys."""
    rng = np.random.default_rng(0)
    Q, K, V = (rng.standard_normal((2, 50, 8)) for _ in range(3))
    logits = K @ np.swapaxes(Q, 1, 2) / math.sqrt(8)
    A = np.exp(np.swapaxes(logits, 1, 2))
    expected = A / A.sum(axis=2, keepdims=True) @ V
    state = SoftmaxState(50, 8, (2,)).update(logits[:, ::2], V[:, ::2])
    np.testing.assert_allclose(state.update(logits[:, 1::2], V[:, 1::2]).result(), expected, atol=1e-14)


def test_a_late_jump_loses_nothing() -> None:
    logits = np.concatenate([np.zeros((40, 1)), np.full((60, 1), 200.0)]).astype(np.float32)
    V = np.arange(100, dtype=np.float32)[:, None]
    assert of(logits, V).result()[0, 0] == pytest.approx(69.5)
    assert of(logits[:40], V[:40]).result()[0, 0] == pytest.approx(19.5)


@pytest.mark.parametrize("pieces", [1, 64, 5000])
def test_errors_do_not_grow_with_the_number_of_positions(pieces: int) -> None:
    rng = np.random.default_rng(0)
    logits, V = rng.standard_normal((1_000_000, 1), np.float32), 1 + rng.random((1_000_000, 1), np.float32)
    state = SoftmaxState(1, 1)
    for low in range(0, 1_000_000, 1_000_000 // pieces):
        state.update(logits[low : low + 1_000_000 // pieces], V[low : low + 1_000_000 // pieces])
    assert state.result()[0, 0] == pytest.approx(means(logits, V)[0, 0], rel=1e-6)


def wrong() -> Iterator[Any]:
    logits, V = chunk(0)
    yield "shapes", lambda s: s.update(logits[:, :4], V), ValueError, r"expected \('T', 5\)"
    yield "positions", lambda s: s.update(logits[:7], V), ValueError, "200 positions and logits have 7"
    yield "integers", lambda s: s.update(logits.astype(int), V), TypeError, "logits"
    yield "mask", lambda s: s.update(logits, V, np.ones(3, bool)), ValueError, "mask has shape"
    yield "another state", lambda s: s.merge(SoftmaxState(4, 3)), ValueError, "expected .*5, 3"
    yield "no state", lambda s: s.merge(3), TypeError, "expected SoftmaxState"
    yield "arrays", lambda s: s.from_arrays(V, V, V), ValueError, r"expected \(\.\.\., L\)"
    for sizes in ((0, 3), (2, -1), (2.5, 3), (True, 3), (2, 3, 5), (2, 3, (1.5,))):
        act = partial(lambda given, _: SoftmaxState(*given), sizes)
        yield f"sizes {sizes}", act, (TypeError, ValueError), r"(latents|d|batch) is"


@pytest.mark.parametrize(("act", "error", "text"), [pytest.param(*rest, id=name) for name, *rest in wrong()])
def test_arguments_are_checked(act: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        act(SoftmaxState(5, 3))


@pytest.mark.parametrize("storage", [s for s in STORAGE if s != "float64"])
def test_other_arrays_hold_the_same(storage: str) -> None:
    logits, V = (as_float64(STORAGE[storage](part)) for part in chunk(0))
    stored = [STORAGE[storage](part) for part in (logits, V)]
    state = SoftmaxState(5, 3).update(stored[0][:90, :], stored[1][:90, :])
    state.update(stored[0][90:, :], stored[1][90:, :])
    again = SoftmaxState.from_bytes(state.to_bytes())
    np.testing.assert_allclose(again.result(), means(logits, V), rtol=1e-5, atol=1e-5)


def test_arrays_of_two_libraries_are_not_mixed() -> None:
    strict = pytest.importorskip("array_api_strict")
    state = of(*chunk(0))
    with pytest.raises(TypeError, match="expected one library"):
        state.update(*(strict.asarray(part) for part in chunk(1)))


@pytest.mark.parametrize("number", [3, 0.51, 1e-3])
def test_like_positions_are_not_rounded_all_in_one_direction(number: float) -> None:
    """Equal logits and values: plain sums in float32 are off by 6e-5 after 4096 of them."""
    V = np.full((20_000, 1), number, np.float32)
    state = SoftmaxState(1, 1).update(np.zeros_like(V), V)
    assert state.result()[0, 0] == pytest.approx(float(np.float32(number)), rel=2e-6)


def test_arrays_of_torch_and_foreign_ones_are_taken_or_refused() -> None:
    torch = pytest.importorskip("torch")
    state = of(*chunk(0))
    again = SoftmaxState.from_arrays(*(torch.from_numpy(part) for part in (state.m, state.s, state.S)))
    assert again.to_bytes() == state.to_bytes()
    assert again.update(*chunk(1)).to_bytes() == state.update(*chunk(1)).to_bytes()
    for wrong_kind in (state.S.astype(np.float32), state.S.tolist()):
        with pytest.raises(TypeError, match="expected an array of float64"):
            SoftmaxState.from_arrays(state.m, state.s, wrong_kind)


def test_sizes_of_numpy_are_whole_numbers_too() -> None:
    state = SoftmaxState(np.int64(2), np.int64(3), (np.int64(4),))  # type: ignore[arg-type]
    assert SoftmaxState.from_bytes(state.to_bytes()).batch == (4,)
