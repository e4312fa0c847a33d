"""Second moments and squared norms on the CPU: by BLAS, or by Numba code in threads that run without the GIL."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from levattn._core.blas import lapack
from levattn._core.threads import num_threads
from levattn._core.types import Float64, Int64
from levattn._kernels.gram import Norms
from levattn._kernels.gram.beside import add_in_pairs, moment_and_sqnorm_tasks
from levattn._kernels.gram.in_basis import moment_in_basis_tasks, sqnorm_in_basis_tasks
from levattn._kernels.gram.moments import moment_tasks
from levattn._kernels.gram.sample import unevenness_tasks
from levattn._kernels.gram.squares import scores_at, sqnorm_tasks
from levattn._kernels.jit import SCORE_VECTORS, VECTOR_BYTES
from levattn._kernels.pairwise import pairwise_sum
from levattn._kernels.rows import BLOCK, Arithmetic, Pieces, Rows
from levattn._kernels.rows.compiled import view_of
from levattn._kernels.rows.cpu import digested, scratch_like, stored_rows
from levattn._kernels.tasks import runs, share, share_one_by_one, threads_for

BLAS_COLUMNS = 2048
LAPACK_COLUMNS = 512


def blas_moments(read: Callable[[int, int, int], Float64], pieces: Pieces, out: Float64) -> None:
    """Write the second moment of each piece's rows; `read` returns some rows of a matrix in float64.

    Blocks are summed in pairs, pairs of pairs, and so on.
    """
    for t, (_, item, start, stop) in enumerate(pieces.tolist()):
        blocks = (read(item, low, min(low + BLOCK, stop)) for low in range(start, stop, BLOCK))
        out[t] = pairwise_sum(X.T @ X for X in blocks)


def lapack_cholesky(G: Float64, shift: float, W: Float64, pivot: Float64, inverse_norm_bound: Float64) -> None:
    """Factor matrices by LAPACK, as `cholesky_tasks` of `factor` does."""
    from scipy.linalg.lapack import dpotrf, dtrtri

    for item, moment in enumerate(G):
        c = np.sqrt(np.diagonal(moment))
        live = np.flatnonzero(c > 0)
        pivot[item], inverse_norm_bound[item] = np.inf, 0.0
        if not len(live):
            continue
        part = np.ix_(live, live) if len(live) < len(c) else (slice(None), slice(None))
        scale = 1 / c[live]
        scaled = moment[part] * scale
        scaled *= scale[:, None]
        np.fill_diagonal(scaled, 1.0 + shift)
        R, failed = lapack(dpotrf, scaled.T, overwrite_a=True)  # symmetric, and in the order of LAPACK
        if failed:
            pivot[item], inverse_norm_bound[item] = 0.0, np.inf
            continue
        pivot[item] = float(np.min(np.diagonal(R))) ** 2
        inverse = lapack(dtrtri, R, overwrite_c=True)[0]
        sizes = np.abs(inverse)
        inverse_norm_bound[item] = float(sizes.sum(axis=0).max() * sizes.sum(axis=1).max())
        W[item][part] = inverse * scale[:, None]


SINGLE_UNIT = 2.0**-24  # float32, in which entries are multiplied
_PROJECTED = 1 << 20  # numbers of keys that are projected at a time
_WIDE = 1024  # columns from which adding up runs takes long
_PIECE = 256  # rows of which each task scores a multiple
_SHORT = BLOCK // 2  # rows that are summed before sums are combined in pairs, up to _NARROW columns
_NARROW = 256  # columns up to which short sums cost little, so that two threads can share a block
_LONGEST = 63  # the level of a run longer than any


def _padded(matrices: Float64 | None, width: int) -> Float64:
    if matrices is None:
        return np.zeros((0, 0, 0))
    b, d, _ = matrices.shape
    if d == width:
        return np.ascontiguousarray(matrices)
    wide: Float64 = np.zeros((b, width, width))
    wide[:, :d, :d] = matrices
    return wide


def _panels(W: Float64, X: Any) -> Any:
    """Return the panels of some matrices, as `pack_panels` makes them, once for all threads and tasks."""
    columns, width = X.shape[1], SCORE_VECTORS * (VECTOR_BYTES // X.itemsize)
    count = -(-columns // width)
    split = _padded(W, count * width)[:, :columns].reshape(len(W), columns, count, width)
    with np.errstate(over="ignore"):  # numbers beyond the range of float32 become infinite
        return np.ascontiguousarray(split.swapaxes(1, 2), X.dtype)


def levels_of(pieces: Pieces, unit: int = BLOCK) -> int:
    """Return the number of partial sums that the longest piece holds while sums of `unit` rows are paired."""
    return _levels(max((stop - start for _, _, start, stop in pieces.tolist()), default=0), unit)


def _levels(longest: int, unit: int) -> int:
    return 2 + max(0, -(-longest // unit) - 1).bit_length()


def unit_of(d: int) -> int:
    """Return how many rows are summed before sums are combined in pairs."""
    return _SHORT if d <= _NARROW else BLOCK


def longest_run(rows: Rows, items: int) -> int:
    """Return the level of the longest run of blocks that one thread sums up: all threads must get runs."""
    blocks = -(-rows.shape[1] // BLOCK)
    threads = 1 if blocks <= 1 else num_threads()
    if threads == 1 or items >= 4 * threads:
        return _LONGEST
    each = (1, 2) if rows.shape[2] >= _WIDE else (4, 8)  # runs of a thread
    few, many = (max(0, (blocks // (count * threads)).bit_length() - 1) for count in each)
    return min(few, max(many, 4))  # more runs for each thread if they stay long


def shares(rows: Rows, items: int) -> int:
    """Return of how many shares of the rows that are left a piece is one at most, so that threads end together."""
    threads = num_threads()
    if threads == 1 or items >= 4 * threads:
        return 1
    return 2 * threads if rows.shape[2] <= _NARROW else threads


def moments(rows: Rows, pieces: Pieces, *, basis: Float64 | None = None, arithmetic: Arithmetic = "double") -> Float64:
    """Return the second moment of each piece's rows; see `GramKernels`."""
    d = rows.shape[2]
    if d >= BLAS_COLUMNS and basis is None and arithmetic == "double":
        whole: Float64 = np.empty((len(pieces), d, d))
        blas_moments(lambda item, start, stop: stored_rows(rows, item, start, stop, np.float64), pieces, whole)
        return whole
    X = scratch_like(d, arithmetic)
    width = X.shape[1]
    out = np.empty((len(pieces), width, width))
    view = view_of(rows, X.dtype)
    padded = _padded(basis, width)
    unit = unit_of(d) if basis is None else BLOCK
    levels = levels_of(pieces, unit)
    work = float((pieces[:, 3] - pieces[:, 2]).sum()) * d * d

    def body(first: int, last: int) -> None:
        if basis is None:
            moment_tasks(view, X, unit, levels, pieces, first, last, out)
        else:
            exact = arithmetic == "compensated"
            moment_in_basis_tasks(view, padded, exact, X, BLOCK, levels, pieces, first, last, out)

    every = basis is None and int((pieces[:, 3] - pieces[:, 2]).sum()) == rows.shape[0] * rows.shape[1]
    with digested(rows, view, every):
        share(body, len(pieces), work)
    return out[:, :d, :d]


