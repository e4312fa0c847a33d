"""Threads of the CPU kernels: how many, one loop that shares work between them, and reports of its progress.

The kernels release the GIL, so plain Python threads run them side by side. Unlike an OpenMP or workqueue layer, the
loop may be entered from several threads at once and survives a fork. Waking a sleeping thread takes as long as many a
kernel runs. So after its work a thread looks for more work for a while, if it can do so without the GIL.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Generic, SupportsIndex, TypeVar
from weakref import WeakSet

import numpy as np

from levattn._core.checks import needing, whole_number

_limit: ContextVar[int | None] = ContextVar("levattn_thread_limit", default=None)
_PATIENCE = 10.0  # seconds
_LOOKS = 50  # of some tenths of a millisecond, in which a waiting thread looks for work
_look_out: Callable[[Any, int], object] | None = None


def available_threads() -> int:
    """Return the number of threads that the environment allows, or raise; an empty variable is none."""
    asked = os.environ.get("LEVATTN_NUM_THREADS", "").strip()
    if asked:
        if not asked.isdecimal() or int(asked) < 1:
            raise ValueError(
                f"LEVATTN_NUM_THREADS is {asked!r}; expected a whole number of at least 1. Unset the environment "
                "variable to use every core"
            )
        return int(asked)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_threads() -> int:
    """Return the number of threads that the next kernel may use."""
    return _limit.get() or available_threads()


def thread_limit(n: SupportsIndex) -> AbstractContextManager[None]:
    """Limit the CPU kernels to `n` threads inside a ``with`` block.

    The limit holds for the current thread (or task) only. Without it the kernels use every core that the
    process may run on, or the number in the environment variable ``LEVATTN_NUM_THREADS`` unless that is empty. Results
    do not depend on the number of threads, to the last bit.

    Parameters
    ----------
    n : int
        Largest number of threads, at least 1.

    Returns
    -------
    context manager
        The limit, for a ``with`` block.

    Raises
    ------
    TypeError
        If `n` is not a whole number.
    ValueError
        If `n` is below 1.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> K = np.eye(4)
    >>> with levattn.thread_limit(1):
    ...     levattn.leverage_scores(K)
    array([1., 1., 1., 1.])
    """
    return _limited(whole_number("n", n, what="a whole number of threads"))


@contextmanager
def _limited(n: int) -> Iterator[None]:
    token = _limit.set(n)
    try:
        yield
    finally:
        _limit.reset(token)


def look_out_by(wait_for_change: Callable[[Any, int], object]) -> None:
    """Set the function by which threads look for work: it returns soon after ``word[0]`` changes, or after some time.

    Its arguments are a word, an array of one int64, and the old value of the word. It must release the GIL.
    """
    global _look_out
    _look_out = wait_for_change


class _Share:
    """A share of a loop, which runs in the thread that claims it first: a helper, or the caller at its end."""

    __slots__ = ("_begun", "_claimed", "_done", "_ended", "_word", "context", "error", "giver", "runner", "work")

    def __init__(self, work: Callable[[], None], context: Context) -> None:
        self.work: Callable[[], None] | None = work
        self.context = context
        self.giver, self.runner = threading.get_ident(), 0  # threads
        self.error: BaseException | None = None
        self._begun = self._done = False
        self._claimed, self._ended = threading.Lock(), threading.Lock()
        self._ended.acquire()
        self._word = np.zeros(1, np.int64)

    def run(self) -> None:
        """Do the work, in a helper, unless the caller has already claimed it."""
        if self._claimed.acquire(blocking=False):
            self.runner, self._begun = threading.get_ident(), True
            try:
                if self.work is not None:
                    self.context.run(self.work)
            except BaseException as error:  # the caller raises it
                self.error = error
            finally:
                self.work = None  # it may refer to this share
                self._done = True
                self._word[0] = 1
                self._ended.release()

    @property
    def under_way(self) -> bool:
        """Whether a helper has begun the work and has not ended it."""
        return self._begun and not self._done

    def look_out(self) -> None:
        """Return once the work is done, or after some time."""
        if _look_out is not None:
            _look_out(self._word, 0)

    def settle(self) -> BaseException | None:
        """Return its error once the work is done or will not begin; may be called again if interrupted."""
        if not self._done and self._claimed.acquire(blocking=False):
            self._done = True
            self.work = None  # a queue may hold this share for long, but must not hold the arrays of the work
        if not self._done:
            self.look_out()
        while not self._done:
            if self._ended.acquire(timeout=_PATIENCE):
                self._ended.release()  # for other waiting threads
            elif not self._begun:
                break  # an interrupt came right after the claim above
        return self.error


class _Helpers:
    """Threads that take shares from one queue."""

    def __init__(self) -> None:
        self._lock, self._made = threading.Lock(), 0
        self._shares: SimpleQueue[_Share] = SimpleQueue()
        self._given = np.zeros(1, np.int64)  # counts calls of `give`, so that looking threads notice

    def give(self, shares: list[_Share]) -> None:
        """Hand out shares, to at least as many threads."""
        if self._made < len(shares):
            with self._lock:
                for _ in range(self._made, len(shares)):
                    threading.Thread(target=self._serve, name="levattn", daemon=True).start()
                self._made = max(self._made, len(shares))
        for share in shares:
            self._shares.put(share)
        self._given[0] += 1

    def help_with(self, share: _Share) -> None:
        """Run shares that the thread of a begun share hands out, until it is done; give up after some time."""
        looks = _LOOKS if _look_out is not None else 0
        while looks and share.under_way:
            other = None
            with suppress(Empty):
                other = self._shares.get_nowait()
            if other is not None and other.giver == share.runner:
                other.run()
                if isinstance(other.error, KeyboardInterrupt):  # meant for this thread
                    raise other.error
                continue
            if other is not None:
                self._shares.put(other)
            share.look_out()
            looks -= 1

    def _serve(self) -> None:
        while True:
            self._next().run()

    def _next(self) -> _Share:
        if _look_out is not None:
            seen = int(self._given[0])
            try:
                return self._shares.get_nowait()
            except Empty:
                _look_out(self._given, seen)
        return self._shares.get()


_helpers = _Helpers()


def _forget_helpers() -> None:
    global _helpers, _under_way
    _helpers, _under_way = _Helpers(), WeakSet()


def parallel_for(body: Callable[[int], None], n: int, *, threads: int | None = None) -> None:
    """Call ``body(i)`` for every ``i < n``, on as many threads as are allowed (and as `threads` says).

    A free thread takes the next index, so each call of `body` must write only to places of its own. After an error, or
    Ctrl-C, no thread takes a further index, and the error is raised once the running calls are done.
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

    shares = [_Share(drain, copy_context()) for _ in range(workers - 1)]
    error: BaseException | None = None
    try:
        _helpers.give(shares)
        drain()
    except BaseException as raised:
        stopped, error = True, raised
    while shares:  # their arrays are freed once this returns, so another Ctrl-C waits as well
        try:
            found = shares[-1].settle()
            shares.pop()
        except KeyboardInterrupt as interrupt:
            found = interrupt
        stopped, error = stopped or found is not None, error or found
    if error is not None:
        try:
            raise error
        finally:  # else the error and this frame would refer to each other
            found = error = None


