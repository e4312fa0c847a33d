"""``levattn scores``: the scores of all keys in files, shown and written."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import levattn
from levattn.cli.files import KeyFiles, all_rows, check_targets
from levattn.cli.output import new_console, print_json, table_of
from levattn.cli.sets import Function, queries_of
from levattn.io import replace_file
from levattn.io.common import printable
from levattn.io.source import whole_keys
from levattn.io.written import write_table
from levattn.sensitivity.leverage import scores_of_chunks
from levattn.sensitivity.two_pass import as_source

_SCHEMA = "levattn.scores/1"
_SHOWN = 12
_COLUMNS = {"item": "item", "n": "n", "d": "d", "sum": "sum:.4g", "largest": "largest:.4g", "smallest": "smallest:.4g"}
_KINDS = {
    "leverage": "leverage scores: the largest attention that any query can give each key",
    "sensitivity": "certified upper bounds of the largest attention that any query can give each key",
    "expected": "expected scores: the mean attention of queries like the given ones",
}


@dataclass(frozen=True)
class Scoring:
    """The options of the command line."""

    keys: KeyFiles
    function: Function
    queries: Path | None
    queries_tensor: str | None
    checkpoint: Path | None
    output: Path | None

    def reading(self, keys: KeyFiles) -> Scoring:
        """Return the request for other files."""
        return replace(self, keys=keys)

    @property
    def kind(self) -> str:
        """The kind of the scores, a key of `_KINDS`."""
        if self.queries is not None:
            return "expected"
        return "leverage" if self.function.is_square else "sensitivity"


def score_keys(request: Scoring, as_json: bool, *, title: bool = False) -> None:
    """Run the command.

    title: whether the name of the array stands above its table.
    """
    targets = ((request.output, "--output"), (request.checkpoint, "--checkpoint"))
    check_targets(targets, request.keys.files, request.queries)
    source = request.keys.opened()
    with request.keys.working(request.checkpoint):
        scores = _scores(request, source)
        if request.output is not None and request.output.suffix.lower() == ".npy":
            with replace_file(request.output) as stream:
                np.save(stream, scores)
        elif request.output is not None:
            write_table(request.output, all_rows(source, scores))
        reports = [_report(source, scores[item], item) for item in np.ndindex(scores.shape[:-1])]
    if as_json:
        _print_json(request, source, reports)
    else:
        if title:
            new_console().print(f"{request.keys.name}: {request.keys.tensor}")
        _print_table(request, source, reports)


def _scores(request: Scoring, source: levattn.KeySource) -> npt.NDArray[Any]:
    if request.queries is not None:
        with queries_of(request.queries, request.queries_tensor, request.keys, source) as sample:
            return np.asarray(levattn.expected_scores(source, sample, f=request.function.f))
    if request.function.is_square:
        chunks, weights = as_source(source), request.keys.weights_of_rows()
        if chunks is None:
            raise AssertionError("files give chunks")
        if source.sparse and request.checkpoint is None:
            return np.asarray(levattn.leverage_scores(source, weights=weights))
        bar = True if sys.stderr.isatty() else None
        chunks = chunks.times_roots(weights)
        return np.asarray(scores_of_chunks(chunks, "auto", bar, request.checkpoint))
    with whole_keys(source) as keys:
        return np.asarray(levattn.sensitivities(keys, request.function.f).upper)


def _report(source: levattn.KeySource, scores: npt.NDArray[Any], item: tuple[int, ...]) -> dict[str, Any]:
    """Return the report of one matrix, with its keys of largest score."""
    count = min(_SHOWN, len(scores))
    least = np.partition(scores, len(scores) - count)[len(scores) - count] if count else 0.0
    near = np.flatnonzero(scores >= least)
    indices = near[np.argsort(-scores[near], kind="stable")[:count]]
    return {
        "item": item,
        "sum": float(scores.sum(dtype=np.float64)),
        "largest": float(scores.max(initial=0.0)),
        "smallest": float(scores.min(initial=1.0)) if count else 0.0,
        "indices": indices.tolist(),
        "ids": None if source.id is None else source.ids(indices).tolist(),
        "scores": scores[indices].tolist(),
    }


def _print_json(request: Scoring, source: levattn.KeySource, reports: list[dict[str, Any]]) -> None:
    document = request.keys.report | {
        "tensor": source.tensor,
        "columns": source.columns,
        "shape": source.shape,
        "dtype": source.dtype.name,
        "kind": request.kind,
        "function": request.function.text,
        "queries": None if request.queries is None else str(request.queries),
        "queries_tensor": request.queries_tensor,
        "output": None if request.output is None else str(request.output),
    }
    print_json(_SCHEMA, document | {"matrices": reports})


def _print_table(request: Scoring, source: levattn.KeySource, reports: list[dict[str, Any]]) -> None:
    n, d = source.shape[-2:]
    rows = [report | {"item": ",".join(map(str, report["item"])) or "-", "n": n, "d": d} for report in reports]
    console = new_console()
    console.print(table_of(rows, _COLUMNS))
    console.print(f"function: {request.function.text}; {_KINDS[request.kind]}")
    if len(reports) == 1:
        (report,) = reports
        ids = report["ids"] or [None] * len(report["indices"])
        shown = zip(report["indices"], ids, report["scores"], strict=True)
        words = (
            f"{index}{'' if name is None else f' ({printable(str(name))})'}: {score:.4g}"
            for index, name, score in shown
        )
        console.print(f"keys of largest score: {', '.join(words) or 'none'}")
