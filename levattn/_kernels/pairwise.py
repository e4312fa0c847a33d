"""Sums whose terms are combined in one order, however they arrive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar


class _Addable(Protocol):
    def __add__(self: _T, other: _T, /) -> _T: ...


_T = TypeVar("_T", bound=_Addable)


class PairwiseSum(Generic[_T]):
    """A sum whose terms are combined like the bits of a binary counter, always in the same order.

    Terms are numbered; 2^level terms that begin at a multiple of 2^level may arrive as one. The result does not depend
    on how they arrive, and its rounding error grows with the logarithm of their number. At most one partial sum is
    held for each level. Terms are never written to, unless they are `owned`.
    """

    def __init__(self, count: int = 0, levels: dict[int, _T] | None = None, *, owned: bool = False) -> None:
        self.count, self._owned = count, owned
        self.levels: dict[int, _T] = dict(levels or {})

    def copy(self) -> PairwiseSum[_T]:
        """Return an independent copy of the sum so far."""
        return PairwiseSum(self.count, self.levels)

    def add(self, term: _T, level: int = 0) -> None:
        """Add the sum of the next ``2**level`` terms."""
        if self.count % (1 << level):
            raise ValueError(f"a sum of 2**{level} terms cannot begin at term {self.count}")
        self.count += 1 << level
        while level in self.levels:
            term = self._plus(self.levels.pop(level), term)
            level += 1
        self.levels[level] = term

    def total(self, tail: _T | None = None) -> _T | None:
        """Return the sum with `tail` (a last, incomplete term) added, or None if there was no term."""
        for level in sorted(self.levels):
            tail = self.levels[level] if tail is None else self._plus(tail, self.levels[level])
        return tail

    def _plus(self, one: _T, other: _T) -> _T:
        if not self._owned:
            return one + other
        one += other
        return one


def pairwise_sum(terms: Iterable[Any], nothing: Any = 0.0) -> Any:
    """Return the sum of terms in the order of `PairwiseSum`, or `nothing` if there are none."""
    sums: PairwiseSum[Any] = PairwiseSum()
    for term in terms:
        sums.add(term)
    total = sums.total()
    return nothing if total is None else total
