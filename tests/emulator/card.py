"""Where kernels of the tests run: in main memory, or on a card that gets the same checked arguments.

What a kernel gets in place of arrays (`zones.Copy`) is copied to the card, and back when the kernel has ended, so that
the tests of the emulator are those of the card. ``TEST_DEVICE`` in the environment chooses: ``emulator``, even where
there is a card, or ``stand-in``, main memory that is filled and read as a card's is, by which this is tested without
one. Else kernels run on a card where CuPy finds one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from levattn._kernels import cuda_compile, cuda_source

from .zones import LINE, Copy, DeviceError

LEAST_SHARED = 99 * 1024  # bytes of a block on supported cards that have the least, of capability 8.6, 8.9 and 12.0
CHOSEN = os.environ.get("TEST_DEVICE", "")
# Before a test puts others in their place
TRUE = {name: getattr(cuda_source, name) for name in ("_module", "_compiled", "_address", "_shared_limit")}


class MainMemory:
    """No card: copies lie where kernels of the emulator find them."""

    shared_limit = 227 * 1024  # of compute capability 9.0

    @contextmanager
    def holding(self, copies: Sequence[Copy]) -> Iterator[list[int]]:
        """Where each copy lies while a kernel runs."""
        yield [copy.bytes.ctypes.data for copy in copies]

    def launch(self, kernel: Any, *launch: Any, shared_mem: int) -> None:
        kernel.entry(*launch, shared_mem=shared_mem)


class Card:
    """A CUDA device: the runtime of CuPy, and what compiles kernels of the table, and of other sources, for it."""

    def __init__(self, runtime: Any, of_table: Callable[..., Any], of_text: Callable[..., Any]) -> None:
        self._runtime, self.of_table, self.of_text = runtime, of_table, of_text

    @property
    def shared_limit(self) -> int:
        attribute = self._runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin
        return int(self._runtime.deviceGetAttribute(attribute, self._runtime.getDevice()))

    @contextmanager
    def holding(self, copies: Sequence[Copy]) -> Iterator[list[int]]:
        """Where each copy lies while a kernel runs; after it each is what the kernel left there."""
        runtime, places = self._runtime, []
        with ExitStack() as held:
            for copy in copies:
                places.append(runtime.malloc(copy.bytes.size))
                held.callback(runtime.free, places[-1])
                data = copy.bytes.ctypes.data
                runtime.memcpy(places[-1], data, copy.bytes.size, runtime.memcpyHostToDevice)
            yield places
            for copy, place in zip(copies, places, strict=True):
                data = copy.bytes.ctypes.data
                runtime.memcpy(data, place, copy.bytes.size, runtime.memcpyDeviceToHost)

    def launch(self, kernel: Any, *launch: Any, shared_mem: int) -> None:
        true = kernel.on_card
        if kernel.was_asked_for_shared_memory:
            true.max_dynamic_shared_size_bytes = kernel.max_dynamic_shared_size_bytes
        try:
            true(*launch, shared_mem=shared_mem)
            self._runtime.deviceSynchronize()
        except RuntimeError as error:
            raise DeviceError(f"{kernel.name}, on the card: {error}") from error


class StandIn:
    """The runtime of a card that is main memory: what was allocated is filled and read as a whole."""

    memcpyHostToDevice, memcpyDeviceToHost = 1, 2  # noqa: N815 (the names are CuPy's)
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97  # noqa: N815

    def __init__(self) -> None:
        self._held: dict[int, np.ndarray] = {}
        self.launches = 0

    def getDevice(self) -> int:  # noqa: N802
        return 0

    def deviceGetAttribute(self, attribute: int, _device: int) -> int:  # noqa: N802
        return {self.cudaDevAttrMaxSharedMemoryPerBlockOptin: MainMemory.shared_limit}[attribute]

    def malloc(self, size: int) -> int:
        room = np.zeros(size + LINE, np.uint8)
        place = room[-room.ctypes.data % LINE :][:size]
        self._held[place.ctypes.data] = place
        return place.ctypes.data

    def free(self, place: int) -> None:
        del self._held[place]

    def memcpy(self, target: int, source: int, size: int, kind: int) -> None:
        if self._held[target if kind == self.memcpyHostToDevice else source].size != size:
            raise RuntimeError(f"{size} bytes are copied, which is not what was allocated")
        ctypes.memmove(target, source, size)

    def deviceSynchronize(self) -> None:  # noqa: N802
        self.launches += 1


def true_cupy() -> Any:
    """CuPy, None where it is not installed."""
    if find_spec("cupy") is None:
        return None
    import cupy

    return cupy


CUPY = true_cupy()


def device_count() -> int:
    """Number of true CUDA devices that CuPy finds and the tests may use."""
    try:
        return int(CUPY.cuda.runtime.getDeviceCount()) if CUPY is not None and not CHOSEN else 0
    except CUPY.cuda.runtime.CUDARuntimeError:  # no driver
        return 0


def on_card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let `cuda_source` make CuPy's arrays and run kernels on them, as outside the tests; return CuPy."""
    for name, value in TRUE.items():
        monkeypatch.setattr(cuda_source, name, value)
    return CUPY


def true_card() -> Card:
    """The current device of CuPy."""

    def of_table(source: str, name: str, types: tuple[str, ...]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            on_card(patch)
            return TRUE["_compiled"](source, name, types, CUPY.cuda.runtime.getDevice())

    def of_text(code: str, _names: tuple[str, ...], name: str, layout: str) -> Any:
        return cuda_compile.loaded(CUPY, code, name, CUPY.cuda.runtime.getDevice(), layout)

    return Card(CUPY.cuda.runtime, of_table, of_text)
