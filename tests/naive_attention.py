"""The definitions of attention in linear time, as loops over positions: slow and obvious."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np


def bounds_of(T, offsets=None):
    """The sequences (low, high) of a packed call."""
    return [(0, T)] if offsets is None else list(pairwise(offsets))


def softmax(logits):
    """The softmax of a vector; zeros where there is nothing but −inf."""
    logits = np.asarray(logits, np.float64)
    top = max(logits, default=-math.inf)
    if top == -math.inf:
        return np.zeros(len(logits))
    E = np.where(logits == math.inf, 1.0, 0.0) if top == math.inf else np.exp(logits - top)
    return E / E.sum()


def window_matrix(q, k, window, scale=None, softcap=None, mask=None, offsets=None):
    """The weights (T, T) of softmax attention in a window."""
    T = len(q)
    P = np.zeros((T, T))
    scale = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    for low, high in bounds_of(T, offsets):
        for t in range(low, high):
            seen = [s for s in range(max(low, t - window + 1), t + 1) if mask is None or mask[s]]
            logits = [float(q[t] @ k[s]) * scale for s in seen]
            if softcap is not None:
                logits = [softcap * math.tanh(x / softcap) for x in logits]
            P[t, seen] = softmax(logits)
    return P


def latent_matrices(K, delay=0, mask=None, offsets=None):
    """The weights p(s|l,t) of causal latents that see the positions up to t − delay, (L, T, T)."""
    T, L = K.shape
    P = np.zeros((L, T, T))
    for low, high in bounds_of(T, offsets):
        for t in range(low, high):
            seen = [s for s in range(low, t - delay + 1) if mask is None or mask[s]]
            for i in range(L):
                P[i, t, seen] = softmax([K[s, i] for s in seen])
    return P


def macchiato_parts(q, k, Q, K, gate, window, exclusive=False, scale=None, softcap=None, mask=None, offsets=None):
    """The weights of the window and of the latents, each (T, T), as they stand in the mixture."""
    T, L = Q.shape
    P = window_matrix(q, k, window, scale, softcap, mask, offsets)
    R = latent_matrices(K, window if exclusive else 0, mask, offsets)
    own, others = np.zeros((T, T)), np.zeros((T, T))
    for t in range(T):
        logits = [gate[t] if P[t].any() else -math.inf]
        logits += [Q[t, i] if R[i, t].any() else -math.inf for i in range(L)]
        p = softmax(logits)
        own[t] = p[0] * P[t]
        for i in range(L):
            others[t] += p[1 + i] * R[i, t]
    return own, others


def macchiato(q, k, V, Q, K, gate, window, **options):
    """The mixture of a window and latents, and its weights (T, T)."""
    own, others = macchiato_parts(q, k, Q, K, gate, window, **options)
    return (own + others) @ V, own + others


def repeated_mass(Q, K, gate, window, mask=None, offsets=None):
    """The weight of the window's positions by the latents, (T,)."""
    T = len(Q)
    nothing = np.zeros((T, 1))
    _, others = macchiato_parts(nothing, nothing, Q, K, gate, window, mask=mask, offsets=offsets)
    return np.array([sum(others[t, s] for s in range(max(0, t - window + 1), t + 1)) for t in range(T)])


def rotate(V, positions, base=10000.0, inverse=False):
    """Each pair of channels (i, i + D/2) turned by position · base^(−2i/D)."""
    out = np.zeros(V.shape)
    half = V.shape[1] // 2
    for t, position in enumerate(positions):
        for i in range(half):
            angle = float(position) * base ** (-2 * i / V.shape[1]) * (-1 if inverse else 1)
            c, s = math.cos(angle), math.sin(angle)
            a, b = float(V[t, i]), float(V[t, i + half])
            out[t, i], out[t, i + half] = a * c - b * s, a * s + b * c
    return out


def sigmoid(x):
    """1 / (1 + e^(−x))."""
    return 1 / (1 + math.exp(-x))


def rg_lru(x, gate_x, gate_a, a_param, mask=None, offsets=None):
    """The gated linear recurrence, position by position; masked positions are as if they were not there."""
    T, C = x.shape
    out = np.zeros((T, C))
    for low, high in bounds_of(T, offsets):
        for c in range(C):
            h, begun = 0.0, False
            for t in range(low, high):
                if mask is None or mask[t]:
                    a = math.exp(-8 * sigmoid(gate_a[t, c]) * math.log1p(math.exp(a_param[c])))
                    a = a if begun else 0.0
                    h = a * h + math.sqrt(1 - a * a) * sigmoid(gate_x[t, c]) * x[t, c]
                    begun = True
                out[t, c] = h
    return out


def causal_conv(x, weight, bias=None, mask=None, offsets=None):
    """A depthwise convolution over the positions so far; masked ones are as if they were not there."""
    T, C = x.shape
    width = weight.shape[1]
    out = np.zeros((T, C))
    for low, high in bounds_of(T, offsets):
        present = []
        for t in range(low, high):
            if mask is not None and not mask[t]:
                continue
            present.append(t)
            for c in range(C):
                out[t, c] = 0 if bias is None else bias[c]
                for j, s in enumerate(reversed(present[-width:])):
                    out[t, c] += weight[c, width - 1 - j] * x[s, c]
    return out


def token_statistics(
    W,
    temperature,
    membership="diag_leverage",
    causal=True,
    mean=False,
    offset=None,
    decay=None,
    c=1.0,
    step=1.0,
    mask=None,
    offsets=None,
):
    """Token statistics attention of tokens W (h, T, d), and its memberships (h, T), token by token.

    Each token reads all others that it sees anew. The released form adds 1e-8 to sums of memberships, and replaces
    sums of squares below 1e-12 by that (causal), or below 1e-24.
    """
    h, T, d = W.shape
    released = membership == "diag_leverage" and not mean
    ridge, least = (1e-8 if released else 0.0), ((1e-12 if causal else 1e-24) if released else 1e-300)
    rates = np.ones(h) if decay is None else np.broadcast_to(decay, h)
    Y, P = np.zeros(W.shape), np.zeros((h, T))
    for low, high in bounds_of(T, offsets):
        present = [t for t in range(low, high) if mask is None or mask[t]]

        def seen(t, present=present):
            """The tokens that a token sees, and the weight of each of its heads."""
            tokens = [s for s in present if s <= t or not causal]
            after = [sum(1 for r in tokens if r > s) if causal else 0 for s in tokens]
            return tokens, [[rates[k] ** n for n in after] for k in range(h)]

        for t in present:
            tokens, weights = seen(t)
            logits = []
            for k in range(h):
                score = 0.0
                if membership == "norm":
                    score = float(W[k, t] @ W[k, t])
                elif membership == "diag_leverage":
                    A = sum(w * W[k, s] ** 2 for w, s in zip(weights[k], tokens, strict=True))
                    score = float(np.sum(W[k, t] ** 2 / np.maximum(A, least)))
                    score *= sum(weights[k]) if mean else 1
                logits.append(temperature[k] * (score + (0 if offset is None else offset[k, t])))
            P[:, t] = softmax(logits)
        for t in present:
            tokens, weights = seen(t)
            for k in range(h):
                M = sum(w * P[k, s] * W[k, s] ** 2 for w, s in zip(weights[k], tokens, strict=True))
                N = sum(w * P[k, s] for w, s in zip(weights[k], tokens, strict=True)) + ridge
                moment = M / N if N else np.zeros(d)
                Y[k, t] = -step * c * P[k, t] * W[k, t] / (1 + c * moment)
    return Y, P
