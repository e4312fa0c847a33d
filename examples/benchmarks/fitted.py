"""Slots fitted to reference queries: seconds for all heads of a decoder, against least squares head by head.

90 heads of keys (1024 × 64, float32), each with three heads of 384 reference queries near some of the keys; 123 slots;
one thread. The rival takes the same slots, and solves both problems of each head by `numpy.linalg.lstsq` without
ridge, bounds or ball (weights below e⁻³ become e⁻³), as the paper does. The last columns are relative errors of the
outputs of the reference queries, and of as many new ones. Bar: new queries err less than without any fit.

A second table has the 72 heads of all-MiniLM-L6-v2 on a text: slots are fitted to every second query, and errors are
of the others. Beside them is `pruned_attention`, whose summaries have no fit.

    python examples/benchmarks/fitted.py [--heads 90] [--rounds 3]
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from _rivals import Array, interleaved, table, verdict
from threadpoolctl import threadpool_limits

import levattn
from levattn.attention import Selection, fit_slots, pruned_attention
from levattn.datasets import minilm

N, M, GROUP, D, SLOTS = 1024, 384, 3, 64, 123


def made(heads: int) -> tuple[Array, Array, Array, Array]:
    """Reference queries, keys, values and new queries."""
    rng = np.random.default_rng(0)
    K, V = rng.standard_normal((2, heads, N, D))
    K += 2 * rng.standard_normal((heads, 1, D))

    def queries() -> Array:
        near = np.take_along_axis(K, rng.integers(0, N, (heads, GROUP * M))[..., None], axis=1)
        return (near + 2 * rng.standard_normal(near.shape)).reshape(heads * GROUP, M, D)

    return tuple(X.astype(np.float32) for X in (queries(), K, V, queries()))


def attention(q: Array, K: Array, bias: Array | float = 0.0) -> tuple[Array, Array]:
    """Weights, and logarithms of their sums."""
    Z = q @ K.T / np.float32(D**0.5) + bias
    top = Z.max(axis=1, keepdims=True)
    E = np.exp(Z - top)
    return E / E.sum(axis=1, keepdims=True), top + np.log(E.sum(axis=1, keepdims=True))


def one_by_one(Q: Array, K: Array, V: Array, places: Array) -> tuple[Array, Array]:
    """Log-weights and values of given slots, by a least-squares solver for each head."""
    log_weights, values = [], []
    for q, k, v, slots in zip(Q.reshape(len(K), -1, D), K, V, places, strict=True):
        P, _ = attention(q, k)
        B = np.linalg.lstsq(P[:, slots], np.ones(len(q), np.float32), rcond=None)[0]
        log_weights.append(np.log(np.maximum(B, np.exp(-3))))
        X, _ = attention(q, k[slots], log_weights[-1])
        values.append(np.linalg.lstsq(X, P @ v, rcond=None)[0])
    return np.array(log_weights), np.array(values)


def error(Q: Array, K: Array, V: Array, keys: Array, values: Array, log_weights: Array) -> float:
    """Relative error of the outputs of queries, in the mean over the heads."""
    found = []
    for q, k, v, c, C, bias in zip(Q.reshape(len(K), -1, D), K, V, keys, values, log_weights, strict=True):
        Y = attention(q, k)[0] @ v
        found.append(np.linalg.norm(attention(q, c, bias)[0] @ C - Y) / np.linalg.norm(Y))
    return float(np.mean(found))


def of_real_heads() -> list[list[str]]:
    """Medians over heads of the errors of queries that were not fitted, by the share of the keys."""
    kept, rows = minilm(), []
    Q, K, V = (np.asarray(X, np.float32).reshape(-1, *X.shape[-2:]) for X in (kept.queries, kept.keys, kept.values))
    given, new = Q[:, ::2], Q[:, 1::2]
    Y = pruned_attention(new, K, V, 1.0)
    for share in (0.25, 0.12, 0.06):
        slots = fit_slots(given, K, V, share)
        old = np.take_along_axis(V, slots.indices[..., None], axis=1)
        plain = replace(slots, values=old, log_weights=0 * slots.log_weights)
        found = slots.attend(new), plain.attend(new), pruned_attention(new, K, V, share, queries=given)
        away = [np.linalg.norm(Z - Y, axis=(1, 2)) / np.linalg.norm(Y, axis=(1, 2)) for Z in found]
        rows.append([f"{share:.0%}", *(f"{np.median(each):.3f}" for each in away)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=90)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    Q, K, V, new = made(given.heads)
    with levattn.thread_limit(1), threadpool_limits(1):
        slots = fit_slots(Q, K, V, Selection(SLOTS))
        calls = {
            "fit_slots": lambda: fit_slots(Q, K, V, Selection(SLOTS), unseen=Q[:, :0]),
            "lstsq, head by head": lambda: one_by_one(Q, K, V, slots.indices),
        }
        seconds = interleaved(calls, given.rounds)
        naive = one_by_one(Q, K, V, slots.indices)
        old = np.take_along_axis(V, slots.indices[..., None], axis=1)
        rows, errors = [], {}
        for name, log_weights, values in (
            ("fit_slots", slots.log_weights, slots.values),
            ("lstsq, head by head", *naive),
            ("no fit", 0 * slots.log_weights, old),
        ):
            errors[name] = [error(q, K, V, slots.keys, values, log_weights) for q in (Q, new)]
            time = f"{seconds[name]:.2f} s" if name in seconds else "–"
            rows.append([name, time, *(f"{each:.3f}" for each in errors[name])])
    table([f"{given.heads} heads", "time", "error, references", "error, new queries"], rows)
    gain = errors["fit_slots"][1] / errors["no fit"][1]
    table(["keys of MiniLM", "fit_slots", "no fit", "pruned_attention"], of_real_heads())
    print("error of new queries by that without a fit:", verdict(gain, 1.0, at_least=False))


if __name__ == "__main__":
    main()
