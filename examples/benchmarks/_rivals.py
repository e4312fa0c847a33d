"""What the benchmarks share: interleaved medians, a table, and leverage scores from other libraries."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import scipy.linalg
from threadpoolctl import threadpool_limits

Array = Any
THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


LIMITS = {  # to the instructions of 2013, for each library by its own name of them
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+lzcnt,+movbe,+popcnt,+sse3,+ssse3,+sse4.1,+sse4.2,+cx16,"
    "+sahf",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
}


def limit_to_avx2() -> None:
    """Run this program again, in which all libraries leave AVX-512 out, unless they do already."""
    if not LIMITS.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | LIMITS)


def interleaved(
    candidates: dict[str, Callable[[], object]], rounds: int, pause: float = 0.0, warm: float = 0.0
) -> dict[str, float]:
    """Median seconds of each candidate; all take their turn in every round.

    A turn is two calls, of which the second counts: threads that the one before left spinning, and caches and clocks
    that it left cold, would else be counted against the next. Calls of a few milliseconds need a `pause` (seconds)
    before them if a rival uses BLAS, whose threads spin for a tenth of a second; and as processors that were idle take
    some time to be fast again, calls for `warm` seconds behind it that do not count.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            time.sleep(pause)
            begin = time.perf_counter()
            call()
            while time.perf_counter() - begin < warm:
                call()
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def microseconds(candidates: dict[str, Callable[[], object]], rounds: int, calls: int = 200) -> dict[str, float]:
    """Median microseconds of one of many calls in a row, which are too short to be timed one by one."""

    def many(call: Callable[[], object]) -> None:
        for _ in range(calls):
            call()

    times = interleaved({name: partial(many, call) for name, call in candidates.items()}, rounds)
    return {name: 1e6 * seconds / calls for name, seconds in times.items()}


def once(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        print(
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        )


def verdict(figure: float, bar: float, *, at_least: bool = True) -> str:
    """Say whether a bar is met."""
    met = figure >= bar if at_least else figure <= bar
    return f"{figure:.3g} (bar: {'at least' if at_least else 'at most'} {bar:g}, {'met' if met else 'MISSED'})"


def steps(title: str, calls: dict[str, Callable[[], object]], rounds: int) -> None:
    """Print what steps of decoding take, and whether they meet their bars."""
    times = microseconds(calls, rounds)
    print(f"\na step of decoding, {title}: microseconds")
    table([*times], [[f"{s:.1f}" for s in times.values()]])
    for name in ("after 65536", "torch tensors"):
        print(f"a step, {name}:", verdict(times[name], 60, at_least=False))
    steps = [s for name, s in times.items() if name.startswith("after")]
    print("largest / smallest:", verdict(max(steps) / min(steps), 1.25, at_least=False))


# -- leverage scores by BLAS and LAPACK -----------------------------------------------------------


def by_svd(K: Array) -> Array:
    """Row norms of U, as one would write it with numpy."""
    U = np.linalg.svd(K, full_matrices=False)[0]
    return np.einsum("ij,ij->i", U, U)


def by_gram(K: Array) -> Array:
    """Gram, Cholesky and a triangular solve on whole matrices, threaded inside BLAS."""
    R = scipy.linalg.cholesky(K.T @ K, lower=False)
    Y = scipy.linalg.solve_triangular(R, K.T, trans="T", check_finite=False)
    return np.einsum("ij,ij->j", Y, Y)


def by_blocks(K: Array, rows: int, *, triangular: bool) -> Array:
    """The same in row blocks on Python threads, one BLAS thread each, no temporary of K's size."""
    n = len(K)
    out = np.empty(n, K.dtype)
    trmm = scipy.linalg.get_blas_funcs("trmm", (K,))
    starts = range(0, n, rows)

    def gram(start: int) -> Array:
        X = K[start : start + rows]
        return (X.T @ X).astype(np.float64)  # numpy calls SYRK here

    with threadpool_limits(1), ThreadPoolExecutor(THREADS) as pool:
        G = sum(pool.map(gram, starts))
        W = np.linalg.inv(np.linalg.cholesky(G).T).astype(K.dtype)
        W_f = np.asfortranarray(W)

        def whiten(start: int) -> None:
            X = K[start : start + rows]
            Y = trmm(1.0, W_f, X.T, trans_a=1).T if triangular else X @ W
            np.einsum("ij,ij->i", Y, Y, out=out[start : start + rows])

        list(pool.map(whiten, starts))
    return out


def blas_routes(K: Array) -> dict[str, Callable[[], object]]:
    """Every route through BLAS that was found competitive, by name."""
    routes: dict[str, Callable[[], object]] = {"gram, whole": lambda: by_gram(K)}
    for rows in (1024, 4096, 16384):
        for triangular in (False, True):
            kind = "trmm" if triangular else "gemm"
            routes[f"blocks of {rows}, {kind}"] = lambda r=rows, t=triangular: by_blocks(K, r, triangular=t)  # type: ignore[misc]
    return routes


def conditioned(n: int, d: int, condition: float, dtype: str, seed: int = 0) -> Array:
    """Gaussian keys turned so that their singular values are spread evenly (in logarithm) down to 1/condition."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, d))
    V = np.linalg.qr(rng.standard_normal((d, d)))[0]
    return ((X * np.geomspace(1, 1 / condition, d)) @ V.T).astype(dtype)
