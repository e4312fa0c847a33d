"""The output of every command: tables, JSON, pages of HTML, and one line for each error."""

from __future__ import annotations

import codecs
import errno
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NoReturn

import levattn
from levattn.io import replace_file
from levattn.io.common import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


# What stands for a character that a stream cannot encode; any other is shown by its number, as Python escapes it.
IN_LETTERS = {
    "ε": "epsilon",
    "κ": "kappa",
    "λ": "lambda",
    "π": "pi",
    "Σ": "sum",
    "√": "sqrt",
    "²": "^2",
    "ᵀ": "^T",
    "±": "+-",
    "×": "x",
    "·": "*",
    "−": "-",
    "≥": ">=",
    "≤": "<=",
    "∞": "inf",
    "‖": "||",
    "…": "...",
    "–": "-",
    "—": "-",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "─": "-",
}
_HANDLER = "levattn.plain"  # of errors, among the handlers of codecs


def prepare_streams() -> None:
    """Make the standard streams take every text, and take the places of closed ones.

    A closed one must have a place: otherwise the next file that is opened would get its number. Writing to a closed
    standard output stays an error, which comes with the first character. Nothing is missed on a closed standard error.
    """
    for name, mode, access in (
        ("stdin", "r", os.O_RDONLY),
        ("stdout", "w", os.O_RDONLY),
        ("stderr", "w", os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            file = os.open(os.devnull, access)
            setattr(sys, name, open(file, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 (kept open)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_HANDLER)


def encodable(text: str) -> str:
    """Return a text as standard output can show it, so that its length is known before it is laid out."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode(encoding, _HANDLER).decode(encoding)
    return text


def is_broken(stream: Any) -> bool:
    """Tell whether a stream holds text that it cannot write."""
    try:
        stream.flush()
    except (OSError, ValueError):  # ValueError: it was closed
        return True
    return False


def drop_rest(stream: Any) -> None:
    """Drop the buffered text of a stream, because Python would try to write it at exit, and change the status."""
    with suppress(OSError, ValueError):  # a stream without a number has no such end
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _plainly(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace one character by plain ones, and drop as many of the spaces that align the text after it."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text, after = error.object, error.start + 1
    plain = IN_LETTERS.get(text[error.start])
    if plain is None:
        escaped = text[error.start].encode("ascii", "backslashreplace").decode()
        return escaped, after
    spaces = len(text[after:]) - len(text[after:].lstrip(" "))
    return plain, after + max(0, min(len(plain) - 1, spaces - 2))


codecs.register_error(_HANDLER, _plainly)


# Exit status, beside 0 and 1. The last three are the status of a program that a signal ends: 128 plus its number.
WRONG_COMMAND_LINE, INTERRUPTED, CLOSED, TERMINATED = 2, 130, 141, 143


class TerminatedError(KeyboardInterrupt):
    """A signal asked the program to end, as Ctrl-C does."""


def ending_of(error: KeyboardInterrupt) -> tuple[str, int]:
    """Return the word for the signal that ended the program, and the exit status."""
    return ("terminated", TERMINATED) if isinstance(error, TerminatedError) else ("interrupted", INTERRUPTED)


_VACUOUS = "vacuous: the bound{} is not below n, so the theorem alone does not promise that any key is left out"
VACUOUS = _VACUOUS.format(" rank/ε")
VACUOUS_IN_GENERAL = _VACUOUS.format("")
_PIPE_WIDTH = 1000
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_REMEDIES = dict.fromkeys(_NO_SPACE, "no space left on the disk; free some, or write elsewhere") | {
    errno.EACCES: "no permission; choose another place or change its permissions",
    errno.EPERM: "no permission; choose another place or change its permissions",
    errno.EROFS: "no permission, as the disk is read-only; choose another place",
    errno.ENOENT: "no such file or folder; check the path",
    errno.ENOTDIR: "no such file or folder; check the path",
    errno.EISDIR: "is a folder; name a file",
    errno.EBADF: "standard output is closed; open it, as with > FILE",
}


def fail(message: str, status: int = 1) -> NoReturn:
    """End the program with a status and one line that gives the reason."""
    report(message)
    sys.exit(status)


def report(message: str) -> None:
    """Write one line on standard error, if it takes it: the exit status does not depend on that."""
    try:
        sys.stderr.write(f"levattn: {printable(' '.join(message.split()))}\n")
        sys.stderr.flush()
    except OSError:
        drop_rest(sys.stderr)


def of_system(error: OSError) -> str:
    """Return an error of the operating system as text, with the remedy."""
    if error.errno is None:
        return str(error)
    said = _REMEDIES.get(error.errno, error.strerror or str(error))
    # `replace_file` first writes to a temporary name.
    name = re.sub(r"\.([^/\\]+)\.[0-9a-f]{12}\.tmp$", r"\1", str(error.filename))
    return said if error.filename is None else f"{name}: {said}"


def check_folder(folder: Path, remedy: str) -> None:
    """End the program if no file can be made in a folder."""
    if not os.access(folder, os.W_OK):
        fail(f"{folder}: no permission to write there; {remedy}")


def check_target(path: Path, remedy: str) -> None:
    """End the program if `path` exists and is not a file that may be replaced."""
    if path.exists() and not path.is_file():
        fail(f"{path} is {'a folder' if path.is_dir() else 'not a regular file'}; {remedy}")


def check_output(path: Path | None, option: str) -> None:
    """End the program if the file that an option names, if any, cannot be written."""
    if path is None:
        return
    remedy = f"name another file with {option}"
    folder = Path(os.path.realpath(path)).parent  # the folder of the file itself, if the path is a symbolic link
    if not folder.is_dir():
        fail(f"{path}: there is no folder {folder}; make it first")
    check_target(path, remedy)
    check_folder(folder, remedy)


def new_console() -> Console:
    """Return a console on standard output."""
    from rich.console import Console

    class Output(Console):
        """A console that lets the program see a closed pipe, and lays out only characters of the output's encoding."""

        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(encodable(text), **options)

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    console = Output(highlight=False, markup=False)
    # A pipe has no width, so nothing is cut off there.
    return console if console.is_terminal else Output(highlight=False, markup=False, width=_PIPE_WIDTH)


def table_of(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> Table:
    """Return a table with columns given as headings and keys of a row, with a format as in "size:.3g"."""
    from rich import box
    from rich.table import Table

    lines = box.Box(encodable(str(box.SIMPLE_HEAD)), ascii=True)  # else rich has another box for encodings not UTF
    table = Table(box=lines, padding=0, show_edge=False)  # fits thirteen columns into 80 characters
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    fields = [column.partition(":") for column in columns.values()]
    for row in rows:
        table.add_row(*(cell(row[key], form) for key, _, form in fields))
    return table


def cell(value: Any, form: str) -> str:
    """Return a value as text for a table, by a format such as ".3g"."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format(value, form)


def print_json(schema: str, document: dict[str, Any]) -> None:
    """Print one JSON document, with the keys that docs/program.md lists under `schema`."""
    whole = {"schema": schema, "levattn": levattn.__version__} | document
    sys.stdout.write(json.dumps(_finite(whole), allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1e21; --faint: #60666e; --line: #d9dce0;
  --shade: 31 101 181 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181b; --ink: #e4e6e9; --faint: #9aa1a9; --line: #363a40; --shade: 88 160 240 }
}
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.4rem; margin: .5rem 0; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p { color: var(--faint); margin: .25rem 0 .75rem; max-width: 48rem }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: .75rem; margin: 1rem 0 }
dl div { border: 1px solid var(--line); border-radius: .4rem; padding: .4rem .7rem }
dt { color: var(--faint); font-size: .85rem }
dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
th { color: var(--faint); font-weight: normal }
.heat th { padding: 0 .35rem; font-size: .8rem; text-align: right }
.heat thead th { text-align: center }
.heat td { min-width: 1.5rem; height: 1.5rem; padding: 0; border: 1px solid var(--line) }
.heat td.none { background: repeating-linear-gradient(45deg, var(--line) 0 2px, transparent 2px 6px) }
.rows th, .rows td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid var(--line) }
.key { display: inline-block; width: 6rem; height: .8rem; vertical-align: middle; border: 1px solid var(--line);
  background: linear-gradient(to right, transparent, rgb(var(--shade))) }
.text { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: .4rem;
  padding: .7rem; color: var(--ink); line-height: 1.7 }
td[style], span[style] { background: rgb(var(--shade) / var(--v)) }
details { margin: 2rem 0 }
summary { font-size: 1.1rem; cursor: pointer }
</style>
</head>
<body>
<h1>$title</h1>
<dl>
$facts
</dl>
$sections
</body>
</html>
""")
_DARKEST = 0.6  # of the shade behind words, so that they stay legible


@dataclass(frozen=True)
class HeatMap:
    """A number for each layer and head.

    values: by (layer, head). A head without a number has None, and a missing head is left out.

    top: the number with the full color; None for the largest number.

    by_root: whether colors follow the square root, so that the others stay visible beside one large number.
    """

    title: str
    values: Mapping[tuple[int, int], float | None]
    form: str
    top: float | None = None
    by_root: bool = False

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], key: str, title: str, form: str, **options: Any) -> HeatMap:
        """Return the heat map of one column of rows that have a layer and a head."""
        return cls(title, {(row["layer"], row["head"]): row[key] for row in rows}, form, **options)

    def html(self) -> str:
        """Return the section of the page."""
        numbers = [x for x in self.values.values() if x is not None and math.isfinite(x)]
        top = self.top if self.top is not None else max(numbers, default=0.0)
        heads = sorted({head for _, head in self.values})
        lines = [f"<h2>{escape(self.title)}</h2>"]
        scale = ", colored by the square root" if self.by_root else ""
        lines.append(
            f'<p>0 <span class="key"></span> {top:{self.form}}{scale}. Point at a head to read its number.</p>'
        )
        lines.append('<div class="wide"><table class="heat">')
        lines.append("<thead><tr><th>layer \\ head</th>" + "".join(f"<th>{head}</th>" for head in heads))
        lines[-1] += "</tr></thead>\n<tbody>"
        for layer in sorted({layer for layer, _ in self.values}):
            cells = "".join(self._cell(layer, head, top) for head in heads)
            lines.append(f"<tr><th>{layer}</th>{cells}</tr>")
        return "\n".join([*lines, "</tbody></table></div>"])

    def _cell(self, layer: int, head: int, top: float) -> str:
        value = self.values.get((layer, head))
        place = f"layer {layer}, head {head}"
        if value is None or not math.isfinite(value):
            return f'<td class="none" title="{place}: -"></td>'
        share = min(max(value / top, 0.0), 1.0) if top > 0 else 0.0
        share = share**0.5 if self.by_root else share
        return f'<td style="--v:{share:.3f}" title="{place}: {value:{self.form}}"></td>'


@dataclass(frozen=True)
class KeptText:
    """A text in pieces, one for each token, and for each the number of cut heads that keep it."""

    pieces: Sequence[str]
    kept: Sequence[int]
    heads: int

    def html(self) -> str:
        """Return the section of the page; consecutive tokens with the same number are one piece."""
        most = max(self.kept, default=0)
        lines = [
            "<h2>Tokens that the cut heads keep</h2>",
            f'<p>0 <span class="key"></span> {most}: number of the {self.heads} cut heads that keep a token itself, '
            "colored by the square root; the other heads read it in a summary. Point at the text to read the "
            "number.</p>",
        ]
        spans = []
        place = 0
        for count, run in groupby(zip(self.kept, self.pieces, strict=True), key=lambda pair: pair[0]):
            words = [piece for _, piece in run]
            last = place + len(words) - 1
            where = f"token {place}" if last == place else f"tokens {place} to {last}"
            shade = _DARKEST * (count / most) ** 0.5 if most else 0.0
            title = f"{where}: kept by {count} of {self.heads} cut heads"
            spans.append(f'<span style="--v:{shade:.3f}" title="{title}">{escape("".join(words))}</span>')
            place = last + 1
        return "\n".join([*lines, f'<div class="text">{"".join(spans)}</div>'])


def write_page(
    path: Path,
    title: str,
    facts: Mapping[str, str],
    maps: Sequence[HeatMap],
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    text: KeptText | None = None,
) -> None:
    """Write a page, whole or not at all: facts, heat maps, a text, and a table with the columns of `table_of`."""
    shown = "\n".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    sections = [heat.html() for heat in maps]
    if text is not None:
        sections.append(text.html())
    sections.append(_table(rows, columns))
    page = _PAGE.substitute(title=escape(title), facts=shown, sections="\n".join(sections))
    with replace_file(path) as stream:
        stream.write(page.encode("utf-8", "replace"))


def _table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    fields = [column.partition(":") for column in columns.values()]
    lines = ["<details><summary>All numbers</summary>", '<div class="wide"><table class="rows">']
    lines.append("<thead><tr>" + "".join(f"<th>{escape(name)}</th>" for name in columns) + "</tr></thead>\n<tbody>")
    lines += [
        "<tr>" + "".join(f"<td>{escape(cell(row[key], form))}</td>" for key, _, form in fields) + "</tr>"
        for row in rows
    ]
    return "\n".join([*lines, "</tbody></table></div>", "</details>"])
