"""Captured attention mass of real heads, by what the kept keys are chosen by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from _libraries import missing, press_scores, version
from _page import Table
from _rivals import Array

import levattn

BUDGETS = (0.1, 0.2, 0.33)
MASSES = ("x²", "softmax")
OURS = "**levattn**, "
RIDGE = OURS + "leverage with a ridge of tr(KᵀK)/10 d"
HINDSIGHT = "best set in hindsight"
Scorer = Callable[[Array, Array, Array], Array]


def _attention(Q: Array, K: Array, scale: float) -> dict[str, Array]:
    """Return attention (heads, m, n) of both kinds."""
    Z = Q @ K.swapaxes(-1, -2)
    E = np.exp(scale * (Z - Z.max(axis=-1, keepdims=True)))
    return {name: A / A.sum(axis=-1, keepdims=True) for name, A in zip(MASSES, (Z**2, E), strict=True)}


def scorers() -> dict[str, Scorer]:
    """Return what keys (heads, n, d) are chosen by, given queries and values as well."""
    generator = np.random.default_rng(0)
    found: dict[str, Scorer] = {
        OURS + "leverage": lambda _, K, __: levattn.leverage_scores(K),
        OURS + "leverage of centered keys": lambda _, K, __: levattn.leverage_scores(K, center=True),
        RIDGE: lambda _, K, __: np.stack(
            [levattn.leverage_scores(k, ridge=float(np.square(k).sum() / (10 * k.shape[1]))) for k in K]
        ),
        OURS + "online leverage": lambda _, K, __: levattn.online_leverage_scores(K),
        "row norm, largest": lambda _, K, __: np.linalg.norm(K, axis=-1),
        "random": lambda _, K, __: generator.random(K.shape[:-1]),
    }
    if version("kvpress") is None:
        return found
    import kvpress
    import torch

    torch.manual_seed(0)
    share = 1 - BUDGETS[1]
    presses: dict[str, Any] = {
        "KnormPress (row norm, smallest)": kvpress.KnormPress(share),
        "CURPress": kvpress.CURPress(share),
        "LeverageScorePress": kvpress.LeverageScorePress(share),
        "CompactorPress (reads queries)": kvpress.CompactorPress(share),
        "KeyDiffPress": kvpress.KeyDiffPress(share),
    }

    def by(press: Any) -> Scorer:
        return lambda Q, K, V: press_scores(press, *(X.astype(np.float32) for X in (Q, K, V)))

    return found | {name: by(press) for name, press in presses.items()}


def _captured(A: Array, scores: Array, size: int) -> float:
    """Return the mean share of a query's attention on the keys of largest scores."""
    best = np.argsort(-scores, axis=-1, kind="stable")[..., :size]
    return float(np.take_along_axis(A.mean(axis=-2), best, axis=-1).sum(axis=-1).mean())


def captured(*, quick: bool) -> Table:
    """Mean mass on the kept keys, of all heads and of the queries that the model sends."""
    encoder = levattn.datasets.minilm()
    layers = range(1 if quick else len(encoder.keys))
    header = ["keys kept by", *(f"{name}, {100 * budget:.0f} %" for name in MASSES for budget in BUDGETS)]
    table = Table("captured", header)
    chosen = scorers()
    means: dict[str, list[Array]] = {name: [] for name in (*chosen, HINDSIGHT)}
    for layer in layers:
        Q, K, V = (np.asarray(x[layer], float) for x in (encoder.queries, encoder.keys, encoder.values))
        attention = _attention(Q, K, encoder.scale)
        sizes = [round(budget * K.shape[1]) for budget in BUDGETS]
        for name, scorer in chosen.items():
            scores = scorer(Q, K, V)
            means[name].append(np.array([_captured(A, scores, size) for A in attention.values() for size in sizes]))
        means[HINDSIGHT].append(
            np.array([_captured(A, A.mean(axis=-2), size) for A in attention.values() for size in sizes])
        )
    figures = {name: np.mean(rows, axis=0) for name, rows in means.items()}
    table.rows += [[name, *(f"{100 * x:.1f} %" for x in row)] for name, row in figures.items()]
    if version("kvpress") is None:
        table.rows.append(["kvpress", missing("kvpress"), *[""] * (len(header) - 2)])
    for place, column in enumerate(header[1:]):
        ours = max((row[place], name) for name, row in figures.items() if name.startswith(OURS) and name != RIDGE)
        rivals = {name: row[place] for name, row in figures.items() if not name.startswith(OURS) and name != HINDSIGHT}
        best = max(rivals, key=rivals.__getitem__)
        if rivals[best] > ours[0]:
            table.losses.append(
                f"{column}: {best} captures {100 * rivals[best]:.1f} %, the best of levattn's {100 * ours[0]:.1f} %"
            )
    table.notes += [
        "losses are told of scores without a ridge: one of this size orders keys much as row norms do",
        f"{len(layers) * K.shape[0]} heads of all-MiniLM-L6-v2 over 512 tokens, d = 32, with the queries of the text; "
        "the mass of a query on the kept keys, all keys in the denominator",
        f"'{HINDSIGHT}' is the best fixed set for these queries, by the sums of the columns of the attention that is "
        "measured (for softmax what H2O and kvpress's ObservedAttentionPress keep): it needs all of it",
    ]
    return table


SECTIONS: dict[str, tuple[Callable[..., Table], tuple[str, ...]]] = {
    "captured": (captured, ("numpy", "kvpress", "torch")),
}
