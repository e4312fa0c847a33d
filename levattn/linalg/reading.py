"""Rows of K in float64, scaled and shifted: read in blocks, checked for NaN and infinity, and hashed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import on_cuda, take_entries, to_float64, to_numpy
from levattn._core.serialize import shaped
from levattn._core.types import Float64
from levattn._kernels import BLOCK, KEYS, Rows
from levattn.exceptions import NonFiniteError

_COUNTED = ", counted from the first row that this state was given"  # where the user holds a state
_UNCHANGED = ". The state is as it was"
_PIECE = BLOCK // 4  # rows converted to float64 at a time


def as_read(rows: Rows) -> Float64:
    """Return the rows of a batch of one in float64, after scale, shift and weights, zero where masked."""
    X = to_float64(rows.keys, rows.format)[0]
    if rows.mask is not None:
        X[~to_numpy(rows.mask)[0]] = 0.0
    if rows.scale is not None:
        X = X * rows.scale[0]
    if rows.shift is not None:
        X = X - rows.shift[0, 0] - rows.shift[0, 1]
    if rows.weights is not None:
        X = X * rows.weights[0][:, None]
    return X if rows.mask is None else np.where(to_numpy(rows.mask)[0][:, None], X, 0.0)


def read_in_pieces(rows: Rows) -> Iterator[Float64]:
    """Yield the rows of a batch of one as `as_read` returns them, a part of a block at a time."""
    for start in range(0, rows.shape[1], _PIECE):
        yield as_read(rows.between(start, start + _PIECE))


def each_in_memory(rows: Rows, items: Any) -> Iterator[tuple[int, Rows]]:
    """Give some matrices of a batch by their numbers, in main memory; a CUDA device sends them in one copy."""
    keys, mask = rows.keys, rows.mask
    if on_cuda(keys) and len(items):
        keys, mask = (None if x is None else to_numpy(take_entries(x, items)) for x in (keys, mask))
    for slot, item in enumerate(items.tolist()):
        one = rows.item(item)
        if keys is not rows.keys:
            part = slice(slot, slot + 1)
            one = replace(one, keys=keys[part], mask=None if mask is None else mask[part])
        yield item, one


def check_finite(rows: Rows, figures: Float64) -> None:
    """Raise FloatingPointError if a matrix whose figures (b, ...) are not finite holds NaN or infinity."""
    for item in _not_finite(figures):
        if KEYS.nonfinite_rows(rows, item, 1):
            raise FloatingPointError("rows are not finite")


def require_finite(rows: Rows, figures: Float64) -> list[int]:
    """Raise if a matrix with nonfinite figures holds NaN or infinity; return those matrices, which then overflowed."""
    bad = _not_finite(figures)
    for item in bad:
        _refuse(rows, item)
    return bad


def _not_finite(figures: Float64) -> list[int]:
    return [int(item) for item in np.flatnonzero(~np.isfinite(figures).all(axis=tuple(range(1, figures.ndim))))]


def refuse_nonfinite(rows: Rows, before: int) -> NoReturn:
    """Raise for rows of a state that hold NaN or infinity; the first row has the number `before`."""
    for item in range(rows.shape[0]):
        _refuse(rows, item, before)
    raise AssertionError("all rows are finite")


def _refuse(rows: Rows, item: int, before: int | None = None) -> None:
    """Raise if a matrix holds NaN or infinity; `before` is the number of earlier rows of a state."""
    found = [(before or 0) + row for row in KEYS.nonfinite_rows(rows, item, 5)]
    if found:
        where = f" of matrix {item} (leading axes flattened)" if rows.shape[0] > 1 else ""
        more = "first such rows" if len(found) > 1 else "row"
        counted, unchanged = ("", "") if before is None else (_COUNTED, _UNCHANGED)
        raise NonFiniteError(
            f"K holds NaN or infinity: {more} {', '.join(map(str, found))}{where}{counted}; expected finite numbers. "
            f"Remove them, or leave padded rows out with mask={unchanged}"
        )


@contextmanager
def rows_named(of: str) -> Iterator[None]:
    """Name rows that are not finite as rows `of` the keys, for callers who do not see the state that met them."""
    try:
        yield
    except NonFiniteError as error:
        text = (
            str(error).replace(_COUNTED, f" of {of}").replace(f", or leave padded rows out with mask={_UNCHANGED}", "")
        )
        raise NonFiniteError(text) from None


@cache
def _memory() -> int | None:
    """Return the bytes of physical memory, or None if the system does not report them."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def require_room(b: int, d: int) -> None:
    """Raise if b sums of d × d numbers are larger than the memory of this machine."""
    size, memory = 8 * b * d * d, _memory()
    if memory is not None and size > memory:
        raise ValueError(
            f"keys have d = {d} columns, and {b} sums of d × d numbers take {size} bytes. This machine has {memory} "
            "bytes; expected keys (..., n, d) with one key a row. Are they transposed?"
        )


_LINE = 512  # words that are hashed together, at least
_COPIED = 1 << 20  # numbers that are copied at a time, where columns are apart
_WORK = 16  # multiply-adds that take as long as a word

Digests = npt.NDArray[np.uint64]


