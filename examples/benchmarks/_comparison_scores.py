"""Leverage scores beside other libraries: errors against exact arithmetic, keys missed, presses of kvpress, speed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _keys import KINDS, keys_of
from _libraries import ROUTES, SECOND, Route, missing, press_leverage, press_scores, timed, version
from _page import Table, milliseconds, slower
from _rivals import Array, blas_routes, conditioned, interleaved

import levattn

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import naive

N, D, EPSILON = 2000, 16, 0.05
RANK = 12
FAINT = 8  # short keys, alone with one other in a direction that no long key has
OURS = "**levattn**"
DEFICIENT = f"rank {RANK} of {D}"
NEAR = 2.0  # a rival is more accurate if our error is more than so many times as large
SCORES = 'largest relative error of a score above 10⁻³ d/n, against exact integer arithmetic; "fails" is an exception'


@cache
def kinds() -> dict[str, Array]:
    """Return keys of every kind in float64; float32 ones are these, rounded."""
    rng = np.random.default_rng(0)
    coherent, deficient = rng.standard_normal((2, N, D))
    coherent[:5] *= 50
    deficient[:, RANK:] = deficient[:, : D - RANK]  # exactly
    deficient[:5] *= 20
    hard = conditioned(N, D, 1e6, "float64")
    hard[:5] *= 20
    faint = rng.standard_normal((N, D))
    faint[:, RANK:] = 0
    faint[:FAINT] *= 1e-2
    faint[np.arange(FAINT), RANK + np.arange(FAINT) % (D - RANK)] = 1e-4
    faint = rng.permutation(faint @ np.linalg.qr(rng.standard_normal((D, D)))[0])
    tails = rng.standard_normal((N, D)) / np.abs(rng.standard_normal((N, 1)))
    return {
        "Gaussian": rng.standard_normal((N, D)),
        "5 long rows": coherent,
        "planted": levattn.datasets.planted(N, D, rng=0).keys,
        "heavy tails": tails,
        "condition 10⁶": hard,
        f"{FAINT} in faint directions": faint,
        DEFICIENT: deficient,
        "a head of MiniLM": np.asarray(levattn.datasets.minilm().keys[2, 5], np.float64),
    }


@cache
def exact_scores(name: str, dtype: str) -> Array:
    """Return the scores of keys of a kind by integer arithmetic: seconds for each."""
    return naive.leverage_exact(kinds()[name].astype(dtype))


def _scores(route: Callable[[Array], Array], K: Array) -> Array | None:
    """Return scores in float64, or None where the route has none."""
    try:
        scores = np.asarray(route(K), np.float64)
    except (np.linalg.LinAlgError, RuntimeError, ValueError):  # torch's LinAlgError is a RuntimeError
        return None
    return scores if np.isfinite(scores).all() else None


def _routes(dtype: str) -> dict[str, Route]:
    ours = {OURS: Route("levattn", levattn.leverage_scores)}
    return ours | {name: route for name, route in ROUTES.items() if dtype in route.dtypes}


def accuracy(dtype: str, *, quick: bool) -> Table:
    """Largest relative error of a score, by library and kind of keys."""
    cases = {name: K.astype(dtype) for name, K in kinds().items()}
    if quick:
        cases = {name: cases[name] for name in ("Gaussian", DEFICIENT)}
    exact = {name: exact_scores(name, dtype) for name in cases}
    table = Table(f"accuracy-{dtype}", [f"{dtype}", *cases], notes=[SCORES])
    errors: dict[str, dict[str, float]] = {name: {} for name in cases}
    for title, route in _routes(dtype).items():
        if version(route.package) is None:
            table.rows.append([title, missing(route.package), *[""] * (len(cases) - 1)])
            continue
        cells = []
        for name, K in cases.items():
            scores = _scores(route.scores, K)
            if scores is None:
                errors[name][title] = np.inf
                cells.append("fails")
                continue
            counted = exact[name] > 1e-3 * K.shape[1] / len(K)
            errors[name][title] = float(np.max(np.abs(scores / np.where(counted, exact[name], 1) - 1)[counted]))
            cells.append(f"{errors[name][title]:.0e}")
        table.rows.append([title, *cells])
    table.losses = []
    for name, by_route in errors.items():
        better = [f"{title} {x:.0e}" for title, x in by_route.items() if NEAR * x < by_route[OURS]]
        if better:
            table.losses.append(f"{name}: levattn has {by_route[OURS]:.0e}; {'; '.join(better)}")
    table.notes.append(f"a loss is an error more than {NEAR:.0f} times a rival's")
    return table


def missed(*, quick: bool) -> Table:
    """Keys that a threshold on each library's scores loses, of those that some query gives at least ε."""
    cases = {name: K.astype("float32") for name, K in kinds().items() if name != "Gaussian"}
    if quick:
        cases = {DEFICIENT: cases[DEFICIENT]}
    truth = {name: exact_scores(name, "float32") >= EPSILON for name in cases}
    table = Table("missed", [f"float32, ε = {EPSILON}", *(f"{name} ({truth[name].sum()} keys)" for name in cases)])
    table.notes.append(
        "missed + needless: keys j with exact score τ_j ≥ ε that scores below ε leave out, and kept keys with "
        "τ_j < ε. The query (KᵀK)⁺k_j does give each missed key its τ_j"
    )
    counts: dict[str, dict[str, tuple[int, int]]] = {name: {} for name in cases}
    routes = _routes("float64")
    routes[OURS] = Route("levattn", lambda K: levattn.universal_set(K, EPSILON).mask.astype(float))
    for title, route in routes.items():
        if version(route.package) is None:
            table.rows.append([title, missing(route.package), *[""] * (len(cases) - 1)])
            continue
        cells = []
        for name, K in cases.items():
            scores = _scores(route.scores, K if "float32" in route.dtypes else K.astype(float))
            if scores is None:
                cells.append("fails")
                continue
            kept = scores >= EPSILON
            counts[name][title] = int((truth[name] & ~kept).sum()), int((kept & ~truth[name]).sum())
            cells.append("{} + {}".format(*counts[name][title]))
        table.rows.append([title, *cells])
    table.losses = []
    for name, by_route in counts.items():
        ours = by_route.get(OURS, (len(truth[name]), len(truth[name])))  # where it fails, all is lost
        for title, (lost, needless) in by_route.items():
            if lost < ours[0] or needless < ours[1]:
                table.losses.append(f"{name}: {title} has {lost} + {needless}, levattn {ours[0]} + {ours[1]}")
    return table


