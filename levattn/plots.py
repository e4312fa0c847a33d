"""Plots of leverage scores, captured mass, heavy attention, layers and heads, and tokens of a text.

The classes are display objects as in scikit-learn. A class method ``from_...`` takes the data, draws them and returns
a display with the drawn values as attributes, ``ax_`` and ``figure_``. ``plot`` draws the display again on other axes.
The first drawing imports matplotlib. Color-blind readers can tell the colors apart, on light and on dark backgrounds.
"""

from __future__ import annotations

import io
import itertools
import math
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import as_numbers, to_numpy
from levattn._core.checks import TIE, check_epsilon, check_nonnegative, needing, positive_number, whole_number
from levattn._core.types import Flags, Float64

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.path import Path
    from matplotlib.transforms import Affine2DBase

__all__ = [
    "CapturedMassDisplay",
    "HeavyMapDisplay",
    "LayerHeadDisplay",
    "LeverageSpectrumDisplay",
    "TokenStripDisplay",
]


class ShownSet(Protocol):
    """What is drawn of a `UniversalSet`, which has a module above this one."""

    @property
    def mask(self) -> Any: ...
    @property
    def scores(self) -> Any: ...
    @property
    def sizes(self) -> Any: ...
    @property
    def epsilon(self) -> Any: ...
    @property
    def total_bound(self) -> Any: ...
    @property
    def certificate(self) -> tuple[str, ...]: ...
    @property
    def by_size(self) -> bool: ...


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


