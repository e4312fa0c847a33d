"""Pictures as bytes.

Inside: the program writes figures with a function of its own.
"""

from __future__ import annotations

import pytest

matplotlib = pytest.importorskip("matplotlib")
from matplotlib import style as style_sheets  # noqa: E402
from test_plots import all_displays  # noqa: E402

from levattn.plots import (  # noqa: E402
    figure_bytes,
    new_figure,
)


@pytest.mark.parametrize(
    ("style", "suffix"),
    [
        *(("default", suffix) for suffix in (".png", ".svg", ".pdf")),
        *(pytest.param("dark_background", suffix, marks=pytest.mark.thorough) for suffix in (".png", ".svg", ".pdf")),
    ],
)
def test_the_same_pictures_have_the_same_bytes(style: str, suffix: str) -> None:
    with style_sheets.context(style):
        first, again = (all_displays(ax=lambda: new_figure()[1][0, 0]) for _ in range(2))
        shown = slice(None) if suffix == ".svg" else slice(1, 2)
        for one, other in zip(first[shown], again[shown], strict=True):
            assert figure_bytes(one.figure_, suffix) == figure_bytes(other.figure_, suffix.upper())
