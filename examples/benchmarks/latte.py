"""Latte on the CPU against softmax attention: torch's scaled_dot_product_attention on the same values.

Bars for float32, D = 64 and L = 64 latents, with 8 heads and with one: causal Latte is faster from T = 256 on and at
least 12 times as fast at T = 4096; bidirectional at least 8 times as fast there; the backward pass takes at most 3.5
times the forward one; a step of decoding takes as long after 65 536 positions as after 64.

    python examples/benchmarks/latte.py [--rounds 7] [--heads 8 1] [--only causal bidirectional backward decoding]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _rivals import interleaved, table, verdict

from levattn.attention import latte

D = 64
LENGTHS = (64, 128, 256, 512, 1024, 4096)
LATENTS = (16, 64, 128)
PAUSE = 0.12  # seconds: threads of a rival that spin are asleep by then
WARM = 0.08


def attend(heads: int, T: int, *, causal: bool) -> Callable[[], object]:
    q, k, v = torch.randn(3, 1, heads, T, D)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def mix(heads: int, T: int, L: int, *, causal: bool) -> Callable[[], object]:
    Q, K = torch.randn(2, 1, heads, T, L)
    V = torch.randn(1, heads, T, D)
    return lambda: latte(Q, K, V, causal=causal)


def against_attention(heads: int, rounds: int, *, causal: bool) -> None:
    print(f"\n{'causal' if causal else 'bidirectional'}, {heads} heads, D = {D}: ms, and attention / Latte")
    rows, ratios = [], {}
    for T in LENGTHS:
        calls = {"attention": attend(heads, T, causal=causal)}
        calls |= {f"L = {L}": mix(heads, T, L, causal=causal) for L in LATENTS}
        times = interleaved(calls, rounds, PAUSE, WARM)
        base = times.pop("attention")
        ratios[T] = base / times["L = 64"]
        rows.append([str(T), f"{1e3 * base:.3f}", *(f"{1e3 * s:.3f} ({base / s:.1f})" for s in times.values())])
    table(["T", "attention", *(f"L = {L}" for L in LATENTS)], rows)
    if causal:
        for T in LENGTHS[2:-1]:
            print(f"L = 64, T = {T}: {verdict(ratios[T], 1)}")
    print(f"L = 64, T = 4096: {verdict(ratios[4096], 12 if causal else 8)}")


def backward(heads: int, rounds: int) -> None:
    print(f"\nforward and backward pass, {heads} heads, L = D = {D}: ms")
    rows, worst = [], 0.0
    for T in (256, 1024, 4096):
        for causal in (True, False):
            arrays = torch.randn(3, 1, heads, T, D)
            calls: dict[str, Callable[[], object]] = {}
            for name, function in {
                "Latte": lambda Q, K, V, causal=causal: latte(Q, K, V, causal=causal),
                "attention": lambda q, k, v, causal=causal: torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=causal
                ),
            }.items():
                leaves = [array.clone().requires_grad_() for array in arrays]
                y = function(*leaves)
                dY = torch.randn_like(y)

                def forward(function: Any = function, arrays: Any = arrays) -> object:
                    with torch.no_grad():
                        return function(*arrays)

                def back(y: Any = y, leaves: Any = leaves, dY: Any = dY) -> object:
                    return torch.autograd.grad(y, leaves, dY, retain_graph=True)

                calls |= {f"{name}, forward": forward, f"{name}, backward": back}
            times = interleaved(calls, rounds, PAUSE, WARM)
            ratio = times["Latte, backward"] / times["Latte, forward"]
            worst = max(worst, ratio)
            both = {name: times[f"{name}, forward"] + times[f"{name}, backward"] for name in ("Latte", "attention")}
            rows.append(
                [
                    f"{T}, {'causal' if causal else 'bidirectional'}",
                    *(f"{1e3 * s:.3f}" for s in times.values()),
                    f"{ratio:.2f}",
                    f"{both['attention'] / both['Latte']:.1f}",
                ]
            )
    table(["T", *calls, "backward / forward", "attention / Latte, both passes"], rows)
    print("largest backward / forward:", verdict(worst, 3.5, at_least=False))


def decoding(heads: int, rounds: int) -> None:
    rng = np.random.default_rng(0)
    Q, K = rng.standard_normal((2, heads, 1, 64), np.float32)
    V = rng.standard_normal((heads, 1, D), np.float32)
    calls: dict[str, Callable[[], object]] = {}
    for T in (64, 4096, 65536):
        logits, values = (
            rng.standard_normal((heads, T, 64), np.float32),
            rng.standard_normal((heads, T, D), np.float32),
        )
        _, state = latte(logits, logits, values, return_state=True)
        calls[f"after {T}"] = lambda state=state: [latte(Q, K, V, state=state, return_state=True) for _ in range(200)]
    times = interleaved(calls, rounds)
    print(f"\na step of decoding, {heads} heads, L = D = 64, numpy: microseconds")
    table([*times], [[f"{1e6 * s / 200:.1f}" for s in times.values()]])
    print("largest / smallest:", verdict(max(times.values()) / min(times.values()), 1.25, at_least=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--only", nargs="+", default=["causal", "bidirectional", "backward", "decoding"])
    options = parser.parse_args()
    torch.manual_seed(0)
    for heads in options.heads:
        for causal, name in ((True, "causal"), (False, "bidirectional")):
            if name in options.only:
                against_attention(heads, options.rounds, causal=causal)
        if "backward" in options.only:
            backward(heads, options.rounds)
    if "decoding" in options.only:
        decoding(options.heads[0], options.rounds)


if __name__ == "__main__":
    main()
