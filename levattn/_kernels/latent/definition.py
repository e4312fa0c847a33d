"""Formulas of latent attention for any array library, with which tests compare the compiled kernels.

There is no backward here, because torch differentiates the definitions itself.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._core.arrays import array_namespace
from levattn._kernels.latent import LatentArguments, State
from levattn._kernels.pairwise import surely_finite

_BLOCK = 16  # rows of a block, which has an exponent for each pair of rows


def forward(x: LatentArguments) -> Any:
    """Return the output (b, T, D) of latent attention; see `LatentArguments`."""
    xp = array_namespace(x.Q)
    one = len(x.offsets) == 2
    parts = []
    for i, (low, high) in enumerate(pairwise(x.offsets.tolist())):
        Q, K, V = x.Q[:, low:high, :], x.K, x.V
        mask = x.mask
        if not one:
            K, V = K[:, low:high, :], V[:, low:high, :]
            mask = None if mask is None else mask[:, low:high]
        K, V = _masked(xp, K, V, mask)
        gate = None if x.gate is None else x.gate[:, low:high]
        state = (
            _nothing(xp, K, V) if x.state is None else tuple(xp.astype(part[:, i, ...], V.dtype) for part in x.state)
        )
        if x.causal:
            Y, p = _causal(xp, Q, K, V, gate, x.ahead, state)
        else:
            Y, p = _everywhere(xp, Q, K, V, gate, state)
        parts.append(Y if p is None else Y + p[..., None] * x.gate_value[:, low:high, :])
    return xp.concat(parts, axis=1) if parts else xp.zeros_like(x.gate_value if x.gate_value is not None else x.V)


def summary(K: Any, V: Any, mask: Any, offsets: npt.NDArray[np.int64]) -> State:
    """Return the state of all positions of each sequence, in float64."""
    xp = array_namespace(K)
    K, V = _masked(xp, K, V, mask)
    states = []
    for low, high in pairwise(offsets.tolist()):
        sums = _summed(xp, K[:, low:high, :], V[:, low:high, :])
        states.append([xp.astype(part, xp.float64) for part in sums])
    return tuple(xp.stack(list(parts), axis=1) for parts in zip(*states, strict=True))


def joined(state: State, other: State) -> State:
    """Return the joined state of two states, whose arrays are (..., L) and (..., L, D) in float64."""
    (m, s, S), (n, t, U) = state, other
    xp = array_namespace(S)
    top = xp.maximum(m, n)
    base = _finite(xp, top)
    a, b = xp.exp(m - base), xp.exp(n - base)
    return top, a * s + b * t, a[..., None] * S + b[..., None] * U


def decayed_scan(a: Any, x: Any, first: Any = None, *, reverse: bool = False) -> Any:
    """Return ``h_t = a_t h_{t−1} + x_t`` for (b, T, C), from ``h_{−1} = first`` (b, C) or 0.

    If `reverse`, return ``r_t = x_t + a_{t+1} r_{t+1}`` instead, from 0, which gives the gradient of x. Where a is 0 a
    sequence begins: earlier rows are not read, not even NaN.
    """
    xp = array_namespace(a)
    if reverse:
        shifted = xp.concat([xp.zeros_like(a[:, :1, :]), xp.flip(a[:, 1:, :], axis=1)], axis=1)
        return xp.flip(decayed_scan(shifted, xp.flip(x, axis=1)), axis=1)
    T, h, begins = a.shape[1], x, a == 0

    def decayed(at: slice, before: Any) -> Any:
        return a[:, at, :] * xp.where(begins[:, at, :], xp.zeros_like(before), before)

    if first is not None and T:
        h = xp.concat([h[:, :1, :] + decayed(slice(0, 1), first[:, None, :]), h[:, 1:, :]], axis=1)
    for k in range(math.ceil(math.log2(max(T, 1)))):  # h_t stands for the last 2^k terms, and a for their decay
        step = 1 << k
        head, tail, early = slice(0, step), slice(step, T), slice(0, T - step)
        h = xp.concat([h[:, head, :], h[:, tail, :] + decayed(tail, h[:, early, :])], axis=1)
        a = xp.concat([a[:, head, :], decayed(tail, a[:, early, :])], axis=1)
        begins = xp.concat([begins[:, head, :], begins[:, tail, :] | begins[:, early, :]], axis=1)
    return h


def _masked(xp: Any, K: Any, V: Any, mask: Any) -> tuple[Any, Any]:
    """Return logits of −inf and values of zero for positions that no latent sees."""
    if mask is not None:
        K = xp.where(mask[..., None], K, _number(xp, -math.inf, K))
    seen = xp.max(K, axis=-1, keepdims=True) != -math.inf
    return K, xp.where(seen, V, _number(xp, 0.0, V))


def _number(xp: Any, value: float, like: Any) -> Any:
    return xp.asarray(value, dtype=like.dtype, device=array_api_compat.device(like))


def _nothing(xp: Any, K: Any, V: Any) -> State:
    """Return the state of no position."""
    s = xp.zeros_like(xp.sum(K[:, :0, :], axis=1))
    return s - math.inf, s, s[..., None] * xp.zeros_like(xp.sum(V[:, :0, :], axis=1))[:, None, :]


def _finite(xp: Any, m: Any) -> Any:
    """Return the maxima, with 0 for −inf."""
    return xp.where(m == -math.inf, _number(xp, 0.0, m), m)


def _summed(xp: Any, K: Any, V: Any, state: State | None = None) -> State:
    """Return the state after further positions."""
    m, s, S = _nothing(xp, K, V) if state is None else state
    top = m if not K.shape[1] else xp.maximum(m, xp.max(K, axis=1))
    base = _finite(xp, top)
    kept, E = xp.exp(m - base), xp.exp(K - base[:, None, :])
    return top, kept * s + xp.sum(E, axis=1), kept[..., None] * S + xp.matmul(xp.matrix_transpose(E), V)


def _weights(xp: Any, Q: Any, live: Any, gate: Any) -> tuple[Any, Any]:
    """Return the softmax over the latents that have seen a position, and the weight of the gate."""
    Q = xp.where(live, Q, _number(xp, -math.inf, Q))
    logits = Q if gate is None else xp.concat([Q, gate[..., None]], axis=-1)
    E = xp.exp(logits - _finite(xp, xp.max(logits, axis=-1, keepdims=True)))
    total = xp.sum(E, axis=-1, keepdims=True)
    p = E / xp.where(total > 0, total, _number(xp, 1.0, total))
    return (p, None) if gate is None else (p[..., :-1], p[..., -1])


def _divided(xp: Any, p: Any, s: Any) -> Any:
    return p / xp.where(s > 0, s, _number(xp, 1.0, s))


def _product(xp: Any, P: Any, v: Any, finite: bool) -> Any:
    """Return P v, in which a weight of zero drops a value, even NaN or infinity."""
    if finite:
        return xp.matmul(P, v)
    good, zero = xp.isfinite(v), _number(xp, 0.0, v)
    met = (P[..., None] != 0) & ~good[:, None, :, :]
    beyond = xp.sum(P[..., None] * xp.where(met, v[:, None, :, :], zero), axis=2)
    return xp.matmul(P, xp.where(good, v, zero)) + beyond


def _everywhere(xp: Any, Q: Any, K: Any, V: Any, gate: Any, state: State) -> tuple[Any, Any]:
    _, s, S = _summed(xp, K, V, state)
    p, gated = _weights(xp, Q, xp.broadcast_to(s[:, None, :] > 0, Q.shape), gate)
    return xp.matmul(_divided(xp, p, s[:, None, :]), S), gated


def _causal(xp: Any, Q: Any, K: Any, V: Any, gate: Any, ahead: int, state: State) -> tuple[Any, Any]:
    """Return causal outputs and gates, block by block: earlier positions by the state, the block's own by pairs."""
    T, U = Q.shape[1], K.shape[1]
    device = array_api_compat.device(K)
    entered = min(max(ahead, 0), U)
    finite = surely_finite(V)
    state = _summed(xp, K[:, :entered, :], V[:, :entered, :], state)
    outputs, gates = [], []
    for low in range(0, T, _BLOCK):
        high = min(low + _BLOCK, T)
        until = min(max(high + ahead, entered), U)
        k, v = K[:, entered:until, :], V[:, entered:until, :]
        last = xp.arange(low + ahead, high + ahead, device=device)
        sees = (xp.arange(entered, until, device=device)[None, :] <= last[:, None])[None, :, :, None]
        m, s, S = state
        pairs = xp.where(sees, k[:, None, :, :], _number(xp, -math.inf, K))
        top = m[:, None, :] if until == entered else xp.maximum(m[:, None, :], xp.max(pairs, axis=2))
        base = _finite(xp, top)
        kept, E = xp.exp(m[:, None, :] - base), xp.exp(pairs - base[:, :, None, :])
        z = kept * s[:, None, :] + xp.sum(E, axis=2)
        p, gated = _weights(xp, Q[:, low:high, :], z > 0, None if gate is None else gate[:, low:high])
        w = _divided(xp, p, z)
        own = _product(xp, xp.sum(w[:, :, None, :] * E, axis=-1), v, finite)
        outputs.append(xp.matmul(w * kept, S) + own)
        gates.append(gated)
        state, entered = _summed(xp, k, v, state), until
    if not outputs:
        return V[:, :0, :], None if gate is None else gate
    return xp.concat(outputs, axis=1), None if gate is None else xp.concat(gates, axis=1)
