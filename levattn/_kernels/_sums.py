"""Sums whose terms are combined in one order, however they come."""

from __future__ import annotations

from levattn._kernels._rows import Float64

__all__ = ["PairwiseSum"]


class PairwiseSum:
    """A sum whose terms are combined like the bits of a binary counter, always in the same order.

    Terms are numbered; 2^level of them that begin at a multiple of 2^level may come as one. The result does not
    depend on how they came, its rounding error grows with the logarithm of their number, and at most one partial
    sum is held for each level.
    """

    def __init__(self) -> None:
        self.count = 0
        self._levels: dict[int, Float64] = {}

    def add(self, term: Float64, level: int = 0) -> None:
        """Add the sum of the next ``2**level`` terms; the array is the sum's from now on."""
        if self.count % (1 << level):
            raise ValueError(f"a sum of 2**{level} terms cannot begin at term {self.count}")
        self.count += 1 << level
        while level in self._levels:
            earlier = self._levels.pop(level)
            earlier += term
            term = earlier
            level += 1
        self._levels[level] = term

    def total(self, tail: Float64 | None = None) -> Float64 | None:
        """Return the sum with `tail` (a last, incomplete term) added, or None where there was no term."""
        for level in sorted(self._levels):
            tail = self._levels[level] if tail is None else tail + self._levels[level]
        return tail