# -- presses of kvpress ----------------------------------------------------------------------------

WEAK, WIDTH = 16, 128  # keys each alone in its direction, and the width of a head


class Case(NamedTuple):
    """Keys (1, n, d) of one head with the queries and values that some presses read."""

    Q: Array
    K: Array
    V: Array


def _weak(n: int) -> Case:
    """Gaussian keys in most directions; each of a few others has one short key, whose score is 1."""
    rng = np.random.default_rng(0)
    Q, K, V = rng.standard_normal((3, 1, n, WIDTH), np.float32)
    K[..., -WEAK:] = 0
    K[:, :WEAK] = 0
    K[:, np.arange(WEAK), WIDTH - WEAK + np.arange(WEAK)] = 2.0
    order = rng.permutation(n)
    return Case(Q, np.ascontiguousarray(K[:, order]), V)


def _presses(kept: float) -> dict[str, Callable[[Case], Array]]:
    """Return scores by levattn and by presses that are to keep a share of the keys."""
    found: dict[str, Callable[[Case], Array]] = {
        OURS: lambda x: levattn.leverage_scores(x.K, center=True)[0],
    }
    if version("kvpress") is None:
        return found
    import kvpress
    import torch

    torch.manual_seed(0)
    share = 1 - kept  # of the keys goes; CompactorPress weighs leverage with it
    presses: dict[str, Any] = {
        "CompactorPress": kvpress.CompactorPress(share),
        "CURPress": kvpress.CURPress(share),
        "KnormPress": kvpress.KnormPress(share),
    }
    return {
        **found,
        "LeverageScorePress, 48 columns (default)": lambda x: press_leverage(x.K, 48)[0],
        "LeverageScorePress, d columns": lambda x: press_leverage(x.K, x.K.shape[-1])[0],
        **{name: lambda x, press=press: press_scores(press, *x)[0] for name, press in presses.items()},
    }


