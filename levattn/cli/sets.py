"""``levattn universal-set``: the universal sets of the keys in a file."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

import levattn
from levattn.cli.output import (
    INTERRUPTED,
    VACUOUS,
    VACUOUS_IN_GENERAL,
    check_output,
    fail,
    new_console,
    print_json,
    table_of,
)
from levattn.functions import NAMES, AttentionFunction, Softmax, function_named, is_square
from levattn.io import replace_file
from levattn.io.source import whole_keys
from levattn.sets.result import saved_arrays

ALLOWED = f"{NAMES} (without a radius only with --queries)"


@dataclass(frozen=True)
class Function:
    """An attention function and the text that named it."""

    text: str
    f: AttentionFunction | Softmax

    @property
    def is_square(self) -> bool:
        """Whether f is x², whose scores are leverage scores."""
        return is_square(self.f)


def parse_function(text: str, *, for_queries: bool = False) -> Function:
    """Return the function that `text` names; a wrong text is an error of the command line.

    for_queries: whether the set is for queries like given ones. Then softmax needs no radius.
    """
    import typer

    try:
        if text == "softmax" and not for_queries:
            raise ValueError(
                "softmax needs the largest norm of a query, as in softmax:4, or a sample of the queries with --queries"
            )
        return Function(text, function_named(text))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}. Allowed are {ALLOWED}", param_hint="--function") from None


_SCHEMA = "levattn.universal-set/1"
_INDICES_SHOWN = 12
_COLUMNS = {
    "item": "item",
    "n": "n",
    "d": "d",
    "rank": "rank",
    "condition": "condition:.3g",
    "ε": "epsilon:.4g",
    "|U|": "size",
    "bound": "size_bound:.4g",
    "vacuous": "is_vacuous",
    "guarantee": "guarantee",
}
# For sets with coverage, which have no bound that could be vacuous
_COLUMNS_WITH_COVERAGE = {heading: key for heading, key in _COLUMNS.items() if heading != "vacuous"} | {
    "coverage": "coverage:.4g",
    "mass": "mass:.4g",
    "queries": "threshold_queries",
}

_PIPED = re.compile(r"\S*/stdin\.(npy|npz|safetensors)\b")  # the file of what came by a pipe
_HEAD = 9  # bytes, by which these formats are known:
_MAGIC = {".npy": b"\x93NUMPY", ".npz": b"PK\x03\x04", ".safetensors": b"{"}

SetMethod = Literal["auto", "gram", "qr", "svd"]


@dataclass(frozen=True)
class Request:
    """The options of the command line."""

    files: tuple[Path, ...]
    tensor: str | None
    epsilon: float | None
    size: int | None
    function: Function
    queries: Path | None
    coverage: float | None
    mass: float | None
    queries_tensor: str | None
    center: bool
    duplicates: float | None
    method: SetMethod
    memory: int | None  # in bytes
    checkpoint: Path | None
    scheduler: str | None
    shown: str | None = None  # the name of a file that is not the user's

    @property
    def in_passes(self) -> bool:
        """Whether the files can be read in two passes, without loading them."""
        plain = self.function.is_square and not self.center and self.duplicates is None and self.queries is None
        return plain and self.method in ("auto", "gram")

    @property
    def name(self) -> str:
        """The name of the keys in messages and plots."""
        if self.shown is not None:
            return self.shown
        return str(self.files[0]) if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1} more"

    @property
    def paths(self) -> Path | tuple[Path, ...]:
        """The files as an argument of `open_keys`."""
        return self.files[0] if len(self.files) == 1 else self.files


@contextmanager
def read_from_pipe(request: Request) -> Iterator[Request]:
    """Yield the request; if it names -, save the keys of standard input in a temporary file."""
    pipe = Path("-")
    if pipe not in request.files:
        yield request
        return
    if len(request.files) > 1:
        fail("- stands for standard input; expected no other file with it")
    begin = sys.stdin.buffer.read(_HEAD)
    suffix = next((suffix for suffix, magic in _MAGIC.items() if magic in begin), None)
    if suffix is None:
        fail("standard input holds no keys; expected a file of .npy, .npz or .safetensors")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"stdin{suffix}")
        with path.open("wb") as file:
            file.write(begin)
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield replace(request, files=(path,), shown="standard input")


def find_sets(request: Request, as_json: bool, plot: Path | None, output: Path | None, *, title: bool = False) -> None:
    """Run the command; with `title`, name the array above its table."""
    _check_targets(request, plot, output)
    source = _opened(request.paths, request.tensor, request.memory)
    if request.size is not None and request.size > source.shape[-2]:
        import typer

        raise typer.BadParameter(f"--size is {request.size}, but {request.name} holds {source.shape[-2]} keys")
    try:
        if request.queries is not None:
            sets: levattn.UniversalSet | levattn.StreamedSet = _found_for_queries(request, request.queries, source)
        else:
            sets = _found(request, source) if request.scheduler is None else _found_by_workers(request)
    except levattn.NonFiniteError as error:  # its text names an argument and options that the program lacks
        problem = str(error).partition(";")[0].partition(" of the keys")[0].removeprefix("K ")
        fail(f"{request.name} {problem}; remove these rows and save the file again")
    except KeyboardInterrupt:
        if request.checkpoint is None or not request.checkpoint.exists():
            raise
        fail(
            f"interrupted; {request.checkpoint} holds the progress, so run the same command again to continue",
            INTERRUPTED,
        )
    picture = None if plot is None else _spectrum(sets, request, plot.suffix)
    if output is not None:
        with replace_file(output) as stream:
            np.savez(stream, **_arrays(sets, request.function))
    if plot is not None and picture is not None:
        with replace_file(plot) as stream:
            stream.write(picture)
    reports = _set_reports(sets, request.function)
    if as_json:
        print_json(_SCHEMA, _request_report(request, source) | {"sets": reports})
    else:
        if title:
            new_console().print(f"{request.name}: {request.tensor}")
        _print_reports(reports, source, request)


def _found(request: Request, source: levattn.KeySource) -> levattn.UniversalSet:
    with nullcontext(source) if request.in_passes else whole_keys(source) as keys:
        wish: dict[str, Any] = {"epsilon": request.epsilon, "size": request.size, "method": request.method}
        if request.in_passes:
            bar = True if sys.stderr.isatty() else None
            return levattn.scan_set(keys, **wish, progress=bar, checkpoint=request.checkpoint)
        found = levattn.universal_set(keys, **wish, f=request.function.f, center=request.center)
        if request.duplicates is None:
            return found
        return found.with_groups(keys, levattn.near_duplicates(keys, angle=request.duplicates))


def _found_for_queries(request: Request, path: Path, source: levattn.KeySource) -> levattn.UniversalSet:
    """Return the set for queries like the queries in a file; errors of that file name it."""
    queries = _opened(path, request.queries_tensor, None, "--queries-tensor")
    try:
        with whole_keys(queries) as sample:
            return levattn.covering_set(
                source,
                sample,
                request.epsilon,
                size=request.size,
                f=request.function.f,
                coverage=request.coverage or 0.0,  # the options of the command go together
                mass=request.mass,
            )
    except ValueError as error:
        if not str(error).startswith("queries "):
            raise
        problem = str(error).replace(" K has ", " the keys have ")
        if isinstance(error, levattn.NonFiniteError):
            problem = problem.partition("; ")[0] + "; remove these rows and save the file again"
        fail(f"{path}: {problem}")


def _found_by_workers(request: Request) -> levattn.StreamedSet:
    """Return the set that the workers of a scheduler find, with scores of its keys only."""
    from levattn.distributed.dask import universal_set_of_files

    try:
        return universal_set_of_files(
            request.paths,
            request.epsilon or 0.0,
            tensor=request.tensor,
            f=request.function.f,
            memory=request.memory,
            scheduler=request.scheduler,
        )
    except OSError as error:
        if error.errno is not None:  # of a file
            raise
        fail(f"{error}; check --scheduler, and whether it is running")


def _opened(
    paths: Path | tuple[Path, ...], tensor: str | None, memory: int | None, option: str = "--tensor"
) -> levattn.KeySource:
    """Return the keys or the queries; an error names options, not arguments."""
    try:
        return levattn.open_keys(paths, tensor=tensor, memory=memory)
    except levattn.KeyFileError as error:
        problem, semicolon, remedy = str(error).rpartition("; ")
        remedy = re.sub(r"\btensor\b=?", option, remedy)
        if option != "--tensor":
            remedy = remedy.replace("the keys", "the queries")
        fail(_PIPED.sub("standard input", problem.replace("got tensor=", f"got {option} ") + semicolon + remedy))


def _check_targets(request: Request, plot: Path | None, output: Path | None) -> None:
    """End the program if it cannot write an output file, or would overwrite a file in use."""
    named = ((plot, "--plot"), (output, "--output"), (request.checkpoint, "--checkpoint"))
    targets = [(path, option) for path, option in named if path is not None]
    read = [*((file, "keys") for file in request.files), *([(request.queries, "queries")] if request.queries else [])]
    for path, option in targets:
        check_output(path, option)
        for file, content in read:
            if path.exists() and file.exists() and path.samefile(file):
                fail(f"{path} is the file of the {content}, which {option} would overwrite; name another")
    for (path, option), (other, another) in itertools.combinations(targets, 2):
        if os.path.realpath(path) == os.path.realpath(other):
            fail(f"{path} and {other} are the same file; name two with {option} and {another}")


def _spectrum(sets: Any, request: Request, suffix: str) -> bytes:
    from levattn import plots

    for_queries = request.queries is not None
    figure, ((ax,),) = plots.new_figure()
    plots.LeverageSpectrumDisplay.from_scores(
        sets.scores,
        epsilon=None if for_queries else request.epsilon,  # scores of a sample are not compared with it
        rank=sets.total_bound,
        sizes=sets.sizes,
        certified=not (request.function.is_square or for_queries),
        ax=ax,
    )
    if for_queries:
        ax.set_ylabel("score by queries")
        if sets.scores.ndim == 1:  # of a batch the line is the median
            ax.lines[0].set_label("scores by queries")
            ax.legend(loc="best", fontsize="small")
    name = request.files[0].name if len(request.files) == 1 and request.shown is None else request.name
    title = name if request.tensor is None else f"{name}: {request.tensor}"
    ax.set_title(title if request.function.is_square else f"{title} ({request.function.text})")
    return plots.figure_bytes(figure, suffix)


def _arrays(sets: levattn.UniversalSet | levattn.StreamedSet, function: Function) -> dict[str, Any]:
    """Return the contents of a set as arrays that need no pickling."""
    if isinstance(sets, levattn.StreamedSet):
        arrays = {name: getattr(sets, name) for name in ("epsilon", "guarantee", "sizes")}
        return arrays | {"indices": sets._joined("indices"), "member_scores": sets._joined("scores")}
    return saved_arrays(sets) | {"f": np.asarray(sets.f if isinstance(sets.f, int | float) else function.text)}


def _of_coverage(sets: levattn.UniversalSet | levattn.StreamedSet) -> dict[str, Any]:
    """Return the figures that only sets with coverage have; None for other sets."""
    if isinstance(sets, levattn.StreamedSet) or sets.needs is None:
        return dict.fromkeys(("coverage", "mass", "threshold_queries"))
    no_bound = {"size_bound": None, "is_vacuous": np.zeros(sets.batch, np.bool_)}
    return no_bound | {"coverage": sets.coverage, "mass": sets.mass, "threshold_queries": sets.needs.shape[-1]}


def _request_report(request: Request, source: levattn.KeySource) -> dict[str, Any]:
    return {
        "file": request.name if len(request.files) == 1 else [str(file) for file in request.files],
        "tensor": source.tensor,
        "shape": source.shape,
        "dtype": source.dtype.name,
        "function": request.function.text,
        "method": request.method,
        "center": request.center,
        "duplicates": request.duplicates,
        "queries": None if request.queries is None else str(request.queries),
        "queries_tensor": request.queries_tensor,
    }


def _set_reports(sets: levattn.UniversalSet | levattn.StreamedSet, function: Function) -> list[dict[str, Any]]:
    """Return one report per matrix; `item` is its place in the batch, empty for a single matrix."""
    columns = {name: getattr(sets, name) for name in ("epsilon", "rank", "size_bound", "is_vacuous")}
    if isinstance(sets, levattn.StreamedSet):
        batch, columns["condition"] = sets.batch, sets.factor.condition.reshape(sets.batch)
        of_items = [keys.indices for keys in sets.items]
    else:
        batch, columns["condition"] = sets.mask.shape[:-1], sets.condition
        of_items = [np.flatnonzero(sets.mask[item]) for item in np.ndindex(batch)]
    columns |= _of_coverage(sets)
    columns = {name: np.broadcast_to(column, batch) for name, column in columns.items()}
    return [
        {"item": item, "size": len(indices)}
        | {name: column.item(*item) for name, column in columns.items()}
        | {"guarantee": sets.guarantee, "f": function.text, "indices": indices.tolist()}
        | {"hidden_groups": _group_reports(sets, item)}
        for item, indices in zip(np.ndindex(batch), of_items, strict=True)
    ]


def _group_reports(sets: levattn.UniversalSet | levattn.StreamedSet, item: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the score and the keys of each group that can receive ε although none of its keys can."""
    if isinstance(sets, levattn.StreamedSet):
        return []
    return [
        {
            "score": float(sets.group_scores[item][group]),
            "indices": np.flatnonzero(sets.groups[item] == group).tolist(),
        }
        for group in np.flatnonzero(sets.hidden_groups[item])
    ]


