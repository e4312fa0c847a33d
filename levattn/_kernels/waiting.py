"""How a thread waits for a word to change, without the GIL and without sleep."""

from __future__ import annotations

from levattn._kernels.jit import jit
from levattn._kernels.llvm import address, word_now

__all__ = ["wait_for_change"]

_TIMES = 10_000  # looks, of some tens of nanoseconds each
_GRACE = 500  # and after it, in which the other thread lets go of the GIL: to wait for that takes long


@jit
def wait_for_change(word, was):
    """Return soon after ``word[0]`` is not what it was, or after some thousand looks."""
    at, looks = address(word), 0
    while looks < _TIMES and word_now(at) == was:
        looks += 1
    for _ in range(_GRACE):
        word_now(at)
