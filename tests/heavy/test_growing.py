"""One table of states that take keys in chunks × properties of all of them: what errors leave, payloads, batches.

Inside: a failure is planted half way through a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import naive
from levattn import CausalUniversalSet, NonFiniteError, StreamingUniversalSet
from levattn.functions import Huber
from levattn.sets.prefix_bounds import RunningSquares
from levattn.states import blocks
from strategies import Float
from streams import BLOCK, check_error, heavy_tailed, in_chunks, named_rng

N, D = 3 * BLOCK + 356, 3
GOOD = np.random.default_rng(0).standard_normal((12, D))


def good(n: int) -> Float:
    return np.tile(GOOD, (n // len(GOOD) + 1, 1))[:n]


def bits(found: Any) -> list[Any]:
    """All arrays of a result, to the last bit."""
    items = getattr(found, "items", None) or (found if isinstance(found, tuple) else (found,))
    return [None if value is None else value.tobytes() for item in items for value in vars(item).values()]


@dataclass(frozen=True)
class Growing:
    """A state that keys are added to.

    step: a method that is called for each part of a long chunk.
    """

    name: str
    make: Callable[[float], Any]
    step: tuple[type, str]

    def read(self, state: Any, Q: Any = None) -> Any:
        return state.heavy(np.eye(D) if Q is None else Q) if isinstance(state, CausalUniversalSet) else state.result()

    def all_of(self, state: Any) -> Any:
        """What there is to know of a state."""
        whole = b"" if isinstance(state, CausalUniversalSet) else state.to_bytes()
        return state.n, state.held, whole, bits(self.read(state))


TABLE = [
    Growing("streaming", StreamingUniversalSet, (RunningSquares, "add")),
    Growing("lift", lambda epsilon: StreamingUniversalSet(epsilon, f=4), (RunningSquares, "add")),
    Growing("block", lambda epsilon: StreamingUniversalSet(epsilon, f=Huber()), (RunningSquares, "add")),
    Growing("causal", CausalUniversalSet, (CausalUniversalSet, "_alive")),
]
growing = pytest.mark.parametrize("way", TABLE, ids=lambda way: way.name)
exact = pytest.mark.parametrize("way", [TABLE[0], TABLE[3]], ids=lambda way: way.name)


@exact
@pytest.mark.parametrize("epsilon", [0.0, -0.1, 1.1, np.nan])
def test_epsilon_out_of_range(way: Growing, epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon") as caught:
        way.make(epsilon)
    check_error(caught.value, "0 < epsilon <= 1")
    with pytest.raises(TypeError, match="epsilon"):
        way.make("0.1")  # type: ignore[arg-type]


@growing
def test_nothing_is_read_before_the_shape_is_known(way: Growing) -> None:
    state = way.make(0.1)
    with pytest.raises(ValueError, match=r"there (was|were) no .*keys") as caught:
        way.read(state)
    check_error(caught.value, "update")
    assert (state.n, state.held) == (0, 0)
    assert len(way.read(state.update(np.ones((0, D)))).indices) == 0


BAD_CHUNKS: dict[str, tuple[type[Exception], tuple[str, ...], dict[str, Any]]] = {
    "columns": (ValueError, (r"\bK\b", "d = 4", "d = 3"), {"K": np.ones((12, 4))}),
    "batch": (ValueError, (r"\bK\b", "batch", r"\(2,\)"), {"K": np.ones((2, 5, 3)), "payload": np.ones((2, 5), int)}),
    "dtype": (TypeError, (r"\bK\b", "float32", "float64", "convert"), {"K": GOOD.astype(np.float32)}),
    "integers": (TypeError, (r"\bK\b", "int64", "float"), {"K": GOOD.astype(np.int64)}),
    "no-array": (TypeError, (r"\bK\b", "array"), {"K": "keys"}),
    "one-axis": (ValueError, (r"\bK\b", "n, ?d"), {"K": np.ones(3)}),
    "mask-shape": (ValueError, ("mask", r"\(12,\)"), {"mask": np.ones(11, bool)}),
    "mask-type": (TypeError, ("mask", "bool"), {"mask": np.ones(12)}),
    "no-payload": (ValueError, ("payload", "int64"), {"payload": None}),
    "payload-rows": (ValueError, ("payload", r"\(11,\)", r"\(12,\)"), {"payload": np.arange(11)}),
    "payload-shape": (ValueError, ("payload", "int64"), {"payload": np.ones((12, 2), int)}),
    "payload-dtype": (ValueError, ("payload", "int64"), {"payload": np.ones(12)}),
    "payload-words": (TypeError, ("payload", "numbers"), {"payload": np.array(["a"] * 12)}),
    "payload-objects": (TypeError, ("payload", "numbers"), {"payload": np.array([None] * 12)}),
}


@exact
@pytest.mark.parametrize("name", BAD_CHUNKS)
@pytest.mark.parametrize("rows", [20, 3000])
def test_a_bad_chunk_leaves_the_state_as_it_was(way: Growing, rows: int, name: str) -> None:
    kind, words, changed = BAD_CHUNKS[name]
    state, same = (in_chunks(way.make(0.1), good(rows), payload=np.arange(rows)) for _ in range(2))
    before = way.all_of(state)
    arguments = {"K": GOOD, "mask": None, "payload": np.arange(12)} | changed
    with pytest.raises(kind) as caught:
        state.update(arguments.pop("K"), **arguments)
    check_error(caught.value, *words)
    assert way.all_of(state) == before
    goes_on, expected = (each.update(GOOD, payload=np.arange(12)) for each in (state, same))
    assert way.all_of(goes_on) == way.all_of(expected)


@exact
def test_a_payload_that_was_not_there_before_is_refused(way: Growing) -> None:
    state = way.make(0.1).update(GOOD)
    with pytest.raises(ValueError, match=r"payload.*(none|nothing)"):
        state.update(GOOD, payload=np.arange(12))


@growing
@pytest.mark.parametrize("before", [0, 20, 2040, 3000])
@pytest.mark.parametrize("rows", [1, 70, 3000, 7200])
def test_rows_that_are_not_finite_leave_the_state_as_it_was(way: Growing, rows: int, before: int) -> None:
    state, same = (way.make(0.2).update(good(before)) for _ in range(2))
    seen = way.all_of(state)
    for bad, value in ((0, np.nan), (rows - 1, np.inf), (rows // 2, -np.inf)):
        K = good(rows)
        K[bad, 1] = value
        with pytest.raises(NonFiniteError, match=rf"\bK\b.* row {before + bad}, counted from") as caught:
            state.update(K)
        check_error(caught.value, "mask=", "as it was")
        assert way.all_of(state) == seen
    assert way.all_of(state.update(good(rows))) == way.all_of(same.update(good(rows)))


@exact
def test_a_bad_first_chunk_leaves_no_trace(way: Growing) -> None:
    state = way.make(0.1)
    for chunk in (np.full((5000, 5), np.inf), np.ones(3), np.ones((4, 0)), None):
        with pytest.raises((ValueError, TypeError), match=r"\bK\b"):
            state.update(chunk)
    with pytest.raises(ValueError, match="payload"):
        state.update(np.ones((5, 5)), payload=np.ones(4))
    assert state.n == state.held == 0
    assert state.update(np.ones((70, 2), np.float32)).n == 70


@exact
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("before", [100, BLOCK, 3000])
def test_a_chunk_that_fails_half_way_leaves_the_state_as_it_was(
    way: Growing, before: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not waits:
        monkeypatch.setattr(blocks, "_TOGETHER", 1)
    K, calls = good(8000), 0
    state, seen = way.make(0.2).update(K[:before]), way.all_of(way.make(0.2).update(K[:before]))
    owner, name = way.step
    step: Any = getattr(owner, name)

    def fail(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        return step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(MemoryError):
            way.read(state.update(K[before:]))
    if not waits or isinstance(state, CausalUniversalSet):  # else the chunk is there, to be worked on once more
        assert way.all_of(state) == seen
        state.update(K[before:])
    assert way.all_of(state) == way.all_of(way.make(0.2).update(K[:before]).update(K[before:]))


@exact
def test_a_chunk_may_be_overwritten_after_update(way: Growing) -> None:
    K, chunk, payload = heavy_tailed(named_rng("overwritten"), N, D), np.empty((650, D)), np.empty((650, 1))
    state = way.make(0.05)
    for low in range(0, N, 650):
        chunk[:], payload[:, 0] = K[low : low + 650], np.arange(low, low + 650)
        state.update(chunk, payload=payload)
        chunk[:], payload[:] = np.nan, np.nan
    found = way.read(state, naive.adversarial_queries(K)[::50])
    assert np.array_equal(found.payload[:, 0], found.indices)
    assert way.all_of(state) == way.all_of(
        in_chunks(way.make(0.05), K, range(650, N, 650), payload=np.arange(N)[:, None] * 1.0)
    )


PAYLOADS: dict[str, Callable[[int], Any]] = {
    "ids": lambda n: np.arange(n) * 7,
    "values": lambda n: np.arange(n * 5, dtype=np.float32).reshape(n, 5),
    "matrices": lambda n: np.arange(n * 6, dtype=np.float16).reshape(n, 2, 3),
    "flags": lambda n: np.arange(n) % 3 == 0,
    "bytes": lambda n: np.arange(n, dtype=np.uint8)[:, None, None],
    "complex": lambda n: np.exp(1j * np.arange(n)),
    "big-endian": lambda n: np.arange(n, dtype=">i4"),
    "not-finite": lambda n: np.where(np.arange(n) % 2, np.nan, -np.inf),
    "without-numbers": lambda n: np.zeros((n, 0)),
    "sliced": lambda n: np.arange(n * 9).reshape(n, 9)[:, ::-4],
    "list": lambda n: list(range(n)),
}


@exact
@pytest.mark.parametrize("name", PAYLOADS)
def test_payload_comes_with_its_keys(way: Growing, name: str) -> None:
    K = heavy_tailed(named_rng("payload"), N, D)
    payload = PAYLOADS[name](N)
    values = np.asarray(payload)
    state = in_chunks(way.make(0.05), K, [300, 5000] if name == "list" else [0, 300, 300, 5000], payload=payload)
    found = way.read(state, naive.adversarial_queries(K)[::50])
    assert found.payload.dtype == values.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found.payload, values[found.indices])
    if isinstance(state, StreamingUniversalSet):
        assert bits(StreamingUniversalSet.from_bytes(state.to_bytes()).result()) == bits(found)
        parts = [(low, high) for low, high in ((3000, N), (0, 1), (1, 3000))]
        states = [
            StreamingUniversalSet(0.05, row_start=low).update(K[low:high], payload=payload[low:high])
            for low, high in parts
        ]
        merged = states[0].merge(states[1]).merge(states[2]).result()
        np.testing.assert_array_equal(merged.payload, found.payload)
    assert way.read(way.make(0.1).update(GOOD)).payload is None


@exact
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_batches_without_matrices(way: Growing, shape: tuple[int, ...]) -> None:
    state = way.make(0.1)
    for m in (5, 100, 3000):
        state.update(np.ones((*shape, m, 4)), payload=np.ones((*shape, m, 2)))
    assert (state.n, state.held) == (3105, 0)
    found = way.read(state, np.ones((*shape, 3, 4)))
    if isinstance(state, CausalUniversalSet):
        assert found == ()
        return
    found = state.merge(way.make(0.1).update(np.ones((*shape, 3, 4)), payload=np.ones((*shape, 3, 2)))).result()
    assert (found.batch, found.items, found.n, found.sizes.shape) == (shape, (), 3108, shape)
    assert "StreamedSet(none of 3108 keys" in repr(found)
