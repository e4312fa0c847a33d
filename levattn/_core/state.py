"""States that threads may share: they take one change at a time, and a copy is a branch of its own.

A state never changes its parts, apart from memory beyond the rows that it counts: it replaces them. So a `_snapshot`
stays as it is while the state goes on.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

_process = object()  # another one in a forked process, whose other threads cannot give back their locks
_making = threading.Lock()


class SharedState:
    """Base class of states: threads may share one, and processes may copy it.

    Methods that change a state are `locked`. Methods that read several attributes take the lock, or a `_snapshot`.
    """

    __slots__ = ("_lock",)
    _lock: tuple[object, AbstractContextManager[Any]]  # and the process that made it

    def _snapshot(self) -> Self:
        """Return the present state, to read from: it shares memory with the state that goes on."""
        with lock_of(self):
            return twin(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle or copy, all of one time."""
        with lock_of(self):
            held = vars(self._snapshot())
            return {
                name: value._snapshot() if isinstance(value, SharedState) else value for name, value in held.items()
            }

    def __copy__(self) -> Self:
        return copy.deepcopy(self)


StateType = TypeVar("StateType", bound=SharedState)
Given = ParamSpec("Given")
Found = TypeVar("Found")
Twin = TypeVar("Twin")


def twin(value: Twin) -> Twin:
    """Return an object of the same type with the same attributes, but for the lock of a state."""
    other = object.__new__(type(value))
    vars(other).update(vars(value))
    return other


def lock_of(state: SharedState) -> AbstractContextManager[Any]:
    """Return the lock of a state, which a thread may take again while it holds it."""
    try:
        process, lock = state._lock
    except AttributeError:
        return _new_lock(state)
    return lock if process is _process else _new_lock(state)


def _new_lock(state: SharedState) -> AbstractContextManager[Any]:
    with _making:
        if getattr(state, "_lock", (None,))[0] is not _process:
            state._lock = _process, threading.RLock()
        return state._lock[1]


def locked(method: Callable[Concatenate[StateType, Given], Found]) -> Callable[Concatenate[StateType, Given], Found]:
    """Make a method of a state wait for the calls of other threads."""

    @wraps(method)
    def call(self: StateType, /, *args: Given.args, **options: Given.kwargs) -> Found:
        with lock_of(self):
            return method(self, *args, **options)

    return call


def locked_with(method: Callable[[StateType, StateType], Found]) -> Callable[[StateType, StateType], Found]:
    """Make a method wait for the calls of other threads on its state and on another one."""

    @wraps(method)
    def call(self: StateType, other: StateType) -> Found:
        first, second = sorted(
            (self, other if isinstance(other, SharedState) else self), key=id
        )  # alike in all threads
        with lock_of(first), lock_of(second):
            return method(self, other)

    return call


def _begin_anew() -> None:
    global _process, _making
    _process, _making = object(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
