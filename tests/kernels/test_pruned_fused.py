"""Pruned attention by torch's fused attention, as tensors of a device have it, on tensors in main memory.

Inside: kernels are compared with their definition, in blocks that are made small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import naive_attention
from differences import assert_gradients
from levattn._kernels.pruned import PrunedArguments, Summaries, definition, mapped
from levattn.attention import Selection, pruned_attention
from libraries import HAS_TORCH
from mixtures import as_wide, mixture, of_torch
from pruned_calls import attend, selected, walk

if not HAS_TORCH:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from levattn._kernels import kernels_for
from levattn._kernels.pruned import fused as fused_kernels
from levattn._kernels.pruned import torch as tensor_kernels
from levattn.attention.pruned import causal as causal_module
from levattn.exceptions import NonFiniteError

DTYPES = ["float64", "float32", "bfloat16", "float16"]
over_dtypes = pytest.mark.parametrize("dtype", DTYPES)
# of outputs, relative to the largest value: a few roundings of logits and weights
ROOM = {"float64": 1e-12, "float32": 4e-6, "bfloat16": 2.0**-6, "float16": 2.0**-9}
SHAPES: list[dict[str, Any]] = [
    {},
    {"counted": True},
    {"labeled": False},
    {"d": 1, "D": 1, "n": 3, "m": 3},
    {"g": 3, "m": 50, "n": 50},
    {"g": 7, "m": 1, "n": 9},
    {"m": 200, "n": 90, "window": 0},
    {"m": 97, "n": 97, "window": 40},
    {"m": 9, "n": 9, "window": 30},
    {"s": 0},
    {"R": 0},
    {"R": 0, "counted": True, "window": 0},
    {"R": 1, "s": 1, "d": 16, "D": 33},
    {"s": 40, "R": 37, "d": 64, "D": 64},
    {"s": 0, "R": 0},
    {"s": 0, "R": 0, "window": 0},
    {"s": 0, "R": 2, "window": 61},
    {"b": 0},
    {"m": 0, "n": 5},
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The dtypes that fused attention was called with: by all tensors, as if they were of a device."""
    found: list[Any] = []
    real = fused_kernels.scaled_dot_product_attention

    def recorded(q: Any, *args: Any, **options: Any) -> Any:
        found.append(q.dtype)
        return real(q, *args, **options)

    monkeypatch.setattr(tensor_kernels, "is_fused", lambda *_: True)
    monkeypatch.setattr(fused_kernels, "scaled_dot_product_attention", recorded)
    return found


def causal(x: PrunedArguments) -> PrunedArguments:
    """The last positions of a stream, whose summaries have no member near."""
    n, m = x.keys.shape[1], x.q.shape[2]
    return replace(x, first=[0] * m, last=[n - m + 1 + i for i in range(m)], role=None, log_weight=None)


def agree(x: PrunedArguments, dtype: str) -> None:
    found, expected = tensor_kernels.mixture(x), definition.mixture(as_wide(x))
    size = max(1.0, float(x.values.abs().max())) if x.values.numel() else 1.0
    for one, two in zip(found, expected, strict=True):
        assert one.dtype == x.q.dtype
        torch.testing.assert_close(one.double(), two, rtol=0, atol=ROOM[dtype] * size)


@over_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixtures_are_their_definition(shape: dict[str, Any], dtype: str, calls: list[Any]) -> None:
    x = of_torch(mixture(**shape), dtype)
    agree(x, dtype)
    read = x.q.numel() and x.kept_keys.shape[1] + x.keys.shape[1] * (max(x.last) > 0) + (x.summaries is not None)
    assert set(calls) == ({getattr(torch, dtype)} if read else set())


@over_dtypes
@pytest.mark.parametrize(
    "shape",
    [{}, {"m": 20, "g": 3}, {"m": 1}, {"s": 0, "R": 0}, {"R": 0, "s": 0, "g": 2, "m": 9}, {"counted": True}],
    ids=str,
)
@pytest.mark.usefixtures("calls")
def test_causal_mixtures_are_their_definition(shape: dict[str, Any], dtype: str) -> None:
    agree(of_torch(causal(mixture(**shape)), dtype), dtype)


