"""Keys with fewer rows than columns: some independent columns represent all columns.

The attention that a key can receive depends only on the column space of the keys, and as many columns as the rank span
it. So levattn factors these columns in place of the keys, as they are stored: nothing is rounded. If their number is
the number of rows, the rows are independent. Each row then has a query that is orthogonal to all others, and score 1.
Rows less their mean have one direction less. If n rows have n - 1 of them, each row's score is 1 - 1/n.

Sparse keys are not written out, unless they are less a mean. First, a column with one entry is chosen and its row is
done with, again and again. The places of the entries prove that such columns are independent. The rest is chosen from
dense blocks of columns, with as many rows as are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import array_namespace, to_device, to_numpy
from levattn._core.blas import lapack
from levattn._core.sparse import Csr
from levattn._core.types import Flags, Float64
from levattn._kernels import Rows
from levattn.linalg.accumulator import UNIT
from levattn.linalg.reading import as_read
from levattn.linalg.span import Span, nonzero_rows

Places = npt.NDArray[np.int64]

_SMALL_RESIDUAL = 2.0**-44  # of a column less those before it; columns with smaller ones may be dependent
_SMALL_PIVOT = 2.0**-26  # of scaled rows; columns with smaller pivots come later
_LARGEST_INVERSE = 2.0**5  # norm of a column of the inverse of a triangle of sparse columns
_NUMBERS = 1 << 20  # of sparse columns that are written out together, at least


@dataclass(frozen=True, eq=False)
class Wide:
    """A batch of keys with fewer rows than columns, and the columns that are factored.

    rows: the original keys.

    columns: (b, n), independent columns with the same span as all columns; -1 fills up the places that are left. For
        sparse keys there may be fewer places, and the columns are all that are not zero if these are fewer than n.

    independent: (b,), True for matrices whose nonzero rows are proven independent, but for the sum of rows less their
    mean.

    clear: (b,), True for the independent matrices for which float64 is enough for the proof.
    """

    rows: Rows
    columns: Places
    independent: npt.NDArray[np.bool_]
    clear: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Rows, largest: Float64) -> Wide:
        """Choose the columns of finite keys; largest: (b, d), the largest entry of each column."""
        sparse = isinstance(rows.keys, Csr)
        if sparse and rows.shift is None:
            found = [_sparse_columns(rows, largest[0])]
        else:  # rows less their mean are not sparse
            written = replace(rows, keys=rows.keys.to_dense()) if isinstance(rows.keys, Csr) else rows
            found = [_columns(written.item(item), largest[item]) for item in range(rows.shape[0])]
        # the same width for all ranks, so that a batch changes no bits; sparse keys have none
        width = len(found[0][0]) if sparse else rows.shape[1]
        columns = np.full((len(found), max(width, 1)), -1)
        for item, (some, _, _) in enumerate(found):
            columns[item, : len(some)] = some
        whole = np.array([every for _, every, _ in found], np.bool_)
        return cls(rows, columns, whole, whole & np.array([clear for _, _, clear in found], np.bool_))

    def item(self, index: int) -> Wide:
        """Return one matrix as a batch of one."""
        one = slice(index, index + 1)
        return Wide(self.rows.item(index), self.columns[one], self.independent[one], self.clear[one])

    def live(self, rows: Rows) -> Flags:
        """Tell which rows of a batch of one are not zero; if they are less a mean, which rows take part."""
        if rows.shift is None:
            return nonzero_rows(rows)
        return np.ones(rows.shape[1], np.bool_) if rows.mask is None else to_numpy(rows.mask)[0]

    def score(self, item: int) -> float:
        """Return the score of the live rows of an independent matrix."""
        if self.rows.shift is None:
            return 1.0
        return 1 - 1 / max(int(np.count_nonzero(self.live(self.rows.item(item)))), 1)

    def among(self, rows: Rows, places: Places) -> Wide:
        """Return the choice for keys that have these keys as their columns at some places, and zeros elsewhere."""
        return replace(self, rows=rows, columns=np.where(self.columns >= 0, places[self.columns], -1))

    def held(self) -> Wide:
        """Return a copy with keys of its own."""
        keys = self.rows.keys
        if isinstance(keys, Csr):
            return replace(self, rows=replace(self.rows, keys=keys.take(np.arange(len(keys.counts)))))
        return replace(self, rows=replace(self.rows, keys=array_namespace(keys).asarray(keys, copy=True)))

    def picked(self, rows: Rows) -> Rows:
        """Return the chosen columns of rows of the batch."""
        there = self.columns >= 0
        places, scale, shift = np.where(there, self.columns, 0), rows.scale, rows.shift
        if scale is not None:
            scale = np.where(there, np.take_along_axis(scale, places, axis=1), 1.0)
        if shift is not None:
            shift = np.where(there[:, None], np.take_along_axis(shift, places[:, None], axis=2), 0.0)
        if isinstance(rows.keys, Csr):
            return replace(rows, keys=rows.keys.columns(self.columns[0]), scale=scale, shift=shift)
        xp, keys = array_namespace(rows.keys), []
        for item, columns in enumerate(np.where(there, self.columns, 0)):
            some = xp.take(rows.keys[item, :, :], to_device(columns, rows.keys), axis=1)
            keys.append(
                some if there[item].all() else xp.where(to_device(there[item], some), some, xp.zeros_like(some))
            )
        return replace(rows, keys=xp.stack(keys), scale=scale, shift=shift)

    def gathered(self, k: Float64, item: int) -> Float64:
        """Return the chosen columns of some rows (..., d) of one matrix."""
        there = self.columns[item] >= 0
        return np.where(there, k[..., np.where(there, self.columns[item], 0)], 0.0)

    def spread(self, q: Float64, item: int) -> Float64:
        """Return queries in the chosen columns of one matrix as queries in all columns."""
        there = self.columns[item] >= 0
        out = np.zeros((*q.shape[:-1], self.rows.shape[2]))
        out[..., self.columns[item][there]] = q[..., there]
        return out


def _columns(rows: Rows, largest: Float64) -> tuple[Places, bool, bool]:
    """Return independent columns of one matrix with the same span as all its columns.

    Also tell whether its rows are independent, and whether float64 proves it.
    """
    exact = as_read(replace(rows, shift=None, scale=None))  # entries may vanish by a scale, which changes no span
    live = np.any(exact != 0, axis=1)
    if rows.shift is not None:  # zeros belong to the mean
        live = np.ones(len(live), np.bool_) if rows.mask is None else to_numpy(rows.mask)[0]
    exact, read = exact[live], as_read(rows)[live]
    m = len(exact)
    if not m:
        return np.zeros(0, np.int64), True, True
    # a column of ones, independent of the centered columns, stands for the mean
    ones = np.zeros((m, 0)) if rows.shift is None else np.ones((m, 1))
    most = m - ones.shape[1]
    exponents = np.frexp(largest)[1]
    order, _ = _pivoted(_tame(read, exponents))
    columns = order[:most]
    clear = len(columns) == most and _is_regular(np.hstack([ones, read[:, columns]]))
    if not clear:
        likely = _leading(read, exponents)
        order = np.concatenate([likely, order[~np.isin(order, likely)]])
        vectors = Rows(np.hstack([ones, exact[:, order]]).T[None], "float64")
        chosen = _independent(vectors, min(len(likely) + m - most, m)) - (m - most)
        columns = order[chosen[chosen >= 0]]
    return np.sort(columns), len(columns) == most, clear


def _pivoted(X: Float64) -> tuple[Places, int]:
    """Return the columns of a matrix in an order, and how many come first, which are likely independent."""
    from scipy.linalg.lapack import dgetrf

    m, d = X.shape
    if d < m:  # no column needs to be chosen for its row
        small = np.abs(np.diagonal(lapack(dgetrf, X)[0])) <= _SMALL_PIVOT
        return np.concatenate([np.flatnonzero(~small), np.flatnonzero(small)]), d - int(small.sum())
    triangle, swaps, _ = lapack(dgetrf, X.T, overwrite_a=True)  # of the transpose, so that it pivots columns
    order = np.arange(d)
    for here, there in enumerate(swaps.tolist()):
        order[[here, there]] = order[[there, here]]
    small = np.abs(np.diagonal(triangle)) <= _SMALL_PIVOT  # rows that are dependent, or nearly so
    return np.concatenate([order[:m][~small], order[:m][small], order[m:]]), m - int(small.sum())


def _clear_of(A: Float64, exponents: npt.NDArray[np.int32]) -> Places:
    """Return columns of a matrix that are likely independent, by LU."""
    order, count = _pivoted(_tame(A, exponents))
    return order[:count]


def _leading(A: Float64, exponents: npt.NDArray[np.int32]) -> Places:
    """Return columns of a matrix that are likely independent and well-conditioned, by QR with column pivoting.

    Rows stay as they are, because they decide how well-conditioned columns are.
    """
    from scipy.linalg import qr

    R, order = lapack(qr, np.ldexp(A, -exponents), mode="r", pivoting=True, check_finite=False)
    sizes = np.abs(np.diagonal(R))
    return np.asarray(order[: len(sizes)][sizes > _SMALL_RESIDUAL * sizes.max(initial=0.0)], np.int64)


def _sparse_columns(rows: Rows, largest: Float64) -> tuple[Places, bool, bool]:
    """Return the columns that `_columns` chooses for sparse keys, without all of a dense copy."""
    present = np.arange(rows.shape[1]) if rows.mask is None else np.flatnonzero(rows.mask[0])
    keys = rows.keys.take(present)
    if not keys.entries()[1].all():
        keys = keys.transposed().transposed()  # without entries that are zero
    alone, left = _one_by_one(keys, largest)
    of_columns = keys.take(left).transposed()
    rest = np.flatnonzero(of_columns.counts)
    vectors, exponents = of_columns.take(rest), np.frexp(largest[rest])[1]
    m = len(left)
    step = max(2 * m, _NUMBERS // max(m, 1))

    def best(choose: Callable[[Float64, npt.NDArray[np.int32]], Places]) -> Places:
        found = np.zeros(0, np.int64)
        for start in range(0, len(rest), step):  # the best columns so far, and others
            tried = np.concatenate([found, np.arange(start, min(start + step, len(rest)))])
            found = tried[choose(_dense(vectors, tried), exponents[tried])]
            if len(found) == m:
                break
        return found

    likely = best(_clear_of)
    clear = len(likely) == m and (not m or _is_regular(_dense(vectors, likely)))
    if not clear:
        likely = best(_leading)
        order = np.concatenate([likely, np.setdiff1d(np.arange(len(rest)), likely)])
        likely = order[_independent(Rows(vectors.take(order), rows.format), len(likely))]
    return np.sort(np.concatenate([alone, rest[likely]])), len(likely) == m, clear


def _dense(vectors: Csr, columns: Places) -> Float64:
    """Return some sparse columns, which are rows here, as a dense matrix."""
    return np.asarray(vectors.take(columns).to_dense()[0].T, np.float64)


def _one_by_one(keys: Csr, largest: Float64) -> tuple[Places, Places]:
    """Return columns with a single entry in rows that earlier ones leave, and the nonzero rows that are left at last.

    The columns with these rows form a triangle. If columns are scaled to entries of at most 1, columns of its inverse
    have norms below `_LARGEST_INVERSE`.
    """
    n, d = keys.shape[1:]
    of_columns = keys.transposed()
    count, number = of_columns.counts, np.zeros(d, np.int64)
    np.add.at(number, np.repeat(np.arange(d), of_columns.counts), of_columns.entries()[0])  # of one row, the row
    left, norms, chosen = keys.counts > 0, np.zeros(n), [np.zeros(0, np.int64)]
    while True:
        alone = np.flatnonzero(count == 1)
        some = of_columns.take(alone)
        rows, values = some.entries()
        sizes = np.abs(values) / np.repeat(largest[alone], some.counts)
        starts = some.indptr[:-1]
        pivots = np.add.reduceat(sizes * left[rows], starts) if len(alone) else np.zeros(0)
        with np.errstate(over="ignore", divide="ignore"):  # a pivot may vanish beside the largest of its column
            inverse = (1 + np.add.reduceat(sizes * norms[rows], starts)) / pivots if len(alone) else pivots
        sound = inverse < _LARGEST_INVERSE
        alone, inverse = alone[sound], inverse[sound]
        done, first = np.unique(number[alone], return_index=True)
        if not len(done):
            return np.concatenate(chosen), np.flatnonzero(left)
        chosen.append(alone[first])
        left[done], norms[done] = False, inverse[first]
        gone = keys.take(done)
        np.subtract.at(count, gone.entries()[0], 1)
        np.subtract.at(number, gone.entries()[0], np.repeat(done, gone.counts))


def folded(rows: Rows, largest: Float64) -> tuple[Rows, int]:
    """Return dense keys with as many columns as rows and the products of sparse keys, less a power of two, and it."""
    n, powers = rows.shape[1], np.zeros(rows.shape[2], np.int32)
    if rows.scale is not None:  # a ridge is of the columns as they were
        powers = np.frexp(rows.scale[0])[1] - 1
    top = np.max((np.frexp(largest[0])[1] - powers)[largest[0] > 0], initial=-1100)
    of_columns, shift, R = rows.keys.transposed(), rows.shift, np.zeros((n, n))
    if shift is None:  # columns with one entry in the same row are one column
        alone = np.flatnonzero(of_columns.counts == 1)
        places, values = of_columns.take(alone).entries()
        values = values.astype(np.float64)
        if rows.mask is not None:  # before they are scaled, as they may be too large for it
            values[~rows.mask[0][places]] = 0.0
        values = np.ldexp(values, -top)
        sizes = np.zeros(n)  # a row may be so much smaller than others that its squares underflow
        np.maximum.at(sizes, places, np.abs(values))
        units = np.where(sizes > 0, sizes, 1.0)
        np.fill_diagonal(R, sizes * np.sqrt(np.bincount(places, (values / units[places]) ** 2, minlength=n)))
        of_columns = of_columns.take(np.flatnonzero(of_columns.counts > 1))
    step = max(2 * n, _NUMBERS // n)
    for start in range(0, len(of_columns.counts), step):
        part = slice(start, start + step)
        keys = np.ascontiguousarray(of_columns[:, part, :].to_dense().transpose(0, 2, 1))
        scale, own = (None, 0) if rows.scale is None else (rows.scale[:, part], powers[part])
        some = replace(rows, keys=keys, shift=None if shift is None else shift[:, :, part], scale=scale)
        R = np.asarray(lapack(np.linalg.qr, np.vstack([R, np.ldexp(as_read(some), -top - own).T]), mode="r"))
    return Rows(np.ascontiguousarray(R.T)[None], "float64", rows.mask), int(top)


def _independent(rows: Rows, first: int) -> Places:
    """Return the indices of rows (1, d, m) independent of earlier ones, exactly; the `first` ones likely are."""
    span, chosen = Span.of(rows.between(0, first)), list(range(first))
    if span.rank < first:
        span, chosen = Span.nothing(rows.shape[2]), []
    while (outside := span.outside(rows)).any():
        chosen.append(int(np.argmax(outside)))
        span = span.extended(rows.between(chosen[-1], chosen[-1] + 1))
    return np.array(chosen, np.int64)


def _tame(A: Float64, exponents: npt.NDArray[np.int32]) -> Float64:
    """Divide columns by given powers of two, and then rows by powers of two such that no entry exceeds 1."""
    out = np.ldexp(A, -exponents)
    sizes = np.frexp(np.max(np.abs(out), axis=1, initial=0.0))[1]
    np.ldexp(out, -sizes[:, None], out=out)
    return np.asarray(out)


def _is_regular(A: Float64) -> bool:
    """Tell whether a square matrix is proven to be regular: ``‖I − X A‖ < 1`` for some X, rounding included."""
    A = _tame(A, np.frexp(np.max(np.abs(A), axis=0, initial=0.0))[1])
    try:
        X = lapack(np.linalg.inv, A)
    except np.linalg.LinAlgError:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        distance = np.sum(np.abs(lapack(np.matmul, X, A) - np.eye(len(A))), axis=1)
        rounding = 4 * (len(A) + 4) * UNIT * (np.abs(X) @ np.sum(np.abs(A), axis=1))
        return bool(np.max(distance + rounding) < 0.5)
