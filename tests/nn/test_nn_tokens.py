"""Layers of token statistics attention: what they compute and begin with, positions, weights of the public code."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import naive_attention as naive

torch = pytest.importorskip("torch")

from layers import ALL, layer_and_input  # noqa: E402

from levattn.attention import TokenForm, rates  # noqa: E402
from levattn.nn import TokenStatistics  # noqa: E402
from token_calls import memberships  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")


def answer(layer: Any, x: Any, options: dict[str, Any]) -> Any:
    """What a layer makes of one sequence x (T, C), by the definition."""
    weights = {name: p.detach().double().numpy() for name, p in layer.named_parameters()}
    W = (x @ weights["project.weight"].T + weights.get("project.bias", 0)).reshape(len(x), 3, 4).transpose(1, 0, 2)
    form, offset = options.get("form", TokenForm()), None
    form = form if isinstance(form, TokenForm) else TokenForm(form)
    if "position_bias" in weights:
        offset = 4 * weights["position_bias"][:, : len(x)]
    Y, _ = naive.token_statistics(
        W,
        weights.get("temperature", np.ones(3)),
        form.membership,
        options.get("causal", True),
        form.normalize == "mean",
        offset,
        form.decay,
        form.c,
    )
    y = Y.transpose(1, 0, 2).reshape(len(x), 12)
    if options.get("output") == "tied":
        return y @ weights["project.weight"]
    return y @ weights["out.weight"].T + weights.get("out.bias", 0)


@pytest.mark.parametrize("form", [form for form in ALL if form.startswith("tokens") and form != "tokens, leverage"])
def test_a_layer_is_token_statistics_of_its_projections(form: str) -> None:
    layer, X = layer_and_input(form)
    for b, x in enumerate(X.numpy()):
        np.testing.assert_allclose(layer(X)[b].detach(), answer(layer, x, ALL[form]), atol=1e-12)


def test_parameters_are_those_that_are_stated_and_begin_as_the_authors_do() -> None:
    torch.manual_seed(0)
    layer = TokenStatistics(96, heads=4, causal=True, positions=30)
    assert sum(p.numel() for p in layer.parameters()) == 2 * 96 * 96 + 4 + 4 * 30 + 96
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "project.weight": (96, 96),
        "temperature": (4,),
        "position_bias": (4, 30),
        "out.weight": (96, 96),
        "out.bias": (96,),
    }
    assert abs(float(layer.project.weight.detach().std()) / 0.02 - 1) < 0.05
    assert abs(float(layer.out.weight.detach().std()) / 0.02 - 1) < 0.05
    assert layer.temperature.tolist() == [1] * 4
    assert not layer.position_bias.any()
    assert not layer.out.bias.any()
    mean = TokenStatistics(96, TokenForm(normalize="mean"), heads=6, output="tied", bias=True)
    assert mean.temperature.tolist() == [0.25] * 6
    assert sum(p.numel() for p in mean.parameters()) == 96 * 96 + 96 + 6
    assert mean.out is None
    assert TokenStatistics(8, "uniform").temperature is None
    for membership, sums in (("diag_leverage", 2), ("norm", 1)):
        assert TokenStatistics(12, membership, heads=3, causal=True).state_size() == sums * (12 + 3)


def test_what_does_not_decay_is_named() -> None:
    assert TokenStatistics(8, positions=4).no_weight_decay() == {"temperature", "position_bias"}
    assert TokenStatistics(8).no_weight_decay() == {"temperature"}
    assert TokenStatistics(8, "uniform").no_weight_decay() == set()


def test_a_layer_shows_what_it_was_made_with() -> None:
    assert "dim=64, heads=4, causal=True, membership='norm', output='tied', decay=0.5, c=2.0" in repr(
        TokenStatistics(64, TokenForm("norm", decay=0.5, c=2), heads=4, causal=True, output="tied")
    )
    assert "output='untied', normalize='mean', positions=9\n" in repr(
        TokenStatistics(64, TokenForm(normalize="mean"), positions=9)
    )
    assert "decay=(0.5, 1.0)" in repr(TokenStatistics(4, TokenForm(decay=np.array([0.5, 1])), heads=2, causal=True))


@pytest.mark.parametrize("options", [{}, {"out_bias": False}, {"output": "tied"}], ids=str)
def test_rows_of_masked_tokens_are_the_bias_of_the_output(options: Any) -> None:
    layer, X = layer_and_input("tokens", **options)
    mask = torch.ones(2, 17, dtype=torch.bool)
    mask[0, :3] = mask[1, 5:9] = False
    cache = layer.new_cache()
    Y = layer(X, mask=mask, cache=cache)
    nothing = torch.zeros(12, dtype=X.dtype) if layer.out is None or layer.out.bias is None else layer.out.bias
    torch.testing.assert_close(Y[~mask], nothing.expand(7, 12), atol=0, rtol=0)
    assert cache.position == 17
    assert cache.state.tokens.count.tolist() == [[14] * 3, [13] * 3]


def test_positions_go_on_behind_sequences_of_several_lengths() -> None:
    """Two prompts of other lengths are padded together, and then go on token by token without a mask."""
    layer, X = layer_and_input("tokens", positions=17)
    prompt = X[:, :8].clone()
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, :3] = False
    cache = layer.new_cache()
    layer(prompt, mask=mask, cache=cache)
    steps = [layer(X[:, t : t + 1], cache=cache) for t in range(8, 13)]
    for b, first in ((0, 3), (1, 0)):
        whole = layer(X[b : b + 1, first:13])
        torch.testing.assert_close(torch.cat(steps, 1)[b], whole[0, 8 - first :], atol=1e-12, rtol=0)


def test_packed_and_masked_positions_begin_anew_in_each_sequence() -> None:
    layer, X = layer_and_input("tokens", positions=11)
    mask = torch.ones(2, 17, dtype=torch.bool)
    mask[0, :2] = mask[1, 7] = False
    Y = layer(X, mask=mask, offsets=[0, 6, 17])
    separate = torch.cat([layer(X[:, :6], mask=mask[:, :6]), layer(X[:, 6:], mask=mask[:, 6:])], 1)
    torch.testing.assert_close(Y, separate, atol=1e-12, rtol=0)
    torch.testing.assert_close(Y[0, 2:6], layer(X[:1, 2:6])[0], atol=1e-12, rtol=0)


def test_longer_sequences_than_there_are_positions_are_refused() -> None:
    layer, X = layer_and_input("tokens", positions=11)
    mask = torch.ones(2, 17, dtype=torch.bool)
    mask[:, 3:9] = False
    assert layer(X, mask=mask).shape == X.shape
    mask[1, 3] = True
    for given in ({}, {"mask": mask}, {"offsets": [0, 5, 17]}, {"offsets": torch.tensor([0, 5, 17])}):
        with pytest.raises(ValueError, match=r"a sequence has 1[27] tokens and the layer 11 positions; expected"):
            layer(X, **given)
    cache = layer.new_cache()
    layer(X[:, :10], cache=cache)
    for _ in range(2):
        with pytest.raises(ValueError, match="has 12 tokens and the layer 11 positions"):
            layer(X[:, 10:12], cache=cache)
    layer(X[:, 10:11], cache=cache)
    assert cache.position == 11


@pytest.mark.parametrize("causal", [True, False])
def test_tied_outputs_of_orthonormal_maps_shrink_every_coordinate(causal: bool) -> None:
    """With orthonormal maps each coordinate shrinks by a factor between 0 and 1, and so do tokens."""
    layer, X = layer_and_input("tokens", output="tied", causal=causal, form="norm")
    with torch.no_grad():
        torch.nn.init.orthogonal_(layer.project.weight)
        Y = layer(X)
        before, after = layer.project(X), layer.project(X + Y)
    assert Y.shape == X.shape
    assert ((after / before > 0) & (after / before < 1)).all()
    assert ((X + Y).norm(dim=-1) < X.norm(dim=-1)).all()


@pytest.mark.parametrize("seed", range(5))
def test_tied_outputs_lower_the_variational_rate_for_fixed_memberships(seed: int) -> None:
    """Maps of a norm just below √2, which need not be orthonormal, and c = 1."""
    layer, X = layer_and_input("tokens", output="tied", causal=False, form="norm")
    torch.manual_seed(seed)
    heads, C = layer.heads, X.shape[-1]
    with torch.no_grad():
        U = torch.randn(heads, C // heads, C, dtype=torch.float64)
        U *= 1.4 / torch.linalg.matrix_norm(U, ord=2)[:, None, None]
        layer.project.weight.copy_(U.flatten(0, 1))
        W = layer.project(X).unflatten(-1, (heads, -1)).transpose(1, 2)
        Pi = memberships(W, layer.temperature, membership="norm", causal=False).transpose(1, 2)
        rate = [rates.variational_rate(Z, Pi, U.mT, C**0.5) for Z in (X, X + layer(X))]  # c = C / eps² = 1
    assert (rate[1] < rate[0]).all()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dim": 10, "heads": 4}, ValueError, "dim is 10 and heads is 4; expected a multiple"),
    ({"dim": 0}, ValueError, "dim is 0; expected at least 1"),
    ({"heads": 2.0}, TypeError, "heads is 2.0; expected a whole number"),
    ({"form": "nom"}, ValueError, "membership is 'nom'; expected one of 'diag"),
    ({"form": None}, ValueError, "membership is None; expected one of 'diag"),
    ({"causal": True, "form": "leverage"}, ValueError, "'leverage' and causal is True"),
    ({"form": TokenForm(normalize="max")}, ValueError, "normalize is 'max'; expected 'sum' or 'mean'"),
    ({"form": TokenForm("norm", normalize="mean")}, ValueError, "normalize is 'mean' and"),
    ({"form": "uniform", "positions": 3}, ValueError, "positions was given and member"),
    ({"output": "both"}, ValueError, "output is 'both'; expected 'untied' or 'tied'"),
    ({"form": TokenForm(decay=0.5)}, ValueError, "decay was given and causal is False"),
    ({"causal": True, "form": TokenForm(decay=1.5)}, ValueError, "decay is 1.5; expected numbers above 0"),
    ({"causal": True, "form": TokenForm(decay=[0.5])}, ValueError, r"decay is \[0.5\]; expected .* 8 heads"),
    ({"causal": True, "form": TokenForm(decay="x")}, ValueError, "decay is 'x'; expected a number in"),
    (
        {"causal": True, "form": TokenForm(decay=torch.ones(8, requires_grad=True))},
        ValueError,
        "decay requires a gradient",
    ),
    ({"positions": 0}, ValueError, "positions is 0; expected at least 1"),
    ({"form": TokenForm(c=0)}, ValueError, "c is 0; expected a finite number above 0"),
    ({"form": TokenForm(bias=np.zeros((8, 3)))}, ValueError, "form has a bias, .*expected none. Give positions="),
    ({"form": np.zeros((8, 3))}, ValueError, "membership is .*; expected one of 'diag"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_wrong_options_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TokenStatistics(**{"dim": 8} | options)


# -- weights of the public code ---------------------------------------------------------------


def image_weights(dim: int = 192, heads: int = 4, *, bias: bool = True, prefix: str = "") -> dict[str, Any]:
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(dim))
    stored = {"qkv.weight": randn(dim, dim) / dim**0.5, "temp": 1 + randn(heads, 1).exp()}
    stored |= {"to_out.0.weight": randn(dim, dim) / dim**0.5, "to_out.0.bias": randn(dim)}
    if bias:
        stored["qkv.bias"] = randn(dim)
    return {prefix + name: value for name, value in stored.items()}


def language_weights(
    dim: int = 768, heads: int = 12, block: int = 1024, *, bias: bool = False, prefix: str = ""
) -> dict[str, Any]:
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(dim))
    stored = {"c_attn.weight": randn(dim, dim) / dim**0.5, "temp": randn(heads, 1).exp()}
    stored |= {"denom_bias": 0.05 * randn(heads, block, 1), "c_proj.weight": randn(dim, dim) / dim**0.5}
    if bias:
        stored |= {"c_attn.bias": randn(dim), "c_proj.bias": randn(dim)}
    return {prefix + name: value for name, value in stored.items()}


def image_layer(stored: dict[str, Any], prefix: str, X: Any) -> Any:
    """Equation 14 of the notes on the released code: heads share out tokens by columns of unit norm."""
    get = {name.removeprefix(prefix): value.to(X.dtype) for name, value in stored.items()}
    B, N, C = X.shape
    heads = len(get["temp"])
    w = X @ get["qkv.weight"].T + get.get("qkv.bias", torch.zeros(C, dtype=X.dtype))
    w = w.reshape(B, N, heads, C // heads).permute(0, 2, 1, 3)
    size = torch.sqrt(torch.einsum("bhnd,bhnd->bhd", w, w)).clamp(min=1e-12)
    scores = ((w / size[:, :, None]) ** 2).sum(3)
    shares = torch.softmax(scores * get["temp"], 1)
    weights = shares / (shares.sum(2, keepdim=True) + 1e-8)
    moment = torch.einsum("bhn,bhnd->bhd", weights, w**2)
    y = -(w * shares[..., None]) / (1 + moment[:, :, None])
    return y.permute(0, 2, 1, 3).reshape(B, N, C) @ get["to_out.0.weight"].T + get["to_out.0.bias"]


def language_layer(stored: dict[str, Any], prefix: str, X: Any) -> Any:
    """Equation 15 of the notes on the released code: running sums over the tokens so far."""
    get = {name.removeprefix(prefix): value.to(X.dtype) for name, value in stored.items()}
    B, T, C = X.shape
    heads = len(get["temp"])
    nothing = torch.zeros(C, dtype=X.dtype)
    w = X @ get["c_attn.weight"].T + get.get("c_attn.bias", nothing)
    w = w.reshape(B, T, heads, C // heads).permute(0, 2, 1, 3)
    squares = w**2
    so_far = torch.cumsum(squares, 2).clamp(min=1e-12)
    scores = (squares / so_far + get["denom_bias"][:, :T]).sum(3)
    shares = torch.softmax(scores * get["temp"], 1)[..., None]
    moment = torch.cumsum(squares * shares, 2) / (torch.cumsum(shares, 2) + 1e-8)
    y = -(w * shares) / (1 + moment)
    return y.permute(0, 2, 1, 3).reshape(B, T, C) @ get["c_proj.weight"].T + get.get("c_proj.bias", nothing)


# name -> what is stored, the layer by its definition, its prefix, its sizes, and how many tokens it is tried on
RELEASED: dict[str, tuple[Any, Any, str, dict[str, Any], int]] = {
    "image": (
        image_weights,
        image_layer,
        "blocks.11.attn.",
        {"dim": 192, "heads": 4, "causal": False, "positions": None},
        197,
    ),
    "language": (
        language_weights,
        language_layer,
        "transformer.h.0.attn.",
        {"dim": 768, "heads": 12, "causal": True, "positions": 1024},
        300,
    ),
}


@pytest.mark.parametrize("kind", RELEASED)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_released_weights_make_the_released_layer(dtype: Any, bias: bool, kind: str) -> None:
    weights, definition, prefix, sizes, T = RELEASED[kind]
    stored = {f"blocks.{i}.norm1.weight": torch.ones(192) for i in range(12)}
    stored |= weights(bias=bias, prefix=prefix) | image_weights(prefix="blocks.1.attn.")
    layer = TokenStatistics.from_released(stored, prefix, dtype=dtype)
    assert {name: getattr(layer, name) for name in sizes} == sizes
    X = torch.randn(2, T, sizes["dim"], generator=torch.Generator().manual_seed(1)).to(dtype)
    X[0, :, :7] = 0  # channels that never are anything
    X[:, 0] *= 1e-9  # so that the least sum of squares shows
    expected, room = definition(stored, prefix, X), {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(layer(X), expected, atol=room, rtol=0)
    if layer.causal:
        cache = layer.new_cache()
        parts = [layer(X[:, low : low + 100], cache=cache) for low in (0, 100, 200)]
        torch.testing.assert_close(torch.cat(parts, 1), expected, atol=room, rtol=0)
    again = TokenStatistics(**sizes, bias=bias, out_bias=bias or kind == "image").to(dtype)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(X), layer(X))


def test_released_weights_keep_their_precision_and_are_copied() -> None:
    stored = {name: value.bfloat16() for name, value in image_weights(12, 3).items()}
    layer = TokenStatistics.from_released(stored)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    stored["temp"].zero_()
    assert layer.temperature.all()
    assert all(p.requires_grad for p in layer.parameters())


IMAGES, LANGUAGE = image_weights(12, 3), language_weights(12, 3, 9, bias=True)


def without(stored: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in stored.items() if key != name}


UNREADABLE: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    (([1],), TypeError, "state_dict is of type list; expected a dict"),
    ((IMAGES, 3), TypeError, "prefix is 3; expected a string"),
    ((IMAGES, "blocks.0.attn."), ValueError, "neither of blocks.0.attn.qkv.weight and blocks.0.attn"),
    ((IMAGES | LANGUAGE,), ValueError, "both of qkv.weight and c_attn.weight"),
    ((without(IMAGES, "temp"),), ValueError, "state_dict has no temp; expected"),
    ((without(IMAGES, "to_out.0.weight"),), ValueError, "state_dict has no to_out.0.weight"),
    ((without(LANGUAGE, "denom_bias"),), ValueError, "state_dict has no denom_bias; expected"),
    ((IMAGES | {"mask": torch.ones(3)},), ValueError, "state_dict has mask, which is not of a layer"),
    (
        ({f"a.{name}": value for name, value in LANGUAGE.items()} | {"a.bias": torch.ones(3)}, "a."),
        ValueError,
        "state_dict has a.bias, which is not of a layer",
    ),
    ((IMAGES | {"temp": 3.0},), TypeError, "temp is no tensor of floats"),
    ((IMAGES | {"temp": torch.ones(3, 1).int()},), TypeError, "temp is no tensor of floats"),
    ((IMAGES | {"temp": torch.ones(3)},), ValueError, r"temp has shape \(3,\); expected \(3, 1\), with dim = 12"),
    ((IMAGES | {"temp": torch.ones(5, 1)},), ValueError, "dim is 12 and heads is 5; expected a mult"),
    (
        (IMAGES | {"qkv.weight": torch.ones(36, 12)},),
        ValueError,
        r"qkv.weight has shape \(36, 12\); expected \(12",
    ),
    ((IMAGES | {"qkv.bias": torch.ones(36)},), ValueError, r"qkv.bias has shape \(36,\); expected"),
    ((LANGUAGE | {"denom_bias": torch.ones(3, 9)},), ValueError, r"denom_bias has shape \(3, 9\); expected \(3, 9, 1"),
]


@pytest.mark.parametrize(("given", "error", "message"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_released_weights_that_are_none_are_named(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TokenStatistics.from_released(*given)


def test_negative_positions_are_errors_in_a_compiled_call_as_well() -> None:
    layer, x = TokenStatistics(8, heads=2, positions=20), torch.randn(1, 4, 8)
    places = torch.arange(4) - 1
    with pytest.raises(ValueError, match="positions has -1"):
        layer(x, positions=places)
    compiled = torch.compile(lambda x, places: layer(x, positions=places), backend="eager", fullgraph=True)
    with pytest.raises((IndexError, RuntimeError)):
        compiled(x, places)
