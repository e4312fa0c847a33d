"""Attention over the keys of a universal set on a CUDA device, against attention over all keys.

As many queries as keys, 32 heads, d = 128, bfloat16. Ours is all of it: the set of 64 keys of each head, these keys
and their values, and softmax attention over them. The rivals are `scaled_dot_product_attention` of torch by the kernel
that it chooses, by its flash kernel and by cuDNN. What the set leaves out is not looked at here: `levattn demo` does
that, for the encoder that comes along.

Bars, beside the kernel that torch chooses: faster from n = 8192 on, and at least 40 times as fast at n = 131072.

    python examples/benchmarks/gpu_attention.py [--heads 32] [--columns 128] [--size 64] [--rounds 11] [--json FILE]
"""

from __future__ import annotations

from functools import partial
from typing import Any

from _gpu import DEFAULT, Bench, Calls, attended, dense

import levattn

SIZES = (8192, 16384, 32768, 65536, 131072)
BARS = {8192: 1.0, 131072: 40.0}
OURS = "universal set, gather, attention"


def candidates(bench: Bench, K: Any, size: int) -> Calls:
    """Both ways to attend over keys (heads, n, d), and the steps of ours."""
    heads, _, d = K.shape
    Q, V = (bench.normal(*K.shape, dtype="bfloat16") for _ in range(2))
    attend = partial(attended, bench.torch, DEFAULT)

    def chosen() -> Any:
        return levattn.universal_set(K, size=size).mask

    def gathered(mask: Any) -> tuple[Any, ...]:
        places = mask.nonzero()[:, 1].view(heads, size, 1).expand(-1, -1, d)
        return K.gather(1, places)[None], V.gather(1, places)[None]

    mask = chosen()
    few = gathered(mask)
    return {
        OURS: lambda: attend(Q[None], *gathered(chosen())),
        **dense(bench.torch, Q[None], K[None], V[None]),
        "universal set": chosen,
        "gather": partial(gathered, mask),
        "attention over the set": partial(attend, Q[None], *few),
    }


def main() -> None:
    bench = Bench(__file__, __doc__, rounds=11, heads=32, columns=128, size=64)
    heads, d, size = (getattr(bench.options, name) for name in ("heads", "columns", "size"))
    for full in SIZES:
        n = bench.sized(full, 2 * size)
        for kind, K in bench.keys(heads * n, d, "bfloat16"):
            case = f"{heads} heads of {n} keys, {kind}"
            times = bench.times(case, candidates(bench, K.view(heads, n, d), size), OURS)
            if full in BARS:
                bench.bar(f"{case}: {DEFAULT} / ours", times[DEFAULT] / times[OURS], BARS[full])


if __name__ == "__main__":
    main()
