"""What pruned attention competes with, at equal slots a query: selections, windows, centroids, landmarks.

All are plain torch, of queries, keys and values (B, H, n, d) of an encoder, whose logits are ⟨q, k⟩/√d. They are
written as masks and matrices of n × n, since only what comes out is compared here. The scores of *presses* are those
of kvpress 0.5.4, of each document by itself and with a query head for each key head, but for rotations by position,
which this encoder does not have.

A window of half-width w takes 2w + 1 slots of every query, at the edges of the text as well, and a key that is both
selected and in the window takes two: budgets are upper bounds for all methods alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["SCORES", "Heads", "Method", "baselines", "dense", "selection"]

SEED = 0
PIVOT = 1e-9  # of a key's own kernel value: what a pivot has left of it at least
ROUNDS = 10  # of Lloyd's algorithm


class Heads(NamedTuple):
    """What a method reads: queries, keys and values (B, H, n, d), and how many slots a query has."""

    Q: Tensor
    K: Tensor
    V: Tensor
    slots: int

    @property
    def logits(self) -> Tensor:
        return self.Q @ self.K.mT / math.sqrt(self.K.shape[-1])


Method: TypeAlias = Callable[[Heads], Tensor]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def _centered(X: Tensor) -> Tensor:
    return X - X.mean(-2, keepdim=True)


def _standardized(scores: Tensor) -> Tensor:
    """Return z-scores over all heads of a document."""
    mean, deviation = (f(dim=(-2, -1), keepdim=True) for f in (scores.mean, scores.std))
    return (scores - mean) / deviation.clamp_min(1e-6)


def _rows(X: Tensor, places: Tensor) -> Tensor:
    """Return rows (B, H, r, c) of matrices (B, H, n, c)."""
    return X.gather(-2, places[..., None].expand(*places.shape, X.shape[-1]))


def _near(n: int, window: int | None) -> Tensor:
    """Return which keys (n, n) lie in a query's window; none for None."""
    places = torch.arange(n)
    return (places[:, None] - places).abs() <= (-1 if window is None else window)


def _width(window: int | None) -> int:
    return 0 if window is None else 2 * window + 1


def _protected(scores: Tensor, first: int, last: int = 0) -> Tensor:
    """Return scores in which the first and the last keys have the largest of all."""
    scores = scores.clone()
    scores[..., :first] = scores[..., scores.shape[-1] - last :] = torch.inf
    return scores


# Scores: which keys all queries of a head attend to.


def leverage(heads: Heads) -> Tensor:
    """Leverage scores of the centered keys."""
    X = _centered(heads.K).double()
    return (X @ torch.linalg.pinv(X.mT @ X, hermitian=True) * X).sum(-1).float()


def row_norm(heads: Heads) -> Tensor:
    """Norms of the keys."""
    return heads.K.norm(dim=-1)


def random(heads: Heads) -> Tensor:
    """Numbers that know nothing of the keys."""
    return torch.rand(heads.K.shape[:-1], generator=_generator())


def attention_sums(heads: Heads) -> Tensor:
    """Sums of the columns of dense attention (ObservedAttentionPress, H2O): costs what pruning is to save."""
    return heads.logits.softmax(-1).sum(-2)


def leverage_press(heads: Heads, columns: int = 48) -> Tensor:
    """LeverageScorePress: centered keys through a Gaussian sketch, with a ridge."""
    *shape, _, d = heads.K.shape
    sketch = torch.randn(*shape, d, columns, generator=_generator()) / math.sqrt(columns)
    X = _centered(heads.K) @ sketch
    factor = torch.linalg.cholesky(X.mT @ X + 1e-2 * torch.eye(columns))
    return (X * torch.cholesky_solve(X.mT, factor).mT).sum(-1)


def local_attention_press(heads: Heads, chunk: int = 256) -> Tensor:
    """NonCausalAttnPress: columns of attention within chunks, without 1/√d, times the norms of the values, smoothed.

    The last keys, fewer than a chunk, are a chunk of their own here; kvpress fills them up with zeros.
    """
    found = [
        (Q @ K.mT).softmax(-1).sum(-2) for Q, K in zip(heads.Q.split(chunk, -2), heads.K.split(chunk, -2), strict=True)
    ]
    return functional.avg_pool1d(torch.cat(found, -1) * heads.V.norm(dim=-1), 3, 1, 1)


def compactor_press(heads: Heads, first: int = 8, last: int = 4) -> Tensor:
    """CompactorPress: both of the above as z-scores, leverage times the share of keys that go; the ends are kept."""
    n = heads.K.shape[-2]
    inner = Heads(*(X[..., first : n - last, :] for X in heads[:3]), heads.slots)
    blended = (1 - heads.slots / n) * _standardized(leverage_press(inner))
    blended = blended + _standardized(local_attention_press(inner))
    return _protected(functional.pad(blended, (first, last)), first, last)


