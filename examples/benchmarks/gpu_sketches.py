"""Sketches on a CUDA device against the speed at which it copies, and against other libraries.

Bar for float32 keys, d = 64: CountSketch at least 0.6 of the copy bandwidth (the keys once, of which a copy reads and
writes each byte), at its best setting (rows of the sketch, dtype of the sums), through `Sketch.apply`. Its kernel is
measured beside it by itself. The rivals make a CountSketch of 4096 rows, and get its places and signs as a gift.

    python examples/benchmarks/gpu_sketches.py [--rows 16777216] [--columns 64] [--rounds 15] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from _gpu import COPY, Bench, Calls, copy_bandwidth

from levattn._kernels import Rows
from levattn.sketch import OSNAP, SRHT, CountSketch, Distribution, SignJL, Sketch

SKETCHES = (CountSketch(4096), CountSketch(16384), CountSketch(1 << 17), OSNAP(512), OSNAP(2048), SRHT(512))
DENSE = SignJL(256)
RIVAL_SIZE = 4096
BAR = 0.6
FIRST = "levattn, sums in float32"


def kernel(K: Any, distribution: Distribution, dtype: str) -> Callable[[], object]:
    """A sparse sketch without the checks of `Sketch.apply`, of CuPy's array."""
    import cupy as cp

    from levattn._kernels.sketch import cuda as sketch_cuda

    words = K.view(np.uint16) if K.dtype.itemsize == 2 else K
    rows = Rows(words[None], K.dtype.name)
    out = cp.zeros((1, distribution.size, K.shape[1]), dtype)
    blocks = getattr(distribution, "nonzeros", 1)
    size = distribution.size // blocks
    return lambda: sketch_cuda.scatter(rows, 0, 1, 0, blocks, size, out)


def by_cupyx(K: Any, places: Any, signs: Any) -> Callable[[], object]:
    """The sketch as a sparse matrix, multiplied by CuPy's array."""
    import cupy as cp
    from cupyx.scipy import sparse

    order = np.argsort(places, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(places, minlength=RIVAL_SIZE))])
    parts = (signs[order], order.astype(np.int32), starts.astype(np.int32))
    S = sparse.csr_matrix(tuple(cp.asarray(part) for part in parts), shape=(RIVAL_SIZE, len(K)))
    return lambda: S @ K


def rivals(bench: Bench, K: Any) -> Calls:
    rng = np.random.default_rng(0)
    places, signs = rng.integers(0, RIVAL_SIZE, len(K)), rng.choice([-1.0, 1.0], len(K)).astype(np.float32)
    at, factors = (bench.torch.from_numpy(x).to(K.device) for x in (places, signs[:, None]))
    found: Calls = {"torch index_add_": lambda: K.new_zeros(RIVAL_SIZE, K.shape[1]).index_add_(0, at, K * factors)}
    if bench.device == "cuda":
        import cupy as cp

        found["cupyx.scipy.sparse S @ K"] = by_cupyx(cp.from_dlpack(K), places, signs)
    return found


def settings(bench: Bench, K: Any) -> Calls:
    """All sketches of some keys, by name."""
    found: Calls = {}
    for distribution in (*SKETCHES, DENSE):
        for dtype in ("float32", "float64"):
            name = f"{distribution}, sums in {dtype}"
            found[name] = partial(Sketch(distribution).apply, K, dtype=dtype)
            if bench.device == "cuda" and isinstance(distribution, CountSketch | OSNAP):
                import cupy as cp

                found[f"    the kernel, {name}"] = kernel(cp.from_dlpack(K), distribution, dtype)
    return found


def main() -> None:
    bench = Bench(__file__, __doc__, rounds=15, rows=1 << 24, columns=64)
    n, d = bench.sized(bench.options.rows), bench.options.columns
    for dtype in ("float32", "float16"):
        _, K = next(bench.keys(n, d, dtype))
        nbytes = K.numel() * K.element_size()
        case = f"n = {n}, d = {d}, {dtype} keys"
        times = bench.times(case, {COPY: bench.copier(nbytes), **settings(bench, K)}, COPY)
        speed = copy_bandwidth(nbytes, times[COPY])
        bench.note(f"{case}, a copy, GB/s", round(speed / 1e9, 1))
        if dtype == "float32" and times:
            share, best = max(
                (nbytes / s / speed, name) for name, s in times.items() if name.startswith("CountSketch")
            )
            bench.bar(f"{case}, {best}, share of copy bandwidth", share, BAR)
            apply = Sketch(CountSketch(RIVAL_SIZE)).apply
            calls = {f"levattn, sums in {kind}": partial(apply, K, dtype=kind) for kind in ("float32", "float64")}
            bench.times(f"CountSketch of {RIVAL_SIZE} rows, {case}", {**calls, **rivals(bench, K)}, FIRST)


if __name__ == "__main__":
    main()
