"""Memory that a call leaves to later calls, because the system hands out new memory page by page, and slowly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_MOST = 32 << 20  # bytes that wait for a call

_waiting: list[dict[str, Any]] = []


@contextmanager
def lent_room() -> Iterator[dict[str, Any]]:
    """Give a record of arrays, which is empty or has the arrays of an earlier call.

    Nothing that outlives the call may read them. After an error they are freed.
    """
    room: dict[str, Any] = {}
    with suppress(IndexError):
        room = _waiting.pop()
    yield room
    left = _MOST - sum(array.nbytes for other in list(_waiting) for array in other.values())
    kept: dict[str, Any] = {}
    for name, array in sorted(room.items(), key=lambda pair: int(pair[1].nbytes)):
        left -= array.nbytes
        if left >= 0:
            kept[name] = array
    if kept:
        _waiting.append(kept)
