"""Threads of the CPU kernels: how many, and one loop that shares work between them.

The kernels release the GIL, so a plain pool of Python threads runs them side by side. Unlike an OpenMP or
workqueue layer it may be entered from several threads at once and survives a fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from itertools import count
from typing import SupportsIndex

from levattn._core.checks import whole_number

__all__ = ["num_threads", "parallel_for", "thread_limit"]

_limit: ContextVar[int | None] = ContextVar("levattn_thread_limit", default=None)
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _available() -> int:
    asked = os.environ.get("LEVATTN_NUM_THREADS")
    if asked is not None:
        if not asked.isdecimal() or int(asked) < 1:
            raise ValueError(f"LEVATTN_NUM_THREADS is {asked!r}; expected a whole number of at least 1")
        return int(asked)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_threads() -> int:
    """Return the number of threads that the next kernel may use."""
    return _limit.get() or _available()


@contextmanager
def thread_limit(n: SupportsIndex) -> Iterator[None]:
    """Limit the CPU kernels to `n` threads inside a ``with`` block.

    The limit holds for the current thread (or task) only. Without it the kernels use every core that the
    process may run on, or the number in the environment variable ``LEVATTN_NUM_THREADS``. Results do not
    depend on the number of threads, to the last bit.

    Parameters
    ----------
    n : int
        Largest number of threads, at least 1.

    Yields
    ------
    None

    Raises
    ------
    TypeError
        If `n` is no whole number.
    ValueError
        If it is below 1.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> K = np.eye(4)
    >>> with levattn.thread_limit(1):
    ...     levattn.leverage_scores(K)
    array([1., 1., 1., 1.])
    """
    token = _limit.set(whole_number("n", n, what="a whole number of threads"))
    try:
        yield
    finally:
        _limit.reset(token)


def _get_pool(workers: int) -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None or _pool._max_workers < workers:
            _pool = ThreadPoolExecutor(workers, thread_name_prefix="levattn")
        return _pool


def _forget_pool() -> None:
    global _pool, _lock
    _lock = threading.Lock()
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def parallel_for(body: Callable[[int], None], n: int, *, threads: int | None = None) -> None:
    """Call ``body(i)`` for every ``i < n``, on as many threads as are allowed (and as `threads` says).

    Each index is taken by whichever thread is free, so `body` must write only to places of its own. After an error, or
    Ctrl-C, no further index is taken, and the error is raised once those in work are done.
    """
    workers = min(n, num_threads() if threads is None else threads)
    if workers <= 1:
        for i in range(n):
            body(i)
        return
    indices = count()  # next() on it is atomic
    stopped = False

    def drain() -> None:
        nonlocal stopped
        try:
            while not stopped and (i := next(indices)) < n:
                body(i)
        except BaseException:
            stopped = True
            raise

    helpers: list[Future[None]] = []
    try:
        helpers.extend(_get_pool(workers - 1).submit(copy_context().run, drain) for _ in range(workers - 1))
        drain()
        for helper in helpers:
            if not helper.cancel():  # one that has not begun has nothing left to do
                helper.result()
    except BaseException:
        stopped = True
        at_work = [helper for helper in helpers if not helper.cancel()]
        while at_work:  # what they read and write is freed once this returns, so another Ctrl-C waits as well
            with suppress(KeyboardInterrupt):
                at_work = list(wait(at_work).not_done)
        raise
