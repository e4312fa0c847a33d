"""Layers with a window beside latents, and short memories as layers: what they compute, decoding, sizes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import naive_attention as naive

torch = pytest.importorskip("torch")

from levattn.nn import RGLRU, CausalConv, Latte, LatteCache, Macchiato, MacchiatoCache  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def layer_and_input(B: int = 2, T: int = 19, C: int = 12, *, dtype: Any = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = Macchiato(C, **{"heads": 3, "latents": 5, "window": 6, "rope": False, **options}).to(dtype)
    return layer, torch.randn(B, T, C, dtype=dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "exclusive": {"overlap": "exclusive"},
    "turned": {"rope": True, "vapor": True, "kv_heads": 1},
    "conv": {"feature": "conv", "overlap": "exclusive", "rope": True},
    "rg_lru": {"feature": "rg_lru", "softcap": 5.0, "kv_heads": 1},
    "map": {"feature": torch.nn.LayerNorm(12), "window": 40},
}
over_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.mark.parametrize("overlap", ["mixture", "exclusive"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_layer_is_the_mixture_of_its_projections(overlap: str, turned: bool) -> None:
    layer, X = layer_and_input(C=24, kv_heads=1, overlap=overlap, rope=turned, vapor=turned)
    weights = {name: p.detach().numpy().T for name, p in layer.named_parameters()}
    places = np.arange(19)
    for b, x in enumerate(X.numpy()):
        k, V = x @ weights["Wk.weight"], x @ weights["Wv.weight"]
        if turned:
            k, V = naive.rotate(k, places), naive.rotate(V, places, inverse=True)
        heads = []
        for h in range(3):
            own, latents = slice(8 * h, 8 * h + 8), slice(5 * h, 5 * h + 5)
            q = x @ weights["Wq.weight"][:, own]
            Q, K = (x @ weights[f"latent_{name}.weight"][:, latents] for name in "qk")
            gate = x @ weights["gate.weight"][:, h] + weights["gate.bias"][h]
            q = naive.rotate(q, places) if turned else q
            y, _ = naive.macchiato(q, k, V, Q, K, gate, 6, exclusive=overlap == "exclusive")
            heads.append(naive.rotate(y, places) if turned else y)
        answer = np.concatenate(heads, 1) @ weights["Wo.weight"]
        np.testing.assert_allclose(layer(X)[b].detach(), answer, atol=1e-13)


@over_options
@pytest.mark.parametrize("sizes", [[1] * 19, [5, 1, 13], [0, 19], [18, 1], [3, 0, 7, 9]], ids=str)
def test_decoding_in_any_chunks_equals_the_whole(options: Any, sizes: list[int]) -> None:
    layer, X = layer_and_input(**options)
    cache, parts, low = layer.new_cache(), [], 0
    for size in sizes:
        parts.append(layer(X[:, low : low + size], cache=cache))
        low += size
    torch.testing.assert_close(torch.cat(parts, 1), layer(X), atol=1e-12, rtol=0)
    assert cache.position == 19


@over_options
@pytest.mark.parametrize("B", [1, 4])
def test_a_cache_has_the_size_that_is_stated(options: Any, B: int) -> None:
    layer, X = layer_and_input(B, T=60, **options)
    cache = layer.new_cache()
    assert isinstance(cache, MacchiatoCache)
    assert cache.numbers() == 0
    sizes = set()
    for low, high in ((0, 45), (45, 46), (46, 60)):
        layer(X[:, low:high], cache=cache)
        sizes.add(cache.numbers())
    assert sizes == {B * layer.state_size()}


@over_options
def test_packed_sequences_are_separate_ones(options: Any) -> None:
    layer, X = layer_and_input(**options)
    whole = layer(X, offsets=torch.tensor([0, 8, 19]))
    torch.testing.assert_close(whole, torch.cat([layer(X[:, :8]), layer(X[:, 8:])], 1), atol=1e-12, rtol=0)


@over_options
def test_padding_in_front_and_behind_changes_nothing(options: Any) -> None:
    layer, X = layer_and_input(**options)
    padded = torch.cat([torch.randn(2, 3, 12, dtype=X.dtype), X, torch.randn(2, 2, 12, dtype=X.dtype)], 1)
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[:, :3] = mask[:, 22:] = False
    torch.testing.assert_close(layer(padded, mask=mask)[:, 3:22], layer(X), atol=1e-12, rtol=0)
    cache, runs = layer.new_cache(), (slice(0, 2), slice(2, 9), slice(9, 24))
    parts = [layer(padded[:, rows], mask=mask[:, rows], cache=cache) for rows in runs]
    torch.testing.assert_close(torch.cat(parts, 1)[:, 3:22], layer(X), atol=1e-12, rtol=0)


def test_rows_depend_on_distances_only() -> None:
    layer, X = layer_and_input(rope=True, vapor=True)
    cache = layer.new_cache()
    cache.position = 1000
    torch.testing.assert_close(layer(X, cache=cache), layer(X), atol=1e-10, rtol=0)
    plain, _ = layer_and_input()
    plain.load_state_dict(layer.state_dict())
    assert not torch.allclose(layer(X), plain(X), atol=1e-3)


@pytest.mark.parametrize("delta", [0.05, 0.3])
def test_latents_begin_with_the_weight_that_is_asked_for(delta: float) -> None:
    layer, X = layer_and_input(4, 500, 64, heads=4, latents=32, delta=delta)
    Q = layer.latent_q(X).unflatten(-1, (4, 32))
    weight = torch.sigmoid(Q.logsumexp(-1) - layer.gate(X)).detach()
    assert abs(float(weight.mean()) - delta) < 0.1 * delta
    assert float(weight.std()) < 0.4 * delta


@over_options
def test_gradients_reach_all_parameters(options: Any) -> None:
    layer, X = layer_and_input(1, 9, **options)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(X: Any, *values: Any) -> Any:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), X)

    assert torch.autograd.gradcheck(run, (X.requires_grad_(), *parameters), fast_mode=True)


def test_decoding_under_gradients_keeps_no_graph() -> None:
    layer, X = layer_and_input(feature="rg_lru", overlap="exclusive")
    cache = layer.new_cache()
    layer(X, cache=cache)
    held = (cache.feature, cache.state.k, cache.state.V, cache.state.logits)
    assert not any(x.requires_grad for x in held)
    layer(X, cache=cache).sum().backward()
    assert layer.Wv.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_follows_double(dtype: Any) -> None:
    options: dict[str, Any] = {"feature": "rg_lru", "rope": True, "vapor": True}
    exact, X = layer_and_input(T=60, **options)
    layer, _ = layer_and_input(dtype=dtype, **options)
    layer.load_state_dict(exact.state_dict())
    expected = exact(X).detach()
    room = {torch.bfloat16: 0.06, torch.float16: 0.01, torch.float32: 1e-5}[dtype] * float(expected.abs().max())
    Y = layer(X.to(dtype))
    assert Y.dtype == dtype
    torch.testing.assert_close(Y.double(), expected, atol=room, rtol=0)
    Y.sum().backward()
    assert layer.gate.weight.grad.dtype == dtype
    cache = layer.new_cache()
    parts = [layer(X[:, t : t + 10].to(dtype), cache=cache) for t in range(0, 60, 10)]
    torch.testing.assert_close(torch.cat(parts, 1).double(), expected, atol=room, rtol=0)
    assert cache.state.k.dtype == dtype


@pytest.mark.parametrize("feature", [None, "conv", "rg_lru"])
def test_autocast_projects_in_half_precision(feature: Any) -> None:
    layer, X = layer_and_input(dtype=torch.float32, rope=True, feature=feature)
    with torch.autocast("cpu", torch.bfloat16):
        Y = layer(X)
    assert Y.dtype == torch.bfloat16
    torch.testing.assert_close(Y.float(), layer(X), atol=0.08, rtol=0)
    Y.float().sum().backward()
    assert layer.Wk.weight.grad.dtype == torch.float32


@pytest.mark.thorough  # tests/nn/test_nn.py has one for every change
@pytest.mark.parametrize("options", [{"rope": True, "vapor": True}, {"overlap": "exclusive", "feature": "rg_lru"}])
def test_a_layer_compiles_whole(options: Any) -> None:
    layer, X = layer_and_input(dtype=torch.float32, **options)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fast(X), layer(X))
    fast(X).sum().backward()
    found = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(X).sum().backward()
    for one, p in zip(found, layer.parameters(), strict=True):
        torch.testing.assert_close(one, p.grad, atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()


def test_wrong_arguments_are_named() -> None:
    layer, X = layer_and_input()
    for call, error, message in (
        (lambda: Macchiato(10, heads=4), ValueError, "dim is 10, heads 4 .*expected multiples"),
        (lambda: Macchiato(12, heads=4, kv_heads=3), ValueError, "kv_heads 3; expected multiples"),
        (lambda: Macchiato(6, heads=2), ValueError, "dim / heads is 3; expected an even number"),
        (lambda: Macchiato(8, window=0), ValueError, "window is 0; expected at least 1"),
        (lambda: Macchiato(8, heads=2, overlap="both"), ValueError, "overlap is 'both'; expected"),
        (lambda: Macchiato(8, heads=2, delta=1.0), ValueError, "delta is 1.0; expected"),
        (lambda: Macchiato(8, heads=2, delta=math.nan), ValueError, "delta is nan; expected"),
        (lambda: Macchiato(8, heads=2, delta="0.1"), TypeError, "delta is '0.1'; expected"),
        (lambda: Macchiato(8, heads=2, base=math.inf), ValueError, "base is inf; expected"),
        (lambda: Macchiato(8, heads=2, softcap=-2), ValueError, "softcap is -2; expected"),
        (lambda: Macchiato(8, heads=2)(torch.ones(1, 2, 8), cache=LatteCache()), TypeError, "cache is of type LatteC"),
        (lambda: Macchiato(8, heads=2, feature="lru"), ValueError, "feature is 'lru'; expected 'conv', 'rg_lru'"),
        (lambda: layer(X[0]), ValueError, r"x has shape \(19, 12\); expected \(B, T, 12\)"),
        (lambda: layer(X, mask=torch.ones(19, dtype=torch.bool)), ValueError, r"mask has shape \(19,\)"),
        (lambda: layer(X, offsets=[0, 19], cache=layer.new_cache()), ValueError, "cache and offsets were both given"),
        (lambda: RGLRU(12, heads=5), ValueError, "dim is 12 and heads is 5; expected a multiple"),
        (lambda: CausalConv(4, width=0), ValueError, "width is 0; expected at least 1"),
    ):
        with pytest.raises(error, match=message):
            call()
    cache = layer.new_cache()
    layer(X, cache=cache)
    with pytest.raises(ValueError, match="state has"):
        layer(X[:1], cache=cache)
    assert cache.position == 19


# Short memories


def test_the_recurrence_is_that_of_its_gates() -> None:
    torch.manual_seed(0)
    layer, x = RGLRU(6, heads=2).double(), torch.randn(1, 12, 6, dtype=torch.float64)
    torch.nn.init.normal_(layer.bias_x)
    weights = {name: p.detach().numpy() for name, p in layer.named_parameters()}
    numbers = x[0].numpy()
    gates = []
    for name in "xa":
        blocks = [numbers[:, 3 * h : 3 * h + 3] @ weights[f"gate_{name}"][h] for h in range(2)]
        gates.append(np.concatenate(blocks, 1) + weights[f"bias_{name}"])
    y, state = layer(x)
    np.testing.assert_allclose(y[0].detach(), naive.rg_lru(numbers, *gates, weights["a_param"]), atol=1e-14)
    assert state.numel() == layer.state_size()


def test_decays_begin_as_they_are_stated() -> None:
    torch.manual_seed(0)
    layer = RGLRU(4000)
    decay = torch.exp(-torch.nn.functional.softplus(layer.a_param.detach().double()))
    assert float(decay.min()) > 0.9 - 1e-6
    assert float(decay.max()) < 0.999 + 1e-6
    assert abs(float((decay**2).mean()) - (0.9**2 + 0.999**2) / 2) < 0.005
    half_open = decay**4
    assert 0.65 < float(half_open.min()) < 0.66
    assert 0.99 < float(half_open.max()) < 0.9961


def test_a_convolution_is_that_of_torch() -> None:
    torch.manual_seed(0)
    layer, x = CausalConv(6, width=3), torch.randn(2, 12, 6)
    torch.nn.init.normal_(layer.bias)
    other = torch.nn.functional.conv1d(
        torch.nn.functional.pad(x.mT, (2, 0)), layer.weight[:, None, :], layer.bias, groups=6
    )
    y, state = layer(x)
    torch.testing.assert_close(y, other.mT)
    assert state.numel() == 2 * layer.state_size()
    assert "dim=6, width=3" in repr(layer)


@pytest.mark.parametrize("feature", ["conv", "rg_lru"])
def test_memories_go_before_plain_latents_too(feature: str) -> None:
    torch.manual_seed(0)
    layer, X = Latte(8, heads=2, latents=3, feature=feature).double(), torch.randn(2, 11, 8, dtype=torch.float64)
    cache = layer.new_cache()
    parts = [layer(X[:, t : t + 1], cache=cache) for t in range(11)]
    torch.testing.assert_close(torch.cat(parts, 1), layer(X), atol=1e-12, rtol=0)
    assert cache.numbers() == 2 * layer.state_size()
