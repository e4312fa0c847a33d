"""Layers of latent attention: what they compute, decoding with a cache, sizes, precisions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import naive

torch = pytest.importorskip("torch")

from levattn.nn import RGLRU, CausalConv, Latte, LatteCache, MacchiatoCache  # noqa: E402


def layer_and_input(B: int = 2, T: int = 17, C: int = 12, *, dtype: Any = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = Latte(C, **{"heads": 3, "latents": 5, **options}).to(dtype)
    return layer, torch.randn(B, T, C, dtype=dtype)


class RunningSum(torch.nn.Module):
    """A feature with a state: the input and half of what was before."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def state_size(self) -> int:
        return self.dim

    def forward(self, x: Any, *, offsets: Any = None, state: Any = None) -> Any:
        h = x.new_zeros(x.shape[0], x.shape[2]) if state is None else state
        starts = [] if offsets is None else list(offsets)
        rows = []
        for t in range(x.shape[1]):
            h = x[:, t] + (0 if t in starts else 0.5 * h)
            rows.append(h)
        return torch.stack(rows, 1) if rows else x, h


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "vapor": {"vapor": True},
    "memory": {"feature": RunningSum(12)},
    "conv": {"feature": "conv"},
    "rg_lru": {"feature": "rg_lru", "vapor": True},
    "map": {"feature": torch.nn.LayerNorm(12), "vapor": True},
}
over_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.mark.parametrize("causal", [True, False])
def test_a_layer_is_latte_of_its_projections(causal: bool) -> None:
    layer, X = layer_and_input(causal=causal)
    Wq, Wk, Wv, Wo = (getattr(layer, name).weight.detach().numpy().T for name in ("Wq", "Wk", "Wv", "Wo"))
    for b, x in enumerate(X.numpy()):
        heads = [
            naive.latte(
                x @ Wq[:, 5 * h : 5 * h + 5], x @ Wk[:, 5 * h : 5 * h + 5], x @ Wv[:, 4 * h : 4 * h + 4], causal=causal
            )
            for h in range(3)
        ]
        np.testing.assert_allclose(layer(X)[b].detach(), np.concatenate(heads, 1) @ Wo, atol=1e-13)


def test_parameters_are_those_that_are_stated() -> None:
    layer = Latte(64, heads=4, latents=32)
    assert sum(p.numel() for p in layer.parameters()) == 2 * 64 * (4 * 32 + 64)
    assert not any("bias" in name for name, _ in layer.named_parameters())
    for projection in (layer.Wq, layer.Wk, layer.Wv, layer.Wo):
        assert abs(float(projection.weight.detach().std()) * math.sqrt(64) - 1) < 0.05
    assert "dim=64, heads=4, latents=32, causal=True, vapor=False" in repr(layer)


@over_options
@pytest.mark.parametrize("sizes", [[1] * 17, [5, 1, 11], [0, 17], [16, 1]], ids=str)
def test_decoding_in_any_chunks_equals_the_whole(options: Any, sizes: list[int]) -> None:
    layer, X = layer_and_input(**options)
    cache = layer.new_cache()
    parts, low = [], 0
    for size in sizes:
        parts.append(layer(X[:, low : low + size], cache=cache))
        low += size
    torch.testing.assert_close(torch.cat(parts, 1), layer(X), atol=1e-12, rtol=0)
    assert cache.position == 17


@over_options
@pytest.mark.parametrize("B", [1, 4])
def test_a_cache_has_the_size_that_is_stated(options: Any, B: int) -> None:
    layer, X = layer_and_input(B, **options)
    cache = layer.new_cache()
    assert isinstance(cache, LatteCache)
    assert cache.numbers() == 0
    for low, high in ((0, 9), (9, 10), (10, 17)):
        layer(X[:, low:high], cache=cache)
        assert cache.numbers() == B * layer.state_size()


@over_options
def test_packed_sequences_are_separate_ones(options: Any) -> None:
    layer, X = layer_and_input(**options)
    whole = layer(X, offsets=torch.tensor([0, 6, 17]))
    separate = torch.cat([layer(X[:, :6]), layer(X[:, 6:])], 1)
    torch.testing.assert_close(whole, separate, atol=1e-12, rtol=0)


@over_options
def test_padding_in_front_and_behind_changes_nothing(options: Any) -> None:
    layer, X = layer_and_input(**options)
    padded = torch.cat([torch.randn(2, 3, 12, dtype=X.dtype), X, torch.randn(2, 2, 12, dtype=X.dtype)], 1)
    mask = torch.ones(2, 22, dtype=torch.bool)
    mask[:, :3] = mask[:, 20:] = False
    torch.testing.assert_close(layer(padded, mask=mask)[:, 3:20], layer(X), atol=1e-12, rtol=0)
    cache = layer.new_cache()
    parts = [layer(padded[:, r], mask=mask[:, r], cache=cache) for r in (slice(0, 8), slice(8, 22))]
    torch.testing.assert_close(torch.cat(parts, 1)[:, 3:20], layer(X), atol=1e-12, rtol=0)


def test_rows_of_vapor_depend_on_distances_only() -> None:
    layer, X = layer_and_input(vapor=True)
    cache = layer.new_cache()
    cache.position = 1000
    torch.testing.assert_close(layer(X, cache=cache), layer(X), atol=1e-10, rtol=0)
    plain, _ = layer_and_input()
    plain.load_state_dict(layer.state_dict())
    assert not torch.allclose(layer(X), plain(X), atol=1e-3)


def test_bidirectional_rows_see_everything() -> None:
    layer, X = layer_and_input(causal=False)
    order = torch.randperm(17)
    torch.testing.assert_close(layer(X[:, order]), layer(X)[:, order], atol=1e-12, rtol=0)


