"""Layers with latents, with and without a window, and short memories: what they compute and begin with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import naive
import naive_attention

torch = pytest.importorskip("torch")

from levattn.attention import Window  # noqa: E402
from levattn.nn import RGLRU, CausalConv, Latte, Macchiato  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def layer_and_input(B: int = 2, T: int = 19, C: int = 12, *, dtype: Any = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = Macchiato(C, **{"heads": 3, "latents": 5, "window": 6, "rope": False, **options}).to(dtype)
    return layer, torch.randn(B, T, C, dtype=dtype)


@pytest.mark.parametrize("causal", [True, False])
def test_a_layer_is_latte_of_its_projections(causal: bool) -> None:
    torch.manual_seed(0)
    layer, X = Latte(12, heads=3, latents=5, causal=causal).double(), torch.randn(2, 17, 12, dtype=torch.float64)
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
    assert "rope=True, vapor=500.0, window=4, overlap='mixture'" in repr(Macchiato(8, 4, heads=2, vapor=500))


@pytest.mark.parametrize("overlap", ["mixture", "exclusive"])
@pytest.mark.parametrize("rotated", [False, True])
def test_a_layer_is_the_mixture_of_its_projections(overlap: str, rotated: bool) -> None:
    layer, X = layer_and_input(C=24, kv_heads=1, window=Window(6, overlap=overlap), rope=rotated, vapor=rotated)
    weights = {name: p.detach().numpy().T for name, p in layer.named_parameters()}
    places = np.arange(19)
    for b, x in enumerate(X.numpy()):
        k, V = x @ weights["Wk.weight"], x @ weights["Wv.weight"]
        if rotated:
            k, V = naive_attention.rotate(k, places), naive_attention.rotate(V, places, inverse=True)
        heads = []
        for h in range(3):
            own, latents = slice(8 * h, 8 * h + 8), slice(5 * h, 5 * h + 5)
            q = x @ weights["Wq.weight"][:, own]
            Q, K = (x @ weights[f"latent_{name}.weight"][:, latents] for name in "qk")
            gate = x @ weights["gate.weight"][:, h] + weights["gate.bias"][h]
            q = naive_attention.rotate(q, places) if rotated else q
            y, _ = naive_attention.macchiato(q, k, V, Q, K, gate, 6, exclusive=overlap == "exclusive")
            heads.append(naive_attention.rotate(y, places) if rotated else y)
        answer = np.concatenate(heads, 1) @ weights["Wo.weight"]
        np.testing.assert_allclose(layer(X)[b].detach(), answer, atol=1e-13)


@pytest.mark.parametrize("delta", [0.05, 0.3])
def test_latents_begin_with_the_weight_that_is_asked_for(delta: float) -> None:
    layer, X = layer_and_input(4, 500, 64, heads=4, latents=32)
    layer.give_latents(delta)
    Q = layer.latent_q(X).unflatten(-1, (4, 32))
    weight = torch.sigmoid(Q.logsumexp(-1) - layer.gate(X)).detach()
    assert abs(float(weight.mean()) - delta) < 0.1 * delta
    assert float(weight.std()) < 0.4 * delta


@pytest.mark.parametrize(("weight", "error"), [(1.0, ValueError), (math.nan, ValueError), ("0.1", TypeError)])
def test_a_weight_of_latents_out_of_range_is_named(weight: Any, error: type[Exception]) -> None:
    layer, _ = layer_and_input()
    before = layer.gate.weight.clone()
    with pytest.raises(error, match=f"weight is {weight!r}; expected"):
        layer.give_latents(weight)
    assert torch.equal(layer.gate.weight, before)


@pytest.mark.parametrize(
    ("cls", "options", "error", "message"),
    [
        (Latte, {"dim": 10, "heads": 4}, ValueError, "dim is 10 and heads is 4; expected a multiple"),
        (Latte, {"dim": 6, "heads": 2, "vapor": True}, ValueError, "dim / heads is 3; expected an even number"),
        (Latte, {"dim": 0}, ValueError, "dim is 0; expected at least 1"),
        (Latte, {"latents": 2.0}, TypeError, "latents is 2.0; expected a whole number"),
        (Latte, {"feature": "con"}, ValueError, "feature is 'con'; expected 'conv', 'rg_lru'"),
        (Latte, {"feature": 3}, TypeError, "feature is of type int; expected"),
        (Latte, {"feature": ["conv"]}, TypeError, "feature is of type list; expected"),
        (Latte, {"vapor": math.nan}, ValueError, "vapor is nan; expected"),
        (Latte, {"vapor": -1}, ValueError, "vapor is -1; expected"),
        (Latte, {"vapor": "1"}, TypeError, "vapor is '1'; expected"),
        (Macchiato, {"dim": 10, "heads": 4}, ValueError, "dim is 10 and heads is 4; expected a multiple"),
        (
            Macchiato,
            {"dim": 12, "heads": 4, "kv_heads": 3},
            ValueError,
            "heads is 4 and kv_heads is 3; expected a multiple",
        ),
        (Macchiato, {"dim": 6}, ValueError, "dim / heads is 3; expected an even number"),
        (Macchiato, {"window": 0}, ValueError, "window is 0; expected at least 1"),
        (Macchiato, {"rope": math.inf}, ValueError, "rope is inf; expected"),
        (Macchiato, {"rope": 1}, ValueError, "rope is 1; expected True, False, or a base"),
        (Macchiato, {"vapor": 0}, ValueError, "vapor is 0; expected True, False, or the base"),
    ],
)
def test_wrong_options_are_named(cls: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cls(**{"dim": 8, "heads": 2} | options)


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
    np.testing.assert_allclose(y[0].detach(), naive_attention.rg_lru(numbers, *gates, weights["a_param"]), atol=1e-14)
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


def test_wrong_arguments_of_memories_are_named() -> None:
    for call, error, message in (
        (lambda: RGLRU(12, heads=5), ValueError, "dim is 12 and heads is 5; expected a multiple"),
        (lambda: CausalConv(4, width=0), ValueError, "width is 0; expected at least 1"),
        (lambda: RGLRU(8)(torch.ones(1, 2, 7)), ValueError, r"x has shape \(1, 2, 7\); expected"),
        (lambda: CausalConv(8)(torch.ones(2, 8)), ValueError, r"x has shape \(2, 8\); expected"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert "RGLRU(dim=12, heads=3)" in repr(RGLRU(12, heads=3))
