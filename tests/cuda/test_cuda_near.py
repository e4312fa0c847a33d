"""Keys near rows on a CUDA device, run on the CPU: kernels against torch's own functions in double precision.

Inside: kernels are compared with what tensors without CuPy take, whose results the tests of fused attention judge.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from emulator import in_orders
from levattn._kernels.pruned import JITTER, SPREAD_ROUNDING, PrunedArguments, cuda_near, cuda_renewal
from levattn.attention import Selection, pruned_attention
from libraries import HAS_TORCH
from mixtures import as_wide, mixture, of_torch

if not HAS_TORCH:
    pytest.skip("needs torch", allow_module_level=True)

import torch

from levattn._kernels.pruned import fused as fused_kernels

DTYPES = ["float32", "bfloat16", "float16"]
# of outputs: a few roundings of weights
ROOM = {"float32": 4e-6, "bfloat16": 2.0**-6, "float16": 2.0**-9}
CASES: list[dict[str, Any]] = [
    {},
    {"counted": True},
    {"labeled": False},
    {"d": 1, "D": 1, "n": 3, "m": 3},
    {"g": 3, "m": 50, "n": 50},
    {"g": 7, "m": 1, "n": 9},
    {"R": 0},
    {"R": 1, "s": 1, "d": 16, "D": 33},
    {"s": 0, "R": 0},
    {"d": 40, "D": 33, "m": 30, "n": 30},
    {"d": 128, "D": 128, "m": 17, "n": 17, "g": 2, "window": 8, "R": 3},
    {"d": 136, "D": 72, "m": 9, "n": 9},
    {"d": 5, "D": 256, "m": 9, "n": 9, "R": 0},
    {"m": 70, "n": 70, "window": 14, "R": 2},
]


def words(tensor: Any) -> Any:
    """An array of numpy, bfloat16 as words of 16 bits."""
    if tensor is not None and tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return None if tensor is None else tensor.numpy()


def read_by_kernel(x: PrunedArguments, *, narrow: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What the kernel returns for a mixture, and what it has to return."""
    first, last = np.array(x.first, np.int64), np.array(x.last, np.int64)
    q, scale = x.q, 1.0
    if x.narrow is not None:
        kind, scale = x.narrow
        q = (q / scale).to(kind)
    held = fused_kernels._slots(x, q.dtype)
    rows = tuple(words(array.to(q.dtype) if narrow else array) for array in (x.keys, x.values))
    slots = sums = None
    if x.summaries is not None and x.role is not None:
        sums = words(fused_kernels._side_by_side(x.summaries, torch.float32))
        slots = tuple(words(array) for array in (held.keys, held.values, held.log_weight))
    members = words(x.role), words(x.log_weight)

    def called(*rows: Any) -> tuple[Any, ...]:
        mass, gone, change = cuda_near.attend_near(words(q), rows, (first, last), members, slots, sums, scale)
        return mass, np.zeros_like(mass) if gone is None else gone, change

    found = in_orders(called, *rows)
    wide = as_wide(x)
    exact = replace(
        held, **{name: None if y is None else y.double() for name, y in vars(held).items() if name != "kept"}
    )
    return found, fused_kernels._near(wide, q.double(), scale, exact, first, last)


@pytest.mark.cuda
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_sums_over_near_keys_are_their_definition(shape: dict[str, Any], dtype: str) -> None:
    x = of_torch(mixture(**shape), dtype)
    if not max(np.subtract(x.last, x.first)):
        return
    size = max(1.0, float((x.q.abs() @ x.keys.abs().mT[:, None]).max()))  # of which logits have roundings
    room, longest = 2.0**-22 * size, max(1.0, float(x.values.abs().max()))
    for narrow in {False, dtype != "float32"}:
        (mass, gone, change), (exact_mass, exact_gone, exact_change) = read_by_kernel(x, narrow=narrow)
        np.testing.assert_allclose(mass, exact_mass, rtol=0, atol=room)
        np.testing.assert_allclose(gone, exact_gone, rtol=0, atol=2 * room)
        np.testing.assert_allclose(change, exact_change, rtol=0, atol=4 * room * longest)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"summaries": 0}, {"summaries": 30}, {"summaries": 9, "sinks": 3}], ids=str)
