"""Progress of long work: a function of the caller, or a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from levattn._core.checks import needing


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
