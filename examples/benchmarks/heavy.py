"""Heavy attention against blocked dense attention, and its cost per query against n.

Bar at m = 1024, d = 64, ε = 0.05, n = 131 072: at least 30 times blocked dense attention (the best of the block
sizes, normalizer by the same pass), with the same entries; after preparation a cost that does not depend on n.

    python examples/benchmarks/heavy.py [--rounds 5]
"""

from __future__ import annotations

import argparse

import numpy as np
from _rivals import Array, interleaved, table, verdict

import levattn

M, D, EPSILON = 1024, 64, 0.05


def keys(n: int) -> Array:
    """Gaussian keys, of which 200 are longer and so heavy for some query."""
    rng = np.random.default_rng(n)
    K = rng.standard_normal((n, D), dtype=np.float32)
    K[rng.choice(n, 200, replace=False)] *= np.float32(np.sqrt(0.01 * n))
    return K


def dense(Q: Array, K: Array, block: int) -> list[tuple[Array, Array, Array]]:
    """Heavy entries by brute force in blocks of queries and keys: normalizers first, entries second."""
    out = []
    for i in range(0, len(Q), 256):
        q = Q[i : i + 256]
        D_ = np.zeros(len(q), np.float32)
        for j in range(0, len(K), block):
            Z = q @ K[j : j + block].T
            D_ += np.einsum("ij,ij->i", Z, Z)
        bound = np.sqrt(np.float32(EPSILON) * D_)[:, None]
        for j in range(0, len(K), block):
            Z = np.abs(q @ K[j : j + block].T)
            rows, columns = np.nonzero(bound <= Z)
            out.append((rows + i, columns + j, Z[rows, columns] ** 2 / D_[rows]))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    rows = []
    per_query: dict[int, float] = {}
    ratio = 0.0
    for n in (4096, 32768, 131072, 1048576):
        K = keys(n)
        Q = np.random.default_rng(1).standard_normal((M, D), dtype=np.float32)
        Q[: M // 2] += K[:: n // (M // 2)][: M // 2] * np.float32(0.5)
        U = levattn.universal_set(K, EPSILON)
        candidates = {
            "whole": lambda K=K, Q=Q: levattn.heavy_attention(Q, K, EPSILON),
            "queries": lambda K=K, Q=Q, U=U: levattn.heavy_attention(Q, K, EPSILON, universal=U),
        }
        if n <= 131072:
            for block in (1024, 4096, 16384):
                candidates[f"dense {block}"] = lambda K=K, Q=Q, b=block: dense(Q, K, b)
        times = interleaved(candidates, rounds if n <= 131072 else 3, pause=0.2)
        brute = min((s for name, s in times.items() if name.startswith("dense")), default=float("nan"))
        per_query[n] = times["queries"]
        found = levattn.heavy_attention(Q, K, EPSILON).entries
        same = "-"
        if n <= 131072:
            theirs = {(int(r), int(c)) for r, cs, _ in dense(Q, K, 4096) for r, c in zip(r, cs, strict=True)}
            ours = set(zip(*(x.tolist() for x in found.nonzero()), strict=True))
            same = str(len(ours ^ theirs))
        if n == 131072:
            ratio = brute / times["whole"]
        rows.append(
            [
                str(n),
                str(len(U)),
                str(found.nnz),
                same,
                *(f"{1e3 * t:.2f}" for t in (times["whole"], times["queries"], brute)),
                f"{brute / times['whole']:.1f}",
            ]
        )
    table(["n", "|U|", "heavy", "differ", "whole ms", "queries ms", "dense ms", "dense / whole"], rows)
    print("dense / levattn at n = 131072:", verdict(ratio, 30))
    print(
        "queries at n = 1048576 / at n = 32768:", verdict(per_query[1048576] / per_query[32768], 1.5, at_least=False)
    )


if __name__ == "__main__":
    main()
