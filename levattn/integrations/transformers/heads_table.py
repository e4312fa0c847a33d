"""A table with a row for each layer and head of a model, to draw and to save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from levattn.plots import LayerHeadDisplay


class HeadsTable:
    """Rows of figures; the figures with a label can be drawn."""

    _labels: ClassVar[dict[str, str]]

    def table(self) -> list[dict[str, Any]]:
        """Return the rows."""
        raise NotImplementedError

    def plot(self, value: str = "captured", ax: Any = None) -> LayerHeadDisplay:
        """Draw a figure of all layers and heads.

        Parameters
        ----------
        value : str
            The figure: "captured", "error", "selected" or "slots" for a report of `prune`; "captured",
            "heavy_captured", "size", "share", "largest" or "condition" for the results of `inspect_model`.
        ax : matplotlib.axes.Axes, optional
            The axes to draw on; by default new ones.

        Returns
        -------
        levattn.plots.LayerHeadDisplay
            The display, drawn. Heads without the figure (dense, or not measured) are left blank.

        Raises
        ------
        ValueError
            If `value` is not in this list.
        ImportError
            If matplotlib is not installed.
        """
        from levattn.plots import LayerHeadDisplay

        if value not in self._labels:
            raise ValueError(f"value is {value!r}; expected one of {', '.join(self._labels)}")
        return LayerHeadDisplay.from_rows(self.table(), value, label=self._labels[value], ax=ax)


def in_columns(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Return rows as plain text, in columns given as headings and keys of a row, with a format as in "size:.3g"."""
    fields = [column.partition(":") for column in columns.values()]
    lines = [list(columns)]
    lines += [["-" if row[key] is None else format(row[key], form) for key, _, form in fields] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)
