"""The command line of ``levattn universal-set``."""

import math
import re
from pathlib import Path
from typing import Annotated

import typer

from levattn.cli import sets
from levattn.cli.commands.options import RESULTS, AsJson, check_epsilon, check_picture, ends_in
from levattn.cli.function import ALLOWED, Function, parse_function
from levattn.cli.program import Command
from levattn.cli.sets import Method

__all__ = ["add"]

_HELP = """\
Find the universal set of the keys in a file.

These are the keys that some query, whichever it is, can give at least ε of its attention. Use it on keys saved from a
model (after rotary embedding), to learn how many of them can matter, and which. For f(x) = x² the set is exact; for
other functions it may hold more keys than need be, and never fewer. An array (..., n, d) gets one set for each matrix.

\b
Examples:
  levattn universal-set keys.npy --epsilon 0.1
  levattn universal-set keys.npy --size 8
  levattn universal-set keys.npy --epsilon 0.1 --json
  levattn universal-set keys.npy --epsilon 0.1 -o set.npz --plot scores.svg
  levattn universal-set keys.npy --epsilon 0.5 --function huber:0.5

\b
To make a file to try them on:
python -c 'import numpy as n; n.save("keys", n.random.standard_t(2, (99, 8)))'
"""
_EPILOG = """\
\b
What is printed, a row for each matrix:
  item       its place in the array, counted from 0; - if there is only one
  n, d       keys and their columns
  rank       numerical rank of the keys
  condition  condition number of the keys, on their row space
  ε          the threshold; with --size, the least that the set certifies
  |U|        keys in the set
  bound      most keys that it can have: rank/ε for f(x) = x²; for other
             functions, most keys that the smallest such set can have
  vacuous    yes: the bound is not below n, so it promises nothing
  guarantee  exact: no key is missing, and none is there for nothing
             superset: no key is missing, but some may be there for nothing
             none: nothing is promised (with --center)

The numbers of the keys follow, counted from 0, if there is one matrix: the first 12. --json and --output have all of
them.
"""
_CHOICE, _WORK = "Which keys (one of --epsilon and --size is required)", "How they are read"


