"""Heavy, pruned, Latte and token statistics attention beside dense attention and other ways to write them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from _libraries import missing, version
from _page import Table, milliseconds, slower
from _rivals import interleaved

import levattn

OURS = "levattn"
PAUSE, WARM = 0.12, 0.08
HEADS, D, L = 8, 64, 64
CHUNK = 64
SDPA = "torch SDPA"
OTHER = "torch, heads side by side"


def torch_latte(Q: Any, K: Any, V: Any, *, causal: bool) -> Any:
    """Latte with matrix products of torch: in chunks where it is causal, with one largest logit for all positions.

    A state that is as stable as levattn's would rescale at each position. This one is exact for logits that differ by
    less than the range of float32; of chunks of 32 to 256 positions, 64 were the fastest.
    """
    P = Q.softmax(-1)
    E = (K - K.amax(-2, keepdim=True)).exp()
    if not causal:
        return (P / E.sum(-2, keepdim=True)) @ (E.mT @ V)
    P = P / E.cumsum(-2)
    p, e, v = (X.unflatten(-2, (-1, CHUNK)) for X in (P, E, V))
    states = (e.mT @ v).cumsum(-3)
    before = states.roll(1, -3)
    before[..., 0, :, :] = 0
    return ((p @ e.mT).tril() @ v + p @ before).flatten(-3, -2)


def jax_latte() -> Callable[..., Any]:
    """Return causal Latte as a scan over positions in JAX, compiled, the form in which its authors released it."""
    import jax
    from jax import numpy as jnp

    def step(state: Any, x: Any) -> Any:
        sums, weights, top = state
        p, k, v = x
        largest = jnp.maximum(top, k)
        old, new = jnp.exp(top - largest), jnp.exp(k - largest)
        weights = weights * old + new
        sums = sums * old[..., None] + new[..., None] * v[..., None, :]
        return (sums, weights, largest), ((p / weights)[..., None, :] @ sums)[..., 0, :]

    def scan(Q: Any, K: Any, V: Any) -> Any:
        P, k, v = (jnp.moveaxis(X, -2, 0) for X in (jax.nn.softmax(Q, -1), K, V))
        start = jnp.zeros((*k.shape[1:], v.shape[-1])), jnp.zeros(k.shape[1:]), k[0]
        return jnp.moveaxis(jax.lax.scan(step, start, (P, k, v), unroll=16)[1], 0, -2)

    return jax.jit(scan)


def _compiled(function: Any, *arguments: Any, **options: Any) -> Any:
    """Return a function through torch.compile, or None where it cannot be compiled."""
    import torch

    compiled = torch.compile(function, dynamic=False)
    try:
        compiled(*arguments, **options)
    except Exception:  # no C++ compiler, for one: each version has an error of its own
        return None
    return compiled


def _table(name: str, first: str, names: dict[str, None], found: dict[str, dict[str, float]]) -> Table:
    """Return a table of milliseconds, with how much faster levattn is than the fastest rival."""
    table = Table(name, [first, *(f"{each}, ms" for each in names), "fastest rival / levattn"])
    for where, times in found.items():
        cells = [milliseconds(times[each]) if each in times else "-" for each in names]
        best = min(seconds for each, seconds in times.items() if each != OURS)
        table.rows.append([where, *cells, f"{best / times[OURS]:.2f}"])
        table.losses += slower(times, OURS, where)
    return table


def latte(*, quick: bool) -> Table:
    """Latte beside softmax attention and beside Latte written with torch and JAX."""
    import torch

    from levattn.attention import latte as ours

    torch.manual_seed(0)
    names = dict.fromkeys([OURS, SDPA, "torch, chunks", "torch.compile", "JAX scan"])
    scan = jax_latte() if version("jax") else None
    found: dict[str, dict[str, float]] = {}
    worst = 0.0
    lengths = (256, 1024) if quick else (256, 1024, 4096)
    for causal in (True, False):
        for T in lengths:
            Q, K, V = torch.randn(3, 1, HEADS, T, D)
            calls: dict[str, Callable[[], object]] = {
                OURS: lambda Q=Q, K=K, V=V, causal=causal: ours(Q, K, V, causal=causal),
                SDPA: lambda Q=Q, K=K, V=V, causal=causal: torch.nn.functional.scaled_dot_product_attention(
                    Q, K, V, is_causal=causal
                ),
                "torch, chunks": lambda Q=Q, K=K, V=V, causal=causal: torch_latte(Q, K, V, causal=causal),
            }
            with torch.no_grad():
                last = lengths[-1] == T and not quick  # to compile takes a while
                compiled = _compiled(torch_latte, Q, K, V, causal=causal) if last else None
                if compiled is not None:
                    calls["torch.compile"] = lambda f=compiled, Q=Q, K=K, V=V, c=causal: f(Q, K, V, causal=c)
                if causal and scan is not None:
                    arrays = [X.numpy() for X in (Q, K, V)]
                    calls["JAX scan"] = lambda arrays=arrays: scan(*arrays).block_until_ready()
                times = interleaved(calls, 1 if quick else 5, PAUSE, WARM)
                exact = torch_latte(*(X.double() for X in (Q, K, V)), causal=causal)
                worst = max(worst, float((calls[OURS]() - exact).abs().max()))
            found[f"{'causal' if causal else 'both ways'}, {T}"] = times
    table = _table("latte", "positions", names, found)
    table.notes += [
        f"{HEADS} heads of {D} channels, {L} latents, float32, forward; the largest difference of levattn from Latte "
        f"in float64 is {worst:.0e}",
        "torch SDPA computes softmax attention, another function, with the same shapes; all others compute Latte",
    ]
    if scan is None:
        table.notes.append(f"JAX: {missing('jax')}")
    return table


def _merged(times: dict[str, float]) -> dict[str, float]:
    """Return times in which torch's are of the better of its two layouts."""
    other = times.pop(OTHER)
    return times | {"torch": min(other, times["torch"])}


