"""A number for each layer and head, drawn as colors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from levattn._core.types import Float64
from levattn.plots.common import COLORS, GRAY, Display, Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TICKS = 16


class LayerHeadDisplay(Display):
    """A number for each layer and head of a model, as colors.

    Parameters
    ----------
    values : array_like, shape (layers, heads)
        The numbers; a cell with NaN is hatched.
    label : str
        The meaning of the numbers.
    layers : array_like of int, shape (layers,), optional
        The numbers of the layers, 0 to their count less 1 by default.

    Attributes
    ----------
    ax_, figure_ : matplotlib.axes.Axes, matplotlib.figure.Figure
        The axes and the figure of the drawing.

    Raises
    ------
    ValueError
        If `values` is not a matrix, or `layers` does not match its rows.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.plots import LayerHeadDisplay
    >>> display = LayerHeadDisplay(np.array([[0.5, 0.9], [0.7, np.nan]]), label="captured softmax mass", layers=[0, 3])
    >>> display.layers
    array([0, 3])
    """

    def __init__(self, values: npt.ArrayLike, *, label: str, layers: npt.ArrayLike | None = None) -> None:
        self.values: Float64 = np.asarray(values, dtype=np.float64)
        if self.values.ndim != 2:
            raise ValueError(f"values has shape {self.values.shape}, expected (layers, heads)")
        self.label = label
        count = self.values.shape[0]
        self.layers: Ints = np.arange(count) if layers is None else np.asarray(layers, dtype=np.intp)
        if self.layers.shape != (count,):
            raise ValueError(f"layers has shape {self.layers.shape}, expected ({count},), one for each row of values")

    @classmethod
    def from_values(
        cls,
        values: npt.ArrayLike,
        *,
        label: str,
        layers: npt.ArrayLike | None = None,
        ax: Axes | None = None,
    ) -> LayerHeadDisplay:
        """Draw a matrix.

        Parameters
        ----------
        values, label, layers : as for the class
            The numbers and their labels.
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; by default on a new figure.

        Returns
        -------
        LayerHeadDisplay
            The display, drawn.

        Raises
        ------
        ValueError
            If `values` is not a matrix, or `layers` does not match its rows.
        """
        return cls(values, label=label, layers=layers).plot(ax)

    @classmethod
    def from_rows(
        cls, rows: Sequence[Mapping[str, Any]], value: str, *, label: str, ax: Axes | None = None
    ) -> LayerHeadDisplay:
        """Draw one column of a table.

        Parameters
        ----------
        rows : sequence of mapping
            Mappings with ``layer``, ``head`` and the value, a number or None.
        value : str
            The name of the column.
        label : str
            The meaning of the numbers.
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; by default on a new figure.

        Returns
        -------
        LayerHeadDisplay
            The display, drawn. Heads without a row, or with None, are hatched.
        """
        layers = sorted({row["layer"] for row in rows})
        values = np.full((len(layers), max((row["head"] + 1 for row in rows), default=0)), np.nan)
        for row in rows:
            if row[value] is not None:
                values[layers.index(row["layer"]), row["head"]] = row[value]
        return cls.from_values(values, label=label, layers=layers, ax=ax)

    def _draw(self, ax: Axes) -> None:
        if np.isnan(self.values).any():
            ax.patch.set(hatch="////", edgecolor=GRAY)  # visible in the blank places
        if self.values.size:
            image = ax.imshow(self.values, cmap=COLORS, aspect="auto", interpolation="nearest")
            self.figure_.colorbar(image, ax=ax, label=self.label, pad=0.02)
        layers, heads = (np.arange(0, count, -(-count // _TICKS) or 1) for count in self.values.shape)
        ax.set(xlabel="head", ylabel="layer", xticks=heads, yticks=layers)
        ax.set_yticklabels([str(layer) for layer in self.layers[layers]])
