"""The definitions of attention in linear time, as loops over positions: slow and obvious."""

from __future__ import annotations

import math
from itertools import chain, pairwise

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


def seen_by(t, low, mask=None):
    """The positions from low to t that take part; none for a masked position, which has no place."""
    if mask is None:
        return list(range(low, t + 1))
    return [s for s in range(low, t + 1) if mask[s]] if mask[t] else []


def window_matrix(q, k, window, scale=None, softcap=None, mask=None, offsets=None):
    """The weights (T, T) of softmax attention in a window."""
    T = len(q)
    P = np.zeros((T, T))
    scale = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    for low, high in bounds_of(T, offsets):
        for t in range(low, high):
            seen = seen_by(t, low, mask)[-window:]
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
            seen = seen_by(t, low, mask)
            seen = seen[: max(len(seen) - delay, 0)]
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
    near = [
        s for low, high in bounds_of(T, offsets) for s in (seen_by(t, low, mask)[-window:] for t in range(low, high))
    ]
    return np.array([sum(others[t, s] for s in near[t]) for t in range(T)])


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
                Y[k, t] = -c * P[k, t] * W[k, t] / (1 + c * moment)
    return Y, P


def dense(Q, K, V, power=None, causal=False, scale=None, kind=np.float64):
    """Attention to all keys of heads that queries share: outputs, and weights (..., H, m, n)."""
    Q, K, V = (np.asarray(X, kind) for X in (Q, K, V))
    group = Q.shape[-3] // K.shape[-3]
    K, V = np.repeat(K, group, axis=-3), np.repeat(V, group, axis=-3)
    x = Q @ K.swapaxes(-1, -2) * (kind(Q.shape[-1]) ** -0.5 if scale is None else scale)
    there = np.tril(np.ones(x.shape[-2:], bool)) if causal else np.ones(x.shape[-2:], bool)
    x = np.where(there, x, -np.inf if power is None else 0.0)
    if power is None:
        P = np.exp(x - x.max(axis=-1, keepdims=True))
    else:
        top = np.abs(x).max(axis=-1, keepdims=True)
        P = (np.abs(x) / np.where(top > 0, top, 1)) ** power
    total = P.sum(axis=-1, keepdims=True)
    P = P / np.where(total > 0, total, 1)
    return P @ V, P


def weights_of(logits, copies, power):
    """Weights copies · e^x, or copies · |x|^p, divided by their sum; zeros where there is none."""
    logits, copies = np.asarray(logits, np.float64), np.asarray(copies, np.float64)
    if power is None:
        return softmax(logits + np.log(copies)) if len(logits) else logits
    top = max(np.abs(logits), default=0.0)
    E = copies * (np.abs(logits) / top) ** power if top else np.zeros(len(logits))
    return E / E.sum() if E.any() else E


def query_metric(queries, power):
    """The mean of rows and their second moment about it, or for powers zero and that about zero; with a ridge."""
    d = queries.shape[1]
    mean = np.zeros(d) if power is not None else queries.mean(axis=0)
    moment = sum(np.outer(q - mean, q - mean) for q in queries) / len(queries)
    size = np.trace(moment) / d
    return mean, moment + 1e-6 * (size if size > 0 else 1.0) * np.eye(d)


def k_means(X, weight, R, M=None, rounds=2):
    """The cluster of each row of X, and its squared distance xᵀMx from the center.

    Centers begin as the row farthest from the weighted mean, then always the farthest from those so far. Ties go to
    the first; rows of weight 0 begin no cluster and count in no mean.
    """
    n, d = X.shape
    M = np.eye(d) if M is None else M

    def squared(x, y):
        return float((x - y) @ M @ (x - y))

    mean = sum(w * x for w, x in zip(weight, X, strict=True)) / max(sum(weight), 1e-300)
    far = [squared(x, mean) if w > 0 else -1.0 for w, x in zip(weight, X, strict=True)]
    centers = []
    for _ in range(R):
        centers.append(X[int(np.argmax(far))])
        far = [min(squared(x, c) for c in centers) if w > 0 else -1.0 for w, x in zip(weight, X, strict=True)]
    labels = []
    for i in range(rounds + 1):
        labels = [int(np.argmin([squared(x, c) for c in centers])) for x in X]
        for c in range(R if i < rounds else 0):
            inside = [j for j in range(n) if labels[j] == c and weight[j] > 0]
            if inside:
                centers[c] = sum(weight[j] * X[j] for j in inside) / sum(weight[j] for j in inside)
    return labels, np.array([squared(x, centers[c]) for x, c in zip(X, labels, strict=True)])


