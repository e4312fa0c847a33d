"""Tensors of torch on a CUDA device, against the same calls in main memory.

Rounding differs between the two, so a result on the device may be further from float64 than that of main memory by a
factor, or by a few roundings of the largest number. ``TEST_TORCH=cpu`` tries these tests without a card: all is then
in main memory.

Inside: the calls that are kept are counted, as results do not tell whether a call was repeated.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import levattn
from levattn._kernels import repeats
from levattn.attention import latte, tssa
from pruned_calls import attend

torch = pytest.importorskip("torch")

WHERE = os.environ.get("TEST_TORCH", "cuda")
FACTOR = 8.0
pytestmark = [
    pytest.mark.skipif(WHERE == "cuda" and not torch.cuda.is_available(), reason="torch finds no CUDA device"),
    pytest.mark.usefixtures("fresh_compiler"),
]
on_a_card = pytest.mark.skipif(WHERE != "cuda", reason="of streams and devices there are some on a card alone")

DTYPES = ("float64", "float32", "bfloat16", "float16")


def numbers(*shape: int, seed: int = 0, dtype: str = "float32") -> Any:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return torch.from_numpy(values).to(getattr(torch, dtype))


def keys(n: int = 3000, d: int = 24, *, dtype: str = "float32", seed: int = 0) -> Any:
    """Keys of which some are long, so that scores differ by much."""
    K = numbers(n, d, seed=seed, dtype="float64")
    K[:: n // 15] *= 30
    return K.to(getattr(torch, dtype))


def there(tensor: Any) -> Any:
    return tensor.to(WHERE)


def assert_as_exact(found: Any, cpu: Any, exact: Any) -> None:
    """What the device found is as near to the result in float64 as what main memory found, up to a factor."""
    assert found.device.type == WHERE
    assert (found.dtype, found.shape) == (cpu.dtype, cpu.shape)
    rounding = torch.finfo(cpu.dtype).eps * exact.abs().max().item()
    error, yardstick = ((result.cpu().double() - exact).abs().max().item() for result in (found, cpu))
    assert error <= FACTOR * (yardstick + rounding)


def rounded_once(array: Any) -> Any:
    """Change each number by one unit in its last place, up or down: a sum with cancellation changes by as much."""
    signs = torch.randint(0, 2, array.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return array + array * signs.to(array.dtype) * torch.finfo(array.dtype).eps


# -- gradients --------------------------------------------------------------------------------


def with_gradients(function: Callable[..., Any], arrays: list[Any]) -> list[Any]:
    leaves = [array.detach().requires_grad_() for array in arrays]
    Y = function(*leaves)
    weights = numbers(*Y.shape, seed=9, dtype="float64").to(Y.dtype).to(Y.device)
    return [Y.detach(), *torch.autograd.grad(Y, leaves, weights)]


OPERATORS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "latte": (latte, [(2, 3, 300, 16), (2, 3, 300, 16), (2, 3, 300, 24)]),
    "latte, bidirectional": (partial(latte, causal=False), [(2, 3, 300, 16), (2, 3, 300, 16), (2, 3, 300, 24)]),
    "tssa": (tssa, [(2, 3, 300, 16), (3,)]),
    "tssa, bidirectional": (partial(tssa, causal=False), [(2, 3, 300, 16), (3,)]),
    "tssa, norm": (partial(tssa, form="norm"), [(2, 3, 300, 16), (3,)]),
}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.crossed
def test_rows_and_gradients(name: str, dtype: str) -> None:
    operator, shapes = OPERATORS[name]
    arrays = [numbers(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    exact = with_gradients(operator, [array.double() for array in arrays])
    # in float64 main memory found the yardstick itself; beside it stands what a rounding of each number changes
    near = [rounded_once(array) for array in arrays] if dtype == "float64" else arrays
    cpu, found = with_gradients(operator, near), with_gradients(operator, [there(array) for array in arrays])
    for one, other, true in zip(found, cpu, exact, strict=True):
        assert_as_exact(one, other, true)


@pytest.mark.parametrize("name", ["Latte", "TokenStatistics"])
def test_compiled_layers(name: str) -> None:
    from levattn import nn

    torch.manual_seed(0)
    layer = getattr(nn, name)(48, heads=4, causal=True).to(WHERE)
    X = there(numbers(2, 130, 48))
    with torch.no_grad():
        expected, found = layer(X), torch.compile(layer, backend="eager", fullgraph=True)(X)
        assert torch.equal(found, expected)
        if WHERE == "cuda":
            with warnings.catch_warnings():
                # which inductor recommends on cards that have it, and which would cost digits
                warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
                # inductor fuses, and so rounds elsewhere
                torch.testing.assert_close(torch.compile(layer)(X), expected)


# -- keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_leverage_scores(dtype: str) -> None:
    K = keys(dtype=dtype)
    cpu, found = levattn.leverage_scores(K), levattn.leverage_scores(there(K))
    assert_as_exact(found, cpu, levattn.leverage_scores(K.double()))
    assert torch.equal(levattn.leverage_scores(there(K)[None])[0], found)


@pytest.mark.parametrize("power", [-137, -140])
def test_columns_of_subnormal_numbers(power: int) -> None:
    """They count like all others, though tensor cores and flags of compilers take them for zeros."""
    K = keys(dtype="float32")
    K[:, 3] = torch.round(K[:, 3] * 8) * 2.0**power
    assert (K[:, 3].abs() < torch.finfo(torch.float32).tiny).all()
    cpu, found = levattn.leverage_scores(K), levattn.leverage_scores(there(K))
    assert_as_exact(found, cpu, levattn.leverage_scores(K.double()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_universal_sets_and_streams(dtype: str) -> None:
    K = keys(dtype=dtype)
    expected = levattn.universal_set(K, 0.05)
    found = levattn.universal_set(there(K), 0.05)
    assert found.mask.device.type == WHERE
    assert torch.equal(found.mask.cpu(), expected.mask)
    assert 15 <= int(expected.mask.sum()) < len(K)
    stream = levattn.StreamingUniversalSet(0.05)
    for start in range(0, len(K), 700):
        stream.update(there(K)[start : start + 700])
    assert stream.result().items[0].indices.tolist() == expected.indices.tolist()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pruned_attention(dtype: str, causal: bool) -> None:
    Q, K, V = (numbers(2, 3, 200, 16, seed=i, dtype=dtype) for i in range(3))
    pick = partial(attend, size=30, summaries=8, **({"causal": True, "renew_every": 20} if causal else {}))
    exact = pick(*(X.double() for X in (Q, K, V)))
    assert_as_exact(pick(*map(there, (Q, K, V))), pick(Q, K, V), exact)


# -- streams, threads and devices -------------------------------------------------------------

CALLS: dict[str, Callable[[Any], Any]] = {
    "leverage scores": levattn.leverage_scores,
    "universal set": lambda K: levattn.universal_set(K, 0.05).mask,
    "latte": lambda K: latte(K, K, K),
    "tssa": lambda K: tssa(K[None], torch.ones(1, device=K.device)),
}


@on_a_card
@pytest.mark.parametrize("name", CALLS)
def test_a_side_stream(name: str) -> None:
    """Keys that a stream has yet to compute are waited for, and results can be used on it at once."""
    K = there(keys(20000, 64))
    expected = CALLS[name](K) * 1
    busy = torch.ones(4096, 4096, device=WHERE)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            late = torch.full_like(K, torch.nan)
            for _ in range(20):
                busy = busy @ busy / 4096
            late.copy_(K)
            found = CALLS[name](late) * 1
            late.fill_(torch.nan)
            # memory that goes back to torch's pool and is written at once: nobody may still read from it
            del late
    side.synchronize()
    assert torch.equal(found, expected)


@on_a_card
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_calls_are_repeated_by_their_launches(dtype: str) -> None:
    """Other numbers, in other memory, have the bits of a call that is worked out anew."""

    def found(seed: int) -> list[Any]:
        Q, K, V = (there(numbers(2, 300, 16, seed=seed + i, dtype=dtype)) for i in range(3))
        W = there(numbers(2, 3, 40, 8, seed=seed, dtype=dtype))
        return [latte(Q, K, V), latte(Q, K, V, causal=False), tssa(W), tssa(W, form="norm")]

    repeats.forget_calls()
    several = [found(seed) for seed in range(4)]
    judged = [call for call in repeats._KNOWN.values() if call != "met"]
    assert [type(call) for call in judged] == [repeats.Repeat] * len(several[0])
    for seed, kept in enumerate(several):
        repeats.forget_calls()
        for one, other in zip(kept, found(seed), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", CALLS)
def test_threads(name: str) -> None:
    """Calls at once have the bits of calls one by one."""
    several = [there(keys(4000, 32, seed=seed)) for seed in range(8)]
    expected = [CALLS[name](K) for K in several]

    def on_a_stream(K: Any) -> Any:
        if WHERE != "cuda":
            return CALLS[name](K)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            found = CALLS[name](K)
        stream.synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for one, other in zip(pool.map(on_a_stream, several), expected, strict=True):
                assert torch.equal(one, other)


@on_a_card
@pytest.mark.parametrize("name", CALLS)
def test_a_second_device(name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device")
    K = keys(4000, 32)
    expected = CALLS[name](K.to("cuda:0"))
    with torch.cuda.device(1):
        found = CALLS[name](K.to("cuda:1"))
        assert torch.cuda.current_device() == 1
    assert found.device.index == 1
    torch.testing.assert_close(found.cpu(), expected.cpu())
