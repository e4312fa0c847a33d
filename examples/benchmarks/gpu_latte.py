"""Latent attention on a CUDA device against softmax attention and against gated linear attention.

Ours is `levattn.attention.latte` on tensors, in bfloat16 as the rivals take it and in float32. The rivals are causal
`scaled_dot_product_attention` of torch by the kernel that it chooses, by its flash kernel and by cuDNN, and where
flash-linear-attention is installed its `chunk_gla`, which computes the same sums from keys and decays that are
normalized before: it gets them as a gift. As many latents as channels. A step of decoding is one row from a state of
all positions before, against attention over the cache of their keys and values.

Bars: forward at least 1.2 times as fast as chunk_gla, and faster than the kernel that torch chooses from T = 4096 on.
Beside them the milliseconds that flash-linear-attention publishes for a GB200, forward.

    python examples/benchmarks/gpu_latte.py [--rounds 11] [--decoding 16384] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from _gpu import CUDNN, DEFAULT, FLASH, Bench, Calls, attended, dense, forward_and_backward, has

from levattn.attention import latte

OURS, WIDE, GLA = "ours", "ours, float32", "chunk_gla"
SHAPES = ((2, 16384, 16, 128), (4, 4096, 64, 128), (4, 2048, 16, 128), (8, 1024, 8, 64))  # B, T, H, D
PUBLISHED = {  # ms on a GB200: chunk_gla, FlashAttention-2
    (2, 16384, 16, 128): (1.445, 5.035),
    (4, 4096, 64, 128): (2.251, 2.560),
    (4, 2048, 16, 128): (0.514, 0.346),
    (8, 1024, 8, 64): (0.358, 0.157),
}
GLA_BAR = 1.2
DENSE_BAR, DENSE_FROM = 1.0, 4096


def normalized(torch: Any, Q: Any, K: Any, V: Any) -> tuple[Any, ...]:
    """What chunk_gla takes, (B, T, H, ·): weights of latents, keys e^(K − Z), values, and the decays of log sums Z."""
    Z = torch.logcumsumexp(K.double(), dim=-2)
    decays = torch.cat([torch.zeros_like(Z[..., :1, :]), Z[..., :-1, :] - Z[..., 1:, :]], dim=-2)
    parts = (Q.float().softmax(dim=-1), (K.double() - Z).exp(), V, decays)
    kinds = (V.dtype, V.dtype, V.dtype, torch.float32)
    return tuple(part.to(kind).transpose(1, 2).contiguous() for part, kind in zip(parts, kinds, strict=True))


def tensors_of(bench: Bench, B: int, T: int, H: int, D: int) -> tuple[Any, ...]:
    return tuple(bench.normal(3, B, H, T, D, dtype="bfloat16"))


def routes(bench: Bench, tensors: tuple[Any, ...], *, gla: bool) -> dict[str, tuple[Callable[..., Any], Any]]:
    """Each way to attend, and the tensors that it takes."""
    found: dict[str, tuple[Callable[..., Any], Any]] = {
        OURS: (latte, tensors),
        WIDE: (latte, tuple(part.float() for part in tensors)),
        **{which: (partial(attended, bench.torch, which, causal=True), tensors) for which in (DEFAULT, FLASH, CUDNN)},
    }
    if gla:
        from fla.ops.gla import chunk_gla

        gift = normalized(bench.torch, *tensors)
        found[GLA] = (lambda q, k, v, g: chunk_gla(q, k, v, g, scale=1.0)[0], gift)
    return found


def prefill(bench: Bench) -> None:
    gla = has("fla")
    for shape in SHAPES:
        B, full, H, D = shape
        T = bench.sized(full)
        found = routes(bench, tensors_of(bench, B, T, H, D), gla=gla)
        calls: Calls = {}
        for name, (route, tensors) in found.items():
            calls[name] = partial(route, *tensors)
            calls[f"{name}, with gradients"] = partial(forward_and_backward, bench.torch, route, tensors)
        case = f"B = {B}, T = {T}, H = {H}, D = {D}"
        times = bench.times(case, calls, OURS)
        print("published for a GB200, ms: chunk_gla {}, flash attention {}".format(*PUBLISHED[shape]))
        if gla and GLA in times:
            bench.bar(f"{case}, chunk_gla / ours", times[GLA] / times[OURS], GLA_BAR)
            one, other = (route(*tensors) for route, tensors in (found[WIDE], found[GLA]))
            difference = (one - other.transpose(1, 2).float()).abs().max().item()
            bench.note(f"{case}, the largest difference between chunk_gla and ours in float32", difference)
        if full >= DENSE_FROM:
            bench.bar(f"{case}, {DEFAULT} / ours", times[DEFAULT] / times[OURS], DENSE_BAR)


def decoding(bench: Bench, T: int) -> None:
    for B, H, D in ((1, 16, 64), (32, 16, 64), (32, 16, 128)):
        Q, K, V = tensors_of(bench, B, T, H, D)
        state = latte(Q, K, V, return_state=True)[1]
        one = tuple(part[..., -1:, :] for part in (Q, K, V))
        calls: Calls = {
            OURS: partial(latte, *one, state=state, return_state=True),
            **dense(bench.torch, one[0], K, V),
        }
        bench.times(f"one step after {T} positions, with the state after it, B = {B}, H = {H}, D = {D}", calls, OURS)


def main() -> None:
    bench = Bench(__file__, __doc__, rounds=11, decoding=16384)
    prefill(bench)
    decoding(bench, bench.sized(bench.options.decoding))


if __name__ == "__main__":
    main()
