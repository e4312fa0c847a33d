"""A text of tokens, shaded by their scores."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from levattn._core.checks import whole_number
from levattn._core.types import Flags, Float64
from levattn.plots.common import COLORS, Display, mask_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.path import Path
    from matplotlib.transforms import Affine2DBase

    from levattn.sets.result import UniversalSet

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
        If `scores` or `kept` do not match the tokens, a score is not finite, or `columns` is below 2. Also by `plot`,
        if there are more than 1000 lines for a new figure, or too many for letters of 4 points on `ax`.

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
        kept: UniversalSet | npt.ArrayLike | None = None,
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
        kept: UniversalSet | npt.ArrayLike | None = None,
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