def expected_attention_press(heads: Heads, first: int = 4) -> Tensor:
    """ExpectedAttentionPress: attention of Gaussian queries times the norms of the values; the first keys are kept."""
    Q, K, V = (X[..., first:, :] for X in heads[:3])
    d = K.shape[-1]
    centered = _centered(Q)
    spread = centered.mT @ centered / Q.shape[-2]
    logits = (K @ Q.mean(-2, keepdim=True).mT)[..., 0] / math.sqrt(d) + (K @ spread * K).sum(-1) / (2 * d)
    return _protected(functional.pad(logits.softmax(-1) * V.norm(dim=-1), (first, 0)), first)


def cur_press(heads: Heads, first: int = 4, chunk: int = 16) -> Tensor:
    """CURPress: squared norms of keys times those of values, as shares of their chunk; the first keys are kept."""
    n = heads.K.shape[-2]
    scores = torch.ones(heads.K.shape[:-1])
    for X in heads[1:3]:
        squares = functional.pad(X.square().sum(-1), (0, -n % chunk)).unflatten(-1, (-1, chunk))
        scores = scores * (squares / squares.sum(-1, keepdim=True)).flatten(-2)[..., :n]
    return _protected(scores, first)


def cap_press(heads: Heads, first: int = 4, temperature: float = 5.0) -> Tensor:
    """CapPress: weighted leverage of the values with a ridge of 1, weights by the cosine to the mean query."""
    Q, K, V = (X[..., first:, :] for X in heads[:3])
    cosines = functional.cosine_similarity(K, Q.mean(-2, keepdim=True), dim=-1)
    weights = torch.exp(temperature * (cosines - cosines.amax(-1, keepdim=True)))
    capacity = torch.eye(V.shape[-1]) + V.mT @ (V * (weights + 1e-6)[..., None])
    scores = weights * (V * torch.linalg.solve(capacity, V.mT).mT).sum(-1)
    return _protected(functional.pad(scores, (first, 0)), first)


def knorm_press(heads: Heads) -> Tensor:
    """KnormPress: the smallest keys."""
    return -heads.K.norm(dim=-1)


def keydiff_press(heads: Heads) -> Tensor:
    """KeyDiffPress: keys unlike the mean direction."""
    mean = functional.normalize(heads.K, dim=-1).mean(-2, keepdim=True)
    return -functional.cosine_similarity(heads.K, mean, dim=-1)


# Attention.


def _attend(heads: Heads, seen: Tensor | None = None) -> Tensor:
    """Return softmax attention, over the keys that are seen."""
    return functional.scaled_dot_product_attention(*heads[:3], attn_mask=seen)


def dense(heads: Heads) -> Tensor:
    """Softmax over all keys."""
    return _attend(heads)


def selection(score: Callable[[Heads], Tensor], window: int | None = None) -> Method:
    """Return softmax over the keys of the largest scores, and over a window where there is one."""

    def method(heads: Heads) -> Tensor:
        n = heads.K.shape[-2]
        left = Heads(*heads[:3], max(0, min(n, heads.slots - _width(window))))
        best = score(left).topk(left.slots, -1).indices
        if window is None:
            K, V = (_rows(X, best) for X in heads[1:3])
            return _attend(Heads(heads.Q, K, V, left.slots))
        kept = torch.zeros(heads.K.shape[:-1], dtype=torch.bool).scatter_(-1, best, True)
        return _attend(heads, kept[..., None, :] | _near(n, window))

    return method


