"""What an operator launches, waits for and brings to main memory on a CUDA device, at most.

Inside: launches are counted on the emulator, and gradients of CuPy arrays are called as torch calls them.
`python tests/cuda/counting.py` prints the figures, which are those of docs/gpu.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from counting import counted, measured

import levattn
from emulator import device
from levattn._kernels.latent import LatentArguments
from levattn._kernels.latent import cuda as latent_cuda
from levattn._kernels.pruned.cuda_decode import HeldSlots, attend_token
from levattn._kernels.tokens import TokenArguments
from levattn._kernels.tokens import cuda as tokens_cuda
from levattn.attention import latte
from levattn.states import Moments
from streams import BLOCK
from token_calls import tssa

pytestmark = pytest.mark.skipif(
    not device.AVAILABLE or device.DEVICES > 0, reason="calls are counted on the emulator, which needs g++ and no card"
)

Make = Callable[..., Callable[[], Any]]
RNG = np.random.default_rng


def keys(heads: int, n: int = 4096, d: int = 64, *, smallest: float = 1.0) -> Any:
    """Heads of float32 keys, with columns of sizes down to the smallest in directions of their own."""
    K = RNG(0).standard_normal((heads, n, d))
    if smallest < 1:
        K = K * np.geomspace(1, smallest, d) @ np.linalg.qr(RNG(1).standard_normal((d, d)))[0]
    return K.astype(np.float32)


def of_keys(function: Callable[[Any], Any], smallest: float = 1.0) -> Make:
    def make(cupy: Any, heads: int = 2, **shape: int) -> Callable[[], Any]:
        return partial(function, cupy.asarray(keys(heads, smallest=smallest, **shape)))

    return make


def of_chunks(first: int, more: int, kind: str = "set", *, dtype: Any = np.float32, payload: bool = False) -> Make:
    """A chunk of blocks after the first ones; every 101st key is long, and a call leaves the state as it was."""

    def make(cupy: Any, heads: int = 2) -> Callable[[], Any]:
        K = RNG(0).standard_normal((heads, (first + more) * BLOCK, 8))
        K[:, ::101] *= 30
        parts = [cupy.asarray(part.astype(dtype)) for part in np.split(K, [first * BLOCK], axis=1)]
        state = levattn.StreamingUniversalSet(0.05) if kind == "set" else Moments(8, (heads,))
        options = [{"payload": cupy.asarray(np.zeros(part.shape[:2]))} if payload else {} for part in parts]
        state.update(parts[0], **options[0])
        held = vars(state if kind == "set" else state._sums)
        before = dict(held)

        def call() -> Any:
            held.update(before)
            return state.update(parts[1], **options[1])

        return call

    return make


def of_latents(T: int, *, after: int = 0, causal: bool = True, **options: Any) -> Make:
    def make(cupy: Any) -> Callable[[], Any]:
        def arrays(length: int) -> list[Any]:
            return [cupy.asarray(RNG(0).standard_normal((2, length, size)).astype(np.float32)) for size in (6, 6, 4)]

        more = {**options, "mask": cupy.asarray(np.arange(T) % 3 > 0)} if options.get("mask") else options
        if not after:
            return partial(latte, *arrays(T), causal=causal, **more)
        _, state = latte(*arrays(after), return_state=True)
        return partial(latte, *arrays(T), state=state, return_state=True)

    return make


def gradients_of_latents(causal: bool) -> Make:
    def make(cupy: Any) -> Callable[[], Any]:
        Q, K, V = (cupy.asarray(RNG(0).standard_normal((2, 300, size)).astype(np.float32)) for size in (6, 6, 4))
        x = LatentArguments(Q, K, V, np.array([0, 300]), causal)
        return lambda: latent_cuda.backward(x, V)

    return make


def of_tokens(T: int, *, after: int = 0, gradients: bool = False, **options: Any) -> Make:
    def make(cupy: Any) -> Callable[[], Any]:
        def tokens(length: int) -> Any:
            return cupy.asarray(RNG(0).standard_normal((2, 3, length, 8)).astype(np.float32))

        W, theta = tokens(T), cupy.asarray(np.ones((2, 3), np.float32))
        if gradients:
            x = TokenArguments(W, theta, None, np.array([0, T]))
            return lambda: tokens_cuda.backward(x, W)
        more = {**options, "mask": cupy.asarray(np.arange(T) % 3 > 0)} if options.get("mask") else options
        if not after:
            return partial(tssa, W, theta, **more)
        _, state = tssa(tokens(after), theta, return_state=True, **options)
        return partial(tssa, W, theta, state=state, return_state=True, **options)

    return make


def of_slots(s: int, t: int, **given: bool) -> Make:
    """A token that reads slots of two heads, and the tokens after them."""

    def make(cupy: Any) -> Callable[[], Any]:
        def arrays(*shape: int) -> Any:
            return cupy.asarray(RNG(0).standard_normal(shape).astype(np.float32))

        weight = arrays(2, 2, s) if given.get("weighted") else None
        present = cupy.asarray(RNG(1).random((2, t)) < 0.5) if given.get("padded") else None
        slots = HeldSlots.of(arrays(2, 2, s, 8), arrays(2, 2, s, 8), weight, (0, 1), 4)
        assert slots is not None
        near = arrays(2, 2, t, 8), arrays(2, 2, t, 8), present
        q, Y = arrays(2, 4, 1, 8), arrays(2, 4, 1, 8)
        empty = partial(cupy.empty, dtype=np.float32)
        return lambda: attend_token(q, slots, near, 0.3, None, Y, empty)

    return make


# At most so many launches and waits, and bytes for each head to main memory, of any form of an operator.
COSTS: dict[str, tuple[tuple[int, int, int], dict[str, Make]]] = {
    "leverage scores and sets": (
        (8, 2, 8 * 32),  # less than a row of a moment
        {
            "`universal_set` of heads": of_keys(lambda K: levattn.universal_set(K, 0.05)),
            "`leverage_scores` of heads": of_keys(levattn.leverage_scores),
        },
    ),
    "ill-conditioned heads": (
        (16, 4, 8 * 32),
        {"`universal_set` of ill-conditioned heads": of_keys(lambda K: levattn.universal_set(K, 0.05), 1e-5)},
    ),
    "sets of a given size": (
        (16, 3, 8 * 32),
        {"`universal_set` of a given size": of_keys(lambda K: levattn.universal_set(K, size=64))},
    ),
    "streams": (
        (30, 4, 8 * 256),
        {
            "`StreamingUniversalSet`, a run of blocks": of_chunks(2, 1),
            "the same in 16 bits, with a payload": of_chunks(2, 1, dtype=np.float16, payload=True),
            "the same where all keys are judged": of_chunks(1, 1),
        },
    ),
    "moments": ((5, 1, 8 * 64), {"`Moments`, a chunk": of_chunks(4, 3, "moments")}),
    "tssa": (
        (6, 0, 0),
        {
            "`tssa`": of_tokens(40),
            "`tssa`, masked and decaying": of_tokens(40, mask=True, decay=0.9),
            "`tssa`, both ways": of_tokens(40, causal=False),
        },
    ),
    "tssa, decoding": ((1, 0, 0), {"`tssa`, a step of decoding": of_tokens(4, after=40)}),
    "gradients of tssa": ((12, 0, 0), {"`tssa`, gradients": of_tokens(40, gradients=True)}),
    "latte": (
        (12, 0, 0),
        {
            "`latte`": of_latents(300),
            "`latte`, masked": of_latents(300, mask=True),
            "`latte`, both ways": of_latents(300, causal=False),
            "`latte`, up to 128 positions": of_latents(100),
            "`latte`, more than 8 rows after a state": of_latents(300, after=100),
        },
    ),
    "latte, decoding": ((1, 0, 0), {"`latte`, a step of decoding": of_latents(8, after=100)}),
    "compressed cache, decoding": (
        (2, 0, 0),
        {
            "a compressed cache, a step of decoding of a layer": of_slots(300, 20),
            "a compressed cache, weighted and padded": of_slots(300, 90, weighted=True, padded=True),
        },
    ),
    "gradients of latte": (
        (18, 0, 0),
        {
            "`latte`, gradients": gradients_of_latents(True),
            "`latte`, gradients, both ways": gradients_of_latents(False),
        },
    ),
}
FORMS = {form: make for _, forms in COSTS.values() for form, make in forms.items()}


@pytest.mark.parametrize("operator", COSTS)
def test_no_form_of_an_operator_costs_more(operator: str) -> None:
    (launches, waits, fetched), forms = COSTS[operator]
    for form, make in forms.items():
        with measured(make) as counts:
            assert len(counts.launches) <= launches, f"{form}: {counts}"
            assert len(counts.waits) <= waits, f"{form}: {counts}"
            assert counts.fetched <= 2 * fetched, f"{form}: {counts}"


@pytest.mark.parametrize(
    "operator", ["leverage scores and sets", "ill-conditioned heads", "sets of a given size", "streams", "moments"]
)
def test_launches_and_waits_do_not_grow_with_the_number_of_heads(operator: str) -> None:
    make = [*COSTS[operator][1].values()][-1]
    figures = []
    for heads in (2, 3):
        with measured(partial(make, heads=heads)) as counts:
            figures.append((len(counts.launches), len(counts.waits)))
    assert figures[0] == figures[1]


@pytest.mark.parametrize(("n", "smallest"), [(8192, 1.0), (300, 1e-5)])
def test_figures_and_no_matrices_come_to_main_memory(n: int, smallest: float) -> None:
    """A sample of long heads decides on the precision of the sums; its moments stay on the device, as do bases."""
    make = of_keys(levattn.leverage_scores, smallest)
    for heads, d in ((2, 8), (3, 24)):
        with measured(partial(make, heads=heads, n=n, d=d)) as counts:
            assert counts.fetched <= heads * 8 * 32, str(counts)


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
