"""Approximate leverage scores where the exact ones are dear: n = 200 000 keys of d = 2048, and sparse ones.

Bars: with 99 % of the ratios to the exact scores within 0.75 to 1.35, sketched scores at least 3 times as fast as the
exact route (the faster of ours and of BLAS in row blocks); for sparse keys of density 0.01 (CSR) at least 5 times as
fast as the exact route for the keys written out. Also the heads of usual size, where nothing is won.

    python examples/benchmarks/large_d.py [--rows 200000] [--rounds 1]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse
from _rivals import Array, interleaved, table, verdict

import levattn
from levattn.sketch import OSNAP, SRHT, CountSketch, GaussianJL


def by_blas(K: Any) -> Array:
    """Exact scores by BLAS in row blocks, threads inside BLAS; K dense or sparse."""
    n, step = K.shape[0], 8192
    dense = not scipy.sparse.issparse(K)
    G = sum((K[s : s + step].T @ K[s : s + step]).astype(np.float64) for s in range(0, n, step)) if dense else K.T @ K
    G = G if dense else G.toarray().astype(np.float64)
    W = np.asarray(scipy.linalg.lapack.dtrtri(scipy.linalg.cholesky(G))[0], K.dtype)
    out = np.empty(n, K.dtype)
    for start in range(0, n, step):
        Y = K[start : start + step] @ W
        out[start : start + step] = np.einsum("ij,ij->i", Y, Y)
    return out


def keys(n: int, d: int, density: float | None) -> Any:
    rng = np.random.default_rng(0)
    sizes = np.clip(np.abs(rng.standard_cauchy((n, 1))), 0.3, 30).astype(np.float32)
    if density is None:
        return rng.standard_normal((n, d), np.float32) * sizes
    K = scipy.sparse.random_array(
        (n, d),
        density=density,
        rng=rng,
        dtype=np.float32,
        data_sampler=lambda size: rng.standard_normal(size, np.float32),
    ).tocsr()
    K.data *= np.repeat(sizes[:, 0], np.diff(K.indptr))
    return K


def calls(K: Any, d: int) -> dict[str, Callable[[], Any]]:
    """The routes, by name: a sketch, or a pair."""
    project = GaussianJL(400)
    sketches: dict[str, Any] = {
        "jl, 400": project,
        f"osnap, {(10 * d, 320)}": (OSNAP(10 * d), GaussianJL(320)),
        f"osnap, {(8 * d, 400)}": (OSNAP(8 * d), project),
        f"osnap, {8 * d}": OSNAP(8 * d),
        f"countsketch, {(16 * d, 400)}": (CountSketch(16 * d), project),
        f"srht, {(8 * d, 400)}": (SRHT(8 * d), project),
    }
    found: dict[str, Callable[[], Any]] = {
        "BLAS, exact": lambda: by_blas(K),
        "auto, exact": lambda: levattn.leverage_scores(K),
    }
    for name, sketch in sketches.items():
        if not (name.startswith("srht") and scipy.sparse.issparse(K)):  # it mixes the entries of all rows
            found[name] = partial(levattn.leverage_scores, K, method=sketch)
    return found


def compared(K: Any, d: int, rounds: int) -> tuple[list[list[str]], dict[str, float], dict[str, float]]:
    """Return rows of a table, seconds, and the share of ratios within 0.75 to 1.35, of every route."""
    routes = calls(K, d)
    exact = levattn.leverage_scores(K).astype(np.float64)
    live = exact > 0
    rows, shares = [], {}
    times = interleaved(routes, rounds)
    for name, call in routes.items():
        ratio = call()[live] / exact[live]
        shares[name] = float(np.mean((ratio > 0.75) & (ratio < 1.35)))
        low, middle, high = np.quantile(ratio, [0.005, 0.5, 0.995])
        spread = f"{low:.2f} {middle:.2f} {high:.2f}"
        rows.append([name, f"{times[name]:.2f}", spread, f"{shares[name]:.1%}"])
    return rows, times, shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    header = ["method, sketch size", "s", "ratio: 0.5 %, median, 99.5 %", "within 0.75 to 1.35"]
    n, d = options.rows, 2048
    rows, times, shares = compared(keys(n, d, None), d, options.rounds)
    print(f"n = {n}, d = {d}, float32, dense")
    table(header, rows)
    exact = min(times["BLAS, exact"], times["auto, exact"])
    sketched = {name: t for name, t in times.items() if not name.endswith("exact") and shares[name] >= 0.99}
    best = min(sketched, key=lambda name: sketched[name])
    print(f"exact / {best}: {verdict(exact / sketched[best], 3)}")

    rows, sparse_times, shares = compared(keys(n, d, 0.01), d, options.rounds)
    print(f"\nn = {n}, d = {d}, float32, CSR of density 0.01")
    table(header, rows)
    good = {name: t for name, t in sparse_times.items() if name != "BLAS, exact" and shares[name] >= 0.99}
    best = min(good, key=lambda name: good[name])
    print(f"exact, written out / {best} of CSR: {verdict(exact / good[best], 5)}")
    print(f"exact of CSR by scipy and BLAS / {best}: {sparse_times['BLAS, exact'] / good[best]:.3g}")
    own = sparse_times["auto, exact"] / min(t for name, t in good.items() if name != "auto, exact")
    print(f"exact of CSR (auto) / the best approximate one of CSR: {own:.3g}")

    rows, times, _ = compared(keys(1_000_000, 64, None), 64, max(3, options.rounds))
    print("\nn = 1000000, d = 64, float32, dense")
    table(header, rows)


if __name__ == "__main__":
    main()
