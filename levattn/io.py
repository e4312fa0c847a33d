"""Keys from files: sources of row chunks that can be read again and again.

`open_keys` reads the header of a file and returns a `KeySource`; the numbers themselves are read when the
source is iterated or loaded. Nothing here ever unpickles.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import operator
import os
import secrets
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from levattn._kernels import BLOCK
from levattn.exceptions import KeyFileError

__all__ = ["KeySource", "open_keys"]

_CHUNK_BYTES = 32 * 2**20
_NAMES_SHOWN = 30

_NPY_MAGIC = b"\x93NUMPY"
_ZIP_MAGICS = (b"PK\x03\x04", b"PK\x05\x06")
_FLOAT_SIZES = (2, 4, 8)
_SAFETENSORS_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# What damaged bytes make numpy's header reader and the zip reader raise.
_HEADER_ERRORS = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError)
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, OSError)

_ReadRows = Callable[[int, int], npt.NDArray[Any]]


@dataclass(frozen=True)
class KeySource:
    """Keys in a file, as a re-iterable source of row chunks.

    Made by `open_keys`. Iterating yields numpy arrays of shape ``(..., m, d)`` with ``m <= chunk_rows``:
    consecutive rows, with all leading axes (batch, heads) together. Concatenated along axis -2 they are the
    array of the file. Each iteration opens the file anew, so a source can be read as often as an algorithm
    needs passes, and can be sent to another process.

    Attributes
    ----------
    path : pathlib.Path
        The file.
    tensor : str or None
        Name of the array inside the file; None for ``.npy``, which has no names.
    shape : tuple of int
        ``(..., n, d)``, known without reading the data.
    dtype : numpy.dtype
        float64, float32, float16, or ml_dtypes' bfloat16, in native byte order.
    chunk_rows : int
        Largest number of rows in a chunk.

    Raises
    ------
    KeyFileError
        While reading, if the data are damaged or if the file changed since it was opened.

    Notes
    -----
    Memory: ``chunk_rows`` rows at a time. A ``.npy`` file is memory-mapped, a ``.safetensors`` file is read
    slice by slice; an array in an ``.npz`` file is read whole, because a compressed member has no random
    access.

    Examples
    --------
    >>> import tempfile, pathlib, numpy as np, levattn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(pathlib.Path(folder, "layer.npz"), K=np.eye(5, 3), V=np.eye(5))
    ...     source = levattn.open_keys(pathlib.Path(folder, "layer.npz"), tensor="K", chunk_rows=2)
    ...     rank = np.linalg.matrix_rank(sum(chunk.T @ chunk for chunk in source))
    >>> source.shape, int(rank)
    ((5, 3), 3)
    """

    path: Path
    tensor: str | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        n = self.shape[-2]
        with self._reading() as read:
            for start in range(0, n, self.chunk_rows):
                chunk = read(start, min(start + self.chunk_rows, n))
                yield np.asarray(chunk).astype(self.dtype, copy=False)

    def load(self) -> npt.NDArray[Any]:
        """Return the whole array, shape ``(..., n, d)``.

        Returns
        -------
        numpy.ndarray
            A read-only memory map for ``.npy`` in native byte order (nothing is read until it is used), an
            array in memory otherwise.

        Raises
        ------
        KeyFileError
            If the data are damaged or if the file changed since it was opened.
        """
        with self._reading() as read:
            return read(0, self.shape[-2]).astype(self.dtype, copy=False)

    @contextmanager
    def _reading(self) -> Iterator[_ReadRows]:
        file_format = _format_of(self.path)
        found = file_format.describe(self.path, self.tensor)
        if (found.shape, _native(found.dtype)) != (self.shape, self.dtype):
            raise _refusal(
                self.path,
                f"changed since it was opened, from {self.dtype} {self.shape} to {found.dtype} {found.shape}",
                "open it again",
            )
        with file_format.reading(self.path, self.tensor) as read:
            yield read


def open_keys(
    path: str | os.PathLike[str], *, tensor: str | None = None, chunk_rows: SupportsIndex | None = None
) -> KeySource:
    """Open keys in a ``.npy``, ``.npz`` or ``.safetensors`` file.

    Only the header is read. The result can be given to `universal_set`, iterated for row chunks, or loaded.

    Parameters
    ----------
    path : path-like
        The file; its suffix says the format, and its first bytes must agree. The array has shape
        ``(..., n, d)``, rows are keys, and dtype float64, float32, float16, or (``.safetensors`` only)
        bfloat16.
    tensor : str, optional
        Name of the array; needed when an ``.npz`` or ``.safetensors`` file holds several.
    chunk_rows : int, optional
        Largest number of rows in a chunk, at least 1. Default: as many as fit in 32 MiB.

    Returns
    -------
    KeySource
        Shape and dtype, an iterator over ``(..., m, d)`` chunks, and ``load()``.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    KeyFileError
        If the file is truncated, pickled, or of another kind; if the array is not floating-point or has fewer
        than two axes; if `tensor` is not in the file (the names that are there are listed), or is left out
        although there are several. It is a ValueError.
    TypeError, ValueError
        If `tensor` is not a string, or `chunk_rows` is not a positive integer.
    ImportError
        If ``.safetensors`` is asked for without the package safetensors, or bfloat16 without ml_dtypes.

    Notes
    -----
    Nothing is ever unpickled. Non-native byte order is converted on reading.

    Examples
    --------
    >>> import tempfile, pathlib, numpy as np, levattn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(pathlib.Path(folder, "keys.npy"), np.ones((1000, 8)))
    ...     source = levattn.open_keys(pathlib.Path(folder, "keys.npy"), chunk_rows=400)
    ...     [chunk.shape for chunk in source]
    [(400, 8), (400, 8), (200, 8)]
    """
    path = Path(path)
    if tensor is not None and not isinstance(tensor, str):
        raise TypeError(f"tensor must be the name of an array (str) or None, got {type(tensor).__name__}")
    rows = None if chunk_rows is None else _positive("chunk_rows", chunk_rows)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; check the path (it is taken relative to {Path.cwd()})")
    if not path.is_file():
        raise _refusal(path, "not a regular file", "give the path of a .npy, .npz or .safetensors file")

    found = _format_of(path).describe(path, tensor)
    _check_keys(path, found)
    dtype = _native(found.dtype)
    return KeySource(path, found.tensor, found.shape, dtype, rows or _default_chunk_rows(found.shape, dtype))


@contextmanager
def replace_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Write a file atomically: it appears complete, or not at all.

    Yields a binary stream onto a temporary file in the folder of `path`. On success that file replaces
    `path`; if the block raises, it is removed and `path` stays as it was.

    Parameters
    ----------
    path : path-like
        The file to write; a symbolic link is followed.

    Yields
    ------
    binary file
        Open for writing.

    Raises
    ------
    OSError
        If the folder does not exist or cannot be written.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> from levattn.io import replace_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replace_file(pathlib.Path(folder, "a.bin")) as stream:
    ...         _ = stream.write(b"all of it")
    ...     pathlib.Path(folder, "a.bin").read_bytes()
    b'all of it'
    """
    target = Path(os.path.realpath(path))
    # Opened by name, not by mkstemp: the result then gets the permissions of the user's umask.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    stream = temporary.open("xb")
    try:
        with stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


