"""What the displays share: colors, axes and figures, thinning of many keys."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Bools: TypeAlias = npt.NDArray[np.bool_]
Ints: TypeAlias = npt.NDArray[np.intp]

# From the palette of Okabe and Ito; OCHRE is its orange, darkened. Each has a contrast of at least 3 to white and to
# black, the least that WCAG 2 asks of graphics. Dashes and marks tell curves apart as well.
BLUE, RED, GREEN, PINK, GRAY, OCHRE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C8C8C", "#BF8300"
COLORS = "cividis"  # of images: perceptually uniform, nearly the same to eyes without red or green receptors

_CURVE_POINTS = 2000


def figure_bytes(figure: Figure, suffix: str) -> bytes:
    """Render a figure; the same figure gives the same bytes.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        The figure.
    suffix : str
        The file format, such as ``".png"`` or ``".svg"``.

    Returns
    -------
    bytes
        The content of the file.
    """
    import matplotlib as mpl

    kind = suffix.removeprefix(".").lower()
    undated: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    stream = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "levattn"}):
        figure.savefig(stream, format=kind, dpi=150, metadata=undated)
    return stream.getvalue()


def new_figure(rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """Make a figure that no window system knows of.

    Parameters
    ----------
    rows, columns : int, default 1
        Rows and columns of axes.

    Returns
    -------
    figure : matplotlib.figure.Figure
        The figure, laid out for its content.
    axes : ndarray of matplotlib.axes.Axes, shape (rows, columns)
        Its axes.
    """
    _require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * columns, 4.8 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


class Display(ABC):
    """What displays share: `plot` draws them on axes, which they keep.

    Attributes
    ----------
    ax_, figure_ : matplotlib.axes.Axes, matplotlib.figure.Figure
        Where it is drawn.
    """

    ax_: Axes
    figure_: Figure | SubFigure

    def plot(self, ax: Axes | None = None) -> Self:
        """Draw the display.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default on a new figure.

        Returns
        -------
        Display
            The display itself.

        Raises
        ------
        ValueError
            If a text of tokens has too little room to be read.
        """
        self.ax_ = self._axes(ax)
        self.figure_ = self.ax_.figure
        self._draw(self.ax_)
        return self

    def _axes(self, ax: Axes | None) -> Axes:
        return axes_for(ax)

    @abstractmethod
    def _draw(self, ax: Axes) -> None:
        """Draw on axes."""


def axes_for(ax: Axes | None, size: tuple[float, float] | None = None) -> Axes:
    """Return the axes given, or those of a new figure, of a size in inches."""
    if ax is not None:
        return ax
    _require_matplotlib()
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=size, layout="constrained")[1]


def legend_below(ax: Axes) -> None:
    """Put the legend below the axis label, where it hides nothing."""
    import matplotlib as mpl
    from matplotlib.font_manager import FontProperties
    from matplotlib.transforms import ScaledTranslation

    ticks = FontProperties(size=mpl.rcParams["xtick.labelsize"]).get_size_in_points()
    room = 12 + 1.3 * (ticks + float(ax.xaxis.label.get_fontsize()))
    below = ax.transAxes + ScaledTranslation(0, -room / 72, ax.figure.dpi_scale_trans)
    ax.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        bbox_transform=below,
        borderaxespad=0,
        ncols=2,
        fontsize="small",
        frameon=False,
    )


def whole_ticks(ax: Axes) -> None:
    """Let ticks stand at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    for axis in (ax.xaxis, ax.yaxis):
        locator = axis.get_major_locator()
        if isinstance(locator, MaxNLocator):
            locator.set_params(integer=True)


def _require_matplotlib() -> None:
    try:
        import matplotlib as mpl  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError('pictures need matplotlib: pip install "levattn[plot]"') from error


def log_positions(n: int) -> Ints:
    """Positions 0, ..., n - 1, thinned out evenly on a logarithmic axis where there are many."""
    if n <= _CURVE_POINTS:
        return np.arange(n)
    return np.unique(np.geomspace(1, n, _CURVE_POINTS).round().astype(np.intp)) - 1


def starts_of_bins(length: int, most: int) -> Ints:
    """Where each of at most so many bins of about equal length starts."""
    count = min(length, most)
    return np.arange(count) * length // max(count, 1)


def mask_of(chosen: Any, n: int, name: str, of_what: str) -> Bools:
    """Return the mask (n,) of a universal set, a mask or distinct indices."""
    given = np.asarray(getattr(chosen, "mask", chosen))
    if given.dtype == np.bool_:
        if given.shape != (n,):
            raise ValueError(f"{name} has a mask of shape {given.shape}, expected ({n},), one per {of_what}")
        return given
    indices = given if given.size else given.astype(np.intp)  # an empty list is one of floats
    if not np.issubdtype(indices.dtype, np.integer):
        raise ValueError(
            f"{name} has dtype {given.dtype}, expected a mask ({n},) of bool, or indices of integer dtype"
        )
    if np.unique(indices).size < indices.size:
        raise ValueError(
            f"{name} has indices more than once, expected each once; give a mask of 0 and 1 as one of bool, by "
            "astype(bool)"
        )
    if ((indices < 0) | (indices >= n)).any():
        raise ValueError(f"{name} has indices outside 0, ..., {n - 1}, expected one of these per {of_what} that is in")
    mask = np.zeros(n, dtype=np.bool_)
    mask[indices] = True
    return mask
