"""The command line of ``levattn scores``."""

from pathlib import Path
from typing import Annotated

import typer

from levattn.cli import scores
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
    QueriesTensor,
    Tensor,
    Weights,
    ends_in,
    key_files,
    tensors_in,
)
from levattn.cli.program import Command
from levattn.cli.sets import ALLOWED, parse_function
from levattn.io.written import SUFFIXES

_HELP = """\
Score every key in a file, and write the scores.

The score of a key is the largest attention that any query can give it: its leverage score for f(x) = x², and a
certified upper bound for other functions. With --queries it is the mean attention that queries like the given ones
give it. Leverage scores of files of any size take two passes over them, and memory for the scores.

\b
Examples:
  levattn scores keys.npy
  levattn scores keys.npy -o scores.npy
  levattn scores keys.npy --function huber:0.5 -o scores.jsonl
  levattn scores keys.npy --queries q.npy -o expected.csv
  levattn scores table.csv --columns f0,f1 -o scores.csv
  levattn scores year=2025 --id name -o scores.parquet

\b
Files for these examples come from:
python -c 'import numpy as n; n.save("keys", n.random.standard_t(2, (99, 8)))'
python -c 'import numpy as n; n.save("q", n.random.standard_normal((99, 8)))'
python -c 'import numpy as n; n.savetxt("table.csv", n.eye(9, 2), "%f", ",")'
"""
_EPILOG = """\
\b
Output, one row for each matrix:
  item      its place in the array, counted from 0; - if there is only one
  n, d      keys and their columns
  sum       of the scores; of leverage scores it is the rank of the keys
  largest   largest score
  smallest  smallest score

For one matrix, its 12 keys of largest score follow, counted from 0, with --id with their identifiers.
"""


_Function = Annotated[
    str,
    typer.Option(
        autocompletion=lambda: ["1", "2", "fair", "huber", "l1l2", "softmax", "softmax:", "tukey"],
        help=f"Attention function f: {ALLOWED}. The radius is the largest norm of a scaled query.",
    ),
]
_Queries = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=FOR_QUERIES,
        help="Expected scores, for queries like a sample (..., m, d) in this file. For softmax, multiply them by "
        "the scale of the logits before saving.",
    ),
]
_Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        callback=ends_in(*SUFFIXES, ".npy"),
        rich_help_panel=RESULTS,
        help="Write the scores of all keys into this .parquet, .csv or .jsonl file, one row for each key, or "
        "(..., n) into this .npy file.",
    ),
]


def add(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("scores", cls=Command, help=_HELP, epilog=_EPILOG)(_scores)


def _scores(
    files: KeyPaths,
    function: _Function = "2",
    queries: _Queries = None,
    queries_tensor: QueriesTensor = None,
    tensor: Tensor = None,
    columns: Columns = None,
    id: Id = None,
    weights: Weights = None,
    dtype: Dtype = None,
    memory: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=WORK,
            help="MiB of keys to hold at a time, 32 by default. With --queries or another --function all keys are "
            "loaded.",
        ),
    ] = None,
    checkpoint: CheckpointPath = None,
    as_json: AsJson = False,
    output: _Output = None,
) -> None:
    names = tensors_in(tensor, {"--output": output, "--checkpoint": checkpoint})
    request = scores.Scoring(
        keys=key_files(files, None, columns, id, dtype, memory, weights),
        function=parse_function(function, for_queries=queries is not None),
        queries=queries,
        queries_tensor=queries_tensor,
        checkpoint=checkpoint,
        output=output,
    )
    if queries_tensor is not None and queries is None:
        raise typer.BadParameter("--queries-tensor: give --queries as well, a file with a sample of the queries")
    if request.kind != "leverage" and weights is not None:
        raise typer.BadParameter("--weights is for --function 2 without --queries")
    if request.kind != "leverage" and (memory is not None or checkpoint is not None):
        raise typer.BadParameter("--memory and --checkpoint are for --function 2 without --queries; all else loads")
    if id is not None and output is not None and output.suffix.lower() == ".npy":
        raise typer.BadParameter(f"{output} has no place for the identifiers of --id, expected {', '.join(SUFFIXES)}")
    with request.keys.from_pipe() as readable:
        for keys in readable.of_tensors(names):
            scores.score_keys(request.reading(keys), as_json, title=len(names) > 1)
