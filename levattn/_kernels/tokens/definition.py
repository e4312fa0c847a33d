"""Token statistics attention in the array-API standard: the definitions that tests compare kernels with.

In torch, autograd differentiates these definitions, so there is no backward here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import array_api_compat
import numpy as np

from levattn._core.arrays import array_namespace
from levattn._kernels.latent.definition import decayed_scan
from levattn._kernels.tokens import TokenArguments, TokenSums

_BLOCK = 64  # tokens whose sums are formed together, so that no sum is kept for every token


def forward(x: TokenArguments, *, state: bool = False) -> tuple[Any, TokenSums | None]:
    """Return the output (b, h, T, d), and if `state` the sums after all tokens of each sequence."""
    Y, _, after = _run(x)
    return Y, after if state else None


def memberships(x: TokenArguments) -> Any:
    """Return the memberships (b, h, T)."""
    return _run(x)[1]


def add_squares(
    X: Any, mask: Any, weights: Any, decay: Any, held: tuple[Any, Any] | None, *, full: bool = False
) -> tuple[Any, Any]:
    """Return ``Σ w x²`` (b, d) and ``Σ w`` (b,) in float64 over the rows x of X (b, T, d), after the sums `held`.

    X is of float64, float32 or float16. If `full`, the first is ``Σ w x xᵀ`` (b, d, d).
    - weights: (b, T) float64, or None for 1.
    - mask: (b, T) bool or None; masked rows are not used.
    - decay: (b,) float64 in main memory, or None for 1; each present row first multiplies the sums so far by it.
    """
    xp = array_namespace(X)
    X = xp.astype(X, xp.float64)
    present = _present(xp, X, mask)
    ones = xp.astype(present, xp.float64)
    w = ones if weights is None else xp.where(present, xp.astype(weights, xp.float64), ones)
    X = xp.where(present[..., None], X, xp.zeros_like(X))
    kept = xp.ones_like(xp.sum(X, axis=(1, 2)))
    if decay is not None:
        rates = _like(xp, decay, X)
        following = xp.flip(xp.cumulative_sum(xp.flip(ones, axis=1), axis=1), axis=1) - ones
        w = w * rates[:, None] ** following
        kept = rates ** xp.sum(ones, axis=1)
    weighted, weight = w[..., None] * X, xp.sum(w, axis=1)
    total = xp.matmul(xp.matrix_transpose(weighted), X) if full else xp.sum(weighted * X, axis=1)
    if held is None:
        return total, weight
    return xp.reshape(kept, (-1, *[1] * (total.ndim - 1))) * held[0] + total, kept * held[1] + weight


def _run(x: TokenArguments) -> tuple[Any, Any, TokenSums]:
    xp = array_namespace(x.W)
    ends = x.offsets.tolist()
    outputs, members, sums = [], [], []
    for i, (low, high) in enumerate(pairwise(ends)):
        W = x.W[:, :, low:high, :]
        there = _present(xp, W[:, 0, :, :], None if x.mask is None else x.mask[:, low:high])[:, None, :]
        offset = None if x.offset is None else x.offset[:, :, low:high]
        begin = _begin(xp, x, W, i)
        W = xp.where(there[..., None], W, xp.zeros_like(W))
        offset = None if offset is None else xp.where(there, offset, xp.zeros_like(offset))
        run = _causal if x.causal else _everywhere
        Y, P, end = run(xp, x, W, there, offset, begin)
        outputs.append(Y)
        members.append(P)
        sums.append(end)
    if not sums:
        empty = _zeros(xp, x.W, (*x.W.shape[:2], 0))
        deep = empty[..., None] * xp.ones_like(xp.astype(x.W[:, :, :0, :], xp.float64))
        return x.W, x.W[..., 0], (deep, empty, deep, empty)
    after = tuple(xp.stack(list(parts), axis=2) for parts in zip(*sums, strict=True))
    return xp.concat(outputs, axis=2), xp.concat(members, axis=2), after


def _present(xp: Any, X: Any, mask: Any) -> Any:
    """Return which rows of X (b, T, d) take part, (b, T)."""
    if mask is not None:
        return mask
    return xp.ones(X.shape[:2], dtype=xp.bool, device=array_api_compat.device(X))


def _zeros(xp: Any, like: Any, shape: Any) -> Any:
    return xp.zeros(shape, dtype=xp.float64, device=array_api_compat.device(like))


def _like(xp: Any, numbers: Any, like: Any) -> Any:
    return xp.asarray(np.asarray(numbers).tolist(), dtype=like.dtype, device=array_api_compat.device(like))


def _begin(xp: Any, x: TokenArguments, W: Any, i: int) -> TokenSums | None:
    """Return the sums before a sequence as arrays of W's library, or None if there are none."""
    if x.state is None:
        return None
    A, n, M, N = (xp.asarray(part, device=array_api_compat.device(W)) for part in x.state)
    return A[:, :, i, :], n[:, :, i], M[:, :, i, :], N[:, :, i]


