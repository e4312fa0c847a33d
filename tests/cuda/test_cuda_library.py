"""What the public functions do with keys on a CUDA device: the results of main memory, and keys that stay there.

Scores, sets and heavy entries for x², streams and sketches have CuPy arrays among the storages of their own tests.

Inside: it watches which arrays come to main memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import levattn
from emulator import device
from levattn._core import arrays
from levattn.sketch import OSNAP, SRHT, CountSketch, GaussianJL
from strategies import as_float64
from streams import BLOCK

pytestmark = pytest.mark.skipif(not device.AVAILABLE, reason="there is neither a CUDA device nor g++ to emulate one")


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were copied to main memory at a time, on the emulator."""
    sizes: list[int] = []
    get = device.DeviceArray.get

    def counted(array: Any) -> Any:
        sizes.append(array.nbytes)
        return get(array)

    monkeypatch.setattr(device.DeviceArray, "get", counted)
    return sizes


def keys(n: int, d: int = 8, dtype: Any = np.float32, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    K = rng.standard_normal((n, d))
    K[rng.permutation(n)[: n // 50]] *= 40
    return K.astype(dtype)


N = 3 * BLOCK + 700


def test_scores_stay_on_the_device(cupy: Any, copied: list[int]) -> None:
    K = keys(N)
    scores = levattn.leverage_scores(cupy.asarray(K))
    assert type(scores) is type(cupy.asarray(K))
    assert max(copied, default=0) <= 8 * 8 * 8
    np.testing.assert_allclose(scores.get(), levattn.leverage_scores(K), rtol=1e-5)


@pytest.mark.parametrize("f", [4, 1.0], ids="f={}".format)
def test_streams_of_the_device_hold_the_same_keys(cupy: Any, f: float) -> None:
    K, values = keys(N, 4), np.arange(N)
    expected = levattn.StreamingUniversalSet(0.2, f=f).update(K, payload=values).result().items[0]
    stream = levattn.StreamingUniversalSet(0.2, f=f)
    for start in range(0, N, 3000):
        part = slice(start, start + 3000)
        stream.update(cupy.asarray(K[part]), payload=cupy.asarray(values[part]))
    found = stream.result().items[0]
    assert np.array_equal(found.indices, expected.indices)
    assert np.array_equal(found.payload, expected.payload)
    assert np.array_equal(as_float64(found.keys), as_float64(expected.keys))
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-9)


def test_a_stream_copies_only_what_it_holds(cupy: Any, copied: list[int]) -> None:
    K = keys(8 * BLOCK, 8)
    stream = levattn.StreamingUniversalSet(0.5)
    for start in range(0, len(K), 4 * BLOCK):
        stream.update(cupy.asarray(K[start : start + 4 * BLOCK]))
    assert stream.result().items[0].indices.tolist() == levattn.universal_set(K, 0.5).indices.tolist()
    assert sum(copied) < K.nbytes / 4


def test_chunks_of_both_kinds_and_merges(cupy: Any) -> None:
    K = keys(N, 4)
    expected = levattn.universal_set(K, 0.1).indices.tolist()
    mixed = levattn.StreamingUniversalSet(0.1)
    for index, start in enumerate(range(0, N, 1500)):
        part = K[start : start + 1500]
        mixed.update(cupy.asarray(part) if index % 2 else part)
    assert mixed.result().items[0].indices.tolist() == expected
    left = levattn.StreamingUniversalSet(0.1).update(cupy.asarray(K[:4000]))
    right = levattn.StreamingUniversalSet(0.1).update(K[4000:])
    assert copy.copy(left).merge(right).result().items[0].indices.tolist() == expected
    again = levattn.StreamingUniversalSet.from_bytes(left.to_bytes()).update(cupy.asarray(K[4000:]))
    assert again.result().items[0].indices.tolist() == expected


@pytest.mark.parametrize("kind", ["masked", "heads", "ill-conditioned", "deficient", "huge"])
def test_streams_of_odd_keys(cupy: Any, kind: str) -> None:
    K, mask = keys(N, 6, np.float64), None
    if kind == "masked":
        mask = np.random.default_rng(1).random(N) < 0.5
    elif kind == "heads":
        K = np.stack([K, K[::-1] * 3])
    elif kind == "ill-conditioned":
        K = K * np.geomspace(1, 1e-8, 6) @ np.linalg.qr(np.random.default_rng(2).standard_normal((6, 6)))[0]
    elif kind == "deficient":
        K[:, 5] = K[:, 4]
    else:
        K = K * 2.0 ** np.array([0, 500, -500, 3, 0, 0])
    stream = levattn.StreamingUniversalSet(0.2)
    for start in range(0, N, 2500):
        part = slice(start, start + 2500)
        stream.update(cupy.asarray(K[..., part, :]), mask=None if mask is None else cupy.asarray(mask[part]))
    expected = levattn.StreamingUniversalSet(0.2).update(K, mask=mask).result()
    for found, other in zip(stream.result().items, expected.items, strict=True):
        assert np.array_equal(found.indices, other.indices)


def test_what_is_not_finite_is_named(cupy: Any) -> None:
    K = keys(N)
    K[5000, 3] = np.nan
    with pytest.raises(levattn.NonFiniteError, match="row 5000"):
        levattn.leverage_scores(cupy.asarray(K))
    stream = levattn.StreamingUniversalSet(0.1).update(cupy.asarray(K[:4500]))
    with pytest.raises(levattn.NonFiniteError, match="row 5000"):
        stream.update(cupy.asarray(K[4500:]))
    assert stream.update(cupy.asarray(K[4500:5000])).n == 5000


METHODS = ("gram", "qr", "svd")
SKETCHED = (CountSketch(256), OSNAP(128), SRHT(128), GaussianJL(4), (CountSketch(256), GaussianJL(4)))
FUNCTIONS = (1.0, 3.0, 4.0, levattn.Huber(1.0), levattn.Tukey(1.0), levattn.L1L2(), levattn.Fair(1.0))

# name -> what it returns for keys (1500, 8) and queries of any kind of array
EVERYTHING: dict[str, Callable[..., Any]] = {
    **{f"scores by {m}": partial(lambda m, k, *_: levattn.leverage_scores(k, method=m), m) for m in METHODS},
    **{f"scores by {m}": partial(lambda m, k, *_: levattn.leverage_scores(k, method=m), m) for m in SKETCHED},
    **{
        f"set by {m}, checked": partial(lambda m, k, *_: levattn.universal_set(k, 0.05, method=m).rechecked(k).mask, m)
        for m in SKETCHED
    },
    **{f"sensitivities, {f}": partial(lambda f, k, *_: levattn.sensitivities(k, f).upper, f) for f in FUNCTIONS},
    **{f"set, {f}": partial(lambda f, k, *_: levattn.universal_set(k, 0.2, f=f).mask, f) for f in FUNCTIONS},
    **{
        f"heavy entries, {f}": partial(lambda f, k, q: levattn.heavy_attention(q, k, 0.2, f=f).entries.toarray(), f)
        for f in FUNCTIONS
    },
    "heavy entries by sketches": lambda k, q: levattn.heavy_attention(
        q, k, 0.1, method="countsketch"
    ).entries.toarray(),
    "expected scores": lambda k, q: levattn.expected_scores(k, q),
    "expected scores, softmax": lambda k, q: levattn.expected_scores(k / 20, q, f=levattn.Softmax()),
    "set with coverage": lambda k, q: levattn.covering_set(k, q, 0.05, f=4, coverage=0.9).mask,
    "set with groups": lambda k, *_: levattn.universal_set(k, 0.1).with_groups(k, np.arange(len(k)) % 7).mask,
    "group leverage": lambda k, *_: levattn.group_leverage(k, np.arange(len(k)) % 7),
    "near duplicates": lambda k, *_: levattn.near_duplicates(k),
    "Lewis weights": lambda k, *_: levattn.lewis_weights(k, 3.0),
    "exact sensitivities": lambda k, *_: levattn.exact_sensitivities(k[:20], 3.0).lower,
    "causal": lambda k, *_: levattn.causal_heavy_attention(k[:150], k[:150], 0.05).entries.toarray(),
    "two passes": lambda k, *_: levattn.universal_set(lambda: [k[:1000], k[1000:]], 0.05).mask,
}


@pytest.mark.parametrize("name", EVERYTHING)
def test_functions_give_what_they_give_in_main_memory(cupy: Any, name: str) -> None:
    K, Q = keys(1500), keys(40, seed=1)
    expected = as_float64(EVERYTHING[name](K, Q))
    found = as_float64(EVERYTHING[name](*map(cupy.asarray, (K, Q))))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_the_predicate_is_that_of_cupy() -> None:
    assert not arrays.on_cuda(np.zeros(3))
    assert not arrays.on_cuda([1.0])
