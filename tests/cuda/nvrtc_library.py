"""NVRTC of any version, loaded by the path of its library: what `cupy.cuda.nvrtc` has, by ctypes.

CuPy finds one NVRTC for a process, and takes one that is there already: let it load its own first. Then others can be
loaded beside it, as each keeps its symbols to itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import pytest

RELEASES = Path(__file__).parents[2] / "build" / "nvrtc"  # where `make cuda` installs some


def of_cupy() -> Any:
    """The NVRTC that CuPy finds; what needs it is skipped where there is none."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"CuPy or NVRTC is not installed: {error}")
    return nvrtc


def release(version: str) -> Nvrtc:
    """Another release, which `make cuda` installs; what needs it is skipped where it did not."""
    of_cupy()
    for path in RELEASES.joinpath(version).glob("nvidia/*/lib/libnvrtc.so.1?"):
        found = Nvrtc(path)
        assert ".".join(map(str, found.getVersion())) == version
        return found
    pytest.skip(f"NVRTC {version} is not in {RELEASES}: `make cuda` installs it")


def name_of(nvrtc: Any) -> str:
    """The release of NVRTC, with its patch where the package tells it."""
    version = ".".join(map(str, nvrtc.getVersion()))
    folders = RELEASES.joinpath(version).glob("*nvrtc*.dist-info") if isinstance(nvrtc, Nvrtc) else ()
    found = [folder.name.partition("-")[2].removesuffix(".dist-info") for folder in folders]
    if not isinstance(nvrtc, Nvrtc):
        for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
            with suppress(PackageNotFoundError):
                found.append(package_version(package))
    return next((name for name in found if name.startswith(version)), version)


class NVRTCError(RuntimeError):
    """What a function of the library returned."""


class Nvrtc:
    """The functions of `cupy.cuda.nvrtc` that the library calls, of another library."""

    NVRTCError = NVRTCError

    def __init__(self, path: Path) -> None:
        for builtins in path.parent.glob("libnvrtc-builtins.so*"):  # which it looks for by name
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise NVRTCError(self._library.nvrtcGetErrorString(status).decode())

    def _bytes(self, name: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{name}Size", program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{name}", program, found)
        return found.raw[:-1]  # as CuPy does

    def getVersion(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def getSupportedArchs(self) -> tuple[int, ...]:
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return tuple(found)

    def createProgram(
        self, code: str, name: str, headers: Sequence[str], include_names: Sequence[str]
    ) -> ctypes.c_void_p:
        if headers or include_names:
            raise NotImplementedError("a program of one text has no headers")
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), code.encode(), name.encode(), 0, None, None)
        return program

    def destroyProgram(self, program: ctypes.c_void_p) -> None:
        self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def addNameExpression(self, program: ctypes.c_void_p, name: str) -> None:
        self._call("nvrtcAddNameExpression", program, name.encode())

    def compileProgram(self, program: ctypes.c_void_p, options: Sequence[str]) -> None:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._call("nvrtcCompileProgram", program, len(options), given)

    def getLoweredName(self, program: ctypes.c_void_p, name: str) -> str:
        found = ctypes.c_char_p()
        self._call("nvrtcGetLoweredName", program, name.encode(), ctypes.byref(found))
        assert found.value is not None
        return found.value.decode()

    def getProgramLog(self, program: ctypes.c_void_p) -> str:
        return self._bytes("ProgramLog", program).decode()

    def getCUBIN(self, program: ctypes.c_void_p) -> bytes:
        return self._bytes("CUBIN", program)

    def getPTX(self, program: ctypes.c_void_p) -> bytes:
        return self._bytes("PTX", program)
