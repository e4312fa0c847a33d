"""Sums whose terms are combined in one order, however they arrive, and sums that tell whether numbers are finite."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from levattn._core.arrays import array_namespace, memory_of_tensor


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


def surely_finite(*arrays: Any) -> bool:
    """Tell whether all numbers of some arrays of one library are known to be finite.

    The answer is also False where torch traces or transforms the call, so that no numbers can be read, and where their
    sum overflows. The test is one pass over each array, without temporary arrays.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(arrays[0], torch.Tensor):
        if not all(_can_be_read(torch, array) for array in arrays):
            return False
        if arrays[0].device.type != "cpu":  # wait for the device once
            return bool(torch.isfinite(sum(array.detach().sum() for array in arrays)))
        arrays = tuple(memory_of_tensor(array.detach().resolve_neg()) for array in arrays)
    with np.errstate(over="ignore", invalid="ignore"):
        if isinstance(arrays[0], np.ndarray):  # a sum of squares: BLAS is faster than np.sum
            return all(math.isfinite(np.vdot(array, array)) for array in arrays)
        xp = array_namespace(*arrays)
        return all(bool(xp.isfinite(xp.sum(array))) for array in arrays)


def _can_be_read(torch: Any, tensor: Any) -> bool:
    """Tell whether a tensor holds numbers in memory, and the call may wait for them."""
    if torch.compiler.is_compiling() or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
