"""States of streams: they are locked, copied, and written to files."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt

from levattn._core.checks import check_type
from levattn._core.files import checked_path, replace_file

_process = object()  # another one in a forked process, whose other threads cannot give back their locks
_making = threading.Lock()


class SharedState:
    """Base class of states: threads may share one, and processes may copy it.

    Methods that change a state are `locked`. Methods that read several attributes take the lock, or a `_snapshot`.
    """

    __slots__ = ("_lock",)
    _lock: tuple[object, AbstractContextManager[Any]]  # and the process that made it

    def _snapshot(self) -> Self:
        """Return the present state, to read from: it shares memory with the state that goes on."""
        with lock_of(self):
            return twin(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle or copy, all of one time."""
        with lock_of(self):
            held = vars(self._snapshot())
            return {
                name: value._snapshot() if isinstance(value, SharedState) else value for name, value in held.items()
            }

    def __copy__(self) -> Self:
        return copy.deepcopy(self)


StateType = TypeVar("StateType", bound=SharedState)
Given = ParamSpec("Given")
Found = TypeVar("Found")
Twin = TypeVar("Twin")


def twin(value: Twin) -> Twin:
    """Return an object of the same type with the same attributes, but for the lock of a state."""
    other = object.__new__(type(value))
    vars(other).update(vars(value))
    return other


def lock_of(state: SharedState) -> AbstractContextManager[Any]:
    """Return the lock of a state, which a thread may take again while it holds it."""
    try:
        process, lock = state._lock
    except AttributeError:
        return _new_lock(state)
    return lock if process is _process else _new_lock(state)


def _new_lock(state: SharedState) -> AbstractContextManager[Any]:
    with _making:
        if getattr(state, "_lock", (None,))[0] is not _process:
            state._lock = _process, threading.RLock()
        return state._lock[1]


def locked(method: Callable[Concatenate[StateType, Given], Found]) -> Callable[Concatenate[StateType, Given], Found]:
    """Make a method of a state wait for the calls of other threads."""

    @wraps(method)
    def call(self: StateType, /, *args: Given.args, **options: Given.kwargs) -> Found:
        with lock_of(self):
            return method(self, *args, **options)

    return call


def locked_with(method: Callable[[StateType, StateType], Found]) -> Callable[[StateType, StateType], Found]:
    """Make a method wait for the calls of other threads on its state and on another one."""

    @wraps(method)
    def call(self: StateType, other: StateType) -> Found:
        first, second = sorted(
            (self, other if isinstance(other, SharedState) else self), key=id
        )  # alike in all threads
        with lock_of(first), lock_of(second):
            return method(self, other)

    return call