def tssa(*, quick: bool) -> Table:
    """Token statistics attention beside the released operator in torch and numpy, and beside softmax attention."""
    import torch

    operators = importlib.import_module("tssa")
    ours = importlib.import_module("levattn.attention").tssa
    torch.manual_seed(0)
    if quick:
        operators.B = 1
    work = operators.Work()
    W, theta, bias, plain = work.W, work.temperature, work.bias, work.plain
    contiguous = W.contiguous()
    arrays = W.numpy(), *(part.numpy() for part in plain)

    def attend(causal: bool) -> object:
        return torch.nn.functional.scaled_dot_product_attention(contiguous, contiguous, contiguous, is_causal=causal)

    def passes(function: Any, *parameters: Any) -> Callable[[], object]:
        leaves = [part.detach().clone().requires_grad_() for part in (W, *parameters)]
        dY = torch.randn_like(W)
        return lambda: torch.autograd.grad(function(*leaves), leaves, dY)

    names = dict.fromkeys([OURS, SDPA, "torch", "torch.compile", "numpy"])
    found: dict[str, dict[str, float]] = {}
    rounds = 1 if quick else 5
    with torch.no_grad():
        calls: dict[str, Callable[[], object]] = {
            OURS: lambda: ours(W, theta, bias=bias),
            SDPA: lambda: attend(True),
            "torch": lambda: operators.released(contiguous, *plain),
            OTHER: lambda: operators.released(W, *plain),
            "numpy": lambda: operators.released_numpy(*arrays),
        }
        compiled = None if quick else _compiled(operators.released, W, *plain)
        if compiled is not None:
            calls["torch.compile"] = lambda: compiled(W, *plain)
        found["causal, forward"] = _merged(interleaved(calls, rounds, PAUSE, WARM))
        error = float((operators.released(W, *plain) - ours(W, theta, bias=bias)).abs().max())
        calls = {
            OURS: lambda: ours(W, theta, causal=False),
            SDPA: lambda: attend(False),
            "torch": lambda: operators.released_everywhere(contiguous, plain[0]),
            OTHER: lambda: operators.released_everywhere(W, plain[0]),
        }
        everywhere = None if quick else _compiled(operators.released_everywhere, W, plain[0])
        if everywhere is not None:
            calls["torch.compile"] = lambda: everywhere(W, plain[0])
        found["both ways, forward"] = _merged(interleaved(calls, rounds, PAUSE, WARM))
    calls = {
        OURS: passes(lambda W, theta, bias: ours(W, theta, bias=bias), theta, bias),
        SDPA: passes(lambda W: torch.nn.functional.scaled_dot_product_attention(W, W, W, is_causal=True)),
        "torch": passes(operators.released, *plain),
    }
    found["causal, forward and backward"] = interleaved(calls, rounds, PAUSE, WARM)
    table = _table("tssa", "passes", names, found)
    table.notes += [
        f"{operators.B} x {operators.T} tokens, {operators.HEADS} heads of {operators.D} channels, float32; the "
        f"largest difference of levattn from the released operator is {error:.0e}",
        "torch SDPA computes softmax attention, another function, of the same shapes",
    ]
    return table


