"""What compiled code works on, as one record: numbers, and where arrays lie. Its fields are read by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["Record", "record_type"]


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
        self.data = np.zeros(1, kind)
        self._kept: list[Any] = []
        self.put(fields)

    def put(self, fields: Mapping[str, Any]) -> None:
        """Write numbers, and of arrays the address and the steps that the field holds; None is no array.

        An array of rows, with one axis more than there are steps, is copied unless their numbers lie side by side.
        """
        for name, value in fields.items():
            if isinstance(value, np.ndarray):
                place = self.data.dtype[name]
                if value.ndim == len(place) and value.strides[-1] != value.itemsize:
                    value = np.ascontiguousarray(value)
                self._kept.append(value)
                address = value.__array_interface__["data"][0] if value.size else 0
                self.data[name] = (address, *value.strides[: len(place) - 1]) if place.names else address
            elif value is not None:
                self.data[name] = value

    def with_scratch(self, arrays: Mapping[str, Any]) -> Record:
        """Return a record for one thread, that has these arrays."""
        made = Record(self.data.dtype)
        made.data[:] = self.data
        made.put(arrays)
        return made
