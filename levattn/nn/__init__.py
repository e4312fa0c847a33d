"""Torch modules: attention in linear time or to few keys, with caches of constant size for decoding."""

from __future__ import annotations

from levattn._core.checks import needing

with needing("levattn.nn needs torch", "torch"):
    import torch  # noqa: F401 (so that it is missed here, with what to install)

from levattn.nn.base import RGLRU, CausalConv
from levattn.nn.latents import Latte, LatteCache, Macchiato, MacchiatoCache
from levattn.nn.levattention import LevAttention, LevAttentionCache, set_dense
from levattn.nn.tokens import TokenStatistics, TokenStatisticsCache

__all__ = [
    "RGLRU",
    "CausalConv",
    "Latte",
    "LatteCache",
    "LevAttention",
    "LevAttentionCache",
    "Macchiato",
    "MacchiatoCache",
    "TokenStatistics",
    "TokenStatisticsCache",
    "set_dense",
]
