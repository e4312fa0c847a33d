"""A `Record` packs numbers and addresses of arrays into one struct, the only argument of a compiled kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from levattn._core.types import Int64

_LINE = 64  # bytes of a cache line
_addressof, _of_memory = ctypes.addressof, ctypes.c_char.from_buffer


class RecordType:
    """Records with named arrays, int64 numbers (addresses among them) and float64 numbers.

    An array has its address, `at`, which is 0 where there is no array, and its steps along the named axes, in bytes.
    """

    def __init__(self, arrays: Sequence[str], axes: Sequence[str], whole: Sequence[str], real: Sequence[str] = ()):
        place = np.dtype([("at", np.int64), *((axis, np.int64) for axis in axes)], align=True)
        fields: list[tuple[str, Any, int]] = [(name, place, 1 + len(axes)) for name in arrays]
        fields += [(name, np.int64, 0) for name in whole]
        fields += [(name, np.float64, 0) for name in real]
        self.dtype = np.dtype([(name, kind) for name, kind, _ in fields], align=True)
        self.words = 0
        # the first word of each field and the number of its parts, because looking them up in a dtype is slow
        self.places: dict[str, tuple[int, int]] = {}
        for name, _, parts in fields:
            self.places[name] = self.words, parts
            self.words += parts or 1

    def scratch(self, sizes: Mapping[str, int]) -> Scratch:
        """Return the layout of a thread's scratch, given the bytes for each of some fields."""
        starts = np.cumsum([0, *(-(-size // _LINE) * _LINE for size in sizes.values())])
        return Scratch(np.array([self.places[name][0] for name in sizes]), starts[:-1], int(starts[-1]))


@dataclass(frozen=True, eq=False)
class Scratch:
    """The words of a record that hold addresses of scratch, their offsets in it, and its size in bytes."""

    words: Int64
    starts: Int64
    size: int


def address_of(array: Any) -> int:
    """Return the address of an array, 0 if it is empty."""
    try:
        return _addressof(_of_memory(array))  # in a quarter of the time of NumPy's own interface
    except (BufferError, TypeError, ValueError):  # it is empty, has gaps, or may not be written to
        return int(array.__array_interface__["data"][0]) if array.size else 0


class Record:
    """One record, and the arrays whose addresses it holds."""

    def __init__(self, kind: RecordType, scratch: Scratch, like: Record | None = None, /, **fields: Any) -> None:
        self._kind, self._scratch = kind, scratch
        self._words: Int64 = np.zeros(kind.words, np.int64) if like is None else like._words.copy()
        self._kept: list[Any] = [like]
        self.put(fields)

    @classmethod
    def begun(cls, kind: RecordType, scratch: Scratch, /, **fields: Any) -> tuple[RecordType, Scratch, Record]:
        """Return the arguments for records that begin with the same numbers and arrays."""
        return kind, scratch, cls(kind, scratch, **fields)

    def put(self, fields: Mapping[str, Any]) -> None:
        """Write numbers, and the address and steps of each array; None stands for no array.

        An array of rows has one axis more than its field has steps; it is copied unless each row is contiguous. An
        array whose field has no steps is copied unless all of it is contiguous.
        """
        words, places, kept = self._words, self._kind.places, self._kept
        for name, value in fields.items():
            if value is None:
                continue
            first, count = places[name]
            if not isinstance(value, np.ndarray):
                target = words.view(np.float64) if isinstance(value, float) else words
                target[first] = value
                continue
            if not (value.ndim != count or value.strides[-1] == value.itemsize if count else value.flags.c_contiguous):
                value = np.ascontiguousarray(value)
            kept.append(value)
            words[first] = address_of(value)
            if count > 1:
                for axis, step in enumerate(value.strides[: count - 1], first + 1):
                    words[axis] = step

    def for_thread(self) -> tuple[Any, Any]:
        """Return the record for compiled code, and its own scratch, which the caller must keep alive."""
        words, room = self._words.copy(), np.empty(self._scratch.size + _LINE, np.uint8)
        base = -(-address_of(room) // _LINE) * _LINE
        words[self._scratch.words] = self._scratch.starts + base
        return np.ndarray(1, self._kind.dtype, words), room
