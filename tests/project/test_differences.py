"""Finite differences find what is wrong with a gradient: in one entry, by little, or everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from differences import assert_gradients

torch = pytest.importorskip("torch")


class Planted(torch.autograd.Function):  # type: ignore[misc]
    """The exponential of x, whose gradient is off by what `fault` makes of it."""

    @staticmethod
    def forward(ctx: Any, x: Any, fault: Any) -> Any:
        ctx.save_for_backward(x)
        ctx.fault = fault
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.fault(gradient * x.exp()), None


def in_one_entry(gradient: Any) -> Any:
    gradient = gradient.clone()
    gradient[3, 2] += 1e-6
    return gradient


FAULTS: dict[str, Any] = {
    "in one entry": in_one_entry,
    "by little": lambda gradient: gradient * (1 + 1e-6),
    "none at all": lambda _: None,
    "transposed": lambda gradient: gradient.mT,
}


def leaves() -> list[Any]:
    rng = np.random.default_rng(2)
    return [torch.from_numpy(rng.standard_normal((6, 6))).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_gradient_is_found_and_its_array_named(fault: str) -> None:
    assert_gradients(lambda x, y: Planted.apply(x, lambda gradient: gradient) * y, leaves())
    with pytest.raises(AssertionError, match="array 1"):
        assert_gradients(lambda x, y: x * Planted.apply(y, FAULTS[fault]), leaves())


def test_a_second_backward_pass_that_differs_is_found() -> None:
    calls = iter((0.0, 1e-15))
    with pytest.raises(AssertionError, match="array 0: a second backward pass"):
        assert_gradients(lambda x: Planted.apply(x, lambda gradient: gradient + next(calls)), leaves()[:1])
