"""CUDA kernels: compiled by NVRTC with our options only, kept on disk, and loaded on a device.

`cupy.RawModule` adds ``-ftz=true`` after all other options, and the last one counts: kernels would read subnormal
numbers of float32 as zero. So this module calls NVRTC itself, and CuPy loads the result.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from struct import Struct, calcsize
from threading import Lock
from typing import Any

from levattn._kernels import cuda_cache

# Only explicit fma calls are contracted. NVRTC's defaults keep subnormal numbers, and round quotients and roots
# correctly. So a kernel's own sums, products, quotients and roots have the same bits on every architecture, and in the
# tests on the host. But tensor cores and cuBLAS have an order of summation for each architecture, and exp and log may
# differ in their last bit between versions of NVRTC.
OPTIONS = ("--std=c++17", "--fmad=false")

_LEAST = 80  # the lowest compute capability that the kernels support, times ten


@dataclass(frozen=True)
class Compiled:
    """NVRTC's output: code for a card, or PTX; the kernels' names in the code by their C++ names; the log."""

    code: bytes
    names: dict[str, str]
    log: str


_MOST_BYTES = 4096 + 64  # of the parameters of a kernel, which CUDA bounds, and of what is before them
_BEFORE = "PPPPPN"  # the kinds of the two things that follow, their places, an end, and the number of bytes
_BYTES_AT, _PARAMETERS_AT = calcsize("PPPPP"), calcsize(_BEFORE)
_PARAMETERS, _BYTES = 1, 2  # kinds: CU_LAUNCH_PARAM_BUFFER_POINTER and CU_LAUNCH_PARAM_BUFFER_SIZE


class _Room(threading.local):
    """Where a thread writes the arguments of its launches; CUDA copies them before a launch returns."""

    def __init__(self) -> None:
        self.words = ctypes.create_string_buffer(_MOST_BYTES)
        self.address = ctypes.addressof(self.words)
        self.devices: set[int] = set()  # whose context is current in this thread when they are


_ROOM = _Room()


class Kernel:
    """A kernel on a device, called with numbers and addresses.

    CuPy would make an object of every argument, which takes longer than the launch. Here all of them are packed at
    once, as C lays them out.

    parameters: the types of the parameters, as `struct` has them.
    """

    def __init__(self, function: Any, cuda: Any, device: int, parameters: str) -> None:
        self._function, self._cuda, self._device = function, cuda, device
        layout = Struct(_BEFORE + parameters)
        self._pack, self._bytes = layout.pack_into, layout.size - _PARAMETERS_AT
        self._shared, self._lock = 0, Lock()

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """The most bytes of shared memory requested so far; never lowered, as another thread may need them."""
        return self._shared

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        with self._lock:
            if size > self._shared:
                driver = self._cuda.driver
                attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                driver.funcSetAttribute(self._function.ptr, attribute, size)
                self._shared = size

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], *, shared_mem: int = 0
    ) -> None:
        cuda, start = self._cuda, _ROOM.address
        if self._device not in _ROOM.devices:
            cuda.runtime.memGetInfo()  # which makes the context of the device current in a new thread, as CuPy does
            _ROOM.devices.add(self._device)
        places = _PARAMETERS, start + _PARAMETERS_AT, _BYTES, start + _BYTES_AT, 0, self._bytes
        self._pack(_ROOM.words, 0, *places, *args)
        stream = cuda.get_current_stream().ptr
        cuda.driver.launchKernel(self._function.ptr, *grid, *block, shared_mem, stream, 0, start)


def architecture(nvrtc: Any, capability: int) -> str:
    """Return the target to compile for, given a card's compute capability times ten.

    The target is sm_90 or sm_100, not sm_90a or sm_100a: no kernel uses their extra instructions. For a card that
    NVRTC does not know, the target is PTX of the newest older architecture. The driver translates it, but would refuse
    compute_90a there.
    """
    known = nvrtc.getSupportedArchs()
    if capability in known:
        return f"sm_{capability}"
    return f"compute_{max(each for each in known if each < capability)}"


def compiled(nvrtc: Any, source: str, names: Sequence[str], target: str, more: Sequence[str] = ()) -> Compiled:
    """Compile kernels of a source, given by their C++ names, for an architecture; `nvrtc` is `cupy.cuda.nvrtc`.

    NVRTC runs on a thread of its own: versions 12.0 to 12.5 leave their thread in the locale "C", where Python reads
    files as ASCII.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_compiled, nvrtc, source, names, target, more).result()


def _compiled(nvrtc: Any, source: str, names: Sequence[str], target: str, more: Sequence[str]) -> Compiled:
    program = nvrtc.createProgram(source, "kernels.cu", (), ())
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        try:
            nvrtc.compileProgram(program, (*OPTIONS, f"--gpu-architecture={target}", *more))
        except nvrtc.NVRTCError as error:
            version = ".".join(map(str, nvrtc.getVersion()))
            raise RuntimeError(
                f"NVRTC {version} does not compile {', '.join(names)} for {target} ({error}). Report this, or install "
                f"another version of NVRTC:\n{nvrtc.getProgramLog(program)}"
            ) from error
        code = nvrtc.getCUBIN(program) if target.startswith("sm_") else nvrtc.getPTX(program)
        lowered = {name: nvrtc.getLoweredName(program, name) for name in names}
        # CuPy leaves off the last byte, which is zero in both
        return Compiled(code + b"\0", lowered, nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def loaded(xp: Any, source: str, name: str, device: int, parameters: str) -> Kernel:
    """Return a kernel of a source on the current device, which is `device`; `xp` is CuPy.

    `parameters` are the types of its parameters, as `struct` has them.

    NVRTC compiles each kernel alone, in tenths of a second. A whole source takes up to a quarter of a minute, and a
    call needs only a few of its kernels.
    """
    nvrtc = _nvrtc(xp)
    target = architecture(nvrtc, _capability(xp, device))
    key = cuda_cache.key_of(source, name, *OPTIONS, target, str(nvrtc.getVersion()))
    kept = cuda_cache.kept_code(key)
    if kept is None:
        made = compiled(nvrtc, source, (name,), target)
        kept = made.names[name], made.code
        cuda_cache.keep_code(key, *kept)
    module = xp.cuda.Module()
    module.load(kept[1])
    return Kernel(module.get_function(kept[0]), xp.cuda, device, parameters)


def _nvrtc(xp: Any) -> Any:
    try:
        nvrtc = xp.cuda.nvrtc
        nvrtc.getVersion()
    except (AttributeError, ImportError, RuntimeError, OSError) as error:
        raise ImportError(
            "CuPy does not find NVRTC, which compiles the kernels for a CUDA device. Install the CUDA toolkit, or "
            "pip install 'cupy-cuda13x[ctk]>=14' (cupy-cuda12x for CUDA 12), which includes NVRTC"
        ) from error
    return nvrtc


def _capability(xp: Any, device: int) -> int:
    """Return the compute capability of a device, times ten, or raise if it is too low."""
    found = xp.cuda.Device(device).compute_capability
    if int(found) < _LEAST:
        card = xp.cuda.runtime.getDeviceProperties(device)["name"]
        card = card.decode() if isinstance(card, bytes) else card
        raise ValueError(
            f"the array is on CUDA device {device}, {card}, of compute capability {found[:-1]}.{found[-1]}; expected "
            "a card of compute capability 8.0 or later (Ampere, 2020). Move the array to main memory, by cupy.asnumpy "
            "or by .cpu() of a tensor"
        )
    return int(found)
