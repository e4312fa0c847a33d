"""Readers of files of keys: .npy and .npz, Parquet, safetensors, Zarr."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import mmap
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from levattn.io.common import (
    Identity,
    Opened,
    check_size,
    choose,
    damaged,
    identity_of,
    let_go,
    mapped_rows,
    missing_file,
    needing_package,
    refusal,
    refuse_name,
    refusing,
    wrong_dtype,
)

NPY_MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4, (3, 0): 4}  # of the header's length, by version
_LONGEST_HEADER = 10_000  # as in numpy
_FIELD = re.compile(
    r"""\s*(['"])(?P<key>descr|fortran_order|shape)\1\s*:\s*
    (?P<value>'[^'\\]*' | "[^"\\]*" | True | False | \[[^\]]*\] | \(\s*(?:[0-9]{1,19}L?\s*(?:,\s*|(?=\))))*\))
    \s*(?:,|(?=\}))""",
    re.VERBOSE,
)
_ALLOWED = "float64, float32, float16 or bfloat16"
_PIECE = 2**20

_ZIP_MAGICS = (b"PK\x03\x04", b"PK\x05\x06")
_ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# Errors that the zip reader raises for damaged bytes.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, OSError)


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    offset: int


def _read_header(path: Path, what: str, stream: IO[bytes], total: int) -> _Header:
    """Read the header of a .npy stream of `total` bytes, and check that the data are complete."""
    start = stream.read(len(NPY_MAGIC) + 2)
    if not start.startswith(NPY_MAGIC):
        if NPY_MAGIC.startswith(start):
            raise damaged(path, what, "the header is cut off")
        kind = "is a pickle, which is never loaded" if start[:1] == b"\x80" else "does not start as a .npy file does"
        raise refusal(path, f"{what} {kind}", "save the keys with numpy.save or safetensors")
    version = tuple(start[len(NPY_MAGIC) :])
    if version not in _LENGTH_BYTES:
        raise damaged(path, what, f"the header has the unknown version {version}")
    length_bytes = _LENGTH_BYTES[version]
    length = int.from_bytes(stream.read(length_bytes), "little")
    text = stream.read(min(length, _LONGEST_HEADER)).decode("latin-1")
    if len(text) < length:
        raise damaged(path, what, f"the header is cut off: it has {len(text)} of {length} bytes")
    offset = len(start) + length_bytes + length
    descr, fortran, shape = _parse_header(path, what, text)
    dtype = _as_dtype(path, what, descr)
    needed = math.prod(shape) * dtype.itemsize
    if total - offset != needed:
        raise damaged(path, what, f"{dtype} {shape} needs {needed} bytes, {total - offset} are there")
    return _Header(shape, dtype, "F" if fortran else "C", offset)


def _parse_header(path: Path, what: str, text: str) -> tuple[str, bool, tuple[int, ...]]:
    fields: dict[str, str] = {}
    text = text.strip()
    position = 1
    while field := _FIELD.match(text, position):
        fields[field["key"]] = field["value"]
        position = field.end()
    descr, fortran, shape = (fields.get(key, "") for key in ("descr", "fortran_order", "shape"))
    lengths = tuple(int(number) for number in re.findall("[0-9]+", shape))
    if (
        not text.startswith("{")
        or text[position:].strip() != "}"
        or not descr.startswith(("'", '"', "["))
        or fortran not in ("True", "False")
        or not shape.startswith("(")
        or any(length >= 2**63 for length in lengths)
    ):
        raise damaged(path, what, f"the header cannot be read: {text[:200]!r}")
    return descr.strip("'\""), fortran == "True", lengths


def _as_dtype(path: Path, what: str, descr: str) -> np.dtype[Any]:
    if re.fullmatch("[<>=|]?f[248]", descr):
        return np.dtype(descr)
    if re.search(r"(^|')\|O", descr):
        raise refusal(
            path, f"{what} holds pickled Python objects, which are never loaded", "save it as an array of floats"
        )
    if re.fullmatch("[<>=|]?V2", descr):
        raise refusal(
            path,
            f"{what} holds raw 2-byte values of unknown meaning (numpy writes bfloat16 so)",
            "save bfloat16 keys as .safetensors, or pass numpy.load(path).view(ml_dtypes.bfloat16)",
        )
    try:
        name = str(np.dtype(descr)) if re.fullmatch("[<>=|]?[biufc][0-9]{1,2}", descr) else descr
    except TypeError:  # numpy has no such type here
        name = descr
    raise wrong_dtype(path, what, name, _ALLOWED)


@contextmanager
def open_npy(path: Path, tensor: str | None) -> Iterator[Opened]:
    """Open a numpy array, mapped."""
    refuse_name(path, tensor, "a .npy file")
    with path.open("rb") as stream:
        header = _read_header(path, "the array", stream, os.fstat(stream.fileno()).st_size)
        read = mapped_rows(path, stream, header.dtype, header.shape, offset=header.offset, order=header.order)
        yield Opened(None, header.shape, header.dtype, read, identity_of(stream))


@contextmanager
def open_npz(path: Path, tensor: str | None) -> Iterator[Opened]:
    """Open a numpy archive, whose array is read at once."""
    keys: npt.NDArray[Any] | None = None

    def read(start: int, stop: int) -> npt.NDArray[Any]:
        nonlocal keys
        if keys is None:
            with refusing(path, _ZIP_ERRORS), archive.open(info) as member:
                keys = _read_member(path, name, member, info.file_size)
        return keys[..., start:stop, :]

    with path.open("rb") as stream:
        if not stream.read(4).startswith(_ZIP_MAGICS):
            raise refusal(path, "does not start as an .npz file does", "save the keys with numpy.savez")
        with refusing(path, _ZIP_ERRORS):
            archive = zipfile.ZipFile(stream)
            names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
            name = choose(path, names, tensor)
            info = archive.getinfo(name + ".npy")
            if info.compress_type not in _ZIP_METHODS:
                raise refusal(path, f"tensor {name!r} has a compression that numpy does not write", "save it again")
            with archive.open(info) as member:
                header = _read_header(path, f"tensor {name!r}", member, info.file_size)
        yield Opened(name, header.shape, header.dtype, read, identity_of(stream))


def _read_member(path: Path, name: str, member: IO[bytes], total: int) -> npt.NDArray[Any]:
    """Read an array in pieces, without a second copy, and to the end, where the zip reader compares the checksum."""
    header = _read_header(path, f"tensor {name!r}", member, total)
    size = total - header.offset
    data, filled = np.empty(size, np.uint8), 0
    while part := member.read(_PIECE):
        data[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
        filled += len(part)
    if filled < size:
        raise damaged(path, f"tensor {name!r}", f"{filled} of {size} bytes are there")
    return data.view(header.dtype).reshape(header.shape, order=header.order)


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


INDEX_SUFFIX = ".safetensors.index.json"
_SAFETENSORS_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


@contextmanager
def open_safetensors(path: Path, tensor: str | None) -> Iterator[Opened]:
    """Open a tensor."""
    with needing_package(path, "safetensors"):
        from safetensors import SafetensorError, safe_open
    with path.open("rb") as stream:
        # The package checks the whole header, but its slices copy slowly, so this module maps the rows.
        with refusing(path, (SafetensorError, OSError)), safe_open(path, framework="numpy") as tensors:
            name = choose(path, sorted(tensors.keys()), tensor)
        with refusing(path, (ValueError, KeyError)):
            length = int.from_bytes(stream.read(8), "little")
            entry = json.loads(stream.read(length))[name]
            stored, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if stored == "BF16":
            dtype = _bfloat16()
        elif stored in _SAFETENSORS_FLOATS:
            dtype = np.dtype(_SAFETENSORS_FLOATS[stored])
        else:
            raise wrong_dtype(path, f"tensor {name!r}", stored, "F64, F32, F16 or BF16")
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise damaged(path, f"tensor {name!r}", f"{dtype} {shape} in {stop - start} bytes")
        read = mapped_rows(path, stream, dtype, shape, offset=8 + length + start)
        yield Opened(name, shape, dtype, read, identity_of(stream))


def _bfloat16() -> np.dtype[Any]:
    with needing_package("bfloat16", "ml_dtypes"):
        import ml_dtypes
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


@contextmanager
def open_index(path: Path, tensor: str | None) -> Iterator[Opened]:
    """Open the shard that holds a tensor, according to the index of a model."""
    with refusing(path, (ValueError, RecursionError)):
        index = json.loads(path.read_bytes())
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict):
        raise damaged(path, "the index", "it has no weight_map that says which file holds which tensor")
    name = choose(path, sorted(shards), tensor)
    file = shards[name]
    if not isinstance(file, str) or not file.endswith(".safetensors"):
        raise damaged(path, "the index", f"it places tensor {name!r} in {file!r}, which is no .safetensors file")
    # Only names in the folder count, so that an index cannot lead to other folders.
    if file not in (entry.name for entry in path.parent.iterdir()):
        raise missing_file(path, f"tensor {name!r} is in {file!r}, which is not beside it", "copy it there")
    shard = path.parent / file
    if not shard.is_file():
        raise refusal(shard, "not a regular file", f"it should be the .safetensors file that {path} names")
    with open_safetensors(shard, name) as opened:
        yield opened


_METADATA = "zarr.json"
_VERSION_2 = (".zarray", ".zgroup")
_ZARR_FLOATS = ("float64", "float32", "float16")
_CODECS = ("bytes", "crc32c", "gzip", "transpose", "zstd")
_BLOSC_HEADER = 16
_INDEX_ENTRY = 16


def is_store(path: Path) -> bool:
    """Tell whether a folder is a zarr store, readable or not."""
    return path.suffix.lower() == ".zarr" or any((path / name).exists() for name in (_METADATA, *_VERSION_2))


@contextmanager
def open_zarr(path: Path, tensor: str | None) -> Iterator[Opened]:
    """Open an array of a store."""
    if any((path / name).exists() for name in _VERSION_2):
        raise refusal(path, "is a zarr store of version 2", "write it again with zarr_format=3")
    node = _read_node(path, path)
    if node["node_type"] == "array":
        refuse_name(path, tensor, "a zarr array")
        folder, what = path, "the array"
    else:
        arrays = dict(_arrays_below(path))
        tensor = choose(path, sorted(arrays), tensor)
        node, folder, what = arrays[tensor], path / tensor, f"tensor {tensor!r}"
    layout = _read_layout(path, what, node)
    array = _Array(path, folder, what, layout)
    # chunks are files of their own, so the time of no file tells whether one of them changed
    yield Opened(tensor, layout.shape, layout.dtype, array.read, Identity())


def _read_node(path: Path, folder: Path) -> dict[str, Any]:
    where = (folder / _METADATA).relative_to(path)
    try:
        node = json.loads((folder / _METADATA).read_bytes())
    except FileNotFoundError as error:
        raise damaged(path, "the store", f"there is no {where}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, str(where), error) from error
    if not isinstance(node, dict) or node.get("node_type") not in ("array", "group") or node.get("zarr_format") != 3:
        raise damaged(path, str(where), "it describes neither an array nor a group of zarr v3")
    return node


def _arrays_below(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Find the arrays of a group, without entering their chunks or following links."""
    for folder, below, _ in os.walk(path):
        node = _read_node(path, Path(folder))
        below[:] = [name for name in below if node["node_type"] == "group" and not name.startswith(".")]
        if node["node_type"] == "array":
            yield Path(folder).relative_to(path).as_posix(), node


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype[Any]
    blosc: bool
    index_bytes: int  # of each shard; 0 without shards


def _read_layout(path: Path, what: str, node: dict[str, Any]) -> _Layout:
    def check(kind: str, names: Iterable[object], known: tuple[str, ...]) -> None:
        for name in names:
            if name not in known:
                problem = f"{what} has the {kind} {name!r}, expected {', '.join(known)}"
                raise refusal(path, problem, "write it again with one of these")

    stored = node.get("data_type")
    if stored not in _ZARR_FLOATS:
        raise wrong_dtype(path, what, stored, "float64, float32 or float16")
    with refusing(path, (LookupError, TypeError, ValueError, AttributeError)):
        shape = _lengths(node["shape"], 0)
        chunk = _lengths(node["chunk_grid"]["configuration"]["chunk_shape"], 1)
        check("chunk grid", [node["chunk_grid"]["name"]], ("regular",))
        check("chunk key encoding", [node["chunk_key_encoding"]["name"]], ("default", "v2"))
        codecs = {codec["name"]: codec.get("configuration", {}) for codec in node["codecs"]}
        blosc = node["codecs"][-1]["name"] == "blosc"
        shards = codecs.get("sharding_indexed")
        # The decoder of blosc reads beyond the end of damaged data, unless their header is checked first.
        known = (*_CODECS, "blosc") if blosc else _CODECS
        check("codec", codecs, known if shards is None else ("sharding_indexed",))
        index_bytes = 0
        if shards is not None:
            check("codec of shards", [codec["name"] for codec in shards["codecs"] + shards["index_codecs"]], _CODECS)
            counts = [-(-a // b) for a, b in zip(chunk, _lengths(shards["chunk_shape"], 1), strict=True)]
            index_bytes = _INDEX_ENTRY * math.prod(counts)
        if len(shape) != len(chunk):
            raise ValueError(f"{what} has shape {shape} in chunks of {chunk}")
    return _Layout(shape, chunk, np.dtype(stored), blosc, index_bytes)


def _lengths(value: object, least: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(length) is int and least <= length < 2**63 for length in value):
        raise ValueError(f"impossible shape {value}")
    return tuple(value)


class _Array:
    """An array in a store: `path` is the store, and `folder` is the folder of the array."""

    def __init__(self, path: Path, folder: Path, what: str, layout: _Layout) -> None:
        with needing_package(path, "zarr"):
            import zarr
            from zarr.storage import LocalStore
        self._path = path
        self._folder = folder
        self._what = what
        self._layout = layout
        # Any error of zarr and its codecs is due to the file. They would warn of a fill value out of range.
        with refusing(path, Exception), np.errstate(all="ignore"):
            self._array = zarr.open_array(store=LocalStore(folder, read_only=True), mode="r", zarr_format=3)
            self._key: Callable[[tuple[int, ...]], str] = self._array.metadata.encode_chunk_key
        self._check_grid()

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        bounds = [(0, length) for length in self._layout.shape]
        bounds[-2] = (start, stop)
        ranges = [
            range(first // step, -(-last // step))
            for (first, last), step in zip(bounds, self._layout.chunk, strict=True)
        ]
        for place in _places(ranges):
            self._check_chunk(place)
        with refusing(self._path, Exception), np.errstate(all="ignore"):
            return np.asarray(self._array[tuple(slice(*pair) for pair in bounds)])

    def _check_grid(self) -> None:
        """Check that the last chunk exists, and none beyond it: this reveals most damage of the shape."""
        grid = [-(-length // step) for length, step in zip(self._layout.shape, self._layout.chunk, strict=True)]
        if 0 not in grid:
            self._check_chunk(tuple(count - 1 for count in grid))
        for axis, count in enumerate(grid):
            beyond = self._chunk_at(tuple(count if i == axis else 0 for i in range(len(grid))))
            if beyond is not None:
                detail = f"shape {self._layout.shape}, but there is the chunk {beyond.relative_to(self._folder)}"
                raise damaged(self._path, self._what, detail)

    def _chunk_at(self, place: tuple[int, ...]) -> Path | None:
        with refusing(self._path, Exception):
            path = self._folder / self._key(place)
            return path if path.is_file() else None

    def _check_chunk(self, place: tuple[int, ...]) -> None:
        chunk = self._chunk_at(place)
        if chunk is None:
            problem = (
                f"{self._what} lacks chunk {self._key(place)}, which held fill values only, or the copy was cut short"
            )
            remedy = "copy it again, or write it with config={'write_empty_chunks': True}"
            raise refusal(self._path, problem, remedy)
        size = chunk.stat().st_size
        # zarr loops over all entries that the index of a shard should have before it looks for the index.
        if size < self._layout.index_bytes:
            self._refuse_chunk(chunk, f"{size} bytes, its index alone needs {self._layout.index_bytes}")
        if self._layout.blosc:
            with chunk.open("rb") as stream:
                head = stream.read(_BLOSC_HEADER)
            says = [int.from_bytes(head[at : at + 4], "little") for at in (4, 12)]
            if says != [math.prod(self._layout.chunk) * self._layout.dtype.itemsize, size]:
                self._refuse_chunk(chunk, f"{size} bytes, its header says {says[1]} for {says[0]}")

    def _refuse_chunk(self, chunk: Path, detail: str) -> NoReturn:
        raise damaged(self._path, f"chunk {chunk.relative_to(self._folder)} of {self._what}", detail)


def _places(ranges: list[range]) -> Iterator[tuple[int, ...]]:
    """Yield the product of ranges; itertools.product would make tuples of the ranges first, however long."""
    if not ranges:
        yield ()
    else:
        yield from ((first, *others) for first in ranges[0] for others in _places(ranges[1:]))
