"""How often a call launches, waits and copies on a CUDA device: the table of docs/gpu.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from counting import Case, counted, measured

import levattn
from emulator import device

pytestmark = pytest.mark.skipif(
    not device.AVAILABLE or device.DEVICES > 0, reason="calls are counted on the emulator, which needs g++ and no card"
)

HEADS, N, D = 2, 4096, 64  # of how many heads there are depends no count of sound ones


def heads(kind: str = "sound", dtype: Any = np.float32, count: int = HEADS) -> Any:
    rng = np.random.default_rng(0)
    K = rng.standard_normal((count, N, D))
    if kind == "ill-conditioned":
        K *= np.geomspace(1, 1e-5, D)
        K = K @ np.linalg.qr(rng.standard_normal((D, D)))[0]
    return K.astype(dtype)


def of_heads(function: Callable[[Any], Any], kind: str = "sound", dtype: Any = np.float32) -> Any:
    def make(cupy: Any) -> Callable[[], Any]:
        K = cupy.asarray(heads(kind, dtype))
        return lambda: function(K)

    return make


CASES = {
    "universal_set of heads": Case(of_heads(lambda K: levattn.universal_set(K, 0.05)), 7, 2, 3),
    "leverage_scores of heads": Case(of_heads(levattn.leverage_scores), 5, 1, 2),
    "universal_set of ill-conditioned heads": Case(
        of_heads(lambda K: levattn.universal_set(K, 0.05), "ill-conditioned"), 14, 4, 5
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_launch_wait_and_copy_no_more_than_stated(name: str) -> None:
    case = CASES[name]
    with measured(case) as counts:
        assert counts.figures == (case.launches, case.waits, case.copies), str(counts)


@pytest.mark.parametrize("count", [HEADS, 4])
def test_ill_conditioned_heads_take_as_many_launches_and_waits_however_many_they_are(count: int) -> None:
    def make(cupy: Any) -> Callable[[], Any]:
        K = cupy.asarray(heads("ill-conditioned", count=count))
        return lambda: levattn.universal_set(K, 0.05)

    case = CASES["universal_set of ill-conditioned heads"]
    with measured(Case(make, 0, 0, 0)) as counts:
        assert counts.figures == (case.launches, case.waits, case.copies), str(counts)
        # six figures of a head at first, and nine in each of two rounds; where the lists of selection begin
        assert counts.fetched == 8 * (count * (6 + 2 * 9) + count + 1)


@pytest.mark.parametrize("count", [HEADS, 6])
def test_long_heads_bring_figures_to_main_memory_and_no_matrices(count: int) -> None:
    """A sample of their rows decides on the precision of the sums; its moments stay on the device."""

    def make(cupy: Any) -> Callable[[], Any]:
        K = cupy.asarray(np.random.default_rng(0).standard_normal((count, 2 * N, D)).astype(np.float32))
        return lambda: levattn.leverage_scores(K)

    with measured(Case(make, 0, 0, 0)) as counts:
        assert counts.fetched == 8 * count * (1 + 6), str(counts)  # how isotropic the sample is, and six figures


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = device.library_on_device(monkeypatch)
    counts = counted(monkeypatch)
    x = cupy.asarray(np.arange(12.0).reshape(3, 4))
    assert counts.figures == (0, 0, 1)
    y = x.reshape(4, 3).T[1:, ::2]
    cupy.empty((2, 2))
    cupy.reshape(x, (2, 6))
    assert counts.figures == (0, 0, 1)
    y = y + 1
    y[:, 1] *= 2
    y[0] = 0
    cupy.zeros(3)
    assert counts.figures == (4, 0, 1)
    assert counts.launches == ["add", "multiply", "array[index] =", "zeros"]
    y.get()
    bool(y.sum() > 0)
    assert counts.figures == (6, 2, 1)
    cupy.matmul(x, x.T)
    cupy.flatnonzero(x)
    assert x[x > 3].shape == (8,)
    x.astype(np.float32)
    cupy.asarray(x)
    assert counts.figures == (11, 4, 1)
