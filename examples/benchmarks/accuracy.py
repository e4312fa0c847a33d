"""Largest relative error of a leverage score against exact integer arithmetic, by condition number and method.

Bars, over scores above 10⁻³ d/n: float32 keys 1e-5 by "auto", which multiplies in float32 where that allows it, and by
others 1e-6 up to condition number 10⁴ and 1e-5 up to what float32 can hold; float64 keys 1e-10 up to 10⁶ and 1e-7 up
to 10¹².

    python examples/benchmarks/accuracy.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from _rivals import Array, by_blocks, by_svd, conditioned, table

import levattn

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import naive

N, D = 3000, 24
METHODS = ("auto", "gram", "qr", "svd")
CONDITIONS = (1.0, 1e1, 1e2, 1e3, 1e4, 1e6, 1e7, 1e8, 1e10, 1e12)


def keys(kind: str, condition: float, dtype: str) -> Array:
    """Return keys of a condition number, if asked for with a few long rows or with columns of very different size."""
    K = conditioned(N, D, condition, "float64")
    if kind == "coherent":
        K[:5] *= 50
    if kind == "graded":
        K = K * np.geomspace(1, 1e-9, D)
    return K.astype(dtype)


def bar(method: str, dtype: str, condition: float) -> float:
    if dtype == "float32":
        return 1e-6 if condition <= 1e4 and method != "auto" else 1e-5
    return 1e-10 if condition <= 1e6 else 1e-7


def main() -> None:
    rows = []
    routes = {
        **{m: lambda K, m=m: levattn.leverage_scores(K, method=m) for m in METHODS},
        "numpy SVD": by_svd,
        "BLAS Gram": lambda K: by_blocks(K, 4096, triangular=False),
    }
    for dtype in ("float32", "float64"):
        for kind in ("gaussian", "coherent", "graded"):
            for condition in CONDITIONS:
                if dtype == "float32" and condition > 1e7:
                    continue
                K = keys(kind, condition, dtype)
                exact = naive.leverage_exact(K)
                counted = exact > 1e-3 * D / N
                cells = []
                for route in routes.values():
                    try:
                        scores = np.asarray(route(K), dtype=np.float64)
                        cells.append(f"{np.max(np.abs(scores / exact - 1)[counted]):.1e}")
                    except np.linalg.LinAlgError:
                        cells.append("fails")
                limits = [bar(method, dtype, condition) for method in METHODS]
                ours = cells[: len(METHODS)]
                met = "met" if all(float(c) <= limit for c, limit in zip(ours, limits, strict=True)) else "MISSED"
                rows.append([f"{dtype} {kind}", f"{condition:.0e}", *cells, *(f"{x:.0e}" for x in limits[:2]), met])
    table(["keys", "condition", *routes, "bar of auto", "of the others", "our four"], rows)


if __name__ == "__main__":
    main()
