"""Memory of each route in a process of its own, and cost against the number of keys and positions."""

from __future__ import annotations

import importlib
import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _comparison_attention import ASIDES, SDPA, SIDE, merged, torch_latte
from _keys import KINDS, REAL
from _libraries import ROUTES, SECOND, missing, press_leverage, timed, version
from _page import Table, milliseconds, slower
from _rivals import by_blocks, interleaved

import levattn

OURS = "**levattn**"
D = 64
CHUNK = 65_536
MIB = 2**20
CHUNKS = "Latte with torch, chunks"
RELEASED = "released operator, torch"

# -- memory ----------------------------------------------------------------------------------------


def _keys(n: int, dtype: str = "float32") -> Any:
    """Return keys, made in place: no temporary of their size comes before the measurement."""
    K = np.empty((n, D), dtype)
    rng = np.random.default_rng(0)
    for start in range(0, n, CHUNK):
        rng.standard_normal(dtype=K.dtype, out=K[start : start + CHUNK])
    return K


def _tensors(T: int) -> Any:
    import torch

    return torch.from_numpy(_keys(3 * 8 * T).reshape(3, 1, 8, T, D))


def _sdpa(X: Any) -> Any:
    import torch

    return torch.nn.functional.scaled_dot_product_attention(*X, is_causal=True)


def _latte(X: Any) -> Any:
    return importlib.import_module("levattn.attention").latte(*X)


def _released(W: Any) -> Any:
    import torch

    operators = importlib.import_module("tssa")
    heads, T = W.shape[1:3]
    return operators.released(W, torch.ones(heads, 1), torch.zeros(heads, T, 1))


def _tssa(W: Any) -> Any:
    import torch

    return importlib.import_module("levattn.attention").tssa(W, torch.ones(W.shape[1]))


def _heavy(X: Any) -> Any:
    return levattn.heavy_attention(X[:1024], X[1024:], 0.05)


def _whole(X: Any) -> Any:
    """The same entries from the whole matrix of queries and keys."""
    A = np.square(X[:1024] @ X[1024:].T)
    A /= A.sum(axis=1, keepdims=True)
    return np.nonzero(A >= 0.05)


def _dense(X: Any) -> Any:
    return importlib.import_module("heavy").dense(X[:1024], X[1024:], 4096)


def _routes(*names: str) -> dict[str, tuple[str, Callable[[Any], Any]]]:
    return {name: (ROUTES[name].package, ROUTES[name].scores) for name in names}


Make = Callable[[int], Any]
# Of each task: how its input of a size is made, that size and a small one, and the routes with their packages.
TASKS: dict[str, tuple[Make, int, int, dict[str, tuple[str, Callable[[Any], Any]]]]] = {
    "scores, 10⁶ × 64, float32": (
        _keys,
        10**6,
        20_000,
        {
            OURS: ("levattn", levattn.leverage_scores),
            "BLAS in row blocks": ("numpy", partial(by_blocks, rows=4096, triangular=False)),
            **_routes("scipy, Gram and Cholesky", "torch, QR"),
            "kvpress, LeverageScorePress": ("kvpress", lambda K: press_leverage(K[None], 48)),
            **_routes("scipy, QR", "numpy, QR", "numpy, SVD"),
        },
    ),
    "scores, 10⁶ × 64, float64": (
        partial(_keys, dtype="float64"),
        10**6,
        20_000,
        {OURS: ("levattn", levattn.leverage_scores), **_routes("pylspack, Gram")},
    ),
    "heavy entries, 1024 queries, 131 072 keys": (
        lambda n: _keys(n + 1024),
        131_072,
        4096,
        {
            OURS: ("levattn", _heavy),
            "dense, blocks of 4096": ("numpy", _dense),
            "dense, the whole matrix": ("numpy", _whole),
        },
    ),
    "causal attention, 8 heads, 16 384 positions": (
        _tensors,
        16_384,
        1024,
        {
            OURS + ", Latte": ("torch", _latte),
            CHUNKS: ("torch", lambda X: torch_latte(*X, causal=True)),
            SDPA: ("torch", _sdpa),
        },
    ),
    "token statistics, 8 heads, 16 384 positions": (
        lambda T: _tensors(T)[0],
        16_384,
        1024,
        {OURS: ("torch", _tssa), RELEASED: ("torch", _released)},
    ),
}


