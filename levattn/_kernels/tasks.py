"""Splitting the work of the CPU into runs of tasks, and sharing them out over threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from levattn._core.threads import look_out_by, num_threads, parallel_for
from levattn._core.types import Int64

_THREAD_WORK = 6_000_000  # multiply-adds below which a second thread costs more than it brings
_RUN_WORK = 32_000_000  # multiply-adds beside which handing a run to a thread costs little
_CALL_WORK = 2_000_000_000  # multiply-adds after which a call of compiled code returns, so that it can be interrupted


def threads_for(work: float) -> int:
    """Return the number of threads for so many multiply-adds."""
    return num_threads() if work >= _THREAD_WORK else 1


def runs(work: float, threads: int) -> int:
    """Return into how many runs to split work: enough to balance the threads, few enough to cost little."""
    return 1 if threads == 1 else max(2 * threads, min(16 * threads, int(work / _RUN_WORK)))


def share(body: Callable[[int, int], None], n: int, work: float) -> None:
    """Call ``body(first, last)`` over `n` tasks in runs that are small enough to balance."""
    threads = 1 if n == 1 else threads_for(work)
    if threads == 1 or not n:
        if n:
            body(0, n)
        return
    _look_out()
    count = min(n, runs(work, threads))
    parallel_for(lambda i: body(n * i // count, n * (i + 1) // count), count, threads=threads)


def share_one_by_one(body: Callable[[Int64, int], None], n: int, work: float) -> None:
    """Call ``body(place, most)``, compiled code that takes at most so many tasks from ``place[0]`` on, by `taken`.

    So a call needs neither Python nor its lock, which another thread may hold; a long call returns, to be interrupted.
    """
    threads = 1 if n <= 1 else threads_for(work)
    if threads > 1:
        _look_out()
    place, most = np.zeros(1, np.int64), max(1, int(n * _CALL_WORK / max(work, 1.0)))
    parallel_for(lambda _: body(place, most), min(n, max(threads, -(-n // most))), threads=threads)


@cache
def _look_out() -> None:
    """Let threads wait for work without sleep, from the first shared work on."""
    from levattn._kernels.waiting import wait_for_change

    wait_for_change(np.zeros(1, np.int64), 1)  # compiled here, not in each thread
    look_out_by(wait_for_change)
