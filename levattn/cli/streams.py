"""The standard streams: of any encoding, closed, or at an end that takes nothing more."""

import codecs
import os
import sys
from contextlib import suppress
from typing import Any

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
