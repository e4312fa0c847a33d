"""What the tests of attention on a device compare with: the definitions in float64, and their gradients by torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest


def once(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def in_float64(x: Any) -> Any:
    """Arguments whose arrays of numbers are those of `x` in float64."""
    parts = {field.name: getattr(x, field.name) for field in fields(x)}
    return replace(
        x,
        **{name: part.astype(np.float64) for name, part in parts.items() if getattr(part, "dtype", 0) == np.float32},
    )


def gradients(forward: Callable[[Any], Any], x: Any, names: Sequence[str], dY: Any) -> list[Any]:
    """The gradients of ``Σ dY · forward(x)`` in float64 for the arguments of these names; None for None."""
    torch = pytest.importorskip("torch")
    parts = {
        name: None if part is None else torch.tensor(np.asarray(part, np.float64), requires_grad=True)
        for name, part in ((name, getattr(x, name)) for name in names)
    }
    mask = None if x.mask is None else torch.tensor(x.mask)
    state = None if x.state is None else tuple(map(torch.tensor, x.state))
    (forward(replace(x, **parts, mask=mask, state=state)) * torch.tensor(np.asarray(dY, np.float64))).sum().backward()
    return [
        None if part is None else np.zeros(part.shape) if part.grad is None else part.grad.numpy()
        for part in parts.values()
    ]


def assert_near(found: Sequence[Any], expected: Sequence[Any], tolerance: float, dtype: Any = None) -> None:
    """Arrays differ by at most this part of the largest number, or of 1."""
    for part, other in zip(found, expected, strict=True):
        assert (part is None) == (other is None)
        if part is None:
            continue
        assert dtype is None or part.dtype == dtype
        size = max(1.0, np.abs(other).max(initial=0))
        np.testing.assert_allclose(part, other, rtol=0, atol=tolerance * size)


def assert_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Arrays have the same bits."""
    for part, other in zip(found, expected, strict=True):
        assert (part is None) == (other is None)
        if part is not None:
            np.testing.assert_array_equal(part, other)
