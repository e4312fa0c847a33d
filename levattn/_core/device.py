"""The place of a call: the CUDA device of its arrays, and for torch its current stream and its memory.

`where_arrays_are` wraps every function that takes or holds arrays. CuPy keeps device, stream and allocator for each
thread. So each entry point needs the wrapper: public calls, and operators, which autograd calls in its own threads.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache, lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from levattn._core.arrays import has_cupy, is_torch, layers_of, on_cuda, tensor_behind, without_wrappers
from levattn._core.jax import BY_NUMPY, called_by_numpy, has_jax

P = ParamSpec("P")
R = TypeVar("R")


class _Kind(Enum):
    TENSOR = auto()
    CUPY = auto()
    TUPLE = auto()
    HOLDER = auto()
    CACHE = auto()


_NOTHING = {np.ndarray, type(None), bool, int, float, str}  # types of values that are never on a device
_KINDS: dict[type, _Kind] = {}  # of other types

_entered = threading.local()  # `stream`: the device of this thread, and torch's stream on it


def where_arrays_are(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function work on the CUDA device of the arrays among its arguments.

    The wrapper looks at the arguments and at the items of tuples. An object that holds arrays has an attribute
    ``_held_array``: an array, or another object that holds one. A generator cannot be wrapped, because it runs later.
    """
    by_numpy = function in BY_NUMPY

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        modules = sys.modules
        torch, can_be_there = modules.get("torch"), modules.get("cupy") is not None
        if torch is not None:
            # torch's compiler calls torch operators, which enter here when they run. This check comes first, because
            # compilers of earlier releases cannot trace the code below
            compiler = getattr(torch, "compiler", None)  # another thread may be importing torch
            if compiler is not None and compiler.is_compiling():
                return function(*args, **options)
            can_be_there = can_be_there or _has_begun(torch)
        if by_numpy and "jax" in modules and has_jax(args, options):
            return called_by_numpy(function, args, options)  # type: ignore[no-any-return]
        if not can_be_there:
            return function(*args, **options)
        for value in args:
            if type(value) not in _NOTHING:
                break
        else:
            for name in options:
                if type(options[name]) not in _NOTHING:
                    break
            else:
                return function(*args, **options)
        place = _place(function, args, options)
        if place is None:
            return function(*args, **options)
        with place:
            return function(*args, **options)

    return call


def _has_begun(torch: Any) -> bool:
    """Tell whether torch has used a CUDA device."""
    initialized = getattr(getattr(torch, "cuda", None), "is_initialized", None)
    return initialized is not None and bool(initialized())


def place_of_torch() -> tuple[int, int] | None:
    """Return the device and the stream of torch on which CuPy works in this thread, or None if it does not."""
    return getattr(_entered, "stream", None)


def on_a_device(value: Any) -> bool:
    """Tell whether a value is, or holds, an array on a CUDA device."""
    torch, cupy = (sys.modules.get(name) for name in ("torch", "cupy"))
    return (cupy is not None or (torch is not None and _has_begun(torch))) and _array_in(value) is not None


def _kind_of(value: Any) -> _Kind | None:
    """Return the kind of a value by its type, or None if it holds no array, and cache it."""
    kind = type(value)
    if is_torch(value):
        _KINDS[kind] = _Kind.TENSOR
    elif on_cuda(value):
        _KINDS[kind] = _Kind.CUPY
    elif isinstance(value, tuple):
        _KINDS[kind] = _Kind.TUPLE
    elif hasattr(kind, "_held_array"):
        _KINDS[kind] = _Kind.HOLDER
    elif layers_of(value) is not None:
        _KINDS[kind] = _Kind.CACHE
    else:
        _NOTHING.add(kind)
    return _KINDS.get(kind)


def _array_in(value: Any) -> Any:
    """Return the array on a CUDA device that a value is or holds, or None."""
    if type(value) in _NOTHING:
        return None
    kind = _KINDS.get(type(value)) or _kind_of(value)
    if kind is _Kind.TENSOR:
        return value if value.is_cuda else None
    if kind is _Kind.CUPY:
        return value
    if kind is _Kind.TUPLE:
        return next((found for part in value if (found := _array_in(part)) is not None), None)
    if kind is _Kind.CACHE:
        return _array_in(tuple(layers_of(value) or ())[:1])
    # an object under construction holds none yet
    found = _array_in(getattr(value, "_held_array", None)) if kind is _Kind.HOLDER else None
    # an array made from a tensor follows torch, whichever library holds it
    behind = tensor_behind(found) if found is not None and on_cuda(found) else None
    return found if behind is None else behind


def _device_of(array: Any) -> int:
    return int(array.device.index if is_torch(array) else array.device.id)


