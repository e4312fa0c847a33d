"""States that several threads use, and copies of states: one table of all states times a list of properties.

A thread is stopped before one of the lines of a call while another thread makes its own call on the same state. Every
call then has the result of some order of the two.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import levattn
from levattn.sketch import CountSketch, Sketch, SketchedRows
from levattn.states import Moments, SoftmaxState, TokenState
from strategies import Float
from streams import BLOCK

MOMENT = 0.01  # seconds for a call that may have to wait for the stopped one
PATIENCE = 30.0
PLACES = 6  # lines at which a call is stopped
TRACED = "sets", "states", "heavy", "sketch", "sensitivity"
D = 3


def chunk(number: int, n: int = 40) -> Float:
    """Integers, so that sums have the same bits in every order; one row is large."""
    K = np.random.default_rng([number, n]).integers(-4, 5, (n, D)).astype(np.float64)
    K[number % n, number % D] = 300 + number
    return K


def stream_figures(state: Any) -> Any:
    found = state.result()
    rest = levattn.StreamingUniversalSet.from_bytes(state.to_bytes())
    of_keys = [array.tolist() for array in (found.indices, found.payload, found.member_scores)]
    return found.n, state.n, of_keys, rest.n, state.held


def sample_figures(state: Any) -> Any:
    found = state.result()
    rest = levattn.StreamingRowSample.from_bytes(state.to_bytes())
    return state.n, found.indices.tolist(), found.weights.tolist(), found.keys.tolist(), rest.n, state.held


def causal_figures(state: Any) -> Any:
    found = state.heavy(np.eye(D))
    return state.n, state.held, found.indices.tolist(), found.scores.tolist(), found.normalizers.tolist(), repr(state)


def coverage_of(seed: int) -> levattn.AdaptiveCoverage:
    rng = np.random.default_rng(seed)
    K, Q = rng.standard_normal((50, D)), rng.standard_normal((60, D))
    found = levattn.covering_set(K, Q, 0.2, f=levattn.Softmax(), coverage=0.8)
    return levattn.AdaptiveCoverage(K, found, rate=0.1)


def next_of(state: Any) -> Any:
    """What the next queries would find, and the size that they would leave: that tells what was found before."""
    branch = copy.copy(state)
    return branch.update(10 * np.eye(D)).tolist(), branch.size


def tokens_of(number: int) -> TokenState:
    W = chunk(number)
    return TokenState(*(Moments(D, diagonal=True).update(part) for part in (W, W + 1)))


@dataclass(frozen=True)
class Kind:
    """A kind of state: how one is made, how the chunk of a number goes into it, and all that it tells."""

    new: Callable[[], Any]
    add: Callable[[Any, int], Any]
    figures: Callable[[Any], Any]
    count: Callable[[Any], Any]  # of what went in
    each: int = 40  # the count of a chunk


def of_stream(epsilon: float, n: int = 40, **options: Any) -> Kind:
    def add(state: Any, number: int) -> None:
        state.update(chunk(number, n), payload=np.full(n, number))

    return Kind(
        lambda: levattn.StreamingUniversalSet(epsilon, **options), add, stream_figures, lambda state: state.n, n
    )


def of_sample(n: int = 40, **options: Any) -> Kind:
    return Kind(
        lambda: levattn.StreamingRowSample(**options),
        lambda state, number: state.update(chunk(number, n)),
        sample_figures,
        lambda state: state.n,
        n,
    )


def of_moments(**options: Any) -> Kind:
    return Kind(
        lambda: Moments(D, **options),
        lambda state, number: state.update(chunk(number)),
        lambda state: (state.to_bytes(), state.result().tolist(), float(state.weight), state.factor().rank.tolist()),
        lambda state: int(state.count),
    )


KINDS: dict[str, Kind] = {
    "stream": of_stream(0.3),
    "stream-blocks": of_stream(0.3, BLOCK + 7),
    "stream-lift": of_stream(0.5, 5, f=4),
    "stream-block-bound": of_stream(1.0, f=levattn.Huber(2.0)),
    "sample": of_sample(size=7),
    "sample-blocks": of_sample(BLOCK + 7, distortion=0.9, ridge=2.0),
    "moments": of_moments(),
    "moments-diagonal": of_moments(diagonal=True),
    "moments-decayed": of_moments(decay=0.5),
    "tokens": Kind(
        lambda: tokens_of(99),
        lambda state, number: state.merge(tokens_of(number)),
        lambda state: (state.to_bytes(), int(state.norms.count), int(state.tokens.count)),
        lambda state: int(state.tokens.count) - 40,
    ),
    "softmax": Kind(
        lambda: SoftmaxState(1, D),
        lambda state, number: state.update(np.zeros((40, 1)), chunk(number)),
        lambda state: (state.to_bytes(), state.result().tolist()),
        lambda state: int(state.s[0]),
    ),
    "sketch": Kind(
        lambda: SketchedRows(Sketch(CountSketch(4), 7), D),
        lambda state, number: state.update(chunk(number), row_start=40 * number),
        lambda state: (state.to_bytes(), state.result().tolist()),
        lambda state: state.count,
    ),
    "causal": Kind(
        lambda: levattn.CausalUniversalSet(0.3),
        lambda state, number: state.update(chunk(number)),
        causal_figures,
        lambda state: state.n,
    ),
    "adaptive": Kind(
        lambda: coverage_of(0),
        lambda state, number: state.update(np.random.default_rng(number).standard_normal((1, D)) * 3),
        lambda state: (state.seen, state.missed, state.size, state.indices.tolist(), next_of(state)),
        lambda state: state.seen,
        1,
    ),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "bytes": lambda state: type(state).from_bytes(state.to_bytes()),
}


OF_BYTES = ("causal", "adaptive")  # have none


def with_chunks(kind: Kind, *numbers: int) -> Any:
    state = kind.new()
    for number in numbers:
        kind.add(state, number)
    return state


def told(kind: Kind, *numbers: int) -> Any:
    return kind.figures(with_chunks(kind, *numbers))


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.crossed
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", KINDS)
def test_a_copy_is_a_branch_of_its_own(name: str, how: str) -> None:
    kind = KINDS[name]
    if how == "bytes" and name in OF_BYTES:
        return
    for before in ((), (1,), (1, 2)):
        for first in (True, False):
            state = with_chunks(kind, *before)
            other = COPIES[how](state)
            for branch, number in ((state, 3), (other, 4)) if first else ((other, 4), (state, 3)):
                kind.add(branch, number)
            assert kind.figures(state) == told(kind, *before, 3), (before, first)
            assert kind.figures(other) == told(kind, *before, 4), (before, first)
            assert type(other) is type(state)


# -- threads ----------------------------------------------------------------------------------------------------------


class Aside(threading.Thread):
    """A call in another thread, whose result or error `outcome` gives."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.call, self.result, self.error = call, None, None

    def run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:
            self.error = error  # type: ignore[assignment]

    def outcome(self) -> Any:
        self.join(PATIENCE)
        assert not self.is_alive(), "two calls wait for one another"
        if self.error is not None:
            raise self.error
        return self.result


