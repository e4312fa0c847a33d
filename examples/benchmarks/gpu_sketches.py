"""Sketches on a CUDA device against the speed at which it copies, and against other libraries.

Bar for float32 keys, d = 64: CountSketch at least 0.6 of the copy bandwidth (the keys once, of which a copy reads and
writes each byte), at its best setting (rows of the sketch, dtype of the sums), through `Sketch.apply`. Its kernel is
measured beside it by itself. The rivals make a CountSketch of 4096 rows, and get its places and signs as a gift.

    python examples/benchmarks/gpu_sketches.py [--rows 16777216] [--columns 64] [--rounds 15]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from _gpu import COPY, copier, copy_bandwidth, cupy_or_exit, device_name, interleaved_on_device, normal_keys
from _rivals import table, verdict

from levattn._kernels import Rows
from levattn.sketch import OSNAP, SRHT, CountSketch, Distribution, SignJL, Sketch

SKETCHES = (CountSketch(4096), CountSketch(16384), CountSketch(1 << 17), OSNAP(512), OSNAP(2048), SRHT(512))
DENSE = SignJL(256)
RIVAL_SIZE = 4096
BAR = 0.6


def kernel(cp: Any, K: Any, distribution: Distribution, dtype: str) -> Callable[[], object]:
    """A sparse sketch without the checks of `Sketch.apply`."""
    from levattn._kernels.sketch import cuda as sketch_cuda

    words = K.view(np.uint16) if K.dtype.itemsize == 2 else K
    rows = Rows(words[None], K.dtype.name)
    out = cp.zeros((1, distribution.size, K.shape[1]), dtype)
    blocks = getattr(distribution, "nonzeros", 1)
    size = distribution.size // blocks
    return lambda: sketch_cuda.scatter(rows, 0, 1, 0, blocks, size, out)


def rivals(cp: Any, K: Any, size: int) -> dict[str, Callable[[], object]]:
    rng = np.random.default_rng(0)
    places, signs = rng.integers(0, size, len(K)), rng.choice([-1.0, 1.0], len(K)).astype(np.float32)
    found: dict[str, Callable[[], object]] = {}
    try:
        from cupyx.scipy import sparse

        order = np.argsort(places, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(places, minlength=size))])
        parts = (signs[order], order.astype(np.int32), starts.astype(np.int32))
        S = sparse.csr_matrix(tuple(cp.asarray(part) for part in parts), shape=(size, len(K)))
        S @ K
        found["cupyx.scipy.sparse S @ K"] = lambda: S @ K
    except (ImportError, RuntimeError) as error:
        print(f"without cupyx.scipy.sparse: {error}")
    try:
        import torch
    except ImportError:
        return found
    if torch.cuda.is_available():
        held = torch.from_dlpack(K)
        at, factors = (torch.from_numpy(x).to(held.device) for x in (places, signs[:, None]))
        stream = torch.cuda.ExternalStream(cp.cuda.get_current_stream().ptr)

        def index_add() -> object:
            with torch.cuda.stream(stream):
                return torch.zeros((size, K.shape[1]), device=held.device).index_add_(0, at, held * factors)

        found["torch index_add_"] = index_add
    return found


def settings(cp: Any, K: Any) -> dict[str, Callable[[], object]]:
    """All sketches of some keys, by name."""
    found: dict[str, Callable[[], object]] = {}
    for distribution in (*SKETCHES, DENSE):
        for dtype in ("float32", "float64"):
            name = f"{distribution}, sums in {dtype}"
            found[name] = partial(Sketch(distribution).apply, K, dtype=dtype)
            if isinstance(distribution, CountSketch | OSNAP):
                found[f"    the kernel, {name}"] = kernel(cp, K, distribution, dtype)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1 << 24)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    cp = cupy_or_exit()
    best = 0.0, ""
    for dtype in ("float32", "float16"):
        K = normal_keys(cp, options.rows, options.columns, dtype)
        times = interleaved_on_device(cp, {COPY: copier(cp, K.nbytes), **settings(cp, K)}, options.rounds)
        speed = copy_bandwidth(K.nbytes, times[COPY])
        share = {name: K.nbytes / seconds / speed for name, seconds in times.items()}
        print(f"{device_name(cp)}, n = {options.rows}, d = {options.columns}, {dtype} keys; ", end="")
        print(f"copy bandwidth {speed / 1e9:.0f} GB/s")
        table(
            ["sketch", "ms", "share of copy bandwidth"],
            [[name, f"{1e3 * seconds:.2f}", f"{share[name]:.2f}"] for name, seconds in times.items()],
        )
        print()
        if dtype == "float32":
            best = max((share[name], name) for name in times if name.startswith("CountSketch"))
            others = rivals(cp, K, RIVAL_SIZE)
            ours = {f"levattn, sums in {kind}": CountSketch(RIVAL_SIZE) for kind in ("float32", "float64")}
            calls = {
                name: partial(Sketch(which).apply, K, dtype=name.rpartition(" ")[2]) for name, which in ours.items()
            }
            beside = interleaved_on_device(cp, calls | others, options.rounds)
            first = beside["levattn, sums in float32"]
            table(
                [f"CountSketch of {RIVAL_SIZE} rows", "ms", "/ the first"],
                [[name, f"{1e3 * seconds:.2f}", f"{seconds / first:.1f}"] for name, seconds in beside.items()],
            )
            print()
        del K
    print(f"{best[1]}: share of copy bandwidth:", verdict(best[0], BAR))


if __name__ == "__main__":
    main()
