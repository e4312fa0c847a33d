"""Sketches of a tall matrix against the speed at which this machine reads it, and against other libraries.

Bars at n = 10⁶, d = 64, float32 keys: CountSketch at least 0.6 of the read bandwidth (the keys once, all threads),
OSNAP with s = 4 at least 0.3, each at its best setting (rows of the sketch, dtype of the sums). The Hadamard and dense
sketches have no bar. The rivals make a CountSketch of 4096 rows; torch and the sparse product get its places and signs
as a gift, scipy's transform draws its own.

    python examples/benchmarks/sketches.py [--rows 1000000] [--rounds 7] [--dense-rounds 2]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numba
import numpy as np
import scipy.linalg
import scipy.sparse
from _rivals import THREADS, interleaved, table, verdict

from levattn.sketch import OSNAP, SRHT, CountSketch, Distribution, GaussianJL, SignJL, Sketch

SKETCHES = (CountSketch(4096), CountSketch(16384), OSNAP(512), OSNAP(2048), SRHT(512))
DENSE = (SignJL(256), GaussianJL(256))
BARS = {CountSketch: 0.6, OSNAP: 0.3}
READ = "read K once"


@numba.njit(nogil=True, fastmath=True)
def total(x: Any) -> Any:
    found = np.float32(0)
    for i in range(x.size):
        found += x[i]
    return found


def reader(K: Any, pool: ThreadPoolExecutor) -> Callable[[], object]:
    """A sum over K on all threads, as vector code: no arithmetic worth mentioning beside the loads."""
    parts = np.array_split(K.reshape(-1), THREADS)
    return lambda: list(pool.map(total, parts))


def rivals(K: Any, size: int) -> dict[str, Callable[[], object]]:
    rng = np.random.default_rng(0)
    places, signs = rng.integers(0, size, len(K)), rng.choice([-1.0, 1.0], len(K)).astype(K.dtype)
    S = scipy.sparse.csr_matrix((signs, (places, np.arange(len(K)))), (size, len(K)))
    found: dict[str, Callable[[], object]] = {
        "scipy.linalg.clarkson_woodruff_transform": lambda: scipy.linalg.clarkson_woodruff_transform(K, size, 0),
        "scipy.sparse S @ K": lambda: S @ K,
    }
    try:
        import torch
    except ImportError:
        return found
    held, at, factors = torch.from_numpy(K), torch.from_numpy(places), torch.from_numpy(signs)[:, None]
    found["torch index_add_"] = lambda: torch.zeros(size, K.shape[1]).index_add_(0, at, held * factors)
    return found


def named(distribution: Distribution, dtype: str) -> str:
    details = f", s = {distribution.nonzeros}" if isinstance(distribution, OSNAP) else ""
    return f"{type(distribution).__name__}, {distribution.size} rows{details}, sums in {dtype}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dense-rounds", type=int, default=2)
    options = parser.parse_args()
    K = np.random.default_rng(0).standard_normal((options.rows, 64), np.float32)
    settings = {
        named(distribution, dtype): (distribution, partial(Sketch(distribution).apply, K, dtype=dtype))
        for distribution in (*SKETCHES, *DENSE)
        for dtype in ("float32", "float64")
    }
    light = {name: call for name, (which, call) in settings.items() if which not in DENSE}
    dense = {name: call for name, (which, call) in settings.items() if which in DENSE}
    with ThreadPoolExecutor(THREADS) as pool:
        times = interleaved({READ: reader(K, pool), **light}, options.rounds)
        others = rivals(K, 4096)
        ours, wide = (named(CountSketch(4096), dtype) for dtype in ("float32", "float64"))
        beside = interleaved({name: light[name] for name in (ours, wide)} | others, options.rounds, pause=0.2)
    times |= interleaved(dense, options.dense_rounds)

    print(f"n = {options.rows}, d = 64, float32 keys, {THREADS} threads; ", end="")
    print(f"read bandwidth {K.nbytes / times[READ] / 1e9:.1f} GB/s")
    share = {name: times[READ] / seconds for name, seconds in times.items()}
    table(
        ["sketch", "ms", "share of read bandwidth"],
        [[name, f"{1e3 * seconds:.1f}", f"{share[name]:.2f}"] for name, seconds in times.items()],
    )
    print()
    table(
        ["CountSketch of 4096 rows", "ms", "/ the first"],
        [[name, f"{1e3 * s:.1f}", f"{s / beside[ours]:.1f}"] for name, s in beside.items()],
    )
    print()
    for family, bar in BARS.items():
        best, name = max((share[name], name) for name, (which, _) in settings.items() if type(which) is family)
        print(f"{name}: share of read bandwidth:", verdict(best, bar))
    fastest, name = min((seconds, name) for name, seconds in beside.items() if name in others)
    print(f"best rival ({name}) / levattn: {fastest / beside[ours]:.1f}")


if __name__ == "__main__":
    main()
