"""Second moments and squared norms on a CUDA device: cuts work into launches of compiled code.

Keys are CuPy arrays in which a 16-bit float is a uint16 word; matrices
of d by d are made on the device and stay there, and are sent there where they come from numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from levattn._core.types import Float64
from levattn._kernels.cuda_source import THREADS, TYPES, launch, namespace, on_device, with_steps
from levattn._kernels.gram.cuda_tensor import has_tensor_products, tensor_moments, tensor_squares
from levattn._kernels.rows.contract import BLOCK, Arithmetic, Pieces, Rows
from levattn._kernels.rows.cuda import MOST_SLABS, key_arguments, key_type

__all__ = ["SINGLE_UNIT", "longest_run", "moments", "projected_sqnorms", "sqnorms"]
SINGLE_UNIT = 2.0**-22  # tensor cores multiply numbers in two parts, of eleven bits each

# What moments.cu and products.cu have too
_TILE = 64  # columns of a tile
_MOMENT_THREADS = 128
_MOMENT_SHARED = 8 * (2 * 32 * (_TILE + 4) + 64 * 64)  # two stages of rows, and the sums
_ADDERS, _FEW, _MOST_PARTS = 512, 8, 16  # threads that add up blocks, blocks of one at a time, threads of an entry
_SCORE_ROWS = 128  # of a block of threads

_ROOM = 1 << 28  # bytes that are taken at a time beside the keys


def longest_run(rows: Rows, _items: int) -> int:
    """Return the level of the longest run of blocks whose moments are summed in one piece."""
    return max(0, (_ROOM // (8 * rows.shape[2] ** 2)).bit_length() - 1)


def moments(rows: Rows, pieces: Pieces, *, basis: Float64 | None = None, arithmetic: Arithmetic = "double") -> Any:
    """Return the second moment of each piece's rows, (t, d, d)."""
    xp, d = namespace(), rows.shape[2]
    out = xp.zeros((len(pieces), d, d))
    if basis is not None:
        for t, (slot, item, start, stop) in enumerate(pieces.tolist()):
            for _, run in _in_basis(rows, item, start, stop, basis[slot], arithmetic):
                out[t] += moments(run, np.array([[0, 0, 0, run.shape[1]]]))[0]
        return out
    blocks = -(-(pieces[:, 3] - pieces[:, 2]) // BLOCK)
    firsts = np.concatenate([[0], np.cumsum(blocks)])
    fit = max(1, _ROOM // (8 * d * d))
    arguments = key_arguments(rows)
    at = 0
    while at < len(pieces):
        stop = max(at + 1, int(np.searchsorted(firsts, firsts[at] + fit, "right")) - 1)
        count = int(firsts[stop] - firsts[at])
        chosen, places = on_device(pieces[at:stop], np.int64), on_device(firsts[at : stop + 1] - firsts[at])
        partial = xp.empty((count, d, d))
        tail = [chosen, places, stop - at, BLOCK, partial]
        if arithmetic == "single" and has_tensor_products(rows):
            tensor_moments(rows, [*arguments, *tail], count)
        else:
            tiles = -(-d // _TILE)
            grid = (count * (tiles * (tiles + 1) // 2),)
            sizes = {"threads": _MOMENT_THREADS, "shared": _MOMENT_SHARED}
            launch("moments", "moment_blocks", (key_type(rows),), grid, [*arguments, *tail], **sizes)
        _add_blocks(partial, places, int(blocks[at:stop].max()), out[at:stop])
        at = stop
    return out


def _add_blocks(partial: Any, firsts: Any, longest: int, out: Any) -> None:
    """Sum up the blocks of each piece, `longest` or fewer, in pairs, pairs of pairs, and so on."""
    pieces, d, _ = out.shape
    parts = min(_MOST_PARTS, 1 << max(0, -(-longest // _FEW) - 1).bit_length())
    grid = (pieces * -(-d * d // (_ADDERS // parts)),)
    launch("moments", "add_blocks", (), grid, [partial, firsts, d, parts, out], threads=_ADDERS)


def _in_basis(
    rows: Rows, item: int, start: int, stop: int, basis: Any, arithmetic: Arithmetic
) -> Iterator[tuple[int, Rows]]:
    """Give runs of rows of one matrix times a basis, as (first row, rows)."""
    xp, d = namespace(), rows.shape[2]
    arguments, matrix = key_arguments(rows), on_device(basis, np.float64)
    step = max(BLOCK, _ROOM // (8 * d) // BLOCK * BLOCK)
    exact = "true" if arithmetic == "compensated" else "false"
    for low in range(start, stop, step):
        n = min(step, stop - low)
        X = xp.empty((1, n, d))
        grid = (-(-n * d // THREADS),)
        launch("products", "rows_in_basis", (key_type(rows), exact), grid, [*arguments, n, item, low, matrix, X])
        yield low, Rows(X, "float64")


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
    for slot, item in enumerate(np.asarray(items).tolist()):
        for low, run in _in_basis(rows, item, 0, rows.shape[1], basis[slot], arithmetic):
            part = out[item : item + 1, low : low + run.shape[1]]
            _square_rows(run, np.zeros(1, np.int64), W[slot : slot + 1], part, "double", ceiling, triangular=True)


def projected_sqnorms(rows: Rows, items: Pieces, P: Any, out: Any, arithmetic: Arithmetic, ceiling: float) -> None:
    """Write ``‖k P‖²`` of every key of the matrices `items`."""
    _square_rows(rows, items, P, out, arithmetic, ceiling, triangular=False)


def _square_rows(
    rows: Rows, items: Pieces, W: Any, out: Any, arithmetic: Arithmetic, ceiling: float, *, triangular: bool
) -> None:
    if arithmetic == "single" and has_tensor_products(rows, W.shape[2]):
        tensor_squares(rows, items, W, out, ceiling, triangular=triangular)
        return
    n = rows.shape[1]
    matrices, listed = on_device(W, np.float64), on_device(np.asarray(items, np.int64))
    types = key_type(rows), TYPES[out.dtype.name]
    arguments = key_arguments(rows)
    for before in range(0, len(items), MOST_SLABS):
        tail = [n, listed, before, matrices, W.shape[2], triangular, ceiling, *with_steps(out, 1)]
        grid = (-(-n // _SCORE_ROWS), min(MOST_SLABS, len(items) - before))
        launch("products", "square_rows", types, grid, [*arguments, *tail])
