"""Kernels of random sketches, and the random words behind them."""

from __future__ import annotations

from typing import Any, Protocol

from levattn._core.types import Float64
from levattn._kernels.rows import Rows


class SketchKernels(Protocol):
    """Sketches of the rows of each matrix, added to `out`, (b, size, d), float32 or float64.

    Where a device has them, ``dense_sketch`` and ``subsampled_hadamard`` draw and add in one call; `add_products`
    with the columns of a `Distribution` is their definition.
    """

    def scatter(self, rows: Rows, seed: int, stream: int, offset: int, blocks: int, size: int, out: Any, /) -> None:
        """Add sparse sketches to `out`, (b, blocks · size, d).

        Row r has the number offset + r, and goes to one place in each block of `size` rows of the sketch. The word of
        this number and the block decides: the lowest bit, if set, means a sign of −1, and the others choose the place.
        """

    def add_products(self, rows: Rows, S: Float64, out: Any, /) -> None:
        """Add S (size, n) times the rows of each matrix to `out`."""
