"""Conditions on what was computed, which a device is asked for once and not one by one."""

from __future__ import annotations

from typing import Any

from levattn._core.arrays import is_torch, on_cuda
from levattn.attention.common.space import namespace_of
from levattn.exceptions import NonFiniteError

__all__ = ["Checks"]


class Checks:
    """Conditions that hold unless numbers are not finite, each with its error.

    To read one from a device is to wait for it: tensors and arrays of CuPy go on with whatever they hold, until
    `settle`. Others are looked at where they come up.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, str]] = []

    def expect(self, holds: Any, message: str) -> None:
        """Raise NonFiniteError with a message, now or later, unless a condition holds, an array of no axes."""
        if is_torch(holds) or on_cuda(holds):
            self._waiting.append((holds, message))
        elif not bool(holds):
            raise NonFiniteError(message)

    def settle(self) -> None:
        """Raise for the first condition so far that does not hold: one wait for all."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        xp = namespace_of(waiting[0][0])
        if not bool(xp.all(xp.stack([holds for holds, _ in waiting]))):
            raise NonFiniteError(next(message for holds, message in waiting if not bool(holds)))
