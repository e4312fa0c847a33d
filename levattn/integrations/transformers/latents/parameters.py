"""What an extended layer learns: latent logits and a gate from the layer's hidden states."""

from __future__ import annotations

import math
from typing import Any

import torch

from levattn.integrations.transformers.discovery import ModelLayer
from levattn.nn.features import feature_map, run_feature

__all__ = ["FEATURES", "OVERLAPS", "LatentLogits"]

FEATURES = ("conv", "rg_lru")
OVERLAPS = ("mixture", "exclusive")


class LatentLogits(torch.nn.Module):  # type: ignore[misc]
    """Projections of hidden states (B, T, C) to the logits of latents and the gate of the window.

    A feature with a short memory may stand before the logits; the gate reads the hidden states themselves.

    Logits of queries and gates are per query head. Logits of keys are per key/value head: what a latent remembers is a
    mean of values, and a group of query heads shares its values; so it shares the means too, and weighs them each in
    its own way, with one projection for the group and nothing that grows with its size.

    At the start the logits of queries are zero and the gate is its bias, so that p(0|t) = 1 − δ in every row whose
    latents have seen something; random logits of keys tell the latents apart, so that every parameter has a gradient.
    """

    def __init__(
        self,
        layer: ModelLayer,
        *,
        latents: int,
        window: int,
        overlap: str,
        delta: float,
        feature: str | None,
    ) -> None:
        super().__init__()
        like = layer.probe.query
        hidden, heads = layer.probe.call.hidden.shape[-1], like.shape[1]
        self.latents, self.window, self.overlap = latents, window, overlap
        # what trains in half precision loses updates that are small beside the weight
        dtype = torch.promote_types(like.dtype, torch.float32)
        where: dict[str, Any] = {"device": like.device, "dtype": dtype}
        self.feature = feature_map(feature, hidden, **where)
        self.query = torch.nn.Linear(hidden, heads * latents, bias=False, **where)
        self.key = torch.nn.Linear(hidden, layer.heads * latents, bias=False, **where)
        self.gate = torch.nn.Linear(hidden, heads, **where)
        torch.nn.init.zeros_(self.query.weight)
        torch.nn.init.normal_(self.key.weight, std=1 / math.sqrt(hidden))
        torch.nn.init.zeros_(self.gate.weight)
        torch.nn.init.constant_(self.gate.bias, math.log1p(-delta) - math.log(delta) + math.log(latents))
        # what the weights were trained with travels with them, as a tensor, because their files hold nothing else
        self.register_buffer("settings", torch.tensor([window, OVERLAPS.index(overlap)], device=like.device))

    def forward(self, hidden: Any, present: Any, state: Any) -> tuple[Any, Any, Any, Any]:
        """Return q_logits (B, heads, T, L), k_logits (B, kv_heads, T, L), gate (B, heads, T) and the feature's state.

        present: (B, T) bool, False for padding, which the feature leaves out, or None. state: that of the feature
        before, or None.
        """
        hidden = hidden.to(self.gate.weight.dtype)
        read, state = run_feature(self.feature, hidden, None, state, present)
        gate = self.gate(hidden).transpose(1, 2)
        return self._by_head(self.query(read)), self._by_head(self.key(read)), gate, state

    def _by_head(self, logits: Any) -> Any:
        return logits.unflatten(-1, (-1, self.latents)).transpose(1, 2)
