"""``levattn universal-set``: the sets of the keys in a file."""

import itertools
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

import levattn
from levattn.cli.function import Function
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
from levattn.io import replace_file

__all__ = ["Request", "SetMethod", "find_sets"]

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

SetMethod = Literal["auto", "gram", "qr", "svd"]


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    files: tuple[Path, ...]
    tensor: str | None
    epsilon: float | None
    size: int | None
    function: Function
    center: bool
    duplicates: float | None
    method: SetMethod
    memory: int | None  # in bytes
    checkpoint: Path | None
    scheduler: str | None

    @property
    def in_passes(self) -> bool:
        """Whether the files can be read in two passes, without loading them."""
        plain = self.function.is_square and not self.center and self.duplicates is None
        return plain and self.method in ("auto", "gram")

    @property
    def name(self) -> str:
        """What messages and pictures call the keys."""
        return str(self.files[0]) if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1} more"

    @property
    def paths(self) -> Path | tuple[Path, ...]:
        """The files as `open_keys` takes them."""
        return self.files[0] if len(self.files) == 1 else self.files


def find_sets(request: Request, as_json: bool, plot: Path | None, output: Path | None) -> None:
    """Run the command."""
    _check_targets(request, plot, output)
    source = _opened(request)
    if request.size is not None and request.size > source.shape[-2]:
        import typer

        raise typer.BadParameter(f"--size is {request.size}, but {request.name} holds {source.shape[-2]} keys")
    try:
        sets = _found(request, source) if request.scheduler is None else _found_by_workers(request)
    except levattn.NonFiniteError as error:  # which speaks of an argument and of options that are not here
        problem = str(error).partition(";")[0].partition(", counted")[0].removeprefix("K ")
        fail(f"{request.name} {problem}; remove these rows and save the file again")
    except KeyboardInterrupt:
        if request.checkpoint is None or not request.checkpoint.exists():
            raise
        fail(
            f"interrupted; {request.checkpoint} tells how far it came, run the same command again to go on",
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
        _print_reports(reports, source, request.function)


def _found(request: Request, source: levattn.KeySource) -> levattn.UniversalSet:
    keys = source if request.in_passes else source.load()
    groups = None if request.duplicates is None else levattn.near_duplicates(keys, angle=request.duplicates)
    return levattn.universal_set(
        keys,
        request.epsilon,
        size=request.size,
        f=request.function.f,
        method=request.method,
        center=request.center,
        groups=groups,
        progress=True if request.in_passes and sys.stderr.isatty() else None,
        checkpoint=request.checkpoint,
    )


def _found_by_workers(request: Request) -> levattn.StreamedSet:
    """Return the set that the workers of a scheduler find: it knows the scores of its own keys alone."""
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


def _opened(request: Request) -> levattn.KeySource:
    """Return the keys, or an error that names options, not arguments."""
    try:
        return levattn.open_keys(request.paths, tensor=request.tensor, memory=request.memory)
    except levattn.KeyFileError as error:
        problem, semicolon, remedy = str(error).rpartition("; ")
        remedy = re.sub(r"\btensor\b=?", "--tensor", remedy)
        fail(problem.replace("got tensor=", "got --tensor ") + semicolon + remedy)


def _check_targets(request: Request, plot: Path | None, output: Path | None) -> None:
    """End the program if a file that it is to write cannot be written, or would replace another that is in use."""
    named = ((plot, "--plot"), (output, "--output"), (request.checkpoint, "--checkpoint"))
    targets = [(path, option) for path, option in named if path is not None]
    for path, option in targets:
        check_output(path, option)
        if path.exists() and any(file.exists() and path.samefile(file) for file in request.files):
            fail(f"{path} is the file of the keys, which {option} would overwrite; name another")
    for (path, option), (other, another) in itertools.combinations(targets, 2):
        if os.path.realpath(path) == os.path.realpath(other):
            fail(f"{path} and {other} are the same file; name two with {option} and {another}")


def _spectrum(sets: Any, request: Request, suffix: str) -> bytes:
    from levattn import plots

    figure, ((ax,),) = plots.new_figure()
    plots.LeverageSpectrumDisplay.from_scores(
        sets.scores,
        epsilon=request.epsilon,
        rank=sets.total_bound,
        sizes=sets.sizes,
        certified=not request.function.is_square,
        ax=ax,
    )
    name = request.files[0].name if len(request.files) == 1 else request.name
    title = name if request.tensor is None else f"{name}: {request.tensor}"
    ax.set_title(title if request.function.is_square else f"{title} ({request.function.text})")
    return plots.figure_bytes(figure, suffix)


def _arrays(sets: levattn.UniversalSet | levattn.StreamedSet, function: Function) -> dict[str, Any]:
    """Return what a set says as arrays, none of which needs pickling."""
    if isinstance(sets, levattn.StreamedSet):
        arrays = {name: getattr(sets, name) for name in ("epsilon", "guarantee", "sizes")}
        of_keys = ("indices", "scores")
        return arrays | {name: np.concatenate([getattr(item, name) for item in sets.items]) for name in of_keys}
    of_all = ("mask", "scores", "sizes")
    names = (*of_all, "epsilon", "guarantee", "rank", "size_bound", "is_vacuous", "condition")
    arrays = {name: np.asarray(getattr(sets, name)) for name in names}
    arrays["f"] = np.asarray(sets.f if isinstance(sets.f, int | float) else function.text)
    if sets.groups is not None:
        arrays |= {"groups": np.asarray(sets.groups), "group_scores": np.asarray(sets.group_scores)}
    return arrays | {"indices": sets.indices} if sets.mask.ndim == 1 else arrays


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
    }


