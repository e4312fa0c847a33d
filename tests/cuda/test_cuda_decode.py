"""Decode steps over a compressed cache on a CUDA device, run on the CPU, against the definition in float64.

Inside: a kernel is compared with the definition, at the borders of its chunks and packs, and launches are counted.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from emulator import in_orders
from levattn._kernels.pruned import cuda_decode
from levattn._kernels.pruned.cuda_decode import Codes, HeldSlots, attend_token, chunk_of, head_list

FORMATS = ("float32", "float16", "bfloat16")
SUMS = 3e-6  # the error of sums in float32, of values of about 1
ROUNDING = {"float32": 0.0, "float16": 1.01 * 2.0**-11, "bfloat16": 1.01 * 2.0**-8}  # of the output, to its format


def rounded(X: NDArray[Any], format: str) -> Any:
    """Numbers in a format; bfloat16 in words."""
    if format != "bfloat16":
        return X.astype(format)
    bits = X.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(X: Any) -> NDArray[Any]:
    """The numbers in float64."""
    return ((X.astype(np.uint32) << 16).view(np.float32) if X.dtype == np.uint16 else X).astype(np.float64)


@dataclass(frozen=True)
class Step:
    """A token that attends to slots of some heads, and to the tokens after them."""

    q: Any
    slots: tuple[Any, Any, Any]
    near: tuple[Any, Any, Any]
    heads: tuple[int, ...]
    scale: float = 0.3
    softcap: float | None = None

    def run(self) -> Any:
        """The output (B, H, 1, D), NaN for other heads."""
        D = self.near[1].shape[3]
        Y = np.full((*self.q.shape[:3], D), 0x7FC0 if self.q.dtype == np.uint16 else np.nan, self.q.dtype)
        assert self.writes(Y)
        return Y

    def writes(self, Y: Any) -> bool:
        """Whether kernels can write the output."""
        held = HeldSlots.of(*self.slots, self.heads, self.q.dtype.itemsize)
        given = self.near, self.scale, self.softcap, Y, partial(np.full, fill_value=np.nan, dtype=np.float32)
        return held is not None and attend_token(self.q, held, *given)

    def defined(self) -> NDArray[Any]:
        """The output by its definition, in float64."""
        (B, H), D = self.q.shape[:2], self.slots[1].shape[3]
        r, t = H // self.near[0].shape[1], self.near[0].shape[2]
        Y = np.full((B, H, 1, D), np.nan)
        weights, present = self.slots[2], self.near[2]
        for b, (g, head) in product(range(B), enumerate(self.heads)):
            K = widened(np.concatenate([self.slots[0][b, g], self.near[0][b, head]]))
            V = widened(np.concatenate([self.slots[1][b, g], self.near[1][b, head]]))
            bias = np.zeros(len(K))
            if weights is not None:
                bias[: len(K) - t] = weights[b, g]
            if present is not None:
                bias[len(K) - t :][~present[b] & (np.arange(t) < t - 1)] = -np.inf
            for h in range(head * r, (head + 1) * r):
                z = K @ widened(self.q[b, h, 0]) * self.scale
                z = (z if self.softcap is None else self.softcap * np.tanh(z / self.softcap)) + bias
                p = np.exp(z - z.max()) if z.max() > -np.inf else np.full(len(z), np.nan)
                there = p > 0
                Y[b, h, 0] = p[there] @ V[there] / p.sum()
        return Y


def drawn(
    s: int,
    t: int,
    d: int = 8,
    D: int = 8,
    *,
    format: str = "float32",
    B: int = 2,
    heads: tuple[int, ...] = (0, 1),
    all_heads: int = 2,
    r: int = 2,
    weighted: bool = True,
    padded: bool = False,
    size: float = 1.0,
    **options: Any,
) -> Step:
    """Rows at random; some slots are hidden, and some later tokens are padding."""
    rng = np.random.default_rng(s + 1000 * t + d)

    def rows(*shape: int) -> Any:
        return rounded(rng.standard_normal(shape), format)

    q = rounded(size * rng.standard_normal((B, r * all_heads, 1, d)), format)
    weights = rng.standard_normal((B, len(heads), s)).astype(np.float32) if weighted else None
    if weights is not None:
        weights[rng.random(weights.shape) < 0.2] = -np.inf
    present = rng.random((B, t)) < 0.5 if padded else None
    slots = rows(B, len(heads), s, d), rows(B, len(heads), s, D), weights
    near = rows(B, all_heads, t, d), rows(B, all_heads, t, D), present
    return Step(q, slots, near, heads, **options)


def check(step: Step, *, run: Any = in_orders) -> None:
    format = "bfloat16" if step.q.dtype == np.uint16 else step.q.dtype.name
    found = run(step.run)
    np.testing.assert_allclose(widened(found), step.defined(), rtol=ROUNDING[format], atol=SUMS)


@pytest.fixture(autouse=True)
def _host(host: None) -> None:
    """Launches take arrays of numpy."""


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("r", [1, 2, 3, 5, 9])
@pytest.mark.parametrize(("d", "D"), [(5, 5), (40, 40), (64, 64), (80, 80), (128, 128), (136, 136), (8, 24), (1, 3)])
def test_rows_are_those_of_the_definition(d: int, D: int, r: int, format: str) -> None:
    check(drawn(70, 9, d, D, format=format, r=r, B=1, heads=(0,), all_heads=1), run=lambda run: run())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_weights_padding_and_bounds_of_logits(
    weighted: bool, padded: bool, softcap: float | None, format: str
) -> None:
    check(drawn(21, 13, format=format, weighted=weighted, padded=padded, softcap=softcap))


@pytest.mark.parametrize("s", [0, 1, 63, 64, 65, 128, 300])
@pytest.mark.parametrize("t", [0, 1, 64, 65])
def test_lengths_around_the_borders_of_chunks(s: int, t: int) -> None:
    if s + t:
        check(drawn(s, t, weighted=s % 2 > 0, padded=True), run=lambda run: run())


@pytest.mark.parametrize("chunk", [64, 128, 256])
@pytest.mark.parametrize("r", [1, 4, 8])
def test_chunks_of_any_length(chunk: int, r: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_decode, "chunk_of", lambda _s, _t: chunk)
    for format in ("float32", "bfloat16"):
        check(drawn(chunk + 40, 30, 16, 24, format=format, r=r, B=1))


def test_chunks_grow_with_the_number_of_keys() -> None:
    found = [chunk_of(n // 2, n - n // 2) for n in (0, 1, 8192, 8193, 16384, 16385, 10**6)]
    assert found == [64, 64, 64, 128, 128, 256, 256]


def test_many_chunks_are_joined() -> None:
    step = drawn(64 * 70, 5, 4, 4, B=1, heads=(0,), all_heads=1)
    check(step, run=lambda run: run())


@pytest.mark.parametrize("D", [129, 520, 1040])
def test_wide_values(D: int) -> None:
    """More columns than a block joins, and more than a thread each."""
    for format in ("float32", "float16"):
        check(drawn(9, 3, 8, D, format=format, B=1), run=lambda run: run())


@pytest.mark.parametrize("format", FORMATS)
def test_slots_of_some_heads(format: str) -> None:
    """The other rows stay as they were."""
    for heads in ((1, 2), (0, 3), (0, 2, 3)):
        check(drawn(12, 7, heads=heads, all_heads=5, format=format, padded=True))


def test_heads_are_listed_by_bits() -> None:
    assert head_list((3,)) == (3, 0)
    assert head_list((3, 4, 5)) == (3, 0)
    assert head_list((3, 5, 66)) == (3, 1 | 1 << 2 | 1 << 63)
    assert head_list((3, 5, 67)) is None


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("margin", [1, 4, 8])
def test_views_are_read_where_they_lie(format: str, margin: int) -> None:
    """Heads and rows of larger arrays, whose rows begin at packs of 16 bytes or not."""
    step = drawn(70, 9, 16, 8, format=format, padded=True)

    def apart(X: Any, axes: int) -> Any:
        if X is None:
            return None
        larger = np.full([size + 2 * margin for size in X.shape[:axes]] + [*X.shape[axes:]], 1, X.dtype)
        larger = np.concatenate([larger, larger], -1) if axes < X.ndim else larger
        view = larger[(slice(margin, -margin),) * axes]
        view = view[..., margin : margin + X.shape[-1]] if axes < X.ndim else view
        view[...] = X
        return view

    q = apart(step.q, 2)
    turned = np.repeat(step.near[2], 2, axis=1)[:, ::2]
    slots = (*(apart(X, 3) for X in step.slots[:2]), apart(step.slots[2], 2))
    near = (*(apart(X, 3) for X in step.near[:2]), turned)
    other = replace(step, q=q, slots=slots, near=near)
    check(other)
    heads_last = tuple(np.ascontiguousarray(X.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for X in step.near[:2])
    np.testing.assert_array_equal(replace(step, near=(*heads_last, step.near[2])).run(), step.run())
    if margin == 8 or (margin == 4 and format == "float32"):
        np.testing.assert_array_equal(other.run(), step.run())


@pytest.mark.parametrize("format", FORMATS)
def test_no_bit_depends_on_the_batch_or_on_other_heads(format: str) -> None:
    step = drawn(200, 70, 16, 16, format=format, B=3, heads=(0, 1, 2), all_heads=3, padded=True, softcap=2.0)
    whole = step.run()
    for b in range(3):
        slots, near = (tuple(X[b : b + 1] for X in part) for part in (step.slots, step.near))
        found = replace(step, q=step.q[b : b + 1], slots=slots, near=near).run()
        np.testing.assert_array_equal(found, whole[b : b + 1])
    slots = tuple(X[:, 1:2] for X in step.slots)
    found = replace(step, slots=slots, heads=(1,)).run()
    np.testing.assert_array_equal(found[:, 2:4], whole[:, 2:4])


@pytest.mark.parametrize("size", [1e-30, 1e-3, 30.0, 1e4, 1e30])
def test_logits_of_any_size(size: float) -> None:
    step = drawn(150, 20, 4, 4, size=size, weighted=size < 1)
    found, expected = step.run(), step.defined()
    np.testing.assert_allclose(found, expected, rtol=0, atol=SUMS * max(1.0, min(size, 1e2)))


def test_chunks_without_a_visible_slot_count_for_nothing() -> None:
    step = drawn(200, 70, padded=True)
    step.slots[2][0, 0, :64] = step.slots[2][1, 1] = -np.inf
    step.near[2][1] = False
    check(step)


def test_a_row_that_sees_nothing_is_no_number() -> None:
    """As in the softmax of torch; later tokens always have one that counts."""
    step = drawn(70, 0)
    step.slots[2][0, 1] = -np.inf
    found = step.run()
    assert np.isnan(found[0, 2:]).all()
    assert np.isfinite(found[0, :2]).all()
    assert np.isfinite(found[1]).all()
    np.testing.assert_allclose(found, step.defined(), rtol=0, atol=SUMS)


def test_numbers_that_are_not_finite_reach_their_rows() -> None:
    step = drawn(80, 70, B=1, weighted=False)
    step.near[0][0, 0, 66, 3] = step.slots[1][0, 1, 2, 5] = np.nan
    found = step.run()
    assert np.isnan(found[0, :2]).all()
    assert np.isnan(found[0, 2:, 0, 5]).all()
    assert np.isfinite(np.delete(found[0, 2:, 0], 5, axis=1)).all()


def test_the_sum_of_equal_logits_is_a_mean() -> None:
    step = drawn(500, 300, 8, 8, B=1, weighted=False, size=0.0)
    for g in range(2):
        mean = np.concatenate([step.slots[1][0, g], step.near[1][0, g]]).astype(np.float64).mean(0)
        np.testing.assert_allclose(step.run()[0, 2 * g : 2 * g + 2, 0], [mean] * 2, rtol=0, atol=1e-6)


def test_what_kernels_cannot_do_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def done(step: Step) -> bool:
        Y = np.zeros((*step.q.shape[:3], step.slots[1].shape[3]), np.float32)
        return step.writes(Y)

    assert done(drawn(9, 3))
    assert not done(drawn(9, 3, heads=(0, 70, 72), all_heads=73, r=1))
    assert not done(drawn(9, 3, 0, 4))
    assert not done(drawn(9, 3, 4, 0))
    monkeypatch.setattr(cuda_decode, "shared_limit", lambda: 4096)
    assert not done(drawn(9, 3))


def test_no_sequence() -> None:
    assert drawn(9, 3, B=0).run().shape == (0, 4, 1, 8)


def coded(X: Any, format: str, bits: int, *, columns: bool) -> tuple[Codes, Any]:
    """Rows as codes, and the numbers in their format that these stand for."""
    torch = pytest.importorskip("torch")
    from levattn.integrations.transformers.compression.coding import Coded

    rows = torch.from_numpy(np.ascontiguousarray(X)).to(getattr(torch, format))
    codes = in_main_memory(Coded.of(rows, bits, columns=columns).stored)
    out = np.full(codes.shape, 7, np.uint16 if format == "bfloat16" else format)
    cuda_decode.open_codes(codes, out)
    return codes, out


def in_main_memory(codes: Codes) -> Codes:
    """The same with arrays of numpy."""
    torch = pytest.importorskip("torch")
    lows, steps = (array.view(torch.int16).numpy().view(np.uint16) for array in (codes.lows, codes.steps))
    sizes, means = (None if array is None else array.numpy() for array in (codes.sizes, codes.means))
    return Codes(codes.codes.numpy(), lows, steps, sizes, means, codes.width, codes.bits)


def of_codes(step: Step, format: str, bits: int) -> tuple[Step, Step]:
    """A step whose slots are codes, and the same with the numbers that they stand for."""
    d = step.q.shape[3]
    K, V = (widened(rows) for rows in step.slots[:2])
    keys, opened_keys = coded(K * np.logspace(-2, 2, d) + 1, format, bits, columns=True)
    values, opened_values = coded(V, format, bits, columns=False)
    q = rounded(widened(step.q) / np.logspace(-2, 2, d), format)
    return (
        replace(step, q=q, slots=(keys, values, step.slots[2])),
        replace(step, q=q, slots=(opened_keys, opened_values, step.slots[2])),
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("r", [1, 2, 3, 9])
@pytest.mark.parametrize(("d", "D"), [(64, 64), (128, 128), (16, 32), (32, 384)])
def test_codes_are_read_as_the_numbers_that_they_stand_for(d: int, D: int, r: int, bits: int, format: str) -> None:
    """To the last bit, at borders of chunks and with blocks of columns."""
    some = drawn(70, 9, d, D, format=format, r=r, B=1, heads=(0, 2), all_heads=3, padded=True)
    codes, numbers = of_codes(some, format, bits)
    np.testing.assert_array_equal(in_orders(codes.run), numbers.run())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("s", "t"), [(0, 5), (1, 0), (64, 64), (129, 1), (300, 70)])
def test_codes_of_any_number_of_slots(s: int, t: int, bits: int) -> None:
    codes, numbers = of_codes(drawn(s, t, 64, 64, format="bfloat16", weighted=s % 2 > 0), "bfloat16", bits)
    np.testing.assert_array_equal(codes.run(), numbers.run())


def test_copies_of_held_slots_are_read_alike() -> None:
    """As a cache is copied or pickled between two tokens."""
    for step in of_codes(drawn(70, 9, 64, 64, format="bfloat16"), "bfloat16", 8):
        Y, held = step.run(), HeldSlots.of(*step.slots, step.heads, 2)
        for other in (copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
            found = np.full_like(Y, 0x7FC0)
            given = step.near, step.scale, step.softcap, found, partial(np.empty, dtype=np.float32)
            assert attend_token(step.q, other, *given)
            np.testing.assert_array_equal(found, Y)


def test_codes_that_do_not_lie_in_packs_are_left_to_others() -> None:
    for d, bits, fits in ((64, 8, True), (64, 4, True), (20, 8, False), (72, 4, False), (5, 8, False)):
        codes, _ = of_codes(drawn(9, 3, d, 64, format="float16"), "float16", bits)
        assert (HeldSlots.of(*codes.slots, codes.heads, 2) is not None) == fits
    step, _ = of_codes(drawn(9, 3, 64, 64, format="float16"), "float16", 8)
    near = np.zeros((2, 2, 3, 65), np.float16)[..., 1:]  # rows that do not begin at packs
    assert not replace(step, near=(near, near, None)).writes(np.zeros((*step.q.shape[:3], 64), np.float16))
    mixed = replace(step, slots=(step.slots[0], step.near[1], None))
    assert not mixed.writes(np.zeros((*step.q.shape[:3], 64), np.float16))


@pytest.mark.parametrize("format", FORMATS)
def test_codes_that_begin_between_packs_are_left_to_others(format: str) -> None:
    """As a part of a larger array of bytes may begin; a device stops at such an address."""
    step, numbers = of_codes(drawn(9, 3, 64, 64, format=format), format, 8)
    keys, values, weights = step.slots

    def moved(codes: Codes, by: int) -> Codes:
        room = np.zeros(codes.codes.size + by, np.uint8)
        room[by:] = codes.codes.reshape(-1)
        return codes._replace(codes=room[by:].reshape(codes.codes.shape))

    pack = 4 if format == "float32" else 8  # numbers, and so bytes of codes, that are read at once
    for by, fits in ((1, False), (pack // 2, False), (pack, True), (16, True)):
        for slots in ((moved(keys, by), values, weights), (keys, moved(values, by), weights)):
            other = replace(step, slots=slots)
            assert (HeldSlots.of(*other.slots, other.heads, 16 // pack) is not None) == fits
            if fits:
                np.testing.assert_array_equal(other.run(), numbers.run())


@pytest.mark.cuda
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("bits", "d"), [(8, 5), (8, 64), (8, 300), (4, 5), (4, 32), (4, 72)])
def test_codes_are_opened_in_one_launch(bits: int, d: int, format: str, *, columns: bool) -> None:
    torch = pytest.importorskip("torch")
    from levattn.integrations.transformers.compression.coding import Coded

    rows = torch.randn((2, 3, 11, d), generator=torch.Generator().manual_seed(d)) * torch.logspace(-2, 2, d) + 1
    coded = Coded.of(rows.to(getattr(torch, format)), bits, columns=columns)
    held, out = in_main_memory(coded.stored), np.full(coded.shape, 7, np.uint16 if format == "bfloat16" else format)

    def called(*_: Any) -> Any:
        cuda_decode.open_codes(held, out)
        return out.copy()

    found, expected = widened(in_orders(called)), coded.opened().double().numpy()
    room = (ROUNDING[format] + 4e-7) * np.abs(expected) + 1e-6 * np.abs(expected).max((0, 1, 2))
    assert (np.abs(found - expected) <= room).all()


def test_codes_of_more_rows_than_a_grid_has_are_left_to_others() -> None:
    """Two million rows of a head; nothing is launched, so the numbers need no memory."""
    shape = (2, 3, 65535 * 32 + 1, 8)
    codes = np.broadcast_to(np.zeros((), np.uint8), shape)
    scales = np.broadcast_to(np.zeros((), np.uint16), (*shape[:-1], 1))
    rows = np.broadcast_to(np.zeros((), np.float32), shape)
    assert not cuda_decode.open_codes(Codes(codes, scales, scales, None, None, 8, 8), rows)
