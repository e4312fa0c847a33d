"""A report on a pruned model, by layer and head: pruned attention beside dense attention on a few queries of calls."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from levattn.attention import PrunedState
from levattn.integrations.transformers.heads_table import HeadsTable, in_columns
from levattn.integrations.transformers.interface import Changes
from levattn.integrations.transformers.pruned import Arrays
from levattn.integrations.transformers.states import Held
from levattn.io import replace_file

_QUERIES = 64  # of a call
_SEQUENCES = 8  # at most, with these queries
_RUNS = 8  # of consecutive queries, where attention is causal

# Figures summed over queries, for each key head.
_SUMS = ("queries", "captured", "selected", "slots", "error", "norm")

_FORMATS = ("slots:.1f", "selected:.1f", "captured:.4f", "error:.2e", "seconds:.3g")
_OF_LAYERS = {form.partition(":")[0]: form for form in ("layer", "heads", "calls", "measured", *_FORMATS)}
_LEGEND = (
    "measured: calls compared with dense attention; selected: keys attended exactly; captured: softmax mass on them; "
    "error: of the output"
)


class PruneReport(HeadsTable):
    """A pruning of a model, and its measurements.

    It is a context manager that removes the pruning at its end, as `remove` does. The measurements stay.

    Attributes
    ----------
    model : str
        The type of the model.
    options : dict
        The arguments of `prune`.
    active : bool
        Whether the model is still pruned.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from levattn.integrations.transformers import prune
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=50)
    >>> model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()
    >>> with torch.no_grad(), prune(model, 16, layers=[0, 1]) as report:
    ...     _ = model(torch.arange(50)[None])
    >>> report.active, len(report.table())
    (False, 4)
    >>> row = report.table()[0]
    >>> row["layer"], row["head"], row["calls"], row["slots"] <= 16, 0 < row["captured"] < 1
    (0, 0, 1, True, True)
    """

    _labels: ClassVar = {
        "slots": "slots of a query",
        "selected": "keys attended exactly",
        "captured": "captured softmax mass",
        "error": "relative error of the output",
    }

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.model = model
        self.options = options
        self._tallies: dict[int, tuple[Tally, list[int]]] = {}  # of each layer, with the heads that are pruned
        self._changes = Changes()

    @property
    def active(self) -> bool:
        """Whether the model is still pruned."""
        return self._changes.active

    def remove(self) -> None:
        """Remove the pruning: the model is restored, except for trained parameters. A second call does nothing."""
        self._changes.undo()

    def __enter__(self) -> PruneReport:
        if not self.active:
            raise ValueError(f"the pruning of this {self.model} was removed; expected one in use. Call prune again")
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def table(self) -> list[dict[str, Any]]:
        """Return the measurements, one row for each pruned key head.

        Returns
        -------
        list of dict
            Each row has ``layer``, ``head`` (a key head, with its query heads) and ``calls`` of the layer.
            ``measured`` counts the calls that were measured. Four figures are over the sampled queries, and None where
            nothing was measured:

            - ``slots``, the mean number of slots that a query reads;
            - ``selected``, the mean number of keys attended exactly, including keys near the query;
            - ``captured``, the mean mass of these keys under dense attention;
            - ``error``, of the output relative to dense attention (root of the sums of squares).

            ``seconds`` is the time in pruned attention, divided among the layer's pruned heads, or None.
        """
        rows: list[dict[str, Any]] = []
        for layer, (tally, heads) in self._tallies.items():
            seconds = tally.seconds / len(heads) if tally.seconds else None
            rows += [{"layer": layer, "head": head, **tally.figures([head]), "seconds": seconds} for head in heads]
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return the model, the options and the rows of `table` as plain numbers, strings and lists.

        Returns
        -------
        dict
            ``model``, ``options`` and ``heads``, the rows.
        """
        return {"model": self.model, "options": self.options, "heads": self.table()}

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict` to a file, atomically.

        Parameters
        ----------
        path : path-like
            The file.
        """
        with replace_file(path) as stream:
            stream.write(json.dumps(self.to_dict(), indent=1, allow_nan=False).encode())

    def __str__(self) -> str:
        """Return a table in plain text, with a line for each layer; `table` has a row for each head."""
        rows: list[dict[str, Any]] = []
        for layer, (tally, heads) in self._tallies.items():
            figures = {**tally.figures(heads), "seconds": tally.seconds or None}
            rows.append({"layer": layer, "heads": len(heads), **figures})
        if not rows:
            return "all heads are dense"
        notes = [_LEGEND] if any(row["measured"] for row in rows) else []
        if any(value is None for row in rows for value in row.values()):
            called = any(row["calls"] for row in rows)
            notes.append(f"-: {'not measured; give measure=True' if called else 'the model was not called yet'}")
        return "\n".join([in_columns(rows, _OF_LAYERS), *notes])

    def __repr__(self) -> str:
        state = "pruned" if self.active else "removed"
        return f"<PruneReport of {self.model}, {len(self._tallies)} layers, {state}>"


class Tally:
    """Measurements of a layer: sums over sampled queries, for each key head."""

    def __init__(self, heads: int) -> None:
        self.calls = 0
        self.measured = 0  # of these calls
        self.seconds = 0.0
        self.sums = {name: np.zeros(heads) for name in _SUMS}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def add(self, heads: tuple[int, ...], seconds: float, arrays: Arrays, plan: Sequence[Held], Y: Any) -> None:
        """Add the time of a call of some heads, and figures of some of its queries, given its output (B, H, m, D).

        The queries are spread evenly over sequences and positions, so a repeated call is measured at the same queries.
        """
        self.seconds += seconds
        few = np.unique(np.linspace(0, arrays.k.shape[0] - 1, _SEQUENCES).round().astype(np.int64))
        for held in plan:
            mine = held.of_sequences(few)
            of = few if mine.rows is None else few[mine.rows]
            if not len(of):
                continue
            part, result = arrays.of_sequences(of), Y[torch.as_tensor(of, device=Y.device)]
            exact = _exact_of_causal if arrays.causal else _exact_of_all
            for places, keys, counted in exact(part, mine, _QUERIES // len(few)):
                found = _compared(part, result, places, keys, int(held.selection.summaries or 0))
                for name, values in found.items():
                    self.sums[name][list(heads)] += (values * counted).sum((0, 2)).double().cpu().numpy()

    def figures(self, heads: list[int]) -> dict[str, float | None]:
        """Return the numbers of calls, means over the queries of some heads, and their relative error.

        Means and the error are None without measurements.
        """
        sums = {name: float(values[heads].sum()) for name, values in self.sums.items()}
        count = sums["queries"]
        means = {name: sums[name] / count if count else None for name in ("slots", "selected", "captured")}
        error = (sums["error"] / sums["norm"]) ** 0.5 if sums["norm"] else None
        return {"calls": self.calls, "measured": self.measured, **means, "error": error}


def _compared(arrays: Arrays, Y: Any, places: Any, exact: Any, R: int) -> dict[str, Any]:
    """Return figures (B, G, s) of the queries at some places, summed over the query heads of a key head.

    exact: (B, G, s, n), the keys that each query attends exactly. R: the largest number of summaries.
    """
    groups = arrays.k.shape[1]
    P = arrays.dense_weights(places).unflatten(1, (groups, -1))  # (B, G, r, s, n)
    dense = P @ arrays.v[:, :, None].to(P.dtype)
    off = Y.index_select(2, torch.as_tensor(places, device=Y.device)).to(P.dtype).unflatten(1, (groups, -1)) - dense
    heads = P.shape[2]
    near = exact.sum(-1)
    return {
        "queries": torch.full_like(near, heads),
        "captured": (P * exact[:, :, None]).sum((2, 4)),
        "selected": near * heads,
        "slots": (near + (arrays.visible(places).sum(-1)[:, None] - near).clamp(max=R)) * heads,
        "error": (off * off).sum((2, 4)),
        "norm": (dense * dense).sum((2, 4)),
    }


def _exact_of_causal(arrays: Arrays, held: Held, each: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yield places of queries, the keys that each attends exactly, (B, G, s, n), and flags to count it, (B, G, s)."""
    there = _there(arrays)
    rank = there.cumsum(1) - 1
    m, state, low = arrays.q.shape[2], held.state, 0
    for start, stop in _runs(m, each):
        if state is None or start > low:
            _, state = arrays.attended(state or held.selection, low, start, return_state=True)
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
    short = replace(arrays, v=arrays.v[..., :1])
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
    """Return runs of consecutive queries, spread over m, with `each` queries in total; the last ends at m."""
    count = min(_RUNS, m, each)
    length = max(1, each // count)
    ends = [(i + 1) * m // count for i in range(count)]
    return [(max(end - length, ends[i - 1] if i else 0), end) for i, end in enumerate(ends)]


def _kept_by(state: PrunedState, rank: Any) -> tuple[Any, Any]:
    """Return the keys that a query after a state attends exactly, (B, G, n) bool, and how many precede it, (B, G).

    rank: (B, n) int64, the rank of each key among the present keys of its sequence. All keys from the first recent key
    on are flagged, including later ones.
    """
    sequences, heads = state.batch
    flags = torch.zeros((sequences * heads, rank.shape[1]), dtype=torch.bool, device=rank.device)
    counts = torch.zeros(sequences * heads, dtype=torch.int64, device=rank.device)
    for part in state.parts:
        ranks, places = rank[torch.as_tensor(part.rows // heads, device=rank.device)], part.kept_places
        there = places >= 0
        if part.kept_count is not None:
            there = there & (torch.arange(places.shape[1], device=rank.device) < part.kept_count[:, None])
        chosen = torch.zeros((len(ranks), part.positions + 1), dtype=torch.bool, device=rank.device)
        chosen.scatter_(1, places.where(there, torch.full_like(places, part.positions)), True)
        chosen[:, -1] = False
        rows = torch.as_tensor(part.rows, device=rank.device)
        recent = ranks >= part.positions - part.recent.shape[1]
        flags[rows] = recent | chosen.gather(1, ranks.clamp(0, part.positions))
        counts[rows] = part.positions
    return flags.unflatten(0, (sequences, heads)), counts.unflatten(0, (sequences, heads))
