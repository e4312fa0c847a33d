"""What the certificate of captured softmax mass is worth on real heads, and what it costs beside all logits.

For each of 72 heads and the queries that the model really sends: the true mass on universal sets of several sizes,
the certified lower and upper bound, and how many queries are certified to have at least half of their mass in the
set. Then the time of a query, once the set and its factor are known, against all logits by BLAS and their
exponentials; both run in blocks of queries, and the certificate includes its pass over the keys.

    python examples/benchmarks/softmax_mass.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import numpy as np
from _rivals import Array, interleaved, table

import levattn
from levattn.heavy.mass import softmax_mass

SIZES = (32, 64, 128, 256)


def exactly(Q: Array, K: Array, mask: Array, scale: float) -> Array:
    """The mass on the keys of the mask from all logits, 16 MB of them at a time."""
    out = np.empty(len(Q))
    step = max(1, (1 << 21) // len(K))
    order = np.concatenate([np.flatnonzero(mask), np.flatnonzero(~mask)])  # sums of slices, not of a mask
    sorted_, size = K[order], int(mask.sum())
    for start in range(0, len(Q), step):
        Z = (Q[start : start + step] * scale) @ sorted_.T
        Z -= Z.max(axis=1, keepdims=True)
        np.exp(Z, out=Z)
        inside = Z[:, :size].sum(axis=1)
        out[start : start + step] = inside / (inside + Z[:, size:].sum(axis=1))
    return out


def real_heads() -> None:
    encoder = levattn.datasets.minilm()
    layers, heads = encoder.keys.shape[:2]
    rows = []
    outside = 0
    for center, size in itertools.product((True, False), SIZES):
        truth, lower, upper = [], [], []
        for place in itertools.product(range(layers), range(heads)):
            Q, K = (np.asarray(x[place], np.float64) for x in (encoder.queries, encoder.keys))
            found = levattn.universal_set(K, size=size, center=center)
            mass = softmax_mass(Q, K, found, scale=encoder.scale)
            truth.append(exactly(Q, K, found.mask, encoder.scale))
            lower.append(mass.lower)
            upper.append(mass.upper)
        t, low, high = (np.concatenate(x) for x in (truth, lower, upper))
        outside += int(np.count_nonzero((t < low * (1 - 1e-13)) | (t > high * (1 + 1e-13))))
        rows.append(
            [
                f"{'centred' if center else 'raw'}, {size} of 512",
                *(f"{np.median(x):.3f}" for x in (t, low, high)),
                f"{np.mean(t >= 0.5):.1%}",
                f"{np.mean(low >= 0.5):.1%}",
                f"{np.mean(high < 0.5):.1%}",
            ]
        )
    header = ["set", "true", "lower", "upper", "at least half", "certified so", "certified not"]
    table(header, rows)
    print("queries outside their bracket:", outside)


def costs(rounds: int) -> None:
    rng = np.random.default_rng(0)
    encoder = levattn.datasets.minilm()
    real = tuple(np.asarray(x[2, 5], np.float64) for x in (encoder.queries, encoder.keys))
    K = rng.standard_normal((65536, 64))
    K[rng.choice(65536, 64, replace=False)] *= 8
    rows = []
    for name, Q, keys, size in (
        ("minilm, n = 512, d = 32", *real, 128),
        ("synthetic, n = 65536, d = 64, m = 64", rng.standard_normal((64, 64)), K, 256),
        ("synthetic, n = 65536, d = 64, m = 1024", rng.standard_normal((1024, 64)), K, 256),
    ):
        scale = 1 / np.sqrt(keys.shape[1])
        found = levattn.universal_set(keys, size=size, center=True)
        candidates: dict[str, Callable[[], object]] = {
            "certificate": lambda Q=Q, K=keys, U=found: softmax_mass(Q, K, U),  # type: ignore[misc]
            "exact": lambda Q=Q, K=keys, U=found, s=scale: exactly(Q, K, U.mask, s),  # type: ignore[misc]
            "set": lambda K=keys, size=size: levattn.universal_set(K, size=size, center=True),  # type: ignore[misc]
        }
        times = interleaved(candidates, rounds, pause=0.2)
        mass, truth = softmax_mass(Q, keys, found), exactly(Q, keys, found.mask, scale)
        rows.append(
            [
                name,
                *(f"{times[each] / len(Q) * 1e6:.1f} us" for each in ("certificate", "exact")),
                f"{times['exact'] / times['certificate']:.2f}",
                f"{times['set'] * 1e3:.1f} ms",
                *(f"{np.median(x):.3g}" for x in (truth, mass.lower, mass.upper)),
            ]
        )
    table(["keys", "certificate", "exact", "ratio", "the set, once", "true", "lower", "upper"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    real_heads()
    print()
    costs(rounds)
    print(
        "\nUseful where keys are many and logits left out are small: then the bracket is narrow and a query costs a "
        "fraction of all its logits.\nNot useful on these heads: logits left out spread over several units, the "
        "largest that leverage allows is far above those that occur, and\nthe lower bound is next to nothing. The "
        "upper bound does say for which queries a set of this size is too small."
    )


if __name__ == "__main__":
    main()