def test_tensors_take_the_kernels(
    options: dict[str, int], dtype: str, tensors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, _, _ = tensors
    generator = torch.Generator().manual_seed(0)
    Q, K, V = (torch.randn(2, 3, 120, 24, generator=generator).to(getattr(torch, dtype)) for _ in range(3))
    selection = Selection(60, window=4, **options)
    launched: list[str] = []
    told: list[bool] = []  # whether torch told the logarithms of sums
    joined = cuda_near.join_near
    monkeypatch.setattr(cuda_near, "join_near", lambda *x: told.append(x[1] is not None) or joined(*x))
    for name in ("attend_near", "join_near"):
        real = getattr(cuda_near, name)
        monkeypatch.setattr(cuda_near, name, lambda *x, real=real, name=name: launched.append(name) or real(*x))
    found = pruned_attention(*(there.CudaTensor(X, 1) for X in (Q, K, V)), selection)
    assert launched == ["attend_near", "join_near"]
    assert told == [options["summaries"] == 0]
    assert found.dtype == Q.dtype
    exact = pruned_attention(Q.double(), K.double(), V.double(), selection)
    torch.testing.assert_close(found.inner.double(), exact, rtol=0, atol=4 * ROOM[dtype])


@pytest.mark.cuda
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [{}, {"counted": True}, {"R": 0}, {"s": 0}, {"d": 24, "D": 40, "R": 1}], ids=str)
def test_slots_with_columns_are_those_of_torch(
    shape: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that fused attention gets, bit by bit: sums of summaries are divided by their weights in float32."""
    x, scale = of_torch(mixture(**shape), dtype), 0.25
    kind = getattr(torch, dtype)
    q = x.q.to(kind)
    masses = torch.randn(q.shape[:3], generator=torch.Generator().manual_seed(0)) * 20
    masses[0, 0, 0] = -torch.inf
    held, given = fused_kernels._slots(x, kind), []
    weight = torch.zeros(held.keys.shape[:2]) if held.log_weight is None else held.log_weight
    D = x.values.shape[-1]
    values = torch.nn.functional.pad(held.values, (0, D + 2 - held.values.shape[-1]))
    last = torch.arange(D + 2).eq(D + 1).to(kind).expand(len(q), 1, -1)
    keys = torch.nn.functional.pad(held.keys, (0, 0, 0, 1))
    attend = fused_kernels._fused
    monkeypatch.setattr(fused_kernels, "_fused", lambda *x, **options: given.extend(x[:3]) or attend(*x, **options))
    fused_kernels.attended_slots(
        q,
        keys[:, None],
        torch.cat([values, last], 1)[:, None],
        torch.nn.functional.pad(weight, (0, 1))[:, None],
        scale,
        own=masses,
    )
    width = given[0].shape[-1]
    sums = None if x.summaries is None else words(fused_kernels._side_by_side(x.summaries, torch.float32))
    for kept_kind in {torch.float32, kind}:
        kept = tuple(map(words, (x.kept_keys.to(kept_kind), x.kept_values.to(kept_kind), x.kept_count)))
        slots = in_orders(cuda_near.write_slots, kept, sums, scale, (width, width), words(q).dtype)
        for found, expected in zip(slots[:2], given[1:], strict=True):
            np.testing.assert_array_equal(found, words(expected[:, 0].contiguous()))
        np.testing.assert_array_equal(slots[2], weight)
    rows = in_orders(cuda_near.widen_queries, words(q), words(masses), scale, width)
    np.testing.assert_array_equal(rows.reshape(given[0].shape), words(given[0]))


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(0, 3, 120, 24), (2, 3, 0, 24)], ids=str)
def test_tensors_without_numbers_have_results_without_numbers(shape: tuple[int, ...], tensors: Any) -> None:
    there, _, _ = tensors
    X = there.CudaTensor(torch.zeros(shape), 1)
    assert pruned_attention(X, X, X, Selection(60, window=4, summaries=0)).shape == shape


@pytest.mark.cuda
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("told", [False, True], ids=["a share", "logarithms of sums"])
@pytest.mark.parametrize(("kind", "D", "wide"), [("float32", 5, 9), ("float16", 40, 48), ("float32", 128, 130)])
def test_near_keys_join_slots(kind: str, D: int, wide: int, *, told: bool) -> None:
    """As if all keys had been attended to at once: slots of mass M, near keys of mass A, less summaries of mass C."""
    rng = np.random.default_rng(D)
    rows, dtype = 21, np.dtype(kind)
    M, A = rng.uniform(0.5, 3, (2, rows))
    M[0], A[1] = 1e-30, 1e-30  # one of them alone
    C = 0 * A if told else np.minimum(M, A) * rng.uniform(0, 0.9, rows)
    y, c, a = rng.standard_normal((3, rows, D + 1)).astype(dtype)
    if told:
        y[:, D] = a[:, D] = 0
    share = (A / (M + A)).astype(dtype)
    found = np.full((rows, wide), 7, dtype)
    if told:
        found[:, :D] = y[:, :D]
    else:
        found[:, : D + 1], found[:, D + 1] = (M / (M + A))[:, None] * y, share
    change = (a - (C / A)[:, None] * c).astype(np.float32)
    near = np.log(A).astype(np.float32), None if told else (C / A).astype(np.float32), change
    Y, rest = in_orders(lambda: cuda_near.join_near(found, np.log(M) if told else None, near))
    whole = (M[:, None] * y + A[:, None] * a - C[:, None] * c) / (M + A - C)[:, None]
    assert Y.dtype == dtype
    room = 30 * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(Y, whole[:, :D], rtol=0, atol=room)
    np.testing.assert_allclose(rest, whole[:, D].clip(0), rtol=0, atol=room)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("d", [1, 5, 64, 129])
def test_moments_of_queries_are_factored(d: int, dtype: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("roomy" if d > 108 else "host")
    rng = np.random.default_rng(d)
    Q, K = 3 + rng.standard_normal((3, 400, d)), rng.standard_normal((3, 50, d)) - 1
    Q[1] = 2.0  # no spread about the mean
    Q[2, 0, 0] = np.inf
    with np.errstate(invalid="ignore"):
        second = Q.transpose(0, 2, 1) @ Q
    sums = Q.sum(1), second, K.sum(1)
    root, query, origin, sound = in_orders(lambda: cuda_renewal.factor_queries(*sums, (400, 50), np.dtype(dtype)))
    room = 50 * d * float(np.finfo(dtype).eps)
    assert sound.tolist() == [[True, True, False], [True, True, True]]
    assert root.dtype == query.dtype == np.dtype(dtype)
    np.testing.assert_allclose(query[:2], Q[:2].mean(1), rtol=room)
    np.testing.assert_allclose(origin, K.mean(1), atol=room)
    assert not np.triu(root, 1).any()
    for item, moment in ((0, np.cov(Q[0].T, bias=True).reshape(d, d)), (1, np.zeros((d, d)))):
        zero = (Q[item] ** 2).sum() / 400
        share = max(JITTER * np.trace(moment) / d, SPREAD_ROUNDING * zero)
        found = root[item].astype(np.float64)
        np.testing.assert_allclose(found @ found.T, moment + share * np.eye(d), rtol=0, atol=room * zero / d)
    np.testing.assert_array_equal(root[2], np.eye(d))
