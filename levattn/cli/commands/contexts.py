"""The command lines of ``levattn profile``, ``compress``, ``ask`` and ``evaluate``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from levattn.cli import asking, contexts
from levattn.cli.commands.options import RESULTS, AsJson, ModelPath, Profile, WebPage, ends_in, slots_or_share
from levattn.cli.program import Command

_PROFILE = """\
Measure the cost of cutting each head of a decoder.

A few heads recall words from far back in a text, and most heads do not. This command finds them, once for each model,
so that `levattn compress` can cut the others. The model writes its own texts, with hidden words that it must then
recall, while each head is cut in turn. Nothing is trained. The command needs torch and transformers.

\b
Examples:
  levattn profile MODEL -o heads.json
  levattn profile MODEL -o quick.json --tasks 1 --rounds 1
  levattn profile MODEL -o heads.json --refine quick.json
  levattn profile MODEL -o heads.json --json --html heads.html

\b
MODEL is a .gguf file, or a folder such as this command makes:
  hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir MODEL
"""
_PROFILE_EPILOG = """\
\b
Output, one row for each layer and head of keys (nats a token):
  layer, head  their numbers, from 0
  cost         recall and text together, which compress uses
  recall       rise of the loss of answers if the head is cut
  ±recall      half of the 95% confidence interval of recall; - for one task
  text         rise of the loss of the text that follows
  ±text        half of the 95% confidence interval of text; - for one task
"""
_COMPRESS = """\
Read a text once, keep a part of it for questions.

The model reads the text, and the command keeps a share of the bytes of its KV cache. It keeps all positions of the
heads that recall, according to --heads, and few positions of the others, with values fitted to the queries of the
text. Entries are rounded to 4 or 8 bits. `levattn ask` answers from the file. The loss has no bound. The command needs
torch and transformers.

\b
Examples:
  levattn compress MODEL --text book.txt --heads heads.json -o b.safetensors
  levattn compress MODEL --text book.txt --budget 0.5 -o book.safetensors
  levattn compress MODEL --text book.txt -o book.safetensors --html book.html

Without --heads, a profile that comes with levattn is taken if it was measured on the weights of MODEL. heads.json
comes from `levattn profile MODEL -o heads.json`. If the tokenizer has a chat template, the text follows the template's
start of a message.
"""
_COMPRESS_EPILOG = """\
\b
Output:
  positions    tokens read, including tokens of a chat template
  bytes        of the kept keys, values and weights
  dense bytes  of all keys and values of these positions
  seconds      of reading and compressing
"""
_ASK = """\
Answer questions from a compressed text.

CONTEXT is a file that `levattn compress` made with the same MODEL. The text is not read again. The command prints the
answer as it comes, by greedy decoding: the likeliest token each time. Then one line on standard error tells the bytes
of the context and the time per token. With --questions it loads the model once, prints each question after ">" and
answers it. Each answer is as if it were the only one, unless you give --follow. The command needs torch and
transformers.

\b
Examples:
  levattn ask MODEL book.safetensors "Who comes home in the end?"
  levattn ask MODEL book.safetensors "List the places." --max-tokens 200
  levattn ask MODEL book.safetensors "Who is Ann?" --json
  levattn ask MODEL book.safetensors --questions questions.txt --json
  levattn ask MODEL book.safetensors --questions - --follow

If the tokenizer has a chat template, text and question are one message, with an empty line between them, and the model
answers it. Otherwise the model continues the text, a new line and the question as it is. Then write the beginning of
the answer, such as "The one who comes home is".
"""
_EVALUATE = """\
See which budget is safe for a text.

The model answers questions on the text with its dense cache, and then with each --budget, as `levattn compress` keeps
it. The command compares the answers. Without --questions it makes up 16 of them: passages of the text that the model
is to continue to the letter. --scores compares other rules for the positions to keep. The command needs torch and
transformers.

\b
Examples:
  levattn evaluate MODEL --text book.txt --heads heads.json
  levattn evaluate MODEL --text book.txt --questions questions.txt --json
  levattn evaluate MODEL --text book.txt --budget 0.25 --budget 0.1
  levattn evaluate MODEL --text book.txt --method prune --html book.html
  levattn evaluate MODEL --text book.txt --scores default,snapkv,h2o

A line of --questions is a question. After a tab it may have words that a right answer contains.
"""
_EVALUATE_EPILOG = """\
\b
Output, one row for the dense cache and for each budget:
  budget    share of the bytes, or number of slots
  scores    the rule that selects positions; with --scores
  share     bytes of the cache, as a share of the dense ones
  MB        the same in megabytes
  seconds   to read the text, and to compress it
  s/token   median time of a further token
  changed   answers of which a token is not the dense one
  ±changed  standard deviation over seeds; - for one
  limit     upper limit of changed, for questions like these (95% confidence)
  loss      rise of the loss of the dense answers, in nats a token
  ±loss     standard deviation over seeds; - for one
  worst     loss of the worst question
  right     answers that contain the words expected; - without any