@pytest.mark.usefixtures("calls")
def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x = of_torch(mixture(b=3, g=2))
    whole = tensor_kernels.mixture(x)
    monkeypatch.setattr(fused_kernels, "ENTRIES", 1)
    monkeypatch.setattr(fused_kernels, "_ITEMS", 2)
    for one, two in zip(tensor_kernels.mixture(x), whole, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kind", ["window", "causal", "first", "none", "kept"])
def test_gradients_are_those_of_the_definition(kind: str, dtype: str, calls: list[Any]) -> None:
    x = mixture(g=2, m=30, n=30, window=0 if kind == "none" else 3, counted=kind == "window")
    if kind in ("causal", "first"):
        x = causal(mixture(g=2, m=20 if kind == "causal" else 30, n=30, s=4 if kind == "causal" else 0, R=3))
    if kind == "first":
        x = replace(x, summaries=None)
    if kind == "kept":  # so that some rows read no near key
        assert x.role is not None
        x.role[:, :15] = -2
    x = of_torch(x, dtype)
    rng = torch.Generator().manual_seed(0)
    weights = [torch.randn(part.shape, generator=rng, dtype=torch.float64) for part in definition.mixture(x)]
    found, expected = (
        gradients_of(kernels, form, weights) for kernels, form in ((tensor_kernels, x), (definition, as_wide(x)))
    )
    assert calls
    for one, two in zip(found, expected, strict=True):
        size = max(1.0, float(two.abs().max())) if two.numel() else 1.0
        room = 1e-10 if dtype == "float64" else ROOM[dtype]
        torch.testing.assert_close(one.double(), two, rtol=0, atol=room * size)


def gradients_of(kernels: Any, x: PrunedArguments, weights: list[Any]) -> tuple[Any, ...]:
    """The gradients, of all numbers that a mixture takes, of the sum of its results times weights."""
    leaves: list[Any] = []

    def leaf(array: Any) -> Any:
        if not array.is_floating_point():
            return array
        leaves.append(array.clone().requires_grad_())
        return leaves[-1]

    parts = kernels.mixture(mapped(x, leaf))
    total = sum((part.double() * weight).sum() for part, weight in zip(parts, weights, strict=True))
    return tuple(torch.autograd.grad(total, leaves, materialize_grads=True))


@pytest.mark.usefixtures("calls")
def test_gradients_are_those_of_differences() -> None:
    x = of_torch(mixture(g=2, m=24, n=24, d=3, D=2))
    names = "q", "keys", "values", "kept_keys", "kept_values", "log_weight"

    def run(*arrays: Any) -> Any:
        Y, rest = tensor_kernels.mixture(replace(x, **dict(zip(names, arrays, strict=True))))
        return torch.cat([Y, rest[..., None]], -1)

    assert_gradients(run, [getattr(x, name).clone().requires_grad_() for name in names])


@pytest.mark.parametrize(("R", "width"), [(0, 128), (3, 136)])
def test_without_summaries_heads_keep_their_width(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any], R: int, width: int
) -> None:
    widths, real = set(), fused_kernels.scaled_dot_product_attention

    def seen(*arrays: Any, **options: Any) -> Any:
        widths.update(array.shape[-1] for array in arrays)
        return real(*arrays, **options)

    monkeypatch.setattr(fused_kernels, "scaled_dot_product_attention", seen)
    for m, n, window in ((30, 50, 0), (40, 40, 40)):
        x = of_torch(mixture(d=128, D=128, s=20, R=R, m=m, n=n, window=window), "float32")
        x = causal(x) if window else x
        agree(x, "float32")
        assert ((tensor_kernels.mixture(x)[1] == 0).all()) == (R == 0)
    assert widths == {width}


def slots_by_loops(q: Any, K: Any, V: Any, logs: Any, scale: float) -> Any:
    """Softmax attention of (b, H, m, d) to slots (b, G, s, ·) with log-weights, row by row."""
    q, K, V, logs = (array.double().numpy() for array in (q, K, V, logs))
    Y = np.zeros((*q.shape[:3], V.shape[3]))
    for i, h, t in np.ndindex(q.shape[:3]):
        j = h * K.shape[1] // q.shape[1]
        Y[i, h, t] = naive_attention.softmax(scale * (K[i, j] @ q[i, h, t]) + logs[i, j]) @ V[i, j]
    return Y


