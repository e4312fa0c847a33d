"""Token statistics attention on the CPU against the released operator as one would write it with torch and numpy.

Bars at the shape of GPT-2 base (8 sequences of 1024 tokens, 12 heads of 64 channels), float32, causal: at least 15
times as fast forward, and 6 times forward and backward. The time for a token does not depend on their number up to
10⁶, and that of a step of decoding, at most 60 microseconds, not on what came before.

    python examples/benchmarks/tssa.py [--rounds 7] [--only forward both compiled linear decoding]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _rivals import interleaved, steps, table, verdict

import levattn
from levattn.attention import TokenForm, tssa

B, T, HEADS, D = 8, 1024, 12, 64
LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
PAUSE, WARM = 0.12, 0.08


def released(W: Any, temperature: Any, bias: Any) -> Any:
    """The operator of the language models: W (B, h, T, d), temperature (h, 1), bias (h, T, 1)."""
    squares = W**2
    norms = torch.cumsum(squares, dim=-2).clamp_min(1e-12)
    Pi = torch.softmax((squares / norms + bias).sum(-1) * temperature, dim=1)
    moments = torch.cumsum(Pi[..., None] * squares, dim=-2) / (torch.cumsum(Pi, dim=-1) + 1e-8)[..., None]
    return -(W * Pi[..., None]) * (1 / (1 + moments))


def released_everywhere(W: Any, temperature: Any) -> Any:
    """The operator of the image models."""
    normed = torch.nn.functional.normalize(W, dim=-2)
    Pi = torch.softmax((normed**2).sum(-1) * temperature, dim=1)
    moments = (Pi / (Pi.sum(-1, keepdim=True) + 1e-8))[..., None, :] @ W**2
    return -(W * Pi[..., None]) * (1 / (1 + moments))


def released_numpy(W: Any, temperature: Any, bias: Any) -> Any:
    """The operator of the language models with numpy."""
    squares = W**2
    norms = np.maximum(np.cumsum(squares, axis=-2), 1e-12)
    logits = (squares / norms + bias).sum(-1) * temperature
    E = np.exp(logits - logits.max(axis=1, keepdims=True))
    Pi = E / E.sum(axis=1, keepdims=True)
    moments = np.cumsum(Pi[..., None] * squares, axis=-2) / (np.cumsum(Pi, axis=-1) + 1e-8)[..., None]
    return -(W * Pi[..., None]) * (1 / (1 + moments))


class Work:
    """The tokens, as a linear layer leaves them: (B, T, h · d), seen as (B, h, T, d)."""

    def __init__(self) -> None:
        self.W = torch.randn(B, T, HEADS * D).unflatten(-1, (HEADS, D)).transpose(1, 2)
        self.temperature, self.bias = torch.ones(HEADS), torch.zeros(HEADS, T)
        self.plain = self.temperature[:, None], self.bias[..., None]


def forward(work: Work, rounds: int) -> None:
    W, theta, bias = work.W, work.temperature, work.bias
    arrays = W.numpy(), *(part.numpy() for part in work.plain)
    contiguous = W.contiguous()
    calls: dict[str, Callable[[], object]] = {
        "torch": lambda: released(W, *work.plain),
        "torch, heads apart": lambda: released(contiguous, *work.plain),
        "numpy": lambda: released_numpy(*arrays),
        "tssa": lambda: tssa(W, theta, form=TokenForm(bias=bias)),
        "torch, not causal": lambda: released_everywhere(W, work.plain[0]),
        "tssa, not causal": lambda: tssa(W, theta, causal=False),
    }
    print(f"forward, {B} x {T} tokens, {HEADS} heads of {D} channels, float32: ms")
    with torch.no_grad():
        error = float((released(W, *work.plain) - tssa(W, theta, form=TokenForm(bias=bias))).abs().max())
        for threads in (1, torch.get_num_threads()):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            with levattn.thread_limit(threads):
                times = interleaved(calls, rounds, PAUSE, WARM)
            torch.set_num_threads(before)
            table([f"{threads} threads", *times], [["", *(f"{1e3 * s:.2f}" for s in times.values())]])
            rival = min(times[name] for name in ("torch", "torch, heads apart", "numpy"))
            print(f"fastest rival / tssa, {threads} threads:", verdict(rival / times["tssa"], 15))
            print(f"not causal: {times['torch, not causal'] / times['tssa, not causal']:.1f}")
    print(f"largest difference to torch: {error:.1e}")


def both(work: Work, rounds: int) -> None:
    dY = torch.randn_like(work.W)

    def passes(function: Any, *parameters: Any) -> Callable[[], object]:
        leaves = [part.detach().requires_grad_() for part in (work.W, *parameters)]
        return lambda: torch.autograd.grad(function(*leaves), leaves, dY)

    calls = {
        "torch": passes(released, *work.plain),
        "tssa": passes(lambda W, theta, bias: tssa(W, theta, form=TokenForm(bias=bias)), work.temperature, work.bias),
        "torch, not causal": passes(released_everywhere, work.plain[0]),
        "tssa, not causal": passes(lambda W, theta: tssa(W, theta, causal=False), work.temperature),
    }
    times = interleaved(calls, rounds, PAUSE, WARM)
    print("\nforward and backward: ms")
    table([*times], [[f"{1e3 * s:.2f}" for s in times.values()]])
    print("torch / tssa:", verdict(times["torch"] / times["tssa"], 6))
    print(f"not causal: {times['torch, not causal'] / times['tssa, not causal']:.1f}")


def compiled(work: Work, rounds: int) -> None:
    function = torch.compile(released, dynamic=False)
    print("\nthe transcription through torch.compile, forward: ms")
    with torch.no_grad():
        try:
            function(work.W, *work.plain)
        except Exception as error:  # no C++ compiler, for one
            print(f"does not compile here: {type(error).__name__}")
            return
        calls = {
            "torch.compile": lambda: function(work.W, *work.plain),
            "tssa": lambda: tssa(work.W, work.temperature, form=TokenForm(bias=work.bias)),
        }
        times = interleaved(calls, rounds, PAUSE, WARM)
    table(
        [*times, "ratio"],
        [[*(f"{1e3 * s:.2f}" for s in times.values()), f"{times['torch.compile'] / times['tssa']:.1f}"]],
    )


def linear(rounds: int) -> None:
    print("\none sequence of T tokens, 2 heads of 64 channels: nanoseconds a token")
    rows = []
    for causal in (True, False):
        calls = {}
        for length in LENGTHS:
            W = torch.randn(1, length, 2 * D).unflatten(-1, (2, D)).transpose(1, 2)
            calls[length] = lambda W=W, causal=causal: tssa(W, causal=causal)
        times = interleaved({str(n): call for n, call in calls.items()}, rounds)
        each = [1e9 * times[str(n)] / n for n in LENGTHS]
        rows.append(["causal" if causal else "not causal", *(f"{s:.0f}" for s in each), f"{each[-1] / each[1]:.2f}"])
    table(["", *(f"T = {n}" for n in LENGTHS), "10⁶ / 10⁴"], rows)


def decoding(rounds: int) -> None:
    rng = np.random.default_rng(0)
    token = rng.standard_normal((HEADS, 1, D), np.float32)
    calls: dict[str, Callable[[], object]] = {}
    for length in (64, 4096, 65536):
        _, state = tssa(rng.standard_normal((HEADS, length, D), np.float32), return_state=True)
        calls[f"after {length}"] = lambda state=state: tssa(token, state=state, return_state=True)
    tensor, x = torch.from_numpy(token), torch.randn(1, HEADS * D)
    weights = torch.randn(HEADS * D, HEADS * D)
    calls["torch tensors"] = lambda: tssa(tensor, state=state, return_state=True)
    calls["torch, a linear layer of the token"] = lambda: x @ weights
    with torch.no_grad():
        steps(f"{HEADS} heads of {D} channels", calls, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=["forward", "both", "compiled", "linear", "decoding"])
    options = parser.parse_args()
    torch.manual_seed(0)
    work = Work()
    if "forward" in options.only:
        forward(work, options.rounds)
    if "both" in options.only:
        both(work, options.rounds)
    if "compiled" in options.only:
        compiled(work, options.rounds)
    if "linear" in options.only:
        linear(options.rounds)
    if "decoding" in options.only:
        decoding(options.rounds)


if __name__ == "__main__":
    main()