"""

_MaxTokens = Annotated[int, typer.Option(min=1, help="Maximum number of tokens of the answer.")]


def add(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command("profile", cls=Command, help=_PROFILE, epilog=_PROFILE_EPILOG)(_profile)
    app.command("compress", cls=Command, help=_COMPRESS, epilog=_COMPRESS_EPILOG)(_compress)
    app.command("ask", cls=Command, help=_ASK)(_ask)
    app.command("evaluate", cls=Command, help=_EVALUATE, epilog=_EVALUATE_EPILOG)(_evaluate)


def _bits(value: int | None) -> int | None:
    if value not in (None, 4, 8, 16):
        raise typer.BadParameter(f"--bits is {value}, expected 4, 8 or 16")
    return value


def _profile(
    model: ModelPath,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The .json file to write.", callback=ends_in(".json"))
    ],
    tasks: Annotated[int, typer.Option(min=1, help="Texts to measure on. More texts narrow the intervals.")] = 4,
    positions: Annotated[int, typer.Option(min=256, help="Tokens of each text.")] = 1024,
    rounds: Annotated[
        int,
        typer.Option(
            min=1, help="Rounds over all heads. 1 with --tasks 1 gives a first split in a tenth of the time."
        ),
    ] = 3,
    way: Annotated[
        Literal["cache", "reading"],
        typer.Option(help="How heads are cut: cache for `compress`, reading for the function `prune`."),
    ] = "cache",
    refine: Annotated[
        Path | None,
        typer.Option(help="Profile of this model, such as a quick one, to go on from: costs are means over both."),
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            callback=ends_in(".png", ".svg", ".pdf"),
            rich_help_panel=RESULTS,
            help="Draw `recall` of each layer and head into this .png, .svg or .pdf file.",
        ),
    ] = None,
    html: WebPage = None,
) -> None:
    contexts.profile(contexts.Measurement(model, output, tasks, positions, rounds, way, refine, as_json, plot, html))


def _compress(
    model: ModelPath,
    text: Annotated[Path, typer.Option(help="Text file in UTF-8.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The .safetensors file to write.", callback=ends_in(".safetensors")),
    ],
    budget: Annotated[
        float, typer.Option(help="Share of the bytes to keep, in (0, 1], or number of slots of a head above 1.")
    ] = 0.25,
    heads: Profile = "auto",
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Maximum number of tokens to read. Default: all, or as many as leave room for question and answer.",
        ),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens to read at once: fewer need less memory, but lose more. Default: all."),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(
            callback=_bits,
            help="Bits of an entry that is kept: 4, 8, or 16 for the type of the model. Default: 4 if the budget is "
            "below 0.1, else 8.",
        ),
    ] = None,
    as_json: AsJson = False,
    html: WebPage = None,
) -> None:
    budget = slots_or_share(budget, heads)
    contexts.compress_text(
        contexts.Compression(model, text, output, budget, heads, tokens, chunk, bits, as_json, html)
    )


def _ask(
    model: ModelPath,
    context: Annotated[Path, typer.Argument(metavar="CONTEXT", help="File that `levattn compress` made.")],
    question: Annotated[
        str | None, typer.Argument(metavar="[QUESTION]", help="The question, in quotes.", show_default=False)
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(help="Text file with a question on each line, or - for standard input, as lines come."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Let each question follow the answers before it, as in a conversation.")
    ] = False,
    max_tokens: _MaxTokens = 64,
    as_json: AsJson = False,
) -> None:
    if (question is None) == (questions is None):
        raise typer.BadParameter("expected one of QUESTION and --questions")
    asking.ask(asking.Asking(model, context, question, questions, follow, max_tokens, as_json))


def _budgets(values: list[float], heads: str) -> list[float]:
    found = [slots_or_share(value, heads) for value in values]
    if len({type(value) for value in found}) > 1:
        raise typer.BadParameter("--budget has shares and numbers of slots; expected one kind")
    if len(set(found)) < len(found):
        raise typer.BadParameter(f"--budget has a value twice: {', '.join(map(str, found))}")
    return found


def _scores(names: str, method: str) -> list[str]:
    """Return the names in --scores, or raise."""
    from levattn.attention import Selection
    from levattn.attention.pruned.selection import as_selection

    found = [name.strip() for name in names.split(",")]
    try:
        for name in found:
            as_selection(Selection(0.5, scores=None if name == "default" else name), queries=method == "compress")
    except ValueError as error:
        raise typer.BadParameter(f"--scores: {error}") from error
    if len(set(found)) < len(found):
        raise typer.BadParameter(f"--scores has a name twice: {names}")
    return found


def _evaluate(
    model: ModelPath,
    text: Annotated[Path, typer.Option(help="Text file in UTF-8. All of it is read.")],
    questions: Annotated[
        Path | None, typer.Option(help="Text file with a question on each line, or - for standard input.")
    ] = None,
    budget: Annotated[
        list[float],
        typer.Option(help="Share of the bytes in (0, 1], or number of slots of a head above 1; may be repeated."),
    ] = [0.5, 0.25, 0.12, 0.06, 0.03],  # noqa: B006 (typer does not change it)
    scores: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...",
            help="Kinds of scores to compare at each budget: default, residual, expected, leverage, or a published "
            "rule (random, norm, streaming, h2o, snapkv, tova).",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds of the scores random.")] = 1,
    heads: Profile = "auto",
    method: Annotated[
        Literal["compress", "prune"],
        typer.Option(help="Compress the cache after dense reading, or prune the attention."),
    ] = "compress",
    max_tokens: _MaxTokens = 32,
    as_json: AsJson = False,
    html: WebPage = None,
) -> None:
    budgets = _budgets(budget, heads)
    kinds = None if scores is None else _scores(scores, method)
    if seeds > 1 and "random" not in (kinds or ()):
        raise typer.BadParameter(f"--seeds is {seeds}, expected random among --scores, as no others have seeds")
    trial = asking.Trial(model, text, questions, budgets, kinds, seeds, heads, method, max_tokens, as_json, html)
    asking.try_budgets(trial)