class LeverageSpectrumDisplay(Display):
    """Scores in descending order, with the threshold and the bound on the universal set.

    The scores are leverage scores, or certified bounds where the attention function is not x². Both axes are
    logarithmic, and scores of zero are left out. For a batch, the line is the median over the items at each
    place, and the band reaches from their minimum to their maximum.

    Parameters
    ----------
    scores : array_like, shape (..., n)
        Scores of n keys.
    epsilon : float, optional
        Threshold, a horizontal line. The keys above it are the universal set.
    rank : number or array_like of numbers, shape (...,), optional
        Rank of the keys, or for certified bounds the bound on the sum of the sensitivities
        (`UniversalSet.total_bound`). With `epsilon`, a vertical line shows the bound rank/epsilon (the largest
        of a batch), if it is finite.
    sizes : int or array_like of int, shape (...,), optional
        Sizes of the sets. With `epsilon`, the default is to count them; scores within 1e-9 of it, relative, are
        inside. Without it, for sets of a given size, a vertical line shows them.
    certified : bool, default False
        Whether the scores are certified bounds. The labels then say so.

    Attributes
    ----------
    scores : ndarray of float64, shape (items, n)
        The scores of each item, descending.
    sizes : ndarray of int, shape (items,), or None
        The size of the set of each item.
    size_bound : float or None
        The bound rank/epsilon on the size of the set.
    ax_, figure_ : matplotlib.axes.Axes, matplotlib.figure.Figure
        The axes and the figure of the drawing.

    Raises
    ------
    TypeError, ValueError
        If the scores are no finite numbers of at least 0, or `epsilon` is not a finite number above 0.

    Notes
    -----
    Of more than 2000 keys, 2000 are drawn, evenly along the axis, including the first and the last. The scores are in
    order, so no peak is left out.

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

    def __init__(
        self,
        scores: npt.ArrayLike,
        *,
        epsilon: float | None = None,
        rank: npt.ArrayLike | None = None,
        sizes: npt.ArrayLike | None = None,
        certified: bool = False,
    ) -> None:
        values = np.atleast_1d(as_numbers("scores", scores))
        check_nonnegative("scores", values)
        flat = values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
        self.scores: Float64 = -np.sort(-flat, axis=-1)
        self.epsilon = epsilon = None if epsilon is None else positive_number("epsilon", epsilon)
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
        scores, epsilon, rank, sizes, certified : as for the class
            The scores and their bounds.
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; by default on a new figure.

        Returns
        -------
        LeverageSpectrumDisplay
            The display, drawn.

        Raises
        ------
        TypeError, ValueError
            If the scores are no finite numbers of at least 0, or `epsilon` is not a finite number above 0.
        """
        return cls(scores, epsilon=epsilon, rank=rank, sizes=sizes, certified=certified).plot(ax)

    @classmethod
    def from_set(cls, universal: ShownSet, *, ax: Axes | None = None) -> LeverageSpectrumDisplay:
        """Draw the scores of a universal set.

        Parameters
        ----------
        universal : UniversalSet
            A set by leverage scores or by certified bounds, of one matrix or of a batch.
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; by default on a new figure.

        Returns
        -------
        LeverageSpectrumDisplay
            The display, drawn.

        Raises
        ------
        TypeError
            If the set comes from a stream, which does not hold the scores of all keys.

        Examples
        --------
        >>> import numpy as np, levattn
        >>> from levattn.plots import LeverageSpectrumDisplay
        >>> universal = levattn.universal_set(np.eye(3), 0.5)
        >>> LeverageSpectrumDisplay.from_set(universal).sizes
        array([3])
        """
        if not hasattr(universal, "by_size"):
            raise TypeError(
                f"universal is a {type(universal).__name__}, which does not hold the scores of all keys; expected a "
                "UniversalSet. Give leverage scores to from_scores"
            )
        by_size = universal.by_size or universal.epsilon is None
        return cls.from_scores(
            to_numpy(universal.scores),
            epsilon=None if by_size else universal.epsilon,
            rank=None if by_size else universal.total_bound,
            sizes=universal.sizes,
            certified=universal.certificate != ("leverage",),
            ax=ax,
        )

    def _draw(self, ax: Axes) -> None:
        self._plot_scores(ax)
        self._plot_threshold(ax)
        if not self.scores.any():  # a logarithmic axis cannot find its limits without a positive value
            ax.set(xlim=(0.8, self.scores.shape[-1] + 2), ylim=(1e-3, 1.0))
        ylabel = "certified bound" if self.certified else "leverage score"
        ax.set(xscale="log", yscale="log", xlabel="keys, by descending score", ylabel=ylabel)
        ax.grid(alpha=0.25, lw=0.5)
        _add_legend(ax)

    def _plot_scores(self, ax: Axes) -> None:
        items, n = self.scores.shape
        if items == 0:
            return
        at = log_positions(n)
        values = np.where(self.scores[:, at] > 0, self.scores[:, at], np.nan)
        if items == 1:
            label = "certified bounds" if self.certified else "leverage scores"
            ax.plot(at + 1, values[0], color=BLUE, lw=2, label=label)
            return
        middle, highest = np.median(self.scores[:, at], axis=0), self.scores[:, at].max(axis=0)
        lowest = np.maximum(self.scores[:, at].min(axis=0), np.nanmin(values, initial=1.0))
        seen = highest > 0
        ax.fill_between(
            at[seen] + 1,
            lowest[seen],
            highest[seen],
            facecolor=(BLUE, 0.3),
            edgecolor=BLUE,  # where the band is faint, as on black, the edges show it
            lw=0.8,
            label=f"range of {items}",
        )
        ax.plot(at + 1, np.where(middle > 0, middle, np.nan), color=BLUE, lw=2, label="median")

    def _plot_threshold(self, ax: Axes) -> None:
        size = f"|U| = {_range(self.sizes)}" if self.sizes is not None and self.sizes.size else ""
        if self.epsilon is not None:
            label = ": ".join(filter(None, (f"ε = {self.epsilon:.3g}", size)))
            ax.axhline(self.epsilon, color=RED, lw=1.2, ls="--", label=label)
        elif self.sizes is not None and size:
            ax.axvline(float(np.median(self.sizes)), color=RED, lw=1.2, ls="--", label=size)
        if self.size_bound and math.isfinite(self.size_bound):
            what = "bound" if self.certified else "bound rank/ε"
            vacuous = " ≥ n: vacuous" if self.size_bound >= self.scores.shape[-1] else ""
            ax.axvline(
                self.size_bound,
                color=GRAY,
                lw=1.5,
                ls=":",
                label=f"{what} = {self.size_bound:.4g}{vacuous}",
            )


