"""``levattn universal-set``: the universal sets of the keys in a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import levattn
from levattn.cli.files import KeyFiles, check_targets, member_rows
from levattn.cli.output import (
    VACUOUS,
    VACUOUS_IN_GENERAL,
    fail,
    new_console,
    print_json,
    table_of,
)
from levattn.functions import NAMES, AttentionFunction, Softmax, function_named, is_square
from levattn.io import replace_file
from levattn.io.common import printable
from levattn.io.source import whole_keys
from levattn.io.tables import TEXTS
from levattn.io.written import write_table
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
_TABLES = (".parquet", *TEXTS)
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

SetMethod = Literal["auto", "gram", "qr", "svd"]


@dataclass(frozen=True)
class Request:
    """The options of the command line."""

    keys: KeyFiles
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
    checkpoint: Path | None
    scheduler: str | None

    @property
    def in_passes(self) -> bool:
        """Whether the files can be read in two passes, without loading them."""
        plain = self.function.is_square and not self.center and self.duplicates is None and self.queries is None
        return plain and self.method in ("auto", "gram")


@dataclass(frozen=True)
class Outputs:
    """The forms of the result."""

    as_json: bool
    plot: Path | None
    output: Path | None
    scores: Path | None
    title: bool = False  # whether the name of the array stands above its table


def find_sets(request: Request, outputs: Outputs) -> None:
    """Run the command."""
    keys, plot, output = request.keys, outputs.plot, outputs.output
    targets = (
        (plot, "--plot"),
        (output, "--output"),
        (outputs.scores, "--scores"),
        (request.checkpoint, "--checkpoint"),
    )
    check_targets(targets, keys.files, request.queries)
    source = keys.opened()
    if request.size is not None and request.size > source.shape[-2]:
        import typer

        raise typer.BadParameter(f"--size is {request.size}, but {keys.name} holds {source.shape[-2]} keys")
    with keys.working(request.checkpoint):
        if request.queries is not None:
            sets: levattn.UniversalSet | levattn.StreamedSet = _found_for_queries(request, request.queries, source)
        else:
            sets = _found(request, source) if request.scheduler is None else _found_by_workers(request, source)
        members = _Members.of(sets, source)
    picture = None if plot is None else _spectrum(sets, request, plot.suffix)
    if output is not None:
        with replace_file(output) as stream:
            np.savez(stream, **_arrays(sets, request.function, members))
    if outputs.scores is not None:
        write_table(outputs.scores, member_rows(members.batch, members.indices, members.ids, members.scores))
    if plot is not None and picture is not None:
        with replace_file(plot) as stream:
            stream.write(picture)
    reports = _set_reports(sets, request.function, members)
    if outputs.as_json:
        print_json(_SCHEMA, _request_report(request, source) | {"sets": reports})
    else:
        if outputs.title:
            new_console().print(f"{keys.name}: {keys.tensor}")
        _print_reports(reports, source, request)


@dataclass(frozen=True)
class _Members:
    """The keys of the sets of a batch: their indices and scores, and the identifiers of the one matrix of a table."""

    batch: tuple[int, ...]
    indices: list[npt.NDArray[Any]]
    scores: list[npt.NDArray[Any]]
    ids: npt.NDArray[Any] | None

    @classmethod
    def of(cls, sets: levattn.UniversalSet | levattn.StreamedSet, source: levattn.KeySource) -> _Members:
        """Return the members of sets, with their identifiers if the source has some."""
        if isinstance(sets, levattn.StreamedSet):
            batch, found = sets.batch, [(keys.indices, keys.scores) for keys in sets.items]
        else:
            batch, all_scores = sets.mask.shape[:-1], np.asarray(sets.scores)
            every = [(item, np.flatnonzero(sets.mask[item])) for item in np.ndindex(batch)]
            found = [(indices, all_scores[item][indices]) for item, indices in every]
        indices, scores = [each for each, _ in found], [each for _, each in found]
        return cls(batch, indices, scores, None if source.id is None else source.ids(indices[0]))


def _found(request: Request, source: levattn.KeySource) -> levattn.UniversalSet:
    wish: dict[str, Any] = {"epsilon": request.epsilon, "size": request.size, "method": request.method}
    if request.in_passes:
        wish |= {"weights": request.keys.weights_of_rows()}
        if source.sparse and request.checkpoint is None:
            return levattn.universal_set(source, **wish)
        bar = True if sys.stderr.isatty() else None
        return levattn.scan_set(source, **wish, progress=bar, checkpoint=request.checkpoint)
    with whole_keys(source) as keys:
        found = levattn.universal_set(keys, **wish, f=request.function.f, center=request.center)
        if request.duplicates is None:
            return found
        return found.with_groups(keys, levattn.near_duplicates(keys, angle=request.duplicates))


def _found_for_queries(request: Request, path: Path, source: levattn.KeySource) -> levattn.UniversalSet:
    """Return the set for queries like the queries in a file."""
    with queries_of(path, request.queries_tensor, request.keys, source) as sample:
        return levattn.covering_set(
            source,
            sample,
            request.epsilon,
            size=request.size,
            f=request.function.f,
            coverage=request.coverage or 0.0,  # the options of the command go together
            mass=request.mass,
        )


@contextmanager
def queries_of(path: Path, tensor: str | None, keys: KeyFiles, source: levattn.KeySource) -> Iterator[Any]:
    """Yield the queries in a file, in the columns of the keys where both are tables; their errors name the file."""
    columns = source.columns if path.suffix.lower() in _TABLES else None
    queries = KeyFiles((path,), tensor, columns, dtype=keys.dtype).opened("--queries-tensor")
    try:
        with whole_keys(queries) as sample:
            yield sample
    except ValueError as error:
        if not str(error).startswith("queries "):
            raise
        problem = str(error).replace(" K has ", " the keys have ")
        if isinstance(error, levattn.NonFiniteError):
            problem = problem.partition("; ")[0] + "; remove these rows and save the file again"
        fail(f"{path}: {problem}")


def _found_by_workers(request: Request, source: levattn.KeySource) -> levattn.StreamedSet:
    """Return the set that the workers of a scheduler find, with scores of its keys only."""
    from levattn.distributed.dask import universal_set_of_files

    try:
        return universal_set_of_files(source, request.epsilon or 0.0, f=request.function.f, client=request.scheduler)
    except OSError as error:
        if error.errno is not None:  # of a file
            raise
        fail(f"{error}; check --scheduler, and whether it is running")


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
    keys = request.keys
    name = keys.files[0].name if len(keys.files) == 1 and keys.shown is None else keys.name
    title = name if keys.tensor is None else f"{name}: {keys.tensor}"
    ax.set_title(title if request.function.is_square else f"{title} ({request.function.text})")
    return plots.figure_bytes(figure, suffix)


def _arrays(sets: levattn.UniversalSet | levattn.StreamedSet, function: Function, members: _Members) -> dict[str, Any]:
    """Return the contents of a set as arrays that need no pickling."""
    if members.ids is not None:
        return _arrays(sets, function, replace(members, ids=None)) | {"ids": members.ids}
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
    return request.keys.report | {
        "tensor": source.tensor,
        "columns": source.columns,
        "shape": source.shape,
        "dtype": source.dtype.name,
        "function": request.function.text,
        "method": request.method,
        "center": request.center,
        "duplicates": request.duplicates,
        "queries": None if request.queries is None else str(request.queries),
        "queries_tensor": request.queries_tensor,
    }


def _set_reports(
    sets: levattn.UniversalSet | levattn.StreamedSet, function: Function, members: _Members
) -> list[dict[str, Any]]:
    """Return one report per matrix; `item` is its place in the batch, empty for a single matrix."""
    columns = {name: getattr(sets, name) for name in ("epsilon", "rank", "size_bound", "is_vacuous")}
    batch = members.batch
    if isinstance(sets, levattn.StreamedSet):
        columns["condition"] = sets.factor.condition.reshape(batch)
    else:
        columns["condition"] = sets.condition
    columns |= _of_coverage(sets)
    columns = {name: np.broadcast_to(column, batch) for name, column in columns.items()}
    return [
        {"item": item, "size": len(indices)}
        | {name: column.item(*item) for name, column in columns.items()}
        | {"guarantee": sets.guarantee, "f": function.text, "indices": indices.tolist()}
        | {"ids": None if members.ids is None else members.ids.tolist()}
        | {"hidden_groups": _group_reports(sets, item)}
        for item, indices in zip(np.ndindex(batch), members.indices, strict=True)
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
        names = reports[0]["ids"]
        first = zip(indices[:_INDICES_SHOWN], (names or indices)[:_INDICES_SHOWN], strict=True)
        shown = (
            ", ".join(str(row) if names is None else f"{row} ({printable(str(name))})" for row, name in first)
            or "none"
        )
        rest = len(indices) - _INDICES_SHOWN
        console.print(
            f"keys: {shown}" + (f" and {rest} more (all with --json, --output or --scores)" if rest > 0 else "")
        )
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
