"""Keys and values in few bits: whole numbers for their entries, and scales of their blocks and columns."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch

from levattn._kernels.pruned.codes import open_rows
from levattn._kernels.pruned.cuda_decode import Codes
from levattn._kernels.pruned.torch import opened_codes
from levattn._kernels.tensors import in_plain_memory, memory_of

_BLOCKS = {4: 32, 8: 256}  # largest number of entries of a row that share a scale, for each number of bits
BITS = (*_BLOCKS, 16)  # 16 stands for no code
_SCALES, _SCALE_NBYTES = torch.bfloat16, 2  # of blocks: the range of float32


@dataclass(frozen=True, eq=False)
class Coded:
    r"""Rows (..., s, d) in few bits, where entry c of a row is :math:`m_c + b_c (l + h z_c)` for its code z_c.

    `codes`: (..., s, w) uint8, of 8 bits, or two codes of 4 bits in each.
    `lows`, `steps`: (..., s, blocks) bfloat16, l and h of a block of columns.
    `sizes`: (..., 1, d) int8, and `means` int16, for b = 2^(size/8) and m = mean b²; None for b = 1 and m = 0.
    `width`: d.
    `dtype`: of the rows.
    `bits`: of a code.
    """

    codes: Any
    lows: Any
    steps: Any
    sizes: Any
    means: Any
    width: int
    dtype: Any
    bits: int

    @classmethod
    def of(cls, rows: Any, bits: int, *, columns: bool, like: Any = None) -> Coded:
        """Return rows as codes, which err by half a step, in units of b_c; `like`: codes whose columns are taken.

        A step is at most (1 + 2^-7) of the range of a block and 2^-7 of its largest entry, over 2^bits - 1.

        With `columns`, the mean of a column is subtracted if it is larger than the deviations from it, as a bias of
        keys makes it. A column is then divided by the root of its root mean square. The same error for all columns
        would be too much for small ones. An error in proportion to a column would be too much for large ones, which
        decide logits. Rows of zeros do not count, as they stand for no slot.
        """
        X = wide(rows)
        sizes, means = (like.sizes, like.means) if like is not None else _columns(X) if columns else (None, None)
        columns = sizes is not None
        if columns:
            b, m = _scales(sizes, means, X.dtype)
            X = (X - m) / b
        X, largest = _in_blocks(X, bits), 2**bits - 1
        lows = _rounded(X.amin(-1), up=False)
        steps = _rounded((X.amax(-1) - lows.to(X.dtype)) / largest, up=True)
        low, step = lows.to(X.dtype)[..., None], steps.to(X.dtype)[..., None]
        codes = ((X - low) / torch.where(step > 0, step, 1)).round().clamp(0, largest).to(torch.uint8).flatten(-2)
        if bits == 4:
            low_half, high_half = codes.unflatten(-1, (2, -1)).unbind(-2)
            codes = low_half | (high_half << 4)
        return cls(codes, lows, steps, sizes, means, rows.shape[-1], rows.dtype, bits)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows."""
        return self.stored.shape

    @property
    def device(self) -> Any:
        """Where the codes are."""
        return self.codes.device

    @property
    def requires_grad(self) -> bool:
        """Codes have no gradient."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(int(array.nbytes) for array in self.stored.arrays)

    @property
    def stored(self) -> Codes:
        """The arrays as kernels take them."""
        return Codes(self.codes, self.lows, self.steps, self.sizes, self.means, self.width, self.bits)

    @property
    def scaled(self) -> Codes:
        """The arrays as kernels of main memory take them: with divisors and means of columns in float32."""
        if self.sizes is None:
            return self.stored
        b, m = _scales(self.sizes, self.means, torch.float32)
        return self.stored._replace(sizes=b, means=m)

    def opened(self, dtype: Any = None) -> Any:
        """Return the rows, in their dtype or another one."""
        kind = torch.promote_types(self.dtype, torch.float32)
        if dtype is None or dtype == self.dtype:
            found = opened_codes(self.stored, self.dtype)
            if found is not None:
                return found
        if kind == torch.float32 and in_plain_memory(tuple(self.stored.arrays)):
            X = torch.empty(self.shape, dtype=kind, device=self.device)
            rows = [x if x is None else x.flatten(0, -3).contiguous() for x in (*self.scaled[:5], X)]
            read = [np.empty((len(X), 0), np.float32) if x is None else memory_of(_as_words(x)) for x in rows]
            open_rows(*read[:5], self.bits, read[5])
        else:
            b, m = self._of_columns(kind)
            lows, steps = self.lows.to(kind), self.steps.to(kind)
            codes = self.codes
            if self.bits == 4:
                codes = torch.cat([codes & 15, codes >> 4], -1)
            blocks = codes.unflatten(-1, (steps.shape[-1], -1)).to(kind)
            X = torch.addcmul(lows[..., None], blocks, steps[..., None]).flatten(-2)[..., : self.width]
            X = torch.addcmul(m, X, b)
        if self.dtype == torch.float16:  # half a step beyond its largest number is infinity
            largest = torch.finfo(self.dtype).max
            X = X.clamp(-largest, largest)
        return X.to(self.dtype if dtype is None else dtype)

    def _of_columns(self, dtype: Any) -> tuple[Any, Any]:
        """Return the divisors of columns and their means, (..., 1, d)."""
        if self.sizes is None:
            shape = (*self.codes.shape[:-2], 1, self.width)
            return self.lows.new_ones(shape, dtype=dtype), self.lows.new_zeros(shape, dtype=dtype)
        return _scales(self.sizes, self.means, dtype)


def _as_words(X: Any) -> Any:
    """Return numbers of 16 bits as words, for which NumPy has a type."""
    return X.view(torch.int16) if X.dtype == _SCALES else X


def wide(rows: Any) -> Any:
    """Return rows in float32 at least."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def opened(rows: Any, dtype: Any = None) -> Any:
    """Return rows that may be coded, in their dtype or another one."""
    if isinstance(rows, Coded):
        return rows.opened(dtype)
    return rows if dtype is None else rows.to(dtype)


