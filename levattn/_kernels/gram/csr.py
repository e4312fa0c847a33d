"""The kernels for sparse keys on the CPU, with the contracts of `_cpu`; numpy arrays come back.

As they are (and scaled or weighted) the rows are read entry by entry. In another basis or centred they are dense
anyway, and so they are in effect where many of the entries are not zero: then the dense kernels read them, written out
one block of `BLOCK` rows at a time for each thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Csr
from levattn._core.threads import num_threads, parallel_for
from levattn._kernels.gram import cpu as _cpu
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
    scatter_entries,
)
from levattn._kernels.jit import VECTOR_BYTES
from levattn._kernels.pairwise import PairwiseSum
from levattn._kernels.rows.contract import BLOCK, Arithmetic, Float64, Pieces, Rows

__all__ = [
    "add_products",
    "column_maxima",
    "column_sums",
    "dense_sketch",
    "moments",
    "nonfinite_rows",
    "projected_sqnorms",
    "scatter",
    "sketch_zeros",
    "sqnorms",
    "subsampled_hadamard",
    "where",
    "wide_zeros",
    "zeros",
]

_NARROW = 256  # columns up to which a second moment stays in a near cache while the rows are added to it
_BAND, _BAND_SIZE = 64, 131072  # columns of a band, and columns times d, so that its moments stay in a near cache
_PAIR_COST = 30.0  # a product of two entries of a row, next to one of the dense kernels
_ENTRY_COST = 2.5  # a multiply-add of an entry and the triangle, next to one of the dense kernels
_THREAD_WORK = 200_000  # products of entries below which a second thread costs more than it brings

zeros = _cpu.zeros
wide_zeros = _cpu.wide_zeros
sketch_zeros = _cpu.sketch_zeros
where = _cpu.where


def _entries(rows: Rows) -> tuple[Any, ...]:
    """Return the arrays that the compiled code reads: row bounds, columns, values as they are read, mask."""
    keys: Csr = rows.keys
    mask = np.zeros(0, np.bool_) if rows.mask is None else np.require(rows.mask[0], np.bool_, ["C", "W"])
    if rows.scale is None and rows.weights is None:
        return keys.indptr, keys.indices, keys.values, mask
    columns, values = keys.entries()
    values = values.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # a masked entry may be anything
        if rows.scale is not None:
            values *= rows.scale[0][columns]
        if rows.weights is not None:
            values *= np.repeat(rows.weights[0], keys.counts)
    return keys.indptr - keys.indptr[0], np.ascontiguousarray(columns), values, mask


def _written_out(rows: Rows, start: int, stop: int) -> Rows:
    """Return some rows with the zeros written out."""
    part = rows.between(start, stop)
    return Rows(part.keys.to_dense(), part.format, part.mask, part.shift, part.scale, part.weights)


def _pairs(keys: Csr) -> float:
    """Return how many products of two entries of one row there are."""
    counts = keys.counts
    return float((counts * (counts + 1)).sum()) / 2


def _pairwise(terms: list[Any]) -> Any:
    """Return the sum of terms, combined as `PairwiseSum` does; it is formed in their place."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1
    total = _pairwise(terms[:half])
    total += _pairwise(terms[half:])
    return total


