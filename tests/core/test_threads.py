"""The loop that shares work between threads: every index once, and an end soon after an error or Ctrl-C.

Inside: interrupts, forks and waits of threads are planted where no call of the library waits long enough.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest

from levattn._core import threads as _core_threads
from levattn._core.cached import cached_property
from levattn._core.threads import Background, num_threads, parallel_for, thread_limit

PATIENCE = 20.0  # seconds, that are only waited where something is broken


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("n", [0, 1, 2, 100])
def test_every_index_comes_once(n: int, threads: int) -> None:
    seen: list[int] = []
    parallel_for(seen.append, n, threads=threads)
    assert sorted(seen) == list(range(n))


@pytest.mark.parametrize("error", [MemoryError, ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("in_helper", [False, True])
@pytest.mark.parametrize("threads", [2, 4])
def test_no_index_is_taken_after_an_error(error: type[BaseException], in_helper: bool, threads: int) -> None:
    caller, failed, seen = threading.current_thread(), threading.Event(), []

    def body(i: int) -> None:
        seen.append(i)
        if (threading.current_thread() is not caller) == in_helper and not failed.is_set():
            failed.set()
            raise error("planted")
        failed.wait(PATIENCE)
        time.sleep(0.005)  # in which the one that failed goes on

    with pytest.raises(error, match="planted"):
        parallel_for(body, 1000, threads=threads)
    assert len(seen) < 100
    seen.clear()
    parallel_for(seen.append, 50, threads=threads)  # and the threads are as before
    assert len(seen) == 50


@pytest.mark.skipif(not hasattr(signal, "SIGINT") or os.name != "posix", reason="no signals")
@pytest.mark.parametrize("n", [2, 1000])
def test_ctrl_c_ends_the_work_when_what_was_begun_is_done(n: int) -> None:
    caller, begun, ended = threading.current_thread(), [], []
    begun_here, begun_there = threading.Event(), threading.Event()

    def body(i: int) -> None:
        begun.append(i)
        if threading.current_thread() is caller:
            begun_here.set()
            begun_there.wait(PATIENCE)  # else the caller may do all of the work before the other thread comes
            time.sleep(0.02 if n > 2 else 0)  # of two items, the caller waits for the other when the signal comes
            return
        begun_there.set()
        if begun_here.wait(PATIENCE) and not ended:
            time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.02)
            ended.append(i)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            parallel_for(body, n, threads=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(ended) == 1
    assert len(begun) < 100


def test_work_within_work_waits_for_no_thread() -> None:
    seen: list[int] = []

    def outer(i: int) -> None:
        parallel_for(lambda j: seen.append(10 * i + j), 10, threads=2)

    work = threading.Thread(target=parallel_for, args=(outer, 10), kwargs={"threads": 2}, daemon=True)
    work.start()
    work.join(PATIENCE)
    assert sorted(seen) == list(range(100))


def test_another_ctrl_c_waits_for_those_at_work_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """They write to arrays of the frames that the interrupt unwinds."""
    done: list[int] = []
    begun, again = threading.Event(), iter([True])
    settle = _core_threads._Share.settle

    def interrupted(share: Any) -> Any:
        if next(again, False):
            raise KeyboardInterrupt
        return settle(share)

    def body(i: int) -> None:
        if threading.current_thread() is threading.main_thread():
            begun.wait(PATIENCE)
            raise KeyboardInterrupt
        begun.set()
        time.sleep(0.1)
        done.append(i)

    monkeypatch.setattr(_core_threads._Share, "settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parallel_for(body, 2, threads=2)
    assert next(again, None) is None
    assert len(done) == 1


def test_no_more_threads_are_made_than_are_asked_for_at_once() -> None:
    """However many loops run side by side, and whoever has waited before."""
    before = sum(thread.name == "levattn" for thread in threading.enumerate())

    def loop() -> None:
        for _ in range(50):
            parallel_for(lambda _: time.sleep(0), 8, threads=3)

    loops = [threading.Thread(target=loop) for _ in range(6)]
    for work in loops:
        work.start()
    for work in loops:
        work.join(PATIENCE)
    assert sum(thread.name == "levattn" for thread in threading.enumerate()) <= max(before, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes that fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    parallel_for(lambda _: None, 10, threads=2)
    child = os.fork()
    if not child:
        seen: list[int] = []
        parallel_for(seen.append, 100, threads=2)
        os._exit(0 if sorted(seen) == list(range(100)) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("asked", ["at once", "begun", "done"])
def test_a_call_in_the_background_is_made_once(asked: str) -> None:
    begun, made = threading.Event(), []

    def call() -> int:
        begun.set()
        parallel_for(made.append, 50, threads=2)
        time.sleep(0.01)
        return num_threads()

    with thread_limit(3):
        coming = Background(call)
    if asked != "at once":
        assert begun.wait(PATIENCE)
    if asked == "done":
        time.sleep(0.05)
    assert coming.result() == coming.result() == 3
    assert sorted(made) == list(range(50))


def test_work_that_nobody_took_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper makes the call, and the loop within it alone; what that read is gone before the call has ended."""
    monkeypatch.setattr(_core_threads, "_helpers", _core_threads._Helpers())

    def call() -> bool:
        read = np.zeros(10)
        gone = weakref.ref(read)
        parallel_for(lambda _, read=read: read.sum(), 2, threads=2)
        del read
        return gone() is None

    coming = Background(call)
    while coming._result is None:
        time.sleep(0.001)
    assert coming.result()


