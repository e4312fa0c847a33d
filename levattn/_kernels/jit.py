"""The compiler of the CPU kernels: one decorator, one set of flags, and the shape of the vector unit.

There is no fast-math: NaN and infinity have meanings here, and the order of every sum is part of the contract.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import re
import secrets
import threading
from collections.abc import Callable
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.core.bytecode import FunctionIdentity
from numba.extending import register_jitable

from levattn._kernels.cache import say_uncached

_say_uncached = partial(say_uncached, variable="NUMBA_CACHE_DIR")
_FOLDER = Path(__file__).parent
_IMPORT = re.compile(rb"^from levattn\._kernels\.([\w.]+) import", re.MULTILINE)


@cache
def _source(path: Path) -> tuple[str, list[Path]]:
    """Return the hash of a file of kernels, and the files of kernels that it imports."""
    text = path.read_bytes()
    found = [_FOLDER.joinpath(*name.decode().split(".")) for name in _IMPORT.findall(text)]
    return hashlib.sha256(text).hexdigest(), [
        path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in found
    ]


def _sources(path: Path) -> dict[str, str]:
    """Return the hashes of a file of kernels and of all files of kernels that it imports, by their names."""
    found: dict[str, str] = {}
    left = [path]
    while left:
        source = left.pop()
        name = source.relative_to(_FOLDER).as_posix() if source.is_relative_to(_FOLDER) else source.name
        if name not in found:
            found[name], more = _source(source)
            left += more
    return found


def _stamp(function: Callable[..., Any]) -> str:
    """Return a hash of the sources of a kernel and of all functions that it may call."""
    sources = _sources(Path(function.__code__.co_filename))
    return hashlib.sha256(repr(sorted(sources.items())).encode()).hexdigest()


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` on first use, without the GIL, and keep the code in Numba's cache on disk if possible.

    Numba only checks the function's own file for changes, but compiled code also contains functions and constants of
    other files. So a stamp of all imported sources is part of the cache's key.
    """
    kernel: Any = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)
    if hasattr(kernel, "_cache"):  # absent if Numba's compiler is disabled
        kernel.compile = _compiler(kernel, function)
    compiled: Callable[..., Any] = kernel
    return compiled


class _Uncollected:
    """Suspend garbage collection: compiling makes millions of objects and hardly a cycle among them.

    Several threads may be inside: the first to enter disables collection, and the last to leave restores it.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._collects = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._collects = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._collects:
                gc.enable()

    def forget(self) -> None:
        """Begin anew in a forked process, where the other threads do not run."""
        if self._inside and self._collects:
            gc.enable()
        self._lock, self._inside = threading.Lock(), 0


def _number_anew() -> None:
    """Let Numba number functions from a random number on, as each process does that compiles.

    Numbers are parts of the names of functions in compiled code, and code from the cache keeps its names. If two
    processes began at 1, new code would call a function of that name in code from the cache.
    """
    FunctionIdentity._unique_ids = itertools.count(secrets.randbits(60))


_uncollected = _Uncollected()
_number_anew()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_uncollected.forget)
    os.register_at_fork(after_in_child=_number_anew)


def _compiler(kernel: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `compile` for a kernel that looks for its cache at the first call.

    One code takes read-only arrays and all others: kernels write to arrays that levattn makes, and to no others.
    """
    compile, without, stamp = kernel.compile, kernel._cache, _stamp(function)  # the stamp of the sources as imported

    @wraps(compile)
    def compiled(arguments: tuple[Any, ...]) -> Any:
        if kernel._cache is without:
            kernel._cache = _cache_of(function, stamp) or without
        writable = tuple(map(_writable, arguments))
        with _uncollected:
            code = compile(writable)
        if writable != arguments:
            kernel._insert([kind._code for kind in arguments], code, False)
        return code

    return compiled


def _writable(kind: Any) -> Any:
    """Return the type of an argument, of an array that may be written to if it is one."""
    return kind.copy(readonly=False) if isinstance(kind, numba.types.Array) else kind


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let compiled code call `function`: each kernel that calls it includes its code; elsewhere it stays Python."""
    registered: Callable[..., Any] = register_jitable(no_cfunc_wrapper=True, **_compiler_of_parts())(function)
    return registered


@cache
def _compiler_of_parts() -> dict[str, Any]:
    """Return the option that keeps Numba from compiling parts of kernels alone, if `parts` supports this Numba."""
    try:
        from levattn._kernels.parts import PartCompiler
    except ImportError:
        return {}
    return {"pipeline_class": PartCompiler}


def _cache_of(function: Callable[..., Any], stamp: str) -> Any:
    """Return the cache of a function, or None if `cache` does not support this Numba."""
    try:
        from levattn._kernels.cache import KernelCache, ShippedCache

        try:
            return KernelCache(function, stamp, _say_uncached)
        except RuntimeError:  # Numba finds no writable folder
            return ShippedCache(function, stamp, _say_uncached)
    except (ImportError, AttributeError, TypeError):  # a Numba with other cache files
        _say_uncached(f"Numba {numba.__version__} keeps it in a way unknown to this levattn")
    return None


def _wide() -> bool:
    named = numba.config.CPU_FEATURES  # set if code is made for another processor
    return (
        bool(llvm.get_host_cpu_features().get("avx512f", False)) if named is None else "+avx512f" in named.split(",")
    )


# The register tiles, for 32 registers of 512 bits and for 16 of 256 (LLVM splits the latter on narrower units).
if _wide():
    VECTOR_BYTES = 64
    PANEL = 4  # vectors across a tile of the second moment
    TILE_ROWS = (8, 8, 8, 4)  # rows of a tile that is 1, 2, 3, 4 vectors wide, on and beside the diagonal
    FULL_ROWS = 6  # rows of a tile of PANEL vectors above it
    LONE_ROWS = 16  # rows of a tile of one vector, where a vector is long enough
    SCORE_ROWS, SCORE_VECTORS = 12, 2  # keys by vectors of whitened columns
    STATE_VECTORS = 4  # across a tile of four rows of running sums
else:
    VECTOR_BYTES = 32
    PANEL = 3
    TILE_ROWS = (4, 4, 4, 4)
    FULL_ROWS = 4
    LONE_ROWS = 8
    SCORE_ROWS, SCORE_VECTORS = 6, 2
    STATE_VECTORS = 2