def _place(
    function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> AbstractContextManager[Any] | None:
    """Return the place of the arrays among the arguments, or None if it is current; raise if there are two devices."""
    first, tensors, others, device = None, False, False, -1
    for value in (*args, *options.values()) if options else args:
        array = _array_in(value)
        if array is None:
            continue
        here = _device_of(array)
        if first is None:
            first, device = array, here
        elif here != device:
            _refuse(function, args, options)
        if is_torch(array):
            tensors = True
        else:
            others = True
    if first is None or not has_cupy():  # torch without CuPy needs no place
        return None
    if tensors:
        stream = device, _stream_of_torch(device)
        return None if getattr(_entered, "stream", None) == stream else _ByTorch(*stream, wait=others)
    here = sys.modules["cupy"].cuda.runtime.getDevice()
    return None if here == device else first.device


def _stream_of_torch(device: int) -> int:
    """Return the handle of torch's current stream of a device."""
    torch = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # without an object; builds without CUDA lack it
    return int(torch.cuda.current_stream(device).cuda_stream if raw is None else raw(device))


def _refuse(function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Raise an error that names two arrays on different devices."""
    given: list[tuple[int | str, Any]] = [*enumerate(args), *options.items()]
    arrays = {where: array for where, value in given if (array := _array_in(value)) is not None}
    names = function.__code__.co_varnames[: function.__code__.co_argcount]

    def name(where: int | str) -> str:
        if isinstance(where, str):
            return where
        found = names[where] if where < len(names) else f"argument {where}"
        return f"this {type(args[0]).__name__}" if found == "self" else found

    (mine, first), *others = ((name(where), array) for where, array in arrays.items())
    here = _device_of(first)
    theirs, other = next(pair for pair in others if _device_of(pair[1]) != here)
    moved = (
        f"{theirs}.to('cuda:{here}')"
        if is_torch(other)
        else f"cupy.asarray({theirs}) in `with cupy.cuda.Device({here}):`"
    )
    raise TypeError(
        f"{mine} is on CUDA device {here} and {theirs} on CUDA device {_device_of(other)}; expected all arrays of a "
        f"call on one device. Move one of them, e.g. {moved}"
    )


@dataclass(frozen=True)
class _Handle:
    """A torch stream with the CUDA stream protocol, which torch's own streams support from 2.9 on."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@cache
def _device_of_torch(device: int) -> Any:
    return sys.modules["torch"].device("cuda", device)


def _memory_of_torch(size: int) -> Any:
    """Return torch's memory on the current device, for CuPy; it goes back to torch when CuPy releases it.

    Torch reuses it in the order of the current stream, and CuPy works on the same stream.
    """
    cuda, torch = sys.modules["cupy"].cuda, sys.modules["torch"]
    device = cuda.runtime.getDevice()
    # within torch.func new tensors are wrapped, and a wrapper has no memory
    tensor = without_wrappers(torch.empty(size, dtype=torch.uint8, device=_device_of_torch(device)))
    return cuda.MemoryPointer(cuda.UnownedMemory(tensor.data_ptr(), size, tensor, device), 0)


@lru_cache(64)
def _stream(kind: Any, device: int, handle: int) -> Any:
    """Return CuPy's object, of the class `kind`, for a stream of torch on the current device; threads may share it."""
    # CuPy 14 has `from_external`, and deprecates `ExternalStream`
    make = getattr(kind, "from_external", None)
    return sys.modules["cupy"].cuda.ExternalStream(handle, device) if make is None else make(_Handle(handle))


class _ByTorch:
    """Let CuPy work as torch does: on a device, on torch's stream with that handle, in torch's memory.

    wait: whether CuPy arrays take part. Then CuPy's stream and torch's stream wait for each other.
    """

    def __init__(self, device: int, handle: int, *, wait: bool) -> None:
        from cupy import cuda

        self._place, self._wait = (device, handle), wait
        self._own: Any = None
        self._device, self._memory = cuda.Device(device), cuda.using_allocator(_memory_of_torch)

    def __enter__(self) -> None:
        self._before = getattr(_entered, "stream", None)
        self._device.__enter__()
        try:
            cuda = sys.modules["cupy"].cuda
            self._stream = _stream(cuda.Stream, *self._place)
            if self._wait:
                self._own = cuda.get_current_stream()
                self._stream.wait_event(self._own.record())
            self._stream.__enter__()
        except BaseException:
            self._device.__exit__(*sys.exc_info())
            raise
        self._memory.__enter__()
        _entered.stream = self._place

    def __exit__(self, *error: object) -> None:
        _entered.stream = self._before
        try:
            self._memory.__exit__(*error)
            self._stream.__exit__(*error)
            if self._own is not None:
                self._own.wait_event(self._stream.record())
        finally:
            self._device.__exit__(*error)
