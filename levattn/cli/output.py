"""The output of every command: tables, JSON, and one line for each error."""

from __future__ import annotations

import codecs
import errno
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import levattn
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


# Exit status, beside 0 and 1. The last two are the status of a program that a signal ends: 128 plus its number.
WRONG_COMMAND_LINE, INTERRUPTED, CLOSED = 2, 130, 141

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
