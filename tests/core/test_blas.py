"""Threads of BLAS: one where the library calls it from several threads of its own, and for small matrices of LAPACK.

Inside: what BLAS may take is asked of its libraries while a call of ours runs.
"""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.linalg  # noqa: F401 (which loads a library of its own)
from threadpoolctl import ThreadpoolController

import levattn
from levattn._core import blas
from levattn._core.blas import blas_limit, lapack, side_by_side
from levattn.attention import box, fit_slots


def libraries() -> list[Any]:
    """The libraries of BLAS."""
    return list(ThreadpoolController().select(user_api="blas").lib_controllers)


def counts() -> list[int]:
    """The threads of each of them."""
    return [library.num_threads for library in libraries()]


def give(threads: list[int]) -> None:
    """Give each library so many threads; any thread may set other numbers afterward."""
    for library, n in zip(libraries(), threads, strict=True):
        library.set_num_threads(n)
        getattr(library, "clear_controlling_thread", lambda: None)()


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = counts()
    give([2] * len(before))
    if set(counts()) != {2}:
        pytest.skip("BLAS has no threads that can be counted")
    yield
    assert set(counts()) == {2}
    give(before)


def test_the_least_limit_of_blocks_holds_and_then_the_usual_one() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with blas_limit(1):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other, daemon=True)
    with blas_limit(5):
        assert set(counts()) == {2}  # no more than usual
        thread.start()
        assert entered.wait(60)
        assert set(counts()) == {1}
    assert set(counts()) == {1}  # the other block goes on
    leave.set()
    thread.join()


def test_an_error_ends_a_limit() -> None:
    with pytest.raises(np.linalg.LinAlgError):
        lapack(np.linalg.inv, np.zeros((2, 2)))


@pytest.mark.parametrize(
    ("shape", "expected"), [((512, 512), 1), ((3, 64, 64), 1), ((100_000, 8), 1), ((600, 600), 2)]
)
def test_small_matrices_have_one_thread(shape: tuple[int, ...], expected: int) -> None:
    found = lapack(lambda A, *, more: (A.shape, counts(), more), np.empty(shape), more=7)
    assert found == (shape, [expected] * len(counts()), 7)


def told(queue: Any, again: bool) -> None:
    if again:
        lapack(np.linalg.inv, np.eye(2))
    queue.put(counts())


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("within", [True, False])
def test_a_fork_has_the_usual_threads(within: bool) -> None:
    """Within a block from the next call on; after blocks as it has them in its parent."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=told, args=(queue, within))
    with blas_limit(1):
        if within:
            child.start()
    if not within:
        give([1] * len(counts()))
        child.start()
    child.join()
    give([2] * len(counts()))
    assert child.exitcode == 0
    assert set(queue.get()) == {2 if within else 1}


@pytest.mark.parametrize("when", ["entered", "setting"])
def test_a_block_that_is_gone_has_no_limit(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after Ctrl-C, before the end of the block is known or while numbers are set."""
    block = blas_limit(1)
    if when == "setting":
        library = blas._libraries(True)[-1]
        interrupted = iter([True])

        def set_num_threads(n: int) -> None:
            type(library).set_num_threads(library, n)
            if next(interrupted, False):
                raise KeyboardInterrupt

        monkeypatch.setattr(library, "set_num_threads", set_num_threads)
        with pytest.raises(KeyboardInterrupt):
            block.__enter__()
    else:
        block.__enter__()
        assert set(counts()) == {1}
    del block
    gc.collect()
    assert set(counts()) == {2}


def test_numbers_of_another_program_stay() -> None:
    with blas_limit(1):
        give([3] * len(counts()))
    assert set(counts()) == {3}
    give([2] * len(counts()))


def seen_by(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """The largest number of threads of BLAS in each call of a function."""
    function, seen = getattr(owner, name), []

    def call(*args: Any, **options: Any) -> Any:
        seen.append(max(counts()))
        return function(*args, **options)

    monkeypatch.setattr(owner, name, call)
    return seen


def test_heads_that_are_fitted_side_by_side_have_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_by(monkeypatch, box, "ridge_solutions")
    Q, K, V = np.random.default_rng(0).standard_normal((3, 4, 200, 8))
    with levattn.thread_limit(1):
        one = fit_slots(Q[:, :40], K, V, 60)
    with levattn.thread_limit(3):
        three = fit_slots(Q[:, :40], K, V, 60)
    assert set(seen) == {1}
    for name in ("indices", "values", "log_weights", "output_residual"):
        np.testing.assert_array_equal(getattr(one, name), getattr(three, name))


@pytest.mark.parametrize("kind", ["rank-deficient", "fewer rows than columns"])
def test_scores_take_one_thread_for_small_matrices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    few = kind != "rank-deficient"
    seen = seen_by(monkeypatch, *((np.linalg, "inv") if few else (np.linalg, "svd")))
    K = rng.standard_normal((30, 90)) if few else rng.standard_normal((500, 5)) @ rng.standard_normal((5, 24))
    levattn.leverage_scores(K)
    assert set(seen) == {1}


@pytest.mark.parametrize(("allowed", "calls", "expected"), [(8, 2, 1), (1, 3, 1), (4, 1, 2)])
def test_calls_side_by_side_have_one_thread_each(allowed: int, calls: int, expected: int) -> None:
    seen: list[int] = []
    with levattn.thread_limit(allowed):
        side_by_side(lambda _: seen.append(max(counts())), calls)
    assert seen == [expected] * calls
