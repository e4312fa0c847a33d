"""Causal selections on a CUDA device, run on the CPU: one kernel makes them in turn, as the kernel of main memory does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from levattn.attention import Selection, causal_pruned_attention
from libraries import HAS_TORCH

if not HAS_TORCH:
    pytest.skip("needs torch", allow_module_level=True)

import torch

CASES: list[dict[str, Any]] = [
    {"budget": 64},
]


def drawn(b: int, g: int, T: int, d: int, D: int, seed: int = 0) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (b, g, T, d), (b, 1, T, d), (b, 1, T, D)
    return tuple(torch.randn(*size, generator=generator) for size in sizes)  # type: ignore[return-value]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_selections_are_those_of_main_memory(case: dict[str, Any], tensors: Any) -> None:
    there, _, _ = tensors
    Q, K, V = drawn(2, 3, 400, 24, 16)
    selection = Selection(**case)
    exact, kept = causal_pruned_attention(Q, K, V, selection, return_state=True)
    found, state = causal_pruned_attention(*(there.CudaTensor(X, 1) for X in (Q, K, V)), selection, return_state=True)
    torch.testing.assert_close(found.inner, exact, rtol=0, atol=1e-5)
    for one, two in zip(state.parts, kept.parts, strict=True):
        np.testing.assert_array_equal(one.kept_places.inner.numpy(), two.kept_places)
