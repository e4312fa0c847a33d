"""What is current for a thread of the emulator, as ``cupy.cuda`` keeps it: a device, of two, a stream, an allocator.

Work is refused on an array that is not on the current device. `waits` says which stream was told to wait for which.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

COUNT = 2  # devices

# What happened, in order, until a test clears it
waits: list[tuple[int, int]] = []  # (the stream that waits, the stream that it waits for), by their handles
launches: list[tuple[int, int]] = []  # (device, stream) of each kernel
own: list[int] = []  # bytes of arrays that the current allocator did not give


class Current(threading.local):
    """What is current for this thread."""

    def __init__(self) -> None:
        self.device = 0
        self.streams = [0]  # handles, the current one last; 0 is the null stream
        self.allocator: Callable[[int], Any] | None = None  # None: memory of numpy


CURRENT = Current()


class Device:
    """A device, current within a ``with`` statement."""

    def __init__(self, device: int) -> None:
        if not 0 <= device < COUNT:
            raise ValueError(f"there is no device {device}")
        self.id = device
        self._before: list[int] = []

    def __enter__(self) -> Device:
        self._before.append(CURRENT.device)
        CURRENT.device = self.id
        return self

    def __exit__(self, *_: object) -> None:
        CURRENT.device = self._before.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"<device {self.id} of the emulator>"


class Stream:
    """A stream, current within a ``with`` statement."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    @classmethod
    def from_external(cls, stream: Any) -> Stream:
        version, handle = stream.__cuda_stream__()
        assert version == 0
        return cls(handle)

    def record(self) -> int:
        return self.ptr

    def wait_event(self, event: int) -> None:
        waits.append((self.ptr, event))

    def __enter__(self) -> Stream:
        CURRENT.streams.append(self.ptr)
        return self

    def __exit__(self, *_: object) -> None:
        CURRENT.streams.pop()


class UnownedMemory:
    """Memory that another library gave."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int) -> None:
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self.ptr, False), "shape": (self.size,), "typestr": "|u1", "version": 3}


class MemoryPointer:
    def __init__(self, mem: UnownedMemory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


@contextmanager
def using_allocator(allocator: Callable[[int], Any]) -> Iterator[None]:
    before, CURRENT.allocator = CURRENT.allocator, allocator
    try:
        yield
    finally:
        CURRENT.allocator = before


def on_memory(shape: tuple[int, ...], dtype: Any, pointer: MemoryPointer, strides: Any = None) -> np.ndarray:
    """The array of numpy that lies there."""
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, np.asarray(pointer.mem), pointer.ptr - pointer.mem.ptr, strides)


def allocated(array: np.ndarray) -> np.ndarray:
    """A new array of numpy in memory that the current allocator gives; views, and what it gave, as they are."""
    if array.base is not None or not array.size:
        return array
    if CURRENT.allocator is None:
        own.append(array.nbytes)
        return array
    there = on_memory(array.shape, array.dtype, CURRENT.allocator(array.nbytes), _dense_strides(array))
    there[...] = array
    return there


def _dense_strides(array: np.ndarray) -> tuple[int, ...] | None:
    """Strides that leave no room between the numbers: those of the array where these do not either."""
    return array.strides if array.flags.forc else None


def memory_of(array: np.ndarray) -> Any:
    """What gave the memory of an array: an `UnownedMemory`, or what has no `_owner` where numpy did."""
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return array


def cuda() -> SimpleNamespace:
    """What the library uses of ``cupy.cuda``."""
    return SimpleNamespace(
        Device=Device,
        MemoryPointer=MemoryPointer,
        Stream=Stream,
        UnownedMemory=UnownedMemory,
        get_current_stream=lambda: Stream(CURRENT.streams[-1]),
        runtime=SimpleNamespace(getDevice=lambda: CURRENT.device, getDeviceCount=lambda: COUNT),
        using_allocator=using_allocator,
    )
