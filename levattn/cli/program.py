"""Shared code of all commands: the help of the program, one line for each error, and the exit status."""

import logging
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]
from typer.core import TyperCommand, TyperGroup

import levattn
from levattn.cli.output import (
    CLOSED,
    WRONG_COMMAND_LINE,
    TerminatedError,
    drop_rest,
    encodable,
    ending_of,
    fail,
    is_broken,
    of_system,
    prepare_streams,
    report,
)

# Later versions of typer contain click, and earlier ones import it: this is the class of either.
_UsageError: Any = typer.BadParameter.__base__

_HELP = """\
Find the few keys of an attention head that any query can attend to heavily.

A universal set holds every key that some query can give an attention score of at least ε. levattn finds it from the
keys alone, by leverage scores, and it is exact for attention with f(x) = x².

Begin with `levattn demo`. The commands universal-set and scores take keys in files; inspect and prune-report take a
Hugging Face model and a text. profile, compress and ask read a text once with a decoder, keep a part of its KV cache,
and answer questions from that part; evaluate tells which part is enough.

\b
Examples:
  levattn demo
  levattn universal-set keys.npy --epsilon 0.1
  levattn scores table.parquet --id name -o scores.csv
  levattn inspect MODEL --text book.txt
  levattn prune-report MODEL --text book.txt --budget 0.2
  levattn profile MODEL -o heads.json
  levattn compress MODEL --text book.txt --heads heads.json -o book.safetensors
  levattn ask MODEL book.safetensors "Who comes home in the end?"
"""
_EPILOG = """\
\b
Exit status:
  0    done
  1    the data or the machine did not allow it; one line says why
  2    the command line is wrong
  130  interrupted (Ctrl-C)
  141  the reader of the output closed it, as `head` does
  143  terminated (SIGTERM)

`levattn COMMAND --help` explains a command: examples, options, and its output. The environment variable
LEVATTN_NUM_THREADS sets the number of threads, by default one for each core.
"""


class Command(TyperCommand):
    """A command whose help lists its options under headings: the `rich_help_panel` of each."""

    def get_help(self, ctx: Any) -> str:
        """Return the help, as standard output can show it."""
        return encodable(super().get_help(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options of the help."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                otherwise = "Arguments" if param.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(param, "rich_help_panel", None) or otherwise, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line; a path is not empty, and an option of one value does not come twice."""
        empty = any(not arg or (arg.startswith("--") and arg.endswith("=")) for arg in args)
        words = list(args)
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:  # as completion reads
            self._check_repetition(ctx, words)
        values = [each for value in ctx.params.values() for each in (value if isinstance(value, list) else [value])]
        if empty and Path() in values:
            raise typer.BadParameter("a path is empty, perhaps an unset variable; expected a value", ctx=ctx)
        return rest

    def _check_repetition(self, ctx: Any, args: list[str]) -> None:
        """Raise if an option of one value comes again, because click would drop all but the last."""
        options: list[Any] = [param for param in self.get_params(ctx) if param.param_type_name == "option"]
        given = Counter(param.name for param in self.make_parser(ctx).parse_args(args)[2])
        for param in options:
            count = given[param.name]
            if count > 1 and not (param.multiple or param.is_flag):
                several = " with commas between the names" if "," in (param.metavar or "") else ""
                raise typer.BadParameter(f"{param.opts[0]} comes {count} times; give it once{several}", ctx=ctx)


class _Program(TyperGroup):
    """All commands. An error is one line on standard error."""

    def get_help(self, ctx: Any) -> str:
        """Return the help, as standard output can show it."""
        return encodable(super().get_help(ctx))

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command line, and end the process with its status."""
        alone = extra.pop("standalone_mode", True)
        extra["standalone_mode"] = False
        if not alone:
            return super().main(*args, **extra)
        prepare_streams()
        try:
            with _errors_in_one_line(), _ended_by_signal(), _warnings_in_one_line(), _notes_in_one_line():
                status = super().main(*args, **extra)
        except _UsageError as error:
            message = error.format_message().removeprefix("Invalid value: ").rstrip(".")
            command = "levattn" if error.ctx is None else error.ctx.command_path
            fail(f"{message}{' See' if message.endswith('?') else '; see'} {command} --help", WRONG_COMMAND_LINE)
        sys.exit(status if isinstance(status, int) else 0)

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Read the command line, and show the help or the version; a closed pipe must not reach typer."""
        with _errors_in_one_line():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command; catch Ctrl-C here, before typer ends the process in silence."""
        with _errors_in_one_line():
            return super().invoke(ctx)


def new_app() -> typer.Typer:
    """Return the program without its commands.

    Returns
    -------
    typer.Typer
        The application.
    """
    # typer's options that install completion cannot name a shell, and they edit its startup files. So the command
    # `completion` prints the script instead. The script still needs typer's code that answers it.
    completion_init()
    app = typer.Typer(
        name="levattn",
        cls=_Program,
        help=_HELP,
        epilog=_EPILOG,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    def show_version(asked: bool) -> None:
        if asked:
            typer.echo(f"levattn {levattn.__version__}")
            raise typer.Exit

    @app.callback(invoke_without_command=True, help=_HELP, epilog=_EPILOG)
    def program(
        ctx: typer.Context,
        _version: Annotated[
            bool, typer.Option("--version", is_eager=True, callback=show_version, help="Show the version.")
        ] = False,
    ) -> None:
        if ctx.invoked_subcommand is None:
            typer.echo(ctx.get_help())

    return app


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Report errors of bad data, missing packages or a full disk in one line."""
    try:
        yield
        sys.stdout.flush()
    except SystemExit as ending:  # with a status of its own, which is no success where text is lost
        if not ending.code:
            with _errors_in_one_line():
                pass
        elif is_broken(sys.stdout):
            drop_rest(sys.stdout)
        raise
    except BrokenPipeError:
        drop_rest(sys.stdout)
        sys.exit(CLOSED)
    except KeyboardInterrupt as error:
        fail(*ending_of(error))
    except MemoryError:
        fail("not enough memory; give a smaller file or fewer --tokens")
    except OSError as error:
        if is_broken(sys.stdout):
            drop_rest(sys.stdout)
        fail(of_system(error))
    except (ValueError, ImportError) as error:
        fail(str(error))


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """End by SIGTERM as by Ctrl-C, so that files are whole and messages come; a handler of the caller stays."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(*_: object) -> None:
        raise TerminatedError

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Report levattn's own warnings in one line, and show others as Python does."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def in_one_line(message: Any, category: Any, *others: Any, **more: Any) -> None:
            if issubclass(category, levattn.AxesWarning | levattn.CacheWarning | levattn.RankWarning):
                report(str(message))
            else:
                show(message, category, *others, **more)

        warnings.showwarning = in_one_line
        yield


class _Notes(logging.Handler):
    """Shows log messages of the library as notes of the program."""

    def emit(self, record: logging.LogRecord) -> None:
        report(record.getMessage())


@contextmanager
def _notes_in_one_line() -> Iterator[None]:
    """Show log messages of the library, such as the note that a long first call compiles."""
    log, notes = logging.getLogger("levattn"), _Notes()
    level = log.level
    log.addHandler(notes)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(notes)
        log.setLevel(level)