@over_dtypes
@pytest.mark.parametrize("level", [0.0, 1e4, -1e4])
@pytest.mark.parametrize("scale", [1e-3, 0.25, 30.0])
def test_slots_with_logarithms(scale: float, level: float, dtype: str) -> None:
    kind = getattr(torch, dtype)
    rng = torch.Generator().manual_seed(1)
    q, K, V = (
        torch.randn(2, *shape, generator=rng, dtype=torch.float64).to(kind)
        for shape in ((6, 5, 8), (2, 9, 8), (2, 9, 3))
    )
    q = (q / (30 * scale if scale > 1 else 1)).to(kind)
    logs = level + torch.randn(2, 2, 9, generator=rng, dtype=torch.float64)
    logs[:, 0, 4] = -torch.inf  # a weight of zero
    logs[:, 1, 2] = -1e4
    logs = logs.to(torch.promote_types(kind, torch.float32))
    found = fused_kernels.attended_slots(q, K, V, logs, scale)
    # a logarithm is held to 2^-24 of its size, and sums of float32 to so many units
    room = (0 if dtype == "float64" else 2.0**-21 * abs(level)) + (scale * 2.0**-14 if dtype == "float16" else 0)
    size = float(V.abs().max())
    np.testing.assert_allclose(
        found.double(), slots_by_loops(q, K, V, logs, scale), rtol=0, atol=(ROOM[dtype] + room) * size
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [30.0, 1e3, 1e5])
@pytest.mark.usefixtures("calls")
def test_large_logits_leave_no_range(size: float, dtype: str) -> None:
    x = of_torch(mixture(g=2, window=7, n=150, m=150), dtype)
    x = replace(x, q=x.q * size if dtype != "float16" else x.q * min(size, 1e4))
    leaves = [x.q.requires_grad_(), x.keys.requires_grad_(), x.values.requires_grad_()]
    Y, rest = tensor_kernels.mixture(x)
    most = max(float(part.detach().abs().max()) for part in (x.values, x.kept_values))
    assert x.summaries is not None
    means = x.summaries.values / x.summaries.weight[..., None]
    most = max(most, float(means.nan_to_num().abs().max()))
    # a mean of values with weights that are positive, but for rounding
    assert float(Y.detach().abs().max()) <= most * (1 + 8 * ROOM[dtype])
    assert 0 <= float(rest.detach().min()) <= float(rest.detach().max()) <= 1 + 8 * ROOM[dtype]
    for gradient in torch.autograd.grad(Y.sum() + rest.sum(), leaves):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [1.0, 30.0, 1e3, 1e6, 1e9])
@pytest.mark.parametrize("apart", [0.02, 0.0])
@pytest.mark.usefixtures("calls")
def test_no_more_is_taken_out_than_there_is(apart: float, size: float, dtype: str) -> None:
    """Pairs of keys are summaries, of which rows see both: of what fused attention read all but nothing is left."""
    rng = np.random.default_rng(5)
    keys = np.repeat(rng.standard_normal((1, 60, 16)), 2, 1)
    keys[:, 1::2] *= 1 + apart * rng.standard_normal((1, 60, 16))
    values = rng.uniform(0.5, 1.0, (1, 120, 4))
    pairs = (keys, values)
    sums = [array.reshape(1, 60, 2, -1).sum(2) for array in pairs]
    count = np.full((1, 60), 2.0)
    at = np.arange(120)
    x = of_torch(
        replace(
            mixture(b=1, s=0, d=16, D=4, R=0),
            q=(min(size, 1e3) if dtype == "float16" else size) * keys[:, None],
            keys=keys,
            values=values,
            role=at[None] // 2,
            first=np.maximum(at - 1, 0).tolist(),
            last=np.minimum(at + 2, 120).tolist(),
            summaries=Summaries(count, *sums, np.zeros((1, 60)), count),
        ),
        dtype,
    )
    Y, rest = tensor_kernels.mixture(x)
    room = 8 * ROOM[dtype]
    least = 0.5 if size < 1e9 else 0.0  # logits of 10^10 have no digits left for weights
    assert least - room <= float(Y.min()) <= float(Y.max()) <= 1 + room
    assert 0 <= float(rest.min()) <= float(rest.max()) <= 1 + room


