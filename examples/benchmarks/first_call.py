"""Seconds from a fresh interpreter to the first scores: with an empty cache of compiled code, and with a warm one.

Bars: at most 10 s cold, 1 s warm (import included).

    python examples/benchmarks/first_call.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from _rivals import table

CALLS = {
    "leverage_scores, float32": "levattn.leverage_scores(K)",
    "leverage_scores, float64": "levattn.leverage_scores(K.astype('float64'))",
    "leverage_scores, float16": "levattn.leverage_scores(K.astype('float16'))",
    "universal_set, float32": "levattn.universal_set(K, 0.1)",
    "heavy_attention, float32": "levattn.heavy_attention(K[:10], K, 0.1)",
}


def seconds(call: str, cache: str) -> float:
    code = (
        "import time; start = time.perf_counter()\n"
        "import numpy as np, levattn\n"
        "K = np.random.default_rng(0).standard_normal((100_000, 64), dtype=np.float32)\n"
        f"{call}\nprint(time.perf_counter() - start)"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout)


def main() -> None:
    rows = []
    for name, call in CALLS.items():
        with tempfile.TemporaryDirectory() as cache:
            cold = seconds(call, cache)
            warm = sorted(seconds(call, cache) for _ in range(3))[1]
        rows.append([name, f"{cold:.2f}", f"{warm:.2f}", "met" if cold <= 10 and warm <= 1 else "MISSED"])
    table(["first call in a process", "cold s", "warm s", "bars 10 s, 1 s"], rows)


if __name__ == "__main__":
    main()
