"""Leverage scores of sparse keys with fewer rows than columns, beside their dense copy and a Gram matrix of scipy.

The rival forms ``K @ K.T`` by scipy and its Cholesky factor by LAPACK. It proves nothing: a copied row, whose factor
does not exist, gets a shift. Bars: no more time than the rival for independent rows with few entries (from 500 rows
on), and less than the dense copy in every line.

    python examples/benchmarks/sparse_wide.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse
from _rivals import Array, interleaved, table, verdict

import levattn

# rows, columns, entries of a row, how often each row is there, options
LINES: list[tuple[int, int, int, int, dict[str, Any]]] = [
    (50, 5_000, 5, 1, {}),
    (50, 5_000, 5, 2, {}),
    (50, 5_000, 5, 1, {"relative_ridge": 0.1}),
    (500, 20_000, 20, 1, {}),
    (500, 20_000, 20, 2, {}),
    (500, 20_000, 20, 1, {"relative_ridge": 0.1}),
    (1_000, 3_000, 10, 1, {}),
    (1_000, 3_000, 200, 1, {}),
    (2_000, 1_000_000, 50, 1, {}),
]
_MOST = 1 << 24  # numbers of a dense copy


def keys(n: int, d: int, each: int, copies: int) -> Any:
    rng = np.random.default_rng(0)
    some, entries = n // copies, n // copies * each
    rows, columns = np.repeat(np.arange(some), each), rng.integers(0, d, entries)
    K = scipy.sparse.csr_array((rng.standard_normal(entries), (rows, columns)), shape=(some, d))
    return scipy.sparse.vstack([K] * copies, format="csr")


def by_scipy(K: Any, ridge: float) -> Array:
    """The diagonal of G (G + λ)⁻¹."""
    G = (K @ K.T).toarray()
    shift = max(ridge / K.shape[1], 1e-12 / len(G)) * np.trace(G)
    factor = scipy.linalg.cholesky(G + shift * np.eye(len(G)), lower=True)
    inverse = scipy.linalg.lapack.dtrtri(factor, lower=True)[0]
    return 1 - shift * np.einsum("ij,ij->j", inverse, inverse)


def megabytes(call: Callable[[], object]) -> float:
    tracemalloc.start()
    call()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows, alone, dense_ratios = [], [], []
    for n, d, each, copies, chosen in LINES:
        K = keys(n, d, each, copies)
        calls: dict[str, Callable[[], Any]] = {
            "sparse": lambda K=K, chosen=chosen: levattn.leverage_scores(K, **chosen),
            "scipy": lambda K=K, chosen=chosen: by_scipy(K, chosen.get("relative_ridge", 0.0)),
        }
        if n * d <= _MOST and not chosen:
            copy = K.toarray()
            calls["dense"] = lambda copy=copy: levattn.leverage_scores(copy)
        times, memory = interleaved(calls, options.rounds, pause=0.2), megabytes(calls["sparse"])
        error = float(np.max(np.abs(calls["sparse"]() - calls["scipy"]())))
        dense = times.get("dense", np.nan)
        measured = [1e3 * times["sparse"], 1e3 * times["scipy"], 1e3 * dense, memory]
        shown = ["" if np.isnan(figure) else f"{figure:.3g}" for figure in measured]
        rows.append(
            [f"{n} x {d}, {each} a row", str(copies), str(chosen.get("relative_ridge", "")), *shown, f"{error:.1e}"]
        )
        if copies == 1 and not chosen and n >= 500 and each <= 50:
            alone.append(times["scipy"] / times["sparse"])
        if not np.isnan(dense):
            dense_ratios.append(dense / times["sparse"])
    table(["keys", "copies", "λ d/‖K‖²", "ms", "scipy, ms", "dense copy, ms", "MB", "largest difference"], rows)
    print(f"scipy / levattn, independent rows with few entries, least: {verdict(min(alone), 1)}")
    print(f"dense copy / levattn, least: {verdict(min(dense_ratios), 1)}")


if __name__ == "__main__":
    main()
