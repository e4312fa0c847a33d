"""Token statistics attention on tensors of torch: gradients, layouts, the compiler, devices without numbers.

Inside: operators keep rules of torch that no call of a user reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from differences import assert_gradients
from levattn.states import Moments, TokenState

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import grad, gradcheck  # noqa: E402

from levattn._kernels import TokenArguments, kernels_for  # noqa: E402
from levattn._kernels.tokens import torch as operators  # noqa: E402
from levattn.attention.tokens.torch import leverage  # noqa: E402
from token_calls import memberships, tssa  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")


def leaf(*shape: int, seed: int = 0, dtype: Any = torch.float64, scale: float = 1.0) -> Any:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape) * scale
    return torch.from_numpy(values).to(dtype).requires_grad_()


def tokens(b: int = 2, h: int = 3, T: int = 7, d: int = 2, **options: Any) -> Any:
    """Tokens as a layer makes them: heads side by side."""
    X = leaf(b, T, h * d, **options).detach()
    return X.unflatten(-1, (h, d)).transpose(1, 2).requires_grad_()


def flags(b: int = 2, T: int = 7) -> Any:
    mask = torch.from_numpy(np.random.default_rng(6).random((b, T)) > 0.3)
    mask[:, 0] = False
    return mask


def layout(X: Any) -> list[int]:
    """The strides of the axes along which there is more than one number."""
    return [stride for stride, size in zip(X.stride(), X.shape, strict=True) if size > 1]


def is_alike(one: Any, other: Any) -> bool:
    return bool(torch.equal(one, other)) and layout(one) == layout(other)


# -- gradients --------------------------------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {
    "diag": {},
    "diag-mean": {"normalize": "mean"},
    "norm": {"membership": "norm"},
    "uniform": {"membership": "uniform"},
    "logits": {"membership": "own"},
}
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"mask": True},
    "packed": {"offsets": [0, 3, 3, 7]},
    "biased": {"bias": True},
    "state": {"state": True},
    "decay": {"decay": [0.9, 0.5, 1.0]},
    "all": {"mask": True, "offsets": [0, 2, 7], "bias": True, "state": True, "c": 2.5},
    "all-decay": {"decay": 0.8, "mask": True, "offsets": [0, 2, 7], "bias": True, "state": True},
}


CASES = [
    (form, extra, causal)
    for form in FORMS
    for extra in EXTRAS
    for causal in ([True] if "decay" in EXTRAS[extra] else [True, False])
]


@pytest.mark.parametrize(("form", "extra", "causal"), CASES)
def test_gradients_are_those_of_finite_differences(form: str, extra: str, causal: bool) -> None:
    case = {**FORMS[form], **EXTRAS[extra]}
    if form == "uniform":
        case.pop("bias", None)
    options = {key: case[key] for key in ("normalize", "decay", "offsets", "c") if key in case}
    options |= {"causal": causal, "membership": case.get("membership", "diag_leverage")}
    if case.get("mask"):
        options["mask"] = flags()
    leaves = {"temperature": (leaf(2, 3, seed=1).exp() + 0.2).detach().requires_grad_()}
    if options["membership"] == "own":
        leaves["membership"] = leaf(2, 3, 7, seed=2)
    if case.get("bias"):
        leaves["bias"] = leaf(3, 7, seed=3)
    if case.get("state"):
        n = len(options.get("offsets", [0, 0])) - 1
        before = {**options, "mask": None, "offsets": None if n == 1 else [0, *range(5, 4 + n), 6]}
        before["membership"] = "uniform" if options["membership"] == "own" else options["membership"]
        options["state"] = tssa(tokens(T=6, seed=9).detach(), return_state=True, **before)[1]
    names = list(leaves)

    def run(W: Any, *values: Any) -> Any:
        given = dict(zip(names, values, strict=True))
        return tssa(W, given.pop("temperature"), **{**options, **given})

    arrays = (tokens(), *leaves.values())
    with torch.no_grad():
        plain = run(*arrays)
    assert is_alike(run(*arrays).detach(), plain)
    assert_gradients(run, arrays)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_where_sums_of_squares_are_replaced(causal: bool) -> None:
    """Channels whose squares sum to less than the least one, and channels that cross it, beside others."""
    sizes = torch.tensor([1e-8, 5e-7, 1.0] if causal else [1e-14, 5e-13, 1.0], dtype=torch.float64)

    def run(V: Any, temperature: Any) -> Any:
        return tssa(V * sizes, temperature, causal=causal) / sizes

    V = tokens(1, 3, 8, 3)
    assert gradcheck(run, (V, leaf(3, seed=1)))
    A = (V * sizes).square().sum(2)
    least = 1e-12 if causal else 1e-24
    assert (A[..., 0] < least).all()
    assert (A[..., 2] > least).all()
    if causal:
        assert (V * sizes).square().cumsum(2)[:, :, 0, 1].max() < least < A[..., 1].max()


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_where_memberships_sum_to_next_to_nothing(causal: bool) -> None:
    """Heads with memberships of about 1e-8, beside which the released code's 1e-8 counts."""
    bias = torch.zeros(3, 7, dtype=torch.float64)
    bias[0] = -9.0
    sizes = torch.tensor([1e8, 1.0, 1.0], dtype=torch.float64)[:, None, None]

    def run(W: Any, temperature: Any, bias: Any) -> Any:
        return sizes * tssa(W, temperature, bias=bias, causal=causal)

    W = tokens()
    P = memberships(W.detach(), bias=bias, causal=causal)
    assert 1e-9 < P[:, 0].max() < 1e-6
    assert gradcheck(run, (W, torch.ones(3, dtype=torch.float64, requires_grad=True), bias.requires_grad_()))


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_where_a_moment_is_zero_by_zero(causal: bool) -> None:
    """Memberships that underflow, without the constants of the released form: all is zero, and nothing is NaN."""
    own = torch.zeros(3, 7, dtype=torch.float64)
    own[0] = -800.0
    own.requires_grad_()
    W = tokens()
    Y = tssa(W, membership=own, causal=causal)
    assert not Y[:, 0].any()
    for gradient in grad(Y.square().sum(), (W, own)):
        assert gradient.isfinite().all()


