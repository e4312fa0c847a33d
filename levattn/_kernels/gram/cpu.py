"""The kernels on the CPU: Numba code, shared out over threads that run without the GIL."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.threads import num_threads, parallel_for
from levattn._kernels.factor.cholesky import cholesky_tasks
from levattn._kernels.factor.double_double import TALL, WIDTH, product_rows
from levattn._kernels.gram.blas import WIDE, wide_cholesky, wide_moments
from levattn._kernels.gram.in_basis import turned_moment_tasks, turned_sqnorm_tasks
from levattn._kernels.gram.moments import moment_tasks
from levattn._kernels.gram.squares import scores_at, sqnorm_tasks
from levattn._kernels.heavy.compiled import heavy_tasks, norm_tasks, product_tasks, solve_tasks
from levattn._kernels.jit import FULL_ROWS, VECTOR_BYTES
from levattn._kernels.rows.compiled import view_of
from levattn._kernels.rows.contract import BLOCK, Arithmetic, Float64, Pieces, Rows
from levattn._kernels.rows.scan import column_tasks, nonfinite_scan, read_rows
from levattn._kernels.sketch.compiled import FIRST_ROWS, dense_rows, hadamard_blocks, scatter_rows

__all__ = [
    "add_products",
    "column_maxima",
    "column_sums",
    "dense_sketch",
    "heavy_entries",
    "inverse_cholesky",
    "levels_of",
    "longest_run",
    "moments",
    "nonfinite_rows",
    "precise_products",
    "precise_solutions",
    "projected_sqnorms",
    "query_norms",
    "scatter",
    "sketch_zeros",
    "sqnorms",
    "subsampled_hadamard",
    "twofold_product",
    "where",
    "wide_zeros",
    "zeros",
]

_THREAD_WORK = 2_000_000  # multiply-adds below which a second thread costs more than it brings
_PROJECTED = 1 << 22  # numbers of keys that are projected at a time
_TRANSFORMED = 1 << 16  # numbers of a block that are transformed at a time, in the second cache
_LONGEST = 63  # level of a run of blocks that is longer than any
_RUN_WORK = 64_000_000  # multiply-adds beside which handing a run to a thread costs little


def _scratch(d: int, arithmetic: Arithmetic) -> Any:
    """Return an array that tells the compiled code the precision and the padded width."""
    kind = np.dtype(np.float32 if arithmetic == "single" else np.float64)
    lanes = VECTOR_BYTES // kind.itemsize
    return np.empty((1, -(-d // lanes) * lanes), kind)


def _padded(matrices: Float64 | None, width: int) -> Float64:
    if matrices is None:
        return np.zeros((0, 0, 0))
    extra = width - matrices.shape[-1]
    if not extra:
        return np.ascontiguousarray(matrices)
    return np.ascontiguousarray(np.pad(matrices, ((0, 0), (0, extra), (0, extra))))


def _threads(work: float) -> int:
    return num_threads() if work >= _THREAD_WORK else 1


def _runs(work: float, threads: int) -> int:
    """Return into how many runs to split work: enough to balance the threads, few enough to cost little."""
    return 1 if threads == 1 else max(2 * threads, min(16 * threads, int(work / _RUN_WORK)))


def _share(body: Callable[[int, int], None], n: int, work: float) -> None:
    """Call ``body(first, last)`` over `n` tasks in runs that are small enough to balance."""
    if n == 1:
        body(0, 1)
        return
    threads = _threads(work)
    runs = min(n, _runs(work, threads))
    parallel_for(lambda i: body(n * i // runs, n * (i + 1) // runs), runs, threads=threads)


def zeros(rows: Rows) -> Any:
    """Return an array for one score a key, (b, n)."""
    return np.zeros(rows.shape[:2], np.float64 if rows.format == "float64" else np.float32)


def wide_zeros(rows: Rows) -> Any:
    """Return an array for one float64 figure a key, (b, n)."""
    return np.zeros(rows.shape[:2])


where = np.where


def _read(rows: Rows, item: int, start: int, stop: int, kind: Any) -> Any:
    """Return some rows of one matrix as they are read, row after row; without a copy where they are stored so."""
    stored = rows.keys[item, start:stop]
    plain = all(x is None for x in (rows.mask, rows.shift, rows.scale, rows.weights))
    if plain and stored.dtype == kind and stored.flags.c_contiguous:  # BLAS sums otherwise in another order
        return stored
    X = np.zeros((stop - start, rows.shape[2]), kind)
    read_rows(view_of(rows.between(start, stop)), item, stop - start, X)
    return X


def levels_of(pieces: Pieces) -> int:
    """Return how many partial sums the longest of some pieces holds while its blocks are combined in pairs."""
    longest = int((pieces[:, 3] - pieces[:, 2]).max(initial=0))
    return 2 + max(0, -(-longest // BLOCK) - 1).bit_length()


def longest_run(rows: Rows, items: int) -> int:
    """Return the level of the longest run of blocks that one thread is to sum up: enough of them for all threads."""
    blocks = -(-rows.shape[1] // BLOCK)
    threads = 1 if blocks <= 1 else num_threads()
    if threads == 1 or items >= 4 * threads:
        return _LONGEST
    few, many = (max(0, (blocks // (share * threads)).bit_length() - 1) for share in (4, 8))
    return min(few, max(many, 4))  # four runs a thread, or eight where runs are long


def moments(rows: Rows, pieces: Pieces, *, basis: Float64 | None = None, arithmetic: Arithmetic = "double") -> Float64:
    """Return the second moment of each piece's rows, (t, d, d), each row multiplied by its slot's `basis` first.

    A piece starts at a multiple of `BLOCK`; its blocks are summed in pairs, pairs of pairs, and so on.
    """
    d = rows.shape[2]
    if d >= WIDE and basis is None and arithmetic == "double":
        whole: Float64 = np.empty((len(pieces), d, d))
        wide_moments(lambda item, start, stop: _read(rows, item, start, stop, np.float64), pieces, whole)
        return whole
    X = _scratch(d, arithmetic)
    width = X.shape[1]
    out = np.empty((len(pieces), width, width))
    view = view_of(rows, X.dtype)
    padded = _padded(basis, width)
    levels = levels_of(pieces)
    work = float((pieces[:, 3] - pieces[:, 2]).sum()) * d * d

    def body(first: int, last: int) -> None:
        if basis is None:
            moment_tasks(view, X, BLOCK, levels, pieces, first, last, out)
        else:
            exact = arithmetic == "compensated"
            turned_moment_tasks(view, padded, exact, X, BLOCK, levels, pieces, first, last, out)

    _share(body, len(pieces), work)
    return out[:, :d, :d]


def sqnorms(
    rows: Rows,
    items: Pieces,
    W: Float64,
    out: Any,
    *,
    basis: Float64 | None = None,
    arithmetic: Arithmetic = "double",
    ceiling: float = math.inf,
) -> None:
    """Write ``‖k W‖²`` (or ``‖k basis W‖²``) of every key of the matrices `items` to ``out[item]``.

    W and `basis` hold one upper-triangular matrix for each entry of `items`. Masked keys get 0, and what is more
    than `ceiling` becomes `ceiling`.
    """
    _, n, d = rows.shape
    X = _scratch(d, arithmetic)
    width = X.shape[1]
    work = float(len(items)) * n * d * d
    threads = _threads(work)
    span = n if len(items) >= 4 * threads else max(1, -(-n // _runs(work, threads)))
    span = max(1, -(-span // BLOCK) * BLOCK)
    starts = np.arange(0, n, span)
    tasks = np.empty((len(items), len(starts), 4), np.int64)
    tasks[:, :, 0] = np.arange(len(items))[:, None]
    tasks[:, :, 1] = items[:, None]
    tasks[:, :, 2] = starts
    tasks[:, :, 3] = np.minimum(starts + span, n)
    listed = tasks.reshape(-1, 4)
    view = view_of(rows, X.dtype)
    padded, turned, target = _padded(W, width), _padded(basis, width), scores_at(out)

    def body(first: int, last: int) -> None:
        if basis is None:
            sqnorm_tasks(view, padded, X, listed, first, last, ceiling, target)
        else:
            turned_sqnorm_tasks(view, turned, padded, X, listed, first, last, ceiling, target)

    _share(body, len(listed), work)


def projected_sqnorms(rows: Rows, items: Pieces, P: Float64, out: Any, arithmetic: Arithmetic, ceiling: float) -> None:
    """Write ``‖k P‖²`` of every key of the matrices `items` to ``out[item]``, for a P (d, k) for each of them.

    Products are those of BLAS, in float32 where the arithmetic is "single".
    """
    _, n, d = rows.shape
    kind = np.float32 if arithmetic == "single" else np.float64
    step = max(256, _PROJECTED // max(d, P.shape[2]))
    for slot, item in enumerate(items.tolist()):
        right = np.ascontiguousarray(P[slot], kind)
        for start in range(0, n, step):
            stop = min(start + step, n)
            Y = _read(rows, item, start, stop, kind) @ right
            out[item, start:stop] = np.minimum(np.einsum("ij,ij->i", Y, Y), ceiling)


def sketch_zeros(rows: Rows, size: int, dtype: npt.DTypeLike) -> Any:
    """Return an array for a sketch of each matrix, (b, size, d)."""
    return np.zeros((rows.shape[0], size, rows.shape[2]), dtype)


def scatter(rows: Rows, seed: int, stream: int, offset: int, blocks: int, size: int, out: Any) -> None:
    """Add sparse sketches of the matrices to `out`, (b, blocks · size, d), float32 or float64.

    Row r, whose number is offset + r, is added to one place in each block of `size` rows of the sketch, by the word of
    its number and the block: the lowest bit set stands for −1, the others choose the place (`levattn._core.random`).
    """
    b, n, d = rows.shape
    X = _scratch(d, "double" if rows.format == "float64" else "single")
    width = X.shape[1]
    parts = _partial_sketches(n * rows.keys.itemsize, blocks * size * out.itemsize)
    starts = [n * i // parts for i in range(parts + 1)]
    sums = np.zeros((b, parts, blocks * size, width), out.dtype)
    view = view_of(rows, X.dtype)
    keys = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)

    def body(task: int) -> None:
        item, part = divmod(task, parts)
        run = starts[part], starts[part + 1]
        scatter_rows(view, item, *run, *keys, stream, offset, blocks, size, X, sums[item, part])

    parallel_for(body, b * parts, threads=_threads(float(b) * n * d * blocks))
    out += _halved(sums)[:, :, :d]


def add_products(rows: Rows, S: Float64, out: Any) -> None:
    """Add S (size, n) times the rows of each matrix to `out`, (b, size, d)."""
    for item in range(rows.shape[0]):
        out[item] += S @ _read(rows, item, 0, rows.shape[1], np.float64)


def _partial_sketches(read: int, held: int) -> int:
    """Return how many sketches of parts of the rows are made and then added up, whatever the number of threads.

    There are enough of them for the threads, and few enough that adding them costs little beside reading the keys.
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


