"""Second moments and squared norms of sparse keys on the CPU, as numpy arrays.

Rows that are unchanged, scaled or weighted are read entry by entry. Rows in another basis, or centered, are dense
anyway; rows with many nonzero entries are dense in effect. The dense kernels read both kinds, written out one block of
`BLOCK` rows at a time for each thread.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.sparse import Csr
from levattn._core.threads import num_threads, parallel_for
from levattn._core.types import Float64
from levattn._kernels.gram import cpu
from levattn._kernels.gram.csr_compiled import (
    PANEL_VECTORS,
    TILE,
    band_moment_tasks,
    count_bands,
    list_bands,
    mirror_tasks,
    panels_of,
    projected_rows,
    row_moment_tasks,
    row_sqnorms,
)
from levattn._kernels.jit import VECTOR_BYTES
from levattn._kernels.pairwise import pairwise_sum
from levattn._kernels.rows import BLOCK, Arithmetic, Pieces, Rows
from levattn._kernels.rows.csr import blocks_of, entries_of, written_out
from levattn._kernels.tasks import share, threads_for

SINGLE_UNIT = 2.0**-24  # float32, in which entries are multiplied

_NARROW = 256  # columns up to which a second moment stays in a near cache while the rows are added to it
_BAND, _BAND_SIZE = 64, 131072  # columns of a band, and columns times d, at most: its moments stay in a near cache
_PAIR_COST = 30.0  # cost of a product of two entries of a row, relative to a product of the dense kernels
_ENTRY_COST = 2.5  # cost of a multiply-add of an entry and the triangle, relative to one of the dense kernels


def _pairs(keys: Csr) -> float:
    """Return the number of products of two entries of one row."""
    counts = keys.counts
    return float((counts * (counts + 1)).sum()) / 2


def longest_run(_rows: Rows, _items: int) -> int:
    """Return the level of the longest run of blocks: all rows come in one piece, which threads share."""
    return 63


def moments(rows: Rows, pieces: Pieces, *, basis: Float64 | None = None, arithmetic: Arithmetic = "double") -> Float64:
    """Return the second moment of each piece's rows; all rows should come in one piece, because threads share it.

    Blocks are summed in pairs, pairs of pairs, and so on. With more than 256 columns and no basis, these blocks are
    runs of the entries of a band of columns, 256 for each column. There, the moment of a block of rows would cost more
    than its entries. Sums of entries are in float64 whatever the arithmetic.
    """
    d = rows.shape[2]
    out: Float64 = np.empty((len(pieces), d, d))
    for t, (slot, _, start, stop) in enumerate(pieces.tolist()):
        part = rows.between(start, stop)
        B = None if basis is None else basis[slot : slot + 1]
        if stop <= start:
            out[t] = 0
        elif B is not None or rows.shift is not None or _PAIR_COST * _pairs(part.keys) > (stop - start) * d * d / 2:
            out[t] = _dense_moment(part, B, arithmetic)
        elif d <= _NARROW:
            out[t] = _row_moment(part)
        else:
            _band_moment(part, out[t])
    return out


def _runs(n: int, threads: int) -> list[tuple[int, int]]:
    """Split `n` rows into runs, about four for each thread; a run has a power of two of blocks."""
    blocks = -(-n // BLOCK)
    step = BLOCK << max(0, (blocks // (4 * threads)).bit_length() - 1)
    return [(start, min(start + step, n)) for start in range(0, n, step)]


def _dense_moment(rows: Rows, basis: Float64 | None, arithmetic: Arithmetic) -> Any:
    n = rows.shape[1]
    runs = _runs(n, num_threads())
    parts: list[Any] = [None] * len(runs)

    def body(run: int) -> None:
        parts[run] = pairwise_sum(
            cpu.moments(block, np.array([[0, 0, 0, block.shape[1]]]), basis=basis, arithmetic=arithmetic)[0]
            for _, block in blocks_of(rows.between(*runs[run]))
        )

    parallel_for(body, len(runs))
    return pairwise_sum(parts)


def _row_moment(rows: Rows) -> Any:
    _, n, d = rows.shape
    work = _PAIR_COST * _pairs(rows.keys)
    runs = _runs(n, threads_for(work))
    tasks = np.array([(0, 0, start, stop) for start, stop in runs])
    lanes = VECTOR_BYTES // 8
    width = -(-d // lanes) * lanes
    parts = np.empty((len(runs), width, width))
    arguments = entries_of(rows)
    levels = cpu.levels_of(tasks)
    share(lambda first, last: row_moment_tasks(*arguments, BLOCK, levels, tasks, first, last, parts), len(runs), work)
    return pairwise_sum(parts)[:d, :d]


def _band_moment(rows: Rows, out: Any) -> None:
    _, n, d = rows.shape
    indptr, indices, values, mask = entries_of(rows)
    work = _PAIR_COST * _pairs(rows.keys)
    width = min(_BAND, max(4, _BAND_SIZE // d))
    bands = -(-d // width)
    cuts = [n * i // 4 for i in range(5)] if threads_for(work) > 1 else [0, n]
    slabs = list(itertools.pairwise(cuts))
    counts: npt.NDArray[np.int64] = np.empty((len(slabs), bands), np.int64)
    parallel_for(lambda i: count_bands(indptr, indices, mask, width, *slabs[i], counts[i]), len(slabs))
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts.sum(axis=0))])
    at = starts[:-1] + np.cumsum(counts, axis=0) - counts
    kind = np.int32 if indptr[-1] < 2**31 else np.int64
    places, ends = np.empty(starts[-1], kind), np.empty(starts[-1], kind)
    parallel_for(lambda i: list_bands(indptr, indices, mask, width, *slabs[i], at[i], places, ends), len(slabs))

    def body(first: int, last: int) -> None:
        band_moment_tasks(indices, values, width, starts, places, ends, first, last, out)

    share(body, bands, work)
    share(lambda first, last: mirror_tasks(out, first, last), -(-d // TILE), float(d * d))


def sqnorms(
    rows: Rows,
    items: Any,
    W: Float64,
    out: Any,
    *,
    basis: Float64 | None = None,
    arithmetic: Arithmetic = "double",
    ceiling: float = math.inf,
) -> None:
    """Write ``‖k W‖²`` of every key of the matrices `items`."""
    _, n, d = rows.shape
    if not n or not len(items):
        return
    entries = float(rows.keys.indptr[-1] - rows.keys.indptr[0])
    if basis is not None or rows.shift is not None or _ENTRY_COST * entries > float(n) * d:

        def block_of(block: int) -> None:
            part = slice(block * BLOCK, min((block + 1) * BLOCK, n))
            dense = written_out(rows, part.start, part.stop)
            one = np.zeros(1, np.int64)
            cpu.sqnorms(dense, one, W, out[:, part], basis=basis, arithmetic=arithmetic, ceiling=ceiling)

        parallel_for(block_of, -(-n // BLOCK))
        return
    kind = np.dtype(np.float32 if arithmetic == "single" else np.float64)
    vectors = -(-d // (VECTOR_BYTES // kind.itemsize))
    vectors = PANEL_VECTORS if vectors > PANEL_VECTORS // 2 else 1 << (vectors - 1).bit_length()
    panels = panels_of(np.ascontiguousarray(W[0]), np.empty(1, kind), vectors)
    arguments = entries_of(rows)
    share(
        lambda first, last: row_sqnorms(*arguments, panels, first, last, ceiling, out[0]),
        n,
        _ENTRY_COST * entries * d / 2 + n,
    )


def projected_sqnorms(rows: Rows, items: Any, P: Float64, out: Any, arithmetic: Arithmetic, ceiling: float) -> None:
    """Write ``‖k P‖²`` of every key."""
    n = rows.shape[1]
    if rows.shift is not None:
        for low, dense in blocks_of(rows):
            cpu.projected_sqnorms(dense, items, P, out[:, low : low + dense.shape[1]], arithmetic, ceiling)
        return
    right = np.ascontiguousarray(P[0], np.float32 if arithmetic == "single" else np.float64)
    arguments = entries_of(rows)
    work = _ENTRY_COST * float(rows.keys.indptr[-1] - rows.keys.indptr[0]) * right.shape[1] + n
    share(lambda first, last: projected_rows(*arguments, right, first, last, ceiling, out[0]), n, work)
