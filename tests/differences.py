"""Gradients of torch against finite differences: along random directions, which takes four calls for each array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

STEP = 5e-4
STENCIL = {-2: 1 / 12, -1: -2 / 3, 1: 2 / 3, 2: -1 / 12}  # of fourth order: off by about STEP⁴ / 30 fifth derivatives


def assert_gradients(run: Callable[..., Any], arrays: Sequence[Any], *, tolerance: float = 1e-8) -> None:
    """Compare the derivative of a random combination of outputs along a random direction of each array.

    What is wrong in one entry of the Jacobian is wrong along the direction too, by that times two random numbers, so
    all entries are looked at. Arrays are of float64 and require gradients; of an array that has no part in the outputs
    the gradient may be missing. A second backward pass has to have the same bits.
    """
    import torch

    rng = np.random.default_rng(0)

    def direction(x: Any) -> Any:
        values = rng.standard_normal(x.shape)
        return torch.from_numpy(np.asarray(values / max(np.linalg.norm(values), 1e-300)))

    output = run(*arrays)
    weights = torch.from_numpy(np.asarray(rng.standard_normal(output.shape)))
    found, again = (
        torch.autograd.grad(output, arrays, weights, retain_graph=True, materialize_grads=True) for _ in range(2)
    )
    with torch.no_grad():
        for place, (x, gradient, other) in enumerate(zip(arrays, found, again, strict=True)):
            assert torch.equal(gradient, other), f"array {place}: a second backward pass has other bits"
            along = direction(x)
            terms = []
            for steps, factor in STENCIL.items():
                moved = [*arrays[:place], x + steps * STEP * along, *arrays[place + 1 :]]
                terms.append(factor * float((run(*moved) * weights).sum()))
            expected, true = float((gradient * along).sum()), sum(terms) / STEP
            assert abs(expected - true) <= tolerance * (1 + abs(true)), f"array {place}: {expected}, and not {true}"
