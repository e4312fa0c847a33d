"""Latent attention on a CUDA device, run on the CPU, against the definitions and their gradients by torch.

The definitions are compared with loops elsewhere. Sequences are cut into runs of few positions here, so that
short ones have many.

Inside: kernels are compared with their definition, in runs that are made short.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from definitions import assert_near, assert_same, gradients, in_float64, once

import emulator
from emulator import device as emulated
from emulator import in_orders
from levattn._kernels import kernels_for
from levattn._kernels.latent import LatentArguments, cpu, definition
from levattn._kernels.latent import cuda as latent_cuda
from levattn._kernels.latent.cuda import backward, decayed_scan, forward, joined, summary

PARTS = ("Q", "K", "V", "gate", "gate_value")
TOLERANCE = {"float64": 1e-13, "float32": 5e-6}  # sums of some dozen terms, whose exponents round at scale 300 too


@pytest.fixture(autouse=True)
def short_runs(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.short_runs(monkeypatch)


def mixture(
    seed: int,
    shape: tuple[int, int, int, int],
    *,
    U: int | None = None,
    scale: float = 1.0,
    dtype: str = "float64",
    offsets: Any = None,
    causal: bool = True,
    ahead: int = 0,
    gate: bool = False,
    mask: bool = False,
    state: bool = False,
) -> LatentArguments:
    """Arguments of shape (b, T, L, D) at random, logits as large as `scale`."""
    rng, (b, T, L, D) = np.random.default_rng(seed), shape
    U = T if U is None else U
    offsets = np.asarray([0, T] if offsets is None else offsets, np.int64)
    n = len(offsets) - 1
    Q, K = (scale * rng.standard_normal((b, rows, L)).astype(dtype) for rows in (T, U))
    before = None
    if state:
        m, s = scale * rng.standard_normal((b, n, L)), 1 + rng.random((b, n, L))
        S = rng.standard_normal((b, n, L, D))
        m[:, :, 0], s[:, :, 0], S[:, :, 0] = -np.inf, 0, 0
        before = m, s, S
    return LatentArguments(
        Q.astype(dtype),
        K.astype(dtype),
        rng.standard_normal((b, U, D)).astype(dtype),
        offsets,
        causal,
        ahead,
        (scale * rng.standard_normal((b, T))).astype(dtype) if gate else None,
        rng.standard_normal((b, T, D)).astype(dtype) if gate else None,
        rng.random((b, U)) < 0.6 if mask else None,
        before,
    )


def check(x: LatentArguments, tolerance: float | None = None, *, run: Any = once) -> None:
    """Compare output and gradients with those of the definitions in float64."""
    rtol, dtype = TOLERANCE[x.V.dtype.name] if tolerance is None else tolerance, x.V.dtype
    Y = run(forward, x)
    assert Y.dtype == dtype
    np.testing.assert_allclose(Y, definition.forward(in_float64(x)), rtol=rtol, atol=rtol)
    dY = np.random.default_rng(99).standard_normal(Y.shape).astype(dtype)
    found = run(lambda: tuple(part for part in backward(x, dY) if part is not None))
    expected = gradients(definition.forward, x, PARTS, dY)
    assert_near(found, [part for part in expected if part is not None], rtol, dtype)


KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "gated": {"gate": True, "mask": True},
    "behind": {"ahead": -5, "gate": True},
    "far behind": {"ahead": -45, "state": True},
    "ahead": {"ahead": 20, "U": 75, "mask": True},
    "from a state": {"state": True, "gate": True},
    "sequences": {"offsets": [0, 0, 20, 21, 21, 55], "state": True, "mask": True},
    "sequences behind": {"offsets": [0, 30, 33, 55], "ahead": -5, "gate": True},
    "everywhere": {"causal": False, "U": 70},
    "everywhere, sequences": {"causal": False, "offsets": [0, 30, 30, 55], "gate": True, "mask": True, "state": True},
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("scale", [1, 30, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_gradients_are_those_of_the_definitions(kind: str, scale: float, dtype: str) -> None:
    run = in_orders if scale == 30 else once
    check(mixture(0, (2, 55, 5, 3), scale=scale, dtype=dtype, **KINDS[kind]), run=run)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("L", "D"), [(1, 1), (17, 5), (5, 65), (64, 17), (33, 64), (65, 128), (128, 5), (130, 7), (3, 130), (257, 131)]
)
def test_any_number_of_latents_and_columns(L: int, D: int, dtype: str) -> None:
    check(mixture(1, (1, 20, L, D), dtype=dtype, gate=True), 1e-5 if dtype == "float32" else None, run=in_orders)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T", [1, 15, 16, 17, 33, 64, 129])
def test_any_number_of_positions(T: int, causal: bool) -> None:
    check(mixture(2, (2, T, 4, 3), causal=causal, mask=True))


def test_runs_as_long_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    emulator.on_host(monkeypatch)
    check(mixture(3, (1, 1300, 3, 2), dtype="float32", gate=True, mask=True), 2e-5)
    check(mixture(4, (1, 1300, 3, 2), causal=False))


@pytest.mark.parametrize("causal", [True, False])
def test_nothing_to_do(causal: bool) -> None:
    for shape, U in (((2, 0, 3, 4), 0), ((0, 5, 3, 4), 5), ((2, 0, 3, 4), 7)):
        for gate in (False, True):
            x = mixture(5, shape, U=U, causal=causal, gate=gate)
            Y = forward(x)
            assert Y.shape == (shape[0], shape[1], 4)
            found = backward(x, Y)
            sources = [getattr(x, name) for name in PARTS]
            assert_same(found, [None if source is None else np.zeros_like(source) for source in sources])
    x = mixture(6, (2, 5, 3, 4), U=0, causal=causal, ahead=-5 if causal else 0, gate=True)
    np.testing.assert_array_equal(forward(x), x.gate_value)  # there is nothing beside the gate's output
    assert not backward(x, x.gate_value)[0].any()
    x = LatentArguments(x.Q[:, :0], x.K, x.V, np.zeros(1, np.int64), causal)
    assert forward(x).shape == (2, 0, 4)
    assert summary(x.K, x.V, None, x.offsets)[2].shape == (2, 0, 3, 4)


# -- what must hold exactly ------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("jump", [3, 16, 40])
def test_a_late_jump_of_all_logits(jump: int, dtype: str) -> None:
    x = mixture(9, (1, 60, 3, 5), dtype=dtype)
    x.K[:, :jump], x.K[:, jump:] = 0, 200
    check(x)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_no_bit_depends_on_heads_sequences_or_how_work_is_cut(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = mixture(11, (3, 70, 20, 130), dtype=dtype, offsets=[0, 40, 70], mask=True)
    dY = np.random.default_rng(12).standard_normal(x.V.shape).astype(dtype)
    Y, found = forward(x), backward(x, dY)
    monkeypatch.setattr(latent_cuda, "_BUSY", 0)
    np.testing.assert_array_equal(forward(x), Y)
    for low, high in ((0, 40), (40, 70)):
        part = slice(low, high)
        one = LatentArguments(
            x.Q[1:2, part], x.K[1:2, part], x.V[1:2, part], np.array([0, high - low]), True, mask=x.mask[1:2, part]
        )
        np.testing.assert_array_equal(forward(one), Y[1:2, part])
        assert_same(backward(one, dY[1:2, part])[:3], [together[1:2, part] for together in found[:3]])


@pytest.mark.parametrize("causal", [True, False])
def test_what_nobody_sees_does_nothing(causal: bool) -> None:
    x = mixture(13, (2, 60, 4, 3), mask=True, causal=causal)
    x.mask[0, :25] = False  # the first that is seen comes late
    x.mask[1] = False
    x.K[0, :, 1] = -np.inf  # a latent that sees nothing
    x.K[0, 33] = -np.inf
    dY = np.random.default_rng(14).standard_normal(x.V.shape)
    check(x)
    K, V = x.K.copy(), x.V.copy()
    unseen = ~x.mask | np.isneginf(x.K).all(axis=2)
    K[~x.mask], V[unseen] = np.nan, np.nan
    poisoned = replace(x, K=K, V=V)
    Y, found = forward(poisoned), backward(poisoned, dY)
    np.testing.assert_array_equal(Y, forward(x))
    assert not Y[1].any()
    assert Y[0, 30:].any()
    if causal:
        assert not Y[0, :25].any()
    assert_same(found, backward(x, dY))
    assert not any(part[1].any() for part in found[:3])
    assert not found[1][unseen].any()
    assert not found[2][unseen].any()
    assert not found[0][..., 1].any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_not_finite_reach_the_rows_that_see_them(number: float, causal: bool) -> None:
    x = mixture(24, (5, 50, 3, 2), gate=True, causal=causal)
    expected = forward(x)
    x.Q[0, 7, 1] = x.K[1, 19, 2] = x.K[2, 0, 0] = x.gate[4, 3] = number
    x.V[3, 40, 1] = np.nan
    expected[0, 7] = expected[1, 19 * causal :] = expected[2] = expected[4, 3] = np.nan
    expected[3, 40 * causal :, 1] = np.nan
    np.testing.assert_allclose(forward(x), expected, rtol=1e-12)


def test_a_gate_of_nothing_takes_no_part() -> None:
    x = mixture(15, (1, 30, 3, 2), gate=True)
    x.gate[:] = -np.inf
    np.testing.assert_array_equal(forward(x), forward(replace(x, gate=None, gate_value=None)))
    assert not any(part.any() for part in backward(x, x.gate_value)[3:])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_equal_values_are_given_back(dtype: str) -> None:
    x = mixture(16, (1, 120, 5, 2), scale=20, dtype=dtype)
    Y = forward(replace(x, V=np.full_like(x.V, 3)))
    np.testing.assert_allclose(Y, 3, rtol=8 * np.finfo(dtype).eps)
    dQ, dK, *_ = backward(x, x.V)
    np.testing.assert_allclose(dQ.sum(axis=2), 0, atol=20 * np.finfo(dtype).eps)
    np.testing.assert_allclose(dK.sum(axis=1), 0, atol=200 * np.finfo(dtype).eps)


def test_arrays_of_any_layout() -> None:
    x = mixture(17, (3, 40, 4, 6), gate=True, mask=True)
    Y, dY = forward(x), np.broadcast_to(x.V[:1], x.V.shape)
    found = backward(x, dY.copy())

    def heads_last(array: Any) -> Any:
        return np.moveaxis(np.moveaxis(array, 0, 1).copy(), 0, 1)

    other = replace(x, **{name: heads_last(getattr(x, name)) for name in (*PARTS, "mask")})
    other = replace(other, V=other.V[:, ::-1].copy()[:, ::-1])
    np.testing.assert_array_equal(forward(other), Y)
    assert_same(backward(other, np.asfortranarray(dY)), found)
    shared = replace(x, V=dY, mask=np.broadcast_to(x.mask[:1], x.mask.shape))
    np.testing.assert_array_equal(forward(shared), forward(replace(shared, V=dY.copy(), mask=shared.mask.copy())))


# -- single precision, on tensor cores -------------------------------------------------


@pytest.mark.parametrize("kind", ["causal", "ahead", "sequences", "everywhere, sequences"])
@pytest.mark.parametrize("scale", [1, 1e4])
def test_single_precision_keeps_its_digits(kind: str, scale: float) -> None:
    """Against double precision, with as many latents and columns as a block takes, and logits of any size."""
    x = mixture(30, (1, 55, 64, 80), scale=scale, dtype="float32", **KINDS[kind])
    assert np.abs(forward(x) - forward(in_float64(x))).max() < 4e-6


@pytest.mark.parametrize("growth", [0.5, 3, 5, 40, 1000])
def test_logits_that_grow_at_every_position(growth: float) -> None:
    x = mixture(31, (1, 70, 20, 10), dtype="float32")
    x.K[:] += (growth * np.arange(70, dtype=np.float32))[:, None]
    np.testing.assert_allclose(forward(x), definition.forward(in_float64(x)), rtol=5e-6, atol=5e-6)


def test_a_value_too_large_for_a_sum_of_two_reaches_the_rows_that_see_it_alone() -> None:
    x = mixture(32, (1, 40, 5, 4), dtype="float32")
    before = forward(x)
    for value in (1e37, np.inf, np.nan):
        x.V[0, 21, 1] = value
        Y = forward(x)
        np.testing.assert_array_equal(Y[0, :21], before[0, :21])
        assert not (np.abs(Y[0, 21:, 1]) < 1e30).any()
        np.testing.assert_array_equal(Y[0, 21:, [0, 2, 3]], before[0, 21:, [0, 2, 3]])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("L", [5, 40, 100, 130])
def test_a_row_has_the_same_bits_in_any_batch(L: int, causal: bool) -> None:
    x = mixture(33, (5, 45, L, 70), dtype="float32", causal=causal)
    Y = forward(x)
    one = replace(x, Q=x.Q[3:4], K=x.K[3:4], V=x.V[3:4])
    np.testing.assert_array_equal(forward(one), Y[3:4])


def test_equal_positions_add_up_without_a_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    emulator.on_host(monkeypatch)
    x = mixture(34, (1, 3000, 3, 2), dtype="float32")
    x.K[:], x.V[:] = 0.3, 1 / 3
    for causal in (True, False):
        np.testing.assert_allclose(forward(replace(x, causal=causal)), 1 / 3, rtol=30 * np.finfo(np.float32).eps)


# -- 16 bits ---------------------------------------------------------------------------


def rounded(array: Any, kind: str) -> Any:
    """Numbers of float32 as they are stored in 16 bits; bfloat16 in words."""
    if kind == "float16":
        return array.astype(np.float16)
    words = array.view(np.uint32) + 0x7FFF + (array.view(np.uint32) >> 16 & 1)
    return np.where(np.isnan(array), 0x7FC0, words >> 16).astype(np.uint16)


def widened(array: Any) -> Any:
    """The numbers of float32 that they are."""
    if array.dtype == np.float16:
        return array.astype(np.float32)
    return (array.astype(np.uint32) << 16).view(np.float32)


HALVES = ("float16", "bfloat16")
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # of rounding
# E, w, A and S are rounded, the sum of E as its terms, and then the row; and float16 has few small numbers
ROUNDINGS = 6


def in_16_bits(x: LatentArguments, stored: str, layout: Any = np.copy) -> tuple[LatentArguments, LatentArguments]:
    """The arguments with logits and values in 16 bits, and the same numbers in float64."""
    parts = {name: layout(rounded(getattr(x, name), stored)) for name in PARTS[:3]}
    wide = {name: widened(array) for name, array in parts.items()}
    return replace(x, **parts), in_float64(replace(x, **wide))


def check_16_bits(x: LatentArguments, stored: str, *, layout: Any = np.copy, run: Any = once) -> None:
    """Compare rows and states of 16 bits with the definitions, by the roundings of each weight."""
    halves, exact = in_16_bits(x, stored, layout)
    Y, expected = run(forward, halves), definition.forward(exact)
    assert Y.dtype == halves.V.dtype
    largest = np.abs(exact.V).max(initial=1 if x.state is None else 4)
    if x.gate is not None:
        largest = max(largest, np.abs(x.gate_value).max())
    np.testing.assert_allclose(widened(Y), expected, rtol=0, atol=ROUNDINGS * UNIT[stored] * largest)
    found = summary(halves.K, halves.V, halves.mask, halves.offsets)
    for part, other in zip(found, definition.summary(exact.K, exact.V, exact.mask, exact.offsets), strict=True):
        scale = np.abs(other, where=np.isfinite(other), out=np.zeros_like(other)).max(initial=1)
        np.testing.assert_allclose(part, other, rtol=0, atol=2e-5 * largest * scale)


@pytest.fixture
def whole_runs(monkeypatch: pytest.MonkeyPatch, short_runs: None) -> None:
    """Runs as long as they are, which have several chunks."""
    monkeypatch.undo()
    emulator.on_host(monkeypatch)


def longer(options: dict[str, Any]) -> dict[str, Any]:
    """Options for four times as many positions."""
    numbers = {name: options[name] * 4 for name in ("U", "ahead") if name in options}
    bounds = {"offsets": [4 * bound for bound in options["offsets"]]} if "offsets" in options else {}
    return options | numbers | bounds


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("scale", [1, 30, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_16_bits_are_those_of_the_definitions(kind: str, scale: float, stored: str) -> None:
    x = mixture(40, (2, 55, 6, 4), dtype="float32", scale=scale, **KINDS[kind])
    x.K[0, :9, 2] = x.K[1, 11] = -np.inf
    check_16_bits(x, stored, run=in_orders if scale == 30 else once)


@pytest.mark.usefixtures("whole_runs")
@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("scale", [1, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_16_bits_of_whole_runs(kind: str, scale: float, stored: str) -> None:
    x = mixture(51, (1, 220, 6, 4), dtype="float32", scale=scale, **longer(KINDS[kind]))
    x.K[0, :70, 2] = x.K[0, 11] = -np.inf
    check_16_bits(x, stored, run=in_orders if scale == 30 else once)


LAYOUTS: dict[str, Any] = {
    "rows an odd number apart": lambda x: np.pad(x, ((0, 0), (0, 0), (0, 1 + x.shape[2] % 2)))[:, :, : x.shape[2]],
    "unaligned": lambda x: np.pad(x, ((0, 0), (0, 0), (1, 1)))[:, :, 1:-1],
    "in packs": lambda x: np.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % 8)))[:, :, : x.shape[2]],
    "columns apart": np.asfortranarray,
}


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_of_16_bits_lie_anywhere(layout: str, stored: str) -> None:
    x = mixture(41, (2, 21, 6, 4), dtype="float32", mask=True)
    check_16_bits(x, stored, layout=LAYOUTS[layout], run=in_orders)
    there, here = (in_16_bits(x, stored, kind)[0] for kind in (LAYOUTS[layout], np.copy))
    np.testing.assert_array_equal(forward(there), forward(here))


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize(("L", "D"), [(1, 1), (7, 66), (33, 64), (40, 131), (64, 65), (65, 128), (100, 64), (130, 5)])
def test_numbers_of_16_bits_of_any_size(L: int, D: int, stored: str) -> None:
    check_16_bits(mixture(42, (1, 80, L, D), dtype="float32", gate=True), stored, run=in_orders)


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("growth", [0.5, 3, 11, 40, 1000])
def test_logits_of_16_bits_that_grow_at_every_position(growth: float, stored: str) -> None:
    """A part of a chunk ends before each logit that is much larger, so a chunk may have a part for each position."""
    for L, D in ((20, 10), (24, 8)):  # the second ones lie in packs
        x = mixture(43, (1, 60, L, D), dtype="float32")
        x.K[:] += (growth * np.arange(60, dtype=np.float32))[:, None]
        x.K[0, :, 3] -= 2 * growth * np.arange(60, dtype=np.float32)
        check_16_bits(x, stored, run=in_orders)


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("causal", [True, False])
def test_equal_values_of_16_bits_are_given_back(causal: bool, stored: str) -> None:
    x = mixture(44, (1, 300, 5, 2), scale=3, dtype="float32", causal=causal)
    halves, exact = in_16_bits(replace(x, V=np.full_like(x.V, 3)), stored)
    np.testing.assert_allclose(widened(forward(halves)), exact.V, rtol=3 * UNIT[stored])


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("rise", [6.5, 6.9, 6.95, 9.6, 11.09])
@pytest.mark.parametrize("L", [1, 64, 300])
def test_logits_that_rise_at_once(L: int, rise: float, stored: str) -> None:
    """By what a chunk just holds, and more: sums are then large, and weights small, also of many latents."""
    x = mixture(53, (1, 64, L, 4), dtype="float32")
    x.Q[:], x.K[:], x.K[:, 0] = 0, rise, -0.0044
    check_16_bits(x, stored)


@pytest.mark.parametrize("size", [1e-300, 1e-42, 1e-30, 1e-10, 1e10, 1e38, 1e300])
@pytest.mark.parametrize("height", [0.0, -1e4, 1e4])
def test_given_states_of_any_size(height: float, size: float) -> None:
    """Sums that float32 does not hold are relative to another reference."""
    x = mixture(54, (1, 70, 5, 4), dtype="float32", state=True)
    m, s, S = x.state
    x = replace(x, state=(m + height, s * size, np.clip(S, -1, 1) * s[..., None] * size))
    np.testing.assert_allclose(forward(x), definition.forward(in_float64(x)), rtol=0, atol=2e-5)
    for stored in HALVES:
        halves, exact = in_16_bits(x, stored)
        room = ROUNDINGS * UNIT[stored] * max(1, np.abs(exact.V).max())
        np.testing.assert_allclose(widened(forward(halves)), definition.forward(exact), rtol=0, atol=room)


@pytest.mark.parametrize("L", [2, 130])
def test_the_largest_number_of_float16_is_given_back(L: int) -> None:
    for seed in range(10):
        x = mixture(seed, (1, 10, L, 1), dtype="float32")
        x.V[:] = 65504
        Y = widened(forward(in_16_bits(x, "float16")[0]))
        np.testing.assert_allclose(Y, 65504, rtol=ROUNDINGS * UNIT["float16"])


@pytest.mark.usefixtures("whole_runs")
@pytest.mark.parametrize("stored", HALVES)
def test_positions_of_equal_weight_lose_no_digits(stored: str) -> None:
    """Also once each is a small part of the sum."""
    x = mixture(45, (1, 3000, 3, 2), dtype="float32")
    x.K[:], x.K[:, 0], x.V[:, :, 1] = 0.3, 0, 1 / 3  # the first is the reference, so the others are rounded alike
    check_16_bits(x, stored)
    Y = widened(forward(in_16_bits(x, stored)[0]))[0, :, 1]
    np.testing.assert_allclose(Y, 1 / 3, rtol=3 * UNIT[stored])


@pytest.mark.usefixtures("whole_runs")
@pytest.mark.parametrize("stored", HALVES)
def test_what_comes_later_changes_no_bit_of_16(stored: str) -> None:
    x, rng = mixture(46, (2, 290, 5, 3), dtype="float32", gate=True), np.random.default_rng(47)
    whole = forward(in_16_bits(x, stored)[0])
    for n in (1, 33, 100, 250):
        for later in (0.0, 1e-30, 300, 1e8, np.inf, np.nan):
            parts = {name: getattr(x, name).copy() for name in PARTS}
            for part in parts.values():
                part[:, n:] = later * rng.standard_normal(part[:, n:].shape)
            with np.errstate(over="ignore"):
                changed = in_16_bits(replace(x, **parts), stored)[0]
            np.testing.assert_array_equal(forward(changed)[:, :n], whole[:, :n])
        shorter = replace(x, offsets=np.array([0, n]), **{name: getattr(x, name)[:, :n] for name in PARTS})
        np.testing.assert_array_equal(forward(in_16_bits(shorter, stored)[0]), whole[:, :n])


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("L", [5, 40, 100, 130])
def test_a_row_of_16_bits_has_the_same_bits_in_any_batch(L: int, causal: bool, stored: str) -> None:
    x = in_16_bits(mixture(48, (3, 70, L, 70), dtype="float32", causal=causal), stored)[0]
    one = replace(x, Q=x.Q[1:2], K=x.K[1:2], V=x.V[1:2])
    np.testing.assert_array_equal(forward(one), forward(x)[1:2])


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("value", [6e4, np.inf, -np.inf, np.nan])
def test_values_of_16_bits_reach_the_rows_that_see_them_alone(value: float, causal: bool, stored: str) -> None:
    x = mixture(49, (1, 90, 5, 4), dtype="float32", causal=causal)
    x.K[0, 30] = -np.inf
    before = widened(forward(in_16_bits(x, stored)[0]))
    x.V[0, 21, 1], x.V[0, 30] = value, np.nan  # no latent sees the second one
    Y = widened(forward(in_16_bits(x, stored)[0]))
    seen = 21 * causal
    np.testing.assert_array_equal(Y[0, :seen], before[0, :seen])
    assert not (np.abs(Y[0, seen:, 1]) < (10 if value == 6e4 else 6e4)).any()
    np.testing.assert_array_equal(Y[0, :, [0, 2, 3]], before[0, :, [0, 2, 3]])


@pytest.mark.usefixtures("whole_runs")
@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("case", ["a small weight", "a small share", "a later part"])
def test_values_that_are_not_finite_reach_rows_whatever_their_weights(case: str, value: float, stored: str) -> None:
    """In their chunk and after it, and the state, also where a weight is rounded to zero."""
    x, at = mixture(52, (1, 150, 2, 3), dtype="float32"), 5
    if case == "a small weight":
        x.K[:], x.K[0, at] = 0, -80
    elif case == "a small share":
        x.K[:], x.K[0, at, 1], x.Q[..., 0], x.Q[..., 1] = 0, -np.inf, -80, 0
    else:
        x.K[:, 20:] += 40
        at = 30
    before = widened(forward(in_16_bits(x, stored)[0]))
    x.V[0, at, 1] = value
    halves = in_16_bits(x, stored)[0]
    Y = widened(forward(halves))
    assert not np.isfinite(Y[0, at:, 1]).any()
    np.testing.assert_array_equal(Y[0, :at], before[0, :at])
    np.testing.assert_array_equal(Y[..., [0, 2]], before[..., [0, 2]])
    S = summary(halves.K, halves.V, halves.mask, halves.offsets)[2]
    assert not np.isfinite(S[..., 0, 1]).any()
    assert np.isfinite(S[..., [0, 2]]).all()


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("stored", HALVES)
def test_logits_of_16_bits_that_are_not_finite_reach_the_rows_that_see_them(stored: str, number: float) -> None:
    x = mixture(50, (5, 90, 3, 2), dtype="float32", gate=True)
    before = widened(forward(in_16_bits(x, stored)[0]))
    x.Q[0, 7, 1] = x.K[1, 19, 2] = x.K[2, 0, 0] = x.gate[4, 3] = number
    expected = before.copy()
    expected[0, 7] = expected[1, 19:] = expected[2] = expected[4, 3] = np.nan
    np.testing.assert_array_equal(widened(forward(in_16_bits(x, stored)[0])), expected)


# -- states ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("scale", [1, 300])
def test_summaries_are_those_of_the_definitions(scale: float, dtype: str) -> None:
    x = mixture(18, (2, 90, 7, 5), scale=scale, dtype=dtype, offsets=[0, 50, 50, 51, 90], mask=True)
    x.K[0, :50, 2] = -np.inf
    found = in_orders(summary, x.K, x.V, x.mask, x.offsets)
    expected = definition.summary(x.K.astype(np.float64), x.V.astype(np.float64), x.mask, x.offsets)
    for part, other in zip(found, expected, strict=True):
        assert part.dtype == np.float64
        np.testing.assert_allclose(part, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    np.testing.assert_array_equal(found[0], expected[0])


def test_states_between_numbers_of_single_precision() -> None:
    x = mixture(20, (1, 20, 3, 2), dtype="float32", state=True)
    m, s, S = x.state
    check(replace(x, state=(m + 300 / 7, s, S), K=x.K + 43))


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (7, 1), (0, 3, 2), (3, 0)])
def test_joined_states_are_those_of_the_definitions(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(25)
    states = [(300 * rng.standard_normal(shape[:-1]), rng.random(shape[:-1]), rng.random(shape)) for _ in range(2)]
    for (m, s, S), nothing in zip(states, (np.s_[..., 0:2], np.s_[..., 1:3]), strict=True):
        m[nothing], s[nothing], S[(*nothing, slice(None))] = -np.inf, 0, 0
    found = in_orders(joined, *states)
    for part, other in zip(found, definition.joined(*states), strict=True):
        assert part.shape == other.shape
        np.testing.assert_allclose(part, other, rtol=1e-14)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_what_comes_later_changes_no_bit(dtype: str) -> None:
    x, rng = mixture(23, (2, 150, 5, 3), dtype=dtype, gate=True), np.random.default_rng(24)
    a = rng.random((2, 150, 3)).astype(dtype)
    whole, scanned = forward(x), decayed_scan(a, x.V)
    for n in (1, 15, 33, 100):
        for later in (0.0, 1e-30, 1e8, np.inf, np.nan):
            parts = {name: getattr(x, name).copy() for name in PARTS}
            for part in parts.values():
                part[:, n:] = later * rng.standard_normal(part[:, n:].shape)
            np.testing.assert_array_equal(forward(replace(x, **parts))[:, :n], whole[:, :n])
            np.testing.assert_array_equal(decayed_scan(a, parts["V"])[:, :n], scanned[:, :n])
        shorter = replace(x, offsets=np.array([0, n]), **{name: getattr(x, name)[:, :n] for name in PARTS})
        np.testing.assert_array_equal(forward(shorter), whole[:, :n])
        np.testing.assert_array_equal(decayed_scan(a[:, :n], x.V[:, :n]), scanned[:, :n])


# -- linear recurrences ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("T", [0, 1, 15, 16, 17, 256, 257, 530])
@pytest.mark.parametrize("C", [1, 33])
def test_decayed_scans_are_recurrences(C: int, T: int, dtype: str) -> None:
    rng = np.random.default_rng([C, T])
    a, x, first = rng.random((2, T, C)).astype(dtype), rng.standard_normal((2, T, C)).astype(dtype), None
    a[:, ::9] = 0
    for first in (None, rng.standard_normal((2, C)).astype(dtype)):
        h, expected = np.zeros((2, C)) if first is None else first.astype(np.float64), np.zeros((2, T, C))
        for t in range(T):
            h = expected[:, t] = a[:, t] * h + x[:, t]
        found = in_orders(decayed_scan, a, x, first)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, expected, rtol=0, atol=20 * np.finfo(dtype).eps)
    r, expected = np.zeros((2, C)), np.zeros((2, T, C))
    for t in range(T)[::-1]:
        r = expected[:, t] = x[:, t] + (a[:, t + 1] * r if t + 1 < T else 0)
    found = in_orders(lambda: decayed_scan(a, x, reverse=True))
    np.testing.assert_allclose(found, expected, rtol=0, atol=20 * np.finfo(dtype).eps)


@pytest.mark.parametrize("reverse", [False, True])
def test_decayed_scans_read_nothing_of_what_is_before_a_zero(reverse: bool) -> None:
    rng = np.random.default_rng(22)
    a, x = rng.random((1, 300, 2)), rng.standard_normal((1, 300, 2))
    a[:, 40:80] *= 1e-30  # products of these underflow, and are no zeros of their own
    a[:, 198] = np.nan  # and what is composed of it and of a zero behind it
    a[:, [7, 100, 200, 201]] = 0
    x[:, [3, 50, 150, 200]] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        expected = cpu.decayed_scan(a, x, reverse=reverse)
        found = in_orders(lambda: decayed_scan(a, x, reverse=reverse))
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    assert np.isfinite(found).any()
    np.testing.assert_allclose(found[np.isfinite(found)], expected[np.isfinite(found)], rtol=1e-13)


def test_decayed_scans_of_any_layout() -> None:
    rng = np.random.default_rng(21)
    a, x = rng.random((1, 40, 5)), rng.standard_normal((40, 3, 5)).swapaxes(0, 1)
    wide_a = np.broadcast_to(a, (3, 40, 5))
    expected = decayed_scan(wide_a.copy(), x.copy())
    np.testing.assert_array_equal(decayed_scan(wide_a, x), expected)
    np.testing.assert_array_equal(decayed_scan(a, x), expected)
    assert decayed_scan(a.astype(np.float32), x).dtype == np.float64


# -- arrays as strict as CuPy's --------------------------------------------------------


def test_the_table_takes_arrays_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def results(table: Any, x: LatentArguments, dY: Any) -> list[Any]:
        everywhere = replace(x, causal=False)
        return [
            *(table.forward(x), *table.backward(x, dY), table.forward(everywhere), *table.backward(everywhere, dY)),
            *table.summary(x.K, x.V, x.mask, x.offsets),
            table.decayed_scan(x.gate[..., None], x.V[..., :1]),
        ]

    x = mixture(22, (2, 40, 4, 3), dtype="float32", gate=True, mask=True, state=True)
    dY = np.random.default_rng(23).standard_normal(x.V.shape).astype(np.float32)
    expected = results(latent_cuda, x, dY)
    cupy = emulated.library_on_device(monkeypatch)
    there = replace(
        x,
        **{name: cupy.asarray(getattr(x, name)) for name in (*PARTS, "mask")},
        state=tuple(map(cupy.asarray, x.state)),
    )
    table = kernels_for("latent", there.Q)
    assert table.forward is latent_cuda.forward
    found = results(table, there, cupy.asarray(dY))
    assert all(isinstance(part, type(cupy.zeros(1))) for part in found)
    assert_same([part.get() for part in found], expected)
