"""Count the keys that supersets of approximate methods miss: there must be none.

Bar: 0 over 10⁴ random matrices for each method that claims a superset. Matrices are small, of every kind (coherent,
heavy-tailed, ill-conditioned, duplicated, rank-deficient), seeds and thresholds random; a key is missed if its exact
leverage score, by the definition in float64, is at least ε and it is not in the set.

    python examples/benchmarks/missed_sketches.py [--matrices 1e4]

Exits with status 1 if a key is missed.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from _rivals import Array, table

import levattn
from levattn.sketch import OSNAP, SRHT, CountSketch, GaussianJL

METHODS: dict[str, Any] = {
    "countsketch": lambda d, seed: CountSketch(2 * d * d + 8, seed=seed),
    "osnap": lambda d, seed: OSNAP(8 * d, seed=seed),
    "srht": lambda d, seed: SRHT(8 * d, seed=seed),
    "jl": lambda _, seed: GaussianJL(50, seed=seed),
    "osnap, then jl": lambda d, seed: (OSNAP(8 * d, seed=seed), GaussianJL(50, seed=seed)),
}


def random_keys(rng: np.random.Generator) -> Array:
    n, d = int(rng.integers(2, 200)), int(rng.integers(1, 9))
    K = rng.standard_normal((n, d))
    kind = rng.integers(0, 6)
    if kind >= 1:
        K = K * np.clip(np.abs(rng.standard_cauchy((n, 1))), 1e-2, 1e3)
    if kind == 2:
        K = K * np.geomspace(1, 1e-4, d) @ np.linalg.qr(rng.standard_normal((d, d)))[0]
    if kind == 3:
        K = K[rng.integers(0, max(1, n // 3), n)]
    if kind == 4:
        K[:, -1] = K[:, 0]
    if kind == 5:
        K[: min(n, d)] += 100 * np.eye(d)[: min(n, d)]
    return np.asarray(K)


def exact_scores(K: Array) -> Array:
    U, s, _ = np.linalg.svd(K / np.maximum(np.linalg.norm(K, axis=0), 1e-300), full_matrices=False)
    return np.asarray((U[:, s > 1e-12 * s[0]] ** 2).sum(axis=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrices", type=float, default=1e4)
    count = int(parser.parse_args().matrices)
    rows, missed = [], 0
    for name, sketch in METHODS.items():
        rng = np.random.default_rng(0)
        heavy = lost = kept = 0
        for _ in range(count):
            K = random_keys(rng)
            epsilon = float(rng.choice([0.02, 0.1, 0.3, 0.8]))
            seed = int(rng.integers(2**63))
            found = levattn.universal_set(K, epsilon, method=sketch(K.shape[1], seed))
            large = exact_scores(K) >= epsilon * (1 + 1e-9)
            heavy += int(large.sum())
            lost += int((large & ~found.mask).sum())
            kept += len(found)
        missed += lost
        rows.append([name, str(count), str(heavy), str(kept), str(lost)])
    table(["method", "matrices", "heavy keys", "kept", "missed"], rows)
    print(f"{missed} keys missed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
