"""Sums of a second moment: over fixed blocks of rows, in as many bits as needed, or running sums, which may decay."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import array_namespace, to_device, to_float64, to_numpy
from levattn._core.device import where_arrays_are
from levattn._core.formats import decode_half
from levattn._core.serialize import shaped
from levattn._core.types import Float64
from levattn._kernels import BLOCK, Rows, kernels_for
from levattn.linalg.accumulator import GramAccumulator
from levattn.linalg.factor import Factor
from levattn.linalg.gram import DoubleDouble, Exponents
from levattn.linalg.reading import check_finite, refuse_nonfinite, require_room
from levattn.states.block_buffer import BlockBuffer, rows_in_memory
from levattn.states.factors import factor_of, factor_of_sum

_FORMATS = ("float64", "float32", "float16", "bfloat16")


class BlockSums:
    """The second moment (b, d, d) of rows that are numbered as they come and summed in blocks."""

    def __init__(self, b: int, d: int) -> None:
        self._b, self._d = b, d
        self._weight: Float64 = np.zeros(b)
        # the sums, and rows that wait; both change at once, because several threads may read
        self._held: tuple[GramAccumulator, BlockBuffer | None] = GramAccumulator(b, d), None

    @property
    def _held_array(self) -> Any:
        return self._held[0]

    def add(self, rows: Rows, weights: Any, present: npt.NDArray[np.int64]) -> None:
        """Add rows, `present` of them (b,), or raise without a change; rows with weights are held in float64."""
        gained: Any = present
        if weights is not None:  # Σ w k kᵀ is the second moment of √w k
            weights, rows = to_numpy(weights), rows_in_memory(rows)
            gained = weights.sum(axis=1)
            keys = to_float64(rows.keys, rows.format) * np.sqrt(weights)[..., None]
            rows = Rows(keys, "float64", rows.mask)
        sums, tail = self._held
        sums, tail = sums.copy(), BlockBuffer(self._b, self._d, rows.format) if tail is None else tail.copy()
        before = tail.blocks * BLOCK + tail.count
        try:
            tail.push(rows, sums.add)
        except FloatingPointError:
            refuse_nonfinite(rows, before)
        self._held, self._weight = (sums, tail), self._weight + gained

    def settle(self) -> tuple[GramAccumulator, BlockBuffer | None]:
        """Add all whole blocks to the sums, and return the sums and the rows that wait."""
        sums, tail = self._held
        if tail is not None and tail.count >= BLOCK:
            sums, tail = sums.copy(), tail.copy()
            tail.flush(sums.add)
            self._held = sums, tail
        return sums, tail

    def _parts(self) -> tuple[GramAccumulator, Rows]:
        sums, tail = self.settle()
        return sums, (tail or BlockBuffer(self._b, self._d, "float64")).rows

    def _total(self) -> tuple[DoubleDouble, Exponents]:
        sums, rows = self._parts()
        return sums.total(rows)

    def read(self) -> Float64:
        """Return the moment."""
        moments, exponents = self._total()
        with np.errstate(over="ignore"):
            return np.array(moments.scaled(-exponents).in_main_memory().high)

    def apart_from_last(self) -> Float64:
        """Return the moment of all columns but the last, less their projections to it, in the digits of the sums."""
        moments, exponents = self._total()
        moments, powers = moments.in_main_memory(), exponents[:, :-1]
        out = np.zeros((self._b, self._d - 1, self._d - 1))
        for item, G in enumerate(moments.high):
            B = np.eye(self._d)
            B[-1, :-1] = -G[:-1, -1] / G[-1, -1]
            H = moments.in_basis(item, B)  # what the rounding of B leaves on the last column is small
            out[item] = H[:-1, :-1] - np.outer(H[:-1, -1], H[:-1, -1]) / H[-1, -1]
        return np.asarray(np.ldexp(out, powers[:, :, None] + powers[:, None, :]))

    def weight(self) -> Float64:
        """Return the sum of the weights."""
        return self._weight.copy()

    def factor(self) -> Factor:
        """Return its factor."""
        return factor_of(*self._parts())

    def check(self, other: BlockSums) -> None:
        """Raise if another's rows cannot be added."""
        _, tail = self._held
        _, its = other._held
        if tail is not None and its is not None:
            mine, format = tail.rows.format, its.rows.format
            if mine != format:
                raise TypeError(f"other has keys of dtype {format}; expected {mine}, as here")

    def merge(self, other: BlockSums, _count: npt.NDArray[np.int64]) -> None:
        """Add another's rows."""
        (sums, tail), (_, its) = self.settle(), other._held
        if its is not None and tail is None:
            tail = BlockBuffer(self._b, self._d, its.rows.format)
        total = other._total()
        sums = sums.copy()
        sums.merge(*total)
        self._held = sums, tail
        self._weight = self._weight + other._weight

    def parts(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return the fields and arrays for `from_parts`."""
        sums, tail = self.settle()
        fields, arrays = sums.parts()
        arrays |= {"weight": self._weight}
        if tail is not None:
            arrays |= {"tail": tail.rows.keys}
        return fields | {"format": None if tail is None else tail.rows.format}, arrays

    @classmethod
    def from_parts(cls, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], b: int, d: int) -> BlockSums:
        """Restore the sums from `parts`, or raise ValueError, TypeError or LookupError."""
        shaped(arrays["exponents"], np.int32, (b, d))  # before the claims of the fields take memory
        self = cls(b, d)
        sums, tail = GramAccumulator.from_parts(fields, arrays, b, d), None
        self._weight = _weights_of(arrays, b)
        if fields["format"] not in (None, *_FORMATS):
            raise ValueError(f"keys are of format {fields['format']!r}")
        if fields["format"] is not None:
            tail = BlockBuffer(b, d, fields["format"])
            tail.hold(sums.blocks.count, arrays["tail"])
        self._held = sums, tail
        return self


class RunningSums:
    """The diagonal (b, d) of a second moment, or all of it (b, d, d), multiplied by decay (b,) before each row.

    Arrays have the library and the device of the first rows, but are numpy's for torch in main memory.
    """

    def __init__(self, b: int, d: int, full: bool, decay: Float64 | None) -> None:
        if full:
            require_room(b, d)
        self.decay = decay
        self._shape = (b, d, d) if full else (b, d)
        self._full = full
        self.rows = 0
        self.held: Any = None

    @property
    def _held_array(self) -> Any:
        return self.held

    def sums(self) -> Any:
        """Return the moment and the sum of weights as they are held; do not write to them."""
        if self.held is None:
            return np.zeros(self._shape), np.zeros(self._shape[:1])
        return self.held

    def add(self, rows: Rows, weights: Any, _present: npt.NDArray[np.int64]) -> None:
        """Add rows, or raise without a change."""
        held, X = self.held, decode_half(rows.keys, rows.format)
        if held is not None and array_namespace(held[0]) is not array_namespace(X):
            held = tuple(to_device(to_numpy(part), X) for part in held)
        with np.errstate(over="ignore", invalid="ignore"):
            new = kernels_for("tokens", X).add_squares(X, rows.mask, weights, self.decay, held, full=self._full)
        try:
            check_finite(rows, to_numpy(new[0]))
        except FloatingPointError:
            refuse_nonfinite(rows, self.rows)
        self.held, self.rows = new, self.rows + rows.shape[1]

    def read(self) -> Any:
        """Return the moment, a copy."""
        return _copied(self.sums()[0])

    def weight(self) -> Any:
        """Return the sum of the weights, a copy."""
        return _copied(self.sums()[1])

    def factor(self) -> Factor:
        """Return its factor, in main memory."""
        total = to_numpy(self.read())
        if not self._full:
            total = np.where(np.eye(self._shape[1], dtype=np.bool_), total[:, :, None], 0.0)
        exponents = np.zeros(total.shape[:2], np.int32)
        like = Rows(np.empty((total.shape[0], 0, total.shape[1])), "float64")
        return factor_of_sum(DoubleDouble.plain(total), exponents, like)

    def check(self, other: RunningSums) -> None:
        """Raise if the sums of later rows cannot be added."""
        if self.held is None or other.held is None:
            return
        here, there = (array_namespace(sums.held[0]) for sums in (self, other))
        if here is not there:
            raise TypeError(
                f"this state holds arrays of {here.__name__} and was given arrays of {there.__name__}; expected one "
                "library. Keep a state for each, and merge them by their bytes"
            )

    @where_arrays_are
    def merge(self, other: RunningSums, count: npt.NDArray[np.int64]) -> None:
        """Add the sums of later rows, `count` (b,) of them."""
        if other.held is None:
            return
        total, weight = other.held
        if self.held is not None:
            xp = array_namespace(total)
            mine, mass = self.held
            if self.decay is not None:
                kept = self.decay**count
                kept = kept if isinstance(mine, np.ndarray) else to_device(kept, mine)
                mine = mine * xp.reshape(kept, (-1, *[1] * (mine.ndim - 1)))
                mass = mass * kept
            total, weight = mine + total, mass + weight
        self.held, self.rows = (total, weight), self.rows + other.rows

    def parts(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return the fields and arrays for `restore`."""
        total, weight = map(to_numpy, self.sums())
        return {"rows": self.rows}, {"total": total, "weight": weight}

    def restore(self, rows: int, total: Float64, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Restore a moment and the other arrays of `parts`, or raise ValueError or LookupError."""
        diagonal = np.diagonal(total, axis1=1, axis2=2) if self._full else total
        if np.isnan(total).any() or (diagonal < 0).any():
            raise ValueError("a sum of squares is negative or NaN")
        self.rows, self.held = rows, (total, _weights_of(arrays, len(total)))


def _weights_of(arrays: dict[str, npt.NDArray[Any]], b: int) -> Float64:
    """Return the sums of weights among the arrays of a state, or raise ValueError or LookupError."""
    weight = shaped(arrays["weight"], np.float64, (b,))
    if (weight < 0).any():
        raise ValueError("a sum of weights is negative")
    return weight


def _copied(array: Any) -> Any:
    return array_namespace(array).asarray(array, copy=True)
