"""States after a million updates: summaries of pruned attention, Latte, TSSA and second moments with decay.

Keys drift, rise or grow, at scales from 1e-30 to 1e30; each update brings one row, and each renewal of the summaries
one position. At the end the last output is held against its definition over all rows, in long double. Bars: no number
that is not finite; pruned attention within its certified bound and the rounding of its logits, the others within 1e-8.

    python examples/benchmarks/renewals.py [--updates 1000000] [--states pruned latte tssa moments]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from _rivals import Array, table

from levattn.attention import Selection, TokenForm, causal_pruned_attention, latte, tssa
from levattn.states import Moments

SCALES = np.asarray([1e-30, 1e-15, 1.0, 1e15, 1e30])[:, None, None]
DECAY = 0.999
BAR = 1e-8
PIECE = 20_000  # positions of pruned attention in one call
KEYS: dict[str, Callable[[Array, Array], Array]] = {
    "drift": lambda t, noise: -0.5 * t + noise,
    "rise": lambda t, noise: 0.5 * t + noise,
    "growth": lambda t, noise: np.exp(10 * t / len(t)) * noise,
}
Figures = tuple[bool, Array]  # whether all was finite; the error of each kind of keys, 1 at the bar


def made(n: int) -> Array:
    """Keys (kinds, n, 2)."""
    noise = np.random.default_rng(0).standard_normal((n, 2))
    return np.stack([kind(np.arange(n, dtype=float)[:, None], noise) for kind in KEYS.values()])


def scaled(X: Array) -> Array:
    """The arrays (kinds, n, d) at all scales, (kinds, scales, n, d)."""
    return X[:, None] * SCALES


def precise(X: Array) -> Array:
    return np.asarray(X, np.longdouble)


def attended(logits: Array, V: Array) -> Array:
    """The means of values (n, e), weighted by the exponentials of logits (kinds, n), in long double."""
    weights = np.exp(precise(logits) - precise(logits).max(axis=1, keepdims=True))
    return weights @ precise(V) / weights.sum(axis=1, keepdims=True)


def pruned(n: int) -> Figures:
    K, rng = made(n), np.random.default_rng(1)
    Q, V = 1 + 0.1 * rng.standard_normal((n, 2)), 5 + rng.standard_normal((n, 3))
    inverse, finite = SCALES[::-1], True
    state: Any = Selection(size=1, summaries=2, renew_every=1)
    everywhere = np.ones((len(K), 1, 1, 1))
    for low in range(0, n, PIECE):
        part = slice(low, low + PIECE)
        Y, state, certificate = causal_pruned_attention(
            everywhere * (Q[part] * inverse),
            scaled(K[:, part]),
            everywhere * (V[part] * inverse),
            state,
            return_certificate=True,
            return_state=True,
        )
        finite &= bool(np.isfinite(Y).all() and not np.isnan(certificate.error_bound).any())
    logits = precise(K) @ precise(Q[-1]) / np.sqrt(np.longdouble(2))
    off = np.linalg.norm((Y[:, :, -1] / inverse[:, 0] - attended(logits, V)[:, None]).astype(float), axis=-1)
    exponents = (1 + abs(logits).max(axis=1).astype(float)) * np.linalg.norm(V, axis=1).max()
    room = 64 * np.finfo(float).eps * exponents  # their rounding
    return finite, np.max(off / (certificate.error_bound[:, :, -1] / inverse[:, 0, 0] + room[:, None]), axis=1)


def latent(n: int) -> Figures:
    K, rng = made(n), np.random.default_rng(1)
    V, Q = 5 + rng.standard_normal((n, 3)), rng.standard_normal(2)
    state, finite = None, True
    logits = np.ascontiguousarray(np.broadcast_to(K[:, None], (len(K), len(SCALES), n, 2)))
    query, ones = np.broadcast_to(Q, (*logits.shape[:2], 1, 2)), np.ones((len(K), 1, 1, 1))
    for t in range(n):
        part = slice(t, t + 1)
        Y, state = latte(query, logits[:, :, part], ones * (V[part] * SCALES), state=state, return_state=True)
        finite &= bool(np.isfinite(Y).all())
    shares = np.exp(precise(Q)) / np.exp(precise(Q)).sum()
    expected = sum(share * attended(K[..., i], V) for i, share in enumerate(shares))
    return finite, np.max(abs(Y[:, :, 0] / SCALES[:, 0] / expected[:, None] - 1), axis=(1, 2)) / BAR


def tokens(n: int) -> Figures:
    """Tokens of one head: their memberships are 1, and a token is divided by 1 and the mean of squares so far."""
    W = scaled(made(n))[:, :, None]
    state, finite = None, True
    for t in range(n):
        Y, state = tssa(W[..., t : t + 1, :], form=TokenForm(decay=DECAY), state=state, return_state=True)
        finite &= bool(np.isfinite(Y).all())
    weights = precise(DECAY) ** np.arange(n - 1, -1, -1)
    mean = np.stack([weights @ precise(one) ** 2 for one in made(n)])[:, None] * precise(SCALES[:, 0]) ** 2
    expected = -precise(W[..., 0, -1, :]) / (1 + mean / weights.sum())
    return finite, np.max(abs(Y[..., 0, 0, :] / expected - 1), axis=(1, 2)) / BAR


def moments(n: int) -> Figures:
    K = scaled(made(n))
    state, finite = Moments(2, K.shape[:2], decay=DECAY), True
    for t in range(n):
        state.update(K[:, :, t : t + 1])
        finite &= t % PIECE > 0 or bool(np.isfinite(state.result()).all())
    weights = precise(DECAY) ** np.arange(n - 1, -1, -1)
    expected = np.stack([(one.T * weights) @ one for one in precise(made(n))])[:, None] * precise(SCALES) ** 2
    off = np.max(abs(state.result() - expected) / abs(expected).max(axis=(2, 3), keepdims=True), axis=(1, 2, 3))
    return finite and bool(np.isfinite(state.result()).all()), off / BAR


STATES: dict[str, Callable[[int], Figures]] = {
    "pruned": pruned,
    "latte": latent,
    "tssa": tokens,
    "moments": moments,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1_000_000)
    parser.add_argument("--states", nargs="+", choices=list(STATES), default=list(STATES))
    options = parser.parse_args()
    rows = []
    for state in options.states:
        began = time.perf_counter()
        finite, errors = STATES[state](options.updates)
        seconds = time.perf_counter() - began
        for name, error in zip(KEYS, errors, strict=True):
            rows.append([state, name, "yes" if finite else "NO", f"{float(error):.1e}", f"{seconds:.0f}"])
    print(f"after {options.updates:,} updates at 5 scales of keys; the error is 1 at the bar")
    table(["state", "keys", "finite", "error", "seconds of all keys"], rows)


if __name__ == "__main__":
    main()
