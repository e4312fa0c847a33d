"""How many keys of a real encoder softmax certificates keep, for the queries that the model really sends.

For each of 72 heads the queries lie in a ball (of their largest norm) and in an ellipsoid (of their second moment,
wide enough for all of them). A key is kept if its certified sensitivity is at least ε; "heavy" keys really receive a
softmax score of at least ε from a query of the text, so no certified set has fewer keys than these.

    python examples/benchmarks/softmax_sets.py [--epsilon 0.05]
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np
from _rivals import table, verdict

import levattn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=0.05)
    epsilon = parser.parse_args().epsilon
    encoder = levattn.datasets.minilm()
    layers, heads = encoder.keys.shape[:2]
    kept: dict[str, list[float]] = {}
    missed = 0
    for place in itertools.product(range(layers), range(heads)):
        Q = np.asarray(encoder.queries[place], np.float64) * encoder.scale
        K = np.asarray(encoder.keys[place], np.float64)
        Z = Q @ K.T
        P = np.exp(Z - Z.max(axis=1, keepdims=True))
        P /= P.sum(axis=1, keepdims=True)
        heavy = (epsilon <= P).any(axis=0)
        moment = Q.T @ Q / len(Q)
        reach = np.sqrt(np.einsum("ij,jk,ik->i", Q, np.linalg.inv(moment), Q).max())
        shapes = {
            "ball": levattn.Softmax(np.linalg.norm(Q, axis=1).max() * (1 + 1e-9)),
            "ellipsoid": levattn.Softmax(reach * (1 + 1e-9), moment),
        }
        kept.setdefault("heavy", []).append(float(heavy.mean()))
        for shape, f in shapes.items():
            for method in ("jensen", "ball"):
                upper = levattn.sensitivities(K, f, method=method, epsilon=epsilon).upper
                missed += int(np.count_nonzero(heavy & (upper < epsilon)))
                kept.setdefault(f"{shape}, {method}", []).append(float((upper >= epsilon).mean()))
    rows = [[n, f"{np.mean(v):.1%}", f"{np.min(v):.1%}", f"{np.max(v):.1%}"] for n, v in kept.items()]
    table(["keys", "mean of heads", "least", "most"], rows)
    best = min(float(np.mean(v)) for name, v in kept.items() if name != "heavy")
    print("share of the keys in the smallest certified set:", verdict(best, 0.3, at_least=False))
    print("heavy keys missed:", missed)


if __name__ == "__main__":
    main()
