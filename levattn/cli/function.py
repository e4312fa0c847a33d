"""Attention functions as text: the values of ``--function``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import levattn
from levattn._core.checks import positive_number
from levattn.functions import FAMILIES, is_square

__all__ = ["ALLOWED", "Function", "parse_function"]

ALLOWED = "a number p for |x|^p, huber[:delta], tukey[:c], l1l2, fair[:c] or softmax:radius (softmax with --queries)"
_BY_NAME: dict[str, Callable[..., Any]] = {
    **{name.lower(): family for name, family in FAMILIES.items() if name != "Power"},
    "softmax": levattn.Softmax,
}


@dataclass(frozen=True)
class Function:
    """An attention function and the text that named it."""

    text: str
    f: Any

    @property
    def is_square(self) -> bool:
        """Whether f is x², whose scores are leverage scores."""
        return self.f == 2 or is_square(self.f)


def parse_function(text: str, *, for_queries: bool = False) -> Function:
    """Return the function that `text` names; a wrong text is an error of the command line.

    for_queries: whether the set is for queries like given ones. Then softmax needs no radius.
    """
    import typer

    name, colon, parameter = text.partition(":")
    try:
        if name not in _BY_NAME:
            return Function(text, _number(text, "there is no such function"))
        if colon and name == "l1l2":
            raise ValueError("l1l2 takes no number")
        if not colon and name == "softmax" and not for_queries:
            raise ValueError(
                "softmax needs the largest norm of a query, as in softmax:4, or a sample of the queries with --queries"
            )
        return Function(
            text, _BY_NAME[name](*([_number(parameter, f"{parameter!r} is not a number")] if colon else []))
        )
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}. Allowed are {ALLOWED}", param_hint="--function") from None


def _number(text: str, otherwise: str) -> float:
    """Return the number in `text`; if there is none, raise an error with the text `otherwise`."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError(otherwise) from None
    return positive_number("the number", number)
