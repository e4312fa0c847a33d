"""Memory of Latte: numbers that a call takes for each position and head, its arguments and results among them.

Bars: 2L + 2D forward (logits, values, output) and twice that backward (the gradient of each as well), with at most a
tenth more: linear in T, and nothing of T × L × D or T × T.

    python examples/benchmarks/latte_memory.py
"""

from __future__ import annotations

import argparse
import tracemalloc
from collections.abc import Callable

import numpy as np
from _rivals import table, verdict

from levattn._kernels import LatentArguments, kernels_for
from levattn.attention import latte

HEADS, D = 4, 64


def peak(call: Callable[[], object]) -> int:
    call()
    tracemalloc.start()
    call()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def numbers(L: int, T: int) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    Q, K = rng.standard_normal((2, HEADS, T, L), np.float32)
    V = rng.standard_normal((HEADS, T, D), np.float32)
    x = LatentArguments(Q, K, V, np.array([0, T]), True)
    forward = peak(lambda: latte(Q, K, V)) / (4 * HEADS * T)
    backward = peak(lambda: kernels_for("latent", Q).backward(x, V)) / (4 * HEADS * T)
    return 2 * L + D + forward, 2 * L + 2 * D + D + backward  # backward has the output and its gradient as well


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows, worst = [], 0.0
    for L in (16, 64, 128):
        for T in (16_384, 65_536, 262_144):
            forward, backward = numbers(L, T)
            bar = 2 * L + 2 * D
            worst = max(worst, forward / bar, backward / (2 * bar))
            rows.append([str(L), str(T), f"{forward:.1f}", str(bar), f"{backward:.1f}", str(2 * bar)])
    print(f"float32 numbers a position and head, D = {D}")
    table(["L", "T", "forward", "bar", "backward", "bar"], rows)
    print("largest ratio:", verdict(worst, 1.1, at_least=False))


if __name__ == "__main__":
    main()
