"""The working tree against an earlier checkout of the project: how much time each call takes of what it took.

Two processes, one for each, take turns on the same arrays; a ratio is the median of those of the rounds. For a
checkout of an earlier commit:

    git worktree add ../before COMMIT

The first run compiles the kernels of both, which takes minutes. Bar: at most 1.03 times the time, with equal sets.

    python examples/benchmarks/before.py ../before [--rounds 15] [--threads 1] [--cases "heavy float64" ...]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

BAR = 1.03
LEAST = 0.03  # seconds that a timing lasts at least
Array = np.ndarray


def gaussian(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def planted(n: int, d: int) -> Array:
    """Gaussian keys, of which 50 are longer and so heavy for some query."""
    K = gaussian(n, d, seed=n)
    K[np.random.default_rng(1).choice(n, 50, replace=False)] *= np.sqrt(0.01 * n)
    return K


def calls() -> dict[str, Callable[[], object]]:
    """Return what is timed, by name; no more than the earlier checkouts have as well."""
    import levattn

    heads = levattn.datasets.minilm()
    queries, keys, values = (x.astype(np.float32) for x in (heads.queries, heads.keys, heads.values))
    head, asked = keys[2, 5], queries[2, 5]
    scored, exact = gaussian(200_000, 64).astype(np.float32), gaussian(100_000, 64)
    batch, small = gaussian(12, 4096, 64).astype(np.float32), gaussian(512, 64).astype(np.float32)
    many, few = planted(100_000, 64), gaussian(2000, 64)
    many32, few32 = many.astype(np.float32), few.astype(np.float32)
    chosen, chosen32 = levattn.universal_set(many, 0.05), levattn.universal_set(many32, 0.05)
    of_heads = [levattn.universal_set(K, 0.1) for K in keys[2]]
    row = gaussian(2, 4096, 64, seed=3)
    parts = gaussian(3, 4, 4096, 64).astype(np.float32)

    def pruned(*arrays: Array, slots: int) -> object:
        attention = levattn.attention
        if hasattr(attention, "causal_pruned_attention"):
            return attention.causal_pruned_attention(*arrays, slots)
        return attention.pruned_attention(*arrays, budget=slots, causal=True)  # as earlier commits spell it

    def stream(chunks: Array, epsilon: float) -> Callable[[], object]:
        def run() -> object:
            state = levattn.StreamingUniversalSet(epsilon)
            for chunk in chunks:
                state.update(chunk)
            return state.result()

        return run

    # an earlier checkout may have it as an option
    causal = getattr(levattn, "causal_heavy_attention", None) or partial(levattn.heavy_attention, causal=True)

    return {
        "scores float32": lambda: levattn.leverage_scores(scored),
        "set float64": lambda: levattn.universal_set(exact, 0.05),
        "set of a batch": lambda: levattn.universal_set(batch, 0.05),
        "sets of real heads": lambda: levattn.universal_set(keys, 0.1),
        "small set": lambda: levattn.universal_set(small, 0.2),
        "stream": stream(exact[:65536].astype(np.float32).reshape(16, 4096, 64), 0.05),
        "stream of real heads": stream(keys, 0.1),
        "online scores": lambda: levattn.online_leverage_scores(batch[:4]),
        "heavy float64": lambda: levattn.heavy_attention(few, many, 0.05, universal=chosen),
        "heavy float32": lambda: levattn.heavy_attention(few32, many32, 0.05, universal=chosen32),
        "heavy of real heads": lambda: [
            levattn.heavy_attention(q, k, 0.1, universal=u)
            for q, k, u in zip(queries[2], keys[2], of_heads, strict=True)
        ],
        "causal": lambda: causal(*row, 0.05),
        "causal of a real head": lambda: causal(asked, head, 0.1),
        "pruned causal": lambda: pruned(*parts, slots=256),
        "pruned causal, real heads": lambda: pruned(queries[2], keys[2], values[2], slots=64),
        "approximate set": lambda: levattn.universal_set(exact, 0.05, method="countsketch"),
    }


def results() -> str:
    """Return a hash of the sets of the packaged heads and of planted keys."""
    import levattn

    digest = hashlib.sha256()
    keys = levattn.datasets.minilm().keys
    for (layer, head), epsilon in product(np.ndindex(keys.shape[:2]), (0.05, 0.1, 0.2)):
        digest.update(levattn.universal_set(keys[layer, head], epsilon).indices.tobytes())
    for (n, d), dtype in product([(5000, 16), (20_000, 64)], ("float32", "float64")):
        digest.update(levattn.universal_set(planted(n, d).astype(dtype), 0.05).indices.tobytes())
    return digest.hexdigest()


def serve() -> None:
    """Time the calls that are asked for on standard input; answer with seconds.

    On one thread these are seconds of the processor, which other processes disturb less.
    """
    import levattn

    known = calls()
    clock = time.process_time if os.environ["OMP_NUM_THREADS"] == "1" else time.perf_counter
    print(json.dumps([str(Path(levattn.__file__).parents[1]), results(), list(known)]), flush=True)
    for line in sys.stdin:
        name, count = line.rstrip().rsplit(" ", 1)
        start = clock()
        for _ in range(int(count)):
            known[name]()
        print((clock() - start) / int(count), flush=True)


class Worker:
    """A process that imports one checkout."""

    def __init__(self, checkout: Path, threads: int) -> None:
        limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), str(threads))
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env={**os.environ, **limits, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.checkout = checkout

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.checkout} failed")
        return line.rstrip()

    def seconds(self, name: str, count: int) -> float:
        assert self.process.stdin is not None
        print(name, count, file=self.process.stdin, flush=True)
        return float(self.answer())


def main() -> None:
    from _rivals import table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", nargs="+", help="all if left out")
    options = parser.parse_args()
    here = Path(__file__).resolve().parents[2]
    before, now = workers = [Worker(path.resolve(), options.threads) for path in (options.checkout, here)]
    sets = []
    for worker in workers:
        imported, found, cases = json.loads(worker.answer())
        if Path(imported) != worker.checkout:
            raise SystemExit(f"the process of {worker.checkout} imported {imported}")
        sets.append(found)
    rows = []
    for name in options.cases or cases:
        for worker in workers:
            worker.seconds(name, 1)  # compiles
        count = max(1, round(LEAST / min(worker.seconds(name, 2) for worker in workers)))
        pairs = []
        for i in range(options.rounds):
            first, second = (before, now) if i % 2 else (now, before)
            times = {first: first.seconds(name, count), second: second.seconds(name, count)}
            pairs.append((times[before], times[now]))
        ratio = statistics.median(b / a for a, b in pairs)
        medians = (f"{1e3 * statistics.median(side):.3f}" for side in zip(*pairs, strict=True))
        rows.append([name, *medians, f"{ratio:.3f}", "met" if ratio <= BAR else "MISSED"])
    table(["", "before, ms", "now, ms", "now / before", f"bar {BAR}"], rows)
    print("sets of real heads and planted keys:", "the same" if sets[0] == sets[1] else "DIFFERENT")


if __name__ == "__main__":
    serve() if "--serve" in sys.argv else main()
