"""Shared code of the displays: colors, axes and figures, thinning of many keys."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from levattn._core.checks import needing
from levattn._core.types import Flags

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Ints: TypeAlias = npt.NDArray[np.intp]

# From the palette of Okabe and Ito; OCHRE is its orange, darkened. Each has a contrast of at least 3 to white and to
# black, as WCAG 2 requires of graphics. Dashes and marks tell curves apart as well.
BLUE, RED, GREEN, PINK, GRAY, OCHRE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C8C8C", "#BF8300"
COLORS = "cividis"  # of images: perceptually uniform, and nearly the same for red-green color blindness

_CURVE_POINTS = 2000


def figure_bytes(figure: Figure, suffix: str) -> bytes:
    """Return the content of a file with this suffix, such as ".svg"; the same figure gives the same bytes."""
    import matplotlib as mpl

    kind = suffix.removeprefix(".").lower()
    undated: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    stream = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "levattn"}):
        figure.savefig(stream, format=kind, dpi=150, metadata=undated)
    return stream.getvalue()


def new_figure(rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """Return a figure outside of any window system, laid out for its content, and an array of its axes."""
    _require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * columns, 4.8 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


class Display(ABC):
    """Base class of the displays: `plot` draws them on axes, which they keep.

    Attributes
    ----------
    ax_, figure_ : matplotlib.axes.Axes, matplotlib.figure.Figure
        The axes and the figure of the drawing.
    """

    ax_: Axes
    figure_: Figure | SubFigure

    def plot(self, ax: Axes | None = None) -> Self:
        """Draw the display.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; by default on a new figure.

        Returns
        -------
        Display
            The display itself.

        Raises
        ------
        ValueError
            If a text of tokens has too little room to be legible.
        """
        if ax is None:
            _require_matplotlib()
            import matplotlib.pyplot as plt

            ax = plt.subplots(figsize=self._inches(), layout="constrained")[1]
        self.ax_ = ax
        self.figure_ = ax.figure
        self._draw(self.ax_)
        return self

    def _inches(self) -> tuple[float, float] | None:
        """Return the size of a new figure, unless it is matplotlib's own."""
        return None

    @abstractmethod
    def _draw(self, ax: Axes) -> None:
        """Draw on axes."""


def _require_matplotlib() -> None:
    with needing("pictures need matplotlib", "plot"):
        import matplotlib as mpl  # noqa: F401


def log_positions(n: int) -> Ints:
    """Return positions 0, ..., n - 1, thinned out evenly on a logarithmic axis where there are many."""
    if n <= _CURVE_POINTS:
        return np.arange(n)
    return np.unique(np.geomspace(1, n, _CURVE_POINTS).round().astype(np.intp)) - 1


def mask_of(chosen: Any, n: int, name: str, of_what: str) -> Flags:
    """Return the mask (n,) of a universal set, a mask or distinct indices."""
    given = np.asarray(getattr(chosen, "mask", chosen))
    if given.dtype == np.bool_:
        if given.shape != (n,):
            raise ValueError(f"{name} has a mask of shape {given.shape}, expected ({n},), one per {of_what}")
        return given
    indices = given if given.size else given.astype(np.intp)  # an empty list has dtype float
    if not np.issubdtype(indices.dtype, np.integer):
        raise ValueError(
            f"{name} has dtype {given.dtype}, expected a mask ({n},) of bool, or indices of integer dtype"
        )
    if np.unique(indices).size < indices.size:
        raise ValueError(
            f"{name} has repeated indices, expected distinct ones; convert a mask of 0 and 1 to bool by astype(bool)"
        )
    if ((indices < 0) | (indices >= n)).any():
        raise ValueError(f"{name} has indices outside 0, ..., {n - 1}, expected the index of a {of_what}")
    mask = np.zeros(n, dtype=np.bool_)
    mask[indices] = True
    return mask
