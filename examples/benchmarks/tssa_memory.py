"""Memory of token statistics attention: numbers that a call takes for each channel of a token, arguments and results
among them.

Bar: at most 1.2 times the tokens and the output (2 numbers); nothing of the size of the tokens besides, and as many at
any T. Backward are the tokens, the output and the gradients of both (4).

    python examples/benchmarks/tssa_memory.py
"""

from __future__ import annotations

import argparse
import tracemalloc
from collections.abc import Callable

import numpy as np
from _rivals import table, verdict

from levattn._kernels import TokenArguments, kernels_for
from levattn.attention import tssa

FORMS = {
    "released": {},
    "released, not causal": {"causal": False},
    "paper": {"form": "norm"},
    "paper, not causal": {"form": "norm", "causal": False},
}
SHAPES = ((8, 1024, 12, 64), (1, 65_536, 12, 64), (1, 262_144, 4, 64))


def peak(call: Callable[[], object]) -> int:
    call()
    tracemalloc.start()
    call()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def numbers(name: str, shape: tuple[int, int, int, int]) -> tuple[float, float]:
    B, T, heads, d = shape
    W = np.random.default_rng(0).standard_normal((B, T, heads, d), np.float32).transpose(0, 2, 1, 3)
    options = FORMS[name]
    x = TokenArguments(
        *(W, np.ones((B, heads), np.float32), None, np.array([0, T]), options.get("causal", True)),
        "norm" if options.get("form") else "diagonal",
    )
    forward = peak(lambda: tssa(W, **options)) / (4 * W.size)
    backward = peak(lambda: kernels_for("tokens", W).backward(x, W)) / (4 * W.size)
    return 1 + forward, 3 + backward  # backward has the output and its gradient as well


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows, worst = [], 0.0
    for name in FORMS:
        for shape in SHAPES:
            forward, backward = numbers(name, shape)
            worst = max(worst, forward / 2)
            rows.append([name, " x ".join(map(str, shape)), f"{forward:.3f}", f"{backward:.3f}"])
    print("float32 numbers a channel of a token: 2 and 4 are what comes in and goes out")
    table(["form", "B x T x heads x d", "forward", "backward"], rows)
    print("largest forward / (input and output):", verdict(worst, 1.2, at_least=False))


if __name__ == "__main__":
    main()
