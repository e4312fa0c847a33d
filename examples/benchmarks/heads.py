"""Exact leverage scores of many heads against numpy, scipy and torch.

Bar at (256, 4096, 64) float32: at least 2.5 times the best of them.

    python examples/benchmarks/heads.py [--heads 256] [--keys 4096] [--rounds 5] [--avx2]

``--avx2`` limits all libraries to AVX2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from _rivals import THREADS, Array, by_gram, interleaved, limit_to_avx2, table, verdict
from threadpoolctl import threadpool_limits

import levattn


def one_head(X: Array) -> Array:
    W = np.linalg.inv(np.linalg.cholesky(X.T @ X).T)
    Y = X @ W
    return np.einsum("ij,ij->i", Y, Y)


def numpy_batched(K: Array) -> Array:
    G = np.swapaxes(K, 1, 2) @ K
    W = np.linalg.inv(np.swapaxes(np.linalg.cholesky(G), 1, 2))
    Y = K @ W
    return np.einsum("hij,hij->hi", Y, Y)


def on_threads(K: Array) -> Array:
    with threadpool_limits(1), ThreadPoolExecutor(THREADS) as pool:
        return np.stack(list(pool.map(one_head, K)))


def torch_routes(K: Array) -> dict[str, Callable[[], object]]:
    try:
        import torch
    except ModuleNotFoundError:
        return {}
    tensor = torch.from_numpy(K)

    def cholesky() -> object:
        L = torch.linalg.cholesky(tensor.mT @ tensor)
        return torch.linalg.solve_triangular(L, tensor.mT, upper=False).square().sum(dim=1)

    def inverse() -> object:
        L = torch.linalg.cholesky(tensor.mT @ tensor)
        eye = torch.eye(tensor.shape[-1], dtype=tensor.dtype).expand_as(L)
        return (tensor @ torch.linalg.solve_triangular(L, eye, upper=False).mT).square().sum(dim=2)

    return {"torch batched, solve": cholesky, "torch batched, product": inverse}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=256)
    parser.add_argument("--keys", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--avx2", action="store_true", help="measure without AVX-512")
    options = parser.parse_args()
    if options.avx2:
        limit_to_avx2()
    for dtype in ("float32", "float64"):
        K = np.random.default_rng(0).standard_normal((options.heads, options.keys, 64)).astype(dtype)
        times = interleaved(
            {
                "levattn": lambda K=K: levattn.leverage_scores(K),
                "numpy, loop": lambda K=K: [one_head(X) for X in K],
                "numpy, loop on threads": lambda K=K: on_threads(K),
                "numpy, batched": lambda K=K: numpy_batched(K),
                "scipy, loop": lambda K=K: [by_gram(X) for X in K],
                **torch_routes(K),
            },
            options.rounds,
        )
        print(f"\n{dtype}, {K.shape}")
        table(
            ["route", "ms", "/ levattn"],
            [[name, f"{1e3 * s:.1f}", f"{s / times['levattn']:.2f}"] for name, s in times.items()],
        )
        best = min(seconds for name, seconds in times.items() if name != "levattn")
        print("best rival / levattn:", verdict(best / times["levattn"], 2.5))


if __name__ == "__main__":
    main()