def _set_reports(sets: levattn.UniversalSet | levattn.StreamedSet, function: Function) -> list[dict[str, Any]]:
    """One report per matrix; `item` is its place in the batch, empty for a single matrix."""
    columns = {name: getattr(sets, name) for name in ("epsilon", "rank", "size_bound", "is_vacuous")}
    if isinstance(sets, levattn.StreamedSet):
        batch, columns["condition"] = sets.batch, sets.factor.condition.reshape(sets.batch)
        of_items = [keys.indices for keys in sets.items]
    else:
        batch, columns["condition"] = sets.mask.shape[:-1], sets.condition
        of_items = [np.flatnonzero(sets.mask[item]) for item in np.ndindex(batch)]
    columns = {name: np.broadcast_to(column, batch) for name, column in columns.items()}
    return [
        {"item": item, "size": len(indices)}
        | {name: column[item].item() for name, column in columns.items()}
        | {"guarantee": sets.guarantee, "f": function.text, "indices": indices.tolist()}
        | {"hidden_groups": _group_reports(sets, item)}
        for item, indices in zip(np.ndindex(batch), of_items, strict=True)
    ]


def _group_reports(sets: levattn.UniversalSet | levattn.StreamedSet, item: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return score and keys of each group that can receive ε although none of its keys can."""
    if isinstance(sets, levattn.StreamedSet):
        return []
    return [
        {
            "score": float(sets.group_scores[item][group]),
            "indices": np.flatnonzero(sets.groups[item] == group).tolist(),
        }
        for group in np.flatnonzero(sets.hidden_groups[item])
    ]


def _print_reports(reports: list[dict[str, Any]], source: levattn.KeySource, function: Function) -> None:
    n, d = source.shape[-2:]
    rows = [report | {"item": ",".join(map(str, report["item"])) or "-", "n": n, "d": d} for report in reports]
    console = new_console()
    console.print(table_of(rows, _COLUMNS))
    if not function.is_square:
        console.print(f"function: {function.text}; scores are certified bounds")
    if len(reports) == 1:
        indices = reports[0]["indices"]
        shown = ", ".join(map(str, indices[:_INDICES_SHOWN])) or "none"
        rest = len(indices) - _INDICES_SHOWN
        console.print(f"keys: {shown}" + (f" and {rest} more (all with --json or --output)" if rest > 0 else ""))
    hidden = [group for report in reports for group in report["hidden_groups"]]
    if hidden:
        count, keys = len(hidden), sum(len(group["indices"]) for group in hidden)
        console.print(f"hidden in near-duplicates: {count} groups of {keys} keys, in the set only as groups")
    if any(report["is_vacuous"] for report in reports):
        console.print(VACUOUS if function.is_square else VACUOUS_IN_GENERAL)
