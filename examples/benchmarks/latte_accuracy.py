"""Accuracy of Latte in float32 over long sequences, against float64.

Values are random or all the same; logits of scale 0 are all equal, which is the worst case: every addition is rounded
in the same direction. Bar: causal output within 1e-5 relative at T = 10⁶.

    python examples/benchmarks/latte_accuracy.py [--positions 10000 1000000 10000000]
"""

from __future__ import annotations

import argparse

import numpy as np
from _rivals import Array, table, verdict

from levattn.attention import latte


def error(Q: Array, K: Array, V: Array, chunk: int | None = None) -> float:
    exact = latte(Q.astype(float), K.astype(float), V.astype(float))
    if chunk is None:
        return float(np.abs(latte(Q, K, V) / exact - 1).max())
    state, worst = None, 0.0
    for low in range(0, len(V), chunk):
        part = slice(low, low + chunk)
        Y, state = latte(Q[part], K[part], V[part], state=state, return_state=True)
        worst = max(worst, float(np.abs(Y / exact[part] - 1).max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    options = parser.parse_args()
    rows, at_million = [], 0.0
    for T in options.positions:
        for scale in (0, 1, 30, 300):
            rng = np.random.default_rng(0)
            Q, K = scale * rng.standard_normal((2, T, 4), np.float32)
            errors = []
            for V in (1 + rng.random((T, 2), np.float32), np.full((T, 1), 0.51, np.float32)):
                errors += [error(Q, K, V), error(Q, K, V, 1000)]
            rows.append([f"{T:,}", str(scale), *(f"{e:.1e}" for e in errors)])
            if T == 1_000_000:
                at_million = max(at_million, *errors)
    print("largest relative error of an output in float32, 4 latents")
    table(["T", "scale of the logits", "at once", "chunks of 1000", "constant values", "in chunks"], rows)
    print("T = 1,000,000:", verdict(at_million, 1e-5, at_least=False))


if __name__ == "__main__":
    main()
