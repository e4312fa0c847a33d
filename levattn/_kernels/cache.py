"""Sources of compiled code: Numba's cache on disk, and archives in the wheel. Numba compiles all other code.

No other module depends on how Numba keeps its files (`numba.core.caching`, the same from 0.61 on).
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
