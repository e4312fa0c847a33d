"""A table with a row for each layer and head of a model, as it is drawn and written down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from levattn.plots import LayerHeadDisplay

__all__ = ["HeadsTable"]


class HeadsTable:
    """Rows of figures, of which those with a label can be drawn."""

    _labels: ClassVar[dict[str, str]]

    def _rows(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    def plot(self, value: str = "captured", ax: Any = None) -> LayerHeadDisplay:
        """Draw one of the figures for all layers and heads.

        Parameters
        ----------
        value : str
            Which: "captured", "error", "selected" or "slots" of what `prune` did; "captured", "heavy_captured",
            "size", "share", "largest" or "condition" of what `inspect_model` found.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default on a new figure.

        Returns
        -------
        levattn.plots.LayerHeadDisplay
            The display, drawn. Heads without the figure (dense, or not measured) are left blank.

        Raises
        ------
        ValueError
            If `value` is none of these.
        ImportError
            If matplotlib is not installed.
        """
        from levattn.plots import LayerHeadDisplay

        if value not in self._labels:
            raise ValueError(f"value is {value!r}; expected one of {', '.join(self._labels)}")
        return LayerHeadDisplay.from_rows(self._rows(), value, label=self._labels[value], ax=ax)
