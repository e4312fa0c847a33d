"""Latent attention on a CUDA device against softmax attention and against gated linear attention.

Ours is `levattn.attention.latte` on tensors, in bfloat16 as the rivals take it and in float32. The rivals are causal
`scaled_dot_product_attention` of torch with its flash kernel, and where flash-linear-attention is installed its
`chunk_gla`, which computes the same sums from keys and decays that are normalized before: it gets them as a gift.
As many latents as channels. A step of decoding is one row from a state of all positions before, against flash
attention over the cache of their keys and values.

Bars: forward at least 1.2 times as fast as chunk_gla, and faster than flash attention from T = 4096 on. Beside them
the milliseconds that flash-linear-attention publishes for a GB200, forward.

    python examples/benchmarks/gpu_latte.py [--rounds 11] [--decoding 16384]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from _gpu import cupy_or_exit, device_name, interleaved_on_device
from _rivals import table, verdict
from gpu_attention import torch_or_exit

from levattn.attention import latte

OURS, WIDE, FLASH, GLA = "ours", "ours, float32", "flash attention", "chunk_gla"
SHAPES = ((2, 16384, 16, 128), (4, 4096, 64, 128), (4, 2048, 16, 128), (8, 1024, 8, 64))  # B, T, H, D
PUBLISHED = {  # ms on a GB200: chunk_gla, FlashAttention-2
    (2, 16384, 16, 128): (1.445, 5.035),
    (4, 4096, 64, 128): (2.251, 2.560),
    (4, 2048, 16, 128): (0.514, 0.346),
    (8, 1024, 8, 64): (0.358, 0.157),
}
GLA_BAR = 1.2
FLASH_BAR, FLASH_FROM = 1.0, 4096


def flash(torch: Any, q: Any, k: Any, v: Any, *, causal: bool = True) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def normalized(torch: Any, Q: Any, K: Any, V: Any) -> tuple[Any, ...]:
    """What chunk_gla takes, (B, T, H, ·): weights of latents, keys e^(K − Z), values, and the decays of log sums Z."""
    Z = torch.logcumsumexp(K.double(), dim=-2)
    decays = torch.cat([torch.zeros_like(Z[..., :1, :]), Z[..., :-1, :] - Z[..., 1:, :]], dim=-2)
    parts = (Q.float().softmax(dim=-1), (K.double() - Z).exp(), V, decays)
    kinds = (V.dtype, V.dtype, V.dtype, torch.float32)
    return tuple(part.to(kind).transpose(1, 2).contiguous() for part, kind in zip(parts, kinds, strict=True))


def routes(torch: Any, shape: tuple[int, ...]) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Each way to attend, and the tensors that it takes."""
    B, T, H, D = shape
    Q, K, V = (torch.randn((B, H, T, D), device="cuda", dtype=torch.bfloat16) for _ in range(3))
    found: dict[str, tuple[Callable[..., Any], list[Any]]] = {
        OURS: (latte, [Q, K, V]),
        WIDE: (latte, [part.float() for part in (Q, K, V)]),
        FLASH: (partial(flash, torch), [Q, K, V]),
    }
    if find_spec("fla") is not None:
        from fla.ops.gla import chunk_gla

        found[GLA] = (lambda q, k, v, g: chunk_gla(q, k, v, g, scale=1.0)[0], [*normalized(torch, Q, K, V)])
    return found


def forward_and_backward(torch: Any, route: Callable[..., Any], tensors: list[Any]) -> Any:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    Y = route(*leaves)
    return torch.autograd.grad(Y, leaves, torch.ones_like(Y))


def prefill(cp: Any, torch: Any, rounds: int) -> None:
    rows, bars = [], []
    for shape in SHAPES:
        found = routes(torch, shape)
        calls: dict[str, Callable[[], object]] = {}
        for name, (route, tensors) in found.items():
            calls[name] = partial(route, *tensors)
            calls[f"{name}, with gradients"] = partial(forward_and_backward, torch, route, tensors)
        times = interleaved_on_device(cp, calls, rounds)
        gla, other = PUBLISHED[shape]
        published = {GLA: gla, FLASH: other}
        for name in found:
            both = times[f"{name}, with gradients"]
            cells = (f"{1e3 * times[name]:.3f}", f"{1e3 * both:.3f}", f"{times[name] / times[OURS]:.2f}")
            rows.append([f"{shape}: {name}", *cells, str(published.get(name, ""))])
        if GLA in found:
            bars.append(f"{shape}, chunk_gla / ours: {verdict(times[GLA] / times[OURS], GLA_BAR)}")
        if shape[1] >= FLASH_FROM:
            bars.append(f"{shape}, flash attention / ours: {verdict(times[FLASH] / times[OURS], FLASH_BAR)}")
    table(["(B, T, H, D)", "forward, ms", "and backward, ms", "/ ours", "GB200, ms"], rows)
    for line in bars:
        print(line)


def decoding(cp: Any, torch: Any, T: int, rounds: int) -> None:
    rows = []
    for B, H, D in ((1, 16, 64), (32, 16, 64), (32, 16, 128)):
        Q, K, V = (torch.randn((B, H, T, D), device="cuda", dtype=torch.bfloat16) for _ in range(3))
        state = latte(Q, K, V, return_state=True)[1]
        one = tuple(part[..., -1:, :] for part in (Q, K, V))
        calls: dict[str, Callable[[], object]] = {
            OURS: partial(latte, *one, state=state, return_state=True),
            FLASH: partial(flash, torch, one[0], K, V, causal=False),
        }
        times = interleaved_on_device(cp, calls, rounds)
        cells = (f"{1e3 * times[OURS]:.3f}", f"{1e3 * times[FLASH]:.3f}", f"{times[FLASH] / times[OURS]:.2f}")
        rows.append([f"{B}, {H}, {D}", *cells])
    print(f"\none step after {T} positions, with the state after it; ms")
    table(["B, H, D", OURS, FLASH, "ratio"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--decoding", type=int, default=16384, help="positions before the step that is measured")
    options = parser.parse_args()
    cp, torch = cupy_or_exit(), torch_or_exit()
    print(device_name(cp))
    if find_spec("fla") is None:
        print("chunk_gla is not measured: this needs flash-linear-attention")
    prefill(cp, torch, options.rounds)
    decoding(cp, torch, options.decoding, options.rounds)


if __name__ == "__main__":
    main()
