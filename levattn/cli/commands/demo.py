"""The command lines of ``levattn demo``, ``completion`` and ``warmup``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

import levattn
from levattn.cli.commands.options import RESULTS, AsJson, HeavyFrom
from levattn.cli.demo import run_demo
from levattn.cli.output import fail, report
from levattn.cli.program import Command

_HELP = """\
Try it: universal sets of the 72 heads of a real encoder.

Use it to see the sets and check their guarantee, without data of your own. The queries and keys of
all-MiniLM-L6-v2 on a text of 512 tokens come with the package. The demo compares the set of each head with brute force
over every attention score. It makes a second set from half of the queries of the text, and tries it on the others. It
writes two files with the same four pictures, and takes ten seconds to a minute.

\b
Examples:
  levattn demo
  levattn demo --epsilon 0.05 --out pictures
"""
_EPILOG = """\
\b
Output, one row for each head:
  layer, head  numbers of the layer and of its head, from 0
  n, d         keys of the head, and their columns
  rank, cond   numerical rank and condition number of the keys
  |U|          keys in the universal set for f(x) = x² at ε
  bound        the most keys that the set can have: rank/ε
  vacuous      yes: the bound is not below n
  worst        scores of at least ε of 512 worst-case queries, one per key
  missed       scores of at least ε on keys outside the set, for these and
               for the 512 queries of the text: always 0
  softmax      mean share of the softmax attention that falls on the set
  |C|          keys in the set with coverage 0.9 for softmax at ε, made from
               every second query of the text
  found        share of the other queries that found all their keys in it

Five sentences summarize the heads. If a score was missed, the status is 1.
"""


def add(app: typer.Typer) -> None:
    """Add the command to the program."""

    @app.command(cls=Command, help=_HELP, epilog=_EPILOG)
    def demo(
        epsilon: HeavyFrom = 0.1,
        out: Annotated[
            Path,
            typer.Option(
                rich_help_panel=RESULTS, help="Folder for demo.png and demo.svg, made if missing. They are replaced."
            ),
        ] = Path("levattn-demo"),
        as_json: AsJson = False,
    ) -> None:
        run_demo(epsilon, out, as_json)


_Shell = Annotated[Literal["bash", "zsh", "fish", "powershell"], typer.Argument(help="The shell.")]

_COMPLETION_HELP = """\
Print the script that completes levattn in your shell.

It completes commands, options and their choices, and file names. The command only prints the script: save it once
where your shell looks for it, and open a new shell.

\b
Examples:
  levattn completion bash > ~/.local/share/bash-completion/completions/levattn
  levattn completion zsh > ~/.zfunc/_levattn
  levattn completion fish > ~/.config/fish/completions/levattn.fish
  levattn completion powershell >> $PROFILE

The folder must exist. bash needs the package bash-completion, and zsh must look for functions in that folder.
Otherwise, add these lines to ~/.bashrc and ~/.zshrc:

\b
  source <(levattn completion bash)
  fpath+=~/.zfunc; autoload -Uz compinit; compinit
"""


def add_completion(app: typer.Typer) -> None:
    """Add the command to the program."""

    @app.command(cls=Command, help=_COMPLETION_HELP)
    def completion(shell: _Shell) -> None:
        typer.echo(get_completion_script(prog_name="levattn", complete_var="_LEVATTN_COMPLETE", shell=shell))


_WARMUP_HELP = """\
Compile all kernels now, so that no later call does.

Use it once after installation, or while you build an image. Without it, the first call of each kernel compiles it,
which takes seconds. The code stays on disk, for this Python, this processor and this version: see NUMBA_CACHE_DIR in
the documentation of the program. The command takes some minutes, 10 to 40 seconds for one use, or some seconds if all
code is there. The uses are scores, sets, heavy, streams, sketches, latte, tssa and pruned.

\b
Examples:
  levattn warmup
  levattn warmup sets heavy
"""


def add_warmup(app: typer.Typer) -> None:
    """Add the command to the program."""

    @app.command(cls=Command, help=_WARMUP_HELP)
    def warmup(
        uses: Annotated[
            list[str] | None,
            typer.Argument(metavar="[USE]...", help="What you are going to use; all if left out.", show_default=False),
        ] = None,
    ) -> None:
        from levattn.warming import check_uses

        try:
            check_uses(uses or ())
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        with warnings.catch_warnings():
            warnings.simplefilter("error", levattn.CacheWarning)  # the code would be lost with this process
            try:
                levattn.warmup(*(uses or ()), progress=sys.stderr.isatty())
            except levattn.CacheWarning as warning:
                fail(str(warning))
        report("the kernels are compiled")