def _top(scores: Array, size: int) -> set[int]:
    return set(np.argsort(-scores, kind="stable")[:size].tolist())


COLUMNS = ("error", "of 16 kept", "same set, scaled", "same set, again", "of MiniLM")
NO_LEVERAGE = dict.fromkeys(("CompactorPress", "CURPress", "KnormPress"), "not leverage")


def _better(figures: dict[str, tuple[float, ...]]) -> list[str]:
    """Return a sentence for each rival and column in which it is ahead: a smaller error, or more of anything else."""
    found = []
    for name, theirs in figures.items():
        aside = f" ({NO_LEVERAGE[name]})" if name in NO_LEVERAGE else ""
        for place, column in enumerate(COLUMNS):
            ours = figures[OURS][place]
            if theirs[place] < ours if place == 0 else theirs[place] > ours:
                found.append(f"{column}: {name}{aside} has {theirs[place]:.2g}, levattn {ours:.2g}")
    return found


def kvpress(*, quick: bool) -> Table:
    """Scores of presses that are called leverage, against exact leverage of the same centered keys."""
    lengths = (1024, 4096) if quick else (4096, 32768)
    header = ["scores", *COLUMNS, *(f"n = {n}, ms" for n in lengths)]
    table = Table("kvpress", header)
    weak = _weak(4096)
    encoder = levattn.datasets.minilm()
    heads = [
        Case(*(np.asarray(x[layer, head], np.float32)[None] for x in (encoder.queries, encoder.keys, encoder.values)))
        for layer in range(1 if quick else 6)
        for head in range(12)
    ]

    def exact(x: Case) -> Array:
        K = np.asarray(x.K[0], np.float64)
        return ROUTES["numpy, SVD"].scores(K - K.mean(0))

    truth, best = exact(weak), [exact(x) for x in heads]
    size, kept = len(weak.K[0]) // 5, len(heads[0].K[0]) // 5
    routes, few = _presses(0.2), _presses(4 * WEAK / len(weak.K[0]))
    times = {
        n: interleaved({name: partial(route, x) for name, route in routes.items()}, 1 if quick else 3, 0.12)
        for n, x in ((n, _weak(n)) for n in lengths)
    }
    figures: dict[str, tuple[float, ...]] = {}
    for name, route in routes.items():
        scores, small = route(weak), route(weak._replace(K=weak.K * np.float32(0.001)))
        error = np.inf if name in NO_LEVERAGE else float(np.abs(scores / truth - 1).max())
        overlaps = [len(_top(scores, size) & _top(other, size)) / size for other in (small, route(weak))]
        real = [len(_top(route(x), kept) & _top(t, kept)) / kept for x, t in zip(heads, best, strict=True)]
        found = len(_top(few[name](weak), 4 * WEAK) & _top(truth, WEAK))
        figures[name] = error, found, *overlaps, float(np.mean(real))
        shares = (f"{100 * share:.0f} %" for share in figures[name][2:])
        told = "no score" if name in NO_LEVERAGE else f"{error:.0e}"
        table.rows.append([name, told, str(found), *shares, *(milliseconds(each[name]) for each in times.values())])
    if len(routes) == 1:
        table.rows.append(["kvpress", missing("kvpress"), *[""] * (len(header) - 2)])
    else:
        table.losses = _better(figures)
        for n, each in times.items():
            table.losses += slower(each, OURS, f"time, n = {n}", NO_LEVERAGE)
    table.notes += [
        "error: largest relative error of a score, n = 4096, d = 128. Of the keys 16 are short and each alone in a "
        "direction, so they have score 1",
        "of 16 kept: how many of these are among the 64 keys of largest score, for presses that keep 64",
        "same set: share of the top fifth of the keys that stays after scaling all keys by 0.001, and after a second "
        "call",
        "of MiniLM: share of that fifth that is right, heads of d = 32",
        "ms: d = 128, float32; CompactorPress with the attention that it also computes",
        "not leverage: CURPress and KnormPress score by row norms, and CompactorPress mixes in attention; they have "
        "no error",
    ]
    return table