_Result = TypeVar("_Result")


class Background(Generic[_Result]):
    """A call that a helper makes meanwhile, or the thread that asks for its result before a helper has begun.

    The call must give the same result if it is repeated, because it is repeated after an error. A fork waits for it:
    the new process would have the locks of the thread that makes the call, but not the thread. A call that began too
    late for that is repeated there.
    """

    def __init__(self, call: Callable[[], _Result]) -> None:
        self._call: Callable[[], _Result] | None = call
        self._result: _Result | None = None
        self._asking, self._helpers = threading.Lock(), _helpers
        self._share = _Share(self._work, copy_context())
        _under_way.add(self)
        _helpers.give([self._share])

    def _work(self) -> None:
        call = self._call
        if call is not None:
            self._result = call()
            self._call = None

    def wait(self) -> None:
        """Return once the call is made, or no helper will make it."""
        self._share.settle()

    def result(self) -> _Result:
        """Return the result of the call, or raise its error when it is repeated here."""
        if self._helpers is _helpers:  # in a forked process no thread that asks or helps is left
            with self._asking:
                _helpers.help_with(self._share)
                self.wait()
        _under_way.discard(self)
        self._share.context.copy().run(self._work)
        return self._result  # type: ignore[return-value]  # the call was made


_under_way: WeakSet[Background[Any]] = WeakSet()


def _wait_for_calls() -> None:
    calls: list[Background[Any]] | None = None
    while calls is None:
        with suppress(RuntimeError):  # another thread changes the set meanwhile
            calls = list(_under_way)
    for call in calls:
        call.wait()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_calls, after_in_child=_forget_helpers)


@contextmanager
def reported(progress: Any, total: int | None, what: str = "rows of keys") -> Iterator[Callable[[int], None]]:
    """Give a function to call with the number of rows processed since the last call.

    `progress` is None, True for a bar on the terminal, or a function of the rows done and their total. The total is
    None where it is unknown. what: the unit, as the bar shows it.
    """
    if progress is None or progress is False:
        yield lambda _: None
        return
    done = 0
    if progress is True:
        with _bar(total, what) as advance:
            yield advance
        return
    if not callable(progress):
        raise TypeError(
            f"progress is {progress!r}; expected None, True for a bar, or a function of the rows done and their total"
        )

    def call(rows: int) -> None:
        nonlocal done
        done += rows
        progress(done, total)

    yield call


@contextmanager
def _bar(total: int | None, what: str) -> Iterator[Callable[[int], None]]:
    with needing("a progress bar needs rich", "cli"):
        from rich.console import Console
        from rich.progress import Progress
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda rows: bar.advance(task, rows)