class Operators(TorchDispatchMode):
    """Names of the operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["window", "none", "causal"])
@pytest.mark.usefixtures("calls")
def test_as_many_operators_for_any_length(form: str) -> None:
    found = []
    for n, R in ((512, 8), (2048, 8), (512, 64), (2048, 64)):
        x = mixture("float32", g=2, n=n, m=64 if form == "causal" else n, R=R, window=0 if form == "none" else 8)
        x = of_torch(causal(x) if form == "causal" else x, "float32")
        with Operators() as operators:
            tensor_kernels.mixture(x)
        found.append(operators.names)
        for name in operators.names:  # none that a host waits for
            assert not any(wait in name for wait in ("_local_scalar_dense", "nonzero", "item", "equal.default"))
    assert found[0] == found[1] == found[2] == found[3]
    assert len(found[0]) < 400


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_which_tensors_have_fused_attention() -> None:
    away, here = torch.empty(2, device="meta"), torch.empty(2)
    assert fused_kernels.is_fused(away, away)
    assert not fused_kernels.is_fused(here)
    seen = []
    torch.func.vmap(lambda x: (seen.append(fused_kernels.is_fused(x)), x)[1])(away)
    with torch.autograd.forward_ad.dual_level():
        seen.append(fused_kernels.is_fused(away, torch.autograd.forward_ad.make_dual(away, away.clone())))
    assert seen == [False, False]


FORMS: dict[str, dict[str, Any]] = {
    "default": {"size": 5, "summaries": 4, "window": 2},
    "no-window": {"size": 4, "summaries": 5},
    "dropped": {"size": 6, "window": 1, "sinks": 2},
    "summaries-alone": {"size": 0, "summaries": 6},
    "wide": {"size": 2, "summaries": 3, "window": 40},
    "everything": {"size": 32, "summaries": 0},
}


@over_dtypes
@pytest.mark.parametrize("chunk", [None, 3, 24])
@pytest.mark.parametrize("form", FORMS)
def test_calls_equal_the_loop_over_queries(form: str, chunk: int | None, dtype: str, calls: list[Any]) -> None:
    rng = np.random.default_rng(3)
    kind = getattr(torch, dtype)
    arrays = (rng.standard_normal(shape) for shape in ((4, 32, 5), (2, 32, 5), (2, 32, 3)))
    Q, K, V = (torch.from_numpy(array).to(kind).requires_grad_() for array in arrays)
    options = FORMS[form] | ({} if chunk is None else {"causal": True, "renew_every": chunk})
    Y = attend(Q, K, V, **options)
    assert Y.dtype == kind
    assert set(calls) == {kind}
    oracle = {{"summaries": "R"}.get(name, name): value for name, value in FORMS[form].items()} | {"chunk": chunk}
    wide = [array.detach().double().numpy() for array in (Q, K, V)]
    expected = np.concatenate(
        [naive_attention.pruned(wide[0][2 * j : 2 * j + 2], wide[1][j], wide[2][j], **oracle)[0] for j in range(2)]
    )
    size = float(V.detach().abs().max())
    np.testing.assert_allclose(Y.detach().double(), expected, rtol=0, atol=4 * ROOM[dtype] * size)
    for gradient in torch.autograd.grad(Y.sum(), (Q, K, V)):
        assert gradient.isfinite().all()


LONG: dict[str, dict[str, Any]] = {  # of many chunks
    "default": {"size": 4, "summaries": 3, "window": 2},
    "expected": {"size": 3, "summaries": 4, "scores": "expected", "sinks": 2},
    "dropped": {"size": 6, "window": 5},
    "leverage": {"size": 4, "summaries": 3, "scores": "leverage"},
    "threshold": {"epsilon": 0.3, "scores": "leverage", "summaries": 3, "window": 3},
    "own-threshold": {"epsilon": 0.5, "summaries": 2},
    "own": {"size": 5, "summaries": 2},
    "power": {"size": 4, "summaries": 3, "window": 2, "f": 2},
}


def stream(form: str, T: int = 75) -> tuple[list[Any], dict[str, Any]]:
    """Queries, keys and values of heads, and options, with scores of their own where the form says so."""
    rng = np.random.default_rng(11)
    arrays = [rng.standard_normal(shape) for shape in ((4, T, 5), (2, T, 5), (2, T, 3))]
    options = LONG[form] | ({"scores": rng.standard_normal((2, T))} if "own" in form else {})
    return arrays, options


@pytest.mark.parametrize("limit", [None, 3, 0])
@pytest.mark.parametrize("form", LONG)
def test_chunks_as_a_batch_equal_the_loop_over_queries(
    form: str, limit: int | None, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all chunks, of some at a time, and of one."""
    (Q, K, V), options = stream(form)
    if limit is not None:
        monkeypatch.setattr(kernels_for("pruned", torch.empty(0)), "at_once", lambda *_: limit)
    leaves = [torch.from_numpy(array).requires_grad_() for array in (Q, K, V)]
    given = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    Y = attend(*leaves, causal=True, renew_every=5, **given)
    names = {"summaries": "R", "scores": "kind", "f": "power"}
    oracle = {names.get(name, name): value for name, value in options.items()} | {"chunk": 5}
    for j in range(2):
        if "own" in form:
            oracle |= {"kind": "given", "scores": options["scores"][j]}
        expected = naive_attention.pruned(Q[2 * j : 2 * j + 2], K[j], V[j], **oracle)[0]
        np.testing.assert_allclose(Y.detach()[2 * j : 2 * j + 2], expected, rtol=0, atol=1e-10)
    if "f" not in options:
        assert (len(calls) <= 3) == (limit is None)


