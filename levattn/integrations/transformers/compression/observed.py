"""Scores of the keys of a context by functions of a user's own, and by published rules that read its queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import max_pool1d

from levattn.attention.pruned.baselines import asks_queries, baseline_of
from levattn.attention.pruned.call import own_scores
from levattn.integrations.transformers.compression.coding import wide

_LOGITS = 1 << 22  # at a time
_WINDOW, _NEIGHBORS = 32, 7  # of SnapKV: the last queries, and the keys whose maximum counts

Observed = Callable[..., Any]  # of keys (G, n, d), values (G, n, D) and queries (G, g, n, d), times their scale


def scores_of(scores: Any, Q: Any, K: Any, V: Any, softcap: float | None) -> Any:
    """Return scores (G, n) of the keys of heads (G, n, d) of a layer, by a function or the name of a rule.

    `Q`: (G, g, n, d), times their scale. `softcap`: the bound of logits, which rules heed, or None.
    """
    Q, K, V = (wide(array) for array in (Q, K, V))
    rule = baseline_of(scores)
    if rule is None:
        return own_scores(scores, K, V, Q if asks_queries(scores) else None)
    if rule.function is not None:
        return own_scores(rule.function, K, V)
    return _OBSERVED[scores](partial(_attention, Q, K, softcap), *Q.shape[:3]).to(K.dtype)


def _attention(Q: Any, K: Any, softcap: float | None, first: int, last: int) -> Any:
    """Return the causal attention (G, g, last - first, last) of some queries."""
    logits = Q[:, :, first:last] @ K[:, None, :last].mT
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    place = torch.arange(last, device=K.device)
    return logits.masked_fill(place > place[first:, None], -math.inf).softmax(-1)


def _h2o(attention: Observed, G: int, g: int, n: int) -> Any:
    """Return the sums of the attention of all queries."""
    total, step = 0, max(1, _LOGITS // (G * g * n))
    for first in range(0, n, step):
        last = min(first + step, n)
        found = attention(first, last).sum((1, 2), dtype=torch.float64)
        total = total + torch.nn.functional.pad(found, (0, n - last))
    return total


def _snapkv(attention: Observed, _G: int, _g: int, n: int) -> Any:
    """Return the sums of the attention of the last queries, as maxima over neighbors: of earlier keys, and of theirs.

    The window of the selection keeps the last keys, so their scores count only where it is shorter than usual.
    """
    before = max(0, n - _WINDOW)
    found = attention(before, n).sum(2)
    parts = [part for part in (found[..., :before], found[..., before:]) if part.shape[-1]]
    pooled = [max_pool1d(part, _NEIGHBORS, stride=1, padding=_NEIGHBORS // 2) for part in parts]
    return torch.cat(pooled, -1).mean(1)


def _tova(attention: Observed, G: int, _g: int, n: int) -> Any:
    """Return the attention of the last query, the mean over all heads."""
    return attention(n - 1, n).mean((0, 1)).expand(G, n)


_OBSERVED: dict[str, Observed] = {"h2o": _h2o, "snapkv": _snapkv, "tova": _tova}
