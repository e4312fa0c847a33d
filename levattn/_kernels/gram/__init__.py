"""Kernels of second moments, of squared norms in another basis, and of both for sparse keys."""

from __future__ import annotations

import math
from typing import Any, Protocol

from levattn._core.types import Float64
from levattn._kernels.rows import Arithmetic, Pieces, Rows


class Norms:
    """The norms ``‖k W‖²`` of many calls, in single or double arithmetic.

    panels: W as a kernel has packed it, for the next call.
    """

    def __init__(self, W: Float64, arithmetic: Arithmetic) -> None:
        self.W, self.arithmetic = W, arithmetic
        self.panels: Any = None


class GramKernels(Protocol):
    """Second moments of rows, and squared norms of rows in another basis.

    SINGLE_UNIT: the rounding of products in "single" arithmetic.
    """

    SINGLE_UNIT: float

    def longest_run(self, rows: Rows, items: int, /) -> int:
        """Return the level of the longest run of blocks that is summed in one piece."""

    def moments(
        self, rows: Rows, pieces: Pieces, *, basis: Float64 | None = None, arithmetic: Arithmetic = "double"
    ) -> Any:
        """Return the second moment of each piece's rows, (t, d, d), each row multiplied by its slot's `basis` first.

        A piece starts at a multiple of `BLOCK`; its blocks are summed in pairs, pairs of pairs, and so on.
        """

    def sqnorms(
        self,
        rows: Rows,
        items: Any,
        W: Any,
        out: Any,
        *,
        basis: Any = None,
        arithmetic: Arithmetic = "double",
        ceiling: float = math.inf,
    ) -> None:
        """Write ``‖k W‖²`` (or ``‖k basis W‖²``) of every key of the matrices `items` to ``out[item]``.

        W and `basis` hold one upper-triangular matrix for each entry of `items`. Masked keys get 0, and norms above
        `ceiling` become `ceiling`.
        """

    def projected_sqnorms(
        self, rows: Rows, items: Any, P: Any, out: Any, arithmetic: Arithmetic, ceiling: float, /
    ) -> None:
        """Write ``‖k P‖²`` of every key of the matrices `items` to ``out[item]``, with a P (d, k) for each matrix."""