def _members(xp: Any, x: TokenArguments, scores: Any, offset: Any, there: Any) -> Any:
    """Return the softmax over the heads, 0 for masked tokens."""
    logits = scores if offset is None else scores + offset
    logits = logits * x.temperature[..., None]
    E = xp.exp(logits - xp.max(logits, axis=1, keepdims=True))
    P = E / xp.sum(E, axis=1, keepdims=True)
    return xp.where(there, P, xp.zeros_like(P))


def _scores(xp: Any, x: TokenArguments, W: Any, A: Any, n: Any) -> Any:
    """Return ℓ of the logits; A and n have the shapes of W and of its rows, or broadcast to these."""
    if x.logits == "none":
        return xp.zeros_like(W[..., 0])
    if x.logits == "norm":
        return xp.sum(W * W, axis=-1)
    least = xp.full_like(A, x.least)
    scores = xp.sum(W / xp.where(least > A, least, A) * W, axis=-1)  # gradients of zeros are zero
    return scores * n if x.mean else scores


def _output(xp: Any, x: TokenArguments, W: Any, P: Any, M: Any, N: Any) -> Any:
    weight = N + x.ridge
    moment = M / xp.where(weight == 0, xp.ones_like(weight), weight)[..., None]
    return -x.gain * (P[..., None] * W) / (1 + x.c * moment)


def _everywhere(
    xp: Any, x: TokenArguments, W: Any, there: Any, offset: Any, begin: TokenSums | None
) -> tuple[Any, Any, TokenSums]:
    X, float64 = W * W, xp.float64
    if begin is None:
        A = xp.sum(X, axis=2, dtype=float64)
        n = xp.sum(xp.astype(there, float64), axis=2) + xp.zeros_like(A[..., 0])
    else:
        A, n, M, N = begin
    P = _members(xp, x, _scores(xp, x, W, _as(xp, A, X)[:, :, None, :], _as(xp, n, X)[..., None]), offset, there)
    if begin is None:
        M, N = xp.sum(P[..., None] * X, axis=2, dtype=float64), xp.sum(P, axis=2, dtype=float64)
    Y = _output(xp, x, W, P, _as(xp, M, X)[:, :, None, :], _as(xp, N, X)[..., None])
    return Y, P, (A, n, M, N)


def _as(xp: Any, numbers: Any, like: Any) -> Any:
    return xp.astype(numbers, like.dtype)


def _causal(
    xp: Any, x: TokenArguments, W: Any, there: Any, offset: Any, begin: TokenSums | None
) -> tuple[Any, Any, TokenSums]:
    """As `_everywhere`, for causal tokens, block by block: with the sums so far, and the sums within the block."""
    b, h, T, d = W.shape
    nothing = _zeros(xp, W, (b, h, d)), _zeros(xp, W, (b, h))
    A, n, M, N = begin if begin is not None else (*nothing, *nothing)
    rates = None if x.decay is None else _like(xp, x.decay, W)[None, :, None]
    ones = xp.ones((b, h, 1, 1), dtype=W.dtype, device=array_api_compat.device(W))
    outputs, members = [], []
    for low in range(0, T, _BLOCK):
        high = min(low + _BLOCK, T)
        w, here = W[:, :, low:high, :], there[:, :, low:high]
        kept, decays = xp.ones_like(w[..., 0]), None
        if rates is not None:
            kept = kept * rates ** xp.cumulative_sum(xp.astype(here, W.dtype), axis=2)
            decays = xp.where(here, rates + xp.zeros_like(kept), xp.ones_like(kept))

        def summed(before: Any, terms: Any, kept: Any = kept, decays: Any = decays) -> tuple[Any, Any]:
            """Return the sum at each token of the block, and the sum after its last token in float64."""
            if decays is None:
                own = xp.cumulative_sum(terms, axis=2)
            else:
                flat = (xp.reshape(part, (b * h, *part.shape[2:])) for part in (decays[..., None], terms))
                own = xp.reshape(decayed_scan(*flat), terms.shape)
            total = _as(xp, kept[..., -1:], before) * before + _as(xp, own[:, :, -1, :], before)
            return kept[..., None] * _as(xp, before, terms)[:, :, None, :] + own, total

        X = w * w
        At, A = summed(A, X)
        nt, n = (part[..., 0] for part in summed(n[..., None], xp.astype(here, w.dtype)[..., None] * ones))
        P = _members(xp, x, _scores(xp, x, w, At, nt), None if offset is None else offset[:, :, low:high], here)
        Mt, M = summed(M, P[..., None] * X)
        Nt, N = (part[..., 0] for part in summed(N[..., None], P[..., None]))
        outputs.append(_output(xp, x, w, P, Mt, Nt))
        members.append(P)
    if not outputs:
        return W, W[..., 0], (A, n, M, N)
    return xp.concat(outputs, axis=2), xp.concat(members, axis=2), (A, n, M, N)