def add(app: typer.Typer) -> None:
    """Add the command to the program."""

    @app.command(
        "universal-set",
        cls=Command,
        help=_HELP,
        epilog=_EPILOG,
        short_help="Find the keys in a file that can be attended to heavily.",
    )
    def universal_set(
        files: Annotated[
            list[Path],
            typer.Argument(
                help="Keys (..., n, d) of floats: .npy, .npz, .safetensors (or its .index.json), .parquet, a zarr "
                "store, or a folder of such files. The rows of several files follow each other.",
                metavar="PATH...",
                show_default=False,
            ),
        ],
        epsilon: Annotated[
            float | None,
            typer.Option(
                callback=check_epsilon, rich_help_panel=_CHOICE, help="Keys that can score at least this, in (0, 1]."
            ),
        ] = None,
        size: Annotated[
            int | None,
            typer.Option(min=0, rich_help_panel=_CHOICE, help="This many keys of largest score, at most n."),
        ] = None,
        function: Annotated[
            str,
            typer.Option(
                rich_help_panel=_CHOICE,
                autocompletion=_functions,
                help=f"Attention function f: {ALLOWED}. The radius is the largest norm of a scaled query.",
            ),
        ] = "2",
        duplicates: Annotated[
            float | None,
            typer.Option(
                callback=_check_angle,
                rich_help_panel=_CHOICE,
                help="Also groups of near-copies, of which none is heavy by itself but all together are: keys linked "
                "by at most this angle, in radians, e.g. 0.1. With --epsilon and --function 2.",
            ),
        ] = None,
        center: Annotated[
            bool,
            typer.Option(
                "--center",
                rich_help_panel=_CHOICE,
                help="Subtract the mean key first, which softmax does not see. No guarantee for the keys themselves.",
            ),
        ] = False,
        tensor: Annotated[
            str | None,
            typer.Option(rich_help_panel=_WORK, help="Name of the array, if a file holds several."),
        ] = None,
        method: Annotated[
            Method,
            typer.Option(
                rich_help_panel=_WORK,
                help="Exact route to the scores: the second moment of the keys in float64 (gram), the same in float32 "
                "where that does (auto), QR or singular value decomposition.",
            ),
        ] = Method.auto,
        memory: Annotated[
            int | None,
            typer.Option(
                min=1,
                rich_help_panel=_WORK,
                help="MiB of keys to hold at a time, 32 if not given. Files of any size are read in two passes, "
                "unless --center, --duplicates, --method qr or svd, or another --function loads all keys.",
            ),
        ] = None,
        checkpoint: Annotated[
            Path | None,
            typer.Option(
                rich_help_panel=_WORK,
                help="File that tells how far the passes came, written every 4 million keys or so. If it is there, "
                "they go on from it. Removed in the end.",
            ),
        ] = None,
        scheduler: Annotated[
            str | None,
            typer.Option(
                rich_help_panel=_WORK,
                help="Address of a dask scheduler, e.g. tcp://10.0.0.1:8786, whose workers see the files: they do the "
                "work, in one pass.",
            ),
        ] = None,
        as_json: AsJson = False,
        plot: Annotated[
            Path | None,
            typer.Option(
                callback=check_picture,
                rich_help_panel=RESULTS,
                help="Draw the scores, largest first, into this .png, .svg or .pdf file.",
            ),
        ] = None,
        output: Annotated[
            Path | None,
            typer.Option(
                "--output",
                "-o",
                callback=ends_in(".npz"),
                rich_help_panel=RESULTS,
                help="Write the sets and the scores of all keys into this .npz file.",
            ),
        ] = None,
    ) -> None:
        f = parse_function(function)
        _check_choice(epsilon, size, f, method, center, duplicates)
        in_passes = f.is_square and not center and duplicates is None and method in (Method.auto, Method.gram)
        if (memory is not None or checkpoint is not None) and not in_passes:
            raise typer.BadParameter(
                "--memory and --checkpoint are for --function 2 and the methods auto and gram, without --center and "
                "--duplicates; all else loads the keys"
            )
        if scheduler is not None and not re.fullmatch(r"\w+://.+:\d+", scheduler):
            raise typer.BadParameter(f"--scheduler is {scheduler!r}, expected an address such as tcp://10.0.0.1:8786")
        if scheduler is not None and (size is not None or checkpoint is not None or plot is not None):
            raise typer.BadParameter("--scheduler goes with --epsilon, and without --checkpoint and --plot")
        if scheduler is not None and (center or duplicates is not None or method is not Method.auto):
            raise typer.BadParameter("--scheduler goes without --center, --duplicates and --method")
        request = sets.Request(
            tuple(files),
            tensor,
            epsilon,
            size,
            f,
            center,
            duplicates,
            method,
            in_passes,
            memory,
            checkpoint,
            scheduler,
        )
        sets.run(request, as_json, plot, output)


def _check_choice(
    epsilon: float | None,
    size: int | None,
    f: Function,
    method: Method,
    center: bool,
    duplicates: float | None,
) -> None:
    """Refuse options that do not go together."""
    if (epsilon is None) == (size is None):
        raise typer.BadParameter("give exactly one of --epsilon and --size")
    if method is not Method.auto and not f.is_square:
        raise typer.BadParameter(f"--method {method.value} is for --function 2; others take only auto")
    if center and not f.is_square:
        raise typer.BadParameter("--center is for --function 2 (the bound of softmax centers by itself)")
    if duplicates is not None and (epsilon is None or not f.is_square):
        raise typer.BadParameter("--duplicates is for --epsilon and --function 2")


def _check_angle(angle: float | None) -> float | None:
    if angle is not None and not 1e-8 <= angle <= math.pi / 4:
        raise typer.BadParameter(f"the angle is {angle}, expected radians from 1e-8 to 0.785 (45°)")
    return angle


def _functions() -> list[str]:
    return ["1", "2", "fair", "huber", "l1l2", "softmax:", "tukey"]
