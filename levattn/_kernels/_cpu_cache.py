"""Numba's cache of compiled code on disk, without which everything works too: only that compiling takes its time.

This is the one module that knows how Numba keeps its files (`numba.core.caching`, alike from 0.61 on).
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.runtime import rtsys

__all__ = ["KernelCache"]


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


class KernelCache(FunctionCache):  # type: ignore[misc]
    """The cache of one function, for code of which `stamp` tells the version.

    Raises RuntimeError where no folder can be written; where there is no room, `say` is told.
    """

    def __init__(self, function: Callable[..., Any], stamp: str, say: Callable[[str], None]) -> None:
        super().__init__(function)
        self._say = say
        version = self._impl.locator.get_source_stamp(), stamp
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, version)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for a signature, or None; of Numba it needs the runtime alone, not what it compiles with."""
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            self._say(error.strerror or str(error))
