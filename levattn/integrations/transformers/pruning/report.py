"""A report on a pruned model, by layer and head."""

from __future__ import annotations

import json
import os
from types import TracebackType
from typing import Any, ClassVar

from levattn.integrations.transformers.changes import Changes
from levattn.integrations.transformers.heads_table import HeadsTable, in_columns
from levattn.integrations.transformers.pruning.sample import Tally
from levattn.io import replace_file

REPORT = "_levattn_report"  # the attribute of a pruned model that holds its report

_COLUMNS = ("layer", "head", "calls", "measured", "slots", "selected", "captured", "error", "seconds")
_OF_LAYERS = {
    **{name: name for name in ("layer", "heads", "calls", "measured")},
    "slots": "slots:.1f",
    "selected": "selected:.1f",
    "captured": "captured:.4f",
    "error": "error:.2e",
    "seconds": "seconds:.3g",
}
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
    >>> with torch.no_grad(), prune(model, budget=16, layers=[0, 1]) as report:
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
        self._changes: Changes | None = None
        self._owner: Any = None

    def _take(self, model: Any, changes: Changes) -> None:
        """Store the changes in a model, until `remove`."""
        self._owner, self._changes = model, changes
        setattr(model, REPORT, self)

    def _watch(self, layer: int, tally: Tally, heads: list[int]) -> None:
        """Include the measurements of some heads of a layer."""
        self._tallies[layer] = (tally, heads)

    @property
    def active(self) -> bool:
        """Whether the model is still pruned."""
        return self._changes is not None

    def remove(self) -> None:
        """Remove the pruning: the model is restored, except for trained parameters. A second call does nothing."""
        if self._changes is None:
            return
        self._changes.undo()
        delattr(self._owner, REPORT)
        self._changes = self._owner = None

    def __enter__(self) -> PruneReport:
        if not self.active:
            raise ValueError(f"the pruning of this {self.model} was removed; expected one in use. Call prune again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        rows = []
        for layer, (tally, heads) in self._tallies.items():
            seconds = tally.seconds / len(heads) if tally.seconds else None
            for head in heads:
                values = (layer, head, tally.calls, tally.measured, *tally.figures([head]).values(), seconds)
                rows.append(dict(zip(_COLUMNS, values, strict=True)))
        return rows

    _rows = table

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
            counts = {"layer": layer, "heads": len(heads), "calls": tally.calls, "measured": tally.measured}
            rows.append({**counts, **tally.figures(heads), "seconds": tally.seconds or None})
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
