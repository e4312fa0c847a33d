"""What holds of every layer: decoding, packing, padding, gradients, precisions, the compiler, refusals."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from layers import ALL, CAUSAL, KINDS, C, T, layer_and_input  # noqa: E402

from levattn.nn import RGLRU, CausalConv, LatteCache, MacchiatoCache  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")

over_causal = pytest.mark.parametrize("form", CAUSAL)
over_all = pytest.mark.parametrize("form", ALL)
over_kinds = pytest.mark.parametrize("kind", KINDS)


def decoded(layer: Any, X: Any, sizes: list[int], mask: Any = None) -> tuple[Any, Any]:
    """The output in chunks, and the cache after them."""
    cache, parts, low = layer.new_cache(), [], 0
    for size in sizes:
        rows = slice(low, low + size)
        parts.append(layer(X[:, rows], mask=None if mask is None else mask[:, rows], cache=cache))
        low += size
    assert cache.position == low == X.shape[1]
    return torch.cat(parts, 1), cache


def close(found: Any, expected: Any, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


@over_causal
@pytest.mark.parametrize("sizes", [[1] * T, [5, 1, 11], [0, T], [16, 1], [3, 0, 7, 7]], ids=str)
def test_decoding_in_any_chunks_equals_the_whole(form: str, sizes: list[int]) -> None:
    layer, X = layer_and_input(form)
    close(decoded(layer, X, sizes)[0], layer(X))


@over_causal
@pytest.mark.parametrize("B", [1, 4])
def test_a_cache_has_the_size_that_is_stated(form: str, B: int) -> None:
    layer, X = layer_and_input(form, B, 60, **({"positions": 60} if "positions" in CAUSAL[form] else {}))
    cache = layer.new_cache()
    assert cache.numbers() == 0
    for low, high in ((0, 45), (45, 46), (46, 60)):
        layer(X[:, low:high], cache=cache)
        assert cache.numbers() == B * layer.state_size()


@over_all
def test_packed_sequences_are_separate_ones(form: str) -> None:
    layer, X = layer_and_input(form)
    separate = torch.cat([layer(X[:, :6]), layer(X[:, 6:])], 1)
    for offsets in (torch.tensor([0, 6, T]), [0, 6, 6, T], np.array([0, 0, 6, T])):
        Y = layer(X, offsets=offsets)
        close(Y, separate)
        Y.sum().backward()


@over_all
def test_padding_changes_nothing(form: str) -> None:
    layer, X = layer_and_input(form)
    padded = torch.randn(2, 25, C, dtype=X.dtype)
    mask = torch.ones(2, 25, dtype=torch.bool)
    within = slice(0, 5) if form.startswith(COUNTING) else slice(8, 13)
    mask[0, :3] = mask[0, 20:] = mask[1, within] = mask[1, 22:] = False
    padded[mask] = X.flatten(0, 1)
    expected = layer(X).flatten(0, 1)
    close(layer(padded, mask=mask)[mask], expected)
    if getattr(layer, "causal", True):
        close(decoded(layer, padded, [2, 7, 16], mask)[0][mask], expected)


@over_all
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e300])
def test_what_is_in_padding_reaches_no_gradient(form: str, bad: float) -> None:
    """Not the weights', where zero times NaN is NaN, and not the input's."""
    layer, X = layer_and_input(form)
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[0, :3] = mask[1, -4:] = False

    def gradients(filling: float) -> list[Any]:
        x = torch.where(mask[..., None], X, filling).requires_grad_()
        Y = layer(x, mask=mask)
        assert Y.isfinite().all()
        return [Y, *torch.autograd.grad(Y[mask].square().sum(), [x, *layer.parameters()], allow_unused=True)]

    for found, expected in zip(gradients(bad), gradients(0.0), strict=True):
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found, expected)


# Where a prompt of 5 and one of 9 positions lie among 12
PADDINGS: dict[str, tuple[list[int], list[int]]] = {
    "left": (list(range(7, 12)), list(range(3, 12))),
    "right": (list(range(5)), list(range(9))),
    "gaps": ([1, 2, 5, 6, 10], [0, 1, 2, 4, 5, 6, 7, 9, 11]),
}
# whose own feature reads zeros at masked positions, after positions that take part
COUNTING = "latte, memory"
CELLS = [(form, padding) for form in ALL for padding in PADDINGS if padding == "left" or not form.startswith(COUNTING)]


@pytest.mark.crossed
@pytest.mark.parametrize(("form", "padding"), CELLS)
def test_padded_prompts_and_steps_after_them_equal_each_sequence_alone(form: str, padding: str) -> None:
    layer, X = layer_and_input(form)
    padded, mask = torch.full((2, 12, C), 7.0, dtype=X.dtype), torch.zeros(2, 12, dtype=torch.bool)
    for b, places in enumerate(PADDINGS[padding]):
        mask[b, places], padded[b, places] = True, X[b, : len(places)]
    cache = layer.new_cache() if getattr(layer, "causal", True) else None
    Y = layer(padded, mask=mask, cache=cache)
    more = torch.randn(2, 4, C, dtype=X.dtype)
    steps = [] if cache is None else [layer(more[:, t : t + 1], cache=cache) for t in range(4)]
    for b, places in enumerate(PADDINGS[padding]):
        alone = X[b : b + 1, : len(places)]
        if cache is not None:
            alone = torch.cat([alone, more[b : b + 1]], 1)
        found = torch.cat([Y[b, places], *(step[b] for step in steps)])
        close(found, layer(alone)[0])
    if cache is not None and not form.startswith(COUNTING):  # masked steps between others
        flags = torch.tensor([[True, False, True], [False, True, True]])
        Y = layer(X[:, :3], mask=flags, cache=cache)
        for b, places in enumerate(PADDINGS[padding]):
            parts = X[b : b + 1, : len(places)], more[b : b + 1], X[b : b + 1, :3][:, flags[b]]
            close(Y[b, flags[b]], layer(torch.cat(parts, 1))[0, -2:])


POSITIONED = ["latte, vapor", "macchiato, rotated", "tokens, positions"]


@pytest.mark.parametrize("form", POSITIONED)
def test_positions_may_be_given(form: str) -> None:
    layer, X = layer_and_input(form)
    close(layer(X, positions=torch.arange(T)), layer(X))
    each = torch.stack([torch.arange(T), torch.arange(T) + 3])
    Y = layer(X, positions=each)
    for b in range(2):
        close(Y[b], layer(X[b : b + 1], positions=each[b])[0])
    spread = 3 * torch.arange(T) if form != "tokens, positions" else torch.arange(T).flip(0)
    assert not torch.allclose(layer(X, positions=spread), layer(X))
    cache = layer.new_cache()
    steps = [layer(X[:, t : t + 1], positions=spread[t : t + 1], cache=cache) for t in range(T)]
    close(torch.cat(steps, 1), layer(X, positions=spread))
    for kind in ("uint8", "int8", "int16", "int32", "uint16", "uint32", "uint64"):
        assert torch.equal(layer(X, positions=spread.to(getattr(torch, kind))), layer(X, positions=spread))
    for given, error, message in (
        (torch.arange(T)[1:], ValueError, "positions has shape"),
        (torch.arange(T).double(), TypeError, "positions has dtype torch.float64"),
        (list(range(T)), TypeError, "positions is of type list"),
    ):
        with pytest.raises(error, match=message):
            layer(X, positions=given)


def test_positions_that_nothing_reads_are_refused() -> None:
    for form in ("latte", "macchiato", "tokens"):
        layer, X = layer_and_input(form)
        with pytest.raises(ValueError, match="positions was given and no part of the layer reads positions"):
            layer(X, positions=torch.arange(T))


@over_all
def test_gradients_reach_all_parameters(form: str) -> None:
    layer, X = layer_and_input(form, 1, 9)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(X: Any, *values: Any) -> Any:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), X)

    assert torch.autograd.gradcheck(run, (X.requires_grad_(), *parameters), fast_mode=True)
    layer(X).square().sum().backward()
    assert all(p.grad.any() for p in parameters)


@over_causal
def test_decoding_under_gradients_keeps_no_graph(form: str) -> None:
    layer, X = layer_and_input(form, T=8)
    cache = layer.new_cache()
    layer(X, cache=cache)
    state = cache.state
    held = [cache.feature, *(getattr(state, name, None) for name in ("k", "V", "logits", "S"))]
    assert not any(getattr(part, "requires_grad", False) for part in held)
    layer(X, cache=cache).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
@over_causal
def test_a_copy_of_a_cache_goes_its_own_way(form: str, how: Any) -> None:
    layer, X = layer_and_input(form)
    cache = layer.new_cache()
    layer(X[:, :9], cache=cache)
    branch = how(cache)
    layer(X[:, :4], cache=branch)
    assert (cache.position, branch.position) == (9, 13)
    close(layer(X[:, 9:], cache=cache), layer(X)[:, 9:])


PRECISE = {
    "latte, vapor": {},
    "macchiato, rg_lru": {"rope": True, "vapor": True},
    "tokens, positions": {"positions": 100},
    "tokens, tied, all": {"positions": 100},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", PRECISE)
def test_half_precision_follows_double(form: str, dtype: Any) -> None:
    exact, X = layer_and_input(form, T=100, **PRECISE[form])
    layer, _ = layer_and_input(form, dtype=dtype, **PRECISE[form])
    layer.load_state_dict(exact.state_dict())
    expected = exact(X).detach()
    room = {torch.bfloat16: 0.06, torch.float16: 0.01, torch.float32: 1e-5}[dtype] * float(expected.abs().max())
    Y = layer(X.to(dtype))
    assert Y.dtype == dtype
    close(Y.double(), expected, room)
    Y.sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {dtype}
    if getattr(layer, "causal", True):
        parts, cache = decoded(layer, X.to(dtype), [10] * 10)
        close(parts.double(), expected, room)
        assert getattr(cache.state, "k", X.to(dtype)).dtype == dtype


@pytest.mark.parametrize("form", ["latte", "latte, rg_lru", "macchiato", "macchiato, conv", "tokens", "tokens, tied"])
def test_autocast_projects_in_half_precision(form: str) -> None:
    layer, X = layer_and_input(form, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        Y = layer(X)
    assert Y.dtype == torch.bfloat16
    close(Y.float(), layer(X), 0.08)
    Y.float().sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}


COMPILED = ["macchiato, rotated", "macchiato, rg_lru", "tokens, positions", "tokens, mean", "tokens, tied, all"]


@pytest.mark.parametrize("form", ["latte", *(pytest.param(form, marks=pytest.mark.thorough) for form in COMPILED)])
def test_a_layer_compiles_whole(form: str) -> None:
    layer, X = layer_and_input(form, dtype=torch.float32)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[0, :5] = False
    for given in ({}, {"mask": mask}, {"offsets": torch.tensor([0, 6, T])}):
        close(fast(X, **given), layer(X, **given), 1e-5)
    fast(X).sum().backward()
    found = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(X).sum().backward()
    for one, p in zip(found, layer.parameters(), strict=True):
        torch.testing.assert_close(one, p.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's, behind a break
@pytest.mark.parametrize("form", ["latte", "tokens", "tokens, positions"])
def test_decoding_compiles_around_its_cache(form: str) -> None:
    layer, X = layer_and_input(form, dtype=torch.float32)
    with torch.no_grad():
        fast = torch.compile(layer, backend="aot_eager")
        cache = layer.new_cache()
        steps = [fast(X[:, low : low + 5], cache=cache) for low in range(0, T, 5)]
        torch.testing.assert_close(torch.cat(steps, 1), layer(X))


@pytest.mark.parametrize("form", ["latte", "macchiato", "tokens, positions"])
def test_a_layer_is_made_where_and_as_it_is_asked_for(form: str) -> None:
    cls, options = KINDS[form.partition(",")[0]]
    layer = cls(C, **{"heads": 3, **options, **CAUSAL[form]}, device="meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float16)}
    assert layer(torch.empty(1, 3, C, device="meta", dtype=torch.float16)).shape == (1, 3, C)


@over_kinds
def test_wrong_calls_are_named(kind: str) -> None:
    layer, X = layer_and_input(kind)
    mask = torch.ones(2, T, dtype=torch.bool)
    other = MacchiatoCache() if kind == "latte" else LatteCache()
    wrong = f"cache is of type {type(other).__name__}; expected a {type(layer).__name__}Cache"
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ([[[0.0] * C]], {}, TypeError, "x is of type list; expected a tensor"),
        (X[0], {}, ValueError, r"x has shape \(17, 12\); expected \(B, T, 12\)"),
        (X[..., :3], {}, ValueError, r"x has shape \(2, 17, 3\)"),
        (X, {"mask": [[True]]}, TypeError, "mask is of type list; expected"),
        (X, {"mask": mask[0]}, ValueError, r"mask has shape \(17,\)"),
        (X, {"mask": mask.float()}, ValueError, "dtype torch.float32; expected"),
        (X, {"cache": other}, TypeError, wrong),
    ]
    if kind != "few":
        both = {"offsets": [0, T], "cache": layer.new_cache()}
        refused.append((X, both, ValueError, "cache and offsets were both given"))
        refused.append((X, {"offsets": [0, 16]}, ValueError, "ascend from 0 to T = 17"))
    for x, options, error, message in refused:
        with pytest.raises(error, match=message):
            layer(x, **options)


@pytest.mark.parametrize("form", [*CAUSAL, "few"])
@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2), (2, 3)])
def test_a_cache_goes_with_one_batch_and_is_left_alone_by_errors(form: str, before: int, now: int) -> None:
    layer, X = layer_and_input(form, 3)
    cache = layer.new_cache()
    layer(X[:before], cache=cache)
    with pytest.raises(ValueError, match=r"state (has|is of)|cache holds"):
        layer(X[:now, :1], cache=cache)
    assert cache.position == T


@pytest.mark.parametrize("memory", [CausalConv(C), RGLRU(C)], ids=["conv", "rg_lru"])
def test_a_state_goes_with_one_batch(memory: Any) -> None:
    _, state = memory(torch.randn(3, 5, C))
    for B in (1, 2):
        with pytest.raises(ValueError, match=f"state holds 3 sequences and x has {B}"):
            memory(torch.randn(B, 5, C), state=state)


@pytest.mark.parametrize("kind", ["latte", "tokens", "few"])
def test_a_layer_that_sees_all_does_not_decode(kind: str) -> None:
    options = {"selection": 8} if kind == "few" else {}
    layer, X = layer_and_input(kind, causal=False, **options)
    cache = layer_and_input(kind)[0].new_cache()
    for call in (layer.new_cache, getattr(layer, "state_size", layer.new_cache), lambda: layer(X, cache=cache)):
        with pytest.raises(ValueError, match="causal=False"):
            call()


@pytest.mark.parametrize(("form", "others"), [("latte, vapor", {}), ("macchiato, rotated", {"rope": False})])
def test_rotated_rows_depend_on_distances_only(form: str, others: dict[str, Any]) -> None:
    layer, X = layer_and_input(form)
    cache = layer.new_cache()
    cache.position = 1000
    close(layer(X, cache=cache), layer(X), 1e-10)
    plain, _ = layer_and_input(form, vapor=False, **others)
    assert not torch.allclose(layer(X), plain(X), atol=1e-3)
