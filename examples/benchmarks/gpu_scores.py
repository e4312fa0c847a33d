"""Exact scores on a CUDA device, against the time to read the keys twice and against the best that torch offers.

Bars, on an H200:
- one matrix, n = 2·10⁶, d = 64 and 128, bfloat16 and float32: within 1.6 times of the time to read the keys twice at
  the measured speed of a copy, errors as on the CPU;
- heads of shape (1024, 8192, 128), bfloat16: at least 5 times as fast as torch's batched route (Gram matrix in
  float32, Cholesky, triangular solve), and at least 3 times as fast as what kvpress' LeverageScorePress computes at
  its defaults (48 random combinations of the centered columns, a ridge of 0.01), which is not exact.

The rivals get the heads in parts, at the best of three sizes. Where kvpress is installed its own function is beside
them. Before that come sets of a given size and scores of a few heads, beside torch's QR and singular values as well.

    python examples/benchmarks/gpu_scores.py [--rows 2000000] [--heads 1024] [--context 8192] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from _gpu import COPY, Bench, Calls, copy_bandwidth, has

import levattn

SOME_ROWS = 1 << 18  # up to which QR and singular values take less than seconds
PARTS = (16, 64, 256)  # heads that a rival takes at a time
SIZE = 64  # of sets
OURS, TORCH, COMBINATIONS, KVPRESS = "levattn", "torch", "48 combinations", "kvpress"
READS_BAR, BARS = 1.6, {TORCH: 5.0, COMBINATIONS: 3.0, KVPRESS: 3.0}


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


def by_kvpress(_torch: Any, K: Any) -> Any:
    from kvpress import LeverageScorePress

    return LeverageScorePress.compute_leverage_scores(K[None], 48)


def in_parts(score: Callable[[Any, Any], Any], torch: Any, K: Any, size: int) -> list[Any]:
    return [score(torch, K[start : start + size]) for start in range(0, len(K), size)]


def by_qr(torch: Any, K: Any) -> Any:
    return torch.linalg.qr(K.float())[0].square().sum(-1)


def by_svd(torch: Any, K: Any) -> Any:
    return torch.linalg.svd(K.float(), full_matrices=False)[0].square().sum(-1)


def of_a_size(torch: Any, K: Any) -> Any:
    """The places of the largest scores by the Gram matrix."""
    return by_torch(torch, K).topk(SIZE, dim=-1).indices


def error(scores: Any, K: Any) -> float:
    """The largest relative error of the scores of some keys, against float64 in main memory."""
    X = K.double()
    some, inverse = X[:4096], X.new_tensor(np.linalg.inv((X.mT @ X).cpu().numpy()))
    exact = (some @ inverse).mul(some).sum(-1)
    return float(((scores[:4096].double() - exact).abs() / exact).max())


def few_heads(bench: Bench) -> None:
    """Scores and sets of heads as one layer has them."""
    for heads, n, d, dtype in ((32, 4096, 64, "float32"), (256, 8192, 128, "bfloat16")):
        n = bench.sized(n, 128)
        for kind, flat in bench.keys(heads * n, d, dtype):
            K = flat.view(heads, n, d)
            case = f"heads ({heads}, {n}, {d}), {dtype}, {kind}"
            calls: Calls = {OURS: partial(levattn.leverage_scores, K), TORCH: partial(by_torch, bench.torch, K)}
            if heads * n <= SOME_ROWS:
                calls |= {"qr": partial(by_qr, bench.torch, K), "svd": partial(by_svd, bench.torch, K)}
            bench.times(case, calls, OURS)
            sets: Calls = {OURS: lambda K=K: levattn.universal_set(K, size=SIZE).mask}
            sets |= {f"{TORCH}, topk": partial(of_a_size, bench.torch, K)}
            bench.times(f"sets of {SIZE} keys, {case}", sets, OURS)


def one_matrix(bench: Bench, n: int) -> None:
    for d in (64, 128):
        for dtype in ("bfloat16", "float32"):
            for kind, K in bench.keys(n, d, dtype):
                nbytes = K.numel() * K.element_size()
                ours, theirs = partial(levattn.leverage_scores, K), partial(by_torch, bench.torch, K)
                case = f"one matrix, n = {n}, d = {d}, {dtype}, {kind}"
                times = bench.times(case, {OURS: ours, TORCH: theirs, COPY: bench.copier(nbytes)}, OURS)
                bench.note(f"{case}, a copy, TB/s", round(copy_bandwidth(nbytes, times[COPY]) / 1e12, 3))
                # a copy reads and writes each byte once, which is as much as two reads
                bench.bar(f"{case}, ours / two reads", times[OURS] / times[COPY], READS_BAR, at_least=False)
                if times:
                    bench.note(f"{case}, error of ours", error(ours(), K))
                    bench.note(f"{case}, error of torch", error(theirs(), K))


def many_heads(bench: Bench, heads: int, context: int, *, kvpress: bool) -> None:
    rivals = {TORCH: by_torch, COMBINATIONS: by_combinations, **({KVPRESS: by_kvpress} if kvpress else {})}
    for kind, flat in bench.keys(heads * context, 128, "bfloat16"):
        K = flat.view(heads, context, 128)
        calls: Calls = {OURS: partial(levattn.leverage_scores, K)}
        for name, score in rivals.items():
            calls |= {f"{name}, {size}": partial(in_parts, score, bench.torch, K, size) for size in PARTS}
        case = f"heads ({heads}, {context}, 128), bfloat16, {kind}"
        times = bench.times(f"{case}; of rivals the heads at a time", calls, OURS)
        for name in rivals:
            best = min(times[f"{name}, {size}"] for size in PARTS)
            bench.bar(f"{case}, {name} / {OURS}", best / times[OURS], BARS[name])


def main() -> None:
    bench = Bench(__file__, __doc__, rounds=15, rows=2_000_000, heads=1024, context=8192)
    options = bench.options
    few_heads(bench)
    one_matrix(bench, bench.sized(options.rows))
    many_heads(bench, bench.sized(options.heads, 4), bench.sized(options.context, 512), kvpress=has("kvpress"))


if __name__ == "__main__":
    main()