def _range(sizes: Ints) -> str:
    low, high = int(sizes.min()), int(sizes.max())
    return f"{low}" if low == high else f"{low} to {high}, median {np.median(sizes):.4g}"


_REFERENCES = {"oracle": (GREEN, "-."), "random": (GRAY, ":")}
_CURVES = ((BLUE, "-"), (PINK, "--"), (OCHRE, (0, (5, 1))), (RED, (0, (3, 1, 1, 1))))


class CapturedMassDisplay(Display):
    """Mean attention mass that the first k keys of an order capture, against k.

    Parameters
    ----------
    curves : mapping of str to array_like, shape (n,)
        Captured mass of 1, ..., n keys, for each name.
    size : float, optional
        A number of keys to mark, such as the size of the universal set.

    Attributes
    ----------
    ax_, figure_ : matplotlib.axes.Axes, matplotlib.figure.Figure
        The axes and the figure of the drawing.

    Notes
    -----
    Of more than 2000 keys, 2000 are drawn, evenly along the logarithmic axis, including the first and the last.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.plots import CapturedMassDisplay
    >>> display = CapturedMassDisplay({"leverage": np.array([0.5, 0.9, 1.0])}, size=2)
    >>> display.curves["leverage"]
    array([0.5, 0.9, 1. ])
    """

    def __init__(self, curves: Mapping[str, npt.ArrayLike], *, size: float | None = None) -> None:
        self.curves: dict[str, Float64] = {name: np.asarray(curve, dtype=np.float64) for name, curve in curves.items()}
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
        """Draw the captured mass of orders of the keys, beside the best order and a random one.

        Parameters
        ----------
        A : array_like, shape (..., m, n)
            Attention of m queries over n keys; rows sum to one (or to zero).
        orders : mapping of str to array_like of int, shape (..., n)
            For each name the keys, first to last. Unless these names are taken, two orders are added. ``oracle``
            is by descending mass, so its first k keys are the best set of k keys for all queries of an item.
            ``random`` is the expectation over uniformly random sets.
        size : float, optional
            A number of keys to mark, such as the size of the universal set.
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; by default on a new figure.

        Returns
        -------
        CapturedMassDisplay
            The display, drawn. Curves are means over queries and items.

        Raises
        ------
        TypeError, ValueError
            If `A` holds no real numbers, or an order does not have each key of `A` once.
        """
        attention = as_numbers("A", A)
        if attention.ndim < 2:
            raise ValueError(f"A has shape {attention.shape}, expected (..., m, n)")
        mass = attention.sum(axis=-2) / max(attention.shape[-2], 1)
        n, items = mass.shape[-1], math.prod(mass.shape[:-1])
        wanted = {name: _order(f"orders[{name!r}]", order, mass.shape) for name, order in orders.items()}
        wanted.setdefault("oracle", np.argsort(-mass, axis=-1, kind="stable"))
        curves = {}
        for name, order in wanted.items():
            captured = np.cumsum(np.take_along_axis(mass, order, axis=-1), axis=-1)
            curves[name] = captured.reshape(items, n).sum(axis=0) / max(items, 1)
        curves.setdefault("random", np.arange(1, n + 1) / n * curves["oracle"][-1:].sum())
        return cls(curves, size=size).plot(ax)

    def _draw(self, ax: Axes) -> None:
        styles = iter(_CURVES * (1 + len(self.curves) // len(_CURVES)))
        for name, curve in self.curves.items():
            color, dashes = _REFERENCES[name] if name in _REFERENCES else next(styles)
            at = log_positions(curve.size)
            ax.plot(at + 1, curve[at], color=color, ls=dashes, lw=2, label=name)
        if self.size is not None:
            ax.axvline(self.size, color=RED, lw=1.2, ls="--", label=f"|U| = {self.size:.3g}")
        ax.set(xscale="log", ylim=(0, 1.02), xlabel="keys", ylabel="captured attention mass")
        ax.grid(alpha=0.25, lw=0.5)
        _add_legend(ax)


def _add_legend(ax: Axes) -> None:
    """Add a legend; matplotlib warns of one without entries, as of no items."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="best", fontsize="small")


_MOST_SHADED = 1e307  # matplotlib multiplies the ends of a color bar by up to 10


def _require_shades(name: str, values: Float64) -> None:
    """Raise for finite numbers beyond the range of a color bar."""
    most = np.abs(values).max(initial=0.0, where=np.isfinite(values))
    if most > _MOST_SHADED:
        raise ValueError(f"{name} has a number of size {most:.3g}; expected at most {_MOST_SHADED:g}. Scale them down")


def _order(name: str, given: Any, shape: tuple[int, ...]) -> Ints:
    """Return an order of the keys of each item, or raise."""
    order = np.asarray(given)
    if order.shape != shape:
        raise ValueError(f"{name} has shape {order.shape}, expected {shape}: the keys of each item")
    if order.size and not np.issubdtype(order.dtype, np.integer):
        raise TypeError(f"{name} has dtype {order.dtype}, expected the numbers of keys, of integer dtype")
    if (np.sort(order, axis=-1) != np.arange(shape[-1])).any():
        raise ValueError(f"{name} does not have each key once, expected an order of 0, ..., {shape[-1] - 1}")
    return order.astype(np.intp)


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
    TypeError, ValueError
        If `values` is not a matrix of numbers, holds finite ones beyond ±1e307, or `layers` does not match its rows.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.plots import LayerHeadDisplay
    >>> display = LayerHeadDisplay(np.array([[0.5, 0.9], [0.7, np.nan]]), label="captured softmax mass", layers=[0, 3])
    >>> display.layers
    array([0, 3])
    """

    def __init__(self, values: npt.ArrayLike, *, label: str, layers: npt.ArrayLike | None = None) -> None:
        self.values: Float64 = (
            as_numbers("values", values) if hasattr(values, "shape") else np.asarray(values, dtype=np.float64)
        )
        if self.values.ndim != 2:
            raise ValueError(f"values has shape {self.values.shape}, expected (layers, heads)")
        _require_shades("values", self.values)
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
        TypeError, ValueError
            As for the class.
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

    Raises
    ------
    TypeError, ValueError
        If `epsilon` is not a number in (0, 1].

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
        self.epsilon = check_epsilon(epsilon)
        self.indices: Ints = np.asarray(indices, dtype=np.intp)
        self.caught: Ints = np.asarray(caught, dtype=np.intp).reshape(-1, 2)
        self.missed: Ints = np.asarray(missed, dtype=np.intp).reshape(-1, 2)
        self.counts = counts

    @classmethod
    def from_attention(
        cls,
        A: npt.ArrayLike,
        epsilon: float,
        universal: ShownSet | npt.ArrayLike,
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
        TypeError, ValueError
            If A is not a matrix of real numbers, `epsilon` is not in (0, 1], or the set does not match the columns.
        """
        matrix, epsilon = as_numbers("A", A), check_epsilon(epsilon)
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


_SPACES = ("Ġ", "▁")  # spaces in byte-level vocabularies and in SentencePiece vocabularies
_CONTINUED = "##"  # WordPiece's mark of a token that continues a word

_MOST_LINES = 1000
_SIZE = 100.0  # of letters in measured outlines, as matplotlib returns them
_POINTS, _LEAST_POINTS = 8.5, 4.0  # size of the letters on a new figure, and the least on given axes
_PITCH, _BASELINE = 1.8, 0.62  # from line to line, in font sizes; the place of letters, in lines
_LEAST_WIDTH = 60  # in columns: room for the color bar and the words beside it
_BAR, _BAR_ROOM = 0.1, 0.7  # height of the color bar, and with its labels, in inches


class TokenStripDisplay(Display):
    r"""A text of tokens, each on a background shaded by its score; kept tokens are bold and underlined.

    Tokens are drawn literally, in a monospaced font, in lines that break between words where possible. If any token
    begins with ``Ġ`` or ``▁``, these marks are the spaces of the whole text, and other tokens join the token before.
    Otherwise there is a space between tokens, except before a token that begins with ``##``, which is left out.
    Tabs, line ends and other invisible characters are drawn as Python's escapes (``\t``), and an empty token as an
    empty box. Letters are black or white, whichever contrasts more with the background: by 4.5 at least.

    Parameters
    ----------
    tokens : sequence of str, length n
        The tokens, in the order of the text.
    scores : array_like, shape (n,)
        A finite number for each token. Shades begin at 0, or at the smallest score if it is negative, and end at
        the largest score.
    kept : UniversalSet or array_like, optional
        The tokens to mark: a set, a mask (n,) of bool, or distinct indices.
    columns : int, default 90
        Most characters of a line, at least 2. Wide East Asian characters count as two.

    Attributes
    ----------
    kept : ndarray of bool, shape (n,), or None
        The marked tokens; `tokens`, `scores` and `columns` are kept too.
    lines : list of str
        The text as drawn, line by line.
    ax_, figure_ : matplotlib.axes.Axes, matplotlib.figure.Figure
        The axes and the figure of the drawing.

    Raises
    ------
    TypeError
        If `tokens` is a single string or holds other items than strings, or `columns` is not an integer.
    ValueError
        If `scores` or `kept` do not match the tokens, a score is not finite or beyond ±1e307, or `columns` is below 2.
        Also by `plot`, if there are more than 1000 lines for a new figure, or too many for letters of 4 points on
        `ax`.

    Notes
    -----
    A new figure is as high as the lines need. On given axes letters shrink until all lines fit. The fonts come from
    matplotlib's ``font.monospace``, then from ``font.sans-serif``. If none of them has a letter, matplotlib warns and
    draws a box: add a font that has the letter. Time and memory are linear in the length of the text.

    Examples
    --------
    >>> from levattn.plots import TokenStripDisplay
    >>> display = TokenStripDisplay(["heavy", "at", "##tention", "$x^2$"], [0.1, 0.2, 0.9, 0.3], kept=[2], columns=12)
    >>> display.lines
    ['heavy', 'attention', '$x^2$']
    >>> display.kept
    array([False, False,  True, False])
    """

    def __init__(
        self,
        tokens: Sequence[str],
        scores: npt.ArrayLike,
        *,
        kept: ShownSet | npt.ArrayLike | None = None,
        columns: int = 90,
    ) -> None:
        self.tokens = _texts(tokens)
        n = len(self.tokens)
        self.scores: Float64 = np.asarray(scores, dtype=np.float64)
        if self.scores.shape != (n,):
            raise ValueError(f"scores has shape {self.scores.shape}, expected ({n},), one for each token")
        if not np.isfinite(self.scores).all():
            first = np.flatnonzero(~np.isfinite(self.scores))[:5].tolist()
            raise ValueError(f"scores is not finite at {first}; expected a number for each token, such as 0 for none")
        _require_shades("scores", self.scores)
        self.kept: Flags | None = None if kept is None else mask_of(kept, n, "kept", "token")
        self.columns = whole_number("columns", columns, 2)  # the width of a wide character
        self._pieces = list(_pieces(_spaced(self.tokens), self.columns))
        self.lines = _lines(self._pieces)

    @classmethod
    def from_scores(
        cls,
        tokens: Sequence[str],
        scores: npt.ArrayLike,
        *,
        kept: ShownSet | npt.ArrayLike | None = None,
        columns: int = 90,
        ax: Axes | None = None,
    ) -> TokenStripDisplay:
        """Draw tokens with their scores.

        Parameters
        ----------
        tokens, scores, kept, columns : as for the class
            The tokens, and how to draw them.
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; by default on a new figure, as high as the lines need.

        Returns
        -------
        TokenStripDisplay
            The display, drawn.

        Raises
        ------
        TypeError, ValueError
            As for the class, or if there is too little room to read the text.
        """
        return cls(tokens, scores, kept=kept, columns=columns).plot(ax)

    def _inches(self) -> tuple[float, float]:
        """Return a figure size for letters of the usual size, and the color bar below."""
        rows, columns = self._rows, max(self.columns, _LEAST_WIDTH)
        if rows > _MOST_LINES:
            raise ValueError(
                f"the text has {rows} lines, expected at most {_MOST_LINES}; draw parts of it, or raise columns"
            )
        return columns * 0.6 * _POINTS / 72 + 0.2, rows * _PITCH * _POINTS / 72 + _BAR_ROOM

    def _draw(self, ax: Axes) -> None:
        letter = _letter_width()
        points = _cell(ax, self.columns, self._rows, letter)
        if points < _LEAST_POINTS:
            raise ValueError(
                f"ax has room for letters of {points:.1f} points, expected at least {_LEAST_POINTS:g}; "
                "give larger axes, or none for a figure of the right height"
            )
        ax.set_axis_off()
        shades = self._plot_boxes(ax)
        self._plot_letters(ax, shades, letter)
        self._plot_marks(ax)
        self._plot_bar(ax, shades)
        _place(ax, self.columns, self._rows, letter)

    @property
    def _rows(self) -> int:
        return max(len(self.lines), 1)

    def _plot_boxes(self, ax: Axes) -> PolyCollection:
        from matplotlib.collections import PolyCollection

        boxes = [_box(piece) for piece in self._pieces]
        shades = PolyCollection(boxes, cmap=COLORS, linewidths=0)
        shades.set_array(self.scores[[piece.token for piece in self._pieces]])
        low = self.scores.min(initial=0.0)
        high = self.scores.max(initial=low)
        shades.set_clim(low, high if high > low else 1.0)
        shades.set_in_layout(False)
        ax.add_collection(shades, autolim=False)
        return shades

    def _plot_letters(self, ax: Axes, shades: PolyCollection, letter: float) -> None:
        """Write the tokens, each letter in all its places at once: that is fast, and files are small."""
        from matplotlib.collections import PathCollection
        from matplotlib.transforms import AffineDeltaTransform

        bright = _luminance(shades.to_rgba(np.asarray(shades.get_array()))) > _MIDDLE
        scale = cast("Affine2DBase", ax.transData)  # affine, because both axes are linear
        places: dict[tuple[str, int, bool], list[tuple[float, float, str]]] = {}
        for piece, black in zip(self._pieces, bright, strict=True):
            for text, column, width in _letters(piece):
                place = (column, piece.line + _BASELINE, "black" if black else "white")
                places.setdefault((text, width, self._is_kept(piece)), []).append(place)
        for (text, width, bold), found in places.items():
            x, y, colors = zip(*found, strict=True)
            letters = PathCollection(
                [_outline(text, width, letter, bold=bold)],
                offsets=np.column_stack([x, y]),
                offset_transform=ax.transData,
                facecolors=colors,
                linewidths=0,
            )
            letters.set_transform(AffineDeltaTransform(scale))
            letters.set_in_layout(False)  # it lies within the axes
            letters.set_snap(False)  # snapping to whole pixels would lose thin strokes
            ax.add_collection(letters, autolim=False)

    def _plot_marks(self, ax: Axes) -> None:
        """Underline the kept tokens, which are also bold: these marks need no color."""
        import matplotlib as mpl

        lines = [_underline(piece) for piece in self._pieces if self._is_kept(piece)]
        marks = ax.hlines(*np.reshape(lines, (-1, 3)).T, color=mpl.rcParams["text.color"], lw=1.5)
        marks.set_in_layout(False)

    def _is_kept(self, piece: _Piece) -> bool:
        return self.kept is not None and bool(self.kept[piece.token])

    def _plot_bar(self, ax: Axes, shades: PolyCollection) -> None:
        label = "score"
        if self.kept is not None:
            label = f"score (bold, underlined: kept, {np.count_nonzero(self.kept)} of {len(self.tokens)})"
        width, height = _points(ax) / 72
        bar = ax.figure.colorbar(
            shades, ax=ax, location="bottom", fraction=_BAR / height, pad=_BAR / height, aspect=width / _BAR
        )
        bar.set_label(label)


@dataclass(frozen=True)
class _Piece:
    """A token and its place, or a part of a token that is longer than a line."""

    token: int
    line: int
    column: int
    text: str
    width: int


def _texts(tokens: Sequence[str]) -> tuple[str, ...]:
    if isinstance(tokens, str):
        raise TypeError("tokens is a single string; expected a sequence of tokens, such as tokens.split()")
    for at, token in enumerate(tokens):
        if not isinstance(token, str):
            raise TypeError(f"tokens[{at}] is {token!r}; expected a string, such as a tokenizer's decode gives")
    return tuple(tokens)


def _spaced(tokens: Sequence[str]) -> list[tuple[bool, str]]:
    """Return for each token whether a space stands before it, and its text as drawn."""
    if any(token.startswith(_SPACES) for token in tokens):
        rests = [token.lstrip("".join(_SPACES)) for token in tokens]
        # the first mark is the space before the token; further ones are drawn
        parts = [
            (rest != token, " " * (len(token) - len(rest) - 1) + rest)
            for token, rest in zip(tokens, rests, strict=True)
        ]
    else:
        joined = [token.startswith(_CONTINUED) and token != _CONTINUED for token in tokens]
        parts = [
            (not j, token.removeprefix(_CONTINUED) if j else token) for j, token in zip(joined, tokens, strict=True)
        ]
    return [(space, "".join(map(_visible, text)) or " ") for space, text in parts]


def _visible(letter: str) -> str:
    if letter.isprintable():
        return letter
    return " " if unicodedata.category(letter) == "Zs" else letter.encode("unicode_escape").decode("ascii")


def _width(text: str) -> int:
    """Return the columns of a text: none for a mark on the letter before it, two for a wide letter."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def _pieces(spaced: Iterable[tuple[bool, str]], columns: int) -> Iterator[_Piece]:
    """Place tokens in lines; words stay whole if a line can hold them, and else tokens do."""
    line = column = 0
    for word in _words(spaced):
        (_, space, _), width = word[0], sum(_width(text) for _, _, text in word)
        column += space and column > 0
        if column and column + width > columns >= width:
            line, column = line + 1, 0
        for token, _, text in word:
            for part in _parts(text, columns):
                width = max(_width(part), 1)
                if column and column + width > columns:
                    line, column = line + 1, 0
                yield _Piece(token, line, column, part, width)
                column += width


def _words(spaced: Iterable[tuple[bool, str]]) -> list[list[tuple[int, bool, str]]]:
    """Group tokens and their places into words: no space stands between tokens of a word."""
    words: list[list[tuple[int, bool, str]]] = []
    for token, (space, text) in enumerate(spaced):
        if space or not words:
            words.append([])
        words[-1].append((token, space, text))
    return words


def _parts(text: str, columns: int) -> Iterator[str]:
    """Cut a text that is longer than a line."""
    widths = list(itertools.accumulate(map(_width, text)))
    start, before = 0, 0
    for end, total in enumerate(widths):
        if total - before > columns:
            yield text[start:end]
            start, before = end, widths[end - 1]
    yield text[start:]


def _lines(pieces: Iterable[_Piece]) -> list[str]:
    lines = []
    for _, row in itertools.groupby(pieces, key=lambda piece: piece.line):
        line, end = "", 0
        for piece in row:
            line += " " * (piece.column - end) + piece.text
            end = piece.column + piece.width
        lines.append(line)
    return lines


def _box(piece: _Piece) -> list[tuple[float, float]]:
    """Return the corners of the background, slightly apart from its neighbors."""
    left, right = piece.column + 0.05, piece.column + piece.width - 0.05
    top, bottom = piece.line + 0.08, piece.line + 0.84
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _underline(piece: _Piece) -> tuple[float, float, float]:
    return piece.line + 0.93, piece.column + 0.05, piece.column + piece.width - 0.05


_MIDDLE = (1.05 * 0.05) ** 0.5 - 0.05  # the luminance that contrasts equally with black and white, by 4.58


def _luminance(colors: npt.ArrayLike) -> Float64:
    """Return the relative luminance of WCAG 2 of colors (n, 4): sRGB and opacity."""
    rgb = np.asarray(colors, dtype=np.float64).reshape(-1, 4)[:, :3]
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return np.asarray(linear @ [0.2126, 0.7152, 0.0722])


def _points(ax: Axes) -> Float64:
    """Return the width and height of the axes."""
    left, bottom, right, top = ax.bbox.extents
    return np.array([right - left, top - bottom]) * (72 / ax.figure.dpi)


def _cell(ax: Axes, columns: int, rows: int, letter: float) -> float:
    """Return the size of the letters, in points, at which all lines fit."""
    width, height = _points(ax)
    return float(min(width / (max(columns, _LEAST_WIDTH) * letter), height / (rows * _PITCH)))


def _place(ax: Axes, columns: int, rows: int, letter: float) -> None:
    """Set the limits of the axes, at their current place, so that lines start at the top left."""
    engine = ax.figure.get_layout_engine()
    if engine is not None:
        engine.execute(ax.figure.canvas.figure)
    points = _cell(ax, columns, rows, letter)
    width, height = _points(ax)
    ax.set(xlim=(0, width / (points * letter)), ylim=(height / (points * _PITCH), 0))
    ax.set_aspect(_PITCH / letter, anchor="NW")


def _letter_width() -> float:
    """Return the width of a letter of the monospaced font, as a share of the font size."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    sample = "0" * 50
    width = text_to_path.get_text_width_height_descent(sample, FontProperties(family="monospace", size=_SIZE), False)[
        0
    ]
    return float(width) / (_SIZE * len(sample))


def _letters(piece: _Piece) -> Iterator[tuple[str, int, int]]:
    """Yield each letter with an outline, its column and its width; text beyond ASCII stays whole, as it may join."""
    if not piece.text.isascii():
        yield piece.text, piece.column, piece.width
        return
    for place, letter in enumerate(piece.text):
        if letter != " ":
            yield letter, piece.column + place, 1


def _outline(text: str, width: int, letter: float, *, bold: bool) -> Path:
    """Return the outline of literal text in units of columns and lines."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.path import Path
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=["monospace", "sans-serif"], weight="bold" if bold else "normal", size=_SIZE)
    vertices, codes = text_to_path.get_text_path(font, text)
    if not len(codes):
        return Path(np.empty((0, 2)))
    points = np.asarray(vertices) / [_SIZE * letter, -_SIZE * _PITCH]
    # Letters of other fonts are wider or narrower than their cells.
    taken = text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] / (_SIZE * letter)
    points[:, 0] = points[:, 0] * min(1, width / taken) + max(0, width - taken) / 2
    return Path(points, np.asarray(codes))
