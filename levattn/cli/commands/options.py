"""Options that several commands have."""

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["RESULTS", "AsJson", "by_library", "check_picture", "ends_in"]

RESULTS = "Results"
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        rich_help_panel=RESULTS,
        help="Print one JSON document instead of the table; docs/program.md lists its keys.",
    ),
]


def by_library(name: str) -> Any:
    """Return a check of an option, if it is given: the library's own of that name."""

    def check(value: float | None) -> float | None:
        from levattn.sensitivity import groups, leverage

        checks = {"epsilon": leverage.check_epsilon, "angle": groups.check_angle}
        try:
            return None if value is None else checks[name](value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return check


def ends_in(*suffixes: str) -> Any:
    """Return a check that a file, if named, has one of these suffixes."""

    def check(path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() not in suffixes:
            raise typer.BadParameter(f"{path} ends in {path.suffix!r}, expected {' or '.join(suffixes)}")
        return path

    return check


check_picture = ends_in(".png", ".svg", ".pdf")
