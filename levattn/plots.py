"""Pictures of leverage scores, captured mass and heavy attention.

Display objects in scikit-learn's manner: a class method ``from_...`` takes the data, draws them and returns a
display with the drawn values as attributes, ``ax_`` and ``figure_``; ``plot`` draws it again on other axes.
matplotlib is imported when something is drawn. Colour-blind eyes can tell the colours apart, on light and on
dark backgrounds.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from levattn.leverage import TIE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from levattn.universal import UniversalSet

__all__ = [
    "CapturedMassDisplay",
    "HeavyMapDisplay",
    "KeptPatchesDisplay",
    "LayerHeadDisplay",
    "LeverageSpectrumDisplay",
]

Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Ints: TypeAlias = npt.NDArray[np.intp]

# From the palette of Okabe and Ito; the dashes tell the curves apart as well.
_BLUE, _RED, _GREEN, _PINK, _GREY, _ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C8C8C", "#E69F00"
_REFERENCES = {"oracle": (_GREEN, "-."), "random": (_GREY, ":")}
_CURVES = ((_BLUE, "-"), (_PINK, "--"), (_ORANGE, (0, (5, 1))), (_RED, (0, (3, 1, 1, 1))))

_CURVE_POINTS = 2000
_MAP_CELLS = 1024
_TICKS = 16
# Scores that tie with the threshold are in the set.


class LeverageSpectrumDisplay:
    """Scores in descending order, with the threshold and the bound on the universal set.

    The scores are leverage scores, or certified bounds where the attention function is not x². Both axes are
    logarithmic, and scores of zero are left out. For a batch the line is the median over the items, place by
    place, and the band reaches from their minimum to their maximum.

    Parameters
    ----------
    scores : array_like, shape (..., n)
        Scores of n keys.
    epsilon : float, optional
        Threshold, a horizontal line; the keys above it are the universal set.
    rank : number or array_like of numbers, optional
        Rank of the keys, or for certified bounds what the sum of the sensitivities is bounded by
        (`UniversalSet.total_bound`). With `epsilon`, a vertical line shows the bound rank/epsilon (of a batch:
        the largest), if it is finite.
    sizes : int or array_like of int, shape (...,), optional
        Sizes of the sets. With `epsilon` they are counted if left out (scores within 1e-9 of it, relative,
        are inside); without it, for sets of a given size, a vertical line shows them.
    certified : bool, default False
        Whether the scores are certified bounds, which the labels then say.

    Attributes
    ----------
    scores : ndarray of float64, shape (items, n)
        The scores of each item, descending.
    sizes : ndarray of int, shape (items,), or None
        The size of the set of each item.
    size_bound : float or None
        rank/epsilon.
    ax_ : matplotlib.axes.Axes
        The axes drawn on.
    figure_ : matplotlib.figure.Figure
        Their figure.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.plots import LeverageSpectrumDisplay
    >>> display = LeverageSpectrumDisplay(np.array([0.1, 0.6, 0.2, 0.1]), epsilon=0.2, rank=1)
    >>> display.scores
    array([[0.6, 0.2, 0.1, 0.1]])
    >>> display.sizes, display.size_bound
    (array([2]), 5.0)
    """

    ax_: Axes
    figure_: Figure | SubFigure

    def __init__(
        self,
        scores: npt.ArrayLike,
        *,
        epsilon: float | None = None,
        rank: npt.ArrayLike | None = None,
        sizes: npt.ArrayLike | None = None,
        certified: bool = False,
    ) -> None:
        values = np.atleast_1d(np.asarray(scores, dtype=np.float64))
        flat = values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
        self.scores: Floats = -np.sort(-flat, axis=-1)
        self.epsilon = epsilon
        self.certified = certified
        self.sizes: Ints | None = None if sizes is None else np.asarray(sizes, dtype=np.intp).reshape(-1)
        if sizes is None and epsilon is not None:
            self.sizes = np.asarray(np.count_nonzero(flat >= epsilon * (1 - TIE), axis=-1))
        self.size_bound: float | None = None
        if epsilon is not None and rank is not None:
            self.size_bound = float(np.max(rank, initial=0)) / epsilon

    @classmethod
    def from_scores(
        cls,
        scores: npt.ArrayLike,
        *,
        epsilon: float | None = None,
        rank: npt.ArrayLike | None = None,
        sizes: npt.ArrayLike | None = None,
        certified: bool = False,
        ax: Axes | None = None,
    ) -> LeverageSpectrumDisplay:
        """Draw scores.

        Parameters
        ----------
        scores, epsilon, rank, sizes, certified
            As of the class.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default on a new figure.

        Returns
        -------
        LeverageSpectrumDisplay
            The display, drawn.
        """
        return cls(scores, epsilon=epsilon, rank=rank, sizes=sizes, certified=certified).plot(ax)

    def plot(self, ax: Axes | None = None) -> LeverageSpectrumDisplay:
        """Draw the display.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default on a new figure.

        Returns
        -------
        LeverageSpectrumDisplay
            The display itself.
        """
        self.ax_ = ax = _axes(ax)
        self.figure_ = ax.figure
        self._plot_scores(ax)
        self._plot_threshold(ax)
        if not self.scores.any():  # a logarithmic axis cannot find its limits without a positive value
            ax.set(xlim=(0.8, self.scores.shape[-1] + 2), ylim=(1e-3, 1.0))
        ylabel = "certified bound" if self.certified else "leverage score"
        ax.set(xscale="log", yscale="log", xlabel="keys, by descending score", ylabel=ylabel)
        ax.grid(alpha=0.25, lw=0.5)
        ax.legend(loc="best", fontsize="small")
        return self

    def _plot_scores(self, ax: Axes) -> None:
        items, n = self.scores.shape
        if items == 0:
            return
        at = _spread(n)
        values = np.where(self.scores[:, at] > 0, self.scores[:, at], np.nan)
        if items == 1:
            label = "certified bounds" if self.certified else "leverage scores"
            ax.plot(at + 1, values[0], color=_BLUE, lw=2, label=label)
            return
        middle, highest = np.median(self.scores[:, at], axis=0), self.scores[:, at].max(axis=0)
        lowest = np.maximum(self.scores[:, at].min(axis=0), np.nanmin(values, initial=1.0))
        seen = highest > 0
        ax.fill_between(
            at[seen] + 1,
            lowest[seen],
            highest[seen],
            color=_BLUE,
            alpha=0.25,
            lw=0,
            label=f"range of {items}",
        )
        ax.plot(at + 1, np.where(middle > 0, middle, np.nan), color=_BLUE, lw=2, label="median")

    def _plot_threshold(self, ax: Axes) -> None:
        size = f"|U| = {_range(self.sizes)}" if self.sizes is not None and self.sizes.size else ""
        if self.epsilon is not None:
            label = ": ".join(filter(None, (f"ε = {self.epsilon:.3g}", size)))
            ax.axhline(self.epsilon, color=_RED, lw=1.2, ls="--", label=label)
        elif self.sizes is not None and size:
            ax.axvline(float(np.median(self.sizes)), color=_RED, lw=1.2, ls="--", label=size)
        if self.size_bound and math.isfinite(self.size_bound):
            what = "bound" if self.certified else "bound rank/ε"
            vacuous = " ≥ n: vacuous" if self.size_bound >= self.scores.shape[-1] else ""
            ax.axvline(
                self.size_bound,
                color=_GREY,
                lw=1.5,
                ls=":",
                label=f"{what} = {self.size_bound:.4g}{vacuous}",
            )


class CapturedMassDisplay:
    """Mean attention mass that the first k keys of an order capture, against k.

    Parameters
    ----------
    curves : mapping of str to array_like, shape (n,)
        Captured mass of 1, ..., n keys, for each name.
    size : float, optional
        A number of keys to mark, such as that of the universal set.

    Attributes
    ----------
    curves : dict of str to ndarray of float64, shape (n,)
        The curves drawn.
    ax_ : matplotlib.axes.Axes
        The axes drawn on.
    figure_ : matplotlib.figure.Figure
        Their figure.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.plots import CapturedMassDisplay
    >>> display = CapturedMassDisplay({"leverage": np.array([0.5, 0.9, 1.0])}, size=2)
    >>> display.curves["leverage"]
    array([0.5, 0.9, 1. ])
    """

    ax_: Axes
    figure_: Figure | SubFigure

    def __init__(self, curves: Mapping[str, npt.ArrayLike], *, size: float | None = None) -> None:
        self.curves: dict[str, Floats] = {name: np.asarray(curve, dtype=np.float64) for name, curve in curves.items()}
        self.size = size

    @classmethod
    def from_attention(
        cls,
        A: npt.ArrayLike,
        *,
        orders: Mapping[str, npt.ArrayLike],
        size: float | None = None,
        ax: Axes | None = None,
    ) -> CapturedMassDisplay:
        """Draw what orders of the keys capture, beside the best order and a random one.

        Parameters
        ----------
        A : array_like, shape (..., m, n)
            Attention of m queries over n keys; rows sum to one (or to zero).
        orders : mapping of str to array_like of int, shape (..., n)
            For each name the keys, first to last. To these are added, unless the names are taken, ``oracle``
            (by descending mass: of all sets of k keys that serve all queries of an item, the best one) and
            ``random`` (the expectation over uniformly random sets).
        size : float, optional
            A number of keys to mark, such as that of the universal set.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default on a new figure.

        Returns
        -------
        CapturedMassDisplay
            The display, drawn. Curves are means over queries and items.
        """
        mass = np.mean(np.asarray(A), axis=-2, dtype=np.float64)
        n = mass.shape[-1]
        wanted = {name: np.asarray(order) for name, order in orders.items()}
        wanted.setdefault("oracle", np.argsort(-mass, axis=-1, kind="stable"))
        curves = {}
        for name, order in wanted.items():
            if order.shape != mass.shape:
                raise ValueError(
                    f"orders[{name!r}] has shape {order.shape}, expected {mass.shape}: the keys of each item"
                )
            captured = np.cumsum(np.take_along_axis(mass, order, axis=-1), axis=-1)
            curves[name] = captured.reshape(-1, n).mean(axis=0)
        curves.setdefault("random", np.arange(1, n + 1) / n * curves["oracle"][-1:].sum())
        return cls(curves, size=size).plot(ax)

    def plot(self, ax: Axes | None = None) -> CapturedMassDisplay:
        """Draw the display.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default on a new figure.

        Returns
        -------
        CapturedMassDisplay
            The display itself.
        """
        self.ax_ = ax = _axes(ax)
        self.figure_ = ax.figure
        styles = iter(_CURVES * (1 + len(self.curves) // len(_CURVES)))
        for name, curve in self.curves.items():
            color, dashes = _REFERENCES[name] if name in _REFERENCES else next(styles)
            at = _spread(curve.size)
            ax.plot(at + 1, curve[at], color=color, ls=dashes, lw=2, label=name)
        if self.size is not None:
            ax.axvline(self.size, color=_RED, lw=1.2, ls="--", label=f"|U| = {self.size:.3g}")
        ax.set(xscale="log", ylim=(0, 1.02), xlabel="keys", ylabel="captured attention mass")
        ax.grid(alpha=0.25, lw=0.5)
        ax.legend(loc="best", fontsize="small")
        return self


class HeavyMapDisplay:
    """The attention matrix, max-binned, with the columns of the universal set and what lies outside it.

    A cell shows the largest entry that falls into it, so a single heavy entry is never averaged away. Ticks
    along the top mark the columns of the set. Entries of at least epsilon are marked: those inside the set
    are caught, those outside are missed, and red.

    Parameters
    ----------
    cells : array_like, shape (rows, columns)
        The binned matrix.
    shape : tuple of int
        (m, n) of the matrix itself.
    epsilon : float
        The threshold.
    indices : array_like of int
        The keys of the set.
    caught, missed : array_like of int, shape (entries, 2)
        (query, key) of the entries of at least epsilon inside and outside the set, one per cell.
    counts : tuple of int
        How many entries were caught and missed, all cells together.

    Attributes
    ----------
    counts : tuple of int
        How many entries were caught and missed.
    ax_ : matplotlib.axes.Axes
        The axes drawn on.
    figure_ : matplotlib.figure.Figure
        Their figure.

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

    ax_: Axes
    figure_: Figure | SubFigure

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
        self.cells: Floats = np.asarray(cells, dtype=np.float64)
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
            The set, or its mask (n,) of bool, or its indices.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default on a new figure.

        Returns
        -------
        HeavyMapDisplay
            The display, drawn.
        """
        matrix = np.asarray(A, dtype=np.float64)
        if matrix.ndim != 2:
            raise ValueError(f"A has shape {matrix.shape}, expected (m, n); draw one item of a batch at a time")
        inside = _mask_of(universal, matrix.shape[1])
        heavy = matrix >= epsilon
        return cls(
            _max_bins(matrix),
            shape=(matrix.shape[0], matrix.shape[1]),
            epsilon=epsilon,
            indices=np.flatnonzero(inside),
            caught=_one_per_cell(heavy & inside),
            missed=_one_per_cell(heavy & ~inside),
            counts=(int(np.count_nonzero(heavy & inside)), int(np.count_nonzero(heavy & ~inside))),
        ).plot(ax)

    def plot(self, ax: Axes | None = None) -> HeavyMapDisplay:
        """Draw the display.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default on a new figure.

        Returns
        -------
        HeavyMapDisplay
            The display itself.
        """
        from matplotlib.colors import LogNorm

        self.ax_ = ax = _axes(ax)
        self.figure_ = ax.figure
        m, n = self.shape
        if self.cells.size:
            low = self.epsilon / 1000
            image = ax.imshow(
                np.maximum(self.cells, low),
                norm=LogNorm(low, 1.0),
                cmap="cividis",
                aspect="auto",
                interpolation="nearest",
                extent=(-0.5, n - 0.5, m - 0.5, -0.5),
            )
            self.figure_.colorbar(image, ax=ax, label="attention score (largest in a cell)", extend="min", pad=0.02)
        self._plot_entries(ax)
        self._plot_columns(ax)
        ax.set(xlabel=f"keys (ticks: the {self.indices.size} of U)", ylabel="queries")
        return self

    def _plot_columns(self, ax: Axes) -> None:
        """Mark the columns of the set in a strip above the map, at most one per column of cells."""
        edges = _edges(self.shape[1])
        strip = ax.inset_axes((0.0, 1.01, 1.0, 0.03), sharex=ax)
        strip.vlines(edges[np.unique(np.searchsorted(edges, self.indices, "right") - 1)], 0, 1, color=_BLUE, lw=0.7)
        strip.set_axis_off()

    def _plot_entries(self, ax: Axes) -> None:
        parts = ((self.caught, _ORANGE, ".", "in U"), (self.missed, _RED, "x", "missed"))
        for (entries, color, marker, name), count in zip(parts, self.counts, strict=True):
            ax.scatter(
                entries[:, 1],
                entries[:, 0],
                s=14,
                c=color,
                marker=marker,
                linewidths=0.8,
                rasterized=True,
                label=f"≥ ε, {name}: {count}",
            )
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize="small", frameon=False)


class LayerHeadDisplay:
    """A number for each layer and head of a model, as colours.

    Parameters
    ----------
    values : array_like, shape (layers, heads)
        The numbers; NaN where there is none, which is left blank.
    label : str
        What the numbers are.
    layers : array_like of int, shape (layers,), optional
        The numbers of the layers, 0 to their count less 1 by default.

    Attributes
    ----------
    values : ndarray of float64, shape (layers, heads)
        The numbers drawn.
    ax_ : matplotlib.axes.Axes
        The axes drawn on.
    figure_ : matplotlib.figure.Figure
        Their figure.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.plots import LayerHeadDisplay
    >>> display = LayerHeadDisplay(np.array([[0.5, 0.9], [0.7, np.nan]]), label="captured softmax mass", layers=[0, 3])
    >>> display.layers
    array([0, 3])
    """

    ax_: Axes
    figure_: Figure | SubFigure

    def __init__(self, values: npt.ArrayLike, *, label: str, layers: npt.ArrayLike | None = None) -> None:
        self.values: Floats = np.asarray(values, dtype=np.float64)
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
        values, label, layers
            As of the class.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default on a new figure.

        Returns
        -------
        LayerHeadDisplay
            The display, drawn.
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
            Each with ``layer``, ``head`` and the value, a number or None.
        value : str
            The name of the column.
        label
            As of the class.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default on a new figure.

        Returns
        -------
        LayerHeadDisplay
            The display, drawn. Heads that are in no row, or have None there, are left blank.
        """
        layers = sorted({row["layer"] for row in rows})
        values = np.full((len(layers), max((row["head"] + 1 for row in rows), default=0)), np.nan)
        for row in rows:
            if row[value] is not None:
                values[layers.index(row["layer"]), row["head"]] = row[value]
        return cls.from_values(values, label=label, layers=layers, ax=ax)

    def plot(self, ax: Axes | None = None) -> LayerHeadDisplay:
        """Draw the display.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default on a new figure.

        Returns
        -------
        LayerHeadDisplay
            The display itself.
        """
        self.ax_ = ax = _axes(ax)
        self.figure_ = ax.figure
        if self.values.size:
            image = ax.imshow(self.values, cmap="cividis", aspect="auto", interpolation="nearest")
            self.figure_.colorbar(image, ax=ax, label=self.label, pad=0.02)
        layers, heads = (np.arange(0, count, -(-count // _TICKS) or 1) for count in self.values.shape)
        ax.set(xlabel="head", ylabel="layer", xticks=heads, yticks=layers)
        ax.set_yticklabels([str(layer) for layer in self.layers[layers]])
        return self


class KeptPatchesDisplay:
    """An image with the patches that heads attend to exactly: the more heads, the brighter.

    Parameters
    ----------
    kept : array_like of bool, shape (..., rows, columns)
        True for a patch that is kept, as `levattn.integrations.timm.kept_patches` gives it; leading axes (layers and
        heads) are averaged.
    image : array_like, shape (height, width) or (height, width, 3), optional
        The image, of which the patches are equal parts; channels between 0 and 1.

    Attributes
    ----------
    share : ndarray of float64, shape (rows, columns)
        The share of the heads that keep each patch.
    ax_ : matplotlib.axes.Axes
        The axes drawn on.
    figure_ : matplotlib.figure.Figure
        Their figure.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.plots import KeptPatchesDisplay
    >>> display = KeptPatchesDisplay(np.array([[[True, False], [True, True]], [[True, False], [False, False]]]))
    >>> display.share
    array([[1. , 0. ],
           [0.5, 0.5]])
    """

    ax_: Axes
    figure_: Figure | SubFigure

    def __init__(self, kept: npt.ArrayLike, image: npt.ArrayLike | None = None) -> None:
        flags = np.asarray(kept, dtype=np.float64)
        if flags.ndim < 2 or not flags.size:
            raise ValueError(f"kept has shape {flags.shape}, expected (..., rows, columns)")
        self.share: Floats = flags.mean(axis=tuple(range(flags.ndim - 2)))
        self.image: Floats | None = None if image is None else np.asarray(image, dtype=np.float64)
        if self.image is not None and (self.image.ndim not in (2, 3) or self.image.shape[2:] not in ((), (3,))):
            raise ValueError(f"image has shape {self.image.shape}, expected (height, width) or (height, width, 3)")

    @classmethod
    def from_kept(
        cls, kept: npt.ArrayLike, image: npt.ArrayLike | None = None, *, ax: Axes | None = None
    ) -> KeptPatchesDisplay:
        """Draw the patches.

        Parameters
        ----------
        kept, image
            As of the class.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default on a new figure.

        Returns
        -------
        KeptPatchesDisplay
            The display, drawn.
        """
        return cls(kept, image).plot(ax)

    def plot(self, ax: Axes | None = None) -> KeptPatchesDisplay:
        """Draw the display.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default on a new figure.

        Returns
        -------
        KeptPatchesDisplay
            The display itself.
        """
        self.ax_ = ax = _axes(ax)
        self.figure_ = ax.figure
        rows, columns = self.share.shape
        place = (0, columns, rows, 0)
        if self.image is not None:
            ax.imshow(self.image, extent=place, cmap="gray", vmin=0, vmax=1)
        opacity = 1.0 if self.image is None else 0.6
        shown = ax.imshow(self.share, extent=place, cmap="cividis", vmin=0, vmax=1, alpha=opacity)
        self.figure_.colorbar(shown, ax=ax, label="share of heads that keep a patch", pad=0.02)
        ax.set(xticks=[], yticks=[])
        return self


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
    rows, columns : int
        How many axes.

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


def _require_matplotlib() -> None:
    try:
        import matplotlib as mpl  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError('pictures need matplotlib: pip install "levattn[plot]"') from error


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    _require_matplotlib()
    import matplotlib.pyplot as plt

    return plt.subplots(layout="constrained")[1]


def _spread(n: int) -> Ints:
    """Positions 0, ..., n - 1, thinned out evenly on a logarithmic axis where there are many."""
    if n <= _CURVE_POINTS:
        return np.arange(n)
    return np.unique(np.geomspace(1, n, _CURVE_POINTS).round().astype(np.intp)) - 1


def _range(sizes: Ints) -> str:
    low, high = int(sizes.min()), int(sizes.max())
    return f"{low}" if low == high else f"{low} to {high}, median {np.median(sizes):.4g}"


def _mask_of(universal: UniversalSet | npt.ArrayLike, n: int) -> Bools:
    chosen = np.asarray(getattr(universal, "mask", universal))
    mask = np.zeros(n, dtype=np.bool_)
    if chosen.dtype == np.bool_:
        if chosen.shape != (n,):
            raise ValueError(f"universal has a mask of shape {chosen.shape}, expected ({n},), one per column of A")
        return chosen
    mask[chosen.astype(np.intp)] = True
    return mask


def _edges(length: int) -> Ints:
    cells = min(length, _MAP_CELLS)
    return np.arange(cells) * length // max(cells, 1)


def _max_bins(matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    for axis, length in enumerate(matrix.shape):
        if length > _MAP_CELLS:
            matrix = np.maximum.reduceat(matrix, _edges(length), axis=axis)
    return matrix


def _one_per_cell(heavy: Bools) -> Ints:
    """Positions (query, key) of the cells with a True entry: where each cell starts."""
    rows, columns = np.nonzero(_max_bins(heavy))
    return np.stack([_edges(heavy.shape[0])[rows], _edges(heavy.shape[1])[columns]], axis=-1)