@over_options
def test_gradients_reach_all_parameters(options: Any) -> None:
    layer, X = layer_and_input(1, 6, **options)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(X: Any, *values: Any) -> Any:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), X)

    assert torch.autograd.gradcheck(run, (X.requires_grad_(), *parameters), fast_mode=True)


def test_decoding_under_gradients_keeps_no_graph() -> None:
    layer, X = layer_and_input(feature=RunningSum(12))
    cache = layer.new_cache()
    layer(X, cache=cache)
    assert not cache.feature.requires_grad
    layer(X, cache=cache).sum().backward()
    assert layer.Wv.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_follows_double(dtype: Any) -> None:
    exact, X = layer_and_input(T=100, vapor=True)
    layer, _ = layer_and_input(dtype=dtype, vapor=True)
    layer.load_state_dict(exact.state_dict())
    expected = exact(X)
    room = {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float32: 1e-5}[dtype] * float(
        expected.detach().abs().max()
    )
    Y = layer(X.to(dtype))
    assert Y.dtype == dtype
    torch.testing.assert_close(Y.double(), expected, atol=room, rtol=0)
    Y.sum().backward()
    assert layer.Wq.weight.grad.dtype == dtype
    cache = layer.new_cache()
    parts = [layer(X[:, t : t + 10].to(dtype), cache=cache) for t in range(0, 100, 10)]
    torch.testing.assert_close(torch.cat(parts, 1).double(), expected, atol=room, rtol=0)


def test_autocast_projects_in_half_precision() -> None:
    layer, X = layer_and_input(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        Y = layer(X)
    assert Y.dtype == torch.bfloat16
    torch.testing.assert_close(Y.float(), layer(X), atol=0.05, rtol=0)
    Y.float().sum().backward()
    assert layer.Wk.weight.grad.dtype == torch.float32


@pytest.mark.usefixtures("fresh_compiler")
def test_a_layer_compiles_whole() -> None:
    layer, X = layer_and_input(dtype=torch.float32)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fast(X), layer(X))
    fast(X).sum().backward()
    found = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(X).sum().backward()
    for one, p in zip(found, layer.parameters(), strict=True):
        torch.testing.assert_close(one, p.grad)


@pytest.mark.thorough
@pytest.mark.usefixtures("fresh_compiler")
def test_decoding_compiles_around_its_cache() -> None:
    layer, X = layer_and_input(dtype=torch.float32)
    cache, fast = layer.new_cache(), torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        steps = [fast(X[:, low : low + 5], cache=cache) for low in range(0, 17, 5)]
        torch.testing.assert_close(torch.cat(steps, 1), layer(X))


def test_a_layer_is_made_where_and_as_it_is_asked_for() -> None:
    layer = Latte(8, heads=2, latents=2, device="meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float16)}
    assert layer(torch.empty(1, 3, 8, device="meta", dtype=torch.float16)).shape == (1, 3, 8)


def test_wrong_arguments_are_named() -> None:
    layer, X = layer_and_input()
    mask = torch.ones(2, 17, dtype=torch.bool)
    both, _ = layer_and_input(causal=False)
    for call, error, message in (
        (lambda: Latte(10, heads=4), ValueError, "dim is 10 and heads is 4; expected a multiple"),
        (lambda: Latte(6, heads=2, vapor=True), ValueError, "dim / heads is 3; expected an even number"),
        (lambda: Latte(0), ValueError, "dim is 0; expected at least 1"),
        (lambda: Latte(8, latents=2.0), TypeError, "latents is 2.0; expected a whole number"),
        (lambda: Latte(8, feature="con"), ValueError, "feature is 'con'; expected"),
        (lambda: Latte(8, feature=3), TypeError, "feature is of type int; expected"),
        (lambda: Latte(8, feature=["conv"]), TypeError, "feature is of type list; expected"),
        (lambda: Latte(8, base=math.nan), ValueError, "base is nan; expected"),
        (lambda: Latte(8, base=-1), ValueError, "base is -1; expected"),
        (lambda: Latte(8)([[[0.0] * 8]]), TypeError, "x is of type list; expected a tensor"),
        (lambda: Latte(8)(torch.ones(1, 2, 8), cache=MacchiatoCache()), TypeError, "cache is of type MacchiatoCache"),
        (lambda: Latte(8)(torch.ones(1, 2, 8), mask=[[True, True]]), TypeError, "mask is of type list; expected"),
        (lambda: RGLRU(8)(torch.ones(1, 2, 7)), ValueError, r"x has shape \(1, 2, 7\); expected"),
        (lambda: CausalConv(8)(torch.ones(2, 8)), ValueError, r"x has shape \(2, 8\); expected"),
        (lambda: layer(X[0]), ValueError, r"x has shape \(17, 12\); expected \(B, T, 12\)"),
        (lambda: layer(X[..., :3]), ValueError, r"x has shape \(2, 17, 3\)"),
        (lambda: layer(X, mask=mask[0]), ValueError, r"mask has shape \(17,\)"),
        (lambda: layer(X, mask=mask.float()), ValueError, "dtype torch.float32; expected"),
        (lambda: layer(X, offsets=[0, 17], cache=layer.new_cache()), ValueError, "cache and offsets were both given"),
        (both.new_cache, ValueError, "causal=False"),
        (both.state_size, ValueError, "causal=False"),
        (lambda: both(X, cache=layer.new_cache()), ValueError, "causal=False"),
    ):
        with pytest.raises(error, match=message):
            call()
    cache = layer.new_cache()
    layer(X, cache=cache)
    with pytest.raises(ValueError, match=r"state has batch \(2, 3\)"):
        layer(X[:1], cache=cache)
    assert cache.position == 17
