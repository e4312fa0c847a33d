"""Rows in float64 as the kernels read them, block by block, with checks of finiteness and of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn

import numpy as np

from levattn._core.arrays import on_cuda, take_entries, to_float64, to_numpy
from levattn._core.types import Float64
from levattn._kernels import BLOCK, Rows
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
        if rows.nonfinite_rows(item, 1):
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
    found = [(before or 0) + row for row in rows.nonfinite_rows(item, 5)]
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
