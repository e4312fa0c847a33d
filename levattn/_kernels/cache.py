"""Compiled code that is kept: Numba's cache on disk, and what came with the wheel. Without them all is compiled.

This is the one module that knows how Numba keeps its files (`numba.core.caching`, alike from 0.61 on).
"""

from __future__ import annotations

import logging
import pickle
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from levattn._kernels.shipped import entry, shipped

__all__ = ["KernelCache", "ShippedCache", "packed"]

_log = logging.getLogger("levattn")


@cache
def _say_that_it_compiles() -> None:
    """Tell once a process, whoever listens, why a first call takes long."""
    _log.info("Numba compiles kernels for this processor, once; `levattn warmup` compiles all of them")


class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """Files that say what they hold: those that are damaged, or hold other code, count as none.

    Code comes with a checksum, as damaged code would be run, and with its key, as of two processes that fill an index
    at the same time each may have given its code the number that the other has in the index.
    """

    def _load_index(self) -> Any:
        with suppress(Exception):  # of any kind: damaged bytes are unpickled
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
    """What came with the wheel alone, of one function; `say` is told that no more can be kept."""

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
    """The cache of one function, for code of which `stamp` tells the version.

    Raises RuntimeError where no folder can be written; where there is no room, `say` is told.
    """

    def __init__(self, function: Callable[..., Any], stamp: str, say: Callable[[str], None]) -> None:
        super().__init__(function)
        self._stamp, self._say = stamp, say
        version = self._impl.locator.get_source_stamp(), stamp
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, version)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for a signature, or None; of Numba it needs the runtime alone, not what it compiles with."""
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
    """Return the code for a signature that came with the wheel, or None."""
    rtsys.initialize(target_context)
    content = shipped(entry(function, stamp, sig))
    if content is not None:
        with suppress(Exception):  # of any kind, where Numba reads code in another way than it wrote it
            return CompileResult._rebuild(target_context, *pickle.loads(content))
    return None


def packed(kernel: Any) -> dict[str, bytes]:
    """Return the code that a kernel has, as `shipped` gives it, by the names of `entry`."""
    function, stamp = kernel.py_func, kernel._cache._stamp
    return {entry(function, stamp, sig): dumps(code._reduce()) for sig, code in kernel.overloads.items()}
