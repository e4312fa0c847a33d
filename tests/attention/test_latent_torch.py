"""Latent attention, windows and memories on tensors of torch: gradients, the compiler, devices without numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from operator_table import MEMORIES, MIXTURES, WINDOWS, Operator

import naive_attention as naive
from latent_calls import window_attention
from levattn.attention import latte, repeated_mass, rg_lru, rotate_values

torch = pytest.importorskip("torch")

from torch.autograd import grad, gradcheck, gradgradcheck  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")


def leaf(*shape: int, seed: int = 0, dtype: Any = torch.float64, scale: float = 1.0) -> Any:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape) * scale
    return torch.from_numpy(values).to(dtype).requires_grad_()


def leaves(T: int = 9, L: int = 3, D: int = 2, *, U: int | None = None, b: int = 2, **options: Any) -> list[Any]:
    U = T if U is None else U
    return [leaf(b, *shape, seed=i, **options) for i, shape in enumerate([(T, L), (U, L), (U, D)])]


# name -> the shapes of its arrays for T positions, and the operator


# -- gradients --------------------------------------------------------------------------------

STATE = [np.random.default_rng(5).standard_normal(shape) for shape in ((2, 2, 3), (2, 2, 3), (2, 2, 3, 2))]
STATE[1] = abs(STATE[1]) + 0.5


def test_gradients_of_logits_sum_to_zero() -> None:
    Q, K, V = leaves(50, scale=30.0)
    dQ, dK, _ = grad(latte(Q, K, V).square().sum(), (Q, K, V))
    assert dQ.sum(-1).abs().max() <= 1e-13 * dQ.abs().sum(-1).max()
    assert dK.sum(-2).abs().max() <= 1e-13 * dK.abs().sum(-2).max()


def test_gradients_are_zero_where_a_gate_leaves_nothing() -> None:
    for operator in MIXTURES.values():
        arrays = operator.leaves(29, ())
        with torch.no_grad():
            arrays[5][:, 25], arrays[5][:, 27] = math.inf, -math.inf
        operator.run(*arrays).square().sum().backward()
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


@pytest.mark.parametrize("name", WINDOWS)
def test_what_is_not_finite_leaves_the_gradients_of_other_rows(name: str) -> None:
    run, arrays = WINDOWS[name].run, WINDOWS[name].leaves(30)
    with torch.no_grad():
        arrays[1][:, :, 12, 0], arrays[2][:, :, 20, 1] = math.nan, -math.inf
    Y = run(*arrays)
    assert Y.isnan().any(-1)[0, 0].nonzero().flatten().tolist() == [12, 13, 14, 15, 20, 21, 22, 23]
    torch.where(Y.isnan(), 0, Y).square().sum().backward()
    for x in arrays:
        assert torch.isfinite(x.grad).all()
        assert (x.grad[:, :, 1:12] != 0).any(-1).all()


# -- other derivatives ---------------------------------------------------------------------------


@pytest.mark.parametrize("operator", [*WINDOWS.values(), MEMORIES["rg_lru"]])
def test_second_derivatives_are_those_of_finite_differences(operator: Operator) -> None:
    run, arrays = operator.run, operator.leaves(6)
    with sdpa_kernel(SDPBackend.MATH):
        assert gradgradcheck(run, arrays)
        assert gradgradcheck(lambda *x: run(*x, offsets=[0, 2, 6]), arrays)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_is_that_of_differences() -> None:
    window = WINDOWS["window"]
    assert gradcheck(window.run, window.leaves(9), check_forward_ad=True, check_backward_ad=False)


# -- the compiler, and tensors that are not plain numbers -------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_compile_whole_with_what_is_not_finite(name: str) -> None:
    run, arrays = WINDOWS[name].run, WINDOWS[name].leaves(30)
    fast = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        arrays[1][:, :, 12, 0], arrays[2][:, :, 20, 1] = math.nan, -math.inf
        for inputs in (arrays, [x.bfloat16() for x in arrays]):
            torch.testing.assert_close(fast(*inputs), run(*inputs), equal_nan=True)


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


def test_forward_mode_over_others_reaches_a_window() -> None:
    """Also where a wrapper of torch.func hides the tangent from torch's fused kernels, which have no such mode."""
    q, k, V = torch.randn((3, 1, 9, 4), generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def total(q: Any) -> Any:
        return window_attention(q, k, V, 3).square().sum()

    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.autograd.functional.hessian(total, q)
    torch.testing.assert_close(torch.func.hessian(total)(q), expected, rtol=0, atol=1e-12)
    _, product = torch.func.jvp(torch.func.grad(total), (q,), (q,))
    torch.testing.assert_close(product, torch.einsum("abcxyz,xyz->abc", expected, q), rtol=0, atol=1e-12)
    batch = torch.stack([q, 2 * q])
    _, one = torch.func.jvp(torch.func.vmap(total), (batch,), (batch,))
    _, other = torch.func.jvp(lambda x: torch.stack([total(x[0]), total(x[1])]), (batch,), (batch,))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        found = torch.autograd.forward_ad.unpack_dual(torch.func.grad(total)(dual)).tangent
    torch.testing.assert_close(found, product, rtol=0, atol=1e-12)
