"""Launches of the CUDA kernels that compute second moments KᵀK and squared norms ‖k W‖².

Keys are CuPy arrays, with 16-bit floats as uint16 words. Results, matrices of d by d, stay on the device. Such
matrices in numpy are copied there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from levattn._core.arrays import to_numpy
from levattn._core.types import Float64
from levattn._kernels.cuda_source import THREADS, launch, namespace, on_device, stored, with_steps
from levattn._kernels.gram.cuda_tensor import has_tensor_products, listed_items, tensor_moments, tensor_squares
from levattn._kernels.rows import BLOCK, Arithmetic, Pieces, Rows
from levattn._kernels.rows.cuda import MOST_SLABS, key_arguments, key_type

SINGLE_UNIT = 2.0**-22  # tensor cores multiply numbers in two parts, of eleven bits each

# As in moments.cu and products.cu
_TILE = 64  # columns of a tile
_MOMENT_THREADS = 128
_MOMENT_SHARED = 8 * (2 * 32 * (_TILE + 4) + 64 * 64)  # two stages of rows, and the sums
_ADDERS, _FEW, _MOST_PARTS = 512, 8, 16  # threads of a block that adds, blocks for each thread, threads of an entry
_SCORE_ROWS = 128  # of a block of threads
_TOGETHER = 4  # rows that a thread multiplies by a basis

_ROOM = 1 << 28  # bytes of scratch besides the keys
_MANY = 1024  # pieces, beside which the copy of a table takes little time


def longest_run(rows: Rows, _items: int) -> int:
    """Return the level of the longest run of blocks whose moments are summed in one piece."""
    return max(0, (_ROOM // (8 * rows.shape[2] ** 2)).bit_length() - 1)


def moments(rows: Rows, pieces: Pieces, *, basis: Any | None = None, arithmetic: Arithmetic = "double") -> Any:
    """Return the second moment of each piece's rows, (t, d, d)."""
    xp, d = namespace(), rows.shape[2]
    out = xp.empty((len(pieces), d, d))
    fit = max(1, _ROOM // (8 * d * d))
    whole = _common_length(pieces.tobytes()) if basis is None and len(pieces) <= _MANY else 0
    each = -(-whole // BLOCK)
    if whole and each * len(pieces) <= fit:  # as in most calls: no table goes to the device
        partial = xp.empty((each * len(pieces), d, d))
        _sum_blocks(rows, None, None, partial, arithmetic, whole)
        _add_blocks(partial, None, each, out)
        return out
    bases = on_device(basis, np.float64)
    firsts = _first_blocks(pieces)
    at = 0
    while at < len(pieces):
        stop = max(at + 1, int(np.searchsorted(firsts, firsts[at] + fit, "right")) - 1)
        chosen, places = pieces[at:stop], firsts[at : stop + 1] - firsts[at]
        partial = xp.empty((int(places[-1]), d, d))
        if bases is None:
            there, chosen_there = _sent(places, chosen)
            _sum_blocks(rows, chosen_there, there, partial, arithmetic)
        else:
            (there,) = _sent(places)
            _sum_blocks_in_bases(rows, chosen, bases, partial, arithmetic)
        _add_blocks(partial, there, int(np.diff(places).max()), out[at:stop])
        at = stop
    return out


def measured_unevenness(rows: Rows) -> Float64:
    """Return how uneven the directions of a few rows of each matrix are, (b,); they are one block at most."""
    xp, (b, n, d) = namespace(), rows.shape
    moments, found = xp.empty((b, d, d)), xp.empty(b * (1 + d))
    _sum_blocks(rows, None, None, moments, "single", n)
    launch("moments", "measure_unevenness", (), (b,), [moments, d, n, found], threads=_ADDERS)
    return to_numpy(found[:b])


@lru_cache(16)
def _common_length(pieces: bytes) -> int:
    """Return the number of rows of pieces that are the first rows of all matrices in order, or 0 for other pieces."""
    table = np.frombuffer(pieces, np.int64).reshape(-1, 4)
    whole = int(table[0, 3]) if len(table) else 0
    plain = [[item, 0, whole] for item in range(len(table))]
    return whole if whole < 1 << 31 and table[:, 1:].tolist() == plain else 0


def _first_blocks(pieces: Pieces) -> Pieces:
    """Return the number of the first block of each piece, and at the end the count of blocks, (t + 1,)."""
    return np.concatenate([[0], np.cumsum(-(-(pieces[:, 3] - pieces[:, 2]) // BLOCK))])


def _sent(*tables: Pieces) -> Iterator[Any]:
    """Yield tables of integers on the device, sent in one copy."""
    flat, at = on_device(np.concatenate([table.ravel() for table in tables], dtype=np.int64)), 0
    for table in tables:
        yield flat[at : at + table.size]
        at += table.size


def _sum_blocks(rows: Rows, pieces: Any, firsts: Any, partial: Any, arithmetic: Arithmetic, whole: int = 0) -> None:
    """Write the moments of the blocks of pieces.

    `pieces` and `firsts` are tables on the device, or None for the first `whole` rows of all matrices in order.
    """
    count, d, _ = partial.shape
    listed = 0 if firsts is None else len(firsts) - 1
    arguments = [*key_arguments(rows), pieces, firsts, listed, whole, BLOCK, partial]
    if arithmetic == "single" and has_tensor_products(rows):
        tensor_moments(rows, arguments, count)
        return
    tiles = -(-d // _TILE)
    grid = (count * (tiles * (tiles + 1) // 2),)
    launch(
        "moments", "moment_blocks", (key_type(rows),), grid, arguments, threads=_MOMENT_THREADS, shared=_MOMENT_SHARED
    )


def _add_blocks(partial: Any, firsts: Any, longest: int, out: Any) -> None:
    """Sum the blocks of each piece in pairs, pairs of pairs, and so on.

    A piece has `longest` blocks or fewer; without `firsts` each has as many.
    """
    pieces, d, _ = out.shape
    parts = min(_MOST_PARTS, 1 << max(0, -(-longest // _FEW) - 1).bit_length())
    grid = (pieces * -(-d * d // (_ADDERS // parts)),)
    launch("moments", "add_blocks", (), grid, [partial, firsts, longest, d, parts, out], threads=_ADDERS)


def _sum_blocks_in_bases(rows: Rows, pieces: Pieces, bases: Any, partial: Any, arithmetic: Arithmetic) -> None:
    """Write the moments of the blocks of pieces, after multiplying their rows by the basis of their slot."""
    low = 0
    for run in _runs(pieces, _rows_at_once(rows)):
        packed = _packed(run)
        firsts = _first_blocks(packed)
        high = low + int(firsts[-1])
        there, packed_there, firsts_there = _sent(run, packed, firsts)
        X = _in_bases(rows, there, packed_there, int(packed[-1, 3]), bases, arithmetic)
        _sum_blocks(Rows(X[None], "float64"), packed_there, firsts_there, partial[low:high], "double")
        low = high


def _rows_at_once(rows: Rows) -> int:
    """Return the number of rows that are written out at a time, in whole blocks."""
    return max(BLOCK, _ROOM // (8 * rows.shape[2]) // BLOCK * BLOCK)


def _runs(pieces: Pieces, most: int) -> Iterator[Pieces]:
    """Cut pieces, between their blocks, into runs of pieces that have at most `most` rows (whole blocks) together."""
    run: list[tuple[int, int, int, int]] = []
    left = most
    for slot, item, start, stop in pieces.tolist():
        low = start
        while low < stop:
            high = stop if stop - low <= left else low + left // BLOCK * BLOCK
            if high > low:
                run.append((slot, item, low, high))
                left -= -(-(high - low) // _TOGETHER) * _TOGETHER
                low = high
            if low < stop:
                yield np.array(run)
                run, left = [], most
    if run:
        yield np.array(run)


def _packed(pieces: Pieces) -> Pieces:
    """Return the places of pieces whose rows are written out one after the other, as pieces."""
    counts = pieces[:, 3] - pieces[:, 2]
    starts = np.concatenate([[0], np.cumsum(-(-counts // _TOGETHER) * _TOGETHER)[:-1]])
    none = np.zeros_like(counts)
    return np.stack([none, none, starts, starts + counts], axis=1)


def _in_bases(rows: Rows, pieces: Any, packed: Any, count: int, bases: Any, arithmetic: Arithmetic) -> Any:
    """Return an array (`count`, d) with the rows of pieces, times the basis of their slot, at the `packed` pieces."""
    d = rows.shape[2]
    X = namespace().empty((count, d))
    types = key_type(rows), "true" if arithmetic == "compensated" else "false"
    arguments = [*key_arguments(rows), pieces, packed, len(pieces) // 4, bases, X]
    launch("products", "rows_in_basis", types, (-(-(-(-count // _TOGETHER) * d) // THREADS),), arguments)
    return X


def sqnorms(
    rows: Rows,
    items: Pieces,
    W: Any,
    out: Any,
    *,
    basis: Any | None = None,
    arithmetic: Arithmetic = "double",
    ceiling: float = math.inf,
) -> None:
    """Write ``‖k W‖²`` of every key of the matrices `items`."""
    if basis is None:
        _square_rows(rows, items, W, out, arithmetic, ceiling, triangular=True)
        return
    n, most = rows.shape[1], _rows_at_once(rows)
    matrices, bases, listed = on_device(W, np.float64), on_device(basis, np.float64), np.asarray(items, np.int64)
    heads = max(1, most // max(1, -(-n // _TOGETHER) * _TOGETHER))
    for first in range(0, len(listed), heads):
        chosen = listed[first : first + heads]
        for low in range(0, n, most):
            high = min(low + most, n)
            slots = np.arange(first, first + len(chosen))
            pieces = np.stack([slots, chosen, np.full_like(slots, low), np.full_like(slots, high)], axis=1)
            whole = -(-(high - low) // _TOGETHER) * _TOGETHER
            there, packed = _sent(pieces, _packed(pieces))
            X = _in_bases(rows, there, packed, len(chosen) * whole, bases, arithmetic).reshape(len(chosen), whole, -1)
            few = Rows(X[:, : high - low], "float64"), chosen, matrices[first : first + heads], out[:, low:high]
            _square_rows(*few, "double", ceiling, triangular=True, packed=True)


def projected_sqnorms(rows: Rows, items: Pieces, P: Any, out: Any, arithmetic: Arithmetic, ceiling: float) -> None:
    """Write ``‖k P‖²`` of every key of the matrices `items`."""
    _square_rows(rows, items, P, out, arithmetic, ceiling, triangular=False)


def _square_rows(
    rows: Rows,
    items: Pieces,
    W: Any,
    out: Any,
    arithmetic: Arithmetic,
    ceiling: float,
    *,
    triangular: bool,
    packed: bool = False,
) -> None:
    """Write the squared norms of rows; with `packed`, `rows` holds the matrices of `items`, one after the other."""
    if arithmetic == "single" and has_tensor_products(rows, W.shape[2]):
        tensor_squares(rows, items, W, out, ceiling, triangular=triangular)
        return
    n = rows.shape[1]
    matrices, listed = on_device(W, np.float64), listed_items(rows, items)
    types = key_type(rows), stored(out.dtype)
    arguments = key_arguments(rows)
    for before in range(0, len(items), MOST_SLABS):
        tail = [n, listed, before, matrices, W.shape[2], triangular, ceiling, *with_steps(out, 1), packed]
        grid = (-(-n // _SCORE_ROWS), min(MOST_SLABS, len(items) - before))
        launch("products", "square_rows", types, grid, [*arguments, *tail])