@pytest.mark.parametrize("form", ["default", "threshold", "power"])
@pytest.mark.usefixtures("calls")
def test_gradients_of_chunks_as_a_batch_are_those_of_each(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, options = stream(form)
    gradients = []
    for limit in (1 << 26, 0):
        monkeypatch.setattr(kernels_for("pruned", torch.empty(0)), "at_once", lambda *_, limit=limit: limit)
        leaves = [torch.from_numpy(array).requires_grad_() for array in arrays]
        Y = attend(*leaves, causal=True, renew_every=5, **options)
        gradients.append(torch.autograd.grad((Y * Y.detach().cos()).sum(), leaves))
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("form", ["default", "power"])
@pytest.mark.usefixtures("calls")
def test_states_and_certificates_of_chunks_as_a_batch_are_those_of_numpy(form: str) -> None:
    arrays, options = stream(form)
    options |= {"renew_every": 5, "return_certificate": True}
    Y, state, certificate = walk(*arrays, **options)
    tensors = [torch.from_numpy(array).requires_grad_() for array in arrays]
    for cut in (None, 33, 40):
        found, held, bounds = walk(*(x[:, :cut] for x in tensors), **options)
        if cut is not None:
            rest, held, _ = walk(*(x[:, cut:] for x in tensors), state=held, **options)
            found = torch.cat([found, rest], 1)
        np.testing.assert_allclose(found.detach(), Y, rtol=0, atol=1e-10)
        np.testing.assert_allclose(bounds.error_bound, certificate.error_bound[:, :cut], rtol=1e-8, atol=1e-10)
        for name in ("kept_places", "radius", "recent"):
            mine, theirs = (torch.as_tensor(getattr(x.parts[0], name)).detach() for x in (state, held))
            np.testing.assert_allclose(theirs, mine, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("form", ["default", "expected", "dropped", "leverage"])
def test_as_many_operators_for_any_number_of_chunks(
    form: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of attention; a selection has the same number for each chunk. There is one wait for all."""
    found = []
    for T in (64, 104, 184):
        calls.clear()
        arrays, options = stream(form, T)
        leaves = [torch.from_numpy(array).requires_grad_() for array in arrays]
        parts: list[Any] = []

        def counted(kind: str, real: Any, parts: list[Any] = parts) -> Any:
            def run(*args: Any) -> Any:
                with Operators() as operators:
                    result = real(*args)
                parts.append((kind, operators.names))
                return result

            return run

        with monkeypatch.context() as patch, Operators() as operators:
            kernels = kernels_for("pruned", leaves[0])  # whose functions are those of the first use
            patch.setattr(kernels, "mixture", counted("mixture", kernels.mixture))
            patch.setattr(causal_module, "selected_anew", counted("selection", causal_module.selected_anew))
            attend(*leaves, causal=True, renew_every=5, **options)
        mixtures = [names for kind, names in parts if kind == "mixture"]
        selections = [names for kind, names in parts if kind == "selection"]
        assert mixtures
        first = 2 * selected(options | {"renew_every": 5})[0].slots(T, causal=True).total
        assert len(selections) == len(range(first, T, 5))
        assert all(names == selections[-1] for names in selections[2:])
        assert sum("_local_scalar" in name or "nonzero" in name for name in operators.names) <= 1  # at the end
        factored = [name for name in operators.names if "cholesky" in name]
        assert len(factored) <= 2  # of the first selection, and of all others
        assert all("cholesky_ex" in name for name in factored)  # which waits for nothing
        assert sum("eigh" in name for name in operators.names) <= (2 if form == "leverage" else 0)
        found.append((len(calls), [len(names) for names in mixtures]))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("form", [form for form in LONG if "own" not in form])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.usefixtures("calls")
def test_what_is_not_finite_is_named_at_the_end(which: int, form: str) -> None:
    """As far as a selection reads it: rows of the last chunk are NaN alone."""
    arrays, options = stream(form)
    for place, named in ((3, True), (40, True), (74, False)):
        leaves = [torch.from_numpy(array.copy()) for array in arrays]
        leaves[which][1, place, 2] = torch.nan
        call = partial(attend, *(x.requires_grad_() for x in leaves), causal=True, renew_every=5, **options)
        if named and (which == 1 or "leverage" not in str(options)):
            with pytest.raises(NonFiniteError, match="give finite"):
                call()
        elif not named:
            assert not call()[:, :70].isnan().any()


@pytest.mark.parametrize("causal", [False, True])
def test_torch_func_has_the_same_gradients(causal: bool) -> None:
    arrays, options = stream("default", 40)
    options |= {"causal": True, "renew_every": 5} if causal else {}
    tensors = [torch.from_numpy(array) for array in arrays]

    def loss(*X: Any) -> Any:
        return attend(*X, **options).square().sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2))(*tensors)
    leaves = [x.clone().requires_grad_() for x in tensors]
    for one, two in zip(found, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_certificates_come_from_wide_products(calls: list[Any]) -> None:
    rng = np.random.default_rng(4)
    Q, K, V = (torch.from_numpy(array).bfloat16().requires_grad_() for array in rng.standard_normal((3, 2, 40, 6)))
    Y, certificate = pruned_attention(Q, K, V, Selection(size=6, summaries=5, window=2), return_certificate=True)
    assert Y.dtype == torch.bfloat16
    assert set(calls) == {torch.float32}
    assert bool((certificate.captured_lower <= certificate.captured_upper).all())


def test_an_empty_batch_has_empty_gradients() -> None:
    leaves = [torch.randn(0, 1, 20, 3).requires_grad_() for _ in range(3)]
    pruned_attention(*leaves, Selection(size=4, summaries=3)).sum().backward()
    assert all(leaf.grad is None or leaf.grad.shape == leaf.shape for leaf in leaves)


@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_attention_of_torch_tells_its_sums(kernel: str) -> None:
    """The function of each kernel is called as this release of torch has it: here without numbers."""
    q, keys = (torch.empty(3, 1, m, 64, device="meta", dtype=torch.bfloat16) for m in (40, 7))
    telling = fused_kernels._telling(kernel)
    assert telling is not None
    found, sums = telling(q, keys, keys, scale=0.3)[:2]
    assert found.shape == q.shape
    assert sums.reshape(3, -1).shape[1] >= 40
    assert sums.dtype == torch.float32
    assert fused_kernels._telling("MATH") is None
