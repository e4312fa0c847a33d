"""Compiled CPU kernels come from the wheel or from Numba's disk cache; Numba compiles all others.

No other module depends on how Numba keeps its files (`numba.core.caching`, the same from 0.61 on).
"""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
import platform
import sys
import sysconfig
import warnings
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from levattn.exceptions import CacheWarning

ARCHIVES = Path(__file__).with_name("compiled")
_V2 = ("cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
# The features that a level needs, in LLVM's names; the best level comes first
CPU_FEATURES = {
    "x86-64-v4": (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "x86-64-v3": _V3,
    "aarch64": ("neon",),
}
_MACHINES = {"x86_64": "x86-64", "AMD64": "x86-64", "aarch64": "aarch64", "arm64": "aarch64"}


def versions() -> str:
    """Return the versions on which code depends, besides the processor."""
    python = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return f"{sys.platform}, {python}, Numba {numba.__version__}, llvmlite {llvmlite.__version__}"


def entry(function: Any, stamp: str, signature: Any) -> str:
    """Return the archive's name for the code of a function for some types of arguments."""
    whole = f"{function.__module__}.{function.__qualname__} {stamp} {signature}"
    return hashlib.sha256(whole.encode()).hexdigest()


def shipped(name: str) -> bytes | None:
    """Return the code with a name of `entry`, or None."""
    archive = _archive()
    if archive is not None:
        with suppress(Exception):  # a damaged archive, or one without this code
            return archive.read(name)
    return None


@cache
def _archive() -> zipfile.ZipFile | None:
    """Return the archive for this processor, or None if this Numba and this Python did not make one."""
    if numba.config.CPU_NAME is not None or numba.config.CPU_FEATURES is not None:  # for another processor
        return None
    machine = _MACHINES.get(platform.machine(), "none")
    has: dict[str, bool] = llvm.get_host_cpu_features()
    for level, needed in CPU_FEATURES.items():
        # only the level whose vectors have the width by which the library splits its work, not all that run here
        wide = bool(has.get("avx512f")) == ("avx512f" in needed)
        if level.startswith(machine) and wide and all(has.get(feature) for feature in needed):
            with suppress(OSError, zipfile.BadZipFile):
                content = (ARCHIVES / f"{level}.zip").read_bytes()  # not an open file, which forks would share
                archive = zipfile.ZipFile(io.BytesIO(content))
                return archive if archive.comment == versions().encode() else None
    return None


_log = logging.getLogger("levattn")


@cache
def _say_that_it_compiles() -> None:
    """Log, once per process, why a first call takes long."""
    _log.info("Numba compiles kernels for this processor, once; `levattn warmup` compiles all of them")


class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """Cache files with a checksum and a key: damaged files, and files of other code, count as missing.

    Without the checksum, damaged code would run. Without the key, wrong code might: two processes that fill an index
    at the same time may give the same number to different code.
    """

    def _load_index(self) -> Any:
        with suppress(Exception):  # unpickling damaged bytes raises errors of any kind
            return dict(super()._load_index())
        return {}

    def save(self, key: Any, data: Any) -> None:
        content = self._dump((key, data))
        super().save(key, (zlib.crc32(content), content))

    def load(self, key: Any) -> Any:
        with suppress(Exception):
            checksum, content = super().load(key)
            if zlib.crc32(content) == checksum:
                found, data = pickle.loads(content)
                return data if found == key else None
        return None


class ShippedCache(NullCache):  # type: ignore[misc]
    """The wheel's code of one function, without a cache on disk; new code is reported to `say`, and not kept."""

    def __init__(self, function: Callable[..., Any], stamp: str, say: Callable[[str], None]) -> None:
        self._function, self._stamp, self._say = function, stamp, say

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = _from_wheel(self._function, self._stamp, sig, target_context)
        if found is None:
            _say_that_it_compiles()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        self._say("no folder can be written")


class KernelCache(FunctionCache):  # type: ignore[misc]
    """The cache of one function; `stamp` is the version of its code.

    Raises RuntimeError where no folder can be written; reports later errors, such as a full disk, to `say`.
    """

    def __init__(self, function: Callable[..., Any], stamp: str, say: Callable[[str], None]) -> None:
        super().__init__(function)
        self._stamp, self._say = stamp, say
        version = self._impl.locator.get_source_stamp(), stamp
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, version)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for a signature, or None; this needs only Numba's runtime, not its compiler."""
        found = _from_wheel(self._py_func, self._stamp, sig, target_context)
        if found is None:
            with self._guard_against_spurious_io_errors():
                found = self._load_overload(sig, target_context)
        if found is None:
            _say_that_it_compiles()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            self._say(error.strerror or str(error))


def _from_wheel(function: Callable[..., Any], stamp: str, sig: Any, target_context: Any) -> Any:
    """Return the wheel's code for a signature, or None."""
    rtsys.initialize(target_context)
    content = shipped(entry(function, stamp, sig))
    if content is not None:
        with suppress(Exception):  # of any kind: this Numba may read code in another format
            return CompileResult._rebuild(target_context, *pickle.loads(content))
    return None


def packed(kernel: Any) -> dict[str, bytes]:
    """Return a kernel's compiled code in the form that `shipped` returns, by the names of `entry`."""
    function, stamp = kernel.py_func, kernel._cache._stamp
    return {entry(function, stamp, sig): dumps(code._reduce()) for sig, code in kernel.overloads.items()}


@cache
def say_uncached(reason: str, variable: str) -> None:
    """Warn, once for each reason, that the next process compiles anew; `variable` sets the folder for code."""
    warnings.warn(
        f"compiled code cannot be kept ({reason}), so each process compiles its kernels anew. Set {variable} to a "
        "writable folder with free space",
        CacheWarning,
        stacklevel=3,
    )
