"""The trained parameters of an extended layer: latent logits and a gate from the layer's hidden states."""

from __future__ import annotations

import math
from typing import Any

import torch

from levattn.integrations.transformers.discovery import ModelLayer
from levattn.nn.latents import feature_map, run_feature

FEATURES = ("conv", "rg_lru")
OVERLAPS = ("mixture", "exclusive")


class LatentLogits(torch.nn.Module):  # type: ignore[misc]
    """Projections of hidden states (B, T, C) to the logits of latents and the gate of the window.

    A feature with a short memory may precede the logits; the gate reads the hidden states themselves.

    Query logits and gates are per query head. Key logits are per key/value head, because a latent stores means of
    values, which a group of query heads shares. Each query head weights these means by its own logits. The group needs
    one projection of keys, whose cost does not grow with the number of query heads.

    Initially the query logits are zero and the gate equals its bias. So p(0|t) = 1 − δ in every row whose latents have
    seen a position. The random key logits differ between latents, so every parameter has a gradient.
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
        # in half precision, updates that are small relative to the weight would be lost
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
        # saved with the weights, as a tensor, because their files hold nothing else
        self.register_buffer("settings", torch.tensor([window, OVERLAPS.index(overlap)], device=like.device))

    def forward(self, hidden: Any, present: Any, state: Any) -> tuple[Any, Any, Any, Any]:
        """Return q_logits (B, heads, T, L), k_logits (B, kv_heads, T, L), gate (B, heads, T) and the feature's state.

        present: (B, T) bool, False for padding, which the feature leaves out, or None. state: the feature's state
        before these positions, or None.
        """
        hidden = hidden.to(self.gate.weight.dtype)
        read, state = run_feature(self.feature, hidden, None, state, present)
        gate = self.gate(hidden).transpose(1, 2)
        return self._by_head(self.query(read)), self._by_head(self.key(read)), gate, state

    def _by_head(self, logits: Any) -> Any:
        return logits.unflatten(-1, (-1, self.latents)).transpose(1, 2)
