"""The ``levattn`` program: universal sets of keys in files and models, and a demonstration on a real encoder.

Results go to standard output, as tables or (``--json``) as one JSON document. Everything else goes to standard error,
an error as one line. Exit status: 0 done, 1 the data or the machine did not allow it, 2 the command line is wrong.
A signal ended it: 130 interrupted, 141 the reader of standard output closed it, 143 terminated.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

__all__ = ["build_app", "main"]

_INSTALL = 'pip install "levattn[cli]"'


def main() -> None:
    """Run the program."""
    try:
        app = build_app()
    except ModuleNotFoundError as error:
        sys.exit(f"levattn: the program needs {error.name}, which is not installed: {_INSTALL}")
    except KeyboardInterrupt:  # before the program is there, which catches it later
        print("levattn: interrupted", file=sys.stderr)
        sys.exit(130)
    app(prog_name="levattn")


def build_app() -> "typer.Typer":
    """Return the program as a typer application.

    Returns
    -------
    typer.Typer
        The application.
    """
    import rich  # noqa: F401 (so that a missing package shows here, not half-way)
    import typer  # noqa: F401

    from levattn.cli.commands import add_commands
    from levattn.cli.program import new_app

    app = new_app()
    add_commands(app)
    return app