FIELDS = ("w", "k", "v", "places")


class Cluster:
    """Keys with weights, their values and their places: what a summary is made of. A key alone is one as well."""

    def __init__(self, w, k, v, places):
        self.w, self.k, self.v, self.places = w, k, v, places

    def mean(self, rows=None):
        rows = self.k if rows is None else rows
        return sum(w * x for w, x in zip(self.w, rows, strict=True)) / sum(self.w)

    def offset(self):
        return sum(w * math.log(w) for w in self.w) / sum(self.w)

    def scaled(self, factor, sign=1.0):
        return Cluster([factor * w for w in self.w], [sign * k for k in self.k], self.v, self.places)

    def without(self, places):
        left = [i for i, j in enumerate(self.places) if j not in places]
        return Cluster(*([part[i] for i in left] for part in (vars(self)[name] for name in FIELDS)))


def pruned_choice(queries, keys, items, options):
    """Which items are kept, and the clusters of the others; `items` are keys, but for summaries that come first.

    options: a dict of size, epsilon, R, kind, power, center, sinks, scores, rounds (of Lloyd's algorithm).
    """
    power, R = options["power"], min(options["R"], len(items))
    if power is not None:
        direction = np.linalg.eigh(keys.T @ keys)[1][:, -1]
        items = [item.scaled(1.0, -1.0 if item.mean() @ direction < 0 else 1.0) for item in items]
    query, M = query_metric(queries, power)
    origin = np.zeros(keys.shape[1]) if power is not None else keys.mean(axis=0)
    X = np.array([item.mean() for item in items])
    along = np.array([query @ (x - origin) - item.offset() for x, item in zip(X, items, strict=True)])
    count = [float(len(item.w)) for item in items]
    squares, labels = np.array([(x - origin) @ M @ (x - origin) for x in X]), None
    if options["kind"] == "given":
        score = np.array([options["scores"][item.places[0]] for item in items])
    elif options["kind"] == "leverage":
        center = keys.mean(axis=0) if options["center"] else 0.0
        inverse = np.linalg.pinv((keys - center).T @ (keys - center), rcond=1e-12, hermitian=True)
        score = np.array([(x - center) @ inverse @ (x - center) for x in X])
    else:
        labels, far = k_means(X, count, R, M, options["rounds"]) if R else (None, squares)
        labels = labels if options["kind"] == "residual" else None
        far = np.maximum(far, 2.0**-16 * squares)
        gain = power if options["kind"] == "expected" else (power or 0) - 1
        score = along + squares / 2 if power is None else gain * np.log(np.maximum(squares, 1e-30))
        score = score + (np.log(np.maximum(far, 1e-30)) if options["kind"] == "residual" else 0)
    singles = [i for i, item in enumerate(items) if item.places[0] not in options["merged"]]
    first = [i for i in singles if items[i].places[0] < options["sinks"]]
    others = sorted((i for i in singles if i not in first), key=lambda i: (-score[i], i))
    if options["epsilon"] is None:
        others = others[: options["size"]]
    else:
        others = [i for i in others if score[i] >= options["epsilon"]]
    kept = sorted(first + others)
    clusters = []
    if R:
        weight = [0.0 if i in kept else c for i, c in enumerate(count)]
        labels = k_means(X, weight, R, M, options["rounds"])[0] if labels is None else labels
        for c in range(R):
            inside = [i for i in range(len(items)) if labels[i] == c and i not in kept]
            if inside:
                level = sum(count[i] * along[i] for i in inside) / sum(count[i] for i in inside)
                tilt = [0.0 if power is not None else min(3.0, max(-3.0, along[i] - level)) for i in inside]
                parts = [items[i].scaled(math.exp(t)) for i, t in zip(inside, tilt, strict=True)]
                cluster = Cluster(*(list(chain(*(vars(part)[name] for part in parts))) for name in FIELDS))
                clusters.append(cluster.scaled(len(cluster.w) / sum(cluster.w)))
    return [items[i] for i in kept], clusters


