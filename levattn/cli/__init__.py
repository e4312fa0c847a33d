"""The ``levattn`` program: universal sets of keys in files and models, and a demonstration on a real encoder.

Results go to standard output, as tables or (``--json``) as one JSON document; everything else goes to
standard error. Exit status: 0 done, 1 the data or the machine did not allow it, 2 the command line is wrong.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import levattn
from levattn.cli import demo as demonstration
from levattn.cli import models, sets
from levattn.cli.function import ALLOWED, parse_function
from levattn.cli.models import Scores
from levattn.cli.output import fail
from levattn.cli.sets import Method

if TYPE_CHECKING:
    import typer

__all__ = ["build_app", "main"]

_INSTALL = 'pip install "levattn[cli]"'
_PICTURES = (".png", ".svg", ".pdf")


def main() -> None:
    """Run the program."""
    try:
        app = build_app()
    except ModuleNotFoundError as error:
        sys.exit(f"levattn: the program needs {error.name}, which is not installed: {_INSTALL}")
    app()


def build_app() -> "typer.Typer":
    """Return the program as a typer application.

    Returns
    -------
    typer.Typer
        The application.
    """
    import rich  # noqa: F401 (so that it is missed here, not half-way)
    import typer

    app = typer.Typer(
        add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
    )

    def in_unit_interval(epsilon: float | None) -> float | None:
        if epsilon is not None and not 0 < epsilon <= 1:
            raise typer.BadParameter(f"epsilon is {epsilon}, expected a number in (0, 1]")
        return epsilon

    def ends_in(*suffixes: str) -> Any:
        def check(path: Path | None) -> Path | None:
            if path is not None and path.suffix.lower() not in suffixes:
                raise typer.BadParameter(f"{path} ends in {path.suffix!r}, expected {' or '.join(suffixes)}")
            return path

        return check

    def show_version(asked: bool) -> None:
        if asked:
            typer.echo(f"levattn {levattn.__version__}")
            raise typer.Exit

    @app.callback()
    def program(
        _version: Annotated[
            bool, typer.Option("--version", is_eager=True, callback=show_version, help="Show the version.")
        ] = False,
    ) -> None:
        """Universal sets of attention keys: the few keys that any query can ever attend to heavily."""

    @app.command()
    def demo(
        epsilon: Annotated[
            float, typer.Option(callback=in_unit_interval, help="Threshold of a heavy score, in (0, 1].")
        ] = demonstration.DEMO_EPSILON,
        out: Annotated[Path, typer.Option(help="Folder for the pictures; made if missing.")] = Path("levattn-demo"),
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    ) -> None:
        """Compute and check the universal sets of all 72 heads of a real encoder, and draw them."""
        with _errors_in_one_line():
            demonstration.run(epsilon, out, as_json)

    @app.command("universal-set")
    def universal_set(
        files: Annotated[
            list[Path],
            typer.Argument(
                help="Keys (..., n, d): .npy, .npz, .safetensors (or its .index.json), .parquet, a zarr store, or a "
                "folder of such files. The rows of several follow each other.",
                metavar="PATH...",
            ),
        ],
        epsilon: Annotated[
            float | None,
            typer.Option(callback=in_unit_interval, help="Keys that can score at least this, in (0, 1]."),
        ] = None,
        size: Annotated[int | None, typer.Option(min=0, help="Or: this many keys of highest score.")] = None,
        tensor: Annotated[str | None, typer.Option(help="Name of the array, if the file holds several.")] = None,
        function: Annotated[str, typer.Option(help=f"Attention function: {ALLOWED}.")] = "2",
        center: Annotated[bool, typer.Option("--center", help="Subtract the mean key first.")] = False,
        duplicates: Annotated[
            float | None,
            typer.Option(help="Also groups of near-duplicate keys, within this angle (0.1), that score as a whole."),
        ] = None,
        method: Annotated[Method, typer.Option(help="How to compute the scores.")] = Method.auto,
        memory: Annotated[
            int | None, typer.Option(min=1, help="MiB of keys to hold at a time (32), where they are read in passes.")
        ] = None,
        checkpoint: Annotated[
            Path | None,
            typer.Option(help="Write down here how far it came; go on from it if it is there. Removed in the end."),
        ] = None,
        scheduler: Annotated[
            str | None,
            typer.Option(help="Address of a dask scheduler (tcp://...) whose workers see the files: one pass there."),
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
        plot: Annotated[
            Path | None,
            typer.Option(callback=ends_in(*_PICTURES), help="Draw the spectrum here (.png, .svg, .pdf)."),
        ] = None,
        output: Annotated[
            Path | None,
            typer.Option("--output", "-o", callback=ends_in(".npz"), help="Write the sets here (.npz)."),
        ] = None,
    ) -> None:
        """Find the universal set of the keys in a file, one set per matrix."""
        if (epsilon is None) == (size is None):
            raise typer.BadParameter("give exactly one of --epsilon and --size")
        f = parse_function(function)
        if method is not Method.auto and not f.is_square:
            raise typer.BadParameter(f"--method {method.value} is for --function 2; others take only auto")
        if center and not f.is_square:
            raise typer.BadParameter("--center is for --function 2 (the bound of softmax centres by itself)")
        if duplicates is not None and (epsilon is None or not f.is_square):
            raise typer.BadParameter("--duplicates is for --epsilon and --function 2")
        in_passes = f.is_square and not center and duplicates is None and method in (Method.auto, Method.gram)
        if (memory is not None or checkpoint is not None) and not in_passes:
            raise typer.BadParameter(
                "--memory and --checkpoint are for --function 2 and the methods auto and gram, without --center and "
                "--duplicates; all else loads the keys"
            )
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
        with _errors_in_one_line():
            sets.run(request, as_json, plot, output)

    _add_models(app, in_unit_interval, ends_in)
    return app


def _add_models(app: "typer.Typer", in_unit_interval: Any, ends_in: Any) -> None:
    """Add the commands that look at models."""
    import typer

    folder = typer.Argument(help="Folder of a Hugging Face model with safetensors weights and a tokenizer.")
    text = typer.Option(help="A text file (UTF-8), cut after --tokens.", exists=True, dir_okay=False)
    tokens = typer.Option(min=2, help="Tokens to read at most, and no more than the model can.")
    picture = typer.Option(callback=ends_in(*_PICTURES), help="Draw layers and heads here (.png, .svg, .pdf).")

    @app.command()
    def inspect(
        model: Annotated[Path, folder],
        text: Annotated[Path, text],
        epsilon: Annotated[
            float, typer.Option(callback=in_unit_interval, help="Threshold of a heavy score, in (0, 1].")
        ] = 0.05,
        tokens: Annotated[int, tokens] = 512,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
        plot: Annotated[Path | None, picture] = None,
    ) -> None:
        """Show the universal sets of a model's keys, layer by layer, and how much softmax attention they catch."""
        with _errors_in_one_line():
            models.inspect(models.Inquiry(model, text, tokens, as_json, plot), epsilon)

    @app.command("prune-report")
    def prune_report(
        model: Annotated[Path, folder],
        text: Annotated[Path, text],
        budget: Annotated[
            float, typer.Option(help="Slots of each query: their number, or below or at 1 the share of the keys.")
        ] = 0.25,
        scores: Annotated[Scores, typer.Option(help="What keys are selected by.")] = Scores.residual,
        summaries: Annotated[int | None, typer.Option(min=0, help="Clusters that stand for the other keys.")] = None,
        window: Annotated[int | None, typer.Option(min=0, help="Keys near a query.")] = None,
        sinks: Annotated[int | None, typer.Option(min=0, help="First keys that are always kept.")] = None,
        tokens: Annotated[int, tokens] = 512,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
        plot: Annotated[Path | None, picture] = None,
    ) -> None:
        """Prune the attention of a model, and report what that loses on a text."""
        if budget <= 0 or (budget > 1 and budget != int(budget)):
            raise typer.BadParameter(f"--budget is {budget}, expected a whole number of slots or a share in (0, 1]")
        options = {"scores": scores.value, "summaries": summaries, "window": window, "sinks": sinks}
        with _errors_in_one_line():
            inquiry = models.Inquiry(model, text, tokens, as_json, plot)
            models.prune_report(inquiry, int(budget) if budget > 1 else budget, options)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Report in one line what bad data, missing packages or a full disk bring about."""
    try:
        yield
    except MemoryError:
        fail("not enough memory; split the file by heads or by layers")
    except PermissionError as error:
        fail(f"{error.filename}: no permission; choose another place or change its permissions")
    except (OSError, ValueError, ImportError) as error:
        fail(str(error))
