"""The command line of ``levattn demo``."""

from pathlib import Path
from typing import Annotated

import typer

from levattn.cli.commands.options import RESULTS, AsJson, HeavyFrom
from levattn.cli.demo import run_demo
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
