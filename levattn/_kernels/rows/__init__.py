"""Kernels that read keys: strides, half formats, mask, shift and scale; column sums and maxima; nonfinite rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices, array_namespace, on_cuda
from levattn._core.sparse import Csr
from levattn._core.types import Float64

Pieces = npt.NDArray[np.int64]  # (t, 4): slot, item, first row, row after the last

BLOCK = 2048  # rows whose moments are summed before they are combined pairwise

# float32 products and sums within a block; float64 throughout; float64 with compensated products in a basis
Arithmetic = Literal["single", "double", "compensated"]


@dataclass(frozen=True)
class Rows:
    """A batch of key matrices whose rows are read as ``(k * scale - shift) * weight``, or as zero where masked.

    - keys: (b, n, d). On the CPU a numpy array in which a 16-bit float is a uint16 word; else an array of `xp`.
    - format: the type of the stored numbers.
    - mask: (b, n) bool, True where a key takes part.
    - scale: (b, d) float64, a C array, for each column: a power of two.
    - shift: (b, 3, d) float64, a C array: three parts of each column's mean. Each is at most half a unit in the last
      place of the part before. Rows are read less the first part, and then the second: both differences have a
      relative error of 2⁻⁵³ at most. Compensated products add these errors and the third part.
    - weights: (b, n) float64, for each row.
    - digest: a reading of `linalg.digest`: a kernel that reads each of the rows once asks it what to digest meanwhile.
    """

    keys: Any
    format: Literal["float64", "float32", "float16", "bfloat16"]
    mask: Any | None = None
    shift: Float64 | None = None
    scale: Float64 | None = None
    weights: Float64 | None = None
    digest: Any | None = None

    @classmethod
    def of(cls, matrices: Matrices) -> Rows:
        """Return matrices as rows, some of which a mask leaves out."""
        return cls(matrices.data, matrices.format, matrices.mask)

    def scaled(self, scale: Float64) -> Rows:
        """Return the rows with columns multiplied by further powers of two (b, d)."""
        shift = None if self.shift is None else self.shift * scale[:, None, :]
        return replace(self, scale=scale if self.scale is None else self.scale * scale, shift=shift)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(b, n, d)."""
        b, n, d = self.keys.shape
        return int(b), int(n), int(d)

    def zeros(self, *, as_float64: bool = False, written: bool = False) -> Any:
        """Return an array on the keys' device for one score a key, (b, n), or for one float64 number a key.

        On a device, `written` says that kernels write all of the array, so that nothing fills it with zeros.
        """
        kind = "float64" if as_float64 or self.format == "float64" else "float32"
        if isinstance(self.keys, np.ndarray | Csr):
            return np.zeros(self.shape[:2], kind)
        xp = array_namespace(self.keys)
        if on_cuda(self.keys):  # which are on the current device
            return (xp.empty if written else xp.zeros)(self.shape[:2], dtype=getattr(xp, kind))
        return xp.zeros(self.shape[:2], dtype=getattr(xp, kind), device=array_api_compat.device(self.keys))

    def sketch_zeros(self, size: int, dtype: npt.DTypeLike) -> Any:
        """Return an array for a sketch of each matrix, (b, size, d): on the keys' CUDA device, or in main memory."""
        b, _, d = self.shape
        if not on_cuda(self.keys):
            return np.zeros((b, size, d), dtype)
        return array_namespace(self.keys).zeros((b, size, d), dtype=dtype, device=array_api_compat.device(self.keys))

    def between(self, start: int, stop: int) -> Rows:
        """Return the rows ``start:stop`` of every matrix, without a copy; there may be fewer than `stop`."""
        stop = min(stop, self.shape[1])  # the array API specifies no slice beyond the array
        mask = None if self.mask is None else self.mask[:, start:stop]
        weights = None if self.weights is None else self.weights[:, start:stop]
        return Rows(self.keys[:, start:stop, :], self.format, mask, self.shift, self.scale, weights, self.digest)

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


class RowKernels(Protocol):
    """Sums and maxima of columns, and rows that are not finite."""

    def column_figures(self, rows: Rows, /, *, largest: bool) -> Float64:
        """Return the largest magnitude in each column if `largest`, else the sum, (b, d).

        Sums go block by block, combined pairwise.
        """

    def sums_apart(self, rows: Rows, origin: Float64, /) -> tuple[Float64, Float64]:
        """Return the sums of the columns less an origin (b, d): pairs of numbers, of which the second is the error.

        There is no shift. No difference and no sum is rounded but in the second number.
        """

    def nonfinite_rows(self, rows: Rows, item: int, limit: int, /) -> list[int]:
        """Return the first rows of one matrix (at most `limit`) that hold NaN or infinity and are not masked."""
