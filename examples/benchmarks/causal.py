"""Causal heavy attention against the call that sees all keys, and its memory.

Bars at n = m = 131 072, d = 64, ε = 0.05: at most 3 times the time of the call that is not causal on the same queries
and keys; memory beyond input and output does not depend on n.

    python examples/benchmarks/causal.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import partial

import numpy as np
from _rivals import Array, interleaved, table, verdict

import levattn

D, EPSILON = 64, 0.05


def keys(n: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    K = rng.standard_normal((n, D), dtype=np.float32)
    K[:: n // 200] *= 30
    return rng.standard_normal((n, D), dtype=np.float32), K


def peak(n: int) -> tuple[int, int]:
    """Return by how many bytes the peak memory of a process grows in the call, and how many it returns."""
    code = (
        "import resource, sys, numpy as np, levattn\n"
        "sys.path.insert(0, 'examples/benchmarks'); import causal\n"
        "n = int(sys.argv[1]); Q, K = causal.keys(n)\n"
        "levattn.causal_heavy_attention(Q[:16384], K[:16384], 0.05)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "h = levattn.causal_heavy_attention(Q, K, 0.05)\n"
        "out = h.entries.data.nbytes * 2 + h.entries.indptr.nbytes + 3 * h.normalizers.nbytes\n"
        "print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), out)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(n)], capture_output=True, text=True, check=True)
    grown, out = map(int, done.stdout.split())
    return grown, out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    rows = []
    ratio = 0.0
    for n in (16_384, 131_072):
        Q, K = keys(n)
        times = interleaved(
            {
                "all keys": partial(levattn.heavy_attention, Q, K, EPSILON),
                "causal": partial(levattn.causal_heavy_attention, Q, K, EPSILON),
            },
            rounds,
        )
        found = levattn.causal_heavy_attention(Q, K, EPSILON)
        alive = 0 if found.alive is None else int(found.alive.max())
        ratio = times["causal"] / times["all keys"]
        rows.append(
            [str(n), *(f"{1e3 * t:.0f}" for t in times.values()), f"{ratio:.2f}", str(alive), f"{D / EPSILON:.0f}"]
        )
    table(["n = m", "all keys ms", "causal ms", "causal / all", "most alive", "d / ε"], rows)
    print("causal / all keys at n = 131072:", verdict(ratio, 3, at_least=False))
    for n in (131_072, 524_288):
        grown, out = peak(n)
        print(f"n = {n}: peak memory grew by {grown / 2**20:.0f} MiB; the output has {out / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
