"""Attention over the keys of a universal set on a CUDA device, against attention over all keys.

As many queries as keys, 32 heads, d = 128, bfloat16. Ours is all of it: the set of 64 keys of each head, these keys
and their values, and softmax attention over them. The rival is `scaled_dot_product_attention` of torch with its flash
kernel. What the set leaves out is not looked at here: `levattn demo` does that, for the encoder that comes along.

Bars: faster from n = 8192 on, and at least 40 times as fast at n = 131072.

    python examples/benchmarks/gpu_attention.py [--heads 32] [--columns 128] [--size 64] [--rounds 11]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from _gpu import cupy_or_exit, device_name, interleaved_on_device
from _rivals import table, verdict

import levattn

SIZES = (8192, 16384, 32768, 65536, 131072)
BARS = {8192: 1.0, 131072: 40.0}
OURS, FLASH = "universal set, gather, attention", "flash attention over all keys"
STEPS = ("universal set", "gather", "attention over the set")


def torch_or_exit() -> Any:
    """torch where it has a CUDA device; else the program says so and ends, without an error."""
    try:
        import torch
    except ImportError as error:
        print(f"nothing is measured: this needs torch with CUDA ({error})")
        raise SystemExit(0) from None
    if not torch.cuda.is_available():
        print("nothing is measured: this needs torch with CUDA (torch finds no CUDA device)")
        raise SystemExit(0)
    return torch


def candidates(torch: Any, heads: int, n: int, d: int, size: int) -> dict[str, Callable[[], object]]:
    """Both ways to attend, and the steps of ours."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    Q, K, V = (torch.randn((heads, n, d), device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def chosen() -> Any:
        return levattn.universal_set(K, size=size).mask

    def gathered(mask: Any) -> tuple[Any, ...]:
        places = mask.nonzero()[:, 1].view(heads, size, 1).expand(-1, -1, d)
        return K.gather(1, places), V.gather(1, places)

    def attended(keys: Any, values: Any) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(Q[None], keys[None], values[None])

    mask = chosen()
    few = gathered(mask)
    steps = (chosen, lambda: gathered(mask), lambda: attended(*few))
    return {
        OURS: lambda: attended(*gathered(chosen())),
        FLASH: lambda: attended(K, V),
        **dict(zip(STEPS, steps, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--columns", type=int, default=128)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    cp, torch = cupy_or_exit(), torch_or_exit()
    print(f"{device_name(cp)}, {options.heads} heads, d = {options.columns}, {options.size} keys of each head")
    rows, ratios = [], {}
    for n in SIZES:
        calls = candidates(torch, options.heads, n, options.columns, options.size)
        times = interleaved_on_device(cp, calls, options.rounds)
        ratios[n] = times[FLASH] / times[OURS]
        rows += [
            [f"n = {n}: {name}", f"{1e3 * seconds:.3f}", f"{seconds / times[OURS]:.2f}"]
            for name, seconds in times.items()
        ]
        del calls
    table(["", "ms", "/ ours"], rows)
    for n, bar in BARS.items():
        print(f"n = {n}, flash attention over all keys / ours:", verdict(ratios[n], bar))


if __name__ == "__main__":
    main()
