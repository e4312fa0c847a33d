"""What a call on a CUDA device launches, waits for and copies, counted on the emulator.

CuPy works in launches: each function, operator and method that makes or changes an array counts one here, as do the
kernels of the library. What gives a view counts none, nor does memory that nobody writes. The host waits where it
reads: `get`, a number of an array, and wherever CuPy must know a size (`nonzero`, rows picked by flags). An array of
numpy that goes to the device is a copy. CuPy needs more launches for some functions (sorts, scans), and none of this
is time: a launch takes a host some microseconds, and a wait as long as what is waited for.

``PYTHONPATH=tests python tests/cuda/counting.py`` prints what the calls of `test_cuda_costs.py` take.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import array_api_compat
import numpy as np
import pytest

from emulator import device

__all__ = ["Counts", "counted", "measured"]

# Where CuPy must know how many flags are set before it can make the result
_SIZED = ("nonzero", "flatnonzero", "argwhere", "unique", "unique_values", "compress")
_READS = ("__bool__", "__int__", "__float__", "__index__")
_FREE = ("empty", "empty_like", "from_dlpack", "finfo", "iinfo", "result_type", "broadcast_shapes", "shape", "ndim")


@dataclass
class Counts:
    """The names of what was launched and waited for, and the bytes of each copy to the device, in order."""

    launches: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    fetched: int = 0  # bytes that came to main memory

    def clear(self) -> None:
        """Forget what was counted."""
        self.launches.clear()
        self.waits.clear()
        self.copies.clear()
        self.fetched = 0

    @property
    def figures(self) -> tuple[int, int, int]:
        """Launches, waits and copies to the device."""
        return len(self.launches), len(self.waits), len(self.copies)

    def __str__(self) -> str:
        """Return what was launched most often first."""
        often = ", ".join(f"{name} ({times})" for name, times in Counter(self.launches).most_common())
        return f"launches, waits, copies: {self.figures}\nlaunched: {often}\nwaited: {', '.join(self.waits)}"


def counted(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Count until the test ends; the library must be on the emulator (`library_on_device`) already."""
    counts = Counts()
    array, on_numpy = device.DeviceArray, device.on_numpy

    def launched(name: str, result: Any, given: Any) -> Any:
        """Count a launch, unless the result is a view of what was given, or empty."""
        held = [device.bare(each) for each in _arrays(result) if each.size]
        sources = [device.bare(each) for each in _arrays(given)]
        views = [any(np.may_share_memory(each, source) for source in sources) for each in held]
        if not all(views) and name not in _FREE:
            counts.launches.append(name)
        return result

    def function(real: Callable[..., Any], owner: str = "", name: str = "") -> Callable[..., Any]:
        called = on_numpy(real, owner, name)

        def counting(*args: Any, **options: Any) -> Any:
            result = called(*args, **options)
            if name in _SIZED:
                counts.waits.append(name)
            given = (*args, getattr(real, "__self__", None), *options.values())
            into = options.get("out") is not None or (owner == "ndarray" and name in ("fill", "sort", "put"))
            return launched(name, result, () if into else given)

        return counting

    def ufunc(self: Any, which: Any, method: str, *inputs: Any, **options: Any) -> Any:
        counts.launches.append(which.__name__)
        return apply(self, which, method, *inputs, **options)

    def get_item(self: Any, key: Any) -> Any:
        found = take(self, key)
        if any(each.dtype == np.bool_ for each in _arrays(key)):
            counts.waits.append("array[flags]")
        return launched("array[index]", found, self)

    def set_item(self: Any, key: Any, value: Any) -> None:
        put(self, key, value)
        if any(device.bare(each).ctypes.data == _start(self, key) for each in _arrays(value)):
            return  # ``a[i] += b`` has been done in place
        counts.launches.append("array[index] =")

    def get(self: Any) -> Any:
        counts.waits.append("get")
        counts.fetched += self.nbytes
        return fetch(self)

    def as_array(self: Any, given: Any, dtype: Any = None, *args: Any, **options: Any) -> Any:
        found = send(self, given, dtype, *args, **options)
        if isinstance(given, device.DeviceArray):
            return launched("asarray", found, given)
        counts.copies.append(found.nbytes)
        return found

    def kernel(self: Any, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        counts.launches.append(self.kernel.name)
        run(self, grid, block, args, shared_mem=shared_mem)

    is_lazy = array_api_compat.is_lazy_array  # which knows CuPy's arrays, and must look at those of the emulator
    apply, take, put, fetch = array.__array_ufunc__, array.__getitem__, array.__setitem__, array.get
    send, run = device.Namespace.asarray, device.DeviceKernel.__call__
    for owner, name, other in (
        (array_api_compat, "is_lazy_array", lambda x: not device.is_on_device(x) and is_lazy(x)),
        (device, "on_numpy", function),
        (array, "__array_ufunc__", ufunc),
        (array, "__getitem__", get_item),
        (array, "__setitem__", set_item),
        (array, "get", get),
        (device.Namespace, "asarray", as_array),
        (device.Namespace, "array", as_array),
        (device.DeviceKernel, "__call__", kernel),
        *((array, name, _reading(getattr(array, name), name, counts)) for name in _READS),
    ):
        monkeypatch.setattr(owner, name, other)
    return counts


def _reading(read: Callable[[Any], Any], name: str, counts: Counts) -> Callable[[Any], Any]:
    def counting(self: Any) -> Any:
        counts.waits.append(name)
        return read(self)

    return counting


def _arrays(value: Any) -> Iterator[Any]:
    """Give the arrays of the device in a value."""
    if isinstance(value, device.DeviceArray):
        yield value
    elif isinstance(value, np.ndarray):  # of a method, that of the array it belongs to
        yield device.DeviceArray(value)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _arrays(entry)


def _start(array: Any, key: Any) -> int | None:
    """Return where the entries of a key begin in memory; None where they are no view."""
    found = array.held[device.bare(key)]
    return found.ctypes.data if isinstance(found, np.ndarray) and np.may_share_memory(found, array.held) else None


@contextmanager
def measured(make: Callable[[Any], Callable[[], Any]]) -> Iterator[Counts]:
    """Give what a call takes the second time, as the first one may prepare things; `make` makes it of CuPy."""
    with pytest.MonkeyPatch.context() as patch:
        cupy = device.library_on_device(patch)
        call = make(cupy)
        counts = counted(patch)
        call()
        counts.clear()
        call()
        yield counts


def main() -> None:
    """Print the figures of all forms of the operators."""
    from test_cuda_costs import FORMS

    lines = [
        "| call | launches | waits | copies to the device | bytes to main memory |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, make in FORMS.items():
        with measured(make) as counts:
            lines.append(f"| {name} | {' | '.join(map(str, (*counts.figures, counts.fetched)))} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