def pruned(*, quick: bool) -> Table:
    """Pruned attention beside dense attention."""
    import torch

    shapes = importlib.import_module("pruned")
    attend = importlib.import_module("levattn.attention").pruned_attention
    found: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for causal in (False, True):
            for n in (1024,) if quick else (2048, 8192):
                X = shapes.arrays(n)
                tensors = torch.from_numpy(X)
                calls: dict[str, Callable[[], object]] = {
                    OURS: lambda X=tensors, c=causal: attend(*X, budget=shapes.SLOTS, causal=c),
                    SDPA: shapes.dense(X, causal=causal),
                }
                where = f"{'causal' if causal else 'both ways'}, n = {n}"
                found[where] = interleaved(calls, 1 if quick or n > 4096 else 3, PAUSE, WARM)
    table = _table("pruned", "keys", dict.fromkeys([OURS, SDPA]), found)
    table.notes.append(
        f"{shapes.HEADS} heads of {shapes.D} channels, float32, {shapes.SLOTS} slots a query, scores and clusters "
        "included; outputs are approximate, see model quality above"
    )
    return table


def heavy(*, quick: bool) -> Table:
    """Heavy entries of x² attention beside dense attention in blocks, which finds the same ones."""
    shapes = importlib.import_module("heavy")
    found: dict[str, dict[str, float]] = {}
    blocks = (1024, 4096, 16384)
    names = dict.fromkeys([OURS, *(f"dense, blocks of {block}" for block in blocks)])
    differ = 0
    for n in (4096,) if quick else (4096, 32768, 131072):
        K = shapes.keys(n)
        Q = np.random.default_rng(1).standard_normal((shapes.M, shapes.D), dtype=np.float32)
        calls: dict[str, Callable[[], object]] = {OURS: lambda Q=Q, K=K: levattn.heavy_attention(Q, K, shapes.EPSILON)}
        calls |= {f"dense, blocks of {b}": lambda Q=Q, K=K, b=b: shapes.dense(Q, K, b) for b in blocks}
        found[f"n = {n}"] = interleaved(calls, 1 if quick else 3, PAUSE)
        theirs = {(int(r), int(c)) for rs, cs, _ in shapes.dense(Q, K, 4096) for r, c in zip(rs, cs, strict=True)}
        entries = levattn.heavy_attention(Q, K, shapes.EPSILON).entries
        differ += len(theirs ^ set(zip(*(x.tolist() for x in entries.nonzero()), strict=True)))
    table = _table("heavy", "keys", names, found)
    table.notes.append(
        f"{shapes.M} queries, d = {shapes.D}, float32, ε = {shapes.EPSILON}, the universal set included; entries that "
        f"only one of both finds: {differ}"
    )
    return table


SECTIONS: dict[str, tuple[Callable[..., Table], tuple[str, ...]]] = {
    "heavy": (heavy, ("numpy",)),
    "pruned": (pruned, ("torch",)),
    "latte": (latte, ("torch", "jax")),
    "tssa": (tssa, ("torch", "numpy")),
}
