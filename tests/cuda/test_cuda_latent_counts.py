"""How often latent attention launches, waits and copies on a CUDA device: a table of docs/gpu.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from counting import Case, measured

from emulator import device
from levattn._kernels.latent import LatentArguments, cuda
from levattn.attention import latte
from levattn.states import SoftmaxState

pytestmark = pytest.mark.skipif(
    not device.AVAILABLE or device.DEVICES > 0, reason="calls are counted on the emulator, which needs g++ and no card"
)

B, L, D = (2,), 6, 4  # of which the counts do not depend
SHORT, LONG = 100, 300  # positions of one run, and of three


def arrays(cupy: Any, T: int, dtype: Any = np.float32) -> list[Any]:
    rng = np.random.default_rng(0)
    return [cupy.asarray(rng.standard_normal((*B, T, size)).astype(dtype)) for size in (L, L, D)]


def attention(T: int, dtype: Any = np.float32, *, masked: bool = False, **options: Any) -> Any:
    def make(cupy: Any) -> Callable[[], Any]:
        given, mask = arrays(cupy, T, dtype), cupy.asarray(np.arange(T) % 3 > 0) if masked else None
        return lambda: latte(*given, mask=mask, **options)

    return make


def step(T: int = 1, dtype: Any = np.float32, *, empty: bool = False) -> Any:
    def make(cupy: Any) -> Callable[[], Any]:
        _, state = latte(*arrays(cupy, SHORT, dtype), return_state=True)
        given, before = arrays(cupy, T, dtype), SoftmaxState(L, D, B) if empty else state
        return lambda: latte(*given, state=before, return_state=True)

    return make


def gradients(T: int, *, causal: bool = True) -> Any:
    def make(cupy: Any) -> Callable[[], Any]:
        Q, K, V = arrays(cupy, T)
        x = LatentArguments(Q, K, V, np.array([0, T]), causal)
        return lambda: cuda.backward(x, V)

    return make


CASES = {
    "latte, causal, one run": Case(attention(SHORT), 3, 0, 1),
    "latte, causal": Case(attention(LONG), 6, 0, 1),
    "latte, causal, masked": Case(attention(LONG, masked=True), 6, 0, 1),
    "latte, causal, float64": Case(attention(LONG, np.float64), 6, 0, 1),
    "latte, causal, float16": Case(attention(LONG, np.float16), 6, 0, 1),
    "latte, both ways": Case(attention(LONG, causal=False), 6, 0, 1),
    "latte, both ways, float16": Case(attention(LONG, np.float16, causal=False), 6, 0, 1),
    "latte, prompt with its state": Case(attention(LONG, return_state=True), 6, 0, 1),
    "latte, float16 prompt with its state": Case(attention(LONG, np.float16, return_state=True), 6, 0, 1),
    "latte, prompt after a state": Case(step(LONG), 10, 0, 2),
    "latte, step of decoding": Case(step(), 1, 0, 0),
    "latte, step of decoding, float16": Case(step(dtype=np.float16), 1, 0, 0),
    "latte, step of 8 rows": Case(step(8), 1, 0, 0),
    "latte, first step": Case(step(empty=True), 1, 0, 0),
    "gradients of latte": Case(gradients(LONG), 13, 0, 1),
    "gradients of latte, both ways": Case(gradients(LONG, causal=False), 14, 0, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_launch_wait_and_copy_no_more_than_stated(name: str) -> None:
    case = CASES[name]
    with measured(case) as counts:
        assert counts.figures == (case.launches, case.waits, case.copies), str(counts)