def test_gradients_of_what_is_broadcast_add_up() -> None:
    W, temperature, bias = leaf(2, 1, 3, 7, 2), leaf(2, 3, seed=1), leaf(3, 7, seed=2)
    mask = torch.stack([flags()] * 2)

    def run(W: Any, temperature: Any, bias: Any) -> Any:
        return tssa(W, temperature, bias=bias, mask=mask)

    assert run(W, temperature, bias).shape == (2, 2, 3, 7, 2)
    assert gradcheck(run, (W, temperature, bias))
    assert gradcheck(lambda W, t: tssa(W.mT, t, causal=False), (leaf(3, 2, 7), leaf(1, seed=1).squeeze()))


RANGES: dict[str, dict[str, Any]] = {
    "released": {},
    "everywhere": {"causal": False},
    "mean": {"normalize": "mean"},
    "mean, everywhere": {"normalize": "mean", "causal": False},
    "norm": {"membership": "norm"},
    "norm, everywhere": {"membership": "norm", "causal": False},
    "uniform": {"membership": "uniform"},
    "decayed": {"decay": 0.9},
}


@pytest.mark.crossed
@pytest.mark.parametrize("c", [1e-20, 1.0, 1e14, 1e30])
@pytest.mark.parametrize("size", [1e-18, 1e-12, 1e5, 1e17])
@pytest.mark.parametrize("form", RANGES)
def test_gradients_in_single_precision_are_right_wherever_the_outputs_are(form: str, size: float, c: float) -> None:
    """float64, whose range is far larger, is the judge; what it finds beyond the range of float32 is not judged."""
    W, direction = leaf(3, 40, 5, scale=size).float(), leaf(3, 40, 5, seed=1).detach().float()
    for temperature in [1e-6, 1.0] if "norm" not in form else [1e-6 / size**2, 1 / size**2]:
        check_single_precision(W, temperature, direction, c=c, **RANGES[form])


