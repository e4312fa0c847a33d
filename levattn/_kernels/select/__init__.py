"""Kernels that select keys by their scores."""

from __future__ import annotations

from typing import Any, Protocol

from levattn._core.types import Float64


class SelectKernels(Protocol):
    """Which scores (b, n) reach a bound or are the largest, and which are too close to call."""

    def held(self, array: Any, /) -> Any:
        """Return scores or flags where the selection reads them."""

    def threshold(self, scores: Any, present: Any, low: Any, high: Any, /) -> tuple[Any, Any, Any]:
        """Return which scores are at least `high` (b,), and list the scores between `low` and `high`."""

    def largest_and_left(self, scores: Any, present: Any, size: int, margin: Float64, /) -> tuple[Any, Any, Any]:
        """Return the `size` largest scores, and one of two lists; None stands for the other.

        Where several scores of a matrix are too close to the last to call, it is the list of all that are close. Else
        it is the list of the scores that may be the largest of those left out.
        """

    def reaching(self, scores: Any, present: Any, least: Float64, /) -> tuple[Any, Any]:
        """List the scores that are not below `least` (b,), NaN among them."""

    def gathered(self, array: Any, starts: Any, indices: Any, /) -> Any:
        """Return the listed rows of an array (b, n, ...), or (1, n, ...) for all matrices, in list order."""

    def include(self, chosen: Any, starts: Any, indices: Any, which: Any, /) -> None:
        """Set the flags of some of the listed rows."""

    def maxima(self, scores: Any, among: Any, /) -> Float64:
        """Return the largest score among some keys of each matrix, (b,); 0 where there are none."""

    def leaders(self, scores: Any, among: Any, margin: Float64, /) -> tuple[Any, Any]:
        """List the scores that may be the largest among some keys of each matrix."""

    def stacked(self, keys: Any, starts: Any, indices: Any, /) -> tuple[Any, Any]:
        """Return the listed rows as a batch (b, w, d), w as long as the longest list, and flags of its filled rows.

        Keys (1, n, d) serve all matrices. Rows that are not filled may hold anything; if there are none, the flags
        are None.
        """
