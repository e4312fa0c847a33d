"""Cost against n and against the number of threads.

Bars, from n = 65 536 to 4·10⁶: linear in n (the slowest time per row at most twice the fastest), and at least 1.6
times faster on two threads than on one. At 10⁴ rows, what a call costs apart from its rows still shows; that ratio is
told without a bar.

    python examples/benchmarks/scaling.py [--rounds 7]
"""

from __future__ import annotations

import argparse

import numpy as np
from _rivals import Array, interleaved, table, verdict

import levattn

SHORT, *LONG = 10_000, 65_536, 262_144, 1_000_000, 4_000_000


def limited(K: Array, threads: int) -> None:
    with levattn.thread_limit(threads):
        levattn.leverage_scores(K)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    rows = []
    nanoseconds: dict[tuple[str, int], dict[int, float]] = {}  # of a row, by dtype and threads, then n
    rng = np.random.default_rng(0)
    for dtype in ("float32", "float64"):
        for n in (SHORT, *LONG):
            K = rng.standard_normal((n, 64), dtype=np.float32).astype(dtype)
            calls = max(1, 200_000 // n)
            times = interleaved(
                {
                    str(t): lambda K=K, t=t, calls=calls: [limited(K, t) for _ in range(calls)]  # type: ignore[misc]
                    for t in (1, 2)
                },
                rounds,
            )
            one, two = (1e9 * times[t] / calls / n for t in ("1", "2"))
            nanoseconds.setdefault((dtype, 1), {})[n] = one
            nanoseconds.setdefault((dtype, 2), {})[n] = two
            rows.append([dtype, str(n), f"{one:.1f}", f"{two:.1f}", f"{one / two:.2f}"])
    table(["dtype", "n", "ns a row, 1 thread", "2 threads", "1 / 2"], rows)
    print(f"\nns a row, slowest / fastest of n = {', '.join(map(str, LONG))}:")
    for (dtype, threads), by_n in nanoseconds.items():
        fastest = min(by_n[n] for n in LONG)
        ratio = max(by_n[n] for n in LONG) / fastest
        print(
            f"{dtype}, {threads} thread{'s' * (threads > 1)}:",
            verdict(ratio, 2, at_least=False),
            f"and n = {SHORT} / fastest: {by_n[SHORT] / fastest:.2f}",
        )
    print("\none thread / two threads, the least of the same n:")
    for dtype in ("float32", "float64"):
        gains = [nanoseconds[dtype, 1][n] / nanoseconds[dtype, 2][n] for n in LONG]
        print(f"{dtype}:", verdict(min(gains), 1.6))


if __name__ == "__main__":
    main()