def check_single_precision(W: Any, temperature: float, direction: Any, **options: Any) -> None:
    """Compare gradients in float32 with those in float64, wherever the output is right and they are in its range."""
    single = [W.detach().requires_grad_(), torch.full((len(W),), temperature, requires_grad=True)]
    double = [x.detach().double().requires_grad_() for x in single]
    Y, true = (tssa(*x, **options) for x in (single, double))
    top = float(true.detach().abs().max())
    if not 1e-36 < top < 1e38 or not float((Y - true).detach().abs().max()) < 1e-4 * top:
        return
    found = grad((Y * direction).sum(), single, materialize_grads=True)
    expected = grad((true * direction.double()).sum(), double, materialize_grads=True)
    for one, other in zip(found, expected, strict=True):
        most = float(other.abs().max())
        if 1e-36 < most < 3e38:
            assert float((one - other).abs().max()) < 1e-4 * most


@pytest.mark.crossed
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [1.0, 30.0, 100.0, 1000.0])
@pytest.mark.parametrize("form", RANGES)
def test_gradients_in_single_precision_are_right_at_high_temperatures(
    form: str, temperature: float, seed: int
) -> None:
    """Memberships near 1, logits that rounding changes, and tokens that are most of their sums of squares."""
    for shape, size in (((3, 400, 5), 1.0), ((8, 100, 16), 1e-3), ((2, 3, 4), 1e3)):
        W, direction = leaf(*shape, seed=seed, scale=size).detach(), leaf(*shape, seed=seed + 100).detach().float()
        theta = temperature / size**2 if "norm" in form else temperature
        check_single_precision(W.float(), theta, direction, **RANGES[form])
        growing = W[:, :9] * 100.0 ** torch.arange(min(9, shape[1]))[:, None] * 1e-6 / size
        theta = temperature if "norm" not in form else temperature / float(growing.square().max())
        check_single_precision(growing.float(), theta, direction[:, :9], **RANGES[form])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [True, False])
def test_channels_of_zeros_have_gradients_of_the_output_alone(causal: bool, dtype: Any) -> None:
    W = leaf(3, 300, 4).detach()
    W[..., 2] = 0
    kept, direction = W[..., [0, 1, 3]].to(dtype).requires_grad_(), leaf(3, 300, 4, seed=1).detach().to(dtype)
    W = W.to(dtype).requires_grad_()
    options = {"normalize": "mean", "causal": causal}
    (found,) = grad((tssa(W, 20.0, **options) * direction).sum(), W)
    (expected,) = grad((tssa(kept, 20.0, **options) * direction[..., [0, 1, 3]]).sum(), kept)
    torch.testing.assert_close(found[..., [0, 1, 3]], expected, atol=1e-4, rtol=1e-4)
    P = memberships(W.detach(), 20.0, **options)
    torch.testing.assert_close(found[..., 2], -P * direction[..., 2])
    followed = torch.func.grad(lambda x: (tssa(x, 20.0, **options) * direction).sum())(W.detach())
    torch.testing.assert_close(followed, found, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_the_gradient_of_a_temperature_survives_memberships_that_round_to_one(causal: bool) -> None:
    """By hand: with logits (0, θb), the gradient in θ is Π₀ Π₁ times the difference of slopes, 1e-13 of them."""
    W, direction = leaf(2, 3, 4).detach().float(), leaf(2, 3, 4, seed=1).detach().float()
    own = torch.zeros(2, 3)
    own[0] = 1.0
    for b in (1.0, 16.0, 30.0, 60.0):
        theta = torch.full((2,), b, requires_grad=True)
        double = theta.detach().double().requires_grad_()
        options = {"membership": own, "causal": causal}
        (found,) = grad((tssa(W, theta, **options) * direction).sum(), theta)
        options["membership"] = own.double()
        (expected,) = grad((tssa(W.double(), double, **options) * direction.double()).sum(), double)
        assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())


# -- leverage scores as what memberships are made of --------------------------------------------


@pytest.mark.parametrize("normalize", ["sum", "mean"])
@pytest.mark.parametrize("options", [{}, {"mask": True}, {"offsets": [0, 6, 6, 11]}], ids=["all", "masked", "packed"])
def test_gradients_through_leverage_scores(options: dict[str, Any], normalize: str) -> None:
    given: dict[str, Any] = {"membership": "leverage", "causal": False, "normalize": normalize, **options}
    if "mask" in given:
        given["mask"] = flags(2, 11)
    assert_gradients(lambda W, t: tssa(W, t, **given), (tokens(T=11, d=3), leaf(3, seed=1)))


