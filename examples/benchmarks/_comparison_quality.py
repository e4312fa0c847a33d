"""Captured attention mass of real heads, by what the kept keys are chosen by."""

from __future__ import annotations

import importlib
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
SOFTMAX = levattn.Softmax()
RIDGE = OURS + "leverage with a ridge of tr(KᵀK)/10 d"
HINDSIGHT = "best set in hindsight"
Scorer = Callable[[Array, Array, Array], Array]


def _attention(Q: Array, K: Array, scale: float) -> dict[str, Array]:
    """Return attention (heads, m, n) of both kinds."""
    Z = Q @ K.swapaxes(-1, -2)
    E = np.exp(scale * (Z - Z.max(axis=-1, keepdims=True)))
    return {name: A / A.sum(axis=-1, keepdims=True) for name, A in zip(MASSES, (Z**2, E), strict=True)}


def scorers(scale: float) -> dict[str, Scorer]:
    """Return what keys (heads, n, d) are chosen by whatever the budget, given some queries and values as well."""

    def normal(Q: Array) -> tuple[Array, Array]:
        mean = Q.mean(axis=1)
        return mean, Q.swapaxes(1, 2) @ Q / Q.shape[1] - mean[:, :, None] * mean[:, None, :]

    generator = np.random.default_rng(0)
    return {
        OURS + "leverage": lambda _, K, __: levattn.leverage_scores(K),
        OURS + "leverage of centered keys": lambda _, K, __: levattn.leverage_scores(K, center=True),
        RIDGE: lambda _, K, __: np.stack([levattn.leverage_scores(k, relative_ridge=0.1) for k in K]),
        OURS + "online leverage": lambda _, K, __: levattn.online_leverage_scores(K),
        OURS + "expected scores, x²": lambda Q, K, _: levattn.expected_scores(K, Q),
        OURS + "expected scores, softmax": lambda Q, K, _: levattn.expected_scores(K, scale * Q, f=SOFTMAX),
        OURS + "expected scores, softmax, from moments": lambda Q, K, _: levattn.expected_scores(
            K, normal(scale * Q), f=SOFTMAX
        ),
        "row norm, largest": lambda _, K, __: np.linalg.norm(K, axis=-1),
        "random": lambda _, K, __: generator.random(K.shape[:-1]),
    }


def presses(budget: float) -> dict[str, Scorer]:
    """Return the scores of presses that are to keep that share of the keys; none without kvpress."""
    if version("kvpress") is None:
        return {}
    import kvpress

    share = 1 - budget
    found: dict[str, Any] = {
        "KnormPress (row norm, smallest)": kvpress.KnormPress(share),
        "CURPress": kvpress.CURPress(share),
        "LeverageScorePress": kvpress.LeverageScorePress(share),
        "CompactorPress (reads queries)": kvpress.CompactorPress(share),
        "KeyDiffPress": kvpress.KeyDiffPress(share),
        "ExpectedAttentionPress (reads queries)": kvpress.ExpectedAttentionPress(share, n_sink=0),
        "ExpectedAttentionPress without norms of values": kvpress.ExpectedAttentionPress(
            share, n_sink=0, use_vnorm=False
        ),
    }

    def by(press: Any) -> Scorer:
        return lambda Q, K, V: press_scores(press, *(X.astype(np.float32) for X in (Q, K, V)))

    return {name: by(press) for name, press in found.items()}


def _captured(A: Array, scores: Array, size: int) -> float:
    """Return the mean share of a query's attention on the keys of largest scores."""
    best = np.argsort(-scores, axis=-1, kind="stable")[..., :size]
    return float(np.take_along_axis(A.mean(axis=-2), best, axis=-1).sum(axis=-1).mean())


def captured(*, quick: bool) -> Table:
    """Mean mass on the kept keys, of all heads and of every second query that the model sends."""
    encoder = levattn.datasets.minilm()
    layers = range(1 if quick else len(encoder.keys))
    header = ["keys kept by", *(f"{name}, {100 * budget:.0f} %" for name in MASSES for budget in BUDGETS)]
    table = Table("captured", header)
    chosen, pressed = scorers(encoder.scale), [presses(budget) for budget in BUDGETS]
    if pressed[0]:
        importlib.import_module("torch").manual_seed(0)
    means: dict[str, list[Array]] = {name: [] for name in (*chosen, *pressed[0], HINDSIGHT)}
    for layer in layers:
        Q, K, V = (np.asarray(x[layer], float) for x in (encoder.queries, encoder.keys, encoder.values))
        attention = _attention(Q[:, 1::2], K, encoder.scale)
        seen = np.repeat(Q[:, ::2], 2, axis=1)  # as many as there are keys, as presses need it
        sizes = [round(budget * K.shape[1]) for budget in BUDGETS]
        scores = {name: len(BUDGETS) * [scorer(seen, K, V)] for name, scorer in chosen.items()}
        scores |= {name: [each[name](seen, K, V) for each in pressed] for name in pressed[0]}
        for name, found in scores.items():
            shares = [_captured(A, s, size) for A in attention.values() for s, size in zip(found, sizes, strict=True)]
            means[name].append(np.array(shares))
        means[HINDSIGHT].append(
            np.array([_captured(A, A.mean(axis=-2), size) for A in attention.values() for size in sizes])
        )
    figures = {name: np.mean(rows, axis=0) for name, rows in means.items()}
    table.rows += [[name, *(f"{100 * x:.1f} %" for x in row)] for name, row in figures.items()]
    if version("kvpress") is None:
        table.rows.append(["kvpress", missing("kvpress"), *[""] * (len(header) - 2)])
    table.losses = []
    for place, column in enumerate(header[1:]):
        ours = max(row[place] for name, row in figures.items() if name.startswith(OURS))
        rivals = {name: row[place] for name, row in figures.items() if not name.startswith(OURS) and name != HINDSIGHT}
        ahead = [name for name in sorted(rivals, key=rivals.__getitem__, reverse=True) if rivals[name] > ours]
        if ahead:
            told = "; ".join(f"{name} captures {100 * rivals[name]:.1f} %" for name in ahead)
            table.losses.append(f"{column}: {told}; the best of levattn's {100 * ours:.1f} %")
    table.notes += [
        f"{len(layers) * K.shape[0]} heads of all-MiniLM-L6-v2 over 512 tokens, d = 32, with the queries of the text. "
        "Scores that read queries read every second one; the mass is measured on the others, with all keys in the "
        "denominator",
        f"'{HINDSIGHT}' is the best fixed set for these queries, by the column sums of the measured attention, all of "
        "which it needs. For softmax H2O and kvpress's ObservedAttentionPress keep this set",
    ]
    return table


SECTIONS: dict[str, tuple[Callable[..., Table], tuple[str, ...]]] = {
    "captured": (captured, ("numpy", "kvpress", "torch")),
}