def test_who_waits_for_a_call_helps_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, here, caller = threading.Event(), threading.Event(), threading.current_thread()

    def body(_: int) -> None:
        if threading.current_thread() is caller:
            here.set()
        begun.set()
        here.wait(PATIENCE)

    monkeypatch.setattr(_core_threads, "_helpers", _core_threads._Helpers())  # so that there is but one
    monkeypatch.setattr(_core_threads, "_look_out", lambda *_: time.sleep(0.001))
    coming = Background(lambda: parallel_for(body, 2, threads=2))
    assert begun.wait(PATIENCE)
    coming.result()
    assert here.is_set()


def test_a_call_that_failed_is_made_anew_by_who_asks() -> None:
    callers: list[threading.Thread] = []

    def call() -> int:
        callers.append(threading.current_thread())
        if len(callers) < 3:
            raise MemoryError("planted")
        return 7

    coming = Background(call)
    while not callers:
        time.sleep(0.001)
    with pytest.raises(MemoryError, match="planted"):
        coming.result()
    assert coming.result() == 7
    assert callers[1:] == [threading.current_thread()] * 2


def test_ctrl_c_comes_to_who_waits_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not to the helper alone, whose work it does in part; the call is made anew when it is asked again."""
    monkeypatch.setattr(_core_threads, "_helpers", _core_threads._Helpers())
    monkeypatch.setattr(_core_threads, "_look_out", lambda *_: time.sleep(0.001))
    caller, begun, interrupts = threading.current_thread(), threading.Event(), [KeyboardInterrupt("planted")]

    def body(_: int) -> None:
        begun.set()
        if threading.current_thread() is caller and interrupts:
            raise interrupts.pop()
        time.sleep(0.01)

    def call() -> int:
        parallel_for(body, 20, threads=2)
        return 7

    coming = Background(call)
    assert begun.wait(PATIENCE)
    with pytest.raises(KeyboardInterrupt, match="planted"):
        coming.result()
    assert coming.result() == 7


def test_who_waits_takes_no_work_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core_threads, "_helpers", _core_threads._Helpers())
    monkeypatch.setattr(_core_threads, "_look_out", lambda *_: time.sleep(0.001))
    takers: list[threading.Thread] = []

    def body(_: int) -> None:
        takers.append(threading.current_thread())
        time.sleep(0.005)

    coming = Background(lambda: time.sleep(0.1))
    other = threading.Thread(target=parallel_for, args=(body, 10), kwargs={"threads": 2})
    other.start()
    coming.result()
    other.join(PATIENCE)
    assert len(takers) == 10
    assert threading.current_thread() not in takers


def test_several_who_wait_for_a_call_go_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a fork does beside a thread that asks."""
    monkeypatch.setattr(_core_threads, "_PATIENCE", 10 * PATIENCE)
    go_on, begun = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        go_on.wait(PATIENCE)

    coming = Background(call)
    assert begun.wait(PATIENCE)
    waiting = [threading.Thread(target=coming.wait, daemon=True) for _ in range(3)]
    for thread in waiting:
        thread.start()
    time.sleep(0.05)
    go_on.set()
    for thread in waiting:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in waiting)


def test_what_a_call_returned_goes_with_it() -> None:
    """Without a cycle that only the garbage collector would find."""
    coming = Background(lambda: np.zeros(10))
    while coming._result is None:
        time.sleep(0.001)
    gone = weakref.ref(coming.result())
    coming._share.settle()
    del coming
    assert gone() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes that fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("begun", [False, True])
