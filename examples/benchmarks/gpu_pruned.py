"""Pruned attention of torch tensors on a CUDA device, against attention over all keys.

As many queries as keys, 32 heads, d = 128, bfloat16, an eighth of the keys as slots: selection and attention together,
both ways and causal. The rival is `scaled_dot_product_attention` of torch with its flash kernel.

Then attention to such slots with log-weights alone, for all queries and for one, as a compressed cache has it at each
step: by columns of the keys (ours), a mask, and FlexAttention, which is compiled for each shape first.

Bars: at least as fast as dense from n = 4096 on, both ways.

    python examples/benchmarks/gpu_pruned.py [--heads 32] [--columns 128] [--share 8] [--rounds 11] [--json FILE]
"""

from __future__ import annotations

from functools import partial
from typing import Any

from _gpu import Bench, Calls, flash, has

from levattn._kernels.pruned.torch import attended_slots
from levattn.attention import causal_pruned_attention, pruned_attention

SIZES = (4096, 8192, 16384, 32768, 65536)
OURS, FLASH = "pruned", "flash attention over all keys"
COLUMNS, MASK, FLEX = "columns", "mask", "FlexAttention"


def whole(bench: Bench, K: Any, slots: int, causal: bool) -> Calls:
    """Pruned attention and dense attention of heads (heads, n, d)."""
    Q, V = (bench.normal(*K.shape, dtype="bfloat16") for _ in range(2))
    dense = flash if bench.device == "cuda" else plain
    return {
        OURS: lambda: (causal_pruned_attention if causal else pruned_attention)(Q, K, V, slots),
        FLASH: partial(dense, bench.torch, Q[None], K[None], V[None], causal=causal),
    }


def plain(torch: Any, Q: Any, K: Any, V: Any, *, causal: bool) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(Q, K, V, is_causal=causal)


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
    if bench.device == "cuda" and not has("triton"):
        return found
    from torch.nn.attention.flex_attention import flex_attention

    def weighted(score: Any, b: Any, h: Any, _: Any, j: Any) -> Any:
        return score + logs[b, h, j]

    compiled = torch.compile(flex_attention, dynamic=False)
    return found | {FLEX: partial(compiled, Q, keys, values, score_mod=weighted, scale=scale)}


def main() -> None:
    bench = Bench(__file__, __doc__, rounds=11, heads=32, columns=128, share=8)
    heads, d, share = (getattr(bench.options, name) for name in ("heads", "columns", "share"))
    with bench.torch.no_grad():
        for full in SIZES:
            n = bench.sized(full, 128)
            slots = n // share
            for kind, K in bench.keys(heads * n, d, "bfloat16"):
                K = K.view(heads, n, d)
                for causal in (False, True):
                    case = f"{heads} heads of {n} keys, {kind}{', causal' if causal else ''}"
                    times = bench.times(case, whole(bench, K, slots, causal), OURS)
                    if not causal:
                        bench.bar(f"{case}: {FLASH} / ours", times[FLASH] / times[OURS], 1.0)
            if bench.device == "cuda" or full == SIZES[0]:
                for queries in (n, 1):
                    case = f"{heads} heads, queries {queries}, slots {slots}"
                    bench.times(case, ways(bench, K, queries, slots), COLUMNS)


if __name__ == "__main__":
    main()
