"""Attention functions as text: the values of ``--function``."""

from dataclasses import dataclass

from levattn.functions import NAMES, AttentionFunction, Softmax, function_named, is_square

ALLOWED = f"{NAMES} (without a radius only with --queries)"


@dataclass(frozen=True)
class Function:
    """An attention function and the text that named it."""

    text: str
    f: AttentionFunction | Softmax

    @property
    def is_square(self) -> bool:
        """Whether f is x², whose scores are leverage scores."""
        return is_square(self.f)


def parse_function(text: str, *, for_queries: bool = False) -> Function:
    """Return the function that `text` names; a wrong text is an error of the command line.

    for_queries: whether the set is for queries like given ones. Then softmax needs no radius.
    """
    import typer

    try:
        if text == "softmax" and not for_queries:
            raise ValueError(
                "softmax needs the largest norm of a query, as in softmax:4, or a sample of the queries with --queries"
            )
        return Function(text, function_named(text))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}. Allowed are {ALLOWED}", param_hint="--function") from None
