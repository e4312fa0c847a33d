"""What the kernels that select keys by their scores return.

Some rows of each matrix of a batch are listed as ``(starts, indices)``: ``indices[starts[i]:starts[i + 1]]`` are those
of matrix i, ascending.
"""

from __future__ import annotations

from typing import Any, Protocol

from levattn._core.types import Float64

__all__ = ["SelectKernels"]


class SelectKernels(Protocol):
    """Which scores (b, n) reach a bound or are the largest, and which are too close to call."""

    def held(self, array: Any, /) -> Any:
        """Return scores or flags where they are selected from."""

    def threshold(self, scores: Any, present: Any, low: Any, high: Any, /) -> tuple[Any, Any, Any]:
        """Return which scores are at least `high` (b,), and list those between `low` and that."""

    def largest(self, scores: Any, present: Any, size: int, margin: Float64, /) -> tuple[Any, Any, Any]:
        """Return the `size` largest scores of each matrix, and list those too close to the last of them to call."""

    def reaching(self, scores: Any, present: Any, least: Float64, /) -> tuple[Any, Any]:
        """List the scores that are not below `least` (b,), as NaN never is."""

    def gathered(self, array: Any, starts: Any, indices: Any, /) -> Any:
        """Return what is listed of an array (b, n, ...), or (1, n, ...) for all matrices, one after the other."""

    def include(self, chosen: Any, starts: Any, indices: Any, which: Any, /) -> None:
        """Set the flags of some of the rows listed."""

    def maxima(self, scores: Any, among: Any, /) -> Float64:
        """Return the largest score among some keys of each matrix, (b,); 0 where there are none."""

    def stacked(self, keys: Any, starts: Any, indices: Any, /) -> tuple[Any, Any]:
        """Return the rows listed as a batch (b, w, d) for the longest list, w long, and which rows of it they are.

        Keys (1, n, d) are those of all matrices.

        What the other rows hold is of no matter. Where there are none the flags are None.
        """
