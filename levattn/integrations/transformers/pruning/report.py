"""What a pruned model does, layer by layer and head by head."""

from __future__ import annotations

import json
import os
from types import TracebackType
from typing import Any, ClassVar

from levattn.integrations.transformers.changes import Changes
from levattn.integrations.transformers.heads_table import HeadsTable
from levattn.integrations.transformers.pruning.sample import Tally
from levattn.io import replace_file

__all__ = ["REPORT", "PruneReport"]

REPORT = "_levattn_report"  # the attribute of a pruned model that holds its report

_COLUMNS = ("layer", "head", "calls", "slots", "selected", "captured", "error", "seconds")


class PruneReport(HeadsTable):
    """What `prune` did to a model, and what it measured since.

    It is a context manager, which takes the pruning off at its end; `remove` does the same. What was measured stays.

    Attributes
    ----------
    model : str
        The type of the model.
    options : dict
        What `prune` was called with.
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
        """Hold what was changed in a model, until it is removed."""
        self._owner, self._changes = model, changes
        setattr(model, REPORT, self)

    def _watch(self, layer: int, tally: Tally, heads: list[int]) -> None:
        """Read what is measured of some heads of a layer."""
        self._tallies[layer] = (tally, heads)

    @property
    def active(self) -> bool:
        """Whether the model is still pruned."""
        return self._changes is not None

    def remove(self) -> None:
        """Take the pruning off: the model is as it was before, but for what was trained.

        Raises
        ------
        ValueError
            If it was taken off already.
        """
        if self._changes is None:
            raise ValueError(f"the pruning of this {self.model} was taken off already; expected to do so once")
        self._changes.undo()
        delattr(self._owner, REPORT)
        self._changes = self._owner = None

    def __enter__(self) -> PruneReport:
        if not self.active:
            raise ValueError(f"the pruning of this {self.model} was taken off; expected one in use. Call prune again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.active:
            self.remove()

    def table(self) -> list[dict[str, Any]]:
        """Return what was measured, one row for each pruned head of the keys.

        Returns
        -------
        list of dict
            ``layer``, ``head`` (of the keys; its query heads are taken together), ``calls`` of the layer, and means
            over the queries sampled: ``slots`` that were read, ``selected`` keys that were attended exactly (those
            near the query among them), ``captured`` mass of these under dense attention, ``error`` of the output
            relative to that of dense attention (root of the sums of squares), ``seconds`` in pruned attention of all
            pruned heads of the layer, divided among them. None where nothing was measured.
        """
        rows = []
        for layer, (tally, heads) in self._tallies.items():
            seconds = tally.seconds / len(heads) if tally.seconds else None
            for head in heads:
                values = (layer, head, tally.calls, *tally.figures([head]).values(), seconds)
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
        """Write `to_dict` to a file, which appears whole or not at all.

        Parameters
        ----------
        path : path-like
            The file.
        """
        with replace_file(path) as stream:
            stream.write(json.dumps(self.to_dict(), indent=1, allow_nan=False).encode())

    def __str__(self) -> str:
        """Return a table of plain text with a line for each layer, its heads taken together, and one for all."""
        lines: list[tuple[str, ...]] = [("layer", "heads", *_COLUMNS[2:])]
        for layer, (tally, heads) in self._tallies.items():
            lines.append((str(layer), str(len(heads)), str(tally.calls), *_shown(tally.figures(heads), tally.seconds)))
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
        )

    def __repr__(self) -> str:
        state = "pruned" if self.active else "removed"
        return f"<PruneReport of {self.model}, {len(self._tallies)} layers, {state}>"


def _shown(figures: dict[str, float | None], seconds: float) -> list[str]:
    formats = {"slots": ".1f", "selected": ".1f", "captured": ".4f", "error": ".2e"}
    shown = [("-" if figures[name] is None else format(figures[name], form)) for name, form in formats.items()]
    return [*shown, f"{seconds:.3g}" if seconds else "-"]
