"""Pruned attention beside dense attention: figures of a few queries of a call, for each sequence and key head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from levattn.attention import PrunedState
from levattn.integrations.transformers.pruned import Arrays
from levattn.integrations.transformers.states import Held

# Figures of a unit, summed over queries; the last two are squares of norms. A query before the next renewal of a state
# stands for later ones of its run too: all figures but the number of queries are multiplied by its weight.
FIGURES = ("queries", "weight", "slots", "selected", "captured", "error", "norm")

_RUNS = 8  # of consecutive queries, where attention is causal


class Sample(NamedTuple):
    """What is measured of a call, for each pruned head.

    rows: numbers of sequences, a numpy array. queries: the largest number of queries of each.
    """

    rows: Any
    queries: int


@torch.no_grad()  # type: ignore[untyped-decorator]
def compared(arrays: Arrays, plan: Sequence[Held] | None, Y: Any, sample: Sample) -> Any:
    """Return the figures of a sample, (sequences, heads, figures) in float64; Y (B, H, m, D) is the pruned output.

    The queries are spread evenly over positions, so a repeated call is measured at the same queries. A call that read
    all keys has no plan.
    """
    found = np.zeros((len(sample.rows), arrays.k.shape[1], len(FIGURES)))
    for held in (None,) if plan is None else plan:
        mine = None if held is None else held.of_sequences(sample.rows)
        which = np.arange(len(sample.rows)) if mine is None or mine.rows is None else mine.rows
        if not len(which):
            continue
        of = sample.rows[which]
        part, result = arrays.of_sequences(of), Y[torch.as_tensor(of, device=Y.device)]
        summaries = 0 if held is None else int(held.selection.summaries or 0)
        exact: Any = _exact_of_whole if held is None else _exact_of_causal if part.causal else _exact_of_all
        sums = []
        for places, keys, counted in exact(part, mine, sample.queries):
            figures = (_figures(part, result, places, keys, summaries) * counted).sum(-1)
            present = _there(part)[:, places + part.k.shape[2] - part.q.shape[2]].sum(-1)
            figures[1:] *= present[:, None] / counted.sum(-1).clamp(min=1)
            sums.append(figures.double())
        found[which] = torch.stack(sums).sum(0).movedim(0, -1).cpu().numpy()
    return found


def _figures(arrays: Arrays, Y: Any, places: Any, exact: Any, R: int) -> Any:
    """Return figures (figures, B, G, s) of the queries at some places, summed over the query heads of a key head.

    exact: (B, G, s, n), the keys that each query attends exactly. R: the largest number of summaries.
    """
    groups = arrays.k.shape[1]
    P = arrays.dense_weights(places).unflatten(1, (groups, -1))  # (B, G, r, s, n)
    dense = P @ arrays.v[:, :, None].to(P.dtype)
    off = Y.index_select(2, torch.as_tensor(places, device=Y.device)).to(P.dtype).unflatten(1, (groups, -1)) - dense
    heads = P.shape[2]
    near = exact.sum(-1)
    found = {
        "queries": torch.full_like(near, heads),
        "weight": torch.full_like(near, heads),
        "slots": (near + (arrays.visible(places).sum(-1)[:, None] - near).clamp(max=R)) * heads,
        "selected": near * heads,
        "captured": (P.sum(2) * exact).sum(-1),
        "error": (off * off).sum((2, 4)),
        "norm": (dense * dense).sum((2, 4)),
    }
    return torch.stack([found[name].to(P.dtype) for name in FIGURES])


def _exact_of_whole(arrays: Arrays, _held: None, each: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yield places of queries that attend to all keys, these keys, and flags to count them."""
    m, groups = arrays.q.shape[2], arrays.k.shape[1]
    places = np.concatenate([np.arange(*run) for run in _runs(m, each)])
    there = _there(arrays)[:, None, places + arrays.k.shape[2] - m].expand(-1, groups, -1)
    yield places, arrays.visible(places)[:, None].expand(len(there), groups, -1, -1), there


