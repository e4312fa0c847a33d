"""A sample of a distribution, a matrix S, and the sketch of rows that come in chunks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import as_matrices, to_device, to_numpy
from levattn._core.checks import batch_of, check_chunk, check_type, whole_number
from levattn._core.device import where_arrays_are
from levattn._core.serialize import StoredState, lock_of, locked, locked_with, shaped, whole
from levattn._core.types import Float64
from levattn._kernels import KEYS, Rows
from levattn.exceptions import NonFiniteError
from levattn.sketch.families import SKETCHES, Distribution

_ROWS = 2**62  # row numbers are below


@dataclass(frozen=True)
class Sketch:
    """A random matrix S of a distribution; the seed decides all of it.

    Parameters
    ----------
    distribution : Distribution
        The distribution of S.
    seed : int or numpy.random.Generator, optional
        The seed, at least 0 and below 2⁶⁴, in the place of the distribution's. A Generator gives its next seed.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another kind, or the seed out of range.

    Notes
    -----
    The number of a row decides its place, sign or normal, so these are the same in every chunk, thread, process and
    kind of array. The distribution states the time and memory of `apply`. With float32 sums, rounded, a `CountSketch`
    is about 1.4 times as fast.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.sketch import CountSketch, Sketch
    >>> S = Sketch(CountSketch(16))
    >>> K = np.arange(300.0).reshape(100, 3)
    >>> parts = S.apply(K[:30]) + S.apply(K[30:], row_start=30)
    >>> np.array_equal(parts, S.apply(K)), np.array_equal(S.matrix(0, 100) @ K, S.apply(K))
    (True, True)
    """

    distribution: Distribution
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check the distribution, and turn the seed into an integer."""
        if not isinstance(self.distribution, Distribution):
            raise TypeError(f"distribution is {self.distribution!r}; expected one such as CountSketch(1000)")
        if self.seed is not None:
            object.__setattr__(self, "distribution", replace(self.distribution, seed=self.seed))
        object.__setattr__(self, "seed", self.distribution.seed)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the fields of a pickle, of which earlier ones have the seed here alone."""
        vars(self).update(state)
        self.__post_init__()

    def matrix(self, start: int, stop: int) -> Float64:
        """Return the columns of S for the rows ``start:stop`` of K.

        Parameters
        ----------
        start, stop : int
            Numbers of the first row, and of the row after the last.

        Returns
        -------
        array of float64, shape (size, stop − start)
            Dense, including the scale.

        Raises
        ------
        TypeError, ValueError
            If the numbers are not whole, or not ``0 <= start <= stop <= 2**62``.
        """
        start, stop = whole_number("start", start, 0), whole_number("stop", stop, 0)
        if not start <= stop <= _ROWS:
            raise ValueError(f"start and stop are {start} and {stop}; expected 0 <= start <= stop <= 2**62")
        return self.distribution.columns(self.distribution.seed, start, stop - start) * self.distribution.scale

    @where_arrays_are
    def apply(self, K: Any, /, *, row_start: int = 0, mask: Any = None, dtype: npt.DTypeLike = np.float64) -> Any:
        """Return S K, for rows numbered from `row_start` on.

        Parameters
        ----------
        K : array of shape (..., n, d)
            Rows; kinds and dtypes as in `leverage_scores`, sparse ones too. All matrices of a batch get the same S.
        row_start : int, default 0
            Number of the first row.
        mask : array of bool, shape (..., n), optional
            True for a row that takes part.
        dtype : float64 or float32
            The dtype of the sums. float32 is faster and rounds them; it is not for float64 keys.

        Returns
        -------
        array of shape (..., size, d)
            In the kind of array of K, of the given dtype. For integer-valued K and a distribution with entries 0 and
            ±1, the sums before the scale are exact. So they have the same bits for all chunks of K.

        Raises
        ------
        TypeError, ValueError
            If an argument is wrong.
        NonFiniteError
            If the rows hold NaN or infinity outside the mask.
        """
        matrices = as_matrices(K, "K", sparse=True).masked(mask)
        kind = np.dtype(dtype)
        if kind not in (np.float64, np.float32) or (kind == np.float32 and matrices.format == "float64"):
            raise ValueError(
                f"dtype is {kind} for {matrices.format} keys; expected float64, or float32 for narrower keys"
            )
        rows = Rows.of(matrices)
        out = unscaled_sketch(self, rows, row_start, kind)
        return matrices.wrap((out * self.distribution.scale).astype(kind, copy=False))


def unscaled_sketch(sketch: Sketch, rows: Rows, row_start: int, dtype: npt.DTypeLike = np.float64) -> Any:
    """Return the unscaled sketch of a batch of rows, (b, size, d); raise for rows that are not finite."""
    row_start = whole_number("row_start", row_start, 0)
    if row_start > _ROWS - rows.shape[1]:
        raise ValueError(f"row_start is {row_start}; expected numbers of rows below 2**62")
    out = rows.sketch_zeros(sketch.distribution.size, dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # the code below finds and names values that are not finite
        sketch.distribution.add(rows, sketch.distribution.seed, row_start, out)
    if not np.isfinite(out).all():
        for item in range(rows.shape[0]):
            bad = [row_start + row for row in KEYS.nonfinite_rows(rows, item, 5)]
            if bad:
                where = f" of matrix {item} (leading axes flattened)" if rows.shape[0] > 1 else ""
                raise NonFiniteError(f"K holds NaN or infinity, first in rows {bad}{where}; expected finite rows")
        raise ValueError(f"K has entries so large that sums of them overflow {out.dtype}; scale K down")
    return out


class SketchedRows(StoredState, name="SketchedRows", version=1):
    """The sketch ``S K`` of rows that come in chunks, in any order, here or elsewhere.

    Sums are kept without the scale of S. For integer-valued rows and a distribution with entries 0 and ±1 they are
    exact. So they have the same bits for all chunks and all orders.

    Parameters
    ----------
    sketch : Sketch
        The matrix S.
    d : int
        Number of columns of the rows.
    batch : tuple of int
        Leading axes (batch, heads) of the rows.

    Attributes
    ----------
    count : int
        Number of rows so far, including masked ones.
    next_row : int
        The number of the row after the highest chunk so far.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.

    Notes
    -----
    Memory O(size · d) for each matrix, whatever the number of rows. The first rows on a CUDA device move it there.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.sketch import CountSketch, Sketch, SketchedRows
    >>> S = Sketch(CountSketch(16))
    >>> K = np.arange(300.0).reshape(100, 3)
    >>> here, there = SketchedRows(S, 3), SketchedRows(S, 3)
    >>> state = here.update(K[:40]).merge(there.update(K[40:], row_start=40))
    >>> np.array_equal(state.result(), S.apply(K)), state.count
    (True, 100)
    """

    def __init__(self, sketch: Sketch, d: int, batch: tuple[int, ...] = ()) -> None:
        if not isinstance(sketch, Sketch):
            raise TypeError(f"sketch is {sketch!r}; expected one such as Sketch(CountSketch(1000))")
        self.sketch = sketch
        self.d = whole_number("d", d)
        self.batch = batch_of(batch)
        self.count = 0
        self.next_row = 0
        self._sums: Any = np.zeros((math.prod(self.batch), sketch.distribution.size, self.d))

    def __repr__(self) -> str:
        """Return the shape and the number of rows."""
        return f"<{type(self).__name__} of {self.count} rows, d = {self.d}, batch {self.batch}, by {self.sketch!r}>"

    @property
    def _held_array(self) -> Any:
        return self._sums

    @where_arrays_are
    def update(self, K: Any, row_start: int | None = None, mask: Any = None) -> SketchedRows:
        """Add a chunk of rows.

        Parameters
        ----------
        K : array of shape (..., m, d)
            Rows, m ≥ 0 of them for each matrix of the batch.
        row_start : int, optional
            Number of the first row. Default: `next_row`, the row after the highest chunk so far. A number must not
            come twice, which is not checked.
        mask : array of bool, shape (..., m), optional
            True for a row that takes part.

        Returns
        -------
        SketchedRows
            The state itself.

        Raises
        ------
        TypeError, ValueError
            If an argument is wrong, or the batch or number of columns differs from the state's.
        NonFiniteError
            If the rows hold NaN or infinity outside the mask. The state is as it was.
        """
        matrices = as_matrices(K, "K", sparse=True).masked(mask)
        check_chunk(matrices, self)
        rows = Rows.of(matrices)
        with lock_of(self):
            start = self.next_row if row_start is None else row_start
            sums = unscaled_sketch(self.sketch, rows, start)
            self._take(sums, matrices.n, int(start) + matrices.n)
        return self

    @locked_with
    @where_arrays_are
    def merge(self, other: SketchedRows) -> SketchedRows:
        """Add the rows of another state, which must be other rows.

        Parameters
        ----------
        other : SketchedRows
            A state of the same sketch, batch and number of columns. It is not changed.

        Returns
        -------
        SketchedRows
            This state, now with the rows of both.

        Raises
        ------
        TypeError, ValueError
            If the states have different sketches, batches or numbers of columns.
        """
        check_type("other", other, SketchedRows, "SketchedRows")
        mine, its = ((s.sketch, s.d, s.batch) for s in (self, other))
        if mine != its:
            raise ValueError(f"other has sketch, d and batch {its}; expected {mine}")
        self._take(other._sums, other.count, other.next_row)
        return self

    def _take(self, sums: Any, count: int, next_row: int) -> None:
        held = self._sums
        if isinstance(held, np.ndarray):
            held = to_device(held, sums)
        elif isinstance(sums, np.ndarray):
            sums = to_device(sums, held)
        with np.errstate(over="ignore", invalid="ignore"):
            total = held + sums
        if not np.isfinite(total).all():
            raise ValueError("the sums of all rows overflow float64; scale K down. The state is as it was")
        self._sums, self.count, self.next_row = total, self.count + count, max(self.next_row, next_row)

    @where_arrays_are
    def result(self) -> Any:
        """Return S K for all rows so far.

        Returns
        -------
        array of float64, shape (..., size, d)
            A numpy array; a CuPy array on the CUDA device once some of the rows were there.
        """
        shape = (*self.batch, *self._sums.shape[1:])
        return (self._sums * self.sketch.distribution.scale).reshape(shape)

    @locked
    @where_arrays_are
    def parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the sums and the parameters of their sketch; see `StoredState`."""
        distribution = self.sketch.distribution
        if SKETCHES.get(type(distribution).__name__) is not type(distribution):
            raise TypeError(f"distribution is {distribution!r}; only distributions of levattn.sketch can be saved")
        fields = {
            "distribution": type(distribution).__name__,
            "parameters": {name: value for name, value in asdict(distribution).items() if name != "seed"},
            "seed": self.sketch.seed,
            "d": self.d,
            "batch": list(self.batch),
            "count": self.count,
            "next_row": self.next_row,
        }
        return fields, {"sums": to_numpy(self._sums)}

    @classmethod
    def from_parts(cls, fields: dict[str, Any], arrays: dict[str, Any]) -> SketchedRows:
        """Return the state of the same sums; see `StoredState`."""
        distribution = SKETCHES[fields["distribution"]](**fields["parameters"])
        d, batch = whole(fields["d"], 1), tuple(whole(size) for size in fields["batch"])
        # checked before memory is allocated for the claimed size
        sums = shaped(arrays["sums"], np.float64, (math.prod(batch), distribution.size, d))
        state = cls(Sketch(distribution, fields["seed"]), d, batch)
        state.count, state.next_row = whole(fields["count"]), whole(fields["next_row"])
        if max(state.count, state.next_row) > _ROWS:
            raise ValueError(f"{state.count} rows were summed, before row {state.next_row}")
        state._sums = sums
        return state
