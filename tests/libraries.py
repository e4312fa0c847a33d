"""One array in several libraries, and the marks that go with them: what tests of attention share."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import array_api_strict
import numpy as np
import pytest

HAS_TORCH = find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
HAS_JAX = find_spec("jax") is not None
needs_jax = pytest.mark.skipif(not HAS_JAX, reason="needs jax")
STORAGES = ["numpy", "strict", pytest.param("torch", marks=needs_torch), pytest.param("jax", marks=needs_jax)]
over_storages = pytest.mark.parametrize("storage", STORAGES)


def stored(array: Any, storage: str) -> Any:
    """The array in a library; None stays None."""
    if array is None or storage == "numpy":
        return array
    if storage == "strict":
        return array_api_strict.asarray(np.ascontiguousarray(array))
    if storage == "jax":
        import jax

        return jax.numpy.asarray(array)
    import torch

    return torch.from_numpy(np.ascontiguousarray(array))
