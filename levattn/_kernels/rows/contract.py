"""What a kernel reads: a batch of matrices and what is done to each row on the way in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK", "Arithmetic", "Float64", "Pieces", "Rows"]

Float64 = npt.NDArray[np.float64]
Pieces = npt.NDArray[np.int64]  # (t, 4): slot, item, first row, row after the last

BLOCK = 2048  # rows whose moments are summed before they are combined pairwise

# float32 products and sums within a block; float64 throughout; float64 with compensated products in a basis
Arithmetic = Literal["single", "double", "compensated"]


@dataclass(frozen=True)
class Rows:
    """A batch of key matrices whose rows are read as ``(k - shift) * scale * weight``, or as zero where masked.

    keys: (b, n, d). On the CPU a numpy array in which a 16-bit float is a uint16 word; else an array of `xp`.
    format: what the stored numbers are.
    mask: (b, n) bool, True where a key takes part.
    shift, scale: (b, d) float64, C arrays, for each column; the scale is a power of two.
    weights: (b, n) float64, for each row.
    """

    keys: Any
    format: Literal["float64", "float32", "float16", "bfloat16"]
    mask: Any | None = None
    shift: Float64 | None = None
    scale: Float64 | None = None
    weights: Float64 | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(b, n, d)."""
        b, n, d = self.keys.shape
        return int(b), int(n), int(d)

    def between(self, start: int, stop: int) -> Rows:
        """Return the rows ``start:stop`` of every matrix, without a copy."""
        mask = None if self.mask is None else self.mask[:, start:stop]
        weights = None if self.weights is None else self.weights[:, start:stop]
        return replace(self, keys=self.keys[:, start:stop, :], mask=mask, weights=weights)

    def item(self, index: int) -> Rows:
        """Return one matrix as a batch of one, without a copy."""
        one = slice(index, index + 1)
        return replace(
            self,
            keys=self.keys[one, :, :],
            mask=None if self.mask is None else self.mask[one, :],
            shift=None if self.shift is None else self.shift[one],
            scale=None if self.scale is None else self.scale[one],
            weights=None if self.weights is None else self.weights[one],
        )
