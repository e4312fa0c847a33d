"""Readers of tables: Parquet, and text in columns (.csv, .tsv)."""

from __future__ import annotations

import bisect
import itertools
import mmap
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from levattn._core.threads import num_threads, parallel_for
from levattn.io.common import (
    Opened,
    Wanted,
    check_dtype,
    check_size,
    choose,
    damaged,
    identity_of,
    let_go,
    listed,
    needing_package,
    refusal,
    refuse_name,
    refusing,
    require_name,
)

_FLOATS = {"double": "float64", "float": "float32", "halffloat": "float16"}
_NUMBERS = _FLOATS | {f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_BATCH_BYTES = 2 * 2**20, 8 * 2**20  # a quarter of what is read at once, within these
_TURNED = 1 << 13  # rows that a thread copies at a time
_BATCH_ROWS = 1000  # times a whole number: powers of two would share a few places in the cache
_CHOOSE = "choose columns of numbers with columns=, and name the column of identifiers with id="

# Given a row, and how many rows are read at once: yields the batches of some columns from this row on, or from one
# before, and the number of their first.
_Batches = Callable[[int, int], Iterator[tuple[int, Any]]]


class _Keys(NamedTuple):
    """Where the keys are in a table: one column of lists, or the columns of numbers."""

    columns: tuple[str, ...]
    lists: Any  # the type of the column of lists, None for columns of numbers
    d: int
    dtype: np.dtype[Any]


class _Rows:
    """Rows of some columns; a read continues where the last one ended, or starts anew."""

    def __init__(self, path: Path, batches: _Batches, convert: Callable[[Any], npt.NDArray[Any]]) -> None:
        self._path, self._from, self._convert = path, batches, convert
        self._next = -1  # the next row to read; at first none
        self._rest: npt.NDArray[Any] | None = None
        self._batches: Iterator[npt.NDArray[Any]] = iter(())

    def parts(self, start: int, stop: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the rows of a range, in parts."""
        if start != self._next:
            self._rest, self._batches = None, self._converted(start, stop - start)
        self._next = -1
        while start < stop:
            if self._rest is None or len(self._rest) == 0:
                self._rest = next(self._batches)
            part, self._rest = self._rest[: stop - start], self._rest[stop - start :]
            start += len(part)
            yield part
        self._next = stop

    def _converted(self, start: int, count: int) -> Iterator[npt.NDArray[Any]]:
        passed = 0
        for passed, batch in self._from(start, count):
            batch.validate()
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                if column.null_count:
                    row = passed + column.is_null().to_pylist().index(True)
                    raise refusal(
                        self._path,
                        f"column {name!r} has nulls, the first in row {row}",
                        "leave out the rows with nulls",
                    )
            yield self._convert(batch)[max(0, start - passed) :]
            passed += batch.num_rows
        raise damaged(self._path, "the table", f"it ends after {passed} rows")


def _matrix_of(path: Path, keys: _Keys) -> Callable[[Any], npt.NDArray[Any]]:
    """Return a function that makes rows (m, d) of a batch."""

    def of_lists(batch: Any) -> npt.NDArray[Any]:
        lists, (name,) = batch.column(0), keys.columns
        values = lists.flatten()
        if lists.type != keys.lists or values.null_count:
            raise refusal(path, f"column {name!r} has nulls", "leave out the rows with nulls")
        lengths = np.asarray(lists.value_lengths())
        if (lengths != keys.d).any():
            found = lengths[lengths != keys.d][0]
            raise refusal(
                path,
                f"column {name!r} holds lists of {keys.d} and of {found} numbers, expected one length",
                "leave out the others",
            )
        return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(lists), keys.d)

    def of_columns(batch: Any) -> npt.NDArray[Any]:
        if len(set(batch.schema.types)) == 1:
            return np.asarray(batch.to_tensor(row_major=False).to_numpy())  # which the caller turns in one copy
        rows = np.empty((batch.num_rows, keys.d), keys.dtype)
        for j, column in enumerate(batch.columns):
            rows[:, j] = column.to_numpy(zero_copy_only=False)
        return rows

    return of_columns if keys.lists is None else of_lists


def _turn(columns: npt.NDArray[Any], rows: npt.NDArray[Any]) -> None:
    """Copy numbers that follow each other by columns to where they follow by rows, on several threads."""

    def part(i: int) -> None:
        rows[i * _TURNED : (i + 1) * _TURNED] = columns[i * _TURNED : (i + 1) * _TURNED]

    parallel_for(part, -(-len(rows) // _TURNED))


def _names_of(batch: Any) -> npt.NDArray[Any]:
    """Return the identifiers of a batch, integers or strings."""
    from pyarrow import types

    column = batch.column(0)
    if types.is_integer(column.type):
        numbers = np.asarray(column.to_numpy(zero_copy_only=False))
        return numbers.astype(np.uint64 if numbers.dtype.kind == "u" else np.int64)
    return np.asarray(column.to_pylist(), np.str_)


def _opened(
    path: Path,
    stream: IO[bytes],
    size: int,
    keys: _Keys,
    n: int,
    wanted: Wanted,
    batches: Callable[[tuple[str, ...], int], _Batches],
) -> Opened:
    """Return an open table of n rows; `batches` gives the batches of some columns, with the bytes of a row.

    The file has a `size` in bytes.
    """
    rows = _Rows(path, batches(keys.columns, keys.d * keys.dtype.itemsize), _matrix_of(path, keys))

    def read(start: int, stop: int) -> npt.NDArray[Any]:
        check_size(path, stream, size)
        with refusing(path, Exception):
            found, filled = np.empty((stop - start, keys.d), keys.dtype), 0
            for part in rows.parts(start, stop):
                _turn(part, found[filled : filled + len(part)])
                filled += len(part)
        return found

    def read_ids(start: int, stop: int) -> npt.NDArray[Any]:
        check_size(path, stream, size)
        with refusing(path, Exception):
            found = [part.copy() for part in ids.parts(start, stop)]
            return np.concatenate(found) if found else np.empty(0, np.int64)

    name = None if keys.lists is None else keys.columns[0]
    columns = keys.columns if keys.lists is None else None
    opened = Opened(name, (n, keys.d), keys.dtype, read, identity_of(stream), columns)
    if wanted.id is None:
        return opened
    ids = _Rows(path, batches((wanted.id,), _ID_BYTES), _names_of)
    return opened._replace(ids=read_ids)


_ID_BYTES = 64


def _check_names(path: Path, names: list[str], wanted: Wanted, others: dict[str, Any]) -> None:
    """Refuse names that a table has more than once, or that are wanted and not there."""
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if twice:
        raise refusal(path, f"several columns have the same name, {listed(sorted(twice))}", "rename them")
    there = {*names, *others}
    for name in wanted.columns or ():
        if name not in there:
            require_name(path, [*names, *others], name, "column", "columns=")
    if wanted.id is not None:
        require_name(path, [*names, *others], wanted.id, "column", "id=")


def _columns_of(path: Path, kinds: dict[str, Any], wanted: Wanted, left_out: set[str]) -> _Keys:
    """Return the columns of numbers: the wanted ones, or all but some; other kinds are refused."""
    names = wanted.columns or tuple(
        name for name in kinds if name not in (wanted.id, wanted.besides) and name not in left_out
    )
    if not names:
        raise refusal(path, "has no column of numbers", _CHOOSE)
    for name in names:
        if str(kinds[name]) not in _NUMBERS:
            raise refusal(path, f"column {name!r} holds {kinds[name]}, expected floats", _CHOOSE)
    dtypes = [np.dtype(_NUMBERS[str(kinds[name])]) for name in names]
    for name, dtype in zip(names, dtypes, strict=True):
        otherwise = ", or leave it out by columns= or as id=" if wanted.columns is None else ""
        check_dtype(path, f"column {name!r}", dtype, wanted, otherwise)
    return _Keys(names, None, len(names), np.result_type(*dtypes))


def _check_id(path: Path, name: str, kind: Any) -> None:
    """Refuse a column whose values name no rows."""
    from pyarrow import types

    inner = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_integer(inner) or types.is_string(inner) or types.is_large_string(inner)):
        raise refusal(path, f"column {name!r} holds {kind}, expected integers or strings", "name another with id=")


_FOLDER = re.compile(r"[^=]+=.*", re.DOTALL)


def _partition_of(path: Path, wanted: Wanted, names_in_file: list[str]) -> dict[str, Any]:
    """Return values that names of folders like key=value give to all rows of a file, if any of them is wanted.

    A column of the file hides a folder of the same name.
    """
    folders = list(itertools.takewhile(_FOLDER.fullmatch, (parent.name for parent in path.absolute().parents)))
    names = [folder.partition("=")[0] for folder in folders]
    if not set(names) & {*(wanted.columns or ()), wanted.id} - {*names_in_file}:
        return {}
    from pyarrow import schema, string
    from pyarrow.dataset import HivePartitioning, get_partition_keys

    parser = HivePartitioning(schema([(name, string()) for name in names]))
    values = get_partition_keys(parser.parse("/".join([*reversed(folders), ""])))
    return {
        name: int(value) if re.fullmatch("-?(0|[1-9][0-9]{0,17})", value or "") else value
        for name, value in values.items()
        if name not in names_in_file
    }


def _with_constants(batch: Any, names: tuple[str, ...], constants: dict[str, Any]) -> Any:
    """Return the columns of a batch in the given order; the constants are columns with one value."""
    from pyarrow import RecordBatch, repeat
    from pyarrow.types import is_dictionary

    there = {
        name: column.dictionary_decode() if is_dictionary(column.type) else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    there |= {name: repeat(value, batch.num_rows) for name, value in constants.items()}
    return RecordBatch.from_arrays([there[name] for name in names], names=list(names))


def _mapped(stream: IO[bytes]) -> mmap.mmap:
    """Return the bytes of a file. With its own mapping or buffers, pyarrow would hold much of it in memory."""
    return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


@contextmanager
def open_parquet(path: Path, wanted: Wanted) -> Iterator[Opened]:
    """Open a column of lists, or columns of numbers."""
    with needing_package(path, "pyarrow"):
        from pyarrow import BufferReader
        from pyarrow.parquet import ParquetFile
    with path.open("rb") as stream:
        with refusing(path, Exception):
            pages = _mapped(stream)
            file = ParquetFile(BufferReader(pages), pre_buffer=False, page_checksum_verification=True)
            starts = _first_rows(path, file.metadata)
            constants = _partition_of(path, wanted, file.schema_arrow.names)
            keys = _find(path, file, starts, wanted, constants)

        def batches(names: tuple[str, ...], row_bytes: int) -> _Batches:
            least, most = (size // row_bytes for size in _BATCH_BYTES)

            def start_at(start: int, count: int) -> Iterator[tuple[int, Any]]:
                group = bisect.bisect_right(starts, start) - 1
                passed = starts[group]
                check_size(path, stream, len(pages))
                count = max(1, min(max(count // 4, least), most))
                for batch in file.iter_batches(
                    count - count % _BATCH_ROWS or count,
                    row_groups=range(group, len(starts) - 1),
                    columns=[name for name in names if name not in constants],
                    use_threads=num_threads() > 1,
                ):
                    yield passed, _with_constants(batch, names, constants)
                    passed += batch.num_rows
                    let_go(pages)
                    check_size(path, stream, len(pages))

            return start_at

        yield _opened(path, stream, len(pages), keys, starts[-1], wanted, batches)


def _find(path: Path, file: Any, starts: list[int], wanted: Wanted, constants: dict[str, Any]) -> _Keys:
    """Return where the keys are."""
    from pyarrow import scalar, types

    schema = file.schema_arrow
    _check_names(path, schema.names, wanted, constants)
    kinds = {name: scalar(value).type for name, value in constants.items()}
    kinds |= dict(zip(schema.names, schema.types, strict=True))
    if wanted.id is not None:
        _check_id(path, wanted.id, kinds[wanted.id])
    lists = {
        name: str(kind.value_type)
        for name, kind in kinds.items()
        if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind)
    }
    if wanted.columns is not None or (wanted.tensor is None and not any(kind in _NUMBERS for kind in lists.values())):
        index = (schema.pandas_metadata or {}).get("index_columns", ())
        return _columns_of(path, kinds, wanted, {name for name in index if isinstance(name, str)} | {*constants})
    if wanted.tensor in kinds and lists.get(wanted.tensor) not in _NUMBERS:
        remedy = "for a column of numbers use columns="
        raise refusal(path, f"column {wanted.tensor!r} holds {kinds[wanted.tensor]}, expected lists of floats", remedy)
    of_floats = [name for name, kind in lists.items() if kind in _FLOATS]
    of_numbers = [name for name, kind in lists.items() if kind in _NUMBERS]
    name = choose(path, of_floats if of_floats and wanted.tensor not in of_numbers else of_numbers, wanted.tensor)
    check_dtype(path, f"column {name!r}", lists[name], wanted)
    d = kinds[name].list_size if types.is_fixed_size_list(kinds[name]) else _first_length(path, file, starts, name)
    if d < 1:
        raise refusal(path, f"column {name!r} holds lists of {d} numbers, expected at least 1", "name another column")
    return _Keys((name,), kinds[name], d, np.dtype(_NUMBERS[lists[name]]))


def _first_length(path: Path, file: Any, starts: list[int], name: str) -> int:
    """Return the length of the first list of a column."""
    if starts[-1] == 0:
        remedy = "leave the file out, or cast the column to pyarrow.list_(pyarrow.float32(), d)"
        raise refusal(path, f"has no rows, so that the length of the lists in column {name!r} is not known", remedy)
    batch = next(file.iter_batches(1, columns=[name], use_threads=False))
    length = batch.column(0).value_lengths()[0].as_py()
    if length is None:
        raise refusal(path, f"column {name!r} has nulls, the first in row 0", "leave out the rows with nulls")
    return int(length)


def _first_rows(path: Path, metadata: Any) -> list[int]:
    """Return the first row of each row group, and at the end the number of rows."""
    # The columns of the row groups are not read: pyarrow ends the process where their statistics are damaged.
    counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    if min(counts, default=0) < 0 or sum(counts) != metadata.num_rows:
        raise damaged(path, "the file", f"it has {metadata.num_rows} rows in row groups of {counts}")
    return [0, *itertools.accumulate(counts)]


TEXTS = {".csv": ",", ".tsv": "\t"}
_BLOCK_BYTES = 2**20  # of text that is parsed at a time, but at least some lines
_PIECE_BYTES = 4 * _BLOCK_BYTES  # of text that is read at a time
_LONGEST_LINE = 2**26
_BEGINNING = re.compile(rb"(?:\xef\xbb\xbf)?[\r\n]*")  # a mark of UTF-8, and empty lines
# A field in quotes, the last perhaps without its closing quote; quotes within another field are plain characters
_QUOTED = {
    suffix: re.compile(rb'(?:(?<=[%s\r\n])|\A)"(?:[^"]+|"")*(?:"|\Z)' % at.encode()) for suffix, at in TEXTS.items()
}
_WHOLE = re.compile(r"[+-]?[0-9]+")


class _Text:
    """Text in an open file, parsed in pieces of whole lines.

    Pyarrow gets bytes that were read: its threads read ahead, and one that reads a mapping of a file that is cut ends
    the process.
    """

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self._path, self._stream, self.size = path, stream, os.fstat(stream.fileno()).st_size
        self._block = max(_BLOCK_BYTES, 4 * max(len(stream.readline(_LONGEST_LINE)) for _ in range(2)))
        self.named = True
        self.schema = self._schema()
        self.named = _has_names(path, self.schema.names)
        if not self.named:
            self.schema = self._schema()

    def batches(self, types: dict[str, Any]) -> Iterator[Any]:
        """Yield the columns with these types, from the first row on."""
        from pyarrow import ArrowInvalid

        names, passed = None, 0
        for piece, broken in self._pieces():
            before = passed
            try:
                for batch in self._reader(piece, broken, names, types):
                    yield batch
                    passed += batch.num_rows
            except ArrowInvalid as error:
                raise ValueError(_counted_on(str(error), before + (names is not None and self.named))) from error
            names = self.schema.names

    def _schema(self) -> Any:
        piece, broken = next(self._pieces(), (b"", False))
        return self._reader(piece, broken, None, None).schema

    def _reader(
        self, piece: memoryview | bytes, broken: bool, names: list[str] | None, types: dict[str, Any] | None
    ) -> Any:
        """Return pyarrow's reader of a piece: with names, its first line is a row; `broken` fields have newlines."""
        from pyarrow import BufferReader, csv

        # an empty line is a null where there is one column, and nothing where there are more
        blank = types is None or len(self.schema.names) > 1
        separator = TEXTS[self._path.suffix.lower()]
        return csv.open_csv(
            BufferReader(piece),
            csv.ReadOptions(
                use_threads=False,
                block_size=self._block,
                column_names=names,
                autogenerate_column_names=not (self.named or names),
            ),
            csv.ParseOptions(delimiter=separator, newlines_in_values=broken, ignore_empty_lines=blank),
            csv.ConvertOptions(
                null_values=[""], include_columns=None if types is None else list(types), column_types=types
            ),
        )

    def _pieces(self) -> Iterator[tuple[memoryview, bool]]:
        """Yield pieces, without empty lines at both ends of the text, and whether a field has a newline in quotes."""
        # New memory would take longer than reading it.
        piece = bytearray(min(max(_PIECE_BYTES, self._block), self.size))
        offset, begun, empty, suffix = 0, False, False, self._path.suffix.lower()
        while offset < self.size:
            self._stream.seek(offset)  # others read the file in between
            length = self._stream.readinto(piece)  # type: ignore[attr-defined]  # of binary files
            check_size(self._path, self._stream, self.size)
            first = 0 if begun else _BEGINNING.match(piece, 0, length).end()  # type: ignore[union-attr]  # of any text
            end, broken = _last_line(piece, length, suffix)
            if offset + length >= self.size:
                end = length
            elif end == 0:
                raise ValueError(f"a line has {length} bytes or more, or no closing quote")
            text = _text_end(piece, first, end)
            if text == first:  # empty lines alone, which count if text follows them
                offset, empty = offset + end, empty or begun
                continue
            if empty and len(self.schema.names) == 1:
                yield memoryview(b"\n"), False
            # empty lines behind the text are read again with what follows
            end = min(end, text + (2 if piece[text : text + 2] == b"\r\n" else 1))
            offset += end
            yield memoryview(piece)[first:end], broken
            begun, empty = True, False


def _text_end(piece: bytearray, first: int, end: int) -> int:
    """Return where the part of a piece ends without the line ends behind it."""
    for low in (max(first, end - 64), first):  # most end in one
        text = low + len(piece[low:end].rstrip(b"\r\n"))
        if text > low:
            return text
    return first


def _last_line(piece: bytearray, length: int, suffix: str) -> tuple[int, bool]:
    """Return where the last whole line in the first bytes of a piece ends, and whether quotes hold newlines."""
    if b'"' not in piece:
        return max(piece.rfind(b"\n", 0, length), piece.rfind(b"\r", 0, length - 1)) + 1, False
    text = np.frombuffer(piece, np.uint8, length)
    quotes = np.flatnonzero(text == ord('"'))
    opening = quotes[::2][quotes[::2] > 0]
    if not np.isin(
        text[opening - 1], [ord(c) for c in f'{TEXTS[suffix]}\r\n"']
    ).all():  # quotes that are plain characters do not count
        spans: npt.NDArray[np.int64] = np.array(
            [field.span() for field in _QUOTED[suffix].finditer(piece, 0, length)], np.int64
        ).reshape(-1, 2)
        quotes = (spans - np.array([0, 1])).ravel()
    lines = np.flatnonzero((text[: length - 1] == ord("\r")) | (text[: length - 1] == ord("\n")))
    if text[length - 1] == ord("\n"):
        lines = np.append(lines, length - 1)
    within = np.searchsorted(quotes, lines) % 2 == 1
    return int(lines[~within].max(initial=-1)) + 1, bool(within.any())


def _counted_on(message: str, passed: int) -> str:
    """Return a message of pyarrow with rows counted from the beginning of the text, not of the piece."""
    return re.sub(r"Row #(\d+)", lambda found: f"Row #{int(found[1]) + passed}", message)


@contextmanager
def open_text(path: Path, wanted: Wanted) -> Iterator[Opened]:
    """Open columns of numbers in text."""
    with needing_package(path, "pyarrow"):
        import pyarrow.csv
    refuse_name(path, wanted.tensor, f"a {path.suffix} file")
    with path.open("rb") as stream:
        with refusing(path, Exception):
            text = _Text(path, stream)
            schema = text.schema
            constants = _partition_of(path, wanted, schema.names)
            _check_names(path, schema.names, wanted, constants)
            kinds = {name: pyarrow.scalar(value).type for name, value in constants.items()}
            keys = _columns_of(path, kinds | _kinds_of(path, schema, wanted), wanted, {*constants})
            keys = keys._replace(dtype=np.dtype(np.float64))

        def batches(names: tuple[str, ...], _row_bytes: int) -> _Batches:
            kind = pyarrow.string() if names == (wanted.id,) else pyarrow.float64()

            def start_at(start: int, _count: int) -> Iterator[tuple[int, Any]]:
                passed = 0
                # With no column of the file, all of them would be read.
                there = [name for name in names if name not in constants] or schema.names[:1]
                for batch in text.batches(dict.fromkeys(there, kind if there[0] in names else pyarrow.string())):
                    if passed + batch.num_rows > start:
                        yield passed, _with_constants(batch, names, constants)
                    passed += batch.num_rows

            return start_at

        n = wanted.rows
        if n is None:
            with refusing(path, Exception):
                n = sum(batch.num_rows for batch in text.batches({schema.names[0]: pyarrow.string()}))
        yield _opened(path, stream, text.size, keys, n, wanted, batches)


def _has_names(path: Path, names: list[str]) -> bool:
    """Tell whether the first line of a text has the names of the columns, not the first row; refuse doubtful lines."""
    numbers = [name for name in names if _is_number(name)]
    if len(names) == 1 and re.search("[,;\t]", names[0]):
        problem = f"has one column, {names[0]!r}, by the separator of its suffix"
        raise refusal(path, problem, "separate .csv files by commas and .tsv files by tabs")
    if all(map(_WHOLE.fullmatch, names)):
        problem = f"begins with a line of whole numbers, {listed(names)}, which may be names or a row"
        raise refusal(path, problem, "write a line of names before it, or in its place, such as x0")
    if len(numbers) == len(names):
        return False
    points = [name for name in numbers if not _WHOLE.fullmatch(name)]
    if points:
        raise refusal(
            path, f"begins with a line that holds {listed(points)} beside text", "write a line of names before it"
        )
    return True


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _kinds_of(path: Path, schema: Any, wanted: Wanted) -> dict[str, Any]:
    """Return the types of the columns, as the first lines show them."""
    kinds = dict(zip(schema.names, schema.types, strict=True))
    if "" in kinds and wanted.columns is None and wanted.id != "":
        raise refusal(path, "has a column without a name (pandas writes its index so)", _CHOOSE)
    return {name: "double" if str(kind) == "null" else kind for name, kind in kinds.items()}