def stopped(call: Callable[[], Any], at: int, meanwhile: Callable[[], Any] | None = None) -> tuple[Any, Any, int]:
    """Return the results of a call and of another that begins before line `at` of it, and the lines of the call."""
    lines, aside = 0, None if meanwhile is None else Aside(meanwhile)

    def of_line(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == at and aside is not None:
                aside.start()
                aside.join(MOMENT)
        return of_line

    def of_call(frame: Any, event: str, argument: Any) -> Any:
        return of_line if Path(frame.f_code.co_filename).parent.name in TRACED else None

    def traced() -> Any:
        sys.settrace(of_call)
        try:
            return call()
        finally:
            sys.settrace(None)

    main = Aside(traced)
    main.start()
    found = main.outcome()
    return found, None if aside is None or aside.ident is None else aside.outcome(), lines


def places(call: Callable[[], Any], seed: int) -> list[int]:
    """Return some of the lines of a call."""
    lines = stopped(call, 0)[2]
    return sorted({*np.random.default_rng(seed).integers(1, lines + 1, PLACES).tolist(), 1, lines})


READS: dict[str, Callable[[Kind, Any], Any]] = {
    "figures": lambda kind, state: (kind.figures(state), None)[1],  # several calls, which may see several times
    **{how: lambda kind, state, how=how: kind.figures(COPIES[how](state)) for how in COPIES},  # type: ignore[misc]
}


@pytest.mark.crossed
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", KINDS)
def test_a_read_loses_no_chunk_and_sees_whole_ones(name: str, read: str) -> None:
    kind = KINDS[name]
    if read == "bytes" and name in OF_BYTES:
        return
    before, after = (READS[read](kind, with_chunks(kind, *numbers)) for numbers in ((1,), (1, 2)))
    whole = told(kind, 1, 2)
    calls: tuple[Callable[[Any], Any], ...] = partial(READS[read], kind), lambda state: kind.add(state, 2)
    for turn in (0, 1):
        for at in places(partial(calls[turn], with_chunks(kind, 1)), turn):
            state = with_chunks(kind, 1)
            one, other, _ = stopped(partial(calls[turn], state), at, partial(calls[1 - turn], state))
            assert (one, other)[turn] in (before, after), (turn, at)
            assert kind.figures(state) == whole, (turn, at)


@pytest.mark.parametrize("name", KINDS)
def test_each_chunk_of_two_threads_counts_once(name: str) -> None:
    kind = KINDS[name]
    orders = told(kind, 1, 2, 3), told(kind, 1, 3, 2)
    for at in places(partial(kind.add, with_chunks(kind, 1), 2), 2):
        state = with_chunks(kind, 1)
        stopped(partial(kind.add, state, 2), at, partial(kind.add, state, 3))
        assert kind.figures(state) in orders, at


@contextmanager
def hasty() -> Iterator[None]:
    """Let threads take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("name", KINDS)
def test_many_threads_update_and_read(name: str) -> None:
    kind, state = KINDS[name], with_chunks(KINDS[name], 1)
    done = threading.Event()

    def write(first: int) -> None:
        for number in range(first, first + 6):
            kind.add(state, number)

    def read() -> None:
        while not done.is_set():
            kind.figures(state)

    with hasty():
        reader, writers = Aside(read), [Aside(partial(write, first)) for first in (2, 8, 14, 20)]
        for thread in (reader, *writers):
            thread.start()
        for thread in writers:
            thread.outcome()
        done.set()
        reader.outcome()
    assert kind.count(state) == 25 * kind.each


def take_in(one: Any, other: Any) -> None:
    for turn in range(4):
        refusal = suppress(ValueError) if isinstance(one, levattn.StreamingRowSample) else nullcontext()
        with refusal:  # of rows that are there, after the wait
            one.merge(copy.copy(other) if turn % 2 else other)


@pytest.mark.parametrize("name", KINDS)
def test_states_that_take_in_one_another_do_not_wait_for_ever(name: str) -> None:
    kind = KINDS[name]
    if not hasattr(kind.new(), "merge"):
        return
    one, other = with_chunks(kind, 1), with_chunks(kind, 2)
    with hasty():
        threads = [Aside(partial(take_in, *pair)) for pair in ((one, other), (other, one))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.outcome()


def test_queries_that_another_thread_adds_are_of_one_time() -> None:
    """The covariance comes from the moment, the mean and the number of the queries."""
    rng = np.random.default_rng(0)
    K, queries = rng.standard_normal((5, 3)), np.hstack([rng.standard_normal((500, 3)), np.ones((500, 1))])

    def expected(state: Any) -> Any:
        return levattn.expected_scores(K, state, f=4, samples=2)

    for at in places(lambda: expected(Moments(4).update(queries)), 3):
        state = Moments(4).update(queries)
        _, added, _ = stopped(
            lambda state=state: expected(state),  # type: ignore[misc]
            at,
            lambda state=state: state.update(queries),  # type: ignore[misc]
        )
        count = 500 if added is None else 1000  # the call may have fewer lines than the first one
        assert (state.count, state.result()[3, 3]) == (count, count)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes that fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("name", KINDS)
def test_a_process_forked_during_an_update_has_the_state_before_or_after(name: str) -> None:
    kind = KINDS[name]
    wanted = told(kind, 1, 3), told(kind, 1, 2, 3)

    def forked(state: Any) -> int:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(PATIENCE))
            try:
                kind.add(state, 3)
                os._exit(0 if kind.figures(state) in wanted else 1)
            finally:
                os._exit(2)
        return os.waitpid(child, 0)[1]

    for at in places(partial(kind.add, with_chunks(kind, 1), 2), 3)[::2]:
        state = with_chunks(kind, 1)
        _, status, _ = stopped(partial(kind.add, state, 2), at, partial(forked, state))
        assert status == 0, at
