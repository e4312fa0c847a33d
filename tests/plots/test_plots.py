"""Pictures, judged by what was drawn: lines, labels and marks of the axes, not pixels."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import style as style_sheets  # noqa: E402
from matplotlib.collections import LineCollection, PathCollection, PolyCollection  # noqa: E402
from matplotlib.colors import to_hex, to_rgb  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from levattn import StreamingUniversalSet, universal_set  # noqa: E402
from levattn.plots import (  # noqa: E402
    CapturedMassDisplay,
    HeavyMapDisplay,
    LayerHeadDisplay,
    LeverageSpectrumDisplay,
    TokenStripDisplay,
)

Array = npt.NDArray[Any]


def new_axes() -> Any:
    return Figure(layout="constrained").subplots()


def is_drawn(figure: Any) -> bool:
    picture = io.BytesIO()
    figure.savefig(picture)
    return picture.getvalue().startswith(b"\x89PNG")


@pytest.fixture
def ax() -> Any:
    return new_axes()


def lines(ax: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in ax.lines}


def legend(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def random(*shape: int) -> Array:
    return np.random.default_rng(3).standard_normal(shape)


def contrast(color: Any, other: Any) -> float:
    """The contrast ratio of WCAG 2."""
    light = [
        sum(
            w * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
            for w, c in zip((0.2126, 0.7152, 0.0722), to_rgb(given), strict=True)
        )
        for given in (color, other)
    ]
    return (max(light) + 0.05) / (min(light) + 0.05)


def drawn_by(ax: Any, kind: type) -> list[Any]:
    return [artist for artist in ax.collections if type(artist) is kind]


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


@pytest.mark.parametrize(
    ("scores", "options", "drawn"),
    [
        ([[0.5, 0.3], [0.2, 0.1]], {"epsilon": 0.3, "sizes": [1, 0]}, ["ε = 0.3: |U| = 0 to 1, median 0.5"]),
        ([0.0, 0.5, 1.0], {"rank": 3, "sizes": 2}, ["leverage scores", "|U| = 2"]),
        ([0.1 - 1e-12, 0.1, 0.0999], {"epsilon": 0.1}, ["leverage scores", "ε = 0.1: |U| = 2"]),
        (
            [0.5, 0.2, 0.1, 0.1],
            {"epsilon": 0.2, "rank": 0.5, "certified": True},
            ["certified bounds", "ε = 0.2: |U| = 2", "bound = 2.5"],
        ),
        (
            [0.5, 0.2],
            {"epsilon": 0.2, "rank": np.inf, "certified": True},  # an infinite bound is not drawn
            ["certified bounds", "ε = 0.2: |U| = 2"],
        ),
    ],
    ids=["given sizes", "selection by size", "ties are inside", "certified bounds", "infinite bound"],
)
def test_legends_of_spectra(ax: Any, scores: Any, options: dict[str, Any], drawn: list[str]) -> None:
    display = LeverageSpectrumDisplay.from_scores(scores, **options, ax=ax)
    assert legend(ax)[-len(drawn) :] == drawn
    assert len(legend(ax)) == len(drawn) + 2 * (np.ndim(scores) - 1)
    assert ax.get_ylabel() == ("certified bound" if display.certified else "leverage score")
    assert (display.size_bound == np.inf) == (options.get("rank") == np.inf)
    if "epsilon" not in options:
        assert lines(ax)["|U| = 2"].get_xdata()[0] == 2
    assert is_drawn(ax.figure)


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
    assert is_drawn(ax.figure)


# -- captured mass ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 0), (0, 5)])
def test_a_spectrum_of_no_items_has_no_legend(shape: tuple[int, int]) -> None:
    """Matplotlib warns of a legend without entries."""
    assert LeverageSpectrumDisplay.from_scores(np.zeros(shape)).ax_.get_legend() is None


def test_a_set_of_a_stream_has_no_spectrum() -> None:
    state = StreamingUniversalSet(0.1)
    state.update(np.eye(4))
    with pytest.raises(TypeError, match=r"universal is a StreamedSet.*from_scores"):
        LeverageSpectrumDisplay.from_set(state.result())


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
    given = CapturedMassDisplay.from_attention(A[0], orders={"random": order[0]}, ax=ax).curves["random"]
    np.testing.assert_allclose(given, A[0].mean(axis=0).cumsum())


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 2, 3), (2, 0, 3), (1, 1)])
def test_tiny_curves(ax: Any, shape: tuple[int, ...]) -> None:
    order = np.broadcast_to(np.arange(shape[-1]), (*shape[:-2], shape[-1]))
    display = CapturedMassDisplay.from_attention(np.ones(shape), orders={"a": order}, ax=ax)
    for curve in display.curves.values():
        np.testing.assert_array_equal(curve, np.zeros(shape[-1]) if 0 in shape else [1.0])
    assert is_drawn(ax.figure)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_displays_take_tensors(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    A = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=getattr(torch, dtype), requires_grad=True)
    curves = CapturedMassDisplay.from_attention(A, orders={"a": torch.tensor([1, 0])}, ax=new_axes()).curves
    assert curves["a"].tolist() == [0.375, 1.0]
    assert HeavyMapDisplay.from_attention(A, 0.5, torch.tensor([0]), ax=new_axes()).counts == (2, 1)
    assert LayerHeadDisplay.from_values(A, label="", ax=new_axes()).values.tolist() == A.tolist()


def test_each_curve_has_a_style_of_its_own(ax: Any) -> None:
    A = np.full((4, 6), 1 / 6)
    CapturedMassDisplay.from_attention(A, orders={name: np.arange(6) for name in "abcd"}, ax=ax)
    assert len({to_hex(line.get_color()) for line in ax.lines}) == 6
    assert len({str(line._dash_pattern) for line in ax.lines}) == 6


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
    A = (Q @ K.T) ** 2
    A /= A.sum(axis=1, keepdims=True)
    chosen = universal_set(K, 0.15)
    counts = {
        HeavyMapDisplay.from_attention(A, 0.15, given, ax=new_axes()).counts
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
    assert display.caught.tolist() == [[1498, 2997]]  # where its cell starts
    np.testing.assert_allclose(display.missed, [[7, 1234], [700, 0]], atol=3)
    assert ax.get_xlim() == (-0.5, 2999.5)


def test_entries_of_a_cell_are_marked_once_and_all_counted(ax: Any) -> None:
    A = np.zeros((2, 4096))
    A[0, :4], A[1, 4000] = 0.25, 0.9
    display = HeavyMapDisplay.from_attention(A, 0.25, [0, 1], ax=ax)
    assert display.counts == (2, 3)
    assert display.caught.tolist() == [[0, 0]]
    assert display.missed.tolist() == [[0, 0], [1, 4000]]


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (1, 1)])
def test_tiny_maps(ax: Any, shape: tuple[int, int]) -> None:
    HeavyMapDisplay.from_attention(np.zeros(shape), 0.5, np.zeros(shape[1], bool), ax=ax)
    assert is_drawn(ax.figure)


# -- layers and heads ------------------------------------------------------------------------------------


def test_heads_without_a_number_are_hatched(ax: Any) -> None:
    rows = [{"layer": 3, "head": 1, "mass": 0.5}, {"layer": 7, "head": 0, "mass": None}]
    display = LayerHeadDisplay.from_rows(rows, "mass", label="captured mass", ax=ax)
    np.testing.assert_array_equal(display.values, [[np.nan, 0.5], [np.nan, np.nan]])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["3", "7"]
    assert ax.patch.get_hatch() == "////"
    full = new_axes()
    LayerHeadDisplay.from_values(np.ones((2, 2)), label="captured mass", ax=full)
    assert full.patch.get_hatch() is None


# -- tokens ----------------------------------------------------------------------------------------------


def test_tokens_are_shaded_by_their_scores_and_marked_without_color(ax: Any) -> None:
    tokens, scores = ["heavy", "at", "##tention", "$x_1^2$", "it"], [0.1, 0.2, 0.8, 0.3, 0.0]
    display = TokenStripDisplay.from_scores(tokens, scores, kept=[2, 3], columns=20, ax=ax)
    assert display.lines == ["heavy attention", "$x_1^2$ it"]
    assert display.kept is not None
    assert display.kept.tolist() == [False, False, True, True, False]
    (boxes,) = drawn_by(ax, PolyCollection)
    np.testing.assert_array_equal(boxes.get_array(), scores)
    assert boxes.get_clim() == (0.0, 0.8)
    sides = [path.vertices[:, 0].round().tolist() for path in boxes.get_paths()]
    assert [(min(x), max(x)) for x in sides] == [(0, 5), (6, 8), (8, 15), (0, 7), (8, 10)]
    (lines,) = drawn_by(ax, LineCollection)
    assert [(line[0][0].round(), line[1][0].round(), int(line[0][1])) for line in lines.get_segments()] == [
        (8, 15, 0),
        (0, 7, 1),
    ]
    assert is_drawn(ax.figure)
    labels = [axes.get_xlabel() for axes in ax.figure.axes]
    assert "score (bold, underlined: kept, 2 of 5)" in labels


@pytest.mark.parametrize(
    ("scores", "limits"),
    [
        ([-0.01, -0.002, -0.001], (-0.01, -0.001)),
        ([-0.5, 0.25], (-0.5, 0.25)),
        ([0.2, 0.5], (0.0, 0.5)),
        ([0.0, 0.0], (0.0, 1.0)),
        ([-2.0], (-2.0, 1.0)),
        ([], (0.0, 1.0)),
    ],
)
def test_shades_end_at_the_largest_score(ax: Any, scores: list[float], limits: tuple[float, float]) -> None:
    TokenStripDisplay.from_scores(["a"] * len(scores), scores, ax=ax)
    (boxes,) = drawn_by(ax, PolyCollection)
    assert boxes.get_clim() == limits


def test_each_letter_is_drawn_in_its_column(ax: Any) -> None:
    TokenStripDisplay.from_scores(["ab", "##a", "b"], [0.1, 0.2, 0.3], kept=[2], ax=ax)
    places = [sorted(letter.get_offsets()[:, 0].tolist()) for letter in drawn_by(ax, PathCollection)]
    assert places == [[0, 2], [1], [4]]  # a, b, and the bold b


@pytest.mark.parametrize(
    ("tokens", "columns", "lines"),
    [
        (["The", "Ġun", "aff", "ord", "Ġit"], 90, ["The unafford it"]),
        (["▁Das", "▁ist", "##", "s"], 90, ["Das ist##s"]),
        (["a", "ĠĠb", "Ġ", "c"], 90, ["a  b  c"]),
        (["one", "two", "##s", "three"], 9, ["one twos", "three"]),
        (["one", "un", "##break", "##able"], 9, ["one un", "breakable"]),
        (["abcdefgh"], 3, ["abc", "def", "gh"]),
        (["\t", "a\nb", "", "\x00", "\u00a0"], 90, ["\\t a\\nb   \\x00  "]),
        (["##", "###x", "$", "\\frac"], 90, ["###x $ \\frac"]),
        (["日本", "語"], 4, ["日本", "語"]),
        ([], 90, []),
    ],
)
def test_texts_are_wrapped(tokens: list[str], columns: int, lines: list[str]) -> None:
    assert TokenStripDisplay(tokens, np.zeros(len(tokens)), columns=columns).lines == lines


@pytest.mark.filterwarnings("ignore:Glyph .* missing:UserWarning")
@pytest.mark.parametrize("style", ["default", "dark_background"])
def test_any_text_is_drawn(style: str) -> None:
    tokens = ["$", "$$", "_x^", "\\frac{", "\t", "\n", "", "日本", "שלום", "é", "e\u0301", "\ud800", "🙂", " "]
    with style_sheets.context(style):
        ax = new_axes()
        TokenStripDisplay.from_scores(tokens, np.zeros(len(tokens)), kept=np.ones(len(tokens), bool), ax=ax)
        assert is_drawn(ax.figure)
    assert len(drawn_by(ax, PathCollection)) > 20


@pytest.mark.parametrize("style", ["default", "dark_background"])
def test_letters_and_marks_can_be_read(style: str) -> None:
    scores = np.linspace(0, 1, 300)
    with style_sheets.context(style):
        ax = new_axes()
        TokenStripDisplay.from_scores(["x"] * 300, scores, kept=[299], ax=ax)
        (boxes,) = drawn_by(ax, PolyCollection)
        plain, bold = drawn_by(ax, PathCollection)
        inks = [*plain.get_facecolors(), *bold.get_facecolors()]
        shades = boxes.to_rgba(boxes.get_array())
        assert min(contrast(ink[:3], shade[:3]) for ink, shade in zip(inks, shades, strict=True)) >= 4.5
        (line,) = drawn_by(ax, LineCollection)
        assert contrast(line.get_colors()[0][:3], ax.figure.get_facecolor()[:3]) > 20


def test_a_new_figure_is_as_high_as_the_text() -> None:
    from matplotlib import pyplot as plt

    few, many = (TokenStripDisplay.from_scores(["word"] * n, np.ones(n)) for n in (100, 1000))
    sizes = [display.figure_.get_size_inches() for display in (few, many)]
    assert sizes[0][0] == sizes[1][0]
    letters = []
    for display in (few, many):
        display.figure_.canvas.draw()
        letters.append(display.ax_.bbox.width / np.ptp(display.ax_.get_xlim()))
        assert display.ax_.get_ylim()[0] >= len(display.lines)
    assert letters[0] == pytest.approx(letters[1], rel=0.05)
    with pytest.raises(ValueError, match=r"the text has 1001 lines, expected at most 1000"):
        TokenStripDisplay(["word"] * 1001, np.ones(1001), columns=4).plot()
    plt.close("all")


def test_text_shrinks_to_given_axes_until_it_cannot_be_read(ax: Any) -> None:
    TokenStripDisplay.from_scores(["word"] * 400, np.ones(400), ax=ax)
    assert ax.get_ylim()[0] >= 23
    assert ax.get_xlim()[1] >= 90
    with pytest.raises(ValueError, match=r"letters of [0-3]\.\d points, expected at least 4"):
        TokenStripDisplay.from_scores(["word"] * 4000, np.ones(4000), ax=new_axes())


def strip(tokens: Any = ("a", "b"), scores: Any = (0.1, 0.2), **options: Any) -> Any:
    return TokenStripDisplay(tokens, scores, **options)


ORDERS, MAP = CapturedMassDisplay.from_attention, HeavyMapDisplay.from_attention
UNFIT: list[tuple[Any, str]] = [
    (
        lambda: ORDERS(np.ones((2, 4, 3)), orders={"a": np.arange(3)}),
        r"orders\['a'\] has shape \(3,\), expected \(2, 3\)",
    ),
    (lambda: ORDERS(np.ones(3), orders={}), r"A has shape \(3,\), expected \(\.\.\., m, n\)"),
    (lambda: ORDERS(np.ones((4, 3)), orders={"a": [0, 1, 1]}), r"orders\['a'\] does not have each key once"),
    (lambda: ORDERS(np.ones((4, 3)), orders={"a": [0, 1, -1]}), r"does not have each key once.* 0, \.\.\., 2"),
    (lambda: ORDERS(np.ones((4, 3)), orders={"a": [1, 2, 3]}), r"orders\['a'\] does not have each key once"),
    (lambda: ORDERS(np.ones((4, 3)), orders={"a": [0.0, 1.0, 2.0]}), r"TypeError: orders\['a'\] has dtype float64"),
    (lambda: ORDERS([["a"]], orders={}), r"TypeError: A has dtype <U1; expected real numbers"),
    (lambda: MAP(np.ones((3, 4)), 0.0, [0]), r"epsilon is 0\.0; expected 0 < epsilon <= 1"),
    (lambda: MAP(np.ones((3, 4)), np.nan, [0]), r"epsilon is nan; expected 0 < epsilon <= 1"),
    (lambda: MAP(np.ones((3, 4)), "a", [0]), r"TypeError: epsilon is 'a'; expected a real number"),
    (
        lambda: LeverageSpectrumDisplay([0.5], epsilon=0.0, rank=1),
        r"epsilon is 0\.0; expected a finite number above 0",
    ),
    (lambda: LeverageSpectrumDisplay([0.5], epsilon="a"), r"TypeError: epsilon is 'a'; expected a finite number"),
    (lambda: MAP(np.ones((2, 3, 4)), 0.5, [0]), r"A has shape \(2, 3, 4\), expected \(m, n\)"),
    (lambda: MAP(np.ones((3, 4)), 0.5, np.ones(3, bool)), r"universal has a mask of shape \(3,\), expected \(4,\)"),
    (lambda: MAP(np.ones((3, 4)), 0.5, [-1]), r"universal has indices outside 0, \.\.\., 3"),
    (lambda: LayerHeadDisplay(np.ones(3), label="mass"), r"values has shape \(3,\), expected \(layers, heads\)"),
    (lambda: LayerHeadDisplay(np.ones((2, 4)), label="", layers=[1]), r"layers has shape \(1,\), expected \(2,\)"),
    (lambda: strip(scores=[0.1]), r"scores has shape \(1,\), expected \(2,\), one for each token"),
    (lambda: strip(scores=[[0.1, 0.2]]), r"scores has shape \(1, 2\), expected \(2,\)"),
    (lambda: strip(scores=[0.1, np.nan]), r"scores is not finite at \[1\]"),
    (lambda: strip(scores=[np.inf, 0.1]), r"scores is not finite at \[0\]"),
    (lambda: strip(scores=[1e308, -1e308]), r"scores has a number of size 1e\+308; expected at most 1e\+307"),
    (lambda: LayerHeadDisplay([[0.0, -1e308, np.nan]], label=""), r"values has a number of size 1e\+308"),
    (lambda: strip("ab"), r"TypeError: tokens is a single string"),
    (lambda: strip(["a", 7]), r"TypeError: tokens\[1\] is 7; expected a string"),
    (lambda: strip(kept=[True]), r"kept has a mask of shape \(1,\), expected \(2,\)"),
    (lambda: strip(kept=[2]), r"kept has indices outside 0, \.\.\., 1"),
    (lambda: strip(kept=[1.7]), r"kept has dtype float64, expected a mask \(2,\) of bool"),
    (lambda: strip(kept=[0, 1, 0]), r"repeated indices.* a mask of 0 and 1 to bool"),
    (lambda: strip(columns=1), r"columns is 1; expected at least 2"),
    (lambda: strip(columns=9.5), r"TypeError: columns is 9\.5; expected a whole number"),
]


@pytest.mark.parametrize(("make", "message"), UNFIT, ids=[message for _, message in UNFIT])
def test_what_does_not_fit_is_refused(make: Any, message: str) -> None:
    kind = TypeError if message.startswith("TypeError") else ValueError
    with pytest.raises(kind, match=message.removeprefix("TypeError: ")):
        make()


# -- all displays ----------------------------------------------------------------------------------------


def all_displays(**options: Any) -> list[Any]:
    """One of each; ``ax`` is a function that makes axes."""
    ax = options.get("ax", lambda: None)
    A = np.full((2, 3), 1 / 3)
    return [
        LeverageSpectrumDisplay.from_scores(np.linspace(0.1, 0.9, 20).reshape(2, 10), epsilon=0.3, rank=2, ax=ax()),
        CapturedMassDisplay.from_attention(A, orders={name: np.arange(3) for name in "abcd"}, size=2, ax=ax()),
        HeavyMapDisplay.from_attention(A, 0.3, [0], ax=ax()),
        LayerHeadDisplay.from_values([[0.5, np.nan]], label="captured mass", ax=ax()),
        TokenStripDisplay.from_scores(["a", "##b"], [0.1, 0.9], kept=[1], ax=ax()),
    ]


def test_without_axes_a_figure_is_made() -> None:
    from matplotlib import pyplot as plt

    for display in all_displays():
        first = display.figure_
        assert display.plot() is display
        assert display.figure_ is not first  # drawn again, on new axes
        assert display.ax_.figure is display.figure_
    plt.close("all")


@pytest.mark.parametrize("background", ["white", "black"])
def test_lines_and_marks_stand_out_from_light_and_dark(background: str) -> None:
    displays = all_displays(ax=new_axes)
    curves = [line for display in displays for line in display.ax_.lines]
    assert len(curves) == 10
    colors = {to_hex(line.get_color()) for line in curves}
    band = displays[0].ax_.collections[0]
    colors |= {to_hex(band.get_edgecolor()[0]), to_hex(displays[3].ax_.patch.get_edgecolor())}
    assert {color: contrast(color, background) for color in colors if contrast(color, background) < 3} == {}


def test_the_marks_of_a_map_stand_out_from_all_cells_and_differ_without_color(ax: Any) -> None:
    HeavyMapDisplay.from_attention(np.full((2, 3), 1 / 3), 0.3, [0], ax=ax)
    dark, bright = (ax.images[0].cmap(end)[:3] for end in (0.0, 1.0))
    caught, missed = ax.collections[:2]
    for marks in (caught, missed):
        assert contrast(marks.get_facecolor()[0][:3], bright) > 2.5
        assert contrast(marks.get_edgecolor()[0][:3], dark) > 10
    assert len(caught.get_paths()[0]) != len(missed.get_paths()[0])


def test_importing_the_module_does_not_import_matplotlib() -> None:
    code = "import sys, levattn.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_matplotlib_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'need matplotlib: pip install "levattn\[plot\]"'):
        LeverageSpectrumDisplay([0.5]).plot()


def test_a_spectrum_takes_tensors_and_refuses_what_it_cannot_draw() -> None:
    torch = pytest.importorskip("torch")
    scores = torch.tensor([0.5, 0.25, 1.0], dtype=torch.bfloat16, requires_grad=True)
    np.testing.assert_array_equal(LeverageSpectrumDisplay(scores).scores, [[1.0, 0.5, 0.25]])
    for wrong in (np.nan, np.inf, -0.5):
        with pytest.raises(ValueError, match=rf"scores\[1\] is {wrong}; expected finite numbers of at least 0"):
            LeverageSpectrumDisplay.from_scores([0.1, wrong])
    with pytest.raises(TypeError, match="scores has dtype"):
        LeverageSpectrumDisplay(["a"])
