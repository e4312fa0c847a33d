"""Exact leverage scores of one tall matrix against numpy's SVD and the best that BLAS gives.

Bars at n = 10⁶, d = 64: float32 at least 80 times numpy's SVD and 2.2 times the best BLAS route on all cores,
float64 at least 45 and 2 times; d = 32 and 128 at least 2 times; condition number 10⁶ at most 4 times slower;
memory beyond K and the scores at most 2 % of K. d = 1024 is there to show, without a bar.

    python examples/benchmarks/exact_scores.py [--rows 1000000] [--rounds 5] [--no-svd]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import partial

import numpy as np
from _rivals import blas_routes, by_svd, conditioned, interleaved, once, table, verdict

import levattn

BARS = {("float32", 64): 2.2}


def against_blas(n: int, d: int, dtype: str, rounds: int, svd: bool) -> None:
    K = np.random.default_rng(0).standard_normal((n, d)).astype(dtype)
    times = interleaved({"levattn": lambda: levattn.leverage_scores(K), **blas_routes(K)}, rounds)
    best = min((seconds, name) for name, seconds in times.items() if name != "levattn")
    rows = [[name, f"{1e3 * s:.1f}", f"{s / times['levattn']:.2f}"] for name, s in times.items()]
    if svd and d == 64:
        seconds = once(lambda: by_svd(K))
        rows.append(["numpy SVD", f"{1e3 * seconds:.0f}", f"{seconds / times['levattn']:.1f}"])
    print(f"\n{dtype}, n = {n}, d = {d}")
    table(["route", "ms", "/ levattn"], rows)
    if svd and d == 64:
        print("SVD / levattn:", verdict(seconds / times["levattn"], 80 if dtype == "float32" else 45))
    ratio = best[0] / times["levattn"]
    print(
        f"best BLAS ({best[1]}) / levattn:", verdict(ratio, BARS.get((dtype, d), 2.0)) if d < 1024 else f"{ratio:.2f}"
    )


def against_conditioning(n: int, rounds: int) -> None:
    for dtype in ("float32", "float64"):
        keys = {str(condition): conditioned(n, 64, condition, dtype) for condition in (1.0, 1e6)}
        times = interleaved({name: partial(levattn.leverage_scores, K) for name, K in keys.items()}, rounds)
        ratio = times["1000000.0"] / times["1.0"]
        print(f"{dtype}, d = 64: condition 10⁶ / condition 1:", verdict(ratio, 4, at_least=False))


def memory(n: int) -> None:
    """Growth of the peak memory of a process that holds K (and has compiled all) when it scores K."""
    code = (
        "import resource, sys, numpy as np, levattn\n"
        "n = int(sys.argv[1]); K = np.ones((n, 64), np.float32)\n"
        "for s in range(0, n, 4096): K[s:s+4096] = np.random.default_rng(s).standard_normal(K[s:s+4096].shape)\n"
        "levattn.leverage_scores(K[:200000])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "scores = levattn.leverage_scores(K)\n"
        "print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, scores.nbytes)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(n)], capture_output=True, text=True, check=True)
    before, after, scores = map(int, done.stdout.split())
    size = n * 64 * 4
    extra = (after - before) * 1024 - scores
    print("memory beyond K and the scores, % of K:", verdict(100 * max(extra, 0) / size, 2, at_least=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-svd", action="store_true")
    options = parser.parse_args()
    for dtype in ("float32", "float64"):
        for d in (64, 32, 128):
            against_blas(options.rows, d, dtype, options.rounds, not options.no_svd)
        against_blas(20_000, 1024, dtype, options.rounds, svd=False)
    print()
    against_conditioning(options.rows, options.rounds)
    memory(options.rows)


if __name__ == "__main__":
    main()
