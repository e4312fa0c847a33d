"""The command line of ``levattn universal-set``."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from levattn.cli import sets
from levattn.cli.commands.options import (
    FOR_QUERIES,
    RESULTS,
    WORK,
    AsJson,
    CheckpointPath,
    Columns,
    Dtype,
    Id,
    KeyPaths,
    Picture,
    QueriesTensor,
    Tensor,
    Weights,
    by_library,
    ends_in,
    key_files,
    tensors_in,
)
from levattn.cli.program import Command
from levattn.cli.sets import ALLOWED, Outputs, SetMethod, parse_function
from levattn.io.written import SUFFIXES

_HELP = """\
Find the universal set of the keys in a file.

The set holds every key to which some query can give at least ε of its attention. Use it on keys saved from a model
(after rotary embedding), to learn which keys can matter, and how many. For f(x) = x² the set is exact. For other
functions it may hold more keys than needed, but never fewer. An array (..., n, d) gets one set for each matrix.

With --queries and --coverage the set is smaller, and serves queries like the queries in a file. A new query finds
all its keys in the set with the probability --coverage.

\b
Examples:
  levattn universal-set keys.npy --epsilon 0.1
  levattn universal-set - < keys.npy
  levattn universal-set keys.npy --size 8
  levattn universal-set keys.npy --epsilon 0.1 --json
  levattn universal-set keys.npy --epsilon 0.1 -o set.npz --plot scores.svg
  levattn universal-set keys.npy --epsilon 0.5 --function huber:0.5
  levattn universal-set keys.npy --queries q.npy --coverage 0.9 --mass 0.8
  levattn universal-set table.csv --columns f0,f1 --scores heavy.csv

\b
Files for these examples come from:
python -c 'import numpy as n; n.save("keys", n.random.standard_t(2, (99, 8)))'
python -c 'import numpy as n; n.save("q", n.random.standard_normal((99, 8)))'
python -c 'import numpy as n; n.savetxt("table.csv", n.eye(9, 2), "%f", ",")'
"""
_EPILOG = """\
\b
Output, one row for each matrix:
  item       its place in the array, counted from 0; - if there is only one
  n, d       keys and their columns
  rank       numerical rank of the keys
  condition  condition number of the keys, on their row space
  ε          the threshold; with --size, the smallest that the set certifies
  |U|        keys in the set
  bound      most keys that the set can have: rank/ε for f(x) = x²; for other
             functions, most keys that the smallest such set can have
  vacuous    yes: the bound is not below n, so it promises nothing
  guarantee  exact: no key is missing, and every key is needed
             superset: no key is missing, but some may not be needed
             none: no guarantee (with --center)
             coverage: a new query finds all its keys with this probability

\b
With --queries there is no bound that could be vacuous. The last columns are:
  coverage   the probability from --coverage
  mass       share of its attention that a new query gives the set (--mass)
  queries    queries that set the threshold; the others order the keys