@pytest.mark.parametrize("T", [9, 3])
def test_gradients_through_leverage_scores_along_matrices_of_less_than_full_rank(T: int) -> None:
    """W = V B has rank 2 of 4 whatever V and B, so scores are differentiable in these."""

    def run(V: Any, B: Any) -> Any:
        return tssa(V @ B, 3.0, membership="leverage", causal=False)

    assert_gradients(run, (leaf(2, T, 2), leaf(2, 2, 4, seed=1)))


def test_gradients_through_leverage_scores_of_columns_of_very_different_sizes() -> None:
    """Squares of a condition number of 1e8 would leave nothing of float64."""
    W = leaf(1, 2, 12, 3, seed=9).detach()
    sizes = torch.tensor([1e8, 1.0, 1e-3], dtype=torch.float64)

    def run(V: Any) -> Any:
        return tssa(V * sizes, 3.0, membership="leverage", causal=False) / sizes

    assert gradcheck(run, W.requires_grad_())


def test_leverage_scores_of_no_more_tokens_than_channels_are_one_and_have_no_gradient() -> None:
    W = leaf(1, 2, 3, 5)
    scores = leverage(W, None)
    torch.testing.assert_close(scores, torch.ones_like(scores))
    weights = leaf(1, 2, 3, seed=4).detach()
    assert grad((scores * weights).sum(), W)[0].abs().max() < 1e-12


def test_a_decay_takes_no_gradient() -> None:
    with pytest.raises(ValueError, match="decay requires a gradient"):
        tssa(tokens(), decay=torch.ones(3, requires_grad=True))


def test_a_state_of_leverage_scores_takes_no_gradient() -> None:
    W = tokens(T=9)
    whole, state = tssa(W.detach(), membership="leverage", causal=False, return_state=True)
    torch.testing.assert_close(tssa(W.detach(), membership="leverage", causal=False, state=state), whole)
    seen = TokenState(Moments(2, (2, 3)).update(W.detach()), state.tokens)
    with pytest.raises(ValueError, match=r"W requires a gradient, which does not go through it"):
        tssa(W, membership="leverage", causal=False, state=seen)


# -- layouts and precisions -------------------------------------------------------------------


def layouts() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    X = torch.from_numpy(rng.standard_normal((2, 5, 3, 4)))
    return {
        "heads side by side": X.transpose(1, 2),
        "head by head": X.transpose(1, 2).contiguous(),
        "one token": X[:, :1].transpose(1, 2),
        "one token of many": X.transpose(1, 2)[:, :, 2:3],
        "one head": X[:, :, :1].transpose(1, 2),
        "one channel": X[..., :1].transpose(1, 2),
        "every other token": X[:, ::2].transpose(1, 2),
        "every other channel": X.transpose(1, 2)[..., ::2],
        "channels first": X.permute(0, 3, 1, 2).contiguous().permute(0, 3, 2, 1),
        "channels before heads": X.permute(0, 1, 3, 2).contiguous().permute(0, 3, 1, 2),
        "one for all of a batch": X[:1].transpose(1, 2).expand(2, -1, -1, -1),
    }


@pytest.mark.parametrize("name", layouts())
def test_any_layout_has_the_same_values_and_the_layout_that_is_foretold(name: str) -> None:
    W = layouts()[name]
    expected = W.contiguous().requires_grad_()
    (true,) = grad(tssa(expected).square().sum(), expected)
    with torch.no_grad():
        plain = tssa(W)
    torch.testing.assert_close(plain, tssa(expected).detach(), atol=1e-14, rtol=0)
    found = W.detach().requires_grad_()
    Y = tssa(found)
    assert is_alike(Y.detach(), plain)
    torch.testing.assert_close(grad(Y.square().sum(), found)[0], true, atol=1e-14, rtol=0)
    one = TokenArguments(W, torch.ones(W.shape[:2], dtype=W.dtype), None, np.array([0, W.shape[2]]))
    x = operators.STATISTICS.arguments(one)
    real = (operators.STATISTICS.forward(*x), *operators.STATISTICS.backward(torch.ones_like(Y), *x))
    with FakeTensorMode() as mode:
        y = tuple(mode.from_tensor(part) if isinstance(part, torch.Tensor) else part for part in x)
        fake = (
            operators.STATISTICS.forward(*y),
            *operators.STATISTICS.backward(torch.ones(Y.shape, dtype=W.dtype), *y),
        )
    for one, other in zip(fake, real, strict=True):
        assert (one.shape, one.dtype, layout(one)) == (other.shape, other.dtype, layout(other))


