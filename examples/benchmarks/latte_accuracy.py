"""Accuracy of Latte in float32 over long sequences, against float64.

Bar: causal output within 1e-5, relative to the largest value that a row sees, at T = 10⁶.

    python examples/benchmarks/latte_accuracy.py [--positions 10000 1000000 10000000]
"""

from __future__ import annotations

import argparse

import numpy as np
from _rivals import table, verdict

from levattn.attention import latte


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    options = parser.parse_args()
    rows, at_million = [], 0.0
    for T in options.positions:
        for scale in (1, 30, 300):
            rng = np.random.default_rng(0)
            Q, K = scale * rng.standard_normal((2, T, 4), np.float32)
            V = 1 + rng.random((T, 2), np.float32)
            exact = latte(Q.astype(float), K.astype(float), V.astype(float))
            whole = np.abs(latte(Q, K, V) / exact - 1).max()
            state, parts = None, []
            for low in range(0, T, 1000):
                part = slice(low, low + 1000)
                Y, state = latte(Q[part], K[part], V[part], state=state, return_state=True)
                parts.append(Y)
            chunks = np.abs(np.concatenate(parts) / exact - 1).max()
            constant = np.abs(latte(Q, K, np.full_like(V, 0.3)) / np.float32(0.3) - 1).max()
            rows.append([f"{T:,}", str(scale), *(f"{e:.1e}" for e in (whole, chunks, constant))])
            if T == 1_000_000:
                at_million = max(at_million, whole, chunks)
    print("largest relative error of an output in float32, 4 latents")
    table(["T", "scale of the logits", "at once", "chunks of 1000", "constant values"], rows)
    print("T = 1,000,000:", verdict(at_million, 1e-5, at_least=False))


if __name__ == "__main__":
    main()
