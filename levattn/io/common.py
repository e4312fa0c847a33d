"""Shared code of all formats: opened arrays, refusals of files, and files that are written whole or not at all."""

from __future__ import annotations

import difflib
import math
import mmap
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from levattn._core.checks import needing
from levattn.exceptions import KeyFileError

_NAMES_SHOWN = 30
_LONGEST_DETAIL = 300  # an error may quote the whole file
_LONGEST_PROBLEM = 4000  # and a name in it may be as long
_MOST_AXES = 64  # of a numpy array
# Limits of arrays without numbers: matrices, rows of all matrices, and entries of their second moments. They cost up
# to a second or two, and half a gigabyte.
_MOST_EMPTY = 2**16, 2**24, 2**26

# Given rows start and stop, returns an array (..., stop - start, d) that nothing overwrites later.
ReadRows = Callable[[int, int], npt.NDArray[Any]]


class Identity(NamedTuple):
    """The figures of a file that tell a change; 0 where it does not count, and a time does not without a size."""

    size: int = 0
    time: int = 0  # of the last change of the contents, in nanoseconds
    inode: int = 0
    device: int = 0
    changed: int = 0  # of the contents, name or rights; no program can set it


class Wanted(NamedTuple):
    """What to read of a file."""

    tensor: str | None = None  # the name of an array
    columns: tuple[str, ...] | None = None  # of a table, each one a feature
    id: str | None = None  # the column with the names of the rows
    dtype: np.dtype[Any] | None = None  # to which numbers are converted
    rows: int | None = None  # the number of rows, if it is known; the reader of text else counts them
    besides: str | None = None  # a column that is no feature unless `columns` names it


class Opened(NamedTuple):
    """An array in an open file: the entries of its header, a function that reads its rows, and the file."""

    tensor: str | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: ReadRows
    identity: Identity
    columns: tuple[str, ...] | None = None  # of a table, if each one is a feature
    ids: ReadRows | None = None  # reads the names of the rows of a table, (stop - start,)
    sparse: Callable[[int, int], Any] | None = None  # reads the rows as a sparse matrix, if they are one in the file


def identity_of(stream: IO[bytes]) -> Identity:
    """Return the identity of an open file."""
    found = os.fstat(stream.fileno())
    changed = 0 if os.name == "nt" else found.st_ctime_ns  # there it is the time of creation
    return Identity(found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev, changed)


# Given a path and what to read: opens the file and makes all checks that need no reading of the data.
Format = Callable[[Path, Wanted], AbstractContextManager[Opened]]


