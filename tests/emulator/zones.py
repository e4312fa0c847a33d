"""What a kernel gets in place of arrays: copies between zones of NaN, which tell what was written out of bounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

ZONE = 1 << 16  # bytes of NaN before and after an array
LINE = 256  # what the start of an allocation is aligned to


class DeviceError(RuntimeError):
    """A launch that a device would refuse, or that would hang or corrupt memory there."""


class Copy:
    """The bytes that some arrays lie in, between zones of NaN; what none of them covers is NaN too."""

    def __init__(self, arrays: Sequence[tuple[int, np.ndarray]]) -> None:
        self._arrays = dict(arrays)
        bounds = [np.lib.array_utils.byte_bounds(array) for array in self._arrays.values()]
        self._low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
        # As far from an aligned address as on a device, where the array that owns the memory starts at one
        self._start = ZONE + (self._low - _owner(arrays[0][1])) % LINE
        size = self._start + high - self._low + ZONE
        room = np.full(size + LINE, 0xFF, np.uint8)
        self.bytes = room[-room.ctypes.data % LINE :][:size]
        self._covered = np.zeros(size, np.bool_)
        for array in self._arrays.values():
            self._view(array)[...] = array
            np.ndarray(
                (*array.shape, array.itemsize), np.bool_, self._covered, self._offset(array), (*array.strides, 1)
            )[...] = True
        self.offsets = {k: self._offset(array) for k, array in arrays}

    def _offset(self, array: np.ndarray) -> int:
        return self._start + array.ctypes.data - self._low

    def _view(self, array: np.ndarray) -> np.ndarray:
        return np.ndarray(array.shape, array.dtype, self.bytes, self._offset(array), array.strides)

    def check(self, kernel: str) -> None:
        wrong = np.flatnonzero((self.bytes != 0xFF) & ~self._covered)
        if wrong.size:
            whose = ", ".join(f"{k} ({array.dtype}, shape {array.shape})" for k, array in self._arrays.items())
            raise DeviceError(
                f"{kernel} wrote {wrong.size} bytes out of bounds around argument {whose}, "
                f"the first of them {wrong[0] - self._start} bytes from its start"
            )

    def give_back(self, numbers: Iterable[int]) -> None:
        for k in numbers:
            self._arrays[k][...] = self._view(self._arrays[k])


def _owner(array: np.ndarray) -> int:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.ctypes.data


def copies_of(arrays: Sequence[tuple[int, np.ndarray]]) -> list[Copy]:
    """Arrays whose spans of memory overlap are copied together: they stay aliases of each other."""
    groups: list[list[tuple[int, np.ndarray]]] = []
    end = 0
    for k, array in sorted(arrays, key=lambda pair: np.lib.array_utils.byte_bounds(pair[1])):
        low, high = np.lib.array_utils.byte_bounds(array)
        if low < end:
            groups[-1].append((k, array))
        else:
            groups.append([(k, array)])
        end = max(end, high)
    return [Copy(group) for group in groups]
