"""Tables that are written row by row: Parquet, .csv and JSON lines."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy.typing as npt

from levattn._core.files import replace_file
from levattn.io.common import needing_package

SUFFIXES = (".parquet", ".csv", ".jsonl")
_Part = dict[str, npt.NDArray[Any]]


def write_table(path: Path, parts: Iterable[_Part]) -> None:
    """Write a table that comes in parts, at least one, of columns by name; it appears complete, or not at all."""
    writers = dict(zip(SUFFIXES, (_as_parquet, _as_csv, _as_json_lines), strict=True))
    with replace_file(path) as stream:
        writers[path.suffix.lower()](stream, parts)


def _as_parquet(stream: IO[bytes], parts: Iterable[_Part]) -> None:
    with needing_package("a .parquet file to write it", "pyarrow"):
        import pyarrow
        from pyarrow.parquet import ParquetWriter
    tables = map(pyarrow.table, parts)
    first = next(tables)
    with ParquetWriter(stream, first.schema) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table)


def _as_csv(stream: IO[bytes], parts: Iterable[_Part]) -> None:
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    try:
        for number, part in enumerate(parts):
            if number == 0:
                writer.writerow(part)
            writer.writerows(_rows(part))
    finally:
        text.detach()


def _as_json_lines(stream: IO[bytes], parts: Iterable[_Part]) -> None:
    for part in parts:
        for row in _rows(part):
            stream.write(json.dumps(dict(zip(part, row, strict=True)), allow_nan=False).encode() + b"\n")


def _rows(part: _Part) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.tolist() for column in part.values()), strict=True)
