"""Options that several commands have."""

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["RESULTS", "AsJson", "check_epsilon", "check_picture", "ends_in"]

RESULTS = "Results"
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        rich_help_panel=RESULTS,
        help="Print one JSON document instead of the table; docs/program.md lists its keys.",
    ),
]


def check_epsilon(epsilon: float | None) -> float | None:
    """Return ε, or refuse it."""
    if epsilon is not None and not 0 < epsilon <= 1:
        raise typer.BadParameter(f"epsilon is {epsilon}, expected a number in (0, 1]")
    return epsilon


def ends_in(*suffixes: str) -> Any:
    """Return a check that a file, if named, has one of these suffixes."""

    def check(path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() not in suffixes:
            raise typer.BadParameter(f"{path} ends in {path.suffix!r}, expected {' or '.join(suffixes)}")
        return path

    return check


check_picture = ends_in(".png", ".svg", ".pdf")
