"""Parquet files with a column of fixed-size lists: list i is row i of the keys."""

from __future__ import annotations

import bisect
import itertools
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from levattn.io.common import (
    Opened,
    check_size,
    choose,
    damaged,
    identity_of,
    let_go,
    needing_package,
    refusal,
    refusing,
)

_FLOATS = {"double": "float64", "float": "float32", "halffloat": "float16"}
_BATCH_BYTES = 2 * 2**20


@contextmanager
def open_parquet(path: Path, tensor: str | None) -> Iterator[Opened]:
    """Open a column of lists."""
    with path.open("rb") as stream:
        column = _Column(path, stream, tensor)
        yield Opened(column.name, (column.starts[-1], column.d), column.dtype, column.read, identity_of(stream))


class _Column:
    """A column; a read continues where the last one ended, or starts at the beginning of a row group."""

    def __init__(self, path: Path, stream: IO[bytes], tensor: str | None) -> None:
        with needing_package(path, "pyarrow"):
            from pyarrow import BufferReader
            from pyarrow.parquet import ParquetFile
        self._path = path
        self._stream = stream
        # Any error of pyarrow is due to the file. With its own mapping or buffers, pyarrow would hold whole row groups
        # in memory, or as much as damaged sizes of pages ask for.
        with refusing(path, Exception):
            self._pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            self._file = ParquetFile(BufferReader(self._pages), pre_buffer=False, page_checksum_verification=True)
            self.name, self._kind = _find(path, self._file.schema_arrow, tensor)
            self.starts = _first_rows(path, self._file.metadata)
        self.d: int = self._kind.list_size
        self.dtype = np.dtype(_FLOATS[str(self._kind.value_type)])
        self._next = -1  # the next row to read; at first none
        self._rest = np.empty((0, self.d), self.dtype)
        self._batches: Iterator[npt.NDArray[Any]] = iter(())

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        with refusing(self._path, Exception):
            rows = np.empty((stop - start, self.d), self.dtype)
            check_size(self._path, self._stream, len(self._pages))
            if start != self._next:
                self._rest, self._batches = rows[:0], self._batches_from(start)
            self._next, filled = -1, 0
            while filled < len(rows):
                if len(self._rest) == 0:
                    self._rest = next(self._batches)
                    let_go(self._pages)
                part = self._rest[: len(rows) - filled]
                rows[filled : filled + len(part)] = part
                self._rest = self._rest[len(part) :]
                filled += len(part)
            self._next = stop
        return rows

    def _batches_from(self, start: int) -> Iterator[npt.NDArray[Any]]:
        group = bisect.bisect_right(self.starts, start) - 1
        passed = self.starts[group]
        batches = self._file.iter_batches(
            max(1, _BATCH_BYTES // (self.d * self.dtype.itemsize)),
            row_groups=range(group, len(self.starts) - 1),
            columns=[self.name],
            use_threads=False,
        )
        for batch in batches:
            batch.validate()
            lists = batch.column(self.name)
            values = lists.flatten()
            if lists.type != self._kind or lists.null_count or values.null_count:
                raise refusal(self._path, f"tensor {self.name!r} has nulls", "leave out the rows with nulls")
            rows = values.to_numpy().reshape(len(lists), self.d)
            yield rows[max(0, start - passed) :]
            passed += len(rows)
        raise damaged(self._path, f"tensor {self.name!r}", f"it ends after {passed} rows")


def _find(path: Path, schema: Any, tensor: str | None) -> tuple[str, Any]:
    """Return the name and the type of the column of keys."""
    from pyarrow.types import is_fixed_size_list

    kinds = dict(zip(schema.names, schema.types, strict=True))
    if len(kinds) < len(schema.names):
        raise refusal(path, "several columns have the same name", "rename them")
    wanted = [name for name, kind in kinds.items() if is_fixed_size_list(kind) and str(kind.value_type) in _FLOATS]
    expected = "fixed-size lists of double, float or halffloat"
    remedy = "cast the column to pyarrow.list_(pyarrow.float32(), d) and write it again"
    if tensor in kinds and tensor not in wanted:
        raise refusal(path, f"column {tensor!r} holds {kinds[tensor]}, expected {expected}", remedy)
    if not wanted:
        raise refusal(path, f"has no column of {expected}", remedy)
    name = choose(path, wanted, tensor)
    if kinds[name].list_size < 1:
        raise damaged(path, f"tensor {name!r}", f"its lists have {kinds[name].list_size} numbers")
    return name, kinds[name]


def _first_rows(path: Path, metadata: Any) -> list[int]:
    """Return the first row of each row group, and at the end the number of rows."""
    # The columns of the row groups are not read: pyarrow ends the process where their statistics are damaged.
    counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    if min(counts, default=0) < 0 or sum(counts) != metadata.num_rows:
        raise damaged(path, "the file", f"it has {metadata.num_rows} rows in row groups of {counts}")
    return [0, *itertools.accumulate(counts)]