def subsampled_hadamard(
    rows: Rows, seed: int, streams: tuple[int, int], offset: int, block: int, chosen: Any, out: Any
) -> None:
    """Add subsampled Hadamard transforms of the matrices to `out`, (b, size, d), float32 or float64.

    Rows are numbered from `offset` on and lie in blocks of `block` (a power of two) by their numbers. Each gets the
    sign of the word of its number, in the first stream, and each block is transformed. Of the result the rows `chosen`
    are added up, with the signs of the words of the block's number, a column for each, in the second stream.
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
    kind = np.dtype(np.float64 if rows.format == "float64" else np.float32)
    view = view_of(rows, kind)
    keys = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
    panel = min(width, max(lanes, _TRANSFORMED // block // lanes * lanes))

    def body(task: int) -> None:
        item, part = divmod(task, parts)
        X = np.empty((block, panel), out.dtype)
        read = np.zeros((FIRST_ROWS, panel), kind)
        run = edges[part], edges[part + 1]
        hadamard_blocks(view, item, n, *run, *keys, streams, offset, chosen, read, X, sums[item, part])

    parallel_for(body, b * parts, threads=_threads(float(b) * n * d * block.bit_length()))
    out += _halved(sums)[:, :, :d]


def dense_sketch(rows: Rows, seed: int, stream: int, offset: int, normal: bool, out: Any) -> None:
    """Add dense sketches of the matrices to `out`, (b, size, d), in the precision of which rows are added up.

    Row r, whose number is offset + r, has as coefficients the normals of its number, or else the bits of its words as
    signs (see `levattn._core.random`).
    """
    b, n, d = rows.shape
    size = out.shape[1]
    X = _scratch(d, "double" if out.dtype == np.float64 else "single")
    parts = 1
    while parts < 64 and parts * max(128, 2 * size) <= n:
        parts *= 2
    starts = [n * i // parts for i in range(parts + 1)]
    sums = np.zeros((b, parts, -(-size // FULL_ROWS) * FULL_ROWS, X.shape[1]), out.dtype)
    view = view_of(rows, X.dtype)
    keys = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)

    def body(part: int) -> None:
        dense_rows(view, starts[part], starts[part + 1], *keys, stream, offset, normal, X, part, sums)

    parallel_for(body, parts, threads=_threads(float(b) * n * d * size))
    out += _halved(sums)[:, :size, :d]


def column_sums(rows: Rows) -> Float64:
    """Return the sums of the columns, (b, d), block by block and combined pairwise."""
    return _columns(rows, largest=False)


def column_maxima(rows: Rows) -> Float64:
    """Return the largest magnitude in each column, (b, d)."""
    return _columns(rows, largest=True)


def _columns(rows: Rows, *, largest: bool) -> Float64:
    b, n, d = rows.shape
    out = np.zeros((b, d))
    view = view_of(rows)

    def body(first: int, last: int) -> None:
        column_tasks(view, n, BLOCK, largest, first, last, out)

    _share(body, b, float(b) * n * d * 8)
    return out


def nonfinite_rows(rows: Rows, item: int, limit: int) -> list[int]:
    """Return the first rows of one matrix (at most `limit`) that hold NaN or infinity and are not masked."""
    found = np.empty(limit, np.int64)
    count = nonfinite_scan(view_of(rows), rows.shape[1], item, found)
    return [int(r) for r in found[:count]]


def inverse_cholesky(G: Float64, shift: float) -> tuple[Float64, Float64, Float64]:
    """Factor small matrices; the contract is that of `levattn._kernels.inverse_cholesky`."""
    G = np.ascontiguousarray(G)
    W = np.zeros_like(G)
    pivot, reach = np.empty(len(G)), np.empty(len(G))
    if G.shape[1] >= WIDE:
        wide_cholesky(G, shift, W, pivot, reach)
        return W, pivot, reach
    _share(
        lambda first, last: cholesky_tasks(G, shift, first, last, W, pivot, reach),
        len(G),
        float(len(G)) * G.shape[1] ** 3,
    )
    return W, pivot, reach


def query_norms(Q: Float64, N: Float64) -> tuple[Float64, Float64]:
    """Return the normalisers of queries; the contract is that of `levattn._kernels.query_norms`."""
    Q, columns = np.ascontiguousarray(Q), np.ascontiguousarray(N.T)
    squares, bounds = np.empty(len(Q)), np.empty(len(Q))
    for A, B, out in ((Q, columns, squares), (np.abs(Q), np.abs(columns), bounds)):

        def body(first: int, last: int, A: Float64 = A, B: Float64 = B, out: Float64 = out) -> None:
            norm_tasks(A, B, first, last, out)

        _share(body, len(Q), float(len(Q)) * N.size)
    return squares, bounds


def heavy_entries(
    Q: Float64, keys: Float64, indices: Any, normalizers: Float64, epsilon: float
) -> tuple[Any, Any, Float64, Float64]:
    """Extract heavy entries; the contract is that of `levattn._kernels.heavy_entries`."""
    m = len(Q)
    Q, columns = np.ascontiguousarray(Q), np.ascontiguousarray(keys.T)
    work = float(m) * keys.size
    starts, captured = np.zeros(m + 1, np.int64), np.empty(m)
    found, values = np.empty(0, np.int64), np.empty(0)

    def body(first: int, last: int) -> None:
        heavy_tasks(Q, columns, indices, normalizers, epsilon, first, last, starts, captured, found, values)

    _share(body, m, work)
    np.cumsum(starts, out=starts)
    if starts[-1]:
        found, values = np.empty(starts[-1], np.int64), np.empty(starts[-1])
        _share(body, m, work)
    return starts, found, values, captured


def precise_products(Q: Float64, keys: Float64) -> Float64:
    """Multiply queries by keys; the contract is that of `levattn._kernels.precise_products`."""
    columns = np.ascontiguousarray(keys.T)
    Z = np.empty((len(Q), len(keys)))
    _share(lambda first, last: product_tasks(Q, columns, first, last, Z), len(Q), 10.0 * len(Q) * keys.size)
    return Z


def precise_solutions(B: Float64, Q: Float64) -> Float64:
    """Solve triangular systems; the contract is that of `levattn._kernels.precise_solutions`."""
    columns = np.ascontiguousarray(B.T)
    X = np.empty_like(Q)
    _share(lambda first, last: solve_tasks(columns, Q, first, last, X), len(Q), 5.0 * len(Q) * B.size)
    return X


def twofold_product(pairs: Iterable[tuple[Float64, Float64]], d: int, *, symmetric: bool) -> tuple[Float64, Float64]:
    """Sum up products in twofold arithmetic; the contract is that of `levattn._kernels.twofold_product`."""
    width = -(-d // WIDTH) * WIDTH
    high, low = np.zeros((width, width)), np.zeros((width, width))
    for A, X in pairs:
        right = _wider(X, width)
        left = right if A is X else _wider(A, width)
        work = 10.0 * len(X) * width * width / (2 if symmetric else 1)
        threads = _threads(work)
        parts = 4 * threads if symmetric and threads > 1 else threads  # the first rows of a triangle are longer
        edges = np.linspace(0, width // TALL, parts + 1).astype(int) * TALL

        def body(part: int, left: Float64 = left, right: Float64 = right, edges: Any = edges) -> None:
            product_rows(left, right, edges[part], edges[part + 1], symmetric, high, low)

        if len(X):
            parallel_for(body, parts, threads=threads)
    high, low = high[:d, :d], low[:d, :d]
    if symmetric:
        high, low = (np.triu(a) + np.triu(a, 1).T for a in (high, low))
    return np.ascontiguousarray(high), np.ascontiguousarray(low)


def _wider(X: Float64, width: int) -> Float64:
    """Return a C array of X with columns of zeros on the right, X itself where it is one."""
    if X.shape[1] == width and X.flags.c_contiguous:
        return X
    out = np.zeros((len(X), width))
    out[:, : X.shape[1]] = X
    return out
