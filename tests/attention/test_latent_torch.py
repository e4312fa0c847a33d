"""Latent attention, windows and memories on tensors of torch: gradients, the compiler, devices without numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import naive_attention as naive
from differences import assert_gradients
from levattn.attention import causal_conv, latte, macchiato, repeated_mass, rg_lru, rotate_values, window_attention
from levattn.attention.common.arguments import latent_attention
from levattn.attention.latent import window as latent_window

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad, grad, gradcheck, gradgradcheck  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from levattn._kernels.latent import torch as operators  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")


def leaf(*shape: int, seed: int = 0, dtype: Any = torch.float64, scale: float = 1.0) -> Any:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape) * scale
    return torch.from_numpy(values).to(dtype).requires_grad_()


def leaves(T: int = 9, L: int = 3, D: int = 2, *, U: int | None = None, b: int = 2, **options: Any) -> list[Any]:
    U = T if U is None else U
    return [leaf(b, *shape, seed=i, **options) for i, shape in enumerate([(T, L), (U, L), (U, D)])]


def flags(T: int, *left_out: int) -> Any:
    """A mask (T,) of all positions but some."""
    mask = torch.ones(T, dtype=torch.bool)
    mask[list(left_out)] = False
    return mask


# name -> the shapes of its arrays for T positions, and the operator
OPERATORS: dict[str, tuple[Callable[[int], list[tuple[int, ...]]], Callable[..., Any]]] = {
    "latte": (lambda T: [(2, T, 3), (2, T, 3), (2, T, 2)], latte),
    "window": (lambda T: [(2, 2, T, 3), (2, 1, T, 3), (2, 1, T, 2)], partial(window_attention, window=4)),
    "capped": (lambda T: [(2, 2, T, 3), (2, 1, T, 3), (2, 1, T, 2)], partial(window_attention, window=4, softcap=1.5)),
    "macchiato": (
        lambda T: [(2, T, 4), (1, T, 4), (1, T, 3), (2, T, 4), (2, T, 4), (2, T)],
        partial(macchiato, window=2),
    ),
    "exclusive": (
        lambda T: [(2, T, 4), (1, T, 4), (1, T, 3), (2, T, 4), (2, T, 4), (2, T)],
        partial(macchiato, window=2, overlap="exclusive", softcap=1.0),
    ),
    "rg_lru": (lambda T: [*[(2, T, 3)] * 3, (3,)], rg_lru),
    "causal_conv": (lambda T: [(2, T, 3), (3, 4), (3,)], causal_conv),
    "rotate_values": (lambda T: [(2, T, 4)], lambda V, **_: rotate_values(V, torch.arange(V.shape[1]))),
}
over_operators = pytest.mark.parametrize("name", OPERATORS)


def call_of(name: str, T: int, **options: Any) -> tuple[Callable[..., Any], list[Any]]:
    """An operator, and arrays for it."""
    shapes, run = OPERATORS[name]
    return run, [leaf(*shape, seed=i, **options) for i, shape in enumerate(shapes(T))]


# -- gradients --------------------------------------------------------------------------------

STATE = [np.random.default_rng(5).standard_normal(shape) for shape in ((2, 2, 3), (2, 2, 3), (2, 2, 3, 2))]
STATE[1] = abs(STATE[1]) + 0.5
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
def test_gradients_of_the_kernel_are_those_of_finite_differences(name: str) -> None:
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
        options["state"] = tuple(part[:, : case["state"]] for part in STATE)

    def run(Q: Any, K: Any, V: Any, gate: Any = None, value: Any = None) -> Any:
        return latent_attention(Q, K, V, gate=gate, gate_value=value, **options)

    with torch.no_grad():
        plain = run(*arrays)
    assert torch.equal(run(*arrays), plain)
    assert_gradients(run, arrays)


@over_operators
@pytest.mark.parametrize("options", [{}, {"offsets": [0, 4, 9]}, {"mask": flags(9, 0, 3, 4)}], ids=str)
def test_gradients_are_those_of_finite_differences(name: str, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, arrays = call_of(name, 9)
    assert_gradients(lambda *x: run(*x, **options), arrays)
    if name in ("window", "capped"):
        monkeypatch.setattr(latent_window, "_MANY_PAIRS", 300)
        monkeypatch.setattr(latent_window, "_LEAST", 2)
        assert_gradients(lambda *x: run(*x, **options), arrays)


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


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("latte", {}),
        ("latte", {"causal": False}),
        ("window", {}),
        ("capped", {}),
        ("macchiato", {}),
        ("exclusive", {}),
    ],
)
def test_padding_has_no_gradient_whatever_it_holds(name: str, more: dict[str, Any]) -> None:
    run, arrays = call_of(name.partition(",")[0], 30, scale=10.0)
    more = {"causal": False} if "all" in name else {}
    mask = flags(30, *range(4), 11, 12, 13, 27, 28, 29)
    of_positions = (1, 2, 4) if name in ("macchiato", "exclusive") else (1, 2)
    with torch.no_grad():
        for i in of_positions:
            arrays[i][..., ~mask, :] = torch.nan
    found = grad(run(*arrays, mask=mask, **more).square().sum(), arrays)
    assert all(gradient.isfinite().all() for gradient in found)
    assert not any(found[i][..., ~mask, :].any() for i in of_positions)
    nothing = grad(run(*arrays, mask=flags(30, *range(30)), **more).sum(), arrays, allow_unused=True)
    assert not any(gradient.any() for gradient in nothing if gradient is not None)


def test_gradients_are_zero_where_a_gate_leaves_nothing() -> None:
    for name in ("macchiato", "exclusive"):
        run, arrays = call_of(name, 29)
        with torch.no_grad():
            arrays[5][:, 25], arrays[5][:, 27] = math.inf, -math.inf
        run(*arrays).square().sum().backward()
        assert all(torch.isfinite(x.grad).all() for x in arrays)
        assert not arrays[3].grad[:, 25].any()
        assert arrays[4].grad.sum(1).abs().max() < 1e-12  # shifting all logits of a latent changes nothing


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
@over_operators
def test_half_precision_is_computed_in_single(name: str, dtype: Any) -> None:
    run, half = call_of(name, 40, dtype=dtype)
    single = [x.detach().float().requires_grad_() for x in half]
    Y, expected = run(*half), run(*single)
    assert Y.dtype == dtype
    assert torch.equal(Y, expected.to(dtype))
    found, true = (grad(out.float().sum(), arrays) for out, arrays in ((Y, half), (expected, single)))
    for one, other in zip(found, true, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other.to(dtype))


@pytest.mark.parametrize("name", ["latte", "macchiato", "exclusive", "rg_lru", "causal_conv"])
def test_states_carry_no_gradient(name: str) -> None:
    run, arrays = call_of(name, 11)
    parts = {"rg_lru": 3, "causal_conv": 1}.get(name, len(arrays))
    along = 1  # positions
    head = [x.narrow(along, 0, 8) if i < parts else x for i, x in enumerate(arrays)]
    tail = [x.narrow(along, 8, 3).detach().requires_grad_() if i < parts else x for i, x in enumerate(arrays)]
    Y, state = run(*head, return_state=True)
    after, last = run(*tail, state=state, return_state=True)
    torch.testing.assert_close(torch.cat([Y, after], 1), run(*arrays), atol=1e-12, rtol=0)
    assert not any(grad(after.sum(), arrays[:parts], allow_unused=True))
    held = [last, *(getattr(last, part, None) for part in ("k", "V", "logits"))]
    assert not any(getattr(part, "requires_grad", False) for part in held)
    assert_gradients(lambda *x: run(*x, state=state), [x.detach().requires_grad_() for x in tail])


def test_repeated_mass_has_no_gradient() -> None:
    found = repeated_mass(leaf(3, 9, 4), leaf(1, 9, 4), leaf(3, 9), window=2)
    assert (found.shape, found.dtype, found.requires_grad) == ((3, 9), torch.float64, False)


def test_positions_may_require_gradients_that_they_do_not_get() -> None:
    places, V = torch.arange(9.0, requires_grad=True), leaf(9, 4).detach()
    answer = naive.rotate(V.numpy(), np.arange(9))
    np.testing.assert_allclose(rotate_values(V.numpy(), places), answer, atol=1e-14)
    found = rotate_values(V, places)
    assert not found.requires_grad
    np.testing.assert_allclose(found, answer, atol=1e-14)


def test_the_slope_of_the_root_is_bounded() -> None:
    x = torch.ones(5, 1, dtype=torch.float64)
    closed, slow = (torch.full((5, 1), logit, dtype=torch.float64).requires_grad_() for logit in (-40.0, -700.0))
    for logits in (closed, slow):  # a is 1 to rounding
        rg_lru(x, x, logits, torch.zeros(1, dtype=torch.float64)).sum().backward()
    assert torch.isfinite(closed.grad).all()
    assert (slow.grad.abs() < 1e-280).all()


# -- numbers that are not finite -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["window", "capped"])
def test_what_is_not_finite_leaves_the_gradients_of_other_rows(name: str) -> None:
    run, arrays = call_of(name, 30)
    with torch.no_grad():
        arrays[1][:, :, 12, 0], arrays[2][:, :, 20, 1] = math.nan, -math.inf
    Y = run(*arrays)
    assert Y.isnan().any(-1)[0, 0].nonzero().flatten().tolist() == [12, 13, 14, 15, 20, 21, 22, 23]
    torch.where(Y.isnan(), 0, Y).square().sum().backward()
    for x in arrays:
        assert torch.isfinite(x.grad).all()
        assert (x.grad[:, :, 1:12] != 0).any(-1).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["window", "rg_lru", "rg_lru by definition"])
def test_a_packed_sequence_that_is_not_finite_has_no_part_in_gradients_of_others(
    name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "definition" in name:
        monkeypatch.setattr(operators, "follows_definition", lambda _: True)
    run, clean = call_of(name.partition(" ")[0], 13)
    rows, others, count = slice(4, 8), torch.tensor([0, 1, 2, 3, 8, 9, 10, 11, 12]), 3

    def gradients(arrays: Any, spoilt: bool) -> Any:
        inputs = [x.detach().clone().requires_grad_() for x in arrays]
        Y = run(*inputs, offsets=[0, 4, 8, 13])
        flow = leaf(*Y.shape, seed=9).detach()
        if spoilt:
            flow[..., rows, :] = value
        Y.backward(flow)
        return [x.grad[..., others, :] for x in inputs[:count]]

    expected = gradients(clean, False)
    for which in range(count):
        dirty = [x.detach().clone() for x in clean]
        dirty[which][..., rows, :] = value
        cases = [(dirty, False), (dirty, True)] + ([] if name == "window" else [(clean, True)])
        for arrays, spoilt in cases:
            for one, other in zip(gradients(arrays, spoilt), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)


# -- other derivatives ---------------------------------------------------------------------------


def test_second_derivatives_of_latents_are_refused() -> None:
    Q, K, V = leaves()
    (first,) = grad(latte(Q, K, V).square().sum(), V, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        first.sum().backward()


@pytest.mark.parametrize("name", ["capped", "window", "rg_lru"])
def test_second_derivatives_are_those_of_finite_differences(name: str) -> None:
    run, arrays = call_of(name, 6)
    with sdpa_kernel(SDPBackend.MATH):
        assert gradgradcheck(run, arrays)
        assert gradgradcheck(lambda *x: run(*x, lengths=[2, 4]), arrays)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_is_that_of_differences_or_refused() -> None:
    run, arrays = call_of("window", 9)
    assert gradcheck(run, arrays, check_forward_ad=True, check_backward_ad=False)
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
@pytest.mark.parametrize("name", ["window", "capped"])
def test_windows_compile_whole_with_what_is_not_finite(name: str) -> None:
    run, arrays = call_of(name, 30)
    with torch.no_grad():
        arrays[1][:, :, 12, 0], arrays[2][:, :, 20, 1] = math.nan, -math.inf
        for inputs in (arrays, [x.bfloat16() for x in arrays]):
            torch.testing.assert_close(compiled(run)(*inputs), run(*inputs), equal_nan=True)


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
    mask, offsets, state = flags(9).expand(2, 9).clone(), torch.tensor([0, 4, 9]), map(torch.from_numpy, STATE)
    for arguments in (
        (Q, K, V, None, None, None, torch.tensor([0, 9]), None, None, None, True, 0),
        (Q, K, V, gate, value, mask, offsets, *state, True, -1),
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


# -- against torch's own attention ---------------------------------------------------------------


@pytest.mark.parametrize(("T", "window"), [(300, 64), (257, 128), (100, 7), (50, 200)])
def test_a_window_is_attention_of_torch_with_a_dense_mask(T: int, window: int) -> None:
    q, k, V = (leaf(2, 3, T, 32, seed=i, dtype=torch.float32).detach() for i in range(3))
    place = torch.arange(T)
    seen = (place[:, None] >= place) & (place[:, None] - place < window)
    other = torch.nn.functional.scaled_dot_product_attention(q, k, V, attn_mask=seen)
    torch.testing.assert_close(window_attention(q, k, V, window=window), other, atol=1e-5, rtol=0)
    numbers = window_attention(q.numpy(), k.numpy(), V.numpy(), window=window)
    np.testing.assert_allclose(numbers, other.numpy(), atol=1e-5)
