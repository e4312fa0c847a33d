"""Layers of latent attention: what they compute, and what they begin with."""

from __future__ import annotations

import math

import numpy as np
import pytest

import naive

torch = pytest.importorskip("torch")

from levattn.nn import Latte  # noqa: E402


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


def test_wrong_options_are_named() -> None:
    for options, error, message in (
        ({"dim": 10, "heads": 4}, ValueError, "dim is 10 and heads is 4; expected a multiple"),
        ({"dim": 6, "heads": 2, "vapor": True}, ValueError, "dim / heads is 3; expected an even number"),
        ({"dim": 0}, ValueError, "dim is 0; expected at least 1"),
        ({"latents": 2.0}, TypeError, "latents is 2.0; expected a whole number"),
        ({"feature": "con"}, ValueError, "feature is 'con'; expected 'conv', 'rg_lru'"),
        ({"feature": 3}, TypeError, "feature is of type int; expected"),
        ({"feature": ["conv"]}, TypeError, "feature is of type list; expected"),
        ({"base": math.nan}, ValueError, "base is nan; expected"),
        ({"base": -1}, ValueError, "base is -1; expected"),
        ({"base": "1"}, TypeError, "base is '1'; expected"),
    ):
        with pytest.raises(error, match=message):
            Latte(**{"dim": 8} | options)