def pruned_row(q, exact, clusters, power):
    """The output for one query, and the share of the keys that are attended exactly."""
    logits = [float(q @ item.k[0]) for item in exact] + [float(q @ c.mean()) - c.offset() for c in clusters]
    if power is not None:
        logits[len(exact) :] = [float(q @ c.mean()) for c in clusters]
    p = weights_of(logits, [1.0] * len(exact) + [sum(c.w) for c in clusters], power)
    values = [item.v[0] for item in exact] + [c.mean(c.v) for c in clusters]
    return sum((w * v for w, v in zip(p, values, strict=True)), 0.0), float(p[: len(exact)].sum())


def pruned(
    Q,
    K,
    V,
    size=0,
    R=0,
    window=0,
    sinks=0,
    kind="residual",
    power=None,
    scale=None,
    epsilon=None,
    center=True,
    scores=None,
    chunk=None,
    queries=None,
    start=0,
):
    """Attention of queries (g, m, d) to kept keys, near keys and summaries; causal if there is a chunk.

    Causal attention chooses when twice as many keys as there are slots have come, or by thresholds a chunk, and after
    each chunk from then on. It goes by the queries at some positions: after a choice, or the begin, the first one and
    others at a distance of 1, 2 or 4. Rows before `start` are zeros.

    queries: rows (s, d) that keys are chosen by, in place of Q.
    Also the share of the keys attended exactly, (g, m), their places for each of m rows, and the clusters at the end.
    """
    g, m, d = Q.shape
    q = Q * (1 / math.sqrt(d) if scale is None else scale)
    options = {"size": size, "R": R, "sinks": sinks, "kind": kind, "power": power}
    options |= {"epsilon": epsilon, "center": center, "scores": scores, "rounds": 1 if chunk is None else 0}
    begin = 0 if chunk is None else chunk if epsilon is not None else 2 * (size + R + window + sinks + chunk)
    begin = max(begin, start)
    apart = 4 if begin >= 1024 else 2 if begin >= 512 else 1
    single = [Cluster([1.0], [k], [v], [j]) for j, (k, v) in enumerate(zip(K, V, strict=True))]
    Y, share, seen = np.zeros((g, m, V.shape[1])), np.zeros((g, m)), []
    kept, clusters, recent = [], [], []
    if chunk is None:
        asked = q.reshape(-1, d) if queries is None else queries * (1 / math.sqrt(d) if scale is None else scale)
        kept, clusters = pruned_choice(asked, K, single, options | {"merged": []})
    for t in range(m):
        if chunk is None:
            recent = [single[j] for j in range(max(0, t - window), min(len(K), t + window + 1)) if window]
        else:
            if t >= begin and (t - begin) % chunk == 0 and len(recent) > window:
                leaving, recent = recent[: len(recent) - window], recent[len(recent) - window :]
                now = options | {"merged": [j for c in clusters for j in c.places]}
                asking = [p for p in range(t) if (p if p < begin else (p - begin) % chunk) % apart == 0]
                kept, clusters = pruned_choice(q[:, asking].reshape(-1, d), K[:t], clusters + kept + leaving, now)
            recent = [*recent, single[t]]
        if t < start:
            continue
        exact = {item.places[0]: item for item in recent + kept}
        left = [c for c in (c.without(exact) for c in clusters) if c.w]
        seen.append(sorted(exact))
        for h in range(g):
            Y[h, t], share[h, t] = pruned_row(q[h, t], list(exact.values()), left, power)
    return Y, share, seen, clusters