@pytest.mark.parametrize("gradients", [False, True])
def test_heads_side_by_side_are_read_where_they_lie(gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    X = leaf(2, 9, 12, dtype=torch.float32).requires_grad_(gradients)
    W, seen = X.unflatten(-1, (3, -1)).transpose(1, 2), []
    table = kernels_for("tokens", np.zeros(0))
    known = table.forward

    def spied(x: Any, **options: Any) -> Any:
        seen.append((x.W.ctypes.data, x.W.strides))
        return known(x, **options)

    monkeypatch.setattr(table, "forward", spied)
    Y = tssa(W)
    assert seen == [(X.data_ptr(), tuple(4 * stride for stride in W.stride()))]
    assert Y.stride() == W.stride()
    assert Y.transpose(1, 2).flatten(-2)._is_view()  # so that a layer goes on without a copy


def test_autocast_leaves_sums_in_single_precision() -> None:
    W = tokens(1, 3, 700, 4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tssa(W), tssa(W.detach()))
        assert tssa(W.bfloat16()).dtype == torch.bfloat16
        assert torch.equal(tssa(W.bfloat16(), torch.ones(3)), tssa(W.bfloat16().float()).bfloat16())
        assert leverage(W, None).dtype == torch.float32
        fast = grad(tssa(W).square().sum(), W)[0]
        scores = grad(tssa(W, 9.0, membership="leverage", causal=False).square().sum(), W)[0]
    assert torch.equal(fast, grad(tssa(W).square().sum(), W)[0])
    assert torch.equal(scores, grad(tssa(W, 9.0, membership="leverage", causal=False).square().sum(), W)[0])


def test_arrays_of_several_precisions_are_computed_in_the_widest() -> None:
    W, temperature = tokens(dtype=torch.float32), leaf(3, seed=1)
    Y = tssa(W, temperature)
    assert Y.dtype == torch.float32
    torch.testing.assert_close(Y, tssa(W.double(), temperature).float(), rtol=0, atol=0)
    dW, dt = grad(Y.sum(), (W, temperature))
    assert (dW.dtype, dt.dtype) == (torch.float32, torch.float64)


# -- derivatives that there are not, and torch.func ---------------------------------------------


def test_torch_func_leaves_out_what_is_masked_whatever_it_holds() -> None:
    W, bias, mask = tokens().detach(), leaf(2, 3, 7, seed=2).detach(), flags()
    expected = torch.func.grad(lambda W: tssa(W, bias=bias, mask=mask).square().sum())(W)
    W.transpose(1, 2)[~mask] = bias.transpose(1, 2)[~mask] = torch.nan
    dW, db = torch.func.grad(lambda W, b: tssa(W, bias=b, mask=mask).square().sum(), argnums=(0, 1))(W, bias)
    torch.testing.assert_close(dW, expected)
    assert db.isfinite().all()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_leverage_scores_have_gradients_within_torch_func_and_nothing_else() -> None:
    def loss(W: Any) -> Any:
        return tssa(W, membership="leverage", causal=False).square().sum()

    W = tokens().detach()
    (expected,) = grad(loss(leaf := W.clone().requires_grad_()), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(W), expected)
    for transformed in (torch.func.vmap(loss), lambda W: torch.func.jvp(loss, (W,), (W,))):
        with pytest.raises(NotImplementedError, match=r"'leverage' under .*expected another membership"):
            transformed(W)


# -- the compiler, and tensors that are not plain numbers -------------------------------------


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)  # type: ignore[no-any-return]


