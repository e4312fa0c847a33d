"""Rounding of token statistics attention: float32 against float64, and steps, chunks and the whole against each other.

Bars: errors of at most 1e-5 of the largest token at T = 10⁶, random tokens and equal ones (for which rounding goes one
way); steps, chunks and the whole agree within 1e-6 (float32) and 1e-12 (float64).

    python examples/benchmarks/tssa_accuracy.py
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import Any

import numpy as np
from _rivals import table, verdict

from levattn.attention import TokenForm, tssa

HEADS, D = 2, 16
FORMS: dict[str, dict[str, Any]] = {
    "released": {},
    "paper": {"form": "norm"},
    "mean": {"form": TokenForm(normalize="mean")},
    "decayed": {"form": TokenForm(decay=0.999)},
    "released, not causal": {"causal": False},
}


def tokens(kind: str, T: int) -> Any:
    if kind == "equal":
        return np.full((HEADS, T, D), 0.7, np.float32)
    return np.random.default_rng(0).standard_normal((HEADS, T, D), np.float32)


def against_double() -> float:
    rows, worst = [], 0.0
    for name, options in FORMS.items():
        for kind in ("random", "equal"):
            errors = []
            for T in (10_000, 100_000, 1_000_000):
                W = tokens(kind, T)
                exact = tssa(W.astype(np.float64), D**-0.5, **options)
                errors.append(float(np.abs(tssa(W, D**-0.5, **options) - exact).max() / np.abs(W).max()))
            worst = max(worst, *errors)
            rows.append([f"{name}, {kind}", *(f"{error:.1e}" for error in errors)])
    print("largest error of float32, of the largest token")
    table(["tokens", "T = 10⁴", "10⁵", "10⁶"], rows)
    return worst


def in_parts(W: Any, size: int, options: dict[str, Any]) -> Any:
    parts, state = [], None
    for low, high in pairwise([*range(0, W.shape[1], size), W.shape[1]]):
        Y, state = tssa(W[:, low:high], D**-0.5, state=state, return_state=True, **options)
        parts.append(Y)
    return np.concatenate(parts, axis=1)


def against_parts() -> dict[str, float]:
    rows, worst = [], {"float32": 0.0, "float64": 0.0}
    for name, options in FORMS.items():
        if not options.get("causal", True):
            continue
        for dtype in worst:
            W = tokens("random", 3000).astype(dtype)
            whole = tssa(W, D**-0.5, **options)
            differences = [float(np.abs(in_parts(W, size, options) - whole).max()) for size in (1, 7, 64, 1000)]
            worst[dtype] = max(worst[dtype], *differences)
            rows.append([f"{name}, {dtype}", *(f"{difference:.1e}" for difference in differences)])
    print("\nlargest difference of chunks from the whole, 3000 tokens")
    table(["chunks of", "1", "7", "64", "1000"], rows)
    return worst


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("float32 against float64:", verdict(against_double(), 1e-5, at_least=False))
    worst = against_parts()
    print("float32:", verdict(worst["float32"], 1e-6, at_least=False))
    print("float64:", verdict(worst["float64"], 1e-12, at_least=False))


if __name__ == "__main__":
    main()