def _exact_of_causal(arrays: Arrays, held: Held, each: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yield places of queries, the keys that each attends exactly, (B, G, s, n), and flags to count it, (B, G, s)."""
    there = _there(arrays)
    rank = there.cumsum(1) - 1
    m, state, low = arrays.q.shape[2], held.state, 0
    if state is None:
        state = arrays.state(held.selection, 0, 0)
    # queries before the first selection read all keys, and stand for none after it
    begins = (there & (rank == state.rule.first))[:, there.shape[1] - m :].any(0).nonzero()[:, 0].tolist()
    for start, stop in _parted(_runs(m, each), begins):
        selected = rank[:, there.shape[1] - m + start] >= state.rule.first
        if start > low and bool(selected.any()):  # else the state tells the same of these queries
            state = arrays.state(state, low, start)
            low = start
        places = np.arange(start, stop)
        here = slice(there.shape[1] - m + start, there.shape[1] - m + stop)
        kept, count = _kept_by(state, rank)
        rule = state.rule
        selections = (  # before each query, and before the state
            (ranks - rule.first).div(rule.slots.chunk, rounding_mode="floor").clamp(min=-1)
            for ranks in (rank[:, None, here], count[..., None])
        )
        counted = there[:, None, here] & torch.eq(*selections)
        yield places, kept[:, :, None] & arrays.visible(places)[:, None], counted


def _exact_of_all(arrays: Arrays, held: Held, each: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yield places, keys and flags where attention is not causal: then each query reads all selected keys."""
    there = _there(arrays)
    rank = there.cumsum(1) - 1
    places = np.unique(np.linspace(0, arrays.q.shape[2] - 1, each).round().astype(np.int64))
    short = arrays if callable(held.selection.scores) else replace(arrays, v=arrays.v[..., :1])
    _, certificate = short.attended(held.selection, 0, arrays.q.shape[2], return_certificate=True)
    exact = certificate.kept[:, :, None].expand(-1, -1, len(places), -1)
    if held.selection.window:
        exact = exact | ((rank[:, places, None] - rank[:, None]).abs() <= held.selection.window)[:, None]
    counted = there[:, None, places].expand(-1, exact.shape[1], -1)
    yield places, exact & arrays.visible(places)[:, None], counted


def _there(arrays: Arrays) -> Any:
    """Return which keys are present, (B, n)."""
    if arrays.present is not None:
        return arrays.present
    return torch.ones((arrays.k.shape[0], arrays.k.shape[2]), dtype=torch.bool, device=arrays.k.device)


def _runs(m: int, each: int) -> list[tuple[int, int]]:
    """Return runs of consecutive queries with `each` queries in total, in the middle of equal parts of m positions."""
    count = min(_RUNS, m, each)
    ends = [i * m // count for i in range(count + 1)]
    found = []
    for low, high in pairwise(ends):
        length = min(max(1, each // count), high - low)
        start = (low + high - length) // 2
        found.append((start, start + length))
    return found


def _parted(runs: list[tuple[int, int]], places: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the parts of runs between places."""
    for start, stop in runs:
        yield from pairwise([start, *(place for place in places if start < place < stop), stop])


def _kept_by(state: PrunedState, rank: Any) -> tuple[Any, Any]:
    """Return the keys that a query after a state attends exactly, (B, G, n) bool, and how many precede it, (B, G).

    rank: (B, n) int64, the rank of each key among the present keys of its sequence. All keys from the first recent key
    on are flagged, including later ones.
    """
    sequences, heads = state.batch
    flags = torch.zeros((sequences * heads, rank.shape[1]), dtype=torch.bool, device=rank.device)
    counts = torch.zeros(sequences * heads, dtype=torch.int64, device=rank.device)
    for part in state.parts:
        ranks = rank[torch.as_tensor(part.rows // heads, device=rank.device)]
        places = torch.as_tensor(part.kept_places, device=rank.device)
        there = places >= 0
        if part.kept_count is not None:
            count = torch.as_tensor(part.kept_count, device=rank.device)
            there = there & (torch.arange(places.shape[1], device=rank.device) < count[:, None])
        chosen = torch.zeros((len(ranks), part.positions + 1), dtype=torch.bool, device=rank.device)
        chosen.scatter_(1, places.where(there, torch.full_like(places, part.positions)), True)
        chosen[:, -1] = False
        rows = torch.as_tensor(part.rows, device=rank.device)
        recent = ranks >= part.positions - part.recent.shape[1]
        flags[rows] = recent | chosen.gather(1, ranks.clamp(0, part.positions))
        counts[rows] = part.positions
    return flags.unflatten(0, (sequences, heads)), counts.unflatten(0, (sequences, heads))