def printable(text: str) -> str:
    """Return text with unprintable characters as Python's escapes, so that a terminal neither obeys nor hides them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def refusal(path: Path, problem: str, remedy: str) -> KeyFileError:
    """Return the error that refuses a file."""
    if len(problem) > _LONGEST_PROBLEM:
        problem = problem[:_LONGEST_PROBLEM] + "..."
    return KeyFileError(printable(f"{path}: {problem}; {remedy}"))


def missing_file(path: Path, problem: str, remedy: str) -> FileNotFoundError:
    """Return the error of a missing file."""
    return FileNotFoundError(printable(f"{path}: {problem}; {remedy}"))


def damaged(path: Path, what: str, detail: object) -> KeyFileError:
    """Return the error of a file with damaged bytes."""
    if isinstance(detail, BaseException):
        detail = next(iter(str(detail).splitlines()), type(detail).__name__)[:_LONGEST_DETAIL]
    return refusal(path, f"{what} is truncated or damaged ({detail})", "write or copy it again")


@contextmanager
def refusing(path: Path, errors: type[Exception] | tuple[type[Exception], ...]) -> Iterator[None]:
    """Turn errors that a reader raises for damaged bytes into a refusal of the file."""
    try:
        yield
    except (KeyFileError, ImportError):
        raise
    except MemoryError as error:
        problem = f"needs more memory than there is ({str(error) or 'out of memory'})"
        raise refusal(path, problem, "if the file is sound, read it in smaller chunks") from error
    except errors as error:
        raise damaged(path, "the file", error) from error


def needing_package(what: object, package: str) -> AbstractContextManager[None]:
    """Return a context whose imports need an optional package."""
    return needing(printable(f"reading {what} needs {package}"), "io")


def check_shape(path: Path, opened: Opened) -> None:
    """Refuse an array that is not a batch of key matrices."""
    array = "the array" if opened.tensor is None else f"tensor {opened.tensor!r}"
    if not 2 <= len(opened.shape) <= _MOST_AXES:
        shape = opened.shape if len(opened.shape) < 2 else f"of {len(opened.shape)} axes"
        raise refusal(path, f"{array} has shape {shape}, expected (..., n, d)", "save the keys as rows of a matrix")
    # The size of a file does not limit the shape of an array without numbers, and a loop over it could take forever.
    *batch, n, d = (max(length, 1) for length in opened.shape)
    matrices = math.prod(batch)
    if 0 in opened.shape and any(map(operator.gt, (matrices, matrices * n, matrices * d * d), _MOST_EMPTY)):
        raise refusal(
            path, f"{array} has shape {opened.shape}, but holds no number", "save the keys as rows of a matrix"
        )


def wrong_dtype(path: Path, array: str, dtype: object, expected: str) -> KeyFileError:
    """Return the error of numbers in a dtype that keys cannot have."""
    return refusal(
        path, f"{array} has dtype {dtype}, expected {expected}", "convert it to one of these and save it again"
    )


def check_dtype(path: Path, array: str, dtype: object, wanted: Wanted, otherwise: str = "") -> None:
    """Refuse integers, unless they are to be converted; the remedy may have another way."""
    if wanted.dtype is None and "int" in str(dtype):
        remedy = f"convert it with dtype='float64' or dtype='float32'{otherwise}"
        raise refusal(path, f"{array} holds {dtype}, expected floats", remedy)


def choose(path: Path, names: Sequence[str], tensor: str | None) -> str:
    """Return the name of the array to read, of the named arrays of a file."""
    if not names:
        raise refusal(path, "holds no array", "check how it was written")
    if tensor is None:
        if len(names) > 1:
            raise refusal(path, f"holds {len(names)} arrays ({listed(names)})", "say which one with tensor=")
        return names[0]
    require_name(path, names, tensor, "tensor", "tensor=")
    return tensor


def require_name(path: Path, names: Sequence[str], name: str, what: str, option: str) -> None:
    """Refuse a name that a file lacks; `what` it should name, by which option."""
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3)
        remedy = f"did you mean {' or '.join(map(repr, close))}?" if close else f"give one of these as {option}"
        raise refusal(path, f"has no {what} {name!r}, it holds {listed(names)}", remedy)


def listed(names: Sequence[str]) -> str:
    """Return names for a message."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(map(repr, names[:_NAMES_SHOWN])) + more


def refuse_name(path: Path, tensor: str | None, kind: str) -> None:
    """Refuse a name for a file that holds one array without a name."""
    if tensor is not None:
        raise refusal(path, f"{kind} holds one array without a name, got tensor={tensor!r}", "leave tensor out")


def mapped_rows(
    path: Path,
    stream: IO[bytes],
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    *,
    offset: int,
    order: Literal["C", "F"] = "C",
) -> ReadRows:
    """Return a function that reads rows of an array in an open file, memory-mapped."""
    size = math.prod(shape) * dtype.itemsize
    keys: np.memmap[Any, Any] | None = None

    def read(start: int, stop: int) -> npt.NDArray[Any]:
        nonlocal keys
        if size == 0:  # such a file cannot be mapped
            return np.empty(shape, dtype)[..., start:stop, :]
        check_size(path, stream, offset + size)
        if keys is None:
            keys = np.memmap(stream, dtype, "r", offset, shape, order)
        else:
            let_go(keys.base)
        return keys[..., start:stop, :]

    return read


def check_size(path: Path, stream: IO[bytes], size: int) -> None:
    """Refuse a file that was cut since it was mapped: a read beyond its end would kill the process."""
    if os.fstat(stream.fileno()).st_size < size:
        raise damaged(path, "the file", "it was cut while it was read")


def let_go(pages: Any) -> None:
    """Stop counting the pages read so far as memory of this process; pages still in use are mapped again."""
    if hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)
