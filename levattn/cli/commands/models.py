"""The command lines of ``levattn inspect``, ``levattn prune-report`` and ``levattn convert``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from levattn.cli import models
from levattn.cli.commands.options import AsJson, HeavyFrom, ModelPath, Picture, Profile, WebPage, slots_or_share
from levattn.cli.models import ScoreColumn
from levattn.cli.program import Command

_INSPECT = """\
Show the universal sets of a model's keys on a text.

Use it before pruning a model, to see how small the sets of its heads are and how much of its softmax attention they
catch. The model reads the text once, and is not changed. The command needs torch and transformers.

\b
Examples:
  levattn inspect MODEL --text book.txt
  levattn inspect MODEL --text book.txt --epsilon 0.1 --tokens 2048
  levattn inspect MODEL --text book.txt --json --plot heads.png

\b
MODEL is a .gguf file, or a folder such as this command makes:
  hf download sentence-transformers/all-MiniLM-L6-v2 --local-dir MODEL
"""
_INSPECT_EPILOG = """\
\b
Output, one row for each layer and head of keys:
  layer, head  their numbers, from 0
  n, d         keys (one for each token) and their columns
  κ            condition number of the keys, on their row space
  |U|          keys in the universal set for f(x) = x² at ε, which is exact
  share        share of the keys in the set
  rank/ε       the most keys that the set can have; * if not below n
  max          largest leverage score
  mass         mean share of the softmax attention that falls on the set
  heavy        softmax scores of at least ε, of at most 256 queries per head
  caught       share of these scores on keys of the set; - if there are none

A line below the table compares the means of share and mass over the heads. The sets promise nothing for softmax: mass
and caught are measured on this text.
"""
_PRUNE = """\
Prune a model's attention, report the loss.

Each query attends exactly to the keys near it and to keys selected by scores. It reads all other keys as summaries:
clusters that count as one key each. Use it to see the cost of a budget of such slots, before you prune a model with
levattn.integrations.transformers.prune, which reads the first 1536 tokens of a decoder with all keys, and texts of at
most 2560; this command reads few tokens so. Nothing is trained or saved. The command needs torch and transformers.

\b
Examples:
  levattn prune-report MODEL --text book.txt
  levattn prune-report MODEL --text book.txt --budget 0.1 --json
  levattn prune-report MODEL --text book.txt --html heads.html
  levattn prune-report MODEL --text book.txt --budget 64 --scores leverage

\b
MODEL is a .gguf file, or a folder such as this command makes:
  hf download sentence-transformers/all-MiniLM-L6-v2 --local-dir MODEL
"""
_PRUNE_EPILOG = """\
\b
Output, one row for each layer and head of keys (means over at most 64
queries of the text):
  layer, head  their numbers, from 0
  slots        slots that a query read
  selected     keys that it attended exactly, including the keys near it
  mass         share of its softmax attention that falls on these keys
  error        error of the head's output, relative to dense attention

\b
Then the loss of the whole model, and the time of one pass in seconds:
  embedding cosine  of an encoder: cosine of the mean states, dense and pruned
  perplexity        of a causal model, on this text: dense and pruned
"""
_CONVERT = """\
Write a model as a folder that loads quickly.

transformers reads a .gguf file three times and turns its entries into numbers each time, which takes half a minute for
a small model. The folder has the same weights as .safetensors, with the tokenizer, and loads in a second or two. The
other commands take it as MODEL. The command needs torch and transformers.

\b
Examples:
  levattn convert model.gguf MODEL
  levattn convert model.gguf MODEL --dtype bfloat16
"""
_SLOTS = "Slots"

_Text = Annotated[Path, typer.Option(help="Text file in UTF-8. Its first --tokens are read.")]
_Tokens = Annotated[
    int, typer.Option(min=2, help="Maximum number of tokens to read; never more than the model has positions.")
]
_Budget = Annotated[
    float,
    typer.Option(
        rich_help_panel=_SLOTS,
        help="Slots of each query: a share of the keys in (0, 1], where 1 is dense attention, or a number from 2 on.",
    ),
]
_Selection = Annotated[
    ScoreColumn,
    typer.Option(
        rich_help_panel=_SLOTS,
        help="Score that selects keys: expected attention, the same times the distance of the key from its summary "
        "(residual), leverage scores, or a baseline: random keys, keys of small norm, or the first and last keys "
        "alone (streaming).",
    ),
]
_Summaries = Annotated[
    int | None,
    typer.Option(min=0, rich_help_panel=_SLOTS, help="Of these, clusters of the other keys. 0 drops the keys."),
]
_Window = Annotated[
    int | None,
    typer.Option(
        min=0, rich_help_panel=_SLOTS, help="Of these, keys near a query: on each side, or before it if causal."
    ),
]
_Sinks = Annotated[
    int | None,
    typer.Option(
        min=0,
        rich_help_panel=_SLOTS,
        help="Of these, first keys that are always kept; 0 by default. A rule splits the slots that these three "
        "options leave open.",
    ),
]


def add(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command("inspect", cls=Command, help=_INSPECT, epilog=_INSPECT_EPILOG)(_inspect)
    app.command("prune-report", cls=Command, help=_PRUNE, epilog=_PRUNE_EPILOG)(_prune_report)
    app.command("convert", cls=Command, help=_CONVERT)(_convert)


def _inspect(
    model: ModelPath,
    text: _Text,
    epsilon: HeavyFrom = 0.05,
    tokens: _Tokens = 512,
    as_json: AsJson = False,
    plot: Picture = None,
) -> None:
    models.inspect(models.Inquiry(model, text, tokens, as_json, plot), epsilon)


def _prune_report(
    model: ModelPath,
    text: _Text,
    tokens: _Tokens = 512,
    budget: _Budget = 0.25,
    scores: _Selection = "residual",
    summaries: _Summaries = None,
    window: _Window = None,
    sinks: _Sinks = None,
    heads: Profile = "auto",
    as_json: AsJson = False,
    plot: Picture = None,
    html: WebPage = None,
) -> None:
    budget = slots_or_share(budget, heads)
    inquiry = models.Inquiry(model, text, tokens, as_json, plot, html)
    models.prune_report(inquiry, budget, heads, scores=scores, summaries=summaries, window=window, sinks=sinks)


def _convert(
    model: ModelPath,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The new folder.")],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of the weights; by default the one that transformers reads, float32 for .gguf files."),
    ] = None,
) -> None:
    models.convert(model, folder, dtype)
