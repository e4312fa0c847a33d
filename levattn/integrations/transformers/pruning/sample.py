"""Compare pruned attention with dense attention on a few queries of each call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from levattn.attention.pruned.slots import rule_of
from levattn.integrations.transformers.pruning.cache import Held, exactly, of_sequences
from levattn.integrations.transformers.pruning.heads import Arrays, SharedOptions, plans

_QUERIES = 64  # of a call
_SEQUENCES = 8  # at most, with these queries
_RUNS = 8  # of consecutive queries, where attention is causal

# Figures summed over queries, for each key head.
_SUMS = ("queries", "captured", "selected", "slots", "error", "norm")


@dataclass
class Tally:
    """Measurements of a layer: sums over sampled queries, for each key head."""

    heads: int
    calls: int = 0
    measured: int = 0  # of these calls
    seconds: float = 0.0
    sums: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums = {name: np.zeros(self.heads) for name in _SUMS}

    def add(self, heads: tuple[int, ...], seconds: float, found: dict[str, Any]) -> None:
        """Add the time of a call of some heads, and the sums over its queries."""
        self.seconds += seconds
        for name, values in found.items():
            self.sums[name][list(heads)] += values

    def figures(self, heads: list[int]) -> dict[str, float | None]:
        """Return means over the queries of some heads, and their relative error; None without measurements."""
        sums = {name: float(values[heads].sum()) for name, values in self.sums.items()}
        count = sums["queries"]
        means = {name: sums[name] / count if count else None for name in ("slots", "selected", "captured")}
        return {**means, "error": (sums["error"] / sums["norm"]) ** 0.5 if sums["norm"] else None}


def sampled(
    arrays: Arrays, budget: float | None, rule: SharedOptions, before: list[Held] | None, Y: Any
) -> dict[str, npt.NDArray[np.float64]]:
    """Return sums over some queries of a call, for each key head, given its output Y (B, H, m, D).

    The queries are spread evenly over sequences and positions, so a repeated call is measured at the same queries.
    """
    few = np.unique(np.linspace(0, arrays.k.shape[0] - 1, _SEQUENCES).round().astype(np.int64))
    each = _QUERIES // len(few)
    total = {name: np.zeros(arrays.k.shape[1]) for name in _SUMS}
    found: list[tuple[Any, Any, Any]] = [(held.rows, None, held.state) for held in before or ()]
    if not found:
        found = [(rows, options, None) for rows, options in plans(arrays, budget, rule)]
    for rows, options, state in found:
        of = few if rows is None else few[np.isin(few, rows)]
        if not len(of):
            continue
        part, result = arrays.of_sequences(of), Y[torch.as_tensor(of, device=Y.device)]
        if state is not None:
            state = of_sequences(state, of if rows is None else np.searchsorted(rows, of))
        R = state.slots.summaries if state is not None else options["summaries"]
        for places, exact, counted in _exact(part, options or {"scores": rule.scores}, state, each):
            for name, values in _compared(part, result, places, exact, counted, R).items():
                total[name] += values
    return total


def _compared(
    arrays: Arrays, Y: Any, places: Any, exact: Any, counted: Any, R: int
) -> dict[str, npt.NDArray[np.float64]]:
    """Return sums over the queries at some places that `counted` (B, G, s) flags.

    exact: (B, G, s, n), the keys that each query attends exactly. R: the largest number of summaries.
    """
    groups = arrays.k.shape[1]
    P = arrays.dense_weights(places)
    V = arrays.v.to(P.dtype)
    P = P.unflatten(1, (groups, -1))  # (B, G, r, s, n)
    dense = P @ V[:, :, None]
    off = Y.index_select(2, torch.as_tensor(places, device=Y.device)).to(P.dtype).unflatten(1, (groups, -1)) - dense
    heads = P.shape[2]
    near = exact.sum(-1)
    slots = near + (arrays.visible(places).sum(-1)[:, None] - near).clamp(max=R)
    measured = {
        "queries": torch.full_like(near, heads),
        "captured": (P * exact[:, :, None]).sum((2, 4)),
        "selected": near * heads,
        "slots": slots * heads,
        "error": (off * off).sum((2, 4)),
        "norm": (dense * dense).sum((2, 4)),
    }
    return {name: (values * counted).sum((0, 2)).double().cpu().numpy() for name, values in measured.items()}


def _exact(arrays: Arrays, options: dict[str, Any], state: Any, each: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yield places of queries, the keys that each attends exactly, (B, G, s, n), and flags to count it, (B, G, s)."""
    rank = _ranks(arrays)
    m, before = arrays.q.shape[2], arrays.k.shape[2] - arrays.q.shape[2]
    if arrays.causal:
        if state is None:
            given = {name: value for name, value in options.items() if name != "scores"} | {"budget": None}
            chosen = rule_of(m, given, kind=options["scores"], power=None, causal=True, aligned=True)
        else:
            chosen = state.rule
        low = 0
        for start, stop in _runs(m, each):
            if start > low:
                _, state = arrays.attended(options, low, start, state, return_state=True)
                low = start
            places = np.arange(start, stop)
            row = rank[:, before + start : before + stop]  # (B, s)
            kept, count = torch.ones_like(arrays.k[..., 0], dtype=torch.bool), torch.zeros_like(row[:, :1])
            if state is not None:
                kept, count = exactly(state, rank)
            ranks = (row[:, None] - chosen.first, count[..., None] - chosen.first)
            last, held = (rank.div(chosen.slots.chunk, rounding_mode="floor").clamp(min=-1) for rank in ranks)
            same = last == held  # no selection since the state
            exact = kept[:, :, None] & arrays.visible(places)[:, None]
            yield places, exact, same & _there(arrays, before + places)[:, None]
        return
    places = np.unique(np.linspace(0, m - 1, each).round().astype(np.int64))
    short = replace(arrays, v=arrays.v[..., :1])
    _, certificate = short.attended(options, 0, m, None, return_certificate=True)
    exact = certificate.kept[:, :, None].expand(-1, -1, len(places), -1)
    if options["window"]:
        row = rank[:, torch.as_tensor(places, device=rank.device)]
        near = (row[..., None] - rank[:, None]).abs() <= options["window"]
        exact = exact | near[:, None]
    counted = _there(arrays, places)[:, None].expand(-1, exact.shape[1], -1)
    yield places, exact & arrays.visible(places)[:, None], counted


def _ranks(arrays: Arrays) -> Any:
    """Return the rank of each key among the present keys of its sequence, (B, n); arbitrary for absent keys."""
    if arrays.present is not None:
        return arrays.present.cumsum(1) - 1
    return torch.arange(arrays.k.shape[2], device=arrays.k.device).expand(arrays.k.shape[0], -1)


def _there(arrays: Arrays, keys: Any) -> Any:
    """Return whether some keys are present, (B, s)."""
    if arrays.present is None:
        return torch.ones((arrays.k.shape[0], len(keys)), dtype=torch.bool, device=arrays.k.device)
    return arrays.present[:, torch.as_tensor(keys, device=arrays.k.device)]


def _runs(m: int, each: int) -> list[tuple[int, int]]:
    """Return runs of consecutive queries, spread over m, with `each` queries in total; the last ends at m."""
    count = min(_RUNS, m, each)
    length = max(1, each // count)
    ends = [(i + 1) * m // count for i in range(count)]
    return [(max(end - length, ends[i - 1] if i else 0), end) for i, end in enumerate(ends)]
