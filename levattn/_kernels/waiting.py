"""`wait_for_change` watches a word in memory until another thread changes it, without the GIL and without sleep."""

from __future__ import annotations

from levattn._kernels.jit import jit
from levattn._kernels.llvm import address, word_now

_TIMES = 10_000  # reads, of some tens of nanoseconds each
_GRACE = 500  # further reads, while the other thread releases the GIL, because waiting for the GIL takes long


@jit
def wait_for_change(word, was):
    """Return soon after ``word[0]`` differs from `was`, or after some thousand reads."""
    at, looks = address(word), 0
    while looks < _TIMES and word_now(at) == was:
        looks += 1
    for _ in range(_GRACE):
        word_now(at)
