"""Token statistics attention on a CUDA device, run on the CPU, against the definitions and their gradients by torch.

The definitions are compared with loops elsewhere. A run has 16 tokens, so short sequences have several.

Inside: kernels are compared with their definition, at the limits of their memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from definitions import assert_near, assert_same, gradients, in_float64, once

import naive_attention
from emulator import device as emulated
from emulator import in_orders
from levattn._kernels import kernels_for
from levattn._kernels.tokens import TokenArguments, definition
from levattn._kernels.tokens import cuda as tokens_cuda
from levattn._kernels.tokens.cuda import backward, forward, memberships
from token_calls import tssa

TOLERANCE = {"float64": 1e-13, "float32": 1e-5}
LOGITS = ["none", "norm", "diagonal"]
PARTS = ("W", "temperature", "offset")

pytestmark = pytest.mark.usefixtures("host")


def statistics(
    seed: int,
    shape: tuple[int, int, int, int],
    *,
    dtype: str = "float64",
    offset: bool = False,
    offsets: Any = None,
    decay: bool = False,
    mask: bool = False,
    state: bool = False,
    causal: bool = True,
    **options: Any,
) -> TokenArguments:
    """Arguments of shape (b, h, T, d) at random."""
    rng, (b, h, T, d) = np.random.default_rng(seed), shape
    offsets = np.asarray([0, T] if offsets is None else offsets, np.int64)
    n = len(offsets) - 1
    before = None
    if state:
        before = tuple(size * rng.random((b, h, n, *rest)) for size, rest in ((9, (d,)), (9, ()), (3, (d,)), (3, ())))
        for part in before:
            part[:, :, : int(causal)] = 0  # the first sequence begins with nothing
    return TokenArguments(
        rng.standard_normal(shape).astype(dtype),
        rng.uniform(0.5, 1.5, (b, h)).astype(dtype),
        rng.standard_normal((b, h, T)).astype(dtype) if offset else None,
        offsets,
        causal,
        decay=np.linspace(1, 0.6, h) if decay and causal else None,
        mask=rng.random((b, T)) < 0.7 if mask else None,
        state=before,
        **{"logits": "diagonal", **options},
    )


def by_torch(x: TokenArguments, dY: Any) -> list[Any]:
    return gradients(lambda given: definition.forward(given)[0], x, PARTS, dY)


def check(x: TokenArguments, tolerance: float | None = None, *, run: Any = once) -> None:
    """Compare output, memberships, sums and gradients with those of the definitions in float64."""
    rtol, dtype = TOLERANCE[x.W.dtype.name] if tolerance is None else tolerance, x.W.dtype

    def all_of_it() -> tuple[Any, ...]:
        Y, sums = forward(x, state=True)
        return Y, memberships(x), *sums

    Y, P, *sums = run(all_of_it)
    expected, after = definition.forward(in_float64(x), state=True)
    assert_near([Y, P], [expected, definition.memberships(in_float64(x))], rtol, dtype)
    assert_near(sums, after, rtol, np.float64)
    alone, nothing = forward(x)
    np.testing.assert_array_equal(alone, Y)
    assert nothing is None
    dY = np.random.default_rng(99).standard_normal(Y.shape).astype(dtype)
    found = run(lambda: tuple(part for part in backward(x, dY) if part is not None))
    assert_near(found, [part for part in by_torch(x, dY) if part is not None], rtol, dtype)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mean": {"mean": True, "mask": True, "offset": True},
    "decay": {"decay": True, "mean": True},
    "masked decay": {"decay": True, "mask": True, "state": True, "offset": True},
    "from a state": {"state": True, "mean": True},
    "sequences": {"offsets": [0, 0, 20, 21, 21, 55], "state": True, "mask": True},
    "decaying sequences": {"offsets": [0, 16, 49, 55], "decay": True, "offset": True, "mask": True, "mean": True},
    "short sequences": {"offsets": [0, 16, 30, 40, 55], "decay": True, "offset": True},
    "numbers": {"c": 3.0, "gain": 0.3, "ridge": 0.5, "least": 1.5, "decay": True},
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_those_of_the_definitions(kind: str, logits: str, causal: bool, dtype: str) -> None:
    check(statistics(0, (2, 3, 55, 5), dtype=dtype, causal=causal, logits=logits, **KINDS[kind]))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("h", "d"), [(1, 1), (2, 4), (3, 33), (12, 64), (20, 6), (130, 1), (65, 4), (2, 132), (5, 300), (2, 1030)]
)
def test_any_number_of_heads_and_channels(h: int, d: int, dtype: str) -> None:
    run = in_orders if h * d < 300 else once
    check(statistics(1, (1, h, 20, d), dtype=dtype, mask=True, offset=True), run=run)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T", [1, 15, 16, 17, 32, 129])
def test_any_number_of_tokens(T: int, causal: bool) -> None:
    check(statistics(2, (2, 4, T, 3), causal=causal, decay=True), run=in_orders)


def test_more_runs_than_a_scan_takes_at_a_time() -> None:
    check(statistics(3, (1, 2, 16 * 64 + 40, 2), decay=True, mask=True), 1e-12)
    check(statistics(4, (1, 2, 16 * 64 + 40, 2), mean=True), 1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("logits", LOGITS)
def test_nothing_to_do(logits: str, causal: bool) -> None:
    for shape, offsets in (((2, 3, 0, 4), [0, 0]), ((2, 3, 0, 4), [0]), ((0, 3, 5, 4), [0, 5])):
        for state in (False, True):
            x = statistics(5, shape, offsets=offsets, causal=causal, logits=logits, offset=True, state=state)
            Y, sums = forward(x, state=True)
            assert Y.shape == backward(x, Y)[0].shape == shape
            assert memberships(x).shape == shape[:3]
            assert_same(sums, definition.forward(x, state=True)[1])
            assert_same(backward(x, Y), [np.zeros_like(getattr(x, name)) for name in PARTS])


# -- what must hold exactly ------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("logits", LOGITS)
def test_tokens_depend_on_those_up_to_them_alone(logits: str, dtype: str) -> None:
    x = statistics(6, (2, 3, 80, 8), dtype=dtype, logits=logits, mean=True, decay=True)
    Y, P = forward(x)[0], memberships(x)
    for stop in (1, 15, 16, 33, 79):
        W = x.W.copy()
        W[:, :, stop:] = np.nan
        np.testing.assert_array_equal(forward(replace(x, W=W))[0][:, :, :stop], Y[:, :, :stop])
        np.testing.assert_array_equal(memberships(replace(x, W=W))[:, :, :stop], P[:, :, :stop])
        cut = replace(x, W=x.W[:, :, :stop], offsets=np.array([0, stop]))
        np.testing.assert_array_equal(forward(cut)[0], Y[:, :, :stop])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("logits", LOGITS)
def test_no_bit_depends_on_other_items_and_sequences(logits: str, causal: bool) -> None:
    x = statistics(
        7, (3, 20, 70, 8), dtype="float32", logits=logits, causal=causal, offsets=[0, 40, 70], mask=True, decay=True
    )
    dY = np.random.default_rng(8).standard_normal(x.W.shape).astype(np.float32)
    (Y, sums), (dW, *_) = forward(x, state=True), backward(x, dY)
    for i, (low, high) in enumerate(((0, 40), (40, 70))):
        part, offsets = np.s_[1:2, :, low:high], np.array([0, high - low])
        one = replace(
            x, W=x.W[part], mask=x.mask[1:2, low:high], offsets=offsets, temperature=x.temperature[1:2], offset=None
        )
        alone, after = forward(one, state=True)
        np.testing.assert_array_equal(alone, Y[part])
        np.testing.assert_array_equal(backward(one, dY[part])[0], dW[part])
        assert_same([own[:, :, 0] for own in after], [together[1:2, :, i] for together in sums])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("logits", LOGITS)
def test_masked_tokens_do_nothing(logits: str, causal: bool) -> None:
    x = statistics(9, (2, 3, 60, 8), logits=logits, causal=causal, mask=True, mean=True, offset=True)
    x.mask[0, :25] = False
    x.mask[1] = False
    check(x)
    dY = np.random.default_rng(10).standard_normal(x.W.shape)
    W, offset, given = x.W.copy(), x.offset.copy(), dY.copy()
    for array in (W, given):
        array.swapaxes(1, 2)[~x.mask] = np.nan
    offset.swapaxes(1, 2)[~x.mask] = np.nan
    poisoned = replace(x, W=W, offset=offset)
    Y, P = forward(poisoned)[0], memberships(poisoned)
    np.testing.assert_array_equal(Y, forward(x)[0])
    assert not Y.swapaxes(1, 2)[~x.mask].any()
    assert not P.swapaxes(1, 2)[~x.mask].any()
    assert_same(backward(poisoned, given), backward(x, dY))


@pytest.mark.parametrize("d", [8, 5])
def test_arrays_of_any_layout(d: int) -> None:
    x = statistics(11, (3, 4, 40, d), dtype="float32", mask=True, offset=True)
    dY = np.random.default_rng(12).standard_normal(x.W.shape).astype(np.float32)
    Y, found = forward(x)[0], backward(x, dY)
    assert Y.flags.c_contiguous
    assert found[0].flags.c_contiguous

    def heads_last(array: Any) -> Any:  # the heads of a token side by side
        return np.swapaxes(np.swapaxes(array, 1, 2).copy(), 1, 2)

    def shifted(array: Any) -> Any:  # not aligned for vectors, and every other token
        held = np.zeros((*array.shape[:2], 2 * array.shape[2], d + 3), array.dtype)
        held[:, :, ::2, 1 : 1 + d] = array
        return held[:, :, ::2, 1 : 1 + d]

    side_by_side = replace(x, W=heads_last(x.W), offset=heads_last(x.offset), mask=np.asfortranarray(x.mask))
    moved = forward(side_by_side)[0]
    assert moved.transpose(0, 2, 1, 3).flags.c_contiguous
    dW = backward(side_by_side, dY)[0]
    assert dW.transpose(0, 2, 1, 3).flags.c_contiguous
    np.testing.assert_array_equal(moved, Y)
    np.testing.assert_array_equal(dW, found[0])
    for other in (shifted(x.W), np.asfortranarray(x.W)):
        if d == 5:  # where vectors do not fit, nothing is summed in another order
            np.testing.assert_array_equal(forward(replace(x, W=other))[0], Y)
        np.testing.assert_allclose(forward(replace(x, W=other))[0], Y, atol=1e-6)
    for other in (heads_last(dY), shifted(dY), np.asfortranarray(dY)):
        for part, expected in zip(backward(x, other), found, strict=True):
            np.testing.assert_allclose(part, expected, atol=1e-5)
    one = replace(x, offset=np.broadcast_to(x.offset[:, :, :1], x.offset.shape), temperature=x.temperature.T[:3, :1])
    one = replace(one, temperature=np.broadcast_to(one.temperature, (3, 4)))
    copied = replace(one, offset=one.offset.copy(), temperature=one.temperature.copy())
    np.testing.assert_array_equal(forward(one)[0], forward(copied)[0])
    assert_same(backward(one, dY), backward(copied, dY))


def test_vectors_of_an_array_that_is_not_aligned() -> None:
    x = statistics(13, (2, 3, 40, 8), dtype="float32")
    held = np.zeros(x.W.size + 1, np.float32)
    held[1:] = x.W.ravel()
    W, dY = held[1:].reshape(x.W.shape), np.ones_like(x.W)
    np.testing.assert_array_equal(forward(replace(x, W=W))[0], forward(x)[0])
    assert_same(backward(replace(x, W=W), W), backward(x, x.W))
    assert backward(x, dY)[2] is None


# -- numbers that are hard ---------------------------------------------------------------


def test_errors_do_not_grow_with_the_number_of_tokens() -> None:
    x = statistics(14, (1, 2, 20000, 3), dtype="float32", mean=True)
    for given in (x, replace(x, decay=np.array([1, 0.9999999]))):
        Y, sums = forward(given, state=True)
        expected, after = definition.forward(in_float64(given), state=True)
        np.testing.assert_allclose(Y, expected, rtol=3e-5, atol=1e-6)  # a logit is a mean of 20 000 tokens
        for part, other in zip(sums, after, strict=True):
            np.testing.assert_allclose(part, other, rtol=3e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("scale", [1e-3, 30])
def test_memberships_that_are_almost_all_or_nothing(scale: float, dtype: str) -> None:
    x = statistics(15, (1, 4, 40, 3), dtype=dtype, logits="norm", ridge=0.0)
    x = replace(x, W=(x.W * scale).astype(dtype))
    Y, P = forward(x)[0], memberships(x)
    expected = definition.forward(in_float64(x))[0]
    np.testing.assert_allclose(Y, expected, rtol=0, atol=1e-3 * scale if dtype == "float32" else 1e-12 * scale)
    np.testing.assert_allclose(P.sum(axis=1), 1, rtol=1e-6)
    for part in backward(x, np.ones_like(x.W))[:2]:
        assert np.isfinite(part).all()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_channels_of_zeros_are_finite(dtype: str) -> None:
    x = statistics(16, (2, 3, 40, 4), dtype=dtype, ridge=0.0, least=1e-300)
    x.W[:, :, :20, 1] = 0
    x.W[1] = 0
    Y, found = forward(x)[0], backward(x, np.ones_like(x.W))
    np.testing.assert_allclose(Y, definition.forward(in_float64(x))[0], rtol=0, atol=TOLERANCE[dtype])
    assert_near(found[:2], by_torch(x, np.ones_like(x.W))[:2], TOLERANCE[dtype])


RANGES: dict[str, dict[str, Any]] = {
    "released": {"least": 1e-12, "ridge": 1e-8},
    "mean": {"mean": True, "least": 2.0**-126, "ridge": 0.0},
    "norm": {"logits": "norm", "ridge": 0.0},
    "uniform": {"logits": "none", "ridge": 0.0},
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("c", [1e-20, 1.0, 1e14, 1e30])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e5, 1e17])
@pytest.mark.parametrize("form", RANGES)
def test_gradients_in_single_precision_are_right_or_nan(form: str, size: float, c: float, causal: bool) -> None:
    x = statistics(30, (1, 3, 40, 4), dtype="float32", causal=causal, c=c, gain=c, **RANGES[form])
    temperature = x.temperature if form != "norm" else (x.temperature / size**2).astype(np.float32)
    x = replace(x, W=(x.W * size).astype(np.float32), temperature=temperature)
    Y, true = forward(x)[0], definition.forward(in_float64(x))[0]
    top = np.abs(true).max()
    if not 1e-36 < top < 1e38 or not np.abs(Y - true).max() < 1e-4 * top:
        return
    dY = np.random.default_rng(31).standard_normal(Y.shape).astype(np.float32)
    exact = tokens_cuda.backward(tokens_cuda._widened(x), dY.astype(np.float64))
    for one, other in zip(backward(x, dY)[:2], exact[:2], strict=True):
        most = np.abs(other).max()
        if 1e-36 < most < 3e38 and not np.isnan(one).any():
            assert np.abs(one - other).max() < 1e-4 * most
    if size == 1.0 or (c == 1.0 and size == 1e5):
        assert not any(np.isnan(part).any() for part in backward(x, dY)[:2])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 30.0])
def test_gradients_near_memberships_of_one_and_of_tokens_that_are_most_of_their_sums(
    temperature: float, causal: bool
) -> None:
    x = statistics(32, (2, 3, 40, 4), dtype="float32", causal=causal, ridge=1e-8)
    W = x.W.copy()
    W[0, :, :9] *= np.float32(20) ** np.arange(9, dtype=np.float32)[:, None] * np.float32(1e-6)
    offset = np.zeros(x.W.shape[:3], np.float32)
    offset[:, 0] = 0.7
    x = replace(x, W=W, offset=offset, temperature=np.full_like(x.temperature, temperature))
    dY = np.random.default_rng(33).standard_normal(W.shape).astype(np.float32)
    exact = by_torch(in_float64(x), dY.astype(np.float64))
    for one, other in zip(backward(x, dY), exact, strict=True):
        for part, true in zip(one, other, strict=True):  # items differ in size
            assert np.abs(part - true).max() < 1e-4 * np.abs(true).max()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("causal", [True, False])
def test_channels_of_zeros_have_gradients_of_the_output_alone(causal: bool, dtype: str) -> None:
    x = statistics(34, (2, 3, 40, 4), dtype=dtype, causal=causal, mean=True, least=1e-310, ridge=0.0)
    x.W[..., 1] = 0
    x = replace(x, temperature=20 * x.temperature)
    dY = np.random.default_rng(35).standard_normal(x.W.shape).astype(dtype)
    dW = backward(x, dY)[0]
    np.testing.assert_allclose(dW[..., 1], -memberships(x) * dY[..., 1], rtol=1e-5)
    assert np.isfinite(dW).all()


def test_more_heads_than_shared_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = statistics(18, (1, 40, 3, 1))
    monkeypatch.setattr(tokens_cuda, "shared_limit", lambda: 48 * 1024)
    forward(x)
    with pytest.raises(ValueError, match=r"W has 400 heads; expected at most \d+ in float64"):
        forward(statistics(18, (1, 400, 3, 1)))


# -- arrays as strict as CuPy's --------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_the_table_takes_arrays_of_a_device(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = statistics(19, (2, 3, 40, 4), dtype="float32", causal=causal, offset=True, mask=True, decay=True)
    state = statistics(20, (2, 3, 40, 4), causal=causal, state=True).state
    dY = np.random.default_rng(21).standard_normal(x.W.shape).astype(np.float32)

    def results(table: Any, x: TokenArguments, dY: Any, state: Any) -> list[Any]:
        found = []
        for given in (x, replace(x, state=state)):
            Y, sums = table.forward(given, state=True)
            found += [Y, *sums, table.memberships(given), *table.backward(given, dY)]
        return found

    expected = results(tokens_cuda, x, dY, state)
    cupy = emulated.library_on_device(monkeypatch)
    there = replace(x, **{name: cupy.asarray(getattr(x, name)) for name in (*PARTS, "mask")})
    table = kernels_for("tokens", there.W)
    assert table.forward is tokens_cuda.forward
    found = results(table, there, cupy.asarray(dY), state)
    assert all(isinstance(part, type(cupy.zeros(1))) for part in found)
    assert_same([part.get() for part in found], expected)


def test_squares_are_added_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(22)
    X, mask, weights = rng.standard_normal((2, 30, 4)), rng.random((2, 30)) < 0.5, rng.random((2, 30))
    decay, held = np.array([1, 0.8]), (rng.random((2, 4)), rng.random(2))
    expected = definition.add_squares(X, mask, weights, decay, held)
    cupy = emulated.library_on_device(monkeypatch)
    given = [*map(cupy.asarray, (X, mask, weights)), decay, tuple(map(cupy.asarray, held))]
    for part, other in zip(kernels_for("tokens", given[0]).add_squares(*given), expected, strict=True):
        np.testing.assert_allclose(part.get(), other, rtol=1e-14)


# -- sequences of one run, in one launch -------------------------------------------------

SHORT: dict[str, dict[str, Any]] = {
    "one token": {"shape": (3, 3, 1, 8), "state": True},
    "one of some": {"shape": (2, 4, 1, 5), "state": True, "mask": True, "decay": True, "offset": True, "mean": True},
    "a run": {"shape": (2, 3, 16, 8), "state": True, "decay": True, "mask": True},
    "from nothing": {"shape": (2, 20, 9, 36), "mask": True, "offset": True},
    "sequences": {"shape": (2, 3, 30, 4), "offsets": [0, 0, 14, 15, 15, 30], "state": True, "decay": True},
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("kind", SHORT)
def test_one_launch_has_the_bits_of_all_passes(
    kind: str, logits: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    real = tokens_cuda.launch

    def launch(source: str, name: str, *args: Any, **options: Any) -> None:
        names.append(name)
        real(source, name, *args, **options)

    monkeypatch.setattr(tokens_cuda, "launch", launch)
    x = statistics(23, **SHORT[kind], logits=logits, causal=causal, dtype="float32")
    check(x)
    names.clear()
    (Y, sums), (alone, _) = forward(x, state=True), forward(x)
    assert names == ["attend_tokens"] * 2
    monkeypatch.setattr(tokens_cuda._Work, "short", False)
    passes, others = forward(x, state=True)
    assert len(names) > 4
    assert_same([Y, alone, *sums], [passes, passes, *others])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("T", [3, 40])
def test_tokens_in_shared_memory_change_no_bit(
    T: int, logits: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = statistics(24, (2, 3, T, 68), dtype="float32", logits=logits, causal=causal, mask=True, offset=True)
    dY = np.random.default_rng(25).standard_normal(x.W.shape).astype(np.float32)
    shifted = np.zeros(x.W.size + 1, np.float32)[1:].reshape(x.W.shape)
    shifted[...] = x.W
    rooms: list[int] = []
    real = tokens_cuda._Work._geometry

    def geometry(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        rooms.append(found[2])
        return found

    monkeypatch.setattr(tokens_cuda._Work, "_geometry", geometry)

    def results(W: Any) -> list[Any]:
        rooms.clear()
        given = replace(x, W=W)
        return [forward(given)[0], memberships(given), *backward(given, dY)]

    expected = results(x.W)
    twice = T == 3 or causal or logits != "none"  # whether anything is read more than once
    assert max(rooms) == twice * min(T, 16) * 3 * 68 * 4
    assert_same(results(shifted), expected)
    small = 2 * (min(T, 16) * 3 * 68 * 4 + 4096) - 1
    monkeypatch.setattr(tokens_cuda, "shared_limit", lambda: small)
    assert_same(results(x.W), expected)
    assert not any(rooms)


# -- tokens of 16 bits -------------------------------------------------------------------


def rounded(numbers: Any, kind: str) -> Any:
    """Numbers of float32 as they are stored in 16 bits."""
    if kind == "float16":
        return numbers.astype(np.float16)
    torch = pytest.importorskip("torch")
    return torch.from_numpy(np.ascontiguousarray(numbers)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def widened(stored: Any) -> Any:
    if stored.dtype == np.float16:
        return stored.astype(np.float32)
    return (stored.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T", [1, 16, 50])
def test_tokens_of_16_bits_are_those_of_float32(T: int, causal: bool, kind: str) -> None:
    x = statistics(26, (2, 3, T, 12), dtype="float32", causal=causal, mask=T > 1, offset=True, state=True)
    dY = rounded(np.random.default_rng(27).standard_normal(x.W.shape).astype(np.float32), kind)
    W = rounded(x.W * np.float32(40) ** np.linspace(-3, 1, 12, dtype=np.float32), kind)
    wide, stored = replace(x, W=widened(W)), replace(x, W=W)
    (Y, sums), (expected, others) = forward(stored, state=True), forward(wide, state=True)
    assert Y.dtype == W.dtype
    np.testing.assert_array_equal(Y, rounded(expected, kind))
    assert_same([memberships(stored), *sums], [memberships(wide), *others])
    assert_same(backward(stored, dY), backward(wide, widened(dY)))
    padded = np.pad(W, [(0, 0)] * 3 + [(0, 1)])[..., :12]  # rows that begin anywhere
    np.testing.assert_array_equal(forward(replace(x, W=padded))[0], Y)
    assert_same(backward(replace(x, W=padded), dY), backward(stored, dY))


def test_outputs_of_16_bits_are_rounded_to_the_nearest() -> None:
    """Tokens of which the output is −gain w: with one head, and moments of nothing."""
    numbers = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    W = numbers[np.isfinite(numbers)].reshape(1, 1, -1, 4)
    x = TokenArguments(
        W,
        np.ones((1, 1), np.float32),
        None,
        np.array([0, W.shape[2]]),
        False,
        "none",
        c=1e-30,
        gain=1.37,
        ridge=1.0,
        state=tuple(np.zeros((1, 1, 1, *rest)) for rest in ((4,), (), (4,), ())),
    )
    with np.errstate(over="ignore"):
        expected = (-np.float32(1.37) * W.astype(np.float32)).astype(np.float16)
    np.testing.assert_array_equal(forward(x)[0].view(np.uint16), expected.view(np.uint16))
    words = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    words = words[(words & 0x7FFF) < 0x7E80].reshape(1, 1, -1, 4)  # whose outputs are finite
    found = forward(replace(x, W=words, offsets=np.array([0, words.shape[2]])))[0]
    np.testing.assert_array_equal(found, rounded(-np.float32(1.37) * widened(words), "bfloat16"))


# -- decoding by the public functions ----------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"membership": "norm"}, {"normalize": "mean", "decay": 0.9}, {"c": 2.0}], ids=str
)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_decoding_is_the_attention_of_all_tokens(options: dict[str, Any], dtype: str, cupy: Any) -> None:
    rng = np.random.default_rng(28)
    W = rng.standard_normal((2, 3, 21, 4)).astype(dtype)
    naive = {
        "mean" if key == "normalize" else key: True if value == "mean" else value for key, value in options.items()
    }
    expected = [naive_attention.token_statistics(item.astype(np.float64), np.ones(3), **naive)[0] for item in W]
    found, state = tssa(cupy.asarray(W[:, :, :5]), return_state=True, **options)
    parts = [found]
    for t in range(5, 21):
        found, state = tssa(cupy.asarray(W[:, :, t : t + 1]), state=state, return_state=True, **options)
        parts.append(found)
    assert all(type(sums) is type(parts[0]) for sums in state.tokens.sums())
    Y = np.concatenate([part.get() for part in parts], axis=2)
    assert Y.dtype == dtype
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3}[dtype]
    np.testing.assert_allclose(Y, np.stack(expected), rtol=0, atol=tolerance)
    whole = tssa(cupy.asarray(W), **options).get()
    np.testing.assert_allclose(Y, whole, rtol=0, atol=tolerance)
