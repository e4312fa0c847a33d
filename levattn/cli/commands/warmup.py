"""The command line of ``levattn warmup``."""

import sys

import typer

import levattn
from levattn.cli.output import report
from levattn.cli.program import Command

_HELP = """\
Compile all kernels now, so that no later call does.

Use it once after installation, or while you build an image. Without it, the first call of each kernel compiles it,
which takes seconds. The code stays on disk, for this Python, this processor and this version: see NUMBA_CACHE_DIR in
the documentation of the program. The command takes some minutes, or some seconds if all code is there.

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
