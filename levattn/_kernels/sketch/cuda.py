"""Random sketches on a CUDA device; `out` is on the device too, with contiguous rows.

Kernels sketch parts of the rows, and then add these sketches in one order. The shape of one matrix determines the
parts. So the bits depend neither on the layout of the keys nor on the rest of their batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._core.types import Float64
from levattn._kernels.cuda_source import THREADS, TYPES, launch, namespace, on_device
from levattn._kernels.rows import Rows
from levattn._kernels.rows.cuda import MOST_SLABS, key_arguments, key_type

# Constants of sketch.cu as well
_TILE = 4096  # rows that are sorted at a time
_WARPS = THREADS // 32
_GROUP = 16  # parts that are added at a time
_SIDE = 64  # of a tile of a product
_FLIPS = 1024  # signs that are drawn at a time for the rows of a transform

_DIGIT = 12  # bits by which rows are sorted at a time: counts of their values fit into shared memory
_ORDERED = 1 << 25  # rows times blocks of a sketch that are sorted before they are added
_NUMBERED = 1 << 30  # the same, at most
_SHORTEST = 64  # rows of a run, on average, so that the sketches of parts cost little beside the keys
_THREADS_BUSY = 1 << 19  # threads that a device is given at a time
_NEAR = 1 << 24  # bytes of a part of the rows that stay in the second cache while they are read once for each block
_BLOCKS_BUSY = 2048  # blocks of threads that a device is given at a time
_DRAWN = 1 << 25  # entries of a dense sketch that are drawn at a time
_TRANSFORMED = 1 << 16  # bytes of rows that a block of threads transforms
_FEWEST, _WIDEST = 10, 4  # logarithms of the fewest rows and the most columns of these


def scatter(rows: Rows, seed: int, stream: int, offset: int, blocks: int, size: int, out: Any) -> None:
    """Add sparse sketches of the matrices to `out`, (b, blocks · size, d).

    Sorting rows by place makes each row of the sketch a sum of its own, in the order of the rows.
    """
    n = rows.shape[1]
    step = max(1, min(max(_ORDERED // blocks, 4 * size), _NUMBERED // blocks))
    for low in range(0, n, step):
        _scatter_ordered(rows.between(low, min(low + step, n)), seed, stream, offset + low, blocks, size, out)


def _scatter_ordered(rows: Rows, seed: int, stream: int, offset: int, blocks: int, size: int, out: Any) -> None:
    b, n, d = rows.shape
    width = 16 // rows.keys.itemsize
    log_lanes = min(5, (-(-d // width) - 1).bit_length())
    tiles = -(-d // (width << log_lanes))
    buckets = blocks * size
    parts = -(-_THREADS_BUSY // (buckets * tiles << log_lanes))
    if blocks > 1:
        parts = max(parts, n * d * rows.keys.itemsize // _NEAR)
    span = -(-n // max(1, min(parts, n // (_SHORTEST * buckets))))
    parts = -(-n // span)
    ordered, starts, step = _order(n, seed, stream, offset, blocks, size, span)

    xp = namespace()
    sums = out if parts == 1 else xp.empty((parts, *out.shape), out.dtype)
    grid = (-(-(parts * buckets << log_lanes) // THREADS), tiles, min(b, MOST_SLABS))
    tail = [b, ordered, starts, step, parts * buckets, buckets, log_lanes, parts == 1, sums]
    launch("sketch", "sum_runs", (key_type(rows), TYPES[out.dtype.name]), grid, [*key_arguments(rows), *tail])
    if parts > 1:
        _add_parts(sums, out)


def _order(n: int, seed: int, stream: int, offset: int, blocks: int, size: int, span: int) -> tuple[Any, Any, int]:
    """Return the rows of each part (of `span` rows) and block, sorted by place, the starts of places, and a step.

    A unit u is a part and a block. The start of its place p is at the index (u · size + p) times the step. Rows
    are sorted by one digit of their places after the other, the lowest first.
    """
    xp = namespace()
    units, tiles = -(-n // span) * blocks, -(-span // _TILE)
    bits = max(1, (size - 1).bit_length())
    passes = -(-bits // _DIGIT)
    width = -(-bits // passes)
    places, ordered = None, None
    for shift in range(0, bits, width):
        last = shift + width >= bits
        digits = (size - 1 >> shift) + 1 if last else 1 << width
        numbers = [seed, stream, offset, n, blocks, size, span, tiles, shift, width, digits]
        counts = xp.empty(units * digits * tiles + 1, np.int32)
        grid = (units * tiles,)
        launch("sketch", "count_digits", (), grid, [*numbers, places, counts], shared=4 * digits)
        firsts = xp.cumsum(counts, dtype=np.int32)
        placed = None if passes == 1 else xp.empty(n * blocks, np.uint32)
        moved = xp.empty(n * blocks, np.uint32)
        shared = 4 * _TILE + 2 * _WARPS * digits
        launch("sketch", "move_rows", (), grid, [*numbers, places, ordered, firsts, placed, moved], shared=shared)
        places, ordered = placed, moved
    if passes == 1:
        return ordered, firsts, tiles
    starts = xp.empty(units * size + 1, np.int32)
    grid = (-(-len(starts) // THREADS),)
    launch("sketch", "find_starts", (), grid, [places, n, blocks, size, span, units * size, starts])
    return ordered, starts, 1


def _add_parts(parts: Any, out: Any) -> None:
    """Add the sum over the first axis to `out`."""
    while True:
        groups = -(-len(parts) // _GROUP)
        to = out if groups == 1 else namespace().empty((groups, *out.shape), out.dtype)
        grid = (-(-out.size // THREADS), groups)
        launch("sketch", "add_parts", (TYPES[out.dtype.name],), grid, [parts, len(parts), out.size, groups == 1, to])
        if groups == 1:
            return
        parts = to


def add_products(rows: Rows, S: Float64, out: Any) -> None:
    """Add S (size, n) times the rows of each matrix to `out`, (b, size, d)."""
    sums = out if out.dtype == np.float64 else namespace().zeros(out.shape)
    _multiply(rows, on_device(S, np.float64), sums)
    if sums is not out:
        out += sums


def _multiply(rows: Rows, S: Any, out: Any) -> None:
    b, n, d = rows.shape
    if not n:
        return
    size = len(S)
    tiles = -(-size // _SIDE) * -(-d // _SIDE)
    span = -(-n // max(1, min(_BLOCKS_BUSY // tiles, n // max(128, 8 * size))))
    parts = -(-n // span)
    sums = namespace().empty((parts, *out.shape), out.dtype)
    grid, types = (parts * tiles, min(b, MOST_SLABS)), (key_type(rows), TYPES[out.dtype.name])
    launch("sketch", "multiply_rows", types, grid, [*key_arguments(rows), b, n, span, S, size, sums])
    _add_parts(sums, out)


def dense_sketch(rows: Rows, seed: int, stream: int, offset: int, normal: bool, out: Any) -> None:
    """Add dense sketches of the matrices to `out`, (b, size, d)."""
    n, size = rows.shape[1], out.shape[1]
    step = max(4, _DRAWN // size)
    for low in range(0, n, step):
        part = rows.between(low, min(low + step, n))
        count = part.shape[1]
        S = namespace().empty((size, count), out.dtype)
        threads = ((offset + low) % 4 + count + 3) // 4 * -(-size // (2 if normal else 32))
        arguments = [seed, stream, offset + low, count, size, normal, S]
        launch("sketch", "draw_dense", (TYPES[out.dtype.name],), (-(-threads // THREADS),), arguments)
        _multiply(part, S, out)


def subsampled_hadamard(
    rows: Rows, seed: int, streams: tuple[int, int], offset: int, block: int, chosen: Any, out: Any
) -> None:
    """Add subsampled Hadamard transforms to `out`, (b, size, d)."""
    b, n, d = rows.shape
    if not n:
        return
    size = len(chosen)
    log_block = block.bit_length() - 1
    room = (_TRANSFORMED // out.itemsize).bit_length() - 1
    log_rows = min(log_block, room, max(_FEWEST, (size - 1).bit_length()))
    log_columns = min(_WIDEST, (d - 1).bit_length(), room - log_rows)
    tiles = -(-d >> log_columns)
    first, last = offset // block, (offset + n - 1) // block + 1
    parts = max(1, min(-(-_BLOCKS_BUSY // tiles), n // (16 * size)))
    span = -(-(last - first) // parts)
    parts = -(-(last - first) // span)
    sums = out if parts == 1 else namespace().zeros((parts, *out.shape), out.dtype)
    cut = [first, last - first, span, log_block, log_rows, log_columns]
    tail = [b, n, seed, *streams, offset, *cut, on_device(chosen, np.int64), size, sums]
    shared = (out.itemsize << log_rows + log_columns) + (1 << log_rows) + _FLIPS
    grid, types = (parts * tiles, min(b, MOST_SLABS)), (key_type(rows), TYPES[out.dtype.name])
    launch("sketch", "transform_rows", types, grid, [*key_arguments(rows), *tail], shared=shared)
    if parts > 1:
        _add_parts(sums, out)
