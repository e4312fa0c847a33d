"""The command line of ``levattn warmup``."""

import sys

import typer

import levattn
from levattn.cli.output import report
from levattn.cli.program import Command

__all__ = ["add"]

_HELP = """\
Compile all kernels now, so that no later call does.

Use it once after installing, or where an image is built. Without it each kernel is compiled at its first call, which
takes seconds. The code is kept on disk, for this Python, this processor and this version: see NUMBA_CACHE_DIR in the
documentation of the program. It takes some minutes, and some seconds where all is there.

\b
Examples:
  levattn warmup
"""


def add(app: typer.Typer) -> None:
    """Add the command to the program."""

    @app.command(cls=Command, help=_HELP)
    def warmup() -> None:
        levattn.warmup(progress=sys.stderr.isatty())
        report("the kernels are compiled")