def test_a_fork_waits_for_calls_under_way(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The locks that they hold, as of imports, would be held in the other process for ever."""
    lock, beginning = threading.Lock(), threading.Event()
    if not begun:
        monkeypatch.setattr(_core_threads._Helpers, "give", lambda *_: None)

    def call() -> int:
        with lock:
            beginning.set()
            time.sleep(0.05)
        return 7

    coming = Background(call)
    assert not begun or beginning.wait(PATIENCE)
    child = os.fork()
    if not child:
        os._exit(0 if lock.acquire(timeout=5) and not lock.release() and coming.result() == 7 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert coming.result() == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes that fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("when", ["another thread asks", "too late to wait for"])
def test_a_forked_process_makes_a_call_that_other_threads_were_at(when: str) -> None:
    beginning, go_on, parent = threading.Event(), threading.Event(), os.getpid()

    def call() -> int:
        if os.getpid() == parent:
            beginning.set()
            go_on.wait(PATIENCE)
        return 7

    coming = Background(call)
    assert beginning.wait(PATIENCE)
    if when == "another thread asks":
        go_on.set()
        coming._asking.acquire()
    else:
        _core_threads._under_way.discard(coming)
    child = os.fork()
    if not child:
        signal.alarm(5)
        if coming.result() != 7:
            os._exit(1)
        grandchild = os.fork()
        os._exit(0 if not grandchild or not os.waitpid(grandchild, 0)[1] else 2)
    status = os.waitpid(child, 0)[1]
    go_on.set()
    if when == "another thread asks":
        coming._asking.release()
    assert status == 0
    assert coming.result() == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes that fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_waits_for_calls_although_another_thread_begins_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changing(weakref.WeakSet[Any]):
        times = 0

        def __iter__(self) -> Any:
            self.times += 1
            if self.times == 1:
                raise RuntimeError("Set changed size during iteration")
            return super().__iter__()

    monkeypatch.setattr(_core_threads, "_under_way", changing := Changing())
    coming = Background(partial(time.sleep, 0.05))
    child = os.fork()
    if not child:
        os._exit(0 if coming._share._done else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert changing.times == 2


def test_threads_that_look_out_do_all_that_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """They see what comes while they look, and what comes once they sleep; a change that is missed costs time only."""
    looks = []

    def look(word: Any, was: int) -> None:
        looks.append(was)
        if len(looks) % 3:
            end = time.monotonic() + 0.002
            while word[0] == was and time.monotonic() < end:
                time.sleep(0)

    monkeypatch.setattr(_core_threads, "_look_out", look)
    for n in (2, 3, 50):
        for pause in (0.0, 0.005):
            seen: list[int] = []
            parallel_for(seen.append, n, threads=3)
            assert sorted(seen) == list(range(n))
            time.sleep(pause)
    assert looks


class Slow:
    """An object whose attribute tells when it is being computed, and goes on when it may."""

    def __init__(self) -> None:
        self.beginning, self.may_go_on, self.times = threading.Event(), threading.Event(), 0

    @cached_property
    def number(self) -> object:
        self.times += 1
        self.beginning.set()
        self.may_go_on.wait(PATIENCE)
        return object()


def at_work(slow: Slow) -> tuple[threading.Thread, list[object]]:
    """Return a thread that computes the attribute, and what it will find."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(slow.number))
    thread.start()
    assert slow.beginning.wait(PATIENCE)
    return thread, found


def test_an_attribute_is_computed_while_another_thread_computes_it_for_another_object() -> None:
    slow, other = Slow(), Slow()
    thread, _ = at_work(slow)
    other.may_go_on.set()
    second, found = at_work(other)
    second.join(PATIENCE)
    assert found
    assert thread.is_alive()
    slow.may_go_on.set()
    thread.join()


def test_threads_that_compute_one_attribute_get_one_value() -> None:
    slow = Slow()
    first, found = at_work(slow)
    slow.beginning.clear()
    second, found_too = at_work(slow)
    slow.may_go_on.set()
    first.join()
    second.join()
    assert found[0] is found_too[0] is slow.number
    assert slow.times == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes that fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("same", [False, True])
def test_a_process_forked_while_an_attribute_is_computed_computes_it(same: bool) -> None:
    slow = Slow()
    thread, _ = at_work(slow)
    child = os.fork()
    if not child:
        signal.alarm(5)
        mine = slow if same else Slow()
        mine.may_go_on = threading.Event()  # the one of the parent has a lock that may be held
        mine.may_go_on.set()
        os._exit(0 if mine.number is mine.number else 1)
    status = os.waitpid(child, 0)[1]
    slow.may_go_on.set()
    thread.join()
    assert status == 0
