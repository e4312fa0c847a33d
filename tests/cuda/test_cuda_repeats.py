"""Calls of tensors on a device that are repeated by their launches, against the same calls that are worked out anew.

Inside: the kept calls are read, as results do not tell them; numbers of calls are planted.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from emulator import device, places
from levattn._core.device import where_arrays_are
from levattn._kernels import LatentArguments, TokenArguments, repeats
from levattn._kernels.latent.torch import ATTENTION
from levattn._kernels.tokens.torch import STATISTICS
from levattn.attention import TokenForm, latte, memberships
from token_calls import tssa

pytestmark = pytest.mark.skipif(
    not device.AVAILABLE or device.DEVICES > 0,
    reason="calls are repeated on the emulator, which needs g++ and no card",
)


@pytest.fixture
def there(tensors: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a tensor on a device of an array of numpy, and of a dtype of torch."""
    import torch

    from levattn._kernels import tensors as read

    module, _, made = tensors
    monkeypatch.setattr(read, "_PLAIN", (torch.Tensor, module.CudaTensor))  # as true tensors are

    def put(array: Any, dtype: str = "float32", place: int = 0) -> Any:
        kind = torch.bool if array.dtype == np.bool_ else getattr(torch, dtype)
        return module.CudaTensor(torch.from_numpy(array).to(kind), place)

    put.made = made  # type: ignore[attr-defined]
    return put


def judged() -> list[bool]:
    """Of each kind of calls that came more than once: whether its launches are kept."""
    return [isinstance(call, repeats.Repeat) for call in repeats._KNOWN.values() if call != "met"]