@lru_cache(maxsize=8)
def _keys(count: int) -> Digests:
    """Return the keys of so many words, one for each half."""
    return np.random.Generator(np.random.Philox(key=1)).integers(1 << 64, size=count, dtype=np.uint64)


class RowDigest:
    """A digest of each 2048 rows, by their number from the first; it depends on their bytes and places alone.

    It is the sum of the hashes of lines of at least 4096 bytes, mixed with their numbers. The hash is NH (Black,
    Halevi, Krawczyk, Krovetz and Rogaway, UMAC, CRYPTO 1999) with fixed keys. Two different lines have the same hash
    for a share of 2⁻³² of all keys. So a change made without regard to the keys, of one bit or of all, goes unnoticed
    with a probability of about 2⁻³².
    """

    def __init__(self) -> None:
        self.rows = 0
        self._cells: Digests = np.zeros(1, np.uint64)
        self._open: Digests | None = None  # (b,) sums of the line that is not complete

    def watched(self, rows: Rows) -> Rows:
        """Return rows in main memory, which follow those so far, for kernels to digest while they read them.

        This saves reading them from memory again. `add` adds the rows that no kernel has digested.
        """
        return replace(rows, digest=_Reading(self, rows.keys))

    def add(self, rows: Rows) -> None:
        """Add rows in main memory, which follow those so far."""
        keys = rows.keys
        if isinstance(rows.digest, _Reading) and rows.digest.digest is self:
            keys = keys[:, rows.digest.seen :]
        self.add_keys(keys)

    def add_keys(self, keys: npt.NDArray[Any]) -> None:
        """Add rows (b, n, d) of any numbers."""
        b, n, d = keys.shape
        if not n and self._open is not None:
            return
        if keys.strides[2] != keys.itemsize and d > 1:
            step = max(1, _COPIED // max(1, b * d))
            for start in range(0, n, step):
                self._add(np.ascontiguousarray(keys[:, start : start + step]))
        else:
            self._add(keys)

    def _add(self, keys: npt.NDArray[Any]) -> None:
        from levattn._kernels.rows.compiled import DIGEST  # keys are in main memory
        from levattn._kernels.rows.digest import digest_tasks
        from levattn._kernels.tasks import share

        part, view = Part(self, keys), np.zeros(DIGEST + 1, np.int64)
        view[:3], view[DIGEST] = (keys.ctypes.data, *keys.strides[:2]), part.address
        share(lambda *run: digest_tasks(view, *run), part.cells.size, _WORK / 8 * keys.nbytes)
        part.add()

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


class Part:
    """The digest of some rows in main memory, which follow those so far, as kernels make it."""

    def __init__(self, digest: RowDigest, keys: npt.NDArray[Any]) -> None:
        b, self._n, d = keys.shape
        words = max(1, -(-d * keys.itemsize // 8))
        power = 0 if d * keys.itemsize % 8 else (-(-_LINE // words) - 1).bit_length()
        first = digest.rows // BLOCK
        self._digest = digest
        self._begun = np.zeros(b, np.uint64) if digest._open is None else digest._open
        self._left = np.zeros(b, np.uint64)
        self.cells = np.zeros((b, -(-(digest.rows + self._n) // BLOCK) - first if self._n else 0), np.uint64)
        self._keys = _keys(words << power)
        arrays = self._keys, self._begun, self._left, self.cells
        what = d * keys.itemsize, power, digest.rows, self._n, BLOCK.bit_length() - 1, self.cells.shape[1]
        self._what = np.array([*what, *(array.ctypes.data for array in arrays)], np.int64)
        self.address = self._what.ctypes.data

    def add(self) -> None:
        """Add the digest that kernels have made to the whole."""
        digest = self._digest
        first, stop = digest.rows // BLOCK, digest.rows // BLOCK + self.cells.shape[1]
        if stop > len(digest._cells):
            digest._cells = np.concatenate([digest._cells, np.zeros(stop, np.uint64)])
        if not self.cells.size:
            digest._open = self._begun
            digest.rows += self._n
            return
        digest._cells[first:stop] += self.cells.sum(axis=0, dtype=np.uint64)
        digest._open, digest.rows = self._left, digest.rows + self._n


class _Reading:
    """Rows that kernels digest as they read them, in order and once."""

    def __init__(self, digest: RowDigest, keys: Any) -> None:
        self.digest, self.seen, self._keys = digest, 0, keys

    def part(self, rows: Rows) -> Part | None:
        """Return a part for the kernel that reads these rows; None if they are others, or were seen before."""
        keys, whole = rows.keys, self._keys
        if not isinstance(keys, np.ndarray) or keys.dtype != whole.dtype or keys.strides != whole.strides:
            return None
        (b, n, d), step = keys.shape, keys.strides[1]
        gaps = d > 1 and keys.strides[2] != keys.itemsize
        if not b or not n or (b, d) != (len(whole), whole.shape[2]) or step <= 0 or gaps:
            return None
        at, off = divmod(keys.ctypes.data - whole.ctypes.data, step)  # the rows are known by where they lie
        if off or at < self.seen or at + n > whole.shape[1]:
            return None
        if at > self.seen:
            self.digest.add_keys(whole[:, self.seen : at])
        self.seen = at + n
        return Part(self.digest, keys)
