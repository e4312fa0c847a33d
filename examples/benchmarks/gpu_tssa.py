"""Token statistics attention on a CUDA device against its formulas in torch, and against a copy of the tokens.

Ours is `levattn.attention.tssa` on tensors of float32, the heads of a token side by side as a layer's output has them.
The rivals are the released operator written out in torch's own functions, op by op and through `torch.compile`, and
torch's attention on tokens of 16 bits for the scale (of another operator). A copy reads the tokens once and writes
them once, as the fastest forward pass must; gradients have to read the tokens and dY and to write dW.

Bars: faster than the formulas, with gradients too, and forward within 2 times a copy where there are 64 MiB of tokens
or more; of fewer a copy is over before all kernels are launched.

    python examples/benchmarks/gpu_tssa.py [--rounds 11] [--decoding 16384] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from _gpu import COPY, DEFAULT, Bench, Calls, attended, copy_bandwidth, forward_and_backward

from levattn.attention import tssa

OURS, NORM, FORMULAS, COMPILED = "ours", "ours, norm", "formulas", "formulas, compiled"
SHAPES = ((8, 1024, 12, 64), (8, 8192, 12, 64), (1, 131072, 12, 64), (64, 256, 16, 64))  # B, T, h, d
COPY_BAR, COPY_FROM = 2.0, 64 << 20  # bytes of tokens
FORMULAS_BAR = 1.0
DENSE_UP_TO = 32768  # tokens; of more it takes seconds


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


def side_by_side(bench: Bench, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    """Tokens (B, h, T, d) at random whose heads lie next to each other."""
    return bench.normal(*shape, dtype=dtype).transpose(1, 2)


def routes(bench: Bench, shape: tuple[int, ...], *, causal: bool) -> dict[str, tuple[Callable[..., Any], Any]]:
    """Each way to attend, and the tensors that it takes."""
    tokens = side_by_side(bench, shape), bench.torch.ones(shape[2], device=bench.device)
    formulas = causal_formulas if causal else bidirectional_formulas
    found: dict[str, tuple[Callable[..., Any], Any]] = {
        OURS: (partial(tssa, causal=causal), tokens),
        NORM: (partial(tssa, causal=causal, form="norm"), tokens),
        FORMULAS: (formulas, tokens),
        COMPILED: (bench.torch.compile(formulas, dynamic=False), tokens),
    }
    if shape[1] <= DENSE_UP_TO:
        half = side_by_side(bench, shape, "bfloat16")
        found[DEFAULT] = partial(attended, bench.torch, DEFAULT, causal=causal), (half, half, half)
    return found


def agree(torch: Any, found: dict[str, tuple[Callable[..., Any], Any]]) -> str:
    """The largest difference between ours and the formulas in float64, in the output and in the gradient of W."""
    (ours, tensors), (formulas, _) = found[OURS], found[FORMULAS]
    wide = tuple(tensor.double() for tensor in tensors)
    output = (ours(*tensors) - formulas(*wide)).abs().max().item()
    dW, exact = (forward_and_backward(torch, *call)[0] for call in ((ours, tensors), (formulas, wide)))
    return f"output {output:.1e}, gradient {(dW - exact).abs().max().item():.1e}"


def whole_sequences(bench: Bench, *, causal: bool) -> None:
    for full in SHAPES:
        shape = (full[0], bench.sized(full[1]), *full[2:])
        found, nbytes = routes(bench, shape, causal=causal), 4 * shape[0] * shape[1] * shape[2] * shape[3]
        case = f"(B, T, h, d) = {shape}, {'causal' if causal else 'bidirectional'}"
        calls: Calls = {COPY: bench.copier(nbytes)}
        for name, (route, tensors) in found.items():
            calls[name] = partial(route, *tensors)
            calls[f"{name}, with gradients"] = partial(forward_and_backward, bench.torch, route, tensors)
        times = bench.times(case, calls, COPY)
        if times:
            bench.note(f"{case}, differences from float64", agree(bench.torch, found))
        bench.note(f"{case}, a copy, TB/s", round(copy_bandwidth(nbytes, times[COPY]) / 1e12, 3))
        if nbytes >= COPY_FROM:
            bench.bar(f"{case}, ours / a copy", times[OURS] / times[COPY], COPY_BAR, at_least=False)
        for which in ("", ", with gradients"):
            ratio = times[COMPILED + which] / times[OURS + which]
            bench.bar(f"{case}, formulas, compiled / ours{which}", ratio, FORMULAS_BAR)


def decoding(bench: Bench, T: int) -> None:
    print("\nsteps of decoding, with the state after them; the formulas compute all tokens anew")
    for B, h, d in ((1, 12, 64), (32, 12, 64), (32, 32, 128)):
        W, temperature = side_by_side(bench, (B, T, h, d)), bench.torch.ones(h, device=bench.device)
        state = tssa(W, temperature, return_state=True)[1]
        calls: Calls = {
            OURS: partial(tssa, W[..., -1:, :], temperature, state=state, return_state=True),
            FORMULAS: partial(causal_formulas, W, temperature),
        }
        bench.times(f"one step after {T} tokens, B = {B}, h = {h}, d = {d}", calls, OURS)


def main() -> None:
    bench = Bench(__file__, __doc__, rounds=11, decoding=16384)
    for causal in (True, False):
        whole_sequences(bench, causal=causal)
    decoding(bench, bench.sized(bench.options.decoding))


if __name__ == "__main__":
    main()
