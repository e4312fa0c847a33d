"""Random sketches on the CPU, shared out over threads; sums do not depend on the number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._core.threads import parallel_for
from levattn._core.types import Float64
from levattn._kernels.jit import FULL_ROWS, VECTOR_BYTES
from levattn._kernels.rows import Arithmetic, Rows
from levattn._kernels.rows.compiled import view_of
from levattn._kernels.rows.cpu import scratch_like, stored_rows
from levattn._kernels.sketch.compiled import FIRST_ROWS, dense_rows, hadamard_blocks, scatter_rows
from levattn._kernels.sketch.random import key_words
from levattn._kernels.tasks import threads_for

_TRANSFORMED = 1 << 16  # numbers of a block that are transformed at a time, in the second cache


def scatter(rows: Rows, seed: int, stream: int, offset: int, blocks: int, size: int, out: Any) -> None:
    """Add sparse sketches of the matrices to `out`; see `SketchKernels`."""
    b, n, d = rows.shape
    X = scratch_like(d, _precision(rows, out))
    width = X.shape[1]
    parts = _partial_sketches(n * rows.keys.itemsize, blocks * size * out.itemsize)
    starts = [n * i // parts for i in range(parts + 1)]
    sums = np.zeros((b, parts, blocks * size, width), out.dtype)
    view = view_of(rows, X.dtype)
    keys = key_words(seed)

    def body(task: int) -> None:
        item, part = divmod(task, parts)
        run = starts[part], starts[part + 1]
        scatter_rows(view, item, *run, *keys, stream, offset, blocks, size, X, sums[item, part])

    parallel_for(body, b * parts, threads=threads_for(float(b) * n * d * blocks))
    out += _halved(sums)[:, :, :d]


def add_products(rows: Rows, S: Float64, out: Any) -> None:
    """Add S (size, n) times the rows of each matrix to `out`, (b, size, d)."""
    for item in range(rows.shape[0]):
        out[item] += S @ stored_rows(rows, item, 0, rows.shape[1], np.float64)


def dense_sketch(rows: Rows, seed: int, stream: int, offset: int, normal: bool, out: Any) -> None:
    """Add dense sketches of the matrices to `out`, (b, size, d), which gives the precision of the sums.

    Row r has the number offset + r. Its coefficients are the normals of this number, or else signs, the bits of its
    words (see `levattn._core.random`).
    """
    b, n, d = rows.shape
    size = out.shape[1]
    X = scratch_like(d, "double" if out.dtype == np.float64 else "single")
    parts = 1
    while parts < 64 and parts * max(128, 2 * size) <= n:
        parts *= 2
    starts = [n * i // parts for i in range(parts + 1)]
    sums = np.zeros((b, parts, -(-size // FULL_ROWS) * FULL_ROWS, X.shape[1]), out.dtype)
    view = view_of(rows, X.dtype)
    keys = key_words(seed)

    def body(part: int) -> None:
        dense_rows(view, starts[part], starts[part + 1], *keys, stream, offset, normal, X, part, sums)

    parallel_for(body, parts, threads=threads_for(float(b) * n * d * size))
    out += _halved(sums)[:, :size, :d]


def subsampled_hadamard(
    rows: Rows, seed: int, streams: tuple[int, int], offset: int, block: int, chosen: Any, out: Any
) -> None:
    """Add subsampled Hadamard transforms of the matrices to `out`, (b, size, d), float32 or float64.

    Rows are numbered from `offset` on; the numbers determine the blocks of `block` rows (a power of two). Each row
    gets the sign of its number's word in the first stream, and each block is transformed. Then the rows `chosen` of
    the result are added up. Their signs come from the second stream, by the block's number, a column for each row.
    """
    b, n, d = rows.shape
    if not n:
        return
    first, last = offset // block, (offset + n - 1) // block + 1
    parts = _partial_sketches(n * out.itemsize, len(chosen) * out.itemsize)
    parts = min(parts, 1 << (last - first).bit_length() - 1)
    edges = [first + (last - first) * i // parts for i in range(parts + 1)]
    lanes = VECTOR_BYTES // out.itemsize
    width = -(-d // lanes) * lanes
    sums = np.zeros((b, parts, len(chosen), width), out.dtype)
    kind = np.dtype(np.float64 if _precision(rows, out) == "double" else np.float32)
    view = view_of(rows, kind)
    keys = key_words(seed)
    panel = min(width, max(lanes, _TRANSFORMED // block // lanes * lanes))

    def body(task: int) -> None:
        item, part = divmod(task, parts)
        X = np.empty((block, panel), out.dtype)
        first_rows = np.zeros((FIRST_ROWS, panel), kind)
        run = edges[part], edges[part + 1]
        hadamard_blocks(view, item, n, *run, *keys, streams, offset, chosen, first_rows, X, sums[item, part])

    parallel_for(body, b * parts, threads=threads_for(float(b) * n * d * block.bit_length()))
    out += _halved(sums)[:, :, :d]


def _precision(rows: Rows, out: Any) -> Arithmetic:
    """Return the arithmetic in which rows are read for the sums `out`.

    Entries of 32 bits, less a mean or times the root of a weight, are rounded in float32. So rounded, rows that
    depend on each other are independent.
    """
    changed = rows.shift is not None or rows.weights is not None
    return "double" if rows.format == "float64" or (changed and out.dtype == np.float64) else "single"


def _partial_sketches(read: int, held: int) -> int:
    """Return the number of sketches of parts of the rows to make and add up, whatever the number of threads.

    There are enough sketches for the threads, but so few that adding them costs little beside reading the keys.
    """
    parts = 1
    while parts < 64 and (16 if parts == 1 else 64) * parts * held <= read:
        parts *= 2
    return parts


def _halved(sums: Any) -> Any:
    """Return the sum over axis 1, whose length is a power of two, in pairs."""
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums[:, 0]