def test_a_temperature_that_changes_compiles_once() -> None:
    graphs: list[Any] = []
    fast = torch.compile(tssa, fullgraph=True, dynamic=True, backend=lambda graph, _: graphs.append(graph) or graph)
    W = tokens().detach()
    for temperature in (0.5, 0.7, -2.0):
        torch.testing.assert_close(fast(W, temperature), tssa(W, temperature))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"membership": "norm", "causal": False}, id="norm", marks=pytest.mark.thorough),
        pytest.param({"normalize": "mean", "decay": 0.9}, id="mean"),
        pytest.param({"decay": [0.9, 0.8, 1.0], "c": 2.0}, id="decay", marks=pytest.mark.thorough),
        pytest.param({"membership": "uniform"}, id="uniform", marks=pytest.mark.thorough),
    ],
)
def test_compiled_whole_in_every_form(options: dict[str, Any]) -> None:
    W = tokens()
    fast = compiled(lambda W: tssa(W, 2.0, **options))
    assert is_alike(fast(W).detach(), tssa(W, 2.0, **options).detach())
    assert torch.equal(grad(fast(W).sum(), W)[0], grad(tssa(W, 2.0, **options).sum(), W)[0])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's, behind a break
def test_compiled_around_leverage_scores_and_states() -> None:
    W = tokens(T=9)
    fast = torch.compile(lambda W: tssa(W, 3.0, membership="leverage", causal=False), backend="aot_eager")
    expected = tssa(W, 3.0, membership="leverage", causal=False)
    assert torch.equal(fast(W), expected)
    torch.testing.assert_close(grad(fast(W).sum(), W)[0], grad(expected.sum(), W)[0])
    step = torch.compile(lambda W, state: tssa(W, state=state, return_state=True), backend="aot_eager")
    with torch.no_grad():
        head, state = step(W[:, :, :5], None)
        rest, state = step(W[:, :, 5:], state)
        assert torch.equal(head, tssa(W[:, :, :5]))
        torch.testing.assert_close(torch.cat([head, rest], 2), tssa(W))
    assert state.tokens.count.tolist() == [[9] * 3] * 2


@pytest.mark.parametrize("gradients", [True, False])
def test_operators_keep_the_rules_of_torch(gradients: bool) -> None:
    W, temperature = tokens().detach().requires_grad_(gradients), leaf(2, 3, seed=1).detach().requires_grad_(gradients)
    offset, offsets = leaf(2, 3, 7, seed=2).detach().requires_grad_(gradients), np.array([0, 4, 7])
    rng = np.random.default_rng(5)
    A, n, M, N = (rng.random(shape) for shape in ((2, 3, 2, 2), (2, 3, 2)) * 2)
    others = {"mean": True, "least": 1e-30, "ridge": 0.0, "c": 2.0, "gain": 3.0, "decay": np.array([0.9, 1.0, 0.5])}
    contiguous = W.detach().contiguous().requires_grad_(gradients)
    for x in (
        TokenArguments(W, temperature, None, np.array([0, 7])),
        TokenArguments(W, temperature, offset, offsets, mask=flags(), state=(A, n, M, N), **others),
        TokenArguments(contiguous, temperature, None, offsets, causal=False, logits="norm", mask=flags()),
    ):
        torch.library.opcheck(operators.STATISTICS.forward, operators.STATISTICS.arguments(x))


@pytest.mark.parametrize("shape", [(2, 3, 0, 4), (0, 3, 5, 4), (3, 0, 4)], ids=str)
def test_nothing_to_do_is_done_with_gradients_too(shape: tuple[int, ...]) -> None:
    W, temperature = torch.zeros(shape, requires_grad=True), torch.ones(3, requires_grad=True)
    Y = tssa(W, temperature)
    assert Y.shape == shape
    dW, dt = grad(Y.sum(), (W, temperature))
    assert dW.shape == shape
    assert not dt.any()


def test_memberships_are_those_of_the_operator() -> None:
    W, temperature = tokens(), leaf(3, seed=1)
    P = memberships(W, temperature)
    assert not P.requires_grad
    torch.testing.assert_close(P.sum(1), torch.ones(2, 7, dtype=torch.float64))
    np.testing.assert_array_equal(P, memberships(W.detach().numpy(), temperature.detach().numpy()))
