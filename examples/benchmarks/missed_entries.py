"""Count the entries A_ij ≥ ε that the library misses: there must be none.

Every pair (query, key) is computed by brute force in float64 (for the worst conditioned keys in long
double) and compared with the universal set and with the entries of heavy_attention, for every storage
type and method, on keys of several kinds. The queries are random ones, keys themselves, and for the keys
of the largest scores the worst query there is, (KᵀK)⁺k_j; all are multiplied by powers of two between
2⁻⁴⁰⁰ and 2⁴⁰⁰. Sets of as many keys, asked for by size, must hold all entries above the ε that they certify.

    python examples/benchmarks/missed_entries.py            at least 10⁸ pairs, about a minute
    python examples/benchmarks/missed_entries.py --pairs 1e7

Exits with status 1 if an entry is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import levattn

Float = NDArray[np.float64]

METHODS = ("auto", "gram", "qr", "svd")
EPSILONS = (0.3, 0.03, 0.003)
N, D, QUERIES = 8192, 32, 1024
EXTREME_QUERIES = 64


# -- keys ---------------------------------------------------------------------------------


def gaussian(rng: np.random.Generator) -> Float:
    return rng.standard_normal((N, D))


def heavy_tailed(rng: np.random.Generator) -> Float:
    return np.asarray(rng.standard_normal((N, D)) * np.clip(np.abs(rng.standard_cauchy((N, 1))), 0, 300))


def ill_conditioned(rng: np.random.Generator) -> Float:
    turn = np.linalg.qr(rng.standard_normal((D, D)))[0]
    return np.asarray(heavy_tailed(rng) * np.logspace(0, -4, D) @ turn)


def rank_deficient(rng: np.random.Generator) -> Float:
    return (rng.integers(-2, 3, (N, D // 2)) @ rng.integers(-2, 3, (D // 2, D))).astype(np.float64)


def tied(rng: np.random.Generator) -> Float:
    """I ⊗ 1_m turned by signs: every score is D / N exactly, in every storage type."""
    hadamard = np.ones((1, 1))
    while hadamard.shape[0] < D:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return rng.permutation(np.repeat(hadamard, N // D, axis=0))


def worst_conditioned(rng: np.random.Generator) -> Float:
    turn = np.linalg.qr(rng.standard_normal((D, D)))[0]
    return np.asarray(heavy_tailed(rng) * np.logspace(0, -9, D) @ turn)


KINDS: tuple[Callable[[np.random.Generator], Float], ...] = (
    gaussian,
    heavy_tailed,
    ill_conditioned,
    worst_conditioned,
    rank_deficient,
    tied,
)


# -- storage types ------------------------------------------------------------------------


def storage_types() -> dict[str, tuple[Callable[[Float], Any], Callable[[Any], Float]]]:
    """How keys are stored, and how stored keys are read back as float64."""

    def in_numpy(dtype: Any) -> tuple[Callable[[Float], Any], Callable[[Any], Float]]:
        return lambda K: K.astype(dtype), lambda K: np.asarray(K, np.float64)

    types = {name: in_numpy(name) for name in ("float64", "float32", "float16")}
    try:
        import ml_dtypes

        types["bfloat16"] = in_numpy(ml_dtypes.bfloat16)
    except ImportError:
        pass
    try:
        import torch

        def in_torch(dtype: Any) -> tuple[Callable[[Float], Any], Callable[[Any], Float]]:
            return lambda K: torch.from_numpy(K).to(dtype), lambda K: K.to(torch.float64).numpy()

        types |= {str(dtype): in_torch(dtype) for dtype in (torch.float32, torch.bfloat16)}
    except ImportError:
        pass
    try:
        import array_api_strict as xp

        types["strict.float32"] = (
            lambda K: xp.asarray(K, dtype=xp.float32),
            lambda K: np.asarray(np.from_dlpack(K), np.float64),
        )
    except ImportError:
        pass
    return types


# -- brute force --------------------------------------------------------------------------


def make_queries(rng: np.random.Generator, K: Float) -> Float:
    """Half random and typical queries, half the worst ones of the keys of the largest scores."""
    quarter = QUERIES // 4
    U, s, Vt = np.linalg.svd(K, full_matrices=False)
    rank = int(np.sum(s > 1e-13 * s[0]))
    U, s, Vt = U[:, :rank], s[:rank], Vt[:rank]
    order = np.argsort(-np.sum(U**2, axis=1))
    worst = np.concatenate([order[:quarter], rng.choice(N, quarter, replace=False)])
    return np.vstack(
        [
            rng.standard_normal((quarter, D)),
            K[rng.choice(N, quarter, replace=False)],
            (U[worst] / s) @ Vt,
        ]
    )


def attention(Q: Float, K: Float, dtype: Any) -> Iterator[Float]:
    """Blocks of rows of A_ij = ⟨q_i,k_j⟩² / Σ_l ⟨q_i,k_l⟩², in one precision."""
    for start in range(0, Q.shape[0], 256):
        Z = Q[start : start + 256].astype(dtype) @ K.T.astype(dtype)
        Z /= np.maximum(np.max(np.abs(Z), axis=1, keepdims=True), np.finfo(np.float64).tiny)
        Z *= Z
        total = Z.sum(axis=1, keepdims=True)
        yield np.divide(Z, total, out=np.zeros_like(Z), where=total > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=float, default=1e8, help="at least so many (query, key) pairs")
    wanted = parser.parse_args().pairs
    start = time.perf_counter()
    types = storage_types()
    counts = {(name, method): np.zeros(4, dtype=np.int64) for name in types for method in METHODS}
    least = 0
    round_number = 0
    while least < wanted:
        for kind_number, kind in enumerate(KINDS):
            rng = np.random.default_rng((round_number, kind_number))
            keys = kind(rng)
            extreme = kind is worst_conditioned
            for name, (store, read) in types.items():
                stored = store(keys)
                K = read(stored)
                Q = make_queries(rng, K)
                if extreme:
                    Q = Q[rng.choice(QUERIES, EXTREME_QUERIES, replace=False)]
                # One ε per round and kind; the tied keys are asked for exactly their score.
                epsilon = D / N if kind is tied else EPSILONS[(round_number + kind_number) % 3]
                A = list(attention(Q, K, np.longdouble if extreme else np.float64))
                heavy = [np.nonzero(epsilon <= block) for block in A]
                rows = np.concatenate([256 * b + i for b, (i, _) in enumerate(heavy)])
                columns = np.concatenate([j for _, j in heavy])
                scaled = np.ldexp(Q, rng.integers(-400, 401, (Q.shape[0], 1)))
                for method in METHODS:
                    found = levattn.universal_set(stored, epsilon, method=method)
                    selected = np.asarray(found.mask, dtype=bool)
                    entries = levattn.heavy_attention(scaled, stored, epsilon, universal=found).entries
                    lost = int(np.count_nonzero(~selected[columns]))
                    lost += int(np.count_nonzero(np.asarray(entries[rows, columns]) == 0)) if len(rows) else 0
                    if name.startswith("float"):
                        sized = levattn.universal_set(stored, size=len(found), method=method)
                        outside = ~np.asarray(sized.mask, dtype=bool)
                        lost += sum(int(np.count_nonzero(a[:, outside] > sized.epsilon * (1 + 1e-6))) for a in A)
                    counts[name, method] += np.array([Q.shape[0] * K.shape[0], len(rows), lost, 1])
        round_number += 1
        least = min(int(count[0]) for count in counts.values()) * len(types)

    print(f"{'stored as':<16}{'method':<8}{'pairs':>14}{'heavy':>12}{'missed':>8}")
    for (name, method), count in counts.items():
        pairs, heavy_entries, missed = (int(x) for x in count[:3])
        print(f"{name:<16}{method:<8}{pairs:>14,}{heavy_entries:>12,}{missed:>8,}")
    missed = sum(int(count[2]) for count in counts.values())
    seconds = time.perf_counter() - start
    print(
        f"\n{missed} missed entries in {least:.2e} pairs ({len(types)} storage types), each for {len(METHODS)} methods"
        f", of the set and of heavy_attention ({seconds:.0f} s)"
    )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
