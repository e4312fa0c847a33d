"""Pruned attention of torch tensors on a CUDA device, against attention over all keys.

As many queries as keys, 32 heads, d = 128, bfloat16, a tenth of the keys as slots: selection and attention together,
both ways and then causal. The rivals are `scaled_dot_product_attention` of torch by the kernel that it chooses, by its
flash kernel and by cuDNN. Without summaries all slots are keys. Gradients are those of the shortest context.

Then attention to such slots with log-weights alone, for all queries and for one, as a compressed cache has it at each
step: by columns of the keys, a mask, and FlexAttention, which is compiled for each shape first. One query also takes
our kernel of a token, with the first slot as a later token.

Bars, both ways: at least as fast as the best of torch's kernels from n = 4096 on, and 5 times at n = 131072.

    python examples/benchmarks/gpu_pruned.py [--heads 32] [--columns 128] [--share 10] [--rounds 11] [--json FILE]
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from _gpu import CUDNN, DEFAULT, FLASH, Bench, Calls, attended, dense, forward_and_backward, has

from levattn._kernels.pruned.fused import attended_slots
from levattn._kernels.pruned.torch import attended_token
from levattn.attention import Selection, causal_pruned_attention, pruned_attention

SIZES = (4096, 16384, 65536, 131072)
BARS = {131072: 5.0}
OURS, WITHOUT = "pruned", "pruned, without summaries"
COLUMNS, MASK, TOKEN, FLEX = "columns", "mask", "kernel of a token", "FlexAttention"


def whole(bench: Bench, K: Any, slots: int, causal: bool) -> Calls:
    """Pruned attention and dense attention of heads (heads, n, d)."""
    Q, V = (bench.normal(*K.shape, dtype="bfloat16") for _ in range(2))
    call = causal_pruned_attention if causal else pruned_attention
    return {
        OURS: partial(call, Q, K, V, slots),
        WITHOUT: partial(call, Q, K, V, Selection(slots, summaries=0)),
        **dense(bench.torch, Q[None], K[None], V[None], causal=causal),
    }


def gradients(bench: Bench, K: Any, slots: int) -> Calls:
    """The gradients of pruned attention and of dense attention."""
    torch = bench.torch
    tensors = (bench.normal(1, *K.shape, dtype="bfloat16"), K[None], bench.normal(1, *K.shape, dtype="bfloat16"))
    routes = {OURS: lambda Q, K, V: pruned_attention(Q, K, V, slots)}
    routes |= {DEFAULT: partial(attended, torch, DEFAULT)}
    return {name: partial(forward_and_backward, torch, route, tensors) for name, route in routes.items()}


def ways(bench: Bench, K: Any, queries: int, slots: int) -> Calls:
    """Attention to so many slots with log-weights, by each way; the first call of FlexAttention compiles it."""
    torch = bench.torch
    heads, _, d = K.shape
    Q, keys = bench.normal(1, heads, queries, d, dtype="bfloat16"), K[None, :, :slots].contiguous()
    values, logs = bench.normal(1, heads, slots, d, dtype="bfloat16"), bench.normal(1, heads, slots)
    mask, scale = logs[:, :, None].bfloat16(), d**-0.5
    attend = torch.nn.functional.scaled_dot_product_attention
    found = {
        COLUMNS: partial(attended_slots, Q, keys, values, logs, scale),
        MASK: partial(attend, Q, keys, values, attn_mask=mask, scale=scale),
    }
    if bench.device == "cuda" and queries == 1:
        near = keys[:, :, :1], values[:, :, :1], None
        found[TOKEN] = partial(attended_token, Q, ((keys, values, logs, tuple(range(heads))),), near, scale, None)
    if bench.device == "cuda" and not has("triton"):
        return found
    from torch.nn.attention.flex_attention import flex_attention

    def weighted(score: Any, b: Any, h: Any, _: Any, j: Any) -> Any:
        return score + logs[b, h, j]

    compiled = torch.compile(flex_attention, dynamic=False)
    return found | {FLEX: partial(compiled, Q, keys, values, score_mod=weighted, scale=scale)}


def both(bench: Bench, full: int, causal: bool) -> None:
    """Pruned attention of so many keys, both ways or causal."""
    heads, d, share = (getattr(bench.options, name) for name in ("heads", "columns", "share"))
    n = bench.sized(full, 128)
    for kind, K in bench.keys(heads * n, d, "bfloat16"):
        case = f"{heads} heads of {n} keys, {kind}{', causal' if causal else ''}"
        times = bench.times(case, whole(bench, K.view(heads, n, d), n // share, causal), OURS)
        best = min((times[which] for which in (DEFAULT, FLASH, CUDNN)), key=lambda x: (math.isnan(x), x))
        for ours in () if causal else (OURS, WITHOUT):
            bench.bar(f"{case}: the best of torch / {ours}", best / times[ours], BARS.get(full, 1.0))


def main() -> None:
    bench = Bench(__file__, __doc__, rounds=11, heads=32, columns=128, share=10)
    heads, d, share = (getattr(bench.options, name) for name in ("heads", "columns", "share"))
    with bench.torch.no_grad():
        for full in SIZES:
            both(bench, full, False)
        for full in SIZES if bench.device == "cuda" else SIZES[:1]:
            n = bench.sized(full, 128)
            _, K = next(bench.keys(heads * n, d, "bfloat16"))
            for queries in (n, 1):
                case = f"{heads} heads, queries {queries}, slots {n // share}"
                bench.times(case, ways(bench, K.view(heads, n, d), queries, n // share), COLUMNS)
        n = bench.sized(SIZES[0], 128)
        for kind, K in bench.keys(heads * n, d, "bfloat16"):
            with bench.torch.enable_grad():
                case = f"{heads} heads of {n} keys, {kind}, with gradients"
                bench.times(case, gradients(bench, K.view(heads, n, d), n // share), OURS)
        for full in SIZES:
            both(bench, full, True)


if __name__ == "__main__":
    main()
