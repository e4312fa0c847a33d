"""Cost against n and against the number of threads.

Bars: linear in n from 10⁴ to 4·10⁶ (time per row within a factor of two), and from n = 65 536 on at least 1.6 times
faster on two threads than on one.

    python examples/benchmarks/scaling.py [--rounds 7]
"""

from __future__ import annotations

import argparse

import numpy as np
from _rivals import Array, interleaved, table

import levattn


def limited(K: Array, threads: int) -> None:
    with levattn.thread_limit(threads):
        levattn.leverage_scores(K)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    rows = []
    rng = np.random.default_rng(0)
    for dtype in ("float32", "float64"):
        for n in (10_000, 65_536, 262_144, 1_000_000, 4_000_000):
            K = rng.standard_normal((n, 64), dtype=np.float32).astype(dtype)
            calls = max(1, 200_000 // n)
            times = interleaved(
                {
                    str(t): lambda K=K, t=t, calls=calls: [limited(K, t) for _ in range(calls)]  # type: ignore[misc]
                    for t in (1, 2)
                },
                rounds,
            )
            one, two = (times[t] / calls for t in ("1", "2"))
            rows.append([dtype, str(n), f"{1e9 * one / n:.1f}", f"{1e9 * two / n:.1f}", f"{one / two:.2f}"])
    table(["dtype", "n", "ns a row, 1 thread", "2 threads", "1 / 2"], rows)


if __name__ == "__main__":
    main()
