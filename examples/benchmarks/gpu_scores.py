"""Exact scores on a CUDA device, against the time to read the keys twice and against the best that torch offers.

Bars, on an H200:
- one matrix, n = 2·10⁶, d = 64 and 128, bfloat16 and float32: within 1.6 times of the time to read the keys twice at
  the measured speed of a copy, errors as on the CPU;
- heads of shape (1024, 8192, 128), bfloat16: at least 5 times as fast as torch's batched route (Gram matrix in
  float32, Cholesky, triangular solve), and at least 3 times as fast as what kvpress' LeverageScorePress computes at
  its defaults (48 random combinations of the centered columns, a ridge of 0.01), which is not exact.

The rivals get the heads in parts, at the best of three sizes. torch is needed, as it has bfloat16.

    python examples/benchmarks/gpu_scores.py [--rows 2000000] [--heads 1024] [--context 8192] [--rounds 15]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from _gpu import COPY, copier, copy_bandwidth, cupy_or_exit, device_name, interleaved_on_device
from _rivals import table, verdict

import levattn

PARTS = (16, 64, 256)  # heads that a rival takes at a time
OURS = "levattn"


def by_torch(torch: Any, K: Any) -> Any:
    """The Gram matrix in float32, its Cholesky factor, and a triangular solve."""
    X = K.float()
    factor = torch.linalg.cholesky(X.mT @ X)
    return torch.linalg.solve_triangular(factor, X.mT, upper=False).square().sum(-2)


def by_combinations(torch: Any, K: Any) -> Any:
    """What LeverageScorePress computes: scores of 48 random combinations of the centered columns, with a ridge."""
    X = K - K.mean(-2, keepdim=True)
    X = (X @ (torch.randn(K.shape[-1], 48, device=K.device, dtype=K.dtype) / 48**0.5)).float()
    factor = torch.linalg.cholesky(X.mT @ X + 0.01 * torch.eye(48, device=K.device))
    return (X * torch.cholesky_solve(X.mT, factor).mT).sum(-1)


def in_parts(score: Callable[[Any, Any], Any], torch: Any, K: Any, size: int) -> list[Any]:
    return [score(torch, K[start : start + size]) for start in range(0, len(K), size)]


def error(scores: Any, K: Any) -> float:
    """The largest relative error of the scores of some keys, against float64."""
    X = K.double()
    exact = (X[:4096] @ inverse_gram(X)).mul(X[:4096]).sum(-1)
    return float(((scores[:4096].double() - exact).abs() / exact).max())


def inverse_gram(X: Any) -> Any:
    """The inverse of the Gram matrix, by float64 in main memory."""
    gram = (X.mT @ X).cpu().numpy()
    return X.new_tensor(np.linalg.inv(gram))


def one_matrix(cp: Any, torch: Any, n: int, rounds: int) -> None:
    rows = []
    for d in (64, 128):
        for dtype in (torch.bfloat16, torch.float32):
            K = torch.randn(n, d, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).to(dtype)
            nbytes = K.numel() * K.element_size()
            routes: dict[str, Callable[[], object]] = {
                OURS: partial(levattn.leverage_scores, K),
                "torch": partial(by_torch, torch, K),
                COPY: copier(cp, nbytes),
            }
            times = interleaved_on_device(cp, routes, rounds)
            speed = copy_bandwidth(nbytes, times[COPY])
            ratio = times[OURS] / (2 * nbytes / speed)
            rows.append(
                [
                    f"{d}, {str(dtype).removeprefix('torch.')}",
                    *(f"{1e3 * times[name]:.3f}" for name in (OURS, "torch")),
                    f"{speed / 1e12:.2f}",
                    verdict(ratio, 1.6, at_least=False),
                    *(f"{error(score(), K):.1e}" for score in (routes[OURS], routes["torch"])),
                ]
            )
            del K, routes
    print(f"\none matrix, n = {n}; ms")
    table(["d, dtype", OURS, "torch", "copy TB/s", "ours / two reads", "error", "error of torch"], rows)


def many_heads(cp: Any, torch: Any, heads: int, context: int, rounds: int) -> None:
    K = torch.randn(heads, context, 128, device="cuda", dtype=torch.bfloat16)
    routes: dict[str, Callable[[], object]] = {OURS: partial(levattn.leverage_scores, K)}
    for size in PARTS:
        routes[f"torch, {size}"] = partial(in_parts, by_torch, torch, K, size)
        routes[f"48 combinations, {size}"] = partial(in_parts, by_combinations, torch, K, size)
    times = interleaved_on_device(cp, routes, rounds)
    print(f"\nheads ({heads}, {context}, 128), bfloat16; ms")
    table(["route, heads at a time", "ms"], [[name, f"{1e3 * seconds:.2f}"] for name, seconds in times.items()])
    for rival, bar in (("torch", 5), ("48 combinations", 3)):
        best = min(seconds for name, seconds in times.items() if name.startswith(rival))
        print(f"{rival} / {OURS}:", verdict(best / times[OURS], bar))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--heads", type=int, default=1024)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    cp = cupy_or_exit()
    try:
        import torch
    except ImportError:
        print("nothing is measured: this needs torch")
        return
    print(device_name(cp))
    one_matrix(cp, torch, options.rows, options.rounds)
    many_heads(cp, torch, options.heads, options.context, options.rounds)


if __name__ == "__main__":
    main()
