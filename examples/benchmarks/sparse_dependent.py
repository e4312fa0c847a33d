"""Leverage scores of sparse designs with several full sets of dummies, beside the same designs of full rank.

Each further set takes one dimension less than it has columns. The design of full rank leaves one column of each out.
The rival forms ``K.T @ K`` by scipy and its eigenvectors by LAPACK, and cuts eigenvalues by eye. Bar: at most twice
the time of the design of full rank.

    python examples/benchmarks/sparse_dependent.py [--rounds 5]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse
from _rivals import Array, interleaved, table, verdict

import levattn

SETS = [(300, 62), (300, 50, 12), (60, 20, 12), (300, 50, 12, 5, 5)]
ROWS = 200_000


def design(sizes: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(0)
    starts = np.cumsum((0, *sizes[:-1]))
    columns = np.stack(
        [start + rng.integers(0, size, ROWS) for start, size in zip(starts, sizes, strict=True)], axis=1
    )
    entries = np.ones(columns.size), columns.ravel(), np.arange(0, columns.size + 1, len(sizes))
    return scipy.sparse.csr_array(entries, shape=(ROWS, sum(sizes)))


def by_scipy(K: Any) -> Array:
    w, V = scipy.linalg.eigh((K.T @ K).toarray())
    kept = w > 1e-10 * w[-1]
    Y = K @ (V[:, kept] / np.sqrt(w[kept]))
    return np.einsum("ij,ij->i", Y, Y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    rows, ratios = [], []
    for sizes in SETS:
        K = design(sizes)
        dropped = set(np.cumsum(sizes[:-1]).tolist())
        full = scipy.sparse.csr_array(K[:, [j for j in range(K.shape[1]) if j not in dropped]])
        calls: dict[str, Callable[[], Any]] = {
            "deficient": lambda K=K: levattn.leverage_scores(K),
            "full": lambda full=full: levattn.leverage_scores(full),
            "scipy": lambda K=K: by_scipy(K),
        }
        times = interleaved(calls, rounds, pause=0.2)
        ratios.append(times["deficient"] / times["full"])
        error = float(np.max(np.abs(calls["deficient"]() - calls["full"]())))
        measured = [1e3 * times["deficient"], 1e3 * times["full"], 1e3 * times["scipy"], ratios[-1]]
        rows.append(
            [f"{ROWS} x {'+'.join(map(str, sizes))}", *(f"{figure:.3g}" for figure in measured), f"{error:.1e}"]
        )
    table(["design", "ms", "full rank, ms", "scipy, ms", "ratio", "largest difference"], rows)
    print(f"rank-deficient / full rank, most: {verdict(max(ratios), 2, at_least=False)}")


if __name__ == "__main__":
    main()
