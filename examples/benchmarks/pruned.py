"""Pruned attention on the CPU against dense attention: torch's scaled_dot_product_attention on the same values.

Float32 arrays of 12 heads with d = 64, random ones or ("heads") queries, keys and values of recorded encoder heads
with noise, and 512 slots a query, the selection included. The bars are of the speed of dense attention: both ways 1
time at n = 2048 and 4 times at n = 8192, from numpy and from torch; causal 1 time at n = 2048 and 2 times at n = 8192.
A step of decoding does not depend on how many positions there were.

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
from levattn.attention import Selection, causal_pruned_attention, pruned_attention
from levattn.datasets import minilm

HEADS, D, SLOTS = 12, 64, 512
BARS = {"both ways": {2048: 1.0, 8192: 4.0}, "causal": {2048: 1.0, 8192: 2.0}}
STEPS = 256  # of decoding, with one selection among them
PAUSE, WARM = 0.12, 0.08


def arrays(n: int) -> Any:
    """Return queries, keys and values as one array of numpy."""
    return np.random.default_rng(0).standard_normal((3, HEADS, n, D)).astype(np.float32)


def heads(n: int) -> Any:
    """Return the same of encoder heads of 512 tokens and 32 channels: again and again with noise, two heads in one."""
    found = minilm()
    rng = np.random.default_rng(0)
    parts = [np.asarray(X, np.float32)[1:3] for X in (found.queries, found.keys, found.values)]
    X = np.stack([np.concatenate([*part], axis=-1) for part in parts])  # (3, 12, 512, 64)
    X[0] *= found.scale * D**0.5
    X = np.tile(X, (1, 1, -(-n // X.shape[2]), 1))[:, :, :n]
    noise = rng.standard_normal(X.shape, dtype=np.float32)
    return np.ascontiguousarray(X + 0.2 * X.std(axis=2, keepdims=True) * noise)


def dense(X: Any, *, causal: bool = False) -> Callable[[], object]:
    q, k, v = torch.from_numpy(X)[:, None]
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def whole(lengths: list[int], rounds: int) -> None:
    rows, told = [], []
    for n in lengths:
        X = arrays(n)
        given = np.random.default_rng(1).standard_normal((HEADS, n)).astype(np.float32)
        tensors = torch.from_numpy(X)
        calls: dict[str, Callable[[], object]] = {
            "dense": dense(X),
            "pruned": lambda X=X: pruned_attention(*X, SLOTS),
            "of tensors": lambda X=tensors: pruned_attention(*X, SLOTS),
            # the same slots, but neither scores nor clusters to find: what is left is the mixture
            "chosen": lambda X=X, given=given: pruned_attention(
                *X, Selection(size=SLOTS - 17, summaries=0, window=8, scores=given)
            ),
        }
        times = interleaved(calls, rounds, PAUSE, WARM)
        ratio = times["dense"] / times["pruned"]
        share = max(0.0, 1 - times["chosen"] / times["pruned"])
        rows.append([str(n), *(f"{s:.3f}" for s in times.values()), f"{ratio:.2f}", f"{100 * share:.0f} %"])
        told += [
            f"both ways, n = {n}, {name}: {verdict(times['dense'] / times[name], bar)}"
            for name in ("pruned", "of tensors")
            for bar in (BARS["both ways"].get(n),)
            if bar is not None
        ]
    print(f"\n{HEADS} heads, d = {D}, {SLOTS} slots: seconds")
    table(["n", *calls, "dense / pruned", "selection"], rows)
    print(*told, sep="\n")


def causal(lengths: list[int], rounds: int) -> None:
    rows, told = [], []
    for n in lengths:
        for name, made in (("random", arrays), ("heads", heads)):
            X = made(n)
            tensors = torch.from_numpy(X)
            calls: dict[str, Callable[[], object]] = {
                "dense": dense(X, causal=True),
                "pruned": lambda X=X: causal_pruned_attention(*X, SLOTS),
                "of tensors": lambda X=tensors: causal_pruned_attention(*X, SLOTS),
            }
            times = interleaved(calls, rounds, PAUSE, WARM)
            ratio = times["dense"] / times["pruned"]
            rows.append([str(n), name, *(f"{s:.3f}" for s in times.values()), f"{ratio:.2f}"])
            if n in BARS["causal"]:
                told.append(f"causal, n = {n}, {name}: {verdict(ratio, BARS['causal'][n])}")
    print(f"\ncausal, {HEADS} heads, d = {D}, {SLOTS} slots: seconds")
    table(["n", "keys", *calls, "dense / pruned"], rows)
    print(*told, sep="\n")


def decoding(lengths: list[int], rounds: int) -> None:
    """One position after the other: dense attention reads all keys before it, pruned attention its state."""
    rows = []
    for n in lengths:
        X = arrays(n + STEPS)
        _, state = causal_pruned_attention(*X[:, :, :n], SLOTS, return_state=True)
        steps = [X[:, :, i : i + 1] for i in range(n, n + STEPS)]
        q, k, v = torch.from_numpy(X)[:, None]

        def pruned(steps: Any = steps, state: Any = state) -> None:
            for x in steps:
                _, state = causal_pruned_attention(*x, state, return_state=True)

        def full(q: Any = q, k: Any = k, v: Any = v, n: int = n) -> None:
            for i in range(n, n + STEPS):
                torch.nn.functional.scaled_dot_product_attention(
                    q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]
                )

        times = interleaved({"dense": full, "pruned": pruned}, rounds, PAUSE, WARM)
        rows.append([str(n), *(f"{1e3 * s / STEPS:.3f}" for s in times.values()), f"{state.nbytes / 2**20:.1f}"])
    print(f"\na step of decoding after n positions, mean of {STEPS} with one selection: milliseconds")
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