def _status(name: str) -> int:
    """Return a figure of this process's memory in bytes, as Linux has it."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {name}; expected Linux")
    return 1024 * int(found[1])


def measure(task: str, route: str, *, quick: bool) -> None:
    """Print the bytes of the input and by how many a call makes this process grow; a small call comes before it."""
    make, size, small, routes = TASKS[task]
    call = routes[route][1]
    call(make(small))
    given = make(4 * small if quick else size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _status("VmRSS")
    call(given)
    print(given.nbytes, _status("VmHWM") - before)


def _smaller(task: str, grown: dict[str, float]) -> list[str]:
    """Return a sentence for each rival that takes less than levattn, which comes first."""
    ours = next(iter(grown.values()), 0.0)
    return [
        f"{task}: {name}{f' ({ASIDES[name]})' if name in ASIDES else ''} takes {taken:.1f} MiB, levattn {ours:.1f}"
        for name, taken in grown.items()
        if taken < ours
    ]


def memory(*, quick: bool) -> Table:
    """Growth of the resident memory of a process by one call."""
    table = Table("memory", ["task", "route", "input, MiB", "peak beyond it, MiB", "/ levattn"], texts=2, losses=[])
    for task, (*_, routes) in TASKS.items():
        grown: dict[str, float] = {}
        for route, (package, _) in routes.items():
            if version(package) is None:
                table.rows.append([task, route, missing(package), "", ""])
                continue
            command = [sys.executable, __file__, task, route, "quick" if quick else "whole"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            given, grown[route] = (int(figure) / MIB for figure in done.stdout.split())
            ratio = grown[route] / next(iter(grown.values()))
            table.rows.append([task, route, f"{given:.0f}", f"{grown[route]:.1f}", f"{ratio:.1f}"])
        table.losses += _smaller(task, grown)
    table.notes.append(
        "growth of the resident memory of a process by one call, its output included. A small call before it compiles "
        "and loads the code. Pages that the small call left free do not count, so differences of a few MiB mean "
        "nothing"
    )
    return table


# -- cost against n --------------------------------------------------------------------------------


def _exponent(times: dict[int, float]) -> float:
    """Return the slope of log time against log n, by least squares."""
    return float(np.polyfit([math.log(n) for n in times], [math.log(s) for s in times.values()], 1)[0])


def _cost_table(name: str, first: str, sizes: tuple[int, ...], times: dict[str, dict[int, float]]) -> Table:
    table = Table(name, [first, *(f"n = {n}, ms" for n in sizes), "exponent"])
    for route, found in times.items():
        cells = [milliseconds(found[n]) if n in found else "-" for n in sizes]
        table.rows.append([route, *cells, f"{_exponent(found):.2f}" if len(found) > 1 else "-"])
    table.notes.append("exponent: of n in the time, fitted to these sizes; the fixed cost of a call lowers it")
    return table


def _streamed(K: Any) -> None:
    state = levattn.StreamingUniversalSet(0.1)
    for start in range(0, len(K), CHUNK):
        state = state.update(K[start : start + CHUNK])
    state.result()


SVD = "numpy, SVD"
DENSE = "dense attention of 1024 queries, in blocks, the same entries"


def cost_keys(*, quick: bool) -> Table:
    """Time against the number of keys, d = 64, float32, like those of real heads."""
    sizes = (10**4, 10**5) if quick else (10**4, 10**5, 10**6)
    dense = importlib.import_module("heavy").dense
    times: dict[str, dict[int, float]] = {}
    losses: list[str] = []
    for n in sizes:
        K, Q = KINDS[REAL](n, D, "float32"), np.random.default_rng(1).standard_normal((1024, D), np.float32)
        calls: dict[str, Callable[[], object]] = {
            OURS + ", scores": partial(levattn.leverage_scores, K),
            "BLAS in row blocks": partial(by_blocks, K, 4096, triangular=False),
            OURS + ", universal set": partial(levattn.universal_set, K, 0.1),
            OURS + ", the same in one pass over chunks": partial(_streamed, K),
            OURS + ", heavy entries of 1024 queries": partial(levattn.heavy_attention, Q, K, 0.05),
        }
        if version("kvpress") is not None:
            calls["kvpress, LeverageScorePress"] = partial(press_leverage, K[None], 48)
        found = interleaved(calls, 1 if quick else 5, 0.12)
        found[SVD] = timed(partial(ROUTES[SVD].scores, K))[0]
        found[DENSE] = timed(partial(dense, Q, K, 4096))[0]
        for route, seconds in found.items():
            times.setdefault(route, {})[n] = seconds
        heavy = OURS + ", heavy entries of 1024 queries"
        losses += slower({name: found[name] for name in (heavy, DENSE)}, heavy, f"heavy entries, n = {n}")
        scores = {name: seconds for name, seconds in found.items() if OURS not in name and name != DENSE}
        for task in ("scores", "universal set"):  # a set is a threshold on anybody's scores
            losses += slower(scores | {OURS: found[f"{OURS}, {task}"]}, OURS, f"{task}, n = {n}")
    table = _cost_table("cost-keys", f"d = 64, float32, {REAL}", sizes, times)
    if version("kvpress") is None:
        table.rows.append(["kvpress", missing("kvpress"), *[""] * len(sizes)])
    table.losses = losses
    table.notes.append(f"{SECOND} {SVD}; {DENSE}")
    table.notes.append(
        "the pass over chunks is not compared, because no rival has one; universal sets are, with the scores of rivals"
    )
    return table


def cost_positions(*, quick: bool) -> Table:
    """Time of causal attention against the number of positions."""
    import torch

    attention = importlib.import_module("levattn.attention")
    sizes = (256, 1024) if quick else (256, 1024, 4096, 16_384)
    times: dict[str, dict[int, float]] = {}
    losses: list[str] = []
    for T in sizes:
        X = torch.randn(3, 1, 8, T, D)
        calls: dict[str, Callable[[], object]] = {
            OURS + ", Latte": partial(attention.latte, *X),
            OURS + ", token statistics": partial(attention.tssa, X[0]),
            CHUNKS: partial(torch_latte, *X, causal=True),
            SDPA: partial(_sdpa, X),
            RELEASED: partial(_released, X[0]),
            RELEASED + SIDE: partial(_released, X[0].transpose(1, 2).contiguous().transpose(1, 2)),
        }
        with torch.no_grad():
            found = merged(interleaved(calls, 1 if quick or T > 4096 else 3, 0.12, 0.08))
        for route, seconds in found.items():
            times.setdefault(route, {})[T] = seconds
        for ours, rival in ((", Latte", CHUNKS), (", token statistics", RELEASED)):
            among = {name: found[name] for name in (OURS + ours, rival, SDPA)}
            losses += slower(among, OURS + ours, f"{ours[2:]}, n = {T}", ASIDES)
    table = _cost_table("cost-positions", "causal, 8 heads of 64 channels, 64 latents", sizes, times)
    table.losses = losses
    table.notes.append(f"{RELEASED}: the better of two memory layouts; {SDPA}: softmax attention, another function")
    return table


SECTIONS: dict[str, tuple[Callable[..., Table], tuple[str, ...]]] = {
    "memory": (memory, ("numpy", "scipy", "torch", "pylspack", "kvpress")),
    "cost-keys": (cost_keys, ("numpy", "scipy", "kvpress")),
    "cost-positions": (cost_positions, ("torch",)),
}

if __name__ == "__main__":
    measure(sys.argv[1], sys.argv[2], quick=sys.argv[3] == "quick")
