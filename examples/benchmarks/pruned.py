"""Pruned attention on the CPU against dense attention: torch's scaled_dot_product_attention on the same values.

Random float32 arrays of 12 heads with d = 64, and 512 slots a query. The bar: at n = 8192, not causal, at least 4
times as fast as dense attention with the selection included, from numpy and from torch. Causal attention renews the
selection every 64 positions; a step of decoding does not depend on how many positions there were.

    python examples/benchmarks/pruned.py [--rounds 5] [--threads 1 2] [--lengths 2048 8192 32768]
        [--only whole causal decoding]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _rivals import THREADS, interleaved, table, verdict

import levattn
from levattn.attention import pruned_attention

HEADS, D, SLOTS = 12, 64, 512
BAR = 8192, 4.0
STEPS = 64  # of decoding, with one renewal of the selection among them
PAUSE, WARM = 0.12, 0.08


def arrays(n: int) -> Any:
    """Return queries, keys and values as one array of numpy."""
    return np.random.default_rng(0).standard_normal((3, HEADS, n, D)).astype(np.float32)


def dense(X: Any, *, causal: bool = False) -> Callable[[], object]:
    q, k, v = torch.from_numpy(X)[:, None]
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def whole(lengths: list[int], rounds: int) -> None:
    rows = []
    for n in lengths:
        X = arrays(n)
        given = np.random.default_rng(1).standard_normal((HEADS, n)).astype(np.float32)
        tensors = torch.from_numpy(X)
        calls: dict[str, Callable[[], object]] = {
            "dense": dense(X),
            "pruned": lambda X=X: pruned_attention(*X, budget=SLOTS),
            "of tensors": lambda X=tensors: pruned_attention(*X, budget=SLOTS),
            # the same slots, but neither scores nor clusters to find: what is left is the mixture
            "chosen": lambda X=X, given=given: pruned_attention(
                *X, size=SLOTS - 17, window=8, scores=given, summaries=0
            ),
        }
        times = interleaved(calls, rounds, PAUSE, WARM)
        ratio = times["dense"] / times["pruned"]
        share = max(0.0, 1 - times["chosen"] / times["pruned"])
        rows.append([str(n), *(f"{s:.3f}" for s in times.values()), f"{ratio:.2f}", f"{100 * share:.0f} %"])
        if n == BAR[0]:
            bars = [verdict(times["dense"] / times[name], BAR[1]) for name in ("pruned", "of tensors")]
    print(f"\n{HEADS} heads, d = {D}, {SLOTS} slots: seconds")
    table(["n", *calls, "dense / pruned", "selection"], rows)
    if BAR[0] in lengths:
        print(f"dense / pruned at n = {BAR[0]}, numpy: {bars[0]}; tensors: {bars[1]}")


def causal(lengths: list[int], rounds: int) -> None:
    rows = []
    for n in lengths:
        X = arrays(n)
        calls: dict[str, Callable[[], object]] = {
            "dense": dense(X, causal=True),
            "pruned": lambda X=X: pruned_attention(*X, budget=SLOTS, causal=True),
        }
        times = interleaved(calls, rounds, PAUSE, WARM)
        rows.append([str(n), *(f"{s:.3f}" for s in times.values()), f"{times['dense'] / times['pruned']:.2f}"])
    print(f"\ncausal, {HEADS} heads, d = {D}, {SLOTS} slots: seconds")
    table(["n", *calls, "dense / pruned"], rows)


def decoding(lengths: list[int], rounds: int) -> None:
    """One position after the other: dense attention reads all keys before it, pruned attention its state."""
    rows = []
    for n in lengths:
        X = arrays(n + STEPS)
        _, state = pruned_attention(*X[:, :, :n], budget=SLOTS, causal=True, return_state=True)
        steps = [X[:, :, i : i + 1] for i in range(n, n + STEPS)]
        q, k, v = torch.from_numpy(X)[:, None]

        def pruned(steps: Any = steps, state: Any = state) -> None:
            for x in steps:
                _, state = pruned_attention(*x, causal=True, state=state, return_state=True)

        def full(q: Any = q, k: Any = k, v: Any = v, n: int = n) -> None:
            for i in range(n, n + STEPS):
                torch.nn.functional.scaled_dot_product_attention(
                    q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]
                )

        times = interleaved({"dense": full, "pruned": pruned}, rounds, PAUSE, WARM)
        rows.append([str(n), *(f"{1e3 * s / STEPS:.3f}" for s in times.values()), f"{state.nbytes / 2**20:.1f}"])
    print(f"\na step of decoding after n positions, mean of {STEPS} with one renewal: milliseconds")
    table(["n", "dense", "pruned", "state, MiB"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, THREADS}))
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--only", nargs="+", default=["whole", "causal", "decoding"])
    options = parser.parse_args()
    for threads in options.threads:
        print(f"\n-- {threads} threads")
        torch.set_num_threads(threads)
        with levattn.thread_limit(threads), torch.no_grad():
            for part in (whole, causal, decoding):
                if part.__name__ in options.only:
                    part(options.lengths, options.rounds)


if __name__ == "__main__":
    main()