def _begin_anew() -> None:
    global _process, _making
    _process, _making = object(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


MOST_ROWS = 2**53  # of a state: sums of many such numbers, and of their multiples, fit in 64 bits
_MAGIC = b"LEVATTN\0"
_DIGEST = 32
_OF_BYTES = "the bytes that to_bytes returned"
_DTYPES = (
    *("<f8", "<f4", "<f2", "<c8", "<c16", "|b1"),
    *("<i8", "<i4", "<i2", "|i1", "<u8", "<u4", "<u2", "|u1"),
)


def pack(kind: str, version: int, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> bytes:
    """Return the bytes of a state of this kind, with JSON fields and arrays."""
    ready = {name: np.asarray(a, a.dtype.newbyteorder("<"), order="C") for name, a in arrays.items()}
    listed = [[name, a.dtype.str, list(a.shape)] for name, a in ready.items()]
    header = json.dumps(
        {"kind": kind, "version": version, "fields": fields, "arrays": listed}, allow_nan=False
    ).encode()
    parts = [_MAGIC, len(header).to_bytes(8, "little"), header, *(a.tobytes() for a in ready.values())]
    body = b"".join(parts)
    return body + hashlib.blake2b(body, digest_size=_DIGEST).digest()


def unpack(
    data: Any, kind: str, version: int, name: str = "data", wanted: str = _OF_BYTES
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return the fields and arrays of a state of this kind and version; raise ValueError for other data.

    Errors call the data `name`, and expect what is `wanted`.
    """
    check_type("data", data, bytes | bytearray | memoryview, "bytes, as to_bytes returns them")
    data = bytes(data)
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{name} does not begin as a state of levattn does; expected {wanted}")
    body, digest = data[:-_DIGEST], data[-_DIGEST:]
    if len(data) < len(_MAGIC) + 8 + _DIGEST or hashlib.blake2b(body, digest_size=_DIGEST).digest() != digest:
        raise ValueError(f"{name} is damaged or cut short: its checksum differs; save the state again")
    end = 16 + int.from_bytes(body[8:16], "little")
    try:
        header = json.loads(body[16:end])
        found, its_version, fields, listed = (header[key] for key in ("kind", "version", "fields", "arrays"))
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{name} has no header that can be read; expected {wanted}") from error
    if found != kind:
        raise ValueError(f"{name} holds a {found!r}; expected a {kind}")
    if its_version != version:
        raise ValueError(f"{name} is of version {its_version!r}, which this levattn cannot read; expected {version}")
    try:
        return fields, _arrays(body, end, listed)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{name} does not fit its header: {error}; expected {wanted}") from error


def _arrays(body: bytes, at: int, listed: Any) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays from place `at` of the body on; raise if the body does not hold exactly these arrays."""
    arrays = {}
    for name, dtype, shape in listed:
        if dtype not in _DTYPES:
            raise ValueError(f"{name!r} has dtype {dtype!r}, not one of {', '.join(_DTYPES)}")
        if not isinstance(name, str) or name in arrays or any(size < 0 for size in shape):
            raise ValueError(f"{name!r} of shape {shape!r} is no array, or comes twice")
        found = np.frombuffer(body, dtype, math.prod(shape), at).reshape(shape)
        arrays[name] = found.astype(np.dtype(dtype).newbyteorder("="))
        at += found.nbytes
    if at != len(body):
        raise ValueError(f"{len(body) - at} bytes are left over")
    return arrays


def is_storable(dtype: np.dtype[Any]) -> bool:
    """Tell whether `pack` accepts arrays of this dtype."""
    return dtype.newbyteorder("<").str in _DTYPES


def shaped(array: npt.NDArray[Any], dtype: Any, shape: tuple[int, ...], finite: bool = True) -> npt.NDArray[Any]:
    """Return the array if it has this dtype and shape, and finite entries if asked for; else raise ValueError."""
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"an array has dtype {array.dtype} and shape {array.shape}; expected {dtype} and {shape}")
    if finite and array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError("an array of finite numbers holds others")
    return array


def whole(value: Any, least: int = 0, most: int | None = None) -> int:
    """Return a whole number of at least `least` and at most `most`, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{value!r} stands where a whole number of {limits} should")
    return value


def counts(array: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the array if it holds possible numbers of rows; else raise ValueError."""
    if ((shaped(array, np.int64, shape) < 0) | (array > MOST_ROWS)).any():
        raise ValueError(f"a number of rows is negative or above {MOST_ROWS}")
    return array


class StoredState(SharedState):
    """A state that is stored as bytes: it splits into fields and arrays, and is made from them again.

    A class of states gives the name of its bytes, and the version of their form.
    """

    _stored_as: ClassVar[tuple[str, int]]

    def __init_subclass__(cls, *, name: str | None = None, version: int = 1) -> None:
        super().__init_subclass__()
        if name is not None:
            cls._stored_as = name, version

    def parts(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return the fields and arrays that `to_bytes` stores, and from which `from_parts` makes the state again.

        Returns
        -------
        fields : dict
            Numbers and strings by name, for JSON.
        arrays : dict
            Arrays of numpy by name.
        """
        raise NotImplementedError

    @classmethod
    def from_parts(cls, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> Self:
        """Return the state that `parts` took apart.

        Parameters
        ----------
        fields, arrays : dict
            The results of `parts`.

        Returns
        -------
        state
            It continues exactly as the original state would.

        Raises
        ------
        TypeError, ValueError, LookupError
            If a part is missing, or parts do not match.
        """
        raise NotImplementedError

    def to_bytes(self) -> bytes:
        """Return the state as bytes, from which `from_bytes` makes it again, on any machine.

        Returns
        -------
        bytes
            A header in JSON, the arrays of the state, and a checksum.

        Raises
        ------
        TypeError
            If the state holds a user-defined function or distribution, which has no name to save.
        """
        return pack(*self._stored_as, *self.parts())

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the state that `to_bytes` stored, with numpy arrays.

        Parameters
        ----------
        data : bytes
            The bytes that `to_bytes` returned.

        Returns
        -------
        state
            It continues exactly as the original state would.

        Raises
        ------
        TypeError
            If the data are no bytes.
        ValueError
            If the data are damaged, of another kind, or of an unknown version.
        """
        return cls._made_from(data, "data", _OF_BYTES)

    @classmethod
    def _made_from(cls, data: Any, name: str, wanted: str) -> Self:
        fields, arrays = unpack(data, *cls._stored_as, name, wanted)
        try:
            return cls.from_parts(fields, arrays)
        except (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{name} holds no state that this levattn can make: {error!r}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a file, which appears complete or not at all.

        Parameters
        ----------
        path : path-like
            The file.

        Raises
        ------
        OSError
            If it cannot be written.
        TypeError
            As `to_bytes`, or if `path` is no path.
        ValueError
            If `path` is empty.
        """
        with replace_file(path) as stream:
            stream.write(self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the state that `save` wrote.

        Parameters
        ----------
        path : path-like
            The file.

        Returns
        -------
        state
            As from `from_bytes`.

        Raises
        ------
        OSError
            If it cannot be read.
        TypeError
            If `path` is no path.
        ValueError
            If `path` is empty. If the file holds no such state, or a damaged one.
        """
        return cls._made_from(Path(checked_path(path)).read_bytes(), os.fspath(path), "a file that save wrote")

    def copy(self) -> Self:
        """Return an independent copy.

        Returns
        -------
        state
            Later updates of either state do not change the other.
        """
        return copy.copy(self)
