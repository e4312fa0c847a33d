"""Latte on tensors of torch: gradients, the compiler, devices without numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from differences import assert_gradients
from levattn.attention import latte
from levattn.attention.common.arguments import latent_attention

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad, grad, gradcheck, gradgradcheck  # noqa: E402

from levattn._kernels.latent import torch as operators  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def leaf(*shape: int, seed: int = 0, dtype: Any = torch.float64, scale: float = 1.0) -> Any:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape) * scale
    return torch.from_numpy(values).to(dtype).requires_grad_()


def leaves(T: int = 9, L: int = 3, D: int = 2, *, U: int | None = None, b: int = 2, **options: Any) -> list[Any]:
    U = T if U is None else U
    return [leaf(b, *shape, seed=i, **options) for i, shape in enumerate([(T, L), (U, L), (U, D)])]


def a_state(n: int, b: int = 2, L: int = 3, D: int = 2) -> Any:
    rng = np.random.default_rng(5)
    return rng.standard_normal((b, n, L)), rng.random((b, n, L)) + 0.5, rng.standard_normal((b, n, L, D))


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "cross": {"causal": False, "U": 5},
    "masked": {"mask": True},
    "masked-bidirectional": {"mask": True, "causal": False},
    "packed": {"offsets": [0, 3, 3, 9]},
    "packed-bidirectional": {"offsets": [0, 3, 9], "causal": False, "mask": True},
    "state": {"state": 1},
    "gate": {"gate": True},
    "gate-bidirectional": {"gate": True, "causal": False},
    "behind": {"gate": True, "ahead": -2},
    "ahead": {"ahead": 2, "T": 5, "U": 7},
    "all": {"gate": True, "ahead": -1, "mask": True, "offsets": [0, 2, 9], "state": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    case = {"causal": True, "ahead": 0, "T": 9, **CASES[name]}
    arrays = leaves(case["T"], U=case.get("U"))
    if case.get("gate"):
        arrays += [leaf(2, 9, seed=3), leaf(2, 9, 2, seed=4)]
    options: dict[str, Any] = {"causal": case["causal"], "ahead": case["ahead"]}
    if case.get("mask"):
        options["mask"] = torch.from_numpy(np.random.default_rng(6).random((2, 9)) > 0.3)
    if "offsets" in case:
        options["offsets"] = np.array(case["offsets"])
    if "state" in case:
        options["state"] = a_state(case["state"])

    def run(Q: Any, K: Any, V: Any, gate: Any = None, value: Any = None) -> Any:
        return latent_attention(Q, K, V, gate=gate, gate_value=value, **options)

    with torch.no_grad():
        plain = run(*arrays)
    assert torch.equal(run(*arrays), plain)
    assert_gradients(run, arrays)


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_in_single_precision_follow_those_in_double(causal: bool, scale: float) -> None:
    exact = leaves(130, 16, 8, scale=scale)
    exact[2] = leaf(2, 130, 8, seed=2)
    single = [x.detach().float().requires_grad_() for x in exact]
    exact = [x.detach().double().requires_grad_() for x in single]
    weights = leaf(2, 130, 8, seed=7).detach().float()
    expected = grad((latte(*exact, causal=causal) * weights.double()).sum(), exact)
    for found, true in zip(grad((latte(*single, causal=causal) * weights).sum(), single), expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), true, rtol=0, atol=1e-4 * float(true.abs().max()))


def test_gradients_of_logits_sum_to_zero() -> None:
    Q, K, V = leaves(50, scale=30.0)
    dQ, dK, _ = grad(latte(Q, K, V).square().sum(), (Q, K, V))
    assert dQ.sum(-1).abs().max() <= 1e-13 * dQ.abs().sum(-1).max()
    assert dK.sum(-2).abs().max() <= 1e-13 * dK.abs().sum(-2).max()


@pytest.mark.parametrize("causal", [True, False])
def test_padding_has_no_gradient_whatever_it_holds(causal: bool) -> None:
    Q, K, V = leaves(30, scale=30.0)
    mask = torch.ones(30, dtype=torch.bool)
    mask[:4] = mask[11:14] = mask[27:] = False
    with torch.no_grad():
        K[:, ~mask] = V[:, ~mask] = torch.nan
    for gradient in grad(latte(Q, K, V, mask=mask, causal=causal).square().sum(), (Q, K, V)):
        assert gradient.isfinite().all()
    _, dK, dV = grad(latte(Q, K, V, mask=mask, causal=causal).square().sum(), (Q, K, V))
    assert not dK[:, ~mask].any()
    assert not dV[:, ~mask].any()
    nothing = torch.zeros(30, dtype=torch.bool)
    assert not any(g.any() for g in grad(latte(Q, K, V, mask=nothing).sum(), (Q, K, V)))


def test_unseen_latents_have_no_gradient() -> None:
    Q, K, V = leaves(20)
    with torch.no_grad():
        K[:, :8, 1] = K[:, :, 2] = -torch.inf
    dQ, dK, dV = grad(latte(Q, K, V).square().sum(), (Q, K, V))
    assert all(g.isfinite().all() for g in (dQ, dK, dV))
    assert not dQ[:, :8, 1].any()
    assert not dQ[:, :, 2].any()
    assert not dK[:, :, 2].any()


def test_gradients_of_shared_heads_and_of_other_layouts_add_up() -> None:
    Q, K = leaf(2, 3, 9, 4), leaf(2, 9, 3, 4, seed=1)
    V, mask = leaf(2, 1, 9, 2, seed=2), torch.rand(2, 1, 9, generator=torch.Generator().manual_seed(0)) > 0.3
    assert gradcheck(lambda Q, K, V: latte(Q, K.transpose(1, 2), V, mask=mask), (Q, K, V))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype: Any) -> None:
    half = [x.detach().to(dtype).requires_grad_() for x in leaves(40, 8, 4)]
    single = [x.detach().float().requires_grad_() for x in half]
    Y, expected = latte(*half), latte(*single)
    assert Y.dtype == dtype
    assert torch.equal(Y, expected.to(dtype))
    found, true = (grad(out.float().sum(), arrays) for out, arrays in ((Y, half), (expected, single)))
    for one, other in zip(found, true, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other.to(dtype))


def test_states_carry_no_gradient() -> None:
    Q, K, V = leaves()
    Y, state = latte(Q[:, :5], K[:, :5], V[:, :5], return_state=True)
    assert isinstance(state.S, np.ndarray)
    after = latte(Q[:, 5:], K[:, 5:], V[:, 5:], state=state)
    torch.testing.assert_close(torch.cat([Y, after], 1), latte(Q, K, V))
    assert not grad(after.sum(), V)[0][:, :5].any()


def test_second_derivatives_are_refused() -> None:
    Q, K, V = leaves()
    (first,) = grad(latte(Q, K, V).square().sum(), V, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        first.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_is_refused() -> None:
    Q, K, V = (x.detach() for x in leaves())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(V, torch.ones_like(V))
        with pytest.raises(NotImplementedError, match="use reverse mode"):
            latte(Q, K, dual)


def test_the_scan_has_gradients_of_all_orders() -> None:
    a, x, first = (torch.sigmoid(leaf(2, 6, 3)).detach().requires_grad_(), leaf(2, 6, 3, seed=1), leaf(2, 3, seed=2))
    h, rows = first, []
    for t in range(6):
        h = a[:, t] * h + x[:, t]
        rows.append(h)
    torch.testing.assert_close(operators.decayed_scan(a, x, first), torch.stack(rows, 1))
    assert gradcheck(operators.decayed_scan, (a, x, first))
    assert gradcheck(operators.decayed_scan, (a, x))
    assert gradgradcheck(operators.decayed_scan, (a, x, first))
    assert operators.decayed_scan(a[:, :0], x[:, :0], first).shape == (2, 0, 3)


# -- the compiler, and tensors that are not plain numbers -------------------------------------


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)  # type: ignore[no-any-return]


@pytest.mark.thorough  # in every run tests/nn/test_layers.py compiles a layer of it
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_compiled_whole_with_the_same_values_and_gradients(dtype: Any, dynamic: bool) -> None:
    def run(Q: Any, K: Any, V: Any, mask: Any) -> Any:
        return latte(2 * Q, K, V, mask=mask).square()

    fast = compiled(run, dynamic=dynamic)
    for T in (20, 11):
        arrays = [x.detach().to(dtype).requires_grad_() for x in leaves(T, 4, 6)]
        mask = torch.from_numpy(np.random.default_rng(8).random((2, T)) > 0.2)
        assert torch.equal(fast(*arrays, mask), run(*arrays, mask))
        found, expected = (grad(function(*arrays, mask).sum(), arrays) for function in (fast, run))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.thorough
def test_compiled_with_packed_sequences_checks_them_when_it_runs() -> None:
    arrays = leaves(20)
    fast = compiled(lambda Q, K, V, offsets: latte(Q, K, V, offsets=offsets, causal=False))
    for offsets in ([0, 4, 20], [0, 17, 20]):
        expected = latte(*arrays, offsets=offsets, causal=False)
        assert torch.equal(fast(*arrays, torch.tensor(offsets)), expected)
    with pytest.raises(ValueError, match="ascend from 0 to T = 20"):
        fast(*arrays, torch.tensor([0, 4, 19]))
    lengths = compiled(lambda Q, K, V: latte(Q, K, V, lengths=[4, 16]))
    assert torch.equal(lengths(*arrays), latte(*arrays, lengths=[4, 16]))


@pytest.mark.parametrize("gradients", [True, False])
def test_operators_keep_the_rules_of_torch(gradients: bool) -> None:
    Q, K, V, gate, value = (
        x.detach().requires_grad_(gradients) for x in (*leaves(), leaf(2, 9, seed=3), leaf(2, 9, 2, seed=4))
    )
    mask, offsets = torch.ones(2, 9, dtype=torch.bool), torch.tensor([0, 4, 9])
    nothing = (None,) * 3
    for arguments in (
        (Q, K, V, None, None, None, torch.tensor([0, 9]), *nothing, True, 0),
        (Q, K, V, gate, value, mask, offsets, *(torch.from_numpy(part) for part in a_state(2)), True, -1),
    ):
        torch.library.opcheck(operators.ATTENTION, arguments)
    torch.library.opcheck(operators.SCAN, (Q, K, leaf(2, 3).detach().requires_grad_(gradients), False))
    torch.library.opcheck(operators.SCAN, (Q, K, None, True))


def test_tensors_without_numbers_have_shapes() -> None:
    Q, K, V = (torch.empty(2, 3, 9, d, device="meta", dtype=torch.float16) for d in (4, 4, 6))
    Y = latte(Q, K, V)
    assert (Y.shape, Y.dtype, Y.device.type) == ((2, 3, 9, 6), torch.float16, "meta")
    with FakeTensorMode():
        fake = [torch.empty(3, 9, 4) for _ in range(3)]
        assert latte(*fake).shape == (3, 9, 4)


def test_tensors_in_other_forms_are_numbers_too() -> None:
    Q, K, V = (x.detach() for x in leaves())
    Y = latte(Q, K, V)
    negative = torch.complex(Q, -V.new_ones(Q.shape) * Q).conj().imag  # a view with the sign yet to turn
    assert negative.is_neg()
    assert torch.equal(latte(negative, K, V), Y)
    with torch.inference_mode():
        assert torch.equal(latte(Q, K, V), Y)
    assert torch.equal(latte(torch.nn.Parameter(Q), K, V), Y)
    assert torch.equal(latte(Q.mT.contiguous().mT, K, V), Y)
    with pytest.raises(TypeError, match="V is of torch on meta, and q_logits of torch on cpu"):
        latte(Q, K, V.to("meta"))
    with pytest.raises(TypeError, match="V is a nested or sparse torch tensor"):
        latte(Q, K, V.to_sparse())


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"lengths": [4, 5]}], ids=["causal", "all", "packed"])
def test_torch_func_follows_the_definitions(options: dict[str, Any]) -> None:
    arrays = [x.detach() for x in leaves()]

    def loss(*x: Any) -> Any:
        return latte(*x, **options).square().sum()

    wanted = [x.clone().requires_grad_() for x in arrays]
    expected = grad(loss(*wanted), wanted)
    found = torch.func.grad(loss, argnums=(0, 1, 2))(*arrays)
    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*arrays)
    for one, other, answer in zip(found, each, expected, strict=True):
        torch.testing.assert_close(one, answer, atol=1e-12, rtol=0)
        torch.testing.assert_close(other, answer, atol=1e-12, rtol=0)
    Q, K, V = arrays
    rows = torch.func.vmap(lambda v: latte(Q, K, v, **options), in_dims=-1, out_dims=-1)(V[..., None, :])
    torch.testing.assert_close(rows[..., 0, :], latte(Q, K, V, **options), atol=1e-12, rtol=0)
    with pytest.raises(NotImplementedError, match=r"within torch\.func"):
        torch.func.vmap(lambda *x: latte(*x, return_state=True)[0])(*arrays)


def test_torch_func_keeps_what_is_not_finite_to_later_rows() -> None:
    Q, K, V = (x.detach() for x in leaves())
    V[0, 4, 1] = torch.nan
    Y = torch.func.vmap(latte)(Q, K, V)
    torch.testing.assert_close(Y, latte(Q, K, V), equal_nan=True, atol=1e-12, rtol=0)
    assert Y.isnan().nonzero().tolist() == [[0, t, 1] for t in range(4, 9)]