def drawn(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


def of_latents(dtype: str = "float32", T: int = 150, D: int = 12, **options: Any) -> Callable[..., Any]:
    def call(there: Any, seed: int) -> Any:
        arrays = [there(drawn(seed + 100 * i, 2, 1, T, size), dtype) for i, size in enumerate((8, 8, D))]
        given = dict(options)
        if "mask" in given:
            given["mask"] = there(np.random.default_rng(seed).random((2, 1, T)) < 0.7)
        return lambda: latte(*arrays, **given)

    return call


def of_tokens(dtype: str = "float32", T: int = 40, d: int = 8, theta: Any = 1.0, **options: Any) -> Callable[..., Any]:
    def call(there: Any, seed: int) -> Any:
        W = there(drawn(seed, 2, T, 3, d), dtype).transpose(1, 2)
        temperature = there(1 + np.random.default_rng(seed).random(3), dtype) if theta is None else theta
        given = dict(options)
        if "mask" in given:
            given["mask"] = there(np.random.default_rng(seed).random((2, T)) < 0.7)
        if "bias" in given:
            given["form"] = TokenForm(bias=there(drawn(seed, 3, T), dtype))
            del given["bias"]
        return lambda: tssa(W, temperature, **given)

    return call


# The kernels of each are repeated, and nothing else is done for their arrays, or torch does it each time
KEPT: dict[str, Callable[..., Any]] = {
    "latte": of_latents(),
    "latte in float64": of_latents("float64"),
    "latte in bfloat16": of_latents("bfloat16"),
    "latte in float16": of_latents("float16", D=70),
    "latte, short": of_latents(T=40),
    "latte, both ways": of_latents(causal=False),
    "latte, masked": of_latents(mask=True),
    "latte, packed": of_latents(offsets=np.array([0, 0, 20, 150])),
    "tssa": of_tokens(),
    "tssa in float64": of_tokens("float64"),
    "tssa in bfloat16": of_tokens("bfloat16"),
    "tssa, short": of_tokens(T=10),
    "tssa, both ways": of_tokens(causal=False),
    "tssa, learned temperatures": of_tokens(theta=None),
    "tssa, decaying": of_tokens(form=TokenForm(decay=0.9)),
    "tssa, norms": of_tokens(theta=0.5, form="norm"),
    "tssa, masked": of_tokens(mask=True),
    "tssa, packed": of_tokens(offsets=np.array([0, 0, 17, 40])),
    "tssa, biased": of_tokens(bias=True),
    "tssa with leverage scores": lambda there, seed: (
        lambda: tssa(there(drawn(seed, 3, 40, 8)), form="leverage", causal=False)
    ),
}
# Each copies an array, so only the operator within it can be repeated
ANEW: dict[str, Callable[..., Any]] = {
    "latte of two formats": lambda there, seed: (
        lambda: latte(
            *(there(drawn(seed + i, 2, 40, 8), dtype) for i, dtype in enumerate(("float32", "float32", "float16")))
        )
    ),
    "latte of shared values": lambda there, seed: (
        lambda: latte(
            *(there(drawn(seed + i, *shape)) for i, shape in enumerate(((2, 3, 40, 8), (2, 3, 40, 8), (2, 1, 40, 4))))
        )
    ),
    "tssa in halves of odd width": of_tokens("float16", d=5),
}


@pytest.mark.parametrize("name", [*KEPT, *ANEW])
def test_a_repeated_call_has_the_bits_of_a_new_one(there: Any, name: str) -> None:
    make = {**KEPT, **ANEW}[name]
    seeds = (1, 2, 3, 1, 2)
    found = [make(there, seed)().inner for seed in seeds]
    kept = judged()
    assert any(kept)
    assert all(kept) == (name in KEPT)
    for seed, before in zip(seeds, found, strict=True):
        repeats.forget_calls()
        anew = make(there, seed)().inner
        assert (anew.dtype, anew.shape, anew.stride()) == (before.dtype, before.shape, before.stride())
        assert anew.isfinite().all()
        np.testing.assert_array_equal(anew.double(), before.double())


@pytest.mark.parametrize(
    "name", ["latte", "latte in bfloat16", "tssa", "tssa, decaying", "tssa, learned temperatures"]
)
def test_a_repeated_call_sends_nothing_and_takes_no_function_of_torch(there: Any, name: str) -> None:
    """Its launches are those of the first call, on torch's stream and in torch's memory."""
    KEPT[name](there, 1)()
    call = KEPT[name](there, 2)
    repeats.forget_calls()
    call()
    places.launches.clear()
    call()
    before = list(places.launches)
    places.launches.clear()
    there.made.ran.clear()
    there.made.crossed.clear()
    call()
    assert places.launches == before
    assert not there.made.ran
    assert not there.made.crossed
    assert not places.waits
    assert not places.own


def test_another_stream_and_another_device_have_calls_of_their_own(there: Any, tensors: Any) -> None:
    """Tables are freed in the order of the stream on which a call was worked out."""
    _, streams, _ = tensors
    make = KEPT["latte"]
    expected = make(there, 1)().inner
    assert all(make(there, 1)().inner.equal(expected) for _ in range(2))
    assert judged() == [True]
    streams.current[0] = 5
    places.launches.clear()
    assert all(make(there, 1)().inner.equal(expected) for _ in range(3))
    assert {stream for _, stream in places.launches} == {5}
    assert judged() == [True] * 2
    beside = make(lambda array, *kind: there(array, *kind, place=1), 1)
    assert all(beside().inner.equal(expected) for _ in range(3))
    assert judged() == [True] * 3


def test_numbers_of_a_call_are_not_those_of_another(there: Any) -> None:
    """Forms that differ in one number, in the order of calls that would mix them up."""
    W = there(drawn(0, 3, 40, 8))
    calls: list[dict[str, Any]] = [
        {},
        {"causal": False},
        {"form": "norm"},
        {"form": TokenForm(c=2.0)},
        {"form": TokenForm(decay=0.5)},
        {"form": TokenForm(decay=[0.5, 0.6, 0.7])},
        {"form": TokenForm(decay=[0.5, 0.6, 0.8])},
        {"form": TokenForm(normalize="mean")},
        {"offsets": np.array([0, 20, 40])},
        {"offsets": np.array([0, 21, 40])},
    ]
    cases = [(theta, options) for theta in (1.0, 0.5) for options in calls]
    found = [tssa(W, theta, **options).inner for _ in range(3) for theta, options in cases]
    assert all(judged())
    assert len(judged()) > len(cases) / 2
    for (theta, options), *same in zip(cases, found, found[len(cases) :], found[2 * len(cases) :], strict=False):
        repeats.forget_calls()
        expected = tssa(W, theta, **options).inner
        assert all(part.equal(expected) for part in same)
    assert len({tuple(part.ravel().tolist()) for part in found}) == len(cases)


@pytest.mark.parametrize("wrong", [True, float("nan"), "1"])
def test_a_call_that_is_refused_is_refused_after_one_that_is_not(there: Any, wrong: Any) -> None:
    W = there(drawn(0, 3, 40, 8))
    for theta in (1, 1.0, 1):
        tssa(W, theta)
    with pytest.raises((TypeError, ValueError), match="temperature"):
        tssa(W, wrong)
    with pytest.raises(ValueError, match=r"q_logits|T"):
        latte(there(drawn(0, 40, 8)), there(drawn(0, 41, 8)), there(drawn(0, 41, 8)))
    assert tssa(W).inner.isfinite().all()  # nothing is left of the calls that failed


def test_one_tensor_in_two_places_and_then_two(there: Any) -> None:
    """Whether addresses are of one tensor or of two is not known from a call with one."""
    X, Y, V = (there(drawn(seed, 40, 8)) for seed in range(3))
    expected = {}
    for name, given in {"one": (X, X, V), "two": (X, Y, V)}.items():
        repeats.forget_calls()
        expected[name] = latte(*given).inner
    repeats.forget_calls()
    for name, given in 4 * [("one", (X, X, V)), ("two", (X, Y, V))]:
        assert latte(*given).inner.equal(expected[name])


def test_a_captured_graph_refuses_repeated_calls_too(there: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    W = there(drawn(0, 3, 40, 8))
    for _ in range(3):
        tssa(W)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="graph"):
        tssa(W)


def test_the_kinds_of_calls_that_are_known_are_bounded(there: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_MOST", 3)
    W = there(drawn(0, 2, 20, 4))
    expected = [tssa(W, 1 + i).inner for i in range(5)]
    assert len(repeats._KNOWN) == 3
    assert all(tssa(W, 1 + i).inner.equal(expected[i]) for i in (4, 0, 3, 0, 0, 1, 2, 0, 1, 1, 1))
    assert len(repeats._KNOWN) == 3


def test_threads_repeat_calls_side_by_side(there: Any) -> None:
    import torch

    W = [there(drawn(seed, 3, 40, 8)) for seed in range(4)]
    expected = [tssa(each).inner for each in W]
    found: list[Any] = [None] * len(W)

    def body(i: int) -> None:
        with type(there.made)():
            found[i] = [tssa(W[i]).inner for _ in range(5)]

    threads = [threading.Thread(target=body, args=(i,)) for i in range(len(W))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(part, expected[i]) for i, parts in enumerate(found) for part in parts)


def of_operator(there: Any, ends: Any, dtype: str = "float32") -> Callable[[], Any]:
    """A call of the operator, as code that torch compiled calls it."""
    Q, K, V = (there(drawn(i, 2, 40, 8), dtype) for i in range(3))
    call = where_arrays_are(lambda Q: ATTENTION.computed(LatentArguments(Q, K, V, ends, causal=True)))
    return lambda: call(Q)


def test_offsets_that_lie_on_the_device_are_read_in_each_call(there: Any) -> None:
    def found(*ends: int) -> Any:
        return of_operator(there, there(np.array(ends), "int64"))().inner

    for ends in ((0, 20, 40), (0, 7, 40)):
        assert found(*ends).equal(of_operator(there, np.array(ends))().inner)
    with pytest.raises(ValueError, match="offsets"):
        found(0, 20, 39)


def test_calls_within_torch_func_are_worked_out_anew(there: Any) -> None:
    """New tensors are wrappers there, also in a call on plain ones."""
    import torch

    call = of_operator(there, np.array([0, 40]), "float16")
    for _ in range(4):  # before the call is kept, and after
        torch.func.grad(lambda z: (call(), (z * 2).sum())[1])(torch.ones(3, device="cpu"))
        call()


def test_nothing_of_a_call_is_held(there: Any) -> None:
    arrays = [there(drawn(seed, 40, 8)) for seed in range(3)]
    for _ in range(3):
        Y = latte(*arrays)
    assert judged() == [True]
    held = [weakref.ref(array.inner) for array in (*arrays, Y)]
    addresses = {array.data_ptr() for array in (*arrays, Y)}
    calls = [call for call in repeats._KNOWN.values() if isinstance(call, repeats.Repeat)]
    kept = [value for call in calls for _, values, _ in call.launches for value in values]
    assert addresses.isdisjoint(value.data.ptr for value in kept if hasattr(value, "data"))
    del arrays, Y
    gc.collect()
    assert [ref() for ref in held] == [None] * 4


def gradients_of(there: Any, seed: int, of: str, dtype: str, causal: bool) -> list[Any]:
    """What the operator of gradients returns, as torch's engine calls it."""
    if of == "latte":
        Q, K, V = (there(drawn(seed + i, 2, 150, 8), dtype) for i in range(3))
        operator, x = ATTENTION, LatentArguments(Q, K, V, None, causal=causal)
    else:
        W = there(drawn(seed, 2, 40, 3, 8), dtype).transpose(1, 2)
        theta = there(1 + np.random.default_rng(seed).random((2, 3)), "float64" if dtype == "float64" else "float32")
        offset = there(drawn(seed, 2, 3, 40), "float64" if dtype == "float64" else "float32")
        bounds, decay = (np.array([0, 17, 40]), np.array([0.9, 0.8, 1.0])) if of == "packed" else (None, None)
        decay = decay if causal else None
        offset = None if of == "tssa" else offset
        operator, x = STATISTICS, TokenArguments(W, theta, offset, bounds, causal=causal, decay=decay)
    dY = there(drawn(seed + 9, *shape_of_output(x)), dtype)
    return [part.inner for part in operator.backward(dY, *operator.arguments(x))]


def shape_of_output(x: Any) -> Any:
    return (*x.Q.shape[:2], x.V.shape[2]) if isinstance(x, LatentArguments) else x.W.shape


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("of", ["latte", "tssa", "biased", "packed"])
def test_repeated_gradients_have_the_bits_of_new_ones(there: Any, of: str, dtype: str, causal: bool) -> None:
    found = [gradients_of(there, seed, of, dtype, causal) for seed in (1, 2, 3)]
    assert judged() == [True]
    for seed, parts in zip((1, 2, 3), found, strict=True):
        repeats.forget_calls()
        for part, anew in zip(parts, gradients_of(there, seed, of, dtype, causal), strict=True):
            assert (anew.dtype, anew.shape) == (part.dtype, part.shape)
            assert anew.isfinite().all()
            np.testing.assert_array_equal(anew.double(), part.double())


def test_memberships_are_worked_out_anew(there: Any) -> None:
    W = there(drawn(0, 3, 40, 8))
    first = memberships(W).inner
    tssa(W)
    assert memberships(W).inner.equal(first)
