"""What tests of changed transformers models share: sizes of tiny ones, tokens, distances, calls that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 40,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,  # large, so that attention matters
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def tokens(batch: int, length: int) -> Any:
    return torch.randint(1, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


def difference(a: Any, b: Any, real: Any = None) -> float:
    distance = (a - b).abs()
    return float((distance if real is None else distance[real.bool()]).max())


def in_parts(model: Any, ids: Any, cuts: list[int]) -> tuple[Any, Any]:
    """The logits of tokens that come in parts, and the cache in the end."""
    past, found = None, []
    for part in ids.split(cuts, 1):
        with torch.no_grad():
            result = model(part, past_key_values=past, use_cache=True)
        past = result.past_key_values
        found.append(result.logits)
    return torch.cat(found, 1), past


def packed_mask(length: int) -> Any:
    mask = torch.ones(length, length).tril().bool()
    mask[8:, :8] = False
    return mask[None, None]


def refused_calls(length: int, base: Callable[[], Any]) -> dict[str, tuple[Callable[[Any], dict[str, Any]], str]]:
    """Options of calls on that many tokens that no attention of ours honors, and what is said of them."""
    ends = torch.tensor([0, length], dtype=torch.int32)
    return {
        "packed by positions": (
            lambda _: {"position_ids": torch.arange(length)[None] % 8, "use_cache": False},
            "causal with padding; .*packed",
        ),
        "mask of pairs": (lambda _: {"attention_mask": packed_mask(length)}, "causal with padding"),
        "packed by lengths": (
            lambda _: {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": length, "max_length_k": length},
            "passes cu_seq_lens_q .*packed sequences",
        ),
        "unknown keyword": (lambda _: {"tree": 3}, "passes tree to its attention .*not known"),
        "static cache": (
            lambda model: {"past_key_values": transformers.StaticCache(config=model.config, max_cache_len=30)},
            "past_key_values is of type StaticCache",
        ),
        "offloaded cache": (lambda model: {"past_key_values": offloaded(model)}, "DynamicCache, offloaded"),
        "cache of the base": (
            lambda _: {"past_key_values": base()(tokens(2, length), use_cache=True).past_key_values},
            f"holds {length} positions of the base model, without what the .* keep",
        ),
    }


def offloaded(model: Any) -> Any:
    cache = transformers.DynamicCache(config=model.config)
    cache.offloading = True
    return cache
