"""Scores in descending order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import as_numbers, to_numpy
from levattn._core.checks import TIE
from levattn._core.types import Float64
from levattn.plots.common import BLUE, GRAY, RED, Display, Ints, log_positions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from levattn.sets.result import UniversalSet


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
        If the scores are no real numbers, or hold NaN.

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
        if np.isnan(values).any():
            raise ValueError(
                f"scores hold NaN in {int(np.isnan(values).sum())} places; expected numbers of at least 0"
            )
        flat = values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
        self.scores: Float64 = -np.sort(-flat, axis=-1)
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
            If the scores are no real numbers, or hold NaN.
        """
        return cls(scores, epsilon=epsilon, rank=rank, sizes=sizes, certified=certified).plot(ax)

    @classmethod
    def from_set(cls, universal: UniversalSet, *, ax: Axes | None = None) -> LeverageSpectrumDisplay:
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

        Examples
        --------
        >>> import numpy as np, levattn
        >>> from levattn.plots import LeverageSpectrumDisplay
        >>> universal = levattn.universal_set(np.eye(3), 0.5)
        >>> LeverageSpectrumDisplay.from_set(universal).sizes
        array([3])
        """
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
        ax.legend(loc="best", fontsize="small")

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
