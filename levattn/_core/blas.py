"""Threads of BLAS and LAPACK, which NumPy and SciPy call: how many they may take.

Each library of theirs keeps threads of its own, which wait in a busy loop. So do ours, and threads of ours may call
them side by side. Small matrices then take several times as long as on one thread.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, TypeVar

import numpy as np

from levattn._core.threads import parallel_for

_LARGE = 512**3  # multiplications, beyond which more threads are worth it
_Result = TypeVar("_Result")


class blas_limit:  # noqa: N801 (a context manager, as a function would be)
    """Limit BLAS and LAPACK to n threads while the block runs: in the whole process, as they know no other limit.

    Blocks may run at once in several threads. Then the least of their limits holds, and the usual one after all. A
    limit also ends if the block is gone without its end, as by Ctrl-C. After a fork it ends at the next block.
    """

    def __init__(self, n: int) -> None:
        self.n, self.process, self.ended = n, os.getpid(), False

    def __enter__(self) -> None:
        _limits.add(self)

    def __exit__(self, *error: object) -> None:
        self.ended = True
        _limits.apply()

    @property
    def holds(self) -> bool:
        """Whether the block runs, in this process."""
        return not self.ended and self.process == os.getpid()


class _Limits:
    """The blocks that run now, and for each library its usual number of threads and the number that we gave it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.blocks: list[weakref.ref[blas_limit]] = []
        self.given: dict[str, list[Any]] = {}  # by file: the library, and both numbers
        self.owner: threading.Thread | None = None

    def add(self, block: blas_limit) -> None:
        with self.lock:
            self.blocks.append(weakref.ref(block, self._gone))
        self.apply()

    def _gone(self, _: Any) -> None:
        if self.given:  # the end of the block was interrupted; briefly, as another Ctrl-C would be lost here
            self.apply()

    def apply(self) -> None:
        """Give libraries the least number of the blocks, or the usual one if no other program has set another."""
        with self.lock:
            there = [block for each in self.blocks if (block := each()) is not None]
            least = min((block.n for block in there if block.holds), default=None)
            if least is None:
                for library, usual, ours in self.given.values():
                    if usual != ours and library.num_threads == ours:
                        self._set(library, usual)
                        getattr(library, "clear_controlling_thread", lambda: None)()
                self.given, self.owner = {}, None
                self._prune()
                return
            for library in _libraries(_has_scipy()):
                if library.filepath not in self.given:
                    self.given[library.filepath] = [library, library.num_threads, library.num_threads]
            for known in self.given.values():
                library, usual, ours = known
                if usual is not None and min(usual, least) != ours:
                    known[2] = min(usual, least)
                    self._set(library, known[2])
                    known[2] = library.num_threads  # another if another program has control
            self.owner = threading.current_thread()
            self._prune()

    def _prune(self) -> None:
        """Forget blocks that have ended, so that none of them calls when it is gone."""
        self.blocks = [each for each in self.blocks if (block := each()) is not None and not block.ended]

    def _set(self, library: Any, n: int) -> None:
        """Set a number; since threadpoolctl 3.8 one thread has control, until it is taken away."""
        if self.owner not in (None, threading.current_thread()):
            getattr(library, "clear_controlling_thread", lambda **_: None)(force=True)
        library.set_num_threads(n)


def _has_scipy() -> bool:
    """Tell whether SciPy's library is loaded: no thread is about to."""
    module = sys.modules.get("scipy.linalg")
    return module is not None and not getattr(module.__spec__, "_initializing", False)


@cache
def _libraries(_with_scipy: bool) -> list[Any]:
    """Return the libraries that are loaded and whose threads are the process's; SciPy brings another one."""
    from threadpoolctl import ThreadpoolController

    found = ThreadpoolController().select(internal_api="openblas").lib_controllers
    return [library for library in found if library.threading_layer == "pthreads"]


_limits = _Limits()


def _after_fork() -> None:
    _limits.lock = threading.RLock()  # another thread may have had it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def side_by_side(body: Callable[[int], None], n: int, *, threads: int | None = None) -> None:
    """Do the same as `parallel_for` for calls that use BLAS: if there are several, each has one thread of it.

    Also if the calls follow one another, so that results do not depend on the number of threads.
    """
    with nullcontext() if n <= 1 or threads == 1 else blas_limit(1):
        parallel_for(body, n, threads=threads)


def lapack(function: Callable[..., _Result], A: Any, *others: Any, **options: Any) -> _Result:
    """Call a function of LAPACK or BLAS on matrices (..., m, n): on one thread if they are NumPy's and small."""
    m, n = A.shape[-2:]
    small = isinstance(A, np.ndarray) and m * n * min(m, n) <= _LARGE
    with blas_limit(1) if small else nullcontext():
        return function(A, *others, **options)
