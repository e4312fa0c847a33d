"""Tables with one row for each layer and head of a model, to plot, or to save as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from levattn._core.files import checked_path, replace_file

if TYPE_CHECKING:
    from levattn.plots import LayerHeadDisplay


class HeadsTable:
    """Rows of figures; the figures with a label can be drawn."""

    _labels: ClassVar[dict[str, str]]

    def table(self) -> list[dict[str, Any]]:
        """Return the rows."""
        raise NotImplementedError

    def plot(self, value: str = "captured", ax: Any = None) -> LayerHeadDisplay:
        """Draw a figure of all layers and heads.

        Parameters
        ----------
        value : str
            The figure: "captured", "error", "selected" or "slots" for a report of `prune`; "captured",
            "heavy_captured", "size", "share", "largest" or "condition" for the results of `inspect_model`.
        ax : matplotlib.axes.Axes, optional
            The axes to draw on; by default new ones.

        Returns
        -------
        levattn.plots.LayerHeadDisplay
            The display, drawn. Heads without the figure (dense, or not measured) are left blank.

        Raises
        ------
        ValueError
            If `value` is not in this list.
        ImportError
            If matplotlib is not installed.
        """
        from levattn.plots import LayerHeadDisplay

        if value not in self._labels:
            raise ValueError(f"value is {value!r}; expected one of {', '.join(self._labels)}")
        return LayerHeadDisplay.from_rows(self.table(), value, label=self._labels[value], ax=ax)


class HeadsRecord(Mapping[tuple[int, int], float]):
    """A number for each (layer, head) of a model, and further facts, kept in a JSON file."""

    _format: ClassVar[tuple[str, int]]  # the kind of the file, and its version
    _oldest: ClassVar[int] = 1  # version of files that are read
    _again: ClassVar[str] = ""  # the remedy for an older file
    _table: dict[tuple[int, int], Any]

    def _facts(self) -> dict[str, Any]:
        """Return everything as plain numbers, strings, lists and dictionaries."""
        raise NotImplementedError

    @classmethod
    def _of(cls, document: dict[str, Any]) -> Self:
        """Return the record with the facts of a file, or raise."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of the file that `save` writes.

        Returns
        -------
        dict
            ``format``, ``version``, and the constructor's arguments as numbers, strings, lists and dictionaries.

        Raises
        ------
        ValueError
            If a file cannot hold an argument, such as a function of scores.
        """
        kind, version = self._format
        return {"format": f"levattn {kind}", "version": version, **self._facts()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, which appears whole or not at all.

        Parameters
        ----------
        path : path-like
            The file.

        Raises
        ------
        TypeError
            If `path` is no path.
        ValueError
            As for `to_dict`, or if `path` is empty; then nothing is written.
        OSError
            If the file cannot be written.
        """
        with replace_file(path) as stream:
            stream.write(json.dumps(self.to_dict(), indent=1, allow_nan=False).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote.

        Parameters
        ----------
        path : path-like
            The file.

        Returns
        -------
        Self
            The saved object.

        Raises
        ------
        TypeError
            If `path` is no path.
        ValueError
            If the file is of another kind, or is damaged; the message gives the reason. If `path` is empty.
        OSError
            If the file cannot be read.
        """
        (kind, newest), remedy = cls._format, f"expected a file of {cls.__name__}.save"
        file = Path(checked_path(path))
        try:
            document = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error}); {remedy}") from error
        try:
            if not isinstance(document, dict) or document.get("format") != f"levattn {kind}":
                raise ValueError(f"its format is not 'levattn {kind}'")
            version = document.get("version")
            if type(version) is not int or not cls._oldest <= version <= newest:
                reads = newest if cls._oldest == newest else f"{cls._oldest} to {newest}"
                newer = type(version) is int and version > newest
                remedy_of = ". A newer levattn made it, so update levattn" if newer else cls._again
                raise ValueError(f"it is of version {version!r}, and this release reads {reads}{remedy_of}")
            return cls._of(document)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no {kind}: {error}; {remedy}") from error


def by_head(name: str, rows: Iterable[tuple[Any, Any, Any]]) -> dict[tuple[int, int], Any]:
    """Return the third items of rows by layer and head, the first two, or raise; `name` is the argument's."""
    found: dict[tuple[int, int], Any] = {}
    for layer, head, value in rows:
        if not all(type(number) is int and number >= 0 for number in (layer, head)):
            raise ValueError(f"{name} has ({layer!r}, {head!r}), which are no numbers of a layer and a head, from 0")
        if (layer, head) in found:
            raise ValueError(f"{name} has head {head} of layer {layer}, which occurs twice; expected each head once")
        found[layer, head] = value
    return found


def is_number(value: Any, least: float = -sys.float_info.max, most: float = sys.float_info.max) -> bool:
    """Tell whether a value is a finite number of Python in a range."""
    return type(value) in (int, float) and least <= value <= most


def in_columns(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Return rows as plain text, in columns given as headings and keys of a row, with a format as in "size:.3g"."""
    fields = [column.partition(":") for column in columns.values()]
    lines = [list(columns)]
    lines += [["-" if row[key] is None else format(row[key], form) for key, _, form in fields] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)
