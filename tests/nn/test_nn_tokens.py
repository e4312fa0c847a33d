"""Layers of token statistics attention: what they compute, decoding, sizes, precisions, weights of the public code."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

import naive_attention as naive

torch = pytest.importorskip("torch")

from levattn.attention import memberships, rates  # noqa: E402
from levattn.nn import LatteCache, TokenStatistics, TokenStatisticsCache  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")


def layer_and_input(B: int = 2, T: int = 17, C: int = 12, *, dtype: Any = torch.float64, **options: Any) -> Any:
    """A layer whose parameters are all of order 1, so that each of them shows, and an input."""
    torch.manual_seed(0)
    layer = TokenStatistics(C, **{"heads": 3, "causal": True, **options}).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) / (C**0.5 if parameter.ndim == 2 else 1))
    return layer, torch.randn(B, T, C, dtype=torch.float64).to(dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mean": {"normalize": "mean", "bias": True},
    "norm": {"membership": "norm", "decay": 0.9, "out_bias": False},
    "uniform": {"membership": "uniform", "decay": [0.9, 0.5, 1.0]},
    "positions": {"positions": 23, "c": 2.0, "step": 0.5},
    "tied": {"output": "tied", "positions": 17, "membership": "norm"},
}
over_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
BOTH: dict[str, dict[str, Any]] = {
    **{f"{name}-all": {**o, "causal": False} for name, o in OPTIONS.items() if "decay" not in o},
    "leverage": {"membership": "leverage", "normalize": "mean", "causal": False},
    **OPTIONS,
}
over_both = pytest.mark.parametrize("options", BOTH.values(), ids=BOTH)


def answer(layer: Any, x: Any, options: dict[str, Any]) -> Any:
    """What a layer makes of one sequence x (T, C), by the definition."""
    weights = {name: p.detach().double().numpy() for name, p in layer.named_parameters()}
    W = (x @ weights["project.weight"].T + weights.get("project.bias", 0)).reshape(len(x), 3, 4).transpose(1, 0, 2)
    offset = None
    if "position_bias" in weights:
        offset = 4 * weights["position_bias"][:, : len(x)]
    Y, _ = naive.token_statistics(
        W,
        weights.get("temperature", np.ones(3)),
        options.get("membership", "diag_leverage"),
        options.get("causal", True),
        options.get("normalize") == "mean",
        offset,
        options.get("decay"),
        options.get("c", 1.0),
        options.get("step", 1.0),
    )
    y = Y.transpose(1, 0, 2).reshape(len(x), 12)
    if options.get("output") == "tied":
        return y @ weights["project.weight"]
    return y @ weights["out.weight"].T + weights.get("out.bias", 0)


@pytest.mark.parametrize("options", [o for name, o in BOTH.items() if name != "leverage"], ids=str)
def test_a_layer_is_token_statistics_of_its_projections(options: Any) -> None:
    layer, X = layer_and_input(**options)
    for b, x in enumerate(X.numpy()):
        np.testing.assert_allclose(layer(X)[b].detach(), answer(layer, x, options), atol=1e-12)


def test_parameters_are_those_that_are_stated_and_begin_as_the_authors_do() -> None:
    torch.manual_seed(0)
    layer = TokenStatistics(96, heads=4, causal=True, positions=30, out_std=0.02 / math.sqrt(24))
    assert sum(p.numel() for p in layer.parameters()) == 2 * 96 * 96 + 4 + 4 * 30 + 96
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "project.weight": (96, 96),
        "temperature": (4,),
        "position_bias": (4, 30),
        "out.weight": (96, 96),
        "out.bias": (96,),
    }
    assert abs(float(layer.project.weight.detach().std()) / 0.02 - 1) < 0.05
    assert abs(float(layer.out.weight.detach().std()) / 0.02 * math.sqrt(24) - 1) < 0.05
    assert layer.temperature.tolist() == [1] * 4
    assert not layer.position_bias.any()
    assert not layer.out.bias.any()
    mean = TokenStatistics(96, heads=6, normalize="mean", output="tied", bias=True)
    assert mean.temperature.tolist() == [0.25] * 6
    assert sum(p.numel() for p in mean.parameters()) == 96 * 96 + 96 + 6
    assert mean.out is None
    assert TokenStatistics(8, membership="uniform").temperature is None


def test_what_does_not_decay_is_named() -> None:
    assert TokenStatistics(8, positions=4).no_weight_decay() == {"temperature", "position_bias"}
    assert TokenStatistics(8).no_weight_decay() == {"temperature"}
    assert TokenStatistics(8, membership="uniform").no_weight_decay() == set()


def test_a_layer_shows_what_it_was_made_with() -> None:
    assert "dim=64, heads=4, causal=True, membership='norm', output='tied', decay=0.5, c=2.0" in repr(
        TokenStatistics(64, heads=4, causal=True, membership="norm", output="tied", decay=0.5, c=2)
    )
    assert "output='untied', normalize='mean', positions=9\n" in repr(
        TokenStatistics(64, normalize="mean", positions=9)
    )
    assert "decay=(0.5, 1.0)" in repr(TokenStatistics(4, heads=2, causal=True, decay=np.array([0.5, 1])))


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
    assert isinstance(cache, TokenStatisticsCache)
    assert cache.numbers() == 0
    for low, high in ((0, 9), (9, 10), (10, 17)):
        layer(X[:, low:high], cache=cache)
        held = [part for part in (cache.state.norms, cache.state.tokens) if part is not None]
        assert sum(part.read().size + part.weight.size for part in held) == B * layer.state_size()
        assert cache.numbers() == B * layer.state_size()
    assert layer.state_size() == (2 if layer.membership == "diag_leverage" else 1) * (12 + 3)


@over_both
def test_packed_sequences_are_separate_ones(options: Any) -> None:
    layer, X = layer_and_input(**options)
    separate = torch.cat([layer(X[:, :6]), layer(X[:, 6:])], 1)
    for offsets in (torch.tensor([0, 6, 17]), [0, 6, 6, 17], np.array([0, 0, 6, 17])):
        torch.testing.assert_close(layer(X, offsets=offsets), separate, atol=1e-12, rtol=0)


@over_both
def test_padding_in_front_between_and_behind_changes_nothing(options: Any) -> None:
    layer, X = layer_and_input(**options)
    padded = torch.randn(2, 25, 12, dtype=X.dtype)
    mask = torch.ones(2, 25, dtype=torch.bool)
    mask[0, :3] = mask[0, 20:] = mask[1, 8:15] = mask[1, 24] = False
    padded[mask] = X.flatten(0, 1)
    expected = layer(X).flatten(0, 1)
    Y = layer(padded, mask=mask)
    torch.testing.assert_close(Y[mask], expected, atol=1e-12, rtol=0)
    nothing = torch.zeros(12, dtype=X.dtype) if layer.out is None or layer.out.bias is None else layer.out.bias
    torch.testing.assert_close(Y[~mask], nothing.expand(16, 12), atol=0, rtol=0)
    if layer.causal:
        cache = layer.new_cache()
        parts = [layer(padded[:, r], mask=mask[:, r], cache=cache) for r in (slice(0, 9), slice(9, 25))]
        torch.testing.assert_close(torch.cat(parts, 1)[mask], expected, atol=1e-12, rtol=0)
        assert cache.position == 25
        assert cache.state.tokens.count.tolist() == [[17] * 3] * 2


def test_positions_go_on_behind_sequences_of_several_lengths() -> None:
    """Two prompts of other lengths are padded together, and then go on token by token without a mask."""
    layer, X = layer_and_input(positions=17)
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
    layer, X = layer_and_input(positions=11)
    mask = torch.ones(2, 17, dtype=torch.bool)
    mask[0, :2] = mask[1, 7] = False
    Y = layer(X, mask=mask, offsets=[0, 6, 17])
    separate = torch.cat([layer(X[:, :6], mask=mask[:, :6]), layer(X[:, 6:], mask=mask[:, 6:])], 1)
    torch.testing.assert_close(Y, separate, atol=1e-12, rtol=0)
    torch.testing.assert_close(Y[0, 2:6], layer(X[:1, 2:6])[0], atol=1e-12, rtol=0)


def test_longer_sequences_than_there_are_positions_are_refused() -> None:
    layer, X = layer_and_input(positions=11)
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


def test_bidirectional_rows_see_everything() -> None:
    layer, X = layer_and_input(causal=False)
    order = torch.randperm(17)
    torch.testing.assert_close(layer(X[:, order]), layer(X)[:, order], atol=1e-12, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
def test_tied_outputs_of_orthonormal_maps_shrink_every_coordinate(causal: bool) -> None:
    """With orthonormal maps each coordinate shrinks by a factor between 0 and 1, and so do tokens."""
    layer, X = layer_and_input(output="tied", causal=causal, membership="norm")
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
    layer, X = layer_and_input(output="tied", causal=False, membership="norm")
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


@over_both
def test_gradients_reach_all_parameters(options: Any) -> None:
    layer, X = layer_and_input(1, 6, **options)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(X: Any, *values: Any) -> Any:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), X)

    assert torch.autograd.gradcheck(run, (X.requires_grad_(), *parameters), fast_mode=True)
    layer(X).square().sum().backward()
    assert all(p.grad.any() for p in parameters)
    if layer.position_bias is not None:
        assert not layer.position_bias.grad[:, 6:].any()


def test_decoding_under_gradients_keeps_no_graph() -> None:
    layer, X = layer_and_input()
    cache = layer.new_cache()
    layer(X, cache=cache)
    assert isinstance(cache.state.tokens.read(), np.ndarray)
    layer(X, cache=cache).sum().backward()
    assert layer.project.weight.grad.any()


def test_copies_of_layers_and_caches_go_their_own_way() -> None:
    layer, X = layer_and_input(positions=30)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(X), layer(X))
    with torch.no_grad():
        twin.temperature.mul_(3)
    assert not torch.equal(twin(X), layer(X))
    cache = layer.new_cache()
    layer(X[:, :9], cache=cache)
    branch = copy.deepcopy(cache)
    layer(X[:, :4], cache=branch)
    assert (cache.position, branch.position) == (9, 13)
    torch.testing.assert_close(layer(X[:, 9:], cache=cache), layer(X)[:, 9:], atol=1e-12, rtol=0)


@over_both
def test_a_state_dict_makes_the_same_layer(options: Any) -> None:
    layer, X = layer_and_input(**options)
    other = TokenStatistics(12, **{"heads": 3, "causal": True, **options}).double()
    assert not torch.equal(other(X), layer(X))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(X), layer(X))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("options", [{"positions": 100}, {"causal": False, "output": "tied"}], ids=["causal", "all"])
def test_half_precision_follows_double(options: Any, dtype: Any) -> None:
    exact, X = layer_and_input(T=100, **options)
    layer, _ = layer_and_input(dtype=dtype, **options)
    layer.load_state_dict(exact.state_dict())
    expected = exact(X)
    room = {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float32: 1e-5}[dtype]
    room *= float(expected.detach().abs().max())
    Y = layer(X.to(dtype))
    assert Y.dtype == dtype
    torch.testing.assert_close(Y.double(), expected, atol=room, rtol=0)
    Y.sum().backward()
    assert layer.temperature.grad.dtype == layer.project.weight.grad.dtype == dtype
    if layer.causal:
        cache = layer.new_cache()
        parts = [layer(X[:, t : t + 10].to(dtype), cache=cache) for t in range(0, 100, 10)]
        torch.testing.assert_close(torch.cat(parts, 1).double(), expected, atol=room, rtol=0)


@pytest.mark.parametrize("output", ["untied", "tied"])
def test_autocast_projects_in_half_precision(output: str) -> None:
    layer, X = layer_and_input(dtype=torch.float32, output=output)
    with torch.autocast("cpu", torch.bfloat16):
        Y = layer(X)
    assert Y.dtype == torch.bfloat16
    torch.testing.assert_close(Y.float(), layer(X), atol=0.05, rtol=0)
    Y.float().sum().backward()
    assert layer.temperature.grad.dtype == layer.project.weight.grad.dtype == torch.float32


@pytest.mark.thorough  # tests/nn/test_nn.py has one for every change
@pytest.mark.parametrize(
    "options",
    [{"positions": 17}, {"decay": [0.9, 0.5, 1.0], "normalize": "mean"}, {"causal": False, "output": "tied"}],
    ids=["positions", "decay", "all"],
)
def test_a_layer_compiles_whole(options: Any) -> None:
    layer, X = layer_and_input(dtype=torch.float32, **options)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    mask = torch.ones(2, 17, dtype=torch.bool)
    mask[0, :5] = False
    for given in ({}, {"mask": mask}, {"offsets": torch.tensor([0, 6, 17])}):
        torch.testing.assert_close(fast(X, **given), layer(X, **given))
    fast(X).sum().backward()
    found = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(X).sum().backward()
    for one, p in zip(found, layer.parameters(), strict=True):
        torch.testing.assert_close(one, p.grad)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's, behind a break
@pytest.mark.parametrize("options", [{}, {"positions": 17}], ids=["plain", "positions"])
def test_decoding_compiles_around_its_cache(options: Any) -> None:
    layer, X = layer_and_input(dtype=torch.float32, **options)
    cache, fast = layer.new_cache(), torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        steps = [fast(X[:, low : low + 5], cache=cache) for low in range(0, 17, 5)]
        torch.testing.assert_close(torch.cat(steps, 1), layer(X))


def test_a_layer_is_made_where_and_as_it_is_asked_for() -> None:
    layer = TokenStatistics(8, heads=2, positions=5, device="meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float16)}
    assert layer(torch.empty(1, 3, 8, device="meta", dtype=torch.float16)).shape == (1, 3, 8)


def test_wrong_arguments_are_named() -> None:
    layer, X = layer_and_input()
    both, _ = layer_and_input(causal=False)
    mask = torch.ones(2, 17, dtype=torch.bool)
    learned = torch.ones(8, requires_grad=True)
    for call, error, message in (
        (lambda: TokenStatistics(10, heads=4), ValueError, "dim is 10 and heads is 4; expected a multiple"),
        (lambda: TokenStatistics(0), ValueError, "dim is 0; expected at least 1"),
        (lambda: TokenStatistics(8, heads=2.0), TypeError, "heads is 2.0; expected a whole number"),
        (lambda: TokenStatistics(8, membership="nom"), ValueError, "membership is 'nom'; expected one of 'diag"),
        (lambda: TokenStatistics(8, membership=None), ValueError, "membership is None; expected one of 'diag"),
        (lambda: TokenStatistics(8, causal=True, membership="leverage"), ValueError, "'leverage' and causal is True"),
        (lambda: TokenStatistics(8, normalize="max"), ValueError, "normalize is 'max'; expected 'sum' or 'mean'"),
        (lambda: TokenStatistics(8, membership="norm", normalize="mean"), ValueError, "normalize is 'mean' and"),
        (lambda: TokenStatistics(8, membership="uniform", positions=3), ValueError, "positions was given and member"),
        (lambda: TokenStatistics(8, output="both"), ValueError, "output is 'both'; expected 'untied' or 'tied'"),
        (lambda: TokenStatistics(8, decay=0.5), ValueError, "decay was given and causal is False"),
        (lambda: TokenStatistics(8, causal=True, decay=1.5), ValueError, "decay is 1.5; expected numbers above 0"),
        (lambda: TokenStatistics(8, causal=True, decay=[0.5]), ValueError, r"decay is \[0.5\]; expected .* 8 heads"),
        (lambda: TokenStatistics(8, causal=True, decay="x"), ValueError, "decay is 'x'; expected a number in"),
        (lambda: TokenStatistics(8, causal=True, decay=learned), ValueError, "decay requires a gradient"),
        (lambda: TokenStatistics(8, positions=0), ValueError, "positions is 0; expected at least 1"),
        (lambda: TokenStatistics(8, c=0), ValueError, "c is 0; expected a finite number above 0"),
        (lambda: TokenStatistics(8, step="1"), TypeError, "step is '1'; expected a finite number above 0"),
        (lambda: TokenStatistics(8, out_std=math.nan), ValueError, "out_std is nan; expected a finite number"),
        (lambda: TokenStatistics(8)([[[0.0] * 8]]), TypeError, "x is of type list; expected a tensor"),
        (lambda: layer(X, cache=LatteCache()), TypeError, "cache is of type LatteCache; expected a TokenStatisticsC"),
        (lambda: layer(X[0]), ValueError, r"x has shape \(17, 12\); expected \(B, T, 12\)"),
        (lambda: layer(X, mask=mask[0]), ValueError, r"mask has shape \(17,\)"),
        (lambda: layer(X, mask=mask.float()), ValueError, "dtype torch.float32; expected"),
        (lambda: layer(X, offsets=[0, 17], cache=layer.new_cache()), ValueError, "cache and offsets were both given"),
        (lambda: layer(X, offsets=[0, 16]), ValueError, "ascend from 0 to T = 17"),
        (both.new_cache, ValueError, "causal=False"),
        (both.state_size, ValueError, "causal=False"),
        (lambda: both(X, cache=layer.new_cache()), ValueError, "causal=False"),
    ):
        with pytest.raises(error, match=message):
            call()
    for options in ({}, {"positions": 40}):
        layer, X = layer_and_input(**options)
        cache = layer.new_cache()
        layer(X, cache=cache)
        with pytest.raises(ValueError, match=r"state has norms with .* batch \(2, 3\)"):
            layer(X[:1], cache=cache)
        assert cache.position == 17


# -- weights of the public code ---------------------------------------------------------------


def image_weights(dim: int = 192, heads: int = 4, *, bias: bool = True, prefix: str = "") -> dict[str, Any]:
    rng = torch.Generator().manual_seed(dim)

    def randn(*shape: int) -> Any:
        return torch.randn(shape, generator=rng)

    stored = {"qkv.weight": randn(dim, dim) / dim**0.5, "temp": 1 + randn(heads, 1).exp()}
    stored |= {"to_out.0.weight": randn(dim, dim) / dim**0.5, "to_out.0.bias": randn(dim)}
    if bias:
        stored["qkv.bias"] = randn(dim)
    return {prefix + name: value for name, value in stored.items()}


def language_weights(
    dim: int = 768, heads: int = 12, block: int = 1024, *, bias: bool = False, prefix: str = ""
) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(dim)

    def randn(*shape: int) -> Any:
        return torch.randn(shape, generator=rng)

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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_released_image_weights_make_the_released_layer(dtype: Any, bias: bool) -> None:
    prefix = "blocks.11.attn."
    stored = {f"blocks.{i}.norm1.weight": torch.ones(192) for i in range(12)}
    stored |= image_weights(bias=bias, prefix=prefix) | image_weights(prefix="blocks.1.attn.")
    layer = TokenStatistics.from_released(stored, prefix, dtype=dtype)
    assert (layer.dim, layer.heads, layer.causal, layer.positions) == (192, 4, False, None)
    X = torch.randn(2, 197, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    X[0, :, :7] = 0  # and channels that never are anything
    room = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(layer(X), image_layer(stored, prefix, X), atol=room, rtol=0)
    again = TokenStatistics(192, heads=4, bias=bias).to(dtype)
    kept = again.temperature
    assert again.load_released(stored, prefix) is again
    assert again.temperature is kept
    assert torch.equal(again(X), layer(X))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_released_language_weights_make_the_released_layer(dtype: Any, bias: bool) -> None:
    prefix = "transformer.h.0.attn."
    stored = {"transformer.wte.weight": torch.ones(3, 3), **language_weights(bias=bias, prefix=prefix)}
    layer = TokenStatistics.from_released(stored, prefix, dtype=dtype)
    assert (layer.dim, layer.heads, layer.causal, layer.positions) == (768, 12, True, 1024)
    X = torch.randn(1, 300, 768, generator=torch.Generator().manual_seed(1)).to(dtype)
    X[:, 0] = X[:, 0] * 1e-9  # so that the least sum of squares shows
    room = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    expected = language_layer(stored, prefix, X)
    torch.testing.assert_close(layer(X), expected, atol=room, rtol=0)
    cache = layer.new_cache()
    parts = [layer(X[:, low : low + 100], cache=cache) for low in (0, 100, 200)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=room, rtol=0)
    again = TokenStatistics(768, heads=12, causal=True, positions=1024, bias=bias, out_bias=bias).to(dtype)
    assert torch.equal(again.load_released(stored, prefix)(X), layer(X))


def test_released_weights_keep_their_precision_and_are_copied() -> None:
    stored = {name: value.bfloat16() for name, value in image_weights(12, 3).items()}
    layer = TokenStatistics.from_released(stored)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    stored["temp"].zero_()
    assert layer.temperature.all()
    assert all(p.requires_grad for p in layer.parameters())


def test_released_weights_that_do_not_fit_are_named() -> None:
    images, language = image_weights(12, 3), language_weights(12, 3, 9, bias=True)
    plain = TokenStatistics(12, heads=3, bias=True)
    causal = TokenStatistics(12, heads=3, causal=True, positions=9, bias=True)

    def without(stored: dict[str, Any], name: str) -> dict[str, Any]:
        return {key: value for key, value in stored.items() if key != name}

    read = TokenStatistics.from_released
    for call, error, message in (
        (lambda: read([1]), TypeError, "state_dict is of type list; expected a dict"),
        (lambda: read(images, 3), TypeError, "prefix is 3; expected a string"),
        (lambda: read(images, "blocks.0.attn."), ValueError, "neither of blocks.0.attn.qkv.weight and blocks.0.attn"),
        (lambda: read(images | language), ValueError, "both of qkv.weight and c_attn.weight"),
        (lambda: read(without(images, "temp")), ValueError, "state_dict has no temp; expected"),
        (lambda: read(without(images, "to_out.0.weight")), ValueError, "state_dict has no to_out.0.weight"),
        (lambda: read(without(language, "denom_bias")), ValueError, "state_dict has no denom_bias; expected"),
        (lambda: read(images | {"mask": images["temp"]}), ValueError, "state_dict has mask, which is not of a layer"),
        (
            lambda: read({"a." + name: value for name, value in (language | {"bias": images["temp"]}).items()}, "a."),
            ValueError,
            "state_dict has a.bias, which is not of a layer",
        ),
        (lambda: read(images | {"temp": 3.0}), TypeError, "temp is no tensor of floats"),
        (lambda: read(images | {"temp": torch.ones(3, 1).int()}), TypeError, "temp is no tensor of floats"),
        (
            lambda: read(images | {"temp": torch.ones(3)}),
            ValueError,
            r"temp has shape \(3,\); expected \(3, 1\), with dim = 12",
        ),
        (lambda: read(images | {"temp": torch.ones(5, 1)}), ValueError, "dim is 12 and heads is 5; expected a mult"),
        (
            lambda: read(images | {"qkv.weight": torch.ones(36, 12)}),
            ValueError,
            r"qkv.weight has shape \(36, 12\); expected \(12, 12\)",
        ),
        (lambda: read(images | {"qkv.bias": torch.ones(36)}), ValueError, r"qkv.bias has shape \(36,\); expected"),
        (
            lambda: read(language | {"denom_bias": torch.ones(3, 9)}),
            ValueError,
            r"denom_bias has shape \(3, 9\); expected \(3, 9, 1\)",
        ),
        (lambda: plain.load_released(language), ValueError, "of a language model, which is causal, and the layer has"),
        (lambda: causal.load_released(images), ValueError, "of an image model, which is not causal, and the layer"),
        (lambda: plain.load_released(without(images, "qkv.bias")), ValueError, "state_dict has no qkv.bias, which th"),
        (
            lambda: TokenStatistics(12, heads=3).load_released(images),
            ValueError,
            "state_dict has qkv.bias, which this layer has no place for",
        ),
        (
            lambda: TokenStatistics(12, heads=3, bias=True, output="tied").load_released(images),
            ValueError,
            "state_dict has to_out.0.weight, to_out.0.bias, which this layer has no place for",
        ),
        (
            lambda: TokenStatistics(12, heads=4, bias=True).load_released(images),
            ValueError,
            r"temp has shape \(3,\) .*; expected \(4,\), as temperature of this layer",
        ),
        (
            lambda: TokenStatistics(12, heads=3, positions=9, bias=True).load_released(images),
            ValueError,
            "state_dict has no position_bias, which this layer needs",
        ),
        (
            lambda: causal.load_released(language | {"denom_bias": torch.ones(3, 8, 1)}),
            ValueError,
            r"denom_bias has shape \(3, 8\) .*; expected \(3, 9\), as position_bias of this layer",
        ),
        (
            lambda: TokenStatistics(12, heads=3, bias=True, device="meta").load_released(images),
            ValueError,
            "of this layer is on the device meta",
        ),
    ):
        before = copy.deepcopy(plain.state_dict())
        with pytest.raises(error, match=message):
            call()
        assert all(torch.equal(before[name], value) for name, value in plain.state_dict().items())
