"""Seconds that the first call of each public function takes beyond ``import numpy``: cold, and in a later process.

Each runs in a fresh interpreter: with an empty cache of compiled code, and then with what that left. The import of
levattn counts, and that of levattn.attention for its functions. Bars: cold 3 s for scores, sets and heavy attention
and 5 s for all others; 0.3 s in a later process.
After `make kernels` it is as from a wheel with compiled kernels: 0.5 s cold for scores, sets and heavy attention.

    python examples/benchmarks/first_call.py
    python examples/benchmarks/first_call.py --only universal_set latte
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

from _rivals import table

from levattn._kernels.cache import _archive

MAIN = ("leverage_scores", "universal_set", "heavy_attention")
MAIN_BAR, BAR, WARM_BAR, WHEEL_BAR = 3.0, 5.0, 0.3, 0.5

FEW = "levattn.attention.Selection(size=64, summaries=8)"

# Keys K (20 000, 64) in float32, sequences X (1, 600, 64)
CALLS = {
    "leverage_scores": "levattn.leverage_scores(K)",
    "leverage_scores, float64": "levattn.leverage_scores(K.astype('float64'))",
    "leverage_scores, float16": "levattn.leverage_scores(K.astype('float16'))",
    "leverage_scores, qr": "levattn.leverage_scores(K, method='qr')",
    "leverage_scores, srht": "levattn.leverage_scores(K, method='srht')",
    "leverage_scores, countsketch": "levattn.leverage_scores(K, method='countsketch')",
    "leverage_scores, sparse": "levattn.leverage_scores(scipy.sparse.csr_array(K[:, :8]))",
    "universal_set": "levattn.universal_set(K, 0.1)",
    "universal_set, float64": "levattn.universal_set(K.astype('float64'), 0.1)",
    "universal_set, Huber": "levattn.universal_set(K, 0.1, f=levattn.Huber())",
    "heavy_attention": "levattn.heavy_attention(K[:10], K, 0.1)",
    "heavy_attention, causal": "levattn.causal_heavy_attention(K[:500], K[:500], 0.1)",
    "StreamingUniversalSet": "levattn.StreamingUniversalSet(0.1).update(K).result()",
    "CausalUniversalSet": "levattn.CausalUniversalSet(0.1).update(K).heavy(K[:10])",
    "two passes": "levattn.universal_set(lambda: iter([K]), 0.1)",
    "online_leverage_scores": "levattn.online_leverage_scores(K[:1000])",
    "sensitivities": "levattn.sensitivities(K, 1)",
    "exact_sensitivities": "levattn.exact_sensitivities(K[:50, :3], 1)",
    "lewis_weights": "levattn.lewis_weights(K, 1)",
    "group_leverage": "levattn.group_leverage(K, np.arange(len(K)) // 10)",
    "sketch.SketchedRows": (
        "levattn.sketch.SketchedRows(levattn.sketch.Sketch(levattn.sketch.GaussianJL(256)), 64).update(K)"
    ),
    "near_duplicates": "levattn.near_duplicates(K[:500])",
    "states.Moments": "levattn.states.Moments(64).update(K).factor()",
    "states.SoftmaxState": "levattn.states.SoftmaxState(64, 64).update(K[:600], K[:600])",
    "states.TokenState": "levattn.states.TokenState(levattn.states.Moments(64, (1,), diagonal=True).update(X))",
    "attention.latte": "levattn.attention.latte(X, X, X)",
    "attention.macchiato": "levattn.attention.macchiato(X, X, X, (X, X, X[..., 0]), 64)",
    "attention.window_attention": "levattn.attention.window_attention(X, X, X, window=64)",
    "attention.memberships": "levattn.attention.memberships(X[None])",
    "attention.tssa": "levattn.attention.tssa(X[None])",
    "attention.rg_lru": "levattn.attention.rg_lru(X, X, X, K[0])",
    "attention.causal_conv": "levattn.attention.causal_conv(X, K[:4].T)",
    "attention.repeated_mass": "levattn.attention.repeated_mass(X, X, X[..., 0], window=64)",
    "attention.rotate_values": "levattn.attention.rotate_values(X, np.arange(600))",
    "attention.pruned_attention": f"levattn.attention.pruned_attention(X, X, X, {FEW})",
    "attention.causal_pruned_attention": f"levattn.attention.causal_pruned_attention(X, X, X, {FEW})",
}

PROGRAM = """
import json, resource, time
import numpy as np
{before}
begin, spent = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
import {package}
rng = np.random.default_rng(0)
K = rng.standard_normal((20_000, 64), dtype=np.float32)
X = K[None, :600]
{call}
now = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([time.perf_counter() - begin, now.ru_utime + now.ru_stime - spent.ru_utime - spent.ru_stime]))
"""


def seconds(call: str, cache: str) -> tuple[float, float]:
    """Seconds on the clock, and of processors."""
    package = "levattn.attention" if "attention." in call else "levattn"
    code = PROGRAM.format(call=call, before="import scipy.sparse" if "scipy" in call else "", package=package)
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's Python keeps what it made of a module
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    wall, cpu = json.loads(done.stdout)
    return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="calls whose names begin so")
    only = tuple(parser.parse_args().only or [""])
    main_bar = MAIN_BAR if _archive() is None else WHEEL_BAR
    rows = []
    for name, call in CALLS.items():
        if not name.startswith(only):
            continue
        with tempfile.TemporaryDirectory() as cache:
            cold, cpu = seconds(call, cache)
            warm = sorted(seconds(call, cache)[0] for _ in range(3))[1]
            kernels = sum(file.endswith(".nbc") for _, _, files in os.walk(cache) for file in files)
        bar = main_bar if name in MAIN else BAR
        met = "met" if cold <= bar and warm <= WARM_BAR else "MISSED"
        rows.append([name, f"{cold:.2f}", f"{cpu:.2f}", str(kernels), f"{warm:.2f}", f"{bar:g} s: {met}"])
    table(["first call", "cold s", "CPU s", "kernels", "later s", "bar"], rows)
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