def window_only(sinks: int = 0) -> Method:
    """Return softmax over as wide a window as the slots allow, and over the first keys (StreamingLLM)."""

    def method(heads: Heads) -> Tensor:
        n = heads.K.shape[-2]
        seen = _near(n, (heads.slots - sinks - 1) // 2)
        seen[:, :sinks] = True
        return _attend(heads, seen)

    return method


def _clusters(K: Tensor, count: int) -> Tensor:
    """Return to which of so many clusters (B, H, n, count) keys belong: Lloyd's algorithm from random keys."""
    centers = _rows(K, torch.rand(K.shape[:-1], generator=_generator()).topk(count, -1).indices)
    counted = torch.cat([K, torch.ones_like(K[..., :1])], -1)
    for _ in range(ROUNDS):
        nearest = (K @ centers.mT - centers.square().sum(-1)[..., None, :] / 2).argmax(-1, keepdim=True)
        sums = torch.zeros(*centers.shape[:-1], counted.shape[-1]).scatter_add_(
            -2, nearest.expand(*counted.shape), counted
        )
        sizes = sums[..., -1:]
        centers = torch.where(sizes > 0, sums[..., :-1] / sizes.clamp_min(1), centers)
    return torch.zeros(*K.shape[:-1], count).scatter_(-1, nearest, 1.0)


def centroids(window: int | None = None) -> Method:
    """Return softmax over centroids of keys, each as often as it has members, and over a window.

    Keys of a query's window are taken out of their clusters for that query.
    """

    def method(heads: Heads) -> Tensor:
        _, K, V, slots = heads
        n = K.shape[-2]
        near = _near(n, window)
        members = _clusters(K, min(n, slots - _width(window)))
        free = torch.where(near, 0.0, 1.0)
        sizes = free @ members  # of each query: what is left of its clusters
        logits = heads.logits
        means = (logits * free) @ members / sizes.clamp_min(1) + sizes.log()
        weights = torch.cat([logits.masked_fill(~near, -torch.inf), means], -1).softmax(-1)
        each = weights[..., n:] / sizes.clamp_min(1)
        return (weights[..., :n] + each @ members.mT * free) @ V

    return method


def _pivoted(K: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return pivots (B, H, r) and factor (B, H, n, r) of the kernel of centered keys: randomly pivoted Cholesky.

    Each pivot is drawn by what is left of the diagonal (Chen, Epperly, Tropp and Webber, arXiv:2207.06503).
    """
    X = _centered(K).double() / K.shape[-1] ** 0.25
    left = torch.exp(X.square().sum(-1))
    least = PIVOT * left
    factor = X.new_zeros(*left.shape, rank)
    pivots = torch.zeros(*left.shape[:-1], rank, dtype=torch.long)
    generator = _generator()
    for i in range(rank):
        drawn = torch.multinomial(left.flatten(0, -2), 1, generator=generator).view(*left.shape[:-1], 1)
        pivots[..., i] = drawn[..., 0]
        done = factor[..., :i]
        column = (torch.exp(X @ _rows(X, drawn).mT) - done @ _rows(done, drawn).mT)[..., 0]
        own = torch.maximum(column, least).gather(-1, drawn)
        factor[..., i] = column.scatter(-1, drawn, own) / own.sqrt()
        # What is in the span of the pivots to rounding may still be drawn, last of all; a pivot is not drawn again.
        left = torch.maximum(left - factor[..., i].square(), least * 1e-3)
        left.scatter_(-1, pivots[..., : i + 1], 0.0)
    return pivots, factor


def nystrom(window: int | None = None) -> Method:
    """Return attention whose kernel is interpolated from landmarks, and exact in a window.

    exp⟨q, k⟩ ≈ exp⟨q, K_S⟩ exp⟨K_S, K_S⟩⁻¹ exp⟨K_S, k⟩ with pivots S as above. Outputs are held within the range of
    the values, as weights may be negative.
    """

    def method(heads: Heads) -> Tensor:
        Q, K, V, slots = heads
        n, d = K.shape[-2:]
        pivots, factor = _pivoted(K, min(n, slots - _width(window)))
        weights = torch.linalg.solve_triangular(_rows(factor, pivots).mT, factor.mT, upper=True)
        X = _centered(K).double()
        logits = Q.double() @ X.mT / math.sqrt(d)
        highest = logits.amax(-1, keepdim=True)
        kernel = torch.exp(logits.gather(-1, pivots[..., None, :].expand(*logits.shape[:-1], -1)) - highest) @ weights
        if window is not None:
            kernel = torch.where(_near(n, window), torch.exp(logits - highest), kernel)
        Y = (kernel @ V.double() / kernel.sum(-1, keepdim=True)).nan_to_num().float()
        return Y.clamp(V.amin(-2, keepdim=True), V.amax(-2, keepdim=True))

    return method


SCORES: dict[str, Callable[[Heads], Tensor]] = {
    "leverage": leverage,
    "row norm": row_norm,
    "random": random,
    "LeverageScorePress": leverage_press,
    "CompactorPress": compactor_press,
    "ExpectedAttentionPress": expected_attention_press,
    "CURPress": cur_press,
    "CapPress": cap_press,
    "KnormPress": knorm_press,
    "KeyDiffPress": keydiff_press,
    "column sums of attention": attention_sums,
}


def baselines(window: int | None) -> dict[str, Method]:
    """Return all of them by name, alone and with a window of this half-width where they take one."""
    found = {"window": window_only(), "window + 4 sinks": window_only(4)}
    found |= {name: selection(score) for name, score in SCORES.items()}
    found |= {"centroids": centroids(), "Nyström": nystrom()}
    if window is not None:
        found |= {f"{name} + window": selection(score, window) for name, score in SCORES.items()}
        found |= {"centroids + window": centroids(window), "Nyström + window": nystrom(window)}
    return found
