"""Keys with fewer rows than columns: some independent columns represent all columns.

The attention that a key can receive depends only on the column space of the keys, and as many columns as the rank span
it. So levattn factors these columns in place of the keys, as they are stored: nothing is rounded. If their number is
the number of rows, the rows are independent. Each row then has a query that is orthogonal to all others, and score 1.
Rows less their mean have one direction less. If n rows have n - 1 of them, each row's score is 1 - 1/n.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import array_namespace, to_device, to_numpy
from levattn._core.types import Flags, Float64
from levattn._kernels import Rows
from levattn.linalg.gram import UNIT
from levattn.linalg.reading import as_read
from levattn.linalg.span import Span, nonzero_rows

__all__ = ["Wide"]

Places = npt.NDArray[np.int64]

_SMALL_PIVOT = 2.0**-26  # of scaled rows; columns with smaller pivots come later


@dataclass(frozen=True, eq=False)
class Wide:
    """A batch of keys with fewer rows than columns, and the columns that are factored.

    rows: the original keys.

    columns: (b, n), independent columns with the same span as all columns; -1 fills up the places that are left.

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
        found = [_columns(rows.item(item), largest[item]) for item in range(rows.shape[0])]
        columns = np.full(
            (len(found), max(rows.shape[1], 1)), -1
        )  # the same width for all ranks, so that a batch changes no bits
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

    def held(self) -> Wide:
        """Return a copy with keys of its own."""
        xp = array_namespace(self.rows.keys)
        return replace(self, rows=replace(self.rows, keys=xp.asarray(self.rows.keys, copy=True)))

    def picked(self, rows: Rows) -> Rows:
        """Return the chosen columns of rows of the batch."""
        xp = array_namespace(rows.keys)
        there = self.columns >= 0
        keys = []
        for item, columns in enumerate(np.where(there, self.columns, 0)):
            some = xp.take(rows.keys[item, :, :], to_device(columns, rows.keys), axis=1)
            keys.append(
                some if there[item].all() else xp.where(to_device(there[item], some), some, xp.zeros_like(some))
            )
        places, scale, shift = np.where(there, self.columns, 0), rows.scale, rows.shift
        if scale is not None:
            scale = np.where(there, np.take_along_axis(scale, places, axis=1), 1.0)
        if shift is not None:
            shift = np.where(there[:, None], np.take_along_axis(shift, places[:, None], axis=2), 0.0)
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
    from scipy.linalg.lapack import dgetrf

    stored = as_read(replace(rows, shift=None))
    live = np.any(stored != 0, axis=1)
    if rows.shift is not None:  # zeros belong to the mean
        live = np.ones(len(live), np.bool_) if rows.mask is None else to_numpy(rows.mask)[0]
    stored = stored[live]
    m, d = stored.shape
    if not m:
        return np.zeros(0, np.int64), True, True
    read, ones = stored, np.zeros((m, 0))
    if rows.shift is not None:  # a column of ones, independent of the centered columns, stands for the mean
        read, ones = as_read(rows)[live], np.ones((m, 1))
    most = m - ones.shape[1]
    X = _tame(read, np.frexp(largest)[1])
    triangle, swaps, _ = dgetrf(X.T, overwrite_a=True)  # of the transpose, so that it pivots columns
    order = np.arange(d)
    for here, there in enumerate(swaps.tolist()):
        order[[here, there]] = order[[there, here]]
    small = np.abs(np.diagonal(triangle)) <= _SMALL_PIVOT  # rows that are dependent, or nearly so
    del triangle, X
    order = np.concatenate([order[:m][~small], order[:m][small], order[m:]])
    columns = order[:most]
    clear = _is_regular(np.hstack([ones, read[:, columns]]))
    if not clear:
        vectors = np.hstack([ones, stored[:, order]]).T
        chosen = _independent(vectors, min(m - int(small.sum()) + m - most, m)) - (m - most)
        columns = order[chosen[chosen >= 0]]
    return np.sort(columns), len(columns) == most, clear


def _independent(vectors: Float64, first: int) -> Places:
    """Return the indices of vectors (d, m) independent of earlier ones, exactly; the `first` ones likely are."""
    rows = Rows(vectors[None], "float64")
    span, chosen = Span.of(rows.between(0, first)), list(range(first))
    if span.rank < first:
        span, chosen = Span.nothing(vectors.shape[1]), []
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
        X = np.linalg.inv(A)
    except np.linalg.LinAlgError:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        distance = np.sum(np.abs(X @ A - np.eye(len(A))), axis=1)
        rounding = 4 * (len(A) + 4) * UNIT * (np.abs(X) @ np.sum(np.abs(A), axis=1))
        return bool(np.max(distance + rounding) < 0.5)
