"""`.npy` and `.npz`: numpy's own formats. A grammar here parses the headers, and nothing is evaluated."""

from __future__ import annotations

import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from levattn.io.common import (
    Opened,
    choose,
    damaged,
    identity_of,
    mapped_rows,
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
