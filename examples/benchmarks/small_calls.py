"""Small calls: one head of few keys, where what is not arithmetic counts.

Bars, float32: scores of one head of 4096 x 128 cost at most 1.2 times the fastest complete route in numpy or torch
(Gram, Cholesky, a triangular solve or a product, squared norms), for Gaussian keys and keys like those of real heads;
of 512 x 64 at most 0.25 ms. What a call does besides its kernels is measured on 16 keys of 16 columns, and its checks
of arguments, masks and dispatch, at most 50 µs, as what is left of that without the algebra.

    python examples/benchmarks/small_calls.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from _keys import keys_of
from _rivals import Array, table, verdict

import levattn

SHAPES = ((512, 32), (512, 64), (2048, 64), (4096, 64), (4096, 128))
TIMES, CALLS = 1.2, 20  # the bar, and calls in a row of each turn
MOST, AT = 0.25, (512, 64)
CHECKS = 50.0  # µs
PAUSE, WARM = 0.12, 0.08  # seconds
ALGEBRA = ("factor_moments", "scores", "at_least")  # which are arithmetic, or decide about it


def by_numpy(K: Array) -> Array:
    W = np.linalg.inv(np.linalg.cholesky(K.T @ K)).T
    Y = K @ W
    return np.einsum("ij,ij->i", Y, Y)


def torch_routes(K: Array) -> dict[str, Callable[[], object]]:
    import torch

    T = torch.from_numpy(K)

    def by_solve() -> object:
        R = torch.linalg.cholesky(T.T @ T, upper=True)
        Y = torch.linalg.solve_triangular(R, T, upper=True, left=False)
        return (Y * Y).sum(dim=1)

    def by_inverse() -> object:
        Y = T @ torch.linalg.inv(torch.linalg.cholesky(T.T @ T)).T
        return (Y * Y).sum(dim=1)

    return {"torch, solve": by_solve, "torch, inverse": by_inverse}


def medians(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of a call in rows of them, after a pause in which threads of BLAS fall asleep."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(PAUSE)
            begun = time.perf_counter()
            while time.perf_counter() - begun < WARM:  # processors that were idle take some time to be fast again
                call()
            for _ in range(CALLS):
                start = time.perf_counter()
                call()
                found[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def shapes(rounds: int) -> None:
    rows, said = [], []
    for n, d in SHAPES:
        for kind, K in keys_of(n, d).items():
            calls: dict[str, Callable[[], object]] = {
                "scores": lambda K=K: levattn.leverage_scores(K),
                "set": lambda K=K: levattn.universal_set(K, 0.1),
                "numpy": lambda K=K: by_numpy(K),
                **torch_routes(K),
            }
            times = medians(calls, rounds)
            best = min(seconds for name, seconds in times.items() if name not in ("scores", "set"))
            ratio = times["scores"] / best
            rows.append([f"{n} x {d}, {kind}", *(f"{1e3 * s:.3f}" for s in times.values()), f"{ratio:.2f}"])
            if (n, d) == (4096, 128):
                said.append(f"{n} x {d}, {kind}: scores / fastest rival: {verdict(ratio, TIMES, at_least=False)}")
            if (n, d) == AT:
                said.append(
                    f"{n} x {d}, {kind}: ms of the scores: {verdict(1e3 * times['scores'], MOST, at_least=False)}"
                )
    table(["ms", "scores", "set", "numpy", "torch, solve", "torch, inverse", "scores / best"], rows)
    print("\n".join(said))


def profile(name: str, call: Callable[[], object], calls: int = 3000) -> None:
    """Print what a call on keys of next to no arithmetic costs, and how much of it is not algebra."""
    call()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    whole = (time.perf_counter() - start) / calls
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(calls):
        call()
    profiler.disable()
    figures: Any = pstats.Stats(profiler)
    below = sum(stat[3] for (_, _, f), stat in figures.stats.items() if f in ALGEBRA)
    share = below / figures.total_tt
    left = 1e6 * whole * (1 - share)
    print(
        f"{name} of 16 x 16: {1e6 * whole:.0f} µs a call, {100 * share:.0f} % of them in the factor, the scores and "
        f"the threshold; µs of checks and dispatch: {verdict(left, CHECKS, at_least=False)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    shapes(options.rounds)
    K = np.random.default_rng(0).standard_normal((16, 16), dtype=np.float32)
    profile("leverage_scores", lambda: levattn.leverage_scores(K))
    profile("universal_set", lambda: levattn.universal_set(K, 0.5))


if __name__ == "__main__":
    main()
