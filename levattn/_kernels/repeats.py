"""Calls of tensors on a device whose launches are kept, for later calls of the same kind.

The host takes longer to prepare a short call than the device takes to run it. If launches depend on shapes and numbers
alone, they need not be worked out again. The second call of a kind is noted on a tape (`cuda_source.taped`): its
launches, the arrays that it makes, and the tables that it sends. A later call makes these arrays anew and launches the
same kernels, with other addresses. The tables stay on the device. So calls of a kind that comes once leave nothing.

A call is kept only if each address that it launched with is known. It is the address of a given tensor, of an array
that `new_array` made, or of a table. So a call that copies an array is never kept. But the call must do nothing else
on the device: it must not fill an array by a function of CuPy, for example.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal

import numpy as np

from levattn._core.arrays import refuse_capture
from levattn._kernels.cuda_source import Launch, Tape, is_taping, layout, pointer_to, run_kernel, taped

_MOST = 64  # kinds of calls that are known
_ALIGNED = 16  # bytes of the widest access of a kernel

_KNOWN: OrderedDict[Hashable, Repeat | Literal["met", "new"]] = OrderedDict()  # "new": worked out each time
_LOCK = Lock()


@dataclass(frozen=True, eq=False)
class Repeat:
    """The launches of a call.

    `made`: shapes, strides and torch dtypes of the arrays that it makes, and whether with zeros. `results`: which of
    these are its results, or None. `launches`: each with its arguments, and which of these are addresses of a given
    tensor, or of an array that it makes. `tables`: arrays that arguments refer to.
    """

    made: list[tuple[tuple[int, ...], tuple[int, ...], Any, bool]]
    results: list[int | None]
    launches: list[tuple[Launch, list[Any], list[tuple[int, int]]]]
    tables: list[Any]

    @classmethod
    def of(cls, tape: Tape, tensors: Sequence[Any], results: Sequence[Any]) -> Repeat | None:
        """Return the launches on a tape, or None if they read or return an array that is not known."""
        starts = [*map(_start, tensors), *(_start(array) for array, _ in tape.made)]
        places = {start: i for i, start in enumerate(starts)}
        if len(places) < len(starts) or not all(array.size for array, _ in tape.made):
            return None
        mine = [None if found is None else places.get(_start(found), -1) - len(tensors) for found in results]
        there = [place for place in mine if place is not None]
        if min(there, default=0) < 0 or len(set(there)) < len(there):
            return None
        returned = [found for found in results if found is not None]
        if any(x.numel() != tape.made[place][0].size for x, place in zip(returned, there, strict=True)):
            return None  # launches write more than is returned
        tables: list[Any] = []
        launches = []
        for what, arguments in tape.launches:
            values, here = arguments.copy(), []
            for i, kind in enumerate(layout(what.source, what.name)):
                if kind != "P":
                    continue
                array = values[i]
                place = None if array is None else places.get(_start(array))
                if place is not None:
                    here.append((i, place))
                    values[i] = None  # nothing of this call is held
                    continue
                if array is not None and not any(_lies_in(array, table) for table in tape.sent):
                    return None
                tables.append(array)
                values[i] = pointer_to(array)
            launches.append((what, values, here))
        shapes = [
            (tuple(array.shape), tuple(step // array.itemsize for step in array.strides)) for array, _ in tape.made
        ]
        for place, found in zip(mine, results, strict=True):
            if place is not None:  # it may be a view of what was made
                shapes[place] = tuple(found.shape), found.stride()
        made = [(*shape, _dtype(array), zeros) for shape, (array, zeros) in zip(shapes, tape.made, strict=True)]
        return cls(made, mine, launches, tables)

    def run(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Return the results for tensors as the first ones were."""
        refuse_capture()
        made = []
        for shape, steps, dtype, zeros in self.made:
            array = tensors[0].new_empty_strided(shape, steps, dtype=dtype)
            made.append(array.zero_() if zeros else array)
        starts = [pointer_to(array) for array in (*tensors, *made)]
        for what, values, here in self.launches:
            values = values.copy()
            for place, i in here:
                values[place] = starts[i]
            run_kernel(what, values)
        return tuple([None if mine is None else made[mine] for mine in self.results])


def by_launches(
    name: str, tensors: Sequence[Any], others: Hashable, call: Callable[[], tuple[Any, ...]]
) -> tuple[Any, ...]:
    """Return the tensors, or None for some, that `call` returns: by its kept launches, if there are any.

    `tensors`: all that the call reads, on one device. `others`: all else that its launches depend on, and the stream,
    on which its tables are freed.
    """
    starts = [tensor.data_ptr() for tensor in tensors]
    if is_taping() or len(set(starts)) < len(starts):
        return call()
    shapes = [
        (tensor.shape, tensor.stride(), tensor.dtype, start % _ALIGNED)
        for tensor, start in zip(tensors, starts, strict=True)
    ]
    key = (name, *shapes, others)
    with _LOCK:
        known = _KNOWN.get(key)
        _KNOWN[key] = known or "met"
        _KNOWN.move_to_end(key)
        if len(_KNOWN) > _MOST:
            _KNOWN.popitem(last=False)
    if isinstance(known, Repeat):
        return known.run(tensors)
    if known != "met":
        return call()
    with taped() as tape:
        results = call()
    found = Repeat.of(tape, tensors, results)
    with _LOCK:
        if key in _KNOWN:
            _KNOWN[key] = found or "new"
    return results


def forget_calls() -> None:
    """Forget all calls."""
    with _LOCK:
        _KNOWN.clear()


def _start(array: Any) -> int:
    """Return where an array or a tensor begins."""
    return int(array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr)


def _lies_in(array: Any, table: Any) -> bool:
    return not array.size or 0 <= _start(array) - _start(table) < table.nbytes


def _dtype(array: Any) -> Any:
    """Return torch's dtype for an array; words of 16 bits are bfloat16."""
    return getattr(sys.modules["torch"], "bfloat16" if array.dtype == np.uint16 else array.dtype.name)
