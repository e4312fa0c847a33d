"""Streams of keys on a CUDA device: what they hold there, and how it comes to main memory.

Inside: margins of a screen show in no result.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import levattn
from emulator import device
from levattn._core.device import on_a_device
from levattn._kernels import BLOCK, kernels_for
from levattn.states import Moments

pytestmark = pytest.mark.skipif(not device.AVAILABLE, reason="there is neither a CUDA device nor g++ to emulate one")

D, EPSILON = 8, 0.05


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return device.library_on_device(monkeypatch)


def keys(heads: int, blocks: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    """Heads of different sizes, each with long keys here and there, more in one than in the next."""
    K = np.random.default_rng(seed).standard_normal((heads, blocks * BLOCK, D))
    for head in range(heads):
        K[head, seed :: 101 * (head + 1)] *= 30
    return (K * 2.0 ** np.arange(heads)[:, None, None]).astype(dtype)


def growing(heads: int, blocks: int) -> Any:
    """Keys that are held block by block until they are judged again, each head by another measure."""
    K = np.random.default_rng(2).standard_normal((heads, blocks * BLOCK, D))
    rates = np.array([[0, 1, 3, 0.5][head % 4] for head in range(heads)])[:, None]
    return (K * np.exp2(rates * np.arange(blocks * BLOCK) / BLOCK)[:, :, None]).astype(np.float32)


def same(found: levattn.StreamingUniversalSet, other: levattn.StreamingUniversalSet) -> None:
    assert (found.n, found.held) == (other.n, other.held)
    for one, two in zip(found.result().items, other.result().items, strict=True):
        assert np.array_equal(one.indices, two.indices)
        assert np.array_equal(one.keys, two.keys)
        assert (one.payload is None) == (two.payload is None)
        assert one.payload is None or np.array_equal(one.payload, two.payload)
        np.testing.assert_allclose(one.scores, two.scores, rtol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float64", "bool"), ("float32", "complex128"), ("float32", None), ("float16", "float32")]
)
def test_heads_are_held_as_in_main_memory(cupy: Any, dtype: str, kind: str | None) -> None:
    K = keys(3, 5, dtype)
    values = None if kind is None else np.arange(K.shape[1] * 6).reshape(3, -1, 2).astype(kind)
    found, other = levattn.StreamingUniversalSet(EPSILON), levattn.StreamingUniversalSet(EPSILON)
    for part in (slice(0, 3 * BLOCK), slice(3 * BLOCK, 4 * BLOCK + 100), slice(4 * BLOCK + 100, None)):
        beside = None if values is None else values[:, part]
        found.update(cupy.asarray(K[:, part]), payload=None if beside is None else cupy.asarray(beside))
        other.update(K[:, part], payload=beside)
    assert on_a_device(found)
    same(found, other)


def test_keys_that_are_judged_again(cupy: Any) -> None:
    K = growing(3, 7)
    found, other = levattn.StreamingUniversalSet(0.4), levattn.StreamingUniversalSet(0.4)
    for low in range(0, K.shape[1], 3 * BLOCK):
        found.update(cupy.asarray(K[:, low : low + 3 * BLOCK]))
        other.update(K[:, low : low + 3 * BLOCK])
        assert found.held == other.held
        assert on_a_device(found)
    same(found, other)


def test_what_is_copied_pickled_and_saved_is_in_main_memory(cupy: Any) -> None:
    K = keys(2, 4)
    first = levattn.StreamingUniversalSet(EPSILON).update(cupy.asarray(K[:, : 3 * BLOCK]))
    straight = copy.copy(first)
    copies = [
        first.copy(),
        pickle.loads(pickle.dumps(first)),
        levattn.StreamingUniversalSet.from_bytes(first.to_bytes()),
    ]
    assert on_a_device(first)
    for other in copies:
        assert not on_a_device(other)
        assert other.to_bytes() == first.to_bytes()
        assert on_a_device(other.update(cupy.asarray(K[:, 3 * BLOCK :])))
        same(other, straight.copy().update(K[:, 3 * BLOCK :]))
    sums = Moments(D, (2,)).update(cupy.asarray(K))
    assert on_a_device(sums)
    assert not on_a_device(pickle.loads(pickle.dumps(sums)))
    np.testing.assert_allclose(
        sums.result(), np.einsum("hni,hnj->hij", *[K.astype(np.float64)] * 2), rtol=1e-12, atol=1e-6
    )


def test_what_is_read_is_not_what_is_held(cupy: Any) -> None:
    for K in (keys(2, 1), cupy.asarray(keys(2, 1))):
        sums = Moments(D, (2,)).update(K)
        first = sums.result()
        first[...] = 0
        assert (sums.result() != 0).any()


def test_an_error_leaves_what_is_held(cupy: Any) -> None:
    K = keys(2, 4)
    state = levattn.StreamingUniversalSet(EPSILON).update(cupy.asarray(K[:, : 2 * BLOCK]))
    before, bad = state.to_bytes(), K[:, 2 * BLOCK :].copy()
    bad[1, BLOCK + 5, 3] = np.nan
    with pytest.raises(levattn.NonFiniteError, match=f"row {3 * BLOCK + 5}"):
        state.update(cupy.asarray(bad))
    assert state.to_bytes() == before
    same(state.update(cupy.asarray(K[:, 2 * BLOCK :])), levattn.StreamingUniversalSet(EPSILON).update(K))


def test_merges_come_to_main_memory(cupy: Any) -> None:
    K = keys(2, 6)
    parts = [
        levattn.StreamingUniversalSet(EPSILON).update(cupy.asarray(K[:, low : low + 2 * BLOCK + 7]))
        for low in (0, 4103)
    ]
    rest = levattn.StreamingUniversalSet(EPSILON).update(K[:, 8206:])
    found = parts[0].merge(parts[1]).merge(rest).update(cupy.asarray(K[:, :0]))
    expected = levattn.universal_set(K, EPSILON)
    for head, item in enumerate(found.result().items):
        assert item.indices.tolist() == np.flatnonzero(expected.mask[head]).tolist()


def test_an_ill_conditioned_head_brings_all_to_main_memory(cupy: Any) -> None:
    K = keys(2, 4, np.float64)
    K[1] = K[1] * np.geomspace(1, 1e-7, D) @ np.linalg.qr(np.random.default_rng(1).standard_normal((D, D)))[0]
    found = levattn.StreamingUniversalSet(EPSILON)
    for low in range(0, K.shape[1], BLOCK):
        found.update(cupy.asarray(K[:, low : low + BLOCK]))
    same(found, levattn.StreamingUniversalSet(EPSILON).update(K))


def test_a_screen_allows_for_how_a_device_multiplies(cupy: Any) -> None:
    K, margins = keys(2, 1), []
    for given in (K, cupy.asarray(K)):
        state = levattn.StreamingUniversalSet(EPSILON).update(given)
        state.result()  # of small chunks, after which they do not wait
        screen = state._stream.candidates.running._screen
        assert set(screen.factor.arithmetic) == {"single"}
        margins.append(1 - screen._least[1] / EPSILON)
    units = [kernels_for("gram", given).SINGLE_UNIT for given in (K, cupy.asarray(K))]
    np.testing.assert_allclose(margins[1] / margins[0], units[1] / units[0], rtol=0.1)
