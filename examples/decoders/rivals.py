"""Rivals of kvpress on one dense reading: each with its own code, at several budgets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import kvpress
import numpy as np
from kvpress import BasePress, DuoAttentionPress, KVzipPress
from transformers import DynamicCache

from levattn.integrations.transformers import HeadProfile

__all__ = ["PLAIN", "WRAPPED", "Rivals"]

PLAIN = ("SnapKV", "KeyDiff", "Knorm", "ExpectedAttention", "Compactor", "StreamingLLM", "TOVA")
WRAPPED = (("AdaKV", "SnapKV"), ("AdaKV", "ExpectedAttention"), ("CriticalKV", "SnapKV"))
SINKS = 4  # positions that DuoAttention's streaming heads keep at the start

Kept = list[tuple[Any, Any, Any]]  # of each layer: keys, values, and the places that its attention masks


class _Together(BasePress):
    """Several presses on one reading, which stays dense."""

    def __init__(self, presses: dict[tuple[str, float], Any]) -> None:
        self.presses = presses
        self.kept: dict[tuple[str, float], Kept] = {which: [] for which in presses}

    def post_init_from_model(self, model: Any) -> None:
        for press in self.presses.values():
            press.post_init_from_model(model)

    def compress(
        self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        for which, press in self.presses.items():
            module.masked_key_indices = None
            K, V = press.compress(module, hidden_states, keys, values, attentions, kwargs)
            self.kept[which].append((K, V, module.masked_key_indices))
        module.masked_key_indices = None
        return keys, values


def _duo(profile: HeadProfile, length: int, budget: float) -> DuoAttentionPress:
    """Return DuoAttention with our profile: streaming heads keep a quarter of the budget, the dearest heads all."""
    layers, heads = (1 + max(key[axis] for key in profile) for axis in (0, 1))
    scores = np.array([[profile[layer, head] for head in range(heads)] for layer in range(layers)])
    recent = max(1, round(budget / 4 * length) - SINKS)
    streaming = (SINKS + recent) / length

    class Profiled(DuoAttentionPress):
        @staticmethod
        def load_attention_pattern(model: Any) -> tuple[int, int, Any]:  # noqa: ARG004
            return SINKS, recent, scores

    return Profiled(head_compression_ratio=(1 - budget) / (1 - streaming))


class _Zip(KVzipPress):
    """KVzip that notes what several budgets keep."""

    def __init__(self, budgets: Iterable[float]) -> None:
        super().__init__(compression_ratio=0.5)
        self.budgets = tuple(budgets)
        self.masked: dict[float, list[Any]] = {}

    def compress_post(self, model: Any) -> None:
        for budget in self.budgets:
            self.compression_ratio = 1 - budget
            super().compress_post(model)
            self.masked[budget] = [layer.self_attn.masked_key_indices for layer in model.model.layers]
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None


class Rivals:
    """What each rival keeps of a context, at each budget.

    model, tokenizer: read by KVzip from a folder, so the tokenizer is written to one, without its template for chats.
    """

    def __init__(self, model: Any, tokenizer: Any, profile: HeadProfile, budgets: Iterable[float]) -> None:
        self.model, self.profile, self.budgets = model, profile, tuple(budgets)
        self.folder = tempfile.TemporaryDirectory()
        tokenizer.chat_template = None
        tokenizer.save_pretrained(self.folder.name)
        model.config.name_or_path = self.folder.name

    def _presses(self, length: int) -> dict[tuple[str, float], Any]:
        found: dict[tuple[str, float], Any] = {}
        for budget in self.budgets:
            ratio = 1 - budget
            for name in PLAIN:
                found[name, budget] = getattr(kvpress, f"{name}Press")(compression_ratio=ratio)
            for outer, inner in WRAPPED:
                press = getattr(kvpress, f"{inner}Press")(compression_ratio=ratio)
                found[f"{outer}({inner})", budget] = getattr(kvpress, f"{outer}Press")(press)
            found["DuoAttention", budget] = _duo(self.profile, length, budget)
        return found

    def read(self, tokens: Any) -> Iterator[tuple[str, float, Any]]:
        """Yield rival, budget and cache; only while a cache is the last yielded is it right to use it."""
        every = _Together(self._presses(tokens.shape[1]))
        with every(self.model):
            self.model.model(tokens, past_key_values=DynamicCache())
        for (name, budget), kept in every.kept.items():
            yield name, budget, self._cache(kept)
            kept.clear()
        zipped, cache = _Zip(self.budgets), DynamicCache()
        with zipped(self.model):
            self.model.model(input_ids=tokens, past_key_values=cache)
        for budget, masked in zipped.masked.items():
            pairs = zip(cache.layers, masked, strict=True)
            yield "KVzip", budget, self._cache([(layer.keys, layer.values, where) for layer, where in pairs])
        for layer in self.model.model.layers:
            layer.self_attn.masked_key_indices = None

    def _cache(self, kept: Kept) -> DynamicCache:
        cache = DynamicCache()
        for number, (keys, values, masked) in enumerate(kept):
            cache.update(keys, values, number)
            self.model.model.layers[number].self_attn.masked_key_indices = masked
        return cache
