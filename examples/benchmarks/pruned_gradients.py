"""Pruned attention with gradients on the CPU, forward and backward, against dense attention of torch.

Float32 tensors of 12 heads with d = 64 and 256 slots a query, the selection included, which has no gradient. The bar
is 1.3 times dense attention at n = 1024, both ways, and less at n = 4096. Dense causal attention does half the work.

    python examples/benchmarks/pruned_gradients.py [--rounds 7] [--threads 1 2] [--lengths 1024 4096]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _rivals import THREADS, interleaved, table, verdict

import levattn
from levattn.attention import causal_pruned_attention, pruned_attention

HEADS, D, SLOTS = 12, 64, 256
BARS = {1024: 1.3, 4096: 1.0}  # times dense attention, both ways
PAUSE, WARM = 0.12, 0.08


def attend(*arrays: Any, causal: bool) -> Any:
    return causal_pruned_attention(*arrays, SLOTS) if causal else pruned_attention(*arrays, SLOTS)


def both(attend: Callable[..., Any], leaves: Any, direction: Any) -> None:
    """Take the gradients of one call."""
    torch.autograd.grad(attend(*leaves), leaves, direction)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, THREADS}))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(BARS))
    options = parser.parse_args()
    for threads in options.threads:
        torch.set_num_threads(threads)
        rows, told = [], []
        for n in options.lengths:
            X = torch.randn(4, 1, HEADS, n, D, generator=torch.Generator().manual_seed(0))
            leaves = [x.clone().requires_grad_() for x in X[:3]]
            for causal in (False, True):
                pruned = partial(attend, causal=causal)
                dense = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=causal)
                calls: dict[str, Callable[[], object]] = {
                    "dense": partial(both, dense, leaves, X[3]),
                    "pruned": partial(both, pruned, leaves, X[3]),
                    "dense, forward": partial(dense, *leaves),
                    "pruned, forward": partial(pruned, *leaves),
                }
                with levattn.thread_limit(threads):
                    times = interleaved(calls, options.rounds, PAUSE, WARM)
                ratio = times["pruned"] / times["dense"]
                form = "causal" if causal else "both ways"
                rows.append([str(n), form, *(f"{s:.3f}" for s in times.values()), f"{ratio:.2f}"])
                if not causal and n in BARS:
                    # of speeds, as of all verdicts: at least 1 / bar
                    told.append(f"{form}, n = {n}: {verdict(1 / ratio, 1 / BARS[n])}")
        print(f"\n-- {threads} threads: {HEADS} heads, d = {D}, {SLOTS} slots, with gradients: seconds")
        table(["n", "", *calls, "pruned / dense"], rows)
        print(*told, sep="\n")


if __name__ == "__main__":
    main()
