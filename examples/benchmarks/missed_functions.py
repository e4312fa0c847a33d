"""Count the entries of at least ε that sets and heavy_attention miss for f other than x²: there must be none.

Bar: 0 over 10⁸ (query, key) pairs for each function. Every pair is computed by the definition in float64. The queries
are random ones of all sizes, the worst ones of x², and the worst ones of f that a local search finds for the keys
with the largest bounds.

    python examples/benchmarks/missed_functions.py [--pairs 1e8] [--functions 1,4,huber]

Exits with status 1 if an entry is missed.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from _rivals import Array, table
from certificates import FUNCTIONS

import levattn

N, D, QUERIES = 8192, 6, 1024


def keys(rng: np.random.Generator) -> Array:
    K = rng.standard_normal((N, D)) * np.clip(np.abs(rng.standard_cauchy((N, 1))), 0.01, 300)
    kind = rng.integers(0, 4)
    if kind == 1:
        K = K * np.geomspace(1, 1e-4, D) @ np.linalg.qr(rng.standard_normal((D, D)))[0]
    if kind == 2:
        K = K[rng.integers(0, N // 4, N)]
    if kind == 3:
        K[:, -1] = K[:, 0]
    return np.asarray(K)


def attention(f: Any, Q: Array, K: Array) -> Array:
    Z = Q @ K.T
    if isinstance(f, levattn.Softmax):
        Z -= Z.max(axis=1, keepdims=True)
    F = f(Z)
    total = F.sum(axis=1, keepdims=True)
    return np.asarray(np.divide(F, total, out=np.zeros_like(F), where=total > 0))


def make_queries(f: Any, K: Array, bounds: Array, rng: np.random.Generator) -> Array:
    """Return random queries, worst ones of x², and some improved by a random search for the keys they are made for."""
    quarter = QUERIES // 4
    order = np.argsort(-bounds)
    targets = np.concatenate([order[:quarter], rng.choice(N, quarter)])
    worst = K[targets] @ np.linalg.pinv(K.T @ K) * np.exp(rng.uniform(-2, 8, (2 * quarter, 1)))
    some = slice(0, 64)
    Q, at = worst[some].copy(), targets[some]
    sample = np.concatenate([order[: N // 8], rng.choice(N, N // 8)])
    best = np.zeros(len(Q))
    for step in range(20):
        trial = inside(f, Q + 0.5**step * np.linalg.norm(Q, axis=1, keepdims=True) * rng.standard_normal(Q.shape))
        Z = trial @ K[sample].T
        own = np.einsum("ij,ij->i", trial, K[at])
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            reached = f(own) / f(Z).sum(axis=1)
        better = reached > best
        Q[better], best[better] = trial[better], reached[better]
    random = rng.standard_normal((2 * quarter - 64, D)) * np.exp(rng.uniform(-6, 6, (2 * quarter - 64, 1)))
    return inside(f, np.vstack([random, worst, Q]))


def inside(f: Any, Q: Array) -> Array:
    if not isinstance(f, levattn.Softmax):
        return Q
    return np.asarray(Q * np.minimum(1, f.radius / np.linalg.norm(Q, axis=1, keepdims=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=float, default=1e8)
    parser.add_argument("--functions", default=",".join(name for name in FUNCTIONS if name != "2"))
    options = parser.parse_args()
    rows = []
    missed = 0
    for name in options.functions.split(","):
        f = FUNCTIONS[name] if not isinstance(FUNCTIONS[name], float) else levattn.Power(FUNCTIONS[name])
        rng = np.random.default_rng(0)
        pairs = heavy = lost = kept = sets = 0
        while pairs < options.pairs:
            K = keys(rng) / (30 if name == "softmax" else 1)
            epsilon = float(rng.choice([0.3, 0.1, 0.03]))
            found = levattn.universal_set(K, epsilon, f=f)
            Q = make_queries(f, K, found.scores, rng)
            large = attention(f, Q, K) >= epsilon
            entries = levattn.heavy_attention(Q, K, epsilon, f=f, universal=found).entries
            i, j = np.nonzero(large)
            heavy += len(i)
            lost += int(np.count_nonzero(~found.mask[j]))
            lost += int(np.count_nonzero(np.asarray(entries[i, j]) == 0)) if len(i) else 0
            pairs += large.size
            kept += len(found)
            sets += 1
        missed += lost
        rows.append([name, f"{pairs:.2e}", str(heavy), str(lost), f"{kept / sets:.0f} of {N}"])
    table(["f", "pairs", "heavy", "missed", "keys kept"], rows)
    print(f"{missed} missed entries")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
