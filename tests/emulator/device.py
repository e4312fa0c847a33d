"""Arrays as strict as CuPy's, on the CPU: the library on a CUDA device, without one.

An array of the device never turns into one of numpy by itself and never mixes with one; kernels run on the emulator.
There are two devices (`places`): whatever meets an array that is not on the current one is refused.
"""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import array_api_compat.numpy as standard
import numpy as np
import pytest

import emulator
from emulator import DeviceError
from levattn._kernels import cuda_source
from levattn._kernels.latent import cuda as latent_cuda

from .card import CUPY, device_count, on_card
from .places import CURRENT, Device, allocated, cuda, launches, memory_of, on_memory

DEVICES = device_count()
AVAILABLE = DEVICES > 0 or (sys.platform == "linux" and shutil.which("g++") is not None)


def refuse_numpy(*values: Any) -> None:
    for value in values:
        if isinstance(value, np.ndarray):
            raise TypeError(f"an array of numpy, of shape {value.shape}, beside arrays of the device")
        if isinstance(value, list | tuple):
            refuse_numpy(*value)


def bare(value: Any) -> Any:
    """What numpy takes for a value in which there may be arrays of the current device."""
    if isinstance(value, DeviceArray):
        if value.device.id != CURRENT.device:
            raise DeviceError(f"an array on device {value.device.id}, where device {CURRENT.device} is current")
        return value.held
    if isinstance(value, list | tuple):
        return type(value)(bare(entry) for entry in value)
    return value


def dressed(value: Any) -> Any:
    """What the device gives back for a result of numpy."""
    if isinstance(value, np.ndarray | np.generic):
        return DeviceArray(allocated(np.asarray(value)))
    if isinstance(value, tuple):
        return tuple(dressed(entry) for entry in value)
    return value


def require_current(device: Any) -> None:
    if device is not None and device != Device(CURRENT.device):
        raise DeviceError(f"{device} was asked for, where device {CURRENT.device} is current")


def in_cupy(name: str) -> bool:
    """Whether CuPy has a function of this name, as far as can be told."""
    return CUPY is None or hasattr(CUPY, name)


@cache
def signature(owner: str, name: str) -> inspect.Signature | None:
    """The parameters of a function of CuPy, or of a method of its arrays; None where CuPy does not tell."""
    member = getattr(getattr(CUPY, owner, None) if owner else CUPY, name, None)
    if inspect.isfunction(member):
        return inspect.signature(member)
    listed = re.match(
        rf"\w+\.{name}\(self,? ?(.*?)\)( ->.*)?$", (getattr(member, "__doc__", None) or "").partition("\n")[0]
    )
    if listed is None:
        return None
    scope: dict[str, Any] = {}
    exec(f"def listed({listed[1].replace('int axis', 'axis')}): pass", scope)
    return inspect.signature(scope["listed"])


def on_numpy(function: Callable[..., Any], owner: str = "", name: str = "") -> Callable[..., Any]:
    """A function of numpy on arrays of the device, called as CuPy's of that name can be."""

    def called(*args: Any, **options: Any) -> Any:
        refuse_numpy(*args, *options.values())
        require_current(options.pop("device", None))
        taken = signature(owner, name) if name else None
        if taken is not None:
            taken.bind(*args, **options)  # a TypeError where CuPy takes no such arguments
        return dressed(function(*bare(args), **{key: bare(value) for key, value in options.items()}))

    return called


class DeviceArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of the device, held by an array of numpy."""

    def __init__(self, held: np.ndarray) -> None:
        self.held, self.device = held, Device(CURRENT.device)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.held.ctypes.data, mem=memory_of(self.held))

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return NAMESPACE

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("an array of the device does not become one of numpy by itself: use get()")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        refuse_numpy(*inputs, *(out or ()))
        if method != "__call__" or not in_cupy(ufunc.__name__):
            raise TypeError(f"numpy.{ufunc.__name__}, {method}, of an array of the device: CuPy has no such thing")
        if out is not None:
            options["out"] = bare(out)
        result = dressed(getattr(ufunc, method)(*bare(inputs), **options))
        return out[0] if out is not None and len(out) == 1 else result

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        if not in_cupy(function.__name__):
            raise TypeError(f"numpy.{function.__name__} of an array of the device: CuPy has no such function")
        return on_numpy(function, "", function.__name__)(*args, **options)

    def get(self) -> np.ndarray:
        return np.asarray(bare(self)).copy()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("tobytes", "tofile", "dump"):
            raise AttributeError(name)
        value = getattr(self.held, name)
        if name in ("T", "mT", "real", "imag", "flat"):
            return dressed(getattr(bare(self), name))
        return on_numpy(value, "ndarray", name) if callable(value) and name not in ("dtype", "flags") else value

    def __getitem__(self, key: Any) -> Any:
        refuse_numpy(key)
        if all(isinstance(part, slice | type(None)) for part in (key if isinstance(key, tuple) else (key,))):
            view = DeviceArray(self.held[key])  # which takes no work
            view.device = self.device
            return view
        return dressed(bare(self)[bare(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        refuse_numpy(key, value)
        bare(self)[bare(key)] = bare(value)

    def __len__(self) -> int:
        return len(self.held)

    def __bool__(self) -> bool:
        return bool(bare(self))

    def __int__(self) -> int:
        return int(bare(self))

    def __float__(self) -> float:
        return float(bare(self))

    def __index__(self) -> int:
        return int(bare(self).__index__())

    def __repr__(self) -> str:
        return f"DeviceArray({self.held!r})"


class DeviceKernel:
    """A kernel of the emulator, for arrays of the device."""

    def __init__(self, kernel: Any) -> None:
        self.__dict__["kernel"] = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.kernel, name, value)

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        refuse_numpy(*args)
        launches.append((CURRENT.device, CURRENT.streams[-1]))
        self.kernel(grid, block, bare(args), shared_mem=shared_mem)


class Namespace(ModuleType):
    """What the library uses of CuPy, and of the namespaces of array-api-compat."""

    cuda = cuda()

    class ndarray:  # noqa: N801 (which no array is of: array-api-compat asks the arrays themselves for the namespace)
        def __new__(cls, shape: Any, dtype: Any, memptr: Any, strides: Any = None) -> Any:
            if CURRENT.allocator is None:  # which is torch's where a call entered
                raise DeviceError("memory of torch's is read outside of `where_arrays_are`")
            return DeviceArray(on_memory(shape, dtype, memptr, strides))

    def __init__(self) -> None:
        super().__init__("cupy")
        self.__spec__ = ModuleSpec("cupy", None)
        self._host = emulator.Host()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._host, name, None)  # numpy, but for memory that nobody has written
        value = getattr(standard, name) if value is None else value
        return on_numpy(value, "", name) if callable(value) and not isinstance(value, type) else value

    def asarray(
        self, array: Any, dtype: Any = None, order: Any = None, *, device: Any = None, copy: bool | None = None
    ) -> Any:
        """Copy an array of numpy to the device; one of the device stays where it is."""
        require_current(device)
        if isinstance(array, DeviceArray):
            found = np.array(bare(array), dtype, order=order or "K", copy=copy)
            return array if found is array.held else dressed(found)
        return DeviceArray(allocated(np.array(array, dtype, order=order or "K")))

    array = asarray

    def asnumpy(self, array: DeviceArray) -> np.ndarray:
        return array.get()


NAMESPACE = Namespace()


def is_on_device(array: Any) -> bool:
    return isinstance(array, DeviceArray)


def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let latent attention cut sequences into runs of few positions, also where another test had longer ones."""
    for name, length in (("_SHORTEST", 16), ("_LONGEST", 32), ("_STRETCH", 32)):
        monkeypatch.setattr(latent_cuda, name, length)
    monkeypatch.setattr(latent_cuda, "_planned_before", latent_cuda._planned)  # nothing is remembered


def library_on_device(monkeypatch: pytest.MonkeyPatch, seed: int = 1) -> Any:
    """Let the library take arrays of `NAMESPACE` for CuPy's until the test ends; on a card return CuPy itself."""
    if DEVICES:
        return on_card(monkeypatch)
    emulator.on_host(monkeypatch, seed)
    compiled = cuda_source._compiled

    monkeypatch.setattr(cuda_source, "_compiled", lambda *which: DeviceKernel(compiled(*which)))
    monkeypatch.setattr(cuda_source, "_module", lambda: NAMESPACE)
    monkeypatch.setitem(sys.modules, "cupy", NAMESPACE)
    for name, module in list(sys.modules.items()):
        if name.startswith("levattn.") and hasattr(module, "on_cuda"):
            monkeypatch.setattr(module, "on_cuda", is_on_device)
    return NAMESPACE
