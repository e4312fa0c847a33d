"""Pictures, judged by what was drawn: lines, labels and marks of the axes, not pixels."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib.colors import to_hex  # noqa: E402

from levattn.plots import (  # noqa: E402
    CapturedMassDisplay,
    HeavyMapDisplay,
    LeverageSpectrumDisplay,
    figure_bytes,
    new_figure,
)
from levattn.universal import universal_set  # noqa: E402

Array = npt.NDArray[Any]


@pytest.fixture
def ax() -> Any:
    return new_figure()[1][0, 0]


def lines(ax: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in ax.lines}


def legend(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def attention(Q: Array, K: Array) -> Array:
    squares = (Q @ K.T) ** 2
    return np.asarray(squares / squares.sum(axis=1, keepdims=True))


def random(*shape: int) -> Array:
    return np.random.default_rng(3).standard_normal(shape)


# -- leverage spectrum -----------------------------------------------------------------------------------


def test_spectrum_of_one_matrix(ax: Any) -> None:
    scores = np.array([0.05, 0.5, 0.0, 0.2, 0.1])
    display = LeverageSpectrumDisplay.from_scores(scores, epsilon=0.1, rank=2, ax=ax)
    drawn = lines(ax)
    x, y = drawn["leverage scores"].get_data()
    np.testing.assert_array_equal(x, [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(y, [0.5, 0.2, 0.1, 0.05, np.nan])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert legend(ax) == ["leverage scores", "ε = 0.1: |U| = 3", "bound rank/ε = 20 ≥ n: vacuous"]
    assert drawn["ε = 0.1: |U| = 3"].get_ydata()[0] == 0.1
    assert drawn["bound rank/ε = 20 ≥ n: vacuous"].get_xdata()[0] == 20
    assert display.ax_ is ax
    assert display.figure_ is ax.figure


def test_spectrum_of_a_batch(ax: Any) -> None:
    scores = np.abs(random(2, 3, 50)) / 50
    display = LeverageSpectrumDisplay.from_scores(scores, epsilon=0.02, rank=np.full((2, 3), 4), ax=ax)
    ordered = -np.sort(-scores.reshape(6, 50), axis=1)
    np.testing.assert_array_equal(lines(ax)["median"].get_ydata(), np.median(ordered, axis=0))
    assert display.sizes is not None
    np.testing.assert_array_equal(display.sizes, (scores >= 0.02).sum(axis=-1).ravel())
    assert display.size_bound == 200
    assert legend(ax)[0] == "range of 6"
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (ordered.min(), ordered.max())


def test_ties_with_the_threshold_are_inside() -> None:
    display = LeverageSpectrumDisplay([0.1 - 1e-12, 0.1, 0.0999], epsilon=0.1)
    assert display.sizes is not None
    assert display.sizes.tolist() == [2]


def test_given_sizes_are_believed(ax: Any) -> None:
    LeverageSpectrumDisplay.from_scores(np.array([[0.5, 0.3], [0.2, 0.1]]), epsilon=0.3, sizes=[1, 0], ax=ax)
    assert "ε = 0.3: |U| = 0 to 1, median 0.5" in legend(ax)


def test_spectrum_of_a_selection_by_size(ax: Any) -> None:
    LeverageSpectrumDisplay.from_scores(np.linspace(0, 1, 9), rank=3, sizes=4, ax=ax)
    assert legend(ax) == ["leverage scores", "|U| = 4"]
    assert lines(ax)["|U| = 4"].get_xdata()[0] == 4


def test_spectrum_of_certified_bounds(ax: Any) -> None:
    LeverageSpectrumDisplay.from_scores([0.5, 0.2, 0.1, 0.1], epsilon=0.2, rank=0.5, certified=True, ax=ax)
    assert legend(ax) == ["certified bounds", "ε = 0.2: |U| = 2", "bound = 2.5"]
    assert ax.get_ylabel() == "certified bound"


def test_an_infinite_bound_is_not_drawn(ax: Any) -> None:
    display = LeverageSpectrumDisplay.from_scores([0.5, 0.2], epsilon=0.2, rank=np.inf, certified=True, ax=ax)
    assert display.size_bound == np.inf
    assert legend(ax) == ["certified bounds", "ε = 0.2: |U| = 2"]
    assert figure_bytes(ax.figure, ".png").startswith(b"\x89PNG")


def test_long_spectra_are_thinned_but_keep_both_ends(ax: Any) -> None:
    scores = np.geomspace(1, 1e-6, 300_000)
    LeverageSpectrumDisplay.from_scores(scores, ax=ax)
    x, y = lines(ax)["leverage scores"].get_data()
    assert len(x) <= 2000
    assert (x[0], x[-1], y[0], y[-1]) == (1, 300_000, scores[0], scores[-1])
    np.testing.assert_array_equal(y, scores[x - 1])


@pytest.mark.parametrize("scores", [np.zeros(0), np.zeros(4), np.zeros((0, 4)), np.zeros((3, 0)), np.zeros((2, 4))])
def test_spectra_with_nothing_to_draw(ax: Any, scores: Array) -> None:
    LeverageSpectrumDisplay.from_scores(scores, epsilon=0.5, rank=np.zeros(scores.shape[:-1], int), ax=ax)
    assert figure_bytes(ax.figure, ".png").startswith(b"\x89PNG")


# -- captured mass ---------------------------------------------------------------------------------------


def test_captured_mass_is_the_mean_over_queries_and_items(ax: Any) -> None:
    A = np.abs(random(2, 5, 7))
    A /= A.sum(axis=-1, keepdims=True)
    order = np.stack([np.arange(7), np.arange(7)[::-1]])
    display = CapturedMassDisplay.from_attention(A, orders={"leverage": order}, size=3, ax=ax)
    for k in range(1, 8):
        expected = np.mean([A[b][:, order[b, :k]].sum(axis=1).mean() for b in range(2)])
        assert lines(ax)["leverage"].get_ydata()[k - 1] == pytest.approx(expected)
        best = np.mean([np.sort(A[b].mean(axis=0))[-k:].sum() for b in range(2)])
        assert display.curves["oracle"][k - 1] == pytest.approx(best)
        assert display.curves["random"][k - 1] == pytest.approx(k / 7)
    assert legend(ax) == ["leverage", "oracle", "random", "|U| = 3"]
    assert all(np.all(display.curves["oracle"] >= curve - 1e-12) for curve in display.curves.values())


def test_each_curve_has_a_style_of_its_own(ax: Any) -> None:
    A = np.full((4, 6), 1 / 6)
    CapturedMassDisplay.from_attention(A, orders={name: np.arange(6) for name in "abcd"}, ax=ax)
    assert len({to_hex(line.get_color()) for line in ax.lines}) == 6
    assert len({str(line._dash_pattern) for line in ax.lines}) == 6


def test_given_references_are_kept(ax: Any) -> None:
    A = np.array([[0.7, 0.2, 0.1]])
    display = CapturedMassDisplay.from_attention(A, orders={"random": np.array([2, 1, 0])}, ax=ax)
    np.testing.assert_allclose(display.curves["random"], [0.1, 0.3, 1.0])


def test_orders_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"orders\['leverage'\] has shape \(3,\), expected \(2, 3\)"):
        CapturedMassDisplay.from_attention(np.ones((2, 4, 3)), orders={"leverage": np.arange(3)})


# -- the map of heavy entries ----------------------------------------------------------------------------


def test_map_marks_the_set_and_what_it_misses(ax: Any) -> None:
    A = np.array([[0.6, 0.3, 0.1], [0.0, 0.2, 0.8], [0.5, 0.5, 0.0]])
    display = HeavyMapDisplay.from_attention(A, 0.5, [0, 1], ax=ax)
    assert display.counts == (3, 1)
    caught, missed = ax.collections[:2]
    assert caught.get_offsets().tolist() == [[0, 0], [0, 2], [1, 2]]  # (key, query)
    assert missed.get_offsets().tolist() == [[2, 1]]
    assert legend(ax) == ["≥ ε, in U: 3", "≥ ε, missed: 1"]
    assert to_hex(missed.get_facecolor()[0]) == "#d55e00"
    strip = ax.child_axes[0]
    assert [segment[0][0] for segment in strip.collections[0].get_segments()] == [0, 1]
    np.testing.assert_array_equal(ax.images[0].get_array(), np.maximum(A, 0.5 / 1000))


def test_map_takes_a_set_a_mask_or_indices() -> None:
    Q, K = random(30, 4), random(40, 4)
    A = attention(Q, K)
    chosen = universal_set(K, 0.15)
    counts = {
        HeavyMapDisplay.from_attention(A, 0.15, given, ax=new_figure()[1][0, 0]).counts
        for given in (chosen, chosen.mask, chosen.indices)
    }
    assert counts == {(int((A >= 0.15).sum()), 0)}


def test_large_maps_are_max_binned_and_lose_no_entry(ax: Any) -> None:
    A = np.full((1500, 3000), 1e-6)
    A[1499, 2999], A[7, 1234], A[700, 0] = 0.9, 0.8, 0.7
    display = HeavyMapDisplay.from_attention(A, 0.5, [2999], ax=ax)
    assert display.cells.shape == (1024, 1024)
    assert sorted(display.cells[display.cells >= 0.5]) == [0.7, 0.8, 0.9]
    assert display.counts == (1, 2)
    assert len(display.caught) == 1
    np.testing.assert_allclose(display.missed, [[7, 1234], [700, 0]], atol=3)
    assert ax.get_xlim() == (-0.5, 2999.5)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (1, 1)])
def test_tiny_maps(ax: Any, shape: tuple[int, int]) -> None:
    HeavyMapDisplay.from_attention(np.zeros(shape), 0.5, np.zeros(shape[1], bool), ax=ax)
    assert figure_bytes(ax.figure, ".png").startswith(b"\x89PNG")


def test_maps_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"A has shape \(2, 3, 4\), expected \(m, n\)"):
        HeavyMapDisplay.from_attention(np.ones((2, 3, 4)), 0.5, [0])
    with pytest.raises(ValueError, match=r"mask of shape \(3,\), expected \(4,\)"):
        HeavyMapDisplay.from_attention(np.ones((3, 4)), 0.5, np.ones(3, bool))


# -- all displays ----------------------------------------------------------------------------------------


def test_without_axes_a_figure_is_made() -> None:
    from matplotlib import pyplot as plt

    displays: list[Any] = [
        LeverageSpectrumDisplay.from_scores([0.5, 0.5]),
        CapturedMassDisplay.from_attention(np.eye(2), orders={}),
        HeavyMapDisplay.from_attention(np.eye(2), 0.5, [0]),
    ]
    for display in displays:
        first = display.figure_
        assert display.plot() is display
        assert display.figure_ is not first  # drawn again, on new axes
    plt.close("all")


@pytest.mark.parametrize("style", ["default", "dark_background"])
@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf", ".PNG"])
def test_the_same_picture_has_the_same_bytes(style: str, suffix: str) -> None:
    def draw() -> bytes:
        with matplotlib.style.context(style):
            figure, ((ax,),) = new_figure()
            LeverageSpectrumDisplay.from_scores(np.linspace(0.1, 0.9, 20), epsilon=0.3, ax=ax)
            return figure_bytes(figure, suffix)

    assert draw() == draw()


def test_importing_the_module_does_not_import_matplotlib() -> None:
    code = "import sys, levattn.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_matplotlib_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (new_figure, LeverageSpectrumDisplay([0.5]).plot):
        with pytest.raises(ImportError, match=r'need matplotlib: pip install "levattn\[plot\]"'):
            draw()
