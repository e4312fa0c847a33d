"""zarr v3 stores in a local folder.

This module reads the metadata before zarr does. It allows only names of the core of the specification, because zarr
would import any installed code under a name that a file gives. It refuses missing chunks, because zarr would fill them
in.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from levattn.io.common import (
    Identity,
    Opened,
    choose,
    damaged,
    needing_package,
    refusal,
    refuse_name,
    refusing,
    wrong_dtype,
)

_METADATA = "zarr.json"
_VERSION_2 = (".zarray", ".zgroup")
_FLOATS = ("float64", "float32", "float16")
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
    if stored not in _FLOATS:
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
