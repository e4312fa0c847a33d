"""Token statistics attention on a CUDA device against its formulas in torch, and against a copy of the tokens.

Ours is `levattn.attention.tssa` on tensors of float32, the heads of a token side by side as a layer's output has them.
The rivals are the released operator written out in torch's own functions, op by op and through `torch.compile`, and
flash attention on tokens of 16 bits for the scale (of another operator). A copy reads the tokens once and writes them
once, as the fastest forward pass must; gradients have to read the tokens and dY and to write dW.

Bars: faster than the formulas, with gradients too, and forward within 2 times a copy where there are 64 MiB of tokens
or more; of fewer a copy is over before all kernels are launched.

    python examples/benchmarks/gpu_tssa.py [--rounds 11] [--decoding 16384]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from _gpu import COPY, copier, copy_bandwidth, cupy_or_exit, device_name, interleaved_on_device
from _rivals import table, verdict
from gpu_attention import torch_or_exit

from levattn.attention import tssa

OURS, NORM, FORMULAS, COMPILED, FLASH = "ours", "ours, norm", "formulas", "formulas, compiled", "flash attention"
SHAPES = ((8, 1024, 12, 64), (8, 8192, 12, 64), (1, 131072, 12, 64), (64, 256, 16, 64))  # B, T, h, d
COPY_BAR, COPY_FROM = 2.0, 64 << 20  # bytes of tokens
FORMULAS_BAR = 1.0


def causal_formulas(W: Any, temperature: Any) -> Any:
    """The causal operator with the constants of the released one, for W (B, h, T, d) and temperatures (h,)."""
    squares = W.square()
    logits = (squares / squares.cumsum(dim=-2).clamp_min(1e-12)).sum(dim=-1)
    P = (temperature[:, None] * logits).softmax(dim=-2)[..., None]
    moment = (P * squares).cumsum(dim=-2) / (P.cumsum(dim=-2) + 1e-8)
    return -P * W / (1 + moment)


def bidirectional_formulas(W: Any, temperature: Any) -> Any:
    squares = W.square()
    logits = (squares / squares.sum(dim=-2, keepdim=True).clamp_min(1e-24)).sum(dim=-1)
    P = (temperature[:, None] * logits).softmax(dim=-2)[..., None]
    moment = (P * squares).sum(dim=-2, keepdim=True) / (P.sum(dim=-2, keepdim=True) + 1e-8)
    return -P * W / (1 + moment)


def flash(torch: Any, W: Any, *, causal: bool) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(W, W, W, is_causal=causal)


def side_by_side(torch: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Tokens (B, h, T, d) at random whose heads lie next to each other."""
    return torch.randn(shape, device="cuda", dtype=dtype).transpose(1, 2)


def routes(
    torch: Any, shape: tuple[int, ...], *, causal: bool
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Each way to attend, and the tensors that it takes."""
    W, temperature = side_by_side(torch, shape, torch.float32), torch.ones(shape[2], device="cuda")
    formulas = causal_formulas if causal else bidirectional_formulas
    return {
        OURS: (partial(tssa, causal=causal), (W, temperature)),
        NORM: (partial(tssa, causal=causal, membership="norm"), (W, temperature)),
        FORMULAS: (formulas, (W, temperature)),
        COMPILED: (torch.compile(formulas, dynamic=False), (W, temperature)),
        FLASH: (partial(flash, torch, causal=causal), (side_by_side(torch, shape, torch.bfloat16),)),
    }


def forward_and_backward(torch: Any, route: Callable[..., Any], tensors: tuple[Any, ...]) -> Any:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    Y = route(*leaves)
    return torch.autograd.grad(Y, leaves, torch.ones_like(Y))


def agree(torch: Any, found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]) -> str:
    """The largest difference between ours and the formulas in float64, in the output and in the gradient of W."""
    (ours, tensors), (formulas, _) = found[OURS], found[FORMULAS]
    wide = tuple(tensor.double() for tensor in tensors)
    output = (ours(*tensors) - formulas(*wide)).abs().max().item()
    dW, exact = (forward_and_backward(torch, *call)[0] for call in ((ours, tensors), (formulas, wide)))
    return f"differences from float64: output {output:.1e}, gradient {(dW - exact).abs().max().item():.1e}"


def whole_sequences(cp: Any, torch: Any, rounds: int, *, causal: bool) -> None:
    rows, bars = [], []
    for shape in SHAPES:
        found, nbytes = routes(torch, shape, causal=causal), 4 * shape[0] * shape[1] * shape[2] * shape[3]
        bars.append(f"{shape}, {agree(torch, found)}")
        calls: dict[str, Callable[[], object]] = {COPY: copier(cp, nbytes)}
        for name, (route, tensors) in found.items():
            if name == FLASH and shape[1] > 32768:
                continue  # seconds
            calls[name] = partial(route, *tensors)
            calls[f"{name}, with gradients"] = partial(forward_and_backward, torch, route, tensors)
        times = interleaved_on_device(cp, calls, rounds)
        for name in found:
            if name not in times:
                continue
            both = times[f"{name}, with gradients"]
            cells = (f"{1e3 * times[name]:.3f}", f"{1e3 * both:.3f}", f"{times[name] / times[COPY]:.2f}")
            rows.append([f"{shape}: {name}", *cells, f"{both / times[COPY]:.2f}"])
        bars.append(f"{shape}, a copy: {copy_bandwidth(nbytes, times[COPY]) / 1e12:.2f} TB/s")
        if nbytes >= COPY_FROM:
            ratio = times[OURS] / times[COPY]
            bars.append(f"{shape}, ours / a copy: {verdict(ratio, COPY_BAR, at_least=False)}")
        for which in ("", ", with gradients"):
            ratio = times[COMPILED + which] / times[OURS + which]
            bars.append(f"{shape}, formulas, compiled / ours{which}: {verdict(ratio, FORMULAS_BAR)}")
    print(f"\n{'causal' if causal else 'bidirectional'}")
    table(["(B, T, h, d)", "forward, ms", "and backward, ms", "/ copy", "both / copy"], rows)
    for line in bars:
        print(line)


def decoding(cp: Any, torch: Any, T: int, rounds: int) -> None:
    rows = []
    for B, h, d in ((1, 12, 64), (32, 12, 64), (32, 32, 128)):
        W, temperature = side_by_side(torch, (B, T, h, d), torch.float32), torch.ones(h, device="cuda")
        state = tssa(W, temperature, return_state=True)[1]
        one = W[..., -1:, :]
        calls: dict[str, Callable[[], object]] = {
            OURS: partial(tssa, one, temperature, state=state, return_state=True),
            FORMULAS: lambda W=W, temperature=temperature: causal_formulas(W, temperature)[..., -1:, :],
        }
        times = interleaved_on_device(cp, calls, rounds)
        rows.append([f"{B}, {h}, {d}", f"{1e3 * times[OURS]:.3f}", f"{1e3 * times[FORMULAS]:.3f}"])
    print(f"\none step after {T} tokens, with the state after it; the formulas compute all of it anew; ms")
    table(["B, h, d", OURS, FORMULAS], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--decoding", type=int, default=16384, help="tokens before the step that is measured")
    options = parser.parse_args()
    cp, torch = cupy_or_exit(), torch_or_exit()
    print(device_name(cp))
    for causal in (True, False):
        whole_sequences(cp, torch, options.rounds, causal=causal)
    decoding(cp, torch, options.decoding, options.rounds)


if __name__ == "__main__":
    main()
