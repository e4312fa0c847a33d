"""Threads of BLAS and LAPACK, which NumPy and SciPy call: how many they may take.

Each library of theirs keeps threads of its own, which wait in a busy loop. So do ours, and threads of ours may call
them side by side. Matrices of some hundred columns then take up to a hundred times as long as on one thread.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

import numpy as np

from levattn._core.threads import num_threads, parallel_for

_LARGE = 512**3  # multiplications, beyond which more threads are worth it
_Result = TypeVar("_Result")


class _Limits:
    """The limits that hold now, and the threads that libraries had before."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: list[int] = []
        self.before: list[tuple[Any, int]] = []
        self.owner: threading.Thread | None = None

    def add(self, n: int) -> None:
        with self.lock:
            self.before = self.before if self.held else []
            known = {library.filepath for library, _ in self.before}
            found = _libraries("scipy.linalg" in sys.modules)
            self.before += [(library, library.num_threads) for library in found if library.filepath not in known]
            self.held.append(n)
            self.apply()

    def remove(self, n: int) -> None:
        with self.lock:
            if n in self.held:  # not after a fork within the block
                self.held.remove(n)
                self.apply()

    def apply(self) -> None:
        """Set the numbers, unless another program in the process has begun to, as it will set them back."""
        here = threading.current_thread()
        for library, usual in self.before:
            if usual <= 1:
                continue
            # since threadpoolctl 3.8 one thread has control, until it is taken away
            release = getattr(library, "clear_controlling_thread", None)
            if release and self.owner not in (None, here):
                release(force=True)
            library.set_num_threads(min([usual, *self.held]))
            if release and not self.held:
                release()
        self.owner = here if self.held else None


@cache
def _libraries(_with_scipy: bool) -> list[Any]:
    """Return the libraries that are loaded; SciPy brings another one."""
    from threadpoolctl import ThreadpoolController

    found: list[Any] = ThreadpoolController().select(user_api="blas").lib_controllers
    return found


_limits = _Limits()


def _forget_limits() -> None:
    """Forget the limits of threads that a fork has left behind."""
    _limits.lock, _limits.held = threading.Lock(), []
    _limits.apply()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_limits)


@contextmanager
def blas_limit(n: int) -> Iterator[None]:
    """Limit BLAS and LAPACK to n threads while the block runs: in the whole process, as they know no other limit.

    Blocks may run at once in several threads. Then the least of their limits holds, and the usual one after all.
    """
    _limits.add(n)
    try:
        yield
    finally:
        _limits.remove(n)


def side_by_side(body: Callable[[int], None], n: int, *, threads: int | None = None) -> None:
    """Do the same as `parallel_for` for calls that use BLAS: they share the threads."""
    with nullcontext() if n <= 1 or threads == 1 else blas_limit(max(1, num_threads() // n)):
        parallel_for(body, n, threads=threads)


def lapack_threads(m: int, n: int) -> AbstractContextManager[None]:
    """Give LAPACK one thread in the block for small matrices (m, n)."""
    return blas_limit(1) if m * n * min(m, n) <= _LARGE else nullcontext()


def lapack(function: Callable[..., _Result], A: Any, *others: Any, **options: Any) -> _Result:
    """Call a function of LAPACK or BLAS on matrices (..., m, n): on one thread if they are NumPy's and small."""
    if not isinstance(A, np.ndarray):
        return function(A, *others, **options)
    with lapack_threads(*A.shape[-2:]):
        return function(A, *others, **options)
