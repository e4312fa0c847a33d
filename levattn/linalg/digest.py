"""Digests of the rows that a pass reads, by which it is known whether another pass reads the same."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.serialize import shaped
from levattn._kernels import BLOCK, Rows

__all__ = ["RowDigest"]

_LINE = 32  # words that are hashed together, at least
_COPIED = 1 << 20  # numbers that are copied at a time, where columns are apart
_WORK = 16  # multiply-adds that take as long as a word

Digests = npt.NDArray[np.uint64]


@lru_cache(maxsize=8)
def _keys(count: int) -> tuple[Digests, Digests]:
    """Return the keys of the halves of so many words."""
    words = np.random.Generator(np.random.Philox(key=1)).integers(1 << 32, size=(2, count), dtype=np.uint64)
    return words[0], words[1]


class RowDigest:
    """A digest of each 2048 rows, by their number from the first; it depends on their bytes and places alone.

    It is the sum of the hashes of lines of at least 256 bytes, mixed with their numbers. The hash is NH (Black,
    Halevi, Krawczyk, Krovetz and Rogaway, UMAC, CRYPTO 1999) with fixed keys. Two different lines have the same hash
    for a share of 2⁻³² of all keys. So a change made without regard to the keys, of one bit or of all, goes unnoticed
    with a probability of about 2⁻³².
    """

    def __init__(self) -> None:
        self.rows = 0
        self._cells: Digests = np.zeros(1, np.uint64)
        self._open: Digests | None = None  # (b,) sums of the line that is not complete

    def add(self, rows: Rows) -> None:
        """Add rows in main memory, which follow those so far."""
        (b, n, d), keys = rows.shape, rows.keys
        if keys.strides[2] != keys.itemsize and d > 1:
            step = max(1, _COPIED // max(1, b * d))
            for start in range(0, n, step):
                self._add(np.ascontiguousarray(keys[:, start : start + step]))
        else:
            self._add(keys)

    def _add(self, keys: npt.NDArray[Any]) -> None:
        from levattn._kernels.rows.digest import digest_tasks  # keys are in main memory
        from levattn._kernels.tasks import share

        b, n, d = keys.shape
        if self._open is None:
            self._open = np.zeros(b, np.uint64)
        size, first, last = d * keys.itemsize, self.rows // BLOCK, (self.rows + n - 1) // BLOCK
        if last >= len(self._cells):
            self._cells = np.concatenate([self._cells, np.zeros(last + 1, np.uint64)])
        if not n or not b:
            self.rows += n
            return
        words, lines = -(-size // 8), 1
        while size % 8 == 0 and lines * words < _LINE:
            lines *= 2
        out, left, steps = np.empty((b, last - first + 1), np.uint64), self._open.copy(), np.array(keys.strides[:2])
        start, begun, keyed = keys.ctypes.data, self._open, _keys(lines * words)
        fixed = start, steps, size, BLOCK, self.rows, n, lines, *keyed, begun
        share(lambda *run: digest_tasks(*fixed, *run, out, left), out.size, float(_WORK) * b * n * words)
        self._cells[first : last + 1] += out.sum(axis=0, dtype=np.uint64)
        self._open, self.rows = left, self.rows + n

    def difference(self, other: RowDigest, start: int = 0, *, whole: bool = False) -> tuple[int, int] | None:
        """Return the first and last row of the first cell that differs from the cell of another, from a row on.

        Only complete cells are compared; `whole` compares all of them, of digests of as many rows.
        """
        first, stop = start // BLOCK, -(-self.rows // BLOCK) if whole else self.rows // BLOCK
        unlike = self._cells[first:stop] != other._cells[first:stop]
        if whole and stop > first and self._open is not None and other._open is not None:
            unlike[-1] |= not np.array_equal(self._open, other._open)
        if not unlike.any():
            return None
        low = (first + int(unlike.argmax())) * BLOCK
        return low, min(low + BLOCK, self.rows) - 1

    def arrays(self, name: str) -> dict[str, Digests]:
        """Return the digest as arrays, from which `restored` makes it again."""
        held = np.zeros(0, np.uint64) if self._open is None else self._open
        return {name: self._cells[: -(-self.rows // BLOCK)], f"{name}.open": held}

    @classmethod
    def restored(cls, arrays: dict[str, npt.NDArray[Any]], name: str, rows: int, batch: tuple[int, ...]) -> RowDigest:
        """Return the digest of so many rows, or raise ValueError for arrays that do not fit."""
        self = cls()
        self.rows, self._open = rows, shaped(arrays[f"{name}.open"], np.uint64, (math.prod(batch),))
        self._cells = np.append(shaped(arrays[name], np.uint64, (-(-rows // BLOCK),)), np.uint64(0))
        return self