def unevenness(rows: Rows) -> Float64:
    """Return how uneven the directions of a few rows of each matrix are, (b,), by sums in float32.

    With columns scaled to unit norm and the moment C of m rows, it is ‖C‖²/d − d/m.
    """
    b, n, d = rows.shape
    whole = np.array([[i, i, 0, n] for i in range(b)], np.int64).reshape(-1, 4)
    G = np.ascontiguousarray(moments(rows, whole, arithmetic="single"))
    found = np.empty(b)
    share(lambda first, last: unevenness_tasks(G, n, first, last, found), b, float(b) * d * d)
    return found


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
    """Write ``‖k W‖²`` (or ``‖k basis W‖²``) of every key; see `GramKernels`."""
    _, n, d = rows.shape
    X = scratch_like(d, arithmetic)
    width = X.shape[1]
    work = float(len(items)) * n * d * d
    threads = threads_for(work)
    span = n if len(items) >= 4 * threads else max(1, -(-n // runs(work, threads)))
    span = max(1, -(-span // _PIECE) * _PIECE)
    starts = np.arange(0, n, span)
    tasks = np.empty((len(items), len(starts), 4), np.int64)
    tasks[:, :, 0] = np.arange(len(items))[:, None]
    tasks[:, :, 1] = items[:, None]
    tasks[:, :, 2] = starts
    tasks[:, :, 3] = np.minimum(starts + span, n)
    listed = tasks.reshape(-1, 4)
    view = view_of(rows, X.dtype)
    target = scores_at(out)
    if basis is None:
        panels = _panels(W, X)
        with digested(rows, view, len(items) == rows.shape[0]):
            share(lambda *run: sqnorm_tasks(view, panels, X, listed, *run, ceiling, target), len(listed), work)
    else:
        matrices = _padded(basis, width), _padded(W, width)
        share(lambda *run: sqnorm_in_basis_tasks(view, *matrices, X, listed, *run, ceiling, target), len(listed), work)


def moments_and_sqnorms(rows: Rows, pieces: Pieces, groups: Int64, scored: Rows, norms: Norms, out: Any) -> Float64:
    """Return the second moments of groups of pieces, and write ``‖k W‖²`` of the same rows of `scored` to `out`.

    A piece is read from memory once; slots are items. The pieces of a group (first, number) are added in pairs, see
    `add_in_pairs`.
    """
    d = rows.shape[2]
    total: Float64 = np.empty((len(groups), d, d))
    if d >= BLAS_COLUMNS:
        sqnorms(scored, np.arange(len(norms.W)), norms.W, out, arithmetic=norms.arithmetic)
        add_in_pairs(moments(rows, pieces), pieces, groups, total)
        return total
    X, Y = scratch_like(d, "double"), scratch_like(d, norms.arithmetic)
    width, unit = X.shape[1], unit_of(d)
    sums = np.empty((len(pieces), width, width))
    view, view_scored, target = view_of(rows, X.dtype), view_of(scored, Y.dtype), scores_at(out)
    if norms.panels is None:
        norms.panels = _panels(norms.W, Y)
    lengths = pieces[:, 3] - pieces[:, 2]
    levels = _levels(int(lengths.max(initial=0)), unit)

    summed, written = (view, X, unit, levels, sums), (view_scored, norms.panels, Y, math.inf, target)

    def body(place: Int64, most: int) -> None:
        moment_and_sqnorm_tasks(*summed, *written, pieces, place, most)

    share_one_by_one(body, len(pieces), 2 * float(lengths.sum()) * d * d)
    add_in_pairs(sums, pieces, groups, total)
    return total


def projected_sqnorms(rows: Rows, items: Pieces, P: Float64, out: Any, arithmetic: Arithmetic, ceiling: float) -> None:
    """Write ``‖k P‖²`` of every key, by products of BLAS, in float32 where the arithmetic is "single"."""
    _, n, d = rows.shape
    kind = np.float32 if arithmetic == "single" else np.float64
    step = max(256, _PROJECTED // max(d, P.shape[2]))
    for slot, item in enumerate(items.tolist()):
        right = np.ascontiguousarray(P[slot], kind)
        for start in range(0, n, step):
            stop = min(start + step, n)
            Y = stored_rows(rows, item, start, stop, kind) @ right
            out[item, start:stop] = np.minimum(np.einsum("ij,ij->i", Y, Y), ceiling)
