"""The attention matrix with its heavy entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from levattn._core.types import Float64
from levattn.plots.common import BLUE, COLORS, RED, Display, Ints, mask_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from levattn.sets.result import UniversalSet

_CELLS = 1024


class HeavyMapDisplay(Display):
    """The attention matrix, max-binned, with the columns of the universal set and the entries outside it.

    A cell shows the largest entry that falls into it, so a single heavy entry is never averaged away. Ticks
    along the top mark the columns of the set. Entries of at least epsilon are marked. Blue circles mark caught
    entries, inside the set; red crosses mark missed entries, outside it.

    Parameters
    ----------
    cells : array_like, shape (rows, columns)
        The binned matrix.
    shape : tuple of int
        Numbers of queries m and keys n of the matrix itself.
    epsilon : float
        The threshold of a heavy entry.
    indices : array_like of int, shape (size,)
        The keys of the set.
    caught : array_like of int, shape (entries, 2)
        Query and key of the entries of at least epsilon inside the set, one per cell.
    missed : array_like of int, shape (entries, 2)
        The same for the entries outside the set.
    counts : tuple of int
        Numbers of caught and missed entries, all cells together.

    Attributes
    ----------
    ax_, figure_ : matplotlib.axes.Axes, matplotlib.figure.Figure
        The axes and the figure of the drawing.

    Notes
    -----
    `from_attention` makes at most 1024 by 1024 cells, in time O(m n) and with memory for a copy of the matrix in
    float64.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.plots import HeavyMapDisplay
    >>> display = HeavyMapDisplay(
    ...     np.array([[0.9, 0.1]]),
    ...     shape=(1, 2),
    ...     epsilon=0.5,
    ...     indices=[0],
    ...     caught=[[0, 0]],
    ...     missed=[],
    ...     counts=(1, 0),
    ... )
    >>> display.counts
    (1, 0)
    """

    def __init__(
        self,
        cells: npt.ArrayLike,
        *,
        shape: tuple[int, int],
        epsilon: float,
        indices: npt.ArrayLike,
        caught: npt.ArrayLike,
        missed: npt.ArrayLike,
        counts: tuple[int, int],
    ) -> None:
        self.cells: Float64 = np.asarray(cells, dtype=np.float64)
        self.shape = shape
        self.epsilon = epsilon
        self.indices: Ints = np.asarray(indices, dtype=np.intp)
        self.caught: Ints = np.asarray(caught, dtype=np.intp).reshape(-1, 2)
        self.missed: Ints = np.asarray(missed, dtype=np.intp).reshape(-1, 2)
        self.counts = counts

    @classmethod
    def from_attention(
        cls,
        A: npt.ArrayLike,
        epsilon: float,
        universal: UniversalSet | npt.ArrayLike,
        *,
        ax: Axes | None = None,
    ) -> HeavyMapDisplay:
        """Draw an attention matrix.

        Parameters
        ----------
        A : array_like, shape (m, n)
            Attention of m queries over n keys.
        epsilon : float
            The threshold of a heavy entry.
        universal : UniversalSet or array_like
            The set, its mask (n,) of bool, or its distinct indices.
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; by default on a new figure.

        Returns
        -------
        HeavyMapDisplay
            The display, drawn.

        Raises
        ------
        ValueError
            If A is not a matrix, or the set does not match its columns.
        """
        matrix = np.asarray(A, dtype=np.float64)
        if matrix.ndim != 2:
            raise ValueError(f"A has shape {matrix.shape}, expected (m, n); draw one item of a batch at a time")
        inside = mask_of(universal, matrix.shape[1], "universal", "column of A")
        entries = np.stack(np.nonzero(matrix >= epsilon), axis=-1)
        caught = inside[entries[:, 1]]
        return cls(
            _max_bins(matrix),
            shape=(matrix.shape[0], matrix.shape[1]),
            epsilon=epsilon,
            indices=np.flatnonzero(inside),
            caught=_one_per_cell(entries[caught], matrix.shape),
            missed=_one_per_cell(entries[~caught], matrix.shape),
            counts=(int(np.count_nonzero(caught)), int(np.count_nonzero(~caught))),
        ).plot(ax)

    def _draw(self, ax: Axes) -> None:
        from matplotlib.colors import LogNorm
        from matplotlib.ticker import MaxNLocator

        m, n = self.shape
        if self.cells.size:
            low = self.epsilon / 1000
            image = ax.imshow(
                np.maximum(self.cells, low),
                norm=LogNorm(low, 1.0),
                cmap=COLORS,
                aspect="auto",
                interpolation="nearest",
                extent=(-0.5, n - 0.5, m - 0.5, -0.5),
            )
            self.figure_.colorbar(image, ax=ax, label="attention score (largest in a cell)", extend="min", pad=0.02)
        self._plot_entries(ax)
        self._plot_columns(ax)
        ax.set(xlabel=f"keys (ticks: the {self.indices.size} of U)", ylabel="queries")
        for locator in (ax.xaxis.get_major_locator(), ax.yaxis.get_major_locator()):
            if isinstance(locator, MaxNLocator):
                locator.set_params(integer=True)

    def _plot_columns(self, ax: Axes) -> None:
        """Mark the columns of the set in a strip above the map, at most one per column of cells."""
        edges = _edges(self.shape[1])
        strip = ax.inset_axes((0.0, 1.01, 1.0, 0.03), sharex=ax)
        strip.vlines(edges[np.unique(np.searchsorted(edges, self.indices, "right") - 1)], 0, 1, color=BLUE, lw=0.7)
        strip.set_axis_off()

    def _plot_entries(self, ax: Axes) -> None:
        parts = ((self.caught, BLUE, "o", 22, "in U"), (self.missed, RED, "X", 36, "missed"))
        for (entries, color, marker, size, name), count in zip(parts, self.counts, strict=True):
            ax.scatter(
                entries[:, 1],
                entries[:, 0],
                s=size,
                c=color,
                marker=marker,
                edgecolors="white",  # so that marks contrast with light and with dark cells
                linewidths=0.6,
                rasterized=True,
                label=f"≥ ε, {name}: {count}",
            )
        _put_legend_below(ax)


def _put_legend_below(ax: Axes) -> None:
    """Put the legend below the axis label, where it covers nothing."""
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


def _edges(length: int) -> Ints:
    """Return the starts of at most `_CELLS` bins of about equal length."""
    count = min(length, _CELLS)
    return np.arange(count) * length // max(count, 1)


def _max_bins(matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    for axis in (1, 0):  # first along rows, which are contiguous
        length = matrix.shape[axis]
        if length > _CELLS:
            matrix = np.maximum.reduceat(matrix, _edges(length), axis=axis)
    return matrix


def _one_per_cell(entries: Ints, shape: tuple[int, ...]) -> Ints:
    """Return the starts (query, key) of the cells that hold any of the entries."""
    edges = [_edges(length) for length in shape]
    cells = [np.searchsorted(starts, entries[:, axis], "right") - 1 for axis, starts in enumerate(edges)]
    flat = np.unique(cells[0] * edges[1].size + cells[1])
    rows, columns = np.divmod(flat, max(edges[1].size, 1))
    return np.stack([edges[0][rows], edges[1][columns]], axis=-1)