# -- speed -----------------------------------------------------------------------------------------


LEAST = 1e-13
REFERENCE = (
    "error: largest relative error of a score against a Gram matrix in float64, which is right to about 1e-13 for "
    "these keys"
)


def speed(name: str, dtype: str, *, quick: bool) -> Table:
    """Seconds for the scores of one tall matrix, on all cores: Gaussian keys, and keys like those of real heads."""
    n, d = (25_000 if quick else 500_000), 64
    kinds = keys_of(n, d, dtype)
    header = [
        f"n = {n}, d = {d}, {dtype}",
        *(cell for kind in kinds for cell in (f"{kind}, ms", "/ levattn", "error")),
    ]
    table = Table(name, header, notes=[REFERENCE], losses=[])
    cells: dict[str, list[str]] = {}
    for kind, K in kinds.items():
        exact = ROUTES["scipy, Gram and Cholesky"].scores(K.astype(float))
        routes = {name: route for name, route in _routes("float64").items() if version(route.package) is not None}
        fitting = {name: route for name, route in routes.items() if dtype in route.dtypes}
        calls: dict[str, Callable[[], object]] = {
            name: partial(r.scores, K) for name, r in fitting.items() if not r.slow
        }
        blas = blas_routes(K)
        times = interleaved(calls | blas, 1 if quick else 3)
        best = min(blas, key=times.__getitem__)
        times = {name: times[name] for name in calls} | {"numpy and scipy, BLAS in row blocks": times[best]}
        results = {name: fitting[name].scores(K) if name in fitting else blas[best]() for name in times}
        for name, route in fitting.items():
            if route.slow:
                times[name], results[name] = timed(partial(route.scores, K))
        table.notes.append(f"{kind}: the fastest of {len(blas)} ways to call BLAS was '{best}'")
        for name in dict.fromkeys([*routes, *times]):
            row = cells.setdefault(name, [])
            if name not in times:
                row += ["does not take it", "", ""]
                continue
            error = float(np.abs(np.asarray(results[name], float) / exact - 1).max())
            row += [
                milliseconds(times[name]),
                f"{times[name] / times[OURS]:.2f}",
                f"{error:.0e}" if error > LEAST else f"≤ {LEAST:.0e}",
            ]
        table.losses += slower(times, OURS, kind)
    slow = [name for name in cells if name in ROUTES and ROUTES[name].slow]
    if slow:
        table.notes.append(f"{SECOND} {'; '.join(slow)}")
    table.notes += [f"{kind}: not installed here" for kind in KINDS if kind not in kinds]
    table.rows += [[name, *row] for name, row in cells.items()]
    table.rows += [
        [name, missing(r.package), *[""] * (len(header) - 2)] for name, r in ROUTES.items() if name not in cells
    ]
    return table


SECTIONS: dict[str, tuple[Callable[..., Table], tuple[str, ...]]] = {
    "accuracy-float32": (partial(accuracy, "float32"), ("numpy", "scipy", "torch")),
    "accuracy-float64": (partial(accuracy, "float64"), ("numpy", "scipy", "torch", "pylspack")),
    "missed": (missed, ("numpy", "scipy", "torch", "pylspack")),
    "kvpress": (kvpress, ("kvpress", "torch")),
    "speed": (partial(speed, "speed", "float32"), ("numpy", "scipy", "torch")),
    "speed-float64": (partial(speed, "speed-float64", "float64"), ("numpy", "scipy", "torch", "pylspack")),
}
