"""Layers of pruned attention: what they compute, the dense warm start, decoding, gradients."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import naive_attention as naive

torch = pytest.importorskip("torch")

from levattn.attention import Selection, causal_pruned_attention, pruned_attention  # noqa: E402
from levattn.nn import LevAttention, set_dense  # noqa: E402
from pruned_calls import selected  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

# name -> (options of the layer, options of the oracle)
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "paper": (
        {"size": 5, "scores": "leverage", "center": False},
        {"size": 5, "kind": "leverage", "center": False},
    ),
    "mixture": ({"size": 4, "summaries": 3, "window": 1}, {"size": 4, "R": 3, "window": 1, "kind": "residual"}),
    "grouped": (
        {"size": 4, "summaries": 2, "sinks": 1, "scores": "leverage", "kv_heads": 1},
        {"size": 4, "R": 2, "sinks": 1, "kind": "leverage"},
    ),
    "squares": (
        {"size": 4, "scores": "leverage", "f": 2, "bias": False},
        {"size": 4, "kind": "leverage", "power": 2, "center": False},
    ),
}
over_forms = pytest.mark.parametrize("form", FORMS)
both_orders = pytest.mark.parametrize("causal", [False, True])


def layer_and_input(form: str, causal: bool, *, B: int = 2, T: int = 30, **options: Any) -> Any:
    torch.manual_seed(0)
    renewals = {"renew_every": 4} if causal else {}
    selection, others = selected(renewals | FORMS[form][0])
    layer = LevAttention(12, selection, **{"heads": 2, "causal": causal} | others | options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 2)
    return layer, torch.randn(B, T, 12, dtype=torch.float64)


def answer(layer: Any, x: Any, form: str, *, dense: bool = False) -> Any:
    """What a layer makes of one sequence x (T, C), by the definition."""
    weights = {name: p.detach().numpy() for name, p in layer.named_parameters()}
    G = FORMS[form][0].get("kv_heads", 2)
    Y = x @ weights["qkv.weight"].T + weights.get("qkv.bias", 0)
    Q, K, V = (part.reshape(len(x), -1, 6).swapaxes(0, 1) for part in np.split(Y, [12, 12 + 6 * G], axis=1))
    oracle = FORMS[form][1]
    if dense:
        oracle = {"size": 0 if layer.causal else len(x), "power": oracle.get("power")}
    chunk = (len(x) if dense else 4) if layer.causal else None
    rows = [naive.pruned(Q[2 // G * j : 2 // G * (j + 1)], K[j], V[j], chunk=chunk, **oracle)[0] for j in range(G)]
    return np.concatenate(rows).swapaxes(0, 1).reshape(len(x), 12) @ weights["proj.weight"].T + weights["proj.bias"]


@over_forms
@both_orders
def test_a_layer_is_pruned_attention_of_its_projections(form: str, causal: bool) -> None:
    layer, X = layer_and_input(form, causal)
    for dense in (False, True):
        set_dense(layer, dense)
        for b, x in enumerate(X.numpy()):
            np.testing.assert_allclose(layer(X)[b].detach(), answer(layer, x, form, dense=dense), atol=1e-11)


@over_forms
@both_orders
@pytest.mark.parametrize("dense", [False, True])
def test_masked_positions_are_as_if_they_were_not_there(form: str, causal: bool, dense: bool) -> None:
    layer, X = layer_and_input(form, causal, T=45)
    set_dense(layer, dense)
    mask = torch.from_numpy(np.random.default_rng(1).random((2, 45)) > 0.3)
    mask[0, :5] = False
    X[~mask] = float("nan")
    Y = layer(X, mask=mask).detach()
    for b in range(2):
        np.testing.assert_allclose(Y[b, mask[b]], layer(X[b : b + 1, mask[b]]).detach()[0], atol=1e-11)
        np.testing.assert_array_equal(Y[b, ~mask[b]], layer.proj.bias.detach().expand(int((~mask[b]).sum()), -1))


@over_forms
def test_decoding_in_steps_and_chunks_is_the_whole(form: str) -> None:
    layer, X = layer_and_input(form, True, T=38)
    mask = torch.from_numpy(np.random.default_rng(2).random((2, 38)) > 0.2)
    for given in (None, mask):
        Y = layer(X, mask=given).detach()
        for sizes in ([1] * 38, [9, 1, 28]):
            cache, parts = layer.new_cache(), []
            assert (cache.position, cache.nbytes) == (0, 0)
            for x, flags in zip(X.split(sizes, 1), mask.split(sizes, 1), strict=True):
                parts.append(layer(x, mask=None if given is None else flags, cache=cache))
            np.testing.assert_allclose(torch.cat(parts, 1).detach(), Y, atol=1e-10)
            assert cache.position == 38
    part = cache.state.parts[0]
    assert not part.kept.requires_grad
    assert not part.keys.total.requires_grad
    sizes = []
    for T in (28, 48):  # as many positions of a chunk begun
        cache = layer.new_cache()
        layer(torch.randn(1, T, 12, dtype=torch.float64), cache=cache)
        sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1] > 0


@over_forms
@both_orders
def test_all_parameters_learn_and_the_warm_start_ends(form: str, causal: bool) -> None:
    layer, X = layer_and_input(form, causal)
    model = torch.nn.Sequential(layer, torch.nn.LayerNorm(12), copy.deepcopy(layer)).double()
    found = []
    for dense in (True, False):
        set_dense(model, dense)
        assert {model[0].dense, model[2].dense} == {dense}
        model.zero_grad()
        Y = model(X)
        Y.square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad.abs().max() > 0, name
        found.append(Y.detach())
    assert (found[0] - found[1]).abs().max() > 1e-3
    assert "dense" not in "".join(model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precisions_and_autocast(dtype: Any) -> None:
    layer, X = layer_and_input("mixture", False)
    expected = layer(X).detach().to(torch.float32)
    Y = layer.to(dtype)(X.to(dtype))
    assert Y.dtype == dtype
    if dtype == torch.float32:
        np.testing.assert_allclose(Y.detach(), expected, atol=1e-4)
        with torch.autocast("cpu", torch.bfloat16):
            Y = layer(X.float())
        assert Y.dtype == torch.bfloat16
    assert torch.isfinite(Y.float()).all()


def test_parameters_are_those_of_timm_by_name_and_shape() -> None:
    layer = LevAttention(24, Selection(size=3), heads=4)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "qkv.weight": (72, 24),
        "qkv.bias": (72,),
        "proj.weight": (24, 24),
        "proj.bias": (24,),
    }
    assert not layer.qkv.bias.any()
    grouped = LevAttention(24, Selection(size=3), heads=4, kv_heads=2, bias=False, out_bias=False)
    assert {name: tuple(p.shape) for name, p in grouped.named_parameters()} == {
        "qkv.weight": (48, 24),
        "proj.weight": (24, 24),
    }


def test_a_layer_shows_what_it_was_made_with() -> None:
    layer = LevAttention(24, Selection(0.5, scores="leverage"), heads=4, kv_heads=2, f=2)
    for dense in (False, True):
        set_dense(layer, dense)
        shown = "dim=24, heads=4, causal=False, selection=Selection(0.5, scores='leverage'), kv_heads=2, f=2"
        assert f"  {shown}, dense={dense}\n" in repr(layer)


@pytest.mark.parametrize(
    ("selection", "options", "error", "message"),
    [
        (8, {"heads": 5}, ValueError, "dim is 12 and heads is 5"),
        (8, {"heads": 4, "kv_heads": 3}, ValueError, "heads is 4 and kv_heads is 3; expected a multiple"),
        (8, {"kv_heads": 1.0}, TypeError, "kv_heads is 1.0"),
        (8, {"f": "exp"}, ValueError, "f is 'exp'"),
        (1, {}, ValueError, "budget is 1; expected at least 2 slots"),
        ("few", {}, TypeError, "selection is of type str; expected a Selection, or a number of slots"),
        (Selection(), {}, ValueError, "budget=None, size=None and epsilon=None"),
        (Selection(4, window=9), {}, ValueError, "budget=4 is 4 slots, and .*window=9.* expected a larger budget"),
        (Selection(size=3, renew_every=4), {}, ValueError, "renew_every is 4, and the attention is not causal"),
        (Selection(size=3, scores=np.ones(3)), {}, TypeError, "selection has an array of scores; expected a name"),
        (Selection(size=3, scores="leverage", center=True), {"f": 2}, ValueError, "center is True and f is a power"),
    ],
)
def test_bad_options_are_named(selection: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        LevAttention(12, selection, **{"heads": 4} | options)


def test_scores_of_a_users_own_are_a_function_of_keys_and_values() -> None:
    torch.manual_seed(0)
    X = torch.randn(2, 17, 12)
    for causal in (False, True):
        options = {"size": 4, "renew_every": 4 if causal else None}
        layer = LevAttention(12, Selection(**options, scores=_long_keys), heads=2, causal=causal)
        Q, K, V = (part.unflatten(-1, (2, 6)).transpose(1, 2) for part in layer.qkv(X).split(12, dim=-1))
        own = Selection(**options, scores=_long_keys(K, V).detach())
        Y = causal_pruned_attention(Q, K, V, own) if causal else pruned_attention(Q, K, V, own)
        expected = layer.proj(Y.transpose(1, 2).flatten(2))
        np.testing.assert_allclose(layer(X).detach(), expected.detach(), atol=1e-6)


def _long_keys(K: Any, V: Any) -> Any:
    return (K**2).sum(-1) + V[..., 0]


def test_bad_calls_are_named() -> None:
    layer, X = layer_and_input("paper", True)
    set_dense(layer)
    for call, error, message in (
        (lambda: layer(X, cache=layer.new_cache()), ValueError, "cache was given and the layer is dense"),
        (lambda: set_dense(torch.nn.Linear(2, 2)), ValueError, "model is a Linear without a LevAttention layer"),
        (lambda: set_dense(3), TypeError, "model is of type int"),
        (lambda: set_dense(layer, 1), TypeError, "dense is 1; expected True or False"),  # type: ignore[arg-type]
    ):
        with pytest.raises(error, match=message):
            call()
