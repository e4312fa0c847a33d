"""How the CPU kernels are compiled: one decorator, one set of flags, and the shape of the vector unit.

No fast-math: NaN and infinity carry meaning here, and the order of every sum is part of the contract.
"""

from __future__ import annotations

import gc
import hashlib
import os
import re
import threading
from collections.abc import Callable
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.extending import register_jitable

from levattn._kernels.uncached import say_uncached

__all__ = [
    "FULL_ROWS",
    "LONE_ROWS",
    "PANEL",
    "SCORE_ROWS",
    "SCORE_VECTORS",
    "STATE_VECTORS",
    "TILE_ROWS",
    "VECTOR_BYTES",
    "helper",
    "jit",
]


_say_uncached = partial(say_uncached, variable="NUMBA_CACHE_DIR")
_FOLDER = Path(__file__).parent
_IMPORT = re.compile(rb"^from levattn\._kernels\.([\w.]+) import", re.MULTILINE)


@cache
def _source(path: Path) -> tuple[str, list[Path]]:
    """Return the hash of a file of kernels, and the files from which it imports."""
    text = path.read_bytes()
    return hashlib.sha256(text).hexdigest(), [
        _FOLDER.joinpath(*name.decode().split(".")).with_suffix(".py") for name in _IMPORT.findall(text)
    ]


def _sources(path: Path) -> dict[str, str]:
    """Return the hash of a file of kernels and of all those from which it imports, by their names."""
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
    """Return what changes with the sources of a kernel and of what it may call."""
    sources = _sources(Path(function.__code__.co_filename))
    return hashlib.sha256(repr(sorted(sources.items())).encode()).hexdigest()


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` on first use, without the GIL, and keep the code in Numba's cache on disk, if that can be.

    Numba takes cached code for current as long as the function's own file is, but code holds what the function calls
    and the constants that it reads, wherever they stand. So it is stamped with the sources from which its own imports.
    """
    kernel: Any = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)
    if hasattr(kernel, "_cache"):  # not without a compiler
        kernel.compile = _compiler(kernel, function)
    compiled: Callable[..., Any] = kernel
    return compiled


class _Uncollected:
    """No collections of garbage within: compiling makes millions of objects and hardly a cycle among them.

    Threads may be within at once: the first to enter stops them, and the last to leave lets them be.
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
        """Begin anew in a forked process, in which no other thread goes on."""
        if self._inside and self._collects:
            gc.enable()
        self._lock, self._inside = threading.Lock(), 0


_uncollected = _Uncollected()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_uncollected.forget)


def _compiler(kernel: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return how a kernel is compiled or read from its cache, which is looked for when it is first called."""
    compile, without, stamp = kernel.compile, kernel._cache, _stamp(function)  # of the sources as they are imported

    @wraps(compile)
    def compiled(*arguments: Any) -> Any:
        if kernel._cache is without:
            kernel._cache = _cache_of(function, stamp) or without
        with _uncollected:
            return compile(*arguments)

    return compiled


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let compiled code call `function`: it becomes part of each kernel that does, and stays Python for others."""
    registered: Callable[..., Any] = register_jitable(no_cfunc_wrapper=True, **_compiler_of_parts())(function)
    return registered


@cache
def _compiler_of_parts() -> dict[str, Any]:
    """Return the option by which parts of kernels are not compiled alone, where Numba is as known here."""
    try:
        from levattn._kernels.parts import PartCompiler
    except ImportError:
        return {}
    return {"pipeline_class": PartCompiler}


def _cache_of(function: Callable[..., Any], stamp: str) -> Any:
    """Return the cache of a function, or None where there can be none."""
    try:
        from levattn._kernels.cache import KernelCache, ShippedCache

        try:
            return KernelCache(function, stamp, _say_uncached)
        except RuntimeError:  # of Numba, where it finds no folder
            return ShippedCache(function, stamp, _say_uncached)
    except (ImportError, AttributeError, TypeError):  # of a Numba that keeps its files in another way
        _say_uncached(f"Numba {numba.__version__} keeps it in a way that is not known here")
    return None


def _wide() -> bool:
    named = numba.config.CPU_FEATURES  # where code is made for another processor
    return (
        bool(llvm.get_host_cpu_features().get("avx512f", False)) if named is None else "+avx512f" in named.split(",")
    )


# The register tiles: with 32 registers of 512 bits, and with 16 of 256 (LLVM splits these on narrower units).
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
