"""Online leverage scores against position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from levattn.plots.common import (
    BLUE,
    OCHRE,
    RED,
    Bools,
    Display,
    Floats,
    Ints,
    legend_below,
    starts_of_bins,
    whole_ticks,
)
from levattn.sensitivity.leverage import TIE, check_epsilon

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BINS = 1000


class OnlineScoresDisplay(Display):
    """Online leverage scores against the position of the key, with the scores among all keys below them.

    What lies between the two is what a key loses to those that come after it. The vertical axis is logarithmic, and
    scores of zero are left out. Up to 1000 keys are points, those that reach the threshold larger ones. More are drawn
    as bands of 1000 bins of about equal length, from the smallest to the largest score of each, so that no peak is
    hidden; where the largest reaches the threshold, or the bins on both sides are empty, it is a point as well.

    Parameters
    ----------
    online : array_like, shape (n,)
        Online leverage scores, as `online_leverage_scores` gives them: finite and not negative.
    final : array_like, shape (n,), optional
        Leverage scores among all keys, as `leverage_scores` gives them. With the same ridge none is above the online
        score, up to rounding.
    epsilon : float in (0, 1], optional
        Threshold, a horizontal line, with the number of keys that reach it online and among all (within 1e-9 of it,
        relative, is reached).

    Attributes
    ----------
    online : ndarray of float64, shape (n,)
        The online scores.
    final : ndarray of float64, shape (n,), or None
        The scores among all keys.
    starts : ndarray of int, shape (bins,)
        The first key of each bin.
    online_range : ndarray of float64, shape (bins, 2)
        The smallest and the largest online score above zero of each bin, NaN where there is none.
    final_range : ndarray of float64, shape (bins, 2), or None
        The same of the scores among all keys.
    online_heavy : ndarray of int, shape (k,), or None
        The keys that reach the threshold when they come.
    final_heavy : ndarray of int, shape (k,), or None
        The keys that reach it among all keys.
    ax_ : matplotlib.axes.Axes
        The axes drawn on.
    figure_ : matplotlib.figure.Figure
        Their figure.

    Raises
    ------
    TypeError
        If `epsilon` is not a real number.
    ValueError
        If scores are not of one axis and one length, or negative or not finite, or `epsilon` is outside (0, 1].

    See Also
    --------
    levattn.online_leverage_scores : The scores that are drawn.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> from levattn.plots import OnlineScoresDisplay
    >>> K = np.array([[1.0, 0], [1, 0], [0, 3], [2, 0]])
    >>> online, final = levattn.online_leverage_scores(K), levattn.leverage_scores(K)
    >>> display = OnlineScoresDisplay(online, final=final, epsilon=0.6)
    >>> display.online_heavy, display.final_heavy
    (array([0, 2, 3]), array([2, 3]))
    """

    def __init__(
        self,
        online: npt.ArrayLike,
        *,
        final: npt.ArrayLike | None = None,
        epsilon: float | None = None,
    ) -> None:
        self.online = _scores("online", online)
        self.final: Floats | None = None if final is None else _scores("final", final)
        if self.final is not None and self.final.shape != self.online.shape:
            raise ValueError(
                f"final has shape {self.final.shape}, expected {self.online.shape}, one for each of online"
            )
        self.epsilon = None if epsilon is None else check_epsilon(epsilon)
        self.starts = starts_of_bins(self.online.size, _BINS)
        self.online_range = _ranges(self.online, self.starts)
        self.final_range = None if self.final is None else _ranges(self.final, self.starts)
        self.online_heavy = _heavy(self.online, self.epsilon)
        self.final_heavy = _heavy(self.final, self.epsilon)

    @classmethod
    def from_scores(
        cls,
        online: npt.ArrayLike,
        *,
        final: npt.ArrayLike | None = None,
        epsilon: float | None = None,
        ax: Axes | None = None,
    ) -> OnlineScoresDisplay:
        """Draw scores.

        Parameters
        ----------
        online : array_like, shape (n,)
            Online leverage scores, finite and not negative.
        final : array_like, shape (n,), optional
            Leverage scores among all keys.
        epsilon : float in (0, 1], optional
            Threshold, a horizontal line.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default on a new figure.

        Returns
        -------
        OnlineScoresDisplay
            The display, drawn.

        Raises
        ------
        TypeError
            If `epsilon` is not a real number.
        ValueError
            If scores are not of one axis and one length, or negative or not finite, or `epsilon` is outside (0, 1].
        """
        return cls(online, final=final, epsilon=epsilon).plot(ax)

    def _draw(self, ax: Axes) -> None:
        self._plot_scores(ax, self.online_range, BLUE, "o", "online: among the keys so far")
        if self.final_range is not None:
            self._plot_scores(ax, self.final_range, OCHRE, "v", "among all keys")
        self._plot_threshold(ax)
        ax.set(yscale="log", xlabel="position of the key", ylabel="leverage score")
        whole_ticks(ax)
        if not self.online.any():  # a logarithmic axis cannot find its limits without a positive value
            ax.set(ylim=(1e-3, 1.0))
        ax.grid(alpha=0.25, lw=0.5)
        legend_below(ax)

    def _plot_scores(self, ax: Axes, ranges: Floats, color: str, marker: str, label: str) -> None:
        low, high = ranges.T
        if self.starts.size < self.online.size:
            ax.fill_between(self.starts, low, high, where=~np.isnan(high), color=color, lw=0.6, label=label)
            lone = _lone(high)  # a band has no width there
            ax.plot(self.starts[lone], high[lone], color=color, ls="none", marker=marker, ms=2.5)
        else:
            ax.plot(self.starts, high, color=color, ls="none", marker=marker, ms=2.5, label=label)
        if self.epsilon is not None:
            heavy = high >= self.epsilon * (1 - TIE)
            ax.plot(self.starts[heavy], high[heavy], color=color, ls="none", marker=marker, ms=4.5, label=f"_{label}")

    def _plot_threshold(self, ax: Axes) -> None:
        if self.epsilon is None or self.online_heavy is None:
            return
        counts = f"{self.online_heavy.size} keys online"
        if self.final_heavy is not None:
            counts += f", {self.final_heavy.size} among all"
        ax.axhline(self.epsilon, color=RED, lw=1.2, ls="--", label=f"ε = {self.epsilon:.3g}: {counts}")


def _scores(name: str, given: npt.ArrayLike) -> Floats:
    scores = np.asarray(given, dtype=np.float64)
    if scores.ndim != 1:
        raise ValueError(f"{name} has shape {scores.shape}, expected (n,); draw one item of a batch at a time")
    wrong = np.flatnonzero(~(np.isfinite(scores) & (scores >= 0)))
    if wrong.size:
        at = wrong[0]
        raise ValueError(f"{name}[{at}] is {scores[at]}; expected finite scores of at least 0")
    return scores


def _ranges(scores: Floats, starts: Ints) -> Floats:
    if not scores.size:
        return np.empty((0, 2))
    low = np.minimum.reduceat(np.where(scores > 0, scores, np.inf), starts)
    high = np.maximum.reduceat(scores, starts)
    return np.where(high[:, np.newaxis] > 0, np.stack([low, high], axis=-1), np.nan)


def _lone(high: Floats) -> Bools:
    """Which bins have a score, but neither of those beside them."""
    seen: Bools = np.pad(~np.isnan(high), 1)
    return seen[1:-1] & ~seen[:-2] & ~seen[2:]


def _heavy(scores: Floats | None, epsilon: float | None) -> Ints | None:
    if scores is None or epsilon is None:
        return None
    return np.flatnonzero(scores >= epsilon * (1 - TIE))