def _print_reports(reports: list[dict[str, Any]], source: levattn.KeySource, request: Request) -> None:
    function = request.function
    n, d = source.shape[-2:]
    rows = [report | {"item": ",".join(map(str, report["item"])) or "-", "n": n, "d": d} for report in reports]
    console = new_console()
    console.print(table_of(rows, _COLUMNS if request.queries is None else _COLUMNS_WITH_COVERAGE))
    if request.queries is not None:
        console.print(f"function: {function.text}; {_promise(request)}")
    elif not function.is_square:
        console.print(f"function: {function.text}; scores are certified bounds")
    if len(reports) == 1:
        indices = reports[0]["indices"]
        shown = ", ".join(map(str, indices[:_INDICES_SHOWN])) or "none"
        rest = len(indices) - _INDICES_SHOWN
        console.print(f"keys: {shown}" + (f" and {rest} more (all with --json or --output)" if rest > 0 else ""))
    hidden = [group for report in reports for group in report["hidden_groups"]]
    if hidden:
        count, keys = len(hidden), sum(len(group["indices"]) for group in hidden)
        console.print(f"hidden in near-duplicates: {count} groups of {keys} keys, heavy only as groups")
    if any(report["is_vacuous"] for report in reports):
        console.print(VACUOUS if function.is_square else VACUOUS_IN_GENERAL)


def _promise(request: Request) -> str:
    """Return the promise of a set with coverage for a new query."""
    if request.mass is not None:
        what = f"gives the set at least {request.mass:.4g} of its attention"
    else:
        what = f"gives {'less than' if request.size is None else 'at most'} ε to each key outside"
    return (
        f"a new query, exchangeable with the queries of {request.queries}, {what} with probability "
        f"{request.coverage:.4g} or more, in the mean over samples of queries"
    )
