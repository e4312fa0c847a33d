"""Attention operators on tensors of torch, one table of them times their properties: gradients, precision, compiler.

What an operator has alone is in `test_latent_torch.py` and `test_tssa_torch.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from operator_table import LATTE, MEMORIES, MIXTURES, TSSA, TSSA_EVERYWHERE, WINDOWS, Operator, T, of_forms

from differences import assert_gradients
from levattn.attention import latte, rotate_values
from levattn.states import SoftmaxState
from token_calls import tssa

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad, grad  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")


def rotated(V: Any, **_: Any) -> Any:
    return rotate_values(V, torch.arange(V.shape[1]))


ALL: dict[str, Operator] = {**LATTE, **WINDOWS, **MIXTURES, **MEMORIES, "rotate_values": Operator(rotated, ((T, 4),))}
MANY_LATENTS = {
    f"{name}, many": Operator(operator.run, ((T, 16), (T, 16), (T, 8))) for name, operator in LATTE.items()
}
ALL |= {**MANY_LATENTS, **TSSA, **TSSA_EVERYWHERE}


def call_of(name: str, length: int, **options: Any) -> tuple[Any, list[Any]]:
    """An operator, and leaves for it."""
    return ALL[name].run, ALL[name].leaves(length, **options)


def flags(length: int, *left_out: int) -> Any:
    """A mask (T,) of all positions but some."""
    mask = torch.ones(length, dtype=torch.bool)
    mask[list(left_out)] = False
    return mask


# -- gradients --------------------------------------------------------------------------------


@pytest.mark.crossed
@pytest.mark.parametrize("options", [{}, {"offsets": [0, 4, 9]}, {"mask": flags(9, 0, 3, 4)}], ids=str)
@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("tssa")])  # which have tables of theirs
def test_gradients_are_those_of_finite_differences(name: str, options: Any) -> None:
    run, arrays = call_of(name, 9)
    assert_gradients(lambda *x: run(*x, **options), arrays)


PRECISE: list[tuple[str, float, float]] = [
    *((name, scale, 1e-4) for name in MANY_LATENTS for scale in (1.0, 30.0, 300.0)),
    *((name, 1.0, 2e-6) for name in (*TSSA, *TSSA_EVERYWHERE) if name not in ("tssa, logits", "tssa, leverage")),
]


@pytest.mark.parametrize(("name", "scale", "tolerance"), PRECISE)
def test_gradients_in_single_precision_follow_those_in_double(name: str, scale: float, tolerance: float) -> None:
    run, single = call_of(name, 150, scale=scale, dtype="float32")
    exact = [x.detach().double().requires_grad_() for x in single]
    Y, expected = run(*single), run(*exact)
    weights = torch.from_numpy(np.random.default_rng(7).standard_normal(Y.shape)).float()
    true = grad((expected * weights.double()).sum(), exact)
    for one, other in zip(grad((Y * weights).sum(), single), true, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance * float(other.abs().max()) + 1e-30)


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in ALL if name != "tssa, leverage"])
def test_half_precision_is_computed_in_single(name: str, dtype: str) -> None:
    run, half = call_of(name, 300 if name.startswith("tssa") else 40, dtype=dtype)
    single = [x.detach().float().requires_grad_() for x in half]
    Y, expected = run(*half), run(*single)
    assert Y.dtype == getattr(torch, dtype)
    assert torch.equal(Y, expected.to(Y.dtype))
    assert Y.stride() == expected.stride()
    found, true = (grad(out.float().sum(), arrays) for out, arrays in ((Y, half), (expected, single)))
    for one, other in zip(found, true, strict=True):
        assert one.dtype == Y.dtype
        assert torch.equal(one, other.to(Y.dtype))


@pytest.mark.parametrize("name", [name for name in ALL if ALL[name].unread and name not in MEMORIES])
def test_padding_has_no_gradient_whatever_it_holds(name: str) -> None:
    run, arrays = call_of(name, 30, scale=3.0)
    mask, unread = flags(30, *range(4), 11, 12, 13, 27, 28, 29), ALL[name].unread

    def padding(x: Any, place: int) -> Any:
        return x.movedim(ALL[name].shapes[place].index(T) + 1, 0)[~mask]

    with torch.no_grad():
        for place in unread:
            arrays[place].movedim(ALL[name].shapes[place].index(T) + 1, 0)[~mask] = torch.nan
    Y = run(*arrays, mask=mask)
    found = grad(Y.square().sum(), arrays)
    assert all(gradient.isfinite().all() for gradient in found)
    assert all(found[place].any() for place in unread)
    assert not any(padding(found[place], place).any() for place in unread)
    if name.startswith("tssa"):
        assert not Y[:, :, ~mask].any()
    nothing = grad(run(*arrays, mask=flags(30, *range(30))).sum(), arrays, allow_unused=True)
    assert not any(gradient.any() for gradient in nothing if gradient is not None)


FORMS: dict[str, Operator] = {**of_forms(causal=True), **of_forms(causal=False)}
REFILLED: dict[str, Callable[[], Any]] = {
    "mask": lambda: np.arange(45) % 5 != 3,
    "offsets": lambda: np.array([0, 9, 45]),
}


WITH_OPTION: list[tuple[str, str]] = [
    *((name, "mask") for name in ALL | FORMS if name != "rotate_values"),
    *((name, "offsets") for name in ALL if name != "rotate_values"),
]


@pytest.mark.crossed
@pytest.mark.parametrize(("name", "option"), WITH_OPTION)
def test_an_array_of_numpy_may_be_refilled_before_backward(name: str, option: str) -> None:
    operator = (ALL | FORMS)[name]
    arrays = operator.leaves(45)

    def gradients(refill: bool) -> Any:
        given = REFILLED[option]()
        Y = operator.run(*arrays, **{option: given})
        if refill:
            given[...] = given[::-1].copy() if option == "mask" else 0
        return grad(Y.square().sum(), arrays, allow_unused=True)

    for one, other in zip(gradients(False), gradients(True), strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_arrays_of_a_state_may_be_refilled_before_backward(library: str) -> None:
    operator = LATTE["latte"]
    arrays = operator.leaves(9)
    _, earlier = operator.run(*operator.arrays(7, seed=1), return_state=True)

    def gradients(refill: bool) -> Any:
        parts = [np.array(part) for part in (earlier.m, earlier.s, earlier.S)]
        parts = [torch.from_numpy(part) for part in parts] if library == "torch" else parts
        Y = operator.run(*arrays, state=SoftmaxState.from_arrays(*parts))
        for part in parts if refill else ():
            part[...] = 1
        return grad(Y.square().sum(), arrays)

    assert all(torch.equal(one, other) for one, other in zip(gradients(False), gradients(True), strict=True))


@pytest.mark.parametrize("name", ["latte", *MIXTURES, *MEMORIES, *TSSA])
def test_states_carry_no_gradient(name: str) -> None:
    run, arrays = call_of(name, 11)
    operator = ALL[name]
    moving = [place for place, shape in enumerate(operator.shapes) if T in shape]
    head, tail = operator.cut(arrays, 0, 8), operator.cut(arrays, 8, 11)
    tail = [x.detach().requires_grad_() if place in moving else x for place, x in enumerate(tail)]
    Y, state = run(*head, return_state=True)
    after, last = run(*tail, state=state, return_state=True)
    axis = 2 if name.startswith("tssa") or name in MIXTURES else 1
    torch.testing.assert_close(torch.cat([Y, after], axis), run(*arrays), atol=1e-12, rtol=0)
    assert not any(grad(after.sum(), [arrays[place] for place in moving], allow_unused=True))
    held = [last, *(getattr(last, part, None) for part in ("k", "V", "logits"))]
    assert not any(getattr(part, "requires_grad", False) for part in held)
    assert torch.equal(run(*tail, state=state), after)
    assert_gradients(lambda *x: run(*x, state=state), [x.detach().requires_grad_() for x in tail])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", ["latte", "tssa", "tssa, leverage"])
def test_second_derivatives_and_forward_mode_are_refused(name: str) -> None:
    run, arrays = call_of(name, 9)
    (first,) = grad(run(*arrays).square().sum(), arrays[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"first derivatives only|once_differentiable"):
        first.sum().backward()
    arrays = [x.detach() for x in arrays]
    if name == "tssa, leverage":
        return
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(arrays[0], torch.ones_like(arrays[0]))
        with pytest.raises(NotImplementedError, match="use reverse mode"):
            run(dual, *arrays[1:])


FUNCTIONAL: list[Any] = [
    ("latte", {}),
    ("latte everywhere", {}),
    ("latte", {"offsets": [0, 4, 9]}),
    ("tssa", {}),
    ("tssa everywhere", {}),
    ("tssa", {"offsets": [0, 4, 9]}),
    ("tssa", {"decay": 0.7}),
    ("tssa, norm", {}),
    ("tssa, mean", {}),
]


@pytest.mark.parametrize(("name", "options"), FUNCTIONAL)
def test_torch_func_follows_the_definitions(name: str, options: dict[str, Any]) -> None:
    run, arrays = call_of(name, 9)
    arrays = [x.detach() for x in arrays]
    if name.startswith("tssa"):
        arrays[1] = arrays[1].expand(2, -1)

    def loss(*x: Any) -> Any:
        return run(*x, **options).square().sum()

    wanted = [x.clone().requires_grad_() for x in arrays]
    expected = grad(loss(*wanted), wanted)
    found = torch.func.grad(loss, argnums=(0, 1, 2))(*arrays)
    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*arrays)
    for one, other, answer in zip(found, each, expected, strict=True):
        torch.testing.assert_close(one, answer, atol=1e-12, rtol=0)
        torch.testing.assert_close(other, answer, atol=1e-12, rtol=0)
    for place in (1, 2):  # one array alone stands for several
        rows = torch.func.vmap(lambda x, k=place: run(*arrays[:k], x, *arrays[k + 1 :], **options))(arrays[place])
        alone = run(*arrays[:place], arrays[place][1], *arrays[place + 1 :], **options)
        torch.testing.assert_close(rows[1], alone, atol=1e-12, rtol=0)
    with pytest.raises(NotImplementedError, match=r"within torch\.func"):
        torch.func.vmap(lambda *x: run(*x, return_state=True, **options)[0])(*arrays)


# -- the compiler, and tensors that are not plain numbers -------------------------------------


def as_a_layer(X: Any, temperature: Any, **options: Any) -> Any:
    W = (2 * X).unflatten(-1, (3, -1)).transpose(1, 2)
    return tssa(W, temperature, **options).transpose(1, 2).flatten(-2).square()


def doubled_latte(Q: Any, K: Any, V: Any, **options: Any) -> Any:
    return latte(2 * Q, K, V, **options).square()


LAYERS: dict[str, Operator] = {
    "latte": Operator(doubled_latte, LATTE["latte"].shapes),
    "tssa": Operator(as_a_layer, ((T, 12), (3,))),
}


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)  # type: ignore[no-any-return]


@pytest.mark.thorough  # in every run tests/nn/test_layers.py compiles a layer of it
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_compiled_whole_with_the_same_values_and_gradients(name: str, dtype: str, dynamic: bool) -> None:
    def run(*x: Any) -> Any:
        *arrays, mask = x
        return LAYERS[name].run(*arrays, mask=mask)

    fast = compiled(run, dynamic=dynamic)
    for length in (20, 11):
        arrays = LAYERS[name].leaves(length, dtype=dtype)
        mask = torch.from_numpy(np.random.default_rng(8).random((2, length)) > 0.2)
        assert torch.equal(fast(*arrays, mask), run(*arrays, mask))
        found, expected = (grad(function(*arrays, mask).sum(), arrays) for function in (fast, run))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["latte everywhere", "tssa everywhere"])
def test_compiled_with_packed_sequences_checks_them_when_it_runs(name: str) -> None:
    run, arrays = call_of(name, 20)
    fast = compiled(lambda offsets, *x: run(*x, offsets=offsets))
    for offsets in ([0, 4, 20], [0, 17, 20]):
        assert torch.equal(fast(torch.tensor(offsets), *arrays), run(*arrays, offsets=offsets))
    with pytest.raises(ValueError, match="ascend from 0 to T = 20"):
        fast(torch.tensor([0, 4, 19]), *arrays)
    constant = compiled(lambda *x: run(*x, offsets=[0, 4, 20]))
    assert torch.equal(constant(*arrays), run(*arrays, offsets=[0, 4, 20]))


@pytest.mark.parametrize(
    ("name", "options"),
    [("latte", {}), ("tssa", {}), ("tssa, norm everywhere", {}), ("tssa", {"decay": 0.5, "offsets": [0, 4, 9]})],
)
def test_tensors_without_numbers_have_shapes(name: str, options: dict[str, Any]) -> None:
    run, arrays = call_of(name, 9)
    shape = run(*arrays, **options).shape
    Y = run(*(x.detach().half().to("meta") for x in arrays), **options)
    assert (Y.shape, Y.dtype, Y.device.type) == (shape, torch.float16, "meta")
    with FakeTensorMode() as mode:
        assert run(*map(mode.from_tensor, arrays), **options).shape == shape


@pytest.mark.parametrize(
    ("name", "place", "message"),
    [
        ("latte", 2, "V is of torch on meta, and q_logits of torch on cpu"),
        ("tssa", 1, "temperature is of torch on meta, and W of torch on cpu"),
    ],
)
def test_tensors_in_other_forms_are_numbers_too(name: str, place: int, message: str) -> None:
    run, arrays = call_of(name, 9)
    x, *others = (x.detach() for x in arrays)
    Y = run(x, *others)
    negative = torch.complex(x, -x.new_ones(x.shape) * x).conj().imag  # a view with the sign yet to turn
    assert negative.is_neg()
    for form in (negative, torch.nn.Parameter(x), x.mT.contiguous().mT):
        assert torch.equal(run(form, *others).detach(), Y)
    with torch.inference_mode():
        assert torch.equal(run(x, *others), Y)
    elsewhere = [x, *others]
    elsewhere[place] = elsewhere[place].to("meta")
    with pytest.raises(TypeError, match=message):
        run(*elsewhere)
    with pytest.raises(TypeError, match=r"(q_logits|W) is a nested or sparse torch tensor"):
        run(x.to_sparse(), *others)
