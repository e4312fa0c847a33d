"""Exact leverage scores of one tall matrix against numpy's SVD and the best that BLAS gives.

Keys are Gaussian, and like those of real heads (`_keys.py`). Bars at n = 10⁶, d = 64: Gaussian float32 at least 80
times numpy's SVD and 2.2 times the best BLAS route on all cores, float64 at least 45 and 2 times; d = 32 and 128 at
least 2 times; keys of real heads at most 1.1 times the time of Gaussian ones; float32 with 512 to 2048 columns no
slower than BLAS; condition number 10⁶ at most 2 times the time of condition 1 (and, a figure without a bar, of keys of
real heads); memory beyond K and the scores at most 2 % of K.

    python examples/benchmarks/exact_scores.py [--rows 1000000] [--rounds 5] [--no-svd] [--only blas kinds ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from functools import partial

from _keys import KINDS, REAL, keys_of
from _rivals import Array, blas_routes, by_svd, conditioned, interleaved, once, table, verdict

import levattn

BARS = {("float32", 64): 2.2}
WIDE, WIDE_ROWS = (512, 1024, 2048), 20_000


def _beside_blas(K: Array, rounds: int, svd: bool) -> tuple[float, float]:
    """Print a table of all routes; return the time of the best BLAS route, and of the SVD, over ours."""
    times = interleaved({"levattn": lambda: levattn.leverage_scores(K), **blas_routes(K)}, rounds)
    best, name = min((seconds, name) for name, seconds in times.items() if name != "levattn")
    rows = [[name, f"{1e3 * s:.1f}", f"{s / times['levattn']:.2f}"] for name, s in times.items()]
    seconds = once(lambda: by_svd(K)) if svd else 0.0
    if svd:
        rows.append(["numpy SVD", f"{1e3 * seconds:.0f}", f"{seconds / times['levattn']:.1f}"])
    table(["route", "ms", "/ levattn"], rows)
    print(f"best BLAS route: {name}")
    return best / times["levattn"], seconds / times["levattn"]


def against_blas(n: int, rounds: int, svd: bool) -> None:
    for dtype in ("float32", "float64"):
        for d in (64, 32, 128):
            for kind, K in keys_of(n, d, dtype).items():
                print(f"\n{dtype}, n = {n}, d = {d}, {kind}")
                with_svd = svd and d == 64 and kind == "Gaussian"
                blas, by = _beside_blas(K, rounds, with_svd)
                if with_svd:
                    print("SVD / levattn:", verdict(by, 80 if dtype == "float32" else 45))
                bar = BARS.get((dtype, d), 2.0)
                print("best BLAS / levattn:", verdict(blas, bar) if kind == "Gaussian" else f"{blas:.2f}")


def many_columns(rounds: int) -> None:
    for dtype in ("float32", "float64"):
        for d in WIDE:
            K = KINDS["Gaussian"](WIDE_ROWS, d, dtype)
            print(f"\n{dtype}, n = {WIDE_ROWS}, d = {d}, Gaussian")
            blas, _ = _beside_blas(K, rounds, False)
            print("best BLAS / levattn:", verdict(blas, 1.0) if dtype == "float32" else f"{blas:.2f}")


def kinds(n: int, rounds: int) -> None:
    """What keys of real heads cost beside Gaussian ones, and ill-conditioned beside well-conditioned ones."""
    for dtype in ("float32", "float64"):
        keys = keys_of(n, 64, dtype) | {f"condition {c:g}": conditioned(n, 64, c, dtype) for c in (1.0, 1e3, 1e6)}
        tasks: dict[str, Callable[[Array], object]] = {
            "leverage_scores": levattn.leverage_scores,
            "universal_set": lambda K: levattn.universal_set(K, 0.1),
        }
        calls = {(task, kind): partial(call, K) for task, call in tasks.items() for kind, K in keys.items()}
        found = interleaved({f"{task} {kind}": call for (task, kind), call in calls.items()}, rounds)
        times = {pair: found[" ".join(pair)] for pair in calls}
        rows = [[kind, *(f"{1e3 * times[task, kind]:.1f}" for task in tasks)] for kind in keys]
        print(f"\n{dtype}, n = {n}, d = 64")
        table(["keys", *(f"{task}, ms" for task in tasks)], rows)
        for task in tasks:
            for kind in keys:
                if kind in KINDS and kind != "Gaussian":
                    ratio = times[task, kind] / times[task, "Gaussian"]
                    print(f"{task}, {kind} / Gaussian:", verdict(ratio, 1.1, at_least=False))
        hard = times["leverage_scores", "condition 1e+06"]
        ratio = hard / times["leverage_scores", "condition 1"]
        print("leverage_scores, condition 10⁶ / condition 1:", verdict(ratio, 2, at_least=False))
        print(f"leverage_scores, condition 10⁶ / {REAL}: {hard / times['leverage_scores', REAL]:.2f}")


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
    parts = ("blas", "columns", "kinds", "memory")
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-svd", action="store_true")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    if "blas" in options.only:
        against_blas(options.rows, options.rounds, not options.no_svd)
    if "columns" in options.only:
        many_columns(options.rounds)
    if "kinds" in options.only:
        kinds(options.rows, options.rounds)
    if "memory" in options.only:
        memory(options.rows)


if __name__ == "__main__":
    main()
