"""Does a step of token statistics attention ever raise its rate? Do online scores add up to the coding rate?

Descent: random tokens of many sizes, memberships from soft to hard and any bases, a step of a share of the proven
bound, memberships fixed. Bar: no violation up to the bound. Telescoping: Σ −log(1 − τ) of online scores against
the log-determinant from singular values. Bar: 1e-9 relative.

    python examples/benchmarks/descent.py [--cases 10000] [--tokens 1000 100000]
"""

from __future__ import annotations

import argparse

import numpy as np
from _rivals import Array, interleaved, table, verdict

import levattn
from levattn.attention import rates

SHAPES = ((8, 4, 3, 2), (3, 5, 2, 5), (1, 3, 1, 3), (50, 8, 4, 2))  # tokens, channels, groups, columns


def cases(rng: np.random.Generator, count: int, n: int, d: int, K: int, p: int) -> tuple[Array, Array, Array]:
    Z = rng.standard_normal((count, n, d)) * np.exp(rng.uniform(-8, 4, (count, 1, 1)))
    hardness = np.exp(rng.uniform(-3, 3, (count, 1, 1)))
    Pi = rng.standard_gamma(np.broadcast_to(hardness, (count, n, K))) + 1e-30
    U = rng.standard_normal((count, K, d, p))
    largest = np.linalg.norm(U, ord=2, axis=(2, 3), keepdims=True).max(axis=1, keepdims=True)
    return Z, Pi / Pi.sum(axis=2, keepdims=True), U / largest


def rises(share: float, count: int, small: bool) -> tuple[int, float]:
    """How often a step of a share of the bound raised the rate by more than rounding, and by how much at most."""
    rng = np.random.default_rng(0)
    found, worst = 0, -np.inf
    for n, d, K, p in SHAPES:
        Z, Pi, U = cases(rng, count // len(SHAPES), n, d, K, p)
        if small:  # where the bound is tight: one group, moments far below 1
            Z, Pi, U = 1e-3 * Z / np.abs(Z).max(), np.ones((*Z.shape[:2], 1)), np.tile(np.eye(d), (len(Z), 1, 1, 1))
        new = rates.descent_step(Z, Pi, U, 1.0, step=share * 2 / d)
        before, after = (rates.variational_rate(X, Pi, U, 1.0) for X in (Z, new))
        change = after / before - 1
        found += int((change > 1e-13).sum())
        worst = max(worst, float(change.max()))
    return found, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 100_000])
    options = parser.parse_args()
    rows, violations = [], 0
    for share in (0.5, 1.999 / 2, 1.0, 1.5, 2.0):
        row = [f"{share:g}"]
        for small in (False, True):
            found, worst = rises(share, options.cases, small)
            violations += found if share <= 1 else 0
            row += [str(found), f"{worst:.1e}"]
        rows.append(row)
    print(f"steps that raise the variational rate, of {options.cases:,}; 'small': tokens for which the bound is tight")
    table(["share of the bound", "any tokens", "largest rise", "small", "largest rise"], rows)
    print("violations up to the bound:", verdict(violations, 0, at_least=False))

    rows, worst_error = [], 0.0
    for n in options.tokens:
        for d in (8, 64):
            for spread in (1.0, 1e3):
                rng = np.random.default_rng(1)
                Z = rng.standard_normal((n, d)) * spread ** rng.uniform(-1, 1, d) @ np.linalg.qr(rng.random((d, d)))[0]
                ridge = n * 0.5**2 / d
                total = -np.log1p(-levattn.online_leverage_scores(Z, ridge=ridge)).sum()
                exact = float(np.log1p(np.linalg.svd(Z, compute_uv=False) ** 2 / ridge).sum())
                rate = float(rates.coding_rate(Z, 0.5))
                worst_error = max(worst_error, abs(total / exact - 1), abs(2 * rate / exact - 1))
                seconds = interleaved(
                    {
                        "online": lambda Z=Z, ridge=ridge: levattn.online_leverage_scores(Z, ridge=ridge),
                        "all": lambda Z=Z: levattn.leverage_scores(Z),
                    },
                    3,
                )
                errors = f"{abs(total / exact - 1):.1e}", f"{abs(2 * rate / exact - 1):.1e}"
                times = f"{1e9 * seconds['online'] / n:.0f}", f"{seconds['online'] / seconds['all']:.1f}"
                rows.append([f"{n:,}", str(d), f"{spread:g}", *errors, *times])
    print("\nrelative errors of log det(I + ZᵀZ/λ), and the time of online scores")
    header = ["tokens", "channels", "spread", "Σ −log(1 − τ)", "coding_rate", "ns a token", "× leverage_scores"]
    table(header, rows)
    print("largest error:", verdict(worst_error, 1e-9, at_least=False))


if __name__ == "__main__":
    main()
