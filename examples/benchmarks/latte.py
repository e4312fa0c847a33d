"""Latte on the CPU against softmax attention, torch's scaled_dot_product_attention on the same values, and against
itself written with matrix products of torch.

Bars for float32, D = 64 and L = 64 latents, with 8 heads and with one: causal Latte is faster from T = 256 on and at
least 12 times as fast at T = 4096; bidirectional at least 8 times as fast there, and with 8 heads level with the
products of torch at 256, 1024 and 4096 positions; the backward pass takes at most 3.5 times the forward one. A step of
decoding takes at most 60 microseconds, and as long after 65 536 positions as after 64; arguments, masks and the way to
the kernels take at most 50.

    python examples/benchmarks/latte.py [--rounds 7] [--heads 8 1] [--only causal bidirectional products backward
        decoding small]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _comparison_attention import torch_latte
from _rivals import interleaved, microseconds, steps, table, verdict

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


def products(rounds: int) -> None:
    print(f"\nbidirectional, 8 heads, L = D = {D}: ms")
    rows, ratios = [], {}
    compiled = torch.compile(torch_latte, dynamic=False)
    with torch.no_grad():
        for T in (256, 1024, 4096):
            arrays = torch.randn(3, 1, 8, T, D)
            calls: dict[str, Callable[[], object]] = {
                "Latte": lambda arrays=arrays: latte(*arrays, causal=False),
                "torch": lambda arrays=arrays: torch_latte(*arrays, causal=False),
            }
            try:
                compiled(*arrays, causal=False)
                calls["torch.compile"] = lambda arrays=arrays: compiled(*arrays, causal=False)
            except Exception as error:  # no C++ compiler, for one
                print(f"torch.compile fails here: {type(error).__name__}")
            exact = torch_latte(*(array.double() for array in arrays), causal=False)
            times = interleaved(calls, rounds, PAUSE, WARM)
            errors = [float((calls[name]() - exact).abs().max()) for name in ("Latte", "torch")]
            ratios[T] = min(s for name, s in times.items() if name != "Latte") / times["Latte"]
            shown = " ".join(f"{name} {1e3 * s:.3f}" for name, s in times.items())
            rows.append([str(T), shown, *(f"{error:.1e}" for error in errors)])
    table(["T", "ms", "largest error of Latte", "of torch"], rows)
    for T, ratio in ratios.items():
        print(f"T = {T}, fastest of torch / Latte: {verdict(ratio, 1)}")


def decoding(heads: int, rounds: int) -> None:
    rng = np.random.default_rng(0)
    Q, K = rng.standard_normal((2, heads, 1, 64), np.float32)
    V = rng.standard_normal((heads, 1, D), np.float32)
    tensors = [torch.from_numpy(x) for x in (Q, K, V)]
    calls: dict[str, Callable[[], object]] = {}
    for T in (64, 4096, 65536):
        logits, values = (
            rng.standard_normal((heads, T, 64), np.float32),
            rng.standard_normal((heads, T, D), np.float32),
        )
        _, state = latte(logits, logits, values, return_state=True)
        calls[f"after {T}"] = lambda state=state: latte(Q, K, V, state=state, return_state=True)
    calls["torch tensors"] = lambda: latte(*tensors, state=state, return_state=True)
    S = torch.randn(heads, 64, D)
    calls["torch, a product with the state"] = lambda: tensors[0] @ S
    with torch.no_grad():
        steps(f"{heads} heads, L = D = 64", calls, rounds)


def small(rounds: int) -> None:
    """What a call takes beside its kernels, which have next to nothing to do here."""
    arrays = np.random.default_rng(0).standard_normal((3, 1, 8), np.float32)
    tensors, mask = [torch.from_numpy(x) for x in arrays[:, None]], np.ones(1, np.bool_)
    calls: dict[str, Callable[[], object]] = {
        "causal": lambda: latte(*arrays[:, None]),
        "bidirectional": lambda: latte(*arrays[:, None], causal=False),
        "masked": lambda: latte(*arrays[:, None], mask=mask),
        "torch tensors": lambda: latte(*tensors),
        "torch, softmax attention": lambda: torch.nn.functional.scaled_dot_product_attention(*tensors),
    }
    with torch.no_grad():
        times = microseconds(calls, rounds)
    print("\none position of one head, 8 latents and channels: microseconds")
    table([*times], [[f"{s:.1f}" for s in times.values()]])
    own = [s for name, s in times.items() if "softmax" not in name]
    print("the longest:", verdict(max(own), 50, at_least=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 1])
    parser.add_argument(
        "--only", nargs="+", default=["causal", "bidirectional", "products", "backward", "decoding", "small"]
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    for heads in options.heads:
        for causal, name in ((True, "causal"), (False, "bidirectional")):
            if name in options.only:
                against_attention(heads, options.rounds, causal=causal)
        if "backward" in options.only:
            backward(heads, options.rounds)
    if "products" in options.only:
        products(options.rounds)
    for heads in options.heads if "decoding" in options.only else ():
        decoding(heads, options.rounds)
    if "small" in options.only:
        small(options.rounds)


if __name__ == "__main__":
    main()
