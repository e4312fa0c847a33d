"""Conditions on computed arrays, read from a device all at once and not one by one."""

from __future__ import annotations

from typing import Any

from levattn._core.arrays import is_torch, on_cuda
from levattn.attention.common.space import namespace_of
from levattn.exceptions import NonFiniteError


class Checks:
    """Conditions that hold unless numbers are not finite or out of range, each with its message.

    Reading a condition from a device waits for the device, so conditions of tensors and of CuPy wait until `settle`.
    Other conditions are checked at once.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, str, type[ValueError]]] = []

    def expect(self, holds: Any, message: str, kind: type[ValueError] = NonFiniteError) -> None:
        """Raise an error with a message, now or in `settle`, unless `holds`, an array without axes, is true."""
        if is_torch(holds) or on_cuda(holds):
            self._waiting.append((holds, message, kind))
        elif not bool(holds):
            raise kind(message)

    def settle(self) -> None:
        """Raise for the first condition so far that does not hold, with one wait for all."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        xp = namespace_of(waiting[0][0])
        if not bool(xp.all(xp.stack([holds for holds, *_ in waiting]))):
            message, kind = next((message, kind) for holds, message, kind in waiting if not bool(holds))
            raise kind(message)
