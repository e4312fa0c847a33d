"""Plots of leverage scores, captured mass and heavy attention.

The classes are display objects as in scikit-learn. A class method ``from_...`` takes the data, draws them and returns
a display with the drawn values as attributes, ``ax_`` and ``figure_``. ``plot`` draws the display again on other axes.
The first drawing imports matplotlib. Color-blind readers can tell the colors apart, on light and on dark backgrounds.
"""

from __future__ import annotations

from levattn.plots.captured import CapturedMassDisplay
from levattn.plots.common import figure_bytes as figure_bytes
from levattn.plots.common import new_figure as new_figure
from levattn.plots.heavy_map import HeavyMapDisplay
from levattn.plots.layer_head import LayerHeadDisplay
from levattn.plots.spectrum import LeverageSpectrumDisplay
from levattn.plots.tokens import TokenStripDisplay

__all__ = [
    "CapturedMassDisplay",
    "HeavyMapDisplay",
    "LayerHeadDisplay",
    "LeverageSpectrumDisplay",
    "TokenStripDisplay",
]