def coded_nbytes(width: int, bits: int) -> int:
    """Return the bytes of a coded row, without the means and scales of the columns."""
    blocks, entries = _blocks_of(width, bits)
    return blocks * (entries * bits // 8 + 2 * _SCALE_NBYTES)


def position_nbytes(widths: tuple[int, int], own: int, bits: int) -> int:
    """Return the bytes of a position's key and value: of 16 bits an entry beside codes, else of `own` bytes."""
    return sum(widths) * (own if bits == 16 else 2)


def slot_nbytes(widths: tuple[int, int], own: int, bits: int, *, weight: bool) -> int:
    """Return the bytes of the key, the value and perhaps the log-weight of a slot."""
    rows = sum(widths) * own if bits == 16 else sum(coded_nbytes(width, bits) for width in widths)
    return rows + 4 * weight


def columns_nbytes(widths: tuple[int, int], bits: int) -> int:
    """Return the bytes of the sizes and means of the columns of a head's keys."""
    return 0 if bits == 16 else 3 * widths[0]


def positions_of_one(width: int, bits: int) -> float:
    """Return how many positions take the bytes of one, if all of a head are coded."""
    widths = width, width
    return max(1.0, position_nbytes(widths, 2, bits) / slot_nbytes(widths, 2, bits, weight=False))


def check_bits(name: str, bits: Any) -> int:
    """Return a number of bits that a code may have, or raise."""
    found = 0 if isinstance(bits, bool) or not isinstance(bits, Integral) else int(bits)
    if found not in BITS:
        raise ValueError(f"{name} is {bits!r}; expected 4, 8, or 16 for keys and values in the dtype of the model")
    return found


def _blocks_of(width: int, bits: int) -> tuple[int, int]:
    """Return how many blocks a row has, and their entries, an even number."""
    blocks = max(1, -(-width // _BLOCKS[bits]))
    return blocks, 2 * -(-width // (2 * blocks))


def _in_blocks(X: Any, bits: int) -> Any:
    """Return rows (..., d) in blocks (..., blocks, entries); entries behind the last repeat it."""
    blocks, entries = _blocks_of(X.shape[-1], bits)
    more = blocks * entries - X.shape[-1]
    return (torch.cat([X, X[..., -1:].expand(*X.shape[:-1], more)], -1) if more else X).unflatten(-1, (blocks, -1))


def _columns(X: Any) -> tuple[Any, Any]:
    """Return the sizes of columns, the logarithms of the roots of their root mean squares, and their large means.

    They are formed in float64, so that rows of zeros behind the last one do not change them.
    """
    device, X = X.device, X.cpu() if X.device.type == "mps" else X  # which has no float64
    there, X64 = (X != 0).any(-1, keepdim=True), X.double()
    count = there.sum(-2, keepdim=True).clamp(min=1)
    center = (X64 / count).sum(-2, keepdim=True)

    def size_about(middle: Any) -> Any:
        apart = torch.where(there, X64 - middle, 0)
        return torch.linalg.vector_norm(apart, dim=-2, keepdim=True) / count.sqrt()

    biased = center.abs() > size_about(center)
    size = size_about(torch.where(biased, center, 0))
    size = torch.maximum(size, torch.where(biased, center.abs() / 2**14, 0))  # so that `means` can hold the mean
    sizes = (4 * size.log2()).nan_to_num(0.0, 0.0, 0.0).round().clamp(-128, 127).to(torch.int8)
    b = _scales(sizes, torch.zeros_like(sizes), torch.float64)[0]
    means = torch.where(biased, center / b**2, 0).nan_to_num(0.0).round().clamp(-32767, 32767).to(torch.int16)
    return sizes.to(device), means.to(device)


def _scales(sizes: Any, means: Any, dtype: Any) -> tuple[Any, Any]:
    """Return the divisors of columns, and the means that are subtracted before."""
    b = torch.exp2(sizes.to(dtype) / 8)
    return b, means.to(dtype) * b * b


def _rounded(X: Any, *, up: bool) -> Any:
    """Return numbers as scales of blocks, none of them less, or greater."""
    found = X.to(_SCALES)
    there = found.to(X.dtype)
    beyond = there < X if up else there > X
    return torch.where(beyond, torch.nextafter(found, torch.full_like(found, torch.inf if up else -torch.inf)), found)