def _share(body: Callable[[int, int], None], n: int, work: float) -> None:
    """Call ``body(first, last)`` over `n` tasks, the later of which may be the lighter ones."""
    threads = num_threads() if work >= _THREAD_WORK else 1
    runs = min(n, 1 if threads == 1 else 16 * threads)
    parallel_for(lambda i: body(n * i // runs, n * (i + 1) // runs), runs, threads=threads)


def moments(rows: Rows, pieces: Pieces, *, basis: Float64 | None = None, arithmetic: Arithmetic = "double") -> Float64:
    """Return the second moment of each piece's rows; the contract of `_cpu.moments`, but that threads share a piece.

    So all rows should come in one piece. Its blocks are summed in pairs, pairs of pairs, and so on. Without a basis,
    from more than 256 columns on, these are runs of the entries of a band of columns, 256 for each of them: there a
    block of rows would cost more by its moment than by its entries. Sums of entries are in float64 whatever the
    arithmetic.
    """
    d = rows.shape[2]
    out: Float64 = np.empty((len(pieces), d, d))
    for t, (slot, _, start, stop) in enumerate(pieces.tolist()):
        part = rows.between(start, stop)
        turn = None if basis is None else basis[slot : slot + 1]
        if stop <= start:
            out[t] = 0
        elif turn is not None or rows.shift is not None or _PAIR_COST * _pairs(part.keys) > (stop - start) * d * d / 2:
            out[t] = _dense_moment(part, turn, arithmetic)
        elif d <= _NARROW:
            out[t] = _row_moment(part)
        else:
            _band_moment(part, out[t])
    return out


def _runs(n: int, threads: int) -> list[tuple[int, int]]:
    """Return `n` rows in runs of a power of two of blocks, about four for each thread."""
    blocks = -(-n // BLOCK)
    step = BLOCK << max(0, (blocks // (4 * threads)).bit_length() - 1)
    return [(start, min(start + step, n)) for start in range(0, n, step)]


def _dense_moment(rows: Rows, basis: Float64 | None, arithmetic: Arithmetic) -> Any:
    n = rows.shape[1]
    runs = _runs(n, num_threads())
    parts: list[Any] = [None] * len(runs)

    def body(run: int) -> None:
        sums: PairwiseSum[Float64] = PairwiseSum()
        for start in range(*runs[run], BLOCK):
            block = _written_out(rows, start, min(start + BLOCK, runs[run][1]))
            whole = np.array([[0, 0, 0, block.shape[1]]])
            sums.add(_cpu.moments(block, whole, basis=basis, arithmetic=arithmetic)[0])
        parts[run] = sums.total()

    parallel_for(body, len(runs))
    return _pairwise(parts)


def _row_moment(rows: Rows) -> Any:
    _, n, d = rows.shape
    work = _pairs(rows.keys)
    runs = _runs(n, num_threads() if work >= _THREAD_WORK else 1)
    tasks = np.array([(0, 0, start, stop) for start, stop in runs])
    lanes = VECTOR_BYTES // 8
    width = -(-d // lanes) * lanes
    parts = np.empty((len(runs), width, width))
    arguments = _entries(rows)
    levels = _cpu.levels_of(tasks)
    _share(lambda first, last: row_moment_tasks(*arguments, BLOCK, levels, tasks, first, last, parts), len(runs), work)
    return _pairwise(list(parts))[:d, :d]


def _band_moment(rows: Rows, out: Any) -> None:
    _, n, d = rows.shape
    indptr, indices, values, mask = _entries(rows)
    work = _pairs(rows.keys)
    width = min(_BAND, max(4, _BAND_SIZE // d))
    bands = -(-d // width)
    cuts = [n * i // 4 for i in range(5)] if work >= _THREAD_WORK else [0, n]
    slabs = list(pairwise(cuts))
    counts: npt.NDArray[np.int64] = np.empty((len(slabs), bands), np.int64)
    parallel_for(lambda i: count_bands(indptr, indices, mask, width, *slabs[i], counts[i]), len(slabs))
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts.sum(axis=0))])
    at = starts[:-1] + np.cumsum(counts, axis=0) - counts
    kind = np.int32 if indptr[-1] < 2**31 else np.int64
    places, ends = np.empty(starts[-1], kind), np.empty(starts[-1], kind)
    parallel_for(lambda i: list_bands(indptr, indices, mask, width, *slabs[i], at[i], places, ends), len(slabs))

    def body(first: int, last: int) -> None:
        band_moment_tasks(indices, values, width, starts, places, ends, first, last, out)

    _share(body, bands, work)
    _share(lambda first, last: mirror_tasks(out, first, last), -(-d // TILE), float(d * d))


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
    """Write ``‖k W‖²`` of every key of the matrices `items`; the contract of `_cpu.sqnorms`."""
    _, n, d = rows.shape
    if not n or not len(items):
        return
    entries = float(rows.keys.indptr[-1] - rows.keys.indptr[0])
    if basis is not None or rows.shift is not None or _ENTRY_COST * entries > float(n) * d:

        def written_out(block: int) -> None:
            part = slice(block * BLOCK, min((block + 1) * BLOCK, n))
            dense = _written_out(rows, part.start, part.stop)
            one = np.zeros(1, np.int64)
            _cpu.sqnorms(dense, one, W, out[:, part], basis=basis, arithmetic=arithmetic, ceiling=ceiling)

        parallel_for(written_out, -(-n // BLOCK))
        return
    kind = np.dtype(np.float32 if arithmetic == "single" else np.float64)
    vectors = -(-d // (VECTOR_BYTES // kind.itemsize))
    vectors = PANEL_VECTORS if vectors > PANEL_VECTORS // 2 else 1 << (vectors - 1).bit_length()
    panels = panels_of(np.ascontiguousarray(W[0]), np.empty(1, kind), vectors)
    arguments = _entries(rows)
    _share(lambda first, last: row_sqnorms(*arguments, panels, first, last, ceiling, out[0]), n, entries * d / 2 + n)


def projected_sqnorms(rows: Rows, items: Any, P: Float64, out: Any, arithmetic: Arithmetic, ceiling: float) -> None:
    """Write ``‖k P‖²`` of every key; the contract of `_cpu.projected_sqnorms`."""
    n = rows.shape[1]
    if rows.shift is not None:
        for low, dense in _blocks(rows):
            _cpu.projected_sqnorms(dense, items, P, out[:, low : low + dense.shape[1]], arithmetic, ceiling)
        return
    right = np.ascontiguousarray(P[0], np.float32 if arithmetic == "single" else np.float64)
    arguments = _entries(rows)
    work = float(rows.keys.indptr[-1] - rows.keys.indptr[0]) * right.shape[1] + n
    _share(lambda first, last: projected_rows(*arguments, right, first, last, ceiling, out[0]), n, work)


def scatter(rows: Rows, seed: int, stream: int, offset: int, blocks: int, size: int, out: Any) -> None:
    """Add a sparse sketch of the rows to `out`; the contract of `_cpu.scatter`."""
    n = rows.shape[1]
    if rows.shift is not None:
        for low, dense in _blocks(rows):
            _cpu.scatter(dense, seed, stream, offset + low, blocks, size, out)
        return
    arguments = _entries(rows)
    keys = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
    read = float(rows.keys.indptr[-1] - rows.keys.indptr[0]) * blocks
    parts = 1  # as many sketches as cost little beside the entries, whatever the number of threads
    while parts < 8 and 4 * parts * out[0].size <= read:
        parts *= 2
    sums = np.zeros((parts, *out[0].shape), out.dtype)

    def body(part: int) -> None:
        run = n * part // parts, n * (part + 1) // parts
        scatter_entries(*arguments, *run, *keys, stream, offset, blocks, size, sums[part])

    parallel_for(body, parts)
    out[0] += _pairwise(list(sums))


def add_products(rows: Rows, S: Float64, out: Any) -> None:
    """Add S times the rows to `out`; the contract of `_cpu.add_products`."""
    for low, dense in _blocks(rows):
        _cpu.add_products(dense, S[:, low : low + dense.shape[1]], out)


def dense_sketch(rows: Rows, seed: int, stream: int, offset: int, normal: bool, out: Any) -> None:
    """Add a dense sketch of the rows to `out`; the contract of `_cpu.dense_sketch`."""
    for low, dense in _blocks(rows):
        _cpu.dense_sketch(dense, seed, stream, offset + low, normal, out)


def subsampled_hadamard(
    rows: Rows, seed: int, streams: tuple[int, int], offset: int, block: int, chosen: Any, out: Any
) -> None:
    """Add a subsampled Hadamard transform of the rows to `out`; the contract of `_cpu.subsampled_hadamard`."""
    for low, dense in _blocks(rows, max(BLOCK, block)):
        _cpu.subsampled_hadamard(dense, seed, streams, offset + low, block, chosen, out)


def _blocks(rows: Rows, size: int = BLOCK) -> Iterator[tuple[int, Rows]]:
    """Give blocks of rows written out, each with the number of its first row."""
    n = rows.shape[1]
    for low in range(0, n, size):
        yield low, _written_out(rows, low, min(low + size, n))


def column_sums(rows: Rows) -> Float64:
    """Return the sums of the columns, (b, d), block by block and combined pairwise."""
    sums = [_cpu.column_sums(dense) for _, dense in _blocks(rows)]
    return np.asarray(_pairwise(sums)) if sums else np.zeros((1, rows.shape[2]))


def column_maxima(rows: Rows) -> Float64:
    """Return the largest magnitude in each column, (b, d)."""
    out = np.zeros((1, rows.shape[2]))
    if rows.shift is not None:
        for _, dense in _blocks(rows):
            np.maximum(out, _cpu.column_maxima(dense), out=out)
        return out
    indptr, indices, values, mask = _entries(rows)
    held = slice(int(indptr[0]), int(indptr[-1]))
    sizes = np.abs(values[held])
    if mask.size:
        sizes = np.where(np.repeat(mask, np.diff(indptr)), sizes, 0)
    with np.errstate(invalid="ignore"):  # NaN stays
        np.maximum.at(out[0], indices[held], sizes)
    return out


def nonfinite_rows(rows: Rows, item: int, limit: int) -> list[int]:
    """Return the first rows of one matrix (at most `limit`) that hold NaN or infinity and are not masked."""
    keys: Csr = rows.keys
    bad = np.flatnonzero(~np.isfinite(keys.entries()[1])) + keys.indptr[0]
    found = np.unique(np.searchsorted(keys.indptr, bad, side="right") - 1)
    if rows.mask is not None:
        found = found[rows.mask[item][found]]
    return [int(r) for r in found[:limit]]