For one matrix, the numbers of its first 12 keys follow, counted from 0, with --id with their identifiers. --json,
--output and --scores have all of them.
"""
_EPSILON = 0.1
_CHOICE = "Choice of keys (one of --epsilon, --size and --mass)"


_Epsilon = Annotated[
    float | None,
    typer.Option(
        callback=by_library("epsilon"),
        rich_help_panel=_CHOICE,
        help=f"Keys that can score at least this, in (0, 1]; {_EPSILON} if neither --size nor --mass is given.",
    ),
]
_Size = Annotated[
    int | None, typer.Option(min=0, rich_help_panel=_CHOICE, help="Number of keys of largest score, at most n.")
]
_Function = Annotated[
    str,
    typer.Option(
        rich_help_panel=_CHOICE,
        autocompletion=lambda: ["1", "2", "fair", "huber", "l1l2", "softmax", "softmax:", "tukey"],
        help=f"Attention function f: {ALLOWED}. The radius is the largest norm of a scaled query.",
    ),
]
_Queries = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=FOR_QUERIES,
        help="Sample of the queries (..., m, d), in any format of the keys. For softmax, multiply them by the scale "
        "of the logits before saving. Half of them order the keys, and the others set the threshold.",
    ),
]
_Coverage = Annotated[
    float | None,
    typer.Option(
        callback=by_library("coverage"),
        rich_help_panel=FOR_QUERIES,
        help="Probability that a new query, exchangeable with the queries of the file, finds all its keys in the "
        "set, in (0, 1), e.g. 0.9.",
    ),
]
_Mass = Annotated[
    float | None,
    typer.Option(
        callback=by_library("mass"),
        rich_help_panel=FOR_QUERIES,
        help="Instead of --epsilon: keys that together get at least this share of the query's attention, in (0, 1).",
    ),
]
_Duplicates = Annotated[
    float | None,
    typer.Option(
        callback=by_library("angle"),
        rich_help_panel=_CHOICE,
        help="Also groups of near-copies that are heavy together although no key of them is heavy alone: keys linked "
        "by at most this angle, in radians, e.g. 0.1. With --epsilon and --function 2.",
    ),
]
_Center = Annotated[
    bool,
    typer.Option(
        "--center",
        rich_help_panel=_CHOICE,
        help="Subtract the mean key first, which does not change softmax. No guarantee for the keys themselves.",
    ),
]
_Method = Annotated[
    SetMethod,
    typer.Option(
        rich_help_panel=WORK,
        help="Exact route to the scores: the second moment of the keys in float64 (gram), the same in float32 "
        "where that suffices (auto), QR or singular value decomposition.",
    ),
]
_Memory = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=WORK,
        help="MiB of keys to hold at a time, 32 by default. Files of any size are read in two passes, "
        "unless --center, --duplicates, --queries, --method qr or svd, or another --function loads all keys.",
    ),
]
_Scheduler = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=WORK,
        help="Address of a dask scheduler, e.g. tcp://10.0.0.1:8786. Its workers read the same files and do the "
        "work, in one pass.",
    ),
]
_Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        callback=ends_in(".npz"),
        rich_help_panel=RESULTS,
        help="Write the sets and the scores of all keys into this .npz file.",
    ),
]


_Scores = Annotated[
    Path | None,
    typer.Option(
        callback=ends_in(*SUFFIXES),
        rich_help_panel=RESULTS,
        help="Write the keys of the sets and their scores into this .parquet, .csv or .jsonl file, one row each. "
        "`levattn scores` writes those of all keys.",
    ),
]


def add(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("universal-set", cls=Command, help=_HELP, epilog=_EPILOG)(_universal_set)


def _universal_set(
    files: KeyPaths,
    epsilon: _Epsilon = None,
    size: _Size = None,
    function: _Function = "2",
    queries: _Queries = None,
    coverage: _Coverage = None,
    mass: _Mass = None,
    queries_tensor: QueriesTensor = None,
    duplicates: _Duplicates = None,
    center: _Center = False,
    tensor: Tensor = None,
    columns: Columns = None,
    id: Id = None,
    weights: Weights = None,
    dtype: Dtype = None,
    method: _Method = "auto",
    memory: _Memory = None,
    checkpoint: CheckpointPath = None,
    scheduler: _Scheduler = None,
    as_json: AsJson = False,
    plot: Picture = None,
    output: _Output = None,
    scores: _Scores = None,
) -> None:
    alone = {"--plot": plot, "--output": output, "--scores": scores, "--checkpoint": checkpoint}
    names = tensors_in(tensor, alone)
    request = sets.Request(
        keys=key_files(files, None, columns, id, dtype, memory, weights),
        epsilon=_EPSILON if epsilon is size is mass is None else epsilon,
        size=size,
        function=parse_function(function, for_queries=queries is not None),
        queries=queries,
        coverage=coverage,
        mass=mass,
        queries_tensor=queries_tensor,
        center=center,
        duplicates=duplicates,
        method=method,
        checkpoint=checkpoint,
        scheduler=scheduler,
    )
    for wrong, message in _conflicts(request, plot):
        if wrong:
            raise typer.BadParameter(message)
    outputs = Outputs(as_json, plot, output, scores, title=len(names) > 1)
    with request.keys.from_pipe() as readable:
        for keys in readable.of_tensors(names):
            sets.find_sets(replace(request, keys=keys), outputs)


def _conflicts(request: sets.Request, plot: Path | None) -> list[tuple[bool, str]]:
    """Return combinations of options that are not allowed: whether they were given, and the message."""
    by_size, other_method = request.epsilon is None, request.method != "auto"
    is_square, grouped = request.function.is_square, request.duplicates is not None
    resumed, address = request.checkpoint is not None, request.scheduler
    remote = address is not None
    return [
        *_conflicts_of_queries(request),
        (
            request.epsilon is not None and request.size is not None,
            "give exactly one of --epsilon and --size, or --mass with --queries",
        ),
        (
            other_method and not is_square,
            f"--method {request.method} is for --function 2; others take only auto",
        ),
        (
            request.center and not is_square,
            "--center is for --function 2 (the bound of softmax centers by itself)",
        ),
        (grouped and (by_size or not is_square), "--duplicates is for --epsilon and --function 2"),
        (
            (request.keys.memory is not None or resumed) and not request.in_passes,
            "--memory and --checkpoint are for --function 2 and the methods auto and gram, without --center and "
            "--duplicates; all else loads the keys",
        ),
        (
            request.keys.weights is not None and (remote or not request.in_passes),
            "--weights is for --function 2 and the methods auto and gram, without --center, --duplicates, --queries "
            "and --scheduler",
        ),
        (
            address is not None and not re.fullmatch(r"\w+://.+:\d+", address),
            f"--scheduler is {address!r}, expected an address such as tcp://10.0.0.1:8786",
        ),
        (
            remote and (by_size or resumed or plot is not None),
            "--scheduler goes with --epsilon, and without --checkpoint and --plot",
        ),
        (
            remote and (request.center or grouped or other_method),
            "--scheduler goes without --center, --duplicates and --method",
        ),
    ]


def _conflicts_of_queries(request: sets.Request) -> list[tuple[bool, str]]:
    """Return the combinations with --queries that are not allowed, as `_conflicts` does."""
    for_queries = request.queries is not None
    needing = {"--coverage": request.coverage, "--mass": request.mass, "--queries-tensor": request.queries_tensor}
    lonely = [name for name, value in needing.items() if value is not None]
    others = {
        "--center": request.center,
        "--duplicates": request.duplicates is not None,
        "--method": request.method != "auto",
        "--memory": request.keys.memory is not None,
        "--checkpoint": request.checkpoint is not None,
        "--scheduler": request.scheduler is not None,
    }
    excluded = [name for name, given in others.items() if given]
    chosen = [request.epsilon, request.size, request.mass]
    return [
        (
            not for_queries and bool(lonely),
            f"{' and '.join(lonely)}: give --queries as well, a file with a sample of the queries",
        ),
        (for_queries and request.coverage is None, "--queries needs --coverage, a probability such as 0.9"),
        (for_queries and bool(excluded), f"--queries goes without {' and '.join(excluded)}"),
        (
            for_queries and len(chosen) - chosen.count(None) != 1,
            "give exactly one of --epsilon, --size and --mass with --queries",
        ),
    ]
