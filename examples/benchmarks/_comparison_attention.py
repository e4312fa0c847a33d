"""Heavy, pruned, Latte and token statistics attention beside dense attention and other ways to write them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
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
SIDE = ", heads side by side"
ASIDES = {SDPA: "softmax attention"}


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


def _compiled(failures: dict[str, None], function: Any, *arguments: Any, **options: Any) -> Any:
    """Return a function through torch.compile; where it cannot be compiled, None, and the error is noted."""
    import torch

    compiled = torch.compile(function, dynamic=False)
    try:
        compiled(*arguments, **options)
    except Exception as error:  # no C++ compiler, for one: each version has an error of its own
        failures[f"torch.compile fails here: {type(error).__name__}"] = None
        return None
    return compiled


def _table(
    name: str,
    first: str,
    names: dict[str, None],
    found: dict[str, dict[str, float]],
    asides: dict[str, str] | None = None,
) -> Table:
    """Return a table of milliseconds, with how much faster levattn is than the fastest rival."""
    table = Table(name, [first, *(f"{each}, ms" for each in names), "fastest rival / levattn"], losses=[])
    for where, times in found.items():
        cells = [milliseconds(times[each]) if each in times else "-" for each in names]
        best = min(seconds for each, seconds in times.items() if each != OURS)
        table.rows.append([where, *cells, f"{best / times[OURS]:.2f}"])
        table.losses = [*(table.losses or ()), *slower(times, OURS, where, asides)]
    if any("-" in row for row in table.rows):
        table.notes.append('"-": not measured')
    return table


def latte(*, quick: bool) -> Table:
    """Latte beside softmax attention and beside Latte written with torch and JAX."""
    import torch

    from levattn.attention import latte as ours

    torch.manual_seed(0)
    names = dict.fromkeys([OURS, SDPA, "torch, chunks", "torch.compile", "JAX scan"])
    scan = jax_latte() if version("jax") else None
    failures: dict[str, None] = {}
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
                compiled = _compiled(failures, torch_latte, Q, K, V, causal=causal) if last else None
                if compiled is not None:
                    calls["torch.compile"] = lambda f=compiled, Q=Q, K=K, V=V, c=causal: f(Q, K, V, causal=c)
                if causal and scan is not None:
                    arrays = [importlib.import_module("jax.numpy").asarray(X.numpy()) for X in (Q, K, V)]
                    calls["JAX scan"] = lambda arrays=arrays: scan(*arrays).block_until_ready()
                times = interleaved(calls, 1 if quick else 5, PAUSE, WARM)
                exact = torch_latte(*(X.double() for X in (Q, K, V)), causal=causal)
                worst = max(worst, float((calls[OURS]() - exact).abs().max()))
            found[f"{'causal' if causal else 'both ways'}, {T}"] = times
    table = _table("latte", "positions", names, found, ASIDES)
    table.notes += [
        f"{HEADS} heads of {D} channels, {L} latents, float32, forward; the largest difference of levattn from Latte "
        f"in float64 is {worst:.0e}",
        "torch SDPA computes softmax attention, another function, with the same shapes; all others compute Latte",
        "torch.compile: " + ("not in a quick run" if quick else f"the chunks, at {lengths[-1]} positions only"),
        "JAX: the causal scan alone; JAX has the arrays before the clock starts",
        *failures,
    ]
    if failures:
        table.losses = table.losses or None  # not every rival was compared
    if scan is None:
        table.notes.append(f"JAX: {missing('jax')}")
    return table


def merged(times: dict[str, float]) -> dict[str, float]:
    """Return the times of each candidate in the better of its two layouts."""
    found: dict[str, float] = {}
    for name, seconds in times.items():
        plain = name.removesuffix(SIDE)
        found[plain] = min(seconds, found.get(plain, seconds))
    return found


def _layouts(name: str, call: Callable[..., object], *tokens: Any) -> dict[str, Callable[[], object]]:
    """Return calls of tokens with heads apart in memory, and side by side as a linear layer leaves them."""
    return {name + suffix: partial(call, W) for suffix, W in zip(("", SIDE), tokens, strict=True)}


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
    tokens = W.contiguous(), W
    dY = torch.randn_like(W)

    def attend(W: Any, *, causal: bool) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(W, W, W, is_causal=causal)

    def passes(function: Any, *parameters: Any) -> Callable[[Any], object]:
        """Return a call forward and backward; to have the leaves anew costs nothing."""

        def call(X: Any) -> object:
            leaves = [part.detach().requires_grad_() for part in (X, *parameters)]
            return torch.autograd.grad(function(*leaves), leaves, dY)

        return call

    def released(W: Any) -> Any:
        return operators.released(W, *plain)

    def everywhere(W: Any) -> Any:
        return operators.released_everywhere(W, plain[0])

    failures: dict[str, None] = {}

    def compiled(function: Any, *arguments: Any) -> dict[str, Callable[..., Any]]:
        found = None if quick else _compiled(failures, function, *arguments)
        return {} if found is None else {"torch.compile": found}

    def both(times: dict[str, Callable[..., Any]]) -> dict[str, Callable[[], object]]:
        return {where: call for name, f in times.items() for where, call in _layouts(name, f, *tokens).items()}

    names = dict.fromkeys([OURS, SDPA, "torch", "torch.compile", "numpy"])
    found: dict[str, dict[str, float]] = {}

    def measure(where: str, own: Callable[[], object], rivals: dict[str, Callable[[], object]]) -> None:
        found[where] = merged(interleaved({OURS: own, **rivals}, 1 if quick else 3, PAUSE, WARM))

    with torch.no_grad():
        numbers = [part.numpy() for part in plain]
        arrays = [part.numpy() for part in tokens]
        rivals = both({SDPA: partial(attend, causal=True), "torch": released, **compiled(released, W)})
        rivals |= _layouts("numpy", lambda X: operators.released_numpy(X, *numbers), *arrays)
        measure("causal, forward", lambda: ours(W, theta, form=levattn.attention.TokenForm(bias=bias)), rivals)
        error = float((released(W) - ours(W, theta, form=levattn.attention.TokenForm(bias=bias))).abs().max())
        rivals = both({SDPA: partial(attend, causal=False), "torch": everywhere, **compiled(everywhere, W)})
        measure("both ways, forward", lambda: ours(W, theta, causal=False), rivals)
    learned = compiled(operators.released, W.detach().clone().requires_grad_(), *plain)
    rivals = both(
        {
            SDPA: passes(partial(attend, causal=True)),
            "torch": passes(operators.released, *plain),
            **{name: passes(function, *plain) for name, function in learned.items()},
        }
    )
    own = passes(lambda W, theta, bias: ours(W, theta, form=levattn.attention.TokenForm(bias=bias)), theta, bias)
    measure("causal, forward and backward", lambda: own(W), rivals)
    table = _table("tssa", "passes", names, found, ASIDES)
    table.notes += [
        f"{operators.B} x {operators.T} tokens, {operators.HEADS} heads of {operators.D} channels, float32; the "
        f"largest difference of levattn from the released operator is {error:.0e}",
        "levattn gets tokens as a linear layer leaves them, heads side by side. Each rival gets the better of that "
        "layout and heads apart, without the cost of a copy",
        "torch SDPA computes softmax attention, another function, of the same shapes",
        *failures,
    ]
    if failures:
        table.losses = table.losses or None  # not every rival was compared
    if quick:
        table.notes.append("torch.compile: not in a quick run")
    return table


def pruned(*, quick: bool) -> Table:
    """Pruned attention beside dense attention."""
    import torch

    shapes = importlib.import_module("pruned")
    ours = importlib.import_module("levattn.attention")
    found: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for causal in (False, True):
            for n in (1024,) if quick else (2048, 8192):
                X = shapes.arrays(n)
                tensors = torch.from_numpy(X)
                calls: dict[str, Callable[[], object]] = {
                    OURS: partial(
                        ours.causal_pruned_attention if causal else ours.pruned_attention, *tensors, shapes.SLOTS
                    ),
                    SDPA: shapes.dense(X, causal=causal),
                }
                where = f"{'causal' if causal else 'both ways'}, n = {n}"
                found[where] = interleaved(calls, 1 if quick or n > 4096 else 3, PAUSE, WARM)
    table = _table("pruned", "keys", dict.fromkeys([OURS, SDPA]), found, ASIDES)
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
        found[f"n = {n}"] = interleaved(calls, 1 if quick or n > 32768 else 3, PAUSE)
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
