"""How often streams launch, wait and copy on a CUDA device, however many heads there are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from counting import Case, measured

import levattn
from emulator import device
from levattn.states import Moments
from streams import BLOCK

pytestmark = pytest.mark.skipif(
    not device.AVAILABLE or device.DEVICES > 0, reason="calls are counted on the emulator, which needs g++ and no card"
)

HEADS, D = 2, 8  # on neither of which a count depends


def chunks(cupy: Any, heads: int, first: int, more: int, dtype: Any) -> list[Any]:
    """So many blocks, of which every 101st key is long, and so many after them."""
    K = np.random.default_rng(0).standard_normal((heads, (first + more) * BLOCK, D))
    K[:, ::101] *= 30
    return [cupy.asarray(part.astype(dtype)) for part in np.split(K, [first * BLOCK], axis=1)]


def stream(
    first: int, more: int, heads: int = HEADS, *, dtype: Any = np.float32, payload: bool = False
) -> Callable[[Any], Callable[[], Any]]:
    """Return a chunk given to a stream, which is as it was before each call."""

    def make(cupy: Any) -> Callable[[], Any]:
        parts = chunks(cupy, heads, first, more, dtype)
        values = [
            cupy.asarray(np.arange(heads * part.shape[1]).reshape(heads, -1)) if payload else None for part in parts
        ]
        state = levattn.StreamingUniversalSet(0.05).update(parts[0], payload=values[0])
        before = dict(vars(state))

        def call() -> Any:
            vars(state).update(before)
            return state.update(parts[1], payload=values[1])

        return call

    return make


def moments(heads: int = HEADS) -> Callable[[Any], Callable[[], Any]]:
    def make(cupy: Any) -> Callable[[], Any]:
        parts = chunks(cupy, heads, 4, 3, np.float32)
        state = Moments(D, (heads,)).update(parts[0])
        before = dict(vars(state._sums))

        def call() -> Any:
            vars(state._sums).update(before)
            return state.update(parts[1])

        return call

    return make


# by the blocks so far and those of the chunk; after the second block all keys are judged
MAKERS: dict[str, Callable[..., Callable[[Any], Callable[[], Any]]]] = {
    "StreamingUniversalSet, a run": partial(stream, 2, 1),
    "StreamingUniversalSet, a run of several sums": partial(stream, 4, 3),
    "StreamingUniversalSet, a run of 16 bits with payload": partial(stream, 2, 1, dtype=np.float16, payload=True),
    "StreamingUniversalSet, block 2, 4, 8, ...": partial(stream, 1, 1),
    "Moments, a chunk": moments,
}
FIGURES = ((10, 2, 4), (10, 2, 4), (11, 2, 5), (26, 4, 13), (3, 1, 1))
CASES = {name: Case(make(), *figures) for (name, make), figures in zip(MAKERS.items(), FIGURES, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_chunks_launch_wait_and_copy_no_more_than_stated(name: str) -> None:
    case = CASES[name]
    with measured(case) as counts:
        assert counts.figures == (case.launches, case.waits, case.copies), str(counts)


@pytest.mark.parametrize("name", CASES)
def test_nothing_grows_with_the_number_of_heads(name: str) -> None:
    case = CASES[name]
    with measured(Case(MAKERS[name](heads=3), 0, 0, 0)) as counts:
        assert counts.figures == (case.launches, case.waits, case.copies), str(counts)


def test_ill_conditioned_heads_come_in_one_copy_a_block() -> None:
    def make(cupy: Any, heads: int) -> Callable[[], Any]:
        parts = chunks(cupy, heads, 1, 1, np.float64)
        parts = [part * cupy.asarray(np.geomspace(1, 1e-7, D)) for part in parts]
        turned = cupy.asarray(np.linalg.qr(np.random.default_rng(1).standard_normal((D, D)))[0])
        parts = [cupy.matmul(part, turned) for part in parts]
        state = Moments(D, (heads,)).update(parts[0])
        assert state._sums._held[0].double_double.all()
        before = dict(vars(state._sums))

        def call() -> Any:
            vars(state._sums).update(before)
            return state.update(parts[1])

        return call

    waits = []
    for heads in (2, 3):
        with measured(Case(partial(make, heads=heads), 0, 0, 0)) as counts:
            waits.append(len(counts.waits))
    assert waits == [3, 3]
