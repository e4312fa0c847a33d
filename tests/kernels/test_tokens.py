"""The compiled kernels of token statistics attention, against their definitions.

Inside: kernels are compared with their definition.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import levattn
from levattn._kernels import TokenArguments
from levattn._kernels.tokens import cpu as tokens_cpu
from levattn._kernels.tokens import definition as definitions

KINDS = ("none", "norm", "diagonal")
LENGTHS = (0, 1, 15, 16, 17, 33, 300)
CHANNELS = (21, 1, 2, 7, 16, 31, 64, 100, 160)
FLAGS = ("mean", "decay", "mask", "offset", "packed", "state")
TOLERANCE = {np.float64: 1e-12, np.float32: 2e-6}


def arguments(
    seed: int, T: int, kind: Any, causal: bool, dtype: Any = np.float64, *, heads_last: bool = True, **flags: Any
) -> TokenArguments:
    """Arguments in a dtype; `b`, `h` and `d` among the flags are sizes."""
    rng = np.random.default_rng([seed, T])
    b, h, d = (flags.pop(name, size) for name, size in (("b", 2), ("h", 3), ("d", 21)))
    shape = (b, T, h, d) if heads_last else (b, h, T, d)
    W = rng.standard_normal(shape).astype(dtype)
    offsets = np.array([0, T // 3, T // 3, T] if flags.get("packed") else [0, T])
    n = len(offsets) - 1
    state = tuple(rng.random((b, h, n, *more)) + 1 for more in ((d,), (), (d,), ()))
    scale = {"none": 1.0, "norm": 0.05, "diagonal": 0.1 if flags.get("mean") else 1.0}[kind]
    return TokenArguments(
        W.transpose(0, 2, 1, 3) if heads_last else W,
        (scale * (rng.random((b, h)) + 0.5)).astype(dtype),
        rng.standard_normal((b, h, T)).astype(dtype) if flags.get("offset") else None,
        offsets,
        causal,
        kind,
        bool(flags.get("mean")),
        1e-3,
        1e-8,
        1.7,
        1.3,
        np.linspace(0.7, 1, h) if flags.get("decay") and causal else None,
        rng.random((b, T)) > 0.3 if flags.get("mask") else None,
        state if flags.get("state") else None,
    )


def in_float64(x: TokenArguments) -> TokenArguments:
    """The same numbers in float64."""
    offset = None if x.offset is None else x.offset.astype(np.float64)
    return replace(x, W=x.W.astype(np.float64), temperature=x.temperature.astype(np.float64), offset=offset)


def cases(share: int) -> list[dict[str, bool]]:
    """One of `share` combinations of the flags, all pairs of which occur."""
    every = [dict(zip(FLAGS, flags, strict=True)) for flags in product((False, True), repeat=len(FLAGS))]
    order = np.random.default_rng(0).permutation(len(every))
    return [every[i] for i in order[:: max(share, 1)]]


def assert_near(found: Any, expected: Any, tolerance: float, message: str) -> None:
    scale = 1 + (np.abs(expected).max() if np.size(expected) else 0)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * scale, err_msg=message)


# -- the definitions -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_memberships_and_states_are_those_of_the_definitions(kind: Any, causal: bool, dtype: Any) -> None:
    for seed, flags in enumerate(cases(1)):
        T = LENGTHS[seed % len(LENGTHS)]
        d = CHANNELS[seed % len(CHANNELS)]
        x = arguments(seed, T, kind, causal, dtype, heads_last=seed % 2 == 0, d=d, **flags)
        x = replace(x, temperature=x.temperature * dtype(min(1, (21 / d) ** 0.5)))  # logits of one size
        Y, state = tokens_cpu.forward(x, state=True)
        expected, after = definitions.forward(in_float64(x), state=True)
        assert Y.dtype == dtype
        assert Y.strides == x.W.strides or not Y.size
        message = f"{flags}, T = {T}, d = {d}"
        assert_near(Y, expected, TOLERANCE[dtype], message)
        assert_near(tokens_cpu.memberships(x), definitions.memberships(in_float64(x)), TOLERANCE[dtype], message)
        for mine, theirs in zip(state, after, strict=True):
            assert mine.dtype == np.float64
            assert_near(mine, theirs, TOLERANCE[dtype], message)
        np.testing.assert_array_equal(tokens_cpu.forward(x)[0], Y)


def test_arrays_may_have_any_strides() -> None:
    x = arguments(2, 50, "diagonal", True, offset=True, mask=True)
    dY = np.random.default_rng(3).standard_normal(x.W.shape)
    expected, gradients = tokens_cpu.forward(x)[0], tokens_cpu.backward(x, dY)
    room = np.zeros((2, 50, 2, 3, 42))
    room[:, :, 1, :, :21] = x.W.transpose(0, 2, 1, 3)
    view = room[:, :, 1, :, :21].transpose(0, 2, 1, 3)
    reverse = np.ascontiguousarray(x.W[:, ::-1])[:, ::-1]
    for W in (view, reverse, np.asfortranarray(x.W), np.ascontiguousarray(x.W)):
        y = replace(x, W=W, mask=np.asfortranarray(x.mask), offset=np.asfortranarray(x.offset))
        np.testing.assert_array_equal(tokens_cpu.forward(y)[0], expected)
        for gradient in (dY, np.asfortranarray(dY), np.ascontiguousarray(dY[:, ::-1])[:, ::-1]):
            for mine, theirs in zip(tokens_cpu.backward(y, gradient), gradients, strict=True):
                np.testing.assert_array_equal(mine, theirs)
    same = np.broadcast_to(dY[:, :1, :1], dY.shape)
    for mine, theirs in zip(tokens_cpu.backward(x, same), tokens_cpu.backward(x, same.copy()), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    one = replace(x, offset=np.broadcast_to(x.offset[:, :, :1], x.offset.shape))
    again = replace(one, offset=np.array(one.offset))
    np.testing.assert_array_equal(tokens_cpu.forward(one)[0], tokens_cpu.forward(again)[0])


# -- gradients ---------------------------------------------------------------------------


def by_autograd(x: TokenArguments, dY: Any) -> list[Any]:
    torch = pytest.importorskip("torch")
    W, temperature, offset, mask = (
        None if a is None else torch.tensor(a) for a in (x.W, x.temperature, x.offset, x.mask)
    )
    state = None if x.state is None else tuple(map(torch.tensor, x.state))
    leaves = [a.requires_grad_() for a in (W, temperature, offset) if a is not None]
    y = replace(x, W=W, temperature=temperature, offset=offset, mask=mask, state=state)
    found = torch.autograd.grad(
        definitions.forward(y)[0], leaves, torch.tensor(dY), allow_unused=True, materialize_grads=True
    )
    return [gradient.numpy() for gradient in found]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_definitions(kind: Any, causal: bool, dtype: Any) -> None:
    for seed, flags in enumerate(cases(3)):
        T = LENGTHS[1:][seed % (len(LENGTHS) - 1)]
        x = arguments(seed, T, kind, causal, dtype, heads_last=seed % 2 == 0, **flags)
        dY = np.random.default_rng(seed).standard_normal(x.W.shape).astype(dtype)
        found = [gradient for gradient in tokens_cpu.backward(x, dY) if gradient is not None]
        expected = by_autograd(in_float64(x), dY.astype(np.float64))
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.dtype == dtype
            assert_near(mine, theirs, 1e-10 if dtype == np.float64 else 1e-5, f"{flags}, T = {T}")
        if x.mask is not None:
            assert not found[0].transpose(0, 2, 1, 3)[~x.mask].any()


@pytest.mark.parametrize("causal", [True, False])
def test_no_gradient_goes_through_a_sum_that_is_replaced_by_the_least(causal: bool) -> None:
    x = replace(arguments(4, 40, "diagonal", causal, mask=True), least=15.0)  # some channels and tokens are below
    dY = np.random.default_rng(5).standard_normal(x.W.shape)
    for mine, theirs in zip(tokens_cpu.backward(x, dY)[:2], by_autograd(x, dY), strict=True):
        assert_near(mine, theirs, 1e-10, "")


# -- what does not matter ------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_bits_do_not_depend_on_threads_and_batch(causal: bool, masked: bool) -> None:
    flags = {"mask": masked, "packed": masked, "decay": True, "offset": True}
    x = arguments(6, 16_400, "diagonal", causal, np.float32, b=2, h=4, d=16, **flags)  # two slabs and a block
    dY = np.random.default_rng(7).standard_normal(x.W.shape).astype(np.float32)

    def everything(y: TokenArguments, part: Any = slice(None)) -> list[Any]:
        Y, state = tokens_cpu.forward(y, state=True)
        return [Y, tokens_cpu.forward(y)[0], *state, tokens_cpu.memberships(y), *tokens_cpu.backward(y, dY[part])]

    with levattn.thread_limit(1):
        expected = everything(x)
    for threads in (2, 3):
        with levattn.thread_limit(threads):
            for mine, theirs in zip(everything(x), expected, strict=True):
                np.testing.assert_array_equal(mine, theirs)
    part = slice(1, 2)
    alone = replace(x, W=x.W[part], temperature=x.temperature[part], offset=x.offset[part])
    alone = replace(alone, mask=None if x.mask is None else x.mask[part])
    for mine, theirs in zip(everything(alone, part), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs[part])


def test_arguments_are_not_changed() -> None:
    x = arguments(12, 30, "diagonal", True, state=True, offset=True)
    copies = [np.array(a) for a in (x.W, x.temperature, x.offset, *x.state)]
    for array in (x.W, x.temperature, x.offset, x.offsets, *x.state):
        array.flags.writeable = False
    tokens_cpu.forward(x, state=True)
    tokens_cpu.backward(x, np.ones(x.W.shape))
    for before, after in zip(copies, (x.W, x.temperature, x.offset, *x.state), strict=True):
        np.testing.assert_array_equal(before, after)


# -- accuracy and the edges of the range -----------------------------------------------------


@pytest.mark.parametrize("scale", [1e-19, 1e-15, 1e15, 1e18, 1.5e18])
@pytest.mark.parametrize("causal", [True, False])
def test_very_large_and_small_tokens_in_float32(causal: bool, scale: float) -> None:
    x = arguments(13, 60, "diagonal", causal, np.float32)
    x = replace(x, W=x.W * np.float32(scale), least=2.0**-126, ridge=0.0)
    with np.errstate(over="ignore", under="ignore"):
        expected, P = definitions.forward(in_float64(x))[0], definitions.memberships(in_float64(x))
    assert np.isfinite(x.W.astype(np.float64) ** 2).all()
    np.testing.assert_allclose(tokens_cpu.memberships(x), P, atol=1e-5)
    np.testing.assert_allclose(tokens_cpu.forward(x)[0], expected, rtol=1e-4, atol=1e-45)


def test_zero_tokens_give_zero_and_a_uniform_share() -> None:
    for causal in (True, False):
        x = replace(arguments(15, 20, "diagonal", causal, np.float32), ridge=0.0)
        x.W[:] = 0
        assert not tokens_cpu.forward(x)[0].any()
        np.testing.assert_allclose(tokens_cpu.memberships(x), 1 / 3, rtol=1e-6)


# -- running second moments --------------------------------------------------------------------


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_squares_are_those_of_the_definitions_and_do_not_depend_on_chunks(dtype: Any, full: bool) -> None:
    rng = np.random.default_rng(16)
    X = rng.standard_normal((3, 5000, 20)).astype(dtype)
    mask, weights, decay = rng.random(X.shape[:2]) > 0.2, rng.random(X.shape[:2]), np.array([1.0, 0.99, 0.5])
    X[~mask] = np.nan
    for w, rates in ((None, None), (weights, None), (weights, decay)):
        total, mass = tokens_cpu.add_squares(X, mask, w, rates, None, full=full)
        expected, sums = definitions.add_squares(X, mask, w, rates, None, full=full)
        np.testing.assert_allclose(total, expected, rtol=1e-11, atol=1e-10)
        np.testing.assert_allclose(mass, sums, rtol=1e-11)
        for size in (1, 999, 4096):
            held = None
            for low in range(0, 5000 if size > 1 else 50, size):
                part = slice(low, low + size)
                before = None if held is None else [np.array(S) for S in held]
                new = tokens_cpu.add_squares(
                    X[:, part], mask[:, part], None if w is None else w[:, part], rates, held, full=full
                )
                for mine, theirs in zip(held or (), before or (), strict=True):
                    np.testing.assert_array_equal(mine, theirs)
                held = new
            if size > 1:
                np.testing.assert_array_equal(held[0], total)
                np.testing.assert_array_equal(held[1], mass)
    assert (total == total.swapaxes(-1, -2)).all() if full else total.shape == (3, 20)


def test_squares_of_nothing_are_zero() -> None:
    total, mass = tokens_cpu.add_squares(np.zeros((2, 0, 4), np.float32), None, None, None, None)
    assert not total.any()
    assert total.shape == (2, 4)
    assert mass.shape == (2,)
