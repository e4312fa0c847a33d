"""A report on a pruned model, by layer and head: pruned attention beside dense attention on a few queries of calls."""

from __future__ import annotations

import json
import os
from typing import Any, ClassVar

from levattn.integrations.transformers.heads_table import HeadsTable, in_columns
from levattn.integrations.transformers.interface import Changes
from levattn.integrations.transformers.measuring import FigureSums, Tally
from levattn.io import replace_file

_FORMATS = ("slots:.1f", "selected:.1f", "captured", "error", "seconds:.3g")
_OF_LAYERS = {form.partition(":")[0]: form for form in ("layer", "heads", "calls", "measured", *_FORMATS)}
_LEGEND = (
    "measured: calls compared with dense attention; selected: keys attended exactly; captured: softmax mass on them; "
    "error: of the output; ±: 95 % intervals by the spread of what was measured"
)
_UNMEASURED = {
    None: "not measured; by default layers take turns in calls of more than one token. Give measure=True for all",
    False: "not measured; give measure=True",
    True: "nothing to measure: all positions are padding",
}


class PruneReport(HeadsTable):
    """A pruning of a model, and its measurements.

    It is a context manager that removes the pruning at its end, as `remove` does. The measurements stay.

    A unit is a pruned key head, with its query heads, in a sequence of a call. The units of a measured layer, of up to
    8 sequences, are compared with dense attention at 64 positions in total. By default each layer is measured in one
    of 64 calls, by turns, and with ``measure=True`` in each call.

    **Intervals.** ``captured`` and ``error`` have margins, half of a 95 % interval. Suppose that the measured items
    are an independent random sample of all items. Then the figure of all items lies within the margin about 95 times
    in 100. In `table` the items of a head are its units. In the printed table the items of a layer are sequences of
    calls, with all heads. In `summary` the items are calls of layers, with all heads and sequences. The margin is None
    for fewer than two items. It is no guarantee: it comes from Student's t and the delta method, which are
    approximations, best for many items. It tells nothing of other texts. It is too narrow if items are alike, such as
    the decoding steps of one text.

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
    >>> from levattn.attention import Selection
    >>> from levattn.integrations.transformers import prune
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=50)
    >>> model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()
    >>> with torch.no_grad(), prune(model, Selection(16, start=0), layers=[0, 1]) as report:
    ...     _ = model(torch.arange(50)[None])
    >>> report.active, len(report.table())
    (False, 4)
    >>> row = report.table()[0]
    >>> row["layer"], row["head"], row["calls"], row["slots"] < 17, 0 < row["captured"] < 1
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
        self._tallies: dict[int, Tally] = {}  # of each layer
        self._sliding: list[int] = []  # layers that were left dense, as they slide
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
            ``measured`` counts the units of the head that were measured, and ``queries`` their queries. The figures
            are over these queries, and None where nothing was measured:

            - ``slots``, the mean number of slots that a query reads;
            - ``selected``, the mean number of keys attended exactly, including keys near the query;
            - ``captured``, the mean mass of these keys under dense attention;
            - ``error``, of the output relative to dense attention (root of the sums of squares);
            - ``captured_margin`` and ``error_margin``, half of their 95 % intervals.

            ``seconds`` is the mean time of pruned attention in the measured calls of the layer, divided among its
            pruned heads, or None. The first call may compile. Measuring is not part of it.
        """
        rows: list[dict[str, Any]] = []
        for layer, tally in self._tallies.items():
            seconds = None if tally.seconds_of_call is None else tally.seconds_of_call / len(tally.of_heads)
            for head, sums in tally.of_heads.items():
                counts = {"calls": tally.calls, "measured": sums.units}
                rows.append({"layer": layer, "head": head, **counts, **sums.figures(), "seconds": seconds})
        return rows

    def summary(self) -> dict[str, Any]:
        """Return the measurements of the whole model.

        Returns
        -------
        dict
            ``heads`` counts the pruned key heads, and ``units`` these heads in the sequences of all calls.
            ``measured`` counts the measured units. ``share`` is their share, or None before a call.
            ``measured_calls`` counts the measured calls of layers, which are the items of the margins. The other
            figures are as in `table`, over all measured units: ``queries``, ``slots``, ``selected``, ``captured``,
            ``captured_margin``, ``error`` and ``error_margin``.
        """
        tallies = list(self._tallies.values())
        units = sum(tally.sequences * len(tally.of_heads) for tally in tallies)
        measured = sum(sums.units for tally in tallies for sums in tally.of_heads.values())
        return {
            "heads": sum(len(tally.of_heads) for tally in tallies),
            "units": units,
            "measured": measured,
            "share": measured / units if units else None,
            "measured_calls": sum(tally.measured for tally in tallies),
            **FigureSums.of(tally.of_calls for tally in tallies).figures(),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the model, the options, the summary and the rows of `table` as plain numbers, strings and lists.

        Returns
        -------
        dict
            ``model``, ``options``, ``summary`` and ``heads``, the rows.
        """
        return {"model": self.model, "options": self.options, "summary": self.summary(), "heads": self.table()}

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict` to a file, atomically.

        Parameters
        ----------
        path : path-like
            The file.

        Raises
        ------
        TypeError, ValueError
            If `path` is no path, or empty.
        OSError
            If the file cannot be written.
        """
        with replace_file(path) as stream:
            stream.write(json.dumps(self.to_dict(), indent=1, allow_nan=False).encode())

    def __str__(self) -> str:
        """Return a table in plain text: a line for each layer, and one for all. `table` has a row for each head."""
        rows: list[dict[str, Any]] = []
        for layer, tally in self._tallies.items():
            counts = {"heads": len(tally.of_heads), "calls": tally.calls, "measured": tally.measured}
            figures = {**_shown(tally.of_layer.figures()), "seconds": tally.seconds_of_call}
            rows.append({"layer": layer, **counts, **figures})
        if not rows:
            return "all heads are dense"
        notes, found = [], self.summary()
        if found["measured"]:
            shown = _shown(found)
            notes += [
                f"all layers: captured {shown['captured']}, error {shown['error']}; measured {found['share']:.1%} of "
                f"{found['units']} units (heads in sequences of calls), with {found['queries']} queries",
                _LEGEND,
            ]
        calls, whole = (sum(getattr(tally, name) for tally in self._tallies.values()) for name in ("calls", "whole"))
        if whole:
            notes.append(f"{whole} of {calls} calls of layers read all keys: see Selection.start")
        if self._sliding:
            notes.append(f"layers {', '.join(map(str, self._sliding))} slide and are dense: see layers of prune")
        if any(row["slots"] is None for row in rows):
            called = any(row["calls"] for row in rows)
            notes.append(f"-: {_UNMEASURED[self.options['measure']] if called else 'the model was not called yet'}")
        return "\n".join([in_columns(rows, _OF_LAYERS), *notes])

    def __repr__(self) -> str:
        state = "pruned" if self.active else "removed"
        return f"<PruneReport of {self.model}, {len(self._tallies)} layers, {state}>"


def _shown(figures: dict[str, Any]) -> dict[str, Any]:
    """Return figures with captured mass and error as text, with their margins."""
    shown = dict(figures)
    for name, form in (("captured", ".4f"), ("error", ".2e")):
        value, margin = figures[name], figures[f"{name}_margin"]
        if value is not None:
            shown[name] = format(value, form) + ("" if margin is None else f" ± {margin:{form}}")
    return shown
