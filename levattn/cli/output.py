"""What every command prints with: tables, JSON, and one line for what went wrong."""

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["VACUOUS", "VACUOUS_IN_GENERAL", "check_target", "fail", "new_console", "new_table", "print_json"]

_VACUOUS = "vacuous: the bound{} is not below n, so the theorem alone does not promise that any key is left out"
VACUOUS = _VACUOUS.format(" rank/ε")
VACUOUS_IN_GENERAL = _VACUOUS.format("")
_PIPE_WIDTH = 1000


def fail(message: str) -> NoReturn:
    """End the program with status 1 and one line that says why."""
    sys.stderr.write(f"levattn: {' '.join(message.split())}\n")
    sys.exit(1)


def check_target(path: Path, remedy: str) -> None:
    """End the program if what stands at `path` is not a file that may be replaced."""
    if path.exists() and not path.is_file():
        fail(f"{path} is {'a folder' if path.is_dir() else 'not a regular file'}; {remedy}")


def new_console() -> "Console":
    """Return a console on standard output."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    # A pipe has no width: nothing is cut off there.
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_PIPE_WIDTH)


def new_table(*columns: str) -> "Table":
    """Return an empty table with these columns."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)  # thirteen columns in 80 characters
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document."""
    sys.stdout.write(json.dumps(_finite(document), allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
