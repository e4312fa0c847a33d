"""The rival Attention Matching (Zweiger, Fu, Guo and Kim, arXiv:2602.16284), with the settings of its fast variant.

The settings are those of the authors' code for "AM-HighestAttnKeys" with the queries of "repeat", in which the model
repeats the context. The split of the bytes over the heads is ours: the one of a profile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from transformers.models.llama import modeling_llama

from levattn.integrations.transformers import CompressedCache, HeadProfile, compress
from levattn.integrations.transformers.calls import as_cache_of
from levattn.integrations.transformers.compression.slots import HeadSlots

__all__ = ["LOWEST", "STEPS", "UPPERMOST", "matched"]

LOWEST, UPPERMOST = math.exp(-3), math.exp(3)  # bounds of the weight of a slot
STEPS = 2  # of projected descent, after least squares
POWERS = 3  # steps of the power method, for the length of such a step
RIDGE = 1e-6  # where least squares fail, and nowhere else


def matched(
    model: Any, tokens: Any, budgets: Sequence[float], profile: HeadProfile, request: Sequence[int]
) -> Iterator[tuple[float, CompressedCache]]:
    """Yield budgets and compressed caches; the context and its repetition are read once for all budgets.

    model: a Llama in float32.

    tokens: (1, n), the context.

    request: tokens that ask to repeat it. Their queries count as well, as in the authors' code.
    """
    whole = compress(model, tokens, 1.0)
    asked = _queries(model, whole, tokens, request)
    shares = [profile.shares(budget) for budget in budgets]
    found: list[list[tuple[HeadSlots, ...]]] = [[] for _ in budgets]
    for number, layer in enumerate(whole.layers):
        (dense,) = layer.groups
        Q = asked[number].unflatten(0, (len(dense.heads), -1)).flatten(1, 2)
        own = [[of_head[number, head] for head in dense.heads] for of_head in shares]
        for groups, of_budget in zip(found, _of_layer(Q, dense, own), strict=True):
            groups.append(of_budget)
        asked[number] = None
    for budget, held in zip(budgets, found, strict=True):
        cache = whole.copy()
        for layer, own_groups in zip(cache.layers, held, strict=True):
            layer.groups = own_groups
        yield budget, cache


def _queries(model: Any, whole: CompressedCache, tokens: Any, request: Sequence[int]) -> list[Any]:
    """Return the queries (H, r, d) of each layer where the model is asked to repeat a context, and repeats it.

    All of them count: the authors take at most 50 000 for a head of keys, which is more for contexts like ours.
    """
    found = []
    rotated = modeling_llama.apply_rotary_pos_emb

    def kept(*args: Any, **options: Any) -> Any:
        q, k = rotated(*args, **options)
        found.append(q[0])
        return q, k

    following = torch.cat([torch.tensor([[*request]]), tokens], 1)
    places = tokens.shape[1] + torch.arange(following.shape[1])
    with torch.no_grad(), patch.object(modeling_llama, "apply_rotary_pos_emb", kept):
        model.model(following, position_ids=places[None], **as_cache_of(model.model, whole.copy()))
    return found


def _of_layer(Q: Any, dense: HeadSlots, shares: Sequence[Sequence[float]]) -> list[tuple[HeadSlots, ...]]:
    """Return the slots of a layer for each budget, a group for each share; shares: of heads, for each budget.

    `Q`: (G, m, d), the queries of each head of keys.
    """
    (n, d), D = dense.keys.shape[2:], dense.values.shape[3]
    parts = []
    for head, (rows, K, V) in enumerate(zip(Q, dense.keys[0], dense.values[0], strict=True)):
        # a slot is a key, its value and its weight
        cut = {own[head]: max(1, int(own[head] * n * (d + D) / (d + D + 1))) for own in shares if own[head] < 1}
        parts.append(dict(zip(cut, _fitted(rows, K, V, list(cut.values())), strict=True)))
    found = []
    for own in shares:
        groups = []
        for share in dict.fromkeys(own):
            heads = tuple(head for head in dense.heads if own[head] == share)
            if share == 1.0:
                groups.append(dense.of_heads(heads))
                continue
            arrays = zip(*(parts[head][share] for head in heads), strict=True)
            groups.append(HeadSlots(heads, *(torch.stack(same)[None] for same in arrays)))
        found.append(tuple(groups))
    return found


def _fitted(Q: Any, K: Any, V: Any, counts: Sequence[int]) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield keys (t, d), values (t, D), log-weights and places (t,) of a head, for each of several numbers t of slots.

    `Q`: (m, d). Kept are the keys with the largest root mean square of attention. Their weights are fitted to the sums
    of the exponentials, divided by the largest of each row. Their values are fitted to the outputs.
    """
    if not counts:
        return
    scale = 1 / math.sqrt(K.shape[1])
    E = (Q @ K.T).mul_(scale)
    E = E.sub_(E.amax(1, keepdim=True)).exp_()
    mass = E.sum(1, keepdim=True)
    W = E / mass
    Y = W @ V
    order = torch.linalg.vector_norm(W, dim=0).topk(max(counts)).indices
    del W
    for count in counts:
        kept = order[:count].sort().values
        log_weight = _bounded(E[:, kept], mass).log()
        values = _least_squares(torch.softmax((Q @ K[kept].T).mul_(scale).add_(log_weight.T), 1), Y)
        yield K[kept], values, log_weight[:, 0], kept.to(torch.int32)


def _bounded(A: Any, b: Any) -> Any:
    """Return weights (t, 1) between their bounds, so that A w is near b: least squares, and a few steps of descent."""
    w = _least_squares(A, b).clamp(LOWEST, UPPERMOST)
    v = torch.ones_like(w) / math.sqrt(len(w))
    for _ in range(POWERS):
        v = A.T @ (A @ v)
        v = v / v.norm()
    largest = (A @ v).square().sum()  # the square of the largest singular value
    for _ in range(STEPS):
        w = (w - A.T @ (A @ w - b) / largest).clamp(LOWEST, UPPERMOST)
    return w


def _least_squares(A: Any, B: Any) -> Any:
    """Return X with the least squares of A X - B, without a ridge unless LAPACK fails."""
    try:
        X = torch.linalg.lstsq(A, B, driver="gels").solution
        if not bool(X.isnan().any()):
            return X
    except torch.linalg.LinAlgError:
        pass
    gram = A.T @ A
    gram.diagonal().add_(RIDGE)
    return torch.cholesky_solve(A.T @ B, torch.linalg.cholesky(gram))
