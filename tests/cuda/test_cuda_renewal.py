"""Causal selections on a CUDA device, run on the CPU: one kernel renews slots in turn, as that of main memory does.

Inside: kernels are compared with those of main memory, at the limits of their memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from emulator import in_orders
from levattn._core.device import where_arrays_are
from levattn._kernels.pruned import PrunedArguments, RenewalArguments, Summaries, cpu, cuda_renewal, mapped
from levattn.attention import Selection, causal_pruned_attention
from levattn.exceptions import NonFiniteError
from libraries import HAS_TORCH

if not HAS_TORCH:
    pytest.skip("needs torch", allow_module_level=True)

import torch

from levattn._kernels.pruned import torch as fused_kernels

NAMES = ("weight", "keys", "values", "offset", "count")
RENEWALS: list[dict[str, Any]] = [
    {},
    {"residual": False},
    {"R": 0},
    {"R": 0, "residual": False},
    {"d": 1, "D": 1, "n": 1, "R": 1},
    {"d": 70, "D": 33, "R": 9},
    {"D": 1, "sinks": 2, "turns": 1},
    {"s": 0, "before": 0, "turns": 1, "in_turn": False, "bounded": False},
    {"s": 2, "before": 3, "R": 7, "turns": 1, "in_turn": False},
    {"before": 0, "turns": 1, "in_turn": False},
    {"R": 40, "n": 7},
]


def renewal(
    b: int = 2,
    *,
    n: int = 11,
    s: int = 8,
    before: int = 5,
    R: int = 5,
    d: int = 6,
    D: int = 4,
    turns: int = 3,
    sinks: int = 0,
    residual: bool = True,
    in_turn: bool = True,
    bounded: bool = True,
) -> RenewalArguments:
    """Renewals of random slots; one summary has no members."""
    rng = np.random.default_rng(n + s + R + d)
    before = R if in_turn else before
    held = None
    if before:
        count = rng.integers(1, 9, (b, before)).astype(np.float64)
        count[0, -1] = 0
        weight = count * rng.uniform(0.5, 2, count.shape)
        sums = (rng.standard_normal((b, before, width)) * weight[..., None] for width in (d, D))
        held = Summaries(weight, *sums, rng.standard_normal(count.shape) * weight, count)
    queries = rng.standard_normal((turns * b, 3 * d + 1, d)) + rng.standard_normal(d)
    count = queries.shape[1]
    return RenewalArguments(
        kept=rng.standard_normal((b, s, d)).astype(np.float32),
        kept_values=rng.standard_normal((b, s, D)).astype(np.float32),
        kept_places=np.tile(np.arange(s, dtype=np.int64), (b, 1)),
        keys=rng.standard_normal((b, turns * n, d)).astype(np.float32),
        values=rng.standard_normal((b, turns * n, D)).astype(np.float32),
        oldest=s + before,
        summaries=held,
        radius=None if held is None else rng.uniform(0, 1, held.weight.shape),
        total=queries.sum(1) * np.repeat(1 + np.arange(turns), b)[:, None],
        second=queries.mT @ queries * np.repeat(1 + np.arange(turns), b)[:, None, None],
        queries=tuple(count * (turn + 1) for turn in range(turns)),
        origin=rng.standard_normal((turns * b, d)).astype(np.float32) / 4,
        size=s - sinks if in_turn else 6,
        sinks=sinks,
        R=R,
        residual=residual,
        bounded=bounded and R > 0,
        in_turn=in_turn,
    )


def renewed_there(x: RenewalArguments) -> tuple[Any, ...]:
    """What the kernel of a device writes, absent arrays as zeros."""
    new, sound, finite = cuda_renewal.renew_slots(x)
    assert sound.all()
    assert finite.all()
    return tuple(np.zeros(0) if array is None else array for array in new)


def check(x: RenewalArguments) -> None:
    """The slots are those of main memory, and no order of threads changes a bit."""
    found = in_orders(renewed_there, x)
    answer = cpu.renewed(x)
    assert answer is not None
    kept, values, places, held, radius, faults = answer
    assert faults is None
    np.testing.assert_array_equal(found[2], places)
    np.testing.assert_array_equal(found[0], kept)
    np.testing.assert_array_equal(found[1], values)
    if held is None:
        assert not any(array.size for array in found[3:])
        return
    sums = dict(zip(("keys", "values", "weight", "offset", "count"), found[3:8], strict=True))
    np.testing.assert_array_equal(sums["count"], held.count)
    for name in NAMES:
        size = 1 + np.abs(vars(held)[name]).max()
        np.testing.assert_allclose(sums[name], vars(held)[name], rtol=0, atol=2e-5 * size)
    if radius is not None:
        np.testing.assert_allclose(found[8], radius, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("shape", RENEWALS, ids=str)
def test_slots_are_those_of_main_memory(shape: dict[str, Any]) -> None:
    check(renewal(**shape))


@pytest.mark.usefixtures("roomy")
def test_slots_of_more_columns_than_a_small_card_factors() -> None:
    check(renewal(d=130, D=140, n=9, s=3))


@pytest.mark.usefixtures("main_memory", "host")
def test_a_small_card_leaves_them_to_launches_of_their_own() -> None:
    """Its blocks have 99 KiB of shared memory."""
    assert cuda_renewal.can_renew(108, 140, (8, 5), 9)
    assert not cuda_renewal.can_renew(130, 140, (8, 5), 9)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("rows", [0, 8, 16, 24])
def test_rows_beyond_shared_memory_are_read_elsewhere(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = renewal()
    n = 5 + 8 + 11
    fixed = cuda_renewal._RENEWING + cuda_renewal._renewal_bytes(n, x.R, 6, rows)
    monkeypatch.setattr(cuda_renewal, "shared_limit", lambda: fixed)
    check(x)


@pytest.mark.usefixtures("host")
def test_equal_keys_are_chosen_in_their_order() -> None:
    """Scores that tie, and clusters of equal rows: on ties the first counts."""
    x = renewal(n=12, R=4)
    rows = np.repeat(np.random.default_rng(0).integers(-2, 3, (2, 9, 6)), 4, axis=1).astype(np.float32)
    check(replace(x, keys=rows, origin=np.zeros_like(x.origin)))


@pytest.mark.usefixtures("host")
def test_a_sequence_alone_has_the_same_bits() -> None:
    x, b, turns = renewal(3), 3, 3
    whole = renewed_there(x)
    for i in range(b):
        one = slice(i, i + 1)
        apart = replace(
            x,
            **{
                name: vars(x)[name][one] for name in ("kept", "kept_values", "kept_places", "keys", "values", "radius")
            },
            summaries=Summaries(*(array[one] for array in vars(x.summaries).values())),
            **{name: vars(x)[name][i::b] for name in ("total", "second", "origin")},
        )
        for found, expected in zip(renewed_there(apart), whole, strict=True):
            assert len(found) == turns + 1
            np.testing.assert_array_equal(found, expected[i::b])


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("fault", ["NaN in a key", "a key too long", "no moment", "infinite queries"])
def test_faults_are_flagged_and_nothing_is_written_elsewhere(fault: str) -> None:
    x = renewal()
    keys, second = x.keys.copy(), x.second.copy()
    if fault == "NaN in a key":
        keys[1, 13] = np.nan
    elif fault == "a key too long":
        keys[1, 13] = 3e38
    elif fault == "no moment":
        second[3] = -second[3]
    else:
        second[3, 0, 0] = np.inf
    _, sound, finite = cuda_renewal.renew_slots(replace(x, keys=keys, second=second))
    flags = np.stack([*sound, finite]).reshape(3, 3, 2)  # the kind, the renewal, the sequence
    assert flags[:, 0].all()
    assert flags[..., 0].all()
    assert not flags[{"infinite queries": 0, "no moment": 1}.get(fault, 2), 1, 1]


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint16"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1), (2, 3, 24, 5, 4), (3, 2, 70, 33, 2), (1, 1, 300, 64, 1), (2, 2, 5000, 3, 1)], ids=str
)
def test_sums_of_rows_are_those_of_each_chunk(shape: tuple[int, ...], dtype: str) -> None:
    """Of a view, in any order of threads; words of 16 bits are of bfloat16."""
    b, g, n, d, chunks = shape
    X = np.random.default_rng(n).integers(-9, 10, (b, g, n, d + 2)).astype(np.float32)
    given = (X.view(np.uint32) >> 16).astype(np.uint16) if dtype == "uint16" else X.astype(dtype)
    sums = in_orders(cuda_renewal.row_sums, given[..., 1:-1], chunks)
    parts = X[..., 1:-1].astype(np.float64).reshape(b, g, chunks, n // chunks, d)
    np.testing.assert_array_equal(sums, parts.sum((1, 3)).transpose(1, 0, 2).reshape(chunks * b, d))


@pytest.mark.usefixtures("host")
def test_sums_run_on_from_chunk_to_chunk() -> None:
    sums, before = np.random.default_rng(0).standard_normal((5, 2, 7, 7)), np.ones((2, 7, 7))
    expected = cpu.definition.running(sums.copy(), before)
    np.testing.assert_array_equal(in_orders(lambda: cuda_renewal.running(sums.copy(), before)), expected)


def drawn(b: int, g: int, T: int, d: int = 24, D: int = 16) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(T)
    sizes = (b, g, T, d), (b, 1, T, d), (b, 1, T, D)
    return tuple(torch.randn(*size, generator=generator) for size in sizes)


SELECTIONS: list[Any] = [
    Selection(64),
    Selection(64, scores="expected"),
    Selection(64, summaries=0),
    Selection(size=20, window=8, sinks=2, renew_every=50),
    Selection(80, window=0, summaries=30),
]


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_calls_are_those_of_main_memory(selection: Any, tensors: Any) -> None:
    """At once, and continued from a state at any place: outputs, kept keys and bounds."""
    there, _, _ = tensors
    given = drawn(2, 2, 280)
    exact, kept = causal_pruned_attention(*given, selection, return_state=True)
    Q, K, V = (there.CudaTensor(X, 1) for X in given)
    for cuts in ([280], [100, 101, 233, 280]):
        state, low, parts = selection, 0, []
        for high in cuts:
            rows = (X[:, :, low:high] for X in (Q, K, V))
            Y, state = causal_pruned_attention(*rows, state, return_state=True)
            parts.append(Y.inner)
            low = high
        torch.testing.assert_close(torch.cat(parts, 2), exact, rtol=0, atol=1e-5)
        for one, two in zip(state.parts, kept.parts, strict=True):
            np.testing.assert_array_equal(one.kept_places.inner.numpy(), two.kept_places)
            assert one.positions == two.positions
            if two.radius is not None:
                np.testing.assert_allclose(one.radius.inner.numpy(), two.radius, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_tokens_one_by_one_take_the_kernels_of_a_token(selection: Any, dtype: str, tensors: Any) -> None:
    """They read slots, their logarithms and recent keys."""
    there, _, made = tensors
    given = [X.to(getattr(torch, dtype)) for X in drawn(2, 2, 230)]
    exact, _ = causal_pruned_attention(*(X.float() for X in given), selection, return_state=True)
    Q, K, V = (there.CudaTensor(X, 1) for X in given)
    Y, state = causal_pruned_attention(*(X[:, :, :180] for X in (Q, K, V)), selection, return_state=True)
    parts = [Y.inner]
    for t in range(180, 230):
        made.ran.clear()
        Y, state = causal_pruned_attention(*(X[:, :, t : t + 1] for X in (Q, K, V)), state, return_state=True)
        assert not {"bmm", "_safe_softmax", "log", "_scaled_dot_product_flash_attention"} & set(made.ran)
        parts.append(Y.inner)
    found = torch.cat(parts, 2)
    assert found.dtype == given[2].dtype
    room = 1e-5 if dtype == "float32" else 2.0**-6 * float(given[2].abs().max())
    torch.testing.assert_close(found.float(), exact, rtol=0, atol=room)


@pytest.mark.parametrize("selection", [Selection(64), Selection(80, window=0, summaries=30)], ids=str)
def test_columns_of_a_token_may_lie_apart(selection: Any, tensors: Any) -> None:
    """Products of queries keep their layout; right after a selection without a window keys lie as they were given."""
    there, _, _ = tensors
    given = drawn(1, 2, 230)
    exact, _ = causal_pruned_attention(*given, selection, return_state=True)
    Q, K, V = (there.CudaTensor(X.repeat_interleave(2, -1)[..., ::2], 1) for X in given)
    _, state = causal_pruned_attention(*(X[:, :, :180] for X in (Q, K, V)), selection, return_state=True)
    for t in range(180, 230):
        q = there.CudaTensor(given[0][:, :, t].mT.contiguous().mT[:, :, None], 1)
        Y, state = causal_pruned_attention(q, *(X[:, :, t : t + 1] for X in (K, V)), state, return_state=True)
        torch.testing.assert_close(Y.inner, exact[:, :, t : t + 1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("narrow", [None, "bfloat16", "float16"])
@pytest.mark.parametrize(("counted", "summed"), [(True, False), (True, True), (False, True), (False, False)])
@pytest.mark.parametrize("sizes", [(6, 16, 16), (6, 5, 3), (0, 8, 24)], ids=str)
def test_a_row_and_the_share_of_summaries_are_those_of_the_definition(
    sizes: tuple[int, int, int], counted: bool, summed: bool, narrow: str | None, tensors: Any
) -> None:
    """Some slots are absent, some summaries have no members, and columns make no whole packs."""
    there, _, made = tensors
    (s, d, D), (b, g, t, R), rng = sizes, (2, 3, 7, 4), np.random.default_rng(sum(sizes))

    def rows(*shape: int) -> Any:
        X = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
        return X if narrow is None else X.to(getattr(torch, narrow)).float()  # as a call widens them

    count = torch.from_numpy(rng.integers(1, 9, (b, R)).astype(np.float64))
    count[1, 2] = 0
    weight = count * torch.from_numpy(rng.uniform(0.5, 1.5, (b, R)))
    sums = (weight[..., None] * torch.from_numpy(rng.standard_normal((b, R, size))) for size in (d, D))
    kept_count = torch.tensor([s, s // 2])
    x = PrunedArguments(
        q=rows(b, g, 1, d) / 2,
        kept_keys=rows(b, s, d),
        kept_values=rows(b, s, D),
        kept_count=kept_count if counted else None,
        summaries=Summaries(weight, *sums, weight * 0.3, count) if summed else None,
        keys=rows(b, t, d),
        values=rows(b, t, D),
        first=[2],
        last=[t],
        role=None,
        log_weight=None,
        power=None,
        narrow=None if narrow is None else (getattr(torch, narrow), 0.5),
    )
    wide = mapped(replace(x, narrow=None), lambda X: X.double() if X.is_floating_point() else X)
    expected = cpu.definition.mixture(wide)
    made.ran.clear()
    given = mapped(x, lambda X: there.CudaTensor(X, 1))
    found = where_arrays_are(lambda _: fused_kernels.mixture(given))(given.q)
    assert ("bmm" in made.ran) == (not s and not summed)
    rooms = {None: 1e-6, "float16": 2e-3, "bfloat16": 2e-2}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one.inner.double(), other, rtol=0, atol=rooms[narrow] * max(1.0, float(other.abs().max()))
        )


@pytest.mark.parametrize("kind", ["residual", "expected"])
def test_no_batch_and_no_future_changes_a_bit(kind: str, tensors: Any) -> None:
    there, _, _ = tensors
    given, selection = drawn(3, 2, 240), Selection(64, scores=kind)
    whole = causal_pruned_attention(*(there.CudaTensor(X, 1) for X in given), selection).inner
    for batch, end in ((slice(1, 2), 240), (slice(0, 3), 190)):
        parts = [there.CudaTensor(X[batch, :, :end].contiguous(), 1) for X in given]
        found = causal_pruned_attention(*parts, selection).inner
        torch.testing.assert_close(found, whole[batch, :, :end], rtol=0, atol=2e-6)  # attention is torch's
    kept = [
        causal_pruned_attention(*(there.CudaTensor(X[batch], 1) for X in given), selection, return_state=True)[1]
        for batch in (slice(0, 3), slice(1, 2))
    ]
    for name in ("keys", "values", "weight", "offset", "count"):
        one, two = (vars(state.parts[0].summaries)[name].inner for state in kept)
        torch.testing.assert_close(one[1:2], two, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_arrays_of_cupy_take_steps(dtype: str, cupy: Any) -> None:
    Q, K, V = (X.numpy()[0].astype(dtype) for X in drawn(1, 1, 280))
    found = causal_pruned_attention(*map(cupy.asarray, (Q, K, V)), 64)
    wide = (X.astype(np.float64) for X in (Q, K, V))
    room = 1e-2 if dtype == "float16" else 1e-5
    np.testing.assert_allclose(found.get(), causal_pruned_attention(*wide, 64), rtol=0, atol=room)


@pytest.mark.parametrize("refuses", ["all", "some"])
def test_renewals_that_are_refused_take_steps(refuses: str, tensors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they begin, or when they were asked for in turn: outputs are those of steps all the same."""
    there, _, _ = tensors
    given = drawn(1, 2, 280)
    exact = causal_pruned_attention(*given, 64)
    if refuses == "all":
        monkeypatch.setattr(cuda_renewal, "can_renew", lambda *_: False)
    else:
        monkeypatch.setattr(fused_kernels, "renewed", lambda *_: None)
    found = causal_pruned_attention(*(there.CudaTensor(X, 1) for X in given), 64)
    torch.testing.assert_close(found.inner, exact, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize(
    ("d", "D", "slots", "leaving", "fits"),
    [
        (128, 128, (96, 32), 128, True),
        (160, 256, (400, 100), 400, True),
        (170, 1, (9, 3), 9, False),
        (8, 257, (9, 3), 9, False),
        (128, 128, (700, 700), 700, False),
        (2, 2, (2000, 0), 2000, False),
        (8, 8, (0, 0), 0, False),
    ],
)
def test_one_block_renews_what_takes_it_no_longer_than_launches(
    d: int, D: int, slots: tuple[int, int], leaving: int, fits: bool
) -> None:
    """Many columns, clusters or comparisons of scores go in steps."""
    assert cuda_renewal.can_renew(d, D, slots, leaving) == fits


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_tangents_are_no_constants(tensors: Any) -> None:
    """Kernels have no forward mode, and leave tensors with tangents to the definitions."""
    there, _, _ = tensors
    X = there.CudaTensor(torch.randn(1, 90, 8), 1)
    assert fused_kernels.reads(X)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, there.CudaTensor(torch.ones(1, 90, 8), 1))
        assert not fused_kernels.reads(dual)
        assert not fused_kernels.renews(X, dual, (10, 4), 20)


@pytest.mark.parametrize(("change", "match"), [(np.nan, "NaN"), (3e38, "too large|beyond")])
def test_numbers_that_need_an_error_raise_it(change: float, match: str, tensors: Any) -> None:
    there, _, _ = tensors
    Q, K, V = drawn(1, 1, 300)
    K[0, 0, 200, 3] = change
    with pytest.raises(NonFiniteError, match=match):
        causal_pruned_attention(*(there.CudaTensor(X, 1) for X in (Q, K, V)), 64)
