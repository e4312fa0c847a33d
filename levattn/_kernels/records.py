"""What compiled code works on, as one record: numbers, and where arrays lie. Its fields are read by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["Record", "record_type"]

_LINE = 64  # bytes of a cache line


def record_type(arrays: Sequence[str], axes: Sequence[str], whole: Sequence[str], real: Sequence[str] = ()) -> Any:
    """Return the dtype of records with so named arrays, int64 numbers (addresses among them) and float64 numbers.

    Of an array there are the address, `at`, which is 0 where there is no array, and the steps along so named axes, in
    bytes.
    """
    place = np.dtype([("at", np.int64), *((axis, np.int64) for axis in axes)], align=True)
    fields = [(name, place) for name in arrays] + [(name, np.int64) for name in whole]
    return np.dtype([*fields, *((name, np.float64) for name in real)], align=True)


class Record:
    """One record, in the array `data` of one element, and the arrays whose addresses it has."""

    def __init__(self, kind: Any, /, **fields: Any) -> None:
        self._words = np.zeros(kind.itemsize // 8, np.int64)  # of which each field has some; by their names it is slow
        self.data = self._words.view(kind)
        self._kept: list[Any] = []
        self.put(fields)

    def put(self, fields: Mapping[str, Any]) -> None:
        """Write numbers, and of arrays the address and the steps that the field holds; None is no array.

        An array of rows, with one axis more than there are steps, is copied unless their numbers lie side by side, and
        one whose field holds no steps unless all of its numbers do.
        """
        places = self.data.dtype.fields
        for name, value in fields.items():
            kind, offset = places[name][:2]
            first = offset // 8
            if isinstance(value, np.ndarray):
                side_by_side = value.ndim != len(kind) or value.strides[-1] == value.itemsize
                if not (side_by_side if len(kind) else value.flags.c_contiguous):
                    value = np.ascontiguousarray(value)
                self._kept.append(value)
                self._words[first] = value.__array_interface__["data"][0] if value.size else 0
                for axis in range(1, len(kind)):
                    self._words[first + axis] = value.strides[axis - 1]
            elif isinstance(value, float):
                self._words.view(np.float64)[first] = value
            elif value is not None:
                self._words[first] = value

    def with_scratch(self, sizes: Mapping[str, int]) -> Record:
        """Return a record for one thread, whose fields have addresses of scratch of so many bytes."""
        made = Record(self.data.dtype)
        made._words[:] = self._words
        starts = [0]
        for size in sizes.values():
            starts.append(starts[-1] + -(-size // _LINE) * _LINE)
        room = np.empty(starts[-1] + _LINE, np.uint8)
        made._kept.append(room)
        base = -(-room.__array_interface__["data"][0] // _LINE) * _LINE
        places = self.data.dtype.fields
        for name, start in zip(sizes, starts, strict=False):
            made._words[places[name][1] // 8] = base + start
        return made
