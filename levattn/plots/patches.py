"""Patches of an image that heads attend to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from levattn.plots.common import Display, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = "viridis"  # perceptually uniform, and without grey, which is left to the image


class KeptPatchesDisplay(Display):
    """An image with the patches that heads attend to exactly: the more heads, the brighter.

    The image is drawn in grey below the colours, so that these mean the share of the heads alone.

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
    image : ndarray of float64, shape (height, width) or (height, width, 3), or None
        The image.
    ax_ : matplotlib.axes.Axes
        The axes drawn on.
    figure_ : matplotlib.figure.Figure
        Their figure.

    Raises
    ------
    ValueError
        If `kept` has less than two axes or no element, or `image` is not of a shape above.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.plots import KeptPatchesDisplay
    >>> display = KeptPatchesDisplay(np.array([[[True, False], [True, True]], [[True, False], [False, False]]]))
    >>> display.share
    array([[1. , 0. ],
           [0.5, 0.5]])
    """

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
        kept : array_like of bool, shape (..., rows, columns)
            True for a patch that is kept; leading axes are averaged.
        image : array_like, shape (height, width) or (height, width, 3), optional
            The image, of which the patches are equal parts; channels between 0 and 1.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default on a new figure.

        Returns
        -------
        KeptPatchesDisplay
            The display, drawn.

        Raises
        ------
        ValueError
            If `kept` has less than two axes or no element, or `image` is not of a shape above.
        """
        return cls(kept, image).plot(ax)

    def _draw(self, ax: Axes) -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        rows, columns = self.share.shape
        place = (0, columns, rows, 0)
        if self.image is not None:
            ax.imshow(_grey(self.image), extent=place, cmap="gray", vmin=0, vmax=1)
        opacity = 1.0 if self.image is None else 0.55
        ax.imshow(self.share, extent=place, cmap=_COLORS, vmin=0, vmax=1, alpha=opacity)
        shades = ScalarMappable(Normalize(0, 1), _COLORS)  # opaque, whatever is behind the bar
        self.figure_.colorbar(shades, ax=ax, label="share of heads that keep a patch", pad=0.02)
        ax.set(xticks=[], yticks=[])


def _grey(image: Floats) -> Floats:
    """Take the colours out of an image, in its shape."""
    if image.ndim == 2:
        return image
    return np.repeat((image @ [0.2126, 0.7152, 0.0722])[..., np.newaxis], 3, axis=-1)
