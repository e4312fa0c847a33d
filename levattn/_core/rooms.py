"""Memory that a call leaves to later calls, because the system hands out new memory page by page, and slowly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_MOST = 32 << 20  # bytes that wait for a call

_waiting: list[tuple[int, dict[str, Any]]] = []  # their bytes, and arrays by name


@contextmanager
def lent_room() -> Iterator[dict[str, Any]]:
    """Give a record of arrays, which is empty or has the arrays of an earlier call.

    Nothing that outlives the call may read them. After an error they are freed. Threads may call at the same time.
    """
    room: dict[str, Any] = {}
    with suppress(IndexError):
        _, room = _waiting.pop()
    yield room
    left = _MOST - sum(size for size, _ in list(_waiting))
    kept, size = dict[str, Any](), 0
    for name, array in sorted(room.items(), key=lambda pair: int(pair[1].nbytes)):
        if size + array.nbytes > left:
            break
        kept[name], size = array, size + array.nbytes
    if kept:
        _waiting.append((size, kept))
