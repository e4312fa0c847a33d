"""What expected scores cost beside leverage scores: x² and normal queries, by their second moment.

Bar: at most 1.3 times the time of `leverage_scores` of the same keys (n = 10⁶, d = 64). Keys are Gaussian, or have
the mean and covariance of two heads of the packaged encoder side by side.

    python examples/benchmarks/expected.py [--rows 1000000] [--rounds 7]
"""

from __future__ import annotations

import argparse

import numpy as np
from _rivals import Array, interleaved, table, verdict

import levattn


def heads() -> tuple[Array, Array]:
    """Keys and queries of two heads side by side, (512, 64)."""
    encoder = levattn.datasets.minilm()
    keys, queries = (np.asarray(x[2, 4:6], np.float64) for x in (encoder.keys, encoder.queries))
    return np.concatenate(list(keys), axis=1), np.concatenate(list(queries), axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rng, rows, worst = np.random.default_rng(0), [], 0.0
    real, Q = heads()
    for name in ("Gaussian", "as of real heads"):
        K = rng.standard_normal((options.rows, 64))
        if name != "Gaussian":
            K = real.mean(axis=0) + K @ np.linalg.cholesky(np.cov(real.T)).T
        for dtype in ("float32", "float64"):
            keys = K.astype(dtype)
            times = interleaved(
                {
                    "leverage": lambda keys=keys: levattn.leverage_scores(keys),
                    "expected": lambda keys=keys: levattn.expected_scores(keys, Q),
                },
                options.rounds,
            )
            ratio = times["expected"] / times["leverage"]
            worst = max(worst, ratio)
            rows.append([f"{name}, {dtype}", *(f"{1e3 * s:.1f} ms" for s in times.values()), f"{ratio:.2f}"])
    table(["keys", *times, "ratio"], rows)
    print("expected scores over leverage scores:", verdict(worst, 1.3, at_least=False))


if __name__ == "__main__":
    main()