class _Found(NamedTuple):
    """What a header says of one array."""

    tensor: str | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class _Format(NamedTuple):
    describe: Callable[[Path, str | None], _Found]
    reading: Callable[[Path, str | None], AbstractContextManager[_ReadRows]]


def _format_of(path: Path) -> _Format:
    try:
        return _FORMATS[path.suffix.lower()]
    except KeyError:
        raise _refusal(
            path, f"suffix {path.suffix!r} is none of .npy, .npz, .safetensors", _conversion_hint(path)
        ) from None


def _conversion_hint(path: Path) -> str:
    with path.open("rb") as stream:
        start = stream.read(8)
    if start.startswith(_NPY_MAGIC):
        return "its content is that of a .npy file: rename it"
    if path.suffix.lower() in {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"}:
        return "such files hold pickled objects, which are never loaded: save the tensor with safetensors"
    return "save the keys with numpy.save or safetensors"


def _refusal(path: Path, problem: str, remedy: str) -> KeyFileError:
    return KeyFileError(f"{path}: {problem}; {remedy}")


def _positive(name: str, value: SupportsIndex) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a positive integer, got {type(value).__name__}") from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def _check_keys(path: Path, found: _Found) -> None:
    array = "the array" if found.tensor is None else f"tensor {found.tensor!r}"
    if found.dtype.hasobject:
        raise _refusal(
            path,
            f"{array} holds pickled Python objects, which are never loaded",
            "save it as an array of floats",
        )
    if found.dtype == np.dtype("V2"):
        raise _refusal(
            path,
            f"{array} holds raw 2-byte values of unknown meaning (numpy writes bfloat16 so)",
            "save bfloat16 keys as .safetensors, or pass numpy.load(path).view(ml_dtypes.bfloat16)",
        )
    if not _is_key_dtype(found.dtype):
        raise _refusal(
            path,
            f"{array} has dtype {found.dtype}, expected float64, float32, float16 or bfloat16",
            "convert it with astype and save it again",
        )
    if len(found.shape) < 2:
        raise _refusal(
            path,
            f"{array} has shape {found.shape}, expected (..., n, d)",
            "save the keys as rows of a matrix",
        )


def _is_key_dtype(dtype: np.dtype[Any]) -> bool:
    return (dtype.kind == "f" and dtype.itemsize in _FLOAT_SIZES) or dtype.name == "bfloat16"


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _default_chunk_rows(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    row_bytes = math.prod(shape[:-2]) * shape[-1] * dtype.itemsize
    rows = max(1, _CHUNK_BYTES // max(1, row_bytes))
    return rows - rows % BLOCK if rows > BLOCK else rows  # whole blocks: no chunk straddles a block of a sum


def _choose(path: Path, names: Sequence[str], tensor: str | None) -> str:
    if not names:
        raise _refusal(path, "holds no array", "check how it was written")
    shown = ", ".join(map(repr, names[:_NAMES_SHOWN]))
    if len(names) > _NAMES_SHOWN:
        shown += f" and {len(names) - _NAMES_SHOWN} more"
    if tensor is None:
        if len(names) > 1:
            raise _refusal(path, f"holds {len(names)} arrays ({shown})", "say which one with tensor=")
        return names[0]
    if tensor not in names:
        close = difflib.get_close_matches(tensor, names, n=3)
        remedy = f"did you mean {' or '.join(map(repr, close))}?" if close else "give one of these as tensor="
        raise _refusal(path, f"has no tensor {tensor!r}, it holds {shown}", remedy)
    return tensor


class _NpyHeader(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: str
    offset: int


def _npy_header(path: Path, what: str, stream: IO[bytes], total: int) -> _NpyHeader:
    """Read the header of a .npy stream of `total` bytes and check that the data are all there."""
    start = stream.read(len(_NPY_MAGIC))
    if start != _NPY_MAGIC:
        if _NPY_MAGIC.startswith(start):
            raise _truncated(path, what, "the header is cut off")
        kind = "is a pickle, which is never loaded" if start[:1] == b"\x80" else "does not start as a .npy file does"
        raise _refusal(path, f"{what} {kind}", "save the keys with numpy.save or safetensors")
    stream.seek(0)
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        else:
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
        offset = stream.tell()
        if any(isinstance(length, bool) or not 0 <= length < 2**63 for length in shape):
            raise ValueError(f"impossible shape {shape}")
    except _HEADER_ERRORS as error:
        raise _truncated(path, what, f"the header cannot be read: {_first_line(error)}") from error
    if not dtype.hasobject and total - offset < math.prod(shape) * dtype.itemsize:
        needed = math.prod(shape) * dtype.itemsize
        raise _truncated(path, what, f"{dtype} {shape} needs {needed} bytes, {total - offset} are there")
    return _NpyHeader(shape, dtype, "F" if fortran else "C", offset)


def _truncated(path: Path, what: str, detail: str) -> KeyFileError:
    return _refusal(path, f"{what} is truncated or damaged ({detail})", "write or copy it again")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _read_npy_header(path: Path) -> _NpyHeader:
    with path.open("rb") as stream:
        return _npy_header(path, "the file", stream, os.fstat(stream.fileno()).st_size)


def _describe_npy(path: Path, tensor: str | None) -> _Found:
    if tensor is not None:
        raise _refusal(path, f"a .npy file holds one array without a name, got tensor={tensor!r}", "leave tensor out")
    header = _read_npy_header(path)
    return _Found(None, header.shape, header.dtype)


@contextmanager
def _reading_npy(path: Path, _tensor: str | None) -> Iterator[_ReadRows]:
    header = _read_npy_header(path)
    if math.prod(header.shape) == 0:  # nothing to map
        keys = np.empty(header.shape, header.dtype)
    else:
        order: Any = header.order
        keys = np.memmap(path, header.dtype, "r", header.offset, header.shape, order)
    yield lambda start, stop: keys[..., start:stop, :]


@contextmanager
def _zip_member(path: Path, tensor: str | None) -> Iterator[tuple[str, IO[bytes], int]]:
    with path.open("rb") as stream:
        if not stream.read(4).startswith(_ZIP_MAGICS):
            raise _refusal(path, "does not start as an .npz file does", "save the keys with numpy.savez")
        try:
            with zipfile.ZipFile(stream) as archive:
                names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
                name = _choose(path, names, tensor)
                info = archive.getinfo(name + ".npy")
                with archive.open(info) as member:
                    yield name, member, info.file_size
        except KeyFileError:
            raise
        except _ZIP_ERRORS as error:
            raise _truncated(path, "the file", _first_line(error)) from error


def _describe_npz(path: Path, tensor: str | None) -> _Found:
    with _zip_member(path, tensor) as (name, member, size):
        header = _npy_header(path, f"tensor {name!r}", member, size)
    return _Found(name, header.shape, header.dtype)


def _read_exactly(stream: IO[bytes], size: int) -> npt.NDArray[np.uint8]:
    """Read up to `size` bytes in pieces, without a second copy of the whole, and then to the end."""
    data, filled = np.empty(size, np.uint8), 0
    while part := stream.read(min(_CHUNK_BYTES, size - filled)):
        data[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
        filled += len(part)
    while stream.read(_CHUNK_BYTES):  # the checksum is compared at the end
        pass
    return data[:filled]


@contextmanager
def _reading_npz(path: Path, tensor: str | None) -> Iterator[_ReadRows]:
    with _zip_member(path, tensor) as (name, member, size):
        header = _npy_header(path, f"tensor {name!r}", member, size)
        size = math.prod(header.shape) * header.dtype.itemsize
        data = _read_exactly(member, size)
        if data.size < size:
            raise _truncated(path, f"tensor {name!r}", f"{data.size} of {size} bytes are there")
        order: Any = header.order
        keys = data.view(header.dtype).reshape(header.shape, order=order)
    yield lambda start, stop: keys[..., start:stop, :]


@contextmanager
def _safetensors_file(path: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise ImportError(f'reading {path} needs safetensors: pip install "levattn[io]"') from error
    try:
        with safe_open(path, framework="numpy") as tensors:
            yield tensors
    except SafetensorError as error:
        raise _truncated(path, "the file", _first_line(error)) from error


def _describe_safetensors(path: Path, tensor: str | None) -> _Found:
    with _safetensors_file(path) as tensors:
        name = _choose(path, sorted(tensors.keys()), tensor)
        view = tensors.get_slice(name)
        stored, shape = view.get_dtype(), tuple(view.get_shape())
    if stored not in _SAFETENSORS_FLOATS:
        raise _refusal(
            path,
            f"tensor {name!r} has dtype {stored}, expected F64, F32, F16 or BF16",
            "convert it to float32 and save it again",
        )
    return _Found(name, shape, _bfloat16() if stored == "BF16" else np.dtype(_SAFETENSORS_FLOATS[stored]))


def _bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ModuleNotFoundError as error:
        raise ImportError('reading bfloat16 needs ml_dtypes: pip install "levattn[io]"') from error
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


@contextmanager
def _reading_safetensors(path: Path, tensor: str | None) -> Iterator[_ReadRows]:
    with _safetensors_file(path) as tensors:
        view = tensors.get_slice(tensor)
        shape = tuple(view.get_shape())
        leading = (slice(None),) * (len(shape) - 2)

        def read(start: int, stop: int) -> npt.NDArray[Any]:
            # Slices of empty tensors are refused, and the whole needs no slicing.
            if 0 in shape or (start, stop) == (0, shape[-2]):
                whole: npt.NDArray[Any] = tensors.get_tensor(tensor)
                return whole[..., start:stop, :]
            part: npt.NDArray[Any] = view[(*leading, slice(start, stop))]
            return part

        yield read


_FORMATS = {
    ".npy": _Format(_describe_npy, _reading_npy),
    ".npz": _Format(_describe_npz, _reading_npz),
    ".safetensors": _Format(_describe_safetensors, _reading_safetensors),
}
