"""The attention mass that the first keys of an order capture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from levattn._core.types import Float64
from levattn.plots.common import BLUE, GRAY, GREEN, OCHRE, PINK, RED, Display, log_positions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        ValueError
            If an order has another shape than the keys of `A`.
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
        ax.legend(loc="best", fontsize="small")
