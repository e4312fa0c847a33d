"""Readers of arrays in files: .npy and .npz, safetensors, Zarr."""

from __future__ import annotations

import json
import math
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
    Wanted,
    check_dtype,
    choose,
    damaged,
    identity_of,
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
_ALLOWED = "float64, float32, float16, bfloat16 or integers"
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
    if re.fullmatch("[<>=|]?(f[248]|[iu][1248])", descr):
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
def open_npy(path: Path, wanted: Wanted) -> Iterator[Opened]:
    """Open a numpy array, mapped."""
    refuse_name(path, wanted.tensor, "a .npy file")
    with path.open("rb") as stream:
        header = _read_header(path, "the array", stream, os.fstat(stream.fileno()).st_size)
        check_dtype(path, "the array", header.dtype, wanted)
        read = mapped_rows(path, stream, header.dtype, header.shape, offset=header.offset, order=header.order)
        yield Opened(None, header.shape, header.dtype, read, identity_of(stream))


@contextmanager
def open_npz(path: Path, wanted: Wanted) -> Iterator[Opened]:
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
            if wanted.tensor is None and set(names) >= _SPARSE:
                yield _sparse(path, archive, wanted, identity_of(stream))
                return
            name = choose(path, names, wanted.tensor)
            info = archive.getinfo(name + ".npy")
            if info.compress_type not in _ZIP_METHODS:
                raise refusal(path, f"tensor {name!r} has a compression that numpy does not write", "save it again")
            with archive.open(info) as member:
                header = _read_header(path, f"tensor {name!r}", member, info.file_size)
            check_dtype(path, f"tensor {name!r}", header.dtype, wanted)
        yield Opened(name, header.shape, header.dtype, read, identity_of(stream))


_SPARSE = {"format", "shape", "data"}  # what scipy.sparse.save_npz writes of every sparse matrix


def _sparse(path: Path, archive: zipfile.ZipFile, wanted: Wanted, identity: Identity) -> Opened:
    """Return a sparse matrix of scipy, which is read at once; its rows are read as dense ones."""
    keys: Any = None

    def read(start: int, stop: int) -> npt.NDArray[Any]:
        return np.asarray(rows(start, stop).toarray())

    def rows(start: int, stop: int) -> Any:
        nonlocal keys
        if keys is None:
            import scipy.sparse

            with refusing(path, (*_ZIP_ERRORS, LookupError, TypeError, AttributeError)):
                stored: Any = scipy.sparse.load_npz(path)
                if stored.format in ("bsr", "csc", "csr"):
                    stored.check_format()  # before anything reads by its indices
                if stored.shape != shape or stored.dtype != dtype:
                    raise ValueError(f"{stored.dtype} {stored.shape} in place of {dtype} {shape}")
                found = scipy.sparse.csr_array(stored)
                found.check_format()
                keys = found.astype(dtype.newbyteorder("="), copy=False)
        return keys[start:stop]

    with archive.open("shape.npy") as member:
        found = _read_member(path, "shape", member, archive.getinfo("shape.npy").file_size)
    shape = tuple(map(int, found.ravel()))
    if found.dtype.kind not in "iu" or not all(0 <= length < 2**62 for length in shape):
        raise damaged(path, "tensor 'shape'", f"{found.dtype} {found.tolist()}")
    with archive.open("data.npy") as member:
        dtype = _read_header(path, "tensor 'data'", member, archive.getinfo("data.npy").file_size).dtype
    check_dtype(path, "the sparse matrix", dtype, wanted)
    return Opened(None, shape, dtype, read, identity, sparse=rows)


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


INDEX_SUFFIX = ".safetensors.index.json"
_SAFETENSORS_NUMBERS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"} | {
    f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)
}


@contextmanager
def open_safetensors(path: Path, wanted: Wanted) -> Iterator[Opened]:
    """Open a tensor."""
    with needing_package(path, "safetensors"):
        from safetensors import SafetensorError, safe_open
    with path.open("rb") as stream:
        # The package checks the whole header, but its slices copy slowly, so this module maps the rows.
        with refusing(path, (SafetensorError, OSError)), safe_open(path, framework="numpy") as tensors:
            name = choose(path, sorted(tensors.keys()), wanted.tensor)
        with refusing(path, (ValueError, KeyError)):
            length = int.from_bytes(stream.read(8), "little")
            entry = json.loads(stream.read(length))[name]
            stored, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if stored == "BF16":
            dtype = _bfloat16()
        elif stored in _SAFETENSORS_NUMBERS:
            dtype = np.dtype(_SAFETENSORS_NUMBERS[stored])
        else:
            raise wrong_dtype(path, f"tensor {name!r}", stored, "F64, F32, F16, BF16 or integers")
        check_dtype(path, f"tensor {name!r}", dtype, wanted)
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
def open_index(path: Path, wanted: Wanted) -> Iterator[Opened]:
    """Open the shard that holds a tensor, according to the index of a model."""
    with refusing(path, (ValueError, RecursionError)):
        index = json.loads(path.read_bytes())
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict):
        raise damaged(path, "the index", "it has no weight_map that says which file holds which tensor")
    name = choose(path, sorted(shards), wanted.tensor)
    file = shards[name]
    if not isinstance(file, str) or not file.endswith(".safetensors"):
        raise damaged(path, "the index", f"it places tensor {name!r} in {file!r}, which is no .safetensors file")
    # Only names in the folder count, so that an index cannot lead to other folders.
    if file not in (entry.name for entry in path.parent.iterdir()):
        raise missing_file(path, f"tensor {name!r} is in {file!r}, which is not beside it", "copy it there")
    shard = path.parent / file
    if not shard.is_file():
        raise refusal(shard, "not a regular file", f"it should be the .safetensors file that {path} names")
    with open_safetensors(shard, wanted._replace(tensor=name)) as opened:
        yield opened


_METADATA = "zarr.json"
_VERSION_2 = (".zarray", ".zgroup")
_ZARR_NUMBERS = (
    "float64",
    "float32",
    "float16",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)
_CODECS = ("bytes", "crc32c", "gzip", "transpose", "zstd")
_BLOSC_HEADER = 16
_INDEX_ENTRY = 16


def is_store(path: Path) -> bool:
    """Tell whether a folder is a zarr store, readable or not."""
    return path.suffix.lower() == ".zarr" or any((path / name).exists() for name in (_METADATA, *_VERSION_2))


@contextmanager
def open_zarr(path: Path, wanted: Wanted) -> Iterator[Opened]:
    """Open an array of a store."""
    if any((path / name).exists() for name in _VERSION_2):
        raise refusal(path, "is a zarr store of version 2", "write it again with zarr_format=3")
    node = _read_node(path, path)
    if node["node_type"] == "array":
        refuse_name(path, wanted.tensor, "a zarr array")
        tensor, folder, what = None, path, "the array"
    else:
        arrays = dict(_arrays_below(path))
        tensor = choose(path, sorted(arrays), wanted.tensor)
        node, folder, what = arrays[tensor], path / tensor, f"tensor {tensor!r}"
    layout = _read_layout(path, what, node)
    check_dtype(path, what, layout.dtype, wanted)
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
    if stored not in _ZARR_NUMBERS:
        raise wrong_dtype(path, what, stored, "float64, float32, float16 or integers")
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
