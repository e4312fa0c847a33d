"""How often token statistics attention launches, waits and copies on a CUDA device: a table of docs/gpu.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from counting import Case, measured

from emulator import device
from levattn._kernels.tokens import TokenArguments, cuda
from token_calls import tssa

pytestmark = pytest.mark.skipif(
    not device.AVAILABLE or device.DEVICES > 0, reason="calls are counted on the emulator, which needs g++ and no card"
)

B, H, T, D = 2, 3, 40, 8  # of which the counts depend on T alone: a run is of 16 tokens


def tokens(cupy: Any, T: int = T, dtype: Any = np.float32) -> Any:
    return cupy.asarray(np.random.default_rng(0).standard_normal((B, H, T, D)).astype(dtype))


def temperatures(cupy: Any) -> Any:
    return cupy.asarray(np.ones((B, H), np.float32))


def attention(T: int = T, dtype: Any = np.float32, *, masked: bool = False, **options: Any) -> Any:
    def make(cupy: Any) -> Callable[[], Any]:
        W, theta = tokens(cupy, T, dtype), temperatures(cupy)
        mask = cupy.asarray(np.arange(T) % 3 > 0) if masked else None
        return lambda: tssa(W, theta, mask=mask, **options)

    return make


def step(T: int = 1, **options: Any) -> Any:
    def make(cupy: Any) -> Callable[[], Any]:
        theta, W = temperatures(cupy), tokens(cupy, T)
        _, state = tssa(tokens(cupy), theta, return_state=True, **options)
        return lambda: tssa(W, theta, state=state, return_state=True, **options)

    return make


def gradients(**options: Any) -> Any:
    def make(cupy: Any) -> Callable[[], Any]:
        x = TokenArguments(tokens(cupy), temperatures(cupy), None, np.array([0, T]), **options)
        dY = tokens(cupy)
        return lambda: cuda.backward(x, dY)

    return make


CASES = {
    "tssa": Case(attention(), 5, 0, 1),
    "tssa, not causal": Case(attention(causal=False), 5, 0, 1),
    "tssa by norms": Case(attention(membership="norm"), 3, 0, 1),
    "tssa of float16": Case(attention(dtype=np.float16), 5, 0, 1),
    "tssa with masks and decay": Case(attention(masked=True, decay=0.9), 5, 0, 2),
    "tssa of 16 tokens or fewer": Case(attention(16), 1, 0, 0),
    "tssa, prompt with its state": Case(attention(return_state=True), 5, 0, 1),
    "tssa, step of decoding": Case(step(), 1, 0, 0),
    "tssa, step of 4 tokens, decaying": Case(step(4, decay=0.9), 1, 0, 1),
    "gradients of tssa": Case(gradients(), 15, 0, 1),
    "gradients of tssa by norms": Case(gradients(logits="norm"), 11, 0, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_launch_wait_and_copy_no_more_than_stated(name: str) -> None:
    case = CASES[name]
    with measured(case) as counts:
        assert counts.figures == (case.launches, case.waits, case.copies), str(counts)
